"""Token-wise work in tiles, forward and backward.

A tile is a run of this rank's tokens. Token-wise modules (norms, mixtures of experts, MLPs that layer/mlp.py does not
know) are black boxes: run and differentiated tile by tile, with local autograd. Their weight gradients are summed over
tiles in fp32 and rounded once.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ithaka.phases import GRADIENTS, tag

RAN_ALREADY = "backward has already run and kept nothing; call the model again instead of using retain_graph"


def tile_slices(num_tokens: int, tile_tokens: int | None) -> list[slice]:
    """Runs of at most `tile_tokens` tokens that cover `num_tokens` (None: one run)."""
    step = max(1, min(tile_tokens or num_tokens, num_tokens))
    return [slice(first, min(first + step, num_tokens)) for first in range(0, num_tokens, step)]


class GradSum:
    """Gradients summed over tiles and stages: fp32 from the second addition on, rounded once at the end."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def add(self, param: Tensor, grad: Tensor | None) -> None:
        """Adds to the sum for `param`; takes ownership of `grad`."""
        if grad is None:
            return
        have = self._sums.get(id(param))
        self._put(param, grad if have is None else have.to(sum_dtype(have.dtype)).add_(grad))

    def add_product(self, param: Tensor, dout_tN: Tensor, in_tD: Tensor) -> None:
        """Adds the weight gradient of one tile, dout^T @ in; on a GPU straight into the fp32 sum."""
        have = self._sums.get(id(param))
        if have is None and not _sums_wider(dout_tN):
            self._put(param, dout_tN.t() @ in_tD)
        elif have is None:
            self._put(param, torch.mm(dout_tN.t(), in_tD, out_dtype=torch.float32))
        else:
            self._put(param, have.to(sum_dtype(have.dtype)))
            add_matmul(self._sums[id(param)], dout_tN.t(), in_tD)

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
        return None if grad is None else tag(grad.to(param.dtype), GRADIENTS)

    def _put(self, param: Tensor, grad: Tensor) -> Tensor:
        self._sums[id(param)] = tag(grad, GRADIENTS)
        return grad


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or wider if the values are."""
    return torch.promote_types(dtype, torch.float32)


def add_matmul(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into += a @ b, with `into` in the dtype of sums; on a GPU the product is not rounded before it is added."""
    if into.dtype == a.dtype:
        into.addmm_(a, b)
    elif _sums_wider(a):
        torch.addmm(into, a, b, out_dtype=into.dtype, out=into)
    else:
        into += a @ b


def _sums_wider(a: Tensor) -> bool:
    """Whether a matmul of these 16-bit factors can return fp32."""
    return a.is_cuda and a.dtype in (torch.bfloat16, torch.float16)


def apply_norm(module: nn.Module, x: Tensor) -> Tensor:
    """Applies a norm; on a GPU, an RMSNorm runs in PyTorch's fused kernel (Hugging Face's own makes seven passes)."""
    eps = getattr(module, "variance_epsilon", None)
    if x.is_cuda and eps is not None and "forward" not in vars(module):
        return nn.functional.rms_norm(x, x.shape[-1:], module.weight, eps)  # type: ignore[arg-type]
    return module(x)


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
