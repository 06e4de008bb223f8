"""A callback and a custom loss. From this folder, with any configuration:

ithaka train first.yaml --set train.callbacks=[hooks:LossFile] --set loss.type=hooks:weighted_loss
"""

import json
from typing import Any


class LossFile:
    """Writes the loss of every step and the path of every checkpoint to a file. Runs on rank 0."""

    def __init__(self, run_dir: Any, config: Any) -> None:
        self.file = run_dir / "losses.jsonl"

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        self._write({"step": step, "loss": metrics.get("loss")})

    def on_save(self, step: int, checkpoint: Any) -> None:
        self._write({"step": step, "checkpoint": str(checkpoint)})

    def _write(self, line: dict[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def weighted_loss(tokens: Any, labels: Any) -> Any:
    """Cross-entropy times the label's probability, a constant in backward: dynamic fine-tuning
    (arXiv 2508.05629).

    `tokens` has logprobs, entropies, correct and mean_logits of this rank's labels; `labels` is
    -100 where there is no label, and losses are ignored there. The sum over all ranks is divided by
    the number of labels."""
    return -tokens.logprobs * tokens.logprobs.detach().exp()
