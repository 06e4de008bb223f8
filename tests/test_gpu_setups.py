"""What tests on a GPU build and call also works on a CPU: their models, batches and layouts, at a
small size.

Nobody has a GPU at every change, so a model that refuses its batch, or a layout that cannot be
made, must show here. Kernels are not run: their tests have counterparts with fake_triton.
"""

import ast
from pathlib import Path

import pytest
import torch

from gpu import test_late_streams, test_model_gpu, test_nccl
from precision import (
    Size,
    bf16_layout,
    initial_model,
    our_gradients,
    parallel_copy,
    random_batch,
    with_adapters,
    with_choices,
)
from ranks import Ranks
from runs import metrics, run
from test_general_precision import GPU_CASES, gpu_case
from threads import run_on_threads

# Has the heads of precision.LARGE, so every number of stages can be made.
TINY = Size(
    heads=32, kv_heads=8, head_dim=2, intermediate=32, vocab=64, window=10, tokens=24, layers=1
)
CPU = torch.device("cpu")
# Tests of tests/gpu that call a model, and the test here, or the unmarked cases there, that do the
# same on a CPU.
SETUPS = {
    "test_any_number_of_stages_is_as_good_as_autocast": "test_every_number_of_stages",
    "test_every_tier_is_as_good_as_autocast": "test_every_tier",
    "test_packed_documents_are_as_good_as_autocast": "unmarked",
    "test_every_family_is_as_good_as_autocast": "test_every_family",
    "test_adapters_are_as_good_as_autocast": "test_every_family",
    "test_backward_chooses_the_experts_of_forward": "test_mixtures",
    "test_mixtures_of_experts_are_as_good_as_autocast": "test_mixtures",
    "test_optimizer_in_host_memory_takes_the_same_step": "test_every_optimizer",
    "test_late_copies_change_no_gradient": "test_layers_of_late_streams",
    "test_late_computation_changes_no_gradient": "test_layers_of_late_streams",
    "test_a_slow_disk_changes_no_gradient": "test_layers_of_late_streams",
    "test_late_exchanges_change_no_gradient": "unmarked",
    "test_all_delays_together_change_no_gradient": "test_layers_of_late_streams",
    "test_a_missing_wait_is_detected": "unmarked",
    "test_missing_waits_are_detected_on_a_gpu": "unmarked",
    "test_every_family_is_as_good_as_autocast_on_four_ranks": "test_four_ranks",
    "test_every_tier_is_as_good_as_autocast_on_four_ranks": "test_four_ranks",
    "test_a_run_on_four_ranks_resumes_bitwise": "test_a_configured_run",
    "test_a_run_on_four_ranks_resumes_on_two": "test_a_configured_run",
    "test_a_rank_that_fails_ends_all_within_a_minute": "test_a_configured_run",
    "test_the_same_command_under_torchrun_resumes_a_run_of_four_ranks_on_two": (
        "test_a_configured_run"
    ),
}


def check(family: str, cp: int, layout, adapted: bool = False) -> None:
    model = initial_model(family, TINY, 0, CPU)
    model = with_adapters(model) if adapted else model
    for name, grad in our_gradients(model, random_batch(TINY, 0, CPU), cp, layout).items():
        assert torch.isfinite(grad).all(), name


@pytest.mark.parametrize("family,sizes", GPU_CASES, ids=[family for family, _ in GPU_CASES])
def test_a_decoder_takes_its_batch(family, sizes):
    """The batch of test_gradients_on_a_gpu_are_as_good_as_those_of_autocast, at its full length."""
    model, batch = gpu_case(family, sizes, CPU)

    def loss() -> float:
        ours = parallel_copy(model, CPU, 1, bf16_layout(2, tile_tokens=256))
        # With gradients: a call that trains is checked more strictly.
        return float(ours(input_ids=batch.ids, labels=batch.ids).loss)

    [result] = run_on_threads(1, loss)
    assert 0 < result < 10


def fast(case: tuple, *of: tuple):
    """Mark a case slow unless it is one of these."""
    return pytest.param(*case, marks=() if case in of else pytest.mark.slow)


@pytest.mark.parametrize(
    "cp,stages", [fast(case.values, (1, 32), (4, 8)) for case in test_model_gpu.STAGES]
)
def test_every_number_of_stages(cp, stages):
    check("llama", cp, bf16_layout(TINY.heads // stages, tile_tokens=TINY.tokens // 3))


@pytest.mark.parametrize("options", [case.values[0] for case in test_model_gpu.TIERS])
def test_every_tier(options):
    check("llama", 2, bf16_layout(TINY.heads // 2, **{"tile_tokens": TINY.tokens // 3, **options}))


@pytest.mark.parametrize(
    "adapted", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "adapted"]
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_every_family(family, adapted):
    layout = bf16_layout(TINY.heads // 2, tile_tokens=TINY.tokens // 3, keep_attention="device")
    check(family, 2, layout, adapted)


@pytest.mark.parametrize("family", test_model_gpu.EXPERTS)
def test_mixtures(family):
    model = initial_model(family, TINY, 0, CPU)
    layout = bf16_layout(TINY.heads // 8, tile_tokens=TINY.tokens // 3)
    gradients, choices = with_choices(model, random_batch(TINY, 0, CPU), 1, layout)
    assert gradients
    assert choices["forward"]


@pytest.mark.parametrize("name", test_model_gpu.OPTIMIZERS)
def test_every_optimizer(name):
    model = initial_model("qwen3", TINY, 0, CPU)
    layout = bf16_layout(
        TINY.heads // 2, tile_tokens=TINY.tokens // 3, kernel="reference", offload_optimizer=True
    )
    make_optimizer = test_model_gpu.OPTIMIZERS[name]
    [steps] = test_model_gpu.after_a_step(
        model, random_batch(TINY, 0, CPU), 1, layout, make_optimizer
    )
    assert steps["before"].keys() == steps["after"].keys()


@pytest.mark.parametrize(
    "layer",
    [
        fast((layer,), (test_late_streams.LAYERS[0],), (test_late_streams.LAYERS[3],))
        for layer in test_late_streams.LAYERS
    ],
    ids=test_late_streams.NAMES,
)
def test_layers_of_late_streams(layer):
    assert test_late_streams.gradients(CPU, 1, **layer)


@pytest.mark.slow
def test_four_ranks():
    ranks = Ranks(4)
    cases = {
        "cp 4, ring 2": test_nccl.GROUPS["cp 4, ring 2"],
        "disk": (2, 1, test_nccl.TIERS["disk"]),
    }
    assert ranks.run(4, test_nccl.compare_with_autocast, "llama", cases)[0] == {}
    ranks.close()


@pytest.mark.slow
def test_a_configured_run(ranks, tmp_path):
    config = test_nccl.configured(tmp_path, steps=2)
    ranks.run(4, run, config)
    assert metrics(config.train.run_dir)[-1]["step"] == 2


def test_every_test_that_calls_a_model_is_listed():
    """A new test in one of these modules needs an entry in SETUPS, and each entry a test that
    exists."""
    here = {name for name in globals() if name.startswith("test_")} | {"unmarked"}
    assert set(SETUPS.values()) <= here
    found = set()
    for module in (test_late_streams, test_model_gpu, test_nccl):
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        found |= {
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"
        }
    assert found == SETUPS.keys()
