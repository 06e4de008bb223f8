"""Decoders of any family from files: loaded, drawn, trained from YAML, resumed, exported, and adapted."""

import dataclasses
import warnings

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from decoders import tiny_decoder
from ithaka.config import AdapterConfig, ModelConfig, load_config, to_yaml
from ithaka.export import export
from ithaka.train.trainer import prepare
from runs import MODEL, copy_back_at, metrics, run, tiny_run, valid

pytestmark = pytest.mark.usefixtures("quiet_transformers")
IDS = torch.arange(40).reshape(2, 20) * 13 % 61


def saved_decoder(folder, family, **changes):
    """Files as transformers writes them for the hub, of a model with two layers of different kinds."""
    kinds = ["sliding_attention", "full_attention"]
    types = {"layer_types": kinds} if family in ("gpt_oss", "gemma2", "gemma3_text", "olmo3", "cohere2") else {}
    model = tiny_decoder(family, torch.float32, num_hidden_layers=2, **types, **changes)
    for name, buffer in model.named_buffers():
        if "correction" in name:
            buffer.copy_(torch.linspace(-0.1, 0.1, buffer.numel()).view_as(buffer))
    model.save_pretrained(folder)
    return folder


# ---- runs


def configured(folder, family, **sections):
    base = saved_decoder(folder / "base", family, vocab_size=MODEL["vocab_size"])
    config = tiny_run(folder, train={"steps": 4, "save_every": 2}, **sections)
    config = dataclasses.replace(config, model=ModelConfig(path=base))
    (folder / "run.yaml").write_text(to_yaml(config))
    return load_config(folder / "run.yaml")


def resumed(config):
    """Resume, save, and return the losses and the logits of the trained model."""
    trainer, losses = prepare(valid(config, config.train.run_dir)), []
    while trainer.step < config.train.steps:
        losses.append(trainer.advance([trainer.data.next_batch()])[0].loss)
    trainer.save()
    trainer.saver.finish()
    with torch.no_grad():
        return losses, trainer.model(input_ids=IDS).logits


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text", "qwen3_moe"])
def test_a_run_from_files_is_resumed_and_exported(ranks, tmp_path, family):
    config = configured(tmp_path, family)
    ranks.run(2, run, config)
    losses = [line["loss"] for line in metrics(config.train.run_dir)[1:]]
    assert losses[-1] < losses[0] - 0.1
    again = copy_back_at(config.train.run_dir, tmp_path / "again", 2)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, run_dir=again))
    ((others, logits),) = ranks.run(1, resumed, config)
    assert others == pytest.approx(losses[2:], rel=1e-5)
    out = export(again, tmp_path / "out")
    names = {name for file in tmp_path.glob("base/*.safetensors") for name in load_file(file)}
    assert {name for file in out.glob("*.safetensors") for name in load_file(file)} == names
    plain = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
    torch.testing.assert_close(plain(input_ids=IDS).logits, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma3_text", "glm4_moe"])
def test_an_adapter_loads_in_peft(ranks, tmp_path, family):
    """Gemma ties its embeddings; GLM has buffers in its files, which are not the adapter's."""
    config = configured(tmp_path, family)
    config = dataclasses.replace(config, adapter=AdapterConfig(rank=2))
    ranks.run(2, run, config)
    ((_, logits),) = ranks.run(
        1, resumed, dataclasses.replace(config, train=dataclasses.replace(config.train, steps=5))
    )
    base, out = config.model.path, export(config.train.run_dir, tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
        adapted = PeftModel.from_pretrained(plain, str(out)).eval()
        missing = {name for name in load_file(out / "adapter_model.safetensors") if ".lora_" not in name}
        merged = AutoModelForCausalLM.from_pretrained(export(config.train.run_dir, tmp_path / "merged", merge=True))
    assert not missing
    torch.testing.assert_close(adapted(input_ids=IDS).logits, logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged.eval()(input_ids=IDS).logits, logits, rtol=1e-4, atol=1e-4)
