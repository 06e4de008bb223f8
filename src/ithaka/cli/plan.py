"""Commands on plans and this machine: plan, rehearse, bench, doctor."""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ithaka.cli.options import AsJson, Force, Overrides, format_table, loading, parse_tokens, print_rows
from ithaka.comm.rank import is_rank_0
from ithaka.config import (
    ConfigError,
    check_output,
    check_writable,
    format_value,
    parse_count,
    renaming,
    shell_command,
    writing_to,
)
from ithaka.config.units import unbroken, wrap
from ithaka.exits import ExitCode

if TYPE_CHECKING:
    from ithaka.plan.hardware import Hardware
    from ithaka.plan.request import PlanRequest
    from ithaka.plan.search import Plan

Model = Annotated[str, typer.Argument(help="A name (llama3.1-8b), a directory, a config.json, or a hub id.")]
Gpus = Annotated[str, typer.Option(help="For example 8xH100-80GB, or 2x8xH100-80GB for two nodes.")]
Context = Annotated[str, typer.Option(help="Tokens per sequence: 131072, 128K, 1M.")]
HostMemory = Annotated[
    str | None,
    typer.Option(help="Host memory per node: 2TB, 512GiB. By default 256 GB per GPU; for GeForce 64 GB in total."),
]
Disk = Annotated[str | None, typer.Option(help="Disk space per node for activations; by default none.")]
Video = Annotated[str | None, typer.Option(metavar="FxHxW", help="A clip instead of a context: 81x720x1280.")]
Branches = Annotated[
    str | None, typer.Option(metavar="NxTOKENS", help="Answers after one prompt of --context tokens: 8x2K.")
]
Batch = Annotated[int, typer.Option(min=1, help="Sequences per micro-step.")]
Adapter = Annotated[int | None, typer.Option(metavar="RANK", min=1, help="Train LoRA adapters of this rank.")]
GpuFile = Annotated[Path | None, typer.Option(help="JSON file with the rates of another GPU; then use --gpus 8.")]
NEXT_FILE = Path("my.yaml")  # in the commands after a plan
Seconds = Annotated[float, typer.Option(min=0, max=3600, help="Seconds per measurement.")]


