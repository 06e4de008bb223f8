"""Peak bytes from PyTorch's CPU allocator, measured independently of LiveBytes."""

import gzip
import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from ithaka.profile.live import LiveBytes
from ithaka.profile.memory import NOT_FREED


def allocator_peak(work: Callable[[], Any]) -> int:
    """Peak bytes that `work` allocates from the CPU allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    now = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def traced_peak(trace: Path) -> int:
    """The same, from the memory events in a trace.json.gz."""
    events = [e for e in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if e["name"] == "[memory]"]
    return max(accumulate(e["args"]["Bytes"] for e in sorted(events, key=lambda e: e["ts"])))


def bytes_now(live: LiveBytes) -> int:
    return sum(allocation.num_bytes for allocation in live.allocations if allocation.stop_ns == NOT_FREED)
