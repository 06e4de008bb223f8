"""Trainer and SFTTrainer on ranks that share sequences match one plain process. Runs the
examples."""

import contextlib
import importlib.util
import io
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, Trainer
from transformers.trainer_callback import PrinterCallback
from trl import SFTTrainer

from decoders import SIZES
from ithaka.hf.trainers import long_context
from trainers import ShiftRouters, full_weights, trainer_environment

TOLERANCE = 1e-5  # fp32


class FadingSGD(torch.optim.SGD):
    """SGD whose steps shrink: state that is no tensor, in addition to momentum. AdamW would amplify
    rounding errors."""

    def step(self, closure=None):
        for param in (
            param
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ):
            number = self.state[param]["number"] = self.state[param].get("number", 0) + 1
            param.grad.mul_(1 - number / 20)
        return super().step(closure)


OPTIMIZER = {"optimizer_cls_and_kwargs": (FadingSGD, {"lr": 0.05, "momentum": 0.9})}
LOGGED = (
    "loss",
    "grad_norm",
    "learning_rate",
    "entropy",
    "mean_token_accuracy",
    "num_tokens",
    "eval_loss",
    "num_input_tokens_seen",
)
datasets.disable_progress_bars()
QUIET = {
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 3,
    "dataloader_pin_memory": False,
    "save_total_limit": None,
}
SHORT = {"max_steps": 4, "save_steps": 2, "eval_steps": 2}  # saves seconds


def example(name):
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).parents[1] / "examples" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.SIZES["num_hidden_layers"] = 1  # saves seconds
    return module


def run(name, cp, folder, resume=None, rows=None, family=None, **changes):
    """Run an example on all ranks and return (logs, weights). cp=0: plain trainer; `rows`: another
    dataset."""
    module = example(name)
    world = dist.get_world_size()
    if family is not None:
        module.AutoConfig = SimpleNamespace(for_model=partial(decoder_config, family))
    if rows is not None:
        evaluated = module.rows(3, seed=2)
        module.rows = lambda count, seed: rows if count == 40 else evaluated
    trainer_class = {"hf_trainer": Trainer, "sft": SFTTrainer}[name]
    if cp:
        trainer_class = partial(long_context(trainer_class), ithaka={"cp": cp})
        changes |= {"per_device_train_batch_size": 2 * cp // world}
    with trainer_environment(cp):
        trainer_class = partial(trainer_class, callbacks=[ShiftRouters()], **OPTIMIZER)
        trainer = module.make_trainer(trainer_class, str(folder), **QUIET, **changes)
        trainer.remove_callback(PrinterCallback)
        assert (
            trainer.get_total_train_batch_size(trainer.args)
            == 2 * trainer.args.gradient_accumulation_steps
        )
        hooks = trainer.model.get_input_embeddings()._forward_hooks.values()
        assert not cp or "require_grads" not in str(hooks), "TRL's hook, for its own checkpointing"
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(str(folder / "final"))
        weights = full_weights(trainer.model)
        reports = bool(cp and rows) and resume is None and dist.get_rank() == 0
        assert printed.getvalue().count("no rank has a label") == reports
        return trainer.state.log_history, weights


def decoder_config(family, _, **sizes):
    kinds = {
        "gemma3_text": {"layer_types": ["sliding_attention"], "sliding_window": 20},
        "deepseek_v3": {"num_key_value_heads": sizes["num_attention_heads"], "head_dim": 8},
    }
    shared = {"num_key_value_heads": 2, "first_k_dense_replace": 0}
    return AutoConfig.for_model(family, **{**SIZES, **sizes, **shared, **kinds.get(family, {})})


def check(runs, expected, logged=LOGGED):
    """Compare every rank's logs and weights with `expected`."""
    logs, weights = expected
    for rank_logs, rank_weights in runs:
        assert [log["step"] for log in rank_logs] == [log["step"] for log in logs]
        compared = set()
        for log, plain in zip(rank_logs, logs, strict=True):
            for key in (key for key in logged if key in plain):
                assert log[key] == pytest.approx(plain[key], abs=TOLERANCE), (key, log["step"])
                compared.add(key)
        assert {"loss", "eval_loss", "grad_norm"} <= compared
        for name, tensor in rank_weights.items():
            assert (tensor - weights[name]).abs().max() < TOLERANCE, name


def test_trainer(ranks, tmp_path):
    """Covers accumulation, rows of unequal lengths, evaluation, and resuming a 2 x 2 checkpoint on
    two ranks.

    The best checkpoint, whose weights are the final ones, is not the last."""
    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
    }
    trained = partial(run, **best, **SHORT, include_num_input_tokens_seen="non_padding")
    (expected,) = ranks.run(1, trained, "hf_trainer", 0, tmp_path / "plain")
    assert expected[0][0]["num_input_tokens_seen"] > 0
    middle, last = (log["eval_loss"] for log in expected[0] if "eval_loss" in log)
    assert middle < last
    runs = ranks.run(4, trained, "hf_trainer", 2, tmp_path / "four")
    check(runs, expected)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "four" / "final")
    for name, tensor in saved.named_parameters():
        assert torch.equal(tensor, runs[0][1][name])
    checkpoint = str(tmp_path / "four" / "checkpoint-2")
    check(ranks.run(2, trained, "hf_trainer", 2, tmp_path / "two", checkpoint), expected)