def plan(
    model: Model,
    gpus: Gpus,
    context: Annotated[str | None, typer.Option(help="Tokens per sequence: 128K (the default), 1M.")] = None,
    video: Video = None,
    branches: Branches = None,
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
    from ithaka.run.request import make_request

    as_yaml = as_yaml or out is not None
    clashes = {
        "--max-context and --context": max_context and context,
        "--video and --context": all((video, context or max_context)),
        "--max-context and --yaml": max_context and as_yaml,
        "--yaml and --json": as_yaml and as_json,
        "--branches and --video, --max-context or --yaml": all((branches, any((video, max_context, as_yaml)))),
    }
    for options, conflict in clashes.items():
        if conflict:
            raise ConfigError(f"{options} cannot be combined; leave one out")
    if out is not None:
        check_writable("--out", out)
    repeated: dict[str, Any] = {"--gpus": gpus, "--gpu-file": gpu_file, "--context": context, "--video": video}
    repeated |= {"--host-memory": host_memory, "--disk": disk, "--batch": batch if batch > 1 else None}
    repeated |= {"--adapter": adapter, "--set": overrides}
    hardware = find_hardware(gpus, gpu_file, host_memory, disk)
    tokens = _count_tokens(model, video, context or "128K")
    request = make_request(model, hardware, tokens, batch, overrides or [], adapter, any_setting=as_yaml)
    request = request.with_branches(branches) if branches else request
    if as_yaml and _trains_elsewhere(request):
        fix = "use ithaka.parallelize(transformer, context=...)"
        raise ConfigError(f"--yaml writes a configuration for `ithaka train`, which trains language models; {fix}")
    if as_yaml and (result := request.plan()).fits:
        text = show.as_yaml(request, result, steps)
        if out is None:
            print(text, end="")
        else:
            check_output("--out", out, force, text)
            with writing_to("--out", out):
                out.write_text(text, encoding="utf-8")
            edits = ["set data.path"] * ("data.path" not in request.explicit)
            if request.missing_rope(result.work.context):
                edits.append("the model has fewer positions: uncomment model.rope")
            usage = "; ".join([f"wrote {out}", *edits, "then"])
            if hardware.num_nodes == 1:
                print(f"{usage}: {shell_command('train', out)}")
            else:
                print(f"{usage}:", *_start_on_nodes(hardware, out), sep="\n")
        return
    text, result = show.answer_request(request, max_context, steps, as_json)
    print(text, file=sys.stderr if as_yaml else sys.stdout)
    if result.fits and not as_json:
        repeated |= {"--context": result.work.context} if max_context else {}
        print("", *_list_next_commands(request, result, repeated, steps), sep="\n")
    raise typer.Exit(ExitCode.DONE if result.fits else ExitCode.OUT_OF_MEMORY)


def _trains_elsewhere(request: "PlanRequest") -> bool:
    """Whether the model is trained in the user's own loop, so that settings of the loss have no effect."""
    return "loss.type" in request.space.shape.root.refuses


def _list_next_commands(
    request: "PlanRequest", plan: "Plan", options: dict[str, Any], steps: int | None
) -> Iterator[str]:
    """What to run after a printed plan. `options`: those that plan and rehearse share."""
    lists = {option: value if isinstance(value, list) else [value] for option, value in options.items()}
    pairs = [(option, value) for option, values in lists.items() for value in values if value is not None]
    words = [shlex.quote(str(word)) for word in (request.model, *chain(*pairs))]
    if plan.work.spans:
        yield "Next: pack prompts and their branches with ithaka.pack_prefixes (docs/hugging-face.md)"
        return
    if _trains_elsewhere(request):
        yield "Next, in your training loop (docs/video.md):"
        yield f"  transformer = ithaka.parallelize(transformer, context={plan.work.context})"
    else:
        yield "Next: write a configuration, set data.path in it, and train"
        yield _fold("ithaka", "plan", *words, *(["--steps", str(steps)] if steps else []), "--out", str(NEXT_FILE))
        several = plan.hardware.num_nodes > 1
        yield from _start_on_nodes(plan.hardware, NEXT_FILE) if several else [_fold("ithaka", "train", str(NEXT_FILE))]
    if plan.hardware.num_gpus > 1:
        yield "To check this plan on one of these GPUs first:"
        yield _fold("ithaka", "rehearse", *words)


def _start_on_nodes(hardware: "Hardware", file: Path) -> Iterator[str]:
    """The commands of docs/several-nodes.md, for a configuration."""
    nodes, per_node, name = f"{hardware.num_nodes}", f"{hardware.gpus_per_node}", shlex.quote(file.stem)
    torchrun = f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint".split()
    train = ["--numa-binding", "node", "-m", "ithaka", "train", shlex.quote(str(file))]
    yield "With torchrun, on every node, with the name of one of them as HEAD:"
    yield _fold(*torchrun, "HEAD:29500", "--rdzv-id", name, *train)
    yield f"With Slurm (sbatch --nodes={nodes} --ntasks-per-node=1 --gpus-per-node={per_node} --mem=0 --exclusive):"
    yield """  HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"""
    resumes = ["--run-dir", f"runs/{name}", "--resume", "auto"]
    yield _fold("srun", *torchrun, '"$HEAD:29500"', "--rdzv-id", '"$SLURM_JOB_ID"', *train, *resumes)


def _fold(*words: str) -> str:
    """An indented command of words that are quoted for a shell. Lines break before options."""
    text = re.sub(" (?!-)", "\0", " ".join(map(unbroken, words)))
    return "\n".join(wrap(text, "  ", "      ", end=" \\"))


def rehearse(
    model: Model,
    gpus: Gpus,
    context: Context = "128K",
    video: Video = None,
    layers: Annotated[
        int, typer.Option(min=1, help="Layers to run, at least one of each kind; the others are extrapolated.")
    ] = 2,
    host_memory: HostMemory = None,
    disk: Disk = None,
    batch: Batch = 1,
    adapter: Adapter = None,
    overrides: Overrides = None,
    gpu_file: GpuFile = None,
    evaluate: Annotated[bool, typer.Option("--evaluate", help="Forward only, as in `ithaka evaluate`.")] = False,
    memory_only: Annotated[bool, typer.Option("--memory-only", help="Truncate attention to save time.")] = False,
    ghost: Annotated[
        bool, typer.Option("--ghost", help="Only trace memory, of all layers, without a GPU: in seconds.")
    ] = False,
    rank: Annotated[int, typer.Option(min=0, help="The rank to run, or to trace with --ghost.")] = 0,
    data: Annotated[
        Path | None, typer.Option(help="With --ghost: a run's configuration, whose worst packed batch is traced.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run one rank of these GPUs on this device, or all under torchrun, and compare measurements with the plan."""
    from ithaka.config.units import format_bytes
    from ithaka.plan import show
    from ithaka.plan.hardware import find_hardware
    from ithaka.plan.models import find_config
    from ithaka.run.launch import under_torchrun
    from ithaka.run.request import make_request

    hardware = find_hardware(gpus, gpu_file, host_memory, disk)
    if under_torchrun() and hardware.num_gpus != (ranks := int(os.environ["WORLD_SIZE"])):
        fix = f"use --gpus for {ranks}, or leave torchrun out to run one rank of {hardware.num_gpus}"
        raise ConfigError(f"--gpus {gpus} has {hardware.num_gpus} GPUs, but torchrun started {ranks} ranks; {fix}")
    if rank >= (num_ranks := hardware.num_gpus):
        raise ConfigError(f"--rank {rank} is not one of the {num_ranks} ranks; use 0 to {num_ranks - 1}")
    if rank and under_torchrun() and not ghost:
        raise ConfigError(f"--rank {rank} needs one process, and under torchrun all ranks run; leave --rank out")
    context = _count_tokens(model, video, context)
    request = make_request(model, hardware, context, batch, overrides or [], adapter, traces=ghost)
    plan = request.forward_plan() if evaluate else request.plan()
    if evaluate and not plan.fits:
        need, have = map(format_bytes, plan.ledger.tiers["GPU"])
        rule = f"needs {need} per GPU, {have} available"
        raise ConfigError(f"--context {context} --evaluate {rule}; use a shorter --context or more GPUs")
    if not plan.fits:
        print(show.answer_request(request, False, None, as_json)[0])
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
    truncated = rehearsal.truncate_plan(plan, layers, memory_only, kernel, find_config(model))
    rehearsal.check_cpu_memory(truncated)
    header = rehearsal.describe_rehearsal(plan, truncated)
    if not is_rank_0():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if not as_json:
        decided = {name: format_value(value) for name, value in plan.settings.items() if value is not None}
        settings = ", ".join(f"{name}={value}" for name, value in decided.items())
        print("all ranks" if under_torchrun() else f"rank {rank}", end=" ")
        print("of {gpus}, {context} tokens, {layers} of {layers_of_model} layers, on {device}".format(**header))
        for kind in header["kinds"] if len(header["kinds"]) > 1 else ():
            rehearsed, num_layers = ", ".join(map(str, kind["rehearsed"])), header["layers_of_model"]
            print(f"layer {rehearsed}: {kind['kind']} ({kind['layers_of_model']} of {num_layers} layers)")
        print("attention: kernel {kernel}, planned with {planned_kernel}".format(**header))
        print(f"settings: {settings}\nX: {header['x']}\n", flush=True)
    with status(f"rehearsing at {truncated.work.tokens} tokens"):
        rows, peak_phase = rehearsal.rehearse_plan(plan, truncated, model, rank)
    end_process_group()
    if as_json:
        print(json.dumps(header | {"rows": rows, "peak_phase": peak_phase}, indent=2))
        return
    print(f"{format_table(rows)}\n\npeak in: {peak_phase}")
    if memory_only:
        print("memory only: attention was truncated, so its times do not apply to training")


def _rehearse_ghost(plan: Any, config: dict[str, Any], rank: int, data: Path | None, as_json: bool) -> None:
    with loading() as status:
        from ithaka.checks import ghost
        from ithaka.run.trace import trace_plan

    inputs = None
    if data is not None:
        with status("packing the data"):
            inputs = ghost.find_worst_batch(data, plan, rank)
    with status("tracing a step"):
        result = ghost.describe_ghost(plan, trace_plan(plan, config, rank, inputs), rank)
    print(json.dumps(result, indent=2) if as_json else _format_ghost(result))
    if not result["fits"]:
        raise typer.Exit(ExitCode.OUT_OF_MEMORY)


def _format_ghost(result: dict[str, Any]) -> str:
    rows = [
        {
            "phase": row["phase"],
            "device GiB": f"{row['device_gib']:.2f}",
            "host GiB": f"{row['host_gib']:.2f}",
            "largest, GiB": ", ".join(f"{name} {size:.1f}" for name, size in row["largest"].items()),
        }
        for row in result["phases"]
    ]
    device, host, note = result["device_gib"], result["host_gib"], result["note"]
    verdict = "fits" if result["fits"] else "does not fit"
    return (
        f"rank {result['rank']} of {result['gpus']}, {result['tokens']} tokens, all layers, on no device\n\n"
        f"{format_table(rows)}\n\n"
        f"peak in {result['peak_phase']}: {device['traced']:.2f} GiB, planned {device['planned']:.2f}; "
        f"with {device['reserve']:.1f} reserved, it {verdict} in {device['capacity']:.1f}\n"
        f"host, per rank: {host['traced']:.2f} GiB, planned {host['planned']:.2f}\n{note[0].upper()}{note[1:]}."
    )


def attention(
    tokens: Annotated[str | None, typer.Option(help="Sequence lengths; by default 16K,64K, or 1K,4K on a CPU.")] = None,
    heads: Annotated[int, typer.Option(min=1)] = 1,
    kv_heads: Annotated[int, typer.Option(min=1)] = 1,
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    kernels: Annotated[str, typer.Option(help="Kernel names, auto or all.")] = "auto",
    blocks: Annotated[str, typer.Option(help="Block sizes in q x kv tokens, such as auto,128Kx64K.")] = "auto",
    documents: Annotated[int, typer.Option(min=1, help="Number of packed documents of equal length.")] = 1,
    window: Annotated[int | None, typer.Option(min=1, help="Tokens of a sliding window; by default none.")] = None,
    seconds: Seconds = 3.0,
    as_json: AsJson = False,
) -> None:
    """Measure sustained TFLOP/s of causal attention, forward and backward, on random data."""
    lengths = [parse_tokens(text, "--tokens") for text in tokens.split(",")] if tokens else []
    sizes = [None if text == "auto" else _parse_blocks(text) for text in blocks.split(",")]
    with loading() as status:
        from ithaka.attention.choose import available_kernels
        from ithaka.checks.bench import AttentionCase, device_and_dtype, measure_attention

    if heads % kv_heads:
        raise ConfigError(f"--heads={heads} is not a multiple of --kv-heads={kv_heads}; use {kv_heads}, for example")
    device, dtype = device_and_dtype()
    lengths = lengths or ([2**14, 2**16] if device.type == "cuda" else [2**10, 2**12])
    names = available_kernels(device, dtype, head_dim) if kernels == "all" else kernels.split(",")
    if documents > min(lengths):
        raise ConfigError(f"--documents={documents} exceeds --tokens={min(lengths)}; use at most one per token")
    rows = []
    for name, length, block in product(names, lengths, sizes):
        case = AttentionCase(name, length, block, heads, kv_heads, head_dim, documents, window)
        with status(f"measuring kernel {name} at {length} tokens"), renaming({"attention.kernel": "--kernels"}):
            rows.append(measure_attention(case, device, dtype, seconds))
    print_rows(rows, as_json)


def device(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")] = Path("gpu.json"),
    seconds: Seconds = 3.0,
    force: Force = False,
) -> None:
    """Measure matmul, attention and copies on this device, and write a file for `ithaka plan --gpu-file`."""
    check_output("--out", out, force)
    with loading() as status:
        from ithaka.checks.bench import device_and_dtype, measure_device

    with status("measuring this device"):
        gpu = measure_device(*device_and_dtype(), seconds)
    with writing_to("--out", out):
        out.write_text(json.dumps(gpu, indent=1) + "\n", encoding="utf-8")
    print(format_table([{"figure": name, "value": float(gpu[name])} for name in gpu if not isinstance(gpu[name], str)]))
    print(gpu["source"])
    print(f"wrote {out}; use it with: {shell_command('plan', 'MODEL', '--gpus', 8, '--gpu-file', out)}")


def network(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")] = Path("network.json"),
    size: Annotated[int, typer.Option(min=1, metavar="MIB", help="MiB that each rank sends per call.")] = 256,
    force: Force = False,
) -> None:
    """Measure bandwidth between ranks, and write a file for `ithaka plan --gpu-file`. Needs torchrun."""
    from ithaka.run.launch import run_ranks, under_torchrun

    if not under_torchrun():
        raise ConfigError("bench network needs several ranks; use torchrun --nproc-per-node 8 -m ithaka bench network")
    check_output("--out", out, force)
    raise typer.Exit(run_ranks(_network_rank, (out, size), 1))


def _network_rank(out: Path, size: int) -> None:
    with loading():
        import torch.distributed as dist

        from ithaka.checks.bench import device_and_dtype, measure_network, network_figures

    device, _ = device_and_dtype()
    rows = measure_network(device, size)
    if dist.get_rank() == 0:
        print(format_table(rows) if rows else "one rank: nothing to measure")
        with writing_to("--out", out):
            out.write_text(json.dumps(network_figures(rows, device), indent=1) + "\n", encoding="utf-8")
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        gpus = f"{dist.get_world_size() // per_node}x{per_node}"
        print(f"wrote {out}; use it with: {shell_command('plan', 'MODEL', '--gpus', gpus, '--gpu-file', out)}")
    dist.barrier()
    dist.destroy_process_group()


def _count_tokens(model: str, video: str | None, context: str) -> str:
    """Return the tokens of `video`, or `context` without one."""
    from ithaka.plan.models import find_config
    from ithaka.plan.read_config import count_patches

    return str(count_patches(find_config(model), video)) if video else context


def _parse_blocks(text: str) -> tuple[int, int]:
    block_q, _, block_kv = map(parse_count, text.partition("x"))
    if not block_q or not block_kv:
        raise ConfigError(f"--blocks={text} is not a block size; write q x kv tokens as 128Kx64K, or auto")
    return block_q, block_kv


def doctor(
    disk: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Measure this disk.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what this machine has (GPU, kernels, memory, disk, versions), and what is missing for which feature."""
    with loading("trying kernels and measuring the disk"):
        from ithaka.checks.doctor import examine, format_findings

        findings = examine(disk)
    print(json.dumps(findings, indent=2) if as_json else format_findings(findings))


def selftest(
    model: Annotated[str, typer.Option(help="To plan and measure; by default llama3-8b, or a small one on CPUs.")] = "",
    context: Annotated[str, typer.Option(help="Its tokens, shortened to what fits in memory and time.")] = "1M",
    disk: Annotated[Path | None, typer.Option(metavar="FOLDER", help="For activations; by default /tmp.")] = None,
    run_dir: Annotated[Path, typer.Option(metavar="FOLDER", help="For checkpoints; all nodes share it.")] = Path(),
    rehearsed: Annotated[Path | None, typer.Option(metavar="FILE", help="Output of `rehearse --json`.")] = None,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write figures, to share.")] = None,
    save_profile: Annotated[bool, typer.Option("--save-profile", help="Plan with the measured rates.")] = False,
    force: Force = False,
) -> None:
    """Check devices, rates, exactness, faults and a plan on all ranks of this machine, in at most ten minutes."""
    from ithaka.plan.read_config import read_json
    from ithaka.run.launch import decide_ranks, num_gpus, run_ranks

    num_tokens = parse_tokens(context, "--context")
    figures = read_json(rehearsed, "--rehearsed ", "use the output of `ithaka rehearse --json`") if rehearsed else {}
    check_writable("--run-dir", run_dir, folder=True)
    if out is not None and is_rank_0():
        check_output("--json", out, force)
    with loading():
        from ithaka.checks.selftest import run_rank

    arguments = save_profile, model, num_tokens, disk, run_dir.absolute(), figures, out
    raise typer.Exit(run_ranks(run_rank, arguments, decide_ranks("auto", num_gpus())))
