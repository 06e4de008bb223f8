"""Commands on plans and this machine: plan, rehearse, doctor, selftest."""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ithaka.cli.options import (
    AsJson,
    Force,
    Overrides,
    format_table,
    loading,
    parse_tokens,
)
from ithaka.comm.rank import is_rank_0
from ithaka.config import (
    ConfigError,
    check_output,
    check_writable,
    format_value,
    shell_command,
    writing_to,
)
from ithaka.config.units import unbroken, wrap
from ithaka.exits import ExitCode

if TYPE_CHECKING:
    from ithaka.plan.hardware import Hardware
    from ithaka.plan.request import PlanRequest
    from ithaka.plan.search import Plan

Model = Annotated[
    str, typer.Argument(help="A name (llama3.1-8b), a directory, a config.json, or a hub id.")
]
Gpus = Annotated[str, typer.Option(help="For example 8xH100-80GB, or 2x8xH100-80GB for two nodes.")]
Context = Annotated[str, typer.Option(help="Tokens per sequence: 131072, 128K, 1M.")]
HostMemory = Annotated[
    str | None,
    typer.Option(
        help=(
            "Host memory per node: 2TB, 512GiB. By default 256 GB per GPU; for GeForce 64 GB "
            "in total."
        )
    ),
]
Disk = Annotated[
    str | None, typer.Option(help="Disk space per node for activations; by default none.")
]
Video = Annotated[
    str | None, typer.Option(metavar="FxHxW", help="A clip instead of a context: 81x720x1280.")
]
Branches = Annotated[
    str | None,
    typer.Option(metavar="NxTOKENS", help="Answers after one prompt of --context tokens: 8x2K."),
]
Batch = Annotated[int, typer.Option(min=1, help="Sequences per micro-step.")]
Adapter = Annotated[
    int | None, typer.Option(metavar="RANK", min=1, help="Train LoRA adapters of this rank.")
]
GpuFile = Annotated[
    Path | None, typer.Option(help="JSON file with the rates of another GPU; then use --gpus 8.")
]
NEXT_FILE = Path("my.yaml")  # in the commands after a plan


def plan_command(
    model: Model,
    gpus: Gpus,
    context: Annotated[
        str | None, typer.Option(help="Tokens per sequence: 128K (the default), 1M.")
    ] = None,
    video: Video = None,
    branches: Branches = None,
    host_memory: HostMemory = None,
    disk: Disk = None,
    batch: Batch = 1,
    adapter: Adapter = None,
    overrides: Overrides = None,
    gpu_file: GpuFile = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Also estimate the time for this many steps.")
    ] = None,
    max_context: Annotated[
        bool, typer.Option("--max-context", help="Find the longest context that fits.")
    ] = False,
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="Print a configuration for `ithaka train`.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the --yaml configuration to a file.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Plan memory and time for a model, a context and GPUs, before renting any."""
    from ithaka.plan import render, summary
    from ithaka.plan.hardware import find_hardware
    from ithaka.run.check_request import make_request

    as_yaml = as_yaml or out is not None
    clashes = {
        "--max-context and --context": max_context and context,
        "--video and --context": all((video, context or max_context)),
        "--max-context and --yaml": max_context and as_yaml,
        "--yaml and --json": as_yaml and as_json,
        "--branches and --video, --max-context or --yaml": all(
            (branches, any((video, max_context, as_yaml)))
        ),
    }
    for options, conflict in clashes.items():
        if conflict:
            raise ConfigError(f"{options} cannot be combined; leave one out")
    if out is not None:
        check_writable("--out", out)
    repeated: dict[str, Any] = {
        "--gpus": gpus,
        "--gpu-file": gpu_file,
        "--context": context,
        "--video": video,
        "--host-memory": host_memory,
        "--disk": disk,
        "--batch": batch if batch > 1 else None,
        "--adapter": adapter,
        "--set": overrides,
    }
    hardware = find_hardware(gpus, gpu_file, host_memory, disk)
    tokens = _count_tokens(model, video, context or "128K")
    request = make_request(
        model, hardware, tokens, batch, overrides or [], adapter, any_setting=as_yaml
    )
    request = request.with_branches(branches) if branches else request
    if as_yaml and _trains_elsewhere(request):
        fix = "use ithaka.parallelize(transformer, context=...)"
        raise ConfigError(
            f"--yaml writes a configuration for `ithaka train`, which trains language models; {fix}"
        )
    if as_yaml and (result := request.plan()).fits:
        headline = wrap(summary.format_verdict(result, model), "# ", "#   ")
        text = "\n".join([*headline, *request.config_lines(result, steps)]) + "\n"
        if out is None:
            print(text, end="")
        else:
            check_output("--out", out, force, text)
            _write_configuration(request, result, out, text)
        return
    facts, result = summary.answer_request(request, max_context, steps)
    text = json.dumps(facts, indent=2) if as_json else render.render_plan(facts)
    print(text, file=sys.stderr if as_yaml else sys.stdout)
    if result.fits and not as_json:
        repeated |= {"--context": result.work.context} if max_context else {}
        print("", *_list_next_commands(request, result, repeated, steps), sep="\n")
    raise typer.Exit(ExitCode.DONE if result.fits else ExitCode.OUT_OF_MEMORY)


