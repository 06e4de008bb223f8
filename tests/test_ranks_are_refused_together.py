"""If one rank is refused, all ranks end at once, with one message."""

import errno
import shutil
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from ithaka import hub
from ithaka.cli import app
from ithaka.comm.agree import RankError, SharedError, SharedTransientError, raise_first
from ithaka.config import ConfigError, load_config
from ithaka.exits import ExitCode, TransientError
from ithaka.run import adopt, detect
from ithaka.run.draft import AUTO, Request
from ithaka.run.road import prepare_run
from ithaka.train import parts
from runs import run, tiny_run


def lacks_memory(patch, folder):
    patch.setattr(detect, "available_memory", lambda: 2**20)


def lacks_a_file(patch, folder):
    def build_model(*args, **kwargs):
        raise ConfigError("model.path has no file x; copy it again")

    patch.setattr(parts, "build_model", build_model)


@contextmanager
def under_torchrun(ranks_per_node=1):
    """Set up one of two ranks like torchrun; by default, each is on a node of its own."""
    rank = dist.get_rank()
    per_node = ranks_per_node
    variables = {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": rank % per_node,
        "LOCAL_WORLD_SIZE": per_node,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, str(value))
        yield patch


def settings(folder):
    files = {
        "model.path": folder / "config.json",
        "data.path": folder / "texts",
        "data.tokenizer": "bytes",
    }
    return tuple(f"{name}={value}" for name, value in files.items())


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
    """Return the run directory that ranks with different clocks choose, and the error if rank 1 has
    no checkpoint."""
    with under_torchrun() as patch:
        rank = dist.get_rank()
        patch.setattr(adopt.time, "strftime", lambda _: f"clock-{rank}")
        chosen = prepare_run(Request(changes=settings(folder))).run_dir
        patch.chdir(folder / str(rank))
        try:
            prepare_run(Request(None, settings(folder), AUTO, Path("run")))
        except TransientError as error:  # a shared file system may show it late
            return str(chosen), str(error)


def hub_requests(folder, ranks_per_node, lacks_files):
    """What a run asks the hub for on each rank. With `lacks_files`, rank 1's cache has no files."""
    requests = []
    snapshot = folder / f"models--org--tiny/snapshots/{'a' * 40}"

    def answer(*_, **__):
        requests.append("commit")
        return SimpleNamespace(sha="a" * 40)

    def download(*_, revision=None, dry_run=False, **__):
        requests.append(f"files of {revision or 'main'}")
        return [] if dry_run else str(snapshot)

    with under_torchrun(ranks_per_node) as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        patch.setattr(huggingface_hub.HfApi, "model_info", answer)
        patch.setattr(huggingface_hub.HfApi, "dataset_info", answer)
        patch.setattr(huggingface_hub, "snapshot_download", download)
        if lacks_files and dist.get_rank() == 1:
            patch.setattr(hub, "model_files", lambda path: {})
        changes = (
            "data.context=64",
            "model.path=org/tiny",
            "evaluate.data=hf://org/texts",
            "evaluate.every=1",
            f"data.path={folder / 'texts'}",
            "data.tokenizer=bytes",
        )
        found = prepare_run(Request(changes=changes))
    assert (
        found.config.model.path == snapshot
        and str(found.config.evaluate.data) == f"hf:/org/texts@{'a' * 40}"
    )
    assert {*found.commits} == {"org/tiny", "hf:/org/texts"}
    return requests


def test_only_rank_0_asks_the_hub_and_only_nodes_without_a_models_files_download_them(
    ranks, tmp_path
):
    tiny_run(tmp_path)
    (snapshot := tmp_path / f"models--org--tiny/snapshots/{'a' * 40}").mkdir(parents=True)
    shutil.copy(tmp_path / "config.json", snapshot)
    (snapshot / "model.safetensors").touch()
    asked = ["commit", "commit", "files of main", "files of main"]
    for ranks_per_node, lacks_files in ((2, True), (1, False)):
        rank_0, rank_1 = ranks.run(2, hub_requests, tmp_path, ranks_per_node, lacks_files)
        assert (sorted(rank_0), rank_1) == (asked, [])
    _, rank_1 = ranks.run(2, hub_requests, tmp_path, 1, True)
    assert rank_1 == ["commit", f"files of {'a' * 40}", f"files of {'a' * 40}"]


def test_rank_0_chooses_the_run_directory_and_all_ranks_must_find_it(ranks, tmp_path):
    for rank in (0, 1):
        tiny_run(
            tmp_path / str(rank), train={"run_dir": str(tmp_path / str(rank) / "run"), "steps": 1}
        )
    tiny_run(tmp_path)
    ranks.run(
        1,
        run,
        load_config(
            overrides=[*settings(tmp_path), f"train.run_dir={tmp_path / '0/run'}", "train.steps=1"]
        ),
    )
    error = (
        "train.run_dir=run: rank 0 finds run/checkpoints/step-00000001 and rank 1 none; start "
        "again, "
    )
    for chosen, message in ranks.run(2, directories, tmp_path):
        assert chosen == "runs/clock-0"
        assert message == f"{error}or put it on a file system that all nodes share"


@pytest.mark.parametrize(
    "lacking, words",
    [(lacks_memory, "1 MiB available"), (lacks_a_file, "model.path has no file x; copy it again")],
)
def test_nodes_do_not_wait_for_a_refused_one(ranks, tmp_path, lacking, words):
    tiny_run(tmp_path)
    (code, stderr), (other_code, other_stderr) = ranks.run(2, train, tmp_path, lacking, [1])
    assert (code, other_code, other_stderr) == (ExitCode.WRONG_INPUT, ExitCode.WRONG_INPUT, "")
    assert (
        stderr.startswith("ConfigError: rank 1 on ") and words in stderr and stderr.count("\n") == 1
    )
    assert not (tmp_path / "new").exists()


def test_an_error_on_all_ranks_is_printed_once_without_a_rank(ranks, tmp_path):
    tiny_run(tmp_path)
    results = ranks.run(2, train, tmp_path, lacks_a_file, [0, 1])
    refusal = "ConfigError: model.path has no file x; copy it again\n"
    assert results == [(ExitCode.WRONG_INPUT, refusal), (ExitCode.WRONG_INPUT, "")]


def test_an_error_that_a_restart_cannot_fix_is_raised_first():
    failures = [
        None,
        RankError(SharedTransientError, "the disk is slow"),
        RankError(SharedError, "no such file"),
    ]
    with pytest.raises(SharedError, match="^rank 2: no such file$"):
        raise_first(failures)
    with pytest.raises(SharedTransientError, match="^reading: rank 1: the disk is slow$"):
        raise_first(failures[:2], "reading")


def loses_its_disk(patch, folder):
    def build_model(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error", "model.safetensors")

    patch.setattr(parts, "build_model", build_model)


def test_a_transient_fault_on_one_rank_ends_all_ranks(ranks, tmp_path):
    tiny_run(tmp_path)
    (code, stderr), (other_code, _) = ranks.run(2, train, tmp_path, loses_its_disk, [1])
    assert (code, other_code) == (ExitCode.TRANSIENT, ExitCode.TRANSIENT)
    assert (
        stderr.startswith("TransientError: rank 1 on ")
        and "Input/output error: 'model.safetensors'" in stderr
    )
