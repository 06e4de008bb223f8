"""Mamba2's recurrence over one segment of tokens, in Triton: 16-bit inputs, states in fp32.

In the terms of ops/ssd.py, with dP = dout y^T, a chunk's gradients are

    dS = p dS' + (e q)^T dout;   dy = P^T dout + f k dS';   dv = dt dy + D dout
    dq = e dout S^T + (decay dP) k;   dk = f y dS'^T + (decay dP)^T q

`_prepare_kernel` computes the decays, for the other kernels to load. `_walk_kernel` passes a tile
of a head's state through all chunks: its elements are independent, so that there are programs
enough, and a step waits for one small product only. It keeps the states before all chunks, or the
gradients of those after them, in 16 bits; backward walks both ways at once. The other kernels take
all chunks at once, and several heads that share q and k; `_out_kernel` and `_value_grad_kernel`
start with the last chunk, which the kernel before has just left in the cache. `tl.range` with
`num_stages` also loads the decays ahead; two stages have one buffer and load nothing ahead. All
products are of 16-bit matrices, of which at most one is rounded: dt scales that one. Some are
transposed, which ops/delta_kernels.py avoids: tested with Triton 3.6, and by a trial before use.

Shapes as in ops/scan.py; t tokens of the segment, z chunks of C tokens.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ithaka.ops.delta_kernels import triton

CHUNK = {"forward": 64, "backward": 64}  # tokens
HEADS = {"out": 8, "key": 16, "value": 8}  # heads that one program computes, at most
TILE = (64, 32)  # rows and columns of a state that one program of `_walk_kernel` updates, at most
OPTIONS = {
    "prepare": {"num_warps": 2},
    "walk": {"num_warps": 4, "num_stages": 4},
    "out": {"num_warps": 4, "num_stages": 3},
    "key": {"num_warps": 8, "num_stages": 3},
    "value": {"num_warps": 4, "num_stages": 3},
}
# for states of 256 rows: fewer registers spill
WIDE_OPTIONS = {"key": {"num_warps": 16, "num_stages": 2}}
_zeros = cache(torch.zeros)  # ids of tokens that are all in one document


def runs_ssd_kernels(k_sJK: Tensor, v_sHV: Tensor) -> bool:
    is_supported = 16 <= k_sJK.shape[-1] <= 256 and v_sHV.shape[-1] % 16 == 0
    return triton is not None and v_sHV.is_cuda and v_sHV.dtype.itemsize == 2 and is_supported


class FusedSsdSegment:
    """Like ssd.SsdSegment, with fewer than 2^31 elements per tensor. K is padded to a power of
    two."""

    def __init__(
        self, inputs: Sequence[Tensor], ids: Tensor | None, skip_H: Tensor, dskip_H: Tensor
    ) -> None:
        self.inputs = inputs
        self.skip_H = skip_H.contiguous()
        self.dskip_H = dskip_H
        q, k, v, g, dt = (x.contiguous() for x in inputs)
        (t, J, K) = k.shape
        (_, H, V) = v.shape
        self.K = K
        self.padding = triton.next_power_of_2(K) - K
        if self.padding:
            q, k = (F.pad(x, (0, self.padding)) for x in (q, k))
        self.own = (q, k, v, g, dt)
        if ids is None:
            ids = _zeros(triton.next_power_of_2(t + 1), dtype=torch.int32, device=v.device)
        self.ids = ids
        self.repeats = H // J
        self.sizes = (t, H, H // J)
        self.constants = {"V": V, "K": K + self.padding}

    def extend(self, map_HKX: Tensor) -> Tensor:
        return self._extend("forward", map_HKX, *self.own[1:3])

    def extend_grad(self, map_HKX: Tensor, dout_tHV: Tensor) -> Tensor:
        return self._extend("backward", map_HKX, self.own[0], dout_tHV.contiguous())

    def forward(self, state_HKV: Tensor, out_tHV: Tensor) -> Tensor:
        assert out_tHV.is_contiguous()
        self._prepare("forward")
        q, k, v, _, _ = self.own
        state_HKV, states = self._walk((k, v, state_HKV), keeps=True)
        tensors = (q, k, v, *self.decays, self.skip_H, self.ids, states, out_tHV)
        self._launch(_out_kernel, "out", *tensors)
        return state_HKV

    def backward(self, state_HKV: Tensor, dout_tHV: Tensor, dstate_HKV: Tensor) -> Tensor:
        self._prepare("backward")
        q, k, v, g, dt = self.own
        dout_tHV = dout_tHV.contiguous()
        (t, J, K) = k.shape
        H = v.shape[1]
        z = self.num_chunks
        # kept: S and dS'
        dstate_HKV, kept = self._walk((k, v, state_HKV), (q, dout_tHV, dstate_HKV), keeps=True)
        parts = H // self._heads("key")
        dqk = (k if parts == J else g).new_empty(2, t, parts, K)
        dskip = g.new_empty(z, H)
        read = torch.empty_like(self.factors[0])
        passed = torch.empty_like(self.passing)
        factors = (q, k, v, *self.decays)
        grads = (*dqk, read, passed)
        self._launch(_key_grad_kernel, "key", *factors, self.ids, *kept, dout_tHV, *grads)
        # Each program reads what it overwrites: v of its chunk and heads.
        inputs = (*factors, self.skip_H, self.ids, kept[1], dout_tHV, read, passed)
        self._launch(_value_grad_kernel, "value", *inputs, g, dt, dskip)
        options = {"PARTS": parts // J, "K": K, "Z": triton.next_power_of_2(z)}
        grid = (max(H, 2 * triton.cdiv(t * J, 8)),)
        _sum_kernel[grid](*dqk, dskip, q, k, self.dskip_H, t * J, z, H, **options)
        for x, grad in zip(self.inputs, self.own, strict=True):
            if x.data_ptr() != grad.data_ptr():
                x.copy_(grad[..., : x.shape[-1]])
        return dstate_HKV

    def _prepare(self, direction: str) -> None:
        """Cut the segment into chunks, and compute their decays."""
        _, _, _, g, dt = self.own
        t, H, _ = self.sizes
        C = CHUNK[direction]
        self.num_chunks = triton.cdiv(t, C)
        self.constants["C"] = C
        self.factors = g.new_empty(5, H, self.num_chunks * C)  # log of the decay, e, f, dt and f dt
        self.passing = g.new_empty(H, self.num_chunks)  # p
        self.decays = (self.factors, self.passing)
        grid = (self.num_chunks * H,)
        _prepare_kernel[grid](g, dt, self.ids, *self.decays, t, H, C=C, **OPTIONS["prepare"])

    def _extend(self, direction: str, map_HKX: Tensor, *read: Tensor) -> Tensor:
        self._prepare(direction)
        matrix_HKx, state_HKV = map_HKX.tensor_split((-self.constants["V"],), -1)
        matrix_HKx = self.passing.prod(1)[:, None, None] * matrix_HKx
        state_HKV = self._walk((*read, state_HKV), reverses=direction == "backward")[0]
        return torch.cat([matrix_HKx, state_HKV], -1)

    def _walk(
        self, *walks: Sequence[Tensor], reverses: bool = False, keeps: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the state after the segment, given k, v and the one before it. `reverses`: return
        the gradient of the one before it, given q, dout and that of the one after it. Given both,
        do both and return the second. `keeps`: also return those at all chunks, [., z, H, K, V]."""
        padded = []
        for k, v, state in walks:
            if self.padding:
                state = F.pad(state, (0, 0, 0, self.padding))
            padded.append((k, v, state.contiguous()))
        state = padded[0][2]
        (H, K, V) = state.shape
        rows = min(TILE[0], K)
        columns = _divisor(V, TILE[1])
        last = state.new_empty(len(walks), H, K, V)
        kept = self.own[2].new_empty(len(walks), self.num_chunks, H, K, V) if keeps else last
        tensors = (*padded[0], *padded[-1], *self.decays, last, kept)
        tile = {"ROWS": rows, "COLUMNS": columns, "KEEPS": keeps}
        options = self.constants | tile | OPTIONS["walk"]
        grid = (len(walks) * H * (K // rows) * (V // columns),)
        _walk_kernel[grid](*tensors, *self.sizes, int(reverses), **options)
        return last[-1, :, : self.K], kept

    def _heads(self, name: str) -> int:
        return max(n for n in range(1, HEADS[name] + 1) if self.repeats % n == 0)

    def _launch(self, kernel: Any, name: str, *tensors: Tensor) -> None:
        """Launch a kernel over all chunks and heads."""
        heads = self._heads(name)
        options = OPTIONS[name]
        if self.constants["K"] > 128:
            options = WIDE_OPTIONS.get(name, options)
        sizes = {
            "HEADS": heads,
            "COLUMNS": _divisor(self.constants["V"], 64),
            "STAGES": options["num_stages"],
        }
        grid = (self.num_chunks * (self.sizes[1] // heads),)
        kernel[grid](*tensors, *self.sizes, **self.constants, **sizes, **options)


def _divisor(size: int, limit: int) -> int:
    """Return the largest power of two from 16 to `limit` that divides `size`."""
    return next(n for n in (128, 64, 32, 16) if n <= limit and size % n == 0)


if triton is not None:
    import triton.language as tl

    from ithaka.ops.delta_kernels import _load_decays, _load_rows

    @triton.jit
    def _prepare_kernel(g, dt, ids, factors, passing, t, H, C: tl.constexpr):
        chunk = tl.program_id(0) // H
        h = tl.program_id(0) % H
        z = (t + C - 1) // C
        at = chunk * C + tl.arange(0, C)
        log, _, e, f, p = _load_decays(g, ids, chunk, h, t, H, C)
        into = factors + h * (z * C) + at
        step = H * z * C
        tl.store(into, log)
        tl.store(into + step, e)
        tl.store(into + 2 * step, f)
        b = tl.load(dt + at * H + h, at < t, other=0.0)
        tl.store(into + 3 * step, b)
        tl.store(into + 4 * step, f * b)
        tl.store(passing + h * z + chunk, p)

    @triton.jit
    def _walk_kernel(
        k,
        v,
        first,
        q,
        dout,
        dfirst,
        factors,
        passing,
        last,
        kept,
        t,
        H,
        repeats,
        reverses,
        V: tl.constexpr,
        C: tl.constexpr,
        K: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        KEEPS: tl.constexpr,
    ):
        """Two walks in one launch: the first half of the programs reads k, v and `first`, the
        second the others."""
        across: tl.constexpr = V // COLUMNS
        parts: tl.constexpr = K // ROWS * across
        walk = tl.program_id(0) // (H * parts)
        h = tl.program_id(0) // parts % H
        part = tl.program_id(0) % parts
        rows = part // across * ROWS + tl.arange(0, ROWS)
        col = part % across * COLUMNS + tl.arange(0, COLUMNS)
        at_KV = rows[:, None] * V + col[None, :]
        i = tl.arange(0, C)
        j = h // repeats
        J = H // repeats
        z = (t + C - 1) // C
        if walk == 1:
            k = q
            v = dout
            first = dfirst
        last = last + walk * H * (K * V)
        kept = kept + walk * z * H * (K * V)
        back = walk + reverses
        start = back * (z - 1)
        sign = 1 - 2 * back
        # What scales a chunk's tokens and the state: e or f dt, and p.
        factors = factors + ((4 - 3 * back) * H + h) * z * C + i
        passing = passing + h * z
        state = tl.load(first + h * (K * V) + at_KV)
        w_next = tl.load(factors + start * C)
        p_next = tl.load(passing + start)
        for step in range(z):
            chunk = start + sign * step
            at = chunk * C + i
            inside = (at < t)[:, None]
            x = tl.load(v + (at * H + h)[:, None] * V + col[None, :], inside, other=0.0)
            k_CK = tl.load(k + (at * J + j)[:, None] * K + rows[None, :], inside, other=0.0)
            # Those of the next chunk are loaded during this one.
            w = w_next
            p = p_next
            following = start + sign * tl.minimum(step + 1, z - 1)
            w_next = tl.load(factors + following * C)
            p_next = tl.load(passing + following)
            if KEEPS:
                tl.store(kept + (chunk * H + h) * (K * V) + at_KV, state.to(kept.dtype.element_ty))
            state = state * p + tl.dot(tl.trans(k_CK), (x.to(tl.float32) * w[:, None]).to(x.dtype))
        tl.store(last + h * (K * V) + at_KV, state)

    @triton.jit
    def _out_kernel(
        q,
        k,
        v,
        factors,
        passing,
        skip,
        ids,
        states,
        out,
        t,
        H,
        repeats,
        V: tl.constexpr,
        C: tl.constexpr,
        K: tl.constexpr,
        HEADS: tl.constexpr,
        COLUMNS: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        parts = H // HEADS
        columns = V // COLUMNS
        z = (t + C - 1) // C
        i = tl.arange(0, C)
        chunk = z - 1 - tl.program_id(0) // parts
        part = tl.program_id(0) % parts
        at = chunk * C + i
        j = part * HEADS // repeats
        J = H // repeats
        step = H * z * C
        inside = (at < t)[:, None]
        id_C = tl.load(ids + 1 + tl.minimum(at, t - 1))
        q_CK = _load_rows(q, at, j, t, J, K)
        scores = tl.dot(q_CK, tl.trans(_load_rows(k, at, j, t, J, K)))
        scores = tl.where(
            (i[:, None] >= i[None, :]) & (id_C[:, None] == id_C[None, :]), scores, 0.0
        )
        for index in tl.range(0, HEADS * columns, num_stages=STAGES):
            h = part * HEADS + index // columns
            col = index % columns * COLUMNS + tl.arange(0, COLUMNS)
            at_CV = (at * H + h)[:, None] * V + col[None, :]
            x = tl.load(v + at_CV, inside, other=0.0)
            state = tl.load(
                states + ((chunk * H + h) * K + tl.arange(0, K)[:, None]) * V + col[None, :]
            )
            factor = factors + (h * z + chunk) * C + i
            log = tl.load(factor)
            e = tl.load(factor + step)
            b = tl.load(factor + 3 * step)
            decay = tl.exp(tl.minimum(log[:, None] - log[None, :], 0.0)) * b[None, :]
            o = tl.dot(q_CK, state) * e[:, None]
            o = tl.dot((scores * decay).to(x.dtype), x, o) + x.to(tl.float32) * tl.load(skip + h)
            tl.store(out + at_CV, o.to(out.dtype.element_ty), inside)

    @triton.jit
    def _key_grad_kernel(
        q,
        k,
        v,
        factors,
        passing,
        ids,
        states,
        dstates,
        dout,
        dq,
        dk,
        read,
        passed,
        t,
        H,
        repeats,
        V: tl.constexpr,
        C: tl.constexpr,
        K: tl.constexpr,
        HEADS: tl.constexpr,
        COLUMNS: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        """Write dq and dk, summed over HEADS heads. For `_value_grad_kernel`, write what dS sums
        to, times S: from each token that reads S, and from what passes the chunk."""
        parts = H // HEADS
        z = (t + C - 1) // C
        i = tl.arange(0, C)
        chunk = tl.program_id(0) // parts
        part = tl.program_id(0) % parts
        at = chunk * C + i
        j = part * HEADS // repeats
        J = H // repeats
        step = H * z * C
        inside = (at < t)[:, None]
        at_CK = (at * parts + part)[:, None] * K + tl.arange(0, K)[None, :]
        id_C = tl.load(ids + 1 + tl.minimum(at, t - 1))
        q_CK = _load_rows(q, at, j, t, J, K)
        dscores = tl.zeros((C, C), tl.float32)
        dq_CK = tl.zeros((C, K), tl.float32)
        dk_CK = tl.zeros((C, K), tl.float32)
        for head in tl.range(0, HEADS, num_stages=STAGES):
            h = part * HEADS + head
            factor = factors + (h * z + chunk) * C + i
            log = tl.load(factor)
            e = tl.load(factor + step)
            b = tl.load(factor + 3 * step)
            w = tl.load(factor + 4 * step)
            dproducts = tl.zeros((C, C), tl.float32)
            dlog = tl.zeros((C,), tl.float32)
            through = tl.sum(tl.zeros((C,), tl.float32), 0)
            for first in range(0, V, COLUMNS):
                col = first + tl.arange(0, COLUMNS)
                at_CV = (at * H + h)[:, None] * V + col[None, :]
                at_KV = ((chunk * H + h) * K + tl.arange(0, K)[:, None]) * V + col[None, :]
                x = tl.load(v + at_CV, inside, other=0.0)
                d = tl.load(dout + at_CV, inside, other=0.0)
                state = tl.load(states + at_KV)
                dstate = tl.load(dstates + at_KV)
                dproducts = tl.dot(d, tl.trans(x), dproducts)
                dread = tl.dot(d, tl.trans(state)) * e[:, None]
                dlog += tl.sum(dread * q_CK.to(tl.float32), 1)
                dq_CK += dread
                dk_CK += tl.dot(x, tl.trans(dstate)) * w[:, None]
                through += tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
            dscores += dproducts * tl.exp(tl.minimum(log[:, None] - log[None, :], 0.0)) * b[None, :]
            tl.store(read + (h * z + chunk) * C + i, dlog)
            tl.store(passed + h * z + chunk, tl.load(passing + h * z + chunk) * through)
        dscores = tl.where(
            (i[:, None] >= i[None, :]) & (id_C[:, None] == id_C[None, :]), dscores, 0.0
        )
        dscores_CC = dscores.to(q_CK.dtype)
        dq_CK = tl.dot(dscores_CC, _load_rows(k, at, j, t, J, K), dq_CK)
        dk_CK = tl.dot(tl.trans(dscores_CC), q_CK, dk_CK)
        tl.store(dq + at_CK, dq_CK.to(dq.dtype.element_ty), inside)
        tl.store(dk + at_CK, dk_CK.to(dk.dtype.element_ty), inside)

    @triton.jit
    def _value_grad_kernel(
        q,
        k,
        v,
        factors,
        passing,
        skip,
        ids,
        dstates,
        dout,
        read,
        passed,
        dg,
        ddt,
        dskip,
        t,
        H,
        repeats,
        V: tl.constexpr,
        C: tl.constexpr,
        K: tl.constexpr,
        HEADS: tl.constexpr,
        COLUMNS: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        """Overwrite v with its gradient; write those of g and dt, and a chunk's part of D's.
        Products of tokens are transposed: rows are those of k and v."""
        parts = H // HEADS
        z = (t + C - 1) // C
        i = tl.arange(0, C)
        chunk = z - 1 - tl.program_id(0) // parts
        part = tl.program_id(0) % parts
        at = chunk * C + i
        j = part * HEADS // repeats
        J = H // repeats
        step = H * z * C
        inside = at < t
        id_C = tl.load(ids + 1 + tl.minimum(at, t - 1))
        k_CK = _load_rows(k, at, j, t, J, K)
        scores = tl.dot(k_CK, tl.trans(_load_rows(q, at, j, t, J, K)))
        scores = tl.where(
            (i[:, None] <= i[None, :]) & (id_C[:, None] == id_C[None, :]), scores, 0.0
        )
        for head in tl.range(0, HEADS, num_stages=STAGES):
            h = part * HEADS + head
            row = at * H + h
            factor = factors + (h * z + chunk) * C + i
            log = tl.load(factor)
            f = tl.load(factor + 2 * step)
            b = tl.load(factor + 3 * step)
            skipped = tl.load(skip + h)
            products = scores * tl.exp(tl.minimum(log[None, :] - log[:, None], 0.0))
            products_CC = products.to(v.dtype.element_ty)
            dproducts = tl.zeros((C, C), tl.float32)
            to_state = tl.zeros((C,), tl.float32)
            for first in range(0, V, COLUMNS):
                col = first + tl.arange(0, COLUMNS)
                at_CV = row[:, None] * V + col[None, :]
                x = tl.load(v + at_CV, inside[:, None], other=0.0)
                d = tl.load(dout + at_CV, inside[:, None], other=0.0)
                dstate = tl.load(
                    dstates + ((chunk * H + h) * K + tl.arange(0, K)[:, None]) * V + col[None, :]
                )
                dwritten = tl.dot(k_CK, dstate) * f[:, None]
                to_state += tl.sum(dwritten * x.to(tl.float32), 1)
                dproducts = tl.dot(x, tl.trans(d), dproducts)
                dv = tl.dot(products_CC, d, dwritten) * b[:, None] + d.to(tl.float32) * skipped
                tl.store(v + at_CV, dv.to(v.dtype.element_ty), inside[:, None])
            tl.store(
                dskip + chunk * H + h, tl.sum(tl.where(i[:, None] == i[None, :], dproducts, 0.0))
            )
            dproducts *= products
            db = tl.sum(dproducts, 1) + to_state  # the sum over y's gradient times x
            tl.store(ddt + row, db, inside)
            dlog = (
                tl.load(read + (h * z + chunk) * C + i) + tl.sum(dproducts * b[:, None], 0) - db * b
            )
            # g decays what later tokens read, and what leaves the chunk.
            total = tl.sum(to_state * b, 0) + tl.load(passed + h * z + chunk)
            tl.store(dg + row, tl.cumsum(dlog, 0, reverse=True) + total, inside)

    @triton.jit
    def _sum_kernel(
        dq, dk, dskip, q, k, total, t, z, H, PARTS: tl.constexpr, K: tl.constexpr, Z: tl.constexpr
    ):
        """Overwrite q and k, of t rows, with the sums of their gradients' parts, and add those of
        D's to `total`."""
        n = tl.program_id(0)
        chunk = tl.arange(0, Z)
        at = n // 2 * 8 + tl.arange(0, 8)
        if n % 2 == 1:
            dq = dk
            q = k
        sums = tl.zeros((8, K), tl.float32)
        for part in tl.static_range(PARTS):
            sums += _load_rows(dq, at, part, t, PARTS, K).to(tl.float32)
        at_tK = at[:, None] * K + tl.arange(0, K)[None, :]
        tl.store(q + at_tK, sums.to(q.dtype.element_ty), (at < t)[:, None])
        if n < H:
            dskip_z = tl.load(dskip + chunk * H + n, chunk < z, other=0.0)
            tl.store(total + n, tl.load(total + n) + tl.sum(dskip_z, 0))
