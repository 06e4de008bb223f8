"""The decoder layer as an explicit schedule: forward and backward are loops over tiles and stages.

`LayerSchedule` has the stages, the exchanges and the saved activations. layer/streamed.py adds the computations of
Llama's layer and layers like it, layer/general.py those of any other decoder layer.

Shapes: s tokens on this rank, S on this ring member (in the sequence, without a ring), t in a tile, D hidden size, c
Ulysses ranks, n head slots per rank and stage, K head dim, N the width of several heads. Token-sharded tensors are
[c, s, n, K] ("exchange layout"), head-sharded tensors are [S, n, K], as in comm/exchange.py.

Saved for backward: the layer's input, and more according to the `ActivationPolicy`. The rest is recomputed.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ithaka.attention.blocks import AttentionSpec
from ithaka.attention.docs import Docs
from ithaka.attention.kernels import KERNELS
from ithaka.blocks.dropout import DropoutState
from ithaka.blocks.mlp import MlpActivations
from ithaka.blocks.tiles import (
    BACKWARD_RAN_TWICE,
    PARAMETERS_CHANGED,
    GradSum,
    tile_slices,
)
from ithaka.comm.exchange import Exchange, start_heads_to_tokens, start_tokens_to_heads
from ithaka.layer.stages import StagedAttention
from ithaka.layer.store import Store, TensorHandle
from ithaka.layout import ActivationPolicy, Layout
from ithaka.ops.fourbit import packed_weights, unpacked
from ithaka.phases import Holder, phase, tag
from ithaka.sharding.heads import HeadTable, Stage, concat_heads


class StageOutput(NamedTuple):
    """The attention output of one stage in exchange layout, [c, s, n, K], and its log-sum-exp, [n, S]."""

    out: TensorHandle
    lse: TensorHandle


@dataclass
class SavedActivations:
    """The activations that one forward saves for its backward."""

    positions: Any  # the `positions` argument of the layer's call
    docs: Docs
    x: TensorHandle
    policy: ActivationPolicy = ActivationPolicy()
    outputs: list[StageOutput] = field(default_factory=list)  # per stage
    qkv: deque[list[TensorHandle]] = field(default_factory=deque)  # per stage: q, and k and v of a new load
    residuals: deque[Tensor] = field(default_factory=deque)  # per tile: x + attention, rounded
    mlp: deque[MlpActivations] = field(default_factory=deque)  # per tile; for a black-box MLP, results of `run_tile`
    chosen: deque[Tensor] = field(default_factory=deque)  # per tile of an MoE layer: the experts of its tokens
    keys_s: Tensor | None = None  # one key per token, for adapter dropout
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


InFlight = deque[Callable[[], Tensor]]  # a stage's tensors in flight; each call waits for one


def wait_all(in_flight: InFlight) -> list[Tensor]:
    """Wait for all tensors, in order. Empties `in_flight`, so that it holds no references."""
    return [in_flight.popleft()() for _ in range(len(in_flight))]


class HeadGradExchange:
    """Sends the head gradients of one projection, by stage or load, back to the ranks of the tokens."""

    def __init__(self, group: dist.ProcessGroup, overlap: bool, store: Store) -> None:
        self.group, self.overlap, self.store = group, overlap, store
        self._exchanges: dict[int, Exchange] = {}
        self._handles: dict[int, TensorHandle] = {}

    @phase("exchange")
    def add(self, key: int, d_SnK: Tensor, tier: str | None = None) -> None:
        """Send the gradients of a stage or load. `tier`: where to keep the result until `take`; None: on the device."""
        self._exchanges[key] = start_heads_to_tokens(d_SnK, self.group)
        if not self.overlap:
            self.wait(tier)

    def wait(self, tier: str | None = None) -> None:
        """Wait for everything sent, and release it."""
        for key in tuple(self._exchanges):
            self._handles[key] = self.store.keep(self._exchanges.pop(key).wait(), tier)
            self._handles[key].release_source()

    def take(self) -> list[TensorHandle]:
        """Return all gradients, [c, s, n, K] each, ordered by key."""
        self.wait()
        return [self._handles.pop(key) for key in sorted(self._handles)]


@dataclass(eq=False, repr=False)
class LayerSchedule:
    """Replaces a decoder layer's forward: (x_sD, positions, docs) -> y_sD."""

    name: str
    layer: nn.Module
    parts: Any  # defined by the subclass; has head_dim, scale and window
    group: dist.ProcessGroup  # the Ulysses group, which exchanges tokens for heads
    ring: dist.ProcessGroup  # the ranks with the same heads of other tokens
    table: HeadTable
    store: Store
    layout: Layout
    policy: ActivationPolicy
    num_changes: Callable[[], int] = int  # in-place changes of its parameters; int: always 0

    saved_type: ClassVar[type[SavedActivations]] = SavedActivations
    batch_dims: ClassVar[tuple[int, ...]] = ()  # leading dims of the output
    reads_grads_by_tile: ClassVar[bool] = False  # `_projections_backward` needs one tile of head_grads at a time

    def __post_init__(self) -> None:
        self.rank = self.group.rank()
        self.num_in_flight = 2 if self.layout.overlap else 1  # stages
        self.query_heads = concat_heads([stage.query_heads for stage in self.table.stages])
        self.kv_heads = concat_heads([load.kv_heads for load in self.table.loads])
        self.packed = list(packed_weights(self.layer).values())
        self.dropout: DropoutState | None = None  # if adapters have dropout
        self.no_parents = ""  # why a call may not have `parents`, as part of an error: "with ..."
        # Without overlap, memory is scarce. Attention outputs that backward has used free room on the host.
        self.stores_dq = self.reads_grads_by_tile and not self.layout.overlap

    def __call__(self, x: Tensor, positions: Any, docs: Docs) -> Tensor:
        """x: [s, D], or with leading dims of size 1, as `batch_dims` of the output."""
        dtype = next(param.dtype for param in self.layer.parameters() if param.is_floating_point())
        x = x.to(dtype).contiguous()  # a user's hook may have replaced it
        inputs = (*self._other_inputs(positions), *self.layer.parameters())
        # Layers before the first trained parameter need no backward.
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *inputs)):
            return _LayerFunction.apply(x, self, positions, docs, *inputs)
        x_sD = x.view(x.shape[-2:])
        with phase(self.name), phase("forward"), unpacked(self.packed):
            saved = self.saved_type(positions, docs, TensorHandle(x_sD))
            saved.keys_s = self.dropout.keys_s if self.dropout is not None else None
            return self.forward(x_sD, saved)

    # ---- what a subclass computes

    def _other_inputs(self, positions: Any) -> Sequence[Tensor]:
        """Tensors in `positions` that may need gradients."""
        return ()

    def _project(self, saved: SavedActivations, stage: Stage) -> deque[Tensor]:
        """Return q of a stage, and k and v of its new load, in exchange layout [c, s, n, K]."""
        raise NotImplementedError

    def _finish(self, saved: SavedActivations, outputs: Sequence[StageOutput], y_sD: Tensor) -> None:
        """Write the layer's output, given the outputs of attention."""
        raise NotImplementedError

    def _mlp_backward(
        self, saved: SavedActivations, outputs: Sequence[StageOutput], dy_sD: Tensor, grads: GradSum
    ) -> None:
        """Backward of `_finish`: turn dy into the gradient at x, except through attention."""
        raise NotImplementedError

    def _output_grad(self, stage: Stage, saved: SavedActivations, dy_sD: Tensor) -> Tensor:
        """Return the gradient of a stage's attention output, [c, s, n, K], after `_mlp_backward`."""
        raise NotImplementedError

    def _projections_backward(
        self, saved: SavedActivations, head_grads: Sequence[list[TensorHandle]], dy_sD: Tensor, grads: GradSum
    ) -> None:
        """Backward of `_project`: add the gradient through q, k and v to dy.

        `head_grads`: for each of q, k and v, the gradients [c, s, n, K] of each stage or load.
        """
        raise NotImplementedError

    def _attend_heads(self, i: int, attention: StagedAttention, qkv: list[Tensor], saved: SavedActivations) -> Any:
        with phase("attention"), phase(f"stage {i}"):
            return attention.attend(self.table.stages[i], *qkv)

    def _attend_heads_backward(
        self, i: int, attention: StagedAttention, inputs: list[Tensor], saved: SavedActivations
    ) -> Tensor:
        with phase("attention"), phase(f"stage {i}"):
            return attention.attend_backward(self.table.stages[i], *inputs)

    # ---- forward

    def forward(self, x_sD: Tensor, saved: SavedActivations) -> Tensor:
        policy = saved.policy
        outputs = [
            StageOutput(*(self.store.keep(t, policy.attention) for t in out_lse)) for out_lse in self._attend(saved)
        ]
        if policy.attention is not None:
            saved.outputs = outputs
        with phase("mlp"):
            y = tag(x_sD.new_empty(*self.batch_dims, *x_sD.shape), Holder.RESIDUAL)
            self._finish(saved, outputs, y.view(x_sD.shape))
        saved.release_sources()
        return y  # not a view, about which FSDP2 warns

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
        out_SnK, lse_nS = self._attend_heads(i, attention, self._keep_qkv(wait_all(sent), saved), saved)
        for load in self.table.loads_ending(i):
            attention.drop(load)
        with phase("exchange"):
            return start_heads_to_tokens(out_SnK, self.group).wait(), lse_nS

    def _keep_qkv(self, qkv: list[Tensor], saved: SavedActivations) -> list[Tensor]:
        if saved.policy.projections:
            saved.qkv.append([self.store.keep(t, "device") for t in qkv])
        return qkv

    def _project_and_send(self, saved: SavedActivations, stage: Stage) -> InFlight:
        with phase("projections"):
            projected = self._project(saved, stage)
            return self._send([projected.popleft] * len(projected))

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

    # ---- backward

    def backward(self, saved: SavedActivations, dy_sD: Tensor, grads: GradSum) -> None:
        """Write dx over dy; add weight gradients to `grads`."""
        outputs = self._take_outputs(saved)
        with phase("mlp"):
            self._mlp_backward(saved, outputs, dy_sD, grads)
        self._attention_backward(saved, outputs, dy_sD, grads)

    def _take_outputs(self, saved: SavedActivations) -> deque[StageOutput]:
        """Return the saved outputs of attention, or recompute them."""
        if not saved.outputs:
            return deque(
                StageOutput(*(self.store.keep(t, "device") for t in out_lse)) for out_lse in self._attend(saved)
            )
        outputs, saved.outputs = deque(saved.outputs), []
        return outputs

    def _attention_backward(
        self, saved: SavedActivations, outputs: deque[StageOutput], dy_sD: Tensor, grads: GradSum
    ) -> None:
        """Add the gradient through attention and norm1 to dy, which becomes dx. Consumes `outputs`."""
        stages, attention = self.table.stages, self._staged_attention(saved.docs)
        dq, dk, dv = (HeadGradExchange(self.group, self.layout.overlap, self.store) for _ in range(3))
        first = stages[: self.num_in_flight]
        sent = deque(self._send_backward(saved, stage, outputs.popleft(), dy_sD) for stage in first)
        for i in range(len(stages)):
            if self.layout.overlap and outputs:
                outputs[0].out.prefetch()
            is_stored = self.stores_dq and saved.policy.attention in ("host", "disk") and i + 1 < len(stages)
            dq_SnK = self._attend_heads_backward(i, attention, wait_all(sent.popleft()), saved)
            dq.add(i, dq_SnK, "host" if is_stored else None)
            del dq_SnK
            for load in self.table.loads_ending(i):
                dkv = attention.take_grads(load)
                dk.add(load, next(dkv))
                dv.add(load, next(dkv))
            if outputs:
                sent.append(self._send_backward(saved, stages[i + self.num_in_flight], outputs.popleft(), dy_sD))
            for exchange in (dq, dk, dv):
                exchange.wait()
        with phase("projections"):
            self._projections_backward(saved, [dq.take(), dk.take(), dv.take()], dy_sD, grads)

    def _send_backward(self, saved: SavedActivations, stage: Stage, output: StageOutput, dy_sD: Tensor) -> InFlight:
        """Send q, the attention output and its gradient, and k and v of a new load. lse, and q, k and v that were saved
        after their exchange, are already on the right rank."""
        with phase("projections"):
            makers: list[Callable[[], Tensor]] = [output.out.fetch, partial(self._output_grad, stage, saved, dy_sD)]
            if saved.qkv:
                q, *kv = saved.qkv.popleft()
                return deque([q.fetch, *self._send(makers), *(t.fetch for t in kv), output.lse.fetch])
            projected = self._project(saved, stage)
            sent = self._send([projected.popleft, *makers, *[projected.popleft] * (len(projected) - 1)])
            sent.append(output.lse.fetch)
            return sent

    # ---- shared

    def _tiles_with_attention(
        self, saved: SavedActivations, outputs: Sequence[StageOutput]
    ) -> Iterator[tuple[slice, Tensor, tuple[Tensor, ...]]]:
        """Yield the rows, x and the attention output of every stage for each tile."""
        slices = tile_slices(len(saved.positions), self.layout.tile_tokens)
        outs = [output.out.tiles(slices, dim=1) for output in outputs]
        for (rows, x_tD), *outs_ctnK in zip(self._input_tiles(saved), *outs, strict=True):
            yield rows, x_tD, tuple(outs_ctnK)

    def _input_tiles(self, saved: SavedActivations) -> Iterator[tuple[slice, Tensor]]:
        slices = tile_slices(len(saved.positions), self.layout.tile_tokens)
        for rows, x_tD in zip(slices, saved.x.tiles(slices, hold=self.layout.overlap), strict=True):
            self._start_tile(saved, rows)
            yield rows, x_tD

    def _start_tile(self, saved: SavedActivations, rows: slice) -> None:
        if self.dropout is not None:
            self.dropout.keys_t = None if saved.keys_s is None else saved.keys_s[rows]

    def _staged_attention(self, docs: Docs) -> StagedAttention:
        parts, layout = self.parts, self.layout
        kernel = KERNELS.get(layout.kernel, layout.kernel)  # tested when the model was built, unless it is auto
        spec = AttentionSpec(scale=parts.scale, window=parts.window, docs=docs, kernel=kernel, blocks=layout.blocks)
        return StagedAttention(self.table, self.rank, self.ring, spec)


