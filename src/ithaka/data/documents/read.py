"""Divide files into shards, and read the documents of a shard.

A shard is read and tokenized as a unit: several small text files or a part of a large one, the
JSONL lines that start within 2 MiB, a JSON file, a Parquet row group, rows of an Arrow table.
"""

import codecs
import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.parquet

from ithaka.config import LFS_POINTER, ConfigError, ReadingConfig, input_error
from ithaka.data.documents.dialects import BadRecord
from ithaka.data.documents.files import (
    SNIFF_BYTES,
    File,
    count_bytes,
    is_streamed,
    open_dataset,
    open_file,
)
from ithaka.data.documents.images import RecordImages
from ithaka.data.documents.records import (
    UNUSED,
    Document,
    check_train_on,
    content_of,
    detect_format,
    drop_null_fields,
    find_unused,
    parse_record,
)
from ithaka.data.documents.split import SourceContent, Split, hash_content, limit_of
from ithaka.data.tokenizer import Tokenizer
from ithaka.exits import TransientError

SHARD_BYTES = 1 << 21
TEXT_CHUNK_BYTES = 1 << 20  # text is read in chunks of this size
PART_BYTES = 1 << 26  # larger text files are divided into parts
BATCH_RECORDS = 64
SCANNED_RECORDS = 10_000  # at most, of each source, to decide the split
FOOTER_READERS = 16  # concurrent requests for Parquet footers on the hub


class Part(NamedTuple):
    """Range [start, stop) of a file: bytes (text, JSONL), records (JSON, Arrow) or row groups."""

    file: File
    start: int
    stop: int
    ends_document: bool = True  # False: a text that continues in the next part


@dataclass(frozen=True)
class Shard:
    parts: tuple[Part, ...]  # more than one only for text
    num_bytes: int
    reading: ReadingConfig
    columns: tuple[str, ...] = ()  # to read, for Parquet and Arrow
    split: Split | None = None  # selects records
    unused: tuple[str, ...] = ()  # other columns

    @property
    def identity(self) -> tuple[object, ...]:
        """Identifies the shard, whatever its directory. Checkpoints contain a hash of it."""
        parts = [(part.file.path.name, *part[1:], part.file.split) for part in self.parts]
        settings = {
            name: value
            for name, value in vars(self.reading).items()
            if value != getattr(ReadingConfig, name)
        }
        field = None if self.parts[0].file.kind == "text" else self.reading.text_field
        others = sorted(settings.items() - {("text_field", field)})
        return tuple([*parts, self.num_bytes, field, self.split, *others])

    @property
    def is_streamed(self) -> bool:
        return is_streamed(self.parts[0].file.path)

    @property
    def paths(self) -> list[Path]:
        """The files, on disk or streamed."""
        return [path for part in self.parts for path in _list_paths(part.file)]

    def documents(self, tokenizer: Tokenizer) -> Iterator[Document]:
        """Yield the documents on this side of the split. Refuse or skip bad records."""
        part = self.parts[0]
        if part.file.kind == "text":
            yield from itertools.chain(*map(_read_text, self.parts))
            return
        num_before = 0
        for records in _read_records(part, self.columns):
            selected = list(self._select(records, num_before))
            for i, each in enumerate(selected):
                parsed = self._parse(each.record, tokenizer)
                if isinstance(parsed, BadRecord) and self.reading.bad_records == "refuse":
                    self._refuse(parsed, selected, i, tokenizer)
                if isinstance(parsed, BadRecord):
                    parsed = [Document(skip_reason=parsed.reason)]
                elif unused := [*self.unused, *find_unused(each.record, self.reading)]:
                    notes = {**parsed[0].notes, **{UNUSED + name: 1 for name in unused}}
                    parsed = [parsed[0]._replace(notes=notes), *parsed[1:]]
                for document in parsed:
                    yield document._replace(is_held_out=each.is_held_out)
            num_before += len(records)

    def _select(self, records: list[object], num_before: int) -> Iterator["SelectedRecord"]:
        """Yield the records on this side of the split."""
        for row, raw in enumerate(records, num_before):
            record = _load_record(raw)
            if self.split is None:
                yield SelectedRecord(row, record, False)
                continue
            key, _ = self._key(raw, record)
            if self.split.keeps(key):
                yield SelectedRecord(row, record, self.split.holds_out(key))

    def _refuse(
        self,
        problem: BadRecord,
        selected: list["SelectedRecord"],
        index: int,
        tokenizer: Tokenizer,
    ) -> NoReturn:
        """Raise ConfigError for a record, and say how many of the following ones are like it."""
        num_alike = 1
        for each in selected[index + 1 :]:
            other = self._parse(each.record, tokenizer)
            num_alike += isinstance(other, BadRecord) and other.reason == problem.reason
        message = f"{_format_location(self.parts[0], selected[index].row)}: {problem}"
        if num_alike > 1:
            message += (
                f" ({num_alike:,} of the {len(selected):,} records read here have this problem)"
            )
        raise ConfigError(f"{message}; data.bad_records=skip leaves out such records") from problem

    def contents(self) -> Iterator[tuple[int, int]]:
        """Yield the key, which decides the side of the split, and the bytes of each record."""
        with _naming(self.parts[0].file.path):
            for records in _read_records(self.parts[0], self.columns):
                yield from (self._key(raw, _load_record(raw)) for raw in records)

    def _key(self, raw: object, record: object) -> tuple[int, int]:
        """Return the key and the bytes of a record."""
        if isinstance(record, BadRecord) and isinstance(raw, bytes):
            content = raw
        else:
            content = content_of(record, self.reading)
        return hash_content(content), len(content)

    def _parse(self, record: object, tokenizer: Tokenizer) -> list[Document] | BadRecord:
        try:
            read_images = None
            if self.reading.images == "read":
                read_images = functools.partial(
                    RecordImages, tokenizer.images, self.parts[0].file.path.parent
                )
            if isinstance(record, BadRecord):
                return record
            return parse_record(
                record, self.reading, tokenizer.chat, tokenizer.vocab_size, read_images
            )
        except BadRecord as error:
            return error


