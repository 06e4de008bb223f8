"""A run that was stopped, killed or moved goes on as if nothing had happened."""

import contextlib
import dataclasses
import io
import re
import time
from unittest.mock import patch

import pytest
import torch.distributed as dist

from ithaka.config import load
from ithaka.train import loop
from ranks import Ranks
from runs import copy_back_at, metrics, numbers, run, start_program, tiny_run, wait_for


def moved(config, run_dir):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, run_dir=run_dir))


def resumed_copy(config, folder, step):
    return moved(config, copy_back_at(config.train.run_dir, folder, step))


@pytest.mark.parametrize("num_ranks,cp", [(1, 1), (2, 2), (2, 1)])
def test_resumed_run_repeats_every_number(ranks, tmp_path, num_ranks, cp):
    config = tiny_run(tmp_path, parallel={"cp": cp})
    ranks.run(num_ranks, run, config)
    whole = numbers(config.train.run_dir)
    assert [record[0] for record in whole] == [0, 1, 2, 3, 4]
    again = resumed_copy(config, tmp_path / "again", step=2)
    ranks.run(num_ranks, run, again, again.train.run_dir)
    assert numbers(again.train.run_dir) == whole


def test_resume_on_other_ranks_agrees_up_to_rounding(ranks, tmp_path):
    config = tiny_run(tmp_path, train={"steps": 4, "save_every": 2, "keep_last": 3})
    ranks.run(2, run, config)
    again = resumed_copy(config, tmp_path / "again", step=2)
    ranks.run(1, run, again, again.train.run_dir)
    losses, others = ([r["loss"] for r in metrics(c.train.run_dir)[3:]] for c in (config, again))
    assert others == pytest.approx(losses, rel=1e-5)


def run_until_killed(config):
    """Rank 1 does not come out of step 6, and rank 0 waits for it."""
    steps, train_step = [], loop.train_step

    def slow_step(*args, **kwargs):
        steps.append(len(steps) + 1)
        if steps[-1] == 6 and dist.get_rank() == 1:
            time.sleep(60)
        return train_step(*args, **kwargs)

    with patch.object(loop, "train_step", slow_step):
        run(config)


def test_killed_run_resumes_bit_for_bit(ranks, tmp_path):
    whole = tiny_run(tmp_path, train={"steps": 8, "save_every": 2})
    killed = moved(whole, tmp_path / "killed")
    ranks.run(2, run, whole)
    victims = Ranks(2)
    victims.start(2, tmp_path, run_until_killed, killed)
    wait_for(lambda: len(metrics_so_far(killed.train.run_dir)) == 6)  # of steps 0 to 5
    wait_for(lambda: (killed.train.run_dir / "checkpoints/step-00000004").exists())
    victims.close()
    program = start_program(killed, 2, resume=True)
    assert program.wait(120) == 0, program.stderr
    told = ("2 (CPU) = 1 data x 2 context parallel", "resumed", "step 8/8", "ithaka export")
    assert [part for part in told if part not in program.stdout] == []
    assert numbers(killed.train.run_dir) == numbers(whole.train.run_dir)


def metrics_so_far(run_dir):
    path = run_dir / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def test_finished_run_is_not_resumed_without_more_steps(ranks, tmp_path):
    config = tiny_run(tmp_path, train={"steps": 1})
    ranks.run(1, run, config)
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(AssertionError, match=r"train.steps=1 is reached already.*--set train.steps=2"):
        ranks.run(1, run, config, config.train.run_dir)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def go_on(config):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        run(config, config.train.run_dir)
    return output.getvalue()


def test_a_longer_run_goes_on_at_the_rate_it_had(ranks, tmp_path):
    optim = {"lr": 1e-2, "warmup_steps": 0, "decay_steps": 3}
    config = tiny_run(tmp_path, train={"steps": 3}, optim=optim)
    ranks.run(1, run, config)
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=5))
    [output] = ranks.run(1, go_on, longer)
    assert re.search(r"lr +stays as it is then; for a longer cosine add\s+--set optim.decay_steps=10\n", output)
    rates = [line["lr"] for line in metrics(config.train.run_dir) if line["lr"] is not None]
    assert rates == pytest.approx([1e-2, 5.5e-3, 1e-3, 1e-3, 1e-3])


def test_changed_settings_are_told_and_take_effect(ranks, tmp_path):
    config = tiny_run(tmp_path, train={"steps": 1})
    ranks.run(1, run, config)
    for steps, context in ((2, 90), (3, 90)):
        train = dataclasses.replace(config.train, steps=steps)
        config = dataclasses.replace(config, train=train, data=dataclasses.replace(config.data, context=context))
        [output] = ranks.run(1, go_on, config)
        assert f" {steps} (was {steps - 1})" in output
        assert ("data.context  90 (was 61)" in output) == (steps == 2)
        loss = metrics(config.train.run_dir)[-1]["val_loss"]
        assert re.search(rf"validation loss +{loss:.4f}\n", output)  # not beside validation at the other context
    assert load(tmp_path / "run/config.yaml") == config
    lines = metrics(config.train.run_dir)
    assert [line["tokens"] for line in lines] == [0, 2 * 61, 2 * (61 + 90), 2 * (61 + 90 + 90)]
