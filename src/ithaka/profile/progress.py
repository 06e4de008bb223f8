"""How far a step is: phase, share done, time left."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ithaka.dist.mesh import use_device
from ithaka.phases import Listener, PhasePath, listening
from ithaka.plan.search import Plan
from ithaka.plan.seconds import layer_seconds
from ithaka.profile.timeline import DeviceTimeline


@dataclass(frozen=True)
class StepProgress:
    step: int  # the one under way
    phase: str
    percent: float
    elapsed_s: float
    eta_s: float | None  # of this step


class Progress(Listener):
    """Calls `say` every `every_s` seconds of a step, from a thread of its own. `plan`: what one micro-step does."""

    every_s = 30.0

    def __init__(self, plan: Plan, micro_steps: int, device: torch.device, say: Callable[[StepProgress], None]) -> None:
        self.device, self.say = device, say
        self.shares = {path: share / micro_steps for path, share in planned_shares(plan).items()}

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        self._timeline = DeviceTimeline[tuple[PhasePath, float]](self.device)  # phase, share done
        self._at: tuple[PhasePath, float] = ((), 0.0)
        self._done, stop = 0.0, threading.Event()
        thread = threading.Thread(target=self._watch, args=(number, stop), daemon=True, name="progress")
        thread.start()
        try:
            with listening(self):
                yield
        finally:
            stop.set()
            thread.join()

    def enter(self, path: PhasePath) -> None:
        # Shown: a layer's direction, one of its stages, or what is no layer. Other parts come too often.
        if len(path) in (2, 4) or not path[0].startswith("layer "):
            self._timeline.push((path, self._done))

    def leave(self, path: PhasePath) -> None:
        if path in self.shares:
            self._done += self.shares[path]
            self._timeline.push((path, self._done))

    def device_at(self) -> tuple[PhasePath, float]:
        for _, reached in self._timeline.pop_reached():
            self._at = reached
        return self._at

    def _watch(self, step: int, stop: threading.Event) -> None:
        use_device(self.device)
        started, share, reached_s = time.monotonic(), 0.0, 0.0
        while not stop.wait(self.every_s):
            path, done = self.device_at()
            elapsed_s = time.monotonic() - started
            if done > share:
                share, reached_s = done, elapsed_s
            left_s = max(0.0, reached_s / share - elapsed_s) if share else None  # falls while a layer runs
            self.say(StepProgress(step, " / ".join(path), 100 * share, elapsed_s, left_s))


def planned_shares(plan: Plan) -> dict[PhasePath, float]:
    """Of a micro-step's planned seconds, those of each layer's directions and of the loss."""
    seconds: dict[PhasePath, float] = {}
    keeps = plan.layout.of_layers(plan.shape.num_layers)
    for i, (window, kept) in enumerate(zip(plan.shape.windows, keeps, strict=True)):
        forward, backward = layer_seconds(plan.shape, plan.layout, plan.hardware, plan.work, window, kept)
        seconds |= {(f"layer {i}", "forward"): forward.total, (f"layer {i}", "backward"): backward.total}
    total = plan.seconds.total - plan.seconds.update
    seconds[("loss forward",)] = total - sum(seconds.values())
    return {path: path_s / total for path, path_s in seconds.items()}
