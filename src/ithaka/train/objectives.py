"""What a step minimizes: the model's own loss or a teacher's; DPO is in preferences.py.

Shapes: s labels of this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ithaka.comm.mesh import Mesh
from ithaka.config import LossConfig
from ithaka.data.batch import Batch, num_valid
from ithaka.facts.sizes import IGNORE_INDEX
from ithaka.inputs.shard import PackedBatch, count_pairs, pack_batch, shard_label_values
from ithaka.model.distillation import distill
from ithaka.ops.divergence import Criterion
from ithaka.roots.decoder import ParallelOutput


@dataclass(frozen=True)
class StepCounts:
    """What the micro-batches of a step contain, over all ranks."""

    label_tokens: int
    preferences: int
    num_pairs: int  # query-key pairs, summed over layers


def count_step(batches: Sequence[Batch], mesh: Mesh) -> StepCounts:
    """Count labels, preferences and query-key pairs. One all-reduce, on the host."""
    labels = sum(num_valid(batch.labels) for batch in batches)
    preferences = sum(batch.num_preferences for batch in batches)
    pairs = sum(batch.pairs.all_layers for batch in batches)
    # The ranks of a cp group have the same batch: count it once.
    counts = torch.tensor([labels, preferences, pairs]) * (mesh.cp_rank == 0)
    dist.all_reduce(counts)
    return StepCounts(*counts.tolist())


def pack_for_training(batch: Batch, mesh: Mesh, windows: Sequence[int | None]) -> Batch:
    """Find the documents of a batch and count the pairs, once for all that a step does with them.
    `windows`: sliding window of each layer."""
    packed = pack_batch(batch.inputs, batch.input_ids.shape, mesh)
    return batch._replace(packed=packed, pairs=count_pairs(packed, windows))


class SourceSums:
    """Sums the losses and labels of each data source. Does nothing if there is only one."""

    def __init__(self, names: Sequence[str], mesh: Mesh) -> None:
        self.has_several = len(names) > 1
        self.names = names
        self.mesh = mesh
        self._sums = torch.zeros(2, len(names), dtype=torch.float64, device=mesh.device)

    def add(self, batch: Batch, packed: PackedBatch, losses_s: Tensor | None) -> None:
        if losses_s is None or batch.source_ids is None:
            return
        valid_s = shard_label_values(batch.labels, self.mesh, packed, IGNORE_INDEX) != IGNORE_INDEX
        values_2s = torch.stack([losses_s.detach().double(), valid_s.double()])
        sources_s = shard_label_values(batch.source_ids, self.mesh, packed)
        self._sums.index_add_(1, sources_s, values_2s)

    def means(self, what: str) -> dict[str, float]:
        """Return the mean loss of each source with a label on any rank: {"what/NAME": mean}."""
        if not self.has_several:
            return {}
        dist.all_reduce(self._sums)
        sums = zip(self.names, *self._sums.tolist(), strict=True)
        return {f"{what}/{name}": loss / count for name, loss, count in sums if count}


@dataclass(frozen=True)
class MicroBatchLoss:
    """A micro-batch's share of the step's loss."""

    loss: Tensor  # its backward gives the gradients
    own: Tensor  # this rank's term, detached
    out: ParallelOutput


class Objective:
    """The loss that the model computes: cross-entropy, or the user's function."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def compute(self, batch: Batch, counts: StepCounts, sources: SourceSums) -> MicroBatchLoss:
        """Run the forward of a micro-batch."""
        labels = counts.label_tokens
        per_token = sources.has_several
        out = self.model(**batch.inputs, num_items_in_batch=labels, per_token=per_token)
        sources.add(batch, out.packed, out.tokens and -out.tokens.logprobs)
        return MicroBatchLoss(out.loss, out.own_loss, out)

    def take_loss(self) -> float | None:
        """Return the step's loss if it is not the sum of those of the micro-batches. Collective."""
        return None

    def take_metrics(self, counts: StepCounts) -> dict[str, float]:
        """Return the step's metrics, over all ranks. Collective."""
        return {}


class TeacherLoss(Objective):
    """Distillation from a teacher: a frozen model, the model without its adapter (None), or what
    the data stores of one."""

    def __init__(
        self, settings: LossConfig, model: nn.Module, teacher: nn.Module | None, mesh: Mesh
    ) -> None:
        super().__init__(model)
        self.teacher = teacher
        self.is_stored = settings.is_stored
        self.criterion: dict[str, Any] = {
            name: getattr(settings, name) for name in Criterion._fields
        }
        # Divergences, cross-entropies, and the labels with a teacher.
        self._sums = torch.zeros(3, dtype=torch.float64, device=mesh.device)

    def compute(self, batch: Batch, counts: StepCounts, sources: SourceSums) -> MicroBatchLoss:
        teacher = batch.teacher if self.is_stored else self.teacher
        labels = counts.label_tokens
        out = distill(
            self.model, teacher, **batch.inputs, num_items_in_batch=labels, **self.criterion
        )
        results = out.distilled
        if results is not None:
            assert out.packed is not None
            sources.add(batch, out.packed, results.losses)
            values = (results.divergences, results.cross_entropies, results.taught)
            self._sums += torch.stack([value.sum().double() for value in values])
        assert out.loss is not None and out.own_loss is not None
        return MicroBatchLoss(out.loss, out.own_loss, out)

    def take_metrics(self, counts: StepCounts) -> dict[str, float]:
        sums = self._sums
        self._sums = torch.zeros_like(sums)
        dist.all_reduce(sums)
        divergence, cross_entropy, num_taught = sums.tolist()
        return {
            "divergence": divergence / max(num_taught, 1),
            "cross_entropy": cross_entropy / max(counts.label_tokens, 1),
        }
