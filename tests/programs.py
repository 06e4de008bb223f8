"""Processes that are forks of one that has imported torch and transformers, which takes seconds of CPU time.

Imports neither itself: what a launched rank runs may be in a test that imports this.
"""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Imported once, by the process that all others are forks of; it runs nothing else and has no threads.
PRELOAD = ["ithaka.train.loop", "trl.trainer.sft_trainer", "torch.distributed.launcher.api", "hypothesis", "pytest"]


def forks() -> Any:
    """The context of multiprocessing that starts them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


class Program:
    """The main process of a command, in a session of its own; it exits with what function(*args) returns."""

    def __init__(self, folder: Path, function: Callable[..., int], *args: Any) -> None:
        self._files = [Path(tempfile.mkstemp(dir=folder, suffix=suffix)[1]) for suffix in (".stdout", ".stderr")]
        self._process = forks().Process(target=_main, args=(self._files, function, args), daemon=True)
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def stdout(self) -> str:
        return self._files[0].read_text()

    @property
    def stderr(self) -> str:
        return self._files[1].read_text()

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        self._process.join(timeout_s)
        code = self.poll()
        assert code is not None, f"not ended in {timeout_s} s: {self.stderr}"
        return code


def _main(files: list[Path], function: Callable[..., int], args: tuple[Any, ...]) -> None:
    os.setsid()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY), number)
    sys.exit(function(*args))
