"""Activations in one byte per element: float8 (e4m3) codes, and a power of two per block of 32.

Codes are of cubes. e4m3 spends 4 of its 8 bits on a range of 2^18, of which a scaled block needs
little, and rounds by 2.6 % (rms) with any scale. The cube of x / scale, times 448, has a third of
the range and of the error: 1 %. Elements below 1/77 of the scale become 0, so blocks are small: an
outlier affects 31 others.

A packed tensor has the codes of all rows, then the scales. Shapes: t rows of D elements, b =
ceil(D / 32) blocks of d.
"""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ithaka.facts.dtypes import FLOAT8_BLOCK, STAGED_BYTES, float8_bytes
from ithaka.ops.fused import launch, runs_in_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = _quantize_kernel = _dequantize_kernel = None

# A scale is the smallest power of two that no element exceeds, stored as its 8 exponent bits in
# fp32. Adding FRACTION, all of the 23 fraction bits, to the largest element rounds it up.
FRACTION = 0x7FFFFF
LARGEST = 448.0
PROGRAM_BLOCKS = 128  # per program of a kernel


def pack(x_tD: Tensor, packed: Tensor) -> None:
    """Quantize x into `packed`, bytes in host memory, on the current stream, through small buffers
    on its device."""
    for rows, *staged in _stage(x_tD.device, *x_tD.shape):
        quantize(x_tD[rows], *staged)
        for into, part in zip(_split(packed, *x_tD.shape), staged, strict=True):
            into[rows].copy_(part, non_blocking=True)


def unpack(packed: Tensor, num_rows: int, first: int, into_tD: Tensor) -> None:
    """Dequantize the rows from `first` on, out of `num_rows` in `packed`. Otherwise like `pack`."""
    for rows, *staged in _stage(into_tD.device, *into_tD.shape):
        for part, source in zip(staged, _split(packed, num_rows, into_tD.shape[1]), strict=True):
            part.copy_(source[first + rows.start : first + rows.stop], non_blocking=True)
        dequantize_float8(into_tD[rows], *staged)


def _stage(device: torch.device, t: int, D: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield some rows, and buffers for their codes and scales."""
    step = max(1, STAGED_BYTES // max(D, 1))
    for first in range(0, t, step):
        n = min(step, t - first)
        yield (
            slice(first, first + n),
            *_split(torch.empty(float8_bytes(n, D), dtype=torch.uint8, device=device), n, D),
        )


def _split(packed: Tensor, t: int, D: int) -> tuple[Tensor, Tensor]:
    """Return views of the codes, [t, D], and scales, [t, b]."""
    return packed[: t * D].view(t, D), packed[t * D :].view(t, -(-D // FLOAT8_BLOCK))


def quantize(x_tD: Tensor, codes_tD: Tensor, scales_tb: Tensor) -> None:
    """Write the codes and scales of x, bytes. Cubes round to the nearest."""
    if runs_in_triton(x_tD):
        _launch(_quantize_kernel, x_tD, codes_tD, scales_tb)
        return
    t, D = x_tD.shape
    blocks_tbd = F.pad(x_tD.float(), (0, -D % FLOAT8_BLOCK)).view(t, -1, FLOAT8_BLOCK)
    scales_tb.copy_(((blocks_tbd.abs().amax(-1).view(torch.int32) + FRACTION) >> 23).clamp(1, 253))
    scaled_tbd = blocks_tbd * ((254 - scales_tb.int()) << 23).view(torch.float32)[..., None]
    codes_tbd = (scaled_tbd * scaled_tbd * scaled_tbd * LARGEST).to(torch.float8_e4m3fn)
    codes_tD.copy_(codes_tbd.view(torch.uint8).view(t, -1)[:, :D])


def dequantize_float8(into_tD: Tensor, codes_tD: Tensor, scales_tb: Tensor) -> None:
    roots = _cube_roots(into_tD.device)
    if runs_in_triton(into_tD):
        _launch(_dequantize_kernel, into_tD, codes_tD, scales_tb, roots)
        return
    scale_tD = (scales_tb.int() << 23).view(torch.float32).repeat_interleave(FLOAT8_BLOCK, dim=1)
    into_tD.copy_(roots[codes_tD.long()] * scale_tD[:, : codes_tD.shape[1]])


@cache
def _cube_roots(device: torch.device) -> Tensor:
    """Return the value of each code, [256]."""
    cubes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double() / LARGEST
    return (cubes.sign() * cubes.abs() ** (1 / 3)).float().to(device)


def _launch(kernel, x_tD: Tensor, codes_tD: Tensor, scales_tb: Tensor, *table: Tensor) -> None:
    assert x_tD.is_contiguous()
    (t, D) = x_tD.shape
    b = scales_tb.shape[1]
    grid = (-(-t * b // PROGRAM_BLOCKS),)
    sizes = {"BLOCK": FLOAT8_BLOCK, "BLOCKS": PROGRAM_BLOCKS}
    launch(kernel, grid, x_tD, codes_tD, scales_tb, *table, t * b, D, b, **sizes, num_warps=4)


if triton is not None:

    @triton.jit
    def _block_positions(num_blocks, D, b, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
        """Return this program's blocks, [BLOCKS], their elements, [BLOCKS, BLOCK], and masks of
        both."""
        block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
        col = (block % b * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
        is_block = block < num_blocks
        return block, (block // b)[:, None] * D + col, is_block, is_block[:, None] & (col < D)

    @triton.jit
    def _quantize_kernel(
        x, codes, scales, num_blocks, D, b, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
    ):
        block, at, is_block, is_inside = _block_positions(num_blocks, D, b, BLOCK, BLOCKS)
        values = tl.load(x + at, is_inside, other=0.0).to(tl.float32)
        bits = tl.max(tl.abs(values), 1).to(tl.int32, bitcast=True)
        scale = tl.minimum(tl.maximum((bits + 0x7FFFFF) >> 23, 1), 253)
        scaled = values * ((254 - scale) << 23).to(tl.float32, bitcast=True)[:, None]
        tl.store(scales + block, scale.to(tl.uint8), is_block)
        cubes = (scaled * scaled * scaled * 448.0).to(tl.float8e4nv)
        tl.store(codes + at, cubes.to(tl.uint8, bitcast=True), is_inside)

    @triton.jit
    def _dequantize_kernel(
        into, codes, scales, roots, num_blocks, D, b, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
    ):
        block, at, is_block, is_inside = _block_positions(num_blocks, D, b, BLOCK, BLOCKS)
        scale = (tl.load(scales + block, is_block, other=1).to(tl.int32) << 23).to(
            tl.float32, bitcast=True
        )
        values = tl.load(roots + tl.load(codes + at, is_inside, other=0).to(tl.int32))
        tl.store(into + at, (values * scale[:, None]).to(into.dtype.element_ty), is_inside)
