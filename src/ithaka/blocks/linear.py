"""A linear map with an optional LoRA adapter: y = x W^T + b + scale (drop(x) A^T) B^T.

Gradients of frozen tensors are never computed.

Shapes: t tokens of a tile, D input features, M output features, r rank of the adapter.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ithaka.blocks.block import BlockSpec, TileState, is_plain, reshape_output
from ithaka.blocks.dropout import TokenDropout
from ithaka.blocks.tiles import GradSum, sum_dtype


@dataclass(frozen=True)
class Linear:
    weight_MD: Tensor
    bias_M: Tensor | None = None
    a_rD: Tensor | None = None  # a_rD and b_Mr are both set or both None
    b_Mr: Tensor | None = None
    scale: float = 1.0
    dropout: TokenDropout | None = None  # applied to the adapter's input
    columns_D: Tensor | None = None  # of the input after `select_heads`, if there is dropout

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.weight_MD, self.bias_M, self.a_rD, self.b_Mr) if t is not None]

    def __call__(self, x_tD: Tensor) -> Tensor:
        """Return y [t, M]. Differentiable."""
        y_tM = F.linear(x_tD, self.weight_MD, self.bias_M)
        return y_tM if self.b_Mr is None else y_tM.addmm_(self.lora_down(x_tD), self.b_Mr.t())

    def write_to(self, y_tM: Tensor, x_tD: Tensor) -> None:
        """Write the output to y, which has the dtype of x. Not differentiable."""
        if self.bias_M is None:
            torch.mm(x_tD, self.weight_MD.t(), out=y_tM)
        else:
            torch.addmm(self.bias_M, x_tD, self.weight_MD.t(), out=y_tM)
        if self.b_Mr is not None:
            y_tM.addmm_(self.lora_down(x_tD), self.b_Mr.t())

    def lora_down(self, x_tD: Tensor) -> Tensor:
        """Return the input of B, scale drop(x) A^T [t, r], rounded once."""
        assert self.a_rD is not None
        return torch.addmm(
            x_tD.new_empty(1), self._drop(x_tD), self.a_rD.t(), beta=0, alpha=self.scale
        )

    def _drop(self, x_tD: Tensor) -> Tensor:
        return x_tD if self.dropout is None else self.dropout(x_tD, self.columns_D)

    def lora_down_grad(self, dy_tM: Tensor) -> Tensor | None:
        """Return the gradient at A's output [t, r], for the methods below; None without adapter."""
        if self.b_Mr is None:
            return None
        return torch.addmm(dy_tM.new_empty(1), dy_tM, self.b_Mr, beta=0, alpha=self.scale)

    def input_grad(
        self, dy_tM: Tensor, dz_tr: Tensor | None, into_tD: Tensor | None = None, adds: bool = True
    ) -> Tensor:
        """Return dx [t, D], added to `into` or, without `adds`, written. dz: `lora_down_grad`'s."""
        if into_tD is None:
            dx_tD = dy_tM @ self.weight_MD
        else:
            dx_tD = into_tD.addmm_(dy_tM, self.weight_MD, beta=int(adds))
        if dz_tr is None or self.a_rD is None:
            return dx_tD
        if self.dropout is None:
            return dx_tD.addmm_(dz_tr, self.a_rD)
        return dx_tD.add_(self._drop(dz_tr @ self.a_rD))

    def add_grads(self, dy_tM: Tensor, x_tD: Tensor, dz_tr: Tensor | None, grads: GradSum) -> None:
        """Add one tile's gradients of the parameters that require them."""
        if self.weight_MD.requires_grad:
            grads.add_product(self.weight_MD, dy_tM, x_tD)
        if self.bias_M is not None and self.bias_M.requires_grad:
            grads.add(self.bias_M, dy_tM.sum(0, dtype=sum_dtype(dy_tM.dtype)))
        if self.b_Mr is not None and self.b_Mr.requires_grad:
            grads.add_product(self.b_Mr, dy_tM, self.lora_down(x_tD))
        if dz_tr is not None and self.a_rD is not None and self.a_rD.requires_grad:
            grads.add_product(self.a_rD, dz_tr, self._drop(x_tD))

    def select_heads(self, heads_n: Tensor | None, head_dim: int, dim: int = 0) -> "Linear":
        """Select heads of the output (dim 0) or the input (dim 1). None: return self."""
        if heads_n is None:
            return self
        selected: dict[str, Any] = {}
        for name in ("weight_MD", "bias_M", "b_Mr") if dim == 0 else ("weight_MD", "a_rD"):
            full = getattr(self, name)
            if full is not None:
                by_head = full.unflatten(dim, (-1, head_dim))
                heads = by_head.index_select(dim, heads_n).flatten(dim, dim + 1)
                # `add_grads` reads it, not autograd
                selected[name] = heads.requires_grad_(full.requires_grad)
        if self.dropout is not None and dim == 1:
            columns = torch.arange(head_dim, device=heads_n.device)
            selected["columns_D"] = (heads_n[:, None] * head_dim + columns).flatten()
        return replace(self, **selected)


