"""Activations in one byte per element: float8 (e4m3) codes, and a power of two for each block of 128 in a row.

e4m3 has exponents of its own, so powers of two are as accurate as finer scales; they take one byte, and decoding to
bf16 is exact. A packed tensor has the codes of all rows, then the scales of all rows.

Shapes: R rows of W elements, B = ceil(W / 128) blocks in a row.
"""

from collections.abc import Iterator

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

# A scale is the smallest 2^e with max / 2^e <= 448 = 1.75 * 2^8, stored as the exponent bits of 2^e in fp32. Adding
# CARRY to the bits of the maximum increments its exponent if its fraction exceeds 1.75.
CARRY, FRACTION_BITS, MAX_EXPONENT = 0x1FFFFF, 23, 8
PROGRAM_BLOCKS = 32  # per program of a kernel


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
    """Write the codes and scales of x, bytes. Values round to the nearest, ties to even."""
    if runs_in_triton(x_RW):
        _launch(_quantize_kernel, x_RW, codes_RW, scales_RB)
        return
    R, W = x_RW.shape
    blocks_RBn = F.pad(x_RW.float(), (0, -W % FLOAT8_BLOCK)).view(R, -1, FLOAT8_BLOCK)
    bits_RB = blocks_RBn.abs().amax(-1).view(torch.int32)
    scales_RB.copy_((((bits_RB + CARRY) >> FRACTION_BITS) - MAX_EXPONENT).clamp(min=1))
    inverse_RB = ((254 - scales_RB.int()) << FRACTION_BITS).view(torch.float32)
    codes_RBn = (blocks_RBn * inverse_RB[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    codes_RW.copy_(codes_RBn.view(R, -1)[:, :W])


def dequantize(codes_RW: Tensor, scales_RB: Tensor, into_RW: Tensor) -> None:
    if runs_in_triton(into_RW):
        _launch(_dequantize_kernel, into_RW, codes_RW, scales_RB)
        return
    values_RW = codes_RW.view(torch.float8_e4m3fn).float()
    scale_RB = (scales_RB.int() << FRACTION_BITS).view(torch.float32)
    into_RW.copy_(values_RW * scale_RB.repeat_interleave(FLOAT8_BLOCK, dim=1)[:, : values_RW.shape[1]])


def _launch(kernel, x_RW: Tensor, codes_RW: Tensor, scales_RB: Tensor) -> None:
    assert x_RW.is_contiguous()
    (R, W), B = x_RW.shape, scales_RB.shape[1]
    sizes = {"BLOCK": FLOAT8_BLOCK, "BLOCKS": PROGRAM_BLOCKS}
    bits = {"CARRY": CARRY, "FRACTION_BITS": FRACTION_BITS, "MAX_EXPONENT": MAX_EXPONENT}
    grid = (-(-R * B // PROGRAM_BLOCKS),)
    launch(kernel, grid, x_RW, codes_RW, scales_RB, R * B, W, B, **sizes, **bits, num_warps=4)


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
        x, codes, scales, num_blocks, W, B, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
        CARRY: tl.constexpr, FRACTION_BITS: tl.constexpr, MAX_EXPONENT: tl.constexpr,
    ):  # fmt: skip
        block, at, is_block, is_inside = _block_positions(num_blocks, W, B, BLOCK, BLOCKS)
        values = tl.load(x + at, is_inside, other=0.0).to(tl.float32)
        bits = tl.max(tl.abs(values), 1).to(tl.int32, bitcast=True)
        scale = tl.maximum(((bits + CARRY) >> FRACTION_BITS) - MAX_EXPONENT, 1)
        inverse = ((254 - scale) << FRACTION_BITS).to(tl.float32, bitcast=True)
        tl.store(scales + block, scale.to(tl.uint8), is_block)
        tl.store(codes + at, (values * inverse[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True), is_inside)

    @triton.jit
    def _dequantize_kernel(
        into, codes, scales, num_blocks, W, B, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
        CARRY: tl.constexpr, FRACTION_BITS: tl.constexpr, MAX_EXPONENT: tl.constexpr,
    ):  # fmt: skip
        block, at, is_block, is_inside = _block_positions(num_blocks, W, B, BLOCK, BLOCKS)
        scale = (tl.load(scales + block, is_block, other=1).to(tl.int32) << FRACTION_BITS).to(tl.float32, bitcast=True)
        values = tl.load(codes + at, is_inside, other=0).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        tl.store(into + at, (values * scale[:, None]).to(into.dtype.element_ty), is_inside)
