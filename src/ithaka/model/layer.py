"""The decoder layer as one explicit schedule: forward and backward are plain loops over tiles and stages.

Shapes: s tokens on this rank, S in the sequence, t in a tile, D hidden, c ranks, n head slots per rank and stage,
K head dim. Tokens-sharded [c, s, n, K] and heads-sharded [S, n, K] as in dist/exchange.py.

Kept for backward: the layer's input, and attention's output with its log-sum-exp where the options say so.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ithaka.dist.exchange import Exchange, heads_to_tokens, start_heads_to_tokens, start_tokens_to_heads
from ithaka.memory.store import Kept, Store
from ithaka.model.families import LayerParts
from ithaka.ops.attention import attention, attention_backward
from ithaka.ops.stages import HeadSlice, Projection, take_head_columns
from ithaka.ops.tiles import GradSum, sum_dtype, tile_backward, tile_slices, weight_grad
from ithaka.plan.heads import EMPTY, HeadTable, Stage, flat

Docs = tuple[int, ...]


@dataclass(frozen=True)
class LayerOptions:
    """What the plan decided for one layer."""

    tile_tokens: int | None = None  # None: all of this rank's tokens at once
    keep_input: str = "device"  # tier of the layer's input
    keep_attention: str | None = None  # tier of attention's output; None: computed again in backward
    overlap: bool = True  # project and send the next stage while this one attends
    kernel: str = "auto"
    blocks: tuple[int, int] | None = None


@dataclass
class Saved:
    """What one forward leaves for its backward."""

    positions_s: Tensor
    docs: Docs
    x: Kept
    attended: list[tuple[Kept, Kept]] = field(default_factory=list)  # per stage: out_csnK, lse_nS


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
        layer: nn.Module,
        parts: LayerParts,
        rotary: nn.Module,
        group: dist.ProcessGroup,
        table: HeadTable,
        store: Store,
        options: LayerOptions,
    ) -> None:
        self.layer, self.parts, self.rotary, self.group = layer, parts, rotary, group
        self.table, self.store, self.options = table, store, options
        self.rank = group.rank()
        self.q = Projection(parts.q_proj, parts.q_norm, True, parts.head_dim)
        self.k = Projection(parts.k_proj, parts.k_norm, True, parts.head_dim)
        self.v = Projection(parts.v_proj, None, False, parts.head_dim)
        self._indices: dict[tuple[tuple[int, ...], ...], Tensor] = {}

    def __call__(self, x_sD: Tensor, positions_s: Tensor, docs: Docs) -> Tensor:
        if torch.is_grad_enabled():
            return _LayerFunction.apply(x_sD, self, positions_s, docs, *self.layer.parameters())  # type: ignore
        return self.forward(x_sD, Saved(positions_s, docs, Kept(x_sD)), keep=False)

    # ---- forward

    def forward(self, x_sD: Tensor, saved: Saved, keep: bool) -> Tensor:
        y_sD = x_sD.clone()
        if self.parts.o_proj.bias is not None:
            y_sD += self.parts.o_proj.bias
        for stage, out_csnK, lse_nS in self._attend(saved):
            self._add_attention_output(y_sD, stage, out_csnK)
            if keep and self.options.keep_attention is not None:
                saved.attended.append(self._keep_attention(out_csnK, lse_nS, self.options.keep_attention))
        for rows in tile_slices(len(y_sD), self.options.tile_tokens):
            y_sD[rows] += self._mlp(y_sD[rows])
        return y_sD

    def _attend(self, saved: Saved) -> Iterator[tuple[Stage, Tensor, Tensor]]:
        """Attention, stage by stage: yields the stage, its output back on the tokens' ranks, and its lse."""
        kv: dict[int, list[Tensor]] = {}
        for i, (stage, (q_SnK,), arrived) in enumerate(self._stages(saved, lambda _: [])):
            if stage.load is not None:
                kv[stage.load] = arrived
            out_SnK, lse_nS = self._attention(stage, q_SnK, kv, saved.docs)
            del q_SnK
            yield stage, heads_to_tokens(out_SnK, self.group), lse_nS
            for load in self.table.loads_ending(i):
                del kv[load]

    def _stages(self, saved: Saved, also) -> Iterator[tuple[Stage, list[Tensor], list[Tensor]]]:
        """Yields every stage with its received q, `also(stage)` (more tokens-sharded tensors), and new k, v.

        With overlap, the next stage is projected and sent before this one is handed out.
        """
        stages = self.table.stages
        sent = self._send(0, saved, also)
        for i, stage in enumerate(stages):
            received = sent.wait()
            more = i + 1 < len(stages)
            if more and self.options.overlap:
                sent = self._send(i + 1, saved, also)
            yield stage, *received
            del received
            if more and not self.options.overlap:
                sent = self._send(i + 1, saved, also)

    def _send(self, i: int, saved: Saved, also) -> Sent:
        stage = self.table.stages[i]
        slices = [HeadSlice.of(self.q, self._heads(stage.query_heads))]
        if stage.load is not None:
            kv_heads = self._heads(self.table.loads[stage.load].kv_heads)
            slices += [HeadSlice.of(self.k, kv_heads), HeadSlice.of(self.v, kv_heads)]
        q_csnK, *kv = self._project(saved, slices)
        return Sent(
            [start_tokens_to_heads(t, self.group) for t in [q_csnK, *also(stage)]],
            [start_tokens_to_heads(t, self.group) for t in kv],
        )

    def _project(self, saved: Saved, slices: list[HeadSlice]) -> list[Tensor]:
        """Each slice's heads for all local tokens, in exchange layout [c, s, n, K]."""
        num_tokens, c = len(saved.positions_s), self.group.size()
        sent: list[Tensor] = []
        for rows, x_tD in saved.x.tiles(tile_slices(num_tokens, self.options.tile_tokens)):
            h_tD = self.parts.norm1(x_tD)
            cos_tK, sin_tK = self._rotation(h_tD, saved.positions_s[rows])
            for i, part in enumerate(slices):
                t_tcnK = part.forward(h_tD, cos_tK, sin_tK).unflatten(1, (c, -1))
                if len(sent) <= i:
                    sent.append(t_tcnK.new_empty(c, num_tokens, *t_tcnK.shape[2:]))
                sent[i][:, rows] = t_tcnK.transpose(0, 1)
        return sent

    def _attention(
        self, stage: Stage, q_SnK: Tensor, kv: dict[int, list[Tensor]], docs: Docs
    ) -> tuple[Tensor, Tensor]:
        reads = stage.reads[self.rank]
        outs = []
        for read in reads:
            k_S1K, v_S1K = (t[:, read.kv_slot : read.kv_slot + 1] for t in kv[read.load])
            outs.append(attention(q_SnK[:, read.first : read.last], k_S1K, v_S1K, **self._how(docs)))
        if len(outs) == 1 and stage.is_full(self.rank):
            return outs[0]
        out_SnK = torch.zeros_like(q_SnK)
        lse_nS = q_SnK.new_zeros(q_SnK.shape[1], q_SnK.shape[0], dtype=sum_dtype(q_SnK.dtype))
        for read, (out, lse) in zip(reads, outs, strict=True):
            out_SnK[:, read.first : read.last] = out
            lse_nS[read.first : read.last] = lse
        return out_SnK, lse_nS

    def _add_attention_output(self, y_sD: Tensor, stage: Stage, out_csnK: Tensor) -> None:
        heads = self._heads(stage.query_heads)
        weight_DN = take_head_columns(self.parts.o_proj.weight, heads, self.parts.head_dim)
        for rows in tile_slices(len(y_sD), self.options.tile_tokens):
            out_tN = out_csnK[:, rows].transpose(0, 1).flatten(1)
            y_sD[rows].addmm_(out_tN, weight_DN.t())

    def _mlp(self, y_tD: Tensor) -> Tensor:
        return self.parts.mlp(self.parts.norm2(y_tD[None]))[0]

    def _keep_attention(self, out_csnK: Tensor, lse_nS: Tensor, tier: str) -> tuple[Kept, Kept]:
        return self.store.keep(out_csnK, tier), self.store.keep(lse_nS, tier)

    # ---- backward

    def backward(self, saved: Saved, dy_sD: Tensor, grads: GradSum) -> Tensor:
        """dx, written over dy; weight gradients go to `grads`."""
        attended = saved.attended or [
            self._keep_attention(out, lse, "device") for _, out, lse in self._attend(saved)
        ]
        self._mlp_backward(saved, attended, dy_sD, grads)
        dh_sD = self._attention_backward(saved, attended, dy_sD, grads)
        norm = self.parts.norm1
        for rows, x_tD in saved.x.tiles(tile_slices(len(dy_sD), self.options.tile_tokens)):
            dy_sD[rows] += tile_backward(norm, norm.parameters(), x_tD, dh_sD[rows], grads)
        return dy_sD

    def _mlp_backward(
        self, saved: Saved, attended: list[tuple[Kept, Kept]], dy_sD: Tensor, grads: GradSum
    ) -> None:
        """dy becomes the gradient at the sum of x and attention; also the output projection's weight gradient."""
        outs = [out.fetch() for out, _ in attended]
        o_proj = self.parts.o_proj
        params = [*self.parts.norm2.parameters(), *self.parts.mlp.parameters()]
        for rows, x_tD in saved.x.tiles(tile_slices(len(dy_sD), self.options.tile_tokens)):
            out_tN = self._all_heads(outs, rows)
            middle_tD = x_tD + o_proj(out_tN)
            dy_sD[rows] += tile_backward(self._mlp, params, middle_tD, dy_sD[rows], grads)
            if o_proj.weight.requires_grad:
                grads.add(o_proj.weight, weight_grad(dy_sD[rows], out_tN))
            if o_proj.bias is not None and o_proj.bias.requires_grad:
                grads.add(o_proj.bias, dy_sD[rows].sum(0, dtype=sum_dtype(dy_sD.dtype)))

    def _all_heads(self, outs: list[Tensor], rows: slice) -> Tensor:
        """One tile of attention's output with the heads of all stages in the checkpoint's order, [t, H * K]."""
        H, K = self.parts.o_proj.in_features // self.parts.head_dim, self.parts.head_dim
        out_tHK = outs[0].new_empty(rows.stop - rows.start, H, K)
        for stage, out_csnK in zip(self.table.stages, outs, strict=True):
            filled = [i for i, head in enumerate(h for r in stage.query_heads for h in r) if head != EMPTY]
            out_tnK = out_csnK[:, rows].transpose(0, 1).flatten(1, 2)
            heads = self._heads(stage.query_heads)
            if len(filled) < len(heads):
                where = torch.tensor(filled, device=heads.device)
                heads, out_tnK = heads[where], out_tnK[:, where]
            out_tHK.index_copy_(1, heads, out_tnK)
        return out_tHK.flatten(1)

    def _attention_backward(
        self, saved: Saved, attended: list[tuple[Kept, Kept]], dy_sD: Tensor, grads: GradSum
    ) -> Tensor:
        """The gradient at norm1's output."""
        dh_sD = torch.zeros_like(dy_sD)
        kv: dict[int, list[Tensor]] = {}
        dkv: dict[int, list[Tensor | None]] = {}
        kept = {id(stage): pair for stage, pair in zip(self.table.stages, attended, strict=True)}

        def also(stage: Stage) -> list[Tensor]:
            return [kept[id(stage)][0].fetch(), self._output_grad(stage, dy_sD)]

        for i, (stage, (q, out, dout), arrived) in enumerate(self._stages(saved, also)):
            if stage.load is not None:
                kv[stage.load] = arrived
                dkv[stage.load] = [None] * (2 * self.table.loads[stage.load].num_slots)
            lse_nS = kept[id(stage)][1].fetch()
            dq = self._stage_backward(stage, (dout, q, out, lse_nS), kv, dkv, saved.docs)
            del q, out, dout
            back = [(self.q, stage.query_heads, start_heads_to_tokens(dq, self.group))]
            del dq
            for load in self.table.loads_ending(i):
                back += self._send_back(load, kv.pop(load), dkv.pop(load))
            self._project_backward(saved, [(p, h, e.wait()) for p, h, e in back], dh_sD, grads)
        return dh_sD

    def _output_grad(self, stage: Stage, dy_sD: Tensor) -> Tensor:
        """dout [c, s, n, K] of a stage, from the gradient at the output projection."""
        heads, c = self._heads(stage.query_heads), self.group.size()
        weight_DN = take_head_columns(self.parts.o_proj.weight, heads, self.parts.head_dim)
        dout_csnK = dy_sD.new_empty(c, len(dy_sD), len(heads) // c, self.parts.head_dim)
        for rows in tile_slices(len(dy_sD), self.options.tile_tokens):
            dout_tcnK = (dy_sD[rows] @ weight_DN).unflatten(1, (c, -1, self.parts.head_dim))
            dout_csnK[:, rows] = dout_tcnK.transpose(0, 1)
        return dout_csnK

    def _stage_backward(self, stage: Stage, tensors, kv, dkv, docs: Docs) -> Tensor:
        """dq [S, n, K] of this rank's heads; dk and dv are added to `dkv`."""
        dout, q, out, lse_nS = tensors
        dq_SnK: Tensor | None = None
        for read in stage.reads[self.rank]:
            at = slice(read.first, read.last)
            k, v = (t[:, read.kv_slot : read.kv_slot + 1] for t in kv[read.load])
            dq, dk, dv = attention_backward(
                dout[:, at], q[:, at], k, v, out[:, at], lse_nS[at], **self._how(docs)
            )
            sums = dkv[read.load]
            for slot, grad in ((2 * read.kv_slot, dk), (2 * read.kv_slot + 1, dv)):
                have = sums[slot]
                sums[slot] = grad if have is None else have.to(sum_dtype(have.dtype)).add_(grad)
            if dq.shape == q.shape:
                return dq
            dq_SnK = torch.zeros_like(q) if dq_SnK is None else dq_SnK
            dq_SnK[:, at] = dq
        return torch.zeros_like(q) if dq_SnK is None else dq_SnK

    def _send_back(self, load: int, kv: list[Tensor], dkv: list[Tensor | None]):
        heads = self.table.loads[load].kv_heads
        for projection, like, grads in ((self.k, kv[0], dkv[0::2]), (self.v, kv[1], dkv[1::2])):
            if len(grads) == 1 and grads[0] is not None:
                d_SmK = grads[0].to(like.dtype)
            else:
                d_SmK = torch.zeros_like(like)
                for slot, grad in enumerate(grads):
                    if grad is not None:
                        d_SmK[:, slot : slot + 1] = grad
            yield projection, heads, start_heads_to_tokens(d_SmK, self.group)

    def _project_backward(self, saved: Saved, arrived, dh_sD: Tensor, grads: GradSum) -> None:
        """Takes the gradients of projected heads [c, s, n, K] back to norm1's output and to the weights."""
        slices = [(HeadSlice.of(proj, self._heads(heads)), d_csnK) for proj, heads, d_csnK in arrived]
        sums = GradSum()
        for rows, x_tD in saved.x.tiles(tile_slices(len(dh_sD), self.options.tile_tokens)):
            h_tD = self.parts.norm1(x_tD)
            cos_tK, sin_tK = self._rotation(h_tD, saved.positions_s[rows])
            for part, d_csnK in slices:
                d_tnK = d_csnK[:, rows].transpose(0, 1).flatten(1, 2)
                dh_sD[rows] += part.backward(d_tnK, h_tD, cos_tK, sin_tK, grads, sums)
        for part, _ in slices:
            part.finish(grads, sums)

    # ---- shared

    def _rotation(self, h_tD: Tensor, positions_t: Tensor) -> tuple[Tensor, Tensor]:
        cos_1tK, sin_1tK = self.rotary(h_tD, positions_t[None])
        return cos_1tK[0], sin_1tK[0]

    def _heads(self, heads: tuple[tuple[int, ...], ...]) -> Tensor:
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
            "kernel": self.options.kernel,
            "blocks": self.options.blocks,
        }


class _LayerFunction(torch.autograd.Function):
    """One node per layer. Weight gradients are returned like any other, so FSDP2 sees them in the usual way."""

    @staticmethod
    def forward(ctx, x_sD, layer, positions_s, docs, *params):
        ctx.layer, ctx.params = layer, params
        ctx.saved = Saved(positions_s, docs, layer.store.keep(x_sD, layer.options.keep_input))
        return layer.forward(x_sD, ctx.saved, keep=True)

    @staticmethod
    def backward(ctx, dy_sD):
        grads = GradSum()
        dx_sD = ctx.layer.backward(ctx.saved, dy_sD.contiguous(), grads)
        ctx.saved = None
        return dx_sD, None, None, None, *(grads.take_as(p) for p in ctx.params)
