"""Live bytes on a GPU: the history of PyTorch's CUDA allocator, with the names that the schedule gives."""

import math
import pickle
import time
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ithaka.phases import OTHER, PhasePath, current_holder, current_phase, holder_of, listening
from ithaka.profile.memory import Change, Holding, Recorder, form, local_tensor, made_by

MAX_EVENTS = 2_000_000
CLOCK_SLACK_NS = 20_000  # between the allocator's clock and Python's
ROUND_BYTES = 512  # the allocator's unit


class _Tag(NamedTuple):
    """The schedule said what a tensor is for."""

    time_ns: int
    shape: tuple[int, ...]
    dtype: str
    holder: str


@dataclass
class _Block:
    """Memory from its allocation until it was given back (None: it is still out)."""

    address: int
    num_bytes: int
    start_ns: int
    path: PhasePath = ()
    holder: str = OTHER
    line: str = ""
    stop_ns: int | None = None
    tags: list[_Tag] = field(default_factory=list)


class AllocatorHistory(Recorder):
    """Records what the CUDA allocator does while it is entered; then `map` has it by holder.

    Of an allocation the allocator knows bytes, not the shape: only what the schedule tags has one.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.measured_peak_bytes = 0
        self.snapshot: dict[str, Any] = {}
        self._tags: dict[int, list[_Tag]] = {}  # by address
        self._before: dict[int, int] = {}  # by address: bytes of what was there already
        self._start_ns = 0

    def __enter__(self) -> "AllocatorHistory":
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._before = _active_blocks(torch.cuda.memory._snapshot(self.device), self.device)
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=MAX_EVENTS, device=self.device
        )
        self._start_ns = time.time_ns()
        self._entered.enter_context(listening(self))
        self.holder_changed()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.close()
        torch.cuda.memory._set_memory_metadata("")
        self.measured_peak_bytes = torch.cuda.max_memory_allocated(self.device)
        self.snapshot = torch.cuda.memory._snapshot(self.device)
        torch.cuda.memory._record_memory_history(None, device=self.device)
        if error[0] is None:
            self._fill()

    def save(self, path: Path) -> None:
        """The snapshot, as PyTorch's memory viewer reads it."""
        with path.open("wb") as file:
            pickle.dump(self.snapshot, file)

    def register(self, tensors: Tensor | Iterable[Tensor], holder: str) -> None:
        """Names memory that is there already."""
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            self.tag(tensor, holder)

    def tag(self, tensor: Tensor, holder: str) -> None:
        local = local_tensor(tensor)
        if local.is_cuda:
            tags = self._tags.setdefault(local.untyped_storage().data_ptr(), [])
            tags.append(_Tag(time.time_ns(), *form(local), holder))

    def enter(self, path: PhasePath) -> None:
        super().enter(path)
        self.holder_changed()

    def leave(self, path: PhasePath) -> None:
        super().leave(path)
        self.holder_changed()

    def holder_changed(self) -> None:
        """From now on, this thread's allocations carry holder and phase; the memory viewer shows them."""
        torch.cuda.memory._set_memory_metadata(f"{current_holder()}: {'/'.join(current_phase())}")

    # ---- from events to holders

    def _fill(self) -> None:
        by_address: dict[int, list[_Block]] = {}
        blocks = self._blocks()
        for block in blocks:
            by_address.setdefault(block.address, []).append(block)
        for address, tags in self._tags.items():
            for tag in tags:
                _assign(tag, by_address.get(address, []))
        for block in blocks:
            self._add(block)
        self.map.changes.sort(key=lambda change: change.time_ns)

    def _blocks(self) -> list[_Block]:
        live = {address: _Block(address, num_bytes, self._start_ns) for address, num_bytes in self._before.items()}
        blocks = list(live.values())
        for event in self.snapshot["device_traces"][self.device.index or 0]:
            if event["time_us"] * 1000 < self._start_ns - CLOCK_SLACK_NS:
                continue
            if event["action"] == "alloc":
                live[event["addr"]] = block = self._block(event)
                blocks.append(block)
            elif event["action"] == "free_requested" and event["addr"] in live:
                live.pop(event["addr"]).stop_ns = event["time_us"] * 1000
        return blocks

    def _block(self, event: dict[str, Any]) -> _Block:
        at_ns, num_bytes = event["time_us"] * 1000, -(-event["size"] // ROUND_BYTES) * ROUND_BYTES
        line, fsdp_holder = made_by((f["filename"], f["line"], f["name"]) for f in event["frames"])
        path, holder = self._made_in(event.get("user_metadata", ""), at_ns)
        return _Block(event["addr"], num_bytes, at_ns, path, fsdp_holder or holder, line)

    def _made_in(self, metadata: str, at_ns: int) -> tuple[PhasePath, str]:
        holder, _, names = metadata.partition(": ")
        if names:
            return tuple(names.split("/")), holder
        path = self.map.phases.at(at_ns)  # metadata is per thread, and this one has entered no phase
        return path, holder_of(path)

    def _add(self, block: _Block) -> None:
        whole = max(block.tags, key=lambda tag: math.prod(tag.shape), default=None)
        shape, dtype = (whole.shape, whole.dtype) if whole else ((), "")
        index, holder, start_ns = len(self.map.holdings), block.holder, block.start_ns
        self.map.holdings.append(Holding(holder, block.path, shape, dtype, block.line))
        changes = self.map.changes
        changes.append(Change(start_ns, index, block.num_bytes, holder))
        for tag in block.tags:
            if tag.holder != holder:
                at_ns = max(tag.time_ns, start_ns)
                changes.append(Change(at_ns, index, -block.num_bytes, holder))
                holder = tag.holder
                changes.append(Change(at_ns, index, block.num_bytes, holder))
        if block.stop_ns is not None:
            changes.append(Change(max(block.stop_ns, start_ns), index, -block.num_bytes, holder))


def _assign(tag: _Tag, blocks: list[_Block]) -> None:
    """A tensor at an address is the newest block there, unless that was given back."""
    at = bisect_right(blocks, tag.time_ns + CLOCK_SLACK_NS, key=lambda block: block.start_ns) - 1
    if at >= 0 and (blocks[at].stop_ns or 2**62) + CLOCK_SLACK_NS >= tag.time_ns:
        blocks[at].tags.append(tag)


def _active_blocks(snapshot: dict[str, Any], device: torch.device) -> dict[int, int]:
    return {
        block["address"]: block["size"]
        for segment in snapshot["segments"]
        if segment["device"] == (device.index or 0)
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
