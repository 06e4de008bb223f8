"""The attention kernels.

Shapes: B = score blocks in the batch, h = heads (as many for k as for q, or with GQA fewer), q/j =
rows/keys of one score block, K = head dim; S = tokens of many short documents. A kernel computes
one score block with a causal flag; `blocks.py` does the rest (blocks, windows, documents), and
`choose.py` tests it.
"""

import re
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import torch
from torch import Tensor

from ithaka.attention.compiled import import_fa4, start_helpers
from ithaka.config import ConfigError
from ithaka.facts.attention import EFFICIENT_HEAD_DIMS, HEAD_DIMS
from ithaka.foreign import flash_attention, torch_operators
from ithaka.foreign.torch_core import FakeTensorMode
from ithaka.phases import count

aten: Any = torch.ops.aten
DTYPES_16_BIT = (torch.bfloat16, torch.float16)
ALL_DTYPES = (torch.float64, torch.float32, *DTYPES_16_BIT)


@dataclass(frozen=True)
class Varlen:
    """Many short documents in one call. `ends_d`: int32, cumulative, from 0; window as in
    `attention`.

    forward(q_ShK, k, v, ends_d, longest, scale, causal, window) -> out_ShK, lse_hS
    backward(dout_ShK, q, k, v, out, lse_hS, ends_d, longest, scale, causal, window) -> dq, dk, dv
    If the `Kernel` is `direct`, both also take `into`.
    """

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Kernel:
    """A kernel for score blocks.

    forward(q_BhqK, k_BhjK, v_BhjK, scale, causal) -> out_BhqK, lse_Bhq (fp32, or fp64 for fp64
    inputs) backward(dout_BhqK, q, k, v, out_BhqK, lse_Bhq, scale, causal) -> dq, dk, dv, where out
    and lse may be those of *all* keys: the results are then this block's contribution to the
    gradients. Inputs may be strided except in K. A `direct` kernel supports GQA (h larger for q
    than for k), the mask `window` of `score_blocks.py` (window=n), and buffers for its results,
    strided or None: forward takes into=(out, lse) and backward into=(dq, dk, dv). dq may alias out.
    """

    name: str
    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]
    device: str = "cuda"
    dtypes: tuple[torch.dtype, ...] = DTYPES_16_BIT
    head_dims: tuple[int, int] = HEAD_DIMS  # (maximum, required multiple)
    direct: bool = False
    capabilities: tuple[int, ...] = ()  # supported major versions; empty: all
    check_installed: Callable[[], str | None] = lambda: None  # returns the problem, if any
    varlen: Varlen | None = None
    # forward and backward also take softcap=c: scores become c * tanh(scores / c)
    has_softcap: bool = False
    fallback: "Kernel | None" = None  # for score blocks with fewer rows or keys than `min_tokens`
    min_tokens: int = 1

    def with_softcap(self, softcap: float | None) -> "Kernel":
        if softcap is None:
            return self
        if not self.has_softcap:
            able = ", ".join(kernel.name for kernel in KERNELS.values() if kernel.has_softcap)
            raise ConfigError(
                f"attention.kernel={self.name} does not compute softcap={softcap}; use one of "
                f"{able}"
            )

        def bind(each: AnyKernel) -> AnyKernel:
            forward = partial(each.forward, softcap=softcap)
            backward = partial(each.backward, softcap=softcap)
            return replace(each, forward=forward, backward=backward)

        return replace(bind(self), varlen=self.varlen and bind(self.varlen))


AnyKernel = TypeVar("AnyKernel", Kernel, Varlen)


def _cpu_forward(q, k, v, scale, causal):
    return torch_operators.cpu_attention(q, k, v, 0.0, causal, scale=scale)


def _cpu_backward(dout, q, k, v, out, lse, scale, causal):
    # The kernel indexes lse as if it were contiguous.
    return torch_operators.cpu_attention_backward(
        dout, q, k, v, out, lse.contiguous(), 0.0, causal, scale=scale
    )


def _scores(q, k, scale, causal, softcap=None, dtype=torch.float64):
    """Return the scores in `dtype`. `causal` may also be a mask, True where a row attends to a
    key."""
    scores = q.to(dtype) @ k.to(dtype).mT * scale
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if causal is False:
        return scores
    if causal is True:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill_(~causal, float("-inf"))


