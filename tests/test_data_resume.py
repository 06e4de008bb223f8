"""The global stream is the same for any number of ranks, and continues bit for bit from its
state."""

import dataclasses
import itertools
import json
import tracemalloc

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from ithaka.config import ConfigError, DataConfig
from ithaka.data import cache
from ithaka.data import stream as data_stream
from ithaka.data.batch import num_valid
from ithaka.data.cache import TokenCache
from ithaka.data.documents import read
from ithaka.data.tokenizer import ByteTokenizer
from test_data_sources import TEXTS, open_with_cache, write_jsonl, write_parquet

BYTES = ByteTokenizer()
KINDS = ["text", "directory", "jsonl", "parquet", "mixture"]
SLOW_KINDS = ("directory", "jsonl")  # the mixture has both
few_kinds = pytest.mark.parametrize(  # for tests that depend little on the kind of file
    "data", ["mixture", pytest.param("jsonl", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture(
    params=[pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW_KINDS)) for kind in KINDS]
)
def data(request, tmp_path, monkeypatch):
    """A config for each kind of source. A round spans many shards, an epoch several rounds."""
    monkeypatch.setattr(read, "TEXT_CHUNK_BYTES", 50)
    monkeypatch.setattr(read, "SHARD_BYTES", 300)
    monkeypatch.setattr(read, "BATCH_RECORDS", 7)
    small_rounds(monkeypatch)
    path = {
        "text": lambda: write_text(tmp_path / "a.txt"),
        "directory": lambda: write_directory(tmp_path),
        "jsonl": lambda: write_jsonl(tmp_path / "a.jsonl", TEXTS[:40]),
        "parquet": lambda: write_parquet(tmp_path / "a.parquet", TEXTS[:40], row_group_size=15),
        "mixture": lambda: None,
    }[request.param]()
    sources = []
    if path is None:
        few = write_jsonl(tmp_path / "few.jsonl", TEXTS[:10])
        many = write_directory(tmp_path / "many")
        sources = [{"path": few, "weight": 1}, {"path": many, "weight": 2}]
    return DataConfig(path=path, sources=sources, context=64, validation_fraction=0.1)


def small_rounds(monkeypatch, sequences=6):
    for name, value in {"ROUND_TOKENS": 0, "ROUND_SEQUENCES": sequences, "ROUND_STEPS": 1}.items():
        monkeypatch.setattr(data_stream, name, value)


def write_text(path):
    path.write_text("\n".join(TEXTS[:40]))
    return path


def write_directory(path):
    path.mkdir(exist_ok=True)
    for i, text in enumerate(TEXTS[:40]):
        (path / f"{i:02}.txt").write_text(text)
    return path


def open_stream(data, rank=0, size=1, batch=1, seed=5, accumulate=1):
    return open_with_cache(
        data, seed, dp_rank=rank, dp_size=size, batch=batch, accumulate=accumulate
    )


def open_on_ranks(data, size, batch=1, accumulate=1, state=None):
    """Open the stream of each rank, and restore `state` in all."""
    streams = [open_stream(data, rank, size, batch, accumulate=accumulate) for rank in range(size)]
    for stream in streams if state is not None else ():
        stream.load_state_dict(json.loads(state))
    return streams


def global_rows(streams, calls):
    """All ranks' rows in global order: sequence i of a batch is row i // size of rank i % size."""
    rows = []
    for _ in range(calls):
        batches = [
            torch.stack(list(stream.next_batch().inputs.values()), dim=1) for stream in streams
        ]
        rows += [row for group in zip(*batches, strict=True) for row in group]
    return rows


def rest_of_epoch(streams):
    """The sorted tokens of all ranks' `streams` up to the end of the epoch, without padding."""
    tokens = []
    epoch = streams[0].position.epoch
    while True:
        rows = global_rows(streams, 1)
        if streams[0].position.epoch > epoch:
            return sorted(token for token in tokens if token != BYTES.pad_id)
        tokens += [token for row in rows for token in row[0].tolist()]


def assert_equal(one, two):
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b)


