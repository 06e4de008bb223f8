"""Attention kernels behind one small registry.

Shapes: B = pairs in the batch, h = heads (as many for k as for q, or with GQA fewer), q/k = rows/keys of one block
pair, K = head dim; T = tokens of many short documents. A kernel sees one block pair and a causal flag; `blocks.py` does
the rest (blocks, windows, documents).
"""

import os
import re
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ithaka.attention.fused import merge
from ithaka.config import ConfigError
from ithaka.dist.agree import gather_objects
from ithaka.dist.rank import is_local_rank_0

aten: Any = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
ALL = (torch.float64, torch.float32, *HALF)


@dataclass(frozen=True)
class Varlen:
    """Many short documents in one call. `ends_d`: int32, cumulative, from 0; window as in `attention`.

    forward(q_ThK, k, v, ends_d, longest, scale, causal, window) -> out_ThK, lse_hT
    backward(dout_ThK, q, k, v, out, lse_hT, ends_d, longest, scale, causal, window) -> dq, dk, dv
    As for a `Kernel` that is `direct`, both may take `into`.
    """

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Kernel:
    """One way to compute a block pair.

    forward(q_BhqK, k_BhkK, v_BhkK, scale, causal) -> out_BhqK, lse_Bhq (fp32, or fp64 for fp64 inputs)
    backward(dout_BhqK, q, k, v, out_BhqK, lse_Bhq, scale, causal) -> dq, dk, dv, where out and lse may be those
    of *all* keys: then the three are what this pair adds to the gradients. Inputs may be strided except in K.
    With `direct`, h may be larger for q than for k (GQA); window=n is the mask of `pairs.py` by that name; forward
    takes into=(out, lse) and backward into=(dq, dk, dv): buffers, strided like inputs, for the results, or None. dq may
    lie over out.
    """

    name: str
    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]
    device: str = "cuda"
    dtypes: tuple[torch.dtype, ...] = HALF
    head_dims: tuple[int, int] = (256, 8)  # the largest, and what all are multiples of
    direct: bool = False
    capabilities: tuple[int, ...] = ()  # the major ones that it runs on; none: all
    missing: Callable[[], str | None] = lambda: None  # what it needs and is not installed
    varlen: Varlen | None = None
    stand_in: "Kernel | None" = None  # for pairs with fewer rows or keys than `smallest`
    smallest: int = 1


def _cpu_forward(q, k, v, scale, causal):
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _cpu_backward(dout, q, k, v, out, lse, scale, causal):
    # The kernel indexes lse as if it were contiguous.
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse.contiguous(), 0.0, causal, scale=scale
    )


def _scores(q, k, scale, causal):
    """In fp64. `causal` may also be a mask, true where a row sees a key."""
    scores = q.double() @ k.double().mT * scale
    if causal is False:
        return scores
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril() if causal is True else causal
    return scores.masked_fill_(~seen, float("-inf"))


def _reference_forward(q, k, v, scale, causal):
    scores = _scores(q, k, scale, causal)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v.double()
    return out.to(q.dtype), lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def _reference_backward(dout, q, k, v, out, lse, scale, causal):
    probs = (_scores(q, k, scale, causal) - lse.double()[..., None]).exp()
    dout64 = dout.double()
    dv = probs.mT @ dout64
    dprobs = dout64 @ v.double().mT
    dscores = probs * (dprobs - (dout64 * out.double()).sum(-1, keepdim=True)) * scale
    return (dscores @ k.double()).to(q.dtype), (dscores.mT @ q.double()).to(k.dtype), dv.to(v.dtype)


@cache
def _no_dropout(device: torch.device, dtype: torch.dtype) -> Tensor:
    """A placeholder for the RNG state that kernels require even without dropout."""
    return torch.zeros(2, dtype=dtype, device=device)


def _flash_forward(q, k, v, scale, causal):
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _flash_backward(dout, q, k, v, out, lse, scale, causal):
    state = _no_dropout(q.device, torch.uint64)
    lse, rows, keys = lse.contiguous(), q.shape[2], k.shape[2]
    return aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, rows, keys, 0.0, causal, state, state, scale=scale
    )


