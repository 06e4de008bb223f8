"""The optimizer of a run: AdamW, AdamW with 8-bit moments, or Muon for layers' matrices."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer

from ithaka.config import OptimConfig
from ithaka.facts.sizes import MOMENT_BLOCK, has_moment_blocks


@cache
def adamw8bit_class() -> type[Optimizer]:
    """torchao's AdamW8bit, with blocks that lie within rows: FSDP2 shards rows, so a checkpoint's
    codes and scales can be resharded for any number of ranks. Parameters whose rows are not a
    multiple of a block keep fp32 moments."""
    from torchao.optim import AdamW8bit

    class RowAdamW8bit(AdamW8bit):
        def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
            local = p.to_local() if isinstance(p, DTensor) else p
            in_blocks = has_moment_blocks(p.shape) and local.numel()
            if in_blocks:
                moments = self._subclass_zeros(local, signed, MOMENT_BLOCK)
            else:
                moments = torch.zeros_like(local)
            if not isinstance(p, DTensor):
                return moments
            return DTensor.from_local(
                moments,
                p.device_mesh,
                p.placements,
                run_check=False,
                shape=p.shape,
                stride=p.stride(),
            )

        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            types = {p.device.type for group in self.param_groups for p in group["params"]}
            # It compiles a kernel for each shape, which takes minutes on a CPU, and fails without
            # values.
            on_gpu = not types <= {"cpu", "meta"}
            with nullcontext() if on_gpu else torch.compiler.set_stance("force_eager"):
                return super().step(closure)

    return RowAdamW8bit


class MuonAndAdamW(Optimizer):
    """Muon for the groups with `muon`, AdamW for the others. Muon's updates are scaled to the size
    of AdamW's, for the same learning rate. DTensors give it full matrices."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": lr})
        matrices = [group for group in self.param_groups if group["muon"]]
        others = [group for group in self.param_groups if not group["muon"]]
        # Both add their defaults to the groups, which they share with this optimizer.
        self.parts: list[Optimizer] = []
        if matrices:
            self.parts.append(Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw"))
        if others:
            self.parts.append(AdamW(others, lr=lr, betas=betas, eps=eps, fused=True))

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            has_muon = isinstance(part, Muon)
            part.state = self.state  # `load_state_dict` replaces them
            part.param_groups = [group for group in self.param_groups if group["muon"] == has_muon]
            part.step()


def make_optimizer(model: nn.Module, optim: OptimConfig) -> Optimizer:
    """Make the optimizer of the trainable parameters. Weight decay applies to matrices (including
    embeddings, as in nanoGPT and the Hugging Face trainer), not to vectors (norms, biases).
    `train_step` sets the learning rate."""
    factors = optim.find_lr_factors(name for name, p in model.named_parameters() if p.requires_grad)
    groups: dict[tuple[float, bool, bool], list[nn.Parameter]] = {
        (1.0, True, False): [],
        (1.0, False, False): [],
    }
    for name, p in model.named_parameters():
        if p.requires_grad:
            by_muon = optim.name == "muon" and p.ndim == 2 and ".layers." in name
            groups.setdefault((factors[name], p.ndim >= 2, by_muon), []).append(p)
    devices = {p.device.type for params in groups.values() for p in params}
    settings = [
        {
            "params": params,
            "weight_decay": optim.weight_decay * is_matrix,
            "lr_factor": factor,
            "muon": by_muon,
        }
        for (factor, is_matrix, by_muon), params in groups.items()
        if params
    ]
    options: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
    if optim.name == "adamw":
        return AdamW(settings, **options, fused=devices <= {"cpu", "cuda", "meta"})
    if optim.name == "adamw8bit":
        return adamw8bit_class()(settings, **options)
    return MuonAndAdamW(settings, **options)
