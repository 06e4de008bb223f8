"""Bytes of one decoder layer, moment by moment: pure arithmetic on a model's shape and a layout.

S tokens of the packed sequence, s = S / cp of them on this rank, t of a tile, D hidden, H and G query and kv
heads, K head dim, F MLP size, n and m query and kv slots per rank and stage.
X = s * D * element bytes, T = S * n * K * element bytes (a stage tensor), U the same for m kv slots.

The formulas follow model/layer.py; tests compare them with what is live there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from ithaka.layout import LayerKeeps, Layout
from ithaka.plan.heads import Slots, slots_of
from ithaka.plan.shape import ModelShape

TileWork = Literal["none", "project", "project backward", "mlp", "mlp backward", "attend", "attend backward"]

# Of ops/attention.py: rows of a query block, forward and backward, for a head of 128; as many bytes for others.
BLOCK_TOKENS = {"attend": 128 * 1024, "attend backward": 256 * 1024}
BLOCK_BUFFERS = 4  # in the dtype of sums, of a block in flight inside attention


@dataclass(frozen=True)
class Moment:
    """What is live at one point of a layer's schedule, above weights, their gradients and what is kept.

    stream: full-length tensors of the residual stream. stages: tensors of heads, exchange buffers included.
    outputs: attention outputs of this layer (below 0: less than what is kept of them). tiles: what work at this point
    needs whatever s is, by `tile`.
    sums: the layer's weight gradients so far.
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
    def total(self) -> int:
        """All but the gradients."""
        return self.rest + self.tiles

    @property
    def live(self) -> int:
        return self.total + self.sums


