"""Profiles a training step: trace, memory snapshot, memory map, phase times and the peak in words."""

import gzip
import json
import time
import warnings
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ithaka.memory.store import Store
from ithaka.phases import KEPT, OPTIMIZER, PARAMETERS, Path, listening
from ithaka.profile.allocations import Allocation, cpu_allocations
from ithaka.profile.cuda import AllocatorHistory
from ithaka.profile.job import Job
from ithaka.profile.live import LiveBytes, local_tensor
from ithaka.profile.peak import describe_peak, in_words, memory_map, sampled
from ithaka.profile.shapes import Shapes
from ithaka.profile.times import CLASSES, Annotations, Times, times_of

PROFILE_FILE = "profile.json"


class StepTimes(AbstractContextManager):
    """Enter it around one step: PyTorch's trace, with phases, and on a GPU the shapes that lines of code make.

    Of a GPU only the device's work and its launches are traced: recording every operator on the host costs it a
    quarter of the step's time again. `shapes=False`: without them (a compiled model would be compiled again for them).
    `job`: what this step has to do.
    """

    def __init__(self, device: torch.device, shapes: bool = True, job: Job | None = None) -> None:
        self.device, self.on_gpu, self.job = device, device.type == "cuda", job
        activity = ProfilerActivity.CUDA if self.on_gpu else ProfilerActivity.CPU
        self.trace = profile(activities=[activity], profile_memory=not self.on_gpu)
        self.shapes = Shapes(device) if self.on_gpu and shapes else None
        self.phases = Annotations()
        self._entered = ExitStack()

    def __enter__(self) -> "StepTimes":
        with warnings.catch_warnings():
            # PyTorch 2.11 says so where there is one cycle too; acc_events=True, its way out, costs more than the step.
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            self._entered.enter_context(self.trace)
        self._entered.enter_context(listening(self.phases))
        if self.shapes is not None:
            self._entered.enter_context(self.shapes)
        self.phases.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.current_stream(self.device).synchronize()  # for the clocks: the profiler itself calls the other
        self.phases.stop()
        self._entered.close()

    @property
    def wall_s(self) -> float:
        return self.phases.wall_s

    def write(self, path: FilePath) -> Times:
        """The trace as .json.gz. (The profiler's own compression goes line by line, which takes far longer.)"""
        plain = path.with_suffix("")
        self.trace.export_chrome_trace(str(plain))
        trace = json.loads(plain.read_bytes())
        plain.unlink()
        self.phases.add_to(trace)
        path.write_bytes(gzip.compress(json.dumps(trace).encode(), compresslevel=2))
        return times_of(trace)


