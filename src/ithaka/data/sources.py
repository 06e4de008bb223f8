"""Pieces of tokens with document starts, from text files and from token arrays.

A unit is what an epoch shuffles: a text file, ~2 MiB of JSONL lines, a Parquet row group, a token array. A
unit gives pieces, each small enough to hold in memory and each found again from an int, its cursor: that
is what makes a position in the data cheap to come back to.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ithaka.config import ConfigError
from ithaka.data.tokenizer import Tokenizer

TEXT_PIECE_BYTES = 1 << 20
PIECE_TOKENS = 1 << 20


@dataclass(frozen=True)
class Piece:
    """tokens: ints [n]. starts: ascending positions in tokens where a document starts."""

    cursor: int
    tokens: np.ndarray
    starts: np.ndarray


class Unit(Protocol):
    @property
    def path(self) -> Path: ...

    @property
    def identity(self) -> tuple[object, ...]:
        """With the file's name, what tells this unit from any other: sizes and ranges, and what is read there."""
        ...

    def pieces(self, cursor: int, key: tuple[int, ...] | None) -> Iterator[Piece]:
        """The pieces from the one at `cursor` (0 = the first) on. `key` shuffles rows; None keeps order."""
        ...


@dataclass(frozen=True)
class Share:
    """One side of a split: the validation documents, a `fraction` of all, or the others."""

    fraction: float
    validation: bool

    def keeps(self, rows: np.ndarray, file_index: int, start: int) -> np.ndarray:
        """Which rows are on this side, by a hash of where they are: the same on every rank and every epoch.

        The very first row is always held out, so that a small file has something to validate on.
        """
        held_out = scramble(rows, file_index, start) < np.uint64(int(self.fraction * 2**53) << 11)
        held_out |= (rows == 0) & (file_index == 0) & (start == 0)
        return held_out if self.validation else ~held_out


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


def join_documents(texts: Sequence[str], tokenizer: Tokenizer, cursor: int) -> Piece:
    """Whole documents, one after the other: prefix, text, eos. Empty texts are no documents."""
    prefix = np.asarray(tokenizer.document_prefix, dtype=np.int32)
    suffix = np.asarray([tokenizer.eos_id] if tokenizer.eos_id is not None else [], dtype=np.int32)
    encoded = [ids for ids in tokenizer.encode_batch(texts) if len(ids)]
    if not encoded:
        return Piece(cursor, np.empty(0, np.int32), np.empty(0, np.int64))
    lengths = np.asarray([len(ids) + len(prefix) + len(suffix) for ids in encoded])
    tokens = np.concatenate([part for ids in encoded for part in (prefix, ids, suffix)])
    return Piece(cursor, tokens, np.cumsum(lengths) - lengths)


@dataclass(frozen=True)
class TextUnit:
    """Bytes [start, stop) of a UTF-8 file: one document.

    A file of more than one piece is tokenised piece by piece, cut after a newline where there is one.
    `named` files must decode; others, found in a directory, are left out when they do not.
    """

    path: Path
    start: int
    stop: int
    named: bool
    tokenizer: Tokenizer

    @property
    def identity(self) -> tuple[object, ...]:
        return (self.start, self.stop)

    def pieces(self, cursor: int, key: tuple[int, ...] | None) -> Iterator[Piece]:
        if not self.named and not self._decodes():
            return
        for offset, text, last in self._texts(cursor):
            first = offset == 0
            ids = [self.tokenizer.document_prefix if first else (), self.tokenizer.encode(text)]
            ids.append((self.tokenizer.eos_id,) if last and self.tokenizer.eos_id is not None else ())
            tokens = np.concatenate([np.asarray(part, dtype=np.int32) for part in ids])
            yield Piece(offset, tokens, np.zeros(int(first), np.int64))

    def _texts(self, offset: int) -> Iterator[tuple[int, str, bool]]:
        size = self.stop - self.start
        with self.path.open("rb") as file:
            while offset < size:
                file.seek(self.start + offset)
                raw = file.read(min(TEXT_PIECE_BYTES, size - offset))
                if not raw:
                    raise ConfigError(f"data file {self.path} became shorter while it was read; start again")
                last = offset + len(raw) == size
                raw = raw if last else raw[: cut(raw)]
                yield offset, self._decode(raw, offset), last
                offset += len(raw)

    def _decode(self, raw: bytes, offset: int) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            position = self.start + offset + error.start
            raise ConfigError(f"data file {self.path} is not UTF-8 text at byte {position}; convert it") from error

    def _decodes(self) -> bool:
        try:
            return all(True for _ in self._texts(0))
        except ConfigError:
            return False


def cut(raw: bytes) -> int:
    """How many bytes of a full read to keep: up to the last newline, else whole characters only."""
    end = raw.rfind(b"\n") + 1
    if end:
        return end
    end = len(raw) - 1
    while end > len(raw) - 4 and raw[end] & 0xC0 == 0x80:
        end -= 1
    return end


@dataclass(frozen=True)
class TokenUnit:
    """Tokens [start, stop) of an array on disk, in order; a document starts at `start` and after each eos."""

    path: Path
    start: int
    stop: int
    eos_id: int | None
    vocab_size: int

    @property
    def identity(self) -> tuple[object, ...]:
        return (self.start, self.stop)

    def pieces(self, cursor: int, key: tuple[int, ...] | None) -> Iterator[Piece]:
        array = open_tokens(self.path, self.vocab_size)
        for low in range(self.start + cursor, self.stop, PIECE_TOKENS):
            tokens = np.asarray(array[low : min(low + PIECE_TOKENS, self.stop)])
            self._check_range(tokens, low)
            after_eos = tokens == self.eos_id if self.eos_id is not None else np.zeros(len(tokens), bool)
            first = low == self.start or (self.eos_id is not None and int(array[low - 1]) == self.eos_id)
            is_start = np.concatenate([[first], after_eos[:-1]])
            yield Piece(low - self.start, tokens, np.flatnonzero(is_start))

    def _check_range(self, tokens: np.ndarray, low: int) -> None:
        if len(tokens) and (int(tokens.max()) >= self.vocab_size or int(tokens.min()) < 0):
            at = int(np.flatnonzero((tokens >= self.vocab_size) | (tokens < 0))[0])
            raise ConfigError(
                f"{self.path}: token {int(tokens[at])} at position {low + at} is outside the model's "
                f"vocab_size={self.vocab_size}; tokenise with the model's tokenizer"
            )


def open_tokens(path: Path, vocab_size: int) -> np.ndarray:
    """A read-only memory map, 1-D ints. `.npy` says its own type; `.bin` is headerless little-endian
    uint16, or uint32 where the vocabulary does not fit 16 bits."""
    if path.suffix == ".bin":
        dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        if path.stat().st_size % dtype.itemsize:
            raise ConfigError(f"{path} is not a whole number of {dtype.name} tokens; save it as .npy")
        return np.memmap(path, dtype=dtype, mode="r")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ConfigError(f"{path} cannot be read as a NumPy array ({error}); write it with numpy.save") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        shape = "x".join(map(str, array.shape))
        raise ConfigError(f"{path} holds {array.dtype} [{shape}]; token arrays are 1-D integers")
    return array
