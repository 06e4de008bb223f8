"""Where a step's time went: compute, exchange, copies or idle, by phase.

Every instant of the step counts once: as compute if anything computes, else as exchange if one is under way, else as
copies, else as idle. Exchanges and copies beside compute are hidden, and counted apart.
"""

import gzip
import json
import os
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from ithaka.phases import Listener, PhasePath, listening
from ithaka.profile.memory import PhaseLog

KINDS = ("compute", "exchange", "copies", "idle")
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_WAIT = "cudaStreamSynchronize"


class Activity(NamedTuple):
    start_ns: int
    stop_ns: int
    kind: str
    phase: PhasePath


class StepTimes(PhaseLog, ExitStack):
    """Enter it around one step, then `write`: PyTorch's trace with ithaka's phases in it.

    On a GPU only the device's work and its launches are traced: recording every operator costs the host a quarter of
    the step's time again. Phases are therefore noted by the host's clock and written into the trace afterwards.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.on_gpu = device, device.type == "cuda"
        activity = ProfilerActivity.CUDA if self.on_gpu else ProfilerActivity.CPU
        self.trace = profile(activities=[activity], profile_memory=not self.on_gpu)
        self.start_ns = self.stop_ns = 0

    def __enter__(self) -> "StepTimes":
        with warnings.catch_warnings():
            # PyTorch 2.11 warns even if there is one cycle; acc_events=True, its remedy, costs more than the step.
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            self.enter_context(self.trace)
        self.enter_context(listening(self))
        self.start_ns = time.time_ns()
        self.callback(self._stop)
        return self

    def _stop(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.current_stream(self.device).synchronize()  # sets the clock, see _base_ns
        self.stop_ns = time.time_ns()

    def write(self, path: Path) -> dict[str, Any]:
        """Write the trace as .json.gz. (The profiler's own compression goes line by line, which takes far longer.)"""
        plain = path.with_suffix("")
        try:
            self.trace.export_chrome_trace(str(plain))
            trace = json.loads(plain.read_bytes())
        except ValueError as error:  # the profiler raises nothing when the disk is full
            raise OSError(f"{plain} is incomplete") from error
        finally:
            plain.unlink(missing_ok=True)
        times = self.times(trace)
        self.annotate(trace)
        path.write_bytes(gzip.compress(json.dumps(trace).encode(), compresslevel=2))
        return times

    def times(self, trace: dict[str, Any]) -> dict[str, Any]:
        """Seconds of each kind by layer, direction and part, which add up to the step's, and those hidden."""
        activities = list(self._gpu_activities(trace)) or list(self._phases())
        return _partition(activities, self.start_ns, max([self.stop_ns, *(each.stop_ns for each in activities)]))

    def annotate(self, trace: dict[str, Any]) -> None:
        """Writes the phases into `trace`, as a row of their own: on a GPU, backward is another thread."""
        base_ns, row = self._base_ns(trace), {"pid": os.getpid(), "tid": 0}
        events = trace["traceEvents"]
        events.append({"ph": "M", "name": "thread_name", **row, "args": {"name": "ithaka"}})
        for path, start_ns, stop_ns in [(("step",), self.start_ns, self.stop_ns), *self.spans()]:
            when = {"ts": (start_ns - base_ns) / 1e3, "dur": (stop_ns - start_ns) / 1e3}
            events.append({"ph": "X", "cat": "user_annotation", "name": "ithaka: " + "/".join(path), **row, **when})

    def _base_ns(self, trace: dict[str, Any]) -> int:
        """What the trace's times are counted from.

        A trace of the device's work alone has a clock of its own. The step ends right after waiting for a stream, so
        the end of the last such call aligns the clocks.
        """
        calls = [e for e in trace["traceEvents"] if e.get("cat") in _LAUNCHES and e.get("ph") == "X"]
        waits = [e for e in calls if e["name"] == _WAIT] or calls  # in case a version of CUDA does not report that call
        if not waits:
            return trace.get("baseTimeNanoseconds", 0)
        return self.stop_ns - round(1e3 * max(e["ts"] + e["dur"] for e in waits))

    def _gpu_activities(self, trace: dict[str, Any]) -> Iterator[Activity]:
        """Kernels and copies; each belongs to the phase that launched it, however late it runs."""
        base_ns, events = self._base_ns(trace), [e for e in trace["traceEvents"] if e.get("ph") == "X"]
        launches = (e for e in events if e["cat"] in _LAUNCHES and "correlation" in e.get("args", {}))
        launched = {e["args"]["correlation"]: e["ts"] for e in launches}
        for e in (e for e in events if e["cat"] in _GPU_WORK):
            at = launched.get(e["args"].get("correlation", -1), e["ts"])
            between = e["cat"] == "gpu_memcpy" and ("HtoD" in e["name"] or "DtoH" in e["name"])
            kind = "exchange" if "nccl" in e["name"].lower() else "copies" if between else "compute"
            start_ns, stop_ns, at_ns = (base_ns + round(1e3 * us) for us in (e["ts"], e["ts"] + e["dur"], at))
            yield Activity(start_ns, stop_ns, kind, self.at(at_ns))

    def _phases(self) -> Iterator[Activity]:
        """On a CPU a phase's time is its own; those named for a kind count as that, others as compute."""
        for (at_ns, path), (until_ns, _) in pairwise([(self.start_ns, ()), *self.marks, (self.stop_ns, ())]):
            yield Activity(at_ns, until_ns, path[-1] if path and path[-1] in KINDS else "compute", path)


def _partition(activities: list[Activity], start_ns: int, stop_ns: int) -> dict[str, Any]:
    """Gives each instant to one activity."""
    hidden, rows = dict.fromkeys(("exchange", "copies"), 0.0), dict[PhasePath, dict[str, float]]()
    starts = sorted(activities, key=lambda a: a.start_ns)
    edges = sorted({start_ns, stop_ns, *(min(max(at, start_ns), stop_ns) for a in starts for at in a[:2])})
    running: list[Activity] = []
    next_one = 0
    for left, right in pairwise(edges):
        while next_one < len(starts) and starts[next_one].start_ns <= left:
            running.append(starts[next_one])
            next_one += 1
        running = [a for a in running if a.stop_ns > left]
        waiting_for = starts[next_one].phase if next_one < len(starts) else ()
        active = [(a.kind, a.phase) for a in reversed(running)] or [("idle", waiting_for)]
        kind, phase = min(active, key=lambda one: KINDS.index(one[0]))
        rows.setdefault(phase[:3], dict.fromkeys(KINDS, 0.0))[kind] += (right - left) / 1e9
        for other in {a.kind for a in running} - {kind} if kind == "compute" else ():
            hidden[other] += (right - left) / 1e9
    phases = [{"path": list(path), **row} for path, row in rows.items()]
    return {"wall_s": (stop_ns - start_ns) / 1e9, "hidden": hidden, "phases": phases}


# ---- phases alone, without a trace


class Timeline(Listener):
    """How long each phase took, and on a GPU how high memory rose (the compute stream's time, the allocator's peak)."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.peaks = device, Counter[PhasePath]()
        self._open: dict[PhasePath, Any] = {}  # CUDA events, or seconds
        self._done: list[tuple[PhasePath, Any, Any]] = []

    def enter(self, path: PhasePath) -> None:
        self._open[path] = self._now()

    def leave(self, path: PhasePath) -> None:
        now = self._now()
        self._done.append((path, self._open.pop(path), now))

    def _now(self) -> Any:
        """Also notes the peak since the last call, for every open phase."""
        if self.device.type != "cuda":
            return time.perf_counter()
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.peaks |= Counter(dict.fromkeys(self._open, peak))  # the larger of both
        return torch.cuda.current_stream(self.device).record_event(torch.cuda.Event(enable_timing=True))

    def seconds(self) -> dict[PhasePath, float]:
        sums: dict[PhasePath, float] = defaultdict(float)
        for path, start, stop in self._done:
            sums[path] += stop - start if isinstance(start, float) else start.elapsed_time(stop) / 1e3
        return dict(sums)
