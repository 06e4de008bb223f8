"""Attention in score blocks: exact, of any length, with packed documents; causal, bidirectional or
sliding window.

Shapes: S = tokens of the packed sequence, or of this rank's share of it, n = query heads, m =
key/value heads, g = n // m query heads per kv head, K = head dim. Internally: B = score blocks in
one batched kernel call, h = kv heads in one kernel call, q/j = rows/keys of a score block.

The softmax of a row is merged from its score blocks in fp32 and rounded once. In backward every
score block gets the *global* out and lse of its rows, so that gradients add up: dq in an fp32 sum
per query block, rounded once; dk and dv in fp32 sums of full length, which several calls may share.
(fp64 inputs: in fp64.) If one kernel call has all rows that attend to a key, the kernel rounds and
writes dk and dv. With keys in several parts (a ring), a call gets one part, and `out` and dq are
also sums over calls.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from operator import methodcaller
from typing import Required, TypedDict, Unpack

import torch
from torch import Tensor

from ithaka.attention.choose import resolve_kernel
from ithaka.attention.docs import BlockMask, Docs, VarlenChunk
from ithaka.attention.kernels import Kernel, count_flops, trace_kernel
from ithaka.attention.score_blocks import EDGE, FULL, SQUARES, WINDOW, QueryBlock, ScoreBlock
from ithaka.comm.ghost import STRETCH
from ithaka.config import ConfigError
from ithaka.facts.sizes import CALL_TOKENS, WHOLE_TOKENS
from ithaka.ops.fused import merge_softmax, num_multiprocessors

Tensors = tuple[Tensor, ...]
# of kernels that allocate the scores of a block
SCORE_BLOCKS = {"reference": (1024, 1024), "eager": (4096, 8192)}
TRACED_L2_BYTES = 60 * 10**6  # the L2 cache that traces assume: an H200's
MAX_ELEMENTS = 2**31 - 1  # that one kernel call may address
# fa4 on Hopper: (largest head dim, rows in forward or keys in backward per SM)
FA4_TILES = (((96, 192), (256, 128)), ((128, 128), (192, 96), (256, 48)))


class AttentionSpec(TypedDict, total=False):
    """The attention to compute; the same in both directions."""

    scale: Required[float]
    causal: bool  # default True
    window: int | None  # row i attends to keys (i - window, i]
    docs: Docs | tuple[int, ...] | None  # cumulative starts (0, ..., S), or a `Docs`
    kernel: str | Kernel  # default "auto"; a `Kernel` is not tested
    softcap: float | None  # scores become softcap * tanh(scores / softcap); default: none
    blocks: tuple[int, int] | None  # (block_q, block_kv) in tokens; default `default_blocks`


@torch.no_grad()
def attention(
    q_SnK: Tensor,
    k_SmK: Tensor,
    v_SmK: Tensor,
    *,
    part: int = 0,
    sums: tuple[Tensor, Tensor] | None = None,
    **spec: Unpack[AttentionSpec],
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v, and the log-sum-exp of each row. Not differentiable.

    n is a multiple of m; query head j reads kv head j // (n // m). Attention never crosses
    documents. Inputs may be strided in S and heads. Returns out_SnK (contiguous, q's dtype) and
    lse_nS (fp32; fp64 for fp64); allocates only those and block buffers.

    `part`: 0 if k and v are this rank's own, i if they were received in round i - 1 of
    `docs.rounds`. `sums`: out_SnK and lse_nS in fp32 (fp64 for fp64), initially 0 and -inf; this
    call merges its part into them and returns them.
    """
    call = _plan_call(
        q_SnK, k_SmK, v_SmK, backward=False, part=part, accumulates=sums is not None, **spec
    )
    if sums is not None:
        call.run(_forward_block, _forward_chunk, (q_SnK, sums[0], sums[1].t()), (k_SmK, v_SmK))
        return sums
    out_SnK = torch.empty(q_SnK.shape, dtype=q_SnK.dtype, device=q_SnK.device)
    lse_nS = torch.empty(q_SnK.shape[1], q_SnK.shape[0], dtype=call.sum_dtype, device=q_SnK.device)
    call.run(_forward_block, _forward_chunk, (q_SnK, out_SnK, lse_nS.t()), (k_SmK, v_SmK))
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
    **spec: Unpack[AttentionSpec],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq_SnK, written over `out`, dk_SmK and dv_SmK, from what `attention` got and returned.

    `sums`: dk_SmK and dv_SmK in fp32 (fp64 for fp64), which this call adds to and returns. Without
    them, dk and dv are new tensors in that dtype, or in k's dtype if the kernel writes each
    gradient once. `part`: as in `attention`. `dq`: the sum over the parts so far, in the dtype of
    `sums`, to add to instead of `out`.
    """
    call = _plan_call(
        q_SnK,
        k_SmK,
        v_SmK,
        backward=True,
        part=part,
        accumulates=dq is not None,
        owns_kv_grads=sums is None,
        **spec,
    )
    dq_SnK = out_SnK if dq is None else dq
    if sums is not None:
        dk_SmK, dv_SmK = sums
        assert dk_SmK.dtype == dv_SmK.dtype == call.sum_dtype, (
            f"sums in {dk_SmK.dtype} and {dv_SmK.dtype}"
        )
    elif call.writes_kv_grads:
        dk_SmK = torch.empty(k_SmK.shape, dtype=k_SmK.dtype, device=k_SmK.device)
        dv_SmK = torch.empty(v_SmK.shape, dtype=v_SmK.dtype, device=v_SmK.device)
    else:
        dk_SmK = torch.zeros(k_SmK.shape, dtype=call.sum_dtype, device=k_SmK.device)
        dv_SmK = torch.zeros(v_SmK.shape, dtype=call.sum_dtype, device=v_SmK.device)
    query = (dout_SnK, q_SnK, out_SnK, lse_nS.t(), dq_SnK)
    keys = (k_SmK, v_SmK, dk_SmK, dv_SmK)
    call.run(_backward_block, _backward_chunk, query, keys)
    return dq_SnK, dk_SmK, dv_SmK


def default_blocks(
    device: torch.device, kernel: Kernel, row_bytes: int, reach: int, backward: bool = False
) -> tuple[int, int]:
    """Return (block_q, block_kv) in tokens, for `row_bytes` per token of a head and rows with up to
    `reach` keys.

    A kernel that writes to our buffers takes complete documents and windows, up to WHOLE_TOKENS.
    Otherwise k and v of a block, which every row rereads, fill up to 0.6 of a GPU's L2 cache (64 Ki
    tokens of a 128-wide head on an H200). For fa4, blocks are multiples of a wave, which keeps all
    SMs busy. On a CPU, blocks only limit the buffers.
    """
    if kernel.direct and reach <= WHOLE_TOKENS:
        return CALL_TOKENS, CALL_TOKENS
    if kernel.name in SCORE_BLOCKS:
        return SCORE_BLOCKS[kernel.name]
    if device.type not in ("cuda", "meta"):
        return 8192, 8192
    l2_bytes = TRACED_L2_BYTES
    if device.type == "cuda":
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    tokens = max(8192, int(0.6 * l2_bytes) // (2 * row_bytes))
    block_kv = 1 << (tokens.bit_length() - 1)
    if kernel.name == "fa4":
        tile = next(tile for head_dim, tile in FA4_TILES[backward] if row_bytes <= 2 * head_dim)
        wave = num_multiprocessors(device) * tile
        block_kv = max(1, round(block_kv / wave)) * wave
        return (4 if backward else 1) * block_kv, block_kv
    return (4 if backward else 2) * block_kv, block_kv


@dataclass(frozen=True)
class _AttentionCall:
    """The schedule and settings of one call of `attention` or `attention_backward`."""

    kernel: Kernel
    scale: float
    causal: bool
    window: int | None
    query_blocks: list[QueryBlock]
    chunks: list[VarlenChunk]
    heads_at_once: int  # query heads per kernel call: one if a block fills the GPU
    sum_dtype: torch.dtype
    accumulates: bool  # out and lse, or dq, are sums over parts of the keys
    heads_per_kv: int  # query heads of one kv head per kernel call: one, or all
    # the kernel writes dk and dv: no other call adds to the gradients of its keys
    writes_kv_grads: bool

    def is_single(self, block: QueryBlock) -> bool:
        """Whether one score block has the final results of these rows."""
        scores = block.score_blocks
        return len(scores) == 1 and scores[0].count == 1 and not self.accumulates

    def run(
        self, on_block: Callable, on_chunk: Callable, query_side: Tensors, key_side: Tensors
    ) -> None:
        """Call the functions with every block and chunk and views of a kernel call's heads."""
        m = key_side[0].shape[1]
        g = query_side[0].shape[1] // m
        per_kv = self.heads_per_kv
        kv_at_once = self.heads_at_once // per_kv
        is_traced = query_side[0].is_meta  # then the first heads stand for all
        for first in range(0, 1 if is_traced else m, kv_at_once):
            heads = slice(first, first + kv_at_once)
            keys = tuple(x[:, heads] for x in key_side)
            for low in range(0, 1 if is_traced else g, per_kv):
                query = tuple(
                    x.unflatten(1, (m, -1))[:, heads, low : low + per_kv].flatten(1, 2)
                    for x in query_side
                )
                for block in self.query_blocks:
                    on_block(self, block, query, keys)
                for chunk in self.chunks:
                    on_chunk(self, chunk, query, keys)


