"""Decoders of any family are loaded from files, initialized, trained from YAML, resumed, exported
and adapted."""

import copy
import dataclasses
import json
import math
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from decoders import DECODERS, HYBRIDS, RECURRENT, tiny_decoder
from ithaka.checkpoint.export import export
from ithaka.comm.mesh import make_mesh
from ithaka.config import AdapterConfig, ConfigError, ModelConfig, RopeConfig, load_config, to_yaml
from ithaka.facts.model_files import read_json
from ithaka.inputs.positions import rope_parameters
from ithaka.layout import Layout
from ithaka.model.build import build_model, read_hf_config
from ithaka.run.road import model_shape
from ithaka.trace.shapes import shape_from_config
from ithaka.train import loop
from ithaka.train.prepare import prepare
from ithaka.weights.load import init_weights
from refusals import assert_refused
from runs import MODEL, copy_run_at_step, metrics, saves_in_time, tiny_run, validate

pytestmark = pytest.mark.usefixtures("quiet_transformers")
IDS = torch.arange(40).reshape(2, 20) * 13 % 61

OTHERS = {
    "afmoe": {"num_dense_layers": 1},
    "moshi": {"ffn_dim": 40},
    "emu3_text_model": dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}


def save_decoder(folder, family, **changes):
    """Save a model with two layers of different kinds, as transformers does for the hub."""
    kinds = ["sliding_attention", "full_attention"]
    types = (
        {"layer_types": kinds}
        if family in ("gpt_oss", "gemma2", "gemma3_text", "olmo3", "cohere2")
        else {}
    )
    types |= {"layer_types": ["linear_attention", "full_attention"]} if family in HYBRIDS else {}
    types |= {} if family == "nemotron_h" else {"num_hidden_layers": 2}
    types |= OTHERS.get(family, {})
    model = tiny_decoder(family, torch.float32, **types, **changes)
    for name, buffer in model.named_buffers():
        if "correction" in name:
            buffer.copy_(torch.linspace(-0.1, 0.1, buffer.numel()).view_as(buffer))
    model.save_pretrained(folder)
    return folder


def save_in_mxfp4(folder, family, **changes):
    """Save random experts as OpenAI does: blocks of 32 values in four bits, with one scale per
    block."""
    save_decoder(folder, family, hidden_size=64, intermediate_size=32, **changes)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    for name in [
        name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]:
        num_experts, inputs, outputs = tensors.pop(name).shape
        groups = num_experts, outputs, inputs // 32
        tensors[f"{name}_blocks"] = torch.randint(
            256, (*groups, 16), generator=generator, dtype=torch.uint8
        )
        tensors[f"{name}_scales"] = torch.randint(
            120, 124, groups, generator=generator, dtype=torch.uint8
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    return folder


@torch.no_grad()
def plain_logits(folder, adapter=None):
    is_packed = "quantization_config" in json.loads((folder / "config.json").read_text())
    options = {"quantization_config": Mxfp4Config(dequantize=True)} if is_packed else {}
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", **options
    ).float()
    if adapter is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = PeftModel.from_pretrained(model, str(adapter))
    return model.eval()(input_ids=IDS).logits


# ---- files


def load_and_save(folder, out):
    """Save the parallel model to `out`; return its logits and full tensors."""
    model = build_model(folder, make_mesh(1), Layout(kernel="reference"), trains=False)
    model.save_pretrained(out)
    tensors = {
        name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in model.state_dict().items()
    }
    with torch.no_grad():
        return model(input_ids=IDS).logits, tensors


ALWAYS = ("glm4_moe", "mixtral", "apertus", "moshi", "emu3_text_model")


