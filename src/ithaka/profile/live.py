"""Record allocations by category, phase and source line: a CPU's storages, a GPU's allocator."""

import math
import sys
import sysconfig
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

import ithaka
from ithaka.device_memory import PeakMeter
from ithaka.foreign.torch_core import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    record_allocator,
    snapshot_allocator,
    storage_key,
    tag_allocations,
)
from ithaka.phases import MemoryCategory, PhaseState, listening
from ithaka.profile.memory import Allocation, CategoryListener, MemoryMap

MAX_EVENTS = 2_000_000  # of the CUDA allocator
CLOCK_SLACK_NS = 20_000  # between the allocator's clock and Python's
ROUND_BYTES = 512  # the allocator's granularity


@contextmanager
def recording_resizes(device_type: str, record: Callable[[UntypedStorage], None]) -> Iterator[None]:
    """Call `record` with each storage that FSDP2 resizes, which dispatch does not see."""
    original = UntypedStorage.resize_

    def resize_(storage: UntypedStorage, num_bytes: int) -> object:
        result = original(storage, num_bytes)
        if storage.device.type == device_type:
            record(storage)
        return result

    UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        UntypedStorage.resize_ = original  # type: ignore[method-assign]


class StorageTracker(CategoryListener):
    """Follows each new storage on a device while entered, until it is freed. Views and autograd
    keep a storage live; FSDP2's resizing is tracked. Older storages count if they get a category.
    Buffers inside operators are invisible."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        # By the address of the C++ storage.
        self.live: dict[int, tuple[weakref.ref, Allocation]] = {}

    def __enter__(self) -> Self:
        self.callback(self.live.clear)  # ignore storages freed later
        self.enter_context(recording_resizes(self.device.type, self.record))
        self.enter_context(listening(self))
        self.enter_context(self.make_mode())
        return self

    def make_mode(self) -> TorchDispatchMode:
        return RecordOutputs(self)

    def on_change(self, old: Allocation | None, new: Allocation) -> None:
        """Called for a new storage (`old` is None), and when its size or category changes."""

    def on_free(self, allocation: Allocation) -> None: ...

    def set_category(self, tensor: Tensor, category: str) -> None:
        local = local_tensor(tensor)
        storage = local.untyped_storage()
        if storage.device == self.device and not self._update(storage, category=category):
            self._add(storage, local, category)

    def record(self, storage: UntypedStorage, tensor: Tensor | None = None) -> None:
        """Record a storage, or its new size. Any may be new: FSDP2 resizes those of old steps."""
        if not self._update(storage, num_bytes=storage.nbytes()):
            frames = traceback.walk_stack(sys._getframe())
            line, category = attribute_stack(
                (frame.f_code.co_filename, at, frame.f_code.co_name) for frame, at in frames
            )
            self._add(storage, tensor, category or PhaseState.category, line)

    def _add(
        self, storage: UntypedStorage, tensor: Tensor | None, category: str, line: str = ""
    ) -> None:
        def on_free(_: weakref.ref, key: int = storage_key(storage)) -> None:
            if key in self.live:
                self.on_free(self.live.pop(key)[1])

        allocation = Allocation(storage.nbytes(), time.time_ns(), category, PhaseState.path)
        allocation.line = line
        if tensor is not None:
            allocation.set_form(tensor)
        self.live[storage_key(storage)] = weakref.ref(storage, on_free), allocation
        self.on_change(None, allocation)

    def _update(
        self, storage: UntypedStorage, category: str | None = None, num_bytes: int | None = None
    ) -> bool:
        """Change what is not None from now on. Return whether the storage was recorded before."""
        if storage_key(storage) not in self.live:
            return False
        ref, old = self.live[storage_key(storage)]
        if category is None:
            category = old.category
        if num_bytes is None:
            num_bytes = old.num_bytes
        if category != old.category or num_bytes != old.num_bytes:
            new = old.split(time.time_ns(), category, num_bytes)
            self.live[storage_key(storage)] = ref, new
            self.on_change(old, new)
        return True

    def own_tensors(self, values: Iterable[Any]) -> Iterator[Tensor]:
        """Tensors with memory on the device. FakeTensors, with which DTensor plans, have none."""
        for t in flatten(values):
            is_real = isinstance(t, Tensor) and not isinstance(t, FakeTensor)
            if is_real and t.device == self.device and t.layout == torch.strided:
                yield t


def flatten(values: Iterable[Any]) -> Iterator[Any]:
    """Yield an operator's arguments or results. Pytree would take most of a trace's time."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from flatten(value)
        else:
            yield value


class RecordOutputs(TorchDispatchMode):
    """Records the outputs of every operator, also inside autograd functions and in backward."""

    def __init__(self, tracker: StorageTracker) -> None:
        super().__init__()
        self.tracker = tracker

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # DTensors and quantized moments dispatch again, with their parts
        tracker = self.tracker
        kwargs = kwargs or {}
        own = tracker.own_tensors((*args, *kwargs.values()))
        inputs = {storage_key(tensor.untyped_storage()) for tensor in own}
        out = self.run(func, args, kwargs)
        for tensor in tracker.own_tensors((out,)):
            storage = tensor.untyped_storage()
            # Otherwise it is older than the step.
            if storage_key(storage) in tracker.live or storage_key(storage) not in inputs:
                tracker.record(storage, tensor)
        return out

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return func(*args, **kwargs)


