"""One training step, validation, and what updates the weights: optimizer, learning rate, clipping.

Under FSDP2 every parameter, gradient and moment is a DTensor sharded over the ranks of a replica, so each rank
updates its own share and only the gradient norm communicates (one scalar).  With `memory.offload_optimizer`
FSDP2 keeps the shards and their gradients in host memory; the same code then runs the fused CPU AdamW there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from ithaka.config import OptimConfig
from ithaka.data.stream import Batch, num_valid
from ithaka.dist.mesh import Mesh
from ithaka.layer.loss import IGNORE_INDEX, TokenResults
from ithaka.model.batch import count_pairs, deal_batch, take_label_share
from ithaka.phases import phase

_CHUNK = 1 << 20  # elements; on a CPU each is widened to fp64 for its norm


def learning_rate(step: int, optim: OptimConfig, num_steps: int) -> float:
    """Rate of update `step` (0 is the first): a straight warm-up, then constant or a cosine down to
    `min_lr_ratio * lr`, reached at update `optim.decay_steps` (null: the last of `num_steps`) and kept from there on.
    Pure, so a resumed run needs only the step."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    decay_steps = max((optim.decay_steps or num_steps) - 1 - optim.warmup_steps, 1)
    progress = min((step - optim.warmup_steps) / decay_steps, 1.0)
    ratio = optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr * ratio


