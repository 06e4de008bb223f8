"""Private parts of FSDP2 and DTensor.

Read in torch 2.13. FSDP2's public methods set policies; none reads its parameters or its state.
"""

from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

# The base of a custom reduce-scatter, which the public `set_custom_reduce_scatter` takes.
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

# A sharded parameter with its gathered buffer; its state; and what gives a buffer its memory again.
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState, alloc_storage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = [
    "META_CHECK",
    "FSDPParam",
    "ReduceScatter",
    "ShardedState",
    "alloc_storage",
    "flat_shard",
    "gathered_param",
    "has_unfinished_backward",
    "fsdp_local_shard",
    "shard_of",
    "param_group",
    "read_gradient_dtypes",
    "shape_and_offset",
    "with_local",
]

# FSDP2 refuses parameters on the meta device here: to patch it. Nothing public turns this off.
META_CHECK = (_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params")


def param_group(module: FSDPModule) -> Any:
    """The FSDPParamGroup of the parameters that the module gathers, or None."""
    return module._get_fsdp_state()._fsdp_param_group


def gathered_param(param: FSDPParam) -> Tensor | None:
    """The gathered parameter, once it was gathered. Its memory may be freed."""
    return getattr(param, "_unsharded_param", None)


def flat_shard(param: FSDPParam) -> Tensor:
    """This rank's padded part of a parameter, flat: what FSDP2 gathers."""
    return param._sharded_param_data


def fsdp_local_shard(param: FSDPParam) -> Tensor:
    """This rank's part of a parameter, which may be a tensor subclass with its own all-gather."""
    return param._sharded_local_tensor


def has_unfinished_backward(model: Any) -> bool:
    """Whether a backward started and did not reach its end: FSDP2 would ignore the next one."""
    return model._get_fsdp_state()._state_ctx.post_backward_final_callback_queued


def read_gradient_dtypes(model: Any) -> None:
    """Let FSDP2 read the dtypes of gradients again if its first call found no trainable parameter,
    because adapters were disabled: gradients would be reduced in the compute dtype."""
    for state in model._get_fsdp_state()._state_ctx.all_states:
        group = state._fsdp_param_group
        # torch 2.15 has no such attribute: it needs no help
        if group is not None and getattr(group, "_orig_dtype", False) is None:
            group._init_mp_dtypes()


def shard_of(tensor: DTensor) -> Tensor:
    """The local tensor itself; `to_local()` returns a view, whose changes are counted elsewhere."""
    return tensor._local_tensor


def with_local(tensor: DTensor, local: Tensor) -> DTensor:
    """A DTensor like `tensor` with other local values. `DTensor.from_local` computes the shape
    from the local one, or checks it."""
    return DTensor(local, tensor._spec, requires_grad=False)


def shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's part, and where it starts in the full tensor. No public function
    gives the offset."""
    return compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
