"""Traces record the code that runs: bytes by category and phase, FLOPs, and bytes moved, on tensors
without memory."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
import torch.distributed as dist
from huggingface_hub.utils import filter_repo_objects
from typer.testing import CliRunner

from decoders import DECODERS, HYBRIDS, SIZES
from ithaka.attention import blocks
from ithaka.checks import rehearse_without_gpu
from ithaka.cli import app
from ithaka.comm.ghost import GhostAutocast, ghost_rank
from ithaka.comm.loopback import start_loopback
from ithaka.comm.mesh import make_mesh
from ithaka.config import AdapterConfig, OptimConfig
from ithaka.data.tokenizer import ByteTokenizer
from ithaka.layer import store as stores
from ithaka.layout import Layout
from ithaka.mixers import softmax
from ithaka.model.build import build_model
from ithaka.model.optimizers import make_optimizer
from ithaka.model.truncate import choose_neighbors
from ithaka.ops.fused import KERNEL_BYTES
from ithaka.plan import bytes as bytes_
from ithaka.plan.bytes import STATES, gpu_phases
from ithaka.plan.hardware import parse_gpus
from ithaka.plan.models import find_config
from ithaka.plan.search import Plan, SearchSpace
from ithaka.plan.seconds import sent_bytes
from ithaka.plan.shape import StepShape
from ithaka.plan.trace import (
    LinearTrace,
    Peaks,
    Trace,
    TracedPart,
    TraceRequest,
    choose_traced,
    correct,
)
from ithaka.roots import probe
from ithaka.trace import shapes
from ithaka.trace import trace_plan as tracing
from ithaka.trace.record_trace import TraceRecorder, trace_step
from ithaka.trace.shapes import find_shape, shape_from_config
from ithaka.trace.trace_plan import run_step, trace_model, trace_plan, truncate_request
from vlms import vlm_config

CP = 2
TILE = 64
TOKENS = 2 * TILE * CP
HIDDEN = 32
X = TOKENS // CP * HIDDEN * 2
ALL = 99  # layers
KEEPS = {"keep_attention": ALL}
ON_HOST = {"input_tier": "host", "keep_attention": ALL, "attention_tier": "host"}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def tiny_config(family="llama", num_layers=2, **changes):
    sizes = {**SIZES, **DECODERS.get(family, {}), **HYBRIDS.get(family, {}), **changes}
    sizes |= {"model_type": family, "num_hidden_layers": num_layers, "hidden_size": HIDDEN}
    if "layer_types" in sizes:
        sizes["layer_types"] = (list(sizes["layer_types"]) * num_layers)[:num_layers]
    return sizes


def tiny_request(family="llama", num_layers=2, keeps=KEEPS, config=None, **options):
    layout = Layout(CP, tile_tokens=TILE, dtype="bfloat16", kernel="cpu", **keeps)
    return TraceRequest(
        json.dumps(config or tiny_config(family, num_layers)), layout, CP, **options
    )


def trace_on_cpu(request, tokens):
    """Trace with real tensors on the CPU."""
    start_loopback(request.num_ranks, request.rank)
    try:
        mesh = make_mesh(request.layout.cp, torch.device("cpu"))
        model = build_model(json.loads(request.config), mesh, request.layout, context=tokens)
        optimizer = make_optimizer(model, OptimConfig(lr=0.0))
        inputs = model.ithaka_root.example_inputs(tokens)
        return trace_step(model, optimizer, partial(run_step, model, optimizer, None), inputs)
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("quiet_transformers")
@pytest.mark.parametrize(
    "family, keeps",
    [
        ("llama", KEEPS),
        pytest.param("gemma3_text", {"keep_everything": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", KEEPS, marks=pytest.mark.slow),
    ],
)
def test_a_trace_has_the_bytes_that_are_live_on_a_cpu(family, keeps):
    """At the borders of all segments, in bf16, with autocast. Within a segment, a GPU's fused
    kernels allocate less."""
    request = tiny_request(family, keeps=keeps)
    tokens = 2 * 16 * CP
    request = replace(request, layout=replace(request.layout, tile_tokens=16))
    for real, traced in zip(
        trace_on_cpu(request, tokens).segments, trace_model(request, tokens).segments, strict=True
    ):
        assert real.name == traced.name
        assert (real.start, real.end) == (traced.start, traced.end), real.name
        assert not real.name.startswith("layer ") or traced.peak_bytes <= real.peak_bytes * 1.02


# ---- what is planted in the schedule is in the trace


@pytest.fixture(scope="module")
def usual():
    return trace_model(tiny_request(), TOKENS)


def plan_from(trace):
    """The plan of the tiny model, with its traced peaks, as `choose_traced` corrects it."""
    return correct(tiny_plan(tiny_config()), Peaks.from_trace(trace))


def test_an_allocation_in_the_schedule_raises_the_peak_of_its_phase(usual, monkeypatch):
    """Enough while attention runs to make it the peak of the step."""
    plan_call = blocks._plan_call
    extra = 64 * X

    def allocate(q, *inputs, **options):
        call = plan_call(q, *inputs, **options)
        object.__setattr__(call, "planted", q.new_empty(extra // q.element_size()))
        return call

    monkeypatch.setattr(blocks, "_plan_call", allocate)
    planted = trace_model(tiny_request(), TOKENS)
    for direction in ("forward", "backward"):
        before, after = (trace.find(f"layer 1 {direction}") for trace in (usual, planted))
        phase = f"{direction}/attention"
        assert sum(after.peaks[phase].values()) - sum(before.peaks[phase].values()) == extra
        assert after.end == before.end
    changed = plan_from(planted).ledger.gpu_peak - plan_from(usual).ledger.gpu_peak
    assert changed == pytest.approx(planted.peak_bytes - usual.peak_bytes, abs=8) and changed > X


def test_an_extra_exchange_in_the_schedule_is_counted(usual, monkeypatch):
    start = softmax.start_tokens_to_heads
    sent = []

    def send_twice(t_csnK, group):
        if t_csnK.is_meta:  # not in the check of the model
            sent.append(t_csnK.nbytes // CP)
        start(t_csnK, group).wait()
        return start(t_csnK, group)

    monkeypatch.setattr(softmax, "start_tokens_to_heads", send_twice)
    planted = trace_model(tiny_request(), TOKENS)
    name = f"all-to-all of {CP} ranks"
    extra = planted.total("moved")[name] - usual.total("moved")[name]
    assert extra == sum(sent) > 0
    before, after = (plan_from(trace).seconds.exchange for trace in (usual, planted))
    weights = correct(
        tiny_plan(tiny_config()), Peaks.from_trace(usual)._replace(sent=0)
    ).seconds.exchange
    assert (after - weights) / (before - weights) == pytest.approx(
        1 + extra / usual.total("moved")[name]
    )


def test_estimated_exchanges_are_those_of_a_trace(usual):
    """With overlap in stages, and where attention is recomputed, too."""
    assert plan_from(usual).shape.corrections.popitem()[1].sent == pytest.approx(1, rel=0.01)
    keeps = {"input_tier": "host", "heads_per_stage": CP, "overlap": False}
    request = tiny_request(keeps=keeps)
    plan = tiny_plan(tiny_config(), keep_attention=0, **keeps)
    recomputed = correct(plan, Peaks.from_trace(trace_model(request, TOKENS)))
    assert recomputed.shape.corrections.popitem()[1].sent == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_tensor_that_the_schedule_keeps_is_counted(usual, monkeypatch, tier):
    """On the device or the host, for every layer, from its forward on."""
    keep = stores.Store.keep

    def keep_twice(store, tensor, where, dtype=None):
        handle = keep(store, tensor, where, dtype)
        if tensor.shape[-1] == HIDDEN and tensor.dim() == 2:
            handle.another = keep(store, torch.empty_like(tensor), tier)
        return handle

    monkeypatch.setattr(stores.Store, "keep", keep_twice)
    planted = trace_model(tiny_request(), TOKENS)
    before, after = (trace.find("loss forward") for trace in (usual, planted))
    kept = before.start["kept on device"] + 2 * X * (tier == "device")
    assert (after.start["kept on device"], after.host[0]) == (kept, 2 * X * (tier == "host"))
    if tier == "device":
        changed = plan_from(planted).ledger.gpu_peak - plan_from(usual).ledger.gpu_peak
        assert (
            changed == pytest.approx(planted.peak_bytes - usual.peak_bytes, abs=8) and changed >= X
        )
    assert sum(planted.segments[-1].end.values()) == sum(usual.segments[-1].end.values())


# ---- FLOPs, copies and other ranks


def test_flops_are_those_of_the_matmuls(usual):
    """In forward: the projections, the MLP, and attention to half of the pairs."""
    config = tiny_config()
    s = TOKENS // CP
    heads, kv_heads, K = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    width = 2 * heads * K + 2 * kv_heads * K + 3 * config["intermediate_size"]
    layer = usual.find("layer 1 forward")
    flops = layer.flops
    assert layer.moved[KERNEL_BYTES] > 4 * X  # at least two norms: one read and one write each
    assert flops["matmul"] == 2 * s * HIDDEN * width
    pairs = TOKENS * (TOKENS + 1) // 2
    assert flops[f"attention forward, cpu, head dim {K}"] == 4 * K * heads // CP * pairs


@pytest.mark.parametrize("bias", [(5,), (1, 5), (3, 1), (3, 5)])
def test_matmuls_that_add_have_the_shapes_of_a_cpu(bias):
    def run(device):
        c, a, b = (
            torch.ones(shape, dtype=torch.bfloat16, device=device)
            for shape in (bias, (3, 4), (5, 4))
        )
        out = torch.empty(3, 5, dtype=torch.bfloat16, device=device)
        results = (
            torch.addmm(c, a, b.t()),
            torch.addmm(c, a, b.t(), out=out),
            out.addmm_(a, b.t(), beta=0.5),
        )
        assert results[1] is out and results[2] is out
        return [(tuple(result.shape), result.dtype, result.stride()) for result in results]

    with TraceRecorder() as recorder:
        assert run("meta") == run("cpu")
        with pytest.raises(AssertionError, match="addmm"):
            torch.addmm(*(torch.ones(3, 4, device="meta") for _ in range(3)))
    assert recorder.open.flops == {"matmul": 3 * 2 * 3 * 4 * 5 * 2}


def test_copies_to_the_host_are_counted():
    trace = trace_model(tiny_request(keeps=ON_HOST), TOKENS)
    kept = trace.find("loss forward").host[0]
    copied = 0
    for segment in trace.segments[:3]:
        copied += segment.moved.get("copy to host", 0)
    assert kept == copied and trace.total("moved")["copy from host"] >= kept
    assert trace.find("loss forward").start.get("kept on device", 0) == 0 and kept > 4 * X


@pytest.mark.slow
def test_disks_and_rings_are_traced():
    """A disk needs as much device memory as the host; a ring also sends k and v, among its
    members."""
    host, disk = (
        trace_model(tiny_request(keeps=ON_HOST | tiers), TOKENS)
        for tiers in ({}, {"input_tier": "disk", "attention_tier": "disk"})
    )
    assert disk.peak_bytes == host.peak_bytes and 0 < disk.host_bytes <= host.host_bytes
    request = tiny_request()
    ring = replace(request, layout=replace(request.layout, cp=4, ring=2), num_ranks=4)
    moved = trace_model(ring, TOKENS).total("moved")
    assert moved["all-to-all of 2 ranks"] > 0 and moved["all-gather of 4 ranks"] > 0


def test_every_rank_can_be_traced(usual):
    """With as many tokens and heads, they need as much."""
    other = trace_model(tiny_request(rank=1), TOKENS)
    assert other.peak_bytes == pytest.approx(usual.peak_bytes, rel=0.01)


# ---- length and depth


def test_bytes_are_linear_in_the_tokens(usual):
    request = tiny_request()
    fitted = LinearTrace(usual, trace_model(request, 3 * TOKENS // 2)).at(5 * TOKENS // 2)
    direct = trace_model(request, 5 * TOKENS // 2)
    for a, b in zip(fitted.segments, direct.segments, strict=True):
        assert sum(a.start.values()) == pytest.approx(sum(b.start.values()), rel=1e-3)
        assert a.peak_bytes == pytest.approx(b.peak_bytes, rel=0.02), a.name
    assert Trace.from_json(json.loads(json.dumps(fitted.to_json()))) == fitted


@pytest.mark.parametrize("family", ["llama", pytest.param("olmo3", marks=pytest.mark.slow)])
def test_a_long_sequence_needs_what_two_short_ones_predict(family):
    """Those have fewer tokens than the vocabulary has rows, and than attention takes in a kernel
    call."""
    sizes = {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "head_dim": 64,
        "intermediate_size": 1024,
    }
    config = tiny_config(family) | sizes | {"vocab_size": 2**17, "max_position_embeddings": 2**20}
    request = tiny_request(config=config, context=2**19)
    request = replace(request, layout=replace(request.layout, tile_tokens=2**13, kernel="fa4"))
    fitted = tracing._trace_lengths(request, 2**19)
    direct = trace_model(request, 2**19)
    assert fitted.tokens == direct.tokens and len(fitted.segments) == len(direct.segments)
    # the first is never the peak
    for a, b in zip(fitted.segments[1:], direct.segments[1:], strict=True):
        assert a.peak_bytes == pytest.approx(b.peak_bytes, rel=1e-3), a.name
        assert sum(a.moved.values()) == pytest.approx(sum(b.moved.values()), abs=1, rel=1e-3), (
            a.name
        )


@pytest.mark.slow
def test_a_trace_of_few_layers_is_that_of_all():
    """Layers with several policies: the peaks of all segments are those of the full model."""
    full = tiny_request(num_layers=7, keeps={**ON_HOST, "keep_inputs": 4, "keep_attention": 4})
    policies = full.layout.layer_policies(7)
    layers, representatives = choose_neighbors(policies)
    assert len(layers) == 6 and [policies[layers[i]] for i in representatives] == [*policies]
    few = replace(tiny_request(num_layers=6), layout=full.layout.of_layers(layers, 7))
    expected = trace_model(full, TOKENS // 2)
    unrolled = trace_model(few, TOKENS // 2).unroll(representatives)
    for a, b in zip(unrolled.segments, expected.segments, strict=True):
        assert (a.name, a.peak_bytes, a.host) == (b.name, b.peak_bytes, b.host)


@pytest.mark.parametrize(
    "case", [pytest.param("features of images", marks=pytest.mark.slow), "reference"]
)
def test_what_first_layers_free_and_a_first_pass_are_not_repeated(case):
    """Qwen3-VL adds features of images to the outputs of its first layers; DPO runs them again,
    with other peaks."""
    config = tiny_config(num_layers=8)
    options = {"reference": True, "adapter": AdapterConfig(rank=2)}
    if case == "features of images":
        config = vlm_config("qwen3_vl", num_hidden_layers=8).to_dict()
        options = {}
    request = tiny_request(num_layers=8, config=config, **options)
    truncated, representatives = truncate_request(request)
    assert len(set(representatives)) < 8
    expected = trace_model(request, TOKENS)
    unrolled = trace_model(truncated, TOKENS).unroll(representatives)
    for a, b in zip(unrolled.segments, expected.segments, strict=True):
        assert (a.name, a.peak_bytes) == (b.name, b.peak_bytes)


def test_layers_of_two_kinds_keep_what_each_keeps():
    """Estimates once counted every layer as the kind that keeps the most."""
    keeps_all = {"keep_everything": 4}
    config = tiny_config("qwen3_5_text", num_layers=4)
    plan = tiny_plan(config, dtype="bfloat16", **keeps_all)
    assert len(plan.shape.kinds_of_sizes) == 2
    phases = dict(gpu_phases(plan.shape, plan.layout, plan.hardware, plan.work))
    start = (
        trace_model(tiny_request("qwen3_5_text", 4, keeps_all), TOKENS).find("loss forward").start
    )
    kept = start["kept on device"] + start["MLP tile"]
    assert phases["loss"]["kept activations"] == pytest.approx(kept, rel=0.03)


def test_layers_with_the_same_neighbor_are_alike():
    layers, alike = choose_neighbors("aabaabaab")
    assert layers == (0, 1, 2, 3, 4, 8)
    assert ["aabaabaab"[layers[i]] for i in alike] == list("aabaabaab")
    assert choose_neighbors("a") == ((0,), [0]) and choose_neighbors("ab") == ((0, 1), [0, 1])


# ---- traces decide


def llama_space():
    fixed = {
        "offload_optimizer": False,
        "overlap": True,
        "input_tier": "device",
        "attention_tier": "device",
    }
    return SearchSpace(find_shape("llama3.2-3b"), parse_gpus("1xH200"), fixed)


def true_peaks(plan):
    """What a trace would find if estimates were exact."""
    ledger = replace(plan, shape=replace(plan.shape, corrections={})).ledger
    ranks = plan.hardware.gpus_per_node
    sent = sent_bytes(plan.shape, plan.layout, plan.work, plan.hardware)
    return Peaks(ledger.gpu_peak - ledger.gpu["reserve"], sum(ledger.stored.values()) / ranks, sent)


@pytest.mark.parametrize("error", [0.5, 1.3])
def test_a_plan_fits_by_its_trace_even_if_the_estimate_is_wrong(monkeypatch, error):
    """An estimate of half of the bytes chooses plans that do not fit; one that is too high, slow
    ones."""
    # a fast search
    fixed = {"cp": 8, "input_tier": "host", "offload_optimizer": False, "overlap": True}
    space = SearchSpace(find_shape("llama3.1-8b"), parse_gpus("8xH100-80GB"), fixed)
    work = StepShape(2**20)
    traced: list[Peaks] = []
    exact = space.choose(work)
    phases = bytes_.gpu_phases

    def estimate(*arguments):
        wrong = (
            sizes | {n: int(error * b) for n, b in sizes.items() if n not in STATES}
            for _, sizes in phases(*arguments)
        )
        return [(name, sizes) for (name, _), sizes in zip(phases(*arguments), wrong, strict=True)]

    def trace(plan):
        with monkeypatch.context() as patch:
            patch.setattr(bytes_, "gpu_phases", phases)
            traced.append(true_peaks(plan))
        return traced[-1]

    monkeypatch.setattr(bytes_, "gpu_phases", estimate)
    plan = choose_traced(space, work, trace)
    assert space.choose(work).layout != exact.layout and (2 if error < 1 else 1) <= len(traced) <= 4
    assert plan.fits and true_peaks_fit(plan, traced)
    assert plan.tokens_per_s_per_gpu >= 0.97 * exact.tokens_per_s_per_gpu
    assert all(other.fits for other in plan.alternatives)


def true_peaks_fit(plan, traced):
    """Whether one of the traced peaks is the ledger's, and fits."""
    peak = plan.ledger.gpu_peak - plan.ledger.gpu["reserve"]
    return plan.ledger.gpu_peak <= plan.ledger.gpu_bytes and any(
        abs(peak - p.device) < 16 for p in traced
    )


