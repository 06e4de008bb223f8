"""Output that must neither end a run nor hold it up: readers that go away, and storage that
hangs."""

import errno
import io
import os
import stat
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


def survive_lost_readers() -> None:
    """From now on, discard what this process writes to stdout or stderr once nobody can read it:
    `head` has ended, `tee` was killed, the terminal was closed. The next line would end the run."""
    if sys.stdout is sys.__stdout__:  # else the stream is captured, or this was called before
        sys.stdout = _surviving(sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _surviving(sys.stderr)


def _surviving(stream: Any) -> Any:
    """Return a stream like this one, on the same descriptor, that survives the loss of its
    reader."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    with suppress(OSError):  # the new stream's first write meets the same error
        stream.flush()
    file = _SurvivingFile(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        file if stream.write_through else io.BufferedWriter(file),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _SurvivingFile(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not _has_lost_reader(error, self.fileno()):
                raise
        discard_output(self.fileno())
        return memoryview(data).nbytes


def _has_lost_reader(error: OSError, fd: int) -> bool:
    is_terminal = stat.S_ISCHR(os.fstat(fd).st_mode)  # isatty() is false once it is closed
    return error.errno == errno.EPIPE or (error.errno == errno.EIO and is_terminal)


def discard_output(fd: int) -> None:
    """Let this process, and those it starts, write to /dev/null instead."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)


def write_stderr(text: str) -> None:
    """Write to stderr from any thread: another one may hold print's lock. Does not raise."""
    with suppress(OSError):  # a full disk, or no reader
        os.write(2, text.encode())


def call_in_time(function: Callable[[], T], limit_s: float, otherwise: T) -> T:
    """Call a function that uses storage, which may hang, in a thread that does not keep the process
    alive. Return `otherwise` if it raises or takes longer."""
    future = Future[T]()

    def call() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    try:
        Thread(target=call, daemon=True, name="storage").start()
    except RuntimeError:  # the machine has no room for another thread
        call()
    try:
        return future.result(limit_s)
    except Exception:
        return otherwise
