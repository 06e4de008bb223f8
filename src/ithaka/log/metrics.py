"""A run's metrics.jsonl: one JSON object per line; non-finite values are null. Imports no torch.

A line is the `StepRecord` of a step, the progress of a long step, the times of the startup or of a
save, or an event.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Any

import psutil

from ithaka.config import write_atomic
from ithaka.config.units import format_json

_startup_s: dict[str, float] = {}  # by what had been done


def note_startup(what: str) -> None:
    """Record when a part of the startup ended. Only the first record of a part counts."""
    _startup_s.setdefault(what, time.time() - psutil.Process().create_time())


def startup_seconds() -> dict[str, float]:
    """Return the seconds of each part of the startup, since this process started."""
    ends = [0.0, *_startup_s.values()]
    return {what: round(b - a, 3) for what, a, b in zip(_startup_s, ends, ends[1:], strict=False)}


@dataclass(frozen=True)
class StepRecord:
    """Metrics of one optimizer step over all ranks. Step 0 is the state before the first update."""

    step: int  # number of updates so far
    loss: float | None = None  # mean over the valid tokens of the global batch, before the update
    val_loss: float | None = None  # of the validation set, after the update
    lr: float | None = None
    grad_norm: float | None = None  # before clipping
    tokens: int = 0  # input tokens since the start of the run
    label_tokens: int = 0  # valid labels in this step, by which the loss is divided
    tokens_per_s: float | None = None  # input tokens
    step_s: float | None = None  # without validation and saving
    mfu: float | None = None  # None if the device's peak FLOPS are unknown
    device_peak_bytes: int | None = None  # maximum over ranks since the start; None on CPU
    host_peak_bytes: int = 0  # maximum resident set size over ranks since the start
    device_reserved_bytes: int | None = None  # peak of what the CUDA allocator holds, used or not
    device_unused_bytes: int | None = None  # reserved minus allocated peak, maximum over ranks
    allocator_retries: int | None = None  # times that it had to free its cache; None on CPU
    balance: float | None = None  # attention work, maximum / mean over ranks; None: all equal
    ring_bytes: int = 0  # k, v, dk and dv sent in this step, maximum over the ring's ranks
    # More keys in metrics.jsonl: "loss/NAME" of several sources, evaluations, metrics of DPO.
    sources: dict[str, float] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        values = asdict(self)
        return values.pop("sources") | values


class MetricsFile:
    """Appends to metrics.jsonl. A line that cannot be written is kept for the next attempt."""

    def __init__(self, path: Path, step: int, report: Callable[[str], None]) -> None:
        """`report` is called with a message when lines start to be kept."""
        self.file = open_metrics(path, step)
        self._report = report
        self._unwritten = b""
        self._lock = Lock()

    def write(self, values: Mapping[str, Any]) -> None:
        with self._lock:  # another thread reports progress
            before = self._unwritten
            self._unwritten += f"{format_json(values)}\n".encode()
            try:
                self._unwritten = self._unwritten[self.file.write(self._unwritten) :]
            except OSError as error:
                if not before:
                    problem = f"cannot be written ({error.strerror}); keeping its lines in memory"
                    self._report(f"{self.file.name} {problem}")


def open_metrics(path: Path, step: int) -> FileIO:
    """Open the file to append, unbuffered. Drops lines after `step`: a resumed run repeats them."""
    lines = []
    if step:
        lines = [line for line, record in _read_lines(path) if record["step"] <= step]
    write_atomic(path, "".join(line + "\n" for line in lines))
    return FileIO(path, "a")


def _read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line and its record, but no incomplete line, which a crash may leave."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.split("\n")[:-1]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield line, record


def count_damaged_lines(path: Path) -> int:
    """Count the complete lines that are not records."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return text.count("\n") - sum(1 for _ in _read_lines(path))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the step records, without progress reports, times and events."""
    others = {"progress", "times", "event"}
    return [record for _, record in _read_lines(path) if not record.keys() & others]


def read_times(path: Path) -> dict[str, Any]:
    """Read the times of the startup and of the last save."""
    times: dict[str, Any] = {}
    for _, record in _read_lines(path):
        times |= record.get("times", {})
    return times


def read_events(path: Path) -> list[dict[str, Any]]:
    return [record for _, record in _read_lines(path) if "event" in record]
