"""Any decoder layer of transformers: its own forward, run tile by tile around the attention of the full sequence.

A decoder layer is token-wise work, one attention, and more token-wise work. transformers calls attention through a
registered function, so a layer's forward can run twice on a tile: first up to that call, which captures q, k and v and
ends the run; then, after attention, to the end, with the call returning the tile's attention output. Backward makes the
same two runs per tile under local autograd; with overlap, it keeps the graphs of its first runs until the gradients of
q, k and v arrive, instead of recomputing them. Linear maps that only feed q, k and v are skipped in the second run.

In 16 bits a tile computes like autocast: the residual, norms and rotations in fp32, matrix products in 16 bits; the
layer's output is rounded once.

Shapes as in layer/schedule.py; H query heads, G kv heads, V the head dim of v, which is padded to K.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ithaka.attention.blocks import Docs
from ithaka.layer.experts import LayerExperts
from ithaka.layer.mixers import DeltaCall, DeltaFacts, DeltaMixer, EndRun
from ithaka.layer.routing import Routing
from ithaka.layer.schedule import LayerSchedule, SavedActivations, StageOutput
from ithaka.layer.stages import StagedAttention
from ithaka.layer.store import TensorHandle
from ithaka.layer.tiles import GradSum, sum_dtype, tile_slices
from ithaka.plan.heads import Heads, Stage, flatten_heads

ATTENTION = "ithaka"  # the name of the functions below in transformers' registries


class AttentionCall(NamedTuple):
    """One call of transformers' attention interface: q [H, t, K], k [G, t, K], v [G, t, V]."""

    module: nn.Module
    q_HtK: Tensor
    k_GtK: Tensor
    v_GtV: Tensor
    options: dict[str, Any]


class Mask:
    """Replaces an attention mask. A layer passes it to its attention call, which calls `attend` instead of a kernel."""

    def __init__(self, function: Any = None, local_size: int | None = None) -> None:
        self.function = function  # made by masking_utils: (batch, head, row, key) -> visible
        self.local_size = local_size  # window or chunk

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("it uses its attention mask as a tensor")

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the output of attention, [t, H, V]."""
        raise RuntimeError(f"{type(call.module).__name__} of a parallel model was called directly; call the model")


class Capture(Mask):
    """Stores the attention call, with q, k and v in a given dtype, then ends the run. A traced run continues with zeros
    instead, which nothing reads."""

    def __init__(self, dtype: torch.dtype, traced: bool = False) -> None:
        super().__init__()
        self.dtype, self.traced = dtype, traced
        self.call: AttentionCall | None = None

    def attend(self, call: AttentionCall) -> Tensor:
        q_HtK, k_GtK, v_GtV = [t.to(self.dtype) for t in (call.q_HtK, call.k_GtK, call.v_GtV)]
        self.call = AttentionCall(call.module, q_HtK, k_GtK, v_GtV, call.options)
        if not self.traced:
            raise EndRun
        return call.v_GtV.new_zeros(call.q_HtK.shape[1], len(call.q_HtK), call.v_GtV.shape[-1])


class Answer(Mask):
    """Returns a given output of attention."""

    def __init__(self, out_tHV: Tensor) -> None:
        super().__init__()
        self.out_tHV = out_tHV
        self.num_calls = 0

    def attend(self, call: AttentionCall) -> Tensor:
        self.num_calls += 1
        return self.out_tHV


def _attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    if not isinstance(attention_mask, Mask):
        raise RuntimeError(
            f"{type(module).__name__} gets a mask that transformers.masking_utils did not make: {type(attention_mask)}"
        )
    return attention_mask.attend(AttentionCall(module, q[0], k[0], v[0], options))[None], None


def _make_mask(mask_function: Any = None, local_size: int | None = None, **others: Any) -> Mask:
    return Mask(mask_function, local_size)


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, _make_mask)


@dataclass(frozen=True)
class CallFacts:
    """A layer's attention, read from its call (model/probe.py)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    causal: bool = True
    num_outputs: int | None = None  # length of the tuple that the forward returns; None: a tensor
    token_dims: tuple[int | None, ...] = ()  # for each leaf of the arguments
    skippable: tuple[str, ...] = ()  # linear maps that only feed q, k and v
    forward: Callable[..., Any] | None = None  # (layer, x, *args) -> y; None: the forward of the layer's class
    has_expert_block: bool = False  # an ExpertBlock computes what its experts do
    skips_experts: bool = False  # no gradient depends on the experts' output
    delta: DeltaFacts | None = None  # the layer has the gated delta rule, not attention; K is then V

    @property
    def mixer(self) -> str:
        return "delta rule" if self.delta else "attention"


