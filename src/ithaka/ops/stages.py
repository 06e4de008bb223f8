"""The heads of one stage: projected from tokens into exchange layout, attended to by their owner, and back.

Shapes: t tokens of a tile, S of the sequence, D hidden, K head dim, H all heads; in projections n = c * slots heads
of the stage over all c ranks, or in exchange layout [c, t, n, K] the slots of each; in attention n query slots and
m kv slots of this rank.
Heads are taken from the weights in the checkpoint's order; nothing is permuted on disk.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ithaka.dist.exchange import heads_to_tokens, tokens_to_heads
from ithaka.ops.attention import attention, attention_backward
from ithaka.ops.fused import rotate
from ithaka.ops.tiles import GradSum, apply_norm, sum_dtype, tile_backward
from ithaka.plan.heads import HeadTable, Read, Stage

RAN_ALREADY = "a layer's backward ran already and kept nothing; call the model again instead of using retain_graph"


@dataclass(frozen=True)
class Projection:
    """One of q, k, v: a linear map, an optional norm over the head dim, and whether RoPE turns it."""

    linear: nn.Linear
    norm: nn.Module | None
    rotates: bool
    head_dim: int


@dataclass
class HeadSlice:
    """The rows of a projection that belong to `heads`; made once per stage and pass."""

    projection: Projection
    heads_n: Tensor
    weight: Tensor  # [n * K, D]
    bias: Tensor | None

    @classmethod
    def of(cls, projection: Projection, heads_n: Tensor) -> "HeadSlice":
        linear, K = projection.linear, projection.head_dim
        weight = take_heads(linear.weight, heads_n, K)
        bias = None if linear.bias is None else take_heads(linear.bias, heads_n, K)
        return cls(projection, heads_n, weight, bias)

    def forward(self, h_tD: Tensor, cos_tK: Tensor, sin_tK: Tensor, into_ctnK: Tensor) -> None:
        """Projected, normed, turned, and written into a tile of exchange layout."""
        t_tnK = self._linear(h_tD)
        if self.projection.norm is not None:
            t_tnK = apply_norm(self.projection.norm, t_tnK)
        t_ctnK = t_tnK.unflatten(1, (len(into_ctnK), -1)).transpose(0, 1)
        if self.projection.rotates:
            rotate(into_ctnK.transpose(1, 2), t_ctnK.transpose(1, 2), cos_tK, sin_tK)
        else:
            into_ctnK.copy_(t_ctnK)

    def backward(
        self,
        d_ctnK: Tensor,
        h_tD: Tensor,
        cos_tK: Tensor,
        sin_tK: Tensor,
        dh_tD: Tensor,
        grads: GradSum,
        sums: GradSum,
    ) -> None:
        """Adds to dh. The norm's gradient goes to `grads`; this slice's weight and bias gradients to `sums`."""
        c, t, n, K = d_ctnK.shape
        d_tnK = d_ctnK.new_empty(t, c * n, K)
        into_cntK = d_tnK.unflatten(1, (c, n)).permute(1, 2, 0, 3)
        if self.projection.rotates:
            rotate(into_cntK, d_ctnK.transpose(1, 2), cos_tK, -sin_tK)  # a rotation's transpose turns the other way
        else:
            into_cntK.copy_(d_ctnK.transpose(1, 2))
        norm = self.projection.norm
        if norm is not None:
            d_tnK = tile_backward(partial(apply_norm, norm), norm.parameters(), self._linear(h_tD), d_tnK, grads)
        d_tN = d_tnK.flatten(1)
        if self.projection.linear.weight.requires_grad:
            sums.add_product(self.weight, d_tN, h_tD)
        if self.bias is not None and self.projection.linear.bias.requires_grad:
            sums.add(self.bias, d_tN.sum(0, dtype=sum_dtype(d_tN.dtype)))
        dh_tD.addmm_(d_tN, self.weight)

    def finish(self, grads: GradSum, sums: GradSum) -> None:
        """Adds this slice's summed gradients to those of the whole projection."""
        linear = self.projection.linear
        grads.add_heads(linear.weight, self.heads_n, sums.take(self.weight))
        if self.bias is not None:
            grads.add_heads(linear.bias, self.heads_n, sums.take(self.bias))

    def _linear(self, h_tD: Tensor) -> Tensor:
        return nn.functional.linear(h_tD, self.weight, self.bias).unflatten(1, (-1, self.projection.head_dim))


def take_heads(rows: Tensor, heads_n: Tensor, head_dim: int) -> Tensor:
    """The rows of `heads` from [H * K, ...], as [n * K, ...]."""
    return rows.view(-1, head_dim, *rows.shape[1:]).index_select(0, heads_n).flatten(0, 1)


def take_head_columns(weight_DN: Tensor, heads_n: Tensor, head_dim: int) -> Tensor:
    """The columns of `heads` from [D, H * K], as [D, n * K]."""
    return weight_DN.unflatten(1, (-1, head_dim)).index_select(1, heads_n).flatten(1)


def signed_sin(sin_tK: Tensor) -> Tensor:
    """Hugging Face's table of sines (the same in both halves) with the signs that `rotate` wants."""
    first, second = sin_tK.chunk(2, dim=-1)
    return torch.cat((-first, second), dim=-1)


