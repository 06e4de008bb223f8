"""Read the shape of a model from its `config.json`, without torch or transformers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from ithaka.config import ConfigError, input_error
from ithaka.hub import HUB_ID
from ithaka.plan.shape import AttentionKind, DeltaShape, Encoder, MeasuredLayer, ModelShape

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
GIVE_MODEL = "give a model directory or a config.json"
CORRECT = "correct the model's config.json"


@dataclass(frozen=True)
class Family:
    """Properties of a model_type that its `config.json` may omit. Defaults match transformers."""

    qkv_bias: str | bool = False  # a key of config.json, or a constant
    out_bias: str | bool = False
    mlp_bias: str | bool = False
    qk_norm: bool = False  # RMS norms of size K on queries and keys
    # all: sliding_window, if set, applies to every layer. switched: use_sliding_window enables it, layer by layer.
    window: Literal["none", "all", "switched"] = "none"
    kv_heads: int | None = None
    head_dim: int | None = None
    positions: int = 32768
    experts: bool = False  # a mixture of experts, which has no formula


DEFAULT_WINDOW = 4096  # for every family that has windows
# To add a family: one entry here, one case in tests/test_shape.py and one in tests/models.py. roots/fast.py maps
# its modules to the layer's parts.
FAMILIES: dict[str, Family] = {
    "llama": Family("attention_bias", "attention_bias", "mlp_bias", positions=2048),
    "mistral": Family(window="all", kv_heads=8, positions=131072),
    "qwen2": Family(True, window="switched", kv_heads=32),
    "qwen3": Family("attention_bias", "attention_bias", qk_norm=True, window="switched", kv_heads=32, head_dim=128),
    "qwen3_moe": Family(qk_norm=True, window="switched", experts=True),
    "mixtral": Family(window="all", experts=True),
}
# Video transformers -> frames and pixels per latent of their autoencoders.
VIDEO_SCALES = {"WanTransformer3DModel": (4, 8), "LTXVideoTransformer3DModel": (8, 32)}
# Vision-language models: an encoder whose frames are independent, and a language model with 3-D positions.
VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
PLANNED_FAMILIES = [name for name, family in FAMILIES.items() if not family.experts]


def read_shape(path: Path) -> ModelShape:
    """Return the shape of the model in a Hugging Face directory or a `config.json` file."""
    file = path / "config.json" if path.is_dir() else path
    hub = f"ORG/{path.name}" if path.parts[:1] == ("models",) else path  # directory names of the documentation
    fetch = f"fetch it with `hf download {hub} --local-dir {path}`, or " if re.fullmatch(HUB_ID, str(path)) else ""
    return shape_from_config(read_json(file, fix=fetch + GIVE_MODEL), str(path))


def read_json(file: Path, name: str = "model.path=", fix: str = GIVE_MODEL) -> dict[str, Any]:
    """Read the object in a JSON file. Raises ConfigError, which names the setting `name`, if there is none."""
    try:
        if isinstance(values := json.loads(file.read_text(encoding="utf-8")), dict):
            return values
        reason = "no JSON object"
    except OSError as error:
        reason = error.strerror or str(error)
        folder = file.parent
        is_model = file.name == "config.json" and fix == GIVE_MODEL
        if is_model and (folder / "config.yaml").is_file():
            fix = f"{folder} is a run: use what `ithaka export RUN_DIR OUT_DIR` writes (an adapter: with --merge)"
        elif is_model and (folder / "adapter_config.json").is_file():
            fix = f"{folder} is an adapter: use its base model, and adapter.path={folder} to train on"
        raise input_error(f"{name}{file} cannot be read ({reason}); {fix}", error) from None
    except ValueError:
        reason = "not valid JSON"
    raise ConfigError(f"{name}{file} cannot be read ({reason}); {fix}")


def quant_method(config: Mapping[str, Any]) -> str | None:
    """Return how the weights of a config.json are quantized; None if they are not."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    return method if method is None else str(getattr(method, "value", method))


def check_quantization(quantization: Any, source: str) -> None:
    """Reject quantized weights, except bitsandbytes' 4 bits, and MXFP4 (gpt-oss), which is dequantized on load."""
    settings = quantization if isinstance(quantization, Mapping) else {"quant_method": quantization}
    method = settings.get("quant_method")
    if method != "mxfp4" and not (method == "bitsandbytes" and settings.get("load_in_4bit")):
        fix = "use weights in bfloat16 or float32, in MXFP4 or in bitsandbytes' 4 bits"
        raise ConfigError(f"model.path={source} is quantized ({method}); {fix}")


