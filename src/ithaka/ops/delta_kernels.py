"""The gated delta rule over one segment of tokens, in Triton: 16-bit inputs, states in fp32.

In the terms of ops/delta_rule.py, a chunk's gradients are

    a = (1 + L)^-T (P^T dout + f k dS');   dS = p dS' + (e q)^T dout - (b e k)^T a
    dP = dout y^T;   dL = -a y^T;   dv = b a

One kernel computes all chunks' inverses and P. One passes S from chunk to chunk for some columns of
a head, and one passes dS back. The last computes all chunks' gradients from y, a, S and dS'. Triton
3.4 to 3.7.0 miscompiles products with a transposed product on Hopper, so matrices that are needed
both ways are computed twice.

Shapes as in ops/delta_rule.py; t tokens of the segment, z chunks, C tokens of a chunk.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ithaka.facts.sizes import CHUNK_TOKENS
from ithaka.ops.fused import launch, power_of_two, runs_in_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = _prepare_kernel = _gradient_kernel = _advance_kernel = _advance_grad_kernel = None

NORM_EPS = 1e-6
COLUMNS = 32  # each program updates this many columns of a state
WIDE = True  # multiply in TF32, not in bf16
SCAN_OPTIONS = {"num_warps": 4, "num_stages": 2}
CHUNK_OPTIONS = {"num_warps": 8, "num_stages": 1}


def runs_delta_kernels(k_sJK: Tensor, v_sHV: Tensor) -> bool:
    K = k_sJK.shape[-1]
    V = v_sHV.shape[-1]
    is_supported = v_sHV.dtype.itemsize == 2 and K <= 128 and K % COLUMNS == V % COLUMNS == 0
    return runs_in_triton(v_sHV) and is_supported


class FusedDeltaSegment:
    """Like delta_rule.DeltaSegment, with fewer than 2^31 elements per tensor. K is padded to a
    power of two."""

    def __init__(self, inputs: tuple[Tensor, ...], ids: Tensor | None, normalizes: bool) -> None:
        self.inputs = inputs
        q, k, v, g, beta = (x.contiguous() for x in inputs)
        (t, J, K) = k.shape
        H = v.shape[1]
        C = CHUNK_TOKENS
        self.K = K
        self.padding = power_of_two(K) - K
        self.repeats = H // J
        if self.padding or self.repeats > 1:
            q, k = (F.pad(x, (0, self.padding)).repeat_interleave(self.repeats, 1) for x in (q, k))
        self.own = (q, k, v, g, beta)
        if ids is None:
            ids = torch.zeros(t + 1, dtype=torch.int32, device=v.device)
        self.ids = ids
        n = -(-t // C)
        self.sizes = (t, n, H)
        self.constants = {"C": C, "K": K + self.padding, "BLOCK": COLUMNS, "WIDE": WIDE}
        self.norm = {"scale": K**-0.5, "eps": NORM_EPS, "NORM": normalizes}
        # b e k, e q, f k and p, for q and k before their normalization
        factors = g.new_empty(4, H, n * C)
        inverse, products = g.new_empty(2, H, n, C, C)  # (1 + L)^-1 and P
        self.prepared = (factors, inverse, products)
        tensors = (q, k, g, beta, ids, *self.prepared)
        options = self.norm | self.constants | CHUNK_OPTIONS
        launch(_prepare_kernel, (n * H,), *tensors, *self.sizes, **options)

    def extend(self, map_HKX: Tensor) -> Tensor:
        matrix_HKx, added_HKV = map_HKX.tensor_split((-self.own[2].shape[-1],), -1)
        return torch.cat([self._advance(matrix_HKx, is_map=True), self._advance(added_HKV)], -1)

    def extend_grad(self, map_HKX: Tensor, dout_tHV: Tensor) -> Tensor:
        matrix_HKx, added_HKV = map_HKX.tensor_split((-self.own[2].shape[-1],), -1)
        added_HKV = self._advance_grad(added_HKV, dout_tHV)
        if not matrix_HKx.numel():
            return added_HKV
        return torch.cat([self._advance_grad(matrix_HKx), added_HKV], -1)

    def forward(self, state_HKV: Tensor, out_tHV: Tensor) -> Tensor:
        assert out_tHV.is_contiguous()
        return self._advance(state_HKV, out_tHV)

    def backward(self, state_HKV: Tensor, dout_tHV: Tensor, dstate_HKV: Tensor) -> Tensor:
        (_, n, H) = self.sizes
        v = self.own[2]
        V = v.shape[-1]
        states, dstates = state_HKV.new_empty(2, n, H, self.K + self.padding, V)
        y, a = state_HKV.new_empty(2, *v.shape)
        dout_tHV = dout_tHV.contiguous()
        self._advance(state_HKV, kept=(states, y))
        dstate_HKV = self._advance_grad(dstate_HKV, dout_tHV, kept=(dstates, a))
        dtype = torch.float32 if self.repeats > 1 else None
        grads = [torch.empty_like(x, dtype=dtype) for x in self.own]
        read = (*self.own, self.ids, self.prepared[2], y, a, states, dstates, dout_tHV)
        options = self.norm | {"V": V} | self.constants | CHUNK_OPTIONS
        launch(_gradient_kernel, (n * H,), *read, *grads, *self.sizes, **options)
        if self.repeats > 1:
            grads[:2] = (x.unflatten(1, (-1, self.repeats)).sum(2) for x in grads[:2])
        for x, grad in zip(self.inputs, grads, strict=True):
            x.copy_(grad[..., : x.shape[-1]])
        return dstate_HKV

    def _advance(
        self,
        state_HKV: Tensor,
        out: Tensor | None = None,
        kept: tuple[Tensor, ...] | None = None,
        is_map: bool = False,
    ) -> Tensor:
        """Return the state after the segment. Write `out`, or `kept`: the states before each chunk
        and y. For a map, v is 0."""
        q, k, v, _, beta = self.own
        before, after, grid = self._buffers(state_HKV)
        states, y = kept or (after, after)
        tensors = (q, k, v, beta, *self.prepared, before, after)
        launch(
            _advance_kernel,
            grid,
            *tensors,
            after if out is None else out,
            states,
            y,
            *self.sizes,
            V=state_HKV.shape[-1],
            **self.constants,
            IS_MAP=is_map,
            HAS_OUT=out is not None,
            KEEPS=kept is not None,
            **SCAN_OPTIONS,
        )
        return after[:, : self.K]

    def _advance_grad(
        self, dstate_HKV: Tensor, dout: Tensor | None = None, kept: tuple[Tensor, ...] | None = None
    ) -> Tensor:
        """Return the gradient of the state before the segment. Write `kept`: the gradients of the
        states after each chunk, and a. Without `dout`, it is 0."""
        after, before, grid = self._buffers(dstate_HKV)
        dstates, a = kept or (before, before)
        launch(
            _advance_grad_kernel,
            grid,
            *self.own[:2],
            before if dout is None else dout.contiguous(),
            *self.prepared,
            after,
            before,
            dstates,
            a,
            *self.sizes,
            V=dstate_HKV.shape[-1],
            **self.constants,
            IS_MAP=dout is None,
            KEEPS=kept is not None,
            **SCAN_OPTIONS,
        )
        return before[:, : self.K]

    def _buffers(self, state_HKV: Tensor) -> tuple[Tensor, Tensor, tuple[int]]:
        """Return the padded state, a buffer for the next one, and the grid: a program has COLUMNS
        of a head's state."""
        padded = F.pad(state_HKV, (0, 0, 0, self.padding)).contiguous()
        num_programs = len(padded) * (padded.shape[-1] // COLUMNS)
        return padded, torch.empty_like(padded), (num_programs,)


if triton is not None:

    @triton.jit
    def _dot(x, y, WIDE: tl.constexpr):
        dtype: tl.constexpr = tl.float32 if WIDE else tl.bfloat16
        return tl.dot(x.to(dtype), y.to(dtype), input_precision="tf32")

    @triton.jit
    def _load_decays(g, ids, chunk, h, t, H, C: tl.constexpr):
        """Load the log of the decay up to each token, its document, and the decays e, f and p.
        Chunks after the last token change nothing."""
        at = chunk * C + tl.arange(0, C)
        g_C = tl.load(g + at * H + h, at < t, other=0.0)
        log = tl.cumsum(g_C, 0)
        total = tl.sum(g_C, 0)
        id_C = tl.load(ids + 1 + tl.minimum(at, t - 1))
        before = tl.load(ids + tl.minimum(chunk * C, t))
        last = tl.load(ids + tl.minimum(chunk * C + C, t))
        e = tl.where(id_C == before, tl.exp(log), 0.0)
        f = tl.where(id_C == last, tl.exp(total - log), 0.0)
        p = tl.where(last == before, tl.exp(total), 0.0)
        return log, id_C, e, f, p

    @triton.jit
    def _load_rows(x, at, h, t, H, K: tl.constexpr):
        return tl.load(
            x + (at * H + h)[:, None] * K + tl.arange(0, K)[None, :], (at < t)[:, None], other=0.0
        )

    @triton.jit
    def _norm_factor(x_CK, scale, eps, NORM: tl.constexpr):
        x_CK = x_CK.to(tl.float32)
        factor = tl.sum(x_CK * 0.0, 1) + scale
        return factor * tl.rsqrt(tl.sum(x_CK * x_CK, 1) + eps) if NORM else factor

    @triton.jit
    def _prepare_kernel(
        q,
        k,
        g,
        beta,
        ids,
        factors,
        inverse,
        products,
        t,
        n,
        H,
        scale,
        eps,
        NORM: tl.constexpr,
        C: tl.constexpr,
        K: tl.constexpr,
        BLOCK: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        chunk = tl.program_id(0) // H
        h = tl.program_id(0) % H
        i = tl.arange(0, C)
        at = chunk * C + i
        log, id_C, e, f, p = _load_decays(g, ids, chunk, h, t, H, C)
        b = tl.load(beta + at * H + h, at < t, other=0.0)
        q_CK = _load_rows(q, at, h, t, H, K)
        k_CK = _load_rows(k, at, h, t, H, K)
        q_factor = _norm_factor(q_CK, scale, eps, NORM)
        k_factor = _norm_factor(k_CK, 1.0, eps, NORM)
        into = factors + (h * n + chunk) * C + i
        step = H * n * C
        tl.store(into, b * e * k_factor)
        tl.store(into + step, e * q_factor)
        tl.store(into + 2 * step, f * k_factor)
        tl.store(into + 3 * step, p + i * 0.0)
        is_seen = (i[:, None] >= i[None, :]) & (id_C[:, None] == id_C[None, :])
        decay = (
            tl.where(is_seen, tl.exp(tl.where(is_seen, log[:, None] - log[None, :], 0.0)), 0.0)
            * k_factor[None, :]
        )
        into = ((h * n + chunk) * C + i[:, None]) * C + i[None, :]
        tl.store(products + into, tl.dot(q_CK, tl.trans(k_CK)) * decay * q_factor[:, None])
        lower = tl.dot(k_CK, tl.trans(k_CK)) * decay * (b * k_factor)[:, None]
        # [[a, 0], [c, d]]^-1 = [[a^-1, 0], [-d^-1 c a^-1, d^-1]], for blocks of 1, 2, 4, ... on the
        # diagonal at once.
        x = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        size: tl.constexpr = 1
        for _ in tl.static_range(C.bit_length() - 1):
            row = i[:, None] // size
            col = i[None, :] // size
            corner = tl.where((row == col + 1) & (col % 2 == 0), lower, 0.0)
            x -= corner if size == 1 else _dot(x, _dot(corner, x, WIDE), WIDE)
            size *= 2
        tl.store(inverse + into, x)

    @triton.jit
    def _advance_kernel(
        q,
        k,
        v,
        beta,
        factors,
        inverse,
        products,
        first,
        last,
        out,
        states,
        written,
        t,
        n,
        H,
        V: tl.constexpr,
        BLOCK: tl.constexpr,
        C: tl.constexpr,
        K: tl.constexpr,
        WIDE: tl.constexpr,
        IS_MAP: tl.constexpr,
        HAS_OUT: tl.constexpr,
        KEEPS: tl.constexpr,
    ):
        h = tl.program_id(0) // (V // BLOCK)
        col = tl.program_id(0) % (V // BLOCK) * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, C)
        step = H * n * C
        state_at = (h * K + tl.arange(0, K)[:, None]) * V + col[None, :]
        state = tl.load(first + state_at)
        for chunk in range(n):
            at = chunk * C + i
            chunk_at = (h * n + chunk) * C
            at_CV = (at * H + h)[:, None] * V + col[None, :]
            inside = (at < t)[:, None]
            k_CK = _load_rows(k, at, h, t, H, K)
            matrix_at = (chunk_at + i[:, None]) * C + i[None, :]
            z = -tl.load(factors + chunk_at + i)[:, None] * _dot(k_CK, state, WIDE)
            if not IS_MAP:
                b = tl.load(beta + at * H + h, at < t, other=0.0)
                z += b[:, None] * tl.load(v + at_CV, inside, other=0.0).to(tl.float32)
            y = _dot(tl.load(inverse + matrix_at), z, WIDE)
            if HAS_OUT:
                o = (
                    _dot(_load_rows(q, at, h, t, H, K), state, WIDE)
                    * tl.load(factors + step + chunk_at + i)[:, None]
                )
                o += _dot(tl.load(products + matrix_at), y, WIDE)
                tl.store(out + at_CV, o.to(out.dtype.element_ty), inside)
            if KEEPS:
                tl.store(states + chunk * H * K * V + state_at, state)
                tl.store(written + at_CV, y, inside)
            y *= tl.load(factors + 2 * step + chunk_at + i)[:, None]
            state = state * tl.load(factors + 3 * step + chunk_at) + _dot(tl.trans(k_CK), y, WIDE)
        tl.store(last + state_at, state)

    @triton.jit
    def _advance_grad_kernel(
        q,
        k,
        dout,
        factors,
        inverse,
        products,
        last,
        first,
        dstates,
        solved,
        t,
        n,
        H,
        V: tl.constexpr,
        BLOCK: tl.constexpr,
        C: tl.constexpr,
        K: tl.constexpr,
        WIDE: tl.constexpr,
        IS_MAP: tl.constexpr,
        KEEPS: tl.constexpr,
    ):
        h = tl.program_id(0) // (V // BLOCK)
        col = tl.program_id(0) % (V // BLOCK) * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, C)
        step = H * n * C
        state_at = (h * K + tl.arange(0, K)[:, None]) * V + col[None, :]
        dstate = tl.load(last + state_at)
        for later in range(n):
            chunk = n - 1 - later
            at = chunk * C + i
            chunk_at = (h * n + chunk) * C
            at_CV = (at * H + h)[:, None] * V + col[None, :]
            inside = (at < t)[:, None]
            k_CK = _load_rows(k, at, h, t, H, K)
            matrix_at = (chunk_at + i[:, None]) * C + i[None, :]
            dy = _dot(k_CK, dstate, WIDE) * tl.load(factors + 2 * step + chunk_at + i)[:, None]
            if not IS_MAP:
                d = tl.load(dout + at_CV, inside, other=0.0)
                dy += _dot(tl.trans(tl.load(products + matrix_at)), d, WIDE)
            a = _dot(tl.trans(tl.load(inverse + matrix_at)), dy, WIDE)
            if KEEPS:
                tl.store(dstates + chunk * H * K * V + state_at, dstate)
                tl.store(solved + at_CV, a, inside)
            dstate *= tl.load(factors + 3 * step + chunk_at)
            dstate -= _dot(tl.trans(k_CK), a * tl.load(factors + chunk_at + i)[:, None], WIDE)
            if not IS_MAP:
                d = d.to(tl.float32) * tl.load(factors + step + chunk_at + i)[:, None]
                dstate += _dot(tl.trans(_load_rows(q, at, h, t, H, K)), d, WIDE)
        tl.store(first + state_at, dstate)

    @triton.jit
    def _gradient_kernel(
        q,
        k,
        v,
        g,
        beta,
        ids,
        products,
        written,
        solved,
        states,
        dstates,
        dout,
        dq,
        dk,
        dv,
        dg,
        dbeta,
        t,
        n,
        H,
        scale,
        eps,
        V: tl.constexpr,
        BLOCK: tl.constexpr,
        NORM: tl.constexpr,
        C: tl.constexpr,
        K: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        chunk = tl.program_id(0) // H
        h = tl.program_id(0) % H
        i = tl.arange(0, C)
        dim = tl.arange(0, K)
        at = chunk * C + i
        row = at * H + h
        inside = at < t
        log, id_C, e, f, p = _load_decays(g, ids, chunk, h, t, H, C)
        b = tl.load(beta + row, inside, other=0.0)
        # dP, dL and their transposes.
        dp = tl.zeros((C, C), tl.float32)
        dp_t = tl.zeros((C, C), tl.float32)
        dl = tl.zeros((C, C), tl.float32)
        dl_t = tl.zeros((C, C), tl.float32)
        db = tl.zeros((C,), tl.float32)
        for first in range(0, V, BLOCK):
            at_CV = row[:, None] * V + first + tl.arange(0, BLOCK)[None, :]
            y = tl.load(written + at_CV, inside[:, None], other=0.0)
            a = tl.load(solved + at_CV, inside[:, None], other=0.0)
            d = tl.load(dout + at_CV, inside[:, None], other=0.0)
            dp += _dot(d, tl.trans(y), WIDE)
            dp_t += _dot(y, tl.trans(d), WIDE)
            dl -= _dot(a, tl.trans(y), WIDE)
            dl_t -= _dot(y, tl.trans(a), WIDE)
            db += tl.sum(tl.load(v + at_CV, inside[:, None], other=0.0).to(tl.float32) * a, 1)
            tl.store(dv + at_CV, (a * b[:, None]).to(dv.dtype.element_ty), inside[:, None])
        # Gradients of the products of q and k and of k and k; sums over the decay's rows and
        # columns.
        is_same = id_C[:, None] == id_C[None, :]
        between = log[:, None] - log[None, :]
        decay = tl.where(
            is_same & (i[:, None] >= i[None, :]), tl.exp(tl.minimum(between, 0.0)), 0.0
        )
        decay_t = tl.where(
            is_same & (i[:, None] <= i[None, :]), tl.exp(tl.minimum(-between, 0.0)), 0.0
        )
        dlog_CC = dp * tl.load(products + ((h * n + chunk) * C + i[:, None]) * C + i[None, :])
        dp = dp * decay
        dp_t = dp_t * decay_t
        dl = tl.where(i[:, None] > i[None, :], dl * decay, 0.0)
        dl_t = tl.where(i[:, None] < i[None, :], dl_t * decay_t, 0.0) * b[None, :]
        k_CK = _load_rows(k, at, h, t, H, K)
        k_factor = _norm_factor(k_CK, 1.0, eps, NORM)
        dl_k = dl * tl.dot(k_CK, tl.trans(k_CK)) * k_factor[:, None] * k_factor[None, :]
        db += tl.sum(dl_k, 1)
        dlog_CC += dl_k * b[:, None]
        dkk = dl * b[:, None] + dl_t
        dlog = tl.sum(dlog_CC, 1) - tl.sum(dlog_CC, 0)
        # Gradients through the states.
        dq_CK = tl.zeros((C, K), tl.float32)
        from_before = tl.zeros((C, K), tl.float32)
        to_after = tl.zeros((C, K), tl.float32)
        passed = tl.zeros((K,), tl.float32)
        for first in range(0, V, BLOCK):
            col = first + tl.arange(0, BLOCK)
            at_CV = row[:, None] * V + col[None, :]
            at_KV = ((chunk * H + h) * K + dim[:, None]) * V + col[None, :]
            state = tl.load(states + at_KV)
            dstate = tl.load(dstates + at_KV)
            dq_CK += _dot(tl.load(dout + at_CV, inside[:, None], other=0.0), tl.trans(state), WIDE)
            from_before += _dot(
                tl.load(solved + at_CV, inside[:, None], other=0.0), tl.trans(state), WIDE
            )
            to_after += _dot(
                tl.load(written + at_CV, inside[:, None], other=0.0), tl.trans(dstate), WIDE
            )
            passed += tl.sum(state * dstate, 1)
        q_CK = _load_rows(q, at, h, t, H, K)
        q_factor = _norm_factor(q_CK, scale, eps, NORM)
        q_CK = q_CK.to(tl.float32) * q_factor[:, None]
        k_CK = k_CK.to(tl.float32) * k_factor[:, None]
        dq_CK *= e[:, None]
        dlog += tl.sum(dq_CK * q_CK, 1)
        dq_CK += _dot(dp, k_CK, WIDE)
        from_before *= e[:, None]
        from_k = tl.sum(from_before * k_CK, 1)
        db -= from_k
        to_after *= f[:, None]
        to_k = tl.sum(to_after * k_CK, 1)
        dlog -= b * from_k + to_k
        dk_CK = to_after - from_before * b[:, None] + _dot(dp_t, q_CK, WIDE) + _dot(dkk, k_CK, WIDE)
        if NORM:
            dq_CK -= q_CK * (tl.sum(q_CK * dq_CK, 1) / (scale * scale))[:, None]
            dk_CK -= k_CK * tl.sum(k_CK * dk_CK, 1)[:, None]
        at_CK = row[:, None] * K + dim[None, :]
        tl.store(dq + at_CK, (dq_CK * q_factor[:, None]).to(dq.dtype.element_ty), inside[:, None])
        tl.store(dk + at_CK, (dk_CK * k_factor[:, None]).to(dk.dtype.element_ty), inside[:, None])
        # g decays what later tokens read, and what leaves the chunk.
        dg_C = tl.sum(
            tl.where(i[:, None] >= i[None, :], dlog[:, None], 0.0) + to_k[:, None], 0
        ) + p * tl.sum(passed, 0)
        tl.store(dg + row, dg_C, inside)
        tl.store(dbeta + row, db, inside)
