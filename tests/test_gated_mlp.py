"""The manual backward of a gated MLP equals autograd through Hugging Face's module, in fp64."""

from collections import deque

import pytest
import torch
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from ithaka.blocks.linear import Linear
from ithaka.blocks.mlp import as_gated_mlp
from ithaka.blocks.tiles import GradSum
from ithaka.comm.mesh import make_mesh
from ithaka.model.build import parallelize_model
from ithaka.ops.fused import Positions, apply_rope, silu_mul_backward
from models import EXPERTS, FAMILIES, tiny_config, tiny_model


def make(act: str = "silu", bias: bool = True) -> LlamaMLP:
    torch.manual_seed(2)
    config = LlamaConfig(hidden_size=12, num_attention_heads=1, intermediate_size=20, hidden_act=act, mlp_bias=bias)
    return LlamaMLP(config).double()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_apply_wide_returns_the_dtype_of_sums():
    weight, bias, a, b = draw(5, 3), draw(5), draw(2, 3), draw(5, 2)
    x, linear = draw(4, 3), Linear(weight, bias, a, b, scale=1.5)
    torch.testing.assert_close(linear.apply_wide(x), x @ weight.t() + bias + 1.5 * x @ a.t() @ b.t())
    assert Linear(weight.bfloat16()).apply_wide(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_two_parameters_share_is_not_added_to(dtype):
    """Autograd returns one tensor for both operands of a sum."""
    first, second = (torch.zeros(3, dtype=dtype) for _ in range(2))
    shared, grads = torch.ones(3, dtype=dtype), GradSum()
    grads.add(first, shared)
    grads.add(second, shared)
    grads.add(first, torch.ones(3, dtype=dtype))
    grads.sum_of(second).add_(2)
    assert torch.equal(shared, torch.ones(3, dtype=dtype))
    assert grads.take(first).tolist() == [2, 2, 2] and grads.take(second).tolist() == [3, 3, 3]


def test_products_in_16_bits_are_summed_unrounded():
    """One rounding to bfloat16 would give an error of 1e-3."""
    weight, tiles = draw(40, 30).bfloat16(), [(draw(16, 40).bfloat16(), draw(17, 30)[:16].bfloat16()) for _ in range(3)]
    output, grads = Linear(weight).apply_wide(tiles[0][1]), GradSum()
    Linear(weight).add_to(output, tiles[1][1])
    for dout, x in tiles:
        grads.add_product(weight, dout, x)
    for ours, exact in (
        (output, sum(x.double() @ weight.double().t() for _, x in tiles[:2])),
        (grads.take(weight), sum(dout.double().t() @ x.double() for dout, x in tiles)),
    ):
        assert ours.dtype == torch.float32 and (ours - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("act", ["silu", "swish"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_output_and_every_gradient_equal_autograd(act, bias, keep):
    mlp = make(act, bias)
    gated, h_tD, dy_tD, y_tD = as_gated_mlp(mlp), draw(7, 12).requires_grad_(), draw(1, 7, 12)[0], draw(2, 7, 12)[1]
    plain = mlp(h_tD)
    expected = torch.autograd.grad(plain, [h_tD, *mlp.parameters()], dy_tD)
    before = y_tD.clone()
    with torch.no_grad():
        kept = deque(filter(None, [gated.add_to(y_tD, h_tD, keep)]))
        assert len(kept) == keep
        grads = GradSum()
        dh_tD = gated.backward(h_tD, dy_tD, grads, kept)
    torch.testing.assert_close(y_tD, before + plain, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip([dh_tD, *map(grads.take, mlp.parameters())], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_frozen_weights_get_no_gradient():
    mlp = make()
    mlp.up_proj.weight.requires_grad_(False)
    grads = GradSum()
    with torch.no_grad():
        as_gated_mlp(mlp).backward(draw(5, 12), draw(1, 5, 12)[0], grads, deque())
    taken = {name: grads.take(param) is not None for name, param in mlp.named_parameters()}
    assert taken.pop("up_proj.weight") is False and all(taken.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_mlps_of_dense_families_are_recognized(family):
    assert as_gated_mlp(tiny_model(tiny_config(family)).model.layers[0].mlp) is not None


@pytest.mark.parametrize("family", EXPERTS)
def test_mixtures_of_experts_are_black_boxes(family):
    assert as_gated_mlp(tiny_model(tiny_config(family)).model.layers[0].mlp) is None


def hook(mlp):
    mlp.down_proj.register_forward_hook(lambda *args: None)


def hook_gradients(mlp):
    mlp.register_full_backward_hook(lambda *args: None)


def wrap(mlp):
    mlp.up_proj = type("LoraLinear", (nn.Linear,), {})(12, 20)


def patch(mlp):
    mlp.forward = lambda x: 2 * x


def other_activation(mlp):
    mlp.act_fn = nn.GELU()


@pytest.mark.parametrize("change", [hook, hook_gradients, wrap, patch, other_activation])
def test_a_changed_module_is_a_black_box(change):
    """The effect of a wrapper or hook must not be lost."""
    mlp = make()
    change(mlp)
    assert as_gated_mlp(mlp) is None


def test_a_module_changed_after_the_model_was_built_is_a_black_box():
    model = parallelize_model(tiny_model(tiny_config("llama")), mesh=make_mesh(1))
    ids = torch.arange(12)[None]
    plain = model(input_ids=ids, labels=ids).loss
    calls = []
    mlp = model.model.layers[0].mlp
    mlp.down_proj.register_forward_hook(lambda module, args, out: calls.append(1) or 2 * out)
    changed = model(input_ids=ids, labels=ids).loss
    changed.backward()
    assert len(calls) == 2, "once in forward, once in backward"
    assert changed != plain


def test_the_product_and_its_gradients_overwrite_their_inputs():
    gate, up, da = draw(3, 4), draw(1, 3, 4)[0], draw(2, 3, 4)[1]
    leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    a = nn.functional.silu(leaves[0]) * leaves[1]
    dgate, dup = torch.autograd.grad(a, leaves, da)
    silu_mul_backward(gate, up, da)
    for ours, theirs in [(gate, dgate), (up, dup), (da, a.detach())]:
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


def test_rotation_and_its_transpose_are_exact():
    x_BhtK, positions = draw(2, 3, 5, 8), Positions(torch.arange(5), draw(4), 1.5)
    turned, back = torch.empty_like(x_BhtK), torch.empty_like(x_BhtK)
    apply_rope(turned, x_BhtK, positions)
    apply_rope(back, turned, positions.inverse)
    (first, second), angle_tk = x_BhtK.chunk(2, -1), torch.arange(5)[:, None] * draw(4)
    pair = first * angle_tk.cos() - second * angle_tk.sin(), second * angle_tk.cos() + first * angle_tk.sin()
    torch.testing.assert_close(turned, 1.5 * torch.cat(pair, -1), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(back, 1.5**2 * x_BhtK, rtol=1e-13, atol=1e-13)
