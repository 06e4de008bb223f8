"""The documents of one data source, epoch after epoch.

A source is a list of shards. Each epoch shuffles the shards, and the documents of each shard, by a
hash of the run's seed, the source and the epoch. So a position is a few integers: epoch, shard and
document, counted in the order of the epoch.

Held-out documents are sources without a key: one epoch, in the order of the files.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from ithaka.config import ConfigError
from ithaka.data import pack
from ithaka.data.cache import TokenCache
from ithaka.data.documents.read import Shard

Cut = Callable[[pack.Documents], pack.CutDocuments]  # pack.cut_documents for a context


@dataclass(frozen=True)
class SourcePosition:
    """The next document of a source, and the tokens read since the start of training."""

    epoch: int = 0
    shard: int = 0  # in the order of the epoch
    document: int = 0  # in the order of the epoch
    tokens: int = 0


class ShardCounts(NamedTuple):
    """The documents and tokens to train on in a shard; skipped and notes as in Documents."""

    documents: int
    tokens: int
    skipped: Mapping[str, int]
    notes: Mapping[str, int]


class SelectedDocuments(NamedTuple):
    """Documents of one shard, as segments. A round may have millions, so nothing else is kept."""

    shard: Shard
    tokens: tuple[pack.Documents, ...]  # the shard's, and pieces that are not a range of it
    documents: np.ndarray  # before any is cut
    pieces: np.ndarray
    pieces_left_out: int  # without a trained token
    removed_tokens: int  # in no piece


class SourceSize(NamedTuple):
    documents: int
    tokens: int
    is_complete: bool  # False: estimated from the shards read so far


class Source:
    """The documents of one data source, epoch after epoch."""

    def __init__(
        self,
        name: str,
        weight: float,
        shards: Sequence[Shard],
        cache: TokenCache,
        key: pack.Key | None,
    ):
        """`key` shuffles each epoch, without end; None: one epoch, in the order of the files."""
        self.name = name
        self.weight = weight
        self.shards = shards
        self.cache = cache
        self.key = key
        self.num_bytes = sum(shard.num_bytes for shard in shards)
        self.shard_counts: dict[int, ShardCounts] = {}  # by shard, for those loaded so far

    def next_documents(
        self,
        position: SourcePosition,
        num_tokens: float,
        cut: Cut,
        wrap: bool,
        prefetch: bool = True,
        report: Callable[[float], None] = lambda share: None,
    ) -> tuple[list[SelectedDocuments], SourcePosition]:
        """Return the next documents by shard, of at least `num_tokens` tokens in all, and the
        position after them.

        Stop at the end of an epoch, unless `wrap`. `prefetch`: tokenize the following shards in the
        background. `report` gets the fraction that is read.
        """
        selected: list[SelectedDocuments] = []
        until = position.tokens + num_tokens
        is_epoch_start = position.shard == position.document == 0
        epoch_start = position.tokens if is_epoch_start else None
        order = self._shuffle(len(self.shards), position.epoch)
        while position.tokens < until and position.shard < len(order):
            index = order[position.shard]
            pieces = cut(self.cache.load(self.shards[index]))
            sizes = _count_tokens(pieces)
            documents = pieces.shards[0]
            self.shard_counts[index] = ShardCounts(
                int((sizes > 0).sum()), int(sizes.sum()), documents.skipped, documents.notes
            )
            num_missing = until - position.tokens
            share = max(0, 1 - num_missing / max(num_tokens, 1))
            if not wrap:  # the epoch may end first
                share = max(share, (position.shard + 1) / len(order))
            report(min(share, 1))
            taken, position = self._take(sizes, position, num_missing)
            selected.append(_select(self.shards[index], pieces, taken))
            if self.key is not None and position.shard == len(order):
                if position.tokens == epoch_start:
                    raise ConfigError(
                        f"data: {self.name} has no tokens to train on; use other data"
                    )
                position = SourcePosition(position.epoch + 1, tokens=position.tokens)
                epoch_start = position.tokens
                order = self._shuffle(len(self.shards), position.epoch)
                if not wrap:
                    break
        if self.key is not None and prefetch:  # the next round may need as many shards
            following = order[position.shard :][: 1 + len(selected)]
            self.cache.prepare(self.shards[i] for i in following)
        return selected, position

    def _take(
        self, sizes: np.ndarray, position: SourcePosition, num_tokens: float
    ) -> tuple[np.ndarray, SourcePosition]:
        """Return the next documents of a shard, of at least `num_tokens` tokens or up to its end,
        and the position after them. `sizes` are the tokens of each document."""
        shuffled = self._shuffle(len(sizes), position.epoch, position.shard)
        left = np.asarray(shuffled[position.document :], np.int64)
        ends = sizes[left].cumsum()
        taken = left[: int(ends.searchsorted(num_tokens)) + 1]
        tokens = position.tokens + int(sizes[taken].sum())
        if len(taken) == len(left):
            return taken, SourcePosition(position.epoch, position.shard + 1, tokens=tokens)
        return taken, replace(position, document=position.document + len(taken), tokens=tokens)

    def _shuffle(self, count: int, *key: int) -> list[int]:
        if self.key is None:
            return list(range(count))
        return pack.permutation(count, (*self.key, *key)).tolist()

    def estimate_size(self, cut: Cut) -> SourceSize:
        """Estimate the documents and tokens of an epoch. Reads a shard if none was."""
        if not self.shard_counts:
            self.next_documents(SourcePosition(), 1, cut, wrap=False)
        known = self.shard_counts.values()
        scale = self.num_bytes / sum(self.shards[i].num_bytes for i in self.shard_counts)
        return SourceSize(
            round(sum(counts.documents for counts in known) * scale),
            round(sum(counts.tokens for counts in known) * scale),
            len(known) == len(self.shards),
        )

    def digests(self) -> np.ndarray:
        """Return those of the documents in the shards read so far."""
        known = [self.cache.load(self.shards[i]).digests for i in sorted(self.shard_counts)]
        return np.concatenate([np.empty(0, np.int64), *known])

    def count(self, name: Literal["skipped", "notes"]) -> Counter[str]:
        """Count skipped documents or notes in the shards read so far."""
        total = Counter[str]()
        for counts in self.shard_counts.values():
            total += Counter(counts.skipped if name == "skipped" else counts.notes)
        return total


def _count_tokens(pieces: pack.CutDocuments) -> np.ndarray:
    """Return the tokens in the pieces of each document, int64 [documents]."""
    num_documents = len(pieces.shards[0].lengths)
    sizes = np.bincount(pieces.owners, pieces.segments["length"], num_documents)
    return sizes.astype(np.int64)


def _select(shard: Shard, pieces: pack.CutDocuments, indices: np.ndarray) -> SelectedDocuments:
    """Keep the documents at `indices`, in this order."""
    samples, owners = pack.split_samples(pieces.shards[0])
    return SelectedDocuments(
        shard,
        pieces.shards,
        samples[np.isin(owners, indices)],
        pack.select_pieces(pieces, indices),
        int(pieces.pieces_left_out[indices].sum()),
        int(pieces.removed[indices].sum()),
    )
