"""Measure peak bytes: of PyTorch's CPU allocator, independently of LiveBytes, and of layers in a
rehearsal. Fake those of a GPU."""

import gzip
import json
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ithaka.checks import rehearse
from ithaka.comm.loopback import start_loopback
from ithaka.comm.mesh import make_mesh
from ithaka.config import OptimConfig
from ithaka.layout import Layout
from ithaka.model.build import build_model
from ithaka.model.optimizers import make_optimizer
from ithaka.profile.live import LiveBytes
from ithaka.profile.memory import NOT_FREED


def allocator_peak(work: Callable[[], Any]) -> int:
    """Return the peak bytes that `work` takes from the CPU allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    now = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def traced_peak(trace: Path) -> int:
    """Return the peak bytes of the memory events in a trace.json.gz."""
    events = [
        e
        for e in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        if e["name"] == "[memory]"
    ]
    return max(accumulate(e["args"]["Bytes"] for e in sorted(events, key=lambda e: e["ts"])))


def bytes_now(live: LiveBytes) -> int:
    return sum(
        allocation.num_bytes for allocation in live.allocations if allocation.stop_ns == NOT_FREED
    )


def fake_gpu_memory(
    patch: pytest.MonkeyPatch,
    allocated: int = 0,
    reserved: int = 0,
    peak: int = 0,
    reserved_peak: int = 0,
    retries: int = 0,
) -> None:
    """Set what the CUDA allocator counts."""
    stats = {
        "allocated_bytes": {"all": {"current": allocated, "peak": peak}},
        "reserved_bytes": {"all": {"current": reserved, "peak": reserved_peak}},
        "num_alloc_retries": retries,
    }
    patch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", lambda _: stats)
    patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)


def rehearsed_peaks(
    config: dict[str, Any], layout: Layout, tokens: int
) -> Callable[[int, str], int]:
    """Rehearse a step as rank 0 of `layout.cp` on the CPU. Return a function of layer and
    direction: the peak bytes."""
    device = torch.device("cpu")
    start_loopback(layout.cp)
    try:
        model = build_model(config, make_mesh(layout.cp, device), layout, context=tokens)
        step = partial(rehearse.run_step, model, make_optimizer(model, OptimConfig(lr=0.0)), None)
        inputs = model.ithaka_root.example_inputs(tokens, rehearse.MEMORY_ONLY_DOCUMENT)
        _, peaks = rehearse._measure_step(step, inputs, device, 1)
    finally:
        dist.destroy_process_group()
    return lambda layer, direction: max(
        peak for path, peak in peaks.items() if path[1:3] == (f"layer {layer}", direction)
    )
