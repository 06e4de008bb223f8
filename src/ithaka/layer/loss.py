"""Output head and cross-entropy in tiles: only one tile's logits exist at a time, for any context and vocabulary.

The gradient overwrites the tile's logits. For the summed loss it is computed in forward, so that each tile takes three
matrix products. For per-token results it depends on the gradients of backward, which recomputes the logits.

Shapes: s tokens on this rank, t tokens of a tile, D hidden size, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ithaka.attention.fused import cross_entropy_with_grad, row_logsumexp, scale_in_place, softmax_grad
from ithaka.layer.linear import Linear
from ithaka.layer.tiles import BACKWARD_RAN_TWICE, GradSum, apply_norm, norm_backward, run_norm, sum_dtype, tile_slices
from ithaka.phases import Holder, phase, tag

IGNORE_INDEX = -100


class TokenResults(NamedTuple):
    """Per label, in fp32 or wider; 0 or False where the label is IGNORE_INDEX."""

    logprobs: Tensor
    entropies: Tensor  # entropy of the predicted distribution
    correct: Tensor  # bool: whether the label is the argmax (the first, if tied)


def linear_cross_entropy(x_sD: Tensor, labels_s: Tensor, norm: nn.Module, head: Linear, tile: int) -> TokenResults:
    """Return per-token results of head(norm(x)), `tile` tokens at a time. Labels are already shifted.

    Log-probabilities and entropies are differentiable. Saves x and, per token, the log-sum-exp and the entropy.
    """
    params = (*head.tensors, *norm.parameters())
    return TokenResults(*_LinearCrossEntropy.apply(x_sD, labels_s, norm, head, tile, *params))


def summed_cross_entropy(
    x_sD: Tensor, labels_s: Tensor, norm: nn.Module, head: Linear, tile: int, divisor: float
) -> Tensor:
    """Return the summed loss of head(norm(x)) divided by `divisor`. Computes the gradients at once, if required."""
    params = (*head.tensors, *norm.parameters())
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (x_sD, *params))
    return _SummedCrossEntropy.apply(x_sD, labels_s, norm, head, tile, divisor, needs_grad, *params)


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    @phase("loss forward")
    def forward(ctx, x_sD, labels_s, norm, head, tile, divisor, needs_grad, *params):
        sum_ = x_sD.new_zeros((), dtype=sum_dtype(x_sD.dtype))
        dx_sD, grads = tag(torch.zeros_like(x_sD), Holder.RESIDUAL) if needs_grad else None, GradSum()
        for rows in tile_slices(len(x_sD), tile):
            valid_t, target_t1 = _valid_and_target(labels_s[rows])
            if dx_sD is None:
                loss_t = _tile_loss(x_sD[rows], target_t1, norm, head)
            else:
                scale_t = valid_t.to(sum_.dtype) / divisor
                loss_t = _tile_loss_and_grads(dx_sD[rows], x_sD[rows], target_t1[:, 0], scale_t, norm, head, grads)
            sum_ += torch.where(valid_t, loss_t, 0).sum()
        ctx.grads = [dx_sD, *(grads.take_as(p) for p in params)] if needs_grad else None
        return sum_ / divisor

    @staticmethod
    @phase("loss backward")
    def backward(ctx, dloss):
        if ctx.grads is None:
            raise RuntimeError(BACKWARD_RAN_TWICE)
        (dx_sD, *dparams), ctx.grads = ctx.grads, None
        for grad in (dx_sD, *dparams):
            if grad is not None:
                scale_in_place(grad, dloss)
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
            valid_t, target_t1 = _valid_and_target(labels_s[rows])
            label_logit_t = logits_tV.gather(1, target_t1)[:, 0]
            lse_s[rows], mean_t = row_logsumexp(logits_tV, details=True)
            logprobs_s[rows] = torch.where(valid_t, label_logit_t - lse_s[rows], 0)
            entropies_s[rows] = torch.where(valid_t, lse_s[rows] - mean_t, 0)
            correct_s[rows] = valid_t & (logits_tV.argmax(-1) == target_t1[:, 0])
            del logits_tV  # before the next tile is allocated
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
                valid_t, target_t1 = _valid_and_target(labels_s[rows])
                entropy = None if dentropies_s is None else (valid_t * dentropies_s[rows], entropies_s[rows])
                softmax_grad(dlogits_tV, target_t1[:, 0], lse_s[rows], valid_t * dlosses_s[rows], entropy)
                _head_backward(dx_sD[rows], dlogits_tV, x_tD, h_tD, norm, head, grads)
                del dlogits_tV, h_tD  # before the next tile is allocated
            return dx_sD, None, None, None, None, *(grads.take_as(p) for p in ctx.params)


def _tile_loss(x_tD: Tensor, target_t1: Tensor, norm: nn.Module, head: Linear) -> Tensor:
    logits_tV = head(apply_norm(norm, x_tD))
    (lse_t,) = row_logsumexp(logits_tV)
    return lse_t - logits_tV.gather(1, target_t1)[:, 0]


def _tile_loss_and_grads(
    dx_tD: Tensor, x_tD: Tensor, target_t: Tensor, scale_t: Tensor, norm: nn.Module, head: Linear, grads: GradSum
) -> Tensor:
    """Return a tile's losses; add the gradients of losses * scale to dx and `grads`."""
    x_tD, h_tD = run_norm(norm, x_tD)
    logits_tV = head(h_tD.detach())
    loss_t = cross_entropy_with_grad(logits_tV, target_t, scale_t)
    _head_backward(dx_tD, logits_tV, x_tD, h_tD, norm, head, grads)
    return loss_t


def _head_backward(
    dx_tD: Tensor, dlogits_tV: Tensor, x_tD: Tensor, h_tD: Tensor, norm: nn.Module, head: Linear, grads: GradSum
) -> None:
    """Add a tile's input gradient to dx and parameter gradients to `grads`. x and h: results of `run_norm`."""
    dz_tr = head.lora_down_grad(dlogits_tV)
    head.add_grads(dlogits_tV, h_tD.detach(), dz_tr, grads)
    norm_backward(dx_tD, norm, x_tD, h_tD, head.input_grad(dlogits_tV, dz_tr), grads)


def _valid_and_target(labels_t: Tensor) -> tuple[Tensor, Tensor]:
    valid_t = labels_t != IGNORE_INDEX
    return valid_t, torch.where(valid_t, labels_t, 0)[:, None]
