"""Commands on runs and models: train, profile, report, data, export, evaluate, sample, verify."""

import json
import signal
import sys
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ithaka.cli.options import AsJson, Force, Overrides, format_table, loading, parse_tokens
from ithaka.comm.rank import is_rank_0
from ithaka.config import (
    ConfigError,
    check_output,
    embedded_model,
    load_config,
    renaming,
    writing_to,
)
from ithaka.config.base_formats import BASE_FORMATS
from ithaka.config.units import format_json
from ithaka.exits import ExitCode, TransientError, is_transient
from ithaka.hub import create_repository, fetch_model, push_files
from ithaka.run import launch
from ithaka.run.draft import AUTO, Draft, Request, read_settings
from ithaka.run.streams import survive_lost_readers

if TYPE_CHECKING:
    from ithaka.run.validated import Run

ConfigFile = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG.yaml", help="By default, a small demonstration model."),
]
Ranks = Annotated[
    int | None, typer.Option(help="Local ranks; by default one per GPU, or 2 on a CPU.")
]
# Not a Path, which would turn '' into the current directory.
RunDir = Annotated[
    str | None, typer.Option(metavar="DIR", help="Run directory; by default runs/<date>-<time>.")
]

# What errors about tokenizers and chat templates call settings of a run -> what these commands have
# instead.
MODEL_NAMES = {
    "model.path": "MODEL",
    "set data.tokenizer to a directory with one, or to bytes": "add its tokenizer files",
    "repair it, or set data.tokenizer": "repair it",
    "or to a file, or data.tokenizer to the tokenizer of an instruct model": "or to a file",
}
EVALUATE_NAMES = MODEL_NAMES | {
    "data.chat_template": "--chat-template",
    "parallel.ranks": "--ranks",
    "evaluate.contexts": "--contexts",
    "evaluate.samples": "--samples",
}
SAMPLE_NAMES = MODEL_NAMES | {
    "set data.chat_template to a file that is": "repair it, or use --raw",
    "change or drop the record, or set another data.chat_template": "change the messages",
}


def train_command(
    config: ConfigFile = None,
    overrides: Overrides = None,
    ranks: Ranks = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR|auto", help="Resume a run. auto: resume train.run_dir, or start it."
        ),
    ] = None,
    run_dir: RunDir = None,
    force: Force = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Consecutive restarts without a new checkpoint.")
    ] = 0,
    evaluate_only: Annotated[
        bool,
        typer.Option(
            "--evaluate-only", help="Only print the validation loss; --resume selects a run."
        ),
    ] = False,
) -> None:
    """Train the model in CONFIG.yaml; by default, a small one on Python's standard library."""
    if evaluate_only and resume is None:
        with suppress(TransientError):  # it is read again below
            read_settings(Request(config, tuple(with_ranks(overrides, ranks))))
        with loading():
            from ithaka.comm.agree import shared_temporary_path
            from ithaka.comm.mesh import start_process_group

            if launch.under_torchrun():
                start_process_group()
        with shared_temporary_path("ithaka-") as folder:
            start_run(config, overrides, ranks, f"{folder}/run", trains=False)
    start_run(
        config,
        overrides,
        ranks,
        run_dir,
        resume,
        max_restarts,
        trains=not evaluate_only,
        force=force,
    )


def train_rank(run: "Run", only_profile: bool = False) -> int:
    """Train on this rank and return the exit code. Rank 0 then writes the report."""
    survive_lost_readers()
    with loading("starting the ranks"):
        from ithaka.comm.mesh import (
            destroy_subgroups,
            end_process_group,
            free_memory,
            start_process_group,
        )
        from ithaka.log.metrics import note_startup
        from ithaka.train import loop

        start_process_group()

    from ithaka.report.page import live_report, write_report

    note_startup("ranks")
    with live_report(run.run_dir) if is_rank_0() else nullcontext():
        code = loop.train(run, only_profile)
    if launch.ranks_persist() and not code and not run.entry.is_last:
        free_memory()  # the model holds references to the process groups
        destroy_subgroups()
    else:
        end_process_group()
    if is_rank_0():
        try:
            launch.try_print(f"Report: {write_report([run.run_dir])}")
        except Exception as error:  # must not fail a run that is complete and saved
            launch.try_print(f"Report: none ({error})")
    return code


def validate_rank(run: "Run") -> None:
    with loading("starting the ranks"):
        from ithaka.comm.mesh import end_process_group
        from ithaka.train.validation import validate_only

    validate_only(run)
    end_process_group()


