"""The heads of one stage: project tokens to heads in exchange layout, attend on the rank that owns a head, and back.

Shapes: s tokens of this rank, t of a tile, S of this ring member (of the sequence, without a ring), D hidden size, K
head dim, c Ulysses ranks. In projections, n heads of all c ranks, N = n * K; in exchange layout [c, t, n, K], n slots
per rank; in attention, n query and m kv slots of this rank. Weights keep the checkpoint's order of heads; each stage
selects its rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ithaka.attention.blocks import AttentionSpec
from ithaka.blocks.linear import Linear, as_linear
from ithaka.blocks.tiles import BACKWARD_RAN_TWICE, GradSum, apply_norm, graph_backward, run_tile, sum_dtype
from ithaka.comm.exchange import start_heads_to_tokens, start_tokens_to_heads
from ithaka.layer.ring import ring_attention, ring_attention_backward
from ithaka.ops.fused import Positions, apply_rope
from ithaka.phases import MemoryCategory, allocating_for
from ithaka.sharding.heads import HeadTable, KvRead, Stage


@dataclass(frozen=True)
class Projection:
    """One of q, k and v: a linear map, an optional norm over the head dim, and whether RoPE is applied."""

    module: nn.Module  # a linear map, see `as_linear`
    norm: nn.Module | None
    uses_rope: bool
    head_dim: int


@dataclass(frozen=True)
class HeadSlice:
    """The rows of a projection for selected heads, in slot order."""

    projection: Projection
    heads_n: Tensor | None  # None: all heads, in the checkpoint's order
    linear: Linear

    @classmethod
    def select(cls, projection: Projection, heads_n: Tensor | None) -> "HeadSlice":
        return cls(projection, heads_n, as_linear(projection.module).select_heads(heads_n, projection.head_dim))

    @property
    def width(self) -> int:
        return len(self.linear.weight_ND)

    def project(self, h_tD: Tensor, positions: Positions, into_ctnK: Tensor) -> None:
        """Project, norm and rotate h into a tile in exchange layout."""
        is_plain = self.projection.norm is None and not self.projection.uses_rope
        if is_plain and len(into_ctnK) == 1:
            self.linear.write_to(into_ctnK[0].flatten(1), h_tD)
            return
        t_ctnK = self.apply_norm(self.linear(h_tD)).unflatten(1, (len(into_ctnK), -1)).transpose(0, 1)
        if self.projection.uses_rope:
            apply_rope(into_ctnK.transpose(1, 2), t_ctnK.transpose(1, 2), positions)
        else:
            into_ctnK.copy_(t_ctnK)

    def apply_norm(self, t_tN: Tensor) -> Tensor:
        """Return [t, n, K]."""
        t_tnK, norm = t_tN.unflatten(1, (-1, self.projection.head_dim)), self.projection.norm
        return t_tnK if norm is None else apply_norm(norm, t_tnK)


class ProjectionsBackward:
    """Backward of q, k and v to their common input, in one matrix product per tile.

    With one product, the sum over heads is rounded once, for any number of stages.
    """

    def __init__(self, slices: Sequence[HeadSlice]) -> None:
        self.slices = slices
        # M rows: all heads, then A of each adapter without dropout, which multiplies the result of `lora_down_grad`.
        adapters = [part.linear.a_rD for part in slices if part.linear.a_rD is not None and not part.linear.dropout]
        self.weight_MD = torch.cat([*(part.linear.weight_ND for part in slices), *adapters])
        self.sums = GradSum()

    def run_tile(
        self, head_grads: Sequence[Sequence[Tensor]], h_tD: Tensor, positions: Positions, grads: GradSum
    ) -> Tensor:
        """Return dh_tD. Adds weight gradients to the sums and norm gradients to `grads`.

        `head_grads`: for each projection, the gradients [c, t, n, K] of each stage or kv transfer, in order.
        """
        d_tM = h_tD.new_empty(len(h_tD), len(self.weight_MD))
        first, adapter_grads, dropped_grads, inverse = 0, [], [], positions.inverse
        for part, part_grads in zip(self.slices, head_grads, strict=True):
            d_tN = d_tM[:, first : first + part.width]
            self._backward_to_linear(part, part_grads, h_tD, inverse, d_tN, grads)
            dz_tr = part.linear.lora_down_grad(d_tN)
            part.linear.add_grads(d_tN, h_tD, dz_tr, self.sums)
            if dz_tr is not None and part.linear.dropout is not None:
                dropped_grads.append((part.linear, dz_tr))
            elif dz_tr is not None:
                adapter_grads.append(dz_tr)
            first += part.width
        if adapter_grads:
            torch.cat(adapter_grads, dim=1, out=d_tM[:, first:])
        dh_tD = d_tM @ self.weight_MD
        for linear, dz_tr in dropped_grads:
            linear.add_dropped_grad(dh_tD, dz_tr)
        return dh_tD

    def finish(self, grads: GradSum) -> None:
        """Add the summed gradients of the selected heads to the gradients of the projections."""
        for part in self.slices:
            as_linear(part.projection.module).add_head_grads(part.linear, part.heads_n, self.sums, grads)

    @staticmethod
    def _backward_to_linear(
        part: HeadSlice,
        head_grads: Sequence[Tensor],
        h_tD: Tensor,
        inverse: Positions,
        into_tN: Tensor,
        grads: GradSum,
    ) -> None:
        """Write the gradient at the linear map's output: through the inverse rotation, then through the norm."""
        into_tnK = into_tN.unflatten(1, (-1, part.projection.head_dim))
        into_cntK = into_tnK.unflatten(1, (len(head_grads[0]), -1)).permute(1, 2, 0, 3)
        for into, d_ctnK in zip(into_cntK.split([d.shape[2] for d in head_grads], dim=1), head_grads, strict=True):
            if part.projection.uses_rope:
                apply_rope(into, d_ctnK.transpose(1, 2), inverse)
            else:
                into.copy_(d_ctnK.transpose(1, 2))
        norm = part.projection.norm
        if norm is not None:
            t_tnK = part.linear(h_tD).unflatten(1, (-1, part.projection.head_dim))
            normed = run_tile(partial(apply_norm, norm), t_tnK)
            into_tnK.copy_(graph_backward(*normed, norm.parameters(), into_tnK, grads))


