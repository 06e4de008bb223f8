"""Injected faults: messages, exit codes, and the checkpoints that survive."""

import contextlib
import dataclasses
import errno
import io
import math
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import psutil
import pytest
import torch
import torch.distributed as dist

from ithaka.checkpoint import checkpoints, save
from ithaka.comm.mesh import start_process_group
from ithaka.config import ConfigError, parse_config
from ithaka.exits import ExitCode, TransientError
from ithaka.layer import disk, stages
from ithaka.log.console import Console
from ithaka.log.metrics import read_metrics
from ithaka.phases import PhaseState
from ithaka.plan.hardware import GPUS
from ithaka.run import run_files
from ithaka.train import heartbeat, journal, loop, prepare, shutdown, step, watch
from ithaka.train import trainer as trainer_module
from ithaka.train.bad_steps import BadSteps
from ranks import Ranks
from runs import (
    bitwise_metrics,
    copy_run_at_step,
    metrics,
    run,
    run_and_record_exit,
    tiny_run,
    validate,
    wait_for,
)


def with_run_dir(config, run_dir, **train):
    return dataclasses.replace(
        config, train=dataclasses.replace(config.train, run_dir=run_dir, **train)
    )


def run_with_fault(fault, config, resume=False):
    """Inject a fault with `fault(patch)`; return this rank's output and the error that ends the
    run."""
    error = None
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        fault(patch)
        try:
            run(config, config.train.run_dir if resume else None)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return output.getvalue(), error


@pytest.fixture(scope="module")
def reference_run(ranks, tmp_path_factory):
    """A run of four steps on two ranks without faults, saved after steps 2 and 4."""
    config = tiny_run(tmp_path_factory.mktemp("reference"))
    ranks.run(2, run, config)
    return config


def fails_once(function, number):
    """Wrap `function` so that its first call raises an OSError."""
    calls = []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise OSError(number, os.strerror(number))
        return function(*args, **kwargs)

    return failing


def disk_full(patch):
    """Fail on rank 1 while it writes the first checkpoint."""
    if dist.get_rank() == 1:
        patch.setattr(
            save.dcp.FileSystemWriter,
            "write_data",
            fails_once(save.dcp.FileSystemWriter.write_data, errno.ENOSPC),
        )


def read_only(patch):
    """Fail on rank 0 while it publishes the first checkpoint."""
    if dist.get_rank() == 0:
        patch.setattr(checkpoints.os, "rename", fails_once(os.rename, errno.EROFS))


