"""Observe and describe a run: progress in long steps, profiles, slow ranks and disks, where memory ran out."""

import dataclasses
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import psutil
import torch

from ithaka.checkpoint.files import step_name
from ithaka.config import TrainConfig, shell_command, write_atomic
from ithaka.config.units import format_bytes, format_count, format_json, plural
from ithaka.data.batch import Batch
from ithaka.exits import ExitCode, exit_code_for
from ithaka.inputs.batch import count_pairs
from ithaka.inputs.positions import rope_parameters
from ithaka.layer.slabs import StoreError
from ithaka.log.metrics import host_peak_bytes, read_metrics
from ithaka.phases import Listener, PhasePath
from ithaka.plan.hardware import gpu_named, join_kernels, peak_flops
from ithaka.plan.search import Plan
from ithaka.profile.memory import sum_planned_by_category
from ithaka.profile.step import StepProfile, StepTimes, describe_machine
from ithaka.profile.timeline import Progress
from ithaka.run.resolve import Run, drop_reserve
from ithaka.sharding.heads import count_slots
from ithaka.train.heartbeat import Heartbeat
from ithaka.train.trainer import Trainer
from ithaka.weights.formats import describe_packed

SLOW_DISK_S, SLOW_DISK_SHARE = 1.0, 0.05  # report the disk when a step waits longer
SLOW_RATIO, SLOW_STEPS = 1.2, 10  # a slow rank's time in attention / the median rank's, over this many steps
WARM_UP_STEPS = 1  # slower: kernels are chosen, and the allocator gets its memory


def what_to_record(number: int, every: int, times_before: bool) -> Literal["times", "profile", None]:
    """Return what to record in step `number`: a profile every `every` steps and, with `times_before`, times in the step
    before it."""
    if not every:
        return None
    if number % every == 0:
        return "profile"
    return "times" if times_before and (number + 1) % every == 0 else None


def describe_plan(plan: Plan, accumulate: int) -> dict[str, Any]:
    """What the report shows of a plan of one micro-step: plan.json."""
    heads = plan.shape.heads, plan.shape.kv_heads, plan.layout.ulysses, plan.layout.heads_per_stage
    values = {
        "layout": dataclasses.asdict(plan.layout),
        "stages": len(count_slots(*heads)),
        "peak_bytes": sum_planned_by_category(plan),
        "host_bytes": sum(drop_reserve(plan.ledger.host).values()) // plan.hardware.gpus_per_node,  # per rank
        "gpus": plan.hardware.name,  # nodes x ranks
    }
    if gpu_named(plan.hardware.gpu.name):
        step = dataclasses.replace(plan, work=dataclasses.replace(plan.work, accumulate=accumulate))
        values["seconds"] = dataclasses.asdict(plan.seconds)
        values["tokens_per_s"] = step.tokens_per_s_per_gpu * plan.hardware.num_gpus
    return values


class SlowRanks:
    """Finds ranks that are slower in attention than the median rank, given how much of it they compute."""

    def __init__(self) -> None:
        self._steps: deque[Sequence[tuple[float, float]]] = deque(maxlen=SLOW_STEPS)
        self._reported: set[int] = set()

    def add(self, seconds: Sequence[float], work: Sequence[float]) -> dict[int, float]:
        """Add each rank's seconds and work in attention in this step. Returns ranks that became slow, each with its
        ratio to the median."""
        self._steps.append(list(zip(seconds, work, strict=True)))
        sums = [tuple(map(sum, zip(*rank_steps, strict=True))) for rank_steps in zip(*self._steps, strict=True)]
        per_work = [own_s / max(own_work, 1.0) for own_s, own_work in sums]
        median_s, median_rate = statistics.median_low(own_s for own_s, _ in sums), statistics.median_low(per_work)
        if len(self._steps) < SLOW_STEPS or min(median_s, median_rate) <= 0:
            return {}
        ratios = [min(own_s / median_s, rate / median_rate) for (own_s, _), rate in zip(sums, per_work, strict=True)]
        slow = {rank: ratio for rank, ratio in enumerate(ratios) if ratio > SLOW_RATIO}
        new, self._reported = {rank: slow[rank] for rank in slow.keys() - self._reported}, set(slow)
        return new


