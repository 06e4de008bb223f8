"""Files -> shards of documents: text, records with a field of text, arrays of tokens.

A shard is what is read and tokenised at once: some small text files or a part of a large one, the JSONL lines that
start in some 2 MiB, a Parquet row group, rows of an Arrow table, the documents that start in a range of a token array.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from ithaka.config import ConfigError
from ithaka.data import pack
from ithaka.data.files import File, datasets_package
from ithaka.data.pack import Documents, Split

SHARD_BYTES = 1 << 21
TEXT_PIECE_BYTES = 1 << 20
SHARD_TOKENS = 1 << 20
BATCH_RECORDS = 64
JSON_MAX_BYTES = 1 << 30


class Part(NamedTuple):
    """[start, stop) of a file: bytes of text and JSONL, records of JSON and Arrow, row groups, tokens."""

    path: Path
    start: int
    stop: int
    first: bool = True  # a document starts here
    last: bool = True  # one ends here


class Text(NamedTuple):
    """A document, or a part of one."""

    text: str
    first: bool = True
    last: bool = True


@dataclass(frozen=True)
class Shard:
    parts: tuple[Part, ...]
    num_bytes: int
    how: tuple[object, ...]  # what is read there

    @property
    def identity(self) -> tuple[object, ...]:
        """What tells this shard from any other, wherever its files lie."""
        return (*((part.path.name, *part[1:]) for part in self.parts), self.num_bytes, self.how)

    @property
    def continues(self) -> bool:
        """Whether it starts in the document that the shard before it ends in."""
        return not self.parts[0].first

    def texts(self) -> Iterator[Text]:
        raise NotImplementedError


def make_shards(
    files: Sequence[File], field: str, vocab_size: int, eos_id: int | None, split: Split | None = None
) -> list[Shard]:
    """The shards of one side of the split (None: of everything), in the order of the files.

    Records are held out by a hash of their place, and the very first one always; whole text files by a hash of
    theirs; a text file alone, and every token array, gives up its end.
    """
    shards: list[Shard] = _text_shards([file for file in files if file.kind == "text"], split)
    for index, file in enumerate(files):
        if file.kind == "tokens":
            shards += _token_shards(file.path, vocab_size, eos_id, split)
        elif file.kind != "text":
            shards += _record_shards(file, index, field, split)
    return shards


# Text


@dataclass(frozen=True)
class TextShard(Shard):
    """Each part is a document, or a part of a large one, read piece by piece and cut after newlines."""

    def texts(self) -> Iterator[Text]:
        for part in self.parts:
            for at, end, text in _pieces(part):
                yield Text(text, part.first and at == part.start, part.last and end == part.stop)


def _pieces(part: Part) -> Iterator[tuple[int, int, str]]:
    at = part.start
    with part.path.open("rb") as file:
        while at < part.stop:
            file.seek(at)
            raw = file.read(min(TEXT_PIECE_BYTES, part.stop - at))
            if not raw:
                raise ConfigError(f"data file {part.path} became shorter while it was read; start again")
            raw = raw if at + len(raw) == part.stop else raw[: cut(raw)]
            try:
                yield at, at + len(raw), raw.decode()
            except UnicodeDecodeError as error:
                where = f"data file {part.path} is not UTF-8 text at byte {at + error.start}"
                raise ConfigError(f"{where}; convert it, or leave it out") from error
            at += len(raw)


def cut(raw: bytes) -> int:
    """How many bytes of a full read to keep: up to the last newline, else whole characters only."""
    end = raw.rfind(b"\n") + 1
    if end:
        return end
    end = len(raw) - 1
    while end > len(raw) - 4 and raw[end] & 0xC0 == 0x80:
        end -= 1
    return end


def _cut_before(path: Path, middle: int) -> int:
    """Where to cut a file in two: after the last newline before `middle`, if one is near."""
    low = max(0, middle - TEXT_PIECE_BYTES)
    with path.open("rb") as file:
        file.seek(low)
        # One byte more, so that a character which ends at the middle is seen to be whole.
        before = file.read(middle - low + 1)
    # That byte may be a newline, but it is not ours to keep.
    return low + min(cut(before), middle - low) if middle else 0


def _text_shards(files: Sequence[File], split: Split | None) -> list[Shard]:
    ranges = [(file.path, 0, file.path.stat().st_size) for file in files]
    if split is not None and len(files) == 1:
        path, _, size = ranges[0]
        middle = _cut_before(path, _tail(size, split.fraction))
        ranges = [(path, middle, size) if split.held_out else (path, 0, middle)]
    elif split is not None:
        # At least one file on each side, however few there are.
        num_held_out = max(1, min(round(split.fraction * len(files)), len(files) - 1))
        held_out = set(pack.permutation(len(files), (0,))[:num_held_out].tolist())
        ranges = [each for i, each in enumerate(ranges) if (i in held_out) == split.held_out]
    groups: list[list[Part]] = []
    room = 0
    for path, start, stop in (each for each in ranges if each[2] > each[1]):
        cuts = [_cut_before(path, at) for at in range(start + pack.WINDOW_BYTES, stop, pack.WINDOW_BYTES)]
        for low, high in pairwise([start, *cuts, stop]):
            if cuts or high - low > room:
                groups.append([])
                room = SHARD_BYTES
            groups[-1].append(Part(path, low, high, first=low == start, last=high == stop))
            room = 0 if cuts else room - (high - low)
    sizes = [sum(part.stop - part.start for part in group) for group in groups]
    return [TextShard(tuple(group), size, ()) for group, size in zip(groups, sizes, strict=True)]


def _tail(size: int, fraction: float) -> int:
    return max(0, size - max(1, round(size * fraction)))


# Records


@dataclass(frozen=True)
class RecordShard(Shard):
    """Each record on our side of the split is a document: its field's text."""

    file: File
    file_index: int
    field: str
    split: Split | None

    def texts(self) -> Iterator[Text]:
        first, start = 0, self.parts[0].start
        for records in READERS[self.file.kind](self):
            rows = np.arange(first, first + len(records))
            kept = rows if self.split is None else rows[self.split.keeps(rows, self.file_index, start)]
            yield from (Text(self._text(records[row - first], int(row))) for row in kept)
            first += len(records)

    def _text(self, record: Any, row: int) -> str:
        complaint = None
        if isinstance(record, bytes):
            try:
                record = json.loads(record)
            except ValueError as error:
                complaint = f"not JSON ({error}); data.path wants one JSON object a line"
        complaint = complaint or _complaint(record, self.field)
        if complaint:
            raise ConfigError(f"{self.file.path} {self._where(row)}: {complaint}")
        return record[self.field]

    def _where(self, row: int) -> str:
        start = self.parts[0].start
        if self.file.kind == "jsonl":
            return f"line {_line_number(self.file.path, start, row)}"
        return f"row group {start} row {row}" if self.file.kind == "parquet" else f"record {start + row + 1}"


