"""Which shapes a line of code makes: the allocator's history has lines and bytes only.

Watching a call costs several microseconds, more than many kernels take to be launched. All layers run the same
code, so each phase is watched in the first layer that comes to it, and the others are told by line and bytes. In
case one of them runs a line of its own, they are watched too as far as that takes little of the step's time.
"""

import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ithaka.phases import Path, around_phases, current_phase
from ithaka.profile.where import read, stack

NAMED_BYTES = 2**20  # smaller tensors have no shape in the map
ROUND_BYTES = 512  # the allocator's unit
# A place in the code that makes tensors of one size is looked at so often in a phase: tiles repeat, but a library's
# line (a Linear's) may serve several of ours.
MANY = 12
# Of the time so far, what `spent_s` may be where another layer's phase is watched too. PyTorch's way to the watcher is
# outside of what can be timed, and takes about as long again.
SHARE = 0.01

Made = tuple[tuple[int, ...], str]  # shape and dtype


def made_as(tensor: Tensor) -> Made:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def rounded(num_bytes: int) -> int:
    """As the allocator counts it."""
    return -(-num_bytes // ROUND_BYTES) * ROUND_BYTES


class Shapes(AbstractContextManager):
    """Enter it around a step; afterwards `find` knows the shapes of tensors that Python code made in it.

    What C++ makes for itself, as ordinary autograd does, is not seen.
    """

    def __init__(self, device: torch.device, least_bytes: int = NAMED_BYTES, share: float = SHARE) -> None:
        self.device, self.least_bytes, self.share = device, least_bytes, share
        self.num_calls = 0
        self.spent_s = 0.0
        self._start_s = 0.0
        self._made: dict[tuple[Path, str | None, int], set[Made]] = {}  # by phase, line (None: any) and bytes
        self._looks: dict[tuple[CodeType, int, int, Path], int] = {}
        self._watched: set[Path] = set()  # phases, with their layer and without
        self._calls: _Calls | None = None
        self._entered = ExitStack()

    def __enter__(self) -> "Shapes":
        self._start_s = time.perf_counter()
        self._entered.enter_context(around_phases(self._inside))
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.close()

    def find(self, line: str, num_bytes: int, path: Path) -> Made:
        """Of memory that `line` took in the phase `path`, or else of all that the phase took of that size.

        Where these were not all alike it is not known: ((), "").
        """
        part = without_layer(path)
        for where in (line, None):
            alike = self._made.get((part, where, num_bytes), set())
            if alike:
                return next(iter(alike)) if len(alike) == 1 else ((), "")
        return (), ""

    def note(self, made: Made, num_bytes: int, line: str, path: Path) -> None:
        for where in (line, None):
            self._made.setdefault((without_layer(path), where, rounded(num_bytes)), set()).add(made)

    def saw(self, tensor: Tensor, caller: FrameType) -> None:
        """A result of the call that `caller` makes. Views are not what was allocated."""
        num_bytes, path = tensor.nbytes, current_phase()
        if num_bytes < self.least_bytes:
            return
        key = caller.f_code, caller.f_lasti, num_bytes, path
        count = self._looks[key] = self._looks.get(key, 0) + 1
        if count > MANY or tensor._is_view() or tensor.untyped_storage().nbytes() != num_bytes:
            return
        self.note(made_as(tensor), num_bytes, read(stack())[0], path)

    def _inside(self, path: Path) -> AbstractContextManager:
        has_time = self.spent_s < self.share * (time.perf_counter() - self._start_s)
        if (path if has_time else without_layer(path)) in self._watched:
            return nullcontext()
        self._watched |= {path, without_layer(path)}
        return nullcontext() if self._calls is not None else self._watch()

    def _watch(self) -> AbstractContextManager:
        stack = ExitStack()
        self._calls = stack.enter_context(_Calls(self))
        stack.callback(self._ended)
        return stack

    def _ended(self) -> None:
        self._calls = None


def without_layer(path: Path) -> Path:
    return path[1:] if path and path[0].startswith("layer ") else path


class _Calls(TorchFunctionMode):
    """Shows `shapes` what every call of PyTorch from Python returns."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.shapes = shapes

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs) if kwargs else func(*args)
        start_s, shapes = time.perf_counter(), self.shapes
        shapes.num_calls += 1
        for leaf in _tensors(out):
            if leaf.device.type == shapes.device.type and not isinstance(leaf, DTensor):
                shapes.saw(leaf, sys._getframe(1))
        shapes.spent_s += time.perf_counter() - start_s
        return out


def _tensors(out: Any) -> Iterable[Tensor]:
    if isinstance(out, Tensor):
        return (out,)
    return [leaf for leaf in out if isinstance(leaf, Tensor)] if type(out) in (tuple, list) else ()
