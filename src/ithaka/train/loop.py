"""The training loop: what every rank executes."""

from __future__ import annotations

import math
import os
import time
from signal import Signals

import torch
import torch.distributed as dist

from ithaka.checkpoint import files, save
from ithaka.config import shell_command
from ithaka.dist.agree import SharedError, gather_objects, raise_on_all_ranks
from ithaka.dist.mesh import default_device, set_timeouts, start_process_group
from ithaka.exits import ExitCode, exit_code_for
from ithaka.launch import catch_stop_signals
from ithaka.phases import listening, phase
from ithaka.plan.show import format_bytes
from ithaka.preflight.run import Run
from ithaka.train.console import Console, Record, host_peak_bytes, read_metrics
from ithaka.train.facts import describe_run, flops_utilization, summarize_run
from ithaka.train.heartbeat import Heartbeat, Limits, PhaseTracker, SlowRanks, validation_seconds
from ithaka.train.prepare import prepare
from ithaka.train.shutdown import GracefulShutdown
from ithaka.train.track import Ending, Trackers
from ithaka.train.trainer import Trainer
from ithaka.train.watch import OutOfMemoryTracker, Watch, explain_out_of_memory, ran_out_of_memory

MAX_FIRST_VALIDATION_S = 120.0  # longer validation before the first step is skipped


class OutOfMemoryError(RuntimeError):
    """Memory ran out on the device or the host, or room in the store."""

    exit_code = ExitCode.OUT_OF_MEMORY


def train(run: Run, only_profile: bool = False) -> int:
    """The whole run on this rank, with torchrun's variables set (or none, for a single process).

    Returns the exit code: DONE after the last step, SIGNALED + signal when stopped, after saving. Raises
    ConfigError, TransientError, OutOfMemoryError, CheckpointError or Diverged with all that the user needs to know.
    `only_profile`: nothing is saved."""
    memory_tracker, shutdown = OutOfMemoryTracker(default_device()), GracefulShutdown(run)
    tracker, limits = PhaseTracker(memory_tracker.device), Limits.of(run)
    start_process_group()
    limits = Limits(*map(max, zip(*(vars(each).values() for each in gather_objects(limits)), strict=True)))
    heartbeat = Heartbeat(tracker, limits, run.run_dir)
    with catch_stop_signals(shutdown.handle_signal) as stop, listening(memory_tracker), listening(tracker):
        try:
            heartbeat.start()
            set_timeouts(2 * limits.longest)
            trainer = prepare(run)
            set_timeouts(2 * limits.longest)  # for groups created since
            stop_signal = _run_steps(trainer, stop, shutdown, heartbeat, only_profile)
            heartbeat.close()
        except Exception as error:
            heartbeat.wait_for_verdict(error, stop)
            code = ExitCode.OUT_OF_MEMORY if ran_out_of_memory(error) else exit_code_for(error)
            heartbeat.close(f"{type(error).__name__}: {error}"[:2000], code)
            if not ran_out_of_memory(error):
                raise
            words = explain_out_of_memory(
                run, error, memory_tracker, str(run.config.model.path or run.run_dir / "model")
            )
            raise OutOfMemoryError(f"{words}\n{files.describe_last(run.run_dir)}") from error
        finally:
            shutdown.close()
    return ExitCode.SIGNALED + stop_signal if stop_signal else ExitCode.DONE


def validate_only(run: Run) -> None:
    """The validation loss of a model or a run, printed by rank 0. The run directory stays as it is."""
    start_process_group()
    tokens = run.run_dir / "tokens"
    had_tokens = tokens.exists()
    trainer = prepare(run, trains=False)
    count = run.config.train.validate_sequences
    loss, sources = trainer.validate()
    trainer.data.close(remove=not had_tokens)
    if loss is None:
        way = "set data.validation_path, data.validation_fraction or train.validate_sequences"
        raise SharedError(f"--evaluate-only: nothing is held out for validation; {way}")
    if trainer.mesh.rank == 0:
        what = f"{run.run_dir}, step {trainer.step}" if run.checkpoint else run.config.model.path or "embedded model"
        for name, value in {"validation loss": loss, "perplexity": math.exp(loss), **sources}.items():
            print(f"{name:<16} {value:.4f}", flush=True)
        print(f"of {what}, over up to {count} sequences of {run.config.data.context} tokens", flush=True)


