"""`ithaka verify` passes correct models, and detects and names each kind of error."""

import copy
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from decoders import DELTA, HYBRIDS, RECURRENT, tiny_decoder
from ithaka import cli
from ithaka.attention.docs import Docs
from ithaka.checks import verify
from ithaka.comm.mesh import make_mesh
from ithaka.config import AdapterConfig, parse_config
from ithaka.exits import ExitCode
from ithaka.facts.attention import AttentionKind
from ithaka.facts.sizes import IGNORE_INDEX
from ithaka.inputs import shard
from ithaka.layout import ActivationPolicy
from ithaka.mixers import softmax
from ithaka.plan.mixers import AttentionCost
from ithaka.roots import decoder
from models import CONSTRUCTING, tiny_config, tiny_model
from refusals import assert_command_refused, assert_refused
from runs import MODEL
from threads import run_on_threads

LORA = AdapterConfig(rank=2, targets=("31.self_attn.q_proj", "down_proj"))


LOADED = cache(verify.load_truncated_model)


@pytest.fixture(autouse=True)
def loads_once(monkeypatch):
    """Load each model once, for all threads and tests: transformers cannot load two at the same
    time."""

    def load(*args):
        with CONSTRUCTING:
            return copy.deepcopy(LOADED(*args))

    monkeypatch.setattr(verify, "load_truncated_model", load)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that saves a model with more layers and tokens than are checked, and
    returns its directory."""

    def save(family: str, heads: int = 4, kv_heads: int = 2, **changes) -> Path:
        folder = tmp_path_factory.mktemp(family)
        sizes = {"vocab_size": 1100, "num_hidden_layers": 4, **changes}
        if family in HYBRIDS | RECURRENT:
            # Freshly initialized weights make the gradients of decays small.
            model = AutoModelForCausalLM.from_config(
                tiny_decoder(family, torch.float32, **sizes).config
            )
        else:
            model = tiny_model(tiny_config(family, heads, kv_heads, **sizes), torch.float32)
        model.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="module")
def llama(saved):
    return saved("llama")


@pytest.fixture(scope="module")
def cut_llama(llama, tmp_path_factory):
    verify.write_truncated_model(llama, folder := tmp_path_factory.mktemp("cut"))
    return folder


def checks_of(folder: Path, cp: int, adapter: AdapterConfig | None = None) -> dict[str, dict]:
    layout = verify.layout_to_verify(None, cp, verify.read_hf_config(folder).num_attention_heads)
    ranks = run_on_threads(
        cp, lambda: list(verify.run_checks(folder, make_mesh(cp), layout, adapter))
    )
    return {check["part"]: check for check in ranks[0]}


HYBRID = {
    **DELTA,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
HYBRID["first_k_dense_replace"] = None
CASES = [
    ("llama", 4, 2, 3, None, {}),  # uneven heads, kv heads fewer than ranks, tied
    pytest.param(
        *(
            "llama",
            4,
            4,
            1,
            None,
            {"tie_word_embeddings": False, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        ),
        marks=pytest.mark.slow,
    ),
    pytest.param("mistral", 4, 2, 1, None, {"sliding_window": 4096}, marks=pytest.mark.slow),
    pytest.param(
        "qwen2", 4, 2, 1, None, {"max_window_layers": 3}, marks=pytest.mark.slow
    ),  # the last layer alone has a window
    pytest.param("qwen3", 4, 1, 2, LORA, {}, marks=pytest.mark.slow),
    pytest.param("qwen3_5_text", 4, 2, 2, None, HYBRID, marks=pytest.mark.slow),
    pytest.param("bamba", 4, 2, 2, None, {"attn_layer_indices": [2]}, marks=pytest.mark.slow),
    pytest.param("falcon_h1", 4, 2, 1, None, {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("family,heads,kv_heads,cp,adapter,changes", CASES)
def test_correct_models_pass(saved, tmp_path, family, heads, kv_heads, cp, adapter, changes):
    verify.write_truncated_model(saved(family, heads, kv_heads, **changes), tmp_path)
    checks = checks_of(tmp_path, cp, adapter)
    assert not [check for check in checks.values() if not check["ok"]]
    parts = {
        "logits",
        "loss",
        "gradients",
        "head pairing",
        "uneven lengths",
        "padding",
        "documents",
    }
    parts |= {"document isolation, bitwise", "rope", "exact positions"}
    parts |= ({"labels at shard boundaries"} if cp > 1 else set()) | (
        {"adapter"} if adapter else set()
    )
    assert parts == set(checks)
    errors = {part: check["error"] for part, check in checks.items() if check["allowed"]}
    assert max(errors.values()) < 1e-5 and errors["gradients"] > 0, errors
    cut = json.loads((tmp_path / "config.json").read_text())
    assert (cut["num_hidden_layers"], cut["vocab_size"]) == (2, 1024)
    if family == "qwen2":
        assert cut["layer_types"] == ["full_attention", "sliding_attention"]
    if family == "qwen3_5_text":
        assert cut["layer_types"] == ["linear_attention", "full_attention"]


@pytest.mark.slow
def test_layers_without_attention_are_compared(tmp_path):
    """Nemotron-H's configuration does not store the number of layers, and its files have other
    prefixes."""
    kinds = ["mamba", "moe", "mamba", "attention", "mlp", "moe"]
    model = tiny_decoder(
        "nemotron_h", torch.float32, layers_block_type=kinds, num_hidden_layers=6, vocab_size=1100
    )
    model.save_pretrained(tmp_path / "model")
    *_, layers = verify.write_truncated_model(tmp_path / "model", tmp_path / "cut")
    assert layers == [0, 1, 3, 4]
    layout = verify.layout_to_verify(None, 2, 8, len(layers))
    checks = run_on_threads(
        2, lambda: list(verify.run_checks(tmp_path / "cut", make_mesh(2), layout, None))
    )[0]
    assert not [check for check in checks if not check["ok"]]


@pytest.mark.parametrize("runs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_layer_of_each_kind_is_compared_and_named(tmp_path, monkeypatch, runs):
    """Covers a dense layer with a window, experts with a window and experts with full attention,
    with their weights. The output has the model's layer indices, although the compared model has
    three layers."""
    model = tiny_decoder(
        "afmoe", torch.float32, num_hidden_layers=6, num_dense_layers=2, layer_types=None
    )
    model.save_pretrained(tmp_path / "model")
    weights_from, _, layers = verify.write_truncated_model(tmp_path / "model", tmp_path / "cut")
    assert (weights_from, layers) == ("its own", [0, 2, 3])
    cut = verify.load_truncated_model(tmp_path / "cut", None).state_dict()
    weights = model.state_dict()
    for name, weight in cut.items():
        index, _, rest = name.removeprefix("model.layers.").partition(".")
        source = f"model.layers.{[0, 2, 3][int(index)]}.{rest}" if index.isdecimal() else name
        assert torch.equal(weight, weights[source].double()), name
    layout = verify.layout_to_verify(None, 1, model.config.num_attention_heads, 3)
    if not runs:  # test_measured_shapes.py measures models, which takes seconds here
        mixers = [
            AttentionCost(AttentionKind(16, window=window)) for window in (5, 5, 5, None, 5, 5)
        ]
        shape = SimpleNamespace(heads=8, mixers=mixers, family="afmoe")
        monkeypatch.setattr(verify, "read_shape", lambda path: shape)
    checks = list(verify.run_checks(tmp_path / "cut", make_mesh(1), layout, None)) if runs else []
    assert not [check for check in checks if not check["ok"]]
    parameters = (
        "layers.1.self_attn.q_proj.weight",
        "heads of layers.2.self_attn.k_proj.weight",
        "norm.weight",
    )
    checks = [verify.make_check("gradients", name, 0.0) for name in parameters]
    monkeypatch.setattr(
        verify,
        "_verify_rank",
        lambda folder, *_: (folder / "checks.json").write_text(json.dumps(checks)) and 0,
    )
    (tmp_path / "run.yaml").write_text(f"model: {{path: {tmp_path / 'model'}}}\n")
    answer = CliRunner().invoke(cli.app, ["verify", str(tmp_path / "run.yaml"), "--cp", "1"])
    header, *lines = answer.stdout.splitlines()
    assert header.endswith("layers compared: 0, 2, 3")
    dense = "0: window of 5 (2"
    windowed = "2: window of 5, experts (3"
    full = "3: full attention, experts (1"
    assert lines[:3] == [f"layer {kind} of 6 layers)" for kind in (dense, windowed, full)]
    named = [line.split("  ")[-1] for line in lines[4:7]]
    assert named == [name.replace(".2.", ".3.").replace(".1.", ".2.") for name in parameters]


# ---- injected errors


def pair_wrong_heads(patch):
    def table(*args):
        made = head_table(*args)
        kv_heads = (
            max(head for sent in made.kv_transfers for heads in sent.kv_heads for head in heads) + 1
        )
        swapped = tuple(
            replace(
                sent,
                kv_heads=tuple(tuple(kv_heads - 1 - g for g in heads) for heads in sent.kv_heads),
            )
            for sent in made.kv_transfers
        )
        return replace(made, kv_transfers=swapped)

    def make_layer(self, *args):
        with pytest.MonkeyPatch.context() as during:  # the probe's layers stay correct
            during.setattr(softmax, "head_table", table)
            return make(self, *args)

    head_table = softmax.head_table
    make = decoder.Decoder.make_layer
    patch.setattr(decoder.Decoder, "make_layer", make_layer)


def change_share(patch, change):
    def shard_batch(inputs, vocab_size, mesh, packed):
        return change(shard.shard_batch(inputs, vocab_size, mesh, packed), inputs, mesh)

    patch.setattr(decoder, "shard_batch", shard_batch)


def shift_after_sharding(patch):
    def change(share, inputs, mesh):
        if share.labels_s is None:
            return share
        labels_s = shard._select_own(inputs["labels"], mesh, share.docs.sharding, IGNORE_INDEX)
        return replace(share, labels_s=F.pad(labels_s[1:], (0, 1), value=IGNORE_INDEX))

    change_share(patch, change)


def leak_document(patch):
    def change(share, inputs, mesh):
        starts = share.docs.starts
        return replace(share, docs=Docs((*starts[:2], *starts[3:]))) if len(starts) > 4 else share

    change_share(patch, change)


def halve_gradient(patch):
    patch.setattr(
        decoder.GlobalSum, "backward", staticmethod(lambda ctx, dtotal: (dtotal / 2, None))
    )


def skip_norm(patch):
    def make_layer(self, index, *args):
        layer = make(self, index, *args)
        norm = self.layers[index].input_layernorm
        if index == 1:
            norm.forward = lambda x: x
            for skipped in layer.passes.skipped:  # they restore forwards after a resume pass
                skipped.forward = norm.forward if skipped.module is norm else skipped.forward
        return layer

    make = decoder.Decoder.make_layer
    patch.setattr(decoder.Decoder, "make_layer", make_layer)


INJECTED = [
    (pair_wrong_heads, {"logits", "gradients", "head pairing"}, {"document isolation, bitwise"}),
    pytest.param(
        shift_after_sharding,
        {"labels at shard boundaries"},
        {"logits", "rope"},
        marks=pytest.mark.slow,
    ),
    (
        leak_document,
        {"documents", "document isolation, bitwise"},
        {"logits", "loss", "gradients", "rope"},
    ),
    pytest.param(
        halve_gradient, {"gradients"}, {"logits", "loss", "head pairing"}, marks=pytest.mark.slow
    ),
    pytest.param(
        skip_norm, {"logits", "gradients"}, {"document isolation, bitwise"}, marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("inject,failing,passing", INJECTED)
def test_errors_are_found_and_named(cut_llama, monkeypatch, inject, failing, passing):
    inject(monkeypatch)
    checks = checks_of(cut_llama, 2 if inject is shift_after_sharding else 1)
    failed = {part for part, check in checks.items() if not check["ok"]}
    assert failing <= failed and not passing & failed
    if inject is skip_norm:
        assert checks["gradients"]["where"] == "layers.1.input_layernorm.weight"


# ---- the command


def test_verify_prints_margins_and_exits_with_1_on_a_mismatch(llama, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    settings = tmp_path / "long.yaml"
    lora = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["down_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(lora))
    parts = f"model: {{path: {llama}}}", f"adapter: {{path: {tmp_path}}}", "data: {context: 512}"
    more = "parallel: {cp: 8, heads_per_stage: 8}", "memory: {stored_dtype: float8}"
    settings.write_text("\n".join([*parts, *more]))
    answer = CliRunner().invoke(cli.app, ["verify", str(settings), "--cp", "1", "--json"])
    result = json.loads(answer.stdout)
    assert (
        answer.exit_code == 0
        and result["ok"]
        and (result["cp"], result["weights"]) == (1, "its own")
    )
    *_, adapter, bf16, float8 = result["checks"]
    assert "down_proj.lora_" in adapter["where"], "the adapter's own targets"
    assert (bf16["part"], float8["part"]) == ("bf16, stored in bf16", "bf16, stored in float8")
    assert 1e-3 < bf16["error"] < float8["error"] < 0.5 and bf16["where"] == "median of 4 gradients"
    halve_gradient(monkeypatch)
    settings.write_text("\n".join(parts[::2]))
    answer = CliRunner().invoke(cli.app, ["verify", str(settings), "--cp", "1"])
    assert answer.exit_code == ExitCode.FAILED
    assert "FAILED: gradients" in answer.stdout and "failed: gradients" in answer.stdout


def test_the_layout_comes_from_the_configuration():
    tree = {
        "parallel": {"cp": 8, "ring": 4, "heads_per_stage": 16},
        "memory": {"offload": "disk", "keep_attention": "all"},
    }
    layout = verify.layout_to_verify(
        parse_config({**tree, "attention": {"kernel": "cudnn"}}), cp=2, heads=32
    )
    assert layout.kernel == "auto", "a GPU's kernels have no float64"
    assert (layout.cp, layout.ring, layout.heads_per_stage, layout.tile_tokens) == (2, 2, 4, 16)
    assert layout.layer_policies(2) == (ActivationPolicy("disk", "disk"),) * 2


def test_models_that_cannot_be_verified_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "run_ranks", lambda *_: pytest.fail("ranks were started"))
    assert_refused(
        lambda: verify.verify(MODEL, None, 9), "--cp=9", "4 query heads", fix="at most 4"
    )
    many = {
        **MODEL,
        "num_attention_heads": 512,
        "num_key_value_heads": 512,
        "hidden_size": 512,
        "head_dim": 2,
    }
    assert_refused(lambda: verify.verify(many, None, 512), "--cp=512", "cores", fix="torchrun")
    (tmp_path / "long.yaml").write_text(f"model: {{path: {tmp_path}}}\n")
    assert_command_refused(
        ["verify", str(tmp_path / "long.yaml")], "config.json", fix="a model directory"
    )
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refusal = assert_refused(
        lambda: verify.verify(tmp_path), "MODEL=", "pytorch_model.bin", fix="config.json"
    )
    assert "train" not in refusal.replace(str(tmp_path), "")


class TwoWeights(nn.Module):
    """Its loss depends on the second weight, or not."""

    def __init__(self, uses_second: bool) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(2, 2))
        self.second = nn.Parameter(torch.ones(2, 2))
        self.uses_second = uses_second

    def forward(self, input_ids, labels) -> SimpleNamespace:
        return SimpleNamespace(
            loss=self.first.sum() + (self.second.sum() if self.uses_second else 4.0)
        )


def test_a_missing_gradient_fails_though_the_loss_is_right(monkeypatch):
    # of one rank
    monkeypatch.setattr(torch.Tensor, "full_tensor", lambda tensor: tensor, raising=False)
    pair = verify.ModelPair.__new__(verify.ModelPair)
    pair.model = TwoWeights(False)
    pair.plain = TwoWeights(True)
    pair.head_dim = None
    ids = torch.zeros(1, 2, dtype=torch.long)
    errors = pair.compare_losses(ids, ids, lambda plain: plain(ids, ids).loss)
    assert errors == {"loss": 0.0, "first": 0.0, "second": verify.INVALID_ERROR}
