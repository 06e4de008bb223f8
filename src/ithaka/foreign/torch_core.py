"""Private parts of torch: modes, fake tensors, tensors, modules, the compiler, and the CUDA
allocator.

Read in torch 2.13. pyproject.toml bounds the versions that the tests have run with, and
tests/test_private_surfaces.py fails when one of these parts changes.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

# What compiles new frames: callable inside a function under torch.compile, also while none is
# traced, when `torch.compiler.is_compiling()` is false.
from torch._C._dynamo.eval_frame import get_eval_frame_callback as get_compile_callback

# What dispatch modes get. Tensors without memory know their shapes, dtypes and devices. Neither has
# a public name.
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer

# Trees of arguments. torch 2.11 has no torch.utils.pytree, and its C++ trees differ.
from torch.utils import _pytree as pytree

# Sees every operator, also in backward; documented, but without a public path. The second suspends
# such modes: code inside runs as if no mode were active.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

__all__ = [
    "OpOverload",
    "COMPILED_MODULE",
    "HOOK_DICTS",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "allow_compiled_variants",
    "configure_allocator",
    "count_cpp_references",
    "find_fused_devices",
    "forward_pre_hooks",
    "get_compile_callback",
    "has_gradient_hooks",
    "is_compiled",
    "keep_version",
    "mutates_inputs",
    "non_persistent_buffers",
    "norms",
    "pytree",
    "record_allocator",
    "scale_in_place",
    "set_ddp_ignored",
    "snapshot_allocator",
    "storage_key",
    "tag_allocations",
    "version_of",
    "without_modes",
]

# Where nn.Module keeps its hooks: it has methods to add them, none to list them.
HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
COMPILED_MODULE = "_orig_mod"  # where torch.compile(model) keeps the model


# ---- tensors


def keep_version(tensor: Tensor) -> Any:
    """A context in which autograd does not see changes to the tensor. `tensor.data` would do this
    for a new tensor object only, which graphs do not hold."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)


def version_of(tensor: Tensor) -> int:
    """The in-place changes to a tensor so far, which autograd compares. No public name."""
    return tensor._version


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether `register_hook` was called on the tensor. No public function tells."""
    return bool(tensor._backward_hooks)


def storage_key(storage: UntypedStorage) -> int:
    """The address of the C++ storage, which its tensors share. `data_ptr()` is 0 for tensors
    without memory."""
    return storage._cdata


def count_cpp_references(tensor: Tensor) -> int:
    """References in C++ to a tensor, and to its memory. Public functions count those of Python."""
    references = tensor._use_count()  # type: ignore[attr-defined]
    return references + torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


# Multiply tensors by a scalar in place, and compute the norm of each in a dtype, in few kernels.
# torch documents other `_foreach` functions, not these; torch.nn.utils computes norms in the
# tensors' dtype. Not wrapped: a memory map names the line that allocates.
scale_in_place = torch._foreach_mul_
norms = torch._foreach_norm


def mutates_inputs(operator: Any) -> bool:
    """Whether an operator (an OpOverload) writes to an argument. Only its schema tells."""
    return operator._schema.is_mutable


# ---- modules


def forward_pre_hooks(module: nn.Module) -> Mapping[int, Any]:
    """The module's forward pre-hooks, which nn.Module does not list."""
    return module._forward_pre_hooks


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """The buffers that are not in the module's state_dict. nn.Module takes the names, but does not
    give them back."""
    return module._non_persistent_buffers_set


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called, which keeps the module's class."""
    return module._compiled_call_impl is not None


def set_ddp_ignored(module: nn.Module, names: Any) -> None:
    """Set the names that DistributedDataParallel ignores: the first thing that it iterates over.
    Its own setter is private, too, and takes only lists."""
    module._ddp_params_and_buffers_to_ignore = names


# ---- the compiler, and optimizers


def allow_compiled_variants(count: int) -> None:
    """Let the compiler make at least `count` variants of a function before it gives up.
    torch.compiler has no setting for it."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)


def find_fused_devices() -> tuple[Any, str]:
    """The module and name of the function that lists the devices of fused optimizers: to patch it.
    Nothing public adds a device."""
    return sys.modules[Optimizer.__module__], "_get_fused_kernels_supported_devices"


# ---- the CUDA allocator


def configure_allocator(settings: str) -> None:
    """Change the CUDA allocator's settings. The public way is the environment, which torch may
    have read already. Newer versions deprecate the second function, older ones lack the first."""
    configure = (
        getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        or torch.cuda.memory._set_allocator_settings
    )
    configure(settings)


def snapshot_allocator(device: torch.device) -> dict[str, Any]:
    """The allocator's segments and recorded events; documented under this private name."""
    return torch.cuda.memory._snapshot(device)


def record_allocator(device: torch.device, max_events: int | None) -> None:
    """Record allocations with their Python stacks; None stops it. Documented under this private
    name."""
    if max_events is None:
        torch.cuda.memory._record_memory_history(None, device=device)
        return
    torch.cuda.memory._record_memory_history(
        "all", context="alloc", stacks="python", max_entries=max_events, device=device
    )


def tag_allocations(text: str) -> None:
    """Attach a text to this thread's next recorded allocations. No public name."""
    torch.cuda.memory._set_memory_metadata(text)
