"""One process as any rank of N, on the meta device: tensors have shapes, but no values.

FSDP2, autograd, the optimizer and the collectives of a loopback group run as on a GPU. What PyTorch
lacks for the meta device is here: streams, events and autocast.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from types import SimpleNamespace
from typing import TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ithaka.comm.loopback import start_loopback
from ithaka.foreign import torch_operators
from ithaka.foreign.torch_core import find_fused_devices, pytree
from ithaka.foreign.torch_fsdp import META_CHECK

T = TypeVar("T")

GHOST = torch.device("meta")
# A ghost rank's sequence may stand for one STRETCH times as long. Blocks and buffers are then those
# of the long sequence, divided by STRETCH, so that memory grows linearly between the two.
STRETCH: ContextVar[float] = ContextVar("STRETCH", default=1.0)

# What autocast does with functions on a GPU. Others are not in its lists.
_MATMULS = "linear|matmul|__r?matmul__|mm|bmm|mv|addmm|addmv|addbmm|baddbmm|einsum"
_IN_16_BITS = re.compile(f"{_MATMULS}|conv(_transpose)?[123]d|prelu|scaled_dot_product_attention")
_EXPONENTIALS = "exp|expm1|log|log10|log2|log1p|logsumexp|(log_)?softmax|softplus"
_POWERS = "reciprocal|rsqrt|pow|__r?pow__"
_SUMS = "sum|prod|cumsum|cumprod|(vector_)?norm|(layer|group)_norm|cosine_similarity"
_INVERSES = "erfinv|sinh|cosh|tan|acos|asin"
_IN_32_BITS = re.compile(f"{_EXPONENTIALS}|{_POWERS}|{_SUMS}|{_INVERSES}")
_IN_WIDEST = re.compile(
    "cat|stack|addcdiv|addcmul|atan2|bilinear|cross|dot|index_put|scatter_add|tensordot"
)


class GhostAutocast(TorchFunctionMode):
    """torch.autocast for meta tensors."""

    _open: "list[GhostAutocast]" = []  # noqa: RUF012 - the innermost decides

    def __init__(self, dtype: torch.dtype, enabled: bool) -> None:
        super().__init__()
        self.dtype = dtype
        self.enabled = enabled

    def __enter__(self) -> "GhostAutocast":
        self._open.append(self)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._open.remove(self)
        super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if self._open[-1] is self and self.enabled and "out" not in kwargs:
            dtype = self.dtype if _IN_16_BITS.fullmatch(name) else None
            if _IN_32_BITS.fullmatch(name):
                dtype = torch.float32
            elif _IN_WIDEST.fullmatch(name):
                leaves = [t.dtype for t in pytree.tree_leaves((args, kwargs)) if _can_cast(t)]
                dtype = torch.float32 if torch.float32 in leaves else None
            if dtype is not None:

                def cast(t):
                    return t.to(dtype) if _can_cast(t) else t

                args, kwargs = pytree.tree_map(cast, (args, kwargs))
        return function(*args, **kwargs)

    @classmethod
    def is_enabled(cls) -> bool:
        return bool(cls._open) and cls._open[-1].enabled


def _can_cast(t: object) -> bool:
    if not isinstance(t, Tensor) or not t.is_meta:
        return False
    return t.is_floating_point() and t.dtype != torch.float64


def _make_attention(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """PyTorch's attention, which would allocate the scores of meta tensors, in another kernel."""

    def attend(
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
    ):
        if not query.is_meta:
            options = {"scale": scale, "enable_gqa": enable_gqa}
            return original(query, key, value, attn_mask, dropout_p, is_causal, **options)
        q = query
        k = key
        v = value
        if GhostAutocast.is_enabled():
            q, k, v = (t.to(GhostAutocast._open[-1].dtype) for t in (q, k, v))
        if enable_gqa:
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        inputs = q, k, v, None, True, dropout_p, is_causal
        return torch_operators.efficient_attention(*inputs, scale=scale)[0]

    return attend


class _RmsNorm(torch.autograd.Function):
    """RMSNorm for meta tensors, in one operator as on a GPU."""

    @staticmethod
    def forward(ctx, x, weight, num_dims):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-num_dims], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy):
        x, weight, _ = ctx.saved_tensors
        dx = torch.empty_like(x)
        dweight = None if weight is None else torch.empty_like(weight)
        return dx, dweight, None


def _make_rms_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rms_norm(input, normalized_shape, weight=None, eps=None):
        if not input.is_meta:
            return original(input, normalized_shape, weight, eps)
        return _RmsNorm.apply(input, weight, len(normalized_shape))

    return rms_norm


class _Event:
    def __init__(self, *args: object, **options: object) -> None: ...

    def record(self, *args: object) -> "_Event":
        return self

    def wait(self, *args: object) -> None: ...

    synchronize = wait


class _Stream(_Event):
    stream_id = device_index = device_type = 0  # read by FSDP2 of torch 2.15
    wait_event = wait_stream = synchronize = _Event.wait

    def record_event(self, *args: object) -> _Event:
        return _Event()


_DEVICE_MODULE = SimpleNamespace(
    Event=_Event,
    Stream=_Stream,
    current_stream=lambda *args: _Stream(),
    stream=lambda stream: nullcontext(),
    current_device=lambda: 0,
    set_device=lambda device: None,
    device_count=lambda: 1,
    is_available=lambda: True,
    is_initialized=lambda: True,
)


def _make_autocast(
    original: Callable[..., AbstractContextManager],
) -> Callable[..., AbstractContextManager]:
    def autocast(device_type, dtype=None, enabled=True, cache_enabled=None):
        if device_type == GHOST.type:
            return GhostAutocast(dtype or torch.bfloat16, enabled)
        return original(device_type, dtype, enabled, cache_enabled)

    return autocast


def _for_ghost(value: Callable[[], T], original: Callable[..., T]) -> Callable[..., T]:
    return lambda *args: value() if args and args[0] == GHOST.type else original(*args)


@contextmanager
def ghost_rank(num_ranks: int, rank: int = 0, stretch: float = 1.0) -> Iterator[None]:
    """Run as one of `num_ranks` on the meta device. No process group may be open."""
    is_enabled = _for_ghost(GhostAutocast.is_enabled, torch.is_autocast_enabled)
    get_dtype = _for_ghost(lambda: torch.bfloat16, torch.get_autocast_dtype)
    with ExitStack() as stack:
        stack.callback(STRETCH.reset, STRETCH.set(stretch))
        for owner, name, value in (
            (torch, "autocast", _make_autocast(torch.autocast)),
            (torch, "is_autocast_enabled", is_enabled),
            (torch, "get_autocast_dtype", get_dtype),
            (F, "scaled_dot_product_attention", _make_attention(F.scaled_dot_product_attention)),
            (F, "rms_norm", _make_rms_norm(F.rms_norm)),
            (torch.accelerator, "current_stream", lambda *args: _Stream()),
            (*META_CHECK, lambda self: None),
            (*find_fused_devices(), lambda: ["cpu", "cuda", GHOST.type]),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(patch.object(torch, GHOST.type, _DEVICE_MODULE, create=True))
        start_loopback(num_ranks, rank)
        stack.callback(dist.destroy_process_group)
        yield