def test_a_plan_that_fits_by_its_trace_is_kept_if_another_cannot_be_traced(monkeypatch):
    """The first plan leaves room, but a faster one is only an estimate."""
    space = llama_space()
    work = StepShape(2**17)
    calls = []

    def trace(plan):
        calls.append(plan)
        return true_peaks(plan)._replace(device=2**36) if len(calls) == 1 else None

    plan = choose_traced(space, work, trace)
    assert len(calls) == 2 and plan.layout == calls[0].layout and plan.fits


def test_an_exact_estimate_is_traced_once():
    space = llama_space()
    work = StepShape(2**18)
    calls = []
    plan = choose_traced(space, work, lambda plan: calls.append(plan) or true_peaks(plan))
    assert len(calls) == 1 and plan.layout == space.choose(work).layout
    assert plan.ledger == replace(plan, shape=space.shape).ledger
    assert choose_traced(space, work, lambda plan: None) == space.choose(work)


def test_a_plan_has_the_host_bytes_of_its_trace():
    plan = Plan(
        find_shape("llama3.2-3b"),
        Layout(cp=2, input_tier="host"),
        parse_gpus("2xH100"),
        StepShape(2**18),
    )
    peaks = true_peaks(plan)
    stored = sum(plan.ledger.stored.values())
    corrected = correct(plan, peaks._replace(host=2 * peaks.host)).ledger
    assert stored > 0 and sum(corrected.stored.values()) == pytest.approx(2 * stored)
    assert corrected.host_peak - plan.ledger.host_peak == pytest.approx(stored)