def shape_from_config(values: Mapping[str, Any], source: str = "the model") -> ModelShape:
    """Return the shape that a `config.json` describes. `source`: its name in errors."""
    name = values.get("model_type") or values.get("_class_name")
    if quantization := values.get("quantization_config"):
        check_quantization(quantization, source)
        values = {key: value for key, value in values.items() if key != "quantization_config"}
    if name not in PLANNED_FAMILIES:
        return _measure(json.dumps(dict(values), sort_keys=True), source)
    family = FAMILIES[name]
    hidden, num_layers, heads, mlp, vocab = (_count(values, key, source) for key in SIZES)
    kv_heads = _count(values, "num_key_value_heads", source, family.kv_heads or heads, null=heads)
    if heads % kv_heads:
        rule = f"does not divide num_attention_heads={heads}"
        raise ConfigError(f"num_key_value_heads={kv_heads} of {source} {rule}; {CORRECT}")
    head_dim = _count(values, "head_dim", source, family.head_dim or hidden // heads, null=hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"head_dim={head_dim} of {source} is odd, but RoPE rotates pairs; {CORRECT}")
    windows, tied = _read_windows(values, family, num_layers, source), bool(values.get("tie_word_embeddings", False))
    rules = (family.qkv_bias, family.out_bias, family.mlp_bias)
    qkv_bias, out_bias, mlp_bias = (bool(values.get(rule) if isinstance(rule, str) else rule) for rule in rules)
    sizes = (num_layers, hidden, heads, kv_heads, head_dim, mlp, vocab)
    return ModelShape(name, *sizes, tied, windows, qkv_bias, out_bias, mlp_bias, family.qk_norm)


@lru_cache
def _measure(values: str, source: str) -> ModelShape:
    """Return the shape of a model without a formula: the stored one of a built-in model, or else measured. Measuring
    imports torch and modules above the planner, so its module is imported lazily."""
    for model in built_in_decoders().values():
        if model["config"] == json.loads(values):
            kinds = tuple(AttentionKind(**kind) for kind in model["shape"]["kinds"])
            shape = model["shape"] | {"windows": tuple(model["shape"]["windows"]), "kinds": kinds}
            tuples = {key: tuple(map(tuple, shape["measured"][key])) for key in ("linears", "stacked")}
            encoder = Encoder(**shape["encoder"]) if shape.get("encoder") else None
            delta = DeltaShape(**shape["delta"]) if shape.get("delta") else None
            measured = MeasuredLayer(**shape["measured"] | tuples)
            return ModelShape(**shape | {"measured": measured, "encoder": encoder, "delta": delta})
    return import_module("ithaka.model.shape").measure_model(json.loads(values), source)


@lru_cache
def built_in_decoders() -> dict[str, Any]:
    """Built-in models of families without a formula: hub id, config.json, and the measured shape of each. Written by
    benchmarks/measure_decoders.py."""
    return json.loads(Path(__file__).with_name("decoders.json").read_text(encoding="utf-8"))


def count_patches(values: Mapping[str, Any], video: str) -> int:
    """Count the tokens of a `video`, frames x height x width in pixels. `values`: a video transformer's config.json."""
    kind, patch = values.get("_class_name"), values.get("patch_size", 1)
    sizes = [int(size) for size in video.split("x") if size.isdecimal()]
    if kind not in VIDEO_SCALES:
        raise ConfigError(f"--video {video} applies to {' and '.join(VIDEO_SCALES)} only; use --context for this model")
    if len(sizes) != 3 or len(sizes) != video.count("x") + 1 or not all(sizes):
        raise ConfigError(f"--video {video}: use frames x height x width in pixels, as in 81x720x1280")
    frames_scale, scale = VIDEO_SCALES[kind]
    scale *= 2 if values.get("in_channels") == 48 else 1  # the autoencoder of Wan 2.2 5B
    patch = patch if isinstance(patch, list | tuple) else (values.get("patch_size_t", 1), patch, patch)
    latents = ((sizes[0] - 1) // frames_scale + 1, sizes[1] // scale, sizes[2] // scale)
    return math.prod(max(1, size // p) for size, p in zip(latents, patch, strict=True))


def unscaled_positions(positions: int, rope: Mapping[str, Any]) -> int:
    """Return the positions before any scaling. `rope`: for all layers, or by type of layer."""
    rope = rope.get("full_attention", rope)
    return rope.get("original_max_position_embeddings") or int(positions / (rope.get("factor") or 1))


def yarn_factor(positions: int, rope: Mapping[str, Any], context: int) -> int:
    """Return YaRN's factor for `context` tokens, relative to the positions before any scaling."""
    return math.ceil(context / unscaled_positions(positions, rope))


def _count(
    values: Mapping[str, Any], key: str, source: str, default: int | None = None, null: int | None = None
) -> int:
    """Read a positive integer. `default`: if the key is absent. `null`: if its value is null."""
    value = values.get(key, default)
    if value is None and key in values:
        value = null
    if value is None:
        raise ConfigError(f"{key} of {source} is missing; add it to the model's config.json")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key}={value} of {source} is not a positive integer; {CORRECT}")
    return value


def _read_windows(values: Mapping[str, Any], family: Family, num_layers: int, source: str) -> tuple[int | None, ...]:
    """Return each layer's window, by transformers' rules."""
    window = values.get("sliding_window", DEFAULT_WINDOW)
    is_off = family.window == "switched" and not values.get("use_sliding_window", False)
    if family.window == "none" or window is None or is_off:
        return (None,) * num_layers
    if family.window == "all":
        return (_count({"sliding_window": window}, "sliding_window", source),) * num_layers
    first = values.get("max_window_layers", 28)
    kinds = values.get("layer_types") or ["sliding_attention" if i >= first else "" for i in range(num_layers)]
    if len(kinds) != num_layers:
        counts = f"{len(kinds)} entries for num_hidden_layers={num_layers}"
        raise ConfigError(f"layer_types of {source} has {counts}; {CORRECT}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
