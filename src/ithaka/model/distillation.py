"""Distillation: train on a teacher's distribution of every label, over the full vocabulary.

The teacher runs first, without gradients, and keeps its last layer's output. Its logits exist only in the tiles of the
student's loss.

Shapes: B rows of N tokens in the user's batch; s tokens on this rank; k stored log-probabilities per token.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from ithaka.config import ConfigError
from ithaka.inputs.batch import GatherTokens, Share, pack_batch, shard_label_values
from ithaka.layer.loss import Head, Teacher
from ithaka.model.logprobs import get_mesh
from ithaka.ops.divergence import Criterion
from ithaka.roots.decoder import ParallelOutput

STUDENT_ONLY = ("num_items_in_batch", "per_token", "expert_indices")  # arguments that a teacher does not get


def distill(
    model: Any,
    teacher: Any,
    input_ids: Tensor,
    labels: Tensor,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    cross_entropy: float = 0.0,
    **inputs: Any,
) -> ParallelOutput:
    """Call `model` with a loss that compares it with a teacher at every label, and return its output. Gradients of
    `out.loss` are exact.

    `teacher`: a model from `parallelize` with the same vocabulary, cp and ring, of any type; None: `model` without its
    adapter; or stored log-probabilities, (ids, logprobs) of shape [B, N, k], where token n has those of the tokens that
    may follow token n - 1, at the temperature. Ids of -1 are ignored, and all tokens that are not stored are one
    outcome with the remaining mass. A label that the teacher does not predict, because its position exceeds the
    teacher's max_position_embeddings or no id is stored, has the cross-entropy as its loss.

    `beta`: 0 is the forward KL(teacher || model), 1 the reverse KL(model || teacher), and a value between them the
    generalized Jensen-Shannon divergence, as in TRL. `temperature` divides the logits of both models; the loss is not
    multiplied by its square. `cross_entropy`: its fraction of the loss. Other arguments are as in a call of the model.
    `out.distilled` has the losses, divergences, cross-entropies and entropies of this rank's labels.
    """
    for name, value, highest in (
        ("beta", beta, 1),
        ("cross_entropy", cross_entropy, 1),
        ("temperature", temperature, 0),
    ):
        if not (value > 0 if name == "temperature" else 0 <= value <= highest):
            rule = "above 0" if name == "temperature" else "from 0 to 1"
            raise ConfigError(f"{name}={value} is out of range; use a number {rule}")
    model, teacher = _base(model), _base(teacher)
    mesh, rows = get_mesh(model), {"input_ids": input_ids, **inputs}
    if isinstance(teacher, tuple | list):
        stored = _shard_stored(teacher, input_ids, {"labels": labels, **rows}, mesh)
        distillation: Any = _Stored(Criterion(beta, temperature, cross_entropy), stored)
    else:
        check_teacher(model, teacher)
        with torch.no_grad(), use_reference(model, teacher) as reference:
            was_training = reference.training
            reference.eval()
            hidden = reference(hidden_only=True, **{k: v for k, v in rows.items() if k not in STUDENT_ONLY}).hidden
            reference.train(was_training)
        distillation = _Taught(Criterion(beta, temperature, cross_entropy), model, teacher, hidden)
    return model(labels=labels, distillation=distillation, **rows)


def token_divergences(model: Any, teacher: Any, input_ids: Tensor) -> Tensor:
    """Return KL(teacher || model) at every token of [B, N], without gradients, equal on all ranks of a cp group; NaN
    for the first token of a row, and where the teacher predicts nothing."""
    with torch.no_grad():
        results, mesh = distill(model, teacher, input_ids, input_ids).distilled, get_mesh(model)
    assert results is not None
    values_s1 = results.divergences.masked_fill(~results.taught, torch.nan)[:, None]
    values_BN1 = GatherTokens.apply(values_s1, mesh, pack_batch({}, input_ids, mesh).sharding, input_ids.shape)
    return F.pad(values_BN1[:, :-1, 0], (1, 0), value=torch.nan)


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def check_teacher(model: Any, teacher: Any) -> None:
    """Refuse a teacher whose predictions or shards do not match the model's."""
    if teacher is None:
        if not adapter_layers(model):
            raise ConfigError("teacher=None is the model without its adapter, but it has none; pass a parallel teacher")
        return
    sizes = [(mesh.cp_size, mesh.ring_group.size(), mesh.dp_size) for mesh in map(get_mesh, (model, teacher))]
    if sizes[0] != sizes[1]:
        (cp, ring, _), (other_cp, other_ring, _) = sizes
        rule = f"the teacher has cp={other_cp} and ring={other_ring}, the model cp={cp} and ring={ring}"
        raise ConfigError(f"{rule}; parallelize both in the same way")
    own, other = (each.get_output_embeddings().weight.shape[0] for each in (model, teacher))
    check_vocabularies(own, other)