def _reference_forward(q, k, v, scale, causal, softcap=None, dtype=torch.float64):
    scores = _scores(q, k, scale, causal, softcap, dtype)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v.to(dtype)
    return out.to(q.dtype), lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def _reference_backward(dout, q, k, v, out, lse, scale, causal, softcap=None, dtype=torch.float64):
    scores = _scores(q, k, scale, causal, softcap, dtype)
    probs = (scores - lse.to(dtype)[..., None]).exp()
    wide_dout = dout.to(dtype)
    dv = probs.mT @ wide_dout
    dprobs = wide_dout @ v.to(dtype).mT
    dscores = probs * (dprobs - (wide_dout * out.to(dtype)).sum(-1, keepdim=True)) * scale
    if softcap is not None:  # scores are -inf where a key is masked
        dscores *= 1 - scores.masked_fill(probs == 0, 0).div_(softcap).square_()
    dq = (dscores @ k.to(dtype)).to(q.dtype)
    dk = (dscores.mT @ q.to(dtype)).to(k.dtype)
    return dq, dk, dv.to(v.dtype)


def _in_tf32(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Run a reference function in fp32 with TF32 matmuls, which do not round 16-bit inputs."""

    def run(*inputs, softcap=None):
        settings: Any = torch.backends.cuda.matmul
        before = settings.fp32_precision
        settings.fp32_precision = "tf32"
        try:
            return function(*inputs, softcap=softcap, dtype=torch.float32)
        finally:
            settings.fp32_precision = before

    return run


@cache
def _empty_rng_state(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a placeholder for the RNG state, which kernels require even without dropout."""
    return torch.zeros(2, dtype=dtype, device=device)


def _flash_forward(q, k, v, scale, causal):
    out, lse, *_ = torch_operators.flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _flash_backward(dout, q, k, v, out, lse, scale, causal):
    state = _empty_rng_state(q.device, torch.uint64)
    lse = lse.contiguous()
    rows = q.shape[2]
    keys = k.shape[2]
    return torch_operators.flash_attention_backward(
        dout, q, k, v, out, lse, None, None, rows, keys, 0.0, causal, state, state, scale=scale
    )


def _window_sizes(window):
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _flash_varlen_forward(q, k, v, ends, longest, scale, causal, window):
    lengths = (ends, ends, longest, longest)
    sizes = _window_sizes(window)
    out, lse, *_ = torch_operators.packed_attention(
        q, k, v, *lengths, 0.0, causal, False, scale=scale, **sizes
    )
    return out, lse


def _flash_varlen_backward(dout, q, k, v, out, lse, ends, longest, scale, causal, window):
    inputs = (dout, q, k, v, out, lse.contiguous())
    lengths = (ends, ends, longest, longest)
    state = _empty_rng_state(q.device, torch.uint64)
    sizes = _window_sizes(window)
    return torch_operators.packed_attention_backward(
        *inputs, *lengths, 0.0, causal, state, state, scale=scale, **sizes
    )


def _cudnn_forward(q, k, v, scale, causal):
    out, lse, *_ = torch_operators.cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.view(q.shape[:3])


def _cudnn_backward(dout, q, k, v, out, lse, scale, causal):
    seed = _empty_rng_state(q.device, torch.int64)[0]
    lse = lse.contiguous()[..., None]
    rows = q.shape[2]
    keys = k.shape[2]
    return torch_operators.cudnn_attention_backward(
        dout, q, k, v, out, lse, seed, seed, None, None, None, rows, keys, 0.0, causal, scale=scale
    )


_LSE_ROWS = 32  # the memory-efficient kernel reads lse in rows padded to a multiple of this many


def _efficient_forward(q, k, v, scale, causal):
    out, lse, *_ = torch_operators.efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]


def _efficient_backward(dout, q, k, v, out, lse, scale, causal):
    seed = _empty_rng_state(q.device, torch.int64)[0]
    padding = (0, -lse.shape[-1] % _LSE_ROWS)
    padded = torch.nn.functional.pad(lse, padding, value=float("inf")).contiguous()
    # The kernel takes no stride of out's rows.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    needs = [True, True, True, False]
    grads = torch_operators.efficient_attention_backward(
        dout, q, k, v, None, out, padded, seed, seed, 0.0, needs, causal, scale=scale
    )
    return grads[:3]


# FlashAttention 4 takes [B, q, h, K], and has no public function that takes lse or buffers.
FA4_VERSIONS = ("4.0.0b36",)


_import_fa4 = import_fa4
_COMPILE_LOCK = threading.Lock()  # concurrent compilation aborts the process


# The DSL of flash-attn-4 warns about the (empty) AuxData argument of each of its kernels.
_AUX_DATA = (
    r"Argument aux_data \(.* cannot be converted to a JitArgument "
    r".*flash_attn\.cute\.utils\.AuxData\b"
)
_AUX_DATA_FROM = r"cutlass\."