class StepProfile(AbstractContextManager):
    """Enter it around one step, then `write`. Nothing is recorded outside of it.

    `times`: of another step, done already; then only memory is recorded in this one, which makes both cheaper.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        store: Store | None,
        times: StepTimes | None = None,
        shapes: bool = True,
        job: Job | None = None,
    ) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.on_gpu = device.type == "cuda"
        assert times is None or self.on_gpu, "on a CPU the trace has the allocator's events of its own step"
        self.times, self.job = times or StepTimes(device, shapes, job), job
        self.times_too = times is None
        self.memory: LiveBytes | AllocatorHistory
        self.memory = AllocatorHistory(device, self.times.shapes) if self.on_gpu else LiveBytes(scratch=False)
        self.kept = _Gauge(store)
        self.wall_s = 0.0
        self._entered = ExitStack()

    def __enter__(self) -> "StepProfile":
        self._entered.enter_context(self.memory)
        self._register()
        self._entered.enter_context(listening(self.kept))
        self.kept.start()
        if self.times_too:
            self._entered.enter_context(self.times)  # last, so that leaving the others is no part of the step
        return self

    def __exit__(self, *error: Any) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        self.wall_s = self.kept.elapsed()
        self._entered.close()

    def write(self, folder: FilePath, step: int, plain_s: float | None) -> str:
        """Writes everything into `folder`; the peak in words. `plain_s`: a step's time without profiling."""
        folder.mkdir(parents=True, exist_ok=True)
        times = self.times.write(folder / "trace.json.gz")
        measured = self._finish_memory(folder)
        ledger = self.memory.ledger
        peak = describe_peak(ledger, measured, self.job.planned() if self.job is not None else None)
        mapped = memory_map(ledger)
        mapped["elsewhere"] = self.kept.elsewhere(mapped["time_s"])
        data = {
            "step": step,
            "device": str(self.device.type),
            "wall_s": max(self.wall_s, self.times.wall_s),
            "plain_s": plain_s,
            "memory": {**mapped, "peak": peak},
            "times": times_as_data(times, self.times.job),
        }
        words = in_words(peak)
        (folder / PROFILE_FILE).write_text(json.dumps(data), encoding="utf-8")
        (folder / "peak.txt").write_text(words, encoding="utf-8")
        return words

    def _register(self) -> None:
        """Names what is there before the step begins."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        self.memory.register((t for t in tensors if self._is_here(t)), PARAMETERS)
        states = (t for state in self.optimizer.state.values() for t in state.values())
        self.memory.register((t for t in states if isinstance(t, torch.Tensor) and self._is_here(t)), OPTIMIZER)

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return local_tensor(tensor).device.type == self.device.type

    def _finish_memory(self, folder: FilePath) -> int:
        """The measured peak; the snapshot goes to `folder`."""
        if isinstance(self.memory, AllocatorHistory):
            self.memory.save(folder / "memory.pickle")
            return self.memory.measured_peak_bytes
        allocations = cpu_allocations(self.times.trace)
        self.memory.add_scratch(allocations)
        return self.memory.registered_bytes + _highest(allocations)


def _highest(allocations: list[Allocation]) -> int:
    """The most bytes that were out at once."""
    edges = [(one.start_ns, one.num_bytes) for one in allocations]
    edges += [(one.stop_ns, -one.num_bytes) for one in allocations]
    now = peak = 0
    for _, change in sorted(edges):
        now += change
        peak = max(peak, now)
    return peak


class _Gauge:
    """Reads at each phase how much the store keeps outside the device."""

    def __init__(self, store: Store | None) -> None:
        self.store = store
        self.samples: list[tuple[float, int, int]] = []  # seconds, host bytes, disk bytes
        self._start = 0.0

    def start(self) -> None:
        self._start = time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    def enter(self, path: Path) -> None:
        self._sample()

    def leave(self, path: Path) -> None:
        self._sample()

    def _sample(self) -> None:
        if self.store is not None:
            host, disk = self.store.pool.busy_bytes, self.store.disk.busy_bytes
            self.samples.append((self.elapsed(), host, disk))

    def elsewhere(self, times_s: list[float]) -> dict[str, list[int]]:
        host = [(at, num_bytes) for at, num_bytes, _ in self.samples]
        disk = [(at, num_bytes) for at, _, num_bytes in self.samples]
        both = {KEPT["host"]: sampled(times_s, host), KEPT["disk"]: sampled(times_s, disk)}
        return {name: values for name, values in both.items() if any(values)}


def times_as_data(times: Times, job: Job | None) -> dict[str, Any]:
    """Rows by phase (layer, direction, part), with the rate reached while it computed."""
    flops = job.flops() if job is not None else {}
    rows: dict[Path, dict[str, float]] = {}
    for path, row in times.phases.items():
        sums = rows.setdefault(path[:3], dict.fromkeys(CLASSES, 0.0))
        for kind, seconds in row.items():
            sums[kind] += seconds
    for path in [path for path in rows if len(path) == 2 and not any(_below(r, path) for r in rows)]:
        flops[path] = sum(f for part, f in flops.items() if _below(part, path))
    return {
        "wall_s": times.wall_s,
        "totals": times.totals,
        "hidden": times.hidden,
        "phases": [_as_row(path, row, flops.get(path), job) for path, row in rows.items()],
    }


def _below(path: Path, above: Path) -> bool:
    return len(path) > len(above) and path[: len(above)] == above


def _as_row(path: Path, row: dict[str, float], flops: float | None, job: Job | None) -> dict[str, Any]:
    rate = job.rate(path) if job is not None and flops else None
    reached = flops / row["compute"] if flops and row["compute"] else None
    return {"path": list(path), **row, "flops": flops, "flops_s": reached, "device_flops_s": rate}
