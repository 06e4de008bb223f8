"""The text of a plan, laid out from its facts (plan/summary.py) and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ithaka.config import format_value
from ithaka.config.units import (
    format_duration,
    format_rate,
    format_tokens,
    unbroken,
    wrap,
    wrap_columns,
    wrap_list,
)
from ithaka.plan.hardware import GIB
from ithaka.plan.summary import Facts

# Tier -> its name, and what its capacity is counted for.
TIERS = {
    "gpu": ("GPU memory", "GPU"),
    "host": ("host memory", "node"),
    "disk": ("disk space", "node"),
}
TITLES = "    cp  heads/stage  inputs  attention kept  optimizer  tok/s/GPU  GPU GiB  host GiB"
ROW = (
    "{mark} {cp:>4}  {heads_per_stage:>11}  {inputs:>6}  {attention:>14}  {optimizer:>9}  "
    "{speed:>9}  {gpu_gib:>7.1f}  {host_gib:>8.0f}"
)


def render_plan(facts: Facts) -> str:
    """Whether it fits, notes, settings and reasons, memory, time, other plans, assumptions."""
    lacks = () if facts["fits"] else (*_render_shortages(facts), *_render_fixes(facts))
    texts = [facts["verdict"], *facts["warnings"], *lacks, *facts["notes"]]
    # A value such as {type: yarn, factor: 8} stays on one line.
    texts = [re.sub(r"{.*}", lambda value: unbroken(value[0]), text) for text in texts]
    settings = {name: format_value(value) for name, value in facts["settings"].items()}
    width = max(6, *map(len, settings.values()))
    reasons = {
        f"  {name:<24}  {settings[name]:>{width}}   ": reason
        for name, reason in facts["reasons"].items()
    }
    assumptions = {f"  {name:<11}  ": text for name, text in facts["assumed"].items()}
    lines = [
        *_render_longest(facts),
        *(line for text in texts for line in wrap(text, rest="  ")),
        "",
        *wrap_columns(reasons),
        "",
        *_render_costs(facts),
        *_render_alternatives(facts),
        "",
        "Assumptions",
        *wrap_columns(assumptions),
    ]
    return "\n".join(lines)


def _render_longest(facts: Facts) -> Iterator[str]:
    if context := facts.get("max_context"):
        subject = f"Longest context of {facts['model']} on {facts['gpus']}"
        tokens = f"{format_tokens(context)} tokens ({context})"
        yield f"{subject}: {tokens}, limited by {facts['limited_by']}."
        if (longer := facts["max_context_float8"]) > context:
            yield f"With memory.stored_dtype=float8: {format_tokens(longer)} ({longer})."
        yield ""


def _render_shortages(facts: Facts) -> Iterator[str]:
    yield "The closest plan, shown below, lacks:"
    for tier, (name, owner) in TIERS.items():
        need = sum(facts[f"{tier}_holders"].values()) / GIB
        have = facts[f"{tier}_bytes"] / GIB
        if need > have:
            sizes = f"each {owner} needs {need:.1f} GiB and has {have:.1f} GiB"
            yield f"  {need - have:.1f} GiB of {name}: {sizes}"


def _render_fixes(facts: Facts) -> Iterator[str]:
    if not facts["ways_out"]:
        fix = "use GPUs with more memory."
        yield f"Neither a shorter context nor more of these GPUs is enough; {fix}"
        return
    yield "Any one of these makes it fit, with other settings than those below:"
    sizes = {"--host-memory": facts["host_bytes"], "--disk": facts["disk_bytes"]}
    for option, value in facts["ways_out"].items():
        size = f"{sizes[option] / 1e9:.0f}GB" if sizes.get(option) else "none"
        yield f"  {option} {value}" + f" per node (now {size})" * (option in sizes)


def _render_costs(facts: Facts) -> Iterator[str]:
    """Memory by tier and category, and time."""
    titles = {
        "gpu": f"GPU memory, per GPU (peak in {facts['peak_phase']})",
        "host": "Host memory, per node",
        "disk": "Disk, per node",
    }
    for tier, title in titles.items():
        sizes = facts[f"{tier}_holders"]
        if need := sum(sizes.values()):
            yield f"{title}: {need / GIB:.1f} of {facts[f'{tier}_bytes'] / GIB:.1f} GiB"
            held = {name: size / GIB for name, size in sizes.items() if size >= GIB / 20}
            yield from wrap_list(f"{name} {size:.1f}" for name, size in held.items())
    step_s = facts["step_s"]
    yield f"Time per step: {format_duration(step_s)}"
    parts = facts["seconds"].items()
    yield from wrap_list(f"{name} {format_duration(s)} ({s / step_s:.1%})" for name, s in parts)


def _render_alternatives(facts: Facts) -> Iterator[str]:
    """A table of the plan and the best of other kinds; an arrow marks the plan."""
    rows = facts.get("alternatives", ())
    if len(rows) < 2:
        return
    yield ""
    yield from wrap(f"This plan (>) and others, fastest first. It is {facts['choice']}.")
    yield TITLES
    for row in rows:
        speed = format_rate(row["tokens_per_s_per_gpu"])
        yield ROW.format(**row, mark=">" if row["is_chosen"] else " ", speed=speed)