class Watch:
    """Observes every step: progress and profiles on rank 0, slow ranks and disks on all ranks."""

    def __init__(self, trainer: Trainer, heartbeat: Heartbeat, only_profile: bool = False) -> None:
        """`only_profile`: raise if a profile cannot be written, instead of printing a warning."""
        self.trainer, self.heartbeat, self.only_profile = trainer, heartbeat, only_profile
        self.run, self.device, self.console = trainer.run, trainer.mesh.device, trainer.console
        self.earlier_peaks = 0, 0  # allocated and reserved, up to the last profile, which resets the allocator's peaks
        self._slow_ranks, self._reported_disk, self._reported_retries = SlowRanks(), False, False
        hardware = self.run.hardware
        self._planned_disk_bytes_s = hardware.gpu.disk_bytes_s / hardware.gpus_per_node  # this rank's share
        self._plain_s: list[float] = []
        self._times: StepTimes | None = None  # recorded in the step before a profile
        self._progress: Progress | None = None
        if self.console.active:
            work = dataclasses.replace(self.run.work, accumulate=1)
            self.plan = Plan(self.run.shape, self.run.layout, self.run.hardware, work)
            self._progress = Progress(self.plan, self.run.config.train.accumulate, self.device, self.console.progress)
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
            plain, folder = self._plain_s[WARM_UP_STEPS:], self.run.run_dir / "profile" / f"step-{number}"
            plain_s = statistics.median(plain) if plain else None
            with nullcontext() if self.only_profile else self.console.writing("profile"):
                summary = recorder.write(folder, number, plain_s, sum_planned_by_category(self.plan))
                self.console.print(f"Profile of step {number}, in {folder}:\n{summary}")

    def _recorder(self, number: int) -> StepProfile | StepTimes | None:
        on_gpu, warm = self.device.type == "cuda", len(self._plain_s) >= WARM_UP_STEPS
        kind = what_to_record(number, self.run.config.profile.every, on_gpu and warm)
        if kind != "profile":
            return StepTimes(self.device) if kind == "times" else None
        if on_gpu:
            self.earlier_peaks = device_peaks(self.device, self.earlier_peaks)
        return StepProfile(self.trainer.model, self.trainer.optimizer, self.device, self._times)

    def measure(self, batches: Sequence[Batch], step_s: float) -> tuple[float, ...]:
        """Return this rank's figures of a step; `report` takes those of all ranks."""
        shape, group = self.run.shape, self.trainer.mesh.ulysses_group
        bounds = [rank * shape.heads // group.size() for rank in (group.rank(), group.rank() + 1)]
        pairs = sum(count_pairs(batch.document_ids, shape.windows, batch.parents) for batch in batches)
        # How many times as many pairs there would be, without windows, if every sequence were a single document.
        full_pairs = sum(count_pairs(batch.document_ids, [None], batch.parents) for batch in batches)
        full_ratio = max(1.0, len(batches) * self.run.work.pairs(None) / full_pairs)
        attention_s, pauses = self.heartbeat.tracker.end_step(full_ratio)
        return self._slow_disk(step_s), attention_s, float(pairs * (bounds[1] - bounds[0])), *pauses

    def _slow_disk(self, step_s: float) -> float:
        """Return the bytes per second of the disk tier if this step waited longer for it than planned, else 0."""
        moved_bytes, busy_s, waited_s = self.trainer.store.disk_use()
        late_s = min(waited_s, busy_s - moved_bytes / self._planned_disk_bytes_s)
        return moved_bytes / busy_s if late_s > max(SLOW_DISK_S, SLOW_DISK_SHARE * step_s) else 0.0

    def report_retries(self, memory: Mapping[str, int | None]) -> None:
        """Warn once if the CUDA allocator had to free its cache. `memory`: as `measure_memory`, over all ranks."""
        if not (retries := memory["allocator_retries"]) or self._reported_retries:
            return
        self._reported_retries = True
        what = f"The CUDA allocator had to free its cache to find memory, which is slow (retries: {retries})"
        fix = "use a shorter data.context, or keep fewer activations (memory.keep_attention)"
        message = f"{what}; {format_bytes(memory['device_unused_bytes'] or 0)} are reserved but unused; {fix}"
        self.console.event(self.trainer.step, message, retries=retries)

    def report(
        self, disks: Sequence[float], attention: Sequence[float], works: Sequence[float], *pauses: Sequence[float]
    ) -> None:
        """Set time limits and report slow ranks and disks, from what each rank measured."""
        self.heartbeat.update_limits(*map(max, pauses))
        if slow := self._slow_ranks.add(attention, works):
            ranks = ", ".join(f"rank {rank} takes {ratio:.2f}x" for rank, ratio in slow.items())
            message = f"Slow: {ranks} the median rank's time in attention"
            self.console.event(self.trainer.step, message, slow_ranks=slow)
        if any(disks) and not self._reported_disk:
            self._reported_disk = True
            slow = {rank: rate for rank, rate in enumerate(disks) if rate}
            rank, rate = min(slow.items(), key=lambda item: item[1])
            planned = f"planned {format_bytes(self._planned_disk_bytes_s)}/s"
            disk = self.trainer.store.disk.directory
            message = f"Slow disk {disk}: rank {rank} gets {format_bytes(rate)}/s ({planned})"
            ranks = plural(len(disks), "rank")
            waiting = f"{len(slow)} of {ranks} {'is' if len(slow) == 1 else 'are'} waiting"
            self.console.event(self.trainer.step + 1, f"{message}; {waiting}", slow_disks=slow)


def device_peaks(device: torch.device, earlier: tuple[int, int]) -> tuple[int, int]:
    """Peaks of the bytes allocated and reserved on a GPU. `earlier`: before they were reset."""
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return max(allocated, earlier[0]), max(reserved, earlier[1])


def measure_memory(device: torch.device, earlier: tuple[int, int] = (0, 0)) -> dict[str, int | None]:
    """Return the memory fields of a Record for this rank, and what the GPU's allocator reserved beyond its peak.
    `earlier`: as in `device_peaks`."""
    values: dict[str, int | None] = {"device_peak_bytes": None, "host_peak_bytes": host_peak_bytes()}
    values |= dict.fromkeys(("device_reserved_bytes", "device_unused_bytes", "allocator_retries"))
    if device.type == "cuda":
        allocated, reserved = device_peaks(device, earlier)
        values |= {"device_peak_bytes": allocated, "device_reserved_bytes": reserved}
        values["device_unused_bytes"] = reserved - allocated
        values["allocator_retries"] = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    return values


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether the device, the host or the store ran out of memory."""
    return error is not None and exit_code_for(error) == ExitCode.OUT_OF_MEMORY


class OutOfMemoryTracker(Listener):
    """Listens to phases and records the phase and the memory in use when memory ran out. As an error
    propagates it leaves phases, innermost first: it was raised in the first one left."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.path: PhasePath = ()
        self.before: PhasePath = ()  # the last innermost phase, for errors between phases
        self.used_bytes: int | None = None  # on the device; without a GPU, by this process
        self.allocator = ""  # what the CUDA allocator had, in words

    def enter(self, path: PhasePath) -> None:
        self.path, self.used_bytes = path, None

    def leave(self, path: PhasePath) -> None:
        if ran_out_of_memory(sys.exc_info()[1]):
            self.measure()
            return
        self.path = path[:-1]
        if path[-1] != "copies" and self.before[: len(path)] != path:
            self.before = path

    def measure(self) -> int:
        """Measure once: memory is freed while the error propagates."""
        if self.used_bytes is None:
            rss = psutil.Process().memory_info().rss
            self.used_bytes = rss
            if self.device.type == "cuda":
                self.used_bytes = torch.cuda.memory_allocated(self.device)
                unused = torch.cuda.memory_reserved(self.device) - self.used_bytes
                retries = torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0)
                self.allocator = f", {format_bytes(unused)} more reserved but unused, {retries} allocator retries"
        return self.used_bytes

    @property
    def where(self) -> str:
        if self.path:
            return f"in {' / '.join(self.path)}"
        return f"after {' / '.join(self.before)}" if self.before else "before the first phase"


