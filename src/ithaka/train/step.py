"""One training step, validation, and the update: optimizer, learning rate, gradient clipping.

Under FSDP2 every parameter, gradient and moment is a DTensor sharded over the ranks of a replica,
so each rank updates its own shards and only the gradient norm communicates (one scalar). With
`memory.offload_optimizer` FSDP2 keeps the shards and their gradients in host memory, and the same
code runs the fused CPU AdamW.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from ithaka.comm.mesh import Mesh
from ithaka.config import OptimConfig
from ithaka.data.batch import Batch
from ithaka.foreign.torch_core import norms, scale_in_place
from ithaka.inputs.calls import evaluating
from ithaka.phases import phase
from ithaka.profile.live import local_tensor
from ithaka.roots.find import find_root
from ithaka.train.objectives import MicroBatchLoss, Objective, SourceSums, count_step
from ithaka.train.preferences import DPO

_CHUNK_ELEMENTS = 1 << 20  # on a CPU, the norm of a chunk converts it to fp64


def learning_rate(step: int, optim: OptimConfig, num_steps: int) -> float:
    """Learning rate of update `step` (from 0): linear warm-up, then optim.schedule down to
    `min_lr_ratio * lr`, reached at update `optim.decay_steps` (null: the last of `num_steps`) and
    constant after it. A pure function of the step, so a checkpoint need not store it."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    end = optim.decay_steps or num_steps
    start = optim.decay_start(end)
    progress = min(max((step - start) / max(end - 1 - start, 1), 0.0), 1.0)
    left = 1.0 - progress
    if optim.schedule == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * left)


