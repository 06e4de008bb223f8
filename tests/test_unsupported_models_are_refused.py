"""Models that ithaka would not compute are refused before anything changes."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
)

import ithaka
from general import assert_equal, compare
from ithaka.comm.mesh import make_mesh
from ithaka.config import ConfigError
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model
from ithaka.roots.find import find_root
from models import tiny_config, tiny_model
from refusals import assert_refused


def on_meta(config, kind=AutoModelForCausalLM):
    with torch.device("meta"):
        return kind.from_config(config)


def refusal(model) -> str:
    with pytest.raises(ConfigError) as caught:
        find_root(model).check_model()
    return str(caught.value)


def test_an_unknown_family_is_refused():
    model = on_meta(GPT2Config(n_layer=1, n_embd=8, n_head=2))
    assert_refused(refusal(model), "model_type=gpt2", "model.layers", fix="use a decoder")


def test_a_model_without_a_language_head_is_refused():
    config = tiny_config("llama", num_labels=2)
    model = on_meta(config, AutoModelForSequenceClassification)
    for other in (model, nn.Linear(2, 2), "a/path"):
        parallelize = partial(parallelize_model, other, mesh=make_mesh(1))
        assert_refused(parallelize, type(other).__name__, fix="AutoModelForCausalLM")


def test_attention_dropout_is_refused():
    message = refusal(on_meta(tiny_config("llama", attention_dropout=0.1)))
    assert_refused(message, "attention_dropout=0.1", fix="set it to 0")


@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn", "proportional", "dynamic"])
def test_rope_types_are_accepted(rope_type):
    rope = {
        "rope_type": rope_type,
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    }
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {}
    find_root(on_meta(tiny_config("llama", rope_parameters=rope))).check_model()


def test_rope_on_part_of_each_head_is_refused_if_transformers_cannot_compute_it():
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
    model = on_meta(tiny_config("llama", rope_parameters=rope))
    assert_refused(
        partial(parallelize_model, model, mesh=make_mesh(1)),
        "does not run",
        "size of tensor",
        fix="use a",
    )


class ScaledLinear(nn.Linear):
    """Stands in for wrappers and quantized linear maps."""

    def forward(self, x):
        return 1.5 * super().forward(x)


def test_wrapped_linear_maps_and_heads_with_a_bias_are_exact():
    model = tiny_model(tiny_config("qwen3", num_hidden_layers=1))
    attn = model.model.layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(attn, name).__class__ = ScaledLinear
    model.lm_head.__class__ = ScaledLinear
    model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, 61, dtype=torch.float64))
    assert_equal(compare(model, Layout(2, tile_tokens=7), wide=False))


def test_dropout_inside_the_mlp_is_refused():
    model = on_meta(tiny_config("mistral"))
    model.model.layers[0].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.1))
    assert_refused(refusal(model), "model.layers.0.mlp.act_fn.1", "p=0.1", fix="set it to 0")


# What the messages of `bad_layouts` name, the fix.
BAD_LAYOUTS = [
    ("cp=3", "2 ranks", "1 or 2"),
    ("cp=2", "1 query heads", "use "),
    ("heads_per_stage=3", "cp=2", "use 2"),
    ("heads_per_stage=1", "cp=2", "use 2"),
    ("cp=0", "1 or more"),
    ("cp=0", "1 or more"),
    ("cp=0", "1 or more"),
    ("ring=-1", "1 or more"),
]


def bad_layouts():
    """Try impossible layouts on two ranks, such as cp=3 or more ranks than heads, and return the
    messages."""
    model = on_meta(LlamaConfig(**tiny_config("llama", heads=1, kv_heads=1).to_diff_dict()))
    wide = on_meta(tiny_config("llama"))
    messages = []
    for call in (
        lambda: parallelize_model(wide, cp=3),
        lambda: parallelize_model(model, cp=2),
        lambda: parallelize_model(wide, layout=Layout(cp=2, heads_per_stage=3)),
        lambda: parallelize_model(wide, layout=Layout(cp=2, heads_per_stage=1)),
        lambda: make_mesh(0),
        lambda: ithaka.parallelize(wide, cp=0),
        lambda: ithaka.parallelize(wide, cp=0, context=64),
        lambda: ithaka.parallelize(wide, cp=2, ring=-1),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_impossible_layouts_are_refused(ranks):
    for messages in ranks.run(2, bad_layouts):
        for message, (*named, fix) in zip(messages, BAD_LAYOUTS, strict=True):
            assert_refused(message, *named, fix=fix)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frequencies_rounded_to_16_bits_are_refused(dtype):
    """`model.to(dtype)` rounds them too: at position 1000, the fastest angle would be off by more
    than a radian."""
    model = AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=dtype)
    find_root(model).check_model()
    message = refusal(model.to(torch.float32).to(dtype))
    assert_refused(message, "inv_freq", str(dtype), fix=f"dtype={dtype}")
