"""Files -> shards of documents: text, or records with a field of text.

A shard is what is read and tokenised at once: some small text files or a part of a large one, the JSONL lines that
start in some 2 MiB, a JSON file, a Parquet row group, rows of an Arrow table.
"""

import codecs
import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from ithaka.config import ConfigError, ReadingConfig
from ithaka.data import pack
from ithaka.data.conversation import BadRecord, Document, check_train_on, document, fields_of
from ithaka.data.files import File, open_dataset
from ithaka.data.pack import Split
from ithaka.data.tokenizer import Tokenizer
from ithaka.exits import TransientError

SHARD_BYTES = 1 << 21
TEXT_PIECE_BYTES = 1 << 20
PART_BYTES = 1 << 26
BATCH_RECORDS = 64


class Part(NamedTuple):
    """[start, stop) of a file: bytes of text and JSONL, records of JSON and Arrow, row groups."""

    file: File
    start: int
    stop: int
    ends: bool = True  # False where a large text goes on


@dataclass(frozen=True)
class Shard:
    parts: tuple[Part, ...]  # several of text, one of records
    num_bytes: int
    reading: ReadingConfig
    # Of records:
    columns: tuple[str, ...] = ()  # that are read of Parquet and Arrow
    split: Split | None = None
    file_index: int = 0

    @property
    def identity(self) -> tuple[object, ...]:
        """What tells this shard from any other, wherever its files lie."""
        parts = ((part.file.path.name, *part[1:], part.file.split) for part in self.parts)
        settings = {name: value for name, value in vars(self.reading).items() if value != getattr(ReadingConfig, name)}
        field = None if self.parts[0].file.kind == "text" else self.reading.text_field
        return (*parts, self.num_bytes, field, self.split, *sorted(settings.items() - {("text_field", field)}))

    @property
    def paths(self) -> list[Path]:
        """The files on disk."""
        if self.parts[0].file.kind == "arrow":
            return [Path(each["filename"]) for each in _table(self.parts[0].file).cache_files]
        return [part.file.path for part in self.parts]

    def documents(self, tokenizer: Tokenizer) -> Iterator[Document]:
        """Its documents on this side of the split; ConfigError names the record that is not understood."""
        part = self.parts[0]
        if part.file.kind == "text":
            yield from itertools.chain(*map(_pieces, self.parts))
            return
        first = 0
        for records in READERS[part.file.kind](part, self.columns):
            rows = np.arange(first, first + len(records))
            kept = rows if self.split is None else rows[self.split.keeps(rows, self.file_index, part.start)]
            for row in kept.tolist():
                try:
                    record = _parsed(records[row - first])
                    yield document(record, self.reading, tokenizer.chat, tokenizer.vocab_size)
                except BadRecord as error:
                    if self.reading.bad_records == "refuse":
                        rest = [records[each - first] for each in kept.tolist() if each > row]
                        alike = self._count_alike(rest, tokenizer, error.reason)
                        count = f" ({1 + alike:,} of the {len(kept):,} records read here are {error.reason})" * (
                            alike > 0
                        )
                        raise ConfigError(f"{_place(part, row)}: {error}{count}") from error
                    yield Document(skipped=error.reason)
            first += len(records)

    def _count_alike(self, records: Sequence[Any], tokenizer: Tokenizer, reason: str) -> int:
        """How many records are bad for this reason."""
        count = 0
        for record in records:
            try:
                document(_parsed(record), self.reading, tokenizer.chat, tokenizer.vocab_size)
            except BadRecord as error:
                count += error.reason == reason
        return count


def make_shards(files: Sequence[File], reading: ReadingConfig, split: Split | None = None) -> list[Shard]:
    """The shards of one side of the split (None: of everything), in the order of the files.

    A record is held out by a hash of its place, the very first one always; of several text files whole ones are, by a
    hash of theirs; of a single text file, its end. Checks the columns of Parquet and Arrow.
    """
    reading = ReadingConfig(**{each.name: getattr(reading, each.name) for each in dataclasses.fields(ReadingConfig)})
    texts = [file for file in files if file.kind == "text"]
    if texts:
        check_train_on(reading, "text", ["all"])
        if reading.format not in ("auto", "text"):
            raise ConfigError(f"{texts[0].path} is text, not records of data.format={reading.format}; give JSONL")
    shards = _text_shards(texts, reading, split)
    for index, file in enumerate(files):
        for start, stop, num_bytes, columns in _record_ranges(file, reading) if file.kind != "text" else ():
            shards.append(Shard((Part(file, start, stop),), num_bytes, reading, tuple(columns), split, index))
    return shards


