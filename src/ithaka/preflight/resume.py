"""Where a run resumes, and which settings may change then.

A resumed run may change any setting except train.run_dir, train.seed, and those that change tokens or the shapes of
weights. With another context or other steps, no document is skipped or repeated.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
from pathlib import Path

import torch.distributed as dist

from ithaka.checkpoint.files import find_checkpoint, find_corruption, lock_run_dir, read_state, report_unusable
from ithaka.config import (
    Config,
    ConfigError,
    explicit_settings,
    format_value,
    load_config,
    to_dict,
    with_absolute_paths,
)
from ithaka.dist.agree import gather_objects, raise_on_all_ranks
from ithaka.plan.shape import ModelShape, read_shape
from ithaka.preflight.run import Run


def find_resume_point(run_dir: Path, config: Config, shape: ModelShape) -> tuple[Path, dict[str, str]]:
    """The latest checkpoint, and a description of each setting that differs from the run's. Refuses changes that can be
    checked without the data; opening the data checks the others."""
    os.close(lock_run_dir(run_dir, fcntl.LOCK_SH))  # shared: under torchrun every rank does this
    before, checkpoint = load_config(run_dir / "config.yaml"), find_checkpoint(run_dir)
    if config.train.seed != before.train.seed:
        why = f"is not the run's {before.train.seed}, which determines the order of its data"
        raise ConfigError(f"train.seed={config.train.seed} {why}; leave it out")
    saved_model = run_dir / "model" / "config.json"
    if saved_model.is_file() and read_shape(saved_model) != shape.with_adapter(None):
        model = f"path={config.model.path}" if config.model.path else f"embedded={config.model.embedded}"
        why = f"differs in shape from the model of {run_dir}"
        raise ConfigError(f"model.{model} {why}; leave it out, or start a new run")
    return checkpoint, _changed_settings(before, config, checkpoint, run_dir)


def _changed_settings(before: Config, config: Config, checkpoint: Path, run_dir: Path) -> dict[str, str]:
    old = with_absolute_paths(to_dict(before.at(max(0, read_state(checkpoint)["step"] - 1))))
    # Each entry of a curriculum is planned anew, so config.yaml lacks the planned settings.
    known = explicit_settings(run_dir / "config.yaml") if before.curriculum else None
    changed = {}
    for section, values in with_absolute_paths(to_dict(config)).items():
        for key, value in (values or {}).items() if section != "curriculum" else ():
            name, was = f"{section}.{key}", (old[section] or {}).get(key)
            if value == was or name == "train.run_dir" or (known is not None and name not in known):
                continue
            if section == "adapter":
                raise ConfigError(f"{name}={format_value(value)} is not the run's {format_value(was)}; leave it out")
            changed[name] = f"{format_value(value)} (was {format_value(was)})"
    return changed


def use_intact_checkpoint(run: Run) -> Run:
    """`run`, resuming from its newest checkpoint whose checksums are right. The ranks share the work."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    while run.checkpoint is not None:
        reasons = gather_objects(raise_on_all_ranks(find_corruption, run.checkpoint, rank, num_ranks))
        if not any(reasons):
            break
        report_unusable(run.checkpoint, next(filter(None, reasons)))
        run = dataclasses.replace(run, checkpoint=find_checkpoint(run.run_dir, before=run.checkpoint))
    return run
