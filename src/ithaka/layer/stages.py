"""The heads of one stage: projected from tokens into exchange layout, attended to by the rank that owns them, and back.

Shapes: s tokens of this rank, t of a tile, S of this ring member (of the sequence, without a ring), D hidden, K head
dim, c Ulysses ranks. In projections, n heads of all c ranks, N = n * K; in exchange layout [c, t, n, K], n slots
per rank; in attention, n query and m kv slots of this rank. Heads are taken from the weights in the checkpoint's order;
nothing is permuted on disk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ithaka.attention.blocks import AttentionSpec
from ithaka.attention.fused import Positions, rotate
from ithaka.dist.exchange import start_heads_to_tokens, start_tokens_to_heads
from ithaka.layer.linear import Linear, as_linear
from ithaka.layer.ring import ring_attention, ring_attention_backward
from ithaka.layer.tiles import RAN_ALREADY, GradSum, apply_norm, graph_backward, run_tile, sum_dtype
from ithaka.phases import Holder, allocating_for
from ithaka.plan.heads import HeadTable, KvLoad, KvRead, Stage


@dataclass(frozen=True)
class Projection:
    """One of q, k, v: a linear map, an optional norm over the head dim, and whether RoPE turns it."""

    module: nn.Module  # a linear map, see `linear_of`
    norm: nn.Module | None
    rotates: bool
    head_dim: int


@dataclass(frozen=True)
class HeadSlice:
    """The rows of a projection for some heads, in the order of their slots."""

    projection: Projection
    heads_n: Tensor | None  # None: all heads, in the checkpoint's order
    linear: Linear

    @classmethod
    def of(cls, projection: Projection, heads_n: Tensor | None) -> "HeadSlice":
        return cls(projection, heads_n, as_linear(projection.module).of_heads(heads_n, projection.head_dim))

    @property
    def width(self) -> int:
        return len(self.linear.weight_ND)

    def project(self, h_tD: Tensor, positions: Positions, into_ctnK: Tensor) -> None:
        """Projects, norms and rotates h into a tile in exchange layout."""
        plain = self.projection.norm is None and not self.projection.rotates
        if plain and len(into_ctnK) == 1:
            self.linear.write_to(into_ctnK[0].flatten(1), h_tD)
            return
        t_ctnK = self.normed(self.linear(h_tD)).unflatten(1, (len(into_ctnK), -1)).transpose(0, 1)
        if self.projection.rotates:
            rotate(into_ctnK.transpose(1, 2), t_ctnK.transpose(1, 2), positions)
        else:
            into_ctnK.copy_(t_ctnK)

    def normed(self, t_tN: Tensor) -> Tensor:
        """[t, n, K]"""
        t_tnK, norm = t_tN.unflatten(1, (-1, self.projection.head_dim)), self.projection.norm
        return t_tnK if norm is None else apply_norm(norm, t_tnK)


class ProjectionsBackward:
    """From the gradients of all heads of q, k and v to that of their common input, in one product per tile.

    One product, so that the sum over heads is rounded once, whatever the number of stages.
    `pieces`: for each projection, the gradients [c, s, n, K] of each stage or load; a rank's heads are those of the
    first, then of the second, ...
    """

    def __init__(self, slices: Sequence[HeadSlice], pieces: Sequence[list[Tensor]]) -> None:
        self.slices, self.pieces = slices, pieces
        # Of M rows: those of all heads, then adapters' A, which multiply the reduced gradients in the same product.
        adapters = [part.linear.a_rD for part in slices if part.linear.a_rD is not None]
        self.weight_MD = torch.cat([*(part.linear.weight_ND for part in slices), *adapters])
        self.sums = GradSum()

    def tile(self, rows: slice, h_tD: Tensor, positions: Positions, grads: GradSum) -> Tensor:
        """dh_tD of the tokens `rows`. Adds weight gradients to the sums, and those of norms to `grads`."""
        d_tM = h_tD.new_empty(len(h_tD), len(self.weight_MD))
        first, reduced, back = 0, [], positions.back
        for part, pieces in zip(self.slices, self.pieces, strict=True):
            d_tN = d_tM[:, first : first + part.width]
            self._at_linear(part, [piece[:, rows] for piece in pieces], h_tD, back, d_tN, grads)
            dz_tr = part.linear.reduced_grad(d_tN)
            part.linear.add_grads(d_tN, h_tD, dz_tr, self.sums)
            reduced += [] if dz_tr is None else [dz_tr]
            first += part.width
        if reduced:
            torch.cat(reduced, dim=1, out=d_tM[:, first:])
        return d_tM @ self.weight_MD

    def finish(self, grads: GradSum) -> None:
        """Adds the summed gradients, head by head, to those of the whole projections."""
        for part in self.slices:
            as_linear(part.projection.module).add_sums(part.linear, part.heads_n, self.sums, grads)

    @staticmethod
    def _at_linear(
        part: HeadSlice, pieces: list[Tensor], h_tD: Tensor, back: Positions, into_tN: Tensor, grads: GradSum
    ) -> None:
        """Gathers the gradient at the linear map's output: rotated back, then through the norm."""
        into_tnK = into_tN.unflatten(1, (-1, part.projection.head_dim))
        into_cntK = into_tnK.unflatten(1, (len(pieces[0]), -1)).permute(1, 2, 0, 3)
        for into, d_ctnK in zip(into_cntK.split([piece.shape[2] for piece in pieces], dim=1), pieces, strict=True):
            if part.projection.rotates:
                rotate(into, d_ctnK.transpose(1, 2), back)
            else:
                into.copy_(d_ctnK.transpose(1, 2))
        norm = part.projection.norm
        if norm is not None:
            t_tnK = part.linear(h_tD).unflatten(1, (-1, part.projection.head_dim))
            normed = run_tile(partial(apply_norm, norm), t_tnK)
            into_tnK.copy_(graph_backward(*normed, norm.parameters(), into_tnK, grads))


