"""Which heads when: one table, made once, that everything else reads.

A rank takes a contiguous run of the checkpoint's query heads (Hugging Face pairs query head h with kv head
h // (H / G)), a few slots per stage. The kv heads it needs arrive in *loads* just before their first use and
stay until their last, so k and v of a group move once. Where heads do not divide, slots stay EMPTY: the
exchange carries them as filler, and their owner computes nothing for them.
"""

from dataclasses import dataclass
from functools import cache
from itertools import groupby

from ithaka.layout import Layout
from ithaka.plan.shape import ModelShape

EMPTY_SLOT = -1
Heads = tuple[tuple[int, ...], ...]  # [rank][slot]


@dataclass(frozen=True)
class KvRead:
    """Slots [first, last) of a stage attend to `num_kv` slots of load `load` from `kv_slot` on, as many to each."""

    first: int
    last: int
    load: int
    kv_slot: int
    num_kv: int = 1

    @property
    def width(self) -> int:
        return self.last - self.first

    def joined(self, other: "KvRead") -> "KvRead | None":
        """With the next one, if both are of neighbouring kv slots and as many query slots attend to each."""
        fits = other.load == self.load and other.kv_slot == self.kv_slot + self.num_kv
        if not fits or other.width * self.num_kv != self.width:
            return None
        return KvRead(self.first, other.last, self.load, self.kv_slot, self.num_kv + 1)


@dataclass(frozen=True)
class KvLoad:
    """kv heads that travel together."""

    kv_heads: Heads
    first_stage: int
    last_stage: int  # over all ranks: their gradients travel back together

    @property
    def num_slots(self) -> int:
        return len(self.kv_heads[0])


@dataclass(frozen=True)
class Stage:
    query_heads: Heads
    load: int | None  # the load that arrives with this stage
    reads: tuple[tuple[KvRead, ...], ...]  # [rank]

    @property
    def num_slots(self) -> int:
        return len(self.query_heads[0])

    def is_full(self, rank: int) -> bool:
        return EMPTY_SLOT not in self.query_heads[rank]


@dataclass(frozen=True)
class HeadTable:
    stages: tuple[Stage, ...]
    loads: tuple[KvLoad, ...]

    def loads_ending(self, stage: int) -> list[int]:
        return [i for i, load in enumerate(self.loads) if load.last_stage == stage]


def flatten_heads(heads: Heads) -> list[int]:
    """The heads in the order they lie in the exchange, with head 0 standing in for empty slots."""
    return [max(head, 0) for of_rank in heads for head in of_rank]


def concat_heads(parts: list[Heads]) -> Heads:
    """Several stages or loads as one: of each rank the heads of the first part, then of the second, ..."""
    return tuple(tuple(head for heads in of_rank for head in heads) for of_rank in zip(*parts, strict=True))