# GLM and Apertus have buffers in their files, Apertus without an initial value, Mixtral renamed
# experts, Moshi an embedding with one more row than its head, and Gemma 2 an embedding scale that
# no file contains. Emu3's decoder is saved under a type that AutoModelForCausalLM does not know.
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in ALWAYS else pytest.mark.slow)
        for family in (
            *DECODERS,
            *HYBRIDS,
            *RECURRENT,
            "mixtral",
            "qwen3_moe",
            "apertus",
            "moshi",
            "emu3_text_model",
        )
    ],
)
def test_loaded_files_are_saved_byte_for_byte(ranks, tmp_path, family):
    save_decoder(tmp_path, family)
    logits, tensors = ranks.run(2, load_and_save, tmp_path, tmp_path / "out")[0]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert tensors.keys() == plain.keys() and all(
        torch.equal(tensors[name], plain[name]) for name in plain
    )
    torch.testing.assert_close(logits, plain_logits(tmp_path), rtol=1e-4, atol=1e-4)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (
        tmp_path / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("family", ["bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"])
def test_an_infinite_number_is_read_as_transformers_writes_it(tmp_path, family):
    """JSON has none: the limit of Mamba2's step sizes is written as an object."""
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["time_step_limit"][1] == {
        "__float__": "Infinity"
    }
    assert read_json(tmp_path / "config.json")["time_step_limit"] == [0.0, math.inf]


def test_mxfp4_is_dequantized_bitwise(ranks, tmp_path):
    save_in_mxfp4(tmp_path, "gpt_oss")
    logits, tensors = ranks.run(2, load_and_save, tmp_path, tmp_path / "out")[0]
    stored = load_file(tmp_path / "model.safetensors")
    packed = [name for name in tensors if f"{name}_blocks" in stored]
    assert len(packed) == 4
    for name in packed:
        expected = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert torch.equal(tensors[name], expected.float())
    torch.testing.assert_close(logits, plain_logits(tmp_path), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, plain_logits(tmp_path / "out"), rtol=1e-4, atol=1e-4)


def test_damaged_experts_are_named(ranks, tmp_path):
    """GLM's files store experts one by one. Their layers for multi-token prediction are ignored."""
    save_decoder(tmp_path, "glm4_moe")
    expert = "model.layers.1.mlp.experts.{}.up_proj.weight"
    stored = load_file(tmp_path / "model.safetensors")
    changes = {
        "missing": {expert.format(2): None},
        "renamed": {expert.format(1): None, expert.format(9): stored[expert.format(1)]},
        "extra": {
            expert.format(4): torch.zeros(24, 32),
            expert.format(4).replace("up", "gate"): torch.zeros(24, 32),
        },
        "shape": {expert.format(0): torch.zeros(23, 32)},
        "ignored": {"model.layers.92.mlp.experts.0.up_proj.weight": torch.zeros(3)},
    }
    folders = [
        Path(shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-{name}")))
        for name in changes
    ]
    for folder, change in zip(folders, changes.values(), strict=True):
        tensors = {name: tensor for name, tensor in (stored | change).items() if tensor is not None}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (missing, renamed, extra, shape, ignored) = ranks.run(1, build_errors, folders)[0]
    assert_refused(
        missing, str(folders[0]), expert.format(2), "1 missing", fix="copy the files again"
    )
    assert_refused(renamed, expert.format(1), "1 missing", fix="copy the files again")
    assert_refused(extra, "experts.4.", fix="fix config.json")
    assert_refused(shape, expert.format(0), "(23, 32)", "(24, 32)", fix="fix config.json")
    assert ignored is None


def build_errors(folders):
    errors = []
    for folder in folders:
        try:
            errors.append(build_model(folder, make_mesh(1)) and None)
        except ConfigError as error:
            errors.append(str(error))
    return errors


def draw_weights(sources):
    models = [build_model(source, make_mesh(1), seed=5) for source in sources]
    return [
        {name: param.detach().full_tensor() for name, param in model.named_parameters()}
        for model in models
    ]


@pytest.mark.slow
def test_drawn_weights_have_the_distributions_of_transformers(ranks):
    """Including Gemma's norms, which are offsets from 1, and gpt-oss's sinks and biases, on any
    number of ranks."""
    large = {"hidden_size": 64, "vocab_size": 301, "num_hidden_layers": 2, "pad_token_id": None}
    configs = [
        tiny_decoder(family, torch.float32, **large).config for family in ("gpt_oss", "gemma2")
    ]
    sources = [config.to_dict() for config in configs]
    (one,) = ranks.run(1, draw_weights, sources)
    two, _ = ranks.run(2, draw_weights, sources)
    torch.manual_seed(0)  # some parameters have only eight elements
    for config, weights, others in zip(configs, one, two, strict=True):
        for name, theirs in AutoModelForCausalLM.from_config(config).named_parameters():
            ours = weights[name]
            assert torch.equal(ours, others[name]), name
            if theirs.std() == 0:
                assert torch.equal(ours, theirs.detach()), name
            elif theirs.numel() > 1000:
                assert abs(ours.std() / theirs.std() - 1) < 0.1, name
            else:
                assert 0.3 < ours.std() / theirs.std() < 3, name


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text", "afmoe", "nanochat"])
def test_modules_initialized_by_a_parent_have_the_distributions_of_transformers(family):
    """Routers, which AFMoE sets to zero, and the scaled output projections of nanochat."""
    config = tiny_decoder(family, torch.float32).config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    init_weights(model.to_empty(device="cpu"), 0, torch.device("cpu"))
    weights = dict(model.named_parameters())
    torch.manual_seed(0)
    for name, theirs in AutoModelForCausalLM.from_config(config).named_parameters():
        if name.endswith(("gate.weight", "o_proj.weight")):
            assert weights[name].std().item() == pytest.approx(theirs.std().item(), rel=0.3), name


@pytest.mark.parametrize("family, partial", [("gemma3_text", None), ("glm4_moe", 0.5)])
def test_rope_extends_the_layers_without_a_window(family, partial):
    """Gemma's windowed layers keep their frequencies; GLM still rotates half of each head."""
    source = tiny_decoder(family, torch.float32, num_hidden_layers=2).config.to_dict()
    before = copy.deepcopy(source["rope_parameters"])
    config = read_hf_config(source, RopeConfig(type="yarn", factor=4.0), 2048)
    rope = rope_parameters(config)
    assert (rope["rope_type"], rope["factor"], rope.get("partial_rotary_factor")) == (
        "yarn",
        4.0,
        partial,
    )
    assert config.max_position_embeddings == 2048
    assert config.rope_parameters.get("sliding_attention") == before.get("sliding_attention")
    rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**source)).model.rotary_emb
    changed = {
        name for name, t in rotary.named_buffers() if not torch.equal(t, plain.get_buffer(name))
    }
    prefix = "full_attention_" if family == "gemma3_text" else ""
    assert changed == {f"{prefix}inv_freq", f"{prefix}original_inv_freq"}


