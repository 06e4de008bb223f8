"""Train adapters on an nf4 base, on the same weights dequantized, and on the bf16 base, and compare
losses.

    python benchmarks/fourbit_losses.py --model models/SmolLM2-135M-Instruct --text README.md
    python benchmarks/fourbit_losses.py --tokens 64 --steps 3     # a small random model and tokens

All in bfloat16, with the same new adapters, tokens and AdamW.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from steps import SMALL, read_tokens, train_losses
from transformers import AutoModelForCausalLM

from ithaka.cli.options import AsJson, print_rows
from ithaka.comm.mesh import end_process_group, make_mesh, start_process_group
from ithaka.config import AdapterConfig
from ithaka.layout import Layout
from ithaka.model.build import build_model
from ithaka.ops.fourbit import packed_weights
from ithaka.weights.formats import PACKED_AS, round_weights


def write_dequantized(folder: Path, adapter: AdapterConfig, out: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    round_weights(model, adapter)
    for module in model.modules():
        module.__dict__.pop(PACKED_AS, None)
    model.save_pretrained(out)


def train(folder: Path, base: Any, ids: torch.Tensor, lr: float, steps: int) -> list[float]:
    """Train, and return the loss before each step and after the last."""
    adapter = AdapterConfig(16, base=base)
    layout = Layout(dtype="bfloat16", tile_tokens=512)
    model = build_model(folder, make_mesh(1), layout, adapter=adapter).train()
    assert bool(packed_weights(model)) == (base == "nf4")
    losses = train_losses(model, ids, lr, steps)
    del model
    gc.collect()
    return losses


def main(
    model: Annotated[Path | None, typer.Option(help="A Hugging Face directory.")] = None,
    text: Annotated[Path, typer.Option(help="A text to train on.")] = Path("README.md"),
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to train on.")] = 512,
    steps: Annotated[int, typer.Option(min=1)] = 10,
    lr: Annotated[float, typer.Option()] = 5e-4,
    as_json: AsJson = False,
) -> None:
    """Compare losses of adapters on an nf4 base, on its dequantized weights, and on the bf16
    base."""
    start_process_group()
    ids = read_tokens(model, text, tokens)
    with tempfile.TemporaryDirectory() as name:
        folder = model or Path(name) / "small"
        dequantized = Path(name) / "dequantized"
        if model is None:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(SMALL, dtype=torch.bfloat16).save_pretrained(folder)
        write_dequantized(folder, AdapterConfig(16, base="nf4"), dequantized)
        runs = {
            "nf4": train(folder, "nf4", ids, lr, steps),
            "dequantized": train(dequantized, "bf16", ids, lr, steps),
            "bf16": train(folder, "bf16", ids, lr, steps),
        }
    rows = []
    for step, losses in enumerate(zip(*runs.values(), strict=True)):
        nf4, plain, bf16 = losses
        rows.append(
            {
                "step": step,
                **dict(zip(runs, losses, strict=True)),
                "nf4 - dequantized": nf4 - plain,
                "nf4 - bf16": nf4 - bf16,
            }
        )
    print_rows(rows, as_json)
    end_process_group()


if __name__ == "__main__":
    typer.run(main)