def _run_steps(
    trainer: Trainer, stop: list[Signals], shutdown: GracefulShutdown, heartbeat: Heartbeat, only_profile: bool
) -> int:
    """Train up to train.steps, or to the end of the step in which any rank was told to stop. Returns the signal,
    or 0."""
    run, settings, mesh = trainer.run, trainer.config.train, trainer.mesh
    tracks = mesh.rank == 0 and not only_profile and bool(settings.track)
    trackers = raise_on_all_ranks(lambda: Trackers(run.run_dir, run.config, trainer.step) if tracks else None)
    console = Console(run.run_dir, trainer.config.ends[-1], trainer.step, trackers, mesh.rank == 0)
    stop_signal, told_disk, trainer.console = 0, False, console
    ending: Ending = "failed"
    try:
        console.facts("ithaka", describe_run(trainer) | {"time-outs": heartbeat.limits.words})
        slow, shutdown.saver = SlowRanks(), trainer.saver
        watch = Watch(run, trainer.model, trainer.optimizer, mesh, console, only_profile)
        planned_s = validation_seconds(run)
        if trainer.step == 0 and settings.validate_every and planned_s > MAX_FIRST_VALIDATION_S:
            console.print(f"No validation before the first step: it would take about {planned_s / 60:.0f} minutes")
        elif trainer.step == 0 and settings.validate_every:
            with console.show_activity("validation before the first step"):
                val_loss, val_sources = trainer.validate()
            _, _, peaks, _ = _agree(stop, trainer)
            console.step(Record(0, None, val_loss, None, None, 0, 0, None, None, None, *peaks, sources=val_sources))
        while not trainer.done and not stop_signal:
            start = time.perf_counter()
            shutdown.step_start, heartbeat.place.step = time.monotonic(), trainer.step + 1
            with phase("data"):
                batches = [trainer.data.next_batch() for _ in range(settings.accumulate)]
            with watch.step(trainer.step + 1):
                advanced = trainer.advance(batches)
                step_s = shutdown.step_s = time.perf_counter() - start
            if advanced is None:
                continue
            result, lr, num_tokens = advanced
            val_loss, sources, better = None, result.source_losses, False
            if trainer.is_due(settings.validate_every):
                with console.show_activity("validation"):
                    val_loss, val_sources = trainer.validate()
                sources, better = sources | val_sources, trainer.record_validation(val_loss)
            if trainer.text is not None and trainer.is_due(trainer.config.evaluate.every):
                with console.show_activity("evaluation"):
                    sources = sources | trainer.evaluate()
            work, full = trainer.attention_work(batches)
            earlier, (attention_s, pauses) = watch.device_peak_bytes, heartbeat.place.end_step(full)
            of_rank = trainer.slow_disk(step_s), attention_s, work, *pauses
            stop_signal, (save, saved), peaks, of_ranks = _agree(stop, trainer, earlier, of_rank)
            disks, attention, works, *all_pauses = of_ranks
            _set_limits(heartbeat, heartbeat.limits.measured(*map(max, all_pauses)))
            if late := slow.add(attention, works):
                shown = ", ".join(f"rank {rank} takes {times:.2f} times" for rank, times in late.items())
                console.event(trainer.step, f"Slow: {shown} the median rank's seconds in attention", slow_ranks=late)
            if any(disks) and not told_disk:
                told_disk = True
                _report_slow_disks(trainer, disks)
            speed = num_tokens / step_s, step_s, flops_utilization(trainer, num_tokens, result.num_pairs, step_s)
            losses = result.loss, val_loss, lr, result.grad_norm
            counts, ring = (trainer.tokens, result.label_tokens), (result.balance, result.ring_bytes)
            console.step(Record(trainer.step, *losses, *counts, *speed, *peaks, *ring, sources))
            last, best = bool(stop_signal) or trainer.done, better and trainer.saver.keep_best
            # The best weights and those of a run that ends cannot be saved later: wait for the save in progress.
            if save and trainer.saver.in_progress and not (saved or last or best):
                trainer.skip_save()
                save = False
            save |= best
            if save or saved or last:
                _finish_save(trainer, console)
            if not only_profile and (save or last):
                with console.show_activity("saving"):
                    trainer.save()
                    if last:
                        trainer.saver.finish()
        ending = "finished" if trainer.done else "killed"
    except KeyboardInterrupt:
        ending = "killed"
        raise
    finally:
        console.close(ending)
        trainer.data.close(
            remove=only_profile or (trainer.done and trainer.config.entry + 1 == len(trainer.config.ends))
        )
        if trainer.lock is not None:
            os.close(trainer.lock)
    if not trainer.done and not only_profile:
        again = shell_command("train", "--resume", run.run_dir)
        console.print(f"Stopped after step {trainer.step}; resume with: {again}")
    elif console.active and not only_profile:
        of = run.config.curriculum and f"entry {run.config.entry + 1} of {len(run.config.ends)} "
        console.facts(f"{of or ''}done", summarize_run(trainer, read_metrics(run.run_dir / "metrics.jsonl")))
    return 0 if trainer.done else stop_signal


