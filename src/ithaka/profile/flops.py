"""FLOPs that one rank does in each part of a layer, recomputation included: what a phase's rate is made of.

S tokens of the packed sequence, s = S / cp on this rank, D hidden, H and G query and kv heads, K head dim.
"""

from ithaka.plan.hardware import Gpu
from ithaka.plan.layout import Work
from ithaka.plan.shape import ModelShape

Part = tuple[str, ...]


def layer_flops(
    shape: ModelShape, work: Work, cp: int, window: int | None, kept: bool, checkpoint: bool
) -> dict[Part, float]:
    """By (direction, part). `kept`: attention is not computed again; `checkpoint`: the rest is."""
    s, D, K = work.local_tokens(cp), shape.hidden, shape.head_dim
    attend = 4 * K * shape.heads / cp * work.pairs(window)
    project = 2 * s * D * (shape.heads + 2 * shape.kv_heads) * K
    output = 2 * s * D * shape.heads * K
    mlp = 2 * s * 3 * D * shape.mlp
    again = 1 if checkpoint else 0
    mlp_again = again * 2 / 3  # without a gated MLP's last product
    attend_again = again * (not kept)
    return {
        ("forward", "attention"): attend,
        ("forward", "projections"): project + output,
        ("forward", "mlp"): mlp,
        ("backward", "attention"): (2.5 + attend_again) * attend,
        ("backward", "projections"): (2 + again + attend_again) * project + output,
        ("backward", "mlp"): (2 + mlp_again) * mlp + (1 + again) * output,
    }


def loss_flops(shape: ModelShape, work: Work, cp: int) -> dict[Part, float]:
    """The logits' tile is computed again in backward."""
    logits = 2.0 * work.local_tokens(cp) * shape.hidden * shape.vocab
    return {("loss forward",): logits, ("loss backward",): 3 * logits}


def device_rate(gpu: Gpu, part: Part) -> float:
    """FLOP/s that the hardware table has for this kind of work."""
    if part[-1] != "attention":
        return gpu.matmul_flops
    return gpu.attention_forward_flops if part[0] == "forward" else gpu.attention_backward_flops
