"""Direct preference optimization (DPO): its loss and metrics on packed pairs of a chosen and a rejected sample.

Shapes: v pairs of a batch; B rows of N tokens; s labels of this rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ithaka.comm.mesh import Mesh
from ithaka.config import ConfigError, LossConfig
from ithaka.data.batch import Batch
from ithaka.inputs.batch import pack_batch, shard_label_values
from ithaka.model.distillation import use_reference
from ithaka.roots.decoder import GlobalSum

METRICS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen",
           "logps/rejected")  # fmt: skip


class DPO:
    """The DPO loss of `train_step`. `reference`: a frozen, parallel copy of the initial model; None: the model without
    its adapter."""

    def __init__(self, settings: LossConfig, model: Any, mesh: Mesh, reference: Any = None) -> None:
        self.beta, self.smoothing = settings.beta or 0.1, settings.label_smoothing
        self.model, self.mesh, self.reference = model, mesh, reference
        self._sums = torch.zeros(2 + len(METRICS), dtype=torch.float64, device=mesh.device)  # loss, METRICS, pairs
        if model.ithaka_root.balancing is not None:
            rule = "loss.type=dpo cannot be combined with the model's load-balancing loss"
            raise ConfigError(f"{rule}; set output_router_logits to false in its config.json")

    def compute(self, batch: Batch, divisor: int) -> tuple[Tensor, Any]:
        """Return this cp group's share of the loss, and the model's output. Adds to the sums of `take_means`."""
        with torch.no_grad(), use_reference(self.model, self.reference) as reference:
            before_v2, _ = self._sum_logprobs(reference, batch)
        own_v2, out = self._sum_logprobs(self.model, batch)
        rewards_v2 = self.beta * (own_v2 - before_v2)
        margins_v = rewards_v2[:, 0] - rewards_v2[:, 1]
        kept_v, swapped_v = -F.logsigmoid(margins_v), -F.logsigmoid(-margins_v)
        # Robust DPO (arXiv 2403.00409): unbiased if this fraction of pairs is swapped.
        losses_v = ((1 - self.smoothing) * kept_v - self.smoothing * swapped_v) / (1 - 2 * self.smoothing)
        count = batch.num_preferences  # v is at least 1
        figures = *rewards_v2.unbind(1), margins_v, (margins_v > 0).double(), *own_v2.unbind(1)
        sums = torch.stack([values_v.detach()[:count].sum() for values_v in (losses_v, *figures)])
        self._sums += torch.cat([sums, sums.new_tensor([count])])
        return losses_v[:count].sum() / divisor, out

    def take_means(self, prefix: str = "") -> tuple[float | None, dict[str, float]]:
        """Return the mean loss and metrics over the pairs of all ranks since the last call; no loss without pairs."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        dist.all_reduce(sums)
        *totals, count = (sums / self.mesh.cp_size).tolist()
        if not count:
            return None, {}
        loss, *means = (total / count for total in totals)
        return loss, {prefix + name: mean for name, mean in zip(METRICS, means, strict=True)}

    def _sum_logprobs(self, model: Any, batch: Batch) -> tuple[Tensor, Any]:
        """Return sums per answer, [v, 2] in float64, equal on all ranks of the cp group, and the model's output."""
        out = model(**batch.inputs, per_token=True)
        samples_BN = batch.labels.new_zeros(batch.labels.shape) if batch.sample_ids is None else batch.sample_ids
        packing = pack_batch(batch.inputs, batch.labels, self.mesh)
        samples_s = shard_label_values(samples_BN, self.mesh, packing).clamp(min=0)  # without a label, 0 is added
        sums = torch.zeros(2 * max(1, batch.num_preferences), dtype=torch.float64, device=self.mesh.device)
        sums = sums.index_add(0, samples_s, out.tokens.logprobs.double())
        return GlobalSum.apply(sums, self.mesh.cp_group).view(-1, 2), out