@few_kinds
def test_a_step_has_the_same_sequences_on_any_number_of_ranks(data):
    (reference,) = open_on_ranks(data, 1, accumulate=12)
    alone = global_rows([reference], 96)
    assert reference.position.epoch > 0  # epochs and rounds end inside a step
    for size, batch, accumulate in [(1, 4, 3), (2, 1, 6), (2, 3, 2), (4, 1, 3), (3, 4, 1)]:
        assert_equal(
            global_rows(open_on_ranks(data, size, batch, accumulate), 96 // (size * batch)), alone
        )


def test_resume_anywhere_in_two_epochs_is_bitwise(data):
    reference = open_stream(data)
    states = []
    expected = []
    while reference.position.epoch < 2:
        states.append(json.dumps(reference.state_dict()))
        expected += global_rows([reference], 1)
    assert len(states) > 20
    for i in range(0, len(states), 3):
        resumed = open_stream(data)
        resumed.load_state_dict(json.loads(states[i]))
        assert_equal(global_rows([resumed], min(5, len(expected) - i)), expected[i : i + 5])


@few_kinds
@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 1), (2, 4)])
def test_resume_on_another_number_of_ranks_continues_with_the_same_sequences(data, before, after):
    expected = global_rows(open_on_ranks(data, 1, accumulate=4), 60)
    streams = open_on_ranks(data, before, accumulate=4 // before)
    done = global_rows(streams, 20 // before)
    states = [json.dumps(stream.state_dict()) for stream in streams]
    assert all(state == states[0] for state in states) and json.loads(states[0])["sequences"] == 20
    resumed = open_on_ranks(data, after, accumulate=4 // after, state=states[0])
    assert_equal(done + global_rows(resumed, 40 // after), expected)


@few_kinds
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (4, 1)])
def test_another_step_size_continues_the_round_without_loss(data, before, after):
    streams = open_on_ranks(data, before)
    global_rows(streams, 4 // before)
    state = json.dumps(streams[0].state_dict())
    same = open_on_ranks(data, before, state=state)
    other = open_on_ranks(data, after, state=state)
    left = len(same[0].stream.current_round()) - same[0].position.packings[-1].done
    calls = left // (before * after)
    assert_equal(global_rows(same, calls * after), global_rows(other, calls * before))
    # In the next round, groups start where steps start.
    stream = other[0].stream
    while stream.position.sources == same[0].position.sources:
        stream.next_sequence()
    assert (left + stream.position.packings[-1].num_leading) % after == 0


@few_kinds
@pytest.mark.parametrize(
    "change", [{"size": 3}, {"context": 16}, {"context": 100}, {"context": 30, "size": 2}]
)
def test_an_epoch_continues_with_other_steps_or_context_without_loss(data, change):
    """Resume twice: the rest of a round is packed again each time."""
    expected = rest_of_epoch(open_on_ranks(data, 1))
    (stream,) = open_on_ranks(data, 1)
    rows = [row[0] for row in global_rows([stream], 4)]
    state = json.dumps(stream.state_dict())
    other = dataclasses.replace(data, context=change.get("context", data.context))
    streams = open_on_ranks(other, change.get("size", 1), state=state)
    rows += [row[0] for row in global_rows(streams, 1)]
    state = json.dumps(streams[0].state_dict())
    done = sorted(token for row in rows for token in row.tolist() if token != BYTES.pad_id)
    assert sorted(done + rest_of_epoch(open_on_ranks(data, 1, state=state))) == expected


def test_resuming_tokenizes_only_the_current_round(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "TEXT_CHUNK_BYTES", 50)
    monkeypatch.setattr(read, "PART_BYTES", 100)
    small_rounds(monkeypatch, 3)
    data = DataConfig(path=write_text(tmp_path / "a.txt"), context=16, validation_fraction=0)
    stream = open_stream(data)
    for _ in range(50):
        stream.next_batch()
    encoded = []
    encode = ByteTokenizer.encode_documents
    monkeypatch.setattr(
        ByteTokenizer,
        "encode_documents",
        lambda self, t, *a: encoded.append(t) or encode(self, t, *a),
    )
    monkeypatch.setattr(TokenCache, "prepare", lambda self, shards: None)
    resumed = open_stream(data)
    resumed.load_state_dict(stream.state_dict())
    sequence = resumed.stream.next_sequence()
    assert len(encoded) <= 2 and np.array_equal(sequence.ids, stream.next_batch().input_ids[0])


def test_another_seed_gives_another_order(tmp_path):
    data = DataConfig(path=write_directory(tmp_path), context=64)
    one, same, other = (global_rows([open_stream(data, seed=seed)], 10) for seed in (1, 1, 2))
    assert_equal(one, same)
    assert not torch.equal(torch.stack(one), torch.stack(other))


def test_the_state_of_other_data_is_refused(tmp_path):
    data = DataConfig(path=write_directory(tmp_path), context=64)
    state = open_stream(data).state_dict()
    with pytest.raises(ConfigError, match="train.seed .*checkpoint.*export the run"):
        open_stream(data, seed=6).load_state_dict(state)
    (tmp_path / "00.txt").write_text("longer than it was before")
    with pytest.raises(ConfigError, match="data.path, its files"):
        open_stream(data).load_state_dict(state)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    "changed", [{"text_field": "other"}, {"validation_fraction": 0.3}, {"validation_fraction": 0}]
)
def test_resuming_with_other_reading_settings_is_refused(tmp_path, kind, changed):
    path = tmp_path / f"a.{kind}"
    table = {"text": TEXTS[:20], "other": [text[::-1] for text in TEXTS[:20]]}
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table(table), path)
    else:
        rows = [{"text": text, "other": other} for text, other in zip(*table.values(), strict=True)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(path=path, context=64, validation_fraction=0.1)
    stream = open_stream(data)
    stream.next_batch()
    open_stream(data).load_state_dict(stream.state_dict())
    with pytest.raises(
        ConfigError, match=r"data.text_field, .*data.validation_fraction, .*checkpoint"
    ):
        open_stream(dataclasses.replace(data, **changed)).load_state_dict(stream.state_dict())


def test_validation_is_fixed_and_apart_from_training(data):
    stream = open_stream(data)
    first = [batch.input_ids for batch in stream.validation_batches(3)]
    stream.next_batch()
    again = [batch.input_ids for batch in stream.validation_batches(3)]
    assert 1 <= len(first) <= 3
    assert_equal(first, again)
    assert_equal(first[:1], [batch.input_ids for batch in stream.validation_batches(1)])
    assert_equal(
        first, [batch.input_ids for batch in open_stream(data, seed=99).validation_batches(3)]
    )
    held_out = sum(sequence.length for sequence in stream.validation_sequences(10**6))
    num_trained = 0
    while (sequence := stream.stream.next_sequence()) and stream.stream.position.epoch == 0:
        num_trained += sequence.length
    assert 0 < held_out < num_trained / 2


@few_kinds
@pytest.mark.parametrize("count", [1, 3, 4, 5])
def test_validation_has_as_many_batches_on_every_rank_and_each_label_once(data, count):
    on_one_rank = list(open_stream(data).validation_batches(count))
    expected = sum(num_valid(batch.labels) for batch in on_one_rank)
    for size, batch in [(2, 1), (2, 2), (4, 1)]:
        ranks = [
            list(open_stream(data, rank, size, batch).validation_batches(count))
            for rank in range(size)
        ]
        assert {len(batches) for batches in ranks} == {-(-len(on_one_rank) // (size * batch))}
        assert sum(num_valid(b.labels) for b in itertools.chain(*ranks)) == expected
        assert all(b.input_ids.shape == (batch, 64) for b in itertools.chain(*ranks))
        real = [
            row.sum()
            for b in itertools.chain(*ranks)
            for row in b.input_ids
            if row.tolist() != [258] * 64
        ]
        assert sorted(map(int, real)) == sorted(int(b.input_ids.sum()) for b in on_one_rank)


def test_validation_reads_its_own_path_or_nothing(tmp_path):
    (tmp_path / "train.txt").write_text("train " * 50)
    (tmp_path / "other.txt").write_text("other")
    data = DataConfig(
        path=tmp_path / "train.txt", validation_path=tmp_path / "other.txt", context=8
    )
    (sequence,) = open_stream(data).validation_sequences(5)
    assert sequence.ids.tolist() == [*b"other", 257, 258, 258]
    without = open_stream(DataConfig(path=tmp_path / "train.txt", validation_fraction=0, context=8))
    assert list(without.validation_batches(5)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(read, "TEXT_CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(cache, "BATCH_CHARS", 1 << 16)
    monkeypatch.setattr(read, "SHARD_BYTES", 1 << 16)
    path = tmp_path / {"text": "a.txt", "jsonl": "a.jsonl"}[kind]
    path.write_text(('{"text": "' + "x" * 1011 + '"}\n') * (1 << 13))
    # numpy imports some modules at their first use
    open_stream(DataConfig(path=path, context=1 << 13)).next_batch()
    data = open_stream(DataConfig(path=path, context=1 << 13))
    tracemalloc.start()
    while data.position.epoch == 0:
        data.next_batch()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size >= 1 << 23 and peak_bytes < 1 << 21


@few_kinds
def test_positions_of_an_earlier_format_are_refused(data):
    state = {
        "version": 1,
        "data": "0",
        "epoch": 0,
        "sequences": 7,
        "unit": 1,
        "cursor": 0,
        "offset": 4,
    }
    # 5: pieces of long documents differ
    for old in (state, {**open_stream(data).state_dict(), "version": 5}):
        with pytest.raises(
            ConfigError, match=f"format {old['version']}, .* reads 7.*resume with .* or export"
        ):
            open_stream(data).load_state_dict(old)