BUILT_IN = ["llama3.2-1b", "gemma-3-4b", "gpt-oss-20b", "olmo-3-7b", "qwen3-30b-a3b"]


@pytest.mark.slow
@pytest.mark.parametrize("model", BUILT_IN)
def test_plans_of_built_in_models_agree_with_traces(model):
    """`ithaka plan` does not trace them; `ithaka train` does."""
    plan = SearchSpace(find_shape(model), parse_gpus("8xH200")).choose(StepShape(2**18))
    traced = tracing.trace_peaks(find_config(model), plan)
    assert plan.layout.keep_everything > 0
    assert traced.device == pytest.approx(
        plan.ledger.gpu_peak - plan.ledger.gpu["reserve"], rel=0.02
    )


@pytest.mark.usefixtures("traces_plans")
def test_a_cached_plan_takes_no_trace(tmp_path, monkeypatch):
    """A model that is not built in is measured and traced once, with one probe of each of its two
    kinds of layers."""
    file = tmp_path / "config.json"
    command = ["--gpus", "2xH100", "--context", "1K", "--json"]
    rope = {
        f"{kind}_attention": {"rope_type": "default", "rope_theta": 1e4}
        for kind in ("sliding", "full")
    }
    file.write_text(
        json.dumps(tiny_config("gemma3_text", max_position_embeddings=4096, rope_parameters=rope))
    )
    probed = []
    probe_kind = probe._probe_kind
    monkeypatch.setattr(probe, "_findings", {})
    monkeypatch.setattr(
        probe, "_probe_kind", lambda *args: probed.append(args[1]) or probe_kind(*args)
    )
    first = json.loads(CliRunner().invoke(app, ["plan", str(file), *command]).stdout)
    assert len(list(tmp_path.rglob("traces/*.json"))) >= 2 and len(probed) == 2
    shapes._measure.cache_clear()
    monkeypatch.setattr(tracing, "trace_model", None)
    monkeypatch.setattr("ithaka.trace.measure.measure_model", None)
    assert json.loads(CliRunner().invoke(app, ["plan", str(file), *command]).stdout) == first


