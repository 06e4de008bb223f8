"""The two functions of FlashAttention 4 that the kernel calls, in plain PyTorch, for any device and
dtype.

Like the real one, backward uses the out and lse of its caller, which may cover more keys than its
own. Both compute in fp32 (fp64 for fp64) and round the results.
"""

import torch


def _wide(*tensors):
    return (x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)


def _documents(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    """Return, for each document, its index into q and lse, and its index into k."""
    if cu_seqlens_q is None:
        return [((i,), (i,)) for i in range(len(q))]
    ends = [cu.tolist() for cu in (cu_seqlens_q, cu_seqlens_k)]
    slices = [[slice(a, b) for a, b in zip(of, of[1:], strict=False)] for of in ends]
    longest = [max(part.stop - part.start for part in of) for of in slices]
    assert longest == [max_seqlen_q, max_seqlen_k] and [of[-1] for of in ends] == [len(q), len(k)]
    return list(zip(*slices, strict=True))


def _probabilities(q_qhK, k_kgK, lse_hq, softmax_scale, causal, window_size_left, softcap):
    """Return exp(scores - lse) [h, q, k], lse (computed if None), and the scores' derivative by q
    k^T [h, q, k]."""
    repeat = q_qhK.shape[1] // k_kgK.shape[1]
    scores = torch.einsum("qhK,khK->hqk", q_qhK, k_kgK.repeat_interleave(repeat, 1)) * softmax_scale
    slopes = torch.full_like(scores, softmax_scale)
    if softcap is not None:
        slopes = slopes * (1 - (scores / softcap).tanh().square())
        scores = softcap * (scores / softcap).tanh()
    rows, keys = scores.shape[1:]
    behind = (torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)).to(scores.device)
    visible = torch.ones_like(behind, dtype=torch.bool)
    if causal:
        visible &= behind >= 0
    if window_size_left is not None:
        visible &= behind <= window_size_left
    scores = scores.masked_fill(~visible, float("-inf"))
    lse_hq = scores.logsumexp(-1) if lse_hq is None else lse_hq
    return (scores - lse_hq[..., None]).exp(), lse_hq, slopes


def _flash_attn_fwd(
    q, k, v, softmax_scale, causal, window_size_left, return_lse, out, lse, softcap=None, **lengths
):
    assert return_lse
    packed = bool(lengths)
    out = torch.empty_like(q) if out is None else out
    shape = (q.shape[1], len(q)) if packed else (len(q), q.shape[2], q.shape[1])
    lse = (
        q.new_empty(shape, dtype=torch.promote_types(q.dtype, torch.float32))
        if lse is None
        else lse
    )
    assert out.shape == q.shape and lse.shape == shape
    lengths = lengths or dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    )
    q, k, v = _wide(q, k, v)
    for rows, keys in _documents(q, k, **lengths):
        of_lse = (slice(None), rows) if packed else rows
        mask = softmax_scale, causal, window_size_left, softcap
        probs, lse[of_lse], _ = _probabilities(q[rows], k[keys], None, *mask)
        repeat = q.shape[-2] // v.shape[-2]
        out[rows] = torch.einsum("hqk,khK->qhK", probs, v[keys].repeat_interleave(repeat, 1))
    return out, lse, None, None, None


def _flash_attn_bwd(
    q,
    k,
    v,
    out,
    dout,
    lse,
    softmax_scale,
    causal,
    window_size_left,
    deterministic,
    dq,
    dk,
    dv,
    softcap=None,
    **lengths,
):
    packed = bool(lengths)
    repeat = q.shape[-2] // k.shape[-2]
    dq, dk, dv = (torch.empty_like(x) if d is None else d for x, d in ((q, dq), (k, dk), (v, dv)))
    assert all(d.shape == x.shape and d.dtype == q.dtype for x, d in ((q, dq), (k, dk), (v, dv)))
    lengths = lengths or dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    )
    q, k, v, out, dout = _wide(q, k, v, out, dout)
    for rows, keys in _documents(q, k, **lengths):
        of_lse = (slice(None), rows) if packed else rows
        mask = softmax_scale, causal, window_size_left, softcap
        probs, _, slopes = _probabilities(q[rows], k[keys], lse[of_lse], *mask)
        delta_hq = (out[rows] * dout[rows]).sum(-1).t()
        dprobs = torch.einsum("qhK,khK->hqk", dout[rows], v[keys].repeat_interleave(repeat, 1))
        dscores = probs * (dprobs - delta_hq[..., None]) * slopes
        of_k = (
            torch.einsum("hqk,qhK->khK", dscores, q[rows]),
            torch.einsum("hqk,qhK->khK", probs, dout[rows]),
        )
        dk[keys], dv[keys] = (x.unflatten(1, (-1, repeat)).sum(2) for x in of_k)
        dq[rows] = torch.einsum("hqk,khK->qhK", dscores, k[keys].repeat_interleave(repeat, 1))
    return dq, dk, dv
