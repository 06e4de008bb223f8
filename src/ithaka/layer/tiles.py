"""Token-wise work in tiles, forward and backward.

A tile is a run of this rank's tokens. Token-wise modules (mixtures of experts, MLPs that layer/mlp.py does not know,
norms but for an RMSNorm on a GPU or in 16 bits) are black boxes: run and differentiated tile by tile, with local
autograd. Weight gradients are summed over tiles in fp32 and rounded once.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ithaka.attention.fused import has_kernels, rms_norm_backward
from ithaka.phases import Holder, tag

RAN_ALREADY = "backward has already run and kept nothing; call the model again instead of using retain_graph"
PARAMETERS_CHANGED = (
    "parameters of {} changed in place since forward (an optimizer's step, load_state_dict, copy_), and backward would "
    "use the new ones; call backward first, or call the model again"
)


def tile_slices(num_tokens: int, tile_tokens: int | None) -> list[slice]:
    """Runs of at most `tile_tokens` tokens that cover `num_tokens` (None: one run)."""
    step = max(1, min(tile_tokens or num_tokens, num_tokens))
    return [slice(first, min(first + step, num_tokens)) for first in range(0, num_tokens, step)]


class GradSum:
    """Gradients summed over tiles and stages, in fp32 if there are several, and rounded once at the end."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def add(self, param: Tensor, grad: Tensor | None) -> None:
        """Adds to the sum for `param`; takes ownership of `grad`."""
        if grad is None:
            return
        have = self._sums.get(id(param))
        self._put(param, grad if have is None else have.to(sum_dtype(have.dtype)).add_(grad))

    def add_product(self, param: Tensor, dout_tN: Tensor, in_tD: Tensor) -> None:
        """Adds the weight gradient of one tile, dout^T @ in, straight into the fp32 sum."""
        have = self._sums.get(id(param))
        if have is None:
            self._put(param, wide_matmul(dout_tN.t(), in_tD))
        else:
            add_matmul(have, dout_tN.t(), in_tD)

    def add_heads(self, param: Tensor, heads_n: Tensor | None, grad: Tensor | None, dim: int = 0) -> None:
        """Adds the gradient of some heads (repeats allowed; None: all, in order) to the sum for `param`.

        Heads lie along `dim`, H * K long in `param` and n * K in `grad`.
        """
        if grad is None or heads_n is None:
            self.add(param, grad)
            return
        have = self._sums.get(id(param))
        if have is None:
            have = torch.zeros(param.shape, dtype=sum_dtype(param.dtype), device=param.device)
        have = self._put(param, have.to(sum_dtype(have.dtype)))
        head_dim = grad.shape[dim] // len(heads_n)
        have.unflatten(dim, (-1, head_dim)).index_add_(dim, heads_n, grad.unflatten(dim, (-1, head_dim)).to(have.dtype))

    def take(self, param: Tensor) -> Tensor | None:
        """Removes and returns the sum for `param`, in the dtype it was summed in."""
        return self._sums.pop(id(param), None)

    def take_as(self, param: Tensor) -> Tensor | None:
        """Removes and returns the sum for `param`, rounded to its dtype for autograd."""
        grad = self.take(param)
        return None if grad is None else tag(grad.to(param.dtype), Holder.GRADIENTS)

    def _put(self, param: Tensor, grad: Tensor) -> Tensor:
        self._sums[id(param)] = tag(grad, Holder.GRADIENTS)
        return grad


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or wider if the values are."""
    return torch.promote_types(dtype, torch.float32)


def wide_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the dtype of sums, never rounded to 16 bits."""
    if _sums_wider(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    wide = sum_dtype(a.dtype)
    return a.to(wide) @ b.to(wide)


def add_matmul(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into += a @ b, with `into` in the dtype of sums; the product is not rounded before it is added."""
    if _sums_wider(a) and into.dtype != a.dtype:
        torch.addmm(into, a, b, out_dtype=into.dtype, out=into)
    else:
        into.addmm_(a.to(into.dtype), b.to(into.dtype))


def _sums_wider(a: Tensor) -> bool:
    """Whether a matmul of these 16-bit factors can return fp32."""
    return a.is_cuda and _is_16_bit(a)


def _is_16_bit(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16)


def apply_norm(module: nn.Module, x: Tensor) -> Tensor:
    """Applies a norm. On a GPU or in 16 bits an RMSNorm is PyTorch's: Hugging Face's own makes seven passes and rounds
    twice."""
    if (x.is_cuda or _is_16_bit(x)) and (eps := _rms_eps(module)) is not None:
        return nn.functional.rms_norm(x, x.shape[-1:], module.weight, eps)  # type: ignore[arg-type]
    return module(x)


def run_norm(module: nn.Module, x_tD: Tensor) -> tuple[Tensor, Tensor]:
    """x and h = norm(x), for `norm_backward`; h must be detached where autograd is on."""
    fused = _rms_eps(module) is not None and (has_kernels(x_tD) or _is_16_bit(x_tD))
    return (x_tD, apply_norm(module, x_tD)) if fused else run_tile(partial(apply_norm, module), x_tD)


def norm_backward(
    into_tD: Tensor, module: nn.Module, x_tD: Tensor, h_tD: Tensor, dh_tD: Tensor, grads: GradSum
) -> None:
    """Adds dx to `into`, and the gradients of the norm's parameters to `grads`. x and h: what `run_norm` returned."""
    if h_tD.requires_grad:  # by local autograd
        into_tD += graph_backward(x_tD, h_tD, module.parameters(), dh_tD, grads)
        return
    weight: Any = module.weight
    dweight_D = rms_norm_backward(into_tD, x_tD, dh_tD, weight, _rms_eps(module))
    grads.add(weight, dweight_D if weight.requires_grad else None)


def run_tile(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """x as a leaf, and y = f(x) with its graph."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return x, f(x)


def graph_backward(x: Tensor, y: Tensor, params: Iterable[nn.Parameter], dy: Tensor, grads: GradSum) -> Tensor:
    """dx of what `run_tile` returned; adds the gradients of `params` to `grads`."""
    wanted = [p for p in params if p.requires_grad]
    dx, *dparams = torch.autograd.grad(y, [x, *wanted], dy, allow_unused=True)
    for param, grad in zip(wanted, dparams, strict=True):
        grads.add(param, grad)
    return dx


def _rms_eps(module: nn.Module) -> Any:
    """Of an RMSNorm as Hugging Face writes them, its forward not wrapped; else None."""
    return None if "forward" in vars(module) else getattr(module, "variance_epsilon", None)
