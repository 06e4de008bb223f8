"""What all ranks know after a step, gathered once, so that they make the same decisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ithaka.comm.agree import gather_objects
from ithaka.device_memory import device_memory


@dataclass(frozen=True)
class MemoryUse:
    """The memory fields of a `StepRecord`; without a GPU, only the host's."""

    device_peak_bytes: int | None
    host_peak_bytes: int
    device_reserved_bytes: int | None = None
    device_unused_bytes: int | None = None  # reserved beyond the peak
    allocator_retries: int | None = None

    @staticmethod
    def largest(ranks: Sequence[MemoryUse]) -> MemoryUse:
        most: dict[str, Any] = {}
        for name, own in dataclasses.asdict(ranks[0]).items():
            most[name] = None if own is None else max(getattr(rank, name) for rank in ranks)
        return MemoryUse(**most)


def measure_memory(device: torch.device) -> MemoryUse:
    """Measure this rank's memory."""
    host_bytes = device_memory(torch.device("cpu")).peak
    if device.type != "cuda":
        return MemoryUse(None, host_bytes)
    memory = device_memory(device)
    return MemoryUse(
        device_peak_bytes=memory.peak,
        host_peak_bytes=host_bytes,
        device_reserved_bytes=memory.reserved_peak,
        device_unused_bytes=memory.reserved_peak - memory.peak,
        allocator_retries=memory.retries,
    )


@dataclass(frozen=True)
class StepFigures:
    """What one rank measured in a step."""

    slow_disk_bytes_s: float  # of the disk tier, if the step waited for it; else 0
    attention_s: float
    attention_work: float  # query-key pairs times heads
    pauses: list[float]  # the longest so far, in the order of position.KINDS


@dataclass(frozen=True)
class RankState:
    """What one rank knows after a step."""

    stop_signal: int  # that it received, or 0
    save_is_due: bool
    save_is_done: bool
    memory: MemoryUse
    figures: StepFigures | None = None


@dataclass(frozen=True)
class Agreement:
    """What all ranks know after a step."""

    stop_signal: int  # of any rank, or 0
    save_is_due: bool
    save_is_done: bool  # on any rank
    memory: MemoryUse  # the maximum over ranks of each field
    figures: list[StepFigures]  # of each rank


def agree(own: RankState) -> Agreement:
    """Gather the states of all ranks, on the host."""
    ranks = gather_objects(own)
    return Agreement(
        stop_signal=max(rank.stop_signal for rank in ranks),
        save_is_due=any(rank.save_is_due for rank in ranks),
        save_is_done=any(rank.save_is_done for rank in ranks),
        memory=MemoryUse.largest([rank.memory for rank in ranks]),
        figures=[rank.figures for rank in ranks if rank.figures is not None],
    )
