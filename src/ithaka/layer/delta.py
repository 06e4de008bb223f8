"""Decoder layers that mix tokens with the gated delta rule: ranks pass states, not tokens.

The residual stream is contiguous on each rank, so the rule runs where the tokens are. A rank reduces its tokens to one
affine map of the incoming state; all maps are gathered, and each rank composes those before it. In backward the same is
done for the gradient of the outgoing state, with the ranks after it.

The short convolution before the rule reads a few earlier tokens. Run 1 therefore starts with them (the *halo*): the
last rows of the tile before, or those of the rank before, to which their gradient is sent back.

Shapes as in layer/schedule.py and ops/delta_rule.py; h tokens of the halo.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ithaka.attention.docs import Docs
from ithaka.blocks.tiles import GradSum
from ithaka.comm.exchange import all_gather
from ithaka.layer.general import GeneralActivations, GeneralLayer
from ithaka.layer.runs import Arguments
from ithaka.layer.schedule import StageOutput
from ithaka.ops.delta_rule import DeltaInputs, DeltaRule, LocalDocs
from ithaka.phases import phase


@dataclass
class DeltaActivations(GeneralActivations):
    halo_hD: Tensor | None = None


@dataclass(eq=False, repr=False)
class DeltaLayer(GeneralLayer):
    """Heads are not exchanged: the head table is that of a single rank, with one stage. In place of lse, it saves the
    states before each segment of tokens."""

    saved_type = DeltaActivations
    num_projected = 5

    def forward(self, x_sD: Tensor, saved: Any) -> Tensor:
        saved.halo_hD = self._gather_halo(x_sD)
        return super().forward(x_sD, saved)

    def _attend(self, saved: Any) -> Iterator[tuple[Tensor, Tensor]]:
        with phase("projections"):
            inputs = self._take_projected(saved)
        if saved.policy.projections and saved.dout_sHK is None:
            saved.qkv.append([self.store.keep(t, "device") for t in inputs])
        rule = self._make_rule(inputs, saved.docs)
        with phase("attention"):
            state_HKV = rule.zero_state()
            if self.group.size() > 1:
                summary_HKX = rule.summarize() if rule.docs.ends_later else None
                for summary in self._gather_summaries(rule, summary_HKX)[: self.rank]:
                    state_HKV = _apply_map(summary, state_HKV)
            out_sHV, states = rule.forward(state_HKV)
        yield out_sHV[None], states

    def _attention_backward(self, saved: Any, outputs: deque[StageOutput], dy_sD: Tensor, grads: GradSum) -> None:
        states = outputs.popleft().lse.fetch()
        with phase("projections"):
            kept = saved.qkv.popleft() if saved.qkv else None
            inputs = [t.fetch() for t in kept] if kept else self._take_projected(saved)
        dout_sHV, saved.dout_sHK = saved.dout_sHK, None
        rule = self._make_rule(inputs, saved.docs)
        with phase("attention"):
            dstate_HKV = rule.zero_state()
            if self.group.size() > 1:
                summary_HKX = rule.summarize_grad(dout_sHV) if rule.docs.begins_earlier else None
                for summary in self._gather_summaries(rule, summary_HKX)[self.rank + 1 :].flip(0):
                    dstate_HKV = _apply_map(summary, dstate_HKV)
            rule.backward(states, dout_sHV, dstate_HKV)  # inputs become their gradients
        with phase("projections"):
            self._projections_backward(saved, [inputs], dy_sD, grads)

    def _take_projected(self, saved: Any) -> list[Tensor]:
        self._project_all_heads(saved)
        projected, saved.projected = saved.projected, None
        return projected

    def _make_rule(self, inputs: list[Tensor], docs: Docs) -> DeltaRule:
        spec = self.parts.delta
        assert spec is not None
        return DeltaRule(DeltaInputs(*inputs), self._local_docs(docs, inputs[0]), spec.normalizes)

    def _gather_summaries(self, rule: DeltaRule, summary_HKX: Tensor | None) -> Tensor:
        """Return the maps of all ranks, [c, H, K, X]; zeros for those that no other rank needs."""
        if summary_HKX is None:
            zeros = rule.zero_state()
            summary_HKX = F.pad(zeros, (zeros.shape[-2], 0))
        with phase("exchange"):
            return _gather(summary_HKX, self.group)

    # ---- the halo

    @property
    def _num_halo(self) -> int:
        return max(1, self.parts.delta.halo)  # type: ignore[union-attr]

    def _local_docs(self, docs: Docs, like: Tensor) -> LocalDocs:
        s, h = docs.starts[-1] // self.group.size(), self._num_halo
        if h not in docs.local:
            docs.local[h] = LocalDocs(docs.starts, self.rank * s, s, h, like.device)
        return docs.local[h]

    def _gather_halo(self, x_sD: Tensor) -> Tensor:
        """Return the last tokens of the ranks before; zeros before the sequence."""
        tail_tD = x_sD.detach()[-self._num_halo :].contiguous()
        before_tD = tail_tD[:0]
        if self.group.size() > 1:
            before_tD = _gather(tail_tD, self.group)[: self.rank].flatten(0, 1)[-self._num_halo :]
        return F.pad(before_tD, (0, 0, self._num_halo - len(before_tD), 0))

    def _return_halo_grad(self, dhalo_hD: Tensor, dx_sD: Tensor) -> None:
        """Add the gradients of other ranks' halos to those of this rank's last tokens."""
        if self.group.size() == 1:
            return
        s, h = len(dx_sD), len(dhalo_hD)
        gathered = _gather(dhalo_hD.contiguous(), self.group)
        for later in range(1, self.group.size() - self.rank):
            end = later * s  # of that rank's halo, counted from this rank's first token
            first, last = max(end - h, 0), min(end, s)
            if first < last:
                dx_sD[first:last] += gathered[self.rank + later, first - end + h : last - end + h]

    def _project_tiles(self, saved: Any) -> Iterator[tuple[slice, Tensor, Arguments]]:
        halo_hD = saved.halo_hD
        docs = self._local_docs(saved.docs, halo_hD)
        for rows, x_tD in self._input_tiles(saved):
            x_tD = torch.cat([halo_hD, x_tD])
            arguments = saved.positions.tile(rows)
            if docs.has_start(slice(rows.start - self._num_halo + 1, rows.stop)):
                arguments.ids_t = docs.ids(rows.start - self._num_halo, rows.stop)
            halo_hD = x_tD[-self._num_halo :].clone()
            yield rows, x_tD, arguments

    def _projections_backward(self, saved: Any, head_grads: Sequence[list[Any]], dy_sD: Tensor, grads: GradSum) -> None:
        (douts,), h = head_grads, self._num_halo
        dhalo_hD = torch.zeros_like(saved.halo_hD)
        for rows, x_tD, arguments in self._project_tiles(saved):
            if saved.projection_graphs:
                graph = saved.projection_graphs.popleft()
            else:
                _, graph = self._capture_with_graph(x_tD, arguments)
            edges_and_grads = [(edge, d[rows]) for edge, d in zip(graph.edges, douts, strict=True) if edge is not None]
            (dx_tD,) = self._tile_backward(edges_and_grads, [graph.x_tD], graph.arguments, saved, rows, grads)
            dy_sD[rows] += dx_tD[h:]
            inside = min(h, rows.start)  # tokens of the halo that are on this rank
            dy_sD[rows.start - inside : rows.start] += dx_tD[h - inside : h]
            dhalo_hD[inside:] += dx_tD[: h - inside]
        self._return_halo_grad(dhalo_hD, dy_sD)


def _apply_map(map_HKX: Tensor, state_HKV: Tensor) -> Tensor:
    K = state_HKV.shape[-2]
    return map_HKX[..., :K] @ state_HKV + map_HKX[..., K:]


def _gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, [c, ...]."""
    gathered = own.new_empty(group.size(), *own.shape)
    all_gather(gathered.flatten(0, 1), own, group=group)
    return gathered


LAYERS = {"attention": GeneralLayer, "delta rule": DeltaLayer}  # by how a layer mixes tokens
