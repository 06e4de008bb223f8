"""Attention in block pairs: exact, any length, packed documents, causal, bidirectional and sliding window.

Shapes: S = tokens of the packed sequence, n = query heads, m = key/value heads, r = n // m query heads per kv
head, K = head dim. Inside: B = pairs in one batched kernel call, h = kv heads in one kernel call, q/k =
rows/keys of a pair.

The softmax over all keys of a row is merged from the pairs in fp32 and rounded once. In backward every pair
gets the *global* out and lse rows, so the pairs' gradients simply add, in fp32, and are rounded once.

**Where the fp32 sums of backward live.** One side of a block (the owner's) has block-sized fp32 buffers. The
other side is visited by many blocks and would need a full-length fp32 tensor. Instead its 32 bits are split:
the high half lies in the gradient's own 16-bit memory, the low half in a gradient that is not written yet:

    r = 1, key-major:    dk, dv are block-sized; dq's low half lies in dk. Keys ascend, so when a run of dk is
                         due, the same run of dq rows has seen all its keys: it is rounded first, then dk is
                         written.
    r > 1, query-major:  dq is block-sized; dk's and dv's low halves lie in dq of the kv head's first two
                         query heads. Rows descend, so when a run of dq is due, those keys have met all their
                         rows.

Nothing is allocated and nothing computed twice for it. Without a causal mask no run is final before the last
block, so bidirectional attention over more than one block keeps the low halves of one kv head in a buffer of
their own: S * K * 2 bytes (r = 1) or twice that (r > 1).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ithaka.config import ConfigError
from ithaka.ops.fused import merge, split_add, split_round
from ithaka.ops.kernels import Kernel, resolve_kernel
from ithaka.ops.pairs import CAUSAL, EDGE, Group, Pair, Span, key_major, query_major, spans_of, split_ragged

MAX_ELEMENTS = 2**31 - 1  # what a kernel call may address
# Unequal documents of at most this many tokens go to the varlen kernel, several per call. cuDNN is faster at
# all lengths but plans each new shape, 0.13 s for both directions: worth it from about here on (128 heads x
# layers).
SHORT = 32768


@torch.no_grad()
def attention(
    q_SnK: Tensor,
    k_SmK: Tensor,
    v_SmK: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    docs: tuple[int, ...] | None = None,
    kernel: str = "auto",
    blocks: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v, and the log-sum-exp of each row. Not differentiable by itself.

    n is a multiple of m; query head j reads kv head j // (n // m). `docs` are the cumulative starts of the
    packed documents, (0, ..., S); attention never crosses one. `window=w`: row i sees keys (i - w, i].
    Inputs may be strided in S and heads. `blocks` = (block_q, block_kv) in tokens, else from the L2 size.
    Returns out_SnK (contiguous, q's dtype) and lse_nS (fp32; fp64 for fp64); allocates only those and block
    buffers.
    """
    job = _job(q_SnK, k_SmK, v_SmK, scale, causal, window, docs, kernel, blocks)
    out_SnK = torch.empty(q_SnK.shape, dtype=q_SnK.dtype, device=q_SnK.device)
    lse_nS = torch.empty(q_SnK.shape[1], q_SnK.shape[0], dtype=job.sum_dtype, device=q_SnK.device)
    lse_mrS = lse_nS.unflatten(0, (-1, job.repeat))
    for heads in job.head_slices():
        k, v = k_SmK[:, heads], v_SmK[:, heads]
        for r in range(job.repeat):
            q, out, lse = job.query(q_SnK, heads, r), job.query(out_SnK, heads, r), lse_mrS[heads, r]
            for group in job.query_major(halve=True):
                _forward_group(job, group, q, k, v, out, lse)
            for chunk in job.chunks:
                _forward_chunk(job, chunk, q, k, v, out, lse)
    return out_SnK, lse_nS


