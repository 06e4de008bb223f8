"""`ithaka train` with loss=distill equals TRL's GKDTrainer in fp64 and resumes bitwise; plans and
refusals of such runs."""

import contextlib
import importlib.util
import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trl.experimental.gkd import GKDConfig, GKDTrainer

from faults import moved
from ithaka.config import parse_config
from ithaka.log.metrics import read_metrics
from ithaka.plan.bytes import gpu_phases
from ithaka.plan.hardware import find_hardware
from ithaka.plan.search import Plan, work_from_config
from ithaka.plan.summary import collect_facts
from ithaka.run.check_request import make_request
from ithaka.run.rules import check_settings
from models import tiny_config, tiny_model
from parity import relative
from refusals import assert_refused
from runs import bitwise_metrics, copy_run_at_step, run, validate
from test_preferences_and_rewards import tokenizer
from trainers import trainer_environment

BETA = 0.4
LR = 2e-3
STEPS = 3
EXAMPLES = Path(__file__).parents[1] / "examples"


def records():
    """Token ids with labels for their second half; two never fit into one sequence."""
    generator = np.random.default_rng(3)
    ids = [generator.integers(0, 61, 40 + 3 * n).tolist() for n in range(4)]
    return [{"input_ids": row, "labels": [-100] * 20 + row[20:]} for row in ids]


def configure(folder, name="run", train=None, data=None, adapter=None, **loss):
    """All four sequences are one step, so that their order does not matter."""
    for file, rows in (("records", records()), ("validation", records()[:1])):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = {
        "path": str(folder / "records.jsonl"),
        "validation_path": str(folder / "validation.jsonl"),
    }
    loss = {"type": "distill", "teacher": str(folder / "teacher"), "beta": BETA, **loss}
    return parse_config(
        {
            "model": {"path": str(folder / "model"), "dtype": "float64"},
            "data": {**paths, "context": 53, **(data or {})},
            "adapter": adapter,
            "loss": loss,
            "optim": {
                "lr": LR,
                "schedule": "constant",
                "weight_decay": 0.0,
                "clip_norm": None,
                "betas": [0.9, 0.95],
            },
            "train": {
                "run_dir": str(folder / name),
                "steps": STEPS,
                "global_batch": 4,
                "save_every": 1,
                "keep_last": 4,
                "validate_every": 2,
                "validate_sequences": 1,
                **(train or {}),
            },
        }
    )


def collate(rows):
    length = max(len(row["input_ids"]) for row in rows)

    def pad(name, fill):
        return torch.tensor([row[name] + [fill] * (length - len(row[name])) for row in rows])

    ids = pad("input_ids", 0)
    return {
        "input_ids": ids,
        "labels": pad("labels", -100),
        "attention_mask": (pad("labels", -1) != -1).long(),
    }


