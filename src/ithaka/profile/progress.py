"""What a step has to do, and how far it is: phase, share done, time left, rate."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ithaka.layout import Layout
from ithaka.phases import KEPT, MLP, RESIDUAL, UNSHARDED, PhasePath
from ithaka.plan.bytes import gpu_phases
from ithaka.plan.hardware import Gpu, Hardware
from ithaka.plan.heads import slots_of
from ithaka.plan.shape import ModelShape, Work

REPORT_S = 30.0  # between two reports of a step
# The planner's names for the map's holders, where they differ.
_AS_MAPPED = {"layer weights": UNSHARDED, "tiles": MLP, "kept activations": KEPT["device"]}


def layer_flops(
    shape: ModelShape, work: Work, cp: int, window: int | None, kept: bool, checkpoint: bool
) -> dict[PhasePath, float]:
    """FLOPs of one rank by (direction, part). `kept`: attention is not computed again; `checkpoint`: the rest is."""
    s, D, K = work.local_tokens(cp), shape.hidden, shape.head_dim
    attend = 4 * K * shape.heads / cp * work.pairs(window)
    project = 2 * s * D * (shape.heads + 2 * shape.kv_heads) * K
    output = 2 * s * D * shape.heads * K
    mlp = 2 * s * 3 * D * shape.mlp
    again = 1 if checkpoint else 0
    attend_again = again * (not kept)
    return {
        ("forward", "attention"): attend,
        ("forward", "projections"): project,
        ("forward", "mlp"): mlp + output,
        ("backward", "attention"): (2.5 + attend_again) * attend,
        ("backward", "projections"): (2 + again + attend_again) * project + output,
        # A gated MLP's last product is not computed again.
        ("backward", "mlp"): (2 + again * 2 / 3) * mlp + (1 + again) * output,
    }


@dataclass(frozen=True)
class Job:
    """A run's step as the planner sees it."""

    shape: ModelShape
    layout: Layout
    work: Work
    micro_steps: int
    num_ranks: int
    gpu: Gpu  # the CPU's entry where there is none

    @property
    def knows_rate(self) -> bool:
        return self.gpu.name != "CPU"

    @property
    def hardware(self) -> Hardware:
        """As if all ranks were in one node."""
        return Hardware(self.gpu, gpus_per_node=self.num_ranks)

    def attends_again(self, layer: int) -> bool:
        """Whether backward computes the layer's attention again."""
        keeps = self.layout.of_layers(self.shape.num_layers)[layer]
        return keeps.attention is None and not keeps.everything

    def planned(self) -> dict[str, int]:
        """Bytes by the map's holders on one rank, at the planned peak."""
        phases = gpu_phases(self.shape, self.layout, self.hardware, self.work)
        _, holders = max(phases, key=lambda phase: sum(phase[1].values()))
        # What ordinary autograd has under way cannot be told apart from the stream's gradients.
        names = _AS_MAPPED if self.layout.checkpoint else {**_AS_MAPPED, "tiles": RESIDUAL}
        planned: dict[str, int] = {}
        for name, num_bytes in holders.items():
            planned[names.get(name, name)] = planned.get(names.get(name, name), 0) + num_bytes
        return {name: num_bytes for name, num_bytes in planned.items() if num_bytes}

    def flops(self) -> dict[PhasePath, float]:
        """By phase: (layer, direction, part) or the loss's; of one rank and one step."""
        cp, checkpoint = self.layout.cp, self.layout.checkpoint
        logits = 2.0 * self.work.local_tokens(cp) * self.shape.hidden * self.shape.vocab
        found: dict[PhasePath, float] = {("loss forward",): logits, ("loss backward",): 3 * logits}
        for i, window in enumerate(self.shape.windows):
            parts = layer_flops(self.shape, self.work, cp, window, not self.attends_again(i), checkpoint)
            found |= {(f"layer {i}", *part): flops for part, flops in parts.items()}
        return {part: flops * self.micro_steps for part, flops in found.items()}

    def rate(self, path: PhasePath) -> float | None:
        """FLOP/s of the device for a phase; for a whole direction of a layer, that of its parts together."""
        if not self.knows_rate:
            return None
        if len(path) == 2:
            parts = {part: flops for part, flops in self.flops().items() if part[:2] == path}
            return sum(parts.values()) / sum(flops / (self.rate(part) or 1) for part, flops in parts.items())
        if path[-1] != "attention":
            return self.gpu.matmul_flops
        return self.gpu.attention_forward_flops if path[1] == "forward" else self.gpu.attention_backward_flops


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
        self._ahead: deque[tuple[Any, PhasePath, np.ndarray]] = deque()  # event, phase, work done
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self, step: int, job: Job) -> None:
        """`job`: what this step has to do."""
        self._done = _WorkDone(job)
        self._at: tuple[PhasePath, np.ndarray] = ((), np.zeros(2))
        self._stop = threading.Event()
        self._ahead.clear()
        self._thread = threading.Thread(target=self._watch, args=(step, self._stop), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._stop is not None and self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._stop = self._thread = None

    def enter(self, path: PhasePath) -> None:
        # Shown: a layer's direction, one of its stages, or what is no layer. Other parts come too often.
        if self._stop is not None and (len(path) in (2, 4) or not path[0].startswith("layer ")):
            self._reached(path)

    def leave(self, path: PhasePath) -> None:
        if self._stop is not None and self._done.count(path):
            self._reached(path)

    def _reached(self, path: PhasePath) -> None:
        event = None
        if self.on_gpu:
            event = torch.cuda.Event()
            event.record()
        with self._lock:
            self._ahead.append((event, path, self._done.so_far))

    def _watch(self, step: int, stop: threading.Event) -> None:
        started = before_s = time.monotonic()
        before_flops = 0.0
        while not stop.wait(self.every_s):
            path, (done_s, flops) = self._device_at()
            now, share = time.monotonic(), done_s / max(self._done.total_s, 1e-30)
            left_s = (now - started) * (1 - share) / share if share > 0 else None
            rate = (flops - before_flops) / (now - before_s) if flops > before_flops else None
            self.say(Report(step, " / ".join(path), 100 * share, now - started, left_s, rate))
            before_s, before_flops = now, flops

    def _device_at(self) -> tuple[PhasePath, np.ndarray]:
        with self._lock:
            while self._ahead and (self._ahead[0][0] is None or self._ahead[0][0].query()):
                self._at = self._ahead.popleft()[1:]
        return self._at


class _WorkDone:
    """Counts phases that were left: layers' directions, and inside them their stages of attention.

    Work is a pair: seconds by the device's rates (where none is known, by any: only shares are told), and FLOPs.
    """

    def __init__(self, job: Job) -> None:
        self.so_far, self._stages = np.zeros(2), np.zeros(2)  # _stages: of the direction under way
        self._work: dict[PhasePath, np.ndarray] = {}
        num_stages = len(slots_of(job.shape, job.layout).stages)
        for path, flops in job.flops().items():
            work = np.array([flops / (job.rate(path) or 1e12), flops]) / job.micro_steps
            whole = path[:2] if len(path) == 3 else path
            self._work[whole] = self._work.get(whole, 0) + work
            if path[-1] == "attention":
                again = path[1] == "backward" and job.attends_again(int(path[0].split()[1]))
                self._work[*path, "stage"] = work / (num_stages * (1 + again))
        self.total_s = job.micro_steps * sum(work[0] for path, work in self._work.items() if path[-1] != "stage")

    def count(self, path: PhasePath) -> bool:
        """Counts a phase that was left; False if it does not count."""
        is_stage = len(path) == 4 and path[3].startswith("stage ")
        work = self._work.get((*path[:3], "stage") if is_stage else path)
        if work is None:
            return False
        if is_stage:
            self._stages = self._stages + work
        else:
            work, self._stages = work - self._stages, np.zeros(2)
        self.so_far = self.so_far + work
        return True
