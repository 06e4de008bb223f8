"""If one rank is refused, all ranks end at once, with one message."""

import errno
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from ithaka.cli import app
from ithaka.comm.agree import RankError, SharedError, SharedTransientError, raise_first
from ithaka.config import ConfigError, load_config
from ithaka.exits import ExitCode, TransientError
from ithaka.run import preflight
from ithaka.run import resolve as run_module
from ithaka.train import trainer as trainer_module
from runs import run, tiny_run


def lacks_memory(patch, folder):
    patch.setattr(run_module, "available_memory", lambda: 2**20)


def lacks_a_file(patch, folder):
    def build_model(*args, **kwargs):
        raise ConfigError("model.path has no file x; copy it again")

    patch.setattr(trainer_module, "build_model", build_model)


@contextmanager
def under_torchrun():
    """Set up a rank like torchrun, one on each of two nodes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": dist.get_rank(), "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
            patch.setenv(name, str(value))
        yield patch


def settings(folder):
    files = {"model.path": folder / "config.json", "data.path": folder / "texts", "data.tokenizer": "bytes"}
    return [f"{name}={value}" for name, value in files.items()]


def train(folder, lacking, on_ranks):
    """Train on two nodes; `lacking` removes something from `on_ranks`."""
    config = [word for setting in settings(folder) for word in ("--set", setting)]
    config += ["--run-dir", str(folder / "new")]
    with under_torchrun() as patch:
        if dist.get_rank() in on_ranks:
            lacking(patch, folder)
        result = CliRunner().invoke(app, ["train", *config])
    return result.exit_code, result.stderr


def directories(folder):
    """Return the run directory that ranks with different clocks choose, and the error if rank 1 has no checkpoint."""
    with under_torchrun() as patch:
        rank = dist.get_rank()
        patch.setattr(preflight.time, "strftime", lambda _: f"clock-{rank}")
        chosen = preflight.preflight(None, settings(folder)).run_dir
        patch.chdir(folder / str(rank))
        try:
            preflight.preflight(None, settings(folder), preflight.AUTO, Path("run"))
        except TransientError as error:  # a shared file system may show it late
            return str(chosen), str(error)


def test_rank_0_chooses_the_run_directory_and_all_ranks_must_find_it(ranks, tmp_path):
    for rank in (0, 1):
        tiny_run(tmp_path / str(rank), train={"run_dir": str(tmp_path / str(rank) / "run"), "steps": 1})
    tiny_run(tmp_path)
    ranks.run(
        1, run, load_config(overrides=[*settings(tmp_path), f"train.run_dir={tmp_path / '0/run'}", "train.steps=1"])
    )
    error = "train.run_dir=run: rank 0 finds run/checkpoints/step-00000001 and rank 1 none; start again, "
    for chosen, message in ranks.run(2, directories, tmp_path):
        assert chosen == "runs/clock-0"
        assert message == f"{error}or put it on a file system that all nodes share"


@pytest.mark.parametrize(
    "lacking, words", [(lacks_memory, "1 MiB available"), (lacks_a_file, "model.path has no file x; copy it again")]
)
def test_nodes_do_not_wait_for_a_refused_one(ranks, tmp_path, lacking, words):
    tiny_run(tmp_path)
    (code, stderr), (other_code, other_stderr) = ranks.run(2, train, tmp_path, lacking, [1])
    assert (code, other_code, other_stderr) == (ExitCode.WRONG_INPUT, ExitCode.WRONG_INPUT, "")
    assert stderr.startswith("ConfigError: rank 1 on ") and words in stderr and stderr.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_an_error_on_all_ranks_is_printed_once_without_a_rank(ranks, tmp_path):
    tiny_run(tmp_path)
    results = ranks.run(2, train, tmp_path, lacks_a_file, [0, 1])
    refusal = "ConfigError: model.path has no file x; copy it again\n"
    assert results == [(ExitCode.WRONG_INPUT, refusal), (ExitCode.WRONG_INPUT, "")]


def test_an_error_that_a_restart_cannot_fix_is_raised_first():
    failures = [None, RankError(SharedTransientError, "the disk is slow"), RankError(SharedError, "no such file")]
    with pytest.raises(SharedError, match="^rank 2: no such file$"):
        raise_first(failures)
    with pytest.raises(SharedTransientError, match="^reading: rank 1: the disk is slow$"):
        raise_first(failures[:2], "reading")


def loses_its_disk(patch, folder):
    def build_model(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error", "model.safetensors")

    patch.setattr(trainer_module, "build_model", build_model)


def test_a_transient_fault_on_one_rank_ends_all_ranks(ranks, tmp_path):
    tiny_run(tmp_path)
    (code, stderr), (other_code, _) = ranks.run(2, train, tmp_path, loses_its_disk, [1])
    assert (code, other_code) == (ExitCode.TRANSIENT, ExitCode.TRANSIENT)
    assert stderr.startswith("TransientError: rank 1 on ") and "Input/output error: 'model.safetensors'" in stderr
