"""The decoder layer as one explicit schedule: forward and backward are plain loops over tiles and stages.

Shapes: s tokens on this rank, S on this ring member (in the sequence, without a ring), t in a tile, D hidden, c Ulysses
ranks, n head slots per rank and stage, K head dim, N the width of several heads. Tokens-sharded tensors are
[c, s, n, K], heads-sharded ones [S, n, K], as in dist/exchange.py.

Kept for backward: the layer's input and what else `LayerKeeps` says; the rest is computed again.

After the last stage, one matrix product per tile sums over all heads: the output projection in forward, the gradient at
norm1's output in backward. So rounding does not depend on the number of stages, and backward, which recomputes
x + attention, gets the same bits as forward. Inside a tile the residual is summed in fp32: a layer's output is rounded
once.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ithaka.attention.blocks import AttentionSpec, Docs
from ithaka.attention.fused import Positions, add_rounded
from ithaka.dist.exchange import Exchange, start_heads_to_tokens, start_tokens_to_heads
from ithaka.layer.linear import Linear, as_linear
from ithaka.layer.mlp import GatedMlp, Inside, gated_mlp
from ithaka.layer.stages import HeadSlice, HeldHeads, Projection, ProjectionsBackward, join_heads
from ithaka.layer.store import Kept, Store
from ithaka.layer.tiles import (
    PARAMETERS_CHANGED,
    RAN_ALREADY,
    GradSum,
    apply_norm,
    graph_backward,
    norm_backward,
    run_norm,
    run_tile,
    tile_slices,
)
from ithaka.layout import ActivationPolicy, Layout
from ithaka.phases import Holder, phase, tag
from ithaka.plan.heads import Heads, HeadTable, Stage, concat_heads, flatten_heads


@dataclass(frozen=True)
class LayerParts:
    """The parts of one decoder layer: y = x + attention(norm1(x)); y + mlp(norm2(y))."""

    norm1: nn.Module
    q_proj: nn.Module  # see `linear_of`
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    norm2: nn.Module
    mlp: nn.Module
    head_dim: int
    scale: float
    window: int | None


class Attended(NamedTuple):
    """The result of one stage's attention: its output in exchange layout, [c, s, n, K], and the log-sum-exp, [n, S]."""

    out: Kept
    lse: Kept


@dataclass
class Saved:
    """What one forward keeps for its backward."""

    positions: Positions
    docs: Docs
    x: Kept
    keeps: ActivationPolicy = ActivationPolicy()
    attended: list[Attended] = field(default_factory=list)  # per stage
    arrived: deque[list[Kept]] = field(default_factory=deque)  # per stage: q, and k and v if they came with it
    middles: deque[Tensor] = field(default_factory=deque)  # per tile: x + attention, rounded
    insides: deque[Inside] = field(default_factory=deque)  # per tile; if the MLP is a black box, of `run_tile`
    before: Callable[[], "Saved | None"] = lambda: None  # of the layer below, whose backward comes next

    def settle(self) -> None:
        """Releases the device memory of everything handed to the store."""
        for kept in self._all():
            kept.settle()

    def read_ahead(self) -> None:
        """Starts reading from disk: first what this layer needs, then, if there is room, what the next one needs."""
        for kept in self._all():
            kept.read_ahead(wait=True)
        following = self.before()
        for kept in following._all() if following is not None else ():
            kept.read_ahead()

    def _all(self) -> list[Kept]:
        return [self.x, *(kept for of_stage in self.attended for kept in of_stage)]


Sent = deque[Callable[[], Tensor]]  # a stage's tensors on their way to the ranks that own its heads; each waits for one


def arrive(sent: Sent) -> list[Tensor]:
    """What was sent, in that order. Drops its own references."""
    return [sent.popleft()() for _ in range(len(sent))]


class HeadGrads:
    """Gradients of one projection's heads, by stage or load, on their way back to the tokens' ranks."""

    def __init__(self, group: dist.ProcessGroup, overlap: bool) -> None:
        self.group, self.overlap = group, overlap
        self._returning: dict[int, Exchange] = {}

    @phase("exchange")
    def add(self, key: int, d_SnK: Tensor) -> None:
        self._returning[key] = start_heads_to_tokens(d_SnK, self.group)
        if not self.overlap:
            self.wait()

    def wait(self) -> list[Tensor]:
        """All of them in exchange layout, [c, s, n, K] each, in the order of their keys. Releases what was sent."""
        return [self._returning[key].wait() for key in sorted(self._returning)]


