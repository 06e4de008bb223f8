"""Every command as torchrun starts it, on two ranks: it ends with 0, and prints once."""

import contextlib
import io
import socket
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from ithaka import cli, evaluate, launch
from ithaka.cli import doctor
from ithaka.config import to_yaml
from ithaka.exits import ExitCode
from runs import tiny_run

COMMANDS = {  # -> a part of what it prints
    "train run.yaml": "Report: ",
    "train run.yaml --evaluate-only": "validation loss ",
    "train --resume run --set train.steps=2": "resumed after step 1",
    "train --resume run --evaluate-only": "step 2, on up to 1 sequences",
    "evaluate run --contexts 64 --documents 1 --samples 0 --data texts --json": '"loss_by_position"',
    "profile run.yaml --run-dir profiled --steps 1": "Profile of step 1",
    "data run.yaml": "sequences",
    "export run exported": "exported to exported",
    "report run --out page.html": "page.html",
    "sample run --prompt 1 --tokens 1": "",
    "verify config.json --cp 1": "all checks passed",
    "rehearse config.json --gpus 2xH100-80GB --context 64": "peak in: ",
    "plan config.json --gpus 2xH100-80GB --context 64": "fits",
    "doctor": "host memory",
    "bench attention --tokens 64 --seconds 0": "tflops",
    "bench device --seconds 0": "wrote gpu.json",
    "bench network --size 1": "wrote network.json",
    "evaluate result.json result.json": "loss by position",
    "--version": "ithaka ",
    "train --help": "Usage",
}
SLOW = ("profile", "sample", "verify", "rehearse", "bench device", "train --resume")  # in the default tier: the others


def run_commands(folder: Path, commands: dict[str, int], on_one_node: bool) -> dict[str, tuple[int, str, str, int]]:
    """Run commands as a rank of torchrun, each with its port. Return exit code, stdout, stderr, and exports of each."""
    rank, found = dist.get_rank(), {}
    dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(doctor, "DISK_TEST_BYTES", doctor.CHUNK_BYTES)
        exports, export = [], evaluate.export
        patch.setattr(evaluate, "export", lambda *args, **options: exports.append(args) or export(*args, **options))
        for command, port in commands.items():
            local = {"LOCAL_RANK": rank if on_one_node else 0, "LOCAL_WORLD_SIZE": 2 if on_one_node else 1}
            address = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            for name, value in (local | address).items():
                patch.setenv(name, str(value))
            patch.setattr(sys, "argv", ["ithaka", *command.split()])
            out, err, code = io.StringIO(), io.StringIO(), 0
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
            found[command] = code, out.getvalue(), err.getvalue(), len(exports)
    return found


def start(ranks, folder: Path, commands: list[str], on_one_node: bool) -> list[dict]:
    config = tiny_run(folder, train={"steps": 1, "validate_every": 0})
    (folder / "run.yaml").write_text(to_yaml(config))
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in commands]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        ports = [free.getsockname()[1] for free in sockets]
    return ranks.run(2, run_commands, folder, dict(zip(commands, ports, strict=True)), on_one_node)


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_commands_end_well_and_print_once(ranks, tmp_path, slow):
    """Each rank is a node if slow."""
    commands = [command for command in COMMANDS if slow or not command.startswith(SLOW)]
    first, second = start(ranks, tmp_path, commands, on_one_node=not slow)
    for command in commands:
        code, out, err, exports = first[command]
        assert (code, second[command][0]) == (0, 0), (command, err, second[command][2])
        assert COMMANDS[command] in out, (command, out)
        assert second[command][1:3] == ("", ""), command
        # Each node exports a run, once; `sample` has one process.
        expected = {"evaluate run": (1, int(slow)), "sample run": (1, 0)}.get(" ".join(command.split()[:2]), (0, 0))
        assert (exports, second[command][3]) == expected, command


def test_an_error_of_all_ranks_is_left_to_rank_0(monkeypatch, capsys):
    """torchrun ends the other ranks while they wait."""

    class Ended(Exception):
        """Stands for SIGTERM."""

    def wait(seconds: float) -> None:
        raise Ended

    monkeypatch.setattr(launch.time, "sleep", wait)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for words in (["train", "--unknown"], ["train", "--run-dir", ""]):
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(Ended):
            cli.app(words)
        assert capsys.readouterr() == ("", "")
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(SystemExit) as end:
            cli.app(words)
        assert end.value.code == ExitCode.WRONG_INPUT and words[1] in capsys.readouterr().err