def join_heads(outs_ctnK: Sequence[Tensor]) -> Tensor:
    """The heads of all stages side by side, [t, N]: rank by rank, and of each rank stage by stage. Read only: of one
    stage on one rank, they are the same memory."""
    outs_tcnK = [out_ctnK.transpose(0, 1) for out_ctnK in outs_ctnK]
    return (outs_tcnK[0] if len(outs_tcnK) == 1 else torch.cat(outs_tcnK, dim=2)).flatten(1)


class HeldHeads:
    """The k and v that this rank holds during one pass over the stages, and attention to them.

    `ring`: ranks with the same heads of other tokens.
    """

    def __init__(self, table: HeadTable, rank: int, ring: dist.ProcessGroup, how: AttentionSpec) -> None:
        self.table, self.rank, self.ring, self.how = table, rank, ring, how
        self._kv: dict[int, list[Tensor]] = {}
        self._sums: dict[int, list[Tensor]] = {}  # dk, dv: in fp32 where several calls add to them

    def attend(self, stage: Stage, q_SnK: Tensor, *kv: Tensor) -> tuple[Tensor, Tensor]:
        """out_SnK and lse_nS of this rank's slots, zero in empty ones. `kv`: k_SmK and v_SmK, if a load arrives."""
        self._arrive(stage, kv)
        reads = stage.reads[self.rank]
        if len(reads) == 1 and stage.is_full(self.rank):
            return ring_attention(q_SnK, *self._slot(self._kv, reads[0]), self.ring, self.how)
        out_SnK = torch.zeros_like(q_SnK)
        lse_nS = q_SnK.new_zeros(q_SnK.shape[1], q_SnK.shape[0], dtype=sum_dtype(q_SnK.dtype))
        for read in reads:
            at = slice(read.first, read.last)
            kv_slot = self._slot(self._kv, read)
            out_SnK[:, at], lse_nS[at] = ring_attention(q_SnK[:, at], *kv_slot, self.ring, self.how)
        return out_SnK, lse_nS

    def attend_backward(self, stage: Stage, q: Tensor, out: Tensor, dout: Tensor, *kv_and_lse: Tensor) -> Tensor:
        """dq_SnK of this rank's slots, written over `out` (empty slots stay zero); adds to the sums of dk and dv.

        `kv_and_lse`: k_SmK and v_SmK, if a load arrives, and always lse_nS.
        """
        *kv, lse_nS = kv_and_lse
        self._arrive(stage, kv)
        for read in stage.reads[self.rank]:
            at = slice(read.first, read.last)
            of_rows = (dout[:, at], q[:, at], *self._slot(self._kv, read), out[:, at], lse_nS[at])
            if self._is_only(read):
                self._sums[read.load] = list(ring_attention_backward(*of_rows, None, self.ring, self.how))
                continue
            if read.load not in self._sums:
                self._sums[read.load] = self._zeros(read.load)
            ring_attention_backward(*of_rows, self._slot(self._sums, read), self.ring, self.how)
        return out

    def drop(self, load: int) -> None:
        del self._kv[load]

    def take_grads(self, load: int) -> Iterator[Tensor]:
        """Yields dk_SmK, then dv_SmK, rounded once to the load's dtype; drops the load."""
        sums = self._sums.pop(load, None) or self._zeros(load)
        dtype = self._kv.pop(load)[0].dtype
        while sums:
            with allocating_for(Holder.STAGE):
                d_SmK = [sums.pop(0).to(dtype)]
            yield d_SmK.pop()

    def _arrive(self, stage: Stage, kv: Sequence[Tensor]) -> None:
        if kv:
            assert stage.load is not None
            self._kv[stage.load] = list(kv)

    def _is_only(self, read: KvRead) -> bool:
        """Whether it has all of its load, and no stage has another."""
        reads = [other for stage in self.table.stages for other in stage.reads[self.rank] if other.load == read.load]
        return reads == [read] and read.num_kv == self.table.loads[read.load].num_slots

    def _zeros(self, load: int) -> list[Tensor]:
        return [torch.zeros_like(t, dtype=sum_dtype(t.dtype)) for t in self._kv[load]]

    @staticmethod
    def _slot(of_loads: dict[int, list[Tensor]], read: KvRead) -> tuple[Tensor, Tensor]:
        k, v = (t[:, read.kv_slot : read.kv_slot + read.num_kv] for t in of_loads[read.load])
        return k, v