def profile_command(
    config: ConfigFile = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Steps to run; the last one (on a GPU, two) is profiled.")
    ] = 4,
    overrides: Overrides = None,
    ranks: Ranks = None,
    run_dir: RunDir = None,
    force: Force = False,
) -> None:
    """Run a few training steps and show where memory and time go. Saves no checkpoint."""
    start_run(config, overrides, ranks, run_dir, profiled_steps=steps, force=force)


def report_command(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Runs to compare.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="By default in the first run's directory.")
    ] = None,
    force: Force = False,
) -> None:
    """Write a self-contained HTML page about one or more runs."""
    from ithaka.log.metrics import count_damaged_lines
    from ithaka.report.page import write_report

    if out is not None:
        check_output("--out", out, force)
    print(write_report(run_dirs, out))
    for path in (run_dir / "metrics.jsonl" for run_dir in run_dirs):
        if num_lines := count_damaged_lines(path):
            lines = "1 line that is" if num_lines == 1 else f"{num_lines} lines that are"
            typer.echo(
                f"{path} has {lines} not valid JSON; the report leaves out what is damaged",
                err=True,
            )


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
    """Check the settings, print the plan and start the ranks. Restart failed runs from the latest
    checkpoint."""
    survive_lost_readers()
    changes = with_ranks(overrides, ranks)
    if profiled_steps:
        changes += profiling_changes(changes, profiled_steps)
    request = Request(
        config,
        tuple(changes),
        resume,
        None if run_dir is None else parse_path(run_dir, "--run-dir"),
        trains,
        force,
    )
    draft = None
    # Before torch is imported, which takes seconds. A file that cannot be read now is read again
    # below, where --max-restarts applies; so is a run to resume under torchrun, by all ranks.
    if resume in (None, AUTO) or not launch.under_torchrun():
        with suppress(TransientError):
            draft = read_settings(request)
    if max_restarts and launch.under_torchrun():
        raise ConfigError(
            f"--max-restarts={max_restarts} is for local ranks; pass it to torchrun, before -m "
            "ithaka"
        )
    raise typer.Exit(run_entries(request, draft, launch.Restarts(max_restarts), profiled_steps > 0))


def run_entries(
    request: Request, draft: Draft | None, restarts: launch.Restarts, only_profile: bool
) -> int:
    """Run one entry of a curriculum after the other, each as a resume, and restart those that fail.
    Returns the exit code. `draft`: None if the settings could not be read yet."""
    with loading() as status:
        from ithaka.checkpoint.checkpoints import latest_name
        from ithaka.log.metrics import note_startup
        from ithaka.run.road import prepare_run

    note_startup("imports")
    while True:  # one pass per entry or restart
        try:
            with status("checking settings and data"):
                run = prepare_run(request, draft)
        except Exception as error:
            if not is_transient(error):
                raise
            outcome = launch.outcome_from_error(error)
            launch.print_outcome(outcome)
            if restarts.allow(outcome.code):
                continue
            return outcome.code
        if not request.trains:
            return launch.run_ranks(validate_rank, (run,), run.num_ranks)
        if run.finished:
            if is_rank_0():
                launch.try_print(f"{run.run_dir} is finished after {run.last_step} steps")
            return ExitCode.DONE
        print_plan(run)
        note_startup("settings and plan")
        # Child processes release all memory when they exit.
        in_children = restarts.limit > 0 or (run.entry.count > 1 and launch.num_gpus() > 0)
        before = latest_name(run.run_dir)
        code = launch.run_ranks(train_rank, (run, only_profile), run.num_ranks, in_children)
        progressed = latest_name(run.run_dir) != before
        if (code or run.entry.is_last) and not restarts.allow(code, progressed):
            return code
        if request.resume is None:
            request = replace(request, resume=AUTO, run_dir=run.run_dir)
            draft = draft and replace(draft, request=request)
        elif request.resume != AUTO:
            draft = None  # the run's own settings have changed


def print_plan(run: "Run") -> None:
    from ithaka.plan import render, summary

    if run.plan is not None and is_rank_0():
        train = run.config.train
        model = run.config.model
        steps = train.steps if train.epochs is None else None
        facts = summary.collect_facts(run.plan, str(model.path or model.embedded), steps)
        launch.try_print(render.render_plan(facts))


def profiling_changes(changes: list[str], num_steps: int) -> list[str]:
    """The settings of a run that profiles its last step."""
    fixed: dict[str, object] = {
        "train.steps": num_steps,
        "train.epochs": "null",
        "profile.every": num_steps,
        "train.validate_every": 0,
        "train.validate_sequences": 0,
    }
    names = {change.partition("=")[0].strip() for change in changes}
    for name in sorted(names & fixed.keys()):
        raise ConfigError(f"--set {name} has no effect with profile; use --steps, or leave it out")
    return [f"{name}={value}" for name, value in fixed.items()]


