"""Bytes of one decoder layer, point by point along layer/schedule.py. Tests compare them with the
bytes live there.

S tokens of the packed sequence, s = S / cp of them on this rank, t per tile, D hidden size, H and G
query and kv heads, K head dim, F MLP size, n and m query and kv slots per rank and stage. X = s * D
* element bytes, T = S * n * K * element bytes (a stage tensor), U the same for m kv slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from ithaka.facts.heads import count_slots
from ithaka.facts.sizes import BLOCK_TOKENS, CALL_TOKENS, WHOLE_TOKENS, ring_round_tokens
from ithaka.layout import ActivationPolicy, Layout
from ithaka.plan.shape import ModelShape

BLOCK_BUFFERS = 4  # buffers of a block inside attention, in the sum dtype


class MemoryPoint(NamedTuple):
    """Bytes live at one point of a layer's schedule, without weights, other layers' gradients and
    kept activations.

    stream: full-length tensors of the residual stream. heads: tensors of heads, with exchange
    buffers and what else the layer will keep; in backward, less the kept bytes already freed.
    tile_bytes: temporaries of `tile_work`, constant in s. grad_bytes: the layer's weight gradients
    so far.
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
    """Sizes of a layer's tensors on one rank, for softmax attention. Other mixers override some."""

    has_stages = True  # outputs of several stages are joined for the resume pass

    def __init__(
        self, shape: ModelShape, layout: Layout, s: int, policy: ActivationPolicy | None = None
    ) -> None:
        self.shape = shape
        self.layout = layout
        self.s = s
        self.policy = policy or ActivationPolicy()
        self.x = layout.x_bytes(shape.hidden, s)
        self.has_exchange = layout.ulysses > 1  # an exchange receives into a separate buffer
        self.stages_ahead = 2 if layout.overlap else 1
        self._size_stages()
        self._size_kept()
        self._size_held_heads()
        self._size_transfers()

    def _size_stages(self) -> None:
        """Tensors of a stage."""
        shape = self.shape
        ulysses = self.layout.ulysses
        self.slots = count_slots(shape.heads, shape.kv_heads, ulysses, self.layout.heads_per_stage)
        self.num_stages = len(self.slots)
        self.query_slots = self.slots[0].query
        new_kv_slots = sum(stage.new_kv for stage in self.slots)
        projected_slots = self.num_stages * self.query_slots + 2 * new_kv_slots
        self.qkv_width = projected_slots * ulysses * shape.head_dim  # with empty and repeated slots
        # One head of the group's tokens.
        self.slot = ulysses * self.s * shape.head_dim * self.layout.element_bytes
        self.q = self.query_slots * self.slot  # T
        self.lse = ulysses * self.s * self.query_slots * self.layout.sum_bytes
        # k and v by stage: arriving with it (2 U), held while it attends, still needed after it.
        self.new_kv = [2 * stage.new_kv * self.slot for stage in self.slots]
        self.held_kv = [2 * stage.held_kv * self.slot for stage in self.slots]
        self.left_kv = [2 * stage.left_kv * self.slot for stage in self.slots]

    def _size_kept(self) -> None:
        """What a layer can keep in addition to its input: out and lse of all stages (with empty
        slots), q, k and v, and the graphs of resume passes: gate and up, x + attention, its norm,
        y, and attention's output if it was copied."""
        shape = self.shape
        layout = self.layout
        policy = self.policy
        self.keeps_attention = policy.attention is not None
        self.fetches_attention = policy.attention in ("host", "disk")
        self.outputs = self.num_stages * (self.q + self.lse)
        # Per token of out.
        self.out_width = self.num_stages * self.query_slots * layout.ulysses * shape.head_dim
        # In host memory or on disk.
        self.stored_x = layout.stored_input_bytes(policy, self.s, shape.hidden)
        tokens = layout.ulysses * self.s
        stored_q = layout.stored_output_bytes(tokens, self.query_slots * shape.head_dim)
        self.stored_outputs = self.num_stages * (stored_q + self.lse)
        self.qkv = (self.num_stages * self.q + sum(self.new_kv)) * policy.projections
        is_joined = self.has_stages and (self.num_stages > 1 or self.has_exchange)
        self.joined = shape.heads * shape.head_dim * is_joined
        resumed = self._graph_bytes(shape.measured.kept_graph) + self.joined * layout.element_bytes
        self.gate_up = self.s * resumed * policy.mlp

    def _size_held_heads(self) -> None:
        """Layers that do not project heads by stage hold q, k and v of all heads until the last
        stage is sent, and in backward the gradients of all heads and, with overlap, the graphs of
        capture passes."""
        shape = self.shape
        layer = shape.measured
        head = self.s * shape.head_dim * self.layout.element_bytes
        projected_heads = shape.heads + 2 * shape.kv_heads
        self.douts = 0 if layer.slices_output else shape.heads * head
        self.projected = 0 if layer.slices_heads else projected_heads * head
        projects_again = not self.policy.projections and not layer.slices_heads
        keeps_graphs = self.layout.overlap and projects_again
        self.graphs = self.s * self._graph_bytes(layer.project_graph) * keeps_graphs

    def _size_transfers(self) -> None:
        """With overlap, a stored input is fetched once and stays for all of backward; without, two
        tiles are fetched. Without it, dq of all stages but the last waits on the host (`stores_dq`
        in mixers/softmax.py)."""
        overlap = self.layout.overlap
        is_stored = self.policy.input != "device"
        self.fetched_input = self.x if overlap and is_stored else 0
        self.fetches_tiles = is_stored and not overlap
        may_store_dq = self.shape.measured.slices_heads and not overlap
        self.stores_dq = may_store_dq and self.fetches_attention
        # One layer's dq in host memory; it replaces the layer's outputs there, unless they were
        # rounded.
        stores_more = may_store_dq and self.layout.stored_dtype is not None
        self.stored_dq = (self.num_stages - 1) * self.q * stores_more

    @property
    def kept(self) -> int:
        """Bytes that the layer keeps on the device."""
        keeps_input = self.policy.input == "device" or self.policy.mlp  # its graphs read it
        stored = self.x * keeps_input + self.outputs * (self.policy.attention == "device")
        return stored + self.qkv + self.gate_up

    def _graph_bytes(self, measured: int) -> int:
        """Bytes per token that a capture or resume pass saves for backward, in the layout's
        dtype."""
        per_token = measured * self.layout.element_bytes / 2
        if self.shape.adapter and self.shape.adapter.dropout:  # each adapter saves its own input
            widths = (
                self.shape.linears[name][0]
                for name in self.shape.most_adapted
                if name in self.shape.linears
            )
            per_token += sum(widths) * self.layout.element_bytes
        return int(per_token)

    def unsent(self, num_sent: int, held: int) -> int:
        """Bytes of all heads, kept until the last stage is sent, unless the stage aliases them."""
        is_alias = self.num_stages == 1 and not self.has_exchange
        return 0 if num_sent >= self.num_stages or is_alias else held

    def in_flight(self, stage_bytes: int, first: int, last: int) -> int:
        """Tensors of stages [first, last) that are sent but not used yet: `stage_bytes` and the new
        k and v of each. With overlap, send buffers stay until the received tensors are used."""
        copies = 2 if self.layout.overlap and self.has_exchange else 1
        return copies * sum(stage_bytes + kv for kv in self.new_kv[first:last])

    def send_peak(self, stage_bytes: int, stage: int) -> int:
        """Peak while a stage is sent. Without overlap, only one of its tensors exists twice."""
        if self.layout.overlap or not self.has_exchange:
            return self.in_flight(stage_bytes, stage, stage + 1)
        return stage_bytes + self.new_kv[stage] + max(self.q, self.new_kv[stage] // 2)

    def in_sum_dtype(self, num_bytes: int) -> int:
        return num_bytes // self.layout.element_bytes * self.layout.sum_bytes

    def kv_grad_sums(self, num_slots: int) -> int:
        """dk and dv of `num_slots` kv slots."""
        return 2 * num_slots * self.in_sum_dtype(self.slot)

    def attend_bytes(self, stage: int) -> int:
        """Outputs while a stage attends, and the buffer of a read that is only a part of them. In a
        ring they are summed over rounds; the next round's k and v are sent and received."""
        slots = self.slots[stage]
        out = self.q + self.lse
        if self.layout.ring == 1:
            return out + out * slots.partial_query // self.query_slots

        def ring_sum(width: int) -> int:
            rounded = 0 if self.layout.sum_bytes == self.layout.element_bytes else width * self.slot
            sums = width * (self.in_sum_dtype(self.slot) + self.lse // self.query_slots)
            return sums + max(3 * self.ring_round(stage), rounded)

        partial = out + ring_sum(slots.partial_query) if slots.partial_query else 0
        return max(ring_sum(slots.widest_read), partial)

    def ring_backward_bytes(self, stage: int) -> int:
        """Buffers of a ring in attention's backward: dq summed over rounds, k and v as in forward,
        dk and dv of one round, and the previous round's, on their way."""
        if self.layout.ring == 1:
            return 0
        rounds = 3 * self.ring_round(stage)
        dq = self.slots[stage].widest_read * self.in_sum_dtype(self.slot)
        return dq + rounds + self.in_sum_dtype(rounds)

    @property
    def ring_kv(self) -> int:
        """k and v of a layer that a ring member sends to each of the others. A stage sends what it
        reads."""
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
        parameters = self.shape.mlp_parameters if is_mlp else self.shape.trained_layer
        return parameters * self.layout.sum_bytes

    def tile_bytes(self, work: str) -> int:
        """Temporaries of token-wise work on a tile, or of attention on a block."""
        if work == "none":
            return 0
        if work in BLOCK_TOKENS:
            return self._block_bytes(work)
        shape = self.shape
        layer = self.shape.measured
        e = self.layout.element_bytes
        rank = shape.adapter.rank if shape.adapter else 0  # width between an adapter's two matrices
        stored_dq = (self.num_stages - 1) * self.query_slots * self.layout.ulysses * shape.head_dim
        width_before = 2 * stored_dq * self.stores_dq + 7 * rank
        saved, total, width = {
            "project": (0, layer.project_bytes, rank),
            "mlp": (0, layer.finish_bytes, self.joined + rank),
            "project backward": (layer.project_graph, layer.project_backward_bytes, width_before),
            "mlp backward": (
                layer.finish_graph,
                layer.finish_backward_bytes,
                self.joined + 2 * rank,
            ),
        }[work]
        per_token = int((total - saved) * e / 2)
        # A kept graph is counted for all tokens.
        is_kept = self.gate_up if work == "mlp backward" else self.graphs
        if saved and not is_kept:
            per_token += self._graph_bytes(saved)
        tile = min(self.layout.tile_tokens or self.s, self.s)
        is_fetched = work == "mlp backward" and self.fetches_attention
        fetched = self.fetches_tiles * shape.hidden + is_fetched * self.out_width
        both_tiles = min(2 * tile, self.s)  # with the next one
        return tile * (per_token + width * e) + both_tiles * fetched * e

    def _block_bytes(self, work: str) -> int:
        """Buffers of one attention kernel call."""
        e = self.layout.element_bytes
        sum_bytes = self.layout.sum_bytes
        tokens = self.layout.ulysses * self.s
        reads = [(stage.widest_read, stage.widest_read_kv) for stage in self.slots]
        max_rows = CALL_TOKENS if tokens <= WHOLE_TOKENS else BLOCK_TOKENS[work]
        heads = max(_heads_per_call(max_rows // tokens, *read) for read in reads)
        elements = tokens * self.shape.head_dim
        if heads == 1:
            return BLOCK_BUFFERS * min(BLOCK_TOKENS[work] * 128, elements) * sum_bytes
        # Full sequences in one call. Backward sums dq, dk and dv; forward writes to our buffers, or
        # attends to one head of each group.
        if work == "attend backward":
            return 2 * heads * elements * sum_bytes
        return max(kv for _, kv in reads) * elements * e


def _heads_per_call(max_heads: int, queries: int, kv: int) -> int:
    """Query heads per kernel call: entire groups, or one head of each (attention/blocks.py)."""
    group = queries // kv
    if max_heads >= group:
        return min(queries, max_heads // group * group)
    return min(max(1, max_heads), kv)


def attention_points(layer: LayerBytes, phase: str, stream: int) -> Iterator[MemoryPoint]:
    """Attention of all stages (`_attend`), also where backward recomputes its output. Outputs of
    all stages stay until the output projection after the last one."""
    project = f"{phase} projections"
    attend = f"{phase} attention"
    q = layer.q
    done = q + layer.lse  # bytes that a stage leaves
    held_kv = layer.held_kv
    left_kv = layer.left_kv
    if layer.qkv:
        done += q
        held_kv = [*accumulate(layer.new_kv)]
        left_kv = held_kv

    def send(stage: int, live: int) -> Iterator[MemoryPoint]:
        projected = live + q + layer.new_kv[stage] + layer.unsent(stage, layer.projected)
        yield MemoryPoint(project, stream, projected, "project")
        sent = live + layer.send_peak(q, stage) + layer.unsent(stage + 1, layer.projected)
        yield MemoryPoint(project, stream, sent)

    for i in range(min(layer.stages_ahead, layer.num_stages)):
        yield from send(i, layer.in_flight(q, 0, i))
    for i in range(layer.num_stages):
        following = i + layer.stages_ahead
        later = layer.in_flight(q, i + 1, following)
        live = q + later + held_kv[i] + layer.unsent(following, layer.projected) + i * done
        yield MemoryPoint(attend, stream, live + layer.attend_bytes(i), "attend")
        if layer.qkv and layer.has_exchange:  # q stays while the output is sent
            yield MemoryPoint(attend, stream, live + 2 * q + layer.lse)
        if following < layer.num_stages:
            yield from send(following, later + left_kv[i] + (i + 1) * done)


def attention_backward_points(layer: LayerBytes, outputs: int) -> Iterator[MemoryPoint]:
    """Attention's backward. dy and the gradients of all heads so far are live throughout. A fetched
    output arrives one stage at a time. A resident one is freed once it is sent, its lse once it is
    used, and so are kept q, k and v, which are not projected again."""
    stream = layer.x + layer.fetched_input
    attend = "backward attention"
    project = "backward projections"
    q = layer.q
    stage_tensors = 3 * q  # q, out, dout
    kv = zip(layer.held_kv, layer.left_kv, strict=True)
    last_used_kv = [held - left for held, left in kv]  # by no later stage
    if layer.qkv:
        stage_tensors = 2 * q
        layer = copy(layer)
        layer.new_kv = layer.held_kv = layer.left_kv = [0] * layer.num_stages
        layer.projected = 0
    prefetches = layer.fetches_attention and layer.layout.overlap

    def held(num_sent: int) -> int:
        return layer.unsent(num_sent, layer.projected + layer.douts) + layer.graphs

    def outputs_left(num_sent: int, num_attended: int) -> int:
        used = num_attended * q + sum(last_used_kv[:num_attended]) if layer.qkv else 0
        freed = 0 if layer.fetches_attention else num_sent * q + num_attended * layer.lse
        return outputs - used - freed

    def send(stage: int, live: int, num_attended: int) -> Iterator[MemoryPoint]:
        """Project q, k and v, then send them with out and dout."""
        if not layer.qkv:
            prefetched = q if prefetches and stage >= layer.stages_ahead else 0
            projected = live + q + layer.new_kv[stage] + prefetched + held(stage)
            heads = projected + outputs_left(stage, num_attended)
            yield MemoryPoint(project, stream, heads, "project")
        # Without overlap, out stays until all is sent.
        is_early = layer.layout.overlap or layer.fetches_attention
        out = q if layer.has_exchange and not is_early else 0
        sent = live + out + layer.send_peak(stage_tensors, stage) + held(stage + 1)
        yield MemoryPoint(project, stream, sent + outputs_left(stage + 1, num_attended))

    for i in range(min(layer.stages_ahead, layer.num_stages)):
        yield from send(i, layer.in_flight(stage_tensors, 0, i), 0)
    head_grads = 0  # dq, dk and dv of earlier stages
    for i in range(layer.num_stages):
        following = i + layer.stages_ahead
        later = layer.in_flight(stage_tensors, i + 1, following)
        is_more = following < layer.num_stages
        prefetched = q if prefetches and is_more else 0
        stage_bytes = stage_tensors + (layer.lse if layer.fetches_attention else 0)
        live = head_grads + stage_bytes + later + prefetched + layer.held_kv[i] + held(following)
        live += layer.kv_grad_sums(layer.slots[i].summed_kv) + layer.ring_backward_bytes(i)
        live += outputs_left(min(following, layer.num_stages), i)
        yield MemoryPoint(attend, stream, live, "attend backward")
        stores_dq = layer.stores_dq and i + 1 < layer.num_stages
        head_grads += last_used_kv[i] + (0 if stores_dq else q)
        if is_more:
            has_buffers = layer.layout.overlap and layer.has_exchange
            send_buffers = q + last_used_kv[i] if has_buffers else 0
            left = layer.left_kv[i] + layer.kv_grad_sums(layer.slots[i].left_summed_kv)
            yield from send(following, head_grads + send_buffers + later + left, i + 1)
    last = head_grads + outputs_left(layer.num_stages, layer.num_stages) + layer.graphs
    yield MemoryPoint(project, stream, last, "project backward")


def layer_points(layer: LayerBytes) -> Iterator[MemoryPoint]:
    """Every point of a layer's forward and backward on one rank."""
    x = layer.x
    outputs = layer.outputs
    kept_later = layer.gate_up
    yield from layer.mix_points("forward", x + x * layer.policy.allocates_output_first)
    # x and y, and the outputs of all stages
    yield MemoryPoint("forward mlp", 2 * x, outputs + layer.qkv + kept_later, "mlp")
    if layer.keeps_attention:
        outputs = 0
    else:
        yield from layer.mix_points("backward again", x + layer.fetched_input)
    # dy; everything else is one tile
    stream = x + layer.fetched_input
    yield MemoryPoint("backward mlp", stream, outputs + layer.douts, "mlp backward")
    yield from layer.mix_backward_points(outputs - kept_later)


# `sizes` of a mixer. The last argument: what the layer keeps.
MakeSizes = Callable[[ModelShape, Layout, int, ActivationPolicy], LayerBytes]


KEEPS_INPUT = ActivationPolicy()


def layer_sizes(
    shape: ModelShape, layout: Layout, s: int, make_sizes: MakeSizes = LayerBytes
) -> LayerBytes:
    """Return the sizes of a layer's tensors, except those of tiles and of kept activations."""
    return _layer_sizes(make_sizes, shape, s, KEEPS_INPUT, _size_settings(layout))


def sizes_by_layer(shape: ModelShape, layout: Layout, s: int) -> list[LayerBytes]:
    """Return the sizes of each layer's tensors, with what it keeps."""
    policies = layout.layer_policies(shape.num_layers)
    settings = _size_settings(layout)
    layers = zip(shape.size_indices, policies, strict=True)
    return [
        _layer_sizes(*shape.kinds_of_sizes[index], s, policy, settings) for index, policy in layers
    ]


def layer_peaks(
    shape: ModelShape, layout: Layout, s: int, policy: ActivationPolicy
) -> tuple[list[int], MemoryPoint, MemoryPoint]:
    """Return what each of `kinds_of_sizes` keeps on the device, and the peaks of forward and of
    backward, of the kind of layer that needs the most."""
    # The disk and the host are the same to the device.
    if policy.input == "disk":
        policy = replace(policy, input="host")
    if policy.attention == "disk":
        policy = replace(policy, attention="host")
    return _layer_peaks(shape, s, policy, layout.tile_tokens, _size_settings(layout))


class _SizeSettings(NamedTuple):
    """The settings of a layout that change sizes, by which they are cached."""

    cp: int
    ring: int
    heads_per_stage: int | None
    overlap: bool
    dtype: str | None
    stored_dtype: str | None


def _size_settings(layout: Layout) -> _SizeSettings:
    return _SizeSettings(
        layout.cp,
        layout.ring,
        layout.heads_per_stage,
        layout.overlap,
        layout.dtype,
        layout.stored_dtype,
    )


@lru_cache(maxsize=8192)
def _layer_sizes(
    make_sizes: MakeSizes,
    shape: ModelShape,
    s: int,
    policy: ActivationPolicy,
    settings: _SizeSettings,
) -> LayerBytes:
    return make_sizes(shape, Layout(**settings._asdict()), s, policy)


@lru_cache(maxsize=8192)
def _layer_peaks(
    shape: ModelShape,
    s: int,
    policy: ActivationPolicy,
    tile_tokens: int | None,
    settings: _SizeSettings,
) -> tuple[list[int], MemoryPoint, MemoryPoint]:
    points = []
    kept = []
    for make_sizes, kind_shape in shape.kinds_of_sizes:
        sizes = _layer_sizes(make_sizes, kind_shape, s, policy, settings)
        kept.append(sizes.kept)
        layer = copy(sizes)
        layer.layout = replace(layer.layout, tile_tokens=tile_tokens)
        tile_works = {point.tile_work for point in sizes.highest}
        tile_bytes = {work: layer.tile_bytes(work) for work in tile_works}
        for point in sizes.highest:
            grad_bytes = layer.weight_grads(point.phase)
            tile = tile_bytes[point.tile_work]
            points.append(point._replace(tile_bytes=tile, grad_bytes=grad_bytes))
    return kept, _peak("forward", points), _peak("backward", points)


def _peak(direction: str, points: list[MemoryPoint]) -> MemoryPoint:
    points = [point for point in points if point.phase.startswith(direction)]
    return max(points, key=lambda point: (point.live, -point.tile_bytes))
