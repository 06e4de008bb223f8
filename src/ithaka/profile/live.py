"""Record allocations by category, phase and source line: on a CPU every storage, on a GPU the allocator's history."""

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
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import ithaka
from ithaka.phases import MemoryCategory, PhaseState, listening
from ithaka.profile.memory import Allocation, CategoryListener, MemoryMap

MAX_EVENTS = 2_000_000  # of the CUDA allocator
CLOCK_SLACK_NS = 20_000  # between the allocator's clock and Python's
ROUND_BYTES = 512  # the allocator's granularity


@contextmanager
def recording_resizes(device_type: str, record: Callable[[UntypedStorage], Any]) -> Iterator[None]:
    """Call `record` with each storage on a device that FSDP2 resizes, which dispatch does not see."""
    original = UntypedStorage.resize_

    def resize_(storage: UntypedStorage, num_bytes: int) -> Any:
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
    """Follows each new storage on a device while entered, until it is freed. Views and autograd keep a storage live;
    FSDP2's resizing is tracked. Older storages count if they get a category. Buffers inside operators are invisible."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.live: dict[int, tuple[weakref.ref, Allocation]] = {}  # by the address of the C++ storage

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
            self._add(storage, local, category=category)

    def record(self, storage: UntypedStorage, tensor: Tensor | None = None) -> None:
        """Record a storage, or its new size. FSDP2 resizes storages of earlier steps from 0, so any may be new."""
        if not self._update(storage, num_bytes=storage.nbytes()):
            frames = traceback.walk_stack(sys._getframe())
            line, category = attribute_stack(
                (frame.f_code.co_filename, at, frame.f_code.co_name) for frame, at in frames
            )
            self._add(storage, tensor, line=line, category=category or PhaseState.category)

    def _add(self, storage: UntypedStorage, tensor: Tensor | None, **fields: Any) -> None:
        def on_free(_: weakref.ref, key: int = storage._cdata) -> None:
            if key in self.live:
                self.on_free(self.live.pop(key)[1])

        fields |= {} if tensor is None else dtype_and_shape(tensor)
        allocation = Allocation(storage.nbytes(), time.time_ns(), phase=PhaseState.path, **fields)
        self.live[storage._cdata] = weakref.ref(storage, on_free), allocation
        self.on_change(None, allocation)

    def _update(self, storage: UntypedStorage, **changes: Any) -> bool:
        """Apply `changes` from now on. Return whether the storage was recorded before."""
        if storage._cdata not in self.live:
            return False
        ref, old = self.live[storage._cdata]
        if any(getattr(old, name) != value for name, value in changes.items()):
            new = old.split(time.time_ns(), **changes)
            self.live[storage._cdata] = ref, new
            self.on_change(old, new)
        return True

    def own_tensors(self, values: Iterable[Any]) -> Iterator[Tensor]:
        """Tensors with memory on the device, so no FakeTensors, with which DTensor computes shapes."""
        for t in flatten(values):
            is_real = isinstance(t, Tensor) and not isinstance(t, FakeTensor)
            if is_real and t.device == self.device and t.layout == torch.strided:
                yield t


def flatten(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the arguments or results of an operator, which pytree would take most of a trace's time for."""
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
        tracker, kwargs = self.tracker, kwargs or {}
        inputs = {tensor.untyped_storage()._cdata for tensor in tracker.own_tensors((*args, *kwargs.values()))}
        out = self.run(func, args, kwargs)
        for tensor in tracker.own_tensors((out,)):
            storage = tensor.untyped_storage()
            if storage._cdata in tracker.live or storage._cdata not in inputs:  # else it is older than the step
                tracker.record(storage, tensor)
        return out

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
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
    """Records the CUDA allocator's events while entered, and builds the map on exit. The allocator has sizes, not
    shapes: only tensors with a category have a shape. `snapshot` is for PyTorch's memory viewer."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.snapshot: dict[str, Any] = {}
        self._categories: list[tuple[int, Allocation]] = []  # address, category and shape
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
        self.category_changed()
        return self

    def _stop(self, *error: Any) -> None:
        torch.cuda.memory._set_memory_metadata("")
        self.measured_peak_bytes = torch.cuda.max_memory_allocated(self.device)
        self.snapshot = torch.cuda.memory._snapshot(self.device)
        torch.cuda.memory._record_memory_history(None, device=self.device)
        if error[0] is None:
            self._build()

    def set_category(self, tensor: Tensor, category: str) -> None:
        local = local_tensor(tensor)
        if local.is_cuda:
            mark = Allocation(0, time.time_ns(), category, **dtype_and_shape(local))
            self._categories.append((local.untyped_storage().data_ptr(), mark))

    def category_changed(self) -> None:
        """Attach category and phase to this thread's next allocations; the memory viewer shows them."""
        torch.cuda.memory._set_memory_metadata(f"{PhaseState.category}: {'/'.join(PhaseState.path)}")

    def _build(self) -> None:
        """Replay the allocator's events and the categories in order of time."""
        newest = {address: Allocation(num_bytes, self._start_ns) for address, num_bytes in self._initial_bytes.items()}
        self.allocations.extend(newest.values())
        trace = self.snapshot["device_traces"][self.device.index or 0]
        events: list[tuple[int, int, Any]] = [(event["time_us"] * 1000, event["addr"], event) for event in trace]
        events = [event for event in events if event[0] >= self._start_ns - CLOCK_SLACK_NS]
        events += [(mark.start_ns + CLOCK_SLACK_NS, address, mark) for address, mark in self._categories]
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
        line, fsdp_category = attribute_stack((f["filename"], f["line"], f["name"]) for f in event["frames"])
        category, _, names = event.get("user_metadata", "").partition(": ")
        path = tuple(names.split("/")) if names else ()
        self.allocations.append(
            Allocation(num_bytes, at_ns, fsdp_category or category or MemoryCategory.OTHER, path, line=line)
        )
        return self.allocations[-1]

    def _apply_category(self, allocation: Allocation, mark: Allocation) -> Allocation:
        """Keep the shape of the largest tensor; a new category starts a new allocation."""
        if not allocation.dtype or math.prod(mark.shape) > math.prod(allocation.shape):
            allocation.dtype, allocation.shape = mark.dtype, mark.shape
        if mark.category == allocation.category:
            return allocation
        self.allocations.append(allocation.split(mark.start_ns, category=mark.category))
        return self.allocations[-1]


