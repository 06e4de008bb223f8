"""A configuration -> its data: checked before anything starts, opened on every rank, described before step 1."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ithaka.config import ConfigError, DataConfig, SourceConfig
from ithaka.data.cache import TokenCache, tokenize
from ithaka.data.files import find_files
from ithaka.data.mix import Cursor, SequenceStream, Source
from ithaka.data.pack import Split, imbalance, permutation
from ithaka.data.read import Shard, make_shards
from ithaka.data.stream import TrainData
from ithaka.data.tokenizer import Tokenizer, load_tokenizer

PROBE_TEXTS = 10_000
SHOWN_TOKENS = 64


def open_data(
    data: DataConfig, *, tokenizer: Tokenizer, seed: int, dp_rank: int = 0, dp_size: int = 1,
    batch: int = 1, accumulate: int = 1, steps: int | None = None, validate_sequences: int | None = None,
    cache_dir: Path, fills_cache: bool = True,
) -> TrainData:  # fmt: skip
    """The training data of one data-parallel rank: `batch` sequences of `data.context` tokens a call, `accumulate`
    calls a step.

    Every rank of a cp group passes the same dp_rank. `steps` to come and `validate_sequences` (None: unknown) bound
    what is tokenized at once. `cache_dir` holds the tokens; one rank of each node writes them (`fills_cache`).
    """
    cache = TokenCache(cache_dir, tokenizer, fills_cache)
    train, held_out, about = _shards(data)
    named = [(name, source.weight) for _, name, source in _named(data)]
    sources = [Source(*named[i], shards, cache, (seed, i)) for i, shards in enumerate(train)]
    opened = functools.partial(
        SequenceStream, context=data.context, pad_id=tokenizer.pad_id, long_documents=data.long_documents,
        together=data.documents == "together",
    )  # fmt: skip
    group = batch * dp_size * accumulate
    stream = opened(sources, group=group, needed=None if steps is None else steps * group)
    validation = None
    if held_out is not None:
        unshuffled = [Source(*named[i], shards, cache, None) for i, shards in enumerate(held_out)]
        validation = opened(unshuffled, needed=validate_sequences)
    return TrainData(stream, validation, about, rank=dp_rank, size=dp_size, batch=batch)


def check_data(data: DataConfig, vocab_size: int, model_path: Path | None = None) -> int:
    """Raise ConfigError for data that cannot be trained on, reading little of it. Returns its bytes, held-out ones
    included.

    For use before any process starts. What it cannot see (a bad line far into a file) raises when it is read.
    """
    tokenizer = load_tokenizer(data.tokenizer, model_path, data.chat_template)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer's vocabulary of {tokenizer.vocab_size} exceeds model vocab_size={vocab_size}; "
            "use the model's own tokenizer (data.tokenizer); if it is that one with tokens added, "
            "model.resize_embeddings=true"
        )
    train, held_out, about = _shards(data)
    hold_none_out = ", or data.validation_fraction=0" if data.validation_path is None and held_out is not None else ""
    paths = [f"{field}={source.path}" for field, _, source in _named(data)]
    for path, shards in zip(paths, train, strict=True):
        if_empty = f"{path} holds no text to train on; give a path with more documents{hold_none_out}"
        _probe(shards, tokenizer, if_empty)
    if sum(shard.num_bytes for shards in train for shard in shards) < data.context:
        tokenised = (each for shards in train for shard in shards for each in tokenize(shard, tokenizer))
        num_tokens = sum(len(tokens) for tokens, _, reason in tokenised if not reason)
        if num_tokens < data.context:
            raise ConfigError(
                f"{' and '.join(paths)} holds {num_tokens} tokens to train on, too few for one sequence of "
                f"data.context={data.context}; give more text, or a shorter data.context"
            )
    for shards in held_out or ():
        way_out = "raise it, or set it to 0" if data.validation_path is None else "give other data"
        _probe(shards, tokenizer, f"{about['validation']} holds no text to validate on; {way_out}")
    return sum(shard.num_bytes for shards in (*train, *(held_out or ())) for shard in shards)


def _named(data: DataConfig) -> list[tuple[str, str, SourceConfig]]:
    """Each source with the field of its path, and its name in the log: as short as tells it from the others."""
    sources = data.all_sources()
    fields = [f"data.sources[{i}].path" if data.sources else "data.path" for i in range(len(sources))]
    paths = [source.path or Path("Python's standard library") for source in sources]
    names, full, depth = [path.stem for path in paths], [path.absolute() for path in paths], 0
    while len(set(names)) < len(set(full)):  # from the end: the same for relative and absolute paths
        depth += 1
        names = ["/".join(path.parts[-depth:]) for path in full]
    return list(zip(fields, names, sources, strict=True))


def _shards(data: DataConfig) -> tuple[list[list[Shard]], list[list[Shard]] | None, dict[str, str]]:
    """Of each source, shards to train on and shards held out (None where nothing is), and in words what was found."""
    fraction = data.validation_fraction
    train: list[list[Shard]] = []
    held_out: list[list[Shard]] = []
    about: dict[str, str] = {}
    validation = f"data.validation_path={data.validation_path}"
    for field, name, source in _named(data):
        found, split = find_files(source.path, field), None
        if data.validation_path is None and not fraction:
            validation = "none, data.validation_fraction=0"
        elif data.validation_path is None and found.validation:
            held_out.append(make_shards(found.validation, source))
            validation = f"the split {found.validation[0].split} of {field}={source.path}"
        elif data.validation_path is None:
            split = Split(fraction, held_out=False)
            held_out.append(make_shards(found.files, source, Split(fraction, held_out=True)))
            whole = f"{field}={source.path}" if source.path else "Python's standard library"
            validation = f"data.validation_fraction={fraction} of {'each source' if data.sources else whole}"
        train.append(make_shards(found.files, source, split))
        kinds = ", ".join(sorted({file.kind for file in found.files}))
        num_bytes, num_files = sum(shard.num_bytes for shard in train[-1]), len(found.files)
        about[name] = f"{num_files:,} file{'s' * (num_files != 1)} ({kinds}), {num_bytes / 1e6:,.1f} MB"
        if found.left_out:
            more = ", ..." if len(found.left_out) > 3 else ""
            left_out = f"{len(found.left_out):,} files: {', '.join(found.left_out[:3])}{more}"
            about[f"left out of {name}" if data.sources else "left out"] = left_out
    if data.validation_path is not None:
        held_out = [make_shards(find_files(data.validation_path, "data.validation_path").files, data)]
    return train, held_out or None, {**about, "validation": validation}


def _probe(shards: Sequence[Shard], tokenizer: Tokenizer, if_empty: str) -> None:
    """Raise what reading the first shard with text raises, or ConfigError(if_empty) where there is none."""
    skipped = Counter[str]()
    for shard in shards:
        documents = list(itertools.islice(shard.documents(tokenizer), PROBE_TEXTS))
        if any(each.ids is not None or (each.text and each.trained != []) for each in documents):
            return
        skipped.update(each.skipped or ("with nothing to train" if each.text else "empty") for each in documents)
    raise ConfigError(f"{if_empty} (skipped: {_counted(skipped)})" if skipped else if_empty)


def _counted(skipped: Counter[str]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in skipped.most_common())


def balance(opened: TrainData) -> dict[str, float] | None:
    """Of the first round: attention of the data-parallel ranks, largest over mean. None: there is one rank, or
    documents are together, so that all sequences are alike."""
    packed = opened.stream.round()
    areas = packed.areas[packed.packing.lead :]
    orders = {"grouped": areas, "not_grouped": areas[permutation(len(areas), (0,))]}
    found = {name: imbalance(order, opened.size, opened.batch) for name, order in orders.items()}
    return {"ranks": opened.size, **found} if opened.size > 1 and not opened.stream.together else None


def _amount(source: Source, stream: SequenceStream) -> tuple[int, int, str]:
    """Documents and tokens of a source, and "about " unless all of it was read."""
    if not source.seen:
        source.take(Cursor(), 1, stream.context, goes_on=False)
    counts = list(source.seen.values())
    part = sum(source.shards[i].num_bytes for i in source.seen) / source.num_bytes
    documents, tokens = round(sum(each[0] for each in counts) / part), round(sum(each[1] for each in counts) / part)
    return documents, tokens, "" if len(counts) == len(source.shards) else "about "


def epoch_steps(opened: TrainData, epochs: float, global_batch: int) -> int:
    """Optimizer steps of so many passes over the data, by its sequences with a label; an estimate if the data is larger
    than a round."""
    packed = opened.stream.round()
    tokens = sum(_amount(source, opened.stream)[1] for source in opened.stream.sources)
    sequences = tokens / (opened.stream.read_tokens / len(packed))
    return max(1, math.ceil(epochs * sequences / global_batch - 1e-6))


def data_facts(opened: TrainData, num_sequences: int) -> dict[str, str]:
    """What a run of `num_sequences` will train on, in words, by topic. For one rank, before the first step.

    Counts the first round to be trained on, which must be tokenised anyway; small data is one round.
    """
    stream, about = opened.stream, dict(opened.about)
    packed = stream.round()
    sequence_tokens = stream.read_tokens / len(packed)  # read for each sequence that is trained on
    facts: dict[str, str] = {}
    epochs, skipped = [], Counter[str]()
    for source in stream.sources:
        documents, tokens, guess = _amount(source, stream)
        share = source.weight / sum(each.weight for each in stream.sources)
        epochs.append(f"{guess}{num_sequences * sequence_tokens * share / tokens:.3g}")
        words = f"{about.pop(source.name)}, {guess}{documents:,} documents, {tokens:,} tokens"
        if len(stream.sources) == 1:
            exactly = "" if tokens == stream.read_tokens else "about "
            facts["data"] = f"{words}, {exactly}{round(tokens / sequence_tokens):,} sequences"
        else:
            facts[f"source {source.name}"] = f"{share:.1%} of the tokens; {words}"
            epochs[-1] += f" of {source.name}"
        for _, _, reasons in source.seen.values():
            skipped.update(reasons)
    facts["epochs"] = f"{', '.join(epochs)} ({num_sequences:,} sequences in all)"
    facts["packing"] = f"{packed.num_tokens / len(packed) / stream.context:.1%} of each sequence filled"
    if stream.num_long:
        what = {"split": "split", "drop": "dropped"}[stream.long_documents]
        facts["packing"] += f"; {stream.num_long:,} documents longer than data.context {what}"
    if stream.num_left_out:
        of = f"{stream.num_left_out:,} of {stream.num_left_out + len(packed):,} sequences"
        facts["unlabelled"] = f"{of} have no token to train and are left out"
    if balanced := balance(opened):
        words = "attention of {ranks} ranks, largest over mean: {grouped:.3f}; {not_grouped:.3f} if sequences were not "
        facts["balance"] = f"{words.format(**balanced)}grouped, over {len(packed):,} of them"
    if skipped:
        facts["skipped"] = f"{skipped.total():,} documents: {_counted(skipped)}"
    first = stream.sequence(stream.position.packings[-1].done)
    tokenizer, trained = opened.cache.tokenizer, first.tokens[: first.length] >= 0
    if not trained.all():
        facts["trained"] = f"{trained.mean():.1%} of the first sequence"
        if tokenizer.hf.chat_template:
            none = "no special token, so the model does not learn to stop: give a data.chat_template that has one"
            facts["trained"] += f"; an assistant's turn ends with {tokenizer.chat.stop or none}"
    text = tokenizer.decode(first.ids[: min(first.length, SHOWN_TOKENS)])
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return {**facts, **about, "starts with": shown}
