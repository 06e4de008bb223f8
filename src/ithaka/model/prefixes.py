"""Pack sequences with common prefixes into a forest, in which each shared token is computed once.

A token is shared if it and all tokens before it are equal in several sequences: the answers to one prompt, or the turns
of an episode, each of which repeats the history before it.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ithaka.config import ConfigError
from ithaka.layer.loss import IGNORE_INDEX, TokenResults
from ithaka.model.logprobs import token_logprobs_and_aux
from ithaka.plan.ring import causal_pairs
from ithaka.plan.shape import Work

MIN_TOKENS = 128  # sharing fewer saves less than the calls of attention for another node cost


@dataclass(frozen=True)
class PackedPrefixes:
    """One packed sequence of N tokens."""

    inputs: dict[str, Tensor]  # arguments of the model call, [1, N]: input_ids, labels, document_ids and parents
    indices: list[Tensor]  # per sequence: positions of its tokens in the packed sequence
    num_tokens: tuple[int, int]  # before and after packing
    num_pairs: tuple[int, int]  # query-key pairs of full attention: of all sequences, and packed

    @property
    def work(self) -> Work:
        """What a planner needs to know (`SearchSpace.choose`)."""
        return Work(self.num_tokens[1], num_pairs=self.num_pairs[1])

    def unpack(self, values_1N: Tensor) -> list[Tensor]:
        """Values per token, e.g. log-probabilities -> those of each sequence. Gradients of shared tokens add up."""
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
    are not shared. Without, every token is its own label: pass the inputs to `token_logprobs` and `unpack` the results.
    `keys`: what else must be equal for tokens to be shared. A key has one value per sequence: one for all of its
    tokens, such as an adapter's name, or integers, [tokens, ...], such as the experts of a replayed routing.
    """
    rows, min_tokens = _comparable_rows(sequences, labels, keys), min_tokens or MIN_TOKENS
    root = _Node(0, 0, 0, None)
    ends = [_insert(root, rows, number, min_tokens) for number in range(len(rows))]
    columns: dict[str, list[Tensor]] = defaultdict(list)
    numbers, firsts, depths, num_tokens, num_pairs = {root: -1}, {root: 0}, {root: 0}, 0, 0
    for node in _walk(root):
        assert node.parent is not None
        length, tokens = node.stop - node.start, slice(node.start, node.stop)
        numbers[node], firsts[node], depths[node] = len(numbers) - 1, num_tokens, depths[node.parent] + length
        num_tokens += length
        num_pairs += causal_pairs(depths[node]) - causal_pairs(depths[node.parent])
        columns["input_ids"].append(sequences[node.sequence][tokens])
        columns["labels"].append((labels or sequences)[node.sequence][tokens])
        for name, number in (("document_ids", numbers[node]), ("parents", numbers[node.parent])):
            columns[name].append(torch.full((length,), number))
    return PackedPrefixes(
        {name: torch.cat([piece.cpu() for piece in pieces]).long()[None] for name, pieces in columns.items()},
        [torch.cat([firsts[n] + torch.arange(n.stop - n.start) for n in _path(end)]) for end in ends],
        (sum(map(len, rows)), num_tokens),
        (sum(causal_pairs(len(each)) for each in rows), num_pairs),
    )


def shared_logprobs(
    model: PreTrainedModel, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None, **inputs: Any
) -> tuple[TokenResults, Tensor | None]:
    """`token_logprobs_and_aux` of a padded batch, with common prefixes of its rows computed once. Labels are the tokens
    themselves, or -100. Nothing is shared in a ring, with position_ids, or with a load-balancing loss, which counts
    tokens."""
    mask_BN = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    routing = model.ithaka_decoder and model.ithaka_decoder.batch.routing
    if model.ithaka_mesh.ring_group.size() > 1 or routing is not None or inputs.keys() - {"temperature"}:
        return token_logprobs_and_aux(model, input_ids, labels, attention_mask=mask_BN, **inputs)
    ids_BN, is_real_BN = input_ids.cpu(), mask_BN.cpu().bool()
    packed = pack_prefixes([row[real] for row, real in zip(ids_BN, is_real_BN, strict=True)])
    results, aux = token_logprobs_and_aux(model, **packed.inputs, **inputs)
    index_BN = torch.zeros_like(ids_BN).masked_scatter_(is_real_BN, torch.cat(packed.indices))
    index_BN, valid_BN = (x.to(results.logprobs.device) for x in (index_BN, labels != IGNORE_INDEX))
    shared = (torch.where(valid_BN, values_1N[0, index_BN], 0).to(values_1N.dtype) for values_1N in results)
    return TokenResults(*shared), aux


def _comparable_rows(
    sequences: Sequence[Tensor], labels: Sequence[Tensor] | None, keys: Sequence[Sequence[Tensor | Hashable]]
) -> list[np.ndarray]:
    """One row of integers per token of each sequence. Tokens with equal rows may be shared."""
    for name, values in (("labels", labels), *(("keys", key) for key in keys)):
        if values is not None and len(values) != len(sequences):
            raise ConfigError(f"{name} has {len(values)} values for {len(sequences)} sequences; pass one per sequence")
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
        raise ConfigError("keys have different shapes, or there are no sequences; pass keys of one shape for all")
    return rows


# ---- the tree


@dataclass(eq=False)
class _Node:
    """Rows [start, stop) of a sequence."""

    sequence: int
    start: int
    stop: int
    parent: "_Node | None"
    children: dict[bytes, list["_Node"]] = field(default_factory=lambda: defaultdict(list))  # by their first row


def _insert(root: _Node, rows: list[np.ndarray], number: int, min_tokens: int) -> _Node:
    """Add a sequence to the tree and return the node in which it ends. Nodes that it leaves halfway are split."""
    own, node, at = rows[number], root, 0
    while at < len(own):
        for child in node.children[own[at].tobytes()]:
            other = rows[child.sequence][child.start : child.stop]
            num_equal = _count_equal(own[at:], other, min_tokens)
            if num_equal >= min(min_tokens, len(other)):
                break
        else:
            leaf = _Node(number, at, len(own), node)
            node.children[own[at].tobytes()].append(leaf)
            return leaf
        if num_equal < len(other):
            upper = _Node(child.sequence, child.start, child.start + num_equal, node)
            siblings = node.children[own[at].tobytes()]
            siblings[siblings.index(child)] = upper
            child.start, child.parent = upper.stop, upper
            upper.children[other[num_equal].tobytes()].append(child)
            child = upper
        node, at = child, at + num_equal
    return node


def _count_equal(a: np.ndarray, b: np.ndarray, min_tokens: int) -> int:
    """Equal leading rows. Most pairs of sequences differ early."""
    for size in (min_tokens, min(len(a), len(b))):
        size = min(size, len(a), len(b))
        differs = (a[:size] != b[:size]).any(1)
        if differs.any():
            return int(differs.argmax())
    return size


def _walk(root: _Node) -> Iterator[_Node]:
    """Parents before children, largest subtree first: attention then takes long paths as one document, and batches
    answers of equal length."""
    order, sizes, stack = [root], defaultdict[_Node, int](int), [root]
    for node in order:
        order += [child for group in node.children.values() for child in group]
    for node in reversed(order):
        sizes[node] += node.stop - node.start
        if node.parent is not None:
            sizes[node.parent] += sizes[node]
    while stack:
        node = stack.pop()
        if node.parent is not None:
            yield node
        stack += sorted((child for group in node.children.values() for child in group), key=sizes.__getitem__)


def _path(node: _Node) -> list[_Node]:
    """From the root's child to the node."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]