# ---- which line of code allocated it

_PACKAGE = str(Path(ithaka.__file__).parent)
_PROFILER = (f"{_PACKAGE}/profile/", f"{_PACKAGE}/phases.py")
_LIBRARIES = ("/site-packages/", "/dist-packages/", f"{sysconfig.get_path('stdlib')}/")
GRADIENT_FUNCTIONS = ("reduce", "post_backward", "to_accumulated_grad", "unsharded_grad")  # parts of FSDP2's names


def attribute_stack(frames: Iterable[tuple[str, int, str]]) -> tuple[str, MemoryCategory | None]:
    """The innermost line of our or user code, and the category if FSDP2 allocated. `frames`: innermost first."""
    category = None
    for file, line, function in frames:
        name = _display_name(file)
        if name is not None:
            return f"{name}:{line} in {function}", category
        if "/torch/distributed/fsdp/" in file:
            is_gradient = any(part in function for part in GRADIENT_FUNCTIONS)
            category = MemoryCategory.GRADIENTS if is_gradient else category or MemoryCategory.UNSHARDED
    return "", category


@cache
def _display_name(file: str) -> str | None:
    """A path relative to the package's parent, or folder/file for user code; None for libraries and the profiler."""
    if not file.endswith(".py") or file.startswith(("<", *_PROFILER)):
        return None
    if file.startswith(_PACKAGE):
        return str(Path(file).relative_to(Path(_PACKAGE).parent))
    return None if any(part in file for part in _LIBRARIES) else "/".join(Path(file).parts[-2:])


def local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def dtype_and_shape(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": tuple(tensor.shape)}
