"""Gated MLPs as blocks: down(activation(gate(h)) * up(h)), with a hand-written backward.

Autograd would hold six tensors of the MLP's width; this holds three.

Shapes: t tokens of a tile, D hidden size, F width of the MLP.
"""

import copy
from dataclasses import dataclass
from itertools import permutations, product

import torch
from torch import Tensor, nn

from ithaka.blocks.block import (
    SMALL_WIDTH,
    BlockSpec,
    TileState,
    is_plain,
    random_rows,
    reproduces,
    reshape_output,
    resize,
    takes_one_input,
)
from ithaka.blocks.linear import Linear, as_linear, is_linear
from ithaka.blocks.tiles import GradSum
from ithaka.ops.token_wise import ACTIVATIONS, Activation, gate_mul, gate_mul_backward


@dataclass(frozen=True)
class MlpSpec(BlockSpec):
    is_mlp = True
    inputs: tuple[str, ...]  # the maps of gate and up, or the one of both
    down: str
    activation: Activation
    up_first: bool  # if one map has both: up is its first half

    def make(self, module: nn.Module, tile: TileState) -> "MlpBlock":
        return MlpBlock(self, module, tile)


class MlpBlock:
    """Replaces the forward of a gated MLP."""

    def __init__(self, spec: MlpSpec, module: nn.Module, tile: TileState) -> None:
        self.spec = spec
        self.module = module
        self.tile = tile

    def linears(self) -> tuple[list[Linear], Linear]:
        """The maps of the input and of the output, read in every pass: see `as_linear`."""
        inputs = [as_linear(getattr(self.module, name)) for name in self.spec.inputs]
        return inputs, as_linear(getattr(self.module, self.spec.down))

    def __call__(self, x: Tensor) -> Tensor:
        inputs, down = self.linears()
        tensors = [t for linear in (*inputs, down) for t in linear.tensors]
        with torch.autocast(x.device.type, enabled=False):
            return _MlpFunction.apply(x, self, torch.is_grad_enabled(), *tensors)

    def split(self, projected: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return gate and up, views of the results of the input maps."""
        if len(projected) == 2:
            return projected[0], projected[1]
        first, second = projected[0].chunk(2, dim=-1)
        return (second, first) if self.spec.up_first else (first, second)


class _MlpFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, block: MlpBlock, keeps: bool, *tensors: Tensor) -> Tensor:
        inputs, down = block.linears()
        h_tD = x.to(down.weight_MD.dtype).flatten(0, -2)
        projected = [linear(h_tD) for linear in inputs]
        ctx.block = block
        ctx.tensors = tensors
        ctx.x = (x.shape, x.dtype)
        ctx.kept = (h_tD, projected) if keeps else None
        if block.tile.skips_mlp:
            return h_tD.new_zeros(()).expand(x.shape)
        gate_tF, up_tF = block.split(projected)
        a_tF = gate_tF
        if keeps or len(inputs) == 1:
            a_tF = torch.empty(gate_tF.shape, dtype=h_tD.dtype, device=x.device)
        gate_mul(gate_tF, up_tF, a_tF, block.spec.activation)
        del gate_tF, up_tF, projected
        return reshape_output(down(a_tF), *x.shape)

    @staticmethod
    def backward(ctx, *douts: Tensor) -> tuple[Tensor | None, ...]:
        block = ctx.block
        returned = GradSum()
        (shape, dtype) = ctx.x
        (inputs, down) = block.linears()
        grads = block.tile.grads or returned
        h_tD, projected = ctx.kept
        ctx.kept = None  # it is overwritten
        dy_tD = douts[0].to(h_tD.dtype).flatten(0, -2)
        dz_tr = down.lora_down_grad(dy_tD)
        a_tF = down.input_grad(dy_tD, dz_tr)
        gate_tF, up_tF = block.split(projected)
        gate_mul_backward(gate_tF, up_tF, a_tF, block.spec.activation)
        down.add_grads(dy_tD, a_tF, dz_tr, grads)  # now `a` has that of forward
        del a_tF, dy_tD
        dh_tD = None
        for linear, d_tF in zip(inputs, projected, strict=True):
            dz_tr = linear.lora_down_grad(d_tF)
            linear.add_grads(d_tF, h_tD, dz_tr, grads)
            dh_tD = linear.input_grad(d_tF, dz_tr, into_tD=dh_tD)
        assert dh_tD is not None
        dx = dh_tD.view(shape).to(dtype)
        return dx, *[None] * 2, *map(returned.take_rounded, ctx.tensors)


def find_mlp(path: str, module: nn.Module) -> MlpSpec | None:
    """Return the spec of a module that computes a gated MLP."""
    maps = {name: as_linear(child) for name, child in module.named_children() if is_linear(child)}
    others = [child for name, child in module.named_children() if name not in maps]
    if len(maps) not in (2, 3) or module._parameters:
        return None
    if any(list(child.parameters()) for child in others):
        return None
    if not is_plain(module) or not takes_one_input(module):
        return None
    plain = copy.deepcopy(module).cpu()
    for names in permutations(maps):
        shapes = [maps[name].weight_MD.shape for name in names]
        (num_inputs, D) = shapes[0]
        (num_outputs, width) = shapes[-1]
        orders = [False, True] if len(maps) == 2 else [False]
        if len(maps) == 2:
            is_possible = num_inputs == 2 * width
        else:
            is_possible = shapes[0] == shapes[1] and num_inputs == width
        if not is_possible or num_outputs != D:
            continue
        for activation, up_first in product(ACTIVATIONS, orders):
            spec = MlpSpec(path, names[:-1], names[-1], activation, up_first)
            block = MlpBlock(spec, plain, TileState())
            if reproduces(block, plain, [random_rows(D)], list(plain.parameters())):
                return spec
    return None


def shrink_mlp(mlp: nn.Module) -> None:
    """Make a module narrow if it is an MLP, without values."""
    down = getattr(mlp, "down_proj", None)
    if type(down) is not nn.Linear:
        return
    names = [name for name in ("gate_proj", "up_proj", "gate_up_proj") if hasattr(mlp, name)]
    others = [getattr(mlp, name) for name in names]
    width = down.in_features
    new = min(width, SMALL_WIDTH)
    if not all(type(linear) is nn.Linear and linear.out_features % width == 0 for linear in others):
        return
    resize(down, "weight", {1: new})
    down.in_features = new
    for linear in others:
        linear.out_features = linear.out_features // width * new
        resize(linear, "weight", {0: linear.out_features})
        if linear.bias is not None:
            resize(linear, "bias", {0: linear.out_features})
