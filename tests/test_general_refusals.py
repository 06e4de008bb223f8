"""A decoder that the schedule would compute differently is refused by name; others are exact.

Planted layers are also run without the probe's comparison, to check that their results would be
wrong.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.olmo2.modeling_olmo2 import (
    Olmo2Attention,
    Olmo2DecoderLayer,
    Olmo2ForCausalLM,
    Olmo2Model,
)

from decoders import tiny_decoder
from general import assert_equal, compare, worst_error
from ithaka.config import ConfigError
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model
from ithaka.roots import probe
from ithaka.roots.find import find_root
from refusals import assert_refused

pytestmark = pytest.mark.usefixtures("quiet_transformers", "fresh_probes")

TILES = Layout(tile_tokens=7)
FAR = 512  # max_position_embeddings of the tiny decoders


@pytest.fixture(autouse=True)
def one_seed(request, monkeypatch):
    """Refuse a model after the first seed, which takes a third of the time, except in the test of
    several seeds."""
    if "one_seed_only" not in request.node.name:
        monkeypatch.setattr(probe, "SEEDS", probe.SEEDS[:1])


def plant(
    layer_type: type[nn.Module], layers: slice = slice(None), family: str = "olmo2", **changes
):
    """Return a tiny decoder with the class of some layers replaced."""
    model = tiny_decoder(family, **{"num_hidden_layers": 2, **changes})
    for layer in model.model.layers[layers]:
        layer.__class__ = layer_type
    return model


def plant_attention(attention_type: type[nn.Module], **changes):
    model = tiny_decoder("olmo2", **{"num_hidden_layers": 2, **changes})
    for layer in model.model.layers:
        layer.self_attn.__class__ = attention_type
    return model


def assert_refuses(model, *fragments: str) -> str:
    return assert_refused(
        lambda: parallelize_model(copy.deepcopy(model)),
        f"model_type={model.config.model_type} ",
        *fragments,
        fix="use a decoder",
    )


def error_without_comparison(model) -> float:
    """Return the worst error if the probe compared nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "compare_results", lambda *args: None)
        return worst_error(compare(model, TILES))[0]


def refuse_or_compare(model) -> None:
    try:
        errors = compare(model, TILES)
    except ConfigError as error:
        assert f"model_type={model.config.model_type} " in str(error)
        return
    assert_equal(errors)


# ---- layers that mix tokens outside of attention


def convolve(x):
    return x + 0.5 * F.pad(x, (0, 0, 1, 0))[:, :-1]


def add_running_mean(x):
    return x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]


def count_positions(x):
    return x * (1 + 0.1 * torch.arange(x.shape[1], dtype=x.dtype)[:, None])


def subtract_sequence_mean(x):
    return x - x.mean(1, keepdim=True)


def scale_by_length(x):
    return x * x.shape[1] ** 0.5


MIXERS = (convolve, add_running_mean, count_positions, subtract_sequence_mean, scale_by_length)


def before_attention(mix):
    class Before(Olmo2DecoderLayer):
        def forward(self, hidden_states, **kwargs):
            return super().forward(mix(hidden_states), **kwargs)

    return Before


def after_attention(mix):
    class After(Olmo2DecoderLayer):
        def forward(self, hidden_states, **kwargs):
            return mix(super().forward(hidden_states, **kwargs))

    return After


