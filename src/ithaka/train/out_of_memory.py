"""Which memory ran out and where, planned and measured bytes, and how to fix it."""

import os
import sys
from collections.abc import Iterator

import psutil
import torch

from ithaka.checkpoint import checkpoints
from ithaka.config import shell_command
from ithaka.config.units import format_bytes
from ithaka.exits import ExitCode, exit_code_for
from ithaka.layer.slabs import StoreError
from ithaka.phases import Listener, PhasePath
from ithaka.plan.search import Plan
from ithaka.run.validated import Run, drop_reserve


class OutOfMemoryError(RuntimeError):
    """The device, the host or the store is out of memory."""

    exit_code = ExitCode.OUT_OF_MEMORY


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether the device, the host or the store ran out of memory."""
    return error is not None and exit_code_for(error) == ExitCode.OUT_OF_MEMORY


class OutOfMemoryTracker(Listener):
    """Listens to phases and records the phase and the memory in use when memory ran out. As an
    error propagates it leaves phases, innermost first: it was raised in the first one left."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.path: PhasePath = ()
        self.before: PhasePath = ()  # the last innermost phase, for errors between phases
        self.used_bytes: int | None = None  # on the device; without a GPU, by this process
        self.allocator = ""  # what the CUDA allocator had, in words

    def enter(self, path: PhasePath) -> None:
        self.path = path
        self.used_bytes = None

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
            self.used_bytes = psutil.Process().memory_info().rss
            if self.device.type == "cuda":
                self.used_bytes = torch.cuda.memory_allocated(self.device)
                unused = torch.cuda.memory_reserved(self.device) - self.used_bytes
                retries = torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0)
                reserved = f"{format_bytes(unused)} more reserved but unused"
                self.allocator = f", {reserved}, {retries} allocator retries"
        return self.used_bytes

    @property
    def where(self) -> str:
        if self.path:
            return f"in {' / '.join(self.path)}"
        return f"after {' / '.join(self.before)}" if self.before else "before the first phase"


def make_out_of_memory_error(
    run: Run, error: Exception, tracker: OutOfMemoryTracker
) -> OutOfMemoryError:
    """Return the error of a run that replaces `error`, with a complete message."""
    model = str(run.config.model.path or run.run_dir / "model")
    message = explain_out_of_memory(run, error, tracker, model)
    return OutOfMemoryError(f"{message}\n{checkpoints.describe_last(run.run_dir)}")


def explain_out_of_memory(
    plan: Run | Plan, error: Exception, tracker: OutOfMemoryTracker, model: str
) -> str:
    """Explain what ran out and where, and how to fix it. `model`: for `ithaka plan`."""
    tracker.measure()  # before anything else allocates
    what = " ".join(str(error).split()) or repr(error)
    headline = f"rank {os.environ.get('RANK', '0')}, {tracker.where}: {what}"
    lines = [headline, *_planned_lines(plan, error, tracker), *_suggest_fixes(plan, model)]
    return "\n".join(lines)


def _planned_lines(
    plan: Run | Plan, error: Exception, tracker: OutOfMemoryTracker
) -> Iterator[str]:
    ledger = plan.ledger
    on_gpu = tracker.device.type == "cuda"
    on_host = isinstance(error, MemoryError | OSError) or "DefaultCPUAllocator" in str(error)
    tier = "host" if on_host and on_gpu else "GPU"
    if isinstance(error, StoreError):
        tier = error.tier
    if tier != "GPU":
        is_host = tier == "host"
        sizes = drop_reserve(ledger.host if is_host else ledger.disk)
        max_bytes = format_bytes(ledger.host_bytes if is_host else ledger.disk_bytes)
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
        planned = format_bytes(sum(sizes.values()))
        yield f"  planned per node: {planned} of {max_bytes} ({parts})"
        return
    reserve = ledger.gpu["reserve"]
    scope = "" if on_gpu else " for the process, including Python and its libraries"
    planned = format_bytes(ledger.gpu_peak - reserve)
    yield f"  planned peak: {planned} in {ledger.phase}, of {format_bytes(ledger.gpu_bytes)}"
    yield f"  measured: {format_bytes(tracker.measure())}{scope}{tracker.allocator}"


def _suggest_fixes(plan: Run | Plan, model: str) -> Iterator[str]:
    hardware = plan.hardware
    work = plan.work
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