def test_a_resized_vocabulary_is_planned(tmp_path):
    """The planned shape equals that of the resized model, so that the run can be resumed."""
    config = configure(tmp_path, "olmo2", vocab_size=61)
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, resize_embeddings=True)
    )
    file = tmp_path / "base/config.json"
    resized = json.loads(file.read_text()) | {"vocab_size": 320}
    assert model_shape(config) == shape_from_config(resized)


def test_adapters_on_experts_are_refused():
    source = tiny_decoder("glm4_moe", torch.float32, num_hidden_layers=2).config.to_dict()
    adapter = AdapterConfig(targets=("q_proj", "down_proj"))
    build = lambda: build_model(source, make_mesh(1), adapter=adapter)  # noqa: E731
    assert_refused(build, "adapter.targets", "down_proj", fix="q_proj")


# ---- runs


def configure(folder, family, vocab_size=MODEL["vocab_size"], save=save_decoder):
    base = save(folder / "base", family, vocab_size=vocab_size)
    config = tiny_run(
        folder, train={"steps": 4, "save_every": 2, "validate_every": 0, "validate_sequences": 0}
    )
    config = dataclasses.replace(config, model=ModelConfig(path=base))
    (folder / "run.yaml").write_text(to_yaml(config))
    return load_config(folder / "run.yaml")


