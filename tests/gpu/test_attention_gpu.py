"""In 16 bits, every kernel of this device is as close to fp64 as plain PyTorch."""

import pytest
import torch
from attention_cases import MASKS, assert_as_good_as_plain, errors

from ithaka.attention import blocks
from ithaka.attention.blocks import attention, attention_backward
from ithaka.attention.choose import available_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS = [k for k in available_kernels(DEVICE, torch.bfloat16, 128) if k != "reference"]
gpu = pytest.mark.gpu


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "heads", [pytest.param((2, 2), marks=pytest.mark.slow_on_cpu), (4, 1)], ids=str
)
def test_as_good_as_plain_pytorch_over_all_masks(device, kernel, heads):
    head_dim = 128 if device.type == "cuda" else 32
    assert_as_good_as_plain(
        [errors(kernel, mask, device, heads, head_dim) for mask in MASKS], device
    )


@gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "heads, at_once", [((2, 2), 2), ((2, 2), 1), ((4, 1), 4), ((4, 2), 2)], ids=str
)
def test_as_good_as_plain_pytorch_in_one_call(device, kernel, heads, at_once, monkeypatch):
    """A kernel that can write to our buffers writes dk and dv, for all heads or for one kv head at
    a time."""
    monkeypatch.setattr(blocks, "CALL_TOKENS", at_once * 2085)
    assert_as_good_as_plain(
        [errors(kernel, mask, device, heads, one_call=True) for mask in MASKS], device
    )


@gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head_dim", [64, 96, 192, 256])
def test_other_head_dims_are_as_good_as_plain_pytorch(device, kernel, head_dim):
    masks = ("causal", "window", "ragged documents")
    assert_as_good_as_plain(
        [errors(kernel, mask, device, (2, 1), head_dim) for mask in masks], device
    )


@gpu
@pytest.mark.parametrize("kernel", ["efficient", "eager"])
def test_large_heads_are_as_good_as_plain_pytorch(device, kernel):
    """FlashAttention and cuDNN take head dims up to 256."""
    masks = ("causal", "window", "ragged documents")
    assert_as_good_as_plain([errors(kernel, mask, device, (2, 1), 512) for mask in masks], device)


@gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_fp16_is_as_good_as_plain_pytorch(device, kernel):
    assert_as_good_as_plain(
        [errors(kernel, mask, device, dtype=torch.float16) for mask in MASKS], device
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_tokens", [1, 2, 65, 129])
def test_rows_that_see_one_key_return_its_value(device, kernel, num_tokens):
    """For these rows, q and k get no gradient; results of other rows are finite."""
    q, k, v, dout = (torch.randn(num_tokens, 1, 128).to(device, torch.bfloat16) for _ in range(4))
    for window in (None, 1):
        sums = tuple(torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        out, lse = attention(q, k, v, scale=0.1, window=window, kernel=kernel)
        torch.testing.assert_close(out[0], v[0])
        dq, dk, dv = attention_backward(
            dout, q, k, v, out, lse, scale=0.1, window=window, kernel=kernel, sums=sums
        )
        assert all(torch.isfinite(x).all() for x in (lse, dq, dk, dv))
        alone = slice(None) if window == 1 else slice(0, 1)
        assert dq[alone].abs().max() < 0.05
        if window == 1:
            assert dk.abs().max() < 0.05
            torch.testing.assert_close(dv, dout.float(), rtol=1e-2, atol=1e-2)


@gpu
def test_only_the_results_grow_with_the_sequence():
    """Buffers are the same at 256 Ki and 1 Mi tokens."""

    def measure_buffers(num_tokens):
        q, k, v, dout = (
            torch.randn(num_tokens, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)
        )
        options = dict(scale=0.1, blocks=(32768, 16384))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, lse = attention(q, k, v, **options)
        forward = torch.cuda.max_memory_allocated() - before - out.nbytes - lse.nbytes
        sums = tuple(torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention_backward(dout, q, k, v, out, lse, sums=sums, **options)
        return forward, torch.cuda.max_memory_allocated() - before

    measure_buffers(65536)
    for few, many in zip(measure_buffers(1 << 18), measure_buffers(1 << 20), strict=True):
        assert few > 0
        assert abs(many - few) < 1 << 20