class SelectedRecord(NamedTuple):
    row: int  # in the part
    record: object  # or what is wrong with it
    is_held_out: bool


def make_shards(
    files: Sequence[File], reading: ReadingConfig, split: Split | None = None
) -> list[Shard]:
    """Return the shards of one side of the split (None: of everything), in the order of the files.

    Text files are held out by the hash of their first bytes, or at their end. A missing column in
    Parquet or Arrow is a ConfigError.
    """
    files = [file._replace(stamp=_stamp(file)) for file in files]
    reading = ReadingConfig(
        **{each.name: getattr(reading, each.name) for each in dataclasses.fields(ReadingConfig)}
    )
    texts = [file for file in files if file.kind == "text"]
    if texts:
        check_train_on(reading, "text", ["all"])
        if reading.format not in ("auto", "text"):
            raise ConfigError(
                f"{texts[0].path} is plain text, but data.format={reading.format}; use auto, or "
                "write records as JSONL"
            )
    shards = _make_text_shards(texts, reading, split)
    parquet = [file.path for file in files if file.kind == "parquet"]
    if streamed := list(filter(is_streamed, parquet)):
        with ThreadPoolExecutor(FOOTER_READERS) as pool:
            for path in streamed:
                # fills the cache; errors are reported below, for each file
                pool.submit(_read_streamed_footer, path)
    for file in files:
        if file.kind != "text":
            columns, unused, ranges = _divide_records(file, reading)
            for start, stop, num_bytes in ranges:
                parts = (Part(file, start, stop),)
                shards.append(Shard(parts, num_bytes, reading, columns, split, unused))
    return shards


