"""Rehearse the plans of MoE models and four-bit bases, two layers each or one of each kind, within
the planned memory.

    python benchmarks/rehearse_plans.py                    # one GPU; about a minute per plan
    python benchmarks/rehearse_plans.py --cases longest    # the longest contexts only
    python benchmarks/rehearse_plans.py --small            # small models, on a CPU

Prints one JSON line per plan: planned and measured peak and seconds per layer. The peak is measured
at the plan's context; if its attention takes longer than --seconds, on documents of 128K tokens,
which allocate the same. Seconds are then measured with the same settings at a shorter context.
Planned seconds are those of the GPU that runs.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ithaka.checks import rehearse as rehearsal
from ithaka.config import ConfigError, parse_count
from ithaka.log.console import status
from ithaka.plan.hardware import find_hardware, gpu_named
from ithaka.plan.models import find_config
from ithaka.plan.request import PlanRequest
from ithaka.plan.search import Plan
from ithaka.run.check_request import make_request

LONGEST = "longest"
SHORTEST = 512  # tokens of the shortest timed context
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "vocab_size": 512,
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


@dataclass(frozen=True)
class Case:
    model: str
    gpus: str
    host_memory: str
    context: str = LONGEST
    adapter: int | None = None
    base: str | None = None

    @property
    def name(self) -> str:
        parts = (self.model, self.gpus, self.context, self.adapter and "adapters", self.base)
        return ", ".join(filter(None, parts))


CASES = (
    Case("llama3-8b", "1xRTX4090", "64GB", LONGEST, 16, "nf4"),
    Case("llama3-70b", "1xH200", "512GB", LONGEST, 16, "nf4"),
    Case("llama3-70b", "8xH100-80GB", "3TB", LONGEST, 16, "nf4"),
    Case("qwen3-30b-a3b", "8xH100-80GB", "2TB", LONGEST),
    Case("gpt-oss-20b", "1xH100-80GB", "512GB", LONGEST, 16),
    Case("gpt-oss-120b", "8xH100-80GB", "2TB", LONGEST, 16),
    Case("gpt-oss-120b", "1xH200", "512GB", LONGEST, 16, "mxfp4"),
    Case("llama3-8b", "1xRTX4090", "64GB", "128K", 16, "nf4"),
    Case("llama3-70b", "1xH200", "512GB", "256K", 16, "nf4"),
    Case("qwen3-30b-a3b", "8xH100-80GB", "2TB", "1M"),
    Case("gpt-oss-20b", "1xH100-80GB", "512GB", "1M", 16),
    Case("gpt-oss-120b", "8xH100-80GB", "2TB", "1M", 16),
    Case("gpt-oss-120b", "1xH200", "512GB", "1M", 16, "mxfp4"),
)


def plan_case(case: Case, model: str, context: str) -> tuple[PlanRequest, Plan]:
    """`model`, `context`: the case's own, or small ones."""
    hardware = find_hardware(case.gpus, None, case.host_memory, None)
    overrides = [f"adapter.base={case.base}"] if case.base else []
    request = make_request(
        model, hardware, "128K" if context == LONGEST else context, 1, overrides, case.adapter
    )
    request = request.with_kernel(
        rehearsal.find_kernel("auto", request.space.shape.attention_kinds)
    )
    plan = request.plan(request.space.longest_context(1) if context == LONGEST else 0)
    if not plan.fits:
        raise ConfigError(f"{case.name} does not fit; use a shorter context")
    return request, plan


def on_this_gpu(plan: Plan) -> Plan:
    """Return the plan with the rates of this GPU and the memory of the planned one."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    if (gpu := gpu_named(name)) is None:
        return plan
    hardware = replace(plan.hardware, gpu=replace(gpu, memory_bytes=plan.hardware.gpu.memory_bytes))
    return replace(
        plan,
        hardware=hardware.with_kernel(rehearsal.find_kernel("auto", plan.shape.attention_kinds)),
    )


def timed_contexts(plan: Plan) -> Iterator[int]:
    """The plan's context, then powers of two below it."""
    context = plan.work.context
    yield context
    while (
        context := 2 ** (context.bit_length() - 1) // (1 if context & (context - 1) else 2)
    ) >= SHORTEST:
        yield context


