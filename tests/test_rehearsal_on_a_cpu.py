"""`ithaka rehearse` on a CPU prints its settings first, reports no GPU times, and refuses what does
not fit."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from decoders import SIZES
from ithaka.checks import rehearse as rehearsal
from ithaka.cli import app
from ithaka.comm.loopback import LoopbackGroup
from ithaka.config import ConfigError
from ithaka.layout import Layout
from ithaka.model.truncate import (
    choose_layers,
    find_representative_layers,
    read_kinds,
    truncate_config,
)
from ithaka.plan.hardware import parse_gpus
from ithaka.plan.models import find_config
from ithaka.plan.search import Plan, SearchSpace, forward_plan
from ithaka.plan.seconds import layer_seconds
from ithaka.plan.shape import StepShape
from ithaka.trace.shapes import find_shape, shape_from_config
from models import tiny_config
from refusals import assert_command_refused

LOSSES = ("cross_entropy", "dpo")


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsal.torch.cuda, "is_available", lambda: False)
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(tiny_config("llama", attention_bias=False, tie_word_embeddings=False).to_dict())
    )
    return file


def rehearse(model, *options: str):
    return CliRunner().invoke(app, ["rehearse", str(model), "--gpus", "2xH100-80GB", *options])


def set_free_memory(monkeypatch, free_bytes: int) -> None:
    monkeypatch.setattr(rehearsal, "available_memory", lambda: free_bytes)


class Started(Exception):
    """Raised where the work would begin."""


def skip_work(monkeypatch) -> None:
    def start(*_, **__):
        raise Started

    monkeypatch.setattr(rehearsal, "rehearse", start)


def test_settings_are_printed_before_the_work(model, monkeypatch):
    skip_work(monkeypatch)
    result = rehearse(model, "--context", "64")
    assert isinstance(result.exception, Started)
    assert (
        result.stdout.startswith("rank 0 of 2xH100-80GB, 64 tokens")
        and "settings: parallel.cp=" in result.stdout
    )
    assert ", memory.overlap=true" in result.stdout  # in the syntax of `--set`
    assert re.search(
        r"\nX: one float32 activation \[\d+ tokens per rank, \d+ hidden\] = \d", result.stdout
    )
    assert "for this CPU, planned times for H100-80GB" in result.stdout


def test_any_rank_can_be_rehearsed(model, monkeypatch):
    ranks = []

    def start(*args):
        ranks.append(args)
        raise Started  # DTensor caches local shapes, which differ between ranks of one process

    monkeypatch.setattr(rehearsal, "start_loopback", start)
    result = rehearse(model, "--context", "64", "--rank", "1")
    assert result.stdout.startswith("rank 1 of 2xH100-80GB") and ranks == [(2, 1)]
    refused = rehearse(model, "--context", "64", "--rank", "2")
    assert (
        refused.exit_code == 2
        and "--rank 2 is not one of the 2 ranks; use 0 to 1" in refused.output
    )


@pytest.mark.parametrize("runs, planned", [("cudnn", "cudnn"), ("fa4", "fa4"), ("cpu", "fa4")])
def test_the_plan_is_for_the_kernel_that_runs(model, monkeypatch, runs, planned):
    """On a CPU, the plan is that of `ithaka plan` for the GPU that --gpus names."""
    kernels = []

    def start(few_config, layout, *_, **__):
        kernels.append(layout.kernel)
        raise Started

    monkeypatch.setattr(rehearsal, "rehearse", start)
    monkeypatch.setattr(rehearsal, "find_kernel", lambda name, kinds: runs)
    options = ["--set", "attention.kernel=cudnn"] if runs == "cudnn" else []
    result = rehearse(model, "--context", "64", *options)
    assert f"attention: kernel {runs}, planned with {planned}\n" in result.stdout
    assert kernels == ["cudnn" if runs == "cudnn" else "auto"]


def test_json_has_the_settings_and_the_phase_of_the_peak(model, monkeypatch):
    monkeypatch.setattr(rehearsal, "MEMORY_ONLY_DOCUMENT", 32)
    answer = json.loads(
        rehearse(model, "--context", "64", "--layers", "1", "--memory-only", "--json").stdout
    )
    ran = {key: answer[key] for key in ("gpus", "context", "layers", "attention_cut_short")}
    assert ran == {"gpus": "2xH100-80GB", "context": 64, "layers": 1, "attention_cut_short": True}
    assert answer["peak_phase"] and (answer["kernel"], answer["planned_kernel"]) == ("cpu", "fa4")


def test_adapters_are_rehearsed(model):
    """Every rehearsed layer has them, even if only a later layer of the model does. The frozen
    vocabulary takes most of the memory."""
    pytest.importorskip("peft")
    model.write_text(json.dumps(json.loads(model.read_text()) | {"vocab_size": 20000}))
    options = ("--gpus", "1xH100-80GB", "--context", "4", "--layers", "1", "--json")
    answer = json.loads(
        rehearse(
            model, *options, "--adapter", "4", "--set", "adapter.targets=[1.mlp.up_proj]"
        ).stdout
    )
    peak = answer["rows"][0]
    assert peak["measured"] == pytest.approx(peak["planned"], rel=0.02)


@pytest.mark.slow
def test_a_reference_is_rehearsed(model):
    """A frozen copy takes memory, and its forward takes time. Rows of a batch are documents."""
    model.write_text(json.dumps(json.loads(model.read_text()) | {"vocab_size": 20000}))
    options = ("--gpus", "1xH100-80GB", "--context", "4", "--batch", "2", "--layers", "1", "--json")
    plain, dpo = (
        json.loads(rehearse(model, *options, "--set", f"loss.type={loss}").stdout)["rows"]
        for loss in LOSSES
    )
    assert dpo[0]["measured"] == pytest.approx(dpo[0]["planned"], rel=0.02)
    assert dpo[0]["measured"] > 1.1 * plain[0]["measured"]
    forward = [
        next(row["planned"] for row in rows if row["what"] == "layer forward")
        for rows in (plain, dpo)
    ]
    assert forward[1] == pytest.approx(2 * forward[0])


def test_an_evaluation_is_rehearsed(model):
    """The parameters and the vocabulary take most of the memory; there are no gradients and no
    optimizer."""
    model.write_text(json.dumps(json.loads(model.read_text()) | {"vocab_size": 20000}))
    options = ("--evaluate", "--context", "2", "--layers", "1", "--json")
    answer = json.loads(rehearse(model, *options).stdout)
    rows = {row["what"]: row for row in answer["rows"]}
    peak = rows["peak without reserve"]
    assert (
        peak["measured"] == pytest.approx(peak["planned"], rel=0.03)
        and answer["peak_phase"] == "loss forward"
    )
    assert rows["layer forward"]["measured"] > 0 and "layer backward" not in rows
    command = ["rehearse", str(model), "--gpus", "2xH100-80GB", "--evaluate"]
    assert_command_refused(
        [*command, "--set", "memory.tile_tokens=64"], "memory.tile_tokens", fix="leave it out"
    )
    assert_command_refused([*command, "--context", "1000M"], "--context 1000M", fix="shorter")


def test_an_evaluation_peaks_as_its_ledger_predicts():
    """Heads take most of the memory. Tiles are small, because the plan assumes a GPU's kernels."""
    sizes = {
        "num_attention_heads": 32,
        "head_dim": 8,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    }
    config = tiny_config("llama", attention_bias=False, **sizes).to_dict()
    plan = forward_plan(shape_from_config(config), parse_gpus("2xH100-80GB"), StepShape(512))
    few = rehearsal.truncate_plan(plan, config, 2, False)
    few = replace(few, layout=replace(few.layout, tile_tokens=16))
    measured = rehearsal.rehearse(config, few.layout, 2, 512, memory_only=True, trains=False)
    planned = few.ledger.gpu_peak - few.ledger.gpu["reserve"]
    assert (
        measured.peak_bytes == pytest.approx(planned, rel=0.05)
        and "/ forward" in measured.peak_phase
    )
    weights = few.ledger.gpu["parameters"] + few.ledger.gpu["layer weights"]
    assert measured.layer_bytes == pytest.approx(measured.peak_bytes - weights, rel=0.05)


