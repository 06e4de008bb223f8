"""The `ithaka` command: parsing and printing only."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import ithaka
from ithaka.config import ConfigError, check_file, check_new_folder

if TYPE_CHECKING:
    from ithaka.train.preflight import Run

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train standard transformers on sequences of 100 thousand to 10 million tokens.",
)

EXIT_DOES_NOT_FIT = 3  # as for running out of memory

# Arguments and options that several commands have.
Model = Annotated[
    str,
    typer.Argument(help="A name (llama3.1-8b), a model directory, a config.json, or an id on the hub."),
]
ConfigFile = Annotated[
    Path | None, typer.Argument(metavar="CONFIG.yaml", help="Settings; without: a small model to watch.")
]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Decide one setting.")]
Ranks = Annotated[int | None, typer.Option(help="Local ranks; by default one per GPU, or 2 on CPU.")]
RunDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where to write the run; by default runs/<date>-<time>.")
]
Gpus = Annotated[str, typer.Option(help="For example 8xH100-80GB, or 2x8xH100-80GB for two nodes.")]
Context = Annotated[str, typer.Option(help="Tokens per sequence: 131072, 128K, 1M.")]
HostMemory = Annotated[str | None, typer.Option(help="Host memory per node: 2TB, 512GiB. By default 256 GB per GPU.")]
Disk = Annotated[str | None, typer.Option(help="Disk per node for activations; by default none.")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences per micro-step.")]
GpuFile = Annotated[Path | None, typer.Option(help="A GPU of your own, as JSON; then --gpus 8.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


def main() -> None:
    # PyTorch's profiler reads it when torch is imported; without it, its log stands between the lines of a run.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    app()


def explains_errors(command: Callable[..., None]) -> Callable[..., None]:
    """A ConfigError becomes one line on stderr and exit code 2."""

    @functools.wraps(command)
    def explained(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except ConfigError as error:
            from ithaka.train.launch import outcome_of, tell

            outcome = outcome_of(error)
            tell(outcome)
            raise typer.Exit(outcome.code) from None

    return explained


def _print_version(value: bool) -> None:
    if value:
        print(f"ithaka {ithaka.__version__}")
        raise typer.Exit()


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
@explains_errors
def train(
    config: ConfigFile = None,
    overrides: Overrides = None,
    ranks: Ranks = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Continue a run from its latest checkpoint.")
    ] = None,
    run_dir: RunDir = None,
) -> None:
    """Train a model: the one CONFIG.yaml names, or without it a small one on Python's own sources."""
    _run(config, overrides or [], ranks, run_dir, resume)


def train_rank(run: Run, only_profile: bool = False) -> None:
    """What every rank runs; the first one then draws the run."""
    from ithaka.train.console import status

    with status("starting the ranks"):  # each imports what it needs
        from ithaka.dist.mesh import end_process_group, start_process_group
        from ithaka.train import loop

        start_process_group()

    loop.train(run, only_profile)
    end_process_group()
    if os.environ.get("RANK", "0") == "0":
        print(f"Report: {report_of(run.run_dir)}", flush=True)


def report_of(run_dir: Path) -> str:
    from ithaka.report import write_report

    try:
        return str(write_report([run_dir]))
    except Exception as error:  # the run is done and saved: it does not fail for its picture
        return f"none ({error})"


@app.command()
@explains_errors
def profile(
    config: ConfigFile = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to run; the last one (on a GPU, two) is profiled.")] = 4,
    overrides: Overrides = None,
    ranks: Ranks = None,
    run_dir: RunDir = None,
) -> None:
    """Run a few steps of a training run and show where memory and time go. Nothing is saved but that."""
    changes = [*(overrides or []), f"train.steps={steps}", f"profile.every={steps}"]
    changes += ["train.validate_every=0", "train.validate_sequences=0"]
    _run(config, changes, ranks, run_dir, only_profile=True)


@app.command()
@explains_errors
def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Runs, side by side.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="By default in the first run's directory.")
    ] = None,
) -> None:
    """Write one HTML page about a run, or about several beside each other. It opens without a network."""
    from ithaka.report import write_report

    print(write_report(run_dirs, out))


def _run(
    config: Path | None,
    changes: list[str],
    ranks: int | None,
    run_dir: Path | None,
    resume: Path | None = None,
    only_profile: bool = False,
) -> None:
    """Decides and checks, prints the plan, and starts the ranks."""
    from ithaka.train.console import status
    from ithaka.train.launch import heeding_interrupts

    with status("loading PyTorch"), heeding_interrupts():
        from ithaka.plan import show
        from ithaka.train import launch
        from ithaka.train.preflight import Request, preflight

    changes = changes + [f"parallel.ranks={ranks}"] * (ranks is not None)
    with status("checking settings and data"):
        run = preflight(Request(config, changes, resume, run_dir))
    if run.plan is not None and os.environ.get("RANK", "0") == "0":
        model = run.config.model
        print(show.as_text(run.plan, str(model.path or model.embedded), run.config.train.steps), flush=True)
    raise typer.Exit(launch.run_ranks(train_rank, (run, only_profile), run.num_ranks))


