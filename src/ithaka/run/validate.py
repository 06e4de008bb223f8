"""Checks of settings, directories and inputs before any process starts, and of what the ranks must
have in common."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import re
import socket
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import ithaka
from ithaka.attention.kernels import KERNELS
from ithaka.checkpoint import checkpoints
from ithaka.comm.agree import SharedError, gather_objects, raise_on_all_ranks
from ithaka.comm.rank import is_local_rank_0
from ithaka.config import (
    Config,
    ConfigError,
    check_output,
    embedded_model,
    explicit_settings,
    format_value,
    input_error,
    load_config,
    shell_command,
    to_yaml,
)
from ithaka.exits import TransientError
from ithaka.layout import SETTINGS, check_fixed, check_optimizer, fixed_settings, format_choices
from ithaka.plan.shape import ModelShape
from ithaka.run.resolve import Run

if TYPE_CHECKING:
    from ithaka.data.stream import TrainData

# Sections of every run's config.yaml. A file that a user wrote rarely has them all.
SAVED_SECTIONS = {"model", "data", "parallel", "memory", "attention", "optim", "train", "profile"}
# in RUN_DIR/tokens, which is removed after the run
TOKEN_FILES = (".tokens", ".part", ".failed", ".npy")
# a scheduler may write to the run directory before the run starts
LOG_FILES = (".log", ".out", ".err")
# read at both ends of each file; of at most this many files
FINGERPRINT_BYTES = 2**16
MAX_FINGERPRINT_FILES = 256


def check_settings(config: Config, num_ranks: int, shape: ModelShape) -> None:
    """Refuse settings that no layout can have, that have no effect, or that need a missing
    package."""
    memory = config.memory
    attention = config.attention
    values = {name: attrgetter(name)(config) for name in SETTINGS} | {
        "parallel.cp": config.parallel.cp_of(num_ranks)
    }
    fixed = fixed_settings(values, shape.num_layers, num_ranks)
    check_fixed(fixed, shape.heads, shape.num_layers, num_ranks, has_rings=not shape.why_no_ring)
    if memory.disk_path is not None and "disk" not in (memory.offload, memory.attention_offload):
        rule = "has no effect without memory.offload=disk; leave it null"
        raise ConfigError(f"memory.disk_path={memory.disk_path} {rule}")
    kernels = ("auto", *KERNELS)
    if attention.kernel not in kernels:  # only the ranks, which own the devices, can try it
        raise ConfigError(
            f"attention.kernel={attention.kernel} is unknown; use {format_choices(kernels)}"
        )
    blocks = attention.block_q, attention.block_kv
    if blocks.count(None) == 1:
        raise ConfigError(f"attention.block_q, block_kv={blocks} go together; set both or neither")
    evaluate = config.evaluate
    if evaluate.data is not None and not evaluate.every:
        rule = "has no effect with evaluate.every=0"
        raise ConfigError(
            f"evaluate.data={evaluate.data} {rule}; set evaluate.every, or leave it out"
        )
    check_optimizer(config)
    # rehearsals and traces, which are not checked here, step without a change
    if config.optim.lr == 0:
        raise ConfigError("optim.lr=0 trains nothing; use more than 0, such as 3e-4")
    _check_extras(config)
    _check_validation(config)
    train = config.train
    train.import_callbacks()
    config.loss.import_function()
    # A wandb folder in the working directory is found too, but has no origin.
    missing = " ".join(
        name for name in train.track if getattr(find_spec(name), "origin", None) is None
    )
    if missing:
        raise ConfigError(
            f"train.track={missing} needs a package: pip install {missing}, or leave it out"
        )


def _check_extras(config: Config) -> None:
    if config.optim.name == "adamw8bit" and find_spec("torchao") is None:
        raise ConfigError(
            "optim.name=adamw8bit needs an extra: pip install -e '.[adamw8bit]', or use adamw"
        )
    if config.adapter is not None and find_spec("peft") is None:
        raise ConfigError(
            "adapter needs an extra: pip install -e '.[adapter]', or leave the section out"
        )
    if config.adapter is not None and config.model.resize_embeddings:
        raise ConfigError(
            "model.resize_embeddings=true cannot be used with an adapter; set it to false"
        )


def _check_validation(config: Config) -> None:
    """Refuse settings that have no effect without validation."""
    train = config.train
    need_validation = {"patience": train.patience} if not train.validate_every else {}
    has_held_out = config.data.validation_path is not None or config.data.validation_fraction > 0
    if not train.validate_sequences or not has_held_out:
        need_validation = {"keep_best": train.keep_best, "patience": train.patience}
    idle = [
        f"train.{name}={format_value(value)}" for name, value in need_validation.items() if value
    ]
    if idle:
        fix = "set train.validate_every and validate_sequences"
        fix += "" if has_held_out else ", and data.validation_path or data.validation_fraction"
        raise ConfigError(f"{format_choices(idle)} has no effect without validation; {fix}")


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


def check_base(run: Run) -> None:
    """Refuse to resume a run with another base or reference model, or another teacher. Its files
    may have moved."""
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
    original = load_config(run.run_dir / "config.yaml").model.path
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
    from ithaka.data.open import check_data
    from ithaka.data.tokenizer import TOKENIZER_FILES, load_tokenizer
    from ithaka.model.build import read_hf_config
    from ithaka.weights.adapters import trained_names

    model = run.config.model
    data = run.config.data
    optim = run.config.optim
    config = read_hf_config(model.path or embedded_model(model.embedded), model.rope, data.context)
    if optim.lr_factors:
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
    if (
        config_file.is_file()
        and {name.partition(".")[0] for name in explicit_settings(config_file)} >= SAVED_SECTIONS
    ):
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


def check_path(option: str, path: Path | None) -> None:
    """Refuse a path that the system cannot look up: a symlink loop, a name that is too long, or a
    directory without permission. It need not exist."""
    try:
        if path is not None:
            path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise input_error(
            f"{option}{path} cannot be used ({error.strerror}); use another directory", error
        ) from None


# ---- all ranks


def check_ranks_agree(configs: Sequence[Config], newest: Sequence[Path | None] = ()) -> None:
    """Refuse ranks with different settings or checkpoints: their collectives would deadlock. Under
    torchrun every node reads its own files, and a shared file system may show a new checkpoint
    late."""
    for rank, path in enumerate(newest):
        if path != newest[0]:
            difference = (
                f"rank 0 finds {newest[0] or 'no checkpoint'} and rank {rank} {path or 'none'}"
            )
            fix = "start again, or put it on a file system that all nodes share"
            raise TransientError(f"train.run_dir={configs[0].train.run_dir}: {difference}; {fix}")
    same = repr(configs[0])
    lines_0 = to_yaml(configs[0]).splitlines()
    for rank, config in enumerate(configs):
        if repr(config) == same:  # YAML of each of 1,000 ranks would take seconds
            continue
        for line_0, line in zip(lines_0, to_yaml(config).splitlines(), strict=False):
            if line != line_0:
                difference = f"rank 0 has `{line_0.strip()}` and rank {rank} `{line.strip()}`"
                raise ConfigError(f"{difference}; give every node the same settings")


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
