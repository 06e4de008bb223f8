"""The decoder layer as one explicit schedule: forward and backward are plain loops over tiles and stages.

Shapes: s tokens on this rank, S in the sequence, t in a tile, D hidden, c ranks, n head slots per rank and stage,
K head dim. Tokens-sharded [c, s, n, K] and heads-sharded [S, n, K] as in dist/exchange.py.

Kept for backward: the layer's input, and attention's output with its log-sum-exp where `LayerKeeps` says so.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ithaka.dist.exchange import (
    Exchange,
    heads_to_tokens,
    start_heads_to_tokens,
    start_tokens_to_heads,
)
from ithaka.layout import LayerKeeps, Layout
from ithaka.memory.store import Kept, Store
from ithaka.model.families import LayerParts
from ithaka.ops.gated import GatedMlp, gated_mlp
from ithaka.ops.stages import (
    RAN_ALREADY,
    HeadSlice,
    HeldHeads,
    Projection,
    signed_sin,
    stages_attention,
    take_head_columns,
)
from ithaka.ops.tiles import GradSum, apply_norm, sum_dtype, tile_backward, tile_slices
from ithaka.phases import KEPT, STAGE, holding, mark_backward, phase
from ithaka.plan.heads import EMPTY, HeadTable, Stage, flat

Docs = tuple[int, ...]
Heads = tuple[tuple[int, ...], ...]  # [rank][slot]
Arrived = tuple[HeadSlice, Tensor]  # heads, and their gradient in exchange layout


@dataclass
class Saved:
    """What one forward leaves for its backward."""

    positions_s: Tensor
    docs: Docs
    x: Kept
    attended: list[tuple[Kept, Kept]] = field(default_factory=list)  # per stage: out_csnK, lse_nS
    before: Callable[[], "Saved | None"] = lambda: None  # the layer below, which backward comes to next

    def settle(self) -> None:
        """The device memory of what was handed to the store is free for others."""
        for kept in self._all():
            kept.settle()

    def approach(self) -> None:
        """Starts reading from disk: first all this layer needs, then, where there is room, the next one's."""
        for kept in self._all():
            kept.approach(wait=True)
        following = self.before()
        for kept in following._all() if following is not None else ():
            kept.approach()

    def _all(self) -> list[Kept]:
        return [self.x, *(part for pair in self.attended for part in pair)]


@dataclass
class Sent:
    """A stage's tensors on their way to the ranks that own its heads."""

    tensors: list[Exchange]
    kv: list[Exchange]

    def wait(self) -> tuple[list[Tensor], list[Tensor]]:
        return [e.wait() for e in self.tensors], [e.wait() for e in self.kv]


