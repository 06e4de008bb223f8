"""Loss and every parameter's gradient equal plain Hugging Face's, on 1, 2 and 4 ranks, for every
family."""

import functools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ithaka.comm.mesh import make_mesh
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model
from models import EXPERTS, FAMILIES, plain_loss, tiny_config, tiny_model
from parity import check, relative, shard_errors

STAGED = [  # family, heads, kv heads, cp, heads per stage
    ("llama", 4, 2, 1, 1),
    ("qwen2", 8, 2, 2, 2),
    ("qwen3", 8, 4, 2, 4),
    ("mistral", 9, 3, 2, 2),
    ("qwen2", 7, 1, 4, 4),
    ("llama", 28, 4, 4, 8),
]
TIERS = [("device", None), ("device", "device"), ("host", None), ("host", "host"), ("disk", "disk")]


def batch(config, rows: int, tokens: int):
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(config.vocab_size, (rows, tokens), generator=generator)
    return ids, ids.clone()


@functools.lru_cache(maxsize=8)
def plain_results(family, heads, kv_heads, rows, tokens, ignore_first, changes):
    """Return plain Hugging Face's loss and gradients, which every layout shares; `changes` is
    JSON."""
    config = tiny_config(family, heads, kv_heads, **json.loads(changes))
    ids, labels = batch(config, rows, tokens)
    labels[:, :ignore_first] = -100
    plain = tiny_model(config)
    loss = plain_loss(plain, ids, labels)
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in plain.named_parameters()}


def compare(
    family, heads, kv_heads, cp, dp, rows, tokens, layout=None, ignore_first=0, changes=None
):
    """Run one rank; each data-parallel rank takes its own rows. Returns the worst relative
    errors."""
    config = tiny_config(family, heads, kv_heads, **(changes or {}))
    ids, labels = batch(config, rows * dp, tokens)
    labels[:, :ignore_first] = -100
    as_json = json.dumps(changes or {})
    expected_loss, expected_grads = plain_results(
        family, heads, kv_heads, rows * dp, tokens, ignore_first, as_json
    )

    mesh = make_mesh(cp)
    model = parallelize_model(tiny_model(config), mesh=mesh, layout=layout)
    mine = slice(mesh.dp_rank * rows, (mesh.dp_rank + 1) * rows)
    out = model(input_ids=ids[mine], labels=labels[mine])
    out.loss.backward()

    assert out.num_tokens == int((labels[:, 1:] != -100).sum())
    return {
        "loss": relative(out.loss.detach(), expected_loss),
        **shard_errors(model, expected_grads),
    }


@pytest.mark.parametrize(
    "family,cp,dp",
    [
        *((family, 2, 2) for family in FAMILIES if family != "qwen2"),
        ("llama", 1, 1),
        ("mistral", 4, 1),
        *(
            pytest.param(family, 1, 1, marks=pytest.mark.slow)
            for family in FAMILIES
            if family != "llama"
        ),
        *(
            pytest.param(family, 4, 1, marks=pytest.mark.slow)
            for family in FAMILIES
            if family != "mistral"
        ),
        *(pytest.param("qwen2", 2, dp, marks=pytest.mark.slow) for dp in (1, 2)),
        pytest.param("qwen3", 1, 2, marks=pytest.mark.slow),
    ],
)
def test_every_family_matches_hugging_face(ranks, family, cp, dp):
    check(ranks.run(cp * dp, compare, family, 4, 2, cp, dp, 2, 19))


@pytest.mark.parametrize(
    "cp,heads,kv_heads",
    [
        *((4, *heads) for heads in ((8, 4), (9, 3))),
        (2, 8, 4),
        *(
            pytest.param(4, *heads, marks=pytest.mark.slow)
            for heads in ((8, 8), (8, 2), (8, 1), (5, 5), (7, 1))
        ),
        *(
            pytest.param(2, *heads, marks=pytest.mark.slow)
            for heads in ((8, 8), (8, 2), (8, 1), (9, 3), (5, 5), (7, 1))
        ),
    ],
)
def test_kv_heads_above_equal_and_below_cp(ranks, heads, kv_heads, cp):
    check(ranks.run(cp, compare, "llama", heads, kv_heads, cp, 1, 1, 21))


def test_a_shard_may_have_no_valid_labels(ranks):
    check(ranks.run(4, compare, "llama", 4, 2, 4, 1, 1, 16, None, 9))