def join_slots(outs_ctnK: Sequence[Tensor]) -> Tensor:
    """Concatenate the slots of all stages to [t, Q, K], ordered by rank and then by stage. May alias its input; do
    not write to it."""
    outs_tcnK = [out_ctnK.transpose(0, 1) for out_ctnK in outs_ctnK]
    return (outs_tcnK[0] if len(outs_tcnK) == 1 else torch.cat(outs_tcnK, dim=2)).flatten(1, 2)


class StagedAttention:
    """Attention of this rank's heads, stage by stage. Holds a kv transfer from its first to its last stage.

    `ring`: the ranks with the same heads of other tokens.
    """

    def __init__(self, table: HeadTable, rank: int, ring: dist.ProcessGroup, spec: AttentionSpec) -> None:
        self.table, self.rank, self.ring, self.spec = table, rank, ring, spec
        self._kv: dict[int, list[Tensor]] = {}
        self._kv_grads: dict[int, list[Tensor]] = {}  # dk and dv, in fp32 if several calls add to them

    def attend(self, stage: Stage, q_SnK: Tensor, *kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return out_SnK and lse_nS of this rank's slots, 0 in empty slots. `kv`: k_SmK and v_SmK of a new transfer."""
        self._add_kv(stage, kv)
        reads = stage.reads[self.rank]
        if len(reads) == 1 and stage.is_full(self.rank):
            return ring_attention(q_SnK, *self._slots(self._kv, reads[0]), self.ring, self.spec)
        out_SnK = torch.zeros_like(q_SnK)
        lse_nS = q_SnK.new_zeros(q_SnK.shape[1], q_SnK.shape[0], dtype=sum_dtype(q_SnK.dtype))
        for read in reads:
            slots = slice(read.first, read.last)
            kv_slots = self._slots(self._kv, read)
            out_SnK[:, slots], lse_nS[slots] = ring_attention(q_SnK[:, slots], *kv_slots, self.ring, self.spec)
        return out_SnK, lse_nS

    def attend_backward(self, stage: Stage, q: Tensor, out: Tensor, dout: Tensor, *kv_and_lse: Tensor) -> Tensor:
        """Return dq_SnK of this rank's slots, written over `out` (empty slots stay 0), and accumulate dk and dv.

        `kv_and_lse`: k_SmK and v_SmK of a new kv transfer, if there is one, and lse_nS.
        """
        *kv, lse_nS = kv_and_lse
        self._add_kv(stage, kv)
        for read in stage.reads[self.rank]:
            slots = slice(read.first, read.last)
            inputs = (dout[:, slots], q[:, slots], *self._slots(self._kv, read), out[:, slots], lse_nS[slots])
            if self._is_only_read(read):
                self._kv_grads[read.kv_transfer] = list(ring_attention_backward(*inputs, None, self.ring, self.spec))
                continue
            if read.kv_transfer not in self._kv_grads:
                self._kv_grads[read.kv_transfer] = self._zeros(read.kv_transfer)
            ring_attention_backward(*inputs, self._slots(self._kv_grads, read), self.ring, self.spec)
        return out

    def drop(self, kv_transfer: int) -> None:
        del self._kv[kv_transfer]

    def take_grads(self, kv_transfer: int) -> Iterator[Tensor]:
        """Yield dk_SmK, then dv_SmK, rounded once to the dtype of the kv transfer; drop it."""
        sums = self._kv_grads.pop(kv_transfer, None) or self._zeros(kv_transfer)
        dtype = self._kv.pop(kv_transfer)[0].dtype
        while sums:
            with allocating_for(MemoryCategory.STAGE):
                d_SmK = [sums.pop(0).to(dtype)]
            yield d_SmK.pop()

    def _add_kv(self, stage: Stage, kv: Sequence[Tensor]) -> None:
        if kv:
            assert stage.kv_transfer is not None
            self._kv[stage.kv_transfer] = list(kv)

    def _is_only_read(self, read: KvRead) -> bool:
        """Whether no other read uses this kv transfer, and this one uses all of it."""
        reads = [
            other
            for stage in self.table.stages
            for other in stage.reads[self.rank]
            if other.kv_transfer == read.kv_transfer
        ]
        return reads == [read] and read.num_kv == self.table.kv_transfers[read.kv_transfer].num_slots

    def _zeros(self, kv_transfer: int) -> list[Tensor]:
        return [torch.zeros_like(t, dtype=sum_dtype(t.dtype)) for t in self._kv[kv_transfer]]

    @staticmethod
    def _slots(kv_transfers: dict[int, list[Tensor]], read: KvRead) -> tuple[Tensor, Tensor]:
        k, v = (t[:, read.kv_slot : read.kv_slot + read.num_kv] for t in kv_transfers[read.kv_transfer])
        return k, v


class ExchangedAttention(torch.autograd.Function):
    """Exchange, attention and exchange back for a table of one stage. Saves q, k, v, out and lse.

    A single autograd node: with several, the order of collectives would follow the graph, which differs between ranks
    with and without empty slots.
    """

    @staticmethod
    def forward(ctx, table: HeadTable, group, ring, spec: AttentionSpec, q_csnK, k_csmK, v_csmK):
        (ctx.stage,), ctx.group = table.stages, group
        ctx.attention = StagedAttention(table, group.rank(), ring, spec)
        q_SnK, k_SmK, v_SmK = (start_tokens_to_heads(t, group).wait() for t in (q_csnK, k_csmK, v_csmK))
        out_SnK, lse_nS = ctx.attention.attend(ctx.stage, q_SnK, k_SmK, v_SmK)
        ctx.saved = q_SnK, out_SnK, lse_nS
        return start_heads_to_tokens(out_SnK, group).wait()

    @staticmethod
    def backward(ctx, dout_csnK):
        if ctx.saved is None:
            raise RuntimeError(BACKWARD_RAN_TWICE)
        q_SnK, out_SnK, lse_nS = ctx.saved
        dout_SnK = start_tokens_to_heads(dout_csnK.contiguous(), ctx.group).wait()
        dq_SnK = ctx.attention.attend_backward(ctx.stage, q_SnK, out_SnK.clone(), dout_SnK, lse_nS)
        dq_csnK = start_heads_to_tokens(dq_SnK, ctx.group).wait()
        dkv = [
            start_heads_to_tokens(d_SmK, ctx.group).wait() for d_SmK in ctx.attention.take_grads(ctx.stage.kv_transfer)
        ]
        ctx.saved = ctx.attention = None
        return None, None, None, None, dq_csnK, *dkv
