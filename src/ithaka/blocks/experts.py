"""The experts of an MoE layer, with a hand-written backward. Routers and shared experts stay the
model's own modules.

transformers' experts modules have one structure: two stacked weights with a gate in between. An
ExpertBlock replaces their forward. It sorts the choices of a tile by expert, and keeps its input
and the output of the first matmul. The router's weights are applied before the second matmul, so
backward does not need its output.

A token must keep its experts when backward recomputes a tile: the layer saves its choices, and
`_Replay` makes the router's top-k return them.

Shapes as in blocks/expert_rows.py; r rank of an adapter.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ithaka.blocks.block import SMALL_WIDTH, BlockSpec, TileState, resize
from ithaka.blocks.expert_rows import (
    Gate,
    SortedAssignments,
    add_products,
    multiply_groups,
    sum_choices,
)
from ithaka.blocks.tiles import GradSum, sum_dtype
from ithaka.config import ConfigError
from ithaka.foreign.hugging_face import has_gate_function
from ithaka.layout import Layout

FEW_EXPERTS = 32  # in a small copy of a layer


@dataclass(frozen=True)
class GroupedLinear:
    """One linear map per expert, with an optional LoRA adapter: y = x W + scale (x A) B."""

    weight: Tensor  # [E, M, D], or [E, D, M] if transposed
    bias_EM: Tensor | None
    is_transposed: bool
    a_AD: Tensor | None = None  # PEFT's, A = E * r
    b_MA: Tensor | None = None  # PEFT's, A = r * E
    scale: float = 1.0

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.weight, self.bias_EM, self.a_AD, self.b_MA) if t is not None]

    @property
    def weight_EDM(self) -> Tensor:
        return self.weight if self.is_transposed else self.weight.transpose(1, 2)

    def __call__(self, x_aD: Tensor, rows: SortedAssignments) -> Tensor:
        """Return y. The caller adds the bias."""
        y_aM = multiply_groups(x_aD, self.weight_EDM, rows.ends_E)
        if self.a_AD is not None:
            y_aM += multiply_groups(self._down(x_aD, rows), self._b_ErM, rows.ends_E)
        return y_aM

    def input_grad(self, dy_aM: Tensor, rows: SortedAssignments) -> Tensor:
        dx_aD = multiply_groups(dy_aM, self.weight_EDM.transpose(1, 2), rows.ends_E)
        if self.a_AD is not None:
            dx_aD += multiply_groups(self._down_grad(dy_aM, rows), self._a_ErD, rows.ends_E)
        return dx_aD

    def add_grads(
        self,
        dy_aM: Tensor,
        x_aD: Tensor,
        rows: SortedAssignments,
        grads: GradSum,
        is_only_tile: bool,
    ) -> None:
        """Add a tile's gradients of trained tensors but the bias; round those of an only tile."""
        if self.weight.requires_grad:
            left, right = (x_aD, dy_aM) if self.is_transposed else (dy_aM, x_aD)
            if is_only_tile:
                grads.add(self.weight, multiply_groups(left.t(), right, rows.ends_E))
            else:
                add_products(grads.sum_of(self.weight), left, right, rows.ends_E)
        if self.a_AD is not None and self.a_AD.requires_grad:
            sum_ErD = grads.sum_of(self.a_AD).unflatten(0, (len(self.weight), -1))
            add_products(sum_ErD, self._down_grad(dy_aM, rows), x_aD, rows.ends_E)
        if self.b_MA is not None and self.b_MA.requires_grad:
            sum_ErM = grads.sum_of(self.b_MA).unflatten(1, (-1, len(self.weight))).permute(2, 1, 0)
            add_products(sum_ErM, self._down(x_aD, rows), dy_aM, rows.ends_E)

    def _down(self, x_aD: Tensor, rows: SortedAssignments) -> Tensor:
        return multiply_groups(x_aD, self._a_ErD.transpose(1, 2), rows.ends_E).mul_(self.scale)

    def _down_grad(self, dy_aM: Tensor, rows: SortedAssignments) -> Tensor:
        return multiply_groups(dy_aM, self._b_ErM.transpose(1, 2), rows.ends_E).mul_(self.scale)

    @property
    def _a_ErD(self) -> Tensor:
        assert self.a_AD is not None
        return self.a_AD.unflatten(0, (len(self.weight), -1))

    @property
    def _b_ErM(self) -> Tensor:
        assert self.b_MA is not None
        return self.b_MA.unflatten(1, (-1, len(self.weight))).permute(2, 1, 0).contiguous()


@dataclass(frozen=True)
class ExpertSpec(BlockSpec):
    is_mlp = True
    reads_16_bits = False
    fallback = "runs its experts as transformers does, without ithaka's grouped matmuls"

    def make(self, module: nn.Module, tile: TileState) -> "ExpertBlock":
        return ExpertBlock(module, tile)


