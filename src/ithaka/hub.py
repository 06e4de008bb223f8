"""Models on the Hugging Face hub: the local snapshot of org/name or org/name@revision, downloaded if it is not cached;
and uploads.

huggingface_hub provides the cache, the token, resumed downloads and offline mode (HF_HUB_OFFLINE).
"""

import os
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from ithaka.config import ConfigError, input_error
from ithaka.exits import causes, is_transient

P = TypeVar("P", Path, Path | None)
_HUB_NAME = r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?"
HUB_ID = rf"(?!.*(?:--|\.\.)){_HUB_NAME}/{_HUB_NAME}"  # owner/name, as the hub allows it
# A snapshot in the cache: a run's config.yaml names it, so that it resumes with the same commit.
SNAPSHOT = re.compile(r".*/models--([\w.-]+?)--([\w.-]+)/snapshots/(\w+)")
_WEIGHTS = "*.safetensors"
_FILES = [_WEIGHTS, "*.json", "*.jinja", "*.txt", "*.model"]
_OTHER_FORMATS = ["*/*", "consolidated*"]  # subfolders and copies with other names


def split_revision(name: str) -> tuple[str, str | None]:
    """org/name@revision -> (org/name, revision); without one, the hub's default branch."""
    repo, _, revision = name.partition("@")
    return repo, revision or None


def fetch_model(path: P, setting: str = "model.path=", weights: bool = True) -> P:
    """Return the directory of a model. If `path` does not exist and could be a name on the hub, print the size of the
    files that are not cached, and download them, with or without `weights`. Any other path is returned unchanged.
    `setting` prefixes errors."""
    if path is None or path.exists() or path.parent.is_dir() or path.parts[:1] == ("models",):
        return path
    if snapshot := SNAPSHOT.fullmatch(str(path)):
        repo, revision = f"{snapshot[1]}/{snapshot[2]}", snapshot[3]
    else:
        repo, revision = split_revision(str(path))
    return _download(repo, revision, f"{setting}{path}", weights) if re.fullmatch(HUB_ID, repo) else path


def model_files(path: Path) -> dict[str, int]:
    """Names and sizes of the files in a model's directory that downloads include."""
    files = (file for pattern in _FILES for file in path.glob(pattern))
    included = (file for file in files if not any(fnmatch(file.name, other) for other in _OTHER_FORMATS))
    return {file.name: file.stat().st_size for file in included}


def complete_snapshot(path: Path, files: Mapping[str, int], setting: str) -> None:
    """Download what this node's cache lacks of a snapshot, which has these `files` on another node. Any other path is
    left alone. `setting` prefixes errors."""
    snapshot = SNAPSHOT.fullmatch(str(path))
    if snapshot and model_files(path) != files:
        _download(f"{snapshot[1]}/{snapshot[2]}", snapshot[3], f"{setting}{path}", weights=True)


def _download(repo: str, revision: str | None, what: str, weights: bool) -> Path:
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    ignored = _OTHER_FORMATS if weights else [*_OTHER_FORMATS, _WEIGHTS]
    options: dict[str, Any] = {"revision": revision, "allow_patterns": _FILES, "ignore_patterns": ignored}
    outage: Exception | None = None
    try:
        if not constants.HF_HUB_OFFLINE:
            HfApi().model_info(repo, revision=revision, timeout=10)  # raises the error that describes a bad name
            files = [file for file in snapshot_download(repo, **options, dry_run=True) if file.will_download]
            if files and os.environ.get("LOCAL_RANK", "0") == "0":
                gigabytes = sum(file.file_size for file in files) / 1e9
                print(f"downloading {repo}: {gigabytes:.2f} GB in {len(files)} files, to {constants.HF_HUB_CACHE}")
    except errors.GatedRepoError:
        fix = "accept its license there and log in with `hf auth login`"
        raise ConfigError(f"{what} is gated on the hub; {fix}, or use a local directory") from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        missing = "repository" if isinstance(error, errors.RepositoryNotFoundError) else f"revision {revision}"
        fix = "correct the name, log in with `hf auth login` if it is private, or use a local directory"
        raise ConfigError(f"{what} is not a local path, and the hub has no such {missing}; {fix}") from None
    except Exception as error:  # network errors: OSError, requests or httpx, depending on huggingface_hub
        outage = error
    try:
        local_only = constants.HF_HUB_OFFLINE or outage is not None
        return Path(snapshot_download(repo, **options, local_files_only=local_only))
    except errors.LocalEntryNotFoundError as error:
        failure = outage or error  # if the outage began after the requests above, `error` is its effect
        reason = "HF_HUB_OFFLINE is set"
        if not constants.HF_HUB_OFFLINE:
            first_cause = [*causes(failure)][-1]
            reason = f"the hub cannot be reached: {str(first_cause).partition(chr(10))[0]}"
        fix = "download it once with a connection, or use a local directory"
        message = f"{what} is not in the cache {constants.HF_HUB_CACHE} ({reason}); {fix}"
        raise input_error(message, failure) from None
    except OSError as error:
        fix = "start again: the download resumes where it stopped"
        raise input_error(f"{what} cannot be downloaded ({type(error).__name__}: {error}); {fix}", error) from None


def create_repository(repo: str) -> None:
    """Create a private model repository unless there is one. ConfigError if it is public. Call it before the export, so
    that errors appear early."""
    from huggingface_hub import HfApi, errors

    if not re.fullmatch(HUB_ID, repo):
        raise ConfigError(f"--push={repo} is not a name on the hub; use ORG/NAME")
    try:
        HfApi().create_repo(repo, private=True, exist_ok=True)  # an existing one keeps its visibility
        is_private = HfApi().model_info(repo).private
    except Exception as error:  # as in _download
        reason = str(error).strip().rpartition("\n")[2]
        fix = "log in with `hf auth login` and a token that may write there"
        if is_transient(error) or isinstance(error, errors.OfflineModeIsEnabled):
            fix = f"connect to the hub, or leave out --push and upload the export later with `hf upload {repo} OUT_DIR`"
        raise input_error(f"--push={repo} cannot be created or written ({reason}); {fix}", error) from None
    if not is_private:
        fix = "make it private on the hub, use another name, or leave out --push and upload the export with"
        raise ConfigError(f"--push={repo} is public, and exports are pushed only to private ones; {fix} `hf upload`")


def push_files(folder: Path, names: Iterable[str], repo: str, message: str) -> str:
    """Upload these files of `folder` in one commit, and return its URL."""
    from huggingface_hub import CommitOperationAdd, HfApi

    added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in names]
    try:
        return HfApi().create_commit(repo_id=repo, operations=added, commit_message=message).commit_url
    except Exception as error:  # as in _download
        fix = f"the export is in {folder}: upload it with `hf upload {repo} {folder}`"
        raise input_error(f"--push={repo} failed ({type(error).__name__}: {error}); {fix}", error) from None
