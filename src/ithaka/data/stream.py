"""Documents -> this data-parallel rank's tokens, labels and document ids.

All ranks walk one global stream of packed sequences; sequence i of a batch belongs to data-parallel rank
i % dp_size. A position in the stream is therefore good for any number of ranks.

S: tokens in a sequence (data.context).  B: sequences in a batch of this rank.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ithaka.config import ConfigError, DataConfig
from ithaka.data import files
from ithaka.data.sources import Piece, Share, Unit, permutation
from ithaka.data.tokenizer import ByteTokenizer, Tokenizer, check_vocabulary, has_tokenizer, load

__all__ = ["Batch", "ByteTokenizer", "PackedSequence", "SequenceStream", "Tokenizer", "TrainData"]
__all__ += ["check", "collate", "load_tokenizer", "num_valid", "open_data"]

IGNORE = -100


class Batch(NamedTuple):
    """Each int64 [B, S], on the CPU. labels follow Hugging Face: not shifted, -100 where ignored."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    document_ids: torch.Tensor


@dataclass(frozen=True)
class PackedSequence:
    """ids: ints [S], padded after `length`. starts: where documents start in it; 0 is always one."""

    ids: np.ndarray
    starts: np.ndarray
    length: int

    def labels(self) -> np.ndarray:
        """int64 [S]. No document's first token is a target: what is before it belongs to another."""
        labels_S = self.ids.astype(np.int64)
        labels_S[self.starts] = IGNORE
        labels_S[self.length :] = IGNORE
        return labels_S

    def document_ids(self) -> np.ndarray:
        """int64 [S], counting from 0; the padding is a document of its own."""
        change_S = np.zeros(len(self.ids), dtype=np.int64)
        change_S[self.starts] = 1
        change_S[self.length : self.length + 1] = 1
        return np.cumsum(change_S) - 1


def collate(sequences: Sequence[PackedSequence]) -> Batch:
    """B sequences of S tokens -> tensors [B, S]."""
    columns = (
        [sequence.ids.astype(np.int64) for sequence in sequences],
        [sequence.labels() for sequence in sequences],
        [sequence.document_ids() for sequence in sequences],
    )
    return Batch(*(torch.from_numpy(np.stack(column)) for column in columns))


def num_valid(labels: torch.Tensor) -> int:
    """How many targets labels [..., S] give once shifted by one."""
    return int((labels[..., 1:] != IGNORE).sum())


@dataclass
class Position:
    """A place in a stream: `offset` tokens into the piece at `cursor` of the epoch's `unit`-th unit."""

    epoch: int = 0
    sequences: int = 0  # consumed since the start of training, over all ranks
    unit: int = 0
    cursor: int = 0
    offset: int = 0


