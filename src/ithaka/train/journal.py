"""What a run prints and records: its header, each step, and its end."""

import dataclasses
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ithaka.checkpoint.checkpoints import step_name
from ithaka.comm.agree import raise_on_all_ranks
from ithaka.config import Config, TrainConfig, shell_command
from ithaka.config.units import format_bytes, format_count, plural
from ithaka.inputs.positions import rope_parameters
from ithaka.log.console import Console
from ithaka.log.metrics import StepRecord, note_startup, read_metrics, startup_seconds
from ithaka.log.trackers import FinalStatus, Trackers
from ithaka.plan.hardware import join_kernels, peak_flops
from ithaka.run.streams import write_stderr
from ithaka.train.agreement import MemoryUse
from ithaka.train.trainer import Trainer, Update, Validation
from ithaka.weights.formats import describe_packed


@contextmanager
def open_console(trainer: Trainer, only_profile: bool) -> Iterator[None]:
    """Set the trainer's console. At the end, close it, the trackers, the data and the lock, and
    print how the run ended."""
    run = trainer.run
    settings = trainer.config.train
    is_rank_0 = trainer.mesh.rank == 0
    tracks = is_rank_0 and not only_profile and bool(settings.track or settings.callbacks)
    trackers = raise_on_all_ranks(
        lambda: Trackers(run.run_dir, run.config, trainer.step) if tracks else None
    )
    console = Console(
        run.run_dir,
        run.entry.run_steps,
        trainer.step,
        trackers,
        active=is_rank_0,
        validation_name=trainer.config.loss.validation_name,
    )
    trainer.console = console
    final_status: FinalStatus = "failed"
    try:
        yield
        final_status = "finished" if trainer.done else "killed"
    except KeyboardInterrupt:
        final_status = "killed"
        raise
    finally:
        with _warn_only("The console and the trackers cannot be closed"):
            console.close(final_status)
        is_over = trainer.done and run.entry.is_last
        trainer.data.close(remove=only_profile or is_over)
        if trainer.lock is not None:
            os.close(trainer.lock)
    if console.active and not only_profile:
        with _warn_only("The run cannot be summarized"):
            _print_end(trainer)


@contextmanager
def _warn_only(what: str) -> Iterator[None]:
    """Print an error, which must neither fail a saved run nor hide the run's own error."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        write_stderr(f"{what} ({reason}); the checkpoints are not affected\n")


# ---- before the steps


def print_header(trainer: Trainer, timeouts: dict[str, str], only_profile: bool) -> None:
    """Print the run's settings, and what is odd about its learning rate."""
    console = trainer.console
    console.table("ithaka", describe_run(trainer) | timeouts)
    if only_profile:
        return
    optim = trainer.config.optim
    num_steps = trainer.run.entry.run_steps
    if optim.warmup_steps > num_steps:
        reached = f"the learning rate reaches {num_steps / optim.warmup_steps:.0%} of optim.lr"
        console.print(
            f"optim.warmup_steps={optim.warmup_steps} exceeds train.steps={num_steps}: {reached}"
        )
    cooldown = optim.cooldown_steps or 0
    stable = (optim.decay_steps or num_steps) - optim.warmup_steps
    if optim.schedule == "wsd" and cooldown > stable > 0:
        console.print(
            f"optim.cooldown_steps={cooldown} exceeds the {stable} steps after the warm-up: "
            "the decay takes all"
        )


def describe_run(trainer: Trainer) -> dict[str, str]:
    config = trainer.config
    mesh = trainer.mesh
    layers = trainer.model.ithaka_root.layers
    size = f"{format_count(trainer.num_params)} parameters{describe_packed(trainer.model)}"
    if trainer.num_trained < trainer.num_params:
        size += f", {format_count(trainer.num_trained)} trained"
    random = ", random weights" * trainer.random_weights
    ring = mesh.ring_group.size()
    ranks = f"{mesh.world_size} ({trainer.device_name}) = {mesh.dp_size} data x {mesh.cp_size}"
    ranks += " context parallel"
    if ring > 1:
        ranks += f" ({mesh.ulysses_group.size()} Ulysses x {ring} ring)"
    tokens = trainer.global_batch * config.data.context
    entry = trainer.run.entry
    num_steps = plural(config.train.steps - entry.start, "step")
    resumed = f", resumed after step {trainer.step}" if trainer.step else ""
    summary = {
        "model": f"{config.model.path or trainer.model.config.model_type}, {size}{random}",
        "ranks": ranks,
        "context": f"{config.data.context} tokens, {tokens} per step, {num_steps}",
        "attention": f"kernel {trainer.kernel}{_describe_planned_kernel(trainer)}",
        "run": f"{trainer.run.run_dir}{resumed}",
        **_describe_saving(trainer),
    }
    num_compiled = sum(layer.forward.passes.compiles for layer in layers)
    if num_compiled:
        summary["compile"] = f"{num_compiled} of {len(layers)} layers; the first step waits for it"
    if config.loss.type == "dpo":
        summary["loss"] = _describe_dpo(config)
    if config.loss.type == "distill":
        summary["loss"] = _describe_distillation(trainer)
    if entry.count > 1:
        steps = f"steps {entry.start + 1} to {config.train.steps}"
        summary["entry"] = f"{entry.index + 1} of {entry.count}, {steps}"
    if config.model.rope is not None:
        summary["rope"] = _describe_rope(trainer)
    data = {topic: text for topic, text in trainer.data_summary.items() if topic != "first tokens"}
    return summary | data | dict(trainer.run.changed)


