"""Peak bytes as PyTorch's own CPU allocator reports them: a measure that shares nothing with LiveBytes."""

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def allocator_peak(work: Callable[[], Any]) -> int:
    """The most bytes taken from the CPU allocator at once, above what was taken before `work`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    now = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
