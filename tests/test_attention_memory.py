"""Attention allocates its results and the buffers of one block; nothing else grows with the
sequence.

The kernel is a stub that only allocates what a kernel returns: these tests measure memory, not
numbers.
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
    monkeypatch.setitem(
        KERNELS, "cpu", Kernel("cpu", stub_forward, stub_backward, "cpu", ALL_DTYPES, (512, 1))
    )


def peak_bytes(call):
    """Return the call's peak bytes, results included, from the allocator's events; and its
    results."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        results = call()
    alive = peak = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak, results


def measure_peaks(num_tokens, heads, dtype=torch.bfloat16, with_sums=True, blocks=BLOCKS, **mask):
    """Return the peak bytes of forward above its results, and of backward; stages that share kv
    heads pass sums."""
    n, m = heads
    q, k, v, dout = (torch.randn(num_tokens, h, HEAD_DIM).to(dtype) for h in (n, m, m, n))
    options = dict(scale=0.1, blocks=blocks, **mask)
    attention(q[:64], k[:64], v[:64], scale=0.1)  # one-time allocations, such as thread pools
    forward, (out, lse) = peak_bytes(lambda: attention(q, k, v, **options))
    results = out.nbytes + lse.nbytes
    assert forward >= results, "the count missed the results themselves"
    sums = (torch.zeros(k.shape), torch.zeros(v.shape)) if with_sums else None
    backward, grads = peak_bytes(
        lambda: attention_backward(dout, q, k, v, out, lse, **options, sums=sums)
    )
    if not with_sums:
        assert backward >= sum(x.nbytes for x in grads[1:]), (
            "the count missed the results themselves"
        )
    return forward - results, backward


MASKS = {"causal": {}, "window": {"window": 100}, "bidirectional": {"causal": False}}


@pytest.mark.parametrize("heads, mask", diagonal([(1, 1), (2, 1), (4, 1), (4, 2)], MASKS), ids=str)
def test_only_the_results_grow_with_the_sequence(heads, mask):
    short = measure_peaks(512, heads, **MASKS[mask])
    long = measure_peaks(1024, heads, **MASKS[mask])
    block_bytes = BLOCKS[0] * HEAD_DIM * 4
    for few, many in zip(short, long, strict=True):
        assert many - few < block_bytes, "a tensor as long as the sequence"
        assert many < 24 * block_bytes


@pytest.mark.parametrize("heads", [(1, 1), (4, 1)], ids=str)
def test_backward_without_sums_allocates_its_own(heads):
    """Only fp32 sums of dk and dv grow with the sequence; dq overwrites the output."""
    short, long = (measure_peaks(num_tokens, heads, with_sums=False) for num_tokens in (512, 1024))
    assert abs(long[1] - short[1] - (1024 - 512) * HEAD_DIM * 2 * heads[1] * 4) < 4096


@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (4, 2)], ids=str)
def test_backward_in_one_call_allocates_no_sums(heads, monkeypatch):
    """A kernel that writes dk and dv needs no fp32 sums: they take 16 bits per element."""
    into = {"forward": lambda q, k, v, *_, into: into, "backward": lambda *_, into: into}
    monkeypatch.setitem(KERNELS, "cpu", replace(KERNELS["cpu"], **into, direct=True))
    short, long = (
        measure_peaks(num_tokens, heads, with_sums=False, blocks=None) for num_tokens in (512, 1024)
    )
    assert abs(long[1] - short[1] - (1024 - 512) * HEAD_DIM * 2 * heads[1] * 2) < 4096
