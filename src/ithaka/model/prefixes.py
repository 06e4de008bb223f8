"""Pack sequences with common prefixes into a forest, in which each shared token is computed once.

A token is shared if it and all tokens before it are equal in several sequences: the answers to one prompt, or the turns
of an episode, each of which repeats the history before it.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ithaka.config import ConfigError
from ithaka.inputs.forest import MIN_TOKENS, build_forest, path_to
from ithaka.layer.loss import IGNORE_INDEX, TokenResults
from ithaka.layout import check_size
from ithaka.model.logprobs import token_logprobs_and_aux
from ithaka.plan.shape import StepShape, span_pairs
from ithaka.roots.find import find_root


@dataclass(frozen=True)
class PackedPrefixes:
    """One packed sequence of N tokens."""

    inputs: dict[str, Tensor]  # arguments of the model call, [1, N]: input_ids, labels, document_ids and parents
    indices: list[Tensor]  # per sequence: positions of its tokens in the packed sequence
    lengths: tuple[int, ...]  # tokens of each sequence
    spans: tuple[tuple[int, int], ...]  # per node: tokens of its ancestors, and its own

    @property
    def work(self) -> StepShape:
        """The work to plan for (`SearchSpace.choose`)."""
        return StepShape(self.num_tokens[1], spans=self.spans)

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Before and after packing."""
        return sum(self.lengths), sum(length for _, length in self.spans)

    @property
    def num_pairs(self) -> tuple[int, int]:
        """Query-key pairs of full attention, before and after packing."""
        return sum(span_pairs(0, length) for length in self.lengths), sum(span_pairs(*span) for span in self.spans)

    def unpack(self, values_1N: Tensor) -> list[Tensor]:
        """Split values per token, such as log-probabilities, by sequence. Gradients of shared tokens add up."""
        if not isinstance(values_1N, Tensor):
            raise ConfigError(f"unpack got a {type(values_1N).__name__}; pass a tensor with one value per token")
        if values_1N.shape[:2] != (wanted := (1, self.num_tokens[1])):
            raise ConfigError(
                f"unpack got shape {tuple(values_1N.shape)}; pass values of shape {wanted}, one per token"
            )
        return [values_1N[0, index.to(values_1N.device)] for index in self.indices]

    def __str__(self) -> str:
        tokens, pairs = (f"{a} -> {b} ({a / b:.2f}x fewer)" for a, b in (self.num_tokens, self.num_pairs))
        return f"{len(self.indices)} sequences: tokens {tokens}, attention pairs {pairs}"


def pack_prefixes(
    sequences: Sequence[Tensor],
    labels: Sequence[Tensor] | None = None,
    *,
    keys: Sequence[Sequence[Tensor | Hashable]] = (),
    min_tokens: int | None = None,
) -> PackedPrefixes:
    """Pack sequences of token ids, [tokens] each. Prefixes of fewer than `min_tokens`, by default 128, are not shared.

    With `labels`, the packed loss is that of all sequences: each label counts once per sequence, so tokens with a label
    are not shared. Without labels, every token is one: pass the inputs to `token_logprobs` and `unpack` the results.
    Tokens are shared only if their `keys` are equal too. A key has one value per sequence: one for all of its tokens,
    such as an adapter's name, or integers, [tokens, ...], such as the experts of a replayed routing.
    """
    check_size("min_tokens", min_tokens)
    rows = _comparable_rows(sequences, labels, keys)
    nodes, ends = build_forest(rows, min_tokens or MIN_TOKENS)
    columns: dict[str, list[Tensor]] = defaultdict(list)
    first, firsts, spans = 0, list[int](), list[tuple[int, int]]()
    for number, (sequence, start, stop, parent) in enumerate(nodes):
        firsts.append(first)
        spans.append((start, stop - start))
        first += stop - start
        columns["input_ids"].append(sequences[sequence][start:stop])
        columns["labels"].append((sequences if labels is None else labels)[sequence][start:stop])
        for name, value in (("document_ids", number), ("parents", parent)):
            columns[name].append(torch.full((stop - start,), value))
    return PackedPrefixes(
        {name: torch.cat([piece.cpu() for piece in pieces]).long()[None] for name, pieces in columns.items()},
        [torch.cat([firsts[n] + torch.arange(spans[n][1]) for n in path_to(nodes, end)]) for end in ends],
        tuple(map(len, rows)),
        tuple(spans),
    )