def _set_limits(heartbeat: Heartbeat, limits: Limits) -> None:
    """Collectives must not time out before the heartbeat, which can name the rank that hangs."""
    if limits.longest > heartbeat.limits.longest:
        set_timeouts(2 * limits.longest)
    heartbeat.limits = limits


def _finish_save(trainer: Trainer, console: Console) -> None:
    """Wait for the save in progress. If it failed, the run continues: the disk may have room for the next one."""
    with console.show_activity("saving"):
        try:
            trainer.saver.finish()
        except save.CheckpointError as error:
            last = files.describe_last(trainer.run.run_dir)
            console.print(f"{error}. {last} The run continues and saves again when due.")


def _agree(
    stop: list[Signals], trainer: Trainer, earlier_peak: int = 0, of_rank: tuple[float, ...] = ()
) -> tuple[int, tuple[bool, bool], tuple[int | None, int], list[list[float]]]:
    """The signal that told any rank to stop, or 0; whether a save is due, and whether one has ended; the largest
    memory peaks (device, host); and each of `of_rank`, on every rank. One all-gather on the host, after each step, so
    that all ranks do the same."""
    mesh = trainer.mesh
    on_gpu = mesh.device.type == "cuda"
    device_peak = max(torch.cuda.max_memory_allocated(mesh.device), earlier_peak) if on_gpu else 0
    mine = [stop[0] if stop else 0, trainer.save_is_due, trainer.saver.is_done, device_peak, host_peak_bytes()]
    own = torch.tensor([*mine, *of_rank], dtype=torch.float64)  # which holds bytes exactly
    shared = [torch.empty_like(own) for _ in range(mesh.world_size)]
    dist.all_gather(shared, own)
    of_ranks = torch.stack(shared)
    stop_signal, save, saved, device_peak, host_peak = map(int, of_ranks[:, : len(mine)].amax(0).tolist())
    peaks = device_peak if on_gpu else None, host_peak
    return stop_signal, (bool(save), bool(saved)), peaks, of_ranks[:, len(mine) :].t().tolist()


def _report_slow_disks(trainer: Trainer, rates: list[float]) -> None:
    slow, folder = {rank: rate for rank, rate in enumerate(rates) if rate}, trainer.store.disk.directory
    rank = min(slow, key=lambda rank: slow[rank])
    planned_rate = format_bytes(trainer.planned_disk_bytes_s)
    what = f"rank {rank} moves {format_bytes(slow[rank])}/s to and from {folder}, {planned_rate}/s planned"
    trainer.report(f"Slow disk: {len(slow)} of {len(rates)} ranks wait for it; {what}", slow_disks=slow)
