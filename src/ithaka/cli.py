"""The `ithaka` command: parsing and printing only."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

import ithaka
from ithaka.config import (
    ConfigError,
    check_output,
    check_writable,
    explicit_settings,
    format_value,
    parse_count,
    shell_command,
)
from ithaka.dist.rank import is_rank_0
from ithaka.exits import ExitCode, is_transient

if TYPE_CHECKING:
    from ithaka.preflight.run import Run


class Commands(TyperGroup):
    """Our own errors, and transient ones, end a command with their message on stderr and their exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if not type(error).__module__.startswith("ithaka.") and not is_transient(error):
                raise
            from ithaka.launch import outcome_from_error, print_outcome

            outcome = outcome_from_error(error)
            print_outcome(outcome)
            raise typer.Exit(outcome.code) from None


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train standard transformers on sequences of 100 thousand to 10 million tokens.",
)
bench = typer.Typer(no_args_is_help=True, help="Measure what this machine gives.")
app.add_typer(bench, name="bench")

# Arguments and options that several commands have.
Model = Annotated[str, typer.Argument(help="A name (llama3.1-8b), a directory, a config.json, or an id on the hub.")]
ConfigFile = Annotated[Path | None, typer.Argument(metavar="CONFIG.yaml", help="Without: a small model to watch.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Decide one setting.")]
Ranks = Annotated[int | None, typer.Option(help="Local ranks; by default one per GPU, or 2 on CPU.")]
# Text: as a path, an empty one would be the current folder.
RunDir = Annotated[str | None, typer.Option(metavar="DIR", help="Of the run; by default runs/<date>-<time>.")]
Force = Annotated[bool, typer.Option("--force", help="Replace files that are there, or use a folder that has some.")]
Gpus = Annotated[str, typer.Option(help="For example 8xH100-80GB, or 2x8xH100-80GB for two nodes.")]
Context = Annotated[str, typer.Option(help="Tokens per sequence: 131072, 128K, 1M.")]
HostMemory = Annotated[
    str | None,
    typer.Option(help="Host memory per node: 2TB, 512GiB. By default 256 GB per GPU, 64 GB in all for GeForce."),
]
Disk = Annotated[str | None, typer.Option(help="Disk per node for activations; by default none.")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences per micro-step.")]
Adapter = Annotated[int | None, typer.Option(metavar="RANK", min=1, help="Train LoRA adapters; freeze the rest.")]
GpuFile = Annotated[Path | None, typer.Option(help="A GPU of your own, as JSON; then --gpus 8.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
HowLong = Annotated[float, typer.Option(min=0, help="How long to measure each figure.")]


def main() -> None:
    # PyTorch's profiler reads it when torch is imported; without it, its log stands between the lines of a run.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun
        from ithaka.launch import exit_with_parent

        exit_with_parent()
    app()


@contextmanager
def _loading(what: str = "loading PyTorch") -> Iterator[Callable[[str], AbstractContextManager[None]]]:
    """Around imports of PyTorch, which take seconds; gives `status`, which says what else does."""
    from ithaka.train.console import status

    with status(what):
        yield status


@app.callback(invoke_without_command=True)
def _common(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"ithaka {ithaka.__version__}")
        raise typer.Exit()


@app.command()
def train(
    config: ConfigFile = None,
    overrides: Overrides = None,
    ranks: Ranks = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR|auto", help="Go on from its latest checkpoint; auto: in train.run_dir, or start."
        ),
    ] = None,
    run_dir: RunDir = None,
    force: Force = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts after a failure without a new checkpoint.")] = 0,
    evaluate_only: Annotated[
        bool, typer.Option("--evaluate-only", help="Print the validation loss (with --resume, of that run).")
    ] = False,
) -> None:
    """Train a model: the one CONFIG.yaml names, or without it a small one on Python's own sources."""
    if evaluate_only and resume is None:
        with tempfile.TemporaryDirectory(prefix="ithaka-") as name:
            _run(config, overrides, ranks, f"{name}/run", trains=False)
    _run(config, overrides, ranks, run_dir, resume, max_restarts, trains=not evaluate_only, force=force)


def train_rank(run: Run, only_profile: bool = False) -> int:
    """What every rank runs; rank 0 then writes the report. Returns the exit code."""
    with _loading("starting the ranks"):
        from ithaka import launch
        from ithaka.dist.mesh import destroy_subgroups, end_process_group, free_memory, start_process_group
        from ithaka.train import loop

        start_process_group()

    from ithaka.report.page import live_report, write_report

    tells = is_rank_0()
    with live_report(run.run_dir) if tells else nullcontext():
        code = loop.train(run, only_profile)
    if launch.ranks_persist() and not code and run.config.train.steps < run.config.ends[-1]:
        free_memory()  # the model's first, which refers to the groups
        destroy_subgroups()
    else:
        end_process_group()
    if tells:
        try:
            print(f"Report: {write_report([run.run_dir])}", flush=True)
        except Exception as error:  # the run is done and saved: it must not fail now
            print(f"Report: none ({error})", flush=True)
    return code


def validate_rank(run: Run) -> None:
    with _loading("starting the ranks"):
        from ithaka.dist.mesh import end_process_group
        from ithaka.train import loop

    loop.validate_only(run)
    end_process_group()


@app.command()
def profile(
    config: ConfigFile = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to run; the last one (on a GPU, two) is profiled.")] = 4,
    overrides: Overrides = None,
    ranks: Ranks = None,
    run_dir: RunDir = None,
    force: Force = False,
) -> None:
    """Run a few steps of a training run and show where memory and time go. Nothing else is saved."""
    _run(config, overrides, ranks, run_dir, profiled_steps=steps, force=force)


@app.command()
def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Runs, side by side.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="By default in the first run's directory.")] = None,
    force: Force = False,
) -> None:
    """Write one HTML page about a run, or several side by side. It opens without a network."""
    from ithaka.report.page import write_report

    if out is not None:
        check_output("--out", out, force)
    print(write_report(run_dirs, out))


