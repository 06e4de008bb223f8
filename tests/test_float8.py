"""memory.stored_dtype=float8: layer inputs and attention outputs take one byte per element off the
device."""

import json
import math
from dataclasses import replace
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from decoders import DECODERS, DELTA, SIZES
from fake_triton import kernel_modules
from ithaka.blocks import experts
from ithaka.blocks.experts import LayerExperts
from ithaka.comm.mesh import make_mesh
from ithaka.config import ConfigError
from ithaka.facts.dtypes import FLOAT8_BLOCK, float8_bytes
from ithaka.layer.store import Store
from ithaka.layout import ActivationPolicy, Layout, check_float8
from ithaka.model import build
from ithaka.ops import float8
from ithaka.plan.bytes import build_ledger
from ithaka.plan.hardware import parse_gpus
from ithaka.plan.render import render_plan
from ithaka.plan.search import SearchSpace
from ithaka.plan.seconds import step_seconds
from ithaka.plan.shape import StepShape
from ithaka.plan.summary import collect_facts
from ithaka.plan.trace import TraceRequest
from ithaka.run.detect import detect_machine
from ithaka.run.draft import Draft, Request
from ithaka.run.road import Planned, build_run, model_shape
from ithaka.run.validated import input_slabs
from ithaka.trace.shapes import find_shape, shape_from_config
from ithaka.trace.trace_plan import trace_model
from models import CONSTRUCTING, tiny_config, tiny_model
from precision import Batch, bf16_layout, error, our_gradients
from runs import tiny_run, validate
from test_general_precision import BF16_SIZES, INITIALIZER_RANGE, exact_gradients

pytestmark = pytest.mark.usefixtures("quiet_transformers")

# ---- the format


def values_of_e4m3() -> torch.Tensor:
    """Return all finite values in fp64, ascending: 4 exponent bits with a bias of 7, and 3 fraction
    bits."""
    positive = [fraction / 8 * 2.0**-6 for fraction in range(8)]
    positive += [(1 + fraction / 8) * 2.0 ** (e - 7) for e in range(1, 16) for fraction in range(8)]
    assert positive.pop() == 480  # its code is NaN
    return torch.tensor(sorted({-value for value in positive} | set(positive)), dtype=torch.float64)


