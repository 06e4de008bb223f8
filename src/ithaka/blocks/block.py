"""Blocks: hand-written forwards and backwards of modules in a decoder layer.

A block replaces a module's forward if it reproduces the module's output and gradients on random
inputs, whatever the module's name. Blocks add weight gradients to the layer's fp32 sums, instead of
returning them to autograd rounded.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ithaka.blocks.tiles import GradSum
from ithaka.foreign import torch_operators
from ithaka.foreign.torch_core import HOOK_DICTS

# Rows of random inputs: epsilons show in small ones, clamps in large ones.
ROW_SCALES = (1.0, 0.03, 1e-3, 30.0, 1e3, 1e5)
TOLERANCE = 1e-4  # in fp32, relative to the largest value of a row
SMALL_WIDTH = 32  # width of experts and MLPs in a small copy of a layer


@dataclass
class TileState:
    """How a layer's blocks run the current tile. The layer's own forward and autograd come between
    its schedule and its blocks, so it cannot be an argument."""

    grads: GradSum | None = None  # where backward adds weight gradients; None: to autograd
    is_only_tile: bool = True  # in the layer's backward
    skips_mlp: bool = False  # MLPs and experts return zeros: no gradient depends on their output
    skips_projections: bool = False  # the same of the maps to q, k and v, and their RoPE

    @contextmanager
    def set(self, **values: GradSum | bool | None) -> Iterator[None]:
        for name, value in values.items():
            setattr(self, name, value)
        try:
            yield
        finally:
            for name in values:
                setattr(self, name, getattr(TileState, name))


@dataclass(frozen=True)
class BlockSpec(ABC):
    """What a block computes, and for which module of the layer."""

    path: str
    is_mlp: ClassVar[bool] = False  # `TileState.skips_mlp` leaves it out
    reads_16_bits: ClassVar[bool] = True  # layers with such blocks keep the residual in 16 bits
    # What a layer does if its blocks differ. Those with the same text are used all or not at all.
    fallback: ClassVar[str] = "runs its modules as transformers does, without ithaka's blocks"

    @abstractmethod
    def make(self, module: nn.Module, tile: TileState) -> Callable[..., Any]:
        """The forward of the module."""


def is_plain(module: nn.Module) -> bool:
    """Whether the module and those in it run the forwards of their classes, without hooks."""
    for part in module.modules():
        if "forward" in vars(part) or any(getattr(part, hooks) for hooks in HOOK_DICTS):
            return False
    return True


def takes_one_input(module: nn.Module) -> bool:
    """Whether the module's forward has no other argument: a gate, for example."""
    return len(inspect.signature(type(module).forward).parameters) == 2


def reshape_output(y: Tensor, *shape: int) -> Tensor:
    """Return a result in another shape, not as a view: models may change it in place."""
    return torch_operators.reshape_as_new(y, shape)


def random_rows(num_features: int) -> Tensor:
    """Random inputs [1, t, D] for `reproduces`."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1, len(ROW_SCALES), num_features, generator=generator, dtype=torch.float32)
    return x * torch.tensor(ROW_SCALES)[:, None]


def reproduces(
    block: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Sequence[Tensor],
    params: Sequence[Tensor] = (),
) -> bool:
    """Whether a block returns the output and gradients of the reference."""
    try:
        ours, theirs = (_run(function, inputs, params) for function in (block, reference))
    except Exception:
        return False  # it computes something else
    return len(ours) == len(theirs) and all(map(_is_close, ours, theirs))


def _run(
    function: Callable[..., Any], inputs: Sequence[Tensor], params: Sequence[Tensor]
) -> list[Tensor | None]:
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        generator = torch.Generator().manual_seed(6)
        douts = [torch.randn(out.shape, generator=generator, dtype=out.dtype) for out in outputs]
        trained = [param for param in params if param.requires_grad]
        grads = torch.autograd.grad(outputs, [*leaves, *trained], douts, allow_unused=True)
    return [*(out.detach() for out in outputs), *grads]


def resize(module: nn.Module, name: str, sizes: dict[int, int]) -> None:
    """Give a parameter other sizes in some dims, without values; cut a buffer to them."""
    param = module._parameters.get(name)
    if param is not None:
        shape = [sizes.get(dim, size) for dim, size in enumerate(param.shape)]
        empty = torch.empty(shape, dtype=param.dtype, device="meta")
        module._parameters[name] = nn.Parameter(empty, param.requires_grad)
        return
    for dim, size in sizes.items():
        buffer = module._buffers[name]
        module._buffers[name] = None if buffer is None else buffer.narrow(dim, 0, size)


def _is_close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape:
        return False
    largest = b.abs().amax(-1, keepdim=True)
    return bool(((a - b).abs() <= TOLERANCE * largest + 1e-30).all())
