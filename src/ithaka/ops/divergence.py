"""The divergence between a teacher's and a student's next-token distributions, and its gradient.

With teacher p, student q and m = beta p + (1 - beta) q, the generalized Jensen-Shannon divergence
(arXiv 2306.13649) is beta KL(p || m) + (1 - beta) KL(q || m). By convention beta = 0 is the forward
KL(p || q) and beta = 1 the reverse KL(q || p). The gradient with respect to the student's logits is

    (1 - beta) q (log q - log m - KL(q || m));   for the forward KL it is q - p

A logit may be -inf, for a token that a model never predicts. A token without mass adds nothing to a
KL divergence, and one that only the second distribution rules out makes it infinite.

Shapes: t tokens of a tile, Y vocabulary, o outcomes, k tokens whose probabilities are stored.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ithaka.ops.fused import NO_LOG, row_logsumexp, runs_in_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = None

_ROWS = 128  # computed at once, in fp32 or wider, without Triton
_BLOCK = 4096  # columns
_MIN_LOG_REST = -30.0  # log of the least mass of the tokens that are not stored


class Criterion(NamedTuple):
    beta: float = 0.0
    temperature: float = 1.0  # divides the logits of both models
    cross_entropy: float = 0.0  # its fraction of the loss; the rest is the divergence


def divergence_with_grad(
    student_tY: Tensor,
    teacher: Tensor | Sequence[Tensor],
    target_t: Tensor,
    criterion: Criterion,
    scales_2t: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return each row's divergence and student's entropy, at the temperature, and cross-entropy, in
    fp32 or wider. With `scales`, overwrite the student's logits by the gradient of divergence *
    scales[0] + cross-entropy * scales[1]. `teacher`: logits [t, Y]; or stored ids (-1: none) and
    their log-probabilities at the temperature, [t, k]. Then all other tokens are one outcome, with
    the mass that is left in both models."""
    if isinstance(teacher, Tensor) and runs_in_triton(student_tY):
        return _launch(student_tY, teacher, target_t, criterion, scales_2t)
    wide = torch.promote_types(student_tY.dtype, torch.float32)
    found = []
    for start in range(0, len(student_tY), _ROWS):
        rows = slice(start, start + _ROWS)
        with torch.enable_grad():
            logits_tY = student_tY[rows].detach().to(wide).requires_grad_()
            log_q_tY = (logits_tY / criterion.temperature).log_softmax(-1)
            if isinstance(teacher, Tensor):
                log_q_to = log_q_tY
                log_p_to = (teacher[rows].to(wide) / criterion.temperature).log_softmax(-1)
            else:
                ids_tk, log_p_tk = (t[rows] for t in teacher)
                log_q_to, log_p_to = _stored_outcomes(log_q_tY, ids_tk, log_p_tk.to(wide))
            divergence_t = _divergence(log_q_to, log_p_to, criterion.beta)
            loss_t = F.cross_entropy(logits_tY, target_t[rows], reduction="none")
        entropy_t = -(log_q_tY.exp() * log_q_tY.clamp(min=NO_LOG)).sum(-1)
        found.append((divergence_t.detach(), entropy_t.detach(), loss_t.detach()))
        if scales_2t is not None:
            losses = (divergence_t, loss_t)
            student_tY[rows] = torch.autograd.grad(losses, logits_tY, [*scales_2t[:, rows]])[0]
    return tuple(map(torch.cat, zip(*found, strict=True)))


