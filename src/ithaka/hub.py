"""Models on the Hugging Face hub: the local snapshot of org/name or org/name@revision, downloaded
if it is not cached; and uploads.

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
from ithaka.facts.model_files import HUB_ID, split_revision

P = TypeVar("P", Path, Path | None)
# A snapshot in the cache: a run's config.yaml names it, so that it resumes with the same commit.
SNAPSHOT = re.compile(r".*/models--([\w.-]+?)--([\w.-]+)/snapshots/(\w+)")
_WEIGHTS = "*.safetensors"
_FILES = [_WEIGHTS, "*.json", "*.jinja", "*.txt", "*.model"]
_OTHER_FORMATS = ["*/*", "consolidated*"]  # subfolders and copies with other names


def fetch_model(path: P, setting: str = "model.path=", weights: bool = True) -> P:
    """Return the directory of a model. If `path` does not exist and could be a name on the hub,
    print the size of the files that are not cached, and download them, with or without `weights`.
    Any other path is returned unchanged. `setting` prefixes errors."""
    if path is None or path.exists() or path.parent.is_dir() or path.parts[:1] == ("models",):
        return path
    if snapshot := SNAPSHOT.fullmatch(str(path)):
        repo = f"{snapshot[1]}/{snapshot[2]}"
        revision = snapshot[3]
    else:
        repo, revision = split_revision(str(path))
    if not re.fullmatch(HUB_ID, repo):
        return path
    return _download(repo, revision, f"{setting}{path}", weights)


def model_files(path: Path) -> dict[str, int]:
    """Names and sizes of the files in a model's directory that downloads include."""
    sizes = {}
    for pattern in _FILES:
        for file in path.glob(pattern):
            if not any(fnmatch(file.name, other) for other in _OTHER_FORMATS):
                sizes[file.name] = file.stat().st_size
    return sizes


def complete_snapshot(path: Path, files: Mapping[str, int], setting: str) -> None:
    """Download what this node's cache lacks of a snapshot that has these `files` elsewhere."""
    snapshot = SNAPSHOT.fullmatch(str(path))
    if snapshot and model_files(path) != files:
        _download(f"{snapshot[1]}/{snapshot[2]}", snapshot[3], f"{setting}{path}", weights=True)


def _download(repo: str, revision: str | None, what: str, weights: bool) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    ignored = _OTHER_FORMATS if weights else [*_OTHER_FORMATS, _WEIGHTS]
    options: dict[str, Any] = {
        "revision": revision,
        "allow_patterns": _FILES,
        "ignore_patterns": ignored,
    }
    outage = None if constants.HF_HUB_OFFLINE else _ask_hub(repo, what, options)
    try:
        local_only = constants.HF_HUB_OFFLINE or outage is not None
        return Path(snapshot_download(repo, **options, local_files_only=local_only))
    except errors.LocalEntryNotFoundError as error:
        # If the outage began after the requests in `_ask_hub`, `error` is its effect.
        failure = outage or error
        reason = "HF_HUB_OFFLINE is set"
        if not constants.HF_HUB_OFFLINE:
            first_cause = [*causes(failure)][-1]
            reason = f"the hub cannot be reached: {str(first_cause).partition(chr(10))[0]}"
        fix = "download it once with a connection, or use a local directory"
        message = f"{what} is not in the cache {constants.HF_HUB_CACHE} ({reason}); {fix}"
        raise input_error(message, failure) from None
    except OSError as error:
        reason = f"{type(error).__name__}: {error}"
        fix = "start again: the download resumes where it stopped"
        raise input_error(f"{what} cannot be downloaded ({reason}); {fix}", error) from None


def _ask_hub(repo: str, what: str, options: dict[str, Any]) -> Exception | None:
    """Refuse an unknown name; print what will be downloaded. Returns the error of an outage."""
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    revision = options["revision"]
    try:
        # Raises the error that describes a bad name.
        HfApi().model_info(repo, revision=revision, timeout=10)
        files = snapshot_download(repo, **options, dry_run=True)
        sizes = [file.file_size for file in files if file.will_download]
        if sizes and os.environ.get("LOCAL_RANK", "0") == "0":
            amount = f"{sum(sizes) / 1e9:.2f} GB in {len(sizes)} files"
            print(f"downloading {repo}: {amount}, to {constants.HF_HUB_CACHE}")
    except errors.GatedRepoError:
        fix = "accept its license there and log in with `hf auth login`"
        raise ConfigError(f"{what} is gated on the hub; {fix}, or use a local directory") from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        missing = f"revision {revision}"
        if isinstance(error, errors.RepositoryNotFoundError):
            missing = "repository"
        rule = f"{what} is not a local path, and the hub has no such {missing}"
        login = "log in with `hf auth login` if it is private"
        fix = f"correct the name, {login}, or use a local directory"
        raise ConfigError(f"{rule}; {fix}") from None
    except Exception as error:  # OSError, requests or httpx, depending on huggingface_hub
        return error
    return None


def create_repository(repo: str) -> None:
    """Create a private model repository, before the export, so that errors appear early. Refuses a
    public one."""
    from huggingface_hub import HfApi, errors

    if not re.fullmatch(HUB_ID, repo):
        raise ConfigError(f"--push={repo} is not a name on the hub; use ORG/NAME")
    try:
        # An existing one keeps its visibility.
        HfApi().create_repo(repo, private=True, exist_ok=True)
        is_private = HfApi().model_info(repo).private
    except Exception as error:  # as in _ask_hub
        reason = str(error).strip().rpartition("\n")[2]
        fix = "log in with `hf auth login` and a token that may write there"
        if is_transient(error) or isinstance(error, errors.OfflineModeIsEnabled):
            upload = f"upload the export later with `hf upload {repo} OUT_DIR`"
            fix = f"connect to the hub, or leave out --push and {upload}"
        rule = f"--push={repo} cannot be created or written ({reason})"
        raise input_error(f"{rule}; {fix}", error) from None
    if not is_private:
        rule = f"--push={repo} is public, and exports are pushed only to private ones"
        upload = "leave out --push and upload the export with `hf upload`"
        raise ConfigError(f"{rule}; make it private on the hub, use another name, or {upload}")


def push_files(folder: Path, names: Iterable[str], repo: str, message: str) -> str:
    """Upload these files of `folder` in one commit, and return its URL."""
    from huggingface_hub import CommitOperationAdd, HfApi

    added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in names]
    try:
        commit = HfApi().create_commit(repo_id=repo, operations=added, commit_message=message)
        return commit.commit_url
    except Exception as error:  # as in _ask_hub
        rule = f"--push={repo} failed ({type(error).__name__}: {error})"
        fix = f"the export is in {folder}: upload it with `hf upload {repo} {folder}`"
        raise input_error(f"{rule}; {fix}", error) from None
