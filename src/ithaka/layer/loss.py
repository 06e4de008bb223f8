"""Output head and loss in tiles: only one tile's logits exist at a time.

The gradient overwrites the tile's logits. For the summed loss it is computed in forward, so that
each tile takes three matrix products. For per-token results it depends on the gradients of
backward, which recomputes the logits.

Shapes: s tokens on this rank, t tokens of a tile, e branch labels (inputs/shard.py), D hidden size,
Y vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ithaka.blocks.block import TileState
from ithaka.blocks.linear import Linear
from ithaka.blocks.tiles import (
    BACKWARD_RAN_TWICE,
    GradSum,
    graph_backward,
    run_tile,
    sum_dtype,
    tile_slices,
)
from ithaka.facts.sizes import IGNORE_INDEX
from ithaka.ops.divergence import Criterion, divergence_with_grad
from ithaka.ops.fused import cross_entropy_with_grad, row_logsumexp, scale_in_place, softmax_grad
from ithaka.phases import MemoryCategory, phase, set_category

ROW_ALIGNMENT = 64  # elements in which the rows of logits are allocated


class TokenResults(NamedTuple):
    """Per label, in fp32 or wider; 0 or False where the label is IGNORE_INDEX."""

    logprobs: Tensor
    entropies: Tensor  # of the predicted distribution
    correct: Tensor  # bool: the label is the argmax (the first, if tied)
    mean_logits: Tensor  # over the vocabulary, without gradient


class Distilled(NamedTuple):
    """Per label, in fp32 or wider, without gradients; 0 where the label is IGNORE_INDEX."""

    losses: Tensor
    divergences: Tensor  # also 0 where the teacher predicts nothing
    entropies: Tensor  # the student's, at the temperature
    cross_entropies: Tensor
    taught: Tensor  # bool: the teacher predicts the label; if not, its cross-entropy is the loss


Graph = tuple[Tensor, Tensor]  # of a tile: its x as a leaf, and the norm's output or the logits


class Head(Protocol):
    """The last norm and the output projection: x [t, D] -> logits [t, Y]."""

    @property
    def params(self) -> Sequence[Tensor]: ...
    def logits(self, x_tD: Tensor) -> Tensor: ...
    def run(self, x_tD: Tensor) -> tuple[Graph, Tensor]:
        """Return what `backward` needs, and logits that may be overwritten."""

    def backward(self, saved: Graph, dlogits_tY: Tensor, dx_tD: Tensor, grads: GradSum) -> None:
        """Add a tile's input gradient to dx and parameter gradients to `grads`."""


