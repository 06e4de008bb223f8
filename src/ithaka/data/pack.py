"""Shuffle and pack documents: pure functions of lengths, seed and position, without files or ranks.

A shard is a set of documents that are tokenized as a unit. Each epoch shuffles the shards of a
source. A round is the documents of several shards, shuffled and packed as a unit. Each document
goes into the fullest sequence with room for all of it. Sequences without a label are left out; the
others are grouped by attention area, so that the sequences of a step are alike, and the groups are
shuffled.

Segments are documents, or parts of documents that exceed the context: arrays [n] of SEGMENT_DTYPE.
`shard` is an index into the shards of the round, `low` the offset of the first token in the shard.

Long conversations may become pieces that repeat the system prompt, or whose tool outputs are
shortened. Such pieces are copied into an additional shard, so that every segment is a range of
tokens.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ithaka.config import ConfigError
from ithaka.data.documents.images import Medium
from ithaka.data.stored_tokens import decode_ids, encode_tokens, is_trained
from ithaka.facts.sizes import IGNORE_INDEX
from ithaka.inputs.forest import MIN_TOKENS, Forest, Node

# Of the context. Sorting shorter documents saves under 0.4 % of padding.
SHORT_DOCUMENT_FRACTION = 1 / 8
Key = tuple[int, ...]  # seeds a hash
SEGMENT_DTYPE = np.dtype(
    [("shard", np.int32), ("source", np.int32), ("low", np.int64), ("length", np.int64)]
)
# A node of a forest: its first token in the shard, its parent (-1: none) and its sample, both
# counted in the forest.
NODE_DTYPE = np.dtype([("start", np.int64), ("parent", np.int64), ("sample", np.int64)])
IMAGE_BASE = 1 << 30  # above all ids
ROLE_CODES = ("system", "user", "assistant", "tool")


def _no_integers() -> np.ndarray:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class Documents:
    """The documents of a shard."""

    tokens: np.ndarray  # int32 [n], as in stored_tokens.py
    lengths: np.ndarray  # int64 [documents]
    skipped: Mapping[str, int] = field(default_factory=dict)  # number of documents by reason
    turns: np.ndarray = field(default_factory=_no_integers)  # where messages start: `encode_turn`
    notes: Mapping[str, int] = field(default_factory=dict)  # counts of what was changed
    samples: np.ndarray = field(default_factory=_no_integers)  # starts of further samples
    nodes: np.ndarray = field(default_factory=lambda: np.empty(0, NODE_DTYPE))  # if forests
    images: Sequence[Medium] = ()  # those of number i have the id IMAGE_BASE + i
    # int32 [n, 2, k]: stored ids (-1: none), and the bits of their log-probabilities
    teacher: np.ndarray | None = None
    digests: np.ndarray = field(default_factory=_no_integers)  # [documents], equal for equal ones


def mark_images(
    tokens: np.ndarray, images: Sequence[Medium], ids: Iterable[int], first: int
) -> np.ndarray:
    """Replace the tokens of a document's images and videos (`ids`) with numbers from `first` on,
    which identify the image of a token after packing."""
    places = np.flatnonzero(np.isin(decode_ids(tokens), list(ids)))
    counts = [image.num_tokens for image in images]
    numbers = first + np.repeat(np.arange(len(counts)), counts)
    tokens[places] = encode_tokens(IMAGE_BASE + numbers, False)
    return tokens


def join_teachers(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate arrays [n, 2, k] of Documents.teacher to the largest k."""
    num_tokens = sum(map(len, columns))
    largest = max(column.shape[2] for column in columns)
    joined = np.full((num_tokens, 2, largest), -1, np.int32)
    start = 0
    for column in columns:
        joined[start : start + len(column), :, : column.shape[2]] = column
        start += len(column)
    return joined


def encode_turn(token: int, role: str) -> int:
    return token * len(ROLE_CODES) + ROLE_CODES.index(role if role in ROLE_CODES else "user")