# ---- the cache


def test_a_trace_is_cached_for_one_plan_and_version(cache_folder, monkeypatch):
    trace = Trace(TOKENS, (TracedPart("update", {}, {}, {"": {"other": 1.0}}),), ({},) * 2)
    calls = []
    monkeypatch.setattr(
        tracing,
        "trace_model",
        lambda request, tokens: calls.append(tokens) or replace(trace, tokens=tokens),
    )
    plan = tiny_plan(tiny_config())
    config = tiny_config()
    shapes = {*cache_folder.rglob("*.json")}
    assert trace_plan(plan, config) == trace_plan(plan, config) and calls == [TOKENS]
    trace_plan(replace(plan, work=StepShape(2 * TOKENS)), config)
    trace_plan(plan, config, rank=1)
    monkeypatch.setattr("ithaka.plan.trace._versions", lambda: ("another torch",))
    trace_plan(plan, config)
    assert calls == [TOKENS, 2 * TOKENS, TOKENS, TOKENS]
    for file in (files := {*cache_folder.rglob("*.json")} - shapes):
        file.write_text("{")  # damaged
    trace_plan(plan, config)
    assert len(calls) == 5 and len(files) == 4


# ---- the command


def tiny_plan(config, context=TOKENS, **changes):
    shape = shape_from_config(config)
    layout = Layout(CP, tile_tokens=TILE, **KEEPS | changes)
    return Plan(shape, layout, parse_gpus(f"{CP}xH100"), StepShape(context))