def round_exactly(x_tD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round cubes to the nearest value of e4m3, in fp64; return their roots in the dtype of x, and
    where fp32 may round to another value, which is almost as near."""
    table = values_of_e4m3()
    roots_tD = torch.zeros_like(x_tD)
    is_tie_tD = torch.zeros_like(x_tD, dtype=torch.bool)
    for row, roots, is_tie in zip(x_tD.double(), roots_tD, is_tie_tD, strict=True):
        for i in range(0, len(row), FLOAT8_BLOCK):
            block = row[i : i + FLOAT8_BLOCK]
            scale = 2.0 ** math.ceil(math.log2(max(float(block.abs().max()), 2.0**-126)))
            cubes = (block / scale) ** 3 * 448
            distances, codes = (cubes[:, None] - table).abs().topk(2, largest=False)
            nearest = [math.cbrt(value / 448) * scale for value in table[codes[:, 0]].tolist()]
            roots[i : i + FLOAT8_BLOCK] = torch.tensor(nearest, dtype=torch.float32).to(x_tD.dtype)
            is_tie[i : i + FLOAT8_BLOCK] = distances[:, 1] - distances[:, 0] < 1e-6 * cubes.abs()
    return roots_tD, is_tie_tD


@pytest.fixture(scope="module")
def numbers():
    """Rows of very different sizes, an odd width, ties, zeros, outliers, and the largest and
    smallest numbers."""
    generator = torch.Generator().manual_seed(0)
    x_tD = torch.randn(23, 300, generator=generator) * torch.exp2(
        torch.arange(23.0)[:, None] * 8 - 90
    )
    x_tD[0] = 0.0
    x_tD[1, :128] = 0.0
    x_tD[2, 5] = 1e4
    x_tD[3, 0] = 8e37
    x_tD[4] = 2.0 ** torch.arange(-12, 13).repeat(12)  # from the largest code to zero
    return x_tD.bfloat16()


def packed(x_tD: torch.Tensor) -> torch.Tensor:
    bytes_ = torch.full((float8_bytes(*x_tD.shape),), 77, dtype=torch.uint8)
    float8.pack(x_tD, bytes_)
    return bytes_


def test_values_round_as_in_fp64(numbers, monkeypatch):
    """Also in several parts, and for some of the rows."""
    (exact, is_tie) = round_exactly(numbers)
    codes = packed(numbers)
    monkeypatch.setattr(float8, "STAGED_BYTES", 5 * 300 + 1)
    assert torch.equal(packed(numbers), codes)
    for rows in (slice(0, 23), slice(7, 20), slice(22, 23)):
        y_tD = torch.empty_like(numbers[rows])
        float8.unpack(codes, len(numbers), rows.start, y_tD)
        assert torch.equal(y_tD[~is_tie[rows]], exact[rows][~is_tie[rows]])
    assert is_tie.float().mean() < 0.01
    x_tD = numbers.double()[6:]
    assert ((exact[6:] - x_tD).norm(dim=1) / x_tD.norm(dim=1)).median() < 0.012  # plain e4m3: 0.026


def test_kernels_compute_the_same_bits(numbers, monkeypatch):
    convert = torch.Tensor.to
    bitcast = lambda x, dtype, bitcast=False: x.view(dtype) if bitcast else convert(x, dtype)  # noqa: E731
    with kernel_modules("float8") as (kernels,):
        names = {
            "max": lambda x, dim: x.amax(dim),
            "maximum": lambda x, least: x.clamp(min=least),
            "abs": torch.abs,
        }
        roots = float8._cube_roots(torch.device("cpu"))
        dtypes = {"int64": torch.int64, "uint8": torch.uint8, "float8e4nv": torch.float8_e4m3fn}
        kernels.tl.__dict__.update(names, **dtypes)
        monkeypatch.setattr(torch.Tensor, "to", bitcast)
        codes_tD, scales_tb = (
            part.clone() for part in float8._split(packed(numbers), *numbers.shape)
        )
        made = torch.zeros_like(codes_tD), torch.zeros_like(scales_tb)
        kernels._launch(kernels._quantize_kernel, numbers, *made)
        assert torch.equal(made[0], codes_tD) and torch.equal(made[1], scales_tb)
        y_tD = torch.empty_like(numbers)
        expected_tD = torch.empty_like(numbers)
        kernels._launch(kernels._dequantize_kernel, y_tD, codes_tD, scales_tb, roots)
        monkeypatch.undo()
        float8.dequantize_float8(expected_tD, codes_tD, scales_tb)
        assert torch.equal(y_tD, expected_tD)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_store_returns_the_rounded_tensor_and_all_its_tiles(tier, tmp_path):
    store = Store(disk_path=tmp_path)
    for shape in ((20, 48), (3, 20, 2, 72), (0, 16), (3, 0, 2, 8)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        rows = x.shape[0] if x.dim() == 2 else x.shape[0] * x.shape[1]
        expected = torch.empty_like(x)
        width = math.prod(shape[-1:] if x.dim() == 2 else shape[2:])
        float8.unpack(packed(x.view(rows, width)), rows, 0, expected.view(rows, width))
        handle = store.keep(x, tier, "float8")
        assert torch.equal(handle.fetch(), x), "forward still reads the tensor"
        assert handle.nbytes == float8_bytes(rows, width)
        handle.release_source()
        assert torch.equal(handle.fetch(), expected)
        slices = [slice(0, 7), slice(7, 20)]
        dim = x.dim() // 2 - 1
        if x.shape[dim] == 20:
            assert torch.equal(torch.cat([*handle.tiles(slices, dim)], dim), expected)
        if x.shape == (20, 48):
            assert torch.equal(torch.cat([*handle.tiles(slices, hold=True)]), expected)
            assert torch.equal(handle.fetch(), expected)
        del handle
        assert (store.pool.busy_bytes, tier) == (0, "host") or tier == "disk"


def run_out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_copy_that_fails_leaves_nothing_in_the_store(tier, tmp_path, monkeypatch):
    """Rounding needs a buffer on the device, which may be out of memory."""
    store = Store(disk_path=tmp_path, host_bytes=float8_bytes(20, 48))
    x = torch.ones(20, 48)
    with monkeypatch.context() as patch:
        patch.setattr(float8, "quantize", run_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            store.keep(x, tier, "float8")
        assert store.pool.busy_bytes == 0
    handle = store.keep(x, tier, "float8")
    handle.release_source()
    assert torch.equal(handle.fetch(), x)


# ---- gradients

FAMILIES = {
    "llama": {},
    "gemma3_text": DECODERS["gemma3_text"],
    "qwen3_moe": {},
    "gpt_oss": {},
    "qwen3_5_text": {**DELTA, "layer_types": ["linear_attention", "full_attention"]},
}


def initial_model(family, **changes):
    sizes = {
        **SIZES,
        **FAMILIES[family],
        **BF16_SIZES,
        "initializer_range": INITIALIZER_RANGE,
        **changes,
    }
    config = AutoConfig.for_model(family, **sizes)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    with CONSTRUCTING:
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        ).train()


SLOW = [(family, attention) for family in FAMILIES for attention in (None, "host")]
SLOW.remove(("qwen3_moe", "host"))


@pytest.mark.parametrize(
    "family, attention",
    [("qwen3_moe", "host"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_gradients_have_at_most_twice_the_error_of_bf16(family, attention):
    """In the median over all parameters, against fp64, on weights with which bf16 is off by a few
    percent. Layers that keep attention store their input unrounded. Without, qwen3_5's recurrence
    has 2.1 times bf16's error."""
    model = initial_model(family)
    batch = Batch(torch.randint(128, (1, 96), generator=torch.Generator().manual_seed(9)))
    exact = exact_gradients(model, batch)
    bf16, rounded = (
        our_gradients(model, batch, 1, replace(layout, stored_dtype=stored))
        for layout in [bf16_layout(2, "host", attention, tile_tokens=40)]
        for stored in (None, "float8")
    )
    errors = {
        name: (error(rounded[name], exact[name]), error(bf16[name], exact[name])) for name in exact
    }
    assert any(a != b for a, b in errors.values())
    print(
        family,
        attention,
        median(b for _, b in errors.values()),
        median(a / b for a, b in errors.values()),
    )
    assert 0.002 < median(b for _, b in errors.values()) < 0.05
    limits = {("qwen3_5_text", None): 2.2}
    default = 2 if attention is None else 1.6
    assert median(a / b for a, b in errors.values()) < limits.get((family, attention), default)


def test_a_softmax_whose_log_sum_exp_is_kept_is_normalized():
    """Keeping attention must not add to the errors of rounding, also where attention is peaked.
    With the log-sum-exp of exact scores and the scores of rounded inputs, errors were 2.5 times
    those of recomputed attention, or more."""
    model = tiny_model(tiny_config("llama", tie_word_embeddings=False), torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 10
    model = build.parallelize_model(model, mesh=make_mesh(1), layout=Layout())
    projections = [f"{name}_proj.weight" for name in "qkv"]

    def gradients(policy, stored_dtype):
        for layer in model.model.layers:
            layer.forward.policy = policy
            layer.forward.layout = replace(layer.forward.layout, stored_dtype=stored_dtype)
        model.zero_grad()
        ids = random_ids(256) % 61
        model(input_ids=ids, labels=ids).loss.backward()
        grads = {name: param.grad.to_local() for name, param in model.named_parameters()}
        return {
            name: grad.clone() for name, grad in grads.items() if name.endswith(tuple(projections))
        }

    exact = gradients(ActivationPolicy(), None)
    kept, recomputed = (
        max(error(grad, exact[name]) for name, grad in gradients(policy, "float8").items())
        for policy in (ActivationPolicy("host", "host"), ActivationPolicy("host"))
    )
    assert 0 < kept < recomputed < 0.5


# ---- experts


def random_ids(num_tokens):
    return torch.randint(128, (1, num_tokens), generator=torch.Generator().manual_seed(5))


def step(layout, family="qwen3_moe", **changes):
    """Return a model in bf16 and its loss on 60 tokens."""
    model = initial_model(family, num_experts_per_tok=2, **changes)
    model = build.parallelize_model(model, mesh=make_mesh(1), layout=layout)
    return model, model(input_ids=random_ids(60), labels=random_ids(60)).loss


def float8_layout(**options):
    tiers = {"input_tier": "host", "keep_attention": 2, "attention_tier": "host"}
    return Layout(tile_tokens=24, dtype="bfloat16", **tiers | options)


def test_backward_repeats_the_experts_of_forward(monkeypatch):
    """Routers that compute from rounded inputs would choose others for some tokens."""
    chosen = []
    num_changed = []
    call = experts.ExpertBlock.__call__
    choose = LayerExperts._choose

    def record(self, x_tD, expert_tk, weight_tk):
        chosen.append(expert_tk.sort(-1).values)
        return call(self, x_tD, expert_tk, weight_tk)

    model, _ = step(float8_layout(stored_dtype="float8"), num_local_experts=16, num_experts=16)
    monkeypatch.setattr(experts.ExpertBlock, "__call__", record)
    for replays in (True, False):
        if not replays:
            monkeypatch.setattr(LayerExperts, "_choose", lambda self, chosen_tk: choose(self, None))
        chosen.clear()
        model(input_ids=random_ids(60), labels=random_ids(60)).loss.backward()
        # three tiles of two layers; backward starts with the last layer
        assert len(chosen) == 2 * 6
        pairs = zip(chosen[3:6] + chosen[:3], chosen[6:], strict=True)
        num_changed.append(sum(int((a != b).any(-1).sum()) for a, b in pairs))
    assert num_changed[0] == 0 < num_changed[1]


def test_experts_whose_choices_are_not_repeated_are_refused(monkeypatch):
    monkeypatch.setattr(experts, "is_expert_module", lambda module: False)
    with pytest.raises(
        ConfigError, match="memory.stored_dtype=float8 needs ithaka's experts.* leave it out"
    ):
        step(float8_layout(stored_dtype="float8"), hidden_size=32)
    _, loss = step(float8_layout(), hidden_size=32)
    assert loss.isfinite()


# ---- bytes


@pytest.mark.parametrize("keep_attention", [0, 2])
def test_half_of_the_bytes_are_stored_and_forward_is_exact(keep_attention):
    """A scale per 32 elements is added. The log-sum-exps of attention stay in fp32, and with them
    the input in bf16."""
    held = {}
    losses = []
    for stored in (None, "float8"):
        layout = float8_layout(stored_dtype=stored, keep_attention=keep_attention)
        model, loss = step(layout, "llama")
        store = model.model.layers[0].forward.store
        held[stored] = store.pool.busy_bytes
        _ = losses.append(loss.detach())
        loss.backward()
        assert store.pool.busy_bytes == 0
    x_bytes = 2 * 60 * 64 * 2
    lse_bytes = 2 * 60 * 4 * 4
    rounded_bytes = x_bytes * (1 + 1 / 32) / 2
    if not keep_attention:
        assert (held[None], held["float8"]) == (x_bytes, rounded_bytes)
    else:
        assert (held[None], held["float8"]) == (
            2 * x_bytes + lse_bytes,
            x_bytes + rounded_bytes + lse_bytes,
        )
    assert torch.equal(*losses)


@pytest.mark.parametrize(
    "family, overlap",
    [
        ("llama", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("llama", True), ("qwen3_5_text", True))
        ),
    ],
)
def test_planned_bytes_are_those_of_the_schedule(family, overlap):
    """On the host, copied, and on the device, where buffers for rounding are added. Without
    overlap, dq waits on the host in bf16, in addition."""
    sizes = {
        **SIZES,
        **FAMILIES[family],
        "model_type": family,
        "num_hidden_layers": 2,
        "hidden_size": 128,
    }
    cp = 2
    tokens = 512
    layout = Layout(
        cp,
        heads_per_stage=2,
        tile_tokens=64,
        input_tier="host",
        keep_attention=1,
        attention_tier="host",
        overlap=overlap,
        dtype="bfloat16",
        kernel="cpu",
        stored_dtype="float8",
    )
    shape = shape_from_config(sizes)
    machine = parse_gpus("2xH100")
    names = ("layer inputs", "kept attention")
    trace = trace_model(TraceRequest(json.dumps(sizes), layout, cp), tokens)
    rounded, bf16 = (
        sum(
            build_ledger(
                shape, replace(layout, stored_dtype=stored), machine, StepShape(tokens)
            ).host[name]
            // cp
            for name in names
        )
        for stored in ("float8", None)
    )
    assert trace.host_bytes == rounded if family == "llama" else trace.host_bytes <= rounded
    kept_bytes = trace.find("loss forward").host[0]
    assert kept_bytes < 0.7 * bf16  # with log-sum-exps in fp32, and one of two inputs in bf16
    # Every stage but the last of the layer that keeps attention stores its dq.
    dq_bytes = 3 * tokens * 16 * 2 * (not overlap)
    assert trace.total("moved")["copy to host"] == kept_bytes + dq_bytes


# ---- plans and refusals


def test_a_plan_that_does_not_fit_names_float8():
    shape = find_shape("llama3-8b")
    machine = replace(parse_gpus("8xH100"), host_bytes=2 * 10**12)
    space = SearchSpace(shape, machine)
    longest = space.longest_context(1)
    assert space.with_float8.longest_context(1) > 1.6 * longest
    facts = collect_facts(space.choose(StepShape(3 * longest // 2)), "llama3-8b")
    assert facts["ways_out"]["--set"] == "memory.stored_dtype=float8"
    assert "  --set memory.stored_dtype=float8\n" in render_plan(facts)
    assert replace(space, hardware=parse_gpus("8xA100-80GB")).with_float8 is None


def test_float8_without_anything_to_store_is_refused(tmp_path):
    """Except in a plan, which may find that everything fits on the device, and in a run that
    resumes with it."""
    memory = {"stored_dtype": "float8", "offload": "none"}
    in_full = {"offload": "host", "keep_attention": "all", "attention_offload": "none"}
    for changes in ({}, in_full):
        config = tiny_run(tmp_path, memory=memory | changes)
        with pytest.raises(
            ConfigError,
            match="memory.stored_dtype=float8 has no effect: .*; use memory.offload=host",
        ):
            validate(config)
        resumed = Draft(Request(), config, resumes=tmp_path)
        machine = detect_machine(config, 1, None)
        build_run(Planned(config, model_shape(config)), 1, machine, resumed)
    for changes in ({"offload": "host"}, {"keep_attention": 1, "attention_offload": "host"}):
        validate(tiny_run(tmp_path, memory=memory | changes))
    shape = find_shape("llama3-8b")
    machine = parse_gpus("8xH200")
    plan = SearchSpace(shape, machine, {"stored_dtype": "float8"}).choose(StepShape(8192))
    reason = collect_facts(plan, "llama3-8b")["reasons"]["memory.stored_dtype"]
    assert reason == "no effect: nothing off the device is rounded"


def test_a_layer_that_keeps_attention_keeps_its_input_in_full():
    """In the layout, in the search's bytes and seconds, and in what is pinned ahead."""
    layout = Layout(input_tier="host", keep_attention=1, stored_dtype="float8")
    dtypes = [layout.input_dtype(policy) for policy in layout.layer_policies(3)]
    assert dtypes == ["float8", "float8", None]
    assert layout.rounds(3) and not replace(layout, keep_attention=3).rounds(3)
    assert replace(layout, keep_attention=3, attention_tier="host").rounds(3)
    shape = find_shape("llama3-8b")
    machine = parse_gpus("1xH200")
    work = StepShape(4096)
    bytes_ = []
    seconds = []
    for stored in ("float8", None):
        kept = Layout(input_tier="host", keep_attention=32, overlap=False, stored_dtype=stored)
        bytes_.append(build_ledger(shape, kept, machine, work).host["layer inputs"])
        seconds.append(step_seconds(shape, kept, machine, work))
    assert bytes_[0] == bytes_[1] == 32 * 4096 * 4096 * 2 and seconds[0] == seconds[1]
    run = SimpleNamespace(
        layout=layout, work=work, shape=SimpleNamespace(num_layers=3, first_trained=0, hidden=64)
    )
    assert input_slabs(run) == (4096 * 66, 2)
    assert input_slabs(SimpleNamespace(**{**vars(run), "layout": Layout()})) == (0, 0)


def test_gpus_without_float8_and_other_dtypes_are_refused(monkeypatch):
    with pytest.raises(
        ConfigError,
        match="memory.stored_dtype=float8 needs compute capability 8.9.*A100.*; leave it",
    ):
        check_float8("float8", "A100-80GB", parse_gpus("8xA100-80GB").gpu.has_float8)
    check_float8(None, "A100-80GB", False)
    with pytest.raises(
        ConfigError, match="layout.stored_dtype='int8' is unknown; use 'float8', or None"
    ):
        Layout(stored_dtype="int8")
