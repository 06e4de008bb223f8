"""Attention of the heads of one stage, on the rank that owns them.

Shapes: t tokens of a tile, S of this ring member (of the sequence, without a ring), K head dim, c
Ulysses ranks, n query and m kv slots of this rank; in exchange layout [c, t, n, K].
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ithaka.attention.blocks import AttentionSpec
from ithaka.blocks.tiles import BACKWARD_RAN_TWICE, sum_dtype
from ithaka.comm.exchange import start_heads_to_tokens, start_tokens_to_heads
from ithaka.facts.heads import HeadTable, KvRead, Stage
from ithaka.layer.ring import ring_attention, ring_attention_backward
from ithaka.phases import MemoryCategory, allocating_for


def join_slots(outs_ctnK: Sequence[Tensor]) -> Tensor:
    """Concatenate the slots of all stages to [t, Q, K], ordered by rank and then by stage. May
    alias its input; do not write to it."""
    outs_tcnK = [out_ctnK.transpose(0, 1) for out_ctnK in outs_ctnK]
    joined_tcnK = outs_tcnK[0] if len(outs_tcnK) == 1 else torch.cat(outs_tcnK, dim=2)
    return joined_tcnK.flatten(1, 2)


class StagedAttention:
    """Attention of this rank's heads, stage by stage. Holds a kv transfer from its first to its
    last stage. `ring`: the ranks with the same heads of other tokens."""

    def __init__(
        self, table: HeadTable, rank: int, ring: dist.ProcessGroup, spec: AttentionSpec
    ) -> None:
        self.table = table
        self.rank = rank
        self.ring = ring
        self.spec = spec
        self._kv: dict[int, list[Tensor]] = {}
        # dk and dv, in fp32 if several calls add to them
        self._kv_grads: dict[int, list[Tensor]] = {}

    def attend(self, stage: Stage, q_SnK: Tensor, *kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return out_SnK and lse_nS of this rank's slots, 0 in empty slots. `kv`: k_SmK and v_SmK
        of a new transfer."""
        self._add_kv(stage, kv)
        reads = stage.reads[self.rank]
        if len(reads) == 1 and stage.is_full(self.rank):
            return ring_attention(q_SnK, *self._slots(self._kv, reads[0]), self.ring, self.spec)
        out_SnK = torch.zeros_like(q_SnK)
        lse_nS = q_SnK.new_zeros(q_SnK.shape[1], q_SnK.shape[0], dtype=sum_dtype(q_SnK.dtype))
        for read in reads:
            slots = slice(read.first, read.last)
            kv_slots = self._slots(self._kv, read)
            out_SnK[:, slots], lse_nS[slots] = ring_attention(
                q_SnK[:, slots], *kv_slots, self.ring, self.spec
            )
        return out_SnK, lse_nS

    def attend_backward(
        self, stage: Stage, q: Tensor, out: Tensor, dout: Tensor, *kv_and_lse: Tensor
    ) -> Tensor:
        """Return dq_SnK of this rank's slots, written over `out` (empty slots stay 0), and
        accumulate dk and dv.

        `kv_and_lse`: k_SmK and v_SmK of a new kv transfer, if there is one, and lse_nS.
        """
        *kv, lse_nS = kv_and_lse
        self._add_kv(stage, kv)
        for read in stage.reads[self.rank]:
            slots = slice(read.first, read.last)
            inputs = (
                dout[:, slots],
                q[:, slots],
                *self._slots(self._kv, read),
                out[:, slots],
                lse_nS[slots],
            )
            if self._is_only_read(read):
                self._kv_grads[read.kv_transfer] = list(
                    ring_attention_backward(*inputs, None, self.ring, self.spec)
                )
                continue
            if read.kv_transfer not in self._kv_grads:
                self._kv_grads[read.kv_transfer] = self._zeros(read.kv_transfer)
            ring_attention_backward(
                *inputs, self._slots(self._kv_grads, read), self.ring, self.spec
            )
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
        reads = [each for stage in self.table.stages for each in stage.reads[self.rank]]
        num_slots = self.table.kv_transfers[read.kv_transfer].num_slots
        is_only = [each.kv_transfer for each in reads].count(read.kv_transfer) == 1
        return is_only and read.num_kv == num_slots

    def _zeros(self, kv_transfer: int) -> list[Tensor]:
        return [torch.zeros_like(t, dtype=sum_dtype(t.dtype)) for t in self._kv[kv_transfer]]

    @staticmethod
    def _slots(kv_transfers: dict[int, list[Tensor]], read: KvRead) -> tuple[Tensor, Tensor]:
        slots = slice(read.kv_slot, read.kv_slot + read.num_kv)
        k_SmK, v_SmK = kv_transfers[read.kv_transfer]
        return k_SmK[:, slots], v_SmK[:, slots]


class ExchangedAttention(torch.autograd.Function):
    """Exchange, attention and exchange back for a table of one stage. Saves q, k, v, out and lse.

    A single autograd node: with several, the order of collectives would follow the graph, which
    differs between ranks with and without empty slots.
    """

    @staticmethod
    def forward(ctx, table: HeadTable, group, ring, spec: AttentionSpec, q_csnK, k_csmK, v_csmK):
        (ctx.stage,) = table.stages
        ctx.group = group
        ctx.attention = StagedAttention(table, group.rank(), ring, spec)
        q_SnK, k_SmK, v_SmK = (
            start_tokens_to_heads(t, group).wait() for t in (q_csnK, k_csmK, v_csmK)
        )
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
            start_heads_to_tokens(d_SmK, ctx.group).wait()
            for d_SmK in ctx.attention.take_grads(ctx.stage.kv_transfer)
        ]
        ctx.saved = ctx.attention = None
        return *[None] * 4, dq_csnK, *dkv