def _write_configuration(request: "PlanRequest", plan: "Plan", out: Path, text: str) -> None:
    """Write the plan's configuration, and print what to change in it and how to use it."""
    with writing_to("--out", out):
        out.write_text(text, encoding="utf-8")
    edits = ["set data.path"] * ("data.path" not in request.config.given)
    if request.missing_rope(plan.work.context):
        edits.append("the model has fewer positions: uncomment model.rope")
    usage = "; ".join([f"wrote {out}", *edits, "then"])
    if plan.hardware.num_nodes == 1:
        print(f"{usage}: {shell_command('train', out)}")
    else:
        print(f"{usage}:", *_start_on_nodes(plan.hardware, out), sep="\n")


def _trains_elsewhere(request: "PlanRequest") -> bool:
    """Whether the model is trained in the user's own loop, so that settings of the loss have no
    effect."""
    return "loss.type" in request.space.shape.root.refuses


def _list_next_commands(
    request: "PlanRequest", plan: "Plan", options: dict[str, Any], steps: int | None
) -> Iterator[str]:
    """What to run after a printed plan. `options`: those that plan and rehearse share."""
    lists = {
        option: value if isinstance(value, list) else [value] for option, value in options.items()
    }
    pairs = [
        (option, value) for option, values in lists.items() for value in values if value is not None
    ]
    words = [shlex.quote(str(word)) for word in (request.model, *chain(*pairs))]
    if plan.work.spans:
        yield (
            "Next: pack prompts and their branches with ithaka.pack_prefixes (docs/hugging-face.md)"
        )
        return
    if _trains_elsewhere(request):
        yield "Next, in your training loop (docs/video.md):"
        yield f"  transformer = ithaka.parallelize(transformer, context={plan.work.context})"
    else:
        yield "Next: write a configuration, set data.path in it, and train"
        yield _fold(
            "ithaka",
            "plan",
            *words,
            *(["--steps", str(steps)] if steps else []),
            "--out",
            str(NEXT_FILE),
        )
        several = plan.hardware.num_nodes > 1
        yield from (
            _start_on_nodes(plan.hardware, NEXT_FILE)
            if several
            else [_fold("ithaka", "train", str(NEXT_FILE))]
        )
    if plan.hardware.num_gpus > 1:
        yield "To check this plan on one of these GPUs first:"
        yield _fold("ithaka", "rehearse", *words)


def _start_on_nodes(hardware: "Hardware", file: Path) -> Iterator[str]:
    """The commands of docs/several-nodes.md, for a configuration."""
    nodes = f"{hardware.num_nodes}"
    per_node = f"{hardware.gpus_per_node}"
    name = shlex.quote(file.stem)
    torchrun = (
        f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint"
    ).split()
    train = ["--numa-binding", "node", "-m", "ithaka", "train", shlex.quote(str(file))]
    yield "With torchrun, on every node, with the name of one of them as HEAD:"
    yield _fold(*torchrun, "HEAD:29500", "--rdzv-id", name, *train)
    yield (
        f"With Slurm (sbatch --nodes={nodes} --ntasks-per-node=1 --gpus-per-node={per_node} "
        "--mem=0 --exclusive):"
    )
    yield """  HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"""
    resumes = ["--run-dir", f"runs/{name}", "--resume", "auto"]
    yield _fold(
        "srun", *torchrun, '"$HEAD:29500"', "--rdzv-id", '"$SLURM_JOB_ID"', *train, *resumes
    )


def _fold(*words: str) -> str:
    """An indented command of words that are quoted for a shell. Lines break before options."""
    text = re.sub(" (?!-)", "\0", " ".join(map(unbroken, words)))
    return "\n".join(wrap(text, "  ", "      ", end=" \\"))


