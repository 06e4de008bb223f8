"""Compare traced peaks with those of the planner's formulas: `python tests/traced.py [MODEL...]`
prints a table.

Needs no GPU. One layer of each kind is traced at 64Ki tokens per rank; peaks are those of all
layers, in GiB and in X. `python tests/traced.py rehearsed` compares traced peaks with those
measured on an H200 (rehearsed.csv).
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import rehearsed
from ithaka.config import parse_count
from ithaka.layout import Layout
from ithaka.model.build import keep_layers
from ithaka.plan.bytes import gpu_phases
from ithaka.plan.hardware import GIB, parse_gpus
from ithaka.plan.models import find_config
from ithaka.plan.search import Plan
from ithaka.plan.shape import StepShape
from ithaka.plan.trace import TraceRequest
from ithaka.trace.shapes import find_shape
from ithaka.trace.trace_plan import trace_model, trace_plan

MODELS = ("llama3-8b", "qwen3-8b", "gemma-3-4b", "gpt-oss-20b", "qwen3-30b-a3b", "qwen3.5-9b")
LOCAL_TOKENS = 2**16
# what all layers keep, fraction of the heads per stage, tile, overlap
LAYOUTS: tuple[tuple[dict[str, Any], int, int, bool], ...] = (
    ({"keep_attention": 99}, 1, 8192, True),
    ({"input_tier": "host", "keep_attention": 99, "attention_tier": "host"}, 4, 8192, False),
    ({"input_tier": "host"}, 4, 16384, True),
    ({"keep_everything": 99}, 1, 16384, True),
)


def plans(model: str) -> Iterator[tuple[str, Plan]]:
    shape = find_shape(model)
    for cp in (1, 8):
        for keeps, stages, tile, overlap in LAYOUTS:
            heads = max(shape.heads // stages, cp)
            layout = Layout(cp, heads, tile, overlap=overlap, **keeps)
            policy = layout.layer_policies(shape.num_layers)[0]
            kept = f"{policy.input}/{policy.attention}{'+all' if policy.mlp else ''}"
            name = f"cp {cp}, {kept}, {heads} heads, tile {tile}{'' if overlap else ', no overlap'}"
            yield name, Plan(shape, layout, parse_gpus(f"{cp}xH200"), StepShape(cp * LOCAL_TOKENS))


def compare(model: str, plan: Plan) -> tuple[dict[str, tuple[float, float]], float]:
    """(traced, planned) bytes of the highest forward, loss and backward; and X."""
    trace = trace_plan(plan, find_config(model))
    peaks = {"forward": [0.0, 0.0], "loss": [0.0, 0.0], "backward": [0.0, 0.0]}
    for segment in trace.segments:
        kind = "loss" if segment.name.startswith("loss") else segment.name.rpartition(" ")[2]
        if kind in peaks and segment.name.startswith(("loss", "layer")):
            peaks[kind][0] = max(peaks[kind][0], segment.peak_bytes)
    for phase, sizes in gpu_phases(plan.shape, plan.layout, plan.hardware, plan.work):
        kind = "backward" if phase.startswith("backward,") and "embedding" not in phase else phase
        if kind in peaks:
            peaks[kind][1] = max(peaks[kind][1], sum(sizes.values()))
    x = plan.layout.x_bytes(plan.shape.hidden, plan.work.local_tokens(plan.layout.cp))
    return {kind: (traced, planned) for kind, (traced, planned) in peaks.items()}, x


def trace_row(row: dict[str, str]) -> float:
    """Return the traced peak of a rehearsal in GiB."""
    tokens = parse_count(row["context"]) or 0
    layout = rehearsed.layout_of(row, dtype="bfloat16", kernel=row["kernel"])
    config = keep_layers(find_config(row["model"]), range(int(row["layers"])))
    request = TraceRequest(json.dumps(config), layout, layout.cp)
    return trace_model(request, tokens).peak_bytes / GIB


def compare_rehearsed() -> None:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rehearsed.ROWS:
        if row["peak_gib"]:
            measured = float(row["peak_gib"])
            traced = trace_row(row)
            planned = rehearsed.plan_row(row)[0]
            found.setdefault(row["set"], []).append((traced / measured - 1, planned / measured - 1))
            name = " ".join(
                row[key]
                for key in ("set", "kernel", "model", "cp", "context", "heads_per_stage", "tier")
            )
            errors = "  ".join(f"{error:+.1%}" for error in found[row["set"]][-1])
            print(
                f"{name:50} measured {measured:6.2f}  traced {traced:6.2f}  planned "
                f"{planned:6.2f}  {errors}",
                flush=True,
            )
    for name, errors in found.items():
        for i, what in enumerate(("traced", "planned")):
            sizes = [abs(pair[i]) for pair in errors]
            print(
                f"{name}, {what}: {len(sizes)} peaks, median {median(sizes):.1%}, max "
                f"{max(sizes):.1%}"
            )


def main() -> None:
    if sys.argv[1:] == ["rehearsed"]:
        compare_rehearsed()
        return
    print(f"{'model':14} {'layout':50} {'traced / planned GiB, and the difference in X':70}")
    for model in sys.argv[1:] or MODELS:
        for name, plan in plans(model):
            plan = replace(plan, layout=replace(plan.layout, dtype="bfloat16"))
            peaks, x = compare(model, plan)
            cells = [
                f"{kind} {traced / GIB:6.1f} / {planned / GIB:6.1f} "
                f"({traced / planned - 1:+.1%}, {(traced - planned) / x:+.2f} X)"
                for kind, (traced, planned) in peaks.items()
            ]
            print(f"{model:14} {name:50} {'  '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