def _window_sizes(window):
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _flash_varlen_forward(q, k, v, ends, longest, scale, causal, window):
    lengths, sizes = (ends, ends, longest, longest), _window_sizes(window)
    out, lse, *_ = aten._flash_attention_forward(q, k, v, *lengths, 0.0, causal, False, scale=scale, **sizes)
    return out, lse


def _flash_varlen_backward(dout, q, k, v, out, lse, ends, longest, scale, causal, window):
    inputs, lengths = (dout, q, k, v, out, lse.contiguous()), (ends, ends, longest, longest)
    state, sizes = _no_dropout(q.device, torch.uint64), _window_sizes(window)
    return aten._flash_attention_backward(*inputs, *lengths, 0.0, causal, state, state, scale=scale, **sizes)


def _cudnn_forward(q, k, v, scale, causal):
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse.view(q.shape[:3])


def _cudnn_backward(dout, q, k, v, out, lse, scale, causal):
    seed = _no_dropout(q.device, torch.int64)[0]
    lse = lse.contiguous()[..., None]
    rows, keys = q.shape[2], k.shape[2]
    return aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, seed, seed, None, None, None, rows, keys, 0.0, causal, scale=scale
    )


# FlashAttention 4 lays tensors out as [B, q, h, K] and has no public entry that takes lse or buffers.
FA4_VERSIONS = ("4.0.0b36",)


@cache
def _fa4() -> Any:
    # Kernels are compiled when first called, 4 s each: keep them for the next process.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    from flash_attn.cute import interface

    return interface


_COMPILING = threading.Lock()  # two threads that compile at once abort the process


# The DSL that flash-attn-4 compiles with warns about the (empty) AuxData that each of its kernels takes.
_AUX_DATA = r"Argument aux_data \(.* cannot be converted to a JitArgument .*flash_attn\.cute\.utils\.AuxData\b"
_AUX_DATA_FROM = r"cutlass\."


def _ignore_aux_data() -> None:
    """Filter out that warning alone, unless it is already: leaving `warnings.catch_warnings` removes the filter."""
    wanted = ("ignore", re.compile(_AUX_DATA, re.IGNORECASE), UserWarning, re.compile(_AUX_DATA_FROM), 0)
    if wanted not in warnings.filters:
        warnings.filterwarnings("ignore", _AUX_DATA, UserWarning, _AUX_DATA_FROM)


def _fa4_call(name, *inputs, **how):
    with _COMPILING:
        _ignore_aux_data()
        return getattr(_fa4(), name)(*inputs, **how)


def _fa4_missing() -> str | None:
    try:
        installed = version("flash-attn-4")
    except PackageNotFoundError:
        return "needs flash-attn-4, which is not installed; pip install 'ithaka[gpu]'"
    if installed not in FA4_VERSIONS:
        return f"was tested with flash-attn-4 {FA4_VERSIONS[-1]}, not {installed}; pip install 'ithaka[gpu]'"
    return None


def _fa4_mask(scale, causal, window):
    return {"softmax_scale": scale, "causal": causal, "window_size_left": None if window is None else window - 1}


def _fa4_forward(q, k, v, scale, causal, window=None, into=(None, None)):
    mask = _fa4_mask(scale, causal, window)
    q, k, v, out = (x if x is None else x.transpose(1, 2) for x in (q, k, v, into[0]))
    out, lse, *_ = _fa4_call("_flash_attn_fwd", q, k, v, **mask, return_lse=True, out=out, lse=into[1])
    return out.transpose(1, 2), lse


def _fa4_backward(dout, q, k, v, out, lse, scale, causal, window=None, into=(None, None, None)):
    how = _fa4_mask(scale, causal, window) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    dq, dk, dv = (x if x is None else x.transpose(1, 2) for x in into)
    grads = _fa4_call("_flash_attn_bwd", q, k, v, out, dout, lse, **how, dq=dq, dk=dk, dv=dv)
    return tuple(grad.transpose(1, 2) for grad in grads)


def _fa4_documents(ends, longest, scale, causal, window):
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return _fa4_mask(scale, causal, window) | lengths


def _fa4_varlen_forward(q, k, v, *documents, into=(None, None)):
    how = _fa4_documents(*documents)
    return _fa4_call("_flash_attn_fwd", q, k, v, **how, return_lse=True, out=into[0], lse=into[1])[:2]


