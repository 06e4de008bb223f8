"""A configuration -> its data: checked before anything starts, opened on every rank, told before the first step."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ithaka.config import ConfigError, DataConfig
from ithaka.data.cache import TokenCache
from ithaka.data.files import File, find
from ithaka.data.pack import Split
from ithaka.data.read import Shard, TokenShard, make_shards
from ithaka.data.stream import SequenceStream, TrainData
from ithaka.data.tokenizer import Tokenizer, check_vocabulary, has_tokenizer, load

COUNT_BYTES = 100_000_000
COUNT_S = 60.0
PROBE_TOKENS = 1 << 26
PROBE_TEXTS = 10_000
SHOWN_TOKENS = 64


def load_tokenizer(data: DataConfig, model_path: Path | None = None) -> Tokenizer | None:
    """The tokenizer for the data and the samples; None for token arrays and a model that has none."""
    if data.tokenizer is None and model_path is not None and not has_tokenizer(model_path):
        paths = (data.path, data.validation_path) if data.validation_path else (data.path,)
        if all(file.kind == "tokens" for path in paths for file in find(path).files):
            return None
    return load(data.tokenizer, model_path)


def open_data(
    data: DataConfig, *, tokenizer: Tokenizer | None, seed: int, dp_rank: int = 0, dp_size: int = 1,
    batch: int = 1, vocab_size: int | None = None, eos_id: int | None = None,
    cache_dir: Path | None = None, fills_cache: bool = True,
) -> TrainData:  # fmt: skip
    """The training data of one data-parallel rank: `batch` sequences of `data.context` tokens a call.

    vocab_size: the model's, which token arrays are checked against. eos_id: ends the documents in token arrays; the
    tokenizer's where it is not given. Every rank of a cp group passes the same dp_rank. cache_dir: where tokens are
    kept, by one rank of the node, which fills_cache; None: in a temporary directory of this process.
    """
    assert vocab_size or tokenizer, "token arrays without a tokenizer need the model's vocab_size"
    cache = TokenCache(cache_dir, tokenizer, fills_cache)
    train, held_out, source = _shards(data, tokenizer, vocab_size or tokenizer.vocab_size, eos_id)  # type: ignore[union-attr]
    pad_id = tokenizer.pad_id if tokenizer else 0
    stream = SequenceStream(train, cache, data.context, seed=seed, pad_id=pad_id)
    validation = None
    if held_out is not None:
        validation = SequenceStream(held_out, cache, data.context, seed=None, pad_id=pad_id, repeat=False)
    return TrainData(stream, validation, source, rank=dp_rank, size=dp_size, batch=batch)


def check(data: DataConfig, vocab_size: int, model_path: Path | None = None) -> Tokenizer | None:
    """Raise ConfigError for data that cannot be trained on, reading little of it; -> the tokenizer.

    For use before any process starts. What it cannot see (a bad line far into a file) raises when it is read.
    """
    tokenizer = load_tokenizer(data, model_path)
    if tokenizer is not None:
        check_vocabulary(tokenizer, vocab_size)
    train, held_out, source = _shards(data, tokenizer, vocab_size, None)
    _probe(train, f"data.path={data.path} holds no text to train on; give a path with more documents")
    way_out = "raise it, or set it to 0" if data.validation_path is None else "give other data"
    if held_out is not None:
        _probe(held_out, f"{source} holds no text to validate on; {way_out}")
    return tokenizer


def _shards(
    data: DataConfig, tokenizer: Tokenizer | None, vocab_size: int, eos_id: int | None
) -> tuple[list[Shard], list[Shard] | None, str]:
    """Shards to train on, shards held out (None where nothing is), and in words where the latter come from."""
    eos_id = tokenizer.eos_id if eos_id is None and tokenizer is not None else eos_id

    def shards(files: Sequence[File], split: Split | None = None) -> list[Shard]:
        if tokenizer is None and any(file.kind != "tokens" for file in files):
            raise ConfigError("data.path is text and the model has no tokenizer; set data.tokenizer")
        return make_shards(files, data.text_field, vocab_size, eos_id, split)

    found = find(data.path)
    if data.validation_path is not None:
        other = find(data.validation_path, "data.validation_path")
        return shards(found.files), shards(other.files), f"data.validation_path={data.validation_path}"
    fraction = data.validation_fraction
    if not fraction:
        return shards(found.files), None, "none, data.validation_fraction=0"
    if found.validation:
        split = found.validation[0].split or found.validation[0].path.name
        return shards(found.files), shards(found.validation), f"the split {split} of data.path={data.path}"
    sides = [shards(found.files, Split(fraction, held_out)) for held_out in (False, True)]
    whole = f"data.path={data.path}" if data.path else "Python's standard library"
    return sides[0], sides[1], f"data.validation_fraction={fraction} of {whole}"


def _probe(shards: Sequence[Shard], if_empty: str) -> None:
    """Raise what reading the start of the data raises, or ConfigError(if_empty) where nothing is in it.

    Token arrays are read whole, up to PROBE_TOKENS each; of text, the first shard that has any.
    """
    found = False
    for shard in shards:
        if isinstance(shard, TokenShard):
            found |= shard.parts[0].start < PROBE_TOKENS and len(shard.documents().tokens) > 0
        elif not found:
            found = any([text.text for text in itertools.islice(shard.texts(), PROBE_TEXTS)])
    if not found:
        raise ConfigError(if_empty)


class Counts(NamedTuple):
    documents: int
    skipped: int  # empty documents
    tokens: int


@dataclass(frozen=True)
class Facts:
    """What a run is about to train on. counts, sequences: None where that would mean to tokenise large data first."""

    num_files: int
    kinds: tuple[str, ...]
    num_bytes: int
    left_out: tuple[str, ...]
    counts: Counts | None
    sequences: int | None
    validation: str
    start: str

    def lines(self, num_sequences: int) -> dict[str, str]:
        """In words, by topic; `num_sequences` are trained on in the whole run."""
        files = f"{self.num_files:,} file{'s' * (self.num_files != 1)} ({', '.join(self.kinds)})"
        found = {"data": f"{files}, {self.num_bytes / 1e6:,.1f} MB"}
        if self.counts is None or self.sequences is None:
            found["data"] += "; too large to count documents and tokens first"
        else:
            documents, skipped, tokens = self.counts
            found["data"] += f", {documents:,} documents, {tokens:,} tokens, {self.sequences:,} sequences"
            found["epochs"] = f"{num_sequences / max(self.sequences, 1):.3g} ({num_sequences:,} sequences in all)"
            found |= {"skipped": f"{skipped:,} documents that are empty"} if skipped else {}
        if self.left_out:
            more = ", ..." if len(self.left_out) > 3 else ""
            found["left out"] = f"{len(self.left_out):,} files: {', '.join(self.left_out[:3])}{more}"
        return {**found, "validation": self.validation, "starts with": self.start}


def data_facts(data: DataConfig, opened: TrainData, tokenizer: Tokenizer | None) -> Facts:
    """For one rank to ask, before the first step. Small data is counted, and so tokenised."""
    stream, found = opened.stream, find(data.path)
    num_bytes = sum(shard.num_bytes for shard in stream.shards)
    counts = _counts(stream) if num_bytes <= COUNT_BYTES else None
    # The start of a sequence is the same whatever its length.
    peek = SequenceStream(stream.shards, stream.cache, min(SHOWN_TOKENS, data.context), seed=stream.seed)
    peek.seek(opened.position)
    first = peek.next()
    assert first is not None
    ids = first.ids[: first.length]
    text = tokenizer.decode(ids, special=True) if tokenizer else " ".join(map(str, ids))
    kinds = tuple(sorted({file.kind for file in found.files}))
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    sequences = None if counts is None else -(-counts.tokens // data.context)
    return Facts(len(found.files), kinds, num_bytes, tuple(found.left_out), counts, sequences, opened.source, shown)


def _counts(stream: SequenceStream) -> Counts | None:
    """Of the whole data; None where tokenising it takes too long."""
    counts, deadline = Counts(0, 0, 0), time.monotonic() + COUNT_S
    stream.cache.prepare(stream.shards)
    for shard in stream.shards:
        if time.monotonic() > deadline:
            return None
        loaded = stream.cache.load(shard)
        each = (len(loaded.starts), loaded.num_skipped, len(loaded.tokens))
        counts = Counts(*(one + more for one, more in zip(counts, each, strict=True)))
    return counts
