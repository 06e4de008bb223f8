"""Rank 0's output: the console, metrics.jsonl and trackers.

Each step's `Record` goes to all three; `metrics.jsonl` holds one JSON object per line. This module does not import
torch: `status` is shown while torch loads.
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
    from ithaka.train.track import FinalStatus, Trackers


def status(what: str) -> AbstractContextManager[Any]:
    """Context manager that shows a spinner and `what` on stderr, on rank 0 and only on a terminal."""
    visible = sys.stderr.isatty() and is_rank_0()  # if colors are forced, rich takes a pipe for a terminal
    return RichConsole(stderr=True, force_terminal=visible).status(f"{escape(what)} ...")


@dataclass(frozen=True)
class Record:
    """Metrics of one optimizer step over all ranks. Step 0 is the state before the first update."""

    step: int  # number of updates so far
    loss: float | None  # mean over the valid tokens of the global batch, before the update
    val_loss: float | None  # mean over the valid tokens of the validation set, after the update
    lr: float | None
    grad_norm: float | None  # before clipping
    tokens: int  # input tokens since the start of the run
    label_tokens: int  # valid labels in this step, by which the loss is divided
    tokens_per_s: float | None  # input tokens
    step_s: float | None  # without validation and saving
    mfu: float | None  # None if the device's peak FLOPS are unknown
    device_peak_bytes: int | None  # maximum over ranks since the start; None on CPU
    host_peak_bytes: int  # maximum resident set size over ranks since the start
    balance: float | None = None  # attention work, maximum / mean over ranks; None: equal on all ranks
    ring_bytes: int = 0  # k, v, dk and dv sent in this step, maximum over the ring's ranks
    # "loss/NAME" and "val_loss/NAME" for each data source, top-level keys in metrics.jsonl. Empty with one source.
    sources: dict[str, float] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        values = asdict(self)
        return values.pop("sources") | values


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
    """Format the record as one line, without values that were not measured."""
    parts = {
        "loss": record.loss is not None and f"{record.loss:.4f}",
        "val": record.val_loss is not None and f"{record.val_loss:.4f}",
        # Only an evaluation's totals, not each task at each length.
        **{name: f"{mean:.4f}" for name, mean in record.sources.items() if name.count("/") == 1},
        "lr": record.lr is not None and f"{record.lr:.2e}",
        "grad": record.grad_norm is not None and f"{record.grad_norm:.3f}",
        "": record.tokens_per_s is not None and f"{format_count(record.tokens_per_s)} tok/s",
        "mfu": record.mfu is not None and f"{100 * record.mfu:.1f}%",
        "device": record.device_peak_bytes is not None and format_bytes(record.device_peak_bytes),
        "host": format_bytes(record.host_peak_bytes),
        "balance": record.balance is not None and f"{record.balance:.3f}",
        "ring": record.ring_bytes > 0 and format_bytes(record.ring_bytes),
    }
    return "  ".join(f"{name} {value}".strip() for name, value in parts.items() if value)


def describe_progress(report: StepProgress) -> str:
    left = "" if report.eta_s is None else f"  {timedelta(seconds=round(report.eta_s))} left"
    return f"{report.phase or 'starting'}  {report.percent:.0f}%{left}"


def open_metrics(path: Path, step: int) -> FileIO:
    """Open the file to append records, unbuffered, and drop lines after `step`, which a resumed run writes again."""
    lines = [line for line in _complete_lines(path) if json.loads(line)["step"] <= step] if step else []
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    os.replace(temporary, path)
    return FileIO(path, "a")


def _complete_lines(path: Path) -> list[str]:
    """Lines of the file, without a partial last line that a killed process may leave."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    return [line for line in lines[:-1] if line]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Step records, without progress reports and events."""
    return [record for record in map(json.loads, _complete_lines(path)) if not record.keys() & {"progress", "event"}]


class Console:
    """Prints and records a run on rank 0. On other ranks (`active=False`) every method does nothing.

    On a terminal it shows a progress bar with the remaining time, otherwise one line per step."""

    def __init__(
        self, run_dir: Path, num_steps: int, step: int = 0, trackers: Trackers | None = None, active: bool = True
    ):
        self.active, self.num_steps = active, num_steps
        self._rich = RichConsole(highlight=False, soft_wrap=True, quiet=not active)
        self._trackers = trackers
        self._open = ExitStack()
        self._unwritten, self._metrics_lock = b"", Lock()  # lines for metrics.jsonl
        self._unwritable = set[str]()
        if active:
            self._metrics = self._open.enter_context(open_metrics(run_dir / "metrics.jsonl", step))
        self._plain = not (active and self._rich.is_terminal)
        no_wrap = Column(no_wrap=True)  # in a narrow terminal only the status wraps
        columns = (
            TextColumn("[bold]train"),
            BarColumn(bar_width=20, table_column=no_wrap),
            MofNCompleteColumn(table_column=no_wrap),
            TimeRemainingColumn(table_column=no_wrap),
            TextColumn("{task.fields[status]}", table_column=Column()),
        )
        self._bar = self._open.enter_context(Progress(*columns, console=self._rich, disable=self._plain))
        self._task = self._bar.add_task("train", total=num_steps, completed=step, status="")

    def close(self, final_status: FinalStatus = "finished") -> None:
        """Close the progress bar, the files and the trackers, which record how the run ended."""
        self._open.close()
        for message in self._trackers.close(final_status) if self._trackers is not None else ():
            self.print(message)

    @contextmanager
    def show_activity(self, what: str) -> Iterator[None]:
        """Show an activity other than a step in the progress bar."""
        before = self._bar.tasks[0].fields["status"]
        self._bar.update(self._task, status=f"{what} ...")
        yield
        self._bar.update(self._task, status=before)

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Wrap writing files that the run does not need: an OSError does not end the run. It is reported once, until
        `what` can be written again."""
        try:
            yield
        except OSError as error:
            if what not in self._unwritable:
                self.print(f"The {what} cannot be written ({error}); the run continues without it")
            self._unwritable.add(what)
        else:
            self._unwritable.discard(what)

    def print(self, text: str) -> None:
        """Print `text` without markup, above the progress bar if there is one."""
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
        for message in self._trackers.log(record.values, record.step) if self._trackers is not None else ():
            self.print(message)
        self._bar.update(self._task, completed=record.step)
        self._show(record.step, " ", describe(record))
        if record.val_loss is not None and not self._plain:
            self.print(f"step {record.step}/{self.num_steps}  validation loss {record.val_loss:.4f}")

    def progress(self, report: StepProgress) -> None:
        """Report the progress of a long step."""
        self._write({"step": report.step, "progress": asdict(report)})
        self._show(report.step, " in progress:", describe_progress(report))

    def event(self, step: int, message: str, **values: Any) -> None:
        """Print an event and record it in metrics.jsonl."""
        if self.active:
            self._write({"step": step, "event": message, **values})
            self.print(message)

    def _write(self, values: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl. If the disk is full or read-only, retry it with the next line."""
        with self._metrics_lock:  # another thread reports progress
            before, self._unwritten = self._unwritten, self._unwritten + f"{json.dumps(values)}\n".encode()
            try:
                self._unwritten = self._unwritten[self._metrics.write(self._unwritten) :]
            except OSError as error:
                if not before:
                    self.print(
                        f"{self._metrics.name} cannot be written ({error.strerror}); keeping its lines in memory"
                    )

    def _show(self, step: int, label: str, status: str) -> None:
        self._bar.update(self._task, status=status)
        if self._plain:
            self.print(f"step {step}/{self.num_steps}{label} {status}")
