"""The training loop: what every rank executes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from signal import SIGINT, Signals
from threading import Timer
from typing import Any

import torch

from ithaka.checkpoint import files, save
from ithaka.comm.agree import SharedError, gather_objects, raise_on_all_ranks
from ithaka.comm.mesh import default_device, set_timeouts, start_process_group
from ithaka.config import shell_command
from ithaka.config.units import plural
from ithaka.exits import ExitCode, exit_code_for, is_disk_full
from ithaka.log.console import Console
from ithaka.log.metrics import Record, note_startup, startup_seconds
from ithaka.log.trackers import FinalStatus, Trackers
from ithaka.phases import listening, phase
from ithaka.run.launch import Outcome, catch_stop_signals, exit_rank, handle_stop_signal
from ithaka.run.resolve import Run
from ithaka.run.streams import call_in_time, write_stderr
from ithaka.train.heartbeat import Heartbeat, Limits, PhaseTracker, validation_seconds
from ithaka.train.step import StepResult
from ithaka.train.trainer import Trainer, prepare
from ithaka.train.watch import (
    OutOfMemoryTracker,
    Watch,
    describe_run,
    explain_out_of_memory,
    flops_utilization,
    measure_memory,
    ran_out_of_memory,
    summarize_run,
)

MAX_FIRST_VALIDATION_S = 120.0  # longer validation before the first step is skipped
READ_LIMIT_S = 2.0  # for naming the last checkpoint after train.grace_s, which leaves the launcher 5 s


class OutOfMemoryError(RuntimeError):
    """The device, the host or the store is out of memory."""

    exit_code = ExitCode.OUT_OF_MEMORY


def train(run: Run, only_profile: bool = False) -> int:
    """Run training on this rank, with torchrun's variables set, or in a single process without them.

    Returns the exit code: DONE after the last step, SIGNALED + signal when stopped, after saving. Raises
    ConfigError, TransientError, OutOfMemoryError, CheckpointError or Diverged with a complete message.
    `only_profile`: save nothing."""
    memory_tracker, shutdown = OutOfMemoryTracker(default_device()), GracefulShutdown(run)
    tracker, limits = PhaseTracker(memory_tracker.device), Limits.for_run(run)
    start_process_group()
    limits = Limits(*map(max, zip(*(vars(own).values() for own in gather_objects(limits)), strict=True)))
    heartbeat = Heartbeat(tracker, limits, run.run_dir)
    catching = catch_stop_signals(shutdown.handle_signal)
    with closing(shutdown), catching as stop, listening(memory_tracker), listening(tracker):
        try:
            heartbeat.start()
            set_timeouts(2 * limits.longest)
            trainer = prepare(run)
            set_timeouts(2 * limits.longest)  # for groups created since
            stop_signal = _run_steps(trainer, stop, shutdown, heartbeat, only_profile)
            heartbeat.close()
        except Exception as error:
            heartbeat.wait_for_cause(error, stop)
            heartbeat.close(f"{type(error).__name__}: {error}"[:2000], exit_code_for(error))
            if not ran_out_of_memory(error):
                raise
            model = str(run.config.model.path or run.run_dir / "model")
            message = explain_out_of_memory(run, error, memory_tracker, model)
            raise OutOfMemoryError(f"{message}\n{files.describe_last(run.run_dir)}") from error
    return ExitCode.SIGNALED + stop_signal if stop_signal else ExitCode.DONE


def validate_only(run: Run) -> None:
    """Print the validation loss of a model or a run, on rank 0. Leaves the run directory unchanged."""
    start_process_group()
    tokens = run.run_dir / "tokens"
    had_tokens = tokens.exists()
    trainer = prepare(run, trains=False)
    count = run.config.train.validate_sequences
    loss, sources = trainer.validate()
    trainer.data.close(remove=not had_tokens)
    if loss is not None and not math.isfinite(loss):
        trainer.check_loaded_weights()
    if loss is None:
        fix = "set data.validation_path, data.validation_fraction or train.validate_sequences"
        raise SharedError(f"--evaluate-only: nothing is held out for validation; {fix}")
    if trainer.mesh.rank == 0:
        model = f"{run.run_dir}, step {trainer.step}" if run.checkpoint else run.config.model.path or "embedded model"
        perplexity = {"perplexity": torch.tensor(loss, dtype=torch.float64).exp().item()} if trainer.dpo is None else {}
        measured = f"validation {run.config.loss.validation_name}"
        for name, value in {measured: loss, **perplexity, **sources}.items():
            print(f"{name:<{len(measured)}}  {value:.4f}", flush=True)
        sequences = plural(count, "sequence")
        print(f"for {model}, on up to {sequences} of {run.config.data.context} tokens", flush=True)


def _run_steps(
    trainer: Trainer, stop: list[Signals], shutdown: GracefulShutdown, heartbeat: Heartbeat, only_profile: bool
) -> int:
    """Train up to train.steps, or to the end of the step in which any rank receives a signal. Returns the signal, or
    0."""
    run, settings, mesh = trainer.run, trainer.config.train, trainer.mesh
    tracks = mesh.rank == 0 and not only_profile and bool(settings.track or settings.callbacks)
    trackers = raise_on_all_ranks(lambda: Trackers(run.run_dir, run.config, trainer.step) if tracks else None)
    console = Console(
        run.run_dir,
        trainer.config.ends[-1],
        trainer.step,
        trackers,
        active=mesh.rank == 0,
        validation_name=trainer.config.loss.validation_name,
    )
    stop_signal, trainer.console, shutdown.saver = 0, console, trainer.saver
    final_status: FinalStatus = "failed"
    try:
        console.table("ithaka", describe_run(trainer) | heartbeat.limits.describe())
        optim, num_steps = trainer.config.optim, trainer.config.ends[-1]
        if optim.warmup_steps > num_steps and not only_profile:
            reached = f"the learning rate reaches {num_steps / optim.warmup_steps:.0%} of optim.lr"
            console.print(f"optim.warmup_steps={optim.warmup_steps} exceeds train.steps={num_steps}: {reached}")
        cooldown, stable = optim.cooldown_steps or 0, (optim.decay_steps or num_steps) - optim.warmup_steps
        if optim.schedule == "wsd" and cooldown > stable > 0 and not only_profile:
            console.print(
                f"optim.cooldown_steps={cooldown} exceeds the {stable} steps after the warm-up: the decay takes all"
            )
        watch = Watch(trainer, heartbeat, only_profile)
        note_startup("run directory and trackers")
        if trainer.step == 0 and settings.validate_every:
            _validate_before_first_step(trainer, stop)
            note_startup("first validation")
        while not trainer.done and not stop_signal:
            start = time.perf_counter()
            shutdown.step_start, heartbeat.tracker.step = time.monotonic(), trainer.step + 1
            with phase("data"):
                batches = [trainer.data.next_batch() for _ in range(settings.accumulate)]
            with watch.step(trainer.step + 1):
                advanced = trainer.advance(batches)
                step_s = shutdown.step_s = time.perf_counter() - start
            val_loss, sources, is_best = _validate_if_due(trainer) if advanced is not None else (None, {}, False)
            rank_figures = watch.measure(batches, step_s)
            stop_signal, save_state, memory, figures = _agree(stop, trainer, watch.earlier_peaks, rank_figures)
            watch.report(*figures)
            watch.report_retries(memory)
            if advanced is not None:  # else the batch was skipped, but the run may stop or save here
                _record_step(trainer, *advanced, step_s, val_loss, sources, memory)
            is_last = bool(stop_signal) or trainer.done
            _save_if_due(trainer, *save_state, is_best=is_best, is_last=is_last, only_profile=only_profile)
        final_status = "finished" if trainer.done else "killed"
    except KeyboardInterrupt:
        final_status = "killed"
        raise
    finally:
        with _warn_only("The console and the trackers cannot be closed"):
            console.close(final_status)
        is_last_entry = trainer.config.entry + 1 == len(trainer.config.ends)
        trainer.data.close(remove=only_profile or (trainer.done and is_last_entry))
        if trainer.lock is not None:
            os.close(trainer.lock)
    if console.active and not only_profile:
        with _warn_only("The run cannot be summarized"):
            _print_end(trainer)
    return stop_signal if not trainer.done else 0


def _print_end(trainer: Trainer) -> None:
    run, console = trainer.run, trainer.console
    if not trainer.done:
        resume = shell_command("train", "--resume", run.run_dir)
        console.print(f"Stopped after step {trainer.step}; resume with: {resume}")
        return
    entry = f"entry {run.config.entry + 1} of {len(run.config.ends)} " if run.config.curriculum else ""
    console.table(f"{entry}done", summarize_run(trainer))


@contextmanager
def _warn_only(what: str) -> Iterator[None]:
    """Print an error instead of raising it: it must neither fail a run that is saved nor hide the run's own error."""
    try:
        yield
    except Exception as error:
        write_stderr(f"{what} ({type(error).__name__}: {error}); the checkpoints are not affected\n")


