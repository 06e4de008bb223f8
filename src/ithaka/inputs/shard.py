"""Cut a batch of rows into this rank's share of one packed sequence.

Rows become documents of the packed sequence, as do documents inside rows: below this file there is
no batch dim. In a ring, each member gets the chunks of its `TokenSharding`, which its ranks split
in order. With `parents`, documents are nodes of a forest, and a node's last token predicts the
first token of each child. The label of a child that follows its parent is in the usual place. All
others are *branch labels*: they come after the s labels of the rank that predicts them.

Shapes: B rows of N tokens; S tokens of the flat sequence of B * N, padded to a multiple of cp; s on
this rank; e branch labels of each rank; u documents.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ithaka.attention.docs import Docs
from ithaka.comm.exchange import all_gather, to_sequence_order
from ithaka.comm.mesh import Mesh
from ithaka.facts.attention import PairCounts, span_pairs
from ithaka.facts.sizes import IGNORE_INDEX
from ithaka.sharding.tokens import TokenSharding, shard_tokens

INPUTS = (
    "input_ids",
    "labels",
    "position_ids",
    "attention_mask",
    "document_ids",
    "shift_labels",
    "parents",
)


@dataclass(frozen=True)
class Share:
    """One cp rank's part of a batch, on its device."""

    ids_s: Tensor
    positions_s: Tensor
    labels_s: Tensor | None  # already shifted; [s + e] with branch labels
    branch_rows_e: Tensor | None  # rows that predict them, ascending; None: not a forest
    real_s: Tensor  # bool: not padding
    packed: "PackedBatch"
    docs: Docs  # documents of the full sequence, and which ring member has which tokens
    num_valid: int  # valid labels of all cp ranks
    num_positions: int  # 1 + the largest position on any cp rank


@dataclass(frozen=True)
class PackedBatch:
    """The documents of a batch, and which rank has which tokens."""

    starts: tuple[int, ...]  # cumulative starts of documents, (0, ..., S); padding is a document
    parents: tuple[int, ...]  # as in `Docs`: empty if they were not passed
    sharding: TokenSharding
    num_tokens: int  # without padding to a multiple of cp
    cp_size: int

    @cached_property
    def depths(self) -> list[int]:
        """Tokens of the ancestors of each document."""
        depths = [0] * (len(self.starts) - 1)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                depths[node] = depths[parent] + self.starts[parent + 1] - self.starts[parent]
        return depths

    @cached_property
    def positions(self) -> Tensor:
        """Position of each token in its document; in a forest, counted from the root."""
        starts = torch.tensor(self.starts)
        firsts_S = (starts[:-1] - torch.tensor(self.depths)).repeat_interleave(starts.diff())
        return torch.arange(self.num_tokens) - firsts_S[: self.num_tokens]

    @cached_property
    def label_table(self) -> tuple[Tensor, Tensor]:
        """In a forest: the tokens whose labels each rank predicts, [cp, s + e] (S: none), and the
        rows of each rank that predict its branch labels, [cp, e]."""
        cp = self.cp_size
        S = self.starts[-1]
        starts = torch.tensor(self.starts)
        s = S // cp
        parents = torch.tensor(self.parents)
        sources_S = torch.arange(S) - 1  # the token that predicts each one; -1: none
        sources_S[starts[:-1]] = torch.where(parents < 0, -1, starts[parents + 1] - 1)
        is_usual_S = (sources_S >= 0) & (sources_S == torch.arange(S) - 1)
        tokens_b = ((sources_S >= 0) & ~is_usual_S).nonzero()[:, 0]
        tokens_b = tokens_b[sources_S[tokens_b].argsort(stable=True)]
        ranks_b = sources_S[tokens_b] // s
        e = int(ranks_b.bincount(minlength=1).max())
        places_b = torch.arange(len(tokens_b)) - torch.searchsorted(ranks_b, ranks_b)
        table = torch.full((cp, s + e), S)
        rows = torch.full((cp, e), s - 1)
        table[:, :s] = torch.where(is_usual_S, torch.arange(S), S).roll(-1).view(cp, s)
        rows[ranks_b, places_b] = sources_S[tokens_b] % s
        table[ranks_b, s + places_b] = tokens_b
        return table, rows


