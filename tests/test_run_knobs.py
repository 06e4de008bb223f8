"""Settings and commands for a run: epochs, the best checkpoint, early stopping, a new learning
rate, validation only, export of a step, and samples."""

import json
import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig
from typer.testing import CliRunner

from ithaka.checkpoint import checkpoints
from ithaka.cli import app
from ithaka.cli.runs import validate_rank
from ithaka.config import load_config
from ithaka.evaluate import sample as evaluating
from ithaka.log.metrics import read_metrics
from ithaka.run.rules import check_settings
from ithaka.train import trainer as trainer_module
from refusals import assert_command_refused, assert_refused
from runs import adopted, metrics, run, tiny_run, validate
from templates import chat_tokenizer


def names(run_dir):
    return [path.name for path in sorted(run_dir.glob("checkpoints/step-*"))]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run with fixed validation losses, one of them NaN. It stops early, two validations after
    the lowest."""
    losses = iter((9.0, math.nan, 2.0, 2.5, 2.25))
    settings = {
        "validate_every": 1,
        "save_every": 0,
        "keep_last": 1,
        "patience": 2,
        "epochs": 2,
        "accumulate": 3,
    }
    config = tiny_run(tmp_path_factory.mktemp("knobs"), train=settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module.Trainer, "validate", lambda self: (next(losses), {}))
        run(config)
    return config


def test_patience_ends_the_run_and_the_best_checkpoint_is_kept(stopped, tmp_path):
    run_dir = stopped.train.run_dir
    assert [line["val_loss"] for line in read_metrics(run_dir / "metrics.jsonl")] == [
        9.0,
        None,
        2.0,
        2.5,
        2.25,
    ]
    assert [(line["step"], line["val_loss"]) for line in metrics(run_dir) if "event" in line] == [
        (1, "nan")
    ]
    assert "NaN" not in (run_dir / "metrics.jsonl").read_text()
    assert names(run_dir) == ["step-00000002", "step-00000004"], "the best and the last"
    state = checkpoints.read_state(checkpoints.find_checkpoint(run_dir))
    assert (state["best"], state["stale"]) == ([2.0, 2], 2)
    saved = load_config(run_dir / "config.yaml")
    assert_refused(
        lambda: validate(saved, run_dir), "train.patience=2", fix="--set train.patience=4"
    )
    more = replace(saved, train=replace(saved.train, patience=3))
    assert not validate(more, run_dir).finished


def test_epochs_become_steps(stopped):
    train = load_config(stopped.train.run_dir / "config.yaml").train
    assert (train.steps, train.epochs) == (math.ceil(2 * 71 / 3), None), (
        "71 sequences are a pass over the data"
    )
    assert load_config(stopped.train.run_dir / "config.yaml").optim.decay_steps == train.steps
    adopted(stopped.train.run_dir / "config.yaml")  # a run's config.yaml is valid for a new run
    both = ["train.epochs=2", "train.steps=3"]
    assert_refused(
        lambda: adopted(None, both), "train.epochs=2.0", "train.steps", fix="leave one out"
    )
    assert adopted(None, ["train.epochs=2"]).config.optim.decay_steps is None


def test_a_resumed_run_takes_another_learning_rate(stopped, tmp_path):
    run_dir = shutil.copytree(stopped.train.run_dir, tmp_path / "run")
    changes = [
        "optim.lr=0.5",
        "optim.schedule=constant",
        "train.patience=0",
        "train.steps=5",
        "train.validate_every=0",
    ]
    run(adopted(None, changes, run_dir).config, run_dir)
    records = read_metrics(run_dir / "metrics.jsonl")
    assert records[-1]["lr"] == 0.5 and len(records) == 6
    assert names(run_dir)[0] == "step-00000005", (
        "without patience and keep_best, the best is not kept"
    )


def test_a_step_is_exported_and_sampled(stopped, tmp_path):
    run_dir = stopped.train.run_dir
    cli = CliRunner()
    for step in (2, 4):
        out = str(tmp_path / f"step {step}")
        assert cli.invoke(app, ["export", str(run_dir), out, "--step", str(step)]).exit_code == 0
    arguments = ["export", str(run_dir), str(tmp_path / "no"), "--step", "3"]
    assert_command_refused(arguments, "--step=3", str(run_dir), fix="2 or 4")
    weights = [
        load_file(tmp_path / f"step {step}" / "model.safetensors")["model.norm.weight"]
        for step in (2, 4)
    ]
    assert not torch.equal(*weights)
    options = ["--prompt", "Document 12: 12 13", "--tokens", "5", "--temperature", "0"]
    texts = [
        cli.invoke(app, ["sample", str(source), *options])
        for source in (run_dir, tmp_path / "step 4")
    ]
    assert (
        texts[0].exit_code == 0 and texts[0].stdout == texts[1].stdout and len(texts[0].stdout) > 1
    )
    assert_command_refused(
        ["sample", str(tmp_path / "no"), *options], str(tmp_path / "no"), fix="with weights"
    )
    model = tmp_path / "step 4"
    assert_command_refused(
        ["sample", str(model), "--prompt", "a\udcff"], "--prompt='a\\udcff'", fix="UTF-8"
    )
    assert_command_refused(
        ["sample", str(model), *options[:-1], "1e-300"], "--temperature=1e-300", fix="0 (greedy)"
    )
    stored = (model / "model.safetensors").read_bytes()
    config = json.loads((model / "config.json").read_text())
    for changes, named in (
        ({"num_hidden_layers": 2}, "no tensor model.layers.1.input_layernorm.weight (9 missing"),
        (
            {"intermediate_size": 64},
            "model.layers.0.mlp.down_proj.weight has shape (32, 48), not (32, 64)",
        ),
        ({"num_attention_heads": 5}, "cannot be loaded"),
    ):
        (model / "config.json").write_text(json.dumps(config | changes))
        assert_command_refused(
            ["sample", str(model), *options], f"MODEL={model}", named, fix="fix config.json"
        )
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").write_bytes(stored[:5000])
    assert_command_refused(
        ["sample", str(model), *options], f"MODEL={model}", "cannot be loaded", fix="copy the files"
    )
    (model / "model.safetensors").write_bytes(stored)
    (model / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    assert_command_refused(
        ["sample", str(model), *options], f"MODEL={model}", "rejects it", fix="--raw"
    )


def test_damaged_runs_are_not_exported(stopped, tmp_path):
    run_dir = shutil.copytree(stopped.train.run_dir, tmp_path / "run")
    out = tmp_path / "out"
    for inside in (run_dir, run_dir / "model", run_dir / "checkpoints" / "mine"):
        arguments = ["export", str(run_dir), str(inside), "--force"]
        assert_command_refused(arguments, f"OUT_DIR={inside}", "own files", fix="another path")
    file = run_dir / "model" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"hidden_size": 64}))
    assert_command_refused(
        ["export", str(run_dir), str(out)], str(file), "does not match", fix="restore the file"
    )
    (run_dir / "model" / "adapter_config.json").write_text("{")
    arguments = ["export", str(run_dir), str(out)]
    fix = "another run of this model"
    assert_command_refused(arguments, "adapter_config.json cannot be read", fix=fix)
    file.unlink()
    assert_command_refused(arguments, f"{file} cannot be read", fix=fix)
    assert not out.exists()


def test_a_trace_is_answered_up_to_a_stop_token(tmp_path, monkeypatch):
    """The record's own answer is left out, and the system prompt and tools are rendered."""
    generate_kwargs = {}

    class Model:
        config = LlamaConfig()
        device = torch.device("cpu")

        def generate(self, **options):
            generate_kwargs.update(options)
            return torch.cat([options["input_ids"], torch.tensor([[5, 6]])], 1)

        def to(self, device):
            return self

        def eval(self):
            return self

    hf = chat_tokenizer(
        (Path(__file__).parents[1] / "src/ithaka/data/documents/templates/chatml.jinja").read_text()
    )
    hf.save_pretrained(tmp_path / "model")
    LlamaConfig().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(evaluating, "prepare_model", lambda source, out: source)
    monkeypatch.setattr(evaluating, "load_pretrained", lambda *_, **__: Model())
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "there"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"conversations": turns}) + "\n")
    (tmp_path / "tools.json").write_text(
        json.dumps([{"name": "add", "input_schema": {"type": "object"}}])
    )
    files = ["--messages", str(tmp_path / "a.jsonl"), "--tools", str(tmp_path / "tools.json")]
    result = CliRunner().invoke(
        app, ["sample", str(tmp_path / "model"), "--system", "be kind", *files]
    )
    text = hf.decode(generate_kwargs["input_ids"][0])
    assert (
        result.exit_code == 0
        and text.startswith("<|im_start|>system\nbe kind")
        and '"name": "add"' in text
    )
    assert (
        text.endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
        and generate_kwargs["use_cache"]
    )
    assert generate_kwargs["eos_token_id"] == hf.convert_tokens_to_ids(["</s>", "<|im_end|>"])
    for option, fix in (("--messages", "a record with messages"), ("--tools", "a JSON list")):
        arguments = [
            "sample",
            str(tmp_path / "model"),
            "--prompt",
            "hi",
            option,
            str(tmp_path / "no"),
        ]
        assert_command_refused(arguments, f"{option}=", fix=fix)
    assert_command_refused(["sample", str(tmp_path / "model")], "--prompt=''", fix="--messages")
    for content, named, fix in (
        ("5", "has no messages", "write ["),
        ('{"messages": null}', "has no messages (no field messages)", "write ["),
        ('[{"role": "assistant", "content": "x"}]', "nothing to answer", "end with the user's"),
    ):
        (tmp_path / "m.json").write_text(content)
        arguments = ["sample", str(tmp_path / "model"), "--messages", str(tmp_path / "m.json")]
        assert_command_refused(arguments, f"--messages={tmp_path / 'm.json'}", named, fix=fix)


def test_evaluate_only_prints_the_loss_and_leaves_the_run_alone(stopped, capsys):
    run_dir = stopped.train.run_dir
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    config = load_config(run_dir / "config.yaml", ["train.validate_sequences=2"])
    validate_rank(validate(config, run_dir, trains=False))
    printed = capsys.readouterr().out.split()
    loss = float(printed[2])
    perplexity = float(printed[4])
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-3) and 0 < loss < 9
    after = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path != run_dir}
    assert after == {path: time for path, time in before.items() if path != run_dir}


@pytest.mark.parametrize(
    "train", [{"patience": 2, "validate_every": 0}, {"keep_best": True, "validate_sequences": 0}]
)
def test_a_knob_without_validation_is_refused(train, tmp_path):
    config = tiny_run(tmp_path, train=train)
    assert_refused(
        partial(check_settings, config),
        f"train.{next(iter(train))}=",
        "validation",
        fix="train.validate_every",
    )


def test_a_learning_rate_of_zero_is_refused(tmp_path):
    """Hours of training would change nothing."""
    assert_refused(
        partial(validate, tiny_run(tmp_path, optim={"lr": 0})), "optim.lr=0", fix="more than 0"
    )
