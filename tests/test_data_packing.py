"""Packed sequences are the documents, in order, with their boundaries: nothing lost, nothing crossing."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ithaka.data.sources import Piece
from ithaka.data.stream import Position, SequenceStream, collate, num_valid

PAD = 9999


@dataclass
class ListUnit:
    """Documents in memory, given in pieces of `size` tokens whatever the documents."""

    documents: list[list[int]]
    size: int
    path: Path = Path("memory")
    identity: tuple[int, ...] = ()

    def pieces(self, cursor, key):
        tokens = np.asarray([token for document in self.documents for token in document], dtype=np.int32)
        starts = np.cumsum([0, *map(len, self.documents)])[:-1]
        for low in range(cursor, len(tokens), self.size):
            inside = starts[(starts >= low) & (starts < low + self.size)]
            yield Piece(low, tokens[low : low + self.size], inside - low)


@st.composite
def corpora(draw):
    """Units of documents with tokens all distinct, so that any misplaced one is seen."""
    lengths = draw(st.lists(st.lists(st.integers(1, 12), max_size=5), min_size=1, max_size=4))
    sizes = draw(st.lists(st.integers(1, 15), min_size=len(lengths), max_size=len(lengths)))
    counter = iter(range(100_000))
    units = [[[next(counter) for _ in range(n)] for n in unit] for unit in lengths]
    return [ListUnit(documents, size) for documents, size in zip(units, sizes, strict=True)]


def one_epoch(units, context):
    return list(iter(SequenceStream(units, context, seed=None, pad_id=PAD, repeat=False).next, None))


def documents_of(units):
    return [document for unit in units for document in unit.documents]


@settings(max_examples=200, deadline=None)
@given(units=corpora(), context=st.integers(2, 16))
def test_sequences_without_padding_are_the_documents(units, context):
    sequences = one_epoch(units, context)
    expected = [token for document in documents_of(units) for token in document]
    assert [int(t) for s in sequences for t in s.ids[: s.length]] == expected
    assert all(len(s.ids) == context for s in sequences)
    assert all(s.length == context for s in sequences[:-1])
    assert all(s.length > 0 and (s.ids[s.length :] == PAD).all() for s in sequences)


@settings(max_examples=200, deadline=None)
@given(units=corpora(), context=st.integers(2, 16))
def test_document_ids_change_exactly_at_document_starts(units, context):
    firsts = {document[0] for document in documents_of(units)}
    for sequence in one_epoch(units, context):
        ids, documents = sequence.ids, sequence.document_ids()
        assert documents[0] == 0
        for i in range(1, context):
            starts = (int(ids[i]) in firsts and i < sequence.length) or i == sequence.length
            assert documents[i] - documents[i - 1] == int(starts)


@settings(max_examples=200, deadline=None)
@given(units=corpora(), context=st.integers(2, 16))
def test_no_label_crosses_a_document_and_none_inside_is_lost(units, context):
    owner = {token: i for i, document in enumerate(documents_of(units)) for token in document}
    for sequence in one_epoch(units, context):
        labels = sequence.labels()
        assert labels[0] == -100
        for i in range(1, context):
            padded = i >= sequence.length
            crosses = padded or owner[int(sequence.ids[i])] != owner[int(sequence.ids[i - 1])]
            assert labels[i] == (-100 if crosses else sequence.ids[i])


@settings(max_examples=100, deadline=None)
@given(units=corpora(), context=st.integers(2, 16), data=st.data())
def test_any_position_continues_bit_for_bit(units, context, data):
    if not documents_of(units):
        return
    stream = SequenceStream(units, context, seed=3, pad_id=PAD)
    for _ in range(data.draw(st.integers(0, 12))):
        stream.next()
    other = SequenceStream(units, context, seed=3, pad_id=PAD)
    other.seek(Position(**vars(stream.position)))
    for _ in range(8):
        assert_same(stream.next(), other.next())
    assert stream.position == other.position


@settings(max_examples=50, deadline=None)
@given(units=corpora(), context=st.integers(2, 16))
def test_skipping_leaves_the_next_sequence_as_it_was(units, context):
    if not documents_of(units):
        return
    full, skipped = (SequenceStream(units, context, seed=1) for _ in range(2))
    for i in range(10):
        expected = full.next()
        if i % 3:
            assert skipped.next(materialize=False) is None
        else:
            assert_same(expected, skipped.next())


def assert_same(one, two):
    assert one.length == two.length
    np.testing.assert_array_equal(one.ids, two.ids)
    np.testing.assert_array_equal(one.starts, two.starts)


def test_epochs_hold_the_same_documents_in_another_order():
    units = [ListUnit([[i * 10 + j for j in range(4)]], 4) for i in range(20)]
    stream = SequenceStream(units, 4, seed=0)
    epochs = [[tuple(stream.next().ids) for _ in range(20)] for _ in range(3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]
    other = SequenceStream(units, 4, seed=1)
    assert epochs[0] != [tuple(other.next().ids) for _ in range(20)]
    assert stream.position.epoch == 2


def test_collate_gives_int64_batches_and_counts_shifted_labels():
    batch = collate(one_epoch([ListUnit([[1, 2, 3], [4, 5], [6, 7, 8, 9]], 4)], 5))
    assert all(t.dtype == torch.int64 and t.shape == (2, 5) for t in batch)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, PAD]]
    assert batch.labels.tolist() == [[-100, 2, 3, -100, 5], [-100, 7, 8, 9, -100]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]
    assert num_valid(batch.labels) == 6
    assert num_valid(torch.tensor([[7, -100, -100]])) == 0


def test_a_document_longer_than_the_context_is_a_new_document_in_the_next_sequence():
    sequences = one_epoch([ListUnit([list(range(10)), [50]], 100)], 4)
    assert [s.starts.tolist() for s in sequences] == [[0], [0], [0, 2]]
    assert [s.document_ids().tolist() for s in sequences] == [[0] * 4, [0] * 4, [0, 0, 1, 2]]


def test_empty_units_are_an_error_not_an_endless_loop():
    with pytest.raises(ValueError, match="no tokens"):
        SequenceStream([ListUnit([], 1)], 4, seed=0).next()
