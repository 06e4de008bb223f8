"""A run that was stopped, killed or moved resumes with identical results."""

import contextlib
import dataclasses
import io
import random
import re
from pathlib import Path

import pytest
import torch

import faults
from faults import moved
from ithaka.config import load_config
from runs import adopted, bitwise_metrics, copy_run_at_step, metrics, run, tiny_run, validate


def resumed_copy(config, folder, step):
    return moved(config, copy_run_at_step(config.train.run_dir, folder, step))


# (2, 2) below
@pytest.mark.parametrize("num_ranks,cp", [(1, 1), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_resumed_run_repeats_every_number(ranks, tmp_path, num_ranks, cp):
    optim = {
        "lr": 1e-2,
        "schedule": "wsd",
        "cooldown_steps": 2,
        "lr_factors": {"embed": 0.1, "0.*norm": 2},
    }
    config = tiny_run(tmp_path, parallel={"cp": cp}, optim=optim)
    ranks.run(num_ranks, run, config)
    expected = bitwise_metrics(config.train.run_dir)
    assert [record[0] for record in expected] == [0, 1, 2, 3, 4]
    again = resumed_copy(config, tmp_path / "again", step=2)
    ranks.run(num_ranks, run, again, again.train.run_dir)
    assert bitwise_metrics(again.train.run_dir) == expected


def test_resume_on_other_ranks_agrees_up_to_rounding(ranks, tmp_path):
    config = tiny_run(tmp_path, train={"steps": 4, "save_every": 2, "keep_last": 3})
    ranks.run(2, run, config)
    again = resumed_copy(config, tmp_path / "again", step=2)
    ranks.run(1, run, again, again.train.run_dir)
    losses, resumed_losses = (
        [r["loss"] for r in metrics(c.train.run_dir)[3:]] for c in (config, again)
    )
    assert resumed_losses == pytest.approx(losses, rel=1e-5)


def compute_in_bf16():
    """On some CPUs, change how PyTorch multiplies in this process (see trainer._settle_matmuls)."""
    ones = torch.ones(32, 32, dtype=torch.bfloat16)
    torch.nn.functional.linear(ones, ones)


@pytest.mark.slow
def test_a_run_that_is_killed_repeatedly_resumes_bit_for_bit(ranks, tmp_path):
    """Kills the run at a random pass of each of three points; `make faults` kills a hundred runs at
    five points."""
    undisturbed = faults.configured(tmp_path / "undisturbed")
    choice = random.Random(5)
    ranks.run(2, compute_in_bf16)  # the killed ranks are new processes, which have not done this
    ranks.run(2, run, undisturbed)
    config = moved(undisturbed, tmp_path / "run")
    for point, most in {"save": 2, "backward": 4, "publish": 5}.items():
        victim = 0 if point == "publish" else choice.randrange(2)
        faults.kill(config, tmp_path / point, point, choice.randint(1, most), victim)
    faults.finish(ranks, undisturbed, config)


def test_a_run_is_resumed_from_another_folder(tmp_path, monkeypatch, capsys):
    """config.yaml has absolute paths. The relative paths that the run started with do not count as
    changed."""
    # with characters special to glob
    start = tmp_path / "start [1]"
    elsewhere = tmp_path / "elsewhere"
    start.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(start)
    sources = [{"path": "texts/0*.txt"}, {"path": "texts/1*.txt"}]
    data = {
        "path": None,
        "sources": sources,
        "validation_path": "texts/20.txt",
        "tokenizer": "bytes",
        "context": 30,
    }
    config = tiny_run(
        Path("."),
        data=data,
        train={"run_dir": "run", "steps": 2, "save_every": 0, "validate_every": 0},
    )
    Path("bytes").mkdir()  # the tokenizer is still the built-in one
    run(config)
    assert "random weights" in capsys.readouterr().out
    saved = load_config(start / "run" / "config.yaml")
    assert (
        saved.model.path == start / "config.json"
        and saved.data.validation_path == start / "texts/20.txt"
    )
    assert saved.data.tokenizer == "bytes" and not saved.data.sources[0].path.exists()
    same = validate(
        adopted(None, ["train.steps=3", "model.path=config.json"], Path("run")).config, Path("run")
    )
    assert {*same.changed} == {"train.steps", "optim.decay_steps"}
    monkeypatch.chdir(elsewhere)
    again = adopted(None, ["train.steps=3"], start / "run").config
    run(again, start / "run")
    assert "random weights" not in capsys.readouterr().out
    lines = metrics(start / "run")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert {key for line in lines for key in line if key.startswith("loss/")} == {
        "loss/0*",
        "loss/1*",
    }


def test_finished_run_is_not_resumed_without_more_steps(ranks, tmp_path):
    config = tiny_run(tmp_path, train={"steps": 1})
    ranks.run(1, run, config)
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(AssertionError, match=r"train.steps=1 .*--set train.steps=2"):
        ranks.run(1, run, config, config.train.run_dir)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def resume(config):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        run(config, config.train.run_dir)
    return output.getvalue()


def test_a_longer_run_keeps_its_learning_rate(ranks, tmp_path):
    optim = {"lr": 1e-2, "warmup_steps": 0, "decay_steps": 3}
    config = tiny_run(tmp_path, train={"steps": 3, "validate_every": 1}, optim=optim)
    ranks.run(1, run, config)
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=5))
    [output] = ranks.run(1, resume, longer)
    assert re.search(r"lr .*cosine.*--set optim.decay_steps=10\n", output)
    assert re.search(
        r"validation loss +\d\.\d+ -> \d\.\d+, first and last since the resume after step 3\n",
        output,
    ), output
    rates = [line["lr"] for line in metrics(config.train.run_dir) if line["lr"] is not None]
    assert rates == pytest.approx([1e-2, 5.5e-3, 1e-3, 1e-3, 1e-3])


def test_changed_settings_are_reported_and_take_effect(ranks, tmp_path):
    config = tiny_run(tmp_path, train={"steps": 1})
    ranks.run(1, run, config)
    for steps, context in ((2, 90), (3, 90)):
        train = dataclasses.replace(config.train, steps=steps)
        config = dataclasses.replace(
            config, train=train, data=dataclasses.replace(config.data, context=context)
        )
        [output] = ranks.run(1, resume, config)
        assert f" {steps} (was {steps - 1})" in output
        assert ("data.context  90 (was 61)" in output) == (steps == 2)
        loss = metrics(config.train.run_dir)[-1]["val_loss"]
        # not the loss at the other context
        assert re.search(rf"validation loss +{loss:.4f}\n", output)
    assert load_config(tmp_path / "run/config.yaml") == config
    lines = metrics(config.train.run_dir)
    assert [line["tokens"] for line in lines] == [0, 61, 61 + 90, 61 + 90 + 90]
