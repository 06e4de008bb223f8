"""Every YAML setting of memory, parallelism and attention changes what the layers do."""

import tempfile
from itertools import product
from pathlib import Path

import pytest
import torch
import yaml
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from allocations import bytes_now
from ithaka.attention import kernels
from ithaka.comm.mesh import make_mesh
from ithaka.config import parse_config
from ithaka.layer import ring
from ithaka.layer.passes import LayerPasses
from ithaka.layer.store import Store
from ithaka.layout import layout_from_config
from ithaka.mixers.softmax import SoftmaxMixer
from ithaka.model import build
from ithaka.profile.live import LiveBytes
from ithaka.train.prepare import prepare
from models import tiny_config
from parity import random_ids
from runs import tiny_run, validate

CPU = torch.device("cpu")


def run_step(text: str):
    """Run a step with YAML settings; return the model and the bytes kept for backward, on the
    device and off it."""
    config = parse_config(yaml.safe_load(text) or {})
    layout = layout_from_config(config, 2, 1, on_gpu=False)
    store = Store(CPU, disk_path=config.memory.disk_path)
    model = build.build_model(tiny_config("llama").to_dict(), make_mesh(1), layout, store=store)
    ids = random_ids(1, 24)
    with LiveBytes() as live:
        loss = model(input_ids=ids, labels=ids).loss
        kept_bytes = bytes_now(live)
        store = model.model.layers[0].forward.store
        held = (store.pool.busy_bytes, store.disk.busy_bytes)
        loss.backward()
    return model, kept_bytes, held


def test_heads_per_stage_makes_stages():
    def num_stages(value):
        model, *_ = run_step(f"parallel: {{heads_per_stage: {value}}}")
        return len(model.model.layers[0].forward.mixer.mixers[0].table.stages)

    assert [num_stages(value) for value in ("all", 4, 2, 1)] == [1, 1, 2, 4]


@pytest.mark.parametrize(
    "tokens, rows",
    [("all", {24}), (5, {5, 4}), *(pytest.param(n, {n}, marks=pytest.mark.slow) for n in (24, 8))],
)
def test_tile_tokens_cuts_tiles(tokens, rows, monkeypatch):
    tile_lengths = {"capture": set(), "resume": set()}
    for name, lengths in tile_lengths.items():
        method = getattr(LayerPasses, name)

        def record(self, tile, *args, method=method, lengths=lengths):
            if self.name.startswith("layer "):  # not in the probe
                lengths.add((len(tile), torch.is_grad_enabled()))
            return method(self, tile, *args)

        monkeypatch.setattr(LayerPasses, name, record)
    run_step(f"memory: {{tile_tokens: {tokens}}}")
    in_both = set(product(rows, (False, True)))  # forward and backward
    assert tile_lengths == {"capture": in_both, "resume": in_both}


@pytest.mark.parametrize(
    "kept, num_kept", [("none", 0), pytest.param(0, 0, marks=pytest.mark.slow), (1, 1), ("all", 2)]
)
def test_keep_attention_saves_attention(kept, num_kept, monkeypatch):
    calls = []
    attend = SoftmaxMixer._attend_heads

    def record(self, *args):
        calls.extend([1] * self.layer.name.startswith("layer "))  # not in the probe
        return attend(self, *args)

    monkeypatch.setattr(SoftmaxMixer, "_attend_heads", record)
    run_step(f"memory: {{keep_attention: {kept}}}")
    assert len(calls) == 2 + (2 - num_kept), (
        "once per layer in forward, and again where it was not kept"
    )


def test_offload_moves_kept_activations():
    x_bytes = 2 * 24 * 32 * 4
    kept = {
        tier: run_step(f"memory: {{offload: {tier}}}")[1:3] for tier in ("none", "host", "disk")
    }
    assert {tier: held for tier, (_, held) in kept.items()} == {
        "none": (0, 0),
        "host": (x_bytes, 0),
        "disk": (kept["disk"][1][0], x_bytes),
    }
    # Nothing else references the outputs of the embedding and the first layer.
    assert kept["none"][0] - kept["host"][0] == kept["none"][0] - kept["disk"][0] == x_bytes


def test_offload_also_moves_attentions_output():
    held = run_step("memory: {offload: host, keep_attention: 1}")[2]
    assert held == (2 * 24 * 32 * 4 + 24 * (32 + 4) * 4, 0)
    rounded = run_step("memory: {offload: host, keep_attention: 1, stored_dtype: float8}")[2]
    # One scale per row. The layer that keeps attention keeps log-sum-exps and its input in fp32.
    assert rounded == (24 * (32 + 1) + 24 * 32 * 4 + 24 * (32 + 1 + 4 * 4), 0)