class LongDocuments(NamedTuple):
    """How to cut documents that exceed the context (data.long_documents, tool_tokens and
    tool_marker), and how to join the samples of a record."""

    mode: str = "split"
    tool_tokens: int = 1024
    marker: tuple[int, ...] = ()  # ids
    shares: bool = False  # join samples of a record, with their common prefixes once
    pairs: bool = False  # the two samples of a record stay together


class CutDocuments(NamedTuple):
    """The pieces of the documents of a shard."""

    shards: tuple[Documents, ...]  # the documents, and pieces that are not a range of theirs
    segments: np.ndarray  # [pieces], without those that have no trained token
    owners: np.ndarray  # [pieces], index of the document
    pieces_left_out: np.ndarray  # [documents]
    removed: np.ndarray  # [documents], tokens in no piece


@dataclass(frozen=True)
class PackedSequence:
    ids: np.ndarray  # int32 [S]
    targets: np.ndarray  # int32 [S]: ids, and IGNORE_INDEX for context only
    starts: np.ndarray  # offsets of the documents, from 0; a forest's nodes are documents
    length: int  # without padding
    sources: np.ndarray  # of each document
    documents_together: bool = False  # train on them as one text
    parents: np.ndarray | None = None  # index of each document's parent, or -1; None: no forest
    samples: np.ndarray | None = None  # which sample of the sequence each document is part of
    images: tuple[Medium, ...] = ()
    teacher: np.ndarray | None = None  # int32 [S, 2, k], as in Documents

    @property
    def borders(self) -> np.ndarray:
        """Offsets where attention and positions start over, or continue from another document."""
        return self.starts[:1] if self.documents_together else self.starts

    def labels(self) -> np.ndarray:
        """int32 [S], not shifted. Nothing predicts a token right after a border."""
        labels_S = self.targets.copy()
        borders = self.borders if self.parents is None else self.starts[self.parents < 0]
        labels_S[borders] = IGNORE_INDEX
        labels_S[self.length :] = IGNORE_INDEX
        return labels_S

    def document_ids(self) -> np.ndarray:
        """int64 [S], from 0; the padding is a document of its own."""
        change_S = np.zeros(len(self.ids), dtype=np.int64)
        change_S[self.borders] = 1
        change_S[self.length : self.length + 1] = 1
        return np.cumsum(change_S) - 1

    def source_ids(self) -> np.ndarray:
        """int64 [S]; 0 for padding."""
        return self._by_token(self.sources, 0)

    def parent_ids(self) -> np.ndarray:
        """int64 [S]: the document id of each token's parent, or -1."""
        return self._by_token(-1 if self.parents is None else self.parents, -1)

    def sample_ids(self) -> np.ndarray:
        """int64 [S]: the sample of each token with a label; -1 for padding."""
        return self._by_token(-1 if self.samples is None else self.samples, -1)

    def _by_token(self, values: np.ndarray | int, padding: int) -> np.ndarray:
        values_S = np.full(len(self.ids), padding, dtype=np.int64)
        if self.length:
            values = np.broadcast_to(values, self.starts.shape)
            values_S[: self.length] = np.repeat(values, np.diff(self.starts, append=self.length))
        return values_S


@dataclass(frozen=True)
class Packing:
    """How a round is packed."""

    context: int  # tokens in a sequence
    group: int  # sequences per step
    num_leading: int = 0  # first sequences that complete the last step of the previous round
    done: int = 0  # sequences already used
    max_sequences: int = 0  # limit for runs that need less than a full round; 0: none