@dataclass(frozen=True)
class LayerBytes:
    """The sizes a layer's schedule is made of, on one rank."""

    shape: ModelShape
    layout: Layout
    s: int

    @cached_property
    def slots(self) -> Slots:
        return slots_of(self.shape, self.layout)

    @cached_property
    def num_stages(self) -> int:
        return len(self.slots.stages)

    @cached_property
    def x(self) -> int:
        return self.layout.x_bytes(self.shape.hidden, self.s)

    @cached_property
    def slot(self) -> int:
        """One head of every token."""
        return self.layout.cp * self.s * self.shape.head_dim * self.layout.element_bytes

    @cached_property
    def q(self) -> int:
        """T."""
        return self.slots.query * self.slot

    @cached_property
    def lse(self) -> int:
        return self.layout.cp * self.s * self.slots.query * self.layout.sum_bytes

    @cached_property
    def held_input(self) -> int:
        """With overlap, an input from the store stays on the device for the whole backward."""
        return self.x if self.layout.overlap and self.layout.input_tier != "device" else 0

    @cached_property
    def ahead(self) -> int:
        return 2 if self.layout.overlap else 1

    @cached_property
    def exchanged(self) -> bool:
        """Whether an exchange has a buffer of its own to receive into."""
        return self.layout.cp > 1

    def kv(self, stage: int) -> int:
        """k and v that arrive with a stage: 2 U."""
        return 2 * self.slots.stages[stage].new_kv * self.slot

    def held(self, stage: int) -> int:
        """k and v held while a stage attends."""
        return 2 * self.slots.stages[stage].held * self.slot

    def left(self, stage: int) -> int:
        """k and v held once a stage's last uses are over."""
        return 2 * self.slots.stages[stage].left * self.slot

    def under_way(self, made: int, taken: int, stage: int) -> int:
        """A stage's tensors between their sending and their use: `made` here, `taken` as received, and k, v.

        With overlap the ones sent are held until the ones received are used.
        """
        if not self.exchanged:
            return made + self.kv(stage)
        both = made + self.kv(stage) if self.layout.overlap else 0
        return both + taken + self.kv(stage)

    def sending(self, made: int, taken: int, stage: int) -> int:
        """The most while a stage is sent: without overlap one after the other, so only one is there twice."""
        if self.layout.overlap or not self.exchanged:
            return self.under_way(made, taken, stage)
        return taken + self.kv(stage) + max(self.q, self.kv(stage) // 2)

    def sums(self, num_slots: int) -> int:
        """dk and dv of so many kv slots, in the dtype of sums."""
        return 2 * num_slots * self.slot // self.layout.element_bytes * self.layout.sum_bytes

    def part(self, stage: int, num_bytes: int) -> int:
        """Of a tensor of all slots, the widest read's, where it is not the tensor itself."""
        return num_bytes * self.slots.stages[stage].part // self.slots.query

    def with_tile(self, moment: Moment, kept: bool) -> Moment:
        fetched = kept and self.layout.attention_tier != "device"
        tiles = tile_bytes(self.shape, self.layout, self.s, moment.tile, fetched)
        return replace(moment, tiles=tiles, sums=self.grad_sums(moment.phase))

    def grad_sums(self, phase: str) -> int:
        """Bytes of weight gradients as they are summed over tiles (GradSum of ops/tiles.py)."""
        if not phase.startswith("backward") or phase.startswith("backward again"):
            return 0
        shape, e, wide = self.shape, self.layout.element_bytes, self.layout.sum_bytes
        if phase != "backward mlp":
            return shape.layer_parameters * wide
        if self.s <= (self.layout.tile_tokens or self.s):
            # One tile: one weight's while its three widths are there; all of them once the product is gone.
            return max(shape.mlp_parameters * wide // 3, shape.mlp_parameters * wide - self.s * e * shape.mlp)
        output = shape.hidden * shape.heads * shape.head_dim
        return (output + shape.mlp_parameters) * wide


def tile_bytes(shape: ModelShape, layout: Layout, s: int, work: TileWork, fetched: bool) -> int:
    """What token-wise work on a tile, or attention on a block, has live; `fetched`: outputs from the store.

    Counted by hand from the kernels of a GPU: close, and small beside the rest at the lengths this is for.
    """
    if work == "none":
        return 0
    t, e, slots = min(layout.tile_tokens or s, s), layout.element_bytes, slots_of(shape, layout)
    if work in BLOCK_TOKENS:
        elements = min(BLOCK_TOKENS[work] * 128, layout.cp * s * shape.head_dim)
        return BLOCK_BUFFERS * elements * layout.sum_bytes
    # A tile of x at work, and the next on its way; with overlap both are parts of the whole x.
    streamed = 0 if layout.input_tier == "device" or layout.overlap else 2
    if work == "mlp":  # x + attention as summed and as rounded, its norm, two widths of the MLP
        rounded = 0 if layout.sum_bytes == e else 1
        return t * (layout.sum_bytes * shape.hidden + e * ((1 + rounded) * shape.hidden + 2 * shape.mlp))
    if work == "mlp backward":
        outputs = (3 if fetched else 1) * shape.heads * shape.head_dim
        # x + attention, its norm; ops/gated.py's three. (Compiled, hooked or wrapped MLPs are black boxes and need up
        # to twice as much: no plan knows of them.)
        return t * e * ((2 + streamed) * shape.hidden + outputs + 3 * shape.mlp)
    width = layout.cp * slots.query * shape.head_dim
    kv_width = 2 * layout.cp * slots.most_new_kv * shape.head_dim
    if work == "project":
        return (width + kv_width) * shape.hidden * e + t * e * ((2 + streamed) * shape.hidden + 5 * width)
    all_widths = len(slots.stages) * width + 2 * layout.cp * slots.all_kv * shape.head_dim
    return all_widths * shape.hidden * e + t * e * ((4 + streamed) * shape.hidden + 2 * all_widths)


def attend_moments(b: LayerBytes, phase: str, stream: int) -> Iterator[Moment]:
    """Attention of all stages (`_attend`): in forward, and again in backward where its output was not kept.

    Every stage's output stays until the output projection, after the last of them.
    """
    out = b.q + b.lse
    project, attend = f"{phase} projections", f"{phase} attention"

    def flying(first: int, last: int) -> int:
        return sum(b.under_way(b.q, b.q, j) for j in range(first, min(last, b.num_stages)))

    for i in range(min(b.ahead, b.num_stages)):
        yield Moment(project, stream, flying(0, i) + b.q + b.kv(i), 0, "project")
        yield Moment(project, stream, flying(0, i) + b.sending(b.q, b.q, i))
    for i in range(b.num_stages):
        later = flying(i + 1, i + b.ahead)
        yield Moment(attend, stream, b.q + later + b.held(i) + out + b.part(i, out), i * out, "attend")
        if (new := i + b.ahead) < b.num_stages:
            others = later + b.left(i)
            yield Moment(project, stream, others + b.q + b.kv(new), (i + 1) * out, "project")
            yield Moment(project, stream, others + b.sending(b.q, b.q, new), (i + 1) * out)


def forward_moments(b: LayerBytes) -> Iterator[Moment]:
    """x all the time; attention, then y, made from x and the outputs of all stages."""
    yield from attend_moments(b, "forward", b.x)
    yield Moment("forward mlp", 2 * b.x, 0, b.num_stages * (b.q + b.lse), "mlp")


def mlp_backward_moment(b: LayerBytes, outputs: int) -> Moment:
    """dy, one tile of everything else. `outputs`: attention outputs computed again, all stages."""
    return Moment("backward mlp", b.x + b.held_input, 0, outputs, "mlp backward")


def attention_backward_moments(b: LayerBytes, outputs: int, fetched: bool) -> Iterator[Moment]:
    """dy all the time, and the gradients of all heads so far. `fetched`: attention's output comes from the store, a
    stage at a time; else a stage's output is let go when it was sent, its lse when it was used.
    """
    stream, attend, project = b.x + b.held_input, "backward attention", "backward projections"
    taken = 3 * b.q  # q, out, dout

    def left(sent: int, attended: int) -> int:
        return outputs - (0 if fetched else sent * b.q + attended * b.lse)

    def flying(first: int, last: int) -> int:
        return sum(b.under_way(taken, taken, j) for j in range(first, min(last, b.num_stages)))

    def sending(stage: int, others: int, attended: int) -> Iterator[Moment]:
        """q, k and v are made; then they are sent, and out and dout with them."""
        prefetched = b.q if fetched and b.layout.overlap and stage >= b.ahead else 0
        made = b.q + b.kv(stage) + prefetched
        yield Moment(project, stream, others + made, left(stage, attended), "project")
        own = 0 if b.layout.overlap or not b.exchanged or fetched else b.q  # out, until all is sent
        yield Moment(project, stream, others + own + b.sending(taken, taken, stage), left(stage + 1, attended))

    for i in range(min(b.ahead, b.num_stages)):
        yield from sending(i, flying(0, i), 0)
    returned = 0  # dq, dk, dv of the stages before
    for i in range(b.num_stages):
        following, ending = i + b.ahead, b.held(i) - b.left(i)
        later, more = flying(i + 1, following), following < b.num_stages
        prefetched = b.q if fetched and b.layout.overlap and more else 0
        own = taken + (b.lse if fetched else 0)
        live = returned + own + later + prefetched + b.held(i) + b.sums(b.slots.stages[i].summed)
        yield Moment(attend, stream, live, left(min(following, b.num_stages), i), "attend backward")
        returned += b.q + ending
        if more:
            twice = b.q + ending if b.layout.overlap and b.exchanged else 0
            held = b.left(i) + b.sums(b.slots.stages[i].left_summed)
            yield from sending(following, returned + twice + later + held, i + 1)
    yield Moment(project, stream, returned, left(b.num_stages, b.num_stages), "project backward")


def layer_moments(shape: ModelShape, layout: Layout, s: int, keeps: LayerKeeps) -> Iterator[Moment]:
    """Every moment of a layer's forward and backward on one rank."""
    b, kept = LayerBytes(shape, layout.of_one_layer(keeps), s), keeps.attention is not None
    fetched = kept and keeps.attention != "device"
    yield from forward_moments(b)
    outputs = 0
    if not kept:
        yield from attend_moments(b, "backward again", b.x + b.held_input)
        outputs = b.num_stages * (b.q + b.lse)
    yield mlp_backward_moment(b, outputs)
    yield from attention_backward_moments(b, outputs, fetched)


def layer_peak(shape: ModelShape, layout: Layout, s: int, keeps: LayerKeeps, direction: str) -> Moment:
    """The moment of "forward" or "backward" at which most is live."""
    # Only what decides the moments, so that layouts that differ in the rest share an entry of the cache.
    alike = LayerKeeps(
        input="device" if keeps.input == "device" else "host",
        attention="host" if keeps.attention == "disk" else keeps.attention,
    )
    one = Layout(
        layout.cp, layout.heads_per_stage, layout.tile_tokens, (alike,), overlap=layout.overlap, dtype=layout.dtype
    )
    return _layer_peak(shape, one, s, alike)[direction]


@lru_cache(maxsize=8192)
def _layer_peak(shape: ModelShape, layout: Layout, s: int, keeps: LayerKeeps) -> dict[str, Moment]:
    b = LayerBytes(shape, layout, s)
    highest = _highest(shape, replace(layout, tile_tokens=None), s, keeps)
    return {
        direction: max((b.with_tile(m, keeps.attention is not None) for m in moments), key=lambda m: m.live)
        for direction, moments in highest.items()
    }


@lru_cache(maxsize=4096)
def _highest(shape: ModelShape, layout: Layout, s: int, keeps: LayerKeeps) -> dict[str, list[Moment]]:
    """By direction: for each kind of work on tiles, the moment at which most else is live."""
    highest: dict[str, dict[str, Moment]] = {"forward": {}, "backward": {}}
    for moment in layer_moments(shape, layout, s, keeps):
        of_kind = highest[moment.phase.partition(" ")[0]]
        if moment.tile not in of_kind or moment.rest > of_kind[moment.tile].rest:
            of_kind[moment.tile] = moment
    return {direction: list(of_kind.values()) for direction, of_kind in highest.items()}


def kept_attention_bytes(shape: ModelShape, layout: Layout, s: int) -> int:
    """out and lse of one layer on one rank, all stages, empty slots included."""
    b = LayerBytes(shape, layout, s)
    return b.num_stages * (b.q + b.lse)


def everything_bytes(shape: ModelShape, layout: Layout, s: int) -> int:
    """What ordinary autograd keeps of a layer (checkpoint=none): inputs of matmuls, norms and products."""
    e = layout.element_bytes
    q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    widths = 4 * shape.hidden + 3 * q_width + 2 * kv_width + 4 * shape.mlp
    return s * e * widths + s * shape.heads * layout.sum_bytes
