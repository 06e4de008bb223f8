"""Live bytes on a CPU: each storage from its first tensor to its death, with holder, phase, shape and line."""

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
from ithaka.profile.memory import Allocation, MemoryMap, form, local_tensor, made_by


class LiveBytes(MemoryMap):
    """While entered, counts the bytes of every new CPU storage, each once, until it dies.

    Views and autograd's references keep a storage alive; resizing, which FSDP2 does, is followed. Older storages
    count only if they are tagged. What an operation allocates and frees inside C++ is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[weakref.ref, Allocation]] = {}  # by the address of the C++ storage

    def __enter__(self) -> "LiveBytes":
        self.callback(self._live.clear)  # later deaths are not noted
        plain = UntypedStorage.resize_  # patched, because dispatch does not see it

        def resize_(storage: UntypedStorage, num_bytes: int) -> Any:
            result = plain(storage, num_bytes)
            if storage.device.type == "cpu":
                self.resized(storage)
            return result

        self.callback(setattr, UntypedStorage, "resize_", plain)
        UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        self.enter_context(listening(self))
        self.enter_context(_Operations(self))
        return self

    def tag(self, tensor: Tensor, holder: str) -> None:
        """An older storage counts from now on."""
        local = local_tensor(tensor)
        if local.untyped_storage()._cdata in self._live:
            self._change(local.untyped_storage(), holder=holder)
        else:
            self._count(local.untyped_storage(), holder=holder, **form(local))

    def returned(self, tensor: Tensor, given: set[int]) -> None:
        """An operation returned `tensor`; `given`: the storages of its inputs. Any other is new."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._live or storage._cdata not in given:
            self.resized(storage, **form(tensor))

    def resized(self, storage: UntypedStorage, **facts: Any) -> None:
        """FSDP2 keeps empty storages from step to step, and fills them in turn: they may be new here."""
        if storage._cdata in self._live:
            self._change(storage, num_bytes=storage.nbytes())
            return
        frames = traceback.walk_stack(sys._getframe())
        line, holder = made_by((frame.f_code.co_filename, at, frame.f_code.co_name) for frame, at in frames)
        self._count(storage, line=line, holder=holder or PhaseState.holder, **facts)

    def _count(self, storage: UntypedStorage, **facts: Any) -> None:
        def died(_: weakref.ref, key: int = storage._cdata) -> None:
            if key in self._live:
                self._live.pop(key)[1].stop_ns = time.time_ns()

        piece = Allocation(storage.nbytes(), time.time_ns(), phase=PhaseState.path, **facts)
        self._live[storage._cdata] = weakref.ref(storage, died), piece
        self.pieces.append(piece)

    def _change(self, storage: UntypedStorage, **changes: Any) -> None:
        ref, piece = self._live.get(storage._cdata, (None, None))
        if ref is not None and piece is not None and any(getattr(piece, k) != v for k, v in changes.items()):
            self._live[storage._cdata] = ref, piece.change(time.time_ns(), **changes)
            self.pieces.append(self._live[storage._cdata][1])


class _Operations(TorchDispatchMode):
    """Shows `live` the results of every operation, also inside autograd functions and in backward."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self.live = live

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # comes back with the local tensors
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, *(kwargs or {}).values()))}
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self.live.returned(tensor, given)
        return out


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Those with memory on the CPU; DTensor works out shapes with FakeTensors, which have none."""
    if isinstance(tree, Tensor):
        if not isinstance(tree, FakeTensor) and tree.device.type == "cpu" and tree.layout == torch.strided:
            yield tree
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _tensors(part)
