"""Memory and time of plans with adapters, checked against counts done by hand."""

import json
import re
from dataclasses import replace

import pytest
import yaml

from ithaka.config import AdapterConfig, ConfigError
from ithaka.facts.sizes import logits_tile_tokens
from ithaka.layout import ActivationPolicy, Layout
from ithaka.plan.bytes import build_ledger, gpu_phases
from ithaka.plan.hardware import parse_gpus
from ithaka.plan.layer_bytes import layer_peaks
from ithaka.plan.search import SearchSpace
from ithaka.plan.seconds import LAYER_SHARE, LayerSeconds, layer_seconds, step_seconds
from ithaka.plan.shape import StepShape
from ithaka.trace.shapes import find_shape
from test_plan_command import ARGS, run

LLAMA = find_shape("llama3-8b")
ADAPTED = LLAMA.with_adapter(AdapterConfig(16))
H100 = parse_gpus("8xH100")
KEEPS = ActivationPolicy("host", "host")
LAYOUT = Layout(
    8, 8, 8192, input_tier="host", keep_attention=32, attention_tier="host", overlap=False
)
D = 4096
F = 14336
KV = 1024
V = 128256
LAYER = 16 * ((D + D) + 2 * (D + KV) + (D + D) + 3 * (D + F))  # q; k, v; o; gate, up, down
TOP = LLAMA.with_adapter(AdapterConfig(16, targets=("31.self_attn.q_proj", "30.self_attn.q_proj")))


