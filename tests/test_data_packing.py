"""Packed sequences are the documents, in order, with their boundaries: nothing lost, nothing crossing."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ithaka.data import pack as packing
from ithaka.data.pack import Documents, deal, spans
from ithaka.data.stream import SequenceStream, collate, num_valid

PAD = 9999


@dataclass
class ListShard:
    """Documents in memory."""

    documents: list[list[int]]
    num_bytes: int = 100

    def load(self):
        tokens = [token for document in self.documents for token in document]
        return Documents(np.asarray(tokens, np.int32), np.asarray([*map(len, self.documents)], np.int64))


class NoCache:
    def prepare(self, shards):
        list(shards)

    def load_all(self, shards):
        return [shard.load() for shard in shards]


def make_stream(shards, context, **settings):
    return SequenceStream(shards, NoCache(), context, **settings)


@st.composite
def corpora(draw):
    """Units of documents with tokens all distinct, so that any misplaced one is seen."""
    lengths = draw(st.lists(st.lists(st.integers(1, 12), max_size=5), min_size=1, max_size=4))
    counter = iter(range(100_000))
    return [ListShard([[next(counter) for _ in range(n)] for n in shard]) for shard in lengths]


def one_epoch(shards, context):
    return list(iter(make_stream(shards, context, seed=None, pad_id=PAD).next, None))


def documents_of(shards):
    return [document for shard in shards for document in shard.documents]


@settings(max_examples=200, deadline=None)
@given(shards=corpora(), context=st.integers(2, 16))
def test_sequences_without_padding_are_the_documents(shards, context):
    sequences = one_epoch(shards, context)
    expected = [token for document in documents_of(shards) for token in document]
    assert [int(t) for s in sequences for t in s.ids[: s.length]] == expected
    assert all(len(s.ids) == context for s in sequences)
    assert all(s.length == context for s in sequences[:-1])
    assert all(s.length > 0 and (s.ids[s.length :] == PAD).all() for s in sequences)


@settings(max_examples=200, deadline=None)
@given(shards=corpora(), context=st.integers(2, 16))
def test_document_ids_change_exactly_at_document_starts(shards, context):
    firsts = {document[0] for document in documents_of(shards)}
    for sequence in one_epoch(shards, context):
        ids, documents = sequence.ids, sequence.document_ids()
        assert documents[0] == 0
        for i in range(1, context):
            starts = (int(ids[i]) in firsts and i < sequence.length) or i == sequence.length
            assert documents[i] - documents[i - 1] == int(starts)


@settings(max_examples=200, deadline=None)
@given(shards=corpora(), context=st.integers(2, 16))
def test_no_label_crosses_a_document_and_none_inside_is_lost(shards, context):
    owner = {token: i for i, document in enumerate(documents_of(shards)) for token in document}
    for sequence in one_epoch(shards, context):
        labels = sequence.labels()
        assert labels[0] == -100
        for i in range(1, context):
            padded = i >= sequence.length
            crosses = padded or owner[int(sequence.ids[i])] != owner[int(sequence.ids[i - 1])]
            assert labels[i] == (-100 if crosses else sequence.ids[i])


@settings(max_examples=100, deadline=None)
@given(shards=corpora(), context=st.integers(2, 16), data=st.data())
def test_any_position_continues_bit_for_bit(shards, context, data):
    if not documents_of(shards):
        return
    stream = make_stream(shards, context, seed=3, pad_id=PAD)
    for _ in range(data.draw(st.integers(0, 12))):
        stream.next()
    other = make_stream(shards, context, seed=3, pad_id=PAD)
    other.seek(stream.position)
    for _ in range(8):
        assert_same(stream.next(), other.next())
    assert stream.position == other.position


@settings(max_examples=50, deadline=None)
@given(shards=corpora(), context=st.integers(2, 16))
def test_skipping_leaves_the_next_sequence_as_it_was(shards, context):
    if not documents_of(shards):
        return
    full, skipped = (make_stream(shards, context, seed=1) for _ in range(2))
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
    shards = [ListShard([[i * 10 + j for j in range(4)]]) for i in range(20)]
    stream = make_stream(shards, 4, seed=0)
    epochs = [[tuple(stream.next().ids) for _ in range(20)] for _ in range(3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]
    other = make_stream(shards, 4, seed=1)
    assert epochs[0] != [tuple(other.next().ids) for _ in range(20)]
    assert stream.position.epoch == 2


def test_collate_gives_int64_batches_and_counts_shifted_labels():
    batch = collate(one_epoch([ListShard([[1, 2, 3], [4, 5], [6, 7, 8, 9]])], 5))
    assert all(t.dtype == torch.int64 and t.shape == (2, 5) for t in batch.inputs.values())
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, PAD]]
    assert batch.labels.tolist() == [[-100, 2, 3, -100, 5], [-100, 7, 8, 9, -100]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]
    assert num_valid(batch.labels) == 6
    assert num_valid(torch.tensor([[7, -100, -100]])) == 0


def test_marked_tokens_are_read_but_are_no_labels():
    documents = [[~1, ~0, 2, 3, ~4], [~5, 6], [7, 0, ~8, 9, ~10, 11]]  # of a split document a part is marked, too
    batch = collate(one_epoch([ListShard(documents)], 9))
    assert batch.input_ids.tolist() == [[1, 0, 2, 3, 4, 5, 6, 7, 0], [8, 9, 10, 11, *[PAD] * 5]]
    no = -100
    assert batch.labels.tolist() == [[no, no, 2, 3, no, no, 6, no, 0], [no, 9, no, 11, *[no] * 5]]


def test_a_document_longer_than_the_context_is_a_new_document_in_the_next_sequence():
    sequences = one_epoch([ListShard([list(range(10)), [50]])], 4)
    assert [s.starts.tolist() for s in sequences] == [[0], [0], [0, 2]]
    assert [s.document_ids().tolist() for s in sequences] == [[0] * 4, [0] * 4, [0, 0, 1, 2]]


def test_empty_shards_are_an_error_not_an_endless_loop():
    with pytest.raises(ValueError, match="no tokens"):
        make_stream([ListShard([])], 4, seed=0).next()


@pytest.fixture(autouse=True)
def windows_of_two_shards(monkeypatch):
    monkeypatch.setattr(packing, "WINDOW_BYTES", 150)


@settings(max_examples=200, deadline=None)
@given(shards=corpora(), context=st.integers(2, 16), seed=st.integers(0, 5))
def test_an_epoch_has_every_document_once_whole_and_in_order(shards, context, seed):
    if not documents_of(shards):
        return
    stream, tokens = make_stream(shards, context, seed=seed, pad_id=PAD), []
    while (sequence := stream.next()) and stream.position.epoch == 0:
        tokens += sequence.ids[: sequence.length].tolist()
    after = dict(itertools.pairwise(tokens))
    assert sorted(tokens) == [token for document in documents_of(shards) for token in document]
    assert all(after[a] == b for document in documents_of(shards) for a, b in itertools.pairwise(document))


def test_documents_of_different_shards_are_mixed_within_a_window():
    shards = [ListShard([[100 * i + j] for j in range(20)]) for i in range(2)]
    order = make_stream(shards, 40, seed=0).next().ids // 100
    assert 10 < (np.diff(order) != 0).sum() < 30


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1), data=st.data())
def test_spans_are_the_documents_of_a_range(lengths, data):
    owner = [(i, j) for i, length in enumerate(lengths) for j in range(length)]
    low = data.draw(st.integers(0, len(owner) - 1))
    high = data.draw(st.integers(low + 1, len(owner)))
    found = spans(np.cumsum(lengths), low, high)
    assert [(i, j) for i, start, stop in found for j in range(start, stop)] == owner[low:high]
    assert all(start < stop for _, start, stop in found)


@settings(max_examples=200, deadline=None)
@given(count=st.integers(0, 30), room=st.integers(0, 500), seed=st.none() | st.integers(0, 9))
def test_windows_deal_every_shard_once(count, room, seed):
    windows = deal([100] * count, None if seed is None else (seed, 0), room)
    order = [shard for window in windows for shard in window]
    assert sorted(order) == list(range(count))
    assert seed is not None or order == sorted(order)
    assert all(100 * (len(window) - 1) < max(room, 1) for window in windows)
