"""Attention kernels behind one small registry.

Shapes: B = pairs in the batch, h = heads (as many for k as for q), q/k = rows/keys of one block pair,
K = head dim; T = tokens of many short documents. A kernel sees one block pair and a causal flag; everything
else (blocks, windows, documents, GQA) is `attention.py`.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ithaka.config import ConfigError

aten: Any = torch.ops.aten
Grads = tuple[Tensor, Tensor, Tensor]
HALF = (torch.bfloat16, torch.float16)
ALL = (torch.float64, torch.float32, *HALF)


@dataclass(frozen=True)
class Varlen:
    """Many short documents in one call. `ends_d` is int32, cumulative, from 0; window as in `attention`.

    forward(q_ThK, k, v, ends_d, longest, scale, causal, window) -> out_ThK, lse_hT
    backward(dout_ThK, q, k, v, out, lse_hT, ends_d, longest, scale, causal, window) -> dq, dk, dv
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Grads]


@dataclass(frozen=True)
class Kernel:
    """One way to compute a block pair.

    forward(q_BhqK, k_BhkK, v_BhkK, scale, causal) -> out_BhqK, lse_Bhq (fp32, or fp64 for fp64 inputs)
    backward(dout_BhqK, q, k, v, out_BhqK, lse_Bhq, scale, causal) -> dq, dk, dv, where out and lse may be
    those of *all* keys: then the three are this pair's share of the gradients. Inputs may be strided except
    in K. `activate` runs before every use, for kernels that share an entry point in PyTorch.
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Grads]
    device: str = "cuda"
    dtypes: tuple[torch.dtype, ...] = HALF
    head_dims: tuple[int, int] = (256, 8)  # largest, and a multiple of
    varlen: Varlen | None = None
    activate: Callable[[], None] = lambda: None
    stand_in: "Kernel | None" = None  # for pairs with fewer rows or keys than `smallest`
    smallest: int = 1


# --- PyTorch's CPU flash kernel ---------------------------------------------------------------------------


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> Grads:
    # The kernel indexes lse as if it were contiguous.
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse.contiguous(), 0.0, causal, scale=scale
    )


# --- the plain reference, in fp64 -------------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    scores = q.double() @ k.double().mT * scale
    if causal:
        above = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(above, float("-inf"))
    return scores


def _reference_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, scale, causal)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v.double()
    return out.to(q.dtype), lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def _reference_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> Grads:
    probs = (_scores(q, k, scale, causal) - lse.double()[..., None]).exp()
    dout64 = dout.double()
    dv = probs.mT @ dout64
    dprobs = dout64 @ v.double().mT
    dscores = probs * (dprobs - (dout64 * out.double()).sum(-1, keepdim=True)) * scale
    return (dscores @ k.double()).to(q.dtype), (dscores.mT @ q.double()).to(k.dtype), dv.to(v.dtype)


# --- FlashAttention through PyTorch (FA2; FA3 and FA4 take over the same entry when activated) ----------


@cache
def _no_dropout(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Stands for the random state that kernels want even where nothing is dropped."""
    return torch.zeros(2, dtype=dtype, device=device)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> Grads:
    state = _no_dropout(q.device, torch.uint64)
    lse, rows, keys = lse.contiguous(), q.shape[2], k.shape[2]
    return aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, rows, keys, 0.0, causal, state, state, scale=scale
    )


def _window_sizes(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _flash_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    longest: int,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._flash_attention_forward(
        q,
        k,
        v,
        ends,
        ends,
        longest,
        longest,
        0.0,
        causal,
        False,
        scale=scale,
        **_window_sizes(window),
    )
    return out, lse


def _flash_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ends: Tensor,
    longest: int,
    scale: float,
    causal: bool,
    window: int | None,
) -> Grads:
    state, sizes = _no_dropout(q.device, torch.uint64), _window_sizes(window)
    return aten._flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), ends, ends, longest, longest, 0.0, causal, state, state,
        scale=scale, **sizes,
    )  # fmt: skip


# --- cuDNN through PyTorch --------------------------------------------------------------------------------


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse.view(q.shape[:3])


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> Grads:
    seed = _no_dropout(q.device, torch.int64)[0]
    lse = lse.contiguous()[..., None]
    rows, keys = q.shape[2], k.shape[2]
    return aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, seed, seed, None, None, None, rows, keys, 0.0, causal, scale=scale
    )


# --- the flash-attn package -------------------------------------------------------------------------------


def _package_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _wrapped_flash_attn_forward  # type: ignore[import-not-found]

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = _wrapped_flash_attn_forward(q, k, v, 0.0, scale, causal, -1, -1, 0.0, None, False)
    return out.transpose(1, 2), lse


