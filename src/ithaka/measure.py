"""Measure what a model does with its context: loss by position, what the long context gives, loss at short context,
retrieval.

Every figure comes from forward passes of the parallel model, without gradients and without generation.
"""

import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ithaka.config import ConfigError, ReadingConfig
from ithaka.data.cache import tokenize
from ithaka.data.files import find_files
from ithaka.data.read import make_shards
from ithaka.data.tokenizer import Tokenizer
from ithaka.layer.loss import IGNORE_INDEX
from ithaka.model.logprobs import token_logprobs

SHORT_CONTEXT = 4096  # tokens of a short context
SHORT_DOCUMENTS = 32  # whose loss at short context is taken
FIRST_BUCKET = 64  # tokens; from there on a bucket is as long as all before it
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
HAYSTACK_STEP = 7919  # tokens by which the hay of a sample is turned
KEY_GAIN, KEY_LOSS = -2.0, 2.0  # of a key token, at most: LongPPL's thresholds (arXiv 2410.23771)


# ---- tasks


class Task(NamedTuple):
    """`needles`: how much of the hay stands before each, as a share of it, and its text."""

    needles: list[tuple[float, str]]
    question: str
    answer: str


TASKS_VERSION = 1  # scores of different versions cannot be compared
TASKS = ("single", "multi-key", "multi-value", "variables", "common words")
WORDS = """
anchor basket candle dragon engine falcon garden hammer island jacket kettle ladder magnet napkin orchid pencil quartz
rabbit saddle tunnel umbrella violin walnut yogurt zebra bridge copper desert ember forest glacier harbor
"""


def make_task(kind: str, depth: float, seed: int) -> Task:
    """In the manner of RULER (arXiv 2404.06654). The answer, or where it begins, stands at `depth` of the hay."""
    rng = random.Random(f"{TASKS_VERSION} {kind} {seed}")
    things = WORDS.split()
    rng.shuffle(things)
    numbers = [str(rng.randrange(10**6, 10**7)) for _ in things]
    fact = "The special number of the {} is {}.".format
    name, onwards = things[0], [depth + (1 - depth) * i / 4 for i in range(4)]
    if kind in ("single", "multi-key"):
        others = [((i - 0.5) / 7, fact(things[i], numbers[i])) for i in range(1, 8) if kind == "multi-key"]
        question = f"What is the special number of the {name}?\nAnswer: The special number of the {name} is"
        return Task([(depth, fact(name, numbers[0])), *others], question, numbers[0])
    if kind == "multi-value":
        question = f"What are the four special numbers of the {name}, in the order of the text?\n"
        needles = [(where, fact(name, number)) for where, number in zip(onwards, numbers, strict=False)]
        return Task(needles, f"{question}Answer: The special numbers of the {name} are", ", ".join(numbers[:4]))
    if kind == "variables":
        names = [thing.upper() for thing in things[:4]]
        values = [numbers[0], *(f"VAR {each}" for each in names)]
        needles = [(where, f"VAR {each} = {value}") for where, each, value in zip(onwards, names, values, strict=False)]
        question = f"Which four variables have the value {numbers[0]}, in the order of the text?\n"
        return Task(needles, f"{question}Answer: The variables with the value {numbers[0]} are", ", ".join(names))
    words = [word for word, times in zip(things, (16, 12, 8, *[2] * 20), strict=False) for _ in range(times)]
    rng.shuffle(words)
    question = "Which three words are the most frequent in the list of words, the most frequent first?\n"
    needle = f"List of words: {' '.join(words)}."
    return Task([(depth, needle)], f"{question}Answer: The most frequent words are", ", ".join(things[:3]))


