"""adapter.dropout: gradients match PEFT's under the same mask, a function of seed, step, module,
token and column."""

import hashlib
import json
import warnings

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from decoders import tiny_decoder
from faults import moved
from general import add_lora, assert_equal, compare, mean_loss
from ithaka.blocks.dropout import DropoutState, TokenDropout
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model
from models import tiny_config, tiny_model
from parity import random_ids
from refusals import assert_refused
from runs import bitwise_metrics, copy_run_at_step, run, tiny_run

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
P = 0.3


def hash_word(*values) -> np.uint32:
    return np.uint32(
        int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=4).digest(), "big")
    )


def mix(x):
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def keep_mask(name, rows, tokens, width, seed=0, step=0) -> torch.Tensor:
    """Return the mask [rows, tokens, width], computed in unsigned arithmetic."""
    low, high = np.meshgrid(
        np.arange(tokens, dtype=np.uint32), np.arange(rows, dtype=np.uint32) * np.uint32(16)
    )
    keys = mix(mix(mix(low + hash_word(seed, step)) + high) + hash_word(name))
    columns = mix(np.arange(width, dtype=np.uint32) + hash_word("column"))
    bits = mix(keys[..., None] + columns) & np.uint32(0x7FFFFFFF)
    return torch.from_numpy(bits >= int(P * 2**31))


class InjectedDropout(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        return x * keep_mask(self.name, *x.shape) / (1 - P)


def injected_loss(ids):
    """Return the loss of PEFT's own forward with our masks injected."""

    def loss(plain):
        for name, module in plain.get_base_model().named_modules():
            if hasattr(module, "lora_dropout"):
                assert isinstance(module.lora_dropout["default"], nn.Dropout)
                module.lora_dropout["default"] = InjectedDropout(name)
        return mean_loss(plain, ids, ids)

    return loss


CASES = {  # family (None: qwen3), rows, data-parallel ranks, layout
    "one rank": (None, 1, 1, Layout()),
    "rows and tiles": (None, 2, 1, Layout(tile_tokens=7, heads_per_stage=2)),
    "two ranks, kept": (
        None,
        1,
        1,
        Layout(2, tile_tokens=5, heads_per_stage=4, keep_everything=2),
    ),
    "uneven heads": (None, 1, 1, Layout(4, tile_tokens=3, overlap=False)),
    "ring": (None, 1, 1, Layout(4, ring=2, tile_tokens=5)),
    "data parallel": (None, 2, 2, Layout(2)),
    "sliding windows": ("gemma3_text", 1, 1, Layout(tile_tokens=7)),
    "sliding windows, two ranks": ("gemma3_text", 2, 1, Layout(2, tile_tokens=5, overlap=False)),
    "sliding windows, four ranks": (
        "olmo3",
        1,
        1,
        Layout(4, tile_tokens=4, keep_everything=99),  # of all layers
    ),
}


SLOW = {
    "one rank",
    "ring",
    "uneven heads",
    "sliding windows",
    "sliding windows, two ranks",
    "sliding windows, four ranks",
    "rows and tiles",
}  # the other cases cover most of these


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES]
)
def test_gradients_equal_those_of_peft_under_the_same_mask(case):
    family, rows, dp, layout = CASES[case]
    heads = 6 if case == "uneven heads" else 8
    plain = (
        tiny_model(tiny_config("qwen3", heads=heads)) if family is None else tiny_decoder(family)
    )
    plain = add_lora(plain, target_modules=LINEARS, lora_dropout=P).train()
    ids = random_ids(rows * dp, 24)
    if dp > 1:  # sequences alternate between the data-parallel ranks; `compare` gives each a block
        ids = ids.view(rows, dp, -1).transpose(0, 1).reshape(rows * dp, -1)
        order = torch.arange(rows * dp).view(dp, rows).t().flatten()
        errors = compare(
            plain, layout, lambda model: injected_loss(ids[order])(model), dp=dp, input_ids=ids
        )
    else:
        errors = compare(plain, layout, injected_loss(ids), input_ids=ids)
    assert_equal(errors)


