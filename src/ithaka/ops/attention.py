"""Attention in block pairs: exact, any length, packed documents, causal, bidirectional and sliding window.

Shapes: S = tokens of the packed sequence, n = query heads, m = key/value heads, r = n // m query heads per kv head,
K = head dim. Inside: B = pairs in one batched kernel call, h = kv heads in one kernel call, q/k = rows/keys of a pair.

The softmax over all keys of a row is merged from the pairs in fp32 and rounded once. In backward every pair gets the
*global* out and lse rows, so the pairs' gradients simply add; they are added in fp32 and rounded once.

**Where the fp32 sums of backward live.** One side of a block (the owner's) has block-sized fp32 buffers. The other
side is visited by many blocks and would need a full-length fp32 tensor. Instead its 32 bits are split: the high half
lies in the gradient's own 16-bit memory, the low half in a gradient that is not written yet:

    r = 1, key-major:    dk, dv are block-sized; dq's low half lies in dk. Keys ascend, so when a run of dk is due,
                         the same run of dq rows has seen all its keys: it is rounded first, then dk is written.
    r > 1, query-major:  dq is block-sized; dk's and dv's low halves lie in dq of the kv head's first two query
                         heads. Rows descend, so when a run of dq is due, those keys have met all their rows.

Nothing is allocated and nothing computed twice for it. Without a causal mask no run is final before the last block,
so bidirectional attention over more than one block keeps the low halves of one kv head in a buffer of their own:
S * K * 2 bytes (r = 1) or twice that (r > 1).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ithaka.config import ConfigError
from ithaka.ops.kernels import Kernel, resolve_kernel
from ithaka.ops.pairs import CAUSAL, EDGE, Group, Pair, key_major, query_major


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
    """softmax(scale * q k^T + mask) v, and the log-sum-exp of each row.

    n is a multiple of m; query head j reads kv head j // (n // m). `docs` are the cumulative starts of the packed
    documents, (0, ..., S). `window=w`: row i sees keys (i - w, i]. Inputs may be strided in S and heads.
    `blocks` = (block_q, block_kv) in tokens. Returns out_SnK (contiguous, q's dtype) and lse_nS (fp32; fp64 for fp64).
    """
    job = _job(q_SnK, k_SmK, v_SmK, scale, causal, window, docs, kernel, blocks)
    out_SnK = torch.empty(q_SnK.shape, dtype=q_SnK.dtype, device=q_SnK.device)
    lse_nS = torch.empty(q_SnK.shape[1], q_SnK.shape[0], dtype=job.sum_dtype, device=q_SnK.device)
    for heads in job.head_slices():
        k, v = k_SmK[:, heads], v_SmK[:, heads]
        for r in range(job.repeat):
            q, out = job.query(q_SnK, heads, r), job.query(out_SnK, heads, r)
            lse = lse_nS.unflatten(0, (-1, job.repeat))[heads, r]
            for group in job.query_major():
                _forward_group(job, group, q, k, v, out, lse)
    return out_SnK, lse_nS


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
) -> tuple[Tensor, Tensor, Tensor]:
    """dq_SnK, dk_SmK, dv_SmK (contiguous, the inputs' dtype) from `attention`'s inputs and both its results."""
    job = _job(q_SnK, k_SmK, v_SmK, scale, causal, window, docs, kernel, blocks)
    dq_SnK, dk_SmK, dv_SmK = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_SnK, k_SmK, v_SmK)
    )
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
        keys = _Keys(*(x[:, heads] for x in (k_SmK, v_SmK, dk_SmK, dv_SmK)))
        if job.repeat == 1:
            _backward_key_major(job, queries[0], keys)
        else:
            _backward_query_major(job, queries, keys)
    return dq_SnK, dk_SmK, dv_SmK


@dataclass(frozen=True)
class _Job:
    """What one call decided: kernel, blocks, mask and the head chunks."""

    kernel: Kernel
    scale: float
    causal: bool
    window: int | None
    docs: tuple[int, ...]
    block_q: int
    block_kv: int
    num_kv_heads: int
    repeat: int
    sum_dtype: torch.dtype

    def query_major(self) -> Iterable[Group]:
        return query_major(
            self.docs, causal=self.causal, window=self.window, block_q=self.block_q, block_kv=self.block_kv
        )

    def key_major(self) -> Iterable[Group]:
        return key_major(
            self.docs, causal=self.causal, window=self.window, block_q=self.block_q, block_kv=self.block_kv
        )

    def head_slices(self) -> Iterable[slice]:
        """kv heads per kernel call: one at long lengths (a block fills the chip), all of them at short ones."""
        heads = max(1, self.block_q // max(1, self.docs[-1]))
        return (slice(a, a + heads) for a in range(0, self.num_kv_heads, heads))

    def query(self, x_SnK: Tensor, heads: slice, r: int) -> Tensor:
        """The r-th query head of each kv head in `heads`: a view, so GQA never repeats k or v."""
        return x_SnK.unflatten(1, (self.num_kv_heads, self.repeat))[:, heads, r]

    @property
    def everything(self) -> Group:
        return Group(0, self.docs[-1], ())

    @property
    def final_by_group(self) -> bool:
        """Whether a group's own run needs nothing from later groups (they come in key or reversed query order)."""
        longest = max((b - a for a, b in zip(self.docs, self.docs[1:], strict=False)), default=0)
        return self.causal or longest <= min(self.block_q, self.block_kv)


def _job(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    docs: tuple[int, ...] | None,
    kernel: str,
    blocks: tuple[int, int] | None,
) -> _Job:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    docs = (0, num_tokens) if docs is None else tuple(docs)
    _check(q, k, v, docs, causal, window)
    block_q, block_kv = blocks or default_blocks(q.device, head_dim, q.element_size())
    return _Job(
        resolve_kernel(kernel, q.device, q.dtype, head_dim), scale, causal, window, docs, block_q, block_kv,
        num_kv_heads, num_heads // num_kv_heads, torch.float64 if q.dtype == torch.float64 else torch.float32,
    )  # fmt: skip


def _check(q: Tensor, k: Tensor, v: Tensor, docs: tuple[int, ...], causal: bool, window: int | None) -> None:
    if q.shape[1] % k.shape[1]:
        raise ConfigError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} kv heads")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ConfigError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit together")
    if window is not None and (window < 1 or not causal):
        raise ConfigError(
            f"window={window} with causal={causal}: a window is at least 1 and needs causal=True"
        )
    if docs[0] != 0 or docs[-1] != q.shape[0] or any(b < a for a, b in zip(docs, docs[1:], strict=False)):
        raise ConfigError(f"docs must rise from 0 to {q.shape[0]} tokens, got {docs[:4]}...{docs[-2:]}")


