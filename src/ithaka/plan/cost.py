"""Bytes of a training step: pure arithmetic on a model's shape, a layout and the hardware.

Letters as in plan/moments.py, which has the bytes of one layer; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ithaka.plan.hardware import GIB, Hardware
from ithaka.plan.layout import Layout, Work
from ithaka.plan.moments import Moment, everything_bytes, kept_attention_bytes, layer_peak
from ithaka.plan.shape import ModelShape

LOGITS_TILE_BYTES = 2**29  # of ops/loss.py: logits of a tile
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
        return memory(shape, replace(layout, keep_attention=count), hardware, work).fits

    if fits(shape.num_layers):  # nothing is computed again then, which frees room on the device
        return shape.num_layers
    if shape.num_layers == 1 or not fits(1):
        return 0
    one, tier = replace(layout, keep_attention=1), layout.attention_tier
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
    s, e, num_layers = work.local_tokens(layout.cp), layout.element_bytes, shape.num_layers
    x = layout.x_bytes(shape, s)
    head, layer = shape.vocab * shape.hidden, shape.layer_parameters
    share = _states(shape, layout, hardware)
    inputs, outputs = _kept_on_device(shape, layout, s)
    any_kept, any_again = layout.keep_attention > 0, layout.keep_attention < num_layers

    own = outputs // layout.keep_attention if layout.keep_attention else 0

    def peak(direction: str) -> tuple[Moment, int]:
        """A layer's highest moment, and the attention outputs that other layers keep beside it."""
        if not layout.checkpoint:
            return _everything_moment(shape, layout, s), outputs
        kinds = [kept for kept, there in ((True, any_kept), (False, any_again)) if there]
        found = [
            (layer_peak(shape, layout, s, kept, direction), outputs - own * (kept and direction == "forward"))
            for kept in kinds
        ]
        return max(found, key=lambda pair: pair[0].live + pair[1])

    def held(moment: Moment, weights: int, arrived: int, waiting: int, kept: int) -> dict[str, int]:
        """`arrived`: parameters whose gradients are shards already. `waiting`: gradients on their way there."""
        return {
            "parameters": share["parameters"],
            "gradients": share["gradients"] * arrived // _all(shape) + waiting + moment.sums,
            "optimizer": share["optimizer"],
            "layer weights": weights,
            "residual stream": moment.stream,
            "stage buffers": moment.stages + moment.outputs,
            "tiles": moment.tiles,
            "kept activations": kept,
        }

    wide = layout.sum_bytes
    # Tied, the embedding belongs to FSDP2's root: whole all the time, and its first gradient waits for its second.
    root, tied_grad = (head * e, head * e) if shape.tied else (0, 0)
    reduced = (0, 0) if shape.tied else (head, head * wide)  # lm_head's: arrived, and still being sent
    # x of the layer at work is among its residual stream in forward, and kept in backward.
    forward, others = peak("forward")
    ahead = layer * e if hardware.num_gpus > 1 else 0  # of the next layer, on their way; alone there is no way to go
    yield "forward", held(forward, root + layer * e + ahead, 0, 0, (num_layers - 1) * inputs + others)
    everything = num_layers * inputs + outputs
    yield (
        "loss",
        {
            **held(Moment("loss", 2 * x), head * e + ahead, 0, 0, everything),
            "loss tile": head * wide + max(_logits_bytes(shape, layout, s), head * e),
        },
    )
    backward, _ = peak("backward")
    below = ahead if num_layers > 1 else head * e * (hardware.num_gpus > 1 and not shape.tied)
    weights = root + layer * e + below
    yield "backward, last layer", held(backward, weights, reduced[0], reduced[1] + tied_grad, everything)
    arrived = reduced[0] + (num_layers - 1) * layer
    sent = layer * wide * (num_layers > 1) + tied_grad  # the gradients of the layer above are still being sent
    embedding = head * e * (hardware.num_gpus > 1 or shape.tied)
    yield FIRST_LAYER, held(backward, layer * e + embedding, arrived, sent, inputs + own)
    # The embedding's dense gradient and the buffer of its kernel, while the first layer's gradients are being sent;
    # then the gradient and its wide copy to send.
    rows = s // EMBEDDING_RUN + min(s, shape.vocab)
    ending = head * e + max(layer * wide + rows * shape.hidden * wide + tied_grad, head * wide)
    yield "backward, embedding", held(Moment("embedding", x), head * e, arrived + layer, ending, 0)
    yield "update", held(Moment("update"), root, _all(shape), 0, 0)


def _logits_bytes(shape: ModelShape, layout: Layout, s: int) -> int:
    return min(LOGITS_TILE_BYTES, s * shape.vocab * layout.element_bytes)


def _all(shape: ModelShape) -> int:
    return max(shape.num_parameters, 1)


def _states(shape: ModelShape, layout: Layout, hardware: Hardware) -> dict[str, int]:
    """fp32 master weights, gradients and AdamW's two moments: this rank's shards on the device."""
    count = 0 if layout.offload_optimizer else -(-shape.num_parameters // hardware.num_gpus)
    return {"parameters": 4 * count, "gradients": 4 * count, "optimizer": 8 * count}


def _kept_on_device(shape: ModelShape, layout: Layout, s: int) -> tuple[int, int]:
    """(bytes per layer of inputs, bytes of all layers' attention outputs) kept on the device."""
    if not layout.checkpoint:
        return everything_bytes(shape, layout, s), 0
    inputs = layout.x_bytes(shape, s) if layout.input_tier == "device" else 0
    kept = layout.keep_attention if layout.attention_tier == "device" else 0
    return inputs, kept * kept_attention_bytes(shape, layout, s)


def _everything_moment(shape: ModelShape, layout: Layout, s: int) -> Moment:
    """Beside what is kept: the stream and its gradient, one matmul's gradients of the MLP, the weights' gradients."""
    e = layout.element_bytes
    sums = shape.layer_parameters * e
    return Moment("everything kept", 2 * layout.x_bytes(shape, s), tiles=3 * s * shape.mlp * e, sums=sums)


def _outside(
    shape: ModelShape, layout: Layout, hardware: Hardware, work: Work
) -> tuple[dict[str, int], dict[str, int]]:
    """Holders in a node's host memory and on its disk."""
    s, ranks = work.local_tokens(layout.cp), hardware.gpus_per_node
    inputs = shape.num_layers * layout.x_bytes(shape, s)
    one_output = kept_attention_bytes(shape, layout, s)
    outputs = layout.keep_attention * one_output
    if not layout.checkpoint:
        inputs = outputs = 0
    host, disk = {"layer inputs": 0, "kept attention": 0}, {"layer inputs": 0, "kept attention": 0}
    station = 0
    if layout.checkpoint and layout.input_tier != "device":
        (host if layout.input_tier == "host" else disk)["layer inputs"] = ranks * inputs
        station += inputs // shape.num_layers if layout.input_tier == "disk" else 0
    if outputs and layout.attention_tier != "device":
        (host if layout.attention_tier == "host" else disk)["kept attention"] = ranks * outputs
        station += one_output if layout.attention_tier == "disk" else 0
    host["on the way to disk"] = ranks * DISK_STATION_LAYERS * station
    states = -(-shape.num_parameters // hardware.num_gpus) * 16 if layout.offload_optimizer else 0
    host["parameters, gradients, optimizer"] = ranks * states
    host["reserve"] = ranks * HOST_PROCESS_BYTES + int(HOST_RESERVE_SHARE * hardware.host_bytes)
    return host, disk
