"""Observe every step: progress in long steps, profiles, slow ranks and disks."""

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

from ithaka.config import write_atomic
from ithaka.config.units import format_bytes, format_json, plural
from ithaka.data.batch import Batch
from ithaka.facts.heads import count_slots
from ithaka.plan.hardware import gpu_named
from ithaka.plan.search import Plan
from ithaka.plan.seconds import planned_shares
from ithaka.profile.memory import sum_planned_by_category
from ithaka.profile.profiled_step import StepProfile, StepTimes, describe_machine
from ithaka.profile.progress import Progress
from ithaka.run.validated import drop_reserve
from ithaka.train.agreement import Agreement, MemoryUse, StepFigures
from ithaka.train.heartbeat import Heartbeat
from ithaka.train.trainer import Trainer

# Report the disk when a step waits longer than both.
SLOW_DISK_S = 1.0
SLOW_DISK_SHARE = 0.05  # of the step
# A slow rank's time in attention / the median rank's, over this many steps.
SLOW_RATIO = 1.2
SLOW_STEPS = 10
WARM_UP_STEPS = 1  # slower: kernels are chosen, and the allocator gets its memory


def what_to_record(
    number: int, every: int, times_before: bool
) -> Literal["times", "profile", None]:
    """Return what to record in step `number`: a profile every `every` steps and, with
    `times_before`, times in the step before it."""
    if every and number % every == 0:
        return "profile"
    if every and times_before and (number + 1) % every == 0:
        return "times"
    return None


def describe_plan(plan: Plan, accumulate: int) -> dict[str, Any]:
    """What the report shows of a plan of one micro-step: plan.json."""
    shape = plan.shape
    layout = plan.layout
    policies = [dataclasses.asdict(each) for each in layout.layer_policies(shape.num_layers)]
    stages = count_slots(shape.heads, shape.kv_heads, layout.ulysses, layout.heads_per_stage)
    values = {
        "layout": {**dataclasses.asdict(layout), "kept": policies},
        "stages": len(stages),
        "peak_bytes": sum_planned_by_category(plan.ledger.gpu),
        # Of one rank.
        "host_bytes": sum(drop_reserve(plan.ledger.host).values()) // plan.hardware.gpus_per_node,
        "gpus": plan.hardware.name,  # nodes x ranks
    }
    if gpu_named(plan.hardware.gpu.name):
        step = dataclasses.replace(plan, work=dataclasses.replace(plan.work, accumulate=accumulate))
        values["seconds"] = dataclasses.asdict(plan.seconds)
        values["tokens_per_s"] = step.tokens_per_s_per_gpu * plan.hardware.num_gpus
    return values


class SlowRanks:
    """Finds ranks that are slower in attention than the median rank, for the work they do."""

    def __init__(self) -> None:
        self._seconds: deque[Sequence[float]] = deque(maxlen=SLOW_STEPS)  # of each rank
        self._work: deque[Sequence[float]] = deque(maxlen=SLOW_STEPS)
        self._reported: set[int] = set()

    def add(self, seconds: Sequence[float], work: Sequence[float]) -> dict[int, float]:
        """Add each rank's seconds and work in attention in this step. Returns ranks that became
        slow, each with its ratio to the median."""
        self._seconds.append(seconds)
        self._work.append(work)
        sums_s = list(map(sum, zip(*self._seconds, strict=True)))
        sums_work = map(sum, zip(*self._work, strict=True))
        rates = [own_s / max(own, 1.0) for own_s, own in zip(sums_s, sums_work, strict=True)]
        median_s = statistics.median_low(sums_s)
        median_rate = statistics.median_low(rates)
        if len(self._seconds) < SLOW_STEPS or min(median_s, median_rate) <= 0:
            return {}
        ratios = [
            min(own_s / median_s, rate / median_rate)
            for own_s, rate in zip(sums_s, rates, strict=True)
        ]
        slow = {rank: ratio for rank, ratio in enumerate(ratios) if ratio > SLOW_RATIO}
        new = {rank: slow[rank] for rank in slow.keys() - self._reported}
        self._reported = set(slow)
        return new


