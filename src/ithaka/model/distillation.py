"""Distillation: train on a teacher's distribution of every label, over the full vocabulary.

The teacher runs first, without gradients. Its logits exist only in the tiles of the student's loss.

Shapes: B rows of N tokens in the user's batch; s tokens on this rank; k stored log-probabilities
per token.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from transformers import PreTrainedModel

from ithaka.config import ConfigError
from ithaka.foreign.hugging_face import disable_adapter, enabled_adapters
from ithaka.inputs.calls import evaluating
from ithaka.inputs.shard import GatherTokens, Share, shard_label_values
from ithaka.layer.loss import Distilled, Teacher
from ithaka.model.logprobs import get_mesh
from ithaka.ops.divergence import Criterion
from ithaka.roots.decoder import ParallelOutput
from ithaka.roots.find import find_root
from ithaka.weights.adapters import find_active_adapter

# Arguments that a teacher does not get.
STUDENT_ONLY = ("num_items_in_batch", "per_token", "expert_indices")

StoredTeacher = Sequence[Tensor]  # ids and log-probabilities


def distill(
    model: PreTrainedModel,
    teacher: PreTrainedModel | StoredTeacher | None,
    input_ids: Tensor,
    labels: Tensor,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    cross_entropy: float = 0.0,
    **inputs: Any,
) -> ParallelOutput:
    """Call `model` with a loss that compares it with a teacher at every label, and return its
    output. Gradients of `out.loss` are exact.

    `teacher`: a model from `parallelize` with the same vocabulary, cp and ring, of any type; None:
    `model` without its adapter; or stored (ids, logprobs), [B, N, k], of tokens that may be token
    n, at the temperature: ids of -1 are ignored, and all tokens that are not stored are one outcome
    with the remaining mass. A label has the cross-entropy as its loss if its position exceeds the
    teacher's max_position_embeddings, or nothing is stored for it.

    `beta`: 0 is the forward KL(teacher || model), 1 the reverse KL(model || teacher), and a value
    between them the generalized Jensen-Shannon divergence, as in TRL. `temperature` divides the
    logits of both models; the loss is not multiplied by its square. `cross_entropy`: its fraction
    of the loss. Other arguments are as in a call of the model. `out.distilled` has the results of
    this rank's labels.
    """
    if not (0 <= beta <= 1 and 0 <= cross_entropy <= 1 and temperature > 0):
        settings = f"beta={beta}, cross_entropy={cross_entropy} or temperature={temperature}"
        fix = "use 0 to 1 for the first two, and a temperature above 0"
        raise ConfigError(f"{settings} is out of range; {fix}")
    model = find_root(model).model
    rows = {"input_ids": input_ids, **inputs}
    states: Tensor | tuple[Tensor, Tensor]
    if isinstance(teacher, tuple | list):
        ids, logprobs = teacher
        states = (ids, logprobs)
        teacher = None
    else:
        teacher = None if teacher is None else find_root(teacher).model
        _check_teacher(model, teacher)
        shared = {name: value for name, value in rows.items() if name not in STUDENT_ONLY}
        with torch.no_grad(), use_reference(model, teacher) as reference, evaluating(reference):
            out = reference(hidden_only=True, **shared)
        states = out.hidden
        rows["packed"] = out.packed
    distillation = Distillation(Criterion(beta, temperature, cross_entropy), model, teacher, states)
    return model(labels=labels, distillation=distillation, **rows)


def token_divergences(
    model: PreTrainedModel, teacher: PreTrainedModel | StoredTeacher | None, input_ids: Tensor
) -> Tensor:
    """Return KL(teacher || model) at every token of [B, N], without gradients, equal on all ranks
    of a cp group; NaN for the first token of a row, and where the teacher predicts nothing."""
    with torch.no_grad():
        out = distill(model, teacher, input_ids, input_ids)
    results = Distilled(*out.distilled or ())
    values_s1 = results.divergences.masked_fill(~results.taught, torch.nan)[:, None]
    assert out.packed is not None
    sharding = out.packed.sharding
    values_BN1 = GatherTokens.apply(values_s1, get_mesh(model), sharding, input_ids.shape)
    return F.pad(values_BN1[:, :-1, 0], (1, 0), value=torch.nan)


def _check_teacher(model: PreTrainedModel, teacher: PreTrainedModel | None) -> None:
    """Refuse a teacher whose predictions or shards do not match the model's."""
    if teacher is None:
        if find_active_adapter(model) is None:
            rule = "teacher=None is the model without its adapter, but it has none"
            raise ConfigError(f"{rule}; pass a parallel teacher")
        return
    meshes = (get_mesh(model), get_mesh(teacher))
    own, other = (f"cp={mesh.cp_size} and ring={mesh.ring_group.size()}" for mesh in meshes)
    if own != other:
        fix = "parallelize both in the same way"
        raise ConfigError(f"the teacher has {other}, the model {own}; {fix}")
    own = model.get_output_embeddings().weight.shape[0]
    other = teacher.get_output_embeddings().weight.shape[0]
    if own != other:
        fix = "use one with the same vocabulary"
        raise ConfigError(f"the teacher predicts {other} tokens, the model {own}; {fix}")


