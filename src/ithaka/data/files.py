"""`data.path` -> files -> units, and the split into training and validation."""

import codecs
import glob
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from ithaka.config import ConfigError
from ithaka.data import rows, sources
from ithaka.data.rows import JsonlUnit, ParquetUnit
from ithaka.data.sources import Share, TextUnit, TokenUnit, Unit
from ithaka.data.tokenizer import ByteTokenizer, Tokenizer

Kind = Literal["text", "jsonl", "parquet", "tokens"]
KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".npy": "tokens"}
# Read as tokens only where the user names them: any program may leave a .bin in a directory.
NAMED_KINDS: dict[str, Kind] = {**KINDS, ".bin": "tokens"}
REFUSED = {
    **dict.fromkeys((".gz", ".zst", ".xz", ".bz2", ".zip"), "decompress it, or convert it to Parquet"),
    ".npz": "save its array with numpy.save as .npy",
}
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
SNIFF_BYTES = 8192
PROBE_TOKENS = 1 << 26


@dataclass(frozen=True)
class File:
    path: Path
    kind: Kind
    named: bool  # by the user or by a glob, not found in a directory


@dataclass(frozen=True)
class Reading:
    """How files become tokens. Text needs a tokenizer; token arrays need eos_id and vocab_size only."""

    tokenizer: Tokenizer | None
    text_field: str
    eos_id: int | None
    vocab_size: int


def expand(path: Path | str | Sequence[Path | str] | None) -> list[File]:
    """The files of a `data.path`, in a fixed order; None is Python's standard library.

    A path is a file, a directory (all its text, JSONL, Parquet and .npy files; hidden ones left out) or a
    glob. Raises ConfigError where nothing is there.
    """
    if path is None:
        return _standard_library()
    if not isinstance(path, Path | str):
        return [file for part in path for file in expand(part)]
    path = Path(path).expanduser()
    if path.is_dir():
        found = list(_walk(path))
        if not found:
            raise ConfigError(f"data path {path} holds no text, JSONL, Parquet or .npy file; name .bin files by a glob")
        return found
    if path.is_file():
        return [_named(path)]
    matches = sorted(match for match in map(Path, glob.glob(str(path), recursive=True)) if match.is_file())
    if not matches:
        raise ConfigError(f"data path {path} does not exist; give a file, a directory or a glob")
    return [_named(match) for match in matches]


def _named(path: Path) -> File:
    if path.suffix in REFUSED:
        raise ConfigError(f"data file {path} cannot be read: {path.suffix}; {REFUSED[path.suffix]}")
    return File(path, NAMED_KINDS.get(path.suffix, "text"), named=True)


def _walk(directory: Path) -> Iterator[File]:
    for path in sorted(directory.rglob("*")):
        hidden = any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(directory).parts)
        if hidden or not path.is_file() or not path.stat().st_size:
            continue
        kind = KINDS.get(path.suffix)
        if kind or (path.suffix not in NAMED_KINDS and _looks_like_text(path)):
            yield File(path, kind or "text", named=False)


def _standard_library() -> list[File]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(p for p in root.rglob("*.py") if not NOT_LIBRARY & set(p.relative_to(root).parts))
    return [File(p, "text", named=False) for p in paths if p.stat().st_size and _looks_like_text(p)]


