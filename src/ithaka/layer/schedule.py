"""The decoder layer as an explicit schedule: forward and backward are loops over tiles, around a mixer.

A layer is token-wise work, a mixer, and more token-wise work. Its own forward runs twice on each tile: up to its mixer,
and, after mixing over the full sequence, from there to its end (layer/passes.py). mixers/ has what mixes tokens, with
its exchanges between ranks. Backward makes the same two passes per tile under local autograd; with overlap, it keeps
the graphs of its capture passes until the gradients of the mixer's inputs arrive, instead of recomputing them.

Shapes: s tokens on this rank, S on this ring member (in the sequence, without a ring), t in a tile, D hidden size, c
Ulysses ranks, n head slots per rank and stage, H query heads, K head dim, M the width of several heads, E experts,
L layers, k experts per token. Token-sharded tensors are [c, s, n, K] ("exchange layout"), head-sharded tensors are
[S, n, K], as in comm/exchange.py.

Saved for backward: the layer's input, and more according to the `ActivationPolicy`. The rest is recomputed.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ithaka.blocks.dropout import DropoutState
from ithaka.blocks.routing import LoadBalancingLoss
from ithaka.blocks.tiles import BACKWARD_RAN_TWICE, PARAMETERS_CHANGED, GradSum, tile_slices
from ithaka.layer.inputs import CallState, CurrentCall, LayerInputs
from ithaka.layer.mixer import LayerSpec, SideBySide, StageOutput
from ithaka.layer.passes import CaptureGraph, LayerPasses, ResumeGraph
from ithaka.layer.store import Store, TensorHandle
from ithaka.layout import ActivationPolicy, Layout
from ithaka.ops.fourbit import packed_weights, unpacked
from ithaka.phases import MemoryCategory, phase, set_category

Tiles = Iterator[tuple[slice, Tensor, LayerInputs]]  # rows, x and arguments of capture passes


@dataclass
class SavedActivations:
    """The activations that one forward saves for its backward."""

    inputs: LayerInputs
    call: CallState
    x: TensorHandle
    policy: ActivationPolicy = ActivationPolicy()
    outputs: list[StageOutput] = field(default_factory=list)  # per stage
    mixing: Any = None  # the mixer's state of this call; for the layer, a copy of this object per mixer
    mixer: int = 0  # the index of the mixer that a copy belongs to
    mixer_inputs: deque[list[TensorHandle]] = field(default_factory=deque)  # per stage: q, and k and v if they are new
    chosen: deque[Tensor] = field(default_factory=deque)  # per tile of an MoE layer: the experts of its tokens
    below: Callable[[], "SavedActivations | None"] = lambda: None  # the layer below, whose backward runs next
    is_backward: bool = False
    dout_sHK: Any = None  # in backward: the gradient of the mixer's output, until it takes it; for the layer, of each
    resume_graphs: deque[ResumeGraph] = field(default_factory=deque)  # per tile
    capture_graphs: deque[CaptureGraph] = field(default_factory=deque)  # per tile, in backward with overlap

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
    """Replaces a decoder layer's forward: (x [1, s, D], *args, **kwargs) -> y [1, s, D]."""

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
    current: CurrentCall = field(kw_only=True)
    balancing: LoadBalancingLoss | None = field(default=None, kw_only=True)  # the model's, if it has one

    def __post_init__(self) -> None:
        spec = self.spec
        if self.layout.compile is True:  # run its own modules, for all heads; the compiler removes what is not used
            self.spec = LayerSpec(spec.mixers, spec.num_outputs, spec.token_dims, forward=spec.forward)
        self.packed = list(packed_weights(self.layer).values())
        self.mixer = SideBySide([mixer.make(self) for mixer in self.spec.mixers])
        self.passes = LayerPasses(self.name, self.layer, self.spec, self.layout.compile is True)
        if self.balancing is not None:
            router = self.balancing.recorder
            self.passes.routers = [each for each in self.layer.modules() if isinstance(each, router.target_class)]
            self.passes.router_index = router.index
        self.experts = self.passes.experts

    def __call__(self, x_1sD: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = self.current.state
        assert call is not None
        inputs = LayerInputs.pack(args, kwargs, self.spec.token_dims, x_1sD.shape[1])
        dtype = next(param.dtype for param in self.layer.parameters() if param.is_floating_point())
        x_1sD = x_1sD.to(dtype).contiguous()  # a user's hook may have replaced it
        tensors = (*(leaf for _, leaf in inputs.trained), *self.layer.parameters())
        # Layers before the first trained parameter need no backward.
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x_1sD, *tensors)):
            y_1sD = _LayerFunction.apply(x_1sD, self, inputs, call, *tensors)
        else:
            x_sD = x_1sD.view(x_1sD.shape[1:])
            with phase(self.name), phase("forward"), self.running():
                y_1sD = self.forward(x_sD, SavedActivations(inputs, call, TensorHandle(x_sD)))
        num_outputs = self.spec.num_outputs
        return y_1sD if num_outputs is None else (y_1sD, *[None] * (num_outputs - 1))

    # ---- forward and backward

    def forward(self, x_sD: Tensor, saved: SavedActivations) -> Tensor:
        policy = saved.policy
        y_1sD = new_output(x_sD) if policy.allocates_output_first else None
        saved.mixing = self.mixer.start(x_sD, saved)
        outputs = self._mix(saved, policy.attention)
        if policy.attention is not None:
            saved.outputs = outputs
        with phase("mlp"):
            y_1sD = new_output(x_sD) if y_1sD is None else y_1sD
            self._finish(saved, outputs, y_1sD.view(x_sD.shape))
        saved.release_sources()
        return y_1sD  # not a view, about which FSDP2 warns

    def _mix(self, saved: SavedActivations, tier: str | None) -> list[StageOutput]:
        keep, dtype = self.store.keep, self.layout.stored_dtype
        return [StageOutput(keep(out, tier, dtype), keep(state, tier)) for out, state in self.mixer.mix(saved)]

    def backward(self, saved: SavedActivations, dy_sD: Tensor, grads: GradSum) -> None:
        """Write dx over dy; add weight gradients to `grads`."""
        kept, saved.outputs = saved.outputs, []
        outputs = deque(kept or self._mix(saved, "device"))
        del kept
        with phase("mlp"):
            self._mlp_backward(saved, outputs, dy_sD, grads)
        self.mixer.mix_backward(saved, outputs, dy_sD, grads)

    # ---- capture passes, for the mixer

    def project(self, saved: SavedActivations, tiles: Tiles) -> tuple[list[Tensor], list[Tensor]]:
        """Make the capture passes; return the mixer's inputs for all tokens, [s, ...], and those without tokens."""
        count, projected, others = self.spec.mixers[saved.mixer].num_token_inputs, list[Tensor](), list[Tensor]()
        for rows, x_tD, inputs in tiles:
            if saved.is_backward and self.layout.overlap:
                captured, graph = self.passes.capture_with_graph(x_tD, inputs, saved.mixer)
                saved.capture_graphs.append(graph)
            else:
                with torch.no_grad():
                    captured = self.passes.capture(x_tD, inputs, saved.mixer)
            if not projected:
                projected = [t.new_empty(len(saved.inputs), *t.shape[1:]) for t in captured[:count]]
                others = [t.detach() for t in captured[count:]]
            for into, t in zip(projected, captured, strict=False):
                into[rows] = t.detach()
        return projected, others

    def project_backward(
        self, saved: SavedActivations, tiles: Tiles, grads_of: Callable[[slice], Sequence[Tensor]], grads: GradSum
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows of each tile and the gradient of its x. `grads_of` returns those of the captured tensors."""
        for rows, x_tD, inputs in tiles:
            if saved.capture_graphs:
                graph = saved.capture_graphs.popleft()
            else:
                with self.passes.tile.set(skips_projections=self.spec.skips_projections):
                    _, graph = self.passes.capture_with_graph(x_tD, inputs, saved.mixer)
            edges = zip(graph.edges, grads_of(rows), strict=False)
            edges_and_grads = [(edge, d) for edge, d in edges if edge is not None]
            with self.passes.tile.set(grads=grads):
                (dx_tD,) = self._tile_backward(edges_and_grads, [graph.x_tD], graph.inputs, saved, rows, grads)
            yield rows, dx_tD

    # ---- resume passes

    def _finish(self, saved: SavedActivations, outputs: Sequence[StageOutput], y_sD: Tensor) -> None:
        """Write the layer's output, given the outputs of the mixer."""
        balancing, chosen_sLk = saved.call.balancing, saved.call.chosen_sLk
        for rows, x_tD, outs_ctnK in self._tiles_with_outputs(saved, outputs):
            inputs, outs_tHK = saved.inputs.tile(rows), self.mixer.join(outs_ctnK)
            wanted_tk = None if chosen_sLk is None else chosen_sLk[rows, self.index]
            with self.experts.forward_tile(saved.chosen, wanted_tk):
                if saved.policy.mlp:
                    y_sD[rows], graph = self.passes.resume_with_graph(x_tD, outs_tHK, inputs)
                    saved.resume_graphs.append(graph)
                else:
                    with torch.no_grad():
                        y_sD[rows] = self.passes.resume(x_tD, outs_tHK, inputs)
            for logits_tE in graph.router_logits if saved.policy.mlp else self.passes.take_router_logits():
                assert balancing is not None
                balancing.add(logits_tE.detach(), rows)

    def _mlp_backward(
        self, saved: SavedActivations, outputs: Sequence[StageOutput], dy_sD: Tensor, grads: GradSum
    ) -> None:
        """Backward of `_finish`: turn dy into the gradient at x, except through the mixer."""
        balancing, mixers = saved.call.balancing, () if self.spec.output else self.spec.mixers
        douts_sHK = [dy_sD.new_empty(len(dy_sD), mixer.num_heads, mixer.head_dim) for mixer in mixers]
        for rows, x_tD, outs_ctnK in self._tiles_with_outputs(saved, outputs):
            if saved.resume_graphs:
                graph = saved.resume_graphs.popleft()
            else:
                with self.experts.repeat_tile(saved.chosen, self.spec.skips_mlp):
                    outs_tHK, inputs = self.mixer.join(outs_ctnK), saved.inputs.tile(rows)
                    graph = self.passes.resume_with_graph(x_tD, outs_tHK, inputs)[1]
            outputs_and_grads: list[Any] = [(graph.edge, dy_sD[rows].to(graph.dtype))]
            if balancing is not None and balancing.grad_E is not None:
                with torch.enable_grad():
                    logits = graph.router_logits
                    outputs_and_grads += [balancing.output_and_grad(logits_tE, rows) for logits_tE in logits]
            leaves = [t for t in (graph.x_tD, *graph.outs_tHK) if t.requires_grad]
            with self.passes.tile.set(grads=grads, is_only_tile=len(x_tD) == len(dy_sD)):
                dx_tD, *douts = self._tile_backward(outputs_and_grads, leaves, graph.inputs, saved, rows, grads)
            for dout_sHK, dout_tHK in zip(douts_sHK, douts, strict=True):  # before dy: it may alias it
                dout_sHK[rows] = dout_tHK
            dy_sD[rows] = dx_tD
        saved.dout_sHK = douts_sHK

    def _tile_backward(
        self,
        outputs_and_grads: Sequence[tuple[Any, Tensor]],
        leaves: list[Tensor],
        inputs: LayerInputs,
        saved: SavedActivations,
        rows: slice,
        grads: GradSum,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of `leaves`, given each output (or its edge) with its gradient. Add the gradients of
        parameters and of the layer's arguments to `grads`."""
        params = [param for param in self.layer.parameters() if param.requires_grad]
        trained = [leaf for _, leaf in inputs.trained]
        outputs, douts = zip(*outputs_and_grads, strict=True)
        found = torch.autograd.grad(outputs, [*leaves, *trained, *params], douts, allow_unused=True)
        for param, grad in zip(params, found[len(leaves) + len(trained) :], strict=True):
            grads.add(param, grad)
        for (i, full), grad in zip(saved.inputs.trained, found[len(leaves) :], strict=False):
            grads.add_tile(full, self.spec.token_dims[i], rows, grad)
        return found[: len(leaves)]

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

    def start_tile(self, saved: SavedActivations, rows: slice, halo_keys_w: Tensor | None = None) -> None:
        """Give dropout the keys of a tile's tokens, and of the halo that its x starts with."""
        keys_s = saved.call.keys_s
        if self.dropout is None:
            return
        self.dropout.keys_t = None if keys_s is None else keys_s[rows]
        if keys_s is not None and halo_keys_w is not None:
            self.dropout.keys_t = torch.cat([halo_keys_w, keys_s[rows]])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Unpack the weights. At the end, no tile is current."""
        try:
            with unpacked(self.packed):
                yield
        finally:
            if self.dropout is not None:
                self.dropout.keys_t = None


def new_output(x_sD: Tensor) -> Tensor:
    """Return memory for a layer's output, [1, s, D]."""
    return set_category(x_sD.new_empty(1, *x_sD.shape), MemoryCategory.RESIDUAL)


class _LayerFunction(torch.autograd.Function):
    """One autograd node per layer. It returns the weight gradients to autograd, as FSDP2 expects."""

    @staticmethod
    def forward(ctx, x, layer, inputs, call, *tensors):
        ctx.layer, ctx.tensors, ctx.num_changes, x_sD = layer, tensors, layer.num_changes(), x.view(x.shape[-2:])
        stored_dtype = layer.layout.input_dtype(layer.policy)
        kept = layer.store.keep(x_sD, layer.policy.input, stored_dtype)
        ctx.saved = SavedActivations(inputs, call, kept, layer.policy)
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
