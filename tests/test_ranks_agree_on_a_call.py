"""The ranks agree on a call before its first layer: what is wrong on one of them raises the same error on all."""

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ithaka.dist.loopback import start_loopback
from ithaka.layout import ActivationPolicy, Layout
from parity import parallel, random_ids
from threads import on_threads

SHAPE = r"shape \(2, 8\) with hash \w{16}"
FAULTS = {
    "label": ({"labels": (0, 5, -1)}, "rank 1: labels[0, 5]=-1 is not in the vocabulary of 61 tokens"),
    "id": ({"input_ids": (1, 2, 61)}, "rank 1: input_ids[1, 2]=61 is not in the vocabulary of 61 tokens"),
    "mask": ({"attention_mask": (1, 2, 0)}, "rank 1: attention_mask row 1 has holes"),
}


def message_of(call) -> str:
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def batch(*shape: int):
    ids = random_ids(*shape)
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def one_fault(cp, fault, rank):
    model, mesh = parallel(cp)
    inputs = batch(2, 8)
    if mesh.rank == rank:
        for name, (row, column, value) in FAULTS[fault][0].items():
            inputs[name][row, column] = value
    first = message_of(lambda: model(**inputs))
    loss = model(**batch(2, 8)).loss  # nothing is left behind
    return first, float(loss.detach())


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("cp", [1, 2])
def test_a_fault_of_one_rank_is_told_by_all(ranks, cp, fault):
    (first, loss), (second, other) = ranks.run(2, one_fault, cp, fault, 1)
    assert first == second and first.startswith(f"ValueError: {FAULTS[fault][1]}")
    assert loss == other


def wrong_everywhere():
    model, _ = parallel(2)
    ids = random_ids(2, 8)
    return message_of(lambda: model(ids, input_ids=ids))


def test_a_fault_of_every_rank_is_told_once(ranks):
    for message in ranks.run(2, wrong_everywhere):
        assert message.startswith("TypeError: input_ids was passed twice; ")


def step_before_backward():
    """Shards of two ranks, in layers whose inputs are kept on the host."""
    model, _ = parallel(
        2, layout=Layout(2, heads_per_stage=2, tile_tokens=3, kept=(ActivationPolicy(input="host"),) * 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    messages = []
    for early in (False, True, False):
        loss = model(**batch(2, 8)).loss
        if early:
            optimizer.step()
        messages.append(message_of(loss.backward))
        optimizer.step()
    return messages


def test_a_step_before_backward_is_told_by_all(ranks):
    for first, early, last in ranks.run(2, step_before_backward):
        assert first == last == "no error" and "parameters of layer 0 changed in place" in early


def hooked_on_one_rank():
    model, mesh = parallel(2)
    if mesh.rank == 1:
        model.lm_head.register_forward_hook(print)
    return message_of(lambda: model(**batch(1, 8)))


def test_a_hook_on_one_rank(ranks):
    for message in ranks.run(2, hooked_on_one_rank):
        assert message.startswith("ConfigError: rank 1: lm_head has a forward hook")


def different(what, cp=2):
    """By the global rank, as with a DistributedSampler that knows nothing of cp."""
    model, mesh = parallel(cp)
    inputs = batch(2, 8)
    if what == "values":
        inputs["input_ids"] = inputs["labels"] = (inputs["input_ids"] + mesh.rank) % 61
    elif what == "order":
        inputs["input_ids"] = inputs["input_ids"].flip(0) if mesh.rank % 2 else inputs["input_ids"]
    elif what == "shape":
        inputs = batch(2, 8 + 2 * mesh.rank)
    elif mesh.rank % 2:
        del inputs["labels"]
    return message_of(lambda: model(**inputs))


@pytest.mark.parametrize(
    "what,difference",
    [
        ("values", f"input_ids: {SHAPE} on rank 0, {SHAPE} on rank 1; labels: {SHAPE} on rank 0, {SHAPE} on rank 1[.]"),
        ("order", f"different batches: input_ids: {SHAPE} on rank 0, {SHAPE} on rank 1[.]"),
        ("shape", f"input_ids: {SHAPE} on rank 0, {SHAPE.replace('8', '10')} on rank 1; labels: "),
        ("labels", f"different batches: labels: {SHAPE} on rank 0, not given on rank 1[.]"),
    ],
)
def test_different_batches_in_a_cp_group(ranks, what, difference):
    messages = ranks.run(2, different, what)
    assert len(set(messages)) == 1
    assert messages[0].startswith("ConfigError: ranks 0 and 1 share a sequence but got different batches")
    assert re.search(difference, messages[0])


def test_the_way_out_names_the_data_parallel_rank(ranks):
    for message in ranks.run(4, different, "values"):
        assert "DistributedSampler(dataset, num_replicas=2, rank=torch.distributed.get_rank() // 2)" in message


def data_parallel():
    model, mesh = parallel(2)
    inputs = batch(2, 8 + 2 * mesh.dp_rank)
    return model(**inputs).num_tokens


def test_data_parallel_ranks_may_have_other_batches(ranks):
    assert ranks.run(4, data_parallel) == [14 + 18] * 4


def different_modes(what):
    model, mesh = parallel(1)
    inputs = batch(1, 8)
    if what == "labels" and mesh.rank:
        del inputs["labels"]
    if what == "items":
        inputs["num_items_in_batch"] = 7 + mesh.rank
    with torch.set_grad_enabled(what != "gradients" or mesh.rank == 0):
        return message_of(lambda: model(**inputs))


@pytest.mark.parametrize(
    "what,message",
    [
        ("labels", "labels given: True on rank 0, False on rank 1. Pass labels on every rank or on none"),
        ("gradients", "gradients enabled: True on rank 0, False on rank 1"),
        ("items", "num_items_in_batch: 7 on rank 0, 8 on rank 1. "),
    ],
)
def test_data_parallel_ranks_that_call_in_different_ways(ranks, what, message):
    for told in ranks.run(2, different_modes, what):
        assert told.startswith("ConfigError: ranks 0 and 1 call the model in different ways") and message in told


def test_ranks_that_are_threads():
    messages = on_threads(2, lambda: different("shape"))
    assert len(set(messages)) == 1 and "ranks 0 and 1 share a sequence but got different batches" in messages[0]
    assert on_threads(4, data_parallel) == [14 + 18] * 4


def test_one_process_that_stands_for_many():
    """What it gathers from others is its own."""
    start_loopback(4)
    model, _ = parallel(2)
    assert model(**batch(2, 8)).num_tokens == 14 + 14
    assert message_of(lambda: model(input_ids=random_ids(2, 8) - 61)).startswith("ValueError: input_ids[0, 0]=")


class Reads(TorchDispatchMode):
    """Counts values read back from tensors after the last layer's forward."""

    def __init__(self, model) -> None:
        super().__init__()
        self.in_loss, self.num_reads = False, 0
        model.model.layers[-1].register_forward_hook(self.leave_layers)

    def leave_layers(self, *args) -> None:
        self.in_loss = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_reads += self.in_loss and func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def reads_after_the_layers():
    model, _ = parallel(1)
    with Reads(model) as reads:
        out = model(**batch(1, 8))
    assert reads.in_loss and out.num_tokens == 14
    return reads.num_reads


def test_nothing_is_read_back_between_forward_and_backward(ranks):
    """On a GPU it would wait for the whole forward."""
    assert ranks.run(2, reads_after_the_layers) == [0, 0]
