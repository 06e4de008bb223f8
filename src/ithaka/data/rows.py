"""Pieces of tokens from files of rows with a text field, JSONL and Parquet: each row is a document."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet

from ithaka.config import ConfigError
from ithaka.data.sources import Piece, Share, join_documents, permutation
from ithaka.data.tokenizer import Tokenizer

JSONL_UNIT_BYTES = 1 << 21
PARQUET_PIECE_ROWS = 64


@dataclass(frozen=True)
class JsonlUnit:
    """The lines of a JSONL file that start in bytes [start, stop): one piece."""

    path: Path
    start: int
    stop: int
    field: str
    file_index: int
    share: Share | None
    tokenizer: Tokenizer

    @property
    def identity(self) -> tuple[object, ...]:
        return (self.start, self.stop, self.field, self.share)

    def pieces(self, cursor: int, key: tuple[int, ...] | None) -> Iterator[Piece]:
        raw = self._lines()
        if not raw.strip():
            return
        texts = self._texts(raw)
        rows = _chosen_rows(np.arange(len(texts)), self.share, (self.file_index, self.start), key, cursor)
        yield join_documents([texts[i] for i in rows], self.tokenizer, cursor)

    def _lines(self) -> bytes:
        with self.path.open("rb") as file:
            if self.start:
                # The line that crosses our start belongs to the unit before; it may also cross our end.
                file.seek(self.start - 1)
                if not file.readline(self.stop - self.start + 1).endswith(b"\n"):
                    return b""
            raw = file.read(max(self.stop - file.tell(), 0))
            return raw if not raw or raw.endswith(b"\n") else raw + file.readline()

    def _texts(self, raw: bytes) -> list[str]:
        schema = pa.schema([(self.field, pa.string())])
        try:
            table = pa.json.read_json(
                pa.BufferReader(raw),
                read_options=pa.json.ReadOptions(use_threads=False, block_size=len(raw) + 1),
                parse_options=pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
            )
        except pa.ArrowInvalid as error:
            raise self._diagnosis(str(error)) from error
        if table.column(self.field).null_count:
            raise self._diagnosis("null")
        return table.column(self.field).to_pylist()

    def _diagnosis(self, reason: str) -> ConfigError:
        """Arrow says neither line nor fields; find the first bad line of this unit again in Python."""
        position = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                complaint = _complaint(line, self.field) if position >= self.start else None
                if complaint:
                    return ConfigError(f"{self.path} line {number}: {complaint}")
                position += len(line)
        return ConfigError(f"{self.path} cannot be read as JSON lines: {reason}; one JSON object a line")


def _complaint(line: bytes, field: str) -> str | None:
    if not line.strip():
        return None
    try:
        row = json.loads(line)
    except ValueError as error:
        return f"not JSON ({error}); data.path wants one JSON object a line"
    if not isinstance(row, dict):
        return f"a {type(row).__name__}, not a JSON object; data.path wants one object a line"
    if field not in row:
        return f"has no field data.text_field={field}; its fields are {', '.join(map(str, row)) or 'none'}"
    if not isinstance(row[field], str):
        return f"data.text_field={field} is {type(row[field]).__name__}, not a string; name a field of text"
    return None


@dataclass(frozen=True)
class ParquetUnit:
    """One row group of a Parquet file; a piece is a batch of rows, its cursor the batch's index."""

    path: Path
    group: int
    num_rows: int
    field: str
    file_index: int
    share: Share | None
    tokenizer: Tokenizer

    @property
    def identity(self) -> tuple[object, ...]:
        return (self.group, self.num_rows, self.field, self.share)

    def pieces(self, cursor: int, key: tuple[int, ...] | None) -> Iterator[Piece]:
        first_row = 0
        for batch_index, batch in enumerate(self._batches()):
            rows = np.arange(first_row, first_row + batch.num_rows)
            if batch_index >= cursor:
                texts = self._texts(batch.column(0), first_row)
                chosen = _chosen_rows(rows, self.share, (self.file_index, self.group), key, batch_index)
                yield join_documents([texts[i] for i in chosen - first_row], self.tokenizer, batch_index)
            first_row += batch.num_rows

    def _batches(self) -> Iterator[pa.RecordBatch]:
        with pa.parquet.ParquetFile(self.path, pre_buffer=False, buffer_size=1 << 20) as file:
            yield from file.iter_batches(PARQUET_PIECE_ROWS, row_groups=[self.group], columns=[self.field])

    def _texts(self, column: pa.Array, first_row: int) -> list[str]:
        if column.null_count:
            row = first_row + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            where = f"{self.path} row group {self.group} row {row}"
            raise ConfigError(f"{where}: data.text_field={self.field} is null; drop such rows")
        return column.to_pylist()


def _chosen_rows(
    rows: np.ndarray, share: Share | None, place: tuple[int, int], key: tuple[int, ...] | None, cursor: int
) -> np.ndarray:
    """The rows of one piece on this side of the split, in this epoch's order."""
    kept = rows if share is None else rows[share.keeps(rows, *place)]
    return kept if key is None else kept[permutation(len(kept), (*key, cursor))]
