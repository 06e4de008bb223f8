"""What a model does with its context: loss by position, what the long context gives, loss at short context, retrieval.

Every figure comes from forward passes of the parallel model, without gradients and without generation.
"""

import html
import itertools
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from ithaka.config import ConfigError, Reading
from ithaka.data.cache import tokenise
from ithaka.data.files import find
from ithaka.data.read import make_shards
from ithaka.data.tokenizer import Tokenizer, load_tokenizer
from ithaka.dist.mesh import end_process_group, make_mesh, start_process_group
from ithaka.layer.loss import IGNORED
from ithaka.layout import Layout, fewest_rings
from ithaka.model.build import build_model, has_weights
from ithaka.model.logprobs import token_logprobs
from ithaka.plan.shape import read_shape
from ithaka.report.page import page
from ithaka.train import checkpoint, launch

SHORT = 4096  # tokens of a short context
SHORT_DOCUMENTS = 32  # whose loss at short context is taken
FIRST_BUCKET = 64  # tokens; from there on a bucket is as long as all before it
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
HAY_STEP = 7919  # tokens by which the hay of a sample is turned
MOST_AT_ONCE = 1 << 29  # elements of a tensor of all heads
RESULT = "result.json"


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
        raise ConfigError(f"--contexts={length} is {-room} tokens too short for the tasks; use more")
    pieces = np.split(np.resize(hay, room), [int(where * room) for where, _ in needles])
    woven = itertools.chain.from_iterable(itertools.zip_longest(pieces, parts, fillvalue=prefix[:0]))
    return np.concatenate([prefix, *woven, question, answer]), len(answer)


# ---- measurement, on every rank


class Text(NamedTuple):
    """`long`: documents of the largest context, cut to it. `short`: the first documents, cut to SHORT tokens."""

    long: list[np.ndarray]
    short: list[np.ndarray]
    hay: np.ndarray


def read_text(path: Path | None, tokenizer: Tokenizer, context: int, num_documents: int, short: int = SHORT) -> Text:
    """Reads until there are enough documents of `context` tokens; those of fewer are hay as well."""
    text, longest = Text([], [], np.empty(0, np.int32)), 0
    hay: list[np.ndarray] = []
    for document in _documents(path, tokenizer):
        longest = max(longest, len(document))
        if len(text.short) < SHORT_DOCUMENTS and len(document) > 1:
            text.short.append(document[:short])
        if sum(map(len, hay)) < context:
            hay.append(document)
        if len(document) >= context:
            text.long.append(document[:context])
        if len(text.long) == num_documents and len(text.short) == SHORT_DOCUMENTS:
            break
    if not text.long:
        what = f"--data={path or 'the standard library of Python'} has no document of --contexts={context} tokens"
        raise ConfigError(f"{what}: its longest has {longest}; give longer documents, or shorter contexts")
    return text._replace(long=text.long[:num_documents], hay=np.concatenate(hay))


