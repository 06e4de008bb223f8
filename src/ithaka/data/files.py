"""`data.path` -> the files that are meant, or a refusal that names the one that is not understood."""

import codecs
import glob
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ithaka.config import ConfigError

Kind = Literal["text", "jsonl", "json", "parquet", "arrow", "tokens"]
KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
KINDS |= {".arrow": "arrow", ".npy": "tokens"}
NOT_READ = dict.fromkeys((".gz", ".zst", ".xz", ".bz2", ".zip", ".tar"), "decompress it, or convert it to Parquet")
NOT_READ |= dict.fromkeys((".csv", ".tsv", ".xlsx"), "convert it to JSONL or Parquet, or rename plain text to .txt")
NOT_READ |= {".npz": "save its array with numpy.save as .npy", ".lock": "leave it out"}
# Written beside records by those who publish them.
NOT_RECORDS = re.compile(r"readme|licen[sc]e|citation|notice|dataset_(infos?|dict)\.json|state\.json", re.IGNORECASE)
# How a .json of records to train on starts. Without any of these fields it is a source file among others.
TRAINING_JSON = re.compile(
    rb'[\s\[]*\{[^{]*"(text|messages|conversations|prompt|completion|instruction|question|input_ids)"\s*:'
)
VALIDATION_SPLITS = ("validation", "valid", "val", "dev")
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
SNIFF_BYTES = 1 << 16


@dataclass(frozen=True)
class File:
    path: Path  # also a folder of `datasets.save_to_disk`, or the name of a dataset on the hub
    kind: Kind
    split: str | None = None  # of a dataset on the hub


@dataclass
class Found:
    files: list[File]
    validation: list[File] = field(default_factory=list)  # a dataset's own validation split
    left_out: list[str] = field(default_factory=list)  # files of a directory, each with the reason


def find(path: Path | str | None, name: str = "data.path") -> Found:
    """The files of `path`, in a fixed order; None is Python's standard library.

    A path is a file, a directory, a glob, a folder of `datasets.save_to_disk` or the name of a dataset on the hub.
    """
    if path is None:
        return Found(_standard_library())
    path = Path(path).expanduser()
    if path.is_dir():
        return _dataset_folder(path, name) or _directory(path, name)
    matches = [path] if path.is_file() else sorted(p for p in map(Path, glob.glob(str(path), recursive=True)))
    files = [match for match in matches if match.is_file()]
    if files:
        return Found([_named(file) for file in files])
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.parent.exists():
        return _on_the_hub(str(path), name)
    raise ConfigError(f"{name}={path} does not exist; give a file, a directory, a glob or a dataset's name on the hub")


def _named(path: Path) -> File:
    if path.suffix in NOT_READ:
        raise ConfigError(f"data file {path} cannot be read: {path.suffix}; {NOT_READ[path.suffix]}")
    if path.suffix != ".json":
        return File(path, "tokens" if path.suffix == ".bin" else KINDS.get(path.suffix, "text"))
    kind = _json_kind(path)
    if kind is None:
        raise ConfigError(
            f"data file {path} is neither a list of JSON records nor one record a line; write it as JSONL, or rename "
            "it to .txt to train on it as plain text"
        )
    return File(path, kind)


def _json_kind(path: Path) -> Kind | None:
    """How a .json file holds records; None where it is one value over several lines."""
    head = _head(path).removeprefix(codecs.BOM_UTF8).lstrip()
    line, newline, _ = head.partition(b"\n")
    if head.startswith(b"["):
        return "json"
    return "jsonl" if line.startswith(b"{") and (line.rstrip().endswith(b"}") or not newline) else None


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(SNIFF_BYTES)


