"""Checkpoints on disk: find, verify, publish, prune.

    RUN_DIR/model/                      config, generation config, tokenizer: for an export
    RUN_DIR/checkpoints/step-00000100/  torch.distributed.checkpoint files and state.json
    RUN_DIR/latest                      one line, the name of the newest complete checkpoint
    RUN_DIR/lock                        locked while a run writes; one line, its process and host
    RUN_DIR/pins.json                   what the run started with: commits of names on the hub, and
                                        the base model's fingerprint

A checkpoint is written under a name that starts with a dot, synced, renamed, and only then named by
`latest`. If its step was saved before, the older copy is first renamed to step-00000100-replaced,
where `find_checkpoint` finds it, and deleted last. So there is a complete checkpoint whenever the
run is killed. All ranks must see the same RUN_DIR. state.json has a checksum of every file,
verified before a run resumes, counts as finished, or is exported; if a checkpoint is damaged, the
previous one is used.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ithaka.comm.agree import ask_rank_0, gather_objects, raise_on_all_ranks
from ithaka.comm.rank import is_rank_0, rank_and_size
from ithaka.config import ConfigError, sync_directory, write_atomic
from ithaka.exits import TransientError, is_transient
from ithaka.layout import format_choices

CHECKPOINT_FORMAT = 1
SHARED_FS_DELAY_S = 60.0  # within which a shared file system must show one node's files to another
STATE_FILE = "state.json"
PINS_FILE = "pins.json"
LOCK_FILE = "lock"
step_name = "step-{:08d}".format
REPLACED = "-replaced"  # ends the name of a checkpoint while a new one of its step takes its name
CHECKPOINT_NAME = re.compile(rf"step-(\d+)({REPLACED})?")


def lock_run_dir(run_dir: Path) -> int | None:
    """Lock the run directory until the returned descriptor is closed or the process ends.
    TransientError if another run holds the lock, on any node. If the file system has no locks, warn
    and return None.

    This is a POSIX lock on a file: NFS and Lustre may keep those of `flock` local to a node.
    Closing any other descriptor of the file would release it, so this process must not open the
    file again."""
    try:
        file = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        _try_lock(file, run_dir, fcntl.LOCK_EX)
    except OSError as error:
        rule = "so a second run in it would not be noticed; start only one at a time"
        warnings.warn(
            f"train.run_dir={run_dir} cannot be locked ({error.strerror}), {rule}", stacklevel=2
        )
        return None
    with contextlib.suppress(OSError):  # only for the other run's message
        os.ftruncate(file, 0)
        os.pwrite(file, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return file


def check_not_locked(run_dir: Path) -> None:
    """TransientError if another run holds the lock. Several processes may check at once, but not
    one that holds it."""
    with contextlib.suppress(OSError):  # there is no such file, or the file system has no locks
        file = os.open(run_dir / LOCK_FILE, os.O_RDONLY)
        _try_lock(file, run_dir, fcntl.LOCK_SH)
        os.close(file)


def _try_lock(file: int, run_dir: Path, kind: int) -> None:
    """Close the descriptor if this fails."""
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        holder = ""
        with contextlib.suppress(OSError):
            holder = os.pread(file, 300, 0).decode(errors="replace").strip()
        os.close(file)
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        raise TransientError(
            f"train.run_dir={run_dir} is in use by another run ({holder or 'unknown process'}); "
            "wait until it ends, or stop it"
        ) from None


# ---- publish


def publish(
    temporary: Path, final: Path, state: dict[str, Any], files: dict[str, tuple[int, str]]
) -> None:
    """Turn the files in `temporary` into the checkpoint `final`, and name it in `latest`. `files`:
    size and checksum by name."""
    _, world_size = rank_and_size()
    record = {"format": CHECKPOINT_FORMAT, "world_size": world_size, **state}
    record["file_bytes"] = {name: num_bytes for name, (num_bytes, _) in files.items()}
    record["checksums"] = {name: digest for name, (_, digest) in files.items()}
    record["checksums"][STATE_FILE] = _state_checksum(record)
    write_atomic(temporary / STATE_FILE, json.dumps(record, indent=1))
    replaced = final.with_name(final.name + REPLACED)
    if final.exists():  # a run resumed from an earlier step, or skipped batches since the last save
        os.rename(final, replaced)  # after a kill right here, it is the only copy
    os.rename(temporary, final)
    sync_directory(final.parent)
    write_atomic(final.parents[1] / "latest", final.name + "\n")
    shutil.rmtree(replaced, ignore_errors=True)


def restore_names(root: Path) -> None:
    """Finish what a kill interrupted in `publish`. Only for the run that saves to `root`."""
    for replaced in root.glob(f"step-*{REPLACED}"):
        final = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.rename(replaced, final)


def prune(root: Path, step: int, keep_last: int, best: int = 0) -> None:
    """Delete old checkpoints except the one of step `best` or, if it was not saved, the previous
    best. Checkpoints after `step` are kept: the run was resumed from an earlier step, and the user
    may still want them. One that cannot be deleted is reported, and the save still counts."""
    paths = [path for path in reversed(list_checkpoints(root)) if step_of(path) <= step]
    best_path = root / step_name(best)
    if best and best_path not in paths:
        best_path = max(filter(_was_best, paths), default=best_path)
    for path in paths[:-keep_last]:
        try:
            if path != best_path:
                shutil.rmtree(path)
        except OSError as error:
            print(
                f"Old checkpoint {path} cannot be deleted ({error}); the run continues",
                file=sys.stderr,
                flush=True,
            )


def _was_best(path: Path) -> bool:
    """Whether the validation loss was the lowest so far when this checkpoint was saved."""
    try:
        state = read_state(path)
        best = state["best"]
        return best is not None and best[1] == state["step"]
    except (OSError, ValueError, LookupError):  # damaged
        return False


def is_visible(file: Path, num_bytes: int) -> bool:
    """Wait until `file` has its size: a shared file system may show other nodes' files late."""
    deadline = time.monotonic() + SHARED_FS_DELAY_S
    while not (file.is_file() and file.stat().st_size == num_bytes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


new_hash = hashlib.blake2b


class Hash(Protocol):
    def hexdigest(self) -> str: ...


def format_hash(digest: Hash) -> str:
    return digest.hexdigest()[:32]


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return format_hash(hashlib.file_digest(file, new_hash))


def _state_checksum(state: dict[str, Any]) -> str:
    """Checksum of everything in state.json except this checksum."""
    checksums = {name: digest for name, digest in state["checksums"].items() if name != STATE_FILE}
    text = json.dumps({**state, "checksums": checksums})
    return format_hash(new_hash(text.encode()))


# ---- find and verify


def list_checkpoints(root: Path) -> list[Path]:
    """The checkpoints in `root`, the newest first."""
    return sorted(filter(_order, root.glob("step-*")), key=_order, reverse=True)


def step_of(path: Path) -> int:
    return _order(path)[0]


def _order(path: Path) -> tuple[int, ...]:
    """Greater for a newer checkpoint: by step, and a copy that is being replaced comes before the
    new one. () for another name."""
    match = CHECKPOINT_NAME.fullmatch(path.name)
    return (int(match[1]), match[2] is None) if match else ()


def read_state(path: Path) -> dict[str, Any]:
    return json.loads((path / STATE_FILE).read_text(encoding="utf-8"))


def read_best(state: dict[str, Any]) -> tuple[tuple[float, int] | None, int]:
    """The lowest validation loss and its step, if any, and how many later ones were not lower."""
    best = state["best"]
    return best and (best[0], best[1]), state["stale"]


def write_pins(run_dir: Path, commits: Mapping[str, str], base: str, teacher: str = "") -> None:
    pins = {"commits": dict(commits), "base": base, "teacher": teacher}
    write_atomic(run_dir / PINS_FILE, json.dumps(pins, indent=1))


def read_pins(run_dir: Path) -> dict[str, Any]:
    """Contents of pins.json; {} if it was removed."""
    file = run_dir / PINS_FILE
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ConfigError(
            f"{file} is damaged ({error}); restore it, or remove it to give up its pins"
        ) from None


def find_problem(path: Path) -> str | None:
    """Reason why the checkpoint at `path` cannot be used, or None. Checks state.json, file sizes
    and torch's index; `find_corruption` reads the files."""
    from ithaka.checkpoint.safe_load import SafeReader  # late: it imports torch

    try:
        state = read_state(path)
        number = state.get("format")
        if number != CHECKPOINT_FORMAT:
            raise ConfigError(
                f"checkpoint {path} cannot be used: it has format {number}, this version reads "
                f"{CHECKPOINT_FORMAT}; use the ithaka that wrote it"
            )
        if state["checksums"][STATE_FILE] != _state_checksum(state):
            return f"{STATE_FILE} is corrupt"
        for name, num_bytes in state["file_bytes"].items():
            if (path / name).stat().st_size != num_bytes:
                return f"{name} is truncated: it should have {num_bytes} bytes"
        SafeReader(path).read_metadata()
    except ConfigError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        return _describe_damage(path, error)
    return None


def find_corruption(path: Path, share: int = 0, num_shares: int = 1) -> str | None:
    """Which file has a wrong checksum, or None. Reads only every `num_shares`-th file, so that
    ranks can share the work."""
    try:
        checksums = sorted(read_state(path)["checksums"].items())
        for name, digest in checksums[share::num_shares]:
            if name != STATE_FILE and checksum(path / name) != digest:
                return f"{name} is corrupt"
    except Exception as error:  # another run in this directory may be removing it
        return _describe_damage(path, error)
    return None


def _describe_damage(path: Path, error: Exception) -> str:
    """TransientError if the storage failed: the checkpoint may be intact."""
    if is_transient(error):
        raise TransientError(
            f"checkpoint {path} cannot be read at the moment ({error}); check its disk, and start "
            "again"
        ) from error
    return f"{type(error).__name__}: {error}"


def find_checkpoint(run_dir: Path, before: Path | None = None, quiet: bool = False) -> Path:
    """The newest usable checkpoint up to RUN_DIR/latest, or before `before`; unless `quiet`, rank 0
    reports those that are not. ConfigError if there is none."""
    if not run_dir.is_dir():
        raise ConfigError(
            f"run directory {run_dir} does not exist; use the directory of an earlier run"
        )
    latest = latest_name(run_dir)
    candidates = list_checkpoints(run_dir / "checkpoints")
    if before is not None:
        candidates = [path for path in candidates if _order(path) < _order(before)]
    elif latest:
        named = run_dir / "checkpoints" / latest
        candidates = [path for path in candidates if step_of(path) <= step_of(named)]
        if step_of(named) not in map(step_of, candidates):
            candidates.insert(0, named)
    for path in candidates:
        if (reason := find_problem(path)) is None:
            return path
        if not quiet:
            report_unusable(path, reason)
    if not candidates and not (run_dir / "config.yaml").is_file():
        raise ConfigError(
            f"run directory {run_dir} has no config.yaml; use the directory of an earlier run"
        )
    other = "other " if before is not None else ""
    fix = "start a new run"
    if not other and not candidates:
        fix = "wait for one, or start a new run: here with --resume auto"
    raise ConfigError(f"run directory {run_dir} has no {other}usable checkpoint; {fix}")


def find_intact_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`, or the newest one before it, whose checksums are right. Collective:
    the ranks share the work."""
    rank, num_ranks = rank_and_size()
    while True:
        reason = raise_on_all_ranks(find_corruption, path, rank, num_ranks)
        reasons = list(filter(None, gather_objects(reason)))
        if not reasons:
            return path
        report_unusable(path, reasons[0])
        path = ask_rank_0(find_checkpoint, path.parents[1], before=path)


def find_checkpoint_of_step(run_dir: Path, step: int) -> Path:
    """The checkpoint of `step`. ConfigError if it does not exist or cannot be used."""
    paths = list_checkpoints(run_dir / "checkpoints")
    path = next((path for path in paths if step_of(path) == step), None)
    if path is None:
        choices = format_choices(sorted({step_of(path) for path in paths})) or "another run"
        raise ConfigError(f"--step={step}: {run_dir} has no such checkpoint; use {choices}")
    if reason := find_problem(path) or find_corruption(path):
        raise ConfigError(f"--step={step}: {path} cannot be used: {reason}; use another step")
    return path


def report_unusable(path: Path, reason: str) -> None:
    if is_rank_0():
        print(
            f"Checkpoint {path} cannot be used: {reason}. Using the previous one.",
            file=sys.stderr,
            flush=True,
        )


def newest_checkpoint(run_dir: Path | None) -> Path | None:
    """The complete checkpoint of the latest step, not verified."""
    if run_dir is None:
        return None
    return next(iter(list_checkpoints(run_dir / "checkpoints")), None)


def latest_name(run_dir: Path) -> str:
    """The checkpoint that RUN_DIR/latest names; "" if it names none."""
    file = run_dir / "latest"
    name = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
    return name if re.fullmatch(r"step-\d+", name) else ""


def describe_last(run_dir: Path) -> str:
    """A sentence for messages about a run that ended."""
    try:
        name = latest_name(run_dir)
    except OSError as error:  # must not hide why the run ended
        return f"{run_dir / 'latest'} cannot be read ({error})."
    if not name:
        return "There is no checkpoint yet."
    return f"The last checkpoint is {run_dir / 'checkpoints' / name}."
