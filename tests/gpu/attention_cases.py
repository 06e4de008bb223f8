"""bf16 attention on a GPU against fp64, next to what plain PyTorch loses on the same inputs."""

import torch

from ithaka.ops.attention import attention, attention_backward
from ithaka.ops.reference import attention_mask, attention_reference

NUM_TOKENS = 2085
RAGGED = (0, 1, 300, 301, 428, 900, 1411, 1600, 1999, NUM_TOKENS)
EQUAL = (0, 500, 1000, 1500, 2000, NUM_TOKENS)
MASKS = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": 300},
    "narrow window": {"window": 3},
    "ragged documents": {"docs": RAGGED},
    "ragged documents, window": {"docs": RAGGED, "window": 77},
    "ragged documents, bidirectional": {"docs": RAGGED, "causal": False},
    "equal documents": {"docs": EQUAL},
    "equal documents, window": {"docs": EQUAL, "window": 130},
}
NAMES = ("out", "dq", "dk", "dv")


def errors(kernel, mask, heads=(2, 2), head_dim=128, blocks=(512, 256), dtype=torch.bfloat16, seed=0):
    """{name: (our relative error, plain PyTorch's)}; infinite where anything is not finite."""
    torch.manual_seed(seed)
    n, m = heads
    shapes = [(NUM_TOKENS, h, head_dim) for h in (n, m, m, n)]
    q, k, v, dout = (torch.randn(s, device="cuda", dtype=dtype) for s in shapes)
    how = dict(scale=head_dim**-0.5, **MASKS[mask])
    out, lse = attention(q, k, v, kernel=kernel, blocks=blocks, **how)
    ours = (out, *attention_backward(dout, q, k, v, out, lse, kernel=kernel, blocks=blocks, **how))
    exact = _gradients(lambda *x: attention_reference(*x, **how)[0], (q, k, v), dout, torch.float64)
    plain = _gradients(lambda *x: _sdpa(*x, MASKS[mask], how["scale"]), (q, k, v), dout, dtype)
    return {name: (_error(a, t), _error(p, t)) for name, a, p, t in zip(NAMES, ours, plain, exact, strict=True)}


def _sdpa(q, k, v, mask, scale):
    mask = {"causal": True, "window": None, "docs": None} | mask
    seen = attention_mask(NUM_TOKENS, **mask)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen.to(q.device), scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _gradients(function, inputs, dout, dtype):
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    out = function(*leaves)
    return (out, *torch.autograd.grad(out, leaves, dout.to(dtype)))


def _error(a, truth):
    if not torch.isfinite(a).all():
        return float("inf")
    return ((a.double() - truth).norm() / truth.norm()).item()
