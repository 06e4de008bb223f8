"""`ithaka train` with loss=dpo equals TRL's DPOTrainer in fp64 and resumes bitwise; plans and
refusals of such runs."""

import contextlib
import io
import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

from ithaka.checkpoint.export import export
from ithaka.config import parse_config
from ithaka.data import pack
from ithaka.data.documents.dialects import BadRecord
from ithaka.data.documents.records import detect_format
from ithaka.layout import Layout
from ithaka.log.metrics import read_metrics
from ithaka.plan.hardware import find_hardware
from ithaka.plan.search import Plan, work_from_config
from ithaka.plan.summary import collect_facts
from ithaka.run.road import model_shape
from ithaka.run.rules import check_settings
from models import tiny_config, tiny_model
from refusals import assert_refused
from runs import copy_run_at_step, run, validate
from test_preferences_and_rewards import tokenizer
from trainers import trainer_environment

# TRL's fused head computes in fp32; margins are differences of sums
CLOSE = {"rel": 1e-6, "abs": 2e-6}
BETA = 0.3
SMOOTHING = 0.1
LR = 2e-4
STEPS = 2
# Renders reasoning after the last user message only, as Qwen3's template does.
DROPS_REASONING = """{%- set last = namespace(user=0) -%}\
{%- for m in messages -%}\
{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}\
{%- endfor -%}\
{%- for m in messages -%}<|{{ m.role }}|>\
{%- if m.reasoning_content and loop.index0 > last.user %}\
<think>{{ m.reasoning_content }}</think>{% endif -%}\
{{ m.content }}<end>{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
# differ between identical runs
UNEQUAL = ("tokens_per_s", "step_s", "mfu", "device_peak_bytes", "host_peak_bytes")
TRL_NAMES = {
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
}


def pairs():
    """Pairs with prompts of different lengths, two of which never fit into one sequence."""
    return [
        {
            "prompt": f"{n} times {'and again ' * 6}{'?' * n}",
            "chosen": f" It is {n * n}" + "!" * n,
            "rejected": f" {n}.",
        }
        for n in range(1, 5)
    ]


def configure(folder, adapter, **train):
    """All four sequences are one step, so that their order does not matter."""
    for file, rows in (("pairs", pairs()), ("validation", pairs()[:1])):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = {
        "path": str(folder / "pairs.jsonl"),
        "validation_path": str(folder / "validation.jsonl"),
    }
    return parse_config(
        {
            "model": {"path": str(folder / "model"), "dtype": "float64"},
            "data": {**paths, "context": 131},
            "adapter": {"rank": 4, "alpha": 8, "targets": ["q_proj", "down_proj"]}
            if adapter
            else None,
            "loss": {"type": "dpo", "beta": BETA, "label_smoothing": SMOOTHING},
            "parallel": {"cp": 2},
            "optim": {
                "lr": LR,
                "schedule": "constant",
                "weight_decay": 0.0,
                "clip_norm": None,
                "betas": [0.9, 0.95],
            },
            "train": {
                "run_dir": str(folder / "run"),
                "steps": STEPS,
                "global_batch": 4,
                "save_every": 1,
                "keep_last": 3,
                "validate_every": 2,
                "validate_sequences": 1,
                **train,
            },
        }
    )


def run_trl(folder, adapter):
    """Return TRL's logs and weights after the same number of steps."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": LR,
        "optim": "adamw_torch",
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1e9,
        "adam_beta2": 0.95,
        "loss_type": "robust",
        "beta": BETA,
        "label_smoothing": SMOOTHING,
        "logging_steps": 1,
        "max_length": 256,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    lora = (
        LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]) if adapter else None
    )
    arguments = {
        "train_dataset": Dataset.from_list(pairs()),
        "processing_class": tokenizer(),
        "peft_config": lora,
    }
    with trainer_environment(cp=0), contextlib.redirect_stdout(io.StringIO()):
        trainer = DPOTrainer(model, args=DPOConfig(str(folder / "trl"), **settings), **arguments)
        if adapter:  # start from ithaka's initial adapter
            first = load_file(folder / "first" / "adapter_model.safetensors")
            for name, param in trainer.model.named_parameters():
                if param.requires_grad:
                    param.data.copy_(first[name.replace(".default", "")])
        trainer.train()
    named = (trainer.model if adapter else model).named_parameters()
    return trainer.state.log_history[:STEPS], {
        name.replace(".default", ""): param.detach() for name, param in named
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dpo")
    config = tiny_config("llama", vocab_size=258, num_hidden_layers=2, max_position_embeddings=4096)
    tiny_model(config, torch.float64).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    return folder


def steps(run_dir):
    return read_metrics(run_dir / "metrics.jsonl")


def run_sharing(min_tokens, *arguments):
    pack.MIN_TOKENS = min_tokens
    try:
        return run(*arguments)
    finally:
        pack.MIN_TOKENS = 128


@pytest.mark.parametrize(
    "adapter, num_ranks",
    [(False, 2), *(pytest.param(way, 4, marks=pytest.mark.slow) for way in (False, True))],
)
def test_losses_metrics_and_weights_are_trls(ranks, folder, adapter, num_ranks):
    """On 2 and 2 x 2 ranks, with each prompt computed once. A resumed run is identical bit for
    bit."""
    work_dir = folder / f"adapter={adapter}-{num_ranks}"
    work_dir.mkdir()
    (work_dir / "model").symlink_to(folder / "model")
    config = configure(work_dir, adapter)
    if adapter:
        train = replace(config.train, steps=1, run_dir=work_dir / "first-run")
        ranks.run(
            2, run_sharing, 16, replace(config, train=train, optim=replace(config.optim, lr=1e-30))
        )
        export(train.run_dir, work_dir / "first")
    ranks.run(num_ranks, run_sharing, 16, config)
    lines = steps(config.train.run_dir)[1:]
    logs, weights = run_trl(work_dir, adapter)
    for line, log in zip(lines, logs, strict=True):
        assert line["loss"] == pytest.approx(log["loss"], **CLOSE)
        assert line["grad_norm"] == pytest.approx(log["grad_norm"], **CLOSE)
        assert {name: line[name] for name in TRL_NAMES} == pytest.approx(
            {name: log[name] for name in TRL_NAMES}, **CLOSE
        )
    assert "val_rewards/margins" in lines[1]
    export(config.train.run_dir, work_dir / "exported")
    saved = load_file(
        work_dir / "exported" / ("adapter_model.safetensors" if adapter else "model.safetensors")
    )
    for name, tensor in saved.items():
        assert torch.allclose(tensor.double(), weights[name], rtol=1e-5, atol=1e-7), name
    copied = copy_run_at_step(config.train.run_dir, work_dir / "again", 1)
    again = replace(config, train=replace(config.train, run_dir=copied))
    ranks.run(num_ranks, run_sharing, 16, again, copied)
    for line, other in zip(steps(copied), steps(config.train.run_dir), strict=True):
        assert all(line[name] == other[name] for name in other.keys() - {*UNEQUAL})
    other = shutil.copytree(folder / "model", work_dir / "other")
    save_file(
        {name: -weight for name, weight in load_file(other / "model.safetensors").items()},
        other / "model.safetensors",
        {"format": "pt"},
    )
    changed = replace(again, model=replace(config.model, path=other))
    what = "base model" if adapter else "reference model"
    assert_refused(
        lambda: validate(changed, copied, num_ranks),
        f"model.path={other}",
        what,
        fix="start a new run",
    )


def run_without_sharing(config):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ithaka.roots.decoder.Decoder.why_no_parents", lambda root: "for a test")
        return run(config)


def test_turns_of_an_unrolled_conversation_share_their_history(ranks, folder):
    """With all turns in one sequence, losses and gradients are the same and fewer tokens are
    computed."""
    turns = [
        message
        for n in range(3)
        for message in (
            {
                "role": "user",
                "content": f"And {n} plus {n * n}, after all that was said before? " * 2,
            },
            {
                "role": "assistant",
                "reasoning_content": f"Add {n}.",
                "content": f"It is {n + n * n}, I think.",
            },
        )
    ]
    (folder / "think.jinja").write_text(DROPS_REASONING)
    (folder / "turns.jsonl").write_text(f"{json.dumps({'messages': turns})}\n")
    paths = dict.fromkeys(("path", "validation_path"), str(folder / "turns.jsonl"))
    settings = {
        "model": {"path": str(folder / "model"), "dtype": "float64"},
        "data": {
            **paths,
            "context": 855,
            "chat_template": str(folder / "think.jinja"),
            "reasoning": {"turns": "all"},
        },
        "parallel": {"cp": 2},
        "optim": {"lr": 1e-3, "schedule": "constant"},
    }
    records = {}
    packed = {}
    for how, work in {"shared": partial(run_sharing, 16), "apart": run_without_sharing}.items():
        config = parse_config(
            settings
            | {"train": {"run_dir": str(folder / how), "steps": 2, "validate_sequences": 1}}
        )
        ranks.run(2, work, config)
        records[how] = steps(config.train.run_dir)
        summary = json.loads((config.train.run_dir / "data.json").read_text())
        packed[how] = float(summary["packing"].partition("%")[0])
    assert packed["shared"] < 0.75 * packed["apart"]
    for a, b in zip(records["shared"], records["apart"], strict=True):
        # 1e-8: norms round to fp32, as in transformers
        for name in ("loss", "val_loss", "grad_norm"):
            assert a[name] == (b[name] if b[name] is None else pytest.approx(b[name], rel=1e-8)), (
                name
            )


def test_settings_that_do_not_combine_with_pairs_are_refused():
    dpo = {"loss": {"type": "dpo"}}
    for section, values, fix in (
        ("data", {"train_on": "all"}, "leave it out"),
        ("data", {"documents": "together"}, "use apart"),
        ("data", {"long_documents": "turns"}, "use drop or refuse"),
        ("adapter", {"path": "somewhere"}, "merge it first"),
        ("adapter", {"modules_to_save": ["lm_head"]}, "leave it out"),
        ("curriculum", [{"context": 64, "steps": 1}], "leave it out"),
    ):
        names = [section] if section == "curriculum" else [f"{section}.{name}" for name in values]
        assert_refused(
            lambda tree={**dpo, section: values}: check_settings(parse_config(tree)),
            *names,
            "dpo",
            fix=fix,
        )
    assert_refused(
        lambda: check_settings(parse_config({"loss": {"beta": 0.2}})),
        "loss.beta=0.2",
        fix="loss.type=dpo",
    )
    assert_refused(
        lambda: parse_config({"loss": "dop"}), "loss.type=dop", fix="dpo or package.module:function"
    )
    loss = {"type": "hooks:weighted_loss", "label_smoothing": 0.1}
    assert_refused(
        lambda: check_settings(parse_config({"loss": loss})),
        "loss.label_smoothing=0.1",
        fix="loss.type=dpo",
    )
    assert_refused(
        lambda: check_settings(parse_config({"data": {"train_on": "pairs"}})),
        "data.train_on=pairs",
        fix="leave it out",
    )
    assert (data := parse_config({"loss": "dpo"}).data).train_on == "pairs"
    with pytest.raises(
        BadRecord,
        match="no field chosen or no field rejected, .*loss.type=dpo.* are prompt, chosen",
    ):
        detect_format({"prompt": "a", "chosen": "b"}, data)


def test_a_pair_that_does_not_fit_is_refused_or_dropped():
    long = pack.LongDocuments(pairs=True, shares=True)
    tokens = np.arange(30, dtype=np.int32)
    documents = pack.Documents(tokens, np.array([10, 20]), samples=np.array([4, 16]))
    assert_refused(lambda: pack.cut_documents(documents, 19, long), "data.context=19", fix="drop")
    cut = pack.cut_documents(documents, 19, long._replace(mode="drop"))
    assert cut.owners.tolist() == [0] and cut.removed.tolist() == [0, 20]
    assert cut.shards[1].nodes.tolist() == [(0, -1, 1), (6, -1, 0)]
    prompt = ~np.arange(15, dtype=np.int32)
    tokens = np.concatenate([prompt, [1, 2], prompt, [3]]).astype(np.int32)
    # would fit without the prompts
    documents = pack.Documents(tokens, np.array([33]), samples=np.array([17]))
    for mode in ("split", "refuse"):
        assert_refused(
            lambda mode=mode: pack.cut_documents(documents, 14, long._replace(mode=mode)),
            "a pair of 33 tokens",
            "data.context=14",
            fix="drop",
        )


def test_the_plan_includes_the_reference_model(folder):
    """Its copy needs memory unless there is an adapter; its forward takes time in both cases."""
    model = {"path": str(folder / "model")}
    hardware = find_hardware("1xH100-80GB")
    for adapter in (None, {"rank": 4}):
        plans = []
        for loss in ("cross_entropy", "dpo"):
            config = parse_config({"model": model, "loss": {"type": loss}, "adapter": adapter})
            layout = Layout(tile_tokens=4096, dtype="bfloat16")
            plans.append(Plan(model_shape(config), layout, hardware, work_from_config(config)))
        plain, dpo = plans
        assert 1.2 < dpo.step_s / plain.step_s < 1.5
        more = dpo.ledger.gpu["parameters"] - plain.ledger.gpu["parameters"]
        assert more == (0 if adapter else 2 * plain.shape.num_parameters)
        words = "the model without its adapter" if adapter else "a frozen copy"
        assert collect_facts(plain, "m")["notes"][bool(adapter) :] == []
        note = collect_facts(dpo, "m")["notes"][-1]
        assert note.startswith(f"reference: {words}; its forward")
