"""Bytes of one decoder layer, point by point along layer/schedule.py. Tests compare them with the bytes live there.

S tokens of the packed sequence, s = S / cp of them on this rank, t per tile, D hidden size, H and G query and kv
heads, K head dim, F MLP size, n and m query and kv slots per rank and stage.
X = s * D * element bytes, T = S * n * K * element bytes (a stage tensor), U the same for m kv slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from ithaka.layout import ActivationPolicy, Layout
from ithaka.plan.shape import ModelShape
from ithaka.sharding.heads import count_slots
from ithaka.sharding.tokens import ring_round_tokens

# Rows of a query block in attention/blocks.py, forward and backward, at head dim 128; other head dims: as many bytes.
BLOCK_TOKENS = {"attend": 128 * 1024, "attend backward": 264 * 1024}
# Rows per kernel call, over all its heads, where the kernel writes to our buffers and documents or windows are at most
# WHOLE_TOKENS long. A call of fa4 costs about 0.5 ms of host time, enough for a GPU to attend to 200 documents of 2K
# tokens, and full documents up to 128K run 1 to 4 % faster than blocks of them. At 256K there is no difference.
CALL_TOKENS, WHOLE_TOKENS = 512 * 1024, 256 * 1024
BLOCK_BUFFERS = 4  # buffers of a block inside attention, in the sum dtype


class MemoryPoint(NamedTuple):
    """Bytes live at one point of a layer's schedule, without weights, other layers' gradients and kept activations.

    stream: full-length tensors of the residual stream. heads: tensors of heads, with exchange buffers and what else the
    layer will keep; in backward, less the kept bytes already freed. tile_bytes: temporaries of `tile_work`, constant in
    s. grad_bytes: the layer's weight gradients so far.
    """

    phase: str
    stream: int = 0
    heads: int = 0
    tile_work: str = "none"
    tile_bytes: int = 0
    grad_bytes: int = 0

    @property
    def full_length(self) -> int:
        """Bytes that grow with s."""
        return self.stream + self.heads

    @property
    def live(self) -> int:
        return self.full_length + self.tile_bytes + self.grad_bytes


class LayerBytes:
    """Sizes of a layer's tensors on one rank, for softmax attention. Other mixers override what differs."""

    has_stages = True  # outputs of several stages are joined for the resume pass

    def __init__(self, shape: ModelShape, layout: Layout, s: int, policy: ActivationPolicy | None = None) -> None:
        policy = policy or ActivationPolicy()
        self.shape, self.layout, self.s = shape, layout, s
        self.slots = count_slots(shape.heads, shape.kv_heads, layout.ulysses, layout.heads_per_stage)
        self.num_stages, self.query_slots = len(self.slots), self.slots[0].query
        projected_slots = self.num_stages * self.query_slots + 2 * sum(stage.new_kv for stage in self.slots)
        self.qkv_width = projected_slots * layout.ulysses * shape.head_dim  # with empty and repeated slots
        self.x = layout.x_bytes(shape.hidden, s)
        self.slot = layout.ulysses * s * shape.head_dim * layout.element_bytes  # one head of the group's tokens
        self.q = self.query_slots * self.slot  # T
        self.lse = layout.ulysses * s * self.query_slots * layout.sum_bytes
        # k and v by stage: arriving with it (2 U), held while it attends, still needed after it.
        self.new_kv = [2 * stage.new_kv * self.slot for stage in self.slots]
        self.held_kv = [2 * stage.held_kv * self.slot for stage in self.slots]
        self.left_kv = [2 * stage.left_kv * self.slot for stage in self.slots]
        self.keeps_attention = policy.attention is not None
        self.fetches_attention = policy.attention in ("host", "disk")
        # What a layer can keep in addition to its input: out and lse of all stages (with empty slots), q, k and v, and
        # the graphs of resume passes: gate and up, x + attention, its norm, y, and attention's output if it was copied.
        self.outputs = self.num_stages * (self.q + self.lse)
        self.out_width = self.num_stages * self.query_slots * layout.ulysses * shape.head_dim  # of out, per token
        # The input and the outputs in host memory or on disk.
        self.stored_x = layout.stored_input_bytes(policy, s, shape.hidden)
        stored_q = layout.stored_output_bytes(layout.ulysses * s, self.query_slots * shape.head_dim)
        self.stored_outputs = self.num_stages * (stored_q + self.lse)
        self.qkv = (self.num_stages * self.q + sum(self.new_kv)) * policy.projections
        is_joined = self.has_stages and (self.num_stages > 1 or layout.ulysses > 1)
        self.joined = shape.heads * shape.head_dim * is_joined
        resumed = self._graph_bytes(shape.measured.kept_graph) + self.joined * layout.element_bytes
        self.gate_up = s * resumed * policy.mlp
        # Layers that do not project heads by stage hold q, k and v of all heads until the last stage is sent, and in
        # backward the gradients of all heads and, with overlap, the graphs of capture passes.
        layer, head = shape.measured, s * shape.head_dim * layout.element_bytes
        self.douts = 0 if layer.slices_output else shape.heads * head
        self.projected = 0 if layer.slices_heads else (shape.heads + 2 * shape.kv_heads) * head
        keeps_graphs = layout.overlap and not policy.projections and not layer.slices_heads
        self.graphs = s * self._graph_bytes(layer.project_graph) * keeps_graphs
        is_stored = policy.input != "device"
        # With overlap, a stored input is fetched once and stays for all of backward; without, two tiles are fetched.
        self.fetched_input = self.x if layout.overlap and is_stored else 0
        self.fetches_tiles = is_stored and not layout.overlap
        self.stages_ahead = 2 if layout.overlap else 1
        # dq of all stages but the last waits on the host (`stores_dq` in layer/schedule.py).
        self.stores_dq = layer.slices_heads and not layout.overlap and self.fetches_attention
        # One layer's dq in host memory; it replaces the layer's outputs there, unless they were rounded.
        stores_more = layer.slices_heads and not layout.overlap and layout.stored_dtype is not None
        self.stored_dq = (self.num_stages - 1) * self.q * stores_more
        self.has_exchange = layout.ulysses > 1  # an exchange receives into a separate buffer
        self.policy = policy

    @property
    def kept(self) -> int:
        """Bytes that the layer keeps on the device."""
        keeps_input = self.policy.input == "device" or self.policy.mlp  # graphs of resume passes read it
        stored = self.x * keeps_input + self.outputs * (self.policy.attention == "device")
        return stored + self.qkv + self.gate_up

    def _graph_bytes(self, measured: int) -> int:
        """Bytes per token that a capture or resume pass saves for backward, in the layout's dtype."""
        per_token = measured * self.layout.element_bytes / 2
        if self.shape.adapter and self.shape.adapter.dropout:  # each adapter saves its own input
            widths = (self.shape.linears[name][0] for name in self.shape.most_adapted if name in self.shape.linears)
            per_token += sum(widths) * self.layout.element_bytes
        return int(per_token)

    def unsent(self, num_sent: int, held: int) -> int:
        """Bytes of all heads, kept until the last stage is sent. With one stage on one rank, the stage aliases them."""
        is_alias = self.num_stages == 1 and not self.has_exchange
        return 0 if num_sent >= self.num_stages or is_alias else held

    def in_flight(self, stage_bytes: int, first: int, last: int) -> int:
        """Tensors of stages [first, last) that are sent but not used yet: `stage_bytes` and the new k and v of each.
        With overlap, send buffers stay until the received tensors are used."""
        copies = 2 if self.layout.overlap and self.has_exchange else 1
        return copies * sum(stage_bytes + kv for kv in self.new_kv[first:last])

    def send_peak(self, stage_bytes: int, stage: int) -> int:
        """Peak while a stage is sent. Without overlap its tensors go one at a time, so only one exists twice."""
        if self.layout.overlap or not self.has_exchange:
            return self.in_flight(stage_bytes, stage, stage + 1)
        return stage_bytes + self.new_kv[stage] + max(self.q, self.new_kv[stage] // 2)

    def in_sum_dtype(self, num_bytes: int) -> int:
        return num_bytes // self.layout.element_bytes * self.layout.sum_bytes

    def kv_grad_sums(self, num_slots: int) -> int:
        """dk and dv of `num_slots` kv slots."""
        return 2 * num_slots * self.in_sum_dtype(self.slot)

    def attend_bytes(self, stage: int) -> int:
        """Outputs while a stage attends, and the buffer of a read that is only a part of them. In a ring an output is
        summed over the rounds, and one round's k and v are used while the next are sent and received."""
        slots, out = self.slots[stage], self.q + self.lse
        if self.layout.ring == 1:
            return out + out * slots.partial_query // self.query_slots

        def ring_sum(width: int) -> int:
            rounded = 0 if self.layout.sum_bytes == self.layout.element_bytes else width * self.slot
            sums = width * (self.in_sum_dtype(self.slot) + self.lse // self.query_slots)
            return sums + max(3 * self.ring_round(stage), rounded)

        partial = out + ring_sum(slots.partial_query) if slots.partial_query else 0
        return max(ring_sum(slots.widest_read), partial)

    def ring_backward_bytes(self, stage: int) -> int:
        """Buffers of a ring in attention's backward: dq summed over rounds, k and v as in forward, and dk and dv of
        one round, which are summed while the previous round's are sent and received."""
        if self.layout.ring == 1:
            return 0
        rounds = 3 * self.ring_round(stage)
        return self.slots[stage].widest_read * self.in_sum_dtype(self.slot) + rounds + self.in_sum_dtype(rounds)

    @property
    def ring_kv(self) -> int:
        """k and v of a layer that a ring member sends to each of the others. A stage sends what it reads."""
        return 2 * sum(stage.read_kv for stage in self.slots) * self.slot

    def ring_round(self, stage: int) -> int:
        """k and v of one read that a ring member receives in a round."""
        member_tokens = self.layout.ulysses * self.s
        tokens = min(ring_round_tokens(member_tokens), (self.layout.ring - 1) * member_tokens)
        kv_slots = self.slots[stage].widest_read_kv
        return 2 * kv_slots * tokens * self.shape.head_dim * self.layout.element_bytes

    @cached_property
    def highest(self) -> list[MemoryPoint]:
        """The highest point of each phase and tile work, without the bytes of tiles."""
        ascending = sorted(layer_points(self), key=lambda point: point.full_length)
        return [*{(point.phase, point.tile_work): point for point in ascending}.values()]

    def mix_points(self, phase: str, stream: int) -> Iterator[MemoryPoint]:
        """The mixer in forward, and in backward where its output is recomputed."""
        return attention_points(self, phase, stream)

    def mix_backward_points(self, outputs: int) -> Iterator[MemoryPoint]:
        return attention_backward_points(self, outputs)

    def weight_grads(self, phase: str) -> int:
        """Weight gradients, summed over tiles (GradSum in blocks/tiles.py)."""
        if not phase.startswith("backward") or phase.startswith("backward again"):
            return 0
        is_mlp = phase == "backward mlp" and not self.shape.adapter
        return (self.shape.mlp_parameters if is_mlp else self.shape.trained_layer) * self.layout.sum_bytes

    def tile_bytes(self, work: str) -> int:
        """Temporaries of token-wise work on a tile, or of attention on a block."""
        if work == "none":
            return 0
        if work in BLOCK_TOKENS:
            return self._block_bytes(work)
        shape, layer, e = self.shape, self.shape.measured, self.layout.element_bytes
        rank = shape.adapter.rank if shape.adapter else 0  # width between an adapter's two matrices
        stored_dq = (self.num_stages - 1) * self.query_slots * self.layout.ulysses * shape.head_dim * self.stores_dq
        saved, total, width = {
            "project": (0, layer.project_bytes, rank),
            "mlp": (0, layer.finish_bytes, self.joined + rank),
            "project backward": (layer.project_graph, layer.project_backward_bytes, 2 * stored_dq + 7 * rank),
            "mlp backward": (layer.finish_graph, layer.finish_backward_bytes, self.joined + 2 * rank),
        }[work]
        per_token = int((total - saved) * e / 2)
        is_kept = self.gate_up if work == "mlp backward" else self.graphs  # and counted for all tokens
        if saved and not is_kept:
            per_token += self._graph_bytes(saved)
        tile = min(self.layout.tile_tokens or self.s, self.s)
        is_fetched = work == "mlp backward" and self.fetches_attention
        fetched = self.fetches_tiles * shape.hidden + is_fetched * self.out_width
        return tile * (per_token + width * e) + min(2 * tile, self.s) * fetched * e  # with the next tile

    def _block_bytes(self, work: str) -> int:
        """Buffers of one attention kernel call."""
        e, sum_bytes, tokens = self.layout.element_bytes, self.layout.sum_bytes, self.layout.ulysses * self.s
        reads = [(stage.widest_read, stage.widest_read_kv) for stage in self.slots]
        max_rows = CALL_TOKENS if tokens <= WHOLE_TOKENS else BLOCK_TOKENS[work]
        heads = max(_heads_per_call(max_rows // tokens, *read) for read in reads)
        elements = tokens * self.shape.head_dim
        if heads == 1:
            return BLOCK_BUFFERS * min(BLOCK_TOKENS[work] * 128, elements) * sum_bytes
        # Full sequences in one call. Backward sums dq, dk and dv; forward writes to our buffers, or attends to one
        # head of each group.
        backward = 2 * heads * elements * sum_bytes
        return backward if work == "attend backward" else max(kv for _, kv in reads) * elements * e


def _heads_per_call(max_heads: int, queries: int, kv: int) -> int:
    """Query heads per kernel call: entire groups, or one head of each (`_AttentionCall` in attention/blocks.py)."""
    group = queries // kv
    return min(queries, max_heads // group * group) if max_heads >= group else min(max(1, max_heads), kv)


def attention_points(b: LayerBytes, phase: str, stream: int) -> Iterator[MemoryPoint]:
    """Attention of all stages (`_attend`): in forward, and in backward where its output is recomputed. Outputs of all
    stages stay until the output projection after the last one."""
    project, attend = f"{phase} projections", f"{phase} attention"
    done, held_kv, left_kv = b.q + b.lse, b.held_kv, b.left_kv  # bytes that a stage leaves
    if b.qkv:
        done, held_kv = done + b.q, [*accumulate(b.new_kv)]
        left_kv = held_kv

    def send(stage: int, live: int) -> Iterator[MemoryPoint]:
        projected = live + b.q + b.new_kv[stage] + b.unsent(stage, b.projected)
        yield MemoryPoint(project, stream, projected, "project")
        yield MemoryPoint(project, stream, live + b.send_peak(b.q, stage) + b.unsent(stage + 1, b.projected))

    for i in range(min(b.stages_ahead, b.num_stages)):
        yield from send(i, b.in_flight(b.q, 0, i))
    for i in range(b.num_stages):
        following = i + b.stages_ahead
        later = b.in_flight(b.q, i + 1, following)
        live = b.q + later + held_kv[i] + b.unsent(following, b.projected) + i * done
        yield MemoryPoint(attend, stream, live + b.attend_bytes(i), "attend")
        if b.qkv and b.has_exchange:  # q stays while the output is sent
            yield MemoryPoint(attend, stream, live + 2 * b.q + b.lse)
        if following < b.num_stages:
            yield from send(following, later + left_kv[i] + (i + 1) * done)


def attention_backward_points(b: LayerBytes, outputs: int) -> Iterator[MemoryPoint]:
    """Attention's backward. dy and the gradients of all heads so far are live throughout. A fetched output arrives one
    stage at a time. A resident one is freed once it is sent, its lse once it is used, and so are kept q, k and v, which
    are not projected again."""
    stream, attend, project = b.x + b.fetched_input, "backward attention", "backward projections"
    stage_tensors = 3 * b.q  # q, out, dout
    last_used_kv = [held - left for held, left in zip(b.held_kv, b.left_kv, strict=True)]  # by no later stage
    if b.qkv:
        b, stage_tensors = copy(b), 2 * b.q
        b.new_kv = b.held_kv = b.left_kv = [0] * b.num_stages
        b.projected = 0

    def held(num_sent: int) -> int:
        return b.unsent(num_sent, b.projected + b.douts) + b.graphs

    def outputs_left(num_sent: int, num_attended: int) -> int:
        used = num_attended * b.q + sum(last_used_kv[:num_attended]) if b.qkv else 0
        return outputs - used - (0 if b.fetches_attention else num_sent * b.q + num_attended * b.lse)

    def send(stage: int, live: int, num_attended: int) -> Iterator[MemoryPoint]:
        """Project q, k and v, then send them with out and dout."""
        if not b.qkv:
            prefetched = b.q if b.fetches_attention and b.layout.overlap and stage >= b.stages_ahead else 0
            projected = live + b.q + b.new_kv[stage] + prefetched + held(stage)
            yield MemoryPoint(project, stream, projected + outputs_left(stage, num_attended), "project")
        # Without overlap, out stays until all is sent.
        out = 0 if b.layout.overlap or not b.has_exchange or b.fetches_attention else b.q
        sent = live + out + b.send_peak(stage_tensors, stage) + held(stage + 1)
        yield MemoryPoint(project, stream, sent + outputs_left(stage + 1, num_attended))

    for i in range(min(b.stages_ahead, b.num_stages)):
        yield from send(i, b.in_flight(stage_tensors, 0, i), 0)
    head_grads = 0  # dq, dk and dv of earlier stages
    for i in range(b.num_stages):
        following = i + b.stages_ahead
        later, is_more = b.in_flight(stage_tensors, i + 1, following), following < b.num_stages
        prefetched = b.q if b.fetches_attention and b.layout.overlap and is_more else 0
        stage_bytes = stage_tensors + (b.lse if b.fetches_attention else 0)
        live = head_grads + stage_bytes + later + prefetched + b.held_kv[i]
        live += b.kv_grad_sums(b.slots[i].summed_kv) + b.ring_backward_bytes(i) + held(following)
        yield MemoryPoint(attend, stream, live + outputs_left(min(following, b.num_stages), i), "attend backward")
        head_grads += last_used_kv[i] + (0 if b.stores_dq and i + 1 < b.num_stages else b.q)
        if is_more:
            send_buffers = b.q + last_used_kv[i] if b.layout.overlap and b.has_exchange else 0
            left = b.left_kv[i] + b.kv_grad_sums(b.slots[i].left_summed_kv)
            yield from send(following, head_grads + send_buffers + later + left, i + 1)
    last = head_grads + outputs_left(b.num_stages, b.num_stages) + b.graphs
    yield MemoryPoint(project, stream, last, "project backward")


def layer_points(b: LayerBytes) -> Iterator[MemoryPoint]:
    """Every point of a layer's forward and backward on one rank."""
    outputs, kept_later = b.outputs, b.gate_up
    yield from b.mix_points("forward", b.x + b.x * b.policy.allocates_output_first)
    # x and y, and the outputs of all stages
    yield MemoryPoint("forward mlp", 2 * b.x, outputs + b.qkv + kept_later, "mlp")
    if b.keeps_attention:
        outputs = 0
    else:
        yield from b.mix_points("backward again", b.x + b.fetched_input)
    # dy; everything else is one tile
    yield MemoryPoint("backward mlp", b.x + b.fetched_input, outputs + b.douts, "mlp backward")
    yield from b.mix_backward_points(outputs - kept_later)


def layer_sizes(shape: ModelShape, layout: Layout, s: int, make_sizes: Any = LayerBytes) -> LayerBytes:
    """Return the sizes of a layer's tensors, except those of tiles and of kept activations. `make_sizes`: `sizes` of
    its mixer."""
    return _layer_sizes(make_sizes, shape, s, ActivationPolicy(), _fields(layout))


def sizes_by_layer(shape: ModelShape, layout: Layout, s: int) -> list[LayerBytes]:
    """Return the sizes of each layer's tensors, with what it keeps."""
    policies, fields = layout.layer_policies(shape.num_layers), _fields(layout)
    layers = zip(shape.size_indices, policies, strict=True)
    return [_layer_sizes(*shape.kinds_of_sizes[index], s, policy, fields) for index, policy in layers]


def layer_peaks(
    shape: ModelShape, layout: Layout, s: int, policy: ActivationPolicy
) -> tuple[list[int], MemoryPoint, MemoryPoint]:
    """Return the bytes that a layer keeps on the device, for each of `kinds_of_sizes`, and the peak points of forward
    and of backward, for the kind of layer that needs the most."""
    if "disk" in (policy.input, policy.attention):  # the same on the device
        tiers: Any = ["host" if tier == "disk" else tier for tier in (policy.input, policy.attention)]
        policy = replace(policy, input=tiers[0], attention=tiers[1])
    return _layer_peaks(shape, s, policy, layout.tile_tokens, _fields(layout))


def _fields(layout: Layout) -> tuple[Any, ...]:
    """The fields of a layout that change sizes, by which they are cached."""
    sizes = layout.cp, layout.ring, layout.heads_per_stage
    return *sizes, layout.overlap, layout.dtype, layout.stored_dtype


@lru_cache(maxsize=8192)
def _layer_sizes(
    make_sizes: Any, shape: ModelShape, s: int, policy: ActivationPolicy, fields: tuple[Any, ...]
) -> LayerBytes:
    cp, ring, heads_per_stage, overlap, dtype, stored = fields
    dtypes: Any = {"dtype": dtype, "stored_dtype": stored}
    layout = Layout(cp, heads_per_stage, ring=ring, overlap=overlap, **dtypes)
    return make_sizes(shape, layout, s, policy)


@lru_cache(maxsize=8192)
def _layer_peaks(
    shape: ModelShape, s: int, policy: ActivationPolicy, tile_tokens: int | None, fields: tuple[Any, ...]
) -> tuple[list[int], MemoryPoint, MemoryPoint]:
    points, kept = [], []
    for make_sizes, kind_shape in shape.kinds_of_sizes:
        sizes = _layer_sizes(make_sizes, kind_shape, s, policy, fields)
        kept.append(sizes.kept)
        highest, b = sizes.highest, copy(sizes)
        b.layout = replace(b.layout, tile_tokens=tile_tokens)
        tiles = {work: b.tile_bytes(work) for work in {p.tile_work for p in highest}}
        points += [p._replace(tile_bytes=tiles[p.tile_work], grad_bytes=b.weight_grads(p.phase)) for p in highest]
    forward, backward = (
        max((p for p in points if p.phase.startswith(direction)), key=lambda point: (point.live, -point.tile_bytes))
        for direction in ("forward", "backward")
    )
    return kept, forward, backward
