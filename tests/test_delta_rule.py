"""The gated delta rule over ranks and packed documents, against each document alone in transformers, in fp64."""

import sys
from contextlib import nullcontext
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from ithaka.checks.verify import InFloat64
from ithaka.ops import delta_rule
from ithaka.ops.delta_rule import DeltaInputs, DeltaRule, LocalDocs, short_convolution
from parity import relative

TOKENS, KEY_HEADS, HEADS, K, V = 90, 2, 4, 8, 6
STARTS = (0, 7, 8, 9, 31, 32, 60, 90)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Give each rank several chunks and segments."""
    monkeypatch.setattr(delta_rule, "CHUNK_TOKENS", 4)
    monkeypatch.setattr(delta_rule, "SEGMENT_ROWS", 24 * HEADS)


@pytest.fixture(scope="module")
def inputs() -> DeltaInputs:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(TOKENS, *shape, generator=generator, dtype=torch.float64)

    g, beta = -0.3 * draw(HEADS).exp(), draw(HEADS).sigmoid()
    return DeltaInputs(draw(KEY_HEADS, K), draw(KEY_HEADS, K), draw(HEADS, V), g, beta)


def run_transformers(inputs: DeltaInputs, dout: Tensor, starts: tuple[int, ...]) -> list[Tensor]:
    """Return the output and all gradients, with each document computed alone."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    outs = []
    for a, b in pairwise(starts):
        q, k, v, g, beta = (t[None, a:b] for t in leaves)
        q, k = (t.repeat_interleave(HEADS // KEY_HEADS, 2) for t in (q, k))
        with InFloat64():
            out, _ = torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        outs.append(out[0])
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def run_ranks(inputs: DeltaInputs, dout: Tensor, starts: tuple[int, ...], cp: int) -> list[Tensor]:
    """Return the same from `cp` ranks that pass their states on."""
    s = TOKENS // cp
    parts = [DeltaInputs(*(t[rank * s : (rank + 1) * s].clone() for t in inputs)) for rank in range(cp)]
    rules = [DeltaRule(part, LocalDocs(starts, rank * s, s, 1, "cpu")) for rank, part in enumerate(parts)]
    state, outs, states = rules[0].zero_state(), [], []
    for rule in rules:
        out, local_states = rule.forward(state)
        outs.append(out)
        states.append(local_states)
        summary = rule.summarize()
        state = summary[..., :K] @ state + summary[..., K:]
    dstate = rules[0].zero_state()
    for rule, local_states, local_dout in zip(rules[::-1], states[::-1], dout.split(s)[::-1], strict=True):
        summary = rule.summarize_grad(local_dout)
        passed = summary[..., :K] @ dstate + summary[..., K:]
        dstate = rule.backward(local_states, local_dout, dstate)
        torch.testing.assert_close(passed, dstate, rtol=1e-10, atol=1e-12)
    return [torch.cat(outs), *(torch.cat(grads) for grads in zip(*parts, strict=True))]


@pytest.mark.parametrize("starts", [(0, TOKENS), STARTS], ids=["one document", "packed"])
def test_output_and_gradients_match_each_document_alone(inputs, starts):
    dout = torch.randn(TOKENS, HEADS, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = run_transformers(inputs, dout, starts)
    for cp in (1, 2, 3, 5):
        for got, expected in zip(run_ranks(inputs, dout, starts, cp), wanted, strict=True):
            assert float((got - expected).abs().max() / expected.abs().max()) < 1e-12


def test_a_convolution_reads_only_its_document():
    draw = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((12, 5), (5, 4)))
    starts = (0, 1, 2, 7, 12)
    ids = LocalDocs(starts, 0, 12, 3, "cpu").ids(0, 12)
    wanted = [
        torch.nn.functional.conv1d(x[a:b].t()[None], weight[:, None], padding=3, groups=5)[0, :, : b - a].t()
        for a, b in pairwise(starts)
    ]
    torch.testing.assert_close(short_convolution(x, weight, None, ids), torch.cat(wanted))


@pytest.mark.parametrize("wrong", [None, "gradient", "error"])
def test_flash_linear_attention_is_used_where_its_gradients_are_right(monkeypatch, wrong):
    """A stub for the kernel computes each document alone with transformers; its gradient may be made wrong."""

    def chunk_gated_delta_rule(q, k, v, g, beta, *, initial_state, output_final_state, cu_seqlens=None, **options):
        if wrong == "error":
            raise RuntimeError("Triton >= 3.4.0 on Hopper GPUs produces incorrect results")
        outs, states = [], []
        g = g + (g - g.detach()) * 0.05 if wrong == "gradient" else g
        q, k = (t.repeat_interleave(HEADS // KEY_HEADS, 2) for t in (q, k))
        for (a, b), state in zip(
            pairwise([0, v.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()), initial_state, strict=True
        ):
            parts = (t[:, a:b] for t in (q, k, v))
            out, state = torch_chunk_gated_delta_rule(
                *parts, g=g[:, a:b], beta=beta[:, a:b], initial_state=state[None], output_final_state=True, **options
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
        LocalDocs(STARTS, 0, TOKENS, 1, "cpu"),
    )
    match = {"gradient": "off in dg by", "error": "does not run here .RuntimeError: Triton"}
    with pytest.warns(UserWarning, match=match[wrong]) if wrong else nullcontext():
        kinds = {type(rule._segment(rows)) for rows in rule.segments}
    assert kinds == {delta_rule.Segment if wrong else delta_rule.FlaSegment}
    state = rule.zero_state()
    out, summary = rule.forward(state)[0], rule.summarize()
    monkeypatch.setattr(delta_rule, "_can_run_fla", lambda v: False)
    assert relative(out, rule.forward(state)[0]) < (1e-9 if wrong else 1e-2)
    assert relative(summary, rule.summarize()) < 1e-9


class ListThatRefusesScans(list):
    def __iter__(self):
        raise AssertionError("all documents are scanned for one segment")


def test_starts_are_found_without_scanning_all_documents():
    docs = LocalDocs((0, 3, 4, 9, 20, 24), 6, 12, 3, "cpu")  # local starts are -2 and 3
    docs._starts_with_halo = ListThatRefusesScans(docs._starts_with_halo)
    started = [rows for rows in ((-3, -2), (-2, 0), (-1, 3), (0, 4), (3, 4), (4, 12)) if docs.has_start(slice(*rows))]
    assert started == [(-2, 0), (0, 4), (3, 4)]
