"""Measure a Llama-3-8B layer as rank 0 of 8, at three lengths, and compare it with recorded
figures.

    python benchmarks/gate.py --baseline tests/gate_h200.json

Exits with 1 if the seconds or the peak of a length exceed the recorded ones by more than 2 %.
Writes the file if there is none.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ithaka.checks import rehearse
from ithaka.cli.options import AsJson, print_rows
from ithaka.config import check_writable
from ithaka.exits import ExitCode
from ithaka.facts.model_files import read_json
from ithaka.layout import Layout
from ithaka.log.console import status
from ithaka.plan.hardware import GIB
from ithaka.plan.models import find_config

# context -> heads per stage, overlap, tokens per tile
CASES = {2**17: (8, True, 16384), 2**19: (16, True, 16384), 2**20: (8, False, 8192)}
TOLERANCE = 0.02


def measure(recorded: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Measure a layer's seconds and peak by context, and their ratios to the recorded ones."""
    rows = []
    for context, (heads, overlap, tile) in CASES.items():
        layout = Layout(
            cp=8,
            heads_per_stage=heads,
            overlap=overlap,
            tile_tokens=tile,
            dtype=rehearse.rehearsal_dtype(),
            input_tier="host",
            keep_attention=2,
            attention_tier="host",
        )
        with status(f"a layer at {context} tokens"):
            measured = rehearse.rehearse(
                find_config("llama3-8b"), layout, 8, context, layers=range(2)
            )
        gc.collect()
        torch.cuda.empty_cache()
        figures = {
            "seconds": measured.forward_s + measured.backward_s,
            "peak GiB": measured.peak_bytes / GIB,
        }
        before = recorded.get(str(context), {})
        ratios = {
            f"{name}, x recorded": value / before[name]
            for name, value in figures.items()
            if name in before
        }
        rows.append({"context": context, **figures, **ratios})
    return rows


def main(
    baseline: Annotated[
        Path, typer.Option(metavar="FILE", help="Recorded figures; written if absent.")
    ],
    as_json: AsJson = False,
) -> None:
    """Compare the seconds and peak memory of a layer with recorded figures; exit with 1 beyond 2
    %."""
    recorded = (
        read_json(baseline, "--baseline ", "give a file that this script wrote")
        if baseline.exists()
        else {}
    )
    check_writable("--baseline", baseline)
    rows = measure(recorded)
    print_rows(rows, as_json)
    if not recorded:
        figures = {str(row.pop("context")): row for row in rows}
        baseline.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if any(
        value > 1 + TOLERANCE
        for row in rows
        for name, value in row.items()
        if name.endswith("recorded")
    ):
        raise typer.Exit(ExitCode.FAILED)


if __name__ == "__main__":
    typer.run(main)