def _package_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> Grads:
    from flash_attn.flash_attn_interface import _wrapped_flash_attn_backward

    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    _wrapped_flash_attn_backward(
        dout, q, k, v, out, lse.contiguous(), dq, dk, dv, 0.0, scale, causal, -1, -1, 0.0, None, False
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


# --- registry ---------------------------------------------------------------------------------------------


def _activate(impl: str | None) -> Callable[[], None]:
    """Lets PyTorch's flash entry run FA3 or FA4 (None: its own FA2). PyTorch holds one at a time."""

    def activate() -> None:
        registry: Any = torch.nn.attention
        current = getattr(registry, "current_flash_attention_impl", lambda: None)()
        if current == impl:
            return
        if impl is None:
            registry.restore_flash_attention_impl()
        else:
            registry.activate_flash_attention_impl(impl)

    return activate


_VARLEN = Varlen("flash", _flash_varlen_forward, _flash_varlen_backward)
_FLASH = Kernel("flash", _flash_forward, _flash_backward, varlen=_VARLEN, activate=_activate(None))
# cuDNN refuses a pair of one row and one key, and was seen to crash on others of a few.
_CUDNN = Kernel(
    "cudnn", _cudnn_forward, _cudnn_backward, varlen=_VARLEN, activate=_activate(None),
    stand_in=_FLASH, smallest=128,
)  # fmt: skip
KERNELS = {
    kernel.name: kernel
    for kernel in (
        _CUDNN,
        _FLASH,
        Kernel("flash-attn-2", _package_forward, _package_backward),
        replace(_FLASH, name="flash-attn-3", activate=_activate("FA3")),
        replace(_FLASH, name="flash-attn-4", activate=_activate("FA4"), varlen=None),
        Kernel("cpu", _cpu_forward, _cpu_backward, device="cpu", dtypes=ALL, head_dims=(1 << 20, 1)),
        Kernel("reference", _reference_forward, _reference_backward, "any", ALL, (1 << 20, 1)),
    )
}
# The packages' kernels come last: nobody has measured them here yet, so they are used only when asked for by name.
_ORDER = ("cudnn", "flash", "cpu", "reference", "flash-attn-4", "flash-attn-3", "flash-attn-2")
_PACKAGES = {
    "flash-attn-2": ("flash_attn.flash_attn_interface", "pip install flash-attn"),
    "flash-attn-3": ("flash_attn_interface", "install hopper/ of the flash-attention repository"),
    "flash-attn-4": ("flash_attn.cute.interface", "pip install flash-attn-4"),
}


def available_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
    """Names of the kernels that run here, the one `auto` takes first."""
    return [name for name in _ORDER if _refusal(KERNELS[name], device, dtype, head_dim) is None]


def resolve_kernel(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The kernel called `name`, ready to run; "auto" is the first of `available_kernels`.

    Raises ConfigError for one not known, not installed, or not for this device, dtype or head dim.
    """
    if name == "auto":
        name = available_kernels(device, dtype, head_dim)[0]
    if name not in KERNELS:
        raise ConfigError(f"attention.kernel={name} is not a kernel; use auto, {', '.join(KERNELS)}")
    refusal = _refusal(KERNELS[name], device, dtype, head_dim)
    if refusal is not None:
        raise ConfigError(f"attention.kernel={name} {refusal}, or use auto")
    KERNELS[name].activate()
    return KERNELS[name]


@cache
def _refusal(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why this kernel cannot run here, with the way out; None when it can."""
    largest, multiple = kernel.head_dims
    if kernel.device not in ("any", device.type):
        return f"runs on {kernel.device}, not on {device.type}; move the tensors"
    if dtype not in kernel.dtypes:
        return f"takes {', '.join(map(str, kernel.dtypes))}, not {dtype}; change model.dtype"
    if head_dim > largest or head_dim % multiple:
        return f"takes head dims up to {largest} in steps of {multiple}, not {head_dim}; use reference"
    if kernel.name in _PACKAGES:
        module, how = _PACKAGES[kernel.name]
        if not _installed(module):
            return f"needs the module {module}; {how}"
        if kernel.varlen is not None and not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
            return "needs a PyTorch with activate_flash_attention_impl; update PyTorch"
    return _trial(kernel, device, dtype, head_dim) if device.type == "cuda" else None


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _trial(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """One small pair, both ways: what a build of PyTorch or cuDNN takes is known only by asking it."""
    x = torch.ones(1, 1, 128, head_dim, dtype=dtype, device=device)
    try:
        kernel.activate()
        out, lse = kernel.forward(x, x, x, 1.0, True)
        kernel.backward(x, x, x, x, out, lse, 1.0, True)
    except (RuntimeError, NotImplementedError, AttributeError, ImportError, TypeError) as error:
        return f"does not run here ({str(error).splitlines()[0][:160]}); update PyTorch or its package"
    return None
