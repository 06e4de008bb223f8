"""Kernels of ops/token_wise.py, run on a CPU by a stand-in for Triton, compute what their functions in PyTorch do."""

import pytest
import torch

from fake_triton import kernel_modules
from ithaka.ops.token_wise import NormForm, apply_norm, sum_rounded


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(("count", "is_centered", "D"), [(1, False, 30), (2, False, 30), (3, True, 33), (4, False, 64)])
def test_the_norm_kernel_computes_what_the_plain_one_does(count, is_centered, D):
    form, weight_D = NormForm(1e-6, 1.0, is_centered), draw(D, seed=9)
    terms = [draw(2, 41, D, seed=seed) for seed in range(count)]
    with kernel_modules("fused", "token_wise") as (_, kernels), pytest.MonkeyPatch.context() as patch:
        kernels.tl.int64 = torch.int64
        patch.setattr(kernels, "runs_kernels", lambda x: True)
        total = kernels.sum_rounded(terms)
        y = kernels.apply_norm(total, weight_D, form, terms if count > 1 else ())
    assert torch.equal(total, sum_rounded(terms))
    expected = apply_norm(total, weight_D, form, terms).float()
    assert (y.float() - expected).norm() < 2e-4 * expected.norm()  # equal but for ties; a rounded sum is off by 2e-3
