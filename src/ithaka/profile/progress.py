"""Progress in a step, by planned time."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ithaka.comm.mesh import use_device
from ithaka.phases import PhasePath
from ithaka.profile.position import PhaseTracker, StepShare


@dataclass(frozen=True)
class StepProgress:
    step: int
    phase: str
    percent: float
    elapsed_s: float
    eta_s: float | None  # until the end of the step


class Progress:
    """Calls `report` every `every_s` seconds of a step, in a thread. `shares`: of a micro-step's
    planned time, by phase."""

    every_s = 30.0

    def __init__(
        self,
        tracker: PhaseTracker,
        shares: Mapping[PhasePath, float],
        micro_steps: int,
        report: Callable[[StepProgress], None],
    ) -> None:
        self.tracker = tracker
        self.report = report
        self.shares = {path: share / micro_steps for path, share in shares.items()}

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        self._step = StepShare(self.shares)
        self.tracker.step_share = self._step
        stop = threading.Event()
        args = (number, stop)
        thread = threading.Thread(target=self._watch, args=args, daemon=True, name="progress")
        thread.start()
        try:
            yield
        finally:
            self.tracker.step_share = None
            stop.set()
            thread.join()

    def update(self) -> tuple[PhasePath, float]:
        """The phase the device has reached, and the share of the step that is done."""
        self.tracker.now()
        return self._step.reached

    def _watch(self, step: int, stop: threading.Event) -> None:
        use_device(self.tracker.device)
        start = time.monotonic()
        share = 0.0
        share_s = 0.0  # when `share` was reached
        while not stop.wait(self.every_s):
            path, done = self.update()
            elapsed_s = time.monotonic() - start
            if done > share:
                share = done
                share_s = elapsed_s
            # It counts down within a layer.
            eta_s = max(0.0, share_s / share - elapsed_s) if share else None
            self.report(StepProgress(step, " / ".join(path), 100 * share, elapsed_s, eta_s))
