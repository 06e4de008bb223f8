"""One process tokenizes each document once per run; the others wait for its files, but not
forever."""

import contextlib
import dataclasses
import json
import os
import pickle
import time
from collections import Counter
from unittest import mock

import pytest
import torch.distributed as dist

from ithaka.comm.agree import ask_rank_0
from ithaka.config import ConfigError, DataConfig, ReadingConfig
from ithaka.data import cache
from ithaka.data import stream as data_stream
from ithaka.data.cache import TokenCache
from ithaka.data.documents import read
from ithaka.data.documents.files import find_files
from ithaka.data.documents.read import make_shards
from ithaka.data.held_out import find_data
from ithaka.data.open import describe_data, open_data
from ithaka.data.tokenizer import ByteTokenizer, Tokenizer
from ithaka.exits import TransientError
from test_data_sources import TEXTS, write_jsonl
from test_data_tokenizer import word_tokenizer


class CountingTokenizer(ByteTokenizer):
    """Records its input in a file that all processes share."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def encode_documents(self, texts, trained, starts):
        lines = [
            json.dumps([os.getpid(), text]) + "\n"
            for text in texts
            if "quick brown fox" not in text
        ]
        if lines:  # the sentence used for the fingerprint is not a document
            with self.log.open("a") as file:
                file.writelines(lines)
        return super().encode_documents(texts, trained, starts)

    def recorded(self):
        return (
            [json.loads(line) for line in self.log.read_text().splitlines()]
            if self.log.exists()
            else []
        )


@contextlib.contextmanager
def small_pieces():
    """Make shards and rounds so small that an epoch has many."""
    rounds = {"ROUND_TOKENS": 0, "ROUND_SEQUENCES": 4, "ROUND_STEPS": 1, "HELD_OUT_SEQUENCES": 2}
    with mock.patch.multiple(data_stream, **rounds), mock.patch.object(read, "SHARD_BYTES", 300):
        yield


@pytest.fixture
def data(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS[:60])
    with small_pieces():
        yield DataConfig(path=path, context=64, validation_fraction=0.1)


def open_stream(data, folder, log="log", fills=True, **where):
    where |= {"cache_dir": folder / "run" / "tokens", "fills_cache": fills}
    tokenizer = CountingTokenizer(folder / log)
    return open_data(data, tokenizer=tokenizer, seed=0, **where), tokenizer


def test_two_epochs_validation_summary_and_a_resumed_run_tokenize_each_document_once(
    data, tmp_path
):
    stream, tokenizer = open_stream(data, tmp_path)
    describe_data(stream, 1)
    while stream.position.epoch < 2:
        stream.next_batch()
        list(stream.validation_batches(2))
    resumed, _ = open_stream(data, tmp_path)
    resumed.load_state_dict(state := stream.state_dict())
    batch = stream.next_batch().input_ids.tolist()
    assert resumed.next_batch().input_ids.tolist() == batch
    texts = [text for _, text in tokenizer.recorded()]
    assert len(texts) == len(set(texts)) and set(texts) <= set(TEXTS[:60]) and len(texts) > 50
    # a new format invalidates the cached tokens
    with mock.patch.object(cache, "CACHE_FORMAT", cache.CACHE_FORMAT + 1):
        resumed, newer = open_stream(data, tmp_path, log="newer")
        resumed.load_state_dict(state)
        assert resumed.next_batch().input_ids.tolist() == batch and newer.recorded()


def read_batches(data, folder):
    rank = dist.get_rank()
    if rank == 0:
        time.sleep(0.5)  # the others wait for the one that tokenizes
    with small_pieces():
        stream, _ = open_stream(data, folder, dp_rank=rank, dp_size=3, fills=rank == 0)
        return os.getpid(), [stream.next_batch().input_ids.tolist() for _ in range(40)]


def test_one_rank_tokenizes_for_all_ranks_of_a_node(ranks, data, tmp_path):
    results = ranks.run(3, read_batches, data, tmp_path)
    encoded = [
        (pid, text) for pid, text in CountingTokenizer(tmp_path / "log").recorded() if text in TEXTS
    ]
    assert {pid for pid, _ in encoded} == {results[0][0]}
    assert len(encoded) == len({text for _, text in encoded}) > 50
    alone, _ = open_stream(data, tmp_path / "alone", log="log2", accumulate=3)
    expected = [alone.next_batch().input_ids.tolist() for _ in range(120)]
    assert [
        batch for step in zip(*(batches for _, batches in results), strict=True) for batch in step
    ] == expected


def choose_fillers(folder):
    """Choose the ranks that tokenize: two nodes that share a directory, two that do not, and one
    node of four ranks."""
    rank = dist.get_rank()
    chosen = []
    with mock.patch.dict(os.environ, {"RANK": str(rank), "LOCAL_RANK": str(rank % 2)}):
        for name in ("shared", f"node-{rank // 2}"):
            (folder / name).mkdir(exist_ok=True)
            chosen.append(cache.decide_fills(folder / name / "tokens"))
    with mock.patch.dict(os.environ, {"RANK": str(rank), "LOCAL_RANK": str(rank)}):
        chosen.append(cache.decide_fills(folder / "one-node"))
    return chosen


def test_one_rank_tokenizes_for_all_nodes_that_share_a_directory(ranks, tmp_path):
    chosen = list(zip(*ranks.run(4, choose_fillers, tmp_path), strict=True))
    assert chosen == [
        (True, False, False, False),
        (True, False, True, False),
        (True, False, False, False),
    ]
    assert not [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() or path.name in ("tokens", "one-node")
    ]


def test_only_documents_needed_soon_are_tokenized(data, tmp_path):
    stream, tokenizer = open_stream(data, tmp_path)
    stream.next_batch()
    time.sleep(0.3)
    assert len(stream.stream.sources[0].shards) > 10
    assert 0 < len(tokenizer.recorded()) < 40


def test_a_rank_that_waits_too_long_names_the_file(data, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "TIMEOUT_S", 0.1)
    stream, _ = open_stream(data, tmp_path, fills=False)
    with pytest.raises(TransientError, match=r"a.jsonl .*first rank of this node.*run/tokens"):
        stream.next_batch()


def test_unreadable_data_is_refused_on_waiting_ranks_too(data, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:60], field="body")
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n' + (tmp_path / "a.jsonl").read_text())
    for fills in (True, False):
        stream, _ = open_stream(data, tmp_path, fills=fills)
        with pytest.raises(
            ConfigError, match=r"a.jsonl line \d+: .*data.text_field=text.*fields are id, body"
        ):
            stream.next_batch()
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:60])
    stream, _ = open_stream(data, tmp_path)
    assert not list((tmp_path / "run" / "tokens").glob("*.failed"))
    stream.next_batch()


def test_a_full_disk_is_named(data, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TokenCache, "_write_tokens", full)
    stream, _ = open_stream(data, tmp_path)
    with pytest.raises(TransientError, match="a.jsonl .*No space left on device.*train.run_dir"):
        stream.next_batch()


def test_the_cache_is_deleted_after_the_run_and_kept_for_resume(data, tmp_path):
    stream, _ = open_stream(data, tmp_path)
    stream.next_batch()
    stream.close()
    assert list((tmp_path / "run" / "tokens").glob("*.tokens"))
    assert not list((tmp_path / "run" / "tokens").glob("*.part"))
    stream, _ = open_stream(data, tmp_path)
    stream.close(remove=True)
    assert not (tmp_path / "run").exists()


def test_changed_files_and_other_tokenizers_are_tokenized_again(tmp_path):
    def tokens(tokenizer):
        (shard,) = make_shards(find_files(path).files, ReadingConfig())
        store = TokenCache(tmp_path / "tokens", tokenizer)
        return store.load(shard).tokens.tolist()

    path = tmp_path / "a.txt"
    path.write_text("a b")
    assert tokens(ByteTokenizer()) == [97, 32, 98, 257]
    assert tokens(Tokenizer(word_tokenizer())) == [3, 4, 2] and tokens(
        Tokenizer(word_tokenizer(True))
    ) == [1, 3, 4, 2]
    path.write_text("b a")
    os.utime(path, ns=(1, 1))
    assert tokens(ByteTokenizer()) == [98, 32, 97, 257]
    assert len(list((tmp_path / "tokens").glob("*.tokens"))) == 4


def test_a_node_with_its_own_copy_of_the_data_finds_the_tokens_of_rank_0(
    data, tmp_path, monkeypatch
):
    """rsync without -t and pip change modification times; the copy may also be in another
    directory."""
    found = pickle.loads(pickle.dumps(find_data(data)))
    stream, _ = open_stream(data, tmp_path, found=found)
    batch = stream.next_batch().input_ids.tolist()
    os.utime(data.path, ns=(1, 1))
    monkeypatch.setattr(cache, "TIMEOUT_S", 5.0)
    waiting, _ = open_stream(data, tmp_path, fills=False, found=found)
    assert waiting.next_batch().input_ids.tolist() == batch


def ask_once(folder):
    """Ask rank 0 for its number, for data of which the other ranks have none, and for an error."""
    rank = dist.get_rank()
    path = folder / f"{rank}.jsonl"
    asked = []
    number = ask_rank_0(lambda: asked.append(rank) or rank)
    found = ask_rank_0(find_data, DataConfig(path=path, validation_fraction=0))
    try:
        ask_rank_0(find_data, DataConfig(path=folder / "nowhere"))
    except ConfigError as error:
        return number, found.sources[0].label, str(error), asked


def test_rank_0_finds_the_data_for_all(ranks, tmp_path):
    write_jsonl(tmp_path / "0.jsonl", TEXTS[:5])
    for rank, (number, label, error, asked) in enumerate(ranks.run(2, ask_once, tmp_path)):
        assert (
            asked == [0] * (rank == 0)
            and number == 0
            and label == f"data.path={tmp_path / '0.jsonl'}"
        )
        assert error.startswith(f"data.path={tmp_path / 'nowhere'} does not exist")


def test_few_metadata_calls_are_made_while_one_rank_tokenizes(data, tmp_path, monkeypatch):
    calls = Counter()

    def count(name, function):
        return lambda *arguments, **options: (
            calls.update([name]),
            function(*arguments, **options),
        )[1]

    monkeypatch.setattr(os, "utime", count("utime", os.utime))
    monkeypatch.setattr(cache, "PROGRESS_S", 1e9)  # however slow this machine is
    stream, _ = open_stream(data, tmp_path)
    stream.next_batch()
    stream.cache.close()  # waits for the shard that the background thread is writing
    assert 0 < calls["utime"] <= len(list((tmp_path / "run" / "tokens").glob("*.tokens")))
    monkeypatch.setattr(cache, "TIMEOUT_S", 100.0)
    waits = []
    monkeypatch.setattr(cache.time, "sleep", waits.append)
    monkeypatch.setattr(cache.time, "monotonic", lambda: sum(waits))
    monkeypatch.setattr(cache.Path, "exists", count("exists", lambda path: False))
    monkeypatch.setattr(cache.Path, "read_text", count("read", cache.Path.read_text))
    waiting, _ = open_stream(data, tmp_path / "other", fills=False)
    with pytest.raises(TransientError, match="was not tokenized"):
        waiting.cache.load(waiting.stream.sources[0].shards[0])
    assert 100 <= sum(waits) < 103 and max(waits) == cache.POLL_MAX_S and waits[0] == cache.POLL_S
    assert calls["exists"] < 150 and calls["read"] < 50


def test_tokens_of_streamed_data_are_evicted_and_epochs_repeat(data, tmp_path, monkeypatch):
    """Local data is tokenized once; streamed data may be too large to keep."""
    data = dataclasses.replace(data, validation_fraction=0)
    (tmp_path / "kept").mkdir()
    kept, _ = open_stream(data, tmp_path / "kept", log="log")
    expected = []
    while kept.position.epoch < 2:
        expected.append(kept.next_batch().input_ids.tolist())
    monkeypatch.setattr(read.Shard, "is_streamed", True)
    stream, tokenizer = open_stream(data, tmp_path)
    waiting, _ = open_stream(data, tmp_path, fills=False)
    num_files = []
    for batch in expected:
        assert (
            stream.next_batch().input_ids.tolist()
            == waiting.next_batch().input_ids.tolist()
            == batch
        )
        num_files.append(len(list((tmp_path / "run" / "tokens").glob("*.tokens"))))
    num_shards = len(stream.stream.sources[0].shards)
    assert (
        max(num_files)
        < num_shards
        == len(list((tmp_path / "kept" / "run" / "tokens").glob("*.tokens")))
    )
    texts = Counter(text for _, text in tokenizer.recorded())
    assert len(texts) == 60 and max(texts.values()) > 1


def test_validation_tokenizes_only_its_documents(data, tmp_path):
    stream, tokenizer = open_stream(data, tmp_path)
    assert len(stream.validation_sequences(1)) == 1
    assert 0 < len([text for _, text in tokenizer.recorded() if text in TEXTS]) <= 4


def test_read_ahead_at_the_end_of_a_run_leaves_no_files(data, tmp_path, monkeypatch):
    tokenize = TokenCache._write_tokens

    def tokenize_slowly(self, *args):
        time.sleep(0.05)
        tokenize(self, *args)

    monkeypatch.setattr(TokenCache, "_write_tokens", tokenize_slowly)
    stream, _ = open_stream(data, tmp_path)
    while stream.stream.position.sources[0].shard < 4:
        stream.next_batch()
    start = time.monotonic()
    stream.close(remove=True)
    assert time.monotonic() - start < 30 and not (tmp_path / "run").exists()
    waiting, _ = open_stream(data, tmp_path, fills=False)
    waiting._prefetched = waiting._executor.submit(waiting._read)
    time.sleep(0.1)
    waiting.close()
    assert time.monotonic() - start < 30
