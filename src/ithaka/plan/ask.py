"""Questions to the planner, and their answers as text or JSON: what `ithaka plan` says."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ithaka.config import ConfigError, load, parse_count
from ithaka.layout import fixed_settings
from ithaka.plan import compare, search, show
from ithaka.plan.hardware import Hardware
from ithaka.plan.models import find_shape
from ithaka.plan.shape import ModelShape, Work


@dataclass(frozen=True)
class Question:
    model: str
    shape: ModelShape
    hardware: Hardware
    work: Work
    fixed: dict[str, Any]


def question(model: str, hardware: Hardware, context: str, batch: int, overrides: list[str]) -> Question:
    """`overrides`: settings as for training, section.key=value."""
    num_tokens = parse_count(context)
    if re.fullmatch(r"-\s*\d+|[01]", context.strip()):
        raise ConfigError(f"--context {context} is too short; use at least 2 tokens")
    if num_tokens is None or num_tokens < 2:
        raise ConfigError(f"--context {context} is not a number of tokens; write for example 131072, 128K or 1M")
    shape = find_shape(model)
    config = load(None, overrides)
    chosen = {}
    for override in overrides:
        section, _, key = override.partition("=")[0].strip().partition(".")
        chosen[f"{section}.{key}"] = getattr(getattr(config, section), key)
    fixed = fixed_settings(chosen, shape.num_layers, hardware.num_gpus)
    return Question(model, shape, hardware, Work(num_tokens, batch), fixed)


def plan(q: Question, max_context: bool, as_json: bool) -> tuple[str, bool]:
    """(the answer, whether it fits). With `max_context` the plan is the one at the longest context."""
    longest = limited_by = None
    work = q.work
    if max_context:
        longest, limited_by = search.longest(q.shape, q.hardware, q.fixed, q.work.batch)
        work = Work(longest, q.work.batch) if longest else q.work
    found = search.choose(q.shape, q.hardware, work, q.fixed)
    if not found.fits:
        _, limited_by = search.longest(q.shape, q.hardware, q.fixed, q.work.batch)
    if as_json:
        return json.dumps(show.as_dict(found, q.model, longest, limited_by), indent=2), found.fits
    return show.as_text(found, q.model, longest, limited_by), found.fits


def ladder(q: Question, as_json: bool) -> str:
    rungs = compare.ladder(q.shape, q.hardware, q.work)
    return json.dumps(show.ladder_dict(rungs, q.model), indent=2) if as_json else show.ladder_text(rungs, q.model)


def sweep(q: Question, setting: str, plot: Path | None, as_json: bool) -> str:
    if setting != "heads_per_stage":
        raise ConfigError(f"--sweep {setting} is not possible; use heads_per_stage")
    if setting in q.fixed:
        raise ConfigError(
            f"--sweep {setting} tries every value, and parallel.{setting}={q.fixed[setting] or 'all'} is given; "
            "leave one out"
        )
    points = compare.sweep_heads(q.shape, q.hardware, q.work, q.fixed)
    if plot is not None:
        plot.write_text(show.sweep_svg(points, q.model), encoding="utf-8")
    return json.dumps(show.sweep_dict(points, q.model), indent=2) if as_json else show.sweep_text(points, q.model)
