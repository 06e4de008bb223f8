"""The load-balancing loss of MoE models over all tokens and layers, without keeping logits.

It is transformers' `load_balancing_loss_func`, E * sum(f_e * p_e): f_e is the fraction of tokens
that choose expert e (f sums to k), p_e its mean probability, both over the n real tokens of all
layers. Layers add their tiles' choices and probabilities in forward. f is a constant in backward,
so the gradient of every token's probabilities is E * f / n.

Shapes: s tokens on this rank, t in a tile, E experts.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ithaka.blocks.tiles import sum_dtype


def no_router_logits(config: object) -> dict[str, bool]:
    """The option that turns router logits off, if there is one: layer/passes.py records them."""
    return {"output_router_logits": False} if hasattr(config, "output_router_logits") else {}


@dataclass
class LoadBalancingLoss:
    """The routers' sums of the current call."""

    top_k: int
    coefficient: float
    recorder: Any  # transformers' OutputRecorder of the router logits
    real_s: Tensor | None = None  # 1 for tokens, 0 for padding
    sums_2E: Tensor | None = None  # choices and probabilities
    num_rows: Tensor | None = None
    grad_E: Tensor | None = None  # of every token's probabilities, from the loss's backward on

    def start_call(self, real_s: Tensor) -> "LoadBalancingLoss":
        """Return empty sums for a new call. The backward of earlier ones may still need theirs."""
        return replace(self, real_s=real_s, sums_2E=None, num_rows=None, grad_E=None)

    def add(self, logits_tE: Tensor, rows: slice) -> None:
        """Add the real tokens of a tile."""
        assert self.real_s is not None
        real_t1 = self.real_s[rows, None].to(sum_dtype(logits_tE.dtype))
        probs_tE = logits_tE.softmax(-1)
        chosen_tE = torch.zeros_like(probs_tE).scatter_(
            1, probs_tE.topk(self.top_k, dim=-1).indices, 1
        )
        sums_2E = torch.stack([(chosen_tE * real_t1).sum(0), (probs_tE * real_t1).sum(0)])
        self.sums_2E = sums_2E if self.sums_2E is None else self.sums_2E + sums_2E
        self.num_rows = real_t1.sum() if self.num_rows is None else self.num_rows + real_t1.sum()

    def output_and_grad(self, logits_tE: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the probabilities of a tile, with their graph, and their gradient."""
        assert self.real_s is not None and self.grad_E is not None
        probs_tE = logits_tE.softmax(-1)
        return probs_tE, (self.real_s[rows, None] * self.grad_E).to(probs_tE.dtype)

    def mean_loss(self) -> Tensor:
        """Return the loss of this rank's tokens alone, without the coefficient."""
        assert self.sums_2E is not None and self.num_rows is not None
        choices_E, probs_E = self.sums_2E / self.num_rows
        return len(choices_E) * (choices_E * probs_E).sum()

    def loss(self, x_sD: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return this rank's share of the loss over the call's tokens, without the coefficient;
        the shares sum to the loss.

        Call it after the layers. x: the output of the last, so that its backward follows this one.
        """
        return _BalancingLoss.apply(x_sD, self, group)


class _BalancingLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_sD, balancing, group):
        assert balancing.sums_2E is not None
        E = balancing.sums_2E.shape[1]
        sums = torch.cat([balancing.sums_2E.flatten(), balancing.num_rows[None]])
        dist.all_reduce(sums, group=group)
        counts_E = sums[:E]
        probs_E = sums[E : 2 * E]
        num_rows = sums[-1]
        factor = E / num_rows**2
        ctx.balancing = balancing
        ctx.grad_E = factor * counts_E
        return factor * (counts_E * probs_E).sum() / group.size()

    @staticmethod
    def backward(ctx, dloss):
        ctx.balancing.grad_E = dloss * ctx.grad_E
        return None, None, None
