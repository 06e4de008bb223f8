"""Kernels of ops/token_wise.py, run on a CPU by a stand-in for Triton, compute what their functions
in PyTorch do."""

import pytest
import torch

from fake_triton import kernel_modules
from ithaka.ops.token_wise import NormForm, apply_norm, sum_rounded
from parity import relative


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(
    ("count", "is_centered", "D"), [(1, False, 30), (2, False, 30), (3, True, 33), (4, False, 64)]
)
def test_the_norm_kernel_computes_what_the_plain_one_does(count, is_centered, D):
    form = NormForm(1e-6, 1.0, is_centered)
    weight_D = draw(D, seed=9)
    terms = [draw(2, 41, D, seed=seed) for seed in range(count)]
    with (
        kernel_modules("fused", "token_wise") as (_, kernels),
        pytest.MonkeyPatch.context() as patch,
    ):
        kernels.tl.int64 = torch.int64
        patch.setattr(kernels, "runs_kernels", lambda x: True)
        total = kernels.sum_rounded(terms)
        y = kernels.apply_norm(total, weight_D, form, terms if count > 1 else ())
    assert torch.equal(total, sum_rounded(terms))
    expected = apply_norm(total, weight_D, form, terms).float()
    # equal but for ties; a rounded sum is off by 2e-3
    assert (y.float() - expected).norm() < 2e-4 * expected.norm()


def test_the_norm_kernel_does_not_read_beyond_a_skipped_result():
    """A skipped MLP leaves one element for all, which a norm after it gets in the probe."""
    weight_D = torch.linspace(0.5, 1.5, 24)
    x_tD = torch.full((), 0.7).expand(5, 24)
    form = NormForm(1e-5, 0.0, False)
    with (
        kernel_modules("fused", "token_wise") as (_, kernels),
        pytest.MonkeyPatch.context() as patch,
    ):
        kernels.tl.int64 = torch.int64
        patch.setattr(kernels, "runs_kernels", lambda x: True)
        y_tD = kernels.apply_norm(x_tD, weight_D, form)
    assert relative(y_tD, apply_norm(x_tD, weight_D, form)) < 1e-6