def test_an_evaluation_uses_stages_at_long_contexts():
    shape = find_shape("llama3-8b")
    stages = [
        forward_plan(shape, parse_gpus("8xH200"), StepShape(n << 20)).layout.heads_per_stage
        for n in (1, 2)
    ]
    assert stages == [None, 8]


def test_a_memory_only_rehearsal_is_labelled(model):
    options = (
        "--context",
        "64",
        "--layers",
        "1",
        "--memory-only",
        "--set",
        "memory.checkpoint=none",
    )
    result = rehearse(model, *options)
    assert "\npeak in: " in result.stdout and "memory only: " in result.stdout


def test_a_cpu_is_not_reported_as_a_gpu(model):
    result = rehearse(model, "--context", "64")
    assert result.exit_code == 0, result.output
    assert "\npeak without reserve " in result.stdout and "\npeak in: " in result.stdout
    for words in ("GPU peak", "tokens/s per GPU", "step of"):
        assert words not in result.stdout


@pytest.mark.parametrize("memory_only", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_memory_only_rehearsal_reports_no_step_time(memory_only, monkeypatch):
    monkeypatch.setattr(rehearsal, "_on_gpu", lambda: True)
    plan = SearchSpace(find_shape("llama3-8b"), parse_gpus("8xH100")).choose(StepShape(2**20))
    few = rehearsal.truncate_plan(plan, find_config("llama3-8b"), 2, memory_only)
    measured = rehearsal.RehearsalResult(1, 1, 1, "", 0, 0, [[1.0, 2.0]] * 2, 7.0)
    rows = {row["what"]: row for row in rehearsal.compare_with_plan(plan, few, measured)}
    assert ("tokens/s per GPU" in rows) == ("step of 32 layers" in rows) == (not memory_only)
    assert "layer forward" in rows


def test_the_forward_of_all_layers_is_extrapolated_from_few_layers_and_the_loss(monkeypatch):
    monkeypatch.setattr(rehearsal, "_on_gpu", lambda: True)
    plan = forward_plan(find_shape("llama3-8b"), parse_gpus("8xH200"), StepShape(2**20))
    few = rehearsal.truncate_plan(plan, find_config("llama3-8b"), 2, False)
    mixer = few.shape.mixers[0]
    policy = few.layout.layer_policies(2)[0]
    forward, _ = layer_seconds(few.shape, few.layout, few.hardware, few.work, mixer, policy)
    alone_s = forward.total - forward.exchange
    loss_s = plan.step_s - 32 * forward.total  # 128K tokens on each GPU
    assert loss_s == pytest.approx(2 * 2**17 * 4096 * 128256 / 720e12, rel=0.2)
    measured = rehearsal.RehearsalResult(
        1, 1, 1, "", 0, 0, [[alone_s, 0.0]] * 2, 2 * alone_s + loss_s
    )
    rows = {row["what"]: row for row in rehearsal.compare_with_plan(plan, few, measured)}
    assert rows["forward of 32 layers"]["measured"] == pytest.approx(
        rows["forward of 32 layers"]["planned"]
    )


def test_real_exchanges_are_compared_and_divided_by_layers():
    """On one rank of many, exchanges are local copies: their planned seconds are left out."""
    plan = forward_plan(find_shape("llama3-8b"), parse_gpus("8xH200"), StepShape(2**20))
    few = rehearsal.truncate_plan(plan, find_config("llama3-8b"), 2, False)
    (policy, _) = few.layout.layer_policies(2)
    forward, _ = layer_seconds(
        few.shape, few.layout, few.hardware, few.work, few.shape.mixers[0], policy
    )
    result = rehearsal.RehearsalResult(1, 1, 1, "", 0, 0, [[1.0, 0.0]] * 2, 7.0)
    alone, together = (
        {
            row["what"]: row
            for row in rehearsal.compare_with_plan(
                plan, few, replace(result, exchange_s=exchange_s)
            )
        }
        for exchange_s in (None, (3.0, 1.0))
    )
    assert "exchange per layer" not in alone
    assert alone["layer forward"]["planned"] == pytest.approx(forward.total - forward.exchange)
    assert (
        together["layer forward"]["planned"] == pytest.approx(forward.total)
        and forward.exchange > 0
    )
    assert together["exchange per layer"]["measured"] == 1.5
    assert together["exchange per layer"]["planned"] == pytest.approx(forward.exchange)
    assert together["exchange hidden by compute"]["measured"] == 25.0


def test_the_first_pass_of_a_reference_takes_as_long_as_a_forward():
    plan = plan_of("llama3.1-8b")
    with_reference = replace(plan, work=replace(plan.work, reference=True))
    forward, backward = rehearsal._layer_seconds(plan)[0]
    both, same = rehearsal._layer_seconds(with_reference)[0]
    assert (
        both.total == pytest.approx(2 * forward.total)
        and same.total == backward.total > forward.total > 0
    )


def test_bytes_of_a_node_are_shared_by_its_ranks():
    plan = plan_of("llama3.1-8b", "8xH200").with_changes(input_tier="host")
    few = rehearsal.truncate_plan(plan, find_config("llama3.1-8b"), 2, False)
    sizes = few.work.local_tokens(few.layout.cp), few.shape.hidden
    num_bytes = 2 * few.layout.stored_input_bytes(few.layout.layer_policies(2)[0], *sizes)
    result = rehearsal.RehearsalResult(1, 1, 1, "", num_bytes, 0, [[1.0, 2.0]] * 2, 7.0)
    rows = {row["what"]: row for row in rehearsal.compare_with_plan(plan, few, result)}
    host = rows["host, including disk staging"]
    assert host["measured"] > 0 and host["planned"] == pytest.approx(host["measured"])


def test_real_ranks_share_the_memory_of_a_cpu(monkeypatch):
    plan = plan_of("llama3.1-8b")
    few = rehearsal.truncate_plan(plan, find_config("llama3.1-8b"), 2, False)
    set_free_memory(monkeypatch, 2 * few.ledger.gpu_peak)
    monkeypatch.setattr(rehearsal, "_on_gpu", lambda: False)
    rehearsal.check_cpu_memory(few)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="without a GPU"):
        rehearsal.check_cpu_memory(few)


