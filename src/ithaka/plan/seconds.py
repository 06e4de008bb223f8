"""FLOPs and seconds of a training step or a forward pass: arithmetic on a shape, a layout and the
hardware.

Letters as in plan/layer_bytes.py, rates from plan/hardware.py. The shares, STAGE_SECONDS and
NARROW_HEAD_START are fitted to rehearsals on an H200; half of the rehearsals are held out for
testing (`python tests/rehearsed.py` refits). NARROW_FA4_SHARE and LAUNCH_SECONDS were chosen with
runs at full depth.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from dataclasses import dataclass, replace

from ithaka.facts.attention import AttentionKind
from ithaka.facts.sizes import logits_tile_tokens
from ithaka.layout import ActivationPolicy, Layout
from ithaka.plan.bytes import plan_kind
from ithaka.plan.hardware import HOST_UPDATE_BYTES_S, SLOW_HEAD_DIM, SLOW_KERNELS, Hardware
from ithaka.plan.layer_bytes import layer_sizes
from ithaka.plan.shape import Encoder, MixerCost, ModelShape, StepShape

# Fractions of the hardware's matmul rate, forward and backward.
LAYER_SHARE = 0.73  # dense matmuls of layers with blocks
PLAIN_SHARE = 0.8  # and without
LOSS_SHARE = 0.91
FLOP_SHARE = 0.886  # fraction of the peak rate that large matmuls reach: 700 TFLOP/s on an H200
# Traffic of a layer's element-wise kernels, relative to an eager run: with blocks (chosen by hand,
# see log/2026-11.md; why it is small is unknown), without, and compiled.
BLOCK_MOVES = 0.2
EAGER_MOVES = 2.0
COMPILED_MOVES = 0.42
# With blocks: over [s, K] of each projected head, forward and backward; RoPE, layout, sums.
HEAD_PASSES = (8, 24)
# Grouped matmuls of experts, and the kernel that sums their weight gradients: (fraction of the
# matmul rate with many rows per expert, rows at half of that). Within 20 % of an H200 from 32 to
# 2048 rows.
EXPERTS_SHARE = (0.91, 170)
EXPERT_SUM_SHARE = (0.68, 500)
ENCODER_SHARE = 0.65  # matmuls of image encoders, whose matrices are small
COPY_SHARE = 0.88  # fraction of the PCIe rate that tile-by-tile copies reach
# Per stage and direction, independent of s: slicing weights, kernel launches.
STAGE_SECONDS = 0.00023
# Small tiles wait for the CPU: what it launches for a tile, forward and backward, counted for tiny
# layers of Llama and Qwen3-MoE, and how far it runs ahead of attention. The seconds are
# Llama-3.1-8B's with adapters at 256K, in tiles of 2K.
LAUNCH_SECONDS = 0.000025
LAUNCHES_AHEAD = 1000
TILE_LAUNCHES = (20, 130)
STAGE_LAUNCHES = (50, 50)
EXPERT_LAUNCHES = (60, 150)
ADAPTER_LAUNCHES = 1.3  # relative to a layer without adapters
# Attention at head dim 64, as a fraction of the rate at 128: matmuls wait for the softmax. Forward
# speeds up with the length of documents (444, 498 and 529 TFLOP/s at 128K, 256K and 1M).
NARROW_HEAD_SHARE = (0.82, 0.8)
NARROW_HEAD_START = 31 * 1024
NARROW_HEAD_LEAST = 128 * 1024
# Backward of FlashAttention 4: Llama-3.2-1B at 512K and gpt-oss-20b at 256K, at full depth.
NARROW_FA4_SHARE = 0.85
# At head dim 256, and with a sliding window, whose blocks are mostly masked.
WIDE_HEAD_SHARE = (1.08, 0.59)
WINDOW_SHARE = (0.46, 0.43)
LOGIT_PASSES = 3  # over the logits: one for the loss, two for its gradient
# Passes over the inputs and outputs of a map with an adapter, whose matmuls are memory-bound,
# forward and backward, which recomputes forward and has three gradients.
ADAPTER_PASSES = ((1, 2), (4, 4))
UNPACK_SHARE = 0.82  # fraction of the memory rate at which four-bit weights are unpacked
UPDATE_BYTES = 28  # bytes that AdamW moves per parameter: read p, g, m, v and write p, m, v


@dataclass(frozen=True)
class Seconds:
    """Seconds by kind of work. Copies and exchanges count only where compute does not hide them."""

    attention: float = 0.0
    linear: float = 0.0
    exchange: float = 0.0
    copies: float = 0.0
    update: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*map(operator.add, vars(self).values(), vars(other).values()))

    def times(self, count: float) -> Seconds:
        return Seconds(*(part * count for part in vars(self).values()))


def layer_seconds(
    shape: ModelShape,
    layout: Layout,
    hardware: Hardware,
    work: StepShape,
    mixer: MixerCost,
    policy: ActivationPolicy,
) -> tuple[Seconds, Seconds]:
    """Return (forward, backward) of one layer on the rank with the most heads."""
    shape = shape.by_mixer[mixer]
    gpu = hardware.gpu
    layer = LayerSeconds(shape, layout, hardware, work.local_tokens(layout.cp), policy)
    attend, attend_back = mixer.seconds(layer, work)
    projections = layer.project(False)
    mlp = layer.mlp(False)
    projections_back = layer.project(True)
    mlp_back = layer.mlp(True)
    exchange, exchange_back = mixer.exchange_seconds(layer)
    if layout.ring > 1:
        ring, ring_back, last_round = layer.ring()
        exchange += max(0.0, ring - attend)
        exchange_back += max(0.0, ring_back - attend_back) + last_round
    recomputed = Seconds() if policy.attention else Seconds(attend, projections, exchange)
    sizes = layer_sizes(shape, layout, layer.s, mixer.sizes)
    num_stages = sizes.num_stages if sizes.has_stages else 1
    linear = max(projections + mlp, layer.launches(False, num_stages, attend))
    linear_back = max(projections_back + mlp_back, layer.launches(True, num_stages, attend_back))
    busy = linear + attend
    busy_back = linear_back + attend_back + recomputed.total

    # All-gather of the layer's weights and reduce-scatter of its gradients.
    e = layout.element_bytes
    trained = shape.trained_layer
    frozen = shape.gathered_bytes(e) - trained * e if shape.adapter else 0  # bytes
    sharers = hardware.num_gpus // layout.replicas
    to_host = 4 * trained / sharers / gpu.pcie_bytes_s * layout.offload_optimizer
    from_host = to_host + frozen / sharers / gpu.pcie_bytes_s * layout.offload_optimizer
    gather = gather_seconds(trained * e + frozen, hardware, layout.replicas) + from_host
    packed, num_bytes = shape.packed_layer
    unpack = layer.move((packed * e + num_bytes) / UNPACK_SHARE)
    reduce = reduce_seconds(trained * layout.sum_bytes, hardware, layout.replicas) + to_host

    # Copies to and from the store. All GPUs of a node share its disk.
    is_stored = policy.input != "device"
    pcie = gpu.pcie_bytes_s * COPY_SHARE
    x = layout.stored_input_bytes(policy, layer.s, shape.hidden)
    outputs = sizes.stored_outputs if policy.attention in ("host", "disk") else 0
    stored = x * is_stored + outputs
    to_disk = x * (policy.input == "disk") + outputs * (policy.attention == "disk")
    disk = to_disk * hardware.gpus_per_node / gpu.disk_bytes_s
    # Without overlap, every loop over the tiles fetches the input again.
    fetches = layer.num_stages + 1 if is_stored and not layout.overlap else 0
    copies = max(0.0, stored / pcie - busy) + max(0.0, disk - busy)
    copies_back = layer.wait(stored / pcie, mlp_back)
    copies_back += layer.wait(fetches * x / pcie, projections_back)
    copies_back += max(0.0, disk - busy_back)

    forward = Seconds(attend, linear + unpack, exchange + max(0.0, gather - busy), copies)
    hidden = gather if layout.prefetches(trained * e + frozen) else 0.0
    exchange_back += gather - hidden + max(0.0, hidden + reduce - busy_back)
    backward = Seconds(attend_back, linear_back + unpack, exchange_back, copies_back)
    return forward, backward + recomputed


class LayerSeconds:
    """Seconds of each part of a layer's work on one rank."""

    def __init__(
        self,
        shape: ModelShape,
        layout: Layout,
        hardware: Hardware,
        s: int,
        policy: ActivationPolicy | None = None,
    ) -> None:
        self.shape = shape
        self.layout = layout
        self.hardware = hardware
        self.gpu = hardware.gpu
        self.s = s
        self.policy = policy or ActivationPolicy()
        self.bytes = layer_sizes(shape, layout, s)
        self.x = self.bytes.x
        self.num_stages = self.bytes.num_stages
        self.qkv_width = self.bytes.qkv_width
        self.is_frozen = shape.adapter is not None
        self.has_blocks = not shape.measured.compiles and not shape.root.is_video
        self.num_tiles = -(-s // (layout.tile_tokens or s))

    def attention(self, work: StepShape, kind: AttentionKind, causal: bool) -> tuple[float, float]:
        """(forward, backward): two and five matmuls per query-key pair."""
        heads = -(-self.shape.heads // self.layout.ulysses)
        head_dim = kind.head_dim
        window = kind.window
        gpu = self.hardware.for_attention(head_dim, kind.softcap).gpu
        flops = 4 * head_dim * heads * work.pairs(window, causal) / self.layout.ring
        share = 1.0
        share_back = 1.0
        if gpu.kernel in SLOW_KERNELS:  # with rates at head dim 512
            if gpu.kernel != "efficient":  # scores dominate
                share = share_back = head_dim / SLOW_HEAD_DIM
        elif head_dim <= 64:
            share = NARROW_HEAD_SHARE[0]
            share_back = NARROW_FA4_SHARE if gpu.kernel == "fa4" else NARROW_HEAD_SHARE[1]
            share /= 1 + NARROW_HEAD_START / max(work.length, NARROW_HEAD_LEAST)
        elif head_dim > 128:
            share, share_back = WIDE_HEAD_SHARE
        if window is not None and window < work.length:
            share *= WINDOW_SHARE[0]
            share_back *= WINDOW_SHARE[1]
        forward = flops / (gpu.attention_forward_flops * share)
        return forward, 2.5 * flops / (gpu.attention_backward_flops * share_back)

    def wait(self, copy_s: float, busy_s: float) -> float:
        """Seconds that copies to the device add to compute on the same tiles. The first waits."""
        first = copy_s / self.num_tiles
        later_share = 1 - 1 / self.num_tiles
        return first + max(0.0, later_share * (copy_s - busy_s))

    def matmul(self, width: float, depth: float, share: float) -> float:
        return 2 * self.s * width * depth / (self.gpu.matmul_flops * share)

    def move(self, num_bytes: float) -> float:
        return num_bytes / self.gpu.memory_bytes_s

    def project(self, backward: bool) -> float:
        """The capture pass: q, k and v. Backward keeps its graphs if it projects and overlaps, or
        repeats it unless q, k and v were kept. Stages project repeated kv heads as often."""
        shape = self.shape
        layer = self.shape.measured
        projects = not self.policy.projections
        once = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        macs = layer.projection_macs * (self.qkv_width / once if layer.slices_heads else 1)
        passes = HEAD_PASSES[backward] * self.has_blocks
        heads = self.move(passes * self.s * self.qkv_width * self.layout.element_bytes)
        # The first stage is part of what was fitted.
        stages = (self.num_stages - 1) * STAGE_SECONDS + heads
        if not backward:
            return self._run(macs, layer.project_moved) + stages
        if layer.slices_heads:  # the pass for backward does not compute q, k and v
            again = projects
            num_matmuls = 2 + projects - self.is_frozen
        else:
            again = projects and not self.layout.overlap
            num_matmuls = 3 + again - self.is_frozen
        moved = layer.project_backward_moved + again * layer.project_moved
        return self._run(num_matmuls * macs, moved) + self.sum_grads(layer.projection_macs) + stages

    def mlp(self, backward: bool) -> float:
        """The resume pass, and all adapters. Backward runs it again unless its graphs were kept."""
        layer = self.shape.measured
        adapters = self.adapters(backward)
        dense = layer.other_macs - layer.expert_macs
        if not backward:
            return self._run(dense, layer.finish_moved) + self._experts() + adapters
        moved = layer.finish_backward_moved - self.policy.mlp * layer.finish_moved
        num_matmuls = 3 - self.policy.mlp - self.is_frozen
        skips_down = layer.skips_mlp and not self.policy.mlp and not layer.expert_macs
        skipped = self.shape.hidden * self.shape.mlp * skips_down
        # Backward recomputes gate and up (blocks/experts.py).
        experts = (1 if self.policy.mlp else 5 / 3) * self._experts()
        if not self.is_frozen:
            experts += self._experts(adds=self.num_tiles > 1)
        sums = self.sum_grads(self.shape.mlp_parameters - layer.expert_parameters)
        return self._run(num_matmuls * dense - skipped, moved) + experts + sums + adapters

    def launches(self, backward: bool, num_stages: int, attend: float) -> float:
        """Seconds in which the CPU launches the kernels of all tiles but the first, whose launches
        were fitted, less what it launches while attention runs."""
        projected = 0 if backward and self.policy.projections else num_stages
        experts = EXPERT_LAUNCHES[backward] * bool(self.shape.measured.expert_macs)
        per_tile = TILE_LAUNCHES[backward] + STAGE_LAUNCHES[backward] * projected + experts
        factor = ADAPTER_LAUNCHES if self.is_frozen else 1
        seconds = per_tile * factor * (self.num_tiles - 1) * LAUNCH_SECONDS
        return max(0.0, seconds - min(attend, LAUNCHES_AHEAD * num_stages * LAUNCH_SECONDS))

    def _run(self, macs: float, moved: int) -> float:
        if self.has_blocks:
            share = LAYER_SHARE
            moves = BLOCK_MOVES
        else:
            share = PLAIN_SHARE
            moves = COMPILED_MOVES if self.shape.compiles(self.layout) else EAGER_MOVES
        return self.matmul(macs, 1, share) + self.move(self.s * moved * moves)

    def _experts(self, adds: bool = False) -> float:
        """One matmul with the chosen experts. `adds`: adds weight gradients to earlier tiles'."""
        layer = self.shape.measured
        if not layer.expert_macs:
            return 0.0
        share, half = EXPERT_SUM_SHARE if adds else EXPERTS_SHARE
        rows = self.s / self.num_tiles * self.shape.used_experts
        return self.matmul(layer.expert_macs, 1, share / (1 + half / rows))

    def adapters(self, backward: bool) -> float:
        """Seconds of a layer's adapters. A token uses only the adapters of its experts."""
        if not self.shape.adapter:
            return 0.0
        passes = 0.0
        stacked = dict(self.shape.measured.stacked)
        for name, size in self.shape.linears.items():
            if name in self.shape.most_adapted:
                widths = sum(ADAPTER_PASSES[backward][side] * size[side] for side in (0, 1))
                passes += widths * (self.shape.used_experts if name in stacked else 1)
        return self.move(passes * self.s * self.layout.element_bytes)

    def sum_grads(self, num_parameters: int) -> float:
        """Add each tile's weight gradients to the sum: one read and one write per tile after the
        first."""
        num_sums = 0 if self.is_frozen else self.num_tiles - 1
        return num_sums * self.move(num_parameters * 2 * self.layout.sum_bytes)

    def exchange(self) -> tuple[float, float]:
        """(forward, backward) seconds of all-to-alls that compute does not hide. With overlap, only
        the first stage waits for what it receives."""
        sizes = self.bytes
        ulysses = self.layout.ulysses
        if self.layout.cp == 1:
            return 0.0, 0.0
        if self.layout.overlap and sizes.num_stages > 1:
            sent, sent_back = self._sent(sizes.q, sizes.new_kv[0])
        else:
            sent, sent_back = self._sent(sizes.num_stages * sizes.q, sum(sizes.new_kv))
        traced = 1.0
        if self.shape.corrections:
            traced = self.shape.correction(plan_kind(self.shape, self.layout)).sent
        # Smallest part in one node of a group across nodes. The link and the network are used at
        # the same time.
        in_node = math.gcd(ulysses, self.hardware.gpus_per_node)
        link = (in_node - 1) / ulysses / self.gpu.link_bytes_s  # each rank keeps 1 / ulysses
        network = (ulysses - in_node) / ulysses / self.gpu.network_bytes_s
        per_byte = max(link, network)
        return sent * traced * per_byte, sent_back * traced * per_byte

    def _sent(self, queries: int, kv: int) -> tuple[int, int]:
        """Bytes sent in forward and backward, if stages wait for these bytes of q, and of k and v.
        Outputs and gradients are never hidden, kept q, k and v are not sent again."""
        outputs = self.bytes.num_stages * self.bytes.q
        again = 0 if self.policy.projections else queries + kv
        return queries + kv + outputs, 2 * queries + again + outputs + sum(self.bytes.new_kv)

    @property
    def sent_bytes(self) -> int:
        """Bytes that a layer with softmax attention sends in all-to-alls, forward and backward."""
        forward, backward = self._sent(self.bytes.num_stages * self.bytes.q, sum(self.bytes.new_kv))
        total = (1 if self.policy.attention else 2) * forward + backward
        return total * (self.layout.ulysses - 1) // self.layout.ulysses

    def ring(self) -> tuple[float, float, float]:
        """(forward, backward, last round of backward), for the member whose queries see all keys.
        It receives k and v, and sends dk and dv. Attention can hide all but the last round's."""
        sizes = self.bytes
        ring = self.layout.ring
        gpus_in_node = math.gcd(self.layout.cp, self.hardware.gpus_per_node)
        in_node = max(1, gpus_in_node // self.layout.ulysses)  # fewest members
        link = self.gpu.link_bytes_s
        network = self.gpu.network_bytes_s
        per_byte = (in_node - 1) / link + (ring - in_node) / network
        kv = sizes.ring_kv
        last = sum(sizes.in_sum_dtype(sizes.ring_round(stage)) for stage in range(self.num_stages))
        rate = link if in_node == ring else network
        return kv * per_byte, (kv + sizes.in_sum_dtype(kv)) * per_byte, last / rate


def gather_seconds(num_bytes: int, hardware: Hardware, replicas: int = 1) -> float:
    """An all-gather to `num_bytes` on every rank of a replica, or a reduce-scatter from them.
    Between nodes, all GPUs of a node send different parts at once."""
    sharers = hardware.num_gpus // replicas
    gpu = hardware.gpu
    rate = gpu.link_bytes_s
    if sharers > hardware.gpus_per_node:
        rate = min(rate, hardware.gpus_per_node * gpu.network_bytes_s)
    return num_bytes * (sharers - 1) / sharers / rate


def reduce_seconds(num_bytes: int, hardware: Hardware, replicas: int = 1) -> float:
    """A reduce-scatter in every replica, then an all-reduce of each shard over the replicas."""
    shard = num_bytes * replicas / hardware.num_gpus
    gpu = hardware.gpu
    rate = gpu.link_bytes_s if hardware.num_nodes == 1 else gpu.network_bytes_s
    all_reduce = 2 * shard * (replicas - 1) / replicas / rate
    return gather_seconds(num_bytes, hardware, replicas) + all_reduce


def seconds_by_layer(
    shape: ModelShape, layout: Layout, hardware: Hardware, work: StepShape
) -> list[tuple[Seconds, Seconds]]:
    """Return (forward, backward) of each layer."""
    layers = list(zip(shape.mixers, layout.layer_policies(shape.num_layers), strict=True))
    seconds = {layer: layer_seconds(shape, layout, hardware, work, *layer) for layer in set(layers)}
    return [seconds[layer] for layer in layers]


def step_seconds(shape: ModelShape, layout: Layout, hardware: Hardware, work: StepShape) -> Seconds:
    """One optimizer step: all micro-steps, then the update. Without training: a forward."""
    total = _loss_seconds(shape, layout, hardware, work)
    for encoder in shape.encoders:
        total = total + _encoder_seconds(encoder, shape, layout, hardware, work)
    layers = [
        (index, work.trains and i >= shape.first_trained)
        for i, index in enumerate(shape.mixer_indices)
    ]
    last = 0
    for policy, num_layers in layout.policy_groups(shape.num_layers):
        first = last
        last += num_layers
        for (index, is_trained), count in Counter(layers[first:last]).items():
            mixer = shape.mixer_kinds[index]
            forward, backward = layer_seconds(shape, layout, hardware, work, mixer, policy)
            total = total + (forward + backward if is_trained else forward).times(count)
    if not work.trains:
        return total
    if work.reference:
        other = (shape.teacher, layout.for_teacher()) if shape.teacher else (shape, layout)
        total = total + step_seconds(*other, hardware, replace(work, trains=False))
    return total.times(work.accumulate) + _update_seconds(shape, layout, hardware)


def flop_seconds(shape: ModelShape, layout: Layout, hardware: Hardware, work: StepShape) -> Seconds:
    """The time of a step's FLOPs alone, without recomputation and element-wise kernels: attention
    at the kernel's rate, matmuls at 700 TFLOP/s on an H200, and the optimizer update at memory
    bandwidth."""
    layer = LayerSeconds(shape, layout, hardware, work.local_tokens(layout.cp))
    # Recurrences are limited by memory.
    kinds = ((kind, mixer.causal) for mixer in shape.mixers for kind in mixer.attention)
    attention = sum(sum(layer.attention(work, *kind)) for kind in kinds)
    linear = (3 - layer.is_frozen) * layer.matmul(shape.num_products, 1, FLOP_SHARE)
    update = _update_seconds(shape, layout, hardware)
    return Seconds(attention, linear).times(work.accumulate) + update


def sent_bytes(shape: ModelShape, layout: Layout, work: StepShape, hardware: Hardware) -> int:
    """Bytes that a rank sends in all-to-alls in one micro-step of training."""
    policies = layout.layer_policies(shape.num_layers)
    s = work.local_tokens(layout.cp)
    sizes = {
        policy: LayerSeconds(shape, layout, hardware, s, policy).sent_bytes
        for policy in set(policies)
    }
    layers = zip(policies, shape.mixers, strict=True)
    return sum(sizes[policy] for policy, mixer in layers if mixer.attention)


def _update_seconds(shape: ModelShape, layout: Layout, hardware: Hardware) -> Seconds:
    rate = hardware.gpu.memory_bytes_s
    sharers = hardware.num_gpus / layout.replicas
    if layout.offload_optimizer:
        rate = HOST_UPDATE_BYTES_S
        sharers = hardware.num_nodes / layout.replicas
    return Seconds(update=UPDATE_BYTES * shape.num_trained / sharers / rate)


def _encoder_seconds(
    encoder: Encoder, shape: ModelShape, layout: Layout, hardware: Hardware, work: StepShape
) -> Seconds:
    """Assumes that all tokens are image tokens. A trained encoder runs again in backward."""
    is_trained = work.trains and encoder in shape.trained_encoders
    patches = work.local_tokens(layout.cp) * encoder.patches
    layer = LayerSeconds(shape, layout, hardware, patches)
    moved = encoder.moved + encoder.backward_moved * is_trained
    matmuls = (4 if is_trained else 1) * layer.matmul(encoder.products, 1, ENCODER_SHARE)
    num_bytes = encoder.parameters * layout.element_bytes
    exchange = (1 + is_trained) * gather_seconds(num_bytes, hardware, layout.replicas)
    if is_trained:
        exchange += reduce_seconds(encoder.parameters * layout.sum_bytes, hardware, layout.replicas)
    return Seconds(linear=matmuls + layer.move(patches * moved * EAGER_MOVES), exchange=exchange)


def _loss_seconds(
    shape: ModelShape, layout: Layout, hardware: Hardware, work: StepShape
) -> Seconds:
    """Logits, their two gradients, element-wise kernels, and one sum of the weight gradient per
    tile of logits. A frozen weight has no gradient; a forward pass has only logits. The all-gather
    of lm_head is not hidden."""
    layer = LayerSeconds(shape, layout, hardware, work.local_tokens(layout.cp))
    all_logits = layer.s * shape.vocab * layout.element_bytes
    trained_head = shape.trained_parameters("lm_head")
    head_bytes = shape.vocab * shape.hidden * layout.element_bytes
    matmul = layer.matmul(shape.hidden, shape.vocab, LOSS_SHARE)
    if not work.trains:
        exchange = gather_seconds(head_bytes, hardware, layout.replicas)
        return Seconds(linear=matmul + layer.move(all_logits), exchange=exchange)
    tokens = logits_tile_tokens(layout.tile_tokens, layer.s, shape.vocab * layout.element_bytes)
    sums = layer.s / tokens * 2 * trained_head * layout.sum_bytes
    exchange = gather_seconds(2 * head_bytes, hardware, layout.replicas)
    exchange += reduce_seconds(trained_head * layout.sum_bytes, hardware, layout.replicas)
    matmuls = (2 + (trained_head > 0)) * matmul
    return Seconds(linear=matmuls + layer.move(LOGIT_PASSES * all_logits + sums), exchange=exchange)


def planned_shares(
    shape: ModelShape, layout: Layout, hardware: Hardware, work: StepShape
) -> dict[tuple[str, ...], float]:
    """Shares of a micro-step's planned time, by phase: each layer's forward and backward, and the
    loss."""
    seconds: dict[tuple[str, ...], float] = {}
    layers = seconds_by_layer(shape, layout, hardware, work)
    for i, (forward, backward) in enumerate(layers):
        seconds[f"layer {i}", "forward"] = forward.total
        seconds[f"layer {i}", "backward"] = backward.total
    step = step_seconds(shape, layout, hardware, work)
    total = step.total - step.update
    seconds[("loss forward",)] = total - sum(seconds.values())
    return {path: path_s / total for path, path_s in seconds.items()}