class PackedRound:
    """Segments packed into sequences, in training order."""

    def __init__(
        self,
        segments: np.ndarray,
        packing: Packing,
        key: Key | None,
        shards: Sequence[Documents] = (),
        documents_together: bool = False,
    ):
        """`key` shuffles the groups; None keeps the order of first segments. With `shards`, leave
        out sequences without a label."""
        sequence = best_fit(segments["length"], packing.context)  # index of each segment's sequence
        self.read_tokens = int(segments["length"].sum())
        num_packed = len(np.unique(sequence))
        if shards:
            kept = find_labels(shards, segments, sequence, documents_together)[sequence]
            segments = segments[kept]
            sequence = np.unique(sequence[kept], return_inverse=True)[1]
        lengths = segments["length"]
        areas = np.bincount(sequence, lengths * (lengths + 1) / 2)  # pairs of causal attention
        order = np.unique(sequence, return_index=True)[1].argsort()
        if key is not None:
            order = group_by_area(areas, packing.group, packing.num_leading, key)
        position = order.argsort()[sequence]
        self.packing = packing
        self.areas = areas[order]
        self.num_tokens = int(lengths.sum())
        self.num_left_out = num_packed - len(areas)
        self._segments = segments[position.argsort(kind="stable")]
        self._edges = np.concatenate([[0], np.bincount(position).cumsum()])

    def __len__(self) -> int:
        return len(self.areas)

    def segments(self, low: int, high: int) -> np.ndarray:
        """Return the segments of sequences [low, high)."""
        return self._segments[self._edges[low] : self._edges[high]]


def find_labels(
    shards: Sequence[Documents],
    segments: np.ndarray,
    sequence: np.ndarray,
    documents_together: bool,
) -> np.ndarray:
    """Return which sequences have a label, bool [sequences]. `sequence` is the index of each
    segment's sequence.

    The first token of a sequence has no label; neither has the first token of a document, unless
    `documents_together`.
    """
    # tokens at the start of each segment
    num_unlabelled = np.full(len(segments), 0 if documents_together else 1)
    num_unlabelled[np.unique(sequence, return_index=True)[1]] = 1
    has_label = np.zeros(len(segments), bool)
    for shard in np.unique(segments["shard"]).tolist():
        in_shard = segments["shard"] == shard
        (indices,) = np.nonzero(in_shard & (segments["length"] > num_unlabelled))
        if not len(indices):
            continue
        indices = indices[segments["low"][indices].argsort()]
        low = segments["low"][indices]
        first = low + num_unlabelled[indices]
        edges = np.stack([first, low + segments["length"][indices]], axis=1).ravel()
        tokens = np.asarray(shards[shard].tokens)
        if edges[-1] == len(tokens):
            edges = edges[:-1]
        largest = np.maximum.reduceat(tokens, edges)
        has_label[indices] = is_trained(largest[::2])
    return np.bincount(sequence, has_label) > 0


def cut_documents(documents: Documents, context: int, long: LongDocuments) -> CutDocuments:
    """Cut samples of more than `context` tokens, and join those of a record that fit together.
    Depends only on its arguments, so a run can resume anywhere."""
    if not (len(documents.samples) or long.pairs):
        return _cut_samples(documents, context, long)
    samples, records = split_samples(documents)
    policy = long
    if long.pairs:  # never separate a prompt from its answer
        policy = long._replace(mode="drop")
    cut = _cut_samples(replace(documents, lengths=samples["length"]), context, policy)
    num = len(documents.lengths)
    cut = CutDocuments(
        (documents, *cut.shards[1:]),
        cut.segments,
        records[cut.owners],
        np.bincount(records, cut.pieces_left_out, num).astype(np.int64),
        np.bincount(records, cut.removed, num).astype(np.int64),
    )
    if long.shares or long.pairs:
        return _join_samples(cut, context, long, np.bincount(records))
    return cut


def split_samples(documents: Documents) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples of all documents, as segments, and the index of each sample's document."""
    firsts = documents.lengths.cumsum() - documents.lengths
    starts = np.union1d(firsts, documents.samples)
    samples = np.zeros(len(starts), SEGMENT_DTYPE)
    samples["low"] = starts
    samples["length"] = np.diff(starts, append=documents.lengths.sum())
    return samples, np.searchsorted(firsts, starts, side="right") - 1