def _ignore_aux_data() -> None:
    """Ignore that warning. Checked at every call, because leaving `warnings.catch_warnings` removes
    the filter."""
    message = re.compile(_AUX_DATA, re.IGNORECASE)
    module = re.compile(_AUX_DATA_FROM)
    if ("ignore", message, UserWarning, module, 0) not in warnings.filters:
        warnings.filterwarnings("ignore", _AUX_DATA, UserWarning, _AUX_DATA_FROM)


def _call_fa4(name, *inputs, **options):
    with _COMPILE_LOCK:
        _ignore_aux_data()
        return getattr(_import_fa4(), name)(*inputs, **options)


def _check_fa4_version() -> str | None:
    try:
        installed = version("flash-attn-4")
    except PackageNotFoundError:
        return "needs flash-attn-4, which is not installed; pip install -e '.[gpu]'"
    if installed not in FA4_VERSIONS:
        return (
            f"was tested with flash-attn-4 {FA4_VERSIONS[-1]}, not {installed}; pip install "
            "-e '.[gpu]'"
        )
    return None


def _fa4_scores(scale, causal, window, softcap):
    left = None if window is None else window - 1
    options = {"softmax_scale": scale, "causal": causal, "window_size_left": left}
    if softcap is not None:
        options["softcap"] = softcap
    return options


def _fa4_forward(q, k, v, scale, causal, window=None, into=(None, None), softcap=None):
    mask = _fa4_scores(scale, causal, window, softcap)
    q, k, v, out = (x if x is None else x.transpose(1, 2) for x in (q, k, v, into[0]))
    out, lse, *_ = _call_fa4(
        flash_attention.FORWARD, q, k, v, **mask, return_lse=True, out=out, lse=into[1]
    )
    return out.transpose(1, 2), lse


def _fa4_backward(
    dout, q, k, v, out, lse, scale, causal, window=None, into=(None, None, None), softcap=None
):
    deterministic = torch.are_deterministic_algorithms_enabled()
    options = _fa4_scores(scale, causal, window, softcap) | {"deterministic": deterministic}
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    dq, dk, dv = (x if x is None else x.transpose(1, 2) for x in into)
    grads = _call_fa4(
        flash_attention.BACKWARD, q, k, v, out, dout, lse, **options, dq=dq, dk=dk, dv=dv
    )
    return tuple(grad.transpose(1, 2) for grad in grads)


def _fa4_documents(softcap, ends, longest, scale, causal, window):
    lengths = {
        "cu_seqlens_q": ends,
        "cu_seqlens_k": ends,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }
    return _fa4_scores(scale, causal, window, softcap) | lengths


def _fa4_varlen_forward(q, k, v, *documents, into=(None, None), softcap=None):
    options = _fa4_documents(softcap, *documents) | {"return_lse": True}
    return _call_fa4(flash_attention.FORWARD, q, k, v, **options, out=into[0], lse=into[1])[:2]


def _fa4_varlen_backward(
    dout, q, k, v, out, lse, *documents, into=(None, None, None), softcap=None
):
    options = _fa4_documents(softcap, *documents)
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv = into
    return _call_fa4(
        flash_attention.BACKWARD, q, k, v, out, dout, lse, **options, dq=dq, dk=dk, dv=dv
    )


def compile_ahead(gpu: str, head_dim: int, dtype: str, group: int) -> None:
    """Start processes that compile the kernels for the test and for training with `group` query
    heads per kv head."""
    # causal, window, packed
    masks = [
        (True, None, False),
        (True, 5, False),
        (True, None, True),
        (True, 5, True),
        (False, None, False),
    ]
    kernels = [
        (head_dim, dtype, group, *mask, backward) for mask in masks for backward in (False, True)
    ]
    start_helpers(gpu, "from ithaka.attention.kernels import compile_fa4; compile_fa4", kernels)


def compile_fa4(
    head_dim: int,
    dtype: str,
    group: int,
    causal: bool,
    window: int | None,
    packed: bool,
    backward: bool,
) -> None:
    """Compile one kernel into the cache without running it. Tensors are fake: only a CUDA context
    needs GPU memory."""
    heads = 2 * group
    with FakeTensorMode(), torch.device("cuda"):
        q_ShK = torch.empty(8192, heads, head_dim, dtype=getattr(torch, dtype))
        k_SmK = torch.empty(8192, 2, head_dim, dtype=getattr(torch, dtype))
        lse_hS = torch.empty(heads, 8192)
        lengths: tuple[Any, ...] = ()
        if packed:
            lengths = (torch.empty(4, dtype=torch.int32), 4096)
        else:
            q_ShK, k_SmK = (x.transpose(0, 1).unsqueeze(0) for x in (q_ShK, k_SmK))
            lse_hS = lse_hS.unsqueeze(0)
        mask = (1.0, causal, window)
        run = _FA4_VARLEN if packed else _FA4
        if backward:
            run.backward(q_ShK, q_ShK, k_SmK, k_SmK, q_ShK, lse_hS, *lengths, *mask)
        else:
            into = (torch.empty_like(q_ShK), lse_hS)
            run.forward(q_ShK, k_SmK, k_SmK, *lengths, *mask, into=into)