def _run(
    config: ConfigFile,
    overrides: Overrides,
    ranks: Ranks,
    run_dir: RunDir,
    resume: Path | None = None,
    max_restarts: int = 0,
    profiled_steps: int = 0,
    trains: bool = True,
    force: bool = False,
) -> None:
    """Check the settings, print the plan and start the ranks; restart them from their last checkpoint if they fail."""
    folder = None if run_dir is None else _path(run_dir, "--run-dir")
    with _loading() as status:
        from ithaka import launch
        from ithaka.checkpoint.files import latest_name
        from ithaka.plan import show
        from ithaka.preflight.preflight import preflight
        from ithaka.preflight.resolve import AUTO

    changes = [*(overrides or []), *([f"parallel.ranks={ranks}"] if ranks is not None else [])]
    if profiled_steps:
        decided = {"train.steps": f"{profiled_steps}", "train.epochs": "null", "profile.every": f"{profiled_steps}"}
        decided |= {"train.validate_every": "0", "train.validate_sequences": "0"}
        for name in sorted(explicit_settings(None, changes) & decided.keys()):
            raise ConfigError(f"--set {name} has no effect on a profile; use --steps, or leave it out")
        changes += [f"{name}={value}" for name, value in decided.items()]
    if max_restarts and launch.under_torchrun():
        raise ConfigError(f"--max-restarts={max_restarts} is for local ranks; give it to torchrun, before -m ithaka")
    tells = is_rank_0()
    restarts = launch.Restarts(max_restarts)
    while True:  # entries of a curriculum, and restarts
        try:
            with status("checking settings and data"):
                run = preflight(config, changes, resume, folder, trains, force)
        except Exception as error:
            if not is_transient(error):
                raise
            outcome = launch.outcome_from_error(error)
            launch.print_outcome(outcome)
            if restarts.allow(outcome.code):
                continue
            raise typer.Exit(outcome.code) from None
        if not trains:
            raise typer.Exit(launch.run_ranks(validate_rank, (run,), run.num_ranks))
        train = run.config.train
        if run.finished:
            if tells:
                print(f"{run.run_dir} is finished: {run.last_step} steps are done", flush=True)
            raise typer.Exit(ExitCode.DONE)
        if run.plan is not None and tells:
            model, steps = run.config.model, train.steps if train.epochs is None else None
            print(show.as_text(run.plan, str(model.path or model.embedded), steps), flush=True)
        # A process that ends gives all of its memory back.
        apart = max_restarts > 0 or bool(run.config.curriculum and launch.num_gpus())
        before = latest_name(run.run_dir)
        code = launch.run_ranks(train_rank, (run, profiled_steps > 0), run.num_ranks, apart)
        progressed = latest_name(run.run_dir) != before
        if (code or train.steps == run.config.ends[-1]) and not restarts.allow(code, progressed):
            break
        if resume is None:
            resume, folder = AUTO, run.run_dir
    raise typer.Exit(code)


