"""Frozen parameters get no gradient and everything else stays exact."""

import pytest
from torch import nn

from grids import diagonal
from ithaka.layout import Layout
from ithaka.roots.layer_kinds import describe_layer
from models import tiny_config
from parity import check, compare_with, plain_sum, random_ids

FROZEN = {
    "embedding": lambda name: "embed_tokens" in name,
    "all but the norms": lambda name: "norm" not in name,
    "norms": lambda name: "norm" in name,
    "first layer": lambda name: "embed_tokens" in name or "layers.0" in name,
    "last layer": lambda name: "layers.1" in name,
    "attention": lambda name: "self_attn" in name,
    "all but k and v": lambda name: "k_proj" not in name and "v_proj" not in name,
    "all but the head": lambda name: "lm_head" not in name,
    "mlp": lambda name: "mlp" in name,
    "biases": lambda name: name.endswith("bias"),
}


def compare(frozen, cp, keep_everything):
    ids = random_ids(1, 13)
    config = tiny_config("llama", tie_word_embeddings=False)
    layout = Layout(heads_per_stage=cp, tile_tokens=3, keep_everything=keep_everything)
    return compare_with(
        lambda plain: plain_sum(plain, ids, ids) / 12,
        cp,
        config,
        layout,
        freeze=FROZEN[frozen],
        input_ids=ids,
        labels=ids,
    )


def test_a_layer_with_frozen_parameters_is_probed_separately():
    """The probe compares the gradients of one layer of each kind."""
    layers = [nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(3)]
    layers[1][0].bias.requires_grad_(False)
    same, frozen, other = (describe_layer(layer) for layer in layers)
    assert same == other != frozen


FAST = ("embedding", "all but the norms", "attention", "all but k and v")
CASES = [
    pytest.param(
        *case.values, marks=[*case.marks, *[pytest.mark.slow] * (case.values[0] not in FAST)]
    )
    for case in diagonal(FROZEN, [0, 2])
]


@pytest.mark.parametrize("frozen, keep_everything", CASES)
def test_other_parameters_stay_exact(ranks, frozen, keep_everything):
    check(ranks.run(2, compare, frozen, 2, keep_everything))
