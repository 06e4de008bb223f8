"""Measure how a model uses its context: loss by position, gain from long context, short-context
loss, retrieval.

All figures come from forward passes of the parallel model, without gradients or generation.
"""

import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ithaka.config import ConfigError, ReadingConfig, ReasoningConfig, input_error
from ithaka.data.cache import tokenize
from ithaka.data.documents.files import find_files
from ithaka.data.documents.read import make_shards
from ithaka.data.stored_tokens import decode_ids, decode_labels
from ithaka.data.tokenizer import Tokenizer
from ithaka.facts.sizes import IGNORE_INDEX
from ithaka.model.distillation import token_divergences
from ithaka.model.logprobs import token_logprobs

SHORT_CONTEXT = 4096  # tokens
SHORT_DOCUMENTS = 32  # for the short-context loss
CONVERSATIONS = 32  # for the loss by turn
BATCH_CHARS = 1 << 16  # read little more than necessary
FIRST_BUCKET = 64  # tokens; each later bucket doubles the end position
PROMPT_FIELDS = (("prompt", "input"), ("answer", "outputs"))  # and RULER's names
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
HAYSTACK_STEP = 7919  # tokens to rotate the haystack by, per sample
FIGURES = ("loss", "trained_loss", "long_context_gain", "key_tokens", "short_context_loss")
# Upper bounds for a key token, from LongPPL (arXiv 2410.23771).
KEY_GAIN = -2.0
KEY_LOSS = 2.0

T = TypeVar("T")


# ---- tasks


class Task(NamedTuple):
    """A retrieval task. `needles`: (depth in the haystack from 0 to 1, text)."""

    needles: list[tuple[float, str]]
    question: str
    answer: str


TASKS_VERSION = 1  # scores of different versions cannot be compared
TASKS = ("single", "multi-key", "multi-value", "variables", "common words")
WORDS = """
anchor basket candle dragon engine falcon garden hammer island jacket kettle ladder magnet napkin
orchid pencil quartz rabbit saddle tunnel umbrella violin walnut yogurt zebra bridge copper desert
ember forest glacier harbor
"""


def make_task(kind: str, depth: float, seed: int) -> Task:
    """Make a RULER-style task (arXiv 2404.06654) with the answer, or its start, at `depth`."""
    rng = random.Random(f"{TASKS_VERSION} {kind} {seed}")
    things = WORDS.split()
    rng.shuffle(things)
    numbers = [str(rng.randrange(10**6, 10**7)) for _ in things]
    fact = "The special number of the {} is {}.".format
    name = things[0]
    onwards = [depth + (1 - depth) * i / 4 for i in range(4)]
    if kind in ("single", "multi-key"):
        needles = [(depth, fact(name, numbers[0]))]
        if kind == "multi-key":
            needles += [((i - 0.5) / 7, fact(things[i], numbers[i])) for i in range(1, 8)]
        question = (
            f"What is the special number of the {name}?\n"
            f"Answer: The special number of the {name} is"
        )
        return Task(needles, question, numbers[0])
    if kind == "multi-value":
        question = (
            f"What are the four special numbers of the {name}, in the order of the text?\n"
            f"Answer: The special numbers of the {name} are"
        )
        facts = (fact(name, number) for number in numbers[:4])
        return Task(list(zip(onwards, facts, strict=True)), question, ", ".join(numbers[:4]))
    if kind == "variables":
        names = [thing.upper() for thing in things[:4]]
        values = [numbers[0], *(f"VAR {variable}" for variable in names[:3])]
        needles = [
            (where, f"VAR {each} = {value}")
            for where, each, value in zip(onwards, names, values, strict=True)
        ]
        question = (
            f"Which four variables have the value {numbers[0]}, in the order of the text?\n"
            f"Answer: The variables with the value {numbers[0]} are"
        )
        return Task(needles, question, ", ".join(names))
    words = []
    for word, times in zip(things, (16, 12, 8, *[2] * 20), strict=False):
        words += [word] * times
    rng.shuffle(words)
    question = (
        "Which three words are the most frequent in the list of words, the most frequent first?\n"
        "Answer: The most frequent words are"
    )
    needle = f"List of words: {' '.join(words)}."
    return Task([(depth, needle)], question, ", ".join(things[:3]))


