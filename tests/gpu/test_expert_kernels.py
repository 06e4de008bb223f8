"""Expert blocks in bfloat16 on a GPU against transformers' experts in float64."""

import pytest
import torch

from decoders import tiny_decoder
from ithaka.layer.experts import LayerExperts
from parity import relative

SHAPES = {
    "qwen3_moe": {"moe_intermediate_size": 768},
    "gpt_oss": {"intermediate_size": 1440, "swiglu_limit": 0.5},
}


@pytest.mark.gpu
@pytest.mark.parametrize("family", SHAPES)
def test_experts_on_a_gpu(family):
    """An expert without tokens, too: its gradients are zero."""
    experts = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 4}
    changes = {"hidden_size": 256, **experts, **SHAPES[family]}
    layer = tiny_decoder(family, num_hidden_layers=1, **changes).model.layers[0].cuda()
    module = layer.mlp.experts
    generator = torch.Generator("cuda").manual_seed(1)
    x, dy = (torch.randn(300, 256, generator=generator, device="cuda", dtype=torch.float64) for _ in range(2))
    weights = torch.rand(300, 4, generator=generator, device="cuda", dtype=torch.float64)
    chosen = torch.rand(300, 7, generator=generator, device="cuda").topk(4).indices  # never the last expert
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        experts = LayerExperts(layer, replaces=dtype == torch.bfloat16)
        module.to(dtype)
        params = list(module.parameters())
        inputs = [x.to(dtype).requires_grad_(), weights.to(dtype).requires_grad_(), *params]
        y = module(inputs[0], chosen, inputs[1])
        grads = torch.autograd.grad(y, inputs, dy.to(y.dtype))
        assert all(not grad[-1].any() for grad in grads[2:])
        results.append([y.detach().double(), *(grad.double() for grad in grads)])
    assert experts.block is not None and experts.block.gate.has_kernel
    assert max(relative(ours, exact) for ours, exact in zip(results[1], results[0], strict=True)) < 2e-2
