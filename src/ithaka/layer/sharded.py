"""Differentiable attention over a sequence sharded over ranks: the public entry for models of any kind.

Shapes: s tokens on this rank, S = c * s on c ranks, H query and G kv heads, K head dim, B sequences, N = B * H.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ithaka.attention.blocks import AttentionSpec, Docs, Ranges
from ithaka.attention.pairs import Range
from ithaka.config import ConfigError
from ithaka.dist.exchange import ALONE
from ithaka.layer.stages import StagesAttention
from ithaka.plan.deal import contiguous_deal
from ithaka.plan.heads import EMPTY_SLOT, flatten_heads, head_table


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
    ranges: Sequence[Range] | None = None,
    kernel: str = "auto",
    blocks: tuple[int, int] | None = None,
) -> Tensor:
    """out_sHK for this rank's tokens; differentiable in q, k and v.

    Rank r of c passes tokens [r s, (r + 1) s) of all H query and G kv heads. `docs` counts tokens of the whole
    sequence. H is a multiple of G; c need not divide either. One all-to-all each for q, k, v and out, and as many in
    backward. Keeps q, k, v, out and lse of the rank's own heads.

    A batch of sequences is [B, s, H, K] (k and v [B, s, G, K]), and so is the result; masks are the same for all.
    Queries and keys may differ in number, on every rank alike. `ranges`: block masks, (a, b, c, d) for queries [a, b)
    of the whole sequence that see keys [c, d); a query in no range gives zeros.

    `ring`: of several such groups, the ranks with the same place. The sequence is then c * r shares long, and member j
    of r has those from c * j on, or what `Docs(starts, deal, j)` says; k and v go round the ring.
    """
    batch = len(q_sHK) if q_sHK.dim() == 4 else None
    if batch is not None:  # a sequence more is as many heads more
        q_sHK, k_sGK, v_sGK = (x.transpose(0, 1).flatten(1, 2) for x in (q_sHK, k_sGK, v_sGK))
    num_heads, num_kv_heads = q_sHK.shape[1], k_sGK.shape[1]
    ranks, members = group if group is not None else ALONE, ring if ring is not None else ALONE
    if num_heads % num_kv_heads:
        raise ConfigError(f"{num_heads} query heads are not a multiple of {num_kv_heads} kv heads")
    table = head_table(num_heads, num_kv_heads, ranks.size())
    query_heads, kv_heads = table.stages[0].query_heads, table.loads[0].kv_heads
    scale = q_sHK.shape[-1] ** -0.5 if scale is None else scale
    num_tokens, num_keys = (len(x) * ranks.size() * members.size() for x in (q_sHK, k_sGK))
    if ranges is not None or num_tokens != num_keys:
        why = "ranges" if ranges is not None else f"{num_tokens} queries and {num_keys} keys"
        for name, given in (("ring", members.size() > 1), ("docs", docs), ("causal", causal), ("window", window)):
            if given:
                raise ConfigError(f"{name} cannot go with {why}; leave it out, and say with ranges who sees what")
        whole = [(0, num_tokens, 0, num_keys)]
        docs = Ranges(whole if ranges is None else ranges, num_tokens, num_keys)
    elif not isinstance(docs, Docs):
        docs = Docs(docs or (0, num_tokens), contiguous_deal(num_tokens, members.size()), members.rank())
    how = AttentionSpec(scale=scale, causal=causal, window=window, docs=docs, kernel=kernel, blocks=blocks)
    sent = [_take(x, heads) for x, heads in ((q_sHK, query_heads), (k_sGK, kv_heads), (v_sGK, kv_heads))]
    out_csnK = StagesAttention.apply(table, ranks, members, how, *sent)
    slots = [slot for slot, head in enumerate(h for of_rank in query_heads for h in of_rank) if head != EMPTY_SLOT]
    out_sNK = out_csnK.transpose(0, 1).flatten(1, 2)[:, slots]  # ranks hold consecutive heads
    return out_sNK if batch is None else out_sNK.unflatten(1, (batch, -1)).transpose(0, 1)


def _take(x_sHK: Tensor, heads: tuple[tuple[int, ...], ...]) -> Tensor:
    """The heads in exchange layout [c, s, n, K]."""
    index = torch.tensor(flatten_heads(heads), device=x_sHK.device)
    return x_sHK.index_select(1, index).unflatten(1, (len(heads), -1)).transpose(0, 1).contiguous()