def _plan_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backward: bool,
    part: int,
    accumulates: bool,
    owns_kv_grads: bool = False,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    docs: Docs | tuple[int, ...] | None = None,
    kernel: str | Kernel = "auto",
    blocks: tuple[int, int] | None = None,
    softcap: float | None = None,
) -> _AttentionCall:
    (num_tokens, num_heads, head_dim) = q.shape
    if not isinstance(docs, Docs):
        docs = Docs((0, num_tokens) if docs is None else tuple(docs))
    _check_inputs(q, k, v, part, docs, causal, window)
    if blocks is not None and min(blocks) < 1:
        raise ConfigError(
            f"attention.block_q, block_kv={blocks} must be at least 1 token each; use auto"
        )
    group = num_heads // k.shape[1]
    if isinstance(kernel, Kernel):
        chosen = (trace_kernel(kernel) if q.is_meta else kernel).with_softcap(softcap)
    else:
        chosen = resolve_kernel(kernel, q.device, q.dtype, head_dim, softcap, group)
    # A part of a sequence has the full one's heads per call, and its blocks, stretch times shorter.
    stretch = STRETCH.get() if q.is_meta and len(docs.starts) == 2 else 1.0
    longest = round(docs.longest * stretch)
    reach = min(longest, window or longest)
    row_bytes = head_dim * q.element_size()
    block_q, block_kv = blocks or default_blocks(q.device, chosen, row_bytes, reach, backward)
    heads_at_once = max(1, block_q // max(1, round(num_tokens * stretch)))
    heads_per_kv = group if chosen.direct and heads_at_once >= group else 1
    most = max(1, MAX_ELEMENTS // max(x.stride(0) for x in (q, k, v)))  # tokens
    call_tokens = CALL_TOKENS if chosen.direct and blocks is None else block_q
    query_blocks, chunks = docs.plan(
        part,
        q.device,
        chosen.varlen is not None,
        causal=causal,
        window=window,
        block_q=math.ceil(min(block_q, most) / stretch),
        block_kv=math.ceil(min(block_kv, most) / stretch),
        call_tokens=math.ceil(min(call_tokens, most) / stretch),
        halve=not (backward or chosen.direct),
        has_windows=chosen.direct,
    )
    writes_kv_grads = owns_kv_grads and not accumulates and chosen.direct and heads_per_kv == group
    if writes_kv_grads:
        # Each row attends to its own key, so every key is in a call: equal counts mean in one.
        is_once = _count_keys(query_blocks, chunks) == len(k)
        writes_kv_grads = is_once and not isinstance(docs, BlockMask)
    if q.is_meta:
        _count_blocks(chosen, backward, q, query_blocks, chunks, causal, window)
        query_blocks = _distinct_blocks(query_blocks)
        chunks = [*{c.rows.stop - c.rows.start: c for c in chunks}.values()]
    return _AttentionCall(
        chosen,
        scale,
        causal,
        window,
        query_blocks,
        chunks,
        heads_at_once,
        torch.promote_types(q.dtype, torch.float32),
        accumulates,
        heads_per_kv,
        writes_kv_grads,
    )


def _check_inputs(
    q: Tensor, k: Tensor, v: Tensor, part: int, docs: Docs, causal: bool, window: int | None
) -> None:
    (num_tokens, num_heads, head_dim) = q.shape
    num_kv_heads = k.shape[1]
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{num_heads} query heads are not a multiple of {num_kv_heads} kv heads; use one"
        )
    num_keys = docs.num_keys(0, causal, window) if isinstance(docs, BlockMask) else num_tokens
    has_keys = part > 0 or len(k) == num_keys
    if k.shape != v.shape or k.shape[1:] != (num_kv_heads, head_dim) or not has_keys:
        raise ConfigError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not match; use "
            "[tokens, heads, head dim]"
        )
    if window is not None and (window < 1 or not causal):
        raise ConfigError(
            f"window={window} with causal={causal}: use a window of at least 1 and causal=True"
        )
    ends = docs.sharding.num_tokens if len(docs.sharding.members) > 1 else num_tokens
    if docs.starts[-1] != ends:
        raise ConfigError(
            f"docs end at {docs.starts[-1]}; they must ascend from 0 to the {ends} tokens"
        )
    assert len(k) == docs.num_keys(part, causal, window)


