"""Check a request to the planner: a model, a machine and settings."""

from __future__ import annotations

from collections.abc import Sequence

from ithaka.config import ConfigError, Origin, format_value, load_config, parse_count
from ithaka.layout import FIELDS, format_choices
from ithaka.plan.hardware import H200_ATTENTION, Hardware
from ithaka.plan.models import find_config
from ithaka.plan.request import PlanRequest
from ithaka.plan.search import make_search_space, shape_to_train, work_from_config
from ithaka.run.launch import under_torchrun
from ithaka.run.rules import RunFacts, check_run, check_settings
from ithaka.trace.shapes import make_tracer, shape_from_config, teacher_shape

# Settings that have an option of `ithaka plan`.
OPTIONS = {
    "model.path": "the argument MODEL",
    "data.context": "--context",
    "train.batch": "--batch",
    "train.steps": "--steps",
}
# Settings that affect a plan.
PLANNED = (
    *FIELDS,
    "memory.gpu_gib",
    "train.accumulate",
    "train.compile",
    "attention.kernel",
    "optim.name",
    "loss.type",
    "loss.teacher",
    "loss.teacher_base",
    "adapter.base",
    "adapter.dropout",
    "adapter.modules_to_save",
    "adapter.rank",
    "adapter.targets",
    "adapter.unquantized",
)


def make_request(
    model: str,
    hardware: Hardware,
    context: str,
    batch: int,
    overrides: Sequence[str],
    adapter: int | None = None,
    any_setting: bool = False,
    traces: bool = False,
) -> PlanRequest:
    """`overrides`: section.key=value, as for training. `any_setting`: also accept settings that
    affect no plan. `traces`: also trace plans of built-in models."""
    overrides = [*overrides, *([f"adapter.rank={adapter}"] if adapter else [])]
    num_tokens = parse_count(context)
    if num_tokens is None or num_tokens < 2:
        raise ConfigError(
            f"--context {context} is not a number of tokens, at least 2; use for example 128K or 1M"
        )
    config = load_config(None, overrides)
    given = config.given
    for name in sorted(given.difference(PLANNED)):
        if name in OPTIONS:
            raise ConfigError(f"--set {name} has its own option; use {OPTIONS[name]}")
        if not any_setting:
            names = ", ".join(PLANNED)
            raise ConfigError(f"{name} does not affect a plan; use one of {names}")
    work = {"data.context": num_tokens, "train.batch": batch}
    config = config.with_values(work, Origin.DEFAULT)
    check_settings(config)
    if (kernel := config.attention.kernel) != "auto":
        if kernel not in (known := hardware.gpu.kernels or tuple(H200_ATTENTION)):
            rule = f"has no known rate on {hardware.gpu.name}"
            raise ConfigError(
                f"attention.kernel={kernel} {rule}; use {format_choices(('auto', *known))}"
            )
        hardware = hardware.with_kernel(kernel)
    hardware = hardware.with_gpu_gib(config.memory.gpu_gib)
    hf_config = find_config(model)
    shape = shape_to_train(shape_from_config(hf_config, model), config, teacher_shape(config))
    for name in sorted(given & shape.root.refuses.keys()):
        rule = f"does not apply to {model}: video transformers {shape.root.refuses[name]}"
        raise ConfigError(f"{name}={format_value(config.get(name))} {rule}; leave it out")
    check_run(RunFacts(config, shape, hardware, is_decided=False))
    space = make_search_space(config, shape, hardware)
    # caches of nodes may differ
    trace = None if under_torchrun() else make_tracer(hf_config, always=traces)
    return PlanRequest(model, hf_config, space, config, work_from_config(config), trace)
