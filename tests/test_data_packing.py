"""Packed sequences keep document boundaries: documents stay intact if they fit, and no label is
lost or crosses."""

import dataclasses
import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ithaka.config import ConfigError, DataConfig
from ithaka.data import pack
from ithaka.data import stream as data_stream
from ithaka.data.batch import collate, num_valid
from ithaka.data.open import describe_data
from ithaka.data.pack import (
    SEGMENT_DTYPE,
    Documents,
    PackedRound,
    PackedSequence,
    Packing,
    best_fit,
    group_by_area,
    imbalance,
    permutation,
    split_long,
)
from ithaka.data.source import Source, SourcePosition
from ithaka.data.stream import SequenceStream
from test_data_sources import open_with_cache, write_jsonl

PAD = 9999


@dataclass
class ListShard:
    """A shard of documents in memory."""

    documents: list[list[int]]
    num_bytes: int = 100
    is_streamed: bool = False

    def load(self):
        tokens = [token for document in self.documents for token in document]
        return Documents(
            np.asarray(tokens, np.int32), np.asarray([*map(len, self.documents)], np.int64)
        )


class NoCache:
    def prepare(self, shards):
        list(shards)

    def load(self, shard):
        return shard.load()


def make_stream(shards, context, seed=None, **settings):
    return SequenceStream(
        [Source("a", 1, shards, NoCache(), None if seed is None else (seed,))], context, **settings
    )


@st.composite
def corpora(draw):
    """Shards of documents. All tokens are distinct, so that a misplaced one is detected."""
    lengths = draw(st.lists(st.lists(st.integers(1, 12), max_size=5), min_size=1, max_size=4))
    counter = iter(range(100_000))
    return [ListShard([[next(counter) for _ in range(n)] for n in shard]) for shard in lengths]


def one_epoch(shards, context):
    return list(iter(make_stream(shards, context, seed=None, pad_id=PAD).next_sequence, None))


def documents_of(shards):
    return [document for shard in shards for document in shard.documents]


def contents(sequence):
    return *sequence.ids, *sequence.targets


def has_labels(shards):
    """Whether any token has a label: the first of a document has none."""
    return any(len(document) > 1 for document in documents_of(shards))


def pieces_of(documents, context):
    """Cut documents as long_documents=split does."""
    return [
        document[i : i + context]
        for document in documents
        for i in range(0, len(document), context)
    ]


def documents_in(sequence):
    tokens = sequence.ids[: sequence.length].tolist()
    return [
        tokens[a:b] for a, b in itertools.pairwise([*sequence.starts.tolist(), sequence.length])
    ]


@settings(max_examples=100, deadline=None)
@given(shards=corpora(), context=st.integers(2, 16), seed=st.none() | st.integers(0, 5))
def test_an_epoch_has_every_document_once_and_uncut_where_it_fits(shards, context, seed):
    if not has_labels(shards):
        return
    stream = make_stream(shards, context, seed=seed, pad_id=PAD)
    packed = []
    while (sequence := stream.next_sequence()) and stream.position.epoch == 0:
        assert len(sequence.ids) == context and (sequence.ids[sequence.length :] == PAD).all()
        packed += documents_in(sequence)
        assert (sequence.labels() != -100).any()
    missing = [piece for piece in pieces_of(documents_of(shards), context) if piece not in packed]
    assert sorted(packed + missing) == sorted(pieces_of(documents_of(shards), context))
    assert all(len(piece) == 1 for piece in missing), "only sequences without a label are left out"


@settings(max_examples=100, deadline=None)
@given(shards=corpora(), context=st.integers(2, 16))
def test_labels_and_document_ids_keep_documents_apart(shards, context):
    owner = {
        token: i
        for i, piece in enumerate(pieces_of(documents_of(shards), context))
        for token in piece
    }
    for sequence in one_epoch(shards, context):
        ids = sequence.ids
        labels = sequence.labels()
        documents = sequence.document_ids()
        assert labels[0] == -100 and documents[0] == 0
        for i in range(1, context):
            padded = i >= sequence.length
            crosses = padded or owner[int(ids[i])] != owner[int(ids[i - 1])]
            assert labels[i] == (-100 if crosses else ids[i])
            assert documents[i] - documents[i - 1] == int(
                i == sequence.length or (crosses and not padded)
            )


