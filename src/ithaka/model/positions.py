"""model.rope and the context -> Hugging Face's rope_parameters and max_position_embeddings."""

import math
from typing import Any

from ithaka.config import ConfigError, RopeConfig

# RoPE kinds whose frequencies are fixed, and what each takes beside rope_theta. Those of "dynamic" and "longrope"
# change with the sequence's length.
FIXED_ROPE = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
}


def set_positions(config: Any, rope: RopeConfig | None, context: int, trained: bool) -> None:
    """Changes `config`, of transformers, before the model is made: a model ignores changes after that.

    max_position_embeddings becomes at least `context`. If the model is `trained`, a context beyond its positions is
    refused: without `rope`, or with a factor that is too small.
    """
    reach = config.max_position_embeddings
    if rope is not None:
        reach = _apply(config, rope, context)
    elif trained and context > reach:
        raise ConfigError(
            f"data.context={context} exceeds max_position_embeddings={reach} of the model; use a shorter context, or "
            f"move its positions: model.rope={{theta: 8.0e6}}, or {{type: yarn, factor: {math.ceil(context / reach)}}}"
        )
    if trained and context > reach:
        factor = config.rope_parameters["factor"]
        what = f"model.rope.factor={factor} gives {reach} positions, fewer than data.context={context}"
        raise ConfigError(f"{what}; use at least {math.ceil(factor * context / reach)}")
    config.max_position_embeddings = max(reach, context)


def _apply(config: Any, rope: RopeConfig, context: int) -> int:
    """Sets rope_parameters. Returns the positions that there are then; where no factor tells, the context counts."""
    own = config.rope_parameters
    kind = rope.type or own["rope_type"]
    names = FIXED_ROPE.get(kind, ())
    given = {name: value for name, value in vars(rope).items() if value is not None and name not in ("type", "theta")}
    for name in given.keys() - {*names}:
        others = " or ".join(other for other, its_names in FIXED_ROPE.items() if name in its_names)
        raise ConfigError(f"model.rope.{name}={given[name]} has no effect with type {kind}; use type {others}")
    before = own.get("original_max_position_embeddings") or int(config.max_position_embeddings / own.get("factor", 1))
    derived = {"original_max_position_embeddings": before, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    values = {name: value for name, value in derived.items() if name in names}
    values |= (own if kind == own["rope_type"] else {}) | given
    if "factor" in names and "factor" not in values:
        way = f"use at least {max(1, math.ceil(context / before))} for data.context={context}"
        raise ConfigError(f"model.rope.factor is missing, which type {kind} needs; {way}")
    config.rope_parameters = values | {"rope_type": kind, "rope_theta": rope.theta or own["rope_theta"]}
    if kind in ("linear", "yarn"):
        return int(values["factor"] * values.get("original_max_position_embeddings", before))
    return max(config.max_position_embeddings, context)