def _list_paths(file: File) -> list[Path]:
    if file.kind != "arrow":
        return [file.path]
    return [Path(each["filename"]) for each in _open_table(file).cache_files]


def _stamp(file: File) -> str:
    """Name the version of a file. The path of a streamed file names its commit."""
    if is_streamed(file.path):
        return str(file.path)
    versions = []
    for path in _list_paths(file):
        stat = path.stat()
        versions.append((str(path.absolute()), stat.st_size, stat.st_mtime_ns))
    return f"{hash_content(repr(versions).encode()):x}"


def read_content(files: Sequence[File], reading: ReadingConfig, fraction: float) -> SourceContent:
    """Return what the split depends on. Reads the start of each text file; of records all if they
    are few, else until some are on each side of the split."""
    texts = [file._replace(stamp=_stamp(file)) for file in files if file.kind == "text"]
    sizes: dict[int, int] = {}
    for file in texts:
        key = _text_key(file)
        sizes[key] = sizes.get(key, 0) + file.path.stat().st_size
    shards = [shard for shard in make_shards(files, reading) if shard.parts[0].file.kind != "text"]
    file_bytes = sum(shard.num_bytes for shard in shards)
    is_large = file_bytes > PART_BYTES
    records = itertools.chain.from_iterable(shard.contents() for shard in shards)
    sides: set[bool] = set()
    is_complete = True
    for number, (key, num_bytes) in enumerate(records, 1):
        sizes[key] = sizes.get(key, 0) + num_bytes
        sides.add(key < limit_of(fraction))
        if number == SCANNED_RECORDS or (is_large and len(sides) == 2):
            is_complete = False
            break
    is_one_text = len(files) == len(texts) == 1
    num_bytes = sum(sizes.values())
    if not is_complete:
        num_bytes = max(num_bytes, file_bytes)
    return SourceContent(sizes, is_complete, is_one_text, fraction, num_bytes)


