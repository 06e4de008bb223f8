"""Attention allocates its results and buffers of one block, nothing else that grows with the sequence.

The kernel is a stub that allocates what a kernel returns: memory is asked about here, not numbers.
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ithaka.ops.attention import attention, attention_backward
from ithaka.ops.kernels import ALL, KERNELS, Kernel

BLOCKS = (128, 64)
HEAD_DIM = 32


def stub_forward(q, k, v, scale, causal):
    return torch.zeros(q.shape, dtype=q.dtype), torch.zeros(q.shape[:3])


def stub_backward(dout, q, k, v, out, lse, scale, causal):
    return tuple(torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v))


@pytest.fixture(autouse=True)
def stub(monkeypatch):
    monkeypatch.setitem(KERNELS, "cpu", Kernel("cpu", stub_forward, stub_backward, "cpu", ALL, (512, 1)))


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


def passes(num_tokens, heads, dtype=torch.bfloat16, **mask):
    """Peak bytes above the results, forward and backward."""
    n, m = heads
    q, k, v, dout = (torch.randn(num_tokens, h, HEAD_DIM).to(dtype) for h in (n, m, m, n))
    how = dict(scale=0.1, blocks=BLOCKS, **mask)
    attention(q[:64], k[:64], v[:64], scale=0.1)  # what is allocated once, such as thread pools
    forward, (out, lse) = peak_bytes(lambda: attention(q, k, v, **how))
    backward, grads = peak_bytes(lambda: attention_backward(dout, q, k, v, out, lse, **how))
    results = [sum(x.nbytes for x in xs) for xs in ((out, lse), grads)]
    assert forward >= results[0] and backward >= results[1], "the count missed the results themselves"
    return forward - results[0], backward - results[1]


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (4, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("mask", [{}, {"window": 100}], ids=["causal", "window"])
def test_nothing_grows_with_the_sequence(heads, mask):
    short, long = passes(512, heads, **mask), passes(1024, heads, **mask)
    block_bytes = BLOCKS[0] * HEAD_DIM * 4
    for few, many in zip(short, long, strict=True):
        assert many - few < block_bytes, "a tensor as long as the sequence"
        assert many < 24 * block_bytes


@pytest.mark.parametrize("heads", [(1, 1), (4, 1)], ids=str)
def test_bidirectional_backward_keeps_one_low_half(heads):
    """What the module says: 2 bytes per element of dq (r = 1), or of dk and dv (r > 1)."""
    short, long = (passes(n, heads, causal=False) for n in (512, 1024))
    assert long[0] - short[0] < 4096
    stated = (1024 - 512) * HEAD_DIM * 2 * (1 if heads == (1, 1) else 2)
    assert abs(long[1] - short[1] - stated) < 4096
