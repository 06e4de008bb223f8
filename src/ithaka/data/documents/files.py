"""Find the files that `data.path` refers to. A path or file that cannot be read is a
ConfigError."""

import codecs
import functools
import glob
import io
import os
import re
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from ithaka.comm.rank import is_local_rank_0
from ithaka.config import ConfigError, input_error

FileKind = Literal["text", "jsonl", "json", "parquet", "arrow"]
KIND_OF_SUFFIX: dict[str, FileKind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
UNSUPPORTED_SUFFIXES = {".csv", ".tsv", ".npy", ".bin", ".arrow", ".lock"}
# Files that publishers ship along with the records.
METADATA_FILE = re.compile(
    r"readme|licen[sc]e|citation|notice|dataset_infos?\.json|.*\.lock", re.IGNORECASE
)
# The start of a .json file of records. Any other .json is a source file.
JSON_RECORDS = re.compile(
    rb'[\s\[]*\{[^{]*"'
    rb"(text|messages|conversations|prompt|completion|instruction|question|input_ids)"
    rb'"\s*:'
)
EMPTY = "empty"
NOT_REGULAR = "not a regular file"
SKIPPED = (EMPTY, NOT_REGULAR)  # a directory of records may contain such files
VALIDATION_SPLITS = ("validation", "valid", "val", "dev")
NOT_STANDARD_LIBRARY = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
}
# hf://org/name@revision:configuration/split, the last three optional; pathlib drops one slash.
HUB_DATASET = re.compile(r"hf:/{1,2}([\w.-]+/[\w.-]+)(?:@([\w.-]+))?(?::([\w.-]+))?(?:/([\w.-]+))?")
COMMIT = re.compile("[0-9a-f]{40}")
STREAMED_BYTES = 10e9  # larger hub datasets are streamed
STREAM_BUFFER_BYTES = 1 << 20
SNIFF_BYTES = 1 << 16
USE_SUPPORTED = "use UTF-8 text, JSONL, JSON, Parquet or a folder written by datasets.save_to_disk"


class File(NamedTuple):
    # A file, here or on the hub (`is_streamed`); if arrow, a save_to_disk folder or hf://org/name.
    path: Path
    kind: FileKind
    split: str | None = None  # for kind arrow
    stamp: str = ""  # which version of the file was found, as one rank saw it


class DataFiles(NamedTuple):
    files: list[File]
    validation: Sequence[File] = ()  # the dataset's own validation split
    ignored: Sequence[str] = ()  # files of the directory that are not used, with the reason


def find_files(path: Path | str | None, setting: str = "data.path") -> DataFiles:
    """Return the files of `path` in a fixed order; None is Python's standard library.

    A path is a file, a directory, a glob, a folder written by datasets.save_to_disk, or
    hf://org/name on the hub. `setting` is named in errors.
    """
    if path is None:
        walk = _walk(sysconfig.get_path("stdlib"), NOT_STANDARD_LIBRARY)
        sources = sorted(path for path in walk if path.suffix == ".py")
        return DataFiles([File(path, "text") for path in sources if _find_problem(path) is None])
    path = Path(path).expanduser()
    if hub := HUB_DATASET.fullmatch(str(path)):
        split = hub[4]
        name = re.sub("^hf:/+", "hf://", str(path)).removesuffix(f"/{split}")
        return _find_splits(name, setting, split)
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass  # a glob, or reported below
    except (OSError, ValueError) as error:  # a loop of links, a name that is too long, a NUL
        reason = getattr(error, "strerror", error)
        raise input_error(
            f"{setting}={path} cannot be read ({reason}); use another path", error
        ) from None
    if (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and any(path.glob("*.arrow"))
    ):
        return _find_splits(str(path), setting)
    if (path / "config.json").is_file() and b'"model_type"' in _read_head(path / "config.json"):
        raise ConfigError(
            f"{setting}={path} is a model's directory, not data; set it to text or records"
        )
    if path.is_dir():
        return _find_in_directory(path, setting)
    matches = [path] if path.is_file() else sorted(map(Path, glob.glob(str(path), recursive=True)))
    files = [match for match in matches if match.is_file()]
    if not files and (remote := re.match(r"(?!hf:)(\w+):/+", str(path))):
        url = f"{remote[1]}://{str(path)[remote.end() :]}"
        fix = (
            "download or mount it and set the local path, or use hf://org/name for a dataset "
            "on the hub"
        )
        raise ConfigError(f"{setting}={url} is a remote address, which cannot be read; {fix}")
    if not files:
        is_hub_name = HUB_DATASET.fullmatch(f"hf:/{path}") and not path.parent.exists()
        on_hub = f"{setting}=hf://{path if is_hub_name else 'org/name'} for a dataset on the hub"
        reason = f"is {NOT_REGULAR}" if os.path.lexists(path) else "does not exist"
        raise ConfigError(
            f"{setting}={path} {reason}; set it to a file, a directory or a glob, or {on_hub}"
        )
    for file in files:
        if problem := _find_problem(file):
            raise ConfigError(f"{setting}={file} cannot be read ({problem}); {USE_SUPPORTED}")
    return DataFiles([File(file, _detect_kind(file)) for file in files])