def _join_samples(
    cut: CutDocuments, context: int, long: LongDocuments, num_samples: np.ndarray
) -> CutDocuments:
    """Join consecutive pieces of a record that fit into forests, copied into another shard."""
    counts = np.bincount(cut.owners, minlength=len(cut.removed))
    edges = np.concatenate([[0], counts.cumsum()])
    is_single = (counts[cut.owners] == 1) & (not long.pairs)
    segments = [cut.segments[is_single]]
    owners = [cut.owners[is_single]]
    tokens: list[np.ndarray] = []
    nodes: list[np.ndarray] = []
    position = 0
    for record in np.flatnonzero(counts >= (0 if long.pairs else 2)).tolist():
        pieces = [
            np.asarray(cut.shards[shard].tokens[low : low + length])
            for shard, _, low, length in cut.segments[edges[record] : edges[record + 1]].tolist()
        ]
        groups = group_samples(pieces, context, MIN_TOKENS if long.shares else None)
        if long.pairs and (len(pieces), len(groups)) != (2, 1):
            if num_samples[record] == 2 and long.mode != "drop":
                raise ConfigError(
                    f"a pair of {cut.shards[0].lengths[record]} tokens exceeds "
                    f"data.context={context}, which must hold both answers; increase data.context, "
                    "or set data.long_documents=drop"
                )
            cut.pieces_left_out[record] += 1
            cut.removed[record] += sum(map(len, pieces))
            continue
        for group, forest in groups:
            segment = np.zeros(1, SEGMENT_DTYPE)
            segment["shard"] = len(cut.shards)
            segment["low"] = position
            found = np.zeros(len(forest), NODE_DTYPE)
            for number, (sample, start, stop, parent) in enumerate(forest):
                found[number] = (position, parent, sample)
                tokens.append(group[sample][start:stop])
                position += stop - start
            segment["length"] = position - segment["low"]
            nodes.append(found)
            segments.append(segment)
            owners.append(np.array([record]))
    if tokens:
        forests = Documents(
            np.concatenate(tokens), np.empty(0, np.int64), nodes=np.concatenate(nodes)
        )
        cut = cut._replace(shards=(*cut.shards, forests))
    all_owners = np.concatenate(owners)
    order = all_owners.argsort(kind="stable")
    return cut._replace(segments=np.concatenate(segments)[order], owners=all_owners[order])


def group_samples(
    samples: Sequence[np.ndarray], context: int, min_tokens: int | None
) -> list[tuple[list[np.ndarray], list[Node]]]:
    """Group consecutive samples whose forest has at most `context` tokens: [(samples, nodes of
    their forest)]. Prefixes of fewer than `min_tokens` are not shared; None: share nothing."""
    rows = []
    for number, tokens in enumerate(samples):  # a token with a label belongs to one sample
        labels = np.where(is_trained(tokens), number + 1, 0)
        labels[:1] = 0
        rows.append(np.stack([decode_ids(tokens), labels], 1).astype(np.int64))
    groups: list[tuple[list[np.ndarray], Forest]] = []
    for tokens, own in zip(samples, rows, strict=True):
        if not groups or groups[-1][1].num_tokens + groups[-1][1].count_new(own) > context:
            groups.append(([], Forest(min_tokens)))
        group, forest = groups[-1]
        group.append(tokens)
        forest.add(own)
    return [(group, forest.sort()[0]) for group, forest in groups]


