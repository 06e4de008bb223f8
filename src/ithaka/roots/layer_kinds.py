"""Which layers are alike.

Layers of one kind have the same modules, parameter shapes, and entries in the lists of the model's
configuration. They take the same memory and time, so one of them is traced, rehearsed and compared
for all. To share a probe they must compute the same function: their constants (numbers and strings
in modules) and the arguments they get must be equal, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedConfig

from ithaka.blocks.experts import describe_mlp

LAYER_INDICES = ("attn_layer_indices", "mlp_only_layers", "moe_layers")
# Their lengths may equal the number of layers.
OTHER_LISTS = ("_token_id", "time_step_limit", "_multipliers")


class ModuleKind(NamedTuple):
    name: str
    type: type[nn.Module]
    parameters: str  # shapes, and which are trained


@dataclass(frozen=True)
class LayerKind:
    settings: tuple[str, ...]  # the layer's entries in the configuration's lists
    modules: tuple[ModuleKind, ...]
    num_parameters: int
    mlp: str  # its name, if it has another kind than most


def find_kinds(config: PreTrainedConfig, layers: Sequence[nn.Module]) -> list[LayerKind]:
    """The kind of each layer of a model."""
    lists = list_settings(config.get_text_config().to_dict(), len(layers)).values()
    kinds = []
    for i, layer in enumerate(layers):
        settings = tuple(repr(values[i]) for values in lists)
        size = sum(param.numel() for param in layer.parameters())
        kinds.append(LayerKind(settings, describe_modules(layer), size, describe_mlp(layer)))
    return kinds


def list_settings(values: dict[str, Any], num_layers: int) -> dict[str, Sequence[Any]]:
    """The lists of a decoder's configuration that have one entry per layer."""
    lists = {name: value for name, value in values.items() if isinstance(value, list | tuple)}
    names = [name for name in lists if name not in LAYER_INDICES and not name.endswith(OTHER_LISTS)]
    return {name: lists[name] for name in names if len(lists[name]) == num_layers}


def describe_modules(layer: nn.Module) -> tuple[ModuleKind, ...]:
    kinds = []
    for name, module in layer.named_modules():
        shapes = {
            k: (tuple(v.shape), v.requires_grad)
            for k, v in module._parameters.items()
            if v is not None
        }
        kinds.append(ModuleKind(name, type(module), repr(sorted(shapes.items()))))
    return tuple(kinds)


def describe_layer(layer: nn.Module) -> tuple[tuple[ModuleKind, str], ...]:
    """The kind and constants of each module. Equal for layers that compute the same function of the
    same arguments, up to the values of their parameters."""
    constants = []
    for module in layer.modules():
        scalars = {
            k: v
            for k, v in vars(module).items()
            if isinstance(v, int | float | str | None) and k != "layer_idx"
        }
        constants.append(repr(scalars))
    return tuple(zip(describe_modules(layer), constants, strict=True))