def run_gkd(folder):
    """Return TRL's losses and weights after the same number of steps on given traces."""
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64)
        for name in ("model", "teacher")
    )
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": LR,
        "optim": "adamw_torch",
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1e9,
        "adam_beta2": 0.95,
        "beta": BETA,
        "lmbda": 0.0,
        "logging_steps": 1,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    with trainer_environment(cp=0), contextlib.redirect_stdout(io.StringIO()):
        trainer = GKDTrainer(
            student,
            teacher,
            GKDConfig(str(folder / "trl"), **settings),
            collate,
            Dataset.from_list(records()),
            processing_class=tokenizer(),
        )
        trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history[:STEPS]]
    return losses, {name: param.detach() for name, param in student.named_parameters()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distill")
    configs = {
        "model": tiny_config("llama", vocab_size=258),
        "teacher": tiny_config("qwen3", 8, 4, vocab_size=258),
    }
    for name, config in configs.items():
        tiny_model(config, torch.float64).save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    return folder


def steps(config):
    """The metrics of each step."""
    return [
        each
        for each in read_metrics(config.train.run_dir / "metrics.jsonl")
        if each.get("loss") is not None
    ]


def export_weights(config):
    from ithaka.checkpoint.export import export

    out = config.train.run_dir.parent / f"{config.train.run_dir.name}-weights"
    return load_file(export(config.train.run_dir, out) / "model.safetensors")


@pytest.mark.slow
def test_losses_and_weights_are_trls_and_a_run_resumes_bitwise(ranks, folder):
    config = configure(folder)
    ranks.run(2, run, config)
    expected, weights = run_gkd(folder)
    records = steps(config)
    assert [record["loss"] for record in records] == pytest.approx(expected, rel=1e-6)
    assert [record["divergence"] for record in records] == pytest.approx(
        [record["loss"] for record in records]
    )
    assert all(record["cross_entropy"] > 1 for record in records)
    for name, tensor in export_weights(config).items():
        assert relative(tensor, weights[name]) < 1e-6
    again = moved(config, copy_run_at_step(config.train.run_dir, folder / "again", step=1))
    ranks.run(2, run, again, again.train.run_dir)
    assert bitwise_metrics(again.train.run_dir) == bitwise_metrics(config.train.run_dir)


def test_stored_probabilities_train_as_the_teacher_does(folder):
    """All probabilities are stored, and in another run the five highest. A label without any has
    the cross-entropy."""
    config = configure(folder, "full", beta=0.0, train={"steps": 1})
    run(config)
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float64)
    losses = {}
    for k in (258, 5):
        rows = []
        for record in records():
            with torch.no_grad():
                logprobs = (
                    teacher(torch.tensor([record["input_ids"]])).logits[0, :-1].log_softmax(-1)
                )
            values, ids = logprobs.topk(k)
            rows.append(
                record
                | {
                    "teacher_ids": [None, *ids.tolist()],
                    "teacher_logprobs": [None, *values.tolist()],
                }
            )
        (folder / f"top-{k}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths = dict.fromkeys(("path", "validation_path"), str(folder / f"top-{k}.jsonl"))
        stored = configure(folder, f"stored-{k}", {"steps": 1}, paths, beta=0.0, teacher="data")
        run(stored)
        losses[k] = steps(stored)[0]["loss"]
    expected = steps(config)[0]["loss"]
    assert losses[258] == pytest.approx(expected, rel=1e-6)  # stored in fp32
    assert 0.2 * expected < losses[5] < 0.99 * expected, "fewer outcomes are less different"
    for change, problem in (
        ({"teacher_ids": None}, "teacher_ids and teacher_logprobs need"),
        ({"teacher_logprobs": [[0.0] * 5] * len(rows[1]["input_ids"])}, "add up to at most 1"),
        ({"teacher_ids": [[1] * 5] * len(rows[1]["input_ids"])}, "different ids"),
    ):
        (folder / "bad.jsonl").write_text(
            json.dumps(rows[0]) + "\n" + json.dumps(rows[1] | change) + "\n"
        )
        paths = dict.fromkeys(("path", "validation_path"), str(folder / "bad.jsonl"))
        bad = configure(folder, "bad", {"steps": 1}, paths, teacher="data")
        assert_refused(partial(run, bad), problem, fix="write them again")
    bad = configure(folder, "bad", None, {"path": __file__}, teacher="data")
    assert_refused(
        partial(validate, bad), "loss.teacher=data", "format text", fix="use such records"
    )


@pytest.mark.slow
def test_the_model_without_its_adapter_and_a_copy_teach_a_run(folder):
    """They are their own teachers at first, so the first loss is the cross-entropy's share."""
    adapter = {"rank": 4, "targets": ["q_proj", "down_proj"]}
    for name, changes in (("self", {"adapter": adapter}), ("copy", {})):
        config = configure(folder, name, {"steps": 2}, teacher=None, cross_entropy=0.25, **changes)
        run(config)
        first, second = steps(config)
        assert first["loss"] == pytest.approx(0.25 * first["cross_entropy"], rel=1e-9)
        assert first["divergence"] == pytest.approx(0, abs=1e-12) and second["divergence"] > 1e-6


def test_a_teacher_in_four_bits_trains_and_one_with_changed_weights_is_refused(folder):
    losses = []
    for base in ("bf16", "nf4"):
        config = configure(folder, base, {"steps": 1}, teacher_base=base)
        run(config)
        losses.append(steps(config)[0]["loss"])
    assert losses[1] != losses[0] and losses[1] == pytest.approx(losses[0], rel=0.2)
    resumed = replace(config, loss=replace(config.loss, teacher=folder / "model"))
    assert_refused(
        partial(validate, resumed, folder / "nf4"), "other weights", fix="start a new run"
    )


def test_teachers_with_other_tokens_and_settings_without_effect_are_refused(folder, tmp_path):
    tiny_model(tiny_config("llama", vocab_size=61)).save_pretrained(tmp_path / "small")
    config = configure(folder, "small", teacher=str(tmp_path / "small"))
    assert_refused(
        partial(validate, config),
        "predicts 61 tokens and the model 258",
        fix="the same vocabulary",
    )
    other = tmp_path / "other"
    tiny_model(tiny_config("llama", vocab_size=258), torch.float64).save_pretrained(other)
    tokenizer().save_pretrained(other)
    words = json.loads((other / "tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(words))
    config = configure(folder, "tokens", teacher=str(other))
    assert_refused(partial(validate, config), "another vocabulary", fix="the same tokenizer")
    for changes, words, fix in (
        ({"loss": {"teacher": "x"}}, "loss.teacher=x", "loss.type=distill"),
        ({"loss": {"type": "distill", "beta": 2}}, "loss.beta=2", "from 0 to 1"),
        ({"loss": {"type": "dpo", "beta": 0}}, "loss.beta=0", "above 0"),
        (
            {"loss": {"type": "distill", "teacher_base": "nf4"}},
            "loss.teacher_base=nf4",
            "name a model",
        ),
        ({"data": {"train_on": "teacher"}}, "data.train_on=teacher", "leave it out"),
        (
            {"loss": {"type": "distill", "teacher": "data"}, "data": {"long_documents": "turns"}},
            "turns",
            "split",
        ),
        (
            {"loss": "distill", "adapter": {"modules_to_save": ["lm_head"]}},
            "modules_to_save",
            "loss.teacher",
        ),
    ):
        config = parse_config(changes)
        assert_refused(partial(check_settings, config), words, fix=fix)


def test_plans_have_room_and_time_for_the_teacher():
    hardware = find_hardware("8xH200")
    args = ("128K", 1)
    plain = make_request("llama-3.2-3b", hardware, *args, []).space
    distill = ["loss.type=distill", "loss.teacher=llama-3.1-8b"]
    request = make_request("llama-3.2-3b", hardware, *args, distill)
    plan = request.space.choose(work_from_config(request.config))
    assert plan.shape.teacher.num_parameters > 8e9 and plan.fits
    [note] = collect_facts(plan, "llama-3.2-3b")["notes"]
    words = "teacher: 8.03B frozen parameters, 1.9 GiB per GPU; its forward pass takes"
    assert note.startswith(words)
    without = Plan(
        plain.shape, plan.layout, hardware, replace(plan.work, reference=False, distills=False)
    )
    forward = Plan(
        plan.shape.teacher, plan.layout.for_teacher(), hardware, replace(plan.work, trains=False)
    )
    assert plan.step_s == pytest.approx(without.step_s + forward.step_s)
    phases, others = (
        dict(gpu_phases(each.shape, each.layout, hardware, each.work)) for each in (plan, without)
    )
    weights = 2 * plan.shape.teacher.num_parameters / 8
    assert phases["update"]["parameters"] - others["update"]["parameters"] == pytest.approx(
        weights, rel=1e-3
    )
    s = 128 * 1024 // plan.layout.cp
    hidden = 4096
    assert phases["loss"]["teacher states"] == 2 * s * hidden
    assert phases["loss"]["teacher head"] == 2 * 128256 * hidden
    assert "forward of the teacher" in phases
    packed = make_request(
        "llama-3.2-3b", hardware, *args, [*distill, "loss.teacher_base=nf4"]
    ).space.shape.teacher
    assert packed.frozen_bytes(8, 2) < 0.4 * plan.shape.teacher.frozen_bytes(8, 2)
    refused = partial(make_request, "qwen3-8b", hardware, *args, distill)
    assert_refused(refused, "llama-3.1-8b predicts 128256 tokens", fix="the same vocabulary")


@pytest.mark.slow
def test_self_distillation_preserves_the_loss_on_short_text_of_an_extended_model(
    tmp_path, monkeypatch
):
    """As in examples/keep_short_text.py, with fewer steps."""
    spec = importlib.util.spec_from_file_location(
        "keep_short_text", EXAMPLES / "keep_short_text.py"
    )
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent / "src"))
    plain, taught = example.main(tmp_path, 60, 12).values()
    assert len(plain) == len(taught) == 6
    assert taught[-1][1] < plain[-1][1] - 0.02, "the loss on short text"
    assert taught[-1][2] < taught[0][2] and plain[-1][2] < plain[0][2], "both learn the long text"
