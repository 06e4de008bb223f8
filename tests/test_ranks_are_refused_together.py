"""What one rank is refused for ends all of them at once, and is said once."""

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from ithaka.cli import app
from ithaka.config import ConfigError
from ithaka.plan.hardware import Host
from ithaka.train import loop, preflight
from runs import tiny_run


def lacks_memory(patch, folder):
    patch.setattr(preflight, "this_host", lambda path: Host(2**20, 2**40, folder))


def lacks_a_file(patch, folder):
    def build_model(*args, **kwargs):
        raise ConfigError("model.path has no file x; copy it again")

    patch.setattr(loop, "build_model", build_model)


def train(folder, lacking, on_ranks):
    """As torchrun starts it on two nodes, of which some lack something."""
    rank = dist.get_rank()
    config = ["--set", f"model.path={folder / 'config.json'}", "--set", f"data.path={folder / 'texts'}"]
    config += ["--set", "data.tokenizer=bytes", "--run-dir", str(folder / "new")]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
            patch.setenv(name, str(value))
        if rank in on_ranks:
            lacking(patch, folder)
        result = CliRunner().invoke(app, ["train", *config])
    return result.exit_code, result.stderr


@pytest.mark.parametrize(
    "lacking, words", [(lacks_memory, "1 MiB is there"), (lacks_a_file, "model.path has no file x; copy it again")]
)
def test_nodes_do_not_wait_for_one_that_is_refused(ranks, tmp_path, lacking, words):
    tiny_run(tmp_path)
    (code, said), (other_code, said_by_other) = ranks.run(2, train, tmp_path, lacking, [1], timeout_s=60)
    assert (code, other_code, said_by_other) == (2, 2, "")
    assert said.startswith("ConfigError: rank 1 on ") and words in said and said.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_what_all_ranks_are_refused_for_is_said_once_and_without_a_rank(ranks, tmp_path):
    tiny_run(tmp_path)
    said = ranks.run(2, train, tmp_path, lacks_a_file, [0, 1], timeout_s=60)
    assert said == [(2, "ConfigError: model.path has no file x; copy it again\n"), (2, "")]