def _cut_samples(documents: Documents, context: int, long: LongDocuments) -> CutDocuments:
    """Cut documents of more than `context` tokens."""
    num = len(documents.lengths)
    lows = documents.lengths.cumsum() - documents.lengths
    segments = np.zeros(num, SEGMENT_DTYPE)
    segments["low"] = lows
    segments["length"] = documents.lengths
    owners = np.arange(num)
    is_long = documents.lengths > context
    rewritten: list[np.ndarray] = []
    heads = np.zeros(num, np.int64)  # tokens that every piece repeats
    if long.mode == "drop":
        segments = segments[~is_long]
        owners = owners[~is_long]
    elif long.mode in ("end", "turns", "shorten_tools"):
        position = 0
        pieces = [segments[~is_long]]
        sources = [owners[~is_long]]
        for i in np.flatnonzero(is_long).tolist():
            tokens = documents.tokens[lows[i] : lows[i] + documents.lengths[i]]
            turns = _select_turns(documents.turns, tokens, lows[i])
            new = _cut_conversation(np.asarray(tokens), turns, context, long)
            piece = np.zeros(len(new), SEGMENT_DTYPE)
            piece["shard"] = 1
            piece["length"] = [len(each) for each in new]
            piece["low"] = position + piece["length"].cumsum() - piece["length"]
            num_tokens = int(piece["length"].sum())
            position += num_tokens
            rewritten += new
            pieces.append(piece)
            if len(new) > 1:
                heads[i] = (num_tokens - len(tokens)) // (len(new) - 1)
            sources.append(np.full(len(new), i))
        segments = np.concatenate(pieces)
        owners = np.concatenate(sources)
        order = owners.argsort(kind="stable")
        segments = segments[order]
        owners = owners[order]
    counts = -(-segments["length"] // context)
    segments = split_long(segments, context)
    owners = np.repeat(owners, counts)
    shards: tuple[Documents, ...] = (documents,)
    if rewritten:
        shards = (documents, Documents(np.concatenate(rewritten), np.empty(0, np.int64)))
    has_label = np.ones(len(segments), bool)
    for index in np.flatnonzero(is_long[owners]).tolist():
        shard, _, low, length = segments[index].tolist()
        has_label[index] = is_trained(shards[shard].tokens[low : low + length]).any()
    pieces_left_out = np.bincount(owners[~has_label], minlength=num)
    segments = segments[has_label]
    owners = owners[has_label]
    kept = np.bincount(owners, segments["length"] - heads[owners], num)
    removed = documents.lengths - kept.astype(np.int64) - np.where(kept > 0, heads, 0)
    return CutDocuments(shards, segments, owners, pieces_left_out, np.maximum(removed, 0))


def select_pieces(cut: CutDocuments, documents: np.ndarray) -> np.ndarray:
    """Return the pieces of these documents, in this order."""
    rank = np.full(len(cut.pieces_left_out), -1)
    rank[documents] = np.arange(len(documents))
    ranks = rank[cut.owners]
    order = np.flatnonzero(ranks >= 0)
    return cut.segments[order[ranks[order].argsort(kind="stable")]]


def _select_turns(turns: np.ndarray, tokens: np.ndarray, low: int) -> list[tuple[int, int, str]]:
    """Return (start, stop, role) of the turns of the document that starts at token `low`."""
    num_roles = len(ROLE_CODES)
    first, last = np.searchsorted(turns, [low * num_roles, (low + len(tokens)) * num_roles])
    starts = (turns[first:last] // num_roles - low).tolist()
    roles = [ROLE_CODES[code] for code in (turns[first:last] % num_roles).tolist()]
    return list(zip(starts, [*starts[1:], len(tokens)], roles, strict=False))


def _cut_conversation(
    tokens: np.ndarray, turns: list[tuple[int, int, str]], context: int, long: LongDocuments
) -> list[np.ndarray]:
    """Return the pieces of a conversation. The caller splits pieces that still exceed the context.

    The head is everything before the first non-system turn: the system prompt and the tools.
    """
    head = next((start for start, _, role in turns if role != "system"), 0)
    room = context - head
    end = len(tokens)
    if long.mode == "shorten_tools":
        return [_shorten_tools(tokens, turns, long)]
    if not turns or room <= 0:
        return [tokens]
    starts = [start for start, _, _ in turns if start >= head]
    if long.mode == "end":
        low = next((start for start in starts if end - start <= room), end - room)
        return [np.concatenate([tokens[:head], tokens[low:]])]
    edges = [head]
    low = head
    for start, stop in pairwise([*starts, end]):
        if stop - low > room and start > low:
            low = start
            edges.append(low)
        while stop - low > room:
            low += room
            edges.append(low)
    ranges = pairwise([*edges, end])
    return [np.concatenate([tokens[:head], tokens[low:high]]) for low, high in ranges]


def _shorten_tools(
    tokens: np.ndarray, turns: list[tuple[int, int, str]], long: LongDocuments
) -> np.ndarray:
    """Replace the middle of tool outputs above `tool_tokens`, unless a token there is trained."""
    parts = []
    low = 0
    for start, stop, role in turns:
        first = start + long.tool_tokens // 2
        last = stop - (long.tool_tokens - long.tool_tokens // 2)
        is_long = role == "tool" and last - first > len(long.marker)
        if is_long and not is_trained(tokens[first:last]).any():
            marker = encode_tokens(np.asarray(long.marker, np.int32), False)
            parts += [tokens[low:first], marker]
            low = last
    return np.concatenate([*parts, tokens[low:]])


def split_long(segments: np.ndarray, context: int) -> np.ndarray:
    """Split segments into segments of at most `context` tokens."""
    counts = -(-segments["length"] // context)
    parts = np.repeat(segments, counts)
    offsets = (np.arange(len(parts)) - np.repeat(counts.cumsum() - counts, counts)) * context
    parts["low"] += offsets
    parts["length"] = np.minimum(parts["length"] - offsets, context)
    return parts


def best_fit(lengths: np.ndarray, context: int) -> np.ndarray:
    """Assign each segment to the fullest sequence with room for it; return the sequences' indices.

    Longest first, down to SHORT_DOCUMENT_FRACTION. Shorter ones keep their order, so that sequences
    are alike.
    """
    is_short = lengths <= SHORT_DOCUMENT_FRACTION * context
    order = np.argsort(-np.where(is_short, 0, lengths), kind="stable")
    assigned: list[int] = []
    rooms: list[int] = []  # room << 32 | sequence, ascending, of the sequences that are not full
    num_sequences = 0
    for length in lengths[order].tolist():
        at = bisect_left(rooms, length << 32)
        if at < len(rooms):
            room, sequence = divmod(rooms.pop(at), 1 << 32)
        else:
            room = context
            sequence = num_sequences
            num_sequences += 1
        assigned.append(sequence)
        if room > length:
            insort(rooms, room - length << 32 | sequence)
    sequences = np.empty(len(lengths), np.int64)
    sequences[order] = assigned
    return sequences


def group_by_area(areas: np.ndarray, group: int, num_leading: int, key: Key) -> np.ndarray:
    """Return sequence indices in training order: shuffled groups of similar area, ascending inside
    a group, so that the sequences of a micro-step are alike too.

    The first `num_leading` sequences and an incomplete group at the end share a step with another
    round. They are of medium area, which every round has.
    """
    shuffled = permutation(len(areas), key)
    order = shuffled[areas[shuffled].argsort(kind="stable")]
    num_leading = min(num_leading, len(order))
    num_medium = num_leading + (len(order) - num_leading) % group
    low = (len(order) - num_medium) // 2
    medium = order[low : low + num_medium]
    rest = np.delete(order, np.s_[low : low + num_medium])
    groups = rest.reshape(-1, group)
    shuffled_groups = groups[permutation(len(groups), key)].ravel()
    return np.concatenate([medium[:num_leading], shuffled_groups, medium[num_leading:]])


def imbalance(areas: np.ndarray, ranks: int, batch: int) -> float:
    """Return the slowdown of attention by unequal work: largest area of a rank over the mean."""
    num_steps = len(areas) // (ranks * batch)
    if not num_steps:
        return 1.0
    areas = areas[: num_steps * ranks * batch]
    steps = areas.reshape(-1, batch, ranks).sum(axis=1)
    return float(steps.max(axis=1).sum() / steps.mean(axis=1).sum())


def hash_values(values: np.ndarray, *key: int) -> np.ndarray:
    """Hash each value with `key` to uint64 (splitmix64), independent of libraries, whose updates
    could reorder data."""
    state = np.zeros(len(values), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in (*key, values):
            state = (state ^ np.asarray(part).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state


def permutation(count: int, key: Key) -> np.ndarray:
    return np.argsort(hash_values(np.arange(count), *key), kind="stable")
