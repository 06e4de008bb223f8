"""Element-wise steps between the large kernels, each in one pass over memory with Triton.

Shapes: B score blocks in the batch, h heads, t tokens of a block or tile, K head dim, Y vocabulary.
Tensors may be strided except in K. All compute in fp32 and round once.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ithaka.foreign.torch_core import FakeTensor
from ithaka.phases import count

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = _merge_kernel = _logsumexp_kernel = _softmax_grad_kernel = None
    _cross_entropy_kernel = _scale_kernel = None

NO_LOG = -1e30  # log-probability where a logit is -inf: 0 * -inf and -inf - -inf would be NaN
KERNEL_BYTES = "moved by kernels"  # what `launch` counts
TRACED_SMS = 132  # multiprocessors of the GPU that a trace counts the bytes of: an H200's


def runs_in_triton(x: Tensor) -> bool:
    """Whether the functions below run in Triton. Traces count meta tensors as a GPU's."""
    return (x.is_meta or (triton is not None and x.is_cuda)) and x.dtype != torch.float64


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
    """Launch a Triton kernel; if its first tensor has no memory, count the bytes that it moves."""
    if not (args[0].is_meta or isinstance(args[0], FakeTensor)):
        kernel[grid](*args, **settings)
        return
    tensors = {id(t): t for t in args if isinstance(t, Tensor)}
    count(KERNEL_BYTES, sum(t.nbytes for t in tensors.values()))


def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return TRACED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def runs_kernels(x: Tensor) -> bool:
    """Whether Triton kernels run. Fake tensors count as a GPU's: the planner measures them."""
    return runs_in_triton(x) or isinstance(x, FakeTensor)


def merge_softmax(
    sum_out_BhtK: Tensor, sum_lse_Bht: Tensor, out_BhtK: Tensor, lse_Bht: Tensor
) -> None:
    """Merge the softmax of one score block into the running one, in place. `sum_lse` may be -inf
    (empty), `lse` not."""
    if runs_in_triton(sum_out_BhtK):
        _launch(_merge_kernel, sum_out_BhtK, sum_lse_Bht, out_BhtK, lse_Bht)
        return
    new_lse = torch.logaddexp(sum_lse_Bht, lse_Bht)
    sum_out_BhtK.mul_((sum_lse_Bht - new_lse).exp_()[..., None])
    sum_out_BhtK.addcmul_(out_BhtK.to(sum_out_BhtK.dtype), (lse_Bht - new_lse).exp_()[..., None])
    sum_lse_Bht.copy_(new_lse)


def row_logsumexp(
    logits_tY: Tensor, details: bool = False, scale: float = 1.0
) -> tuple[Tensor, ...]:
    """Return the log-sum-exp of every row of logits * scale and, with `details`, the mean of these
    logits under their softmax and the plain mean. In fp32 or wider."""
    wide = torch.promote_types(logits_tY.dtype, torch.float32)
    if not runs_in_triton(logits_tY):
        wide_tY = logits_tY.to(wide) if scale == 1.0 else logits_tY.to(wide) * scale
        lse_t = wide_tY.logsumexp(-1)
        if not details:
            return (lse_t,)
        log_p_tY = (wide_tY - lse_t[:, None]).clamp_(min=NO_LOG)
        return lse_t, lse_t + log_p_tY.exp().mul_(log_p_tY).sum(-1), wide_tY.mean(-1)
    t, Y = logits_tY.shape
    values_nt = logits_tY.new_empty(3 if details else 1, t, dtype=wide)
    sizes = (t, Y, _row_stride(logits_tY), scale)
    launch(_logsumexp_kernel, (t,), logits_tY, values_nt, *sizes, DETAILS=details, **_FLAT)
    return values_nt.unbind()


