"""The recurrence of ops/ssd.py over one segment of tokens, in Triton: 16-bit inputs, states in fp32.

In the terms used there, with dP = dout y^T, a chunk's gradients are

    dS = p dS' + (e q)^T dout;   dy = P^T dout + f k dS';   dv = dt dy + D dout
    dq = e dout S^T + (decay dP) k;   dk = f y dS'^T + (decay dP)^T q

Chunks are walked in blocks of CHUNKS. A walk from zero gives each block's map, S' = p S + U; `_pass_kernel` composes
the maps to the states before all blocks; a second walk from there writes the output, or what backward needs: the states
before all chunks and the gradients of those after them, in 16 bits. The last two kernels compute the gradients of some
heads that share q and k. All products are of 16-bit matrices, of which at most one is rounded: dt scales that one.
Two of them are transposed, which ops/delta_kernels.py avoids: tested with Triton 3.6, and by a trial before use.

Shapes as in ops/scan.py; t tokens of the segment, z chunks of C tokens, b blocks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ithaka.ops.delta_kernels import triton

CHUNK, CHUNKS = 64, 8  # tokens of a chunk, and chunks of a block
HEADS = 8  # heads that one program of the last kernels computes, at most
WALK_OPTIONS = {"num_warps": 4, "num_stages": 2}
GRADIENT_OPTIONS = {"num_warps": 8, "num_stages": 2}
PASS_SIZE = 1024  # elements of a state that one program of `_pass_kernel` updates


def runs_in_kernels(k_sJK: Tensor, v_sHV: Tensor) -> bool:
    is_supported = v_sHV.dtype.itemsize == 2 and 16 <= k_sJK.shape[-1] <= 256 and v_sHV.shape[-1] % 16 == 0
    return triton is not None and v_sHV.is_cuda and is_supported


class FusedSegment:
    """Like ssd.Segment, with fewer than 2^31 elements per tensor. K is padded to a power of two."""

    def __init__(self, inputs: Any, ids: Tensor | None, skip_H: Tensor, dskip_H: Tensor) -> None:
        self.inputs, self.skip_H, self.dskip_H = inputs, skip_H.contiguous(), dskip_H
        q, k, v, g, dt = (x.contiguous() for x in inputs)
        (t, J, K), (_, H, V) = k.shape, v.shape
        self.K, self.V, self.padding = K, V, triton.next_power_of_2(K) - K
        if self.padding:
            q, k = (F.pad(x, (0, self.padding)) for x in (q, k))
        self.own = q, k, v, g, dt
        self.ids = ids if ids is not None else torch.zeros(t + 1, dtype=torch.int32, device=v.device)
        self.num_chunks = triton.cdiv(t, CHUNK)
        self.num_blocks = triton.cdiv(self.num_chunks, CHUNKS)
        self.sizes = t, H, H // J
        columns = next(n for n in (64, 32, 16) if V % n == 0)
        self.constants = {"V": V, "COLUMNS": columns, "C": CHUNK, "K": K + self.padding}
        self.grid = (self.num_blocks * H * (V // columns),)

    def extend(self, map_HKX: Tensor) -> Tensor:
        matrix_HKx, state_HKV = map_HKX.tensor_split((-self.V,), -1)
        _, decays, state_HKV = self._states(state_HKV)
        return torch.cat([decays.prod(0)[:, None, None] * matrix_HKx, state_HKV[:, : self.K]], -1)

    def extend_grad(self, map_HKX: Tensor, dout_tHV: Tensor) -> Tensor:
        matrix_HKx, dstate_HKV = map_HKX.tensor_split((-self.V,), -1)
        _, decays, dstate_HKV = self._states(dstate_HKV, dout_tHV.contiguous())
        return torch.cat([decays.prod(0)[:, None, None] * matrix_HKx, dstate_HKV[:, : self.K]], -1)

    def forward(self, state_HKV: Tensor, out_tHV: Tensor) -> Tensor:
        assert out_tHV.is_contiguous()
        states, decays, state_HKV = self._states(state_HKV)
        self._walk(states, decays, out=out_tHV)
        return state_HKV[:, : self.K]

    def backward(self, state_HKV: Tensor, dout_tHV: Tensor, dstate_HKV: Tensor) -> Tensor:
        (t, H, repeats), (q, k, v, g, dt) = self.sizes, self.own
        dout_tHV = dout_tHV.contiguous()
        kept = v.new_empty(2, self.num_chunks, H, k.shape[-1], self.V)  # S and dS'
        states, decays, _ = self._states(state_HKV)
        self._walk(states, decays, kept=kept[0])
        states, decays, dstate_HKV = self._states(dstate_HKV, dout_tHV)
        self._walk_grad(states, decays, dout_tHV, kept=kept[1])
        heads = max(n for n in range(1, HEADS + 1) if repeats % n == 0)
        dqk = g.new_empty(2, t, H // heads, k.shape[-1])
        dskip = g.new_empty(self.num_chunks, H)
        grid, options = (self.num_chunks * (H // heads),), {**self.constants, **GRADIENT_OPTIONS, "HEADS": heads}
        _key_grad_kernel[grid](q, k, v, g, dt, self.ids, *kept, dout_tHV, *dqk, *self.sizes, **options)
        # Each program reads what it overwrites: v, g and dt of its chunk and heads.
        _value_grad_kernel[grid](q, k, v, g, dt, self.skip_H, self.ids, *kept, dout_tHV, dskip, *self.sizes, **options)
        self.dskip_H.add_(dskip.sum(0))
        dqk = dqk if heads == repeats else dqk.unflatten(2, (H // repeats, -1)).sum(3)
        dq, dk = dqk[..., : self.K]
        for x, grad in zip(self.inputs, (dq, dk, v, g, dt), strict=True):
            if x.data_ptr() != grad.data_ptr():
                x.copy_(grad)
        return dstate_HKV[:, : self.K]

    def _states(self, state_HKV: Tensor, dout: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states before all blocks, their decays, and the state after the segment; with `dout`, the
        gradients of the states after all blocks, and of the one before the segment."""
        (_, H, _), first = self.sizes, F.pad(state_HKV, (0, 0, 0, self.padding)).contiguous()
        states, last = first.new_empty(self.num_blocks, *first.shape), torch.empty_like(first)
        decays = first.new_empty(self.num_blocks, H)
        if dout is None:
            self._walk(states, decays)
        else:
            self._walk_grad(states, decays, dout)
        size = first[0].numel()
        _pass_kernel[(H * triton.cdiv(size, PASS_SIZE),)](
            states, decays, first, last, self.num_blocks, H, SIZE=size, PART=PASS_SIZE, REVERSES=dout is not None
        )
        return states, decays, last

    def _walk(self, states: Tensor, decays: Tensor, out: Tensor | None = None, kept: Tensor | None = None) -> None:
        """Write `out` or `kept`, from the states before all blocks; without both, write the blocks' maps to `states`
        and `decays`."""
        q, k, v, g, dt = self.own
        _walk_kernel[self.grid](
            q, k, v, g, dt, self.skip_H, self.ids, states, decays, states if out is None else out,
            states if kept is None else kept, *self.sizes, **self.constants, CHUNKS=CHUNKS, HAS_OUT=out is not None,
            KEEPS=kept is not None, IS_MAP=out is None and kept is None, **WALK_OPTIONS,
        )  # fmt: skip

    def _walk_grad(self, states: Tensor, decays: Tensor, dout: Tensor, kept: Tensor | None = None) -> None:
        q, _, _, g, _ = self.own
        _walk_grad_kernel[self.grid](
            q, g, dout, self.ids, states, decays, states if kept is None else kept, *self.sizes, **self.constants,
            CHUNKS=CHUNKS, IS_MAP=kept is None, **WALK_OPTIONS,
        )  # fmt: skip


