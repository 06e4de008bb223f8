"""Decoders of many types: loss, logits and every gradient equal plain transformers, in fp64
throughout."""

import copy
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ithaka
from decoders import DECODERS, tiny_decoder
from general import add_lora, assert_equal, compare, fp64_tiles, gradient_errors, mean_loss
from ithaka.attention.docs import Docs
from ithaka.checks.verify import InFloat64
from ithaka.comm.loopback import LoopbackGroup
from ithaka.comm.mesh import make_mesh
from ithaka.layer.inputs import CallState, CurrentCall
from ithaka.layer.mixer import LayerSpec
from ithaka.layer.passes import LayerPasses
from ithaka.layer.schedule import LayerSchedule
from ithaka.layer.store import Store
from ithaka.layout import ActivationPolicy, Layout
from ithaka.model.build import parallelize_model
from parity import plain_sum, random_ids, relative
from threads import run_on_threads

pytestmark = pytest.mark.usefixtures("quiet_transformers")

PACKAGE = Path(ithaka.__file__).parent
ALL = 99  # layers
HOST = {"input_tier": "host", "keep_attention": ALL, "attention_tier": "host"}
DOCUMENTS = (7, 1, 9, 4)  # on 2 and 4 ranks they end in the middle of shards


def documents(*names: str):
    """Packed documents, and the loss of plain transformers on each document alone."""
    ids = random_ids(1, sum(DOCUMENTS))
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
    numbers = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))[None]
    labels = ids.masked_fill(positions == 0, -100)

    def sum_of_losses(plain):
        parts = [part for part in ids.split(DOCUMENTS, dim=1) if part.shape[1] > 1]
        return sum(plain_sum(plain, part, part) for part in parts) / (labels[:, 1:] != -100).sum()

    optional = {"document_ids": numbers, "position_ids": positions}
    return {"input_ids": ids, "labels": labels, "plain_loss": sum_of_losses} | {
        name: optional[name] for name in names
    }


def padding():
    """Two rows, the second of which is padded at its end."""
    ids = random_ids(2, 19)
    mask = torch.ones(2, 19, dtype=torch.long)
    mask[1, 12:] = 0
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


STAGES = {"heads_per_stage": 4, "tile_tokens": 5}
CASES = {  # family, changes to its configuration, layout, inputs
    "sinks in a ring, in stages, of documents": (
        "gpt_oss",
        {"num_hidden_layers": 2},
        Layout(4, ring=2, heads_per_stage=4, tile_tokens=4),
        documents("document_ids"),
    ),
    "sinks, a stage without heads on one rank": (
        "gpt_oss",
        {"num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 1},
        Layout(2, heads_per_stage=2, tile_tokens=7),
        {},
    ),
    "softcap of scores and logits, everything kept": (
        "gemma2",
        {"num_hidden_layers": 2},
        Layout(2, keep_everything=2, **STAGES),
        {},
    ),
    "two rope bases, on the host": ("gemma3_text", {}, Layout(2, **HOST, **STAGES), {}),
    "two rope bases, documents in positions": (
        "gemma3_text",
        {},
        Layout(2),
        documents("position_ids"),
    ),
    "narrow v, experts after a dense layer": (
        "deepseek_v3",
        {"num_hidden_layers": 2},
        Layout(2, keep_projections=2, keep_everything=1, **STAGES),
        {},
    ),
    "partial rotary, padding": (
        "glm4",
        {"num_hidden_layers": 2},
        Layout(keep_attention=2, keep_projections=1, tile_tokens=5),
        padding(),
    ),
    "a layer without rope": ("smollm3", {}, Layout(4, heads_per_stage=4, tile_tokens=4), {}),
    "multipliers around the layers, in a ring": (
        "granite",
        {"num_hidden_layers": 2},
        Layout(2, ring=2, tile_tokens=7),
        {},
    ),
    "hidden states scaled before the head": (
        "minicpm3",
        {"num_hidden_layers": 2, "num_key_value_heads": 8},
        Layout(2, tile_tokens=5),
        {},
    ),
    "one norm before and after the layers": (
        "nanochat",
        {"num_hidden_layers": 2},
        Layout(2, tile_tokens=5),
        {},
    ),
    "experts, padding on two ranks": (
        "qwen2_moe",
        {"num_hidden_layers": 2},
        Layout(2, **STAGES),
        padding(),
    ),
    "experts, both kinds of document inputs": (
        "ernie4_5_moe",
        {"num_hidden_layers": 2},
        Layout(2, ring=2),
        documents("document_ids", "position_ids"),
    ),
    "head dims by kind of layer": (
        "gemma4_text",
        {
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "global_head_dim": 32,
        }
        | {"vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8},
        Layout(2, **STAGES),
        {},
    ),
    "parallel attention and MLP, windows": ("cohere2", {}, Layout(), {}),
    "biases, tied embeddings": ("starcoder2", {"num_hidden_layers": 2}, Layout(4), {}),
    "chunks, complex rotations": (
        "llama4_text",
        {
            "attention_chunk_size": 7,
            "attn_temperature_tuning": False,
            "num_hidden_layers": 2,
            "no_rope_layers": [1, 0],
        }
        | {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 40},
        Layout(2, tile_tokens=5),
        {},
    ),
    "data parallel": ("exaone4", {}, Layout(2, tile_tokens=7), {"dp": 2}),
}


SLOW = (
    "biases, tied embeddings",
    "hidden states scaled before the head",
    "sinks, a stage without heads on one rank",
    "chunks, complex rotations",  # test_prefixes_are_exact.py has them
    "data parallel",
    "experts, padding on two ranks",
    "two rope bases, documents in positions",
    "experts, both kinds of document inputs",
    "one norm before and after the layers",
    "a layer without rope",
    "two rope bases, on the host",
)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES]
)
def test_equals_plain_transformers(case):
    family, changes, layout, inputs = CASES[case]
    compares_logits = "plain_loss" not in inputs and "attention_mask" not in inputs
    assert_equal(compare(tiny_decoder(family, **changes), layout, logits=compares_logits, **inputs))


