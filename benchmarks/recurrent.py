"""Check and time the recurrences of hybrid models on one GPU: `python benchmarks/recurrent.py [--tokens 65536]`.

For the shapes of released models, compares ithaka's kernels with plain PyTorch in fp64 on a few tokens, then times
forward and backward over one rank's tokens, with and without the maps that other ranks need. Prints a JSON line per
shape, with the time that the bytes and FLOPs of the scan need at the rates measured first, and the ratio to it.
`--sweep` also times other sizes of the blocks of Mamba2's kernels.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ithaka.ops import delta_rule, ssd, ssd_kernels
from ithaka.ops.delta_rule import DeltaInputs, DeltaRule
from ithaka.ops.scan import LocalDocs, Scan, zero_state
from ithaka.ops.ssd import Ssd, SsdInputs

SHAPES = {  # recurrence, key heads, heads, key dim, value dim
    "nemotron-3-nano": ("mamba2", 8, 64, 128, 64),
    "granite-4-h-small": ("mamba2", 1, 128, 128, 64),
    "falcon-h1-7b": ("mamba2", 1, 24, 256, 128),
    "qwen3.5-9b": ("delta", 16, 32, 128, 128),
}
CHUNK = 64  # tokens


def make_scan(shape: str, tokens: int, docs: LocalDocs) -> Scan:
    kind, J, H, K, V = SHAPES[shape]
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(tokens, *sizes, generator=generator, device="cuda")

    q, k, v = draw(J, K).bfloat16(), (draw(J, K) / K**0.5).bfloat16(), draw(H, V).bfloat16()
    if kind == "delta":
        return DeltaRule(DeltaInputs(q, k, v, -0.1 * draw(H).exp(), draw(H).sigmoid()), docs)
    dt, skip = 0.1 * draw(H).exp(), torch.ones(H, device="cuda")
    return Ssd(SsdInputs(q, k, v, -torch.linspace(0.1, 8, H, device="cuda") * dt, dt), docs, skip, skip.clone())


def median_ms(work: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def measure_rates(repeats: int) -> tuple[float, float]:
    """Return bytes/s of a copy and FLOP/s of fp32 matmuls in TF32, which the kernels use."""
    x = torch.empty(2**30, dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(x)
    bytes_s = 2 * x.nbytes / median_ms(lambda: y.copy_(x), repeats) * 1e3
    a, b = torch.randn(2, 8192, 8192, device="cuda")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    flops_s = 2 * 8192**3 / median_ms(lambda: a @ b, repeats) * 1e3
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    return bytes_s, flops_s


def needed_ms(shape: str, tokens: int, bytes_s: float, flops_s: float) -> tuple[float, float]:
    """Return the time that inputs and outputs of the scan, and its multiply-adds in chunks of 64, take one after the
    other. Backward computes the states and P again; its products are twice those of forward, less those of q and k,
    which heads share."""
    kind, J, H, K, V = SHAPES[shape]
    rows = tokens * H
    read = tokens * J * K * 4 + rows * (V * 2 + 8)
    macs = rows * (2 * K * V + CHUNK * V) + tokens * J * CHUNK * K
    if kind == "delta":  # y, and the inverse; q and k are repeated for all heads
        macs = rows * (3 * K * V + 2 * CHUNK * V + 2 * CHUNK * K + CHUNK**2)
    forward = (read + rows * V * 2) / bytes_s + 2 * macs / flops_s
    backward = (2 * read + rows * V * 2) / bytes_s + 6 * macs / flops_s
    return 1e3 * forward, 1e3 * backward


def time_shape(shape: str, tokens: int, rates: tuple[float, float], repeats: int) -> dict[str, Any]:
    docs = LocalDocs((0, 3 * tokens), tokens, tokens, 1, "cuda")  # the middle of three ranks
    scan = make_scan(shape, tokens, docs)
    state, dout = zero_state(scan.inputs), torch.randn_like(scan.inputs.v_sHV)
    (piece,) = docs.pieces
    segment = type(scan._segment(scan.segments(piece)[0]))
    assert segment in (ssd.FusedSegment, delta_rule.FusedSegment, delta_rule.FlaSegment), segment
    _, states = scan.forward({piece.source: state})
    found = {
        "forward": median_ms(lambda: scan.forward({piece.source: state}), repeats),
        "maps": median_ms(scan.summarize, repeats),
        "gradient maps": median_ms(lambda: scan.summarize_grad(dout), repeats),
        # Its inputs become gradients, which may overflow; the time does not depend on them.
        "backward": median_ms(lambda: scan.backward(states, dout, {piece.stop: state}), repeats),
    }
    forward, backward = needed_ms(shape, tokens, *rates)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    scan.backward(states, dout, {piece.stop: state})
    return {
        "shape": shape,
        "tokens": tokens,
        "kernel": segment.__module__ + "." + segment.__name__,
        "ms": {name: round(ms, 3) for name, ms in found.items()},
        "needed_ms": {"forward": round(forward, 3), "backward": round(backward, 3)},
        "ratio": round((found["forward"] + found["backward"]) / (forward + backward), 2),
        "backward_GiB": round((torch.cuda.max_memory_allocated() - before) / 2**30, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    rates = measure_rates(args.repeats)
    print(json.dumps({"device": torch.cuda.get_device_name(), "bytes_s": rates[0], "tf32_flops_s": rates[1]}))
    for shape in args.shapes:
        print(json.dumps(time_shape(shape, args.tokens, rates, args.repeats)), flush=True)
    for chunks, walk_warps, warps, stages in product((4, 8, 16), (4, 8), (4, 8), (1, 2)) if args.sweep else ():
        ssd_kernels.CHUNKS = chunks
        ssd_kernels.WALK_OPTIONS = {"num_warps": walk_warps, "num_stages": 2}
        ssd_kernels.GRADIENT_OPTIONS = {"num_warps": warps, "num_stages": stages}
        names = {"chunks": chunks, "walk_warps": walk_warps, "gradient_warps": warps, "stages": stages}
        for shape in [name for name in args.shapes if SHAPES[name][0] == "mamba2"]:
            result = time_shape(shape, args.tokens, rates, args.repeats)
            print(json.dumps({**names, "shape": shape, "ms": result["ms"]}), flush=True)


if __name__ == "__main__":
    main()
