"""The schedule of any decoder layer of transformers: its own forward, run tile by tile around exact attention.

A decoder layer is token-wise work, one attention, and more token-wise work. The layer's forward runs twice on each
tile: up to its attention call, and, after attention over the full sequence, from there to its end (layer/runs.py).
Backward makes the same two runs per tile under local autograd; with overlap, it keeps the graphs of its first runs
until the gradients of q, k and v arrive, instead of recomputing them.

Shapes as in layer/schedule.py; H query heads, G kv heads.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ithaka.attention.docs import Docs
from ithaka.blocks.routing import Routing
from ithaka.blocks.tiles import GradSum, sum_dtype, tile_slices
from ithaka.layer.runs import Arguments, LayerRuns, LayerSpec
from ithaka.layer.schedule import LayerSchedule, SavedActivations, StageOutput
from ithaka.layer.stages import StagedAttention
from ithaka.layer.store import TensorHandle
from ithaka.sharding.heads import Heads, Stage, flatten_heads


@dataclass
class BatchState:
    """The current batch, as far as layers need to know it in addition to their arguments."""

    docs: Docs | None = None
    num_positions: int = 0
    routing: Routing | None = None  # if the model has a load-balancing loss


class ProjectionGraph(NamedTuple):
    """The graph of run 1 on a tile: its inputs as leaves, and where the gradients of q, k, v and sinks enter."""

    x_tD: Tensor
    arguments: Arguments
    edges: list[GradientEdge | None]


@dataclass
class GeneralActivations(SavedActivations):
    projected: list[Tensor] | None = None  # q [s, H, K], k and v [s, G, K], until every stage has sent its heads
    sinks_H: Tensor | None = None
    dsinks_H: Tensor | None = None
    dout_sHK: Tensor | None = None
    routing: Routing | None = None
    graphs: deque[Any] = field(default_factory=deque)  # per tile: the inputs and output of run 2
    projection_graphs: deque[ProjectionGraph] = field(default_factory=deque)  # per tile, in backward with overlap


@dataclass(eq=False, repr=False)
class GeneralLayer(LayerSchedule):
    """Replaces a decoder layer's forward: (x [1, s, D], *args, **kwargs) -> y [1, s, D]."""

    parts: LayerSpec
    batch: BatchState = field(kw_only=True)
    saved_type = GeneralActivations
    batch_dims = (1,)
    num_projected: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self._indices = dict[tuple[int, ...], Tensor]()
        self.runs = LayerRuns(self.name, self.layer, self.parts, self.layout.compile)
        self.experts = self.runs.experts
        if self.parts.delta is not None:
            rule = "a document would start from the state after its parent, which is kept for the next token only"
            self.no_parents = f"with the gated delta rule: {rule}"
        if self.batch.routing is not None:
            self.runs.routers = self.batch.routing.find_routers(self.layer)
            self.runs.router_index = self.batch.routing.recorder.index

    def __call__(self, x_1sD: Tensor, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        spec, docs = self.parts, self.batch.docs
        assert docs is not None
        arguments = Arguments(args, kwargs, spec.token_dims, x_1sD.shape[1])
        docs = docs if spec.chunk is None else docs.split(spec.chunk)
        y_1sD = super().__call__(x_1sD, arguments, docs)
        return y_1sD if spec.num_outputs is None else (y_1sD, *[None] * (spec.num_outputs - 1))

    def _other_inputs(self, positions: Arguments) -> list[Tensor]:
        return [leaf for _, leaf in positions.trained]

    # ---- forward

    def _project(self, saved: Any, stage: Stage) -> deque[Tensor]:
        if saved.projected is None:
            self._project_all_heads(saved)
        q_sHK, *kv = saved.projected
        selected = [self._select_heads(q_sHK, stage.query_heads)]
        if stage.load is not None:
            selected += [self._select_heads(t, self.table.loads[stage.load].kv_heads) for t in kv]
        if stage is self.table.stages[-1]:
            saved.projected = None
        return deque(selected)

    def _project_all_heads(self, saved: Any) -> None:
        saved.projected = []
        is_backward = saved.dout_sHK is not None
        for rows, x_tD, arguments in self._project_tiles(saved):
            if is_backward and self.layout.overlap:
                tiles, graph = self._capture_with_graph(x_tD, arguments)
                saved.projection_graphs.append(graph)
            else:
                with torch.no_grad():
                    tiles = self.runs.capture(x_tD, arguments)
            if not saved.projected:
                full = [t.new_empty(len(saved.positions), *t.shape[1:]) for t in tiles[: self.num_projected]]
                saved.projected = full
                saved.sinks_H = tiles[3].detach() if self.parts.has_sinks else None
            for into_sHK, t_tHK in zip(saved.projected, tiles, strict=False):
                into_sHK[rows] = t_tHK.detach()

    def _project_tiles(self, saved: Any) -> Iterator[tuple[slice, Tensor, Arguments]]:
        for rows, x_tD in self._input_tiles(saved):
            yield rows, x_tD, saved.positions.tile(rows)

    def _capture_with_graph(self, x_tD: Tensor, arguments: Arguments) -> tuple[list[Tensor], ProjectionGraph]:
        with torch.enable_grad():
            x_tD, arguments = x_tD.detach().requires_grad_(), arguments.detach()
            captured = self.runs.capture(x_tD, arguments)
        edges = [get_gradient_edge(t) if t.requires_grad else None for t in captured]
        return captured, ProjectionGraph(x_tD, arguments, edges)

    def _finish(self, saved: Any, outputs: Sequence[StageOutput], y_sD: Tensor) -> None:
        saved.routing = self.batch.routing
        for rows, x_tD, outs_ctnK in self._tiles_with_attention(saved, outputs):
            arguments, out_tHK = saved.positions.tile(rows), self._join_heads(outs_ctnK)
            with self.experts.forward_tile(rows, saved.chosen):
                if saved.policy.mlp:
                    saved.graphs.append(graph := self._finish_with_graph(x_tD, out_tHK, arguments))
                    y_sD[rows] = graph[3].detach()
                else:
                    with torch.no_grad():
                        y_sD[rows] = self.runs.finish(x_tD, out_tHK, arguments)
            for logits_tE in self.runs.take_router_logits() or (graph[4] if saved.policy.mlp else ()):
                saved.routing.add(logits_tE.detach(), rows)

    def _finish_with_graph(
        self, x_tD: Tensor, out_tHK: Tensor, arguments: Arguments
    ) -> tuple[Tensor, Tensor, Arguments, Tensor, list[Tensor]]:
        """Return the inputs of run 2 as leaves, its output, and its router logits."""
        with torch.enable_grad():
            leaves = x_tD.detach().requires_grad_(), out_tHK.detach().requires_grad_(), arguments.detach()
            return *leaves, self.runs.finish(*leaves), self.runs.take_router_logits()

    # ---- sinks: one more logit per head, without a value. Applied to the merged softmax, it needs no kernel.

    def _attend_heads(self, i: int, attention: StagedAttention, qkv: list[Tensor], saved: Any) -> Any:
        out_SnK, lse_nS = super()._attend_heads(i, attention, qkv, saved)
        if saved.sinks_H is None:
            return out_SnK, lse_nS
        with_sinks_nS = torch.logaddexp(lse_nS, self._own_sinks(saved, i).to(lse_nS.dtype))
        out_SnK.mul_((lse_nS - with_sinks_nS).exp().t()[..., None])
        return out_SnK, with_sinks_nS

    def _attend_heads_backward(self, i: int, attention: StagedAttention, inputs: list[Tensor], saved: Any) -> Tensor:
        if saved.sinks_H is not None:
            self._sinks_backward(i, inputs[1], inputs[2], inputs[-1], saved)
        return super()._attend_heads_backward(i, attention, inputs, saved)

    def _sinks_backward(self, i: int, out_SnK: Tensor, dout_SnK: Tensor, lse_nS: Tensor, saved: Any) -> None:
        wide = lse_nS.dtype
        sums_n, sinks_n1 = lse_nS.new_zeros(len(lse_nS)), self._own_sinks(saved, i).to(wide)
        for rows in tile_slices(len(out_SnK), self.layout.tile_tokens):
            d_tn = (out_SnK[rows].to(wide) * dout_SnK[rows]).sum(-1)
            sums_n -= ((sinks_n1 - lse_nS[:, rows]).exp() * d_tn.t()).sum(1)
        if saved.dsinks_H is None:
            saved.dsinks_H = torch.zeros_like(saved.sinks_H, dtype=wide)
        heads = {slot: head for slot, head in enumerate(self.table.stages[i].query_heads[self.rank]) if head >= 0}
        own_n = sums_n[self._index(heads, sums_n)]
        saved.dsinks_H.index_add_(0, self._index(heads.values(), sums_n), own_n)

    def _own_sinks(self, saved: Any, i: int) -> Tensor:
        """Return the sinks of this rank's heads in a stage, [n, 1]; empty slots have arbitrary values."""
        heads = flatten_heads((self.table.stages[i].query_heads[self.rank],))
        return saved.sinks_H[self._index(heads, saved.sinks_H), None]

    # ---- backward

    def _mlp_backward(self, saved: Any, outputs: Sequence[StageOutput], dy_sD: Tensor, grads: GradSum) -> None:
        saved.dout_sHK = dy_sD.new_empty(len(dy_sD), self.parts.num_heads, self.parts.head_dim)
        for rows, x_tD, outs_ctnK in self._tiles_with_attention(saved, outputs):
            if saved.graphs:
                graph = saved.graphs.popleft()
            else:
                with self.experts.repeat_tile(saved.chosen, self.parts.skips_experts):
                    graph = self._finish_with_graph(x_tD, self._join_heads(outs_ctnK), saved.positions.tile(rows))
            x_tD, out_tHK, arguments, y_tD, router_logits = graph
            outputs_and_grads = [(y_tD, dy_sD[rows])]
            if saved.routing is not None and saved.routing.grad_E is not None:
                with torch.enable_grad():
                    outputs_and_grads += [saved.routing.output_and_grad(logits_tE, rows) for logits_tE in router_logits]
            with self.experts.add_grads_to(grads, is_only_tile=len(x_tD) == len(dy_sD)):
                dx_tD, dout_tHK = self._tile_backward(outputs_and_grads, [x_tD, out_tHK], arguments, saved, rows, grads)
            saved.dout_sHK[rows], dy_sD[rows] = dout_tHK, dx_tD  # dout may alias dy

    def _output_grad(self, stage: Stage, saved: Any, dy_sD: Tensor) -> Tensor:
        dout_csnK = self._select_heads(saved.dout_sHK, stage.query_heads)
        if stage is self.table.stages[-1]:
            saved.dout_sHK = None
        return dout_csnK

    def _projections_backward(
        self, saved: Any, head_grads: Sequence[list[TensorHandle]], dy_sD: Tensor, grads: GradSum
    ) -> None:
        all_heads, spec = (self.query_heads, self.kv_heads, self.kv_heads), self.parts
        counts = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        for rows, x_tD, arguments in self._project_tiles(saved):
            if saved.projection_graphs:
                graph = saved.projection_graphs.popleft()
            else:
                _, graph = self._capture_with_graph(x_tD, arguments)
            douts = [
                self._sum_heads([d.fetch()[:, rows] for d in ds], heads, count).to(x_tD.dtype)
                for ds, heads, count in zip(head_grads, all_heads, counts, strict=True)
            ]
            if saved.dsinks_H is not None and rows.start == 0:
                douts.append(saved.dsinks_H.to(saved.sinks_H.dtype))
            edges_and_grads = [(edge, d) for edge, d in zip(graph.edges, douts, strict=False) if edge is not None]
            (dx_tD,) = self._tile_backward(edges_and_grads, [graph.x_tD], graph.arguments, saved, rows, grads)
            dy_sD[rows] += dx_tD

    def _tile_backward(
        self,
        outputs_and_grads: Sequence[tuple[Any, Tensor]],
        inputs: list[Tensor],
        arguments: Arguments,
        saved: Any,
        rows: slice,
        grads: GradSum,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of `inputs`, given each output (or its edge) with its gradient. Add the gradients
        of parameters and of the layer's arguments to `grads`."""
        params = [param for param in self.layer.parameters() if param.requires_grad]
        leaves = [leaf for _, leaf in arguments.trained]
        outputs, douts = zip(*outputs_and_grads, strict=True)
        found = torch.autograd.grad(outputs, [*inputs, *leaves, *params], douts, allow_unused=True)
        for param, grad in zip(params, found[len(inputs) + len(leaves) :], strict=True):
            grads.add(param, grad)
        for (i, full), grad in zip(saved.positions.trained, found[len(inputs) :], strict=False):
            grads.add_tile(full, self.parts.token_dims[i], rows, grad)
        return found[: len(inputs)]

    # ---- heads: [s, H, K] in the model's order, and the slots of ranks and stages

    def _index(self, heads: Iterable[int], like: Tensor) -> Tensor:
        """Return heads or slots as an index on the device of `like`. Kept, because a copy from the host would wait for
        the GPU."""
        if (key := tuple(heads)) not in self._indices:
            with torch.inference_mode(False):  # training may follow an evaluation
                self._indices[key] = torch.tensor(key, dtype=torch.long, device=like.device)  # also if empty
        return self._indices[key]

    def _select_heads(self, t_sHK: Tensor, heads: Heads) -> Tensor:
        """Return some heads in exchange layout [c, s, n, K]. May alias its input."""
        order = flatten_heads(heads)
        if order != list(range(t_sHK.shape[1])):
            t_sHK = t_sHK.index_select(1, self._index(order, t_sHK))
        return t_sHK.unflatten(1, (len(heads), -1)).transpose(0, 1).contiguous()

    def _join_heads(self, outs_ctnK: Sequence[Tensor]) -> Tensor:
        """Return the heads of all ranks and stages, [t, H, K]. May alias its input."""
        outs_tcnK = [out.transpose(0, 1) for out in outs_ctnK]
        joined_tNK = (outs_tcnK[0] if len(outs_tcnK) == 1 else torch.cat(outs_tcnK, dim=2)).flatten(1, 2)
        slots = self._query_slots
        return joined_tNK if slots is None else joined_tNK.index_select(1, self._index(slots, joined_tNK))

    @cached_property
    def _query_slots(self) -> list[int] | None:
        """For each query head, its slot among those of all ranks and stages; None if they are the same."""
        order = [head for rank_heads in self.query_heads for head in rank_heads]
        slots = [order.index(head) for head in range(self.parts.num_heads)]
        return None if slots == list(range(len(order))) else slots

    def _sum_heads(self, ds_ctnK: Sequence[Tensor], heads: Heads, num_heads: int) -> Tensor:
        """Sum the gradients of slots by head, [t, H, K]. A kv head may have several slots; empty slots have zeros."""
        ds_tcnK = [d.transpose(0, 1) for d in ds_ctnK]
        d_tNK = (ds_tcnK[0] if len(ds_tcnK) == 1 else torch.cat(ds_tcnK, dim=2)).flatten(1, 2)
        order = flatten_heads(heads)
        if order == list(range(num_heads)):
            return d_tNK
        sums_tHK = d_tNK.new_zeros(len(d_tNK), num_heads, d_tNK.shape[-1], dtype=sum_dtype(d_tNK.dtype))
        sums_tHK.index_add_(1, self._index(order, d_tNK), d_tNK.to(sums_tHK.dtype))
        return sums_tHK

    def _staged_attention(self, docs: Docs) -> StagedAttention:
        attention = super()._staged_attention(docs)
        attention.spec["causal"] = self.parts.causal
        if self.parts.softcap is not None:
            attention.spec["softcap"] = self.parts.softcap
        return attention
