"""Attention in block pairs: exact, any length, packed documents, causal, bidirectional and sliding window.

Shapes: S = tokens of the packed sequence, or those of them that `docs` gives this rank, n = query heads,
m = key/value heads, r = n // m query heads per kv head, K = head dim. Inside: B = pairs in one batched kernel call,
h = kv heads in one kernel call, q/k = rows/keys of a pair.

The softmax over all keys of a row is merged from the pairs in fp32 and rounded once. In backward every pair gets the
*global* out and lse rows, so the pairs' gradients simply add up: dq in an fp32 sum per query block, rounded once; dk
and dv in fp32 sums of full length, which the caller may pass from call to call. (For fp64 inputs all sums are fp64.)
Where one call has all rows that see a key, nothing adds up, and the kernel itself rounds and writes its dk and dv.
Where keys come in parts, a call has those of one part, and `out` and dq are sums from call to call as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Required, TypedDict, Unpack

import torch
from torch import Tensor

from ithaka.attention.fused import merge
from ithaka.attention.kernels import Kernel, resolve_kernel
from ithaka.attention.pairs import (
    EDGE,
    FULL,
    WINDOW,
    KeyRange,
    KeySpan,
    Pair,
    QueryBlock,
    Range,
    by_part,
    in_ranges,
    query_major,
    seen,
    spans_of,
    split_ragged,
)
from ithaka.config import ConfigError
from ithaka.plan.deal import Deal, contiguous_deal
from ithaka.plan.layer_bytes import CALL_TOKENS, WHOLE_TOKENS
from ithaka.plan.rounds import RingRound, ring_rounds

Tensors = tuple[Tensor, ...]
MAX_ELEMENTS = 2**31 - 1  # the most that a kernel call may address
# Up to this length, documents of unequal length share calls of the varlen kernel. cuDNN is faster at every length but
# plans each new shape (0.13 s for both directions); longer documents repay that (measured at 128 heads x layers).
SHORT_CALL_TOKENS = 32768
# Rows in forward, keys in backward, that one SM of a Hopper GPU attends to at a time in fa4, up to a head dim.
FA4_TILES = (((96, 192), (256, 128)), ((128, 128), (192, 96), (256, 48)))


class AttentionSpec(TypedDict, total=False):
    """Which attention to compute, and how; the same in both directions."""

    scale: Required[float]
    causal: bool  # True unless given
    window: int | None  # row i sees keys (i - window, i]
    docs: "Docs | tuple[int, ...] | None"  # cumulative starts of packed documents, (0, ..., S), or a `Docs` of them
    kernel: str  # "auto" unless given
    blocks: tuple[int, int] | None  # (block_q, block_kv) in tokens; else `default_blocks`


@torch.no_grad()
def attention(
    q_SnK: Tensor,
    k_SmK: Tensor,
    v_SmK: Tensor,
    *,
    part: int = 0,
    sums: tuple[Tensor, Tensor] | None = None,
    **how: Unpack[AttentionSpec],
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v, and the log-sum-exp of each row. Not differentiable.

    n is a multiple of m; query head j reads kv head j // (n // m). Attention never crosses documents. Inputs may be
    strided in S and heads. Returns out_SnK (contiguous, q's dtype) and lse_nS (fp32; fp64 for fp64); allocates only
    those and block buffers.

    `part`: k and v are those of this rank's own tokens (0), or what round `part - 1` of `docs.rounds` brings. `sums`:
    out_SnK and lse_nS in fp32 (fp64 for fp64) over the parts so far, zero and -inf at first, which this call merges its
    part into and returns.
    """
    job = _job(q_SnK, k_SmK, v_SmK, backward=False, part=part, adds=sums is not None, **how)
    if sums is not None:
        job.walk(_forward_block, _forward_chunk, (q_SnK, sums[0], sums[1].t()), (k_SmK, v_SmK))
        return sums
    out_SnK = torch.empty(q_SnK.shape, dtype=q_SnK.dtype, device=q_SnK.device)
    lse_nS = torch.empty(q_SnK.shape[1], q_SnK.shape[0], dtype=job.sum_dtype, device=q_SnK.device)
    job.walk(_forward_block, _forward_chunk, (q_SnK, out_SnK, lse_nS.t()), (k_SmK, v_SmK))
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
    part: int = 0,
    dq: Tensor | None = None,
    sums: tuple[Tensor, Tensor] | None = None,
    **how: Unpack[AttentionSpec],
) -> tuple[Tensor, Tensor, Tensor]:
    """dq_SnK, written over `out`, dk_SmK and dv_SmK from `attention`'s inputs and its results.

    `sums`: dk_SmK and dv_SmK in fp32 (fp64 for fp64), which this call adds to and returns. Without them it makes its
    own: such sums, for the caller to round, or k's dtype where the kernel writes each gradient once.
    `part` as in `attention`. `dq`: its sum over the parts so far, in the same dtype, which this call adds to instead.
    """
    job = _job(q_SnK, k_SmK, v_SmK, backward=True, part=part, adds=dq is not None, alone=sums is None, **how)
    dq_SnK = out_SnK if dq is None else dq
    if sums is not None:
        dk_SmK, dv_SmK = sums
        assert dk_SmK.dtype == dv_SmK.dtype == job.sum_dtype, f"sums in {dk_SmK.dtype} and {dv_SmK.dtype}"
    elif job.once:
        dk_SmK, dv_SmK = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k_SmK, v_SmK))
    else:
        dk_SmK, dv_SmK = (torch.zeros(x.shape, dtype=job.sum_dtype, device=x.device) for x in (k_SmK, v_SmK))
    query, keys = (dout_SnK, q_SnK, out_SnK, lse_nS.t(), dq_SnK), (k_SmK, v_SmK, dk_SmK, dv_SmK)
    job.walk(_backward_block, _backward_chunk, query, keys)
    return dq_SnK, dk_SmK, dv_SmK