def make_prompt(
    task: Task, haystack: np.ndarray, tokenizer: Tokenizer, length: int
) -> tuple[np.ndarray, int]:
    """Return `length` tokens that end with the answer, and the answer's length."""
    needles = sorted(task.needles, key=lambda needle: needle[0])
    texts = [
        *(f"\n{text}\n" for _, text in needles),
        f"\nQuestion: {task.question}",
        f" {task.answer}",
    ]
    *parts, question, answer = tokenizer.encode_batch(texts)
    prefix = np.asarray(tokenizer.document_prefix, np.int32)
    room = length - sum(map(len, (prefix, *parts, question, answer)))
    if room < 0:
        raise ConfigError(
            f"evaluate.contexts={length} is too short for the retrieval tasks; use at least "
            f"{length - room}, or evaluate.samples=0"
        )
    pieces = np.split(np.resize(haystack, room), [int(where * room) for where, _ in needles])
    woven = []
    for piece, needle in itertools.zip_longest(pieces, parts, fillvalue=prefix[:0]):
        woven += [piece, needle]
    return np.concatenate([prefix, *woven, question, answer]), len(answer)


class Prompt(NamedTuple):
    """A prompt of the user: tokens that end with the answer."""

    task: str
    tokens: np.ndarray
    num_answer: int