class Watch:
    """Observes every step: progress and profiles on rank 0, slow ranks and disks on all ranks."""

    def __init__(self, trainer: Trainer, heartbeat: Heartbeat, only_profile: bool = False) -> None:
        """`only_profile`: raise if a profile cannot be written, instead of printing a warning."""
        self.trainer = trainer
        self.heartbeat = heartbeat
        self.only_profile = only_profile
        self.run = trainer.run
        self.device = trainer.mesh.device
        self.console = trainer.console
        self._slow_ranks = SlowRanks()
        self._reported_disk = False
        self._reported_retries = False
        hardware = self.run.hardware
        self._planned_disk_bytes_s = hardware.gpu.disk_bytes_s / hardware.gpus_per_node  # per rank
        self._plain_s: list[float] = []
        self._times: StepTimes | None = None  # recorded in the step before a profile
        self._progress: Progress | None = None
        if self.console.active:
            run = self.run
            work = dataclasses.replace(run.work, accumulate=1)
            self.plan = Plan(run.shape, run.layout, run.hardware, work)
            shares = planned_shares(run.shape, run.layout, run.hardware, work)
            micro_steps = run.config.train.accumulate
            self._progress = Progress(heartbeat.tracker, shares, micro_steps, self.console.progress)
            with self.console.writing("description of the machine and the plan"):
                self._write_machine_and_plan()

    def _write_machine_and_plan(self) -> None:
        """Write machine.json and plan.json for the report."""
        machine = describe_machine(self.device, self.trainer.mesh.world_size)
        write_atomic(self.run.run_dir / "machine.json", format_json(machine))
        plan = describe_plan(self.plan, self.run.work.accumulate)
        write_atomic(self.run.run_dir / "plan.json", format_json(plan))

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Wrap step `number`, and profile it if due."""
        if self._progress is None:
            yield
            return
        recorder = self._recorder(number)
        start = time.perf_counter()
        with self._progress.step(number), recorder or nullcontext():
            yield
        self._times = recorder if isinstance(recorder, StepTimes) else None
        if recorder is None:
            self._plain_s.append(time.perf_counter() - start)
        elif isinstance(recorder, StepProfile):
            with nullcontext() if self.only_profile else self.console.writing("profile"):
                self._write_profile(number, recorder)

    def _write_profile(self, number: int, recorder: StepProfile) -> None:
        plain = self._plain_s[WARM_UP_STEPS:]
        plain_s = statistics.median(plain) if plain else None
        folder = self.run.run_dir / "profile" / f"step-{number}"
        planned = sum_planned_by_category(self.plan.ledger.gpu)
        summary = recorder.write(folder, number, plain_s, planned)
        self.console.print(f"Profile of step {number}, in {folder}:\n{summary}")

    def _recorder(self, number: int) -> StepProfile | StepTimes | None:
        on_gpu = self.device.type == "cuda"
        warm = len(self._plain_s) >= WARM_UP_STEPS
        recorded = what_to_record(number, self.run.config.profile.every, on_gpu and warm)
        if recorded is None:
            return None
        if recorded == "times":
            return StepTimes(self.device)
        return StepProfile(self.trainer.model, self.trainer.optimizer, self.device, self._times)

    def measure(self, batches: Sequence[Batch], step_s: float) -> StepFigures:
        """Return this rank's figures of a step; `report` takes those of all ranks."""
        shape = self.run.shape
        group = self.trainer.mesh.ulysses_group
        first = group.rank() * shape.heads // group.size()
        end = (group.rank() + 1) * shape.heads // group.size()
        pairs = sum(batch.pairs.all_layers for batch in batches)
        # How many times as many pairs there would be, without windows, if every sequence were a
        # single document.
        full_pairs = sum(batch.pairs.full_layer for batch in batches)
        full_ratio = max(1.0, len(batches) * self.run.work.pairs(None) / full_pairs)
        attention_s, pauses = self.heartbeat.tracker.end_step(full_ratio)
        return StepFigures(
            slow_disk_bytes_s=self._slow_disk(step_s),
            attention_s=attention_s,
            attention_work=float(pairs * (end - first)),
            pauses=pauses,
        )

    def _slow_disk(self, step_s: float) -> float:
        """Return the disk tier's bytes/s if this step waited longer for it than planned, else 0."""
        moved_bytes, busy_s, waited_s = self.trainer.store.disk_use()
        late_s = min(waited_s, busy_s - moved_bytes / self._planned_disk_bytes_s)
        is_slow = late_s > max(SLOW_DISK_S, SLOW_DISK_SHARE * step_s)
        return moved_bytes / busy_s if is_slow else 0.0

    def report(self, agreed: Agreement) -> None:
        """Set time limits and report slow ranks and disks, from what each rank measured."""
        figures = agreed.figures
        pauses = zip(*(rank.pauses for rank in figures), strict=True)
        self.heartbeat.update_limits(*map(max, pauses))
        slow = self._slow_ranks.add(
            [rank.attention_s for rank in figures], [rank.attention_work for rank in figures]
        )
        if slow:
            ranks = ", ".join(f"rank {rank} takes {ratio:.2f}x" for rank, ratio in slow.items())
            message = f"Slow: {ranks} the median rank's time in attention"
            self.console.event(self.trainer.step, message, slow_ranks=slow)
        self._report_disks([rank.slow_disk_bytes_s for rank in figures])
        self.report_retries(agreed.memory)

    def _report_disks(self, rates: Sequence[float]) -> None:
        """Name the slowest disk, once."""
        slow = {rank: rate for rank, rate in enumerate(rates) if rate}
        if not slow or self._reported_disk:
            return
        self._reported_disk = True
        rank, rate = min(slow.items(), key=lambda item: item[1])
        planned = f"planned {format_bytes(self._planned_disk_bytes_s)}/s"
        disk = self.trainer.store.disk.directory
        message = f"Slow disk {disk}: rank {rank} gets {format_bytes(rate)}/s ({planned})"
        ranks = plural(len(rates), "rank")
        waiting = f"{len(slow)} of {ranks} {'is' if len(slow) == 1 else 'are'} waiting"
        self.console.event(self.trainer.step + 1, f"{message}; {waiting}", slow_disks=slow)

    def report_retries(self, memory: MemoryUse) -> None:
        """Warn once if the CUDA allocator had to free its cache. `memory`: over all ranks."""
        retries = memory.allocator_retries
        if not retries or self._reported_retries:
            return
        self._reported_retries = True
        what = "The CUDA allocator had to free its cache to find memory, which is slow"
        unused = f"{format_bytes(memory.device_unused_bytes or 0)} are reserved but unused"
        fix = "use a shorter data.context, or keep fewer activations (memory.keep_attention)"
        message = f"{what} (retries: {retries}); {unused}; {fix}"
        self.console.event(self.trainer.step, message, retries=retries)