def explain_out_of_memory(plan: Run | Plan, error: Exception, tracker: OutOfMemoryTracker, model: str) -> str:
    """Explain what ran out and where, planned and measured bytes, and how to fix it. `model`: for `ithaka plan`."""
    tracker.measure()  # before anything else allocates
    headline = f"rank {os.environ.get('RANK', '0')}, {tracker.where}: {' '.join(str(error).split()) or repr(error)}"
    return "\n".join([headline, *_planned_lines(plan, error, tracker), *_suggest_fixes(plan, model)])


def _planned_lines(plan: Run | Plan, error: Exception, tracker: OutOfMemoryTracker) -> Iterator[str]:
    ledger, on_gpu = plan.ledger, tracker.device.type == "cuda"
    on_host = isinstance(error, MemoryError | OSError) or "DefaultCPUAllocator" in str(error)
    tier = error.tier if isinstance(error, StoreError) else "host" if on_host and on_gpu else "GPU"
    if tier != "GPU":
        sizes, max_bytes = {"host": (ledger.host, ledger.host_bytes), "disk": (ledger.disk, ledger.disk_bytes)}[tier]
        parts = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in drop_reserve(sizes).items())
        planned = format_bytes(sum(drop_reserve(sizes).values()))
        yield f"  planned per node: {planned} of {format_bytes(max_bytes)} ({parts})"
        return
    reserve, scope = ledger.gpu["reserve"], "" if on_gpu else " for the process, including Python and its libraries"
    planned = format_bytes(ledger.gpu_peak - reserve)
    yield f"  planned peak: {planned} in {ledger.phase}, of {format_bytes(ledger.gpu_bytes)}"
    yield f"  measured: {format_bytes(tracker.measure())}{scope}{tracker.allocator}"


