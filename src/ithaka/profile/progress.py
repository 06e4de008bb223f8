"""Where a long step is: the phase the device is in, how much is done, the time left, the rate now."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ithaka.phases import Path
from ithaka.profile.job import Job

REPORT_S = 30.0  # between two reports of a step


@dataclass(frozen=True)
class Report:
    step: int  # the one under way
    phase: str
    percent: float
    elapsed_s: float
    eta_s: float | None  # of this step
    flops_s: float | None  # of this rank, since the report before


class Progress:
    """Listens to phases during a step and calls `say` every `every_s` seconds, from a thread of its own.

    On a GPU the host runs ahead: a phase is reached when the device has passed an event recorded there.
    """

    def __init__(self, device: torch.device, say: Callable[[Report], None], every_s: float = REPORT_S) -> None:
        self.on_gpu, self.say, self.every_s = device.type == "cuda", say, every_s
        self._lock = threading.Lock()
        self._ahead: deque[tuple[Any, Path, float, float]] = deque()  # event, phase, work and FLOPs done
        self._at: tuple[Path, float, float] = ((), 0.0, 0.0)
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self, step: int, job: Job) -> None:
        """`job`: what this step has to do."""
        self._units = _Units(job)
        self._at, self._stop = ((), 0.0, 0.0), threading.Event()
        self._ahead.clear()
        self._thread = threading.Thread(target=self._watch, args=(step, self._stop), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._stop is not None and self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._stop = self._thread = None

    # ---- phases

    def enter(self, path: Path) -> None:
        if self._stop is not None and _is_shown(path):
            self._reached(path)

    def leave(self, path: Path) -> None:
        if self._stop is not None and self._units.finish(path):
            self._reached(path)

    def _reached(self, path: Path) -> None:
        event = None
        if self.on_gpu:
            event = torch.cuda.Event()
            event.record()
        with self._lock:
            self._ahead.append((event, path, self._units.done, self._units.flops))

    # ---- the thread

    def _watch(self, step: int, stop: threading.Event) -> None:
        started = before_s = time.monotonic()
        before_flops = 0.0
        while not stop.wait(self.every_s):
            path, done, flops = self._device_at()
            now, share = time.monotonic(), done / max(self._units.total, 1e-30)
            left_s = (now - started) * (1 - share) / share if share > 0 else None
            rate = (flops - before_flops) / (now - before_s) if flops > before_flops else None
            self.say(Report(step, " / ".join(path), 100 * share, now - started, left_s, rate))
            before_s, before_flops = now, flops

    def _device_at(self) -> tuple[Path, float, float]:
        with self._lock:
            while self._ahead and (self._ahead[0][0] is None or self._ahead[0][0].query()):
                self._at = self._ahead.popleft()[1:]
        return self._at


def _is_shown(path: Path) -> bool:
    """A layer's direction, one of its stages, or what is no layer; small parts come too often."""
    return len(path) in (2, 4) or not path[0].startswith("layer ")


class _Units:
    """Work done, in seconds by the device's rates, by layers' directions and their stages of attention."""

    def __init__(self, job: Job) -> None:
        self.seconds: dict[Path, float] = {}
        self.flops_of: dict[Path, float] = {}
        stages = len(job.layout.slots(job.shape).stages)
        for path, flops in job.flops().items():
            work = flops / (job.rate(path) or 1e12)  # where no rate is known, any: only shares of the step are told
            self._add(path[:2] if len(path) == 3 else path, work, flops)
            if path[-1] == "attention":
                again = path[1] == "backward" and job.layout.checkpoint
                kept = int(path[0].split()[1]) < job.layout.keep_attention
                times = stages * (2 if again and not kept else 1)
                self._add((*path, "stage"), work / times, flops / times)
        whole = [path for path in self.seconds if path[-1] != "stage"]
        self.total = sum(self.seconds[path] for path in whole)
        self.micro_steps = job.micro_steps
        self.done = self.flops = 0.0
        self._inside = (0.0, 0.0)  # of the direction under way: counted stage by stage

    def _add(self, path: Path, work: float, flops: float) -> None:
        self.seconds[path] = self.seconds.get(path, 0.0) + work
        self.flops_of[path] = self.flops_of.get(path, 0.0) + flops

    def finish(self, path: Path) -> bool:
        """Counts a phase that was left; whether it counts at all."""
        is_stage = len(path) == 4 and path[3].startswith("stage ")
        key = (*path[:3], "stage") if is_stage else path
        if key not in self.seconds:
            return False
        work, flops = self.seconds[key] / self.micro_steps, self.flops_of[key] / self.micro_steps
        if is_stage:
            self._inside = (self._inside[0] + work, self._inside[1] + flops)
        else:
            work, flops = work - self._inside[0], flops - self._inside[1]
            self._inside = (0.0, 0.0)
        self.done, self.flops = self.done + work, self.flops + flops
        return True
