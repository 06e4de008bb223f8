"""Each rank publishes a heartbeat and its phase. If one dies or hangs, all exit and name it.

Heartbeats go through the rendezvous store, so they keep working while collectives hang. Rank 0
reads those of all ranks and adds its verdict to its own; the others read only rank 0's. So the
store serves two requests per rank and period.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ithaka.comm.mesh import set_timeouts, use_device
from ithaka.comm.rank import is_local_rank_0
from ithaka.config.units import format_bytes
from ithaka.data.pack import Packing
from ithaka.data.stream import tokens_per_round
from ithaka.exits import ExitCode
from ithaka.facts.machine import available_memory
from ithaka.foreign.torch_distributed import default_store, find_flight_recorder
from ithaka.phases import PhasePath
from ithaka.plan.hardware import GPUS, gpu_named
from ithaka.plan.seconds import seconds_by_layer
from ithaka.profile.position import (
    ATTENTION,
    STEP,
    UPDATE,
    VALIDATION,
    PhaseTracker,
    pause_kind,
)
from ithaka.run.launch import Outcome, exit_rank
from ithaka.run.streams import call_in_time, write_stderr
from ithaka.run.validated import Run

BEAT_S = 5.0
MAX_SILENCE_S = 40.0  # a rank without a beat for longer is dead or frozen
MIN_STEP_LIMIT_S = 45.0  # lower bound of the limits inside a step
LONG_LIMIT_S = 3600.0  # a run shows its limits at the start if one is longer
STALE_BEAT_S = 10.0  # older beats are reported with their age
MAX_STORE_FAILURES = 3  # consecutive failed requests after which the store is lost
OWN_ERROR_WAIT_S = 2.0  # time for this rank to raise its own error before it blames another
EVIDENCE_LIMIT_S = 10.0  # for writing stacks: the storage may be what hangs
LIMIT_FACTOR = 5  # limit / longest pause measured or planned
# Rates of a slow machine.
READ_BYTES_S = 50e6
TOKENIZE_BYTES_S = 1e6
WRITE_BYTES_S = 50e6
# Bytes read per token of a round: records may be skipped, long documents dropped.
MAX_BYTES_PER_TOKEN = 64
MAX_LISTED_RANKS = 8
LOW_MEMORY_BYTES = 2**30  # host memory

Beat = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """Seconds without progress after which a run counts as hung. The start limit applies to each
    kind of pause until it is measured, which begins with the second step."""

    start: float  # reading data and model files, also between steps
    step: float  # layers and loss
    save: float
    update: float = 0.0  # the optimizer, possibly on the CPU; 0: not measured
    validation: float = 0.0
    planned: float = 0.0  # lower bound of `step`; 0: the GPU's speed is unknown

    @staticmethod
    def largest(ranks: Sequence[Limits]) -> Limits:
        """Return the largest of each limit over the ranks."""
        largest = {}
        for name in vars(ranks[0]):
            largest[name] = max(getattr(own, name) for own in ranks)
        return Limits(**largest)

    @staticmethod
    def for_run(run: Run) -> Limits:
        hardware = run.hardware
        known = hardware.gpu.name == "CPU" or gpu_named(hardware.gpu.name) is not None
        if not known:
            gpus = [gpu for gpu in GPUS.values() if gpu.name != "CPU"]
            slowest = min(gpus, key=lambda gpu: gpu.matmul_flops)
            hardware = dataclasses.replace(hardware, gpu=slowest)
        layers = seconds_by_layer(run.shape, run.layout, hardware, run.work)
        longest_s = max(backward.total for _, backward in layers)
        planned = LIMIT_FACTOR * longest_s
        model = run.config.model.path
        paths = (model, *model.rglob("*")) if model else ()
        model_bytes = sum(file.stat().st_size for file in paths if file.is_file())
        read = model_bytes / READ_BYTES_S + _bytes_to_tokenize(run) / TOKENIZE_BYTES_S
        # In the worst case all nodes write their files of a checkpoint to one disk.
        write = run.saved_bytes * run.hardware.num_nodes / WRITE_BYTES_S
        start = 600 + read + write + planned
        return Limits(start, start, 600 + write, planned=planned if known else 0.0)

    def for_phase(self, path: PhasePath) -> float:
        if path[:1] == ("saving",):
            return self.save
        measured = {
            ATTENTION: self.step,
            STEP: self.step,
            UPDATE: self.update,
            VALIDATION: self.validation,
        }
        return measured.get(pause_kind(path) or "", 0.0) or self.start

    def with_pauses(
        self, attention: float, step: float, update: float, validation: float
    ) -> Limits:
        """Return limits for the longest pause of each kind on any rank; 0: not measured."""

        def limit(pause: float, minimum: float, unmeasured: float) -> float:
            return max(MIN_STEP_LIMIT_S, LIMIT_FACTOR * pause, minimum) if pause else unmeasured

        step_limit = limit(max(attention, step), self.planned, self.step)
        update = limit(update, 0.0, self.update)
        validation = limit(validation, 0.0, self.validation)
        return dataclasses.replace(self, step=step_limit, update=update, validation=validation)

    @property
    def longest(self) -> float:
        return max(self.start, self.step, self.save, self.update, self.validation)

    def describe(self) -> dict[str, str]:
        """Describe the limits if a hung run would be noticed late."""
        if self.longest <= LONG_LIMIT_S:
            return {}
        min_step_s = max(MIN_STEP_LIMIT_S, self.planned)
        steps = f"steps {LIMIT_FACTOR}x the longest measured pause, at least {min_step_s:.0f} s"
        others = f"start {self.start:.0f} s, save {self.save:.0f} s without progress"
        return {"timeouts": f"{others}; {steps}"}


def validation_seconds(run: Run) -> float:
    """Planned duration of a validation, without the loss."""
    global_batch = run.work.batch * run.num_ranks // run.layout.cp
    num_batches = -(-run.config.train.validate_sequences // global_batch)
    layers = seconds_by_layer(run.shape, run.layout, run.hardware, run.work)
    return num_batches * sum(forward.total for forward, _ in layers)


def _bytes_to_tokenize(run: Run) -> float:
    """Bytes of a round of training data and one of validation data, at most of all data."""
    group = run.work.batch * run.work.accumulate * run.num_ranks // run.layout.cp
    tokens = sum(
        tokens_per_round(Packing(run.work.context, group), shuffled) for shuffled in (True, False)
    )
    return min(run.data_bytes, MAX_BYTES_PER_TOKEN * tokens)


class Heartbeat:
    """Publishes this rank's position and watches the other ranks, in threads, from `start` to
    `close`. Does nothing on a single rank."""

    def __init__(self, device: torch.device, limits: Limits, run_dir: Path) -> None:
        self.tracker = PhaseTracker(device)
        self.limits = limits
        self.run_dir = run_dir
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._num_beats = 0
        self._status = ""  # then "done" or an error
        self._code = ExitCode.DONE
        self._position: Beat = {"step": 0, "passed": 0, "path": ()}  # last known, of this rank
        self._warned_of_memory = False
        store = default_store()
        # Use a separate connection: another thread may block the shared one.
        own = store.clone() if hasattr(store, "clone") else store
        self._store = dist.PrefixStore("heartbeat", own)
        self._verdict: tuple[str, int] | None = None  # rank 0's final report and exit code
        self._last_beats = dict[int, Beat]()  # of the ranks read here
        self._polls_without_answer = 0
        self._num_store_failures = 0  # consecutive
        self._last_beat_at = [time.monotonic()] * self.size  # when each rank's latest beat was read
        self._progress_at = time.monotonic()
        self._reported = set[Callable[[], None]]()  # tasks of the thread that failed
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")

    def start(self) -> None:
        """Start the threads. Collective."""
        if self.size > 1:
            self._beat()
            dist.barrier()
            self._thread.start()
            threading.Thread(target=self._watch_store, daemon=True, name="store").start()

    def close(self, failure: str = "", code: ExitCode = ExitCode.DONE) -> None:
        """Publish that this rank is done or, with `failure` and its exit code, why it failed."""
        self._stop.set()
        self._status = failure or "done"
        self._code = code
        if self.size > 1:
            with suppress(Exception):  # it would hide the run's own error
                self._publish()

    def wait_for_cause(self, error: Exception, stop: Sequence[object]) -> None:
        """If a collective failed because another rank died, wait for the thread to find out which
        and end this process. Returns if it does not, or if `stop` holds a signal."""
        lost = isinstance(error, dist.DistError) or "gloo/transport" in str(error)
        deadline = time.monotonic() + MAX_SILENCE_S + 4 * BEAT_S + EVIDENCE_LIMIT_S
        while lost and self._thread.is_alive() and not stop and time.monotonic() < deadline:
            time.sleep(0.1)

    def update_limits(self, *longest_pauses: float) -> None:
        """Set limits from the longest pause of each kind on any rank. Collectives must not time out
        before the heartbeat, which can name the rank that hangs."""
        limits = self.limits.with_pauses(*longest_pauses)
        if limits.longest > self.limits.longest:
            set_timeouts(2 * limits.longest)
        self.limits = limits

    def _beat(self) -> None:
        """Publish this rank's position."""
        try:
            step, passed, path = self.tracker.now()
            self._position = {"step": step, "passed": passed, "path": path}
        except Exception as error:  # a CUDA error, which the step will also raise
            self._position["fault"] = _shorten(error)
        self._publish()

    def _publish(self) -> None:
        """Write the beat to the store. Works after a device error: it does not query the device."""
        with self._lock:  # an older beat must not overwrite the last one
            self._num_beats += 1
            beat = {"beat": self._num_beats, "host": socket.gethostname(), **self._position}
            beat |= {"status": self._status, "code": self._code, "verdict": self._verdict}
            self._store.set(str(self.rank), json.dumps(beat))

    def _read_beats(self) -> dict[int, Beat]:
        """Read all ranks' beats on rank 0, else rank 0's and this rank's. One request."""
        ranks = list(range(self.size)) if self.rank == 0 else [0, self.rank]
        beats = self._store.multi_get([str(rank) for rank in ranks])
        return dict(zip(ranks, map(json.loads, beats), strict=True))

    def _run(self) -> None:
        use_device(self.tracker.device)
        while not self._stop.wait(BEAT_S):
            for task in (self._watch_ranks, self._watch_memory):
                try:
                    task()
                except Exception as error:
                    # Without beats, the other ranks would count this one as dead.
                    if task not in self._reported:
                        what = f"{type(error).__name__}: {_shorten(error)}"
                        write_stderr(f"rank {self.rank}: heartbeat: {what}; the run continues\n")
                    self._reported.add(task)

    def _watch_ranks(self) -> None:
        """Publish a beat and read others. End the run if a rank failed or is silent or all hang."""
        now = time.monotonic()
        before = self._last_beats
        # This process was suspended, and others may have been.
        late = now - max(self._last_beat_at) > STALE_BEAT_S
        try:
            self._beat()
            beats = self._read_beats()
        except dist.DistError as error:
            self._num_store_failures += 1
            if self._num_store_failures == MAX_STORE_FAILURES:
                silence = f"its store does not answer ({_shorten(error)})"
                self._end(f"rank 0 or its launcher is gone: {silence}", publishes=False)
            return
        self._last_beats = beats
        self._num_store_failures = 0
        self._polls_without_answer = 0
        if self.rank != 0 and beats[0]["verdict"] is not None:
            self._leave(*beats[0]["verdict"])
            return
        starts = late or not before  # nothing to compare with
        if starts or any(beat["passed"] != before[rank]["passed"] for rank, beat in beats.items()):
            self._progress_at = now
        for rank, beat in beats.items():
            status = beat["status"]
            if starts or beat["beat"] != before[rank]["beat"] or status == "done":
                self._last_beat_at[rank] = now
            name = f"rank {rank} on {beat['host']}"
            if status not in ("", "done"):
                self._end(f"{name} failed: {status}", beat["code"])
            if now - self._last_beat_at[rank] > MAX_SILENCE_S:
                silence = f"has sent no heartbeat for {MAX_SILENCE_S:.0f} s"
                self._end(f"{name} {silence}: it died or is frozen")
        if self.rank == 0 and not any(beat["status"] for beat in beats.values()):
            phases = [tuple(beat["path"]) for beat in beats.values() if self.tracker.warm]
            limit = max(map(self.limits.for_phase, phases), default=self.limits.start)
            if now - self._progress_at > limit:
                who = _describe_stragglers(list(beats.values()))
                self._end(f"{who}: no rank made progress for {limit:.0f} s")

    def _watch_store(self) -> None:
        """End the run if the store, whose process or machine may be gone, stops answering. Counts
        polls, not seconds: this thread stops when the process is suspended."""
        use_device(self.tracker.device)
        while not self._stop.wait(BEAT_S):
            self._polls_without_answer += 1
            if self._polls_without_answer * BEAT_S > MAX_SILENCE_S:
                silence = f"its store has not answered for {MAX_SILENCE_S:.0f} s"
                self._end(f"rank 0 or its launcher is gone or frozen: {silence}", publishes=False)

    def _watch_memory(self) -> None:
        """Warn once per machine when host memory is low, and name the largest other process."""
        free = available_memory()
        if self._warned_of_memory or free > LOW_MEMORY_BYTES or not is_local_rank_0():
            return
        self._warned_of_memory = True
        ours = {process.pid for process in psutil.Process(os.getppid()).children()}
        others = [
            (process.info["memory_info"].rss, process.info["name"], process.pid)
            for process in psutil.process_iter(["pid", "name", "memory_info"])
            if process.info["memory_info"] and process.pid not in ours
        ]
        used, name, pid = max(others, default=(0, "none", 0))
        memory = f"{socket.gethostname()} has {format_bytes(free)} of host memory left"
        other = f"the largest other process is {name} ({pid}) with {format_bytes(used)}"
        write_stderr(f"{memory}; {other}\n")

    def _end(self, reason: str, code: int = ExitCode.HANG, publishes: bool = True) -> None:
        """End this process, and on rank 0 all others, with a report of each rank's last position.
        All ranks exit with the failed rank's `code`, so a scheduler sees only one."""
        beats = self._last_beats
        now = time.monotonic()
        lines = [reason]
        listed = sorted(beats, key=lambda rank: beats[rank]["passed"])[:MAX_LISTED_RANKS]
        for rank in sorted(listed):
            position = _describe_position(beats[rank], now - self._last_beat_at[rank])
            lines.append(f"  rank {rank} last reported {position}")
        if len(beats) > MAX_LISTED_RANKS:
            lines.append(f"  {len(beats) - MAX_LISTED_RANKS} more ranks, further ahead")
        folder = self.run_dir / "hang"
        lines.append(f"Stack traces of the ranks that still run are in {folder}")
        report = "\n".join(lines)
        if self.rank == 0 and publishes:
            self._verdict = report, code
            self._publish()
        self._leave(report, code)

    def _leave(self, report: str, code: int) -> None:
        """Dump stacks and end this process, unless it raises its own error first."""
        if self._stop.wait(OWN_ERROR_WAIT_S):
            return
        if not call_in_time(self._write_evidence, EVIDENCE_LIMIT_S, False):
            problem = f"check the storage of {self.run_dir}"
            report += f"\nrank {self.rank} could not write its own: {problem}"
        if self._verdict is not None:
            # The store may end with this process, and the others read it once per period.
            time.sleep(BEAT_S)
        exit_rank(Outcome(code, report))

    def _write_evidence(self) -> bool:
        """Write stacks and NCCL's flight recorder to the run directory. Returns true."""
        folder = self.run_dir / "hang"
        stacks = _describe_stacks()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"stacks-{self.rank}.txt").write_text(stacks, encoding="utf-8")
        dump = find_flight_recorder()
        if self.tracker.device.type == "cuda" and dump is not None:
            (folder / f"nccl-{self.rank}.pickle").write_bytes(dump())  # read it with torchfrtrace
        return True


