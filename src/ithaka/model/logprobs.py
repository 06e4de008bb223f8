"""Differentiable log-probabilities and entropies per token, for preference and
reinforcement-learning losses.

Shapes: B rows of N tokens in the user's batch; s tokens on this rank.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ithaka.comm.mesh import Mesh
from ithaka.config import ConfigError
from ithaka.inputs.calls import ARGUMENTS, KERNEL_ARGUMENTS
from ithaka.inputs.shard import (
    INPUTS,
    GatherTokens,
    pack_batch,
    read_tensors,
    shard_label_values,
    split_positions,
)
from ithaka.layer.loss import TokenResults
from ithaka.sharding.tokens import contiguous_sharding


def token_logprobs(
    model: PreTrainedModel,
    input_ids: Tensor,
    labels: Tensor,
    *,
    share: bool = False,
    **inputs: object,
) -> TokenResults:
    """Log-probability, entropy, whether the argmax is correct, and the mean logit, for every label.

    `model` comes from `parallelize`. Returns [B, N] tensors, equal on all ranks of a cp group; the
    entry of a label is at the label's own position. `labels` and `inputs` (document_ids, parents,
    position_ids, attention_mask) are as in a call of the model: labels of -100 and the first label
    of a row do not count. `temperature` divides the logits. They are computed tile by tile, so
    memory does not grow with tokens x vocabulary.

    Backward sums gradients over all ranks. All ranks of a cp group must compute the same loss from
    the result. Losses of data-parallel groups add up, so divide each by the count of the global
    batch.

    `share=True` returns only the labels that this rank predicts, as [s] tensors (longer with
    `parents`), to combine with `label_share`; then the losses of all ranks add up.
    """
    if inputs.get("shift_labels") is not None:
        rule = "got labels and shift_labels, which would replace them"
        raise TypeError(f"token_logprobs {rule}; pass labels only")
    if share:
        get_mesh(model)
        return model(input_ids=input_ids, labels=labels, per_token=True, **inputs).tokens
    return token_logprobs_and_aux(model, input_ids, labels, **inputs)[0]


def token_logprobs_and_aux(
    model: PreTrainedModel, input_ids: Tensor, labels: Tensor, **inputs: Any
) -> tuple[TokenResults, Tensor | None]:
    """`token_logprobs`, and the cp group's load-balancing loss, if the configuration has one."""
    mesh = get_mesh(model)
    out = model(input_ids=input_ids, labels=labels, per_token=True, **inputs)
    tokens = out.tokens
    values_s4 = torch.stack([x.to(tokens.logprobs.dtype) for x in tokens], dim=-1)
    packed = out.packed
    if packed.parents:
        tokens = packed.label_table[0].flatten()
        slots = torch.full((packed.starts[-1] + 1,), len(tokens))  # by token; this: no label
        slots[tokens] = torch.arange(len(tokens))
        slots = slots[: input_ids.numel()].to(values_s4.device)
        sharding = contiguous_sharding(len(tokens), 1)
        values_1S4 = GatherTokens.apply(values_s4, mesh, sharding, (1, len(tokens)))
        values_BN4 = F.pad(values_1S4[0], (0, 0, 0, 1))[slots].view(*input_ids.shape, 4)
    else:
        values_BN4 = GatherTokens.apply(values_s4, mesh, packed.sharding, input_ids.shape)
        values_BN4 = F.pad(values_BN4[:, :-1], (0, 0, 1, 0))
    logprobs_BN, entropies_BN, correct_BN, means_BN = values_BN4.unbind(-1)
    results = TokenResults(logprobs_BN, entropies_BN, correct_BN.bool(), means_BN.detach())
    return results, out.aux_loss


def label_share(model: PreTrainedModel, values_BN: Tensor, **inputs: Any) -> Tensor:
    """This rank's share of values per label (advantages, masks, old log-probabilities).

    Matches the order of `token_logprobs(..., share=True)` for the same `inputs`; in a ring, the
    order depends on the documents. 0 for tokens without a label.
    """
    mesh = get_mesh(model)
    for name in inputs.keys() - {*ARGUMENTS, *KERNEL_ARGUMENTS}:
        fix = "pass the inputs of token_logprobs"
        raise TypeError(f"{name} is not an argument of a parallel model; {fix}")
    if not isinstance(values_BN, Tensor) or values_BN.dim() != 2:
        kind = type(values_BN).__name__
        if isinstance(values_BN, Tensor):
            kind = f"of shape {tuple(values_BN.shape)}"
        fix = "pass a tensor [batch, tokens], one value per label"
        raise TypeError(f"label_share got values {kind}; {fix}")
    shape = values_BN.shape
    for name in inputs.keys() & {*INPUTS} - {"position_ids"}:
        if inputs[name] is not None and inputs[name].shape != shape:
            own = tuple(inputs[name].shape)
            shapes = f"values of shape {tuple(shape)}, but {name} of shape {own}"
            raise ValueError(f"label_share got {shapes}; pass one value per token of the batch")
    tensors = read_tensors(inputs, shape)
    positions, _ = split_positions(tensors.get("position_ids"))
    packed = pack_batch({**tensors, "position_ids": positions}, shape, mesh)
    return shard_label_values(values_BN, mesh, packed)


def get_mesh(model: PreTrainedModel) -> Mesh:
    mesh = getattr(model, "ithaka_mesh", None)
    if mesh is None:
        fix = "call ithaka.parallelize(model) first"
        raise ConfigError(f"the {type(model).__name__} is not parallel; {fix}")
    return mesh