class Arguments:
    """The arguments of a layer other than its input, for all tokens of this rank."""

    def __init__(self, args: tuple, kwargs: dict[str, Any], token_dims: Sequence[int | None], num_tokens: int) -> None:
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        if len(self.leaves) != len(token_dims):
            raise RuntimeError(f"a layer got {len(self.leaves)} arguments, but {len(token_dims)} when it was checked")
        self.token_dims, self.num_tokens = token_dims, num_tokens
        self.ids_t: Tensor | None = None  # a number per document, for convolutions; None: all tokens are in one

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def trained(self) -> list[tuple[int, Tensor]]:
        """The leaves that need gradients, with their indices."""
        tensors = [(i, leaf) for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        return [(i, leaf) for i, leaf in tensors if leaf.requires_grad]

    def tile(self, rows: slice) -> "Arguments":
        leaves = [
            leaf if dim is None else leaf.narrow(dim, rows.start, rows.stop - rows.start)
            for leaf, dim in zip(self.leaves, self.token_dims, strict=True)
        ]
        return self.replace_leaves(leaves, rows.stop - rows.start)

    def detach(self) -> "Arguments":
        """Return the same values; those that need gradients become leaves of a new graph."""
        leaves = list(self.leaves)
        for i, leaf in self.trained:
            leaves[i] = leaf.detach().requires_grad_()
        return self.replace_leaves(leaves, self.num_tokens)

    def replace_leaves(self, leaves: list[Any], num_tokens: int) -> "Arguments":
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        replaced = Arguments(args, kwargs, self.token_dims, num_tokens)
        replaced.ids_t = self.ids_t
        return replaced

    @property
    def mask(self) -> Mask:
        return next((leaf for leaf in self.leaves if isinstance(leaf, Mask)), Mask())

    def with_mask(self, mask: Mask) -> tuple[tuple, dict[str, Any]]:
        """Return positional and keyword arguments, with `mask` in place of the layer's mask."""
        return pytree.tree_unflatten([mask if isinstance(leaf, Mask) else leaf for leaf in self.leaves], self.spec)


# ---- the two runs of a layer


def run_layer(
    layer: nn.Module, x_tD: Tensor, args: tuple, kwargs: dict[str, Any], forward: Callable[..., Any] | None = None
) -> Tensor:
    """Run the forward of the layer's class, without hooks, on a residual stream in fp32 or wider."""
    y = (forward or type(layer).forward)(layer, x_tD[None].to(sum_dtype(x_tD.dtype)), *args, **kwargs)
    return (y[0] if isinstance(y, tuple) else y)[0].to(x_tD.dtype)


def _run_without_result(*inputs: Any) -> None:
    """Discard the output, so that the compiler eliminates everything after the attention call as dead code."""
    run_layer(*inputs)


class LayerRuns:
    """A layer's forward up to its attention call, and from there to its end, on some tokens."""

    def __init__(self, name: str, layer: nn.Module, facts: CallFacts, compiles: bool = False) -> None:
        self.name, self.layer, self.facts, self.compiles = name, layer, facts, compiles
        self.run_1: Callable[..., None] = _run_without_result
        self.run_2: Callable[..., Tensor] = run_layer
        if compiles:
            # Each kind of layer has two runs, with and without gradients, and maybe a shorter last tile.
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
            self.run_1 = torch.compile(self.run_1, dynamic=False)
            self.run_2 = torch.compile(self.run_2, dynamic=False)
        self.experts = LayerExperts(layer, replaces=facts.has_expert_block and not compiles)
        self.mixer = DeltaMixer.find(layer)
        self.routers: list[nn.Module] = []
        self.router_index = 0  # where the logits are in a router's output
        self.router_logits: list[Tensor] = []
        # The compiler removes them as dead code.
        self.skipped = [_SkippedLinear(layer.get_submodule(path)) for path in facts.skippable if not compiles]

    def find_call(self, x_tD: Tensor, arguments: Arguments) -> AttentionCall | DeltaCall | None:
        """Run 1: return the call of attention or of the delta rule; None if the layer makes none."""
        capture, mixer = Capture(x_tD.dtype, traced=self.compiles), self.mixer
        capturing = mixer.capturing(x_tD.dtype, arguments.ids_t, self.compiles) if mixer else nullcontext()
        with suppress(EndRun), compute_like_autocast(x_tD), capturing:
            self.run_1(self.layer, x_tD, *arguments.with_mask(capture), self.facts.forward)
        return capture.call or (mixer.take_call() if mixer else None)

    def capture(self, x_tD: Tensor, arguments: Arguments) -> list[Tensor]:
        """Run 1: return q, k, v as [t, heads, K], and the sinks [H] if there are any; or the inputs of the delta rule,
        without the tokens of x before those of the arguments."""
        call = self.find_call(x_tD, arguments)
        assert call is not None
        if isinstance(call, DeltaCall):
            return [t[len(x_tD) - len(arguments) :] for t in call.inputs]
        v_GtK = F.pad(call.v_GtV, (0, self.facts.head_dim - self.facts.v_head_dim))
        qkv = [t.transpose(0, 1) for t in (call.q_HtK, call.k_GtK, v_GtK)]
        return [*qkv, call.options["s_aux"]] if self.facts.has_sinks else qkv

    def finish(self, x_tD: Tensor, out_tHK: Tensor, arguments: Arguments) -> Tensor:
        """Run 2: return the layer's output, given the output of attention."""
        with ExitStack() as stack:
            stack.enter_context(compute_like_autocast(x_tD))
            for linear in self.skipped:
                stack.enter_context(linear)
            self.router_logits = []
            for router in self.routers:
                stack.enter_context(router.register_forward_hook(self._record_router))
            answer = Answer(out_tHK[..., : self.facts.v_head_dim].contiguous())  # as in transformers
            if self.mixer:
                stack.enter_context(self.mixer.answering(answer.out_tHV))
            return self.run_2(self.layer, x_tD, *arguments.with_mask(answer), self.facts.forward)

    def take_router_logits(self) -> list[Tensor]:
        """Return the router logits of the last `finish`, and drop them."""
        logits, self.router_logits = self.router_logits, []
        return logits

    def _record_router(self, router: nn.Module, args: Any, output: Any) -> None:
        self.router_logits.append(output[self.router_index] if isinstance(output, tuple) else output)


def compute_like_autocast(x: Tensor) -> Any:
    is_16_bit = x.dtype.itemsize == 2
    return torch.autocast(x.device.type, x.dtype if is_16_bit else torch.bfloat16, is_16_bit, cache_enabled=False)


class _SkippedLinear:
    """A context in which a linear map returns zeros without storage, because nothing reads its result."""

    def __init__(self, linear: nn.Module) -> None:
        self.linear = linear

    def __enter__(self) -> None:
        num_outputs = self.linear.out_features
        self.linear.forward = lambda x: x.new_zeros(()).expand(*x.shape[:-1], num_outputs)

    def __exit__(self, *error: Any) -> None:
        del self.linear.forward


# ---- the layer


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

    parts: CallFacts
    batch: "BatchFacts" = field(kw_only=True)
    saved_type = GeneralActivations
    batch_dims = (1,)
    num_projected: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.runs = LayerRuns(self.name, self.layer, self.parts, self.layout.compile)
        self.experts = self.runs.experts
        if self.parts.delta is not None:
            rule = "a document would start from the state after its parent, which is kept for the next token only"
            self.no_parents = f"with the gated delta rule: {rule}"
        if self.batch.routing is not None:
            self.runs.routers = self.batch.routing.find_routers(self.layer)
            self.runs.router_index = self.batch.routing.recorder.index

    def __call__(self, x_1sD: Tensor, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        facts, docs = self.parts, self.batch.docs
        assert docs is not None
        arguments = Arguments(args, kwargs, facts.token_dims, x_1sD.shape[1])
        docs = docs if facts.chunk is None else docs.split(facts.chunk)
        y_1sD = super().__call__(x_1sD[0], arguments, docs)
        return y_1sD if facts.num_outputs is None else (y_1sD, *[None] * (facts.num_outputs - 1))

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
        sums_n = lse_nS.new_zeros(len(lse_nS))
        for rows in tile_slices(len(out_SnK), self.layout.tile_tokens):
            d_tn = (out_SnK[rows].to(wide) * dout_SnK[rows]).sum(-1)
            sums_n -= ((self._own_sinks(saved, i).to(wide) - lse_nS[:, rows]).exp() * d_tn.t()).sum(1)
        heads_n = torch.tensor(self.table.stages[i].query_heads[self.rank], device=sums_n.device)
        if saved.dsinks_H is None:
            saved.dsinks_H = torch.zeros_like(saved.sinks_H, dtype=wide)
        saved.dsinks_H.index_add_(0, heads_n.clamp(min=0), torch.where(heads_n < 0, 0, sums_n))

    def _own_sinks(self, saved: Any, i: int) -> Tensor:
        """Return the sinks of this rank's heads in a stage, [n, 1]; empty slots have arbitrary values."""
        heads = self.table.stages[i].query_heads[self.rank]
        return saved.sinks_H[torch.tensor(heads, device=saved.sinks_H.device).clamp(min=0), None]

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
            pairs = [(y_tD, dy_sD[rows])]
            if saved.routing is not None and saved.routing.grad_E is not None:
                with torch.enable_grad():
                    pairs += [saved.routing.output_and_grad(logits_tE, rows) for logits_tE in router_logits]
            with self.experts.add_grads_to(grads, is_only_tile=len(x_tD) == len(dy_sD)):
                dx_tD, dout_tHK = self._tile_backward(pairs, [x_tD, out_tHK], arguments, saved, rows, grads)
            saved.dout_sHK[rows], dy_sD[rows] = dout_tHK, dx_tD  # dout may alias dy

    def _output_grad(self, stage: Stage, saved: Any, dy_sD: Tensor) -> Tensor:
        dout_csnK = self._select_heads(saved.dout_sHK, stage.query_heads)
        if stage is self.table.stages[-1]:
            saved.dout_sHK = None
        return dout_csnK

    def _projections_backward(
        self, saved: Any, head_grads: Sequence[list[TensorHandle]], dy_sD: Tensor, grads: GradSum
    ) -> None:
        all_heads, facts = (self.query_heads, self.kv_heads, self.kv_heads), self.parts
        counts = (facts.num_heads, facts.num_kv_heads, facts.num_kv_heads)
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
            pairs = [(edge, d) for edge, d in zip(graph.edges, douts, strict=False) if edge is not None]
            (dx_tD,) = self._tile_backward(pairs, [graph.x_tD], graph.arguments, saved, rows, grads)
            dy_sD[rows] += dx_tD

    def _tile_backward(
        self,
        pairs: Sequence[tuple[Any, Tensor]],
        inputs: list[Tensor],
        arguments: Arguments,
        saved: Any,
        rows: slice,
        grads: GradSum,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of `inputs`, given pairs of an output and its gradient. Add the gradients of parameters
        and of the layer's arguments to `grads`."""
        params = [param for param in self.layer.parameters() if param.requires_grad]
        leaves = [leaf for _, leaf in arguments.trained]
        outputs, douts = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, [*inputs, *leaves, *params], douts, allow_unused=True)
        for param, grad in zip(params, found[len(inputs) + len(leaves) :], strict=True):
            grads.add(param, grad)
        for (i, full), grad in zip(saved.positions.trained, found[len(inputs) :], strict=False):
            grads.add_tile(full, self.parts.token_dims[i], rows, grad)
        return found[: len(inputs)]

    # ---- heads: [s, H, K] in the model's order, and the slots of ranks and stages

    def _select_heads(self, t_sHK: Tensor, heads: Heads) -> Tensor:
        """Return some heads in exchange layout [c, s, n, K]. May alias its input."""
        order = flatten_heads(heads)
        if order != list(range(t_sHK.shape[1])):
            t_sHK = t_sHK.index_select(1, torch.tensor(order, device=t_sHK.device))
        return t_sHK.unflatten(1, (len(heads), -1)).transpose(0, 1).contiguous()

    def _join_heads(self, outs_ctnK: Sequence[Tensor]) -> Tensor:
        """Return the heads of all ranks and stages, [t, H, K]. May alias its input."""
        outs_tcnK = [out.transpose(0, 1) for out in outs_ctnK]
        joined_tNK = (outs_tcnK[0] if len(outs_tcnK) == 1 else torch.cat(outs_tcnK, dim=2)).flatten(1, 2)
        slots = self._query_slots
        return joined_tNK if slots is None else joined_tNK.index_select(1, slots.to(joined_tNK.device))

    @cached_property
    def _query_slots(self) -> Tensor | None:
        """For each query head, its slot among those of all ranks and stages; None if they are the same."""
        order = [head for rank_heads in self.query_heads for head in rank_heads]
        slots = [order.index(head) for head in range(self.parts.num_heads)]
        return None if slots == list(range(len(order))) else torch.tensor(slots)

    @staticmethod
    def _sum_heads(ds_ctnK: Sequence[Tensor], heads: Heads, num_heads: int) -> Tensor:
        """Sum the gradients of slots by head, [t, H, K]. A kv head may have several slots; empty slots have zeros."""
        ds_tcnK = [d.transpose(0, 1) for d in ds_ctnK]
        d_tNK = (ds_tcnK[0] if len(ds_tcnK) == 1 else torch.cat(ds_tcnK, dim=2)).flatten(1, 2)
        order = flatten_heads(heads)
        if order == list(range(num_heads)):
            return d_tNK
        sums_tHK = d_tNK.new_zeros(len(d_tNK), num_heads, d_tNK.shape[-1], dtype=sum_dtype(d_tNK.dtype))
        sums_tHK.index_add_(1, torch.tensor(order, device=d_tNK.device), d_tNK.to(sums_tHK.dtype))
        return sums_tHK

    def _staged_attention(self, docs: Docs) -> StagedAttention:
        attention = super()._staged_attention(docs)
        attention.spec["causal"] = self.parts.causal
        if self.parts.softcap is not None:
            attention.spec["softcap"] = self.parts.softcap
        return attention


@dataclass
class BatchFacts:
    """Facts about the current batch that the layers of a model need in addition to their arguments."""

    docs: Docs | None = None
    num_positions: int = 0
    routing: Routing | None = None  # if the model has a load-balancing loss
