"""Every command under torchrun on two ranks works or is rejected, and only rank 0 prints."""

import contextlib
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch.distributed as dist
import typer

from ithaka import cli
from ithaka.checks import doctor, selftest
from ithaka.config import to_yaml
from ithaka.evaluate import run as evaluate
from ithaka.exits import ExitCode
from ithaka.run import launch
from runs import tiny_run

COMMANDS = {  # -> part of the output
    "train run.yaml": "Report: ",
    "train run.yaml --evaluate-only": "validation loss ",
    "train --resume run --set train.steps=2": "resumed after step 1",
    "train --resume run --evaluate-only": "step 2, on up to 1 sequence of",
    (
        "evaluate run --contexts 64 --documents 1 --samples 0 --data texts --json"
    ): '"loss_by_position"',
    "profile run.yaml --run-dir profiled --steps 1": "Profile of step 1",
    "data run.yaml": "sequences",
    "export run exported": "exported to exported",
    "report run --out page.html": "page.html",
    "sample run --prompt 1 --tokens 1": "",
    "verify config.json --cp 1": "all checks passed",
    "rehearse config.json --gpus 2xH100-80GB --context 64": "peak in: ",
    "plan config.json --gpus 2xH100-80GB --context 64": "fits",
    "selftest": "0 failed in ",
    "doctor": "host memory",
    "bench attention --tokens 64 --seconds 0": "tflops",
    "bench device --seconds 0": "wrote gpu.json",
    "bench network --size 1": "wrote network.json",
    "evaluate result.json result.json": "loss by position",
    "--version": "ithaka ",
    "train --help": "Usage",
}
# the default tier runs the others
SLOW = ("profile", "sample", "verify", "rehearse", "bench device", "train --resume")
REJECTED = {  # -> part of the error
    "train missing.yaml": "missing.yaml",
    "train run.yaml --set train.step=1": "train.step",
    "train run.yaml --set parallel.cp=3": "parallel.cp=3",
    "train run.yaml --max-restarts 3": "--max-restarts=3",
    "train --resume missing": "missing",
    "evaluate config.json": "config.json has no results",
    "evaluate run texts": "2 models",
    "profile run.yaml --set parallel.cp=3": "parallel.cp=3",
    "data missing.yaml": "missing.yaml",
    "export missing exported": "missing",
    "report missing": "missing",
    "sample missing --prompt 1": "missing",
    "verify missing": "missing",
    "rehearse missing --gpus 2xH100-80GB": "missing",
    "rehearse config.json --gpus 4xH100-80GB": "torchrun started 2 ranks",
    "selftest --context none": "--context=none",
    "plan missing --gpus 2xH100-80GB": "missing",
    "doctor --unknown": "--unknown",
    "bench attention --tokens none": "--tokens",
    "bench device --seconds none": "--seconds",
    "bench network --size 0": "--size",
    "unknown": "unknown",
}


def run_commands(
    folder: Path, environments: dict[str, dict]
) -> dict[str, tuple[int, str, str, int]]:
    """Run commands as a rank in these environments. Return each exit code, stdout, stderr and
    number of exports."""
    results = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(doctor, "DISK_TEST_BYTES", doctor.CHUNK_BYTES)
        patch.setattr(selftest, "SECTIONS", {"machine": 1.0})  # test_selftest.py runs the others
        exports = []
        export = evaluate.export
        patch.setattr(
            evaluate,
            "export",
            lambda *args, **options: exports.append(args) or export(*args, **options),
        )
        for command, environment in environments.items():
            for name, value in environment.items():
                patch.setenv(name, str(value))
            rank = int(environment["RANK"])
            # torchrun ends the other ranks while they wait.
            patch.setattr(
                launch,
                "wait_for_rank_0",
                lambda rank=rank: sys.exit(-signal.SIGTERM) if rank else None,
            )
            patch.setattr(sys, "argv", ["ithaka", *command.split()])
            out = io.StringIO()
            err = io.StringIO()
            code = 0
            exports.clear()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    cli.main()
                except SystemExit as end:
                    code = end.code or 0
            if dist.is_initialized():
                dist.destroy_process_group()
            if rank == 0 and command.endswith("--json"):
                (folder / "result.json").write_text(out.getvalue())
            results[command] = code, out.getvalue(), err.getvalue(), len(exports)
    return results