@dataclass(eq=False, repr=False)
class StreamedLayer:
    """Replaces a Hugging Face decoder layer's forward: (x_sD, positions, docs) -> y_sD."""

    name: str
    layer: nn.Module
    parts: LayerParts
    group: dist.ProcessGroup  # Ulysses: exchanges tokens for heads
    ring: dist.ProcessGroup  # the same heads of other tokens
    table: HeadTable
    store: Store
    layout: Layout
    keeps: ActivationPolicy
    num_changes: Callable[[], int] = int  # how often its parameters were changed in place; int: nobody counts

    def __post_init__(self) -> None:
        self.rank = self.group.rank()
        self.mlp = torch.compile(self.parts.mlp) if self.layout.compile else self.parts.mlp
        self.q = Projection(self.parts.q_proj, self.parts.q_norm, True, self.parts.head_dim)
        self.k = Projection(self.parts.k_proj, self.parts.k_norm, True, self.parts.head_dim)
        self.v = Projection(self.parts.v_proj, None, False, self.parts.head_dim)
        self.ahead = 2 if self.layout.overlap else 1  # stages under way at once
        self.query_heads = concat_heads([stage.query_heads for stage in self.table.stages])
        self.kv_heads = concat_heads([load.kv_heads for load in self.table.loads])
        self.hooked = False  # set at each call: a user's hook may keep the gradients between layers
        self._indices: dict[tuple[Heads, int], Tensor | None] = {}

    def __call__(self, x_sD: Tensor, positions: Positions, docs: Docs) -> Tensor:
        x_sD = x_sD.contiguous()  # a user's hook may have changed it
        # Below the first trained parameter there is no backward.
        trains = x_sD.requires_grad or any(param.requires_grad for param in self.layer.parameters())
        if torch.is_grad_enabled() and trains:
            return _LayerFunction.apply(x_sD, self, positions, docs, *self.layer.parameters())
        with phase(self.name), phase("forward"):
            return self.forward(x_sD, Saved(positions, docs, Kept(x_sD)))

    # ---- forward

    def forward(self, x_sD: Tensor, saved: Saved) -> Tensor:
        keeps = saved.keeps
        attended = [Attended(*(self.store.keep(t, keeps.attention) for t in both)) for both in self._attend(saved)]
        if keeps.attention is not None:
            saved.attended = attended
        with phase("mlp"):
            y_sD = tag(torch.empty_like(x_sD), Holder.RESIDUAL)
            gated, output = self._gated(), self._output(self.query_heads)
            for rows, x_tD, outs_ctnK in self._attended_tiles(saved, attended):
                sum_tD = output.wide(join_heads(outs_ctnK))
                middle_tD = add_rounded(sum_tD, x_tD)
                if keeps.projections:
                    middle_tD = tag(middle_tD.clone() if middle_tD is sum_tD else middle_tD, Holder.KEPT)
                    saved.middles.append(middle_tD)
                if inside := self._add_mlp(sum_tD, middle_tD, gated, keeps.mlp):
                    saved.insides.append(inside)
                y_sD[rows] = sum_tD
        saved.settle()
        return y_sD

    def _attend(self, saved: Saved) -> Iterator[tuple[Tensor, Tensor]]:
        """Attention, stage by stage: yields out_csnK, back on the tokens' ranks, and lse_nS."""
        stages, held = self.table.stages, self._holding(saved.docs)
        sent = deque(self._project_and_send(saved, stage) for stage in stages[: self.ahead])
        for i in range(len(stages)):
            yield self._attend_stage(i, sent.popleft(), held, saved)
            if i + self.ahead < len(stages):
                sent.append(self._project_and_send(saved, stages[i + self.ahead]))

    def _attend_stage(self, i: int, sent: Sent, held: HeldHeads, saved: Saved) -> tuple[Tensor, Tensor]:
        out_SnK, lse_nS = self._attention(i, held.attend, self._kept_arrivals(arrive(sent), saved))
        for load in self.table.loads_ending(i):
            held.drop(load)
        with phase("exchange"):
            return start_heads_to_tokens(out_SnK, self.group).wait(), lse_nS

    def _attention(self, i: int, attend: Callable[..., Any], arrived: list[Tensor]) -> Any:
        """A separate function, so that its arguments are freed when it returns."""
        with phase("attention"), phase(f"stage {i}"):
            return attend(self.table.stages[i], *arrived)

    def _kept_arrivals(self, arrived: list[Tensor], saved: Saved) -> list[Tensor]:
        if saved.keeps.projections:
            saved.arrived.append([self.store.keep(t, "device") for t in arrived])
        return arrived

    def _project_and_send(self, saved: Saved, stage: Stage) -> Sent:
        with phase("projections"):
            projected = self._project(saved, stage)
            return self._send([projected.popleft] * len(projected))

    def _project(self, saved: Saved, stage: Stage) -> deque[Tensor]:
        """q of a stage, and k and v if they come with it, in exchange layout [c, s, n, K]."""
        kv_heads = None if stage.load is None else self.table.loads[stage.load].kv_heads
        slices, c, K = self._slices(stage.query_heads, kv_heads), self.group.size(), self.parts.head_dim
        shapes = [(c, len(saved.positions), part.width // (c * K), K) for part in slices]
        projected = deque(part.linear.weight_ND.new_empty(shape) for part, shape in zip(slices, shapes, strict=True))
        for rows, x_tD in self._input_tiles(saved):
            h_tD, positions = apply_norm(self.parts.norm1, x_tD), saved.positions[rows]
            for part, into_csnK in zip(slices, projected, strict=True):
                part.project(h_tD, positions, into_csnK[:, rows])
        return projected

    def _slices(self, query_heads: Heads, kv_heads: Heads | None) -> list[HeadSlice]:
        """Some heads of q and, if any are given, of k and v."""
        slices = [HeadSlice.of(self.q, self._heads(query_heads, self.q))]
        if kv_heads is not None:
            index = self._heads(kv_heads, self.k)
            slices += [HeadSlice.of(self.k, index), HeadSlice.of(self.v, index)]
        return slices

    def _send(self, makers: Sequence[Callable[[], Tensor]]) -> Sent:
        """Sends what each of `makers` returns to the ranks that own its heads.

        Without overlap, one at a time, so that only one tensor exists twice.
        """
        sent: Sent = deque()
        for make in makers:
            exchange = start_tokens_to_heads(make(), self.group)
            if not self.layout.overlap:
                exchange.wait()
            sent.append(exchange.wait)
        return sent

    # ---- between attention and the MLP, the same in both directions

    def _attended_tiles(
        self, saved: Saved, attended: Sequence[Attended]
    ) -> Iterator[tuple[slice, Tensor, tuple[Tensor, ...]]]:
        """Yields for each tile its rows, x, and every stage's attention output."""
        slices = tile_slices(len(saved.positions), self.layout.tile_tokens)
        outs = [of_stage.out.tiles(slices, dim=1) for of_stage in attended]
        for (rows, x_tD), *outs_ctnK in zip(self._input_tiles(saved), *outs, strict=True):
            yield rows, x_tD, tuple(outs_ctnK)

    def _output(self, heads: Heads) -> Linear:
        """The output projection of some heads."""
        return as_linear(self.parts.o_proj).of_heads(self._heads(heads, self.q), self.parts.head_dim, dim=1)

    def _mlp(self, middle_tD: Tensor) -> Tensor:
        return self.mlp(apply_norm(self.parts.norm2, middle_tD)[None])[0]

    def _gated(self) -> GatedMlp | None:
        """Checked in every pass: hooks and wrappers may be added later."""
        return None if self.layout.compile else gated_mlp(self.parts.mlp)

    def _add_mlp(self, sum_tD: Tensor, middle_tD: Tensor, gated: GatedMlp | None, keep: bool) -> Inside | None:
        """`keep`: returns what `_through_mlp` needs."""
        if gated is not None:
            return gated.add_to(sum_tD, apply_norm(self.parts.norm2, middle_tD), keep)
        inside = run_tile(self._mlp, middle_tD) if keep else None
        sum_tD += self._mlp(middle_tD) if inside is None else inside[1].detach()
        return inside

    # ---- backward

    def backward(self, saved: Saved, dy_sD: Tensor, grads: GradSum) -> Tensor:
        """Returns dx, written over dy; adds weight gradients to `grads`."""
        attended = self._take_attended(saved)
        with phase("mlp"):
            self._mlp_backward(saved, attended, dy_sD, grads)
        self._attention_backward(saved, attended, dy_sD, grads)
        return dy_sD

    def _take_attended(self, saved: Saved) -> deque[Attended]:
        """What was kept of attention, or, where nothing was, attention once more."""
        if not saved.attended:
            return deque(Attended(*(self.store.keep(t, "device") for t in out_lse)) for out_lse in self._attend(saved))
        attended, saved.attended = deque(saved.attended), []
        return attended

    def _mlp_backward(self, saved: Saved, attended: Sequence[Attended], dy_sD: Tensor, grads: GradSum) -> None:
        """Turns dy into the gradient at x + attention; adds the MLP's and the output projection's weight gradients."""
        gated, sums, output = self._gated(), GradSum(), self._output(self.query_heads)
        for rows, x_tD, outs_ctnK in self._attended_tiles(saved, attended):
            dy_tD, out_tN = dy_sD[rows], join_heads(outs_ctnK)
            middle_tD = saved.middles.popleft() if saved.middles else add_rounded(output.wide(out_tN), x_tD)
            self._through_mlp(middle_tD, dy_tD, saved, gated, grads)
            output.add_grads(dy_tD, out_tN, output.reduced_grad(dy_tD), sums)
        as_linear(self.parts.o_proj).add_sums(output, self._heads(self.query_heads, self.q), sums, grads, dim=1)

    def _through_mlp(
        self, middle_tD: Tensor, dy_tD: Tensor, saved: Saved, gated: GatedMlp | None, grads: GradSum
    ) -> None:
        """Adds the gradient through the MLP and norm2 to dy."""
        norm2 = self.parts.norm2
        if gated is None:
            params = [*norm2.parameters(), *self.parts.mlp.parameters()]
            inside = saved.insides.popleft() if saved.insides else run_tile(self._mlp, middle_tD)
            dy_tD += graph_backward(*inside, params, dy_tD, grads)
            return
        middle_tD, h_tD = run_norm(norm2, middle_tD)
        dh_tD = gated.backward(h_tD.detach(), dy_tD, grads, saved.insides)
        norm_backward(dy_tD, norm2, middle_tD, h_tD, dh_tD, grads)

    def _attention_backward(self, saved: Saved, attended: deque[Attended], dy_sD: Tensor, grads: GradSum) -> None:
        """Adds the gradient through attention and norm1 to dy, which makes it dx. Uses up `attended`."""
        stages, held = self.table.stages, self._holding(saved.docs)
        dq, dk, dv = (HeadGrads(self.group, self.layout.overlap) for _ in range(3))
        first = stages[: self.ahead]
        sent = deque(self._send_backward(saved, stage, attended.popleft(), dy_sD) for stage in first)
        for i in range(len(stages)):
            if self.layout.overlap and attended:
                attended[0].out.prefetch()
            dq.add(i, self._attention(i, held.attend_backward, arrive(sent.popleft())))
            for load in self.table.loads_ending(i):
                dkv = held.take_grads(load)
                dk.add(load, next(dkv))
                dv.add(load, next(dkv))
            if attended:
                sent.append(self._send_backward(saved, stages[i + self.ahead], attended.popleft(), dy_sD))
            for grads_of_heads in (dq, dk, dv):
                grads_of_heads.wait()
        with phase("projections"):
            self._projections_backward(saved, dq.wait(), dk.wait(), dv.wait(), dy_sD, grads)

    def _send_backward(self, saved: Saved, stage: Stage, attended: Attended, dy_sD: Tensor) -> Sent:
        """Sends q, attention's output and its gradient, and k and v if they come with the stage; lse is not sent, nor
        are q, k and v that were kept where they arrived."""
        with phase("projections"):
            makers: list[Callable[[], Tensor]] = [attended.out.fetch, partial(self._output_grad, stage, dy_sD)]
            if saved.arrived:
                q, *kv = saved.arrived.popleft()
                return deque([q.fetch, *self._send(makers), *(t.fetch for t in kv), attended.lse.fetch])
            projected = self._project(saved, stage)
            sent = self._send([projected.popleft, *makers, *[projected.popleft] * (len(projected) - 1)])
            sent.append(attended.lse.fetch)
            return sent

    def _output_grad(self, stage: Stage, dy_sD: Tensor) -> Tensor:
        """dout [c, s, n, K] of a stage, from the gradient at the output projection."""
        output, c = self._output(stage.query_heads), self.group.size()
        dout_csnK = dy_sD.new_empty(c, len(dy_sD), stage.num_slots, self.parts.head_dim)
        for rows in tile_slices(len(dy_sD), self.layout.tile_tokens):
            given = dy_sD[rows], output.reduced_grad(dy_sD[rows])
            if c == 1:
                output.input_grad(*given, dout_csnK[0, rows].flatten(1), adds=False)
            else:
                dout_tN = output.input_grad(*given)
                dout_csnK[:, rows] = dout_tN.unflatten(1, (c, -1, self.parts.head_dim)).transpose(0, 1)
        return dout_csnK

    def _projections_backward(
        self, saved: Saved, dq: list[Tensor], dk: list[Tensor], dv: list[Tensor], dy_sD: Tensor, grads: GradSum
    ) -> None:
        """Takes the gradients of all heads through the projections and norm1, and adds the result to dy."""
        norm1 = self.parts.norm1
        projections = ProjectionsBackward(self._slices(self.query_heads, self.kv_heads), [dq, dk, dv])
        for rows, x_tD in self._input_tiles(saved):
            x_tD, h_tD = run_norm(norm1, x_tD)
            dh_tD = projections.tile(rows, h_tD.detach(), saved.positions[rows], grads)
            norm_backward(dy_sD[rows], norm1, x_tD, h_tD, dh_tD, grads)
        projections.finish(grads)

    # ---- shared

    def _input_tiles(self, saved: Saved) -> Iterator[tuple[slice, Tensor]]:
        slices = tile_slices(len(saved.positions), self.layout.tile_tokens)
        return zip(slices, saved.x.tiles(slices, hold=self.layout.overlap), strict=True)

    def _heads(self, heads: Heads, projection: Projection) -> Tensor | None:
        """The heads as an index; None if they are all of the projection's, in order."""
        weight = as_linear(projection.module).weight_ND
        count = len(weight) // projection.head_dim
        if (heads, count) not in self._indices:
            order = flatten_heads(heads)
            in_order = order == list(range(count))
            self._indices[heads, count] = None if in_order else torch.tensor(order, device=weight.device)
        return self._indices[heads, count]

    def _holding(self, docs: Docs) -> HeldHeads:
        return HeldHeads(self.table, self.rank, self.ring, self._how(docs))

    def _how(self, docs: Docs) -> AttentionSpec:
        kernel, blocks = self.layout.kernel, self.layout.blocks
        return AttentionSpec(scale=self.parts.scale, window=self.parts.window, docs=docs, kernel=kernel, blocks=blocks)


class _LayerFunction(torch.autograd.Function):
    """One node per layer. Weight gradients are returned like any other, so FSDP2 sees them in the usual way."""

    @staticmethod
    def forward(ctx, x_sD, layer, positions, docs, *params):
        ctx.layer, ctx.params, ctx.hooked, ctx.num_changes = layer, params, layer.hooked, layer.num_changes()
        ctx.saved = Saved(positions, docs, layer.store.keep(x_sD, layer.keeps.input), layer.keeps)
        ctx.saved.before = layer.store.follow(ctx.saved)
        with phase(layer.name), phase("forward"):
            return layer.forward(x_sD, ctx.saved)

    @staticmethod
    def backward(ctx, dy_sD):
        if ctx.saved is None:
            raise RuntimeError(RAN_ALREADY)
        if ctx.layer.num_changes() != ctx.num_changes:
            raise RuntimeError(PARAMETERS_CHANGED.format(ctx.layer.name))
        grads = GradSum()
        ctx.saved.read_ahead()
        with phase(ctx.layer.name), phase("backward"), torch.autocast(dy_sD.device.type, enabled=False):
            in_order = torch.contiguous_format
            dy_sD = dy_sD.clone(memory_format=in_order) if ctx.hooked else dy_sD.contiguous()  # overwritten
            dx_sD = ctx.layer.backward(ctx.saved, dy_sD, grads)
        ctx.saved = None
        return dx_sD, None, None, None, *(grads.take_as(p) for p in ctx.params)
