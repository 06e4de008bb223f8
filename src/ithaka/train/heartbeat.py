"""Each rank publishes a heartbeat and its phase. If one dies, freezes or hangs, all ranks end and name it.

Beats go through the rendezvous store, not through collectives, so they work while those hang.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import math
import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ithaka.data.mix import tokens_per_round
from ithaka.data.pack import Packing
from ithaka.dist.mesh import use_device
from ithaka.exits import ExitCode
from ithaka.launch import Outcome, exit_rank
from ithaka.phases import Listener, PhasePath
from ithaka.plan.hardware import GPUS, Hardware, available_memory, gpu_named
from ithaka.plan.seconds import layer_seconds
from ithaka.plan.show import format_bytes
from ithaka.preflight.run import Run
from ithaka.profile.timeline import DeviceTimeline

BEAT_S = 5.0
SILENT_S = 40.0  # without a beat a rank is dead, or frozen
LEAST_S = 45.0  # without progress inside a step
LATE_S = 10.0  # after which a beat is old
LOST_TRIES = 3  # failed requests in a row, after which the store is lost
ANSWER_S = 2.0
PATIENCE = 5  # times what was measured or planned
READ_BYTES_S, TOKENISE_BYTES_S, WRITE_BYTES_S = 50e6, 1e6, 50e6  # what a slow machine manages
TOKEN_BYTES = 64  # read per token of a round, at most: records may be skipped, and long documents dropped
SLOW, SLOW_STEPS = 1.2, 10  # times the median rank's seconds in attention, over so many steps
SHOWN = 8  # ranks of a report
LOW_BYTES = 2**30  # of host memory

Beat = dict[str, Any]


# Pauses: from one phase that counts as progress to the next. Attention's grow with the length of documents.
ATTENTION, STEP, UPDATE, VALIDATION = KINDS = ("attention", "step", "update", "validation")
BETWEEN = ("between steps",)


def kind_of(path: PhasePath) -> str | None:
    """The kind of pause after the start of this phase; None: not measured."""
    if path[:1] in (("optimizer",), ("validation",)):
        return UPDATE if path[0] == "optimizer" else VALIDATION
    if path[:1] and path[0].startswith(("layer ", "loss ", "embedding")):
        return ATTENTION if _attends(path[:4]) else STEP
    return None


def _attends(path: PhasePath) -> bool:
    """Whether the phase computes attention in a training step: ("layer 3", "forward", "attention", "stage 0")."""
    return len(path) == 4 and path[0].startswith("layer ") and path[2] == "attention"


@dataclass(frozen=True)
class Limits:
    """Seconds without progress after which the run has hung. Until a pause is measured, in a step after the first, the
    start limit applies to it."""

    start: float  # reading data and model files, also between steps
    step: float  # layers and loss
    save: float
    update: float = 0.0  # the optimizer's, in host memory perhaps; 0: not measured
    validation: float = 0.0
    planned: float = 0.0  # a step's limit is at least this; 0: the GPU's rates are not known

    @staticmethod
    def of(run: Run) -> Limits:
        known = run.hardware.gpu.name == "CPU" or gpu_named(run.hardware.gpu.name) is not None
        slowest = min((gpu for gpu in GPUS.values() if gpu.name != "CPU"), key=lambda gpu: gpu.matmul_flops)
        hardware = run.hardware if known else dataclasses.replace(run.hardware, gpu=slowest)
        planned = PATIENCE * max(backward for _, backward in _planned(run, hardware))
        read = _bytes_below(run.config.model.path) / READ_BYTES_S + _bytes_to_tokenize(run) / TOKENISE_BYTES_S
        # A checkpoint's files are written by all nodes, to one disk at the worst.
        write = run.saved_bytes * run.hardware.num_nodes / WRITE_BYTES_S
        start = 600 + read + write + planned
        return Limits(start, start, 600 + write, planned=planned if known else 0.0)

    def of_phase(self, path: PhasePath) -> float:
        if path[:1] == ("saving",):
            return self.save
        kind = kind_of(path)
        measured = {ATTENTION: self.step, STEP: self.step, UPDATE: self.update, VALIDATION: self.validation}
        return measured[kind] or self.start if kind else self.start

    def measured(self, attention: float, step: float, update: float, validation: float) -> Limits:
        """With the longest pause of each kind on any rank; 0: none was measured yet."""

        def limit(pause: float, least: float, unmeasured: float) -> float:
            return max(LEAST_S, PATIENCE * pause, least) if pause else unmeasured

        step_limit = limit(max(attention, step), self.planned, self.step)
        update, validation = limit(update, 0.0, self.update), limit(validation, 0.0, self.validation)
        return dataclasses.replace(self, step=step_limit, update=update, validation=validation)

    @property
    def longest(self) -> float:
        return max(self.start, self.step, self.save, self.update, self.validation)

    @property
    def words(self) -> str:
        """Before the first step."""
        steps = f"steps {PATIENCE} x the longest pause measured, at least {max(LEAST_S, self.planned):.0f} s"
        return f"start {self.start:.0f} s, save {self.save:.0f} s without progress; {steps}"


def _planned(run: Run, hardware: Hardware) -> list[tuple[float, float]]:
    """Seconds of each layer, forward and backward."""
    shape, layout = run.shape, run.layout
    layers = list(zip(shape.windows, layout.layer_policies(shape.num_layers), strict=True))
    seconds = {each: layer_seconds(shape, layout, hardware, run.work, *each) for each in set(layers)}
    return [(seconds[each][0].total, seconds[each][1].total) for each in layers]


def validation_seconds(run: Run) -> float:
    """Planned, without the loss."""
    num_batches = -(-run.config.train.validate_sequences // (run.work.batch * run.num_ranks // run.layout.cp))
    return num_batches * sum(forward for forward, _ in _planned(run, run.hardware))


def _bytes_to_tokenize(run: Run) -> float:
    """Bytes of a round of training data and one of held-out data, or of all the data if that is less."""
    group = run.work.batch * run.work.accumulate * run.num_ranks // run.layout.cp
    tokens = sum(tokens_per_round(Packing(run.work.context, group), shuffled) for shuffled in (True, False))
    return min(run.data_bytes, TOKEN_BYTES * tokens)


def _bytes_below(path: Path | None) -> int:
    if path is None or not path.exists():
        return 0
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


class PhaseTracker(Listener):
    """The phase this rank's device is in, its longest pauses, and its seconds in attention."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu, self.step = device, device.type == "cuda", 0
        self.warm = False  # after the first step, which compiles and tries kernels
        self._lock = threading.Lock()
        self._passed, self._path = 0, PhasePath()
        self._timeline = DeviceTimeline[tuple[PhasePath, bool]](device)  # phase, whether the pause after it counts
        self._since: Any = None  # the mark of the phase reached last, if the pause after it counts
        self._pauses = dict.fromkeys(KINDS, 0.0)  # the longest
        # In attention: the longest of this step, and the longest to expect where a document fills the context.
        self._step_pause, self._full_pause = 0.0, math.inf
        self._attention: list[list[Any]] = []  # start and end

    def enter(self, path: PhasePath) -> None:
        # A layer's direction, its stages and where it waits for others, or what is no layer. Tiles come too often.
        waits = path[-1] == "exchange"
        if len(path) == 2 or _attends(path) or waits or not path[0].startswith("layer "):
            mark = self._timeline.push((path, self.warm))
            if _attends(path):
                self._attention.append([mark])
            elif waits and _attends(path[:-1]):
                self._stop_attention(mark)

    def leave(self, path: PhasePath) -> None:
        if _attends(path):
            self._stop_attention(self._timeline.mark())
        elif path[-1] == "exchange" and _attends(path[:-1]):
            self._attention.append([self._timeline.mark()])
        elif path in (("optimizer",), ("validation",)):
            self._timeline.push((BETWEEN, self.warm))

    def _stop_attention(self, mark: Any) -> None:
        if self._attention:
            self._attention[-1].append(mark)

    def now(self) -> tuple[int, int, PhasePath]:
        """Step, phases passed since the start, and the phase."""
        with self._lock:
            for mark, (path, counts) in self._timeline.pop_reached():
                self._count_pause(mark)
                self._path, self._passed, self._since = path, self._passed + 1, mark if counts else None
            return self.step, self._passed, self._path

    def _count_pause(self, end: Any) -> None:
        kind = kind_of(self._path)
        if self._since is None or kind is None:
            return
        seconds = self._timeline.seconds(self._since, end)
        self._pauses[kind] = max(self._pauses[kind], seconds)
        if kind == ATTENTION:
            self._step_pause = max(self._step_pause, seconds)

    def end_step(self, full: float = 1.0) -> tuple[float, list[float]]:
        """This step's seconds in attention, and the longest pauses so far, by KINDS. `full`: how many times as much
        attention a step has whose sequences are single documents, and so, at most, how many times as long pauses. The
        device must have passed the step's attention."""
        self.now()
        pauses = dict(self._pauses)
        if self._step_pause:
            self._full_pause, self._step_pause = min(self._full_pause, full * self._step_pause), 0.0
        if self._full_pause < math.inf:
            pauses[ATTENTION] = max(pauses[ATTENTION], self._full_pause)
        self.warm = True
        pairs, self._attention = [pair for pair in self._attention if len(pair) == 2], []
        return sum(self._timeline.seconds(*pair) for pair in pairs), list(pauses.values())


