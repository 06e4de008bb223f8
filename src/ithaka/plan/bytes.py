"""Bytes of a training step: pure arithmetic on a model's shape, a layout and the hardware.

S tokens of the packed sequence, s = S / cp of them on this rank, t of a tile, D hidden, H and G query and kv
heads, K head dim, F MLP size, V vocabulary, n and m query and kv slots per rank and stage.
X = s * D * element bytes, T = S * n * K * element bytes (a stage tensor), U the same for m kv slots.

The first part follows one decoder layer through layer/schedule.py, moment by moment; tests compare it with the bytes
live there. The second part is the ledger of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

from ithaka.config import LAYER_LINEARS
from ithaka.layout import ActivationPolicy, Layout
from ithaka.plan.hardware import GIB, Hardware
from ithaka.plan.heads import count_slots
from ithaka.plan.rounds import ring_round_tokens
from ithaka.plan.shape import ModelShape, Work

LOGITS_TILE_BYTES = (2**29, 2**32)  # logits of a tile of the loss: at least and at most, see `logits_tile_tokens`
LOGITS_PER_TILE = 4  # tiles of the loss in a tile of the layers
WHOLE_ROWS = 128  # matmuls are faster at multiples of it
EMBEDDING_RUN = 10  # tokens whose gradients PyTorch's embedding backward adds up in one row of its buffer
RESERVE_BYTES = 2 * GIB  # CUDA context, NCCL, cuBLAS and cuDNN workspaces
RESERVE_SHARE = 0.05  # of the GPU: fragmentation
HOST_RESERVE_SHARE = 0.05  # of a node's memory: the system, file cache
HOST_PROCESS_BYTES = 6 * 10**9  # per rank: Python, torch, data
DISK_STATION_LAYERS = 3  # layers in host memory on their way to or from disk
# Rows of a query block in attention/blocks.py, forward and backward, for a head dim of 128; others: as many bytes.
BLOCK_TOKENS = {"attend": 128 * 1024, "attend backward": 264 * 1024}
# What one call takes, over all its heads, where the kernel writes to our buffers and documents or windows are no longer
# than WHOLE_TOKENS: fa4 keeps the host busy for some 0.5 ms a call, in which a GPU attends to 200 documents of 2K
# tokens, and is 1 to 4 % faster on whole documents up to 128K than on blocks of them. At 256K there is no difference.
CALL_TOKENS, WHOLE_TOKENS = 512 * 1024, 256 * 1024
BLOCK_BUFFERS = 4  # in the dtype of sums, of a block in flight inside attention

CHECKPOINT_COPY = "copy to save"  # a holder

TileWork = Literal["none", "project", "project backward", "mlp", "mlp backward", "attend", "attend backward"]
Holders = dict[str, int]  # bytes by who holds them


# ---- one layer


class MemoryPoint(NamedTuple):
    """What is live at one point of a layer's schedule, above weights, their gradients and what is kept.

    stream: full-length tensors of the residual stream. stages: tensors of heads, exchange buffers included.
    outputs: attention outputs of this layer and what else it will keep (in backward below 0: freed of what was kept).
    tiles: what the work at this point, `tile`, needs whatever s is. sums: the layer's weight gradients so far.
    """

    phase: str
    stream: int = 0
    stages: int = 0
    outputs: int = 0
    tile: TileWork = "none"
    tiles: int = 0
    sums: int = 0

    @property
    def rest(self) -> int:
        return self.stream + self.stages + self.outputs

    @property
    def live(self) -> int:
        return self.rest + self.tiles + self.sums


class LayerBytes:
    """The sizes a layer's schedule is made of, on one rank."""

    def __init__(self, shape: ModelShape, layout: Layout, s: int, keeps: ActivationPolicy | None = None) -> None:
        keeps = keeps or ActivationPolicy()
        self.shape, self.layout, self.s, self.slots = shape, layout, s, count_slots(shape, layout)
        self.num_stages = len(self.slots.stages)
        self.x = layout.x_bytes(shape.hidden, s)
        # One head of every token that this rank has in attention.
        self.slot = layout.ulysses * s * shape.head_dim * layout.element_bytes
        self.q = self.slots.query * self.slot  # T
        self.lse = layout.ulysses * s * self.slots.query * layout.sum_bytes
        stages = self.slots.stages  # k and v, by stage: those that arrive with it (2 U), those held while it attends,
        self.kv = [2 * stage.new_kv * self.slot for stage in stages]  # and those held once its last uses are over
        self.held = [2 * stage.held * self.slot for stage in stages]
        self.left = [2 * stage.left * self.slot for stage in stages]
        self.kept = keeps.attention is not None
        self.fetched = self.kept and keeps.attention != "device"  # attention's output comes from the store
        # Kept on the device: the input, attention's outputs, q with k and v, x + attention, gate and up.
        self.outputs = self.num_stages * (self.q + self.lse)
        self.heads = (self.num_stages * self.q + sum(self.kv)) * keeps.projections
        self.middle = self.x * keeps.projections
        self.gates = 2 * s * shape.mlp * layout.element_bytes * keeps.mlp
        self.own = self.x * (keeps.input == "device") + self.outputs * (keeps.attention == "device")
        self.own += self.heads + self.middle + self.gates
        stored = keeps.input != "device"
        # With overlap, an input from the store stays on the device for the whole backward. Without, only the
        # tile at work and the next one are there.
        self.held_input = self.x if layout.overlap and stored else 0
        self.streamed = 2 if stored and not layout.overlap else 0
        self.ahead = 2 if layout.overlap else 1
        self.exchanged = layout.ulysses > 1  # an exchange has a buffer of its own to receive into

    def under_way(self, own: int, first: int, last: int) -> int:
        """Tensors of stages [first, last) between their sending and their use: of each `own` and the k, v that arrive.

        With overlap the ones sent are held until the ones received are used.
        """
        twice = 2 if self.layout.overlap and self.exchanged else 1
        return twice * sum(own + kv for kv in self.kv[first:last])

    def sending(self, own: int, stage: int) -> int:
        """The most while a stage is sent. Without overlap its tensors go one by one, so only one exists twice."""
        if self.layout.overlap or not self.exchanged:
            return self.under_way(own, stage, stage + 1)
        return own + self.kv[stage] + max(self.q, self.kv[stage] // 2)

    def wide(self, num_bytes: int) -> int:
        """In the dtype of sums."""
        return num_bytes // self.layout.element_bytes * self.layout.sum_bytes

    def sums(self, num_slots: int) -> int:
        """dk and dv of so many kv slots."""
        return 2 * num_slots * self.wide(self.slot)

    def attended(self, stage: int) -> int:
        """While a stage attends: its output, and what a read that is not the whole output has besides.

        In a ring a read's output is a sum over the rounds, and k and v of one round are used while those of the next
        are sent and received.
        """
        slots, out = self.slots.stages[stage], self.q + self.lse
        if self.layout.ring == 1:
            return out + out * slots.part // self.slots.query

        def summed(width: int) -> int:
            rounded = 0 if self.layout.sum_bytes == self.layout.element_bytes else width * self.slot
            return width * (self.wide(self.slot) + self.lse // self.slots.query) + max(3 * self.round(stage), rounded)

        return max(summed(slots.widest), out + summed(slots.part) if slots.part else 0)

    def attended_back(self, stage: int) -> int:
        """In a ring, while a stage attends backward: dq as summed over the rounds, and k and v as in forward; dk and dv
        of one round are summed while those of the round before are sent and received."""
        if self.layout.ring == 1:
            return 0
        sent = 3 * self.round(stage)
        return self.slots.stages[stage].widest * self.wide(self.slot) + sent + self.wide(sent)

    def round(self, stage: int) -> int:
        """k and v of one read that a ring's member receives in a round."""
        member = self.layout.ulysses * self.s
        tokens = min(ring_round_tokens(member), (self.layout.ring - 1) * member)
        return 2 * self.slots.stages[stage].most_kv * tokens * self.shape.head_dim * self.layout.element_bytes

    def grad_sums(self, phase: str) -> int:
        """Bytes of weight gradients as they are summed over tiles (GradSum of layer/tiles.py)."""
        if not phase.startswith("backward") or phase.startswith("backward again"):
            return 0
        shape, e, wide = self.shape, self.layout.element_bytes, self.layout.sum_bytes
        if phase != "backward mlp":
            return shape.trained_layer * wide
        if shape.adapter:
            return sum(size for name, size in shape.most_adapted.items() if name in LAYER_LINEARS[3:]) * wide
        if self.s <= (self.layout.tile_tokens or self.s):
            # One tile: one weight's gradient while three tensors [s, F] are live; all of them once the product is gone.
            return max(shape.mlp_parameters * wide // 3, shape.mlp_parameters * wide - self.s * e * shape.mlp)
        output = shape.hidden * shape.heads * shape.head_dim
        return (output + shape.mlp_parameters) * wide

    def tile_bytes(self, work: TileWork) -> int:
        """What token-wise work on a tile, or attention on a block, has live.

        Counted by hand from the GPU's kernels: close, and small beside the rest at long contexts.
        """
        if work == "none":
            return 0
        shape, c, slots, hidden = self.shape, self.layout.ulysses, self.slots, self.shape.hidden
        t, e, wide = min(self.layout.tile_tokens or self.s, self.s), self.layout.element_bytes, self.layout.sum_bytes
        if work in BLOCK_TOKENS:
            tokens, calls = c * self.s, [(stage.widest, stage.most_kv) for stage in slots.stages]
            most = CALL_TOKENS if tokens <= WHOLE_TOKENS else BLOCK_TOKENS[work]
            heads = max(_heads_at_once(most // tokens, *read) for read in calls)
            if heads == 1:
                return BLOCK_BUFFERS * min(BLOCK_TOKENS[work] * 128, tokens * shape.head_dim) * wide
            # Whole sequences in one call. Backward has dq as it is summed, dk and dv; forward writes to our buffers, or
            # takes one head of each group.
            elements = tokens * shape.head_dim
            return (
                2 * heads * elements * wide if work == "attend backward" else max(kv for _, kv in calls) * elements * e
            )
        rounded, heads = 0 if wide == e else 1, shape.heads * shape.head_dim
        rank = shape.adapter.rank if shape.adapter else 0  # width of what is between an adapter's two matrices
        # Less what is kept: x + attention as rounded; two widths of the MLP, but then forward has a third.
        rounded, gates = rounded and not self.middle, 2 if self.gates else 0
        if work == "mlp":  # x + attention as summed and as rounded, its norm, two widths of the MLP
            return t * (wide * hidden + e * ((1 + rounded) * hidden + (2 - gates // 2) * shape.mlp + rank))
        if work == "mlp backward":
            # x + attention, its norm; layer/mlp.py's three. (Compiled, hooked or wrapped MLPs are black boxes and need
            # up to twice as much: no plan knows of them.)
            width = (2 - bool(self.middle) + self.streamed) * hidden + (3 if self.fetched else 1) * heads
            return t * e * (width + (3 - gates) * shape.mlp + 2 * rank)
        width = c * slots.query * shape.head_dim
        if work == "project":
            kv_width = 2 * c * max(stage.new_kv for stage in slots.stages) * shape.head_dim
            return (width + kv_width) * hidden * e + t * e * ((2 + self.streamed) * hidden + 5 * width + rank)
        all_widths = self.num_stages * width + 2 * c * slots.all_kv * shape.head_dim
        return all_widths * hidden * e + t * e * ((4 + self.streamed) * hidden + 2 * all_widths + 7 * rank)


def _heads_at_once(most: int, queries: int, kv: int) -> int:
    """Query heads in one kernel call: whole groups, or else one head of each (`_Job.walk` of attention/blocks.py)."""
    group = queries // kv
    return min(queries, most // group * group) if most >= group else min(max(1, most), kv)


def attend_moments(b: LayerBytes, phase: str, stream: int) -> Iterator[MemoryPoint]:
    """Attention of all stages (`_attend`): in forward, and again in backward where its output was not kept.

    Every stage's output stays until the output projection, after the last of them.
    """
    out = b.q + b.lse
    project, attend = f"{phase} projections", f"{phase} attention"

    def outputs(attended: int, stage: int, held: int) -> int:
        """And q, k and v, where they are kept: those not held for attention."""
        kept = attended * b.q + sum(b.kv[: stage + 1]) - held if b.heads else 0
        return attended * out + kept

    for i in range(min(b.ahead, b.num_stages)):
        yield MemoryPoint(project, stream, b.under_way(b.q, 0, i) + b.q + b.kv[i], 0, "project")
        yield MemoryPoint(project, stream, b.under_way(b.q, 0, i) + b.sending(b.q, i))
    for i in range(b.num_stages):
        later = b.under_way(b.q, i + 1, i + b.ahead)
        yield MemoryPoint(attend, stream, b.q + later + b.held[i] + b.attended(i), outputs(i, i, b.held[i]), "attend")
        if (new := i + b.ahead) < b.num_stages:
            others, done = later + b.left[i], outputs(i + 1, i, b.left[i])
            yield MemoryPoint(project, stream, others + b.q + b.kv[new], done, "project")
            yield MemoryPoint(project, stream, others + b.sending(b.q, new), done)


def attention_backward_moments(b: LayerBytes, outputs: int) -> Iterator[MemoryPoint]:
    """dy is live throughout, and so are the gradients of all heads so far. A fetched output comes one stage at a time;
    otherwise a stage's output is freed once it is sent, its lse once it is used. So are q, k and v that were kept,
    which are there already.
    """
    stream, attend, project = b.x + b.held_input, "backward attention", "backward projections"
    taken = 3 * b.q  # q, out, dout
    ends = [held - left for held, left in zip(b.held, b.left, strict=True)]  # k and v that no later stage uses
    if b.heads:
        b, taken = copy(b), 2 * b.q
        b.kv = b.held = b.left = [0] * b.num_stages

    def left(sent: int, attended: int) -> int:
        used = attended * b.q + sum(ends[:attended]) if b.heads else 0
        return outputs - used - (0 if b.fetched else sent * b.q + attended * b.lse)

    def sending(stage: int, others: int, attended: int) -> Iterator[MemoryPoint]:
        """q, k and v are made; then they are sent, and out and dout with them."""
        prefetched = b.q if b.fetched and b.layout.overlap and stage >= b.ahead else 0
        made = b.q + b.kv[stage] + prefetched
        if not b.heads:
            yield MemoryPoint(project, stream, others + made, left(stage, attended), "project")
        own = 0 if b.layout.overlap or not b.exchanged or b.fetched else b.q  # out, until all is sent
        yield MemoryPoint(project, stream, others + own + b.sending(taken, stage), left(stage + 1, attended))

    for i in range(min(b.ahead, b.num_stages)):
        yield from sending(i, b.under_way(taken, 0, i), 0)
    returned = 0  # dq, dk, dv of the stages before
    for i in range(b.num_stages):
        following, ending = i + b.ahead, ends[i]  # dk and dv
        later, more = b.under_way(taken, i + 1, following), following < b.num_stages
        prefetched = b.q if b.fetched and b.layout.overlap and more else 0
        own = taken + (b.lse if b.fetched else 0)
        live = returned + own + later + prefetched + b.held[i] + b.sums(b.slots.stages[i].summed) + b.attended_back(i)
        yield MemoryPoint(attend, stream, live, left(min(following, b.num_stages), i), "attend backward")
        returned += b.q + ending
        if more:
            twice = b.q + ending if b.layout.overlap and b.exchanged else 0
            held = b.left[i] + b.sums(b.slots.stages[i].left_summed)
            yield from sending(following, returned + twice + later + held, i + 1)
    yield MemoryPoint(project, stream, returned, left(b.num_stages, b.num_stages), "project backward")


def layer_moments(b: LayerBytes) -> Iterator[MemoryPoint]:
    """Every moment of a layer's forward and backward on one rank."""
    outputs, more = b.outputs, b.middle + b.gates
    yield from attend_moments(b, "forward", b.x)
    yield MemoryPoint(
        "forward mlp", 2 * b.x, 0, outputs + b.heads + more, "mlp"
    )  # y, from x and the outputs of all stages
    if b.kept:
        outputs = 0
    else:
        yield from attend_moments(b, "backward again", b.x + b.held_input)
    yield MemoryPoint("backward mlp", b.x + b.held_input, 0, outputs, "mlp backward")  # dy, one tile of everything else
    yield from attention_backward_moments(b, outputs - more)


def layer_peaks(b: LayerBytes) -> tuple[MemoryPoint, MemoryPoint]:
    """The moments of forward and of backward at which most is live."""
    moments = sorted(layer_moments(b), key=lambda moment: moment.rest)
    highest = {(m.phase, m.tile): m for m in moments}.values()  # of each kind the last
    found = [m._replace(tiles=b.tile_bytes(m.tile), sums=b.grad_sums(m.phase)) for m in highest]
    forward, backward = (
        max((m for m in found if m.phase.startswith(direction)), key=lambda moment: (moment.live, -moment.tiles))
        for direction in ("forward", "backward")
    )
    return forward, backward


def kept_attention_bytes(shape: ModelShape, layout: Layout, s: int) -> int:
    """out and lse of one layer on one rank, all stages, empty slots included."""
    return LayerBytes(shape, layout, s).outputs


# ---- the ledger of a step


@dataclass(frozen=True)
class Ledger:
    """Who holds how much when the most is needed. gpu: per GPU. host, disk: per node."""

    phase: str
    gpu: Holders
    host: Holders
    disk: Holders
    gpu_peak: int  # sums of the above, reserves included
    host_peak: int
    disk_peak: int
    gpu_bytes: int  # what there is
    host_bytes: int
    disk_bytes: int

    @property
    def tiers(self) -> dict[str, tuple[int, int]]:
        """What each needs, and what there is."""
        return {
            "GPU": (self.gpu_peak, self.gpu_bytes),
            "host": (self.host_peak, self.host_bytes),
            "disk": (self.disk_peak, self.disk_bytes),
        }

    @property
    def host_needed(self) -> int:
        """Without the copy to save, which is made only where there is room."""
        return self.host_peak - self.host[CHECKPOINT_COPY]

    @property
    def worst(self) -> tuple[float, str]:
        """Of the tier that is exceeded most: need divided by what there is, and its name."""
        return max((need / max(have, 1), tier) for tier, (need, have) in self.tiers.items())

    @property
    def fits(self) -> bool:
        return all(need <= have for need, have in self.tiers.values())


def build_ledger(shape: ModelShape, layout: Layout, hardware: Hardware, work: Work) -> Ledger:
    """The ledger of a step, at its highest phase."""
    name, gpu = max(gpu_phases(shape, layout, hardware, work), key=lambda phase: sum(phase[1].values()))
    gpu["reserve"] = RESERVE_BYTES + int(RESERVE_SHARE * hardware.gpu.memory_bytes)
    host, disk = _outside(shape, layout, hardware, work)
    copied = saved_bytes(shape, layout, hardware) if work.trains else 0
    host[CHECKPOINT_COPY] = (
        copied if sum(host.values()) + copied <= hardware.host_bytes else 0
    )  # without room, a step waits
    peaks = (sum(gpu.values()), sum(host.values()), sum(disk.values()))
    return Ledger(name, gpu, host, disk, *peaks, hardware.gpu.memory_bytes, hardware.host_bytes, hardware.disk_bytes)


def logits_tile_tokens(tile_tokens: int | None, s: int, row_bytes: int) -> int:
    """Of a tile of the loss; `row_bytes`: of a token's logits. Every tile reads and writes the head's gradient, so that
    large ones are faster: they grow with those of the layers, which a plan chooses by the room there is."""
    least, most = (num_bytes // row_bytes for num_bytes in LOGITS_TILE_BYTES)
    tokens = min(max(min(tile_tokens or s, s) // LOGITS_PER_TILE, least), most)
    return min(s, tokens // WHOLE_ROWS * WHOLE_ROWS or max(tokens, 1))


def saved_bytes(shape: ModelShape, layout: Layout, hardware: Hardware) -> int:
    """Of a copy of what a node's ranks save, in the background: weights and two moments, in float32."""
    return hardware.gpus_per_node * 12 * shape.shards(hardware.num_gpus // layout.replicas)[0]


def gpu_phases(shape: ModelShape, layout: Layout, hardware: Hardware, work: Work) -> list[tuple[str, Holders]]:
    """(phase, holder -> bytes) on one GPU, reserve left out: the phases that can be the highest.

    Weights are gathered narrow, gradients are sent wide. What is frozen has no gradient. A forward alone keeps nothing.
    """
    s, e, wide = work.local_tokens(layout.cp), layout.element_bytes, layout.sum_bytes
    x, alone, above = s * shape.hidden * e, hardware.num_gpus == 1, shape.num_layers - 1
    shards, frozen = (0, 0) if layout.offload_optimizer else shape.shards(hardware.num_gpus // layout.replicas)
    head, layer = shape.vocab * shape.hidden, shape.layer_parameters + sum(shape.most_adapted.values())
    trained, trained_head, embedded = shape.trained_layer, shape.trained_head, shape.saved("embed_tokens")
    # Tied, the embedding belongs to FSDP2's root: whole all the time, and its first gradient waits for its second.
    root, lm_head = (head * e, 0) if shape.tied else (0, trained_head)
    root_grad = embedded * e if shape.tied else 0
    ahead = 0 if alone else layer * e  # the next layer's weights, gathered early; one GPU gathers nothing
    loss_tokens = logits_tile_tokens(layout.tile_tokens, s, shape.vocab * e)
    logits, normed = loss_tokens * shape.vocab * e, loss_tokens * shape.hidden * e

    # What decides a layer's bytes beside what it keeps: a key for the cache.
    bare = replace(layout, kept=(), offload_optimizer=False)
    groups = layout.policy_groups(shape.num_layers, shape.first_trained)
    layers = [_of_layer(shape, bare, s, keeps) for keeps, _ in groups]
    # From forward to backward, by all layers up to the last of each group.
    kept = list(accumulate(own * count for (own, *_), (_, count) in zip(layers, groups, strict=True)))
    # In forward a layer's own is still among its moment's.
    before = [(upto - own, moment) for upto, (own, moment, _) in zip(kept, layers, strict=True)]
    kept_before, forward = max(before, key=lambda each: each[0] + each[1].live)

    resident = work.trains or work.between_steps  # master weights and two moments, in float32

    def held(moment: MemoryPoint, weights: int, arrived: int = 0, waiting: int = 0, kept: int = 0) -> Holders:
        """`arrived`: parameters whose gradients are sharded already. `waiting`: bytes of gradients that are not."""
        return {
            "parameters": (4 if resident else e) * shards + e * frozen,
            "gradients": 4 * shards * min(arrived, shape.num_trained) // shape.num_trained + waiting + moment.sums,
            "optimizer": 8 * shards * resident,
            "layer weights": weights,
            "residual stream": moment.stream,
            "stage buffers": moment.stages + moment.outputs,
            "tiles": moment.tiles,
            "kept activations": kept,
        }

    if not work.trains:
        # FSDP2 holds what was gathered last twice: as it came, and as parameters.
        loss = held(MemoryPoint("loss", x), root + ahead if shape.tied else head * e * (1 if alone else 2))
        loss["loss tile"] = logits + normed
        return [("forward", held(forward, root + layer * e + ahead)), ("loss", loss)]
    loss = held(MemoryPoint("loss", 2 * x), head * e + ahead, kept=kept[-1])
    loss["loss tile"] = trained_head * wide + max(logits + 2 * normed, trained_head * e)  # normed: and their gradient
    # The last layer's while lm_head's gradient is still being sent, others' while those of the layer above are. Of each
    # group the last layer, when most is kept.
    below = ahead if above else 0 if alone or shape.tied else head * e
    backward, done = [], 0
    for upto, (_, _, moment), (_, count) in zip(reversed(kept), reversed(layers), reversed(groups), strict=True):
        waiting = root_grad + trained * wide if done else root_grad or trained_head * wide
        phase = f"backward, layer {above - done}" if done else "backward, last layer"
        backward.append((phase, held(moment, root + layer * e + below, lm_head + done * trained, waiting, upto)))
        done += count
    weights, (own, _, moment) = layer * e + (0 if alone and not shape.tied else head * e), layers[0]
    first = held(moment, weights, lm_head + above * trained, trained * wide * (above > 0) + root_grad, own)
    # The embedding's dense gradient and its kernel's buffer, while the first layer's gradients are being sent; a tied
    # weight's two gradients and their sum; then the gradient, its wide copy to send and the shard that comes back.
    buffer = (s // EMBEDDING_RUN + min(s, shape.vocab)) * shape.hidden * wide if embedded else 0
    made = (head * e, embedded * e + trained * wide + root_grad + max(buffer, root_grad))
    arrived = 0 if alone else embedded * wide * layout.replicas // hardware.num_gpus
    sent = (root, embedded * e + embedded * wide + arrived)
    weights, waiting = max(made, sent, key=sum)
    embedding = held(MemoryPoint("embedding", x), weights, lm_head + (above + 1) * trained, waiting)
    return [
        ("forward", held(forward, root + layer * e + ahead, kept=kept_before)),
        ("loss", loss),
        *backward,
        ("backward, first layer", first),
        ("backward, embedding", embedding),
        ("update", held(MemoryPoint("update"), root, shape.num_trained)),
    ]


@lru_cache(maxsize=8192)
def _of_layer(
    shape: ModelShape, layout: Layout, s: int, keeps: ActivationPolicy
) -> tuple[int, MemoryPoint, MemoryPoint]:
    """(what it keeps on the device, its highest moment of forward and of backward)."""
    b = LayerBytes(shape, layout, s, keeps)
    return b.own, *layer_peaks(b)


def _outside(shape: ModelShape, layout: Layout, hardware: Hardware, work: Work) -> tuple[Holders, Holders]:
    """Holders in a node's host memory and on its disk."""
    s, ranks = work.local_tokens(layout.cp), hardware.gpus_per_node
    inputs, outputs = {"device": 0, "host": 0, "disk": 0}, {None: 0, "device": 0, "host": 0, "disk": 0}
    for keeps, count in layout.policy_groups(shape.num_layers, shape.first_trained):
        inputs[keeps.input] += count
        outputs[keeps.attention] += count
    x, leaves = ranks * layout.x_bytes(shape.hidden, s), outputs["host"] or outputs["disk"]
    out = ranks * kept_attention_bytes(shape, layout, s) if leaves else 0
    trained, frozen = shape.shards(hardware.num_gpus // layout.replicas)
    states = ranks * (16 * trained + layout.element_bytes * frozen)
    station = min(DISK_STATION_LAYERS, inputs["disk"]) * x + min(DISK_STATION_LAYERS, outputs["disk"]) * out
    host = {
        "layer inputs": inputs["host"] * x,
        "kept attention": outputs["host"] * out,
        "on the way to disk": station,
        "parameters, gradients, optimizer": states * layout.offload_optimizer,
        "reserve": ranks * HOST_PROCESS_BYTES + int(HOST_RESERVE_SHARE * hardware.host_bytes),
    }
    return host, {"layer inputs": inputs["disk"] * x, "kept attention": outputs["disk"] * out}
