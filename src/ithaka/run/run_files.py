"""The files of a run: its directory, weights and data, before the start and on all ranks."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import re
import socket
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import ithaka
from ithaka.checkpoint import checkpoints
from ithaka.comm.agree import SharedError, gather_objects, raise_on_all_ranks
from ithaka.comm.rank import is_local_rank_0
from ithaka.config import (
    Config,
    ConfigError,
    check_output,
    embedded_model,
    read_yaml,
    shell_command,
)
from ithaka.run.validated import Run

if TYPE_CHECKING:
    from ithaka.data.stream import TrainData

# in RUN_DIR/tokens, which is removed after the run
TOKEN_FILES = (".tokens", ".part", ".failed", ".npy")
# a scheduler may write to the run directory before the run starts
LOG_FILES = (".log", ".out", ".err")
# read at both ends of each file; of at most this many files
FINGERPRINT_BYTES = 2**16
MAX_FINGERPRINT_FILES = 256


def check_weights(path: Path | None, name: str = "model.path", use: str = "train from") -> None:
    """Refuse a model directory without safetensors: training would silently start from random
    weights."""
    if path is None or not path.is_dir() or any(path.glob("*.safetensors")):
        return
    pickled = next(
        (file.name for file in sorted(path.iterdir()) if file.suffix in (".bin", ".pt", ".pth")),
        None,
    )
    problem = "has no weights; add them"
    if pickled:
        problem = f"has its weights in {pickled}, not in safetensors; convert them"
    raise ConfigError(
        f"{name}={path} {problem}, or use {path / 'config.json'} to {use} random weights"
    )


def check_base(run: Run, saved: Config) -> None:
    """Refuse to resume a run with another base or reference model, or another teacher. Its files
    may have moved. `saved`: the settings it had."""
    teacher = run.config.loss.teacher_path
    pinned = checkpoints.read_pins(run.run_dir).get("teacher")
    if pinned and fingerprint_weights(teacher) != pinned:
        rule = (
            f"has other weights, or another config.json, than the teacher that {run.run_dir} "
            "started with"
        )
        raise ConfigError(f"loss.teacher={teacher} {rule}; restore its files, or start a new run")
    if not run.needs_base:
        return
    original = saved.model.path
    path = run.config.model.path
    fingerprint = checkpoints.read_pins(run.run_dir).get("base") or fingerprint_weights(original)
    if fingerprint and fingerprint_weights(path) != fingerprint:
        model = "base" if run.config.adapter is not None else "reference"
        rule = (
            f"has other weights, or another config.json, than the {model} model that "
            f"{run.run_dir} started with"
        )
        raise ConfigError(
            f"model.path={path} {rule}; use the files that model.path={original} had, or start a "
            "new run"
        )


def fingerprint_weights(path: Path | None) -> str:
    """Hash of a model's weights and config.json, by the names, sizes and ends of files; "" if there
    are none."""
    names = ("*.safetensors", "*.safetensors.index.json", "config.json")
    model_files = [path] if path is not None and path.is_file() else []
    if path is not None and path.is_dir():
        model_files = sorted(file for name in names for file in path.glob(name))
    return _hash_files(model_files) if model_files else ""


def check_inputs(run: Run) -> int:
    """Refuse a context that the model's positions do not cover, and unusable data. Returns the
    bytes of the data, which the first rank of each node checks; 0 on the others."""
    # Late: they import transformers, and the cheap checks come first.
    from ithaka.data.held_out import check_paths
    from ithaka.data.open import check_data
    from ithaka.data.tokenizer import TOKENIZER_FILES, load_tokenizer

    if is_local_rank_0():
        check_paths(run.config.data)

    # Late: they import PreTrainedModel, which takes seconds.
    from ithaka.model.build import read_hf_config

    model = run.config.model
    data = run.config.data
    optim = run.config.optim
    config = read_hf_config(model.path or embedded_model(model.embedded), model.rope, data.context)
    if optim.lr_factors:
        from ithaka.weights.adapters import trained_names

        optim.find_lr_factors(trained_names(config, run.config.adapter))
    teacher = run.config.loss.teacher_path
    if teacher is not None and any((teacher / file).is_file() for file in TOKENIZER_FILES):
        theirs, ours = (
            load_tokenizer(*each).hf.get_vocab()
            for each in ((None, teacher), (data.tokenizer, model.path))
        )
        if different := [word for word, i in ours.items() if theirs.get(word, i) != i]:
            rule = (
                f"has another vocabulary: {different[0]!r} is token {theirs[different[0]]}, "
                f"not {ours[different[0]]}"
            )
            raise ConfigError(
                f"loss.teacher={teacher} {rule}; use a teacher with the same tokenizer"
            )
    return check_data(data, run.shape.vocab, model.path, run.datasets) if is_local_rank_0() else 0


def check_run_dir(run_dir: Path, auto: bool, force: bool) -> None:
    """Refuse to start a run among other files, which it might overwrite (such as report.html). A
    run that ended before its first step starts again in its own directory; with --resume auto, also
    one that ended before its first checkpoint."""
    checkpoints.check_not_locked(run_dir)
    config_file = run_dir / "config.yaml"
    own_files = {path.name for path in run_dir.glob("*") if path.suffix in LOG_FILES}
    own_files |= {"hang", checkpoints.LOCK_FILE, ".config.yaml.tmp"}
    if config_file.exists() and not auto and _has_progress(run_dir):
        resume = shell_command("train", "--resume", run_dir)
        fix = f"choose another --run-dir, or continue it: {resume}"
        raise ConfigError(f"train.run_dir={run_dir} already holds a run; {fix}")
    if all(path.suffix in TOKEN_FILES for path in run_dir.glob("tokens/*")):
        own_files.add("tokens")
    if config_file.is_file() and "format" in read_yaml(config_file):  # not a user's file
        own_files = {path.name for path in run_dir.iterdir()}
    check_output("train.run_dir", run_dir, force, folder=True, own=own_files)


def _has_progress(run_dir: Path) -> bool:
    """Whether the run has a checkpoint or a completed step."""
    metrics = run_dir / "metrics.jsonl"
    lines = (
        metrics.read_text(encoding="utf-8", errors="replace").splitlines()
        if metrics.is_file()
        else []
    )
    return checkpoints.newest_checkpoint(run_dir) is not None or any(
        re.search(r'"loss": ?[\d-]', line) for line in lines
    )


# ---- all ranks


def check_same_inputs(config: Config, data: TrainData, tokenizer: str) -> None:
    """Refuse ranks with different data, model files or package versions. Collective."""
    fingerprints = raise_on_all_ranks(_fingerprints, config, data, tokenizer)
    (_, first), *rest = gather_objects((socket.gethostname(), fingerprints))
    for rank, (host, own) in enumerate(rest, 1):
        for name, value in first.items():
            if name in own and own[name] != value:
                difference = (
                    f"{name} is {value} on rank 0 and {own.get(name)} on rank {rank} ({host})"
                )
                raise SharedError(
                    f"the ranks differ: {difference}; give all nodes the same files and packages"
                )


def _fingerprints(config: Config, data: TrainData, tokenizer: str) -> dict[str, str]:
    versions = {
        "data": data.fingerprint(),
        "tokenizer": tokenizer,
        "python": platform.python_version(),
    }
    versions["ithaka"] = ithaka.__version__
    for name in ("torch", "transformers", "tokenizers", "peft", "datasets"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    if not is_local_rank_0():  # the files of a node are read once
        return versions
    model = config.model.path
    streams = [stream for stream in (data.stream, data.validation) if stream is not None]
    model_files = [model] if model else []
    if model is not None and model.is_dir():
        model_files = sorted(model.glob("[!.]*"))
    shards = [shard for stream in streams for source in stream.sources for shard in source.shards]
    data_files = dict.fromkeys(path for shard in shards for path in shard.paths)
    return versions | {"model.path": _hash_files(model_files), "data.path": _hash_files(data_files)}


def _hash_files(paths: Iterable[Path]) -> str:
    """Hash names and sizes, and for the first files also their beginning and end."""
    digest = hashlib.sha256()
    for number, path in enumerate(path for path in paths if path.is_file()):
        num_bytes = path.stat().st_size
        digest.update(f"{path.name} {num_bytes}\n".encode())
        if number < MAX_FINGERPRINT_FILES:
            with path.open("rb") as file:
                digest.update(file.read(FINGERPRINT_BYTES))
                file.seek(max(0, num_bytes - FINGERPRINT_BYTES))
                digest.update(file.read())
    return digest.hexdigest()[:12]
