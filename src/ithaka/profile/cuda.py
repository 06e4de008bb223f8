"""Live bytes on a GPU: the allocator's own history, with the names the schedule gave."""

import math
import pickle
import time
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor

from ithaka.phases import OTHER, Path, current_holder, current_phase, listening, watching
from ithaka.profile.ledger import Change, Holding, Ledger
from ithaka.profile.live import local_tensor
from ithaka.profile.shapes import NAMED_BYTES, Shapes, made_as, rounded
from ithaka.profile.where import read

MAX_EVENTS = 2_000_000
CLOCK_SLACK_NS = 20_000  # between the allocator's clock and Python's


@dataclass(frozen=True)
class _Seen:
    """A tensor at an address, which the schedule named."""

    time_ns: int
    shape: tuple[int, ...]
    dtype: str
    holder: str


@dataclass
class _Span:
    """A piece of memory from its allocation until it is given back (None: it is still out)."""

    address: int
    num_bytes: int
    start_ns: int
    path: Path
    holder: str
    line: str
    stop_ns: int | None = None
    seen: list[_Seen] = field(default_factory=list)


@dataclass
class AllocatorHistory:
    """Records, while it is entered, what the CUDA allocator does; afterwards `ledger` has it by holder.

    `shapes`: of this step or one like it; without them only what the schedule names has a shape.
    """

    device: torch.device
    shapes: Shapes | None = None
    ledger: Ledger = field(default_factory=Ledger)
    measured_peak_bytes: int = 0
    snapshot: dict[str, Any] = field(default_factory=dict)
    _contexts: list[tuple[Path, str]] = field(default_factory=list)
    _context_ns: list[int] = field(default_factory=list)
    _seen: dict[int, list[_Seen]] = field(default_factory=dict)
    _before: dict[int, int] = field(default_factory=dict)  # address: bytes of what was there already
    _start_ns: int = 0
    _entered: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> "AllocatorHistory":
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._before = _active_blocks(torch.cuda.memory._snapshot(self.device), self.device)
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=MAX_EVENTS, device=self.device
        )
        self._start_ns = time.time_ns()
        self._entered.enter_context(listening(self))
        self._entered.enter_context(watching(self))
        self.holder_changed()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.close()
        _set_metadata("")
        self.measured_peak_bytes = torch.cuda.max_memory_allocated(self.device)
        self.snapshot = torch.cuda.memory._snapshot(self.device)
        torch.cuda.memory._record_memory_history(None, device=self.device)
        if error[0] is None:
            self._fill()

    def save(self, path: FilePath) -> None:
        """The snapshot, as PyTorch's memory viewer reads it."""
        with path.open("wb") as file:
            pickle.dump(self.snapshot, file)

    # ---- what others tell

    def register(self, tensors: Tensor | Iterable[Tensor], holder: str) -> None:
        """Names memory that is there already."""
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            self.tag(tensor, holder)

    def tag(self, tensor: Tensor, holder: str) -> None:
        local = local_tensor(tensor)
        if local.is_cuda:
            seen = _Seen(time.time_ns(), *made_as(local), holder)
            self._seen.setdefault(local.untyped_storage().data_ptr(), []).append(seen)

    def enter(self, path: Path) -> None:
        self.ledger.marks.append((time.time_ns(), path))
        self.holder_changed()

    def leave(self, path: Path) -> None:
        self.ledger.marks.append((time.time_ns(), path[:-1]))
        # The phase around this one is the current one only after all listeners were told.
        self._set_context(path[:-1], None)

    def holder_changed(self) -> None:
        self._set_context(current_phase(), current_holder())

    def _set_context(self, path: Path, holder: str | None) -> None:
        """Every allocation from now on carries the index of this context."""
        if holder is None:
            holder = next((h for p, h in reversed(self._contexts) if p == path), OTHER)
        _set_metadata(str(len(self._contexts)))
        self._contexts.append((path, holder))
        self._context_ns.append(time.time_ns())

    # ---- from events to holders

    def _fill(self) -> None:
        spans = self._spans()
        by_address: dict[int, list[_Span]] = {}
        for span in spans:
            by_address.setdefault(span.address, []).append(span)
        for address, sightings in self._seen.items():
            for seen in sightings:
                _assign(seen, by_address.get(address, []))
        for span in spans:
            self._enter_span(span)
        self.ledger.changes.sort(key=lambda change: change.time_ns)

    def _spans(self) -> list[_Span]:
        """Every piece of memory from the beginning (or its allocation) until it was given back."""
        live = {a: _Span(a, size, self._start_ns, (), OTHER, "") for a, size in self._before.items()}
        spans = list(live.values())
        for event in self.snapshot["device_traces"][self.device.index or 0]:
            if event["time_us"] * 1000 < self._start_ns - CLOCK_SLACK_NS:
                continue
            if event["action"] == "alloc":
                live[event["addr"]] = span = self._span(event)
                spans.append(span)
            elif event["action"] == "free_requested" and event["addr"] in live:
                live.pop(event["addr"]).stop_ns = event["time_us"] * 1000
        return spans

    def _span(self, event: dict[str, Any]) -> _Span:
        at_ns = event["time_us"] * 1000
        line, fsdp_holder = read((f["filename"], f["line"], f["name"]) for f in event["frames"])
        path, holder = self._context(event.get("user_metadata", ""), at_ns)
        return _Span(event["addr"], rounded(event["size"]), at_ns, path, fsdp_holder or holder, line)

    def _context(self, metadata: str, at_ns: int) -> tuple[Path, str]:
        if metadata.isdigit():
            return self._contexts[int(metadata)]
        at = bisect_right(self._context_ns, at_ns) - 1  # torch without metadata: by the clock
        return self._contexts[max(at, 0)]

    def _shape(self, span: _Span) -> tuple[tuple[int, ...], str]:
        whole = max(span.seen, key=lambda seen: math.prod(seen.shape), default=None)
        if whole is not None:
            return whole.shape, whole.dtype
        if self.shapes is None or span.num_bytes < NAMED_BYTES:
            return (), ""
        return self.shapes.find(span.line, span.num_bytes, span.path)

    def _enter_span(self, span: _Span) -> None:
        shape, dtype = self._shape(span)
        index, holder = len(self.ledger.holdings), span.holder
        self.ledger.holdings.append(Holding(holder, span.path, shape, dtype, span.line))

        def note(at_ns: int, num_bytes: int) -> None:
            self.ledger.changes.append(Change(at_ns, index, num_bytes, holder))

        note(span.start_ns, span.num_bytes)
        for seen in span.seen:
            if seen.holder != holder:
                at_ns = max(seen.time_ns, span.start_ns)
                note(at_ns, -span.num_bytes)
                holder = seen.holder
                note(at_ns, span.num_bytes)
        if span.stop_ns is not None:
            note(max(span.stop_ns, span.start_ns), -span.num_bytes)


def _assign(seen: _Seen, spans: list[_Span]) -> None:
    """A tensor at an address is the newest piece of memory there, unless that was given back."""
    at = bisect_right(spans, seen.time_ns + CLOCK_SLACK_NS, key=lambda span: span.start_ns) - 1
    if at >= 0 and (spans[at].stop_ns or 2**62) + CLOCK_SLACK_NS >= seen.time_ns:
        spans[at].seen.append(seen)


def _set_metadata(text: str) -> None:
    """Older versions of torch have none; the clock tells the phase there."""
    if hasattr(torch.cuda.memory, "_set_memory_metadata"):
        torch.cuda.memory._set_memory_metadata(text)


def _active_blocks(snapshot: dict[str, Any], device: torch.device) -> dict[int, int]:
    return {
        block["address"]: block["size"]
        for segment in snapshot["segments"]
        if segment["device"] == (device.index or 0)
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
