"""The divergence between a teacher's and a student's next-token distributions, and its gradient, row by row.

With teacher p, student q and m = beta p + (1 - beta) q, the generalized Jensen-Shannon divergence (arXiv 2306.13649) is
beta KL(p || m) + (1 - beta) KL(q || m). By convention beta = 0 is the forward KL(p || q) and beta = 1 the reverse KL(q
|| p). The gradient with respect to the student's logits is q (g - <g>), where g is the derivative by q and <g> its mean
under q.

Shapes: t tokens of a tile, V vocabulary, k tokens whose probabilities are stored.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ithaka.ops.fused import row_logsumexp, runs_in_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = None

_ROWS = 256  # computed at once, in fp32 or wider, without Triton
_BLOCK = 4096  # columns
_MIN_LOG_REST = -30.0  # log of the least mass of the tokens that are not stored


class Distances(NamedTuple):
    """Per row, in fp32 or wider. Divergence and entropy are at the temperature, the cross-entropy is not."""

    divergences_t: Tensor
    cross_entropies_t: Tensor
    entropies_t: Tensor  # of the student


class Criterion(NamedTuple):
    """What a student minimizes."""

    beta: float = 0.0
    temperature: float = 1.0  # divides the logits of both models
    cross_entropy: float = 0.0  # its fraction of the loss; the rest is the divergence


def divergence_with_grad(
    student_tV: Tensor, teacher_tV: Tensor, target_t: Tensor, criterion: Criterion, scales_2t: Tensor | None
) -> Distances:
    """Compare two models' logits. With `scales`, overwrite the student's by the gradient of divergence * scales[0] +
    cross-entropy * scales[1]."""
    if runs_in_triton(student_tV):
        return _launch(student_tV, teacher_tV, target_t, criterion, scales_2t)

    def compare(rows: slice, log_q_tV: Tensor) -> tuple[Tensor, Tensor]:
        wide_tV = teacher_tV[rows].to(log_q_tV.dtype)
        return _compare(log_q_tV, (wide_tV / criterion.temperature).log_softmax(-1), criterion.beta)

    return _by_rows(student_tV, target_t, criterion, scales_2t, compare)


def topk_divergence_with_grad(
    student_tV: Tensor,
    ids_tk: Tensor,
    logprobs_tk: Tensor,
    target_t: Tensor,
    criterion: Criterion,
    scales_2t: Tensor | None,
) -> Distances:
    """As `divergence_with_grad`, for stored log-probabilities, at the temperature, of some ids (-1: none). All other
    tokens are one outcome, with the mass that is left in both models."""

    def compare(rows: slice, log_q_tV: Tensor) -> tuple[Tensor, Tensor]:
        padded_tV = F.pad(log_q_tV, (0, 1), value=-math.inf)  # one more column, for ids of -1
        at_tk, log_p_tk = ids_tk[rows].remainder(padded_tV.shape[1]), logprobs_tk[rows].to(log_q_tV.dtype)
        left_t1 = 1 - log_p_tk.exp().sum(-1, keepdim=True)
        log_p_tn = torch.cat([log_p_tk, left_t1.clamp(min=math.exp(_MIN_LOG_REST)).log()], -1)
        others_tV = padded_tV.scatter(1, at_tk, -math.inf)
        log_left_t1 = others_tV.logsumexp(-1, keepdim=True).clamp(min=_MIN_LOG_REST)
        log_q_tn = torch.cat([padded_tV.gather(1, at_tk), log_left_t1], -1)
        # A padded entry is an outcome that neither model has.
        log_p_tn, log_q_tn = (x.clamp(min=torch.finfo(x.dtype).min / 4) for x in (log_p_tn, log_q_tn))
        divergence_t, grad_tn = _compare(log_q_tn, log_p_tn, criterion.beta)
        grad_tV = (others_tV - log_left_t1).exp_().mul_(grad_tn[:, -1:])
        grad_tV.scatter_(1, at_tk, grad_tn[:, :-1])
        return divergence_t, grad_tV[:, :-1]

    return _by_rows(student_tV, target_t, criterion, scales_2t, compare)


def _by_rows(
    student_tV: Tensor, target_t: Tensor, criterion: Criterion, scales_2t: Tensor | None, compare
) -> Distances:
    """`compare(rows, log q)` returns the divergence and its gradient with respect to the logits over temperature."""
    found = []
    for start in range(0, len(student_tV), _ROWS):
        rows = slice(start, start + _ROWS)
        logits_tV = student_tV[rows].to(torch.promote_types(student_tV.dtype, torch.float32))
        log_q_tV, target_t1 = (logits_tV / criterion.temperature).log_softmax(-1), target_t[rows, None]
        divergence_t, grad_tV = compare(rows, log_q_tV)
        entropy_t = -(log_q_tV.exp() * log_q_tV).sum(-1)
        log_q_tV = logits_tV.log_softmax(-1)
        found.append((divergence_t, -log_q_tV.gather(1, target_t1)[:, 0], entropy_t))
        if scales_2t is not None:
            scale_t1, other_t1 = scales_2t[:, rows, None]
            label_t1 = log_q_tV.new_full((), -1.0).expand(len(log_q_tV), 1)
            grad_tV = grad_tV * (scale_t1 / criterion.temperature)
            student_tV[rows] = grad_tV.add_(log_q_tV.exp_().scatter_add_(1, target_t1, label_t1).mul_(other_t1))
    return Distances(*map(torch.cat, zip(*found, strict=True)))


def _compare(log_q_tn: Tensor, log_p_tn: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the divergence of n outcomes, and its gradient with respect to logits of q."""
    q_tn, p_tn = log_q_tn.exp(), log_p_tn.exp()
    if beta == 0:
        return (p_tn * (log_p_tn - log_q_tn)).sum(-1), q_tn - p_tn
    weight = 1.0 if beta == 1 else 1 - beta
    log_m_tn = log_p_tn
    if beta < 1:
        log_m_tn = torch.logaddexp(log_q_tn + math.log1p(-beta), log_p_tn + math.log(beta))
    g_tn = weight * (log_q_tn - log_m_tn)
    mean_t1 = (q_tn * g_tn).sum(-1, keepdim=True)
    of_teacher_t = 0.0 if beta == 1 else beta * (p_tn * (log_p_tn - log_m_tn)).sum(-1)
    return mean_t1[:, 0] + of_teacher_t, q_tn * (g_tn - mean_t1)


