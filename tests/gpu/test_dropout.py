"""adapter.dropout on a GPU, where a compiled kernel computes the mask, drops the same elements as
on a CPU."""

import pytest
import torch

from ithaka.blocks.dropout import DropoutState, TokenDropout


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_gpu_drops_the_same_elements(dtype):
    x = torch.randn(700, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    results = []
    for device in ("cpu", "cuda"):
        state = DropoutState()
        state.start_step(3, 5)
        state.keys_t = state.start_call((torch.arange(700) + (9 << 36)).to(device))
        leaf = x.to(device).requires_grad_()
        y = TokenDropout(0.1, "model.layers.3.mlp.up_proj", state)(
            leaf, torch.arange(1000, device=device).flip(0)
        )
        (grad,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
        results.append((y.detach().cpu(), grad.cpu()))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) and 0.08 < (b == 0).double().mean() < 0.12
