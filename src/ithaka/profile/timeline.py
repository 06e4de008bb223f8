"""When the device, which the host runs ahead of, reaches a phase; progress in a step."""

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from ithaka.comm.mesh import use_device
from ithaka.phases import Listener, PhasePath, listening

T = TypeVar("T")
Mark = torch.cuda.Event | float  # on a CPU, a time


class DeviceTimeline(Generic[T]):
    """Marks in the order the host records them, each with an item. A CUDA event is reached when the
    device passes it, a time at once."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._pending: deque[tuple[Mark, T]] = deque()

    def mark(self) -> Mark:
        """Record a mark in the current stream, without an item."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def push(self, item: T) -> Mark:
        """Record a mark that `pop_reached` returns with `item`."""
        mark = self.mark()
        self._pending.append((mark, item))
        return mark

    def pop_reached(self) -> Iterator[tuple[Mark, T]]:
        while self._pending:
            mark, _ = self._pending[0]
            if not isinstance(mark, int | float) and not mark.query():
                return
            yield self._pending.popleft()

    def seconds(self, start: Mark, end: Mark) -> float:
        """Time between two marks that the device has reached."""
        if isinstance(start, int | float) and isinstance(end, int | float):
            return end - start
        assert not isinstance(start, int | float) and not isinstance(end, int | float)
        return start.elapsed_time(end) / 1000


class PhaseTimer(Listener):
    """Seconds of each phase on the device and, on a GPU, the allocator's peak bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peaks = Counter[PhasePath]()
        self._timeline = DeviceTimeline[None](device)
        self._open: dict[PhasePath, Mark] = {}  # the start's mark
        self._spans: list[tuple[PhasePath, Mark, Mark]] = []  # with the marks of start and end

    def enter(self, path: PhasePath) -> None:
        self._update_peaks()
        self._open[path] = self._timeline.mark()

    def leave(self, path: PhasePath) -> None:
        self._update_peaks()
        self._spans.append((path, self._open.pop(path), self._timeline.mark()))

    def _update_peaks(self) -> None:
        """Attribute the peak since the last call to all open phases."""
        if self.device.type == "cuda":
            # max_memory_allocated() builds a flat dictionary first, which takes the host longer
            # than a phase.
            stats = torch.cuda.memory.memory_stats_as_nested_dict(self.device)
            peak = stats["allocated_bytes"]["all"]["peak"]
            torch.cuda.reset_peak_memory_stats(self.device)
            self.peaks |= Counter(dict.fromkeys(self._open, peak))  # the maximum of both

    def seconds(self) -> dict[PhasePath, float]:
        """The device must have reached the end of the last phase."""
        sums: dict[PhasePath, float] = defaultdict(float)
        for path, start, end in self._spans:
            sums[path] += self._timeline.seconds(start, end)
        return dict(sums)


@dataclass(frozen=True)
class StepProgress:
    step: int
    phase: str
    percent: float
    elapsed_s: float
    eta_s: float | None  # until the end of the step


class Progress(Listener):
    """Calls `report` every `every_s` seconds of a step, in a thread. `shares`: of a micro-step's
    planned time, by phase."""

    every_s = 30.0

    def __init__(
        self,
        shares: Mapping[PhasePath, float],
        micro_steps: int,
        device: torch.device,
        report: Callable[[StepProgress], None],
    ) -> None:
        self.device = device
        self.report = report
        self.shares = {path: share / micro_steps for path, share in shares.items()}

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        # With the phase and the share done.
        self._timeline = DeviceTimeline[tuple[PhasePath, float]](self.device)
        self._reached: tuple[PhasePath, float] = ((), 0.0)
        self._done = 0.0
        stop = threading.Event()
        args = (number, stop)
        thread = threading.Thread(target=self._watch, args=args, daemon=True, name="progress")
        thread.start()
        try:
            with listening(self):
                yield
        finally:
            stop.set()
            thread.join()

    def enter(self, path: PhasePath) -> None:
        # A layer's direction, its stages and what is outside layers; others change too often.
        if len(path) in (2, 4) or not path[0].startswith("layer "):
            self._timeline.push((path, self._done))

    def leave(self, path: PhasePath) -> None:
        if path in self.shares:
            self._done += self.shares[path]
            self._timeline.push((path, self._done))

    def update(self) -> tuple[PhasePath, float]:
        """The phase the device has reached, and the share of the step that is done."""
        for _, reached in self._timeline.pop_reached():
            self._reached = reached
        return self._reached

    def _watch(self, step: int, stop: threading.Event) -> None:
        use_device(self.device)
        start = time.monotonic()
        share = 0.0
        share_s = 0.0  # when `share` was reached
        while not stop.wait(self.every_s):
            path, done = self.update()
            elapsed_s = time.monotonic() - start
            if done > share:
                share = done
                share_s = elapsed_s
            # It counts down within a layer.
            eta_s = max(0.0, share_s / share - elapsed_s) if share else None
            self.report(StepProgress(step, " / ".join(path), 100 * share, elapsed_s, eta_s))
