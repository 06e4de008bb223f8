"""Sequences -> this data-parallel rank's batches, read ahead.

All ranks walk one global stream of packed sequences; sequence i of a batch belongs to data-parallel rank
i % dp_size. A position in the stream is therefore good for any number of ranks, and what a step trains on depends on
the number of its sequences only.

S: tokens in a sequence (data.context).  B: sequences in a batch of this rank.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch

from ithaka.config import ConfigError
from ithaka.data import pack
from ithaka.data.mix import Cursor, Position, SequenceStream
from ithaka.data.pack import IGNORE_INDEX, PIECE, PackedSequence, Packing

STATE_FORMAT = 5  # version of a saved position
READABLE = (4, 5)  # 4 counted sequences without a label too; earlier ones had another order of the data


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


def collate(sequences: Sequence[PackedSequence], with_sources: bool = False) -> Batch:
    """B sequences of S tokens -> tensors [B, S]."""
    columns: list[list[np.ndarray]] = [[s.ids for s in sequences], [s.labels() for s in sequences]]
    columns += [[s.document_ids() for s in sequences]]
    columns += [[s.source_ids() for s in sequences]] if with_sources else []
    return Batch(*(torch.from_numpy(np.stack(column)) for column in columns))


def num_valid(labels: torch.Tensor) -> int:
    """How many targets labels [..., S] give once shifted by one."""
    return int((labels[..., 1:] != IGNORE_INDEX).sum())


class TrainData:
    """This rank's batches of the global stream, and a fixed set of validation batches."""

    def __init__(
        self, stream: SequenceStream, validation: SequenceStream | None, about: dict[str, str], *,
        rank: int, size: int, batch: int,
    ):  # fmt: skip
        """`about`: what is known of the data before it is read, in words."""
        self.stream, self.validation, self.about = stream, validation, about
        self.rank, self.size, self.batch = rank, size, batch
        self.source_names, self.cache = [source.name for source in stream.sources], stream.sources[0].cache
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
        rows = [sequence for sequence in taken if sequence is not None]
        return collate(rows, len(self.source_names) > 1), self.stream.position

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
        with_sources = self.validation is not None and len(self.validation.sources) > 1
        blank = pack.pack([], np.empty(0, PIECE), self.stream.context, self.stream.pad_id)
        for low in range(0, len(sequences), self.batch * self.size):
            rows = sequences[low : low + self.batch * self.size][self.rank :: self.size]
            yield collate(rows + [blank] * (self.batch - len(rows)), with_sources)

    def state_dict(self) -> dict[str, Any]:
        """The global position, the same on every rank; small and JSON-able."""
        return {"version": STATE_FORMAT, "data": self.fingerprint(), **asdict(self.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called, on any number of ranks. The files must be the same.

        A round that format 4 began keeps its order to its end, with the sequences that have no label.
        """
        if state["version"] not in READABLE:
            raise ConfigError(
                f"the checkpoint's position in the data has format {state['version']}, and this ithaka reads "
                f"{READABLE[0]} to {STATE_FORMAT}: the data order changed; resume with the ithaka that wrote it, "
                "or export the run and start a new one from its weights"
            )
        if state["data"] != self.fingerprint():
            raise ConfigError(
                "data.path, its files, data.sources, data.text_field, data.long_documents, data.validation_fraction, "
                "data.tokenizer or train.seed are not those of the checkpoint; put them back, or export the run and "
                "start a new one from its weights"
            )
        assert self._next is None, "nothing was read yet"
        cursors = tuple(Cursor(**c) for c in state["cursors"])
        packings = tuple(Packing(**{"labelled": False, **p}) for p in state["packings"])
        self.position = Position(state["sequences"], cursors, packings)
        self.stream.seek(self.position)

    def close(self, remove: bool = False) -> None:
        """Stop reading. `remove`: the run is done, so remove its tokens too."""
        self.cache.closed = True  # what is read ahead ends at its next shard
        self._ahead.shutdown(cancel_futures=True)
        self.cache.close(remove)

    def fingerprint(self) -> str:
        """Of what decides the order and the tokens, but not of where the files lie."""
        sources = [(source.weight, [shard.identity for shard in source.shards]) for source in self.stream.sources]
        decides = (self.stream.sources[0].key, self.cache.tokenizer.fingerprint, self.stream.long_documents, sources)
        return hashlib.sha256(repr(decides).encode()).hexdigest()[:16]
