"""Choose an attention kernel: the first that supports the inputs and passes a test on this machine.

Shapes: h = heads, S = tokens of packed documents, K = head dim.
"""

import socket
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from torch import Tensor

from ithaka.attention.kernels import KERNELS, Kernel, Varlen
from ithaka.comm.agree import gather_objects, raise_on_all_ranks
from ithaka.comm.rank import is_local_rank_0, is_rank_0
from ithaka.config import ConfigError
from ithaka.exits import is_out_of_memory
from ithaka.facts.attention import AttentionKind
from ithaka.ops.fused import merge_softmax

Kinds = tuple[AttentionKind, ...]
# need no package; for layers that the fast kernels do not compute
_SECOND_KERNELS = ("efficient", "eager")
DEFAULT_GROUP = 2  # query heads per kv head in tests for no model in particular


def try_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, str | None]:
    """Return why each kernel cannot be used here, and a fix; None if it passes its test."""
    kinds = (AttentionKind(head_dim, DEFAULT_GROUP),)

    def try_kernel(kernel: Kernel) -> str | None:
        try:
            return _why_unusable(kernel, device, dtype, kinds)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return f"was not tested, because {device} is out of memory; end other processes on it"

    return {name: try_kernel(kernel) for name, kernel in KERNELS.items()}


def available_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
    """Return the names of the kernels that pass their test, in order of preference."""
    problems = try_kernels(device, dtype, head_dim)
    return [name for name, problem in problems.items() if problem is None]


def expected_kernel(name: str, runnable: Sequence[str]) -> str:
    """Predict the result of `resolve_kernel` without a GPU, from the installed packages.
    `runnable`: the kernels that support the GPU, fastest first."""
    if name != "auto":
        return name
    return next((each for each in runnable if KERNELS[each].check_installed() is None), name)


def resolve_kernel(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    softcap: float | None = None,
    group: int = DEFAULT_GROUP,
) -> Kernel:
    """Return the kernel called `name`; "auto" is the first one that passes a test of such
    attention, with `group` query heads per kv head. `softcap` is bound to the kernel.

    Raises ConfigError for a kernel that is unknown, does not support this attention, or fails its
    test. `auto` skips such kernels and warns once about each that failed its test.
    """
    kinds = (AttentionKind(head_dim, group, softcap=softcap),)
    return _resolve(name, device, dtype, kinds).with_softcap(softcap)


def agree_on_kernel(
    name: str, device: torch.device, dtype: torch.dtype, kinds: Iterable[AttentionKind]
) -> str:
    """Return the name of the kernel that all ranks use for a model, which passes a test of every
    kind of attention that it supports. Other layers use another (`kernel_for`); rank 0 warns if
    that is the reference. If "auto" differs between ranks, it is the first kernel that passes on
    all, and rank 0 warns. Collective."""
    if device.type == "meta":
        return name
    kinds = tuple(sorted(set(kinds), key=repr))
    chosen = raise_on_all_ranks(_resolve, name, device, dtype, kinds).name
    is_parallel = dist.is_initialized() and dist.get_world_size() > 1
    if name == "auto" and is_parallel:
        chosen = _agree(chosen, device, dtype, kinds)
    for kind in kinds:
        while (other := kernel_for(chosen, kind)) not in (chosen, "reference"):
            problems = list(filter(None, _gather_problems(KERNELS[other], device, dtype, (kind,))))
            if not problems:
                break
            _unusable.add(other)
            if is_rank_0():
                layers = f"attention with head dim {kind.head_dim}"
                _warn_once(f"{layers} cannot use {other}, which {problems[0]}")
    if name != "reference" and is_rank_0():
        _warn_if_slow(chosen, device, dtype, kinds)
    return chosen


def _agree(chosen: str, device: torch.device, dtype: torch.dtype, kinds: Kinds) -> str:
    names = gather_objects(chosen)
    order = list(KERNELS)
    if len(set(names)) == 1:
        return chosen
    best = min(names, key=order.index)
    common = max(names, key=order.index)
    hosts = gather_objects(socket.gethostname())
    problems = _gather_problems(KERNELS[best], device, dtype, kinds)
    while any(_gather_problems(KERNELS[common], device, dtype, kinds)):
        common = order[order.index(common) + 1]  # ends at the reference, which always runs
    if dist.get_rank() == 0:
        rank, *others = [rank for rank, problem in enumerate(problems) if problem is not None]
        where = f"rank {rank} on {hosts[rank]}"
        if others:
            where += f" and {len(others)} more"
        warnings.warn(
            f"attention.kernel=auto is {common} on all ranks: {where} cannot use {best}, which "
            f"{problems[rank]}",
            stacklevel=4,
        )
    return common