def _fa4_varlen_backward(dout, q, k, v, out, lse, *documents, into=(None, None, None)):
    how = _fa4_documents(*documents) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
    dq, dk, dv = into
    return _fa4_call("_flash_attn_bwd", q, k, v, out, dout, lse, **how, dq=dq, dk=dk, dv=dv)


# --- registry ---------------------------------------------------------------------------------------------


_FA4_VARLEN = Varlen(_fa4_varlen_forward, _fa4_varlen_backward)
# Faster than cuDNN at every head dim on Hopper, in both directions (LOG.md); on Blackwell by published rates.
_FA4 = Kernel(
    "fa4", _fa4_forward, _fa4_backward, direct=True, capabilities=(9, 10), missing=_fa4_missing, varlen=_FA4_VARLEN
)
_VARLEN = Varlen(_flash_varlen_forward, _flash_varlen_backward)
_FLASH = Kernel("flash", _flash_forward, _flash_backward, varlen=_VARLEN)
# cuDNN rejects a single row and key, and has crashed on other tiny pairs.
_CUDNN = Kernel("cudnn", _cudnn_forward, _cudnn_backward, varlen=_VARLEN, stand_in=_FLASH, smallest=128)
_CPU = Kernel("cpu", _cpu_forward, _cpu_backward, device="cpu", dtypes=ALL, head_dims=(1 << 20, 1))
_REFERENCE = Kernel("reference", _reference_forward, _reference_backward, "any", ALL, (1 << 20, 1))
# `auto` takes the first that works.
KERNELS = {kernel.name: kernel for kernel in (_FA4, _CUDNN, _FLASH, _CPU, _REFERENCE)}


def available_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
    """Names of the kernels that pass their trial here, in the order that `auto` prefers."""
    return [name for name, kernel in KERNELS.items() if _refusal(kernel, device, dtype, head_dim) is None]


def expected_kernel(name: str, runnable: Sequence[str]) -> str:
    """The kernel that `resolve_kernel` should return on a GPU that `runnable` run on, the fastest first, judged by
    what is installed: a trial needs the GPU."""
    if name != "auto":
        return name
    return next((each for each in runnable if KERNELS[each].missing() is None), name)