def _describe_dpo(config: Config) -> str:
    reference = "the model without its adapter"
    if config.adapter is None:
        reference = "a frozen copy of the initial weights"
    return f"dpo, beta {config.loss.beta:g}; the reference is {reference}"


def _describe_distillation(trainer: Trainer) -> str:
    loss = trainer.config.loss
    context = trainer.config.data.context
    teacher = str(loss.teacher or "the model without its adapter")
    if trainer.teacher is not None:
        text = trainer.teacher.config.get_text_config()
        positions = getattr(text, "max_position_embeddings", None)
        teacher = str(loss.teacher or "a copy of the initial weights")
        teacher += describe_packed(trainer.teacher)
        if (positions or context) < context:
            teacher += f" up to position {positions}"
    criterion = f"beta {loss.beta:g}, temperature {loss.temperature:g}"
    return f"distill, {criterion}; the teacher is {teacher}"


def _describe_rope(trainer: Trainer) -> str:
    text = trainer.model.config.get_text_config()
    parts = []
    for name, value in rope_parameters(text).items():
        shown = f"({len(value)})" if isinstance(value, list) else value
        parts.append(f"{name.removeprefix('rope_')} {shown}")
    return f"{', '.join(parts)}, for {text.max_position_embeddings} positions"


def _describe_planned_kernel(trainer: Trainer) -> str:
    """Return the kernel that was planned with, if another one runs."""
    expected = join_kernels(trainer.run.plan.kernels.values()) if trainer.run.plan else ""
    return f", planned with {expected}" if expected not in ("", trainer.kernel) else ""


def _describe_saving(trainer: Trainer) -> dict[str, str]:
    """When and how the run saves, unless by default and in the background."""
    minutes = trainer.config.train.save_minutes
    steps = trainer.config.train.save_every
    default = TrainConfig()
    is_default = minutes == default.save_minutes and steps == default.save_every
    if is_default and trainer.saver.background:
        return {}
    every = []
    if minutes > 0:
        every.append(f"{minutes:g} minute{'s' * (minutes != 1)}")
    if steps > 0:
        every.append(plural(steps, "step"))
    when = f"every {' and '.join(every)}" if every else "at the end"
    room = f"{format_bytes(trainer.run.saved_bytes)} of host memory per node"
    if trainer.saver.background:
        return {"saving": f"{when}, in the background, from {room}"}
    return {"saving": f"{when}, in the foreground: {room} are not free for a copy"}


# ---- after a step


def record_step(
    trainer: Trainer, update: Update, step_s: float, validation: Validation, memory: MemoryUse
) -> None:
    """Print and record a step, and after the first one how long the startup took."""
    result = update.result
    record = StepRecord(
        step=trainer.step,
        loss=result.loss,
        val_loss=validation.loss,
        lr=update.lr,
        grad_norm=result.grad_norm,
        tokens=trainer.tokens,
        label_tokens=result.label_tokens,
        tokens_per_s=update.num_tokens / step_s,
        step_s=step_s,
        mfu=flops_utilization(trainer, update.num_tokens, result.num_pairs, step_s),
        **dataclasses.asdict(memory),
        balance=result.balance,
        ring_bytes=result.ring_bytes,
        sources=result.source_losses | validation.figures,
    )
    trainer.console.step(record)
    if trainer.step == max(1, trainer.first_step):
        _report_startup(trainer)


