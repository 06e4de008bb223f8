"""Losses, entropies and hits of every token, tiled and on any number of ranks, equal plain ones; gradients too."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ithaka.layer import loss
from ithaka.layer.linear import Linear
from ithaka.layer.loss import IGNORED, TokenResults, linear_cross_entropy
from parity import TOLERANCE, relative


def plain_results(logits_sV: Tensor, labels_s: Tensor) -> TokenResults:
    """The plain twin."""
    valid_s, log_p_sV = labels_s != IGNORED, logits_sV.log_softmax(-1)
    losses_s = F.cross_entropy(logits_sV, labels_s, ignore_index=IGNORED, reduction="none")
    entropies_s = torch.where(valid_s, -(log_p_sV.exp() * log_p_sV).sum(-1), 0)
    return TokenResults(losses_s, entropies_s, logits_sV.argmax(-1) == labels_s)


def own_loss(results: TokenResults, use: str) -> Tensor:
    """Anything of the user's own; every token counts differently, and its square too."""
    wanted = {"losses": results[:1], "entropies": results[1:2], "both": results[:2]}[use]
    weights = torch.linspace(-1, 2, results.losses.numel(), dtype=results.losses.dtype).view_as(results.losses)
    return sum((weights * x + x.square()).sum() for x in wanted)


def head(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, list[Tensor], Tensor]:
    """A norm, leaves (x, weight, the norm's) and labels, some ignored, some that are the argmax."""
    torch.manual_seed(5)
    norm = nn.RMSNorm(12, dtype=dtype)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    x, weight = torch.randn(23, 12, dtype=dtype), torch.randn(37, 12, dtype=dtype)
    labels = torch.randint(37, (23,))
    labels[::3] = (norm(x) @ weight.t()).argmax(-1)[::3]
    labels[4:9] = IGNORED
    return norm, [x.requires_grad_(), weight.requires_grad_(), norm.weight], labels


@pytest.mark.parametrize("use", ["losses", "entropies", "both"])
def test_tokens_are_those_of_plain_logits(monkeypatch, use):
    monkeypatch.setattr(loss, "LOGITS_TILE_BYTES", 5 * 37 * 8)  # tiles of 5 tokens, the last of 3
    norm, leaves, labels = head()
    ours = linear_cross_entropy(leaves[0], labels, norm, Linear(leaves[1]), details=True)
    plain = plain_results(norm(leaves[0]) @ leaves[1].t(), labels)
    assert torch.equal(ours.correct, plain.correct) and 0 < int(ours.correct.sum()) < 18
    for mine, theirs in zip(ours[:2], plain[:2], strict=True):
        assert relative(mine.detach(), theirs.detach()) < TOLERANCE
        assert not mine[labels == IGNORED].any()
    grads = [torch.autograd.grad(own_loss(each, use), leaves) for each in (ours, plain)]
    for mine, theirs in zip(*grads, strict=True):
        assert theirs.norm() > 0 and relative(mine, theirs) < TOLERANCE


def test_details_do_not_change_the_losses():
    norm, leaves, labels = head(torch.float32)
    short, full = (
        linear_cross_entropy(leaves[0], labels, norm, Linear(leaves[1]), details) for details in (False, True)
    )
    assert short.entropies is None and short.correct is None
    assert torch.equal(short.losses, full.losses)
    for a, b in zip(*(torch.autograd.grad(each.losses.sum(), leaves) for each in (short, full)), strict=True):
        assert torch.equal(a, b)
