"""RoPE as a block. In transformers, it is a function (q, k, cos, sin) -> (q, k) that an attention module's forward
finds among the globals of its file; the block runs a copy of that forward with another function.

Shapes as in ops/token_wise.py; q and k are [1, h, t, K].
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import FunctionType, MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ithaka.blocks.block import BlockSpec, TileState, reproduces
from ithaka.ops.token_wise import RopeForm, rotate

COS: tuple[Literal["halves", "neighbors", "first half", "half"], ...] = ("halves", "neighbors", "first half", "half")
FORMS = [RopeForm(reads, writes, cos) for reads, writes, cos in product((False, True), (False, True), COS)]


@dataclass(frozen=True)
class RopeSpec(BlockSpec):
    function: str  # its name in the file of the module's class
    form: RopeForm

    def make(self, module: Any, tile: TileState) -> Callable[..., Any]:
        forward: Any = type(module).forward
        block = RopeBlock(forward.__globals__[self.function], self.form, tile)
        return MethodType(with_globals(forward, {self.function: block}), module)


class RopeBlock:
    """Replaces a function (q, k, cos, sin) -> (q, k). Runs the original in fp64, which computes in other dtypes."""

    def __init__(self, original: Callable[..., Any], form: RopeForm, tile: TileState) -> None:
        self.original, self.form, self.tile = original, form, tile

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if q.dtype == torch.float64 or cos.requires_grad or q.dim() != 4 or len(q) != 1:
            return self.original(q, k, cos, sin, *args, **kwargs)
        if not any(q.stride()) and not q.requires_grad:
            return q, k  # nothing reads them
        return tuple(_Rotate.apply(t, cos, sin, self.form, self.tile.skips_projections) for t in (q, k))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_1htK: Tensor, cos_1tR: Tensor, sin_1tR: Tensor, form: RopeForm, skips: bool) -> Tensor:
        ctx.save_for_backward(cos_1tR, sin_1tR)
        ctx.form = form
        return x_1htK.new_zeros(()).expand(x_1htK.shape) if skips else rotate(x_1htK, cos_1tR, sin_1tR, form)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        cos_1tR, sin_1tR = ctx.saved_tensors
        return rotate(dy[0], cos_1tR, sin_1tR, ctx.form, backward=True), None, None, None, None


def find_rope(layer: nn.Module, run: Callable[[], Any]) -> list[RopeSpec]:
    """Return the specs of RoPE functions that the layer calls. `run` runs the layer."""
    found = []
    for path, module in layer.named_modules():
        forward: Any = type(module).forward
        if not isinstance(forward, FunctionType) or "forward" in vars(module):
            continue
        for name in forward.__code__.co_names:
            if "rotary" not in name or not isinstance(original := forward.__globals__.get(name), FunctionType):
                continue
            calls: list[Any] = []
            module.forward = MethodType(with_globals(forward, {name: partial(_record, original, calls)}), module)
            try:
                run()
            finally:
                del module.forward
            forms = [_find_form(original, *call) for call in calls]
            if forms and forms[0] is not None and all(form == forms[0] for form in forms):
                found.append(RopeSpec(path, name, forms[0]))
    return found


def _record(original: Callable[..., Any], calls: list[Any], *args: Any, **kwargs: Any) -> Any:
    calls.append((args, kwargs))
    return original(*args, **kwargs)


def _find_form(original: Any, args: tuple, kwargs: dict[str, Any]) -> RopeForm | None:
    """Return the form of a function, given the arguments of a call."""
    if list(inspect.signature(original).parameters)[:4] != ["q", "k", "cos", "sin"] or len(args) < 4:
        return None
    q, k, cos, sin = args[:4]
    if not all(isinstance(t, Tensor) for t in args[:4]) or cos.dim() != 3 or q.dim() != 4 or len(q) != 1:
        return None
    if len({q.shape[2], cos.shape[1]}) > 1 or cos.shape != sin.shape:
        return None
    generator = torch.Generator().manual_seed(7)
    q, k, cos, sin = (torch.randn(t.shape, generator=generator, dtype=torch.float32) for t in (q, k, cos, sin))
    for form in FORMS:
        block = RopeBlock(original, form, TileState())
        if reproduces(
            lambda q, k, block=block: block(q, k, cos, sin),
            lambda q, k: original(q, k, cos, sin, *args[4:], **kwargs),
            [q, k],
        ):
            return form
    return None


def with_globals(function: Any, values: dict[str, Any]) -> Any:
    """Return a copy of a function in which some globals have other values."""
    scope = function.__globals__ | values
    del scope["__name__"]  # so that a compiler does not look them up in the module
    copied = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