@torch.no_grad()
def attention_backward(
    dout_SnK: Tensor,
    q_SnK: Tensor,
    k_SmK: Tensor,
    v_SmK: Tensor,
    out_SnK: Tensor,
    lse_nS: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    docs: tuple[int, ...] | None = None,
    kernel: str = "auto",
    blocks: tuple[int, int] | None = None,
    sums: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq_SnK, dk_SmK, dv_SmK (contiguous, the inputs' dtype) from `attention`'s inputs and its results.

    `sums`: fp32 (fp64 for fp64) dk_SmK and dv_SmK that other calls have added to already; this call adds its own,
    block by block, and returns them as dk and dv. It then also writes dq over `out`, whose rows it has done with.
    """
    job = _job(q_SnK, k_SmK, v_SmK, scale, causal, window, docs, kernel, blocks, backward=True)
    dq_SnK = torch.empty(q_SnK.shape, dtype=q_SnK.dtype, device=q_SnK.device) if sums is None else out_SnK
    dk_SmK, dv_SmK = sums or (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k_SmK, v_SmK))
    lse_mrS = lse_nS.unflatten(0, (-1, job.repeat))
    for heads in job.head_slices():
        queries = [
            _Query(
                dout=job.query(dout_SnK, heads, r),
                q=job.query(q_SnK, heads, r),
                out=job.query(out_SnK, heads, r),
                dq=job.query(dq_SnK, heads, r),
                lse=lse_mrS[heads, r],
            )
            for r in range(job.repeat)
        ]
        keys = _Keys(k_SmK[:, heads], v_SmK[:, heads], dk_SmK[:, heads], dv_SmK[:, heads], sums is not None)
        if job.repeat == 1 and sums is None:
            _backward_key_major(job, queries[0], keys)
        else:
            _backward_query_major(job, queries, keys)
        for chunk in job.chunks:
            _backward_chunk(job, chunk, queries, keys)
    return dq_SnK, dk_SmK, dv_SmK


def default_blocks(device: torch.device, kernel: str, row_bytes: int, backward: bool = False) -> tuple[int, int]:
    """(block_q, block_kv) in tokens, for one head of `row_bytes` per token.

    On a GPU the keys and values of a block, read again by every row, fill up to 0.6 of the L2 cache (measured
    on an H200: 64 Ki tokens of a 128-wide head in 60 MB). Elsewhere blocks only bound the buffers.
    """
    if kernel == "reference":
        return 1024, 1024  # it holds the pair's scores in fp64
    if device.type != "cuda":
        return 8192, 8192
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    tokens = max(8192, int(0.6 * l2_bytes) // (2 * row_bytes))
    block_kv = 1 << (tokens.bit_length() - 1)
    return (4 if backward else 2) * block_kv, block_kv


# --- what one call decides --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Chunk:
    """Neighbouring short documents, tokens [start, stop), for one varlen call."""

    start: int
    stop: int
    ends_d: Tensor
    longest: int

    @classmethod
    def of(cls, spans: list[Span], device: torch.device) -> "_Chunk":
        start = spans[0][0]
        ends = [0, *(a + length - start for a, length in spans)]
        longest = max(length for _, length in spans)
        return cls(start, start + ends[-1], torch.tensor(ends, dtype=torch.int32, device=device), longest)

    @property
    def group(self) -> Group:
        length = self.stop - self.start
        return Group(self.start, length, (Pair(self.start, length, self.start, length, CAUSAL),))


@dataclass(frozen=True)
class _Job:
    kernel: Kernel
    scale: float
    causal: bool
    window: int | None
    spans: list[Span]
    chunks: list[_Chunk]
    block_q: int
    block_kv: int
    num_tokens: int
    num_kv_heads: int
    repeat: int
    sum_dtype: torch.dtype

    @property
    def _mask(self) -> dict[str, Any]:
        return dict(causal=self.causal, window=self.window, block_q=self.block_q, block_kv=self.block_kv)

    def query_major(self, halve: bool = False) -> Iterable[Group]:
        return query_major(self.spans, halve=halve, **self._mask)

    def key_major(self) -> Iterable[Group]:
        return key_major(self.spans, **self._mask)

    def kernel_for(self, pair: Pair) -> Kernel:
        """The kernel, or its stand-in for pairs of too few rows or keys."""
        small = min(pair.rows, pair.keys) < self.kernel.smallest
        return self.kernel.stand_in if small and self.kernel.stand_in is not None else self.kernel

    def head_slices(self) -> Iterable[slice]:
        """kv heads per kernel call: one at long lengths (a block fills the chip), more at short ones."""
        heads = max(1, self.block_q // max(1, self.num_tokens))
        return (slice(a, a + heads) for a in range(0, self.num_kv_heads, heads))

    def query(self, x_SnK: Tensor, heads: slice, r: int) -> Tensor:
        """The r-th query head of each kv head in `heads`: a view, so GQA never repeats k or v."""
        return x_SnK.unflatten(1, (self.num_kv_heads, self.repeat))[:, heads, r]

    @cached_property
    def final_by_group(self) -> bool:
        """Whether a group's run needs nothing from later groups (keys ascending, or rows descending)."""
        longest = max((length for _, length in self.spans), default=0)
        return self.causal or longest <= min(self.block_q, self.block_kv)


def _job(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    docs: tuple[int, ...] | None,
    kernel_name: str,
    blocks: tuple[int, int] | None,
    backward: bool = False,
) -> _Job:
    num_tokens, num_heads, head_dim = q.shape
    docs = (0, num_tokens) if docs is None else tuple(docs)
    _check(q, k, v, docs, causal, window, blocks)
    kernel = resolve_kernel(kernel_name, q.device, q.dtype, head_dim)
    block_q, block_kv = blocks or default_blocks(q.device, kernel.name, head_dim * q.element_size(), backward)
    most = max(1, MAX_ELEMENTS // max(x.stride(0) for x in (q, k, v)))
    block_q, block_kv = min(block_q, most), min(block_kv, most)
    spans, chunks = spans_of(docs), []
    if kernel.varlen is not None:
        short = min(SHORT, block_q, block_kv)
        spans, ragged = split_ragged(spans, short=short, block=block_q)
        chunks = [_Chunk.of(chunk, q.device) for chunk in ragged]
    return _Job(
        kernel, scale, causal, window, spans, chunks, block_q, block_kv, num_tokens,
        k.shape[1], num_heads // k.shape[1], torch.float64 if q.dtype == torch.float64 else torch.float32,
    )  # fmt: skip


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    docs: tuple[int, ...],
    causal: bool,
    window: int | None,
    blocks: tuple[int, int] | None,
) -> None:
    if q.shape[1] % k.shape[1]:
        raise ConfigError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} kv heads")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ConfigError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit together")
    if window is not None and (window < 1 or not causal):
        raise ConfigError(f"window={window} with causal={causal}: a window is at least 1 and needs causal=True")
    if docs[0] != 0 or docs[-1] != q.shape[0] or any(b < a for a, b in zip(docs, docs[1:], strict=False)):
        raise ConfigError(f"docs must rise from 0 to {q.shape[0]} tokens, got {docs[:4]}...{docs[-2:]}")
    if blocks is not None and min(blocks) < 1:
        raise ConfigError(f"attention.block_q, block_kv={blocks}: each needs at least one token")


