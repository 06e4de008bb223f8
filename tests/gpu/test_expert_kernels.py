"""Expert blocks in bfloat16 on a GPU match transformers' experts in float64."""

import pytest
import torch

from decoders import tiny_decoder
from ithaka.blocks.expert_rows import SortedAssignments, add_products
from ithaka.blocks.experts import find_experts
from ithaka.layer.mixer import LayerSpec
from ithaka.layer.passes import LayerPasses
from parity import relative

SHAPES = {
    "qwen3_moe": {"moe_intermediate_size": 768},
    "gpt_oss": {"intermediate_size": 1440, "swiglu_limit": 0.5},
    # one matrix and a squared ReLU instead of a gate
    "nemotron_h": {"moe_intermediate_size": 1856},
}


@pytest.mark.gpu
@pytest.mark.parametrize("family", SHAPES)
def test_experts_on_a_gpu_match_transformers(family):
    """One expert has no tokens: its gradients are zero."""
    experts = {
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
        "num_experts_per_tok": 4,
    }
    layers = tiny_decoder(family, hidden_size=256, **experts, **SHAPES[family]).model.layers
    layer = next(layer for layer in layers if find_experts(layer)).cuda()
    module = layer.get_submodule(next(iter(find_experts(layer))))
    generator = torch.Generator("cuda").manual_seed(1)
    x, dy = (
        torch.randn(300, 256, generator=generator, device="cuda", dtype=torch.float64)
        for _ in range(2)
    )
    weights = torch.rand(300, 4, generator=generator, device="cuda", dtype=torch.float64)
    # never the last expert
    chosen = torch.rand(300, 7, generator=generator, device="cuda").topk(4).indices
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        blocks = tuple(find_experts(layer).values()) if dtype == torch.bfloat16 else ()
        experts = LayerPasses("layer", layer, LayerSpec(blocks=blocks)).experts
        module.to(dtype)
        params = list(module.parameters())
        inputs = [x.to(dtype).requires_grad_(), weights.to(dtype).requires_grad_(), *params]
        y = module(inputs[0], chosen, inputs[1])
        grads = torch.autograd.grad(y, inputs, dy.to(y.dtype))
        assert all(not grad[-1].any() for grad in grads[2:])
        results.append([y.detach().double(), *(grad.double() for grad in grads)])
    assert experts.block is not None and experts.block.gate.has_kernel
    assert (
        max(relative(ours, exact) for ours, exact in zip(results[1], results[0], strict=True))
        < 2e-2
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("D", "N"), [(1440, 2880), (1, 200), (16, 72), (768, 16)])
def test_products_are_added_without_rounding(D, N):
    """The sum is not contiguous, the last expert has no rows, and no group is a multiple of a
    block."""
    generator = torch.Generator("cuda").manual_seed(2)
    chosen = torch.rand(700, 7, generator=generator, device="cuda").topk(3).indices
    rows = SortedAssignments.sort(chosen, 8)
    a, b = (
        torch.randn(2100, size, generator=generator, device="cuda").bfloat16() for size in (D, N)
    )
    total = torch.randn(N, D, 8, generator=generator, device="cuda").permute(2, 1, 0)
    expected = total.double()
    for e, (first, end) in enumerate(
        zip([0, *rows.ends_E.tolist()], rows.ends_E.tolist(), strict=False)
    ):
        expected[e] += a[first:end].double().t() @ b[first:end].double()
    add_products(total, a, b, rows.ends_E)
    assert relative(total.double(), expected) < 1e-5