def make_optimizer(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters.  Weight decay acts on matrices (embeddings among them, as in
    nanoGPT and the Hugging Face trainer) and not on vectors (norms, biases).  The rate is set anew before
    every update."""
    params = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in params if p.ndim >= 2], [p for p in params if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    fused = all(p.device.type in ("cpu", "cuda") for p in params)
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=fused)


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _is_first(grad: Tensor) -> bool:
    """Whether this rank is the first of those that hold the same elements."""
    if not isinstance(grad, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    places = zip(grad.placements, grad.device_mesh.get_coordinate() or (), strict=True)
    return all(isinstance(placement, Shard) or at == 0 for placement, at in places)


@torch.no_grad()
def clip_gradients(params: Iterable[nn.Parameter], max_norm: float | None, device: torch.device) -> Tensor:
    """Scales all gradients so that their global norm is at most `max_norm` (None: measures only).

    Returns the norm before clipping over all ranks, a scalar in fp64 on `device`.  Squares are summed in fp64: in
    fp32 the sum depends on how many ranks share it, and 100M elements on one are off by percents.  Nothing waits for
    the device, except when the gradients live in host memory.  `torch.nn.utils.clip_grad_norm_` would reduce on
    the gradients' own device, for which there may be no process group when they are offloaded."""
    ready = dist.is_initialized()
    whole = [param.grad for param in params if param.grad is not None]
    grads = [_local(grad) for grad in whole]
    counted = [own for grad, own in zip(whole, grads, strict=True) if _is_first(grad)]
    square = torch.zeros((), dtype=torch.float64, device=device)
    chunks = [chunk for grad in counted if grad.numel() for chunk in grad.flatten().split(_CHUNK)]
    if chunks:
        square += torch.stack(torch._foreach_norm(chunks, 2.0, dtype=torch.float64)).square().sum().to(device)
    if ready:
        dist.all_reduce(square)
    norm = square.sqrt()
    if max_norm is not None and grads:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        factor = torch.where(norm.isfinite(), factor, 1.0)  # so that it shows whose gradients are not finite
        wide = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
        torch._foreach_mul_(grads, factor.to(grads[0].device, wide))
    return norm


def own_norm(params: Iterable[nn.Parameter]) -> float:
    """Of this rank's shares of the gradients."""
    grads = [_local(param.grad) for param in params if param.grad is not None]
    chunks = [chunk for grad in grads if grad.numel() for chunk in grad.flatten().split(_CHUNK)]
    return float(torch.stack(torch._foreach_norm(chunks, 2.0, dtype=torch.float64)).norm()) if chunks else 0.0


class SourceSums:
    """Losses and labels of each source of the data. With one source there is nothing to do, and nothing is done."""

    def __init__(self, names: Sequence[str], mesh: Mesh) -> None:
        self.several, self.names, self.mesh = len(names) > 1, names, mesh
        self._sums = torch.zeros(2, len(names), dtype=torch.float64, device=mesh.device)

    def add(self, batch: Batch, tokens: TokenResults | None) -> None:
        if tokens is not None and batch.source_ids is not None:
            deal = deal_batch(batch.inputs, batch.labels, self.mesh)
            valid_s = take_label_share(batch.labels, self.mesh, deal, IGNORE_INDEX) != IGNORE_INDEX
            values_2s = torch.stack([-tokens.logprobs.detach().double(), valid_s.double()])
            self._sums.index_add_(1, take_label_share(batch.source_ids, self.mesh, deal), values_2s)

    def means(self, what: str) -> dict[str, float]:
        """Of the sources with a label on any rank: {"what/NAME": mean}."""
        if not self.several:
            return {}
        dist.all_reduce(self._sums)
        sums = zip(self.names, *self._sums.tolist(), strict=True)
        return {f"{what}/{name}": loss / count for name, loss, count in sums if count}


@dataclass(frozen=True)
class StepResult:
    """Global figures of one step, the same on every rank."""

    loss: float
    grad_norm: float
    label_tokens: int
    num_pairs: int  # query-key pairs of attention, summed over layers
    source_losses: dict[str, float]  # loss/NAME; empty with one source
    # Where there was no update: this rank's part of the loss, and the norm of its shares of the gradients.
    refused: tuple[float, float] | None = None
    balance: float | None = None  # attention of the rank with most over the mean; None: all have the same
    ring_bytes: int = 0  # k, v, dk and dv that the ring's member with most sent


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    lr: float,
    clip_norm: float | None,
    mesh: Mesh,
    windows: Sequence[int | None] = (),
    source_names: Sequence[str] = (),
    accepts: Callable[[float, float], bool] = lambda loss, norm: True,
) -> StepResult:
    """One update from this rank's micro-batches; `windows` are the layers', `source_names` the data's. Without the
    update if `accepts` refuses the loss and the gradient norm. If no rank has a label, nothing is computed and nothing
    changes; `label_tokens` is 0.

    The number of valid labels of the global batch is known before the first forward, so every micro-step is weighted
    by its tokens and gradients are divided once."""
    labels = sum(num_valid(batch.labels) for batch in batches)
    pairs = [count_pairs(batch.document_ids, windows) for batch in batches]
    # The ranks of a cp group hold the same batch: one of them counts it.
    counts = torch.tensor([labels, *pairs]) * (mesh.cp_rank == 0)
    dist.all_reduce(counts)
    label_tokens, *all_pairs = counts.tolist()
    if not label_tokens:
        return StepResult(0.0, 0.0, 0, 0, {})
    for group in optimizer.param_groups:
        group["lr"] = lr
    total_loss = torch.zeros((), dtype=torch.float64, device=mesh.device)
    sources, largest, own_losses, ring_bytes = SourceSums(source_names, mesh), [], [], 0
    for batch, own_pairs in zip(batches, pairs, strict=True):
        out = model(**batch.inputs, num_items_in_batch=label_tokens, per_token=sources.several)
        sources.add(batch, out.tokens)
        out.loss.backward()
        total_loss += out.loss.detach()
        own_losses.append(out.own_loss)
        largest.append(own_pairs * out.docs.deal.balance)
        ring_bytes += out.docs.sent_bytes
    with phase("optimizer"):
        norm = float(clip_gradients(model.parameters(), clip_norm, mesh.device))
        loss, refused = float(total_loss), None
        if accepts(loss, norm):
            optimizer.step()
        else:
            refused = float(sum(own_losses)), own_norm(model.parameters())
    optimizer.zero_grad(set_to_none=True)
    balance = None
    if mesh.dp_size > 1 or mesh.ring_group.size() > 1:
        most = torch.tensor([ring_bytes, *largest], dtype=torch.float64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        balance, ring_bytes = float(most[1:].sum()) * mesh.dp_size / max(1, sum(all_pairs)), int(most[0])
    means = sources.means("loss")
    return StepResult(loss, norm, label_tokens, sum(all_pairs), means, refused, balance, ring_bytes)


@torch.no_grad()
def validation_loss(
    model: nn.Module, batches: Iterable[Batch], mesh: Mesh, source_names: Sequence[str] = ()
) -> tuple[float | None, dict[str, float]]:
    """Mean over all valid labels of all ranks, None without any, and of each source; every rank passes the same number
    of batches."""
    sources = SourceSums(source_names, mesh)
    total, num_labels = torch.zeros((), dtype=torch.float64, device=mesh.device), 0
    was_training = model.training
    model.eval()
    for batch in batches:
        out = model(**batch.inputs, per_token=sources.several)
        sources.add(batch, out.tokens)
        total += out.loss.double() * out.num_tokens
        num_labels += out.num_tokens
    model.train(was_training)
    if isinstance(model, FSDPModule):
        model.reshard()  # a root keeps its gathered parameters after forward, expecting a backward
    return float(total) / num_labels if num_labels else None, sources.means("val_loss")
