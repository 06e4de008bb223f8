"""The `ithaka` command: parse arguments, print results. Commands import torch only when they
run."""

import os
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ithaka.checks.doctor import package_versions
from ithaka.cli import bench_commands, plan, runs
from ithaka.comm.rank import is_rank_0, leave_launcher
from ithaka.config import ConfigError
from ithaka.exits import ExitCode, is_disk_full, is_transient
from ithaka.run.launch import quiet_torchao

# Commands that run on all ranks of torchrun. The others run on rank 0 only.
ON_ALL_RANKS = (
    ["train"],
    ["profile"],
    ["evaluate"],
    ["rehearse"],
    ["selftest"],
    ["bench", "network"],
)

quiet_torchao()


class Commands(TyperGroup):
    """On an ithaka error or a transient one, print the message to stderr and exit with the error's
    code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            from ithaka.run.launch import Outcome, print_outcome

            print_outcome(
                Outcome(
                    code := ExitCode.SIGNALED + signal.SIGINT, "stopped by SIGINT" * is_rank_0()
                )
            )
            raise typer.Exit(code) from None
        except Exception as raised:
            error = explain_missing_torch(raised, ctx.invoked_subcommand)
            is_ours = type(error).__module__.startswith("ithaka.") or is_transient(error)
            is_usage = hasattr(error, "show")  # a wrong argument, which click prints
            if not is_ours and not is_usage:
                raise
            from ithaka.run.launch import outcome_from_error, print_outcome, wait_for_rank_0

            outcome = outcome_from_error(error)
            if not outcome.shared:
                wait_for_rank_0()
            if not is_ours:
                raise
            print_outcome(outcome)
            raise typer.Exit(outcome.code) from None


def explain_missing_torch(error: Exception, command: str | None) -> Exception:
    """The error to report for one of a command: another one if torch is not installed."""
    if not isinstance(error, ModuleNotFoundError) or find_spec("torch") is not None:
        return error
    rule = f"`ithaka {command}` needs torch, which is not installed"
    return ConfigError(
        f"{rule}; pip install torch. Without it, `ithaka plan` works for built-in models"
    )


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train Hugging Face models on long sequences: 64K tokens and more.",
)
COMMANDS: tuple[Callable[..., None], ...] = (
    runs.train_command,
    runs.profile_command,
    runs.report_command,
    runs.data_command,
    plan.plan_command,
    plan.rehearse_command,
    runs.evaluate_command,
    runs.sample_command,
    runs.verify_command,
    runs.export_command,
    plan.doctor_command,
    plan.selftest_command,
)
BENCH_COMMANDS: tuple[Callable[..., None], ...] = (
    bench_commands.attention_command,
    bench_commands.device_command,
    bench_commands.network_command,
)
bench_app = typer.Typer(no_args_is_help=True, help="Measure this machine.")
for parent, commands in ((app, COMMANDS), (bench_app, BENCH_COMMANDS)):
    for command in commands:
        name = command.__name__.removesuffix("_command")
        paragraphs = (command.__doc__ or "").split("\n\n")
        help_text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        parent.command(name, help=help_text)(command)
app.add_typer(bench_app, name="bench")


@app.callback(invoke_without_command=True)
def print_versions(
    version: Annotated[
        bool, typer.Option("--version", help="Print versions of ithaka and its packages.")
    ] = False,
) -> None:
    if version:
        print(
            "\n".join(
                f"{name} {number or 'not installed'}" for name, number in package_versions().items()
            )
        )
        raise typer.Exit()


def main() -> None:
    # torch reads this on import; it silences the profiler's log.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun
        from ithaka.run.launch import exit_with_parent

        exit_with_parent()
    if not runs_on_all_ranks(sys.argv[1:]):
        if not is_rank_0():
            return
        leave_launcher()
    code: Any = ExitCode.DONE
    try:
        app()
    except SystemExit as end:
        code = end.code
    except OSError as error:  # --help writes outside of `Commands.invoke`
        if not is_disk_full(error):
            raise
    sys.exit(finish_stdout(code))


def finish_stdout(code: Any) -> Any:
    """Write what stdout buffers, and return the exit code: `code`, or TRANSIENT if its disk is
    full."""
    from ithaka.run.launch import outcome_from_error, print_outcome, try_print

    error = try_print()
    if code or error is None or not is_disk_full(error):
        return code
    outcome = outcome_from_error(OSError(error.errno, error.strerror, "stdout"))
    print_outcome(outcome)
    return outcome.code


def runs_on_all_ranks(arguments: list[str]) -> bool:
    """Whether a command line uses the ranks of torchrun."""
    return "--help" not in arguments and any(
        arguments[: len(command)] == command for command in ON_ALL_RANKS
    )
