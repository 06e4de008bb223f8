"""A forest of shared prefixes gives the results of its branches as separate sequences, on any number of ranks."""

import pytest
import torch
from torch import Tensor

import ithaka
from ithaka.layout import Layout
from models import tiny_config, tiny_model
from parity import check, gradient_errors, parallel, relative
from threads import on_threads

# (length, parent) of each node. Ranks cut them anywhere.
FORESTS = {
    "answers": [(9, -1), (3, 0), (1, 0), (4, 0)],
    "late": [(5, -1), (4, -1), (3, 0), (1, 1), (2, 0), (6, 1)],  # children away from their parents
    "depths": [(4, -1), (1, 0), (3, 1), (2, 2), (5, 3), (1, 3), (3, 2), (2, 0), (1, -1), (3, 8)],
}


def paths(nodes) -> list[list[int]]:
    """Tokens from the root to the end of each leaf."""
    starts = [sum(length for length, _ in nodes[:i]) for i in range(len(nodes))]
    tokens: list[list[int]] = []
    for start, (length, parent) in zip(starts, nodes, strict=True):
        tokens.append((tokens[parent] if parent >= 0 else []) + list(range(start, start + length)))
    return [path for i, path in enumerate(tokens) if i not in {parent for _, parent in nodes}]


def packed(nodes, rows: int = 1) -> dict[str, Tensor]:
    """Inputs of `rows` different rows. Some tokens have no label; ids of documents are neither small nor sorted."""
    lengths = torch.tensor([length for length, _ in nodes])
    names = torch.tensor([(7 * i + 3) % 53 for i in range(len(nodes))])
    above = torch.tensor([-1 if parent < 0 else int(names[parent]) for _, parent in nodes])
    ids = torch.randint(61, (rows, int(lengths.sum())), generator=torch.Generator().manual_seed(3))
    documents, parents = (each.repeat_interleave(lengths).expand_as(ids) for each in (names, above))
    labels = ids.masked_fill(torch.arange(ids.shape[1]) % 5 == 2, -100)
    return {"input_ids": ids, "labels": labels, "document_ids": documents, "parents": parents}


def alone(plain, nodes, inputs, weights) -> Tensor:
    """The weighted losses and entropies of plain Hugging Face on each branch alone, every label of the forest once."""
    ids, labels = inputs["input_ids"], inputs["labels"]
    total, seen = torch.zeros((), dtype=torch.float64), set()
    for row in range(len(ids)):
        for path in paths(nodes):
            log_p = plain(input_ids=ids[row, path][None], use_cache=False).logits[0].log_softmax(-1)
            for i, token in enumerate(path[1:]):
                if labels[row, token] != -100 and (row, token) not in seen:
                    seen.add((row, token))
                    entropy = -(log_p[i].exp() * log_p[i]).sum()
                    w, v = weights[row, token]
                    total = total - w * log_p[i, labels[row, token]] + v * entropy
    return total, len(seen)


def compare(model, plain, nodes, rows=1) -> dict[str, float]:
    """The mean loss of a call, then a weighted loss of log-probabilities and entropies, as [B, N] and by shares."""
    inputs, errors = packed(nodes, rows), {}
    shape = inputs["input_ids"].shape
    ones = torch.stack([torch.ones(shape), torch.zeros(shape)], -1).double()
    weights = torch.linspace(-1, 2, 2 * ones[..., 0].numel(), dtype=torch.float64).view_as(ones)

    def call():
        return model(**inputs).loss

    def gathered():
        results = ithaka.token_logprobs(model, **inputs)
        return (-weights[..., 0] * results.logprobs + weights[..., 1] * results.entropies).sum()

    def shared():
        results = ithaka.token_logprobs(model, share=True, **inputs)
        more = {name: inputs[name] for name in ("document_ids", "parents")}
        w, v = (ithaka.label_share(model, weights[..., i], **more) for i in (0, 1))
        own = (-w * results.logprobs + v * results.entropies).sum()
        total = own.detach().clone()
        torch.distributed.all_reduce(total)
        return own + (total - own).detach()

    for name, ours, each in (("call", call, ones), ("gathered", gathered, weights), ("shared", shared, weights)):
        for module in (model, plain):
            module.zero_grad()
        expected, count = alone(plain, nodes, inputs, each)
        expected = expected / count if name == "call" else expected
        expected.backward()
        loss = ours()
        loss.backward()
        errors[f"{name} loss"] = relative(loss.detach(), expected.detach())
        errors |= {f"{name} {key}": error for key, error in gradient_errors(model, plain).items()}
    return errors


def config_of(family):
    return tiny_config("mistral", sliding_window=4) if family == "window" else tiny_config(family)


@pytest.mark.parametrize(
    "cp,family,layout",
    [
        (1, "llama", Layout()),
        (2, "window", Layout(tile_tokens=5)),
        (4, "qwen3", Layout(heads_per_stage=4)),
    ],
    ids=str,
)
def test_a_forest_equals_its_branches(cp, family, layout):
    def work():
        (model, _), plain = parallel(cp, config_of(family), layout), tiny_model(config_of(family))
        cases = [(nodes, 1) for nodes in FORESTS.values()] + [(FORESTS["answers"], 2)]
        return [compare(model, plain, *case) for case in cases]

    check(on_threads(cp, work))
