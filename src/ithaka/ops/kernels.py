"""Attention kernels behind one small registry.

Shapes: B = pairs in the batch, h = heads (as many for k as for q), q/k = rows/keys of one block pair, K = head dim.
A kernel sees one block pair and a causal flag; everything else (blocks, windows, documents, GQA) is `attention.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ithaka.config import ConfigError

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Kernel:
    """One way to compute a block pair.

    forward(q_BhqK, k_BhkK, v_BhkK, scale, causal) -> out_BhqK, lse_Bhq (fp32, or fp64 for fp64 inputs)
    backward(dout_BhqK, q, k, v, out_BhqK, lse_Bhq, scale, causal) -> dq, dk, dv, where out and lse may be those of
    *all* keys: then the three are this pair's share of the gradients. Inputs may be strided except in K.
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int = 1 << 30
    head_dim_multiple: int = 1


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # The kernel indexes lse as if it were contiguous.
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse.contiguous(), 0.0, causal, scale=scale
    )


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    scores = q.double() @ k.double().mT * scale
    if causal:
        above = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(above, float("-inf"))
    return scores


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _reference_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, scale, causal)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v.double()
    return out.to(q.dtype), lse.to(_lse_dtype(q.dtype))


def _reference_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    probs = (_scores(q, k, scale, causal) - lse.double()[..., None]).exp()
    dout64 = dout.double()
    dv = probs.mT @ dout64
    dprobs = dout64 @ v.double().mT
    dscores = probs * (dprobs - (dout64 * out.double()).sum(-1, keepdim=True)) * scale
    return (dscores @ k.double()).to(q.dtype), (dscores.mT @ q.double()).to(k.dtype), dv.to(v.dtype)


HALF = (torch.bfloat16, torch.float16)
CPU = Kernel("cpu", _cpu_forward, _cpu_backward, (torch.float64, torch.float32, *HALF))
REFERENCE = Kernel(
    "reference", _reference_forward, _reference_backward, (torch.float64, torch.float32, *HALF)
)


def resolve_kernel(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The kernel called `name` ("auto": the fastest one this device has for that dtype and head dim)."""
    if name == "auto":
        return CPU if device.type == "cpu" else REFERENCE
    kernels = {"cpu": CPU, "reference": REFERENCE}
    if name not in kernels:
        raise ConfigError(f"attention.kernel={name} is not a kernel; use auto, {', '.join(kernels)}")
    return kernels[name]
