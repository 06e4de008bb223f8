"""Asked to stop: by Ctrl-C, a scheduler, or a launcher that passes it on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def heeding_interrupts() -> Iterator[None]:
    """Around imports: a Ctrl-C inside is a KeyboardInterrupt at the latest when they are done. While PyTorch's library
    looks for numpy it drops every exception, and the import would go on as if nothing had been asked."""
    asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if asked:
            raise KeyboardInterrupt


class StopRequest:
    """Ctrl-C or SIGTERM.  The first asks the loop to stop after the step; a second leaves at once with 128 +
    signal.

    Signals within half a second are one: a terminal sends Ctrl-C to every process, and a launcher such as
    torchrun passes it on once more."""

    SAME_S = 0.5

    def __init__(self) -> None:
        self.asked_at: float | None = None
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked_at is None:
            self.asked_at = now
        elif now - self.asked_at > self.SAME_S:
            os._exit(128 + number)