def find_experts(layer: nn.Module) -> dict[str, ExpertSpec | None]:
    """Map experts modules' paths to their spec; several have None: choices are not replayed."""
    found = {path: module for path, module in layer.named_modules() if is_expert_module(module)}
    inner = {module.base_layer for module in found.values() if hasattr(module, "parameter_name")}
    paths = [path for path, module in found.items() if module not in inner]
    return {path: ExpertSpec(path) if len(paths) == 1 else None for path in paths}


class ExpertBlock:
    """Replaces the forward of an experts module: (x [t, D], chosen experts [t, k], weights [t, k])
    -> y [t, D]."""

    def __init__(self, module: Any, tile: TileState) -> None:
        """`module`: the experts, or the outermost of PEFT's wrappers, one per adapted weight."""
        self.module = module
        self.tile = tile
        self.adapters = {}
        while hasattr(module, "parameter_name"):
            self.adapters[module.parameter_name] = module
            module = module.base_layer
        self.experts = module
        self.gate = Gate(module)
        self.num_experts = module.num_experts
        self.chosen_tk: Tensor | None = None  # in the last call
        self.ends_E = torch.empty(0)  # where each expert's rows end, in the last call

    def __call__(self, x_tD: Tensor, expert_tk: Tensor, weight_tk: Tensor) -> Tensor:
        self.chosen_tk = expert_tk
        with torch.autocast(x_tD.device.type, enabled=False):
            tensors = [t for linear in self.linears() for t in linear.tensors]
            return _ExpertsFunction.apply(x_tD, expert_tk, weight_tk, self, *tensors)

    def linears(self) -> tuple[GroupedLinear, GroupedLinear]:
        """The two linear maps, read in every pass: see `as_linear`."""
        up = self._linear("gate_up_proj" if self.experts.has_gate else "up_proj")
        return up, self._linear("down_proj")

    def _linear(self, name: str) -> GroupedLinear:
        bias_EM = getattr(self.experts, f"{name}_bias", None)
        base = GroupedLinear(getattr(self.experts, name), bias_EM, self.experts.is_transposed)
        wrapper: Any = self.adapters.get(name)
        if wrapper is None or wrapper.disable_adapters or wrapper.merged:
            return base
        for active in wrapper.active_adapters:
            if active in wrapper.lora_A:
                a_AD = wrapper.lora_A[active].weight
                b_MA = wrapper.lora_B[active].weight
                return replace(base, a_AD=a_AD, b_MA=b_MA, scale=wrapper.scaling[active])
        return base


class _ExpertsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_tD, expert_tk, weight_tk, block, *tensors):
        (up, down) = block.linears()
        wide = sum_dtype(x_tD.dtype)
        rows = SortedAssignments.sort(expert_tk, block.num_experts)
        inputs_tD = x_tD.to(up.weight.dtype)
        block.ends_E = rows.ends_E
        weight_a = rows.take(weight_tk.to(sum_dtype(weight_tk.dtype)))
        h_aF = up(inputs_tD[rows.token_a], rows)
        ctx.block = block
        ctx.dtypes = (x_tD.dtype, weight_tk.dtype)
        ctx.tensors = tensors
        ctx.kept = rows, inputs_tD, weight_a, h_aF
        ctx.choices = expert_tk, weight_tk.detach()
        if block.tile.skips_mlp:
            return torch.zeros_like(x_tD, dtype=wide)
        y_tD = sum_choices(
            down(block.gate.forward(h_aF, up.bias_EM, weight_a, rows), rows), rows, wide
        )
        if down.bias_EM is not None:
            weight_tE = _spread(expert_tk, weight_tk.to(wide), len(down.bias_EM))
            y_tD.addmm_(weight_tE, down.bias_EM.to(wide))
        return y_tD

    @staticmethod
    def backward(ctx, dy_tD):
        (up, down) = ctx.block.linears()
        returned = GradSum()
        tile = ctx.block.tile
        grads = returned if tile.grads is None else tile.grads
        is_only_tile = tile.grads is None or tile.is_only_tile
        rows, inputs_tD, weight_a, h_aF = ctx.kept
        ctx.kept = None  # h is overwritten
        dy_aD = dy_tD.to(inputs_tD.dtype)[rows.token_a]
        dh_aF, a_aF, dweight_a = ctx.block.gate.backward(
            h_aF, up.bias_EM, weight_a, down.input_grad(dy_aD, rows), rows
        )
        down.add_grads(dy_aD, a_aF, rows, grads, is_only_tile)
        del dy_aD, a_aF
        up.add_grads(dh_aF, inputs_tD[rows.token_a], rows, grads, is_only_tile)
        dx_tD = sum_choices(up.input_grad(dh_aF, rows), rows, ctx.dtypes[0])
        dweight_tk = dweight_a[rows.row_tk]
        if up.bias_EM is not None and up.bias_EM.requires_grad:
            sum_E1F = grads.sum_of(up.bias_EM)[:, None]
            add_products(sum_E1F, dh_aF.new_ones(len(dh_aF), 1), dh_aF, rows.ends_E)
        if down.bias_EM is not None:
            (expert_tk, weight_tk) = ctx.choices
            wide = dy_tD.dtype
            dweight_tk += (dy_tD @ down.bias_EM.to(wide).t()).gather(1, expert_tk)
            if down.bias_EM.requires_grad:
                weight_tE = _spread(expert_tk, weight_tk.to(wide), len(down.bias_EM))
                grads.add(down.bias_EM, weight_tE.t() @ dy_tD)
        dinputs = [dx_tD, None, dweight_tk.to(ctx.dtypes[1]), None]
        return *dinputs, *map(returned.take_rounded, ctx.tensors)


