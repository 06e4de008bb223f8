"""Every kernel this GPU has, in bf16 and fp16: within twice the error of plain PyTorch, against fp64."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from attention_cases import MASKS, errors  # noqa: E402

from ithaka.ops.attention import attention, attention_backward  # noqa: E402
from ithaka.ops.kernels import available_kernels  # noqa: E402

pytestmark = pytest.mark.gpu
KERNELS = [k for k in available_kernels(torch.device("cuda"), torch.bfloat16, 128) if k != "reference"]


def assert_close(found):
    for name, (ours, plain) in found.items():
        assert ours <= 2 * plain, (name, ours, plain)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads", [(2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_no_worse_than_twice_plain_pytorch(kernel, mask, heads):
    assert_close(errors(kernel, mask, heads))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head_dim", [64, 96, 192, 256])
def test_head_dims(kernel, head_dim):
    assert_close(errors(kernel, "causal", (2, 1), head_dim))


@pytest.mark.parametrize("kernel", KERNELS)
def test_fp16(kernel):
    assert_close(errors(kernel, "causal", dtype=torch.float16))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_tokens", [1, 2, 65, 129])
def test_rows_that_see_one_key_are_finite(kernel, num_tokens):
    q, k, v, dout = (torch.randn(num_tokens, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for window in (None, 1):
        out, lse = attention(q, k, v, scale=0.1, window=window, kernel=kernel)
        grads = attention_backward(dout, q, k, v, out, lse, scale=0.1, window=window, kernel=kernel)
        assert all(torch.isfinite(x).all() for x in (out, lse, *grads))
        torch.testing.assert_close(out[0], v[0])


def test_memory_is_results_and_blocks():
    """As training calls it, nothing as long as the sequence but out and lse: the same buffers at 256 Ki and 1 Mi."""

    def above(num_tokens):
        q, k, v, dout = (torch.randn(num_tokens, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        how = dict(scale=0.1, blocks=(32768, 16384))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, lse = attention(q, k, v, **how)
        forward = torch.cuda.max_memory_allocated() - before - out.nbytes - lse.nbytes
        sums = (torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention_backward(dout, q, k, v, out, lse, **how, sums=sums)
        return forward, torch.cuda.max_memory_allocated() - before

    above(65536)
    for few, many in zip(above(1 << 18), above(1 << 20), strict=True):
        assert abs(many - few) < 1 << 20
