"""Optimizers other than PyTorch's AdamW: AdamW with 8-bit moments, and Muon for the matrices of layers."""

from collections.abc import Iterable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer

from ithaka.plan.shape import MOMENT_BLOCK, has_moment_blocks


@cache
def adamw8bit_class() -> type[Optimizer]:
    """torchao's AdamW8bit, with blocks that lie within rows: FSDP2 shards rows, so a checkpoint's codes and scales
    can be resharded for any number of ranks. Parameters whose rows are not a multiple of a block keep fp32 moments."""
    from torchao.optim import AdamW8bit

    class RowAdamW8bit(AdamW8bit):
        def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
            local = p.to_local() if isinstance(p, DTensor) else p
            in_blocks = has_moment_blocks(p.shape) and local.numel()
            moments = self._subclass_zeros(local, signed, MOMENT_BLOCK) if in_blocks else torch.zeros_like(local)
            if not isinstance(p, DTensor):
                return moments
            return DTensor.from_local(
                moments, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )

        def step(self, closure: Any = None) -> Any:
            types = {p.device.type for group in self.param_groups for p in group["params"]}
            # It compiles a kernel for each shape, which takes minutes on a CPU, and fails without values.
            with torch.compiler.set_stance("force_eager") if types <= {"cpu", "meta"} else nullcontext():
                return super().step(closure)

    return RowAdamW8bit


class MuonAndAdamW(Optimizer):
    """Muon for the groups with `muon`, AdamW for the others. Muon's updates are scaled to the size of AdamW's, so that
    both use the same learning rate. With DTensors, its matmuls are those of the full matrices."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr})
        matrices = [group for group in self.param_groups if group["muon"]]
        others = [group for group in self.param_groups if not group["muon"]]
        # Both add their defaults to the groups, which they share with this optimizer.
        self.parts: list[Optimizer] = [Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")] if matrices else []
        self.parts += [AdamW(others, lr=lr, betas=betas, eps=eps, fused=True)] if others else []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            has_muon = isinstance(part, Muon)
            part.state = self.state  # `load_state_dict` replaces them
            part.param_groups = [group for group in self.param_groups if group["muon"] == has_muon]
            part.step()