@app.command()
@explains_errors
def plan(
    model: Model,
    gpus: Gpus,
    context: Context = "128K",
    host_memory: HostMemory = None,
    disk: Disk = None,
    batch: Batch = 1,
    overrides: Overrides = None,
    gpu_file: GpuFile = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Say how long so many steps take.")] = None,
    max_context: Annotated[bool, typer.Option("--max-context", help="The longest that fits.")] = False,
    ladder: Annotated[bool, typer.Option("--ladder", help="What each technique buys.")] = False,
    sweep: Annotated[str | None, typer.Option(metavar="heads_per_stage", help="What it trades.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="With --sweep: also a plot.")] = None,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="As a configuration for `ithaka train`.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="With --yaml: where to; else it is printed.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what fits and how fast it will be, before anything is rented or started."""
    from ithaka.plan import show
    from ithaka.plan.hardware import find_hardware

    kinds = {"--max-context": max_context, "--ladder": ladder, "--sweep": sweep is not None, "--yaml": as_yaml}
    asked = [name for name, wanted in kinds.items() if wanted]
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked)} are answers of their own; ask for one at a time")
    for option, value, other in (("--plot", plot, "--sweep heads_per_stage"), ("--out", out, "--yaml")):
        if value is not None and other.split()[0] not in asked:
            raise ConfigError(f"{option} {value} is for what {other.split()[0]} finds; add {other}")
        if value is not None:
            check_file(option, value)
    hardware = find_hardware(gpus, gpu_file, host_memory, disk)
    question = show.question(model, hardware, context, batch, overrides or [], any_setting=as_yaml)
    if ladder:
        print(show.ladder_answer(question, as_json))
    elif sweep is not None:
        print(show.sweep_answer(question, sweep, plot, as_json))
    elif as_yaml and (found := question.plan()).fits:
        text = show.as_yaml(question, found, steps)
        if out is None:
            print(text, end="")
        else:
            out.write_text(text, encoding="utf-8")
            print(f"written to {out}; use it with: ithaka train {out}")
    else:
        text, fits = show.plan_answer(question, max_context, steps, as_json)
        print(text, file=sys.stderr if as_yaml else sys.stdout)
        raise typer.Exit(0 if fits else EXIT_DOES_NOT_FIT)


@app.command()
@explains_errors
def rehearse(
    model: Model,
    gpus: Gpus,
    context: Context = "128K",
    layers: Annotated[int, typer.Option(min=1, help="Layers to run; the rest is extrapolated.")] = 2,
    host_memory: HostMemory = None,
    disk: Disk = None,
    batch: Batch = 1,
    overrides: Overrides = None,
    gpu_file: GpuFile = None,
    memory_only: Annotated[
        bool, typer.Option("--memory-only", help="Cut attention short: every allocation, little time.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run rank 0 of all these GPUs on this one device, and print measured beside planned."""
    from ithaka.plan import show
    from ithaka.plan.hardware import find_hardware

    question = show.question(model, find_hardware(gpus, gpu_file, host_memory, disk), context, batch, overrides or [])
    plan = question.plan()
    if not plan.fits:
        print(show.plan_answer(question, False, None, as_json)[0])
        raise typer.Exit(EXIT_DOES_NOT_FIT)

    from ithaka.train.console import status
    from ithaka.train.launch import heeding_interrupts

    with nullcontext() if as_json else status("loading PyTorch"), heeding_interrupts():
        from ithaka.rehearse import run

    raise typer.Exit(run(plan, question.fixed, model, layers, memory_only, as_json))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@explains_errors
def bench(context: typer.Context) -> None:
    """Measure this machine: `ithaka bench attention`, `ithaka bench device`, `ithaka bench ladder`."""
    from ithaka.bench_cli import bench_app

    bench_app(context.args, prog_name="ithaka bench")


@app.command()
@explains_errors
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run.")],
    out_dir: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="A new or empty directory.")],
) -> None:
    """Write the latest checkpoint of a run as a Hugging Face directory."""
    from ithaka.train import checkpoint

    check_new_folder("OUT_DIR", out_dir)
    checkpoint.export(run_dir, out_dir)
    print(f"exported to {out_dir}")