@pytest.mark.parametrize(
    "fault, message",
    [
        (disk_full, "rank 1: OSError: [Errno 28] No space left"),
        pytest.param(read_only, "rank 0: OSError: [Errno 30] Read-only", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_that_cannot_be_written_does_not_end_the_run(
    ranks, reference_run, tmp_path, fault, message
):
    config = with_run_dir(reference_run, tmp_path / "run")
    (output, error), _ = ranks.run(2, run_with_fault, fault, config)
    assert error is None
    assert f"step-00000002 cannot be written: {message}" in output and "The run continues" in output
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("*")] == ["step-00000004"]
    assert bitwise_metrics(config.train.run_dir) == bitwise_metrics(reference_run.train.run_dir)


def test_errors_after_the_last_save_do_not_fail_the_run(tmp_path, monkeypatch, capfd):
    """Deleting an old checkpoint, closing the console and summarizing the run all fail."""
    settings = {
        "steps": 2,
        "save_every": 1,
        "keep_last": 1,
        "validate_every": 0,
        "validate_sequences": 0,
    }
    config = tiny_run(tmp_path, train=settings)
    close = Console.close
    rmtree = shutil.rmtree
    summarize_run = journal.summarize_run
    summaries = []

    def keep_checkpoints(path, *args, ignore_errors=False, **kwargs):
        if path.name.startswith("step-") and not ignore_errors:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        rmtree(path, *args, ignore_errors=ignore_errors, **kwargs)

    def fail_to_close(console, status):
        close(console, status)
        raise OSError("no console")

    def fail_to_summarize(trainer):
        (trainer.run.run_dir / "metrics.jsonl").write_text("{\n")
        summaries.append(summarize_run(trainer))
        raise ZeroDivisionError("no summary")

    monkeypatch.setattr(checkpoints.shutil, "rmtree", keep_checkpoints)
    monkeypatch.setattr(Console, "close", fail_to_close)
    monkeypatch.setattr(journal, "summarize_run", fail_to_summarize)
    assert run(config) == ExitCode.DONE
    assert checkpoints.find_checkpoint(config.train.run_dir).name == "step-00000002"
    printed = capfd.readouterr()
    assert (
        f"step-00000001 cannot be deleted ([Errno {errno.ENOTEMPTY}] " in printed.err
        and "cannot be written" not in printed.out
    )
    for reason in ("(OSError: no console)", "(ZeroDivisionError: no summary)"):
        assert f"{reason}; the checkpoints are not affected" in printed.err
    assert len(summaries) == 1 and "export" in summaries[0] and "speed" not in summaries[0], (
        "no step was recorded"
    )


def slow_to_write(patch):
    """Delay writing, so that the next steps change the weights before the checkpoint is on disk."""
    dcp_save = save.dcp.save
    patch.setattr(
        save.dcp, "save", lambda *args, **kwargs: time.sleep(0.2) or dcp_save(*args, **kwargs)
    )


def in_the_foreground(patch):
    slow_to_write(patch)
    patch.setattr(prepare, "can_save_in_background", lambda run: False)


def test_a_background_save_has_the_state_of_its_step(ranks, reference_run, tmp_path):
    output = {}
    saved = {}
    for fault in (slow_to_write, in_the_foreground):
        config = with_run_dir(reference_run, tmp_path / fault.__name__)
        (output[fault], error), _ = ranks.run(2, run_with_fault, fault, config)
        assert error is None
        states = [
            checkpoints.read_state(path)
            for path in sorted(config.train.run_dir.glob("checkpoints/*"))
        ]
        names = ("__0_0.distcp", "__1_0.distcp")
        saved[fault] = [
            (state["step"], [state["checksums"][name] for name in names]) for state in states
        ]
    assert [step for step, _ in saved[slow_to_write]] == [2, 4]
    assert saved[slow_to_write] == saved[in_the_foreground]
    assert "every 15 minutes and 2 steps, in the background" in output[slow_to_write]
    assert "in the foreground: " in output[in_the_foreground]


# watchdog limit inside a step; duration of a slow save
STEP_S = 2.0
SAVE_S = 3.0


def stop_while_saving(config):
    """Write the first checkpoint slowly on rank 1 until more saves are due, then stop the run as a
    user would."""
    saves = []
    paths = []
    write = save.dcp.FileSystemWriter.write_data

    def slow(*args):
        saves.append(args)
        if dist.get_rank() == 1 and len(saves) == 1:
            with contextlib.suppress(AssertionError):
                wait_for(
                    lambda: "event" in (config.train.run_dir / "metrics.jsonl").read_text(),
                    timeout_s=10,
                )
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(SAVE_S)
            paths.append(PhaseState.path)
        return write(*args)

    exits = []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        with_fast_watchdog(patch, STEP_S)
        patch.setattr(heartbeat, "exit_rank", exits.append)
        patch.setattr(save.dcp.FileSystemWriter, "write_data", slow)
        checked = validate(config)
        limits = heartbeat.Limits.for_run(checked)
        code = loop.train(checked)
    return (
        code,
        output.getvalue(),
        exits,
        [limits.for_phase(path) == limits.save > 100 * SAVE_S for path in paths],
    )


@pytest.mark.slow
def test_a_slow_save_is_not_a_hang_and_the_next_save_is_skipped(reference_run, tmp_path):
    config = with_run_dir(
        reference_run, tmp_path / "run", steps=100_000, save_every=2, validate_every=0, keep_last=9
    )
    victims = Ranks(2)
    try:
        (code, output, exits, _), (*_, other_exits, waits_as_saving) = victims.run(
            2, stop_while_saving, config
        )
    finally:
        victims.close()
    assert exits == other_exits == [] and waits_as_saving == [True]
    lines = metrics(tmp_path / "run")
    last = lines[-1]["step"]
    skipped = [line for line in lines if "event" in line]
    assert (
        code == ExitCode.SIGNALED + signal.SIGINT
        and (tmp_path / "run/latest").read_text() == f"step-{last:08d}\n"
    )
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == [
        "step-00000002",
        f"step-{last:08d}",
    ]
    # One event for each save that was due.
    assert [line["step"] for line in skipped] == list(range(4, last, 2)) and skipped[0][
        "save_in_progress"
    ] == 2
    assert all(line["event"] in output and "train.save_every" in line["event"] for line in skipped)


def train_with_slow_saves(config):
    with pytest.MonkeyPatch.context() as patch:
        slow_to_write(patch)
        loop.train(validate(config))


def test_the_best_weights_are_saved_even_while_another_save_is_in_progress(
    ranks, reference_run, tmp_path
):
    config = with_run_dir(
        reference_run,
        tmp_path / "run",
        steps=4,
        save_every=1,
        validate_every=1,
        keep_best=True,
        keep_last=9,
    )
    ranks.run(1, train_with_slow_saves, config)
    lines = metrics(tmp_path / "run")
    losses = {line["step"]: line["val_loss"] for line in lines if "event" not in line}
    improved = [
        step
        for step in range(2, 5)
        if losses[step] < min(losses[earlier] for earlier in range(1, step))
    ]
    saved = [int(path.name[-1]) for path in sorted((tmp_path / "run/checkpoints").iterdir())]
    assert len(improved) > 1 and set(improved) <= set(saved)
    assert not [line for line in lines if "event" in line and line["step"] in improved]


def run_without_shared_directory(config):
    local = with_run_dir(config, config.train.run_dir / str(dist.get_rank()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "SHARED_FS_DELAY_S", 0.1)
        with pytest.raises(TransientError) as error:
            run(local)
    assert error.value.shared and error.value.exit_code == ExitCode.TRANSIENT
    return str(error.value)


def test_a_directory_that_is_not_shared_is_refused_at_the_first_save(
    ranks, reference_run, tmp_path
):
    first, second = ranks.run(
        2, run_without_shared_directory, with_run_dir(reference_run, tmp_path)
    )
    missing = f"{tmp_path}/0/checkpoints/.tmp-step-00000002/__1_0.distcp"
    assert first == (
        f"train.run_dir={tmp_path}/0: rank 0 does not see {missing}, which rank 1 wrote; "
        "start again, or put it on a file system that all nodes share"
    )
    assert not (tmp_path / "0/latest").exists()
    assert "does not see" in second


def late(patch):
    """On rank 0, the files of the second checkpoint do not appear in time."""
    is_visible = save.is_visible
    patch.setattr(
        save,
        "is_visible",
        lambda file, size: "step-00000002" in str(file) and is_visible(file, size),
    )


def test_a_file_that_appears_late_does_not_end_the_run_after_a_save(ranks, reference_run, tmp_path):
    config = with_run_dir(reference_run, tmp_path / "run", steps=5)
    (output, error), _ = ranks.run(2, run_with_fault, late, config)
    assert "step-00000004 cannot be written: rank 0: TimeoutError: rank 0 does not see " in output
    assert error.startswith("CheckpointError: ")  # raised after the last step
    assert (tmp_path / "run/latest").read_text() == "step-00000002\n"
    assert [line["step"] for line in metrics(config.train.run_dir)][-1] == 5


def one_minute_per_step(patch):
    """Each step takes a minute of monotonic time, while the wall clock is set back."""
    now = time.monotonic
    steps = []
    train_step = trainer_module.train_step
    patch.setattr(
        trainer_module,
        "train_step",
        lambda *args, **kwargs: steps.append(1) or train_step(*args, **kwargs),
    )
    patch.setattr(loop.time, "monotonic", lambda: now() + 60 * len(steps))
    patch.setattr(loop.time, "time", lambda: -60.0 * len(steps))


def test_save_minutes_sets_when_checkpoints_are_saved(ranks, reference_run, tmp_path):
    config = with_run_dir(
        reference_run, tmp_path / "run", save_every=0, save_minutes=2, steps=5, keep_last=9
    )
    (output, error), _ = ranks.run(2, run_with_fault, one_minute_per_step, config)
    assert error is None and "every 2 minutes, " in output
    assert [path.name[-1] for path in sorted((tmp_path / "run/checkpoints").glob("*"))] == [
        "2",
        "4",
        "5",
    ]


def with_fast_watchdog(patch, step_s=None):
    """Send heartbeats often. `step_s` overrides the watchdog's limit inside a step; other limits
    stay."""
    patch.setattr(heartbeat, "BEAT_S", 0.1)
    patch.setattr(heartbeat, "OWN_ERROR_WAIT_S", 0.0)
    if step_s is not None:
        patch.setattr(heartbeat, "MIN_STEP_LIMIT_S", step_s)


def asleep(patch, sleep=lambda: time.sleep(60), step_s=2.0):
    """Rank 1 sleeps in the forward of its layer, in the third step; rank 0 waits for it in an
    exchange."""
    with_fast_watchdog(patch, step_s)
    steps = []
    calls = []
    train_step = trainer_module.train_step
    attend = stages.StagedAttention.attend

    def slow(*args):
        calls.extend([args] * (len(steps) == 3))
        if dist.get_rank() == 1 and len(calls) == 1:
            sleep()
        return attend(*args)

    patch.setattr(
        trainer_module,
        "train_step",
        lambda *args, **kwargs: steps.append(args) or train_step(*args, **kwargs),
    )
    patch.setattr(stages.StagedAttention, "attend", slow)


def frozen(patch):
    patch.setattr(heartbeat, "MAX_SILENCE_S", 2.0)
    asleep(patch, lambda: os.kill(os.getpid(), signal.SIGSTOP), step_s=None)


HANGS = {
    asleep: "did not arrive: no rank made progress for 2 s",
    frozen: "has sent no heartbeat for 2 s: it died or is frozen",
}


def test_a_rank_that_hangs_is_named_and_ends_the_run(reference_run, tmp_path):
    """Both runs start before the test waits for the first: each takes seconds to end."""
    folders = {fault: tmp_path / fault.__name__ for fault in HANGS}
    victims = {fault: Ranks(2) for fault in HANGS}
    for fault, folder in folders.items():
        folder.mkdir()
        config = with_run_dir(reference_run, folder / "run")
        victims[fault].start(2, folder, run_and_record_exit, fault, config, folder)
    outputs = {}
    for fault, folder in folders.items():
        wait_for(lambda folder=folder: any(path.read_text() for path in folder.glob("words-*")))
        outputs[fault] = next(
            path.read_text() for path in folder.glob("words-*") if path.read_text()
        )
        victims[fault].close()
    for fault, output in outputs.items():
        assert (
            output.startswith(f"{ExitCode.HANG} rank 1 on ")
            and HANGS[fault] in output.splitlines()[0]
        )
        assert "\n  rank 0 last reported step 3, layer 0 / forward / exchange\n" in output
        assert any(
            "attend" in path.read_text() for path in (folders[fault] / "run/hang").glob("stacks-*")
        )
    position = "\n  rank 1 last reported step 3, layer 0 / forward / attention / stage 0\n"
    assert position in outputs[asleep]


def out_of_memory(patch):
    def fail():
        raise MemoryError("no room")

    asleep(patch, fail, step_s=None)


def test_all_ranks_end_with_the_code_of_the_one_that_failed(reference_run, tmp_path):
    """A scheduler may report any rank's exit code, so all ranks exit with the same one."""
    config = with_run_dir(reference_run, tmp_path / "run")
    failing_ranks = Ranks(2)
    failing_ranks.start(2, tmp_path, run_and_record_exit, out_of_memory, config, tmp_path)
    wait_for(lambda: (tmp_path / "words-0").exists() and (tmp_path / "words-0").read_text())
    failing_ranks.close()
    output = (tmp_path / "words-0").read_text()
    assert (
        output.startswith(f"{ExitCode.OUT_OF_MEMORY} rank 1 on ")
        and "failed: MemoryError: no room" in output
    )


@pytest.fixture
def make_beats(monkeypatch, tmp_path):
    """Return a function that makes the heartbeats of several ranks in this process, on one store.
    The message with which one of them ends the run is added to every `.ended`."""
    start_process_group()
    monkeypatch.setattr(heartbeat, "OWN_ERROR_WAIT_S", 0.0)
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    beats = []

    def make(size, store):
        for rank in range(size):
            limits = heartbeat.Limits(60, 60, 60)
            beat = heartbeat.Heartbeat(torch.device("cpu"), limits, tmp_path)
            beat.rank = rank
            beat.size = size
            beat._store = store
            beat.ended = []
            beat._last_beat_at = beat._last_beat_at * size
            beat._beat()
            beats.append(beat)
        return beats[-size:]

    monkeypatch.setattr(
        heartbeat, "exit_rank", lambda outcome: [beat.ended.append(outcome.text) for beat in beats]
    )
    monkeypatch.setattr(dist, "barrier", lambda: None)
    yield make
    for beat in beats:
        beat._stop.set()


@pytest.fixture
def pair(make_beats):
    return make_beats(2, dist.HashStore())


class CountingStore:
    def __init__(self):
        self._store = dist.HashStore()
        self.requests = 0

    def __getattr__(self, name):
        self.requests += 1
        return getattr(self._store, name)


@pytest.mark.parametrize("size", [2, 64])
def test_heartbeats_make_two_store_requests_per_rank(make_beats, size):
    store = CountingStore()
    beats = make_beats(size, store)
    store.requests = 0
    for beat in beats:
        beat._watch_ranks()
    assert store.requests == 2 * size and not beats[0].ended


def test_rank_0_reports_a_failed_or_silent_rank_to_all(monkeypatch, make_beats):
    first, second, third = make_beats(3, dist.HashStore())
    for _ in range(2):
        for beat in (third, second, first):
            beat._watch_ranks()
    monkeypatch.setattr(heartbeat, "MAX_SILENCE_S", 8.0)
    for beat in (first, second):
        beat._last_beat_at[2] -= 9
        beat._watch_ranks()
    silent, same = first.ended
    assert (
        " has sent no heartbeat for 8 s: it died or is frozen\n  rank 0 last reported step 0"
        in silent
        and same == silent
    )
    third.close("MemoryError: no room", ExitCode.OUT_OF_MEMORY)
    outcomes = []
    monkeypatch.setattr(heartbeat, "exit_rank", outcomes.append)
    for beat in (first, second):
        beat._watch_ranks()
    failed, same = outcomes
    assert failed.code == same.code == ExitCode.OUT_OF_MEMORY and same.text == failed.text
    assert failed.text.startswith("rank 2 on ") and "failed: MemoryError: no room\n" in failed.text


def test_other_ranks_notice_that_rank_0_failed_or_fell_silent(monkeypatch, pair):
    failing, watching = pair
    for _ in range(2):
        watching._watch_ranks()
    monkeypatch.setattr(heartbeat, "MAX_SILENCE_S", 8.0)
    watching._last_beat_at[0] -= 9
    watching._watch_ranks()
    assert (
        watching.ended[0].startswith("rank 0 on ")
        and " has sent no heartbeat for 8 s" in watching.ended[0]
    )
    failing.close("RuntimeError: boom")
    watching._watch_ranks()
    assert (
        watching.ended[1].startswith("rank 0 on ")
        and "failed: RuntimeError: boom\n" in watching.ended[1]
    )


def test_a_frozen_store_ends_a_rank(monkeypatch, pair):
    """Requests block without an error, as they do when the machine of rank 0 dies."""
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    monkeypatch.setattr(heartbeat, "MAX_SILENCE_S", 1.0)
    beat, other = pair
    answers = threading.Event()
    read = beat._read_beats
    answers.set()
    monkeypatch.setattr(beat, "_read_beats", lambda: other._beat() or answers.wait() and read())
    beat.start()
    wait_for(lambda: beat._num_beats > 10)
    assert not beat.ended
    answers.clear()
    wait_for(lambda: beat.ended)
    assert beat.ended[0].startswith(
        "rank 0 or its launcher is gone or frozen: its store has not answered for 1 s\n"
    )
    answers.set()


def raises(error):
    def function(*args):
        raise error

    return function


def test_a_rank_whose_device_failed_is_named(monkeypatch, pair):
    """After a CUDA fault, every query of the device raises."""
    watching, failing = pair
    fault = RuntimeError(
        "CUDA error: an illegal memory access was encountered\nFor debugging consider ..."
    )
    failing.tracker.on_gpu = failing.tracker._timeline.on_gpu = True
    queries = []
    query = raises(fault)
    failing.tracker._timeline.mark = lambda: SimpleNamespace(
        query=lambda: queries.append(1) or query()
    )
    failing.tracker.enter(("optimizer",))
    for _ in range(2 * heartbeat.MAX_STORE_FAILURES):
        failing._watch_ranks()
        watching._watch_ranks()
    assert not failing.ended  # its own error is about to be raised
    num_queries = len(queries)
    failing.close(f"RuntimeError: {fault}")
    assert len(queries) == num_queries > 0
    watching._watch_ranks()
    lines = watching.ended[0].splitlines()
    assert (
        lines[0].startswith("rank 1 on ")
        and "failed: RuntimeError: CUDA error: an illegal memory" in lines[0]
    )
    first, _, second = watching.ended[0].partition("rank 1 last reported ")
    assert "rank 0 last reported step 0" in first and "device" not in first
    assert "its device failed: CUDA error: an illegal memory" in second


def test_positions_are_old_when_the_store_is_lost(monkeypatch, pair):
    beat = pair[0]
    for _ in range(2):
        beat._watch_ranks()
    monkeypatch.setattr(
        beat, "_store", SimpleNamespace(set=raises(dist.DistNetworkError("Broken pipe")))
    )
    for _ in range(heartbeat.MAX_STORE_FAILURES):
        assert not beat.ended
        # as if BEAT_S had passed
        beat._last_beat_at = [beat_at - 5 for beat_at in beat._last_beat_at]
        beat._watch_ranks()
    assert beat.ended[0].startswith(
        "rank 0 or its launcher is gone: its store does not answer (Broken pipe)\n"
    )
    assert (
        "\n  rank 0 last reported step 0, before its first phase (15 s ago)\n  rank 1 last "
        "reported "
    ) in beat.ended[0]


def test_only_consecutive_store_failures_end_a_rank(monkeypatch, pair):
    beat = pair[0]
    for fails in (True, True, False, True, True):
        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(beat, "_read_beats", raises(dist.DistNetworkError("Broken pipe")))
            beat._watch_ranks()
    assert not beat.ended
    monkeypatch.setattr(beat, "_read_beats", raises(dist.DistNetworkError("Broken pipe")))
    beat._watch_ranks()
    assert beat.ended


def test_a_process_that_was_suspended_blames_no_other(monkeypatch, pair):
    """All beats that it knows are old, and so is the last progress; it cannot tell who else was
    suspended."""
    beat, other = pair
    for _ in range(2):
        other._watch_ranks()
        beat._watch_ranks()
    beat._last_beat_at = [beat_at - 3600 for beat_at in beat._last_beat_at]
    beat._progress_at -= 3600
    beat._watch_ranks()
    assert not beat.ended
    beat._last_beat_at[1] -= 3600
    beat._watch_ranks()
    assert " has sent no heartbeat for " in beat.ended[0], "of one rank, while the other's is new"


@pytest.mark.parametrize("failure", ["", "RuntimeError: boom"])
def test_a_rank_that_is_done_or_failed_does_not_count_as_hanging(pair, failure):
    first, second = pair
    for _ in range(2):
        first._watch_ranks()
    second.close(failure)
    for _ in range(2):
        first._progress_at -= 3600
        first._watch_ranks()
    assert [
        ("failed: " + failure in text, "no rank made progress" in text) for text in first.ended
    ] == [(True, False)] * (2 if failure else 0)


def test_collectives_time_out_after_the_heartbeat(monkeypatch, pair):
    """It can name the rank that hangs, and they cannot."""
    beat = pair[0]
    timeouts = []
    monkeypatch.setattr(heartbeat, "set_timeouts", timeouts.append)
    beat.update_limits(1.0, 1.0, 1.0, 1.0)
    assert timeouts == [], "60 s, which the start needs, is still the longest"
    beat.update_limits(1.0, 1.0, 100.0, 1.0)
    assert beat.limits.longest == 500 and timeouts == [1000]
    beat.update_limits(1.0, 1.0, 100.0, 1.0)
    assert timeouts == [1000]


def test_collectives_of_the_start_time_out_after_the_heartbeat(monkeypatch, tmp_path):
    """On every rank as late as on the slowest, and in groups that the model's preparation made."""
    start_process_group()
    events = []
    limits = heartbeat.Limits.for_run(checked := validate(tiny_run(tmp_path)))
    slower = dataclasses.replace(limits, save=limits.longest + 99)
    monkeypatch.setattr(loop, "gather_objects", lambda own: [slower, own])
    monkeypatch.setattr(loop, "set_timeouts", events.append)
    monkeypatch.setattr(loop, "prepare", lambda run: events.append("prepare"))
    monkeypatch.setattr(loop, "_run_steps", lambda *_: 0)
    assert loop.train(checked) == ExitCode.DONE
    assert events == [2 * slower.save, "prepare", 2 * slower.save]


def test_a_hang_is_reported_while_its_storage_hangs(monkeypatch, pair, tmp_path):
    """Opening the file works, and writing it hangs, as with a full pipe."""
    (tmp_path / "hang").mkdir()
    os.mkfifo(tmp_path / "hang/stacks-0.txt")
    reader = os.open(tmp_path / "hang/stacks-0.txt", os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(reader, bytes(2**12))
    first, second = pair
    for number, (beat, limit_s) in enumerate(zip(pair, (0.2, 60.0), strict=True), 1):
        monkeypatch.setattr(heartbeat, "EVIDENCE_LIMIT_S", limit_s)
        threading.Thread(target=beat._end, args=("rank 7 hangs",), daemon=True).start()
        wait_for(lambda: len(first.ended) == number, timeout_s=30)  # noqa: B023
    assert [text.splitlines()[0] for text in first.ended] == ["rank 7 hangs"] * 2
    assert first.ended[0].endswith(
        f"rank 0 could not write its own: check the storage of {tmp_path}"
    )
    assert first.ended[1].endswith(f"are in {tmp_path / 'hang'}")
    stacks = (tmp_path / "hang/stacks-1.txt").read_text()
    assert (
        "Thread MainThread (most recent call first):" in stacks and "in Heartbeat._end\n" in stacks
    )

    def let_the_thread_end():
        with contextlib.suppress(BlockingIOError):
            os.read(reader, 2**16)
        return "storage" not in [thread.name for thread in threading.enumerate()]

    wait_for(let_the_thread_end)
    os.close(reader)


@pytest.mark.parametrize(
    "name, error",
    [
        ("_watch_memory", psutil.NoSuchProcess(1)),
        ("_watch_memory", FileNotFoundError("/tmp/job-7")),
        ("_read_beats", RuntimeError("not the store's")),
    ],
)
def test_beats_continue_after_any_error(monkeypatch, pair, capfd, name, error):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    beat = pair[0]
    monkeypatch.setattr(beat, name, raises(error))
    beat.start()
    wait_for(lambda: beat._num_beats > 10)
    assert not beat.ended and beat._thread.is_alive()
    stderr = capfd.readouterr().err
    assert stderr.count("rank 0: ") == stderr.count("\n") == 1 and type(error).__name__ in stderr


def test_lines_that_the_disk_does_not_take_are_written_later(tmp_path, capsys):
    console = Console(tmp_path, num_steps=3)
    file = console._metrics.file
    console._metrics.file = broken = MagicMock()
    broken.write.side_effect = OSError(errno.EROFS, "Read-only file system")
    broken.name = "metrics"
    for number in (1, 2):
        console.event(number, "words")
    console._metrics.file = file
    console.event(3, "words")
    console.close()
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    assert capsys.readouterr().out.count("metrics cannot be written (Read-only file system)") == 1


def test_host_memory_exhaustion_is_reported_once(monkeypatch, capfd):
    monkeypatch.setattr(heartbeat, "available_memory", lambda: 2**29)
    memory_watch = SimpleNamespace(_warned_of_memory=False)
    for _ in range(2):
        heartbeat.Heartbeat._watch_memory(memory_watch)
    stderr = capfd.readouterr().err
    assert (
        stderr.count("has 512 MiB of host memory left; the largest other process is ")
        == stderr.count("\n")
        == 1
    )


def slow_disk(patch, planned_bytes_s=1e9):
    pwrite = os.pwrite
    patch.setattr(disk.os, "pwrite", lambda *args: time.sleep(0.1) or pwrite(*args))
    patch.setattr(watch, "SLOW_DISK_S", 0.02)
    patch.setitem(GPUS, "CPU", dataclasses.replace(GPUS["CPU"], disk_bytes_s=planned_bytes_s))


def disk_as_planned(patch):
    slow_disk(patch, planned_bytes_s=1e3)


@pytest.mark.parametrize("fault, times", [(slow_disk, 1), (disk_as_planned, 0)])
def test_a_disk_that_is_slower_than_planned_is_named_once(
    ranks, reference_run, tmp_path, fault, times
):
    config = with_run_dir(reference_run, tmp_path / "run", steps=2, validate_every=0)
    config = dataclasses.replace(
        config, memory=dataclasses.replace(config.memory, offload="disk", disk_path=tmp_path)
    )
    [(output, error)] = ranks.run(1, run_with_fault, fault, config)
    assert error is None and output.count(f"Slow disk {tmp_path}: rank 0 gets ") == times
    assert output.count("KiB/s (planned 953.7 MiB/s); 1 of 1 rank is waiting") == times
    assert [
        line["slow_disks"].keys() for line in metrics(config.train.run_dir) if "event" in line
    ] == [{"0"}] * times


def poison_gradients(patch, calls_hit):
    """Write a NaN into rank 1's gradients in these calls. Each call is a step or the repetition of
    one."""
    calls = []
    clip = step.clip_gradients

    def clip_gradients(params, *args):
        params = list(params)
        calls.append(params)
        if len(calls) in calls_hit and dist.get_rank() == 1:
            params[0].grad.to_local().view(-1)[0] = float("nan")
        return clip(params, *args)

    patch.setattr(step, "clip_gradients", clip_gradients)


def nan_once(patch):
    poison_gradients(patch, [3])


def nan_twice(patch):
    poison_gradients(patch, [3, 4])


def nan_always(patch):
    poison_gradients(patch, range(3, 99))


def test_a_bad_step_is_repeated_and_its_rank_named(ranks, reference_run, tmp_path):
    config = with_run_dir(reference_run, tmp_path / "run")
    (output, error), _ = ranks.run(2, run_with_fault, nan_once, config)
    assert error is None
    assert "gradient norm nan, but not when computed again: the hardware of rank 1 on " in output
    assert [line["step"] for line in metrics(config.train.run_dir) if "suspected" in line] == [3]
    lines = [line for line in metrics(config.train.run_dir) if "event" not in line]
    assert [line["loss"] for line in lines] == [
        line["loss"] for line in metrics(reference_run.train.run_dir)
    ]


def wrong_attention(patch):
    """Attention returns NaN once, on rank 1 in its third step, which spoils the gradients of both
    ranks."""
    computed = []
    hit = []
    train_step = trainer_module.train_step
    attend = stages.StagedAttention.attend

    def wrong(*args):
        out, lse = attend(*args)
        if dist.get_rank() == 1 and len(computed) == 3 and not hit:
            hit.append(args)
            out = out * math.nan
        return out, lse

    patch.setattr(
        trainer_module,
        "train_step",
        lambda *args, **kwargs: computed.append(args) or train_step(*args, **kwargs),
    )
    patch.setattr(stages.StagedAttention, "attend", wrong)


def test_the_rank_of_a_wrong_loss_is_named(ranks, reference_run, tmp_path):
    config = with_run_dir(reference_run, tmp_path / "run", steps=3)
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, cp=1))
    (output, error), _ = ranks.run(2, run_with_fault, wrong_attention, config)
    assert (
        error is None
        and "step 3: loss nan, gradient norm nan, but not when computed again" in output
    )
    assert ": the hardware of rank 1 on " in output and "rank 0 on" not in output


@pytest.mark.parametrize(
    "fault, bad_step",
    [
        (nan_always, "skip"),
        pytest.param(nan_twice, "stop", marks=pytest.mark.slow),
        pytest.param(nan_twice, "skip", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_is_bad_twice_is_skipped_or_ends_the_run(
    ranks, reference_run, tmp_path, fault, bad_step
):
    config = with_run_dir(reference_run, tmp_path / "run", bad_step=bad_step)
    (output, error), _ = ranks.run(2, run_with_fault, fault, config)
    if bad_step == "stop" or fault is nan_always:
        assert (
            error.startswith("Diverged: step 3: loss ")
            and "gradient norm nan, twice. The last checkpoint" in error
        )
        assert (tmp_path / "run/latest").read_text() == "step-00000002\n"
        assert output.count("is skipped") == (0 if bad_step == "stop" else 2)
        return
    assert error is None and "Its batch is skipped; " in output
    [skipped] = [
        line["skipped_documents"] for line in metrics(config.train.run_dir) if "event" in line
    ]
    assert skipped and all(isinstance(start, str) for start in skipped)
    assert [record["step"] for record in read_metrics(config.train.run_dir / "metrics.jsonl")] == [
        0,
        1,
        2,
        3,
        4,
    ]


def run_with_skipped_batches(config, numbers, stops=True, resume=None):
    """Run and skip these batches. If `stops`, the last rank receives a signal in the last of them.
    Return the exit code and the step of each save."""
    calls = []
    saves = []
    advance = trainer_module.Trainer.advance
    start_save = trainer_module.Trainer.save
    received = threading.Event()
    handle = shutdown.handle_stop_signal

    def advance_or_skip(trainer, batches):
        calls.append(batches)
        if len(calls) not in numbers:
            return advance(trainer, batches)
        if stops and len(calls) == numbers[-1] and dist.get_rank() == dist.get_world_size() - 1:
            signal.raise_signal(signal.SIGINT)
            assert received.wait(60), "signals are handled in a thread"
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module.Trainer, "advance", advance_or_skip)
        patch.setattr(
            trainer_module.Trainer, "save", lambda self: saves.append(self.step) or start_save(self)
        )
        patch.setattr(shutdown, "handle_stop_signal", lambda *args: handle(*args) or received.set())
        return run(config, resume), saves


def test_a_run_stops_and_saves_after_a_skipped_batch(ranks, reference_run, tmp_path):
    config = with_run_dir(reference_run, tmp_path / "run", steps=2, save_every=1, validate_every=0)
    for code, saves in ranks.run(2, run_with_skipped_batches, config, [2, 3]):
        assert (code, saves) == (ExitCode.SIGNALED + signal.SIGINT, [1, 1]), (
            "due after the step, and at the end"
        )
    config = with_run_dir(config, tmp_path / "first", save_every=0, save_minutes=1e-9)
    [(code, saves)] = ranks.run(1, run_with_skipped_batches, config, [1])
    assert (code, saves) == (ExitCode.SIGNALED + signal.SIGINT, [0]), "before the first step"
    [(code, saves)] = ranks.run(
        1, run_with_skipped_batches, config, [2], False, config.train.run_dir
    )
    assert (code, saves) == (ExitCode.DONE, [1, 1, 2]), (
        "the clock makes a save due in the skipped step"
    )


def test_a_spike_is_a_multiple_of_the_median():
    def accepts(norm, spike, count):
        steps = SimpleNamespace(spike=spike, norms=[1.0] * count)
        return BadSteps.accepts(steps, 2.0, norm)

    assert [accepts(norm, 4, 20) for norm in (3.9, 4.1, math.inf, math.nan)] == [
        True,
        False,
        False,
        False,
    ]
    assert accepts(99.0, 4, 19) and accepts(99.0, None, 20)


def run_with_other_data(config, other):
    """Run on nodes with their own copies of the data, under one path."""
    folder = config.data.path if dist.get_rank() == 0 else other
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(dataclasses.replace(config, data=dataclasses.replace(config.data, path=Path("*.txt"))))


def test_a_rank_with_other_data_is_refused_before_the_first_step(ranks, reference_run, tmp_path):
    """The files have the same names and sizes but different contents."""
    other = shutil.copytree(reference_run.data.path, tmp_path / "texts")
    text = (other / "07.txt").read_text()
    (other / "07.txt").write_text(text.replace("7", "8"))
    with pytest.raises(
        AssertionError, match=r"data.path is \w+ on rank 0 and \w+ on rank 1 .*same files"
    ):
        ranks.run(2, run_with_other_data, with_run_dir(reference_run, tmp_path / "run"), other)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_extra_files_of_a_download_do_not_change_the_model(tmp_path):
    data = SimpleNamespace(fingerprint=str, stream=SimpleNamespace(sources=[]), validation=None)

    def fingerprints(name, weights):
        (tmp_path / name / ".cache").mkdir(parents=True)
        (tmp_path / name / ".cache" / "when").write_text(name)
        (tmp_path / name / "model.safetensors").write_text(weights)
        return run_files._fingerprints(
            parse_config({"model": {"path": str(tmp_path / name)}}), data, ""
        )

    assert (
        fingerprints("one", "weights")
        == fingerprints("two", "weights")
        != fingerprints("three", "others!")
    )


def test_the_global_batch_is_kept_by_another_number_of_ranks(ranks, reference_run, tmp_path):
    config = with_run_dir(
        reference_run, tmp_path / "two", steps=3, global_batch=4, accumulate=1, save_every=2
    )
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, cp=1))
    ranks.run(2, run, config)
    resumed = with_run_dir(config, copy_run_at_step(config.train.run_dir, tmp_path / "one", 2))
    ranks.run(1, run, resumed, resumed.train.run_dir)
    losses, resumed_losses = (
        [r["loss"] for r in metrics(c.train.run_dir)[3:]] for c in (config, resumed)
    )
    assert resumed_losses == pytest.approx(losses, rel=1e-5)
    changed = with_run_dir(
        resumed,
        copy_run_at_step(config.train.run_dir, tmp_path / "lost", 2),
        global_batch=None,
        accumulate=2,
    )
    [(output, _)] = ranks.run(1, run_with_fault, slow_validation, changed, True)
    assert "2 sequences per step (was 4); train.global_batch=4 keeps them" in output
    with pytest.raises(ConfigError, match=r"global_batch=3 .*multiple of 2.*use 2 or 4, or"):
        dataclasses.replace(config.train, global_batch=3).micro_steps(2)


def slow_validation(patch):
    """No fault: validation is expected to take two hours."""
    patch.setattr(loop, "validation_seconds", lambda run: 7200.0)


def test_a_long_validation_before_the_first_step_is_skipped(ranks, reference_run, tmp_path):
    config = with_run_dir(reference_run, tmp_path / "run", steps=1)
    [(output, error)] = ranks.run(1, run_with_fault, slow_validation, config)
    assert (
        error is None
        and "No validation before the first step: it would take about 120 minutes" in output
    )
    assert [line["step"] for line in metrics(config.train.run_dir)] == [1]
