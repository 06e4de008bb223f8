"""Bytes that this process has on a device: as a GPU's allocator counts them, or in host memory."""

import resource
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

import psutil
import torch

from ithaka.facts.machine import available_memory


@dataclass(frozen=True)
class DeviceMemory:
    """Peaks since the process started, also across resets of the allocator's peak."""

    allocated: int  # on the host: resident
    peak: int
    reserved: int  # by the allocator, used or not
    reserved_peak: int
    retries: int = 0  # times that the CUDA allocator had to free its cache


def device_memory(device: torch.device) -> DeviceMemory:
    if device.type != "cuda":
        resident = psutil.Process().memory_info().rss
        unit = 1 if sys.platform == "darwin" else 1024
        peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return DeviceMemory(resident, peak, resident, peak)
    stats = _read_allocator(device)
    highest = _since_start(device)
    highest.update(stats)
    return DeviceMemory(
        allocated=_bytes(stats, "allocated", "current"),
        peak=highest.allocated,
        reserved=_bytes(stats, "reserved", "current"),
        reserved_peak=highest.reserved,
        retries=stats.get("num_alloc_retries", 0),
    )


def free_bytes(device: torch.device) -> int:
    """Bytes that processes may still allocate: on a GPU, besides those that allocators reserved."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


class PeakMeter:
    """The highest bytes of a GPU's allocator since `restart`. The allocator has one peak per
    device: a meter that resets it updates all others first. Without a GPU: 0."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocated = 0
        self.reserved = 0
        _meters.add(self)

    def update(self, stats: dict[str, Any]) -> None:
        self.allocated = max(self.allocated, _bytes(stats, "allocated", "peak"))
        self.reserved = max(self.reserved, _bytes(stats, "reserved", "peak"))

    def read(self) -> int:
        """Bytes allocated at the peak."""
        if self.device.type == "cuda":
            self.update(_read_allocator(self.device))
        return self.allocated

    def restart(self) -> int:
        """Return `read()`, and start again from the bytes that are allocated now."""
        if self.device.type != "cuda":
            return 0
        _since_start(self.device)
        stats = _read_allocator(self.device)
        for meter in _meters:
            if meter.device == self.device:
                meter.update(stats)
        torch.cuda.reset_peak_memory_stats(self.device)
        peak = self.allocated
        self.allocated = 0
        self.reserved = 0
        return peak


_meters = WeakSet[PeakMeter]()


@cache
def _since_start(device: torch.device) -> PeakMeter:
    return PeakMeter(device)


def _read_allocator(device: torch.device) -> dict[str, Any]:
    """Empty before CUDA is initialized. `torch.cuda.memory_stats` builds a flat dictionary from
    this one, which takes the host longer than a phase."""
    return torch.cuda.memory.memory_stats_as_nested_dict(device)


def _bytes(stats: dict[str, Any], what: str, when: str) -> int:
    return stats[f"{what}_bytes"]["all"][when] if stats else 0