def run_in_fork(folder: Path, ports: dict[str, int], on_one_node: bool) -> dict:
    """Run commands as a rank with torchrun's variables, each on its own port."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    local = {"LOCAL_RANK": rank if on_one_node else 0, "LOCAL_WORLD_SIZE": 2 if on_one_node else 1}
    shared = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", **local}
    return run_commands(
        folder, {command: {**shared, "MASTER_PORT": port} for command, port in ports.items()}
    )


def run_under_agent(folder: Path, ports: dict[str, int]) -> None:
    """Run commands as a rank of torchrun, each on its own port, and write the results to a file."""
    # rank 0 deletes them in some commands
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    # The agent's store would still have the addresses of the previous command.
    shared = {name: os.environ[name] for name in names} | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    results = run_commands(
        folder, {command: {**shared, "MASTER_PORT": port} for command, port in ports.items()}
    )
    (folder / f"results-{shared['RANK']}").write_bytes(pickle.dumps(results))


def find_ports(commands: Iterable[str]) -> dict[str, int]:
    """Return a free port for each command."""
    with contextlib.ExitStack() as stack:
        sockets = {command: stack.enter_context(socket.socket()) for command in commands}
        for free in sockets.values():
            free.bind(("127.0.0.1", 0))
        return {command: free.getsockname()[1] for command, free in sockets.items()}


def write_run(folder: Path) -> None:
    config = tiny_run(folder, train={"steps": 1, "validate_every": 0})
    (folder / "run.yaml").write_text(to_yaml(config))


def start(ranks, folder: Path, commands: Iterable[str], on_one_node: bool = True) -> list[dict]:
    write_run(folder)
    return ranks.run(2, run_in_fork, folder, find_ports(commands), on_one_node)


def torchrun(*arguments: str, cwd: Path, timeout_s: float) -> subprocess.CompletedProcess:
    paths = {
        "PYTHONPATH": os.pathsep.join(
            map(str, (Path(cli.__file__).parents[2], Path(__file__).parent))
        )
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *arguments,
    ]
    options = {"capture_output": True, "text": True, "env": os.environ | paths}
    return subprocess.run(command, cwd=cwd, timeout=timeout_s, **options)


def check_commands(results: list[dict], commands: list[str], num_nodes: int) -> None:
    first, second = results
    for command in commands:
        code, out, err, exports = first[command]
        assert (code, second[command][0]) == (0, 0), (command, err, second[command][2])
        assert COMMANDS[command] in out, (command, out)
        assert second[command][1:3] == ("", ""), command
        # Each node exports a run, once; `sample` has one process.
        by_command = {"evaluate run": (1, num_nodes - 1), "sample run": (1, 0)}
        assert (exports, second[command][3]) == by_command.get(
            " ".join(command.split()[:2]), (0, 0)
        ), command


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_commands_succeed_and_print_once(ranks, tmp_path, slow):
    """In the slow case, each rank is its own node."""
    commands = [command for command in COMMANDS if slow or not command.startswith(SLOW)]
    check_commands(
        start(ranks, tmp_path, commands, on_one_node=not slow), commands, num_nodes=1 + slow
    )


def test_a_rejected_command_prints_one_error(ranks, tmp_path):
    first, second = start(ranks, tmp_path, REJECTED)
    for command, part in REJECTED.items():
        code, out, err, _ = first[command]
        assert (code, out) == (ExitCode.WRONG_INPUT, ""), (command, code, out, err)
        assert part in err and err.count("Error") == 1 and "Traceback" not in err, (command, err)
        assert second[command][1:3] == ("", ""), (command, second[command])


def test_every_command_is_tested():
    """COMMANDS and REJECTED each have every command."""

    def names(group, prefix=""):
        for name, command in group.commands.items():
            yield from (
                names(command, f"{name} ") if hasattr(command, "commands") else [prefix + name]
            )

    for name in names(typer.main.get_command(cli.app)):
        for table in (COMMANDS, REJECTED):
            assert any(line.startswith(f"{name} ") or line == name for line in table), name


@pytest.mark.slow
def test_torchrun_starts_every_command(tmp_path):
    """torchrun starts once, and its ranks run all commands."""
    write_run(tmp_path)
    script = tmp_path / "commands.py"
    imports = "from pathlib import Path\nfrom test_commands_under_torchrun import run_under_agent\n"
    script.write_text(f"{imports}run_under_agent(Path.cwd(), {find_ports(COMMANDS)})\n")
    done = torchrun(str(script), cwd=tmp_path, timeout_s=300)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [pickle.loads((tmp_path / f"results-{rank}").read_bytes()) for rank in range(2)]
    check_commands(results, list(COMMANDS), num_nodes=1)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train missing.yaml", "evaluate missing", "data missing.yaml"])
def test_torchrun_ends_with_one_error(tmp_path, command):
    """All ranks fail; or rank 0 fails while rank 1 connects, or after it has ended."""
    done = torchrun("-m", "ithaka", *command.split(), cwd=tmp_path, timeout_s=100)
    assert done.returncode and done.stdout == ""
    assert done.stderr.count("ConfigError: ") == 1 and "missing" in done.stderr, done.stderr[-3000:]


def test_only_rank_0_reports_an_error_of_all_ranks(monkeypatch, capsys):
    """torchrun ends the other ranks while they wait."""

    class Ended(Exception):
        """Stands for SIGTERM."""

    def wait(seconds: float) -> None:
        raise Ended

    monkeypatch.setattr(launch.time, "sleep", wait)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for arguments in (["train", "--unknown"], ["train", "--run-dir", ""]):
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(Ended):
            cli.app(arguments)
        assert capsys.readouterr() == ("", "")
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(SystemExit) as end:
            cli.app(arguments)
        assert end.value.code == ExitCode.WRONG_INPUT and arguments[1] in capsys.readouterr().err
