"""What a run prints and records: rank 0's console, metrics.jsonl and trackers.

The same record per step goes everywhere; `metrics.jsonl` holds one JSON object per line with the keys of
`Record`. Imports no torch: `status` is shown while torch loads.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from ithaka.dist.rank import is_rank_0
from ithaka.plan.show import format_bytes

if TYPE_CHECKING:
    from ithaka.profile.progress import StepProgress
    from ithaka.train.track import Ending, Trackers


def status(what: str) -> AbstractContextManager[Any]:
    """Show `what` beside a spinner on stderr while the code inside runs: by rank 0, and on a terminal only."""
    # rich calls a pipe a terminal where colours are forced.
    shown = sys.stderr.isatty() and is_rank_0()
    return RichConsole(stderr=True, force_terminal=shown).status(f"{escape(what)} ...")


@dataclass(frozen=True)
class Record:
    """One optimizer step over all ranks.  Step 0 stands for the state before the first update."""

    step: int  # updates done
    loss: float | None  # mean over the valid tokens of the whole global batch, before the update
    val_loss: float | None  # mean over the valid tokens of the validation set, after the update
    lr: float | None
    grad_norm: float | None  # before clipping
    tokens: int  # input tokens read since the beginning of the run
    label_tokens: int  # valid labels of this step: the divisor of the loss
    tokens_per_s: float | None  # input tokens per second of this step
    step_s: float | None  # without validation and saving
    mfu: float | None  # None where the device's peak is not known
    device_peak_bytes: int | None  # largest of any rank since the start; None on CPU
    host_peak_bytes: int  # largest resident size of any rank's process since the start
    balance: float | None = None  # attention of the rank with most over the mean; None: all ranks have the same
    ring_bytes: int = 0  # k, v, dk and dv that the ring's member with most sent in this step
    # "loss/NAME" and "val_loss/NAME" of each source of the data, as keys of the record itself. Empty: there is one
    sources: dict[str, float] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        values = asdict(self)
        return values.pop("sources") | values


def step_flops(num_matmul_params: int, num_tokens: int, head_size: int, num_pairs: int) -> float:
    """Useful FLOPs of forward and backward: 6 per parameter and token, 12 per element of the heads (`head_size`) and
    query-key pair that attention visits, summed over layers. Recomputation does not count."""
    return 6.0 * num_matmul_params * num_tokens + 12.0 * head_size * num_pairs


def host_peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def format_count(value: float) -> str:
    """12345 -> '12.3K'."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= unit:
            return f"{value / unit:.3g}{name}" if value < 999.5 * unit else f"{value / unit:.0f}{name}"
    return f"{value:.3g}"


def describe(record: Record) -> str:
    """The record on one line; what was not measured is left out."""
    parts = {
        "loss": record.loss is not None and f"{record.loss:.4f}",
        "val": record.val_loss is not None and f"{record.val_loss:.4f}",
        # Of an evaluation the figures, not each task at each length.
        **{name: f"{value:.4f}" for name, value in record.sources.items() if name.count("/") == 1},
        "lr": record.lr is not None and f"{record.lr:.2e}",
        "grad": record.grad_norm is not None and f"{record.grad_norm:.3f}",
        "": record.tokens_per_s is not None and f"{format_count(record.tokens_per_s)} tok/s",
        "mfu": record.mfu is not None and f"{100 * record.mfu:.1f}%",
        "device": record.device_peak_bytes is not None and format_bytes(record.device_peak_bytes),
        "host": format_bytes(record.host_peak_bytes),
        "balance": record.balance is not None and f"{record.balance:.3f}",
        "ring": record.ring_bytes > 0 and format_bytes(record.ring_bytes),
    }
    return "  ".join(f"{name} {words}".strip() for name, words in parts.items() if words)


def describe_progress(report: StepProgress) -> str:
    left = "" if report.eta_s is None else f"  {timedelta(seconds=round(report.eta_s))} left"
    return f"{report.phase or 'starting'}  {report.percent:.0f}%{left}"


def open_metrics(path: Path, step: int) -> FileIO:
    """To append records, unbuffered. A resumed run first drops the lines after `step`, which belong to work lost
    with the old process and will be done again."""
    kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= step] if step else []
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(temporary, path)
    return FileIO(path, "a")