# --- views of a run of tokens, once per repetition of a group ---------------------------------------------


def _rows(x_ShK: Tensor, repeats: Group | Pair, start: int, length: int) -> Tensor:
    """View [B, h, length, K] of the tokens from `start` on."""
    num_heads, head_dim = x_ShK.shape[1:]
    by_token, by_head, by_element = x_ShK.stride()
    return x_ShK.as_strided(
        (repeats.count, num_heads, length, head_dim),
        (repeats.step * by_token, by_head, by_token, by_element),
        x_ShK.storage_offset() + start * by_token,
    )


def _lse_rows(lse_hS: Tensor, repeats: Group | Pair, start: int, length: int) -> Tensor:
    """View [B, h, length], as `_rows`."""
    by_head, by_token = lse_hS.stride()
    return lse_hS.as_strided(
        (repeats.count, lse_hS.shape[0], length),
        (repeats.step * by_token, by_head, by_token),
        lse_hS.storage_offset() + start * by_token,
    )


def _repeats(group: Group, pair: Pair) -> Group | Pair:
    return pair if pair.count > 1 else group


def _in_block(block_Bht: Tensor, pair: Pair, at: int, length: int) -> Tensor:
    """The pair's part of an owner's buffer [B, h, t, ...], whose row `at` is the pair's first."""
    if pair.count == 1:
        return block_Bht[:, :, at : at + length]
    by_head, by_token, *rest = block_Bht.stride()[1:]
    return block_Bht.as_strided(
        (pair.count, block_Bht.shape[1], length, *block_Bht.shape[3:]),
        (pair.step * by_token, by_head, by_token, *rest),
        block_Bht.storage_offset() + at * by_token,
    )


# --- forward ----------------------------------------------------------------------------------------------