def _report_startup(trainer: Trainer) -> None:
    note_startup("first step")
    seconds = startup_seconds()
    parts = ", ".join(f"{what} {part_s:.1f}" for what, part_s in seconds.items())
    trainer.console.print(f"First step after {sum(seconds.values()):.1f} s: {parts}")
    pool = trainer.store.pool
    pinning = {
        "bytes": pool.used_bytes,
        "making_s": pool.making_s,
        "waited_s": pool.waited_for_slabs_s,
    }
    trainer.console.times(trainer.step, startup_s=seconds, pinning=pinning)


def step_flops(num_matmul_params: int, num_tokens: int, head_size: int, num_pairs: int) -> float:
    """Model FLOPs of forward and backward, without recomputation: 6 per parameter and token, and 12
    per query-key pair (summed over layers) and element of the heads (`head_size`)."""
    return 6.0 * num_matmul_params * num_tokens + 12.0 * head_size * num_pairs


def flops_utilization(
    trainer: Trainer, num_tokens: int, num_pairs: int, step_s: float
) -> float | None:
    shape = trainer.run.shape
    peak = peak_flops(trainer.device_name)
    if peak is None:
        return None
    # A frozen weight takes two matrix products, a trained one three. A token uses some experts;
    # adapters add weights.
    used = shape.num_products
    added = trainer.num_trained - shape.num_idle if shape.adapter else 0
    frozen = used if shape.adapter else max(0, used - trainer.num_trained)
    matmul_params = used + added - frozen // 3
    flops = step_flops(matmul_params, num_tokens, shape.heads * shape.head_dim, num_pairs)
    return flops / (step_s * peak * trainer.mesh.world_size)


# ---- after the last step


def _print_end(trainer: Trainer) -> None:
    run = trainer.run
    console = trainer.console
    if not trainer.done:
        resume = shell_command("train", "--resume", run.run_dir)
        console.print(f"Stopped after step {trainer.step}; resume with: {resume}")
        return
    entry = run.entry
    title = "done" if entry.count == 1 else f"entry {entry.index + 1} of {entry.count} done"
    console.table(title, summarize_run(trainer))


def summarize_run(trainer: Trainer) -> dict[str, str]:
    run_dir = trainer.run.run_dir
    config = trainer.config
    optim = config.optim
    more = 2 * trainer.step
    records = read_metrics(run_dir / "metrics.jsonl")
    summary = _summarize_validation(trainer, records)
    if trainer.step < config.train.steps:
        validations = f"{trainer.stale} validations in a row were not lower"
        summary["stopped early"] = f"after step {trainer.step}: {validations}"
    rates = [record["tokens_per_s"] for record in records if record.get("tokens_per_s")]
    if rates:  # none if metrics.jsonl could not be written
        summary["speed"] = f"{format_count(statistics.median(rates))} tokens/s (median step)"
    summary["export"] = shell_command("export", run_dir, "OUT_DIR")
    base = config.model.path
    if config.adapter is not None and base is not None and base.is_dir():
        summary["merged"] = shell_command("export", run_dir, "OUT_DIR", "--merge")
    if config.curriculum:
        return summary
    longer = f"train.steps={more}"
    summary["train longer"] = shell_command("train", "--resume", run_dir, "--set", longer)
    has_decayed = optim.warmup_steps < (optim.decay_steps or trainer.step) <= trainer.step
    if optim.schedule != "constant" and has_decayed:
        hint = f"for a longer {optim.schedule} add --set optim.decay_steps={more}"
        summary["lr"] = f"has reached its minimum and stays there; {hint}"
    return summary


def _summarize_validation(trainer: Trainer, records: list[dict[str, Any]]) -> dict[str, str]:
    run_dir = trainer.run.run_dir
    summary = {}
    # Only since the resume: with other settings, earlier validations may have used other text.
    since = [record for record in records if record["step"] >= trainer.first_step]
    losses = [record["val_loss"] for record in since if record.get("val_loss") is not None]
    if losses:
        shown = [f"{loss:.4f}" for loss in [losses[0], *losses[1:][-1:]]]
        name = f"validation {trainer.config.loss.validation_name}"
        summary[name] = " -> ".join(shown)
        if trainer.first_step > 1 and len(losses) > 1:
            resumed = f"the resume after step {trainer.first_step - 1}"
            summary[name] += f", first and last since {resumed}"
    if trainer.best is not None and trainer.saver.keep_best:
        loss, step = trainer.best
        saved = ", whose checkpoint was not saved"
        if (run_dir / "checkpoints" / step_name(step)).is_dir():
            saved = f": {shell_command('export', run_dir, 'OUT_DIR', '--step', step)}"
        summary["best"] = f"{loss:.4f} after step {step}{saved}"
    return summary
