"""A trained run becomes a Hugging Face directory that computes the same."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ithaka.config import ConfigError
from ithaka.train import checkpoint
from ithaka.train.loop import prepare
from runs import MODEL, run, tiny_run, valid


def trained_state(config, ids_BS):
    """Weights and logits of the trained parallel model, as the last checkpoint has them."""
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=100))
    model = prepare(valid(longer, config.train.run_dir)).model
    with torch.no_grad():
        logits = model(input_ids=ids_BS).logits
    return {name: value.full_tensor() for name, value in model.state_dict().items()}, logits


FAMILIES = [{"tie_word_embeddings": True}, {"tie_word_embeddings": False}, {"model_type": "qwen3"}]


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_exported_model_gives_the_trained_logits(ranks, tmp_path, family):
    if "model_type" in family:
        family = {**family, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
    config = tiny_run(tmp_path, model=family, train={"steps": 2})
    ids_BS = torch.arange(40).reshape(2, 20) * 13 % MODEL["vocab_size"]
    ranks.run(2, run, config)
    weights, logits = ranks.run(2, trained_state, config, ids_BS)[0]

    out = checkpoint.export(config.train.run_dir, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32
    exported = model.state_dict()
    assert exported.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(exported[name], value), name
    torch.testing.assert_close(model(ids_BS).logits, logits, rtol=1e-5, atol=1e-5)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == family.get("tie_word_embeddings", True)
    assert AutoTokenizer.from_pretrained(out)("añ")["input_ids"] == list("añ".encode())
    assert not list(Path(out).glob("*.bin")) and list(Path(out).glob("*.safetensors"))


def test_export_into_an_empty_folder_and_refusals(ranks, tmp_path, monkeypatch):
    config = tiny_run(tmp_path, train={"steps": 1})
    ranks.run(1, run, config)
    out = tmp_path / "out"
    out.mkdir()  # empty: may be used
    with monkeypatch.context() as inside:
        inside.chdir(out)
        assert checkpoint.export(config.train.run_dir, Path(".")) == out
    with pytest.raises(ConfigError, match="not empty"):
        checkpoint.export(config.train.run_dir, out)
    with pytest.raises(ConfigError, match="does not exist"):
        checkpoint.export(tmp_path / "nowhere", tmp_path / "other")
    assert not (tmp_path / "other").exists()