def test_a_plan_is_traced_at_full_depth():
    plan = tiny_plan(tiny_config(num_layers=9))
    request, representatives = truncate_request(
        TraceRequest.from_plan(plan, tiny_config(num_layers=9))
    )
    assert request.layout.keep_attention == 4 and request.layout.kernel == "fa4"
    assert representatives == [0, *[1] * 7, 3]
    trace = trace_plan(plan, tiny_config(num_layers=9))
    assert (
        [segment.name for segment in trace.segments].count("layer 8 forward")
        == 1
        == len([segment for segment in trace.segments if segment.name == "layer 7 backward"])
    )
    offloaded = trace_plan(
        replace(plan, layout=replace(plan.layout, offload_optimizer=True)),
        tiny_config(num_layers=9),
    )
    assert offloaded.peak_bytes < trace.peak_bytes and offloaded.host_bytes > 0


def test_offloaded_states_are_on_the_host():
    """Parameters, optimizer states and the gradients that are sharded; those in flight stay on the
    device."""

    def segment(name, first, last, most):
        start, peak, end = (
            {"parameters": 5.0, "optimizer": 7.0, "gradients": grads, "tiles": 1.0}
            for grads in (first, most, last)
        )
        return TracedPart(name, start, end, {"": peak}, (1.0, 3.0, 2.0))

    segments = (
        segment("loss backward", 0.0, 4.0, 4.0),  # of the head, 4
        segment("layer 1 backward", 4.0, 24.0, 64.0),  # 20 of 60 in flight are this rank's
        segment("layer 0 backward", 24.0, 34.0, 84.0),
        segment("optimizer", 34.0, 0.0, 34.0),
    )
    trace = Trace(8, segments, ({"gradients": 10.0}, {"gradients": 20.0})).offload_states()
    grads = [
        (s.start["gradients"], s.peaks[""]["gradients"], s.end["gradients"]) for s in trace.segments
    ]
    assert grads == [(0.0, 4.0, 4.0), (4.0, 64.0, 4.0), (4.0, 64.0, 4.0), (4.0, 4.0, 0.0)]
    assert all(s.host == (1.0 + 46.0, 3.0 + 46.0, 2.0 + 46.0) for s in trace.segments)  # 5 + 7 + 34
    assert all(s.start.keys() == s.end.keys() == {"gradients", "tiles"} for s in trace.segments)
    assert trace.peak_bytes == 65.0


