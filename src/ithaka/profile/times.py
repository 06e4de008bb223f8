"""Where a step's time went: compute, exchange, copies or idle, by phase.

Every instant of the step counts once: as compute if anything computes, else as exchange if one is under way, else as
copies, else as idle. Exchanges and copies beside compute are hidden, and counted apart.
"""

import gzip
import json
import os
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from ithaka.phases import PhasePath, listening
from ithaka.profile.memory import PhaseLog
from ithaka.profile.progress import Job

CLASSES = ("compute", "exchange", "copies", "idle")
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_WAIT = "cudaStreamSynchronize"
_NO_WORK = ("c10d::", "autograd::", "torch::")  # collectives, and frames of autograd's nodes, which hold Python too

Events = list[dict[str, Any]]  # of a Chrome trace; times are in microseconds
PhaseAt = Callable[[float], PhasePath]


class Activity(NamedTuple):
    start: float
    stop: float
    kind: str
    phase: PhasePath


@dataclass
class Times:
    """Seconds. `hidden`: exchange and copies beside compute. `phases` add up to the wall time."""

    wall_s: float = 0.0
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    hidden: dict[str, float] = field(default_factory=lambda: {"exchange": 0.0, "copies": 0.0})
    phases: dict[PhasePath, dict[str, float]] = field(default_factory=dict)

    def add(self, phase: PhasePath, kind: str, seconds: float) -> None:
        self.totals[kind] += seconds
        self.phases.setdefault(phase, dict.fromkeys(CLASSES, 0.0))[kind] += seconds

    def as_data(self, job: Job | None) -> dict[str, Any]:
        """Rows by layer, direction and part, with the rate reached while computing and the device's own."""
        flops = job.flops() if job is not None else {}
        rows: dict[PhasePath, dict[str, float]] = {}
        for path, row in self.phases.items():
            sums = rows.setdefault(path[:3], dict.fromkeys(CLASSES, 0.0))
            for kind, seconds in row.items():
                sums[kind] += seconds
        for path in [p for p in rows if len(p) == 2 and not any(_is_below(other, p) for other in rows)]:
            flops[path] = sum(f for part, f in flops.items() if _is_below(part, path))
        phases = []
        for path, row in rows.items():
            done = flops.get(path)
            reached = done / row["compute"] if done and row["compute"] else None
            rate = job.rate(path) if job is not None and done else None
            phases.append({"path": list(path), **row, "flops": done, "flops_s": reached, "device_flops_s": rate})
        return {"wall_s": self.wall_s, "totals": self.totals, "hidden": self.hidden, "phases": phases}


def _is_below(path: PhasePath, above: PhasePath) -> bool:
    return len(path) > len(above) and path[: len(above)] == above


class StepTimes(PhaseLog):
    """Enter it around one step, then `write`: PyTorch's trace with ithaka's phases in it. `job`: what the step does.

    On a GPU only the device's work and its launches are traced: recording every operator costs the host a quarter of
    the step's time again. Phases are therefore noted by the host's clock and written into the trace afterwards.
    """

    def __init__(self, device: torch.device, job: Job | None = None) -> None:
        super().__init__()
        self.device, self.on_gpu, self.job = device, device.type == "cuda", job
        activity = ProfilerActivity.CUDA if self.on_gpu else ProfilerActivity.CPU
        self.trace = profile(activities=[activity], profile_memory=not self.on_gpu)
        self.start_ns = self.stop_ns = 0
        self._thread = threading.get_native_id()
        self._entered = ExitStack()

    def __enter__(self) -> "StepTimes":
        with warnings.catch_warnings():
            # PyTorch 2.11 warns even if there is one cycle; acc_events=True, its remedy, costs more than the step.
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            self._entered.enter_context(self.trace)
        self._entered.enter_context(listening(self))
        self.start_ns = time.time_ns()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.current_stream(self.device).synchronize()  # sets the clock, see _base_ns
        self.stop_ns = time.time_ns()
        self._entered.close()

    @property
    def wall_s(self) -> float:
        return (self.stop_ns - self.start_ns) / 1e9

    def write(self, path: Path) -> Times:
        """The trace as .json.gz. (The profiler's own compression goes line by line, which takes far longer.)"""
        plain = path.with_suffix("")
        self.trace.export_chrome_trace(str(plain))
        trace = json.loads(plain.read_bytes())
        plain.unlink()
        times = self.times(trace)
        self.annotate(trace)
        path.write_bytes(gzip.compress(json.dumps(trace).encode(), compresslevel=2))
        return times

    def times(self, trace: dict[str, Any]) -> Times:
        base_ns = self._base_ns(trace)
        events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
        on_gpu = any(e["cat"] == "kernel" for e in events)
        activities = _gpu_activities if on_gpu else _cpu_activities
        found = list(activities(events, lambda at: self.at(base_ns + round(1e3 * at)), self._thread))
        start, stop = ((at_ns - base_ns) / 1e3 for at_ns in (self.start_ns, self.stop_ns))
        stop = max([stop, *(a.stop for a in found)]) if on_gpu else stop
        return _partition([a for a in found if a.stop > start and a.start < stop], start, stop)

    def annotate(self, trace: dict[str, Any]) -> None:
        """Writes the phases into `trace`, as a row of their own: on a GPU, backward is another thread."""
        base_ns = self._base_ns(trace)
        row = {"pid": os.getpid(), "tid": 0}

        def span(name: str, start_ns: int, stop_ns: int) -> dict[str, Any]:
            ts, dur = (start_ns - base_ns) / 1e3, (stop_ns - start_ns) / 1e3
            return {"ph": "X", "cat": "user_annotation", "name": name, **row, "ts": ts, "dur": dur}

        events = trace["traceEvents"]
        events.append({"ph": "M", "name": "thread_name", **row, "args": {"name": "ithaka"}})
        events.append(span("ithaka step", self.start_ns, self.stop_ns))
        opened: list[tuple[int, PhasePath]] = []
        for at_ns, path in self.marks:
            if len(path) > len(opened):
                opened.append((at_ns, path))
            else:
                start_ns, left = opened.pop()
                events.append(span("ithaka: " + "/".join(left), start_ns, at_ns))

    def _base_ns(self, trace: dict[str, Any]) -> int:
        """What the trace's times are counted from.

        A trace of the device's work alone has a clock of its own. The step ends right after waiting for a stream:
        the end of the last such call tells how the clocks go together.
        """
        calls = [e for e in trace["traceEvents"] if e.get("cat") in _LAUNCHES and e.get("ph") == "X"]
        waits = [e for e in calls if e["name"] == _WAIT] or calls  # in case a version of CUDA does not tell that call
        if not waits:
            return trace.get("baseTimeNanoseconds", 0)
        return self.stop_ns - round(1e3 * max(e["ts"] + e["dur"] for e in waits))