if triton is not None:
    import triton.language as tl

    from ithaka.ops.delta_kernels import _load_decays, _load_rows

    @triton.jit
    def _decay_between(log, id_C, i):
        """Return the decay from each token of a chunk to each later one of its document."""
        is_seen, between = (i[:, None] >= i[None, :]) & (id_C[:, None] == id_C[None, :]), log[:, None] - log[None, :]
        return tl.where(is_seen, tl.exp(tl.minimum(between, 0.0)), 0.0)

    @triton.jit
    def _walk_kernel(
        q, k, v, g, dt, skip, ids, states, decays, out, kept, t, H, repeats,
        V: tl.constexpr, COLUMNS: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
        CHUNKS: tl.constexpr, HAS_OUT: tl.constexpr, KEEPS: tl.constexpr, IS_MAP: tl.constexpr,
    ):  # fmt: skip
        parts: tl.constexpr = V // COLUMNS
        row, col = tl.program_id(0) // parts, tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
        block, h = row // H, row % H
        j, J, i = h // repeats, H // repeats, tl.arange(0, C)
        at_KV = tl.arange(0, K)[:, None] * V + col[None, :]
        passed = tl.sum(tl.zeros((C,), tl.float32), 0) + 1.0
        state = tl.zeros((K, COLUMNS), tl.float32) if IS_MAP else tl.load(states + row * (K * V) + at_KV)
        for step in range(CHUNKS):
            chunk = block * CHUNKS + step
            at = chunk * C + i
            inside, at_CV = (at < t)[:, None], (at * H + h)[:, None] * V + col[None, :]
            log, id_C, e, f, p = _load_decays(g, ids, chunk, h, t, H, C)
            x, b = tl.load(v + at_CV, inside, other=0.0), tl.load(dt + at * H + h, at < t, other=0.0)
            k_CK = _load_rows(k, at, j, t, J, K)
            if HAS_OUT:
                q_CK = _load_rows(q, at, j, t, J, K)
                products = tl.dot(q_CK, tl.trans(k_CK)) * _decay_between(log, id_C, i) * b[None, :]
                o = tl.dot(q_CK, state.to(x.dtype)) * e[:, None] + tl.dot(products.to(x.dtype), x)
                o += x.to(tl.float32) * tl.load(skip + h)
                tl.store(out + at_CV, o.to(out.dtype.element_ty), inside)
            if KEEPS:
                is_chunk = tl.zeros((K, COLUMNS), tl.int32) + chunk * C < t
                tl.store(kept + (chunk * H + h) * (K * V) + at_KV, state.to(kept.dtype.element_ty), is_chunk)
            state = state * p + tl.dot(tl.trans(k_CK), (x.to(tl.float32) * (b * f)[:, None]).to(x.dtype))
            passed *= p
        if IS_MAP:
            tl.store(states + row * (K * V) + at_KV, state)
            tl.store(decays + row, passed)

    @triton.jit
    def _walk_grad_kernel(
        q, g, dout, ids, states, decays, kept, t, H, repeats,
        V: tl.constexpr, COLUMNS: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
        CHUNKS: tl.constexpr, IS_MAP: tl.constexpr,
    ):  # fmt: skip
        parts: tl.constexpr = V // COLUMNS
        row, col = tl.program_id(0) // parts, tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
        block, h = row // H, row % H
        j, J, i = h // repeats, H // repeats, tl.arange(0, C)
        at_KV = tl.arange(0, K)[:, None] * V + col[None, :]
        passed = tl.sum(tl.zeros((C,), tl.float32), 0) + 1.0
        dstate = tl.zeros((K, COLUMNS), tl.float32) if IS_MAP else tl.load(states + row * (K * V) + at_KV)
        for step in range(CHUNKS):
            chunk = block * CHUNKS + CHUNKS - 1 - step
            at = chunk * C + i
            _, _, e, _, p = _load_decays(g, ids, chunk, h, t, H, C)
            if not IS_MAP:
                is_chunk = tl.zeros((K, COLUMNS), tl.int32) + chunk * C < t
                tl.store(kept + (chunk * H + h) * (K * V) + at_KV, dstate.to(kept.dtype.element_ty), is_chunk)
            d = tl.load(dout + (at * H + h)[:, None] * V + col[None, :], (at < t)[:, None], other=0.0)
            read = (d.to(tl.float32) * e[:, None]).to(d.dtype)
            dstate = dstate * p + tl.dot(tl.trans(_load_rows(q, at, j, t, J, K)), read)
            passed *= p
        if IS_MAP:
            tl.store(states + row * (K * V) + at_KV, dstate)
            tl.store(decays + row, passed)

    @triton.jit
    def _pass_kernel(
        states, decays, first, last, num_blocks, H,
        SIZE: tl.constexpr, PART: tl.constexpr, REVERSES: tl.constexpr,
    ):  # fmt: skip
        parts: tl.constexpr = (SIZE + PART - 1) // PART
        h, at = tl.program_id(0) // parts, tl.program_id(0) % parts * PART + tl.arange(0, PART)
        inside = at < SIZE
        state = tl.load(first + h * SIZE + at, inside, other=0.0)
        for step in range(num_blocks):
            block = num_blocks - 1 - step if REVERSES else step
            into = states + (block * H + h) * SIZE + at
            added = tl.load(into, inside, other=0.0)
            tl.store(into, state, inside)
            state = state * tl.load(decays + block * H + h) + added
        tl.store(last + h * SIZE + at, state, inside)

    @triton.jit
    def _key_grad_kernel(
        q, k, v, g, dt, ids, states, dstates, dout, dq, dk, t, H, repeats, HEADS: tl.constexpr,
        V: tl.constexpr, COLUMNS: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    ):  # fmt: skip
        """Write dq and dk, summed over HEADS heads."""
        parts = H // HEADS
        chunk, part = tl.program_id(0) // parts, tl.program_id(0) % parts
        j, J, i = part * HEADS // repeats, H // repeats, tl.arange(0, C)
        at = chunk * C + i
        inside, at_CK = at < t, (at * parts + part)[:, None] * K + tl.arange(0, K)[None, :]
        dscores, dq_CK = tl.zeros((C, C), tl.float32), tl.zeros((C, K), tl.float32)
        for head in range(HEADS):
            h = part * HEADS + head
            log, id_C, e, _, _ = _load_decays(g, ids, chunk, h, t, H, C)
            b = tl.load(dt + at * H + h, inside, other=0.0)
            dproducts = tl.zeros((C, C), tl.float32)
            for first in range(0, V, COLUMNS):
                col = first + tl.arange(0, COLUMNS)
                at_CV = (at * H + h)[:, None] * V + col[None, :]
                x, d = tl.load(v + at_CV, inside[:, None], other=0.0), tl.load(dout + at_CV, inside[:, None], other=0.0)
                state = tl.load(states + ((chunk * H + h) * K + tl.arange(0, K)[:, None]) * V + col[None, :])
                dproducts = tl.dot(d, tl.trans(x), dproducts)
                dq_CK = tl.dot((d.to(tl.float32) * e[:, None]).to(d.dtype), tl.trans(state), dq_CK)
            dscores += dproducts * _decay_between(log, id_C, i) * b[None, :]
        k_CK = _load_rows(k, at, j, t, J, K)
        dscores_CC = dscores.to(k_CK.dtype)
        tl.store(dq + at_CK, tl.dot(dscores_CC, k_CK, dq_CK), inside[:, None])
        dk_CK = tl.dot(tl.trans(dscores_CC), _load_rows(q, at, j, t, J, K))
        for head in range(HEADS):
            h = part * HEADS + head
            _, _, _, f, _ = _load_decays(g, ids, chunk, h, t, H, C)
            b = tl.load(dt + at * H + h, inside, other=0.0) * f
            for first in range(0, V, COLUMNS):
                col = first + tl.arange(0, COLUMNS)
                x = tl.load(v + (at * H + h)[:, None] * V + col[None, :], inside[:, None], other=0.0)
                dstate = tl.load(dstates + ((chunk * H + h) * K + tl.arange(0, K)[:, None]) * V + col[None, :])
                dk_CK = tl.dot((x.to(tl.float32) * b[:, None]).to(x.dtype), tl.trans(dstate), dk_CK)
        tl.store(dk + at_CK, dk_CK, inside[:, None])

    @triton.jit
    def _value_grad_kernel(
        q, k, v, g, dt, skip, ids, states, dstates, dout, dskip, t, H, repeats, HEADS: tl.constexpr,
        V: tl.constexpr, COLUMNS: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    ):  # fmt: skip
        """Overwrite v, g and dt with their gradients, and write a chunk's part of D's."""
        parts = H // HEADS
        chunk, part = tl.program_id(0) // parts, tl.program_id(0) % parts
        j, J, i = part * HEADS // repeats, H // repeats, tl.arange(0, C)
        at = chunk * C + i
        inside = at < t
        q_CK, k_CK = _load_rows(q, at, j, t, J, K), _load_rows(k, at, j, t, J, K)
        scores = tl.dot(q_CK, tl.trans(k_CK))
        for head in range(HEADS):
            h = part * HEADS + head
            row = at * H + h
            log, id_C, e, f, p = _load_decays(g, ids, chunk, h, t, H, C)
            b, skipped = tl.load(dt + row, inside, other=0.0), tl.load(skip + h)
            products = scores * _decay_between(log, id_C, i)
            dproducts = tl.zeros((C, C), tl.float32)
            db, dlog, to_state = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
            dskip_C, passed = tl.zeros((C,), tl.float32), tl.zeros((K,), tl.float32)
            for first in range(0, V, COLUMNS):
                col = first + tl.arange(0, COLUMNS)
                at_CV = row[:, None] * V + col[None, :]
                at_KV = ((chunk * H + h) * K + tl.arange(0, K)[:, None]) * V + col[None, :]
                x, d = tl.load(v + at_CV, inside[:, None], other=0.0), tl.load(dout + at_CV, inside[:, None], other=0.0)
                state, dstate = tl.load(states + at_KV), tl.load(dstates + at_KV)
                passed += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
                dproducts = tl.dot(d, tl.trans(x), dproducts)
                dwritten = tl.dot(k_CK, dstate) * f[:, None]
                dy = tl.dot(tl.trans(products.to(x.dtype)), d) + dwritten
                x, d = x.to(tl.float32), d.to(tl.float32)
                dlog += tl.sum(tl.dot(q_CK, state) * d, 1)
                to_state += tl.sum(dwritten * x, 1)
                db += tl.sum(dy * x, 1)
                dskip_C += tl.sum(d * x, 1)
                tl.store(v + at_CV, (dy * b[:, None] + d * skipped).to(v.dtype.element_ty), inside[:, None])
            dlog_CC, to_state = dproducts * products * b[None, :], to_state * b
            dlog = dlog * e + tl.sum(dlog_CC, 1) - tl.sum(dlog_CC, 0) - to_state
            # g decays what later tokens read, and what leaves the chunk.
            dg = tl.cumsum(dlog, 0, reverse=True) + tl.sum(to_state, 0) + p * tl.sum(passed, 0)
            tl.store(g + row, dg, inside)
            tl.store(dt + row, db, inside)
            tl.store(dskip + chunk * H + h, tl.sum(dskip_C, 0))
