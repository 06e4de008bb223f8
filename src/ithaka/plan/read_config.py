"""Read a model's `config.json`, and what plans know about its kind. No torch."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ithaka.config import ConfigError, input_error

GIVE_MODEL = "give a model directory or a config.json"
CORRECT = "correct the model's config.json"


POSITIONS = 32768  # of a config.json without max_position_embeddings
# Vision-language models: an encoder whose frames are independent, and a language model with 3-D
# positions.
VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
WITHOUT_ROPE = ("nemotron_h",)  # so max_position_embeddings is no limit
# JSON has no such numbers: transformers writes {"__float__": "Infinity"}, and older files have a
# bare Infinity.
FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def parse_json(text: str | bytes) -> Any:
    """Parse JSON as transformers does."""
    return json.loads(text, object_hook=_decode_float)


def _decode_float(values: dict[str, Any]) -> float | dict[str, Any]:
    tag = values.get("__float__", "")
    is_float = len(values) == 1 and isinstance(tag, str)
    return FLOATS.get(tag, values) if is_float else values


def read_json(file: Path, name: str = "model.path=", fix: str = GIVE_MODEL) -> dict[str, Any]:
    """Read the object in a JSON file. `name`: the setting, for errors."""
    try:
        if isinstance(values := parse_json(file.read_text(encoding="utf-8")), dict):
            return values
        reason = "no JSON object"
    except OSError as error:
        reason = error.strerror or str(error)
        folder = file.parent
        is_model = file.name == "config.json" and fix == GIVE_MODEL
        if is_model and (folder / "config.yaml").is_file():
            written = "what `ithaka export RUN_DIR OUT_DIR` writes (an adapter: with --merge)"
            fix = f"{folder} is a run: use {written}"
        elif is_model and (folder / "adapter_config.json").is_file():
            use = f"use its base model, and adapter.path={folder} to train on"
            fix = f"{folder} is an adapter: {use}"
        raise input_error(f"{name}{file} cannot be read ({reason}); {fix}", error) from None
    except ValueError:
        reason = "not valid JSON"
    raise ConfigError(f"{name}{file} cannot be read ({reason}); {fix}")


def check_values(values: Mapping[str, Any], source: str) -> None:
    """Refuse values of a config.json that no model can have."""
    for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
        value = values.get(key, 1)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{key}={value} of {source} is not a positive integer; {CORRECT}")
    heads = values.get("num_attention_heads")
    kv_heads = values.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and (kv_heads < 1 or heads % kv_heads):
        rule = f"does not divide num_attention_heads={heads}"
        raise ConfigError(f"num_key_value_heads={kv_heads} of {source} {rule}; {CORRECT}")
    for key, value in values.items():
        is_eps = key.endswith(("norm_eps", "norm_epsilon")) and type(value) in (int, float)
        if is_eps and not value >= 0:
            fix = "use the model's own value, for example 1.0e-6"
            raise ConfigError(f"{key}={value} of {source} is below 0; {fix}")


def unscaled_positions(positions: int, rope: Mapping[str, Any]) -> int:
    """Return the positions before any scaling. `rope`: for all layers, or by type of layer."""
    rope = rope.get("full_attention", rope)
    factor = rope.get("factor") or 1
    return rope.get("original_max_position_embeddings") or int(positions / factor)


def yarn_factor(positions: int, rope: Mapping[str, Any], context: int) -> int:
    """Return YaRN's factor for `context` tokens, relative to the positions before any scaling."""
    return math.ceil(context / unscaled_positions(positions, rope))


# ---- what surrounds the layers: language models and video transformers


@dataclass(frozen=True)
class RootKind:
    is_video: bool = False
    data: str = "one document per sequence; packed shorter documents need less attention"
    # To try if a plan does not fit.
    adapter_settings: tuple[Mapping[str, Any], ...] = ({}, {"base": "nf4"})
    positions: int | None = None  # None: as in config.json
    # Settings without effect -> "video transformers ...".
    refuses: Mapping[str, str] = field(default_factory=dict)


DECODER = RootKind()
VIDEO = RootKind(
    is_video=True,
    data="one clip per sequence",
    adapter_settings=({},),
    positions=sys.maxsize,  # the clip's sides have limits, not the number of its patches
    refuses={
        "adapter.base": "are not quantized",
        "adapter.dropout": "have adapters without dropout",
        "adapter.modules_to_save": "have no lm_head and embed_tokens",
        "adapter.unquantized": "are not quantized",
        "loss.type": "are trained in your own loop, with its own loss",
        "--branches": "have no shared prefixes",
    },
)
# Video transformers -> frames and pixels per latent of their autoencoders.
VIDEO_SCALES = {"WanTransformer3DModel": (4, 8), "LTXVideoTransformer3DModel": (8, 32)}
ROOTS = dict.fromkeys(VIDEO_SCALES, VIDEO)  # ModelShape.family -> root; of all others: DECODER


def count_patches(values: Mapping[str, Any], video: str) -> int:
    """Count the tokens of a `video`, frames x height x width in pixels."""
    kind = values.get("_class_name")
    patch = values.get("patch_size", 1)
    sizes = [int(size) for size in video.split("x") if size.isdecimal()]
    if kind not in VIDEO_SCALES:
        rule = f"applies to {' and '.join(VIDEO_SCALES)} only"
        raise ConfigError(f"--video {video} {rule}; use --context for this model")
    if len(sizes) != 3 or len(sizes) != video.count("x") + 1 or not all(sizes):
        fix = "use frames x height x width in pixels, as in 81x720x1280"
        raise ConfigError(f"--video {video}: {fix}")
    frames_scale, scale = VIDEO_SCALES[kind]
    scale *= 2 if values.get("in_channels") == 48 else 1  # the autoencoder of Wan 2.2 5B
    if not isinstance(patch, list | tuple):
        patch = (values.get("patch_size_t", 1), patch, patch)
    latents = ((sizes[0] - 1) // frames_scale + 1, sizes[1] // scale, sizes[2] // scale)
    return math.prod(max(1, size // p) for size, p in zip(latents, patch, strict=True))
