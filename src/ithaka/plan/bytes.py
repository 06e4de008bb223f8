"""The memory ledger of a training step: arithmetic on a model's shape, a layout and the hardware.

Letters as in plan/layer_bytes.py; V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ithaka.facts.dtypes import STAGED_BYTES
from ithaka.facts.sizes import EMBEDDING_RUN, PATCHES_PER_TILE, RESERVE_BYTES, logits_tile_tokens
from ithaka.layout import Layout
from ithaka.plan.hardware import Hardware
from ithaka.plan.layer_bytes import MemoryPoint, layer_peaks, layer_sizes
from ithaka.plan.shape import Correction, Encoder, ModelShape, StepShape

RESERVE_SHARE = 0.05  # fraction of the GPU lost to fragmentation
HOST_RESERVE_SHARE = 0.05  # fraction of a node's memory for the system and file cache
HOST_PROCESS_BYTES = 6 * 10**9  # per rank: Python, torch, data
DISK_STAGING_LAYERS = 3  # layers staged in host memory on their way to or from disk

CHECKPOINT_COPY = "copy to save"  # category of a background checkpoint's copy
STATES = ("parameters", "optimizer")  # categories that are exact

Sizes = dict[str, int]  # memory category -> bytes


@dataclass(frozen=True)
class Ledger:
    """Bytes by category at the peak of a step. gpu: per GPU. host, disk: per node."""

    phase: str
    gpu: Sizes
    host: Sizes
    disk: Sizes
    gpu_peak: int  # sums of the above, reserves included
    host_peak: int
    disk_peak: int
    gpu_bytes: int  # capacities
    host_bytes: int
    disk_bytes: int

    @property
    def tiers(self) -> dict[str, tuple[int, int]]:
        """(bytes needed, bytes available) by tier."""
        return {
            "GPU": (self.gpu_peak, self.gpu_bytes),
            "host": (self.host_peak, self.host_bytes),
            "disk": (self.disk_peak, self.disk_bytes),
        }

    @property
    def stored(self) -> Sizes:
        """Host bytes of what layers keep and of offloaded states."""
        others = ("reserve", CHECKPOINT_COPY)
        return {name: size for name, size in self.host.items() if name not in others}

    @property
    def host_needed(self) -> int:
        """The host peak without the checkpoint copy, which is made only if it fits."""
        return self.host_peak - self.host[CHECKPOINT_COPY]

    @property
    def worst(self) -> tuple[float, str]:
        """(needed / available, tier) of the tier that is exceeded most."""
        return max((need / max(have, 1), tier) for tier, (need, have) in self.tiers.items())

    @property
    def fits(self) -> bool:
        return all(map(self.fits_in, self.tiers))

    def fits_in(self, tier: str) -> bool:
        need, have = self.tiers[tier]
        return need <= have


def plan_kind(shape: ModelShape, layout: Layout) -> str:
    """Plans of one kind have about the same error in their estimated bytes."""
    kept: str = layout.attention_tier if layout.keep_attention else "recomputed"
    if layout.keep_projections:
        kept += " with projections"
    if layout.keep_everything:
        kept += " and MLP"
    ranks = "several ranks" if layout.cp > 1 else "one rank"
    trained = "adapter" if shape.adapter else "all parameters"
    offloaded = ", offloaded" if layout.offload_optimizer else ""
    return f"{trained}, {ranks}, inputs {layout.input_tier}, attention {kept}{offloaded}"


def build_ledger(shape: ModelShape, layout: Layout, hardware: Hardware, work: StepShape) -> Ledger:
    """Build the ledger of the phase with the most GPU memory, corrected by traces."""
    phases = gpu_phases(shape, layout, hardware, work)
    phase, gpu = max(phases, key=lambda entry: sum(entry[1].values()))
    correction = shape.correction(plan_kind(shape, layout)) if shape.corrections else Correction()
    gpu = {
        name: size if name in STATES else round(size * correction.device)
        for name, size in gpu.items()
    }
    gpu["reserve"] = RESERVE_BYTES + int(RESERVE_SHARE * hardware.gpu.memory_bytes)
    host, disk = _host_and_disk(shape, layout, hardware, work)
    host = {
        name: size if name == "reserve" else round(size * correction.host)
        for name, size in host.items()
    }
    copied = saved_bytes(shape, layout, hardware) if work.trains else 0
    # Without room for the copy, a checkpoint blocks the step.
    has_room = sum(host.values()) + copied <= hardware.host_bytes
    host[CHECKPOINT_COPY] = copied if has_room else 0
    return Ledger(
        phase,
        gpu,
        host,
        disk,
        gpu_peak=sum(gpu.values()),
        host_peak=sum(host.values()),
        disk_peak=sum(disk.values()),
        gpu_bytes=hardware.gpu.memory_bytes,
        host_bytes=hardware.host_bytes,
        disk_bytes=hardware.disk_bytes,
    )


def saved_bytes(shape: ModelShape, layout: Layout, hardware: Hardware) -> int:
    """Return the bytes that a node's ranks copy for a checkpoint: fp32 weights and moments."""
    sharers = hardware.num_gpus // layout.replicas
    return hardware.gpus_per_node * (4 * shape.shards(sharers)[0] + shape.moment_bytes(sharers))