def _describe_stacks() -> str:
    """Stacks of all threads. faulthandler would hold the GIL while it writes them, and traceback
    would read the sources: either may hang with the storage."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for number, innermost in sys._current_frames().items():
        lines.append(f"Thread {names.get(number, number)} (most recent call first):")
        frame: FrameType | None = innermost
        while frame is not None:
            code = frame.f_code
            lines.append(
                f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_qualname}'
            )
            frame = frame.f_back
    return "\n".join([*lines, ""])


def _describe_position(beat: Beat, age_s: float) -> str:
    position = f"step {beat['step']}, {' / '.join(beat['path']) or 'before its first phase'}"
    if age_s > STALE_BEAT_S:
        position += f" ({age_s:.0f} s ago)"
    if "fault" in beat:
        position += f", its device failed: {beat['fault']}"
    return position


def _shorten(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _describe_stragglers(beats: list[Beat]) -> str:
    """Name the ranks that the others wait for."""
    fewest = min(beat["passed"] for beat in beats)
    behind = [
        f"rank {rank} on {beat['host']}"
        for rank, beat in enumerate(beats)
        if beat["passed"] == fewest
    ]
    if len(behind) == len(beats):
        return "all ranks wait in the same phase"
    return f"{', '.join(behind[:MAX_LISTED_RANKS])} did not arrive"
