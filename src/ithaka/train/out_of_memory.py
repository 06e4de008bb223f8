"""Which memory ran out and where, planned and measured bytes, and how to fix it."""

import os
from collections.abc import Iterator

from ithaka.checkpoint import checkpoints
from ithaka.config import shell_command
from ithaka.config.units import format_bytes
from ithaka.exits import ExitCode
from ithaka.layer.slabs import StoreError
from ithaka.plan.search import Plan
from ithaka.profile.position import HostPosition
from ithaka.run.validated import Run, drop_reserve


class OutOfMemoryError(RuntimeError):
    """The device, the host or the store is out of memory."""

    exit_code = ExitCode.OUT_OF_MEMORY


def make_out_of_memory_error(
    run: Run, error: Exception, position: HostPosition
) -> OutOfMemoryError:
    """Return the error of a run that replaces `error`, with a complete message."""
    model = str(run.config.model.path or run.run_dir / "model")
    message = explain_out_of_memory(run, error, position, model)
    return OutOfMemoryError(f"{message}\n{checkpoints.describe_last(run.run_dir)}")


def explain_out_of_memory(
    plan: Run | Plan, error: Exception, position: HostPosition, model: str
) -> str:
    """Explain what ran out and where, and how to fix it. `model`: for `ithaka plan`."""
    position.measure()  # before anything else allocates
    what = " ".join(str(error).split()) or repr(error)
    headline = f"rank {os.environ.get('RANK', '0')}, {position.where}: {what}"
    lines = [headline, *_planned_lines(plan, error, position), *_suggest_fixes(plan, model)]
    return "\n".join(lines)


def _planned_lines(plan: Run | Plan, error: Exception, position: HostPosition) -> Iterator[str]:
    ledger = plan.ledger
    on_gpu = position.device.type == "cuda"
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
    memory = position.measure()
    measured = f"{format_bytes(memory.allocated)}{scope}"
    if on_gpu:
        unused = format_bytes(memory.reserved - memory.allocated)
        measured += f", {unused} more reserved but unused, {memory.retries} allocator retries"
    yield f"  measured: {measured}"


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
