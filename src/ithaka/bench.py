"""What `ithaka bench` measures: attention's rates, a device's rates, and the settings of the ladder's rungs.

Random data, a warm-up, then calls back to back for several seconds; the median of the second half counts,
since a chip that has just woken up is faster than one that has been working.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from ithaka.attention.blocks import attention, attention_backward, default_blocks
from ithaka.attention.kernels import resolve_kernel
from ithaka.layout import Layout, make_layout
from ithaka.plan.hardware import GPUS, gpu_named


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
) -> dict[str, Any]:
    """One row of the table: the case as it ran, seconds and TFLOP/s."""
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
        # As training calls it: dk and dv join fp32 sums and dq is written over `out`, which is renewed untimed.
        sums = (torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32))
        fresh = out.clone()
        backward_s = sustained(
            lambda: attention_backward(dout, q, k, v, fresh, lse, **how, sums=sums),
            device,
            seconds,
            before=lambda: fresh.copy_(out),
        )
    return {
        "kernel": kernel,
        "tokens": case.num_tokens,
        "documents": case.documents,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "block_q": block_q,
        "backward_block_q": backward_block_q,
        "block_kv": block_kv,
        "window": case.window,
        "causal": case.causal,
        "forward_s": forward_s,
        "forward_tflops": flops / forward_s / 1e12,
        "backward_s": backward_s,
        "backward_tflops": 2.5 * flops / backward_s / 1e12 if backward_s else None,
    }


def sustained(
    call: Callable[[], object],
    device: torch.device,
    seconds: float,
    before: Callable[[], object] = lambda: None,
) -> float:
    """Median seconds of a call in the second half of `seconds` of calls; at least three after a warm-up.

    `before` runs before each call, untimed. seconds=0 is one call after the warm-up, for lengths that take minutes.
    """
    call()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < (3 if seconds else 1) or time.perf_counter() - begin < seconds:
        before()
        _synchronize(device)
        started = time.perf_counter()
        call()
        _synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[len(times) // 2 :])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Aligned columns, one line per row."""
    lines = [list(rows[0])] + [[_cell(value) for value in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
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
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    pcie = _pcie_rate(device, sizes) if on_gpu else _copy_rate(device, sizes)
    known = gpu_named(name) if on_gpu else GPUS["CPU"]
    measured = f"ithaka bench device, {str(dtype).removeprefix('torch.')}"
    values: dict[str, Any] = {
        "matmul_flops": _matmul_rate(device, dtype, sizes),
        "attention_forward_flops": row["forward_tflops"] * 1e12,
        "attention_backward_flops": row["backward_tflops"] * 1e12,
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


def ladder_layouts(num_layers: int, cp: int, tile_tokens: int, dtype: str) -> dict[str, Layout]:
    """One technique more in every rung."""
    everything = make_layout(num_layers, cp=cp, checkpoint=False, overlap=False, dtype=dtype)
    inputs = everything.but(checkpoint=True)
    offload = inputs.but(input_tier="host")
    tiles = offload.but(tile_tokens=tile_tokens)
    stages = tiles.but(heads_per_stage=cp)
    return {
        "none": everything,
        "+ checkpointing": inputs,
        "+ offload": offload,
        "+ tiles": tiles,
        "+ stages": stages,
        "+ kept attention": stages.but(keep_attention=num_layers, attention_tier="host"),
    }
