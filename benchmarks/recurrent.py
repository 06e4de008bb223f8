"""Check and time the recurrences of hybrid models on one GPU: `python benchmarks/recurrent.py
[--tokens 65536]`.

For the shapes of released models, compares ithaka's kernels with plain PyTorch in fp64 on a few
tokens, then times forward and backward over one rank's tokens, with and without the maps that other
ranks need. Prints a JSON line per shape, with the time that the bytes and FLOPs of the scan need at
the rates measured first, and the ratio to it. `--sweep` instead compiles and checks variants of
Mamba2's kernels in a process each, against fp64 on one segment, and prints what each kernel takes
for `--tokens`.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

import torch
from torch import Tensor

from ithaka.facts.sizes import SEGMENT_ROWS
from ithaka.ops import delta_rule, ssd, ssd_kernels
from ithaka.ops.delta_rule import DeltaInputs, DeltaRule
from ithaka.ops.scan import Scan, zero_state
from ithaka.ops.ssd import Ssd, SsdInputs
from ithaka.ops.state_graph import LocalDocs

SHAPES = {  # recurrence, key heads, heads, key dim, value dim
    "nemotron-3-nano": ("mamba2", 8, 64, 128, 64),
    "granite-4-h-small": ("mamba2", 1, 128, 128, 64),
    "falcon-h1-7b": ("mamba2", 1, 24, 256, 128),
    "qwen3.5-9b": ("delta", 16, 32, 128, 128),
}
CHUNK = 64  # tokens
# Of a sweep's checks: as in tests/gpu/test_ssd_kernels.py, but for the gradient of g, whose
# rounding adds up over the tokens of three times as long a segment: 4.0e-3 for Falcon-H1 with any
# variant.
CHECK_TOKENS = 2048
LIMIT = 5e-3
# The tokens of a chunk, forward and backward, and per kernel: its warps, stages, and heads of a
# program, or the tile of a state; the most promising first.
Chunks = tuple[int, int]
Variant = dict[str, tuple[Any, ...]]
SWEEP: list[tuple[str, Chunks, Variant]] = [
    (
        "nemotron-3-nano",
        (64, 64),
        {"walk": (4, 4, (64, 32)), "out": (4, 3, 8), "key": (8, 3, 8), "value": (4, 3, 8)},
    ),
    (
        "nemotron-3-nano",
        (128, 64),
        {"walk": (4, 3, (64, 32)), "out": (8, 3, 8), "key": (8, 4, 8), "value": (4, 2, 8)},
    ),
    (
        "granite-4-h-small",
        (128, 64),
        {"walk": (4, 3, (64, 32)), "out": (8, 3, 8), "key": (8, 3, 16), "value": (4, 3, 16)},
    ),
    (
        "nemotron-3-nano",
        (128, 64),
        {"walk": (4, 3, (64, 64)), "out": (8, 2, 8), "key": (8, 2, 8), "value": (4, 4, 8)},
    ),
    (
        "granite-4-h-small",
        (64, 64),
        {"walk": (4, 4, (64, 32)), "out": (4, 3, 16), "key": (8, 3, 8), "value": (4, 3, 8)},
    ),
    (
        "falcon-h1-7b",
        (64, 64),
        {"walk": (4, 4, (64, 32)), "out": (4, 3, 8), "key": (8, 3, 8), "value": (8, 2, 8)},
    ),
    (
        "nemotron-3-nano",
        (64, 64),
        {"walk": (4, 5, (64, 32)), "out": (4, 3, 8), "key": (16, 3, 8), "value": (8, 3, 8)},
    ),
    (
        "nemotron-3-nano",
        (128, 64),
        {"walk": (4, 4, (64, 32)), "out": (8, 3, 4), "key": (8, 3, 4), "value": (4, 3, 4)},
    ),
    (
        "nemotron-3-nano",
        (64, 64),
        {"walk": (4, 4, (128, 32)), "out": (4, 3, 8), "key": (16, 2, 8), "value": (8, 2, 8)},
    ),
    (
        "nemotron-3-nano",
        (128, 128),
        {"walk": (4, 3, (64, 32)), "out": (8, 3, 8), "key": (8, 2, 8), "value": (8, 3, 8)},
    ),
    (
        "granite-4-h-small",
        (128, 64),
        {"walk": (4, 3, (64, 64)), "out": (8, 3, 16), "key": (8, 4, 16), "value": (4, 2, 16)},
    ),
    (
        "falcon-h1-7b",
        (128, 64),
        {"walk": (4, 3, (64, 32)), "out": (8, 2, 8), "key": (8, 2, 8), "value": (4, 2, 8)},
    ),
    (
        "falcon-h1-7b",
        (64, 64),
        {"walk": (4, 4, (64, 64)), "out": (4, 2, 8), "key": (16, 2, 12), "value": (8, 3, 8)},
    ),
    (
        "nemotron-3-nano",
        (128, 64),
        {"walk": (8, 3, (128, 64)), "out": (8, 4, 8), "key": (8, 3, 8), "value": (4, 3, 8)},
    ),
]


def make_scan(shape: str, tokens: int, docs: LocalDocs) -> Scan:
    kind, J, H, K, V = SHAPES[shape]
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(tokens, *sizes, generator=generator, device="cuda")

    q = draw(J, K).bfloat16()
    k = (draw(J, K) / K**0.5).bfloat16()
    v = draw(H, V).bfloat16()
    if kind == "delta":
        return DeltaRule(DeltaInputs(q, k, v, -0.1 * draw(H).exp(), draw(H).sigmoid()), docs)
    dt = 0.1 * draw(H).exp()
    skip = torch.ones(H, device="cuda")
    return Ssd(
        SsdInputs(q, k, v, -torch.linspace(0.1, 8, H, device="cuda") * dt, dt),
        docs,
        skip,
        skip.clone(),
    )


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
    """Return the time that inputs and outputs of the scan, and its multiply-adds in chunks of 64,
    take one after the other. Backward computes the states and P again; its products are twice those
    of forward, less those of q and k, which heads share."""
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
    state = zero_state(scan.inputs)
    dout = torch.randn_like(scan.inputs.v_sHV)
    (piece,) = docs.pieces
    segment = type(scan._segment(scan.segments(piece)[0]))
    assert segment in (ssd.FusedSsdSegment, delta_rule.FusedDeltaSegment, delta_rule.FlaSegment), (
        segment
    )
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


class Timed:
    """A kernel whose launches are timed."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.events = list[tuple[torch.cuda.Event, torch.cuda.Event]]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.events.append(
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            )
            self.events[-1][0].record()
            self.kernel[grid](*args, **options)
            self.events[-1][1].record()

        return launch

    def median_ms(self, repeats: int) -> float:
        """Return the median of a launch, averaged over the launches of a repeat."""
        torch.cuda.synchronize()
        ms = [start.elapsed_time(end) for start, end in self.events]
        launches = len(self.events) // repeats
        return statistics.mean(statistics.median(ms[i::launches]) for i in range(launches))