# ---- registry


_FA4_VARLEN = Varlen(_fa4_varlen_forward, _fa4_varlen_backward)
# faster than cuDNN at every head dim, in both directions: on Hopper measured (LOG.md), on Blackwell
# by published figures
_FA4 = Kernel(
    "fa4",
    _fa4_forward,
    _fa4_backward,
    direct=True,
    capabilities=(9, 10),
    check_installed=_check_fa4_version,
    varlen=_FA4_VARLEN,
    has_softcap=True,
)
_FLASH_VARLEN = Varlen(_flash_varlen_forward, _flash_varlen_backward)
_FLASH = Kernel("flash", _flash_forward, _flash_backward, varlen=_FLASH_VARLEN)
# cuDNN rejects a single row and key, and has crashed on other tiny blocks.
_CUDNN = Kernel(
    "cudnn", _cudnn_forward, _cudnn_backward, varlen=_FLASH_VARLEN, fallback=_FLASH, min_tokens=128
)
# Computes head dims that the others do not, in 16 bits like them. For softcaps, matmuls and a
# softmax in fp32.
_EFFICIENT = Kernel(
    "efficient", _efficient_forward, _efficient_backward, head_dims=EFFICIENT_HEAD_DIMS
)
_EAGER = Kernel(
    "eager",
    _in_tf32(_reference_forward),
    _in_tf32(_reference_backward),
    head_dims=(1 << 20, 1),
    has_softcap=True,
)
_CPU = Kernel(
    "cpu", _cpu_forward, _cpu_backward, device="cpu", dtypes=ALL_DTYPES, head_dims=(1 << 20, 1)
)
_REFERENCE = Kernel(
    "reference",
    _reference_forward,
    _reference_backward,
    "any",
    ALL_DTYPES,
    (1 << 20, 1),
    has_softcap=True,
)
# In order of preference: `auto` takes the first that works.
KERNELS = {
    kernel.name: kernel for kernel in (_FA4, _CUDNN, _FLASH, _EFFICIENT, _EAGER, _CPU, _REFERENCE)
}


# ---- traces


def trace_kernel(kernel: Kernel) -> Kernel:
    """The kernel for tensors without memory: allocates what it allocates on a GPU."""
    forward = partial(_trace_forward, kernel)
    backward = partial(_trace_backward, kernel)
    varlen = kernel.varlen and Varlen(forward, backward)
    return replace(kernel, forward=forward, backward=backward, varlen=varlen, fallback=None)


def _trace_forward(kernel, q, k, *others, into=(None, None), **options):
    scores = _trace_scores(kernel, q, k)
    out, lse = into
    out = torch.empty_like(q) if out is None else out
    del scores
    shape = q.shape[:3] if q.dim() == 4 else (q.shape[1], len(q))
    return out, torch.empty(shape, dtype=torch.float32, device=q.device) if lse is None else lse


def _trace_backward(kernel, dout, q, k, v, *others, into=(None, None, None), **options):
    """All kernels sum dq in fp32; dk and dv too if they sum them over query heads, or if the head
    dim is large."""
    sums_kv = q.shape[1] > k.shape[1] or kernel.name == "efficient"
    scores = _trace_scores(kernel, q, k)
    summed = (q, k, v) if sums_kv else (q,)
    sums = [torch.empty_like(x, dtype=torch.float32) for x in summed]
    grads = []
    for x, to in zip((q, k, v), into, strict=True):
        grads.append(torch.empty_like(x) if to is None else to)
    del scores, sums
    return tuple(grads)


def _trace_scores(kernel, q, k):
    """Scores, probabilities and their gradients, of the kernels that allocate them."""
    width = {"eager": 4, "reference": 8}.get(kernel.name, 0)
    shape = (*q.shape[:-1], k.shape[-2], 4 * width) if width else (0,)
    return torch.empty(shape, dtype=torch.uint8, device=q.device)


def count_flops(kernel, direction, num_blocks, head_dim, rows, keys, causal, window):
    """Count two matmuls per pair of a query and a key, in backward five. Short documents count as
    the longest."""
    pairs = rows * keys
    if causal:  # the rows are the last of the keys
        reach = min(keys, window or keys)
        pairs = rows * reach - rows * (rows - 1) // 2 * (reach == keys)
    flops = (4 if direction == "forward" else 10) * head_dim * num_blocks * pairs
    count(f"attention {direction}, {kernel.name}, head dim {head_dim}", flops)
