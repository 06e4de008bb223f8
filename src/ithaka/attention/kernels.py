"""The attention kernels, and how one is chosen and tested.

Shapes: B = pairs in the batch, h = heads (as many for k as for q, or with GQA fewer), q/k = rows/keys of one block
pair, K = head dim; T = tokens of many short documents. A kernel computes one block pair with a causal flag;
`blocks.py` does the rest (blocks, windows, documents).
"""

import re
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ithaka.attention.compiled import import_fa4, start_helpers
from ithaka.attention.fused import merge_softmax
from ithaka.config import ConfigError
from ithaka.dist.agree import gather_objects
from ithaka.dist.rank import is_local_rank_0

aten: Any = torch.ops.aten
DTYPES_16_BIT = (torch.bfloat16, torch.float16)
ALL_DTYPES = (torch.float64, torch.float32, *DTYPES_16_BIT)


@dataclass(frozen=True)
class Varlen:
    """Many short documents in one call. `ends_d`: int32, cumulative, from 0; window as in `attention`.

    forward(q_ThK, k, v, ends_d, longest, scale, causal, window) -> out_ThK, lse_hT
    backward(dout_ThK, q, k, v, out, lse_hT, ends_d, longest, scale, causal, window) -> dq, dk, dv
    If the `Kernel` is `direct`, both also take `into`.
    """

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Kernel:
    """A kernel for block pairs.

    forward(q_BhqK, k_BhkK, v_BhkK, scale, causal) -> out_BhqK, lse_Bhq (fp32, or fp64 for fp64 inputs)
    backward(dout_BhqK, q, k, v, out_BhqK, lse_Bhq, scale, causal) -> dq, dk, dv, where out and lse may be those
    of *all* keys: the results are then this pair's contribution to the gradients. Inputs may be strided except in K.
    A `direct` kernel supports GQA (h larger for q than for k), the mask `window` of `pairs.py` (window=n), and buffers
    for its results, strided or None: forward takes into=(out, lse) and backward into=(dq, dk, dv). dq may alias out.
    """

    name: str
    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]
    device: str = "cuda"
    dtypes: tuple[torch.dtype, ...] = DTYPES_16_BIT
    head_dims: tuple[int, int] = (256, 8)  # (maximum, required multiple)
    direct: bool = False
    capabilities: tuple[int, ...] = ()  # supported major versions; empty: all
    check_installed: Callable[[], str | None] = lambda: None  # returns the problem, if any
    varlen: Varlen | None = None
    has_softcap: bool = False  # forward and backward also take softcap=c: scores become c * tanh(scores / c)
    fallback: "Kernel | None" = None  # for pairs with fewer rows or keys than `min_tokens`
    min_tokens: int = 1

    def with_softcap(self, softcap: float) -> "Kernel":
        if not self.has_softcap:
            able = ", ".join(kernel.name for kernel in KERNELS.values() if kernel.has_softcap)
            raise ConfigError(f"attention.kernel={self.name} does not compute softcap={softcap}; use one of {able}")
        varlen = self.varlen
        if varlen is not None:
            varlen = Varlen(partial(varlen.forward, softcap=softcap), partial(varlen.backward, softcap=softcap))
        forward, backward = (partial(f, softcap=softcap) for f in (self.forward, self.backward))
        return replace(self, forward=forward, backward=backward, varlen=varlen)


def _cpu_forward(q, k, v, scale, causal):
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _cpu_backward(dout, q, k, v, out, lse, scale, causal):
    # The kernel indexes lse as if it were contiguous.
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse.contiguous(), 0.0, causal, scale=scale
    )


def _scores(q, k, scale, causal, softcap=None):
    """Return the scores in fp64. `causal` may also be a mask, True where a row attends to a key."""
    scores = q.double() @ k.double().mT * scale
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if causal is False:
        return scores
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril() if causal is True else causal
    return scores.masked_fill_(~visible, float("-inf"))


