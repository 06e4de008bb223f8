"""The Triton kernels of ops/token_wise.py against the same functions in PyTorch."""

from itertools import product

import pytest
import torch

from ithaka.blocks.rope import FORMS
from ithaka.ops.token_wise import (
    ACTIVATIONS,
    NormForm,
    apply_norm,
    gate_mul,
    gate_mul_backward,
    norm_backward,
    rotate,
    sum_rounded,
)

pytestmark = pytest.mark.gpu
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


def on_both(
    *shape: int, dtype: torch.dtype, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    x = (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(dtype)
    return x.cuda(), x.double()


def assert_close(ours: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    error = (ours.cpu().double() - exact).abs().max() / exact.abs().max()
    assert error < TOLERANCES[dtype], float(error)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(7, 64), (300, 3072), (5, 5000), (2, 9, 128), (1, 33, 3, 96)])
@pytest.mark.parametrize(
    "form", [NormForm(1e-6, 0.0, False), NormForm(1e-6, 1.0, False), NormForm(1e-5, 0.0, True)]
)
def test_norms(shape, form, dtype):
    (x, exact_x), (w, exact_w), (dy, exact_dy) = (
        on_both(*size, dtype=kind)
        for size, kind in ((shape, torch.float32), (shape[-1:], dtype), (shape, dtype))
    )
    assert_close(apply_norm(x, w, form), apply_norm(exact_x, exact_w, form), dtype)
    ours = norm_backward(x, dy, w, form)
    exact = norm_backward(exact_x, exact_dy, exact_w, form)
    for a, b in zip(ours, exact, strict=True):
        assert_close(a, b, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("activation", "fused"), list(product(ACTIVATIONS, (False, True))))
def test_gates(activation, fused, dtype):
    gate, up, da = (on_both(50, 5000, dtype=dtype, scale=3 + i) for i in range(3))
    gates = [
        list(torch.cat([g, u], 1).chunk(2, 1)) if fused else [g, u]
        for g, u in zip(gate, up, strict=True)
    ]
    intos = [torch.empty_like(d) for d in da]
    for (g, u), into in zip(gates, intos, strict=True):
        gate_mul(g, u, into, activation)
    assert_close(intos[0], intos[1], dtype)
    for (g, u), d in zip(gates, da, strict=True):
        gate_mul_backward(g, u, d, activation)
    for ours, exact in zip((*gates[0], da[0]), (*gates[1], da[1]), strict=True):
        assert_close(ours, exact, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backward", [False, True])
def test_rope(form, backward, dtype):
    for heads, tokens, head_dim, rotated in ((5, 70, 128, 128), (1, 9, 96, 72), (3, 40, 64, 32)):
        width = rotated // 2 if form.cos == "half" else rotated
        x = on_both(1, tokens, heads, head_dim, dtype=dtype)
        tables = [on_both(1, tokens, width, dtype=torch.float32, scale=1 + i) for i in range(2)]
        if heads == 3:  # gpt-oss transposes its tables
            tables = [[t.mT.contiguous().mT for t in both] for both in tables]
        ours, exact = (
            rotate(t.transpose(1, 2), *(table[i] for table in tables), form, backward)
            for i, t in enumerate(x)
        )
        assert_close(ours, exact, dtype)
        assert ours.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("count", [2, 3, 4])
def test_sums_are_rounded_once(count):
    terms, exact = zip(
        *(on_both(33, 100 + i, dtype=torch.bfloat16, scale=1 + 20 * i) for i in range(count)),
        strict=True,
    )
    terms = [t[:, :100].contiguous() for t in terms]
    exact = [t[:, :100] for t in exact]
    assert torch.equal(sum_rounded(terms).cpu(), sum(exact).float().bfloat16())


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("shape", [(300, 3072), (1, 33, 96)])
@pytest.mark.parametrize("form", [NormForm(1e-6, 0.0, False), NormForm(1e-5, 1.0, True)])
def test_norms_of_sums_read_the_sum_before_it_is_rounded(shape, form, count):
    """The output is the only thing that is rounded, so it has the error of one rounding."""
    w, exact_w = on_both(shape[-1], dtype=torch.bfloat16)
    terms, exact = zip(
        *(on_both(i, *shape, dtype=torch.bfloat16) for i in range(1, count + 1)), strict=True
    )
    terms = [t[-1].contiguous() for t in terms]
    exact = [t[-1] for t in exact]
    y = apply_norm(sum_rounded(terms), w, form, terms)
    expected = apply_norm(sum(exact), exact_w, form)
    rounded = apply_norm(sum_rounded(terms), w, form)
    errors = [
        float((result.cpu().double() - expected).norm() / expected.norm())
        for result in (y, rounded)
    ]
    assert errors[0] < 1.02 * float(
        (expected.bfloat16().double() - expected).norm() / expected.norm()
    )
    assert errors[1] > 1.2 * errors[0], "otherwise this test compares nothing"
