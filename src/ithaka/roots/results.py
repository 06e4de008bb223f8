"""Compare the results of the two runs of a probe: the output and all gradients, in fp32."""

from torch import Tensor
from transformers import PreTrainedModel

from ithaka.config import ConfigError
from ithaka.roots.recorder import largest, refusal

TOLERANCE = 1e-3  # largest difference between two runs in fp32, relative to the largest value
# Gradients below this share of the largest one are compared with that share. Some are zero but for
# rounding: those of a bias of keys without RoPE, and of queries and keys in a window of one token.
SMALL_GRADIENT = 1e-2
Results = dict[str, Tensor | None]  # the output, and gradients by name


class Mismatch(ConfigError):
    """The two runs of a probe differ."""


def compare_results(model: PreTrainedModel, ours: Results, theirs: Results, where: str) -> None:
    """Raise Mismatch unless all results are equal."""
    gradients = [
        grad for name, grad in theirs.items() if name.startswith("gradient") and grad is not None
    ]
    smallest = SMALL_GRADIENT * max((float(largest(grad)) for grad in gradients), default=0.0)
    for name, expected in theirs.items():
        got = ours.get(name)
        if expected is None and got is None:
            continue
        if got is None or expected is None or got.shape != expected.shape:
            raise refusal(model, f"gives no {name} {where} in one of the two runs")
        least = smallest if name.startswith("gradient") else 0.0
        scale = max(float(largest(expected)), least, 1e-20)
        error = float(largest(got - expected)) / scale
        if not error < TOLERANCE:
            problem = f"gives another {name} {where} when its tokens are split (by {error:.1e})"
            raise Mismatch(*refusal(model, problem).args)
