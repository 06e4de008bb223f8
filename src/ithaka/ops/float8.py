"""Activations in one byte per element: float8 (e4m3) codes, and a power of two for each block of 32 in a row.

Codes are of cubes. e4m3 spends 4 of its 8 bits on a range of 2^18, of which a scaled block needs little, and rounds by
2.6 % (rms) with any scale. The cube of x / scale, times 448, uses a third of the range in exchange for a third of the
error: 0.9 %. Elements below 1/77 of the scale become 0, so blocks are small: an outlier affects 31 others.
A packed tensor has the codes of all rows, then the scales of all rows.

Shapes: R rows of W elements, B = ceil(W / 32) blocks in a row.
"""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ithaka.layout import FLOAT8_BLOCK, STAGED_BYTES
from ithaka.ops.fused import launch, runs_in_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = _quantize_kernel = _dequantize_kernel = None

# A scale is the smallest power of two that no element exceeds, stored as its exponent bits in fp32: FRACTION is added
# to the bits of the largest element, which rounds them up.
FRACTION, FRACTION_BITS = 0x7FFFFF, 23
LARGEST = 448.0  # of e4m3
PROGRAM_BLOCKS = 128  # per program of a kernel


def pack(x_RW: Tensor, packed: Tensor) -> None:
    """Quantize x into `packed`, bytes in host memory, through small buffers on its device, on the current stream."""
    R, W = x_RW.shape
    for rows in _staged_rows(R, W):
        staged = _make_parts(rows, W, x_RW.device)
        quantize(x_RW[rows], *staged)
        for into, part in zip(_split(packed, R, W), staged, strict=True):
            into[rows].copy_(part, non_blocking=True)
        del part, staged  # before the next ones are allocated


def unpack(packed: Tensor, num_rows: int, first: int, into_RW: Tensor) -> None:
    """Dequantize the rows from `first` on, out of `num_rows` in `packed`. Otherwise like `pack`."""
    R, W = into_RW.shape
    for rows in _staged_rows(R, W):
        staged = _make_parts(rows, W, into_RW.device)
        for part, source in zip(staged, _split(packed, num_rows, W), strict=True):
            part.copy_(source[first + rows.start : first + rows.stop], non_blocking=True)
        dequantize(*staged, into_RW[rows])
        del part, staged


def _staged_rows(num_rows: int, width: int) -> Iterator[slice]:
    step = max(1, STAGED_BYTES // max(width, 1))
    for first in range(0, num_rows, step):
        yield slice(first, min(first + step, num_rows))


def _make_parts(rows: slice, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    num_rows, num_blocks = rows.stop - rows.start, -(-width // FLOAT8_BLOCK)
    codes_RW = torch.empty(num_rows, width, dtype=torch.uint8, device=device)
    return codes_RW, torch.empty(num_rows, num_blocks, dtype=torch.uint8, device=device)


def _split(packed: Tensor, num_rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return views of the codes, [R, W], and scales, [R, B]."""
    codes, scales = packed[: num_rows * width], packed[num_rows * width :]
    return codes.view(num_rows, width), scales.view(num_rows, -(-width // FLOAT8_BLOCK))


def quantize(x_RW: Tensor, codes_RW: Tensor, scales_RB: Tensor) -> None:
    """Write the codes and scales of x, bytes. Cubes round to the nearest."""
    if runs_in_triton(x_RW):
        _launch(_quantize_kernel, x_RW, codes_RW, scales_RB)
        return
    R, W = x_RW.shape
    blocks_RBn = F.pad(x_RW.float(), (0, -W % FLOAT8_BLOCK)).view(R, -1, FLOAT8_BLOCK)
    bits_RB = blocks_RBn.abs().amax(-1).view(torch.int32)
    scales_RB.copy_(((bits_RB + FRACTION) >> FRACTION_BITS).clamp(1, 253))
    scaled_RBn = blocks_RBn * ((254 - scales_RB.int()) << FRACTION_BITS).view(torch.float32)[..., None]
    codes_RBn = (scaled_RBn * scaled_RBn * scaled_RBn * LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    codes_RW.copy_(codes_RBn.view(R, -1)[:, :W])


def dequantize(codes_RW: Tensor, scales_RB: Tensor, into_RW: Tensor) -> None:
    roots = _cube_roots(into_RW.device)
    if runs_in_triton(into_RW):
        _launch(_dequantize_kernel, into_RW, codes_RW, scales_RB, roots)
        return
    scale_RB = (scales_RB.int() << FRACTION_BITS).view(torch.float32)
    scale_RW = scale_RB.repeat_interleave(FLOAT8_BLOCK, dim=1)[:, : codes_RW.shape[1]]
    into_RW.copy_(roots[codes_RW.long()] * scale_RW)


@cache
def _cube_roots(device: torch.device) -> Tensor:
    """Return the value of each code, [256]."""
    cubes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double() / LARGEST
    return (cubes.sign() * cubes.abs() ** (1 / 3)).float().to(device)


def _launch(kernel, x_RW: Tensor, codes_RW: Tensor, scales_RB: Tensor, *table: Tensor) -> None:
    assert x_RW.is_contiguous()
    (R, W), B = x_RW.shape, scales_RB.shape[1]
    constants = {"BLOCK": FLOAT8_BLOCK, "BLOCKS": PROGRAM_BLOCKS, "FRACTION_BITS": FRACTION_BITS}
    grid = (-(-R * B // PROGRAM_BLOCKS),)
    launch(kernel, grid, x_RW, codes_RW, scales_RB, *table, R * B, W, B, **constants, num_warps=4)


if triton is not None:

    @triton.jit
    def _block_positions(num_blocks, W, B, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
        """Return this program's blocks, [BLOCKS], their elements, [BLOCKS, BLOCK], and masks of both."""
        block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
        col = (block % B * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
        is_block = block < num_blocks
        return block, (block // B)[:, None] * W + col, is_block, is_block[:, None] & (col < W)

    @triton.jit
    def _quantize_kernel(
        x, codes, scales, num_blocks, W, B,
        BLOCK: tl.constexpr, BLOCKS: tl.constexpr, FRACTION_BITS: tl.constexpr,
    ):  # fmt: skip
        block, at, is_block, is_inside = _block_positions(num_blocks, W, B, BLOCK, BLOCKS)
        values = tl.load(x + at, is_inside, other=0.0).to(tl.float32)
        bits = tl.max(tl.abs(values), 1).to(tl.int32, bitcast=True)
        scale = tl.minimum(tl.maximum((bits + 0x7FFFFF) >> FRACTION_BITS, 1), 253)
        scaled = values * ((254 - scale) << FRACTION_BITS).to(tl.float32, bitcast=True)[:, None]
        cubes = scaled * scaled * scaled * 448.0
        tl.store(scales + block, scale.to(tl.uint8), is_block)
        tl.store(codes + at, cubes.to(tl.float8e4nv).to(tl.uint8, bitcast=True), is_inside)

    @triton.jit
    def _dequantize_kernel(
        into, codes, scales, roots, num_blocks, W, B,
        BLOCK: tl.constexpr, BLOCKS: tl.constexpr, FRACTION_BITS: tl.constexpr,
    ):  # fmt: skip
        block, at, is_block, is_inside = _block_positions(num_blocks, W, B, BLOCK, BLOCKS)
        scale = (tl.load(scales + block, is_block, other=1).to(tl.int32) << FRACTION_BITS).to(tl.float32, bitcast=True)
        values = tl.load(roots + tl.load(codes + at, is_inside, other=0).to(tl.int32))
        tl.store(into + at, (values * scale[:, None]).to(into.dtype.element_ty), is_inside)