def test_an_offloaded_plan_agrees_with_its_trace():
    """The host's bytes are exact. On the device, the gradients of all layers would be as large as
    the rest."""
    config = tiny_config(num_layers=12, intermediate_size=512)
    plan = tiny_plan(config, offload_optimizer=True)
    trace = trace_plan(plan, config)
    assert trace.host_bytes == pytest.approx(sum(plan.ledger.stored.values()) / CP, rel=1e-3)
    peak = plan.ledger.gpu_peak - plan.ledger.gpu["reserve"]
    assert trace.peak_bytes == pytest.approx(peak, rel=0.2)


def test_a_ghost_rehearsal_fits_only_with_the_reserve():
    """A GPU also holds the CUDA context and what fragments."""
    plan = tiny_plan(tiny_config())
    room = plan.ledger.gpu_bytes - plan.ledger.gpu["reserve"]
    for peak, fits in ((room - 2**20, True), (room + 2**20, False)):
        report = rehearse_without_gpu.describe_ghost(
            plan, Trace(TOKENS, (TracedPart("update", {}, {}, {"": {"other": peak}}),)), 0
        )
        assert report["fits"] is fits and report["device_gib"]["reserve"] > 1
    assert (
        report["peak_phase"] == "update"
        and report["device_gib"]["traced"] < report["device_gib"]["capacity"]
    )
    highest = [
        TracedPart(f"layer {i} forward", {}, {}, {"": {"other": size}})
        for i, size in enumerate((1, 3, 2))
    ]
    report = rehearse_without_gpu.describe_ghost(plan, Trace(TOKENS, tuple(highest)), 0)
    assert (
        [row["phase"] for row in report["phases"]] == ["layer 1 forward"] == [report["peak_phase"]]
    )


