"""Rank 0's eyes on a run: progress of long steps, profiles of some, and facts for the report."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ithaka.config import Config
from ithaka.dist.mesh import Mesh
from ithaka.model.settings import settings_of
from ithaka.phases import listening
from ithaka.plan.cost import Layout, Work
from ithaka.plan.hardware import Hardware, find_gpu, gpu_named
from ithaka.plan.seconds import step_seconds
from ithaka.plan.shape import shape_from_config
from ithaka.profile.job import Job
from ithaka.profile.machine import machine
from ithaka.profile.progress import Progress
from ithaka.profile.step import StepProfile
from ithaka.train.console import Console

WARM_UP_STEPS = 1  # slower than the rest: kernels are chosen, memory is taken from the system


def job_of(config: Config, model: PreTrainedModel, mesh: Mesh) -> Job:
    """The run's step, as the planner sees it."""
    settings = settings_of(config, mesh.device)
    shape = shape_from_config(model.config.to_dict())
    options, kept = settings.layer, settings.keep_attention_layers
    num_kept = shape.num_layers if kept is None else min(kept, shape.num_layers)
    element_bytes = (settings.dtype or model.dtype).itemsize
    layout = Layout(
        cp=mesh.cp_size,
        heads_per_stage=settings.heads_per_stage,
        tile_tokens=options.tile_tokens,
        checkpoint=options.checkpoint,
        input_tier=options.keep_input,  # type: ignore[arg-type]
        keep_attention=num_kept if options.keep_attention else 0,
        attention_tier=options.keep_attention or "device",  # type: ignore[arg-type]
        offload_optimizer=settings.offload_optimizer,
        overlap=options.overlap,
        element_bytes=element_bytes,
        sum_bytes=max(4, element_bytes),
    )
    name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "CPU"
    gpu = gpu_named(name) or find_gpu("CPU")
    work = Work(config.data.context, config.train.batch)
    return Job(shape, layout, work, config.train.accumulate, mesh.world_size, gpu)


def write_facts(run_dir: Path, job: Job, mesh: Mesh) -> None:
    """machine.json and plan.json: what the report shows besides the configuration."""
    (run_dir / "machine.json").write_text(json.dumps(machine(mesh.device, mesh.world_size)), encoding="utf-8")
    plan: dict[str, Any] = {
        "layout": dataclasses.asdict(job.layout),
        "stages": len(job.layout.slots(job.shape).stages),
        "peak_bytes": job.planned(),
    }
    if job.knows_rate:
        hardware = Hardware(job.gpu, gpus_per_node=job.num_ranks)
        seconds = step_seconds(job.shape, job.layout, hardware, job.work)
        plan["seconds"] = dataclasses.asdict(seconds)
    (run_dir / "plan.json").write_text(json.dumps(plan), encoding="utf-8")


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
        self._progress: Progress | None = None
        if console.active:
            self.job = job_of(config, model, mesh)
            self._progress = Progress(mesh.device, self.job, console.progress)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step `number`; profiles it when its turn has come."""
        if self._progress is None:
            yield
            return
        every = self.config.profile.every
        profile = self._profile() if every and number % every == 0 else None
        start = time.perf_counter()
        with listening(self._progress):
            self._progress.start(number)
            try:
                with profile or nullcontext():
                    yield
            finally:
                self._progress.stop()
        if profile is None:
            self._plain_s.append(time.perf_counter() - start)
        else:
            self._write(profile, number)

    def _profile(self) -> StepProfile:
        if self.mesh.device.type == "cuda":
            earlier = torch.cuda.max_memory_allocated(self.mesh.device)
            self.device_peak_bytes = max(self.device_peak_bytes, earlier)
        return StepProfile(self.model, self.optimizer, self.mesh.device, _store(self.model))

    def _write(self, profile: StepProfile, number: int) -> None:
        run_dir = self.config.train.run_dir
        assert run_dir is not None
        plain = self._plain_s[WARM_UP_STEPS:]
        folder = run_dir / "profile" / f"step-{number}"
        words = profile.write(folder, number, self.job, statistics.median(plain) if plain else None)
        self.console.say(f"Profile of step {number}, in {folder}:\n{words}")


def _store(model: nn.Module) -> Any:
    layer = model.model.layers[0]  # type: ignore[union-attr,index]
    return getattr(layer.forward, "store", None)  # type: ignore[union-attr]
