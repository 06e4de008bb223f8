"""A configuration -> its data: checked before anything starts, opened on every rank, described before step 1."""

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ithaka.config import ConfigError, DataConfig
from ithaka.data.cache import TokenCache
from ithaka.data.files import find
from ithaka.data.pack import Split
from ithaka.data.read import Shard, make_shards
from ithaka.data.stream import SequenceStream, TrainData
from ithaka.data.tokenizer import Tokenizer, load_tokenizer

PROBE_TEXTS = 10_000
SHOWN_TOKENS = 64


def open_data(
    data: DataConfig, *, tokenizer: Tokenizer, seed: int, dp_rank: int = 0, dp_size: int = 1,
    batch: int = 1, cache_dir: Path, fills_cache: bool = True,
) -> TrainData:  # fmt: skip
    """The training data of one data-parallel rank: `batch` sequences of `data.context` tokens a call.

    Every rank of a cp group passes the same dp_rank. `cache_dir` holds the tokens; one rank of each node
    writes them (`fills_cache`).
    """
    cache = TokenCache(cache_dir, tokenizer, fills_cache)
    train, held_out, about = _shards(data)
    stream = functools.partial(SequenceStream, cache=cache, context=data.context, pad_id=tokenizer.pad_id)
    validation = None if held_out is None else stream(held_out, seed=None)
    return TrainData(stream(train, seed=seed), validation, about, rank=dp_rank, size=dp_size, batch=batch)


def check(data: DataConfig, vocab_size: int, model_path: Path | None = None) -> None:
    """Raise ConfigError for data that cannot be trained on, reading little of it.

    For use before any process starts. What it cannot see (a bad line far into a file) raises when it is read.
    """
    tokenizer = load_tokenizer(data.tokenizer, model_path)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer's vocabulary of {tokenizer.vocab_size} exceeds model vocab_size={vocab_size}; "
            "use the model's own tokenizer (data.tokenizer); if it is that one with tokens added, "
            "model.resize_embeddings=true"
        )
    train, held_out, about = _shards(data)
    hold_none_out = ", or data.validation_fraction=0" if data.validation_path is None and held_out is not None else ""
    _probe(train, f"data.path={data.path} holds no text to train on; give a path with more documents{hold_none_out}")
    if sum(shard.num_bytes for shard in train) < data.context:
        texts = [text.text for shard in train for text in shard.texts()]
        num_tokens = sum(map(len, tokenizer.encode_batch(texts)))
        if num_tokens < data.context:
            raise ConfigError(
                f"data.path={data.path} holds {num_tokens} tokens to train on, too few for one sequence of "
                f"data.context={data.context}; give more text, or a shorter data.context"
            )
    if held_out is not None:
        way_out = "raise it, or set it to 0" if data.validation_path is None else "give other data"
        _probe(held_out, f"{about['validation']} holds no text to validate on; {way_out}")


def _shards(data: DataConfig) -> tuple[list[Shard], list[Shard] | None, dict[str, str]]:
    """Shards to train on, shards held out (None where nothing is), and in words what was found."""
    found = find(data.path)
    split, held_out = None, None
    if data.validation_path is not None:
        held_out = make_shards(find(data.validation_path, "data.validation_path").files, data)
        validation = f"data.validation_path={data.validation_path}"
    elif not data.validation_fraction:
        validation = "none, data.validation_fraction=0"
    elif found.validation:
        held_out = make_shards(found.validation, data)
        validation = f"the split {found.validation[0].split} of data.path={data.path}"
    else:
        split = Split(data.validation_fraction, held_out=False)
        held_out = make_shards(found.files, data, Split(data.validation_fraction, held_out=True))
        whole = f"data.path={data.path}" if data.path else "Python's standard library"
        validation = f"data.validation_fraction={data.validation_fraction} of {whole}"
    train = make_shards(found.files, data, split)
    kinds = ", ".join(sorted({file.kind for file in found.files}))
    num_bytes, num_files = sum(shard.num_bytes for shard in train), len(found.files)
    about = {"data": f"{num_files:,} file{'s' * (num_files != 1)} ({kinds}), {num_bytes / 1e6:,.1f} MB"}
    if found.left_out:
        more = ", ..." if len(found.left_out) > 3 else ""
        about["left out"] = f"{len(found.left_out):,} files: {', '.join(found.left_out[:3])}{more}"
    return train, held_out, {**about, "validation": validation}


def _probe(shards: Sequence[Shard], if_empty: str) -> None:
    """Raise what reading the first shard with text raises, or ConfigError(if_empty) where there is none."""
    if not any(any([text.text for text in itertools.islice(shard.texts(), PROBE_TEXTS)]) for shard in shards):
        raise ConfigError(if_empty)


def data_facts(opened: TrainData, num_sequences: int) -> dict[str, str]:
    """What a run of `num_sequences` will train on, in words, by topic. For one rank, before the first step.

    Counts the first window to be trained on, which must be tokenised anyway; small data is one window.
    """
    stream, about = opened.stream, dict(opened.about)
    indices = stream.windows[stream.position.window % len(stream.windows)]
    loaded = stream.cache.load_all([stream.shards[i] for i in indices])
    documents, tokens = sum(len(each.lengths) for each in loaded), sum(len(each.tokens) for each in loaded)
    skipped, sequences = Counter[str](), max(1, -(-tokens // stream.context))
    for each in loaded:
        skipped.update(each.skipped)
    least, most = ("", "") if len(indices) == len(stream.shards) else ("at least ", "at most ")
    facts = {
        "data": f"{about.pop('data')}, {least}{documents:,} documents, {tokens:,} tokens, {sequences:,} sequences",
        "epochs": f"{most}{num_sequences / sequences:.3g} ({num_sequences:,} sequences in all)",
    }
    if skipped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in skipped.most_common())
        facts["skipped"] = f"{least}{skipped.total():,} documents: {reasons}"
    # The start of a sequence is the same whatever its length.
    peek = SequenceStream(stream.shards, stream.cache, min(SHOWN_TOKENS, stream.context), seed=stream.seed)
    peek.seek(opened.position)
    first = peek.next()
    assert first is not None
    text = stream.cache.tokenizer.decode(first.ids[: first.length])
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return {**facts, **about, "starts with": shown}
