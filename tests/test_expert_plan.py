"""Plans of mixtures match counts by hand: Qwen3-30B-A3B has 128 experts of 3 x 2048 x 768, 8 per
token."""

import json
from types import SimpleNamespace

import pytest

from ithaka.config import AdapterConfig
from ithaka.layout import ActivationPolicy, Layout
from ithaka.plan.bytes import gpu_phases
from ithaka.plan.hardware import parse_gpus
from ithaka.plan.layer_bytes import LayerBytes
from ithaka.plan.search import Plan
from ithaka.plan.seconds import (
    ADAPTER_PASSES,
    STAGE_SECONDS,
    LayerSeconds,
    flop_seconds,
    layer_seconds,
)
from ithaka.plan.shape import StepShape
from ithaka.trace.shapes import find_shape
from ithaka.train.journal import flops_utilization
from test_plan_command import run

pytestmark = pytest.mark.usefixtures("plans_once")

QWEN = find_shape("qwen3-30b-a3b")
OSS = find_shape("gpt-oss-120b")
H100 = parse_gpus("8xH100")
H200 = parse_gpus("1xH200")
EXPERTS = 128 * 3 * 2048 * 768
TOKENS = 2**17


def test_active_parameters_count_the_experts_of_one_token():
    assert QWEN.num_parameters - QWEN.num_active == pytest.approx(
        48 * EXPERTS * 120 / 128, rel=1e-6
    )
    assert (round(QWEN.num_active / 1e9, 2), round(OSS.num_active / 1e9, 1)) == (3.35, 5.8)
    llama = find_shape("llama3-8b")
    assert llama.num_active == llama.num_parameters


def test_gradients_are_added_to_the_sums_without_a_copy():
    layout = Layout(cp=8, tile_tokens=8192)
    assert LayerBytes(QWEN, layout, TOKENS).weight_grads("backward mlp") == 4 * QWEN.mlp_parameters


def test_large_layers_are_not_gathered_ahead_without_overlap():
    adapted = OSS.with_adapter(AdapterConfig(16))
    work = StepShape(2**20)
    weights = {}
    waits = {}
    for overlap in (True, False):
        layout = Layout(cp=8, tile_tokens=8192, overlap=overlap)
        weights[overlap] = dict(gpu_phases(adapted, layout, H100, work))["backward, last layer"][
            "layer weights"
        ]
        waits[overlap] = layer_seconds(
            adapted, layout, H100, work, adapted.mixers[0], ActivationPolicy()
        )[1].exchange
    gathered = adapted.gathered_bytes(2)
    assert weights[True] - weights[False] == gathered > 6e9
    assert waits[False] - waits[True] == pytest.approx(gathered * 7 / 8 / H100.gpu.link_bytes_s)
    small = [
        dict(gpu_phases(QWEN, Layout(cp=8, overlap=overlap), H100, work))
        for overlap in (True, False)
    ]
    assert (
        small[0]["backward, last layer"]["layer weights"]
        == small[1]["backward, last layer"]["layer weights"]
    )


def test_adapters_of_experts_cost_only_what_a_tokens_experts_cost():
    adapted = QWEN.with_adapter(
        AdapterConfig(16, targets=("experts.gate_up_proj", "experts.down_proj"))
    )
    seconds = LayerSeconds(adapted, Layout(), H200, TOKENS).adapters(False)
    inputs, outputs = ADAPTER_PASSES[0]
    widths = inputs * (2 * 768 + 2048) + outputs * (2048 + 768)  # stored as [E, outputs, inputs]
    assert seconds == pytest.approx(8 * 2 * TOKENS * widths / H200.gpu.memory_bytes_s)
    assert adapted.num_trained == 48 * 16 * 128 * (2 * 768 + 2048 + 2048 + 768)
    trainer = SimpleNamespace(device_name="NVIDIA H200", mesh=SimpleNamespace(world_size=1))
    trainer.run = SimpleNamespace(shape=adapted)
    trainer.num_trained = adapted.num_trained
    used = (4 * adapted.num_products + 6 * adapted.num_trained * 8 / 128) * TOKENS
    assert flops_utilization(trainer, TOKENS, 0, 1.0) == pytest.approx(used / 989.4e12, rel=1e-6)