class SlowRanks:
    """Ranks whose attention takes longer than the median rank's, and not because they have more of it."""

    def __init__(self) -> None:
        self._steps: deque[Sequence[tuple[float, float]]] = deque(maxlen=SLOW_STEPS)
        self._told: set[int] = set()

    def add(self, seconds: Sequence[float], work: Sequence[float]) -> dict[int, float]:
        """Each rank's seconds and amount of attention in this step. Returns ranks that became slow, with how many times
        the median they take."""
        self._steps.append(list(zip(seconds, work, strict=True)))
        sums = [tuple(map(sum, zip(*of_rank, strict=True))) for of_rank in zip(*self._steps, strict=True)]
        per_work = [own_s / max(own_work, 1.0) for own_s, own_work in sums]
        median_s, median_rate = statistics.median_low(own_s for own_s, _ in sums), statistics.median_low(per_work)
        if len(self._steps) < SLOW_STEPS or min(median_s, median_rate) <= 0:
            return {}
        times = [min(own_s / median_s, rate / median_rate) for (own_s, _), rate in zip(sums, per_work, strict=True)]
        slow = {rank: own for rank, own in enumerate(times) if own > SLOW}
        new, self._told = {rank: slow[rank] for rank in slow.keys() - self._told}, set(slow)
        return new


