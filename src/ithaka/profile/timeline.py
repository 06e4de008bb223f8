"""Which phases has the device reached? On a GPU the host runs ahead of the device, so phases wait in a queue."""

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch

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