def _documents(path: Path | None, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    shards = make_shards(find(path, "--data").files, Reading())
    whole: list[np.ndarray] = []
    for tokens, first, reason in itertools.chain.from_iterable(tokenise(shard, tokenizer) for shard in shards):
        if first and whole:
            yield np.concatenate(whole)
            whole = []
        if not reason:
            whole.append(tokens ^ (tokens >> 31))  # ~ where it is read but not trained
    if whole:
        yield np.concatenate(whole)


@torch.no_grad()
def token_losses(model: PreTrainedModel, ids_BN: np.ndarray | Tensor) -> Tensor:
    """float64 [B, N] on the host; 0 for a row's first token, which nothing predicts."""
    ids_BN = torch.as_tensor(ids_BN).long()
    return -token_logprobs(model, ids_BN, ids_BN).logprobs.double().cpu()


@torch.no_grad()
def is_retrieved(model: PreTrainedModel, ids_N: np.ndarray, num_answer: int) -> bool:
    """Whether every token of the answer is the likeliest, given those before it: what greedy generation would write."""
    ids = torch.from_numpy(ids_N).long()[None]
    labels = torch.full_like(ids, IGNORED)
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


def mean_and_error(values: Sequence[Tensor]) -> tuple[float, float | None]:
    """Of documents: the mean of their means, and its standard error; None for a single one."""
    means = torch.stack([each.mean() for each in values])
    return float(means.mean()), float(means.std() / len(means) ** 0.5) if len(means) > 1 else None


def measure(
    model: PreTrainedModel, tokenizer: Tokenizer, text: Text, contexts: Sequence[int], samples: int, short: int = SHORT
) -> dict[str, Any]:
    """All figures. Every rank calls it, and all get the same. Losses are means over documents, errors those of the
    means. A long_context_gain below zero: the long context helps."""
    model.eval()
    losses = [token_losses(model, document[None])[0] for document in text.long]
    end, doubled = max(contexts), (FIRST_BUCKET << i for i in itertools.count())
    edges = [1, *itertools.takewhile(lambda edge: edge < end, doubled), end]
    found: dict[str, Any] = {"tasks_version": TASKS_VERSION, "contexts": list(contexts), "documents": len(losses)}
    found["loss"], found["loss_error"] = mean_and_error([each[1:] for each in losses])
    found["loss_by_position"] = []
    for low, high in itertools.pairwise(edges):
        loss, error = mean_and_error([each[low:high] for each in losses])
        found["loss_by_position"].append({"from": low, "to": high, "loss": loss, "error": error})
    gains = [long_context_gains(model, *both, short) for both in zip(text.long, losses, strict=True)]
    gain = mean_and_error(gains) if len(gains[0]) else (None, None)
    found["long_context_gain"], found["long_context_gain_error"] = gain
    at_short = [token_losses(model, document[None])[0, 1:] for document in text.short]
    found["short_context_loss"], found["short_context_loss_error"] = mean_and_error(at_short)
    found["retrieval"] = []
    for kind, context, depth in itertools.product(TASKS, contexts, DEPTHS):
        hits = 0
        for seed in range(samples):
            task = make_task(kind, depth, seed)
            hits += is_retrieved(model, *make_prompt(task, np.roll(text.hay, seed * HAY_STEP), tokenizer, context))
        cell = {"task": kind, "context": context, "depth": depth, "score": hits / samples, "samples": samples}
        found["retrieval"].append(cell)
    return found


# ---- the command


def evaluate(
    source: Path, contexts: Sequence[int], data: Path | None, ranks: int | None, num_documents: int, samples: int
) -> dict[str, Any]:
    """Of a Hugging Face directory, or of a run's latest checkpoint: starts the ranks, which share each sequence."""
    with tempfile.TemporaryDirectory(prefix="ithaka-evaluate-") as name:
        model, folder = source, Path(name)
        if (source / "config.yaml").is_file():
            has_adapter = (source / "model" / "adapter_config.json").is_file()
            model = checkpoint.export(source, folder / "model", merge=has_adapter)
        read_shape(model)
        if not has_weights(model):
            raise ConfigError(f"MODEL={source} has no safetensors; give a directory with weights, or a run")
        tokenizer = load_tokenizer(None, model)
        text = read_text(data, tokenizer, max(contexts), num_documents)
        for kind, context in itertools.product(TASKS, contexts):  # refuses a context that is too short for them
            make_prompt(make_task(kind, 0, 0), text.hay, tokenizer, context)
        num_ranks = launch.decide_ranks(ranks or "auto", launch.num_gpus())
        if code := launch.run_ranks(_rank, (model, folder, text, list(contexts), samples), num_ranks):
            raise SystemExit(code)
        if not (folder / RESULT).is_file():  # under torchrun rank 0 has it
            raise SystemExit(0)
        return {"model": str(source), **json.loads((folder / RESULT).read_text())}


def _rank(directory: Path, folder: Path, text: Text, contexts: list[int], samples: int) -> None:
    start_process_group()
    shape, cp = read_shape(directory), dist.get_world_size()
    ring = fewest_rings(cp, shape.heads)
    mesh = make_mesh(cp, ring=ring)
    dtype = "bfloat16" if mesh.device.type == "cuda" else "float32"
    # All heads at once where their tensors are small, which is faster; else as few as there can be.
    few = max(contexts) // cp * shape.heads * shape.head_dim > MOST_AT_ONCE
    layout = Layout(cp, heads_per_stage=cp // ring if few else None, tile_tokens=8192, dtype=dtype, ring=ring)
    model = build_model(directory, mesh, layout)
    found = measure(model, load_tokenizer(None, directory), text, contexts, samples)
    if mesh.rank == 0:
        (folder / RESULT).write_text(json.dumps(found))
    end_process_group()


def tables(found: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Titles and rows: the figures, loss by position, and retrieval, each row a task at a context."""
    names = ("loss", "long_context_gain", "short_context_loss")
    yield "figures", [{"figure": name, "mean": found[name], "error": found[f"{name}_error"]} for name in names]
    yield "loss by position", found["loss_by_position"]
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for cell in found["retrieval"]:
        row = rows.setdefault((cell["task"], cell["context"]), {"task": cell["task"], "context": cell["context"]})
        row[f"depth {cell['depth']:.0%}"] = cell["score"]
    yield "retrieval", list(rows.values())


def as_page(found: dict[str, Any]) -> str:
    """An HTML page of one file; retrieval is a heat map."""

    def cell(name: str, value: Any) -> str:
        green = f' style="background: rgb(0 160 80 / {value})"' if name.startswith("depth") else ""
        shown = "" if value is None else f"{value:.4g}" if isinstance(value, float) else html.escape(str(value))
        return f"<td class=number{green}>{shown}</td>"

    parts = []
    for title, rows in tables(found):
        heads = "".join(f"<th>{name}</th>" for name in rows[0])
        lines = ("".join(itertools.starmap(cell, row.items())) for row in rows)
        parts.append(f"<h2>{title}</h2><table><tr>{heads}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>")
    return page(f"Evaluation of {found['model']}", "".join(parts))
