"""Who held how much memory when: the map of a step, and its peak in words."""

import sys
import sysconfig
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

import ithaka
from ithaka.phases import GRADIENTS, HOLDERS, UNSHARDED, PhasePath
from ithaka.plan.show import size

MAP_POINTS = 800
LARGEST = 10


class PhaseLog:
    """Listens to phases and remembers which one was current when."""

    def __init__(self) -> None:
        self.marks: list[tuple[int, PhasePath]] = []  # from this time in ns on, this phase

    def enter(self, path: PhasePath) -> None:
        self.marks.append((time.time_ns(), path))

    def leave(self, path: PhasePath) -> None:
        self.marks.append((time.time_ns(), path[:-1]))

    def at(self, time_ns: int) -> PhasePath:
        index = bisect_right(self.marks, time_ns, key=lambda mark: mark[0])
        return self.marks[index - 1][1] if index else ()


@dataclass(frozen=True)
class Holding:
    """A piece of memory: what it is for and where it was made. Shape and dtype are its first tensor's, if known."""

    holder: str
    phase: PhasePath
    shape: tuple[int, ...]
    dtype: str
    line: str
    num_bytes: int = 0


class Change(NamedTuple):
    """Memory was taken (more than 0 bytes) or given back (less). A new holder takes what the old one gives back."""

    time_ns: int
    holding: int  # index into the map's holdings
    num_bytes: int
    holder: str


@dataclass
class MemoryMap:
    holdings: list[Holding] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)  # in the order of time
    phases: PhaseLog = field(default_factory=PhaseLog)

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
        """The last change at the peak's height: by then a new tensor has its tag."""
        peak = self.peak_bytes
        return max((i for i, (_, now) in enumerate(self.totals()) if now == peak), default=0)

    def phase_peaks(self) -> dict[PhasePath, int]:
        """The highest total while each phase was open, over all times it was."""
        marks = [(at_ns, path, 0) for at_ns, path in self.phases.marks]
        changes = [(change.time_ns, None, change.num_bytes) for change in self.changes]
        peaks: dict[PhasePath, int] = {}
        path: PhasePath = ()
        now = 0
        for _, new_path, num_bytes in sorted([*marks, *changes], key=lambda event: event[0]):
            path, now = path if new_path is None else new_path, now + num_bytes
            for depth in range(1, len(path) + 1):
                peaks[path[:depth]] = max(peaks.get(path[:depth], 0), now)
        return peaks

    def live_at_peak(self) -> list[Holding]:
        return self.live_after(self._peak_index())

    def live_after(self, index: int) -> list[Holding]:
        """What is live after change number `index`, largest first, with the holder of that moment."""
        bytes_of: dict[int, int] = {}
        holder_of: dict[int, str] = {}
        for change in self.changes[: index + 1]:
            bytes_of[change.holding] = bytes_of.get(change.holding, 0) + change.num_bytes
            if change.num_bytes > 0:
                holder_of[change.holding] = change.holder
        live = [replace(self.holdings[i], holder=holder_of[i], num_bytes=n) for i, n in bytes_of.items() if n > 0]
        return sorted(live, key=lambda holding: -holding.num_bytes)

    def stretch(self) -> tuple[int, int]:
        """From the first phase (what was registered is older) to the last event, in ns."""
        if not self.changes:
            return 0, 1
        marks = self.phases.marks
        start_ns = marks[0][0] if marks else self.changes[0].time_ns
        return start_ns, max(marks[-1][0] if marks else 0, self.changes[-1].time_ns)

    def over_time(self, points: int = MAP_POINTS) -> dict[str, Any]:
        """Live bytes by holder: the highest moment of each of `points` equal stretches, so the peak is among them."""
        start_ns, stop_ns = self.stretch()
        width = max((stop_ns - start_ns) / points, 1)
        now = dict.fromkeys(HOLDERS, 0)
        highest: dict[int, tuple[int, int, dict[str, int]]] = {}  # by stretch: total, time and holders
        for change, total in self.totals():
            now[change.holder] = now.get(change.holder, 0) + change.num_bytes
            stretch = int(max(change.time_ns - start_ns, 0) / width)
            if stretch not in highest or total >= highest[stretch][0]:
                highest[stretch] = total, change.time_ns, dict(now)
        rows = [(at_ns, holders) for _, at_ns, holders in highest.values()]
        names = [name for name in now if any(holders.get(name) for _, holders in rows)]
        return {
            "time_s": [round(max(at_ns - start_ns, 0) / 1e9, 6) for at_ns, _ in rows],
            "holders": {name: [holders.get(name, 0) for _, holders in rows] for name in names},
            "moments": [" / ".join(self.phases.at(at_ns)) for at_ns, _ in rows],
            "phases": self._bands(start_ns, stop_ns),
        }

    def _bands(self, start_ns: int, stop_ns: int) -> list[dict[str, Any]]:
        """When each layer's forward and backward, the loss and the optimizer ran."""
        alike = groupby([*self.phases.marks, (stop_ns, ())], key=lambda mark: mark[1][:2])
        begun = [(path, next(marks)[0]) for path, marks in alike]
        return [
            {"name": " ".join(path), "start_s": (at - start_ns) / 1e9, "stop_s": (until - start_ns) / 1e9}
            for (path, at), (_, until) in pairwise(begun)
            if len(path) == 2 or (path and not path[0].startswith("layer "))
        ]


class Recorder:
    """Fills a memory map while it is entered; a MemoryListener."""

    def __init__(self) -> None:
        self.map = MemoryMap()
        self._entered = ExitStack()

    def enter(self, path: PhasePath) -> None:
        self.map.phases.enter(path)

    def leave(self, path: PhasePath) -> None:
        self.map.phases.leave(path)

    def holder_changed(self) -> None:
        pass