def _is_first(grad: Tensor) -> bool:
    """Whether this rank is the first of the ranks with the same elements."""
    if not isinstance(grad, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    axes = zip(grad.placements, grad.device_mesh.get_coordinate() or (), strict=True)
    return all(isinstance(placement, Shard) or coordinate == 0 for placement, coordinate in axes)


@torch.no_grad()
def clip_gradients(
    params: Iterable[nn.Parameter], max_norm: float | None, device: torch.device
) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm` (None: do not scale).

    Returns the global norm before clipping, an fp64 scalar on `device`. Squares are summed in fp64:
    in fp32 the sum depends on the number of ranks, and over 100M elements on one rank it is off by
    percents. Does not synchronize with the device, unless gradients are offloaded.
    `torch.nn.utils.clip_grad_norm_` would reduce on the gradients' device, for which there may be
    no process group when they are offloaded."""
    global_grads = [param.grad for param in params if param.grad is not None]
    grads = [local_tensor(grad) for grad in global_grads]
    own = [local_tensor(grad) for grad in global_grads if _is_first(grad)]
    square = _norms(own).square().sum().to(device)
    if dist.is_initialized():
        dist.all_reduce(square)
    norm = square.sqrt()
    if max_norm is not None and grads:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        factor = torch.where(norm.isfinite(), factor, 1.0)  # leave non-finite gradients visible
        dtype = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
        scale_in_place(grads, factor.to(grads[0].device, dtype))
    return norm


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norms of chunks of the tensors, in fp64."""
    chunks = list[Tensor]()
    for tensor in tensors:
        if tensor.numel():
            chunks += tensor.flatten().split(_CHUNK_ELEMENTS)
    if not chunks:
        return torch.zeros(1, dtype=torch.float64)
    return torch.stack(norms(chunks, 2.0, dtype=torch.float64))


@dataclass(frozen=True)
class StepResult:
    """Metrics of one step; all but `refused` are equal on every rank."""

    loss: float
    grad_norm: float
    label_tokens: int
    num_pairs: int  # query-key pairs in attention, summed over layers
    # loss/NAME of several sources, aux_loss and the load of experts, and the objective's metrics.
    source_losses: dict[str, float]
    # If `accepts` was false: this rank's part of the loss and the norm of its gradient shards.
    refused: tuple[float, float] | None = None
    balance: float | None = None  # attention work, maximum / mean over ranks; None: all equal
    ring_bytes: int = 0  # k, v, dk and dv sent, maximum over the ring's ranks


class _StepSums:
    """What the micro-batches of a step add up to on this rank."""

    def __init__(self, label_tokens: int, device: torch.device) -> None:
        self.label_tokens = label_tokens
        self.loss, self.aux_loss = torch.zeros(2, dtype=torch.float64, device=device).unbind()
        self.has_aux_loss = False
        self.own_losses: list[Tensor] = []
        self.max_pairs: list[float] = []  # of any rank, in each micro-batch
        self.ring_bytes = 0

    def add(self, micro: MicroBatchLoss, num_pairs: int) -> None:
        out = micro.out
        self.loss += micro.loss.detach()
        self.own_losses.append(micro.own)
        assert out.docs is not None
        self.max_pairs.append(num_pairs * out.docs.sharding.balance)
        self.ring_bytes += out.docs.sent_bytes
        if out.aux_loss is not None and out.num_tokens is not None:
            self.has_aux_loss = True
            self.aux_loss += out.aux_loss.detach() * out.num_tokens / self.label_tokens

    def reduce_work(self, num_pairs: int, mesh: Mesh) -> tuple[float | None, int]:
        """Return `balance` and `ring_bytes` of StepResult. Collective, on the host."""
        if mesh.dp_size == 1 and mesh.ring_group.size() == 1:
            return None, self.ring_bytes
        maxima = torch.tensor([self.ring_bytes, *self.max_pairs], dtype=torch.float64)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        balance = float(maxima[1:].sum()) * mesh.dp_size / max(1, num_pairs)
        return balance, int(maxima[0])


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    lr: float,
    clip_norm: float | None,
    mesh: Mesh,
    objective: Objective | None = None,
    source_names: Sequence[str] = (),
    seed_and_step: tuple[int, int] = (0, 0),
    accepts: Callable[[float, float], bool] = lambda loss, norm: True,
) -> StepResult:
    """Run one update on this rank's micro-batches. `objective`: by default the model's own loss.
    `seed_and_step`: for adapter.dropout. Skips the update if `accepts(loss, gradient norm)` is
    false.

    The global number of valid labels (for DPO, of preferences) is known before the first forward,
    so that every micro-batch is weighted by its number of labels."""
    objective = objective or Objective(model)
    counts = count_step(batches, mesh)
    _set_learning_rate(optimizer, lr)
    dropout = getattr(model, "ithaka_dropout", None)
    if dropout is not None:
        dropout.start_step(*seed_and_step)
    sums = _StepSums(counts.label_tokens, mesh.device)
    sources = SourceSums(source_names, mesh)
    for batch in batches:
        micro = objective.compute(batch, counts, sources)
        micro.loss.backward()
        sums.add(micro, batch.pairs.all_layers)
    loss = objective.take_loss()
    with phase("optimizer"):
        norm = float(clip_gradients(model.parameters(), clip_norm, mesh.device))
        loss = float(sums.loss) if loss is None else loss
        refused = None
        if accepts(loss, norm):
            optimizer.step()
        else:
            shards = [
                local_tensor(param.grad) for param in model.parameters() if param.grad is not None
            ]
            refused = float(sum(sums.own_losses)), float(_norms(shards).norm())
    optimizer.zero_grad(set_to_none=True)
    balance, ring_bytes = sums.reduce_work(counts.num_pairs, mesh)
    means = sources.means("loss") | expert_loads(model)
    means |= objective.take_metrics(counts)
    if sums.has_aux_loss:
        dist.all_reduce(sums.aux_loss)
        means["aux_loss"] = float(sums.aux_loss) / mesh.world_size
    return StepResult(
        loss=loss,
        grad_norm=norm,
        label_tokens=counts.label_tokens,
        num_pairs=counts.num_pairs,
        source_losses=means,
        refused=refused,
        balance=balance,
        ring_bytes=ring_bytes,
    )


def _set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        rate = lr * group.get("lr_factor", 1.0)
        if isinstance(group["lr"], Tensor):  # torchao's
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def expert_loads(model: nn.Module) -> dict[str, float]:
    """Return, over all ranks since the last call, the share of each layer's busiest expert (1 / E
    if the load is balanced) and the entropy of the load (1 if it is)."""
    counts = {}
    for i, layer in enumerate(find_root(model).layers):
        counts_E = layer.forward.experts.take_counts()
        if counts_E is not None:
            counts[i] = counts_E
    if not counts:
        return {}
    loads_LE = torch.stack(list(counts.values())).double()
    dist.all_reduce(loads_LE)
    loads_LE /= loads_LE.sum(1, keepdim=True)
    entropies_L = torch.special.entr(loads_LE).sum(1) / math.log(max(2, loads_LE.shape[1]))
    busiest = zip(counts, loads_LE.amax(1).tolist(), strict=True)
    entropies = zip(counts, entropies_L.tolist(), strict=True)
    loads = {f"experts/busiest/{i}": share for i, share in busiest}
    return loads | {f"experts/entropy/{i}": entropy for i, entropy in entropies}


@torch.no_grad()
def validation_loss(
    model: nn.Module,
    batches: Iterable[Batch],
    mesh: Mesh,
    source_names: Sequence[str] = (),
    dpo: DPO | None = None,
) -> tuple[float | None, dict[str, float]]:
    """Return the mean loss over the valid labels (for `dpo`, preferences) of all ranks, or None,
    and of each source. Every rank must pass the same number of batches."""
    sources = SourceSums(source_names, mesh)
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    num_labels = 0
    with evaluating(model):
        for batch in batches:
            if dpo is not None:
                dpo.add_pairs(batch, 1)
                continue
            out = model(**batch.inputs, per_token=sources.has_several)
            sources.add(batch, out.packed, out.tokens and -out.tokens.logprobs)
            total += out.loss.double() * out.num_tokens
            num_labels += out.num_tokens
    if isinstance(model, FSDPModule):
        model.reshard()  # after forward, the root keeps its parameters gathered for backward
    if dpo is not None:
        return dpo.take_means("val_")
    return float(total) / num_labels if num_labels else None, sources.means("val_loss")