class StreamedLayer:
    """Takes the place of a Hugging Face decoder layer's forward: (x_sD, positions_s, docs) -> y_sD."""

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        parts: LayerParts,
        rotary: nn.Module,
        group: dist.ProcessGroup,
        table: HeadTable,
        store: Store,
        layout: Layout,
        keeps: LayerKeeps,
    ) -> None:
        self.name, self.layer, self.parts, self.rotary, self.group = name, layer, parts, rotary, group
        self.table, self.store, self.layout, self.keeps = table, store, layout, keeps
        self.rank = group.rank()
        self.mlp = torch.compile(parts.mlp) if layout.compile else parts.mlp
        self.q = Projection(parts.q_proj, parts.q_norm, True, parts.head_dim)
        self.k = Projection(parts.k_proj, parts.k_norm, True, parts.head_dim)
        self.v = Projection(parts.v_proj, None, False, parts.head_dim)
        self.ahead = 2 if layout.overlap else 1  # stages under way at once
        self.hooked = False  # set at each call: a user's hook may keep the gradients between layers
        self._indices: dict[Heads, Tensor] = {}

    def __call__(self, x_sD: Tensor, positions_s: Tensor, docs: Docs) -> Tensor:
        if torch.is_grad_enabled() and self.keeps.everything:
            return self.keep_everything(x_sD, Saved(positions_s, docs, Kept(x_sD)))
        if torch.is_grad_enabled():
            return _LayerFunction.apply(x_sD, self, positions_s, docs, *self.layer.parameters())
        with phase(self.name), phase("forward"):
            return self.forward(x_sD, Saved(positions_s, docs, Kept(x_sD)), keep=False)

    def keep_everything(self, x_sD: Tensor, saved: Saved) -> Tensor:
        """The layer as ordinary differentiable ops around the attention of all stages: nothing is recomputed."""
        with phase(self.name), phase("forward"), holding(KEPT["device"]):
            projected = [t for stage in self.table.stages for t in self._walk(saved, self._slices(stage))]
            outs = stages_attention(self.table, self.group, self._how(saved.docs), projected)
            middle_sD = x_sD + self.parts.o_proj(self._all_heads(outs))
            y_sD = middle_sD + self._mlp(middle_sD)
        return mark_backward(x_sD, y_sD, self.name, "backward")

    # ---- forward

    def forward(self, x_sD: Tensor, saved: Saved, keep: bool) -> Tensor:
        y_sD = x_sD.clone()
        if self.parts.o_proj.bias is not None:
            y_sD += self.parts.o_proj.bias
        for stage, out_csnK, lse_nS in self._attend(saved):
            self._add_attention_output(y_sD, stage, out_csnK)
            if keep and self.keeps.attention is not None:
                for part in saved.attended[-1] if saved.attended else ():
                    part.settle()
                saved.attended.append(self._keep_attention(out_csnK, lse_nS, self.keeps.attention))
        with phase("mlp"):
            gated = self._gated()
            for rows in tile_slices(len(y_sD), self.layout.tile_tokens):
                self._add_mlp(y_sD[rows], gated)
        saved.settle()
        return y_sD

    def _attend(self, saved: Saved) -> Iterator[tuple[Stage, Tensor, Tensor]]:
        """Attention, stage by stage: yields the stage, its output back on the tokens' ranks, and its lse."""
        stages, held = self.table.stages, HeldHeads(self.table, self.rank, self._how(saved.docs))
        sent = deque(self._project_and_send(saved, stage) for stage in stages[: self.ahead])
        for i, stage in enumerate(stages):
            (q_SnK,), new_kv = sent.popleft().wait()
            held.arrive(stage, new_kv)
            with phase("attention"), phase(f"stage {i}"):
                out_SnK, lse_nS = held.attend(stage, q_SnK)
            for load in self.table.loads_ending(i):
                held.drop(load)
            with phase("exchange"):
                done = [(stage, heads_to_tokens(out_SnK, self.group), lse_nS)]
            del q_SnK, new_kv, out_SnK, lse_nS
            yield done.pop()  # leaves no reference here
            if i + self.ahead < len(stages):
                sent.append(self._project_and_send(saved, stages[i + self.ahead]))

    def _project_and_send(self, saved: Saved, stage: Stage) -> Sent:
        with phase("projections"):
            return self._send(self._walk(saved, self._slices(stage)))

    def _send(self, projected: list[Tensor], also: list[Callable[[], Tensor]] | None = None) -> Sent:
        """Sends a stage's q, what `also` makes, and k and v where they were projected; empties `projected`.

        Without overlap one after the other, so that only one of them is there twice.
        """
        next_projected = partial(projected.pop, 0)
        makers: list[Callable[[], Tensor]] = [next_projected, *(also or [])]
        makers += [next_projected] * (len(projected) - 1)
        started = []
        for make in makers:
            started.append(start_tokens_to_heads(make(), self.group))
            if not self.layout.overlap:
                started[-1].wait()
        num_kv = len(started) - 1 - len(also or [])
        return Sent(started[: len(started) - num_kv], started[len(started) - num_kv :])

    def _slices(self, stage: Stage) -> list[HeadSlice]:
        """The heads to project for a stage: its queries, and the keys and values that arrive with it."""
        slices = [HeadSlice.of(self.q, self._heads(stage.query_heads))]
        if stage.load is not None:
            kv_heads = self._heads(self.table.loads[stage.load].kv_heads)
            slices += [HeadSlice.of(self.k, kv_heads), HeadSlice.of(self.v, kv_heads)]
        return slices

    def _walk(
        self,
        saved: Saved,
        project: list[HeadSlice],
        arrived: list[Arrived] | None = None,
        dh_sD: Tensor | None = None,
        grads: GradSum | None = None,
        then: Callable[[slice, Tensor], None] | None = None,
    ) -> list[Tensor]:
        """One walk over the tiles of x, which may have to come from the store.

        Takes the gradients of the `arrived` heads back to `dh` and `grads`, projects the heads `project` into
        exchange layout [c, s, n, K], which it returns, and calls `then` with each tile's rows and x.
        """
        num_tokens, c, K = len(saved.positions_s), self.group.size(), self.parts.head_dim
        sums = GradSum()
        projected = [part.weight.new_empty(c, num_tokens, len(part.heads_n) // c, K) for part in project]
        for rows, x_tD in self._input_tiles(saved):
            h_tD = apply_norm(self.parts.norm1, x_tD)
            cos_tK, sin_tK = self._rotation(h_tD, saved.positions_s[rows])
            for part, d_csnK in arrived or ():
                part.backward(d_csnK[:, rows], h_tD, cos_tK, sin_tK, dh_sD[rows], grads, sums)  # type: ignore
            for part, into_csnK in zip(project, projected, strict=True):
                part.forward(h_tD, cos_tK, sin_tK, into_csnK[:, rows])
            if then is not None:
                then(rows, x_tD)
        for part, _ in arrived or ():
            part.finish(grads, sums)  # type: ignore
        return projected

    @phase("projections")
    def _add_attention_output(self, y_sD: Tensor, stage: Stage, out_csnK: Tensor) -> None:
        heads = self._heads(stage.query_heads)
        weight_DN = take_head_columns(self.parts.o_proj.weight, heads, self.parts.head_dim)
        for rows in tile_slices(len(y_sD), self.layout.tile_tokens):
            out_tN = out_csnK[:, rows].transpose(0, 1).flatten(1)
            y_sD[rows].addmm_(out_tN, weight_DN.t())

    def _mlp(self, y_tD: Tensor) -> Tensor:
        return self.mlp(apply_norm(self.parts.norm2, y_tD)[None])[0]

    def _gated(self) -> GatedMlp | None:
        """Asked anew in every pass: hooks and wrappers may come after the model was built."""
        return None if self.layout.compile else gated_mlp(self.parts.mlp)

    def _add_mlp(self, y_tD: Tensor, gated: GatedMlp | None) -> None:
        if gated is None:
            y_tD += self._mlp(y_tD)
        else:
            gated.add_to(y_tD, apply_norm(self.parts.norm2, y_tD))

    def _keep_attention(self, out_csnK: Tensor, lse_nS: Tensor, tier: str) -> tuple[Kept, Kept]:
        return self.store.keep(out_csnK, tier), self.store.keep(lse_nS, tier)

    # ---- backward

    def backward(self, saved: Saved, dy_sD: Tensor, grads: GradSum) -> Tensor:
        """dx, written over dy; weight gradients go to `grads`."""
        attended = saved.attended or [self._keep_attention(out, lse, "device") for _, out, lse in self._attend(saved)]
        with phase("mlp"):
            self._mlp_backward(saved, attended, dy_sD, grads)
        self._attention_backward(saved, attended, dy_sD, grads)
        return dy_sD

    def _mlp_backward(self, saved: Saved, attended: list[tuple[Kept, Kept]], dy_sD: Tensor, grads: GradSum) -> None:
        """dy becomes the gradient at the sum of x and attention; also the output projection's weight gradient."""
        o_proj = self.parts.o_proj
        slices = tile_slices(len(dy_sD), self.layout.tile_tokens)
        outs, gated = [out.tiles(slices, dim=1) for out, _ in attended], self._gated()
        for (rows, x_tD), *outs_ctnK in zip(self._input_tiles(saved), *outs, strict=True):
            out_tN = self._all_heads(outs_ctnK)
            middle_tD = x_tD + o_proj(out_tN)
            dy_sD[rows] += self._through_mlp(middle_tD, dy_sD[rows], gated, grads)
            if o_proj.weight.requires_grad:
                grads.add_product(o_proj.weight, dy_sD[rows], out_tN)
            if o_proj.bias is not None and o_proj.bias.requires_grad:
                grads.add(o_proj.bias, dy_sD[rows].sum(0, dtype=sum_dtype(dy_sD.dtype)))

    def _through_mlp(self, middle_tD: Tensor, dy_tD: Tensor, gated: GatedMlp | None, grads: GradSum) -> Tensor:
        """The gradient at the MLP's norm, which is beside the residual's."""
        norm2 = self.parts.norm2
        if gated is None:
            params = [*norm2.parameters(), *self.parts.mlp.parameters()]
            return tile_backward(self._mlp, params, middle_tD, dy_tD, grads)
        dh_tD = gated.backward(apply_norm(norm2, middle_tD), dy_tD, grads)
        return tile_backward(partial(apply_norm, norm2), norm2.parameters(), middle_tD, dh_tD, grads)

    def _all_heads(self, outs_ctnK: list[Tensor]) -> Tensor:
        """One tile of attention's output with the heads of all stages in the checkpoint's order, [t, H * K]."""
        H, K = self.parts.o_proj.in_features // self.parts.head_dim, self.parts.head_dim
        out_tHK = outs_ctnK[0].new_empty(outs_ctnK[0].shape[1], H, K)
        for stage, out_ctnK in zip(self.table.stages, outs_ctnK, strict=True):
            filled = [i for i, head in enumerate(h for r in stage.query_heads for h in r) if head != EMPTY]
            out_tnK = out_ctnK.transpose(0, 1).flatten(1, 2)
            heads = self._heads(stage.query_heads)
            if len(filled) < len(heads):
                where = torch.tensor(filled, device=heads.device)
                heads, out_tnK = heads[where], out_tnK[:, where]
            out_tHK.index_copy_(1, heads, out_tnK)
        return out_tHK.flatten(1)

    def _attention_backward(
        self, saved: Saved, attended: list[tuple[Kept, Kept]], dy_sD: Tensor, grads: GradSum
    ) -> None:
        """Adds to dy the gradient that comes through attention and norm1, which makes it dx."""
        stages, dh_sD = self.table.stages, torch.zeros_like(dy_sD)
        held = HeldHeads(self.table, self.rank, self._how(saved.docs))
        norm1, weights = partial(apply_norm, self.parts.norm1), list(self.parts.norm1.parameters())

        def send(i: int, projected: list[Tensor]) -> Sent:
            return self._send(projected, [attended[i][0].fetch, partial(self._output_grad, stages[i], dy_sD)])

        def through_norm(rows: slice, x_tD: Tensor) -> None:
            dy_sD[rows] += tile_backward(norm1, weights, x_tD, dh_sD[rows], grads)

        with phase("projections"):
            sent = deque(
                send(i, self._walk(saved, self._slices(stage))) for i, stage in enumerate(stages[: self.ahead])
            )
        for i, stage in enumerate(stages):
            (q, out, dout), new_kv = sent.popleft().wait()
            lse_nS, following = attended[i][1].fetch(), i + self.ahead
            if self.layout.overlap and following < len(stages):
                attended[following][0].prefetch()
            held.arrive(stage, new_kv)
            with phase("attention"), phase(f"stage {i}"):
                dq = held.attend_backward(stage, dout, q, out, lse_nS)
            del q, out, dout, new_kv, lse_nS
            leaving = [(self.q, stage.query_heads, dq)]
            del dq
            for load in self.table.loads_ending(i):
                with holding(STAGE):
                    dk_SmK, dv_SmK = held.take_grads(load)
                heads = self.table.loads[load].kv_heads
                leaving += [(self.k, heads, dk_SmK), (self.v, heads, dv_SmK)]
                del dk_SmK, dv_SmK
            with phase("projections"):
                arrived = self._bring_back(leaving)
                project = self._slices(stages[following]) if following < len(stages) else []
                last = i + 1 == len(stages)
                projected = self._walk(saved, project, arrived, dh_sD, grads, through_norm if last else None)
                del arrived
                if projected:
                    sent.append(send(following, projected))

    def _bring_back(self, leaving: list[tuple[Projection, Heads, Tensor]]) -> list[Arrived]:
        """Gradients of heads [S, n, K] -> on the tokens' ranks [c, s, n, K]; empties `leaving`."""
        under_way = [(p, heads, start_heads_to_tokens(d_SnK, self.group)) for p, heads, d_SnK in leaving]
        leaving.clear()
        return [(HeadSlice.of(p, self._heads(heads)), exchange.wait()) for p, heads, exchange in under_way]

    def _output_grad(self, stage: Stage, dy_sD: Tensor) -> Tensor:
        """dout [c, s, n, K] of a stage, from the gradient at the output projection."""
        heads, c = self._heads(stage.query_heads), self.group.size()
        weight_DN = take_head_columns(self.parts.o_proj.weight, heads, self.parts.head_dim)
        dout_csnK = dy_sD.new_empty(c, len(dy_sD), len(heads) // c, self.parts.head_dim)
        for rows in tile_slices(len(dy_sD), self.layout.tile_tokens):
            dout_tcnK = (dy_sD[rows] @ weight_DN).unflatten(1, (c, -1, self.parts.head_dim))
            dout_csnK[:, rows] = dout_tcnK.transpose(0, 1)
        return dout_csnK

    # ---- shared

    def _input_tiles(self, saved: Saved) -> Iterator[tuple[slice, Tensor]]:
        slices = tile_slices(len(saved.positions_s), self.layout.tile_tokens)
        return zip(slices, saved.x.tiles(slices, hold=self.layout.overlap), strict=True)

    def _rotation(self, h_tD: Tensor, positions_t: Tensor) -> tuple[Tensor, Tensor]:
        cos_1tK, sin_1tK = self.rotary(h_tD, positions_t[None])
        return cos_1tK[0], signed_sin(sin_1tK[0])

    def _heads(self, heads: Heads) -> Tensor:
        if heads not in self._indices:
            device = self.parts.q_proj.weight.device
            self._indices[heads] = torch.tensor(flat(heads), device=device)
        return self._indices[heads]

    def _how(self, docs: Docs) -> dict[str, Any]:
        return {
            "scale": self.parts.scale,
            "causal": True,
            "window": self.parts.window,
            "docs": docs,
            "kernel": self.layout.kernel,
            "blocks": self.layout.blocks,
        }


class _LayerFunction(torch.autograd.Function):
    """One node per layer. Weight gradients are returned like any other, so FSDP2 sees them in the usual way."""

    @staticmethod
    def forward(ctx, x_sD, layer, positions_s, docs, *params):
        ctx.layer, ctx.params, ctx.hooked = layer, params, layer.hooked
        ctx.saved = Saved(positions_s, docs, layer.store.keep(x_sD, layer.keeps.input))
        ctx.saved.before = layer.store.follow(ctx.saved)
        with phase(layer.name), phase("forward"):
            return layer.forward(x_sD, ctx.saved, keep=True)

    @staticmethod
    def backward(ctx, dy_sD):
        if ctx.saved is None:
            raise RuntimeError(RAN_ALREADY)
        grads = GradSum()
        ctx.saved.approach()
        with phase(ctx.layer.name), phase("backward"):
            dy_sD = dy_sD.clone() if ctx.hooked else dy_sD.contiguous()  # overwritten
            dx_sD = ctx.layer.backward(ctx.saved, dy_sD, grads)
        ctx.saved = None
        return dx_sD, None, None, None, *(grads.take_as(p) for p in ctx.params)