def _stored_outcomes(log_q_tY: Tensor, ids_tk: Tensor, log_p_tk: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the stored tokens and of all others together, [t, k + 1], in
    both models."""
    padded_tY = F.pad(log_q_tY, (0, 1), value=NO_LOG)  # one more column, for ids of -1
    at_tk = ids_tk.remainder(padded_tY.shape[1])
    left_t1 = (1 - log_p_tk.exp().sum(-1, keepdim=True)).clamp(min=math.exp(_MIN_LOG_REST))
    others_t1 = padded_tY.scatter(1, at_tk, NO_LOG).logsumexp(-1, keepdim=True)
    others_t1 = others_t1.clamp(min=_MIN_LOG_REST)
    log_q_to = torch.cat([padded_tY.gather(1, at_tk), others_t1], -1)
    return log_q_to, torch.cat([log_p_tk, left_t1.log()], -1)


def _divergence(log_q_to: Tensor, log_p_to: Tensor, beta: float) -> Tensor:
    if beta == 0:
        return _kl(log_p_to, log_q_to)
    if beta == 1:
        return _kl(log_q_to, log_p_to)
    log_q_to = log_q_to.clamp(min=NO_LOG)
    log_p_to = log_p_to.clamp(min=NO_LOG)
    log_m_to = torch.logaddexp(log_q_to + math.log1p(-beta), log_p_to + math.log(beta))
    return beta * _kl(log_p_to, log_m_to) + (1 - beta) * _kl(log_q_to, log_m_to)


def _kl(log_a_to: Tensor, log_b_to: Tensor) -> Tensor:
    """Return KL(a || b) of each row."""
    a_to = log_a_to.exp()
    return (a_to * torch.where(a_to > 0, log_a_to - log_b_to, 0)).sum(-1)


def _launch(
    student_tY: Tensor,
    teacher_tY: Tensor,
    target_t: Tensor,
    criterion: Criterion,
    scales_2t: Tensor | None,
) -> tuple[Tensor, ...]:
    (t, Y) = student_tY.shape
    beta = float(criterion.beta)
    scale = 1 / criterion.temperature
    assert student_tY.stride(1) == 1 and teacher_tY.stride(1) == 1
    (lse_t,) = row_logsumexp(student_tY)
    (lse_y_t,) = row_logsumexp(teacher_tY, scale=scale)
    lse_x_t = lse_t if scale == 1 else row_logsumexp(student_tY, scale=scale)[0]
    lses_3t = torch.stack([lse_t, lse_x_t, lse_y_t])
    values_2t = lse_t.new_empty(2, t)
    cross_entropies_t = lse_t - student_tY.gather(1, target_t[:, None])[:, 0]
    scales = values_2t if scales_2t is None else scales_2t.to(torch.float32).contiguous()
    weights = (1 - beta, beta, 0.0, 0.0)
    if 0 < beta < 1:
        weights = (beta, 1 - beta, math.log(beta), math.log1p(-beta))
    tensors = (student_tY, teacher_tY, target_t, lses_3t, scales, values_2t)
    sizes = (t, Y, student_tY.stride(0), teacher_tY.stride(0), scale, *weights)
    options = {"MIXES": 0 < beta < 1, "FORWARD": beta == 0, "PASSES": 1 if scales_2t is None else 2}
    _divergence_kernel[(t,)](*tensors, *sizes, **options, BLOCK=_BLOCK, num_warps=8)
    return *values_2t, cross_entropies_t


if triton is not None:

    @triton.jit
    def _divergence_kernel(
        student,
        teacher,
        target,
        lses,
        scales,
        values,
        t,
        Y,
        student_stride,
        teacher_stride,
        scale,
        weight_p,
        weight_q,
        log_beta,
        log_rest,
        MIXES: tl.constexpr,
        FORWARD: tl.constexpr,
        PASSES: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """The second pass writes the gradient. `scale` is the inverse of the temperature."""
        row = tl.program_id(0).to(tl.int64)
        student += row * student_stride
        teacher += row * teacher_stride
        cols = tl.arange(0, BLOCK)
        plain_lse = tl.load(lses + row)
        lse_x = tl.load(lses + t + row)
        lse_y = tl.load(lses + 2 * t + row)
        of_p = tl.zeros((BLOCK,), tl.float32)
        of_q = tl.zeros((BLOCK,), tl.float32)
        entropy = tl.zeros((BLOCK,), tl.float32)
        for number in tl.static_range(PASSES):
            mean = tl.sum(of_q, 0)
            for start in range(0, Y, BLOCK):
                inside = start + cols < Y
                x = tl.load(student + start + cols, inside, other=-1e30).to(tl.float32)
                log_q = x * scale - lse_x
                log_p = (
                    tl.load(teacher + start + cols, inside, other=-1e30).to(tl.float32) * scale
                    - lse_y
                )
                # 0 outside, where all logarithms are finite
                q = tl.exp(log_q)
                p = tl.exp(log_p)
                log_m = log_p
                if FORWARD:
                    log_m = log_q
                if MIXES:
                    a = tl.maximum(log_q, -1e30) + log_rest
                    b = tl.maximum(log_p, -1e30) + log_beta
                    log_m = tl.maximum(a, b) + tl.log(1.0 + tl.exp(-tl.abs(a - b)))
                if number == 0:
                    of_p += tl.where(p > 0.0, p * (log_p - log_m), 0.0)
                    of_q += tl.where(q > 0.0, q * (log_q - log_m), 0.0)
                    entropy -= q * tl.maximum(log_q, -1e30)
                else:
                    grad = tl.where(q > 0.0, weight_q * q * (log_q - log_m - mean), 0.0)
                    if FORWARD:
                        grad = q - p
                    dlabel = tl.exp(x - plain_lse) - tl.where(
                        start + cols == tl.load(target + row), 1.0, 0.0
                    )
                    grad = grad * tl.load(scales + row) * scale + dlabel * tl.load(scales + t + row)
                    tl.store(student + start + cols, grad.to(student.dtype.element_ty), inside)
        tl.store(values + row, weight_p * tl.sum(of_p, 0) + weight_q * tl.sum(of_q, 0))
        tl.store(values + t + row, tl.sum(entropy, 0))
