"""A run survives the readers of its output, and exits without waiting for storage that hangs."""

import contextlib
import errno
import io
import os
import sys
import threading
import time
from functools import partial

import pytest
from rich.console import Console as RichConsole

from ithaka.checkpoint.checkpoints import latest_name
from ithaka.cli import runs as cli
from ithaka.exits import ExitCode
from ithaka.log import console as console_module
from ithaka.log.console import Console
from ithaka.run import launch, streams
from ithaka.run.streams import call_in_time, survive_lost_readers
from runs import metrics, start_program, tiny_run, wait_for
from test_train_loop_console import record


@contextlib.contextmanager
def streams_on_pipes():
    """Put this process's stdout and stderr on pipes. Yields the reading ends, which the test may
    lose."""
    pipes = [os.pipe() for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        for name, (_, writer) in zip(("stdout", "stderr"), pipes, strict=True):
            stream = io.TextIOWrapper(
                io.BufferedWriter(io.FileIO(writer, "w")), line_buffering=name == "stderr"
            )
            patch.setattr(sys, f"__{name}__", stream)
            patch.setattr(sys, name, stream)
        readers = [reader for reader, _ in pipes]
        yield readers
    for reader in readers:
        os.close(reader)


def lose(reader):
    """Close the reading end of a pipe, whose number stays in use."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), reader)


def test_streams_are_written_until_their_reader_goes_away():
    with streams_on_pipes() as readers:
        print("from before,", end=" ")
        survive_lost_readers()
        stdout = sys.stdout
        survive_lost_readers()
        assert sys.stdout is stdout, "wrapped once"
        print("one line", flush=True)
        assert os.read(readers[0], 100) == b"from before, one line\n"
        for number, stream in enumerate((sys.stdout, sys.stderr)):
            assert (stream.encoding.lower(), stream.line_buffering) == ("utf-8", number == 1)
            lose(readers[number])
            for _ in range(2):
                print("nobody reads this", file=stream, flush=True)
            assert os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))


def test_a_reader_may_be_lost_before_the_first_write():
    with streams_on_pipes() as readers:
        print("not written yet", end="")
        lose(readers[0])
        survive_lost_readers()
        print("words", flush=True)
        assert os.path.samestat(os.fstat(sys.stdout.fileno()), os.stat(os.devnull))


def test_a_captured_stream_is_left_alone(capsys):
    before = sys.stdout
    survive_lost_readers()
    assert sys.stdout is before


@pytest.mark.parametrize(
    "number, name, is_lost",
    [
        (errno.EPIPE, "log", True),
        (errno.EIO, os.devnull, True),
        (errno.EIO, "log", False),
        (errno.ENOSPC, "log", False),
    ],
)
def test_other_errors_are_not_taken_for_the_loss_of_a_reader(tmp_path, number, name, is_lost):
    """A closed terminal, here another character device, returns EIO, and so does a broken disk."""
    with (tmp_path / name).open("w") as file:
        assert streams._has_lost_reader(OSError(number, ""), file.fileno()) == is_lost


def fail(number, data):
    raise OSError(number, os.strerror(number))


def test_steps_are_recorded_after_the_reader_of_the_log_is_gone(tmp_path, monkeypatch):
    """On a terminal, rich also writes in a thread of its own."""
    monkeypatch.setattr(
        console_module, "RichConsole", partial(RichConsole, force_terminal=True, width=100)
    )
    with streams_on_pipes() as readers:
        survive_lost_readers()
        console = Console(tmp_path, num_steps=3)
        console.step(record(1))
        lose(readers[0])
        for number in (2, 3):
            console.step(record(number))
            console.print("words")
        console.close()
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]


def train_without_reader(run):
    """Train like the command line does, on a pipe that nobody reads."""
    reader, writer = os.pipe()
    for number in (1, 2):
        os.dup2(writer, number)
    os.close(reader)
    return cli.train_rank(run)


def test_a_run_whose_log_nobody_reads_trains_and_saves(tmp_path):
    config = tiny_run(tmp_path)
    program = start_program(config, 2, rank=train_without_reader)
    assert program.wait() == ExitCode.DONE, program.stderr
    assert latest_name(config.train.run_dir) == "step-00000004"
    assert [line["step"] for line in metrics(config.train.run_dir)] == [0, 1, 2, 3, 4]


def test_the_launcher_survives_the_reader_of_its_log(monkeypatch):
    """It prints what it downloads, and the plan, at every restart."""
    pipes = []

    def check(*_):
        lose(pipes[0])
        print("downloading a model", flush=True)
        raise ZeroDivisionError("checked")

    monkeypatch.setattr(cli, "read_settings", check)
    with streams_on_pipes() as readers, pytest.raises(ZeroDivisionError, match="checked"):
        pipes += readers
        cli.start_run(None, None, None, None)


# ---- storage that hangs


def test_a_call_that_hangs_or_fails_is_given_up(monkeypatch):
    start = time.monotonic()
    assert call_in_time(lambda: threading.Event().wait(60), 0.1, "late") == "late"
    assert call_in_time(partial(fail, errno.ESTALE, b""), 60, "failed") == "failed"
    assert call_in_time(lambda: "done", 60, "late") == "done"
    assert time.monotonic() - start < 30
    monkeypatch.setattr(threading.Thread, "start", lambda self: fail_to_start())
    assert call_in_time(lambda: "done", 60, "late") == "done"


def fail_to_start():
    raise RuntimeError("can't start new thread")


def test_a_rank_exits_even_if_it_cannot_report_why(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(launch, "REPORT_LIMIT_S", 0.1)
    monkeypatch.setattr(launch, "_outcome_dir", tmp_path)
    os.mkfifo(tmp_path / "writing-0")  # opening it hangs until there is a reader
    outcome = launch.Outcome(ExitCode.HANG, "rank 1 hangs")
    threading.Thread(target=launch.exit_rank, args=(outcome,), daemon=True).start()
    wait_for(lambda: ended == [ExitCode.HANG], timeout_s=30)
    reader = os.open(tmp_path / "writing-0", os.O_RDONLY | os.O_NONBLOCK)  # let the thread end
    wait_for((tmp_path / "failed-0").exists)
    os.close(reader)