def _reference_forward(q, k, v, scale, causal, softcap=None):
    scores = _scores(q, k, scale, causal, softcap)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v.double()
    return out.to(q.dtype), lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def _reference_backward(dout, q, k, v, out, lse, scale, causal, softcap=None):
    scores = _scores(q, k, scale, causal, softcap)
    probs = (scores - lse.double()[..., None]).exp()
    dout64 = dout.double()
    dv = probs.mT @ dout64
    dprobs = dout64 @ v.double().mT
    dscores = probs * (dprobs - (dout64 * out.double()).sum(-1, keepdim=True)) * scale
    if softcap is not None:
        dscores *= 1 - scores.masked_fill(probs == 0, 0).div_(softcap).square_()  # -inf where a key is masked
    return (dscores @ k.double()).to(q.dtype), (dscores.mT @ q.double()).to(k.dtype), dv.to(v.dtype)


@cache
def _empty_rng_state(device: torch.device, dtype: torch.dtype) -> Tensor:
    """A placeholder for the RNG state, which kernels require even without dropout."""
    return torch.zeros(2, dtype=dtype, device=device)


def _flash_forward(q, k, v, scale, causal):
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _flash_backward(dout, q, k, v, out, lse, scale, causal):
    state = _empty_rng_state(q.device, torch.uint64)
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
    state, sizes = _empty_rng_state(q.device, torch.uint64), _window_sizes(window)
    return aten._flash_attention_backward(*inputs, *lengths, 0.0, causal, state, state, scale=scale, **sizes)


def _cudnn_forward(q, k, v, scale, causal):
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse.view(q.shape[:3])


def _cudnn_backward(dout, q, k, v, out, lse, scale, causal):
    seed = _empty_rng_state(q.device, torch.int64)[0]
    lse = lse.contiguous()[..., None]
    rows, keys = q.shape[2], k.shape[2]
    return aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, seed, seed, None, None, None, rows, keys, 0.0, causal, scale=scale
    )


# FlashAttention 4 uses the layout [B, q, h, K], and has no public function that takes lse or buffers.
FA4_VERSIONS = ("4.0.0b36",)


_import_fa4 = import_fa4
_COMPILE_LOCK = threading.Lock()  # concurrent compilation aborts the process


# The DSL of flash-attn-4 warns about the (empty) AuxData argument of each of its kernels.
_AUX_DATA = r"Argument aux_data \(.* cannot be converted to a JitArgument .*flash_attn\.cute\.utils\.AuxData\b"
_AUX_DATA_FROM = r"cutlass\."


def _ignore_aux_data() -> None:
    """Ignore that warning. Checked at every call, because leaving `warnings.catch_warnings` removes the filter."""
    wanted = ("ignore", re.compile(_AUX_DATA, re.IGNORECASE), UserWarning, re.compile(_AUX_DATA_FROM), 0)
    if wanted not in warnings.filters:
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
        return f"was tested with flash-attn-4 {FA4_VERSIONS[-1]}, not {installed}; pip install -e '.[gpu]'"
    return None


def _fa4_scores(scale, causal, window, softcap):
    options = {"softmax_scale": scale, "causal": causal, "window_size_left": None if window is None else window - 1}
    return options | ({} if softcap is None else {"softcap": softcap})


def _fa4_forward(q, k, v, scale, causal, window=None, into=(None, None), softcap=None):
    mask = _fa4_scores(scale, causal, window, softcap)
    q, k, v, out = (x if x is None else x.transpose(1, 2) for x in (q, k, v, into[0]))
    out, lse, *_ = _call_fa4("_flash_attn_fwd", q, k, v, **mask, return_lse=True, out=out, lse=into[1])
    return out.transpose(1, 2), lse