@dataclass(frozen=True)
class LinearHead:
    """linear(norm(x)), with a hand-written backward."""

    norm: nn.Module
    linear: Linear
    tile: TileState = field(default_factory=TileState)  # used if the norm is a block

    @property
    def params(self) -> Sequence[Tensor]:
        return (*self.linear.tensors, *self.norm.parameters())

    def logits(self, x_tD: Tensor) -> Tensor:
        return self._project(self.norm(x_tD))

    def run(self, x_tD: Tensor) -> tuple[Graph, Tensor]:
        x_tD, h_tD = run_tile(self.norm, x_tD)
        return (x_tD, h_tD), self._project(h_tD.detach())

    def _project(self, h_tD: Tensor) -> Tensor:
        """Compute logits in padded rows: a GPU takes up to 3x as long for unaligned ones."""
        vocab_size = len(self.linear.weight_MD)
        if torch.is_grad_enabled() or vocab_size % ROW_ALIGNMENT == 0:
            return self.linear(h_tD)
        row_length = -(-vocab_size // ROW_ALIGNMENT) * ROW_ALIGNMENT
        padded = h_tD.new_empty(len(h_tD), row_length)
        # On CPUs with AMX, matmuls in bf16 multiply it by 0, which leaves NaN.
        padded[:, vocab_size:].zero_()
        logits_tY = padded[:, :vocab_size]
        self.linear.write_to(logits_tY, h_tD)
        return logits_tY

    def backward(self, saved: Graph, dlogits_tY: Tensor, dx_tD: Tensor, grads: GradSum) -> None:
        x_tD, h_tD = saved
        dz_tr = self.linear.lora_down_grad(dlogits_tY)
        self.linear.add_grads(dlogits_tY, h_tD.detach(), dz_tr, grads)
        with self.tile.set(grads=grads):
            dh_tD = self.linear.input_grad(dlogits_tY, dz_tr)
            dx_tD += graph_backward(x_tD, h_tD, self.norm.parameters(), dh_tD, grads)


@dataclass(frozen=True)
class GraphHead:
    """Any function of a tile, differentiated with autograd."""

    function: Callable[[Tensor], Tensor]
    params: Sequence[nn.Parameter]

    def logits(self, x_tD: Tensor) -> Tensor:
        return self.function(x_tD)

    def run(self, x_tD: Tensor) -> tuple[Graph, Tensor]:
        x_tD, logits_tY = run_tile(self.function, x_tD)
        return (x_tD, logits_tY), logits_tY.detach()

    def backward(self, saved: Graph, dlogits_tY: Tensor, dx_tD: Tensor, grads: GradSum) -> None:
        x_tD, logits_tY = saved
        dx_tD += graph_backward(x_tD, logits_tY, self.params, dlogits_tY, grads)


@dataclass(frozen=True)
class ScaledHead:
    """A head whose logits are multiplied by `scale`, the inverse of a temperature."""

    head: Head
    scale: float

    @property
    def params(self) -> Sequence[Tensor]:
        return self.head.params

    def logits(self, x_tD: Tensor) -> Tensor:
        return self.head.logits(x_tD) * self.scale

    def run(self, x_tD: Tensor) -> tuple[Graph, Tensor]:
        saved, logits_tY = self.head.run(x_tD)
        return saved, logits_tY.mul_(self.scale)

    def backward(self, saved: Graph, dlogits_tY: Tensor, dx_tD: Tensor, grads: GradSum) -> None:
        self.head.backward(saved, dlogits_tY.mul_(self.scale), dx_tD, grads)


def linear_cross_entropy(
    x: Tensor, labels_s: Tensor, head: Head, tile: int, rows_e: Tensor | None = None
) -> TokenResults:
    """Return per-token results of head(x), `tile` tokens at a time. Labels are already shifted.

    x: [s, D] or [1, s, D]. `rows_e`, ascending: further rows of x, which predict the labels after
    the first s. Log-probabilities and entropies are differentiable. Saves x and, per token, the
    log-sum-exp and the entropy.
    """
    return TokenResults(*_LinearCrossEntropy.apply(x, labels_s, head, tile, rows_e, *head.params))


def summed_cross_entropy(
    x: Tensor, labels_s: Tensor, head: Head, tile: int, divisor: float, rows_e: Tensor | None = None
) -> Tensor:
    """Return the summed loss of head(x) over `divisor`. Computes required gradients at once. x and
    `rows_e`: as in `linear_cross_entropy`."""
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *head.params))
    return _SummedCrossEntropy.apply(
        x, labels_s, head, tile, rows_e, divisor, needs_grad, *head.params
    )


@dataclass(frozen=True)
class Teacher:
    """A teacher's predictions of this rank's labels: hidden states and a function that maps a tile
    of them to logits, or stored ids and log-probabilities, [s, k]. `taught`: bool, which labels
    they cover."""

    criterion: Criterion
    taught_s: Tensor
    x: Tensor | None = None
    logits: Callable[[Tensor], Tensor] | None = None
    stored: tuple[Tensor, ...] = ()

    def predict(self, rows: slice, rows_e: Tensor | None) -> Tensor | tuple[Tensor, ...]:
        """Return the teacher's logits of the labels `rows`, or what is stored for them."""
        if self.x is None or self.logits is None:
            return tuple(each[rows] for each in self.stored)
        x_sD = self.x.view(self.x.shape[-2:])
        branches = slice(rows.start - len(x_sD), rows.stop - len(x_sD))
        if rows_e is None or branches.start < 0:
            return self.logits(x_sD[rows])
        return self.logits(x_sD[rows_e[branches]])


