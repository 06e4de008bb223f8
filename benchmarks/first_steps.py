"""Measure how much the first steps of a new adapter lower the loss: float32, ithaka in bfloat16,
PEFT in bfloat16.

    python benchmarks/first_steps.py --model models/SmolLM2-135M --text README.md
    python benchmarks/first_steps.py                     # a small random model, on random tokens

B starts at zero, so the first updates are small compared with the output that they are added to,
and rounding that sum to bfloat16 loses part of them.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peft import LoraConfig, get_peft_model
from steps import SMALL, read_tokens, train_losses
from transformers import AutoModelForCausalLM

from ithaka.cli.options import AsJson, print_rows
from ithaka.comm.mesh import default_device, end_process_group, start_process_group
from ithaka.layout import Layout
from ithaka.model.build import parallelize_model

CASES = ((1e-5, 1), (1e-6, 30))  # learning rate, steps
SIDES = ("float32", "ithaka", "PEFT")


def new_model(folder: Path | None, side: str) -> Any:
    """Build a model with the same weights and float32 adapters on all sides."""
    torch.manual_seed(0)
    if folder is None:
        model = AutoModelForCausalLM.from_config(SMALL, dtype=torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = model.float() if side == "float32" else model
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    model = model.to(default_device()).train()
    return parallelize_model(model, layout=Layout(dtype="bfloat16")) if side == "ithaka" else model


def measure_decrease(
    folder: Path | None, side: str, ids: torch.Tensor, lr: float, steps: int
) -> float:
    """Return the decrease in loss from before the first step to after the last, on the training
    tokens."""
    model = new_model(folder, side)
    losses = train_losses(model, ids, lr, steps)
    return losses[0] - losses[-1]


def main(
    model: Annotated[Path | None, typer.Option(help="A Hugging Face directory.")] = None,
    text: Annotated[Path, typer.Option(help="A text to train on.")] = Path("README.md"),
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to train on.")] = 1024,
    as_json: AsJson = False,
) -> None:
    """Measure the decrease in loss over the first steps of a new adapter."""
    warnings.simplefilter("ignore")
    start_process_group()
    ids = read_tokens(model, text, tokens)
    rows = []
    for lr, steps in CASES:
        decreases = {side: measure_decrease(model, side, ids, lr, steps) for side in SIDES}
        rows.append({"lr": f"{lr:.0e}", "steps": steps, **decreases})
    print_rows(rows, as_json)
    end_process_group()


if __name__ == "__main__":
    typer.run(main)