def every_pair():
    """Yield each row of STAGED with every tier. Overlap and tiles alternate, so that each occurs
    with every row and tier."""
    for i, row in enumerate(STAGED):
        for j, tiers in enumerate(TIERS):
            yield *row, bool((i + j) % 2), 5 if (i // 2 + j // 2 + i) % 2 else None, *tiers


# Indices into STAGED and TIERS of the default cases: every row and every tier with each overlap and
# each tile size.
BY_DEFAULT = [
    (0, 1),
    (0, 2),
    (1, 0),
    (1, 1),
    (1, 2),
    (2, 3),
    (2, 4),
    (3, 3),
    (3, 4),
    (4, 0),
    (4, 3),
]


def is_slow(case) -> bool:
    return (STAGED.index(case[:5]), TIERS.index(case[7:])) not in BY_DEFAULT


@pytest.mark.parametrize(
    "family,heads,kv_heads,cp,heads_per_stage,overlap,tile_tokens,keep_input,keep_attention",
    [pytest.param(*case, marks=pytest.mark.slow if is_slow(case) else ()) for case in every_pair()],
)
def test_stages_tiles_and_kept_attention_are_exact(
    ranks,
    family,
    heads,
    kv_heads,
    cp,
    heads_per_stage,
    overlap,
    tile_tokens,
    keep_input,
    keep_attention,
):
    layout = Layout(
        cp,
        heads_per_stage,
        tile_tokens,
        input_tier=keep_input,
        keep_attention=0 if keep_attention is None else 2,
        attention_tier=keep_attention or "device",
        overlap=overlap,
    )
    check(ranks.run(cp, compare, family, heads, kv_heads, cp, 1, 1, 21, layout))


def test_default_cases_cover_every_pair():
    cases = list(every_pair())
    for overlap in (True, False):
        for tile_tokens in (None, 5):
            chosen = [case for case in cases if case[5] == overlap and case[6] == tile_tokens]
            assert len({case[7:] for case in chosen}) == len(TIERS)
            assert len({case[:5] for case in chosen}) == len(STAGED)
    chosen = [case for case in cases if not is_slow(case)]
    rows = slice(0, 5)
    overlaps = slice(5, 6)
    tiles = slice(6, 7)
    tiers = slice(7, 9)
    for a, b in (
        (rows, overlaps),
        (rows, tiles),
        (tiers, overlaps),
        (tiers, tiles),
        (overlaps, tiles),
    ):
        pairs = [
            {(case[a], case[b]) for case in each if case[:5] != STAGED[-1]}
            for each in (cases, chosen)
        ]
        assert pairs[0] == pairs[1]


@st.composite
def layouts(draw) -> tuple:
    """Draw (family, heads, kv heads, cp, rows, tokens, layout), with layers that keep different
    activations."""
    kv_heads = draw(st.integers(1, 4))
    group_size = draw(st.integers(1, 4))
    heads = kv_heads * group_size
    cp = draw(st.sampled_from([n for n in (1, 2, 4) if n <= heads]))
    per_rank = draw(st.none() | st.integers(1, -(-heads // cp)))
    tiers = st.sampled_from(["device", "host", "disk"])
    counts = st.integers(0, 2)
    layout = Layout(
        cp,
        heads_per_stage=None if per_rank is None else per_rank * cp,
        tile_tokens=draw(st.none() | st.integers(1, 12)),
        input_tier=draw(tiers),
        keep_inputs=draw(counts),
        keep_attention=draw(counts),
        attention_tier=draw(tiers),
        keep_projections=draw(counts),
        keep_everything=draw(counts),
        overlap=draw(st.booleans()),
    )
    family = draw(st.sampled_from(FAMILIES))
    rows = draw(st.integers(1, 3))
    tokens = draw(st.integers(3, 24))
    return family, heads, kv_heads, cp, rows, tokens, layout


@pytest.mark.parametrize("num_layouts", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_any_layout_is_exact(ranks, num_layouts):
    @settings(max_examples=num_layouts, derandomize=True, deadline=None)
    @given(case=layouts())
    def compare_one(case):
        family, heads, kv_heads, cp, rows, tokens, layout = case
        check(ranks.run(cp, compare, family, heads, kv_heads, cp, 1, rows, tokens, layout))

    compare_one()


@pytest.mark.parametrize(
    "family,heads,kv_heads,cp,heads_per_stage",
    [
        pytest.param(
            *case, marks=[pytest.mark.slow] * (case[:2] not in (("llama", 4), ("qwen3", 8)))
        )
        for case in STAGED
    ],
)
def test_layers_with_different_policies_are_exact(
    ranks, family, heads, kv_heads, cp, heads_per_stage
):
    layout = Layout(
        cp,
        heads_per_stage,
        tile_tokens=5,
        input_tier="host",
        keep_inputs=1,
        keep_projections=2,
        keep_everything=1,
    )
    check(ranks.run(cp, compare, family, heads, kv_heads, cp, 1, 1, 21, layout))


ROPES = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
}


@pytest.mark.parametrize(
    "rope_type",
    ["llama3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("linear", "yarn"))],
)
def test_other_kinds_of_rope_are_exact(ranks, rope_type):
    """Frequencies are lower, and yarn also scales queries and keys. A small theta makes few
    positions enough."""
    rope = {
        "rope_type": rope_type,
        "rope_theta": 100.0,
        "original_max_position_embeddings": 8,
        **ROPES[rope_type],
    }
    changes = {"rope_parameters": rope, "max_position_embeddings": 32}
    layout = Layout(cp=2, heads_per_stage=2, tile_tokens=5, keep_attention=2)
    check(ranks.run(2, compare, "llama", 4, 2, 2, 1, 2, 19, layout, 0, changes))


@pytest.mark.parametrize(
    "family", [EXPERTS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in EXPERTS[1:])]
)
def test_mixtures_of_experts_are_exact(ranks, family):
    layout = Layout(2, heads_per_stage=2, tile_tokens=5, keep_attention=2, keep_everything=1)
    check(ranks.run(2, compare, family, 4, 2, 2, 1, 2, 19, layout))
