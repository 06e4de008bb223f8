"""The memory map of one step: live bytes by category over time, and what was live at the peak."""

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ithaka.config.units import format_bytes
from ithaka.phases import Listener, MemoryCategory, PhasePath

MAP_POINTS = 800  # samples over the step
NUM_LARGEST = 10  # rows in the list of allocations at the peak
NOT_FREED = 2**62  # stop_ns of an allocation that is still live


class PhaseLog(Listener):
    """Records when phases are entered and left."""

    def __init__(self) -> None:
        super().__init__()
        self.phase_changes: list[tuple[int, PhasePath]] = []  # time in ns, phase from then on

    def enter(self, path: PhasePath) -> None:
        self.phase_changes.append((time.time_ns(), path))

    def leave(self, path: PhasePath) -> None:
        self.phase_changes.append((time.time_ns(), path[:-1]))

    def phase_at(self, time_ns: int) -> PhasePath:
        index = bisect_right(self.phase_changes, time_ns, key=lambda change: change[0])
        return self.phase_changes[index - 1][1] if index else ()

    def spans(self) -> Iterator[tuple[PhasePath, int, int]]:
        """Each phase with its start and stop in ns, sorted by stop."""
        open_phases: list[tuple[PhasePath, int]] = []
        for at_ns, path in self.phase_changes:
            if len(path) > len(open_phases):
                open_phases.append((path, at_ns))
            else:
                yield *open_phases.pop(), at_ns


@dataclass
class Allocation:
    """Bytes that belong to one category from `start_ns` to `stop_ns`."""

    num_bytes: int
    start_ns: int
    category: str = MemoryCategory.OTHER
    phase: PhasePath = ()  # that allocated it
    dtype: str = ""  # dtype and shape of its first tensor, if known
    shape: tuple[int, ...] = ()
    line: str = ""  # source line that allocated it
    stop_ns: int = NOT_FREED

    def set_form(self, tensor: Tensor) -> None:
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.shape = tuple(tensor.shape)

    def split(self, at_ns: int, category: str, num_bytes: int) -> "Allocation":
        """End this allocation and return its continuation."""
        at_ns = min(max(at_ns, self.start_ns), self.stop_ns)
        rest = replace(self, start_ns=at_ns, category=category, num_bytes=num_bytes)
        self.stop_ns = at_ns
        return rest


def state_tensors(
    optimizer: Optimizer | None, params: set[nn.Parameter] | None = None
) -> Iterator[Tensor]:
    """This rank's tensors of an optimizer's state, of these parameters only if they are passed."""
    states = optimizer.state if optimizer is not None else {}
    for param, state in states.items():
        if params is None or param in params:
            for value in state.values():
                yield from _parts(value.to_local() if isinstance(value, DTensor) else value)


