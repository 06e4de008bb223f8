"""The training loop: what every rank executes."""

import time
from dataclasses import asdict

from ithaka.comm.agree import gather_objects
from ithaka.comm.mesh import default_device, set_timeouts, start_process_group
from ithaka.exits import ExitCode, exit_code_for, ran_out_of_memory
from ithaka.log.metrics import StepRecord, note_startup
from ithaka.phases import listening, phase
from ithaka.run.validated import Run
from ithaka.train.agreement import RankState, agree, measure_memory
from ithaka.train.heartbeat import Heartbeat, Limits, validation_seconds
from ithaka.train.journal import open_console, print_header, record_step
from ithaka.train.out_of_memory import make_out_of_memory_error
from ithaka.train.prepare import prepare
from ithaka.train.saving import Saving
from ithaka.train.shutdown import GracefulShutdown
from ithaka.train.trainer import Trainer, Validation
from ithaka.train.watch import Watch

MAX_FIRST_VALIDATION_S = 120.0  # longer validation before the first step is skipped


def train(run: Run, only_profile: bool = False) -> int:
    """Train on this rank: one of torchrun's, or the only one.

    Returns the exit code: DONE after the last step, SIGNALED + signal when stopped, after saving.
    Raises ConfigError, TransientError, OutOfMemoryError, CheckpointError or Diverged with a
    complete message. `only_profile`: save nothing."""
    device = default_device()
    shutdown = GracefulShutdown(run)
    limits = Limits.for_run(run)
    start_process_group()
    limits = Limits.largest(gather_objects(limits))
    heartbeat = Heartbeat(device, limits, run.run_dir)
    with shutdown.catching_signals(), listening(heartbeat.tracker):
        try:
            heartbeat.start()
            set_timeouts(2 * limits.longest)
            trainer = prepare(run)
            set_timeouts(2 * limits.longest)  # for groups created since
            stop_signal = _run_steps(trainer, shutdown, heartbeat, only_profile)
            heartbeat.close()
        except Exception as error:
            heartbeat.wait_for_cause(error, shutdown.signals)
            heartbeat.close(f"{type(error).__name__}: {error}"[:2000], exit_code_for(error))
            if not ran_out_of_memory(error):
                raise
            raise make_out_of_memory_error(run, error, heartbeat.tracker) from error
    return ExitCode.SIGNALED + stop_signal if stop_signal else ExitCode.DONE


def _run_steps(
    trainer: Trainer, shutdown: GracefulShutdown, heartbeat: Heartbeat, only_profile: bool
) -> int:
    """Train up to train.steps, or to the end of the step in which any rank receives a signal.
    Returns the signal, or 0."""
    shutdown.saver = trainer.saver
    stop_signal = 0
    with open_console(trainer, only_profile):
        print_header(trainer, heartbeat.limits.describe(), only_profile)
        watch = Watch(trainer, heartbeat, only_profile)
        saving = Saving(trainer, only_profile)
        note_startup("run directory and trackers")
        if trainer.step == 0 and trainer.config.train.validate_every:
            _validate_before_first_step(trainer, saving, shutdown)
            note_startup("first validation")
        while not trainer.done and not stop_signal:
            stop_signal = _run_step(trainer, watch, saving, shutdown)
    return stop_signal if not trainer.done else 0


def _run_step(trainer: Trainer, watch: Watch, saving: Saving, shutdown: GracefulShutdown) -> int:
    """Data, update, validation, agreement, record, save. Returns the stop signal, or 0."""
    start = time.perf_counter()
    number = trainer.step + 1
    shutdown.step_start = time.monotonic()
    watch.heartbeat.tracker.step = number
    with phase("data"):
        batches = trainer.next_batches()
    with watch.step(number):
        update = trainer.advance(batches)
        step_s = time.perf_counter() - start
        shutdown.step_s = step_s
    # A skipped batch is no step, but the run may stop or save after it.
    validation = trainer.validate_if_due() if update is not None else Validation()
    own = RankState(
        stop_signal=shutdown.stop_signal,
        save_is_due=saving.is_due,
        save_is_done=trainer.saver.is_done,
        figures=watch.measure(batches, step_s),
        memory=measure_memory(trainer.mesh.device),
    )
    agreed = agree(own)
    watch.report(agreed)
    if update is not None:
        record_step(trainer, update, step_s, validation, agreed.memory)
    saving.save_if_due(agreed, validation.is_best)
    return agreed.stop_signal


def _validate_before_first_step(
    trainer: Trainer, saving: Saving, shutdown: GracefulShutdown
) -> None:
    console = trainer.console
    planned_s = validation_seconds(trainer.run)
    if planned_s > MAX_FIRST_VALIDATION_S:
        minutes = f"{planned_s / 60:.0f} minutes"
        console.print(f"No validation before the first step: it would take about {minutes}")
        return
    with console.show_activity("validation before the first step"):
        loss, sources = trainer.validate()
    memory = measure_memory(trainer.mesh.device)
    own = RankState(
        stop_signal=shutdown.stop_signal,
        save_is_due=saving.is_due,
        save_is_done=trainer.saver.is_done,
        memory=memory,
    )
    agreed = agree(own)
    console.step(StepRecord(0, val_loss=loss, **asdict(agreed.memory), sources=sources))
