"""assert_as_good_as_autocast accepts autocast-like noise and rejects wrong gradients."""

import copy
from statistics import median

import pytest
import torch

from precision import (
    SEEDS,
    SMALL,
    assert_as_good_as_autocast,
    autocast_gradients,
    bf16_layout,
    error_ratios,
    exact_gradients,
    initial_model,
    kind_of,
    our_gradients,
    random_batch,
    round_residual_stream,
)

NOISE = 0.015  # relative, like autocast's on these models


@pytest.fixture(scope="module")
def exact():
    device = torch.device("cpu")
    return [
        exact_gradients(
            initial_model("qwen3", SMALL, seed, device), random_batch(SMALL, seed, device)
        )
        for seed in SEEDS
    ]


def noisy(gradients, seed, size=NOISE):
    generator = torch.Generator().manual_seed(seed)
    noisy_gradients = []
    for seed_gradients in gradients:
        noise = {
            name: torch.randn(g.shape, generator=generator, dtype=g.dtype)
            for name, g in seed_gradients.items()
        }
        noisy_gradients.append(
            {
                name: g + size * g.norm() * noise[name] / noise[name].norm()
                for name, g in seed_gradients.items()
            }
        )
    return noisy_gradients


def test_noise_like_autocasts_passes(exact):
    assert_as_good_as_autocast(noisy(exact, 1), noisy(exact, 2), exact)
    assert_as_good_as_autocast(noisy(exact, 1, 1.1 * NOISE), noisy(exact, 2), exact)


CORRUPTIONS = {
    "zero": torch.zeros_like,
    "not a number": lambda g: g * float("nan"),
    "half": lambda g: g / 2,
    "twice": lambda g: g * 2,
    "opposite": lambda g: -g,
    "two heads exchanged": lambda g: g.unflatten(0, (-1, SMALL.head_dim))[
        [1, 0, *range(2, len(g) // SMALL.head_dim)]
    ].flatten(0, 1),
    "rows shifted by one": lambda g: g.roll(1, 0),
    "one row lost": lambda g: torch.cat([torch.zeros_like(g[:1]), g[1:]]),
}
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize("wrong", CORRUPTIONS)
@pytest.mark.parametrize(
    "name",
    [K_PROJ, "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"],
)
def test_one_wrong_gradient_of_one_seed_fails(exact, name, wrong):
    ours = noisy(exact, 1)
    ours[2] = {**ours[2], name: CORRUPTIONS[wrong](ours[2][name])}
    with pytest.raises(AssertionError, match=kind_of(name)):
        assert_as_good_as_autocast(ours, noisy(exact, 2), exact)


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.0.self_attn.q_norm.weight",
    ],
)
@pytest.mark.parametrize("wrong", ["zero", "rows shifted by one", "half"])
def test_a_wrong_norm_fails(exact, name, wrong):
    ours = noisy(exact, 1)
    ours[0] = {**ours[0], name: CORRUPTIONS[wrong](ours[0][name])}
    with pytest.raises(AssertionError, match=kind_of(name)):
        assert_as_good_as_autocast(ours, noisy(exact, 2), exact)


def test_gradients_of_a_sequence_shifted_by_one_token_fail(exact):
    """If labels or positions are off by one, every kind of parameter fails."""
    device = torch.device("cpu")
    batches = [random_batch(SMALL, seed, device) for seed in SEEDS]
    shifted = [
        exact_gradients(initial_model("qwen3", SMALL, seed, device), type(b)(b.ids.roll(1, 1)))
        for seed, b in zip(SEEDS, batches, strict=True)
    ]
    with pytest.raises(AssertionError) as failure:
        assert_as_good_as_autocast(shifted, noisy(exact, 2), exact)
    assert all(kind in str(failure.value) for kind in error_ratios(exact, exact, exact))


def test_a_quarter_more_noise_fails_on_a_gpu(exact, monkeypatch):
    monkeypatch.setattr("precision.CPU_MEDIAN", 1.15)
    monkeypatch.setattr("precision.CPU_WORST", 1.5)
    with pytest.raises(AssertionError, match="median 1.2"):
        assert_as_good_as_autocast(noisy(exact, 1, 1.25 * NOISE), noisy(exact, 2), exact)


def test_an_inaccurate_baseline_is_refused(exact):
    with pytest.raises(AssertionError, match="autocast itself"):
        assert_as_good_as_autocast(noisy(exact, 1), noisy(exact, 2, 1.0), exact)


def test_a_missing_gradient_and_another_shape_fail(exact):
    ours = noisy(exact, 1)
    with pytest.raises(AssertionError):
        assert_as_good_as_autocast([{K_PROJ: ours[0][K_PROJ]}, *ours[1:]], noisy(exact, 2), exact)
    with pytest.raises(AssertionError):
        assert_as_good_as_autocast(
            [{**ours[0], K_PROJ: ours[0][K_PROJ][:1]}, *ours[1:]], noisy(exact, 2), exact
        )
    with pytest.raises(ValueError):
        assert_as_good_as_autocast(ours[:2], noisy(exact, 2), exact)


@pytest.mark.slow  # gpu/test_model_gpu.py compares bf16 with autocast in the default tier too
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_only_the_residual_stream_is_rounded_more_often_than_by_autocast(family):
    """Compares medians over all parameters. If autocast also rounds the residual stream, no
    difference remains."""
    device = torch.device("cpu")
    layout = bf16_layout(SMALL.heads // 2, tile_tokens=SMALL.tokens // 3)
    models = [initial_model(family, SMALL, seed, device) for seed in SEEDS]
    batches = [random_batch(SMALL, seed, device) for seed in SEEDS]
    rounded = [round_residual_stream(copy.deepcopy(model)) for model in models]
    exact, autocast, autocast_rounded, ours = (
        [gradients(model, batch) for model, batch in zip(inputs, batches, strict=True)]
        for inputs, gradients in (
            (models, exact_gradients),
            (models, autocast_gradients),
            (rounded, autocast_gradients),
            (models, lambda model, batch: our_gradients(model, batch, 1, layout)),
        )
    )

    def times(baseline):
        ratios = error_ratios(ours, baseline, exact)
        return median(a / b for errors in ratios.values() for a, b in errors)

    print(
        f"{family}: {times(autocast):.3f} times autocast's error, {times(autocast_rounded):.3f} "
        "rounded alike"
    )
    assert times(autocast) < 1.2
    # up to 1.016; up to 1.037 if the second norm reads a rounded sum
    assert times(autocast_rounded) < 1.03