@contextmanager
def timed_kernels() -> Iterator[dict[str, Timed]]:
    names = [
        f"_{name}_kernel" for name in ("prepare", "walk", "out", "key_grad", "value_grad", "sum")
    ]
    kernels = {name: Timed(getattr(ssd_kernels, name)) for name in names}
    for name, kernel in kernels.items():
        setattr(ssd_kernels, name, kernel)
    yield kernels
    for name, kernel in kernels.items():
        setattr(ssd_kernels, name, kernel.kernel)


def use_variant(chunks: Chunks, variant: Variant) -> None:
    ssd_kernels.WIDE_OPTIONS = {}
    ssd_kernels.CHUNK = dict(zip(("forward", "backward"), chunks, strict=True))
    for name, (warps, stages, size) in variant.items():
        ssd_kernels.OPTIONS[name] = {"num_warps": warps, "num_stages": stages}
        if name == "walk":
            ssd_kernels.TILE = size
        else:
            ssd_kernels.HEADS[name] = size


def check_variant(index: int) -> dict[str, float]:
    """Compile a variant, and return its errors over a segment of packed documents."""
    shape, chunks, variant = SWEEP[index]
    use_variant(chunks, variant)
    tokens = CHECK_TOKENS
    starts = (-tokens, -1, 5, 63, 64, 65, 130, 256, 449, tokens - 1, 2 * tokens)
    docs = LocalDocs(tuple(tokens + start for start in starts), tokens, tokens, 1, "cuda")
    scan = make_scan(shape, tokens, docs)
    # Some heads forget within a few tokens, others carry their state across all of them.
    scan.inputs.g_sH.copy_(
        -torch.logspace(-4, 0, SHAPES[shape][2], device="cuda") * scan.inputs.dt_sH
    )
    ids = docs.segment_ids(slice(0, tokens))
    generator = torch.Generator("cuda").manual_seed(1)
    dout = torch.randn(scan.inputs.v_sHV.shape, generator=generator, device="cuda").bfloat16()
    first, last = torch.randn(2, *zero_state(scan.inputs).shape, generator=generator, device="cuda")
    results: list[dict[str, Tensor]] = []
    for kind, dtype in ((ssd.FusedSsdSegment, None), (ssd.SsdSegment, torch.float64)):
        inputs = SsdInputs(*(x.to(dtype, copy=True) for x in scan.inputs))
        skip, state, dstate, dy = (x.to(dtype) for x in (scan.skip_H, first, last, dout))
        segment = kind(inputs, ids, skip, torch.zeros_like(skip))
        out = torch.full_like(inputs.v_sHV, float("nan"))
        found = {"map": segment.extend(torch.cat([torch.ones_like(state[..., :1]), state], -1))}
        found["gradient's map"] = segment.extend_grad(
            torch.cat([torch.ones_like(state[..., :1]), dstate], -1), dy
        )
        found |= {"state": segment.forward(state, out), "out": out}
        found["gradient of the state"] = segment.backward(state, dy, dstate)
        results.append(found | inputs._asdict() | {"D": segment.dskip_H})
    ours, exact = results
    return {
        name: float((ours[name].double() - x).norm() / x.norm())
        for name, x in exact.items()
        if x.any()
    }


