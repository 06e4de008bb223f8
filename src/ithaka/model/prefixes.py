"""Pack sequences with common prefixes into a forest, in which each shared token is computed once.

A token is shared if it and all tokens before it are equal in several sequences: the answers to one
prompt, or the turns of an episode, each of which repeats the history before it.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ithaka.config import ConfigError
from ithaka.facts.attention import span_pairs
from ithaka.facts.sizes import IGNORE_INDEX
from ithaka.inputs.forest import MIN_TOKENS, build_forest, path_to
from ithaka.layer.loss import TokenResults
from ithaka.layout import check_size
from ithaka.model.logprobs import token_logprobs_and_aux
from ithaka.roots.find import find_root


@dataclass(frozen=True)
class PackedPrefixes:
    """One packed sequence of N tokens."""

    inputs: dict[str, Tensor]  # of the call, [1, N]: input_ids, labels, document_ids and parents
    indices: list[Tensor]  # per sequence: positions of its tokens in the packed sequence
    lengths: tuple[int, ...]  # tokens of each sequence
    spans: tuple[tuple[int, int], ...]  # per node: tokens of its ancestors, and its own

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Before and after packing."""
        return sum(self.lengths), sum(length for _, length in self.spans)

    @property
    def num_pairs(self) -> tuple[int, int]:
        """Query-key pairs of full attention, before and after packing."""
        before = sum(span_pairs(0, length) for length in self.lengths)
        return before, sum(span_pairs(*span) for span in self.spans)

    def unpack(self, values_1N: Tensor) -> list[Tensor]:
        """Split values per token by sequence. Gradients of shared tokens add up."""
        if not isinstance(values_1N, Tensor):
            fix = "pass a tensor with one value per token"
            raise ConfigError(f"unpack got a {type(values_1N).__name__}; {fix}")
        wanted = (1, self.num_tokens[1])
        if values_1N.shape[:2] != wanted:
            fix = f"pass values of shape {wanted}, one per token"
            raise ConfigError(f"unpack got shape {tuple(values_1N.shape)}; {fix}")
        return [values_1N[0, index.to(values_1N.device)] for index in self.indices]

    def __str__(self) -> str:
        def describe(before: int, after: int) -> str:
            return f"{before} -> {after} ({before / after:.2f}x fewer)"

        tokens = describe(*self.num_tokens)
        pairs = describe(*self.num_pairs)
        return f"{len(self.indices)} sequences: tokens {tokens}, attention pairs {pairs}"


def pack_prefixes(
    sequences: Sequence[Tensor],
    labels: Sequence[Tensor] | None = None,
    *,
    keys: Sequence[Sequence[Tensor | Hashable]] = (),
    min_tokens: int | None = None,
) -> PackedPrefixes:
    """Pack sequences of token ids, [tokens] each. Prefixes of fewer than `min_tokens`, by default
    128, are not shared.

    With `labels`, the packed loss is that of all sequences: each label counts once per sequence, so
    tokens with a label are not shared. Without labels, every token is one: pass the inputs to
    `token_logprobs` and `unpack` the results. Tokens are shared only if their `keys` are equal too.
    A key has one value per sequence: one for all of its tokens, such as an adapter's name, or
    integers, [tokens, ...], such as the experts of a replayed routing.
    """
    check_size("min_tokens", min_tokens)
    rows = _comparable_rows(sequences, labels, keys)
    nodes, ends = build_forest(rows, min_tokens or MIN_TOKENS)
    columns: dict[str, list[Tensor]] = defaultdict(list)
    first = 0
    firsts = list[int]()
    spans = list[tuple[int, int]]()
    for number, (sequence, start, stop, parent) in enumerate(nodes):
        firsts.append(first)
        spans.append((start, stop - start))
        first += stop - start
        columns["input_ids"].append(sequences[sequence][start:stop])
        columns["labels"].append((sequences if labels is None else labels)[sequence][start:stop])
        columns["document_ids"].append(torch.full((stop - start,), number))
        columns["parents"].append(torch.full((stop - start,), parent))
    inputs = {name: _join(pieces) for name, pieces in columns.items()}
    positions = [first + torch.arange(span[1]) for first, span in zip(firsts, spans, strict=True)]
    indices = []
    for end in ends:
        path = path_to(nodes, end)
        indices.append(torch.cat([positions[node] for node in path]))
    return PackedPrefixes(inputs, indices, tuple(map(len, rows)), tuple(spans))


def _join(pieces: list[Tensor]) -> Tensor:
    return torch.cat([piece.cpu() for piece in pieces]).long()[None]


