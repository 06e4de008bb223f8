"""Open the data of a run: check it before the run starts, open it on each rank, and describe it."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ithaka.config import ConfigError, DataConfig
from ithaka.config.units import plural
from ithaka.data.cache import TokenCache, tokenize
from ithaka.data.documents.chat import TODAY
from ithaka.data.documents.read import Shard
from ithaka.data.documents.records import UNUSED
from ithaka.data.held_out import FoundData, find_data
from ithaka.data.pack import LongDocuments, imbalance, permutation
from ithaka.data.source import Source
from ithaka.data.stream import SequenceStream, TrainData
from ithaka.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from ithaka.facts.sizes import IGNORE_INDEX

PROBED_DOCUMENTS = 10_000
SAMPLE_TOKENS = 64
LONG_ACTIONS = {
    "split": "split",
    "drop": "dropped",
    "end": "reduced to their end",
    "turns": "cut between turns",
    "shorten_tools": "shortened",
}


def open_data(
    data: DataConfig,
    *,
    tokenizer: Tokenizer,
    seed: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    cp: tuple[int, int] = (0, 1),
    batch: int = 1,
    accumulate: int = 1,
    steps: int | None = None,
    validate_sequences: int | None = None,
    cache_dir: Path,
    fills_cache: bool = True,
    shares_prefixes: bool = True,
    found: FoundData | None = None,
) -> TrainData:
    """Open the data of one data-parallel rank: `batch` sequences of `data.context` tokens per call,
    `accumulate` calls per step.

    All ranks of a cp group pass the same dp_rank; `cp` (rank in the group, its size) divides the
    images. The remaining `steps` and `validate_sequences` (None: unknown) limit how much is
    tokenized at once. `cache_dir` holds the tokens; one rank per node writes them (`fills_cache`).
    `shares_prefixes`: samples of one record become a forest, in which their common prefix is
    computed once. `found`: the data, which one rank finds for all.
    """
    cache = TokenCache(cache_dir, tokenizer, fills_cache)
    found = find_data(data) if found is None else found
    sources = [
        Source(each.name, each.weight, each.train, cache, (seed, i))
        for i, each in enumerate(found.sources)
    ]
    unshuffled = [
        Source(each.name, each.weight, shards, cache, None)
        for each, shards in zip(found.sources, found.held_out, strict=False)
    ]
    marker: list[int] = []
    if data.long_documents == "shorten_tools":
        marker = tokenizer.encode_batch([data.tool_marker])[0].tolist()
    make_stream = functools.partial(
        SequenceStream,
        context=data.context,
        pad_id=tokenizer.pad_id,
        long_documents=LongDocuments(
            data.long_documents,
            data.tool_tokens,
            tuple(marker),
            shares=shares_prefixes and data.documents == "apart",
            pairs=data.train_on == "pairs",
        ),
        documents_together=data.documents == "together",
    )
    group = batch * dp_size * accumulate
    stream = make_stream(sources, group=group, needed=None if steps is None else steps * group)
    validation = None
    if any(found.held_out):
        validation = make_stream(unshuffled, needed=validate_sequences)
    return TrainData(
        stream, validation, found, dp_rank=dp_rank, dp_size=dp_size, batch=batch, cp=cp
    )


def check_data(
    data: DataConfig,
    vocab_size: int,
    model_path: Path | None = None,
    datasets: Sequence[DataConfig] = (),
) -> int:
    """Raise ConfigError if the data cannot be trained on. Return its size in bytes, held-out data
    included.

    Runs before any process starts and reads little. Other errors, such as a bad line far into a
    file, are raised when training reads it.
    """
    tokenizer = load_tokenizer(data.tokenizer, model_path, data.chat_template)
    check_vocabulary(tokenizer, vocab_size)
    sources, held_out, summary, _ = find_data(data, datasets)
    for source in sources:
        fix = "add documents, or use another path"
        if any(held_out) and data.validation_path is None:
            fix += ", or set data.validation_fraction=0"
        _check_has_text(source.train, tokenizer, f"{source.label} has no text to train on; {fix}")
    train = [shard for source in sources for shard in source.train]
    num_bytes = sum(shard.num_bytes for shard in train)
    if num_bytes < data.context:
        parts = itertools.chain.from_iterable(tokenize(shard, tokenizer) for shard in train)
        num_tokens = sum(len(part.tokens) for part in parts if not part.skip_reason)
        if num_tokens < data.context:
            labels = " and ".join(source.label for source in sources)
            raise ConfigError(
                f"{labels} has {plural(num_tokens, 'token')} besides validation, too few for one "
                f"sequence of data.context={data.context}; add data, or use a shorter data.context"
            )
    for shards in filter(None, held_out):
        fix = "increase it, or set it to 0" if data.validation_path is None else "use other data"
        _check_has_text(
            shards, tokenizer, f"{summary['validation']} has no text to validate on; {fix}"
        )
    return num_bytes + sum(shard.num_bytes for shards in held_out for shard in shards)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer's vocabulary of {tokenizer.vocab_size} exceeds model "
            f"vocab_size={vocab_size}; set data.tokenizer to the model's own tokenizer or, if this "
            "is that tokenizer with added tokens, set model.resize_embeddings=true"
        )


def _check_has_text(shards: Sequence[Shard], tokenizer: Tokenizer, message: str) -> None:
    """Raise ConfigError(message) if no shard has text, and errors in the first shard that has."""
    skipped = Counter[str]()
    for shard in shards:
        documents = list(itertools.islice(shard.documents(tokenizer), PROBED_DOCUMENTS))
        if any(each.ids is not None or (each.text and each.trained != []) for each in documents):
            return
        for each in documents:
            reason = "with nothing to train" if each.text else "empty"
            skipped[each.skip_reason or reason] += 1
    raise ConfigError(f"{message} (skipped: {_format_counts(skipped)})" if skipped else message)


def _format_counts(skipped: Counter[str]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in skipped.most_common())


def measure_balance(data: TrainData) -> dict[str, float] | None:
    """Return the imbalance of attention between data-parallel ranks in the first round, with and
    without grouping.

    None if there is one rank, or if documents are packed together, so that all sequences are alike.
    """
    if data.dp_size == 1 or data.stream.documents_together:
        return None
    packed = data.stream.current_round()
    areas = packed.areas[packed.packing.num_leading :]
    shuffled = areas[permutation(len(areas), (0,))]
    return {
        "ranks": data.dp_size,
        "grouped": imbalance(areas, data.dp_size, data.batch),
        "not_grouped": imbalance(shuffled, data.dp_size, data.batch),
    }


def count_copies(sources: Sequence[Source]) -> int:
    """Return how many of the documents read so far repeat others, in all sources."""
    digests = np.concatenate([source.digests() for source in sources])
    return len(digests) - len(np.unique(digests))


def epoch_steps(data: TrainData, epochs: float, global_batch: int) -> int:
    """Return the optimizer steps in `epochs`; an estimate if the data exceeds a round."""
    stream = data.stream
    packed = stream.current_round()
    tokens = sum(source.estimate_size(stream.cut).tokens for source in stream.sources)
    sequences = tokens / (stream.read_tokens / len(packed))
    return max(1, math.ceil(epochs * sequences / global_batch - 1e-6))


def describe_data(data: TrainData, num_sequences: int) -> dict[str, str]:
    """Describe what a run of `num_sequences` trains on, by topic. Call it on one rank, before the
    first step.

    Figures are from the first round, which must be tokenized anyway; small data is one round.
    """
    stream = data.stream
    stream.current_round()  # reads the first round
    file_summary = dict(data.summary)
    summary = _describe_sources(stream, file_summary, num_sequences)
    summary |= _describe_packing(stream)
    notes = sum((source.count("notes") for source in stream.sources), Counter[str]())
    unused = []
    for note, number in notes.items():
        if note.startswith(UNUSED):
            unused.append(f"{note.removeprefix(UNUSED)} in {plural(number, 'record')}")
        else:
            summary[note] = f"{number:,}"
    if unused:
        summary["unused fields"] = ", ".join(unused)
    if balance := measure_balance(data):
        num_packed = len(stream.current_round())
        summary["balance"] = (
            f"attention of {balance['ranks']} ranks, largest over mean: {balance['grouped']:.3f} "
            f"({balance['not_grouped']:.3f} without grouping), over "
            f"{plural(num_packed, 'sequence')}"
        )
    if copies := count_copies(stream.sources):
        verb = "repeats another" if copies == 1 else "repeat others"
        summary["duplicates"] = f"{plural(copies, 'document')} {verb}"
    if skipped := sum((source.count("skipped") for source in stream.sources), Counter[str]()):
        summary["skipped"] = f"{plural(skipped.total(), 'document')}: {_format_counts(skipped)}"
    tokenizer = data.cache.tokenizer
    first = stream.get_sequence(stream.position.packings[-1].done)
    summary |= _describe_training(first.targets[: first.length] != IGNORE_INDEX, tokenizer)
    text = tokenizer.decode(first.ids[: min(first.length, SAMPLE_TOKENS)])
    sample = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return {**summary, **file_summary, "first tokens": sample}


def _describe_sources(
    stream: SequenceStream, file_summary: dict[str, str], num_sequences: int
) -> dict[str, str]:
    """Describe the size of each source, whose files are removed from `file_summary`, and how often
    the run reads it."""
    summary: dict[str, str] = {}
    # read per sequence that is trained on
    sequence_tokens = stream.read_tokens / len(stream.current_round())
    total_weight = sum(source.weight for source in stream.sources)
    epochs = []
    for source in stream.sources:
        documents, tokens, is_complete = source.estimate_size(stream.cut)
        about = "" if is_complete else "about "
        share = source.weight / total_weight
        epochs.append(f"{about}{num_sequences * sequence_tokens * share / tokens:.3g}")
        size = (
            f"{file_summary.pop(source.name)}, {about}{plural(documents, 'document')}, "
            f"{plural(tokens, 'token')}"
        )
        if len(stream.sources) == 1:
            about = "" if tokens == stream.read_tokens else "about "
            sequences = plural(round(tokens / sequence_tokens), "sequence")
            summary["data"] = f"{size}, {about}{sequences}"
        else:
            summary[f"source {source.name}"] = f"{share:.1%} of the tokens; {size}"
            epochs[-1] += f" of {source.name}"
    summary["epochs"] = f"{', '.join(epochs)} ({plural(num_sequences, 'sequence')} in total)"
    return summary


def _describe_packing(stream: SequenceStream) -> dict[str, str]:
    """Describe how full sequences are, and what is cut or left out."""
    packed = stream.current_round()
    documents = stream.documents
    filled = packed.num_tokens / len(packed) / stream.context
    summary = {"packing": f"{filled:.1%} of each sequence filled"}
    if stream.num_long:
        long = f"{plural(stream.num_long, 'document')} longer than data.context"
        summary["packing"] += f"; {long} {LONG_ACTIONS[stream.long.mode]}"
    if documents.removed_tokens:
        summary["cut"] = f"{plural(documents.removed_tokens, 'token')} of these documents"
    left_out = []
    if documents.pieces_left_out:
        left_out.append(f"{plural(documents.pieces_left_out, 'piece')} of long documents")
    if stream.num_left_out:
        num_sequences = stream.num_left_out + len(packed)
        left_out.append(f"{stream.num_left_out:,} of {plural(num_sequences, 'sequence')}")
    if left_out:
        summary["unlabelled"] = f"left out {' and '.join(left_out)}: no token to train on"
    return summary


def _describe_training(is_trained: np.ndarray, tokenizer: Tokenizer) -> dict[str, str]:
    """Describe which tokens of the first sequence are trained, and the chat template."""
    summary: dict[str, str] = {}
    if not is_trained.all():
        summary["trained"] = f"{is_trained.mean():.1%} of the first sequence"
        if tokenizer.hf.chat_template:
            fix = "use a data.chat_template whose end of turn is one token of the tokenizer"
            if isinstance(tokenizer, ByteTokenizer):
                fix = "data.tokenizer=bytes encodes special tokens as text"
            stop = tokenizer.chat.stop_token
            if not stop:
                stop = f"no special token, so the model does not learn to stop; {fix}"
            summary["trained"] += f"; an assistant's turn ends with {stop}"
    if tokenizer.chat.has_fixed_date:
        summary["date"] = (
            f"the chat template prints today's date; fixed at {TODAY:%d %b %Y} here and in the "
            "export"
        )
    return summary
