"""The schedule runs a layer's forward several times per call, without visible side effects."""

import contextlib
import copy
import gc
import weakref
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from decoders import tiny_decoder
from general import assert_equal, compare, fp64_tiles
from grids import diagonal
from ithaka.checks.verify import InFloat64
from ithaka.config import ConfigError
from ithaka.layout import Layout
from ithaka.mixers.attention_call import CapturingMask, _attend
from ithaka.model.build import parallelize_model
from models import CONSTRUCTING
from parity import random_ids, relative
from refusals import assert_refused

pytestmark = pytest.mark.usefixtures("quiet_transformers")

IDS = random_ids(1, 24)
LAYOUTS = {
    "recomputed": Layout(tile_tokens=7),
    "kept": Layout(tile_tokens=7, keep_everything=2),
}
REGISTER = {
    "forward hook": "register_forward_hook",
    "forward pre-hook": "register_forward_pre_hook",
    "backward hook": "register_full_backward_hook",
    "backward pre-hook": "register_full_backward_pre_hook",
}


def make(family: str = "olmo2", **changes):
    return tiny_decoder(family, **{"num_hidden_layers": 2, **changes})


def state_of(model: nn.Module) -> dict:
    """Everything that a run could leave behind in modules and in this thread."""
    modules = {
        name: (
            {k: id(v) for k, v in vars(module).items() if k == "forward"},
            len(module._forward_hooks),
        )
        for name, module in model.named_modules()
    }
    modes = (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_inference_mode_enabled(),
        len(torch.overrides._get_current_function_mode_stack()),
    )
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {
        "modules": modules,
        "modes": modes,
        "buffers": {name: b.tolist() for name, b in buffers.items()},
    }


# ---- hooks


