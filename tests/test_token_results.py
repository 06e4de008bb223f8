"""Tiled log-probabilities, entropies and argmax hits equal the plain ones on any number of ranks,
as do gradients."""

import importlib.util
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import ithaka
from allocations import allocator_peak
from ithaka.blocks.linear import Linear
from ithaka.facts import sizes as facts_sizes
from ithaka.facts.sizes import IGNORE_INDEX
from ithaka.layer.loss import (
    GraphHead,
    LinearHead,
    ScaledHead,
    TokenResults,
    linear_cross_entropy,
    summed_cross_entropy,
)
from models import tiny_config, tiny_model
from parity import TOLERANCE, check, gradient_errors, parallel, random_ids, relative
from refusals import assert_refused
from threads import run_on_threads

LENGTHS = (7, 1, 9, 6)  # documents; on 2 and 4 ranks they end in the middle of shards


def plain_results(logits_sY: Tensor, labels_s: Tensor) -> TokenResults:
    """The reference implementation."""
    valid_s = labels_s != IGNORE_INDEX
    log_p_sY = logits_sY.log_softmax(-1)
    logprobs_s = -F.cross_entropy(logits_sY, labels_s, ignore_index=IGNORE_INDEX, reduction="none")
    entropies_s = torch.where(valid_s, -(log_p_sY.exp() * log_p_sY).sum(-1), 0)
    return TokenResults(
        logprobs_s,
        entropies_s,
        logits_sY.argmax(-1) == labels_s,
        torch.where(valid_s, logits_sY.mean(-1), 0),
    )


def own_loss(results: TokenResults, use: str) -> Tensor:
    """A custom loss of the results and their squares, with a different weight for every token."""
    terms = {"logprobs": results[:1], "entropies": results[1:2], "both": results[:2]}[use]
    like = results.logprobs
    weights = torch.linspace(-1, 2, like.numel(), dtype=like.dtype).view_as(like)
    return sum((weights * x + x.square()).sum() for x in terms)


def head(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, list[Tensor], Tensor]:
    """Return a norm, leaves (x, weight, the norm's weight) and labels: some ignored, some equal to
    the argmax."""
    torch.manual_seed(5)
    norm = nn.RMSNorm(12, dtype=dtype)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    x = torch.randn(23, 12, dtype=dtype)
    weight = torch.randn(37, 12, dtype=dtype)
    labels = torch.randint(37, (23,))
    labels[::3] = (norm(x) @ weight.t()).argmax(-1)[::3]
    labels[4:9] = IGNORE_INDEX
    return norm, [x.requires_grad_(), weight.requires_grad_(), norm.weight], labels


@pytest.mark.parametrize(
    "use, temperature", [("logprobs", 1), ("entropies", 1), ("both", 1), ("both", 0.7)]
)
def test_token_results_equal_those_of_plain_logits(use, temperature):
    norm, leaves, labels = head()
    own_head = LinearHead(norm, Linear(leaves[1]))
    if temperature != 1:
        own_head = ScaledHead(own_head, 1 / temperature)
    ours = linear_cross_entropy(leaves[0], labels, own_head, 5)  # tiles of 5, the last of 3
    plain = plain_results(norm(leaves[0]) @ leaves[1].t() / temperature, labels)
    assert (
        relative(ours.mean_logits, plain.mean_logits) < TOLERANCE
        and not ours.mean_logits.requires_grad
    )
    assert torch.equal(ours.correct, plain.correct) and 0 < int(ours.correct.sum()) < 18
    for mine, theirs in zip(ours[:2], plain[:2], strict=True):
        assert relative(mine.detach(), theirs.detach()) < TOLERANCE
        assert not mine[labels == IGNORE_INDEX].any()
    grads = [torch.autograd.grad(own_loss(each, use), leaves) for each in (ours, plain)]
    for mine, theirs in zip(*grads, strict=True):
        assert theirs.norm() > 0 and relative(mine, theirs) < TOLERANCE