def as_linear(module: nn.Module) -> Linear:
    """Return the map that an nn.Linear, or PEFT's wrapper of one, computes.

    Call it in every pass: FSDP2 replaces parameters, and PEFT switches adapters.
    """
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
    drop = wrapper.lora_dropout[name]
    (a_rD, b_Mr) = (part[name].weight for part in (wrapper.lora_A, wrapper.lora_B))
    dropout = drop if isinstance(drop, TokenDropout) else None
    return replace(base, a_rD=a_rD, b_Mr=b_Mr, scale=wrapper.scaling[name], dropout=dropout)


def is_linear(module: nn.Module) -> bool:
    """Whether `as_linear` covers it. PEFT's configuration is checked elsewhere."""
    if type(module) is nn.Linear:
        return True
    kind = f"{type(module).__module__}.{type(module).__name__}"
    wrapper: Any = module
    if kind == "peft.utils.other.ModulesToSaveWrapper":
        return all(map(is_linear, (wrapper.original_module, *wrapper.modules_to_save.values())))
    return kind == "peft.tuners.lora.layer.Linear" and is_linear(wrapper.base_layer)


@dataclass(frozen=True)
class LinearSpec(BlockSpec):
    def make(self, module: nn.Module, tile: TileState) -> "LinearBlock":
        return LinearBlock(module, tile)


class LinearBlock:
    """Replaces the forward of a linear map, with or without an adapter."""

    # some heads, for the current stage; a number: zeros of this width instead
    selected: Linear | int | None = None
    is_projection = False  # to q, k or v

    def __init__(self, module: nn.Module, tile: TileState) -> None:
        self.module = module
        self.tile = tile

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.selected, int):
            return x.new_zeros(()).expand(*x.shape[:-1], self.selected)
        linear = as_linear(self.module) if self.selected is None else self.selected
        with torch.autocast(x.device.type, enabled=False):
            return _LinearFunction.apply(x, self, linear, *linear.tensors)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, block: LinearBlock, linear: Linear, *tensors: Tensor) -> Tensor:
        x_tD = x.to(linear.weight_MD.dtype).flatten(0, -2)
        ctx.block = block
        ctx.x = (x.shape, x.dtype)
        ctx.tensors = tensors
        ctx.save_for_backward(x_tD)
        if block.is_projection and block.tile.skips_projections:
            return x_tD.new_zeros(()).expand(*x.shape[:-1], len(linear.weight_MD))
        return reshape_output(linear(x_tD), *x.shape[:-1], len(linear.weight_MD))

    @staticmethod
    def backward(ctx, *douts: Tensor) -> tuple[Tensor | None, ...]:
        (x_tD,) = ctx.saved_tensors
        (shape, dtype) = ctx.x
        returned = GradSum()
        linear = as_linear(ctx.block.module)
        dy_tM = douts[0].to(x_tD.dtype).flatten(0, -2)
        dz_tr = linear.lora_down_grad(dy_tM)
        linear.add_grads(dy_tM, x_tD, dz_tr, ctx.block.tile.grads or returned)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = linear.input_grad(dy_tM, dz_tr).view(shape).to(dtype)
        return dx, *[None] * 2, *map(returned.take_rounded, ctx.tensors)


def find_linear(path: str, module: nn.Module) -> LinearSpec | None:
    return LinearSpec(path) if is_linear(module) and is_plain(module) else None
