"""Stop on a signal: after the step and its checkpoint, or at once if they would take too long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGINT, Signals
from threading import Timer

from ithaka.checkpoint import checkpoints, save
from ithaka.exits import ExitCode
from ithaka.run.launch import Outcome, catch_stop_signals, exit_rank, handle_stop_signal
from ithaka.run.streams import call_in_time
from ithaka.run.validated import Run

# For naming the last checkpoint after train.grace_s, which leaves the launcher 5 s.
READ_LIMIT_S = 2.0


class GracefulShutdown:
    """After any stop signal but Ctrl-C, exit within train.grace_s: after the step and its
    checkpoint if they finish in time, else at once. A save in progress gets the full grace
    period."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.seconds = run.config.train.grace_s
        self.signals: list[Signals] = []  # that this rank received
        self.step_start = 0.0  # time.monotonic()
        self.step_s = 0.0  # duration of the last step
        self.saver: save.Saver | None = None  # once training starts
        self.timer: Timer | None = None

    @contextmanager
    def catching_signals(self) -> Iterator[None]:
        try:
            with catch_stop_signals(self.handle_signal) as self.signals:
                yield
        finally:
            self.close()

    @property
    def stop_signal(self) -> int:
        """The first signal that this rank received, or 0."""
        return self.signals[0] if self.signals else 0

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
        last = call_in_time(
            lambda: checkpoints.describe_last(self.run.run_dir), READ_LIMIT_S, unknown
        )
        message = f"{Signals(number).name}: {reason}. {last}"
        exit_rank(Outcome(ExitCode.SIGNALED + number, message, shared=True))

    def close(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
