"""What a run's step is, as the planner sees it: for the plan's figures beside the measured ones."""

from dataclasses import dataclass

from ithaka.phases import KEPT, MLP, RESIDUAL, UNSHARDED
from ithaka.plan.cost import gpu_phases
from ithaka.plan.hardware import Gpu, Hardware
from ithaka.plan.layout import Layout, Work
from ithaka.plan.shape import ModelShape
from ithaka.profile.flops import Part, device_rate, layer_flops, loss_flops

# The planner's names for the map's holders, where they differ.
_AS_MAPPED = {"layer weights": UNSHARDED, "tiles": MLP, "kept activations": KEPT["device"]}


@dataclass(frozen=True)
class Job:
    shape: ModelShape
    layout: Layout
    work: Work
    micro_steps: int
    num_ranks: int
    gpu: Gpu  # the CPU's entry where there is none

    @property
    def knows_rate(self) -> bool:
        return self.gpu.name != "CPU"

    @property
    def hardware(self) -> Hardware:
        """As if all ranks were in one node."""
        return Hardware(self.gpu, gpus_per_node=self.num_ranks)

    def planned(self) -> dict[str, int]:
        """Bytes per holder on one rank, at the planned peak."""
        phases = gpu_phases(self.shape, self.layout, self.hardware, self.work)
        _, holders = max(phases, key=lambda phase: sum(phase[1].values()))
        # What ordinary autograd has on its way is not told apart from the stream's gradients.
        names = _AS_MAPPED if self.layout.checkpoint else {**_AS_MAPPED, "tiles": RESIDUAL}
        planned: dict[str, int] = {}
        for name, num_bytes in holders.items():
            planned[names.get(name, name)] = planned.get(names.get(name, name), 0) + num_bytes
        return {name: num_bytes for name, num_bytes in planned.items() if num_bytes}

    def flops(self) -> dict[tuple[str, ...], float]:
        """By phase: (layer, direction, part) or the loss's; of one rank and one step."""
        cp, layout = self.layout.cp, self.layout
        found: dict[Part, float] = dict(loss_flops(self.shape, self.work, cp))
        for index in range(self.shape.num_layers):
            kept = not layout.checkpoint or index < layout.keep_attention
            window = self.shape.windows[index]
            parts = layer_flops(self.shape, self.work, cp, window, kept, layout.checkpoint)
            found |= {(f"layer {index}", *part): flops for part, flops in parts.items()}
        return {part: flops * self.micro_steps for part, flops in found.items()}

    def rate(self, path: tuple[str, ...]) -> float | None:
        """FLOP/s of the device for a phase; for a whole direction of a layer, that of its parts together."""
        if not self.knows_rate:
            return None
        if len(path) != 2:
            return device_rate(self.gpu, path[1:] or path)
        parts = {part: flops for part, flops in self.flops().items() if part[:2] == path}
        return sum(parts.values()) / sum(f / device_rate(self.gpu, part[1:]) for part, f in parts.items())