def shared_logprobs(
    model: PreTrainedModel,
    input_ids: Tensor,
    labels: Tensor,
    attention_mask: Tensor | None = None,
    **inputs: Any,
) -> tuple[TokenResults, Tensor | None]:
    """`token_logprobs_and_aux` of a padded batch that computes common prefixes of its rows once.
    Labels are the tokens themselves, or -100. Nothing is shared if the model does not support
    `parents`, with position_ids, or with a load-balancing loss, which counts tokens."""
    mask_BN = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if not _shares(model) or inputs.keys() - {"temperature"}:
        return token_logprobs_and_aux(model, input_ids, labels, attention_mask=mask_BN, **inputs)
    ids_BN = input_ids.cpu()
    is_real_BN = mask_BN.cpu().bool()
    packed = pack_prefixes(_real_tokens(ids_BN, is_real_BN))
    results, aux = token_logprobs_and_aux(model, **packed.inputs, **inputs)
    index_BN = torch.zeros_like(ids_BN).masked_scatter_(is_real_BN, torch.cat(packed.indices))
    index_BN, valid_BN = (x.to(results.logprobs.device) for x in (index_BN, labels != IGNORE_INDEX))
    shared = (
        torch.where(valid_BN, values_1N[0, index_BN], 0).to(values_1N.dtype)
        for values_1N in results
    )
    return TokenResults(*shared), aux


def pack_prefix_rows(
    models: Sequence[PreTrainedModel], input_ids: Tensor, labels: Tensor, attention_mask: Tensor
) -> dict[str, Tensor]:
    """Return the inputs of a call with these rows. Shares prefixes if all `models` support it."""
    if not all(map(_shares, models)):
        return {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}
    is_real_BN = attention_mask.cpu().bool()
    ids = _real_tokens(input_ids.cpu(), is_real_BN)
    return pack_prefixes(ids, _real_tokens(labels.cpu(), is_real_BN)).inputs


def _real_tokens(values_BN: Tensor, is_real_BN: Tensor) -> list[Tensor]:
    """The values of each row, without padding."""
    return [row[real] for row, real in zip(values_BN, is_real_BN, strict=True)]


def _shares(model: PreTrainedModel) -> bool:
    """Whether rows may share prefixes. A load-balancing loss counts tokens."""
    root: Any = find_root(model)
    return not root.why_no_parents() and root.balancing is None


def _comparable_rows(
    sequences: Sequence[Tensor],
    labels: Sequence[Tensor] | None,
    keys: Sequence[Sequence[Tensor | Hashable]],
) -> list[np.ndarray]:
    """Return one row of integers per token of each sequence. Tokens with equal rows may be
    shared."""
    if not isinstance(keys, Sequence):
        raise ConfigError(f"keys={keys!r} is a {type(keys).__name__}; pass a list of keys")
    _check_values("sequences", sequences, sequences)
    if labels is not None:
        _check_values("labels", labels, sequences)
    for i, key in enumerate(keys):
        _check_values(f"keys[{i}]", key, sequences, is_key=True)
    names: dict[Hashable, int] = {}
    rows = []
    for number, ids in enumerate(sequences):
        columns: list[Tensor] = [ids]
        if labels is not None:
            has_label = labels[number] != IGNORE_INDEX
            has_label[:1] = False  # no token predicts it
            columns.append(has_label * (number + 1))
        for key in keys:
            value = key[number]
            if not isinstance(value, Tensor):
                value = torch.full_like(ids, names.setdefault(value, len(names)))
            columns.append(value)
        if ids.dim() != 1 or not len(ids) or any(len(column) != len(ids) for column in columns):
            shapes = ", ".join(str(tuple(column.shape)) for column in columns)
            rule = f"sequence {number} has ids, labels and keys of shapes {shapes}"
            raise ConfigError(f"{rule}; pass [tokens], [tokens] and [tokens, ...], not empty")
        columns = [column.cpu().long().reshape(len(ids), -1) for column in columns]
        rows.append(torch.cat(columns, 1).numpy())
    if len({each.shape[1] for each in rows}) != 1:
        raise ConfigError("keys have different shapes; pass keys of one shape for all sequences")
    return rows


def _check_values(
    name: str, values: object, sequences: Sequence[Tensor], is_key: bool = False
) -> None:
    """Refuse values that are not one tensor of integers per sequence or, for a key, one name."""
    if not isinstance(values, Sequence | Tensor):
        fix = "pass a list with one tensor of integers per sequence"
        raise ConfigError(f"{name}={values!r} is a {type(values).__name__}; {fix}")
    if not len(values):
        raise ConfigError(f"{name} is empty; pass one per sequence")
    if len(values) != len(sequences):
        rule = f"has {len(values)} values for {len(sequences)} sequences"
        raise ConfigError(f"{name} {rule}; pass one per sequence")
    for number, value in enumerate(values):
        fix = "pass a tensor of integers, e.g. torch.tensor([1, 2])"
        if is_key:
            fix += ", or a name"
        if isinstance(value, Tensor):
            kind = str(value.dtype)
            is_valid = not value.is_floating_point() and value.dtype != torch.bool
        else:
            kind = type(value).__name__
            is_valid = is_key and isinstance(value, Hashable)
        if not is_valid:
            raise ConfigError(f"{name}[{number}] is a {kind}; {fix}")
