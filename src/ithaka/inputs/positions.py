"""RoPE: apply model.rope and the context length to a Hugging Face configuration."""

import math
from typing import TYPE_CHECKING, Any

from ithaka.config import ConfigError, RopeConfig
from ithaka.facts.families import yarn_factor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_ORIGINAL = "original_max_position_embeddings"
# RoPE types -> their parameters other than rope_theta. "dynamic" is missing: its frequencies change
# with the length.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow"),
    "longrope": ("factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor"),
}
TYPE_PARAMETERS = {"rope_type", "type", "rope_theta"}.union(*ROPE_TYPES.values())
# Rotates part of each head. Computed if the model has it, but not set by model.rope.
PROPORTIONAL = "proportional"


def rope_parameters(config: "PreTrainedConfig") -> dict[str, Any]:
    """Return a configuration's, without those that windowed layers have of their own."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("full_attention", rope)


def check_positions(config: "PreTrainedConfig", name: str, num_positions: int) -> None:
    """Refuse positions beyond those of a model, which cannot be extended after it is built.
    `rope_type=dynamic` has no limit, and models without RoPE may have none."""
    limit = getattr(config, "max_position_embeddings", None)
    rope = rope_parameters(config)
    if not limit or num_positions <= limit or rope.get("rope_type") == "dynamic":
        return
    fix = "use shorter sequences or documents"
    if "rope_theta" in rope:
        factor = math.ceil(num_positions / limit)
        yarn = {"rope_type": "yarn", "rope_theta": rope["rope_theta"], "factor": factor}
        yarn[_ORIGINAL] = limit
        fix += (
            ", or load it with more positions: from_pretrained(..., max_position_embeddings="
            f"{factor * limit}, rope_parameters={yarn}), or with a larger rope_theta"
        )
    raise ConfigError(f"{name} exceeds max_position_embeddings={limit} of the model; {fix}")


def set_positions(
    config: "PreTrainedConfig", rope: RopeConfig | None, context: int, trained: bool
) -> None:
    """Set RoPE and max_position_embeddings, at least `context`, before the model is built.

    If the model is `trained`, refuses a context beyond its positions, be it without `rope` or with
    too small a factor.
    """
    num_positions = config.max_position_embeddings
    if rope is not None:
        num_positions = _apply_rope(config, rope, context)
    elif not rope_parameters(config):  # it has no positions to extend
        num_positions = max(num_positions, context)
    elif trained and context > num_positions:
        factor = yarn_factor(num_positions, rope_parameters(config), context)
        raise ConfigError(
            f"data.context={context} exceeds max_position_embeddings={num_positions} of the "
            "model; use a shorter context, or extend its positions with model.rope="
            f"{{theta: 8.0e6}} or {{type: yarn, factor: {factor}}}"
        )
    if trained and context > num_positions:
        factor = rope_parameters(config)["factor"]
        fix = f"use at least {math.ceil(factor * context / num_positions)}"
        raise ConfigError(
            f"model.rope.factor={factor} gives {num_positions} positions, fewer than "
            f"data.context={context}; {fix}"
        )
    config.max_position_embeddings = max(num_positions, context)


def _apply_rope(config: "PreTrainedConfig", rope: RopeConfig, context: int) -> int:
    """Set rope_parameters. Return the positions of its factor, or else at least the context."""
    stored = rope_parameters(config)
    if not stored:
        raise ConfigError(
            f"model.rope has no effect on model_type={config.model_type}; leave it null"
        )
    rope_type = rope.type or stored["rope_type"]
    if stored["rope_type"] == PROPORTIONAL != rope_type:
        raise ConfigError(
            f"model.rope.type={rope_type} would rotate all dimensions, but the model's "
            "rope_type=proportional rotates only a part; leave the type out, and change theta"
        )
    original = stored.get(_ORIGINAL)
    original = original or int(config.max_position_embeddings / stored.get("factor", 1))
    parameters = ROPE_TYPES.get(rope_type, ())
    defaults = {_ORIGINAL: original, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    values: dict[str, Any] = {name: value for name, value in defaults.items() if name in parameters}
    keeps_type = rope_type == stored["rope_type"]
    values |= {
        name: value for name, value in stored.items() if keeps_type or name not in TYPE_PARAMETERS
    }
    values |= _rope_settings(rope, rope_type)
    if rope_type == "longrope":
        _check_longrope(config, values)
    elif "factor" in parameters and "factor" not in values:
        fix = f"use at least {max(1, math.ceil(context / original))} for data.context={context}"
        raise ConfigError(f"model.rope.factor is missing, which type {rope_type} needs; {fix}")
    vars(config).pop(_ORIGINAL, None)  # Phi's, which would take precedence
    values |= {"rope_type": rope_type, "rope_theta": rope.theta or stored["rope_theta"]}
    if stored is config.rope_parameters:
        config.rope_parameters = values
    else:  # windowed layers have their own
        config.rope_parameters = config.rope_parameters | {"full_attention": values}
    if rope_type != "llama3" and values.get("factor"):
        return int(values["factor"] * values.get(_ORIGINAL, original))
    return max(config.max_position_embeddings, context)


def _rope_settings(rope: RopeConfig, rope_type: str) -> dict[str, Any]:
    """Return the parameters that were set. Refuse those that its type does not have."""
    settings: dict[str, Any] = {}
    for name, value in vars(rope).items():
        if value is not None and name not in ("type", "theta"):
            settings[name] = list(value) if isinstance(value, tuple) else value
    for name in settings.keys() - {*ROPE_TYPES.get(rope_type, ())}:
        others = " or ".join(other for other, names in ROPE_TYPES.items() if name in names)
        problem = f"model.rope.{name}={settings[name]} has no effect with type {rope_type}"
        raise ConfigError(f"{problem}; use type {others}")
    return settings


def _check_longrope(config: "PreTrainedConfig", values: dict[str, Any]) -> None:
    """Refuse lists that do not have one factor per frequency."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_frequencies = int(head_dim * values.get("partial_rotary_factor", 1)) // 2
    for name in ("short_factor", "long_factor"):
        if (length := len(values.get(name) or ())) != num_frequencies:
            rule = f"has {length} numbers, but type longrope needs one per frequency"
            raise ConfigError(f"model.rope.{name} {rule}; give {num_frequencies}")