def segment_tokens(shape: str) -> int:
    _, _, H, _, _ = SHAPES[shape]
    return -(-Ssd.segment_size * SEGMENT_ROWS // (H * CHUNK)) * CHUNK


def time_variant(index: int, tokens: int, repeats: int) -> dict[str, float]:
    """Return what the kernels of forward and backward take for `tokens`, in ms."""
    shape, chunks, variant = SWEEP[index]
    use_variant(chunks, variant)
    rows = segment_tokens(shape)
    scan = make_scan(shape, rows, LocalDocs((0, 3 * rows), rows, rows, 1, "cuda"))
    state = zero_state(scan.inputs)
    dout = torch.randn_like(scan.inputs.v_sHV)
    out = torch.empty_like(dout)
    kept = [x.clone() for x in scan.inputs]
    for is_warm in (False, True):
        with timed_kernels() as kernels:
            times = repeats if is_warm else 1
            for _ in range(times):
                for x, value in zip(scan.inputs, kept, strict=True):
                    x.copy_(value)
                ssd.FusedSsdSegment(scan.inputs, None, scan.skip_H, scan.dskip_H).forward(
                    state, out
                )
                ssd.FusedSsdSegment(scan.inputs, None, scan.skip_H, scan.dskip_H).backward(
                    state, dout, state
                )
            ms = {name: kernel.median_ms(times) * tokens / rows for name, kernel in kernels.items()}
    return {name.removesuffix("_kernel")[1:]: round(each, 3) for name, each in ms.items()}


def sweep(args: argparse.Namespace, rates: tuple[float, float]) -> None:
    """Check all variants at once, time them one by one, and time the best of each shape and chunks
    over all segments."""
    commands = [
        [sys.executable, __file__, "--check-variant", str(index)] for index in range(len(SWEEP))
    ]
    processes = [Popen(command, stdout=PIPE, stderr=PIPE, text=True) for command in commands]
    deadline = time.monotonic() + args.compile_s
    errors = list[dict[str, float]]()
    for index, process in enumerate(processes):  # timing starts when no other process uses the GPU
        try:
            output, messages = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except TimeoutExpired:
            process.kill()
            output, messages = process.communicate()
        errors.append(
            json.loads(output.splitlines()[-1]) if output and not process.returncode else {}
        )
        found = {
            name: float(f"{error:.1e}") for name, error in errors[-1].items()
        } or messages.splitlines()[-3:]
        print(json.dumps({"variant": index, "errors": found}), flush=True)
    setattr(ssd, "_try", lambda *_: None)  # noqa: B010
    best: dict[tuple[str, Chunks], dict[str, tuple[float, Any]]] = {}
    for index, (shape, chunks, variant) in enumerate(SWEEP):
        if not errors[index]:
            continue
        ms = time_variant(index, args.tokens, args.repeats)
        is_right = all(x < LIMIT for x in errors[index].values())
        report = {
            "variant": index,
            "is_right": is_right,
            "shape": shape,
            "chunks": chunks,
            **variant,
            "ms": ms,
        }
        print(json.dumps(report), flush=True)
        own = best.setdefault((shape, chunks), {})
        for name, options in variant.items() if is_right else ():
            each = ms[name if name in ms else f"{name}_grad"], options
            own[name] = min(own.get(name, each), each)
    for (shape, chunks), chosen in best.items():
        variant = {name: options for name, (_, options) in chosen.items()}
        use_variant(chunks, variant)
        print(
            json.dumps(
                {"chunks": chunks, **variant, **time_shape(shape, args.tokens, rates, args.repeats)}
            ),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--compile-s", type=float, default=70.0, help="seconds of a sweep's checks")
    parser.add_argument("--check-variant", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.check_variant is not None:
        print(json.dumps(check_variant(args.check_variant)))
        return
    rates = measure_rates(args.repeats)
    print(
        json.dumps(
            {"device": torch.cuda.get_device_name(), "bytes_s": rates[0], "tf32_flops_s": rates[1]}
        )
    )
    if args.sweep:
        torch.cuda.empty_cache()
        sweep(args, rates)
        return
    for shape in args.shapes:
        print(json.dumps(time_shape(shape, args.tokens, rates, args.repeats)), flush=True)


if __name__ == "__main__":
    main()