def _suggest_fixes(plan: Run | Plan, model: str) -> Iterator[str]:
    hardware, work = plan.hardware, plan.work
    if not work.trains:
        yield "Use a shorter --context or more GPUs"
        return
    if hardware.gpu.name == "CPU":
        yield "Use a shorter data.context, a smaller memory.tile_tokens or a smaller model"
        return
    command: list[object] = ["plan", model, "--gpus", hardware.name, "--context", work.context]
    command += ["--batch", work.batch] if work.batch > 1 else []
    command += ["--host-memory", f"{hardware.host_bytes // 10**9}GB"]
    command += ["--disk", f"{hardware.disk_bytes // 10**9}GB"] if hardware.disk_bytes else []
    yield "Use a shorter context or more GPUs; this shows what fits, and how fast it is:"
    yield f"  {shell_command(*command)}"


# ---- before and after the steps


def describe_run(trainer: Trainer) -> dict[str, str]:
    config, mesh, model = trainer.config, trainer.mesh, trainer.model
    tokens = trainer.global_batch * config.data.context
    size = f"{format_count(trainer.num_params)} parameters{describe_packed(model)}"
    if trainer.num_trained < trainer.num_params:
        size += f", {format_count(trainer.num_trained)} trained"
    ring = mesh.ring_group.size()
    random = ", random weights" * trainer.random_weights
    num_steps = plural(config.train.steps - config.start, "step")
    summary = {
        "model": f"{config.model.path or model.config.model_type}, {size}{random}",
        "ranks": f"{mesh.world_size} ({trainer.device_name}) = {mesh.dp_size} data x {mesh.cp_size} context parallel"
        + f" ({mesh.ulysses_group.size()} Ulysses x {ring} ring)" * (ring > 1),
        "context": f"{config.data.context} tokens, {tokens} per step, {num_steps}",
        "attention": f"kernel {trainer.kernel}{_describe_planned_kernel(trainer)}",
        "run": f"{trainer.run.run_dir}{f', resumed after step {trainer.step}' if trainer.step else ''}",
        **_describe_saving(trainer),
    }
    if num_compiled := sum(layer.forward.passes.compiles for layer in model.ithaka_root.layers):
        summary["compile"] = f"{num_compiled} of {len(model.ithaka_root.layers)} layers; the first step waits for it"
    if trainer.dpo is not None:
        frozen = "a frozen copy of the initial weights" if config.adapter is None else "the model without its adapter"
        summary["loss"] = f"dpo, beta {config.loss.beta:g}; the reference is {frozen}"
    if (loss := config.loss).type == "distill":
        teacher = str(loss.teacher or "the model without its adapter")
        if trainer.teacher is not None:
            positions = getattr(trainer.teacher.config.get_text_config(), "max_position_embeddings", None)
            teacher = f"{loss.teacher or 'a copy of the initial weights'}{describe_packed(trainer.teacher)}"
            teacher += f" up to position {positions}" * ((positions or config.data.context) < config.data.context)
        summary["loss"] = f"distill, beta {loss.beta:g}, temperature {loss.temperature:g}; the teacher is {teacher}"
    if config.curriculum:
        summary["entry"] = f"{config.entry + 1} of {len(config.ends)}, steps {config.start + 1} to {config.train.steps}"
    if config.model.rope is not None:
        text = model.config.get_text_config()
        values = {name.removeprefix("rope_"): value for name, value in rope_parameters(text).items()}
        values |= {name: f"({len(value)})" for name, value in values.items() if isinstance(value, list)}
        shown = ", ".join(f"{name} {value}" for name, value in values.items())
        summary["rope"] = f"{shown}, for {text.max_position_embeddings} positions"
    data = {topic: text for topic, text in trainer.data_summary.items() if topic != "first tokens"}
    return summary | data | dict(trainer.run.changed)


