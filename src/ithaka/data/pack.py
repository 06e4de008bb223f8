"""Which tokens go where: pure functions of sizes, lengths, seed and position. No files, no ranks.

A shard is some documents that are read and tokenised together. An epoch shuffles its shards, deals them into windows
of about WINDOW_BYTES and shuffles the documents of each window. Documents follow one another through the windows and
are cut into sequences of S tokens; one that crosses the end of a sequence continues in the next as a document of its
own. An epoch's last sequence is padded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

WINDOW_BYTES = 1 << 26
IGNORED = -100  # as in the loss, which imports torch


@dataclass(frozen=True)
class Documents:
    """Those of one shard. tokens: int32 [n], ~id where it is read but not trained. lengths: int64 [documents]."""

    tokens: np.ndarray
    lengths: np.ndarray
    skipped: Mapping[str, int] = field(default_factory=dict)  # documents left out, by reason


@dataclass(frozen=True)
class PackedSequence:
    """tokens: int32 [S], marked as in Documents, padding after `length`. starts: where documents start; 0 is one."""

    tokens: np.ndarray
    starts: np.ndarray
    length: int

    @property
    def ids(self) -> np.ndarray:
        """int64 [S]."""
        tokens_S = self.tokens.astype(np.int64)
        return tokens_S ^ (tokens_S >> 63)  # ~ where negative

    def labels(self) -> np.ndarray:
        """int64 [S], not shifted: the trained tokens. No document's first token is one: what precedes it is another."""
        labels_S = self.tokens.astype(np.int64)
        labels_S[labels_S < 0] = IGNORED
        labels_S[self.starts] = IGNORED
        labels_S[self.length :] = IGNORED
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
        self.shards = shards
        lengths = np.concatenate([shard.lengths for shard in shards])
        order = np.arange(len(lengths)) if key is None else permutation(len(lengths), key)
        self.shard = np.repeat(np.arange(len(shards)), [len(shard.lengths) for shard in shards])[order]
        self.low = np.concatenate([np.cumsum(shard.lengths) - shard.lengths for shard in shards])[order]
        self.ends = np.cumsum(lengths[order])
        self.num_tokens = int(lengths.sum())

    def take(self, low: int, high: int) -> list[np.ndarray]:
        """Tokens [low, high) of the window: a view of each document's part. All but the first start a document."""
        return [
            self.shards[self.shard[i]].tokens[self.low[i] + start : self.low[i] + stop]
            for i, start, stop in spans(self.ends, low, high)
        ]


def spans(ends: np.ndarray, low: int, high: int) -> list[tuple[int, int, int]]:
    """Documents that end at `ends` -> (document, start, stop) of each that has tokens in [low, high)."""
    first, last = np.searchsorted(ends, low, side="right"), np.searchsorted(ends, high, side="left")
    begins = np.concatenate([np.zeros(1, np.int64), ends])[first : last + 1].tolist()
    stops = ends[first : last + 1].tolist()
    pairs = zip(begins, stops, strict=False)
    return [(int(first) + i, max(low - b, 0), min(high, e) - b) for i, (b, e) in enumerate(pairs) if b < high]


def pack(parts: Sequence[np.ndarray], context: int, pad_id: int) -> PackedSequence:
    """Documents, or parts of them, one after the other; padding fills up."""
    tokens_S = np.full(context, pad_id, dtype=np.int32)
    ends = np.cumsum([0, *map(len, parts)])
    for end, tokens in zip(ends[1:], parts, strict=True):
        tokens_S[end - len(tokens) : end] = tokens
    return PackedSequence(tokens_S, ends[: max(len(parts), 1)], int(ends[-1]))


def deal(sizes: Sequence[int], key: tuple[int, ...] | None, window_bytes: int) -> list[list[int]]:
    """Shards by index -> those of each window of an epoch, in order; `key` shuffles, None does not."""
    windows: list[list[int]] = []
    room = 0
    for i in range(len(sizes)) if key is None else permutation(len(sizes), key).tolist():
        if room <= 0:
            windows.append([])
            room = window_bytes
        windows[-1].append(i)
        room -= sizes[i]
    return windows


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
