"""Read the `config.json` of a model, without torch or transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ithaka.config import ConfigError, input_error

GIVE_MODEL = "give a model directory or a config.json"


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
    has_formula: bool = True  # False: a mixture of experts, whose layers are measured


# Families whose plans have formulas. To add one: one entry here, one case in tests/test_shape.py and one in
# tests/models.py.
FAMILIES: dict[str, Family] = {
    "llama": Family("attention_bias", "attention_bias", "mlp_bias", positions=2048),
    "mistral": Family(window="all", kv_heads=8, positions=131072),
    "qwen2": Family(True, window="switched", kv_heads=32),
    "qwen3": Family("attention_bias", "attention_bias", qk_norm=True, window="switched", kv_heads=32, head_dim=128),
    "qwen3_moe": Family(qk_norm=True, window="switched", has_formula=False),
    "mixtral": Family(window="all", has_formula=False),
}
# Vision-language models: an encoder whose frames are independent, and a language model with 3-D positions.
VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
WITHOUT_ROPE = ("nemotron_h",)  # so max_position_embeddings is no limit
PLANNED_FAMILIES = [name for name, family in FAMILIES.items() if family.has_formula]


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


def check_values(values: Mapping[str, Any], source: str) -> None:
    """Refuse values of a config.json that no model can have."""
    for key, value in values.items():
        if key.endswith(("norm_eps", "norm_epsilon")) and type(value) in (int, float) and not value >= 0:
            raise ConfigError(f"{key}={value} of {source} is below 0; use the model's own value, for example 1.0e-6")


def unscaled_positions(positions: int, rope: Mapping[str, Any]) -> int:
    """Return the positions before any scaling. `rope`: for all layers, or by type of layer."""
    rope = rope.get("full_attention", rope)
    return rope.get("original_max_position_embeddings") or int(positions / (rope.get("factor") or 1))


def yarn_factor(positions: int, rope: Mapping[str, Any], context: int) -> int:
    """Return YaRN's factor for `context` tokens, relative to the positions before any scaling."""
    return math.ceil(context / unscaled_positions(positions, rope))
