"""Softmax attention over the tokens of all ranks, in stages of heads: exchange tokens for heads,
attend, exchange back. The exchange of the next stage overlaps the attention of this one.

Shapes as in layer/schedule.py; H query heads, G kv heads, Q slots of all ranks and stages.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ithaka.attention.blocks import AttentionSpec
from ithaka.attention.docs import Docs
from ithaka.attention.kernels import KERNELS
from ithaka.blocks.linear import Linear, LinearBlock, as_linear
from ithaka.blocks.tiles import GradSum, sum_dtype, tile_slices
from ithaka.comm.exchange import Exchange, start_heads_to_tokens, start_tokens_to_heads
from ithaka.facts.attention import AttentionKind
from ithaka.facts.heads import Heads, Stage, concat_heads, flatten_heads, head_table
from ithaka.layer.inputs import CallState
from ithaka.layer.mixer import MixerCall, MixerSpec, ProbedLayer, StageOutput, Tiles
from ithaka.layer.schedule import LayerSchedule
from ithaka.layer.stages import StagedAttention, join_slots
from ithaka.layer.store import Store, TensorHandle
from ithaka.mixers.attention_call import AttentionCall, AttentionTap, attends_to, read_mask
from ithaka.phases import phase


@dataclass(frozen=True)
class SoftmaxSpec(MixerSpec[AttentionCall]):
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False  # one more logit per head, without a value
    causal: bool = True

    exchanges_heads: ClassVar[bool] = True
    num_token_inputs: ClassVar[int] = 3  # q, k and v

    @property
    def kind(self) -> AttentionKind:
        return AttentionKind(
            self.head_dim,
            self.num_heads // self.num_kv_heads,
            self.window or self.chunk,
            self.softcap,
        )

    @classmethod
    def find_tap(cls, layer: nn.Module) -> AttentionTap:
        return AttentionTap()

    @classmethod
    def read(cls, call: AttentionCall, layer: ProbedLayer) -> "SoftmaxSpec":
        (num_heads, _, head_dim) = call.q_HtK.shape
        (num_kv_heads, _, v_head_dim) = call.v_GtV.shape
        if v_head_dim > head_dim:
            raise layer.refuse(
                f"has heads of {head_dim} for q and {v_head_dim} for v in {layer.name}"
            )
        scale = call.options.get("scaling")
        softcap = call.options.get("softcap")
        window, chunk = read_mask(call, layer)
        sizes = (num_heads, num_kv_heads, head_dim, v_head_dim)
        has_sinks = call.options.get("s_aux") is not None
        scale = head_dim**-0.5 if scale is None else float(scale)
        return cls(*sizes, scale, window=window, chunk=chunk, softcap=softcap, has_sinks=has_sinks)

    def inputs_of(self, call: AttentionCall, num_tokens: int) -> list[Tensor]:
        """Return q [t, H, K], k and v (padded to K) [t, G, K], and the sinks [H], if any."""
        v_GtK = F.pad(call.v_GtV, (0, self.head_dim - self.v_head_dim))
        qkv = [t.transpose(0, 1) for t in (call.q_HtK, call.k_GtK, v_GtK)]
        return [*qkv, call.options["s_aux"]] if self.has_sinks else qkv

    def run_reference(self, tiles: Sequence[list[Tensor]]) -> Tensor:
        qkv_tiles = [tile[:3] for tile in tiles]
        q_SHK, *kv = (torch.cat(tensors) for tensors in zip(*qkv_tiles, strict=True))
        k_SHK, v_SHK = (t.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1) for t in kv)
        scores_HSS = torch.einsum("ihk,jhk->hij", q_SHK, k_SHK) * self.scale
        if self.softcap is not None:
            scores_HSS = self.softcap * torch.tanh(scores_HSS / self.softcap)
        index = torch.arange(len(q_SHK), device=q_SHK.device)
        if self.causal:
            visible = attends_to(index[:, None], index, self.window, self.chunk)
            scores_HSS = scores_HSS.masked_fill(~visible, float("-inf"))
        if self.has_sinks:
            sinks_HS1 = tiles[0][3][:, None, None].expand(-1, len(index), 1)
            scores_HSS = torch.cat([scores_HSS, sinks_HS1], dim=-1)
        weights_HSS = scores_HSS.softmax(-1)[..., : len(index)]
        return torch.einsum("hij,jhk->ihk", weights_HSS, v_SHK)

    def make(self, layer: LayerSchedule) -> "SoftmaxMixer":
        return SoftmaxMixer(self, layer)


InFlight = deque[Callable[[], Tensor]]  # a stage's tensors in flight; each call waits for one


def wait_all(in_flight: InFlight) -> list[Tensor]:
    """Wait for all tensors, in order. Empties `in_flight`, so that it holds no references."""
    return [in_flight.popleft()() for _ in range(len(in_flight))]


class HeadGradExchange:
    """Sends a projection's head gradients, by stage or kv transfer, back to the tokens' ranks."""

    def __init__(self, group: dist.ProcessGroup, overlap: bool, store: Store) -> None:
        self.group = group
        self.overlap = overlap
        self.store = store
        self._exchanges: dict[int, Exchange] = {}
        self._handles: dict[int, TensorHandle] = {}

    @phase("exchange")
    def add(self, key: int, d_SnK: Tensor, tier: str | None = None) -> None:
        """Send gradients. `tier`: where to keep the result until `take`; None: on the device."""
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


@dataclass
class SoftmaxState:
    """One call's state."""

    docs: Docs
    # q [s, H, K], k and v [s, G, K], until every stage has sent its heads
    projected: list[Tensor] | None = None
    sinks_H: Tensor | None = None
    dsinks_H: Tensor | None = None


