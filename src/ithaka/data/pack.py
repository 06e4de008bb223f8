"""Which tokens go where: pure functions of sizes, lengths, seed and position. No files, no ranks.

A shard is some documents that are read and tokenised together. An epoch shuffles its shards, deals them into windows
of about WINDOW_BYTES and shuffles the documents of each window. Documents follow one another through the windows and
are cut into sequences of S tokens; one that crosses the end of a sequence continues in the next as a document of its
own. An epoch's last sequence is padded.

Tokens are int32: the id where the token is trained on, ~id (negative) where it is only read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WINDOW_BYTES = 1 << 26
IGNORE = -100


@dataclass(frozen=True)
class Documents:
    """Those of one shard. tokens: ints [n]. starts: ascending, where documents start in them.

    continues: tokens before the first start belong to the document that the shard before ended in.
    """

    tokens: np.ndarray
    starts: np.ndarray
    continues: bool = False
    num_skipped: int = 0  # empty documents

    def bounds(self) -> np.ndarray:
        """Where the documents, or parts of them, start, and where the last one ends."""
        starts = self.starts if not self.continues else np.concatenate([np.zeros(1, np.int64), self.starts])
        return np.unique(np.append(starts, len(self.tokens)))


@dataclass(frozen=True)
class PackedSequence:
    """tokens: int32 [S], padding after `length`. starts: where documents start in it; 0 is always one."""

    tokens: np.ndarray
    starts: np.ndarray
    length: int

    @property
    def ids(self) -> np.ndarray:
        """int64 [S]."""
        return np.where(self.tokens < 0, ~self.tokens, self.tokens).astype(np.int64)

    def labels(self) -> np.ndarray:
        """int64 [S], not shifted. No document's first token is a target: what precedes it is another document."""
        labels_S = np.where(self.tokens < 0, IGNORE, self.tokens).astype(np.int64)
        labels_S[self.starts] = IGNORE
        labels_S[self.length :] = IGNORE
        return labels_S

    def document_ids(self) -> np.ndarray:
        """int64 [S], counting from 0; the padding is a document of its own."""
        change_S = np.zeros(len(self.tokens), dtype=np.int64)
        change_S[self.starts] = 1
        change_S[self.length : self.length + 1] = 1
        return np.cumsum(change_S) - 1


class Window:
    """The documents of some shards in the order of training: shuffled by `key`, or as they are (None)."""

    def __init__(self, shards: Sequence[Documents], key: tuple[int, ...] | None):
        self.shards = [shard for shard in shards if len(shard.tokens)]
        bounds = [shard.bounds() for shard in self.shards]
        counts = [len(b) - 1 for b in bounds]
        self.shard = np.repeat(np.arange(len(counts)), counts)
        self.low = np.concatenate([b[:-1] for b in bounds] or [np.empty(0, np.int64)])
        lengths = np.concatenate([np.diff(b) for b in bounds] or [np.empty(0, np.int64)])
        order = np.arange(len(lengths)) if key is None else permutation(len(lengths), key)
        self.shard, self.low, self.ends = self.shard[order], self.low[order], np.cumsum(lengths[order])
        self.num_tokens = int(self.ends[-1]) if len(order) else 0

    def take(self, low: int, high: int) -> list[tuple[np.ndarray, bool]]:
        """Tokens [low, high) of the window: a view of each document's part, and whether a document starts there."""
        found = []
        for i, start, stop in spans(self.ends, low, high):
            shard, at = self.shards[self.shard[i]], int(self.low[i])
            fresh = start == 0 and not (at == 0 and shard.continues)
            found.append((shard.tokens[at + start : at + stop], fresh))
        return found


def spans(ends: np.ndarray, low: int, high: int) -> list[tuple[int, int, int]]:
    """Documents that end at `ends` -> (document, start, stop) of each that has tokens in [low, high)."""
    first, last = np.searchsorted(ends, low, side="right"), np.searchsorted(ends, high, side="left")
    begins = np.concatenate([np.zeros(1, np.int64), ends])[first : last + 1].tolist()
    stops = ends[first : last + 1].tolist()
    pairs = zip(begins, stops, strict=False)
    return [(int(first) + i, max(low - b, 0), min(high, e) - b) for i, (b, e) in enumerate(pairs) if b < high]


def pack(parts: Sequence[tuple[np.ndarray, bool]], context: int, pad_id: int) -> PackedSequence:
    tokens_S = np.full(context, pad_id, dtype=np.int32)
    starts, filled = [0], 0
    for tokens, fresh in parts:
        tokens_S[filled : filled + len(tokens)] = tokens
        starts += [filled] if fresh and filled else []
        filled += len(tokens)
    return PackedSequence(tokens_S, np.asarray(starts, np.int64), filled)


def deal(
    sizes: Sequence[int], continues: Sequence[bool], key: tuple[int, ...] | None, window_bytes: int
) -> list[list[int]]:
    """Shards by index -> those of each window of an epoch, in order; `key` shuffles, None does not.

    A shard that continues the one before it stays behind it. Such a run, one large document, is shuffled as a whole
    and has a window for each shard, so that no more than that must be read to go on from the middle.
    """
    first = np.flatnonzero(~np.asarray(continues, bool))
    runs = np.split(np.arange(len(sizes)), first[1:]) if len(sizes) else []
    order = range(len(runs)) if key is None else permutation(len(runs), key)
    windows: list[list[int]] = []
    room = 0
    for run in (runs[i] for i in order):
        if len(run) > 1:
            windows += [[int(i)] for i in run]
            room = 0
        elif room > 0:
            windows[-1].append(int(run[0]))
            room -= sizes[run[0]]
        else:
            windows.append([int(run[0])])
            room = window_bytes - sizes[run[0]]
    return windows


@dataclass(frozen=True)
class Split:
    """One side of a split of records: a `fraction` of all, held out, or the others."""

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