def rehearse_case(
    case: Case, layers: int, seconds: float, model: str, context: str
) -> dict[str, Any]:
    started = time.monotonic()
    _, plan = plan_case(case, model, context)
    plan = on_this_gpu(plan)
    layers = min(layers, plan.shape.num_layers)
    step_s = plan.step_s * layers / plan.shape.num_layers

    def shorten(tokens: int) -> Plan:
        return replace(plan, work=replace(plan.work, context=tokens))

    # Two steps are timed.
    scales = {tokens: shorten(tokens).step_s / plan.step_s for tokens in timed_contexts(plan)}
    timed = next(
        (tokens for tokens, scale in scales.items() if 2 * scale * step_s <= seconds), min(scales)
    )
    row: dict[str, Any] = {
        "case": case.name,
        "context": plan.work.context,
        "planned step s": plan.step_s,
        "settings": {
            name: str(value) for name, value in plan.settings.items() if value is not None
        },
        "GPU GiB": plan.hardware.gpu.memory_bytes / 2**30,
    }
    for tokens in dict.fromkeys((plan.work.context, timed)):
        at = shorten(tokens)
        truncated = rehearsal.truncate_plan(
            at, find_config(model), layers, memory_only=tokens != timed
        )
        rehearsal.check_cpu_memory(truncated)
        with status(f"{case.name}: {tokens} tokens"):
            rows, phase = rehearsal.rehearse_plan(at, truncated, model)
        row["layers"] = list(truncated.layers)
        found = {each["what"]: (each["planned"], each["measured"]) for each in rows}
        if tokens == plan.work.context:
            row |= compare("peak GiB", *found["peak without reserve"]) | {"peak in": phase}
            row |= compare("host GiB", *found["host, including disk staging"])
        if tokens == timed:
            row["timed context"] = tokens
            for name in (
                name for name in found if name.startswith(("layer forward", "layer backward"))
            ):
                row |= compare(f"{name.removeprefix('layer ')} s", *found[name])
        free_memory()
    return row | {"took s": round(time.monotonic() - started, 1)}


def compare(name: str, planned: float, measured: float) -> dict[str, float]:
    ratio = {f"{name}, planned / measured": round(planned / measured, 4)} if measured else {}
    return {f"planned {name}": round(planned, 4), f"measured {name}": round(measured, 4), **ratio}


def free_memory() -> None:
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def write_small(model: str, folder: Path) -> str:
    """Write the config.json of a small model of the same type."""
    config = find_config(model)
    config |= {name: value for name, value in SMALL.items() if name in config}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: SMALL["num_hidden_layers"]]
    path = folder / f"{model}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def main(
    cases: Annotated[
        str, typer.Option(help="Run the cases whose names contain one of these, separated by ;")
    ] = "",
    layers: Annotated[int, typer.Option(min=1)] = 2,
    seconds: Annotated[
        float, typer.Option(help="Planned seconds of the timed steps of a case.")
    ] = 10.0,
    small: Annotated[
        bool, typer.Option("--small", help="Small models of the same types, at 1K tokens.")
    ] = False,
) -> None:
    """Rehearse plans, and print one JSON line for each."""
    wanted = [text.strip() for text in cases.split(";")]
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if not any(text in case.name for text in wanted):
                continue
            model = write_small(case.model, Path(folder)) if small else case.model
            try:
                context = (
                    str(min(1024, parse_count(case.context) or 1024)) if small else case.context
                )
                row = rehearse_case(case, layers, seconds, model, context)
            except Exception as error:  # the other cases can still run
                traceback.print_exc(limit=-6)
                row = {"case": case.name, "error": f"{type(error).__name__}: {error}"[:1000]}
                free_memory()
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    typer.run(main)
