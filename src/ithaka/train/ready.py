"""From what a run was told to every setting decided and checked, before any rank starts or anything is written.

Under torchrun every rank does this, and what one of them is refused for, all are.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ithaka.config import CPU_DEFAULT, GPU_DEFAULT, Config, ConfigError, given, load
from ithaka.plan.search import Plan
from ithaka.train import launch
from ithaka.train.check import check_run
from ithaka.train.planned import Machine, check_ranks_agree, check_still_fits, machine_here, planned
from ithaka.train.resume import settings_of_run
from ithaka.train.together import gathered, together


@dataclass(frozen=True)
class Request:
    """What the command was told: a file of settings and changes to them, or a run to go on with."""

    file: Path | None
    changes: list[str]
    resume: Path | None = None
    run_dir: Path | None = None


@dataclass(frozen=True)
class Ready:
    config: Config
    num_ranks: int
    plan: Plan | None  # the planner's, where it decided anything


def make_ready(request: Request) -> Ready:
    asked, machine = together(_asked, request)
    everyone = gathered((asked, machine))
    return together(_decided, request, everyone)


def _asked(request: Request) -> tuple[Config, Machine]:
    """What this rank was told, and what it has to do it with."""
    config = _resolve(request)
    num_ranks = launch.decide_ranks(config.parallel.ranks, launch.num_gpus())
    return config, machine_here(config, num_ranks, launch.gpu())


def _decided(request: Request, everyone: Sequence[tuple[Config, Machine]]) -> Ready:
    """The same on every rank, from what they all were told and have. A run that goes on keeps what was decided."""
    configs, machines = [config for config, _ in everyone], [machine for _, machine in everyone]
    check_ranks_agree(configs)
    config, plan = configs[0], None
    num_ranks = launch.decide_ranks(config.parallel.ranks, launch.num_gpus())
    if request.resume is None:
        told = given(request.file, request.changes, _defaults(request))
        config, plan = planned(config, told, num_ranks, machines)
    check_run(config, num_ranks, request.resume)
    if request.resume is not None:
        check_still_fits(config, given(None, request.changes), num_ranks, machines)
    return Ready(config, num_ranks, plan)


def _resolve(request: Request) -> Config:
    """The configuration of the run, with its run directory and the length of its learning-rate schedule set."""
    if request.resume is None:
        config = load(request.file, request.changes, _defaults(request))
        run_dir = request.run_dir or config.train.run_dir or _default_run_dir()
    else:
        config, run_dir = _resumed(request, request.resume), request.resume
    optim = dataclasses.replace(config.optim, decay_steps=config.optim.decay_steps or config.train.steps)
    return dataclasses.replace(config, optim=optim, train=dataclasses.replace(config.train, run_dir=run_dir))


def _defaults(request: Request) -> dict[str, dict[str, Any]]:
    """Made for the embedded models: a model of the user's own starts from the plain defaults instead."""
    own_model = any(change.replace(" ", "").startswith("model.path=") for change in request.changes)
    if request.file is not None or own_model:
        return {}
    return GPU_DEFAULT if launch.num_gpus() else CPU_DEFAULT


def _resumed(request: Request, resume: Path) -> Config:
    if request.file is not None:
        raise ConfigError(f"config={request.file} cannot be given with --resume {resume}; change settings with --set")
    if request.run_dir is not None:
        raise ConfigError(f"--run-dir {request.run_dir} cannot be given with --resume {resume}; leave it out")
    if "train.run_dir" in given(None, request.changes):
        raise ConfigError(f"--set train.run_dir cannot be given with --resume {resume}; leave it out")
    if not (resume / "config.yaml").is_file():
        raise ConfigError(f"--resume {resume} holds no config.yaml; give the directory of an earlier run")
    before = settings_of_run(resume)
    kept = f"optim.decay_steps={before.optim.decay_steps or before.train.steps}"
    return load(resume / "config.yaml", [kept, *request.changes])


def _default_run_dir() -> Path:
    """A new name per run, the same on every rank: under torchrun it comes from the job, not the clock."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    job = os.environ["TORCHELASTIC_RUN_ID"]
    return Path("runs") / f"torchrun-{job if job != 'none' else os.environ['MASTER_PORT']}"
