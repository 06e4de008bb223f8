"""Commands on runs: train, profile, report, data, export."""

from __future__ import annotations

import json
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ithaka.cli.options import AsJson, ConfigFile, Force, Overrides, Ranks, RunDir, loading, parse_path, with_ranks
from ithaka.config import ConfigError, check_output, explicit_settings
from ithaka.dist.rank import is_rank_0
from ithaka.exits import ExitCode, is_transient

if TYPE_CHECKING:
    from ithaka.preflight.run import Run


def train(
    config: ConfigFile = None,
    overrides: Overrides = None,
    ranks: Ranks = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR|auto", help="Resume from the latest checkpoint. auto: resume train.run_dir, or start it."
        ),
    ] = None,
    run_dir: RunDir = None,
    force: Force = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="Consecutive restarts without a new checkpoint.")] = 0,
    evaluate_only: Annotated[
        bool, typer.Option("--evaluate-only", help="Only print the validation loss; --resume selects a run.")
    ] = False,
) -> None:
    """Train the model in CONFIG.yaml; by default, a small one on Python's standard library."""
    if evaluate_only and resume is None:
        with tempfile.TemporaryDirectory(prefix="ithaka-") as name:
            start_run(config, overrides, ranks, f"{name}/run", trains=False)
    start_run(config, overrides, ranks, run_dir, resume, max_restarts, trains=not evaluate_only, force=force)


def train_rank(run: Run, only_profile: bool = False) -> int:
    """Train on this rank and return the exit code. Rank 0 then writes the report."""
    with loading("starting the ranks"):
        from ithaka import launch
        from ithaka.dist.mesh import destroy_subgroups, end_process_group, free_memory, start_process_group
        from ithaka.train import loop

        start_process_group()

    from ithaka.report.page import live_report, write_report

    with live_report(run.run_dir) if is_rank_0() else nullcontext():
        code = loop.train(run, only_profile)
    if launch.ranks_persist() and not code and run.config.train.steps < run.config.ends[-1]:
        free_memory()  # the model holds references to the process groups
        destroy_subgroups()
    else:
        end_process_group()
    if is_rank_0():
        try:
            print(f"Report: {write_report([run.run_dir])}", flush=True)
        except Exception as error:  # must not fail a run that is complete and saved
            print(f"Report: none ({error})", flush=True)
    return code


def validate_rank(run: Run) -> None:
    with loading("starting the ranks"):
        from ithaka.dist.mesh import end_process_group
        from ithaka.train import loop

    loop.validate_only(run)
    end_process_group()


def profile(
    config: ConfigFile = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to run; the last one (on a GPU, two) is profiled.")] = 4,
    overrides: Overrides = None,
    ranks: Ranks = None,
    run_dir: RunDir = None,
    force: Force = False,
) -> None:
    """Run a few training steps and show where memory and time go. Saves no checkpoint."""
    start_run(config, overrides, ranks, run_dir, profiled_steps=steps, force=force)


def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Runs to compare.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="By default in the first run's directory.")] = None,
    force: Force = False,
) -> None:
    """Write a self-contained HTML page about one or more runs."""
    from ithaka.report.page import write_report

    if out is not None:
        check_output("--out", out, force)
    print(write_report(run_dirs, out))


def start_run(
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
    """Check the settings, print the plan and start the ranks. Restart failed runs from the latest checkpoint."""
    folder = None if run_dir is None else parse_path(run_dir, "--run-dir")
    with loading() as status:
        from ithaka import launch
        from ithaka.checkpoint.files import latest_name
        from ithaka.plan import show
        from ithaka.preflight.preflight import AUTO, preflight

    changes = with_ranks(overrides, ranks)
    if profiled_steps:
        fixed = {"train.steps": f"{profiled_steps}", "train.epochs": "null", "profile.every": f"{profiled_steps}"}
        fixed |= {"train.validate_every": "0", "train.validate_sequences": "0"}
        for name in sorted(explicit_settings(None, changes) & fixed.keys()):
            raise ConfigError(f"--set {name} has no effect with profile; use --steps, or leave it out")
        changes += [f"{name}={value}" for name, value in fixed.items()]
    if max_restarts and launch.under_torchrun():
        raise ConfigError(
            f"--max-restarts={max_restarts} is for local ranks only; pass it to torchrun, before -m ithaka"
        )
    restarts = launch.Restarts(max_restarts)
    while True:  # one pass per curriculum entry or restart
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
            if is_rank_0():
                print(f"{run.run_dir} is finished after {run.last_step} steps", flush=True)
            raise typer.Exit(ExitCode.DONE)
        if run.plan is not None and is_rank_0():
            model, steps = run.config.model, train.steps if train.epochs is None else None
            print(show.as_text(run.plan, str(model.path or model.embedded), steps), flush=True)
        # Child processes release all memory when they exit.
        in_children = max_restarts > 0 or bool(run.config.curriculum and launch.num_gpus())
        before = latest_name(run.run_dir)
        code = launch.run_ranks(train_rank, (run, profiled_steps > 0), run.num_ranks, in_children)
        progressed = latest_name(run.run_dir) != before
        if (code or train.steps == run.config.ends[-1]) and not restarts.allow(code, progressed):
            break
        if resume is None:
            resume, folder = AUTO, run.run_dir
    raise typer.Exit(code)


def data(
    config: ConfigFile = None,
    overrides: Overrides = None,
    ranks: Ranks = None,
    page: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write an HTML page instead.")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Show the training data: statistics, and packed sequences with trained tokens marked. Needs no GPU."""
    if page is not None:
        check_output("--html", page, force)
    with loading() as status:
        from rich.console import Console

        from ithaka import show_data
        from ithaka.preflight.preflight import resolve

    with status("reading and packing the data"):
        changes = with_ranks(overrides, ranks)
        settings = resolve(config, changes).at(0)
        view = show_data.build_data_view(settings, show_data.TERMINAL_LIMITS if page is None else show_data.PAGE_LIMITS)
    if page is not None:
        page.write_text(show_data.render_data_page(view, f"Data: {config or 'ithaka train'}"), encoding="utf-8")
    if as_json:
        print(json.dumps(view.figures, indent=2))
    elif page is not None:
        print(f"wrote {page}")
    else:
        show_data.print_data(view, Console(highlight=False))


def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run.")],
    out_dir: Annotated[str, typer.Argument(metavar="OUT_DIR", help="A new or empty directory.")],
    merge: Annotated[bool, typer.Option("--merge", help="Merge the run's adapter into its base model.")] = False,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; by default the latest.")] = None,
    force: Force = False,
) -> None:
    """Export a checkpoint as a Hugging Face directory, or an adapter in PEFT's format."""
    from ithaka.export import export as export_run

    folder = parse_path(out_dir, "OUT_DIR")
    export_run(run_dir, folder, merge, step, force)
    print(f"exported to {folder}")
    if (folder / "adapter_config.json").is_file() and (folder / "config.json").is_file():
        print("model.rope changed the positions: load the base model with this config.json, or export with --merge")