def _fa4_backward(dout, q, k, v, out, lse, scale, causal, window=None, into=(None, None, None), softcap=None):
    deterministic = torch.are_deterministic_algorithms_enabled()
    options = _fa4_scores(scale, causal, window, softcap) | {"deterministic": deterministic}
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    dq, dk, dv = (x if x is None else x.transpose(1, 2) for x in into)
    grads = _call_fa4("_flash_attn_bwd", q, k, v, out, dout, lse, **options, dq=dq, dk=dk, dv=dv)
    return tuple(grad.transpose(1, 2) for grad in grads)


def _fa4_documents(softcap, ends, longest, scale, causal, window):
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return _fa4_scores(scale, causal, window, softcap) | lengths


def _fa4_varlen_forward(q, k, v, *documents, into=(None, None), softcap=None):
    options = _fa4_documents(softcap, *documents)
    return _call_fa4("_flash_attn_fwd", q, k, v, **options, return_lse=True, out=into[0], lse=into[1])[:2]


def _fa4_varlen_backward(dout, q, k, v, out, lse, *documents, into=(None, None, None), softcap=None):
    options = _fa4_documents(softcap, *documents)
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv = into
    return _call_fa4("_flash_attn_bwd", q, k, v, out, dout, lse, **options, dq=dq, dk=dk, dv=dv)


def compile_ahead(gpu: str, head_dim: int, dtype: str, group: int) -> None:
    """Start compiling the kernels of a trial and of training with `group` query heads per kv head, in processes."""
    masks = [(causal, window, packed) for packed in (False, True) for causal, window in ((True, None), (True, 5))]
    kinds = [(2, *mask) for mask in (*masks, (False, None, False))]
    kinds += [(group, causal, None, packed) for causal, packed in ((True, False), (False, False), (True, True))]
    kernels = [(head_dim, dtype, *kind, backward) for kind in dict.fromkeys(kinds) for backward in (False, True)]
    start_helpers(gpu, "from ithaka.attention.kernels import compile_fa4; compile_fa4", kernels)