def _count_keys(query_blocks: list[QueryBlock], chunks: list[VarlenChunk]) -> int:
    """Count the keys of all kernel calls."""
    count = sum(chunk.keys.stop - chunk.keys.start for chunk in chunks)
    for block in query_blocks:
        count += block.count * sum(scores.keys * scores.count for scores in block.score_blocks)
    return count


def _count_blocks(
    kernel: Kernel,
    backward: bool,
    q: Tensor,
    query_blocks: list[QueryBlock],
    chunks: list[VarlenChunk],
    causal: bool,
    window: int | None,
) -> None:
    """Count the FLOPs of all calls."""
    (_, num_heads, head_dim) = q.shape

    def count(
        repeats: float, rows: int, keys: int, is_causal: bool, reach: int | None = None
    ) -> None:
        direction = "backward" if backward else "forward"
        num_blocks = num_heads * repeats
        count_flops(kernel, direction, num_blocks, head_dim, rows, keys, is_causal, reach)

    for block in query_blocks:
        for scores in block.score_blocks:
            repeats = scores.count if scores.count > 1 else block.count
            if scores.mask == SQUARES:
                longest = max(scores.lengths)
                count(scores.rows / longest, longest, longest, True)
            elif scores.mask == WINDOW:
                count(repeats, scores.rows, scores.keys, True, window)
            else:
                count(repeats, scores.rows, scores.keys, scores.mask != FULL)
    for chunk in chunks:
        repeats = (chunk.rows.stop - chunk.rows.start) / chunk.longest
        count(repeats, chunk.longest, chunk.longest, causal, window)