def check_vocabularies(own: int, other: int, name: str = "the teacher") -> None:
    if own != other:
        rule = f"{name} predicts {other} tokens, the model {own}: their distributions cannot be compared"
        raise ConfigError(f"{rule}; use a teacher with the same vocabulary")


@dataclass(frozen=True)
class _Stored:
    criterion: Criterion
    stored: tuple[Tensor, Tensor]

    @contextmanager
    def teach(self, share: Share) -> Iterator[Teacher]:
        ids_sk, logprobs_sk = self.stored
        yield Teacher((ids_sk >= 0).any(-1), ids_sk=ids_sk, logprobs_sk=logprobs_sk)


@dataclass(frozen=True)
class _Taught:
    """Hidden states of a teacher: another model, or None for the student without its adapter."""

    criterion: Criterion
    student: Any
    teacher: Any
    hidden: Tensor

    @contextmanager
    def teach(self, share: Share) -> Iterator[Teacher]:
        """Gather the parameters of the teacher's head. Those of the student's are gathered already."""
        model = self.student if self.teacher is None else self.teacher
        units = [unit for unit in (model.lm_head, model) if isinstance(unit, FSDPModule) and self.teacher is not None]
        for unit in units:
            unit.unshard()
        layers = adapter_layers(model) if self.teacher is None else []
        with _disabled(layers):
            head = model.ithaka_root.make_head()
        positions_s, rows_e = share.positions_s, share.branch_rows_e
        if rows_e is not None:
            positions_s = torch.cat([positions_s, positions_s[rows_e]])
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        taught_s = positions_s < (limit or math.inf)
        x = self.hidden.to(model.get_output_embeddings().weight.dtype).contiguous()
        yield Teacher(taught_s, x, _BaseHead(head, layers) if layers else head)
        for unit in units:
            unit.reshard()


@dataclass(frozen=True)
class _BaseHead:
    """A head whose adapters are disabled in each call; the student's head runs in between."""

    head: Head
    layers: Sequence[Any]

    def logits(self, x_tD: Tensor) -> Tensor:
        with _disabled(self.layers):
            return self.head.logits(x_tD)


def _shard_stored(
    stored: Sequence[Tensor], input_ids: Tensor, inputs: dict[str, Any], mesh: Any
) -> tuple[Tensor, Tensor]:
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


# ---- a frozen reference


def adapter_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_disable_adapters")]


@contextmanager
def use_reference(model: Any, reference: Any = None) -> Iterator[Any]:
    """Yield the reference: the frozen copy, or the model with its adapter disabled."""
    if reference is not None:
        yield reference
        reference.reshard()  # after forward, the root keeps its parameters gathered for backward
        return
    with _disabled(adapter_layers(model)):
        yield model


@contextmanager
def _disabled(layers: Sequence[Any]) -> Iterator[None]:
    for layer in layers:  # PEFT's own method would also change requires_grad, which FSDP2 does not expect
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
