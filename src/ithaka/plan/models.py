"""Built-in model names: shapes only, as the config.json of their public checkpoints gives them."""

from pathlib import Path
from typing import Any

from ithaka.config import ConfigError
from ithaka.plan.shape import ModelShape, read_shape, shape_from_config


def _model(family: str, layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int, **more: Any):
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        **more,
    }


MODELS: dict[str, dict[str, Any]] = {
    "llama3-8b": _model("llama", 32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": _model("llama", 80, 8192, 64, 8, 28672, 128256),
    "llama3.2-1b": _model("llama", 16, 2048, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True),
    "llama3.2-3b": _model("llama", 28, 3072, 24, 8, 8192, 128256, head_dim=128, tie_word_embeddings=True),
    "mistral-7b": _model("mistral", 32, 4096, 32, 8, 14336, 32768, sliding_window=None),
    "qwen2.5-7b": _model("qwen2", 28, 3584, 28, 4, 18944, 152064),
    "qwen3-4b": _model("qwen3", 36, 2560, 32, 8, 9728, 151936, head_dim=128, tie_word_embeddings=True),
    "qwen3-8b": _model("qwen3", 36, 4096, 32, 8, 12288, 151936, head_dim=128),
    "qwen3-32b": _model("qwen3", 64, 5120, 64, 8, 25600, 151936, head_dim=128),
}


def model_config(name: str) -> dict[str, Any]:
    """The config.json of a built-in model, as a dict."""
    if name not in MODELS:
        raise ConfigError(f"model={name} is neither a path nor a built-in name; use one of {', '.join(MODELS)}")
    return dict(MODELS[name])


def find_shape(model: str) -> ModelShape:
    """The shape of a built-in model, a Hugging Face directory or a config.json."""
    if model not in MODELS and Path(model).exists():
        return read_shape(Path(model))
    return shape_from_config(model_config(model), model)