def read_prompts(
    file: Path, tokenizer: Tokenizer, where: str = "--tasks"
) -> tuple[list[Prompt], str]:
    """Read prompts from JSONL, {"prompt": ..., "answer": ..., "task": ...} or RULER's input and
    outputs, as they are: without a chat template. Several answers are joined by commas. Also
    returns a digest of the file."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise input_error(
            f"{where}={file} cannot be read ({error.strerror}); give a JSONL file", error
        ) from None
    prompts = []
    prefix = np.asarray(tokenizer.document_prefix, np.int32)
    for number, line in enumerate(content.splitlines(), 1):
        try:
            record = json.loads(line)
            prompt, answer = (record.get(name, record.get(other)) for name, other in PROMPT_FIELDS)
            text = ", ".join(answer) if isinstance(answer, list) else answer
            if not (isinstance(prompt, str) and isinstance(text, str) and prompt and text):
                raise ValueError("no prompt and answer")
        except (ValueError, TypeError, AttributeError) as error:
            fix = 'use lines such as {"prompt": "1 + 1 =", "answer": "2", "task": "sums"}'
            raise ConfigError(
                f"{where}={file}, line {number}, cannot be read ({error}); {fix}"
            ) from None
        if not prompt[-1].isspace():
            text = f" {text}"
        question, expected = tokenizer.encode_batch([prompt, text])
        tokens = np.concatenate([prefix, question, expected])
        prompts.append(Prompt(str(record.get("task", "prompts")), tokens, len(expected)))
    if not prompts:
        raise ConfigError(f"{where}={file} has no line; give a JSONL file of prompts and answers")
    return prompts, hashlib.sha256(content).hexdigest()[:16]


# ---- measurements


class Conversation(NamedTuple):
    """A conversation truncated to the longest context."""

    ids: np.ndarray
    labels: np.ndarray  # not shifted
    starts: list[int]  # of the assistant's turns


class EvalText(NamedTuple):
    """`long`: documents truncated to the longest context. `short`: the first documents, truncated
    to the short one."""

    long: list[np.ndarray]
    short: list[np.ndarray]
    haystack: np.ndarray
    conversations: Sequence[Conversation] = ()

    @property
    def digest(self) -> str:
        """Losses are comparable only between equal digests."""
        documents = (document.tobytes() for document in (*self.long, *self.short))
        return hashlib.sha256(b"".join(documents)).hexdigest()[:16]


def check_prompts(text: EvalText, tokenizer: Tokenizer, contexts: Sequence[int]) -> None:
    """Raise ConfigError if a context is too short for the tasks."""
    for kind, context in itertools.product(TASKS, contexts):
        make_prompt(make_task(kind, 0, 0), text.haystack, tokenizer, context)


def flatten_metrics(result: dict[str, Any]) -> dict[str, float]:
    """Metrics by name: the figures, and retrieval overall and by task and context."""
    values = {name: result[name] for name in FIGURES if result.get(name) is not None}
    cells: dict[str, list[float]] = {}
    for cell in result["retrieval"]:
        for name in ("retrieval", f"retrieval/{cell['task']}/{cell['context']}"):
            cells.setdefault(name, []).append(cell["score"])
    values |= {name: sum(scores) / len(scores) for name, scores in cells.items()}
    return {f"evaluate/{name}": value for name, value in values.items()}


def read_text(
    path: Path | None, tokenizer: Tokenizer, context: int, num_documents: int, where: str = "--data"
) -> EvalText:
    """Read until enough documents have `context` tokens; shorter ones are for the haystack."""
    text = EvalText([], [], np.empty(0, np.int32))
    longest = 0
    num_haystack = 0
    haystack: list[np.ndarray] = []
    conversations: list[Conversation] = []
    for tokens, turns in _read_documents(path, tokenizer, where):
        document = decode_ids(tokens)
        longest = max(longest, len(document))
        starts = [start for start, role in turns if role == "assistant" and start < context]
        if starts and len(conversations) < CONVERSATIONS:
            labels = decode_labels(tokens[:context])
            conversations.append(Conversation(document[:context], labels, starts))
        if len(text.short) < SHORT_DOCUMENTS and len(document) > 1:
            text.short.append(document[: min(SHORT_CONTEXT, context)])
        if num_haystack < context:
            haystack.append(document)
            num_haystack += len(document)
        if len(document) >= context:
            text.long.append(document[:context])
        if (
            len(text.long) >= num_documents
            and len(text.short) == SHORT_DOCUMENTS
            and num_haystack >= context
        ):
            break
    if not text.long and not conversations:
        raise ConfigError(
            f"{where}={path or 'the standard library of Python'} has no document of {context} "
            f"tokens: its longest has {longest}; use longer documents or shorter contexts"
        )
    long = text.long[:num_documents]
    hay = np.concatenate(haystack)
    return text._replace(long=long, haystack=hay, conversations=conversations)


def _read_documents(
    path: Path | None, tokenizer: Tokenizer, where: str
) -> Iterator[tuple[np.ndarray, list[tuple[int, str]]]]:
    """Yield the tokens of each document, and its turns, with the reasoning that is rendered."""
    reading = ReadingConfig(reasoning=ReasoningConfig(turns="last"))
    shards = make_shards(find_files(path, where).files, reading)
    tokenized = (tokenize(shard, tokenizer, BATCH_CHARS) for shard in shards)
    parts: list[np.ndarray] = []
    turns: list[tuple[int, str]] = []
    for part in itertools.chain.from_iterable(tokenized):
        if part.is_start and parts:
            yield np.concatenate(parts), turns
            parts = []
            turns = []
        if not part.skip_reason:
            parts.append(part.tokens)
            turns = turns or part.turns
    if parts:
        yield np.concatenate(parts), turns


@torch.no_grad()
def token_losses(model: PreTrainedModel, ids_BN: np.ndarray | Tensor) -> Tensor:
    """Return float64 [B, N] on the host; 0 for the first token of a row."""
    ids_BN = torch.as_tensor(ids_BN).long()
    return -token_logprobs(model, ids_BN, ids_BN).logprobs.double().cpu()


@torch.no_grad()
def is_retrieved(model: PreTrainedModel, ids_N: np.ndarray, num_answer: int) -> bool:
    """Whether each token of the answer is the model's argmax, given those before."""
    ids = torch.from_numpy(ids_N).long()[None]
    labels = torch.full_like(ids, IGNORE_INDEX)
    labels[:, -num_answer:] = ids[:, -num_answer:]
    return bool(token_logprobs(model, ids, labels).correct[:, -num_answer:].all())