class SoftmaxMixer:
    """Attention of one layer, stage by stage."""

    def __init__(self, spec: SoftmaxSpec, layer: LayerSchedule) -> None:
        self.spec = spec
        self.layer = layer
        self.group = layer.group
        self.rank = layer.group.rank()
        self.store = layer.store
        self.layout = layer.layout
        self.table = head_table(
            spec.num_heads, spec.num_kv_heads, self.layout.ulysses, self.layout.heads_per_stage
        )
        self.num_stages = len(self.table.stages)
        self.num_in_flight = 2 if self.layout.overlap else 1  # stages
        self.query_heads = concat_heads([stage.query_heads for stage in self.table.stages])
        self.kv_heads = concat_heads([each.kv_heads for each in self.table.kv_transfers])
        self.is_sliced = bool(layer.spec.qkv)
        # Without overlap, memory is scarce. Attention outputs that backward has used free room on
        # the host.
        self.stores_dq = self.is_sliced and not self.layout.overlap
        self._indices = dict[tuple[int, ...], Tensor]()

    def start(self, x_sD: Tensor, model_call: CallState) -> SoftmaxState:
        docs = model_call.docs
        chunk = self.spec.chunk
        return SoftmaxState(docs if chunk is None else docs.split(chunk))

    # ---- forward

    def mix(self, call: MixerCall[SoftmaxState]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield out_csnK, back on the ranks of the tokens, and lse_nS for each stage."""
        stages = self.table.stages
        attention = self._staged_attention(call)
        sent = deque(self._project_and_send(call, stage) for stage in stages[: self.num_in_flight])
        for i in range(len(stages)):
            yield self._attend_stage(i, sent.popleft(), attention, call)
            if i + self.num_in_flight < len(stages):
                sent.append(self._project_and_send(call, stages[i + self.num_in_flight]))

    def _attend_stage(
        self, i: int, sent: InFlight, attention: StagedAttention, call: MixerCall[SoftmaxState]
    ) -> tuple[Tensor, Tensor]:
        qkv = wait_all(sent)
        if call.policy.projections:
            call.kept_inputs.append([self.store.keep(t, "device") for t in qkv])
        out_SnK, lse_nS = self._attend_heads(i, attention, qkv, call.state)
        del qkv
        for kv_transfer in self.table.kv_transfers_ending(i):
            attention.drop(kv_transfer)
        with phase("exchange"):
            return start_heads_to_tokens(out_SnK, self.group).wait(), lse_nS

    def _project_and_send(self, call: MixerCall[SoftmaxState], stage: Stage) -> InFlight:
        with phase("projections"):
            projected = self.project(call, stage)
            return self._send([projected.popleft] * len(projected))

    def _send(self, makers: Sequence[Callable[[], Tensor]]) -> InFlight:
        """Send the tensor that each of `makers` returns to the ranks that own its heads; without
        overlap, one at a time, so that only one exists twice."""
        sent: InFlight = deque()
        for make in makers:
            exchange = start_tokens_to_heads(make(), self.group)
            if not self.layout.overlap:
                exchange.wait()
            sent.append(exchange.wait)
        return sent

    def _attend_heads(
        self, i: int, attention: StagedAttention, qkv: list[Tensor], mixing: SoftmaxState
    ) -> tuple[Tensor, Tensor]:
        with phase("attention"), phase(f"stage {i}"):
            out_SnK, lse_nS = attention.attend(self.table.stages[i], *qkv)
        if mixing.sinks_H is None:
            return out_SnK, lse_nS
        # Applied to the merged softmax, sinks need no kernel.
        with_sinks_nS = torch.logaddexp(lse_nS, self._own_sinks(mixing.sinks_H, i).to(lse_nS.dtype))
        out_SnK.mul_((lse_nS - with_sinks_nS).exp().t()[..., None])
        return out_SnK, with_sinks_nS

    # ---- backward

    def mix_backward(
        self,
        call: MixerCall[SoftmaxState],
        outputs: deque[StageOutput],
        dy_sD: Tensor,
        grads: GradSum,
    ) -> None:
        stages = self.table.stages
        attention = self._staged_attention(call)
        overlap = self.layout.overlap
        dq, dk, dv = (HeadGradExchange(self.group, overlap, self.store) for _ in range(3))
        stores_dq = self.stores_dq and call.policy.attention in ("host", "disk")
        first = stages[: self.num_in_flight]
        sent = deque(self._send_backward(call, stage, outputs.popleft(), dy_sD) for stage in first)
        for i in range(len(stages)):
            if overlap and outputs:
                outputs[0].out.prefetch()
            dq_SnK = self._attend_heads_backward(i, attention, wait_all(sent.popleft()), call.state)
            dq.add(i, dq_SnK, "host" if stores_dq and i + 1 < len(stages) else None)
            del dq_SnK
            for kv_transfer in self.table.kv_transfers_ending(i):
                dkv = attention.take_grads(kv_transfer)
                dk.add(kv_transfer, next(dkv))
                dv.add(kv_transfer, next(dkv))
            if outputs:
                stage = stages[i + self.num_in_flight]
                sent.append(self._send_backward(call, stage, outputs.popleft(), dy_sD))
            for exchange in (dq, dk, dv):
                exchange.wait()
        with phase("projections"):
            self.project_backward(call, [dq.take(), dk.take(), dv.take()], dy_sD, grads)

    def _send_backward(
        self, call: MixerCall[SoftmaxState], stage: Stage, output: StageOutput, dy_sD: Tensor
    ) -> InFlight:
        """Send q, the attention output and its gradient, and a new kv transfer. lse, and q, k and v
        if they were kept, are already on the right rank."""
        with phase("projections"):
            make_dout = partial(self._stage_output_grad, stage, call, dy_sD)
            if call.kept_inputs:
                q, *kv = call.kept_inputs.popleft()
                sent = self._send([output.out.fetch, make_dout])
                return deque([q.fetch, *sent, *(t.fetch for t in kv), output.state.fetch])
            projected = self.project(call, stage)
            take_kv = [projected.popleft] * (len(projected) - 1)
            sent = self._send([projected.popleft, output.out.fetch, make_dout, *take_kv])
            sent.append(output.state.fetch)
            return sent

    def _attend_heads_backward(
        self, i: int, attention: StagedAttention, inputs: list[Tensor], mixing: SoftmaxState
    ) -> Tensor:
        if mixing.sinks_H is not None:
            self._sinks_backward(i, inputs[1], inputs[2], inputs[-1], mixing)
        with phase("attention"), phase(f"stage {i}"):
            return attention.attend_backward(self.table.stages[i], *inputs)

    def _sinks_backward(
        self, i: int, out_SnK: Tensor, dout_SnK: Tensor, lse_nS: Tensor, mixing: SoftmaxState
    ) -> None:
        assert mixing.sinks_H is not None
        wide = lse_nS.dtype
        sums_n = lse_nS.new_zeros(len(lse_nS))
        sinks_n1 = self._own_sinks(mixing.sinks_H, i).to(wide)
        for rows in tile_slices(len(out_SnK), self.layout.tile_tokens):
            d_tn = (out_SnK[rows].to(wide) * dout_SnK[rows]).sum(-1)
            sums_n -= ((sinks_n1 - lse_nS[:, rows]).exp() * d_tn.t()).sum(1)
        if mixing.dsinks_H is None:
            mixing.dsinks_H = torch.zeros_like(mixing.sinks_H, dtype=wide)
        slots = enumerate(self.table.stages[i].query_heads[self.rank])
        heads = {slot: head for slot, head in slots if head >= 0}
        own_n = sums_n[self.index(heads, sums_n)]
        mixing.dsinks_H.index_add_(0, self.index(heads.values(), sums_n), own_n)

    def _own_sinks(self, sinks_H: Tensor, i: int) -> Tensor:
        """Return the sinks of this rank's heads in a stage, [n, 1]; arbitrary in empty slots."""
        heads = flatten_heads((self.table.stages[i].query_heads[self.rank],))
        return sinks_H[self.index(heads, sinks_H), None]

    def _staged_attention(self, call: MixerCall[SoftmaxState]) -> StagedAttention:
        spec = self.spec
        layout = self.layout
        # tested when the model was built, unless it is auto
        kernel = KERNELS.get(layout.kernel, layout.kernel)
        settings = AttentionSpec(
            scale=spec.scale,
            causal=spec.causal,
            window=spec.window,
            docs=call.state.docs,
            kernel=kernel,
            blocks=layout.blocks,
        )
        if spec.softcap is not None:
            settings["softcap"] = spec.softcap
        return StagedAttention(self.table, self.rank, self.layer.ring, settings)

    # ---- heads: [s, H, K] in the model's order, and the slots of ranks and stages

    def index(self, heads: Iterable[int], like: Tensor) -> Tensor:
        """Return heads or slots as an index on a device. Kept: a copy would wait for the GPU."""
        key = tuple(heads)
        if key not in self._indices:
            with torch.inference_mode(False):  # training may follow an evaluation
                # Long, also if it is empty.
                self._indices[key] = torch.tensor(key, dtype=torch.long, device=like.device)
        return self._indices[key]

    def select_heads(self, t_sHK: Tensor, heads: Heads) -> Tensor:
        """Return some heads in exchange layout [c, s, n, K]. May alias its input."""
        order = flatten_heads(heads)
        if order != list(range(t_sHK.shape[1])):
            t_sHK = t_sHK.index_select(1, self.index(order, t_sHK))
        return t_sHK.unflatten(1, (len(heads), -1)).transpose(0, 1).contiguous()

    def join(self, outs: Sequence[Tensor]) -> Tensor:
        """Return the heads of all ranks and stages, [t, H, K], from [c, t, n, K] of each stage."""
        joined_tQK = join_slots(outs)
        slots = self._query_slots
        if slots is None:
            return joined_tQK
        return joined_tQK.index_select(1, self.index(slots, joined_tQK))

    @cached_property
    def _query_slots(self) -> list[int] | None:
        """The slot of each query head among all ranks' and stages'; None if they are the same."""
        order = [head for rank_heads in self.query_heads for head in rank_heads]
        slots = [order.index(head) for head in range(self.spec.num_heads)]
        return None if slots == list(range(len(order))) else slots

    def sum_heads(self, ds_ctnK: Sequence[Tensor], heads: Heads, num_heads: int) -> Tensor:
        """Sum the gradients of slots by head, [t, H, K]. Empty slots have zeros."""
        d_tQK = join_slots(ds_ctnK)
        order = flatten_heads(heads)
        if order == list(range(num_heads)):
            return d_tQK
        if sorted(order) == list(range(num_heads)):
            return d_tQK.index_select(1, self.index(map(order.index, range(num_heads)), d_tQK))
        shape = (len(d_tQK), num_heads, d_tQK.shape[-1])
        sums_tHK = d_tQK.new_zeros(shape, dtype=sum_dtype(d_tQK.dtype))
        sums_tHK.index_add_(1, self.index(order, d_tQK), d_tQK.to(sums_tHK.dtype))
        return sums_tHK

    # ---- projections: the heads of one stage at a time if the capture pass accepts that

    def project(self, call: MixerCall[SoftmaxState], stage: Stage) -> deque[Tensor]:
        """Return q of a stage, and k and v of a new kv transfer, in exchange layout."""
        mixing = call.state
        table = self.table
        kv_heads = None
        if stage.kv_transfer is not None:
            kv_heads = table.kv_transfers[stage.kv_transfer].kv_heads
        if self.is_sliced:
            return self._project_stage(call, stage.query_heads, kv_heads)
        if mixing.projected is None:
            mixing.projected, others = self.layer.project(call, self._tiles(call))
            mixing.sinks_H = others[0] if others else None
        q_sHK, *kv = mixing.projected
        selected = [self.select_heads(q_sHK, stage.query_heads)]
        if kv_heads is not None:
            selected += [self.select_heads(t, kv_heads) for t in kv]
        if stage is table.stages[-1]:
            mixing.projected = None
        return deque(selected)

    def _project_stage(
        self, call: MixerCall[SoftmaxState], query_heads: Heads, kv_heads: Heads | None
    ) -> deque[Tensor]:
        """Make the capture passes with some of the heads."""
        c = self.group.size()
        heads = (query_heads, kv_heads, kv_heads)
        count = 1 if kv_heads is None else 3
        projected: deque[Tensor] = deque()
        captured: list[Tensor] = []
        try:
            for i, part in enumerate(heads):
                self._block(i).selected = self._select(i, part)
            for rows, x_tD, inputs in self._tiles(call):
                with torch.no_grad():
                    captured = self.layer.passes.capture(x_tD, inputs)
                tiles = [t_tHK.unflatten(1, (c, -1)).transpose(0, 1) for t_tHK in captured[:count]]
                if len(x_tD) == len(call.inputs):
                    return deque(t_ctnK.contiguous() for t_ctnK in tiles)
                if not projected:
                    projected = deque(t.new_empty(c, len(call.inputs), *t.shape[2:]) for t in tiles)
                for into_csnK, t_ctnK in zip(projected, tiles, strict=True):
                    into_csnK[:, rows] = t_ctnK
        finally:
            for i in range(3):
                self._block(i).selected = None
            if self.spec.has_sinks and captured:
                call.state.sinks_H = captured[3]
        return projected

    def _block(self, i: int) -> LinearBlock:
        """The block of the map to q, k or v."""
        return self.layer.passes.blocks.by_path[self.layer.spec.qkv[i]]

    def _select(self, i: int, heads: Heads | None) -> Linear | int:
        """Select heads of q, k or v; without any, zeros for one."""
        head_dim = self.spec.v_head_dim if i == 2 else self.spec.head_dim
        linear = as_linear(self._block(i).module)
        if heads is None:
            return head_dim
        return linear.select_heads(self._find_index(heads, linear, 0, head_dim), head_dim)

    def _find_index(self, heads: Heads, linear: Linear, dim: int, head_dim: int) -> Tensor | None:
        """The heads as an index; None if they are all heads of a map, in order."""
        order = flatten_heads(heads)
        weight_MD = linear.weight_MD
        is_all = order == list(range(weight_MD.shape[dim] // head_dim))
        return None if is_all else self.index(order, weight_MD)

    def _stage_output_grad(
        self, stage: Stage, call: MixerCall[SoftmaxState], dy_sD: Tensor
    ) -> Tensor:
        """Return the gradient of a stage's attention output, [c, s, n, K]."""
        if self.layer.spec.output:
            return self._multiply_output_grad(stage, call, dy_sD)
        assert call.dout_sHK is not None
        dout_csnK = self.select_heads(call.dout_sHK, stage.query_heads)
        if stage is self.table.stages[-1]:
            call.dout_sHK = None
        return dout_csnK

    def _multiply_output_grad(
        self, stage: Stage, call: MixerCall[SoftmaxState], dy_sD: Tensor
    ) -> Tensor:
        """dy is the gradient of the output projection's result: multiply by the heads' columns."""
        layer = self.layer
        c = self.group.size()
        K = self.spec.head_dim
        linear = as_linear(layer.passes.blocks.by_path[layer.spec.output].module)
        linear = linear.select_heads(self._find_index(stage.query_heads, linear, 1, K), K, dim=1)
        dout_csnK = dy_sD.new_empty(c, len(dy_sD), stage.num_slots, K)
        for rows in tile_slices(len(dy_sD), layer.layout.tile_tokens):
            layer.start_tile(call, rows)
            dy_dz = dy_sD[rows], linear.lora_down_grad(dy_sD[rows])
            if c == 1:
                linear.input_grad(*dy_dz, dout_csnK[0, rows].flatten(1), adds=False)
            else:
                dout_tM = linear.input_grad(*dy_dz)
                dout_csnK[:, rows] = dout_tM.unflatten(1, (c, -1, K)).transpose(0, 1)
        return dout_csnK

    def project_backward(
        self,
        call: MixerCall[SoftmaxState],
        head_grads: Sequence[list[TensorHandle]],
        dy_sD: Tensor,
        grads: GradSum,
    ) -> None:
        """Add the gradient through q, k and v to dy. `head_grads`: theirs, by stage or transfer."""
        spec = self.spec
        mixing = call.state
        all_heads = self.query_heads, self.kv_heads, self.kv_heads
        counts = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        slices = tile_slices(len(dy_sD), self.layer.layout.tile_tokens)
        tiles = []
        for handles in head_grads:
            tiles.append(zip(*(handle.tiles(slices, dim=1) for handle in handles), strict=True))

        def grads_of(rows: slice) -> list[Tensor]:
            douts = [
                self.sum_heads(next(ds_ctnK), heads, count).to(dy_sD.dtype)
                for ds_ctnK, heads, count in zip(tiles, all_heads, counts, strict=True)
            ]
            if mixing.dsinks_H is not None and mixing.sinks_H is not None and rows.start == 0:
                douts.append(mixing.dsinks_H.to(mixing.sinks_H.dtype))
            return douts

        for rows, dx_tD in self.layer.project_backward(call, self._tiles(call), grads_of, grads):
            dy_sD[rows] += dx_tD

    def _tiles(self, call: MixerCall[SoftmaxState]) -> Tiles:
        for rows, x_tD in self.layer.input_tiles(call):
            yield rows, x_tD, call.inputs.tile(rows)
