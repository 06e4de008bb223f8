"""The gated MLP of Llama-like models, down(silu(gate(h)) * up(h)), with its backward written out.

Local autograd would run `down` once more, keep six tensors as wide as the MLP and round every tile's weight gradients.
This keeps three, and on a GPU adds the weight gradients straight to their fp32 sums.

Shapes: t tokens of a tile, D hidden, F width of the MLP.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ithaka.attention.fused import silu_mul, silu_mul_backward
from ithaka.layer.linear import Linear, as_linear, is_linear
from ithaka.layer.tiles import GradSum
from ithaka.phases import Holder, tag

Inside = tuple[Tensor, Tensor]  # gate and up


@dataclass(frozen=True)
class GatedMlp:
    gate: Linear
    up: Linear
    down: Linear

    def add_to(self, y_tD: Tensor, h_tD: Tensor, keep: bool) -> Inside | None:
        """y += down(silu(gate(h)) * up(h)), in place; y is in the dtype of sums. Not differentiable.

        `keep`: returns gate and up, for `backward`.
        """
        gate_tF, up_tF = self.gate(h_tD), self.up(h_tD)
        a_tF = torch.empty_like(gate_tF) if keep else gate_tF
        silu_mul(gate_tF, up_tF, a_tF)
        inside = (tag(gate_tF, Holder.KEPT), tag(up_tF, Holder.KEPT)) if keep else None
        del up_tF
        self.down.add_to(y_tD, a_tF)
        return inside

    def backward(self, h_tD: Tensor, dy_tD: Tensor, grads: GradSum, kept: deque[Inside]) -> Tensor:
        """Returns dh; adds the weights' gradients to `grads`. `kept`: what `add_to` returned, tile by tile; used up."""
        dgate_tF, dup_tF = kept.popleft() if kept else (self.gate(h_tD), self.up(h_tD))
        dz_tr = self.down.reduced_grad(dy_tD)
        a_tF = self.down.input_grad(dy_tD, dz_tr)
        silu_mul_backward(dgate_tF, dup_tF, a_tF)  # in place: until here gate, up and da
        self.down.add_grads(dy_tD, a_tF, dz_tr, grads)
        del a_tF
        gate_tr, up_tr = self.gate.reduced_grad(dgate_tF), self.up.reduced_grad(dup_tF)
        self.gate.add_grads(dgate_tF, h_tD, gate_tr, grads)
        self.up.add_grads(dup_tF, h_tD, up_tr, grads)
        return self.up.input_grad(dup_tF, up_tr, into_tD=self.gate.input_grad(dgate_tF, gate_tr))


def gated_mlp(module: nn.Module) -> GatedMlp | None:
    """The parts of an MLP that is known to compute exactly this, with unhooked linear maps; else None."""
    if type(module).__name__ not in GATED or not _is_silu(module.act_fn):
        return None
    linears = [module.gate_proj, module.up_proj, module.down_proj]
    inside = [module, *(part for linear in linears for part in linear.modules())]  # type: ignore[union-attr]
    plain = all(map(is_linear, linears)) and not any("forward" in vars(part) for part in inside)
    hooked = any(getattr(part, hooks) for part in inside for hooks in HOOK_DICTS)
    return GatedMlp(*map(as_linear, linears)) if plain and not hooked else None  # type: ignore[arg-type]


GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_silu(act: object) -> bool:
    # transformers has its own class for it.
    return isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation"
