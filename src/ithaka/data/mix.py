"""Documents of the sources -> packed sequences, each source in proportion to its weight; and the place to resume from.

A round is the documents that are packed together. It takes of every source what its weight says, in tokens, and ends
with the epoch of the main source, the one that takes longest; the others begin their next epoch inside a round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ithaka.config import ConfigError
from ithaka.data import pack
from ithaka.data.cache import TokenCache
from ithaka.data.conversation import LEFT_OUT
from ithaka.data.pack import PIECE, Documents, PackedRound, PackedSequence, Packing
from ithaka.data.read import Shard

# A round's size: tokens, sequences and steps, at least.
ROUND_TOKENS = 1 << 24
ROUND_SEQUENCES = 64
ROUND_STEPS = 32
HELD_OUT_SEQUENCES = 16  # of a round without a seed, of which only the first sequences may be needed
SPARE_SEQUENCES = 8  # of a small round, beyond what the run needs: shuffled, its last and emptiest one may come first

Loaded = tuple[Shard, Documents]


def tokens_per_round(packing: Packing, shuffled: bool = True) -> int:
    """How many tokens a round takes. Packing, and so what is trained, depends on it: where that is no burden, it does
    not depend on how many sequences the run needs."""
    num_sequences = max(ROUND_SEQUENCES, ROUND_STEPS * packing.group) if shuffled else HELD_OUT_SEQUENCES
    usual = max(num_sequences * packing.context, ROUND_TOKENS * shuffled)
    return min(usual, max(packing.most * packing.context, ROUND_TOKENS)) if packing.most else usual


@dataclass(frozen=True)
class Cursor:
    """A place in a source: documents taken of a shard of an epoch, and tokens since the start of training."""

    epoch: int = 0
    shard: int = 0  # in the order of the epoch
    document: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Position:
    """A place in a stream: where its round starts in each source, and how the round is packed.

    What is left of a round when a run is resumed with another context is packed again: one more packing.
    """

    sequences: int = 0  # since the start of training, over all ranks
    cursors: tuple[Cursor, ...] = ()
    packings: tuple[Packing, ...] = ()

    @property
    def epoch(self) -> int:
        """Of the main source."""
        return min((cursor.epoch for cursor in self.cursors), default=0)


class Source:
    """Shards -> documents, epoch after epoch."""

    def __init__(
        self, name: str, weight: float, shards: Sequence[Shard], cache: TokenCache, key: tuple[int, ...] | None
    ):
        """`key` shuffles, anew for each of endless epochs; None: one epoch, in the order of the files."""
        self.name, self.weight, self.shards, self.cache, self.key = name, weight, shards, cache, key
        self.num_bytes = sum(shard.num_bytes for shard in shards)
        # Of each shard that was loaded: documents, their tokens, and those skipped, by reason.
        self.seen: dict[int, tuple[int, int, Mapping[str, int]]] = {}

    def _order(self, count: int, *key: int) -> list[int]:
        return list(range(count)) if self.key is None else pack.permutation(count, (*self.key, *key)).tolist()

    def take(
        self, cursor: Cursor, num_tokens: float, longest: float, goes_on: bool, ahead: bool = True
    ) -> tuple[list[Loaded], np.ndarray, Cursor]:
        """Documents of `num_tokens` tokens or a little more: their shards, their pieces [n], and the place behind them.

        Documents above `longest` are among them, but do not count. Fewer at an epoch's end, unless it `goes_on`.
        `ahead`: tokenize what follows in the background.
        """
        shards: list[Loaded] = []
        found = [np.empty(0, PIECE)]
        until = cursor.tokens + num_tokens
        epoch_start = cursor.tokens if cursor.shard == cursor.document == 0 else None  # in tokens, if it is ours
        order = self._order(len(self.shards), cursor.epoch)
        while cursor.tokens < until and cursor.shard < len(order):
            documents = self._load(order[cursor.shard], longest)
            pieces = np.zeros(len(documents.lengths), PIECE)
            pieces["shard"], pieces["length"] = len(shards), documents.lengths
            pieces["low"] = documents.lengths.cumsum() - documents.lengths
            pieces = pieces[self._order(len(pieces), cursor.epoch, cursor.shard)[cursor.document :]]
            ends = np.where(pieces["length"] > longest, 0, pieces["length"]).cumsum()
            count = int(ends.searchsorted(until - cursor.tokens)) + 1
            shards.append((self.shards[order[cursor.shard]], documents))
            found.append(pieces[:count])
            tokens = cursor.tokens + int(ends[:count][-1:].sum())
            cursor = replace(cursor, document=cursor.document + count, tokens=tokens)
            if count >= len(pieces):
                cursor = Cursor(cursor.epoch, cursor.shard + 1, 0, tokens)
            if self.key is not None and cursor.shard == len(order):
                if tokens == epoch_start:
                    raise ConfigError(f"data: {self.name} holds no tokens to train on; give other data")
                cursor, epoch_start = Cursor(cursor.epoch + 1, tokens=tokens), tokens
                order = self._order(len(self.shards), cursor.epoch)
                if not goes_on:
                    break
        if self.key is not None and ahead:  # the next round may need as many shards
            self.cache.prepare(self.shards[i] for i in order[cursor.shard :][: 1 + len(shards)])
        return shards, np.concatenate(found), cursor

    def _load(self, index: int, longest: float) -> Documents:
        documents = self.cache.load(self.shards[index])
        kept = documents.lengths[documents.lengths <= longest]
        self.seen[index] = len(kept), int(kept.sum()), documents.skipped
        return documents


class SequenceStream:
    """Sources -> packed sequences of `context` tokens."""

    def __init__(
        self, sources: Sequence[Source], context: int, *, group: int = 1, pad_id: int = 0,
        long_documents: Literal["split", "drop", "refuse"] = "split", together: bool = False, needed: int | None = None,
    ):  # fmt: skip
        """`group`: sequences of a step, over all ranks. `needed`: how many the run takes from here on; None: unknown.
        The sources have keys, or none of them has. The order of the data is the same whether documents are `together`
        or apart."""
        self.sources, self.context, self.group, self.pad_id, self.needed = sources, context, group, pad_id, needed
        self.together, self.long_documents, self.shuffled = together, long_documents, sources[0].key is not None
        self.main = max(range(len(sources)), key=lambda i: sources[i].num_bytes / sources[i].weight)
        self.seek(Position())

    def seek(self, position: Position) -> None:
        cursors = position.cursors or (Cursor(),) * len(self.sources)
        most = 0 if self.needed is None else max(self.group, self.needed) + SPARE_SEQUENCES * self.shuffled
        packings = position.packings or (Packing(self.context, self.group, most=most),)
        if packings[-1].context != self.context:
            packings = (*packings, Packing(self.context, self.group))
        self.position = Position(position.sequences, cursors, packings)
        # A step starts here, counted in sequences of the round. Another group than the round's is for the next.
        self._step_start = packings[-1].lead if packings[-1].group == self.group else packings[-1].done
        self._round: PackedRound | None = None

    def next(self, materialize: bool = True) -> PackedSequence | None:
        """The next sequence; None at the end of a stream without keys, or if not `materialize`."""
        packed = self.round()
        *earlier, packing = self.position.packings
        if not len(packed):
            return None
        packings = (*earlier, replace(packing, done=packing.done + 1))
        self.position = Position(self.position.sequences + 1, self.position.cursors, packings)
        return self.sequence(packing.done) if materialize else None

    def sequence(self, index: int) -> PackedSequence:
        """Of the round."""
        assert self._round is not None
        pieces = self._round.sequences(index, index + 1)
        shards = [documents for _, documents in self._shards]
        return pack.pack(shards, pieces, self.context, self.pad_id, self.together)

    def round(self) -> PackedRound:
        """The round of the next sequence, empty at the end of a stream without keys; moves on to it.

        Sets `documents`, its pieces before any is dropped or cut, `num_long`, those longer than the context,
        `num_left_out`, the sequences without a label that it and the empty rounds before it had, and `read_tokens`,
        the tokens of all these sequences.
        """
        if self._round is None:
            self._round = self._load()
            self.num_left_out, self.read_tokens = self._round.num_left_out, self._round.read_tokens
        start = self.position.epoch
        while self.position.packings[-1].done == len(self._round) and (self.shuffled or len(self.documents)):
            if self.shuffled and self.position.epoch > start + 1:
                raise ConfigError(
                    f"no sequence of data.context={self.context} tokens has a token to train; see `ithaka data`, and "
                    "check data.train_on, data.chat_template and the labels in the data"
                )
            if len(self._round):
                self.num_left_out = self.read_tokens = 0
            self._step_start = (self._step_start - len(self._round)) % self.group
            packing = Packing(self.context, self.group, self._step_start, most=self.position.packings[0].most)
            self.position = Position(self.position.sequences, self._behind, (packing,))
            self._round = self._load()
            self.num_left_out += self._round.num_left_out
            self.read_tokens += self._round.read_tokens
        return self._round

    def _load(self) -> PackedRound:
        main, key = self.position.cursors[self.main], self.sources[self.main].key
        key = None if key is None else (*key, main.epoch, main.shard, main.document)
        pieces = self.documents = self._take(key)
        reasons = {reason for _, documents in self._shards for reason in documents.skipped if LEFT_OUT in reason}
        if reasons and not self.position.packings[0].labelled:
            raise ConfigError(
                f"the checkpoint's position in the data counts records {reasons.pop()}, which are skipped now; export "
                "the run and start a new one from its weights, or give a data.chat_template that renders it"
            )
        self.num_long = 0
        for packing in self.position.packings:
            long = pieces["length"] > packing.context
            self.num_long += int(long.sum())
            if long.any() and self.long_documents == "refuse":
                raise ConfigError(self._refusal(pieces[long][0]))
            if self.long_documents == "drop":
                pieces = pieces[~long]
            shards = [documents for _, documents in self._shards]
            found = PackedRound(pack.cut(pieces, packing.context), packing, key, shards, self.together)
            pieces = found.sequences(packing.done, len(found))
        return found

    def _take(self, key: tuple[int, ...] | None) -> np.ndarray:
        """The documents of a round [n], of all sources, shuffled by `key`."""
        cursors, packing = list(self.position.cursors), self.position.packings[0]
        num_tokens = tokens_per_round(packing, self.shuffled)
        ahead = self.needed is None or self.needed * self.context > num_tokens  # the run needs another round
        longest = packing.context if self.long_documents == "drop" else np.inf
        main, weights = self.main, [source.weight for source in self.sources]
        self._shards: list[Loaded] = []
        found: list[np.ndarray] = []
        for i in sorted(range(len(cursors)), key=lambda i: i != main):  # the main source sets the pace
            need = weights[i] / weights[main] * cursors[main].tokens - cursors[i].tokens
            need = num_tokens * weights[i] / sum(weights) if i == main else need
            shards, pieces, cursors[i] = self.sources[i].take(cursors[i], need, longest, i != main, ahead)
            pieces["shard"] += len(self._shards)
            pieces["source"] = i
            self._shards += shards
            found.append(pieces)
        self._behind = tuple(cursors)
        if key is not None:
            found = [pieces[pack.permutation(len(pieces), key)] for pieces in found]
        # Evenly mixed.
        place = np.concatenate([pieces["length"].cumsum() / max(pieces["length"].sum(), 1) for pieces in found])
        return np.concatenate(found)[place.argsort(kind="stable")]

    def _refusal(self, piece: np.void) -> str:
        shard, documents = self._shards[piece["shard"]]
        # Of text each part is a document. Which record it was is not known here.
        index = int((documents.lengths.cumsum() <= piece["low"]).sum()) if len(shard.parts) > 1 else 0
        return (
            f"{shard.parts[index].file.path} holds a document of {piece['length']} tokens, more than data.context="
            f"{self.context}; with data.long_documents=refuse use a longer data.context, else split or drop"
        )
