"""The decoder layer as an explicit schedule: forward and backward are loops over tiles, around a mixer.

`LayerSchedule` has the order of computations and the saved activations. layer/general.py adds the token-wise
computations; mixers/ has what mixes tokens, with its exchanges between ranks.

Shapes: s tokens on this rank, S on this ring member (in the sequence, without a ring), t in a tile, D hidden size, c
Ulysses ranks, n head slots per rank and stage, K head dim, N the width of several heads. Token-sharded tensors are
[c, s, n, K] ("exchange layout"), head-sharded tensors are [S, n, K], as in comm/exchange.py.

Saved for backward: the layer's input, and more according to the `ActivationPolicy`. The rest is recomputed.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ithaka.blocks.dropout import DropoutState
from ithaka.blocks.tiles import (
    BACKWARD_RAN_TWICE,
    PARAMETERS_CHANGED,
    GradSum,
    tile_slices,
)
from ithaka.layer.inputs import CallState, LayerInputs
from ithaka.layer.mixer import LayerSpec, SideBySide, StageOutput
from ithaka.layer.store import Store, TensorHandle
from ithaka.layout import ActivationPolicy, Layout
from ithaka.ops.fourbit import packed_weights, unpacked
from ithaka.phases import MemoryCategory, phase, set_category


@dataclass
class SavedActivations:
    """The activations that one forward saves for its backward."""

    inputs: LayerInputs
    call: CallState
    x: TensorHandle
    policy: ActivationPolicy = ActivationPolicy()
    outputs: list[StageOutput] = field(default_factory=list)  # per stage
    mixing: Any = None  # the mixer's state of this call
    mixer: int = 0  # the index of the mixer that this belongs to, if there are several
    mixer_inputs: deque[list[TensorHandle]] = field(default_factory=deque)  # per stage: q, and k and v if they are new
    chosen: deque[Tensor] = field(default_factory=deque)  # per tile of an MoE layer: the experts of its tokens
    below: Callable[[], "SavedActivations | None"] = lambda: None  # the layer below, whose backward runs next

    def release_sources(self) -> None:
        """Release the source tensors of everything in the store."""
        for handle in self._handles():
            handle.release_source()

    def read_ahead(self) -> None:
        """Start reading this layer's activations from disk and then, if there is room, those of the layer below."""
        for handle in self._handles():
            handle.read_ahead(wait=True)
        below = self.below()
        for handle in below._handles() if below is not None else ():
            handle.read_ahead()

    def _handles(self) -> list[TensorHandle]:
        return [self.x, *(handle for output in self.outputs for handle in output)]


