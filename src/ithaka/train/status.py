"""What is being done while there is nothing else to see. Imports no torch: importing it is part of that."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

PATIENCE_S = 5.0  # what takes less is not worth a line
AGAIN_S = 30.0


@contextmanager
def status(what: str, again_s: float | None = AGAIN_S) -> Iterator[None]:
    """Says `what` while the code inside runs: on a terminal at once, beside a spinner that goes when it is done;
    elsewhere on a line once it takes long, and again every so often. Of all ranks, rank 0 speaks."""
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    screen = RichConsole(highlight=False, soft_wrap=True)
    if sys.stdout.isatty() and not screen.is_dumb_terminal:  # rich calls a pipe a terminal where colours are forced
        spinner = Spinner("dots", Text(f"{what} ..."))
        with Live(spinner, console=screen, transient=True, redirect_stderr=sys.stderr.isatty()):
            yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_remind, args=(what, again_s, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _remind(what: str, again_s: float | None, done: threading.Event) -> None:
    start = time.monotonic()
    wait_s: float | None = PATIENCE_S
    while not done.wait(wait_s):
        print(f"{what} ... {time.monotonic() - start:.0f} s", flush=True)
        wait_s = again_s
