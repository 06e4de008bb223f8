"""Plans beside each other: what each technique buys, and what a setting trades."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ithaka.layout import SETTINGS, Layout, make_layout
from ithaka.plan.hardware import Hardware
from ithaka.plan.search import Plan, choose, evaluate, longest_context
from ithaka.plan.shape import ModelShape, Work

LADDER_TILE = 8192


@dataclass(frozen=True)
class Rung:
    """One technique more than the rung before. `plan`: at the context asked for, whether it fits or not."""

    name: str
    plan: Plan
    max_context: int


def ladder(shape: ModelShape, hardware: Hardware, work: Work) -> list[Rung]:
    """ithaka's own layer with one technique after another switched on; the last is the search's choice."""
    cp = max(n for n in range(1, min(hardware.num_gpus, shape.heads) + 1) if hardware.num_gpus % n == 0)
    plain = make_layout(shape.num_layers, checkpoint=False, overlap=False)
    shared = replace(plain, cp=cp)
    checked = shared.but(checkpoint=True)
    offloaded = checked.but(input_tier="host")
    tiled = replace(offloaded, tile_tokens=LADDER_TILE)
    untied = replace(tiled, heads_per_stage=cp)
    alone = replace(hardware, gpus_per_node=1, num_nodes=1)
    rungs = [
        _rung("one GPU, nothing sharded", shape, plain, alone, work),
        _rung("FSDP", shape, plain, hardware, work),
        _rung("+ Ulysses", shape, shared, hardware, work),
        _rung("+ checkpointing", shape, checked, hardware, work),
        _rung("+ offload to the host", shape, offloaded, hardware, work),
        _rung("+ tiles", shape, tiled, hardware, work),
        _rung("+ Untied Ulysses", shape, untied, hardware, work),
    ]
    best = choose(shape, hardware, work)
    return [*rungs, Rung("+ ithaka's schedule", best, longest_context(shape, hardware, batch=work.batch))]


def _rung(name: str, shape: ModelShape, layout: Layout, hardware: Hardware, work: Work) -> Rung:
    fixed = {entry: getattr(layout, entry) for entry in SETTINGS.values()}
    context = longest_context(shape, hardware, fixed, work.batch)
    return Rung(name, evaluate(shape, layout, hardware, work), context)


@dataclass(frozen=True)
class Point:
    heads_per_stage: int
    plan: Plan
    max_context: int


def sweep_heads(
    shape: ModelShape, hardware: Hardware, work: Work, fixed: Mapping[str, Any] | None = None
) -> list[Point]:
    """heads_per_stage from one per rank to all, with all else as the best plan has it."""
    best = choose(shape, hardware, work, fixed).layout
    points = []
    slots = 1
    while True:
        slots = min(slots, -(-shape.heads // best.cp))
        width = slots * best.cp
        plan = evaluate(shape, replace(best, heads_per_stage=width), hardware, work)
        limit = {**dict(fixed or {}), "cp": best.cp, "heads_per_stage": width}
        points.append(Point(width, plan, longest_context(shape, hardware, limit, work.batch)))
        if width >= shape.heads:
            return points
        slots *= 2