def test_only_adapters_have_optimizer_states():
    ledger = build_ledger(ADAPTED, LAYOUT, H100, StepShape(2**17))
    trained = 32 * LAYER // 8
    frozen = -(-LLAMA.num_parameters // 8)
    assert ADAPTED.num_trained == 32 * LAYER == 41943040
    assert ledger.gpu["parameters"] == 4 * trained + 2 * frozen
    assert ledger.gpu["optimizer"] == 8 * trained
    phases = dict(gpu_phases(ADAPTED, LAYOUT, H100, StepShape(2**17)))
    assert phases["update"]["gradients"] == 4 * trained
    off = build_ledger(ADAPTED, replace(LAYOUT, offload_optimizer=True), H100, StepShape(2**17))
    assert (off.gpu["parameters"], off.gpu["optimizer"]) == (0, 0)
    assert off.host["parameters, gradients, optimizer"] == 8 * (16 * trained + 2 * frozen)


def test_frozen_weights_have_no_gradients():
    short, long = (layer_peaks(ADAPTED, LAYOUT, s, KEEPS)[2] for s in (2**14, 2**17))
    assert (short.phase, short.grad_bytes) == ("backward mlp", 4 * LAYER)
    assert (long.phase, long.grad_bytes) == ("backward attention", 4 * LAYER)
    phases = dict(gpu_phases(ADAPTED, LAYOUT, H100, StepShape(2**20)))
    assert phases["loss"]["loss tile"] == logits_tile_tokens(
        LAYOUT.tile_tokens, 2**17, 2 * V
    ) * 2 * (V + 2 * D)
    alone = dict(gpu_phases(ADAPTED, LAYOUT, H100, StepShape(2**20, trains=False)))
    assert (
        phases["loss"]["loss tile"] - alone["loss"]["loss tile"] == 2048 * 2 * D
    )  # no gradient of the normalized rows
    # Weights of this layer and of the next one.
    assert phases["forward"]["layer weights"] == 2 * 2 * (LLAMA.measured.parameters + LAYER)
    # Layers above are reduced; the previous layer's gradients are being sent, the first layer's
    # computed.
    assert (
        phases["backward, first layer"]["gradients"] == 4 * 31 * LAYER // 8 + 4 * LAYER + 4 * LAYER
    )
    assert phases["backward, embedding"]["gradients"] == 4 * 32 * LAYER // 8 + 4 * LAYER


def test_a_four_bit_base_is_stored_packed_and_unpacked_for_one_layer():
    packed = LLAMA.with_adapter(AdapterConfig(16, base="nf4"))
    linear = 2 * D * D + 2 * D * KV + 3 * D * F
    # codes, block scales, the scales' scale and offset
    num_bytes = linear // 16384 * (8192 + 256 + 16)
    assert packed.packed_layer == (linear, num_bytes)
    plain, small = (
        dict(gpu_phases(shape, LAYOUT, H100, StepShape(2**17)))["forward"]
        for shape in (ADAPTED, packed)
    )
    saved = plain["parameters"] - small["parameters"]
    # the last norm belongs to no layer
    assert saved == pytest.approx(32 * (2 * linear - num_bytes) / 8, rel=1e-5)
    # Two layers are gathered packed, and one of them is unpacked.
    assert (
        plain["layer weights"] - small["layer weights"] == 2 * (2 * linear - num_bytes) - 2 * linear
    )
    kept = LLAMA.with_adapter(
        AdapterConfig(16, base="nf4", unquantized=("down_proj", "mlp.up_proj"))
    )
    assert kept.packed_layer[0] == linear - 2 * D * F


def test_a_four_bit_base_is_suggested_where_it_fits():
    space = SearchSpace(
        find_shape("llama3-70b"), replace(parse_gpus("1xH200"), host_bytes=512 * 10**9)
    )
    assert space.adapter_that_fits(StepShape(2**17)) == {"rank": 16}
    assert space.adapter_that_fits(StepShape(360 * 2**10)) == {"rank": 16, "base": "nf4"}
    adapted = replace(space, shape=space.shape.with_adapter(AdapterConfig(16)))
    assert adapted.adapter_that_fits(StepShape(360 * 2**10)) == {"base": "nf4"}
    assert adapted.adapter_that_fits(StepShape(2**20)) == {}


def test_a_four_bit_base_is_suggested_along_with_dropping_settings():
    kept = ["--set", "memory.offload=none", "--set", "memory.offload_optimizer=false"]
    args = ["plan", "llama3-8b", "--gpus", "1xRTX4090", "--context", "16K", "--adapter", "8", *kept]
    fixes = json.loads(run(*args, "--json", code=3))["ways_out"]
    assert fixes["--set"] == "adapter.base=nf4" and fixes["without"] == "--set"
    text = run(*args, code=3)
    assert "--set adapter.base=nf4" in text and "without --set" in text


def test_a_saved_module_is_trained_in_full():
    saving = LLAMA.with_adapter(AdapterConfig(16, modules_to_save=("lm_head", "embed_tokens")))
    assert saving.num_trained == 32 * LAYER + 2 * V * D
    assert saving.shards(1) == (saving.num_trained, LLAMA.num_parameters - 2 * V * D)
    full, part = (
        dict(gpu_phases(shape, LAYOUT, H100, StepShape(2**17))) for shape in (LLAMA, saving)
    )
    assert full["loss"]["loss tile"] == part["loss"]["loss tile"]
    arrived = [phases["backward, embedding"]["gradients"] for phases in (full, part)]
    assert arrived[0] - arrived[1] == pytest.approx(
        4 * 32 * (LLAMA.measured.parameters - LAYER) / 8, rel=1e-6
    )
    tied = find_shape("llama3.2-1b")
    for name in ("lm_head", "embed_tokens"):
        one = tied.with_adapter(AdapterConfig(16, modules_to_save=(name,)))
        assert (
            one.num_trained - one.with_adapter(AdapterConfig(16)).num_trained
            == tied.vocab * tied.hidden
        )
        assert one.first_trained == 0
    assert LLAMA.with_adapter(AdapterConfig(8, targets=("lm_head",))).num_trained == 8 * (V + D)


def test_frozen_weights_cost_no_weight_gradient_time():
    linear, frozen = (LayerSeconds(shape, LAYOUT, H100, 2**17) for shape in (LLAMA, ADAPTED))
    flops = 2 * 2**17 * (3 * D * F + D * D)  # weight gradients of the MLP and the output projection
    sums = 15 * 2 * 4 * LLAMA.mlp_parameters / H100.gpu.memory_bytes_s
    # extra reads and writes: q, o; k, v; MLP
    elements = 2 * 4 * (D + D) + 2 * 4 * (D + KV) + 3 * 4 * (D + F)
    extra_s = 2 * 2**17 * elements / H100.gpu.memory_bytes_s
    saved = flops / (H100.gpu.matmul_flops * LAYER_SHARE) + sums
    assert linear.mlp(True) - frozen.mlp(True) == pytest.approx(saved - extra_s)
    assert frozen.mlp(False) - linear.mlp(False) == pytest.approx(
        2
        * 2**17
        * (2 * (D + 2 * D) + 2 * (D + 2 * KV) + 2 * (D + 2 * F) + (F + 2 * D))
        / H100.gpu.memory_bytes_s
    )
    full, adapted = (
        step_seconds(shape, LAYOUT, H100, StepShape(2**20)) for shape in (LLAMA, ADAPTED)
    )
    assert adapted.attention == full.attention and adapted.linear < full.linear
    assert adapted.update == pytest.approx(full.update * ADAPTED.num_trained / LLAMA.num_parameters)


def test_layers_below_the_first_adapter_have_no_backward_and_keep_nothing():
    assert TOP.first_trained == 30 and TOP.num_trained == 2 * 16 * 2 * D
    seconds = [
        sum(
            part.total
            for part in layer_seconds(TOP, LAYOUT, H100, StepShape(2**17), TOP.mixers[0], KEEPS)[:n]
        )
        for n in (1, 2)
    ]
    lowest = replace(
        TOP, adapter=AdapterConfig(16, targets=("0.self_attn.q_proj", "1.self_attn.q_proj"))
    )
    more = [step_seconds(shape, LAYOUT, H100, StepShape(2**17)).total for shape in (lowest, TOP)]
    assert more[0] - more[1] == pytest.approx(30 * (seconds[1] - seconds[0]))
    kept = [
        build_ledger(shape, LAYOUT, H100, StepShape(2**17)).host["layer inputs"]
        for shape in (lowest, TOP)
    ]
    assert kept[0] == 16 * kept[1]
    saving = replace(TOP, adapter=replace(TOP.adapter, modules_to_save=("embed_tokens",)))
    assert saving.first_trained == 0, "the embedding's gradient comes through every layer"


def test_targets_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match="adapter.targets=32.self_attn.q_proj .*use .*q_proj"):
        LLAMA.with_adapter(AdapterConfig(16, targets=("q_proj", "32.self_attn.q_proj")))
    with pytest.raises(ConfigError, match="adapter.targets=mlp.q_proj"):
        LLAMA.with_adapter(AdapterConfig(16, targets=("mlp.q_proj",)))
    with pytest.raises(ConfigError, match="adapter.targets=lm_head .*modules_to_save"):
        find_shape("llama3.2-1b").with_adapter(AdapterConfig(16, targets=("lm_head",)))


def test_plan_reports_what_freezing_saves():
    arguments = [
        *ARGS,
        "--adapter",
        "16",
        "--set",
        "parallel.cp=8",
        "--set",
        "parallel.heads_per_stage=8",
    ]
    fewer = [*arguments, "--set", "adapter.targets=[q_proj, v_proj]"]
    adapter_json = json.loads(run(*fewer, "--json"))["adapter"]
    assert (adapter_json["rank"], adapter_json["trained_parameters"]) == (
        16,
        32 * 16 * (2 * D + D + KV),
    )
    assert adapter_json["frozen_parameters"] == LLAMA.num_parameters
    assert adapter_json["saved_gpu_bytes"] > 9e9 and adapter_json["saved_step_s"] > 1
    assert re.search(
        r"rank 16: 41\.9M .*, 8\.03B frozen; saves [\d.]+ GiB per GPU",
        " ".join(run(*arguments).split()),
    )
    assert yaml.safe_load(run(*fewer, "--yaml"))["adapter"] == {
        "rank": 16,
        "targets": ["q_proj", "v_proj"],
    }
