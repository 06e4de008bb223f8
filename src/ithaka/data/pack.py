"""Which tokens go where: pure functions of sizes, lengths, seed and position. No files, no ranks.

A shard is some documents that are read and tokenised together. An epoch shuffles the shards of a source; a round is
the documents of some of them, shuffled and packed together. Each document goes whole into the fullest sequence of S
tokens that has room for it. Sequences without a label are left out. Those of similar attention area are grouped into
the same step, and the groups are shuffled.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

SHORT_DOCUMENT_TOKENS = 1 / 8  # of a sequence: sorting shorter documents too gains less than 0.4 % of room
# Documents, or parts of them: the shard of a round, the source, the first token in the shard, how many.
PIECE = np.dtype([("shard", np.int32), ("source", np.int32), ("low", np.int64), ("length", np.int64)])
IGNORE_INDEX = -100  # as in the loss, which imports torch


@dataclass(frozen=True)
class Documents:
    """Those of one shard. tokens: int32 [n], ~id where it is read but not trained. lengths: int64 [documents]."""

    tokens: np.ndarray
    lengths: np.ndarray
    skipped: Mapping[str, int] = field(default_factory=dict)  # documents left out, by reason


@dataclass(frozen=True)
class PackedSequence:
    """tokens: int32 [S], marked as in Documents, padding after `length`. starts: where documents start; 0 is one.
    sources: of each document. together: documents are one text."""

    tokens: np.ndarray
    starts: np.ndarray
    length: int
    sources: np.ndarray
    together: bool = False

    @property
    def borders(self) -> np.ndarray:
        """Where attention and positions begin anew."""
        return self.starts[:1] if self.together else self.starts

    @property
    def ids(self) -> np.ndarray:
        """int64 [S]."""
        tokens_S = self.tokens.astype(np.int64)
        return tokens_S ^ (tokens_S >> 63)  # ~ where negative

    def labels(self) -> np.ndarray:
        """int64 [S], not shifted: the trained tokens. None is the first after a border, which sees none before it."""
        labels_S = self.tokens.astype(np.int64)
        labels_S[labels_S < 0] = IGNORE_INDEX
        labels_S[self.borders] = IGNORE_INDEX
        labels_S[self.length :] = IGNORE_INDEX
        return labels_S

    def document_ids(self) -> np.ndarray:
        """int64 [S], counting from 0 those that are apart; the padding is a document of its own."""
        change_S = np.zeros(len(self.tokens), dtype=np.int64)
        change_S[self.borders] = 1
        change_S[self.length : self.length + 1] = 1
        return np.cumsum(change_S) - 1

    def source_ids(self) -> np.ndarray:
        """int64 [S]; 0 for the padding."""
        ids_S = np.zeros(len(self.tokens), dtype=np.int64)
        ids_S[: self.length] = np.repeat(self.sources, np.diff(self.starts, append=self.length))
        return ids_S


@dataclass(frozen=True)
class Packing:
    """How a round is packed: into sequences of `context` tokens, in groups of `group`.

    The first `lead` sequences complete a group of the round before. `done`: how many were given out. `labelled`: only
    sequences with a label count; False in positions of format 4, which counted all. `most`: sequences that are enough
    for the run, if the usual round has more of them; 0: unknown.
    """

    context: int
    group: int
    lead: int = 0
    done: int = 0
    labelled: bool = True
    most: int = 0


class PackedRound:
    """Pieces [n] that are packed together, as sequences in the order of training."""

    def __init__(
        self, pieces: np.ndarray, packing: Packing, key: tuple[int, ...] | None,
        shards: Sequence[Documents] = (), together: bool = False,
    ):  # fmt: skip
        """`key` shuffles the groups; None: sequences in the order of their first pieces. `shards`: the tokens, to find
        the sequences without a label."""
        sequence = best_fit(pieces["length"], packing.context)
        self.read_tokens, num_packed = int(pieces["length"].sum()), len(np.unique(sequence))
        if shards and packing.labelled:
            kept = has_label(shards, pieces, sequence, together)[sequence]
            pieces, sequence = pieces[kept], np.unique(sequence[kept], return_inverse=True)[1]
        lengths = pieces["length"]
        areas = np.bincount(sequence, lengths * (lengths + 1) / 2)  # pairs of attention
        order = np.unique(sequence, return_index=True)[1].argsort()
        if key is not None:
            order = group_alike(areas, packing.group, packing.lead, key)
        place = order.argsort()[sequence]
        self.packing, self.areas, self.num_tokens = packing, areas[order], int(lengths.sum())
        self.num_left_out = num_packed - len(areas)
        self.pieces = pieces[place.argsort(kind="stable")]
        self.edges = np.concatenate([[0], np.bincount(place).cumsum()])

    def __len__(self) -> int:
        return len(self.areas)

    def sequences(self, low: int, high: int) -> np.ndarray:
        """Their pieces."""
        return self.pieces[self.edges[low] : self.edges[high]]


def has_label(shards: Sequence[Documents], pieces: np.ndarray, sequence: np.ndarray, together: bool) -> np.ndarray:
    """Which sequences have a label, bool [sequences]. `sequence`: that of each piece.

    A sequence's first token has none, and neither has a document's unless documents are `together`. Reads the tokens
    of the pieces' shards, and keeps none of them.
    """
    labels = np.zeros(len(pieces), bool)
    for shard in np.unique(pieces["shard"]).tolist():
        (places,) = np.nonzero((pieces["shard"] == shard) & (pieces["length"] > 1))
        if len(places):
            places = places[pieces["low"][places].argsort()]
            low, tokens = pieces["low"][places], np.asarray(shards[shard].tokens)
            edges = np.stack([low + 1, low + pieces["length"][places]], axis=1).ravel()
            largest = np.maximum.reduceat(tokens, edges[:-1] if edges[-1] == len(tokens) else edges)
            labels[places] = largest[::2] >= 0
    if together:
        inside = np.ones(len(pieces), bool)
        inside[np.unique(sequence, return_index=True)[1]] = False
        for i in np.nonzero(inside & ~labels)[0].tolist():
            labels[i] = shards[pieces["shard"][i]].tokens[pieces["low"][i]] >= 0
    return np.bincount(sequence, labels) > 0


def cut(pieces: np.ndarray, context: int) -> np.ndarray:
    """Pieces of at most `context` tokens."""
    counts = -(-pieces["length"] // context)
    found = np.repeat(pieces, counts)
    skipped = (np.arange(len(found)) - np.repeat(counts.cumsum() - counts, counts)) * context
    found["low"] += skipped
    found["length"] = np.minimum(found["length"] - skipped, context)
    return found


def best_fit(lengths: np.ndarray, context: int) -> np.ndarray:
    """The sequence, counting from 0, that each piece goes into: the fullest with room for it.

    Longest pieces first, down to SHORT; the short ones fill up in the order they have, so that sequences are alike.
    """
    order = np.argsort(-np.where(lengths > SHORT_DOCUMENT_TOKENS * context, lengths, 0), kind="stable")
    chosen: list[int] = []
    rooms: list[int] = []  # ascending, of the sequences that are not full: room << 32 | sequence
    num_sequences = 0
    for length in lengths[order].tolist():
        at = bisect_left(rooms, length << 32)
        if at < len(rooms):
            room, sequence = divmod(rooms.pop(at), 1 << 32)
        else:
            room, sequence = context, num_sequences
            num_sequences += 1
        chosen.append(sequence)
        if room > length:
            insort(rooms, room - length << 32 | sequence)
    found = np.empty(len(lengths), np.int64)
    found[order] = chosen
    return found


def group_alike(areas: np.ndarray, group: int, lead: int, key: tuple[int, ...]) -> np.ndarray:
    """Sequences by index in the order of training: groups of similar area, shuffled; ascending inside a group, so that
    those of a micro-step are alike too.

    The first `lead` and those that are left over at the end share a group with another round's: they are of middling
    area, which all rounds have.
    """
    shuffled = permutation(len(areas), key)
    order = shuffled[areas[shuffled].argsort(kind="stable")]
    lead = min(lead, len(order))
    num_middle = lead + (len(order) - lead) % group
    low = (len(order) - num_middle) // 2
    middle, rest = order[low : low + num_middle], np.delete(order, np.s_[low : low + num_middle])
    groups = rest.reshape(-1, group)
    return np.concatenate([middle[:lead], groups[permutation(len(groups), key)].ravel(), middle[lead:]])


def imbalance(areas: np.ndarray, ranks: int, batch: int) -> float:
    """Largest over mean area of the ranks in a micro-step, over all steps: how much longer attention takes than it
    would if the ranks had equal work. `areas`: of sequences in the order of training."""
    steps = areas[: len(areas) // (ranks * batch) * ranks * batch].reshape(-1, batch, ranks).sum(axis=1)
    return float(steps.max(axis=1).sum() / steps.mean(axis=1).sum()) if len(steps) else 1.0


def pack(
    shards: Sequence[Documents], pieces: np.ndarray, context: int, pad_id: int, together: bool = False
) -> PackedSequence:
    """The tokens of `pieces`, one after the other; padding fills up."""
    tokens_S = np.full(context, pad_id, dtype=np.int32)
    ends = pieces["length"].cumsum()
    for (shard, _, low, length), end in zip(pieces.tolist(), ends.tolist(), strict=True):
        tokens_S[end - length : end] = shards[shard].tokens[low : low + length]
    starts = np.concatenate([np.zeros(1, np.int64), ends])
    return PackedSequence(tokens_S, starts[: max(len(pieces), 1)], int(starts[-1]), pieces["source"], together)


@dataclass(frozen=True)
class Split:
    """One side of a split of records: the `fraction` of them that is held out, or the rest."""

    fraction: float
    held_out: bool

    def keeps(self, records: np.ndarray, file_index: int, start: int) -> np.ndarray:
        """Which records are on this side, by a hash of where they are: the same on every rank and every epoch.

        The very first record is always held out, so that a small file has something to validate on.
        """
        chosen = scramble(records, file_index, start) < np.uint64(int(self.fraction * 2**53) << 11)
        chosen |= (records == 0) & (file_index == 0) & (start == 0)
        return chosen if self.held_out else ~chosen


def scramble(values: np.ndarray, *key: int) -> np.ndarray:
    """A hash of each value under `key`, uint64 (splitmix64): ours, so no library update reorders data."""
    state = np.zeros(len(values), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in (*key, values):
            state = state ^ np.asarray(part).astype(np.uint64)
            state = state + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state


def permutation(count: int, key: tuple[int, ...]) -> np.ndarray:
    return np.argsort(scramble(np.arange(count), *key), kind="stable")
