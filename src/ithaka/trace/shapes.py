"""The shape of any model: stored, or else measured, which takes torch and seconds; traces of its
plans."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ithaka.config import AdapterConfig, Config
from ithaka.config.base_formats import check_quantization, required_base
from ithaka.facts.model_files import GIVE_MODEL, HUB_ID, check_values, read_json
from ithaka.plan.models import find_config, find_known_shape, shape_from_json, shape_to_json
from ithaka.plan.search import Plan
from ithaka.plan.shape import ModelShape
from ithaka.plan.trace import Peaks, Tracer, read_cache, read_traced, write_cache


def find_shape(model: str) -> ModelShape:
    """Return the shape of a built-in model, a Hugging Face directory, a file, or a hub id."""
    return shape_from_config(find_config(model), model)


def read_shape(path: Path) -> ModelShape:
    """Return the shape of the model in a Hugging Face directory or a `config.json` file."""
    file = path / "config.json" if path.is_dir() else path
    # directory names of the documentation
    hub = f"ORG/{path.name}" if path.parts[:1] == ("models",) else path
    is_hub_id = re.fullmatch(HUB_ID, str(path)) and not path.is_file()
    fetch = f"fetch it with `hf download {hub} --local-dir {path}`, or " if is_hub_id else ""
    return shape_from_config(read_json(file, fix=fetch + GIVE_MODEL), str(path))


def teacher_shape(config: Config) -> ModelShape | None:
    """Return the shape of loss.teacher, if it is another model."""
    if (path := config.loss.teacher_path) is None:
        return None
    values = find_config(str(path))
    format_ = AdapterConfig(base=required_base(values, config.loss.teacher_base))
    return shape_from_config(values, f"loss.teacher={path}").with_adapter(format_)


def shape_from_config(values: Mapping[str, Any], source: str = "the model") -> ModelShape:
    """Return the shape that a `config.json` describes. `source`: its name in errors."""
    values = dict(values)
    check_quantization(values.pop("quantization_config", None), source)
    check_values(values, source)
    return find_known_shape(values) or _measure(json.dumps(values, sort_keys=True), source)


@lru_cache
def _measure(values: str, source: str) -> ModelShape:
    if (stored := read_cache("shape", values)) is not None:
        return shape_from_json(stored)
    from ithaka.trace.measure import measure_model  # late: it imports torch

    shape = measure_model(json.loads(values), source)
    write_cache(shape_to_json(shape), "shape", values)
    return shape


def make_tracer(config: Mapping[str, Any], always: bool) -> Tracer:
    """Return a function that traces plans of the model with this config.json. Unless `always`,
    models whose shape is known are not traced, so that planning them takes no torch: their
    estimates are corrected by stored traces."""
    values = {name: value for name, value in config.items() if name != "quantization_config"}
    traces = always or find_known_shape(values) is None

    def trace(plan: Plan) -> Peaks | None:
        return read_traced(plan, config) or (_trace(config, plan) if traces else None)

    return trace


def _trace(config: Mapping[str, Any], plan: Plan) -> Peaks | None:
    from ithaka.trace.trace_plan import trace_peaks  # late: it imports torch

    return trace_peaks(config, plan)
