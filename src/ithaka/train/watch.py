"""Rank 0's eyes on a run: progress of long steps, profiles of some, and facts for the report."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from ithaka.config import Config
from ithaka.data.stream import Batch
from ithaka.dist.mesh import Mesh
from ithaka.layout import layout_of
from ithaka.model.batch import num_pairs
from ithaka.phases import listening
from ithaka.plan.hardware import find_gpu, gpu_named
from ithaka.plan.heads import slots_of
from ithaka.plan.seconds import step_seconds
from ithaka.plan.shape import Work, shape_from_config
from ithaka.profile.progress import Job, Progress
from ithaka.profile.step import StepProfile, machine
from ithaka.profile.times import StepTimes
from ithaka.train.console import Console

WARM_UP_STEPS = 1  # slower than the rest: kernels are chosen, memory is taken from the system


def job_of(config: Config, model: PreTrainedModel, mesh: Mesh) -> Job:
    """The run's step, as the planner sees it."""
    shape = shape_from_config(model.config.to_dict())
    layout = layout_of(config, shape.num_layers, mesh.world_size, on_gpu=mesh.device.type == "cuda")
    name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "CPU"
    gpu = gpu_named(name) or find_gpu("CPU")
    work = Work(config.data.context, config.train.batch)
    return Job(shape, layout, work, config.train.accumulate, mesh.world_size, gpu)


def write_facts(run_dir: Path, job: Job, mesh: Mesh) -> None:
    """machine.json and plan.json: what the report shows besides the configuration."""
    (run_dir / "machine.json").write_text(json.dumps(machine(mesh.device, mesh.world_size)), encoding="utf-8")
    plan: dict[str, Any] = {
        "layout": dataclasses.asdict(job.layout),
        "stages": len(slots_of(job.shape, job.layout).stages),
        "peak_bytes": job.planned(),
    }
    if job.knows_rate:
        seconds = step_seconds(job.shape, job.layout, job.hardware, job.work)
        plan["seconds"] = dataclasses.asdict(seconds)
    (run_dir / "plan.json").write_text(json.dumps(plan), encoding="utf-8")


def what_to_record(number: int, every: int, in_two: bool) -> Literal["times", "profile", None]:
    """Step `number` is profiled when its turn has come; `in_two`: its times are recorded in the step before."""
    if not every:
        return None
    if number % every == 0:
        return "profile"
    return "times" if in_two and (number + 1) % every == 0 else None


class Watch:
    """Stands around every step. On other ranks than 0 it does nothing."""

    def __init__(
        self,
        config: Config,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        console: Console,
    ) -> None:
        self.config, self.model, self.optimizer, self.mesh = config, model, optimizer, mesh
        self.console = console
        self.device_peak_bytes = 0  # before the allocator's own count was reset by a profile
        self._plain_s: list[float] = []
        self._times: StepTimes | None = None  # of the step before a profile
        self._progress: Progress | None = None
        if console.active:
            self.job = job_of(config, model, mesh)
            self._progress = Progress(mesh.device, console.progress)

    @contextmanager
    def step(self, number: int, batches: Sequence[Batch]) -> Iterator[None]:
        """Around step `number`, which trains on `batches`; profiles it when its turn has come."""
        if self._progress is None:
            yield
            return
        job = _with_documents(self.job, batches)
        recorder = self._recorder(number, job)
        start = time.perf_counter()
        with listening(self._progress):
            self._progress.start(number, job)
            try:
                with recorder or nullcontext():
                    yield
            finally:
                self._progress.stop()
        if recorder is None:
            self._plain_s.append(time.perf_counter() - start)
        elif isinstance(recorder, StepTimes):
            self._times = recorder
        else:
            self._times = None
            self._write(recorder, number)

    def _recorder(self, number: int, job: Job) -> StepProfile | StepTimes | None:
        device = self.mesh.device
        warm = len(self._plain_s) >= WARM_UP_STEPS
        kind = what_to_record(number, self.config.profile.every, device.type == "cuda" and warm)
        if kind is None:
            return None
        if kind == "times":
            return StepTimes(device, job)
        if device.type == "cuda":
            earlier = torch.cuda.max_memory_allocated(device)
            self.device_peak_bytes = max(self.device_peak_bytes, earlier)
        return StepProfile(self.model, self.optimizer, device, _store(self.model), self._times, job)

    def _write(self, profile: StepProfile, number: int) -> None:
        run_dir = self.config.train.run_dir
        assert run_dir is not None
        plain = self._plain_s[WARM_UP_STEPS:]
        folder = run_dir / "profile" / f"step-{number}"
        words = profile.write(folder, number, statistics.median(plain) if plain else None)
        self.console.say(f"Profile of step {number}, in {folder}:\n{words}")


def _with_documents(job: Job, batches: Sequence[Batch]) -> Job:
    """With documents of one length that have as many query-key pairs as these batches': what attention's FLOPs are."""
    num_tokens = sum(batch.input_ids.numel() for batch in batches)
    pairs = sum(num_pairs(batch.document_ids, [None]) for batch in batches)
    return dataclasses.replace(job, work=dataclasses.replace(job.work, document_tokens=round(2 * pairs / num_tokens)))


def _store(model: nn.Module) -> Any:
    layer = model.model.layers[0]  # type: ignore[union-attr,index]
    return getattr(layer.forward, "store", None)  # type: ignore[union-attr]