def _gather_problems(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, kinds: Kinds
) -> list[str | None]:
    """Return `_why_unusable` of every rank. Collective; an error on one rank is raised on all."""
    return gather_objects(raise_on_all_ranks(_why_unusable, kernel, device, dtype, kinds))


_unusable: set[str] = set()  # kernels that failed a test on some rank as a model's second kernel


def kernel_for(name: str, kind: AttentionKind) -> str:
    """Return the kernel of a layer in a model with kernel `name`: this one or, if it does not
    compute the layer's attention, the next one on the same device that does, or the reference."""
    others = _SECOND_KERNELS if KERNELS[name].device == "cuda" else ()
    for each in (name, *(other for other in others if other not in _unusable)):
        if _why_not_computed(KERNELS[each], kind) is None:
            return each
    return "reference"


def _warn_if_slow(chosen: str, device: torch.device, dtype: torch.dtype, kinds: Kinds) -> None:
    """Warn if attention runs in the reference kernel unexpectedly."""
    slow = [kind for kind in kinds if kernel_for(chosen, kind) == "reference"]
    is_expected = chosen == "reference" and (device.type != "cuda" or dtype.itemsize > 2)
    if not slow or is_expected:
        return
    faster = next(kernel for kernel in KERNELS.values() if chosen in (kernel.name, "reference"))
    reasons = dict.fromkeys(_why_unsupported(faster, device, dtype, kind) for kind in slow)
    why = "; ".join(f"{faster.name} {reason.partition('; ')[0]}" for reason in reasons if reason)
    head_dims = ", ".join(map(str, sorted({kind.head_dim for kind in slow})))
    message = (
        f"attention with head dim {head_dims} runs in the reference kernel, in fp64 and tens of "
        "times slower"
    )
    _warn_once(f"{message}: {why}" if why else message)


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=5)


def _resolve(name: str, device: torch.device, dtype: torch.dtype, kinds: Kinds) -> Kernel:
    if name == "auto":
        return _choose_kernel(tuple(KERNELS.values()), device, dtype, kinds)
    if name not in KERNELS:
        raise ConfigError(
            f"attention.kernel={name} is not a kernel; use auto, {', '.join(KERNELS)}"
        )
    problem = _why_unusable(KERNELS[name], device, dtype, kinds)
    if problem is not None:
        raise ConfigError(f"attention.kernel={name} {problem}, or use auto")
    return KERNELS[name]


@cache
def _choose_kernel(
    kernels: tuple[Kernel, ...], device: torch.device, dtype: torch.dtype, kinds: Kinds
) -> Kernel:
    for kernel in kernels:
        failure = _why_unusable(kernel, device, dtype, kinds)
        if failure is None:
            return kernel
        is_supported = any(_why_unsupported(kernel, device, dtype, kind) is None for kind in kinds)
        if is_supported and is_local_rank_0():  # once per machine
            warnings.warn(
                f"attention.kernel=auto skips {kernel.name}, which {failure}", stacklevel=5
            )
    head_dims = ", ".join(str(kind.head_dim) for kind in kinds)
    raise ConfigError(
        f"no attention kernel takes {dtype} with head dim {head_dims} on {device}; change "
        "model.dtype"
    )


def _why_unusable(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, kinds: Kinds
) -> str | None:
    """Return why this kernel cannot be used on this machine, and a fix; None if it supports some of
    these kinds of attention and passes a test of each."""
    reasons = [_why_unsupported(kernel, device, dtype, kind) for kind in kinds]
    supported = [kind for kind, reason in zip(kinds, reasons, strict=True) if reason is None]
    if not supported:
        return reasons[0]
    for kind in supported:
        failure = _test_kernel(kernel, device, dtype, _trial_kind(kernel, kind))
        if failure is not None:
            return failure
    return None


def _why_unsupported(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, kind: AttentionKind
) -> str | None:
    """Return why the kernel does not support this attention; None if it does. Does not run it."""
    if kernel.device not in ("any", device.type):
        return f"runs on {kernel.device}, not on {device.type}; move the tensors"
    if dtype not in kernel.dtypes:
        return f"takes {', '.join(map(str, kernel.dtypes))}, not {dtype}; change model.dtype"
    if reason := _why_not_computed(kernel, kind):
        return reason
    if kernel.capabilities:
        major, minor = torch.cuda.get_device_capability(device)
        if major not in kernel.capabilities:
            supported = " or ".join(map(str, kernel.capabilities))
            return f"needs compute capability {supported}, not {major}.{minor}"
    return None


