"""Rank 0's output: the console, metrics.jsonl and trackers.

Each step's `Record` goes to all three; `metrics.jsonl` holds one JSON object per line, with null for values that are
not finite. Trackers are configured by their own environment variables (WANDB_MODE=offline, TRACKIO_DIR,
MLFLOW_TRACKING_URI); RUN_DIR/track.json holds the ids with which a resumed run continues its entries. This module does
not import torch: `status` is shown while torch loads.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import psutil
from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Column

from ithaka.comm.rank import is_rank_0
from ithaka.config import Config, ConfigError, input_error, to_dict
from ithaka.config.units import format_bytes, format_count, format_json

if TYPE_CHECKING:
    from ithaka.profile.timeline import StepProgress

PROJECT = "ithaka"
IDS_FILE = "track.json"
# Names from Hugging Face's Trainer. Other metrics are train/METRIC, and train/SOURCE_METRIC for one data source.
METRIC_NAMES = {"val_loss": "eval/loss", "lr": "train/learning_rate", "tokens": "train/num_input_tokens_seen"}

# Metrics of DPO that a line does not show.
HIDDEN = (
    "logps/",
    "val_logps/",
    *(f"{split}rewards/{side}" for split in ("", "val_") for side in ("chosen", "rejected")),
)

FinalStatus = Literal["finished", "failed", "killed"]  # killed: by a signal
WANDB_EXIT_CODES: dict[FinalStatus, int] = {"finished": 0, "failed": 1, "killed": 255}  # the same as wandb's own


_startup_s: dict[str, float] = {}  # by what had been done


def note_startup(what: str) -> None:
    """Record when a part of the startup ended. Only the first record of a part counts; a restart adds more."""
    _startup_s.setdefault(what, time.time() - psutil.Process().create_time())


def startup_seconds() -> dict[str, float]:
    """Return the seconds of each part of the startup, since this process started."""
    ends = [0.0, *_startup_s.values()]
    return {what: round(b - a, 3) for what, a, b in zip(_startup_s, ends, ends[1:], strict=False)}


def status(what: str) -> Status:
    """Context manager that shows a spinner and `what` on stderr, on rank 0 and only on a terminal."""
    visible = sys.stderr.isatty() and is_rank_0()  # with forced colors, rich treats a pipe as a terminal
    return RichConsole(stderr=True, force_terminal=visible).status(f"{escape(what)} ...")


def show_share(what: str, spinner: Status | None = None) -> Callable[[float], None]:
    """Return a function that shows on stderr how much of `what` is done and the time left: in the spinner of `status`
    or over the last line on a terminal, else in a line every 30 s."""
    start_s = shown_s = time.monotonic()

    def show(share: float) -> None:
        nonlocal shown_s
        now_s, visible = time.monotonic(), sys.stderr.isatty()
        if not 0 < share < 1 or now_s - shown_s < (1 if visible else 30):
            return
        shown_s, left_s = now_s, (now_s - start_s) * (1 - share) / share
        line = f"{what}: {share:.0%} done, {left_s:.0f} s left"
        if visible and spinner is not None:
            spinner.update(escape(line))
        else:
            print(f"{line}  ", end="\r" if visible else "\n", file=sys.stderr, flush=True)

    return show


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
    # "loss/NAME" and "val_loss/NAME" for each of several data sources, and metrics of DPO: keys in metrics.jsonl.
    sources: dict[str, float] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        values = asdict(self)
        return values.pop("sources") | values


def host_peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def describe(record: Record) -> str:
    """Format the record as one line, without values that were not measured."""
    parts = {
        "loss": record.loss is not None and f"{record.loss:.4f}",
        "val": record.val_loss is not None and f"{record.val_loss:.4f}",
        # Only an evaluation's totals, not each task at each length.
        **{
            name: f"{mean:.4f}"
            for name, mean in record.sources.items()
            if name.count("/") == 1 and not name.startswith(HIDDEN)
        },
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
    lines = [line for line, record in _read_lines(path) if record["step"] <= step] if step else []
    _replace(path, "".join(line + "\n" for line in lines))
    return FileIO(path, "a")


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line of the file and its record, without incomplete lines, which a crash may leave."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.split("\n")[:-1]:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "step" in record:
            yield line, record


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the step records, without progress reports and events."""
    return [record for _, record in _read_lines(path) if not record.keys() & {"progress", "event"}]


