"""Element-wise steps of decoder layers: RMS norm, gates of MLPs and RoPE, forward and backward.

Each makes one pass over memory if Triton is installed. All compute in fp32 or wider and round once,
except `gate_mul` without Triton, which rounds twice, as Hugging Face does.

Shapes: t rows, D features, F width of an MLP, h heads, K head dim, R rotated dims, b blocks of
rows.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ithaka.ops.fused import launch, num_multiprocessors, power_of_two, runs_kernels

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = _norm_kernel = _norm_backward_kernel = _gate_kernel = _gate_backward_kernel = None
    _rope_kernel = _sum_kernel = None

Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS: dict[Activation, Any] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_BLOCK = 4096  # elements of a program
_ROWS = 64  # rows that a gate without a kernel differentiates at once
_HEADS = 16  # heads of a program, which share cos and sin
_TERMS = 4  # a kernel sums at most this many tensors


# ---- norms


class NormForm(NamedTuple):
    """y = x / sqrt(mean(x^2) + eps) * (offset + weight), of x minus its mean if it is centered."""

    eps: float
    offset: float
    is_centered: bool


def apply_norm(x: Tensor, weight_D: Tensor, form: NormForm, terms: Sequence[Tensor] = ()) -> Tensor:
    """Return y in the dtype of the weight. `terms`: those of `sum_rounded`, if x is its result; y
    is that of the sum before it was rounded."""
    eps, offset, is_centered = form
    if not runs_kernels(x):
        wide = _wide_sum(terms or [x])
        if is_centered:
            wide = wide - wide.mean(-1, keepdim=True)
        y = wide * _norm_factor(wide, eps)
        return y.mul_(offset + weight_D.to(y.dtype)).to(weight_D.dtype)
    into = torch.empty(x.shape, dtype=weight_D.dtype, device=x.device)
    D = x.shape[-1]
    summed = terms if terms and _is_summable(terms) else [x]
    inputs = [_as_rows(term) for term in summed]
    t = len(inputs[0])
    sizes = _norm_sizes(D) | {"COUNT": len(inputs), "CENTERED": is_centered}
    tensors = (into, *_pad(inputs), weight_D)
    scalars = (eps, offset, t, D, inputs[0].stride(0))
    launch(_norm_kernel, (-(-t // sizes["ROWS"]),), *tensors, *scalars, **sizes)
    return into


def norm_backward(x: Tensor, dy: Tensor, weight_D: Tensor, form: NormForm) -> tuple[Tensor, Tensor]:
    """Return dx in the dtype of x, and dweight in fp32 or wider."""
    eps, offset, is_centered = form
    if not runs_kernels(x):
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = x.to(wide)
        d = dy.to(wide)
        if is_centered:
            normed = normed - normed.mean(-1, keepdim=True)
        factor = _norm_factor(normed, eps)
        normed = normed * factor
        dweight_D = (d * normed).flatten(0, -2).sum(0)
        d = d * (offset + weight_D.to(wide))
        if is_centered:
            d = d - d.mean(-1, keepdim=True)
        normed.mul_((d * normed).mean(-1, keepdim=True))
        return d.sub_(normed).mul_(factor).to(x.dtype), dweight_D
    D = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x_tD = _as_rows(x)
    dy_tD = _as_rows(dy)
    sizes = _norm_sizes(D) | {"CENTERED": is_centered}
    programs = min(-(-len(x_tD) // sizes["ROWS"]), 8 * num_multiprocessors(x.device))
    dweight_bD = x.new_empty(programs, D, dtype=torch.float32)
    tensors = (dx, x_tD, dy_tD, weight_D, dweight_bD)
    scalars = (eps, offset, len(x_tD), D, x_tD.stride(0), dy_tD.stride(0))
    launch(_norm_backward_kernel, (programs,), *tensors, *scalars, **sizes)
    return dx, dweight_bD.sum(0)


def _norm_factor(x: Tensor, eps: float) -> Tensor:
    mean = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_() / x.shape[-1]
    return (mean + eps).rsqrt_()


def _as_rows(x: Tensor) -> Tensor:
    """Return x as [t, D] for a kernel. A skipped result has one element for all, which it must not
    read beyond."""
    rows_tD = x.reshape(-1, x.shape[-1])
    return rows_tD if rows_tD.stride(-1) == 1 else rows_tD.contiguous()


def _norm_sizes(num_features: int) -> dict[str, int]:
    cols = power_of_two(num_features)
    return {"ROWS": max(1, _BLOCK // cols), "COLS": cols, "num_warps": 4 if cols <= _BLOCK else 16}


# ---- sums


def sum_rounded(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape in the dtype of the first, summed in fp32 or wider and
    rounded once."""
    into = torch.empty_like(terms[0], memory_format=torch.contiguous_format)
    if runs_kernels(into) and _is_summable(terms):
        grid = (-(-into.numel() // _BLOCK),)
        sizes = {"COUNT": len(terms), "BLOCK": _BLOCK}
        launch(_sum_kernel, grid, into, *_pad(terms), into.numel(), **sizes)
        return into
    return into.copy_(_wide_sum(terms))


def _wide_sum(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0].to(torch.promote_types(terms[0].dtype, torch.float32))
    for term in terms[1:]:
        total = total + term
    return total


def _is_summable(terms: Sequence[Tensor]) -> bool:
    """Whether a kernel can sum the terms."""
    return len(terms) <= _TERMS and all(term.is_contiguous() for term in terms)


def _pad(terms: Sequence[Tensor]) -> list[Tensor]:
    """Repeat the first term: a kernel has as many arguments as it can sum."""
    return [*terms, *[terms[0]] * (_TERMS - len(terms))]


# ---- gates


def gate_mul(gate_tF: Tensor, up_tF: Tensor, into_tF: Tensor, activation: Activation) -> None:
    """Write activation(gate) * up to `into`, which may alias gate."""
    if runs_kernels(gate_tF):
        _launch_gate(_gate_kernel, gate_tF, up_tF, into_tF, activation)
    else:
        _activate_into(gate_tF, into_tF, activation)
        into_tF.mul_(up_tF)


def _activate_into(x: Tensor, into: Tensor, activation: Activation) -> None:
    if activation == "silu":
        torch.ops.aten.silu.out(x, out=into)
    else:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        torch.ops.aten.gelu.out(x, approximate=approximate, out=into)


def gate_mul_backward(
    gate_tF: Tensor, up_tF: Tensor, da_tF: Tensor, activation: Activation
) -> None:
    """Backward of a = activation(gate) * up, in place: gate, up and da become dgate, dup and a."""
    if runs_kernels(gate_tF):
        _launch_gate(_gate_backward_kernel, gate_tF, up_tF, da_tF, activation)
        return
    wide = torch.promote_types(gate_tF.dtype, torch.float32)
    for gate, up, da in zip(*(t.split(_ROWS) for t in (gate_tF, up_tF, da_tF)), strict=True):
        with torch.enable_grad():
            g, u = (t.detach().to(wide).requires_grad_() for t in (gate, up))
            a = ACTIVATIONS[activation](g) * u
        dgate, dup = torch.autograd.grad(a, [g, u], da.to(wide))
        for into, result in zip((gate, up, da), (dgate, dup, a.detach()), strict=True):
            into.copy_(result)


def _launch_gate(
    kernel: Any, gate_tF: Tensor, up_tF: Tensor, into_tF: Tensor, activation: Activation
) -> None:
    tensors = (gate_tF, up_tF, into_tF)
    (t, width) = gate_tF.shape
    assert all(x.stride(1) == 1 for x in tensors)
    row_strides = [x.stride(0) for x in tensors]
    options = {"ACTIVATION": activation, "BLOCK": _BLOCK, "num_warps": 8}
    launch(kernel, (t, -(-width // _BLOCK)), *tensors, width, *row_strides, **options)


# ---- RoPE


class RopeForm(NamedTuple):
    """How RoPE pairs dims, and what it reads of cos and sin, which have R or R / 2 dims."""

    reads_neighbors: bool  # dims 2 i and 2 i + 1 are a pair of the input; else i and i + R / 2
    writes_neighbors: bool  # the same of the output
    # where those of a pair are; "half": R / 2 dims
    cos: Literal["halves", "neighbors", "first half", "half"]


def rotate(
    x_1htK: Tensor, cos_1tR: Tensor, sin_1tR: Tensor, form: RopeForm, backward: bool = False
) -> Tensor:
    """Rotate the first dims of x: (a, b) -> (a cos1 - b sin1, b cos2 + a sin2). `backward`: apply
    the transpose. Return it in the dtype of x, in the memory order [1, t, h, K]."""
    _, h, t, K = x_1htK.shape
    into = torch.empty(1, t, h, K, dtype=x_1htK.dtype, device=x_1htK.device).transpose(1, 2)
    half = cos_1tR.shape[-1] if form.cos == "half" else cos_1tR.shape[-1] // 2
    stride, second = {"halves": (1, half), "neighbors": (2, 1)}.get(form.cos, (1, 0))
    reads = form.reads_neighbors
    writes = form.writes_neighbors
    if backward:
        reads, writes = writes, reads
    if runs_kernels(x_1htK):
        cos_1tR, sin_1tR = (
            table if table.stride(-1) == 1 else table.contiguous() for table in (cos_1tR, sin_1tR)
        )
        tables = (cos_1tR, sin_1tR)
        strides = (*into.stride()[1:3], *x_1htK.stride()[1:], *(x.stride(-2) for x in tables))
        scalars = {"h": h, "t": t, "K": K, "half": half, "second": second}
        flags = {"COS_STRIDE": stride, "READS": reads, "WRITES": writes, "BACKWARD": backward}
        cols = power_of_two(half)
        rows = max(1, 1024 // cols)
        rest = 1 << max(K - 2 * half - 1, 0).bit_length()
        flags |= {"HEADS": _HEADS, "ROWS": rows, "COLS": cols, "REST": rest, "num_warps": 4}
        grid = (-(-t // rows), -(-h // _HEADS))
        launch(_rope_kernel, grid, into, x_1htK, *tables, *strides, **scalars, **flags)
        return into
    wide = torch.promote_types(x_1htK.dtype, torch.float32)
    cos, sin = (table.to(wide)[:, None] for table in (cos_1tR, sin_1tR))
    at = torch.arange(half, device=cos.device) * stride
    (c1, c2), (s1, s2) = ((table[..., at], table[..., at + second]) for table in (cos, sin))
    a, b = (x_1htK[..., part].to(wide) for part in _pair_dims(half, reads))
    into[..., 2 * half :] = x_1htK[..., 2 * half :]
    first, other = _pair_dims(half, writes)
    sign = 1
    if backward:
        s1, s2 = s2, s1
        sign = -1
    into[..., first] = (a * c1).addcmul_(b, s1, value=-sign).to(into.dtype)
    into[..., other] = (b * c2).addcmul_(a, s2, value=sign).to(into.dtype)
    return into


def _pair_dims(half: int, neighbors: bool) -> tuple[slice, slice]:
    if neighbors:
        return slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    return slice(0, half), slice(half, 2 * half)


if triton is not None:

    @triton.jit
    def _load_sum(a, b, c, d, at, inside, COUNT: tl.constexpr):
        """Return the sum in fp32 of the first COUNT tensors."""
        total = tl.load(a + at, inside, other=0.0).to(tl.float32)
        if COUNT > 1:
            total += tl.load(b + at, inside, other=0.0).to(tl.float32)
        if COUNT > 2:
            total += tl.load(c + at, inside, other=0.0).to(tl.float32)
        if COUNT > 3:
            total += tl.load(d + at, inside, other=0.0).to(tl.float32)
        return total

    @triton.jit
    def _sum_kernel(into, a, b, c, d, count, COUNT: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        total = _load_sum(a, b, c, d, at, inside, COUNT)
        tl.store(into + at, total.to(into.dtype.element_ty), inside)

    @triton.jit
    def _norm_kernel(
        into,
        a,
        b,
        c,
        d,
        weight,
        eps,
        offset,
        t,
        D,
        row_stride,
        COUNT: tl.constexpr,
        ROWS: tl.constexpr,
        COLS: tl.constexpr,
        CENTERED: tl.constexpr,
    ):
        rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        cols = tl.arange(0, COLS)
        inside = (rows < t)[:, None] & (cols < D)[None, :]
        v = _load_sum(a, b, c, d, rows[:, None] * row_stride + cols[None, :], inside, COUNT)
        if CENTERED:
            v = tl.where(inside, v - (tl.sum(v, 1) / D)[:, None], 0.0)
        factor = tl.rsqrt(tl.sum(v * v, 1) / D + eps)
        w = tl.load(weight + cols, cols < D, other=0.0).to(tl.float32) + offset
        y = v * factor[:, None] * w[None, :]
        tl.store(into + rows[:, None] * D + cols[None, :], y.to(into.dtype.element_ty), inside)

    @triton.jit
    def _norm_backward_kernel(
        dx,
        x,
        dy,
        weight,
        dweight,
        eps,
        offset,
        t,
        D,
        x_stride,
        dy_stride,
        ROWS: tl.constexpr,
        COLS: tl.constexpr,
        CENTERED: tl.constexpr,
    ):
        cols = tl.arange(0, COLS)
        w = tl.load(weight + cols, cols < D, other=0.0).to(tl.float32) + offset
        dw = tl.zeros((COLS,), tl.float32)
        for first in range(tl.program_id(0) * ROWS, t, tl.num_programs(0) * ROWS):
            rows = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
            inside = (rows < t)[:, None] & (cols < D)[None, :]
            v = tl.load(x + rows[:, None] * x_stride + cols[None, :], inside, other=0.0).to(
                tl.float32
            )
            d = tl.load(dy + rows[:, None] * dy_stride + cols[None, :], inside, other=0.0).to(
                tl.float32
            )
            if CENTERED:
                v = tl.where(inside, v - (tl.sum(v, 1) / D)[:, None], 0.0)
            factor = tl.rsqrt(tl.sum(v * v, 1) / D + eps)[:, None]
            v *= factor
            dw += tl.sum(d * v, 0)
            d *= w[None, :]
            if CENTERED:
                d -= (tl.sum(d, 1) / D)[:, None]
            d = (d - v * (tl.sum(d * v, 1) / D)[:, None]) * factor
            tl.store(dx + rows[:, None] * D + cols[None, :], d.to(dx.dtype.element_ty), inside)
        tl.store(dweight + tl.program_id(0) * D + cols, dw, cols < D)

    @triton.jit
    def _activate(g, ACTIVATION: tl.constexpr):
        """Return the activation and its derivative."""
        if ACTIVATION == "silu":
            s = tl.sigmoid(g)
            return g * s, s + g * s * (1 - s)
        if ACTIVATION == "gelu_tanh":
            inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
            tanh = 2 * tl.sigmoid(2 * inner) - 1
            slope = 0.7978845608028654 * (1 + 0.134145 * g * g)
            return 0.5 * g * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * g * (1 - tanh * tanh) * slope
        cdf = 0.5 * (1 + tl.erf(g * 0.7071067811865476))
        return g * cdf, cdf + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)

    @triton.jit
    def _gate_kernel(
        gate,
        up,
        into,
        width,
        gate_stride,
        up_stride,
        into_stride,
        ACTIVATION: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = cols < width
        g = tl.load(gate + row * gate_stride + cols, inside, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_stride + cols, inside, other=0.0).to(tl.float32)
        acted, _ = _activate(g, ACTIVATION)
        tl.store(into + row * into_stride + cols, (acted * u).to(into.dtype.element_ty), inside)

    @triton.jit
    def _gate_backward_kernel(
        gate,
        up,
        da,
        width,
        gate_stride,
        up_stride,
        da_stride,
        ACTIVATION: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = cols < width
        gate += row * gate_stride + cols
        up += row * up_stride + cols
        da += row * da_stride + cols
        g = tl.load(gate, inside, other=0.0).to(tl.float32)
        u = tl.load(up, inside, other=0.0).to(tl.float32)
        d = tl.load(da, inside, other=0.0).to(tl.float32)
        acted, slope = _activate(g, ACTIVATION)
        tl.store(gate, (d * u * slope).to(gate.dtype.element_ty), inside)
        tl.store(up, (d * acted).to(up.dtype.element_ty), inside)
        tl.store(da, (acted * u).to(da.dtype.element_ty), inside)

    @triton.jit
    def _rope_kernel(
        into,
        x,
        cos,
        sin,
        ih,
        it,
        xh,
        xt,
        xk,
        ct,
        st,
        h,
        t,
        K,
        half,
        second,
        COS_STRIDE: tl.constexpr,
        READS: tl.constexpr,
        WRITES: tl.constexpr,
        BACKWARD: tl.constexpr,
        HEADS: tl.constexpr,
        ROWS: tl.constexpr,
        COLS: tl.constexpr,
        REST: tl.constexpr,
    ):
        rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        cols = tl.arange(0, COLS)
        rest = 2 * half + tl.arange(0, REST)
        inside = (rows < t)[:, None] & (cols < half)[None, :]
        cos += rows[:, None] * ct + (cols * COS_STRIDE)[None, :]
        sin += rows[:, None] * st + (cols * COS_STRIDE)[None, :]
        c1 = tl.load(cos, inside, other=0.0).to(tl.float32)
        s1 = tl.load(sin, inside, other=0.0).to(tl.float32)
        c2 = tl.load(cos + second, inside, other=0.0).to(tl.float32)
        s2 = tl.load(sin + second, inside, other=0.0).to(tl.float32)
        a_cols = cols
        b_cols = cols + half
        if READS:
            a_cols = 2 * cols
            b_cols = 2 * cols + 1
        first_cols = cols
        other_cols = cols + half
        if WRITES:
            first_cols = 2 * cols
            other_cols = 2 * cols + 1
        x += rows[:, None] * xt
        into += rows[:, None] * it
        start = tl.program_id(1) * HEADS
        for head in range(start, tl.minimum(start + HEADS, h)):
            a = tl.load(x + head * xh + a_cols[None, :] * xk, inside, other=0.0).to(tl.float32)
            b = tl.load(x + head * xh + b_cols[None, :] * xk, inside, other=0.0).to(tl.float32)
            if BACKWARD:
                first = a * c1 + b * s2
                other = b * c2 - a * s1
            else:
                first = a * c1 - b * s1
                other = b * c2 + a * s2
            tl.store(
                into + head * ih + first_cols[None, :], first.to(into.dtype.element_ty), inside
            )
            tl.store(
                into + head * ih + other_cols[None, :], other.to(into.dtype.element_ty), inside
            )
            copied = (rows < t)[:, None] & (rest < K)[None, :]
            kept = tl.load(x + head * xh + rest[None, :] * xk, copied, other=0.0)
            tl.store(into + head * ih + rest[None, :], kept, copied)