def record(calls, module, *values):
    """Record the tensors that a hook receives: inputs, outputs or gradients."""
    tensors = [value for each in values for value in (each if isinstance(each, tuple) else (each,))]
    calls.append(
        [tensor.detach().clone() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    )


@pytest.mark.parametrize(
    "kind,layout",
    [
        # Each kind with one layout; the others with --slow.
        pytest.param(kind, layout, marks=pytest.mark.slow if (i + j) % 2 else ())
        for i, kind in enumerate(REGISTER)
        for j, layout in enumerate(LAYOUTS)
    ],
)
def test_a_hook_on_a_layer_is_called_once_with_the_values_of_plain_transformers(kind, layout):
    plain = make()
    calls = {"plain": [], "parallel": []}
    model = parallelize_model(copy.deepcopy(plain), layout=LAYOUTS[layout])
    for name, hooked in (("plain", plain), ("parallel", model)):
        getattr(hooked.model.layers[1], REGISTER[kind])(partial(record, calls[name]))
    with InFloat64(), fp64_tiles():
        for hooked in (plain, model):
            out = hooked(input_ids=IDS, use_cache=False).logits
            out.square().sum().backward()
    assert len(calls["plain"]) == len(calls["parallel"]) == 1
    (expected,) = calls["plain"]
    (ours,) = calls["parallel"]
    assert len(expected) == len(ours) > 0
    for a, b in zip(ours, expected, strict=True):
        assert relative(a, b) < 1e-10


INNER = ["self_attn", "self_attn.q_proj", "mlp", "mlp.down_proj", "post_attention_layernorm"]


@pytest.mark.parametrize("kind", REGISTER)
def test_a_hook_inside_or_outside_the_layers_is_refused(kind):
    model = make()
    parallel = parallelize_model(make())
    for name in (
        *(f"model.layers.1.{name}" for name in INNER),
        "model",
        "model.norm",
        "model.rotary_emb",
        "lm_head",
    ):
        for hooked, call in (
            (model, partial(parallelize_model, model)),
            (parallel, partial(parallel, input_ids=IDS)),
        ):
            handle = getattr(hooked.get_submodule(name), REGISTER[kind])(lambda *args: None)
            assert_refused(call, f"{name} has a {kind}", fix="remove the hook")
            handle.remove()


def test_gradient_checkpointing_changes_nothing():
    plain = make()
    plain.gradient_checkpointing_enable({"use_reentrant": False})
    assert_equal(compare(plain, Layout(tile_tokens=7), wide=False), tolerance=1e-6)


def test_a_layer_wrapped_by_the_compiler_is_refused():
    model = make()
    model.model.layers[0] = torch.compile(model.model.layers[0])
    assert_refused(lambda: parallelize_model(model), "layers.0", fix="without patches")


def test_a_layer_compiled_in_place_is_refused():
    model = make()
    model.model.layers[1].compile(backend="eager")
    assert_refused(lambda: parallelize_model(model), "layers.1", fix="compile")


# ---- what runs leave behind


@pytest.mark.parametrize("family, layout", diagonal(["gpt_oss", "gemma2"], LAYOUTS))
def test_a_call_leaves_no_hook_mode_or_patch_behind(family, layout):
    model = parallelize_model(make(family, dtype=torch.float32), layout=LAYOUTS[layout])
    before = state_of(model)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert state_of(model) == before
    with torch.no_grad():
        model(input_ids=IDS)
    assert state_of(model) == before


def test_bf16_leaves_no_autocast_behind():
    layout = Layout(tile_tokens=7, dtype="bfloat16")
    model = parallelize_model(make(dtype=torch.float32), layout=layout)
    before = state_of(model)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert state_of(model) == before and not torch.is_autocast_enabled("cpu")


@pytest.mark.usefixtures("fresh_probes")
def test_building_a_model_leaves_nothing_behind():
    plain = make("gemma3_text")
    generator = torch.get_rng_state()
    names = [name for name, _ in plain.named_parameters()]
    state = state_of(plain)
    values = {name: param.detach().clone() for name, param in plain.named_parameters()}
    model = parallelize_model(plain)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(
        torch.equal(param.full_tensor(), values[name]) for name, param in model.named_parameters()
    )
    assert (
        state_of(model)["modes"] == state["modes"]
        and state_of(model)["buffers"] == state["buffers"]
    )
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_call_draws_no_random_numbers():
    model = parallelize_model(make("qwen2_moe"))
    generator = torch.get_rng_state()
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("fails_in", ["input", "mlp", "backward"])
def test_an_error_inside_a_run_leaves_nothing_behind(fails_in):
    """`mlp` fails after the attention call, while some projections are skipped."""
    model = parallelize_model(make(), layout=Layout(tile_tokens=7))
    model(input_ids=IDS, labels=IDS).loss.backward()
    before = state_of(model)
    layer = model.model.layers[1]
    module = layer.self_attn.q_norm if fails_in == "input" else layer.post_feedforward_layernorm

    class Broken(type(module)):
        def forward(self, x):
            if fails_in != "backward" or torch.is_grad_enabled():
                raise KeyError("broken")
            return super().forward(x)

    original = type(module)
    module.__class__ = Broken
    with pytest.raises(KeyError, match="broken"):
        model(input_ids=IDS, labels=IDS).loss.backward()
    module.__class__ = original
    after = state_of(model)
    assert after["modes"] == before["modes"] and after["modules"] == before["modules"]


# ---- other models in the process


@pytest.mark.usefixtures("fresh_probes")
def test_a_plain_model_of_the_same_configuration_keeps_its_attention():
    first = make("gpt_oss")
    config = first.config
    expected = first(input_ids=IDS).logits
    model = parallelize_model(copy.deepcopy(first))
    shares_config = parallelize_model(_remake(first, config))
    assert config._attn_implementation == "eager"
    assert first.config is config and first.model.layers[0].self_attn.config is config
    assert torch.equal(first(input_ids=IDS).logits, expected)
    assert torch.equal(_remake(first, config)(input_ids=IDS).logits, expected)
    for parallel in (model, shares_config):
        assert relative(parallel(input_ids=IDS).logits, expected) < 1e-6
    assert torch.equal(first(input_ids=IDS).logits, expected)


@pytest.mark.usefixtures("fresh_probes")
def test_a_plain_model_can_share_the_parallel_models_configuration():
    """For example a reference, or a saved model that is loaded again."""
    first = make()
    expected = first(input_ids=IDS).logits
    model = parallelize_model(copy.deepcopy(first))
    assert "ithaka" not in model.config.to_json_string()
    again = _remake(first, copy.deepcopy(model.config))
    assert relative(again(input_ids=IDS).logits, expected) < 1e-6


def _remake(model, config):
    with CONSTRUCTING:
        other = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    other.load_state_dict(model.state_dict())
    return other.train()


def test_two_parallel_models_do_not_disturb_each_other():
    plains = [make("gemma2"), make("gpt_oss")]
    models = [
        parallelize_model(copy.deepcopy(plain), layout=Layout(tile_tokens=7)) for plain in plains
    ]
    with InFloat64(), fp64_tiles():
        losses = [model(input_ids=IDS, labels=IDS).loss for model in models]
        for loss in losses:
            loss.backward()
        for plain, model, loss in zip(plains, models, losses, strict=True):
            assert relative(model(input_ids=IDS).logits, plain(input_ids=IDS).logits) < 1e-10
            assert loss.isfinite()


# ---- dropout


def test_dropout_is_refused():
    assert_refused(
        lambda: parallelize_model(make(attention_dropout=0.1)), "attention_dropout=0.1", fix="0"
    )


JITTER = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.2}


