"""A batch of rows -> this rank's share of one packed sequence.

Shapes: B rows of N tokens; S the flat sequence of B * N tokens, padded to a multiple of the cp ranks; s = S / cp.
Rows are documents of the packed sequence, and so are documents inside rows: there is no batch dimension below.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ithaka.ops.attention import Docs
from ithaka.ops.loss import IGNORED


@dataclass(frozen=True)
class Share:
    """What one cp rank works on."""

    ids_s: Tensor
    positions_s: Tensor
    labels_s: Tensor | None  # already shifted
    docs: Docs  # of the whole sequence
    num_valid: int  # valid labels of the whole batch, all cp ranks together

    def to(self, device: torch.device) -> "Share":
        labels_s = None if self.labels_s is None else self.labels_s.to(device)
        return replace(self, ids_s=self.ids_s.to(device), positions_s=self.positions_s.to(device), labels_s=labels_s)


def take_share(
    input_ids: Tensor,
    labels: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    document_ids: Tensor | None,
    *,
    cp_rank: int,
    cp_size: int,
) -> Share:
    """Cuts [B, N] inputs, the same on every rank of the cp group, into this rank's contiguous tokens.

    position_ids may be [1, N], for every row the same.
    """
    if position_ids is not None and position_ids.shape == (1, input_ids.shape[-1]):
        position_ids = position_ids.expand_as(input_ids)
    _check_shapes(
        input_ids,
        labels=labels,
        position_ids=position_ids,
        attention_mask=attention_mask,
        document_ids=document_ids,
    )
    if attention_mask is not None:
        _check_mask(attention_mask, labels)
    starts_BN = _document_starts(input_ids, position_ids, attention_mask, document_ids)
    shifted = None if labels is None else F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if position_ids is None:
        position_ids = _positions(starts_BN if document_ids is not None else None, input_ids)

    num_tokens = input_ids.numel()
    padding = -num_tokens % cp_size
    s = (num_tokens + padding) // cp_size

    def mine(rows: Tensor, fill: int) -> Tensor:
        return F.pad(rows.reshape(-1), (0, padding), value=fill)[cp_rank * s : (cp_rank + 1) * s].contiguous()

    ends = [num_tokens] if padding else []
    return Share(
        ids_s=mine(input_ids, 0),
        positions_s=mine(position_ids, 0),
        labels_s=None if shifted is None else mine(shifted, IGNORED),
        docs=Docs((*starts_BN.reshape(-1).nonzero()[:, 0].tolist(), *ends, num_tokens + padding)),
        num_valid=0 if shifted is None else int((shifted != IGNORED).sum()),
    )


def check_integers(name: str, tensor: Tensor) -> Tensor:
    """An input of a model as int64 on the host; a mask may be bool or of any dtype."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; pass a tensor of integers")
    if name == "attention_mask":
        mask = tensor.cpu().bool()
        if not torch.equal(mask.to(tensor.dtype), tensor.cpu()):
            raise ValueError(
                f"{name} has values other than 0 and 1, which are not supported; mark documents with document_ids"
            )
        return mask
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} is {tensor.dtype}; pass integers, e.g. torch.long")
    return tensor.cpu().long()


def check_tokens(input_ids: Tensor, labels: Tensor | None, vocab_size: int) -> None:
    """Every id, and every label that counts after the shift, must be a token of the vocabulary."""
    wrong = _first_outside(input_ids, vocab_size)
    if wrong is not None:
        row, column = wrong
        raise ValueError(
            f"input_ids[{row}, {column}]={int(input_ids[row, column])} is not in the vocabulary of {vocab_size} "
            "tokens; use the model's own tokenizer, or resize the embeddings before parallelize"
        )
    wrong = (
        None if labels is None else _first_outside(labels[:, 1:].masked_fill(labels[:, 1:] == IGNORED, 0), vocab_size)
    )
    if labels is not None and wrong is not None:
        row, column = wrong[0], wrong[1] + 1
        raise ValueError(
            f"labels[{row}, {column}]={int(labels[row, column])} is not in the vocabulary of {vocab_size} tokens; "
            f"set labels that do not count to {IGNORED}"
        )


def _first_outside(tokens_BN: Tensor, vocab_size: int) -> tuple[int, int] | None:
    if not tokens_BN.numel():
        return None
    low, high = tokens_BN.aminmax()
    if low >= 0 and high < vocab_size:
        return None
    row, column = ((tokens_BN < 0) | (tokens_BN >= vocab_size)).nonzero()[0].tolist()
    return row, column


def _check_shapes(input_ids: Tensor, **others: Tensor | None) -> None:
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; it must be [batch, tokens], not empty")
    for name, value in others.items():
        if value is not None and value.shape != input_ids.shape:
            expected = tuple(input_ids.shape)
            raise ValueError(f"{name} has shape {tuple(value.shape)}; it must match input_ids, {expected}")


def _check_mask(mask_BN: Tensor, labels: Tensor | None) -> None:
    """A row's tokens must be one run, and padding must neither carry nor predict a label.

    Anything else would be ignored silently.
    """
    begins_BN = mask_BN[:, 1:] & ~mask_BN[:, :-1]
    runs = begins_BN.sum(1) + mask_BN[:, 0]
    if int(runs.max()) > 1:
        row = int(runs.argmax())
        raise ValueError(f"attention_mask row {row} has holes; only padding before and after a row is supported")
    if labels is None:
        return
    if bool(((labels != IGNORED) & ~mask_BN).any()):
        raise ValueError(f"labels must be {IGNORED} where attention_mask is 0")
    predicted_by_padding = ((labels[:, 1:] != IGNORED) & begins_BN).any(1)
    if bool(predicted_by_padding.any()):
        row = int(predicted_by_padding.int().argmax())
        raise ValueError(
            f"labels row {row}: the first token after padding has a label, which padding would have to predict; "
            f"set it to {IGNORED}"
        )


def _document_starts(
    input_ids: Tensor, position_ids: Tensor | None, mask: Tensor | None, document_ids: Tensor | None
) -> Tensor:
    """[B, N] bool, true at the first token of every document; padding is a document of its own.

    Where only position_ids are given, a position that does not follow its neighbour starts a document, which is
    Hugging Face's own rule for packed sequences.
    """
    starts = torch.zeros_like(input_ids, dtype=torch.bool)
    starts[:, 0] = True
    if document_ids is not None:
        starts[:, 1:] |= document_ids[:, 1:] != document_ids[:, :-1]
    elif position_ids is not None and mask is None:
        starts[:, 1:] |= position_ids[:, 1:] != position_ids[:, :-1] + 1
    if mask is not None:
        starts[:, 1:] |= mask[:, 1:] != mask[:, :-1]
    return starts


def _positions(starts_BN: Tensor | None, input_ids: Tensor) -> Tensor:
    """Tokens since the start of the row, or of the document."""
    index_BN = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    if starts_BN is None:
        return index_BN
    return index_BN - torch.where(starts_BN, index_BN, 0).cummax(dim=1).values


def num_pairs(document_ids_BS: Tensor, windows: Sequence[int | None]) -> int:
    """Query-key pairs that causal attention visits inside documents, summed over layers."""
    rows_B1 = torch.arange(len(document_ids_BS))[:, None] * (int(document_ids_BS.max()) + 1)
    _, lengths = torch.unique_consecutive(document_ids_BS + rows_B1, return_counts=True)
    total = 0
    for window, layers in Counter(windows).items():
        reach = lengths if window is None else lengths.clamp(max=window)
        total += layers * int((reach * lengths - reach * (reach - 1) // 2).sum())
    return total