class _LayerFunction(torch.autograd.Function):
    """One autograd node per layer. It returns the weight gradients to autograd, as FSDP2 expects."""

    @staticmethod
    def forward(ctx, x, layer, positions, docs, *inputs):
        ctx.layer, ctx.inputs, ctx.num_changes, x_sD = layer, inputs, layer.num_changes(), x.view(x.shape[-2:])
        ctx.saved = layer.saved_type(positions, docs, layer.store.keep(x_sD, layer.policy.input), layer.policy)
        ctx.saved.keys_s = layer.dropout.keys_s if layer.dropout is not None else None
        ctx.saved.below = layer.store.register_layer(ctx.saved)
        with phase(layer.name), phase("forward"), unpacked(layer.packed):
            return layer.forward(x_sD, ctx.saved)

    @staticmethod
    def backward(ctx, dy):
        if ctx.saved is None:
            raise RuntimeError(BACKWARD_RAN_TWICE)
        if ctx.layer.num_changes() != ctx.num_changes:
            raise RuntimeError(PARAMETERS_CHANGED.format(ctx.layer.name))
        is_shared = count_references(dy) > references_of_a_new_gradient()
        grads = GradSum()
        ctx.saved.read_ahead()
        with phase(ctx.layer.name), phase("backward"), torch.autocast(dy.device.type, enabled=False):
            dy = dy.clone(memory_format=torch.contiguous_format) if is_shared else dy.contiguous()  # becomes dx
            with unpacked(ctx.layer.packed):
                ctx.layer.backward(ctx.saved, dy.view(dy.shape[-2:]), grads)
        ctx.saved = None
        return dy, None, None, None, *(grads.take_rounded(t) for t in ctx.inputs)


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
