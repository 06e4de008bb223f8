"""A model's files: names on the Hugging Face hub, JSON as transformers writes it, and what no
config.json may say."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ithaka.config.fields import ConfigError, input_error

_HUB_NAME = r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?"
HUB_ID = rf"(?!.*(?:--|\.\.)){_HUB_NAME}/{_HUB_NAME}"  # owner/name, as the hub allows it
GIVE_MODEL = "give a model directory or a config.json"
CORRECT = "correct the model's config.json"
# JSON has no such numbers: transformers writes {"__float__": "Infinity"}, and older files have a
# bare Infinity.
FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def split_revision(name: str) -> tuple[str, str | None]:
    """org/name@revision -> (org/name, revision); without one, the hub's default branch."""
    repo, _, revision = name.partition("@")
    return repo, revision or None


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