@pytest.mark.parametrize(
    "mix,where",
    [
        # Every other mixer in one place; the others with --slow.
        pytest.param(mix, where, marks=pytest.mark.slow if i % 2 or i // 2 % 2 != j else ())
        for i, mix in enumerate(MIXERS)
        for j, where in enumerate((before_attention, after_attention))
    ],
)
def test_token_mixing_outside_attention_is_refused(mix, where):
    model = plant(where(mix))
    assert_refuses(model, "layers.0 at position")
    assert error_without_comparison(model) > 1e-3


def test_a_single_layer_that_mixes_tokens_is_refused():
    model = plant(before_attention(convolve), slice(1, 2))
    assert_refuses(model, "layers.1 at position")


class MixesQueries(Olmo2Attention):
    """Convolves the input of q only, inside the attention module."""

    def forward(self, hidden_states, **kwargs):
        return super().forward(convolve(hidden_states), **kwargs)


def test_a_convolution_inside_the_attention_module_is_refused():
    model = plant_attention(MixesQueries)
    assert_refuses(model, "layers.0 at position")
    assert error_without_comparison(model) > 1e-3


class MixesGradients(Olmo2DecoderLayer):
    """Its output does not depend on other tokens, but its gradient does."""

    def forward(self, hidden_states, **kwargs):
        mean = hidden_states.mean(1, keepdim=True)
        return super().forward(hidden_states + (mean - mean.detach()), **kwargs)


def test_token_mixing_in_gradients_is_refused():
    model = plant(MixesGradients)
    assert_refuses(model, "gradient of the input of", "layers.0 at position")
    assert error_without_comparison(model) > 1e-3


class CountsFarPositions(Olmo2DecoderLayer):
    def forward(self, hidden_states, position_ids=None, **kwargs):
        far = (position_ids > FAR)[..., None]
        hidden_states = torch.where(far, count_positions(hidden_states), hidden_states)
        return super().forward(hidden_states, position_ids=position_ids, **kwargs)


def test_counting_beyond_a_length_of_the_configuration_is_refused():
    assert_refuses(plant(CountsFarPositions), "layers.0 at position")


class DrawsNumbers(Olmo2DecoderLayer):
    def forward(self, hidden_states, **kwargs):
        return super().forward(
            hidden_states * (1 + 0.1 * torch.randn_like(hidden_states)), **kwargs
        )


def test_random_numbers_are_refused():
    assert_refuses(plant(DrawsNumbers), "layers.0")


class ChangesItsInput(Olmo2DecoderLayer):
    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states.mul_(1.5), **kwargs)


def test_changing_the_input_in_place_is_refused():
    assert_refuses(plant(ChangesItsInput), "layers.0")


# ---- state that is not an argument


class SharesInputs(Olmo2DecoderLayer):
    """Stores a tensor outside the model for another layer to read."""

    shared: dict = {}

    def forward(self, hidden_states, **kwargs):
        if self.writes:
            self.shared["x"] = hidden_states
            return super().forward(hidden_states, **kwargs)
        return super().forward(hidden_states + 0.5 * self.shared["x"], **kwargs)


def test_a_tensor_shared_between_layers_is_refused():
    model = plant(SharesInputs)
    for index, layer in enumerate(model.model.layers):
        layer.writes = index == 0
    assert_refuses(model, "layers.1")


class SharesInputsByIndex(SharesInputs):
    @property
    def writes(self) -> bool:
        return self.self_attn.layer_idx == 0


def test_a_layer_that_behaves_differently_by_its_index_is_refused():
    assert_refuses(plant(SharesInputsByIndex), "layers.1")


class ScalesByIndex(Olmo2Attention):
    """GPT-2 has an option for this."""

    def forward(self, hidden_states, **kwargs):
        self.scaling = self.head_dim**-0.5 / (1 + self.layer_idx)
        return super().forward(hidden_states, **kwargs)


def test_a_scale_that_depends_on_the_layer_is_exact_or_refused():
    refuse_or_compare(plant_attention(ScalesByIndex))


class SharedKeys(nn.Linear):
    """The second layer attends to keys of the first one's input."""

    shared: dict = {}

    def forward(self, x):
        if self.writes:
            self.shared["x"] = x
        return F.linear(self.shared["x"], self.weight)


def test_keys_shared_between_layers_are_refused():
    model = tiny_decoder("olmo2", num_hidden_layers=2)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.k_proj.__class__ = SharedKeys
        layer.self_attn.k_proj.writes = index == 0
    assert_refuses(model, "layers.1")
    SharedKeys.shared.clear()


class SharesAStatistic(Olmo2DecoderLayer):
    """The second layer multiplies by the size of the first one's input."""

    shared: dict = {}

    def forward(self, hidden_states, **kwargs):
        if self.writes:
            self.shared["size"] = hidden_states.detach().abs().mean()
        else:
            hidden_states = hidden_states * self.shared["size"]
        return super().forward(hidden_states, **kwargs)