def _find_in_directory(directory: Path, setting: str) -> DataFiles:
    """Find records, and nothing else next to them, or, if there are none, text."""
    problems = {path: _find_problem(path) for path in sorted(_walk(directory))}
    arrow = next((path for path in problems if path.suffix == ".arrow"), None)
    if arrow is not None:
        raise ConfigError(
            f"{setting}={directory} contains {arrow}; set it to the folder "
            "datasets.save_to_disk wrote"
        )
    candidates = [
        path
        for path, reason in problems.items()
        if reason not in SKIPPED and not METADATA_FILE.match(path.name)
    ]
    only_json = all(
        path.suffix in {".json", *KIND_OF_SUFFIX} for path in candidates if problems[path] is None
    )
    records = {
        path: _detect_kind(path)
        for path in candidates
        if path.suffix in KIND_OF_SUFFIX
        or (path.suffix == ".json" and (only_json or JSON_RECORDS.match(_read_head(path))))
    }
    if records:
        first = next(iter(records))
        other = next((path for path in candidates if path not in records), None)
        if other is not None:
            raise ConfigError(
                f"{setting}={directory} contains records ({first.name}) and "
                f"{other.relative_to(directory)}, which has none; select files with a glob, such "
                f"as {directory}/**/*{first.suffix}"
            )
    files = []
    ignored = []
    for path, problem in problems.items():
        if records and path not in records:
            problem = problem or "not records"
        if problem is None:
            files.append(File(path, records.get(path, "text")))
        else:
            ignored.append(f"{path.relative_to(directory)} ({problem})")
    if not files:
        contents = ", ".join(ignored[:3]) or "no files"
        raise ConfigError(f"{setting}={directory} contains {contents}; {USE_SUPPORTED}")
    return DataFiles(files, ignored=ignored)


def _walk(directory: Path | str, excluded: Collection[str] = ("__pycache__",)) -> Iterator[Path]:
    """Yield all files, except hidden ones and those in folders with `excluded` names."""
    for root, folders, names in os.walk(directory):
        folders[:] = [
            folder for folder in folders if not folder.startswith(".") and folder not in excluded
        ]
        yield from (Path(root) / name for name in names if not name.startswith("."))


def _find_problem(path: Path) -> str | None:
    """Return why a file cannot be trained on, judged by its name and first bytes."""
    if not path.is_file():  # a dangling link or a pipe
        return NOT_REGULAR
    if not path.stat().st_size:
        return EMPTY
    if path.suffix in UNSUPPORTED_SUFFIXES:
        return f"{path.suffix} is not supported"
    if path.suffix in KIND_OF_SUFFIX:
        return None
    head = _read_head(path)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < SNIFF_BYTES)
    except UnicodeDecodeError:
        return "not UTF-8 text"
    return f"NUL at byte {head.index(0)}, as in binary files and UTF-16" if 0 in head else None


def _detect_kind(path: Path) -> FileKind:
    if path.suffix == ".json":
        head = _read_head(path).removeprefix(codecs.BOM_UTF8).lstrip()
        return "json" if head.startswith(b"[") else "jsonl"
    return KIND_OF_SUFFIX.get(path.suffix, "text")


def _read_head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(SNIFF_BYTES)


