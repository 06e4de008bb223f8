"""Plain, unsharded reference implementations: short, slow, obviously right."""

import torch
from torch import Tensor

from ithaka.attention.docs import Docs


def attention_reference(
    q_SnK: Tensor,
    k_SmK: Tensor,
    v_SmK: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    docs: tuple[int, ...] | Docs | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out_SnK and lse_nS of `ithaka.attention.blocks.attention`; differentiable, with all
    scores in memory."""
    repeat = q_SnK.shape[1] // k_SmK.shape[1]
    k_SnK, v_SnK = (x.repeat_interleave(repeat, 1) for x in (k_SmK, v_SmK))
    scores_nSS = torch.einsum("snk,tnk->nst", q_SnK, k_SnK) * scale
    mask_SS = attention_mask(q_SnK.shape[0], causal=causal, window=window, docs=docs).to(
        q_SnK.device
    )
    scores_nSS = scores_nSS.masked_fill(~mask_SS, float("-inf"))
    return torch.einsum("nst,tnk->snk", scores_nSS.softmax(-1), v_SnK), scores_nSS.logsumexp(-1)


def attention_mask(
    num_tokens: int, *, causal: bool, window: int | None, docs: tuple[int, ...] | Docs | None
) -> Tensor:
    """Return a bool [S, S], True where row i attends to key j."""
    if isinstance(docs, Docs):
        mask = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
        paths = []
        for node, parent in enumerate(docs.parents):
            first = docs.starts[node]
            own = docs.starts[node + 1] - docs.starts[node]
            paths.append((paths[parent] if parent >= 0 else []) + list(range(first, first + own)))
            for i in range(len(paths[-1]) - own, len(paths[-1])):
                mask[paths[-1][i], paths[-1][max(0, i + 1 - (window or i + 1)) : i + 1]] = True
        return mask
    i = torch.arange(num_tokens)[:, None]
    j = torch.arange(num_tokens)[None]
    ends = torch.tensor(docs or (0, num_tokens))[1:]
    document = torch.searchsorted(ends, torch.arange(num_tokens), right=True)
    mask = document[:, None] == document[None]
    if causal:
        mask = mask & (j <= i)
    if window is not None:
        mask = mask & (j > i - window)
    return mask
