"""Attention in block pairs: exact, any length, packed documents, causal, bidirectional and sliding window.

Shapes: S = tokens of the packed sequence, n = query heads, m = key/value heads, r = n // m query heads per kv
head, K = head dim. Inside: B = pairs in one batched kernel call, h = kv heads in one kernel call, q/k =
rows/keys of a pair.

The softmax over all keys of a row is merged from the pairs in fp32 and rounded once. In backward every pair gets the
*global* out and lse rows, so the pairs' gradients simply add up: dq in an fp32 sum per query block, rounded once; dk
and dv in fp32 sums of full length, which the caller may pass from call to call. (For fp64 inputs all sums are fp64.)
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ithaka.attention.fused import merge
from ithaka.attention.kernels import Grads, Kernel, resolve_kernel
from ithaka.attention.pairs import CAUSAL, EDGE, Pair, QueryBlock, Span, query_major, spans_of, split_ragged
from ithaka.config import ConfigError

MAX_ELEMENTS = 2**31 - 1  # the most that a kernel call may address
# Up to this length, documents of unequal length share calls of the varlen kernel. cuDNN is faster at every length but
# plans each new shape (0.13 s for both directions); longer documents repay that (measured at 128 heads x layers).
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
    docs: "Docs | tuple[int, ...] | None" = None,
    kernel: str = "auto",
    blocks: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v, and the log-sum-exp of each row. Not differentiable.

    n is a multiple of m; query head j reads kv head j // (n // m). `docs` are the cumulative starts of the packed
    documents, (0, ..., S), or a `Docs` of them made once for many calls; attention never crosses documents. `window=w`:
    row i sees keys (i - w, i]. Inputs may be strided in S and heads. `blocks` = (block_q, block_kv) in tokens; the
    default follows from the L2 size. Returns out_SnK (contiguous, q's dtype) and lse_nS (fp32; fp64 for fp64);
    allocates only those and block buffers.
    """
    job = _job(q_SnK, k_SmK, v_SmK, scale, causal, window, docs, kernel, blocks)
    out_SnK = torch.empty(q_SnK.shape, dtype=q_SnK.dtype, device=q_SnK.device)
    lse_nS = torch.empty(q_SnK.shape[1], q_SnK.shape[0], dtype=job.sum_dtype, device=q_SnK.device)
    lse_mrS = lse_nS.unflatten(0, (-1, job.repeat))
    for heads in job.head_slices():
        k, v = k_SmK[:, heads], v_SmK[:, heads]
        for r in range(job.repeat):
            q, out, lse = job.query(q_SnK, heads, r), job.query(out_SnK, heads, r), lse_mrS[heads, r]
            for block in job.query_blocks:
                _forward_block(job, block, q, k, v, out, lse)
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
    docs: "Docs | tuple[int, ...] | None" = None,
    kernel: str = "auto",
    blocks: tuple[int, int] | None = None,
    sums: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq_SnK, dk_SmK, dv_SmK (contiguous, the inputs' dtype) from `attention`'s inputs and its results.

    `sums`: dk_SmK and dv_SmK in fp32 (fp64 for fp64), which this call adds to and returns as dk and dv. It then also
    writes dq over `out`, so that it allocates nothing as long as the sequence. Without `sums` it makes its own, rounds
    them, and leaves `out` alone.
    """
    job = _job(q_SnK, k_SmK, v_SmK, scale, causal, window, docs, kernel, blocks, backward=True)
    if sums is None:
        dq_SnK = torch.empty(q_SnK.shape, dtype=q_SnK.dtype, device=q_SnK.device)
        dk_SmK, dv_SmK = (torch.zeros(x.shape, dtype=job.sum_dtype, device=x.device) for x in (k_SmK, v_SmK))
    else:
        dq_SnK, (dk_SmK, dv_SmK) = out_SnK, sums
        assert dk_SmK.dtype == dv_SmK.dtype == job.sum_dtype, f"sums in {dk_SmK.dtype} and {dv_SmK.dtype}"
    lse_mrS = lse_nS.unflatten(0, (-1, job.repeat))
    for heads in job.head_slices():
        keys = _Keys(k_SmK[:, heads], v_SmK[:, heads], dk_SmK[:, heads], dv_SmK[:, heads])
        for r in range(job.repeat):
            query = _Query(
                dout=job.query(dout_SnK, heads, r),
                q=job.query(q_SnK, heads, r),
                out=job.query(out_SnK, heads, r),
                dq=job.query(dq_SnK, heads, r),
                lse=lse_mrS[heads, r],
            )
            for block in job.query_blocks:
                _backward_block(job, block, query, keys)
            for chunk in job.chunks:
                _backward_chunk(job, chunk, query, keys)
    if sums is None:
        dk_SmK, dv_SmK = dk_SmK.to(k_SmK.dtype), dv_SmK.to(v_SmK.dtype)
    return dq_SnK, dk_SmK, dv_SmK


def default_blocks(device: torch.device, kernel: str, row_bytes: int, backward: bool = False) -> tuple[int, int]:
    """(block_q, block_kv) in tokens, for one head of `row_bytes` per token.

    On a GPU the keys and values of a block, which every row reads again, fill up to 0.6 of the L2 cache (64 Ki tokens
    of a 128-wide head in an H200's 60 MB). Elsewhere blocks only bound the buffers.
    """
    if kernel == "reference":
        return 1024, 1024  # it holds the pair's scores in fp64
    if device.type != "cuda":
        return 8192, 8192
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    tokens = max(8192, int(0.6 * l2_bytes) // (2 * row_bytes))
    block_kv = 1 << (tokens.bit_length() - 1)
    return (4 if backward else 2) * block_kv, block_kv


# --- planning one call ------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class _Walk:
    """The work of one call: query blocks, and chunks of short unequal documents for the varlen kernel."""

    query_blocks: list[QueryBlock]
    chunks: list[_Chunk]


class Docs:
    """The cumulative starts of packed documents, (0, ..., S), and the walks over them, each planned once.

    Made once per batch and passed to every call of attention: with thousands of documents, planning a walk takes the
    host longer than attention takes the GPU, and every call would upload the varlen kernel's indices.
    """

    def __init__(self, starts: tuple[int, ...]) -> None:
        self.starts = starts
        if starts[0] != 0 or any(b < a for a, b in zip(starts, starts[1:], strict=False)):
            raise ConfigError(f"docs must start at 0 and ascend, got {starts[:4]}...{starts[-2:]}")
        self._walks: dict[tuple, _Walk] = {}

    def walk(self, device: torch.device, varlen: bool, **how: Any) -> _Walk:
        """`varlen`: whether the kernel takes chunks; `how`: the mask and blocks that `query_major` takes."""
        key = (device, varlen, *how.values())
        if key not in self._walks:
            spans, chunks = spans_of(self.starts), []
            if varlen:
                short = min(SHORT, how["block_q"], how["block_kv"])
                spans, ragged = split_ragged(spans, short=short, block=how["block_q"])
                chunks = [_Chunk.of(chunk, device) for chunk in ragged]
            self._walks[key] = _Walk(list(query_major(spans, **how)), chunks)
        return self._walks[key]


@dataclass(frozen=True)
class _Job:
    kernel: Kernel
    scale: float
    causal: bool
    window: int | None
    query_blocks: list[QueryBlock]
    chunks: list[_Chunk]
    block_q: int
    num_tokens: int
    num_kv_heads: int
    repeat: int
    sum_dtype: torch.dtype

    def kernel_for(self, pair: Pair) -> Kernel:
        """The kernel, or its stand-in if the pair has too few rows or keys."""
        small = min(pair.rows, pair.keys) < self.kernel.smallest
        return self.kernel.stand_in if small and self.kernel.stand_in is not None else self.kernel

    def head_slices(self) -> Iterable[slice]:
        """kv heads per kernel call: one at long lengths (a block fills the chip), more at short ones."""
        heads = max(1, self.block_q // max(1, self.num_tokens))
        return (slice(a, a + heads) for a in range(0, self.num_kv_heads, heads))

    def query(self, x_SnK: Tensor, heads: slice, r: int) -> Tensor:
        """The r-th query head of each kv head in `heads`: a view, so GQA never repeats k or v."""
        return x_SnK.unflatten(1, (self.num_kv_heads, self.repeat))[:, heads, r]


def _job(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    docs: Docs | tuple[int, ...] | None,
    kernel_name: str,
    blocks: tuple[int, int] | None,
    backward: bool = False,
) -> _Job:
    num_tokens, num_heads, head_dim = q.shape
    docs = docs if isinstance(docs, Docs) else Docs((0, num_tokens) if docs is None else tuple(docs))
    _check(q, k, v, docs, causal, window, blocks)
    kernel = resolve_kernel(kernel_name, q.device, q.dtype, head_dim)
    block_q, block_kv = blocks or default_blocks(q.device, kernel.name, head_dim * q.element_size(), backward)
    most = max(1, MAX_ELEMENTS // max(x.stride(0) for x in (q, k, v)))
    block_q, block_kv = min(block_q, most), min(block_kv, most)
    how = dict(causal=causal, window=window, block_q=block_q, block_kv=block_kv, halve=not backward)
    walk = docs.walk(q.device, kernel.varlen is not None, **how)
    return _Job(
        kernel, scale, causal, window, walk.query_blocks, walk.chunks, block_q, num_tokens,
        k.shape[1], num_heads // k.shape[1], torch.float64 if q.dtype == torch.float64 else torch.float32,
    )  # fmt: skip


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    docs: Docs,
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
    if docs.starts[-1] != q.shape[0]:
        raise ConfigError(f"docs end at {docs.starts[-1]}; they must ascend from 0 to the {q.shape[0]} tokens")
    if blocks is not None and min(blocks) < 1:
        raise ConfigError(f"attention.block_q, block_kv={blocks}: each needs at least one token")


# --- views of a run of tokens, once per repetition of a block ---------------------------------------------


def _rows(x_ShK: Tensor, repeats: QueryBlock | Pair, start: int, length: int) -> Tensor:
    """View [B, h, length, K] of the tokens from `start` on."""
    num_heads, head_dim = x_ShK.shape[1:]
    by_token, by_head, by_element = x_ShK.stride()
    return x_ShK.as_strided(
        (repeats.count, num_heads, length, head_dim),
        (repeats.step * by_token, by_head, by_token, by_element),
        x_ShK.storage_offset() + start * by_token,
    )


def _lse_rows(lse_hS: Tensor, repeats: QueryBlock | Pair, start: int, length: int) -> Tensor:
    """View [B, h, length], as `_rows`."""
    by_head, by_token = lse_hS.stride()
    return lse_hS.as_strided(
        (repeats.count, lse_hS.shape[0], length),
        (repeats.step * by_token, by_head, by_token),
        lse_hS.storage_offset() + start * by_token,
    )


def _repeats(block: QueryBlock, pair: Pair) -> QueryBlock | Pair:
    return pair if pair.count > 1 else block


def _is_one_pair(block: QueryBlock) -> bool:
    return len(block.pairs) == 1 and block.pairs[0].count == 1


def _in_block(block_Bht: Tensor, pair: Pair, at: int, length: int) -> Tensor:
    """The pair's part of a block's buffer [B, h, t, ...], in which row `at` is the pair's first."""
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


def _forward_block(job: _Job, block: QueryBlock, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    """All keys of one query block, merged in fp32 and written once."""
    to_out = _rows(out, block, block.start, block.length)
    to_lse = _lse_rows(lse, block, block.start, block.length)
    one = _is_one_pair(block)
    if not one:
        sum_out = torch.zeros(to_out.shape, dtype=job.sum_dtype, device=out.device)
        sum_lse = torch.full(to_lse.shape, float("-inf"), dtype=job.sum_dtype, device=out.device)
    for pair in block.pairs:
        repeats, at = _repeats(block, pair), pair.q0 - block.start
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
    """The kv heads of this call, all [S, h, K] views; dk and dv are the sums."""

    k: Tensor
    v: Tensor
    dk: Tensor
    dv: Tensor


def _backward_pair(job: _Job, repeats: QueryBlock | Pair, pair: Pair, query: _Query, keys: _Keys) -> Grads:
    """What this pair adds to dq, dk and dv, each [B, h, rows or keys, K]."""
    kernel = job.kernel_for(pair)
    dout, q, out = (_rows(x, repeats, pair.q0, pair.rows) for x in (query.dout, query.q, query.out))
    lse = _lse_rows(query.lse, repeats, pair.q0, pair.rows)
    k, v = (_rows(x, repeats, pair.k0, pair.keys) for x in (keys.k, keys.v))
    if pair.mask != EDGE:
        return kernel.backward(dout, q, k, v, out, lse, job.scale, pair.mask == CAUSAL)
    flipped = [x.flip(2) for x in (dout, q, k, v, out, lse)]
    dq, dk, dv = kernel.backward(*flipped, job.scale, True)
    return dq.flip(2), dk.flip(2), dv.flip(2)


def _backward_block(job: _Job, block: QueryBlock, query: _Query, keys: _Keys) -> None:
    """All keys of one query block. dq may share `out`'s memory: it is written after the last read of these rows."""
    to_dq = _rows(query.dq, block, block.start, block.length)
    one = _is_one_pair(block)
    if not one:
        sum_dq = torch.zeros(to_dq.shape, dtype=job.sum_dtype, device=to_dq.device)
    for pair in block.pairs:
        repeats, at = _repeats(block, pair), pair.q0 - block.start
        pair_dq, pair_dk, pair_dv = _backward_pair(job, repeats, pair, query, keys)
        _rows(keys.dk, repeats, pair.k0, pair.keys).add_(pair_dk)
        _rows(keys.dv, repeats, pair.k0, pair.keys).add_(pair_dv)
        if not one:
            _in_block(sum_dq, pair, at, pair.rows).add_(pair_dq)
    to_dq.copy_(pair_dq if one else sum_dq)


def _backward_chunk(job: _Job, chunk: _Chunk, query: _Query, keys: _Keys) -> None:
    assert job.kernel.varlen is not None
    at = slice(chunk.start, chunk.stop)
    inputs = (query.dout[at], query.q[at], keys.k[at], keys.v[at], query.out[at], query.lse[:, at])
    query.dq[at], dk, dv = job.kernel.varlen.backward(
        *inputs, chunk.ends_d, chunk.longest, job.scale, job.causal, job.window
    )
    keys.dk[at].add_(dk)
    keys.dv[at].add_(dv)