@cache
def head_table(num_heads: int, num_kv_heads: int, cp: int, heads_per_stage: int | None = None) -> HeadTable:
    """The table for `num_heads` query and `num_kv_heads` kv heads over `cp` ranks, `heads_per_stage` at once.

    `heads_per_stage` is a multiple of cp (None: all heads, which is plain Ulysses).
    """
    assert num_heads % num_kv_heads == 0 and cp >= 1
    most = -(-num_heads // cp)
    slots = most if heads_per_stage is None else min(most, heads_per_stage // cp)
    assert slots >= 1, "heads_per_stage must be at least cp"
    num_stages = -(-most // slots)
    bounds = [rank * num_heads // cp for rank in range(cp + 1)]
    group_size = num_heads // num_kv_heads
    padded = [[*range(bounds[r], bounds[r + 1]), *[EMPTY_SLOT] * slots * num_stages] for r in range(cp)]
    query_heads = [tuple(tuple(row[i * slots :][:slots]) for row in padded) for i in range(num_stages)]
    return _with_loads(query_heads, cp, group_size)


def _with_loads(query_heads: list[Heads], cp: int, group_size: int) -> HeadTable:
    held: list[dict[int, tuple[int, int]]] = [{} for _ in range(cp)]  # per rank: kv head -> (load, slot)
    arrivals: list[tuple[Heads, int]] = []
    stages: list[Stage] = []
    for i, of_ranks in enumerate(query_heads):
        needed = [list(dict.fromkeys(h // group_size for h in heads if h != EMPTY_SLOT)) for heads in of_ranks]
        new = [[g for g in needed[r] if g not in held[r]] for r in range(cp)]
        width = max(len(n) for n in new)
        load = len(arrivals) if width else None
        if load is not None:
            arrivals.append((tuple(tuple(n) + (EMPTY_SLOT,) * (width - len(n)) for n in new), i))
        for r in range(cp):
            kept = {g: where for g, where in held[r].items() if g in needed[r]}
            held[r] = kept | {g: (len(arrivals) - 1, slot) for slot, g in enumerate(new[r])}
        reads = tuple(_reads(of_ranks[r], held[r], group_size) for r in range(cp))
        stages.append(Stage(of_ranks, load, reads))
    last_use = {read.load: i for i, stage in enumerate(stages) for reads in stage.reads for read in reads}
    loads = tuple(KvLoad(kv, first, last_use[number]) for number, (kv, first) in enumerate(arrivals))
    return HeadTable(tuple(stages), loads)


def _reads(heads: tuple[int, ...], held: dict[int, tuple[int, int]], group_size: int) -> tuple[KvRead, ...]:
    reads: list[KvRead] = []
    taken = [head for head in heads if head != EMPTY_SLOT]
    for group, of_group in groupby(range(len(taken)), key=lambda slot: taken[slot] // group_size):
        first, *more = of_group
        read = KvRead(first, first + 1 + len(more), *held[group])
        joined = reads[-1].joined(read) if reads else None
        reads = [*reads[:-1], joined] if joined else [*reads, read]
    return tuple(reads)


# ---- in numbers


@dataclass(frozen=True)
class StageSlots:
    """Slots per rank around one stage."""

    new_kv: int  # kv slots that arrive with it
    held: int  # kv slots held while it attends
    left: int  # kv slots held once its last uses are over
    summed: int  # of those held, the ones for which a rank has gradient sums: it has read their load
    left_summed: int  # likewise of those left
    part: int  # query slots of the widest read that a rank copies into its output; 0: all are whole outputs
    widest: int  # query slots of the widest read
    most_kv: int  # kv slots of the read that has most
    reads: int  # kv slots that it attends to


@dataclass(frozen=True)
class Slots:
    query: int  # per rank and stage
    stages: tuple[StageSlots, ...]

    @property
    def all_kv(self) -> int:
        return sum(stage.new_kv for stage in self.stages)


def count_slots(shape: ModelShape, layout: Layout) -> Slots:
    return _slots_of(shape.heads, shape.kv_heads, layout.ulysses, layout.heads_per_stage)


@cache
def _slots_of(heads: int, kv_heads: int, cp: int, heads_per_stage: int | None) -> Slots:
    table = head_table(heads, kv_heads, cp, heads_per_stage)
    return Slots(table.stages[0].num_slots, tuple(_stage_slots(table, i) for i in range(len(table.stages))))


def _stage_slots(table: HeadTable, i: int) -> StageSlots:
    stage, loads, ranks = table.stages[i], list(enumerate(table.loads)), range(len(table.stages[i].reads))
    whole = [len(stage.reads[rank]) == 1 and stage.is_full(rank) for rank in ranks]
    read_by = [{read.load for before in table.stages[: i + 1] for read in before.reads[rank]} for rank in ranks]
    arrived = {n for n, load in loads if load.first_stage <= i}

    def slots(numbers: set[int], still: int) -> int:
        """Slots of those loads that are in use at stage `still` or later."""
        return sum(load.num_slots for n, load in loads if n in numbers and load.last_stage >= still)

    return StageSlots(
        new_kv=0 if stage.load is None else table.loads[stage.load].num_slots,
        held=slots(arrived, i),
        left=slots(arrived, i + 1),
        summed=max(slots(numbers, i) for numbers in read_by),
        left_summed=max(slots(numbers, i + 1) for numbers in read_by),
        part=max((read.width for rank in ranks if not whole[rank] for read in stage.reads[rank]), default=0),
        widest=max(read.width for reads in stage.reads for read in reads),
        most_kv=max(read.num_kv for reads in stage.reads for read in reads),
        reads=max(sum(read.num_kv for read in reads) for reads in stage.reads),
    )
