"""Profiles a training step: trace, memory snapshot, memory map, phase times and the peak in words."""

import json
import platform
import time
from bisect import bisect_left
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from torch import nn

import ithaka
from ithaka.layer.store import Store
from ithaka.phases import KEPT, OPTIMIZER, PARAMETERS, PhasePath, listening
from ithaka.plan.hardware import num_cores
from ithaka.plan.show import size
from ithaka.profile.allocator import AllocatorHistory
from ithaka.profile.live import LiveBytes, cpu_allocations, most_allocated
from ithaka.profile.memory import describe_peak, in_words, local_tensor
from ithaka.profile.progress import Job
from ithaka.profile.times import StepTimes


class StepProfile:
    """Enter it around one step, then `write`. Nothing is recorded outside of it.

    `times`: recorded in an earlier step; then this one records only memory, which makes both cheaper.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        store: Store | None,
        times: StepTimes | None = None,
        job: Job | None = None,
    ) -> None:
        self.model, self.optimizer, self.device, self.job = model, optimizer, device, job
        self.on_gpu = device.type == "cuda"
        assert times is None or self.on_gpu, "on a CPU the trace has the allocator's events of its own step"
        self.times, self._times_too = times or StepTimes(device, job), times is None
        self.memory = AllocatorHistory(device) if self.on_gpu else LiveBytes()
        self.elsewhere = _Elsewhere(store)
        self.wall_s = 0.0
        self._entered = ExitStack()

    def __enter__(self) -> "StepProfile":
        self._entered.enter_context(self.memory)
        self._register()
        self._entered.enter_context(listening(self.elsewhere))
        self.elsewhere.start_s = time.perf_counter()
        if self._times_too:
            self._entered.enter_context(self.times)  # last, so that leaving the others is no part of the step
        return self

    def __exit__(self, *error: Any) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        self.wall_s = time.perf_counter() - self.elsewhere.start_s
        self._entered.close()

    def write(self, folder: Path, step: int, plain_s: float | None) -> str:
        """Writes everything into `folder` and returns the peak in words. `plain_s`: a step's time without profiling."""
        folder.mkdir(parents=True, exist_ok=True)
        times = self.times.write(folder / "trace.json.gz")
        measured_bytes = self._finish_memory(folder)
        peak = describe_peak(self.memory.map, measured_bytes, self.job.planned() if self.job is not None else None)
        over_time = self.memory.map.over_time()
        data = {
            "step": step,
            "device": self.device.type,
            "wall_s": max(self.wall_s, self.times.wall_s),
            "plain_s": plain_s,
            "memory": {**over_time, "elsewhere": self.elsewhere.at(over_time["time_s"]), "peak": peak},
            "times": times.as_data(self.times.job),
        }
        words = in_words(peak)
        (folder / "profile.json").write_text(json.dumps(data), encoding="utf-8")
        (folder / "peak.txt").write_text(words, encoding="utf-8")
        return words

    def _register(self) -> None:
        """Names what is there before the step."""
        states = (value for state in self.optimizer.state.values() for value in state.values())
        before = {PARAMETERS: [*self.model.parameters(), *self.model.buffers()], OPTIMIZER: states}
        for holder, values in before.items():
            tensors = (local_tensor(value) for value in values if isinstance(value, torch.Tensor))
            self.memory.register((t for t in tensors if t.device.type == self.device.type), holder)

    def _finish_memory(self, folder: Path) -> int:
        """The allocator's own peak. On a GPU its snapshot goes to `folder`."""
        if isinstance(self.memory, AllocatorHistory):
            self.memory.save(folder / "memory.pickle")
            return self.memory.measured_peak_bytes
        allocations = cpu_allocations(self.times.trace)
        self.memory.add_scratch(allocations)
        return self.memory.registered_bytes + most_allocated(allocations)


class _Elsewhere:
    """Notes at each phase what the store keeps outside the device."""

    def __init__(self, store: Store | None) -> None:
        self.store, self.start_s = store, 0.0
        self.samples: list[tuple[float, int, int]] = []  # seconds, host bytes, disk bytes

    def enter(self, path: PhasePath) -> None:
        if self.store is not None:
            seconds = time.perf_counter() - self.start_s
            self.samples.append((seconds, self.store.pool.busy_bytes, self.store.disk.busy_bytes))

    leave = enter

    def at(self, times_s: list[float]) -> dict[str, list[int]]:
        """Bytes per tier at `times_s`: the last sample before each."""
        if not self.samples:
            return {}
        sampled = [self.samples[max(bisect_left(self.samples, (at,)) - 1, 0)] for at in times_s]
        tiers = {KEPT["host"]: [host for _, host, _ in sampled], KEPT["disk"]: [disk for _, _, disk in sampled]}
        return {name: values for name, values in tiers.items() if any(values)}


def machine(device: torch.device, num_ranks: int) -> dict[str, Any]:
    """The machine a run ran on: plain facts, by names to show."""
    facts: dict[str, Any] = {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["GPU"] = f"{properties.name}, {size(properties.total_memory)}"
        facts["CUDA"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    return facts | {
        "ranks": num_ranks,
        "CPU": f"{_cpu_name()}, {num_cores()} cores",
        "host memory": size(psutil.virtual_memory().total),
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "ithaka": ithaka.__version__,
    }


def _cpu_name() -> str:
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8").splitlines() if cpus.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
