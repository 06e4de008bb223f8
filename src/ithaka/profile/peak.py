"""The memory map of a step, and its peak in words."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from ithaka.phases import HOLDERS, Path
from ithaka.plan.show import size
from ithaka.profile.ledger import Holding, Ledger

MAP_POINTS = 800
LARGEST = 10


@dataclass(frozen=True)
class Group:
    """Pieces of memory of one holder made by one line, alike in shape."""

    holder: str
    num_bytes: int
    count: int
    shape: tuple[int, ...]
    dtype: str
    line: str
    phase: Path


def groups(holdings: Iterable[Holding]) -> list[Group]:
    """Largest first. Parameters and the like, which no line of this step made, go by holder and shape."""
    together: dict[tuple, list[Holding]] = {}
    for holding in holdings:
        together.setdefault((holding.holder, holding.line, holding.shape, holding.dtype), []).append(holding)
    found = [
        Group(holder, sum(h.num_bytes for h in alike), len(alike), shape, dtype, line, alike[-1].phase)
        for (holder, line, shape, dtype), alike in together.items()
    ]
    return sorted(found, key=lambda group: -group.num_bytes)


def by_holder(holdings: Iterable[Holding]) -> dict[str, int]:
    """Bytes per holder, in the map's order; names it does not know come last."""
    sums = dict.fromkeys(HOLDERS, 0)
    for holding in holdings:
        sums[holding.holder] = sums.get(holding.holder, 0) + holding.num_bytes
    return {holder: num_bytes for holder, num_bytes in sums.items() if num_bytes}


def memory_map(ledger: Ledger, points: int = MAP_POINTS) -> dict[str, Any]:
    """Live bytes over time by holder: in each of `points` equal stretches, the moment with the most.

    The whole peak is therefore always among them.
    """
    changes = ledger.changes
    if not changes:
        return {"time_s": [], "holders": {}, "phases": [], "moments": []}
    start, stop = _stretch(ledger)
    width = max((stop - start) / points, 1)
    now, total = dict.fromkeys(HOLDERS, 0), 0
    rows: list[tuple[int, dict[str, int]]] = []
    bin_index, best = 0, -1
    for change in changes:
        total += change.num_bytes
        now[change.holder] = now.get(change.holder, 0) + change.num_bytes
        index = int(max(change.time_ns - start, 0) / width)
        if index > bin_index or not rows:
            bin_index, best = index, -1
            rows.append((change.time_ns, dict(now)))
        if total >= best:
            best, rows[-1] = total, (change.time_ns, dict(now))
    names = [holder for holder in now if any(row.get(holder) for _, row in rows)]
    return {
        "time_s": [round(max(at - start, 0) / 1e9, 6) for at, _ in rows],
        "holders": {name: [row.get(name, 0) for _, row in rows] for name in names},
        "moments": [" / ".join(ledger.phase_at(at)) for at, _ in rows],
        "phases": _spans(ledger, start, stop),
    }


def _stretch(ledger: Ledger) -> tuple[int, int]:
    """From the first phase (what was registered is older) to the last event."""
    start = ledger.marks[0][0] if ledger.marks else ledger.changes[0].time_ns
    last_mark = ledger.marks[-1][0] if ledger.marks else 0
    return start, max(last_mark, ledger.changes[-1].time_ns)


def _spans(ledger: Ledger, start: int, stop: int) -> list[dict[str, Any]]:
    """When each layer's forward and backward, the loss and the optimizer ran."""
    alike = groupby([*ledger.marks, (stop, ())], key=lambda mark: mark[1][:2])
    begun = [(path, next(marks)[0]) for path, marks in alike]
    return [
        {"name": " ".join(path), "start_s": (at - start) / 1e9, "stop_s": (until - start) / 1e9}
        for (path, at), (_, until) in pairwise(begun)
        if len(path) == 2 or (path and not path[0].startswith("layer "))
    ]


def describe_peak(ledger: Ledger, measured_bytes: int, planned: dict[str, int] | None) -> dict[str, Any]:
    """The peak as data: when, in which phase, who held how much, the ten largest holders, the plan beside."""
    live, peak_ns = ledger.live_at_peak(), ledger.peak_ns
    start, stop = _stretch(ledger) if ledger.changes else (0, 1)
    return {
        "num_bytes": ledger.peak_bytes,
        "measured_bytes": measured_bytes,
        "time_s": max(peak_ns - start, 0) / 1e9,
        "step_s": (stop - start) / 1e9,
        "phase": " / ".join(ledger.phase_at(peak_ns)),
        "holders": by_holder(live),
        "planned": planned,
        "largest": [
            {**vars(group), "shape": list(group.shape), "phase": " / ".join(group.phase)}
            for group in groups(live)[:LARGEST]
        ],
    }


def in_words(peak: dict[str, Any]) -> str:
    """The peak as text."""
    share = 100 * peak["time_s"] / max(peak["step_s"], 1e-9)
    lines = [
        f"Peak: {size(peak['num_bytes'])} after {peak['time_s']:.2f} s of {peak['step_s']:.2f} s "
        f"({share:.0f} %), in {peak['phase'] or 'no phase'}; "
        f"the allocator measured {size(peak['measured_bytes'])}.",
        "",
        "The ten largest holders then:",
    ]
    for rank, one in enumerate(peak["largest"], 1):
        lines.append(f"{rank:>3}. {_group_words(one, peak['num_bytes'])}")
    lines += ["", _table(peak)]
    return "\n".join(lines) + "\n"


def _group_words(one: dict[str, Any], total: int) -> str:
    shape = f"{one['dtype']} {one['shape']}" if one["shape"] else one["dtype"]
    many = f"{one['count']} x " if one["count"] > 1 else ""
    line = f", {one['line']}" if one["line"] else ", there before the step"
    made = f" ({one['phase']})" if one["phase"] else ""
    share = 100 * one["num_bytes"] / max(total, 1)
    return f"{size(one['num_bytes'])} ({share:.0f} %) {one['holder']}: {many}{shape or 'bytes'}{line}{made}"


def _table(peak: dict[str, Any]) -> str:
    planned = peak["planned"] or {}
    names = [*peak["holders"], *(name for name in planned if name not in peak["holders"])]
    rows = [("holder", "measured", "planned" if planned else "")]
    for name in names:
        beside = size(planned[name]) if name in planned else "-" if planned else ""
        rows.append((name, size(peak["holders"].get(name, 0)), beside))
    rows.append(("total", size(peak["num_bytes"]), size(sum(planned.values())) if planned else ""))
    return "\n".join(f"{name:<20}{there:>12}{beside:>12}".rstrip() for name, there, beside in rows)


def sampled(times_s: list[float], samples: list[tuple[float, int]]) -> list[int]:
    """A gauge read at some moments, given at the map's times: the last reading before each."""
    at = [time for time, _ in samples]
    return [samples[max(bisect_left(at, time) - 1, 0)][1] if samples else 0 for time in times_s]
