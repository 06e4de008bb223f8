"""Without labels every rank gets differentiable logits of the full batch, equal to Hugging Face's."""

import pytest
import torch

from grids import diagonal
from models import FAMILIES, tiny_config, tiny_model
from parity import check, gradient_errors, parallel, random_ids, relative


def own_loss(logits):
    """Anything of the user's own; looks at every logit."""
    weight = torch.linspace(-1, 2, logits.numel(), dtype=logits.dtype).view_as(logits)
    return (weight * logits.tanh()).sum() + logits[:, 0].square().mean()


def compare(family, cp, tokens):
    config, ids = tiny_config(family), random_ids(2, tokens)
    plain, (model, _) = tiny_model(config), parallel(cp, config)
    expected, out = plain(input_ids=ids).logits, model(input_ids=ids)
    assert out.loss is None and out.logits.shape == (2, tokens, 61)
    own_loss(expected).backward()
    own_loss(out.logits).backward()
    return {"logits": relative(out.logits.detach(), expected.detach()), **gradient_errors(model, plain)}


@pytest.mark.parametrize("family, sizes", diagonal(FAMILIES, [(1, 9), (2, 9), (4, 11)]), ids=str)
def test_logits_and_the_gradients_of_a_loss_on_them(ranks, family, sizes):
    cp, tokens = sizes
    check(ranks.run(cp, compare, family, cp, tokens))


def changed_in_place(tokens):
    """As users scale them; FSDP2's hooks must not hang on a view that this replaces."""
    config, ids = tiny_config("llama"), random_ids(1, tokens)
    plain, (model, _) = tiny_model(config), parallel(2, config)
    for each in (plain, model):
        logits = each(input_ids=ids).logits
        assert not logits._is_view() or each is plain
        own_loss(logits.mul_(3.0)).backward()
    return gradient_errors(model, plain)


@pytest.mark.parametrize("tokens", [8, 9])
def test_logits_may_be_changed_in_place(ranks, tokens):
    check(ranks.run(2, changed_in_place, tokens))


def of_each_batch():
    """Data-parallel ranks each get the logits of their own rows."""
    config, ids = tiny_config("llama"), random_ids(2, 7)
    model, mesh = parallel(2, config)
    mine = ids[mesh.dp_rank][None]
    return {"logits": relative(model(input_ids=mine).logits, tiny_model(config)(input_ids=mine).logits)}


def test_logits_have_the_order_of_the_rows(ranks):
    check(ranks.run(4, of_each_batch))


def without_logits():
    model, _ = parallel(1)
    ids = random_ids(1, 8)
    out = model(input_ids=ids, labels=ids)
    return out.logits, out.num_tokens, list(out.keys())


def test_a_call_with_labels_returns_no_logits(ranks):
    assert ranks.run(1, without_logits) == [(None, 7, ["loss", "num_tokens", "docs", "own_loss"])]
