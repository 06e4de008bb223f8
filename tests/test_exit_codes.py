"""Exit codes are one table, which the docs quote and their Slurm and Kubernetes recipes follow."""

import errno
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from ithaka.checkpoint import checkpoints as checkpoint_files
from ithaka.cli import app
from ithaka.comm.agree import SharedTransientError
from ithaka.config import ConfigError, load_config
from ithaka.data.cache import TokenCache
from ithaka.data.documents import files, read
from ithaka.data.tokenizer import ByteTokenizer
from ithaka.exits import FINAL_EXIT_CODES, ExitCode, TransientError, exit_code_for
from ithaka.layer.slabs import StoreError
from ithaka.run import launch
from ithaka.train import bad_steps, loop, out_of_memory
from ithaka.train import trainer as trainer_module
from runs import tiny_run, validate

DOCS = Path(__file__).parents[1] / "docs/running-for-weeks.md"
CODES = DOCS.with_name("exit-codes.md")


def block(name: str) -> str:
    return re.search(rf"```{name}\n(.*?)```", DOCS.read_text(), re.DOTALL).group(1)


def test_the_docs_quote_the_table():
    rows = re.findall(r"^\| (\d+(?: \+ signal)?) \| (.*) \| (yes|no) \|$", CODES.read_text(), re.M)
    labels = {
        code: f"{code} + signal" if code is ExitCode.SIGNALED else str(code) for code in ExitCode
    }
    assert rows == [
        (labels[code], code.meaning, "yes" if code.final else "no") for code in ExitCode
    ]
    assert {2, 3, 5} == FINAL_EXIT_CODES - {ExitCode.DONE}
    for name in re.findall(r"`train\.(\w+)", DOCS.read_text() + CODES.read_text()):
        assert hasattr(load_config().train, name), name


def test_kubernetes_fails_the_job_on_final_codes_only():
    rules = yaml.safe_load(block("yaml"))["spec"]["podFailurePolicy"]["rules"]
    [failing] = [rule["onExitCodes"] for rule in rules if rule["action"] == "FailJob"]
    assert (failing["operator"], set(failing["values"])) == (
        "In",
        FINAL_EXIT_CODES - {ExitCode.DONE},
    )


@pytest.mark.parametrize(
    "codes, saves, attempts, ended, requeued",
    [
        *([[code], [], 1, code, False] for code in sorted(FINAL_EXIT_CODES)),
        ([4, 75, 1, 137], [], 4, 137, False),  # three restarts
        # three more after a checkpoint in the fourth attempt
        ([4, 4, 4, 4, 4, 4, 0], [3], 7, 0, False),
        ([4, 143], [], 2, 0, True),
        ([138], [], 1, 0, True),
    ],
)
def test_the_slurm_script_restarts_unless_the_code_is_final(
    tmp_path, codes, saves, attempts, ended, requeued
):
    (tmp_path / "runs/long").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    commands = {
        "srun": "n=$(cat tried 2> /dev/null | wc -l); echo >> tried; "
        f"codes=({' '.join(map(str, codes))}); "
        f'[[ " {" ".join(map(str, saves))} " == *" $n "* ]] && echo step-$n > runs/long/latest; '
        "exit ${codes[$n]}",
        "scontrol": '[ "$1" = show ] && echo localhost || echo "$@" >> requeued',
        "sleep": "",
    }
    for name, line in commands.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n",
    }
    done = subprocess.run(
        ["bash", "-c", block("slurm")], cwd=tmp_path, env=environment, timeout=120
    )
    assert (done.returncode, len((tmp_path / "tried").read_text())) == (ended, attempts)
    assert (tmp_path / "requeued").exists() == requeued


def wrap(error: Exception) -> Exception:
    """Return a library's error that was caused by `error`."""
    try:
        raise ValueError("cannot be loaded") from error
    except ValueError as caught:
        return caught


