"""Bfloat16 kernels of the gated delta rule match the plain rule in float64: outputs, states, maps
and gradients."""

import pytest
import torch

from ithaka.ops import delta_rule, scan
from ithaka.ops.delta_rule import DeltaInputs, DeltaRule
from ithaka.ops.state_graph import LocalDocs
from parity import relative

TOKENS = 700
STARTS = {
    "one document": (0, 3 * TOKENS),
    "starts here": (0, TOKENS, 3 * TOKENS),
    "packed": tuple(
        TOKENS + start for start in (-TOKENS, -1, 5, 63, 64, 65, 130, 256, 449, 699, 2 * TOKENS)
    ),
}
TOLERANCE = 4e-3  # TF32 products, and one rounding of 16-bit results


@pytest.fixture(autouse=True)
def own_kernels(monkeypatch):
    monkeypatch.setattr(delta_rule, "_can_run_fla", lambda v: False)


@pytest.mark.gpu
@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("key_heads", [16, 32])
@pytest.mark.parametrize("normalizes", [True, False])
def test_kernels_match_the_plain_rule(starts, key_heads, normalizes, monkeypatch):
    monkeypatch.setattr(scan, "SEGMENT_ROWS", 256 * 32)  # several segments
    check(
        LocalDocs(STARTS[starts], TOKENS, TOKENS, 1, "cuda"),
        (key_heads, 32),
        (128, 128),
        normalizes,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 128), (96, 192), (32, 64)])
def test_kernels_match_the_plain_rule_at_other_head_dims(dims):
    check(LocalDocs(STARTS["packed"], TOKENS, TOKENS, 1, "cuda"), (2, 4), dims, True)


@pytest.mark.gpu
def test_kernels_match_the_plain_rule_for_repeated_keys():
    """Repeated keys overwrite each other: the powers of such a system overflow, its inverse does
    not."""
    docs = LocalDocs(STARTS["one document"], TOKENS, TOKENS, 1, "cuda")
    check(docs, (2, 4), (128, 128), True, repeats=True)


def check(
    docs: LocalDocs,
    heads: tuple[int, int],
    dims: tuple[int, int],
    normalizes: bool,
    device: str = "cuda",
    repeats=False,
):
    (J, H) = heads
    (K, V) = dims
    s = docs.num_tokens
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    q, k, v, dout = (draw(s, n, dim).bfloat16() for n, dim in ((J, K), (J, K), (H, V), (H, V)))
    if repeats:
        k[1:] = k[:1]
    if not normalizes:
        k = k / K**0.5
    # Some heads forget within a few tokens, others carry their state across all of them.
    g = -torch.logspace(-4, 0, H, device=device) * draw(s, H).exp()
    beta = draw(s, H).sigmoid()
    state = draw(H, K, V)
    dstate = draw(H, K, V)
    by_dtype = []
    for dtype in (None, torch.float64):
        inputs = DeltaInputs(*(t.to(dtype, copy=True) for t in (q, k, v, g, beta)))
        rule = DeltaRule(inputs, docs, normalizes)
        initial, dy, dlast = (t.to(dtype) for t in (state, dout, dstate))
        (piece,) = docs.pieces
        segment = rule._segment(rule.segments(piece)[0])
        assert type(segment) is (
            delta_rule.FusedDeltaSegment if dtype is None else delta_rule.DeltaSegment
        )
        results = {"map": rule.summarize(), "gradient's map": rule.summarize_grad(dy)}
        results["out"], states = rule.forward(
            {} if piece.source is None else {piece.source: initial}
        )
        results["states"] = states[1:]
        results |= {
            f"state {place}": t
            for place, t in rule.backward(states, dy, {piece.stop: dlast}).items()
        }
        by_dtype.append(results | dict(zip(("q", "k", "v", "g", "beta"), inputs, strict=True)))
    ours, exact = by_dtype
    errors = {
        name: relative(ours[name].double(), exact[name]) for name in ours if exact[name].any()
    }
    too_large = {name: error for name, error in errors.items() if not error < TOLERANCE}
    assert not too_large, f"{too_large} of {errors}"
