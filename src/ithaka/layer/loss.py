"""Tiled linear + cross-entropy per token: logits exist one tile at a time, and its bytes do not grow with S or V.

In backward, the gradient overwrites the tile's logits.

Shapes: s tokens on this rank, t in a tile, D hidden, V vocabulary.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ithaka.attention.fused import row_logsumexp, softmax_grad
from ithaka.layer.linear import Linear
from ithaka.layer.tiles import GradSum, apply_norm, sum_dtype, tile_backward, tile_slices
from ithaka.phases import RESIDUAL, phase, tag
from ithaka.plan.bytes import LOGITS_TILE_BYTES

IGNORED = -100
WHOLE_ROWS = 128  # matmuls are faster at multiples of it


def logits_tile_tokens(weight_VD: Tensor) -> int:
    tokens = max(1, LOGITS_TILE_BYTES // (len(weight_VD) * weight_VD.element_size()))
    return tokens // WHOLE_ROWS * WHOLE_ROWS or tokens


class TokenResults(NamedTuple):
    """Of every label: fp32 or wider, 0 (or False) where it is IGNORED. Without details, log-probabilities alone."""

    logprobs: Tensor
    entropies: Tensor = None  # type: ignore[assignment]  # of the distribution that the label is taken from
    correct: Tensor = None  # type: ignore[assignment]  # bool: no token is likelier than the label


def linear_cross_entropy(
    x_sD: Tensor, labels_s: Tensor, norm: nn.Module, head: Linear, details: bool = False
) -> TokenResults:
    """Log-probabilities [s] by head(norm(x)); with `details` entropies and hits too. Labels are already shifted.

    All but hits are differentiable. Keeps x and one log-sum-exp per token (with details the entropy as well);
    backward recomputes the logits.
    """
    params = (*head.tensors, *norm.parameters())
    return TokenResults(*_LinearCrossEntropy.apply(x_sD, labels_s, norm, head, details, *params))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    @phase("loss forward")
    def forward(ctx, x_sD, labels_s, norm, head, details, *params):
        logprobs_s = x_sD.new_empty(len(x_sD), dtype=sum_dtype(x_sD.dtype))
        lse_s = torch.empty_like(logprobs_s)
        details_s: tuple[Tensor, ...] = ()
        if details:
            details_s = torch.empty_like(logprobs_s), torch.empty_like(labels_s, dtype=torch.bool)
        for rows in tile_slices(len(x_sD), logits_tile_tokens(head.weight_ND)):
            logits_tV = head(apply_norm(norm, x_sD[rows]))
            valid_t, target_t1 = _targets(labels_s[rows])
            label_logit_t = logits_tV.gather(1, target_t1)[:, 0]
            lse_s[rows], *more = row_logsumexp(logits_tV, details)
            logprobs_s[rows] = torch.where(valid_t, label_logit_t - lse_s[rows], 0)
            if details:
                (entropies_s, correct_s), (mean_t, top_t) = details_s, more
                entropies_s[rows] = torch.where(valid_t, lse_s[rows] - mean_t, 0)
                correct_s[rows] = valid_t & (label_logit_t >= top_t)
            del logits_tV  # before the next tile's
        ctx.save_for_backward(x_sD, labels_s, lse_s, *details_s[:1])
        ctx.norm, ctx.head, ctx.params = norm, head, params
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*details_s[1:])
        return logprobs_s, *details_s

    @staticmethod
    @phase("loss backward")
    def backward(ctx, dlogprobs_s, dentropies_s=None, _=None):
        x_sD, labels_s, lse_s, *entropies_s = ctx.saved_tensors
        with torch.autocast(x_sD.device.type, enabled=False):
            dlosses_s = lse_s.new_zeros(()).expand_as(lse_s) if dlogprobs_s is None else -dlogprobs_s
            norm, head = ctx.norm, ctx.head
            grads = GradSum()
            dx_sD = tag(torch.empty_like(x_sD), RESIDUAL)
            for rows in tile_slices(len(x_sD), logits_tile_tokens(head.weight_ND)):
                h_tD = apply_norm(norm, x_sD[rows])
                dlogits_tV = head(h_tD)
                valid_t, target_t1 = _targets(labels_s[rows])
                entropy = None if dentropies_s is None else (valid_t * dentropies_s[rows], entropies_s[0][rows])
                softmax_grad(dlogits_tV, target_t1[:, 0], lse_s[rows], valid_t * dlosses_s[rows], entropy)
                dz_tr = head.reduced_grad(dlogits_tV)
                head.add_grads(dlogits_tV, h_tD, dz_tr, grads)
                dh_tD = head.input_grad(dlogits_tV, dz_tr)
                del dlogits_tV
                dx_sD[rows] = tile_backward(partial(apply_norm, norm), norm.parameters(), x_sD[rows], dh_tD, grads)
            return dx_sD, None, None, None, None, *(grads.take_as(p) for p in ctx.params)


def _targets(labels_t: Tensor) -> tuple[Tensor, Tensor]:
    valid_t = labels_t != IGNORED
    return valid_t, torch.where(valid_t, labels_t, 0)[:, None]
