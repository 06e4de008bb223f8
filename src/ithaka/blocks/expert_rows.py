"""Steps of an MoE layer on rows sorted by expert: grouped matmuls, gates and sums.

A row is one (token, expert) pair. Rows of the same expert are consecutive, so that one kernel
multiplies all rows with their experts' weights; only the device knows where an expert's rows end.
On a GPU, each of the other steps makes one pass over memory, in fp32.

Shapes: t tokens of a tile, k experts per token, a = t * k rows, E experts, D input features, M
output features, F width of an expert.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ithaka.blocks.tiles import add_matmul, sum_dtype
from ithaka.foreign.hugging_face import gate_function, has_default_gate
from ithaka.ops.fused import launch, power_of_two, runs_kernels
from ithaka.phases import count

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = _sum_choices_kernel = _gate_kernel = _gate_backward_kernel = _add_products_kernel = (
        None
    )

_BLOCK = 1024  # elements of a row that one program reads at once
_ROWS = 8192  # rows that a gate without a kernel computes at once


class SortedAssignments(NamedTuple):
    """The choices of a tile's tokens, sorted by expert."""

    token_a: Tensor
    expert_a: Tensor
    row_tk: Tensor  # the row of each choice
    ends_E: Tensor  # int32, the row after an expert's last

    @classmethod
    def sort(cls, expert_tk: Tensor, num_experts: int) -> "SortedAssignments":
        expert_a, order_a = expert_tk.flatten().to(torch.int16).sort(stable=True)
        row_a = torch.empty_like(order_a)
        row_a[order_a] = torch.arange(len(order_a), device=order_a.device)
        experts_E = torch.arange(num_experts, dtype=torch.int16, device=expert_a.device)
        ends_E = torch.searchsorted(expert_a, experts_E, right=True, out_int32=True)
        token_a = order_a // expert_tk.shape[1]
        return cls(token_a, expert_a.int(), row_a.view(expert_tk.shape), ends_E)

    def take(self, values_tk: Tensor) -> Tensor:
        """Return values of choices in the order of rows."""
        values_a = values_tk.new_empty(values_tk.numel())
        return values_a.scatter_(0, self.row_tk.flatten(), values_tk.flatten())