# ---- kinds of layers

KINDS = {
    "gemma-3-27b": {"window of 1024": (0, 52), "full attention": (5, 10)},
    "qwen3.5-9b": {"gated delta rule": (0, 24), "full attention": (3, 8)},
    "olmo-3-32b": {"window of 4096": (0, 48), "full attention": (3, 16)},
    "gpt-oss-20b": {"window of 128, experts": (0, 12), "full attention, experts": (1, 12)},
    "glm-4.5-air": {"full attention": (0, 1), "full attention, experts": (1, 45)},
    "llama3.1-8b": {"full attention": (0, 32)},
    "wan2.1-1.3b": {"full attention": (0, 30)},
}


def plan_of(name: str, gpus: str = "1xH200"):
    shape = find_shape(name)
    return Plan(shape, Layout(), parse_gpus(gpus), StepShape(2**17))


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_layer_is_rehearsed(name):
    """Each kind is represented by its first layer in the model; a single kind by two layers, the
    value of --layers."""
    truncated = rehearsal.truncate_plan(plan_of(name), find_config(name), 2, False)
    first_and_count = {
        kind: (truncated.layers[few[0]], len(layers)) for kind, few, layers in truncated.groups
    }
    assert first_and_count == KINDS[name]
    assert len(truncated.layers) == truncated.shape.num_layers == 2
    assert truncated.shape.mixers == tuple(find_shape(name).mixers[i] for i in truncated.layers)


