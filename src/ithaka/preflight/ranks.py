"""Checks that all ranks have the same settings, checkpoints, files and packages."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import socket
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import ithaka
from ithaka.config import Config, ConfigError, to_yaml
from ithaka.dist.agree import SharedError, gather_objects
from ithaka.exits import TransientError

if TYPE_CHECKING:
    from ithaka.data.stream import TrainData

FINGERPRINT_BYTES, MAX_FINGERPRINT_FILES = 2**16, 256  # read at both ends of each file; of so many files


def check_ranks_agree(configs: Sequence[Config], newest: Sequence[Path | None] = ()) -> None:
    """Refuse ranks with different settings or checkpoints: their collectives would deadlock. Under torchrun every node
    reads its own files, and a shared file system may show a new checkpoint late."""
    for rank, path in enumerate(newest):
        if path != newest[0]:
            difference = f"rank 0 finds {newest[0] or 'no checkpoint'} and rank {rank} {path or 'none'}"
            fix = "start again, or put it on a file system that all nodes share"
            raise TransientError(f"train.run_dir={configs[0].train.run_dir}: {difference}; {fix}")
    first, *others = (to_yaml(config).splitlines() for config in configs)
    for rank, lines in enumerate(others, 1):
        for line_0, line in zip(first, lines, strict=False):
            if line != line_0:
                difference = f"rank 0 has `{line_0.strip()}` and rank {rank} `{line.strip()}`"
                raise ConfigError(f"{difference}; give every node the same settings")


def check_same_inputs(config: Config, data: TrainData, tokenizer: str) -> None:
    """Refuse ranks with different data, model files or package versions. Collective."""
    (_, first), *others = gather_objects((socket.gethostname(), _fingerprints(config, data, tokenizer)))
    for rank, (host, own) in enumerate(others, 1):
        for name, value in first.items():
            if own.get(name) != value:
                difference = f"{name} is {value} on rank 0 and {own.get(name)} on rank {rank} ({host})"
                raise SharedError(f"the ranks differ: {difference}; give all nodes the same files and packages")


def _fingerprints(config: Config, data: TrainData, tokenizer: str) -> dict[str, str]:
    found = {"data": data.fingerprint(), "tokenizer": tokenizer, "python": platform.python_version()}
    found["ithaka"] = ithaka.__version__
    for name in ("torch", "transformers", "tokenizers", "peft", "datasets"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    model, streams = config.model.path, [stream for stream in (data.stream, data.validation) if stream is not None]
    model_files = sorted(model.glob("[!.]*")) if model is not None and model.is_dir() else [model] if model else []
    shards = [shard for stream in streams for source in stream.sources for shard in source.shards]
    data_files = dict.fromkeys(path for shard in shards for path in shard.paths)
    return found | {"model.path": _hash_files(model_files), "data.path": _hash_files(data_files)}


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
