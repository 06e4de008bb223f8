"""TRL's trainers through `long_context`, on two ranks and various model types, match plain TRL in
logs and weights.

Models, and all settings that matter to them, are transformers' and TRL's defaults: some MoE models
get the load-balancing loss, others have routers with persistent buffers.
"""

import contextlib
import io
from functools import partial
from itertools import product

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from transformers.trainer_callback import PrinterCallback
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    SFTConfig,
    SFTTrainer,
)

from decoders import tiny_decoder
from ithaka.hf.trainers import long_context
from test_preferences_and_rewards import RESTARTED, TIMES, answers, pairs, reward, tokenizer
from trainers import COMMON_ARGUMENTS, ShiftRouters, full_weights, trainer_environment

# Tolerances of logs, relative above 1, and of weights, in fp32.
TOLERANCES = dict.fromkeys(
    ("llama", "gemma3_text", "qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3"), (1e-5, 1e-6)
)
# This model amplifies rounding: plain TRL in fp32 and in fp64 differ by 2e-4 in grad_norm and by
# 1.3e-5 in weights.
TOLERANCES["qwen3_next"] = 1e-3, 5e-5
TRAINERS = {
    "sft": (SFTTrainer, SFTConfig, {"max_length": 64}),
    "dpo": (DPOTrainer, DPOConfig, {"max_length": 64}),
    "kto": (KTOTrainer, KTOConfig, {"max_length": 64}),
    "grpo": (
        GRPOTrainer,
        GRPOConfig,
        {"max_completion_length": 32, "num_generations": 2, "beta": 0.1},
    ),
}
# In the default tier, which has SFT in test_hugging_face.py.
FAST = {("deepseek_v3", "dpo")}  # GRPO: test_preferences_and_rewards.py
WITH_BALANCING_LOSS = ("qwen3_moe", "gpt_oss", "qwen3_next")
WITH_ROUTER_BUFFERS = ("glm4_moe", "deepseek_v3")
SETTINGS = {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 4, **COMMON_ARGUMENTS}
OPTIMIZER = torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}  # AdamW would amplify rounding


def make_rows(trainer):
    rows = pairs(8).to_list()
    if trainer == "dpo":
        return rows
    if trainer == "grpo":
        return [{"prompt": row["prompt"]} for row in rows]
    labelled = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in rows
        for side in ("chosen", "rejected")
    ]
    return labelled if trainer == "kto" else [dict(list(row.items())[:2]) for row in labelled]


def train(name, cp, model_folder, folder, resume=None):
    """Train for two steps on the current ranks, or with plain TRL if cp is 0. Return logs and
    weights."""
    trainer_class, config_class, settings = TRAINERS[name]
    if cp:
        trainer_class = partial(long_context(trainer_class), ithaka={"cp": cp})
    rewards = {"reward_funcs": reward, "rollout_func": answers} if name == "grpo" else {}
    with trainer_environment(cp):
        trainer = trainer_class(
            model=AutoModelForCausalLM.from_pretrained(model_folder),
            args=config_class(str(folder), **SETTINGS, **settings),
            processing_class=tokenizer(),
            train_dataset=Dataset.from_list(make_rows(name)),
            callbacks=[ShiftRouters()],
            **rewards,
        )
        trainer.optimizer_cls_and_kwargs = OPTIMIZER
        trainer.remove_callback(PrinterCallback)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train(resume_from_checkpoint=resume)
        logs = [
            {k: v for k, v in log.items() if not any(w in k for w in TIMES)}
            for log in trainer.state.log_history
        ]
        return logs, full_weights(trainer.model)


def train_and_resume(name, model_folder, folder):
    """Train on two ranks, without interruption and from the first checkpoint."""
    runs = [(folder / "two", None), (folder / "resumed", str(folder / "two" / "checkpoint-1"))]
    return [train(name, 2, model_folder, *run) for run in runs]


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    """Return a function that saves a small random model of a type, once, and returns its folder."""
    root = tmp_path_factory.mktemp("models")

    def save(model_type):
        if not (root / model_type).is_dir():
            sizes = {"vocab_size": 258, "num_hidden_layers": 2}
            if model_type in ("llama", *WITH_ROUTER_BUFFERS):
                sizes |= {"num_hidden_layers": 1, "first_k_dense_replace": 0}
            if model_type == "qwen3_next":
                sizes["layer_types"] = ["linear_attention", "full_attention"]
            tiny_decoder(model_type, torch.float32, **sizes).save_pretrained(root / model_type)
        return root / model_type

    return save


def check(run, expected, log_tolerance, weight_tolerance):
    (logs, weights) = run
    (plain_logs, plain_weights) = expected
    for log, plain in zip(logs, plain_logs, strict=True):
        assert not plain.keys() - log.keys()
        for key, value in plain.items():
            # In the first step, model and reference are equal, so the sign of a reward margin is
            # random.
            if (key, plain["step"]) != ("rewards/accuracies", 1):
                assert log[key] == pytest.approx(value, rel=log_tolerance, abs=log_tolerance), (
                    key,
                    plain["step"],
                )
    assert weights.keys() == plain_weights.keys()
    for name, tensor in weights.items():
        assert (tensor - plain_weights[name]).abs().max() < weight_tolerance, name


def drop_totals(logs):
    """Drop the totals that trainers restart when they resume."""
    return [{key: value for key, value in log.items() if key not in RESTARTED} for log in logs]


@pytest.mark.parametrize(
    "model_type, trainer",
    [
        cell if cell in FAST else pytest.param(*cell, marks=pytest.mark.slow)
        for cell in product(TOLERANCES, TRAINERS)
    ],
)
def test_two_ranks_train_as_plain_trl_and_resume_bitwise(
    ranks, saved_model, tmp_path, model_type, trainer
):
    folder = saved_model(model_type)
    (expected,) = ranks.run(1, train, trainer, 0, folder, tmp_path / "plain")
    logs, weights = expected
    start = AutoModelForCausalLM.from_pretrained(folder)
    assert all(
        (weights[name] - p).abs().max() > TOLERANCES[model_type][1]
        for name, p in start.named_parameters()
    )
    assert ("aux_loss" in logs[0]) == (model_type in WITH_BALANCING_LOSS)
    assert any("e_score" in name for name in weights) == (model_type in WITH_ROUTER_BUFFERS)
    for run, resumed in ranks.run(2, train_and_resume, trainer, folder, tmp_path):
        check(run, expected, *TOLERANCES[model_type])
        assert drop_totals(resumed[0]) == drop_totals(run[0])
        assert all(torch.equal(tensor, run[1][name]) for name, tensor in resumed[1].items())