def multiply_groups(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply groups of consecutive rows, [a, D] @ [E, D, M] -> [a, M], or of columns of `a`,
    [D, a] @ [a, M] -> [E, D, M]. Not differentiable."""
    if can_group(a, b):
        return F.grouped_mm(a, b, offs=ends_E)
    if b.dim() == 3:
        return torch.cat([a[rows] @ b[e] for e, rows in enumerate(_groups(ends_E))])
    return torch.stack([a[:, rows] @ b[rows] for rows in _groups(ends_E)])


def add_products(into_EDM: Tensor, a_aD: Tensor, b_aM: Tensor, ends_E: Tensor) -> None:
    """Add a^T @ b of each group of rows to `into`, which has `sum_dtype`. PyTorch's grouped matmul
    would round to bfloat16 before the addition."""
    if a_aD.dtype == torch.bfloat16 and runs_kernels(a_aD):
        (num_experts, D, M) = into_EDM.shape
        a_aD = a_aD.contiguous()
        b_aM = b_aM.contiguous()
        # Two programs per multiprocessor: one adds its block while the other multiplies.
        block_d, block_n = (max(16, min(128, power_of_two(size))) for size in (D, M))
        grid = (-(-D // block_d) * -(-M // block_n), num_experts)
        blocks = {"BLOCK_D": block_d, "BLOCK_N": block_n, "BLOCK_R": 64}
        settings = {"num_stages": 3, "num_warps": 4}
        args = (into_EDM, a_aD, b_aM, ends_E, D, M, *into_EDM.stride())
        count("grouped matmul", 2 * a_aD.numel() * M)
        launch(_add_products_kernel, grid, *args, **blocks, **settings)
        return
    for e, rows in enumerate(_groups(ends_E)):
        add_matmul(into_EDM[e], a_aD[rows].t(), b_aM[rows])


def _groups(ends_E: Tensor) -> list[slice]:
    """Return the rows of each expert. Syncs with the device."""
    ends = ends_E.tolist()
    return [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]


def can_group(a: Tensor, b: Tensor) -> bool:
    """Whether PyTorch has a kernel: bfloat16, with rows of a multiple of 16 bytes."""
    sizes = b.shape[1:] if b.dim() == 3 else (len(a), b.shape[1])
    return a.dtype == b.dtype == torch.bfloat16 and all(size % 8 == 0 for size in sizes)


def sum_choices(rows_aD: Tensor, rows: SortedAssignments, dtype: torch.dtype) -> Tensor:
    """Sum the rows of each token, [t, D], in fp32 or wider, and round once."""
    (t, k) = rows.row_tk.shape
    D = rows_aD.shape[1]
    if not runs_kernels(rows_aD):
        return rows_aD[rows.row_tk].sum(1, dtype=sum_dtype(rows_aD.dtype)).to(dtype)
    into_tD = rows_aD.new_empty(t, D, dtype=dtype)
    grid = (t, -(-D // _BLOCK))
    launch(
        _sum_choices_kernel, grid, into_tD, rows_aD, rows.row_tk, D, K=k, BLOCK=_BLOCK, num_warps=4
    )
    return into_tD


class Gate:
    """The step between an experts module's two matmuls, from [a, 2 F] (or [a, F]) to [a, F]."""

    def __init__(self, experts: Any) -> None:
        self.apply = gate_function(experts) if experts.has_gate else experts.act_fn
        self.is_interleaved = type(experts).__name__ == "GptOssExperts"
        activation = type(getattr(experts, "act_fn", None)).__name__
        is_default = has_default_gate(experts)
        is_silu = experts.has_gate and is_default and activation in ("SiLU", "SiLUActivation")
        # of Nemotron-H
        self.is_squared = not experts.has_gate and activation == "ReLUSquaredActivation"
        self.has_kernel = self.is_interleaved or self.is_squared or is_silu
        self.options = {
            "alpha": experts.alpha if self.is_interleaved else 1.0,
            "limit": experts.limit if self.is_interleaved else 0.0,
            "INTERLEAVED": self.is_interleaved,
            "SQUARED": self.is_squared,
        }

    def forward(
        self, h_aF: Tensor, bias_EF: Tensor | None, weight_a: Tensor, rows: SortedAssignments
    ) -> Tensor:
        """Return the gate of h + bias, times the router's weights, [a, F]."""
        if self.has_kernel and runs_kernels(h_aF):
            n = len(h_aF)
            width = h_aF.shape[1] // (1 if self.is_squared else 2)
            a_aF = h_aF.new_empty(n, width)
            tensors = (a_aF, h_aF, self._bias(h_aF, bias_EF), weight_a, rows.expert_a)
            grid = (n, -(-width // _BLOCK))
            launch(_gate_kernel, grid, *tensors, width, **self._settings(bias_EF))
            return a_aF
        parts = []
        for part in range(0, len(h_aF), _ROWS):
            at = slice(part, part + _ROWS)
            h = _add_bias(h_aF[at], bias_EF, rows.expert_a[at])
            parts.append((self.apply(h) * weight_a[at, None]).to(h_aF.dtype))
        return torch.cat(parts)

    def backward(
        self,
        h_aF: Tensor,
        bias_EF: Tensor | None,
        weight_a: Tensor,
        da_aF: Tensor,
        rows: SortedAssignments,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dh [a, 2 F] (or [a, F]), the output a [a, F], dweight [a]. Overwrites h, da."""
        dweight_a = torch.empty_like(weight_a)
        if self.has_kernel and runs_kernels(h_aF):
            n, width = da_aF.shape
            bias = self._bias(h_aF, bias_EF)
            tensors = (h_aF, da_aF, dweight_a, bias, weight_a, rows.expert_a)
            settings = {"BLOCKS": -(-width // _BLOCK), **self._settings(bias_EF)}
            launch(_gate_backward_kernel, (n,), *tensors, width, **settings)
            return h_aF, da_aF, dweight_a
        for part in range(0, len(h_aF), _ROWS):
            at = slice(part, part + _ROWS)
            with torch.enable_grad():
                h = _add_bias(h_aF[at], bias_EF, rows.expert_a[at]).detach().requires_grad_()
                a = self.apply(h)
            da = da_aF[at].to(a.dtype)
            dweight_a[at] = (da * a.detach()).sum(-1)
            h_aF[at] = torch.autograd.grad(a, h, da * weight_a[at, None])[0]
            da_aF[at] = a.detach() * weight_a[at, None]
        return h_aF, da_aF, dweight_a

    @staticmethod
    def _bias(h_aF: Tensor, bias_EF: Tensor | None) -> Tensor:
        """Return the kernels' argument: without a bias, any tensor."""
        return h_aF if bias_EF is None else bias_EF.contiguous()

    def _settings(self, bias_EF: Tensor | None) -> dict[str, Any]:
        return {**self.options, "HAS_BIAS": bias_EF is not None, "BLOCK": _BLOCK, "num_warps": 4}


def _add_bias(h_aF: Tensor, bias_EF: Tensor | None, expert_a: Tensor) -> Tensor:
    wide = h_aF.to(sum_dtype(h_aF.dtype))
    return wide if bias_EF is None else wide + bias_EF[expert_a]


if triton is not None:

    @triton.jit
    def _sum_choices_kernel(into, rows, row_of, D, K: tl.constexpr, BLOCK: tl.constexpr):
        token = tl.program_id(0).to(tl.int64)
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = cols < D
        total = tl.zeros([BLOCK], tl.float32)
        for choice in tl.static_range(K):
            row = tl.load(row_of + token * K + choice).to(tl.int64)
            total += tl.load(rows + row * D + cols, inside, other=0.0).to(tl.float32)
        tl.store(into + token * D + cols, total.to(into.dtype.element_ty), inside)

    @triton.jit
    def _add_products_kernel(
        into,
        a,
        b,
        ends,
        D,
        M,
        stride_e,
        stride_d,
        stride_n,
        BLOCK_D: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_R: tl.constexpr,
    ):
        """Add one block of an expert's product. Blocks of an expert run together, so that its rows
        stay in cache."""
        expert = tl.program_id(1)
        blocks_n = tl.cdiv(M, BLOCK_N)
        d = tl.program_id(0) // blocks_n * BLOCK_D + tl.arange(0, BLOCK_D)
        n = tl.program_id(0) % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
        first = tl.load(ends + expert - 1, expert > 0, other=0)
        end = tl.load(ends + expert)
        total = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
        for row in range(first, end, BLOCK_R):
            rows = row + tl.arange(0, BLOCK_R)
            inside = (rows < end)[:, None]
            at = rows.to(tl.int64)[:, None]
            left = tl.load(a + at * D + d[None, :], inside & (d < D)[None, :], other=0.0)
            right = tl.load(b + at * M + n[None, :], inside & (n < M)[None, :], other=0.0)
            total = tl.dot(tl.trans(left), right, total)
        if first < end:
            at = (
                into
                + expert.to(tl.int64) * stride_e
                + d[:, None] * stride_d
                + n[None, :] * stride_n
            )
            inside = (d < D)[:, None] & (n < M)[None, :]
            tl.store(at, tl.load(at, inside, other=0.0) + total, inside)

    @triton.jit
    def _load_pairs(
        h,
        bias,
        row,
        expert,
        block,
        F,
        INTERLEAVED: tl.constexpr,
        HAS_BIAS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Load gate and up of one block of a row, with bias, in fp32."""
        if INTERLEAVED:
            cols = block * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
            inside = cols < 2 * F
            x = tl.load(h + row * 2 * F + cols, inside, other=0.0).to(tl.float32)
            if HAS_BIAS:
                x += tl.load(bias + expert * 2 * F + cols, inside, other=0.0).to(tl.float32)
            gate, up = tl.split(tl.reshape(x, (BLOCK, 2)))
        else:
            cols = block * BLOCK + tl.arange(0, BLOCK)
            inside = cols < F
            gate = tl.load(h + row * 2 * F + cols, inside, other=0.0).to(tl.float32)
            up = tl.load(h + row * 2 * F + F + cols, inside, other=0.0).to(tl.float32)
            if HAS_BIAS:
                gate += tl.load(bias + expert * 2 * F + cols, inside, other=0.0).to(tl.float32)
                up += tl.load(bias + expert * 2 * F + F + cols, inside, other=0.0).to(tl.float32)
        return gate, up

    @triton.jit
    def _load_positive(h, bias, row, expert, cols, F, HAS_BIAS: tl.constexpr):
        """Load the positive part of one block of a row, with bias, in fp32."""
        x = tl.load(h + row * F + cols, cols < F, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias + expert * F + cols, cols < F, other=0.0).to(tl.float32)
        return tl.maximum(x, 0.0)

    @triton.jit
    def _gate_kernel(
        into,
        h,
        bias,
        weights,
        experts,
        F,
        alpha,
        limit,
        INTERLEAVED: tl.constexpr,
        SQUARED: tl.constexpr,
        HAS_BIAS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        block = tl.program_id(1)
        expert = tl.load(experts + row).to(tl.int64)
        cols = block * BLOCK + tl.arange(0, BLOCK)
        if SQUARED:
            x = _load_positive(h, bias, row, expert, cols, F, HAS_BIAS)
            a = x * x
        else:
            gate, up = _load_pairs(h, bias, row, expert, block, F, INTERLEAVED, HAS_BIAS, BLOCK)
            if INTERLEAVED:
                gate = tl.minimum(gate, limit)
                up = tl.minimum(tl.maximum(up, -limit), limit) + 1
            a = gate * tl.sigmoid(gate * alpha) * up
        tl.store(
            into + row * F + cols, (a * tl.load(weights + row)).to(into.dtype.element_ty), cols < F
        )

    @triton.jit
    def _gate_backward_kernel(
        h,
        da,
        dweights,
        bias,
        weights,
        experts,
        F,
        alpha,
        limit,
        INTERLEAVED: tl.constexpr,
        SQUARED: tl.constexpr,
        HAS_BIAS: tl.constexpr,
        BLOCK: tl.constexpr,
        BLOCKS: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        expert = tl.load(experts + row).to(tl.int64)
        weight = tl.load(weights + row)
        dweight = tl.zeros([BLOCK], tl.float32)
        for block in range(BLOCKS):
            cols = block * BLOCK + tl.arange(0, BLOCK)
            inside = cols < F
            d = tl.load(da + row * F + cols, inside, other=0.0).to(tl.float32)
            if SQUARED:
                x = _load_positive(h, bias, row, expert, cols, F, HAS_BIAS)
                a = x * x
            else:
                gate, up = _load_pairs(h, bias, row, expert, block, F, INTERLEAVED, HAS_BIAS, BLOCK)
                clamped = gate
                factor = up
                if INTERLEAVED:
                    clamped = tl.minimum(gate, limit)
                    factor = tl.minimum(tl.maximum(up, -limit), limit) + 1
                s = tl.sigmoid(clamped * alpha)
                glu = clamped * s
                a = glu * factor
            dweight += d * a
            d *= weight
            tl.store(da + row * F + cols, (a * weight).to(da.dtype.element_ty), inside)
            if SQUARED:
                tl.store(h + row * F + cols, (2 * d * x).to(h.dtype.element_ty), inside)
            else:
                dgate = d * factor * (s + alpha * glu * (1 - s))
                dup = d * glu
                if INTERLEAVED:
                    dgate = tl.where(gate <= limit, dgate, 0.0)
                    dup = tl.where((up <= limit) & (up >= -limit), dup, 0.0)
                    pairs = block * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
                    dh = tl.reshape(tl.join(dgate, dup), (2 * BLOCK,))
                    tl.store(h + row * 2 * F + pairs, dh.to(h.dtype.element_ty), pairs < 2 * F)
                else:
                    tl.store(h + row * 2 * F + cols, dgate.to(h.dtype.element_ty), inside)
                    tl.store(h + row * 2 * F + F + cols, dup.to(h.dtype.element_ty), inside)
        tl.store(dweights + row, tl.sum(dweight))
