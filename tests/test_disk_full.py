"""A full disk in a step ends the run with one error, without a hang, and the run resumes from its
last checkpoint. Evaluations, profiles and descriptions that cannot be written do not end the run.
Commands exit with 75 and leave no incomplete model."""

import contextlib
import dataclasses
import errno
import io
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from ithaka import cli
from ithaka.checkpoint import save
from ithaka.checkpoint.export import export
from ithaka.config import paths
from ithaka.exits import ExitCode, TransientError
from ithaka.run import launch
from ithaka.train import loop, prepare, watch
from ithaka.train import trainer as trainer_module
from ithaka.train.loop import train
from runs import (
    bitwise_metrics,
    copy_run_at_step,
    metrics,
    run,
    start_program,
    tiny_run,
    validate,
)


def train_on_a_small_disk(run):
    """Rank 1's disk has room for three tensors, so it fails inside a step, while rank 0 waits for
    it in an exchange."""
    calls = []
    reserve = os.posix_fallocate

    def reserve_little(*args):
        calls.append(args)
        if len(calls) > 3 and os.environ["RANK"] == "1":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(*args)

    os.posix_fallocate = reserve_little
    train(run)


def with_memory(config, **memory):
    return dataclasses.replace(config, memory=dataclasses.replace(config.memory, **memory))


@pytest.mark.slow
def test_a_full_disk_in_a_step_is_explained_once_and_the_run_resumes(ranks, tmp_path):
    plan = {"steps": 4, "save_every": 2, "validate_every": 0, "validate_sequences": 0}
    sections = {
        "model": {"num_hidden_layers": 2},
        "parallel": {"cp": 2},
        "optim": {"schedule": "constant"},
    }
    reference = tiny_run(tmp_path / "reference", train=plan, **sections)
    ranks.run(2, run, reference)
    interrupted_dir = copy_run_at_step(reference.train.run_dir, tmp_path / "interrupted", step=2)
    interrupted = dataclasses.replace(
        reference, train=dataclasses.replace(reference.train, run_dir=interrupted_dir)
    )
    disk = tmp_path / "disk"
    disk.mkdir()
    full = with_memory(interrupted, offload="disk", keep_attention="all", disk_path=disk)
    program = start_program(full, 2, resume=True, rank=train_on_a_small_disk)
    assert program.wait() == ExitCode.OUT_OF_MEMORY, program.stderr
    last = full.train.run_dir / "checkpoints" / "step-00000002"
    assert "OutOfMemoryError: rank 1, after layer " in program.stderr
    assert program.stderr.count("OutOfMemoryError") == 1 and "Traceback" not in program.stderr
    for fragment in (
        f"disk: 3968 more bytes needed in {disk}",
        "No space left on device",
        "memory.disk_path",
        str(last),
    ):
        assert fragment in program.stderr
    assert list(disk.iterdir()) == [] and last.is_dir()
    ranks.run(2, run, with_memory(interrupted, offload="host"), Path(interrupted.train.run_dir))
    assert bitwise_metrics(interrupted.train.run_dir) == bitwise_metrics(reference.train.run_dir)


def cut_off(trace, path):
    """Truncate the trace without an error, as PyTorch's profiler does on a full disk."""
    Path(path).write_text('{"traceEvents": [')


@pytest.mark.parametrize(
    "file",
    [
        pytest.param("evaluations/step-{}.json", marks=pytest.mark.slow),
        pytest.param("profile/step-{}/profile.json", marks=pytest.mark.slow),
        None,
    ],
)
def test_an_evaluation_or_a_profile_that_cannot_be_written_does_not_end_the_run(
    tmp_path, monkeypatch, capsys, file
):
    train = {"save_every": 0, "validate_every": 0, "validate_sequences": 0}
    config = tiny_run(tmp_path, train=train, evaluate={"every": 2}, profile={"every": 2})
    results = {
        "loss": 1.5,
        "long_context_gain": None,
        "key_tokens": None,
        "short_context_loss": 2.5,
        "retrieval": [],
    }
    monkeypatch.setattr(trainer_module, "measure_all", lambda *_: results)
    monkeypatch.setattr(prepare, "read_text", lambda *_, **__: ())
    monkeypatch.setattr(prepare, "check_prompts", lambda *_: None)
    if file is None:
        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", cut_off)
    full = [config.train.run_dir / file.format(step) for step in (2, 4) if file]
    for path in full:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to("/dev/full")  # opens, and every write fails with ENOSPC
    full.append(config.train.run_dir / "plan.json")

    def write_atomic(path, text):
        if path in full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        paths.write_atomic(path, text)

    for module in (trainer_module, watch):
        monkeypatch.setattr(module, "write_atomic", write_atomic)
    loop.train(validate(config, force=True))
    what = "evaluation" if file and "eval" in file else "profile"
    output = capsys.readouterr().out
    assert output.count(f"The {what} cannot be written (") == 1
    assert (
        output.count("The description of the machine and the plan cannot be written (OSError: ")
        == 1
    )
    assert ("No space left on device" if file else "trace.json is incomplete") in output
    records = metrics(config.train.run_dir)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["evaluate/loss"] for record in records[1::2]] == [1.5, 1.5]
    others = {"evaluation": "profile/step-4/profile.json", "profile": "evaluations/step-4.json"}
    assert (config.train.run_dir / others[what]).is_file()
    if file and what == "profile":
        (config.train.run_dir / "config.yaml").unlink()
        # in `ithaka profile`, the profile is the only output
        with pytest.raises(OSError, match="No space left"):
            loop.train(validate(config, force=True), only_profile=True)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """The directory, exit code and stderr of a run whose disk is full at its second and last
    save."""
    settings = {"steps": 2, "save_every": 1, "validate_every": 0, "validate_sequences": 0}
    config = tiny_run(tmp_path_factory.mktemp("full"), train=settings)
    create = save._Files.create_stream

    def create_on_full_disk(self, path, mode):
        is_full = mode == "wb" and "step-00000002" in str(path)
        return create(self, "/dev/full" if is_full else path, mode)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as stderr:
        patch.setattr(save._Files, "create_stream", create_on_full_disk)
        code = launch.run_ranks(run, (config,), 1)
    return config.train.run_dir, code, stderr.getvalue()