def compile_fa4(
    head_dim: int, dtype: str, group: int, causal: bool, window: int | None, packed: bool, backward: bool
) -> None:
    """Compile one kernel into the cache without running it. Tensors are fake: only a CUDA context needs GPU memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.device("cuda"):
        q_ThK, k_TmK = (torch.empty(8192, heads, head_dim, dtype=getattr(torch, dtype)) for heads in (2 * group, 2))
        lse_hT = torch.empty(2 * group, 8192)
        lengths: tuple[Any, ...] = ()
        if packed:
            lengths = (torch.empty(4, dtype=torch.int32), 4096)
        else:
            q_ThK, k_TmK = (x.transpose(0, 1).unsqueeze(0) for x in (q_ThK, k_TmK))
            lse_hT = lse_hT.unsqueeze(0)
        mask = (1.0, causal, window)
        run: Any = _FA4.varlen if packed else _FA4
        if backward:
            run.backward(q_ThK, q_ThK, k_TmK, k_TmK, q_ThK, lse_hT, *lengths, *mask)
        else:
            run.forward(q_ThK, k_TmK, k_TmK, *lengths, *mask, into=(torch.empty_like(q_ThK), lse_hT))


# --- registry ---------------------------------------------------------------------------------------------


_FA4_VARLEN = Varlen(_fa4_varlen_forward, _fa4_varlen_backward)
# On Hopper faster than cuDNN at every head dim, in both directions (LOG.md); on Blackwell by published figures.
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
# cuDNN rejects a single row and key, and has crashed on other tiny pairs.
_CUDNN = Kernel("cudnn", _cudnn_forward, _cudnn_backward, varlen=_FLASH_VARLEN, fallback=_FLASH, min_tokens=128)
_CPU = Kernel("cpu", _cpu_forward, _cpu_backward, device="cpu", dtypes=ALL_DTYPES, head_dims=(1 << 20, 1))
_REFERENCE = Kernel(
    "reference", _reference_forward, _reference_backward, "any", ALL_DTYPES, (1 << 20, 1), has_softcap=True
)
# In order of preference: `auto` takes the first that works.
KERNELS = {kernel.name: kernel for kernel in (_FA4, _CUDNN, _FLASH, _CPU, _REFERENCE)}


def try_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, str | None]:
    """Return why each kernel cannot be used on this machine, and a fix; None if it passes its trial."""
    return {name: _why_unusable(kernel, device, dtype, head_dim) for name, kernel in KERNELS.items()}


def available_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
    """Return the names of the kernels that pass their trial, in order of preference."""
    return [name for name, problem in try_kernels(device, dtype, head_dim).items() if problem is None]


def expected_kernel(name: str, runnable: Sequence[str]) -> str:
    """Predict the result of `resolve_kernel` without a GPU, from the installed packages. `runnable`: the kernels that
    support the GPU, fastest first."""
    if name != "auto":
        return name
    return next((each for each in runnable if KERNELS[each].check_installed() is None), name)


def resolve_kernel(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None = None
) -> Kernel:
    """Return the kernel called `name`; "auto" is the first of `available_kernels`. With `softcap`, it computes it.

    Raises ConfigError for a kernel that is unknown, does not support this device, dtype or head dim, or fails its
    trial. `auto` skips such kernels and warns once about each that failed its trial.
    """
    if softcap is not None:
        able = tuple(kernel for kernel in KERNELS.values() if kernel.has_softcap)
        chosen = _choose_kernel(able, device, dtype, head_dim) if name == "auto" else None
        return (chosen or resolve_kernel(name, device, dtype, head_dim)).with_softcap(softcap)
    if name == "auto":
        return _choose_kernel(tuple(KERNELS.values()), device, dtype, head_dim)
    if name not in KERNELS:
        raise ConfigError(f"attention.kernel={name} is not a kernel; use auto, {', '.join(KERNELS)}")
    problem = _why_unusable(KERNELS[name], device, dtype, head_dim)
    if problem is not None:
        raise ConfigError(f"attention.kernel={name} {problem}, or use auto")
    return KERNELS[name]


def agree_on_kernel(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None = None
) -> str:
    """Return the name of the kernel that all ranks use. If "auto" differs between ranks, it is the first kernel that
    passes its trial on all of them, and rank 0 warns. Collective: every rank calls it."""
    chosen = resolve_kernel(name, device, dtype, head_dim, softcap).name
    if name != "auto" or not dist.is_initialized() or dist.get_world_size() == 1:
        return chosen
    names, order = gather_objects(chosen), list(KERNELS)
    if len(set(names)) == 1:
        return chosen
    best, common = (pick(names, key=order.index) for pick in (min, max))
    problems = gather_objects((socket.gethostname(), _why_unusable(KERNELS[best], device, dtype, head_dim)))
    while any(gather_objects(_why_unusable(KERNELS[common], device, dtype, head_dim))):
        common = order[order.index(common) + 1]  # ends at the reference, which always runs
    if dist.get_rank() == 0:
        lacking = [(rank, host, why) for rank, (host, why) in enumerate(problems) if why is not None]
        (rank, host, why), *others = lacking
        where = f"rank {rank} on {host}{f' and {len(others)} more' if others else ''}"
        message = f"attention.kernel=auto is {common} on all ranks: {where} cannot use {best}, which {why}"
        warnings.warn(message, stacklevel=3)
    return common


@cache
def _choose_kernel(kernels: tuple[Kernel, ...], device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    for kernel in kernels:
        unsupported = _why_unsupported(kernel, device, dtype, head_dim)
        failure = unsupported or _run_trial(kernel, device, dtype, head_dim)
        if failure is None:
            return kernel
        if unsupported is None and is_local_rank_0():  # once per machine
            warnings.warn(f"attention.kernel=auto skips {kernel.name}, which {failure}", stacklevel=4)
    raise ConfigError(f"no attention kernel takes {dtype} with head dim {head_dim} on {device}; change model.dtype")


def _why_unusable(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why this kernel cannot be used on this machine, and a fix; None if it can."""
    return _why_unsupported(kernel, device, dtype, head_dim) or _run_trial(kernel, device, dtype, head_dim)


