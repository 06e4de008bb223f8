"""Live bytes on a GPU, from the history of PyTorch's CUDA allocator and the schedule's tags."""

import math
import time
from typing import Any

import torch
from torch import Tensor

from ithaka.phases import Holder, PhaseState, listening
from ithaka.profile.memory import Allocation, MemoryMap, attribute_stack, dtype_and_shape, local_tensor

MAX_EVENTS = 2_000_000
CLOCK_SLACK_NS = 20_000  # between the allocator's clock and Python's
ROUND_BYTES = 512  # the allocator's granularity


class AllocatorHistory(MemoryMap):
    """Records the CUDA allocator's events while entered, and builds the map on exit.

    The allocator has sizes, not shapes: only tagged tensors have a shape. `snapshot` is for PyTorch's memory viewer.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.snapshot: dict[str, Any] = {}
        self._tags: list[tuple[int, Allocation]] = []  # address, tag
        self._initial_bytes: dict[int, int] = {}  # by address, live before recording
        self._start_ns = 0

    def __enter__(self) -> "AllocatorHistory":
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        segments = torch.cuda.memory._snapshot(self.device)["segments"]
        blocks = (b for segment in segments if segment["device"] == (self.device.index or 0) for b in segment["blocks"])
        self._initial_bytes = {b["address"]: b["size"] for b in blocks if b["state"] == "active_allocated"}
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=MAX_EVENTS, device=self.device
        )
        self._start_ns = time.time_ns()
        self.push(self._stop)
        self.enter_context(listening(self))
        self.holder_changed()
        return self

    def _stop(self, *error: Any) -> None:
        torch.cuda.memory._set_memory_metadata("")
        self.measured_peak_bytes = torch.cuda.max_memory_allocated(self.device)
        self.snapshot = torch.cuda.memory._snapshot(self.device)
        torch.cuda.memory._record_memory_history(None, device=self.device)
        if error[0] is None:
            self._build()

    def tag(self, tensor: Tensor, holder: str) -> None:
        local = local_tensor(tensor)
        if local.is_cuda:
            tag = Allocation(0, time.time_ns(), holder, **dtype_and_shape(local))
            self._tags.append((local.untyped_storage().data_ptr(), tag))

    def holder_changed(self) -> None:
        """Attach holder and phase to this thread's next allocations; the memory viewer shows them."""
        torch.cuda.memory._set_memory_metadata(f"{PhaseState.holder}: {'/'.join(PhaseState.path)}")

    def _build(self) -> None:
        """Replay the allocator's events and the tags in order of time."""
        newest = {address: Allocation(num_bytes, self._start_ns) for address, num_bytes in self._initial_bytes.items()}
        self.allocations.extend(newest.values())
        trace = self.snapshot["device_traces"][self.device.index or 0]
        events: list[tuple[int, int, Any]] = [(event["time_us"] * 1000, event["addr"], event) for event in trace]
        events = [event for event in events if event[0] >= self._start_ns - CLOCK_SLACK_NS]
        events += [(tag.start_ns + CLOCK_SLACK_NS, address, tag) for address, tag in self._tags]
        for at_ns, address, event in sorted(events, key=lambda event: event[0]):
            allocation = newest.get(address)
            if isinstance(event, Allocation):
                # A tag belongs to the newest allocation at its address, unless that was freed before.
                if allocation is not None and allocation.stop_ns + CLOCK_SLACK_NS >= event.start_ns:
                    newest[address] = self._apply_tag(allocation, event)
            elif event["action"] == "alloc":
                newest[address] = self._add(event, at_ns)
            elif event["action"] == "free_requested" and allocation is not None:
                allocation.stop_ns = min(allocation.stop_ns, max(at_ns, allocation.start_ns))

    def _add(self, event: dict[str, Any], at_ns: int) -> Allocation:
        num_bytes = -(-event["size"] // ROUND_BYTES) * ROUND_BYTES
        line, fsdp_holder = attribute_stack((f["filename"], f["line"], f["name"]) for f in event["frames"])
        holder, _, names = event.get("user_metadata", "").partition(": ")
        path = tuple(names.split("/")) if names else ()
        self.allocations.append(Allocation(num_bytes, at_ns, fsdp_holder or holder or Holder.OTHER, path, line=line))
        return self.allocations[-1]

    def _apply_tag(self, allocation: Allocation, tag: Allocation) -> Allocation:
        """Keep the shape of the largest tagged tensor; a new holder starts a new allocation."""
        if not allocation.dtype or math.prod(tag.shape) > math.prod(allocation.shape):
            allocation.dtype, allocation.shape = tag.dtype, tag.shape
        if tag.holder == allocation.holder:
            return allocation
        self.allocations.append(allocation.split(tag.start_ns, holder=tag.holder))
        return self.allocations[-1]
