"""Token-wise modules in tiles of consecutive tokens, forward and backward.

Shapes: t tokens of a tile, D input features, M output features, n heads.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ithaka.foreign.torch_core import FakeTensor
from ithaka.phases import MemoryCategory, set_category

BACKWARD_RAN_TWICE = (
    "backward has already run and freed its activations; call the model again instead of using "
    "retain_graph"
)
PARAMETERS_CHANGED = (
    "parameters of {} were changed in place after forward (by optimizer.step, load_state_dict or "
    "copy_), and backward would use the new values; call backward first, or call the model again"
)


def tile_slices(num_tokens: int, tile_tokens: int | None) -> list[slice]:
    """Split `num_tokens` into slices of at most `tile_tokens` (None: one slice)."""
    step = max(1, min(tile_tokens or num_tokens, num_tokens))
    return [slice(first, min(first + step, num_tokens)) for first in range(0, num_tokens, step)]


class GradSum:
    """Sums gradients over tiles and stages, in fp32 if there are several, and rounds once. Writes
    only to sums that it made: autograd may return one tensor for two parameters."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._added: dict[int, Tensor] = {}  # the only gradient added so far

    def add(self, param: Tensor, grad: Tensor | None) -> None:
        """Add to the sum of `param`."""
        if grad is None:
            return
        if id(param) in self._sums or id(param) in self._added:
            self.sum_of(param).add_(grad)
        else:
            self._added[id(param)] = set_category(grad, MemoryCategory.GRADIENTS)

    def add_product(self, param: Tensor, dout_tM: Tensor, in_tD: Tensor) -> None:
        """Add one tile's weight gradient, dout^T @ in, directly to the fp32 sum."""
        if id(param) in self._sums or id(param) in self._added:
            add_matmul(self.sum_of(param), dout_tM.t(), in_tD)
        else:
            self._put(param, wide_matmul(dout_tM.t(), in_tD))

    def add_tile(self, full: Tensor, dim: int | None, rows: slice, grad: Tensor | None) -> None:
        """Add the gradient of the rows, along `dim`, of an activation; without it, of all of it."""
        if grad is None or dim is None:
            self.add(full, grad)
            return
        self.sum_of(full).narrow(dim, rows.start, rows.stop - rows.start).add_(grad)

    def sum_of(self, param: Tensor) -> Tensor:
        """The sum of `param` in `sum_dtype`, zeros at first, to add to in place."""
        total = self._sums.get(id(param))
        if total is not None:
            return total
        added = self._added.pop(id(param), None)
        if added is not None:
            return self._put(param, added.to(sum_dtype(added.dtype), copy=True))
        zeros = torch.zeros(param.shape, dtype=sum_dtype(param.dtype), device=param.device)
        return self._put(param, zeros)

    def take(self, param: Tensor) -> Tensor | None:
        """Remove and return the sum of `param`, in the dtype of the sum."""
        added = self._added.pop(id(param), None)
        return self._sums.pop(id(param), None) if added is None else added

    def take_rounded(self, param: Tensor) -> Tensor | None:
        """Remove and return the sum of `param`, rounded to the dtype of `param`."""
        grad = self.take(param)
        if grad is None:
            return None
        return set_category(grad.to(param.dtype), MemoryCategory.GRADIENTS)

    def _put(self, param: Tensor, grad: Tensor) -> Tensor:
        self._sums[id(param)] = set_category(grad, MemoryCategory.GRADIENTS)
        return grad


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to sum in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def wide_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in `sum_dtype`, never rounded to 16 bits."""
    if isinstance(a, FakeTensor):  # allocate what a GPU would
        return a.new_empty(a.shape[0], b.shape[1], dtype=sum_dtype(a.dtype))
    if _can_widen(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    wide = sum_dtype(a.dtype)
    return a.to(wide) @ b.to(wide)


def add_matmul(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into += a @ b, with `into` in `sum_dtype`; the product is not rounded before the addition."""
    if isinstance(a, FakeTensor):
        return
    if _can_widen(a) and into.dtype != a.dtype:
        torch.addmm(into, a, b, out_dtype=into.dtype, out=into)
    else:
        into.addmm_(a.to(into.dtype), b.to(into.dtype))


def _can_widen(a: Tensor) -> bool:
    """Whether matmul supports an fp32 result for this 16-bit input."""
    return (a.is_cuda or a.is_meta) and a.dtype in (torch.bfloat16, torch.float16)


def run_tile(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x as a leaf and y = f(x) with its graph."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return x, f(x)


def graph_backward(
    x: Tensor, y: Tensor, params: Iterable[nn.Parameter], dy: Tensor, grads: GradSum
) -> Tensor:
    """Return dx for the x and y of `run_tile`; add the gradients of `params` to `grads`."""
    trained = [p for p in params if p.requires_grad]
    dx, *dparams = torch.autograd.grad(y, [x, *trained], dy, allow_unused=True)
    for param, grad in zip(trained, dparams, strict=True):
        grads.add(param, grad)
    return dx
