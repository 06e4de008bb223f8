"""One training step, validation, and the update: optimizer, learning rate, gradient clipping.

Under FSDP2 every parameter, gradient and moment is a DTensor sharded over the ranks of a replica, so each rank
updates its own shards and only the gradient norm communicates (one scalar). With `memory.offload_optimizer`
FSDP2 keeps the shards and their gradients in host memory, and the same code runs the fused CPU AdamW.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from ithaka.comm.mesh import Mesh
from ithaka.config import OptimConfig
from ithaka.data.batch import Batch, num_valid
from ithaka.inputs.batch import count_pairs, pack_batch, shard_label_values
from ithaka.inputs.calls import evaluating
from ithaka.layer.loss import IGNORE_INDEX
from ithaka.phases import phase
from ithaka.train.preferences import DPO

_CHUNK_ELEMENTS = 1 << 20  # on a CPU, the norm of a chunk converts it to fp64


def learning_rate(step: int, optim: OptimConfig, num_steps: int) -> float:
    """Learning rate of update `step` (from 0): linear warm-up, then optim.schedule down to `min_lr_ratio * lr`, reached
    at update `optim.decay_steps` (null: the last of `num_steps`) and constant after it. A pure function of the step, so
    a checkpoint need not store it."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    end = optim.decay_steps or num_steps
    start = optim.decay_start(end)
    progress = min(max((step - start) / max(end - 1 - start, 1), 0.0), 1.0)
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if optim.schedule == "cosine" else 1.0 - progress
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * left)


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _is_first(grad: Tensor) -> bool:
    """Whether this rank is the first of the ranks with the same elements."""
    if not isinstance(grad, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    axes = zip(grad.placements, grad.device_mesh.get_coordinate() or (), strict=True)
    return all(isinstance(placement, Shard) or coordinate == 0 for placement, coordinate in axes)


@torch.no_grad()
def clip_gradients(params: Iterable[nn.Parameter], max_norm: float | None, device: torch.device) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm` (None: do not scale).

    Returns the global norm before clipping, an fp64 scalar on `device`. Squares are summed in fp64: in fp32 the sum
    depends on the number of ranks, and over 100M elements on one rank it is off by percents. Does not synchronize with
    the device, unless gradients are offloaded. `torch.nn.utils.clip_grad_norm_` would reduce on the gradients' device,
    for which there may be no process group when they are offloaded."""
    global_grads = [param.grad for param in params if param.grad is not None]
    grads = [_local(grad) for grad in global_grads]
    square = _norms([_local(grad) for grad in global_grads if _is_first(grad)]).square().sum().to(device)
    if dist.is_initialized():
        dist.all_reduce(square)
    norm = square.sqrt()
    if max_norm is not None and grads:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        factor = torch.where(norm.isfinite(), factor, 1.0)  # leave non-finite gradients visible
        dtype = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
        torch._foreach_mul_(grads, factor.to(grads[0].device, dtype))
    return norm


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norms of chunks of the tensors, in fp64."""
    chunks = [chunk for tensor in tensors if tensor.numel() for chunk in tensor.flatten().split(_CHUNK_ELEMENTS)]
    if not chunks:
        return torch.zeros(1, dtype=torch.float64)
    return torch.stack(torch._foreach_norm(chunks, 2.0, dtype=torch.float64))


class SourceSums:
    """Sums the losses and labels of each data source. Does nothing if there is only one."""

    def __init__(self, names: Sequence[str], mesh: Mesh) -> None:
        self.has_several, self.names, self.mesh = len(names) > 1, names, mesh
        self._sums = torch.zeros(2, len(names), dtype=torch.float64, device=mesh.device)

    def add(self, batch: Batch, losses_s: Tensor | None) -> None:
        if losses_s is not None and batch.source_ids is not None:
            packing = pack_batch(batch.inputs, batch.labels, self.mesh)
            valid_s = shard_label_values(batch.labels, self.mesh, packing, IGNORE_INDEX) != IGNORE_INDEX
            values_2s = torch.stack([losses_s.detach().double(), valid_s.double()])
            self._sums.index_add_(1, shard_label_values(batch.source_ids, self.mesh, packing), values_2s)

    def means(self, what: str) -> dict[str, float]:
        """Return the mean loss of each source with a label on any rank: {"what/NAME": mean}."""
        if not self.has_several:
            return {}
        dist.all_reduce(self._sums)
        sums = zip(self.names, *self._sums.tolist(), strict=True)
        return {f"{what}/{name}": loss / count for name, loss, count in sums if count}


@dataclass(frozen=True)
class StepResult:
    """Metrics of one step; all but `refused` are equal on every rank."""

    loss: float
    grad_norm: float
    label_tokens: int
    num_pairs: int  # query-key pairs in attention, summed over layers
    # loss/NAME with several sources; for MoE models, aux_loss and the load of experts; for DPO, rewards and logps
    source_losses: dict[str, float]
    # If `accepts` was false: this rank's part of the loss and the norm of its gradient shards.
    refused: tuple[float, float] | None = None
    balance: float | None = None  # attention work, maximum / mean over ranks; None: equal on all ranks
    ring_bytes: int = 0  # k, v, dk and dv sent, maximum over the ring's ranks


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
    seed_and_step: tuple[int, int] = (0, 0),
    accepts: Callable[[float, float], bool] = lambda loss, norm: True,
    dpo: DPO | None = None,
    distill: Callable[[Batch, int], Any] | None = None,
) -> StepResult:
    """Run one update on this rank's micro-batches. `windows`: sliding window of each layer. `seed_and_step`: for
    adapter.dropout. Skips the update if `accepts(loss, gradient norm)` is false. `distill` calls model and teacher.

    The global number of valid labels (for `dpo`, of preferences) is known before the first forward, so that every
    micro-batch is weighted by its number of labels."""
    labels = sum(num_valid(batch.labels) for batch in batches)
    preferences = sum(batch.num_preferences for batch in batches)
    pairs = [count_pairs(batch.document_ids, windows, batch.parents) for batch in batches]
    # The ranks of a cp group have the same batch: count it once.
    counts = torch.tensor([labels, preferences, *pairs]) * (mesh.cp_rank == 0)
    dist.all_reduce(counts)
    label_tokens, preferences, *all_pairs = counts.tolist()
    for group in optimizer.param_groups:
        rate = lr * group.get("lr_factor", 1.0)
        group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate  # torchao uses a tensor
    if (dropout := getattr(model, "ithaka_dropout", None)) is not None:
        dropout.start_step(*seed_and_step)
    total_loss, aux_loss = torch.zeros(2, dtype=torch.float64, device=mesh.device).unbind()
    sources, max_pairs, own_losses, ring_bytes = SourceSums(source_names, mesh), [], [], 0
    distilled = torch.zeros(3, dtype=torch.float64, device=mesh.device)  # divergences, cross-entropies, their numbers
    has_aux_loss = False
    for batch, own_pairs in zip(batches, pairs, strict=True):
        if dpo is not None:
            part, out = dpo.compute(batch, preferences)
            own = part.detach()
        else:
            if distill is None:
                out = model(**batch.inputs, num_items_in_batch=label_tokens, per_token=sources.has_several)
                sources.add(batch, out.tokens and -out.tokens.logprobs)
            elif (results := (out := distill(batch, label_tokens)).distilled) is not None:
                sources.add(batch, results.losses)
                values = results.divergences, results.cross_entropies, results.taught
                distilled += torch.stack([value.sum().double() for value in values])
            part, own = out.loss, out.own_loss
        part.backward()
        total_loss += part.detach()
        own_losses.append(own)
        max_pairs.append(own_pairs * out.docs.sharding.balance)
        ring_bytes += out.docs.sent_bytes
        if out.aux_loss is not None:
            has_aux_loss = True
            aux_loss += out.aux_loss.detach() * out.num_tokens / label_tokens
    preference_loss, metrics = (None, {}) if dpo is None else dpo.take_means()
    with phase("optimizer"):
        norm = float(clip_gradients(model.parameters(), clip_norm, mesh.device))
        loss, refused = float(total_loss) if preference_loss is None else preference_loss, None
        if accepts(loss, norm):
            optimizer.step()
        else:
            shards = [_local(param.grad) for param in model.parameters() if param.grad is not None]
            refused = float(sum(own_losses)), float(_norms(shards).norm())
    optimizer.zero_grad(set_to_none=True)
    balance = None
    if mesh.dp_size > 1 or mesh.ring_group.size() > 1:
        maxima = torch.tensor([ring_bytes, *max_pairs], dtype=torch.float64)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        balance, ring_bytes = float(maxima[1:].sum()) * mesh.dp_size / max(1, sum(all_pairs)), int(maxima[0])
    means = sources.means("loss") | expert_loads(model) | metrics
    if distill is not None:
        dist.all_reduce(distilled)
        divergence, cross_entropy, num_taught = distilled.tolist()
        means |= {"divergence": divergence / max(num_taught, 1), "cross_entropy": cross_entropy / max(label_tokens, 1)}
    if has_aux_loss:
        dist.all_reduce(aux_loss)
        means["aux_loss"] = float(aux_loss) / mesh.world_size
    return StepResult(loss, norm, label_tokens, sum(all_pairs), means, refused, balance, ring_bytes)


def expert_loads(model: Any) -> dict[str, float]:
    """Return, over all ranks since the last call, the share of each layer's busiest expert (1 / E if the load is
    balanced) and the entropy of the load (1 if it is)."""
    counts = {str(i): layer.forward.experts.take_counts() for i, layer in enumerate(model.ithaka_root.layers)}
    counts = {name: counts_E for name, counts_E in counts.items() if counts_E is not None}
    if not counts:
        return {}
    loads_LE = torch.stack(list(counts.values())).double()
    dist.all_reduce(loads_LE)
    loads_LE /= loads_LE.sum(1, keepdim=True)
    entropies_L = torch.special.entr(loads_LE).sum(1) / math.log(max(2, loads_LE.shape[1]))
    busiest = {f"experts/busiest/{i}": share for i, share in zip(counts, loads_LE.amax(1).tolist(), strict=True)}
    return busiest | {f"experts/entropy/{i}": value for i, value in zip(counts, entropies_L.tolist(), strict=True)}


@torch.no_grad()
def validation_loss(
    model: nn.Module, batches: Iterable[Batch], mesh: Mesh, source_names: Sequence[str] = (), dpo: DPO | None = None
) -> tuple[float | None, dict[str, float]]:
    """Return the mean loss over the valid labels (for `dpo`, preferences) of all ranks, or None, and of each source.
    Every rank must pass the same number of batches."""
    sources = SourceSums(source_names, mesh)
    total, num_labels = torch.zeros((), dtype=torch.float64, device=mesh.device), 0
    with evaluating(model):
        for batch in batches:
            if dpo is not None:
                dpo.compute(batch, 1)
                continue
            out = model(**batch.inputs, per_token=sources.has_several)
            sources.add(batch, out.tokens and -out.tokens.logprobs)
            total += out.loss.double() * out.num_tokens
            num_labels += out.num_tokens
    if isinstance(model, FSDPModule):
        model.reshard()  # after forward, the root keeps its parameters gathered for backward
    if dpo is not None:
        return dpo.take_means("val_")
    return float(total) / num_labels if num_labels else None, sources.means("val_loss")