def test_layer_norms_run_in_bfloat16_on_a_cpu():
    """Autocast widens their weights on a GPU only."""
    plain = tiny_decoder("starcoder2", num_hidden_layers=1).float()
    ids = random_ids(1, 6)
    expected = float(plain(input_ids=ids, labels=ids).loss.detach())
    loss = ithaka.parallelize(plain, dtype="bfloat16")(input_ids=ids, labels=ids).loss
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected, rel=0.02)


def test_a_configuration_needs_no_number_of_kv_heads():
    plain = tiny_decoder("persimmon", num_hidden_layers=2, head_dim=4)
    del plain.config.num_key_value_heads  # transformers does not define it for this family
    assert_equal(compare(plain, Layout(2, tile_tokens=5)))


LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {  # family, layout, PEFT's settings
    "every linear map": (
        "olmo2",
        Layout(2, tile_tokens=5, heads_per_stage=4),
        {"target_modules": [*LINEARS, "lm_head"]},
    ),
    "fused projections": (
        "phi3",
        Layout(),
        {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]},
    ),
    "a norm and the head": (
        "olmo2",
        Layout(2, ring=2),
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "q_norm"]},
    ),
    "everything kept": (
        "glm4",
        Layout(2, keep_everything=2, tile_tokens=5),
        {"target_modules": ["v_proj", "o_proj", "down_proj"], "use_rslora": True},
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=[pytest.mark.slow] * (case in ("everything kept", "fused projections"))
        )
        for case in ADAPTERS
    ],
)
def test_adapters_equal_peft(case):
    family, layout, settings = ADAPTERS[case]
    plain = add_lora(tiny_decoder(family, num_hidden_layers=2), **settings)
    errors = compare(plain, layout)
    assert_equal(errors)
    trained = sum(param.requires_grad for param in plain.parameters())
    assert all(len(rank_errors) == 1 + trained for rank_errors in errors)


FROZEN = {
    "all but attention": lambda name: "self_attn" not in name,
    "attention": lambda name: "self_attn" in name,
    "the layers": lambda name: "layers" in name,
    "everything below the last layer": lambda name: (
        "layers.1" not in name and "lm_head" not in name
    ),
    "sinks and norms": lambda name: "sinks" in name or "norm" in name,
}


@pytest.mark.parametrize(
    "names,keep_everything",
    [
        (["all but attention", "sinks and norms"], 0),
        pytest.param(
            ["attention", "everything below the last layer"],
            2,
            marks=pytest.mark.slow,
        ),
        pytest.param(FROZEN, 0, marks=pytest.mark.slow),
        pytest.param(FROZEN, 2, marks=pytest.mark.slow),
    ],
    ids=["recomputed", "kept", "all recomputed", "all kept"],
)
def test_frozen_parameters_have_no_gradient(names, keep_everything):
    for frozen in map(FROZEN.get, names):
        plain = tiny_decoder("gpt_oss", num_hidden_layers=2)
        for name, param in plain.named_parameters():
            param.requires_grad_(not frozen(name))
        layout = Layout(tile_tokens=7, keep_everything=keep_everything)
        assert_equal(compare(plain, layout, tokens=13))


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_fp32_parts_of_a_family_round_as_in_transformers(family):
    """Without `InFloat64`, norms and softmaxes round to fp32 in both models."""
    changes = {"num_hidden_layers": 2}
    assert_equal(
        compare(tiny_decoder(family, **changes), Layout(2, **STAGES), wide=False), tolerance=1e-6
    )