def test_a_number_shared_between_layers_is_refused():
    model = plant(SharesAStatistic)
    for index, layer in enumerate(model.model.layers):
        layer.writes = index == 0
    assert_refuses(model, "layers.")


def add_embeddings(h, embeddings):
    return h + embeddings


def subtract_mean(h, embeddings):
    return h - h.mean(1, keepdim=True)


def scale_the_input(h, embeddings):
    """Overwrites a tensor that the first layer saved for its backward."""
    embeddings.mul_(1.5)
    return h


def between_layers(change):
    class Between(Olmo2Model):
        def forward(self, input_ids, position_ids=None, **kwargs):
            h = embeddings = 1.0 * self.embed_tokens(input_ids)
            position_ids = torch.arange(h.shape[1])[None] if position_ids is None else position_ids
            kwargs = {
                "config": self.config,
                "inputs_embeds": h,
                "past_key_values": None,
                "attention_mask": None,
            }
            mask = create_causal_mask(**kwargs, position_ids=position_ids)
            angles = self.rotary_emb(h, position_ids=position_ids)
            for layer in self.layers:
                h = change(layer(h, attention_mask=mask, position_embeddings=angles), embeddings)
            return BaseModelOutputWithPast(last_hidden_state=self.norm(h))

    model = tiny_decoder("olmo2", num_hidden_layers=3)
    model.model.__class__ = Between
    return model


def test_a_tensor_added_to_the_output_of_each_layer_is_exact():
    """It shares one gradient tensor with the layer's output, which the layer must not overwrite."""
    assert_equal(compare(between_layers(add_embeddings), TILES))


def test_token_mixing_between_layers_is_refused():
    assert_refuses(between_layers(subtract_mean), "gives another output without its layers")


def test_changing_the_input_of_a_layer_after_it_is_refused():
    assert_refuses(between_layers(scale_the_input), "in a run of model.layers.0 and model.layers.1")


class PassesADictionary(Olmo2Model):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs, memory={})


class WritesADictionary(Olmo2DecoderLayer):
    """Adds the input of the layer before, if there is one."""

    def forward(self, hidden_states, memory=None, **kwargs):
        before = memory.get("x")
        memory["x"] = hidden_states
        return super().forward(
            hidden_states if before is None else hidden_states + 0.5 * before, **kwargs
        )


def test_a_dictionary_that_layers_write_to_is_refused():
    model = plant(WritesADictionary)
    model.model.__class__ = PassesADictionary
    assert_refuses(model, "memory", "layers.0")


def test_a_family_that_shares_keys_through_a_dictionary_is_refused():
    changes = {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    sizes = {
        "num_hidden_layers": 4,
        "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 8,
    }
    assert_refuses(tiny_decoder("gemma4_text", **changes, **sizes), "gemma4_text")


class CountsTokens(Olmo2DecoderLayer):
    """Routers that balance their experts without a loss count tokens like this."""

    def forward(self, hidden_states, **kwargs):
        self.num_tokens += hidden_states.shape[1]
        return super().forward(hidden_states, **kwargs)


def test_a_buffer_is_updated_once_or_refused():
    model = plant(CountsTokens)
    for layer in model.model.layers:
        layer.register_buffer("num_tokens", torch.zeros(()))
    try:
        model = parallelize_model(model, layout=TILES)
    except ConfigError as error:
        assert "num_tokens" in str(error) and "layers.0" in str(error)
        return
    ids = torch.arange(24)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert [int(layer.num_tokens) for layer in model.model.layers] == [24, 24]


# ---- attention calls


class AttendsTwice(Olmo2DecoderLayer):
    def forward(self, hidden_states, **kwargs):
        hidden_states = hidden_states + self.self_attn(hidden_states=hidden_states, **kwargs)[0]
        return super().forward(hidden_states, **kwargs)


def test_two_attention_calls_are_refused():
    assert_refuses(plant(AttendsTwice), "makes 2 attention calls in", "layers.0")


class MixesWithoutACall(Olmo2DecoderLayer):
    def forward(self, hidden_states, **kwargs):
        return hidden_states + self.mlp(hidden_states.cumsum(1))


def test_a_layer_that_mixes_tokens_without_an_attention_call_is_refused():
    assert_refuses(plant(MixesWithoutACall, slice(1, 2)), "layers.1 that makes no attention call")


class PassesAnOption(Olmo2Attention):
    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states, **kwargs, temperature=2.0)