def _record_step(
    trainer: Trainer,
    result: StepResult,
    lr: float,
    num_tokens: int,
    step_s: float,
    val_loss: float | None,
    sources: dict[str, float],
    memory: dict[str, int | None],
) -> None:
    losses = result.loss, val_loss, lr, result.grad_norm
    counts, ring = (trainer.tokens, result.label_tokens), {"balance": result.balance, "ring_bytes": result.ring_bytes}
    speed = num_tokens / step_s, step_s, flops_utilization(trainer, num_tokens, result.num_pairs, step_s)
    figures: dict[str, Any] = {**memory, **ring, "sources": result.source_losses | sources}
    trainer.console.step(Record(trainer.step, *losses, *counts, *speed, **figures))
    if trainer.step == max(1, trainer.first_step):
        _report_startup(trainer)


def _report_startup(trainer: Trainer) -> None:
    note_startup("first step")
    seconds = startup_seconds()
    parts = ", ".join(f"{what} {part_s:.1f}" for what, part_s in seconds.items())
    trainer.console.print(f"First step after {sum(seconds.values()):.1f} s: {parts}")
    pool = trainer.store.pool
    pinning = {"bytes": pool.used_bytes, "making_s": pool.making_s, "waited_s": pool.waited_for_slabs_s}
    trainer.console.times(trainer.step, startup_s=seconds, pinning=pinning)