def resolve_kernel(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The kernel called `name`; "auto" is the first of `available_kernels`.

    Raises ConfigError for a kernel that is unknown, not for this device, dtype or head dim, or that fails its trial.
    `auto` skips those; the first time, it warns about each that failed its trial.
    """
    if name == "auto":
        return _auto(tuple(KERNELS.values()), device, dtype, head_dim)
    if name not in KERNELS:
        raise ConfigError(f"attention.kernel={name} is not a kernel; use auto, {', '.join(KERNELS)}")
    refusal = _refusal(KERNELS[name], device, dtype, head_dim)
    if refusal is not None:
        raise ConfigError(f"attention.kernel={name} {refusal}, or use auto")
    return KERNELS[name]


def agree_on_kernel(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The name of the kernel that all ranks use: where auto differs between them, the first one that passes its trial
    on all. Rank 0 then warns, and names a rank that lacks the better one. Every rank calls it."""
    chosen = resolve_kernel(name, device, dtype, head_dim).name
    if name != "auto" or not dist.is_initialized() or dist.get_world_size() == 1:
        return chosen
    names, order = gather_objects(chosen), list(KERNELS)
    if len(set(names)) == 1:
        return chosen
    best, common = (pick(names, key=order.index) for pick in (min, max))
    refusals = gather_objects((socket.gethostname(), _refusal(KERNELS[best], device, dtype, head_dim)))
    while any(gather_objects(_refusal(KERNELS[common], device, dtype, head_dim))):
        common = order[order.index(common) + 1]  # at last the reference, which runs anywhere
    if dist.get_rank() == 0:
        lacking = [(rank, host, why) for rank, (host, why) in enumerate(refusals) if why is not None]
        (rank, host, why), *others = lacking
        where = f"rank {rank} on {host}{f' and {len(others)} more' if others else ''}"
        words = f"attention.kernel=auto is {common} on all ranks: {where} cannot use {best}, which {why}"
        warnings.warn(words, stacklevel=3)
    return common


@cache
def _auto(kernels: tuple[Kernel, ...], device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    for kernel in kernels:
        unfit = _unfit(kernel, device, dtype, head_dim)
        failure = unfit or _trial(kernel, device, dtype, head_dim)
        if failure is None:
            return kernel
        if unfit is None and is_local_rank_0():  # once per machine
            warnings.warn(f"attention.kernel=auto skips {kernel.name}, which {failure}", stacklevel=4)
    raise ConfigError(f"no attention kernel takes {dtype} with head dim {head_dim} on {device}; change model.dtype")


def _refusal(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why this kernel cannot be used here, and the way out; None if it can."""
    return _unfit(kernel, device, dtype, head_dim) or _trial(kernel, device, dtype, head_dim)


def _unfit(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """What rules the kernel out without a trial."""
    largest, multiple = kernel.head_dims
    if kernel.device not in ("any", device.type):
        return f"runs on {kernel.device}, not on {device.type}; move the tensors"
    if dtype not in kernel.dtypes:
        return f"takes {', '.join(map(str, kernel.dtypes))}, not {dtype}; change model.dtype"
    if head_dim > largest or head_dim % multiple:
        return f"takes head dims up to {largest} in steps of {multiple}, not {head_dim}; use reference"
    if kernel.capabilities and (has := torch.cuda.get_device_capability(device))[0] not in kernel.capabilities:
        return f"needs compute capability {' or '.join(map(str, kernel.capabilities))}, not {has[0]}.{has[1]}"
    return None


# --- trial ------------------------------------------------------------------------------------------------


# Largest difference from the reference, relative to its largest value. Sound kernels stay below a third of it.
_ALLOWED = {torch.bfloat16: 0.03, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-12}
_ALLOWED_LSE = {**_ALLOWED, torch.bfloat16: 1e-3, torch.float16: 1e-3}  # fp32 whatever the inputs are
_Try = tuple[str, tuple[Tensor, ...], tuple[Tensor, ...]]  # where, and the results of the kernel and of the reference
_NAMES = ("out", "lse", "dq", "dk", "dv")


@cache
def _trial(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Runs the kernel on small random data; returns what is wrong, or None.

    Only a trial shows what a build of PyTorch or cuDNN accepts and computes correctly.
    """
    if kernel.name == _REFERENCE.name:
        return None
    if missing := kernel.missing():
        return missing
    try:
        with torch.inference_mode(False), torch.no_grad():
            wrong = _compare(kernel, device, dtype, head_dim)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a kernel raises, it must not end the run
        said = str(error).strip().partition("\n")[0][:160]
        wrong = f"does not run here ({type(error).__name__}: {said})"
    if wrong is not None:
        return f"{wrong}; update PyTorch{', or install flash-attn-4 again' if kernel is _FA4 else ''}"
    if kernel.stand_in is None:
        return None
    wrong = _refusal(kernel.stand_in, device, dtype, head_dim)
    return wrong and f"needs {kernel.stand_in.name} for small blocks, which {wrong}"


def _compare(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """What differs from the fp64 reference by more than rounding, and by how much."""
    rows, scale = (256 if device.type == "cuda" else 32), head_dim**-0.5
    keys, random, heads = rows + rows // 2, torch.Generator().manual_seed(0), 4 if kernel.direct else 2
    sizes = ((rows, heads), (rows, heads), (keys, 2), (keys, 2))
    drawn = [torch.randn(*size, head_dim, generator=random, device="cpu") for size in sizes]
    dout, q, k, v = (x_SnK.to(device, dtype).transpose(0, 1) for x_SnK in drawn)
    tries = _try_pairs(kernel, scale, dout[None], q[None], k[None], v[None])
    if kernel.varlen is not None:
        tries = chain(tries, _try_documents(kernel, scale, dout, q, k[:, -rows:], v[:, -rows:]))
    for where, ours, exact in tries:
        for name, a, b in zip(_NAMES, ours, exact, strict=True):
            allowed = (_ALLOWED_LSE if name == "lse" else _ALLOWED)[dtype]
            if a.shape != b.shape:
                return f"gives {name} of shape {tuple(a.shape)}, not {tuple(b.shape)}, in {where}"
            off = ((a.double() - b).abs().max() / b.abs().max()).item()
            if not off <= allowed:  # also true of NaN
                return (
                    f"is wrong here: {name} is off by {off:.1e} of its largest value (rounding explains {allowed:.0e}) "
                    f"in {where}"
                )
    return None


def _try_pairs(kernel: Kernel, scale: float, dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Iterator[_Try]:
    """As in training: strided, earlier keys in full, the rows' own causal, a backward from out and lse of both. A
    `direct` kernel also gets more query than kv heads, a window, and, where a call has all keys, buffers."""
    rows, keys = q.shape[2], k.shape[2]
    pairs = [(k[:, :, :-rows], v[:, :, :-rows], False), (k[:, :, -rows:], v[:, :, -rows:], True)]
    out, lse = torch.zeros_like(q, dtype=torch.float64), torch.full_like(q[..., 0], float("-inf"), dtype=torch.float64)
    for pair_k, pair_v, causal in pairs:
        merge(out, lse, *_exact(dout, q, pair_k, pair_v, scale, causal)[:2])
    of_both = (out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32)))
    for pair_k, pair_v, causal in pairs:
        exact = _exact(dout, q, pair_k, pair_v, scale, causal, of_both)
        how = {"into": (None, None, None)} if kernel.direct else {}
        ours = kernel.forward(q, pair_k, pair_v, scale, causal)
        grads = kernel.backward(dout, q, pair_k, pair_v, *of_both, scale, causal, **how)
        yield f"a {'causal' if causal else 'full'} block", (*ours, *grads), exact
    if kernel.direct:
        window = keys - rows + 1  # as many keys as the rows see
        seen = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows).triu()
        ours = _into_buffers(kernel, dout, q, k, v, scale, True, window=window)
        yield "a block with a window", ours, _exact(dout, q, k, v, scale, seen)
        k, v, _ = pairs[-1]
        ours = _into_buffers(kernel, dout, q, k, v, scale, True)
        yield "a causal block written to buffers", ours, _exact(dout, q, k, v, scale, True)


def _try_documents(kernel: Kernel, scale: float, dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Iterator[_Try]:
    """Three packed documents, without and with a window; inputs are [h, T, K]."""
    lengths, varlen = (3, 7, q.shape[1] - 10), kernel.varlen
    assert varlen is not None
    ends_d = torch.tensor((0, *accumulate(lengths)), dtype=torch.int32, device=q.device)
    seen_TT = torch.block_diag(*(torch.ones(n, n, device=q.device) for n in lengths)).bool().tril()
    dout_ThK, *inputs = (x.transpose(0, 1) for x in (dout, q, k, v))
    for window, where in ((None, "packed documents"), (5, "packed documents with a window")):
        how = (ends_d, max(lengths), scale, True, window)
        if kernel.direct:
            out, lse, *grads = _into_buffers(varlen, dout_ThK, *inputs, *how)
        else:
            out, lse = varlen.forward(*inputs, *how)
            grads = list(varlen.backward(dout_ThK, *inputs, out, lse, *how))
        ours = (out.transpose(0, 1), lse, *(grad.transpose(0, 1) for grad in grads))
        yield where, ours, _exact(dout, q, k, v, scale, seen_TT if window is None else seen_TT.triu(1 - window))


def _into_buffers(kernel: Kernel | Varlen, dout, q, k, v, *how, **window) -> tuple[Tensor, ...]:
    """out, lse, dq, dk and dv as a direct kernel writes them to buffers of NaN; dq over out."""
    out, dk, dv = (torch.full_like(x, float("nan")) for x in (q, k, v))
    heads_first = q.shape[:-1] if q.ndim == 4 else q.shape[1::-1]
    lse = torch.full(heads_first, float("nan"), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    kernel.forward(q, k, v, *how, into=(out, lse), **window)
    dq = out.clone()
    kernel.backward(dout, q, k, v, dq, lse, *how, into=(dq, dk, dv), **window)
    return out, lse, dq, dk, dv


def _exact(dout, q, k, v, scale, causal, given=None) -> tuple[Tensor, ...]:
    """The reference's results; its backward starts from the out and lse given, or else from its own."""
    dout, q, k, v = (x.double() for x in (dout, q, k, v))
    repeat = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(repeat, -3) for x in (k, v))
    results = _reference_forward(q, k, v, scale, causal)
    out, lse = given or results
    dq, *dkv = _reference_backward(dout, q, k, v, out, lse, scale, causal)
    return *results, dq, *(x.unflatten(-3, (-1, repeat)).sum(-3) for x in dkv)
