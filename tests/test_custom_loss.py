"""A custom loss, a function of per-token results, replaces the cross-entropy in training, as in
examples/hooks.py."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from faults import moved
from ithaka.config import ConfigError
from ithaka.config.training import LossConfig
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model
from models import tiny_config, tiny_model
from parity import check, gradient_errors, random_ids, relative
from refusals import assert_refused
from runs import bitwise_metrics, copy_run_at_step, run, tiny_run
from threads import run_on_threads

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    sys.modules.pop("hooks", None)


def focal_loss(tokens, labels):
    assert labels.shape == tokens.logprobs.shape
    return (
        -tokens.logprobs * (1 - tokens.logprobs.exp()) + 0.1 * tokens.entropies + (labels == -100)
    )


def test_gradients_of_a_custom_loss_equal_those_of_the_plain_model():
    plain = tiny_model(tiny_config("llama"))
    ids = random_ids(1, 23)
    models = [copy.deepcopy(plain) for _ in range(2)]
    labels = ids.masked_fill(torch.arange(23) % 3 == 1, -100)
    logprobs = F.log_softmax(plain(input_ids=ids, use_cache=False).logits[0, :-1], dim=-1)
    label_logprobs = logprobs.gather(1, ids[0, 1:, None])[:, 0]
    valid = labels[0, 1:] != -100
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    expected = (-label_logprobs * (1 - label_logprobs.exp()) + 0.1 * entropies)[valid].mean()
    expected.backward()

    def work():
        import torch.distributed as dist

        model = parallelize_model(models[dist.get_rank()], layout=Layout(2, tile_tokens=5))
        model.ithaka_loss = focal_loss
        out = model(input_ids=ids, labels=labels)
        out.loss.backward()
        assert out.tokens is None
        errors = {
            "loss": relative(out.loss.detach(), expected.detach()),
            **gradient_errors(model, plain),
        }
        with torch.no_grad():
            cross_entropy = model.eval()(input_ids=ids, labels=labels).loss
        return errors | {
            "validation": relative(cross_entropy, -label_logprobs.detach()[valid].mean())
        }

    check(run_on_threads(2, work))


def test_the_example_runs_and_wrong_names_and_shapes_are_refused(tmp_path):
    config = tiny_run(
        tmp_path, train={"callbacks": ["hooks:LossFile"]}, loss={"type": "hooks:weighted_loss"}
    )
    plain = tiny_run(tmp_path / "plain")
    for each in (config, plain):
        run(each)
    lines = [
        json.loads(line)
        for line in (config.train.run_dir / "losses.jsonl").read_text().splitlines()
    ]
    losses, plain_losses = (
        [step[1] for step in bitwise_metrics(each.train.run_dir)] for each in (config, plain)
    )
    assert [line["loss"] for line in lines if "loss" in line] == losses and any(
        "checkpoint" in line for line in lines
    )
    assert losses[1] < 0.5 * plain_losses[1], "each loss is multiplied by a probability"
    again = moved(config, copy_run_at_step(config.train.run_dir, tmp_path / "again", step=2))
    run(again, again.train.run_dir)
    assert bitwise_metrics(again.train.run_dir) == bitwise_metrics(config.train.run_dir)
    for name in ("hooks:nothing", "nowhere:loss"):
        assert_refused(
            LossConfig(name).import_function, f"loss.type={name}", fix="package.module:function"
        )
    model = parallelize_model(tiny_model(tiny_config("llama")))
    ids = random_ids(1, 9)
    model.ithaka_loss = lambda tokens, labels: tokens.logprobs.sum()
    with pytest.raises(
        ConfigError, match=r"loss.type returned \(\); return one loss per label, of shape \(9,\)"
    ):
        model(input_ids=ids, labels=ids)
