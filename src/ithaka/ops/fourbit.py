"""Frozen four-bit weights: stored packed, and unpacked for one pass of a layer.

Weights are packed in rows of 16384, in the order of the full tensor: first the codes, two per byte
with the first in the high bits, then the scales of the row's blocks. A row is self-contained, so
FSDP2 can shard and gather rows. The bytes are viewed as the compute dtype, because FSDP2 would cast
any other dtype, including uint8, to it.

nf4 and fp4 are bitsandbytes' formats, in blocks of 64. With double quantization a scale is a byte,
from a table that is scaled per row, plus the offset of the tensor. mxfp4 is OCP's: blocks of 32,
each with a power of two. weights/formats.py chooses, reads and describes packed weights.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ithaka.config.base_formats import BASE_FORMATS, ROW
from ithaka.foreign.torch_core import keep_version
from ithaka.ops.fused import launch, runs_in_triton
from ithaka.phases import MemoryCategory, allocating_for

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = _dequantize_kernel = None

TABLES = {
    "nf4": (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    "fp4": tuple(sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3)),
    "mxfp4": tuple(sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)),
}
SCALES_AT = ROW // 2  # byte at which a row's scales start
CHUNK_ROWS = 64  # unpacked or quantized at once without Triton
SMALLEST = 1e-38  # bitsandbytes' lower bound of a divisor
PROGRAM = 4096  # weights per program of the kernel


class Scales(IntEnum):
    """How the scale of a block is stored; the kernel's KIND."""

    FLOAT = 0
    DOUBLE = 1  # a byte; the row ends with the scale and offset of the bytes, padded to 16
    EXPONENT = 2


class RowLayout(NamedTuple):
    """The bits of a packed row."""

    codes: str  # a key of TABLES
    scales: Scales
    block: int  # weights per scale
    scale_bytes: int  # bytes of all scales in a row
    row_bytes: int
    is_transposed: bool = False  # gpt-oss stores the transpose of its experts