def _spread(expert_tk: Tensor, weight_tk: Tensor, num_experts: int) -> Tensor:
    """Return the weight of every expert, [t, E]."""
    return weight_tk.new_zeros(len(expert_tk), num_experts).scatter_add_(1, expert_tk, weight_tk)


class _Replay(TorchFunctionMode):
    """Makes a router's top-k return recorded choices."""

    def __init__(self, chosen_tk: Tensor, num_experts: int) -> None:
        super().__init__()
        self.chosen_tk = chosen_tk
        self.num_experts = num_experts
        self.num_replays = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.topk, Tensor.topk):
            scores = args[0]
            k = kwargs["k"] if "k" in kwargs else args[1]
            if scores.shape[-1] == self.num_experts and k == self.chosen_tk.shape[1]:
                self.num_replays += 1
                chosen = self.chosen_tk.view(*scores.shape[:-1], k)
                return torch.return_types.topk((scores.gather(-1, chosen), chosen))
        return function(*args, **kwargs)


class LayerExperts:
    """The experts of a decoder layer in forward, recomputation and backward of a tile. Does nothing
    for a layer without experts, or with those of a layout that ExpertBlock does not know."""

    def __init__(self, layer: nn.Module, blocks: Iterable[object], tile: TileState) -> None:
        """`blocks`: all those of the layer."""
        self.layer = layer
        self.tile = tile
        self.block = next((block for block in blocks if isinstance(block, ExpertBlock)), None)
        self.counts_E: Tensor | None = None  # rows of each expert, in training, since `take_counts`

    def check(self, name: str, layout: Layout) -> None:
        """Raise ConfigError if the layer needs an ExpertBlock, and has none."""
        names = [path for path, _ in self.layer.named_modules() if path.endswith("experts")]
        modules = self.layer.named_modules()
        adapted = [path for path, module in modules if hasattr(module, "parameter_name")]
        if self.block is None and layout.stored_dtype and names:
            fix = "use train.compile=auto" if layout.compile is True else "leave it out"
            raise ConfigError(
                f"memory.stored_dtype={layout.stored_dtype} needs ithaka's experts, which repeat "
                f"forward's choices in backward; {name} runs its own; {fix}"
            )
        if self.block is None and adapted:
            rule = "train.compile=true" if layout.compile is True else "experts of this structure"
            raise ConfigError(
                f"{name}: adapters on {adapted[0]} are not supported with {rule}; leave out its "
                "targets"
            )

    def replace_wrapper(self, is_packed: bool) -> None:
        """Without a schedule, run the block for experts with adapters or packed weights: PEFT
        cannot combine both."""
        if self.block is not None and (self.block.adapters or is_packed):
            self.block.module.forward = partial(_run_alone, self.block)

    @contextmanager
    def forward_tile(self, chosen: deque[Tensor], wanted_tk: Tensor | None) -> Iterator[None]:
        """Run a tile, and append its choices to `chosen`. `wanted_tk`: the user's, if passed."""
        with self._choose(wanted_tk) as replay:
            yield
        if replay is not None and not replay.num_replays:
            k = replay.chosen_tk.shape[1]
            raise ValueError(
                f"expert_indices has {k} experts per token; use as many as the router chooses"
            )
        if self.block is not None and self.block.chosen_tk is not None:
            chosen.append(self.block.chosen_tk.to(torch.int16))
            if self.block.experts.training:
                counts_E = self.block.ends_E.diff(prepend=self.block.ends_E.new_zeros(1)).long()
                self.counts_E = counts_E if self.counts_E is None else self.counts_E + counts_E

    def take_counts(self) -> Tensor | None:
        """Return and reset the rows of each expert since the last call; None without training."""
        counts_E = self.counts_E
        self.counts_E = None
        return counts_E

    @contextmanager
    def repeat_tile(self, chosen: deque[Tensor], skips_mlp: bool) -> Iterator[None]:
        """Recompute a tile with the next choices in `chosen`. `skips_mlp`: see TileState."""
        chosen_tk = chosen.popleft() if chosen and self.block is not None else None
        with self.tile.set(skips_mlp=skips_mlp), self._choose(chosen_tk):
            yield

    def _choose(self, chosen_tk: Tensor | None) -> AbstractContextManager:
        if self.block is None or chosen_tk is None:
            return nullcontext()
        return _Replay(chosen_tk.long(), self.block.num_experts)


