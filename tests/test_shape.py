"""Shapes read from config.json match the models that transformers builds from it."""

import json
import subprocess
import sys

import pytest

from ithaka.config import ConfigError, embedded_model
from ithaka.trace.shapes import read_shape, shape_from_config

SMALL = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
CASES = [
    {"model_type": "llama"},
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "num_key_value_heads": None,
        "head_dim": None,
    },
    {"model_type": "mistral", "sliding_window": None},
    {"model_type": "mistral", "sliding_window": 64, "head_dim": 12},
    {"model_type": "mistral"},
    {"model_type": "qwen2"},
    {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 32,
        "max_window_layers": 1,
    },
    {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": 32,
    },
    {"model_type": "qwen3"},
    {"model_type": "qwen3", "attention_bias": True, "head_dim": 24},
    {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
]


def windows_of(config):
    """Return each layer's window as transformers' attention modules read it."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values()))[:60])
def test_shape_agrees_with_transformers(case, tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    (tmp_path / "config.json").write_text(json.dumps(SMALL | case))
    shape = read_shape(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    attention = model.model.layers[0].self_attn
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.measured.parameters == sum(p.numel() for p in model.model.layers[0].parameters())
    assert (shape.num_layers, shape.hidden, shape.vocab) == (3, 48, 99)
    assert shape.heads * shape.head_dim == attention.q_proj.weight.shape[0]
    assert shape.kv_heads * shape.head_dim == attention.k_proj.weight.shape[0]
    assert shape.head_dim == attention.head_dim
    assert shape.tied == (model.lm_head.weight is model.model.embed_tokens.weight)
    assert shape.windows == windows_of(config)
    # The configuration that transformers saves describes the same model.
    config.save_pretrained(tmp_path / "again")
    assert read_shape(tmp_path / "again" / "config.json") == shape


@pytest.mark.parametrize(
    "case, window",
    [
        # its attention does not read that key
        ({"model_type": "llama", "sliding_window": 5}, None),
        ({"model_type": "mixtral", "sliding_window": 5}, 5),
        ({"model_type": "qwen3_moe", "sliding_window": 5, "use_sliding_window": True}, 5),
        ({"model_type": "qwen3_moe", "sliding_window": 5}, None),
    ],
)
def test_a_layer_has_the_window_of_its_attention(case, window):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ithaka.roots.find import find_root

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(SMALL | case)))
    root = find_root(model)
    root.find_specs(torch.device("cpu"))
    assert {mixer.window for mixer in root.mixers} == {window}


def test_llama3_8b_has_its_published_size():
    shape = shape_from_config(
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        }
    )
    assert shape.num_parameters == 8_030_261_248
    assert (shape.head_dim, set(shape.windows)) == (128, {None})


@pytest.mark.parametrize("name, low, high", [("small", 2e6, 6e6), ("base", 1e8, 2e8)])
def test_embedded_models_have_fewer_kv_heads_than_query_heads(name, low, high):
    shape = shape_from_config(embedded_model(name))
    assert low < shape.num_parameters < high
    assert 1 < shape.kv_heads < shape.heads


@pytest.mark.parametrize(
    "change, fragments",
    [
        ({"model_type": "gpt2"}, ["model_type=gpt2", "model.layers"]),
        ({"model_type": None}, ["model_type=None", "llama"]),
        ({"model_type": "lama"}, ["model_type=lama", "unknown to transformers", "llama"]),
        ({"hidden_size": None}, ["hidden_size", "None"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers=0", "positive"]),
        ({"vocab_size": "big"}, ["vocab_size=big", "positive"]),
        ({"head_dim": 15}, ["head_dim", "15", "even"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["(gptq)", "bfloat16"]),
        ({"num_key_value_heads": 4}, ["num_key_value_heads=4", "num_attention_heads=6"]),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]},
            ["layer_types", "(1)", "num_hidden_layers", "(3)"],
        ),
    ],
)
def test_a_bad_config_json_is_refused_by_key_and_value(change, fragments):
    with pytest.raises(ConfigError) as error:
        shape_from_config(SMALL | {"model_type": "llama"} | change, "some/model")
    for fragment in [*fragments, "some/model"]:
        assert fragment in str(error.value)


@pytest.mark.parametrize(
    "content, words", [(None, "cannot be read"), ("{", "valid JSON"), ("[]", "JSON object")]
)
def test_unreadable_config_json_is_refused(content, words, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=words) as error:
        read_shape(tmp_path)
    assert "model.path=" in str(error.value) and "config.json" in str(error.value)


def test_shape_and_config_need_no_torch():
    code = (
        "import sys, ithaka.facts.model_files, ithaka.config; print({'torch', 'transformers'} "
        "& set(sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "set()\n"
    )
