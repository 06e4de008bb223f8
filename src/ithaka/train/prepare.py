"""Build or resume a run: everything that can fail before the first step and before anything is written."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil

import torch
import yaml

from ithaka.attention.kernels import agree_on_kernel
from ithaka.checkpoint import files, save
from ithaka.config import CONFIG_FORMAT, ConfigError, to_dict, with_absolute_paths
from ithaka.data.open import data_facts, epoch_steps
from ithaka.dist.agree import SharedError, gather_objects, raise_on_all_ranks
from ithaka.dist.mesh import make_mesh, start_process_group
from ithaka.exits import TransientError
from ithaka.preflight.checks import check_same_inputs
from ithaka.preflight.run import Run, can_save_in_background
from ithaka.train.console import status
from ithaka.train.trainer import Trainer, compute_dtype


def prepare(run: Run, trains: bool = True) -> Trainer:
    """Build the trainer and run every check that can fail before anything is written; errors reach all ranks."""
    start_process_group()
    if run.checkpoint is not None:
        run = dataclasses.replace(run, checkpoint=files.find_intact_checkpoint(run.checkpoint))
        if run.last_step < run.config.start:
            way = "remove the damaged ones, and resume again"
            raise SharedError(f"checkpoint {run.checkpoint} is of an earlier entry of curriculum; {way}")
    mesh = make_mesh(run.layout.cp, ring=run.layout.ring, replicas=run.layout.replicas)
    _set_determinism(run.config.train.deterministic)
    if run.layout.kernel == "auto":  # one given by name is refused with the rest, if it does not work
        kernel = agree_on_kernel("auto", mesh.device, compute_dtype(run), run.shape.head_dim)
        run = dataclasses.replace(run, layout=dataclasses.replace(run.layout, kernel=kernel))
    trainer = raise_on_all_ranks(Trainer, run, mesh)
    settings = run.config.train
    keeps_best = settings.keep_best or settings.patience > 0
    trainer.saver = save.Saver(run.run_dir, settings.keep_last, can_save_in_background(run), keeps_best)
    check_same_inputs(run.config, trainer.data, trainer.tokenizer.fingerprint)
    if not trains:
        trainer.load() if run.checkpoint is not None else None
        return trainer
    _decide_steps(trainer)
    trainer.text = raise_on_all_ranks(trainer.read_evaluation)
    trainer.data_facts = raise_on_all_ranks(_data_facts, trainer)
    if run.checkpoint is not None:
        trainer.load()
    raise_on_all_ranks(_write_run_dir, trainer)
    return trainer


def _set_determinism(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it fills every buffer
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as cuBLAS asks for it, before its first call


def _decide_steps(trainer: Trainer) -> None:
    """Convert train.epochs to train.steps: from the checkpoint, or by counting the data on rank 0."""
    run, config = trainer.run, trainer.config
    if config.train.epochs is None:
        return
    before = files.read_state(run.checkpoint) if run.checkpoint is not None else {}
    steps = before["steps"] if before.get("epochs") == config.train.epochs else None
    if steps is None:
        epochs, batch = config.train.epochs, trainer.global_batch
        own = raise_on_all_ranks(lambda: epoch_steps(trainer.data, epochs, batch) if trainer.mesh.rank == 0 else 0)
        steps = gather_objects(own)[0]
    train = dataclasses.replace(config.train, steps=steps, epochs=None)
    optim = dataclasses.replace(config.optim, decay_steps=config.optim.decay_steps or steps)
    trainer.config = dataclasses.replace(config, train=train, optim=optim)
    trainer.run = dataclasses.replace(run, config=trainer.config)


def _data_facts(trainer: Trainer) -> dict[str, str]:
    """Describe the training data, on rank 0."""
    if trainer.mesh.rank != 0:
        return {}
    train, data = trainer.config.train, trainer.data
    num_sequences = (train.steps - trainer.config.start) * trainer.global_batch
    try:
        with status("reading the data"):
            return data_facts(data, num_sequences)
    except (ConfigError, TransientError):
        data.close(remove=True)
        raise


def _write_run_dir(trainer: Trainer) -> None:
    """On rank 0, lock the run directory and write the resolved configuration and what export needs besides weights."""
    if trainer.mesh.rank != 0:
        return
    run, folder = trainer.run, trainer.run.run_dir / "model"
    run.run_dir.mkdir(parents=True, exist_ok=True)
    trainer.lock = files.lock_run_dir(run.run_dir)
    settings = run.saved_config or yaml.safe_dump(with_absolute_paths(to_dict(run.config)), sort_keys=False)
    # First: it marks the directory as a run's, in which --resume auto may start again.
    files.write_atomic(run.run_dir / "config.yaml", f"format: {CONFIG_FORMAT}\n{settings}")
    files.write_atomic(run.run_dir / "data.json", json.dumps(trainer.data_facts, indent=1))
    folder.mkdir(exist_ok=True)
    adapter = getattr(trainer.model, "peft_config", {}).get("default")
    for part in (adapter, trainer.model.config, trainer.model.generation_config, trainer.tokenizer.hf):
        if part is not None:
            part.save_pretrained(folder)
    own = (run.config.model.path or folder) / "generation_config.json"
    if own.is_file() and own.parent != folder:
        shutil.copy(own, folder)