def _why_unsupported(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why the kernel does not support these inputs; None if it does. Needs no trial."""
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


# Largest allowed difference from the reference, relative to its largest value. Correct kernels stay below a third.
_TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-12}
_LSE_TOLERANCE = {**_TOLERANCE, torch.bfloat16: 1e-3, torch.float16: 1e-3}  # lse is always fp32 or wider
_Trial = tuple[str, tuple[Tensor, ...], tuple[Tensor, ...]]  # case, results of the kernel, results of the reference
_RESULT_NAMES = ("out", "lse", "dq", "dk", "dv")


@cache
def _run_trial(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Run the kernel on small random data; return what is wrong, or None.

    Only a trial shows what this build of PyTorch or cuDNN accepts and computes correctly.
    """
    if kernel.name == _REFERENCE.name:
        return None
    if problem := kernel.check_installed():
        return problem
    try:
        with torch.inference_mode(False), torch.no_grad():
            wrong = _compare_with_reference(kernel, device, dtype, head_dim)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # no error of a kernel may end the run
        reason = str(error).strip().partition("\n")[0][:160]
        wrong = f"does not run here ({type(error).__name__}: {reason})"
    if wrong is not None:
        return f"{wrong}; update PyTorch{', or install flash-attn-4 again' if kernel is _FA4 else ''}"
    if kernel.fallback is None:
        return None
    wrong = _why_unusable(kernel.fallback, device, dtype, head_dim)
    return wrong and f"needs {kernel.fallback.name} for small blocks, which {wrong}"


def _compare_with_reference(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return a description of the first result that differs from the fp64 reference by more than rounding, or None."""
    rows, scale = (256 if device.type == "cuda" else 32), head_dim**-0.5
    keys, random, heads = 2 * rows, torch.Generator().manual_seed(0), 4 if kernel.direct else 2
    sizes = ((rows, heads), (rows, heads), (keys, 2), (keys, 2))
    drawn = [torch.randn(*size, head_dim, generator=random, device="cpu") for size in sizes]
    dout, q, k, v = (x_SnK.to(device, dtype).transpose(0, 1) for x_SnK in drawn)
    tries = _pair_trials(kernel, scale, dout[None], q[None], k[None], v[None])
    if kernel.varlen is not None:
        tries = chain(tries, _document_trials(kernel, scale, dout, q, k[:, -rows:], v[:, -rows:]))
    for where, ours, exact in tries:
        for name, a, b in zip(_RESULT_NAMES, ours, exact, strict=True):
            allowed = (_LSE_TOLERANCE if name == "lse" else _TOLERANCE)[dtype]
            if a.shape != b.shape:
                return f"gives {name} of shape {tuple(a.shape)}, not {tuple(b.shape)}, in {where}"
            off = ((a.double() - b).abs().max() / b.abs().max()).item()
            if not off <= allowed:  # also if NaN
                return (
                    f"is wrong here: {name} is off by {off:.1e} of its largest value (rounding explains {allowed:.0e}) "
                    f"in {where}"
                )
    return None


def _pair_trials(kernel: Kernel, scale: float, dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Iterator[_Trial]:
    """Trials as in training: strided inputs, a full pair of earlier keys, a causal pair, a backward from the out and
    lse of both. A `direct` kernel is also tested with GQA, a window, and buffers."""
    rows, keys = q.shape[2], k.shape[2]
    pairs = [(k[:, :, :-rows], v[:, :, :-rows], False), (k[:, :, -rows:], v[:, :, -rows:], True)]
    out, lse = torch.zeros_like(q, dtype=torch.float64), torch.full_like(q[..., 0], float("-inf"), dtype=torch.float64)
    for pair_k, pair_v, causal in pairs:
        merge_softmax(out, lse, *_run_reference(dout, q, pair_k, pair_v, scale, causal)[:2])
    out_lse = (out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32)))
    for pair_k, pair_v, causal in pairs:
        exact = _run_reference(dout, q, pair_k, pair_v, scale, causal, out_lse)
        how = {"into": (None, None, None)} if kernel.direct else {}
        ours = kernel.forward(q, pair_k, pair_v, scale, causal)
        grads = kernel.backward(dout, q, pair_k, pair_v, *out_lse, scale, causal, **how)
        yield f"a {'causal' if causal else 'full'} block", (*ours, *grads), exact
    if kernel.direct:
        window = keys - rows + 1  # then the rows attend to all keys
        visible = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows).triu()
        ours = _run_into_buffers(kernel, dout, q, k, v, scale, True, window=window)
        yield "a block with a window", ours, _run_reference(dout, q, k, v, scale, visible)
        k, v, _ = pairs[-1]
        ours = _run_into_buffers(kernel, dout, q, k, v, scale, True)
        yield "a causal block written to buffers", ours, _run_reference(dout, q, k, v, scale, True)


def _document_trials(kernel: Kernel, scale: float, dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Iterator[_Trial]:
    """Trials of three packed documents, without and with a window. Inputs are [h, T, K]."""
    lengths, varlen = (3, 7, q.shape[1] - 10), kernel.varlen
    assert varlen is not None
    ends_d = torch.tensor((0, *accumulate(lengths)), dtype=torch.int32, device=q.device)
    visible_TT = torch.block_diag(*(torch.ones(n, n, device=q.device) for n in lengths)).bool().tril()
    dout_ThK, *inputs = (x.transpose(0, 1) for x in (dout, q, k, v))
    for window, where in ((None, "packed documents"), (5, "packed documents with a window")):
        how = (ends_d, max(lengths), scale, True, window)
        if kernel.direct:
            out, lse, *grads = _run_into_buffers(varlen, dout_ThK, *inputs, *how)
        else:
            out, lse = varlen.forward(*inputs, *how)
            grads = list(varlen.backward(dout_ThK, *inputs, out, lse, *how))
        ours = (out.transpose(0, 1), lse, *(grad.transpose(0, 1) for grad in grads))
        yield (
            where,
            ours,
            _run_reference(dout, q, k, v, scale, visible_TT if window is None else visible_TT.triu(1 - window)),
        )


def _run_into_buffers(kernel: Kernel | Varlen, dout, q, k, v, *how, **window) -> tuple[Tensor, ...]:
    """Return out, lse, dq, dk and dv, written by a direct kernel to buffers that held NaN; dq aliases out."""
    out, dk, dv = (torch.full_like(x, float("nan")) for x in (q, k, v))
    heads_first = q.shape[:-1] if q.ndim == 4 else q.shape[1::-1]
    lse = torch.full(heads_first, float("nan"), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    kernel.forward(q, k, v, *how, into=(out, lse), **window)
    dq = out.clone()
    kernel.backward(dout, q, k, v, dq, lse, *how, into=(dq, dk, dv), **window)
    return out, lse, dq, dk, dv


def _run_reference(dout, q, k, v, scale, causal, out_lse=None) -> tuple[Tensor, ...]:
    """Return the results of the reference in fp64. Its backward starts from `out_lse`, or else from its own."""
    dout, q, k, v = (x.double() for x in (dout, q, k, v))
    repeat = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(repeat, -3) for x in (k, v))
    results = _reference_forward(q, k, v, scale, causal)
    out, lse = out_lse or results
    dq, *dkv = _reference_backward(dout, q, k, v, out, lse, scale, causal)
    return *results, dq, *(x.unflatten(-3, (-1, repeat)).sum(-3) for x in dkv)