def _validate_before_first_step(trainer: Trainer, stop: list[Signals]) -> None:
    console, planned_s = trainer.console, validation_seconds(trainer.run)
    if planned_s > MAX_FIRST_VALIDATION_S:
        console.print(f"No validation before the first step: it would take about {planned_s / 60:.0f} minutes")
        return
    with console.show_activity("validation before the first step"):
        val_loss, sources = trainer.validate()
    _, _, memory, _ = _agree(stop, trainer)
    figures: dict[str, Any] = {**memory, "sources": sources}
    console.step(Record(0, None, val_loss, None, None, 0, 0, None, None, None, **figures))


def _validate_if_due(trainer: Trainer) -> tuple[float | None, dict[str, float], bool]:
    """Return the validation loss, figures by source and evaluation, and whether the loss is the lowest so far."""
    val_loss, figures, is_best = None, dict[str, float](), False
    if trainer.is_due(trainer.config.train.validate_every):
        with trainer.console.show_activity("validation"):
            val_loss, figures = trainer.validate()
        is_best = trainer.record_validation(val_loss)
        if val_loss is not None and not math.isfinite(val_loss):
            message = f"step {trainer.step}: the validation loss is {val_loss}, which does not count as lower"
            trainer.console.event(trainer.step, message, val_loss=str(val_loss))
    if trainer.text is not None and trainer.is_due(trainer.config.evaluate.every):
        with trainer.console.show_activity("evaluation"):
            figures = figures | trainer.evaluate()
    return val_loss, figures, is_best


