"""Tiled linear + cross-entropy: logits exist one tile at a time, and the tile's bytes do not grow with S or V.

In backward, the gradient overwrites the tile's logits.

Shapes: s tokens on this rank, t in a tile, D hidden, V vocabulary.
"""

from functools import partial

import torch
from torch import Tensor, nn

from ithaka.attention.fused import row_logsumexp, softmax_grad
from ithaka.layer.tiles import GradSum, apply_norm, sum_dtype, tile_backward, tile_slices
from ithaka.phases import RESIDUAL, phase, tag
from ithaka.plan.bytes import LOGITS_TILE_BYTES

IGNORED = -100
WHOLE_ROWS = 128  # matmuls are faster at multiples of it


def logits_tile_tokens(weight_VD: Tensor) -> int:
    tokens = max(1, LOGITS_TILE_BYTES // (len(weight_VD) * weight_VD.element_size()))
    return tokens // WHOLE_ROWS * WHOLE_ROWS or tokens


def linear_cross_entropy(x_sD: Tensor, labels_s: Tensor, norm: nn.Module, weight_VD: Tensor) -> Tensor:
    """Sum over valid labels of the cross-entropy of norm(x) @ weight^T, a scalar in fp32 or wider.

    Labels are already shifted. IGNORED labels do not count, and a shard without valid labels gives 0.
    Keeps x and one log-sum-exp per token; backward recomputes the logits.
    """
    return _LinearCrossEntropy.apply(x_sD, labels_s, norm, weight_VD, *norm.parameters())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    @phase("loss forward")
    def forward(ctx, x_sD, labels_s, norm, weight_VD, *norm_params):
        total = x_sD.new_zeros((), dtype=sum_dtype(x_sD.dtype))
        lse_s = x_sD.new_empty(len(x_sD), dtype=total.dtype)
        for rows in tile_slices(len(x_sD), logits_tile_tokens(weight_VD)):
            logits_tV = apply_norm(norm, x_sD[rows]) @ weight_VD.t()
            lse_s[rows] = row_logsumexp(logits_tV)
            valid_t, target_t1 = _targets(labels_s[rows])
            losses_t = lse_s[rows] - logits_tV.gather(1, target_t1)[:, 0]
            total += torch.where(valid_t, losses_t, 0).sum()
            del logits_tV  # before the next tile's
        ctx.save_for_backward(x_sD, labels_s, lse_s)
        ctx.norm, ctx.weight, ctx.norm_params = norm, weight_VD, norm_params
        return total

    @staticmethod
    @phase("loss backward")
    def backward(ctx, dtotal):
        with torch.autocast(dtotal.device.type, enabled=False):
            x_sD, labels_s, lse_s = ctx.saved_tensors
            norm, weight_VD = ctx.norm, ctx.weight
            grads = GradSum()
            dx_sD = tag(torch.empty_like(x_sD), RESIDUAL)
            for rows in tile_slices(len(x_sD), logits_tile_tokens(weight_VD)):
                h_tD = apply_norm(norm, x_sD[rows])
                dlogits_tV = h_tD @ weight_VD.t()
                valid_t, target_t1 = _targets(labels_s[rows])
                softmax_grad(dlogits_tV, target_t1[:, 0], lse_s[rows], valid_t * dtotal)
                if weight_VD.requires_grad:
                    grads.add_product(weight_VD, dlogits_tV, h_tD)
                dh_tD = dlogits_tV @ weight_VD
                del dlogits_tV
                dx_sD[rows] = tile_backward(partial(apply_norm, norm), ctx.norm_params, x_sD[rows], dh_tD, grads)
            weights = [grads.take_as(p) for p in (weight_VD, *ctx.norm_params)]
            return dx_sD, None, None, *weights


def _targets(labels_t: Tensor) -> tuple[Tensor, Tensor]:
    valid_t = labels_t != IGNORED
    return valid_t, torch.where(valid_t, labels_t, 0)[:, None]
