"""Tiled linear + cross-entropy: logits exist one tile at a time, and the tile's bytes do not grow with S or V.

Shapes: s tokens on this rank, t in a tile, D hidden, V vocabulary.
"""

from functools import partial

import torch
from torch import Tensor, nn

from ithaka.ops.tiles import GradSum, apply_norm, sum_dtype, tile_backward, tile_slices
from ithaka.phases import RESIDUAL, phase, tag

IGNORED = -100
LOGITS_TILE_BYTES = 2**29  # of fp32 logits


def logits_tile_tokens(vocab: int) -> int:
    return max(1, LOGITS_TILE_BYTES // (4 * vocab))


def linear_cross_entropy(x_sD: Tensor, labels_s: Tensor, norm: nn.Module, weight_VD: Tensor) -> Tensor:
    """Sum over valid labels of the cross-entropy of norm(x) @ weight^T, a scalar in fp32 or wider.

    Labels are already shifted; IGNORED ones count nothing, and a shard without valid labels gives 0.
    Keeps x and one log-sum-exp per token; logits are computed again in backward.
    """
    return _LinearCrossEntropy.apply(x_sD, labels_s, norm, weight_VD, *norm.parameters())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    @phase("loss forward")
    def forward(ctx, x_sD, labels_s, norm, weight_VD, *norm_params):
        total = x_sD.new_zeros((), dtype=sum_dtype(x_sD.dtype))
        lse_s = x_sD.new_empty(len(x_sD), dtype=total.dtype)
        for rows in tile_slices(len(x_sD), logits_tile_tokens(len(weight_VD))):
            logits_tV = (apply_norm(norm, x_sD[rows]) @ weight_VD.t()).to(total.dtype)
            lse_s[rows] = logits_tV.logsumexp(-1)
            valid_t, target_t1 = _targets(labels_s[rows])
            losses_t = lse_s[rows] - logits_tV.gather(1, target_t1)[:, 0]
            total += torch.where(valid_t, losses_t, 0).sum()
        ctx.save_for_backward(x_sD, labels_s, lse_s)
        ctx.norm, ctx.weight, ctx.norm_params = norm, weight_VD, norm_params
        return total

    @staticmethod
    @phase("loss backward")
    def backward(ctx, dtotal):
        x_sD, labels_s, lse_s = ctx.saved_tensors
        norm, weight_VD = ctx.norm, ctx.weight
        grads = GradSum()
        dx_sD = tag(torch.empty_like(x_sD), RESIDUAL)
        for rows in tile_slices(len(x_sD), logits_tile_tokens(len(weight_VD))):
            h_tD = apply_norm(norm, x_sD[rows])
            dlogits_tV = _logits_grad(h_tD @ weight_VD.t(), labels_s[rows], lse_s[rows], dtotal)
            if weight_VD.requires_grad:
                grads.add_product(weight_VD, dlogits_tV, h_tD)
            dh_tD = dlogits_tV @ weight_VD
            dx_sD[rows] = tile_backward(partial(apply_norm, norm), ctx.norm_params, x_sD[rows], dh_tD, grads)
        weights = [grads.take_as(p) for p in (weight_VD, *ctx.norm_params)]
        return dx_sD, None, None, *weights


def _targets(labels_t: Tensor) -> tuple[Tensor, Tensor]:
    valid_t = labels_t != IGNORED
    return valid_t, torch.where(valid_t, labels_t, 0)[:, None]


def _logits_grad(logits_tV: Tensor, labels_t: Tensor, lse_t: Tensor, dtotal: Tensor) -> Tensor:
    """(softmax - one-hot) * dtotal, zero for ignored labels, in the logits' dtype."""
    valid_t, target_t1 = _targets(labels_t)
    p_tV = logits_tV.to(lse_t.dtype).sub_(lse_t[:, None]).exp_()
    p_tV.scatter_add_(1, target_t1, p_tV.new_full((), -1.0).expand_as(target_t1))
    return p_tV.mul_((valid_t * dtotal)[:, None]).to(logits_tV.dtype)
