"""A stand-in for Triton that runs kernels in Python on CPU tensors, one program after the other,
with checked bounds.

It covers what the kernels of recurrences and of the loss use. It tells nothing about what Triton
compiles.
"""

import sys
from contextlib import contextmanager
from importlib import util
from itertools import product
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

import ithaka.ops

_program = [0, 0, 0]


class Pointer:
    def __init__(self, tensor: Tensor, offset=0):
        assert tensor.is_contiguous()
        self.tensor = tensor
        self.offset = offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset):
        return Pointer(self.tensor, self.offset + offset)


class Kernel:
    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def __getitem__(self, grid):
        def launch(*args, num_warps=None, num_stages=None, **constants):
            args = [Pointer(arg) if isinstance(arg, Tensor) else arg for arg in args]
            for position in product(*map(range, grid)):
                _program[: len(position)] = position
                self.function(*args, **constants)

        return launch


def _address(pointer, mask):
    flat = pointer.tensor.view(-1)
    offset = torch.as_tensor(pointer.offset)
    offset, mask = torch.broadcast_tensors(offset, torch.as_tensor(True if mask is None else mask))
    assert ((offset >= 0) & (offset < flat.numel()))[mask].all(), "out of bounds"
    return flat, offset, mask


def load(pointer, mask=None, other=0.0):
    flat, offset, mask = _address(pointer, mask)
    return torch.where(
        mask, flat[torch.where(mask, offset, 0)], torch.tensor(other, dtype=flat.dtype)
    )


def store(pointer, value, mask=None):
    flat, offset, mask = _address(pointer, mask)
    flat[offset[mask]] = torch.as_tensor(value).expand(offset.shape)[mask].to(flat.dtype)


def dot(x, y, acc=0.0, input_precision=None):
    assert x.dtype == y.dtype
    return x.float() @ y.float() + acc


def cumsum(x, axis, reverse=False):
    return x.flip(axis).cumsum(axis).flip(axis) if reverse else x.cumsum(axis)


def make_modules() -> dict[str, ModuleType]:
    triton = ModuleType("triton")
    language = ModuleType("triton.language")
    triton.jit = Kernel
    triton.language = language
    triton.cdiv = lambda a, b: -(-a // b)
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    names = ("arange", "sum", "where", "exp", "log", "abs", "rsqrt", "zeros")
    functions = {name: getattr(torch, name) for name in names}
    language.__dict__.update(functions, load=load, store=store, dot=dot, cumsum=cumsum)
    language.__dict__.update(
        constexpr=int, static_range=range, range=lambda *bounds, num_stages: range(*bounds)
    )
    language.__dict__.update(
        float32=torch.float32, bfloat16=torch.bfloat16, int32=torch.int32, trans=Tensor.t
    )
    language.int64 = torch.int64
    language.zeros = lambda shape, dtype: torch.zeros(shape, dtype=dtype)
    language.full = lambda shape, value, dtype: torch.full(shape, value, dtype=dtype)
    language.program_id = lambda axis: torch.tensor(_program[axis])
    language.minimum = lambda a, b: torch.as_tensor(a).clamp(max=b)
    language.maximum = lambda a, b: torch.as_tensor(a).clamp(min=b)
    language.max = lambda x, axis: x.amax(axis)
    return {"triton": triton, "triton.language": language}


@contextmanager
def kernel_modules(*names: str):
    """Load modules of ithaka.ops again, with the stand-in; yield them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in make_modules().items():
            patch.setitem(sys.modules, name, module)
        modules = []
        for name in names:
            spec = util.spec_from_file_location(
                f"ithaka.ops.{name}", f"{ithaka.ops.__path__[0]}/{name}.py"
            )
            modules.append(util.module_from_spec(spec))
            patch.setitem(sys.modules, spec.name, modules[-1])
            spec.loader.exec_module(modules[-1])
        yield modules
