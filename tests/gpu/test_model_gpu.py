"""bf16 gradients of full models are as good as autocast's with fp32 weights.

Cases cover families, stages, ranks, tiers, documents, mixtures of experts and the optimizer in host
memory. A CPU runs a few of them on a small model.
"""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from ithaka.layout import Layout
from models import EXPERTS
from precision import (
    EXPERTS_MEDIAN,
    LARGE,
    ROUTER_SEEDS,
    SEEDS,
    SMALL,
    Choices,
    Yardsticks,
    assert_as_good_as_autocast,
    bf16_layout,
    gradients_with_choices,
    initial_model,
    parallel_copy,
    random_batch,
    with_choices,
)
from threads import run_on_threads

gpu = pytest.mark.gpu
slow_on_cpu = pytest.mark.slow_on_cpu
pytestmark = pytest.mark.xdist_group("large")


@pytest.fixture(scope="session")
def size(device):
    return LARGE if device.type == "cuda" else SMALL


@pytest.fixture(scope="session")
def yardsticks(device, size):
    """Cache only the latest yardstick: tests are ordered by it."""
    return lru_cache(1)(lambda family, **options: Yardsticks(family, size, device, **options))


# cp, stages (of the larger model's 32 heads; 4 on a CPU)
STAGES = [
    pytest.param(1, 1, marks=gpu),
    pytest.param(1, 2, marks=gpu),
    pytest.param(1, 4, marks=gpu),
    pytest.param(1, 8, marks=gpu),
    pytest.param(1, 32, marks=gpu),
    pytest.param(2, 1, marks=gpu),
    pytest.param(2, 2),
    pytest.param(2, 16, marks=gpu),
    pytest.param(4, 8, marks=gpu),
]


