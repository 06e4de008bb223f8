"""The decoder layer as an explicit schedule: forward and backward are loops over tiles and stages.

Shapes: s tokens on this rank, S on this ring member (in the sequence, without a ring), t in a tile, D hidden size, c
Ulysses ranks, n head slots per rank and stage, K head dim, N the width of several heads. Token-sharded tensors are
[c, s, n, K] ("exchange layout"), head-sharded tensors are [S, n, K], as in dist/exchange.py.

Saved for backward: the layer's input, and more according to the `ActivationPolicy`. The rest is recomputed.

After the last stage, one matrix product per tile sums over all heads: the output projection in forward, the gradient at
norm1's output in backward. So rounding does not depend on the number of stages, and backward, which recomputes
x + attention, gets the same bits as forward. Within a tile the residual is summed in fp32, so a layer's output is
rounded once.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ithaka.attention.blocks import AttentionSpec, Docs
from ithaka.attention.fused import Positions, add_and_round
from ithaka.dist.exchange import Exchange, start_heads_to_tokens, start_tokens_to_heads
from ithaka.layer.linear import Linear, as_linear
from ithaka.layer.mlp import GatedMlp, MlpActivations, as_gated_mlp
from ithaka.layer.stages import HeadSlice, Projection, ProjectionsBackward, StagedAttention, join_heads
from ithaka.layer.store import Store, TensorHandle
from ithaka.layer.tiles import (
    BACKWARD_RAN_TWICE,
    PARAMETERS_CHANGED,
    GradSum,
    apply_norm,
    graph_backward,
    norm_backward,
    run_norm,
    run_tile,
    tile_slices,
)
from ithaka.layout import ActivationPolicy, Layout
from ithaka.phases import Holder, phase, tag
from ithaka.plan.heads import Heads, HeadTable, Stage, concat_heads, flatten_heads


@dataclass(frozen=True)
class LayerParts:
    """The parts of one decoder layer: y = x + attention(norm1(x)); y + mlp(norm2(y))."""

    norm1: nn.Module
    q_proj: nn.Module  # see `as_linear`
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    norm2: nn.Module
    mlp: nn.Module
    head_dim: int
    scale: float
    window: int | None


class StageOutput(NamedTuple):
    """The attention output of one stage in exchange layout, [c, s, n, K], and its log-sum-exp, [n, S]."""

    out: TensorHandle
    lse: TensorHandle


@dataclass
class SavedActivations:
    """The activations that one forward saves for its backward."""

    positions: Positions
    docs: Docs
    x: TensorHandle
    policy: ActivationPolicy = ActivationPolicy()
    outputs: list[StageOutput] = field(default_factory=list)  # per stage
    qkv: deque[list[TensorHandle]] = field(default_factory=deque)  # per stage: q, and k and v of a new load
    residuals: deque[Tensor] = field(default_factory=deque)  # per tile: x + attention, rounded
    mlp: deque[MlpActivations] = field(default_factory=deque)  # per tile; for a black-box MLP, results of `run_tile`
    below: Callable[[], "SavedActivations | None"] = lambda: None  # the layer below, whose backward comes next

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


InFlight = deque[Callable[[], Tensor]]  # a stage's tensors in flight; each call waits for one


def wait_all(in_flight: InFlight) -> list[Tensor]:
    """Wait for all tensors, in order. Empties `in_flight`, so that it holds no references."""
    return [in_flight.popleft()() for _ in range(len(in_flight))]


class HeadGradExchange:
    """Sends the head gradients of one projection, by stage or load, back to the ranks of the tokens."""

    def __init__(self, group: dist.ProcessGroup, overlap: bool) -> None:
        self.group, self.overlap = group, overlap
        self._exchanges: dict[int, Exchange] = {}

    @phase("exchange")
    def add(self, key: int, d_SnK: Tensor) -> None:
        self._exchanges[key] = start_heads_to_tokens(d_SnK, self.group)
        if not self.overlap:
            self.wait()

    def wait(self) -> list[Tensor]:
        """Return all gradients, [c, s, n, K] each, ordered by key. Releases the tensors sent."""
        return [self._exchanges[key].wait() for key in sorted(self._exchanges)]


@dataclass(eq=False, repr=False)
class StreamedLayer:
    """Replaces a Hugging Face decoder layer's forward: (x_sD, positions, docs) -> y_sD."""

    name: str
    layer: nn.Module
    parts: LayerParts
    group: dist.ProcessGroup  # the Ulysses group, which exchanges tokens for heads
    ring: dist.ProcessGroup  # the ranks with the same heads of other tokens
    table: HeadTable
    store: Store
    layout: Layout
    policy: ActivationPolicy
    num_changes: Callable[[], int] = int  # in-place changes of its parameters; int: always 0

    def __post_init__(self) -> None:
        self.rank = self.group.rank()
        self.mlp = torch.compile(self.parts.mlp) if self.layout.compile else self.parts.mlp
        self.q = Projection(self.parts.q_proj, self.parts.q_norm, True, self.parts.head_dim)
        self.k = Projection(self.parts.k_proj, self.parts.k_norm, True, self.parts.head_dim)
        self.v = Projection(self.parts.v_proj, None, False, self.parts.head_dim)
        self.num_in_flight = 2 if self.layout.overlap else 1  # stages
        self.query_heads = concat_heads([stage.query_heads for stage in self.table.stages])
        self.kv_heads = concat_heads([load.kv_heads for load in self.table.loads])
        self.hooked = False  # set at each call; if True, a user's hook may hold the gradients between layers
        self._indices: dict[tuple[Heads, int], Tensor | None] = {}

    def __call__(self, x_sD: Tensor, positions: Positions, docs: Docs) -> Tensor:
        x_sD = x_sD.contiguous()  # a user's hook may have replaced it
        # Below the first trained parameter there is no backward.
        needs_grad = x_sD.requires_grad or any(param.requires_grad for param in self.layer.parameters())
        if torch.is_grad_enabled() and needs_grad:
            return _LayerFunction.apply(x_sD, self, positions, docs, *self.layer.parameters())
        with phase(self.name), phase("forward"):
            return self.forward(x_sD, SavedActivations(positions, docs, TensorHandle(x_sD)))

    # ---- forward

    def forward(self, x_sD: Tensor, saved: SavedActivations) -> Tensor:
        policy = saved.policy
        outputs = [StageOutput(*(self.store.keep(t, policy.attention) for t in pair)) for pair in self._attend(saved)]
        if policy.attention is not None:
            saved.outputs = outputs
        with phase("mlp"):
            y_sD, gated_mlp = tag(torch.empty_like(x_sD), Holder.RESIDUAL), self._as_gated_mlp()
            o_proj = self._output_projection(self.query_heads)
            for rows, x_tD, outs_ctnK in self._tiles_with_attention(saved, outputs):
                sum_tD = o_proj.apply_wide(join_heads(outs_ctnK))
                residual_tD = add_and_round(sum_tD, x_tD)
                if policy.projections:
                    residual_tD = tag(residual_tD.clone() if residual_tD is sum_tD else residual_tD, Holder.KEPT)
                    saved.residuals.append(residual_tD)
                if kept := self._add_mlp(sum_tD, residual_tD, gated_mlp, policy.mlp):
                    saved.mlp.append(kept)
                y_sD[rows] = sum_tD
        saved.release_sources()
        return y_sD

    def _attend(self, saved: SavedActivations) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield out_csnK, back on the ranks of the tokens, and lse_nS for each stage."""
        stages, attention = self.table.stages, self._staged_attention(saved.docs)
        sent = deque(self._project_and_send(saved, stage) for stage in stages[: self.num_in_flight])
        for i in range(len(stages)):
            yield self._attend_stage(i, sent.popleft(), attention, saved)
            if i + self.num_in_flight < len(stages):
                sent.append(self._project_and_send(saved, stages[i + self.num_in_flight]))

    def _attend_stage(
        self, i: int, sent: InFlight, attention: StagedAttention, saved: SavedActivations
    ) -> tuple[Tensor, Tensor]:
        out_SnK, lse_nS = self._run_attention(i, attention.attend, self._keep_qkv(wait_all(sent), saved))
        for load in self.table.loads_ending(i):
            attention.drop(load)
        with phase("exchange"):
            return start_heads_to_tokens(out_SnK, self.group).wait(), lse_nS

    def _run_attention(self, i: int, attend: Callable[..., Any], inputs: list[Tensor]) -> Any:
        """A separate function, so that its arguments are freed when it returns."""
        with phase("attention"), phase(f"stage {i}"):
            return attend(self.table.stages[i], *inputs)

    def _keep_qkv(self, qkv: list[Tensor], saved: SavedActivations) -> list[Tensor]:
        if saved.policy.projections:
            saved.qkv.append([self.store.keep(t, "device") for t in qkv])
        return qkv

    def _project_and_send(self, saved: SavedActivations, stage: Stage) -> InFlight:
        with phase("projections"):
            projected = self._project(saved, stage)
            return self._send([projected.popleft] * len(projected))

    def _project(self, saved: SavedActivations, stage: Stage) -> deque[Tensor]:
        """Return q of a stage, and k and v of its new load, in exchange layout [c, s, n, K]."""
        kv_heads = None if stage.load is None else self.table.loads[stage.load].kv_heads
        slices, c, K = self._head_slices(stage.query_heads, kv_heads), self.group.size(), self.parts.head_dim
        shapes = [(c, len(saved.positions), part.width // (c * K), K) for part in slices]
        projected = deque(part.linear.weight_ND.new_empty(shape) for part, shape in zip(slices, shapes, strict=True))
        for rows, x_tD in self._input_tiles(saved):
            h_tD, positions = apply_norm(self.parts.norm1, x_tD), saved.positions[rows]
            for part, into_csnK in zip(slices, projected, strict=True):
                part.project(h_tD, positions, into_csnK[:, rows])
        return projected

    def _head_slices(self, query_heads: Heads, kv_heads: Heads | None) -> list[HeadSlice]:
        """Select heads of q and, unless `kv_heads` is None, of k and v."""
        slices = [HeadSlice.select(self.q, self._head_index(query_heads, self.q))]
        if kv_heads is not None:
            index = self._head_index(kv_heads, self.k)
            slices += [HeadSlice.select(self.k, index), HeadSlice.select(self.v, index)]
        return slices

    def _send(self, makers: Sequence[Callable[[], Tensor]]) -> InFlight:
        """Send the tensor that each of `makers` returns to the ranks that own its heads.

        Without overlap, one at a time, so that only one tensor exists twice.
        """
        sent: InFlight = deque()
        for make in makers:
            exchange = start_tokens_to_heads(make(), self.group)
            if not self.layout.overlap:
                exchange.wait()
            sent.append(exchange.wait)
        return sent

    # ---- attention output and MLP, used in both directions

    def _tiles_with_attention(
        self, saved: SavedActivations, outputs: Sequence[StageOutput]
    ) -> Iterator[tuple[slice, Tensor, tuple[Tensor, ...]]]:
        """Yield the rows, x and the attention output of every stage for each tile."""
        slices = tile_slices(len(saved.positions), self.layout.tile_tokens)
        outs = [output.out.tiles(slices, dim=1) for output in outputs]
        for (rows, x_tD), *outs_ctnK in zip(self._input_tiles(saved), *outs, strict=True):
            yield rows, x_tD, tuple(outs_ctnK)

    def _output_projection(self, heads: Heads) -> Linear:
        return as_linear(self.parts.o_proj).select_heads(self._head_index(heads, self.q), self.parts.head_dim, dim=1)

    def _norm_and_mlp(self, residual_tD: Tensor) -> Tensor:
        return self.mlp(apply_norm(self.parts.norm2, residual_tD)[None])[0]

    def _as_gated_mlp(self) -> GatedMlp | None:
        """Call in every pass: hooks and wrappers may be added later."""
        return None if self.layout.compile else as_gated_mlp(self.parts.mlp)

    def _add_mlp(
        self, sum_tD: Tensor, residual_tD: Tensor, gated_mlp: GatedMlp | None, keep: bool
    ) -> MlpActivations | None:
        """Add the MLP's output to `sum`. With `keep`, return activations for `_mlp_backward_tile`."""
        if gated_mlp is not None:
            return gated_mlp.add_to(sum_tD, apply_norm(self.parts.norm2, residual_tD), keep)
        kept = run_tile(self._norm_and_mlp, residual_tD) if keep else None
        sum_tD += self._norm_and_mlp(residual_tD) if kept is None else kept[1].detach()
        return kept

    # ---- backward

    def backward(self, saved: SavedActivations, dy_sD: Tensor, grads: GradSum) -> Tensor:
        """Return dx, written over dy; add weight gradients to `grads`."""
        outputs = self._take_outputs(saved)
        with phase("mlp"):
            self._mlp_backward(saved, outputs, dy_sD, grads)
        self._attention_backward(saved, outputs, dy_sD, grads)
        return dy_sD

    def _take_outputs(self, saved: SavedActivations) -> deque[StageOutput]:
        """Return the saved outputs of attention, or recompute them."""
        if not saved.outputs:
            return deque(StageOutput(*(self.store.keep(t, "device") for t in pair)) for pair in self._attend(saved))
        outputs, saved.outputs = deque(saved.outputs), []
        return outputs

    def _mlp_backward(
        self, saved: SavedActivations, outputs: Sequence[StageOutput], dy_sD: Tensor, grads: GradSum
    ) -> None:
        """Turn dy into the gradient at x + attention; add weight gradients of the MLP and output projection."""
        gated_mlp, sums, o_proj = self._as_gated_mlp(), GradSum(), self._output_projection(self.query_heads)
        for rows, x_tD, outs_ctnK in self._tiles_with_attention(saved, outputs):
            dy_tD, out_tN = dy_sD[rows], join_heads(outs_ctnK)
            if saved.residuals:
                residual_tD = saved.residuals.popleft()
            else:
                residual_tD = add_and_round(o_proj.apply_wide(out_tN), x_tD)
            self._mlp_backward_tile(residual_tD, dy_tD, saved, gated_mlp, grads)
            o_proj.add_grads(dy_tD, out_tN, o_proj.lora_down_grad(dy_tD), sums)
        as_linear(self.parts.o_proj).add_head_grads(
            o_proj, self._head_index(self.query_heads, self.q), sums, grads, dim=1
        )

    def _mlp_backward_tile(
        self, residual_tD: Tensor, dy_tD: Tensor, saved: SavedActivations, gated_mlp: GatedMlp | None, grads: GradSum
    ) -> None:
        """Add the gradient through the MLP and norm2 to dy."""
        norm2 = self.parts.norm2
        if gated_mlp is None:
            params = [*norm2.parameters(), *self.parts.mlp.parameters()]
            x_y = saved.mlp.popleft() if saved.mlp else run_tile(self._norm_and_mlp, residual_tD)
            dy_tD += graph_backward(*x_y, params, dy_tD, grads)
            return
        residual_tD, h_tD = run_norm(norm2, residual_tD)
        dh_tD = gated_mlp.backward(h_tD.detach(), dy_tD, grads, saved.mlp)
        norm_backward(dy_tD, norm2, residual_tD, h_tD, dh_tD, grads)

    def _attention_backward(
        self, saved: SavedActivations, outputs: deque[StageOutput], dy_sD: Tensor, grads: GradSum
    ) -> None:
        """Add the gradient through attention and norm1 to dy, which becomes dx. Consumes `outputs`."""
        stages, attention = self.table.stages, self._staged_attention(saved.docs)
        dq, dk, dv = (HeadGradExchange(self.group, self.layout.overlap) for _ in range(3))
        first = stages[: self.num_in_flight]
        sent = deque(self._send_backward(saved, stage, outputs.popleft(), dy_sD) for stage in first)
        for i in range(len(stages)):
            if self.layout.overlap and outputs:
                outputs[0].out.prefetch()
            dq.add(i, self._run_attention(i, attention.attend_backward, wait_all(sent.popleft())))
            for load in self.table.loads_ending(i):
                dkv = attention.take_grads(load)
                dk.add(load, next(dkv))
                dv.add(load, next(dkv))
            if outputs:
                sent.append(self._send_backward(saved, stages[i + self.num_in_flight], outputs.popleft(), dy_sD))
            for exchange in (dq, dk, dv):
                exchange.wait()
        with phase("projections"):
            self._projections_backward(saved, dq.wait(), dk.wait(), dv.wait(), dy_sD, grads)

    def _send_backward(self, saved: SavedActivations, stage: Stage, output: StageOutput, dy_sD: Tensor) -> InFlight:
        """Send q, the attention output and its gradient, and k and v of a new load. lse, and q, k and v that were saved
        after their exchange, are already on the right rank."""
        with phase("projections"):
            makers: list[Callable[[], Tensor]] = [output.out.fetch, partial(self._output_grad, stage, dy_sD)]
            if saved.qkv:
                q, *kv = saved.qkv.popleft()
                return deque([q.fetch, *self._send(makers), *(t.fetch for t in kv), output.lse.fetch])
            projected = self._project(saved, stage)
            sent = self._send([projected.popleft, *makers, *[projected.popleft] * (len(projected) - 1)])
            sent.append(output.lse.fetch)
            return sent

    def _output_grad(self, stage: Stage, dy_sD: Tensor) -> Tensor:
        """Return dout [c, s, n, K] of a stage, from the gradient of the output projection's result."""
        o_proj, c = self._output_projection(stage.query_heads), self.group.size()
        dout_csnK = dy_sD.new_empty(c, len(dy_sD), stage.num_slots, self.parts.head_dim)
        for rows in tile_slices(len(dy_sD), self.layout.tile_tokens):
            dy_dz = dy_sD[rows], o_proj.lora_down_grad(dy_sD[rows])
            if c == 1:
                o_proj.input_grad(*dy_dz, dout_csnK[0, rows].flatten(1), adds=False)
            else:
                dout_tN = o_proj.input_grad(*dy_dz)
                dout_csnK[:, rows] = dout_tN.unflatten(1, (c, -1, self.parts.head_dim)).transpose(0, 1)
        return dout_csnK

    def _projections_backward(
        self,
        saved: SavedActivations,
        dq: list[Tensor],
        dk: list[Tensor],
        dv: list[Tensor],
        dy_sD: Tensor,
        grads: GradSum,
    ) -> None:
        """Add the gradient of all heads, through the projections and norm1, to dy."""
        norm1 = self.parts.norm1
        projections = ProjectionsBackward(self._head_slices(self.query_heads, self.kv_heads), [dq, dk, dv])
        for rows, x_tD in self._input_tiles(saved):
            x_tD, h_tD = run_norm(norm1, x_tD)
            dh_tD = projections.run_tile(rows, h_tD.detach(), saved.positions[rows], grads)
            norm_backward(dy_sD[rows], norm1, x_tD, h_tD, dh_tD, grads)
        projections.finish(grads)

    # ---- shared

    def _input_tiles(self, saved: SavedActivations) -> Iterator[tuple[slice, Tensor]]:
        slices = tile_slices(len(saved.positions), self.layout.tile_tokens)
        return zip(slices, saved.x.tiles(slices, hold=self.layout.overlap), strict=True)

    def _head_index(self, heads: Heads, projection: Projection) -> Tensor | None:
        """Return the heads as an index tensor; None if they are all heads of the projection, in order."""
        weight = as_linear(projection.module).weight_ND
        count = len(weight) // projection.head_dim
        if (heads, count) not in self._indices:
            order = flatten_heads(heads)
            in_order = order == list(range(count))
            self._indices[heads, count] = None if in_order else torch.tensor(order, device=weight.device)
        return self._indices[heads, count]

    def _staged_attention(self, docs: Docs) -> StagedAttention:
        parts, layout = self.parts, self.layout
        spec = AttentionSpec(
            scale=parts.scale, window=parts.window, docs=docs, kernel=layout.kernel, blocks=layout.blocks
        )
        return StagedAttention(self.table, self.rank, self.ring, spec)


