"""Compare plans with rehearsals on an H200 (LOG.md, "planned against rehearsed").

rehearsed.csv has one rehearsal per row. set: "fitted" if the constants of plan/seconds.py are
fitted to it, "held-out" for everything at 512K and all of qwen3-32b. tier: where layer inputs are
kept, and attention outputs if they are kept. steps: 2 (the second is measured) or 1 (forward
includes pinning host memory and cuDNN's kernel planning). layer_s: forward plus backward. Rows
without seconds ran with truncated attention: only their peak is valid. Rows without a peak predate
two changes that lower it: dq waits on the host, and a single rank casts gradients in place.

`PYTHONPATH=src python tests/rehearsed.py` prints the errors of both sets and a fresh fit of the
constants.
"""

import csv
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from ithaka.config import parse_count
from ithaka.layout import Layout
from ithaka.plan import seconds
from ithaka.plan.bytes import build_ledger
from ithaka.plan.hardware import parse_gpus
from ithaka.plan.layer_bytes import LayerBytes
from ithaka.plan.shape import StepShape
from ithaka.trace.shapes import find_shape

with (Path(__file__).parent / "rehearsed.csv").open(encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file))

# Seconds per layer of llama3-8b with cuDNN, one H200 as rank 0 of 8: attention and MLP of forward,
# then of backward. Like the rows, 512K is held out.
LLAMA = find_shape("llama3-8b")
STREAMED = Layout(
    cp=8,
    heads_per_stage=8,  # one query head per rank and stage
    tile_tokens=8192,
    input_tier="host",
    keep_attention=32,
    attention_tier="host",
    overlap=False,
)
DIRECTIONS = ("forward", "backward")
PARTS = {
    2**17: (0.0284, 0.0096, 0.0834, 0.0288),
    2**19: (0.4835, 0.0395, 1.3341, 0.1087),
    2**20: (1.9120, 0.0848, 5.2976, 0.2161),
}
# Seconds per step of the first six layers on one H200 with FlashAttention 4, by thousands of tokens
# (log/2026-11.md, "one layer path with blocks"). Tiles of 16384 tokens, attention outputs on the
# device.
STEPS = {
    "llama3.2-3b": {64: 1.6430},
    "gemma-3-4b": {64: 1.1388, 128: 2.532},
    "olmo-3-7b": {64: 1.9940, 128: 4.359},
    "smollm3-3b": {64: 1.1501, 128: 3.433},
}


def h200(count: int, kernel: str):
    return parse_gpus(f"{count}xH200").with_kernel(kernel)


def layout_of(row: dict[str, str], **options: Any) -> Layout:
    return Layout(
        cp=int(row["cp"]),
        heads_per_stage=int(row["heads_per_stage"]),
        tile_tokens=int(row["tile_tokens"]),
        input_tier=row["tier"],  # type: ignore[arg-type]
        keep_attention=int(row["kept"]) * int(row["layers"]),
        attention_tier=row["tier"],  # type: ignore[arg-type]
        overlap=row["overlap"] == "1",
        **options,
    )


def plan_row(row: dict[str, str]) -> tuple[float, tuple[float, float]]:
    """Return (peak GiB without the reserve, a layer's forward and backward seconds without
    exchanges)."""
    shape = find_shape(row["model"]).keep_layers(range(int(row["layers"])))
    work = StepShape(parse_count(row["context"]) or 0)
    layout = layout_of(row)
    keeps = layout.layer_policies(shape.num_layers)[0]
    hardware = h200(layout.cp, row["kernel"])
    ledger = build_ledger(shape, layout, hardware, work)
    parts = seconds.layer_seconds(shape, layout, hardware, work, shape.mixers[0], keeps)
    forward, backward = (part.total - part.exchange for part in parts)
    return (ledger.gpu_peak - ledger.gpu["reserve"]) / 2**30, (forward, backward)


