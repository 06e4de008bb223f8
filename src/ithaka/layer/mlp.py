"""The gated MLP of Llama-like models, down(silu(gate(h)) * up(h)), with its backward written out.

Local autograd would run `down` once more, keep six tensors as wide as the MLP and round every tile's weight gradients.
This keeps three, and on a GPU adds the weight gradients straight to their fp32 sums.

Shapes: t tokens of a tile, D hidden, F width of the MLP.
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import linear

from ithaka.attention.fused import silu_mul, silu_mul_backward
from ithaka.layer.tiles import GradSum, add_matmul


@dataclass(frozen=True)
class GatedMlp:
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear

    def add_to(self, y_tD: Tensor, h_tD: Tensor) -> None:
        """y += down(silu(gate(h)) * up(h)), in place; y is in the dtype of sums. Not differentiable."""
        a_tF = linear(h_tD, self.gate.weight, self.gate.bias)
        b_tF = linear(h_tD, self.up.weight, self.up.bias)
        silu_mul(a_tF, b_tF)
        del b_tF
        add_matmul(y_tD, a_tF, self.down.weight.t())
        if self.down.bias is not None:
            y_tD += self.down.bias

    def backward(self, h_tD: Tensor, dy_tD: Tensor, grads: GradSum) -> Tensor:
        """Returns dh; adds the weights' gradients to `grads`."""
        dgate_tF = linear(h_tD, self.gate.weight, self.gate.bias)
        dup_tF = linear(h_tD, self.up.weight, self.up.bias)
        a_tF = dy_tD @ self.down.weight
        silu_mul_backward(dgate_tF, dup_tF, a_tF)  # in place: until here gate, up and da
        grads.add_linear(self.down, dy_tD, a_tF)
        del a_tF
        grads.add_linear(self.gate, dgate_tF, h_tD)
        grads.add_linear(self.up, dup_tF, h_tD)
        return (dgate_tF @ self.gate.weight).addmm_(dup_tF, self.up.weight)


def gated_mlp(module: nn.Module) -> GatedMlp | None:
    """The parts of an MLP that is known to compute exactly this, with plain, unhooked nn.Linears; else None."""
    if type(module).__name__ not in GATED or "forward" in vars(module) or not _is_silu(module.act_fn):
        return None
    parts = GatedMlp(module.gate_proj, module.up_proj, module.down_proj)  # type: ignore[arg-type]
    linears = (parts.gate, parts.up, parts.down)
    plain = all(type(part) is nn.Linear and "forward" not in vars(part) for part in linears)
    hooked = any(getattr(part, hooks) for part in (module, *linears) for hooks in HOOKS)
    return parts if plain and not hooked else None


GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_silu(act: object) -> bool:
    # transformers has its own class for it.
    return isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation"
