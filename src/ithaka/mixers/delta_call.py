"""The call of the gated delta rule in a layer's own forward: capture its inputs, or return its output.

transformers has no registry for the rule, as it has for attention. The tap therefore finds the module whose forward
calls the rule and the short convolution before it by their names; it runs with our functions under these names.

Shapes as in ops/delta_rule.py; t tokens of a tile, with those before it that the convolution reads.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ithaka.layer.inputs import LayerInputs
from ithaka.layer.mixer import EndPass
from ithaka.ops.delta_rule import DeltaInputs, short_convolution

RULES = ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule")
CONVOLUTION = "causal_conv1d_fn"


class DeltaCall(NamedTuple):
    """One call of the rule, and the earlier tokens that the convolutions before it read."""

    inputs: DeltaInputs
    options: dict[str, Any]
    halo: int


class DeltaTap:
    """The tap of the gated delta rule: it runs the module that calls the rule with our convolution and rule."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.call: DeltaCall | None = None
        self.num_calls = self.halo = 0
        self.dtype: torch.dtype | None = None
        self.traced = False
        self.ids_t: Tensor | None = None
        self.replayed_tHV: Tensor | None = None
        functions = {CONVOLUTION: self._convolve} | dict.fromkeys(RULES, self._apply_rule)
        self._forward = self._with_functions(functions)

    @contextmanager
    def capture(self, inputs: LayerInputs, dtype: torch.dtype, traced: bool) -> Iterator[LayerInputs]:
        self.dtype, self.ids_t, self.traced, self.replayed_tHV, self.halo = dtype, inputs.ids_t, traced, None, 0
        with self._replace_forward(self._forward):
            yield inputs

    @contextmanager
    def resume(self, inputs: LayerInputs, out_tHV: Tensor) -> Iterator[LayerInputs]:
        """The convolution returns zeros, which nothing reads."""
        self.replayed_tHV, self.num_calls = out_tHV, 0
        with self._replace_forward(self._forward):
            yield inputs
        self.replayed_tHV = None

    @contextmanager
    def run_plainly(self) -> Iterator[None]:
        """Run transformers' own functions in plain PyTorch, also where a package replaces them."""
        names = inspect.unwrap(type(self.module).forward).__globals__
        with self._replace_forward(
            self._with_functions({name: inspect.unwrap(names[name]) for name in (CONVOLUTION, *RULES) if name in names})
        ):
            yield

    def _with_functions(self, functions: dict[str, Any]) -> Callable[..., Any]:
        own: Any = inspect.unwrap(type(self.module).forward)
        names = own.__globals__ | functions
        del names["__name__"]  # so that a compiler does not look them up in the module
        forward = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
        forward.__kwdefaults__ = own.__kwdefaults__
        return MethodType(forward, self.module)

    @contextmanager
    def _replace_forward(self, forward: Callable[..., Any]) -> Iterator[None]:
        self.module.forward = forward
        try:
            yield
        finally:
            del self.module.forward

    def _convolve(
        self, x_1Nt: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
    ) -> Tensor:
        if self.replayed_tHV is not None:
            return x_1Nt.new_zeros(()).expand(x_1Nt.shape)
        self.halo = max(self.halo, weight.shape[-1] - 1)
        y_tN = short_convolution(x_1Nt.squeeze(0).t(), weight, bias, self.ids_t)
        y_tN = y_tN if activation is None else ACT2FN[activation](y_tN)
        return y_tN.to(x_1Nt.dtype).t()[None]

    def _apply_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        self.num_calls += 1
        if self.replayed_tHV is not None:
            return self.replayed_tHV[None], None
        assert self.dtype is not None
        wide = torch.promote_types(self.dtype, torch.float32)
        q, k, v, g, beta = (t.squeeze(0) for t in (q, k, v, g, beta))
        inputs = DeltaInputs(*(t.to(self.dtype) for t in (q, k, v)), *(t.to(wide) for t in (g, beta)))
        self.call = DeltaCall(inputs, options, self.halo)
        if not self.traced:
            raise EndPass
        return torch.zeros_like(v)[None], None

    def take_call(self) -> DeltaCall | None:
        call, self.call = self.call, None
        return call


def calls_rule(module: nn.Module) -> bool:
    forward: Any = inspect.unwrap(type(module).forward)
    return isinstance(forward, FunctionType) and any(name in forward.__code__.co_names for name in RULES)