def _forward_pair(job: _Job, pair: Pair, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    kernel = job.kernel_for(pair)
    if pair.mask != EDGE:
        return kernel.forward(q, k, v, job.scale, pair.mask == CAUSAL)
    out, lse = kernel.forward(q.flip(2), k.flip(2), v.flip(2), job.scale, True)
    return out.flip(2), lse.flip(2)


def _forward_group(job: _Job, group: Group, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    """All keys of one run of query rows, merged in fp32 and written once."""
    to_out = _rows(out, group, group.start, group.length)
    to_lse = _lse_rows(lse, group, group.start, group.length)
    one = len(group.pairs) == 1 and group.pairs[0].count == 1
    if not one:
        sum_out = torch.zeros(to_out.shape, dtype=job.sum_dtype, device=out.device)
        sum_lse = torch.full(to_lse.shape, float("-inf"), dtype=job.sum_dtype, device=out.device)
    for pair in group.pairs:
        repeats, at = _repeats(group, pair), pair.q0 - group.start
        q_rows = _rows(q, repeats, pair.q0, pair.rows)
        k_rows, v_rows = (_rows(x, repeats, pair.k0, pair.keys) for x in (k, v))
        pair_out, pair_lse = _forward_pair(job, pair, q_rows, k_rows, v_rows)
        if not one:
            so_far, so_far_lse = (_in_block(x, pair, at, pair.rows) for x in (sum_out, sum_lse))
            merge(so_far, so_far_lse, pair_out, pair_lse)
    to_out.copy_(pair_out if one else sum_out)
    to_lse.copy_(pair_lse if one else sum_lse)


def _forward_chunk(job: _Job, chunk: _Chunk, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    assert job.kernel.varlen is not None
    at = slice(chunk.start, chunk.stop)
    out[at], lse[:, at] = job.kernel.varlen.forward(
        q[at], k[at], v[at], chunk.ends_d, chunk.longest, job.scale, job.causal, job.window
    )


# --- backward ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Query:
    """One query head of each kv head in this call, all [S, h, K] views; lse [h, S]."""

    dout: Tensor
    q: Tensor
    out: Tensor
    dq: Tensor
    lse: Tensor


@dataclass(frozen=True)
class _Keys:
    k: Tensor
    v: Tensor
    dk: Tensor
    dv: Tensor
    add: bool = False  # dk and dv are fp32 sums to add to


class _BlockSum:
    """fp32 sums of the owner's run only; `finish` rounds them into the gradient."""

    def __init__(self, grad_ShK: Tensor, group: Group, dtype: torch.dtype, add: bool = False):
        self.grad, self.start = _rows(grad_ShK, group, group.start, group.length), group.start
        self.dtype, self.add_to_grad = dtype, add
        self.sum: Tensor | None = None

    def add(self, pair: Pair, start: int, x_BhtK: Tensor) -> None:
        if self.sum is None and x_BhtK.shape == self.grad.shape:
            self.sum = x_BhtK  # often the only one
            return
        if self.sum is None:
            self.sum = torch.zeros(self.grad.shape, dtype=self.dtype, device=self.grad.device)
        elif self.sum.dtype != self.dtype:
            self.sum = self.sum.to(self.dtype)
        _in_block(self.sum, pair, start - self.start, x_BhtK.shape[2]).add_(x_BhtK)

    def finish(self) -> None:
        assert self.sum is not None
        if self.add_to_grad:
            self.grad.add_(self.sum)
        else:
            self.grad.copy_(self.sum)


class _SplitSum:
    """fp32 sums over all tokens: high halves in the 16-bit gradient's own memory, low halves in `low`.

    A gradient of 32 or 64 bits is its own sum, which may have been begun by others (`add`).
    """

    def __init__(self, grad_ShK: Tensor, low_ShK: Tensor, add: bool = False):
        self.grad, self.split = grad_ShK, grad_ShK.element_size() == 2
        if not add:
            grad_ShK.zero_()
        if self.split:
            self.high, self.low = grad_ShK.view(torch.int16), low_ShK.view(torch.int16)
            self.low.zero_()

    def add(self, repeats: Group | Pair, start: int, x_BhtK: Tensor) -> None:
        length = x_BhtK.shape[2]
        if self.split:
            high, low = (_rows(x, repeats, start, length) for x in (self.high, self.low))
            split_add(high, low, x_BhtK)
        else:
            _rows(self.grad, repeats, start, length).add_(x_BhtK)

    def finish(self, group: Group) -> None:
        """Round the group's own run; its low half may be overwritten after this."""
        if self.split:
            own = [_rows(x, group, group.start, group.length) for x in (self.grad, self.high, self.low)]
            split_round(*own)


def _low_half(job: _Job, own: Tensor, spare: Tensor) -> Tensor:
    """Where `own`'s low half may lie: `spare` memory that is written later, or a buffer if nothing is."""
    return spare if job.final_by_group or own.element_size() > 2 else torch.empty_like(own)


def _backward_pair(job: _Job, group: Group, pair: Pair, query: _Query, keys: _Keys) -> tuple[Tensor, Tensor, Tensor]:
    """This pair's share of dq, dk, dv, each [B, h, rows or keys, K]."""
    kernel, repeats = job.kernel_for(pair), _repeats(group, pair)
    dout, q, out = (_rows(x, repeats, pair.q0, pair.rows) for x in (query.dout, query.q, query.out))
    lse = _lse_rows(query.lse, repeats, pair.q0, pair.rows)
    k, v = (_rows(x, repeats, pair.k0, pair.keys) for x in (keys.k, keys.v))
    if pair.mask != EDGE:
        return kernel.backward(dout, q, k, v, out, lse, job.scale, pair.mask == CAUSAL)
    flipped = [x.flip(2) for x in (dout, q, k, v, out, lse)]
    dq, dk, dv = kernel.backward(*flipped, job.scale, True)
    return dq.flip(2), dk.flip(2), dv.flip(2)


def _backward_key_major(job: _Job, query: _Query, keys: _Keys) -> None:
    groups = list(job.key_major())
    dq = None if all(group.whole for group in groups) else _SplitSum(query.dq, _low_half(job, query.dq, keys.dk))
    for group in groups:
        if dq is None or group.whole:
            _backward_whole(job, group, [query], keys)
            continue
        dk, dv = (_BlockSum(x, group, job.sum_dtype, keys.add) for x in (keys.dk, keys.dv))
        for pair in group.pairs:
            pair_dq, pair_dk, pair_dv = _backward_pair(job, group, pair, query, keys)
            dq.add(_repeats(group, pair), pair.q0, pair_dq)
            dk.add(pair, pair.k0, pair_dk)
            dv.add(pair, pair.k0, pair_dv)
        if job.final_by_group:
            dq.finish(group)
        dk.finish()
        dv.finish()
    _finish_late(job, [dq])


def _backward_query_major(job: _Job, queries: list[_Query], keys: _Keys) -> None:
    groups = list(job.query_major())
    dk = dv = None
    if not all(group.whole for group in groups):
        dk = _SplitSum(keys.dk, _low_half(job, keys.dk, queries[0].dq), keys.add)
        dv = _SplitSum(keys.dv, _low_half(job, keys.dv, queries[min(1, job.repeat - 1)].dq), keys.add)
    for group in reversed(groups):
        if dk is None or dv is None or group.whole:
            _backward_whole(job, group, queries, keys)
            continue
        late = []
        for r in reversed(range(job.repeat)):
            dq = _BlockSum(queries[r].dq, group, job.sum_dtype)
            for pair in group.pairs:
                pair_dq, pair_dk, pair_dv = _backward_pair(job, group, pair, queries[r], keys)
                dq.add(pair, pair.q0, pair_dq)
                dk.add(_repeats(group, pair), pair.k0, pair_dk)
                dv.add(_repeats(group, pair), pair.k0, pair_dv)
            if r >= 2:
                dq.finish()
            else:
                late.append(dq)  # these two write where the low halves lie
        if job.final_by_group:
            dk.finish(group)
            dv.finish(group)
        for dq in late:
            dq.finish()
    _finish_late(job, [dk, dv])


def _finish_late(job: _Job, sums: list[_SplitSum | None]) -> None:
    """Bidirectional attention over several blocks: nothing was final before the last of them."""
    if job.final_by_group:
        return
    for group in job.query_major():
        for total in sums:
            if total is not None and not group.whole:
                total.finish(group)


def _backward_whole(job: _Job, group: Group, queries: list[_Query], keys: _Keys) -> None:
    """Documents that are one pair each: dq is final at once, dk and dv after the last query head."""
    dk, dv = (_BlockSum(x, group, job.sum_dtype, keys.add) for x in (keys.dk, keys.dv))
    for query in queries:
        pair_dq, pair_dk, pair_dv = _backward_pair(job, group, group.pairs[0], query, keys)
        _rows(query.dq, group, group.start, group.length).copy_(pair_dq)
        dk.add(group.pairs[0], group.start, pair_dk)
        dv.add(group.pairs[0], group.start, pair_dv)
    dk.finish()
    dv.finish()


def _backward_chunk(job: _Job, chunk: _Chunk, queries: list[_Query], keys: _Keys) -> None:
    assert job.kernel.varlen is not None
    at = slice(chunk.start, chunk.stop)
    dk, dv = (_BlockSum(x, chunk.group, job.sum_dtype, keys.add) for x in (keys.dk, keys.dv))
    for query in queries:
        inputs = (query.dout[at], query.q[at], keys.k[at], keys.v[at], query.out[at], query.lse[:, at])
        query.dq[at], chunk_dk, chunk_dv = job.kernel.varlen.backward(
            *inputs, chunk.ends_d, chunk.longest, job.scale, job.causal, job.window
        )
        dk.add(chunk.group.pairs[0], chunk.start, chunk_dk.transpose(0, 1)[None])
        dv.add(chunk.group.pairs[0], chunk.start, chunk_dv.transpose(0, 1)[None])
    dk.finish()
    dv.finish()
