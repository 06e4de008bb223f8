"""Shard a model with FSDP2; on one rank, cast in one pass."""

from collections.abc import Sequence
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState, alloc_storage

from ithaka.comm.mesh import Mesh
from ithaka.inputs.calls import mark_replaced_parameters
from ithaka.layout import Layout
from ithaka.phases import Holder, tag


def apply_fsdp(
    model: nn.Module,
    units: Sequence[nn.Module],
    mesh: Mesh,
    layout: Layout,
    dtype: torch.dtype,
    root_dtype: torch.dtype,
) -> None:
    """Shard over all ranks, or over the ranks of each replica, in FSDP2 units; the root unit has all other parameters,
    in `root_dtype`. Gradients are summed, not averaged: the loss is already divided by the global count."""
    mark_replaced_parameters(model)
    params = [param for param in model.parameters() if param.requires_grad]
    widest = reduce(torch.promote_types, {param.dtype for param in params} or {dtype})
    for param in params:  # FSDP2 needs one dtype; PEFT copies modules_to_save in the base's
        param.data = param.data.to(widest)
    reduce_dtype = torch.float32 if dtype.itemsize == 2 else None
    pin_memory = mesh.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pin_memory) if layout.offload_optimizer else OffloadPolicy()

    def shard(module: nn.Module, param_dtype: torch.dtype) -> None:
        # Layers cast their input and nothing else: angles must stay in fp32.
        precision = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)
        fully_shard(module, mesh=mesh.fsdp, mp_policy=precision, offload_policy=offload)

    for unit in units:
        shard(unit, dtype)
    shard(model, root_dtype)
    if mesh.fsdp.size() == 1:
        _cast_in_one_pass(model)
        return  # the settings below would cost a pass and a copy
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for unit in cast(Sequence[Any], units):
        if not layout.prefetches(sum(param.numel() for param in unit.parameters()) * dtype.itemsize):
            unit.set_modules_to_backward_prefetch([unit])  # a no-op: the unit is already gathered


class _OneRankParam(FSDPParam):
    """A parameter on one rank. FSDP2 casts it, then copies it into the gathered buffer; this casts into the buffer."""

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        is_sharded, data, dtype = self.sharded_state == ShardedState.SHARDED, self._sharded_param_data, self.param_dtype
        has_own_way = hasattr(self._sharded_local_tensor, "fsdp_pre_all_gather")
        if not is_sharded or has_own_way or self.offload_to_cpu or dtype is None:
            return super().all_gather_inputs
        self.init_all_gather_outputs([data.numel()], [dtype], 1, self.device)
        (gathered,) = self.all_gather_outputs
        alloc_storage(gathered)
        with torch.autograd._unsafe_preserve_version_counter(gathered):
            gathered.copy_(data)
        return [gathered]  # FSDP2 copies it onto itself, which does nothing


class _OneRankReduce(ReduceScatter):
    """Gradients on one rank. FSDP2 casts them into one buffer and copies it to another; here both are the same."""

    def __init__(self) -> None:
        self._input: Tensor | None = None  # allocated before the output, of the same size

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer, self._input = self._input, None
        if buffer is None:
            buffer = self._input = tag(torch.empty(*size, dtype=dtype, device=device), Holder.GRADIENTS)
        elif buffer.is_cuda:
            buffer.record_stream(torch.cuda.current_stream())  # FSDP2 reads its output on another stream
        return buffer

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("one rank reduces nothing")


def _cast_in_one_pass(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group):
            module.set_custom_reduce_scatter(_OneRankReduce())
            for param in group.fsdp_params:
                param.__class__ = _OneRankParam
