"""model.rope and the context -> Hugging Face's rope_parameters and max_position_embeddings; a batch's frequencies."""

import math
from typing import Any

from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ithaka.config import ConfigError, RopeConfig
from ithaka.plan.shape import yarn_factor

# RoPE kinds, and what each takes beside rope_theta. The frequencies of "dynamic" change with every length.
ROPE_KINDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}
PROPORTIONAL = "proportional"  # fixed frequencies too, 0 for the dimensions that are not turned; not for model.rope


def compute_frequencies(rotary: Any, num_positions: int) -> Tensor:
    """Of a batch with positions below `num_positions`, by Hugging Face's rotary module: longrope has two sets."""
    if rotary.rope_type != "longrope":
        return rotary.inv_freq
    make = ROPE_INIT_FUNCTIONS["longrope"]
    return make(rotary.config, rotary.inv_freq.device, seq_len=num_positions)[0]


def check_rope(config: Any) -> None:
    """Refuse positions that the layer does not compute; `config` is transformers'."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind, share = rope.get("rope_type", "default"), rope.get("partial_rotary_factor") or 1.0
    if kind not in (*ROPE_KINDS, PROPORTIONAL):
        why = "changes its frequencies with the length" if kind == "dynamic" else "is not supported"
        raise ConfigError(f"rope_type={kind} {why}; use one of {', '.join(ROPE_KINDS)} (model.rope.type)")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if kind not in ("default", PROPORTIONAL) and (turned := int(head_dim * share)) != head_dim:
        raise ConfigError(
            f"partial_rotary_factor={share} with rope_type={kind} has frequencies for {turned} of the {head_dim} "
            f"dimensions of a head, which neither transformers nor ithaka computes for model_type={config.model_type}; "
            "leave it out of rope_parameters in config.json"
        )


def set_positions(config: Any, rope: RopeConfig | None, context: int, trained: bool) -> None:
    """Changes `config`, of transformers, before the model is made: a model ignores changes after that.

    max_position_embeddings becomes at least `context`. If the model is `trained`, a context beyond its positions is
    refused: without `rope`, or with a factor that is too small.
    """
    reach = config.max_position_embeddings
    if rope is not None:
        reach = _apply(config, rope, context)
    elif trained and context > reach:
        factor = yarn_factor(reach, config.rope_parameters, context)
        raise ConfigError(
            f"data.context={context} exceeds max_position_embeddings={reach} of the model; use a shorter context, or "
            f"move its positions: model.rope={{theta: 8.0e6}}, or {{type: yarn, factor: {factor}}}"
        )
    if trained and context > reach:
        factor = config.rope_parameters["factor"]
        what = f"model.rope.factor={factor} gives {reach} positions, fewer than data.context={context}"
        raise ConfigError(f"{what}; use at least {math.ceil(factor * context / reach)}")
    check_rope(config)
    config.max_position_embeddings = max(reach, context)


def _apply(config: Any, rope: RopeConfig, context: int) -> int:
    """Sets rope_parameters. Returns the positions that there are then; where no factor tells, the context counts."""
    own = config.rope_parameters
    kind = rope.type or own["rope_type"]
    names = ROPE_KINDS.get(kind, ())
    if own["rope_type"] == PROPORTIONAL != kind:
        what = "would turn dimensions that the model's rope_type=proportional leaves alone"
        raise ConfigError(f"model.rope.type={kind} {what}; leave the type out, and change theta")
    given = {name: value for name, value in vars(rope).items() if value is not None and name not in ("type", "theta")}
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    for name in given.keys() - {*names}:
        others = " or ".join(other for other, its_names in ROPE_KINDS.items() if name in its_names)
        raise ConfigError(f"model.rope.{name}={given[name]} has no effect with type {kind}; use type {others}")
    before = own.get("original_max_position_embeddings") or int(config.max_position_embeddings / own.get("factor", 1))
    derived = {"original_max_position_embeddings": before, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    values: dict[str, Any] = {name: value for name, value in derived.items() if name in names}
    values |= (own if kind == own["rope_type"] else {}) | given
    if kind == "longrope":
        count = (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads) // 2
        for name in ("short_factor", "long_factor"):
            if (found := len(values.get(name) or ())) != count:
                what = f"model.rope.{name} has {found} numbers, and type longrope needs one for each frequency"
                raise ConfigError(f"{what}; give {count}")
    elif "factor" in names and "factor" not in values:
        way = f"use at least {max(1, math.ceil(context / before))} for data.context={context}"
        raise ConfigError(f"model.rope.factor is missing, which type {kind} needs; {way}")
    vars(config).pop("original_max_position_embeddings", None)  # where Phi has it; it would come before the other
    config.rope_parameters = values | {"rope_type": kind, "rope_theta": rope.theta or own["rope_theta"]}
    if kind != "llama3" and values.get("factor"):
        return int(values["factor"] * values.get("original_max_position_embeddings", before))
    return max(config.max_position_embeddings, context)