def _make_text_shards(
    files: Sequence[File], reading: ReadingConfig, split: Split | None
) -> list[Shard]:
    """Group small files, and divide files above PART_BYTES into parts, which are shuffled."""
    ranges = []
    for file in files:
        size = file.path.stat().st_size
        key = _text_key(file) if split is not None else 0
        if split is None or split.held_out is None:
            ranges.append((file, 0, size))
        elif key in split.cuts:
            target = size - max(1, round(size * split.fraction))
            # a newline far before is not used
            middle = _find_cut(file.path, max(0, target // 2 - 4), target)
            start, stop = (middle, size) if split.held_out else (0, middle)
            ranges.append((file, start, stop))
        elif split.keeps(key):
            ranges.append((file, 0, size))
    groups: list[list[Part]] = []
    room = 0
    for file, start, stop in ranges:
        if start >= stop:
            continue
        for low, high in pairwise(_divide_text(file.path, start, stop, PART_BYTES)):
            if high - low > room:
                groups.append([])
                room = SHARD_BYTES
            groups[-1].append(Part(file, low, high, ends_document=high == stop))
            room -= high - low
    shards = []
    for group in groups:
        num_bytes = sum(part.stop - part.start for part in group)
        shards.append(Shard(tuple(group), num_bytes, reading))
    return shards


@functools.lru_cache(1 << 20)  # a smaller cache would be of no use to folders with more files
def _text_key(file: File) -> int:
    """Return the key of a text. Texts of one size that start alike count as copies."""
    with _naming(file.path):
        size = file.path.stat().st_size
        return hash_content(f"{size} ".encode() + _read_bytes(file.path, 0, min(size, SNIFF_BYTES)))


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise input_error(
            f"{path} cannot be read ({error}); restore it, or use another path", error
        ) from error


def _read_text(part: Part) -> Iterator[Document]:
    """Yield one document in chunks."""
    for low, high in pairwise(
        _divide_text(part.file.path, part.start, part.stop, TEXT_CHUNK_BYTES)
    ):
        try:
            text = _read_bytes(part.file.path, low, high).decode()
        except UnicodeDecodeError as error:
            location = f"data file {part.file.path} is not UTF-8 text at byte {low + error.start}"
            raise ConfigError(f"{location}; convert it, or leave it out") from error
        is_end = part.ends_document and high == part.stop
        yield Document(text, add_bos_eos=True, is_start=low == part.start, is_end=is_end)


def _divide_text(path: Path, start: int, stop: int, max_bytes: int) -> list[int]:
    """Return the edges of chunks of at most `max_bytes` (at least 4), from `start` to `stop`."""
    edges = [start]
    while stop - edges[-1] > max_bytes:
        edges.append(_find_cut(path, edges[-1], edges[-1] + max_bytes))
    return [*edges, stop]


def _find_cut(path: Path, low: int, high: int) -> int:
    """Return where to cut [low, high), which starts with the text or has 4 bytes: after the last
    newline if one is near the end, else between characters."""
    raw = _read_bytes(path, max(low, high - TEXT_CHUNK_BYTES), high)
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    decoder.decode(raw)
    num_incomplete = len(decoder.getstate()[0])  # bytes of a character that ends after `high`
    return high - len(raw) + (raw.rfind(b"\n") + 1 or len(raw) - num_incomplete)


def _read_bytes(path: Path, low: int, high: int) -> bytes:
    with path.open("rb") as file:
        file.seek(low)
        raw = file.read(high - low)
    if len(raw) < high - low:
        raise TransientError(f"data file {path} was truncated while it was read; start again")
    return raw


def _load_record(raw: object) -> object:
    """Return a record as an object, or what is wrong with it."""
    try:
        return _parse_json(raw)
    except BadRecord as error:
        return error


def _parse_json(record: object) -> object:
    """Parse a line of JSONL. Records of other formats are objects already."""
    if not isinstance(record, bytes):
        return record
    if 0 in record:  # json would detect UTF-16 or UTF-32
        raise BadRecord(
            "with NUL bytes", f"NUL at its byte {record.index(0)}; write UTF-8 without NUL bytes"
        )
    try:
        return json.loads(record, object_pairs_hook=_make_object)
    except BadRecord:
        raise
    except (ValueError, RecursionError) as error:
        if record.startswith(LFS_POINTER):
            detail = "not JSON but a Git LFS pointer; run `git lfs pull`"
        elif isinstance(error, json.JSONDecodeError):
            problem = f"{error.msg} at column {error.colno}"
            detail = f"not JSON ({problem}); write one JSON object per line"
        else:
            detail = f"not JSON ({error}); write one JSON object per line"
        raise BadRecord("not JSON", detail) from error


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate keys, of which json keeps the last."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRecord(
            "with duplicate keys", f'the key "{twice}" occurs twice in an object; keep one'
        )
    return values


def _format_location(part: Part, row: int) -> str:
    """Return the file and the line or record of the `row`-th record in a part."""
    location = f"record {part.start + row + 1}"
    if part.file.kind == "parquet":
        location = f"row group {part.start} row {row}"
    elif is_streamed(part.file.path):
        location = f"line {row + 1} after byte {part.start}"
    elif part.file.kind == "jsonl":
        with part.file.path.open("rb") as file:
            num_before = 0  # records of the part
            for number, line in enumerate(file, 1):
                if file.tell() - len(line) >= part.start and line.strip():
                    if num_before == row:
                        location = f"line {number}"
                        break
                    num_before += 1
    return f"{part.file.path} {location}"


def _read_records(part: Part, columns: Sequence[str]) -> Iterator[list[object]]:
    """Yield batches of records. JSONL records are unparsed lines."""
    path = part.file.path
    if part.file.kind == "jsonl":
        yield [line for line in _read_lines(part) if line.strip()]
    elif part.file.kind == "json":
        try:
            yield json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_make_object)
        except BadRecord as error:
            raise ConfigError(f"{path}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path} is not JSON ({error}); repair it, or write it as JSONL"
            ) from error
    elif part.file.kind == "parquet":
        with _open_parquet(path) as file:
            batches = file.iter_batches(BATCH_RECORDS, row_groups=[part.start], columns=columns)
            for rows in _read_batches(batches, part):
                yield [*map(drop_null_fields, rows)]
    else:
        table = _open_table(part.file).select_columns(columns)
        for low in range(part.start, part.stop, BATCH_RECORDS):
            rows = table.select(range(low, min(low + BATCH_RECORDS, part.stop))).to_list()
            yield [*map(drop_null_fields, rows)]