class SequenceStream:
    """Units -> packed sequences of `context` tokens, epoch after epoch (`repeat`) or once.

    Documents follow one another; one that crosses the end of a sequence continues in the next as a document
    of its own. An epoch's last sequence is padded. Holds one piece and one sequence in memory.
    """

    def __init__(self, units: Sequence[Unit], context: int, *, seed: int | None, pad_id: int = 0, repeat: bool = True):
        """`seed` shuffles units and rows anew each epoch; None keeps the order of the files."""
        self.units, self.context, self.seed, self.pad_id, self.repeat = units, context, seed, pad_id, repeat
        self.seek(Position())

    def seek(self, position: Position) -> None:
        self.position = Position(**asdict(position))
        self._piece: Piece | None = None
        self._pieces = self._read(self.position)

    def next(self, materialize: bool = True) -> PackedSequence | None:
        """The next sequence; None at the end of a stream that does not repeat, or if not `materialize`."""
        parts = self._take()
        if not parts and self.repeat:
            self.seek(Position(epoch=self.position.epoch + 1, sequences=self.position.sequences))
            parts = self._take()
            if not parts:
                raise ConfigError("data.path holds no tokens; give a path with text in it")
        if not parts:
            return None
        self.position.sequences += 1
        return self._pack(parts) if materialize else None

    def _read(self, position: Position) -> Iterator[tuple[int, Piece]]:
        """The epoch's pieces from `position` on, each with its unit's place in the epoch's order."""
        epoch, first, cursor = position.epoch, position.unit, position.cursor
        count = len(self.units)
        order = np.arange(count) if self.seed is None else permutation(count, (self.seed, epoch))
        for place in range(first, count):
            index = int(order[place])
            key = None if self.seed is None else (self.seed, epoch, index)
            for piece in self.units[index].pieces(cursor if place == first else 0, key):
                yield place, piece

    def _load(self) -> bool:
        """Have tokens left in `_piece`; False at the end of the epoch."""
        while self._piece is None or self.position.offset >= len(self._piece.tokens):
            place, piece = next(self._pieces, (0, None))
            if piece is None:
                return False
            # After a seek the first piece is the one `offset` counts in; every other is read from its start.
            if (place, piece.cursor) != (self.position.unit, self.position.cursor):
                self.position.offset = 0
            self.position.unit, self.position.cursor, self._piece = place, piece.cursor, piece
        return True

    def _take(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Views of the next `context` tokens, fewer at an epoch's end, with the starts in the sequence."""
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        filled = 0
        while filled < self.context and self._load():
            assert self._piece is not None
            low = self.position.offset
            high = min(low + self.context - filled, len(self._piece.tokens))
            first, last = np.searchsorted(self._piece.starts, (low, high))
            parts.append((self._piece.tokens[low:high], self._piece.starts[first:last] - low + filled))
            filled += high - low
            self.position.offset = high
        return parts

    def _pack(self, parts: list[tuple[np.ndarray, np.ndarray]]) -> PackedSequence:
        tokens = np.concatenate([tokens for tokens, _ in parts])
        starts = np.concatenate([np.zeros(1, np.int64), *(starts for _, starts in parts)])
        ids_S = np.full(self.context, self.pad_id, dtype=np.int32)
        ids_S[: len(tokens)] = tokens
        return PackedSequence(ids_S, np.unique(starts), len(tokens))


class TrainData:
    """This rank's batches of the global stream, and a fixed set of validation batches."""

    def __init__(self, stream: SequenceStream, validation: SequenceStream | None, *, rank: int, size: int, batch: int):
        self.stream, self.validation = stream, validation
        self.rank, self.size, self.batch = rank, size, batch
        self._held_out: tuple[int, list[PackedSequence]] = (-1, [])

    def next_batch(self) -> Batch:
        """The next [B, S] of this rank; every rank must ask as often as the others."""
        count = self.batch * self.size
        taken = [self.stream.next(materialize=i % self.size == self.rank) for i in range(count)]
        return collate([sequence for sequence in taken if sequence is not None])

    def validation_sequences(self, count: int) -> list[PackedSequence]:
        """The first `count` held-out sequences, fewer if there are no more: the same on every rank."""
        if self.validation is None:
            return []
        if self._held_out[0] != count:
            self.validation.seek(Position())
            found = list(itertools.islice(iter(self.validation.next, None), count))
            self._held_out = (count, found)
        return self._held_out[1]

    def validation_batches(self, count: int) -> Iterator[Batch]:
        """This rank's part of the first `count` held-out sequences, as many batches of [B, S] on every rank.

        What is missing to fill the last batch is rows without a label.
        """
        sequences = self.validation_sequences(count)
        for low in range(0, len(sequences), self.batch * self.size):
            rows = sequences[low : low + self.batch * self.size][self.rank :: self.size]
            yield collate(rows + [self._blank()] * (self.batch - len(rows)))

    def _blank(self) -> PackedSequence:
        ids_S = np.full(self.stream.context, self.stream.pad_id, dtype=np.int32)
        return PackedSequence(ids_S, np.zeros(1, np.int64), 0)

    def state_dict(self) -> dict[str, Any]:
        """The global position, the same on every rank; small and JSON-able."""
        return {"version": 1, "data": self._fingerprint(), **asdict(self.stream.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called, on any number of ranks. The files must be the same."""
        if state["version"] != 1 or state["data"] != self._fingerprint():
            raise ConfigError(
                "data.path, its files, data.text_field, data.validation_fraction, data.tokenizer or train.seed are not "
                "those of the checkpoint; put them back, or export the run and start a new one from its weights"
            )
        self.stream.seek(Position(**{key: int(state[key]) for key in asdict(Position())}))

    def _fingerprint(self) -> str:
        """Of what decides the order and the tokens, but not of where the files lie."""
        digest = hashlib.sha256(repr(self.stream.seed).encode())
        for unit in self.stream.units:
            size = getattr(getattr(unit, "tokenizer", None), "vocab_size", None)
            digest.update(repr((unit.path.name, unit.identity, size)).encode())
        return digest.hexdigest()[:16]


def load_tokenizer(data: DataConfig, model_path: Path | None = None) -> Tokenizer | None:
    """The tokenizer for the data and the samples; None for token arrays and a model that has none."""
    if data.tokenizer is None and model_path is not None and not has_tokenizer(model_path):
        paths = (data.path, data.validation_path) if data.validation_path else (data.path,)
        if all(file.kind == "tokens" for path in paths for file in files.expand(path)):
            return None
    return load(data.tokenizer, model_path)


def open_data(
    data: DataConfig, *, tokenizer: Tokenizer | None, seed: int, dp_rank: int = 0, dp_size: int = 1,
    batch: int = 1, vocab_size: int | None = None, eos_id: int | None = None,
) -> TrainData:  # fmt: skip
    """The training data of one data-parallel rank: `batch` sequences of `data.context` tokens a call.

    vocab_size: the model's, which token arrays are checked against. eos_id: ends the documents in token
    arrays; the tokenizer's where it is not given. Every rank of a cp group passes the same dp_rank.
    """
    reading = _reading(data, tokenizer, vocab_size, eos_id)
    train, held_out = _units(data, reading)
    pad_id = tokenizer.pad_id if tokenizer else 0
    stream = SequenceStream(train, data.context, seed=seed, pad_id=pad_id)
    validation = None
    if held_out is not None:
        validation = SequenceStream(held_out, data.context, seed=None, pad_id=pad_id, repeat=False)
    return TrainData(stream, validation, rank=dp_rank, size=dp_size, batch=batch)


def check(data: DataConfig, vocab_size: int, model_path: Path | None = None) -> Tokenizer | None:
    """Raise ConfigError for data that cannot be trained on, reading little of it; -> the tokenizer.

    For use before any process starts. What it cannot see (a bad line far into a file) raises when it is read.
    """
    found = load_tokenizer(data, model_path)
    if found is not None:
        check_vocabulary(found, vocab_size)
    reading = files.for_probing(_reading(data, found, vocab_size, None))
    train, held_out = _units(data, reading)
    files.probe(train, f"data.path={data.path} holds no text to train on; give a path with more documents")
    if held_out is not None and data.validation_path:
        files.probe(held_out, f"data.validation_path={data.validation_path} holds no text; give another path")
    elif held_out is not None:
        fraction = f"data.validation_fraction={data.validation_fraction}"
        files.probe(held_out, f"{fraction} of data.path={data.path} is no document; raise it, or set it to 0")
    return found


def _reading(
    data: DataConfig, tokenizer: Tokenizer | None, vocab_size: int | None, eos_id: int | None
) -> files.Reading:
    if vocab_size is None:
        assert tokenizer is not None, "token arrays without a tokenizer need the model's vocab_size"
        vocab_size = tokenizer.vocab_size
    if eos_id is None and tokenizer is not None:
        eos_id = tokenizer.eos_id
    return files.Reading(tokenizer, data.text_field, eos_id, vocab_size)


def _units(data: DataConfig, reading: files.Reading) -> tuple[list[Unit], list[Unit] | None]:
    """Units to train on and units held out; None where nothing is."""
    found = files.expand(data.path)
    if data.validation_path is not None:
        return files.make_units(found, reading), files.make_units(files.expand(data.validation_path), reading)
    if not data.validation_fraction:
        return files.make_units(found, reading), None
    train, held_out = (
        files.make_units(found, reading, Share(data.validation_fraction, validation)) for validation in (False, True)
    )
    return train, held_out
