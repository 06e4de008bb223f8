"""The decoder layer as an explicit schedule: loops over tiles, around its mixers.

A layer is token-wise work, a mixer or two side by side, and more token-wise work. Forward makes
capture passes of tiles, mixes the tokens of all ranks, and makes resume passes (layer/mixer.py).
Backward makes the same passes under local autograd; with overlap, it keeps the graphs of capture
passes until the gradients of a mixer's inputs arrive, instead of recomputing them.

Shapes: s tokens on this rank, S on this ring member (in the sequence, without a ring), t in a tile,
D hidden size, c Ulysses ranks, n head slots per rank and stage, H query heads, K head dim, M the
width of several heads, E experts, L layers, k experts per token. Token-sharded tensors are
[c, s, n, K] ("exchange layout"), head-sharded tensors are [S, n, K], as in comm/exchange.py.

Kept for backward: the layer's input, and more according to the `ActivationPolicy`. The rest is
recomputed.
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
from torch.autograd.graph import GradientEdge

from ithaka.blocks.dropout import DropoutState
from ithaka.blocks.routing import LoadBalancingLoss
from ithaka.blocks.tiles import BACKWARD_RAN_TWICE, PARAMETERS_CHANGED, GradSum, tile_slices
from ithaka.foreign.torch_core import count_cpp_references, without_modes
from ithaka.layer.inputs import CurrentCall, LayerInputs
from ithaka.layer.mixer import LayerCall, LayerSpec, MixerCall, SideBySide, StageOutput, Tiles
from ithaka.layer.passes import LayerPasses, ResumeGraph
from ithaka.layer.store import Store, TensorHandle
from ithaka.layout import ActivationPolicy, Layout
from ithaka.ops.fourbit import packed_weights, unpacked
from ithaka.phases import MemoryCategory, phase, set_category

Output = Tensor | GradientEdge  # of a pass on a tile


@dataclass
class SavedActivations(LayerCall):
    """What a layer holds of one call, from its forward until its backward (or, without gradients,
    its forward) ends."""

    mixer_calls: list[MixerCall] = field(default_factory=list)
    outputs: list[StageOutput] = field(default_factory=list)  # per stage, if they are kept
    chosen: deque[Tensor] = field(default_factory=deque)  # per tile: the experts of its tokens
    resume_graphs: deque[ResumeGraph] = field(default_factory=deque)  # per tile, if they are kept
    below: Callable[[], "SavedActivations | None"] = lambda: None  # its backward runs next

    def release_sources(self) -> None:
        """Release the source tensors of everything in the store."""
        for handle in self._handles():
            handle.release_source()

    def read_ahead(self) -> None:
        """Start reading what is on disk: of this layer and, if there is room, of that below."""
        for handle in self._handles():
            handle.read_ahead(wait=True)
        below = self.below()
        if below is not None:
            for handle in below._handles():
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
    balancing: LoadBalancingLoss | None = field(default=None, kw_only=True)  # if the model has it

    def __post_init__(self) -> None:
        spec = self.spec
        compiles = self.layout.compile is True
        if compiles:
            # Run its own modules, for all heads: the compiler removes what is not used.
            spec = LayerSpec(spec.mixers, spec.num_outputs, spec.token_dims, forward=spec.forward)
            self.spec = spec
        self.packed = list(packed_weights(self.layer).values())
        self.mixer = SideBySide([mixer.make(self) for mixer in spec.mixers])
        self.passes = LayerPasses(self.name, self.layer, spec, compiles)
        self.experts = self.passes.experts
        if self.balancing is not None:
            self.passes.record_routers(self.balancing.recorder)

    def __call__(
        self, x_1sD: Tensor, *args: object, **kwargs: object
    ) -> Tensor | tuple[Tensor | None, ...]:
        model_call = self.current.state
        assert model_call is not None
        inputs = LayerInputs.pack(args, kwargs, self.spec.token_dims, x_1sD.shape[1])
        dtype = next(param.dtype for param in self.layer.parameters() if param.is_floating_point())
        x_1sD = x_1sD.to(dtype).contiguous()  # a user's hook may have replaced it
        tensors = (*(leaf for _, leaf in inputs.trained), *self.layer.parameters())
        # Layers before the first trained parameter need no backward.
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x_1sD, *tensors)):
            y_1sD = _LayerFunction.apply(x_1sD, self, inputs, model_call, *tensors)
        else:
            x_sD = x_1sD.view(x_1sD.shape[1:])
            x = TensorHandle(x_sD)
            with phase(self.name), phase("forward"), self.running():
                y_1sD = self.forward(
                    x_sD, SavedActivations(inputs, model_call, x, ActivationPolicy())
                )
        num_outputs = self.spec.num_outputs
        return y_1sD if num_outputs is None else (y_1sD, *[None] * (num_outputs - 1))

    # ---- forward: the mixers, then the rest of the layer in tiles

    def forward(self, x_sD: Tensor, saved: SavedActivations) -> Tensor:
        """Return y [1, s, D], and fill `saved`."""
        policy = saved.policy
        y_1sD = new_output(x_sD) if policy.allocates_output_first else None
        saved.mixer_calls = self.mixer.start(x_sD, saved)
        outputs = self._mix(saved, policy.attention)
        if policy.attention is not None:
            saved.outputs = outputs
        with phase("mlp"):
            if y_1sD is None:
                y_1sD = new_output(x_sD)
            self._finish(saved, outputs, y_1sD.view(x_sD.shape))
        saved.release_sources()
        return y_1sD  # not a view, about which FSDP2 warns

    def _mix(self, saved: SavedActivations, tier: str | None) -> list[StageOutput]:
        keep = self.store.keep
        dtype = self.layout.stored_dtype
        return [
            StageOutput(keep(out, tier, dtype), keep(state, tier))
            for out, state in self.mixer.mix(saved.mixer_calls)
        ]

    def project(self, call: MixerCall, tiles: Tiles) -> tuple[list[Tensor], list[Tensor]]:
        """Make a mixer's capture passes; return its inputs for all tokens, [s, ...], and those
        without tokens. In backward with overlap, keep the graphs."""
        count = self.spec.mixers[call.index].num_token_inputs
        projected = list[Tensor]()
        others = list[Tensor]()
        for rows, x_tD, inputs in tiles:
            if call.is_backward and self.layout.overlap:
                captured, graph = self.passes.capture_with_graph(x_tD, inputs, call.index)
                call.capture_graphs.append(graph)
            else:
                with torch.no_grad():
                    captured = self.passes.capture(x_tD, inputs, call.index)
            if not projected:
                projected = [t.new_empty(len(call.inputs), *t.shape[1:]) for t in captured[:count]]
                others = [t.detach() for t in captured[count:]]
            for into, t in zip(projected, captured, strict=False):
                into[rows] = t.detach()
        return projected, others

    def _finish(
        self, saved: SavedActivations, outputs: Sequence[StageOutput], y_sD: Tensor
    ) -> None:
        """Make the resume passes: write the layer's output, given the outputs of the mixer."""
        balancing = saved.model_call.balancing
        chosen_sLk = saved.model_call.chosen_sLk
        for rows, x_tD, outs_ctnK in self._tiles_with_outputs(saved, outputs):
            inputs = saved.inputs.tile(rows)
            outs_tHK = self.mixer.join(outs_ctnK)
            wanted_tk = None if chosen_sLk is None else chosen_sLk[rows, self.index]
            with self.experts.forward_tile(saved.chosen, wanted_tk):
                if saved.policy.mlp:
                    y_sD[rows], graph = self.passes.resume_with_graph(x_tD, outs_tHK, inputs)
                    saved.resume_graphs.append(graph)
                    router_logits = graph.router_logits
                else:
                    with torch.no_grad():
                        y_sD[rows] = self.passes.resume(x_tD, outs_tHK, inputs)
                    router_logits = self.passes.take_router_logits()
            for logits_tE in router_logits:
                assert balancing is not None
                balancing.add(logits_tE.detach(), rows)
            del router_logits  # before the next tile's

    # ---- backward: the rest of the layer in tiles, then the mixers

    def backward(self, saved: SavedActivations, dy_sD: Tensor, grads: GradSum) -> None:
        """Write dx over dy; add weight gradients to `grads`."""
        kept = saved.outputs
        saved.outputs = []
        outputs = deque(kept or self._mix(saved, "device"))
        del kept
        with phase("mlp"):
            douts_sHK = self._finish_backward(saved, outputs, dy_sD, grads)
        self.mixer.mix_backward(saved.mixer_calls, outputs, douts_sHK, dy_sD, grads)

    def _finish_backward(
        self, saved: SavedActivations, outputs: Sequence[StageOutput], dy_sD: Tensor, grads: GradSum
    ) -> list[Tensor]:
        """Backward of `_finish`: turn dy into the gradient at x, except through the mixers. Return
        the gradients of their outputs, unless they compute them from dy."""
        balancing = saved.model_call.balancing
        mixers = () if self.spec.output else self.spec.mixers
        douts_sHK = [
            dy_sD.new_empty(len(dy_sD), mixer.num_heads, mixer.head_dim) for mixer in mixers
        ]
        for rows, x_tD, outs_ctnK in self._tiles_with_outputs(saved, outputs):
            if saved.resume_graphs:
                graph = saved.resume_graphs.popleft()
            else:
                with self.experts.repeat_tile(saved.chosen, self.spec.skips_mlp):
                    outs_tHK = self.mixer.join(outs_ctnK)
                    inputs = saved.inputs.tile(rows)
                    graph = self.passes.resume_with_graph(x_tD, outs_tHK, inputs)[1]
            outputs_and_grads: list[tuple[Output, Tensor]]
            outputs_and_grads = [(graph.edge, dy_sD[rows].to(graph.dtype))]
            if balancing is not None and balancing.grad_E is not None:
                logits = graph.router_logits
                with torch.enable_grad():
                    outputs_and_grads += [balancing.output_and_grad(each, rows) for each in logits]
            leaves = [t for t in (graph.x_tD, *graph.outs_tHK) if t.requires_grad]
            with self.passes.tile.set(grads=grads, is_only_tile=len(x_tD) == len(dy_sD)):
                dx_tD, *douts_tHK = self._tile_backward(
                    outputs_and_grads, leaves, graph.inputs, saved, rows, grads
                )
            # before dy: it may alias it
            for dout_sHK, dout_tHK in zip(douts_sHK, douts_tHK, strict=True):
                dout_sHK[rows] = dout_tHK
            dy_sD[rows] = dx_tD
        return douts_sHK

    def project_backward(
        self,
        call: MixerCall,
        tiles: Tiles,
        grads_of: Callable[[slice], Sequence[Tensor]],
        grads: GradSum,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Backward of `project`: yield each tile's rows and the gradient of its x. `grads_of`
        returns the gradients of the captured tensors."""
        for rows, x_tD, inputs in tiles:
            if call.capture_graphs:
                graph = call.capture_graphs.popleft()
            else:
                with self.passes.tile.set(skips_projections=self.spec.skips_projections):
                    _, graph = self.passes.capture_with_graph(x_tD, inputs, call.index)
            edges = zip(graph.edges, grads_of(rows), strict=False)
            edges_and_grads = [(edge, d) for edge, d in edges if edge is not None]
            with self.passes.tile.set(grads=grads):
                (dx_tD,) = self._tile_backward(
                    edges_and_grads, [graph.x_tD], graph.inputs, call, rows, grads
                )
            yield rows, dx_tD

    def _tile_backward(
        self,
        outputs_and_grads: Sequence[tuple[Output, Tensor]],
        leaves: list[Tensor],
        inputs: LayerInputs,
        call: LayerCall,
        rows: slice,
        grads: GradSum,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of `leaves`, given each output (or its edge) with its gradient. Add
        the gradients of parameters and of the layer's arguments to `grads`."""
        params = [param for param in self.layer.parameters() if param.requires_grad]
        trained = [leaf for _, leaf in inputs.trained]
        outputs, douts = zip(*outputs_and_grads, strict=True)
        found = torch.autograd.grad(outputs, [*leaves, *trained, *params], douts, allow_unused=True)
        for param, grad in zip(params, found[len(leaves) + len(trained) :], strict=True):
            grads.add(param, grad)
        for (i, full), grad in zip(call.inputs.trained, found[len(leaves) :], strict=False):
            grads.add_tile(full, self.spec.token_dims[i], rows, grad)
        return found[: len(leaves)]

    # ---- tiles

    def _tiles_with_outputs(
        self, saved: SavedActivations, outputs: Sequence[StageOutput]
    ) -> Iterator[tuple[slice, Tensor, tuple[Tensor, ...]]]:
        """Yield the rows, x and the mixer's output of every stage for each tile."""
        slices = tile_slices(len(saved.inputs), self.layout.tile_tokens)
        outs = [output.out.tiles(slices, dim=1) for output in outputs]
        for (rows, x_tD), *outs_ctnK in zip(self.input_tiles(saved), *outs, strict=True):
            yield rows, x_tD, tuple(outs_ctnK)

    def input_tiles(self, call: LayerCall) -> Iterator[tuple[slice, Tensor]]:
        slices = tile_slices(len(call.inputs), self.layout.tile_tokens)
        for rows, x_tD in zip(slices, call.x.tiles(slices, hold=self.layout.overlap), strict=True):
            self.start_tile(call, rows)
            yield rows, x_tD

    def start_tile(self, call: LayerCall, rows: slice, halo_keys_w: Tensor | None = None) -> None:
        """Give dropout the keys of a tile's tokens, and of the halo that its x starts with."""
        keys_s = call.model_call.keys_s
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
    """One autograd node per layer. Returns the weight gradients to autograd, as FSDP2 expects."""

    @staticmethod
    def forward(ctx, x, layer, inputs, model_call, *tensors):
        ctx.layer = layer
        ctx.tensors = tensors
        ctx.num_changes = layer.num_changes()
        x_sD = x.view(x.shape[-2:])
        stored_dtype = layer.layout.input_dtype(layer.policy)
        kept = layer.store.keep(x_sD, layer.policy.input, stored_dtype)
        ctx.saved = SavedActivations(inputs, model_call, kept, layer.policy)
        ctx.saved.below = layer.store.register_layer(ctx.saved)
        with phase(layer.name), phase("forward"), layer.running():
            return layer.forward(x_sD, ctx.saved)

    @staticmethod
    def backward(ctx, dy):
        layer = ctx.layer
        if ctx.saved is None:
            raise RuntimeError(BACKWARD_RAN_TWICE)
        if layer.num_changes() != ctx.num_changes:
            raise RuntimeError(PARAMETERS_CHANGED.format(layer.name))
        if count_references(dy) > references_of_a_new_gradient():
            # A failed torch.compile adds references to all gradients: measure again.
            references_of_a_new_gradient.cache_clear()
        is_shared = count_references(dy) > references_of_a_new_gradient()
        grads = GradSum()
        ctx.saved.read_ahead()
        with phase(layer.name), phase("backward"), torch.autocast(dy.device.type, enabled=False):
            # It becomes dx, in place.
            dy = dy.clone(memory_format=torch.contiguous_format) if is_shared else dy.contiguous()
            with layer.running():
                layer.backward(ctx.saved, dy.view(dy.shape[-2:]), grads)
        ctx.saved = None
        return dy, *[None] * 3, *(grads.take_rounded(t) for t in ctx.tensors)


# ---- ownership of gradients


def count_references(t: Any) -> int:
    """Count the references to a tensor in Python and in C++, and to its memory. A hook, a view or
    autograd (for the other operand of a sum) may hold some."""
    return sys.getrefcount(t) + count_cpp_references(t)


@cache
def references_of_a_new_gradient() -> int:
    """Count those to a gradient that nothing else holds, in these versions of Python and torch."""
    tracer = sys.gettrace()
    sys.settrace(None)  # a debugger may hold local variables
    try:
        with without_modes(), torch.inference_mode(False), torch.enable_grad():
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
