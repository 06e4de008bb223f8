"""Who held how many bytes when: the changes of a stretch of time, and what can be read off them."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ithaka.phases import Path


@dataclass(frozen=True)
class Holding:
    """A piece of memory: what it is for, and where it came from. Shape and dtype are its first tensor's."""

    holder: str
    phase: Path
    shape: tuple[int, ...]
    dtype: str
    line: str
    num_bytes: int = 0


@dataclass(frozen=True)
class Change:
    """Memory was taken (more than 0 bytes) or given back (less); a new holder takes what the old had."""

    time_ns: int
    holding: int  # index into the ledger's holdings
    num_bytes: int
    holder: str


@dataclass
class Ledger:
    holdings: list[Holding] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)  # in the order of time
    marks: list[tuple[int, Path]] = field(default_factory=list)  # when which phase became the current one

    def totals(self) -> Iterator[tuple[Change, int]]:
        """Each change with the bytes live after it."""
        now = 0
        for change in self.changes:
            now += change.num_bytes
            yield change, now

    @property
    def peak_bytes(self) -> int:
        return max((now for _, now in self.totals()), default=0)

    @property
    def peak_ns(self) -> int:
        return self.changes[self._peak_index()].time_ns if self.changes else 0

    def _peak_index(self) -> int:
        """The last change after which the peak holds: by then a new tensor has its tag."""
        peak = self.peak_bytes
        return max(i for i, (_, now) in enumerate(self.totals()) if now == peak)

    def phase_at(self, time_ns: int) -> Path:
        at = bisect_right(self.marks, time_ns, key=lambda mark: mark[0])
        return self.marks[at - 1][1] if at else ()

    def phase_peaks(self) -> dict[Path, int]:
        """The highest point while each phase was open, phases of the same path taken together."""
        peaks: dict[Path, int] = {}
        marks = iter([*self.marks, (2**63, ())])
        path: Path = ()
        next_ns, next_path = next(marks)
        now = 0
        for change, after in self.totals():
            while next_ns <= change.time_ns:
                path = next_path
                _raise(peaks, path, now)
                next_ns, next_path = next(marks)
            now = after
            _raise(peaks, path, now)
        return peaks

    def live_at_peak(self) -> list[Holding]:
        """What was live at the peak, largest first, with the holder of that moment."""
        return _live_after(self.changes[: self._peak_index() + 1], self.holdings) if self.changes else []


def _raise(peaks: dict[Path, int], path: Path, now: int) -> None:
    for depth in range(1, len(path) + 1):
        peaks[path[:depth]] = max(peaks.get(path[:depth], 0), now)


def _live_after(changes: list[Change], holdings: list[Holding]) -> list[Holding]:
    bytes_of: dict[int, int] = {}
    holder_of: dict[int, str] = {}
    for change in changes:
        bytes_of[change.holding] = bytes_of.get(change.holding, 0) + change.num_bytes
        if change.num_bytes > 0:
            holder_of[change.holding] = change.holder
    live = [
        replace(holdings[i], holder=holder_of[i], num_bytes=num_bytes)
        for i, num_bytes in bytes_of.items()
        if num_bytes > 0
    ]
    return sorted(live, key=lambda holding: -holding.num_bytes)