class HeldHeads:
    """k and v of the loads this rank holds during one pass over the stages, and attention to them."""

    def __init__(self, table: HeadTable, rank: int, how: dict[str, Any]) -> None:
        self.table, self.rank, self.how = table, rank, how
        self._kv: dict[int, list[Tensor]] = {}
        self._sums: dict[int, list[Tensor]] = {}  # dk, dv in fp32: several stages add to them

    def arrive(self, stage: Stage, kv: list[Tensor]) -> None:
        """Takes the k_SmK and v_SmK that came with a stage, if any did."""
        if stage.load is not None:
            self._kv[stage.load] = kv

    def drop(self, load: int) -> None:
        del self._kv[load]

    def attend(self, stage: Stage, q_SnK: Tensor) -> tuple[Tensor, Tensor]:
        """out_SnK and lse_nS of this rank's slots; zero in empty ones."""
        reads = stage.reads[self.rank]
        if len(reads) == 1 and stage.is_full(self.rank):
            return attention(q_SnK, *self._slot(self._kv, reads[0]), **self.how)
        out_SnK = torch.zeros_like(q_SnK)
        lse_nS = q_SnK.new_zeros(q_SnK.shape[1], q_SnK.shape[0], dtype=sum_dtype(q_SnK.dtype))
        for read in reads:
            at = slice(read.first, read.last)
            out_SnK[:, at], lse_nS[at] = attention(q_SnK[:, at], *self._slot(self._kv, read), **self.how)
        return out_SnK, lse_nS

    def attend_backward(self, stage: Stage, dout: Tensor, q: Tensor, out: Tensor, lse_nS: Tensor) -> Tensor:
        """dq_SnK of this rank's slots, written over `out` (empty slots stay zero); dk, dv join their load's sums."""
        for read in stage.reads[self.rank]:
            at = slice(read.first, read.last)
            if read.load not in self._sums:
                wide = sum_dtype(q.dtype)
                self._sums[read.load] = [torch.zeros_like(t, dtype=wide) for t in self._kv[read.load]]
            k_S1K, v_S1K = self._slot(self._kv, read)
            dk_S1K, dv_S1K = self._slot(self._sums, read)
            attention_backward(
                dout[:, at], q[:, at], k_S1K, v_S1K, out[:, at], lse_nS[at], **self.how, sums=(dk_S1K, dv_S1K)
            )
        return out

    def take_grads(self, load: int) -> tuple[Tensor, Tensor]:
        """dk_SmK and dv_SmK of a load, rounded once to its dtype; the load is dropped."""
        k_SmK, v_SmK = self._kv.pop(load)
        dk_SmK, dv_SmK = self._sums.pop(load, None) or (torch.zeros_like(k_SmK), torch.zeros_like(v_SmK))
        return dk_SmK.to(k_SmK.dtype), dv_SmK.to(v_SmK.dtype)

    @staticmethod
    def _slot(of_loads: dict[int, list[Tensor]], read: Read) -> list[Tensor]:
        return [t[:, read.kv_slot : read.kv_slot + 1] for t in of_loads[read.load]]


def stages_attention(
    table: HeadTable, group: dist.ProcessGroup, how: dict[str, Any], projected: list[Tensor]
) -> list[Tensor]:
    """Exchange, attention and exchange back of all stages, differentiable; keeps q, k, v, out and lse.

    `projected`: per stage q_csnK, and k_csmK, v_csmK where a load arrives. Returns out_csnK of every stage.
    """
    return list(_StagesAttention.apply(table, group, how, *projected))


class _StagesAttention(torch.autograd.Function):
    """One node and not several: autograd orders nodes by what a rank's graph looks like, and ranks with empty slots
    have other graphs, so that their collectives would not meet.
    """

    @staticmethod
    def forward(ctx, table, group, how, *projected):
        ctx.table, ctx.group, ctx.kept = table, group, []
        ctx.held = HeldHeads(table, group.rank(), how)
        arriving = iter([tokens_to_heads(t, group) for t in projected])
        outs = []
        for stage in table.stages:
            q_SnK = next(arriving)
            ctx.held.arrive(stage, [] if stage.load is None else [next(arriving), next(arriving)])
            out_SnK, lse_nS = ctx.held.attend(stage, q_SnK)
            ctx.kept.append((q_SnK, out_SnK, lse_nS))
            outs.append(heads_to_tokens(out_SnK, group))
        return tuple(outs)

    @staticmethod
    def backward(ctx, *douts_csnK):
        if ctx.kept is None:
            raise RuntimeError(RAN_ALREADY)
        table, group = ctx.table, ctx.group
        dqs = []
        for stage, dout_csnK, (q, out, lse) in zip(table.stages, douts_csnK, ctx.kept, strict=True):
            dout = tokens_to_heads(dout_csnK.contiguous(), group)
            dq = ctx.held.attend_backward(stage, dout, q, out.clone(), lse)
            dqs.append(heads_to_tokens(dq, group))
        grads = []
        for stage, dq in zip(table.stages, dqs, strict=True):
            dkv = () if stage.load is None else ctx.held.take_grads(stage.load)
            grads += [dq, *(heads_to_tokens(d, group) for d in dkv)]
        ctx.kept = None
        return None, None, None, *grads