def data_command(
    config: ConfigFile = None,
    overrides: Overrides = None,
    ranks: Ranks = None,
    page: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write an HTML page instead.")
    ] = None,
    record: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Show why each token of the N-th record is trained or not."
        ),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Show the training data: statistics, and packed sequences with trained tokens marked. Needs no
    GPU."""
    if page is not None:
        check_output("--html", page, force)
    draft = read_settings(Request(config, tuple(with_ranks(overrides, ranks))))
    with loading() as status:
        from rich.console import Console

        from ithaka.log.console import show_share
        from ithaka.run.adopt import adopt_settings
        from ithaka.views import data as show_data

    with status("reading the data") as spinner:
        settings = adopt_settings(draft).config
        limits = show_data.TERMINAL_LIMITS if page is None else show_data.PAGE_LIMITS
        view = show_data.build_record_view(settings, record) if record else None
        report = show_share("reading the data", spinner)
        view = view or show_data.build_data_view(settings, limits, page is not None, report)
    if page is not None:
        with writing_to("--html", page):
            page.write_text(
                show_data.render_data_page(view, f"Data: {config or 'ithaka train'}"),
                encoding="utf-8",
            )
    if as_json:
        print(json.dumps(view.figures, indent=2))
    elif page is not None:
        print(f"wrote {page}")
    else:
        show_data.print_data(view, Console(highlight=False))


def export_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run.")],
    out_dir: Annotated[str, typer.Argument(metavar="OUT_DIR", help="A new or empty directory.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the run's adapter into its base model.")
    ] = False,
    step: Annotated[
        int | None, typer.Option(help="Step of the checkpoint; by default the latest.")
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="ORG/NAME", help="Also upload it, with a model card, to a private repository."
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Export a checkpoint as a Hugging Face directory, or an adapter in PEFT's format."""
    folder = parse_path(out_dir, "OUT_DIR")
    from ithaka.checkpoint.export import check_export, export_files, list_files, write_card

    if push is not None:
        check_export(run_dir, folder, merge, step, force)
        create_repository(push)
    written = export_files(run_dir, folder, merge, step, force)
    print(f"exported to {folder}")
    adapter = load_config(run_dir / "config.yaml").adapter if merge else None
    for note in BASE_FORMATS[adapter.base].merge_notes if adapter else ():
        print(note)
    if push is not None:
        write_card(run_dir, folder, push, step)
        written.append("README.md")
        message = f"Upload {run_dir.absolute().name}"
        print(f"uploaded: {push_files(folder, sorted({*written}), push, message)}")
        if others := [name for name in list_files(folder) if name not in written]:
            more = f" and {len(others) - 10} more" if len(others) > 10 else ""
            print(
                "not uploaded, because the export did not write them: "
                f"{', '.join(others[:10])}{more}"
            )
    if (folder / "adapter_config.json").is_file() and (folder / "config.json").is_file():
        print(
            "model.rope changed the positions: load the base model with this config.json, or "
            "export with --merge"
        )