# ---- GPU memory


class _LayerGroup(NamedTuple):
    """Consecutive layers with one policy. `kept`: by each on the device, on average."""

    num_layers: int
    kept: int
    forward: MemoryPoint
    backward: MemoryPoint
    kept_up_to: int  # bytes kept by all layers up to the last of this group


def gpu_phases(
    shape: ModelShape, layout: Layout, hardware: Hardware, work: StepShape
) -> list[tuple[str, Sizes]]:
    """Return (phase, sizes) on one GPU, without the reserve, for each phase that can be the peak.
    Weights are gathered in the compute dtype, gradients are reduced in the sum dtype."""
    gpu = _GpuPhases(shape, layout, hardware, work)
    phases = [("forward", gpu.forward()), ("loss", gpu.loss())]
    if work.trains and work.distills:
        phases = gpu.with_teacher(phases)
    phases += [("forward, encoder", gpu.forward_encoder(encoder)) for encoder in shape.encoders]
    if not work.trains:
        return phases
    phases += [
        ("backward, encoder", gpu.backward_encoder(encoder)) for encoder in shape.trained_encoders
    ]
    if not gpu.reduces:
        phases.append(("backward, gradients of the first layer", gpu.cast_first_layer()))
    return [
        *phases,
        *gpu.backward(),
        ("backward, first layer", gpu.backward_first_layer()),
        ("backward, embedding", gpu.backward_embedding()),
        ("update", gpu.bytes_at(MemoryPoint("update"), gpu.root, shape.num_trained)),
    ]