def _line_number(path: Path, start: int, row: int) -> int:
    """The line of the `row`-th record from byte `start` on."""
    position, seen = 0, -1
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            seen += position >= start and bool(line.strip())
            if seen == row:
                return number
            position += len(line)
    raise ConfigError(f"data file {path} became shorter while it was read; start again")


def _complaint(record: Any, field: str) -> str | None:
    if not isinstance(record, dict):
        return f"a {type(record).__name__}, not a JSON object; data.path wants one object a record"
    if field not in record:
        return _no_field(field, list(record))
    if not isinstance(record[field], str):
        kind = "null" if record[field] is None else type(record[field]).__name__
        return f"data.text_field={field} is {kind}, not a string; drop such records, or name a field of text"
    return None


def _no_field(field: str, names: list[str]) -> str:
    way_out = "name the field that holds the text with data.text_field"
    for name in {"messages", "conversations"} & set(names):
        way_out = f"conversations ({name}) are not read yet: write them as text with a chat template, and {way_out}"
    return f"has no field data.text_field={field}; its fields are {', '.join(map(str, names)) or 'none'}; {way_out}"


def _jsonl(shard: RecordShard) -> Iterator[list[bytes]]:
    path, start, stop = shard.parts[0][:3]
    lines = []
    with path.open("rb") as file:
        if start:
            # The line that crosses our start belongs to the shard before; it may also cross our end.
            file.seek(start - 1)
            if not file.readline(stop - start + 1).endswith(b"\n"):
                return
        while file.tell() < stop:
            lines.append(file.readline())
    yield [line for line in lines if line.strip()]