def test_documents_together_are_labelled_like_one_text():
    shards = [ListShard([[1, 2, ~3], [4, 5], [~6, 7, 8, 9]])]
    apart, together = (
        make_stream(shards, 7, pad_id=PAD, documents_together=flag) for flag in (False, True)
    )
    for one, other in zip(
        iter(apart.next_sequence, None), iter(together.next_sequence, None), strict=True
    ):
        assert contents(one) == contents(other)
        assert np.array_equal(one.source_ids(), other.source_ids())
        # even where a document starts, except the first
        assert other.labels().tolist() == [
            -100,
            *one.targets[1 : one.length],
            *[-100] * (7 - one.length),
        ]
        assert other.document_ids().tolist() == [0] * one.length + [1] * (7 - one.length)
    assert one.length < 7, "some sequence has padding"


def test_data_documents_reaches_the_batches(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["ab", "cd", "ef"])  # three tokens each, with eos
    for documents, num_documents in (("apart", 3), ("together", 1)):
        data = DataConfig(path=path, context=9, documents=documents, validation_fraction=0)
        ids = open_with_cache(data).next_batch().document_ids
        assert int(ids.max()) == num_documents - 1


@settings(max_examples=40, deadline=None)
@given(shards=corpora(), context=st.integers(2, 16), data=st.data())
def test_any_position_continues_bit_for_bit(shards, context, data):
    if not has_labels(shards):
        return
    stream = make_stream(shards, context, seed=3, pad_id=PAD)
    for _ in range(data.draw(st.integers(0, 12))):
        stream.next_sequence()
    other = make_stream(shards, context, seed=3, pad_id=PAD)
    other.seek(stream.position)
    for _ in range(8):
        assert_same(stream.next_sequence(), other.next_sequence())
    assert stream.position == other.position


@settings(max_examples=50, deadline=None)
@given(shards=corpora(), context=st.integers(2, 16))
def test_skipping_does_not_change_later_sequences(shards, context):
    if not has_labels(shards):
        return
    full, skipped = (make_stream(shards, context, seed=1) for _ in range(2))
    for i in range(10):
        expected = full.next_sequence()
        if i % 3:
            assert skipped.next_sequence(materialize=False) is None
        else:
            assert_same(expected, skipped.next_sequence())


def assert_same(one, two):
    assert one.length == two.length
    np.testing.assert_array_equal(one.ids, two.ids)
    np.testing.assert_array_equal(one.starts, two.starts)


