"""What a run prints: a progress bar or lines, and a spinner while torch loads. Imports no torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Column

from ithaka.comm.rank import is_rank_0
from ithaka.config.units import format_bytes, format_count
from ithaka.log.metrics import MetricsFile, StepRecord
from ithaka.log.trackers import FinalStatus, Trackers

if TYPE_CHECKING:
    from ithaka.profile.progress import StepProgress

# Metrics of DPO that a line does not show.
HIDDEN = (
    "logps/",
    "val_logps/",
    *(f"{split}rewards/{side}" for split in ("", "val_") for side in ("chosen", "rejected")),
)


def status(what: str) -> Status:
    """Show a spinner and `what` on stderr while inside, on rank 0 and only on a terminal."""
    # With forced colors, rich treats a pipe as a terminal.
    visible = sys.stderr.isatty() and is_rank_0()
    return RichConsole(stderr=True, force_terminal=visible).status(f"{escape(what)} ...")


def show_share(what: str, spinner: Status | None = None) -> Callable[[float], None]:
    """Return a function that shows on stderr how much of `what` is done and the time left: in the
    spinner of `status` or over the last line on a terminal, else in a line every 30 s."""
    start_s = time.monotonic()
    shown_s = start_s

    def show(share: float) -> None:
        nonlocal shown_s
        now_s = time.monotonic()
        visible = sys.stderr.isatty()
        pause_s = 1 if visible else 30
        if not 0 < share < 1 or now_s - shown_s < pause_s:
            return
        shown_s = now_s
        left_s = (now_s - start_s) * (1 - share) / share
        line = f"{what}: {share:.0%} done, {left_s:.0f} s left"
        if visible and spinner is not None:
            spinner.update(escape(line))
        else:
            print(f"{line}  ", end="\r" if visible else "\n", file=sys.stderr, flush=True)

    return show


def describe(record: StepRecord, validation_name: str = "loss") -> str:
    """Format the measured values as one line. `validation_name`: what validation measures."""
    val = "val" if validation_name == "loss" else f"val {validation_name}"
    parts = []
    if record.loss is not None:
        parts.append(f"loss {record.loss:.4f}")
    if record.val_loss is not None:
        parts.append(f"{val} {record.val_loss:.4f}")
    for name, mean in record.sources.items():
        # Only an evaluation's totals, not each task at each length.
        if name.count("/") == 1 and not name.startswith(HIDDEN):
            parts.append(f"{name} {mean:.4f}")
    if record.lr is not None:
        parts.append(f"lr {record.lr:.2e}")
    if record.grad_norm is not None:
        parts.append(f"grad {record.grad_norm:.3f}")
    if record.tokens_per_s is not None:
        parts.append(f"{format_count(record.tokens_per_s)} tok/s")
    if record.mfu is not None:
        parts.append(f"mfu {100 * record.mfu:.1f}%")
    if record.device_peak_bytes is not None:
        parts.append(f"device {format_bytes(record.device_peak_bytes)}")
    parts.append(f"host {format_bytes(record.host_peak_bytes)}")
    if record.balance is not None:
        parts.append(f"balance {record.balance:.3f}")
    if record.ring_bytes > 0:
        parts.append(f"ring {format_bytes(record.ring_bytes)}")
    return "  ".join(parts)


def describe_progress(report: StepProgress) -> str:
    left = "" if report.eta_s is None else f"  {timedelta(seconds=round(report.eta_s))} left"
    return f"{report.phase or 'starting'}  {report.percent:.0f}%{left}"


class Console:
    """Prints and records a run on rank 0. With `active=False`, on other ranks, it does nothing.

    On a terminal it shows a progress bar with the remaining time, otherwise one line per step."""

    def __init__(
        self,
        run_dir: Path,
        num_steps: int,
        step: int = 0,
        trackers: Trackers | None = None,
        active: bool = True,
        validation_name: str = "loss",
    ):
        self.active = active
        self.num_steps = num_steps
        self._validation_name = validation_name
        self._rich = RichConsole(highlight=False, soft_wrap=True, quiet=not active)
        self._trackers = trackers
        self._open = ExitStack()
        self._unwritable = set[str]()
        if active:
            self._metrics = MetricsFile(run_dir / "metrics.jsonl", step, self.print)
            self._open.enter_context(self._metrics.file)
        self._plain = not (active and self._rich.is_terminal)
        no_wrap = Column(no_wrap=True)  # in a narrow terminal only the status wraps
        columns = (
            TextColumn("[bold]train"),
            BarColumn(bar_width=20, table_column=no_wrap),
            MofNCompleteColumn(table_column=no_wrap),
            TimeRemainingColumn(table_column=no_wrap),
            TextColumn("{task.fields[status]}", table_column=Column()),
        )
        self._bar = self._open.enter_context(
            Progress(*columns, console=self._rich, disable=self._plain)
        )
        self._task = self._bar.add_task("train", total=num_steps, completed=step, status="")

    def close(self, final_status: FinalStatus = "finished") -> None:
        """Close the progress bar, the files and the trackers, which record how the run ended."""
        self._open.close()
        if self._trackers is not None:
            self._print_all(self._trackers.close(final_status))

    def _print_all(self, messages: Iterable[str]) -> None:
        for message in messages:
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
        """Wrap the writing of optional files: an error does not end the run. It is reported once,
        until `what` can be written again."""
        try:
            yield
        except Exception as error:
            if what not in self._unwritable:
                reason = f"{type(error).__name__}: {error}"
                self.print(f"The {what} cannot be written ({reason}); the run continues without it")
            self._unwritable.add(what)
        else:
            self._unwritable.discard(what)

    def print(self, text: str) -> None:
        """Print `text` without markup, above the progress bar if there is one."""
        self._print(escape(text))

    def _print(self, markup: str) -> None:
        with suppress(OSError):  # a log on a full disk must not end the run
            self._rich.print(markup)

    def table(self, title: str, rows: dict[str, str]) -> None:
        width = max(map(len, rows))
        self._print(f"[bold]{escape(title)}[/bold]")
        for key, value in rows.items():
            self.print(f"  {key:<{width}}  {value}")

    def step(self, record: StepRecord) -> None:
        if not self.active:
            return
        self._metrics.write(record.values)
        if self._trackers is not None:
            self._print_all(self._trackers.log(record.values, record.step))
        self._bar.update(self._task, completed=record.step)
        if record.val_loss is not None and not self._plain:
            # In a line of its own: with it, the bar's status would not fit in most terminals.
            name = self._validation_name
            step = f"step {record.step}/{self.num_steps}"
            self.print(f"{step}  validation {name} {record.val_loss:.4f}")
            record = replace(record, val_loss=None)
        self._show(record.step, " ", describe(record, self._validation_name))

    def saved(self, step: int, checkpoint: Path, seconds: float, num_bytes: int) -> None:
        """Record a complete checkpoint in metrics.jsonl, and tell callbacks."""
        self.times(step, save_s=seconds, saved_bytes=num_bytes)
        if self._trackers is not None:
            self._print_all(self._trackers.notify("on_save", step, checkpoint))

    def progress(self, report: StepProgress) -> None:
        """Report the progress of a long step."""
        self._metrics.write({"step": report.step, "progress": asdict(report)})
        self._show(report.step, " in progress:", describe_progress(report))

    def times(self, step: int, **values: object) -> None:
        """Record in metrics.jsonl how long something other than a step took."""
        if self.active:
            self._metrics.write({"step": step, "times": values})

    def event(self, step: int, message: str, **values: object) -> None:
        """Print an event and record it in metrics.jsonl."""
        if self.active:
            self._metrics.write({"step": step, "event": message, **values})
            self.print(message)

    def _show(self, step: int, label: str, status: str) -> None:
        self._bar.update(self._task, status=status)
        if self._plain:
            self.print(f"step {step}/{self.num_steps}{label} {status}")
