"""Exit in time after a scheduler's signal."""

from __future__ import annotations

import time
from signal import SIGINT, Signals
from threading import Timer

from ithaka.checkpoint import files, save
from ithaka.exits import ExitCode
from ithaka.launch import Outcome, exit_rank, handle_stop_signal
from ithaka.preflight.run import Run


class GracefulShutdown:
    """After SIGTERM or SIGUSR1, exit within train.grace_s: after the step and its checkpoint if they finish in time,
    else at once. A save in progress gets the full grace period."""

    def __init__(self, run: Run) -> None:
        self.run, self.seconds = run, run.config.train.grace_s
        self.step_start, self.step_s = 0.0, 0.0  # time.monotonic(); duration of the last step
        self.saver: save.Saver | None = None  # once training starts
        self.timer: Timer | None = None

    def handle_signal(self, number: int, again: bool) -> None:
        if number != SIGINT and not self._is_writing and self._needed_s > self.seconds:
            self.leave(number)
        handle_stop_signal(number, again)
        if number != SIGINT:
            self.timer = Timer(self.seconds, self.leave, [number])
            self.timer.daemon = True
            self.timer.start()

    @property
    def _is_writing(self) -> bool:
        return self.saver is not None and self.saver.in_progress and not self.saver.is_done

    @property
    def _needed_s(self) -> float:
        """Estimated seconds until the current step is done and saved."""
        save_s = self.saver.seconds if self.saver is not None else 0.0
        return self.step_start + self.step_s + save_s - time.monotonic()

    def close(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def leave(self, number: int) -> None:
        reason = f"the step and its checkpoint do not finish within train.grace_s={self.seconds:g}"
        message = f"{Signals(number).name}: {reason}. {files.describe_last(self.run.run_dir)}"
        exit_rank(Outcome(ExitCode.SIGNALED + number, message, shared=True))