class _LayerFunction(torch.autograd.Function):
    """One autograd node per layer. It returns the weight gradients to autograd, as FSDP2 expects."""

    @staticmethod
    def forward(ctx, x_sD, layer, positions, docs, *params):
        ctx.layer, ctx.params, ctx.hooked, ctx.num_changes = layer, params, layer.hooked, layer.num_changes()
        ctx.saved = SavedActivations(positions, docs, layer.store.keep(x_sD, layer.policy.input), layer.policy)
        ctx.saved.below = layer.store.register_layer(ctx.saved)
        with phase(layer.name), phase("forward"):
            return layer.forward(x_sD, ctx.saved)

    @staticmethod
    def backward(ctx, dy_sD):
        if ctx.saved is None:
            raise RuntimeError(BACKWARD_RAN_TWICE)
        if ctx.layer.num_changes() != ctx.num_changes:
            raise RuntimeError(PARAMETERS_CHANGED.format(ctx.layer.name))
        grads = GradSum()
        ctx.saved.read_ahead()
        with phase(ctx.layer.name), phase("backward"), torch.autocast(dy_sD.device.type, enabled=False):
            row_major = torch.contiguous_format
            dy_sD = dy_sD.clone(memory_format=row_major) if ctx.hooked else dy_sD.contiguous()  # overwritten
            dx_sD = ctx.layer.backward(ctx.saved, dy_sD, grads)
        ctx.saved = None
        return dx_sD, None, None, None, *(grads.take_as(p) for p in ctx.params)
