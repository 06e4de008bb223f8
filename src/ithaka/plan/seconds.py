"""FLOPs and seconds of a training step, or of a forward alone: arithmetic on a shape, a layout and the hardware.

Letters as in plan/bytes.py. Rates come from plan/hardware.py. The shares, STAGE_SECONDS and NARROW_HEAD_START are
fitted to rehearsals on an H200, of which half are held out for testing (`python tests/rehearsed.py` fits them again).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ithaka.config import LAYER_LINEARS
from ithaka.layout import ActivationPolicy, Layout
from ithaka.plan.bytes import LayerBytes, kept_attention_bytes, logits_tile_tokens
from ithaka.plan.hardware import DISK_BYTES_S, HOST_UPDATE_BYTES_S, Hardware
from ithaka.plan.heads import count_slots
from ithaka.plan.shape import ModelShape, Work

# Fractions of the hardware's matmul rate, forward and backward.
MLP_SHARE = (0.82, 0.82)
PROJECTION_SHARE = (0.62, 0.49)  # whose matrices are slices of few heads
LOSS_SHARE = 0.91
COPY_SHARE = 0.88  # fraction of the PCIe rate that tile-by-tile copies reach
MLP_PASSES = (3, 6)  # reads and writes of [s, F] by element-wise kernels, forward and backward
WALK_PASSES = (4, 5)  # of [s, D], per walk over the tiles
HEAD_PASSES = (8, 24)  # of each projected head's [s, K]: RoPE, layout, sums
STAGE_SECONDS = 0.00016  # per stage and direction whatever s is: slices of weights, launches
# Of attention's rate at a head dim of 128, at 64, where matmuls wait for the softmax. Forward it grows with the length
# of documents (444, 498 and 529 TFLOP/s at 128K, 256K and 1M; shorter ones were not measured).
NARROW_HEAD_SHARE, NARROW_HEAD_START, NARROW_HEAD_LEAST = (0.82, 0.8), 31 * 1024, 128 * 1024
LOGIT_PASSES = 3  # over the logits by the loss's element-wise kernels: one for the loss, two for its gradient
# Beside an adapter, forward and backward: reads and writes of its map's inputs and outputs, which its tall matmuls
# wait for; forward is computed again in backward, and there are three gradients.
ADAPTER_PASSES = ((1, 2), (4, 4))
UPDATE_BYTES = 28  # moved per parameter by AdamW: read p, g, m, v and write p, m, v


@dataclass(frozen=True)
class Seconds:
    """What a GPU's time goes to. Copies and exchanges count only where nothing hides them."""

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
    shape: ModelShape, layout: Layout, hardware: Hardware, work: Work, window: int | None, keeps: ActivationPolicy
) -> tuple[Seconds, Seconds]:
    """(forward, backward) of one layer on the rank with the most heads."""
    kept = keeps.attention is not None
    linear = LinearSeconds(shape, layout, hardware, work.local_tokens(layout.cp), keeps)
    heads = -(-shape.heads // layout.ulysses)
    flops = 4 * shape.head_dim * heads * work.pairs(window) / layout.ring
    gpu, share, share_back = hardware.gpu, 1.0, 1.0
    if shape.head_dim <= 64:
        share, share_back = NARROW_HEAD_SHARE
        share /= 1 + NARROW_HEAD_START / max(work.length, NARROW_HEAD_LEAST)
    attend = flops / (gpu.attention_forward_flops * share)
    attend_back = 2.5 * flops / (gpu.attention_backward_flops * share_back)
    pcie = hardware.gpu.pcie_bytes_s * COPY_SHARE
    from_store, stored = keeps.input != "device", keeps.attention in ("host", "disk")
    x, fetched = linear.x, kept_attention_bytes(shape, layout, linear.s) if stored else 0

    projections, mlp = linear.project(False), linear.mlp(False)
    ex_forward, ex_backward = _exchange_seconds(shape, layout, hardware, linear.s, keeps.projections)
    if layout.ring > 1:
        ring_forward, ring_backward, last = _ring_seconds(shape, layout, hardware, linear.s)
        ex_forward += max(0.0, ring_forward - attend)
        ex_backward += max(0.0, ring_backward - attend_back) + last
    again = Seconds() if kept else Seconds(attend, projections, ex_forward)
    busy = projections + attend + mlp
    copy_out = max(0.0, (x * from_store + fetched) / pcie - busy)
    # Through the node's disk, one way; no layer gains from another's surplus.
    to_disk = x * (keeps.input == "disk") + fetched * (keeps.attention == "disk")
    write = to_disk * hardware.gpus_per_node / DISK_BYTES_S
    # All-gather of the layer's weights, reduction of its gradients.
    e, trained, frozen = layout.element_bytes, shape.trained_layer, shape.layer_parameters if shape.adapter else 0
    sharers = hardware.num_gpus // layout.replicas
    to_host = 4 * trained / sharers / gpu.pcie_bytes_s * layout.offload_optimizer
    from_host = to_host + e * frozen / sharers / gpu.pcie_bytes_s * layout.offload_optimizer
    gather = gather_seconds((trained + frozen) * e, hardware, layout.replicas) + from_host
    reduce = reduce_seconds(trained * layout.sum_bytes, hardware, layout.replicas) + to_host
    forward = Seconds(
        attend, projections + mlp, ex_forward + max(0.0, gather - busy), copy_out + max(0.0, write - busy)
    )
    mlp_back, projections_back = linear.mlp(True), linear.project(True)
    walks = linear.num_stages + (2 if layout.overlap else 1)
    wait_mlp = linear.wait((x * from_store + fetched) / pcie, mlp_back)
    streamed = from_store and not layout.overlap  # else it came with the first walk, and stayed
    wait_walks = linear.wait(walks * x * streamed / pcie, projections_back)
    busy_back = mlp_back + projections_back + attend_back + again.total
    backward = Seconds(
        attend_back,
        mlp_back + projections_back,
        ex_backward + max(0.0, gather + reduce - busy_back),
        wait_mlp + wait_walks + max(0.0, write - busy_back),
    )
    return forward, backward + again


class LinearSeconds:
    """Token-wise work of one layer on one rank: matmuls, and kernels that only move bytes."""

    def __init__(
        self, shape: ModelShape, layout: Layout, hardware: Hardware, s: int, keeps: ActivationPolicy | None = None
    ) -> None:
        self.shape, self.layout, self.hardware, self.s, self.keeps = (
            shape,
            layout,
            hardware,
            s,
            keeps or ActivationPolicy(),
        )
        slots = count_slots(shape, layout)
        self.x, self.num_stages = layout.x_bytes(shape.hidden, s), len(slots.stages)
        # Width of q, k and v as projected: empty and repeated slots included.
        self.projected = (self.num_stages * slots.query + 2 * slots.all_kv) * layout.ulysses * shape.head_dim
        self.frozen = shape.adapter is not None
        self.num_tiles = -(-s // (layout.tile_tokens or s))

    def wait(self, copy_s: float, busy_s: float) -> float:
        """Seconds that copies to the device add to work on the same tiles: the first tile hides behind nothing."""
        first, others = copy_s / self.num_tiles, 1 - 1 / self.num_tiles
        return first + max(0.0, others * (copy_s - busy_s))

    def matmul(self, width: float, depth: float, share: float) -> float:
        return 2 * self.s * width * depth / (self.hardware.gpu.matmul_flops * share)

    def moving(self, num_bytes: float) -> float:
        return num_bytes / self.hardware.gpu.memory_bytes_s

    def output(self, share: float) -> float:
        return self.matmul(self.shape.hidden, self.shape.heads * self.shape.head_dim, share)

    def project(self, backward: bool) -> float:
        """Backward projects once more where that was not kept; where attention's output was not either, forward is
        computed again besides."""
        again = not (backward and self.keeps.projections)
        walks = (self.num_stages * again + backward) * WALK_PASSES[backward] * self.x
        passes = HEAD_PASSES[backward] - HEAD_PASSES[0] * (not again)
        heads = passes * self.s * self.projected * self.layout.element_bytes
        matmul, sums = self.matmul(self.shape.hidden, self.projected, PROJECTION_SHARE[backward]), 0.0
        if backward:
            products = 2 + again - self.frozen
            matmul = products * matmul + self.output(PROJECTION_SHARE[1])
            sums = self.sums(self.projected * self.shape.hidden)
        moved = self.moving(walks + heads) + self.adapters(LAYER_LINEARS[:3], backward)
        return matmul + moved + self.num_stages * STAGE_SECONDS + sums

    def mlp(self, backward: bool) -> float:
        moved = self.moving(MLP_PASSES[backward] * self.s * self.shape.mlp * self.layout.element_bytes)
        moved += self.adapters(LAYER_LINEARS[3:], backward)
        share = MLP_SHARE[backward]
        one = self.matmul(3 * self.shape.hidden, self.shape.mlp, share)
        if not backward:
            return self.output(share) + one + moved
        again = 0 if self.keeps.mlp else 2 / 3  # all but the last product (layer/mlp.py)
        products = 2 - self.frozen
        output = (products - self.keeps.projections) * self.output(share)
        return (products + again) * one + output + moved + self.sums(self.shape.mlp_parameters)

    def adapters(self, names: Sequence[str], backward: bool) -> float:
        sizes = [size for name, size in self.shape.linears.items() if name in names and name in self.shape.most_adapted]
        passes = sum(ADAPTER_PASSES[backward][side] * size[side] for size in sizes for side in (0, 1))
        return self.moving(passes * self.s * self.layout.element_bytes)

    def sums(self, num_parameters: int) -> float:
        """Weight gradients read and written once per tile; none of frozen weights."""
        return 0.0 if self.frozen else (self.num_tiles - 1) * self.moving(num_parameters * 2 * self.layout.sum_bytes)


def _exchange_seconds(shape: ModelShape, layout: Layout, hardware: Hardware, s: int, kept: bool) -> tuple[float, float]:
    """(forward, backward) seconds of all-to-alls that nothing hides. `kept`: q, k and v are not sent again."""
    if layout.cp == 1:
        return 0.0, 0.0
    b = LayerBytes(shape, layout, s)
    kv = sum(b.kv)
    queries = b.num_stages * b.q
    hidden = layout.overlap and b.num_stages > 1
    arriving = b.q + b.kv[0] if hidden else queries + kv
    sent_q, sent_kv = (b.q, b.kv[0]) if hidden else (queries, kv)
    arriving_back = 2 * sent_q + (0 if kept else sent_q + sent_kv)
    ulysses = layout.ulysses
    inside = math.gcd(ulysses, hardware.gpus_per_node)  # smallest part in one node of a group that straddles nodes

    def seconds(num_bytes: int) -> float:
        """Each rank keeps 1/ulysses; what leaves the node goes over the network at the same time as the rest."""
        near = num_bytes * (inside - 1) / ulysses / hardware.gpu.link_bytes_s
        far = num_bytes * (ulysses - inside) / ulysses / hardware.gpu.network_bytes_s
        return max(near, far)

    return seconds(arriving + queries), seconds(arriving_back + queries + kv)


def _ring_seconds(shape: ModelShape, layout: Layout, hardware: Hardware, s: int) -> tuple[float, float, float]:
    """(forward, backward, end of backward): k and v come to the member that sees all, dk and dv go back from it. All
    but the last round's dk and dv have attention to hide behind."""
    b, gpu = LayerBytes(shape, layout, s), hardware.gpu
    inside = max(1, math.gcd(layout.cp, hardware.gpus_per_node) // layout.ulysses)  # fewest members in one node
    per_byte = (inside - 1) / gpu.link_bytes_s + (layout.ring - inside) / gpu.network_bytes_s
    kv = 2 * sum(stage.reads for stage in b.slots.stages) * b.slot
    last = sum(b.wide(b.round(stage)) for stage in range(b.num_stages))
    rate = gpu.link_bytes_s if inside == layout.ring else gpu.network_bytes_s
    return kv * per_byte, (kv + b.wide(kv)) * per_byte, last / rate


def gather_seconds(num_bytes: int, hardware: Hardware, replicas: int = 1) -> float:
    """An all-gather to `num_bytes` on every rank of a replica, or a reduce-scatter from them. Between nodes all their
    GPUs send at once, each another part."""
    sharers, gpu = hardware.num_gpus // replicas, hardware.gpu
    near = sharers <= hardware.gpus_per_node
    rate = gpu.link_bytes_s if near else min(gpu.link_bytes_s, hardware.gpus_per_node * gpu.network_bytes_s)
    return num_bytes * (sharers - 1) / sharers / rate


def reduce_seconds(num_bytes: int, hardware: Hardware, replicas: int = 1) -> float:
    """A reduce-scatter in every replica, then an all-reduce of each shard over the replicas."""
    shard = num_bytes * replicas / hardware.num_gpus
    return gather_seconds(num_bytes, hardware, replicas) + 2 * shard * (replicas - 1) / replicas / (
        hardware.gpu.link_bytes_s if hardware.num_nodes == 1 else hardware.gpu.network_bytes_s
    )


def step_seconds(shape: ModelShape, layout: Layout, hardware: Hardware, work: Work) -> Seconds:
    """One optimizer step: all layers and the loss in every micro-step, and the update."""
    total = _loss_seconds(shape, layout, hardware, work)
    trained = [work.trains and i >= shape.first_trained for i in range(shape.num_layers)]
    layers = zip(shape.windows, layout.layer_policies(shape.num_layers), trained, strict=True)
    for (window, keeps, needs_backward), same in groupby(layers):
        forward, backward = layer_seconds(shape, layout, hardware, work, window, keeps)
        total = total + (forward + backward if needs_backward else forward).times(len(list(same)))
    rate, count = hardware.gpu.memory_bytes_s, hardware.num_gpus / layout.replicas
    if not work.trains:
        return total
    if layout.offload_optimizer:
        rate, count = HOST_UPDATE_BYTES_S, hardware.num_nodes / layout.replicas
    return total.times(work.accumulate) + Seconds(update=UPDATE_BYTES * shape.num_trained / count / rate)


def _loss_seconds(shape: ModelShape, layout: Layout, hardware: Hardware, work: Work) -> Seconds:
    """Logits, their two gradients, the kernels between, and the weight's sum once per tile of logits. A frozen weight
    has no gradient; a forward alone has logits alone.

    Nothing hides the gathering of lm_head.
    """
    linear = LinearSeconds(shape, layout, hardware, work.local_tokens(layout.cp))
    all_logits = linear.s * shape.vocab * layout.element_bytes
    trained = shape.saved("lm_head") > 0
    head_bytes = shape.vocab * shape.hidden * layout.element_bytes
    if not work.trains:
        logits = linear.matmul(shape.hidden, shape.vocab, LOSS_SHARE) + linear.moving(all_logits)
        return Seconds(linear=logits, exchange=gather_seconds(head_bytes, hardware, layout.replicas))
    tokens = logits_tile_tokens(layout.tile_tokens, linear.s, shape.vocab * layout.element_bytes)
    sums = linear.s / tokens * 2 * shape.saved("lm_head") * layout.sum_bytes
    moved = gather_seconds(2 * head_bytes, hardware, layout.replicas)
    moved += reduce_seconds(shape.saved("lm_head") * layout.sum_bytes, hardware, layout.replicas)
    matmuls = (2 + trained) * linear.matmul(shape.hidden, shape.vocab, LOSS_SHARE)
    return Seconds(linear=matmuls + linear.moving(LOGIT_PASSES * all_logits + sums), exchange=moved)