def test_more_layers_are_those_of_the_most_frequent_kinds():
    kinds = ["window"] * 5 + ["full"] + ["window"] * 5 + ["full"]
    assert [choose_layers(kinds, count) for count in (1, 2, 3)] == [(0, 5), (0, 5), (0, 1, 5)]
    assert choose_layers(kinds, 7) == (0, 1, 2, 3, 4, 5, 6) and choose_layers(kinds, 20) == tuple(
        range(12)
    )


def test_as_many_layers_keep_more_as_of_evenly_spaced_ones_of_each_kind():
    plan = plan_of("gemma-3-27b").with_changes(keep_attention=31, keep_everything=16)
    layout = rehearsal.truncate_plan(plan, find_config("gemma-3-27b"), 5, False).layout
    windowed, full = (
        [i for i, w in enumerate(plan.shape.windows) if bool(w) == is_windowed]
        for is_windowed in (1, 0)
    )
    expected = [windowed[n] for n in (6, 19, 32, 45)] + [full[5]]
    policies = [plan.layout.layer_policies(62)[i] for i in expected]
    assert len(set(policies)) == 3
    assert Counter(layout.layer_policies(5)) == Counter(policies)


def test_a_step_is_extrapolated_by_kind(monkeypatch):
    """Full attention takes 10 times as long as a window, in 10 of 62 layers."""
    monkeypatch.setattr(rehearsal, "_on_gpu", lambda: True)
    plan = plan_of("gemma-3-27b")
    few = rehearsal.truncate_plan(plan, find_config("gemma-3-27b"), 3, False)
    layer_s = [[1.0, 3.0], [2.0, 4.0], [10.0, 40.0]]
    measured = rehearsal.RehearsalResult(1, 1, 1, "", 0, 0, layer_s, 70.0)
    rows = {row["what"]: row for row in rehearsal.compare_with_plan(plan, few, measured)}
    assert rows["step of 62 layers"]["measured"] == pytest.approx(70 - 60 + 52 * 5 + 10 * 50)
    window, full = few.shape.mixer_kinds
    for kind, mixer, seconds in (
        ("window of 1024 (52", window, (1.5, 3.5)),
        ("full attention (10", full, (10.0, 40.0)),
    ):
        planned = layer_seconds(
            few.shape, few.layout, few.hardware, few.work, mixer, few.layout.layer_policies(1)[0]
        )
        for i, direction in enumerate(("forward", "backward")):
            row = rows[f"layer {direction}, {kind} of 62 layers)"]
            assert (row["planned"], row["measured"]) == (
                pytest.approx(planned[i].total),
                seconds[i],
            )


