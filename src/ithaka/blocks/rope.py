"""RoPE as a block. In transformers, it is a function (q, k, cos, sin) -> (q, k) that an attention
module's forward finds among the globals of its file; the block runs a copy of that forward with
another function.

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

Call = tuple[tuple, dict[str, Any]]  # its arguments
COS: tuple[Literal["halves", "neighbors", "first half", "half"], ...] = (
    "halves",
    "neighbors",
    "first half",
    "half",
)
FORMS = [RopeForm(*form) for form in product((False, True), (False, True), COS)]


@dataclass(frozen=True)
class RopeSpec(BlockSpec):
    function: str  # its name in the file of the module's class
    form: RopeForm

    def make(self, module: nn.Module, tile: TileState) -> Callable[..., Any]:
        forward: Any = type(module).forward
        block = RopeBlock(forward.__globals__[self.function], self.form, tile)
        return MethodType(with_globals(forward, {self.function: block}), module)


class RopeBlock:
    """Replaces a function (q, k, cos, sin) -> (q, k), except in fp64: the original computes in
    other dtypes."""

    def __init__(self, original: Callable[..., Any], form: RopeForm, tile: TileState) -> None:
        self.original = original
        self.form = form
        self.tile = tile

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, ...]:
        if q.dtype == torch.float64 or cos.requires_grad or q.dim() != 4 or len(q) != 1:
            return self.original(q, k, cos, sin, *args, **kwargs)
        if not any(q.stride()) and not q.requires_grad:
            return q, k  # nothing reads them
        skips = self.tile.skips_projections
        return tuple(_Rotate.apply(t, cos, sin, self.form, skips) for t in (q, k))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x_1htK: Tensor, cos_1tR: Tensor, sin_1tR: Tensor, form: RopeForm, skips: bool
    ) -> Tensor:
        ctx.save_for_backward(cos_1tR, sin_1tR)
        ctx.form = form
        if skips:
            return x_1htK.new_zeros(()).expand(x_1htK.shape)
        return rotate(x_1htK, cos_1tR, sin_1tR, form)

    @staticmethod
    def backward(ctx, *dy: Tensor) -> tuple[Tensor | None, ...]:
        cos_1tR, sin_1tR = ctx.saved_tensors
        return rotate(dy[0], cos_1tR, sin_1tR, ctx.form, backward=True), *[None] * 4


def find_rope(layer: nn.Module, run: Callable[[], object]) -> list[RopeSpec]:
    """Return the specs of RoPE functions that the layer calls. `run` runs the layer."""
    found = []
    for path, module in layer.named_modules():
        forward: Any = type(module).forward
        if not isinstance(forward, FunctionType) or "forward" in vars(module):
            continue
        for name in forward.__code__.co_names:
            original = forward.__globals__.get(name)
            if "rotary" not in name or not isinstance(original, FunctionType):
                continue
            calls: list[Call] = []
            recorder = partial(_record, original, calls)
            module.forward = MethodType(with_globals(forward, {name: recorder}), module)
            try:
                run()
            finally:
                del module.forward
            forms = [_find_form(original, *call) for call in calls]
            if forms and forms[0] is not None and all(form == forms[0] for form in forms):
                found.append(RopeSpec(path, name, forms[0]))
    return found


def _record(
    original: Callable[..., Any], calls: list[Call], *args: object, **kwargs: object
) -> object:
    calls.append((args, kwargs))
    return original(*args, **kwargs)


def _find_form(original: FunctionType, args: tuple, kwargs: dict[str, Any]) -> RopeForm | None:
    """Return the form of a function, given the arguments of a call."""
    names = list(inspect.signature(original).parameters)[:4]
    if names != ["q", "k", "cos", "sin"] or len(args) < 4:
        return None
    q, k, cos, sin = args[:4]
    if not all(isinstance(t, Tensor) for t in args[:4]):
        return None
    if cos.dim() != 3 or cos.shape != sin.shape or q.dim() != 4 or len(q) != 1:
        return None
    if q.shape[2] != cos.shape[1]:
        return None
    generator = torch.Generator().manual_seed(7)
    q, k, cos, sin = (
        torch.randn(t.shape, generator=generator, dtype=torch.float32) for t in (q, k, cos, sin)
    )
    for form in FORMS:
        block = RopeBlock(original, form, TileState())
        if reproduces(
            lambda q, k, block=block: block(q, k, cos, sin),
            lambda q, k: original(q, k, cos, sin, *args[4:], **kwargs),
            [q, k],
        ):
            return form
    return None


def with_globals(function: FunctionType, values: dict[str, Any]) -> FunctionType:
    """Return a copy of a function in which some globals have other values."""
    scope = function.__globals__ | values
    del scope["__name__"]  # so that a compiler does not look them up in the module
    copied = FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