RECURRENT = {  # projections before a convolution: a capture pass starts with earlier tokens
    "qwen3_5_text": (["in_proj_qkv", "in_proj_z", "in_proj_b", "q_proj"], Layout(2, tile_tokens=5)),
    "lfm2": (["in_proj", "q_proj"], Layout(4, tile_tokens=2, overlap=False)),
    "granitemoehybrid": (["in_proj", "out_proj"], Layout(tile_tokens=7)),
    "falcon_h1": (["in_proj", "q_proj"], Layout(2, tile_tokens=5)),
}


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.slow] * (f not in ("lfm2",))) for f in RECURRENT]
)
def test_dropout_before_a_recurrence_equals_that_of_peft(family):
    targets, layout = RECURRENT[family]
    plain = add_lora(tiny_decoder(family), target_modules=targets, lora_dropout=P).train()
    ids = random_ids(1, 24)
    assert_equal(compare(plain, layout, injected_loss(ids), input_ids=ids))


def test_the_mask_changes_with_every_argument_and_drops_the_right_share():
    def mask(seed=0, step=1, name="q", sequence=0):
        state = DropoutState()
        state.start_step(seed, step)
        state.keys_t = state.start_call((sequence << 36) + torch.arange(400))
        return TokenDropout(P, name, state)(torch.ones(400, 256)) > 0

    masks = [mask(), mask(seed=1), mask(step=2), mask(name="k"), mask(sequence=1)]
    for i, one in enumerate(masks):
        assert abs(one.double().mean() - (1 - P)) < 0.005
        assert (one.double().mean(0) - (1 - P)).abs().max() < 0.12 and (
            one.double().mean(1) - (1 - P)
        ).abs().max() < 0.15
        for other in masks[:i]:
            assert abs((one & other).double().mean() - (1 - P) ** 2) < 0.01
    shifted = masks[0].roll(1, 0), masks[0].roll(1, 1)
    assert all(abs((masks[0] & other).double().mean() - (1 - P) ** 2) < 0.01 for other in shifted)


def test_evaluation_drops_nothing_and_unsupported_modules_are_refused():
    ids = random_ids(1, 19)
    plain = add_lora(
        tiny_model(tiny_config("llama")), target_modules=LINEARS, lora_dropout=P
    ).eval()
    with torch.no_grad():
        expected = plain(input_ids=ids).logits
        model = parallelize_model(plain.train(), layout=Layout(tile_tokens=7))
        dropped = model(input_ids=ids).logits
        assert (dropped - expected).abs().max() > 1e-3
        model.eval()
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-10, atol=1e-10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        head = get_peft_model(
            tiny_model(tiny_config("llama", tie_word_embeddings=False)),
            LoraConfig(target_modules=["lm_head"], lora_dropout=P),
        )
    assert_refused(
        lambda: parallelize_model(head), "lora_dropout=0.3", "lm_head", fix="lora_dropout=0"
    )
    compiled = add_lora(tiny_model(tiny_config("llama")), target_modules=LINEARS, lora_dropout=P)
    parallelize = lambda: parallelize_model(compiled, layout=Layout(compile=True))  # noqa: E731
    assert_refused(parallelize, "adapter.dropout", "train.compile=true", fix="set one of them")


def test_a_run_resumes_bitwise_with_the_masks_of_its_steps(tmp_path):
    adapter = {"rank": 4, "dropout": P}
    config = tiny_run(tmp_path, adapter=adapter, train={"accumulate": 2, "validate_every": 0})
    plain = tiny_run(
        tmp_path / "plain", adapter={"rank": 4}, train={"accumulate": 2, "validate_every": 0}
    )
    for each in (config, plain):
        run(each)
    uninterrupted = bitwise_metrics(config.train.run_dir)
    again = moved(config, copy_run_at_step(config.train.run_dir, tmp_path / "again", 2))
    run(again, again.train.run_dir)
    assert bitwise_metrics(again.train.run_dir) == uninterrupted
    assert [step[1] for step in uninterrupted][1:] != [
        step[1] for step in bitwise_metrics(plain.train.run_dir)
    ][1:]
    assert (
        json.loads((config.train.run_dir / "model" / "adapter_config.json").read_text())[
            "lora_dropout"
        ]
        == P
    )
