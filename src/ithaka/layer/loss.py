"""Tiled linear + cross-entropy: logits exist one tile at a time, and its bytes do not grow with S or V.

The gradient overwrites the tile's logits. That of the summed loss is made in forward, of three matrix products; that of
single tokens, which nobody knows before backward, of logits computed again.

Shapes: s tokens on this rank, t in a tile, D hidden, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ithaka.attention.fused import cross_entropy, row_logsumexp, scale, softmax_grad
from ithaka.layer.linear import Linear
from ithaka.layer.tiles import RAN_ALREADY, GradSum, apply_norm, norm_backward, run_norm, sum_dtype, tile_slices
from ithaka.phases import Holder, phase, tag

IGNORE_INDEX = -100


class TokenResults(NamedTuple):
    """Of every label: fp32 or wider, 0 (or False) where it is IGNORED."""

    logprobs: Tensor
    entropies: Tensor  # of the distribution that the label is taken from
    correct: Tensor  # bool: the label is the argmax, the first of several


def linear_cross_entropy(x_sD: Tensor, labels_s: Tensor, norm: nn.Module, head: Linear, tile: int) -> TokenResults:
    """Log-probabilities, entropies and hits [s] by head(norm(x)), `tile` tokens at a time. Labels are already shifted.

    All but hits are differentiable. Keeps x, and per token a log-sum-exp and the entropy; backward recomputes the
    logits.
    """
    params = (*head.tensors, *norm.parameters())
    return TokenResults(*_LinearCrossEntropy.apply(x_sD, labels_s, norm, head, tile, *params))


def summed_cross_entropy(
    x_sD: Tensor, labels_s: Tensor, norm: nn.Module, head: Linear, tile: int, divisor: float
) -> Tensor:
    """The summed loss of head(norm(x)) over `divisor`, a scalar: with gradients, if they are wanted, made at once."""
    params = (*head.tensors, *norm.parameters())
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (x_sD, *params))
    return _SummedCrossEntropy.apply(x_sD, labels_s, norm, head, tile, divisor, wanted, *params)


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    @phase("loss forward")
    def forward(ctx, x_sD, labels_s, norm, head, tile, divisor, wanted, *params):
        sum_ = x_sD.new_zeros((), dtype=sum_dtype(x_sD.dtype))
        dx_sD, grads = tag(torch.zeros_like(x_sD), Holder.RESIDUAL) if wanted else None, GradSum()
        for rows in tile_slices(len(x_sD), tile):
            valid_t, target_t1 = _targets(labels_s[rows])
            if dx_sD is None:
                loss_t = _tile_loss(x_sD[rows], target_t1, norm, head)
            else:
                scale_t = valid_t.to(sum_.dtype) / divisor
                loss_t = _tile_gradients(dx_sD[rows], x_sD[rows], target_t1[:, 0], scale_t, norm, head, grads)
            sum_ += torch.where(valid_t, loss_t, 0).sum()
        ctx.grads = [dx_sD, *(grads.take_as(p) for p in params)] if wanted else None
        return sum_ / divisor

    @staticmethod
    @phase("loss backward")
    def backward(ctx, dloss):
        if ctx.grads is None:
            raise RuntimeError(RAN_ALREADY)
        (dx_sD, *dparams), ctx.grads = ctx.grads, None
        for grad in (dx_sD, *dparams):
            if grad is not None:
                scale(grad, dloss)
        return dx_sD, None, None, None, None, None, None, *dparams


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    @phase("loss forward")
    def forward(ctx, x_sD, labels_s, norm, head, tile, *params):
        logprobs_s = x_sD.new_empty(len(x_sD), dtype=sum_dtype(x_sD.dtype))
        lse_s, entropies_s = torch.empty_like(logprobs_s), torch.empty_like(logprobs_s)
        correct_s = torch.empty_like(labels_s, dtype=torch.bool)
        for rows in tile_slices(len(x_sD), tile):
            logits_tV = head(apply_norm(norm, x_sD[rows]))
            valid_t, target_t1 = _targets(labels_s[rows])
            label_logit_t = logits_tV.gather(1, target_t1)[:, 0]
            lse_s[rows], mean_t = row_logsumexp(logits_tV, details=True)
            logprobs_s[rows] = torch.where(valid_t, label_logit_t - lse_s[rows], 0)
            entropies_s[rows] = torch.where(valid_t, lse_s[rows] - mean_t, 0)
            correct_s[rows] = valid_t & (logits_tV.argmax(-1) == target_t1[:, 0])
            del logits_tV  # before the next tile's
        ctx.save_for_backward(x_sD, labels_s, lse_s, entropies_s)
        ctx.norm, ctx.head, ctx.tile, ctx.params = norm, head, tile, params
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(correct_s)
        return logprobs_s, entropies_s, correct_s

    @staticmethod
    @phase("loss backward")
    def backward(ctx, dlogprobs_s, dentropies_s, _):
        x_sD, labels_s, lse_s, entropies_s = ctx.saved_tensors
        with torch.autocast(x_sD.device.type, enabled=False):
            dlosses_s = lse_s.new_zeros(()).expand_as(lse_s) if dlogprobs_s is None else -dlogprobs_s
            norm, head = ctx.norm, ctx.head
            grads = GradSum()
            dx_sD = tag(torch.zeros_like(x_sD), Holder.RESIDUAL)
            for rows in tile_slices(len(x_sD), ctx.tile):
                x_tD, h_tD = run_norm(norm, x_sD[rows])
                dlogits_tV = head(h_tD.detach())
                valid_t, target_t1 = _targets(labels_s[rows])
                entropy = None if dentropies_s is None else (valid_t * dentropies_s[rows], entropies_s[rows])
                softmax_grad(dlogits_tV, target_t1[:, 0], lse_s[rows], valid_t * dlosses_s[rows], entropy)
                _head_backward(dx_sD[rows], dlogits_tV, x_tD, h_tD, norm, head, grads)
                del dlogits_tV, h_tD  # before the next tile's
            return dx_sD, None, None, None, None, *(grads.take_as(p) for p in ctx.params)


def _tile_loss(x_tD: Tensor, target_t1: Tensor, norm: nn.Module, head: Linear) -> Tensor:
    logits_tV = head(apply_norm(norm, x_tD))
    (lse_t,) = row_logsumexp(logits_tV)
    return lse_t - logits_tV.gather(1, target_t1)[:, 0]


def _tile_gradients(
    dx_tD: Tensor, x_tD: Tensor, target_t: Tensor, scale_t: Tensor, norm: nn.Module, head: Linear, grads: GradSum
) -> Tensor:
    """The losses of a tile; adds the gradients of losses times `scale` to dx and `grads`."""
    x_tD, h_tD = run_norm(norm, x_tD)
    logits_tV = head(h_tD.detach())
    loss_t = cross_entropy(logits_tV, target_t, scale_t)
    _head_backward(dx_tD, logits_tV, x_tD, h_tD, norm, head, grads)
    return loss_t


def _head_backward(
    dx_tD: Tensor, dlogits_tV: Tensor, x_tD: Tensor, h_tD: Tensor, norm: nn.Module, head: Linear, grads: GradSum
) -> None:
    """Adds a tile's gradient at x to dx, and those of head and norm to `grads`. x and h: what `run_norm` returned."""
    dz_tr = head.reduced_grad(dlogits_tV)
    head.add_grads(dlogits_tV, h_tD.detach(), dz_tr, grads)
    norm_backward(dx_tD, norm, x_tD, h_tD, head.input_grad(dlogits_tV, dz_tr), grads)


def _targets(labels_t: Tensor) -> tuple[Tensor, Tensor]:
    valid_t = labels_t != IGNORE_INDEX
    return valid_t, torch.where(valid_t, labels_t, 0)[:, None]