def default_blocks(
    device: torch.device, kernel: Kernel, row_bytes: int, reach: int, backward: bool = False
) -> tuple[int, int]:
    """(block_q, block_kv) in tokens, for one head of `row_bytes` per token, whose rows see up to `reach` keys.

    A kernel that writes to our buffers takes documents and windows whole, up to a length. Otherwise, on a GPU, the keys
    and values of a block, which every row reads again, fill up to 0.6 of the L2 cache (64 Ki tokens of a 128-wide head
    in an H200's 60 MB). fa4 takes whole waves instead: of all SMs, the last has as much to do as the first. Elsewhere
    blocks only bound the buffers.
    """
    if kernel.direct and reach <= WHOLE_TOKENS:
        return CALL_TOKENS, CALL_TOKENS
    if kernel.name == "reference":
        return 1024, 1024  # it holds the pair's scores in fp64
    if device.type != "cuda":
        return 8192, 8192
    gpu = torch.cuda.get_device_properties(device)
    tokens = max(8192, int(0.6 * gpu.L2_cache_size) // (2 * row_bytes))
    block_kv = 1 << (tokens.bit_length() - 1)
    if kernel.name == "fa4":
        wave = gpu.multi_processor_count * next(tile for most, tile in FA4_TILES[backward] if row_bytes <= 2 * most)
        block_kv = max(1, round(block_kv / wave)) * wave
        return (4 if backward else 1) * block_kv, block_kv
    return (4 if backward else 2) * block_kv, block_kv


@dataclass(frozen=True)
class _Chunk:
    """Neighbouring short documents for one varlen call: where their rows and their keys are."""

    rows: slice
    keys: slice
    ends_d: Tensor
    longest: int

    @classmethod
    def of(cls, spans: list[KeySpan], device: torch.device) -> "_Chunk":
        start, shift = spans[0].start, spans[0].shift
        ends = [0, *(span.start + span.length - start for span in spans)]
        keys, rows = (slice(a, a + ends[-1]) for a in (start, start + shift))
        longest = max(span.length for span in spans)
        return cls(rows, keys, torch.tensor(ends, dtype=torch.int32, device=device), longest)


class Docs:
    """The cumulative starts of packed documents, (0, ..., S), and the walks over them, each planned once.

    Made once per batch and passed to every call of attention: with thousands of documents, planning a walk takes the
    host longer than attention takes the GPU, and every call would upload the varlen kernel's indices.
    `deal`: the query rows are those of `member`; without it, all. Keys then come in parts: its own, and those of each
    of its `rounds`.
    """

    def __init__(self, starts: tuple[int, ...], deal: Deal | None = None, member: int = 0) -> None:
        self.starts, self.deal = starts, deal or contiguous_deal(starts[-1], 1)
        self.member, self.runs = member, self.deal.members[member]
        self.sent_bytes = 0  # by this member to others, so far
        if starts[0] != 0 or any(b < a for a, b in zip(starts, starts[1:], strict=False)):
            raise ConfigError(f"docs must start at 0 and ascend, got {starts[:4]}...{starts[-2:]}")
        self.longest = max(b - a for a, b in zip(starts, starts[1:], strict=False))
        self._rounds: dict[tuple[bool, int | None], list[RingRound]] = {}
        self._walks: dict[tuple, list[tuple[list[QueryBlock], list[_Chunk]]]] = {}

    def rounds(self, causal: bool = True, window: int | None = None) -> list[RingRound]:
        """How keys of other members come to this one; as many rounds on all of them, none if no rows see any."""
        if (causal, window) not in self._rounds:
            members = self.deal.members if len(self.deal.members) > 1 else ()
            all_seen = [seen(spans_of(self.starts, runs), causal, window) for runs in members]
            self._rounds[causal, window] = ring_rounds(self.deal, all_seen, self.member) if members else []
        return self._rounds[causal, window]

    def num_keys(self, part: int, causal: bool, window: int | None) -> int:
        if part:
            return sum(self.rounds(causal, window)[part - 1].num_received)
        return sum(length for _, length in self.runs)

    def walk(self, part: int, device: torch.device, varlen: bool, **how: Any) -> tuple[list[QueryBlock], list[_Chunk]]:
        """Query blocks of a part of the keys, and, of its own, chunks of short unequal documents if `varlen`; `how` as
        `query_major` takes it."""
        key = (device, varlen, *how.values())
        if key not in self._walks:
            spans, chunks = spans_of(self.starts, self.runs), []
            # Documents that are whole on this rank lie in its keys as in its rows.
            whole = [span._replace(start=span.start + span.shift, shift=0) for span in spans if span.is_whole]
            if varlen:
                short = min(SHORT_CALL_TOKENS, how["block_q"], how["block_kv"])
                whole, ragged = split_ragged(whole, short=short, block=max(how["block_q"], how["call_tokens"]))
                chunks = [_Chunk.of(chunk, device) for chunk in ragged]
            keys = self._keys(how["causal"], how["window"])
            cut = query_major([span for span in spans if not span.is_whole], **how | {"knows_windows": False})
            own, *others = by_part(cut, keys, 1 + len(self.rounds(how["causal"], how["window"])))
            self._walks[key] = [([*query_major(whole, **how), *own], chunks), *((blocks, []) for blocks in others)]
        return self._walks[key][part]

    def _keys(self, causal: bool, window: int | None) -> list[KeyRange]:
        """Where the keys are that this rank's rows see."""
        parts = [self.runs, *([run for runs in r.received for run in runs] for r in self.rounds(causal, window))]
        keys = []
        for part, runs in enumerate(parts):
            row = 0
            for start, length in runs:
                keys.append(KeyRange(start, length, part, row - start))
                row += length
        return sorted(keys)


class Ranges(Docs):
    """Block masks: of `num_rows` queries, rows [a, b) see keys [c, d) for each (a, b, c, d), and no others."""

    def __init__(self, ranges: Sequence[Range], num_rows: int, num_keys: int) -> None:
        super().__init__((0, num_rows))
        self.ranges, self._num_keys = tuple(ranges), num_keys
        for number, (a, b, c, d) in enumerate(self.ranges):
            if not (0 <= a < b <= num_rows and 0 <= c < d <= num_keys):
                limits = f"rows within [0, {num_rows}) and keys within [0, {num_keys})"
                raise ConfigError(f"ranges: {(a, b, c, d)} is empty or too far; use (a, b, c, d) with {limits}")
            for other in self.ranges[:number]:
                if max(a, other[0]) < min(b, other[1]) and max(c, other[2]) < min(d, other[3]):
                    raise ConfigError(f"ranges: {other} and {(a, b, c, d)} overlap, and would count twice; cut one")

    def num_keys(self, part: int, causal: bool, window: int | None) -> int:
        return self._num_keys

    def walk(self, part: int, device: torch.device, varlen: bool, **how: Any) -> tuple[list[QueryBlock], list[_Chunk]]:
        return in_ranges(self.ranges, self.starts[-1], how["block_q"], how["block_kv"]), []


@dataclass(frozen=True)
class _Job:
    """The work of one call."""

    kernel: Kernel
    scale: float
    causal: bool
    window: int | None
    query_blocks: list[QueryBlock]
    chunks: list[_Chunk]
    heads_at_once: int  # query heads per kernel call: one at long lengths (a block fills the chip), more at short ones
    sum_dtype: torch.dtype
    adds: bool  # out and lse, or dq, are sums over parts of the keys
    together: int  # query heads of one kv head per kernel call: one, or all
    once: bool  # the kernel writes dk and dv: each key is in one call, and no other adds to its gradients

    def walk(self, on_block: Callable, on_chunk: Callable, of_query: Tensors, of_keys: Tensors) -> None:
        """Every block and chunk, for views of some kv heads at a time and one query head of each, or all of them."""
        m = of_keys[0].shape[1]
        r, together = of_query[0].shape[1] // m, self.together
        kv_at_once = self.heads_at_once // together
        for first in range(0, m, kv_at_once):
            heads = slice(first, first + kv_at_once)
            keys = tuple(x[:, heads] for x in of_keys)
            for low in range(0, r, together):
                query = tuple(x.unflatten(1, (m, -1))[:, heads, low : low + together].flatten(1, 2) for x in of_query)
                for block in self.query_blocks:
                    on_block(self, block, query, keys)
                for chunk in self.chunks:
                    on_chunk(self, chunk, query, keys)


def _job(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backward: bool,
    part: int,
    adds: bool,
    alone: bool = False,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    docs: Docs | tuple[int, ...] | None = None,
    kernel: str = "auto",
    blocks: tuple[int, int] | None = None,
) -> _Job:
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    docs = docs if isinstance(docs, Docs) else Docs((0, num_tokens) if docs is None else tuple(docs))
    if num_heads % num_kv_heads:
        raise ConfigError(f"{num_heads} query heads are not a multiple of {num_kv_heads} kv heads")
    num_keys = docs.num_keys(0, causal, window) if isinstance(docs, Ranges) else num_tokens
    if k.shape != v.shape or k.shape[1:] != (num_kv_heads, head_dim) or (part == 0 and len(k) != num_keys):
        raise ConfigError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit together")
    if window is not None and (window < 1 or not causal):
        raise ConfigError(f"window={window} with causal={causal}: a window is at least 1 and needs causal=True")
    ends = docs.deal.num_tokens if len(docs.deal.members) > 1 else num_tokens
    if docs.starts[-1] != ends:
        raise ConfigError(f"docs end at {docs.starts[-1]}; they must ascend from 0 to the {ends} tokens")
    assert len(k) == docs.num_keys(part, causal, window)
    if blocks is not None and min(blocks) < 1:
        raise ConfigError(f"attention.block_q, block_kv={blocks}: each needs at least one token")
    chosen = resolve_kernel(kernel, q.device, q.dtype, head_dim)
    reach = min(docs.longest, window or docs.longest)
    block_q, block_kv = blocks or default_blocks(q.device, chosen, head_dim * q.element_size(), reach, backward)
    heads_at_once = max(1, block_q // max(1, num_tokens))
    most = max(1, MAX_ELEMENTS // max(x.stride(0) for x in (q, k, v)))  # tokens, of one head or of several
    block_q, block_kv = min(block_q, most), min(block_kv, most)
    most_at_once = min(CALL_TOKENS, most) if chosen.direct and blocks is None else block_q
    walk = dict(causal=causal, window=window, block_q=block_q, block_kv=block_kv, halve=not (backward or chosen.direct))
    walk |= dict(call_tokens=most_at_once, knows_windows=chosen.direct)
    query_blocks, chunks = docs.walk(part, q.device, chosen.varlen is not None, **walk)
    group = num_heads // num_kv_heads
    together = group if chosen.direct and heads_at_once >= group else 1
    once = alone and not adds and chosen.direct and together == group and not isinstance(docs, Ranges)
    return _Job(
        chosen,
        scale,
        causal,
        window,
        query_blocks,
        chunks,
        heads_at_once,
        sum_dtype=torch.promote_types(q.dtype, torch.float32),
        adds=adds,
        together=together,
        # Every row sees its own key, so that no key is missing: if the calls have as many as there are, none has two.
        once=once and _num_keys(query_blocks, chunks) == len(k),
    )


def _num_keys(query_blocks: list[QueryBlock], chunks: list[_Chunk]) -> int:
    """Of all calls for one head."""
    of_blocks = sum(pair.keys * pair.count * block.count for block in query_blocks for pair in block.pairs)
    return of_blocks + sum(chunk.keys.stop - chunk.keys.start for chunk in chunks)


def _rows(x_Sh: Tensor, repeats: QueryBlock | Pair, start: int, length: int) -> Tensor:
    """View [B, h, length, ...] of the tokens from `start` on, once per repetition of a block or pair."""
    by_token, by_head, *rest = x_Sh.stride()
    step = repeats.step or length  # fa4 takes a stride of 0 for a broadcast
    return x_Sh.as_strided(
        (repeats.count, x_Sh.shape[1], length, *x_Sh.shape[2:]),
        (step * by_token, by_head, by_token, *rest),
        x_Sh.storage_offset() + start * by_token,
    )


def _in_block(block_Bht: Tensor, block: QueryBlock, pair: Pair) -> Tensor:
    """The pair's rows of a block's buffer [B, h, t, ...]."""
    at = pair.q0 - block.start
    if pair.count == 1:
        return block_Bht[:, :, at : at + pair.rows]
    return _rows(block_Bht[0].transpose(0, 1), pair, at, pair.rows)


def _call(job: _Job, pair: Pair, way: str, *inputs: Tensor, **into: Any) -> Tensors:
    """The kernel's results for one pair, `way` forward or backward; its stand-in's if there are few rows or keys."""
    small, kernel = min(pair.rows, pair.keys) < job.kernel.smallest, job.kernel
    call: Callable[..., Tensors] = getattr(kernel.stand_in if small and kernel.stand_in else kernel, way)
    if pair.mask == WINDOW:
        into["window"] = job.window
    if pair.mask != EDGE:
        return call(*inputs, job.scale, pair.mask != FULL, **into)
    return tuple(x.flip(2) for x in call(*(x.flip(2) for x in inputs), job.scale, True))


# --- forward: `query` is q, out and lse of some heads, `keys` their k and v ---------------------------------


def _forward_block(job: _Job, block: QueryBlock, query: Tensors, keys: Tensors) -> None:
    """All keys of one query block, merged in fp32 and written once, or merged into sums over parts."""
    q, *written = query
    to_out, to_lse = (_rows(x, block, block.start, block.length) for x in written)
    one = len(block.pairs) == 1 and block.pairs[0].count == 1 and not job.adds
    into = {"into": (to_out, to_lse)} if one and job.kernel.direct else {}
    if job.adds:
        sum_out, sum_lse = to_out, to_lse
    elif not one:
        sum_out = torch.zeros(to_out.shape, dtype=job.sum_dtype, device=q.device)
        sum_lse = torch.full(to_lse.shape, float("-inf"), dtype=job.sum_dtype, device=q.device)
    for pair in block.pairs:
        repeats: QueryBlock | Pair = pair if pair.count > 1 else block
        q_rows = _rows(q, repeats, pair.q0, pair.rows)
        k_rows, v_rows = (_rows(x, repeats, pair.k0, pair.keys) for x in keys)
        pair_out, pair_lse = _call(job, pair, "forward", q_rows, k_rows, v_rows, **into)
        if not one:
            merge(_in_block(sum_out, block, pair), _in_block(sum_lse, block, pair), pair_out, pair_lse)
    if not into and not job.adds:
        to_out.copy_(pair_out if one else sum_out)
        to_lse.copy_(pair_lse if one else sum_lse)


def _forward_chunk(job: _Job, chunk: _Chunk, query: Tensors, keys: Tensors) -> None:
    assert job.kernel.varlen is not None
    q, out, lse = (x[chunk.rows] for x in query)
    k, v = (x[chunk.keys] for x in keys)
    lengths, mask = (chunk.ends_d, chunk.longest), (job.scale, job.causal, job.window)
    if job.kernel.direct and not job.adds:  # sums: nothing was added to these rows, which see no other part
        job.kernel.varlen.forward(q, k, v, *lengths, *mask, into=(out, lse.t()))
        return
    chunk_out, chunk_lse = job.kernel.varlen.forward(q, k, v, *lengths, *mask)
    out.copy_(chunk_out)
    lse.t().copy_(chunk_lse)


# --- backward: `query` is dout, q, out, lse and dq of some heads, `keys` their k, v, dk and dv ---------------


def _backward_block(job: _Job, block: QueryBlock, query: Tensors, keys: Tensors) -> None:
    """All keys of one query block. dq may share `out`'s memory: it is written after the last read of these rows."""
    *read, dq = query
    to_dq = _rows(dq, block, block.start, block.length)
    one = len(block.pairs) == 1 and block.pairs[0].count == 1 and not job.adds
    direct = one and job.kernel.direct
    if job.adds:
        sum_dq = to_dq
    elif not one:
        sum_dq = torch.zeros(to_dq.shape, dtype=job.sum_dtype, device=to_dq.device)
    for pair in block.pairs:
        repeats: QueryBlock | Pair = pair if pair.count > 1 else block
        dout, q, out, lse = (_rows(x, repeats, pair.q0, pair.rows) for x in read)
        k, v, dk, dv = (_rows(x, repeats, pair.k0, pair.keys) for x in keys)
        written = (to_dq if direct else None, *((dk, dv) if job.once else (None, None)))
        into = {"into": written} if job.kernel.direct else {}
        pair_dq, pair_dk, pair_dv = _call(job, pair, "backward", dout, q, k, v, out, lse, **into)
        if not job.once:
            dk.add_(pair_dk)
            dv.add_(pair_dv)
        if not one:
            _in_block(sum_dq, block, pair).add_(pair_dq)
    if not direct and not job.adds:
        to_dq.copy_(pair_dq if one else sum_dq)


def _backward_chunk(job: _Job, chunk: _Chunk, query: Tensors, keys: Tensors) -> None:
    assert job.kernel.varlen is not None
    dout, q, out, lse, dq = (x[chunk.rows] for x in query)
    k, v, dk, dv = (x[chunk.keys] for x in keys)
    lengths, mask = (chunk.ends_d, chunk.longest), (job.scale, job.causal, job.window)
    direct = job.kernel.direct and not job.adds
    into = {"into": (dq, *((dk, dv) if job.once else (None, None)))} if direct else {}
    chunk_dq, chunk_dk, chunk_dv = job.kernel.varlen.backward(dout, q, k, v, out, lse.t(), *lengths, *mask, **into)
    if not direct:
        dq.copy_(chunk_dq)
    if not job.once:
        dk.add_(chunk_dk)
        dv.add_(chunk_dv)
