"""The head table: which rank attends to which heads in which stage. Built once, read by everything else.

A rank owns consecutive query heads of the checkpoint, a few slots per stage (Hugging Face pairs query head h with kv
head h // (H / G)). The kv heads it needs arrive in *kv transfers* just before their first use and stay until their
last, so k and v of a group move once. Where the ranks do not divide the heads, some slots are EMPTY_SLOT: the exchange
carries them as padding, and nothing is computed for them.
"""

from dataclasses import dataclass
from functools import cache
from itertools import groupby

EMPTY_SLOT = -1
Heads = tuple[tuple[int, ...], ...]  # [rank][slot]


@dataclass(frozen=True)
class KvRead:
    """Query slots [first, last) of a stage attend to kv slots [kv_slot, kv_slot + num_kv) of a kv transfer, in equal
    groups."""

    first: int
    last: int
    kv_transfer: int
    kv_slot: int
    num_kv: int = 1

    @property
    def width(self) -> int:
        return self.last - self.first

    def merge(self, other: "KvRead") -> "KvRead | None":
        """Merge with the next read; None unless kv slots are adjacent and groups have equal size."""
        is_adjacent = other.kv_transfer == self.kv_transfer and other.kv_slot == self.kv_slot + self.num_kv
        if not is_adjacent or other.width * self.num_kv != self.width:
            return None
        return KvRead(self.first, other.last, self.kv_transfer, self.kv_slot, self.num_kv + 1)


@dataclass(frozen=True)
class KvTransfer:
    """kv heads that are exchanged together."""

    kv_heads: Heads
    first_stage: int
    last_stage: int  # over all ranks: the gradients are sent back together

    @property
    def num_slots(self) -> int:
        return len(self.kv_heads[0])


@dataclass(frozen=True)
class Stage:
    query_heads: Heads
    kv_transfer: int | None  # the one that arrives with this stage
    reads: tuple[tuple[KvRead, ...], ...]  # [rank]

    @property
    def num_slots(self) -> int:
        return len(self.query_heads[0])

    def is_full(self, rank: int) -> bool:
        return EMPTY_SLOT not in self.query_heads[rank]


@dataclass(frozen=True)
class HeadTable:
    stages: tuple[Stage, ...]
    kv_transfers: tuple[KvTransfer, ...]

    def kv_transfers_ending(self, stage: int) -> list[int]:
        return [i for i, kv_transfer in enumerate(self.kv_transfers) if kv_transfer.last_stage == stage]


def flatten_heads(heads: Heads) -> list[int]:
    """Heads in the exchange's order; head 0 fills the empty slots."""
    return [max(head, 0) for rank_heads in heads for head in rank_heads]


def concat_heads(parts: list[Heads]) -> Heads:
    """Concatenate stages or kv transfers, rank by rank."""
    return tuple(tuple(head for heads in rank_parts for head in heads) for rank_parts in zip(*parts, strict=True))