def shard_batch(
    inputs: dict[str, Tensor], vocab_size: int, mesh: Mesh, packed: PackedBatch | None = None
) -> Share:
    """Return this rank's tokens of `inputs`: [B, N] tensors on the host, equal in the cp group.

    position_ids may be [1, N], shared by all rows. `packed`: what `pack_batch` returned for them,
    if it is known. Raises ValueError for inputs that would be ignored or miscomputed.
    """
    _check_shapes(inputs)
    ids_BN = inputs["input_ids"]
    fix = "use the model's tokenizer, or resize the embeddings first"
    _check_tokens("input_ids", ids_BN, vocab_size, fix)
    labels_BN, positions_BN, mask_BN, documents_BN, shifted_BN, _ = map(inputs.get, INPUTS[1:])
    if positions_BN is not None:
        positions_BN = positions_BN.expand_as(ids_BN)
    packed = packed or pack_batch(inputs, ids_BN.shape, mesh)
    if shifted_BN is not None and packed.parents:
        rule = "has one label per token, but a token may have several children"
        raise ValueError(f"shift_labels {rule}; pass labels")
    if shifted_BN is None and labels_BN is not None and not packed.parents:
        shifted_BN = _shift_left(labels_BN, IGNORE_INDEX)
    if shifted_BN is not None:
        labels_BN = shifted_BN.roll(1, dims=1)  # undo the shift
    if labels_BN is not None:
        valid_BN = labels_BN.masked_fill(labels_BN == IGNORE_INDEX, 0)
        _check_tokens("labels", valid_BN, vocab_size, f"set labels to ignore to {IGNORE_INDEX}")
    if mask_BN is not None:
        _check_mask(mask_BN, labels_BN)
    if positions_BN is None and documents_BN is None:
        positions_BN = torch.arange(ids_BN.shape[1]).expand_as(ids_BN)
    elif positions_BN is None:
        positions_BN = packed.positions.view_as(ids_BN)
    labels_s = None
    rows_e = None
    if packed.parents and labels_BN is not None:
        table, rows = packed.label_table
        shifted_BN = _at_tokens(labels_BN, table, IGNORE_INDEX)
        rows_e = rows[mesh.cp_rank].to(mesh.device)
        labels_s = shifted_BN[mesh.cp_rank].to(mesh.device)
    elif shifted_BN is not None:
        labels_s = _select_own(shifted_BN, mesh, packed.sharding, IGNORE_INDEX)

    sharding = packed.sharding
    real_BN = torch.ones_like(ids_BN, dtype=torch.bool) if mask_BN is None else mask_BN
    return Share(
        ids_s=_select_own(ids_BN, mesh, sharding, 0),
        positions_s=_select_own(positions_BN, mesh, sharding, 0),
        labels_s=labels_s,
        branch_rows_e=rows_e,
        real_s=_select_own(real_BN, mesh, sharding, False),
        packed=packed,
        docs=Docs(packed.starts, sharding, mesh.ring_group.rank(), packed.parents),
        num_valid=0 if shifted_BN is None else int((shifted_BN != IGNORE_INDEX).sum()),
        num_positions=1 + int(positions_BN.max()),
    )


def pack_batch(inputs: Mapping[str, Tensor | None], shape: torch.Size, mesh: Mesh) -> PackedBatch:
    """Find the documents of a batch, and which rank has which tokens. `inputs`: as in
    `shard_batch`; `shape`: that of input_ids."""
    mask_BN = inputs.get("attention_mask")
    documents_BN = inputs.get("document_ids")
    starts = _document_starts(shape, inputs.get("position_ids"), mask_BN, documents_BN)
    parents = _read_parents(starts, documents_BN, inputs.get("parents"), mask_BN)
    num_tokens = shape.numel()
    sharding = shard_tokens(
        (*starts, num_tokens), mesh.ring_group.size(), mesh.ulysses_group.size()
    )
    ends = [num_tokens]
    if sharding.num_tokens > num_tokens:  # padding is a document
        ends.append(sharding.num_tokens)
        parents += (-1,) * bool(parents)
    return PackedBatch((*starts, *ends), parents, sharding, num_tokens, mesh.cp_size)


