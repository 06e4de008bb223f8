"""Profiles one training step: trace, memory snapshot, memory map, phase times and the peak in words."""

import gzip
import json
import shutil
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from ithaka.memory.store import Store
from ithaka.phases import KEPT, OPTIMIZER, PARAMETERS, Path, listening
from ithaka.profile.allocations import cpu_allocations
from ithaka.profile.cuda import AllocatorHistory
from ithaka.profile.job import Job
from ithaka.profile.live import LiveBytes, local_tensor
from ithaka.profile.peak import describe_peak, in_words, memory_map, sampled
from ithaka.profile.times import CLASSES, PREFIX, STEP, Times, read_times

PROFILE_FILE = "profile.json"


class StepProfile(AbstractContextManager):
    """Enter it around one step, then `write`. Nothing is recorded outside of it."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, store: Store | None
    ) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.on_gpu = device.type == "cuda"
        self.memory: LiveBytes | AllocatorHistory
        self.memory = AllocatorHistory(device) if self.on_gpu else LiveBytes(scratch=False)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        self.trace = profile(activities=activities, profile_memory=not self.on_gpu)
        self.marks = _Annotations(store)
        self.wall_s = 0.0
        self._entered = ExitStack()

    def __enter__(self) -> "StepProfile":
        self._entered.enter_context(self.trace)
        self._entered.enter_context(self.memory)
        self._register()
        self._entered.enter_context(listening(self.marks))
        self._entered.enter_context(record_function(STEP))
        self.marks.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        self.wall_s = self.marks.elapsed()
        self._entered.close()

    def write(self, folder: FilePath, step: int, job: Job | None, plain_s: float | None) -> str:
        """Writes everything into `folder`; the peak in words. `plain_s`: a step's time without profiling."""
        folder.mkdir(parents=True, exist_ok=True)
        self._export_trace(folder / "trace.json.gz")
        measured = self._finish_memory(folder)
        ledger = self.memory.ledger
        peak = describe_peak(ledger, measured, job.planned() if job is not None else None)
        mapped = memory_map(ledger)
        mapped["elsewhere"] = self.marks.kept_elsewhere(mapped["time_s"])
        data = {
            "step": step,
            "device": str(self.device.type),
            "wall_s": self.wall_s,
            "plain_s": plain_s,
            "memory": {**mapped, "peak": peak},
            "times": times_as_data(read_times(folder / "trace.json.gz"), job),
        }
        words = in_words(peak)
        (folder / PROFILE_FILE).write_text(json.dumps(data), encoding="utf-8")
        (folder / "peak.txt").write_text(words, encoding="utf-8")
        return words

    def _export_trace(self, path: FilePath) -> None:
        """The profiler's own compression goes line by line, which takes far longer than the step."""
        plain = path.with_suffix("")
        self.trace.export_chrome_trace(str(plain))
        with plain.open("rb") as file, gzip.open(path, "wb", compresslevel=2) as packed:
            shutil.copyfileobj(file, packed, 2**20)
        plain.unlink()

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
        allocations = cpu_allocations(self.trace)
        self.memory.add_scratch(allocations)
        return self.memory.registered_bytes + _highest(allocations)


def _highest(allocations: list) -> int:
    """The most bytes that were out at once."""
    edges = [(one.start_ns, one.num_bytes) for one in allocations]
    edges += [(one.stop_ns, -one.num_bytes) for one in allocations]
    now = peak = 0
    for _, change in sorted(edges):
        now += change
        peak = max(peak, now)
    return peak


class _Annotations:
    """Writes phases into the trace, and reads at each how much the store keeps outside the device."""

    def __init__(self, store: Store | None) -> None:
        self.store = store
        self.samples: list[tuple[float, int, int]] = []  # seconds, host bytes, disk bytes
        self._open: list[record_function] = []
        self._start = 0.0

    def start(self) -> None:
        self._start = time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    def enter(self, path: Path) -> None:
        self._open.append(record_function(PREFIX + "/".join(path)))
        self._open[-1].__enter__()
        self._sample()

    def leave(self, path: Path) -> None:
        self._sample()
        self._open.pop().__exit__(None, None, None)

    def _sample(self) -> None:
        if self.store is not None:
            host, disk = self.store.pool.busy_bytes, self.store.disk.busy_bytes
            self.samples.append((self.elapsed(), host, disk))

    def kept_elsewhere(self, times_s: list[float]) -> dict[str, list[int]]:
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
