"""The head table: which rank attends to which heads in which stage.

A rank owns consecutive query heads of the checkpoint, a few slots per stage (Hugging Face pairs
query head h with kv head h // (H / G)). The kv heads it needs arrive in *kv transfers* just before
their first use and stay until their last, so k and v of a group move once. Where the ranks do not
divide the heads, some slots are EMPTY_SLOT: the exchange carries them as padding, and nothing is
computed for them.
"""

from dataclasses import dataclass
from functools import cache
from itertools import chain, groupby

EMPTY_SLOT = -1
Heads = tuple[tuple[int, ...], ...]  # [rank][slot]


@dataclass(frozen=True)
class KvRead:
    """Query slots [first, last) of a stage attend to kv slots [kv_slot, kv_slot + num_kv) of a kv
    transfer, in equal groups."""

    first: int
    last: int
    kv_transfer: int
    kv_slot: int
    num_kv: int = 1

    @property
    def width(self) -> int:
        return self.last - self.first

    def merge(self, other: "KvRead") -> "KvRead | None":
        """Merge with the next read; None unless kv slots are adjacent and groups equally wide."""
        if other.kv_transfer != self.kv_transfer or other.kv_slot != self.kv_slot + self.num_kv:
            return None
        if other.width * self.num_kv != self.width:
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
        return [i for i, each in enumerate(self.kv_transfers) if each.last_stage == stage]


def flatten_heads(heads: Heads) -> list[int]:
    """Heads in the exchange's order; head 0 fills the empty slots."""
    return [max(head, 0) for rank_heads in heads for head in rank_heads]


def concat_heads(parts: list[Heads]) -> Heads:
    """Concatenate stages or kv transfers, rank by rank."""
    return tuple(tuple(chain.from_iterable(of_rank)) for of_rank in zip(*parts, strict=True))


@cache
def head_table(
    num_heads: int, num_kv_heads: int, cp: int, heads_per_stage: int | None = None
) -> HeadTable:
    """Distribute `num_heads` query and `num_kv_heads` kv heads over `cp` ranks, `heads_per_stage`
    at a time: a multiple of cp, or None for all heads in one stage (plain Ulysses)."""
    assert num_heads % num_kv_heads == 0 and cp >= 1
    heads_per_rank = -(-num_heads // cp)
    slots = heads_per_rank
    if heads_per_stage is not None:
        slots = min(heads_per_rank, heads_per_stage // cp)
    assert slots >= 1, "heads_per_stage must be at least cp"
    padded_length = -(-heads_per_rank // slots) * slots
    rows = []
    for rank in range(cp):
        heads = range(rank * num_heads // cp, (rank + 1) * num_heads // cp)
        rows.append((*heads, *[EMPTY_SLOT] * (padded_length - len(heads))))
    query_heads = []
    for first in range(0, padded_length, slots):
        query_heads.append(tuple(row[first : first + slots] for row in rows))
    return _add_kv_transfers(query_heads, cp, num_heads // num_kv_heads)


def _add_kv_transfers(query_heads: list[Heads], cp: int, group_size: int) -> HeadTable:
    # per rank: kv head -> (kv transfer, slot)
    held: list[dict[int, tuple[int, int]]] = [{} for _ in range(cp)]
    arrivals: list[tuple[Heads, int]] = []  # kv heads, stage
    last_use: dict[int, int] = {}
    stages = []
    for i, stage_heads in enumerate(query_heads):
        new = []  # kv heads that arrive, per rank
        for r, heads in enumerate(stage_heads):
            needed = dict.fromkeys(head // group_size for head in heads if head != EMPTY_SLOT)
            new.append([g for g in needed if g not in held[r]])
            held[r] = {g: place for g, place in held[r].items() if g in needed}
        width = max(map(len, new))
        kv_transfer = len(arrivals) if width else None
        if width:
            arrivals.append((tuple((*n, *[EMPTY_SLOT] * (width - len(n))) for n in new), i))
        for r in range(cp):
            held[r] |= {g: (len(arrivals) - 1, slot) for slot, g in enumerate(new[r])}
        reads = tuple(_list_reads(stage_heads[r], held[r], group_size) for r in range(cp))
        last_use |= {read.kv_transfer: i for read in chain.from_iterable(reads)}
        stages.append(Stage(stage_heads, kv_transfer, reads))
    kv_transfers = (KvTransfer(kv, first, last_use[n]) for n, (kv, first) in enumerate(arrivals))
    return HeadTable(tuple(stages), tuple(kv_transfers))


def _list_reads(
    heads: tuple[int, ...], held: dict[int, tuple[int, int]], group_size: int
) -> tuple[KvRead, ...]:
    reads: list[KvRead] = []
    used = [head for head in heads if head != EMPTY_SLOT]
    for group, slots in groupby(range(len(used)), key=lambda slot: used[slot] // group_size):
        first, *rest = slots
        read = KvRead(first, first + 1 + len(rest), *held[group])
        merged = reads[-1].merge(read) if reads else None
        if merged:
            reads[-1] = merged
        else:
            reads.append(read)
    return tuple(reads)


# ---- slot counts, for memory and time


@dataclass(frozen=True)
class StageSlots:
    """Slots around a stage: the maximum over ranks."""

    query: int  # the same in every stage
    new_kv: int  # kv slots that arrive with the stage
    held_kv: int  # kv slots held while it attends
    left_kv: int  # kv slots that later stages still need
    summed_kv: int  # held kv slots that have gradient sums already: their transfer was read
    left_summed_kv: int  # subset that later stages still need
    partial_query: int  # query slots of the widest read that is only a part of the stage's output
    widest_read: int  # query slots of the widest read
    widest_read_kv: int  # kv slots of the read with most of them
    read_kv: int  # kv slots that the stage attends to


@cache
def count_slots(
    heads: int, kv_heads: int, cp: int, heads_per_stage: int | None
) -> tuple[StageSlots, ...]:
    """The slots of each stage."""
    table = head_table(heads, kv_heads, cp, heads_per_stage)
    return tuple(_stage_slots(table, i) for i in range(len(table.stages)))


def _stage_slots(table: HeadTable, i: int) -> StageSlots:
    stage = table.stages[i]
    new = None if stage.kv_transfer is None else table.kv_transfers[stage.kv_transfer]
    arrived = {n for n, each in enumerate(table.kv_transfers) if each.first_stage <= i}
    read_by = []  # kv transfers that each rank has read so far
    partial_widths = [0]
    read_kv = []
    for rank, reads in enumerate(stage.reads):
        earlier = chain.from_iterable(each.reads[rank] for each in table.stages[: i + 1])
        read_by.append({read.kv_transfer for read in earlier})
        read_kv.append(sum(read.num_kv for read in reads))
        if len(reads) != 1 or not stage.is_full(rank):
            partial_widths += [read.width for read in reads]

    def count(numbers: set[int], needed_at: int) -> int:
        """Slots of these transfers that stage `needed_at` or a later one reads."""
        transfers = [table.kv_transfers[n] for n in numbers]
        return sum(each.num_slots for each in transfers if each.last_stage >= needed_at)

    return StageSlots(
        query=stage.num_slots,
        new_kv=new.num_slots if new else 0,
        held_kv=count(arrived, i),
        left_kv=count(arrived, i + 1),
        summed_kv=max(count(numbers, i) for numbers in read_by),
        left_summed_kv=max(count(numbers, i + 1) for numbers in read_by),
        partial_query=max(partial_widths),
        widest_read=max(read.width for reads in stage.reads for read in reads),
        widest_read_kv=max(read.num_kv for reads in stage.reads for read in reads),
        read_kv=max(read_kv),
    )
