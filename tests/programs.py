"""Start processes as forks of one that has imported torch and transformers, which takes seconds of
CPU time.

This module imports neither: functions of launched ranks may be in a test that imports it.
"""

import contextlib
import multiprocessing
import os
import select
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

# Imported once, by the process from which all others are forked; it runs nothing else and has no
# threads.
PRELOAD = [
    "ithaka.train.loop",
    "trl.trainer.sft_trainer",
    "torch.distributed.launcher.api",
    "hypothesis",
    "pytest",
]
PLAIN = "ITHAKA_PLAIN_TESTS"  # the variable that `pytest --plain` sets, see replacements.py


def forks() -> Any:
    """Return the multiprocessing context that forks; with --plain, one whose new processes import
    everything."""
    if PLAIN in os.environ:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def fork_from_here() -> None:
    """Fork this process, with all its imports, and let all others be forks of that one.

    It imports what is missing when it is needed.
    """
    forks()
    server = forkserver._forkserver
    spawn = util.spawnv_passfds

    def fork(_: str, command: list[str], fds: list[int]) -> int:
        """Act like a new process that runs `command`, listens on the first of `fds` and ends with
        the second."""
        if pid := os.fork():
            return pid
        try:
            server.__init__()  # releases the lock, which the fork inherits
            # the other end of the second: keeping it, this process would wait for itself
            for fd in range(3, 256):
                with contextlib.suppress(OSError):
                    if fd not in fds and os.path.sameopenfile(fd, fds[1]):
                        os.close(fd)
            # pytest replaces them
            sys.stdin = sys.__stdin__
            sys.stdout = sys.__stdout__
            sys.stderr = sys.__stderr__
            select.select(fds, [], [])
            exec(command[-1])
        finally:
            os._exit(0)

    util.spawnv_passfds = fork
    try:
        server.ensure_running()
    finally:
        util.spawnv_passfds = spawn


class Program:
    """The main process of a command, in its own session; its exit code is the result of
    function(*args)."""

    def __init__(self, folder: Path, function: Callable[..., int], *args: Any) -> None:
        self._files = [
            Path(tempfile.mkstemp(dir=folder, suffix=suffix)[1])
            for suffix in (".stdout", ".stderr")
        ]
        self._process = forks().Process(
            target=_main, args=(self._files, function, args), daemon=True
        )
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def stdout(self) -> str:
        return self._files[0].read_text()

    @property
    def stderr(self) -> str:
        return self._files[1].read_text()

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float = 300) -> int:
        self._process.join(timeout_s)
        code = self.poll()
        assert code is not None, f"still running after {timeout_s} s: {self.stderr}"
        return code


def _main(files: list[Path], function: Callable[..., int], args: tuple[Any, ...]) -> None:
    os.setsid()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY), number)
    sys.exit(function(*args))