def _json(shard: RecordShard) -> Iterator[list[Any]]:
    try:
        yield json.loads(shard.file.path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ConfigError(f"{shard.file.path} is not JSON ({error}); repair it, or write it as JSONL") from error


def _parquet(shard: RecordShard) -> Iterator[list[Any]]:
    with pa.parquet.ParquetFile(shard.file.path, pre_buffer=False, buffer_size=1 << 20) as file:
        for batch in file.iter_batches(BATCH_RECORDS, row_groups=[shard.parts[0].start], columns=[shard.field]):
            yield batch.to_pylist()


def _arrow(shard: RecordShard) -> Iterator[list[Any]]:
    table, (start, stop) = open_dataset(shard.file).select_columns([shard.field]), shard.parts[0][1:3]
    for low in range(start, stop, BATCH_RECORDS):
        yield table.select(range(low, min(low + BATCH_RECORDS, stop))).to_list()


READERS = {"jsonl": _jsonl, "json": _json, "parquet": _parquet, "arrow": _arrow}


@functools.lru_cache
def open_dataset(file: File) -> Any:
    """Rows in memory-mapped Arrow files: a folder of `datasets.save_to_disk`, a dataset on the hub, or one file."""
    library = datasets_package(f"data path {file.path}")
    try:
        if file.split is not None:
            return library.load_dataset(str(file.path), split=file.split)
        if file.path.is_dir():
            return library.load_from_disk(str(file.path))
        return library.Dataset.from_file(str(file.path))
    except Exception as error:
        raise ConfigError(f"data path {file.path} cannot be read by datasets ({error}); write it again") from error


def _record_shards(file: File, index: int, field: str, split: Split | None) -> list[Shard]:
    """Columns are checked here, and of JSONL the first record of each file."""
    how = (field, file.split, split)
    made = [
        RecordShard((Part(file.path, start, stop),), num_bytes, how, file, index, field, split)
        for start, stop, num_bytes in _record_ranges(file, field)
    ]
    if file.kind == "jsonl" and made:
        with file.path.open("rb") as lines:
            made[0]._text(next((line for line in lines if line.strip()), b"{}"), 0)
    return [*made]


def _record_ranges(file: File, field: str) -> list[tuple[int, int, int]]:
    """(start, stop, bytes) of each shard."""
    if file.kind == "jsonl":
        size = file.path.stat().st_size
        edges = [*range(0, size, SHARD_BYTES), size]
        return [(low, high, high - low) for low, high in pairwise(edges)]
    if file.kind == "json":
        size = file.path.stat().st_size
        if size > JSON_MAX_BYTES:
            raise ConfigError(f"{file.path} is a JSON list of {size >> 20} MiB, read whole; write it as JSONL")
        return [(0, 1, size)]
    if file.kind == "parquet":
        try:
            with pa.parquet.ParquetFile(file.path) as parquet:
                schema, groups = parquet.schema_arrow, range(parquet.metadata.num_row_groups)
                sizes = [parquet.metadata.row_group(group).total_byte_size for group in groups]
        except pa.ArrowInvalid as error:
            raise ConfigError(f"{file.path} cannot be read as Parquet ({error}); write it again") from error
        _check_column(file.path, schema, field)
        return [(group, group + 1, sizes[group]) for group in groups]
    dataset = open_dataset(file)
    _check_column(file.path, dataset.features.arrow_schema, field)
    row_bytes = dataset.data.nbytes // max(len(dataset), 1) + 1
    edges = [*range(0, len(dataset), max(1, SHARD_BYTES // row_bytes)), len(dataset)]
    return [(low, high, row_bytes * (high - low)) for low, high in pairwise(edges)]


def _check_column(path: Path, schema: pa.Schema, field: str) -> None:
    if field not in schema.names:
        raise ConfigError(f"{path} {_no_field(field, schema.names)}")
    kind = schema.field(field).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise ConfigError(f"{path}: data.text_field={field} is {kind}, not a string; name a field of text")


# Arrays of tokens


@dataclass(frozen=True)
class TokenShard(Shard):
    """The documents that start in [start, stop); one starts at `origin` and after each eos before `end`."""

    origin: int
    end: int
    eos_id: int | None
    vocab_size: int
    # Opened once: NumPy parses the header with `ast`, which threads of Python 3.11 must not do at the same time.
    array: np.ndarray = dataclasses.field(compare=False, repr=False)

    def documents(self) -> Documents:
        """Views of the array on disk: there is nothing to tokenise."""
        _, start, stop, *_ = self.parts[0]
        low = self._next_start(start, stop)
        high = self._next_start(stop, self.end) if low < stop else low
        starts = [np.arange(low, min(low + 1, high))]
        for at in range(low, high, SHARD_TOKENS):
            tokens = self.array[at : min(at + SHARD_TOKENS, high)]
            self._check_range(tokens, at)
            starts.append(at + 1 + np.flatnonzero(tokens == self.eos_id))
        found = np.concatenate(starts)
        return Documents(self.array[low:high], found[found < high] - low)

    def _next_start(self, at: int, limit: int) -> int:
        """The first start of a document in [at, limit), or `limit`."""
        if at == self.origin:
            return at
        for low in range(at - 1, limit - 1, SHARD_TOKENS):
            ends = np.flatnonzero(self.array[low : min(low + SHARD_TOKENS, limit - 1)] == self.eos_id)
            if len(ends):
                return low + int(ends[0]) + 1
        return limit

    def _check_range(self, tokens: np.ndarray, low: int) -> None:
        if int(tokens.max()) >= self.vocab_size or int(tokens.min()) < 0:
            at = int(np.flatnonzero((tokens >= self.vocab_size) | (tokens < 0))[0])
            raise ConfigError(
                f"{self.parts[0].path}: token {int(tokens[at])} at position {low + at} is outside the model's "
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


def _token_shards(path: Path, vocab_size: int, eos_id: int | None, split: Split | None) -> list[Shard]:
    array = open_tokens(path, vocab_size)
    origin, end = 0, len(array)
    if split is not None:
        middle = _tail(end, split.fraction)
        low = max(0, middle - SHARD_TOKENS)
        eos = np.flatnonzero(array[low:middle] == eos_id)
        middle = low + int(eos[-1]) + 1 if len(eos) else middle
        origin, end = (middle, end) if split.held_out else (0, middle)
    edges = [*range(origin, end, SHARD_TOKENS), end] if eos_id is not None else [origin, end]
    return [
        TokenShard((Part(path, low, high),), 4 * (high - low), (origin, end), origin, end, eos_id, vocab_size, array)
        for low, high in pairwise(edges)
        if high > low
    ]