def _launch(
    student_tV: Tensor, teacher_tV: Tensor, target_t: Tensor, criterion: Criterion, scales_2t: Tensor | None
) -> Distances:
    (t, V), beta, scale = student_tV.shape, criterion.beta, 1 / criterion.temperature
    assert student_tV.stride(1) == 1 and teacher_tV.stride(1) == 1
    (lse_t,), (lse_y_t,) = row_logsumexp(student_tV), row_logsumexp(teacher_tV, scale=scale)
    lse_x_t = lse_t if scale == 1 else row_logsumexp(student_tV, scale=scale)[0]
    lses_3t, values_2t = torch.stack([lse_t, lse_x_t, lse_y_t]), lse_t.new_empty(2, t)
    cross_entropies_t = lse_t - student_tV.gather(1, target_t[:, None])[:, 0]
    scales = values_2t if scales_2t is None else scales_2t.to(torch.float32).contiguous()
    kind = 0 if beta == 0 else 1 if beta == 1 else 2
    logs = (math.log(beta), math.log1p(-beta)) if kind == 2 else (0.0, 0.0)
    sizes = t, V, student_tV.stride(0), teacher_tV.stride(0)
    options = {"KIND": kind, "GRAD": scales_2t is not None, "BLOCK": _BLOCK, "num_warps": 8}
    _divergence_kernel[(t,)](
        student_tV, teacher_tV, target_t, lses_3t, scales, values_2t, *sizes, scale, float(beta), *logs, **options
    )
    return Distances(values_2t[0], cross_entropies_t, values_2t[1])


if triton is not None:

    @triton.jit
    def _log_mixture(log_q, log_p, log_beta, log_rest):
        a, b = log_q + log_rest, log_p + log_beta
        higher = tl.maximum(a, b)
        return higher + tl.log(1.0 + tl.exp(tl.minimum(a, b) - higher))

    @triton.jit
    def _divergence_kernel(
        student, teacher, target, lses, scales, values, t, V, student_stride, teacher_stride, scale, beta, log_beta,
        log_rest, KIND: tl.constexpr, GRAD: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """KIND: 0 forward KL, 1 reverse KL, 2 Jensen-Shannon. `scale` is the inverse of the temperature."""
        row = tl.program_id(0).to(tl.int64)
        student += row * student_stride
        teacher += row * teacher_stride
        cols = tl.arange(0, BLOCK)
        plain_lse, lse_x, lse_y = tl.load(lses + row), tl.load(lses + t + row), tl.load(lses + 2 * t + row)
        of_student = tl.zeros((BLOCK,), tl.float32)
        of_teacher = tl.zeros((BLOCK,), tl.float32)
        entropy = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            inside = start + cols < V
            log_q = tl.load(student + start + cols, inside, other=-1e30).to(tl.float32) * scale - lse_x
            log_p = tl.load(teacher + start + cols, inside, other=-1e30).to(tl.float32) * scale - lse_y
            q = tl.exp(log_q)  # 0 outside, where all logarithms are finite
            p = tl.exp(log_p)
            entropy -= q * log_q
            if KIND == 0:
                of_teacher += p * (log_p - log_q)
            elif KIND == 1:
                of_student += q * (log_q - log_p)
            else:
                log_m = _log_mixture(log_q, log_p, log_beta, log_rest)
                of_teacher += p * (log_p - log_m)
                of_student += q * (log_q - log_m)
        mean = tl.sum(of_student, 0)
        divergence = mean
        if KIND == 0:
            divergence = tl.sum(of_teacher, 0)
        elif KIND == 2:
            divergence = beta * tl.sum(of_teacher, 0) + (1.0 - beta) * mean
        tl.store(values + row, divergence)
        tl.store(values + t + row, tl.sum(entropy, 0))
        if GRAD:
            by, by_label, label = tl.load(scales + row) * scale, tl.load(scales + t + row), tl.load(target + row)
            for start in range(0, V, BLOCK):
                inside = start + cols < V
                x = tl.load(student + start + cols, inside, other=-1e30).to(tl.float32)
                log_q = x * scale - lse_x
                log_p = tl.load(teacher + start + cols, inside, other=-1e30).to(tl.float32) * scale - lse_y
                q = tl.exp(log_q)
                if KIND == 0:
                    grad = q - tl.exp(log_p)
                elif KIND == 1:
                    grad = q * (log_q - log_p - mean)
                else:
                    log_m = _log_mixture(log_q, log_p, log_beta, log_rest)
                    grad = (1.0 - beta) * q * (log_q - log_m - mean)
                grad = grad * by + (tl.exp(x - plain_lse) - tl.where(start + cols == label, 1.0, 0.0)) * by_label
                tl.store(student + start + cols, grad.to(student.dtype.element_ty), inside)
