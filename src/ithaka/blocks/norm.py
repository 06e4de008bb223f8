"""Norms over the last dim as blocks, rounded once: RMS norm, and layer norm without a bias."""

import copy
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from ithaka.blocks.block import (
    BlockSpec,
    TileState,
    is_plain,
    random_rows,
    reproduces,
    takes_one_input,
)
from ithaka.ops.token_wise import NormForm, apply_norm, norm_backward

EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
OFFSETS = (0.0, 1.0)  # Gemma's norms multiply by 1 + weight


@dataclass(frozen=True)
class NormSpec(BlockSpec):
    form: NormForm

    def make(self, module: nn.Module, tile: TileState) -> "NormBlock":
        return NormBlock(self, module, tile)


class NormBlock:
    """Replaces the forward of a norm. Its output has the dtype of the weight. In fp64, the module
    runs: Hugging Face's norms compute in fp32.

    If the input is a sum with `summed_terms` (ResidualSums in layer/passes.py), forward normalizes
    the unrounded sum. Backward reads the rounded one, so nothing more is kept; the loss of
    precision is not measurable."""

    def __init__(self, spec: NormSpec, module: nn.Module, tile: TileState) -> None:
        self.spec = spec
        self.module = module
        self.tile = tile

    def __call__(self, x: Tensor) -> Tensor:
        if self.module.weight.dtype == torch.float64:
            return type(self.module).forward(self.module, x)
        terms = [term.detach() for term in getattr(x, "summed_terms", ())]
        return _NormFunction.apply(x, self.module.weight, self, terms)


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight_D: Tensor, block: NormBlock, terms: list[Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight_D)
        ctx.block = block
        return apply_norm(x, weight_D, block.spec.form, terms)

    @staticmethod
    def backward(ctx, *dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight_D) = ctx.saved_tensors
        block = ctx.block
        grads = block.tile.grads
        dx, dweight_D = norm_backward(x, dy[0], weight_D, block.spec.form)
        returned_D = None
        if weight_D.requires_grad and grads is None:
            returned_D = dweight_D.to(weight_D.dtype)
        elif weight_D.requires_grad:
            grads.add(block.module.weight, dweight_D)
        return dx, returned_D, *[None] * 2


def find_norm(path: str, module: nn.Module) -> NormSpec | None:
    """Return the spec of a module that computes a norm over its last dim."""
    values = [getattr(module, name, None) for name in EPS_NAMES]
    eps = next((value for value in values if isinstance(value, float)), None)
    if eps is None or list(module._parameters) != ["weight"]:
        return None
    if list(module.children()) or not is_plain(module):
        return None
    module = copy.deepcopy(module).cpu()
    weight = module._parameters["weight"]
    if weight is None or weight.dim() != 1 or not takes_one_input(module):
        return None
    for offset, is_centered in product(OFFSETS, (False, True)):
        spec = NormSpec(path, NormForm(eps, offset, is_centered))
        block = NormBlock(spec, module, TileState())
        if reproduces(block, module, [random_rows(len(weight))], [weight]):
            return spec
    return None
