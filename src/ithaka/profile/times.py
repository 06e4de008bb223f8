"""Where a step's time went, from the profiler's trace: compute, exchange, copies, idle, by phase.

Every instant of the step belongs to one class: compute if anything computes, else exchange if one is
under way, else copies, else idle. What runs beside compute is hidden, and told separately.
"""

import os
import threading
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ithaka.phases import Path

PREFIX = "ithaka: "  # of the trace's annotations that are phases
STEP = "ithaka step"
CLASSES = ("compute", "exchange", "copies", "idle")
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
WAIT = "cudaStreamSynchronize"


@dataclass(frozen=True)
class Activity:
    start: float  # microseconds, as in the trace
    stop: float
    kind: str
    phase: Path


@dataclass
class Times:
    """Seconds. `hidden`: exchange and copies that ran beside compute. `phases` add up to the wall time."""

    wall_s: float = 0.0
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    hidden: dict[str, float] = field(default_factory=lambda: {"exchange": 0.0, "copies": 0.0})
    phases: dict[Path, dict[str, float]] = field(default_factory=dict)

    def add(self, phase: Path, kind: str, seconds: float) -> None:
        self.totals[kind] += seconds
        row = self.phases.setdefault(phase, dict.fromkeys(CLASSES, 0.0))
        row[kind] += seconds


def times_of(trace: dict[str, Any]) -> Times:
    """From a Chrome trace of one profiled step."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    step = next(e for e in events if e["name"] == STEP)
    marks = _Marks(e for e in events if e["name"].startswith(PREFIX) and e["cat"] == "user_annotation")
    on_gpu = any(e["cat"] == "kernel" for e in events)
    found = list(_gpu_activities(events, marks) if on_gpu else _cpu_activities(events, marks, step["args"]["thread"]))
    start = step["ts"]
    stop = max([start + step["dur"], *(a.stop for a in found)]) if on_gpu else start + step["dur"]
    return _partition([a for a in found if a.stop > start and a.start < stop], start, stop)


class Annotations:
    """Listens to phases and writes them into a trace, by the clock: so the host's operators need not be recorded.

    A trace of the device's work alone has a clock of its own. Whoever calls `stop` waits for a stream right before it:
    the end of that call, the last of its kind, says how the two clocks go together.
    """

    def __init__(self) -> None:
        self._open: list[int] = []
        self._spans: list[tuple[int, int, Path]] = []  # start and stop in ns
        self._thread = threading.get_native_id()
        self._start_ns = self._stop_ns = 0

    def start(self) -> None:
        self._start_ns = time.time_ns()

    def stop(self) -> None:
        self._stop_ns = time.time_ns()

    @property
    def wall_s(self) -> float:
        return (self._stop_ns - self._start_ns) / 1e9

    def enter(self, path: Path) -> None:
        self._open.append(time.time_ns())

    def leave(self, path: Path) -> None:
        self._spans.append((self._open.pop(), time.time_ns(), path))

    def add_to(self, trace: dict[str, Any]) -> None:
        """As a row of their own: on a GPU, backward is another thread."""
        base_ns = self._base_ns(trace)
        row = {"pid": os.getpid(), "tid": 0}

        def span(name: str, start_ns: int, stop_ns: int, **args: Any) -> dict[str, Any]:
            ts, dur = (start_ns - base_ns) / 1e3, (stop_ns - start_ns) / 1e3
            return {"ph": "X", "cat": "user_annotation", "name": name, **row, "ts": ts, "dur": dur, "args": args}

        events = trace["traceEvents"]
        events.append({"ph": "M", "name": "thread_name", **row, "args": {"name": "ithaka"}})
        events.append(span(STEP, self._start_ns, self._stop_ns, thread=self._thread))
        events += [span(PREFIX + "/".join(path), start, stop) for start, stop, path in self._spans]

    def _base_ns(self, trace: dict[str, Any]) -> int:
        """What the trace's times are counted from."""
        calls = [e for e in trace["traceEvents"] if e.get("cat") in _LAUNCHES and e.get("ph") == "X"]
        waits = [e for e in calls if e["name"] == WAIT] or calls  # in case a version of CUDA does not tell that call
        if not waits:
            return trace.get("baseTimeNanoseconds", 0)
        return self._stop_ns - round(1e3 * max(e["ts"] + e["dur"] for e in waits))


class _Marks:
    """Which phase was the current one when; phases are entered and left one after the other."""

    def __init__(self, spans: Iterable[dict[str, Any]]) -> None:
        changes = []
        for span in spans:
            path = tuple(span["name"].removeprefix(PREFIX).split("/"))
            changes += [(span["ts"], len(path), path), (span["ts"] + span["dur"], -len(path), path[:-1])]
        changes.sort(key=lambda change: change[:2])
        self._times = [change[0] for change in changes]
        self._paths = [change[2] for change in changes]

    def at(self, time: float) -> Path:
        index = bisect_right(self._times, time)
        return self._paths[index - 1] if index else ()


def _gpu_activities(events: list[dict[str, Any]], marks: _Marks) -> Iterator[Activity]:
    """Kernels and copies; each belongs to the phase that launched it, however late it runs."""
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e["cat"] in _LAUNCHES and "correlation" in e.get("args", {})
    }
    for e in events:
        if e["cat"] in _GPU_WORK:
            at = launched.get(e["args"].get("correlation"), e["ts"])
            yield Activity(e["ts"], e["ts"] + e["dur"], _gpu_kind(e), marks.at(at))


def _gpu_kind(event: dict[str, Any]) -> str:
    if "nccl" in event["name"].lower():
        return "exchange"
    between = event["cat"] == "gpu_memcpy" and ("HtoD" in event["name"] or "DtoH" in event["name"])
    return "copies" if between else "compute"


def _cpu_activities(events: list[dict[str, Any]], marks: _Marks, thread: Any) -> Iterator[Activity]:
    """Operations of the training thread, and collectives of any thread."""
    for e in events:
        stop = e["ts"] + e["dur"]
        if e["name"].startswith(("gloo:", "nccl:")):
            yield Activity(e["ts"], stop, "exchange", marks.at(e["ts"]))
        elif e["cat"] == "cpu_op" and e["tid"] == thread and _computes(e["name"]):
            phase = marks.at(e["ts"])
            yield Activity(e["ts"], stop, "copies" if phase[-1:] == ("copies",) else "compute", phase)


def _computes(name: str) -> bool:
    """Operators; not collectives, nor the frames of autograd's own nodes, which hold Python too."""
    return "::" in name and not name.startswith(("c10d::", "autograd::", "torch::"))


def _partition(activities: list[Activity], start: float, stop: float) -> Times:
    times = Times(wall_s=(stop - start) / 1e6)
    starts = sorted(activities, key=lambda a: a.start)
    edges = sorted({start, stop, *(min(max(t, start), stop) for a in starts for t in (a.start, a.stop))})
    running: list[Activity] = []
    at = 0
    for left, right in zip(edges, edges[1:], strict=False):
        while at < len(starts) and starts[at].start <= left:
            running.append(starts[at])
            at += 1
        running = [a for a in running if a.stop > left]
        seconds = (right - left) / 1e6
        if not running:
            waiting_for = starts[at].phase if at < len(starts) else ()
            times.add(waiting_for, "idle", seconds)
            continue
        kinds = {a.kind for a in running}
        kind = next(k for k in CLASSES if k in kinds)
        phase = next(a.phase for a in reversed(running) if a.kind == kind)  # the innermost
        times.add(phase, kind, seconds)
        for other in ("exchange", "copies"):
            if other in kinds and kind == "compute":
                times.hidden[other] += seconds
    return times