def evaluate_command(
    models: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL|RUN|ADAPTER|FILE...", help="One or two directories, or --json output."
        ),
    ],
    contexts: Annotated[
        str, typer.Option(help="Context lengths; the loss is measured at the longest.")
    ] = "8K,32K",
    data: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Held-out data, as data.path.")
    ] = None,
    documents: Annotated[int, typer.Option(min=1, help="Number of long documents.")] = 8,
    samples: Annotated[
        int, typer.Option(min=0, help="Samples per retrieval task, length and depth; 0: none.")
    ] = 2,
    tasks: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSONL of prompts and answers to score as well."),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="NAME|FILE", help="As data.chat_template; by default the model's."),
    ] = None,
    ranks: Ranks = None,
    page: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write an HTML page.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Measure how well one or two models use their context: loss by position, gain from long
    context, retrieval."""
    if len(models) > 2:
        raise ConfigError(f"{len(models)} models are too many to compare; give one or two")
    lengths = sorted({parse_tokens(text, "--contexts") for text in contexts.split(",")})
    if lengths[0] < 2:
        raise ConfigError(
            f"--contexts={contexts} has a context of one token, which has no loss; use at least 2"
        )
    if page is not None:
        check_output("--html", page, force)
    with loading():
        from ithaka.evaluate import compare
        from ithaka.evaluate.run import evaluate_all

    models = [fetch_model(each, "MODEL=") for each in models]
    with renaming(EVALUATE_NAMES):
        results = evaluate_all(
            models, lengths, data, ranks, documents, samples, tasks, chat_template
        )
    if not is_rank_0():
        return
    if page is not None:
        with writing_to("--html", page):
            page.write_text(compare.render_results(results), encoding="utf-8")
    if as_json:
        print(format_json(results if len(results) > 1 else results[0], indent=2))
    elif not all(each.is_file() for each in models):
        print(f"documents of {data or 'the standard library of Python'}\n")
    for title, rows in compare.make_tables(results) if not as_json else ():
        missing = (
            compare.explain_missing_retrieval(results) if title == "retrieval by depth" else ""
        )
        print(f"{title}\n{format_table(rows) if rows else missing or 'not measured'}\n")
    if not as_json and (explanation := compare.explain_figures(results)):
        print(explanation)
    if not as_json and page is not None:
        print(f"wrote {page}")
    if any(result.get("partial") for result in results):
        print("stopped early: figures that were not measured are missing", file=sys.stderr)
        raise typer.Exit(ExitCode.SIGNALED + signal.SIGINT)


def sample_command(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|MODEL|ADAPTER", help="A run (its latest checkpoint), or a model."
        ),
    ],
    prompt: Annotated[
        str, typer.Option(help="Text to continue; with a chat template, the user's message.")
    ] = "",
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    messages: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Messages before --prompt: JSON, or the first record of JSONL."
        ),
    ] = None,
    tools: Annotated[Path | None, typer.Option(metavar="FILE", help="Tools: a JSON list.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, max=100, help="0: greedy.")] = 0.7,
    raw: Annotated[bool, typer.Option("--raw", help="Ignore the chat template.")] = False,
) -> None:
    """Generate a short text with plain transformers, on one device."""
    with loading() as status:
        from ithaka.evaluate.sample import sample

    with status("generating"), renaming(SAMPLE_NAMES):
        text = sample(
            fetch_model(model, "MODEL="), prompt, tokens, temperature, raw, system, messages, tools
        )
    print(text)


def verify_command(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL|CONFIG.yaml", help="A directory, a config.json or a name."),
    ],
    cp: Annotated[
        int | None, typer.Option(min=1, help="Ranks that share a sequence; by default 4.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare a few layers, one of each kind, with plain transformers: loss, gradients, masks,
    documents."""
    from ithaka.plan.models import find_config

    settings = None
    path = Path(model).expanduser()
    if path.suffix in (".yaml", ".yml"):
        settings = load_config(path)
        source = fetch_model(settings.model.path) or embedded_model(settings.model.embedded)
    else:
        source = path if model and path.exists() else find_config(model)
    with loading() as status:
        from ithaka.checks.verify import verify

    with (
        status("comparing with plain transformers"),
        renaming({"model.path": "MODEL"} if settings is None else {}),
    ):
        result = verify(source, settings, cp)
    if as_json:
        print(format_json(result, indent=2))
    else:
        setup = "{model_type}, {weights} weights, cp={cp} on {device}".format(**result)
        print(f"{setup}; layers compared: {', '.join(map(str, result['layers']))}")
        for kind in result["kinds"] if len(result["kinds"]) > 1 else ():
            layers = ", ".join(map(str, kind["compared"]))
            print(
                f"layer {layers}: {kind['kind']} ({kind['layers_of_model']} of "
                f"{result['layers_of_model']} layers)"
            )
        print(format_table([_format_check(**check) for check in result["checks"]]))
        failed = [check["part"] for check in result["checks"] if not check["ok"]]
        print(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    raise typer.Exit(ExitCode.DONE if result["ok"] else ExitCode.FAILED)


def _format_check(
    part: str, where: str, error: float, allowed: float | None, ok: bool
) -> dict[str, str]:
    """A table row. margin: the tolerance divided by the error."""
    margin = "info only" if allowed is None else ""
    if allowed:
        margin = f"{min(allowed / max(error, 1e-16), 1e6):,.0f} x"
    limit = "" if allowed is None else f"{allowed:.0e}"
    part = part if ok else f"FAILED: {part}"
    return {
        "part": part,
        "error": f"{error:.1e}",
        "allowed": limit,
        "margin": margin,
        "largest in": where,
    }


def with_ranks(overrides: list[str] | None, ranks: int | None) -> list[str]:
    """Append `--ranks` to the overrides."""
    return [*(overrides or []), *([f"parallel.ranks={ranks}"] if ranks is not None else [])]


def parse_path(text: str, option: str) -> Path:
    if not text:
        raise ConfigError(
            f"{option}='' is not a directory; give one, or . for the current directory"
        )
    return Path(text)
