"""A linear map with, where there is an adapter, its low-rank part: y = x W^T + b + scale (x A^T) B^T.

Gradients of frozen tensors are never formed.

Shapes: t tokens of a tile, D features in, N out, r rank.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ithaka.layer.tiles import GradSum, add_matmul, sum_dtype, wide_matmul


@dataclass(frozen=True)
class Linear:
    weight_ND: Tensor
    bias_N: Tensor | None = None
    a_rD: Tensor | None = None  # with b_Nr, or neither
    b_Nr: Tensor | None = None
    scale: float = 1.0

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.weight_ND, self.bias_N, self.a_rD, self.b_Nr) if t is not None]

    def __call__(self, x_tD: Tensor) -> Tensor:
        """y [t, N]; differentiable."""
        y_tN = F.linear(x_tD, self.weight_ND, self.bias_N)
        return y_tN if self.b_Nr is None else y_tN.addmm_(self.reduced(x_tD), self.b_Nr.t())

    def write_to(self, y_tN: Tensor, x_tD: Tensor) -> None:
        """Writes the map's output over y, in the dtype of x. Not differentiable."""
        if self.bias_N is None:
            torch.mm(x_tD, self.weight_ND.t(), out=y_tN)
        else:
            torch.addmm(self.bias_N, x_tD, self.weight_ND.t(), out=y_tN)
        if self.b_Nr is not None:
            y_tN.addmm_(self.reduced(x_tD), self.b_Nr.t())

    def add_to(self, y_tN: Tensor, x_tD: Tensor) -> None:
        """Adds the map's output to y, which is in the dtype of sums, in place. Not differentiable."""
        add_matmul(y_tN, x_tD, self.weight_ND.t())
        self._add_rest(y_tN, x_tD)

    def wide(self, x_tD: Tensor) -> Tensor:
        """The map's output in the dtype of sums. Not differentiable."""
        y_tN = wide_matmul(x_tD, self.weight_ND.t())
        self._add_rest(y_tN, x_tD)
        return y_tN

    def _add_rest(self, y_tN: Tensor, x_tD: Tensor) -> None:
        if self.bias_N is not None:
            y_tN += self.bias_N
        if self.b_Nr is not None:
            add_matmul(y_tN, self.reduced(x_tD), self.b_Nr.t())

    def reduced(self, x_tD: Tensor) -> Tensor:
        """What B is applied to, scale x A^T, rounded once."""
        assert self.a_rD is not None
        return torch.addmm(x_tD.new_empty(1), x_tD, self.a_rD.t(), beta=0, alpha=self.scale)

    def reduced_grad(self, dy_tN: Tensor) -> Tensor | None:
        """The gradient at x A^T [t, r], which the other gradients need; None without an adapter."""
        if self.b_Nr is None:
            return None
        return torch.addmm(dy_tN.new_empty(1), dy_tN, self.b_Nr, beta=0, alpha=self.scale)

    def input_grad(
        self, dy_tN: Tensor, dz_tr: Tensor | None, into_tD: Tensor | None = None, adds: bool = True
    ) -> Tensor:
        """dx [t, D]; with `into`, added to it or written over it. `dz`: the reduced gradient."""
        dx_tD = dy_tN @ self.weight_ND if into_tD is None else into_tD.addmm_(dy_tN, self.weight_ND, beta=int(adds))
        return dx_tD if dz_tr is None or self.a_rD is None else dx_tD.addmm_(dz_tr, self.a_rD)

    def add_grads(self, dy_tN: Tensor, x_tD: Tensor, dz_tr: Tensor | None, grads: GradSum) -> None:
        """Adds the gradients of one tile that are wanted."""
        if self.weight_ND.requires_grad:
            grads.add_product(self.weight_ND, dy_tN, x_tD)
        if self.bias_N is not None and self.bias_N.requires_grad:
            grads.add(self.bias_N, dy_tN.sum(0, dtype=sum_dtype(dy_tN.dtype)))
        if self.b_Nr is not None and self.b_Nr.requires_grad:
            grads.add_product(self.b_Nr, dy_tN, self.reduced(x_tD))
        if dz_tr is not None and self.a_rD is not None and self.a_rD.requires_grad:
            grads.add_product(self.a_rD, dz_tr, x_tD)

    def of_heads(self, heads_n: Tensor | None, head_dim: int, dim: int = 0) -> "Linear":
        """The map of some heads, which lie along the output (dim 0) or the input (dim 1); None: all, unchanged."""
        if heads_n is None:
            return self
        taken: dict[str, Any] = {}
        for name in ("weight_ND", "bias_N", "b_Nr") if dim == 0 else ("weight_ND", "a_rD"):
            if (whole := getattr(self, name)) is not None:
                heads = whole.unflatten(dim, (-1, head_dim)).index_select(dim, heads_n).flatten(dim, dim + 1)
                taken[name] = heads.requires_grad_(whole.requires_grad)  # says what is wanted, also without autograd
        return replace(self, **taken)

    def add_sums(self, heads: "Linear", heads_n: Tensor | None, sums: GradSum, grads: GradSum, dim: int = 0) -> None:
        """Adds the sums for a map made by `of_heads` to this one's gradients."""
        for whole, part in zip(self.tensors, heads.tensors, strict=True):
            grads.add_heads(whole, None if part is whole else heads_n, sums.take(part), dim)


def as_linear(module: nn.Module) -> Linear:
    """What an nn.Linear, or PEFT's wrapper of one, computes now: FSDP2 replaces parameters, PEFT switches adapters."""
    if isinstance(module, nn.Linear):
        return Linear(module.weight, module.bias)
    wrapper: Any = module
    names = [] if wrapper.disable_adapters else wrapper.active_adapters
    if hasattr(wrapper, "original_module"):
        return as_linear(wrapper.modules_to_save[names[0]] if names else wrapper.original_module)
    base = as_linear(wrapper.base_layer)
    names = [] if wrapper.merged else [name for name in names if name in wrapper.lora_A]
    if not names:
        return base
    (name,) = names
    return replace(
        base, a_rD=wrapper.lora_A[name].weight, b_Nr=wrapper.lora_B[name].weight, scale=wrapper.scaling[name]
    )


def is_linear(module: Any) -> bool:
    """Whether `linear_of` gives all that the module computes; PEFT's configuration is checked elsewhere."""
    if type(module) is nn.Linear:
        return True
    kind = f"{type(module).__module__}.{type(module).__name__}"
    if kind == "peft.utils.other.ModulesToSaveWrapper":
        return all(map(is_linear, (module.original_module, *module.modules_to_save.values())))
    return kind == "peft.tuners.lora.layer.Linear" and is_linear(module.base_layer)