def make_prompt(task: Task, hay: np.ndarray, tokenizer: Tokenizer, length: int) -> tuple[np.ndarray, int]:
    """`length` tokens that end with the answer, and how many of them are the answer's."""
    needles = sorted(task.needles, key=lambda needle: needle[0])
    texts = [*(f"\n{text}\n" for _, text in needles), f"\nQuestion: {task.question}", f" {task.answer}"]
    *parts, question, answer = tokenizer.encode_batch(texts)
    prefix = np.asarray(tokenizer.document_prefix, np.int32)
    room = length - sum(map(len, (prefix, *parts, question, answer)))
    if room < 0:
        raise ConfigError(f"a context of {length} to evaluate is {-room} tokens too short for the tasks; use more")
    pieces = np.split(np.resize(hay, room), [int(where * room) for where, _ in needles])
    woven = itertools.chain.from_iterable(itertools.zip_longest(pieces, parts, fillvalue=prefix[:0]))
    return np.concatenate([prefix, *woven, question, answer]), len(answer)


# ---- measurement, on every rank


class EvalText(NamedTuple):
    """`long`: documents of the largest context, cut to it. `short`: the first documents, cut to SHORT tokens."""

    long: list[np.ndarray]
    short: list[np.ndarray]
    hay: np.ndarray

    @property
    def digest(self) -> str:
        """Losses of different texts, or of different tokens, cannot be compared."""
        return hashlib.sha256(b"".join(each.tobytes() for each in (*self.long, *self.short))).hexdigest()[:16]


def check_prompts(text: EvalText, tokenizer: Tokenizer, contexts: Sequence[int]) -> None:
    """Refuse a context that is too short for the tasks."""
    for kind, context in itertools.product(TASKS, contexts):
        make_prompt(make_task(kind, 0, 0), text.hay, tokenizer, context)


def flatten_metrics(found: dict[str, Any]) -> dict[str, float]:
    """The figures, retrieval over all, and that of each task at each context, by names for a run's records."""
    names = ("loss", "long_context_gain", "key_tokens", "short_context_loss")
    values = {name: found[name] for name in names if found[name] is not None}
    cells: dict[str, list[float]] = {}
    for cell in found["retrieval"]:
        for name in ("retrieval", f"retrieval/{cell['task']}/{cell['context']}"):
            cells.setdefault(name, []).append(cell["score"])
    values |= {name: sum(scores) / len(scores) for name, scores in cells.items()}
    return {f"evaluate/{name}": value for name, value in values.items()}


def read_text(
    path: Path | None,
    tokenizer: Tokenizer,
    context: int,
    num_documents: int,
    short: int = SHORT_CONTEXT,
    where: str = "--data",
) -> EvalText:
    """Read until there are enough documents of `context` tokens; the hay takes shorter ones too."""
    text, longest, num_hay = EvalText([], [], np.empty(0, np.int32)), 0, 0
    hay: list[np.ndarray] = []
    for document in _read_documents(path, tokenizer, where):
        longest = max(longest, len(document))
        if len(text.short) < SHORT_DOCUMENTS and len(document) > 1:
            text.short.append(document[:short])
        if num_hay < context:
            hay.append(document)
            num_hay += len(document)
        if len(document) >= context:
            text.long.append(document[:context])
        if len(text.long) == num_documents and len(text.short) == SHORT_DOCUMENTS:
            break
    if not text.long:
        what = f"{where}={path or 'the standard library of Python'} has no document of {context} tokens"
        raise ConfigError(f"{what}: its longest has {longest}; give longer documents, or shorter contexts")
    return text._replace(long=text.long[:num_documents], hay=np.concatenate(hay))


def _read_documents(path: Path | None, tokenizer: Tokenizer, where: str) -> Iterator[np.ndarray]:
    shards = make_shards(find_files(path, where).files, ReadingConfig())
    whole: list[np.ndarray] = []
    for tokens, first, reason in itertools.chain.from_iterable(tokenize(shard, tokenizer) for shard in shards):
        if first and whole:
            yield np.concatenate(whole)
            whole = []
        if not reason:
            whole.append(tokens ^ (tokens >> 31))  # ~ where it is read but not trained
    if whole:
        yield np.concatenate(whole)


@torch.no_grad()
def token_losses(model: PreTrainedModel, ids_BN: np.ndarray | Tensor, **inputs: Any) -> Tensor:
    """float64 [B, N] on the host; 0 for a row's first token, which nothing predicts."""
    ids_BN = torch.as_tensor(ids_BN).long()
    return -token_logprobs(model, ids_BN, ids_BN, **inputs).logprobs.double().cpu()


