"""The loss is the mean over the valid labels of the global batch, however ranks and micro-steps
divide it."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from ithaka import Layout, parallelize, token_logprobs
from models import tiny_config, tiny_model
from parity import (
    check,
    compare_with,
    for_each_case,
    gradient_errors,
    parallel,
    plain_sum,
    random_ids,
    relative,
)


def uneven_labels(rows: int, tokens: int):
    """Return ids and labels whose rows have different numbers of valid labels; the last row has
    none."""
    ids = random_ids(rows, tokens)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : row * tokens // (rows - 1)] = -100
    return ids, labels


def uneven_rows(cp):
    ids, labels = uneven_labels(4, 13)
    count = (labels[:, 1:] != -100).sum()
    return compare_with(
        lambda plain: plain_sum(plain, ids, labels) / count, cp, input_ids=ids, labels=labels
    )


@pytest.mark.parametrize(
    "cp,dp",
    [
        (1, 1),
        (2, 2),
        *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in ((2, 1), (4, 1), (1, 4))),
    ],
)
def test_rows_with_different_numbers_of_labels(ranks, cp, dp):
    """With dp = 4 the last rank has no valid label."""
    check(ranks.run(cp * dp, uneven_rows, cp))


def in_micro_batches(cp):
    """Compare rows 0..3 in one batch with rows 0, 1..2 and 3 in three micro-steps, which accumulate
    in .grad."""
    ids, labels = uneven_labels(4, 13)
    count = int((labels[:, 1:] != -100).sum())
    plain = tiny_model(tiny_config("llama"))
    (model, mesh) = parallel(cp)
    expected = plain_sum(plain, ids, labels) / count
    expected.backward()
    loss = torch.zeros((), dtype=torch.float64)
    tokens = []
    for rows in ([0], [1, 2], [3]) if mesh.dp_size == 1 else ([0, 3], [1, 2]):
        mine = rows if mesh.dp_size == 1 else rows[mesh.dp_rank : mesh.dp_rank + 1]
        out = model(input_ids=ids[mine], labels=labels[mine], num_items_in_batch=count)
        out.loss.backward()
        loss += out.loss.detach()
        tokens.append(out.num_tokens)
    assert sum(tokens) == count and len(set(tokens)) > 1
    return {"loss": relative(loss, expected.detach()), **gradient_errors(model, plain)}


@pytest.mark.parametrize(
    "cp,dp",
    [(1, 1), (2, 2), *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in ((2, 1), (4, 1)))],
)
def test_micro_batches_equal_one_big_batch(ranks, cp, dp):
    check(ranks.run(cp * dp, in_micro_batches, cp))


def tensor_of_items():
    """Hugging Face's Trainer passes the count as a tensor."""
    ids = random_ids(1, 9)
    return compare_with(
        lambda plain: plain_sum(plain, ids, ids) / 31,
        1,
        input_ids=ids,
        labels=ids,
        num_items_in_batch=torch.tensor(31),
    )


def test_num_items_in_batch_may_be_a_tensor(ranks):
    check(ranks.run(1, tensor_of_items))


def without_labels(cp, lora, offload):
    """Return whether each parameter moved in three AdamW steps: with labels, without, and with
    labels again."""
    model = tiny_model(tiny_config("llama"))
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    model = parallelize(model, layout=Layout(cp=cp, offload_optimizer=offload))
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.1)
    ids = random_ids(2, 9)
    none = torch.full_like(ids, -100)
    none[:, 0] = 5  # no token predicts it

    def gradients(*micro_steps):
        for labels in micro_steps:
            model(input_ids=ids, labels=labels).loss.backward()
        return [
            param.grad if param.grad is None else param.grad.full_tensor().clone()
            for param in params
        ]

    def moved():
        """Update, and return which parameters moved."""
        before = [param.full_tensor().detach().clone() for param in params]
        optimizer.step()
        optimizer.zero_grad()
        return [
            not torch.equal(old, new.full_tensor()) for old, new in zip(before, params, strict=True)
        ]

    gradients(ids)
    first = moved()
    assert gradients(none, none) == [None] * len(params)
    tokens = token_logprobs(model, ids, none)
    (tokens.logprobs.sum() + tokens.entropies.sum()).backward()
    without = moved()
    out = model(input_ids=ids, labels=none)
    assert (float(out.loss.detach()), out.num_tokens) == (0.0, 0) and not tokens.logprobs.any()
    expected = gradients(ids)
    for labels in ([none, ids], [ids, none]):
        optimizer.zero_grad()
        assert all(map(torch.equal, expected, gradients(*labels)))
    return first, without, moved()


@pytest.mark.parametrize(
    "num_ranks,cp,lora,offload",
    [
        (1, 1, False, False),
        (2, 2, True, False),
        pytest.param(2, 1, False, True, marks=pytest.mark.slow),
    ],
)
def test_a_step_without_labels_changes_nothing(ranks, num_ranks, cp, lora, offload):
    """With zero gradients, AdamW's moments and weight decay would still move the weights."""
    for first, without, again in ranks.run(num_ranks, without_labels, cp, lora, offload):
        assert all(first) and not any(without) and all(again)


def label_of_a_shard_start(at):
    """Only the label at `at` is valid. The token before it, perhaps on another rank, predicts
    it."""
    ids = random_ids(1, 8)
    labels = torch.full_like(ids, -100)
    labels[0, at] = ids[0, at]
    return compare_with(
        lambda plain: plain_sum(plain, ids, labels), 4, input_ids=ids, labels=labels
    )


def test_labels_are_shifted_before_they_are_sharded(ranks):
    check(ranks.run(4, for_each_case, label_of_a_shard_start, [(2,), (4,), (6,), (7,)]))