def shared_logprobs(
    model: Any, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None, **inputs: Any
) -> tuple[TokenResults, Tensor | None]:
    """`token_logprobs_and_aux` of a padded batch that computes common prefixes of its rows once. Labels are the tokens
    themselves, or -100. Nothing is shared if the model does not support `parents`, with position_ids, or with
    a load-balancing loss, which counts tokens."""
    mask_BN = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if not _shares(model) or inputs.keys() - {"temperature"}:
        return token_logprobs_and_aux(model, input_ids, labels, attention_mask=mask_BN, **inputs)
    ids_BN, is_real_BN = input_ids.cpu(), mask_BN.cpu().bool()
    packed = pack_prefixes([row[real] for row, real in zip(ids_BN, is_real_BN, strict=True)])
    results, aux = token_logprobs_and_aux(model, **packed.inputs, **inputs)
    index_BN = torch.zeros_like(ids_BN).masked_scatter_(is_real_BN, torch.cat(packed.indices))
    index_BN, valid_BN = (x.to(results.logprobs.device) for x in (index_BN, labels != IGNORE_INDEX))
    shared = (torch.where(valid_BN, values_1N[0, index_BN], 0).to(values_1N.dtype) for values_1N in results)
    return TokenResults(*shared), aux


def pack_rows(models: Sequence[Any], input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
    """Return the inputs of a call with these rows, whose common prefixes without labels are computed once if all
    `models` support it."""
    if not all(map(_shares, models)):
        return {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}
    ids_BN, labels_BN, is_real_BN = input_ids.cpu(), labels.cpu(), attention_mask.cpu().bool()
    rows = [[row[real] for row, real in zip(each, is_real_BN, strict=True)] for each in (ids_BN, labels_BN)]
    return pack_prefixes(*rows).inputs


def _shares(model: Any) -> bool:
    """Whether rows may share prefixes. A load-balancing loss counts tokens."""
    root: Any = find_root(model)
    return not root.why_no_parents() and root.balancing is None


def _comparable_rows(
    sequences: Sequence[Tensor], labels: Sequence[Tensor] | None, keys: Sequence[Sequence[Tensor | Hashable]]
) -> list[np.ndarray]:
    """Return one row of integers per token of each sequence. Tokens with equal rows may be shared."""
    if not isinstance(keys, Sequence):
        raise ConfigError(f"keys={keys!r} is a {type(keys).__name__}; pass a list of keys")
    named = {"sequences": sequences} | ({} if labels is None else {"labels": labels})
    for name, values in (named | {f"keys[{i}]": key for i, key in enumerate(keys)}).items():
        if not isinstance(values, Sequence | Tensor):
            fix = "pass a list with one tensor of integers per sequence"
            raise ConfigError(f"{name}={values!r} is a {type(values).__name__}; {fix}")
        if len(values) != len(sequences) or not len(values):
            rule = f"has {len(values)} values for {len(sequences)} sequences" if len(values) else "is empty"
            raise ConfigError(f"{name} {rule}; pass one per sequence")
        for number, value in enumerate(values):
            is_key = name.startswith("keys")
            is_integers = isinstance(value, Tensor) and not (value.is_floating_point() or value.dtype == torch.bool)
            if not is_integers and not (is_key and isinstance(value, Hashable) and not isinstance(value, Tensor)):
                kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                fix = "pass a tensor of integers, e.g. torch.tensor([1, 2])" + ", or a name" * is_key
                raise ConfigError(f"{name}[{number}] is a {kind}; {fix}")
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
            raise ConfigError(
                f"sequence {number} has ids, labels and keys of shapes {shapes}; pass [tokens], [tokens] and "
                "[tokens, ...], not empty"
            )
        rows.append(torch.cat([column.cpu().long().reshape(len(ids), -1) for column in columns], 1).numpy())
    if len({each.shape[1] for each in rows}) != 1:
        raise ConfigError("keys have different shapes; pass keys of one shape for all sequences")
    return rows
