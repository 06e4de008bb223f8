"""`data.path` -> the files that are meant, or a refusal that names the one that is not understood."""

import codecs
import functools
import glob
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ithaka.config import ConfigError, input_error

Kind = Literal["text", "jsonl", "json", "parquet", "arrow"]
KIND_OF_SUFFIX: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
NOT_READ = {".csv", ".tsv", ".npy", ".bin", ".arrow", ".lock"}
# Files that publishers put beside the records.
NOT_RECORDS = re.compile(r"readme|licen[sc]e|citation|notice|dataset_infos?\.json|.*\.lock", re.IGNORECASE)
# How a .json of records to train on starts. Without any of these fields it is a source file among others.
TRAINING_JSON = re.compile(
    rb'[\s\[]*\{[^{]*"(text|messages|conversations|prompt|completion|instruction|question|input_ids)"\s*:'
)
VALIDATION_SPLITS = ("validation", "valid", "val", "dev")
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
HUB_DATASET = re.compile(r"hf:/{1,2}([\w.-]+/[\w.-]+)")  # hf://org/name; a Path has one slash of the two
SNIFF_BYTES = 1 << 16
WAY_OUT = "give UTF-8 text, JSONL, JSON, Parquet or a folder of datasets.save_to_disk"


@dataclass(frozen=True)
class File:
    path: Path  # for kind arrow, a folder of `datasets.save_to_disk` or hf://org/name
    kind: Kind
    split: str | None = None  # of kind arrow


@dataclass
class Found:
    files: list[File]
    validation: list[File] = field(default_factory=list)  # a dataset's own validation split
    left_out: list[str] = field(default_factory=list)  # each with the reason


def find_files(path: Path | str | None, name: str = "data.path") -> Found:
    """Find the files of `path`, in a fixed order; None is Python's standard library.

    A path is a file, a directory, a glob, a folder of `datasets.save_to_disk`, or hf://org/name on the hub.
    """
    if path is None:
        return Found(_standard_library())
    path = Path(path).expanduser()
    if hub := HUB_DATASET.fullmatch(str(path)):
        return _dataset(f"hf://{hub[1]}", name)
    if (path / "dataset_dict.json").is_file() or ((path / "state.json").is_file() and any(path.glob("*.arrow"))):
        return _dataset(str(path), name)
    if path.is_dir():
        return _directory(path, name)
    matches = [path] if path.is_file() else sorted(map(Path, glob.glob(str(path), recursive=True)))
    files = [match for match in matches if match.is_file()]
    if files:
        return _named(files, name)
    is_name = HUB_DATASET.fullmatch(f"hf:/{path}") and not path.parent.exists()
    on_hub = f"{name}=hf://{path if is_name else 'org/name'} for a dataset on the hub"
    raise ConfigError(f"{name}={path} does not exist; give a file, a directory or a glob, or {on_hub}")


def _named(paths: list[Path], name: str) -> Found:
    """Files that the user named, by a glob perhaps: each is read, or refused."""
    for path in paths:
        reason = _why_not(path)
        if reason:
            raise ConfigError(f"{name}={path} cannot be read ({reason}); {WAY_OUT}")
    return Found([File(path, _kind(path)) for path in paths])


def _directory(directory: Path, name: str) -> Found:
    """All of a folder's text files, or all its records; if it holds records, every file in it must be understood."""
    reasons = {path: _why_not(path) for path in sorted(_walk(directory))}
    arrow = next((path for path in reasons if path.suffix == ".arrow"), None)
    if arrow is not None:
        raise ConfigError(f"{name}={directory} holds {arrow}; give the folder that datasets.save_to_disk wrote")
    meant = [path for path, reason in reasons.items() if reason != "empty" and not NOT_RECORDS.match(path.name)]
    only_json = all(path.suffix in {".json", *KIND_OF_SUFFIX} for path in meant if reasons[path] is None)
    records = {path: _kind(path) for path in meant if path.suffix in KIND_OF_SUFFIX or _is_record_json(path, only_json)}
    strange = next((path for path in meant if path not in records), None)
    if records:
        first = next(iter(records))
        if strange is not None:
            raise ConfigError(
                f"{name}={directory} holds records ({first.name}) and also {strange.relative_to(directory)}, "
                f"which holds none; choose the files with a glob, such as {directory}/**/*{first.suffix}"
            )
        reasons |= {path: reasons[path] or "not records" for path in reasons if path not in records}
    files = [File(path, records.get(path, "text")) for path, reason in reasons.items() if reason is None]
    left_out = [f"{path.relative_to(directory)} ({reason})" for path, reason in reasons.items() if reason]
    if not files:
        raise ConfigError(f"{name}={directory} holds {', '.join(left_out[:3]) or 'nothing'}; {WAY_OUT}")
    return Found(files, left_out=left_out)


def _walk(directory: Path) -> Iterator[Path]:
    """Its files, except hidden ones."""
    for root, folders, names in os.walk(directory):
        folders[:] = [folder for folder in folders if not folder.startswith(".") and folder != "__pycache__"]
        yield from (Path(root) / name for name in names if not name.startswith("."))


def _why_not(path: Path) -> str | None:
    """Why a file cannot be trained on, where its name and its start tell."""
    if not path.stat().st_size:
        return "empty"
    if path.suffix in NOT_READ:
        return f"{path.suffix} is not read"
    return None if path.suffix in KIND_OF_SUFFIX else _why_no_text(_head(path))


def _kind(path: Path) -> Kind:
    if path.suffix == ".json":
        return "json" if _head(path).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[") else "jsonl"
    return KIND_OF_SUFFIX.get(path.suffix, "text")


def _is_record_json(path: Path, only_json: bool) -> bool:
    return path.suffix == ".json" and (only_json or TRAINING_JSON.match(_head(path)) is not None)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(SNIFF_BYTES)


def _why_no_text(head: bytes) -> str | None:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < SNIFF_BYTES)
    except UnicodeDecodeError:
        return "not UTF-8 text"
    return f"NUL at byte {head.index(0)}, as in binary files and UTF-16" if 0 in head else None


def _standard_library() -> list[File]:
    paths = list[Path]()
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = set(folders) - NOT_LIBRARY
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return [File(path, "text") for path in sorted(paths) if _why_not(path) is None]


def _dataset(path: str, name: str) -> Found:
    try:
        splits = open_dataset(path)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
        words = f"{name}={path} cannot be read with the package datasets ({reason}); give another path"
        raise input_error(words, error) from error
    if "train" not in splits:
        raise ConfigError(f"{name}={path} has no split train, only {', '.join(splits)}; save one by itself")
    own = next((split for split in VALIDATION_SPLITS if split in splits), None)
    return Found([File(Path(path), "arrow", "train")], [File(Path(path), "arrow", own)] if own else [])


@functools.lru_cache
def open_dataset(path: str) -> dict[str, Any]:
    """Split -> rows, in memory-mapped Arrow files: a folder of `datasets.save_to_disk`, or hf://org/name."""
    import datasets

    datasets.disable_progress_bars()
    if (hub := HUB_DATASET.fullmatch(path)) is None:
        found = datasets.load_from_disk(path)
    else:
        from huggingface_hub import HfApi, constants

        if not constants.HF_HUB_OFFLINE:
            HfApi().dataset_info(hub[1], timeout=10)  # `datasets` would try for half a minute
        found = datasets.load_dataset(hub[1])
    return found if isinstance(found, dict) else {"train": found}