def _why_not_computed(kernel: Kernel, kind: AttentionKind) -> str | None:
    """Return why the kernel does not compute this attention on any device; None if it does."""
    largest, multiple = kernel.head_dims
    if kind.head_dim > largest or kind.head_dim % multiple:
        return (
            f"takes head dims up to {largest} in steps of {multiple}, not {kind.head_dim}; "
            "use eager"
        )
    if kind.softcap is not None and not kernel.has_softcap:
        able = ", ".join(kernel.name for kernel in KERNELS.values() if kernel.has_softcap)
        return f"does not compute softcap={kind.softcap}; use one of {able}"
    return None


# ---- the test


# Largest allowed difference from the reference, relative to its largest value. Correct kernels stay
# below a third. lse is always fp32 or wider.
_TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-12}
_LSE_TOLERANCE = {**_TOLERANCE, torch.bfloat16: 1e-3, torch.float16: 1e-3}
_RESULT_NAMES = ("out", "lse", "dq", "dk", "dv")
_Results = tuple[Tensor, ...]
_Case = tuple[str, _Results, _Results]  # what is tested, by the kernel, by the reference


def _trial_kind(kernel: Kernel, kind: AttentionKind) -> AttentionKind:
    """Leave out what the kernel does not compute: `blocks.py` runs GQA and windows with others head
    by head."""
    if not kernel.direct:
        kind = replace(kind, group=1)
    return kind if kernel.direct or kernel.varlen else replace(kind, window=None)


@cache
def _test_kernel(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, kind: AttentionKind
) -> str | None:
    """Run the kernel on small random data; return what is wrong, or None. Raises if the device is
    out of memory.

    Only a test shows what this build of PyTorch or cuDNN accepts and computes correctly.
    """
    if kernel.name == "reference":
        return None
    if problem := kernel.check_installed():
        return problem
    try:
        with torch.inference_mode(False), torch.no_grad():
            wrong = _compare_with_reference(kernel, device, dtype, kind)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # no error of a kernel may end the run
        if is_out_of_memory(error):  # it says nothing about the kernel
            raise
        reason = str(error).strip().partition("\n")[0][:160]
        wrong = f"does not run here ({type(error).__name__}: {reason})"
    if wrong is not None:
        again = ", or install flash-attn-4 again" if kernel.name == "fa4" else ""
        return f"{wrong}; update PyTorch{again}"
    if kernel.fallback is None:
        return None
    wrong = _why_unusable(kernel.fallback, device, dtype, (kind,))
    return wrong and f"needs {kernel.fallback.name} for small blocks, which {wrong}"


def _compare_with_reference(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, kind: AttentionKind
) -> str | None:
    """Return a description of the first result that differs from the fp64 reference by more than
    rounding, or None."""
    rows = 256 if device.type == "cuda" else 32
    head_dim = kind.head_dim
    scale = head_dim**-0.5 * max(1.0, (kind.softcap or 0.0) / 8)  # scores that the softcap changes
    keys = 2 * rows
    random = torch.Generator().manual_seed(0)
    sizes = ((rows, 2 * kind.group), (rows, 2 * kind.group), (keys, 2), (keys, 2))
    drawn = [torch.randn(*size, head_dim, generator=random, device="cpu") for size in sizes]
    dout, q, k, v = (x_SnK.to(device, dtype).transpose(0, 1) for x_SnK in drawn)
    run_exactly = partial(_run_reference, softcap=kind.softcap)
    kernel = kernel.with_softcap(kind.softcap)
    cases = _block_cases(kernel, run_exactly, scale, dout[None], q[None], k[None], v[None])
    if kernel.varlen is not None:
        window = kind.window if kind.window and kind.window < rows // 2 else 5
        inputs = (dout, q, k[:, -rows:], v[:, -rows:])
        cases = chain(cases, _document_cases(kernel, run_exactly, window, scale, *inputs))
    for where, ours, exact in cases:
        for name, a, b in zip(_RESULT_NAMES, ours, exact, strict=True):
            allowed = (_LSE_TOLERANCE if name == "lse" else _TOLERANCE)[dtype]
            if a.shape != b.shape:
                return f"gives {name} of shape {tuple(a.shape)}, not {tuple(b.shape)}, in {where}"
            off = ((a.double() - b).abs().max() / b.abs().max()).item()
            if not off <= allowed:  # also if NaN
                return (
                    f"is wrong here: {name} is off by {off:.1e} of its largest value (rounding "
                    f"explains {allowed:.0e}) in {where}"
                )
    return None