def long_context_gains(
    model: PreTrainedModel, ids_N: np.ndarray, losses_N: Tensor, short: int
) -> Tensor:
    """Loss with the full context minus loss with the last 3/4 to 1 `short` tokens, for each token
    after `short`. Uses overlapping chunks of `short` tokens: the reach of a sliding window would
    grow with every layer."""
    quarter = short // 4
    if len(ids_N) < 5 * quarter:
        return losses_N[:0]
    chunks_BN = torch.from_numpy(ids_N).long().unfold(0, 4 * quarter, quarter)[1:]
    rows = max(1, len(ids_N) // short)  # at most as many tokens at once as in the document
    chunk_losses = [
        token_losses(model, ids_BN)[:, 3 * quarter :].flatten() for ids_BN in chunks_BN.split(rows)
    ]
    return losses_N[4 * quarter :][: len(chunks_BN) * quarter] - torch.cat(chunk_losses)


def find_key_tokens(losses_N: Tensor, gains: Tensor, short: int) -> Tensor:
    """Mask over the tokens of `gains`: 1.0 where the long context makes a prediction good."""
    losses = losses_N[short // 4 * 4 :][: len(gains)]
    return ((gains < KEY_GAIN) & (losses < KEY_LOSS)).double()


def position_edges(end: int) -> list[int]:
    """Return the edges of buckets of positions up to `end`."""
    edges = [1]
    edge = FIRST_BUCKET
    while edge < end:
        edges.append(edge)
        edge *= 2
    return [*edges, end]


def mean_and_error(values: Sequence[Tensor]) -> tuple[float, float | None]:
    """Mean over documents of their means, and its standard error (None for a single document)."""
    means = torch.stack([document.mean() for document in values])
    if len(means) == 1:
        return float(means.mean()), None
    return float(means.mean()), float(means.std() / len(means) ** 0.5)


def measure_divergence(
    model: PreTrainedModel, base: PreTrainedModel, documents: Sequence[np.ndarray], end: int
) -> list[dict[str, Any]]:
    """Return the mean KL(base || model) over documents, by position. Collective."""
    rows = []
    tensors = (torch.as_tensor(document).long()[None] for document in documents)
    divergences = [token_divergences(model, base, ids)[0].double().cpu() for ids in tensors]
    if not divergences:
        return []
    for low, high in itertools.pairwise(position_edges(end)):
        mean, error = mean_and_error([each[low:high] for each in divergences])
        if not math.isnan(mean):
            rows.append({"from": low, "to": high, "divergence": mean, "error": error})
    return rows


def summarize_turns(
    conversations: Sequence[Conversation],
    losses: Sequence[Tensor],
    edges: Sequence[int],
) -> dict[str, Any]:
    """Mean losses over the trained tokens: of all, by turn of the assistant, and by position."""
    values = []
    turns = []
    positions = []
    for conversation, losses_N in zip(conversations, losses, strict=True):
        trained = np.flatnonzero(conversation.labels[1:] != IGNORE_INDEX) + 1
        values.append(losses_N.numpy()[trained])
        turns.append(np.searchsorted(conversation.starts, trained, side="right"))
        positions.append(np.searchsorted(edges, trained, side="right"))
    flat = np.concatenate(values)

    def group(keys: np.ndarray) -> Iterator[tuple[int, float, int]]:
        for key in np.unique(keys).tolist():
            yield key, float(flat[keys == key].mean()), int((keys == key).sum())

    by_turn = [
        {"turn": turn, "loss": loss, "tokens": num}
        for turn, loss, num in group(np.concatenate(turns))
    ]
    by_position = [
        {"from": edges[i - 1], "to": edges[min(i, len(edges) - 1)], "loss": loss, "tokens": num}
        for i, loss, num in group(np.concatenate(positions))
    ]
    trained_loss = float(flat.mean()) if len(flat) else None
    return {
        "trained_loss": trained_loss,
        "loss_by_turn": by_turn,
        "trained_loss_by_position": by_position,
    }


def measure_all(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    text: EvalText,
    contexts: Sequence[int],
    samples: int,
    short: int = SHORT_CONTEXT,
    report: Callable[[dict[str, Any], float], None] = lambda result, share: None,
    prompts: Sequence[Prompt] = (),
) -> dict[str, Any]:
    """Compute all figures. Collective; every rank returns the same result. Losses are means over
    documents, with standard errors. long_context_gain < 0: the long context helps. key_tokens:
    share of tokens it helps most. Calls `report` after each pass, with the figures so far and the
    share of the work that is done."""
    model.eval()
    cells = list(itertools.product(TASKS, contexts, DEPTHS)) if samples else []
    result: dict[str, Any] = {
        "tasks_version": TASKS_VERSION,
        "contexts": list(contexts),
        "documents": len(text.long),
        "text": text.digest,
        "loss_by_position": [],
        "loss_by_turn": [],
        "retrieval": [],
        "tasks": [],
    }
    result |= dict.fromkeys(FIGURES)
    talks = [conversation.ids for conversation in text.conversations]
    documents = {each.tobytes(): each for each in (*text.long, *talks, *text.short)}
    num_total = sum(map(len, documents.values()))
    num_total += 4 * sum(max(len(each) - short, 0) for each in text.long)
    num_total += sum(len(prompt.tokens) for prompt in prompts)
    num_total += samples * sum(context for _, context, _ in cells)
    passes = Passes(model, num_total, lambda share: report(result, share))

    losses = [passes.losses_of(document) for document in text.long]
    edges = position_edges(max(contexts))
    if losses:
        result["loss"], result["loss_error"] = mean_and_error([losses_N[1:] for losses_N in losses])
        for low, high in itertools.pairwise(edges):
            loss, error = mean_and_error([losses_N[low:high] for losses_N in losses])
            row = {"from": low, "to": high, "loss": loss, "error": error}
            result["loss_by_position"].append(row)
    if talks:
        talk_losses = [passes.losses_of(tokens) for tokens in talks]
        result |= summarize_turns(text.conversations, talk_losses, edges)
    result |= _measure_gains(passes, text.long, losses, short)
    short_losses = [passes.losses_of(document)[1:] for document in text.short]
    result["short_context_loss"], result["short_context_loss_error"] = mean_and_error(short_losses)
    for kind, context, depth in cells:
        hits = 0
        for seed in range(samples):
            task = make_task(kind, depth, seed)
            haystack = np.roll(text.haystack, seed * HAYSTACK_STEP)
            prompt = make_prompt(task, haystack, tokenizer, context)
            hits += passes.count(is_retrieved(model, *prompt), context)
        cell = {
            "task": kind,
            "context": context,
            "depth": depth,
            "score": hits / samples,
            "samples": samples,
        }
        result["retrieval"].append(cell)
    result["tasks"] += _measure_prompts(passes, prompts)
    return result


class Passes:
    """Forward passes of a model. `report` gets the share of `num_total` tokens after each."""

    def __init__(self, model: PreTrainedModel, num_total: int, report: Callable[[float], None]):
        self.model = model
        self.num_total = num_total
        self.report = report
        self.num_done = 0
        self.known: dict[bytes, Tensor] = {}  # losses by document: equal ones need one pass

    def count(self, values: T, num_tokens: int) -> T:
        """Count a pass that is done, and return its result."""
        self.num_done += num_tokens
        self.report(self.num_done / self.num_total)
        return values

    def losses_of(self, document: np.ndarray) -> Tensor:
        key = document.tobytes()
        if key not in self.known:
            losses_N = token_losses(self.model, document[None])[0]
            self.known[key] = self.count(losses_N, len(document))
        return self.known[key]


def _measure_gains(
    passes: Passes, documents: Sequence[np.ndarray], losses: Sequence[Tensor], short: int
) -> dict[str, float | None]:
    gains = []
    keys = []
    for document, losses_N in zip(documents, losses, strict=True):
        gain = long_context_gains(passes.model, document, losses_N, short)
        gains.append(passes.count(gain, 4 * max(len(document) - short, 0)))
        keys.append(find_key_tokens(losses_N, gain, short))
    figures: dict[str, float | None] = {}
    for name, values in (("long_context_gain", gains), ("key_tokens", keys)):
        figures[name] = None
        figures[f"{name}_error"] = None
        if values and len(values[0]):
            figures[name], figures[f"{name}_error"] = mean_and_error(values)
    return figures


def _measure_prompts(passes: Passes, prompts: Sequence[Prompt]) -> Iterator[dict[str, Any]]:
    """Yield the score of each task."""
    hits_by_task: dict[str, list[bool]] = {}
    for task, tokens, num_answer in prompts:
        hit = passes.count(is_retrieved(passes.model, tokens, num_answer), len(tokens))
        hits_by_task.setdefault(task, []).append(hit)
    for task, hits in hits_by_task.items():
        longest = max(len(prompt.tokens) for prompt in prompts if prompt.task == task)
        score = sum(hits) / len(hits)
        yield {"task": task, "score": score, "samples": len(hits), "longest": longest}