def _read_batches(batches: Iterator[pa.RecordBatch], part: Part) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each batch of a Parquet row group."""
    try:
        for batch in batches:
            yield batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        location = f"{part.file.path} row group {part.start}"
        raise input_error(
            f"{location} cannot be read ({error}); copy the file again", error
        ) from error


def _open_parquet(path: Path) -> pa.parquet.ParquetFile:
    if not is_streamed(path):
        return pa.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
    # pre_buffer: fetch the columns of a row group in few requests.
    return pa.parquet.ParquetFile(
        open_file(path), metadata=_read_streamed_footer(path), pre_buffer=True
    )


@functools.lru_cache(1 << 14)
def _read_streamed_footer(path: Path) -> pa.parquet.FileMetaData:
    return pa.parquet.read_metadata(open_file(path))


def _read_lines(part: Part) -> Iterator[bytes]:
    with open_file(part.file.path) as file:
        if part.start:
            # A line that crosses the start belongs to an earlier shard. It may cross the end as
            # well.
            file.seek(part.start - 1)
            if not file.readline(part.stop - part.start + 1).endswith(b"\n"):
                return
        while file.tell() < part.stop:
            yield file.readline()


def _open_table(file: File) -> Any:
    return open_dataset(str(file.path))[file.split or "train"]


@functools.lru_cache(1 << 14)
def _divide_records(
    file: File, reading: ReadingConfig
) -> tuple[tuple[str, ...], tuple[str, ...], list[tuple[int, int, int]]]:
    """Return the columns to read and the others, and (start, stop, bytes) of each shard."""
    if file.kind == "json":
        return (), (), [(0, 1, file.path.stat().st_size)]
    if file.kind == "jsonl":
        size = count_bytes(file.path)
        first = b""
        if not is_streamed(file.path):
            with file.path.open("rb") as lines:
                first = next(filter(bytes.strip, lines), b"")
        try:
            if first and reading.bad_records == "refuse":
                detect_format(_parse_json(first), reading)
        except BadRecord as error:
            raise ConfigError(f"{_format_location(Part(file, 0, size), 0)}: {error}") from error
        edges = [*range(0, size, SHARD_BYTES), size]
        return (), (), [(low, high, high - low) for low, high in pairwise(edges)]
    if file.kind == "parquet":
        try:
            with _open_parquet(file.path) as parquet:
                names = parquet.schema_arrow.names
                metadata = parquet.metadata
        except pa.ArrowInvalid as error:
            raise ConfigError(
                f"{file.path} is not valid Parquet ({error}); write it again"
            ) from error
        groups = range(metadata.num_row_groups)
        ranges = [(group, group + 1, metadata.row_group(group).total_byte_size) for group in groups]
    else:
        table = _open_table(file)
        names = table.column_names
        row_bytes = table.data.nbytes // max(len(table), 1) + 1
        edges = [*range(0, len(table), max(1, SHARD_BYTES // row_bytes)), len(table)]
        ranges = [(low, high, row_bytes * (high - low)) for low, high in pairwise(edges)]
    try:
        _, columns = detect_format(dict.fromkeys(names), reading)
    except BadRecord as error:
        raise ConfigError(f"{file.path} {error}") from error
    return tuple(columns), tuple(name for name in names if name not in columns), ranges