def read_events(path: Path) -> list[dict[str, Any]]:
    return [record for _, record in _read_lines(path) if "event" in record]


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
        """Wrap the writing of optional files: an error does not end the run. It is reported once, until `what` can be
        written again."""
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

    def saved(self, step: int, checkpoint: Path) -> None:
        """Tell callbacks that a checkpoint is complete."""
        for message in self._trackers.notify("on_save", step, checkpoint) if self._trackers is not None else ():
            self.print(message)

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
            before, self._unwritten = self._unwritten, self._unwritten + f"{format_json(values)}\n".encode()
            try:
                self._unwritten = self._unwritten[self._metrics.write(self._unwritten) :]
            except OSError as error:
                if not before:
                    problem = f"cannot be written ({error.strerror}); keeping its lines in memory"
                    self.print(f"{self._metrics.name} {problem}")

    def _show(self, step: int, label: str, status: str) -> None:
        self._bar.update(self._task, status=status)
        if self._plain:
            self.print(f"step {step}/{self.num_steps}{label} {status}")


# ---- trackers


class Tracker(NamedTuple):
    """An open tracker: the id with which a resumed run continues its entry, and callbacks."""

    id: str | None
    log: Callable[[dict[str, float], int], Any]
    close: Callable[[FinalStatus], Any]


# (run directory, configuration, first step to log, id of the entry to continue)
Opener = Callable[[Path, Config, int, str | None], Tracker]


def rename_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Rename a record's values as tracker users expect, without its step and values that are None."""
    renamed = {}
    for key, value in values.items():
        metric, _, source = key.partition("/")
        if metric == "evaluate":
            renamed[key] = value
            continue
        if metric.removeprefix("val_") in ("rewards", "logps"):  # TRL's names
            renamed[("eval/" if metric.startswith("val_") else "train/") + key.removeprefix("val_")] = value
            continue
        group, _, metric = METRIC_NAMES.get(metric, f"train/{metric}").partition("/")
        if key != "step" and value is not None:
            renamed[f"{group}/{source}_{metric}" if source else f"{group}/{metric}"] = value
    return renamed


def _tensorboard(run_dir: Path, config: Config, first_step: int, known_id: str | None) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def log(values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    return Tracker(None, log, lambda final_status: writer.close())


def _wandb(run_dir: Path, config: Config, first_step: int, known_id: str | None) -> Tracker:
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=os.environ.get("WANDB_NAME", run_dir.name),
        config=to_dict(config),
        id=known_id,
        resume="allow" if known_id else None,
    )
    # Log the step as a metric: W&B drops values whose own step is not later than the last, as after a resume.
    run.define_metric("*", step_metric="train/global_step")
    return Tracker(
        run.id,
        lambda values, step: run.log({**values, "train/global_step": step}),
        lambda final_status: run.finish(exit_code=WANDB_EXIT_CODES[final_status]),
    )


def _trackio(run_dir: Path, config: Config, first_step: int, known_id: str | None) -> Tracker:
    import trackio

    project, resume = os.environ.get("TRACKIO_PROJECT", PROJECT), "allow" if known_id else "never"
    run = trackio.init(project, name=known_id or run_dir.name, config=to_dict(config), resume=resume, embed=False)
    return Tracker(run.name, lambda values, step: run.log(values, step=step), lambda final_status: run.finish())