@pytest.mark.parametrize(
    ("model", "tokens", "seconds"),
    [
        ("gemma-3-4b", 2**14, 0.2712),
        ("gemma-3-4b", 2**17, 2.5321),
        ("olmo-3-7b", 2**16, 1.9940),
        ("olmo-3-7b", 2**17, 4.3585),
        ("smollm3-3b", 2**14, 0.1828),
        ("smollm3-3b", 2**17, 3.4327),
    ],
)
def test_planned_seconds_match_a_measured_step(model, tokens, seconds):
    """Measured with six layers on one H200 (LOG.md)."""
    layout = Layout(tile_tokens=16384, keep_attention=6, dtype="bfloat16")
    plan = Plan(
        find_shape(model).keep_layers(range(6)), layout, H200.with_kernel("fa4"), StepShape(tokens)
    )
    assert plan.step_s == pytest.approx(seconds, rel=0.1)


def test_experts_are_slower_with_few_rows_per_tile():
    """Compare with the seconds of gpt-oss-120b's grouped matmuls by tile, at 64K on one H200
    (LOG.md)."""
    for tile, milliseconds in ((1024, 2.15), (4096, 2.92), (16384, 5.47)):
        seconds = LayerSeconds(OSS, Layout(tile_tokens=tile), H200, 2**16)
        assert seconds._experts() == pytest.approx(2**16 / tile * milliseconds / 1e3, rel=0.2), tile


def test_every_stage_takes_time():
    stages = {heads: Layout(heads_per_stage=heads, tile_tokens=4096) for heads in (8, 64)}
    seconds = [
        LayerSeconds(OSS, layout, H200, 2**16).project(backward=False) for layout in stages.values()
    ]
    assert seconds[0] - seconds[1] == pytest.approx(7 * STAGE_SECONDS)


@pytest.mark.slow
def test_the_plan_prints_experts_and_the_time_of_flops():
    args = ("plan", "qwen3-30b-a3b", "--gpus", "8xH100", "--host-memory", "2TB", "--context", "1M")
    answer = json.loads(run(*args, "--json"))
    text = " ".join(run(*args).split())
    experts = answer["experts"]
    seconds = answer["flop_seconds"]
    assert experts["gathered_bytes"] == experts["prefetched_bytes"] == 2 * QWEN.measured.parameters
    assert experts["gradient_sum_bytes"] == 4 * QWEN.measured.parameters
    assert (
        "3.35B of 30.5B parameters are used per token; one layer: 1.161 GiB gathered, 1.161 GiB "
        "prefetched"
    ) in text
    assert seconds["linear"] == pytest.approx(6 * 2**17 * QWEN.num_products / 700e12, rel=1e-3)
    pairs = 2**20 * (2**20 + 1) / 2
    rates = H100.gpu
    flops = 4 * 128 * 4 * pairs * 48  # per GPU: 4 of 32 heads
    expected = flops / rates.attention_forward_flops + 2.5 * flops / rates.attention_backward_flops
    assert seconds["attention"] == pytest.approx(expected, rel=1e-3)
    assert sum(seconds.values()) < answer["step_s"]
    assert (
        "Below 16K tokens, gathering weights takes most of a step" in text
        and experts["shortest_context"] == 2**14
    )
    assert "parameters are used per token" not in run(
        "plan", "llama3.2-1b", "--gpus", "H200", "--context", "8K"
    )


def test_frozen_weights_need_two_matmuls():
    layout = Layout(tile_tokens=8192)
    work = StepShape(TOKENS)
    full, frozen = (
        flop_seconds(find_shape("llama3-8b").with_adapter(adapter), layout, H200, work)
        for adapter in (None, AdapterConfig(16))
    )
    assert (
        frozen.linear == pytest.approx(full.linear * 2 / 3) and frozen.attention == full.attention
    )
