"""Measure layers with adapters of rank 16 on an nf4 base and on a bf16 base, and compare peaks with the plan.

    python benchmarks/fourbit.py                                        # 8B and 70B, 16K and 128K; one GPU
    python benchmarks/fourbit.py --models small.json --contexts 512     # a CPU, with the config.json of a small model

Bases alternate, because GPUs slow down as they heat up. First the kernel that unpacks weights is compared with plain
torch, bit by bit, and timed.
"""

from __future__ import annotations

import gc
import statistics
from typing import Annotated, Any

import torch
import typer

from ithaka.checks import rehearse
from ithaka.cli.options import AsJson, print_rows
from ithaka.comm.mesh import default_device
from ithaka.config import AdapterConfig, parse_count
from ithaka.layout import make_layout
from ithaka.log.console import status
from ithaka.ops import fourbit
from ithaka.plan.bytes import build_ledger
from ithaka.plan.hardware import GIB, Hardware, parse_gpus
from ithaka.plan.models import find_config
from ithaka.plan.search import Plan
from ithaka.plan.shape import StepShape
from ithaka.run.shapes import find_shape

LAYERS = 2
RANK = 16


def time_unpacking(num_rows: int) -> dict[str, Any]:
    """Return the bytes read and written per second, and whether the result is bitwise equal to plain torch."""
    device, count = default_device(), num_rows * fourbit.ROW
    flat = torch.randn(count, device=device, generator=torch.Generator(device).manual_seed(0)).bfloat16()
    scales = fourbit.block_scales(flat)
    packed = fourbit.quantize_nf4(flat, scales, scales.mean())
    expected, into = torch.empty(count, dtype=torch.bfloat16), torch.empty_like(flat)
    fourbit.dequantize(packed.cpu(), fourbit.NF4, expected)
    fourbit.dequantize(packed, fourbit.NF4, into)
    row = {"weights": count, "equal to torch": bool(torch.equal(into.cpu(), expected))}
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
        for event in events:
            event.record()
            fourbit.dequantize(packed, fourbit.NF4, into)
        torch.cuda.synchronize()
        seconds = statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)) / 1000
        row |= {"ms": 1000 * seconds, "GB/s": (packed.nbytes + into.nbytes) / seconds / 1e9}
    return row


def measure_layer(model: str, context: int, base: str, hardware: Hardware) -> dict[str, Any]:
    shape = find_shape(model).with_adapter(AdapterConfig(RANK, base=base))  # type: ignore[arg-type]
    layout = make_layout(
        LAYERS,
        tile_tokens=8192,
        dtype=rehearse.compute_dtype(),
        input_tier="host",
        keep_attention=LAYERS,
        attention_tier="host",
    )
    plan = rehearse.truncate_plan(
        Plan(shape, make_layout(shape.num_layers), hardware, StepShape(context)), LAYERS, False
    )
    ledger = build_ledger(plan.shape, layout, hardware, plan.work)
    planned = (ledger.gpu_peak - ledger.gpu["reserve"]) / GIB
    with status(f"{model} at {context} tokens, {base}"):
        measured = rehearse.rehearse(find_config(model), layout, 1, context, False, plan.shape.adapter)
    gc.collect()
    torch.cuda.empty_cache()
    peak = measured.peak_bytes / GIB
    return {
        "model": model,
        "context": context,
        "base": base,
        "layer s": measured.forward_s + measured.backward_s,
        "peak GiB": peak,
        "planned GiB": planned,
        "peak / planned": peak / planned,
    }


def main(
    models: Annotated[str, typer.Option(help="Built-in models, separated by commas.")] = "llama3-8b,llama3-70b",
    contexts: Annotated[str, typer.Option(help="Tokens, separated by commas.")] = "16K,128K",
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each base; the fastest counts.")] = 2,
    gpu: Annotated[str, typer.Option(help="GPU of the plan.")] = "1xH200",
    as_json: AsJson = False,
) -> None:
    """Measure a layer's time and peak with nf4 and bf16 bases."""
    unpacking, rows, hardware = [time_unpacking(256)], [], parse_gpus(gpu)
    if torch.cuda.is_available():
        unpacking.append(time_unpacking(14336))  # a 70B's gate projection
    for model in models.split(","):
        for context in map(parse_count, contexts.split(",")):
            assert context is not None
            runs = [measure_layer(model, context, base, hardware) for _ in range(repeats) for base in ("bf16", "nf4")]
            best = [min((run for run in runs if run["base"] == base), key=lambda run: run["layer s"])
                    for base in ("bf16", "nf4")]  # fmt: skip
            rows += [run | {"x bf16": run["layer s"] / best[0]["layer s"]} for run in best]
    print_rows(unpacking, as_json)
    print_rows(rows, as_json)


if __name__ == "__main__":
    typer.run(main)