def _distinct_blocks(query_blocks: list[QueryBlock]) -> list[QueryBlock]:
    """Blocks of different sizes, once each, with at most two score blocks of a size, as results of
    one are live while the next runs: all that memory depends on."""
    distinct = {}
    for block in query_blocks:
        by_size: dict[tuple[object, ...], list[ScoreBlock]] = {}
        for scores in block.score_blocks:
            size = (scores.rows, scores.keys, scores.count, scores.mask)
            by_size.setdefault(size, []).append(scores)
        some = tuple(scores for alike in by_size.values() for scores in alike[:2])
        sizes = tuple((size, len(alike[:2])) for size, alike in by_size.items())
        distinct[block.length, block.count, sizes] = replace(block, score_blocks=some)
    return [*distinct.values()]


def _view_rows(x_Sh: Tensor, repeats: QueryBlock | ScoreBlock, start: int, length: int) -> Tensor:
    """View `length` tokens from `start` on as [B, h, length, ...], once per repetition of the query
    or score block."""
    by_token, by_head, *rest = x_Sh.stride()
    step = repeats.step or length  # never 0: fa4 treats a stride of 0 as a broadcast
    return x_Sh.as_strided(
        (repeats.count, x_Sh.shape[1], length, *x_Sh.shape[2:]),
        (step * by_token, by_head, by_token, *rest),
        x_Sh.storage_offset() + start * by_token,
    )