def _gpu_activities(events: Events, phase_at: PhaseAt, thread: int) -> Iterator[Activity]:
    """Kernels and copies; each belongs to the phase that launched it, however late it runs."""
    launches = (e for e in events if e["cat"] in _LAUNCHES and "correlation" in e.get("args", {}))
    launched = {e["args"]["correlation"]: float(e["ts"]) for e in launches}
    for e in events:
        if e["cat"] in _GPU_WORK:
            start: float = e["ts"]
            at = launched.get(e["args"].get("correlation", -1), start)
            yield Activity(start, start + e["dur"], _gpu_kind(e), phase_at(at))


def _gpu_kind(event: dict[str, Any]) -> str:
    if "nccl" in event["name"].lower():
        return "exchange"
    between = event["cat"] == "gpu_memcpy" and ("HtoD" in event["name"] or "DtoH" in event["name"])
    return "copies" if between else "compute"


def _cpu_activities(events: Events, phase_at: PhaseAt, thread: int) -> Iterator[Activity]:
    """Operations of the training thread, and collectives of any thread."""
    for e in events:
        stop, name = e["ts"] + e["dur"], e["name"]
        if name.startswith(("gloo:", "nccl:")):
            yield Activity(e["ts"], stop, "exchange", phase_at(e["ts"]))
        elif e["cat"] == "cpu_op" and e["tid"] == thread and "::" in name and not name.startswith(_NO_WORK):
            phase = phase_at(e["ts"])
            yield Activity(e["ts"], stop, "copies" if phase[-1:] == ("copies",) else "compute", phase)


def _partition(activities: list[Activity], start: float, stop: float) -> Times:
    """Gives each instant to one activity."""
    times = Times(wall_s=(stop - start) / 1e6)
    starts = sorted(activities, key=lambda a: a.start)
    edges = sorted({start, stop, *(min(max(at, start), stop) for a in starts for at in (a.start, a.stop))})
    running: list[Activity] = []
    next_one = 0
    for left, right in zip(edges, edges[1:], strict=False):
        while next_one < len(starts) and starts[next_one].start <= left:
            running.append(starts[next_one])
            next_one += 1
        running = [a for a in running if a.stop > left]
        seconds = (right - left) / 1e6
        if not running:
            waiting_for = starts[next_one].phase if next_one < len(starts) else ()
            times.add(waiting_for, "idle", seconds)
            continue
        kinds = {a.kind for a in running}
        kind = next(k for k in CLASSES if k in kinds)
        times.add(next(a.phase for a in reversed(running) if a.kind == kind), kind, seconds)  # the innermost
        if kind == "compute":
            for other in kinds - {"compute"}:
                times.hidden[other] += seconds
    return times


# ---- phases alone, without a trace


@dataclass
class TimedPhase:
    path: PhasePath
    start: Any  # CUDA event, or seconds
    stop: Any = None
    peak_bytes: int = 0

    @property
    def seconds(self) -> float:
        if isinstance(self.start, float):
            return self.stop - self.start
        return self.start.elapsed_time(self.stop) / 1e3


@dataclass
class Timeline:
    """Listens to phases: how long each took, and on a GPU how high memory rose (the compute stream's time, the
    allocator's peak)."""

    device: torch.device
    phases: list[TimedPhase] = field(default_factory=list)
    _open: dict[PhasePath, TimedPhase] = field(default_factory=dict)

    def enter(self, path: PhasePath) -> None:
        self._open[path] = TimedPhase(path, self._now())

    def leave(self, path: PhasePath) -> None:
        stop = self._now()
        done = self._open.pop(path)
        done.stop = stop
        self.phases.append(done)

    def _now(self) -> Any:
        """Also notes the peak since the last call, for every open phase."""
        if self.device.type != "cuda":
            return time.perf_counter()
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        for phase in self._open.values():
            phase.peak_bytes = max(phase.peak_bytes, peak)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_by(self, *keep: int) -> dict[PhasePath, float]:
        """Seconds summed over phases with the same names at the positions `keep` of their path."""
        sums: dict[PhasePath, float] = defaultdict(float)
        for phase in self.phases:
            if len(phase.path) == max(keep) + 1:
                sums[tuple(phase.path[i] for i in keep)] += phase.seconds
        return dict(sums)