def summed_divergence(
    x: Tensor,
    labels_s: Tensor,
    head: Head,
    tile: int,
    divisor: float,
    rows_e: Tensor | None,
    teacher: Teacher,
) -> tuple[Tensor, Distilled]:
    """As `summed_cross_entropy`; labels that a teacher predicts have the divergence from it as
    their loss. Also returns the results per label."""
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *head.params))
    loss, *results = _SummedDivergence.apply(
        x, labels_s, head, tile, rows_e, (divisor, teacher), needs_grad, *head.params
    )
    return loss, Distilled(*results)


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    @phase("loss forward")
    def forward(ctx, x, labels_s, head, tile, rows_e, divisor, needs_grad, *params):
        sum_ = x.new_zeros((), dtype=sum_dtype(x.dtype))
        dx = set_category(torch.zeros_like(x), MemoryCategory.RESIDUAL) if needs_grad else None
        grads = GradSum()
        for rows, x_tD, dx_tD in _tiles(x, dx, rows_e, tile):
            valid_t, target_t1 = _valid_and_target(labels_s[rows])
            saved, logits_tY = (None, head.logits(x_tD)) if dx_tD is None else head.run(x_tD)
            if dx_tD is None:
                loss_t = row_logsumexp(logits_tY)[0] - logits_tY.gather(1, target_t1)[:, 0]
            else:
                loss_t = cross_entropy_with_grad(
                    logits_tY, target_t1[:, 0], valid_t.to(sum_.dtype) / divisor
                )
                head.backward(saved, logits_tY, dx_tD, grads)
            del saved, logits_tY  # before the next tile is allocated
            sum_ += torch.where(valid_t, loss_t, 0).sum()
        ctx.grads = [dx, *(grads.take_rounded(p) for p in params)] if needs_grad else None
        return sum_ / divisor

    @staticmethod
    @phase("loss backward")
    def backward(ctx, dloss, *_):
        if ctx.grads is None:
            raise RuntimeError(BACKWARD_RAN_TWICE)
        dx, *dparams = ctx.grads
        ctx.grads = None
        # Once each: autograd may return one tensor for two parameters.
        for grad in {id(grad): grad for grad in (dx, *dparams) if grad is not None}.values():
            scale_in_place(grad, dloss)
        return dx, *[None] * 6, *dparams