@pytest.mark.parametrize(
    "error, code",
    [
        (ConfigError("x"), ExitCode.WRONG_INPUT),
        (torch.OutOfMemoryError("CUDA out of memory"), ExitCode.OUT_OF_MEMORY),
        (OSError(errno.ENOMEM, ""), ExitCode.OUT_OF_MEMORY),
        (bad_steps.Diverged("x"), ExitCode.DIVERGED),
        (out_of_memory.OutOfMemoryError("x"), ExitCode.OUT_OF_MEMORY),
        *(
            (OSError(number, ""), ExitCode.TRANSIENT)
            for number in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
        ),
        (TimeoutError("x"), ExitCode.TRANSIENT),
        (wrap(OSError(errno.ESTALE, "")), ExitCode.TRANSIENT),
        (wrap(socket.gaierror(socket.EAI_AGAIN, "")), ExitCode.TRANSIENT),
        (SharedTransientError("x"), ExitCode.TRANSIENT),
        # as httpx's
        (
            type("ReadError", (type("TransportError", (Exception,), {}),), {})("x"),
            ExitCode.TRANSIENT,
        ),
        *((OSError(number, ""), ExitCode.TRANSIENT) for number in (errno.ENOSPC, errno.EDQUOT)),
        # as in tokenizers and safetensors
        (Exception("No space left on device (os error 28)"), ExitCode.TRANSIENT),
        *((OSError(number, ""), ExitCode.FAILED) for number in (errno.ENOENT, errno.EACCES)),
        (StoreError("host", "x"), ExitCode.OUT_OF_MEMORY),
        (RuntimeError("x"), ExitCode.FAILED),
    ],
)
def test_errors_have_the_exit_codes_of_the_table(error, code):
    assert exit_code_for(error) is code


def test_an_interrupt_before_the_ranks_start_has_its_code(monkeypatch):
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ithaka.plan.hardware.find_hardware", interrupt)
    result = CliRunner().invoke(app, ["plan", "llama3.1-8b", "--gpus", "8xH100-80GB"])
    assert (result.exit_code, result.stderr) == (
        ExitCode.SIGNALED + signal.SIGINT,
        "stopped by SIGINT\n",
    )


def failing(number: int):
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    "number",
    [
        errno.EIO,
        *(
            pytest.param(number, marks=pytest.mark.slow)
            for number in (errno.ESTALE, errno.ETIMEDOUT)
        ),
    ],
)
def test_storage_that_fails_in_a_step_is_transient(tmp_path, monkeypatch, capsys, number):
    config = tiny_run(tmp_path, train={"validate_every": 0, "validate_sequences": 0})
    checked = validate(config)
    train_step = trainer_module.train_step
    steps = []
    with monkeypatch.context() as patch:
        patch.setattr(read, "_read_bytes", failing(number))
        assert launch.run_ranks(loop.train, (checked,), 1) == ExitCode.TRANSIENT  # before step 1
    stderr = capsys.readouterr().err
    assert (
        stderr.startswith("TransientError: ")
        and f"{config.data.path}/" in stderr
        and os.strerror(number) in stderr
    )

    def fail_in_step_2(*args, **kwargs):
        steps.append(args)
        return train_step(*args, **kwargs) if len(steps) == 1 else failing(number)()

    monkeypatch.setattr(trainer_module, "train_step", fail_in_step_2)
    assert launch.run_ranks(loop.train, (checked,), 1) == ExitCode.TRANSIENT
    assert len(steps) == 2


@pytest.mark.parametrize(
    "number, kind",
    [(errno.EIO, TransientError), (errno.ENOENT, TransientError), (errno.ENOSPC, TransientError)],
)
def test_every_rank_of_a_node_raises_the_error_of_the_rank_that_tokenizes(
    tmp_path, monkeypatch, number, kind
):
    """A missing file is transient, as it may come back; if it does not, the next start refuses the
    data."""
    text = tmp_path / "a.txt"
    text.write_text("some text")
    [shard] = read.make_shards(files.find_files(text).files, load_config().data)
    caches = [TokenCache(tmp_path / "tokens", ByteTokenizer(), fills) for fills in (True, False)]
    monkeypatch.setattr(read, "_read_bytes", failing(number))
    for cache in caches:
        with pytest.raises(kind, match=re.escape(os.strerror(number))) as caught:
            cache.load(shard)
        assert str(text) in str(caught.value)


def test_a_checkpoint_on_a_failing_disk_is_not_damaged(tmp_path, monkeypatch):
    """The previous checkpoint must not replace it."""
    path = tmp_path / "checkpoints/step-00000002"
    path.mkdir(parents=True)
    monkeypatch.setattr(checkpoint_files, "read_state", failing(errno.EIO))
    for look in (
        checkpoint_files.find_problem,
        checkpoint_files.find_corruption,
        lambda path: checkpoint_files.find_checkpoint(tmp_path),
    ):
        with pytest.raises(
            TransientError, match=f"{path.name} cannot be read at the moment .*start again"
        ):
            look(path)