def softmax_grad(
    logits_tY: Tensor,
    target_t: Tensor,
    lse_t: Tensor,
    scale_t: Tensor,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> None:
    """(softmax(logits) - one-hot(target)) * scale, written over the logits.

    `entropy`: the gradients of the softmax entropies and the entropies, [t] each, whose gradient is
    added.
    """
    if runs_in_triton(logits_tY):
        (t, Y) = logits_tY.shape
        more = (lse_t, lse_t)
        if entropy is not None:
            more = (entropy[0].to(torch.float32), entropy[1])
        values = (target_t, lse_t, scale_t.to(torch.float32), *more, Y, _row_stride(logits_tY))
        grid = (t, -(-Y // _FLAT["BLOCK"]))
        launch(_softmax_grad_kernel, grid, logits_tY, *values, ENTROPY=entropy is not None, **_FLAT)
        return
    log_p_tY = logits_tY.to(lse_t.dtype).sub_(lse_t[:, None])
    if entropy is not None:
        dentropy_t, entropy_t = entropy
        log_p_tY.clamp_(min=NO_LOG)
        added_tY = (log_p_tY + entropy_t[:, None]).mul_(log_p_tY.exp()).mul_(-dentropy_t[:, None])
    p_tY = log_p_tY.exp_()
    p_tY.scatter_add_(1, target_t[:, None], p_tY.new_full((), -1.0).expand(len(p_tY), 1))
    p_tY.mul_(scale_t[:, None])
    logits_tY.copy_(p_tY if entropy is None else p_tY.add_(added_tY))


def cross_entropy_with_grad(logits_tY: Tensor, target_t: Tensor, scale_t: Tensor) -> Tensor:
    """Return each row's loss in fp32 or wider; overwrite the logits with its gradient times `scale`
    (>= 0)."""
    if runs_in_triton(logits_tY):
        (t, Y) = logits_tY.shape
        loss_t = scale_t.new_empty(t, dtype=torch.float32)
        values = (target_t, scale_t.to(torch.float32), loss_t, Y, _row_stride(logits_tY))
        launch(_cross_entropy_kernel, (t,), logits_tY, *values, **_ROWS)
        return loss_t
    (lse_t,) = row_logsumexp(logits_tY)
    loss_t = lse_t - logits_tY.gather(1, target_t[:, None])[:, 0]
    softmax_grad(logits_tY, target_t, lse_t, scale_t)
    return loss_t


def _row_stride(logits_tY: Tensor) -> int:
    assert logits_tY.stride(1) == 1
    return logits_tY.stride(0)


def scale_in_place(x: Tensor, factor: Tensor) -> None:
    """x *= factor, a scalar tensor. On a GPU, x is not touched if the factor is 1."""
    if runs_in_triton(x) and x.is_contiguous():
        grid = (-(-x.numel() // _FLAT["BLOCK"]),)
        launch(_scale_kernel, grid, x, factor.to(torch.float32), x.numel(), **_FLAT)
    else:
        x.mul_(factor)


_TILE_ROWS = 32
_FLAT: dict[str, Any] = {"BLOCK": 4096, "num_warps": 8}
_ROWS: dict[str, Any] = {"LOG2E": math.log2(math.e), "BLOCK": 16384, "LANE": 8, "num_warps": 32}


def _launch(kernel, *tensors: Tensor) -> None:
    B, h, t, K = tensors[0].shape
    assert all(x.stride(-1) == 1 for x in tensors if x.dim() == 4)
    strides = [s for x in tensors for s in x.stride()[:3]]
    tiles = -(-t // _TILE_ROWS)
    options = {"ROWS": _TILE_ROWS, "COLS": power_of_two(K), "num_warps": 4}
    launch(kernel, (tiles * B * h,), *tensors, *strides, h, t, tiles, K, **options)


if triton is not None:

    @triton.jit
    def _program_position(h, t, tiles, ROWS: tl.constexpr):
        """Return this program's repetition, head and rows in 64 bits, because strides times rows
        exceed 2^31."""
        at = tl.program_id(0).to(tl.int64)
        rows = (at % tiles) * ROWS + tl.arange(0, ROWS)
        return at // tiles // h, at // tiles % h, rows

    @triton.jit
    def _merge_kernel(
        sum_out,
        sum_lse,
        out,
        lse,
        sb,
        sh,
        st,
        ub,
        uh,
        ut,
        ob,
        oh,
        ot,
        lb,
        lh,
        lt,
        h,
        t,
        tiles,
        K,
        ROWS: tl.constexpr,
        COLS: tl.constexpr,
    ):
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
        y = tl.load(
            out + b * ob + head * oh + rows[:, None] * ot + cols[None, :], inside, other=0.0
        )
        tl.store(sum_out, x + y.to(tl.float32) * tl.exp(new - total)[:, None], inside)
        tl.store(sum_lse, total, seen)

    @triton.jit
    def _logsumexp_kernel(
        logits, values, t, Y, row_stride, scale, DETAILS: tl.constexpr, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        cols = tl.arange(0, BLOCK)
        # Each lane keeps its own maximum and sums until the end; -1e30 and not -inf, because -inf -
        # -inf is NaN.
        top = tl.full((BLOCK,), -1e30, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        weighted = tl.zeros((BLOCK,), tl.float32)
        plain = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, Y, BLOCK):
            x = (
                tl.load(logits + row * row_stride + start + cols, start + cols < Y, other=-1e30).to(
                    tl.float32
                )
                * scale
            )
            higher = tl.maximum(top, x)
            shrunk = tl.exp(tl.minimum(top, x) - higher)  # the other exponential is 1
            total = tl.where(x > top, total * shrunk + 1.0, total + shrunk)
            if DETAILS:
                finite = tl.maximum(x, -1e30)  # 0 * -inf is NaN, too
                weighted = tl.where(x > top, weighted * shrunk + x, weighted + shrunk * finite)
                plain += tl.where(start + cols < Y, x, 0.0)
            top = higher
        highest = tl.max(top, 0)
        sum_of_all = tl.sum(total * tl.exp(top - highest), 0)
        tl.store(values + row, highest + tl.log(sum_of_all))
        if DETAILS:
            tl.store(values + t + row, tl.sum(weighted * tl.exp(top - highest), 0) / sum_of_all)
            tl.store(values + 2 * t + row, tl.sum(plain, 0) / Y)

    @triton.jit
    def _softmax_grad_kernel(
        logits,
        target,
        lse,
        scale,
        dentropy,
        entropy,
        Y,
        row_stride,
        ENTROPY: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        at = logits + row * row_stride + cols
        x = tl.load(at, cols < Y, other=0.0).to(tl.float32)
        log_p = x - tl.load(lse + row)
        dx = (tl.exp(log_p) - tl.where(cols == tl.load(target + row), 1.0, 0.0)) * tl.load(
            scale + row
        )
        if ENTROPY:
            log_p = tl.maximum(log_p, -1e30)
            dx -= tl.exp(log_p) * (log_p + tl.load(entropy + row)) * tl.load(dentropy + row)
        tl.store(at, dx.to(logits.dtype.element_ty), cols < Y)

    @triton.jit
    def _cross_entropy_kernel(
        logits,
        target,
        scale,
        loss,
        Y,
        row_stride,
        LOG2E: tl.constexpr,
        BLOCK: tl.constexpr,
        LANE: tl.constexpr,
    ):
        """Uses exp2, which takes one multiply-add per logit."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * row_stride
        label = tl.load(target + row)
        factor = tl.load(scale + row)
        label_logit = tl.load(logits + label).to(tl.float32)
        cols = tl.arange(0, BLOCK)
        # see _logsumexp_kernel; a lane has several columns
        top = tl.full((BLOCK // LANE,), -1e30, tl.float32)
        total = tl.zeros((BLOCK // LANE,), tl.float32)
        for start in range(0, Y, BLOCK):
            x = tl.load(logits + start + cols, start + cols < Y, other=-1e30).to(tl.float32)
            x = tl.reshape(x, (BLOCK // LANE, LANE))
            higher = tl.maximum(top, tl.max(x, 1) * LOG2E)
            total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(x * LOG2E - higher[:, None]), 1)
            top = higher
        highest = tl.max(top, 0)
        log2_sum = highest + tl.log2(tl.sum(total * tl.exp2(top - highest), 0))
        tl.store(loss + row, log2_sum / LOG2E - label_logit)
        # infinite for a factor of 0, which makes all gradients 0
        shift = log2_sum - tl.log2(factor)
        for start in range(0, Y, BLOCK):
            at = start + cols
            x = tl.load(logits + at, at < Y, other=-1e30).to(tl.float32)
            tl.store(logits + at, tl.exp2(x * LOG2E - shift).to(logits.dtype.element_ty), at < Y)
        tl.debug_barrier()  # the label's gradient is written twice
        dlabel = (tl.exp2(label_logit * LOG2E - log2_sum) - 1.0) * factor
        tl.store(logits + label, dlabel.to(logits.dtype.element_ty))

    @triton.jit
    def _scale_kernel(x, factor, count, BLOCK: tl.constexpr):
        by = tl.load(factor)
        if by != 1.0:
            at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = at < count
            tl.store(
                x + at,
                (tl.load(x + at, inside, other=0.0).to(tl.float32) * by).to(x.dtype.element_ty),
                inside,
            )