@app.command()
def data(
    config: ConfigFile = None,
    overrides: Overrides = None,
    ranks: Ranks = None,
    page: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page instead.")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Show what would be trained on: figures, and packed sequences with the trained tokens marked. Needs no GPU."""
    if page is not None:
        check_output("--html", page, force)
    with _loading() as status:
        from rich.console import Console

        from ithaka import show_data
        from ithaka.preflight.resolve import resolve

    with status("reading and packing the data"):
        changes = [*(overrides or []), *([f"parallel.ranks={ranks}"] if ranks is not None else [])]
        settings = resolve(config, changes).at(0)
        view = show_data.read_data(settings, show_data.TERMINAL if page is None else show_data.PAGE)
    if page is not None:
        page.write_text(show_data.data_page(view, f"Data of {config or 'ithaka train'}"), encoding="utf-8")
    if as_json:
        print(json.dumps(view.figures, indent=2))
    elif page is not None:
        print(f"written to {page}")
    else:
        show_data.print_data(view, Console(highlight=False))


@app.command()
def plan(
    model: Model,
    gpus: Gpus,
    context: Annotated[str | None, typer.Option(help="Tokens per sequence: 128K (if not given), 1M.")] = None,
    host_memory: HostMemory = None,
    disk: Disk = None,
    batch: Batch = 1,
    adapter: Adapter = None,
    overrides: Overrides = None,
    gpu_file: GpuFile = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Say how long so many steps take.")] = None,
    max_context: Annotated[bool, typer.Option("--max-context", help="The longest that fits.")] = False,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="As a configuration for `ithaka train`.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write that configuration here.")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Say what fits and how fast it will be, before anything is rented or started."""
    from ithaka.plan import show
    from ithaka.plan.hardware import find_hardware
    from ithaka.plan.request import make_request

    as_yaml = as_yaml or out is not None
    clashes = {
        "--max-context and --context": max_context and context,
        "--max-context and --yaml": max_context and as_yaml,
        "--yaml and --json": as_yaml and as_json,
    }
    for both, asked in clashes.items():
        if asked:
            raise ConfigError(f"{both} cannot be asked for together; leave one out")
    if out is not None:
        check_writable("--out", out)
    hardware = find_hardware(gpus, gpu_file, host_memory, disk)
    question = make_request(model, hardware, context or "128K", batch, overrides or [], adapter, any_setting=as_yaml)
    if as_yaml and (found := question.plan()).fits:
        text = show.as_yaml(question, found, steps)
        if out is None:
            print(text, end="")
        else:
            check_output("--out", out, force, text)
            out.write_text(text, encoding="utf-8")
            lacks = question.missing_rope(found.work.context)
            way = "the model has fewer positions: uncomment model.rope in it, then" if lacks else "use it with"
            print(f"written to {out}; {way}: {shell_command('train', out)}")
    else:
        text, fits = show.answer_request(question, max_context, steps, as_json)
        print(text, file=sys.stderr if as_yaml else sys.stdout)
        raise typer.Exit(ExitCode.DONE if fits else ExitCode.OUT_OF_MEMORY)


@app.command()
def rehearse(
    model: Model,
    gpus: Gpus,
    context: Context = "128K",
    layers: Annotated[int, typer.Option(min=1, help="Layers to run; the rest is extrapolated.")] = 2,
    host_memory: HostMemory = None,
    disk: Disk = None,
    batch: Batch = 1,
    adapter: Adapter = None,
    overrides: Overrides = None,
    gpu_file: GpuFile = None,
    evaluate: Annotated[bool, typer.Option("--evaluate", help="Forward alone, as `ithaka evaluate` does it.")] = False,
    memory_only: Annotated[bool, typer.Option("--memory-only", help="Cut attention short, to save time.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run rank 0 of all these GPUs on this one device, and print measured beside planned."""
    from ithaka.plan import show
    from ithaka.plan.hardware import find_hardware
    from ithaka.plan.request import make_request

    hardware = find_hardware(gpus, gpu_file, host_memory, disk)
    question = make_request(model, hardware, context, batch, overrides or [], adapter)
    plan = question.forward_plan() if evaluate else question.plan()
    if evaluate and not plan.fits:
        need, have = map(show.format_bytes, plan.ledger.tiers["GPU"])
        way = "use a shorter --context or more GPUs"
        raise ConfigError(f"--context {context} to evaluate needs {need} of each GPU, which has {have}; {way}")
    if not plan.fits:
        print(show.answer_request(question, False, None, as_json)[0])
        raise typer.Exit(ExitCode.OUT_OF_MEMORY)

    with _loading() as status:
        from ithaka import rehearse as rehearsal

    named = question.config.attention.kernel
    with status("trying attention kernels"):
        question = question.with_kernel(rehearsal.find_kernel(named, plan.shape.head_dim))
    plan = question.forward_plan() if evaluate else question.plan()
    few = rehearsal.truncate_plan(plan, min(layers, plan.shape.num_layers), memory_only, named)
    rehearsal.check_cpu_memory(few)
    about = rehearsal.describe_rehearsal(plan, few)
    if not as_json:
        settings = ", ".join(
            f"{name}={format_value(value)}" for name, value in plan.settings.items() if value is not None
        )
        print("rank 0 of {gpus}, {context} tokens, {layers} of {layers_of_model} layers, on {device}".format(**about))
        print("attention: kernel {kernel}, planned with the rates of {planned_kernel}".format(**about))
        print(f"settings: {settings}\nX: {about['x']}\n", flush=True)
    with status(f"rehearsing at {few.work.tokens} tokens"):
        rows, peak_phase = rehearsal.rehearse_plan(plan, few, model)
    if as_json:
        print(json.dumps(about | {"rows": rows, "peak_phase": peak_phase}, indent=2))
        return
    print(f"{_table(rows)}\n\npeak in: {peak_phase}")
    if memory_only:
        print("memory only: attention was cut short, so its times say nothing about training")


@app.command()
def evaluate(
    models: Annotated[
        list[Path],
        typer.Argument(metavar="MODEL|RUN|ADAPTER|FILE...", help="One directory, or two; or what --json wrote before."),
    ],
    contexts: Annotated[str, typer.Option(help="Lengths; loss is measured at the largest.")] = "8K,32K",
    data: Annotated[Path | None, typer.Option(metavar="PATH", help="As data.path; unseen in training.")] = None,
    documents: Annotated[int, typer.Option(min=1, help="Long documents to read.")] = 8,
    samples: Annotated[int, typer.Option(min=1, help="Of each retrieval task, at each length and depth.")] = 2,
    ranks: Ranks = None,
    page: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page as well.")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Measure what a model, or two, do with their context: loss by position, what the long context gives, retrieval."""
    if len(models) > 2:
        raise ConfigError(f"{len(models)} models are too many side by side; give one or two")
    lengths = sorted({_count(text, "--contexts") for text in contexts.split(",")})
    if page is not None:
        check_output("--html", page, force)
    with _loading() as status:
        from ithaka import evaluate as evaluation

    with status("evaluating"):
        found = evaluation.evaluate_all(models, lengths, data, ranks, documents, samples)
    if page is not None:
        page.write_text(evaluation.as_page(found), encoding="utf-8")
    if as_json:
        print(json.dumps(found if len(found) > 1 else found[0], indent=2))
        return
    for title, rows in evaluation.tables(found):
        print(f"{title}\n{_table(rows)}\n")
    print(evaluation.MEANING)


@app.command()
def sample(
    model: Annotated[
        Path, typer.Argument(metavar="RUN|MODEL|ADAPTER", help="A run (its latest checkpoint), or a model.")
    ],
    prompt: Annotated[str, typer.Option(help="The beginning; what the user says, if there is a chat template.")],
    tokens: Annotated[int, typer.Option(min=1, help="At most so many are generated.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0: the likeliest token each time.")] = 0.7,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text, chat template or not.")] = False,
) -> None:
    """Generate a short text, on one device, with plain transformers."""
    with _loading() as status:
        from ithaka.sample import sample

    with status("generating"):
        text = sample(model, prompt, tokens, temperature, raw)
    print(text)


@app.command()
def verify(
    model: Annotated[str, typer.Argument(metavar="MODEL|CONFIG.yaml", help="A directory, a config.json or a name.")],
    cp: Annotated[int | None, typer.Option(min=1, help="Ranks that share a sequence; by default 4.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check two layers of your model on cp ranks against plain transformers: loss, gradients, masks, documents."""
    from ithaka.config import embedded_model, load_config
    from ithaka.plan.models import find_config

    settings, path = None, Path(model).expanduser()
    if path.suffix in (".yaml", ".yml"):
        settings = load_config(path)
        source = settings.model.path or embedded_model(settings.model.embedded)
    else:
        source = path if path.exists() else find_config(model)
    with _loading() as status:
        from ithaka.verify import verify

    with status("comparing with plain transformers"):
        found = verify(source, settings, cp)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        what = "two layers of a {model_type}, {weights} weights, cp={cp} on {device}, beside plain transformers"
        print(what.format(**found))
        print(_table([_shown_check(**check) for check in found["checks"]]))
        off = [check["part"] for check in found["checks"] if not check["ok"]]
        print(f"off: {', '.join(off)}" if off else "all parts are right")
    raise typer.Exit(ExitCode.DONE if found["ok"] else ExitCode.FAILED)


def _shown_check(part: str, where: str, error: float, allowed: float | None, ok: bool) -> dict[str, str]:
    margin = "information" if allowed is None else f"{min(allowed / max(error, 1e-16), 1e6):,.0f} x" if allowed else ""
    limit = "" if allowed is None else f"{allowed:.0e}"
    words = (part if ok else f"OFF: {part}", f"{error:.1e}", limit, margin, where)
    return dict(zip(("part", "error", "allowed", "margin", "of"), words, strict=True))


@bench.command("attention")
def bench_attention(
    tokens: Annotated[str | None, typer.Option(help="Lengths, by default 16K,64K; on a CPU 1K,4K.")] = None,
    heads: Annotated[int, typer.Option(min=1)] = 1,
    kv_heads: Annotated[int, typer.Option(min=1)] = 1,
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    kernels: Annotated[str, typer.Option(help="Names, auto or all.")] = "auto",
    blocks: Annotated[str, typer.Option(help="q x kv tokens, such as auto,128Kx64K.")] = "auto",
    documents: Annotated[int, typer.Option(min=1, help="Equal documents packed in the tokens.")] = 1,
    seconds: HowLong = 3.0,
    as_json: AsJson = False,
) -> None:
    """TFLOP/s of causal attention, forward and backward, sustained on random data."""
    lengths = [_count(text, "--tokens") for text in tokens.split(",")] if tokens else []
    sizes = [None if text == "auto" else _blocks(text) for text in blocks.split(",")]
    with _loading() as status:
        from ithaka.attention.kernels import available_kernels
        from ithaka.bench import AttentionCase, device_and_dtype, measure_attention

    device, dtype = device_and_dtype()
    lengths = lengths or ([2**14, 2**16] if device.type == "cuda" else [2**10, 2**12])
    names = available_kernels(device, dtype, head_dim) if kernels == "all" else kernels.split(",")
    rows = []
    for name, length, block in product(names, lengths, sizes):
        case = AttentionCase(name, length, block, heads, kv_heads, head_dim, documents)
        with status(f"measuring kernel {name} at {length} tokens"):
            rows.append(measure_attention(case, device, dtype, seconds))
    _print(rows, as_json)


@bench.command("device")
def bench_device(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")] = Path("gpu.json"),
    seconds: HowLong = 3.0,
    force: Force = False,
) -> None:
    """Measure matmul, attention and copies here, and write them for `ithaka plan --gpu-file`."""
    check_output("--out", out, force)
    with _loading() as status:
        from ithaka.bench import device_and_dtype, measure_device

    with status("measuring this device"):
        gpu = measure_device(*device_and_dtype(), seconds)
    out.write_text(json.dumps(gpu, indent=1) + "\n", encoding="utf-8")
    print(_table([{"figure": name, "value": float(gpu[name])} for name in gpu if not isinstance(gpu[name], str)]))
    print(gpu["source"])
    print(f"written to {out}; use it with: {shell_command('plan', 'MODEL', '--gpus', 8, '--gpu-file', out)}")


@bench.command("network")
def bench_network(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")] = Path("network.json"),
    size: Annotated[int, typer.Option(min=1, metavar="MIB", help="What a rank sends in a call.")] = 256,
    force: Force = False,
) -> None:
    """Measure what ranks send each other, and write it for `ithaka plan --gpu-file`. Start it with torchrun."""
    from ithaka.launch import run_ranks, under_torchrun

    if not under_torchrun():
        raise ConfigError(
            "bench network measures between ranks; use torchrun --nproc-per-node 8 -m ithaka bench network"
        )
    check_output("--out", out, force)
    raise typer.Exit(run_ranks(_network_rank, (out, size), 1))


def _network_rank(out: Path, size: int) -> None:
    with _loading():
        import torch.distributed as dist

        from ithaka.bench import device_and_dtype, measure_network, network_figures

    device, _ = device_and_dtype()
    rows = measure_network(device, size)
    if dist.get_rank() == 0:
        print(_table(rows) if rows else "one rank: nothing is sent")
        out.write_text(json.dumps(network_figures(rows, device), indent=1) + "\n", encoding="utf-8")
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        gpus = f"{dist.get_world_size() // per_node}x{per_node}"
        print(f"written to {out}; use it with: {shell_command('plan', 'MODEL', '--gpus', gpus, '--gpu-file', out)}")
    dist.barrier()
    dist.destroy_process_group()


@bench.command("gate")
def bench_gate(
    beside: Annotated[Path, typer.Option(metavar="FILE", help="Recorded figures; written if absent.")],
    as_json: AsJson = False,
) -> None:
    """Seconds and peak of a Llama-3-8B layer at three lengths beside recorded ones; exit code 1 beyond 2 %."""
    from ithaka.plan.shape import read_json

    recorded = read_json(beside, "--beside ", "give what `ithaka bench gate` wrote") if beside.exists() else {}
    check_writable("--beside", beside)
    with _loading():
        from ithaka.rehearse import GATE_ALLOWS, gate

    rows = gate(recorded)
    _print(rows, as_json)
    if not recorded:
        figures = {str(row.pop("context")): row for row in rows}
        beside.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if any(value > 1 + GATE_ALLOWS for row in rows for name, value in row.items() if name.endswith("recorded")):
        raise typer.Exit(ExitCode.FAILED)


@bench.command("ladder")
def bench_ladder(
    model: Model,
    context: Context = "4K",
    ranks: Annotated[int, typer.Option(min=1, help="This process stands for rank 0 of so many.")] = 2,
    tile: Annotated[str, typer.Option(help="Tokens of a tile.")] = "256",
    layers: Annotated[int, typer.Option(min=1, help="Layers to run.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Peak memory and seconds per layer with one technique after the other switched on."""
    from ithaka.plan.models import find_config, find_shape

    num_heads = find_shape(model).heads
    if ranks > num_heads:
        raise ConfigError(f"--ranks={ranks} exceeds the {num_heads} query heads; use at most {num_heads}")
    sizes = {"context": _count(context, "--context"), "tile_tokens": _count(tile, "--tile"), "layers": layers}
    with _loading():
        from ithaka.rehearse import ladder

    note = "peak: of the layers, above the same at few tokens; X: one activation [tokens per rank, hidden]"
    _print(ladder(find_config(model), ranks, **sizes), as_json, note)


def _path(text: str, option: str) -> Path:
    if not text:
        raise ConfigError(f"{option}='' names no folder; give one, or . for the current folder")
    return Path(text)


def _count(text: str, option: str) -> int:
    if not (count := parse_count(text)):
        raise ConfigError(f"{option}={text} is not a number of tokens; write 65536, 64K or 1M")
    return count


def _blocks(text: str) -> tuple[int, int]:
    block_q, _, block_kv = map(parse_count, text.partition("x"))
    if not block_q or not block_kv:
        raise ConfigError(f"--blocks={text} is not q x kv tokens; write 128Kx64K or auto")
    return block_q, block_kv


def _print(rows: Sequence[Mapping[str, Any]], as_json: bool, *notes: str) -> None:
    print(json.dumps(rows, indent=2) if as_json else "\n".join([_table(rows), *notes]))


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Aligned columns: text on the left, numbers on the right."""
    shown = [
        [f"{v:.4g}" if isinstance(v, float) else "" if v is None else str(v) for v in row.values()] for row in rows
    ]
    lines = [list(rows[0]), *shown]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    signs = ["<" if isinstance(value, str) else ">" for value in rows[0].values()]
    columns = list(zip(signs, widths, strict=True))
    aligned = (zip(line, columns, strict=True) for line in lines)
    return "\n".join("  ".join(f"{cell:{sign}{width}}" for cell, (sign, width) in line).rstrip() for line in aligned)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run.")],
    out_dir: Annotated[str, typer.Argument(metavar="OUT_DIR", help="A new or empty directory.")],
    merge: Annotated[bool, typer.Option("--merge", help="Merge the run's adapter into its base model.")] = False,
    step: Annotated[int | None, typer.Option(help="Of which step; by default the latest checkpoint.")] = None,
    force: Force = False,
) -> None:
    """Write a checkpoint of a run as a Hugging Face directory; an adapter in PEFT's format."""
    from ithaka.export import export as export_run

    folder = _path(out_dir, "OUT_DIR")
    export_run(run_dir, folder, merge, step, force)
    print(f"exported to {folder}")
    if (folder / "adapter_config.json").is_file() and (folder / "config.json").is_file():
        print("model.rope moved the positions: load the base model with this config.json, or export with --merge")