def test_an_unknown_option_of_the_attention_call_is_refused():
    assert_refuses(plant_attention(PassesAnOption), "temperature=2.0", "layers.0")


class PassesATensor(Olmo2Attention):
    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states, **kwargs, position_bias=torch.zeros(8, 1, 1))


def test_an_unknown_tensor_option_of_the_attention_call_is_refused():
    assert_refuses(plant_attention(PassesATensor), "position_bias=a tensor", "layers.0")


class DropsOut(Olmo2Attention):
    def forward(self, hidden_states, **kwargs):
        self.attention_dropout = 0.1
        return super().forward(hidden_states, **kwargs)


def test_dropout_in_the_attention_call_is_refused():
    assert_refuses(plant_attention(DropsOut), "dropout=0.1", "layers.0")


class ReadsTheAttentionWeights(Olmo2Attention):
    """Eager attention returns its weights; ours has none."""

    def forward(self, hidden_states, **kwargs):
        out, weights = super().forward(hidden_states, **kwargs)
        return out * weights.amax(), weights


def test_a_layer_that_reads_the_attention_weights_is_refused():
    assert_refuses(plant_attention(ReadsTheAttentionWeights), "layers.0")


@pytest.mark.parametrize(
    "family, changes, reason",
    [
        ("mamba", {}, "no list of decoder layers"),
        ("bloom", {"n_head": 8}, "model.layers"),
        ("mpt", {"n_heads": 8, "d_model": 32, "n_layers": 2}, "model.layers"),
    ],
)
def test_recurrences_and_alibi_are_refused(family, changes, reason):
    assert_refuses(tiny_decoder(family, **{"num_hidden_layers": 2, **changes}), reason)


def test_modules_after_the_head_are_refused():
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    assert_refuses(
        tiny_decoder("modernbert-decoder", num_hidden_layers=2, head_dim=4, **tokens),
        "from more than lm_head",
    )


class ScalesLogits(Olmo2ForCausalLM):
    def forward(self, **kwargs):
        out = super().forward(**kwargs)
        out.logits = out.logits * self.scale
        return out


class MasksLogits(Olmo2ForCausalLM):
    def forward(self, **kwargs):
        out = super().forward(**kwargs)
        out.logits = out.logits * (kwargs["input_ids"] != 0)[..., None]
        return out


def test_logits_that_depend_on_token_ids_are_refused():
    model = plant(Olmo2DecoderLayer)
    model.__class__ = MasksLogits
    assert_refuses(model, "from more than lm_head")


def test_trained_parameters_after_the_head_are_refused():
    model = plant(Olmo2DecoderLayer)
    model.__class__ = ScalesLogits
    model.scale = nn.Parameter(torch.ones(1))
    assert_refuses(model, "trained parameters after its layers")


# ---- masks


class AddsABias(Olmo2Attention):
    """Adds a bias by distance to the mask, like ALiBi."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        index = torch.arange(hidden_states.shape[1])
        bias = torch.where(index <= index[:, None], 0.1 * (index - index[:, None]), float("-inf"))
        return super().forward(
            hidden_states, attention_mask=bias[None, None].to(hidden_states), **kwargs
        )


def test_a_mask_with_a_bias_is_refused():
    assert_refuses(plant_attention(AddsABias), "layers.0", "mask")


class DropsTheMask(Olmo2Attention):
    """Attends to all tokens, whatever its mask."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return super().forward(hidden_states, attention_mask=None, **kwargs)