def _directory(directory: Path, name: str) -> Found:
    """All of a folder's text files, or all its records: then everything in it must be understood."""
    records: list[File] = []
    texts: list[Path] = []
    others: list[tuple[Path, str]] = []
    for path in sorted(_walk(directory)):
        if path.is_dir():
            records += (_dataset_folder(path, name) or Found([])).files
        elif not path.stat().st_size:
            others.append((path, "empty"))
        elif path.suffix in KINDS:
            records.append(File(path, KINDS[path.suffix]))
        elif path.suffix in NOT_READ or path.suffix == ".bin":
            others.append((path, f"{path.suffix} is not read from a directory"))
        elif _is_text(path):
            texts.append(path)
        else:
            others.append((path, "not UTF-8 text"))
    beside = {path for path in texts if NOT_RECORDS.match(path.name)}
    only_json = all(path.suffix == ".json" for path in texts if path not in beside)
    for path in [path for path in texts if path.suffix == ".json" and path not in beside]:
        kind = _json_kind(path)
        if kind and (only_json or TRAINING_JSON.match(_head(path))):
            records.append(File(path, kind))
    texts = sorted(set(texts) - {file.path for file in records})
    if records:
        strange = [path for path in texts if path not in beside]
        strange += [path for path, reason in others if reason != "empty" and path.suffix != ".lock"]
        if strange:
            raise ConfigError(
                f"{name}={directory} holds records ({records[0].path.name}) and also "
                f"{strange[0].relative_to(directory)}, which is none; name the files that are meant by a glob, "
                f"such as {directory}/**/*{records[0].path.suffix}"
            )
        others += [(path, "not records") for path in sorted(beside)]
    left_out = [f"{path.relative_to(directory)} ({reason})" for path, reason in others]
    files = sorted(records, key=lambda file: file.path) or [File(path, "text") for path in texts]
    if not files:
        raise ConfigError(
            f"{name}={directory} holds no text, JSONL, JSON, Parquet, Arrow or .npy file, but "
            f"{', '.join(left_out[:3]) or 'nothing'}; give another path, and name .bin files by a glob"
        )
    return Found(files, left_out=left_out)


def _walk(directory: Path) -> Iterator[Path]:
    """Files, and folders of `datasets.save_to_disk`; nothing that is hidden."""
    for root, folders, names in os.walk(directory):
        if _is_dataset(Path(root)):
            folders.clear()
            yield Path(root)
            continue
        folders[:] = [folder for folder in folders if not folder.startswith(".") and folder != "__pycache__"]
        yield from (Path(root) / name for name in names if not name.startswith("."))


def _standard_library() -> list[File]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(p for p in root.rglob("*.py") if not NOT_LIBRARY & set(p.relative_to(root).parts))
    return [File(p, "text") for p in paths if p.stat().st_size and _is_text(p)]


def _is_text(path: Path) -> bool:
    head = _head(path)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < SNIFF_BYTES)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


# What the `datasets` package reads


def datasets_package(needed_for: str) -> Any:
    """Imported only where it is needed."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{needed_for} is read with the package datasets, which is not installed; run pip install datasets, or "
            "give JSONL or Parquet"
        ) from error
    datasets.disable_progress_bars()
    return datasets


def _is_dataset(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or ((path / "state.json").is_file() and any(path.glob("*.arrow")))


def _dataset_folder(path: Path, name: str) -> Found | None:
    """What `datasets.save_to_disk` wrote: one dataset, or its splits."""
    if not _is_dataset(path):
        return None
    if (path / "state.json").is_file():
        return Found([File(path, "arrow")])
    splits = sorted(folder.name for folder in path.iterdir() if _is_dataset(folder))
    return _splits(splits, lambda split: File(path / split, "arrow"), f"{name}={path}")


def _splits(splits: list[str], file: Callable[[str], File], where: str) -> Found:
    if "train" not in splits:
        raise ConfigError(f"{where} has no split train, only {', '.join(splits)}; save the one that is meant by itself")
    own = next((split for split in VALIDATION_SPLITS if split in splits), None)
    return Found([file("train")], [file(own)] if own else [])


def _on_the_hub(dataset: str, name: str) -> Found:
    try:
        package = datasets_package(f"{name}={dataset}, which is not here and so a name on the hub,")
        from huggingface_hub import HfApi, constants

        if not constants.HF_HUB_OFFLINE:
            HfApi().dataset_info(dataset, timeout=10)  # `datasets` would try for half a minute
        splits = package.get_dataset_split_names(dataset)
    except Exception as error:
        if isinstance(error, ConfigError):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{name}={dataset} does not exist here, nor does the hub give it ({type(error).__name__}: {reason}); give "
            "a file, a directory, a glob or a dataset's name"
        ) from error
    return _splits(splits, lambda split: File(Path(dataset), "arrow", split), f"{name}={dataset}")
