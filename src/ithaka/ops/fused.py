"""Element-wise steps between the large kernels, each in one pass over memory if Triton is installed.

Shapes: B score blocks in the batch (in `apply_rope`, ranks), h heads, t tokens of a block or tile, K head dim, D
hidden, F MLP width, V vocabulary, p programs. Tensors may be strided except in K. All compute in fp32 and round once,
except `silu_mul` without Triton, which rounds twice, as Hugging Face does.
"""

import math
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = _merge_kernel = _rotate_kernel = _add_rounded_kernel = _rms_norm_backward_kernel = None
    _silu_mul_kernel = _silu_mul_backward_kernel = _logsumexp_kernel = _softmax_grad_kernel = None
    _cross_entropy_kernel = _scale_kernel = None

TRACED_SMS = 132  # multiprocessors of the GPU that a trace counts the bytes of: an H200's


def runs_in_triton(x: Tensor) -> bool:
    """Whether the functions below run in Triton for tensors like x. On the meta device, traces count what the kernels
    allocate on a GPU."""
    return (x.is_meta or (triton is not None and x.is_cuda)) and x.dtype != torch.float64


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
    """Launch a Triton kernel, unless its first tensor has no memory."""
    if not args[0].is_meta:
        kernel[grid](*args, **settings)


def num_multiprocessors(device: torch.device) -> int:
    return TRACED_SMS if device.type == "meta" else torch.cuda.get_device_properties(device).multi_processor_count


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def merge_softmax(sum_out_BhtK: Tensor, sum_lse_Bht: Tensor, out_BhtK: Tensor, lse_Bht: Tensor) -> None:
    """Merge the softmax of one score block into the running one, in place. `sum_lse` may be -inf (empty), `lse` not."""
    if runs_in_triton(sum_out_BhtK):
        _launch(_merge_kernel, sum_out_BhtK, sum_lse_Bht, out_BhtK, lse_Bht)
        return
    new_lse = torch.logaddexp(sum_lse_Bht, lse_Bht)
    sum_out_BhtK.mul_((sum_lse_Bht - new_lse).exp_()[..., None])
    sum_out_BhtK.addcmul_(out_BhtK.to(sum_out_BhtK.dtype), (lse_Bht - new_lse).exp_()[..., None])
    sum_lse_Bht.copy_(new_lse)


