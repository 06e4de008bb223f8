"""The calls of recurrences and short convolutions in a layer's own forward: capture their inputs,
or return their output.

transformers has no registry for them. A tap finds the module whose forward calls the recurrence,
and the short convolution before it, by their names, and runs it with our functions under them.

Shapes as in ops/scan.py; t tokens of a tile, with those before it that the convolution reads.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from ithaka.blocks.rope import with_globals
from ithaka.layer.inputs import LayerInputs
from ithaka.layer.mixer import EndPass
from ithaka.ops.scan import short_convolution

CONVOLUTION = "causal_conv1d_fn"
DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule")
SSD = "mamba2_chunk_scan"
FUSED_SSD = "mamba2_split_conv1d_scan_combined"


class ScanCall(NamedTuple):
    """One call: its inputs with and without tokens; `halo`: earlier tokens that it depends on."""

    inputs: tuple[Tensor, ...]
    options: dict[str, Any]
    halo: int
    others: tuple[Tensor, ...] = ()


class DeltaCall(ScanCall):
    pass


class SsdCall(ScanCall):
    pass


class ConvolutionCall(ScanCall):
    """Its input is the convolution's output, because the capture pass convolves."""


class ScanTap:
    """Runs the module that calls a recurrence with our convolution and recurrence."""

    functions: ClassVar[tuple[str, ...]]  # the names of the recurrence
    unused: ClassVar[tuple[str, ...]] = ()  # functions that return None in plain PyTorch
    _read: ClassVar[Any]  # its arguments -> the call that they make, and zeros for its output

    @classmethod
    def find(cls, layer: nn.Module) -> "ScanTap | None":
        return next((cls(module) for module in layer.modules() if cls.is_called_by(module)), None)

    @classmethod
    def is_called_by(cls, module: nn.Module) -> bool:
        forward = _own_forward(module)
        if not isinstance(forward, FunctionType):
            return False
        return not set(cls.functions).isdisjoint(forward.__code__.co_names)

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.call: ScanCall | None = None
        self.num_calls = 0
        self.halo = 0
        self.dtype = torch.float32
        self.traced = False
        self.ids_t: Tensor | None = None
        self.replayed_tHV: Tensor | None = None
        functions: dict[str, Any] = {CONVOLUTION: self._convolve}
        functions |= dict.fromkeys(self.unused, lambda *args, **kwargs: None)
        self._forward = self._with_functions(functions | dict.fromkeys(self.functions, self._run))

    @contextmanager
    def capture(
        self, inputs: LayerInputs, dtype: torch.dtype, traced: bool
    ) -> Iterator[LayerInputs]:
        self.dtype = dtype
        self.ids_t = inputs.ids_t
        self.traced = traced
        self.replayed_tHV = None
        self.halo = 0
        with self._replace_forward(self._forward):
            yield inputs

    @contextmanager
    def resume(self, inputs: LayerInputs, out_tHV: Tensor) -> Iterator[LayerInputs]:
        """The convolution before the recurrence returns zeros, which nothing reads."""
        self.replayed_tHV = out_tHV
        self.num_calls = 0
        with self._replace_forward(self._forward):
            yield inputs
        self.replayed_tHV = None

    @contextmanager
    def skip(self, inputs: LayerInputs) -> Iterator[LayerInputs]:
        with self._replace_forward(_return_zeros):
            yield inputs

    @contextmanager
    def run_plainly(self) -> Iterator[None]:
        """Run transformers' own functions in plain PyTorch, also where a package replaces them."""
        names = _own_forward(self.module).__globals__
        own = (CONVOLUTION, *self.functions, *self.unused)
        plain = {name: inspect.unwrap(names[name]) for name in own if name in names}
        with self._replace_forward(self._with_functions(plain)):
            yield

    def take_call(self) -> ScanCall | None:
        call = self.call
        self.call = None
        return call

    def _result(self, out_1tHV: Tensor) -> Tensor | tuple[Tensor, None]:
        return out_1tHV

    def _run(self, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, None]:
        if self.replayed_tHV is not None:
            # not in capture passes: a compiler would make a graph for each value
            self.num_calls += 1
            return self._result(self.replayed_tHV[None])
        self.call, zeros = self._read(*args, **kwargs)
        if not self.traced:
            raise EndPass
        return self._result(zeros)

    def _with_functions(self, functions: dict[str, Any]) -> Callable[..., Any]:
        return MethodType(with_globals(_own_forward(self.module), functions), self.module)

    @contextmanager
    def _replace_forward(self, forward: Callable[..., Any]) -> Iterator[None]:
        self.module.forward = forward
        try:
            yield
        finally:
            del self.module.forward

    def _convolve(
        self,
        x_1Mt: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **others: object,
    ) -> Tensor:
        if self.replayed_tHV is not None:
            return x_1Mt.new_zeros(()).expand(x_1Mt.shape)
        self.halo = max(self.halo, weight.shape[-1] - 1)
        y_tM = short_convolution(x_1Mt.squeeze(0).t(), weight, bias, self.ids_t)
        y_tM = y_tM if activation is None else ACT2FN[activation](y_tM)
        return y_tM.to(x_1Mt.dtype).t()[None]

    def _cast(self, *tensors: Tensor, wide: bool = False) -> tuple[Tensor, ...]:
        """Drop the batch dim; cast to the dtype of the pass, or to fp32 if that is narrower."""
        dtype = torch.promote_types(self.dtype, torch.float32) if wide else self.dtype
        return tuple(t.squeeze(0).to(dtype) for t in tensors)


class DeltaTap(ScanTap):
    functions = DELTA_RULES

    def _read(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: object
    ) -> tuple[ScanCall, Tensor]:
        inputs = *self._cast(q, k, v), *self._cast(g, beta, wide=True)
        return DeltaCall(inputs, options, self.halo), torch.zeros_like(v)

    def _result(self, out_1tHV: Tensor) -> tuple[Tensor, None]:
        return out_1tHV, None


class SsdTap(ScanTap):
    functions = (SSD,)
    unused = (FUSED_SSD,)

    def _read(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **options: object,
    ) -> tuple[ScanCall, Tensor]:
        dt, A = self._cast(dt, A, wide=True)
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
        inputs = *self._cast(C, B, x), dt * A, dt
        skip_H = torch.zeros_like(A) if D is None else D.to(dt.dtype)
        return SsdCall(inputs, options, self.halo, (skip_H,)), torch.zeros_like(x)


class ConvolutionTap(ScanTap):
    functions = (CONVOLUTION,)

    @classmethod
    def find(cls, layer: nn.Module) -> "ScanTap | None":
        """A layer with A_log has a recurrence after its convolution."""
        if any(hasattr(module, "A_log") for module in layer.modules()):
            return None
        return super().find(layer)

    def _read(
        self,
        x_1Mt: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **options: object,
    ) -> tuple[ScanCall, Tensor]:
        y_1Mt = self._convolve(x_1Mt, weight, bias, activation)
        (y_tM,) = self._cast(y_1Mt.transpose(1, 2))
        return ConvolutionCall((y_tM[:, None],), options, self.halo), torch.zeros_like(x_1Mt)

    def _result(self, out: Tensor) -> Tensor:
        """Its zeros are [1, M, t]."""
        return out.squeeze(2).transpose(1, 2) if self.replayed_tHV is not None else out


def _own_forward(module: nn.Module) -> FunctionType:
    return inspect.unwrap(type(module).forward)


def _return_zeros(*args: Tensor, **kwargs: Tensor) -> Tensor:
    x = args[0] if args else kwargs["hidden_states"]
    return x.new_zeros(()).expand(x.shape)
