"""Distillation: train on a teacher's distribution of every label, over the full vocabulary.

The teacher runs first, without gradients. Its logits exist only in the tiles of the student's loss.

Shapes: B rows of N tokens in the user's batch; s tokens on this rank; k stored log-probabilities per token.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from ithaka.config import ConfigError
from ithaka.inputs.batch import GatherTokens, Share, pack_batch, shard_label_values
from ithaka.inputs.calls import evaluating
from ithaka.layer.loss import Distilled, Teacher
from ithaka.model.logprobs import get_mesh
from ithaka.ops.divergence import Criterion
from ithaka.roots.decoder import ParallelOutput
from ithaka.roots.find import find_root
from ithaka.weights.adapters import find_active_adapter

STUDENT_ONLY = ("num_items_in_batch", "per_token", "expert_indices")  # arguments that a teacher does not get


def distill(
    model: Any, teacher: Any, input_ids: Tensor, labels: Tensor, *, beta: float = 0.0, temperature: float = 1.0,
    cross_entropy: float = 0.0, **inputs: Any,
) -> ParallelOutput:  # fmt: skip
    """Call `model` with a loss that compares it with a teacher at every label, and return its output. Gradients of
    `out.loss` are exact.

    `teacher`: a model from `parallelize` with the same vocabulary, cp and ring, of any type; None: `model` without its
    adapter; or stored (ids, logprobs), [B, N, k], of tokens that may be token n, at the temperature: ids of -1 are
    ignored, and all tokens that are not stored are one outcome with the remaining mass. A label has the cross-entropy
    as its loss if its position exceeds the teacher's max_position_embeddings, or nothing is stored for it.

    `beta`: 0 is the forward KL(teacher || model), 1 the reverse KL(model || teacher), and a value between them the
    generalized Jensen-Shannon divergence, as in TRL. `temperature` divides the logits of both models; the loss is not
    multiplied by its square. `cross_entropy`: its fraction of the loss. Other arguments are as in a call of the model.
    `out.distilled` has the results of this rank's labels.
    """
    if not (0 <= beta <= 1 and 0 <= cross_entropy <= 1 and temperature > 0):
        rule = f"beta={beta}, cross_entropy={cross_entropy} or temperature={temperature} is out of range"
        raise ConfigError(f"{rule}; use 0 to 1 for the first two, and a temperature above 0")
    model, states, rows = find_root(model).model, None, {"input_ids": input_ids, **inputs}
    if isinstance(teacher, tuple | list):
        states, teacher = _shard_stored(teacher, input_ids, {"labels": labels, **rows}, get_mesh(model)), None
    else:
        teacher = None if teacher is None else find_root(teacher).model
        _check_teacher(model, teacher)
        with torch.no_grad(), use_reference(model, teacher) as reference, evaluating(reference):
            states = reference(hidden_only=True, **{k: v for k, v in rows.items() if k not in STUDENT_ONLY}).hidden
    distillation = Distillation(Criterion(beta, temperature, cross_entropy), model, teacher, states)
    return model(labels=labels, distillation=distillation, **rows)


def token_divergences(model: Any, teacher: Any, input_ids: Tensor) -> Tensor:
    """Return KL(teacher || model) at every token of [B, N], without gradients, equal on all ranks of a cp group; NaN
    for the first token of a row, and where the teacher predicts nothing."""
    with torch.no_grad():
        results, mesh = Distilled(*distill(model, teacher, input_ids, input_ids).distilled or ()), get_mesh(model)
    values_s1 = results.divergences.masked_fill(~results.taught, torch.nan)[:, None]
    values_BN1 = GatherTokens.apply(values_s1, mesh, pack_batch({}, input_ids, mesh).sharding, input_ids.shape)
    return F.pad(values_BN1[:, :-1, 0], (1, 0), value=torch.nan)


def _check_teacher(model: Any, teacher: Any) -> None:
    """Refuse a teacher whose predictions or shards do not match the model's."""
    if teacher is None:
        if find_active_adapter(model) is None:
            raise ConfigError("teacher=None is the model without its adapter, but it has none; pass a parallel teacher")
        return
    sizes = [f"cp={mesh.cp_size} and ring={mesh.ring_group.size()}" for mesh in map(get_mesh, (model, teacher))]
    if sizes[0] != sizes[1]:
        raise ConfigError(f"the teacher has {sizes[1]}, the model {sizes[0]}; parallelize both in the same way")
    own, other = (each.get_output_embeddings().weight.shape[0] for each in (model, teacher))
    if own != other:
        raise ConfigError(f"the teacher predicts {other} tokens, the model {own}; use one with the same vocabulary")


