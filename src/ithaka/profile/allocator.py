"""Live bytes on a GPU: the history of PyTorch's CUDA allocator, with the names that the schedule gives."""

import math
import time
from typing import Any

import torch
from torch import Tensor

from ithaka.phases import Holder, PhaseState, listening
from ithaka.profile.memory import Allocation, MemoryMap, form, local_tensor, made_by

MAX_EVENTS = 2_000_000
CLOCK_SLACK_NS = 20_000  # between the allocator's clock and Python's
ROUND_BYTES = 512  # the allocator's unit


class AllocatorHistory(MemoryMap):
    """Records what the CUDA allocator does while entered; afterwards it is a map by holder.

    The allocator knows bytes, not shapes: only tensors that the schedule tags have one. `snapshot` is what PyTorch's
    memory viewer reads.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.snapshot: dict[str, Any] = {}
        self._tags: list[tuple[int, Allocation]] = []  # address; what the schedule says is there now
        self._before: dict[int, int] = {}  # by address: bytes of what was there already
        self._start_ns = 0

    def __enter__(self) -> "AllocatorHistory":
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        segments = torch.cuda.memory._snapshot(self.device)["segments"]
        blocks = (b for segment in segments if segment["device"] == (self.device.index or 0) for b in segment["blocks"])
        self._before = {b["address"]: b["size"] for b in blocks if b["state"] == "active_allocated"}
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
            self._fill()

    def tag(self, tensor: Tensor, holder: str) -> None:
        local = local_tensor(tensor)
        if local.is_cuda:
            self._tags.append(
                (local.untyped_storage().data_ptr(), Allocation(0, time.time_ns(), holder, **form(local)))
            )

    def holder_changed(self) -> None:
        """From now on, this thread's allocations carry holder and phase; the memory viewer shows them."""
        torch.cuda.memory._set_memory_metadata(f"{PhaseState.holder}: {'/'.join(PhaseState.path)}")

    def _fill(self) -> None:
        """Pieces from the allocator's events and the schedule's tags, in the order of time."""
        newest = {address: Allocation(num_bytes, self._start_ns) for address, num_bytes in self._before.items()}
        self.pieces.extend(newest.values())
        trace = self.snapshot["device_traces"][self.device.index or 0]
        events: list[tuple[int, int, Any]] = [(event["time_us"] * 1000, event["addr"], event) for event in trace]
        events = [event for event in events if event[0] >= self._start_ns - CLOCK_SLACK_NS]
        events += [(tag.start_ns + CLOCK_SLACK_NS, address, tag) for address, tag in self._tags]
        for at_ns, address, event in sorted(events, key=lambda event: event[0]):
            piece = newest.get(address)
            if isinstance(event, Allocation):
                # A tensor at an address is the newest piece there, unless that was given back.
                if piece is not None and piece.stop_ns + CLOCK_SLACK_NS >= event.start_ns:
                    newest[address] = self._tagged(piece, event)
            elif event["action"] == "alloc":
                newest[address] = self._made(event, at_ns)
            elif event["action"] == "free_requested" and piece is not None:
                piece.stop_ns = min(piece.stop_ns, max(at_ns, piece.start_ns))

    def _made(self, event: dict[str, Any], at_ns: int) -> Allocation:
        num_bytes = -(-event["size"] // ROUND_BYTES) * ROUND_BYTES
        line, fsdp_holder = made_by((f["filename"], f["line"], f["name"]) for f in event["frames"])
        holder, _, names = event.get("user_metadata", "").partition(": ")
        path = tuple(names.split("/")) if names else ()
        self.pieces.append(Allocation(num_bytes, at_ns, fsdp_holder or holder or Holder.OTHER, path, line=line))
        return self.pieces[-1]

    def _tagged(self, piece: Allocation, tag: Allocation) -> Allocation:
        """With the shape of the largest tensor that was tagged; a tag with another holder begins a new piece."""
        if not piece.dtype or math.prod(tag.shape) > math.prod(piece.shape):
            piece.dtype, piece.shape = tag.dtype, tag.shape
        if tag.holder == piece.holder:
            return piece
        self.pieces.append(piece.change(tag.start_ns, holder=tag.holder))
        return self.pieces[-1]