def _save_if_due(
    trainer: Trainer, due: bool, finished: bool, *, is_best: bool, is_last: bool, only_profile: bool
) -> None:
    """Report a `finished` save, and start one that is `due`. The best and the last weights cannot be saved later, so
    they wait for a save in progress; other saves are skipped. If a save failed, the run continues: the disk may have
    room for the next one."""
    saver, console = trainer.saver, trainer.console
    saves_best = is_best and saver.keep_best
    if due and saver.in_progress and not (finished or is_last or saves_best):
        trainer.skip_save()
        due = False
    if not (due or saves_best or finished or is_last):
        return
    with console.show_activity("saving"):
        try:
            _finish_save(trainer)
        except save.CheckpointError as error:
            last = files.describe_last(trainer.run.run_dir)
            console.print(f"{error}. {last} The run continues and saves again when due.")
        if not only_profile and (due or saves_best or is_last):
            trainer.save()
            if is_last:
                _finish_last_save(trainer)


def _finish_last_save(trainer: Trainer) -> None:
    """After it there is no step in which to save again, so an error ends the run."""
    try:
        _finish_save(trainer)
    except save.CheckpointError as error:
        fix = " Free space, then resume the run." if is_disk_full(error) else ""
        error.args = (f"{error}. {files.describe_last(trainer.run.run_dir)}{fix}",)
        raise


def _finish_save(trainer: Trainer) -> None:
    was_in_progress, saver = trainer.saver.in_progress, trainer.saver
    saver.finish()
    if was_in_progress:
        checkpoint = trainer.run.run_dir / "checkpoints" / files.step_name(saver.step)
        trainer.console.saved(saver.step, checkpoint, saver.seconds, saver.num_bytes)


def _agree(
    stop: list[Signals], trainer: Trainer, earlier: tuple[int, int] = (0, 0), rank_figures: tuple[float, ...] = ()
) -> tuple[int, tuple[bool, bool], dict[str, int | None], list[tuple[float, ...]]]:
    """Gather on the host after each step, so that all ranks make the same decisions. Returns the stop signal of any
    rank, or 0; (a save is due, a save has finished); the memory fields of a Record, maximum over ranks; and for each of
    `rank_figures` its values on all ranks."""
    memory = measure_memory(trainer.mesh.device, earlier)
    state = stop[0] if stop else 0, trainer.save_is_due, trainer.saver.is_done
    gathered = gather_objects((*state, *memory.values(), *rank_figures))
    signals, due, finished, *figures = zip(*gathered, strict=True)
    most = [None if values[0] is None else max(values) for values in figures[: len(memory)]]
    return max(signals), (any(due), any(finished)), dict(zip(memory, most, strict=True)), figures[len(memory) :]


class GracefulShutdown:
    """After any stop signal but Ctrl-C, exit within train.grace_s: after the step and its checkpoint if they finish in
    time, else at once. A save in progress gets the full grace period."""

    def __init__(self, run: Run) -> None:
        self.run, self.seconds = run, run.config.train.grace_s
        self.step_start, self.step_s = 0.0, 0.0  # time.monotonic(); duration of the last step
        self.saver: save.Saver | None = None  # once training starts
        self.timer: Timer | None = None

    def handle_signal(self, number: int, again: bool) -> None:
        saver = self.saver
        is_writing = saver is not None and saver.in_progress and not saver.is_done
        done_at = self.step_start + self.step_s + (saver.seconds if saver is not None else 0.0)
        if number != SIGINT and not is_writing and done_at - time.monotonic() > self.seconds:
            self.leave(number)
        if number != SIGINT:
            self.timer = Timer(self.seconds, self.leave, [number])
            self.timer.daemon = True
            self.timer.start()
        handle_stop_signal(number, again)  # last: it prints, which may hang

    def leave(self, number: int) -> None:
        reason = f"the step and its checkpoint do not finish within train.grace_s={self.seconds:g}"
        latest = self.run.run_dir / "latest"
        unknown = f"{latest} could not be read: check its storage."
        last = call_in_time(lambda: files.describe_last(self.run.run_dir), READ_LIMIT_S, unknown)
        message = f"{Signals(number).name}: {reason}. {last}"
        exit_rank(Outcome(ExitCode.SIGNALED + number, message, shared=True))

    def close(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
