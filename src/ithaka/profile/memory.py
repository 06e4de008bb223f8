"""Who held how much memory when: the map of a step, and its peak in words."""

import sysconfig
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import ithaka
from ithaka.phases import Holder, Listener, PhasePath
from ithaka.plan.search import Plan
from ithaka.plan.show import format_bytes

MAP_POINTS = 800
LARGEST = 10
NEVER = 2**62  # ns

Frame = tuple[str, int, str]  # file, line, function


class PhaseLog(Listener):
    """Remembers which phase was current when."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[tuple[int, PhasePath]] = []  # from this time in ns on, this phase

    def enter(self, path: PhasePath) -> None:
        self.marks.append((time.time_ns(), path))

    def leave(self, path: PhasePath) -> None:
        self.marks.append((time.time_ns(), path[:-1]))

    def at(self, time_ns: int) -> PhasePath:
        index = bisect_right(self.marks, time_ns, key=lambda mark: mark[0])
        return self.marks[index - 1][1] if index else ()

    def spans(self) -> Iterator[tuple[PhasePath, int, int]]:
        """Every phase with its start and stop in ns, in the order of their ends."""
        opened: list[tuple[PhasePath, int]] = []
        for at_ns, path in self.marks:
            if len(path) > len(opened):
                opened.append((path, at_ns))
            else:
                yield *opened.pop(), at_ns


@dataclass
class Allocation:
    """Memory that one holder had for a while. Dtype and shape are its first tensor's, if known."""

    num_bytes: int
    start_ns: int
    holder: str = Holder.OTHER
    phase: PhasePath = ()  # in which it was made
    dtype: str = ""
    shape: tuple[int, ...] = ()
    line: str = ""
    stop_ns: int = NEVER

    def change(self, at_ns: int, **changes: Any) -> "Allocation":
        """Ends this piece; returns the one that takes its place."""
        at_ns = min(max(at_ns, self.start_ns), self.stop_ns)
        rest = replace(self, start_ns=at_ns, **changes)
        self.stop_ns = at_ns
        return rest


class MemoryMap(PhaseLog, ExitStack):
    """Pieces of memory and phases; a device's recorder fills it while entered."""

    measured_peak_bytes: int | None = None  # by the allocator of a GPU

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[Allocation] = []

    def register_states(self, model: nn.Module, optimizer: Any) -> None:
        """Tags what is there before a step."""
        for tensor in (*model.parameters(), *model.buffers()):
            self.tag(tensor, Holder.PARAMETERS)
        for value in (value for state in (optimizer.state.values() if optimizer else ()) for value in state.values()):
            if isinstance(value, Tensor):
                self.tag(value, Holder.OPTIMIZER)

    def edges(self) -> list[tuple[int, int, Allocation]]:
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
        changes = [(at_ns, 0) for at_ns, _ in self.marks] + [(at_ns, num_bytes) for at_ns, num_bytes, _ in self.edges()]
        peaks: Counter[PhasePath] = Counter()
        now = 0
        for at_ns, num_bytes in sorted(changes, key=lambda change: change[0]):
            now, path = now + num_bytes, self.at(at_ns)
            for depth in range(1, len(path) + 1):
                peaks[path[:depth]] = max(peaks[path[:depth]], now)
        return peaks

    def live_at(self, time_ns: int) -> list[Allocation]:
        """Largest first."""
        live = [piece for piece in self.pieces if piece.start_ns <= time_ns < piece.stop_ns]
        return sorted(live, key=lambda piece: -piece.num_bytes)

    def describe(self, planned: dict[str, int]) -> dict[str, Any]:
        """Live bytes by holder: the highest moment of each of MAP_POINTS equal stretches, so the peak is among them.

        `phases`: when each layer's forward and backward, the loss and the optimizer ran. `peak`: when, in which phase,
        who held how much, the largest holders, and beside them what the allocator measured and what was planned.
        """
        edges, (peak_bytes, peak_ns) = self.edges(), self.peak()
        # What was registered is older than the first phase.
        times = [*(at_ns for at_ns, _ in self.marks), *(at_ns for at_ns, _, _ in edges)]
        start_ns, stop_ns = times[0], max(times)
        width = max((stop_ns - start_ns) / MAP_POINTS, 1)
        now: Counter[str] = Counter()
        highest: dict[int, tuple[int, Counter[str]]] = {}  # by stretch: time and holders
        for at_ns, num_bytes, piece in edges:
            now[piece.holder] += num_bytes
            stretch = int(max(at_ns - start_ns, 0) / width)
            if stretch not in highest or now.total() >= highest[stretch][1].total():
                highest[stretch] = at_ns, Counter(now)
        rows = list(highest.values())
        used = [name for name in Holder if any(holders[name] for _, holders in rows)]
        at_peak = dict(rows)[peak_ns]
        return {
            "time_s": [round(max(at_ns - start_ns, 0) / 1e9, 6) for at_ns, _ in rows],
            "holders": {name: [holders[name] for _, holders in rows] for name in used},
            "moments": [" / ".join(self.at(at_ns)) for at_ns, _ in rows],
            "phases": [
                {"name": " ".join(path), "start_s": (start - start_ns) / 1e9, "stop_s": (stop - start_ns) / 1e9}
                for path, start, stop in self.spans()
                if len(path) == 1 + path[0].startswith("layer ")
            ],
            "peak": {
                "num_bytes": peak_bytes,
                "measured_bytes": self.measured_peak_bytes,
                "time_s": max(peak_ns - start_ns, 0) / 1e9,
                "step_s": (stop_ns - start_ns) / 1e9,
                "phase": " / ".join(self.at(peak_ns)),
                "holders": {name: at_peak[name] for name in used if at_peak[name]},
                "planned": planned,
                "largest": _largest(self.live_at(peak_ns)),
            },
        }


