"""The gated MLP of Llama-like models, down(act(gate(h)) * up(h)), with its backward written out.

Local autograd would run `down` once more, keep six tensors as wide as the MLP and round every tile's weight gradients.
This keeps three, and on a GPU adds the weight gradients straight to their fp32 sums.

Shapes: t tokens of a tile, D hidden, F width of the MLP.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ithaka.attention.fused import silu_mul, silu_mul_backward
from ithaka.layer.tiles import GradSum, add_matmul, sum_dtype


@dataclass(frozen=True)
class GatedMlp:
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    act: nn.Module

    def add_to(self, y_tD: Tensor, h_tD: Tensor) -> None:
        """y += down(act(gate(h)) * up(h)), in place; y is in the dtype of sums. Not differentiable."""
        a_tF = linear(h_tD, self.gate.weight, self.gate.bias)
        b_tF = linear(h_tD, self.up.weight, self.up.bias)
        if _is_silu(self.act):
            silu_mul(a_tF, b_tF)
        else:
            a_tF = self.act(a_tF).mul_(b_tF)
        del b_tF
        add_matmul(y_tD, a_tF, self.down.weight.t())
        if self.down.bias is not None:
            y_tD += self.down.bias

    def backward(self, h_tD: Tensor, dy_tD: Tensor, grads: GradSum) -> Tensor:
        """Returns dh; adds the weights' gradients to `grads`."""
        gate_tF = linear(h_tD, self.gate.weight, self.gate.bias)
        up_tF = linear(h_tD, self.up.weight, self.up.bias)
        da_tF = dy_tD @ self.down.weight
        if _is_silu(self.act):
            silu_mul_backward(gate_tF, up_tF, da_tF)
            dgate_tF, dup_tF, a_tF = gate_tF, up_tF, da_tF
        else:
            dgate_tF, dup_tF, a_tF = _product_backward(self.act, gate_tF, up_tF, da_tF)
        _add_grads(self.down, dy_tD, a_tF, grads)
        del da_tF, a_tF
        _add_grads(self.gate, dgate_tF, h_tD, grads)
        _add_grads(self.up, dup_tF, h_tD, grads)
        return (dgate_tF @ self.gate.weight).addmm_(dup_tF, self.up.weight)


def gated_mlp(module: nn.Module) -> GatedMlp | None:
    """The parts of an MLP that is known to compute exactly this, with plain, unhooked nn.Linears; else None."""
    if type(module).__name__ not in GATED or "forward" in vars(module):
        return None
    parts = GatedMlp(module.gate_proj, module.up_proj, module.down_proj, module.act_fn)  # type: ignore[arg-type]
    linears = (parts.gate, parts.up, parts.down)
    plain = all(type(part) is nn.Linear and "forward" not in vars(part) for part in linears)
    hooked = any(getattr(part, hooks) for part in (module, *linears) for hooks in HOOKS)
    return parts if plain and not hooked else None


GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_silu(act: nn.Module) -> bool:
    # transformers has its own class for it.
    return isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation"


def _product_backward(act: nn.Module, gate: Tensor, up: Tensor, da: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dgate, dup and a of a = act(gate) * up, by local autograd."""
    with torch.enable_grad():
        gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
        a = act(gate) * up
    dgate, dup = torch.autograd.grad(a, (gate, up), da)
    return dgate, dup, a.detach()


def _add_grads(part: nn.Linear, dout_tN: Tensor, in_tM: Tensor, grads: GradSum) -> None:
    if part.weight.requires_grad:
        grads.add_product(part.weight, dout_tN, in_tM)
    if part.bias is not None and part.bias.requires_grad:
        grads.add(part.bias, dout_tN.sum(0, dtype=sum_dtype(dout_tN.dtype)))
