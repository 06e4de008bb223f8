"""Find the blocks of a decoder layer, and put them in place of its modules' forwards."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ithaka.blocks.block import BlockSpec, TileState
from ithaka.blocks.experts import find_experts
from ithaka.blocks.linear import find_linear
from ithaka.blocks.mlp import find_mlp
from ithaka.blocks.norm import find_norm
from ithaka.blocks.rope import find_rope


def find_blocks(layer: nn.Module, run: Callable[[], object]) -> tuple[BlockSpec, ...]:
    """Return the specs of all blocks that reproduce modules of a layer. `run` runs the layer."""
    found: dict[str, BlockSpec] = {}
    experts = find_experts(layer)
    for path, module in layer.named_modules():
        if any(path == other or path.startswith(f"{other}.") for other in (*found, *experts)):
            continue
        spec = find_mlp(path, module) or find_norm(path, module) or find_linear(path, module)
        if spec is not None:
            found[path] = spec
    return (*found.values(), *find_rope(layer, run), *filter(None, experts.values()))


class LayerBlocks:
    """The blocks of one layer."""

    def __init__(self, layer: nn.Module, specs: Sequence[BlockSpec], tile: TileState) -> None:
        self.layer = layer
        self.by_path: dict[str, Any] = {}
        for spec in specs:
            module = layer.get_submodule(spec.path)
            self.by_path[spec.path] = module.forward = spec.make(module, tile)

    def restore(self) -> None:
        for path in self.by_path:
            del self.layer.get_submodule(path).forward
