"""The FLOPs that rates are made of (profile/progress.py) against those PyTorch counts while a layer runs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ithaka.dist.loopback import LoopbackGroup
from ithaka.layer.schedule import StreamedLayer
from ithaka.layer.store import Store
from ithaka.layout import LayerKeeps, Layout
from ithaka.model.families import layer_parts
from ithaka.phases import listening
from ithaka.plan.heads import head_table
from ithaka.plan.shape import Work, shape_from_config
from ithaka.profile.progress import layer_flops
from models import tiny_config, tiny_model

TOKENS, CP = 48, 2
FLOPS_OF = {**flop_registry, torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm]}


class Counted(TorchDispatchMode):
    """FLOPs by (direction, part). PyTorch's own mode also hooks modules, which local autograd does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.sums, self._began = 0, {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in FLOPS_OF:
            self.now += FLOPS_OF[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out

    def enter(self, path: tuple[str, ...]) -> None:
        self._began[path] = self.now

    def leave(self, path: tuple[str, ...]) -> None:
        part = path[1:]
        self.sums[part] = self.sums.get(part, 0) + self.now - self._began[path]


@pytest.mark.parametrize("kept", [True, False])
def test_planned_flops_are_those_of_the_layer(kept):
    model = tiny_model(tiny_config("llama", 8, 2, attention_bias=False), torch.float32)
    keeps = LayerKeeps(attention="device" if kept else None)
    block, group, table = model.model.layers[0], LoopbackGroup(0, CP), head_table(8, 2, CP, 4)
    rotary, layout = model.model.rotary_emb, Layout(CP, 4, tile_tokens=20)
    layer = StreamedLayer("layer", block, layer_parts(model, 0), rotary, group, table, Store(), layout, keeps)
    x_sD = torch.randn(TOKENS, model.config.hidden_size, requires_grad=True)
    with Counted() as counted, listening(counted):
        layer(x_sD, torch.arange(TOKENS), (0, CP * TOKENS)).sum().backward()
    shape = shape_from_config(model.config.to_dict())
    planned = layer_flops(shape, Work(CP * TOKENS), CP, None, kept, checkpoint=True)
    for part, flops in planned.items():
        if part[1] != "attention":  # there it counts whole squares, and not every kernel
            assert counted.sums[part] == pytest.approx(flops, rel=1e-9), part