def test_images_then_branches_then_long_documents_need_the_most_memory():
    """Pixels and an encoder's outputs come on top of the tokens."""

    def packed(starts=(0,), images=(), parents=None):
        return SimpleNamespace(
            borders=np.array(starts),
            length=100,
            images=[SimpleNamespace(num_tokens=tokens) for tokens in images],
            parents=None if parents is None else np.array(parents),
        )

    by_order = {
        "short documents": packed(starts=(0, 30, 60)),
        "a longer document": packed(starts=(0, 10)),
        "one document": packed(),
        "a branch": packed(starts=(0, 50), parents=(-1, 0)),
        "an image": packed(starts=(0, 40), images=(5,)),
        "two images": packed(starts=(0, 40, 80), images=(3, 3)),
    }
    assert sorted(
        by_order, key=lambda name: rehearse_without_gpu._memory_order(by_order[name])
    ) == list(by_order)


def test_a_ghost_rehearsal_prints_peaks_by_phase(tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny_config(num_layers=3, max_position_embeddings=4096)))
    command = [
        "rehearse",
        str(file),
        "--gpus",
        "2xH100",
        "--context",
        "1K",
        "--ghost",
        "--rank",
        "1",
    ]
    text = CliRunner().invoke(app, command)
    assert text.exit_code == 0, text.output
    assert "rank 1 of 2xH100-80GB, 1024 tokens, all layers" in text.stdout
    assert "does not see fragmentation" in text.stdout and "fits in 79.1" in text.stdout
    report = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    names = [row["phase"].partition(",")[0] for row in report["phases"]]
    assert (
        names[0] == "embedding"
        and any(name.endswith(" backward") for name in names)
        and report["fits"]
    )
    found = trace_plan(tiny_plan(tiny_config()), tiny_config())
    huge = replace(found.segments[0], peaks={"": {"other": 80.0 * 2**30}})
    monkeypatch.setattr(tracing, "trace_plan", lambda *args: replace(found, segments=(huge,)))
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 3 and "does not fit in 79.1" in result.stdout
    refused = CliRunner().invoke(
        app, ["rehearse", str(file), "--gpus", "2xH100", "--data", str(file)]
    )
    assert refused.exit_code == 2 and "--data needs --ghost" in refused.output