class _SummedDivergence(_SummedCrossEntropy):
    @staticmethod
    @phase("loss forward")
    def forward(ctx, x, labels_s, head, tile, rows_e, divisor_and_teacher, needs_grad, *params):
        divisor, teacher = divisor_and_teacher
        share = teacher.criterion.cross_entropy
        valid_s = labels_s != IGNORE_INDEX
        dx = set_category(torch.zeros_like(x), MemoryCategory.RESIDUAL) if needs_grad else None
        grads = GradSum()
        values_3s = x.new_zeros(3, len(labels_s), dtype=sum_dtype(x.dtype))
        taught_s = teacher.taught_s & valid_s
        # Weights of each label's divergence and cross-entropy; a bool times a float is in fp32.
        taught_weights_s = taught_s.to(values_3s.dtype)
        valid_weights_s = valid_s.to(values_3s.dtype)
        weights_2s = torch.stack(
            [taught_weights_s * (1 - share), torch.where(taught_s, share, valid_weights_s)]
        )
        for rows, x_tD, dx_tD in _tiles(x, dx, rows_e, tile):
            saved, logits_tY = (None, head.logits(x_tD)) if dx_tD is None else head.run(x_tD)
            valid_t, target_t1 = _valid_and_target(labels_s[rows])
            weights_2t = None if dx_tD is None else weights_2s[:, rows] / divisor
            values = divergence_with_grad(
                logits_tY,
                teacher.predict(rows, rows_e),
                target_t1[:, 0],
                teacher.criterion,
                weights_2t,
            )
            values_3s[:, rows] = torch.where(valid_t, torch.stack(values), 0)
            if dx_tD is not None:
                head.backward(saved, logits_tY, dx_tD, grads)
            del saved, logits_tY  # before the next tile is allocated
        ctx.grads = [dx, *(grads.take_rounded(p) for p in params)] if needs_grad else None
        values_3s[0] = torch.where(taught_s, values_3s[0], 0)
        results = (weights_2s * values_3s[::2]).sum(0), *values_3s, taught_s
        ctx.mark_non_differentiable(*results)
        return results[0].sum() / divisor, *results


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    @phase("loss forward")
    def forward(ctx, x, labels_s, head, tile, rows_e, *params):
        logprobs_s = x.new_empty(len(labels_s), dtype=sum_dtype(x.dtype))
        lse_s, entropies_s, mean_logits_s = (torch.empty_like(logprobs_s) for _ in range(3))
        correct_s = torch.empty_like(labels_s, dtype=torch.bool)
        for rows, x_tD, _ in _tiles(x, None, rows_e, tile):
            logits_tY = head.logits(x_tD)
            valid_t, target_t1 = _valid_and_target(labels_s[rows])
            label_logit_t = logits_tY.gather(1, target_t1)[:, 0]
            lse_s[rows], mean_t, plain_mean_t = row_logsumexp(logits_tY, details=True)
            logprobs_s[rows] = torch.where(valid_t, label_logit_t - lse_s[rows], 0)
            entropies_s[rows] = torch.where(valid_t, lse_s[rows] - mean_t, 0)
            correct_s[rows] = valid_t & (logits_tY.argmax(-1) == target_t1[:, 0])
            mean_logits_s[rows] = torch.where(valid_t, plain_mean_t, 0)
            del logits_tY  # before the next tile is allocated
        ctx.save_for_backward(x, labels_s, lse_s, entropies_s)
        ctx.head = head
        ctx.tile = tile
        ctx.rows_e = rows_e
        ctx.params = params
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(correct_s, mean_logits_s)
        return TokenResults(logprobs_s, entropies_s, correct_s, mean_logits_s)

    @staticmethod
    @phase("loss backward")
    def backward(ctx, dlogprobs_s, dentropies_s, *_):
        x, labels_s, lse_s, entropies_s = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            if dlogprobs_s is None:
                dlosses_s = lse_s.new_zeros(()).expand_as(lse_s)
            else:
                dlosses_s = -dlogprobs_s
            head = ctx.head
            grads = GradSum()
            dx = set_category(torch.zeros_like(x), MemoryCategory.RESIDUAL)
            for rows, x_tD, dx_tD in _tiles(x, dx, ctx.rows_e, ctx.tile):
                saved, dlogits_tY = head.run(x_tD)
                valid_t, target_t1 = _valid_and_target(labels_s[rows])
                if dentropies_s is None:
                    entropy = None
                else:
                    entropy = (valid_t * dentropies_s[rows], entropies_s[rows])
                softmax_grad(
                    dlogits_tY, target_t1[:, 0], lse_s[rows], valid_t * dlosses_s[rows], entropy
                )
                head.backward(saved, dlogits_tY, dx_tD, grads)
                del saved, dlogits_tY  # before the next tile is allocated
            return dx, *[None] * 4, *(grads.take_rounded(p) for p in ctx.params)


def _tiles(
    x: Tensor, dx: Tensor | None, rows_e: Tensor | None, tile: int
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield a slice of labels, the rows of x that predict them, and where to add the gradients of
    these rows. Those of `rows_e` are added to dx in fp32, at the end."""
    x_sD = x.view(x.shape[-2:])
    dx_sD = None if dx is None else dx.view(dx.shape[-2:])
    s = len(x_sD)
    for rows in tile_slices(s, tile):
        yield rows, x_sD[rows], None if dx_sD is None else dx_sD[rows]
    if rows_e is None or not len(rows_e):
        return
    dx_eD = None if dx_sD is None else torch.zeros_like(x_sD[rows_e])
    for rows in tile_slices(len(rows_e), tile):
        labels = slice(s + rows.start, s + rows.stop)
        yield labels, x_sD[rows_e[rows]], None if dx_eD is None else dx_eD[rows]
    if dx_sD is not None and dx_eD is not None:
        first_e = torch.searchsorted(rows_e, rows_e)  # index of the first entry with the same row
        sums_eD = torch.zeros_like(dx_eD, dtype=sum_dtype(dx_eD.dtype))
        sums_eD.index_put_((first_e,), dx_eD.to(sums_eD.dtype), accumulate=True)
        dx_sD[rows_e] = (dx_sD[rows_e] + sums_eD[first_e]).to(dx_sD.dtype)


def _valid_and_target(labels_t: Tensor) -> tuple[Tensor, Tensor]:
    valid_t = labels_t != IGNORE_INDEX
    return valid_t, torch.where(valid_t, labels_t, 0)[:, None]