@pytest.fixture
def rows():
    """Rows for six steps an epoch, the last with one micro-batch. Steps 2 and 5 and half of step 3
    have no labels."""
    dataset = example("hf_trainer").rows(22, seed=1)
    for i in (4, 5, 6, 7, 10, 11, 16, 17, 18, 19):
        # no token predicts the first
        dataset[i]["labels"] = [5] + [-100] * (len(dataset[i]["labels"]) - 1)
    return dataset


def test_steps_without_a_label_neither_update_nor_count(ranks, tmp_path, rows):
    """The plain trainer's dataset omits them. A run that skipped some resumes on another number of
    ranks."""
    changes = {
        "max_steps": 7,
        "save_steps": 4,
        "eval_steps": 4,
        "train_sampling_strategy": "sequential",
    }
    labelled = rows[:4] + rows[8:16] + rows[20:]
    (expected,) = ranks.run(
        1, partial(run, rows=labelled, **changes), "hf_trainer", 0, tmp_path / "plain"
    )
    assert expected[0][-1]["step"] == 7
    trained = partial(run, rows=rows, **changes)
    check(ranks.run(2, trained, "hf_trainer", 1, tmp_path / "two"), expected)
    checkpoint = str(tmp_path / "two" / "checkpoint-4")
    check(ranks.run(2, trained, "hf_trainer", 2, tmp_path / "again", checkpoint), expected)
    with pytest.raises(AssertionError, match="ConfigError: train_dataset: .*-100"):
        ranks.run(1, partial(run, rows=rows[4:8], **changes), "hf_trainer", 1, tmp_path / "none")


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sft_trainer_on_packed_conversations(ranks, tmp_path, num_ranks):
    """Trains on assistant turns, on 2 and 2 x 2 ranks. TRL also logs entropy and accuracy."""
    trained = partial(run, **SHORT)
    (expected,) = ranks.run(1, trained, "sft", 0, tmp_path / "plain")
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= expected[0][0].keys()
    check(ranks.run(num_ranks, trained, "sft", 2, tmp_path / "parallel"), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["gemma3_text", "qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3"]
)
def test_sft_trainer_on_other_decoders(ranks, tmp_path, family):
    """For some MoE models TRL adds and logs the load-balancing loss. Routers of others have
    persistent buffers, which a resumed run restores."""
    # The masks of gpt_oss ignore documents in transformers 5.23.
    changes = {"gpt_oss": {"packing": False}, "qwen3_moe": {"router_aux_loss_coef": 0.5}}.get(
        family, {}
    )
    trained = partial(run, family=family, **changes, **SHORT)
    (expected,) = ranks.run(1, trained, "sft", 0, tmp_path / "plain")
    assert ("aux_loss" in expected[0][0]) == (family in ("qwen3_moe", "gpt_oss"))
    assert any("e_score" in name for name in expected[1]) == (family in ("glm4_moe", "deepseek_v3"))
    logged = {*LOGGED, "aux_loss"}
    check(ranks.run(2, trained, "sft", 2, tmp_path / "two"), expected, logged)
    checkpoint = str(tmp_path / "two" / "checkpoint-2")
    resumed = ranks.run(2, trained, "sft", 2, tmp_path / "again", checkpoint)
    check(resumed, expected, logged - {"num_tokens"})  # TRL restarts it at 0


@pytest.mark.slow
def test_sft_trainer_with_adapters(ranks, tmp_path):
    """Rows are padded. The adapter is saved in PEFT's format, and the run resumes."""
    changes = {"lora": True, "packing": False, "gradient_accumulation_steps": 1, **SHORT}
    (expected,) = ranks.run(1, partial(run, **changes), "sft", 0, tmp_path / "plain")
    runs = ranks.run(2, partial(run, **changes), "sft", 2, tmp_path / "two")
    check(runs, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = example("sft").make_trainer(lambda **arguments: arguments["model"], str(tmp_path))
        saved = PeftModel.from_pretrained(base, tmp_path / "two" / "final")
    for name, tensor in saved.named_parameters():
        assert torch.equal(tensor, runs[0][1][name])
    checkpoint = str(tmp_path / "two" / "checkpoint-2")
    again = ranks.run(2, partial(run, **changes), "sft", 2, tmp_path / "again", checkpoint)
    check(again, expected, set(LOGGED) - {"num_tokens"})  # TRL restarts it at 0


def own_loop(folder, lora):
    return example("own_loop").main(folder, lora)


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_custom_loop_has_the_losses_of_one_rank(ranks, tmp_path, lora):
    """A plain model loads what two ranks save."""
    (expected,) = ranks.run(1, own_loop, tmp_path / "one", lora)
    # AdamW
    assert ranks.run(2, own_loop, tmp_path / "two", lora) == [pytest.approx(expected, abs=1e-4)] * 2
    module = example("own_loop")
    files = (tmp_path / "one", tmp_path / "two")
    if lora:
        models = [PeftModel.from_pretrained(module.make_model(False), file) for file in files]
    else:
        models = [AutoModelForCausalLM.from_pretrained(file) for file in files]
    (one, two) = [dict(model.named_parameters()) for model in models]
    start = dict(module.make_model(lora).named_parameters())
    changed = [name for name, tensor in one.items() if not torch.equal(tensor, start[name])]
    assert changed and all((".lora_" in name) == lora for name in changed)
    assert all((one[name] - two[name]).abs().max() < 1e-2 for name in changed)
