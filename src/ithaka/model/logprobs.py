"""Log-probabilities and entropies of every token, differentiable: what preference and reinforcement losses are made of.

Shapes: B rows of N tokens as the user has them; s tokens on this rank.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ithaka.config import ConfigError
from ithaka.dist.mesh import Mesh
from ithaka.layer.loss import TokenResults
from ithaka.model import batch
from ithaka.model.build import GatherTokens


def token_logprobs(
    model: PreTrainedModel, input_ids: Tensor, labels: Tensor, *, share: bool = False, **inputs: Any
) -> TokenResults:
    """Log-probabilities, entropies and hits by a model that `parallelize` returned.

    [B, N] tensors, the same on every rank of a cp group; each value at its label's place, given the tokens before it.

    `labels` and `inputs` (document_ids, position_ids, attention_mask) are those of a call of the model, and labels of
    -100 and a row's first do not count. Logits exist tile by tile: nothing of size tokens x vocabulary does.

    Gradients are summed over all ranks. As the result is the same on every rank of a cp group, so must be the loss
    made of it; the losses of data-parallel groups add up, so divide each by what the global batch has.
    `share`: only this rank's tokens, [s] tensors, to go with `label_share`; then the losses of all ranks add up.
    """
    mesh = _mesh(model)
    tokens = model(input_ids=input_ids, labels=labels, per_token=True, **inputs).tokens
    if share:
        return tokens
    values_s3 = torch.stack([x.to(tokens.logprobs.dtype) for x in tokens], dim=-1)
    values_BN3 = GatherTokens.apply(values_s3, mesh, batch.deal_batch(inputs, input_ids, mesh), input_ids.shape)
    logprobs_BN, entropies_BN, correct_BN = F.pad(values_BN3[:, :-1], (0, 0, 1, 0)).unbind(-1)
    return TokenResults(logprobs_BN, entropies_BN, correct_BN.bool())


def label_share(model: PreTrainedModel, values_BN: Tensor, **inputs: Any) -> Tensor:
    """Values that belong to labels (advantages, masks, older log-probabilities) -> those of this rank's tokens, [s].

    In the order of `token_logprobs(..., share=True)` with the same `inputs`: in a ring it depends on the documents.
    0 stands where no label is.
    """
    mesh = _mesh(model)
    return batch.take_label_share(values_BN, mesh, batch.deal_batch(inputs, values_BN, mesh))


def _mesh(model: PreTrainedModel) -> Mesh:
    mesh = getattr(model, "ithaka_mesh", None)
    if mesh is None:
        raise ConfigError(f"the {type(model).__name__} is not parallel; call ithaka.parallelize(model) first")
    return mesh