class _GpuPhases:
    def __init__(
        self, shape: ModelShape, layout: Layout, hardware: Hardware, work: StepShape
    ) -> None:
        self.shape = shape
        self.layout = layout
        self.hardware = hardware
        self.work = work
        self.s = work.local_tokens(layout.cp)
        self.e = layout.element_bytes
        self.sum_bytes = layout.sum_bytes
        self.x = layout.x_bytes(shape.hidden, self.s)
        self.arguments = shape.measured.arguments * self.s
        self.is_single = hardware.num_gpus == 1  # nothing to gather
        self.last_layer = shape.num_layers - 1
        sharers = hardware.num_gpus // layout.replicas
        self.trained_shard = 0  # parameters
        self.frozen_shard = 0  # bytes
        self.moments = 0
        if not layout.offload_optimizer:
            self.trained_shard = shape.shards(sharers)[0]
            self.frozen_shard = shape.frozen_bytes(sharers, self.e)
            self.moments = shape.moment_bytes(sharers)
        self.head = shape.vocab * shape.hidden * self.e
        gathered = shape.gathered_bytes(self.e)
        self.layer = gathered + shape.packed_layer[0] * self.e  # with unpacked weights
        # Prefetched weights; in forward, as received.
        self.next_layer = 0 if self.is_single else gathered
        self.prefetched = self.next_layer if layout.prefetches(gathered) else 0
        self.layer_grads = shape.trained_layer * self.sum_bytes
        # A single rank casts gradients into their final buffers; others hold them until they are
        # reduced.
        self.reduces = not self.is_single or layout.offload_optimizer
        # FSDP2's root is always gathered. It has the parameters that belong to neither layers,
        # embedding nor lm_head, and a tied embedding, whose first gradient waits for its second.
        self.other = shape.measured.root * self.sum_bytes * (not self.is_single)
        self.root = self.other + (self.head if shape.tied else 0)
        self.trained_lm_head = 0 if shape.tied else shape.trained_head
        self.embedded = shape.trained_parameters("embed_tokens")
        self.root_grad = self.embedded * self.e if shape.tied else 0
        # Assumes that all tokens are image tokens. A trained encoder keeps its pixels for backward.
        values = sum(encoder.patches * encoder.values for encoder in shape.encoders)
        self.pixels = self.s * values * self.e
        self.deepstack = sum((encoder.outputs - 1) * self.x for encoder in shape.encoders)
        self.groups = self._group_layers()
        self.staged = min(4 * STAGED_BYTES, 2 * self.x) if layout.stored_dtype else 0

    def _group_layers(self) -> list[_LayerGroup]:
        groups = []
        kept_up_to = 0
        last = self.shape.first_trained
        for policy, count in self.layout.policy_groups(self.shape.num_layers, last):
            kept, forward, backward = layer_peaks(self.shape, self.layout, self.s, policy)
            first = last
            last += count
            num_bytes = sum(kept[kind] for kind in self.shape.size_indices[first:last])
            kept_up_to += num_bytes
            groups.append(_LayerGroup(count, num_bytes // count, forward, backward, kept_up_to))
        return groups

    def bytes_at(
        self, point: MemoryPoint, weights: int, reduced: int = 0, pending: int = 0, kept: int = 0
    ) -> Sizes:
        """Return the sizes at a point. `weights`: gathered bytes. `reduced`: parameters whose
        gradients are sharded. `pending`: bytes of other gradients."""
        has_optimizer = self.work.trains or self.work.between_steps  # fp32 weights and two moments
        element_bytes = 4 if has_optimizer else self.e
        num_trained = self.shape.num_trained
        grads = 4 * self.trained_shard * min(reduced, num_trained) // num_trained
        sizes = {
            "parameters": element_bytes * self.trained_shard + self.frozen_shard,
            "gradients": grads + pending + point.grad_bytes,
            "optimizer": self.moments * has_optimizer,
            "layer weights": weights,
            "residual stream": point.stream + self.arguments * (point.phase != "update"),
            "stage buffers": max(point.heads, 0),
            "tiles": point.tile_bytes + self.staged,
            "kept activations": kept + min(point.heads, 0),  # less what was freed before the peak
        }
        for _ in self.shape.trained_encoders:
            sizes["pixels"] = self.pixels * self.work.trains
        return sizes

    def forward_encoder(self, encoder: Encoder) -> Sizes:
        """Features of this rank's frames, and of its tokens; on one rank, these may be the same."""
        return self._encoder(encoder, encoder.forward_bytes, 2 * self.x) | {"pixels": self.pixels}

    def backward_encoder(self, encoder: Encoder) -> Sizes:
        """Gradients of features, and the graph of one tile. Parameter gradients are summed over
        tiles."""
        pending = encoder.parameters * (self.sum_bytes + self.e)
        return self._encoder(
            encoder, encoder.graph_bytes, 0, self.shape.num_trained - encoder.parameters, pending
        )

    def _encoder(
        self,
        encoder: Encoder,
        bytes_per_patch: int,
        stream: int,
        reduced: int = 0,
        pending: int = 0,
    ) -> Sizes:
        stream += (1 if self.layout.cp == 1 else 2) * encoder.outputs * self.x
        tile = min(self.s * encoder.patches, PATCHES_PER_TILE) * bytes_per_patch * self.e // 2
        point = MemoryPoint("encoder", stream, tile_bytes=tile)
        return self.bytes_at(point, self.root + encoder.parameters * self.e, reduced, pending)

    def forward(self) -> Sizes:
        # A layer's own kept bytes are part of its forward point.
        points = [(group.kept_up_to - group.kept, group.forward) for group in self.groups]
        if self.deepstack:  # its first layers still have features to add
            kept, point = points[0]
            stream = point.stream + self.deepstack + self.x
            points[0] = (kept, point._replace(stream=stream))
        kept, point = max(points, key=lambda entry: entry[0] + entry[1].live)
        weights = self.root + self.layer + self.next_layer
        return self.bytes_at(point, weights, kept=kept if self.work.trains else 0)

    def loss(self) -> Sizes:
        has_teacher = self.work.distills and self.work.trains
        row_bytes = self.shape.vocab * self.e * (2 if has_teacher else 1)
        tokens = logits_tile_tokens(self.layout.tile_tokens, self.s, row_bytes)
        logits = tokens * row_bytes
        normed = tokens * self.shape.hidden * self.e
        if not self.work.trains:
            # FSDP2 holds the last all-gather twice: as received, and as parameters.
            lm_head = self.head if self.is_single else 2 * self.head
            if self.shape.tied:
                lm_head = self.root + self.next_layer
            sizes = self.bytes_at(MemoryPoint("loss", self.x), lm_head)
            sizes["loss tile"] = logits + normed
            return sizes
        weights = self.head + self.other + self.next_layer
        kept = self.groups[-1].kept_up_to
        sizes = self.bytes_at(MemoryPoint("loss", 2 * self.x), weights, kept=kept)
        head = self.shape.trained_head
        computed = max(logits + 2 * normed, head * self.e)  # normed and its gradient
        sizes["loss tile"] = head * self.sum_bytes + computed
        return sizes

    def with_teacher(self, phases: list[tuple[str, Sizes]]) -> list[tuple[str, Sizes]]:
        """Add its forward, its states and, in the loss, its head. Its weights are frozen."""
        teacher = self.shape.teacher or self.shape
        work = replace(self.work, trains=False, reference=False)
        own = {name: phases[0][1][name] for name in ("parameters", "gradients", "optimizer")}
        gpu = _GpuPhases(teacher, self.layout.for_teacher(), self.hardware, work)
        states = {"teacher states": self.layout.x_bytes(teacher.hidden, self.s), "teacher head": 0}
        phases = [(phase, sizes | states) for phase, sizes in phases]
        if self.shape.teacher:
            phases[-1][1]["teacher head"] = teacher.vocab * teacher.hidden * self.e
        return [("forward of the teacher", gpu.forward() | own), *phases]

    def backward(self) -> list[tuple[str, Sizes]]:
        """The last layer of each group, when the group keeps the most. The gradients of the module
        above are being reduced: lm_head, or the next layer."""
        if self.last_layer:
            prefetched = self.prefetched
        elif self.is_single or self.shape.tied:
            prefetched = 0
        else:
            prefetched = self.head
        weights = self.root + self.layer + prefetched
        phases = []
        num_done = 0
        for group in reversed(self.groups):
            phase = "backward, last layer"
            pending = self.root_grad or self.shape.trained_head * self.sum_bytes * self.reduces
            if num_done:
                phase = f"backward, layer {self.last_layer - num_done}"
                pending = self.root_grad + self.layer_grads * self.reduces
            reduced = self.trained_lm_head + num_done * self.shape.trained_layer
            sizes = self.bytes_at(group.backward, weights, reduced, pending, group.kept_up_to)
            phases.append((phase, sizes))
            num_done += group.num_layers
        return phases

    def backward_first_layer(self) -> Sizes:
        has_head = not self.is_single or self.shape.tied
        weights = self.layer + self.other + (self.head if has_head else 0)
        reduced = self.trained_lm_head + self.last_layer * self.shape.trained_layer
        pending = self.layer_grads * (self.last_layer > 0 and self.reduces) + self.root_grad
        # Gradients of features, for the encoder.
        waiting = self.deepstack * bool(self.shape.trained_encoder)
        point = self.groups[0].backward
        point = point._replace(stream=point.stream + waiting)
        return self.bytes_at(point, weights, reduced, pending, self.groups[0].kept)

    def cast_first_layer(self) -> Sizes:
        """Without a reduction: the first layer's gradients, and those that they are cast to."""
        reduced = self.trained_lm_head + self.shape.num_layers * self.shape.trained_layer
        pending = self.layer_grads + self.root_grad
        return self.bytes_at(MemoryPoint("cast", self.x), self.root, reduced, pending)

    def backward_embedding(self) -> Sizes:
        """First the dense gradient and its kernel's buffer, while the first layer's gradients are
        reduced; for tied weights, two gradients and their sum. Then the gradient, its wide copy to
        send, and the received shard."""
        shape = self.shape
        grad = self.embedded * self.e
        sent = self.embedded * self.sum_bytes
        rows = self.s // EMBEDDING_RUN + min(self.s, shape.vocab)
        buffer = rows * shape.hidden * self.sum_bytes if self.embedded else 0
        layer_grads = self.layer_grads * self.reduces
        grads = grad + layer_grads + self.root_grad + max(buffer, self.root_grad)
        computed = (self.head + self.other, grads)
        shard = 0 if self.is_single else sent * self.layout.replicas // self.hardware.num_gpus
        reducing = (self.root, grad + sent + shard)
        weights, pending = max(computed, reducing, key=sum)
        reduced = self.trained_lm_head + shape.num_layers * shape.trained_layer
        return self.bytes_at(MemoryPoint("embedding", self.x), weights, reduced, pending)


# ---- host memory and disk


def _host_and_disk(
    shape: ModelShape, layout: Layout, hardware: Hardware, work: StepShape
) -> tuple[Sizes, Sizes]:
    """Bytes by category in a node's host memory and on its disk."""
    s = work.local_tokens(layout.cp)
    ranks = hardware.gpus_per_node
    inputs: dict[str, list[int]] = {"device": [], "host": [], "disk": []}  # bytes of each layer
    outputs = {None: 0, "device": 0, "host": 0, "disk": 0}
    kinds = [
        layer_sizes(kind_shape, layout, s, make_sizes)
        for make_sizes, kind_shape in shape.kinds_of_sizes
    ]
    stored = [ranks * kinds[index].stored_outputs for index in shape.size_indices]
    last = shape.first_trained
    for policy, count in layout.policy_groups(shape.num_layers, last):
        first = last
        last += count
        inputs[policy.input] += [ranks * layout.stored_input_bytes(policy, s, shape.hidden)] * count
        outputs[policy.attention] += sum(stored[first:last])
    dq = max(sizes.stored_dq for sizes in kinds) if outputs["host"] or outputs["disk"] else 0
    sharers = hardware.num_gpus // layout.replicas
    frozen = shape.frozen_bytes(sharers, layout.element_bytes)
    states = ranks * (8 * shape.shards(sharers)[0] + shape.moment_bytes(sharers) + frozen)
    staged = sum(sorted(inputs["disk"])[-DISK_STAGING_LAYERS:])
    staged += min(DISK_STAGING_LAYERS * max(stored), outputs["disk"])
    host = {
        "layer inputs": sum(inputs["host"]),
        "kept attention": outputs["host"] + ranks * dq,
        "on the way to disk": staged,
        "parameters, gradients, optimizer": states * layout.offload_optimizer,
        "reserve": ranks * HOST_PROCESS_BYTES + int(HOST_RESERVE_SHARE * hardware.host_bytes),
    }
    return host, {"layer inputs": sum(inputs["disk"]), "kept attention": outputs["disk"]}
