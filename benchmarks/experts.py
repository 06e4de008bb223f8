"""Time the weight gradients of experts: PyTorch's grouped matmul, the same plus an fp32 sum, and ithaka's fused kernel.

python benchmarks/experts.py                      # one GPU
python benchmarks/experts.py --tokens 64 --small  # a CPU
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer

from ithaka.cli.options import AsJson, print_rows
from ithaka.dist.mesh import default_device
from ithaka.layer.expert_rows import Rows, add_products, multiply_groups

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
    rows = Rows.sort(torch.rand(tokens, num_experts, generator=generator, device=device).topk(k).indices, num_experts)
    row: dict[str, Any] = {"model": name, "tokens": tokens, "grouped ms": 0.0, "and sum ms": 0.0, "added ms": 0.0}
    for D, N in sizes:
        a, b = (torch.randn(tokens * k, n, generator=generator, device=device).bfloat16() for n in (D, N))
        total = torch.zeros(num_experts, D, N, device=device)
        calls: dict[str, Callable[[], Any]] = {
            "grouped ms": lambda a=a, b=b: multiply_groups(a.t(), b, rows.ends_E),
            "and sum ms": lambda a=a, b=b, total=total: total.add_(multiply_groups(a.t(), b, rows.ends_E)),
            "added ms": lambda a=a, b=b, total=total: add_products(total, a, b, rows.ends_E),
        }
        for label, call in calls.items():
            row[label] += 1000 * time_call(call, device)
    flops = 2 * tokens * k * sum(D * N for D, N in sizes)
    return row | {"added TFLOP/s": flops / row["added ms"] / 1e9}


def main(
    tokens: Annotated[int, typer.Option(min=8, help="Tokens in a tile.")] = 16384,
    small: Annotated[bool, typer.Option("--small")] = False,
    as_json: AsJson = False,
) -> None:
    """Time the weight gradients of experts."""
    print_rows([measure(name, *shape, tokens) for name, shape in (SMALL if small else SHAPES).items()], as_json)


if __name__ == "__main__":
    typer.run(main)
