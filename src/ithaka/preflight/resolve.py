"""From a config file, changes to it, or a run to resume, to the configuration of the run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ithaka import launch
from ithaka.config import CPU_DEFAULT, GPU_DEFAULT, Config, ConfigError, explicit_settings, load_config
from ithaka.model.adapters import read_stored_settings
from ithaka.preflight.checks import check_path

AUTO = Path("auto")  # --resume auto: resume in train.run_dir if it has a checkpoint, else start there


def resolve(
    file: Path | None, changes: list[str], resume: Path | None = None, run_dir: Path | None = None, name: str = ""
) -> Config:
    """The run's settings, with its run directory (by default runs/`name`) and the length of its learning-rate
    schedule."""
    check_path("--resume ", None if resume == AUTO else resume)
    if resume is not None and resume != AUTO:
        _check_resumed(file, changes, resume, run_dir)
        file, run_dir = resume / "config.yaml", resume
        config = load_config(file, [f"optim.decay_steps={_resumed_decay_steps(file)}", *changes])
    else:
        config = load_config(file, changes, default_settings(file, changes))
        run_dir = run_dir or config.train.run_dir
        if run_dir is None and resume == AUTO:
            fix = "set it in the file, or use --run-dir DIR"
            raise ConfigError(f"--resume auto needs train.run_dir, where it looks for the run; {fix}")
        run_dir = run_dir or Path("runs") / name
        check_path("train.run_dir=", run_dir)
        saved = run_dir / "config.yaml"
        if resume == AUTO and config.optim.decay_steps is None and saved.is_file():
            changes = [*changes, f"optim.decay_steps={_resumed_decay_steps(saved)}"]
            config = load_config(file, changes, default_settings(file, changes))
    if config.adapter is not None:
        adapter = read_stored_settings(config.adapter, explicit_settings(file, changes))
        config = dataclasses.replace(config, adapter=adapter)
    explicit = explicit_settings(None if run_dir == resume else file, changes)
    if {"train.steps", "train.epochs"} <= explicit and config.train.epochs is not None:
        raise ConfigError(f"train.epochs={config.train.epochs} and train.steps both set the length; leave one out")
    config.optim.check_schedule()
    decay_steps = config.optim.decay_steps or (config.train.steps if config.train.epochs is None else None)
    optim = dataclasses.replace(config.optim, decay_steps=decay_steps)
    return dataclasses.replace(config, optim=optim, train=dataclasses.replace(config.train, run_dir=run_dir))


def _check_resumed(file: Path | None, changes: list[str], resume: Path, run_dir: Path | None) -> None:
    moved = "--set train.run_dir" if "train.run_dir" in explicit_settings(None, changes) else ""
    conflict = f"config={file}" if file else f"--run-dir {run_dir}" if run_dir else moved
    if conflict:
        raise ConfigError(f"{conflict} conflicts with --resume {resume}; leave it out, and change settings with --set")
    if not (resume / "config.yaml").is_file():
        raise ConfigError(f"--resume {resume} has no config.yaml; use the directory of an earlier run")


def _resumed_decay_steps(file: Path) -> str:
    """optim.decay_steps of a resumed run. A cosine that had not begun ends with the longer run."""
    before = load_config(file)
    end = before.optim.decay_steps or before.train.steps
    return str(end) if end > before.optim.warmup_steps else "null"


def default_settings(file: Path | None, changes: list[str]) -> dict[str, dict[str, Any]]:
    """Defaults for the embedded models; a user's own model starts from the plain defaults."""
    if file is not None or any(change.replace(" ", "").startswith("model.path=") for change in changes):
        return {}
    return GPU_DEFAULT if launch.num_gpus() else CPU_DEFAULT
