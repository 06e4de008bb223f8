"""Measure peak memory and seconds per layer, enabling one technique after the other.

    python benchmarks/ladder.py llama3-8b --context 128K --ranks 8 --tile 8K

peak: of the layers, above the same layers at few tokens. X: one activation
[tokens per rank, hidden].
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer

from ithaka.checks import rehearse
from ithaka.cli.options import AsJson, parse_tokens, print_rows
from ithaka.cli.plan import Context, Model
from ithaka.config import ConfigError
from ithaka.layout import Layout
from ithaka.log.console import status
from ithaka.plan.models import find_config
from ithaka.trace.shapes import find_shape


def measure(
    config: dict[str, Any], ranks: int, context: int, tile_tokens: int, layers: int
) -> list[dict[str, Any]]:
    """Return a row per technique, each added to the ones before it."""
    rungs: dict[str, dict[str, Any]] = {
        "none": {},
        "+ checkpointing": {"keep_everything": 0, "keep_projections": 0, "keep_attention": 0},
        "+ offload": {"input_tier": "host"},
        "+ tiles": {"tile_tokens": tile_tokens},
        "+ stages": {"heads_per_stage": ranks},
        "+ kept attention": {"keep_attention": layers, "attention_tier": "host"},
    }
    layout = Layout(
        cp=ranks, keep_everything=layers, overlap=False, dtype=rehearse.rehearsal_dtype()
    )
    rows = []
    for name, change in rungs.items():
        layout = replace(layout, **change)
        with status(f"{name}: rehearsing at {context} tokens"):
            measured = rehearse.rehearse(config, layout, ranks, context, layers=range(layers))
        gc.collect()
        torch.cuda.empty_cache()
        sizes = {
            "peak MiB": measured.layer_bytes / 2**20,
            "peak X": measured.layer_bytes / measured.x_bytes,
        }
        seconds = {"forward s": measured.forward_s, "backward s": measured.backward_s}
        rows.append(
            {"technique": name, **sizes, "host MiB": measured.host_bytes / 2**20, **seconds}
        )
    return rows


def main(
    model: Model,
    context: Context = "4K",
    ranks: Annotated[int, typer.Option(min=1, help="Run rank 0 of this many.")] = 2,
    tile: Annotated[str, typer.Option(help="Tokens per tile.")] = "256",
    layers: Annotated[int, typer.Option(min=1, help="Layers to run.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Measure peak memory and seconds per layer, enabling one technique after the other."""
    num_heads = find_shape(model).heads
    if ranks > num_heads:
        raise ConfigError(
            f"--ranks={ranks} exceeds the {num_heads} query heads; use at most {num_heads}"
        )
    sizes = {
        "context": parse_tokens(context, "--context"),
        "tile_tokens": parse_tokens(tile, "--tile"),
    }
    print_rows(measure(find_config(model), ranks, **sizes, layers=layers), as_json)


if __name__ == "__main__":
    typer.run(main)