def test_a_layer_without_a_mask_is_refused():
    assert_refuses(plant_attention(DropsTheMask), "layers.0", "mask")


def test_a_bidirectional_mask_is_refused():
    assert_refuses(tiny_decoder("olmo2", is_causal=False), "layers.0", "neither causal nor")


def test_a_window_only_in_the_mask_is_exact():
    """Neither qwen2_moe nor these layers of OLMo 3 pass a window to attention."""
    changes = {"use_sliding_window": True, "max_window_layers": 1}
    assert_equal(compare(tiny_decoder("qwen2_moe", num_hidden_layers=2, **changes), TILES))
    model = tiny_decoder(
        "olmo3", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )
    model.model.layers[0].self_attn.sliding_window = None
    assert_equal(compare(model, TILES))


def test_a_window_only_in_the_call_is_refused():
    """Some attention functions of transformers ignore it, others do not."""
    model = tiny_decoder(
        "olmo3", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )
    model.model.layers[1].self_attn.sliding_window = 3
    assert_refuses(model, "layers.1", "mask")


def test_windows_that_differ_between_mask_and_call_are_refused():
    model = tiny_decoder(
        "olmo3", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )
    model.model.layers[0].self_attn.sliding_window = 4
    assert_refuses(model, "layers.0", "mask")


@pytest.mark.parametrize("family", ["doge", "phimoe", "llama4_text"])
def test_masks_that_a_call_does_not_show_are_exact_or_refused(family):
    """Windows and chunks of 5 tokens are only in the mask."""
    changes = {
        "doge": {},
        "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
        "llama4_text": {
            "attention_chunk_size": 5,
            "intermediate_size_mlp": 40,
            "no_rope_layers": [1, 0],
        },
    }[family]
    refuse_or_compare(tiny_decoder(family, num_hidden_layers=2, **changes))


@pytest.mark.parametrize(
    "family, changes",
    [
        ("smollm3", {"attention_bias": True, "no_rope_layers": [0, 0]}),
        ("mistral", {"sliding_window": 1}),
    ],
)
def test_gradients_that_are_zero_but_for_rounding_are_accepted(family, changes):
    """Those of a bias of keys without RoPE, and of queries and keys in a window of one token."""
    assert_equal(compare(tiny_decoder(family, num_hidden_layers=2, **changes), TILES))


def test_a_small_value_that_differs_is_refused():
    """Small gradients are compared with a part of the largest one, outputs with themselves."""
    model = tiny_decoder("olmo2", num_hidden_layers=1)
    ones = torch.ones(3)
    theirs = {"output": 1e-5 * ones, "gradient of a": ones, "gradient of b": 1e-4 * ones}
    probe.compare_results(
        model, theirs | {"gradient of b": theirs["gradient of b"] + 5e-6}, theirs, "here"
    )
    for name in ("output", "gradient of b"):
        with pytest.raises(ConfigError, match=f"gives another {name} here"):
            probe.compare_results(model, theirs | {name: 0.8 * theirs[name]}, theirs, "here")


@pytest.mark.parametrize("where", ["of model.layers.0 at position 0", "in a run of"])
def test_a_difference_with_one_seed_only_is_chance(where, monkeypatch):
    """Rounding may change a token's experts. With other weights, the model is accepted, with all
    its blocks."""
    compare_results = probe.compare_results
    mismatches = []

    def differ(model, ours, theirs, place):
        if place.startswith(where) and len(mismatches) < most:
            mismatches.append(place)
            raise probe.Mismatch("differs")
        compare_results(model, ours, theirs, place)

    monkeypatch.setattr(probe, "compare_results", differ)
    model = tiny_decoder("olmo2", num_hidden_layers=2)
    most = 1
    decoder = find_root(model)
    decoder.find_specs(torch.device("cpu"))
    assert len(mismatches) == 1 and all(spec.blocks for spec in decoder.specs)
    if where == "in a run of":
        mismatches.clear()
        most = len(probe.SEEDS)
        with pytest.raises(ConfigError, match="differs"):
            find_root(model).find_specs(torch.device("cpu"))
