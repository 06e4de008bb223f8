"""The gated MLP of Llama-like models, down(silu(gate(h)) * up(h)), with a hand-written backward.

Autograd would rerun `down`, hold six tensors of the MLP's width and round each tile's weight gradients. This holds
three, and on a GPU adds the weight gradients directly to their fp32 sums.

Shapes: t tokens of a tile, D hidden size, F width of the MLP.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ithaka.blocks.linear import Linear, as_linear, is_linear
from ithaka.blocks.tiles import GradSum
from ithaka.ops.fused import silu_mul, silu_mul_backward
from ithaka.phases import MemoryCategory, set_category

MlpActivations = tuple[Tensor, Tensor]  # gate and up


@dataclass(frozen=True)
class GatedMlp:
    gate: Linear
    up: Linear
    down: Linear

    def add_to(self, y_tD: Tensor, h_tD: Tensor, keep: bool) -> MlpActivations | None:
        """y += down(silu(gate(h)) * up(h)), in place; y has `sum_dtype`. Not differentiable.

        With `keep`, return gate and up for `backward`.
        """
        gate_tF, up_tF = self.gate(h_tD), self.up(h_tD)
        a_tF = torch.empty_like(gate_tF) if keep else gate_tF
        silu_mul(gate_tF, up_tF, a_tF)
        kept = (set_category(gate_tF, MemoryCategory.KEPT), set_category(up_tF, MemoryCategory.KEPT)) if keep else None
        del up_tF
        self.down.add_to(y_tD, a_tF)
        return kept

    def backward(self, h_tD: Tensor, dy_tD: Tensor, grads: GradSum, kept: deque[MlpActivations]) -> Tensor:
        """Return dh, add weight gradients to `grads`. Pops the tile's gate and up from `kept`, or recomputes them."""
        dgate_tF, dup_tF = kept.popleft() if kept else (self.gate(h_tD), self.up(h_tD))
        dz_tr = self.down.lora_down_grad(dy_tD)
        a_tF = self.down.input_grad(dy_tD, dz_tr)
        silu_mul_backward(dgate_tF, dup_tF, a_tF)  # in place: the names are right from here on
        self.down.add_grads(dy_tD, a_tF, dz_tr, grads)
        del a_tF
        gate_tr, up_tr = self.gate.lora_down_grad(dgate_tF), self.up.lora_down_grad(dup_tF)
        self.gate.add_grads(dgate_tF, h_tD, gate_tr, grads)
        self.up.add_grads(dup_tF, h_tD, up_tr, grads)
        return self.up.input_grad(dup_tF, up_tr, into_tD=self.gate.input_grad(dgate_tF, gate_tr))


def as_gated_mlp(module: nn.Module) -> GatedMlp | None:
    """Return a supported MLP as a GatedMlp; None for other modules, and if a forward is wrapped or hooked."""
    if type(module).__name__ not in GATED_MLP_CLASSES or not _is_silu(module.act_fn):
        return None
    linears = [module.gate_proj, module.up_proj, module.down_proj]
    modules = [module, *(part for linear in linears for part in linear.modules())]  # type: ignore[union-attr]
    is_wrapped = any("forward" in vars(part) for part in modules)
    is_hooked = any(getattr(part, hooks) for part in modules for hooks in HOOK_DICTS)
    is_supported = all(map(is_linear, linears)) and not is_wrapped and not is_hooked
    return GatedMlp(*map(as_linear, linears)) if is_supported else None  # type: ignore[arg-type]


GATED_MLP_CLASSES = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_silu(act: object) -> bool:
    # transformers has its own class for SiLU.
    return isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation"