def rehearse_command(
    model: Model,
    gpus: Gpus,
    context: Context = "128K",
    video: Video = None,
    layers: Annotated[
        int,
        typer.Option(
            min=1, help="Layers to run, at least one of each kind; the others are extrapolated."
        ),
    ] = 2,
    host_memory: HostMemory = None,
    disk: Disk = None,
    batch: Batch = 1,
    adapter: Adapter = None,
    overrides: Overrides = None,
    gpu_file: GpuFile = None,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Forward only, as in `ithaka evaluate`.")
    ] = False,
    memory_only: Annotated[
        bool, typer.Option("--memory-only", help="Truncate attention to save time.")
    ] = False,
    ghost: Annotated[
        bool,
        typer.Option(
            "--ghost", help="Only trace memory, of all layers, without a GPU: in seconds."
        ),
    ] = False,
    rank: Annotated[
        int, typer.Option(min=0, help="The rank to run, or to trace with --ghost.")
    ] = 0,
    data: Annotated[
        Path | None,
        typer.Option(
            help="With --ghost: a run's configuration, whose worst packed batch is traced."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run one rank of these GPUs on this device, or all under torchrun, and compare measurements
    with the plan."""
    from ithaka.config.units import format_bytes
    from ithaka.plan import render, summary
    from ithaka.plan.hardware import find_hardware
    from ithaka.plan.models import find_config
    from ithaka.run.check_request import make_request
    from ithaka.run.launch import under_torchrun

    hardware = find_hardware(gpus, gpu_file, host_memory, disk)
    _check_rank(gpus, hardware.num_gpus, rank, ghost)
    context = _count_tokens(model, video, context)
    request = make_request(model, hardware, context, batch, overrides or [], adapter, traces=ghost)
    plan = request.forward_plan() if evaluate else request.plan()
    if evaluate and not plan.fits:
        need, have = map(format_bytes, plan.ledger.tiers["GPU"])
        rule = f"needs {need} per GPU, {have} available"
        raise ConfigError(
            f"--context {context} --evaluate {rule}; use a shorter --context or more GPUs"
        )
    if not plan.fits:
        facts, _ = summary.answer_request(request)
        print(json.dumps(facts, indent=2) if as_json else render.render_plan(facts))
        raise typer.Exit(ExitCode.OUT_OF_MEMORY)

    if ghost:
        _rehearse_ghost(plan, find_config(model), rank, data, as_json)
        return
    if data:
        raise ConfigError("--data needs --ghost: a rehearsal runs on random tokens")

    with loading() as status:
        from ithaka.checks import rehearse as rehearsal
        from ithaka.comm.mesh import end_process_group, start_process_group

    if under_torchrun():
        start_process_group()
    kernel = request.config.attention.kernel
    with status("trying attention kernels"):
        request = request.with_kernel(rehearsal.find_kernel(kernel, plan.shape.attention_kinds))
    plan = request.forward_plan() if evaluate else request.plan()
    truncated = rehearsal.truncate_plan(plan, find_config(model), layers, memory_only, kernel)
    rehearsal.check_cpu_memory(truncated)
    header = rehearsal.describe_rehearsal(plan, truncated)
    if not is_rank_0():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if not as_json:
        ranks_run = "all ranks" if under_torchrun() else f"rank {rank}"
        _print_rehearsal(ranks_run, header)
    with status(f"rehearsing at {truncated.work.tokens} tokens"):
        rows, peak_phase = rehearsal.rehearse_plan(plan, truncated, model, rank)
    end_process_group()
    if as_json:
        print(json.dumps(header | {"rows": rows, "peak_phase": peak_phase}, indent=2))
        return
    print(f"{format_table(rows)}\n\npeak in: {peak_phase}")
    if memory_only:
        print("memory only: attention was truncated, so its times do not apply to training")


def _check_rank(gpus: str, num_ranks: int, rank: int, ghost: bool) -> None:
    from ithaka.run.launch import under_torchrun

    if under_torchrun() and num_ranks != (started := int(os.environ["WORLD_SIZE"])):
        fix = f"use --gpus for {started}, or leave torchrun out to run one rank of {num_ranks}"
        raise ConfigError(
            f"--gpus {gpus} has {num_ranks} GPUs, but torchrun started {started} ranks; {fix}"
        )
    if rank >= num_ranks:
        raise ConfigError(
            f"--rank {rank} is not one of the {num_ranks} ranks; use 0 to {num_ranks - 1}"
        )
    if rank and under_torchrun() and not ghost:
        raise ConfigError(
            f"--rank {rank} needs one process, and under torchrun all ranks run; leave --rank out"
        )


def _print_rehearsal(ranks: str, header: Mapping[str, Any]) -> None:
    """Print what is rehearsed, before its figures."""
    sizes = "of {gpus}, {context} tokens, {layers} of {layers_of_model} layers, on {device}"
    print(f"{ranks} {sizes.format(**header)}")
    for kind in header["kinds"] if len(header["kinds"]) > 1 else ():
        rehearsed = ", ".join(map(str, kind["rehearsed"]))
        count = f"{kind['layers_of_model']} of {header['layers_of_model']} layers"
        print(f"layer {rehearsed}: {kind['kind']} ({count})")
    print("attention: kernel {kernel}, planned with {planned_kernel}".format(**header))
    settings = header["settings"].items()
    decided = [f"{name}={format_value(value)}" for name, value in settings if value is not None]
    print(f"settings: {', '.join(decided)}\nX: {header['x']}\n", flush=True)


def _rehearse_ghost(
    plan: "Plan", config: dict[str, Any], rank: int, data: Path | None, as_json: bool
) -> None:
    with loading() as status:
        from ithaka.checks import rehearse_without_gpu
        from ithaka.trace.trace_plan import trace_plan

    inputs = None
    if data is not None:
        with status("packing the data"):
            inputs = rehearse_without_gpu.find_worst_batch(data, plan, rank)
    with status("tracing a step"):
        result = rehearse_without_gpu.describe_ghost(
            plan, trace_plan(plan, config, rank, inputs), rank
        )
    print(json.dumps(result, indent=2) if as_json else _format_ghost(result))
    if not result["fits"]:
        raise typer.Exit(ExitCode.OUT_OF_MEMORY)


def _format_ghost(result: dict[str, Any]) -> str:
    rows = []
    for row in result["phases"]:
        largest = ", ".join(f"{name} {size:.1f}" for name, size in row["largest"].items())
        rows.append(
            {
                "phase": row["phase"],
                "device GiB": f"{row['device_gib']:.2f}",
                "host GiB": f"{row['host_gib']:.2f}",
                "largest, GiB": largest,
            }
        )
    device = result["device_gib"]
    host = result["host_gib"]
    note = result["note"]
    verdict = "fits" if result["fits"] else "does not fit"
    return (
        f"rank {result['rank']} of {result['gpus']}, {result['tokens']} tokens, all layers, on no "
        "device\n\n"
        f"{format_table(rows)}\n\n"
        f"peak in {result['peak_phase']}: {device['traced']:.2f} GiB, planned "
        f"{device['planned']:.2f}; "
        f"with {device['reserve']:.1f} reserved, it {verdict} in {device['capacity']:.1f}\n"
        f"host, per rank: {host['traced']:.2f} GiB, planned "
        f"{host['planned']:.2f}\n{note[0].upper()}{note[1:]}."
    )


def _count_tokens(model: str, video: str | None, context: str) -> str:
    """Return the tokens of `video`, or `context` without one."""
    from ithaka.facts.families import count_patches
    from ithaka.plan.models import find_config

    return str(count_patches(find_config(model), video)) if video else context


def doctor_command(
    disk: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Measure this disk.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what this machine has (GPU, kernels, memory, disk, versions), and what is missing for
    which feature."""
    with loading("trying kernels and measuring the disk"):
        from ithaka.checks.doctor import examine, format_findings

        findings = examine(disk)
    print(json.dumps(findings, indent=2) if as_json else format_findings(findings))


def selftest_command(
    model: Annotated[
        str, typer.Option(help="To plan and measure; by default llama3-8b, or a small one on CPUs.")
    ] = "",
    context: Annotated[
        str, typer.Option(help="Its tokens, shortened to what fits in memory and time.")
    ] = "1M",
    disk: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="For activations; by default /tmp.")
    ] = None,
    run_dir: Annotated[
        Path, typer.Option(metavar="FOLDER", help="For checkpoints; all nodes share it.")
    ] = Path(),
    rehearsed: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output of `rehearse --json`.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write figures, to share.")
    ] = None,
    save_profile: Annotated[
        bool, typer.Option("--save-profile", help="Plan with the measured rates.")
    ] = False,
    force: Force = False,
) -> None:
    """Check devices, rates, exactness, faults and a plan on all ranks of this machine, in at most
    ten minutes."""
    from ithaka.facts.model_files import read_json
    from ithaka.run.launch import decide_ranks, num_gpus, run_ranks

    num_tokens = parse_tokens(context, "--context")
    figures = (
        read_json(rehearsed, "--rehearsed ", "use the output of `ithaka rehearse --json`")
        if rehearsed
        else {}
    )
    check_writable("--run-dir", run_dir, folder=True)
    if out is not None and is_rank_0():
        check_output("--json", out, force)
    with loading():
        from ithaka.checks.selftest import run_rank

    arguments = save_profile, model, num_tokens, disk, run_dir.absolute(), figures, out
    raise typer.Exit(run_ranks(run_rank, arguments, decide_ranks("auto", num_gpus())))