def test_epochs_hold_the_same_documents_in_another_order(monkeypatch):
    shards = [ListShard([[i * 10 + j for j in range(4)]]) for i in range(20)]
    stream = make_stream(shards, 4, seed=0)
    epochs = [[tuple(stream.next_sequence().ids) for _ in range(20)] for _ in range(3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]
    other = make_stream(shards, 4, seed=1)
    assert epochs[0] != [tuple(other.next_sequence().ids) for _ in range(20)]
    assert stream.position.epoch == 2
    # With rounds of four sequences, each epoch's first round has other documents.
    for name, value in {"ROUND_TOKENS": 16, "ROUND_SEQUENCES": 4, "ROUND_STEPS": 4}.items():
        monkeypatch.setattr(data_stream, name, value)
    stream = make_stream(shards, 4, seed=0)
    epochs = [[tuple(stream.next_sequence().ids) for _ in range(20)] for _ in range(3)]
    assert len({frozenset(epoch[:4]) for epoch in epochs}) == 3


@settings(max_examples=60, deadline=None)
@given(
    shards=corpora(),
    context=st.integers(2, 16),
    together=st.booleans(),
    seed=st.none() | st.just(3),
    marks=st.integers(0, 99),
)
# All pieces of one document, none of which has a label.
@example(shards=[ListShard([[0, 1, 2]])], context=2, together=False, seed=3, marks=4)
def test_sequences_without_a_label_are_left_out_and_counted(shards, context, together, seed, marks):
    """The reference is a round that keeps every sequence."""
    rng = np.random.default_rng(marks)
    for shard in shards:
        shard.documents = [
            [t if rng.random() < 0.3 else ~t for t in document] for document in shard.documents
        ]
    every, labelled = (
        make_stream(shards, context, seed=seed, documents_together=together) for _ in range(2)
    )
    if not any(
        token >= 0 for piece in pieces_of(documents_of(shards), context) for token in piece[1:]
    ):
        return  # raises an error, tested below
    with mock.patch.object(
        pack, "find_labels", lambda shards, segments, sequence, _: np.ones(sequence.max() + 1, bool)
    ):
        sequences = [every.get_sequence(i) for i in range(len(every.current_round()))]
    expected = [contents(sequence) for sequence in sequences if (sequence.labels() != -100).any()]
    if not expected:
        return
    packed = labelled.current_round()
    assert sorted(contents(labelled.get_sequence(i)) for i in range(len(packed))) == sorted(
        expected
    )
    assert labelled.num_left_out == len(sequences) - len(expected)
    assert labelled.read_tokens == every.read_tokens == packed.read_tokens
    if len(expected) == len(sequences):
        for i, sequence in enumerate(sequences):
            assert_same(sequence, labelled.get_sequence(i))


def test_data_without_any_label_is_an_error_not_an_endless_loop():
    shards = [ListShard([[~1, ~2, ~3, 4]]), ListShard([[5], [~6, ~7]])]
    with pytest.raises(ConfigError, match=r"data.context=3 .*check data.train_on"):
        make_stream(shards, 3, seed=0).next_sequence()
    assert make_stream(shards, 3).next_sequence() is None
    assert make_stream(shards, 4, seed=0).next_sequence().targets.tolist() == [-100, -100, -100, 4]


def test_rounds_without_labels_are_skipped(monkeypatch):
    """Also in validation, where there is no next epoch."""
    monkeypatch.setattr(data_stream, "HELD_OUT_SEQUENCES", 1)
    shards = [
        ListShard([[~1] * 4]),
        ListShard([[~1] * 4]),
        ListShard([[~1, 5, 6, 7]]),
        ListShard([[~1] * 4]),
    ]
    stream = make_stream(shards, 4)
    assert stream.next_sequence().targets.tolist() == [-100, 5, 6, 7]
    assert stream.num_left_out == 2 and stream.read_tokens == 12
    assert stream.next_sequence() is None and stream.next_sequence() is None


def test_collate_gives_int64_batches_and_counts_shifted_labels():
    batch = collate(one_epoch([ListShard([[1, 2, 3], [4, 5], [6, 7, 8, 9]])], 5))
    assert all(t.dtype == torch.int64 and t.shape == (2, 5) for t in batch.inputs.values())
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, PAD]]
    assert batch.labels.tolist() == [[-100, 2, 3, -100, 5], [-100, 7, 8, 9, -100]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]
    assert batch.source_ids is None and num_valid(batch.labels) == 6
    assert num_valid(torch.tensor([[7, -100, -100]])) == 0


def test_the_samples_of_a_batch_are_numbered_across_its_rows():
    """A row with two pairs, and one with a pair and padding."""
    pair = np.array([0, 1])
    rows = [
        PackedSequence(
            np.arange(4),
            np.arange(4),
            np.arange(4),
            4,
            np.zeros(4),
            parents=np.full(4, -1),
            samples=[*pair, *pair + 2],
        ),
        PackedSequence(
            np.arange(4),
            np.arange(4),
            np.arange(2),
            2,
            np.zeros(2),
            parents=np.array([-1, 0]),
            samples=pair,
        ),
    ]
    batch = collate(rows)
    assert (
        batch.sample_ids.tolist() == [[0, 1, 2, 3], [4, 5, -1, -1]] and batch.num_preferences == 3
    )
    assert batch.parents.tolist() == [[-1] * 4, [-1, 0, -1, -1]]


def test_long_documents_are_split_and_the_rest_is_packed_like_a_document():
    sequences = one_epoch([ListShard([list(range(10)), [50]])], 4)
    assert [documents_in(s) for s in sequences] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9], [50]]]


