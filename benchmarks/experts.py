"""Time the grouped matmuls of experts by tile: forward, and weight gradients by PyTorch's grouped matmul, by the same
plus an fp32 sum, and by ithaka's fused kernel.

python benchmarks/experts.py                               # one GPU
python benchmarks/experts.py --tokens 2048,4096,8192       # smaller tiles: fewer rows per expert
python benchmarks/experts.py --tokens 64 --small           # a CPU
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer

from ithaka.blocks.expert_rows import SortedAssignments, add_products, multiply_groups
from ithaka.cli.options import AsJson, print_rows
from ithaka.comm.mesh import default_device

# Experts, chosen per token, and the inputs and outputs of the two weights.
SHAPES = {
    "qwen3-30b-a3b": (128, 8, ((1536, 2048), (2048, 768))),
    "gpt-oss-20b": (32, 4, ((2880, 5760), (2880, 2880))),
    "gpt-oss-120b": (128, 4, ((2880, 5760), (2880, 2880))),
}
SMALL = {"small": (8, 2, ((32, 64), (64, 32)))}


def time_call(call: Callable[[], Any], device: torch.device) -> float:
    """Return the median seconds of ten calls."""
    seconds = []
    for _ in range(12):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


def measure(name: str, num_experts: int, k: int, sizes: tuple[tuple[int, int], ...], tokens: int) -> dict[str, Any]:
    device = default_device()
    generator = torch.Generator(device).manual_seed(0)
    rows = SortedAssignments.sort(
        torch.rand(tokens, num_experts, generator=generator, device=device).topk(k).indices, num_experts
    )
    row: dict[str, Any] = {"model": name, "tokens": tokens, "rows per expert": tokens * k // num_experts}
    row |= {"forward ms": 0.0, "grouped ms": 0.0, "and sum ms": 0.0, "added ms": 0.0}
    for D, N in sizes:
        a, b = (torch.randn(tokens * k, n, generator=generator, device=device).bfloat16() for n in (D, N))
        total = torch.zeros(num_experts, D, N, device=device)
        weight = torch.randn(num_experts, D, N, generator=generator, device=device).bfloat16()
        calls: dict[str, Callable[[], Any]] = {
            "forward ms": lambda b=b, weight=weight: multiply_groups(b, weight.transpose(1, 2), rows.ends_E),
            "grouped ms": lambda a=a, b=b: multiply_groups(a.t(), b, rows.ends_E),
            "and sum ms": lambda a=a, b=b, total=total: total.add_(multiply_groups(a.t(), b, rows.ends_E)),
            "added ms": lambda a=a, b=b, total=total: add_products(total, a, b, rows.ends_E),
        }
        for label, call in calls.items():
            row[label] += 1000 * time_call(call, device)
    flops = 2 * tokens * k * sum(D * N for D, N in sizes)
    return row | {f"{label} TFLOP/s": flops / row[f"{label} ms"] / 1e9 for label in ("forward", "grouped", "added")}


def main(
    tokens: Annotated[str, typer.Option(help="Tokens in a tile, one or several.")] = "16384",
    small: Annotated[bool, typer.Option("--small")] = False,
    as_json: AsJson = False,
) -> None:
    """Time the grouped matmuls of experts."""
    shapes = (SMALL if small else SHAPES).items()
    rows = [measure(name, *shape, int(tile)) for name, shape in shapes for tile in tokens.split(",")]
    print_rows(rows, as_json)


if __name__ == "__main__":
    typer.run(main)
