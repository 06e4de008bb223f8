"""Live bytes on a GPU: the history of PyTorch's CUDA allocator, with the names that the schedule gives."""

import math
import pickle
import time
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ithaka.phases import PhasePath, current_holder, current_phase, holder_of, listening
from ithaka.profile.memory import Piece, Recorder, Shape, form, local_tensor, made_by

MAX_EVENTS = 2_000_000
CLOCK_SLACK_NS = 20_000  # between the allocator's clock and Python's
ROUND_BYTES = 512  # the allocator's unit


class _Tag(NamedTuple):
    """The schedule said what a tensor is for."""

    time_ns: int
    shape: Shape
    dtype: str
    holder: str


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
        for address, pieces in self._pieces().items():
            tags_of: dict[int, list[_Tag]] = {}
            for tag in self._tags.get(address, ()):
                # A tensor at an address is the newest piece there, unless that was given back.
                at = bisect_right(pieces, tag.time_ns + CLOCK_SLACK_NS, key=lambda piece: piece.start_ns) - 1
                if at >= 0 and pieces[at].stop_ns + CLOCK_SLACK_NS >= tag.time_ns:
                    tags_of.setdefault(at, []).append(tag)
            for i, piece in enumerate(pieces):
                self._add(piece, tags_of.get(i, []))

    def _pieces(self) -> dict[int, list[Piece]]:
        """By address, in the order of time."""
        found = {address: [Piece(num_bytes, self._start_ns)] for address, num_bytes in self._before.items()}
        for event in self.snapshot["device_traces"][self.device.index or 0]:
            at_ns = event["time_us"] * 1000
            if at_ns < self._start_ns - CLOCK_SLACK_NS:
                continue
            if event["action"] == "alloc":
                found.setdefault(event["addr"], []).append(self._piece(event, at_ns))
            elif event["action"] == "free_requested" and event["addr"] in found:
                piece = found[event["addr"]][-1]
                piece.stop_ns = min(piece.stop_ns, max(at_ns, piece.start_ns))
        return found

    def _piece(self, event: dict[str, Any], at_ns: int) -> Piece:
        num_bytes = -(-event["size"] // ROUND_BYTES) * ROUND_BYTES
        line, fsdp_holder = made_by((f["filename"], f["line"], f["name"]) for f in event["frames"])
        path, holder = self._made_in(event.get("user_metadata", ""), at_ns)
        return Piece(num_bytes, at_ns, fsdp_holder or holder, path, line=line)

    def _made_in(self, metadata: str, at_ns: int) -> tuple[PhasePath, str]:
        holder, _, names = metadata.partition(": ")
        if names:
            return tuple(names.split("/")), holder
        path = self.map.phases.at(at_ns)  # metadata is per thread, and this one has entered no phase
        return path, holder_of(path)

    def _add(self, piece: Piece, tags: list[_Tag]) -> None:
        """With the shape of the largest tensor that was tagged; a tag with another holder begins a new piece."""
        if tags:
            whole = max(tags, key=lambda tag: math.prod(tag.shape))
            piece.shape, piece.dtype = whole.shape, whole.dtype
        self.map.pieces.append(piece)
        for tag in tags:
            if tag.holder != piece.holder:
                piece = piece.change(tag.time_ns, holder=tag.holder)
                self.map.pieces.append(piece)


def _active_blocks(snapshot: dict[str, Any], device: torch.device) -> dict[int, int]:
    return {
        block["address"]: block["size"]
        for segment in snapshot["segments"]
        if segment["device"] == (device.index or 0)
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