class LiveBytes(StorageTracker, MemoryMap):
    """The memory map of a CPU."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def on_change(self, old: Allocation | None, new: Allocation) -> None:
        self.allocations.append(new)

    def on_free(self, allocation: Allocation) -> None:
        allocation.stop_ns = time.time_ns()


class AllocatorHistory(MemoryMap):
    """Records the CUDA allocator's events while entered, and builds the map on exit. The allocator
    has sizes, not shapes: only tensors with a category have a shape. `snapshot` is for PyTorch's
    memory viewer."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.peak_meter = PeakMeter(device)
        self.snapshot: dict[str, Any] = {}
        self._categories: list[tuple[int, Allocation]] = []  # address, category and shape
        self._initial_bytes: dict[int, int] = {}  # by address, live before recording
        self._start_ns = 0

    def __enter__(self) -> Self:
        torch.cuda.synchronize(self.device)
        self.peak_meter.restart()
        for segment in snapshot_allocator(self.device)["segments"]:
            if segment["device"] == (self.device.index or 0):
                for block in segment["blocks"]:
                    if block["state"] == "active_allocated":
                        self._initial_bytes[block["address"]] = block["size"]
        record_allocator(self.device, MAX_EVENTS)
        self._start_ns = time.time_ns()
        self.push(self._stop)
        self.enter_context(listening(self))
        self.category_changed()
        return self

    def _stop(self, kind: type[BaseException] | None, *_: object) -> None:
        tag_allocations("")
        self.measured_peak_bytes = self.peak_meter.read()
        self.snapshot = snapshot_allocator(self.device)
        record_allocator(self.device, None)
        if kind is None:
            self._build()

    def set_category(self, tensor: Tensor, category: str) -> None:
        local = local_tensor(tensor)
        if local.is_cuda:
            mark = Allocation(0, time.time_ns(), category)
            mark.set_form(local)
            self._categories.append((local.untyped_storage().data_ptr(), mark))

    def category_changed(self) -> None:
        """Attach category and phase to this thread's next allocations, also for the viewer."""
        path = "/".join(PhaseState.path)
        tag_allocations(f"{PhaseState.category}: {path}")

    def _build(self) -> None:
        """Replay the allocator's events and the categories in order of time."""
        newest = {
            address: Allocation(num_bytes, self._start_ns)
            for address, num_bytes in self._initial_bytes.items()
        }
        self.allocations.extend(newest.values())
        trace = self.snapshot["device_traces"][self.device.index or 0]
        events: list[tuple[int, int, Any]] = [
            (event["time_us"] * 1000, event["addr"], event) for event in trace
        ]
        events = [event for event in events if event[0] >= self._start_ns - CLOCK_SLACK_NS]
        events += [
            (mark.start_ns + CLOCK_SLACK_NS, address, mark) for address, mark in self._categories
        ]
        for at_ns, address, event in sorted(events, key=lambda event: event[0]):
            allocation = newest.get(address)
            if isinstance(event, Allocation):
                # It belongs to the newest allocation at its address, unless that was freed before.
                if allocation is not None and allocation.stop_ns + CLOCK_SLACK_NS >= event.start_ns:
                    newest[address] = self._apply_category(allocation, event)
            elif event["action"] == "alloc":
                newest[address] = self._add(event, at_ns)
            elif event["action"] == "free_requested" and allocation is not None:
                allocation.stop_ns = min(allocation.stop_ns, max(at_ns, allocation.start_ns))

    def _add(self, event: dict[str, Any], at_ns: int) -> Allocation:
        num_bytes = -(-event["size"] // ROUND_BYTES) * ROUND_BYTES
        line, fsdp_category = attribute_stack(
            (f["filename"], f["line"], f["name"]) for f in event["frames"]
        )
        category, _, names = event.get("user_metadata", "").partition(": ")
        category = fsdp_category or category or MemoryCategory.OTHER
        path = tuple(names.split("/")) if names else ()
        self.allocations.append(Allocation(num_bytes, at_ns, category, path, line=line))
        return self.allocations[-1]

    def _apply_category(self, allocation: Allocation, mark: Allocation) -> Allocation:
        """Keep the shape of the largest tensor; a new category starts a new allocation."""
        if not allocation.dtype or math.prod(mark.shape) > math.prod(allocation.shape):
            allocation.dtype = mark.dtype
            allocation.shape = mark.shape
        if mark.category == allocation.category:
            return allocation
        self.allocations.append(
            allocation.split(mark.start_ns, mark.category, allocation.num_bytes)
        )
        return self.allocations[-1]


# ---- which line of code allocated it

_PACKAGE = str(Path(ithaka.__file__).parent)
_PROFILER = (f"{_PACKAGE}/profile/", f"{_PACKAGE}/trace/", f"{_PACKAGE}/phases.py")
_LIBRARIES = ("/site-packages/", "/dist-packages/", f"{sysconfig.get_path('stdlib')}/")
# Parts of FSDP2's names.
GRADIENT_FUNCTIONS = ("reduce", "post_backward", "to_accumulated_grad", "unsharded_grad")


def attribute_stack(frames: Iterable[tuple[str, int, str]]) -> tuple[str, MemoryCategory | None]:
    """Return the first line of our or user code, and the category if FSDP2 allocated."""
    category = None
    for file, line, function in frames:
        name = _display_name(file)
        if name is not None:
            return f"{name}:{line} in {function}", category
        if "/torch/distributed/fsdp/" in file:
            category = category or MemoryCategory.UNSHARDED
            if any(part in function for part in GRADIENT_FUNCTIONS):
                category = MemoryCategory.GRADIENTS
    return "", category


@cache
def _display_name(file: str) -> str | None:
    """The path in the package, or folder/file of user code; None for libraries and the profiler."""
    if not file.endswith(".py") or file.startswith(("<", *_PROFILER)):
        return None
    if file.startswith(_PACKAGE):
        return str(Path(file).relative_to(Path(_PACKAGE).parent))
    if any(part in file for part in _LIBRARIES):
        return None
    return "/".join(Path(file).parts[-2:])


def local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