@torch.no_grad()
def test_rows_of_logits_are_padded_with_zeros():
    """With AMX, a CPU's matmuls in bf16 read the padding: uninitialized memory would make gradients
    NaN."""
    norm, (x, weight, _), _ = head(torch.bfloat16)
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
    try:
        _, logits = LinearHead(norm, Linear(weight)).run(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert logits.shape == (23, 37) and logits.stride() == (64, 1)
    assert not logits.as_strided((23, 64), (64, 1))[:, 37:].any()


def test_the_first_of_equal_logits_is_the_argmax():
    norm, (x, weight, _), labels = head()
    best = (norm(x) @ weight.t()).argmax(-1)
    with torch.no_grad():
        twins = torch.cat([weight, weight])  # every token twice; the second is never the argmax
    for labels, hits in ((best, 23), (best + 37, 0)):
        ours = linear_cross_entropy(x, labels, LinearHead(norm, Linear(twins)), 5)
        assert int(ours.correct.sum()) == hits


@pytest.mark.parametrize("factor", [1.0, -3.0])
def test_the_summed_loss_equals_that_of_plain_logits(factor):
    """Gradients are scaled by the loss's factor, and backward works once."""
    norm, leaves, labels = head()
    ours = summed_cross_entropy(leaves[0], labels, LinearHead(norm, Linear(leaves[1])), 5, 7.0)
    plain = (
        F.cross_entropy(
            norm(leaves[0]) @ leaves[1].t(), labels, ignore_index=IGNORE_INDEX, reduction="sum"
        )
        / 7
    )
    assert relative(ours.detach(), plain.detach()) < TOLERANCE
    grads = [
        torch.autograd.grad(factor * each, leaves, retain_graph=True) for each in (ours, plain)
    ]
    for mine, theirs in zip(*grads, strict=True):
        assert theirs.norm() > 0 and relative(mine, theirs) < TOLERANCE
    with pytest.raises(RuntimeError, match="retain_graph"):
        torch.autograd.grad(ours, leaves)


def test_tokens_that_are_ruled_out_do_not_count():
    """Their logits are -inf, as where a model masks a padded vocabulary: results are those of the
    other tokens."""
    _, (x, weight, _), labels = head()
    labels = labels.clamp(max=29)
    is_out = torch.arange(37) >= 30
    masked = GraphHead(lambda t: (t @ weight.t()).masked_fill(is_out, -torch.inf), [weight])
    fewer = GraphHead(lambda t: t @ weight[:30].t(), [weight])
    ours, plain = (linear_cross_entropy(x, labels, each, 5) for each in (masked, fewer))
    grads = [torch.autograd.grad(own_loss(each, "both"), (x, weight)) for each in (ours, plain)]
    for mine, theirs in zip((*ours[:2], *grads[0]), (*plain[:2], *grads[1]), strict=True):
        assert theirs.norm() > 0 and relative(mine.detach(), theirs.detach()) < TOLERANCE


def test_a_gradient_of_two_parameters_is_scaled_once():
    """Autograd returns one tensor for the two terms of a sum."""
    _, (x, weight, _), labels = head()
    terms = [nn.Parameter(torch.randn(len(x), len(weight), dtype=x.dtype)) for _ in range(2)]
    ours = summed_cross_entropy(
        x, labels, GraphHead(lambda t: t @ weight.detach().t() + sum(terms), terms), 64, 7.0
    )
    logits = x @ weight.detach().t() + sum(terms)
    plain = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum") / 7
    for mine, theirs in zip(
        *(torch.autograd.grad(3 * loss, terms) for loss in (ours, plain)), strict=True
    ):
        assert relative(mine, theirs) < TOLERANCE


# ---- parallel models


def example(name: str):
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).parents[1] / "examples" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packed(rows: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, labels and document ids, numbered across rows. The first half of each document
    has no labels."""
    ids = random_ids(rows, sum(LENGTHS))
    documents = (
        torch.arange(rows * len(LENGTHS))
        .repeat_interleave(torch.tensor(LENGTHS * rows))
        .view_as(ids)
    )
    starts = torch.cat([torch.arange(n) <= n // 2 for n in LENGTHS])
    return ids, ids.masked_fill(starts, IGNORE_INDEX), documents


def plain_tokens(
    plain: nn.Module, ids: Tensor, labels: Tensor, documents: Tensor | None = None, **inputs
):
    """Compute results from Hugging Face's logits, each document alone, at the labels' positions."""
    if documents is None:
        logits = plain(input_ids=ids, use_cache=False, **inputs).logits
    else:
        alone = [
            plain(input_ids=part[None]).logits[0] for row in ids for part in row.split(LENGTHS)
        ]
        logits = torch.cat(alone).view(*ids.shape, -1)
    results = plain_results(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return TokenResults(*(F.pad(x.view(len(ids), -1), (1, 0)) for x in results))


def padded() -> dict[str, Tensor]:
    """Return two rows of 15 tokens, of which 15 and 9 are valid."""
    ids = random_ids(2, 15)
    mask = torch.arange(15) < torch.tensor([[15], [9]])
    return {
        "ids": ids,
        "labels": ids.masked_fill(~mask, IGNORE_INDEX),
        "attention_mask": mask.long(),
    }


def with_all_results(model: nn.Module, plain: nn.Module) -> dict[str, float]:
    """Compare gathered [B, N] results for packed documents and padding, and the gradients of a loss
    on them."""
    ids, labels, documents = packed(2)
    inputs = padded()
    cases = [
        (
            partial(ithaka.token_logprobs, model, ids, labels, document_ids=documents),
            (ids, labels, documents),
            {},
        ),
        (
            partial(ithaka.token_logprobs, model, inputs["ids"], inputs["labels"]),
            (inputs["ids"], inputs["labels"]),
            {"attention_mask": inputs["attention_mask"]},
        ),
    ]
    errors = {}
    for number, (ours, args, more) in enumerate(cases):
        mine = ours(**more)
        theirs = plain_tokens(plain, *args, **more)
        assert mine.logprobs.shape == args[0].shape and torch.equal(mine.correct, theirs[2])
        for which, values in ((0, "logprobs"), (1, "entropies"), (3, "mean_logits")):
            errors[f"{values} {number}"] = relative(mine[which].detach(), theirs[which].detach())
        own_loss(mine, "both").backward()
        own_loss(theirs, "both").backward()
    return errors | gradient_errors(model, plain)


def with_shares(model: nn.Module, plain: nn.Module) -> dict[str, float]:
    """Compare GRPO's loss, summed over the ranks' shares, with its formula on plain
    log-probabilities."""
    grpo = example("grpo")
    ids, labels, documents = packed()
    gains = grpo.compute_advantages(torch.tensor([0.0, 2.0, -1.0, 0.5]).double(), documents, labels)
    old = torch.linspace(-6, -3, ids.numel(), dtype=torch.float64).view_as(ids)
    ours = grpo.grpo_loss(model, ids, labels, documents, ithaka.label_share(model, old), gains)
    ours.backward()
    ours = ours.detach()
    dist.all_reduce(ours)
    logprobs, entropies, *_ = plain_tokens(plain, ids, labels, documents)
    total = torch.zeros((), dtype=torch.float64)
    for at in range(1, ids.numel()):
        if labels[0, at] != IGNORE_INDEX:
            ratio = (logprobs[0, at] - old[0, at]).exp()
            gain = gains[0, at]
            total = (
                total
                + torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
                + 0.01 * entropies[0, at]
            )
    theirs = -total / int((labels != IGNORE_INDEX).sum())
    theirs.backward()
    return {"loss": relative(ours, theirs.detach()), **gradient_errors(model, plain)}


def with_preferences(model: nn.Module, plain: nn.Module) -> dict[str, float]:
    """Compare DPO's loss and gradients with its formula on plain log-probabilities."""
    dpo = example("dpo")
    ids, labels, documents = dpo.make_random_pairs(num_pairs=3, prompt=5, answer=4, vocab=61)
    reference = torch.linspace(-9, -4, 6, dtype=torch.float64)
    ours = dpo.dpo_loss(dpo.document_logprobs(model, ids, labels, documents), reference)
    above = []  # log-probability of each document, minus the reference's
    for part, before in zip(ids[0].split(9), reference, strict=True):
        log_p = plain(input_ids=part[None]).logits[0].log_softmax(-1)
        above.append(sum(log_p[at - 1, part[at]] for at in range(5, 9)) - before)
    theirs = sum(-torch.log(torch.sigmoid(0.1 * (above[i] - above[i + 1]))) for i in (0, 2, 4)) / 3
    ours.backward()
    theirs.backward()
    return {"loss": relative(ours.detach(), theirs.detach()), **gradient_errors(model, plain)}


@pytest.mark.parametrize(
    "cp,family",
    [
        (1, "llama"),
        (2, "mistral"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, "qwen3"), (4, "mistral"))),
    ],
)
def test_log_probabilities_and_losses_on_them_are_exact(cp, family):
    """2 and 4 ranks do not divide 23 and 46 tokens, so the last rank has padding."""

    def work():
        errors = {}
        (model, _) = parallel(cp, tiny_config(family))
        plain = tiny_model(tiny_config(family))
        for compare in (with_all_results, with_shares, *([with_preferences] if cp == 2 else [])):
            errors |= {
                f"{compare.__name__} {name}": error for name, error in compare(model, plain).items()
            }
            for each in (model, plain):
                each.zero_grad()
        return errors

    check(run_on_threads(cp, work))