def test_long_documents_are_dropped_and_counted_and_do_not_fill_a_round(monkeypatch):
    monkeypatch.setattr(data_stream, "ROUND_SEQUENCES", 2)
    stream = make_stream(
        [ListShard([list(range(10)), [50, 51], [60] * 9])], 4, long_documents="drop", seed=0
    )
    assert [stream.next_sequence().ids[:2].tolist() for _ in range(2)] == [
        [50, 51]
    ] * 2 and stream.position.epoch == 1
    assert stream.num_long == 2
    with pytest.raises(ValueError, match="no tokens"):
        make_stream(
            [ListShard([list(range(10))])], 4, long_documents="drop", seed=0
        ).next_sequence()


def test_long_documents_are_refused_by_name(tmp_path):
    for name, size in {"a.txt": 9, "b.txt": 30, "c.txt": 9}.items():
        (tmp_path / name).write_text("x" * size)
    data = DataConfig(path=tmp_path, context=16, validation_fraction=0, long_documents="refuse")
    match = r"b.txt .* 31 tokens.*data.context=16.*data.long_documents to split or drop"
    with pytest.raises(ConfigError, match=match):
        open_with_cache(data).next_batch()
    open_with_cache(dataclasses.replace(data, context=31)).next_batch()


def test_empty_shards_are_an_error_not_an_endless_loop():
    with pytest.raises(ValueError, match="no tokens"):
        make_stream([ListShard([])], 4, seed=0).next_sequence()


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch):
    for name, value in {
        "ROUND_TOKENS": 0,
        "ROUND_SEQUENCES": 3,
        "ROUND_STEPS": 2,
        "HELD_OUT_SEQUENCES": 3,
    }.items():
        monkeypatch.setattr(data_stream, name, value)


class CountingCache(NoCache):
    """Counts the shards loaded, and those tokenized ahead."""

    def __init__(self):
        self.loaded = 0
        self.prepared = 0

    def prepare(self, shards):
        self.prepared += len(list(shards))

    def load(self, shard):
        self.loaded += 1
        return shard.load()


def test_a_run_reads_no_more_than_it_needs_before_its_first_step(monkeypatch):
    monkeypatch.setattr(data_stream, "ROUND_SEQUENCES", 64)
    # each fills a sequence
    shards = [ListShard([[8 * i + j for j in range(8)]]) for i in range(200)]

    def run(needed, count, state=None, key=(3,)):
        cache = CountingCache()
        stream = SequenceStream([Source("a", 1, shards, cache, key)], 8, needed=needed)
        if state is not None:
            position = json.loads(json.dumps(state))
            packings = tuple(Packing(**packing) for packing in position["packings"])
            sources = tuple(SourcePosition(**source) for source in position["sources"])
            stream.seek(data_stream.StreamPosition(position["sequences"], sources, packings))
        return [stream.next_sequence().ids.tolist() for _ in range(count)], cache, stream

    for needed, loaded in ((1, 9), (4, 12), (63, 64), (64, 64), (1000, 64), (None, 64)):
        sequences, cache, stream = run(needed, 1)
        assert cache.loaded == loaded and bool(cache.prepared) == (needed is None or needed > 64)
        if needed is None or needed >= 64 - data_stream.SPARE_SEQUENCES:
            assert run(needed, 80)[0] == run(None, 80)[0], "the order does not change"
        else:
            assert len(sequences[0]) == 8
    assert run(3, 1, key=None)[1].loaded == 3, "held-out data is not shuffled"
    # A resumed run stays in its round, even with more steps.
    sequences, _, stream = run(4, 30)
    _, _, stopped = run(4, 3)
    state = dataclasses.asdict(stopped.position)
    assert sequences == run(4, 3)[0] + run(1, 27, state)[0] == run(4, 3)[0] + run(90, 27, state)[0]
    assert len({tuple(ids) for ids in sequences[:24]}) == 24, "two rounds of one epoch"


