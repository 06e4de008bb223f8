"""The functions of ops/fused.py, on a GPU Triton kernels, match PyTorch in fp64 with strides and odd sizes."""

from functools import partial

import pytest
import torch

from ithaka.ops.divergence import Criterion, divergence_with_grad
from ithaka.ops.fused import (
    Positions,
    add_and_round,
    apply_rope,
    cross_entropy_with_grad,
    rms_norm_backward,
    row_logsumexp,
    scale_in_place,
    silu_mul,
    silu_mul_backward,
    softmax_grad,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
only_gpu = partial(pytest.param, marks=pytest.mark.gpu)

# Rounding error of one result: half a unit in the last place in 16 bits; in 32 bits the GPU's exp is less precise.
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 4e-3}


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def assert_close(ours: torch.Tensor, exact: torch.Tensor, size: torch.Tensor | None = None) -> None:
    """Compare relative to `size`, by default that of the results."""
    error = (ours.double() - exact).abs() / (exact if size is None else size).abs().clamp_min(0.1)
    assert error.max() < 2 * ROUNDING[ours.dtype]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    "c,n,t,K",
    [
        only_gpu(8, 1, 100, 128),
        (2, 3, 33, 64),
        only_gpu(1, 5, 257, 80),
        only_gpu(4, 2, 1, 256),
        only_gpu(3, 4, 40, 80),
        only_gpu(1, 9, 70, 128),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_rope_between_layouts_matches_fp64(dtype, c, n, t, K, sign):
    """Rotate from token layout into a slice of exchange layout, both ways, at far, packed and near positions."""
    x_tnK, buffer_csnK = draw(t, c * n, K, dtype=dtype), torch.full((c, 2 * t, n, K), 7.0, device=DEVICE, dtype=dtype)
    at_t = torch.arange(7_000_000, 7_000_000 + t, device=DEVICE)
    at_t[t // 3 :] -= 5_000_000
    at_t[t // 2 :] -= 2_000_000
    inv_freq_k = 500_000.0 ** -(torch.arange(K // 2, device=DEVICE) / (K // 2))
    positions = Positions(at_t, inv_freq_k, 1.25)
    x_cntK = x_tnK.unflatten(1, (c, n)).permute(1, 2, 0, 3)
    into_cntK = buffer_csnK[:, t:].transpose(1, 2)
    apply_rope(into_cntK, x_cntK, positions if sign == 1 else positions.inverse)
    angle_tk = sign * at_t.double()[:, None] * inv_freq_k.double()
    cos_tk, sin_tk, (first, second) = angle_tk.cos() * 1.25, angle_tk.sin() * 1.25, x_cntK.double().chunk(2, -1)
    exact = torch.cat((first * cos_tk - second * sin_tk, second * cos_tk + first * sin_tk), -1)
    assert_close(into_cntK, exact, size=1.25 * torch.hypot(first, second).repeat(1, 1, 1, 2))
    assert (buffer_csnK[:, :t] == 7).all()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", [(3, 5), only_gpu((129, 4096)), (1000, 333)])
def test_gated_product_and_its_gradients_match_fp64(dtype, shape):
    gate, up, da = (draw(*shape, dtype=dtype) for _ in range(3))
    leaves = [gate.double().requires_grad_(), up.double().requires_grad_()]
    a = torch.nn.functional.silu(leaves[0]) * leaves[1]
    dgate, dup = torch.autograd.grad(a, leaves, da.double())
    forward = gate.clone()
    silu_mul(forward, up, forward)
    silu_mul_backward(gate, up, da)
    for ours, exact in [(forward, a), (gate, dgate), (up, dup), (da, a)]:
        assert_close(ours, exact.detach())


@pytest.mark.parametrize("shape", [(3, 5), only_gpu((129, 4096)), (1000, 333)])
def test_sums_are_rounded_once(shape):
    total, x = draw(*shape, dtype=torch.float32), draw(*shape, dtype=torch.bfloat16)
    exact = total.double() + x.double()
    rounded = add_and_round(total, x)
    assert rounded.dtype == torch.bfloat16
    assert_close(rounded, exact)
    assert_close(total, exact)
    assert add_and_round(total, exact.float()) is total
    assert_close(total, 2 * exact)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("t,D", [(3, 8), only_gpu(1, 3072), (1500, 333), only_gpu(700, 4096), only_gpu(33, 12288)])
def test_norm_gradients_match_fp64(dtype, t, D):
    x, dy, before = (draw(t, D, dtype=dtype) for _ in range(3))
    x, weight = x * torch.rand(t, 1, device=DEVICE).to(dtype), 1 + draw(D, dtype=dtype) / 4
    leaves = [x.double().requires_grad_(), weight.double().requires_grad_()]
    y = torch.nn.functional.rms_norm(leaves[0], (D,), leaves[1], 1e-2)
    dx, dweight = torch.autograd.grad(y, leaves, dy.double())
    into = before.clone()
    summed = rms_norm_backward(into, x, dy, weight, 1e-2)
    assert_close(into, before.double() + dx, size=before.double().abs() + dx.abs())
    assert summed.dtype == torch.float32 and (summed.double() - dweight).norm() < 1e-5 * dweight.norm()


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("t,V", [(3, 5), (130, 4096), only_gpu(65, 40001), only_gpu(65, 49152)])
def test_gradients_of_logits_match_fp64(dtype, t, V, with_entropy):
    logits, target, by = draw(t, V, dtype=dtype) * 5, torch.randint(V, (t,), device=DEVICE), torch.rand(t).to(DEVICE)
    dentropy = torch.randn(t).to(DEVICE) * with_entropy
    by[1] = 0  # no label
    leaf = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(leaf, target, reduction="none")
    entropies = -(leaf.log_softmax(-1) * leaf.softmax(-1)).sum(-1)
    (exact,) = torch.autograd.grad((losses, entropies), leaf, (by.double(), dentropy.double()))
    lse, *more = row_logsumexp(logits, with_entropy)
    torch.testing.assert_close(lse.double(), leaf.detach().logsumexp(-1), rtol=1e-6, atol=1e-6)
    if with_entropy:
        mean, plain_mean = more
        torch.testing.assert_close(plain_mean.double(), leaf.detach().mean(-1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close((lse - mean).double(), entropies.detach(), rtol=1e-5, atol=1e-5)
        softmax_grad(logits, target, lse, by, (dentropy, lse - mean))
        assert_gradient_close(logits, exact, exponent_error(lse) * (1 + float(dentropy.abs().max())))
        return
    at_once = logits.clone()
    softmax_grad(logits, target, lse, by)
    torch.testing.assert_close(
        cross_entropy_with_grad(at_once, target, by).double(), losses.detach(), rtol=1e-5, atol=1e-5
    )
    assert_gradient_close(logits, exact, exponent_error(lse))
    assert_gradient_close(at_once, exact, exponent_error(lse))
    assert (at_once[1] == 0).all()


@pytest.mark.parametrize("beta, temperature", [(0.0, 1.0), (0.3, 1.7), (1.0, 0.8), (0.5, 1.0)])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("t,V", [(3, 5), (130, 4097), only_gpu(65, 128256)])
def test_divergences_of_logits_match_fp64(dtype, t, V, beta, temperature):
    student, teacher = (draw(t, V, dtype=dtype) * 3 for _ in range(2))
    target, scales = torch.randint(V, (t,), device=DEVICE), torch.rand(2, t).to(DEVICE)
    scales[:, 1] = 0  # no label
    leaf, criterion = student.double().requires_grad_(), Criterion(beta, temperature, 0.5)
    exact = divergence_with_grad(leaf.detach().clone(), teacher.double(), target, criterion, None)
    log_q, log_p = (x.div(temperature).log_softmax(-1) for x in (leaf, teacher.double()))
    log_m = log_q if beta == 0 else (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    sides = [(1.0 if beta == 0 else beta * (beta < 1), log_p), (1.0 if beta == 1 else 1 - beta, log_q)]
    divergences = sum(weight * (log.exp() * (log - log_m)).sum(-1) for weight, log in sides)
    losses = torch.nn.functional.cross_entropy(leaf, target, reduction="none")
    (grad,) = torch.autograd.grad((divergences, losses), leaf, tuple(scales.double()))
    torch.testing.assert_close(exact[0], divergences.detach(), rtol=1e-9, atol=1e-12)
    found = divergence_with_grad(student, teacher, target, criterion, scales)
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
    assert_gradient_close(student, grad, 2e-5)
    assert (student[1] == 0).all()


def exponent_error(lse_t: torch.Tensor) -> float:
    """Return the relative error of exp(x - lse) if lse is off by two units in the last place, as sums of thousands of
    terms are. At an lse of 30 it is 7e-6, more than ROUNDING for 32 bits."""
    return 2 * torch.finfo(torch.float32).eps * float(lse_t.abs().max())


def assert_gradient_close(ours: torch.Tensor, exact: torch.Tensor, more: float) -> None:
    most = 2 * ROUNDING[ours.dtype] + more
    assert (ours.double() - exact).abs().max() < most * exact.abs().max().clamp_min(1)
    assert (ours.double() - exact).norm() / exact.norm() < most


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("factor", [1.0, -2.5])
def test_scaling_in_place_matches_fp64(dtype, factor):
    x = draw(129, 333, dtype=dtype)
    exact = x.double() * factor
    scale_in_place(x, torch.tensor(factor, device=DEVICE))
    assert_close(x, exact)
