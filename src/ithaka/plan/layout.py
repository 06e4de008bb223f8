"""The settings that decide bytes and seconds, the work of a step, and how many heads a rank has when.

S tokens of the packed sequence, s = S / cp of them on a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from ithaka.plan.heads import HeadTable, head_table
from ithaka.plan.shape import ModelShape

Tier = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class Layout:
    """Every setting that decides bytes or seconds."""

    cp: int = 1
    heads_per_stage: int | None = None  # None: all heads
    tile_tokens: int | None = None  # None: all of a rank's tokens
    checkpoint: bool = True
    input_tier: Tier = "device"  # of the layers' inputs
    keep_attention: int = 0  # layers that keep attention's output
    attention_tier: Tier = "device"
    offload_optimizer: bool = False
    overlap: bool = True
    element_bytes: int = 2
    sum_bytes: int = 4  # of gradient sums and log-sum-exps

    def slots(self, shape: ModelShape) -> Slots:
        return _slots(shape.heads, shape.kv_heads, self.cp, self.heads_per_stage)

    def x_bytes(self, shape: ModelShape, num_tokens: int) -> int:
        """X: one tensor of the residual stream."""
        return num_tokens * shape.hidden * self.element_bytes


@dataclass(frozen=True)
class Work:
    """One micro-step of one cp group: `batch` sequences of `context` tokens, packed into one."""

    context: int
    batch: int = 1
    document_tokens: int | None = None  # length of the packed documents; None: one per sequence
    accumulate: int = 1  # micro-steps per optimizer step

    @property
    def tokens(self) -> int:
        return self.context * self.batch

    def local_tokens(self, cp: int) -> int:
        return -(-self.tokens // cp)

    def pairs(self, window: int | None) -> float:
        """Query-key pairs that a head visits."""
        length = min(self.document_tokens or self.context, self.context)
        if window is None or window >= length:
            return self.tokens * length / 2
        return self.tokens / length * (window * length - window**2 / 2)


# ---- which heads when, in numbers


@dataclass(frozen=True)
class StageSlots:
    """Slots per rank around one stage."""

    new_kv: int  # kv slots that arrive with it
    held: int  # kv slots held while it attends
    left: int  # kv slots held once its last uses are over
    part: int  # query slots of the widest read that a rank copies into its output; 0: all are whole outputs


@dataclass(frozen=True)
class Slots:
    query: int  # per rank and stage
    stages: tuple[StageSlots, ...]

    @property
    def all_kv(self) -> int:
        return sum(stage.new_kv for stage in self.stages)

    @property
    def most_new_kv(self) -> int:
        return max(stage.new_kv for stage in self.stages)


@cache
def _slots(heads: int, kv_heads: int, cp: int, heads_per_stage: int | None) -> Slots:
    table = head_table(heads, kv_heads, cp, heads_per_stage)
    return Slots(table.stages[0].num_slots, tuple(_stage_slots(table, i) for i in range(len(table.stages))))


def _stage_slots(table: HeadTable, i: int) -> StageSlots:
    stage = table.stages[i]
    copied = [
        read.last - read.first
        for rank, reads in enumerate(stage.reads)
        if len(reads) != 1 or not stage.is_full(rank)
        for read in reads
    ]
    return StageSlots(
        new_kv=0 if stage.load is None else table.loads[stage.load].num_slots,
        held=sum(load.num_slots for load in table.loads if load.first_stage <= i <= load.last_stage),
        left=sum(load.num_slots for load in table.loads if load.first_stage <= i < load.last_stage),
        part=max(copied, default=0),
    )
