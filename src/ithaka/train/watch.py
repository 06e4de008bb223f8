"""Observe a run: progress within long steps, profiles, facts for the report, and where memory ran out."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import psutil
import torch
from transformers import PreTrainedModel

from ithaka.config import shell_command
from ithaka.dist.mesh import Mesh
from ithaka.exits import is_out_of_memory
from ithaka.layer.store import StoreError
from ithaka.phases import Listener, PhasePath
from ithaka.plan.hardware import gpu_named
from ithaka.plan.heads import count_slots
from ithaka.plan.search import Plan
from ithaka.plan.show import format_bytes
from ithaka.preflight.run import Run, drop_reserve
from ithaka.profile.memory import sum_planned_by_holder
from ithaka.profile.progress import Progress
from ithaka.profile.step import StepProfile, describe_machine
from ithaka.profile.times import StepTimes
from ithaka.train.console import Console

WARM_UP_STEPS = 1  # slower: kernels are chosen, and the allocator gets its memory


def what_to_record(number: int, every: int, times_before: bool) -> Literal["times", "profile", None]:
    """What to record in step `number`: a profile in every `every`-th step and, with `times_before`, times in the step
    before it."""
    if not every:
        return None
    if number % every == 0:
        return "profile"
    return "times" if times_before and (number + 1) % every == 0 else None


class Watch:
    """Wraps every step on rank 0. Does nothing on other ranks."""

    def __init__(
        self,
        run: Run,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        console: Console,
        only_profile: bool = False,
    ) -> None:
        """`only_profile`: raise if a profile cannot be written, instead of printing a warning."""
        self.run, self.model, self.optimizer, self.mesh, self.console = run, model, optimizer, mesh, console
        self.only_profile = only_profile
        self.device_peak_bytes = 0  # up to the last profile, which resets the allocator's count
        self._plain_s: list[float] = []
        self._times: StepTimes | None = None  # recorded in the step before a profile
        self._progress: Progress | None = None
        if console.active:
            self.plan = Plan(run.shape, run.layout, run.hardware, dataclasses.replace(run.work, accumulate=1))
            self._progress = Progress(self.plan, run.config.train.accumulate, mesh.device, console.progress)
            self._write_facts()

    def _write_facts(self) -> None:
        """Write machine.json and plan.json for the report."""
        plan, facts = self.plan, describe_machine(self.mesh.device, self.mesh.world_size)
        (self.run.run_dir / "machine.json").write_text(json.dumps(facts), encoding="utf-8")
        stages = len(count_slots(plan.shape, plan.layout).stages)
        facts = {"layout": dataclasses.asdict(plan.layout), "stages": stages, "peak_bytes": sum_planned_by_holder(plan)}
        facts["gpus"] = plan.hardware.name  # nodes x ranks
        if gpu_named(plan.hardware.gpu.name):
            facts["seconds"] = dataclasses.asdict(plan.seconds)
        (self.run.run_dir / "plan.json").write_text(json.dumps(facts), encoding="utf-8")

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Wrap step `number`, and profile it if due."""
        if self._progress is None:
            yield
            return
        recorder = self._recorder(number)
        start = time.perf_counter()
        with self._progress.step(number), recorder or nullcontext():
            yield
        self._times = recorder if isinstance(recorder, StepTimes) else None
        if recorder is None:
            self._plain_s.append(time.perf_counter() - start)
        elif isinstance(recorder, StepProfile):
            plain, folder = self._plain_s[WARM_UP_STEPS:], self.run.run_dir / "profile" / f"step-{number}"
            plain_s = statistics.median(plain) if plain else None
            with nullcontext() if self.only_profile else self.console.writing("profile"):
                summary = recorder.write(folder, number, plain_s, sum_planned_by_holder(self.plan))
                self.console.print(f"Profile of step {number}, in {folder}:\n{summary}")

    def _recorder(self, number: int) -> StepProfile | StepTimes | None:
        device, warm = self.mesh.device, len(self._plain_s) >= WARM_UP_STEPS
        kind = what_to_record(number, self.run.config.profile.every, device.type == "cuda" and warm)
        if kind != "profile":
            return StepTimes(device) if kind == "times" else None
        if device.type == "cuda":
            self.device_peak_bytes = max(self.device_peak_bytes, torch.cuda.max_memory_allocated(device))
        return StepProfile(self.model, self.optimizer, device, self._times)


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether the device, the host or the store ran out of memory."""
    return error is not None and (isinstance(error, StoreError) or is_out_of_memory(error))


class OutOfMemoryTracker(Listener):
    """Listens to phases and records the phase and the memory in use when memory ran out.

    As an error propagates it leaves phases, innermost first: it was raised in the first one left.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.path: PhasePath = ()
        self.before: PhasePath = ()  # the last innermost phase, for errors between phases
        self.used_bytes: int | None = None  # on the device; without a GPU, by this process

    def enter(self, path: PhasePath) -> None:
        self.path, self.used_bytes = path, None

    def leave(self, path: PhasePath) -> None:
        if ran_out_of_memory(sys.exc_info()[1]):
            self.measure()
            return
        self.path = path[:-1]
        if path[-1] != "copies" and self.before[: len(path)] != path:
            self.before = path

    def measure(self) -> int:
        """Measure once: memory is freed while the error propagates."""
        if self.used_bytes is None:
            rss = psutil.Process().memory_info().rss
            self.used_bytes = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else rss
        return self.used_bytes

    @property
    def where(self) -> str:
        if self.path:
            return f"in {' / '.join(self.path)}"
        return f"after {' / '.join(self.before)}" if self.before else "before the first phase"