# Text


def _text_shards(files: Sequence[File], reading: ReadingConfig, split: Split | None) -> list[Shard]:
    """A text of more than PART_BYTES is cut, and its parts are shuffled like documents."""
    ranges = [(file, 0, file.path.stat().st_size) for file in files]
    if split is not None and len(files) == 1:
        file, _, size = ranges[0]
        middle = _cut_before(file.path, 0, size - max(1, round(size * split.fraction)))
        ranges = [(file, middle, size) if split.held_out else (file, 0, middle)]
    elif split is not None:
        # At least one file on each side, however few there are.
        num_held_out = max(1, min(round(split.fraction * len(files)), len(files) - 1))
        held_out = set(pack.permutation(len(files), (0,))[:num_held_out].tolist())
        ranges = [each for i, each in enumerate(ranges) if (i in held_out) == split.held_out]
    groups: list[list[Part]] = []
    room = 0
    for file, start, stop in (each for each in ranges if each[2] > each[1]):
        for low, high in pairwise(_edges(file.path, start, stop, PART_BYTES)):
            if high - low > room:
                groups.append([])
                room = SHARD_BYTES
            groups[-1].append(Part(file, low, high, ends=high == stop))
            room -= high - low
    return [Shard(tuple(group), sum(part.stop - part.start for part in group), reading) for group in groups]


def _pieces(part: Part) -> Iterator[Document]:
    for low, high in pairwise(_edges(part.file.path, part.start, part.stop, TEXT_PIECE_BYTES)):
        try:
            text = _bytes(part.file.path, low, high).decode()
        except UnicodeDecodeError as error:
            where = f"data file {part.file.path} is not UTF-8 text at byte {low + error.start}"
            raise ConfigError(f"{where}; convert it, or leave it out") from error
        yield Document(text, framed=True, first=low == part.start, last=part.ends and high == part.stop)


def _edges(path: Path, start: int, stop: int, step: int) -> list[int]:
    """[start, stop) in pieces of at most `step` bytes, at least 4: where they start, and `stop`."""
    edges = [start]
    while stop - edges[-1] > step:
        edges.append(_cut_before(path, edges[-1], edges[-1] + step))
    return [*edges, stop]


def _cut_before(path: Path, low: int, high: int) -> int:
    """Where to cut [low, high): after the last newline, if one is near, else between characters."""
    raw = _bytes(path, max(low, high - TEXT_PIECE_BYTES), high)
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    decoder.decode(raw)
    half_a_character = len(decoder.getstate()[0])
    return high - len(raw) + (raw.rfind(b"\n") + 1 or len(raw) - half_a_character)


def _bytes(path: Path, low: int, high: int) -> bytes:
    with path.open("rb") as file:
        file.seek(low)
        raw = file.read(high - low)
    if len(raw) < high - low:
        raise TransientError(f"data file {path} became shorter while it was read; start again")
    return raw


# Records


def _parsed(record: Any) -> Any:
    if isinstance(record, bytes):
        if 0 in record:  # json would guess UTF-16 or UTF-32
            raise BadRecord("with NUL bytes", f"NUL at its byte {record.index(0)}; write UTF-8, and drop NUL bytes")
        try:
            return json.loads(record)
        except ValueError as error:
            raise BadRecord("not JSON", f"not JSON ({error}); data.path wants one JSON object a line") from error
    return record


def _nulls_dropped(record: dict[str, Any]) -> dict[str, Any]:
    """Nulls inside of a value stand for fields that the record does not have: Arrow gives all records the same."""
    return {name: _without_nulls(value) for name, value in record.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) and value and isinstance(value[0], dict) else value