def _whole_lines(path: Path) -> list[str]:
    """A killed process may leave half a line at the end."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    return [line for line in lines[:-1] if line]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of whole steps."""
    return [record for record in map(json.loads, _whole_lines(path)) if not record.keys() & {"progress", "event"}]


class Console:
    """Shows a run on rank 0 and keeps its files; on other ranks (`active=False`) every method does nothing.

    On a terminal a progress bar with an estimate of the time left, else a plain line per step."""

    def __init__(
        self, run_dir: Path, num_steps: int, step: int = 0, trackers: Trackers | None = None, active: bool = True
    ):
        self.active, self.num_steps = active, num_steps
        self._rich = RichConsole(highlight=False, soft_wrap=True, quiet=not active)
        self._trackers = trackers
        self._open = ExitStack()
        self._unwritten, self._writing = b"", Lock()  # lines of metrics.jsonl
        self._unwritable = set[str]()
        if active:
            self._metrics = self._open.enter_context(open_metrics(run_dir / "metrics.jsonl", step))
        self._plain = not (active and self._rich.is_terminal)
        whole = Column(no_wrap=True)  # in a narrow terminal the words take more lines
        columns = (
            TextColumn("[bold]train"),
            BarColumn(bar_width=20, table_column=whole),
            MofNCompleteColumn(table_column=whole),
            TimeRemainingColumn(table_column=whole),
            TextColumn("{task.fields[status]}", table_column=Column()),
        )
        self._bar = self._open.enter_context(Progress(*columns, console=self._rich, disable=self._plain))
        self._task = self._bar.add_task("train", total=num_steps, completed=step, status="")

    def close(self, ending: Ending = "finished") -> None:
        """End the progress bar, the files and the trackers, which record how the run ended."""
        self._open.close()
        for words in self._trackers.close(ending) if self._trackers is not None else ():
            self.print(words)

    @contextmanager
    def show_activity(self, what: str) -> Iterator[None]:
        """Says in the progress bar what is done besides steps."""
        before = self._bar.tasks[0].fields["status"]
        self._bar.update(self._task, status=f"{what} ...")
        yield
        self._bar.update(self._task, status=before)

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Around writing files that the run can do without: an OSError is reported, once until `what` can be written
        again, and does not end the run."""
        try:
            yield
        except OSError as error:
            if what not in self._unwritable:
                self.print(f"The {what} cannot be written ({error}); the run continues without it")
            self._unwritable.add(what)
        else:
            self._unwritable.discard(what)

    def print(self, text: str) -> None:
        """Prints `text` as it is, above the progress bar where there is one."""
        self._rich.print(escape(text))

    def facts(self, title: str, facts: dict[str, str]) -> None:
        width = max(map(len, facts))
        self._rich.print(f"[bold]{escape(title)}[/bold]")
        for key, value in facts.items():
            self.print(f"  {key:<{width}}  {value}")

    def step(self, record: Record) -> None:
        if not self.active:
            return
        self._write(record.values)
        for words in self._trackers.log(record.values, record.step) if self._trackers is not None else ():
            self.print(words)
        self._bar.update(self._task, completed=record.step)
        self._show(record.step, " ", describe(record))
        if record.val_loss is not None and not self._plain:
            self.print(f"step {record.step}/{self.num_steps}  validation loss {record.val_loss:.4f}")

    def progress(self, report: StepProgress) -> None:
        """Where a long step is."""
        self._write({"step": report.step, "progress": asdict(report)})
        self._show(report.step, " under way:", describe_progress(report))

    def event(self, step: int, words: str, **values: Any) -> None:
        """Something that happened besides steps: said, and a line of metrics.jsonl."""
        if self.active:
            self._write({"step": step, "event": words, **values})
            self.print(words)

    def _write(self, values: dict[str, Any]) -> None:
        """What a disk that is full, or read-only, does not take is kept for the next line."""
        with self._writing:  # progress comes from a thread of its own
            before, self._unwritten = self._unwritten, self._unwritten + f"{json.dumps(values)}\n".encode()
            try:
                self._unwritten = self._unwritten[self._metrics.write(self._unwritten) :]
            except OSError as error:
                if not before:
                    self.print(
                        f"{self._metrics.name} cannot be written ({error.strerror}); keeping its lines in memory"
                    )

    def _show(self, step: int, what: str, words: str) -> None:
        self._bar.update(self._task, status=words)
        if self._plain:
            self.print(f"step {step}/{self.num_steps}{what} {words}")
