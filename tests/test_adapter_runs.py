"""Runs with an adapter: losses match a plain PEFT loop; loading and exporting PEFT's run_files,
merging, resuming."""

import dataclasses
import json
import shutil
import warnings
from unittest import mock

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from ithaka.blocks.linear import as_linear
from ithaka.checkpoint import checkpoints
from ithaka.checkpoint.export import export
from ithaka.checkpoint.safe_load import SafeReader
from ithaka.comm.mesh import make_mesh
from ithaka.config import AdapterConfig, Config, ModelConfig, parse_config
from ithaka.layout import Layout
from ithaka.model.build import build_model
from ithaka.run import run_files
from ithaka.run.adopt import adopt_adapter
from ithaka.train.prepare import prepare
from ithaka.train.step import learning_rate
from ithaka.weights.formats import round_weights
from models import tiny_model
from parity import plain_sum
from refusals import assert_refused
from runs import MODEL as ONE_LAYER
from runs import bitwise_metrics, run, tiny_run, validate

MODEL = {**ONE_LAYER, "num_hidden_layers": 2}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "adapters": (False, {"target_modules": [*LINEARS, "lm_head"]}),
    "adapters and both ends": (
        False,
        {"target_modules": LINEARS, "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "tied ends": (
        True,
        {
            "target_modules": LINEARS,
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
}


@pytest.fixture(autouse=True)
def quiet():
    """Silence PEFT's warnings about tied weights and saved embeddings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save_base(folder, tied, dtype=torch.float32):
    model = tiny_model(LlamaConfig(**{**MODEL, "tie_word_embeddings": tied}), dtype)
    model.save_pretrained(folder)
    return folder


def save_adapter(base, folder, **lora):
    """Save an adapter as PEFT does after some training, with nonzero B."""
    torch.manual_seed(7)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=3, lora_alpha=5, **lora)
    )
    with torch.no_grad():
        for param in (param for param in model.parameters() if param.requires_grad):
            param += 0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(8))
    model.save_pretrained(folder)
    return folder


def configured(folder, base, adapter, **sections):
    # With a small eps, Adam would amplify the rounding of tiny gradients (norms are float32) to
    # full steps.
    config = tiny_run(folder, optim={"eps": 1e-4}, **sections)
    return dataclasses.replace(
        config, model=ModelConfig(path=base, dtype="float64"), adapter=adapter
    )


def train_and_record(config):
    """Train and return the micro-batches and the loss of each step."""
    trainer = prepare(run := validate(config))
    steps = []
    losses = []
    added = sum(
        param.numel() for name, param in trainer.model.named_parameters() if "lora_" in name
    )
    assert added and trainer.num_params == run.shape.num_parameters + added
    while trainer.step < config.train.steps:
        batches = trainer.next_batches()
        losses.append(trainer.advance(batches).result.loss)
        steps.append(batches)
    trainer.save()
    trainer.saver.finish()
    return steps, losses


def batch_loss(model, batches):
    """Return the mean loss, computing each document on its own."""
    total = 0.0
    count = 0
    for batch in batches:
        for ids, labels, documents in zip(
            batch.input_ids, batch.labels, batch.document_ids, strict=True
        ):
            lengths = torch.unique_consecutive(documents, return_counts=True)[1].tolist()
            for part, expected in zip(ids.split(lengths), labels.split(lengths), strict=True):
                if len(part) > 1:
                    total = total + plain_sum(model, part[None], expected[None])
            count += int((labels[1:] != -100).sum())
    return total / count


def load_adapter(base, adapter, **options):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    return PeftModel.from_pretrained(model, str(adapter), **options).double()


def plain_losses(model, steps, optim):
    """Return the losses of a plain PEFT training loop."""
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(
        params, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
    )
    losses = []
    for step, batches in enumerate(steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, optim, len(steps))
        loss = batch_loss(model, batches)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


SLOW = [
    pytest.param(case, marks=pytest.mark.slow) for case in ("adapters and both ends", "tied ends")
]


@pytest.mark.parametrize("case", ["adapters", *SLOW])
def test_an_adapter_from_peft_trains_as_in_peft_and_is_exported(ranks, tmp_path, case):
    tied, lora = CASES[case]
    base = save_base(tmp_path / "base", tied)
    start = save_adapter(base, tmp_path / "start", **lora)
    settings = adopt_adapter(Config(adapter=AdapterConfig(path=start))).adapter
    config = configured(tmp_path / "a", base, settings, train={"steps": 3})
    steps, losses = ranks.run(2, train_and_record, config)[0]
    plain = load_adapter(base, start, is_trainable=True)
    assert losses == pytest.approx(plain_losses(plain, steps, config.optim), rel=1e-6)
    assert losses[-1] < losses[0] - 0.01

    ids = torch.arange(40).reshape(2, 20) * 13 % MODEL["vocab_size"]
    expected = plain(input_ids=ids).logits
    out = export(config.train.run_dir, tmp_path / "out")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        file.name for file in out.iterdir()
    }
    assert not (out / "config.json").exists(), "PEFT uses the base's config.json"
    torch.testing.assert_close(
        load_adapter(base, out)(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5
    )
    merged = AutoModelForCausalLM.from_pretrained(
        export(config.train.run_dir, tmp_path / "merged", True)
    )
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == tied
    torch.testing.assert_close(
        merged.double()(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5
    )

    again = configured(tmp_path / "b", base, AdapterConfig(path=out), train={"steps": 1})
    (batches,), (loss,) = ranks.run(2, train_and_record, again)[0]
    assert loss == pytest.approx(
        float(batch_loss(load_adapter(base, out), batches).detach()), rel=1e-6
    )


def test_a_four_bit_base_trains_as_its_dequantized_weights_and_is_recorded(ranks, tmp_path):
    base = save_base(tmp_path / "base", False)
    ids = torch.arange(40).reshape(2, 20) * 13 % MODEL["vocab_size"]
    start = save_adapter(base, tmp_path / "start", target_modules=LINEARS)
    adapter = AdapterConfig(path=start, base="nf4", unquantized=("v_proj",))
    settings = adopt_adapter(Config(adapter=adapter)).adapter
    config = configured(tmp_path / "a", base, settings, train={"steps": 2})
    steps, losses = ranks.run(2, train_and_record, config)[0]
    rounded = AutoModelForCausalLM.from_pretrained(base).double()
    round_weights(rounded, settings)
    plain = PeftModel.from_pretrained(rounded, start, is_trainable=True).double()
    assert losses == pytest.approx(plain_losses(plain, steps, config.optim), rel=1e-6)
    expected = plain(input_ids=ids).logits

    out = export(config.train.run_dir, tmp_path / "out")
    with safe_open(out / "adapter_model.safetensors", "pt") as file:
        base = json.loads(file.metadata()["base_quantization"])
    assert (base["base"], base["unquantized"]) == ("nf4", ["v_proj"])
    merged = {}
    for as_trained in (True, False):
        folder = export(
            config.train.run_dir,
            tmp_path / f"merged-{as_trained}",
            merge=True,
            as_trained=as_trained,
        )
        merged[as_trained] = (
            AutoModelForCausalLM.from_pretrained(folder).double()(input_ids=ids).logits
        )
    torch.testing.assert_close(merged[True], expected, rtol=1e-5, atol=1e-5)
    assert (merged[False] - expected).norm() > 0.01 * expected.norm()


def test_checkpoints_have_only_trained_weights_and_resume_bitwise(ranks, tmp_path):
    base = save_base(tmp_path / "base", True)
    adapter = AdapterConfig(rank=2, targets=("q_proj", "down_proj"))
    config = configured(tmp_path, base, adapter)
    ranks.run(2, run, config)
    run_dir = config.train.run_dir
    uninterrupted = bitwise_metrics(run_dir)
    names = SafeReader(checkpoints.find_checkpoint(run_dir)).read_metadata().state_dict_metadata
    weights = {name for name in names if name.startswith("model.")}
    assert weights and all("lora_" in name for name in weights)
    (run_dir / "latest").write_text("step-00000002\n")
    ranks.run(2, run, config, run_dir)
    assert bitwise_metrics(run_dir) == uninterrupted
    other = dataclasses.replace(config, adapter=dataclasses.replace(adapter, rank=3))
    other = dataclasses.replace(other, train=dataclasses.replace(config.train, steps=9))
    assert_refused(lambda: validate(other, run_dir), "adapter.rank=3", "2", fix="leave it out")

    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=9))
    moved = shutil.copytree(base, tmp_path / "moved")
    elsewhere = dataclasses.replace(longer, model=dataclasses.replace(config.model, path=moved))
    assert "model.path" in validate(elsewhere, run_dir).changed
    weights = load_file(moved / "model.safetensors")
    save_file(
        {name: -weight for name, weight in weights.items()},
        moved / "model.safetensors",
        {"format": "pt"},
    )
    assert_refused(
        lambda: validate(elsewhere, run_dir),
        f"model.path={moved}",
        str(run_dir),
        fix=f"model.path={base}",
    )
    resumed = validate(longer, run_dir)
    shutil.copy(moved / "model.safetensors", base)
    assert_refused(
        lambda: validate(longer, run_dir), f"model.path={base}", "base model", fix="start a new run"
    )
    (run_dir / checkpoints.PINS_FILE).unlink()
    full = dataclasses.replace(resumed, config=dataclasses.replace(longer, adapter=None))
    with mock.patch.object(
        run_files,
        "fingerprint_weights",
        side_effect=AssertionError("full training does not need the base"),
    ):
        run_files.check_base(full, longer)
    shutil.rmtree(base)
    validate(elsewhere, run_dir)


def build_parameters(base, adapter):
    """Build a bfloat16 model; return {name: (full parameter, whether it is trained)}."""
    model = build_model(base, make_mesh(1), Layout(dtype="bfloat16"), adapter=adapter, seed=4)
    return {
        name: (param.full_tensor().detach(), param.requires_grad)
        for name, param in model.named_parameters()
    }


def test_a_new_adapter_matches_peft_on_any_number_of_ranks(ranks, tmp_path):
    base = save_base(tmp_path / "base", False, torch.bfloat16)
    adapter = AdapterConfig(rank=3, alpha=6, modules_to_save=("lm_head",))
    (one,) = ranks.run(1, build_parameters, base, adapter)
    (two, other) = ranks.run(2, build_parameters, base, adapter)
    stored = load_file(base / "model.safetensors")
    for name, (tensor, trained) in one.items():
        assert torch.equal(tensor, two[name][0]) and torch.equal(tensor, other[name][0]), name
        assert trained == ("lora_" in name or name == "lm_head.weight")
        assert tensor.dtype == (torch.float32 if trained else torch.bfloat16)
        if "lora_B" in name:
            assert not tensor.any()
        elif "lora_A" in name:
            bound = tensor.shape[1] ** -0.5
            assert 0.8 * bound < tensor.abs().max() <= bound and abs(tensor.mean()) < bound / 3, (
                name
            )
        else:
            assert torch.equal(tensor.bfloat16(), stored[name.replace(".base_layer", "")])
    theirs = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=3, target_modules="all-linear")
    )
    named = {name.removeprefix("base_model.model.") for name, _ in theirs.named_parameters()}
    assert set(one) == named


@pytest.mark.parametrize(
    "settings, scale, targets",
    [
        ({"rank": 4, "alpha": 6}, 1.5, 14),
        ({"rank": 4, "alpha": 6, "rslora": True}, 3.0, 14),
        ({"rank": 2, "alpha": 3, "targets": ("q_proj", "1.mlp.up_proj", "lm_head")}, 1.5, 4),
    ],
)
def test_settings_mean_the_same_as_in_peft(settings, scale, targets):
    model = build_model(
        {**MODEL, "tie_word_embeddings": False}, make_mesh(1), adapter=AdapterConfig(**settings)
    )
    modules = [module for module in model.modules() if hasattr(module, "lora_A")]
    assert len(modules) == targets
    assert {as_linear(module).scale for module in modules} == {scale}
    assert {len(as_linear(module).a_rD) for module in modules} == {settings["rank"]}


@pytest.mark.parametrize(
    "change, named, fix",
    [
        ({"peft_type": "IA3"}, ["adapter.path", "peft_type=IA3"], "peft_type=LORA"),
        ({"target_modules": ".*proj"}, ["adapter.path", "target_modules=.*proj"], "list of names"),
        ({"r": 7}, ["adapter.rank=16", "7", "adapter.path"], "leave it out"),
        ({"use_dora": True}, ["use_dora=True", "gradients need"], "use_dora=False"),
        (
            {"init_lora_weights": "pissa"},
            ["adapter.path", "init_lora_weights=pissa"],
            "init_lora_weights=True",
        ),
    ],
)
def test_unsupported_stored_adapters_are_refused(tmp_path, change, named, fix):
    base = save_base(tmp_path / "base", False)
    folder = save_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))

    def build():
        given = {"rank": AdapterConfig.rank} if "r" in change else {}
        config = adopt_adapter(parse_config({"adapter": {"path": folder, **given}}))
        build_model(base, make_mesh(1), adapter=config.adapter)

    assert_refused(build, *named, fix=fix)