@dataclass(frozen=True)
class Distillation:
    criterion: Criterion
    student: PreTrainedModel
    teacher: PreTrainedModel | None
    # This rank's: the teacher's last hidden states, or stored ids and log-probabilities, which are
    # those of the batch up to `shard`.
    states: Tensor | tuple[Tensor, Tensor]

    @property
    def is_stored(self) -> bool:
        """Whether the loss needs no logits of a teacher."""
        return isinstance(self.states, tuple)

    def shard(self, share: Share, shape: torch.Size) -> "Distillation":
        """Select what is stored for this rank's labels: ids and log-probabilities, [s, k]; ids of
        -1 where there is no label. `shape`: of input_ids."""
        if not isinstance(self.states, tuple):
            return self
        mesh = get_mesh(self.student)
        ids_BNk, logprobs_BNk = self.states
        has_rows = ids_BNk.dim() == 3 and ids_BNk.shape[:2] == shape
        if not has_rows or ids_BNk.shape != logprobs_BNk.shape:
            ids = f"ids of shape {tuple(ids_BNk.shape)}"
            logprobs = f"log-probabilities of shape {tuple(logprobs_BNk.shape)}"
            fix = "pass two tensors [batch, tokens, k] for input_ids"
            raise ConfigError(f"teacher has {ids} and {logprobs}; {fix}")
        at_BN = torch.arange(shape.numel()).view(shape)
        at_s = shard_label_values(at_BN, mesh, share.packed, -1).to(ids_BNk.device)
        ids_sk = ids_BNk.flatten(0, 1)[at_s].masked_fill(at_s[:, None] < 0, -1)
        logprobs_sk = logprobs_BNk.flatten(0, 1)[at_s].masked_fill(ids_sk < 0, -torch.inf)
        return replace(self, states=(ids_sk.to(mesh.device), logprobs_sk.to(mesh.device)))

    @contextmanager
    def teach(self, share: Share) -> Iterator[Teacher]:
        """Gather the parameters of the teacher's head while the student's loss runs."""
        if isinstance(self.states, tuple):
            yield Teacher(self.criterion, (self.states[0] >= 0).any(-1), stored=self.states)
            return
        positions_s = share.positions_s
        rows_e = share.branch_rows_e
        if rows_e is not None:
            positions_s = torch.cat([positions_s, positions_s[rows_e]])
        model = self.teacher or self.student
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        x = self.states.to(model.get_output_embeddings().weight.dtype).contiguous()
        taught_s = positions_s < (limit or math.inf)
        if self.teacher is None:  # the student's head is gathered already
            head = partial(_run_head_without_adapters, self.student, enabled_adapters(self.student))
            yield Teacher(self.criterion, taught_s, x, head)
            return
        units = [unit for unit in (model.lm_head, model) if isinstance(unit, FSDPModule)]
        try:
            for unit in units:
                unit.unshard()
            yield Teacher(self.criterion, taught_s, x, model.ithaka_root.make_head().logits)
        finally:
            for unit in units:
                unit.reshard()


@contextmanager
def use_reference(
    model: PreTrainedModel, reference: PreTrainedModel | None = None
) -> Iterator[PreTrainedModel]:
    """Yield the reference: the frozen copy, or the model with its adapter disabled."""
    if reference is None:
        with _disabled(enabled_adapters(model)):
            yield model
        return
    try:
        yield reference
    finally:
        reference.reshard()  # after forward, the root keeps its parameters gathered for backward


def _run_head_without_adapters(model: PreTrainedModel, adapters: list[Any], x_tD: Tensor) -> Tensor:
    """Return the logits of a tile. The head's modules choose their weights when they run."""
    with _disabled(adapters):
        return model.ithaka_root.make_head().logits(x_tD)


@contextmanager
def _disabled(adapters: list[Any]) -> Iterator[None]:
    """Disable PEFT's modules. Its own method also changes requires_grad, which FSDP2 refuses."""
    for adapter in adapters:
        disable_adapter(adapter, True)
    try:
        yield
    finally:
        for adapter in adapters:
            disable_adapter(adapter, False)
