"""Where a rank is: the phase of its host and of its device, which the host runs ahead of."""

import math
import sys
import threading
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ithaka.device_memory import DeviceMemory, device_memory
from ithaka.exits import ran_out_of_memory
from ithaka.phases import Listener, PhasePath
from ithaka.profile.timeline import DeviceTimeline, Mark

# Kinds of pauses, each the time between two phases that count as progress. Attention's grow with
# the document length.
ATTENTION = "attention"
STEP = "step"
UPDATE = "update"
VALIDATION = "validation"
KINDS = (ATTENTION, STEP, UPDATE, VALIDATION)
BETWEEN_STEPS = ("between steps",)


def pause_kind(path: PhasePath) -> str | None:
    """Return the kind of the pause that starts with this phase, or None if it is not measured."""
    outermost = path[0] if path else ""
    if outermost == "optimizer":
        return UPDATE
    if outermost == "validation":
        return VALIDATION
    if outermost.startswith(("layer ", "loss ", "embedding")):
        return ATTENTION if _is_attention(path[:4]) else STEP
    return None


def _is_attention(path: PhasePath) -> bool:
    """Whether the phase is attention in a step: ("layer 3", "forward", "attention", "stage 0")."""
    return len(path) == 4 and path[0].startswith("layer ") and path[2] == "attention"


class HostPosition(Listener):
    """The phase the host is in, and where memory ran out. As an error propagates it leaves phases,
    innermost first: it was raised in the first one left, which stays the position."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.path: PhasePath = ()
        self.before: PhasePath = ()  # the last innermost phase, for errors between phases
        self.memory: DeviceMemory | None = None  # of the device, when memory ran out

    def enter(self, path: PhasePath) -> None:
        self.path = path
        self.memory = None

    def leave(self, path: PhasePath) -> None:
        if ran_out_of_memory(sys.exc_info()[1]):
            self.measure()
            return
        self.path = path[:-1]
        if path[-1] != "copies" and self.before[: len(path)] != path:
            self.before = path

    def measure(self) -> DeviceMemory:
        """Measure once: memory is freed while the error propagates."""
        if self.memory is None:
            self.memory = device_memory(self.device)
        return self.memory

    @property
    def where(self) -> str:
        if self.path:
            return f"in {' / '.join(self.path)}"
        return f"after {' / '.join(self.before)}" if self.before else "before the first phase"


@dataclass
class StepShare:
    """How much of a step is done, by planned time."""

    shares: dict[PhasePath, float]  # of the step, by phase
    done: float = 0.0  # on the host
    reached: tuple[PhasePath, float] = ((), 0.0)  # the device's phase, and the share done there


class _Passed(NamedTuple):
    """What the device passes."""

    path: PhasePath
    is_position: bool  # for the heartbeat, which compares ranks: all of them pass the same
    is_warm: bool  # whether the pause from here on counts
    step: StepShare | None  # of which it is part
    done: float


class PhaseTracker(HostPosition):
    """Also the phase this rank's device is in, its longest pauses, its time in attention, and the
    share of a step that is done. Heartbeat, progress and out-of-memory messages read it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.step = 0
        self.step_share: StepShare | None = None  # while progress is shown
        self.warm = False  # true after the first step, which compiles and tries kernels
        self._lock = threading.Lock()
        self._num_passed = 0
        self._device_path = PhasePath()
        self._timeline = DeviceTimeline[_Passed](device)
        self._pause_start: Mark | None = None  # of the last phase reached, if its pause counts
        self._longest_pauses = dict.fromkeys(KINDS, 0.0)
        # Longest pauses in attention: in this step, and expected if a document fills the context.
        self._step_pause = 0.0
        self._full_pause = math.inf
        self._attention: list[list[Mark]] = []  # [start, end]

    def enter(self, path: PhasePath) -> None:
        super().enter(path)
        # Track a layer's direction, its stages and exchanges, and phases outside layers. Tiles are
        # too frequent.
        waits = path[-1] == "exchange"
        is_outside = not path[0].startswith("layer ")
        is_position = len(path) == 2 or _is_attention(path) or waits or is_outside
        step = self.step_share if len(path) in (2, 4) or is_outside else None
        if not is_position and step is None:
            return
        mark = self._push(path, step, is_position)
        if _is_attention(path):
            self._attention.append([mark])
        elif waits and _is_attention(path[:-1]):
            self._stop_attention(mark)

    def leave(self, path: PhasePath) -> None:
        super().leave(path)
        if _is_attention(path):
            self._stop_attention(self._timeline.mark())
        elif path[-1] == "exchange" and _is_attention(path[:-1]):
            self._attention.append([self._timeline.mark()])
        elif path in (("optimizer",), ("validation",)):
            self._push(BETWEEN_STEPS, None)
        step = self.step_share
        if step is not None and path in step.shares:
            step.done += step.shares[path]
            self._push(path, step, is_position=False)

    def _push(self, path: PhasePath, step: StepShare | None, is_position: bool = True) -> Mark:
        done = step.done if step is not None else 0.0
        return self._timeline.push(_Passed(path, is_position, self.warm, step, done))

    def _stop_attention(self, mark: Mark) -> None:
        if self._attention:
            self._attention[-1].append(mark)

    def now(self) -> tuple[int, int, PhasePath]:
        """Return the step, the number of phases passed since the start, and the device's phase."""
        with self._lock:
            for mark, passed in self._timeline.pop_reached():
                if passed.step is not None:
                    passed.step.reached = (passed.path, passed.done)
                if passed.is_position:
                    self._count_pause(mark)
                    self._device_path = passed.path
                    self._num_passed += 1
                    self._pause_start = mark if passed.is_warm else None
            return self.step, self._num_passed, self._device_path

    def _count_pause(self, end: Mark) -> None:
        kind = pause_kind(self._device_path)
        if self._pause_start is None or kind is None:
            return
        seconds = self._timeline.seconds(self._pause_start, end)
        self._longest_pauses[kind] = max(self._longest_pauses[kind], seconds)
        if kind == ATTENTION:
            self._step_pause = max(self._step_pause, seconds)

    def end_step(self, full_ratio: float = 1.0) -> tuple[float, list[float]]:
        """Return this step's seconds in attention, and the longest pauses so far in the order of
        KINDS. `full_ratio`: attention work if every sequence were a single document / work of this
        step; it bounds the pauses of such steps. The device must have finished the step's
        attention."""
        self.now()
        pauses = dict(self._longest_pauses)
        if self._step_pause:
            self._full_pause = min(self._full_pause, full_ratio * self._step_pause)
            self._step_pause = 0.0
        if self._full_pause < math.inf:
            pauses[ATTENTION] = max(pauses[ATTENTION], self._full_pause)
        self.warm = True
        intervals = [each for each in self._attention if len(each) == 2]
        self._attention = []
        attention_s = sum(self._timeline.seconds(start, end) for start, end in intervals)
        return attention_s, list(pauses.values())
