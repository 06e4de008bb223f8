"""Differentiable attention over a sequence that is sharded over ranks, for any kind of model.

Shapes: s tokens on this rank, S = c * s on c ranks, H query and G kv heads, K head dim, B
sequences, Q = B * H, n head slots per rank.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ithaka.attention.blocks import AttentionSpec
from ithaka.attention.docs import BlockMask, Docs
from ithaka.attention.score_blocks import MaskRange
from ithaka.comm.exchange import SINGLE_RANK
from ithaka.config import ConfigError, renaming
from ithaka.facts.heads import EMPTY_SLOT, flatten_heads, head_table
from ithaka.layer.stages import ExchangedAttention
from ithaka.sharding.tokens import contiguous_sharding


@renaming({"attention.": "", "model.dtype": "the dtype of q, k and v"})
def sharded_attention(
    q_sHK: Tensor,
    k_sGK: Tensor,
    v_sGK: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    ring: dist.ProcessGroup | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    docs: Docs | tuple[int, ...] | None = None,
    ranges: Sequence[MaskRange] | None = None,
    kernel: str = "auto",
    blocks: tuple[int, int] | None = None,
) -> Tensor:
    """Return out_sHK for this rank's tokens. Differentiable in q, k and v.

    Rank r of c passes tokens [r s, (r + 1) s) of all H query and G kv heads. `docs` holds the
    cumulative starts of packed documents in the full sequence. H is a multiple of G; c need not
    divide either. Communicates with one all-to-all each for q, k, v and out, and as many in
    backward. Saves q, k, v, out and lse of the rank's own heads.

    A batch of sequences is [B, s, H, K] (k and v [B, s, G, K]), and so is the result; all sequences
    share the mask. The number of queries may differ from the number of keys, if it does so on every
    rank. `ranges` is a block mask: for each (a, b, c, d), queries [a, b) of the full sequence
    attend to keys [c, d). A query in no range outputs 0.

    `ring` is the group of ranks at the same position in r such groups. The sequence is then c * r *
    s tokens long, and group j has the c * s tokens from j * c * s on, or those of
    `Docs(starts, sharding, j)`. k and v circulate in the ring.
    """
    _check_tensors(q_sHK, k_sGK, v_sGK)
    _check_options(group, ring, scale, causal, window, blocks)
    batch = len(q_sHK) if q_sHK.dim() == 4 else None
    if batch is not None:  # sequences become additional heads
        q_sHK, k_sGK, v_sGK = (x.transpose(0, 1).flatten(1, 2) for x in (q_sHK, k_sGK, v_sGK))
    num_heads = q_sHK.shape[1]
    num_kv_heads = k_sGK.shape[1]
    ranks = group if group is not None else SINGLE_RANK
    members = ring if ring is not None else SINGLE_RANK
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{num_heads} query heads are not a multiple of {num_kv_heads} kv heads; use one"
        )
    table = head_table(num_heads, num_kv_heads, ranks.size())
    query_heads = table.stages[0].query_heads
    kv_heads = table.kv_transfers[0].kv_heads
    scale = q_sHK.shape[-1] ** -0.5 if scale is None else scale
    num_tokens, num_keys = (len(x) * ranks.size() * members.size() for x in (q_sHK, k_sGK))
    if ranges is not None or num_tokens != num_keys:
        why = "ranges" if ranges is not None else f"{num_tokens} queries and {num_keys} keys"
        others = {"ring": members.size() > 1, "docs": docs, "causal": causal, "window": window}
        for name, value in others.items():
            if value:
                raise ConfigError(
                    f"{name} cannot be combined with {why}; describe the mask with ranges instead"
                )
        if ranges is None:
            ranges = [(0, num_tokens, 0, num_keys)]
        docs = BlockMask(ranges, num_tokens, num_keys)
    elif not isinstance(docs, Docs):
        starts = docs.tolist() if isinstance(docs, Tensor) else docs
        sharding = contiguous_sharding(num_tokens, members.size())
        docs = Docs(tuple(starts or (0, num_tokens)), sharding, members.rank())
    spec = AttentionSpec(
        scale=scale, causal=causal, window=window, docs=docs, kernel=kernel, blocks=blocks
    )
    q_csnK = _to_exchange_layout(q_sHK, query_heads)
    k_csmK = _to_exchange_layout(k_sGK, kv_heads)
    v_csmK = _to_exchange_layout(v_sGK, kv_heads)
    out_csnK = ExchangedAttention.apply(table, ranks, members, spec, q_csnK, k_csmK, v_csmK)
    all_heads = [head for rank_heads in query_heads for head in rank_heads]
    slots = [slot for slot, head in enumerate(all_heads) if head != EMPTY_SLOT]
    out_sQK = out_csnK.transpose(0, 1).flatten(1, 2)[:, slots]  # ranks have consecutive heads
    return out_sQK if batch is None else out_sQK.unflatten(1, (batch, -1)).transpose(0, 1)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ConfigError(f"{name} is a {type(x).__name__}; pass a tensor")
    is_valid = q.dim() == k.dim() in (3, 4) and k.shape == v.shape
    if not is_valid or q.shape[:-3] != k.shape[:-3] or q.shape[-1] != k.shape[-1]:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ConfigError(
            f"{shapes} do not match; "
            "use [tokens, heads, head dim] or [batch, tokens, heads, head dim]"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ConfigError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}; use one dtype")


def _check_options(
    group: object, ring: object, scale: object, causal: object, window: object, blocks: object
) -> None:
    is_number = isinstance(scale, int | float) and math.isfinite(scale)
    is_pair = isinstance(blocks, tuple | list) and len(blocks) == 2
    is_length = type(window) is int and window > 0
    all_groups = "a process group; pass torch.distributed.group.WORLD"
    new_group = "a process group; pass one of torch.distributed.new_group"
    for name, value, is_valid, rule in (
        ("group", group, hasattr(group, "size"), all_groups),
        ("ring", ring, hasattr(ring, "size"), new_group),
        ("scale", scale, is_number, "a number; use 0.125"),
        ("causal", causal, isinstance(causal, bool), "a bool; use True or False"),
        ("blocks", blocks, is_pair, "a pair; use (1024, 1024)"),
        ("window", window, is_length, "a number of tokens; use 1 or more"),
    ):
        if value is not None and not is_valid:
            raise ConfigError(f"{name}={value!r} is not {rule}, or leave it out")


def _to_exchange_layout(x_sHK: Tensor, heads: tuple[tuple[int, ...], ...]) -> Tensor:
    """Select heads and return them in exchange layout [c, s, n, K]."""
    index = torch.tensor(flatten_heads(heads), device=x_sHK.device)
    return x_sHK.index_select(1, index).unflatten(1, (len(heads), -1)).transpose(0, 1).contiguous()