def _place(part: Part, row: int) -> str:
    """Where the `row`-th record of a part is."""
    where = f"record {part.start + row + 1}"
    if part.file.kind == "parquet":
        where = f"row group {part.start} row {row}"
    elif part.file.kind == "jsonl":
        where = f"line {_line_number(part.file.path, part.start, row)}"
    return f"{part.file.path} {where}"


def _line_number(path: Path, start: int, row: int) -> int:
    """The line of the `row`-th record from byte `start` on."""
    with path.open("rb") as file:
        ours = (n for n, line in enumerate(file, 1) if file.tell() - len(line) >= start and line.strip())
        return next(itertools.islice(ours, row, None))


def _jsonl(part: Part, columns: Sequence[str]) -> Iterator[list[bytes]]:
    lines = []
    with part.file.path.open("rb") as file:
        if part.start:
            # The line that crosses our start belongs to the shard before; it may also cross our end.
            file.seek(part.start - 1)
            if not file.readline(part.stop - part.start + 1).endswith(b"\n"):
                return
        while file.tell() < part.stop:
            lines.append(file.readline())
    yield [line for line in lines if line.strip()]


def _json(part: Part, columns: Sequence[str]) -> Iterator[list[Any]]:
    try:
        yield json.loads(part.file.path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ConfigError(f"{part.file.path} is not JSON ({error}); repair it, or write it as JSONL") from error


def _parquet(part: Part, columns: Sequence[str]) -> Iterator[list[Any]]:
    with pa.parquet.ParquetFile(part.file.path, pre_buffer=False, buffer_size=1 << 20) as file:
        for batch in file.iter_batches(BATCH_RECORDS, row_groups=[part.start], columns=columns):
            yield [_nulls_dropped(row) for row in batch.to_pylist()]


def _arrow(part: Part, columns: Sequence[str]) -> Iterator[list[Any]]:
    table = _table(part.file).select_columns(columns)
    for low in range(part.start, part.stop, BATCH_RECORDS):
        yield [_nulls_dropped(row) for row in table.select(range(low, min(low + BATCH_RECORDS, part.stop))).to_list()]


READERS = {"jsonl": _jsonl, "json": _json, "parquet": _parquet, "arrow": _arrow}


def _table(file: File) -> Any:
    return open_dataset(str(file.path))[file.split or "train"]


def _record_ranges(file: File, reading: ReadingConfig) -> list[tuple[int, int, int, Sequence[str]]]:
    """(start, stop, bytes, columns to read) of each shard."""
    if file.kind == "parquet":
        try:
            with pa.parquet.ParquetFile(file.path) as parquet:
                names, groups = parquet.schema_arrow.names, range(parquet.metadata.num_row_groups)
                ranges = [(group, group + 1, parquet.metadata.row_group(group).total_byte_size) for group in groups]
        except pa.ArrowInvalid as error:
            raise ConfigError(f"{file.path} cannot be read as Parquet ({error}); write it again") from error
    elif file.kind == "arrow":
        table = _table(file)
        names, row_bytes = table.column_names, table.data.nbytes // max(len(table), 1) + 1
        edges = [*range(0, len(table), max(1, SHARD_BYTES // row_bytes)), len(table)]
        ranges = [(low, high, row_bytes * (high - low)) for low, high in pairwise(edges)]
    else:
        size = file.path.stat().st_size
        if file.kind == "json":
            return [(0, 1, size, ())]
        with file.path.open("rb") as lines:
            first = next(filter(bytes.strip, lines), b"")
        try:
            if first and reading.bad_records == "refuse":
                fields_of(_parsed(first), reading)
        except BadRecord as error:
            raise ConfigError(f"{_place(Part(file, 0, size), 0)}: {error}") from error
        return [(low, high, high - low, ()) for low, high in pairwise([*range(0, size, SHARD_BYTES), size])]
    try:
        columns = fields_of(dict.fromkeys(names), reading)[1]
    except BadRecord as error:
        raise ConfigError(f"{file.path} {error}") from error
    return [(*each, columns) for each in ranges]