def default_blocks(device: torch.device, head_dim: int, element_bytes: int) -> tuple[int, int]:
    """(block_q, block_kv) in tokens."""
    return 8192, 8192


def _rows(x_ShK: Tensor, group: Group, start: int, length: int) -> Tensor:
    """View [B, h, length, K] of the tokens from `start` on in each repetition of the group."""
    num_heads, head_dim = x_ShK.shape[1:]
    by_token, by_head, by_element = x_ShK.stride()
    return x_ShK.as_strided(
        (group.count, num_heads, length, head_dim),
        (group.step * by_token, by_head, by_token, by_element),
        x_ShK.storage_offset() + start * by_token,
    )


def _lse_rows(lse_hS: Tensor, group: Group, start: int, length: int) -> Tensor:
    """View [B, h, length], as `_rows`."""
    by_head, by_token = lse_hS.stride()
    return lse_hS.as_strided(
        (group.count, lse_hS.shape[0], length),
        (group.step * by_token, by_head, by_token),
        lse_hS.storage_offset() + start * by_token,
    )


def _forward_pair(job: _Job, pair: Pair, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if pair.mask != EDGE:
        return job.kernel.forward(q, k, v, job.scale, pair.mask == CAUSAL)
    out, lse = job.kernel.forward(q.flip(2), k.flip(2), v.flip(2), job.scale, True)
    return out.flip(2), lse.flip(2)


def _forward_group(
    job: _Job, group: Group, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> None:
    """All keys of one run of query rows, merged in fp32 and written once."""
    to_out, to_lse = (
        _rows(out, group, group.start, group.length),
        _lse_rows(lse, group, group.start, group.length),
    )
    if len(group.pairs) > 1:
        sum_out = torch.zeros(to_out.shape, dtype=job.sum_dtype, device=out.device)
        sum_lse = torch.full(to_lse.shape, float("-inf"), dtype=job.sum_dtype, device=out.device)
    for pair in group.pairs:
        pair_out, pair_lse = _forward_pair(
            job,
            pair,
            _rows(q, group, pair.q0, pair.rows),
            *(_rows(x, group, pair.k0, pair.keys) for x in (k, v)),
        )
        if len(group.pairs) == 1:
            to_out.copy_(pair_out)
            to_lse.copy_(pair_lse)
            return
        at = slice(pair.q0 - group.start, pair.q0 - group.start + pair.rows)
        merge(sum_out[:, :, at], sum_lse[:, :, at], pair_out, pair_lse)
    to_out.copy_(sum_out)
    to_lse.copy_(sum_lse)


def merge(sum_out: Tensor, sum_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Add one pair's softmax to the running one, in place: [B, h, q, K] and [B, h, q]. sum_lse may be -inf."""
    new_lse = torch.logaddexp(sum_lse, lse)
    sum_out.mul_((sum_lse - new_lse).exp_()[..., None])
    sum_out.addcmul_(out.to(sum_out.dtype), (lse - new_lse).exp_()[..., None])
    sum_lse.copy_(new_lse)


# --- backward ---------------------------------------------------------------------------------------------------


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


class _BlockSum:
    """fp32 sums of the owner's run only; `finish` rounds them into the gradient."""

    def __init__(self, grad_ShK: Tensor, group: Group, dtype: torch.dtype):
        self.grad, self.group = _rows(grad_ShK, group, group.start, group.length), group
        self.sum = torch.zeros(self.grad.shape, dtype=dtype, device=grad_ShK.device)

    def add(self, start: int, x_BhtK: Tensor) -> None:
        at = start - self.group.start
        self.sum[:, :, at : at + x_BhtK.shape[2]] += x_BhtK

    def finish(self) -> None:
        self.grad.copy_(self.sum)


class _SplitSum:
    """fp32 sums over all tokens: high halves in the 16-bit gradient's own memory, low halves in `low`.

    A gradient of 32 or 64 bits is its own sum.
    """

    def __init__(self, grad_ShK: Tensor, low_ShK: Tensor):
        self.grad, self.split = grad_ShK, grad_ShK.element_size() == 2
        grad_ShK.zero_()
        if self.split:
            self.high, self.low = grad_ShK.view(torch.int16), low_ShK.view(torch.int16)
            self.low.zero_()

    def add(self, group: Group, start: int, x_BhtK: Tensor) -> None:
        length = x_BhtK.shape[2]
        if not self.split:
            _rows(self.grad, group, start, length).add_(x_BhtK)
            return
        high, low = (_rows(x, group, start, length) for x in (self.high, self.low))
        total = (_join(high, low) + x_BhtK).view(torch.int32)
        high.copy_(total >> 16)
        low.copy_(total & 0xFFFF)

    def finish(self, group: Group) -> None:
        """Round the group's own run; its low half may be overwritten after this."""
        if self.split:
            grad, high, low = (
                _rows(x, group, group.start, group.length) for x in (self.grad, self.high, self.low)
            )
            grad.copy_(_join(high, low))


def _join(high: Tensor, low: Tensor) -> Tensor:
    return ((high.to(torch.int32) << 16) | (low.to(torch.int32) & 0xFFFF)).view(torch.float32)


def _backward_pair(
    job: _Job, group: Group, pair: Pair, query: _Query, keys: _Keys
) -> tuple[Tensor, Tensor, Tensor]:
    """This pair's share of dq, dk, dv, each [B, h, rows or keys, K]."""
    dout, q, out = (_rows(x, group, pair.q0, pair.rows) for x in (query.dout, query.q, query.out))
    lse = _lse_rows(query.lse, group, pair.q0, pair.rows)
    k, v = (_rows(x, group, pair.k0, pair.keys) for x in (keys.k, keys.v))
    if pair.mask != EDGE:
        return job.kernel.backward(dout, q, k, v, out, lse, job.scale, pair.mask == CAUSAL)
    flipped = [x.flip(2) for x in (dout, q, k, v, out, lse)]
    dq, dk, dv = job.kernel.backward(*flipped, job.scale, True)
    return dq.flip(2), dk.flip(2), dv.flip(2)


def _low_half(job: _Job, own: Tensor, spare: Tensor) -> Tensor:
    """Where `own`'s low half may lie: `spare` memory that is written later, or a buffer if nothing is."""
    return torch.empty_like(own) if own.element_size() == 2 and not job.final_by_group else spare


def _backward_key_major(job: _Job, query: _Query, keys: _Keys) -> None:
    dq = _SplitSum(query.dq, _low_half(job, query.dq, keys.dk))
    for group in job.key_major():
        dk, dv = (_BlockSum(x, group, job.sum_dtype) for x in (keys.dk, keys.dv))
        for pair in group.pairs:
            pair_dq, pair_dk, pair_dv = _backward_pair(job, group, pair, query, keys)
            dq.add(group, pair.q0, pair_dq)
            dk.add(pair.k0, pair_dk)
            dv.add(pair.k0, pair_dv)
        if job.final_by_group:
            dq.finish(group)
        dk.finish()
        dv.finish()
    if not job.final_by_group:
        dq.finish(job.everything)


def _backward_query_major(job: _Job, queries: list[_Query], keys: _Keys) -> None:
    dk = _SplitSum(keys.dk, _low_half(job, keys.dk, queries[0].dq))
    dv = _SplitSum(keys.dv, _low_half(job, keys.dv, queries[1].dq))
    for group in reversed(list(job.query_major())):
        late = []
        for r in reversed(range(job.repeat)):
            dq = _BlockSum(queries[r].dq, group, job.sum_dtype)
            for pair in group.pairs:
                pair_dq, pair_dk, pair_dv = _backward_pair(job, group, pair, queries[r], keys)
                dq.add(pair.q0, pair_dq)
                dk.add(group, pair.k0, pair_dk)
                dv.add(group, pair.k0, pair_dv)
            if r >= 2:
                dq.finish()
            else:
                late.append(dq)  # these two write where the low halves lie
        if job.final_by_group:
            dk.finish(group)
            dv.finish(group)
        for dq in late:
            dq.finish()
    if not job.final_by_group:
        dk.finish(job.everything)
        dv.finish(job.everything)
