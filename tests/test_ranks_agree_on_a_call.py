"""Ranks agree on a call before its first layer: if the call is wrong on any rank, all ranks raise
the same error."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ithaka.attention import choose
from ithaka.comm.agree import RankFailed, raise_on_all_ranks
from ithaka.comm.loopback import start_loopback
from ithaka.config import ConfigError
from ithaka.exits import exit_code_for
from ithaka.facts.attention import AttentionKind
from ithaka.inputs import calls
from ithaka.layout import Layout
from ithaka.roots.decoder import Decoder
from models import tiny_config
from parity import parallel, random_ids
from refusals import assert_refused
from threads import run_on_threads

SHAPE = r"shape \(2, 8\) with hash \w{16}"
LONGER = SHAPE.replace("8", "10")
# (row, column, value) to write into an input, what the message names, the fix.
FAULTS = {
    "label": ({"labels": (0, 5, -1)}, ["rank 1: ", "labels[0, 5]=-1", "61 tokens"], "-100"),
    "id": ({"input_ids": (1, 2, 61)}, ["rank 1: ", "input_ids[1, 2]=61", "61 tokens"], "tokenizer"),
    "mask": ({"attention_mask": (1, 2, 0)}, ["rank 1: ", "attention_mask row 1"], "padding"),
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
    loss = model(**batch(2, 8)).loss  # the next call works
    return first, float(loss.detach())


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("cp", [1, 2])
def test_an_error_on_one_rank_is_raised_on_all(ranks, cp, fault):
    (first, loss), (second, other_loss) = ranks.run(2, one_fault, cp, fault, 1)
    assert first == second and first.startswith("ValueError: ")
    assert_refused(first, *FAULTS[fault][1], fix=FAULTS[fault][2])
    assert loss == other_loss


def wrong_everywhere():
    model, _ = parallel(2)
    ids = random_ids(2, 8)
    return message_of(lambda: model(ids, input_ids=ids))


def test_an_error_on_every_rank_names_no_rank(ranks):
    for message in ranks.run(2, wrong_everywhere):
        assert_refused(message, "TypeError: ", "input_ids", fix="by name")
        assert "rank" not in message


def step_before_backward():
    """Step the optimizer before backward, with sharded parameters and layer inputs on the host;
    return the messages."""
    model, _ = parallel(2, layout=Layout(2, heads_per_stage=2, tile_tokens=3, input_tier="host"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    messages = []
    for early in (False, True, False):
        loss = model(**batch(2, 8)).loss
        if early:
            optimizer.step()
        messages.append(message_of(loss.backward))
        optimizer.step()
    return messages


def test_an_optimizer_step_before_backward_raises_on_all_ranks(ranks):
    for first, early, last in ranks.run(2, step_before_backward):
        assert first == last == "no error" and "layer 0" in early and "backward" in early


def hooked_on_one_rank():
    model, mesh = parallel(2)
    if mesh.rank == 1:
        model.lm_head.register_forward_hook(print)
    return message_of(lambda: model(**batch(1, 8)))


def test_a_refused_hook_on_one_rank_raises_on_all(ranks):
    for message in ranks.run(2, hooked_on_one_rank):
        assert_refused(
            message, "ConfigError: rank 1: ", "lm_head", "forward hook", fix="decoder layer"
        )


def raising_on_rank_1(error):
    def function(*args, **kwargs):
        if dist.get_rank() == 1:
            raise error

    return function


def unexpected_errors():
    """Raise errors on rank 1 alone: in a call, a model check, a kernel test and a nested check."""
    model, mesh = parallel(1)
    ids = random_ids(1, 8)
    ends = torch.tensor([0, 5, 2, 8] if mesh.rank == 1 else [0, 2, 5, 8])
    messages = [message_of(lambda: model(ids, labels=ids, cu_seq_lens_q=ends))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "_check_last_backward", raising_on_rank_1(KeyError("gone")))
        messages.append(message_of(lambda: model(ids, labels=ids)))
        patch.setattr(Decoder, "find_specs", raising_on_rank_1(ConfigError("the probe differs")))
        messages.append(message_of(lambda: parallel(1)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "_why_unusable", raising_on_rank_1(OSError("no driver")))
        kind = AttentionKind(head_dim=8, group=1)
        messages.append(
            message_of(lambda: choose.agree_on_kernel("cpu", mesh.device, torch.float32, [kind]))
        )

    def nested():
        raising_on_rank_1(MemoryError("no room"))()
        raise_on_all_ranks(int)  # rank 0 waits here

    with pytest.raises(RankFailed) as raised:
        raise_on_all_ranks(nested)
    assert isinstance(raised.value.__cause__, MemoryError) == (mesh.rank == 1)
    return [*messages, f"{exit_code_for(raised.value)} {raised.value}"]


def test_an_unexpected_error_on_one_rank_is_raised_on_all(ranks):
    first, second = ranks.run(2, unexpected_errors)
    assert first == second
    lengths, call, probe, kernel, memory = first
    assert_refused(lengths, "ValueError: rank 1: cu_seq_lens_q decreases by 3", fix="only increase")
    assert call.startswith("RankFailed: rank 1: Traceback") and call.endswith("KeyError: 'gone'")
    assert probe.startswith("SharedError: rank 1 on ") and probe.endswith(": the probe differs")
    assert kernel.startswith("RankFailed: rank 1 on ") and kernel.endswith("OSError: no driver")
    assert memory.startswith("3 rank 1 on ") and memory.endswith(": MemoryError: no room")


def test_a_single_process_raises_its_own_error():
    with pytest.raises(ZeroDivisionError):
        raise_on_all_ranks(lambda: 1 / 0)


def call_differently(what, cp=2):
    """Call the model with inputs that depend on the global rank, as with a DistributedSampler that
    ignores cp."""
    model, mesh = parallel(cp)
    inputs = batch(2, 8)
    if what == "values":
        inputs["input_ids"] = inputs["labels"] = (inputs["input_ids"] + mesh.rank) % 61
    elif what == "order":
        inputs["input_ids"] = inputs["input_ids"].flip(0) if mesh.rank % 2 else inputs["input_ids"]
    elif what == "shape":
        inputs = batch(2, 8 + 2 * mesh.rank)
    elif what == "temperature":
        inputs |= {"per_token": True, "temperature": 1 - 0.5 * (mesh.rank % 2)}
    elif what == "per_token":
        inputs |= {"per_token": mesh.rank == 0}
    elif mesh.rank % 2:
        del inputs["labels"]
    return message_of(lambda: model(**inputs))


def different_options():
    return [call_differently(what) for what in ("temperature", "per_token")]


def different_experts():
    model, mesh = parallel(2, tiny_config("mixtral"))
    chosen = torch.arange(2 * 8 * 2 * 2).view(2, 8, 2, 2) % 4
    return message_of(lambda: model(**batch(2, 8), expert_indices=(chosen + mesh.rank) % 4))


@pytest.mark.parametrize(
    "what, names, differences",
    [
        ("values", {"input_ids", "labels"}, f"input_ids: {SHAPE} on rank 0, {SHAPE} on rank 1"),
        ("order", {"input_ids"}, f"input_ids: {SHAPE} on rank 0, {SHAPE} on rank 1"),
        (
            "shape",
            {"input_ids", "labels", "attention_mask"},
            f"{SHAPE} on rank 0, {SHAPE.replace('8', '10')} on rank 1",
        ),
        ("labels", {"labels"}, f"labels: {SHAPE} on rank 0, .* on rank 1"),
    ],
)
def test_different_batches_in_a_cp_group_are_refused(ranks, what, names, differences):
    (message,) = set(ranks.run(2, call_differently, what))
    assert_refused(message, "ConfigError: ", "ranks 0 and 1", fix="same batch")
    assert re.search(differences, message) and set(re.findall(r"(\w+): shape", message)) == names


def test_options_that_differ_in_a_cp_group_are_refused(ranks):
    ((temperature, per_token),) = set(map(tuple, ranks.run(2, different_options)))
    assert_refused(
        temperature, "temperature: 1.0 on rank 0, 0.5 on rank 1", fix="on all ranks of a cp group"
    )
    assert_refused(
        per_token, "per_token: True on rank 0, False on rank 1", fix="on all ranks of a cp group"
    )
    (experts,) = set(ranks.run(2, different_experts))
    assert_refused(experts, "expert_indices: shape (2, 8, 2, 2)", fix="on all ranks of a cp group")


def test_the_fix_shards_data_by_the_data_parallel_rank(ranks):
    for message in ranks.run(4, call_differently, "values"):
        assert_refused(
            message, "ranks 0 and 1", fix="num_replicas=2, rank=torch.distributed.get_rank() // 2"
        )


def data_parallel():
    model, mesh = parallel(2)
    inputs = batch(2, 8 + 2 * mesh.dp_rank)
    return model(**inputs).num_tokens


def test_data_parallel_ranks_may_have_different_batches(ranks):
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
    "what, named, fix",
    [
        ("labels", "True on rank 0, False on rank 1", "labels on every rank or on none"),
        ("gradients", "True on rank 0, False on rank 1", "torch.no_grad()"),
        ("items", "num_items_in_batch: 7 on rank 0, 8 on rank 1", "num_items_in_batch"),
    ],
)
def test_data_parallel_ranks_must_agree_on_labels_gradients_and_divisor(ranks, what, named, fix):
    for message in ranks.run(2, different_modes, what):
        assert_refused(message, "ConfigError: ", "ranks 0 and 1", named, fix=fix)


def test_threads_as_ranks_agree_too():
    (message,) = set(run_on_threads(2, lambda: call_differently("shape")))
    assert_refused(message, "ranks 0 and 1", fix="same batch")
    assert run_on_threads(4, data_parallel) == [14 + 18] * 4


def test_a_loopback_process_agrees_with_itself():
    start_loopback(4)
    model, _ = parallel(2)
    assert model(**batch(2, 8)).num_tokens == 14 + 14
    assert message_of(lambda: model(input_ids=random_ids(2, 8) - 61)).startswith(
        "ValueError: input_ids[0, 0]="
    )


class Reads(TorchDispatchMode):
    """Counts device-to-host reads after the last layer's forward."""

    def __init__(self, model) -> None:
        super().__init__()
        self.in_loss = False
        self.num_reads = 0
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
    """A read would synchronize with the GPU."""
    assert ranks.run(2, reads_after_the_layers) == [0, 0]