def test_losses_of_data_parallel_groups_add_up():
    def work():
        (model, mesh) = parallel(2, tiny_config("llama"))
        plain = tiny_model(tiny_config("llama"))
        ids, labels, documents = packed(2)
        mine = slice(mesh.dp_rank, mesh.dp_rank + 1)
        tokens = ithaka.token_logprobs(model, ids[mine], labels[mine], document_ids=documents[mine])
        (tokens.logprobs.square().sum() / 7).backward()
        (plain_tokens(plain, ids, labels, documents)[0].square().sum() / 7).backward()
        return gradient_errors(model, plain)

    check(run_on_threads(4, work))


def test_missing_labels_and_plain_models_are_refused():
    ids = random_ids(1, 4)
    model, _ = parallel(1)
    assert_refused(
        lambda: ithaka.token_logprobs(model, ids, None), fix="pass labels", error=TypeError
    )
    plain = tiny_model(tiny_config("llama"))
    no_parallel_model = partial(ithaka.token_logprobs, plain, ids, ids)
    assert_refused(no_parallel_model, "LlamaForCausalLM", fix="ithaka.parallelize(")


def test_memory_does_not_grow_with_tokens_times_vocabulary(monkeypatch):
    """The logits of 256 more tokens, with a vocabulary of 4096, would take 8 MiB."""
    monkeypatch.setattr(facts_sizes, "LOGITS_TILE_BYTES", (2**18, 2**18))
    model, _ = parallel(1, tiny_config("llama", vocab_size=4096))

    def peak(num_tokens: int) -> int:
        ids = random_ids(1, num_tokens, vocab=4096)
        use = partial(ithaka.token_logprobs, model, ids, ids)
        return allocator_peak(lambda: own_loss(use(), "both").backward())

    peak(32)  # allocates the gradients, which stay
    assert peak(288) - peak(32) < 2**20