def train(run):
    with saves_in_time():
        return loop.train(run)


def finish(run):
    """Resume, save, and return the losses and the logits of the trained model."""
    trainer = prepare(run)
    config = run.config
    losses = []
    while trainer.step < config.train.steps:
        losses.append(trainer.advance(trainer.next_batches()).result.loss)
    trainer.save()
    trainer.saver.finish()
    with torch.no_grad():
        return losses, trainer.model(input_ids=IDS).logits


# Nemotron-H has no RoPE. AFMoE has parameters that are never trained; like all others, they come
# from the checkpoint.
SLOW = ("afmoe", "qwen3_moe", "gpt_oss", "gemma3_text")


@pytest.mark.parametrize(
    "family", ["nemotron_h", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_a_run_from_files_is_resumed_without_them_and_exported(ranks, tmp_path, family):
    config = configure(tmp_path, family)
    ranks.run(2, train, validate(config, num_ranks=2))
    stored = load_file(tmp_path / "base/model.safetensors")
    (tmp_path / "base/model.safetensors").unlink()
    losses = [line["loss"] for line in metrics(config.train.run_dir)]
    assert losses[-1] < losses[0] - 0.1
    again = copy_run_at_step(config.train.run_dir, tmp_path / "again", 2)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, run_dir=again))
    ((others, logits),) = ranks.run(1, finish, validate(config, again))
    assert others == pytest.approx(losses[2:], rel=1e-5)
    out = export(again, tmp_path / "out")
    assert load_file(out / "model.safetensors").keys() == stored.keys()
    torch.testing.assert_close(plain_logits(out), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow  # test_fourbit.py reads and trains such experts in the default tier
def test_adapters_on_experts_in_mxfp4_load_in_peft(ranks, tmp_path):
    adapter = AdapterConfig(rank=2, targets=("q_proj", "experts.gate_up_proj", "experts.down_proj"))
    config = dataclasses.replace(
        configure(tmp_path, "gpt_oss", save=save_in_mxfp4), adapter=adapter
    )
    losses, logits = ranks.run(2, finish, validate(config, num_ranks=2))[0]
    assert losses[-1] < losses[0]
    out, merged = (
        export(config.train.run_dir, tmp_path / str(merge), merge) for merge in (False, True)
    )
    assert (
        sum("experts" in name for name in load_file(out / "adapter_model.safetensors")) == 2 * 2 * 2
    )
    torch.testing.assert_close(plain_logits(config.model.path, out), logits, rtol=1e-5, atol=1e-5)
    # its experts are in bfloat16
    torch.testing.assert_close(plain_logits(merged), logits, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "glm4_moe"])
def test_an_adapter_loads_in_peft(ranks, tmp_path, family):
    """Gemma's embeddings are tied; GLM's files have buffers, which do not belong to the adapter."""
    config = dataclasses.replace(configure(tmp_path, family), adapter=AdapterConfig(rank=2))
    _, logits = ranks.run(2, finish, validate(config, num_ranks=2))[0]
    out, merged = (
        export(config.train.run_dir, tmp_path / str(merge), merge) for merge in (False, True)
    )
    assert all(".lora_" in name for name in load_file(out / "adapter_model.safetensors"))
    torch.testing.assert_close(plain_logits(config.model.path, out), logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain_logits(merged), logits, rtol=1e-4, atol=1e-4)
    frozen, stored = (
        load_file(folder / "model.safetensors") for folder in (merged, config.model.path)
    )
    adapted = sum(not torch.equal(frozen[name], tensor) for name, tensor in stored.items())
    assert adapted == (14 if family == "gemma3_text" else 8)