@dataclass(frozen=True)
class Distillation:
    criterion: Criterion
    student: Any
    teacher: Any
    states: Any  # this rank's: the teacher's last hidden states, or stored ids and log-probabilities

    @property
    def is_stored(self) -> bool:
        """Whether the loss needs no logits of a teacher."""
        return isinstance(self.states, tuple)

    @contextmanager
    def teach(self, share: Share) -> Iterator[Teacher]:
        """Gather the parameters of the teacher's head while the student's loss runs."""
        if self.is_stored:
            yield Teacher(self.criterion, (self.states[0] >= 0).any(-1), stored=self.states)
            return
        positions_s, rows_e = share.positions_s, share.branch_rows_e
        if rows_e is not None:
            positions_s = torch.cat([positions_s, positions_s[rows_e]])
        model = self.teacher or self.student
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        x = self.states.to(model.get_output_embeddings().weight.dtype).contiguous()
        taught_s = positions_s < (limit or math.inf)
        if self.teacher is None:  # the student's head is gathered already
            head = partial(_run_head_without_adapters, self.student, _find_adapters(self.student))
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


def _shard_stored(stored: Any, input_ids: Tensor, inputs: dict[str, Any], mesh: Any) -> tuple[Tensor, Tensor]:
    """Return this rank's share of ids and log-probabilities, [s, k]; ids of -1 where there is no label."""
    ids_BNk, logprobs_BNk = stored
    if ids_BNk.shape != logprobs_BNk.shape or ids_BNk.shape[:2] != input_ids.shape or ids_BNk.dim() != 3:
        shapes = f"ids of shape {tuple(ids_BNk.shape)} and log-probabilities of shape {tuple(logprobs_BNk.shape)}"
        raise ConfigError(f"teacher has {shapes}; pass two tensors [batch, tokens, k] for input_ids")
    at_BN = torch.arange(input_ids.numel()).view(input_ids.shape)
    at_s = shard_label_values(at_BN, mesh, pack_batch(inputs, input_ids, mesh), -1).to(ids_BNk.device)
    ids_sk = ids_BNk.flatten(0, 1)[at_s].masked_fill(at_s[:, None] < 0, -1)
    logprobs_sk = logprobs_BNk.flatten(0, 1)[at_s].masked_fill(ids_sk < 0, -torch.inf)
    return ids_sk.to(mesh.device), logprobs_sk.to(mesh.device)


@contextmanager
def use_reference(model: Any, reference: Any = None) -> Iterator[Any]:
    """Yield the reference: the frozen copy, or the model with its adapter disabled."""
    if reference is None:
        with _disabled(_find_adapters(model)):
            yield model
        return
    try:
        yield reference
    finally:
        reference.reshard()  # after forward, the root keeps its parameters gathered for backward


def _run_head_without_adapters(model: Any, adapters: list[Any], x_tD: Tensor) -> Tensor:
    """Return the logits of a tile. The head's modules choose their weights when they run."""
    with _disabled(adapters):
        return model.ithaka_root.make_head().logits(x_tD)


def _find_adapters(model: Any) -> list[Any]:
    """Return PEFT's enabled modules: adapters, and wrappers of modules_to_save."""
    return [module for module in model.modules() if getattr(module, "_disable_adapters", None) is False]


@contextmanager
def _disabled(adapters: list[Any]) -> Iterator[None]:
    """Disable PEFT's modules. Its own method would also change requires_grad, which FSDP2 does not expect."""
    for adapter in adapters:
        adapter._disable_adapters = True
    try:
        yield
    finally:
        for adapter in adapters:
            adapter._disable_adapters = False