def test_layers_keep_what_the_settings_name():
    """Each additional layer keeps q, k and v, or what backward needs of the passes after attention,
    of 24 tokens."""

    def kept(words: str) -> int:
        return run_step(f"memory: {{{words}}}")[1]

    attended = kept("keep_attention: all")
    none = kept("checkpoint: none")
    projected = [kept(f"keep_attention: all, keep_projections: {n}") for n in (1, "all")]
    half = kept("keep_projections: all, checkpoint: 1")
    values = [more // (24 * 4) for more in (projected[0] - attended, projected[1] - projected[0])]
    assert values == [32 + 2 * 16] * 2
    # The graph of a resume pass, besides attention's output: its sum with x, the norm of that, gate
    # and up.
    assert half - projected[1] == none - half == 24 * 4 * (2 * 32 + 2 * 40)


def test_disk_path_is_the_folder_of_the_file(tmp_path, monkeypatch):
    made = []
    temporary = tempfile.TemporaryFile
    monkeypatch.setattr(
        tempfile, "TemporaryFile", lambda dir: made.append(Path(dir)) or temporary(dir=dir)
    )
    run_step(f"memory: {{offload: disk, disk_path: {tmp_path}}}")
    assert made == [tmp_path]


def test_attention_settings_reach_attention(monkeypatch):
    calls = []
    attention = ring.attention
    monkeypatch.setattr(ring, "attention", lambda *a, **k: calls.append(k) or attention(*a, **k))
    run_step("attention: {kernel: reference, block_q: 8, block_kv: 6}")
    assert {(call["kernel"].name, call["blocks"]) for call in calls if call["blocks"]} == {
        ("reference", (8, 6))
    }
    run_step("{}")
    assert calls[-1]["kernel"].name != "reference" and calls[-1]["blocks"] is None  # decided once


@pytest.mark.slow  # test_compiled_mlp.py compiles too
def test_compile_compiles_both_passes_of_each_layer(monkeypatch):
    """Forward and backward are traced, but the graph runs eagerly, as generating code needs a C++
    compiler."""
    compiled = []
    graphs = []
    compile_function = torch.compile

    def backend(graph, inputs):
        return aot_autograd(
            fw_compiler=lambda traced, _: graphs.append(traced) or make_boxed_func(traced)
        )(graph, inputs)

    monkeypatch.setattr(
        torch, "compile", lambda f, **_: compiled.append(f) or compile_function(f, backend=backend)
    )
    ids = random_ids(1, 24)
    gradients = []
    for value in ("true", "false"):
        layout = layout_from_config(
            parse_config({"train": {"compile": value == "true"}}), 2, 1, on_gpu=False
        )
        model = build.build_model(tiny_config("llama").to_dict(), make_mesh(1), layout)
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append(
            {name: param.grad.full_tensor() for name, param in model.named_parameters()}
        )
    assert len(compiled) == 2 * 2 and len(graphs) >= 4, "forward alone, and forward with backward"
    for name, grad in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], grad, msg=name)


def test_dtype_is_the_compute_dtype():
    for name in ("float32", "bfloat16", "float64"):
        model, *_ = run_step(f"model: {{dtype: {name}}}")
        assert next(model.parameters()).dtype == (
            torch.float64 if name == "float64" else torch.float32
        )
        assert model(input_ids=random_ids(1, 4)).logits.dtype == getattr(torch, name)


def test_offload_optimizer_sets_fsdps_offload_policy(monkeypatch):
    policies = []
    shard = build.fully_shard

    def record(module, **options):
        policies.append(type(options["offload_policy"]).__name__)
        return shard(module, **options)

    monkeypatch.setattr(build, "fully_shard", record)
    for value, policy in (("true", "CPUOffloadPolicy"), ("false", "OffloadPolicy")):
        run_step(f"memory: {{offload_optimizer: {value}}}")
        assert set(policies) == {policy}
        policies.clear()


@pytest.mark.parametrize("value", [True, False])
def test_deterministic_reaches_pytorch_and_the_kernel(tmp_path, monkeypatch, value):
    passed = []
    monkeypatch.setattr(
        kernels, "_call_fa4", lambda *_, **options: passed.append(options["deterministic"]) or ()
    )
    try:
        prepare(validate(tiny_run(tmp_path, train={"deterministic": value})))
        assert torch.are_deterministic_algorithms_enabled() == value
        ends = torch.tensor([0, 4])
        x = torch.zeros(4, 1, 8)
        kernels.KERNELS["fa4"].varlen.backward(
            x, x, x, x, x, x[..., 0].t(), ends, 4, 1.0, True, None
        )
        kernels.KERNELS["fa4"].backward(*[x[None]] * 5, x[None, ..., 0], 1.0, True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert passed == [value, value]