def test_only_parameters_of_rehearsed_layers_are_counted():
    """GLM-4.5's first layer is dense and has far fewer parameters than the others."""
    config = find_config("glm-4.5-air")
    truncated = rehearsal.truncate_plan(plan_of("glm-4.5-air"), config, 2, False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            truncate_config(AutoConfig.for_model(**config), truncated.layers)
        )
    assert truncated.shape.num_parameters == sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize(
    "family, changes, layers",
    [
        ("deepseek_v3", {"first_k_dense_replace": 3}, (0, 3)),
        ("qwen2_moe", {"decoder_sparse_step": 1, "mlp_only_layers": [0, 1]}, (0, 2)),
        # computed from the index
        ("qwen2_moe", {"decoder_sparse_step": 3, "mlp_only_layers": []}, (0, 1, 2)),
        ("gemma3_text", {"layer_types": None}, (0, 5)),
        ("smollm3", {"layer_types": None}, (0, 3)),  # without positions
        ("gemma4_text", {"global_head_dim": 32, "layer_types": None}, (0, 5)),
    ],
)
def test_a_truncated_configuration_has_a_layer_of_each_kind(family, changes, layers):
    config = AutoConfig.for_model(family, **SIZES | {"num_hidden_layers": 6} | changes)
    kinds, chosen = find_representative_layers(config, 2)
    assert chosen == layers
    again = AutoConfig.for_model(**truncate_config(config, chosen).to_dict())
    assert read_kinds(again) == [kinds[i] for i in chosen] and {*read_kinds(again)} == {*kinds}


def test_a_layer_of_each_kind_runs(model):
    config = tiny_config(
        "qwen2", num_hidden_layers=4, max_window_layers=3, tie_word_embeddings=False
    )
    model.write_text(json.dumps(config.to_dict()))
    result = rehearse(model, "--context", "64", "--layers", "1")
    assert result.exit_code == 0, result.output
    window = f"window of {config.sliding_window} (1 of 4 layers)"
    assert f"\nlayer 0: full attention (3 of 4 layers)\nlayer 3: {window}\n" in result.stdout
    for row in ("layer forward, full attention (3 of 4 layers)", f"layer backward, {window}"):
        assert re.search(rf"\n{re.escape(row)} +\S+ +[0-9.e-]+ +s", result.stdout), row


def test_a_rehearsal_that_exceeds_free_memory_is_refused(model, monkeypatch):
    skip_work(monkeypatch)
    set_free_memory(monkeypatch, 2**22)
    arguments = ["rehearse", str(model), "--gpus", "2xH100-80GB", "--context", "1M"]
    assert_command_refused(
        arguments, "--context 1048576", "with 2 layers", fix="shorter --context or fewer --layers"
    )
    assert isinstance(rehearse(model, "--context", "64").exception, Started)


class CountWrites(TorchDispatchMode):
    """Counts the operations that write to a tensor."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.is_mutable
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sent", [0, 1, 3, 64, 5000])
@pytest.mark.parametrize("received", [0, 1, 64, 4096])
def test_a_loopback_round_writes_a_few_times_however_many_rows_it_receives(sent, received):
    """What it receives is finite, nonzero and initialized."""
    torch.manual_seed(0)
    own = torch.randn(sent, 2, 4)
    output = torch.full((received, 2, 4), torch.nan)
    with CountWrites() as writes:
        LoopbackGroup(0, 2).all_to_all_single(output, own, [0, received], [0, sent])
    assert writes.count <= 2
    assert output.isfinite().all() and (output != 0).all()
    if sent:
        assert torch.equal(output, own[torch.arange(received) % sent])
    else:
        assert len(output.unique()) >= 0.99 * output.numel()