def test_the_worst_packed_batch_is_traced(tmp_path):
    """The sequence with the longest document, of the run's data."""
    texts = tmp_path / "texts"
    run = tmp_path / "run.yaml"
    model = tmp_path / "config.json"
    texts.mkdir()
    for number, length in enumerate((40, 40, 300, 40, 90)):
        (texts / f"{number}.txt").write_text("x" * length)
    model.write_text(json.dumps(tiny_config(vocab_size=300)))
    run.write_text(
        f"model: {{path: {model}}}\ndata: {{path: {texts}, tokenizer: bytes, context: 64}}\n"
    )
    plan = tiny_plan(tiny_config(vocab_size=300), context=320)
    inputs = rehearse_without_gpu.find_worst_batch(run, plan)
    assert (
        inputs["input_ids"].shape == (1, 320)
        and inputs["document_ids"].flatten().bincount().max() >= 300
    )
    command = [
        "rehearse",
        str(model),
        "--gpus",
        "2xH100",
        "--context",
        "320",
        "--ghost",
        "--data",
        str(run),
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0 and "320 tokens" in result.stdout, result.output


def test_the_users_data_is_packed_with_the_tokenizer_of_a_model_on_the_hub(tmp_path, monkeypatch):
    """Without its weights, which may be too large for the machine that rehearses."""
    texts = tmp_path / "a.txt"
    run = tmp_path / "run.yaml"
    snapshot = tmp_path / "snapshot"
    ByteTokenizer().hf.save_pretrained(snapshot)
    texts.write_text("x" * 300)
    run.write_text(f"model: {{path: org/tiny@v2}}\ndata: {{path: {texts}, context: 64}}\n")

    def download(repo, revision, allow_patterns, ignore_patterns, **_):
        names = ["config.json", "model-1.safetensors", "tokenizer.json", "chat_template.jinja"]
        wanted = filter_repo_objects(
            names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        assert (repo, revision) == ("org/tiny", "v2") and [*wanted] == [names[0], *names[2:]]
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    inputs = rehearse_without_gpu.find_worst_batch(
        run, tiny_plan(tiny_config(vocab_size=300), context=320)
    )
    assert inputs["input_ids"].shape == (1, 320)


# ---- autocast


def test_autocast_on_the_ghost_device_casts_as_on_a_gpu():
    a = torch.empty(2, 4, device="meta")
    b = torch.empty(4, 3, device="meta", dtype=torch.bfloat16)
    with ghost_rank(1):
        with torch.autocast("meta", torch.bfloat16):
            assert (a @ b).dtype == torch.bfloat16 and b.softmax(-1).dtype == torch.float32
            assert torch.cat([a, b.t()[:2].float()]).dtype == torch.float32
            with torch.autocast("meta", enabled=False):
                assert b.softmax(-1).dtype == torch.bfloat16 and not GhostAutocast.is_enabled()
        assert b.softmax(-1).dtype == torch.bfloat16
    assert not hasattr(torch, "meta")