@slow_on_cpu
@pytest.mark.parametrize("cp,stages", STAGES)
def test_any_number_of_stages_is_as_good_as_autocast(yardsticks, size, cp, stages):
    yardsticks("llama").check(cp, bf16_layout(size.heads // stages, tile_tokens=size.tokens // 3))


TIERS = [
    pytest.param(
        {"keep_input": "host", "keep_attention": "host", "overlap": True}, id="host", marks=gpu
    ),
    pytest.param({"keep_input": "host", "keep_attention": None, "overlap": False}, id="streamed"),
    pytest.param(
        {"keep_input": "disk", "keep_attention": "disk", "overlap": True}, id="disk", marks=gpu
    ),
    pytest.param(
        {"keep_input": "device", "keep_attention": "device", "overlap": False},
        id="device",
        marks=gpu,
    ),
    pytest.param(
        {"keep_attention": "host", "projections": True}, id="all but the MLP's middle", marks=gpu
    ),
    pytest.param({"checkpoint": False}, id="everything"),
]


@slow_on_cpu
@pytest.mark.parametrize("options", TIERS)
def test_every_tier_is_as_good_as_autocast(yardsticks, size, options):
    yardsticks("llama").check(
        2, bf16_layout(size.heads // 2, **{"tile_tokens": size.tokens // 3, **options})
    )


@slow_on_cpu
@pytest.mark.parametrize(
    "cp,stages", [pytest.param(1, 1, marks=gpu), pytest.param(2, 2), pytest.param(2, 8, marks=gpu)]
)
def test_packed_documents_are_as_good_as_autocast(yardsticks, size, cp, stages):
    yardsticks("llama", packed=True).check(
        cp, bf16_layout(size.heads // stages, tile_tokens=size.tokens // 3)
    )


@pytest.mark.parametrize(
    "cp,stages", [pytest.param(1, 1, marks=gpu), pytest.param(2, 2), pytest.param(2, 8, marks=gpu)]
)
@pytest.mark.parametrize(
    "family",
    [pytest.param("qwen2", marks=gpu), pytest.param("qwen3", marks=gpu), pytest.param("mistral")],
)
def test_every_family_is_as_good_as_autocast(yardsticks, size, family, cp, stages):
    yardsticks(family).check(
        cp, bf16_layout(size.heads // stages, tile_tokens=size.tokens // 3, keep_attention="device")
    )


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"keep_attention": "host"}, id="kept", marks=slow_on_cpu),
        pytest.param({"checkpoint": False}, id="everything", marks=gpu),
    ],
)
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=gpu)])
def test_adapters_are_as_good_as_autocast(yardsticks, size, family, options):
    pytest.importorskip("peft")
    layout = bf16_layout(size.heads // 2, tile_tokens=size.tokens // 3, **options)
    yardsticks(family, adapted=True).check(2, layout)


def num_different(a: Choices, b: Choices) -> int:
    """Return how many tokens, over all layers, go to different experts."""
    assert a.keys() == b.keys() and a
    return sum(
        int((a[name].sort(-1).values != b[name].sort(-1).values).any(-1).sum()) for name in a
    )


@slow_on_cpu
@pytest.mark.parametrize("keep_attention", [pytest.param("device", marks=gpu), None])
@pytest.mark.parametrize(
    "cp,stages",
    [
        pytest.param(1, 4, marks=gpu),
        pytest.param(1, 1, marks=gpu),
        (2, 2),
        pytest.param(2, 8, marks=gpu),
    ],
)
@pytest.mark.parametrize("family", EXPERTS)
def test_backward_chooses_the_experts_of_forward(device, size, family, cp, stages, keep_attention):
    model = initial_model(family, size, 0, device)
    batch = random_batch(size, 0, device)
    layout = bf16_layout(
        size.heads // stages, tile_tokens=size.tokens // 3, keep_attention=keep_attention
    )
    _, choices = with_choices(model, batch, cp, layout)
    for of_layers in choices.values():
        assert len(of_layers) == size.layers
        assert all(len(experts_Sk) == batch.ids.numel() for experts_Sk in of_layers.values())
    assert num_different(choices["forward"], choices["backward"]) == 0


@slow_on_cpu
@pytest.mark.parametrize(
    "cp,stages", [pytest.param(1, 1, marks=gpu), (2, 2), pytest.param(1, 8, marks=gpu)]
)
@pytest.mark.parametrize("family", EXPERTS)
def test_mixtures_of_experts_are_as_good_as_autocast(device, size, family, cp, stages):
    """Autocast and fp64 use the same choice of experts."""
    layout = bf16_layout(size.heads // stages, tile_tokens=size.tokens // 3)
    seeds = ROUTER_SEEDS if device.type == "cuda" else SEEDS[:1]
    gradients = gradients_with_choices(family, size, device, cp, layout, seeds)
    assert_as_good_as_autocast(*gradients, most=EXPERTS_MEDIAN)


def after_a_step(
    model, batch, cp: int, layout: Layout, make_optimizer
) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Return, per rank, its shards of every gradient, and of every weight before and after one
    optimizer step."""

    def work():
        ours = parallel_copy(model, batch.ids.device, cp, layout)
        before = {
            name: param.to_local().detach().cpu().clone() for name, param in ours.named_parameters()
        }
        optimizer = make_optimizer(ours.parameters())
        ours(input_ids=batch.ids, labels=batch.ids).loss.backward()
        homes = {param.to_local().device.type for param in ours.parameters()}
        assert homes == {"cpu" if layout.offload_optimizer else batch.ids.device.type}
        grads = {name: param.grad.to_local().cpu() for name, param in ours.named_parameters()}
        optimizer.step()
        after = {name: param.to_local().detach().cpu() for name, param in ours.named_parameters()}
        return {"before": before, "gradient": grads, "after": after}

    return run_on_threads(cp, work)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1.0),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
}


@slow_on_cpu
@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=gpu), "adamw"])
@pytest.mark.parametrize("cp", [pytest.param(1, marks=gpu), 2])
def test_optimizer_in_host_memory_takes_the_same_step(device, size, cp, optimizer):
    """Gradients are bitwise equal with a kernel that always adds in the same order; weights may
    differ in the last bits, which a CPU and a GPU may round differently.
    """
    model = initial_model("qwen3", size, 0, device)
    batch = random_batch(size, 0, device)
    layout = bf16_layout(size.heads // 2, tile_tokens=size.tokens // 3, kernel="reference")
    plain = after_a_step(model, batch, cp, layout, OPTIMIZERS[optimizer])
    host = after_a_step(
        model, batch, cp, replace(layout, offload_optimizer=True), OPTIMIZERS[optimizer]
    )
    for a, b in zip(plain, host, strict=True):
        assert a["after"].keys() == b["after"].keys()
        for name, before in a["before"].items():
            assert torch.equal(before, b["before"][name])
            assert torch.equal(a["gradient"][name], b["gradient"][name]), name
            assert not torch.equal(before, a["after"][name]), name
            torch.testing.assert_close(b["after"][name], a["after"][name], rtol=5e-7, atol=5e-9)
