"""Bfloat16 kernels of Mamba2's scan match the plain one in float64: outputs, states, maps and
gradients."""

import pytest
import torch

from ithaka.ops import scan, ssd
from ithaka.ops.ssd import Ssd, SsdInputs
from ithaka.ops.state_graph import LocalDocs
from parity import relative

TOKENS = 700
STARTS = {
    "one document": (0, 3 * TOKENS),
    "packed": tuple(
        TOKENS + start for start in (-TOKENS, -1, 5, 63, 64, 65, 130, 256, 449, 699, 2 * TOKENS)
    ),
}
TOLERANCE = 4e-3  # TF32 products, states of chunks in 16 bits, and one rounding of results
SHAPES = {  # groups, heads, size of the state, head dim
    "nemotron-3-nano": (8, 64, 128, 64),
    "granite-4-h-small": (1, 128, 128, 64),
    "falcon-h1-7b": (1, 24, 256, 128),
    "nemotron-nano-9b": (8, 128, 128, 80),
    "small": (2, 6, 24, 32),
}


@pytest.mark.gpu
@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_match_the_plain_scan(starts, shape, monkeypatch):
    monkeypatch.setattr(scan, "SEGMENT_ROWS", 128 * SHAPES[shape][1])  # several segments
    check(LocalDocs(STARTS[starts], TOKENS, TOKENS, 1, "cuda"), *SHAPES[shape])


def check(docs: LocalDocs, J: int, H: int, K: int, V: int, device: str = "cuda"):
    s = docs.num_tokens
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    q, k, v, dout = (
        t.bfloat16() for t in (draw(s, J, K), draw(s, J, K) / K**0.5, draw(s, H, V), draw(s, H, V))
    )
    dt = draw(s, H).exp()
    skip = draw(H)
    state = draw(H, K, V)
    dstate = draw(H, K, V)
    # Some heads forget within a few tokens, others carry their state across all of them.
    g = -torch.logspace(-4, 0, H, device=device) * dt
    by_dtype = []
    (piece,) = docs.pieces
    for dtype in (None, torch.float64):
        inputs = SsdInputs(*(t.to(dtype, copy=True) for t in (q, k, v, g, dt)))
        own_skip, initial, dy, dlast = (t.to(dtype) for t in (skip, state, dout, dstate))
        rule = Ssd(inputs, docs, own_skip, torch.zeros_like(own_skip))
        segment = rule._segment(rule.segments(piece)[0])
        assert type(segment) is (ssd.FusedSsdSegment if dtype is None else ssd.SsdSegment)
        results = {"map": rule.summarize(), "gradient's map": rule.summarize_grad(dy)}
        results["out"], states = rule.forward(
            {} if piece.source is None else {piece.source: initial}
        )
        results["states"] = states[1:]
        results |= {
            f"state {place}": t
            for place, t in rule.backward(states, dy, {piece.stop: dlast}).items()
        }
        by_dtype.append(results | inputs._asdict() | {"D": rule.dskip_H})
    ours, exact = by_dtype
    errors = {
        name: relative(ours[name].double(), exact[name]) for name in ours if exact[name].any()
    }
    too_large = {name: error for name, error in errors.items() if not error < TOLERANCE}
    assert not too_large, f"{too_large} of {errors}"