def on_two_ranks(family, function, **changes):
    """Call function(model) on each rank with a parallel copy, and function(plain) with the plain
    model."""
    plain = tiny_decoder(family, num_hidden_layers=2, **changes)
    models = [copy.deepcopy(plain) for _ in range(2)]
    with InFloat64():
        expected = function(plain)

    def work():
        mesh = make_mesh(2)
        model = parallelize_model(
            models[mesh.rank], mesh=mesh, layout=Layout(2, heads_per_stage=4, tile_tokens=5)
        )
        with InFloat64():
            got = function(model)
        return {"result": relative(got.detach(), expected.detach())} | gradient_errors(model, plain)

    with fp64_tiles():
        return run_on_threads(2, work)


def test_token_logprobs_are_differentiable():
    """gemma2: the logits are capped after the head."""
    ids = random_ids(2, 19)

    def weighted(model):
        if hasattr(model, "ithaka_mesh"):
            logprobs, entropies, *_ = ithaka.token_logprobs(model, ids, ids)
        else:
            log_p = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
            logprobs = F.pad(log_p.gather(-1, ids[:, 1:, None])[..., 0], (1, 0))
            entropies = F.pad(-(log_p.exp() * log_p).sum(-1), (1, 0))
        weights = torch.linspace(-1, 2, ids.numel(), dtype=torch.float64).view_as(ids)
        (weights * logprobs + entropies.square()).sum().backward()
        return torch.stack([logprobs, entropies])

    assert_equal(on_two_ranks("gemma2", weighted))


def test_logits_are_differentiable():
    """granite: the logits are scaled after the head."""
    ids = random_ids(1, 19)

    def squared(model):
        logits = model(input_ids=ids).logits
        logits.square().sum().backward()
        return logits

    assert_equal(on_two_ranks("granite", squared))


