"""`ithaka bench attention`: sustained TFLOP/s per kernel, length, heads and block size, as table and JSON.
`ithaka bench device`: this machine's rates as a file for `ithaka plan --gpu-file`.
`ithaka bench ladder`: what each technique buys in memory and costs in time, measured here.

Random data, a warm-up, then calls back to back for several seconds; the median of the second half counts,
since a chip that has just woken up is faster than one that has been working.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer

from ithaka.config import ConfigError, parse_count
from ithaka.model.layer import LayerOptions
from ithaka.model.settings import Settings
from ithaka.ops.attention import attention, attention_backward, default_blocks
from ithaka.ops.kernels import available_kernels, resolve_kernel
from ithaka.plan.hardware import GPUS, gpu_named, parse_bytes
from ithaka.plan.models import MODELS, find_shape, model_config
from ithaka.rehearsal import rehearse

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class AttentionCase:
    """One measurement. `documents` equal ones share the tokens; blocks=None derives them from the L2 size."""

    num_tokens: int
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 128
    kernel: str = "auto"
    blocks: tuple[int, int] | None = None
    causal: bool = True
    window: int | None = None
    documents: int = 1

    @property
    def docs(self) -> tuple[int, ...]:
        return tuple(i * self.num_tokens // self.documents for i in range(self.documents + 1))


@dataclass(frozen=True)
class AttentionRow:
    kernel: str
    tokens: int
    documents: int
    heads: int
    kv_heads: int
    head_dim: int
    block_q: int
    backward_block_q: int
    block_kv: int
    window: int | None
    causal: bool
    forward_s: float
    forward_tflops: float
    backward_s: float | None
    backward_tflops: float | None


def attention_flops(case: AttentionCase) -> int:
    """Of the forward pass: 4 K for every row and visible key; a causal row sees half of them on average."""
    seen = 0
    for start, stop in zip(case.docs, case.docs[1:], strict=False):
        length = stop - start
        if not case.causal:
            seen += length * length
        elif case.window is None or case.window >= length:
            seen += length * length // 2
        else:
            seen += case.window * length - case.window**2 // 2
    return 4 * case.head_dim * case.heads * seen


def measure_attention(
    case: AttentionCase, *, device: torch.device, dtype: torch.dtype, seconds: float, backward: bool
) -> AttentionRow:
    kernel = resolve_kernel(case.kernel, device, dtype, case.head_dim).name
    row_bytes = case.head_dim * dtype.itemsize
    block_q, block_kv = case.blocks or default_blocks(device, kernel, row_bytes)
    backward_block_q, _ = case.blocks or default_blocks(device, kernel, row_bytes, backward=True)
    how = dict(
        scale=case.head_dim**-0.5, causal=case.causal, window=case.window, docs=case.docs, kernel=kernel,
        blocks=case.blocks,
    )  # fmt: skip
    shape = (case.num_tokens, case.heads, case.head_dim)
    q, dout = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    kv_shape = (case.num_tokens, case.kv_heads, case.head_dim)
    k, v = (torch.randn(kv_shape, device=device, dtype=dtype) for _ in range(2))
    flops = attention_flops(case)
    forward_s = sustained(lambda: attention(q, k, v, **how), device, seconds)
    backward_s = None
    if backward:
        out, lse = attention(q, k, v, **how)
        backward_s = sustained(lambda: attention_backward(dout, q, k, v, out, lse, **how), device, seconds)
    return AttentionRow(
        kernel, case.num_tokens, case.documents, case.heads, case.kv_heads, case.head_dim,
        block_q, backward_block_q, block_kv, case.window, case.causal, forward_s, flops / forward_s / 1e12,
        backward_s, 2.5 * flops / backward_s / 1e12 if backward_s else None,
    )  # fmt: skip


def sustained(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median seconds of a call in the second half of `seconds` of calls; at least three after a warm-up.

    seconds=0 is one call after the warm-up, for lengths that take minutes.
    """
    call()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < (3 if seconds else 1) or time.perf_counter() - begin < seconds:
        times.append(_timed(call, device))
    return statistics.median(times[len(times) // 2 :])


def _timed(call: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    begin = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(rows: Iterable[AttentionRow]) -> str:
    """Aligned columns, one line per row."""
    names = [field.name for field in fields(AttentionRow)]
    lines = [names] + [[_cell(getattr(row, name)) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- a device ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceSizes:
    """What is measured on: a square matmul, attention over one head of 128, copies; each held for `seconds`."""

    matrix: int
    tokens: int
    copy_bytes: int
    seconds: float


def measure_device(device: torch.device, dtype: torch.dtype, sizes: DeviceSizes) -> dict[str, Any]:
    """The fields of `plan.hardware.Gpu`, each with its source; links to other devices are not measured."""
    row = measure_attention(
        AttentionCase(sizes.tokens), device=device, dtype=dtype, seconds=sizes.seconds, backward=True
    )
    assert row.backward_tflops is not None
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    pcie = _pcie_rate(device, sizes) if on_gpu else _copy_rate(device, sizes)
    known = gpu_named(name) if on_gpu else GPUS["CPU"]
    measured = f"ithaka bench device, {str(dtype).removeprefix('torch.')}"
    values: dict[str, Any] = {
        "matmul_flops": _matmul_rate(device, dtype, sizes),
        "attention_forward_flops": row.forward_tflops * 1e12,
        "attention_backward_flops": row.backward_tflops * 1e12,
        "memory_bytes_s": 2 * _copy_rate(device, sizes),  # read and written
        "pcie_bytes_s": pcie,
    }
    sources = dict.fromkeys(values, measured)
    values["link_bytes_s"] = known.link_bytes_s if known else pcie
    sources["link_bytes_s"] = f"not measured: {known.name}'s" if known else "not measured: as over PCIe"
    properties = torch.cuda.get_device_properties(device) if on_gpu else None
    values["memory_bytes"] = properties.total_memory if properties else psutil.virtual_memory().total
    values["l2_bytes"] = properties.L2_cache_size if properties else GPUS["CPU"].l2_bytes
    sources["memory_bytes"] = "reported by the system"
    sources["l2_bytes"] = "reported by CUDA" if on_gpu else "assumed"
    return {"name": name, **values, "sources": sources}


def _matmul_rate(device: torch.device, dtype: torch.dtype, sizes: DeviceSizes) -> float:
    a_nn, b_nn = (torch.randn(sizes.matrix, sizes.matrix, device=device, dtype=dtype) for _ in range(2))
    into_nn = torch.empty_like(a_nn)
    return 2 * sizes.matrix**3 / sustained(lambda: torch.mm(a_nn, b_nn, out=into_nn), device, sizes.seconds)


def _copy_rate(device: torch.device, sizes: DeviceSizes) -> float:
    source, into = (torch.ones(sizes.copy_bytes // 4, device=device) for _ in range(2))
    return source.nbytes / sustained(lambda: into.copy_(source), device, sizes.seconds)


def _pcie_rate(device: torch.device, sizes: DeviceSizes) -> float:
    """Of the slower direction."""
    here, there = torch.ones(sizes.copy_bytes // 4, device=device), torch.ones(sizes.copy_bytes // 4).pin_memory()
    copies = (lambda: here.copy_(there, non_blocking=True), lambda: there.copy_(here, non_blocking=True))
    return here.nbytes / max(sustained(copy, device, sizes.seconds) for copy in copies)


# --- the ladder -------------------------------------------------------------------------------------------


def ladder_settings(cp: int, tile_tokens: int, dtype: torch.dtype) -> dict[str, Settings]:
    """One technique more in every rung."""
    everything = LayerOptions(checkpoint=False, overlap=False)
    inputs = replace(everything, checkpoint=True)
    offload = replace(inputs, keep_input="host")
    tiles = replace(offload, tile_tokens=tile_tokens)
    kept = replace(tiles, keep_attention="host")
    return {
        "none": Settings(dtype, layer=everything),
        "+ checkpointing": Settings(dtype, layer=inputs),
        "+ offload": Settings(dtype, layer=offload),
        "+ tiles": Settings(dtype, layer=tiles),
        "+ stages": Settings(dtype, cp, tiles),
        "+ kept attention": Settings(dtype, cp, kept),
    }


# --- command line -----------------------------------------------------------------------------------------

bench_app = typer.Typer(no_args_is_help=True, help="Measure what this machine gives.")


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
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "",
    seconds: Annotated[float, typer.Option(help="how long each figure is held")] = 3.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="also write the rows here")] = None,
) -> None:
    """TFLOP/s of attention, forward and backward, sustained on random data."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = _dtype(dtype, device)
    names = available_kernels(device, chosen, head_dim) if kernels == "all" else kernels.split(",")
    rows = []
    for name in names:
        for num_tokens in map(_tokens, tokens.split(",")):
            for block in map(_blocks, blocks.split(",")):
                case = AttentionCase(
                    num_tokens, heads, kv_heads, head_dim, name, block, not bidirectional, window, documents
                )
                rows.append(measure_attention(case, device=device, dtype=chosen, seconds=seconds, backward=backward))
    print(table(rows))
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


@bench_app.command("device")
def bench_device(
    out: Annotated[Path, typer.Option("--out", help="the file to write")] = Path("gpu.json"),
    matrix: Annotated[int | None, typer.Option(min=1, help="rows and columns of the matmul")] = None,
    tokens: Annotated[str | None, typer.Option(help="length for attention, such as 256K")] = None,
    copy: Annotated[str | None, typer.Option(help="size of the copies, such as 1GiB")] = None,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "",
    seconds: Annotated[float, typer.Option(min=0, help="how long each figure is held")] = 3.0,
) -> None:
    """Measures matmul, attention and copies here, and writes them for `ithaka plan --gpu-file`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    large = device.type == "cuda"
    sizes = DeviceSizes(
        matrix or (8192 if large else 1024),
        _tokens(tokens or ("256K" if large else "2K")),
        max(4, parse_bytes(copy or ("1GiB" if large else "64MiB"), "--copy")),
        seconds,
    )
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out} is no file in an existing directory; give another path")
    values = measure_device(device, _dtype(dtype, device), sizes)
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
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "",
    json_path: Annotated[Path | None, typer.Option("--json", help="also write the rows here")] = None,
) -> None:
    """Peak memory and seconds per layer with one technique after the other switched on."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = model_config(model) if model in MODELS else Path(model)
    find_shape(model)  # says what is wrong with the name
    chosen, num_tokens = _dtype(dtype, device), _tokens(context)
    print(f"{'':18}{'peak MiB':>10}{'peak X':>8}{'host MiB':>10}{'forward s':>11}{'backward s':>11}")
    rows = {}
    for name, settings in ladder_settings(ranks, _tokens(tile), chosen).items():
        row = rehearse(
            config, ranks=ranks, cp=ranks, context=num_tokens, layers=layers, settings=settings
        )  # fmt: skip
        rows[name] = asdict(row) | {"peak_x": row.peak_x}
        activations = (row.layer_peak_bytes - row.base_bytes) / 2**20
        seconds = f"{row.forward_s:11.4f}{row.backward_s:11.4f}"
        print(f"{name:18}{activations:10.1f}{row.peak_x:8.2f}{row.host_bytes / 2**20:10.1f}{seconds}")
    print(f"peak of {layers} layers above the same at few tokens; X is one residual-stream tensor of a rank")
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _dtype(name: str, device: torch.device) -> torch.dtype:
    name = name or ("bfloat16" if device.type == "cuda" else "float32")
    if name not in DTYPES:
        raise ConfigError(f"--dtype={name} is not a dtype; use {', '.join(DTYPES)}")
    return DTYPES[name]


def _tokens(text: str) -> int:
    count = parse_count(text.strip())
    if not count:
        raise ConfigError(f"{text!r} is not a number of tokens; write 65536, 64K or 1M")
    return count


def _blocks(text: str) -> tuple[int, int] | None:
    if text.strip() == "auto":
        return None
    block_q, x, block_kv = text.partition("x")
    if not x:
        raise ConfigError(f"--blocks={text} is not q x kv; write 128Kx64K or auto")
    return _tokens(block_q), _tokens(block_kv)
