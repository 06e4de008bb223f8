"""When does the device reach a phase? On a GPU the host runs ahead, so times are CUDA events."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch

from ithaka.phases import Listener, PhasePath

T = TypeVar("T")


class DeviceTimeline(Generic[T]):
    """Marks in the order the host records them, each with an item. A mark is a CUDA event, reached when the device
    passes it; on a CPU it is a time, reached at once."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._pending: deque[tuple[Any, T]] = deque()

    def mark(self) -> Any:
        """Record a mark in the current stream, without an item."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def push(self, item: T) -> Any:
        """Record a mark that `pop_reached` returns with `item`."""
        mark = self.mark()
        self._pending.append((mark, item))
        return mark

    def pop_reached(self) -> Iterator[tuple[Any, T]]:
        while self._pending and (not self.on_gpu or self._pending[0][0].query()):
            yield self._pending.popleft()

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two marks that the device has reached."""
        return start.elapsed_time(end) / 1000 if self.on_gpu else end - start


class PhaseTimer(Listener):
    """Seconds of each phase on the device and, on a GPU, the allocator's peak bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.peaks, self._timeline = device, Counter[PhasePath](), DeviceTimeline[None](device)
        self._open: dict[PhasePath, Any] = {}  # the start's mark
        self._spans: list[tuple[PhasePath, Any, Any]] = []  # with the marks of start and end

    def enter(self, path: PhasePath) -> None:
        self._update_peaks()
        self._open[path] = self._timeline.mark()

    def leave(self, path: PhasePath) -> None:
        self._update_peaks()
        self._spans.append((path, self._open.pop(path), self._timeline.mark()))

    def _update_peaks(self) -> None:
        """Attribute the peak since the last call to all open phases."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.peaks |= Counter(dict.fromkeys(self._open, peak))  # the maximum of both

    def seconds(self) -> dict[PhasePath, float]:
        """The device must have reached the end of the last phase."""
        sums: dict[PhasePath, float] = defaultdict(float)
        for path, start, end in self._spans:
            sums[path] += self._timeline.seconds(start, end)
        return dict(sums)