class HostTensorRecorder(TorchDispatchMode):
    """Record calls of torch.tensor in layers. On a GPU, each would copy from the host and wait for
    the GPU."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.lift_fresh.default:
            stack = (
                (Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_stack(None)
            )
            file, line = next((file, line) for file, line in stack if file.is_relative_to(PACKAGE))
            if file.parent.name in ("layer", "blocks", "mixers"):  # not the exchanges
                self.lines.append(f"{file.name}:{line}")
        return function(*args, **(kwargs or {}))


def test_a_layer_makes_its_indices_once():
    """Later calls reuse them, also with sinks and with several stages and tiles."""
    ids = random_ids(1, 20)

    def work():
        mesh = make_mesh(2)
        model = tiny_decoder("gpt_oss", num_hidden_layers=1)
        parallelize_model(model, mesh=mesh, layout=Layout(2, heads_per_stage=4, tile_tokens=5))
        lines = []
        for _ in range(2):
            with HostTensorRecorder() as recorder:
                model(input_ids=ids, labels=ids).loss.backward()
            lines.append(recorder.lines)
        return lines

    for first, second in run_on_threads(2, work):
        assert first and not second


class FullSelectCounter(TorchDispatchMode):
    """Count backwards of `x[0]`, which copy all of x; the backward of a view copies nothing."""

    num_calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_calls += function is torch.ops.aten.select_backward.default and args[1][0] == 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_5_text",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("olmo2", "granite")),
    ],
)
def test_backward_copies_nothing_to_drop_a_batch_dim(family):
    """In attention, the delta rule, and a head that is not linear."""
    ids = random_ids(1, 20)
    model = parallelize_model(
        tiny_decoder(family, torch.float32, num_hidden_layers=3), layout=Layout(tile_tokens=7)
    )
    loss = model(input_ids=ids, labels=ids).loss
    with FullSelectCounter() as counter:
        loss.backward()
    assert counter.num_calls == 0


def test_layers_in_bf16_share_exact_angles(monkeypatch):
    """FSDP2 would cast them to bf16 in every layer, and each layer would keep its copy for
    backward."""
    kinds = ["sliding_attention", "full_attention"] * 4
    first = 1_000_000
    sizes = {"num_hidden_layers": 8, "layer_types": kinds, "max_position_embeddings": 2**20}
    plain = tiny_decoder("gemma3_text", torch.float32, **sizes)
    model = parallelize_model(plain, layout=Layout(dtype="bfloat16"))
    tables = []
    find_call = LayerPasses.find_call

    def record_angles(runs, x, arguments, mixer):
        tables.extend(
            t for t in arguments.leaves if isinstance(t, torch.Tensor) and t.is_floating_point()
        )
        call = find_call(runs, x, arguments, mixer)
        assert {t.dtype for t in (x, call.q_HtK, call.k_GtK, call.v_GtV)} == {torch.bfloat16}
        return call

    monkeypatch.setattr(LayerPasses, "find_call", record_angles)
    positions = torch.arange(first, first + 20)[None]
    model(input_ids=random_ids(1, 20), labels=random_ids(1, 20), position_ids=positions)
    assert len(tables) == 2 * 8
    # two kinds of layers have one table each
    angles = {t.untyped_storage().data_ptr(): t for t in tables}
    assert len(angles) == 4
    frequencies = [
        getattr(model.model.rotary_emb, f"{kind}_inv_freq").double() for kind in kinds[:2]
    ]
    exact = [positions[0, :, None] * frequencies_k for frequencies_k in frequencies]
    for cos_or_sin, expected in zip(
        angles.values(), (f() for t in exact for f in (t.cos, t.sin)), strict=True
    ):
        torch.testing.assert_close(cos_or_sin[0, :, :8].double(), expected, rtol=0, atol=1e-7)


class TokenWise(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x, scale):
        return x + torch.tanh(self.linear(x)) * scale


@pytest.mark.parametrize(
    "policy",
    [ActivationPolicy(), ActivationPolicy("device", "device", True, True)],
    ids=["recomputed", "kept"],
)
def test_a_layer_without_a_mixer_runs_tile_by_tile(policy):
    layer = TokenWise()
    current = CurrentCall()
    groups = (LoopbackGroup(0, 1), LoopbackGroup(0, 1))
    spec = LayerSpec(token_dims=(1,))
    layout = Layout(tile_tokens=4)
    schedule = LayerSchedule(
        "layer", layer, spec, *groups, Store(), layout, policy, current=current
    )
    x, scale, dy = (
        torch.randn(1, 11, 6, dtype=torch.float64, requires_grad=True) for _ in range(3)
    )
    inputs = [x, scale, *layer.parameters()]
    with current.running(CallState(Docs((0, 11)))):
        ours = schedule(x, scale)
    for got, expected in zip(
        (ours, *torch.autograd.grad(ours, inputs, dy)),
        ((y := layer(x, scale)), *torch.autograd.grad(y, inputs, dy)),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_evaluation_keeps_no_graph():
    ids = random_ids(2, 19)

    def evaluate(model):
        model.eval()
        with torch.no_grad():
            if not hasattr(model, "ithaka_mesh"):
                return mean_loss(model, ids, ids)
            loss = model(input_ids=ids, labels=ids).loss
        assert not loss.requires_grad
        return loss

    assert_equal(on_two_ranks("gpt_oss", evaluate))


LAYOUTS = {
    "one rank": Layout(),
    "two ranks": Layout(2, heads_per_stage=4, tile_tokens=5),
    "four ranks": Layout(4, tile_tokens=4),
    "ring": Layout(4, ring=2, heads_per_stage=4, tile_tokens=4),
}
INPUTS = {
    "plain": dict,
    "documents": lambda: documents("document_ids"),
    "positions": lambda: documents("position_ids"),
    "padding": padding,
}


@pytest.mark.slow
@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inputs", INPUTS)
def test_every_family_and_layout(family, layout, inputs):
    plain = tiny_decoder(family)
    assert_equal(compare(plain, LAYOUTS[layout], **INPUTS[inputs]()))


@pytest.mark.slow
@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize(
    "keeps",
    [HOST, {"keep_attention": ALL}, {"keep_projections": ALL}, {"keep_everything": ALL}],
    ids=["host", "attention", "projections", "everything"],
)
def test_every_family_and_policy(family, keeps):
    plain = tiny_decoder(family)
    assert_equal(compare(plain, Layout(2, heads_per_stage=4, tile_tokens=5, **keeps)))


@pytest.mark.slow
@pytest.mark.parametrize("family", DECODERS)
def test_every_family_with_adapters(family):
    """Adapt only attention: for some mixtures, PEFT replaces other targets by
    `target_parameters`."""
    plain = tiny_decoder(family)
    linears = [
        name
        for name, module in plain.named_modules()
        if type(module) is nn.Linear and "self_attn" in name
    ]
    plain = add_lora(plain, target_modules=linears)
    assert_equal(compare(plain, Layout(2, heads_per_stage=4, tile_tokens=5)))
