"""`ithaka bench attention`: sustained TFLOP/s per kernel, length, heads and block size, as table and JSON.
`ithaka bench device`: this machine's rates as a file for `ithaka plan --gpu-file`.
`ithaka bench ladder`: what each technique buys in memory and costs in time, measured here.

Apart from bench.py so that `--help` answers without torch: each command imports what it measures with.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ithaka.config import ConfigError, check_file, parse_count
from ithaka.plan.hardware import parse_bytes
from ithaka.plan.models import find_config, find_shape
from ithaka.train.console import status
from ithaka.train.launch import heeding_interrupts

if TYPE_CHECKING:
    import torch

DTYPES = ("bfloat16", "float16", "float32")
DType = Annotated[str, typer.Option(help=", ".join(DTYPES))]
Seconds = Annotated[float, typer.Option(min=0, help="how long each figure is held")]
JsonPath = Annotated[Path | None, typer.Option("--json", help="also write the rows here")]

bench_app = typer.Typer(add_completion=False, no_args_is_help=True, help="Measure what this machine gives.")


@bench_app.command("attention")
def bench_attention(
    tokens: Annotated[str, typer.Option(help="lengths, such as 256K,1M")] = "16K,64K",
    heads: Annotated[int, typer.Option(min=1)] = 1,
    kv_heads: Annotated[int, typer.Option(min=1)] = 1,
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    kernels: Annotated[str, typer.Option(help="names, auto or all")] = "auto",
    blocks: Annotated[str, typer.Option(help="q x kv tokens, such as auto,128Kx64K")] = "auto",
    documents: Annotated[int, typer.Option(min=1, help="equal documents packed in the tokens")] = 1,
    window: Annotated[int | None, typer.Option(min=1)] = None,
    bidirectional: Annotated[bool, typer.Option("--bidirectional")] = False,
    backward: Annotated[bool, typer.Option("--backward/--forward-only")] = True,
    dtype: DType = "",
    seconds: Seconds = 3.0,
    json_path: JsonPath = None,
) -> None:
    """TFLOP/s of attention, forward and backward, sustained on random data."""
    if json_path is not None:
        check_file("--json", json_path)
    lengths = [_tokens(text, "--tokens") for text in tokens.split(",")]
    sizes = [_blocks(text) for text in blocks.split(",")]
    _check_attention(min(lengths), documents, heads, kv_heads, window if bidirectional else None)

    with status("loading PyTorch"), heeding_interrupts():
        from ithaka.attention.kernels import available_kernels
        from ithaka.bench import AttentionCase, measure_attention, table
        from ithaka.dist.mesh import default_device

    device = default_device()
    chosen = _dtype(dtype, device)
    names = available_kernels(device, chosen, head_dim) if kernels == "all" else kernels.split(",")
    rows = []
    for name, num_tokens, block in product(names, lengths, sizes):
        case = AttentionCase(num_tokens, heads, kv_heads, head_dim, name, block, not bidirectional, window, documents)
        with status(f"measuring kernel {name} at {num_tokens} tokens"):
            rows.append(measure_attention(case, device=device, dtype=chosen, seconds=seconds, backward=backward))
    print(table(rows))
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=1) + "\n")


@bench_app.command("device")
def bench_device(
    out: Annotated[Path, typer.Option("--out", help="the file to write")] = Path("gpu.json"),
    matrix: Annotated[int | None, typer.Option(min=1, help="rows and columns of the matmul")] = None,
    tokens: Annotated[str | None, typer.Option(help="length for attention, such as 256K")] = None,
    copy: Annotated[str | None, typer.Option(help="size of the copies, such as 1GiB")] = None,
    dtype: DType = "",
    seconds: Seconds = 3.0,
) -> None:
    """Measures matmul, attention and copies here, and writes them for `ithaka plan --gpu-file`."""
    with status("loading PyTorch"), heeding_interrupts():
        from ithaka.bench import DeviceSizes, measure_device
        from ithaka.dist.mesh import default_device

    device = default_device()
    large = device.type == "cuda"
    sizes = DeviceSizes(
        matrix or (8192 if large else 1024),
        _tokens(tokens or ("256K" if large else "2K"), "--tokens"),
        max(4, parse_bytes(copy or ("1GiB" if large else "64MiB"), "--copy")),
        seconds,
    )
    check_file("--out", out)
    chosen = _dtype(dtype, device)
    with status("measuring this device"):
        values = measure_device(device, chosen, sizes)
    out.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    for name, source in values["sources"].items():
        print(f"{name:26}{values[name]:>12.4g}   {source}")
    print(f"written to {out}; use it with: ithaka plan MODEL --gpus 8 --gpu-file {out}")


@bench_app.command("ladder")
def bench_ladder(
    model: Annotated[str, typer.Argument(help="a model directory, a config.json, or a name: llama3-8b")],
    context: Annotated[str, typer.Option(help="tokens of the sequence")] = "4K",
    ranks: Annotated[int, typer.Option(min=1, help="this process stands for rank 0 of so many")] = 2,
    tile: Annotated[str, typer.Option(help="tokens of a tile")] = "256",
    layers: Annotated[int, typer.Option(min=1, help="layers to run")] = 2,
    dtype: DType = "",
    json_path: JsonPath = None,
) -> None:
    """Peak memory and seconds per layer with one technique after the other switched on."""
    if json_path is not None:
        check_file("--json", json_path)
    num_heads = find_shape(model).heads
    if ranks > num_heads:
        raise ConfigError(f"--ranks={ranks} exceeds the {num_heads} query heads; use at most {num_heads}")
    config = find_config(model)
    num_tokens, tile_tokens = _tokens(context, "--context"), _tokens(tile, "--tile")

    with status("loading PyTorch"), heeding_interrupts():
        from ithaka.bench import ladder_layouts
        from ithaka.dist.mesh import default_device
        from ithaka.rehearse import rehearse

    chosen = _dtype(dtype, default_device())
    rows: dict[str, dict[str, Any]] = {}
    for name, layout in ladder_layouts(layers, ranks, tile_tokens, str(chosen).removeprefix("torch.")).items():
        row = rehearse(
            config, ranks=ranks, context=num_tokens, layers=layers, layout=layout,
            saying=partial(_rung, name),
        )  # fmt: skip
        if not rows:  # what is refused is refused by then
            print(f"{'':18}{'peak MiB':>10}{'peak X':>8}{'host MiB':>10}{'forward s':>11}{'backward s':>11}")
        rows[name] = asdict(row) | {"peak_x": row.peak_x}
        activations = (row.layer_peak_bytes - row.base_bytes) / 2**20
        seconds = f"{row.forward_s:11.4f}{row.backward_s:11.4f}"
        print(f"{name:18}{activations:10.1f}{row.peak_x:8.2f}{row.host_bytes / 2**20:10.1f}{seconds}", flush=True)
    print(f"peak of {layers} layers above the same at few tokens; X is one residual-stream tensor of a rank")
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _rung(name: str, what: str) -> AbstractContextManager:
    return status(f"{name}: {what}")


def _check_attention(num_tokens: int, documents: int, heads: int, kv_heads: int, both_ways: int | None) -> None:
    """`num_tokens`: of the shortest; `both_ways`: the window of bidirectional attention."""
    if 2 * documents > num_tokens:
        raise ConfigError(
            f"--documents={documents} leaves less than 2 of --tokens={num_tokens} to each; "
            f"use fewer documents, or at least {2 * documents} tokens"
        )
    if heads % kv_heads:
        fitting = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(f"--kv-heads={kv_heads} does not divide --heads={heads}; use {', '.join(fitting)}")
    if both_ways is not None:
        raise ConfigError(f"--window={both_ways} looks back only, and --bidirectional both ways; leave one of them out")


def _dtype(name: str, device: torch.device) -> torch.dtype:
    name = name or ("bfloat16" if device.type == "cuda" else "float32")
    if name not in DTYPES:
        raise ConfigError(f"--dtype={name} is not a dtype; use {', '.join(DTYPES)}")
    import torch

    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]


def _tokens(text: str, option: str) -> int:
    count = parse_count(text.strip())
    if not count:
        raise ConfigError(f"{option}={text} is not a number of tokens; write 65536, 64K or 1M")
    return count


def _blocks(text: str) -> tuple[int, int] | None:
    if text.strip() == "auto":
        return None
    block_q, _, block_kv = map(parse_count, text.partition("x"))
    if not block_q or not block_kv:
        raise ConfigError(f"--blocks={text} is not q x kv tokens; write 128Kx64K or auto")
    return block_q, block_kv