@pytest.mark.parametrize(
    "family, changes", [("starcoder2", {"residual_dropout": 0.2}), ("phimoe", JITTER)]
)
@pytest.mark.parametrize(
    "mode",
    [
        "train",
        "eval",
    ],
)
def test_randomness_without_a_module_of_its_own_is_refused(family, changes, mode):
    """Even in evaluation mode, in which from_pretrained returns models: it may be trained later."""
    model = make(family, **changes).train(mode == "train")
    assert_refused(
        lambda: parallelize_model(model), f"model_type={family} ", "layers.0", fix="use a decoder"
    )


# ---- positions

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [3.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
ROPES = {
    "longrope": (
        "phi3",
        {
            "hidden_size": 128,
            "sliding_window": None,
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 64,
            "rope_parameters": LONGROPE,
        },
    ),
    "dynamic": ("olmo2", {"max_position_embeddings": 16, "rope_parameters": DYNAMIC}),
}


@pytest.mark.parametrize(
    "rope, cp",
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case != ("longrope", 2)))
        for case in product(ROPES, (1, 2))
    ],
)
def test_frequencies_depend_on_the_longest_position_of_all_ranks(rope, cp):
    """The first of two ranks, and the first tile, have only short positions."""
    family, changes = ROPES[rope]
    for tokens in (12, 24, 40):
        plain = make(family, **changes)
        assert_equal(compare(plain, Layout(cp, tile_tokens=5), tokens=tokens))


@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_are_chosen_for_each_call(rope):
    """A long sequence changes a later short one only as far as in plain transformers."""
    family, changes = ROPES[rope]
    plain = make(family, **changes)
    model = parallelize_model(copy.deepcopy(plain), layout=Layout(tile_tokens=5))
    for tokens in (12, 40, 12, 24):
        ids = random_ids(1, tokens)
        with InFloat64(), fp64_tiles(), torch.no_grad():
            assert relative(model(input_ids=ids).logits, plain(input_ids=ids).logits) < 1e-10


@pytest.mark.parametrize(
    "family",
    [
        "gpt_oss",
        "gemma3_text",
        "deepseek_v3",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("olmo2", "glm4", "phi3")),
    ],
)
def test_angles_are_exact_at_ten_million_positions(family):
    model = make(family, dtype=torch.float32)
    rotary = model.model.rotary_emb
    positions = torch.tensor([[0, 1, 4095, 1_000_003, 9_999_991, 10_000_000]])
    kinds = [
        kind
        for kind in ("sliding_attention", "full_attention")
        if hasattr(rotary, f"{kind}_inv_freq")
    ]
    parallelize_model(model)
    for kind in kinds or [None]:
        prefix = f"{kind}_" if kind else ""
        inv_freq = getattr(rotary, f"{prefix}inv_freq").double()
        scale = getattr(rotary, f"{prefix}attention_scaling")
        args = (kind,) if kind else ()
        cos, sin = rotary(torch.zeros(1, 6, 8), positions, *args)
        angles = positions[0, :, None].double() * inv_freq
        for ours, exact in ((cos, angles.cos() * scale), (sin, angles.sin() * scale)):
            columns = (
                exact if ours.shape[-1] == exact.shape[-1] else torch.cat([exact, exact], dim=-1)
            )
            if not torch.allclose(ours[0].double(), columns, atol=1e-6, rtol=0):
                columns = exact.repeat_interleave(2, dim=-1)
            assert torch.allclose(ours[0].double(), columns, atol=1e-6, rtol=0)


def test_the_loss_does_not_depend_on_where_positions_start():
    """Rotations are relative. With angles in fp32, they would be wrong ten million positions from
    the start."""
    model = parallelize_model(make(dtype=torch.float32))
    near = torch.arange(24)[None]
    far = 9_999_000 + torch.arange(24)[None]
    with torch.no_grad():
        losses = [float(model(input_ids=IDS, labels=IDS, position_ids=p).loss) for p in (near, far)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_captured_call_is_freed_without_the_garbage_collector():
    """A reference cycle would keep q, k and v of many tiles."""
    q = torch.zeros(1, 2, 3, 4)
    mask = CapturingMask(torch.float64)
    with contextlib.suppress(BaseException):
        _attend(nn.Identity(), q, q, q, mask)
    assert mask.call is not None
    captured = weakref.ref(mask.call.q_HtK)
    gc.disable()
    try:
        del mask
        assert captured() is None
    finally:
        gc.enable()


def test_a_refused_model_is_not_changed():
    """Neither if the probe refuses it nor if a later check does."""
    for model, options in (
        (make(attention_dropout=0.0), {"layout": Layout(kernel="fa4")}),
        (make(), {"cp": 3}),
    ):
        ids = torch.arange(12)[None]
        before = model(input_ids=ids).logits
        with pytest.raises((ConfigError, ValueError)):
            parallelize_model(model, **options)
        assert torch.equal(model(input_ids=ids).logits, before)