def test_a_full_disk_at_the_last_save_is_named(interrupted):
    run_dir, code, stderr = interrupted
    saved, failed = (run_dir / "checkpoints" / f"step-0000000{step}" for step in (1, 2))
    assert code == ExitCode.TRANSIENT
    reason = "rank 0: OSError: [Errno 28] No space left on device"
    last = f"The last checkpoint is {saved}. Free space, then resume the run."
    assert stderr == f"CheckpointError: checkpoint {failed} cannot be written: {reason}. {last}\n"
    assert [path.name for path in failed.parent.iterdir()] == [saved.name]


def test_an_export_to_a_full_disk_leaves_nothing(interrupted, tmp_path, monkeypatch):
    def fill_disk(model, folder):
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", fill_disk)
        with pytest.raises(
            TransientError,
            match=f"^OUT_DIR={tmp_path}/new/out cannot be written: the disk is full; ",
        ):
            export(interrupted[0], tmp_path / "new/out")
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "model.safetensors").write_bytes(b"earlier")
        with pytest.raises(TransientError, match=f"OUT_DIR={tmp_path} "):
            export(interrupted[0], tmp_path, force=True)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
            "model.safetensors": b"earlier"
        }
    export(interrupted[0], tmp_path, force=True)
    assert {"config.json", "model.safetensors"} <= {
        path.name for path in tmp_path.iterdir() if path.is_file()
    }
    assert not list(tmp_path.glob(".*"))


PLAN = ["plan", "llama3.1-8b", "--gpus", "8xH100-80GB"]
DATA = ["data", "--html", "/dev/full", "--set", "data.tokenizer=bytes", "--set", "data.context=61"]


@pytest.mark.parametrize(
    "command, full_stdout, message",
    [
        pytest.param(
            *(PLAN, True, "the disk is full (OSError: [Errno 28] No space left on device"),
            marks=pytest.mark.slow,
        ),
        (["--help"], True, "the disk is full (OSError: [Errno 28] No space left on device"),
        (
            [*PLAN, "--out", "/dev/full"],
            False,
            "--out=/dev/full cannot be written: the disk is full; free space",
        ),
        (DATA, False, "--html=/dev/full cannot be written: the disk is full; free space"),
    ],
)
def test_output_to_a_full_disk_gives_a_one_line_error(
    tmp_path, monkeypatch, capsys, command, full_stdout, message
):
    (tmp_path / "a.txt").write_text("some text " * 100)
    command = [*command, "--set", f"data.path={tmp_path}"] if command is DATA else command
    monkeypatch.setattr(sys, "argv", ["ithaka", *command])
    with open("/dev/full", "w") as stdout, monkeypatch.context() as patch:
        if full_stdout:
            patch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code == ExitCode.TRANSIENT
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"TransientError: {message}") and stderr.count("\n") == 1


def test_a_rank_that_cannot_write_its_log_still_finishes(tmp_path, monkeypatch):
    (tmp_path / "call").write_bytes(
        pickle.dumps((os.getpid(), sys.path)) + pickle.dumps((print, ("done",)))
    )
    monkeypatch.setattr(launch, "_exit_with_launcher", lambda *_: None)
    monkeypatch.setattr(launch, "_outcome_dir", None)
    with open("/dev/full", "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        launch.run_child_rank(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["call"]
