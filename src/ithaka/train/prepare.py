"""Build or resume a run, and check it before the first step."""

import dataclasses
import json
import os
import shutil
import warnings

import torch

from ithaka.attention.choose import agree_on_kernel
from ithaka.checkpoint import checkpoints, save
from ithaka.comm.agree import SharedError, ask_rank_0, raise_on_all_ranks
from ithaka.comm.mesh import make_mesh, start_process_group
from ithaka.config import (
    ConfigError,
    Origin,
    write_atomic,
)
from ithaka.data.cache import decide_fills
from ithaka.data.documents.images import PROCESSOR_FILES
from ithaka.data.held_out import find_data
from ithaka.data.open import describe_data, epoch_steps
from ithaka.evaluate.tasks import EvalText, check_prompts, read_text
from ithaka.exits import TransientError
from ithaka.log.console import status
from ithaka.log.metrics import note_startup
from ithaka.run.run_files import check_same_inputs, fingerprint_weights
from ithaka.run.validated import Run, can_save_in_background
from ithaka.train.parts import Parts, run_dtype
from ithaka.train.trainer import Trainer


def prepare(run: Run, trains: bool = True) -> Trainer:
    """Build the trainer and run all checks, before anything is written. Errors reach all ranks."""
    start_process_group()
    if run.checkpoint is not None:
        run = dataclasses.replace(
            run, checkpoint=checkpoints.find_intact_checkpoint(run.checkpoint)
        )
        if run.last_step < run.entry.start:
            fix = "remove the damaged ones, and resume again"
            raise SharedError(
                f"checkpoint {run.checkpoint} is of an earlier entry of curriculum; {fix}"
            )
    mesh = make_mesh(run.layout.cp, ring=run.layout.ring, replicas=run.layout.replicas)
    _set_determinism(run.config.train.deterministic)
    _settle_matmuls()
    # A named kernel that does not work raises an error with the other checks.
    if run.layout.kernel == "auto":
        kernel = agree_on_kernel("auto", mesh.device, run_dtype(run), run.shape.attention_kinds)
        run = dataclasses.replace(run, layout=dataclasses.replace(run.layout, kernel=kernel))
    note_startup("attention kernel")
    found = ask_rank_0(find_data, run.config.data, run.datasets)
    fills_cache = decide_fills(run.run_dir / "tokens")
    parts = raise_on_all_ranks(Parts, run, mesh, fills_cache, found)
    settings = run.config.train
    keeps_best = settings.keep_best or settings.patience > 0
    background = can_save_in_background(run)
    saver = save.Saver(run.run_dir, settings.keep_last, background, keeps_best)
    trainer = Trainer(run, mesh, parts, saver)
    check_same_inputs(run.config, parts.data, parts.tokenizer.fingerprint)
    if trains:
        _decide_steps(trainer)
        trainer.text = raise_on_all_ranks(_read_evaluation, trainer)
        trainer.data_summary = raise_on_all_ranks(_describe_data, trainer)
        note_startup("data")
    if run.checkpoint is not None:
        trainer.load()
    if trains:
        raise_on_all_ranks(_write_run_dir, trainer)
    return trainer


def _set_determinism(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    # It fills every buffer.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if deterministic:
        # cuBLAS requires it before its first call.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _settle_matmuls() -> None:
    """On an Arm CPU without bf16, PyTorch switches from oneDNN to BLAS, in fp32 too, at the first
    bf16 linear layer or `a @ b.T`. Trigger it before the first step, or a resumed run would compute
    its first step with oneDNN again."""
    ones = torch.ones(32, 32, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.functional.linear(ones, ones)


def _decide_steps(trainer: Trainer) -> None:
    """Convert train.epochs to train.steps, by the checkpoint or the data."""
    run = trainer.run
    config = trainer.config
    epochs = config.train.epochs
    if epochs is None:
        return
    before = checkpoints.read_state(run.checkpoint) if run.checkpoint is not None else {}
    steps = before["steps"] if before.get("epochs") == epochs else None
    if steps is None:
        steps = ask_rank_0(epoch_steps, trainer.data, epochs, trainer.global_batch)
    values = {
        "train.steps": steps,
        "train.epochs": None,
        "optim.decay_steps": config.optim.decay_steps or steps,
    }
    trainer.config = config.with_values(values, Origin.DEFAULT)
    entry = dataclasses.replace(run.entry, run_steps=steps)
    trainer.run = dataclasses.replace(run, config=trainer.config, entry=entry)


def _read_evaluation(trainer: Trainer) -> EvalText | None:
    """Read the text to evaluate on; None if evaluation is off."""
    settings = trainer.config.evaluate
    if not settings.every:
        return None
    tokenizer = trainer.tokenizer
    longest = max(trainer.contexts)
    text = read_text(settings.data, tokenizer, longest, settings.documents, where="evaluate.data")
    if settings.samples:
        check_prompts(text, tokenizer, trainer.contexts)
    return text


def _describe_data(trainer: Trainer) -> dict[str, str]:
    """Describe the training data, on rank 0."""
    if trainer.mesh.rank != 0:
        return {}
    num_steps = trainer.config.train.steps - trainer.run.entry.start
    try:
        with status("reading the data"):
            return describe_data(trainer.data, num_steps * trainer.global_batch)
    except (ConfigError, TransientError):
        trainer.data.close(remove=True)
        raise


def _write_run_dir(trainer: Trainer) -> None:
    """On rank 0, lock the run directory and write the configuration and what export needs."""
    if trainer.mesh.rank != 0:
        return
    run = trainer.run
    path = run.config.model.path
    run.run_dir.mkdir(parents=True, exist_ok=True)
    trainer.lock = checkpoints.lock_run_dir(run.run_dir)
    # First: it marks the directory as a run's, in which --resume auto may start again.
    write_atomic(run.run_dir / "config.yaml", run.saved_settings)
    base = fingerprint_weights(path) if run.needs_base else ""
    teacher = fingerprint_weights(run.config.loss.teacher_path)
    checkpoints.write_pins(run.run_dir, run.commits, base, teacher)
    write_atomic(run.run_dir / "data.json", json.dumps(trainer.data_summary, indent=1))
    _write_model_files(trainer)


def _write_model_files(trainer: Trainer) -> None:
    """Write what export needs besides weights: configurations, tokenizer and processor."""
    folder = trainer.run.run_dir / "model"
    path = trainer.config.model.path
    model = trainer.model
    folder.mkdir(exist_ok=True)
    adapter = getattr(model, "peft_config", {}).get("default")
    for part in (adapter, model.config, model.generation_config, trainer.tokenizer.hf):
        if part is not None:
            part.save_pretrained(folder)
    processor_files = [path / name for name in PROCESSOR_FILES] if path is not None else []
    for file in processor_files:
        if file.is_file():
            shutil.copy(file, folder)
    own = (path or folder) / "generation_config.json"
    if own.is_file() and own.parent != folder:
        shutil.copy(own, folder)