def _view_in_block(block_Bht: Tensor, block: QueryBlock, scores: ScoreBlock) -> Tensor:
    """View the rows of a score block in the buffer of its query block, [B, h, t, ...]."""
    first = scores.q0 - block.start
    if scores.count == 1:
        return block_Bht[:, :, first : first + scores.rows]
    return _view_rows(block_Bht[0].transpose(0, 1), scores, first, scores.rows)


@lru_cache(maxsize=1024)
def _cumulate(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor((0, *accumulate(lengths)), dtype=torch.int32, device=device)


def _run_kernel(
    call: _AttentionCall, scores: ScoreBlock, direction: str, *inputs: Tensor, **into: object
) -> Tensors:
    """Run the kernel on one score block, or its fallback on a small one. `direction`: "forward" or
    "backward"."""
    kernel = call.kernel
    if scores.mask == SQUARES:
        longest = max(scores.lengths)
        ends_d = _cumulate(scores.lengths, inputs[0].device)
        inputs = tuple(x[0].transpose(0, 1) if x.dim() == 4 else x[0] for x in inputs)
        run = getattr(kernel.varlen, direction)
        results = run(*inputs, ends_d, longest, call.scale, True, None)
        return tuple(x.transpose(0, 1)[None] if x.dim() == 3 else x[None] for x in results)
    if kernel.fallback and min(scores.rows, scores.keys) < kernel.min_tokens:
        kernel = kernel.fallback
    run = getattr(kernel, direction)
    if scores.mask == WINDOW:
        into["window"] = call.window
    if scores.mask != EDGE:
        return run(*inputs, call.scale, scores.mask != FULL, **into)
    flip = methodcaller("flip", 2)
    return tuple(map(flip, run(*map(flip, inputs), call.scale, True)))


# ---- forward: `query` is q, out and lse of some heads, `keys` their k and v


def _forward_block(call: _AttentionCall, block: QueryBlock, query: Tensors, keys: Tensors) -> None:
    """Attend to all keys of one query block: merge in fp32 and write once, or merge into sums over
    parts."""
    q, *written = query
    to_out, to_lse = (_view_rows(x, block, block.start, block.length) for x in written)
    is_single = call.is_single(block)
    into = {"into": (to_out, to_lse)} if is_single and call.kernel.direct else {}
    if call.accumulates:
        sum_out = to_out
        sum_lse = to_lse
    elif not is_single:
        sum_out = torch.zeros(to_out.shape, dtype=call.sum_dtype, device=q.device)
        sum_lse = torch.full(to_lse.shape, float("-inf"), dtype=call.sum_dtype, device=q.device)
    for scores in block.score_blocks:
        repeats: QueryBlock | ScoreBlock = scores if scores.count > 1 else block
        q_rows = _view_rows(q, repeats, scores.q0, scores.rows)
        k_rows, v_rows = (_view_rows(x, repeats, scores.k0, scores.keys) for x in keys)
        inputs = (q_rows, k_rows, v_rows)
        partial_out, partial_lse = _run_kernel(call, scores, "forward", *inputs, **into)
        if not is_single:
            out_rows = _view_in_block(sum_out, block, scores)
            lse_rows = _view_in_block(sum_lse, block, scores)
            merge_softmax(out_rows, lse_rows, partial_out, partial_lse)
    if not into and not call.accumulates:
        to_out.copy_(partial_out if is_single else sum_out)
        to_lse.copy_(partial_lse if is_single else sum_lse)


def _forward_chunk(call: _AttentionCall, chunk: VarlenChunk, query: Tensors, keys: Tensors) -> None:
    assert call.kernel.varlen is not None
    q, out, lse = (x[chunk.rows] for x in query)
    k, v = (x[chunk.keys] for x in keys)
    lengths = (chunk.ends_d, chunk.longest)
    mask = (call.scale, call.causal, call.window)
    # If it accumulates, these rows have no other part.
    if call.kernel.direct and not call.accumulates:
        call.kernel.varlen.forward(q, k, v, *lengths, *mask, into=(out, lse.t()))
        return
    chunk_out, chunk_lse = call.kernel.varlen.forward(q, k, v, *lengths, *mask)
    out.copy_(chunk_out)
    lse.t().copy_(chunk_lse)


# ---- backward: `query` is dout, q, out, lse and dq of some heads, `keys` their k, v, dk and dv


def _backward_block(call: _AttentionCall, block: QueryBlock, query: Tensors, keys: Tensors) -> None:
    """Backward of one query block. dq may alias `out`: it is written after these rows are read."""
    *read, dq = query
    to_dq = _view_rows(dq, block, block.start, block.length)
    is_single = call.is_single(block)
    direct = is_single and call.kernel.direct
    if call.accumulates:
        sum_dq = to_dq
    elif not is_single:
        sum_dq = torch.zeros(to_dq.shape, dtype=call.sum_dtype, device=to_dq.device)
    for scores in block.score_blocks:
        repeats: QueryBlock | ScoreBlock = scores if scores.count > 1 else block
        dout, q, out, lse = (_view_rows(x, repeats, scores.q0, scores.rows) for x in read)
        k, v, dk, dv = (_view_rows(x, repeats, scores.k0, scores.keys) for x in keys)
        into: dict[str, object] = {}
        if call.kernel.direct:
            kv_grads = (dk, dv) if call.writes_kv_grads else (None, None)
            into["into"] = (to_dq if direct else None, *kv_grads)
        inputs = (dout, q, k, v, out, lse)
        partial_dq, partial_dk, partial_dv = _run_kernel(call, scores, "backward", *inputs, **into)
        if not call.writes_kv_grads:
            dk.add_(partial_dk)
            dv.add_(partial_dv)
        if not is_single:
            _view_in_block(sum_dq, block, scores).add_(partial_dq)
    if not direct and not call.accumulates:
        to_dq.copy_(partial_dq if is_single else sum_dq)


def _backward_chunk(
    call: _AttentionCall, chunk: VarlenChunk, query: Tensors, keys: Tensors
) -> None:
    assert call.kernel.varlen is not None
    dout, q, out, lse, dq = (x[chunk.rows] for x in query)
    k, v, dk, dv = (x[chunk.keys] for x in keys)
    inputs = (dout, q, k, v, out, lse.t())
    lengths = (chunk.ends_d, chunk.longest)
    mask = (call.scale, call.causal, call.window)
    direct = call.kernel.direct and not call.accumulates
    into = {}
    if direct:
        kv_grads = (dk, dv) if call.writes_kv_grads else (None, None)
        into["into"] = (dq, *kv_grads)
    backward = call.kernel.varlen.backward
    chunk_dq, chunk_dk, chunk_dv = backward(*inputs, *lengths, *mask, **into)
    if not direct:
        dq.copy_(chunk_dq)
    if not call.writes_kv_grads:
        dk.add_(chunk_dk)
        dv.add_(chunk_dv)