def _find_splits(path: str, setting: str, split: str | None = None) -> DataFiles:
    """Find a `split`, by default train, and a validation split if there is one."""
    try:
        splits = open_dataset(str(Path(path)))  # spelled as in File.path, for the cache
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
        message = f"{setting}={path} cannot be loaded with the package datasets ({reason})"
        raise input_error(f"{message}; use another path", error) from error
    name = split or "train"
    if name not in splits:
        fix = "save one split on its own"
        if path.startswith("hf:"):
            fix = f"use {path}/{next(iter(splits))}"
        raise ConfigError(f"{setting}={path} has no split {name}, only {', '.join(splits)}; {fix}")

    def files_of(name: str) -> list[File]:
        if not isinstance(splits[name], list):
            return [File(Path(path), "arrow", name)]
        return [File(Path(url), KIND_OF_SUFFIX[Path(url).suffix]) for url in splits[name]]

    validation = [other for other in VALIDATION_SPLITS if other in splits and other != name]
    return DataFiles(files_of(name), files_of(validation[0]) if validation else ())


@functools.lru_cache
def open_dataset(path: str) -> dict[str, Any]:
    """Map split names to memory-mapped tables. `path` was written by datasets.save_to_disk, or is
    hf://org/name.

    A large hub dataset of Parquet or JSONL files is not downloaded: its splits map to lists of file
    URLs."""
    import datasets

    datasets.disable_progress_bars()
    if (hub := HUB_DATASET.fullmatch(path)) is None:
        dataset = datasets.load_from_disk(path)
    else:
        from huggingface_hub import HfApi, constants

        if not constants.HF_HUB_OFFLINE:
            # Fail fast: `datasets` itself retries for half a minute.
            HfApi().dataset_info(hub[1], revision=hub[2], timeout=10)
        builder = datasets.load_dataset_builder(hub[1], hub[3], revision=hub[2])
        # offline, any commit in the cache is used
        if COMMIT.fullmatch(hub[2] or "") and builder.hash != hub[2]:
            raise ConfigError(
                f"the cache has commit {builder.hash}, not {hub[2]}; connect to the hub"
            )
        urls = {str(split): list(each) for split, each in (builder.config.data_files or {}).items()}
        paths = [Path(url) for each in urls.values() for url in each]
        num_bytes = sum(map(count_bytes, filter(is_streamed, paths)))  # others are elsewhere
        # Streaming changes the order of documents, so the dataset alone decides it.
        if num_bytes > STREAMED_BYTES and all(
            is_streamed(path) and path.suffix in KIND_OF_SUFFIX for path in paths
        ):
            return urls
        if not Path(builder.cache_dir).exists() and is_local_rank_0():
            print(f"downloading {hub[1]}: {num_bytes / 1e9:.2f} GB in {len(paths)} files")
        builder.download_and_prepare()
        dataset = builder.as_dataset()
    return dataset if isinstance(dataset, dict) else {"train": dataset}


def pin_dataset(path: Path, setting: str = "data.path") -> Path:
    """Name the current commit of a dataset on the hub. Any other path is returned unchanged, and so
    is every path if HF_HUB_OFFLINE is set. If the hub does not answer, raise: a run must not start
    with a name that may change, and opening the dataset needs the hub, too."""
    from huggingface_hub import HfApi, constants

    hub = HUB_DATASET.fullmatch(str(path))
    if hub is None or COMMIT.fullmatch(hub[2] or "") or constants.HF_HUB_OFFLINE:
        return path
    try:
        commit = HfApi().dataset_info(hub[1], revision=hub[2], timeout=10).sha
    except Exception as error:  # OSError, requests or httpx, depending on huggingface_hub
        reason = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
        fix = "correct the name, connect to the hub, or set HF_HUB_OFFLINE=1 to use the local copy"
        raise input_error(
            f"{setting}={_to_url(path)} cannot be found on the hub ({reason}); {fix}", error
        ) from error
    name = f"hf://{hub[1]}@{commit}"
    if hub[3]:
        name += f":{hub[3]}"
    if hub[4]:
        name += f"/{hub[4]}"
    return Path(name)


def is_streamed(path: Path) -> bool:
    """Whether a file is on the hub, as hf:/datasets/org/name@commit/file."""
    return path.parts[:2] == ("hf:", "datasets")


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading. A file on the hub is fetched in ranges as it is read."""
    if not is_streamed(path):
        return path.open("rb")
    from huggingface_hub import HfFileSystem

    remote = HfFileSystem().open(_to_url(path), cache_type="none")
    return io.BufferedReader(remote, STREAM_BUFFER_BYTES)


def count_bytes(path: Path) -> int:
    if not is_streamed(path):
        return path.stat().st_size
    from huggingface_hub import HfFileSystem

    return int(HfFileSystem().info(_to_url(path))["size"])


def _to_url(path: Path) -> str:
    return str(path).replace("hf:/", "hf://", 1)