class StagesAttention(torch.autograd.Function):
    """Exchange, attention and exchange back of all stages, differentiable; keeps q, k, v, out and lse.

    Per rank, q and the result hold the slots of all stages in order, and k and v those of all loads. A single node:
    autograd orders nodes by the graph, and ranks with empty slots have a different one, so that with several nodes
    their collectives would not match.
    """

    @staticmethod
    def forward(ctx, table: HeadTable, group, ring, how: AttentionSpec, q_csnK, k_csmK, v_csmK):
        ctx.table, ctx.group, ctx.kept = table, group, []
        ctx.held = HeldHeads(table, group.rank(), ring, how)
        loads = list(zip(*(_split(t, table.loads) for t in (k_csmK, v_csmK)), strict=True))
        outs = []
        for stage, q in zip(table.stages, _split(q_csnK, table.stages), strict=True):
            kv = () if stage.load is None else loads[stage.load]
            q_SnK, *new_kv = (start_tokens_to_heads(t.contiguous(), group).wait() for t in (q, *kv))
            out_SnK, lse_nS = ctx.held.attend(stage, q_SnK, *new_kv)
            ctx.kept.append((q_SnK, out_SnK, lse_nS))
            outs.append(start_heads_to_tokens(out_SnK, group).wait())
        return _joined(outs)

    @staticmethod
    def backward(ctx, dout_csnK):
        if ctx.kept is None:
            raise RuntimeError(RAN_ALREADY)
        table, group = ctx.table, ctx.group
        dqs = []
        for stage, dout, (q, out, lse) in zip(table.stages, _split(dout_csnK, table.stages), ctx.kept, strict=True):
            dout_SnK = start_tokens_to_heads(dout.contiguous(), group).wait()
            dq_SnK = ctx.held.attend_backward(stage, q, out.clone(), dout_SnK, lse)
            dqs.append(start_heads_to_tokens(dq_SnK, group).wait())
        dkvs = [
            [start_heads_to_tokens(d_SmK, group).wait() for d_SmK in ctx.held.take_grads(load)]
            for load in range(len(table.loads))
        ]
        ctx.kept = ctx.held = None
        return None, None, None, None, *(_joined(parts) for parts in (dqs, *zip(*dkvs, strict=True)))


def _split(t_csnK: Tensor, parts: Sequence[Stage | KvLoad]) -> tuple[Tensor, ...]:
    return t_csnK.split([part.num_slots for part in parts], dim=2)


def _joined(parts_csnK: Sequence[Tensor]) -> Tensor:
    return parts_csnK[0] if len(parts_csnK) == 1 else torch.cat(list(parts_csnK), dim=2)