def test_rounds_are_smaller_only_where_contexts_are_long(monkeypatch):
    for name, value in {"ROUND_TOKENS": 1 << 24, "ROUND_SEQUENCES": 64, "ROUND_STEPS": 32}.items():
        monkeypatch.setattr(data_stream, name, value)
    monkeypatch.setattr(data_stream, "HELD_OUT_SEQUENCES", 16)
    for context in (4096, 1 << 17, 1 << 18):
        for packing in (Packing(context, 1), Packing(context, 1, max_sequences=9)):
            assert data_stream.tokens_per_round(packing) == 1 << 24
        assert (
            data_stream.tokens_per_round(Packing(context, 1, max_sequences=2), False)
            == 16 * context
        )
    assert data_stream.tokens_per_round(Packing(10**7, 1)) == 64 * 10**7
    assert (
        data_stream.tokens_per_round(Packing(10**7, 8, max_sequences=16))
        == data_stream.tokens_per_round(Packing(10**7, 8, max_sequences=16), False)
        == 16 * 10**7
    )
    assert data_stream.tokens_per_round(Packing(10**7, 8, max_sequences=999)) == 256 * 10**7


def test_documents_of_different_shards_are_mixed_within_a_round():
    shards = [ListShard([[100 * i + j] * 2 for j in range(20)]) for i in range(2)]
    order = make_stream(shards, 80, seed=0).next_sequence().ids[::2] // 100
    assert 10 < (np.diff(order) != 0).sum() < 30


def pieces_with(lengths):
    pieces = np.zeros(len(lengths), SEGMENT_DTYPE)
    pieces["length"] = lengths
    return pieces


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 16), min_size=1, max_size=40))
def test_best_fit_takes_the_fullest_sequence_with_room(lengths):
    rooms = []
    expected = np.zeros(len(lengths), int)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i] if lengths[i] > 2 else 0):
        fits = [(room, sequence) for sequence, room in enumerate(rooms) if room >= lengths[i]]
        expected[i] = min(fits)[1] if fits else len(rooms)
        rooms += [] if fits else [16]
        rooms[expected[i]] -= lengths[i]
    assert best_fit(np.asarray(lengths), 16).tolist() == expected.tolist()


