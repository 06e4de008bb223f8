"""Properties of the table of heads, for any number of heads and ranks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ithaka.facts.heads import EMPTY_SLOT, HeadTable, flatten_heads, head_table

FEW = settings(max_examples=60, derandomize=True, deadline=None)


@st.composite
def layouts(draw) -> tuple[int, int, int, int | None]:
    """Draw (query heads, kv heads, ranks, heads per stage)."""
    heads = draw(st.integers(1, 64))
    kv_heads = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    cp = draw(st.integers(1, min(heads, 16)))
    per_rank = draw(st.none() | st.integers(1, -(-heads // cp)))
    return heads, kv_heads, cp, None if per_rank is None else per_rank * cp


def heads_read(table: HeadTable, rank: int) -> list[tuple[int, int]]:
    """Return a rank's pairs (query head, the kv head it reads), in order."""
    pairs = []
    for stage in table.stages:
        for read in stage.reads[rank]:
            kv_heads = table.kv_transfers[read.kv_transfer].kv_heads[rank][read.kv_slot :][
                : read.num_kv
            ]
            assert len(kv_heads) == read.num_kv and read.width % read.num_kv == 0
            queries_per_kv = read.width // read.num_kv
            slots = range(read.first, read.last)
            pairs += [
                (stage.query_heads[rank][slot], kv_heads[n // queries_per_kv])
                for n, slot in enumerate(slots)
            ]
    return pairs


@FEW
@given(layouts())
def test_every_query_head_is_taken_once_and_reads_its_own_kv_head(layout):
    heads, kv_heads, cp, _ = layout
    table = head_table(*layout)
    pairs = [pair for rank in range(cp) for pair in heads_read(table, rank)]
    assert pairs == [(head, head // (heads // kv_heads)) for head in range(heads)]


@FEW
@given(layouts())
def test_reads_cover_all_slots_but_the_empty_ones(layout):
    table = head_table(*layout)
    for stage in table.stages:
        for rank, slots in enumerate(stage.query_heads):
            read = [slot for r in stage.reads[rank] for slot in range(r.first, r.last)]
            assert read == [slot for slot, head in enumerate(slots) if head != EMPTY_SLOT]
            assert stage.is_full(rank) == (len(read) == len(slots))


@FEW
@given(layouts())
def test_a_kv_head_moves_once_to_each_rank_that_needs_it(layout):
    cp = layout[2]
    table = head_table(*layout)
    for rank in range(cp):
        moved = [
            head
            for kv_transfer in table.kv_transfers
            for head in kv_transfer.kv_heads[rank]
            if head != EMPTY_SLOT
        ]
        assert moved == sorted(set(moved))
        assert set(moved) == {kv_head for _, kv_head in heads_read(table, rank)}


@FEW
@given(layouts())
def test_all_ranks_have_the_same_number_of_slots_and_stages_are_balanced(layout):
    """Unequal counts between ranks would deadlock."""
    heads, _, cp, heads_per_stage = layout
    table = head_table(*layout)
    most = -(-heads // cp)
    for part in (
        *(stage.query_heads for stage in table.stages),
        *(kv_transfer.kv_heads for kv_transfer in table.kv_transfers),
    ):
        assert len(part) == cp and len({len(slots) for slots in part}) == 1
        assert len(flatten_heads(part)) == cp * len(part[0]) and min(flatten_heads(part)) >= 0
    for rank in range(cp):
        taken = len(heads_read(table, rank))
        assert heads // cp <= taken <= most
    slots = most if heads_per_stage is None else heads_per_stage // cp
    assert [stage.num_slots for stage in table.stages] == [slots] * -(-most // slots)


@FEW
@given(layouts())
def test_loads_are_live_from_first_to_last_use(layout):
    table = head_table(*layout)
    for number, kv_transfer in enumerate(table.kv_transfers):
        used_in = [
            i
            for i, stage in enumerate(table.stages)
            if any(read.kv_transfer == number for reads in stage.reads for read in reads)
        ]
        assert (kv_transfer.first_stage, kv_transfer.last_stage) == (min(used_in), max(used_in))
        assert table.stages[kv_transfer.first_stage].kv_transfer == number
    arriving = [stage.kv_transfer for stage in table.stages if stage.kv_transfer is not None]
    assert arriving == list(range(len(table.kv_transfers)))
    ending = [number for i in range(len(table.stages)) for number in table.kv_transfers_ending(i)]
    assert sorted(ending) == arriving


def test_plain_ulysses_is_one_stage():
    table = head_table(8, 2, 4)
    assert [stage.query_heads for stage in table.stages] == [((0, 1), (2, 3), (4, 5), (6, 7))]
    assert [kv_transfer.kv_heads for kv_transfer in table.kv_transfers] == [
        ((0,), (0,), (1,), (1,))
    ]
