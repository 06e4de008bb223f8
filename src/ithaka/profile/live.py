"""Live bytes on a CPU: every storage from its first tensor until it is freed, with holder, phase, shape and line."""

import sys
import time
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ithaka.phases import PhaseState, listening
from ithaka.profile.memory import Allocation, MemoryMap, attribute_stack, dtype_and_shape, local_tensor


class LiveBytes(MemoryMap):
    """Records each new CPU storage once, until it is freed, while entered.

    Views and autograd keep a storage live; FSDP2's resizing is tracked. Older storages count only if tagged. Temporary
    buffers inside a C++ operator are invisible.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[weakref.ref, Allocation]] = {}  # by the address of the C++ storage

    def __enter__(self) -> "LiveBytes":
        self.callback(self._live.clear)  # ignore storages freed later
        original = UntypedStorage.resize_  # patched because dispatch does not see it

        def resize_(storage: UntypedStorage, num_bytes: int) -> Any:
            result = original(storage, num_bytes)
            if storage.device.type == "cpu":
                self.record(storage)
            return result

        self.callback(setattr, UntypedStorage, "resize_", original)
        UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        self.enter_context(listening(self))
        self.enter_context(_RecordOutputs(self))
        return self

    def tag(self, tensor: Tensor, holder: str) -> None:
        local = local_tensor(tensor)
        if local.untyped_storage()._cdata in self._live:
            self._update(local.untyped_storage(), holder=holder)
        else:
            self._add(local.untyped_storage(), holder=holder, **dtype_and_shape(local))

    def record_output(self, tensor: Tensor, input_storages: set[int]) -> None:
        """Record an operator's output, unless its storage is an older one: then it is an input's."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._live or storage._cdata not in input_storages:
            self.record(storage, **dtype_and_shape(tensor))

    def record(self, storage: UntypedStorage, **facts: Any) -> None:
        """Record a storage, or its new size. FSDP2 resizes storages of earlier steps from 0, so any may be new."""
        if storage._cdata in self._live:
            self._update(storage, num_bytes=storage.nbytes())
            return
        frames = traceback.walk_stack(sys._getframe())
        line, holder = attribute_stack((frame.f_code.co_filename, at, frame.f_code.co_name) for frame, at in frames)
        self._add(storage, line=line, holder=holder or PhaseState.holder, **facts)

    def _add(self, storage: UntypedStorage, **facts: Any) -> None:
        def on_free(_: weakref.ref, key: int = storage._cdata) -> None:
            if key in self._live:
                self._live.pop(key)[1].stop_ns = time.time_ns()

        allocation = Allocation(storage.nbytes(), time.time_ns(), phase=PhaseState.path, **facts)
        self._live[storage._cdata] = weakref.ref(storage, on_free), allocation
        self.allocations.append(allocation)

    def _update(self, storage: UntypedStorage, **changes: Any) -> None:
        ref, allocation = self._live[storage._cdata]
        if any(getattr(allocation, name) != value for name, value in changes.items()):
            allocation = allocation.split(time.time_ns(), **changes)
            self._live[storage._cdata] = ref, allocation
            self.allocations.append(allocation)


class _RecordOutputs(TorchDispatchMode):
    """Records the outputs of every operator, also inside autograd functions and in backward."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self.live = live

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor dispatches again, with local tensors
        inputs = {tensor.untyped_storage()._cdata for tensor in _cpu_tensors((args, *(kwargs or {}).values()))}
        out = func(*args, **(kwargs or {}))
        for tensor in _cpu_tensors(out):
            self.live.record_output(tensor, inputs)
        return out


def _cpu_tensors(tree: Any) -> Iterator[Tensor]:
    """Tensors with CPU memory, so no FakeTensors, with which DTensor computes shapes."""
    if isinstance(tree, Tensor):
        if not isinstance(tree, FakeTensor) and tree.device.type == "cpu" and tree.layout == torch.strided:
            yield tree
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _cpu_tensors(part)