@cache
def head_table(num_heads: int, num_kv_heads: int, cp: int, heads_per_stage: int | None = None) -> HeadTable:
    """Distribute `num_heads` query and `num_kv_heads` kv heads over `cp` ranks, `heads_per_stage` at a time.
    `heads_per_stage` is a multiple of cp. None: all heads in one stage (plain Ulysses)."""
    assert num_heads % num_kv_heads == 0 and cp >= 1
    heads_per_rank = -(-num_heads // cp)
    slots = heads_per_rank if heads_per_stage is None else min(heads_per_rank, heads_per_stage // cp)
    assert slots >= 1, "heads_per_stage must be at least cp"
    num_stages = -(-heads_per_rank // slots)
    bounds = [rank * num_heads // cp for rank in range(cp + 1)]
    group_size = num_heads // num_kv_heads
    padded = [[*range(bounds[r], bounds[r + 1]), *[EMPTY_SLOT] * slots * num_stages] for r in range(cp)]
    query_heads = [tuple(tuple(row[i * slots :][:slots]) for row in padded) for i in range(num_stages)]
    return _add_kv_transfers(query_heads, cp, group_size)


def _add_kv_transfers(query_heads: list[Heads], cp: int, group_size: int) -> HeadTable:
    held: list[dict[int, tuple[int, int]]] = [{} for _ in range(cp)]  # per rank: kv head -> (kv transfer, slot)
    arrivals: list[tuple[Heads, int]] = []
    stages: list[Stage] = []
    for i, stage_heads in enumerate(query_heads):
        needed = [list(dict.fromkeys(h // group_size for h in heads if h != EMPTY_SLOT)) for heads in stage_heads]
        new = [[g for g in needed[r] if g not in held[r]] for r in range(cp)]
        width = max(len(n) for n in new)
        kv_transfer = len(arrivals) if width else None
        if kv_transfer is not None:
            arrivals.append((tuple(tuple(n) + (EMPTY_SLOT,) * (width - len(n)) for n in new), i))
        for r in range(cp):
            kept = {g: slot for g, slot in held[r].items() if g in needed[r]}
            held[r] = kept | {g: (len(arrivals) - 1, slot) for slot, g in enumerate(new[r])}
        reads = tuple(_list_reads(stage_heads[r], held[r], group_size) for r in range(cp))
        stages.append(Stage(stage_heads, kv_transfer, reads))
    last_use = {read.kv_transfer: i for i, stage in enumerate(stages) for reads in stage.reads for read in reads}
    kv_transfers = tuple(KvTransfer(kv, first, last_use[number]) for number, (kv, first) in enumerate(arrivals))
    return HeadTable(tuple(stages), kv_transfers)


def _list_reads(heads: tuple[int, ...], held: dict[int, tuple[int, int]], group_size: int) -> tuple[KvRead, ...]:
    reads: list[KvRead] = []
    used = [head for head in heads if head != EMPTY_SLOT]
    for group, slots in groupby(range(len(used)), key=lambda slot: used[slot] // group_size):
        first, *rest = slots
        read = KvRead(first, first + 1 + len(rest), *held[group])
        merged = reads[-1].merge(read) if reads else None
        reads = [*reads[:-1], merged] if merged else [*reads, read]
    return tuple(reads)


# ---- slot counts, for memory and time


@dataclass(frozen=True)
class StageSlots:
    """Slots on a rank around one stage: the maximum over ranks."""

    query: int  # the same in every stage
    new_kv: int  # kv slots that arrive with the stage
    held_kv: int  # kv slots held while it attends
    left_kv: int  # kv slots that later stages still need
    summed_kv: int  # held kv slots that have gradient sums already: their transfer was read
    left_summed_kv: int  # subset that later stages still need
    partial_query: int  # query slots of the widest read that is only a part of the stage's output; 0: there is none
    widest_read: int  # query slots of the widest read
    widest_read_kv: int  # kv slots of the read with most of them
    read_kv: int  # kv slots that the stage attends to


@cache
def count_slots(heads: int, kv_heads: int, cp: int, heads_per_stage: int | None) -> tuple[StageSlots, ...]:
    """The slots of each stage."""
    table = head_table(heads, kv_heads, cp, heads_per_stage)
    return tuple(_stage_slots(table, i) for i in range(len(table.stages)))


def _stage_slots(table: HeadTable, i: int) -> StageSlots:
    stage, kv_transfers, ranks = table.stages[i], list(enumerate(table.kv_transfers)), range(len(table.stages[i].reads))
    has_one_read = [len(stage.reads[rank]) == 1 and stage.is_full(rank) for rank in ranks]
    read_by = [
        {read.kv_transfer for earlier in table.stages[: i + 1] for read in earlier.reads[rank]} for rank in ranks
    ]
    arrived = {n for n, kv_transfer in kv_transfers if kv_transfer.first_stage <= i}

    def count(numbers: set[int], needed_at: int) -> int:
        """Slots of these transfers that stage `needed_at` or a later one reads."""
        return sum(each.num_slots for n, each in kv_transfers if n in numbers and each.last_stage >= needed_at)

    partial_widths = (read.width for rank in ranks if not has_one_read[rank] for read in stage.reads[rank])
    return StageSlots(
        query=stage.num_slots,
        new_kv=0 if stage.kv_transfer is None else table.kv_transfers[stage.kv_transfer].num_slots,
        held_kv=count(arrived, i),
        left_kv=count(arrived, i + 1),
        summed_kv=max(count(numbers, i) for numbers in read_by),
        left_summed_kv=max(count(numbers, i + 1) for numbers in read_by),
        partial_query=max(partial_widths, default=0),
        widest_read=max(read.width for reads in stage.reads for read in reads),
        widest_read_kv=max(read.num_kv for reads in stage.reads for read in reads),
        read_kv=max(sum(read.num_kv for read in reads) for reads in stage.reads),
    )