def _describe_planned_kernel(trainer: Trainer) -> str:
    """Return the kernel that was planned with, if another one runs."""
    expected = join_kernels(trainer.run.plan.kernels.values()) if trainer.run.plan else ""
    return f", planned with {expected}" if expected not in ("", trainer.kernel) else ""


def _describe_saving(trainer: Trainer) -> dict[str, str]:
    """When and how the run saves, unless by default and in the background."""
    settings, default, room = trainer.config.train, TrainConfig(), format_bytes(trainer.run.saved_bytes)
    is_default = (settings.save_minutes, settings.save_every) == (default.save_minutes, default.save_every)
    if is_default and trainer.saver.background:
        return {}
    minutes = f"{settings.save_minutes:g} minute{'s' * (settings.save_minutes != 1)}"
    every = [minutes] * (settings.save_minutes > 0)
    every += [plural(settings.save_every, "step")] * (settings.save_every > 0)
    how = f"in the background, from {room} of host memory per node"
    if not trainer.saver.background:
        how = f"in the foreground: {room} of host memory per node are not free for a copy"
    return {"saving": f"{'every ' + ' and '.join(every) if every else 'at the end'}, {how}"}


def summarize_run(trainer: Trainer) -> dict[str, str]:
    run_dir, more, optim = trainer.run.run_dir, 2 * trainer.step, trainer.config.optim
    records = read_metrics(run_dir / "metrics.jsonl")
    # Only since the resume: with other settings, earlier validations may have used other text.
    since = (r.get("val_loss") for r in records if r["step"] >= trainer.first_step)
    losses = [f"{loss:.4f}" for loss in since if loss is not None]
    rates = [r["tokens_per_s"] for r in records if r.get("tokens_per_s")]
    validation = f"validation {trainer.config.loss.validation_name}"
    summary = {validation: " -> ".join([losses[0], *losses[1:][-1:]])} if losses else {}
    if trainer.first_step > 1 and len(losses) > 1:
        summary[validation] += f", first and last since the resume after step {trainer.first_step - 1}"
    if trainer.best is not None and trainer.saver.keep_best:
        loss, step = trainer.best
        how = f": {shell_command('export', run_dir, 'OUT_DIR', '--step', step)}"
        is_saved = (run_dir / "checkpoints" / step_name(step)).is_dir()
        summary["best"] = f"{loss:.4f} after step {step}{how if is_saved else ', whose checkpoint was not saved'}"
    if trainer.step < trainer.config.train.steps:
        summary["stopped early"] = f"after step {trainer.step}: {trainer.stale} validations in a row were not lower"
    if rates:  # none if metrics.jsonl could not be written
        summary["speed"] = f"{format_count(statistics.median(rates))} tokens/s (median step)"
    summary["export"] = shell_command("export", run_dir, "OUT_DIR")
    if trainer.config.adapter is not None and (path := trainer.config.model.path) is not None and path.is_dir():
        summary["merged"] = shell_command("export", run_dir, "OUT_DIR", "--merge")
    if trainer.config.curriculum:
        return summary
    summary["train longer"] = shell_command("train", "--resume", run_dir, "--set", f"train.steps={more}")
    if optim.schedule != "constant" and optim.warmup_steps < (optim.decay_steps or trainer.step) <= trainer.step:
        hint = f"for a longer {optim.schedule} add --set optim.decay_steps={more}"
        summary["lr"] = f"has reached its minimum and stays there; {hint}"
    return summary


def step_flops(num_matmul_params: int, num_tokens: int, head_size: int, num_pairs: int) -> float:
    """Model FLOPs of forward and backward, without recomputation: 6 per parameter and token, and 12 per query-key pair
    (summed over layers) and element of the heads (`head_size`)."""
    return 6.0 * num_matmul_params * num_tokens + 12.0 * head_size * num_pairs


def flops_utilization(trainer: Trainer, num_tokens: int, num_pairs: int, step_s: float) -> float | None:
    shape, peak = trainer.run.shape, peak_flops(trainer.device_name)
    if peak is None:
        return None
    # A frozen weight takes two matrix products, a trained one three. A token uses some experts; adapters add weights.
    used, added = shape.num_products, trainer.num_trained - shape.num_idle if shape.adapter else 0
    frozen = used if shape.adapter else max(0, used - trainer.num_trained)
    matmul_params = used + added - frozen // 3
    flops = step_flops(matmul_params, num_tokens, shape.heads * shape.head_dim, num_pairs)
    return flops / (step_s * peak * trainer.mesh.world_size)
