"""Who held how much memory when: the map of a step, and its peak in words."""

import sys
import sysconfig
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

import ithaka
from ithaka.phases import GRADIENTS, HOLDERS, OTHER, UNSHARDED, PhasePath
from ithaka.plan.show import size

MAP_POINTS = 800
LARGEST = 10
NEVER = 2**62  # ns

Shape = tuple[int, ...]
Frame = tuple[str, int, str]  # file, line, function


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


@dataclass
class Piece:
    """Memory that one holder had for a while. Shape and dtype are its first tensor's, if known."""

    num_bytes: int
    start_ns: int
    holder: str = OTHER
    phase: PhasePath = ()  # in which it was made
    shape: Shape = ()
    dtype: str = ""
    line: str = ""
    stop_ns: int = NEVER

    def change(self, at_ns: int, **changes: Any) -> "Piece":
        """Ends this piece; returns the one that takes its place."""
        at_ns = min(max(at_ns, self.start_ns), self.stop_ns)
        rest = replace(self, start_ns=at_ns, **changes)
        self.stop_ns = at_ns
        return rest


@dataclass
class MemoryMap:
    pieces: list[Piece] = field(default_factory=list)
    phases: PhaseLog = field(default_factory=PhaseLog)

    def edges(self) -> list[tuple[int, int, Piece]]:
        """Beginnings and ends of pieces, in the order of time: time, bytes gained or lost, piece."""
        edges = [(piece.start_ns, piece.num_bytes, piece) for piece in self.pieces]
        edges += [(piece.stop_ns, -piece.num_bytes, piece) for piece in self.pieces if piece.stop_ns < NEVER]
        return sorted(edges, key=lambda edge: edge[:2])

    def peak(self) -> tuple[int, int]:
        """The most bytes live at once, and the last time in ns at which they were: by then a new tensor has its tag."""
        edges = self.edges()
        totals = accumulate(num_bytes for _, num_bytes, _ in edges)
        return max(((total, at_ns) for total, (at_ns, _, _) in zip(totals, edges, strict=True)), default=(0, 0))

    def phase_peaks(self) -> dict[PhasePath, int]:
        """The most bytes live while each phase was open, over all times it was."""
        events: list[tuple[int, PhasePath | None, int]] = [(at_ns, path, 0) for at_ns, path in self.phases.marks]
        events += [(at_ns, None, num_bytes) for at_ns, num_bytes, _ in self.edges()]
        peaks: dict[PhasePath, int] = {}
        path: PhasePath = ()
        now = 0
        for _, new_path, num_bytes in sorted(events, key=lambda event: event[0]):
            path, now = path if new_path is None else new_path, now + num_bytes
            for depth in range(1, len(path) + 1):
                peaks[path[:depth]] = max(peaks.get(path[:depth], 0), now)
        return peaks

    def live_at(self, time_ns: int) -> list[Piece]:
        """Largest first."""
        live = [piece for piece in self.pieces if piece.start_ns <= time_ns < piece.stop_ns]
        return sorted(live, key=lambda piece: -piece.num_bytes)

    def stretch(self) -> tuple[int, int]:
        """From the first phase (what was registered is older) to the last event, in ns."""
        times = [at_ns for at_ns, _ in self.phases.marks]
        edges = [at_ns for at_ns, _, _ in self.edges()]
        return (times or edges or [0])[0], max([*times, *edges], default=1)

    def over_time(self, points: int = MAP_POINTS) -> dict[str, Any]:
        """Live bytes by holder: the highest moment of each of `points` equal stretches, so the peak is among them."""
        start_ns, stop_ns = self.stretch()
        width = max((stop_ns - start_ns) / points, 1)
        now = dict.fromkeys(HOLDERS, 0)
        highest: dict[int, tuple[int, int, dict[str, int]]] = {}  # by stretch: total, time and holders
        total = 0
        for at_ns, num_bytes, piece in self.edges():
            total += num_bytes
            now[piece.holder] = now.get(piece.holder, 0) + num_bytes
            stretch = int(max(at_ns - start_ns, 0) / width)
            if stretch not in highest or total >= highest[stretch][0]:
                highest[stretch] = total, at_ns, dict(now)
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


class Recorder(PhaseLog):
    """Fills a memory map while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.map = MemoryMap(phases=self)
        self._entered = ExitStack()

    def holder_changed(self) -> None:
        """Override to be told."""


def local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def form(tensor: Tensor) -> tuple[Shape, str]:
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
    (peak_bytes, peak_ns), (start_ns, stop_ns) = memory.peak(), memory.stretch()
    live = memory.live_at(peak_ns)
    return {
        "num_bytes": peak_bytes,
        "measured_bytes": measured_bytes,
        "time_s": max(peak_ns - start_ns, 0) / 1e9,
        "step_s": (stop_ns - start_ns) / 1e9,
        "phase": " / ".join(memory.phases.at(peak_ns)),
        "holders": _by_holder(live),
        "planned": planned,
        "largest": _largest(live),
    }


def _by_holder(live: list[Piece]) -> dict[str, int]:
    """Bytes per holder, in the map's order; names it does not know come last."""
    sums = dict.fromkeys(HOLDERS, 0)
    for piece in live:
        sums[piece.holder] = sums.get(piece.holder, 0) + piece.num_bytes
    return {holder: num_bytes for holder, num_bytes in sums.items() if num_bytes}


def _largest(live: list[Piece]) -> list[dict[str, Any]]:
    """Pieces of one holder, made by one line and alike in shape, go together. Largest first."""
    together: dict[tuple, list[Piece]] = {}
    for piece in live:
        alike = piece.shape or piece.dtype or piece.num_bytes  # memory of unknown shape goes by its size
        together.setdefault((piece.holder, piece.line, piece.dtype, alike), []).append(piece)
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
