"""What rank 0 prints before and after the steps, and model FLOPs utilization."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from ithaka.config import embedded_model, shell_command
from ithaka.model.build import has_weights
from ithaka.plan.hardware import peak_flops
from ithaka.plan.show import format_bytes
from ithaka.train.console import format_count, step_flops
from ithaka.train.trainer import Trainer


def describe_run(trainer: Trainer) -> dict[str, str]:
    config, mesh, model = trainer.config, trainer.mesh, trainer.model
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "CPU"
    tokens = trainer.global_batch * config.data.context
    frozen = trainer.num_trained < trainer.num_params
    size = (
        format_count(trainer.num_params)
        + f" parameters{f', {format_count(trainer.num_trained)} trained' if frozen else ''}"
    )
    ulysses, ring = mesh.ulysses_group.size(), mesh.ring_group.size()
    source = config.model.path or embedded_model(config.model.embedded)
    random = ", random weights" * (trainer.run.checkpoint is None and not has_weights(source))
    facts = {
        "model": f"{config.model.path or model.config.model_type}, {size}{random}",
        "ranks": f"{mesh.world_size} ({device}) = {mesh.dp_size} data x {mesh.cp_size} context parallel"
        + f" ({ulysses} Ulysses x {ring} ring)" * (ring > 1),
        "context": f"{config.data.context} tokens, {tokens} per step, {config.train.steps - config.start} steps",
        "attention": f"kernel {trainer.kernel}{_describe_planned_kernel(trainer)}",
        "run": f"{trainer.run.run_dir}{f', resumed after step {trainer.step}' if trainer.step else ''}",
        "saving": _describe_saving(trainer),
    }
    if config.curriculum:
        facts["entry"] = f"{config.entry + 1} of {len(config.ends)}, steps {config.start + 1} to {config.train.steps}"
    if config.model.rope is not None:
        values = {name.removeprefix("rope_"): value for name, value in model.config.rope_parameters.items()}
        values |= {name: f"({len(value)})" for name, value in values.items() if isinstance(value, list)}
        shown = ", ".join(f"{name} {value}" for name, value in values.items())
        facts["rope"] = f"{shown}, for {model.config.max_position_embeddings} positions"
    return facts | trainer.data_facts | dict(trainer.run.changed)


def _describe_planned_kernel(trainer: Trainer) -> str:
    """The kernel that was planned with, if another one runs."""
    expected = trainer.run.plan.hardware.gpu.kernel if trainer.run.plan else ""
    return f", planned with {expected}" if expected not in ("", trainer.kernel) else ""


def _describe_saving(trainer: Trainer) -> str:
    settings, room = trainer.config.train, format_bytes(trainer.run.saved_bytes)
    every = [f"{settings.save_minutes:g} minutes"] * (settings.save_minutes > 0)
    every += [f"{settings.save_every} steps"] * (settings.save_every > 0)
    way = f"in the background, from {room} of host memory per node"
    if not trainer.saver.background:
        way = f"in the foreground: {room} of host memory per node are not free for a copy"
    return f"{'every ' + ' and '.join(every) if every else 'at the end'}, {way}"


def summarize_run(trainer: Trainer, records: list[dict[str, Any]]) -> dict[str, str]:
    run_dir, more, optim = trainer.run.run_dir, 2 * trainer.step, trainer.config.optim
    # Since the run was resumed: with other settings, validation before may have been of other text.
    since = (r["val_loss"] for r in records if r["step"] >= trainer.first_step)
    losses = [f"{loss:.4f}" for loss in since if loss is not None]
    rates = [r["tokens_per_s"] for r in records if r["tokens_per_s"]]
    facts = {"validation loss": " -> ".join([losses[0], *losses[1:][-1:]])} if losses else {}
    if trainer.best is not None and trainer.saver.keep_best:
        loss, step = trainer.best
        facts["best"] = f"{loss:.4f} after step {step}: {shell_command('export', run_dir, 'OUT_DIR', '--step', step)}"
    if trainer.step < trainer.config.train.steps:
        facts["stopped early"] = f"after step {trainer.step}: {trainer.stale} validations in a row were not lower"
    facts["speed"] = f"{format_count(statistics.median(rates))} tokens/s (median step)"
    facts["export"] = shell_command("export", run_dir, "OUT_DIR")
    if trainer.config.adapter is not None and (path := trainer.config.model.path) is not None and path.is_dir():
        facts["merged"] = shell_command("export", run_dir, "OUT_DIR", "--merge")
    if trainer.config.curriculum:
        return facts
    facts["train longer"] = shell_command("train", "--resume", run_dir, "--set", f"train.steps={more}")
    if optim.schedule == "cosine" and optim.warmup_steps < (optim.decay_steps or trainer.step) <= trainer.step:
        facts["lr"] = f"has reached its minimum and stays there; for a longer cosine add --set optim.decay_steps={more}"
    return facts


def flops_utilization(trainer: Trainer, num_tokens: int, num_pairs: int, step_s: float) -> float | None:
    device, shape = trainer.mesh.device, trainer.run.shape
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if peak is None:
        return None
    # An embedding is read, not multiplied, unless it is the output head as well.
    lookup_only = 0 if shape.tied else shape.vocab * shape.hidden
    # A frozen weight takes two matrix products, a trained one three.
    matmul_params = trainer.num_params - lookup_only
    matmul_params -= max(0, matmul_params - trainer.num_trained) // 3
    flops = step_flops(matmul_params, num_tokens, shape.heads * shape.head_dim, num_pairs)
    return flops / (step_s * peak * trainer.mesh.world_size)
