"""Four-bit base models: which modules are packed."""

import math
from typing import Any

import torch
from torch import nn

from ithaka.config import AdapterConfig
from ithaka.layer.fourbit import NF4, PackedWeight

PACKED_AS = "packed_as"  # attribute of a module: parameter name -> arguments of PackedWeight


def choose_packed(model: Any, adapter: AdapterConfig) -> None:
    """Mark the frozen linear modules of layers, and experts, that `pack_weights` will pack."""
    if adapter.base == "bf16":
        return
    for path, module in model.model.layers.named_modules():
        if f".{path}".removesuffix(".base_layer").endswith(tuple(f".{name}" for name in adapter.unquantized)):
            continue
        num_dims = 2 if isinstance(module, nn.Linear) else 3  # experts
        params = [(name, param) for name, param in module.named_parameters(recurse=False) if not param.requires_grad]
        sizes = {name: math.prod(param.shape[-2:]) for name, param in params if param.dim() == num_dims}
        if marks := {name: (NF4,) for name, size in sizes.items() if size % NF4.block == 0}:
            module.__dict__[PACKED_AS] = marks


def pack_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Pack the marked parameters. The probe of a model still needs them unpacked."""
    for module in model.modules():
        for name, (layout, *rows) in module.__dict__.pop(PACKED_AS, {}).items():
            PackedWeight(module, name, layout, dtype, *rows)