def _looks_like_text(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(SNIFF_BYTES)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def make_units(files: Sequence[File], reading: Reading, share: Share | None = None) -> list[Unit]:
    """The units of one side of the split (None: of everything), in the order of the files.

    Rows of JSONL and Parquet are held out by a hash of their place, and the very first one always; whole text
    files by a hash of theirs; a text file alone, and every token array, gives up its end.
    """
    units: list[Unit] = []
    text_files = [index for index, file in enumerate(files) if file.kind == "text"]
    kept = _kept_text_files(text_files, share)
    for index, file in enumerate(files):
        if file.kind == "tokens":
            units += _token_units(file, reading, share)
        elif file.kind == "text" and len(text_files) == 1:
            units += _text_units(file, reading, share)
        elif file.kind == "text":
            units += _text_units(file, reading, None) if index in kept else []
        else:
            make = _jsonl_units if file.kind == "jsonl" else _parquet_units
            units += make(file, index, reading, share)
    return units


def _kept_text_files(indices: list[int], share: Share | None) -> set[int]:
    if share is None:
        return set(indices)
    # At least one file on each side, however few there are.
    num_held_out = max(1, min(round(share.fraction * len(indices)), len(indices) - 1))
    order = sources.permutation(len(indices), (0,))[:num_held_out]
    held_out = {indices[i] for i in order}
    return held_out if share.validation else set(indices) - held_out


def _text_units(file: File, reading: Reading, share: Share | None) -> list[Unit]:
    start, stop = 0, file.path.stat().st_size
    if share is not None:
        middle = _text_split(file.path, stop, share.fraction)
        start, stop = (middle, stop) if share.validation else (0, middle)
    return [TextUnit(file.path, start, stop, file.named, _tokenizer(reading))] if stop > start else []


def _tail(size: int, fraction: float) -> int:
    return max(0, size - max(1, round(size * fraction)))


def _text_split(path: Path, size: int, fraction: float) -> int:
    middle = _tail(size, fraction)
    low = max(0, middle - sources.TEXT_PIECE_BYTES)
    with path.open("rb") as file:
        file.seek(low)
        # One byte more, so that a character which ends at the middle is seen to be whole.
        before = file.read(middle - low + 1)
    # That byte may be a newline, but it is not ours to keep.
    return low + min(sources.cut(before), middle - low) if middle else 0


def _token_units(file: File, reading: Reading, share: Share | None) -> list[Unit]:
    array = sources.open_tokens(file.path, reading.vocab_size)
    start, stop = 0, len(array)
    if share is not None:
        middle = _token_split(array, share.fraction, reading.eos_id)
        start, stop = (middle, stop) if share.validation else (0, middle)
    return [TokenUnit(file.path, start, stop, reading.eos_id, reading.vocab_size)] if stop > start else []


def _token_split(array: np.ndarray, fraction: float, eos_id: int | None) -> int:
    """Where the held-out end begins: after the last eos before it, if one is near."""
    middle = _tail(len(array), fraction)
    low = max(0, middle - sources.PIECE_TOKENS)
    ends = np.flatnonzero(array[low:middle] == eos_id) if eos_id is not None else np.empty(0, np.int64)
    return low + int(ends[-1]) + 1 if len(ends) else middle


def _jsonl_units(file: File, index: int, reading: Reading, share: Share | None) -> list[Unit]:
    size, step = file.path.stat().st_size, rows.JSONL_UNIT_BYTES
    return [
        JsonlUnit(file.path, low, min(low + step, size), reading.text_field, index, share, _tokenizer(reading))
        for low in range(0, size, step)
    ]


def _parquet_units(file: File, index: int, reading: Reading, share: Share | None) -> list[Unit]:
    try:
        with pa.parquet.ParquetFile(file.path) as parquet:
            schema, metadata = parquet.schema_arrow, parquet.metadata
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{file.path} cannot be read as Parquet ({error}); write it again") from error
    _check_text_column(file.path, schema, reading.text_field)
    counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    return [
        ParquetUnit(file.path, group, count, reading.text_field, index, share, _tokenizer(reading))
        for group, count in enumerate(counts)
    ]


def _check_text_column(path: Path, schema: pa.Schema, field: str) -> None:
    if field not in schema.names:
        raise ConfigError(f"{path} has no field data.text_field={field}; its fields are {', '.join(schema.names)}")
    kind = schema.field(field).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise ConfigError(f"{path}: data.text_field={field} is {kind}, not a string; name a field of text")


def _tokenizer(reading: Reading) -> Tokenizer:
    if reading.tokenizer is None:
        raise ConfigError("data.path is text and the model has no tokenizer; set data.tokenizer")
    return reading.tokenizer


def probe(units: Sequence[Unit], if_empty: str) -> None:
    """Raise what reading the start of the data raises, or ConfigError(if_empty) when there are no tokens.

    Token arrays are read whole, up to PROBE_TOKENS each; of text, the first piece with tokens.
    """
    num_tokens = 0
    for unit in units:
        if num_tokens and not isinstance(unit, TokenUnit):
            continue
        for piece in unit.pieces(0, None):
            num_tokens += len(piece.tokens)
            if num_tokens and not (isinstance(unit, TokenUnit) and piece.cursor < PROBE_TOKENS):
                break
    if not num_tokens:
        raise ConfigError(if_empty)


def for_probing(reading: Reading) -> Reading:
    """The same files read without the real tokenizer, which may take seconds a piece."""
    return Reading(ByteTokenizer(), reading.text_field, reading.eos_id, reading.vocab_size)
