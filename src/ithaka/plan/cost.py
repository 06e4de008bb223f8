"""Bytes of a training step: pure arithmetic on a model's shape, a layout and the hardware.

Letters as in plan/moments.py, which has the bytes of one layer; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ithaka.layout import LayerKeeps, Layout
from ithaka.plan.hardware import GIB, Hardware
from ithaka.plan.moments import Moment, everything_bytes, kept_attention_bytes, layer_peak
from ithaka.plan.shape import ModelShape, Work

LOGITS_TILE_BYTES = 2**29  # logits of a tile of the loss
EMBEDDING_RUN = 10  # tokens whose gradients PyTorch's embedding backward adds up in one row of its buffer
RESERVE_BYTES = 2 * GIB  # CUDA context, NCCL, cuBLAS and cuDNN workspaces
RESERVE_SHARE = 0.05  # of the GPU: fragmentation
HOST_RESERVE_SHARE = 0.05  # of a node's memory: the system, file cache
HOST_PROCESS_BYTES = 6 * 10**9  # per rank: Python, torch, data
FIRST_LAYER = "backward, first layer"  # the phase in which only its own kept tensors are left
DISK_STATION_LAYERS = 3  # layers in host memory on their way to or from disk


@dataclass(frozen=True)
class Ledger:
    """Who holds how much, at the moment of the highest need. gpu: per GPU. host, disk: per node."""

    phase: str
    gpu: dict[str, int] = field(hash=False)
    host: dict[str, int] = field(hash=False)
    disk: dict[str, int] = field(hash=False)
    gpu_bytes: int  # what there is
    host_bytes: int
    disk_bytes: int

    @property
    def gpu_peak(self) -> int:
        """With the reserve."""
        return sum(self.gpu.values())

    @property
    def host_peak(self) -> int:
        """With the reserve."""
        return sum(self.host.values())

    @property
    def disk_peak(self) -> int:
        return sum(self.disk.values())

    @property
    def tiers(self) -> dict[str, tuple[int, int]]:
        """What each needs, and what there is."""
        return {
            "GPU": (self.gpu_peak, self.gpu_bytes),
            "host": (self.host_peak, self.host_bytes),
            "disk": (self.disk_peak, self.disk_bytes),
        }

    def excess(self) -> dict[str, float]:
        """Need over what there is, per tier; the plan fits when none is above 1."""
        return {name: need / max(have, 1) for name, (need, have) in self.tiers.items()}

    @property
    def fits(self) -> bool:
        return all(need <= have for need, have in self.tiers.values())


def memory(shape: ModelShape, layout: Layout, hardware: Hardware, work: Work) -> Ledger:
    """The ledger of a step, at its highest phase."""
    phases = list(gpu_phases(shape, layout, hardware, work))
    name, gpu = max(phases, key=lambda phase: sum(phase[1].values()))
    gpu["reserve"] = RESERVE_BYTES + int(RESERVE_SHARE * hardware.gpu.memory_bytes)
    host, disk = _outside(shape, layout, hardware, work)
    return Ledger(name, gpu, host, disk, hardware.gpu.memory_bytes, hardware.host_bytes, hardware.disk_bytes)


def attention_room(shape: ModelShape, layout: Layout, hardware: Hardware, work: Work) -> int:
    """The most layers whose attention outputs fit into `layout.attention_tier`, beside everything else."""

    def fits(count: int) -> bool:
        return memory(shape, layout.but(keep_attention=count), hardware, work).fits

    if fits(shape.num_layers):  # nothing is computed again then, which frees room on the device
        return shape.num_layers
    if shape.num_layers == 1 or not fits(1):
        return 0
    one, tier = layout.but(keep_attention=1), layout.attention_tier
    each = kept_attention_bytes(shape, layout, work.local_tokens(layout.cp))
    ledger = memory(shape, one, hardware, work)
    if tier == "device":
        phases = gpu_phases(shape, one, hardware, work)
        growing = max(sum(holders.values()) for name, holders in phases if name != FIRST_LAYER)
        free = ledger.gpu_bytes - ledger.gpu["reserve"] - growing
    elif tier == "host":
        free, each = ledger.host_bytes - ledger.host_peak, each * hardware.gpus_per_node
    else:
        free, each = ledger.disk_bytes - ledger.disk_peak, each * hardware.gpus_per_node
    return min(shape.num_layers - 1, 1 + free // each)


def gpu_phases(
    shape: ModelShape, layout: Layout, hardware: Hardware, work: Work
) -> Iterator[tuple[str, dict[str, int]]]:
    """(phase, holder -> bytes) on one GPU, reserve left out: the phases that can be the highest."""
    step = _Step(shape, layout, hardware, work.local_tokens(layout.cp))
    yield "forward", step.forward()
    yield "loss", step.loss()
    yield "backward, last layer", step.last_layer()
    yield FIRST_LAYER, step.first_layer()
    yield "backward, embedding", step.embedding()
    yield "update", step.held(Moment("update"), weights=step.root, arrived=shape.num_parameters)


class _Step:
    """What one GPU holds in the phases of a step. Weights are gathered narrow, gradients are sent wide."""

    def __init__(self, shape: ModelShape, layout: Layout, hardware: Hardware, s: int) -> None:
        self.shape, self.layout, self.s = shape, layout, s
        self.num_gpus, self.alone = hardware.num_gpus, hardware.num_gpus == 1
        self.states = _states(shape, layout, hardware)
        self.groups = layout.groups(shape.num_layers)
        self.everything = sum(count * self.own(keeps) for keeps, count in self.groups)  # from forward to backward
        e, wide = layout.element_bytes, layout.sum_bytes
        head, layer = shape.vocab * shape.hidden, shape.layer_parameters
        self.head, self.wide_head, self.layer, self.wide_layer = head * e, head * wide, layer * e, layer * wide
        # Tied, the embedding belongs to FSDP2's root: whole all the time, and its first gradient waits for its second.
        self.root = self.tied_grad = self.head if shape.tied else 0
        # The next layer's weights, on their way; alone there is no way to go.
        self.ahead = 0 if self.alone else self.layer

    def held(self, moment: Moment, weights: int, arrived: int = 0, waiting: int = 0, kept: int = 0) -> dict[str, int]:
        """`arrived`: parameters whose gradients are shards already. `waiting`: gradients on their way there."""
        return {
            "parameters": self.states["parameters"],
            "gradients": self.states["gradients"] * arrived // self.shape.num_parameters + waiting + moment.sums,
            "optimizer": self.states["optimizer"],
            "layer weights": weights,
            "residual stream": moment.stream,
            "stage buffers": moment.stages + moment.outputs,
            "tiles": moment.tiles,
            "kept activations": kept,
        }

    def forward(self) -> dict[str, int]:
        """In the last layer, whose input is still among its residual stream; later it is kept."""
        moment, kept = self.peak("forward")
        return self.held(moment, self.root + self.layer + self.ahead, kept=kept)

    def loss(self) -> dict[str, int]:
        x = self.layout.x_bytes(self.shape.hidden, self.s)
        logits = min(LOGITS_TILE_BYTES, self.s * self.shape.vocab * self.layout.element_bytes)
        holders = self.held(Moment("loss", 2 * x), self.head + self.ahead, kept=self.everything)
        return {**holders, "loss tile": self.wide_head + max(logits, self.head)}

    def last_layer(self) -> dict[str, int]:
        """While lm_head's gradient is still being sent."""
        moment, kept = self.peak("backward")
        below = self.ahead if self.shape.num_layers > 1 else 0 if self.alone or self.shape.tied else self.head
        waiting = self.tied_grad if self.shape.tied else self.wide_head
        return self.held(moment, self.root + self.layer + below, self.arrived(0), waiting, kept)

    def first_layer(self) -> dict[str, int]:
        """While the gradients of the layer above are still being sent."""
        moment, _ = self.peak("backward")
        embedding = 0 if self.alone and not self.shape.tied else self.head
        layers_above = self.shape.num_layers - 1
        waiting = self.wide_layer * (layers_above > 0) + self.tied_grad
        kept = self.own(self.groups[0][0])
        return self.held(moment, self.layer + embedding, self.arrived(layers_above), waiting, kept)

    def embedding(self) -> dict[str, int]:
        """Its dense gradient and the buffer of its kernel, while the first layer's gradients are being sent; a tied
        weight's two gradients and their sum; then the gradient, its wide copy to send and the shard that comes back.
        """
        shape, layout = self.shape, self.layout
        rows = self.s // EMBEDDING_RUN + min(self.s, shape.vocab)
        buffer = rows * shape.hidden * layout.sum_bytes
        made = (self.head, self.head + self.wide_layer + self.tied_grad + max(buffer, self.tied_grad))
        sent = (self.root, self.head + self.wide_head + self.wide_head // self.num_gpus)
        weights, waiting = max(made, sent, key=sum)
        x = layout.x_bytes(shape.hidden, self.s)
        return self.held(Moment("embedding", x), weights, self.arrived(shape.num_layers), waiting)

    def own(self, keeps: LayerKeeps) -> int:
        """Bytes that one layer keeps on the device."""
        shape, layout = self.shape, self.layout
        if keeps.everything:
            return everything_bytes(shape, layout, self.s)
        inputs = layout.x_bytes(shape.hidden, self.s) if keeps.input == "device" else 0
        return inputs + (kept_attention_bytes(shape, layout, self.s) if keeps.attention == "device" else 0)

    def arrived(self, num_layers: int) -> int:
        """Parameters of lm_head and so many layers."""
        head = 0 if self.shape.tied else self.shape.vocab * self.shape.hidden
        return head + num_layers * self.shape.layer_parameters

    def peak(self, direction: str) -> tuple[Moment, int]:
        """A layer's highest moment, and what is kept beside it; in forward a layer's own is still its moment's."""
        shape, layout, found = self.shape, self.layout, []
        for keeps, _ in self.groups:
            if keeps.everything:
                moment = _everything_moment(shape, layout, self.s)
            else:
                moment = layer_peak(shape, layout, self.s, keeps, direction)
            found.append((moment, self.everything - (self.own(keeps) if direction == "forward" else 0)))
        return max(found, key=lambda pair: pair[0].live + pair[1])


def _states(shape: ModelShape, layout: Layout, hardware: Hardware) -> dict[str, int]:
    """fp32 master weights, gradients and AdamW's two moments: this rank's shards on the device."""
    count = 0 if layout.offload_optimizer else -(-shape.num_parameters // hardware.num_gpus)
    return {"parameters": 4 * count, "gradients": 4 * count, "optimizer": 8 * count}


def _everything_moment(shape: ModelShape, layout: Layout, s: int) -> Moment:
    """Beside what is kept: the stream and its gradient, one matmul's gradients of the MLP, the weights' gradients."""
    e = layout.element_bytes
    sums = shape.layer_parameters * e
    return Moment("everything kept", 2 * layout.x_bytes(shape.hidden, s), tiles=3 * s * shape.mlp * e, sums=sums)


def _outside(
    shape: ModelShape, layout: Layout, hardware: Hardware, work: Work
) -> tuple[dict[str, int], dict[str, int]]:
    """Holders in a node's host memory and on its disk."""
    s, ranks = work.local_tokens(layout.cp), hardware.gpus_per_node
    host, disk, station = dict[str, int](), dict[str, int](), 0
    for name, one in (
        ("layer inputs", layout.x_bytes(shape.hidden, s)),
        ("kept attention", kept_attention_bytes(shape, layout, s)),
    ):
        layers = {"host": 0, "disk": 0}
        for keeps, count in layout.groups(shape.num_layers):
            tier = keeps.input if name == "layer inputs" else keeps.attention
            if tier in layers:
                layers[tier] += count
        host[name], disk[name] = ranks * layers["host"] * one, ranks * layers["disk"] * one
        station += min(DISK_STATION_LAYERS, layers["disk"]) * one
    host["on the way to disk"] = ranks * station
    states = -(-shape.num_parameters // hardware.num_gpus) * 16 if layout.offload_optimizer else 0
    host["parameters, gradients, optimizer"] = ranks * states
    host["reserve"] = ranks * HOST_PROCESS_BYTES + int(HOST_RESERVE_SHARE * hardware.host_bytes)
    return host, disk