def local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def form(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": tuple(tensor.shape)}


# ---- which line of code made it

_OURS = str(Path(ithaka.__file__).parent)
_LISTENERS = (f"{_OURS}/profile/", f"{_OURS}/phases.py")
_LIBRARIES = ("/site-packages/", "/dist-packages/", f"{sysconfig.get_path('stdlib')}/")
_REDUCING = ("reduce", "post_backward", "to_accumulated_grad", "unsharded_grad")  # in names of FSDP2's functions


def made_by(frames: Iterable[Frame]) -> tuple[str, str | None]:
    """(the user's or ithaka's line that asked for memory, the holder if FSDP2 asked on its behalf)."""
    holder = None
    for file, line, function in frames:
        name = _shown_name(file)
        if name is not None:
            return f"{name}:{line} in {function}", holder
        if "/torch/distributed/fsdp/" in file:
            reduces = any(part in function for part in _REDUCING)
            holder = Holder.GRADIENTS if reduces else holder or Holder.UNSHARDED
    return "", holder


@cache
def _shown_name(file: str) -> str | None:
    """ithaka's files from the package down, the user's with their folder; None for libraries and listeners."""
    if not file.endswith(".py") or file.startswith(("<", *_LISTENERS)):
        return None
    if file.startswith(_OURS):
        return str(Path(file).relative_to(Path(_OURS).parent))
    return None if any(part in file for part in _LIBRARIES) else "/".join(Path(file).parts[-2:])


# ---- the peak


def planned_holders(plan: Plan) -> dict[str, int]:
    """Bytes by the map's holders on one rank, at the planned peak."""
    names = {"layer weights": Holder.UNSHARDED, "tiles": Holder.MLP, "kept activations": Holder.KEPT}
    planned: Counter[str] = Counter()
    for name, num_bytes in plan.ledger.gpu.items():
        planned[names.get(name, name)] += num_bytes if name != "reserve" else 0
    return {name: num_bytes for name, num_bytes in planned.items() if num_bytes}


def _largest(live: list[Allocation]) -> list[dict[str, Any]]:
    """Pieces of one holder, made by one line and alike in shape (or, where it is not known, in size) go together."""
    together: dict[tuple, list[Allocation]] = {}
    for piece in live:
        each = f"{piece.dtype} {list(piece.shape)}" if piece.dtype else format_bytes(piece.num_bytes)
        together.setdefault((piece.holder, each, piece.line), []).append(piece)
    rows: list[dict[str, Any]] = []
    for (holder, each, line), pieces in together.items():
        what = f"{len(pieces)} x {each}" if len(pieces) > 1 else each
        phase = f"({' / '.join(pieces[-1].phase)})" if pieces[-1].phase else ""
        made_by = f"{line} {phase}".strip() or "there before the step"
        num_bytes = sum(piece.num_bytes for piece in pieces)
        rows.append({"holder": holder, "num_bytes": num_bytes, "what": what, "made_by": made_by})
    return sorted(rows, key=lambda row: -row["num_bytes"])[:LARGEST]


def in_words(peak: dict[str, Any]) -> str:
    """The peak that `MemoryMap.describe` returned, as text."""
    total, time_s, step_s, planned = peak["num_bytes"], peak["time_s"], peak["step_s"], peak["planned"]
    measured = (
        "" if peak["measured_bytes"] is None else f"; the allocator measured {format_bytes(peak['measured_bytes'])}"
    )
    when = f"after {time_s:.2f} s of {step_s:.2f} s ({100 * time_s / max(step_s, 1e-9):.0f} %)"
    lines = [f"Peak: {format_bytes(total)} {when}, in {peak['phase'] or 'no phase'}{measured}.", ""]
    lines.append("The ten largest holders then:")
    for rank, row in enumerate(peak["largest"], 1):
        share = f"({100 * row['num_bytes'] / max(total, 1):.0f} %)"
        lines.append(
            f"{rank:>3}. {format_bytes(row['num_bytes'])} {share} {row['holder']}: {row['what']}, {row['made_by']}"
        )
    rows = [("", "", ""), ("holder", "measured", "planned")]
    for name in dict.fromkeys([*peak["holders"], *planned]):
        rows.append(
            (name, format_bytes(peak["holders"].get(name, 0)), format_bytes(planned[name]) if name in planned else "-")
        )
    rows.append(("total", format_bytes(total), format_bytes(sum(planned.values()))))
    return "\n".join([*lines, *(f"{a:<20}{b:>12}{c:>12}".rstrip() for a, b, c in rows)]) + "\n"
