"""The two passes of any decoder layer on a tile: its own forward, up to its mixer and from there.

The resume pass skips linear maps that only feed the mixer. A layer without a mixer has no capture
pass.

In 16 bits a tile computes like autocast: the residual, norms and rotations in fp32, matrix products
in 16 bits; the layer's output is rounded once. Modules for which there are blocks run those.

Shapes: t tokens of a tile, D hidden size, H query heads, K head dim, V that of the output.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ithaka.blocks.block import TileState
from ithaka.blocks.experts import LayerExperts
from ithaka.blocks.linear import as_linear, is_linear
from ithaka.blocks.replace import LayerBlocks
from ithaka.blocks.tiles import sum_dtype
from ithaka.foreign.torch_core import allow_compiled_variants, pytree
from ithaka.layer.inputs import LayerInputs
from ithaka.layer.mixer import CaptureGraph, EndPass, LayerSpec, MixerTap
from ithaka.ops.token_wise import sum_rounded


def run_layer(
    layer: nn.Module,
    x_tD: Tensor,
    args: tuple,
    kwargs: dict[str, Any],
    forward: Callable[..., Any] | None = None,
) -> Tensor:
    """Run the forward of the layer's class, without hooks."""
    y = (forward or type(layer).forward)(layer, x_tD[None], *args, **kwargs)
    return (y[0] if isinstance(y, tuple) else y).squeeze(0)


def _run_without_result(*inputs: Any) -> None:
    """Discard the output, so that the compiler drops all that follows the mixer's call."""
    run_layer(*inputs)


class ResumeGraph(NamedTuple):
    """The graph of a resume pass: its inputs as leaves, the edge and dtype of its output, and its
    router logits. Not the output: a layer may keep the graph, and the output holds its terms."""

    x_tD: Tensor
    outs_tHK: list[Tensor]
    inputs: LayerInputs
    edge: GradientEdge
    dtype: torch.dtype
    router_logits: list[Tensor]


class LayerPasses:
    """Runs a layer's forward on some tokens: up to its mixer, or from there to its end."""

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        spec: LayerSpec,
        compiles: bool = False,
        taps: Sequence[MixerTap | None] | None = None,
    ) -> None:
        """`taps`: by default, those of the spec's mixers."""
        self.name = name
        self.layer = layer
        self.spec = spec
        self.compiles = compiles
        taps = [mixer.find_tap(layer) for mixer in spec.mixers] if taps is None else taps
        self.taps = [tap for tap in taps if tap is not None]
        self._capture: Callable[..., None] = _run_without_result
        self._resume: Callable[..., Tensor] = run_layer
        if compiles:
            # Each kind of layer has two passes, with and without gradients. A second length of
            # tiles makes lengths dynamic, so further ones compile nothing.
            allow_compiled_variants(64)
            self._capture = torch.compile(self._capture)
            self._resume = torch.compile(self._resume)
        self.tile = TileState()
        self.blocks = LayerBlocks(layer, spec.blocks, self.tile)
        self.experts = LayerExperts(layer, self.blocks.by_path.values(), self.tile)
        for path in spec.qkv:
            self.blocks.by_path[path].is_projection = True
        self.has_blocks = any(block.reads_16_bits for block in spec.blocks)
        self.routers: list[nn.Module] = []
        self.router_index = 0  # where the logits are in a router's output
        self.router_logits: list[Tensor] = []
        self.skipped = [_SkippedModule(module) for module in self._skippable()]

    def _skippable(self) -> Iterator[nn.Module]:
        """The modules that only feed the mixer; with an adapter in the same block, that of both."""
        for path in self.spec.skippable:
            outer = path.removesuffix(".base_layer")
            yield self.layer.get_submodule(outer if outer in self.blocks.by_path else path)

    def find_call(self, x_tD: Tensor, inputs: LayerInputs, index: int = 0) -> object:
        """Run the capture pass of a tap; return its call, or None if the layer makes none."""
        with compute_like_autocast(x_tD), ExitStack() as stack:
            for i, tap in enumerate(self.taps):
                if i == index:
                    context = tap.capture(inputs, x_tD.dtype, self.compiles)
                else:
                    context = tap.skip(inputs)
                inputs = stack.enter_context(context)
            with suppress(EndPass):
                self._capture(self.layer, self._widen(x_tD), *inputs.unpack(), self.spec.forward)
        return self.taps[index].take_call()

    def capture(self, x_tD: Tensor, inputs: LayerInputs, index: int = 0) -> list[Tensor]:
        """Run the capture pass; return the inputs of a mixer. x may begin with earlier tokens."""
        call = self.find_call(x_tD, inputs, index)
        assert call is not None
        return self.spec.mixers[index].inputs_of(call, len(inputs))

    def capture_with_graph(
        self, x_tD: Tensor, inputs: LayerInputs, index: int
    ) -> tuple[list[Tensor], CaptureGraph]:
        with torch.enable_grad():
            x_tD = x_tD.detach().requires_grad_()
            inputs = inputs.detach()
            captured = self.capture(x_tD, inputs, index)
        edges = [get_gradient_edge(t) if t.requires_grad else None for t in captured]
        return captured, CaptureGraph(x_tD, inputs, edges)

    def resume(self, x_tD: Tensor, outs_tHK: Sequence[Tensor], inputs: LayerInputs) -> Tensor:
        """Run the resume pass: return the layer's output, given that of each mixer."""
        with ExitStack() as stack:
            stack.enter_context(compute_like_autocast(x_tD))
            for linear in self.skipped:
                stack.enter_context(linear)
            self.router_logits = []
            for router in self.routers:
                stack.enter_context(router.register_forward_hook(self._record_router))
            for tap, mixer, out_tHK in zip(self.taps, self.spec.mixers, outs_tHK, strict=True):
                out_tHV = out_tHK[..., : mixer.v_head_dim].contiguous()  # as in transformers
                inputs = stack.enter_context(tap.resume(inputs, out_tHV))
            if self.has_blocks and x_tD.dtype.itemsize == 2:
                stack.enter_context(ResidualSums(self.tile))
            return self._resume(self.layer, self._widen(x_tD), *inputs.unpack(), self.spec.forward)

    def resume_with_graph(
        self, x_tD: Tensor, outs_tHK: Sequence[Tensor], inputs: LayerInputs
    ) -> tuple[Tensor, ResumeGraph]:
        """Return the layer's output, and the graph."""
        with torch.enable_grad():
            x_tD = x_tD.detach().requires_grad_()
            inputs = inputs.detach()
            outs = [t.detach().requires_grad_(not self.spec.output) for t in outs_tHK]
            y_tD = self.resume(x_tD, outs, inputs)
        edge = get_gradient_edge(y_tD)
        logits = self.take_router_logits()
        return y_tD.detach(), ResumeGraph(x_tD, outs, inputs, edge, y_tD.dtype, logits)

    def _widen(self, x_tD: Tensor) -> Tensor:
        """Blocks read the residual stream in 16 bits; a layer without them gets it in fp32."""
        return x_tD if self.has_blocks else x_tD.to(sum_dtype(x_tD.dtype))

    def record_routers(self, recorder: Any) -> None:
        """Keep the router logits of each resume pass. `recorder`: transformers' OutputRecorder."""
        modules = self.layer.modules()
        self.routers = [module for module in modules if isinstance(module, recorder.target_class)]
        self.router_index = recorder.index

    def restore(self) -> None:
        """Give the layer's modules their own forwards again."""
        self.blocks.restore()

    def take_router_logits(self) -> list[Tensor]:
        """Return the router logits of the last resume pass, and drop them."""
        logits = self.router_logits
        self.router_logits = []
        return logits

    def _record_router(
        self, router: nn.Module, args: tuple, output: Tensor | tuple[Tensor, ...]
    ) -> None:
        logits = output[self.router_index] if isinstance(output, tuple) else output
        self.router_logits.append(logits)


