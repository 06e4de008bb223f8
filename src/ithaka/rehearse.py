"""Rank 0 of N on one device: real shards, buffers, copies and kernels; collectives are local copies.

X is the bytes of one residual-stream tensor on one rank: s * D * 2.
"""

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ithaka.dist.loopback import start_loopback
from ithaka.dist.mesh import Mesh, default_device, make_mesh
from ithaka.model.build import build_model
from ithaka.model.settings import Settings
from ithaka.phases import listening
from ithaka.profile import Timeline

TINY_TOKENS = 1024  # per rank: a run whose activations are nothing beside the weights
SHORT_DOCUMENT = 128 * 1024


@dataclass(frozen=True)
class Rehearsed:
    """What was measured. Peaks are above `base_bytes`: parameters, their gradients and the layer's weights."""

    context: int
    x_bytes: int
    layer_s: float  # forward + backward, the mean over layers
    forward_s: float
    backward_s: float
    base_bytes: int
    peak_bytes: int  # of the layers
    total_peak_bytes: int  # of the whole step, everything included
    host_bytes: int
    parts_s: dict[str, float]  # per layer, by direction and part
    wall_s: float

    @property
    def peak_x(self) -> float:
        return self.peak_bytes / self.x_bytes


def rehearse(
    config: dict[str, Any],
    *,
    ranks: int,
    context: int,
    layers: int,
    settings: Settings,
    cp: int | None = None,
    memory_only: bool = False,
    steps: int = 2,
) -> Rehearsed:
    """Runs `steps` training steps without an optimizer as rank 0 of `ranks`; the last one is measured."""
    if not dist.is_initialized():
        start_loopback(ranks)
    mesh = make_mesh(cp or ranks, default_device())
    model = build_model({**config, "num_hidden_layers": layers}, mesh, settings)
    tiny = _measure(model, mesh, TINY_TOKENS * mesh.cp_size, memory_only=False, steps=2)
    base_bytes = _layer_peak(tiny[0])
    timeline, wall_s, total = _measure(model, mesh, context, memory_only, steps)
    seconds = timeline.seconds_by(1)
    x_bytes = context // mesh.cp_size * config["hidden_size"] * 2
    store = model.model.layers[0].forward.store
    return Rehearsed(
        context=context,
        x_bytes=x_bytes,
        layer_s=sum(seconds.values()) / layers,
        forward_s=seconds[("forward",)] / layers,
        backward_s=seconds[("backward",)] / layers,
        base_bytes=base_bytes,
        peak_bytes=_layer_peak(timeline) - base_bytes,
        total_peak_bytes=total,
        host_bytes=store.pool.peak_bytes,
        parts_s={" ".join(k): v / layers for k, v in timeline.seconds_by(1, 2).items()},
        wall_s=wall_s,
    )


def _measure(
    model: PreTrainedModel, mesh: Mesh, context: int, memory_only: bool, steps: int
) -> tuple[Timeline, float, int]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (1, context), generator=generator)
    documents = torch.arange(context)[None] // SHORT_DOCUMENT if memory_only else None
    total = 0
    for _ in range(steps):
        timeline = Timeline(mesh.device)
        _synchronize(mesh)
        started = time.perf_counter()
        with listening(timeline):
            loss = model(input_ids=ids, labels=ids, document_ids=documents).loss
            loss.backward()
        _synchronize(mesh)
        wall_s = time.perf_counter() - started
        if not torch.isfinite(loss):
            raise RuntimeError(f"the rehearsal's loss is {loss.item()}; its timings would mean nothing")
        total = max(total, max((p.peak_bytes for p in timeline.phases), default=0))
    return timeline, wall_s, total


def _layer_peak(timeline: Timeline) -> int:
    return max(phase.peak_bytes for phase in timeline.phases if len(phase.path) == 2)


def _synchronize(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)


def as_row(result: Rehearsed) -> dict[str, Any]:
    return {**dataclasses.asdict(result), "peak_x": result.peak_x}
