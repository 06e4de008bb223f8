"""Kernels of the loss, run on a CPU by a stand-in for Triton, compute what PyTorch does in fp64."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fake_triton import kernel_modules
from ithaka.ops.divergence import Criterion, divergence_with_grad
from ithaka.ops.fused import row_logsumexp, softmax_grad

MASKED = 30  # logits from this column on are -inf
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


@pytest.fixture(scope="module")
def kernels() -> Iterator[tuple[ModuleType, ModuleType]]:
    """ops/fused.py and ops/divergence.py with kernels. A row of 37 logits takes several blocks."""
    with (
        kernel_modules("fused", "divergence") as (fused, divergence),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setitem(fused._FLAT, "BLOCK", 16)
        patch.setattr(divergence, "_BLOCK", 16)
        for module in (fused, divergence):
            patch.setattr(module, "runs_in_triton", lambda x: True)
        yield fused, divergence


def draw(seed: int, is_masked: bool) -> Tensor:
    logits_tY = 3 * torch.randn(4, 37, generator=torch.Generator().manual_seed(seed))
    return logits_tY.index_fill(1, torch.arange(MASKED, 37), -torch.inf) if is_masked else logits_tY


@pytest.mark.parametrize("masks", [(False, False), (True, True), (False, True), (True, False)])
@pytest.mark.parametrize("beta, temperature", [(0.0, 0.6), (0.3, 1.7), (1.0, 0.8), (0.5, 1.0)])
def test_the_divergence_kernel_computes_what_the_plain_function_does(
    kernels, beta, temperature, masks
):
    """For a temperature, for a row without a label, and if the student or the teacher rules tokens
    out."""
    student_tY = draw(1, masks[0])
    teacher_tY = draw(2, masks[1])
    target_t = torch.tensor([3, 0, 29, 17])
    scales_2t = torch.rand(2, 4, generator=torch.Generator().manual_seed(3))
    scales_2t[:, 1] = 0
    criterion = Criterion(beta, temperature, 0.5)
    exact_tY = student_tY.double()
    expected = divergence_with_grad(
        exact_tY, teacher_tY.double(), target_t, criterion, scales_2t.double()
    )
    (_, kernel) = kernels
    found_tY = student_tY.clone()
    without_grad = kernel.divergence_with_grad(found_tY, teacher_tY, target_t, criterion, None)
    assert torch.equal(found_tY, student_tY)
    found = kernel.divergence_with_grad(found_tY, teacher_tY, target_t, criterion, scales_2t)
    for values in zip(without_grad, found, expected, strict=True):
        for value in values[:2]:
            torch.testing.assert_close(value.double(), values[2], **CLOSE)
    is_infinite = masks == (True, False) and beta == 0 or masks == (False, True) and beta == 1
    assert found[0].isinf().all() if is_infinite else found[0].isfinite().all()
    if not is_infinite:
        torch.testing.assert_close(found_tY.double(), exact_tY, **CLOSE)


@pytest.mark.parametrize("is_masked", [False, True])
def test_the_kernels_of_entropies_compute_what_the_plain_functions_do(kernels, is_masked):
    """The gradient is that of a loss with both log-probabilities and entropies."""
    (kernel, _) = kernels
    logits_tY = draw(1, is_masked)
    target_t = torch.tensor([3, 0, 29, 17])
    expected = row_logsumexp(logits_tY.double(), True, 0.7)
    found = kernel.row_logsumexp(logits_tY, True, 0.7)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, **CLOSE)
    lse_t, mean_t, _ = row_logsumexp(logits_tY.double(), True)
    scale_t = torch.linspace(0, 2, 4).double()
    dentropy_t = torch.linspace(-1, 1, 4).double()
    exact_tY = logits_tY.double()
    found_tY = logits_tY.clone()
    softmax_grad(exact_tY, target_t, lse_t, scale_t, (dentropy_t, lse_t - mean_t))
    entropy = dentropy_t.float(), (lse_t - mean_t).float()
    kernel.softmax_grad(found_tY, target_t, lse_t.float(), scale_t.float(), entropy)
    assert found_tY.isfinite().all()
    torch.testing.assert_close(found_tY.double(), exact_tY, **CLOSE)