NF4 = RowLayout("nf4", Scales.DOUBLE, 64, ROW // 64, BASE_FORMATS["nf4"].row_bytes)
# without double quantization
NF4_SINGLE = RowLayout("nf4", Scales.FLOAT, 64, ROW // 16, SCALES_AT + ROW // 16)
MXFP4 = RowLayout(
    "mxfp4", Scales.EXPONENT, 32, ROW // 32, BASE_FORMATS["mxfp4"].row_bytes, is_transposed=True
)


@cache
def _table(codes: str, device: torch.device) -> Tensor:
    if codes in TABLES:
        return torch.tensor(TABLES[codes], dtype=torch.float32, device=device)
    values = [0.0, 1.0]  # bitsandbytes' signed dynamic map of 8 bits
    for i in range(7):
        bounds = torch.linspace(0.1, 1, 2**i + 1)
        means = (10 ** (i - 6) * ((bounds[:-1] + bounds[1:]) / 2)).tolist()
        values += [sign * mean for mean in means for sign in (1, -1)]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


def _nearest(x: Tensor, scale: Tensor, codes: str) -> Tensor:
    """Return the indices of the table values nearest to x / scale."""
    table = _table(codes, x.device)
    normed = (x * (1 / scale.clamp(min=SMALLEST))[..., None]).clamp(-1, 1)
    return torch.bucketize(normed, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)


def block_scales(flat: Tensor) -> Tensor:
    """Return the largest absolute value of each block of 64, in fp32."""
    parts = [part.float().view(-1, 64).abs().amax(1) for part in flat.split(CHUNK_ROWS * ROW)]
    return torch.cat(parts)


def quantize_nf4(flat: Tensor, scales: Tensor, offset: Tensor) -> Tensor:
    """Pack weights into rows of bytes, double-quantized. `offset`: the mean of `block_scales`."""
    codes = [_quantize_blocks(part.float().view(-1, 64)) for part in flat.split(CHUNK_ROWS * ROW)]
    scales = nn.functional.pad(scales - offset, (0, -len(scales) % (ROW // 64))).view(-1, ROW // 64)
    row_scales = scales.abs().amax(1)
    packed = torch.cat(codes)
    return pack_rows(packed, _nearest(scales, row_scales, "dynamic"), NF4, row_scales, offset)


def _quantize_blocks(blocks: Tensor) -> Tensor:
    codes = _nearest(blocks, blocks.abs().amax(1), "nf4").view(-1, 2)
    return (codes[:, 0] << 4) | codes[:, 1]


def quantize_mxfp4(flat: Tensor) -> Tensor:
    """Pack weights into rows of bytes. A block's exponent: its largest value's, less two (OCP)."""
    blocks = flat.float().view(-1, 32)
    table = _table("mxfp4", flat.device)[:8]
    exponents = (blocks.abs().amax(1).frexp().exponent - 3).clamp(-127, 127)
    bounds = (table[:-1] + table[1:]) / 2
    sizes = torch.bucketize(torch.ldexp(blocks, -exponents[:, None]).abs(), bounds)
    codes = (sizes + 8 * (blocks < 0)).to(torch.uint8).view(-1, 2)
    return pack_rows((codes[:, 0] << 4) | codes[:, 1], (exponents + 127).to(torch.uint8), MXFP4)


def quantize_matrix(flat: Tensor, layout: RowLayout) -> Tensor:
    """Pack a full matrix into rows of bytes."""
    if layout == MXFP4:
        return quantize_mxfp4(flat)
    scales = block_scales(flat)
    return quantize_nf4(flat, scales, scales.double().mean().float())


def pack_rows(
    codes: Tensor,
    scales: Tensor,
    layout: RowLayout,
    row_scales: Tensor | float = 0,
    offset: Tensor | float = 0,
) -> Tensor:
    """Pack codes, two per byte, and the scales of their blocks: bytes with double quantization."""
    num_rows = -(-len(codes) // SCALES_AT)
    scales = scales.contiguous().view(torch.uint8).flatten()
    packed = torch.zeros(num_rows, layout.row_bytes, dtype=torch.uint8, device=codes.device)
    for at, values, width in ((0, codes, SCALES_AT), (SCALES_AT, scales, layout.scale_bytes)):
        padding = num_rows * width - len(values)
        packed[:, at : at + width] = nn.functional.pad(values, (0, padding)).view(-1, width)
    if layout.scales == Scales.DOUBLE:
        at = (SCALES_AT + layout.scale_bytes) // 4
        packed.view(torch.float32)[:, at] = row_scales
        packed.view(torch.float32)[:, at + 1] = offset
    return packed


def dequantize(packed: Tensor, layout: RowLayout, into: Tensor) -> None:
    """Dequantize rows of bytes to `into`, one or several matrices, contiguous: products in fp32,
    rounded once. Each matrix starts a new row."""
    num_matrices = len(into) if into.dim() == 3 else 1
    matrices = into.view(num_matrices, -1)
    num_rows = len(packed) // num_matrices
    if runs_in_triton(into):
        tables = (_table(layout.codes, packed.device), _table("dynamic", packed.device))
        tensors = (packed, packed.view(torch.float32), *tables, into)
        counts = (num_rows, matrices.shape[1])
        sizes = {"ROW": ROW, "BYTES": layout.row_bytes, "PART": PROGRAM}
        # without fused multiply-adds, for the same bits as bitsandbytes
        options = {"KIND": int(layout.scales), "num_warps": 8, "enable_fp_fusion": False}
        grid = (len(packed) * (ROW // PROGRAM),)
        launch(_dequantize_kernel, grid, *tensors, *counts, **sizes, **options)
        return
    for matrix, matrix_rows in zip(matrices, packed.split(num_rows), strict=True):
        chunks = zip(matrix.split(CHUNK_ROWS * ROW), matrix_rows.split(CHUNK_ROWS), strict=True)
        for out, rows in chunks:
            codes = rows[:, :SCALES_AT]
            indices = torch.stack((codes >> 4, codes & 15), -1).view(-1, layout.block)
            values = _table(layout.codes, rows.device)[indices.int()]
            values = values * _row_scales(rows, layout).reshape(-1, 1)
            out.copy_(values.view(-1)[: len(out)])


def _row_scales(rows: Tensor, layout: RowLayout) -> Tensor:
    """Return the scales of all blocks in some rows, in fp32."""
    if layout.scales == Scales.EXPONENT:
        return (rows[:, SCALES_AT:].int() << 23).view(torch.float32)  # the byte is an exponent
    floats = rows.view(torch.float32)
    if layout.scales == Scales.FLOAT:
        return floats[:, SCALES_AT // 4 :]
    end = SCALES_AT + layout.scale_bytes
    dynamic = _table("dynamic", rows.device)
    row_scale = floats[:, end // 4, None]
    offset = floats[:, end // 4 + 1, None]
    return dynamic[rows[:, SCALES_AT:end].int()] * row_scale + offset


class Sliceable(Protocol):
    """A tensor, maybe in a file."""

    def __getitem__(self, rows: slice, /) -> Tensor: ...


class PackedWeight:
    """Replaces a module's frozen parameter: `packed_NAME` is the parameter, and NAME is a tensor
    with storage only inside `unpacked`. Each matrix of a 3-D parameter is packed separately."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        layout: RowLayout,
        dtype: torch.dtype,
        rows: Tensor | None = None,
    ) -> None:
        """`rows`: the packed bytes, if already known."""
        param = module._parameters.pop(name)
        assert param is not None
        self.module = module
        self.name = name
        self.layout = layout
        self.shape = param.shape
        if layout.is_transposed:
            self.shape = torch.Size((param.shape[0], param.shape[2], param.shape[1]))
        num_rows = -(-math.prod(self.shape[-2:]) // ROW)
        shape = (*self.shape[:-2], num_rows, layout.row_bytes // dtype.itemsize)
        if rows is None:
            packed = torch.empty(shape, dtype=dtype, device=param.device)
        else:
            packed = rows.view(dtype).view(shape)
        module.register_parameter(f"packed_{name}", nn.Parameter(packed, requires_grad=False))
        self.weight = torch.empty(self.shape, dtype=dtype, device="meta")
        self.install()
        module.__dict__.setdefault("packed_weights", []).append(self)

    def install(self) -> None:
        """Make the weight an attribute of the module, but not a parameter."""
        weight = self.weight.transpose(1, 2) if self.layout.is_transposed else self.weight
        self.module.__dict__[self.name] = weight

    @property
    def packed(self) -> Tensor:
        """The parameter in its current FSDP2 state: sharded or gathered."""
        return getattr(self.module, f"packed_{self.name}")

    def unpack(self) -> None:
        packed = self.packed.detach().view(torch.uint8).view(-1, self.layout.row_bytes)
        if self.weight.is_meta:
            self.weight = torch.empty_like(self.weight, device=packed.device)
            self.install()
        self.weight.untyped_storage().resize_(self.weight.numel() * self.weight.itemsize)
        # Graphs may hold the tensor between passes; its values are the same in every pass.
        with keep_version(self.weight):
            dequantize(packed, self.layout, self.weight)

    def release(self) -> None:
        self.weight.untyped_storage().resize_(0)

    def write(self, full: Sliceable, local: Tensor, rows: slice) -> None:
        """Quantize this rank's shard of the parameter, `rows` of its first dim, from slices of the
        full weight, rounded to bf16 as transformers does with dtype=bfloat16. Collective: the
        offset is that of the full matrix."""
        raw = local.view(torch.uint8)
        width = self.shape[-1]
        device = full.device if isinstance(full, Tensor) and full.is_cuda else raw.device
        options: Any = {"device": device, "dtype": torch.bfloat16}
        if len(self.shape) == 3:
            for into, matrix in zip(raw, full[rows], strict=True):
                into.copy_(quantize_matrix(matrix.flatten().to(**options), self.layout))
            return
        first, last = (min(row * ROW, math.prod(self.shape)) for row in (rows.start, rows.stop))
        start = first // width
        flat = full[start : -(-last // width)].flatten()
        flat = flat[first - start * width : last - start * width].to(**options)
        scales = block_scales(flat)
        total = torch.stack(
            [scales.double().sum(), scales.new_tensor(len(scales), dtype=torch.float64)]
        )
        if isinstance(self.packed, DTensor):
            mesh = self.packed.device_mesh
            total = total.to(mesh.device_type)
            dist.all_reduce(total, group=mesh.get_group(mesh.ndim - 1))
        offset = (total[0] / total[1]).float().to(device)
        if len(raw):
            raw.copy_(quantize_nf4(flat, scales, offset))


def packed_weights(model: nn.Module) -> dict[str, PackedWeight]:
    """Return a model's packed weights by the names of the parameters that they replace."""
    return {
        f"{path}.{weight.name}" if path else weight.name: weight
        for path, module in model.named_modules()
        for weight in module.__dict__.get("packed_weights", ())
    }


@contextmanager
def unpacked(weights: Sequence[PackedWeight]) -> Iterator[None]:
    """Unpack weights on entry, and release them on exit."""
    try:
        with allocating_for(MemoryCategory.UNSHARDED):
            for weight in weights:
                weight.unpack()
        yield
    finally:
        for weight in weights:
            weight.release()


if triton is not None:

    @triton.jit
    def _dequantize_kernel(
        packed,
        floats,
        table,
        dynamic,
        into,
        num_rows,
        count,
        ROW: tl.constexpr,
        BYTES: tl.constexpr,
        PART: tl.constexpr,
        KIND: tl.constexpr,
    ):
        """Unpack matrices of `count` weights, `num_rows` rows each. KIND 0: a scale in fp32 per
        block of 64; 1: double quantization; 2: mxfp4."""
        parts: tl.constexpr = ROW // PART
        row = (tl.program_id(0) // parts).to(tl.int64)
        part = tl.program_id(0) % parts
        byte = part * (PART // 2) + tl.arange(0, PART // 2)
        codes = tl.load(packed + row * BYTES + byte)
        unscaled = tl.interleave(
            tl.load(table + (codes >> 4).to(tl.int32)), tl.load(table + (codes & 15).to(tl.int32))
        )
        BLOCK: tl.constexpr = 32 if KIND == 2 else 64
        block = part * (PART // BLOCK) + tl.arange(0, PART // BLOCK)
        if KIND == 0:
            scales = tl.load(floats + row * (BYTES // 4) + ROW // 8 + block)
        else:
            scale_bytes = tl.load(packed + row * BYTES + ROW // 2 + block)
            if KIND == 1:
                at = floats + row * (BYTES // 4) + ROW // 8 + ROW // 256
                scales = tl.load(dynamic + scale_bytes.to(tl.int32)) * tl.load(at) + tl.load(at + 1)
            else:
                scales = (scale_bytes.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        values = tl.reshape(unscaled, (PART // BLOCK, BLOCK)) * scales[:, None]
        at = row % num_rows * ROW + part * PART + tl.arange(0, PART)
        into += row // num_rows * count
        tl.store(into + at, tl.reshape(values, (PART,)).to(into.dtype.element_ty), at < count)
