"""Profile one training step: where memory and time go, a trace, and a summary of the peak.

Each instant of the step counts once: as compute if a kernel runs, else as exchange if a collective
is in flight, else as copies, else as idle. Exchange and copies that overlap compute are hidden and
counted separately.
"""

import gzip
import json
import os
import pickle
import platform
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil
import torch
import transformers
from torch import nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

import ithaka
from ithaka.config.units import format_bytes
from ithaka.facts.machine import num_cores
from ithaka.phases import PhasePath, listening
from ithaka.profile.live import AllocatorHistory, LiveBytes
from ithaka.profile.memory import PhaseLog, format_peak

KINDS = ("compute", "exchange", "copies", "idle")
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_SYNCHRONIZE = "cudaStreamSynchronize"


class Activity(NamedTuple):
    start_ns: int
    stop_ns: int
    kind: str
    phase: PhasePath


class StepTimes(PhaseLog, ExitStack):
    """Enter around one step, then call `write` for PyTorch's trace with ithaka's phases in it.

    On a GPU the trace has kernels, copies and launches only: recording every operator slows the
    host by a quarter of the step. Phases are therefore timed by the host's clock and added to the
    trace afterwards.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.on_gpu = device.type == "cuda"
        activity = ProfilerActivity.CUDA if self.on_gpu else ProfilerActivity.CPU
        self.trace = profile(activities=[activity], profile_memory=not self.on_gpu)
        self.start_ns = 0
        self.stop_ns = 0

    def __enter__(self) -> Self:
        with warnings.catch_warnings():
            # PyTorch 2.11 warns even for a single cycle; acc_events=True, its remedy, takes longer
            # than the step.
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            self.enter_context(self.trace)
        self.enter_context(listening(self))
        self.start_ns = time.time_ns()
        self.callback(self._stop)
        return self

    def _stop(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.current_stream(self.device).synchronize()  # aligns the clocks, see _base_ns
        self.stop_ns = time.time_ns()

    def write(self, path: Path) -> dict[str, Any]:
        """Write the trace as .json.gz and return `times`. The profiler compresses more slowly."""
        uncompressed = path.with_suffix("")
        try:
            self.trace.export_chrome_trace(str(uncompressed))
            trace = json.loads(uncompressed.read_bytes())
        except ValueError as error:  # the profiler raises nothing when the disk is full
            raise OSError(f"{uncompressed} is incomplete") from error
        finally:
            uncompressed.unlink(missing_ok=True)
        times = self.times(trace)
        self.annotate(trace)
        path.write_bytes(gzip.compress(json.dumps(trace).encode(), compresslevel=2))
        return times

    def times(self, trace: dict[str, Any]) -> dict[str, Any]:
        """Seconds of each kind by layer, direction and part, which sum to the step's; hidden
        seconds."""
        activities = list(self._gpu_activities(trace)) or list(self._cpu_activities())
        stop_ns = max([self.stop_ns, *(a.stop_ns for a in activities)])
        return _partition(activities, self.start_ns, stop_ns)

    def annotate(self, trace: dict[str, Any]) -> None:
        """Add the phases to `trace` as a row: on a GPU, backward runs in another thread."""
        base_ns = self._base_ns(trace)
        row = {"pid": os.getpid(), "tid": 0}
        events = trace["traceEvents"]
        events.append({"ph": "M", "name": "thread_name", **row, "args": {"name": "ithaka"}})
        for path, start_ns, stop_ns in [(("step",), self.start_ns, self.stop_ns), *self.spans()]:
            event = {"ph": "X", "cat": "user_annotation", "name": f"ithaka: {'/'.join(path)}"}
            span = {"ts": (start_ns - base_ns) / 1e3, "dur": (stop_ns - start_ns) / 1e3}
            events.append(event | row | span)

    def _base_ns(self, trace: dict[str, Any]) -> int:
        """Time zero of the trace on the host's clock. A trace of GPU work only has its own clock;
        the stream synchronization that ends the step aligns the two."""
        events = trace["traceEvents"]
        calls = [e for e in events if e.get("cat") in _LAUNCHES and e.get("ph") == "X"]
        # Some CUDA versions do not report the synchronization.
        waits = [e for e in calls if e["name"] == _SYNCHRONIZE] or calls
        if not waits:
            return trace.get("baseTimeNanoseconds", 0)
        return self.stop_ns - round(1e3 * max(e["ts"] + e["dur"] for e in waits))

    def _gpu_activities(self, trace: dict[str, Any]) -> Iterator[Activity]:
        """Kernels and copies. Each belongs to the phase that launched it, however late it runs."""
        base_ns = self._base_ns(trace)
        events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
        launched = {
            e["args"]["correlation"]: e["ts"]
            for e in events
            if e["cat"] in _LAUNCHES and "correlation" in e.get("args", {})
        }
        for e in events:
            if e["cat"] not in _GPU_WORK:
                continue
            launch = launched.get(e["args"].get("correlation", -1), e["ts"])
            start_ns = base_ns + round(1e3 * e["ts"])
            stop_ns = base_ns + round(1e3 * (e["ts"] + e["dur"]))
            launch_ns = base_ns + round(1e3 * launch)
            yield Activity(start_ns, stop_ns, _kind_of_work(e), self.phase_at(launch_ns))

    def _cpu_activities(self) -> Iterator[Activity]:
        """One activity per phase. A phase named after a kind has it; all others are compute."""
        changes = [(self.start_ns, PhasePath()), *self.phase_changes, (self.stop_ns, PhasePath())]
        for (start_ns, path), (stop_ns, _) in pairwise(changes):
            kind = path[-1] if path and path[-1] in KINDS else "compute"
            yield Activity(start_ns, stop_ns, kind, path)


def _kind_of_work(event: dict[str, Any]) -> str:
    name = event["name"]
    if "nccl" in name.lower():
        return "exchange"
    crosses_pcie = event["cat"] == "gpu_memcpy" and ("HtoD" in name or "DtoH" in name)
    return "copies" if crosses_pcie else "compute"


def _partition(activities: list[Activity], start_ns: int, stop_ns: int) -> dict[str, Any]:
    """Assign each instant to one activity, or to idle."""
    hidden = dict.fromkeys(("exchange", "copies"), 0.0)
    rows = dict[PhasePath, dict[str, float]]()
    by_start = sorted(activities, key=lambda a: a.start_ns)
    edges = {start_ns, stop_ns}
    for a in activities:
        edges |= {min(max(at, start_ns), stop_ns) for at in (a.start_ns, a.stop_ns)}
    running: list[Activity] = []
    num_started = 0
    for left, right in pairwise(sorted(edges)):
        while num_started < len(by_start) and by_start[num_started].start_ns <= left:
            running.append(by_start[num_started])
            num_started += 1
        running = [a for a in running if a.stop_ns > left]
        next_phase = by_start[num_started].phase if num_started < len(by_start) else ()
        candidates = [(a.kind, a.phase) for a in reversed(running)] or [("idle", next_phase)]
        kind, phase = min(candidates, key=lambda candidate: KINDS.index(candidate[0]))
        rows.setdefault(phase[:3], dict.fromkeys(KINDS, 0.0))[kind] += (right - left) / 1e9
        if kind == "compute":
            for other in {a.kind for a in running} - {kind}:
                hidden[other] += (right - left) / 1e9
    phases = [{"path": list(path), **row} for path, row in rows.items()]
    return {"wall_s": (stop_ns - start_ns) / 1e9, "hidden": hidden, "phases": phases}


class StepProfile(ExitStack):
    """Enter around one step, then call `write`. With `times` of an earlier step: memory only."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        times: StepTimes | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.optimizer = optimizer
        self.times = times or StepTimes(device)
        self._records_times = times is None
        self.memory = AllocatorHistory(device) if device.type == "cuda" else LiveBytes()

    def __enter__(self) -> Self:
        self.enter_context(self.memory)
        self.memory.set_state_categories(self.model, self.optimizer)
        if self._records_times:
            self.enter_context(self.times)  # last, so the step does not include exiting `memory`
        return self

    def write(self, folder: Path, step: int, plain_s: float | None, planned: dict[str, int]) -> str:
        """Write all files to `folder` and return the summary of the peak. `plain_s`: time of a step
        without profiling. `planned`: bytes by category at the planned peak."""
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(self.memory, AllocatorHistory):
            (folder / "memory.pickle").write_bytes(pickle.dumps(self.memory.snapshot))
        memory = self.memory.describe(planned)
        times = self.times.write(folder / "trace.json.gz")
        data = {"step": step, "plain_s": plain_s, "memory": memory, "times": times}
        summary = format_peak(memory["peak"])
        (folder / "profile.json").write_text(json.dumps(data), encoding="utf-8")
        (folder / "peak.txt").write_text(summary, encoding="utf-8")
        return summary


def describe_machine(device: torch.device, num_ranks: int) -> dict[str, Any]:
    """Hardware and software versions for the report, by display name."""
    machine: dict[str, Any] = {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine["GPU"] = f"{properties.name}, {format_bytes(properties.total_memory)}"
        machine["CUDA"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    return machine | {
        "ranks": num_ranks,
        "CPU": f"{num_cores()} cores, {format_bytes(psutil.virtual_memory().total)}",
        "system": f"{platform.platform()}, Python {platform.python_version()}",
        **{package.__name__: package.__version__ for package in (torch, transformers, ithaka)},
    }
