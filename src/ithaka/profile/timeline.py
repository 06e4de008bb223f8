"""Phase timers: how long each phase of the schedule took, and how high memory rose in it."""

import time
from collections import defaultdict
from dataclasses import dataclass, field

import torch


@dataclass
class Phase:
    path: tuple[str, ...]
    start: "torch.cuda.Event | float"
    stop: "torch.cuda.Event | float | None" = None
    peak_bytes: int = 0

    @property
    def seconds(self) -> float:
        if isinstance(self.start, float):
            assert isinstance(self.stop, float)
            return self.stop - self.start
        assert isinstance(self.stop, torch.cuda.Event)
        return self.start.elapsed_time(self.stop) / 1e3


@dataclass
class Timeline:
    """Listens to phases. On a GPU, times are the compute stream's; peaks are the allocator's."""

    device: torch.device
    phases: list[Phase] = field(default_factory=list)
    _open: dict[tuple[str, ...], Phase] = field(default_factory=dict)

    def enter(self, path: tuple[str, ...]) -> None:
        self._note_peak()
        self._open[path] = Phase(path, self._now())

    def leave(self, path: tuple[str, ...]) -> None:
        self._note_peak()
        done = self._open.pop(path)
        done.stop = self._now()
        self.phases.append(done)

    def _now(self) -> "torch.cuda.Event | float":
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _note_peak(self) -> None:
        """The peak since the last mark belongs to every phase that was open."""
        if self.device.type != "cuda":
            return
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        for phase in self._open.values():
            phase.peak_bytes = max(phase.peak_bytes, peak)

    def seconds_by(self, *keep: int) -> dict[tuple[str, ...], float]:
        """Seconds summed over phases with the same names at the positions `keep` of their path."""
        sums: dict[tuple[str, ...], float] = defaultdict(float)
        for phase in self.phases:
            if len(phase.path) == max(keep) + 1:
                sums[tuple(phase.path[i] for i in keep)] += phase.seconds
        return dict(sums)
