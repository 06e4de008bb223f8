"""Direct preference optimization (DPO) on packed pairs of a chosen and a rejected sample.

Shapes: v pairs of a batch; B rows of N tokens; s labels of this rank.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ithaka.comm.mesh import Mesh
from ithaka.config import ConfigError, LossConfig
from ithaka.data.batch import Batch
from ithaka.inputs.shard import shard_label_values
from ithaka.model.distillation import use_reference
from ithaka.roots.decoder import GlobalSum, ParallelOutput
from ithaka.roots.find import find_root
from ithaka.train.objectives import MicroBatchLoss, Objective, SourceSums, StepCounts

METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


class DPO(Objective):
    """The DPO loss. `reference`: a frozen, parallel copy of the initial model; None: the model
    without its adapter."""

    def __init__(
        self, settings: LossConfig, model: nn.Module, mesh: Mesh, reference: nn.Module | None = None
    ) -> None:
        super().__init__(model)
        self.beta = settings.beta or 0.1
        self.smoothing = settings.label_smoothing
        self.mesh = mesh
        self.reference = reference
        # Of the loss, METRICS and pairs.
        self._sums = torch.zeros(2 + len(METRICS), dtype=torch.float64, device=mesh.device)
        self._metrics: dict[str, float] = {}  # of the step whose loss was taken
        if getattr(find_root(model), "balancing", None) is not None:
            rule = "loss.type=dpo cannot be combined with the model's load-balancing loss"
            raise ConfigError(f"{rule}; set output_router_logits to false in its config.json")

    def compute(self, batch: Batch, counts: StepCounts, sources: SourceSums) -> MicroBatchLoss:
        loss, out = self.add_pairs(batch, counts.preferences)
        return MicroBatchLoss(loss, loss.detach(), out)

    def take_loss(self) -> float | None:
        loss, self._metrics = self.take_means()
        return loss

    def take_metrics(self, counts: StepCounts) -> dict[str, float]:
        return self._metrics

    def add_pairs(self, batch: Batch, divisor: int) -> tuple[Tensor, ParallelOutput]:
        """Return this cp group's share of the loss, and the output. Adds to the sums of
        `take_means`."""
        with torch.no_grad(), use_reference(self.model, self.reference) as reference:
            before_v2, out = self._sum_logprobs(reference, batch)
        own_v2, out = self._sum_logprobs(self.model, batch._replace(packed=out.packed))
        rewards_v2 = self.beta * (own_v2 - before_v2)
        margins_v = rewards_v2[:, 0] - rewards_v2[:, 1]
        kept_v = -F.logsigmoid(margins_v)
        swapped_v = -F.logsigmoid(-margins_v)
        # Robust DPO (arXiv 2403.00409): unbiased if this fraction of pairs is swapped.
        smoothed_v = (1 - self.smoothing) * kept_v - self.smoothing * swapped_v
        losses_v = smoothed_v / (1 - 2 * self.smoothing)
        count = batch.num_preferences  # v is at least 1
        figures = *rewards_v2.unbind(1), margins_v, (margins_v > 0).double(), *own_v2.unbind(1)
        sums = torch.stack([values_v.detach()[:count].sum() for values_v in (losses_v, *figures)])
        self._sums += torch.cat([sums, sums.new_tensor([count])])
        return losses_v[:count].sum() / divisor, out

    def take_means(self, prefix: str = "") -> tuple[float | None, dict[str, float]]:
        """Return mean loss and metrics of all ranks since the last call; no loss without pairs."""
        sums = self._sums
        self._sums = torch.zeros_like(self._sums)
        dist.all_reduce(sums)
        *totals, count = (sums / self.mesh.cp_size).tolist()
        if not count:
            return None, {}
        loss, *means = (total / count for total in totals)
        return loss, {prefix + name: mean for name, mean in zip(METRICS, means, strict=True)}

    def _sum_logprobs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, ParallelOutput]:
        """Return sums per answer, [v, 2] in float64, equal on all ranks of the cp group, and the
        model's output."""
        out = model(**batch.inputs, per_token=True)
        samples_BN = batch.sample_ids
        if samples_BN is None:
            samples_BN = torch.zeros_like(batch.labels)
        # Where there is no label, 0 is added.
        samples_s = shard_label_values(samples_BN, self.mesh, out.packed).clamp(min=0)
        num_answers = 2 * max(1, batch.num_preferences)
        sums = torch.zeros(num_answers, dtype=torch.float64, device=self.mesh.device)
        sums = sums.index_add(0, samples_s, out.tokens.logprobs.double())
        return GlobalSum.apply(sums, self.mesh.cp_group).view(-1, 2), out
