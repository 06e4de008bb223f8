"""Commands on plans: plan, rehearse."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ithaka.cli.options import (
    Adapter,
    AsJson,
    Batch,
    Context,
    Disk,
    Force,
    GpuFile,
    Gpus,
    HostMemory,
    Model,
    Overrides,
    format_table,
    loading,
)
from ithaka.config import ConfigError, check_output, check_writable, format_value, shell_command
from ithaka.exits import ExitCode


def plan(
    model: Model,
    gpus: Gpus,
    context: Annotated[str | None, typer.Option(help="Tokens per sequence: 128K (the default), 1M.")] = None,
    host_memory: HostMemory = None,
    disk: Disk = None,
    batch: Batch = 1,
    adapter: Adapter = None,
    overrides: Overrides = None,
    gpu_file: GpuFile = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Also estimate the time for this many steps.")] = None,
    max_context: Annotated[bool, typer.Option("--max-context", help="Find the longest context that fits.")] = False,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print a configuration for `ithaka train`.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the --yaml configuration to a file.")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Plan memory and time for a model, a context and GPUs, before renting any."""
    from ithaka.plan import show
    from ithaka.plan.hardware import find_hardware
    from ithaka.plan.request import make_request

    as_yaml = as_yaml or out is not None
    clashes = {
        "--max-context and --context": max_context and context,
        "--max-context and --yaml": max_context and as_yaml,
        "--yaml and --json": as_yaml and as_json,
    }
    for options, conflict in clashes.items():
        if conflict:
            raise ConfigError(f"{options} cannot be combined; leave one out")
    if out is not None:
        check_writable("--out", out)
    hardware = find_hardware(gpus, gpu_file, host_memory, disk)
    request = make_request(model, hardware, context or "128K", batch, overrides or [], adapter, any_setting=as_yaml)
    if as_yaml and (result := request.plan()).fits:
        text = show.as_yaml(request, result, steps)
        if out is None:
            print(text, end="")
        else:
            check_output("--out", out, force, text)
            out.write_text(text, encoding="utf-8")
            needs_rope = request.missing_rope(result.work.context)
            usage = "the model has fewer positions: uncomment model.rope, then" if needs_rope else "use it with"
            print(f"wrote {out}; {usage}: {shell_command('train', out)}")
    else:
        text, fits = show.answer_request(request, max_context, steps, as_json)
        print(text, file=sys.stderr if as_yaml else sys.stdout)
        raise typer.Exit(ExitCode.DONE if fits else ExitCode.OUT_OF_MEMORY)


def rehearse(
    model: Model,
    gpus: Gpus,
    context: Context = "128K",
    layers: Annotated[int, typer.Option(min=1, help="Layers to run; the others are extrapolated.")] = 2,
    host_memory: HostMemory = None,
    disk: Disk = None,
    batch: Batch = 1,
    adapter: Adapter = None,
    overrides: Overrides = None,
    gpu_file: GpuFile = None,
    evaluate: Annotated[bool, typer.Option("--evaluate", help="Forward only, as in `ithaka evaluate`.")] = False,
    memory_only: Annotated[bool, typer.Option("--memory-only", help="Truncate attention to save time.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run rank 0 of these GPUs on this device, and compare measurements with the plan."""
    from ithaka.plan import show
    from ithaka.plan.hardware import find_hardware
    from ithaka.plan.request import make_request

    hardware = find_hardware(gpus, gpu_file, host_memory, disk)
    request = make_request(model, hardware, context, batch, overrides or [], adapter)
    plan = request.forward_plan() if evaluate else request.plan()
    if evaluate and not plan.fits:
        need, have = map(show.format_bytes, plan.ledger.tiers["GPU"])
        raise ConfigError(
            f"--context {context} --evaluate needs {need} per GPU, {have} available; "
            "use a shorter --context or more GPUs"
        )
    if not plan.fits:
        print(show.answer_request(request, False, None, as_json)[0])
        raise typer.Exit(ExitCode.OUT_OF_MEMORY)

    with loading() as status:
        from ithaka import rehearse as rehearsal

    kernel = request.config.attention.kernel
    with status("trying attention kernels"):
        request = request.with_kernel(rehearsal.find_kernel(kernel, plan.shape.head_dim))
    plan = request.forward_plan() if evaluate else request.plan()
    truncated = rehearsal.truncate_plan(plan, min(layers, plan.shape.num_layers), memory_only, kernel)
    rehearsal.check_cpu_memory(truncated)
    facts = rehearsal.describe_rehearsal(plan, truncated)
    if not as_json:
        settings = ", ".join(
            f"{name}={format_value(value)}" for name, value in plan.settings.items() if value is not None
        )
        print("rank 0 of {gpus}, {context} tokens, {layers} of {layers_of_model} layers, on {device}".format(**facts))
        print("attention: kernel {kernel}, planned with {planned_kernel}".format(**facts))
        print(f"settings: {settings}\nX: {facts['x']}\n", flush=True)
    with status(f"rehearsing at {truncated.work.tokens} tokens"):
        rows, peak_phase = rehearsal.rehearse_plan(plan, truncated, model)
    if as_json:
        print(json.dumps(facts | {"rows": rows, "peak_phase": peak_phase}, indent=2))
        return
    print(f"{format_table(rows)}\n\npeak in: {peak_phase}")
    if memory_only:
        print("memory only: attention was truncated, so its times do not apply to training")
