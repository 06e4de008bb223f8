"""What a run says while it goes: rank 0's console, metrics.jsonl and TensorBoard.

The same record per step goes everywhere; `metrics.jsonl` holds one JSON object per line with the keys of
`Record`. This file imports no torch: while it loads, `status` says so.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console as RichConsole
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.text import Text

from ithaka.plan.show import size

if TYPE_CHECKING:
    from ithaka.profile.progress import Report

PATIENCE_S = 5.0  # what takes less is not worth a line


@contextmanager
def status(what: str) -> Iterator[None]:
    """Say `what` on stderr while the code inside runs: on a terminal at once, beside a spinner that goes when it is
    done; elsewhere on a line once it takes long. Of all ranks, rank 0 speaks."""
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    screen = RichConsole(highlight=False, soft_wrap=True, stderr=True)
    if sys.stderr.isatty() and not screen.is_dumb_terminal:  # rich calls a pipe a terminal where colours are forced
        spinner = Spinner("dots", Text(f"{what} ..."))
        with Live(spinner, console=screen, transient=True, redirect_stdout=sys.stdout.isatty()):
            yield
        return
    timer = threading.Timer(PATIENCE_S, print, (f"{what} ...",), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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


def step_flops(num_matmul_params: int, num_tokens: int, head_size: int, num_pairs: int) -> float:
    """Useful FLOPs of forward and backward: 6 per parameter and token, 12 per element of the heads (`head_size`) and
    query-key pair that attention visits, summed over layers. Recomputation does not count."""
    return 6.0 * num_matmul_params * num_tokens + 12.0 * head_size * num_pairs


def host_peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def amount(value: float) -> str:
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
        "lr": record.lr is not None and f"{record.lr:.2e}",
        "grad": record.grad_norm is not None and f"{record.grad_norm:.3f}",
        "": record.tokens_per_s is not None and f"{amount(record.tokens_per_s)} tok/s",
        "mfu": record.mfu is not None and f"{100 * record.mfu:.1f}%",
        "device": record.device_peak_bytes is not None and size(record.device_peak_bytes),
        "host": size(record.host_peak_bytes),
    }
    return "  ".join(f"{name} {words}".strip() for name, words in parts.items() if words)


def describe_progress(report: Report) -> str:
    left = "" if report.eta_s is None else f"  {timedelta(seconds=round(report.eta_s))} left"
    return f"{report.phase or 'starting'}  {report.percent:.0f}%{left}"


class Metrics:
    """Appends records to metrics.jsonl, each line flushed; progress of a long step goes between them.  A resumed run
    first drops the lines after `step`, which belong to work lost with the old process and will be done again."""

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= step] if step else []
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, path)
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open as long as the run
        self.close = self._file.close

    def write(self, entry: Record | Report) -> None:
        values = asdict(entry) if isinstance(entry, Record) else {"step": entry.step, "progress": asdict(entry)}
        self._file.write(json.dumps(values) + "\n")  # one call: progress comes from a thread of its own


def _whole_lines(path: Path) -> list[str]:
    """A killed process may leave half a line at the end."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    return [line for line in lines[:-1] if line]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of whole steps."""
    return [record for record in map(json.loads, _whole_lines(path)) if "progress" not in record]


class Console:
    """Shows a run on rank 0 and keeps its files; on other ranks (`active=False`) every method does nothing.

    On a terminal a progress bar with an estimate of the time left, else a plain line per step."""

    def __init__(self, run_dir: Path, num_steps: int, step: int = 0, tensorboard: bool = False, active: bool = True):
        self.active, self.num_steps = active, num_steps
        self._rich = RichConsole(highlight=False, soft_wrap=True, quiet=not active)
        self._progress: Progress | None = None
        self._events: Any = None
        if active:
            self._metrics = Metrics(run_dir / "metrics.jsonl", step)
        if active and tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # It hides an earlier process's events after `step` itself.
            self._events = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1 if step else None)
        if active and self._rich.is_terminal:
            words = TextColumn("{task.fields[status]}")
            columns = (TextColumn("[bold]train"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, words, console=self._rich)
            self._progress.add_task("train", total=num_steps, completed=step, status="")
            self._progress.start()

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Says what is done besides steps: in the progress bar where there is one."""
        if self._progress is None:
            with status(what) if self.active else nullcontext():
                yield
            return
        before = self._progress.tasks[0].fields["status"]
        self._show(0, "", f"{what} ...")
        yield
        self._show(0, "", before)

    def say(self, text: str) -> None:
        """Prints `text` as it is, above the progress bar where there is one."""
        self._rich.print(escape(text))

    def facts(self, title: str, facts: dict[str, str]) -> None:
        width = max(map(len, facts))
        self._rich.print(f"[bold]{escape(title)}[/bold]")
        for key, value in facts.items():
            self.say(f"  {key:<{width}}  {value}")

    def step(self, record: Record) -> None:
        if not self.active:
            return
        self._metrics.write(record)
        for key, value in asdict(record).items() if self._events is not None else ():
            if key != "step" and value is not None:
                self._events.add_scalar(key, value, record.step)
        self._show(record.step, " ", describe(record), completed=record.step)
        if record.val_loss is not None and self._progress is not None:
            self.say(f"step {record.step}/{self.num_steps}  validation loss {record.val_loss:.4f}")

    def progress(self, report: Report) -> None:
        """Where a long step is."""
        self._metrics.write(report)
        self._show(report.step, " under way:", describe_progress(report))

    def _show(self, step: int, what: str, words: str, **changes: Any) -> None:
        if self._progress is None:
            self.say(f"step {step}/{self.num_steps}{what} {words}")
        else:
            self._progress.update(self._progress.task_ids[0], status=words, **changes)

    def close(self) -> None:
        """Ends the bar and the files."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self.active:
            self._metrics.close()
        if self._events is not None:
            self._events.close()
