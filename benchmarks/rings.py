"""Measure one layer of Llama-3-8B as rank 0 of a ring of nodes, and of one Ulysses group of the
same size.

    python benchmarks/rings.py                                # 2 x 8 and 4 x 8 ranks at 256K and 1M
    python benchmarks/rings.py --contexts 4M --steps 1 --sides ring,Ulysses         # three minutes

Exchanges are local copies, and planned seconds exclude exchanges. Sides: `ring`; `unaligned`, a
ring whose score blocks are cut at the blocks of keys and again at the rounds; `Ulysses`, without a
ring. A GPU's speed drifts, so each ring is measured right before its group. Prints a JSON line per
measurement.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
import typer

from ithaka.attention import score_blocks
from ithaka.checks import rehearse
from ithaka.config import parse_count
from ithaka.layout import Layout
from ithaka.plan.hardware import GIB, find_hardware
from ithaka.plan.models import find_config
from ithaka.plan.search import Plan
from ithaka.plan.seconds import layer_seconds
from ithaka.plan.shape import StepShape
from ithaka.trace.shapes import shape_from_config

SIDES = ("ring", "unaligned", "Ulysses")


@contextmanager
def unaligned_blocks(on: bool) -> Iterator[None]:
    aligned = score_blocks._recut_rectangles
    if on:
        score_blocks._recut_rectangles = lambda part_blocks, _: iter(part_blocks)
    try:
        yield
    finally:
        score_blocks._recut_rectangles = aligned


def ring_layout(nodes: int, ring: int, stages: int) -> Layout:
    """Attention in `stages` stages of a rank's heads; inputs and attention outputs are kept on the
    device."""
    ulysses = 8 * nodes // ring
    heads = None if stages == 1 else max(ulysses, 32 // stages)
    return Layout(
        cp=8 * nodes,
        ring=ring,
        heads_per_stage=heads,
        overlap=True,
        tile_tokens=8192,
        dtype=rehearse.rehearsal_dtype(),
        keep_attention=1,
    )


def measure(config: dict[str, Any], layout: Layout, context: int, steps: int) -> dict[str, Any]:
    hardware = find_hardware(f"{layout.cp // 8}x8xH200")
    work = StepShape(context)
    shape = shape_from_config(config, "llama3-8b").keep_layers([0])
    plan = Plan(shape, layout, hardware, work)
    (policy,) = layout.layer_policies(1)
    seconds = layer_seconds(shape, layout, hardware, work, shape.mixers[0], policy)
    measured = rehearse.rehearse(config, layout, layout.cp, context, steps=steps, layers=[0])
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    found = {"forward_s": measured.forward_s, "backward_s": measured.backward_s}
    planned = dict(zip(found, (each.total - each.exchange for each in seconds), strict=True))
    row: dict[str, Any] = {}
    for name, value in found.items():
        row |= {
            name: value,
            f"planned {name}": planned[name],
            f"{name} x planned": value / planned[name],
        }
    peak = measured.peak_bytes
    ledger = plan.ledger
    return row | {
        "peak_GiB": peak / GIB,
        "planned peak_GiB": (ledger.gpu_peak - ledger.gpu["reserve"]) / GIB,
    }


def main(
    nodes: Annotated[str, typer.Option(help="Nodes of 8 GPUs.")] = "2,4",
    contexts: Annotated[str, typer.Option(help="Context lengths.")] = "256K,1M",
    stages: Annotated[
        str, typer.Option(help="Stages of a rank's heads; 1: all heads at once.")
    ] = "1",
    sides: Annotated[str, typer.Option(help="Sides to measure.")] = ",".join(SIDES),
    steps: Annotated[int, typer.Option(min=1, help="Steps; the last one is measured.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of measurements.")] = 1,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="A small model, to try the script without a GPU.")
    ] = False,
) -> None:
    """Compare rings with Ulysses groups of the same ranks and tokens, measured and planned."""
    config = find_config("llama3-8b")
    if tiny:
        config |= {"hidden_size": 256, "intermediate_size": 256, "head_dim": 8, "vocab_size": 512}
    if unknown := set(sides.split(",")) - set(SIDES):
        raise typer.BadParameter(
            f"{', '.join(unknown)}; use {', '.join(SIDES)}", param_hint="--sides"
        )
    cases = [
        (parse_count(context), int(num_nodes), int(num_stages))
        for context in contexts.split(",")
        for num_nodes in nodes.split(",")
        for num_stages in stages.split(",")
    ]
    for context, num_nodes, num_stages in cases * repeats:
        backward_s = {}
        for side in sides.split(","):
            ring = 1 if side == "Ulysses" else num_nodes
            with unaligned_blocks(side == "unaligned"):
                row = measure(config, ring_layout(num_nodes, ring, num_stages), context, steps)
            backward_s[side] = row["backward_s"]
            about = {
                "context": context,
                "ranks": f"{num_nodes} x 8",
                "stages": num_stages,
                "side": side,
            }
            ratios = {
                f"backward x {other}": row["backward_s"] / s for other, s in backward_s.items()
            }
            print(json.dumps(about | row | ratios), flush=True)


if __name__ == "__main__":
    typer.run(main)
