"""Norms over the last dim as blocks, rounded once: RMS norm, and layer norm without a bias."""

import copy
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ithaka.blocks.block import BlockSpec, TileState, is_plain, random_rows, reproduces, takes_one_input
from ithaka.ops.token_wise import NormForm, apply_norm, norm_backward

EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
OFFSETS = (0.0, 1.0)  # Gemma's norms multiply by 1 + weight


@dataclass(frozen=True)
class NormSpec(BlockSpec):
    form: NormForm

    def make(self, module: Any, tile: TileState) -> "NormBlock":
        return NormBlock(self, module, tile)


class NormBlock:
    """Replaces the forward of a norm. Its output has the dtype of the weight. In fp64, the module runs: Hugging
    Face's norms compute in fp32.

    Of a sum with `summed_terms` (ResidualSums in layer/passes.py), it normalizes the sum before rounding. Backward
    reads the rounded one, which loses no measurable precision, so nothing more is kept."""

    def __init__(self, spec: NormSpec, module: Any, tile: TileState) -> None:
        self.spec, self.module, self.tile = spec, module, tile

    def __call__(self, x: Tensor) -> Tensor:
        if self.module.weight.dtype == torch.float64:
            return type(self.module).forward(self.module, x)
        terms = [term.detach() for term in getattr(x, "summed_terms", ())]
        return _NormFunction.apply(x, self.module.weight, self, terms)


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, block: NormBlock, terms: list[Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight_D)
        ctx.block = block
        return apply_norm(x, weight_D, block.spec.form, terms)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        (x, weight_D), block = ctx.saved_tensors, ctx.block
        dx, dweight_D = norm_backward(x, dy[0], weight_D, block.spec.form)
        if not weight_D.requires_grad:
            return dx, None, None, None
        if block.tile.grads is None:
            return dx, dweight_D.to(weight_D.dtype), None, None
        block.tile.grads.add(block.module.weight, dweight_D)
        return dx, None, None, None


def find_norm(path: str, module: nn.Module) -> NormSpec | None:
    """Return the spec of a module that computes a norm over its last dim."""
    eps = next((value for name in EPS_NAMES if isinstance(value := getattr(module, name, None), float)), None)
    if eps is None or list(module._parameters) != ["weight"] or list(module.children()) or not is_plain(module):
        return None
    module = copy.deepcopy(module).cpu()
    weight: Any = module.weight
    if weight is None or weight.dim() != 1 or not takes_one_input(module):
        return None
    for offset, is_centered in product(OFFSETS, (False, True)):
        block = NormBlock(spec := NormSpec(path, NormForm(eps, offset, is_centered)), module, TileState())
        if reproduces(block, module, [random_rows(len(weight))], [weight]):
            return spec
    return None
