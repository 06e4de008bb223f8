"""When the device, which the host runs ahead of, reaches a phase."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch

from ithaka.device_memory import PeakMeter
from ithaka.phases import Listener, PhasePath

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
        self.peaks = Counter[PhasePath]()
        self._meter = PeakMeter(device)
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
        # the maximum of both
        self.peaks |= Counter(dict.fromkeys(self._open, self._meter.restart()))

    def seconds(self) -> dict[PhasePath, float]:
        """The device must have reached the end of the last phase."""
        sums: dict[PhasePath, float] = defaultdict(float)
        for path, start, end in self._spans:
            sums[path] += self._timeline.seconds(start, end)
        return dict(sums)