def count_pairs(packed: PackedBatch, windows: Sequence[int | None]) -> PairCounts:
    """Count the pairs of a batch, without padding to a multiple of cp. `windows`: of each layer."""
    edges = packed.starts[: packed.starts.index(packed.num_tokens) + 1]
    lengths = [end - start for start, end in pairwise(edges)]
    spans = Counter(zip(packed.depths, lengths, strict=False))

    def count(window: int | None) -> int:
        return sum(number * span_pairs(*span, window) for span, number in spans.items())

    pairs = {window: count(window) for window in {*windows, None}}
    return PairCounts(sum(pairs[window] for window in windows), pairs[None])


def read_tensors(named: Mapping[str, Any], shape: torch.Size) -> dict[str, Tensor]:
    """Return the tensors of INPUTS among the arguments of a call, on the host."""
    inputs = {name: named[name] for name in INPUTS if named.get(name) is not None}
    if (ends := named.get("cu_seq_lens_q")) is not None:
        inputs.setdefault("document_ids", documents_from_lengths(ends, shape))
    return {name: to_integers(name, value) for name, value in inputs.items()}


def split_positions(positions: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Split into text positions and 3-D positions, by transformers' convention: [B, N], [3, B, N]
    (time, height, width), or [4, B, N] with the text positions first. Only text positions start
    documents."""
    if not isinstance(positions, Tensor) or positions.dim() != 3:
        return positions, None
    if len(positions) == 4:
        return positions[0], positions[1:]
    return None, positions


def _read_parents(
    starts: list[int],
    documents_BN: Tensor | None,
    parents_BN: Tensor | None,
    mask_BN: Tensor | None,
) -> tuple[int, ...]:
    """Return the index of each document's parent, or -1; () if parents were not passed."""
    if parents_BN is None:
        return ()
    if documents_BN is None:
        fix = "pass both: parents holds the document_ids of parents"
        raise ValueError(f"parents was passed without document_ids; {fix}")
    N = documents_BN.shape[1]
    parents = list[int]()
    starts_u = torch.tensor(starts)
    flat_S = parents_BN.reshape(-1)
    lengths_u = starts_u.diff(append=torch.tensor([len(flat_S)]))
    varies_S = flat_S != flat_S[starts_u].repeat_interleave(lengths_u)
    varying = set((torch.searchsorted(starts_u, varies_S.nonzero()[:, 0], right=True) - 1).tolist())
    is_padding_u = torch.zeros_like(starts_u) if mask_BN is None else ~mask_BN.reshape(-1)[starts_u]
    known: dict[tuple[int, int], int] = {}
    documents = documents_BN.reshape(-1)[starts_u].tolist()
    named_parents = flat_S[starts_u].tolist()
    rows = zip(starts, documents, named_parents, is_padding_u.tolist(), strict=True)
    for node, (start, document, parent, is_padding) in enumerate(rows):
        row, column = divmod(start, N)
        where = f"row {row}, token {column}"
        if is_padding or parent == -1:
            parents.append(-1)
        elif (row, parent) not in known:
            rule = f"{parent} at {where} is not an earlier document_id in its row"
            raise ValueError(f"parents: {rule}; put parents before children")
        else:
            parents.append(known[row, parent])
        if is_padding:
            continue
        if node in varying:
            rule = f"varies in document {document} at {where}"
            raise ValueError(f"parents {rule}; use one value for all of its tokens")
        if (row, document) in known:
            rule = f"{document} at {where} is not consecutive"
            raise ValueError(f"document_ids: {rule}; with parents, use ids once")
        known[row, document] = node
    return tuple(parents)


def shard_label_values(rows_BN: Tensor, mesh: Mesh, packed: PackedBatch, fill: float = 0) -> Tensor:
    """Return this rank's share, [s] or [s + e] on its device, of [B, N] values at their labels'
    tokens. `fill`: for tokens without a label."""
    if not packed.parents:
        return _select_own(_shift_left(rows_BN, fill), mesh, packed.sharding, fill)
    table, _ = packed.label_table
    return _at_tokens(rows_BN, table[mesh.cp_rank].to(rows_BN.device), fill).to(mesh.device)


def _at_tokens(rows_BN: Tensor, tokens: Tensor, fill: float) -> Tensor:
    """Return the values at `tokens`, and `fill` at S."""
    S = max(rows_BN.numel(), int(tokens.max()))
    return F.pad(rows_BN.reshape(-1), (0, 1 + S - rows_BN.numel()), value=fill)[tokens]


def _shift_left(rows_BN: Tensor, fill: float) -> Tensor:
    return F.pad(rows_BN[:, 1:], (0, 1), value=fill)


def _select_own(rows_BN: Tensor, mesh: Mesh, sharding: TokenSharding, fill: float) -> Tensor:
    return select_own_tokens(rows_BN.reshape(-1), mesh, sharding, fill).to(mesh.device, copy=True)


def select_own_tokens(flat_S: Tensor, mesh: Mesh, sharding: TokenSharding, fill: float) -> Tensor:
    """Return this rank's tokens, [s, ...] of [S, ...], padded with `fill`."""
    chunks = [
        flat_S[start : start + length] for start, length in sharding.members[mesh.ring_group.rank()]
    ]
    member = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
    s = sharding.num_tokens // mesh.cp_size
    own_s = member[mesh.ulysses_group.rank() * s :][:s]
    return F.pad(own_s, (0, 0) * (own_s.dim() - 1) + (0, s - len(own_s)), value=fill)


class GatherTokens(torch.autograd.Function):
    """All-gather this rank's tokens to [B, N, Y] in sequence order; backward takes the rank's own
    part.

    Padding is cut here, without a view: FSDP2 hooks the output, and an in-place operation on a view
    drops the hook.
    """

    @staticmethod
    def forward(ctx, local_sY, mesh, sharding, shape):
        ctx.mesh = mesh
        ctx.sharding = sharding
        Y = local_sY.shape[1]
        full_SY = local_sY.new_empty(mesh.cp_size * len(local_sY), Y)
        all_gather(full_SY, local_sY.contiguous(), group=mesh.cp_group)
        full_SY = to_sequence_order(full_SY, sharding)
        return local_sY.new_empty(0).set_(full_SY.untyped_storage(), 0, (*shape, Y))

    @staticmethod
    def backward(ctx, dfull_BNY):
        dlocal_sY = select_own_tokens(dfull_BNY.flatten(0, 1), ctx.mesh, ctx.sharding, 0)
        return dlocal_sY, None, None, None


def documents_from_lengths(ends: Tensor, shape: torch.Size) -> Tensor:
    """Return document_ids from FlashAttention's cumulative lengths of all rows."""
    name = "cu_seq_lens_q"
    ends = to_integers(name, ends)
    num_tokens = shape.numel()
    fix = f"pass cumulative lengths from 0 to the {num_tokens} input_ids"
    if ends.dim() != 1 or len(ends) < 2:
        raise ValueError(f"{name} has shape {tuple(ends.shape)}; {fix}")
    if int(ends[0]):
        raise ValueError(f"{name} starts at {int(ends[0])}; {fix}")
    if int(ends[-1]) != num_tokens:
        fix = f"use one that ends at the {num_tokens} input_ids"
        raise ValueError(f"{name} ends at {int(ends[-1])}; {fix}")
    lengths = ends.diff()
    if (least := int(lengths.min())) < 0:
        fix = "use cumulative lengths, which only increase"
        raise ValueError(f"{name} decreases by {-least}; {fix}")
    return torch.arange(len(lengths)).repeat_interleave(lengths).view(shape)


def to_integers(name: str, tensor: object) -> Tensor:
    """Convert a model input to int64 on the host, or to bool if it is a mask."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; pass a tensor of integers")
    tensor = tensor.cpu()
    if name == "attention_mask":
        mask = tensor.bool()
        if not torch.equal(mask.to(tensor.dtype), tensor):
            raise ValueError(
                f"{name} has values other than 0 and 1; mark documents with document_ids"
            )
        return mask
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} is {tensor.dtype}; pass integers, e.g. torch.long")
    return tensor.long()


def _check_shapes(inputs: dict[str, Tensor]) -> None:
    shape = inputs["input_ids"].shape
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"input_ids has shape {tuple(shape)}; pass [batch, tokens], not empty")
    for name, value in inputs.items():
        if value.shape != shape and (name, *value.shape) != ("position_ids", 1, shape[1]):
            fix = f"use the shape of input_ids, {tuple(shape)}"
            raise ValueError(f"{name} has shape {tuple(value.shape)}; {fix}")
    if (positions := inputs.get("position_ids")) is not None:
        mask = inputs.get("attention_mask", torch.ones_like(positions))
        # Padding may have any position.
        if (lowest := int(positions.masked_fill(mask == 0, 0).min())) < 0:
            fix = "start each document at 0, and mark padding in attention_mask"
            raise ValueError(f"position_ids has {lowest}; {fix}")


def _check_tokens(name: str, tokens_BN: Tensor, vocab_size: int, fix: str) -> None:
    lowest, highest = tokens_BN.aminmax()
    if lowest < 0 or highest >= vocab_size:
        row, column = ((tokens_BN < 0) | (tokens_BN >= vocab_size)).nonzero()[0].tolist()
        value = f"{name}[{row}, {column}]={int(tokens_BN[row, column])}"
        raise ValueError(f"{value} is outside the vocabulary of {vocab_size} tokens; {fix}")


def _check_mask(mask_BN: Tensor, labels_BN: Tensor | None) -> None:
    """Require contiguous tokens in each row, and no labels at padding or predicted by it."""
    runs_B = mask_BN[:, 0] + (mask_BN[:, 1:] & ~mask_BN[:, :-1]).sum(1)
    if int(runs_B.max()) > 1:
        row = int(runs_B.argmax())
        fix = "use it only for padding before or after a row"
        raise ValueError(f"attention_mask row {row} has holes; {fix}")
    if labels_BN is not None:
        wrong_BN = (labels_BN[:, 1:] != IGNORE_INDEX) & ~(mask_BN[:, 1:] & mask_BN[:, :-1])
        if wrong_BN.any():
            row, column = wrong_BN.nonzero()[0].tolist()
            raise ValueError(
                f"labels[{row}, {column + 1}] is valid, but attention_mask is 0 at its token or "
                f"at the token that predicts it; set the label to {IGNORE_INDEX}"
            )


def _document_starts(
    shape: torch.Size,
    positions_BN: Tensor | None,
    mask_BN: Tensor | None,
    documents_BN: Tensor | None,
) -> list[int]:
    """Return where each document starts in the flat sequence. Padding is a separate document.

    With position_ids alone, a position that is not its predecessor plus 1 starts a document:
    Hugging Face's rule for packed sequences.
    """
    starts_BN = torch.zeros(shape, dtype=torch.bool)
    starts_BN[:, 0] = True
    if documents_BN is not None:
        starts_BN[:, 1:] |= documents_BN[:, 1:] != documents_BN[:, :-1]
    elif positions_BN is not None and mask_BN is None:
        starts_BN[:, 1:] |= positions_BN[:, 1:] != positions_BN[:, :-1] + 1
    if mask_BN is not None:
        starts_BN[:, 1:] |= mask_BN[:, 1:] != mask_BN[:, :-1]
    return starts_BN.reshape(-1).nonzero()[:, 0].tolist()
