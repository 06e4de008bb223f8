"""Gated MLPs as blocks: down(activation(gate(h)) * up(h)), with a hand-written backward.

Autograd would hold six tensors of the MLP's width. This holds three, and on a GPU adds the weight gradients directly to
their fp32 sums.

Shapes: t tokens of a tile, D hidden size, F width of the MLP.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import Any

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

    def make(self, module: Any, tile: TileState) -> "MlpBlock":
        return MlpBlock(self, module, tile)


class MlpBlock:
    """Replaces the forward of a gated MLP."""

    def __init__(self, spec: MlpSpec, module: Any, tile: TileState) -> None:
        self.spec, self.module, self.tile = spec, module, tile

    def linears(self) -> tuple[list[Linear], Linear]:
        """The maps of the input and of the output, read again in every pass: FSDP2 replaces parameters, and PEFT
        switches adapters."""
        maps = [as_linear(getattr(self.module, name)) for name in (*self.spec.inputs, self.spec.down)]
        return maps[:-1], maps[-1]

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
    def forward(ctx: Any, x: Tensor, block: MlpBlock, keeps: bool, *tensors: Tensor) -> Tensor:
        inputs, down = block.linears()
        h_tD = x.to(down.weight_MD.dtype).flatten(0, -2)
        projected = [linear(h_tD) for linear in inputs]
        ctx.block, ctx.tensors, ctx.x = block, tensors, (x.shape, x.dtype)
        ctx.kept = (h_tD, projected) if keeps else None
        if block.tile.skips_mlp:
            return h_tD.new_zeros(()).expand(x.shape)
        gate_tF, up_tF = block.split(projected)
        a_tF = torch.empty(gate_tF.shape, dtype=h_tD.dtype, device=x.device) if keeps or len(inputs) == 1 else gate_tF
        gate_mul(gate_tF, up_tF, a_tF, block.spec.activation)
        del gate_tF, up_tF, projected
        return reshape_output(down(a_tF), *x.shape)

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> Any:
        block, returned, (shape, dtype) = ctx.block, GradSum(), ctx.x
        (inputs, down), grads = block.linears(), block.tile.grads or returned
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
        return dh_tD.view(shape).to(dtype), None, None, *map(returned.take_rounded, ctx.tensors)


def find_mlp(path: str, module: nn.Module) -> MlpSpec | None:
    """Return the spec of a module that computes a gated MLP."""
    maps = {name: as_linear(child) for name, child in module.named_children() if is_linear(child)}
    others = [child for name, child in module.named_children() if name not in maps]
    if len(maps) not in (2, 3) or module._parameters or any(True for child in others for _ in child.parameters()):
        return None
    if not is_plain(module) or not takes_one_input(module):
        return None
    plain = copy.deepcopy(module).cpu()
    for names in permutations(maps):
        shapes = [maps[name].weight_MD.shape for name in names]
        (width, D), down = shapes[0], shapes[-1]
        is_possible = width == 2 * down[1] if len(maps) == 2 else shapes[0] == shapes[1] and width == down[1]
        if not is_possible or down[0] != D:
            continue
        for activation in ACTIVATIONS:
            for up_first in (False, True) if len(maps) == 2 else (False,):
                spec = MlpSpec(path, names[:-1], names[-1], activation, up_first)
                block: Callable[..., Any] = MlpBlock(spec, plain, TileState())
                if reproduces(block, plain, [random_rows(D)], list(plain.parameters())):
                    return spec
    return None


def shrink_mlp(mlp: Any) -> None:
    """Make a module narrow if it is an MLP, without values."""
    if type(getattr(mlp, "down_proj", None)) is not nn.Linear:
        return
    others = [getattr(mlp, name) for name in ("gate_proj", "up_proj", "gate_up_proj") if hasattr(mlp, name)]
    width, new = mlp.down_proj.in_features, min(mlp.down_proj.in_features, SMALL_WIDTH)
    if not all(type(linear) is nn.Linear and linear.out_features % width == 0 for linear in others):
        return
    resize(mlp.down_proj, "weight", {1: new})
    mlp.down_proj.in_features = new
    for linear in others:
        linear.out_features = linear.out_features // width * new
        for name in ("weight", *(["bias"] if linear.bias is not None else [])):
            resize(linear, name, {0: linear.out_features})