def _run_alone(block: ExpertBlock, x_tD: Tensor, *routing: Tensor) -> Tensor:
    return block(x_tD, *routing).to(x_tD.dtype)


def is_expert_module(module: nn.Module) -> bool:
    """Whether an ExpertBlock can replace it: transformers' experts, or PEFT's LoRA around them."""
    experts: Any = module
    if "forward" in vars(module):
        return False
    kind = f"{type(module).__module__}.{type(module).__name__}"
    if kind == "peft.tuners.lora.layer.ParamWrapper":
        return is_expert_module(experts.base_layer)
    if not has_gate_function(type(module)) or not hasattr(module, "is_transposed"):
        return False
    has_norm = getattr(module, "has_post_expert_norm", False)
    return getattr(experts.down_proj, "ndim", 0) == 3 and not has_norm


def is_stacked(param: Tensor) -> bool:
    """Whether it stacks weights of experts. The delta rule's convolution is [channels, 1, W]."""
    return param.dim() == 3 and len(param) > 1 and param.shape[1] > 1


def describe_mlp(layer: nn.Module) -> str:
    """A name for what a layer has instead of an MLP; empty if it has none."""
    return "experts" if any(map(is_stacked, layer.parameters())) else ""


def check_choices(blocks: Sequence[ExpertBlock | None], indices: object, shape: torch.Size) -> None:
    """Check a call's `expert_indices`, for tokens of this shape. `blocks`: those of all layers."""
    if not isinstance(indices, Tensor):
        raise TypeError(f"expert_indices is {type(indices).__name__}; pass a tensor")
    num_experts = min((block.num_experts for block in blocks if block is not None), default=0)
    if not num_experts:
        raise TypeError(
            "expert_indices was passed, but no layer has experts that can replay them; leave it out"
        )
    wanted = (*shape, len(blocks))
    if indices.shape[:-1] != wanted or indices.is_floating_point():
        raise ValueError(
            f"expert_indices has shape {tuple(indices.shape)} and dtype {indices.dtype}; pass "
            f"integers of shape {(*wanted, 'experts per token')}, with an entry for every layer"
        )
    if indices.min() < 0 or indices.max() >= num_experts:
        found = f"{int(indices.min())} to {int(indices.max())}"
        raise ValueError(f"expert_indices has values from {found}; use 0 to {num_experts - 1}")


# ---- small copies


def shrink_experts(module: nn.Module) -> None:
    """If children of a module are experts, make them few and narrow, without values."""
    for child in module.children():
        # not inside one of PEFT's wrappers
        if is_expert_module(child) and not is_expert_module(module):
            _shrink(module, child)


def _shrink(block: nn.Module, experts: Any) -> None:
    """`block`: the module that has the router, too."""
    adapters: dict[str, Any] = {}
    while hasattr(experts, "parameter_name"):
        adapters[experts.parameter_name] = experts
        experts = experts.base_layer
    num_experts = experts.num_experts
    few = min(experts.num_experts, FEW_EXPERTS)
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    dims = {up: 2, "down_proj": 1} if experts.is_transposed else {up: 1, "down_proj": 2}
    width = experts.down_proj.shape[dims["down_proj"]]
    lora: set[nn.Module] = set()
    for name, dim in dims.items():
        old = getattr(experts, name).shape[dim]
        new = old // width * min(width, SMALL_WIDTH)
        resize(experts, name, {dim: new})
        if name == up and getattr(experts, f"{up}_bias", None) is not None:
            resize(experts, f"{up}_bias", {1: new})
        for adapter in adapters[name].lora_A if name in adapters else ():
            a = adapters[name].lora_A[adapter]
            b = adapters[name].lora_B[adapter]
            lora |= {a, b}
            num_rows = a.weight.shape[0] // num_experts * few
            resize(a, "weight", {0: num_rows} | ({1: new} if name == "down_proj" else {}))
            resize(b, "weight", {1: num_rows} | ({0: new} if name == up else {}))
    for module in block.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and module not in lora:
                # their widths may be equal
                sizes = tensor.shape[:1] if module is experts else tensor.shape
                counts = {dim: few for dim, size in enumerate(sizes) if size == num_experts}
                resize(module, name, counts)
        attributes = vars(module)
        for key, value in attributes.items():
            if type(value) is int and value == num_experts:
                attributes[key] = few
