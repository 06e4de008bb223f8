"""flash-linear-attention runs the gated delta rule where it computes what ithaka's own code
does."""

import sys
from contextlib import nullcontext
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from ithaka.ops import delta_rule, scan
from ithaka.ops.delta_rule import DeltaInputs, DeltaRule
from ithaka.ops.state_graph import LocalDocs
from parity import relative

TOKENS = 90
KEY_HEADS = 2
HEADS = 4
K = 8
V = 6
STARTS = (0, 7, 8, 9, 31, 32, 60, 90)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Give each rank several chunks and segments."""
    monkeypatch.setattr(scan, "CHUNK_TOKENS", 4)
    monkeypatch.setattr(scan, "SEGMENT_ROWS", 24 * HEADS)


@pytest.mark.parametrize("wrong", [None, "gradient", "error"])
def test_flash_linear_attention_is_used_where_its_gradients_are_right(monkeypatch, wrong):
    """A stub for the kernel computes each document alone with transformers; its gradient may be
    made wrong."""

    def chunk_gated_delta_rule(
        q, k, v, g, beta, *, initial_state, output_final_state, cu_seqlens=None, **options
    ):
        if wrong == "error":
            raise RuntimeError("Triton >= 3.4.0 on Hopper GPUs produces incorrect results")
        outs = []
        states = []
        g = g + (g - g.detach()) * 0.05 if wrong == "gradient" else g
        q, k = (t.repeat_interleave(HEADS // KEY_HEADS, 2) for t in (q, k))
        for (a, b), state in zip(
            pairwise([0, v.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()),
            initial_state,
            strict=True,
        ):
            parts = (t[:, a:b] for t in (q, k, v))
            out, state = torch_chunk_gated_delta_rule(
                *parts,
                g=g[:, a:b],
                beta=beta[:, a:b],
                initial_state=state[None],
                output_final_state=True,
                **options,
            )
            outs.append(out)
            states.append(state)
        return torch.cat(outs, 1), torch.cat(states)

    stub = ModuleType("fla.ops.gated_delta_rule")
    stub.chunk_gated_delta_rule = chunk_gated_delta_rule
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.setattr(delta_rule, "_can_run_fla", lambda v: True)
    delta_rule._try.cache_clear()
    draw = torch.Generator().manual_seed(4)
    sizes = (KEY_HEADS, K), (KEY_HEADS, K), (HEADS, V), (HEADS,), (HEADS,)
    inputs = [torch.randn(TOKENS, *size, generator=draw).bfloat16() for size in sizes]
    rule = DeltaRule(
        DeltaInputs(*inputs[:3], -inputs[3].float().exp(), inputs[4].float().sigmoid()),
        # the last document ends on another rank
        LocalDocs((*STARTS[:-1], 2 * TOKENS), 0, TOKENS, 1, "cpu"),
    )
    match = {"gradient": "off in dg by", "error": "does not run here .RuntimeError: Triton"}
    with pytest.warns(UserWarning, match=match[wrong]) if wrong else nullcontext():
        kinds = {type(rule._segment(rows)) for rows in rule.segments(rule.docs.pieces[0])}
    assert kinds == {delta_rule.DeltaSegment if wrong else delta_rule.FlaSegment}
    out, _ = rule.forward({})
    summary = rule.summarize()
    monkeypatch.setattr(delta_rule, "_can_run_fla", lambda v: False)
    assert relative(out, rule.forward({})[0]) < (1e-9 if wrong else 1e-2)
    assert relative(summary, rule.summarize()) < 1e-9