class Heartbeat:
    """Publishes this rank's position and watches the others, in threads, from `start` to `close`. A single rank has
    nobody to wait for."""

    def __init__(self, place: PhaseTracker, limits: Limits, run_dir: Path) -> None:
        self.place, self.limits, self.run_dir = place, limits, run_dir
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._number, self._words, self._code = 0, "", ExitCode.DONE
        self._position: Beat = {"step": 0, "passed": 0, "path": ()}  # this rank's last known position
        self._told_memory, self._local_rank = False, os.environ.get("LOCAL_RANK", "0")
        store = dist.distributed_c10d._get_default_store()
        # A connection of its own: another thread may block the shared one.
        self._store = dist.PrefixStore("heartbeat", store.clone() if hasattr(store, "clone") else store)
        self._last, self._unanswered = list[Beat](), 0  # beats; and since then, tries
        self._num_failed = 0  # requests to the store, in a row
        self._heard = [time.monotonic()] * self.size  # when each rank's latest beat was read
        self._moved_at = time.monotonic()
        self._reported = set[str]()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")

    def start(self) -> None:
        """Called by every rank."""
        if self.size > 1:
            self._beat()
            dist.barrier()
            self._thread.start()
            threading.Thread(target=self._watch_store, daemon=True, name="store").start()

    def close(self, words: str = "", code: ExitCode = ExitCode.DONE) -> None:
        """Tell the other ranks that this one is done or, with `words` and its exit code, why it failed."""
        self._stop.set()
        self._words, self._code = words or "done", code
        if self.size > 1:
            with suppress(Exception):  # which would hide the run's own error
                self._publish()

    def wait_for_verdict(self, error: Exception, stop: Sequence[object]) -> None:
        """Where a collective failed because another rank is gone, let the thread find out which: it ends this process.
        Returns if it does not, or when a launcher asks to `stop`."""
        lost = isinstance(error, dist.DistError) or "gloo/transport" in str(error)
        deadline = time.monotonic() + SILENT_S + 2 * BEAT_S
        while lost and self._thread.is_alive() and not stop and time.monotonic() < deadline:
            time.sleep(0.1)

    def _beat(self) -> None:
        """Publish this rank's position."""
        try:
            step, passed, path = self.place.now()
            self._position = {"step": step, "passed": passed, "path": path}
        except Exception as error:  # after a CUDA fault, which the step itself will raise
            self._position["fault"] = _shorten(error)
        self._publish()

    def _publish(self) -> None:
        """Does not query the device, so that a rank whose device has failed can still say so."""
        with self._lock:  # no older beat may overwrite the last one
            self._number += 1
            beat = {"beat": self._number, "host": socket.gethostname(), **self._position}
            beat |= {"words": self._words, "code": self._code}
            self._store.set(str(self.rank), json.dumps(beat))

    def _beats(self) -> list[Beat]:
        return [json.loads(self._store.get(str(rank))) for rank in range(self.size)]

    def _run(self) -> None:
        use_device(self.place.device)
        while not self._stop.wait(BEAT_S):
            for task in (self._watch_ranks, self._watch_memory):
                try:
                    task()
                except Exception as error:  # the others would take a rank that stops beating for dead
                    self._report_once(task.__name__, f"{type(error).__name__}: {_shorten(error)}")

    def _report_once(self, task: str, words: str) -> None:
        if task not in self._reported:
            self._reported.add(task)
            os.write(2, f"rank {self.rank}: heartbeat: {words}; the run continues\n".encode())

    def _watch_ranks(self) -> None:
        """Publish a beat and read those of all ranks. End the run if one has failed or fallen silent, or none moves."""
        now, before = time.monotonic(), self._last
        late = now - max(self._heard) > LATE_S  # this process was stopped, as the others may have been
        try:
            self._beat()
            beats = self._last = self._beats()
        except dist.DistError as error:
            self._num_failed += 1
            if self._num_failed == LOST_TRIES:
                self._end(f"rank 0, or its launcher, is gone: its store does not answer ({_shorten(error)})")
            return
        self._num_failed = self._unanswered = 0
        if late or not before or any(a["passed"] != b["passed"] for a, b in zip(before, beats, strict=True)):
            self._moved_at = now
        for rank, beat in enumerate(beats):
            if late or not before or beat["beat"] != before[rank]["beat"] or beat["words"] == "done":
                self._heard[rank] = now
            name = f"rank {rank} on {beat['host']}"
            if beat["words"] not in ("", "done"):
                self._end(f"{name} failed: {beat['words']}", beat["code"])
            if now - self._heard[rank] > SILENT_S:
                self._end(f"{name} has not been heard of for {SILENT_S:.0f} s: it died, or is frozen")
        phases = [tuple(beat["path"]) for beat in beats if self.place.warm]
        limit = max(map(self.limits.of_phase, phases), default=self.limits.start)
        if now - self._moved_at > limit and not any(beat["words"] for beat in beats):
            self._end(f"{_behind(beats)}: no rank moved for {limit:.0f} s")

    def _watch_store(self) -> None:
        """A request blocks if the store's process is frozen or its machine is gone. Counts tries instead of seconds:
        while this process is stopped, this thread is too."""
        use_device(self.place.device)
        while not self._stop.wait(BEAT_S):
            self._unanswered += 1
            if self._unanswered * BEAT_S > SILENT_S:
                words = f"its store has not answered for {SILENT_S:.0f} s"
                self._end(f"rank 0, or its launcher, is gone or frozen: {words}")

    def _watch_memory(self) -> None:
        """Warn once per machine when its memory runs out, and name the largest other process."""
        free = available_memory()
        if self._told_memory or free > LOW_BYTES or self._local_rank != "0":
            return
        self._told_memory, ours = True, {process.pid for process in psutil.Process(os.getppid()).children()}
        processes = psutil.process_iter(["pid", "name", "memory_info"])
        sizes = [(p.info["memory_info"].rss, p.info["name"], p.pid) for p in processes if p.info["memory_info"]]
        used, name, pid = max((entry for entry in sizes if entry[2] not in ours), default=(0, "none", 0))
        words = (
            f"{socket.gethostname()} has {format_bytes(free)} of host memory left; the largest other process is {name}"
        )
        os.write(2, f"{words} ({pid}) with {format_bytes(used)}\n".encode())

    def _end(self, reason: str, code: int = ExitCode.HANG) -> None:
        """Save stacks for debugging, report where every rank was last, and end this process. `code`: of the rank that
        failed, so that all ranks end with it and a scheduler sees only that."""
        if self._stop.wait(ANSWER_S):  # this rank has an error of its own
            return
        folder = self.run_dir / "hang"
        with suppress(Exception):
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"stacks-{self.rank}.txt").open("w") as file:
                faulthandler.dump_traceback(file)
            dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
            if self.place.on_gpu and dump is not None:
                (folder / f"nccl-{self.rank}.pickle").write_bytes(dump())  # read it with torchfrtrace
        beats, now = self._last, time.monotonic()
        order = sorted(range(len(beats)), key=lambda rank: beats[rank]["passed"])[:SHOWN]
        lines = [f"  rank {rank}: {_where(beats[rank], now - self._heard[rank])}" for rank in sorted(order)]
        lines += [f"  {len(beats) - SHOWN} ranks more, further on"] * (len(beats) > SHOWN)
        exit_rank(Outcome(code, "\n".join([reason, *lines, f"Stacks of all ranks are in {folder}"])))


def _where(beat: Beat, age_s: float) -> str:
    where = f"step {beat['step']}, {' / '.join(beat['path']) or 'before its first phase'}"
    fault = f", its device failed: {beat['fault']}" if "fault" in beat else ""
    return where + (f" ({age_s:.0f} s ago)" if age_s > LATE_S else "") + fault


def _shorten(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _behind(beats: list[Beat]) -> str:
    """The ranks that the others wait for, in words."""
    least = min(beat["passed"] for beat in beats)
    behind = [f"rank {rank} on {beat['host']}" for rank, beat in enumerate(beats) if beat["passed"] == least]
    if len(behind) == len(beats):
        return "all ranks wait in the same phase"
    return f"{', '.join(behind[:SHOWN])} did not arrive"