def errors(row: dict[str, str]) -> dict[str, float]:
    """Return planned / measured - 1 of the peak if known, the layer and, for rows of two steps,
    each direction."""
    peak_gib, (forward_s, backward_s) = plan_row(row)
    relative_errors = {"peak": peak_gib / float(row["peak_gib"]) - 1} if row["peak_gib"] else {}
    if row["layer_s"]:
        relative_errors["layer"] = (forward_s + backward_s) / float(row["layer_s"]) - 1
    elif row["forward_s"]:
        measured = float(row["forward_s"]), float(row["backward_s"])
        relative_errors["layer"] = (forward_s + backward_s) / sum(measured) - 1
        if row["steps"] == "2":
            relative_errors |= {
                "forward": forward_s / measured[0] - 1,
                "backward": backward_s / measured[1] - 1,
            }
    return relative_errors


def summarize(name: str) -> dict[str, tuple[int, float, float, float]]:
    """Return (points, median absolute error, largest underestimate, largest overestimate) of a
    set."""
    by_row = [errors(row) for row in ROWS if row["set"] == name]
    values = {
        what: [of_row[what] for of_row in by_row if what in of_row]
        for what in ("peak", "layer", *DIRECTIONS)
    }
    return {
        what: (len(v), statistics.median(map(abs, v)), min(v), max(v)) for what, v in values.items()
    }


def plan_parts(context: int) -> list[float]:
    """Return planned seconds like PARTS; the MLP's backward waits for the layer's input and
    attention's output."""
    hardware = h200(8, "cudnn")
    mixer = LLAMA.mixers[0]
    keeps = STREAMED.layer_policies(LLAMA.num_layers)[0]
    forward, backward = seconds.layer_seconds(
        LLAMA, STREAMED, hardware, StepShape(context), mixer, keeps
    )
    linear = seconds.LayerSeconds(LLAMA, STREAMED, hardware, context // 8)
    fetched_bytes = linear.x + LayerBytes(LLAMA, STREAMED, linear.s).outputs
    mlp_back = linear.mlp(True)
    mlp_back += linear.wait(
        fetched_bytes / (hardware.gpu.pcie_bytes_s * seconds.COPY_SHARE), mlp_back
    )
    return [forward.attention, linear.mlp(False), backward.attention, mlp_back]


def step_errors() -> list[float]:
    """Return planned / measured - 1 of STEPS."""
    layout = Layout(tile_tokens=16384, keep_attention=6)
    return [
        seconds.step_seconds(
            find_shape(model).keep_layers(range(6)), layout, h200(1, "fa4"), StepShape(k * 1024)
        ).total
        / measured
        - 1
        for model, steps in STEPS.items()
        for k, measured in steps.items()
    ]


def fit() -> dict[str, object]:
    """Fit log(planned / measured) of layers and steps to zero by least squares
    (Levenberg-Marquardt)."""
    fitted = [row for row in ROWS if row["set"] == "fitted"]

    def constants(x: np.ndarray) -> dict[str, object]:
        return dict(zip(("LAYER_SHARE", "STAGE_SECONDS"), np.exp(x).tolist(), strict=True))

    def residuals(x: np.ndarray) -> np.ndarray:
        vars(seconds).update(constants(x))
        values = [of_row["layer"] for of_row in map(errors, fitted) if "layer" in of_row]
        return np.log1p(values + step_errors())

    x = np.log([0.8, 5e-4])
    damping = 1e-4
    now = residuals(x)
    while damping < 1:
        slopes = np.array([(residuals(x + step) - now) / 1e-4 for step in 1e-4 * np.eye(len(x))])
        step = np.linalg.solve(slopes @ slopes.T + damping * np.eye(len(x)), -slopes @ now)
        further = residuals(x + np.clip(step, -0.3, 0.3))
        if further @ further < now @ now * (1 - 1e-6):
            x = x + np.clip(step, -0.3, 0.3)
            now = further
            damping = damping / 3
        else:
            damping *= 4
    return constants(x)


if __name__ == "__main__":
    for name in ("fitted", "held-out"):
        for what, figures in summarize(name).items():
            print(
                "{}, {}: {} points, median {:.1%}, from {:+.1%} to {:+.1%}".format(
                    name, what, *figures
                )
            )
    for name, value in fit().items():
        print(name, value if isinstance(value, tuple) else f"{value:.3g}")