@torch.no_grad()
def is_retrieved(model: PreTrainedModel, ids_N: np.ndarray, num_answer: int) -> bool:
    """Whether greedy generation would write the answer: every token is the argmax, given those before it."""
    ids = torch.from_numpy(ids_N).long()[None]
    labels = torch.full_like(ids, IGNORE_INDEX)
    labels[:, -num_answer:] = ids[:, -num_answer:]
    return bool(token_logprobs(model, ids, labels).correct[:, -num_answer:].all())


def long_context_gains(model: PreTrainedModel, ids_N: np.ndarray, losses_N: Tensor, short: int) -> Tensor:
    """Of every token after the first `short`: its loss with all before it, minus that with the last 3/4 to 1 `short`.

    By chunks of `short` tokens that overlap: a window would reach further with every layer.
    """
    quarter = short // 4
    if len(ids_N) < 5 * quarter:
        return losses_N[:0]
    chunks_CN = torch.from_numpy(ids_N).long().unfold(0, 4 * quarter, quarter)[1:]
    rows = max(1, len(ids_N) // short)  # no more tokens at once than in the document
    found = [token_losses(model, each)[:, 3 * quarter :].flatten() for each in chunks_CN.split(rows)]
    return losses_N[4 * quarter :][: len(chunks_CN) * quarter] - torch.cat(found)


def find_key_tokens(losses_N: Tensor, gains_M: Tensor, short: int) -> Tensor:
    """Of the same tokens as the gains: 1.0 where the long context gives a token that the model then has about right."""
    losses_M = losses_N[short // 4 * 4 :][: len(gains_M)]
    return ((gains_M < KEY_GAIN) & (losses_M < KEY_LOSS)).double()


def mean_and_error(values: Sequence[Tensor]) -> tuple[float, float | None]:
    """Of documents: the mean of their means, and its standard error; None for a single one."""
    means = torch.stack([each.mean() for each in values])
    return float(means.mean()), float(means.std() / len(means) ** 0.5) if len(means) > 1 else None


def measure_all(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    text: EvalText,
    contexts: Sequence[int],
    samples: int,
    short: int = SHORT_CONTEXT,
) -> dict[str, Any]:
    """All figures. Every rank calls it, and all get the same. Losses are means over documents, errors those of the
    means. A long_context_gain below zero: the long context helps. key_tokens: the share that it helps most, the tail
    of the gain."""
    model.eval()
    losses = [token_losses(model, document[None])[0] for document in text.long]
    end, doubled = max(contexts), (FIRST_BUCKET << i for i in itertools.count())
    edges = [1, *itertools.takewhile(lambda edge: edge < end, doubled), end]
    found: dict[str, Any] = {"tasks_version": TASKS_VERSION, "contexts": list(contexts), "documents": len(losses)}
    found["text"] = text.digest
    found["loss"], found["loss_error"] = mean_and_error([each[1:] for each in losses])
    found["loss_by_position"] = []
    for low, high in itertools.pairwise(edges):
        loss, error = mean_and_error([each[low:high] for each in losses])
        found["loss_by_position"].append({"from": low, "to": high, "loss": loss, "error": error})
    gains = [long_context_gains(model, *both, short) for both in zip(text.long, losses, strict=True)]
    keys = [find_key_tokens(*both, short) for both in zip(losses, gains, strict=True)]
    for name, values in (("long_context_gain", gains), ("key_tokens", keys)):
        found[name], found[f"{name}_error"] = mean_and_error(values) if len(values[0]) else (None, None)
    at_short = [token_losses(model, document[None])[0, 1:] for document in text.short]
    found["short_context_loss"], found["short_context_loss_error"] = mean_and_error(at_short)
    found["retrieval"] = []
    for kind, context, depth in itertools.product(TASKS, contexts, DEPTHS):
        hits = 0
        for seed in range(samples):
            task = make_task(kind, depth, seed)
            hits += is_retrieved(model, *make_prompt(task, np.roll(text.hay, seed * HAYSTACK_STEP), tokenizer, context))
        cell = {"task": kind, "context": context, "depth": depth, "score": hits / samples, "samples": samples}
        found["retrieval"].append(cell)
    return found
