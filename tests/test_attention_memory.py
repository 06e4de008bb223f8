"""Attention allocates its results and buffers of one block, nothing else that grows with the sequence.

The kernel is a stub that allocates what a kernel returns: memory is asked about here, not numbers.
"""

from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from grids import diagonal
from ithaka.attention.blocks import attention, attention_backward
from ithaka.attention.kernels import ALL_DTYPES, KERNELS, Kernel

BLOCKS = (128, 64)
HEAD_DIM = 32


def stub_forward(q, k, v, scale, causal):
    return torch.zeros(q.shape, dtype=q.dtype), torch.zeros(q.shape[:3])


def stub_backward(dout, q, k, v, out, lse, scale, causal):
    return tuple(torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v))


@pytest.fixture(autouse=True)
def stub(monkeypatch):
    monkeypatch.setattr("ithaka.attention.choose._test_kernel", lambda *_: None)
    monkeypatch.setitem(KERNELS, "cpu", Kernel("cpu", stub_forward, stub_backward, "cpu", ALL_DTYPES, (512, 1)))


def peak_bytes(call):
    """Most bytes alive at once during the call, from the allocator's own events; results included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        results = call()
    alive = peak = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak, results


def passes(num_tokens, heads, dtype=torch.bfloat16, with_sums=True, blocks=BLOCKS, **mask):
    """Peak bytes above the results, forward and backward; `with_sums` as training has them where stages share them."""
    n, m = heads
    q, k, v, dout = (torch.randn(num_tokens, h, HEAD_DIM).to(dtype) for h in (n, m, m, n))
    how = dict(scale=0.1, blocks=blocks, **mask)
    attention(q[:64], k[:64], v[:64], scale=0.1)  # one-time allocations, such as thread pools
    forward, (out, lse) = peak_bytes(lambda: attention(q, k, v, **how))
    results = out.nbytes + lse.nbytes
    assert forward >= results, "the count missed the results themselves"
    sums = (torch.zeros(k.shape), torch.zeros(v.shape)) if with_sums else None
    backward, grads = peak_bytes(lambda: attention_backward(dout, q, k, v, out, lse, **how, sums=sums))
    if not with_sums:
        assert backward >= sum(x.nbytes for x in grads[1:]), "the count missed the results themselves"
    return forward - results, backward


MASKS = {"causal": {}, "window": {"window": 100}, "bidirectional": {"causal": False}}


@pytest.mark.parametrize("heads, mask", diagonal([(1, 1), (2, 1), (4, 1), (4, 2)], MASKS), ids=str)
def test_nothing_grows_with_the_sequence(heads, mask):
    short, long = passes(512, heads, **MASKS[mask]), passes(1024, heads, **MASKS[mask])
    block_bytes = BLOCKS[0] * HEAD_DIM * 4
    for few, many in zip(short, long, strict=True):
        assert many - few < block_bytes, "a tensor as long as the sequence"
        assert many < 24 * block_bytes


@pytest.mark.parametrize("heads", [(1, 1), (4, 1)], ids=str)
def test_backward_without_sums_makes_its_own(heads):
    """fp32 sums of dk and dv; dq is written over the output."""
    short, long = (passes(num_tokens, heads, with_sums=False) for num_tokens in (512, 1024))
    assert abs(long[1] - short[1] - (1024 - 512) * HEAD_DIM * 2 * heads[1] * 4) < 4096


@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (4, 2)], ids=str)
def test_backward_in_one_call_makes_no_sums(heads, monkeypatch):
    """dk and dv in 16 bits, if the kernel writes them."""
    into = {"forward": lambda q, k, v, *_, into: into, "backward": lambda *_, into: into}
    monkeypatch.setitem(KERNELS, "cpu", replace(KERNELS["cpu"], **into, direct=True))
    short, long = (passes(num_tokens, heads, with_sums=False, blocks=None) for num_tokens in (512, 1024))
    assert abs(long[1] - short[1] - (1024 - 512) * HEAD_DIM * 2 * heads[1] * 2) < 4096
