"""The Hugging Face model exported from a run computes the same logits."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from ithaka.checkpoint.export import export, write_card
from ithaka.cli import app
from ithaka.cli import runs as runs_commands
from ithaka.data.tokenizer import ByteTokenizer
from ithaka.train.prepare import prepare
from refusals import assert_refused
from runs import MODEL, metrics, run, tiny_run, validate


def trained_state(config, ids_BS):
    """Return the weights and logits of the trained parallel model, from the last checkpoint."""
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=100))
    model = prepare(validate(longer, config.train.run_dir)).model
    with torch.no_grad():
        logits = model(input_ids=ids_BS).logits
    return {name: value.full_tensor() for name, value in model.state_dict().items()}, logits


FAMILIES = [{"tie_word_embeddings": True}, {"tie_word_embeddings": False, "model_type": "qwen3"}]


@pytest.mark.parametrize(
    "family", [FAMILIES[1], pytest.param(FAMILIES[0], marks=pytest.mark.slow)], ids=str
)
def test_exported_model_gives_the_trained_logits(ranks, tmp_path, family):
    if "model_type" in family:
        family = {**family, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
    config = tiny_run(tmp_path, model=family, train={"steps": 2})
    ids_BS = torch.arange(40).reshape(2, 20) * 13 % MODEL["vocab_size"]
    ranks.run(2, run, config)
    weights, logits = ranks.run(2, trained_state, config, ids_BS)[0]

    out = export(config.train.run_dir, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32
    exported = model.state_dict()
    assert exported.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(exported[name], value), name
    torch.testing.assert_close(model(ids_BS).logits, logits, rtol=1e-5, atol=1e-5)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == family["tie_word_embeddings"]
    assert AutoTokenizer.from_pretrained(out)("añ")["input_ids"] == list("añ".encode())
    assert not list(Path(out).glob("*.bin")) and list(Path(out).glob("*.safetensors"))
    write_card(config.train.run_dir, out, "org/name")
    card = (out / "README.md").read_text()
    losses = [line["val_loss"] for line in metrics(config.train.run_dir)]
    assert (
        "# org/name" in card and "library_name: transformers" in card and str(tmp_path) not in card
    )
    for fact in (
        "| base model | none: trained from scratch |",
        "| data | texts |",
        "| context | 61 tokens |",
        "| trained on | ",
    ):
        assert fact in card
    assert f"| validation loss | {losses[0]:.4f} -> {losses[-1]:.4f} |" in card
    write_card(config.train.run_dir, out, "org/name", step=1)
    assert "| steps | 1, " in (out / "README.md").read_text(), "later steps are not counted"


def test_export_has_the_tokenizer_with_its_tokens_and_template(ranks, tmp_path):
    """The tokenizer of the pretrained model has two more tokens than the model."""
    source = tmp_path / "source"
    tokenizer = ByteTokenizer().hf
    template = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
    tokenizer.chat_template = template
    tokenizer.add_tokens(["<|user|>", "<|end|>"], special_tokens=True)
    tokenizer.save_pretrained(source)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**MODEL, "vocab_size": 259}))
    model.save_pretrained(source)
    generation = '{"do_sample": true, "eos_token_id": [257, 260], "temperature": 0.6}\n'
    (source / "generation_config.json").write_text(generation)
    config = tiny_run(tmp_path, data={"tokenizer": None}, optim={"lr": 1e-5}, train={"steps": 3})
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=source))
    assert_refused(
        lambda: validate(config), "261", "vocab_size=259", fix="model.resize_embeddings=true"
    )
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, resize_embeddings=True)
    )
    ranks.run(2, run, config)
    ranks.run(1, run, *with_one_more_step(config))

    out = export(config.train.run_dir, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(out)
    loaded = AutoTokenizer.from_pretrained(out)
    assert exported.config.vocab_size == 320 and exported.generation_config.eos_token_id == [
        257,
        260,
    ]
    assert (out / "generation_config.json").read_text() == generation
    chat = [{"role": "user", "content": "hi"}]
    assert loaded.apply_chat_template(chat, tokenize=False) == "<|user|>hi<|end|>"
    assert loaded.convert_tokens_to_ids(["<|user|>", "<|end|>"]) == [259, 260]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        before = model.state_dict()[name]
        after = exported.state_dict()[name]
        torch.testing.assert_close(after[:259], before, rtol=0, atol=1e-4)
        torch.testing.assert_close(after[259:], before.mean(0).expand(61, -1), rtol=0, atol=1e-4)


def with_one_more_step(config):
    """Return the arguments that resume the run for one more step."""
    more = dataclasses.replace(config.train, steps=config.train.steps + 1)
    return dataclasses.replace(config, train=more), config.train.run_dir


@pytest.fixture(scope="module")
def small(ranks, tmp_path_factory):
    """A run of one step."""
    config = tiny_run(tmp_path_factory.mktemp("small"), train={"steps": 1})
    ranks.run(1, run, config)
    return config


def test_only_files_that_the_export_wrote_are_pushed(small, tmp_path, monkeypatch):
    pushed = []
    monkeypatch.setattr(runs_commands, "create_repository", lambda name: None)
    monkeypatch.setattr(
        runs_commands, "push_files", lambda folder, names, *args: pushed.extend(names) or "address"
    )
    for name in (
        "notes.txt",
        "config.json",
        "README.md",
        *(f"private/{i:02}.txt" for i in range(12)),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("my own")
    words = ["export", small.train.run_dir, tmp_path, "--push", "org/name", "--force"]
    shown = CliRunner().invoke(app, list(map(str, words))).stdout
    assert {"README.md", "config.json", "model.safetensors", "tokenizer_config.json"} <= {*pushed}
    assert len({*pushed}) == len(pushed) and all(
        (tmp_path / name).read_text("latin1") != "my own" for name in pushed
    )
    own = [
        file.name
        for file in sorted(tmp_path.rglob("*"))
        if file.is_file() and file.read_text("latin1") == "my own"
    ]
    assert own == ["notes.txt", *(f"{i:02}.txt" for i in range(12))]
    assert "notes.txt, private/00.txt" in shown and "private/08.txt and 3 more" in shown


def test_a_link_in_a_run_is_not_exported(small, tmp_path):
    """In someone else's run, it could lead to any of the user's files."""
    copy = shutil.copytree(small.train.run_dir, tmp_path / "run")
    (tmp_path / "secret").write_text("secret")
    (copy / "model/notes.txt").symlink_to(tmp_path / "secret")
    assert_refused(
        lambda: export(copy, tmp_path / "out"),
        f"RUN_DIR={copy}",
        "model/notes.txt",
        fix="remove it",
    )
    assert not (tmp_path / "out").exists()


def test_export_needs_a_run_and_an_empty_folder_or_force(small, tmp_path, monkeypatch):
    config = small
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is accepted
    with monkeypatch.context() as inside:
        inside.chdir(out)
        assert export(config.train.run_dir, Path(".")) == out
    assert_refused(lambda: export(config.train.run_dir, out), f"OUT_DIR={out}", fix="--force")
    assert export(config.train.run_dir, out, force=True) == out
    missing = tmp_path / "nowhere"
    other = tmp_path / "other"
    assert_refused(
        lambda: export(missing, other), str(missing), fix="the directory of an earlier run"
    )
    assert not (tmp_path / "other").exists()
