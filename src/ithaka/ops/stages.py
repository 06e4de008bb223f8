"""The heads of one stage: projected from tokens into exchange layout, and back.

Shapes: t tokens of a tile, D hidden, n = c * slots heads of the stage over all c ranks, K head dim, H all heads.
Heads are taken from the weights in the checkpoint's order; nothing is permuted on disk.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ithaka.ops.tiles import GradSum, apply_norm, sum_dtype, tile_backward, weight_grad


@dataclass(frozen=True)
class Projection:
    """One of q, k, v: a linear map, an optional norm over the head dim, and whether RoPE turns it."""

    linear: nn.Linear
    norm: nn.Module | None
    rotates: bool
    head_dim: int


@dataclass
class HeadSlice:
    """The rows of a projection that belong to `heads`; made once per stage and pass."""

    projection: Projection
    heads_n: Tensor
    weight: Tensor  # [n * K, D]
    bias: Tensor | None

    @classmethod
    def of(cls, projection: Projection, heads_n: Tensor) -> "HeadSlice":
        linear, K = projection.linear, projection.head_dim
        weight = take_heads(linear.weight, heads_n, K)
        bias = None if linear.bias is None else take_heads(linear.bias, heads_n, K)
        return cls(projection, heads_n, weight, bias)

    def forward(self, h_tD: Tensor, cos_tK: Tensor, sin_tK: Tensor) -> Tensor:
        """[t, n, K]: projected, normed, turned."""
        t_tnK = self._linear(h_tD)
        if self.projection.norm is not None:
            t_tnK = apply_norm(self.projection.norm, t_tnK)
        return rope(t_tnK, cos_tK, sin_tK) if self.projection.rotates else t_tnK

    def backward(
        self, d_tnK: Tensor, h_tD: Tensor, cos_tK: Tensor, sin_tK: Tensor, grads: GradSum, sums: GradSum
    ) -> Tensor:
        """dh [t, D]. The norm's gradient goes to `grads`; this slice's weight and bias gradients to `sums`."""
        if self.projection.rotates:
            d_tnK = rope(d_tnK, cos_tK, -sin_tK)  # a rotation's transpose turns the other way
        norm = self.projection.norm
        if norm is not None:
            d_tnK = tile_backward(partial(apply_norm, norm), norm.parameters(), self._linear(h_tD), d_tnK, grads)
        d_tN = d_tnK.flatten(1)
        if self.projection.linear.weight.requires_grad:
            sums.add(self.weight, weight_grad(d_tN, h_tD))
        if self.bias is not None and self.projection.linear.bias.requires_grad:
            sums.add(self.bias, d_tN.sum(0, dtype=sum_dtype(d_tN.dtype)))
        return d_tN @ self.weight

    def finish(self, grads: GradSum, sums: GradSum) -> None:
        """Adds this slice's summed gradients to those of the whole projection."""
        linear = self.projection.linear
        grads.add_heads(linear.weight, self.heads_n, sums.take(self.weight))
        if self.bias is not None:
            grads.add_heads(linear.bias, self.heads_n, sums.take(self.bias))

    def _linear(self, h_tD: Tensor) -> Tensor:
        return nn.functional.linear(h_tD, self.weight, self.bias).unflatten(1, (-1, self.projection.head_dim))


def take_heads(rows: Tensor, heads_n: Tensor, head_dim: int) -> Tensor:
    """The rows of `heads` from [H * K, ...], as [n * K, ...]."""
    return rows.view(-1, head_dim, *rows.shape[1:]).index_select(0, heads_n).flatten(0, 1)


def take_head_columns(weight_DN: Tensor, heads_n: Tensor, head_dim: int) -> Tensor:
    """The columns of `heads` from [D, H * K], as [D, n * K]."""
    return weight_DN.unflatten(1, (-1, head_dim)).index_select(1, heads_n).flatten(1)


def rope(t_tnK: Tensor, cos_tK: Tensor, sin_tK: Tensor) -> Tensor:
    """Rotary position embedding with Hugging Face's half-and-half pairing of dimensions."""
    first, second = t_tnK.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return t_tnK * cos_tK[:, None] + turned * sin_tK[:, None]
