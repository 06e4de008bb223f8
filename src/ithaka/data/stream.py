"""Give each data-parallel rank its batches, prefetched.

All ranks walk the same global stream of packed sequences; sequence i of a batch belongs to data-parallel rank
i % dp_size. So a position is valid for any number of ranks, and what a step trains on depends only on its number of
sequences.

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
from ithaka.data.mix import SequenceStream, SourcePosition, StreamPosition
from ithaka.data.pack import SEGMENT_DTYPE, PackedSequence, Packing
from ithaka.layer.loss import IGNORE_INDEX

STATE_FORMAT = 5


class Batch(NamedTuple):
    """Tensors int64 [B, S] on the CPU. labels are not shifted, and -100 where ignored, as in Hugging Face."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    document_ids: torch.Tensor
    source_ids: torch.Tensor | None = None  # indices into TrainData.source_names; None if there is one source

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """Keyword arguments of the model."""
        return {"input_ids": self.input_ids, "labels": self.labels, "document_ids": self.document_ids}


def collate(sequences: Sequence[PackedSequence], with_sources: bool = False) -> Batch:
    """Stack B sequences of S tokens into tensors [B, S]."""
    columns: list[list[np.ndarray]] = [[s.ids for s in sequences], [s.labels() for s in sequences]]
    columns += [[s.document_ids() for s in sequences]]
    columns += [[s.source_ids() for s in sequences]] if with_sources else []
    return Batch(*(torch.from_numpy(np.stack(column)) for column in columns))


def num_valid(labels: torch.Tensor) -> int:
    """Count the targets in labels [..., S], once shifted by one."""
    return int((labels[..., 1:] != IGNORE_INDEX).sum())


class TrainData:
    """This rank's batches of the global stream, and a fixed set of validation batches."""

    def __init__(
        self, stream: SequenceStream, validation: SequenceStream | None, facts: dict[str, str], *,
        dp_rank: int, dp_size: int, batch: int,
    ):  # fmt: skip
        """`facts` describe the data by topic, as far as known without reading it."""
        self.stream, self.validation, self.facts = stream, validation, facts
        self.dp_rank, self.dp_size, self.batch = dp_rank, dp_size, batch
        self.source_names, self.cache = [source.name for source in stream.sources], stream.sources[0].cache
        self.position = stream.position  # after the last returned batch; the stream is ahead of it
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="prefetch batch")
        self._prefetched: Future[tuple[Batch, StreamPosition]] | None = None
        self._held_out: tuple[int, list[PackedSequence]] = (-1, [])

    def next_batch(self) -> Batch:
        """Return this rank's next batch [B, S], and prefetch another. All ranks must call it equally often."""
        batch, self.position = (self._prefetched or self._executor.submit(self._read)).result()
        self._prefetched = self._executor.submit(self._read)
        return batch

    def _read(self) -> tuple[Batch, StreamPosition]:
        is_mine = [i % self.dp_size == self.dp_rank for i in range(self.batch * self.dp_size)]
        rows = [self.stream.next_sequence(materialize=mine) for mine in is_mine]
        return collate([row for row in rows if row is not None], len(self.source_names) > 1), self.stream.position

    def validation_sequences(self, count: int) -> list[PackedSequence]:
        """Return the first `count` held-out sequences, or all if there are fewer; the same on every rank."""
        if self.validation is None:
            return []
        if self._held_out[0] != count:
            self.validation.seek(StreamPosition())
            self._held_out = (count, list(itertools.islice(iter(self.validation.next_sequence, None), count)))
        return self._held_out[1]

    def validation_batches(self, count: int) -> Iterator[Batch]:
        """Yield this rank's share of the first `count` held-out sequences, equally many batches [B, S] on every rank.

        Rows without labels fill up the last batch.
        """
        sequences = self.validation_sequences(count)
        with_sources = self.validation is not None and len(self.validation.sources) > 1
        blank = pack.build_sequence([], np.empty(0, SEGMENT_DTYPE), self.stream.context, self.stream.pad_id)
        for low in range(0, len(sequences), self.batch * self.dp_size):
            rows = sequences[low : low + self.batch * self.dp_size][self.dp_rank :: self.dp_size]
            yield collate(rows + [blank] * (self.batch - len(rows)), with_sources)

    def state_dict(self) -> dict[str, Any]:
        """Return the global position as JSON-compatible values; the same on every rank."""
        return {
            "version": STATE_FORMAT,
            "data": self.fingerprint(),
            "sequences": self.position.sequences,
            "cursors": [asdict(source) for source in self.position.sources],
            "packings": [_packing_state(packing) for packing in self.position.packings],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict`, on any number of ranks. The data must be the same."""
        if state["version"] != STATE_FORMAT:
            raise ConfigError(
                f"the checkpoint's data position has format {state['version']}, and this ithaka reads {STATE_FORMAT}; "
                "resume with the ithaka that wrote it, or export the run and start a new one from its weights"
            )
        if state["data"] != self.fingerprint():
            raise ConfigError(
                "data.path, its files, data.sources, data.text_field, data.long_documents, data.validation_fraction, "
                "data.tokenizer or train.seed differ from the checkpoint's; restore them, or export the run and start "
                "a new one from its weights"
            )
        assert self._prefetched is None, "load the state before the first batch"
        sources = tuple(SourcePosition(**source) for source in state["cursors"])
        self.position = StreamPosition(state["sequences"], sources, tuple(map(_load_packing, state["packings"])))
        self.stream.seek(self.position)

    def close(self, remove: bool = False) -> None:
        """Stop reading. `remove`: also remove the token cache, because the run is done."""
        self.cache.closed = True  # prefetching stops at its next shard
        self._executor.shutdown(cancel_futures=True)
        self.cache.close(remove)

    def fingerprint(self) -> str:
        """Hash of everything that determines the tokens and their order; moving the files does not change it."""
        sources = [(source.weight, [shard.identity for shard in source.shards]) for source in self.stream.sources]
        key, tokenizer = self.stream.sources[0].key, self.cache.tokenizer.fingerprint
        return hashlib.sha256(repr((key, tokenizer, self.stream.long_documents, sources)).encode()).hexdigest()[:16]


def _packing_state(packing: Packing) -> dict[str, Any]:
    counts = {"lead": packing.num_leading, "done": packing.done, "most": packing.max_sequences}
    # labelled: sequences without a label are not counted, in all states of this format.
    return {"context": packing.context, "group": packing.group, "labelled": True, **counts}


def _load_packing(state: dict[str, Any]) -> Packing:
    return Packing(state["context"], state["group"], state["lead"], state["done"], state["most"])
