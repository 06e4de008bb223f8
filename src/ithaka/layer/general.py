"""The schedule of any decoder layer of transformers: its own forward, run tile by tile around its mixer.

A decoder layer is token-wise work, a mixer, and more token-wise work. The layer's forward runs twice on each tile: up
to its mixer, and, after mixing over the full sequence, from there to its end (layer/passes.py). Backward makes the same
two passes per tile under local autograd; with overlap, it keeps the graphs of its capture passes until the gradients of
the mixer's inputs arrive, instead of recomputing them.

Shapes as in layer/schedule.py and layer/inputs.py; H query heads, E experts.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ithaka.blocks.routing import LoadBalancingLoss
from ithaka.blocks.tiles import GradSum
from ithaka.config import ConfigError
from ithaka.layer.inputs import CurrentCall, LayerInputs
from ithaka.layer.mixer import LayerSpec, StageOutput
from ithaka.layer.passes import LayerPasses
from ithaka.layer.schedule import LayerSchedule, SavedActivations

Tiles = Iterator[tuple[slice, Tensor, LayerInputs]]  # rows, x and arguments of capture passes


class CaptureGraph(NamedTuple):
    """The graph of a capture pass: its inputs as leaves, and where the gradients of the captured tensors enter."""

    x_tD: Tensor
    inputs: LayerInputs
    edges: list[GradientEdge | None]


class ResumeGraph(NamedTuple):
    """The graph of a resume pass: its inputs as leaves, its output, and its router logits."""

    x_tD: Tensor
    outs_tHK: list[Tensor]
    inputs: LayerInputs
    y_tD: Tensor
    router_logits: list[Tensor]


@dataclass
class GeneralActivations(SavedActivations):
    is_backward: bool = False
    # In backward: the gradient of the mixer's output, until the mixer takes it. Of several mixers, a list.
    dout_sHK: Any = None
    resume_graphs: deque[ResumeGraph] = field(default_factory=deque)  # per tile
    capture_graphs: deque[CaptureGraph] = field(default_factory=deque)  # per tile, in backward with overlap


@dataclass(eq=False, repr=False)
class GeneralLayer(LayerSchedule):
    """Replaces a decoder layer's forward: (x [1, s, D], *args, **kwargs) -> y [1, s, D]."""

    current: CurrentCall = field(kw_only=True)
    balancing: LoadBalancingLoss | None = field(default=None, kw_only=True)  # the model's, if it has one
    saved_type = GeneralActivations
    batch_dims = (1,)

    def __post_init__(self) -> None:
        if self.layout.compile is True:  # compiled passes run the layer's own modules, for all heads
            facts = self.spec.mixers, self.spec.num_outputs, self.spec.token_dims, self.spec.skippable
            self.spec = LayerSpec(*facts, forward=self.spec.forward)
        super().__post_init__()
        self.passes = LayerPasses(self.name, self.layer, self.spec, self.layout.compile is True)
        if self.balancing is not None:
            self.passes.routers = self.balancing.find_routers(self.layer)
            self.passes.router_index = self.balancing.recorder.index
        self.experts = self.passes.experts
        has_experts = any(name.endswith("experts") for name, _ in self.layer.named_modules())
        if self.layout.stored_dtype and has_experts and self.experts.block is None:
            rule = f"needs ithaka's experts, which repeat forward's choices in backward; {self.name} runs its own"
            fix = "use train.compile=auto" if self.layout.compile is True else "leave it out"
            raise ConfigError(f"memory.stored_dtype={self.layout.stored_dtype} {rule}; {fix}")

    def __call__(self, x_1sD: Tensor, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        assert self.current.state is not None
        inputs = LayerInputs.pack(args, kwargs, self.spec.token_dims, x_1sD.shape[1])
        y_1sD = super().__call__(x_1sD, inputs, self.current.state)
        num_outputs = self.spec.num_outputs
        return y_1sD if num_outputs is None else (y_1sD, *[None] * (num_outputs - 1))

    # ---- capture passes, for the mixer

    def project(self, saved: Any, tiles: Tiles) -> tuple[list[Tensor], list[Tensor]]:
        """Make the capture passes; return the mixer's inputs for all tokens, [s, ...], and those without tokens."""
        count, projected, others = self.spec.mixers[saved.mixer].num_token_inputs, list[Tensor](), list[Tensor]()
        for rows, x_tD, inputs in tiles:
            if saved.is_backward and self.layout.overlap:
                captured, graph = self._capture_with_graph(x_tD, inputs, saved.mixer)
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
        self, saved: Any, tiles: Tiles, grads_of: Callable[[slice], Sequence[Tensor]], grads: GradSum
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows of each tile and the gradient of its x. `grads_of` returns those of the captured tensors."""
        for rows, x_tD, inputs in tiles:
            if saved.capture_graphs:
                graph = saved.capture_graphs.popleft()
            else:
                with self.passes.tile.set(skips_projections=self.spec.skips_projections):
                    _, graph = self._capture_with_graph(x_tD, inputs, saved.mixer)
            edges = zip(graph.edges, grads_of(rows), strict=False)
            edges_and_grads = [(edge, d) for edge, d in edges if edge is not None]
            with self.passes.tile.set(grads=grads):
                (dx_tD,) = self._tile_backward(edges_and_grads, [graph.x_tD], graph.inputs, saved, rows, grads)
            yield rows, dx_tD

    def _capture_with_graph(self, x_tD: Tensor, inputs: LayerInputs, mixer: int) -> tuple[list[Tensor], CaptureGraph]:
        with torch.enable_grad():
            x_tD, inputs = x_tD.detach().requires_grad_(), inputs.detach()
            captured = self.passes.capture(x_tD, inputs, mixer)
        edges = [get_gradient_edge(t) if t.requires_grad else None for t in captured]
        return captured, CaptureGraph(x_tD, inputs, edges)

    # ---- resume passes

    def _join(self, outs_ctnK: Sequence[Tensor]) -> list[Tensor]:
        outs_tHK = self.mixer.join(outs_ctnK) if self.mixer else []
        return outs_tHK if isinstance(outs_tHK, list) else [outs_tHK]

    def _finish(self, saved: Any, outputs: Sequence[StageOutput], y_sD: Tensor) -> None:
        balancing, chosen_sLk = saved.call.balancing, saved.call.chosen_sLk
        for rows, x_tD, outs_ctnK in self._tiles_with_outputs(saved, outputs):
            inputs, outs_tHK = saved.inputs.tile(rows), self._join(outs_ctnK)
            wanted_tk = None if chosen_sLk is None else chosen_sLk[rows, self.index]
            with self.experts.forward_tile(saved.chosen, wanted_tk):
                if saved.policy.mlp:
                    saved.resume_graphs.append(graph := self._resume_with_graph(x_tD, outs_tHK, inputs))
                    y_sD[rows] = graph.y_tD.detach()
                else:
                    with torch.no_grad():
                        y_sD[rows] = self.passes.resume(x_tD, outs_tHK, inputs)
            for logits_tE in graph.router_logits if saved.policy.mlp else self.passes.take_router_logits():
                balancing.add(logits_tE.detach(), rows)

    def _resume_with_graph(self, x_tD: Tensor, outs_tHK: Sequence[Tensor], inputs: LayerInputs) -> ResumeGraph:
        with torch.enable_grad():
            x_tD, inputs = x_tD.detach().requires_grad_(), inputs.detach()
            outs = [t.detach().requires_grad_(not self.spec.output) for t in outs_tHK]
            y_tD = self.passes.resume(x_tD, outs, inputs)
        return ResumeGraph(x_tD, outs, inputs, y_tD, self.passes.take_router_logits())

    def _mlp_backward(self, saved: Any, outputs: Sequence[StageOutput], dy_sD: Tensor, grads: GradSum) -> None:
        balancing, mixers = saved.call.balancing, () if self.spec.output else self.spec.mixers
        saved.is_backward = True
        douts_sHK = [dy_sD.new_empty(len(dy_sD), mixer.num_heads, mixer.head_dim) for mixer in mixers]
        for rows, x_tD, outs_ctnK in self._tiles_with_outputs(saved, outputs):
            if saved.resume_graphs:
                graph = saved.resume_graphs.popleft()
            else:
                with self.experts.repeat_tile(saved.chosen, self.spec.skips_mlp):
                    graph = self._resume_with_graph(x_tD, self._join(outs_ctnK), saved.inputs.tile(rows))
            outputs_and_grads = [(graph.y_tD, dy_sD[rows].to(graph.y_tD.dtype))]
            if balancing is not None and balancing.grad_E is not None:
                with torch.enable_grad():
                    logits = graph.router_logits
                    outputs_and_grads += [balancing.output_and_grad(logits_tE, rows) for logits_tE in logits]
            leaves = [t for t in (graph.x_tD, *graph.outs_tHK) if t.requires_grad]
            with self.experts.add_grads_to(grads, is_only_tile=len(x_tD) == len(dy_sD)):
                dx_tD, *douts = self._tile_backward(outputs_and_grads, leaves, graph.inputs, saved, rows, grads)
            for dout_sHK, dout_tHK in zip(douts_sHK, douts, strict=True):  # before dy: it may alias it
                dout_sHK[rows] = dout_tHK
            dy_sD[rows] = dx_tD
        saved.dout_sHK = douts_sHK if len(mixers) > 1 else next(iter(douts_sHK), None)

    def _tile_backward(
        self,
        outputs_and_grads: Sequence[tuple[Any, Tensor]],
        leaves: list[Tensor],
        inputs: LayerInputs,
        saved: Any,
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
