"""Choose an attention kernel: the first one that supports the inputs and passes a test on this machine.

Shapes: h = heads, T = tokens of packed documents, K = head dim.
"""

import socket
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from torch import Tensor

from ithaka.attention.fused import merge_softmax
from ithaka.attention.kernels import KERNELS, Kernel, Varlen
from ithaka.config import ConfigError
from ithaka.dist.agree import gather_objects, raise_on_all_ranks
from ithaka.dist.rank import is_local_rank_0


def try_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, str | None]:
    """Return why each kernel cannot be used on this machine, and a fix; None if it passes its test."""
    return {name: _why_unusable(kernel, device, dtype, head_dim) for name, kernel in KERNELS.items()}


def available_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
    """Return the names of the kernels that pass their test, in order of preference."""
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
    """Return the kernel called `name`; "auto" is the first of `available_kernels`. `softcap` is bound to the kernel.

    Raises ConfigError for a kernel that is unknown, does not support this device, dtype or head dim, or fails its
    test. `auto` skips such kernels and warns once about each that failed its test.
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
    passes its test on all of them, and rank 0 warns. Collective."""
    chosen = raise_on_all_ranks(resolve_kernel, name, device, dtype, head_dim, softcap).name
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
        failure = unsupported or _test_kernel(kernel, device, dtype, head_dim)
        if failure is None:
            return kernel
        if unsupported is None and is_local_rank_0():  # once per machine
            warnings.warn(f"attention.kernel=auto skips {kernel.name}, which {failure}", stacklevel=4)
    raise ConfigError(f"no attention kernel takes {dtype} with head dim {head_dim} on {device}; change model.dtype")


def _why_unusable(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why this kernel cannot be used on this machine, and a fix; None if it can."""
    return _why_unsupported(kernel, device, dtype, head_dim) or _test_kernel(kernel, device, dtype, head_dim)


def _why_unsupported(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why the kernel does not support these inputs; None if it does. Does not run it."""
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


# ---- the test


# Largest allowed difference from the reference, relative to its largest value. Correct kernels stay below a third.
_TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-12}
_LSE_TOLERANCE = {**_TOLERANCE, torch.bfloat16: 1e-3, torch.float16: 1e-3}  # lse is always fp32 or wider
_Case = tuple[str, tuple[Tensor, ...], tuple[Tensor, ...]]  # case, results of the kernel, results of the reference
_RESULT_NAMES = ("out", "lse", "dq", "dk", "dv")


@cache
def _test_kernel(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Run the kernel on small random data; return what is wrong, or None.

    Only a test shows what this build of PyTorch or cuDNN accepts and computes correctly.
    """
    if kernel.name == "reference":
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
        return f"{wrong}; update PyTorch{', or install flash-attn-4 again' if kernel.name == 'fa4' else ''}"
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
    cases = _block_cases(kernel, scale, dout[None], q[None], k[None], v[None])
    if kernel.varlen is not None:
        cases = chain(cases, _document_cases(kernel, scale, dout, q, k[:, -rows:], v[:, -rows:]))
    for where, ours, exact in cases:
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


def _block_cases(kernel: Kernel, scale: float, dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Iterator[_Case]:
    """Yield cases as in training: strided inputs, a full block of earlier keys, a causal block, a backward from the out
    and lse of both. A `direct` kernel is also tested with GQA, a window, and buffers."""
    rows, keys = q.shape[2], k.shape[2]
    blocks = [(k[:, :, :-rows], v[:, :, :-rows], False), (k[:, :, -rows:], v[:, :, -rows:], True)]
    out, lse = torch.zeros_like(q, dtype=torch.float64), torch.full_like(q[..., 0], float("-inf"), dtype=torch.float64)
    for block_k, block_v, causal in blocks:
        merge_softmax(out, lse, *_run_reference(dout, q, block_k, block_v, scale, causal)[:2])
    out_lse = (out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32)))
    for block_k, block_v, causal in blocks:
        exact = _run_reference(dout, q, block_k, block_v, scale, causal, out_lse)
        how = {"into": (None, None, None)} if kernel.direct else {}
        ours = kernel.forward(q, block_k, block_v, scale, causal)
        grads = kernel.backward(dout, q, block_k, block_v, *out_lse, scale, causal, **how)
        yield f"a {'causal' if causal else 'full'} block", (*ours, *grads), exact
    if kernel.direct:
        window = keys - rows + 1  # then the rows attend to all keys
        visible = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows).triu()
        ours = _run_into_buffers(kernel, dout, q, k, v, scale, True, window=window)
        yield "a block with a window", ours, _run_reference(dout, q, k, v, scale, visible)
        k, v, _ = blocks[-1]
        ours = _run_into_buffers(kernel, dout, q, k, v, scale, True)
        yield "a causal block written to buffers", ours, _run_reference(dout, q, k, v, scale, True)


def _document_cases(kernel: Kernel, scale: float, dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Iterator[_Case]:
    """Yield cases of three packed documents, without and with a window. Inputs are [h, T, K]."""
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
    reference = KERNELS["reference"]
    dout, q, k, v = (x.double() for x in (dout, q, k, v))
    repeat = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(repeat, -3) for x in (k, v))
    results = reference.forward(q, k, v, scale, causal)
    out, lse = out_lse or results
    dq, *dkv = reference.backward(dout, q, k, v, out, lse, scale, causal)
    return *results, dq, *(x.unflatten(-3, (-1, repeat)).sum(-3) for x in dkv)
