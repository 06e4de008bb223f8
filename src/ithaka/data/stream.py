"""Sequences -> this data-parallel rank's batches, read ahead; and the position to resume from.

All ranks walk one global stream of packed sequences; sequence i of a batch belongs to data-parallel rank
i % dp_size. A position in the stream is therefore good for any number of ranks.

S: tokens in a sequence (data.context).  B: sequences in a batch of this rank.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ithaka.config import ConfigError
from ithaka.data import pack
from ithaka.data.cache import TokenCache
from ithaka.data.pack import IGNORED, PackedSequence, Window
from ithaka.data.read import Shard

FORMAT = 3  # of a saved position; earlier ones had another order of the data
WINDOWS_AHEAD = 2


class Batch(NamedTuple):
    """Each int64 [B, S], on the CPU. labels follow Hugging Face: not shifted, -100 where ignored."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    document_ids: torch.Tensor
    source_ids: torch.Tensor | None = None  # of each token, an index of TrainData.source_names; None: there is one

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """What the model takes."""
        return {"input_ids": self.input_ids, "labels": self.labels, "document_ids": self.document_ids}


def collate(sequences: Sequence[PackedSequence]) -> Batch:
    """B sequences of S tokens -> tensors [B, S]."""
    columns = zip(*((s.ids, s.labels(), s.document_ids()) for s in sequences), strict=True)
    return Batch(*(torch.from_numpy(np.stack(column)) for column in columns))


def num_valid(labels: torch.Tensor) -> int:
    """How many targets labels [..., S] give once shifted by one."""
    return int((labels[..., 1:] != IGNORED).sum())


@dataclass(frozen=True)
class Position:
    """A place in a stream: `offset` tokens into a window of an epoch."""

    epoch: int = 0
    sequences: int = 0  # consumed since the start of training, over all ranks
    window: int = 0
    offset: int = 0


class SequenceStream:
    """Shards -> packed sequences of `context` tokens."""

    def __init__(self, shards: Sequence[Shard], cache: TokenCache, context: int, *, seed: int | None, pad_id: int = 0):
        """`seed` shuffles, anew for each of endless epochs; None: one epoch, in the order of the files."""
        self.shards, self.cache, self.context = shards, cache, context
        self.seed, self.pad_id = seed, pad_id
        self.seek(Position())

    def seek(self, position: Position) -> None:
        self.position = position
        self._window: Window | None = None
        key = None if self.seed is None else (self.seed, position.epoch)
        sizes = [shard.num_bytes for shard in self.shards]
        self.windows = pack.deal(sizes, key, 0 if key is None else pack.WINDOW_BYTES)

    def next(self, materialize: bool = True) -> PackedSequence | None:
        """The next sequence; None at the end of a stream without a seed, or if not `materialize`."""
        parts = self._take()
        if not parts and self.seed is not None:
            self.seek(Position(self.position.epoch + 1, self.position.sequences))
            parts = self._take()
            if not parts:
                raise ConfigError("data.path holds no tokens; give a path with text in it")
        if not parts:
            return None
        self.position = dataclasses.replace(self.position, sequences=self.position.sequences + 1)
        return pack.pack(parts, self.context, self.pad_id) if materialize else None

    def _take(self) -> list[np.ndarray]:
        """The documents of the next `context` tokens, fewer at an epoch's end."""
        parts: list[np.ndarray] = []
        room = self.context
        while room and (window := self._load()):
            low = self.position.offset
            high = min(low + room, window.num_tokens)
            parts += window.take(low, high)
            room -= high - low
            self.position = dataclasses.replace(self.position, offset=high)
        return parts

    def _load(self) -> Window | None:
        """A window with tokens left; None at the end of the epoch."""
        while self.position.window < len(self.windows):
            if self._window is None:
                at = self.position.window
                shards, *ahead = ([self.shards[i] for i in each] for each in self.windows[at : at + 1 + WINDOWS_AHEAD])
                key = None if self.seed is None else (self.seed, self.position.epoch, at)
                self._window = Window(self.cache.load_all(shards), key)
                if self.seed is not None:
                    self.cache.prepare(itertools.chain(*ahead))
            if self.position.offset < self._window.num_tokens:
                return self._window
            self.position = dataclasses.replace(self.position, window=self.position.window + 1, offset=0)
            self._window = None
        return None