def local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def form(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    """Shape and dtype."""
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


# ---- which line of code made it

_OURS = str(Path(ithaka.__file__).parent)
_LISTENERS = (f"{_OURS}/profile/", f"{_OURS}/phases.py")
_TORCH = str(Path(torch.__file__).parent)
_LIBRARIES = (
    _TORCH,
    str(Path(transformers.__file__).parent),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("stdlib"),
)
_REDUCING = ("reduce", "post_backward", "to_accumulated_grad", "unsharded_grad")  # in names of FSDP2's functions

Frame = tuple[str, int, str]  # file, line, function


def stack() -> Iterator[Frame]:
    """The frames of this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def made_by(frames: Iterable[Frame]) -> tuple[str, str | None]:
    """(the user's or ithaka's line that asked for memory, the holder if FSDP2 asked on its behalf)."""
    holder = None
    for file, line, function in frames:
        name = _shown_name(file)
        if name is not None:
            return f"{name}:{line} in {function}", holder
        if file.startswith(f"{_TORCH}/distributed/fsdp/"):
            reduces = any(part in function for part in _REDUCING)
            holder = GRADIENTS if reduces else holder or UNSHARDED
    return "", holder


@cache
def _shown_name(file: str) -> str | None:
    """ithaka's files from the package down, the user's with their folder; None for libraries and listeners."""
    if file.startswith("<") or not file.endswith(".py") or file.startswith(_LISTENERS):
        return None
    if file.startswith(_OURS):
        return str(Path(file).relative_to(Path(_OURS).parent))
    return None if file.startswith(_LIBRARIES) else "/".join(Path(file).parts[-2:])


# ---- the peak


def describe_peak(memory: MemoryMap, measured_bytes: int, planned: dict[str, int] | None) -> dict[str, Any]:
    """The peak as data: when, in which phase, who held how much, the largest holders, the plan beside."""
    live, peak_ns = memory.live_at_peak(), memory.peak_ns
    start_ns, stop_ns = memory.stretch()
    return {
        "num_bytes": memory.peak_bytes,
        "measured_bytes": measured_bytes,
        "time_s": max(peak_ns - start_ns, 0) / 1e9,
        "step_s": (stop_ns - start_ns) / 1e9,
        "phase": " / ".join(memory.phases.at(peak_ns)),
        "holders": _by_holder(live),
        "planned": planned,
        "largest": _largest(live),
    }


def _by_holder(live: list[Holding]) -> dict[str, int]:
    """Bytes per holder, in the map's order; names it does not know come last."""
    sums = dict.fromkeys(HOLDERS, 0)
    for holding in live:
        sums[holding.holder] = sums.get(holding.holder, 0) + holding.num_bytes
    return {holder: num_bytes for holder, num_bytes in sums.items() if num_bytes}


def _largest(live: list[Holding]) -> list[dict[str, Any]]:
    """Pieces of one holder, made by one line and alike in shape, go together. Largest first."""
    together: dict[tuple, list[Holding]] = {}
    for h in live:
        alike = h.shape or (h.num_bytes if not h.dtype else None)  # memory of unknown shape goes by its size
        together.setdefault((h.holder, h.line, alike, h.dtype), []).append(h)
    rows: list[dict[str, Any]] = [
        {
            "holder": pieces[0].holder,
            "num_bytes": sum(piece.num_bytes for piece in pieces),
            "count": len(pieces),
            "shape": list(pieces[0].shape),
            "dtype": pieces[0].dtype,
            "line": pieces[0].line,
            "phase": " / ".join(pieces[-1].phase),
        }
        for pieces in together.values()
    ]
    return sorted(rows, key=lambda row: -row["num_bytes"])[:LARGEST]


def in_words(peak: dict[str, Any]) -> str:
    """What `describe_peak` returned, as text."""
    total, step_s = peak["num_bytes"], peak["step_s"]
    lines = [
        f"Peak: {size(total)} after {peak['time_s']:.2f} s of {step_s:.2f} s "
        f"({100 * peak['time_s'] / max(step_s, 1e-9):.0f} %), in {peak['phase'] or 'no phase'}; "
        f"the allocator measured {size(peak['measured_bytes'])}.",
        "",
        "The ten largest holders then:",
    ]
    for rank, row in enumerate(peak["largest"], 1):
        share = 100 * row["num_bytes"] / max(total, 1)
        made = f" ({row['phase']})" if row["phase"] else ""
        where = row["line"] or "there before the step"
        lines.append(
            f"{rank:>3}. {size(row['num_bytes'])} ({share:.0f} %) {row['holder']}: {_pieces(row)}, {where}{made}"
        )
    return "\n".join([*lines, "", _table(peak)]) + "\n"


def _pieces(row: dict[str, Any]) -> str:
    each = row["dtype"] or size(row["num_bytes"] // row["count"])
    shape = f" {row['shape']}" if row["shape"] else ""
    return (f"{row['count']} x " if row["count"] > 1 else "") + each + shape


def _table(peak: dict[str, Any]) -> str:
    planned = peak["planned"] or {}
    names = [*peak["holders"], *(name for name in planned if name not in peak["holders"])]
    rows = [("holder", "measured", "planned" if planned else "")]
    for name in names:
        beside = size(planned[name]) if name in planned else "-" if planned else ""
        rows.append((name, size(peak["holders"].get(name, 0)), beside))
    rows.append(("total", size(peak["num_bytes"]), size(sum(planned.values())) if planned else ""))
    return "\n".join(f"{name:<20}{there:>12}{beside:>12}".rstrip() for name, there, beside in rows)