@dataclass(eq=False, repr=False)
class LayerSchedule:
    """Replaces a decoder layer's forward: (x_sD, inputs, call) -> y_sD."""

    name: str
    layer: nn.Module
    spec: LayerSpec
    group: dist.ProcessGroup  # the Ulysses group, which exchanges tokens for heads
    ring: dist.ProcessGroup  # the ranks with the same heads of other tokens
    store: Store
    layout: Layout
    policy: ActivationPolicy
    num_changes: Callable[[], int] = int  # in-place changes of its parameters; int: always 0
    index: int = field(default=0, kw_only=True)  # in the model
    dropout: DropoutState | None = field(default=None, kw_only=True)  # if adapters have dropout

    saved_type: ClassVar[type[SavedActivations]] = SavedActivations
    batch_dims: ClassVar[tuple[int, ...]] = ()  # leading dims of the output

    def __post_init__(self) -> None:
        self.packed = list(packed_weights(self.layer).values())
        mixers = [mixer.make(self) for mixer in self.spec.mixers]
        self.mixer: Any = SideBySide(mixers) if len(mixers) > 1 else next(iter(mixers), None)

    def __call__(self, x: Tensor, inputs: LayerInputs, call: CallState) -> Tensor:
        """x: [s, D], or with leading dims of size 1, as `batch_dims` of the output."""
        dtype = next(param.dtype for param in self.layer.parameters() if param.is_floating_point())
        x = x.to(dtype).contiguous()  # a user's hook may have replaced it
        tensors = (*(leaf for _, leaf in inputs.trained), *self.layer.parameters())
        # Layers before the first trained parameter need no backward.
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *tensors)):
            return _LayerFunction.apply(x, self, inputs, call, *tensors)
        x_sD = x.view(x.shape[-2:])
        with phase(self.name), phase("forward"), self.running():
            return self.forward(x_sD, self.saved_type(inputs, call, TensorHandle(x_sD)))

    # ---- what a subclass computes

    def _finish(self, saved: SavedActivations, outputs: Sequence[StageOutput], y_sD: Tensor) -> None:
        """Write the layer's output, given the outputs of the mixer."""
        raise NotImplementedError

    def _mlp_backward(
        self, saved: SavedActivations, outputs: Sequence[StageOutput], dy_sD: Tensor, grads: GradSum
    ) -> None:
        """Backward of `_finish`: turn dy into the gradient at x, except through the mixer."""
        raise NotImplementedError

    # ---- forward and backward

    def forward(self, x_sD: Tensor, saved: SavedActivations) -> Tensor:
        policy = saved.policy
        saved.mixing = self.mixer.start(x_sD, saved) if self.mixer else None
        outputs = self._mix(saved, policy.attention)
        if policy.attention is not None:
            saved.outputs = outputs
        with phase("mlp"):
            y = set_category(x_sD.new_empty(*self.batch_dims, *x_sD.shape), MemoryCategory.RESIDUAL)
            self._finish(saved, outputs, y.view(x_sD.shape))
        saved.release_sources()
        return y  # not a view, about which FSDP2 warns

    def _mix(self, saved: SavedActivations, tier: str | None) -> list[StageOutput]:
        keep, dtype = self.store.keep, self.layout.stored_dtype
        stages = self.mixer.mix(saved) if self.mixer else ()
        return [StageOutput(keep(out, tier, dtype), keep(state, tier)) for out, state in stages]

    def backward(self, saved: SavedActivations, dy_sD: Tensor, grads: GradSum) -> None:
        """Write dx over dy; add weight gradients to `grads`."""
        kept, saved.outputs = saved.outputs, []
        outputs = deque(kept or self._mix(saved, "device"))
        del kept
        with phase("mlp"):
            self._mlp_backward(saved, outputs, dy_sD, grads)
        if self.mixer:
            self.mixer.mix_backward(saved, outputs, dy_sD, grads)

    # ---- shared

    def _tiles_with_outputs(
        self, saved: SavedActivations, outputs: Sequence[StageOutput]
    ) -> Iterator[tuple[slice, Tensor, tuple[Tensor, ...]]]:
        """Yield the rows, x and the mixer's output of every stage for each tile."""
        slices = tile_slices(len(saved.inputs), self.layout.tile_tokens)
        outs = [output.out.tiles(slices, dim=1) for output in outputs]
        for (rows, x_tD), *outs_ctnK in zip(self.input_tiles(saved), *outs, strict=True):
            yield rows, x_tD, tuple(outs_ctnK)

    def input_tiles(self, saved: SavedActivations) -> Iterator[tuple[slice, Tensor]]:
        slices = tile_slices(len(saved.inputs), self.layout.tile_tokens)
        for rows, x_tD in zip(slices, saved.x.tiles(slices, hold=self.layout.overlap), strict=True):
            self.start_tile(saved, rows)
            yield rows, x_tD

    def start_tile(self, saved: SavedActivations, rows: slice) -> None:
        if self.dropout is not None:
            self.dropout.keys_t = None if saved.call.keys_s is None else saved.call.keys_s[rows]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Unpack the weights. At the end, no tile is current."""
        try:
            with unpacked(self.packed):
                yield
        finally:
            if self.dropout is not None:
                self.dropout.keys_t = None


class _LayerFunction(torch.autograd.Function):
    """One autograd node per layer. It returns the weight gradients to autograd, as FSDP2 expects."""

    @staticmethod
    def forward(ctx, x, layer, inputs, call, *tensors):
        ctx.layer, ctx.tensors, ctx.num_changes, x_sD = layer, tensors, layer.num_changes(), x.view(x.shape[-2:])
        kept = layer.store.keep(x_sD, layer.policy.input, layer.layout.stored_dtype)
        ctx.saved = layer.saved_type(inputs, call, kept, layer.policy)
        ctx.saved.below = layer.store.register_layer(ctx.saved)
        with phase(layer.name), phase("forward"), layer.running():
            return layer.forward(x_sD, ctx.saved)

    @staticmethod
    def backward(ctx, dy):
        if ctx.saved is None:
            raise RuntimeError(BACKWARD_RAN_TWICE)
        if ctx.layer.num_changes() != ctx.num_changes:
            raise RuntimeError(PARAMETERS_CHANGED.format(ctx.layer.name))
        if is_shared := count_references(dy) > references_of_a_new_gradient():
            references_of_a_new_gradient.cache_clear()  # a failed torch.compile adds references to all
            is_shared = count_references(dy) > references_of_a_new_gradient()
        grads = GradSum()
        ctx.saved.read_ahead()
        with phase(ctx.layer.name), phase("backward"), torch.autocast(dy.device.type, enabled=False):
            dy = dy.clone(memory_format=torch.contiguous_format) if is_shared else dy.contiguous()  # becomes dx
            with ctx.layer.running():
                ctx.layer.backward(ctx.saved, dy.view(dy.shape[-2:]), grads)
        ctx.saved = None
        return dy, None, None, None, *(grads.take_rounded(t) for t in ctx.tensors)


# ---- ownership of gradients


def count_references(t: Any) -> int:
    """Count the references to a tensor in Python and in C++, and to its memory. A hook, a view or autograd may hold
    some, for example for the other operand of a sum."""
    return sys.getrefcount(t) + t._use_count() + torch._C._storage_Use_Count(t.untyped_storage()._cdata)


@cache
def references_of_a_new_gradient() -> int:
    """Count the references to a gradient that nothing else holds. They depend on the versions of Python and torch."""
    tracer = sys.gettrace()
    sys.settrace(None)  # a debugger may hold local variables
    try:
        with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
            x = torch.ones(1, device="cpu", requires_grad=True)
            torch.autograd.grad(2 * _CountReferences.apply(x), x)
    finally:
        sys.settrace(tracer)
    return _CountReferences.count


class _CountReferences(torch.autograd.Function):
    """Called by autograd as `_LayerFunction` is."""

    count = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        _CountReferences.count = count_references(dy)
        return dy
