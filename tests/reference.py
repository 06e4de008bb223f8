"""The plain, unsharded twin of every op: short, slow, obviously right. Tests compare against them."""

import torch
from torch import Tensor


def attention_reference(
    q_SnK: Tensor,
    k_SmK: Tensor,
    v_SmK: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    docs: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """out_SnK, lse_nS of `ithaka.attention.blocks.attention`, differentiable, with the full score matrix in memory."""
    repeat = q_SnK.shape[1] // k_SmK.shape[1]
    k_SnK, v_SnK = (x.repeat_interleave(repeat, 1) for x in (k_SmK, v_SmK))
    scores_nSS = torch.einsum("snk,tnk->nst", q_SnK, k_SnK) * scale
    mask_SS = attention_mask(q_SnK.shape[0], causal=causal, window=window, docs=docs).to(q_SnK.device)
    scores_nSS = scores_nSS.masked_fill(~mask_SS, float("-inf"))
    return torch.einsum("nst,tnk->snk", scores_nSS.softmax(-1), v_SnK), scores_nSS.logsumexp(-1)


def attention_mask(num_tokens: int, *, causal: bool, window: int | None, docs: tuple[int, ...] | None) -> Tensor:
    """[S, S] bool, True where row i may see key j."""
    i, j = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)[None]
    ends = torch.tensor(docs or (0, num_tokens))[1:]
    document = torch.searchsorted(ends, torch.arange(num_tokens), right=True)
    mask = document[:, None] == document[None]
    if causal:
        mask = mask & (j <= i)
    if window is not None:
        mask = mask & (j > i - window)
    return mask