def _mlflow(run_dir: Path, config: Config, first_step: int, known_id: str | None) -> Tracker:
    import mlflow

    if "MLFLOW_EXPERIMENT_NAME" not in os.environ and "MLFLOW_EXPERIMENT_ID" not in os.environ:
        mlflow.set_experiment(PROJECT)
    run = mlflow.start_run(run_id=known_id, run_name=run_dir.name)
    if known_id is None:
        for name, settings in to_dict(config).items():
            values = settings if isinstance(settings, dict) else {"entries": settings} if settings else {}
            mlflow.log_params({f"{name}.{key}": value for key, value in values.items()})

    def log(values: dict[str, float], step: int) -> None:
        allowed = {re.sub(r"[^\w\-./ ]", "_", key): value for key, value in values.items()}
        mlflow.log_metrics(allowed, step=step, synchronous=False)  # a slow server must not delay the step

    def close(final_status: FinalStatus) -> None:
        try:
            mlflow.flush_async_logging()
        finally:
            mlflow.end_run(status=final_status.upper())

    return Tracker(run.info.run_id, log, close)


TRACKERS: dict[str, Opener] = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow}


class Trackers:
    """The open trackers of `train.track` and the instances of `train.callbacks`, on rank 0. Raises ConfigError or
    TransientError if one cannot start."""

    def __init__(self, run_dir: Path, config: Config, step: int) -> None:
        self._open, self._failed, self._callbacks = dict[str, Tracker](), set[str](), dict[str, Any]()
        file = run_dir / IDS_FILE
        ids = dict[str, str | None]()
        with suppress(OSError, ValueError):  # without ids, new entries are started
            ids = json.loads(file.read_text(encoding="utf-8")) if step else {}
        for name in config.train.track:
            try:
                self._open[name] = TRACKERS[name](run_dir, config, step + 1, ids.get(name))
                ids[name] = self._open[name].id
            except Exception as error:
                self.close("failed")
                reason = f"{type(error).__name__}: {error}"
                fix = "fix its settings, use its offline mode, or leave it out"
                raise input_error(f"train.track={name} cannot start ({reason}); {fix}", error) from error
        for kind, callback in config.train.import_callbacks().items():
            try:
                self._callbacks[kind] = callback(run_dir, config)
            except Exception as error:
                self.close("failed")
                reason, fix = f"{type(error).__name__}: {error}", "name a class as package.module:Class, or correct it"
                raise ConfigError(f"train.callbacks={kind} cannot be created ({reason}); {fix}") from error
        if ids:
            _replace(file, json.dumps(ids))

    def log(self, values: Mapping[str, Any], step: int) -> list[str]:
        """Log one step. Returns a message for each tracker or callback that fails; the run continues without it."""
        logs = {name: tracker.log for name, tracker in self._open.items() if name not in self._failed}
        messages = self._failures(logs, (rename_metrics(values), step), "failed", "the run continues without it")
        named = {key: value for key, value in values.items() if value is not None}
        figures = {key: value for key, value in named.items() if key.startswith(("val_", "evaluate/"))}
        messages += self.notify("on_step", step, named)
        return messages + (self.notify("on_evaluation", step, figures) if figures else [])

    def notify(self, event: str, *args: Any) -> list[str]:
        """Call a method of every callback that has it. Returns messages, as `log`."""
        named = {name: getattr(each, event, None) for name, each in self._callbacks.items() if name not in self._failed}
        calls = {name: call for name, call in named.items() if call is not None}
        return self._failures(calls, args, f"failed in {event}", "the run continues without it", "callbacks")

    def close(self, final_status: FinalStatus) -> list[str]:
        """Close every tracker. Returns a message for each that fails now and did not fail before."""
        closes = {name: tracker.close for name, tracker in self._open.items()}
        self._open = {}
        ended = self.notify("on_end", final_status)
        self._callbacks = {}
        return ended + self._failures(closes, (final_status,), "could not be closed", "it may lack the last steps")

    def _failures(
        self,
        calls: Mapping[str, Callable[..., Any]],
        args: tuple[Any, ...],
        what: str,
        consequence: str,
        setting: str = "track",
    ) -> list[str]:
        """Call the function of each tracker. An error must neither end the run nor hide the run's own error."""
        messages = []
        for name, call in calls.items():
            try:
                call(*args)
            except Exception as error:
                if name not in self._failed:
                    messages.append(f"train.{setting}={name} {what} ({type(error).__name__}: {error}); {consequence}")
                self._failed.add(name)
        return messages