@settings(max_examples=200, deadline=None)
@given(
    count=st.integers(1, 60),
    group=st.integers(1, 9),
    lead=st.integers(0, 8),
    seed=st.integers(0, 3),
)
def test_sequences_of_similar_area_are_grouped_and_groups_are_shuffled(count, group, lead, seed):
    lead = lead % group
    areas = permutation(count, (9,)).astype(float)
    order = group_by_area(areas, group, lead, (seed,))
    assert sorted(order) == list(range(count))
    groups = areas[order[lead:]][: max(count - lead, 0) // group * group].reshape(-1, group)
    middle = count - groups.size
    assert all(
        row.max() - row.min() <= group - 1 + middle and (np.diff(row) > 0).all() for row in groups
    )
    # only across the removed middle
    assert sum(row.max() - row.min() > group - 1 for row in groups) <= 1
    if len(groups) > 8:
        assert (np.diff(groups[:, 0]) < 0).any()
    shared = areas[np.concatenate([order[:lead], order[lead + groups.size :]])]
    assert not len(shared) or np.ptp(shared) < len(shared)


def test_grouping_balances_the_ranks_and_packing_fills_the_sequences():
    """Log-normal lengths, around 8K and far beyond the context, at 128K on 8 data-parallel
    ranks."""
    rng = np.random.default_rng(0)
    context = 1 << 17
    for median, sigma, count in [(8192, 1.0, 3000), (1 << 20, 1.0, 60)]:
        lengths = np.maximum(rng.lognormal(np.log(median), sigma, count).astype(np.int64), 1)
        packed = PackedRound(split_long(pieces_with(lengths), context), Packing(context, 8), (0,))
        assert packed.num_tokens == lengths.sum() > 0.98 * len(packed) * context
        shuffled = packed.areas[permutation(len(packed), (1,))]
        assert imbalance(packed.areas, 8, 1) < 1.06 and imbalance(packed.areas, 8, 1) < imbalance(
            shuffled, 8, 1
        )
        assert imbalance(shuffled, 8, 1) > 2 or median > context


def test_a_hundred_thousand_documents_are_packed_in_well_below_a_second():
    lengths = np.maximum(np.random.default_rng(0).lognormal(6, 1, 100_000).astype(np.int64), 1)
    start = time.process_time()
    PackedRound(split_long(pieces_with(lengths), 2048), Packing(2048, 8), (0,))
    assert time.process_time() - start < 1.5  # 0.3 on an idle machine


# Mixtures


def mixed(weights, sizes, context=64, **settings):
    """Source i has sizes[i] documents of up to 9 tokens i."""
    shards = [[ListShard([[i] * (j % 9 + 1) for j in range(size)])] for i, size in enumerate(sizes)]
    sources = [
        Source(str(i), w, s, NoCache(), (5, i))
        for i, (s, w) in enumerate(zip(shards, weights, strict=True))
    ]
    return SequenceStream(sources, context, **settings)


def test_sources_are_mixed_by_their_weights_and_begin_their_own_epochs(monkeypatch):
    monkeypatch.setattr(data_stream, "ROUND_SEQUENCES", 40)
    stream = mixed([1, 6, 3], [900, 300, 2000])
    for _ in range(6):
        packed = stream.current_round()
        counts = np.zeros(3)
        together = 0
        while stream.current_round() is packed:
            sequence = stream.next_sequence()
            assert (sequence.source_ids() == sequence.ids)[: sequence.length].all()
            counts += np.bincount(sequence.ids[: sequence.length], minlength=3)
            together += len(set(sequence.sources.tolist())) > 1
        np.testing.assert_allclose(counts / counts.sum(), [0.1, 0.6, 0.3], atol=0.01)
        assert together > 10
    epochs = [cursor.epoch for cursor in stream.position.sources]
    assert epochs[1] > 5 and epochs[0] == epochs[2] == 0


def test_a_mixture_continues_from_any_position():
    stream = mixed([1, 2], [40, 30], context=16)
    for _ in range(80):
        other = mixed([1, 2], [40, 30], context=16)
        other.seek(stream.position)
        assert_same(stream.next_sequence(), other.next_sequence())
        assert stream.position == other.position
    assert stream.position.epoch > 0


def test_each_data_source_is_read_with_its_own_options(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["a" * n for n in range(1, 51)])
    write_jsonl(tmp_path / "b.jsonl", ["b" * n for n in range(1, 51)], field="body")
    sources = [
        {"path": tmp_path / "a.jsonl", "weight": 3},
        {"path": tmp_path / "b.jsonl", "text_field": "body"},
    ]
    config = DataConfig(sources=sources, context=128, validation_fraction=0.1)
    data = open_with_cache(config)
    batch = data.next_batch()
    held_out = next(data.validation_batches(2))
    assert data.source_names == ["a", "b"]
    for each in (batch, held_out):
        assert set(each.input_ids[each.source_ids == 1].tolist()) == {ord("b"), 257}
        assert set(each.input_ids[each.source_ids == 0].tolist()) <= {ord("a"), 257, 258}
    summary = describe_data(data, 10)
    assert (
        summary["source a"].startswith("75.0% of the tokens; 1 file (jsonl)")
        and "of b (10 seq" in summary["epochs"]
    )
    state = data.state_dict()
    open_with_cache(config).load_state_dict(json.loads(json.dumps(state)))
    other = dataclasses.replace(config, sources=[{**sources[0], "weight": 2}, sources[1]])
    with pytest.raises(ConfigError, match="data.sources, .*checkpoint.*export the run"):
        open_with_cache(dataclasses.replace(other, text_field="body")).load_state_dict(state)


def test_sources_with_the_same_stem_are_named_by_their_folders_from_any_working_directory(
    tmp_path, monkeypatch
):
    for folder in ("en", "fr"):
        (tmp_path / "data" / folder).mkdir(parents=True)
        write_jsonl(tmp_path / "data" / folder / "x.jsonl", ["a" * 20] * 50)
    monkeypatch.chdir(tmp_path)
    for root in (Path("data"), tmp_path / "data"):
        sources = [{"path": root / folder / "x.jsonl"} for folder in ("en", "fr")]
        assert open_with_cache(DataConfig(sources=sources, context=128)).source_names == [
            "en/x.jsonl",
            "fr/x.jsonl",
        ]