def _parts(value: object) -> Iterator[Tensor]:
    """The tensors of a wrapper, such as quantized moments."""
    if hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _parts(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value


class CategoryListener(Listener, ExitStack):
    """Attributes memory to categories while entered."""

    def set_state_categories(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Attribute what is live before the step: parameters, buffers and optimizer states."""
        for tensor in (*model.parameters(), *model.buffers()):
            self.set_category(tensor, MemoryCategory.PARAMETERS)
        for tensor in state_tensors(optimizer):
            self.set_category(tensor, MemoryCategory.OPTIMIZER)


class MemoryMap(PhaseLog, CategoryListener):
    """Allocations and phases of a step. Subclasses record them while entered."""

    measured_peak_bytes: int | None = None  # by the CUDA allocator

    def __init__(self) -> None:
        super().__init__()
        self.allocations: list[Allocation] = []

    def events(self) -> list[tuple[int, int, Allocation]]:
        """(time in ns, bytes gained or lost, allocation), sorted by time."""
        freed = [item for item in self.allocations if item.stop_ns < NOT_FREED]
        events = [(item.start_ns, item.num_bytes, item) for item in self.allocations]
        events += [(item.stop_ns, -item.num_bytes, item) for item in freed]
        return sorted(events, key=lambda event: event[:2])

    def peak(self) -> tuple[int, int]:
        """Peak bytes, and the last ns at which they were live, when new tensors have a category."""
        events = self.events()
        totals = accumulate(num_bytes for _, num_bytes, _ in events)
        times = (at_ns for at_ns, _, _ in events)
        return max(zip(totals, times, strict=True), default=(0, 0))

    def phase_peaks(self) -> dict[PhasePath, int]:
        """Peak bytes while each phase was open, over all its occurrences."""
        changes = [(at_ns, 0) for at_ns, _ in self.phase_changes]
        changes += [(at_ns, num_bytes) for at_ns, num_bytes, _ in self.events()]
        peaks: Counter[PhasePath] = Counter()
        live_bytes = 0
        for at_ns, num_bytes in sorted(changes, key=lambda change: change[0]):
            live_bytes += num_bytes
            path = self.phase_at(at_ns)
            for depth in range(1, len(path) + 1):
                peaks[path[:depth]] = max(peaks[path[:depth]], live_bytes)
        return peaks

    def live_at(self, time_ns: int) -> list[Allocation]:
        """Largest first."""
        live = [item for item in self.allocations if item.start_ns <= time_ns < item.stop_ns]
        return sorted(live, key=lambda item: -item.num_bytes)

    def describe(self, planned: dict[str, int]) -> dict[str, Any]:
        """The map for profile.json; times are seconds since the first phase.

        `time_s`, `holders` and `moments`: samples of bytes by category, and their phases. `phases`:
        spans of each layer's forward and backward, the loss and the optimizer. `peak`: when it was,
        what was live, and the plan.
        """
        times = [at_ns for at_ns, _ in self.phase_changes]
        times += [at_ns for at_ns, _, _ in self.events()]
        start_ns = times[0]  # of the first phase; states are older
        stop_ns = max(times)
        samples = self._sample(start_ns, stop_ns)
        holders = {}
        for category in MemoryCategory:
            sizes = [sample[category] for _, sample in samples]
            if any(sizes):
                holders[category] = sizes
        phases = [
            {
                "name": " ".join(path),
                "start_s": (start - start_ns) / 1e9,
                "stop_s": (stop - start_ns) / 1e9,
            }
            for path, start, stop in self.spans()
            if len(path) == 1 + path[0].startswith("layer ")
        ]
        peak_ns, at_peak = max(samples, key=lambda sample: (sample[1].total(), sample[0]))
        peak = {
            "num_bytes": at_peak.total(),
            "measured_bytes": self.measured_peak_bytes,
            "time_s": max(peak_ns - start_ns, 0) / 1e9,
            "step_s": (stop_ns - start_ns) / 1e9,
            "phase": " / ".join(self.phase_at(peak_ns)),
            "holders": {category: at_peak[category] for category in holders if at_peak[category]},
            "planned": planned,
            "largest": _group_largest(self.live_at(peak_ns)),
        }
        return {
            "time_s": [round(max(at_ns - start_ns, 0) / 1e9, 6) for at_ns, _ in samples],
            "holders": holders,
            "moments": [" / ".join(self.phase_at(at_ns)) for at_ns, _ in samples],
            "phases": phases,
            "peak": peak,
        }

    def _sample(self, start_ns: int, stop_ns: int) -> list[tuple[int, Counter[str]]]:
        """Time and bytes by category at the highest point of each of MAP_POINTS intervals."""
        width_ns = max((stop_ns - start_ns) / MAP_POINTS, 1)
        sizes: Counter[str] = Counter()
        highest: dict[int, tuple[int, Counter[str]]] = {}
        for at_ns, num_bytes, allocation in self.events():
            sizes[allocation.category] += num_bytes
            interval = int(max(at_ns - start_ns, 0) / width_ns)
            if interval not in highest or sizes.total() >= highest[interval][1].total():
                highest[interval] = at_ns, Counter(sizes)
        return list(highest.values())


def sum_planned_by_category(ledger: Mapping[str, int]) -> dict[str, int]:
    """Bytes by category on one rank at the planned peak. `ledger`: the plan's, of one GPU."""
    categories = {
        "layer weights": MemoryCategory.UNSHARDED,
        "tiles": MemoryCategory.MLP,
        "kept activations": MemoryCategory.KEPT,
    }
    planned: Counter[str] = Counter()
    for name, num_bytes in ledger.items():
        planned[categories.get(name, name)] += num_bytes if name != "reserve" else 0
    return {category: num_bytes for category, num_bytes in planned.items() if num_bytes}


def _group_largest(live: list[Allocation]) -> list[dict[str, Any]]:
    """The largest groups of allocations with the same category, line, and shape (or size)."""
    groups: dict[tuple[str, str, str], list[Allocation]] = {}
    for item in live:
        form = f"{item.dtype} {list(item.shape)}" if item.dtype else format_bytes(item.num_bytes)
        groups.setdefault((item.category, form, item.line), []).append(item)
    rows: list[dict[str, Any]] = []
    for (category, form, line), group in groups.items():
        phase = f"({' / '.join(group[-1].phase)})" if group[-1].phase else ""
        num_bytes = sum(item.num_bytes for item in group)
        made_by = f"{line} {phase}".strip() or "before the step"
        what = f"{len(group)} x {form}" if len(group) > 1 else form
        rows.append({"holder": category, "num_bytes": num_bytes, "what": what, "made_by": made_by})
    return sorted(rows, key=lambda row: -row["num_bytes"])[:NUM_LARGEST]


def format_peak(peak: dict[str, Any]) -> str:
    """The `peak` entry of `MemoryMap.describe` as text."""
    total = peak["num_bytes"]
    planned = peak["planned"]
    percent = 100 * peak["time_s"] / max(peak["step_s"], 1e-9)
    summary = f"Peak: {format_bytes(total)} in phase {peak['phase'] or 'none'}, "
    summary += f"{peak['time_s']:.2f} s into a step of {peak['step_s']:.2f} s ({percent:.0f}%)"
    if peak["measured_bytes"] is not None:
        summary += f"; the allocator measured {format_bytes(peak['measured_bytes'])}"
    lines = [summary, "", f"Largest {NUM_LARGEST} allocations at the peak:"]
    for number, row in enumerate(peak["largest"], 1):
        size = f"{format_bytes(row['num_bytes'])} ({100 * row['num_bytes'] / max(total, 1):.0f}%)"
        lines.append(f"{number:>3}. {size} {row['holder']}: {row['what']}, {row['made_by']}")
    table = [("category", "measured", "planned")]
    for category in dict.fromkeys([*peak["holders"], *planned]):
        planned_size = format_bytes(planned[category]) if category in planned else "-"
        table.append((category, format_bytes(peak["holders"].get(category, 0)), planned_size))
    table.append(("total", format_bytes(total), format_bytes(sum(planned.values()))))
    return "\n".join([*lines, "", *(f"{name:<20}{a:>12}{b:>12}" for name, a, b in table)]) + "\n"