def explain_out_of_memory(plan: Run | Plan, error: Exception, tracker: OutOfMemoryTracker, model: str) -> str:
    """Explain what ran out and where, planned and measured bytes, and the way out. `model`: for `ithaka plan`."""
    tracker.measure()  # before anything else allocates
    headline = f"rank {os.environ.get('RANK', '0')}, {tracker.where}: {' '.join(str(error).split()) or repr(error)}"
    return "\n".join([headline, *_planned_lines(plan, error, tracker), *_ways_out(plan, model)])


def _planned_lines(plan: Run | Plan, error: Exception, tracker: OutOfMemoryTracker) -> Iterator[str]:
    ledger, on_gpu = plan.ledger, tracker.device.type == "cuda"
    on_host = isinstance(error, MemoryError | OSError) or "DefaultCPUAllocator" in str(error)
    tier = error.tier if isinstance(error, StoreError) else "host" if on_host and on_gpu else "GPU"
    if tier != "GPU":
        holders, max_bytes = {"host": (ledger.host, ledger.host_bytes), "disk": (ledger.disk, ledger.disk_bytes)}[tier]
        parts = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in drop_reserve(holders).items())
        planned = format_bytes(sum(drop_reserve(holders).values()))
        yield f"  planned per node: {planned} of {format_bytes(max_bytes)} ({parts})"
        return
    reserve, scope = ledger.gpu["reserve"], "" if on_gpu else " for the process, including Python and its libraries"
    planned = format_bytes(ledger.gpu_peak - reserve)
    yield f"  planned peak: {planned} in {ledger.phase}, of {format_bytes(ledger.gpu_bytes)}"
    yield f"  measured: {format_bytes(tracker.measure())}{scope}"


def _ways_out(plan: Run | Plan, model: str) -> Iterator[str]:
    hardware, work = plan.hardware, plan.work
    if not work.trains:
        yield "Use a shorter --context or more GPUs"
        return
    if hardware.gpu.name == "CPU":
        yield "Use a shorter data.context, a smaller memory.tile_tokens or a smaller model"
        return
    command: list[object] = ["plan", model, "--gpus", hardware.name, "--context", work.context]
    command += ["--batch", work.batch] if work.batch > 1 else []
    command += ["--host-memory", f"{hardware.host_bytes // 10**9}GB"]
    command += ["--disk", f"{hardware.disk_bytes // 10**9}GB"] if hardware.disk_bytes else []
    yield "Use a shorter context or more GPUs; this shows what fits, and how fast it is:"
    yield f"  {shell_command(*command)}"