class Positions:
    """The positions of t tokens, the k = K / 2 RoPE frequencies, and the factor that scales the rotated result.

    Angles are positions times Hugging Face's frequencies, in fp64: fp32 would be off by 0.03 rad at 1M tokens.
    """

    def __init__(self, positions_t: Tensor, inv_freq_k: Tensor, scaling: float, sign: int = 1) -> None:
        self.positions_t, self.inv_freq_k, self.scaling, self.sign = positions_t, inv_freq_k, scaling, sign
        self._tables: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.positions_t)

    def narrow(self, dim: int, start: int, length: int) -> "Positions":
        return Positions(self.positions_t.narrow(dim, start, length), self.inv_freq_k, self.scaling, self.sign)

    @property
    def inverse(self) -> "Positions":
        """The inverse rotation, which is also the transpose."""
        return Positions(self.positions_t, self.inv_freq_k, self.scaling, -self.sign)

    def tables(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos_tK, and sin_tK with its first half negated, in fp32 (fp64 for fp64). Cached."""
        wide = torch.promote_types(dtype, torch.float32)
        if wide not in self._tables:
            angles_tk = self.positions_t.double()[:, None] * self.inv_freq_k.double()
            if wide != torch.float64:
                angles_tk = angles_tk.remainder(_TWO_PI).to(wide)
            cos_tk, sin_tk = angles_tk.cos() * self.scaling, angles_tk.sin() * (self.scaling * self.sign)
            self._tables[wide] = torch.cat((cos_tk, cos_tk), -1), torch.cat((-sin_tk, sin_tk), -1)
        return self._tables[wide]


def apply_rope(into_BhtK: Tensor, x_BhtK: Tensor, positions: Positions) -> None:
    """Apply RoPE (with Hugging Face's pairing of dimensions i and i + K / 2) to x and write the result to `into`."""
    if runs_in_triton(x_BhtK):
        _launch_rotate(into_BhtK, x_BhtK, positions)
        return
    cos_tK, sin_tK = positions.tables(x_BhtK.dtype)
    wide_BhtK = x_BhtK.to(cos_tK.dtype)
    into_BhtK.copy_((wide_BhtK * cos_tK).addcmul_(wide_BhtK.roll(x_BhtK.shape[-1] // 2, -1), sin_tK))


def add_and_round(sum_tD: Tensor, x_tD: Tensor) -> Tensor:
    """sum += x, in place; return the sum rounded to the dtype of x, which may alias `sum`."""
    if runs_in_triton(x_tD) and x_tD.dtype != sum_tD.dtype:
        _launch_flat(_add_rounded_kernel, sum_tD, x_tD, rounded_tD := torch.empty_like(x_tD))
        return rounded_tD
    return sum_tD.add_(x_tD).to(x_tD.dtype)


def rms_norm_backward(into_tD: Tensor, x_tD: Tensor, dy_tD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Add dx of y = x / sqrt(mean(x^2) + eps) * weight to `into`; return dweight in fp32 or wider."""
    if not runs_in_triton(x_tD):
        wide = torch.promote_types(x_tD.dtype, torch.float32)
        factor_t1 = x_tD.to(wide).square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        y_tD, d_tD = x_tD * factor_t1, dy_tD.to(wide)
        dweight_D = (d_tD * y_tD).sum(0)
        d_tD = d_tD * weight_D
        d_tD -= y_tD * (d_tD * y_tD).mean(-1, keepdim=True)
        into_tD.copy_(d_tD.mul_(factor_t1).add_(into_tD))
        return dweight_D
    assert all(x.is_contiguous() for x in (into_tD, x_tD, dy_tD))
    (t, D), block = x_tD.shape, power_of_two(x_tD.shape[1])
    programs = min(t, 8 * num_multiprocessors(x_tD.device))
    dweight_pD = x_tD.new_empty(programs, D, dtype=torch.float32)
    tensors, warps = (into_tD, x_tD, dy_tD, weight_D, dweight_pD), 4 if block <= 4096 else 32
    launch(_rms_norm_backward_kernel, (programs,), *tensors, eps, t, D, BLOCK=block, num_warps=warps)
    return dweight_pD.sum(0)


def silu_mul(gate_tF: Tensor, up_tF: Tensor, into_tF: Tensor) -> None:
    """Write silu(gate) * up to `into`, which may alias gate."""
    if runs_in_triton(gate_tF):
        _launch_flat(_silu_mul_kernel, gate_tF, up_tF, into_tF)
    else:
        torch.ops.aten.silu.out(gate_tF, out=into_tF).mul_(up_tF)


def silu_mul_backward(gate_tF: Tensor, up_tF: Tensor, da_tF: Tensor) -> None:
    """Backward of a = silu(gate) * up, in place: dgate into gate, dup into up, and a into da."""
    if runs_in_triton(gate_tF):
        _launch_flat(_silu_mul_backward_kernel, gate_tF, up_tF, da_tF)
        return
    for rows in zip(*(x.split(_TILE_ROWS) for x in (gate_tF, up_tF, da_tF)), strict=True):
        _silu_mul_backward_rows(*rows)


def _silu_mul_backward_rows(gate: Tensor, up: Tensor, da: Tensor) -> None:
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, u, d = gate.to(wide), up.to(wide), da.to(wide)  # aliases if no cast is needed
    sigmoid = g.sigmoid()
    silu = g * sigmoid
    a = silu * u
    gate.copy_(torch.addcmul(sigmoid, silu, 1 - sigmoid).mul_(u).mul_(d))
    up.copy_(silu.mul_(d))
    da.copy_(a)


def row_logsumexp(logits_tV: Tensor, details: bool = False) -> tuple[Tensor, ...]:
    """Return the log-sum-exp of every row and, with `details`, the mean of its logits under their softmax and the
    plain mean.

    In fp32 or wider.
    """
    wide = torch.promote_types(logits_tV.dtype, torch.float32)
    if not runs_in_triton(logits_tV):
        wide_tV = logits_tV.to(wide)
        lse_t = wide_tV.logsumexp(-1)
        if not details:
            return (lse_t,)
        log_p_tV = wide_tV - lse_t[:, None]
        return lse_t, lse_t + log_p_tV.exp().mul_(log_p_tV).sum(-1), wide_tV.mean(-1)
    t, V = logits_tV.shape
    values_nt = logits_tV.new_empty(3 if details else 1, t, dtype=wide)
    launch(
        _logsumexp_kernel,
        (t,),
        logits_tV,
        values_nt,
        t,
        V,
        _row_stride(logits_tV),
        DETAILS=details,
        BLOCK=_FLAT_BLOCK,
        num_warps=8,
    )
    return values_nt.unbind()


def softmax_grad(
    logits_tV: Tensor, target_t: Tensor, lse_t: Tensor, scale_t: Tensor, entropy: tuple[Tensor, Tensor] | None = None
) -> None:
    """(softmax(logits) - one-hot(target)) * scale, written over the logits.

    `entropy`: the gradients of the softmax entropies and the entropies, [t] each, whose gradient is added.
    """
    if runs_in_triton(logits_tV):
        (t, V), values = logits_tV.shape, (target_t, lse_t, scale_t.to(torch.float32))
        more = (lse_t, lse_t) if entropy is None else (entropy[0].to(torch.float32), entropy[1])
        grid = (t, -(-V // _FLAT_BLOCK))
        launch(
            _softmax_grad_kernel,
            grid,
            logits_tV,
            *values,
            *more,
            V,
            _row_stride(logits_tV),
            ENTROPY=entropy is not None,
            BLOCK=_FLAT_BLOCK,
            num_warps=8,
        )
        return
    log_p_tV = logits_tV.to(lse_t.dtype).sub_(lse_t[:, None])
    if entropy is not None:
        dentropy_t, entropy_t = entropy
        added_tV = (log_p_tV + entropy_t[:, None]).mul_(log_p_tV.exp()).mul_(-dentropy_t[:, None])
    p_tV = log_p_tV.exp_()
    p_tV.scatter_add_(1, target_t[:, None], p_tV.new_full((), -1.0).expand(len(p_tV), 1))
    p_tV.mul_(scale_t[:, None])
    logits_tV.copy_(p_tV if entropy is None else p_tV.add_(added_tV))


def cross_entropy_with_grad(logits_tV: Tensor, target_t: Tensor, scale_t: Tensor) -> Tensor:
    """Return each row's loss in fp32 or wider; overwrite the logits with its gradient times `scale` (>= 0)."""
    if runs_in_triton(logits_tV):
        loss_t = scale_t.new_empty(len(logits_tV), dtype=torch.float32)
        values = (target_t, scale_t.to(torch.float32), loss_t, logits_tV.shape[1], _row_stride(logits_tV))
        launch(
            _cross_entropy_kernel,
            (len(logits_tV),),
            logits_tV,
            *values,
            LOG2E=_LOG2E,
            BLOCK=_LOGITS_BLOCK,
            LANE=8,
            num_warps=32,
        )
        return loss_t
    (lse_t,) = row_logsumexp(logits_tV)
    loss_t = lse_t - logits_tV.gather(1, target_t[:, None])[:, 0]
    softmax_grad(logits_tV, target_t, lse_t, scale_t)
    return loss_t


def _row_stride(logits_tV: Tensor) -> int:
    assert logits_tV.stride(1) == 1
    return logits_tV.stride(0)


def scale_in_place(x: Tensor, factor: Tensor) -> None:
    """x *= factor, a scalar tensor. On a GPU, x is not touched if the factor is 1."""
    if runs_in_triton(x) and x.is_contiguous():
        launch(
            _scale_kernel,
            (-(-x.numel() // _FLAT_BLOCK),),
            x,
            factor.to(torch.float32),
            x.numel(),
            BLOCK=_FLAT_BLOCK,
            num_warps=8,
        )
    else:
        x.mul_(factor)


_TWO_PI, _LOG2E = 2 * math.pi, math.log2(math.e)
_TILE_ROWS = 32
_HEADS_PER_PROGRAM = 4  # they share the angles
_FLAT_BLOCK = 4096
_LOGITS_BLOCK = 16384  # columns


def _launch(kernel, *tensors: Tensor) -> None:
    B, h, t, K = tensors[0].shape
    assert all(x.stride(-1) == 1 for x in tensors if x.dim() == 4)
    strides = [s for x in tensors for s in x.stride()[:3]]
    tiles = -(-t // _TILE_ROWS)
    launch(
        kernel, (tiles * B * h,), *tensors, *strides, h, t, tiles, K, ROWS=_TILE_ROWS, COLS=power_of_two(K), num_warps=4
    )


def _launch_rotate(into_BhtK: Tensor, x_BhtK: Tensor, positions: Positions) -> None:
    B, h, t, K = x_BhtK.shape
    tensors = into_BhtK, x_BhtK, positions.positions_t, positions.inv_freq_k
    assert all(x.stride(-1) == 1 for x in tensors)
    assert len(positions) == t and len(positions.inv_freq_k) == K // 2
    scales = float(positions.scaling), float(positions.scaling * positions.sign)
    strides = *into_BhtK.stride()[:3], *x_BhtK.stride()[:3]
    rows, half = _TILE_ROWS // 2, K // 2  # half the rows: 56 registers per thread at K = 128, not 107
    tiles, groups = -(-t // rows), -(-h // _HEADS_PER_PROGRAM)
    sizes = {
        "ROWS": rows,
        "HEADS": _HEADS_PER_PROGRAM,
        "HALF": half,
        "COLS": power_of_two(half),
        "TURN": _TWO_PI,
    }
    launch(
        _rotate_kernel, (tiles * B * groups,), *tensors, *scales, *strides, h, t, tiles, groups, **sizes, num_warps=4
    )


def _launch_flat(kernel, *tensors: Tensor) -> None:
    assert all(x.is_contiguous() for x in tensors)
    count = tensors[0].numel()
    launch(kernel, (-(-count // _FLAT_BLOCK),), *tensors, count, BLOCK=_FLAT_BLOCK, num_warps=8)


if triton is not None:

    @triton.jit
    def _program_position(h, t, tiles, ROWS: tl.constexpr):
        """Return this program's repetition, head and rows in 64 bits, because strides times rows exceed 2^31."""
        at = tl.program_id(0).to(tl.int64)
        rows = (at % tiles) * ROWS + tl.arange(0, ROWS)
        return at // tiles // h, at // tiles % h, rows

    @triton.jit
    def _merge_kernel(
        sum_out, sum_lse, out, lse, sb, sh, st, ub, uh, ut, ob, oh, ot, lb, lh, lt, h, t, tiles, K,
        ROWS: tl.constexpr, COLS: tl.constexpr,
    ):  # fmt: skip
        b, head, rows = _program_position(h, t, tiles, ROWS)
        cols = tl.arange(0, COLS)
        seen = rows < t
        inside = seen[:, None] & (cols < K)[None, :]
        sum_lse += b * ub + head * uh + rows * ut
        sum_out += b * sb + head * sh + rows[:, None] * st + cols[None, :]
        old = tl.load(sum_lse, seen, other=0.0)
        new = tl.load(lse + b * lb + head * lh + rows * lt, seen, other=0.0)
        top = tl.maximum(old, new)
        total = top + tl.log(tl.exp(old - top) + tl.exp(new - top))
        x = tl.load(sum_out, inside, other=0.0) * tl.exp(old - total)[:, None]
        y = tl.load(out + b * ob + head * oh + rows[:, None] * ot + cols[None, :], inside, other=0.0)
        tl.store(sum_out, x + y.to(tl.float32) * tl.exp(new - total)[:, None], inside)
        tl.store(sum_lse, total, seen)

    @triton.jit
    def _rotate_kernel(
        into, x, positions, inv_freq, cos_scale, sin_scale, ib, ih, it, xb, xh, xt, h, t, tiles, groups,
        ROWS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, COLS: tl.constexpr, TURN: tl.constexpr,
    ):  # fmt: skip
        b, group, rows = _program_position(groups, t, tiles, ROWS)
        cols = tl.arange(0, COLS)
        inside = (rows < t)[:, None] & (cols < HALF)[None, :]
        position = tl.load(positions + rows, rows < t, other=0).to(tl.float64)
        angle = position[:, None] * tl.load(inv_freq + cols, cols < HALF, other=0.0).to(tl.float64)[None, :]
        angle = (angle - tl.floor(angle * (1 / TURN)) * TURN).to(tl.float32)
        cos, sin = tl.cos(angle) * cos_scale, tl.sin(angle) * sin_scale
        x += b * xb + rows[:, None] * xt + cols[None, :]
        into += b * ib + rows[:, None] * it + cols[None, :]
        for head in range(group * HEADS, tl.minimum(group * HEADS + HEADS, h)):
            first = tl.load(x + head * xh, inside, other=0.0).to(tl.float32)
            second = tl.load(x + head * xh + HALF, inside, other=0.0).to(tl.float32)
            tl.store(into + head * ih, (first * cos - second * sin).to(into.dtype.element_ty), inside)
            tl.store(into + head * ih + HALF, (second * cos + first * sin).to(into.dtype.element_ty), inside)

    @triton.jit
    def _add_rounded_kernel(sum_, x, rounded, count, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        total = tl.load(sum_ + at, inside, other=0.0) + tl.load(x + at, inside, other=0.0).to(tl.float32)
        tl.store(sum_ + at, total, inside)
        tl.store(rounded + at, total.to(rounded.dtype.element_ty), inside)

    @triton.jit
    def _rms_norm_backward_kernel(into, x, dy, weight, dweight, eps, t, D, BLOCK: tl.constexpr):
        cols = tl.arange(0, BLOCK)
        inside = cols < D
        w = tl.load(weight + cols, inside, other=0.0).to(tl.float32)
        dw = tl.zeros((BLOCK,), tl.float32)
        for row in range(tl.program_id(0), t, tl.num_programs(0)):
            at = tl.cast(row, tl.int64) * D + cols
            x_row = tl.load(x + at, inside, other=0.0).to(tl.float32)
            d_row = tl.load(dy + at, inside, other=0.0).to(tl.float32)
            sum_row = tl.load(into + at, inside, other=0.0).to(tl.float32)
            factor = tl.rsqrt(tl.sum(x_row * x_row, 0) / D + eps)
            x_row *= factor
            dw += d_row * x_row
            d_row *= w
            sum_row += (d_row - x_row * (tl.sum(d_row * x_row, 0) / D)) * factor
            tl.store(into + at, sum_row.to(into.dtype.element_ty), inside)
        tl.store(dweight + tl.program_id(0) * D + cols, dw, inside)

    @triton.jit
    def _silu_mul_kernel(gate, up, into, count, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        g = tl.load(gate + at, inside, other=0.0).to(tl.float32)
        u = tl.load(up + at, inside, other=0.0).to(tl.float32)
        tl.store(into + at, (g * tl.sigmoid(g) * u).to(into.dtype.element_ty), inside)

    @triton.jit
    def _silu_mul_backward_kernel(gate, up, da, count, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        g = tl.load(gate + at, inside, other=0.0).to(tl.float32)
        u = tl.load(up + at, inside, other=0.0).to(tl.float32)
        d = tl.load(da + at, inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(g)
        silu = g * s
        tl.store(gate + at, (d * u * (s + silu * (1 - s))).to(gate.dtype.element_ty), inside)
        tl.store(up + at, (d * silu).to(gate.dtype.element_ty), inside)
        tl.store(da + at, (silu * u).to(gate.dtype.element_ty), inside)

    @triton.jit
    def _logsumexp_kernel(logits, values, t, V, row_stride, DETAILS: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        cols = tl.arange(0, BLOCK)
        # Each lane keeps its own maximum and sums until the end; -1e30 and not -inf, because -inf - -inf is NaN.
        top = tl.full((BLOCK,), -1e30, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        weighted = tl.zeros((BLOCK,), tl.float32)
        plain = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            x = tl.load(logits + row * row_stride + start + cols, start + cols < V, other=-1e30).to(tl.float32)
            higher = tl.maximum(top, x)
            shrunk = tl.exp(tl.minimum(top, x) - higher)  # the other exponential is 1
            total = tl.where(x > top, total * shrunk + 1.0, total + shrunk)
            if DETAILS:
                weighted = tl.where(x > top, weighted * shrunk + x, weighted + shrunk * x)
                plain += tl.where(start + cols < V, x, 0.0)
            top = higher
        highest = tl.max(top, 0)
        sum_of_all = tl.sum(total * tl.exp(top - highest), 0)
        tl.store(values + row, highest + tl.log(sum_of_all))
        if DETAILS:
            tl.store(values + t + row, tl.sum(weighted * tl.exp(top - highest), 0) / sum_of_all)
            tl.store(values + 2 * t + row, tl.sum(plain, 0) / V)

    @triton.jit
    def _softmax_grad_kernel(
        logits, target, lse, scale, dentropy, entropy, V, row_stride, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        at = logits + row * row_stride + cols
        x = tl.load(at, cols < V, other=0.0).to(tl.float32)
        log_p = x - tl.load(lse + row)
        dx = (tl.exp(log_p) - tl.where(cols == tl.load(target + row), 1.0, 0.0)) * tl.load(scale + row)
        if ENTROPY:
            dx -= tl.exp(log_p) * (log_p + tl.load(entropy + row)) * tl.load(dentropy + row)
        tl.store(at, dx.to(logits.dtype.element_ty), cols < V)

    @triton.jit
    def _cross_entropy_kernel(
        logits, target, scale, loss, V, row_stride, LOG2E: tl.constexpr, BLOCK: tl.constexpr, LANE: tl.constexpr
    ):
        """Uses exp2, which takes one multiply-add per logit."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * row_stride
        label, factor = tl.load(target + row), tl.load(scale + row)
        label_logit = tl.load(logits + label).to(tl.float32)
        cols = tl.arange(0, BLOCK)
        top = tl.full((BLOCK // LANE,), -1e30, tl.float32)  # see _logsumexp_kernel; a lane has several columns
        total = tl.zeros((BLOCK // LANE,), tl.float32)
        for start in range(0, V, BLOCK):
            x = tl.load(logits + start + cols, start + cols < V, other=-1e30).to(tl.float32)
            x = tl.reshape(x, (BLOCK // LANE, LANE))
            higher = tl.maximum(top, tl.max(x, 1) * LOG2E)
            total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(x * LOG2E - higher[:, None]), 1)
            top = higher
        highest = tl.max(top, 0)
        log2_sum = highest + tl.log2(tl.sum(total * tl.exp2(top - highest), 0))
        tl.store(loss + row, log2_sum / LOG2E - label_logit)
        shift = log2_sum - tl.log2(factor)  # infinite for a factor of 0, which makes all gradients 0
        for start in range(0, V, BLOCK):
            at = start + cols
            x = tl.load(logits + at, at < V, other=-1e30).to(tl.float32)
            tl.store(logits + at, tl.exp2(x * LOG2E - shift).to(logits.dtype.element_ty), at < V)
        tl.debug_barrier()  # the label's gradient is written twice
        dlabel = (tl.exp2(label_logit * LOG2E - log2_sum) - 1.0) * factor
        tl.store(logits + label, dlabel.to(logits.dtype.element_ty))

    @triton.jit
    def _scale_kernel(x, factor, count, BLOCK: tl.constexpr):
        by = tl.load(factor)
        if by != 1.0:
            at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = at < count
            tl.store(x + at, (tl.load(x + at, inside, other=0.0).to(tl.float32) * by).to(x.dtype.element_ty), inside)