class TrainData:
    """This rank's batches of the global stream, and a fixed set of validation batches."""

    def __init__(
        self, stream: SequenceStream, validation: SequenceStream | None, about: dict[str, str], *,
        rank: int, size: int, batch: int,
    ):  # fmt: skip
        """`about`: what is known of the data before it is read, in words."""
        self.stream, self.validation, self.about = stream, validation, about
        self.rank, self.size, self.batch = rank, size, batch
        self.source_names: list[str] = ["data.path"]
        self.position = stream.position  # after the last batch that was given out; the stream may be ahead
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="read ahead")
        self._next: Future[tuple[Batch, Position]] | None = None
        self._held_out: tuple[int, list[PackedSequence]] = (-1, [])

    def next_batch(self) -> Batch:
        """The next [B, S] of this rank; every rank must ask as often as the others. One more is read ahead."""
        batch, self.position = (self._next or self._ahead.submit(self._read)).result()
        self._next = self._ahead.submit(self._read)
        return batch

    def _read(self) -> tuple[Batch, Position]:
        taken = [self.stream.next(materialize=i % self.size == self.rank) for i in range(self.batch * self.size)]
        return collate([sequence for sequence in taken if sequence is not None]), self.stream.position

    def validation_sequences(self, count: int) -> list[PackedSequence]:
        """The first `count` held-out sequences, fewer if there are no more: the same on every rank."""
        if self.validation is None:
            return []
        if self._held_out[0] != count:
            self.validation.seek(Position())
            self._held_out = (count, list(itertools.islice(iter(self.validation.next, None), count)))
        return self._held_out[1]

    def validation_batches(self, count: int) -> Iterator[Batch]:
        """This rank's part of the first `count` held-out sequences, as many batches of [B, S] on every rank.

        Rows without labels fill up the last batch.
        """
        sequences = self.validation_sequences(count)
        blank = pack.pack([], self.stream.context, self.stream.pad_id)
        for low in range(0, len(sequences), self.batch * self.size):
            rows = sequences[low : low + self.batch * self.size][self.rank :: self.size]
            yield collate(rows + [blank] * (self.batch - len(rows)))

    def state_dict(self) -> dict[str, Any]:
        """The global position, the same on every rank; small and JSON-able."""
        return {"version": FORMAT, "data": self._fingerprint(), **asdict(self.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called, on any number of ranks. The files must be the same."""
        if state["version"] != FORMAT:
            raise ConfigError(
                f"the checkpoint's place in the data has format {state['version']}, not {FORMAT}: the order of the "
                "data has changed; go on with the version that wrote it, or export the run and start a new one "
                "from its weights"
            )
        if state["data"] != self._fingerprint():
            raise ConfigError(
                "data.path, its files, data.text_field, data.validation_fraction, data.tokenizer or train.seed are not "
                "those of the checkpoint; put them back, or export the run and start a new one from its weights"
            )
        assert self._next is None, "nothing was read yet"
        self.position = Position(**{key: int(state[key]) for key in asdict(Position())})
        self.stream.seek(self.position)

    def close(self, remove: bool = False) -> None:
        """Stop reading. `remove`: the run is done, so remove its tokens too."""
        self.stream.cache.closed = True  # what is read ahead ends at its next shard
        self._ahead.shutdown(cancel_futures=True)
        self.stream.cache.close(remove)

    def _fingerprint(self) -> str:
        """Of what decides the order and the tokens, but not of where the files lie."""
        shards = [shard.identity for shard in self.stream.shards]
        decides = (self.stream.seed, self.stream.cache.tokenizer.fingerprint, shards)
        return hashlib.sha256(repr(decides).encode()).hexdigest()[:16]