def _block_cases(
    kernel: Kernel,
    run_exactly: Callable,
    scale: float,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Iterator[_Case]:
    """Yield cases as in training: strided inputs, a full block of earlier keys, a causal block, a
    backward from the out and lse of both; of a `direct` kernel also GQA, a window and buffers."""
    rows = q.shape[2]
    keys = k.shape[2]
    blocks = [(k[:, :, :-rows], v[:, :, :-rows], False), (k[:, :, -rows:], v[:, :, -rows:], True)]
    out = torch.zeros_like(q, dtype=torch.float64)
    lse = torch.full_like(q[..., 0], float("-inf"), dtype=torch.float64)
    for block_k, block_v, causal in blocks:
        merge_softmax(out, lse, *run_exactly(dout, q, block_k, block_v, scale, causal)[:2])
    out_lse = (out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32)))
    for block_k, block_v, causal in blocks:
        exact = run_exactly(dout, q, block_k, block_v, scale, causal, out_lse)
        how = {"into": (None, None, None)} if kernel.direct else {}
        ours = kernel.forward(q, block_k, block_v, scale, causal)
        grads = kernel.backward(dout, q, block_k, block_v, *out_lse, scale, causal, **how)
        yield f"a {'causal' if causal else 'full'} block", (*ours, *grads), exact
    if kernel.direct:
        window = keys - rows + 1  # then the rows attend to all keys
        visible = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows).triu()
        ours = _run_into_buffers(kernel, dout, q, k, v, scale, True, window=window)
        yield "a block with a window", ours, run_exactly(dout, q, k, v, scale, visible)
        k, v, _ = blocks[-1]
        ours = _run_into_buffers(kernel, dout, q, k, v, scale, True)
        yield "a causal block written to buffers", ours, run_exactly(dout, q, k, v, scale, True)


def _document_cases(
    kernel: Kernel,
    run_exactly: Callable,
    size: int,
    scale: float,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Iterator[_Case]:
    """Yield cases of three packed documents, without and with a window. Inputs are [h, S, K]."""
    lengths = (3, 7, q.shape[1] - 10)
    varlen = kernel.varlen
    assert varlen is not None
    ends_d = torch.tensor((0, *accumulate(lengths)), dtype=torch.int32, device=q.device)
    squares = (torch.ones(n, n, device=q.device) for n in lengths)
    visible_SS = torch.block_diag(*squares).bool().tril()
    dout_ShK, *inputs = (x.transpose(0, 1) for x in (dout, q, k, v))
    for window, where in ((None, "packed documents"), (size, "packed documents with a window")):
        how = (ends_d, max(lengths), scale, True, window)
        if kernel.direct:
            out, lse, *grads = _run_into_buffers(varlen, dout_ShK, *inputs, *how)
        else:
            out, lse = varlen.forward(*inputs, *how)
            grads = list(varlen.backward(dout_ShK, *inputs, out, lse, *how))
        ours = (out.transpose(0, 1), lse, *(grad.transpose(0, 1) for grad in grads))
        seen_SS = visible_SS if window is None else visible_SS.triu(1 - window)
        yield where, ours, run_exactly(dout, q, k, v, scale, seen_SS)


def _run_into_buffers(kernel: Kernel | Varlen, dout, q, k, v, *how, **window) -> _Results:
    """Return out, lse, dq, dk and dv, written by a direct kernel to buffers that held NaN; dq
    aliases out."""
    out, dk, dv = (torch.full_like(x, float("nan")) for x in (q, k, v))
    heads_first = q.shape[:-1] if q.ndim == 4 else q.shape[1::-1]
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.full(heads_first, float("nan"), dtype=wide, device=q.device)
    kernel.forward(q, k, v, *how, into=(out, lse), **window)
    dq = out.clone()
    kernel.backward(dout, q, k, v, dq, lse, *how, into=(dq, dk, dv), **window)
    results = (out, lse, dq, dk, dv)
    return results


def _run_reference(dout, q, k, v, scale, causal, out_lse=None, softcap=None) -> _Results:
    """Return the results of the reference in fp64. Its backward starts from `out_lse`, or else from
    its own."""
    reference = KERNELS["reference"].with_softcap(softcap)
    dout, q, k, v = (x.double() for x in (dout, q, k, v))
    repeat = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(repeat, -3) for x in (k, v))
    results = reference.forward(q, k, v, scale, causal)
    out, lse = out_lse or results
    dq, *dkv = reference.backward(dout, q, k, v, out, lse, scale, causal)
    return *results, dq, *(x.unflatten(-3, (-1, repeat)).sum(-3) for x in dkv)