@contextmanager
def compute_like_autocast(x: Tensor) -> Iterator[None]:
    """Autocast to the dtype of x if it has 16 bits; otherwise, no autocast."""
    is_16_bit = x.dtype.itemsize == 2
    device = x.device.type
    dtype = x.dtype if is_16_bit else torch.bfloat16
    autocast = torch.autocast(device, dtype, is_16_bit, cache_enabled=False)
    with autocast, _WideLayerNorm() if is_16_bit and device == "cpu" else nullcontext():
        yield


class _WideLayerNorm(TorchFunctionMode):
    """Casts LayerNorm's weights to the dtype of its input, which autocast does on GPUs only."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (F.layer_norm, torch.layer_norm):
            dtype = args[0].dtype
            cast = partial(pytree.tree_map_only, Tensor, lambda t: t.to(dtype))
            args = cast(args)
            kwargs = cast(kwargs)
        return function(*args, **kwargs)


class ResidualSums(TorchFunctionMode):
    """Rounds sums of 16-bit tensors once: x + attention + mlp, instead of (x + attention) + mlp.

    The result of an addition remembers its terms, which a further addition to it, or a norm of it,
    sums again."""

    def __init__(self, tile: TileState) -> None:
        super().__init__()
        self.tile = tile

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in ADDITIONS and len(args) == 2 and not kwargs:
            a, b = args
            are_tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
            if are_tensors and a.shape == b.shape and a.dtype in HALF_DTYPES:
                terms = [*getattr(a, "summed_terms", (a,)), *getattr(b, "summed_terms", (b,))]
                is_skipped = self.tile.skips_mlp and not any(b.stride())
                result = _AddOnce.apply(a, b, [term.detach() for term in terms], is_skipped)
                if len(terms) <= MAX_TERMS:  # otherwise it is a term, and must not hold itself
                    result.summed_terms = terms
                return result
        return function(*args, **(kwargs or {}))


ADDITIONS = (torch.add, Tensor.add, Tensor.__add__)
HALF_DTYPES = (torch.bfloat16, torch.float16)
MAX_TERMS = 3


class _AddOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, terms: list[Tensor], is_skipped: bool) -> Tensor:
        ctx.dtypes = a.dtype, b.dtype
        return a.new_zeros(()).expand(a.shape) if is_skipped else sum_rounded(terms)

    @staticmethod
    def backward(ctx, *dy: Tensor) -> tuple[Tensor | None, ...]:
        return *(dy[0].to(dtype) for dtype in ctx.dtypes), None, None


class _SkippedModule:
    """A context in which a linear map or norm returns zeros without storage: nothing reads them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.num_outputs = len(as_linear(module).weight_MD) if is_linear(module) else None
        self.forward = vars(module).get("forward")  # a block, if it has one

    def __enter__(self) -> None:
        self.module.forward = lambda x: x.new_zeros(()).expand(
            *x.shape[:-1], self.num_outputs or x.shape[-1]
        )

    def __exit__(self, *error: object) -> None:
        if self.forward is None:
            del self.module.forward
        else:
            self.module.forward = self.forward
