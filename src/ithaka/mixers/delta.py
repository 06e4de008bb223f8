"""The gated delta rule over the tokens of all ranks: ranks pass states, not tokens.

The residual stream is contiguous on each rank, so the rule runs where the tokens are. A rank reduces its tokens to one
affine map of the incoming state; all maps are gathered, and each rank composes those before it. In backward the same is
done for the gradient of the outgoing state, with the ranks after it.

The short convolution before the rule reads a few earlier tokens. A capture pass therefore starts with them (the
*halo*): the last rows of the tile before, or those of the rank before, to which their gradient is sent back.

Shapes as in layer/schedule.py and ops/delta_rule.py; w tokens of the halo.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ithaka.attention.docs import Docs
from ithaka.blocks.tiles import GradSum
from ithaka.comm.exchange import all_gather
from ithaka.layer.inputs import LayerInputs
from ithaka.layer.mixer import MixerSpec, ProbedLayer, StageOutput
from ithaka.mixers.delta_call import DeltaCall, DeltaTap, calls_rule
from ithaka.ops.delta_rule import DeltaInputs, DeltaRule, LocalDocs, run_delta_rule
from ithaka.phases import phase


@dataclass(frozen=True, kw_only=True)
class DeltaSpec(MixerSpec):
    """K is the head dim of q and k, V that of v and the output: head_dim and v_head_dim are V."""

    num_key_heads: int
    key_dim: int
    normalizes: bool  # q and k to length 1

    exchanges_heads: ClassVar[bool] = False
    num_token_inputs: ClassVar[int] = 5  # as in DeltaInputs

    @classmethod
    def find_tap(cls, layer: nn.Module) -> DeltaTap | None:
        return next((DeltaTap(module) for module in layer.modules() if calls_rule(module)), None)

    @classmethod
    def read(cls, call: DeltaCall, layer: ProbedLayer) -> "DeltaSpec":
        (_, J, K), (_, H, V) = call.inputs.k_sJK.shape, call.inputs.v_sHV.shape
        normalizes = bool(call.options.get("use_qk_l2norm_in_kernel"))
        heads = {"num_heads": H, "num_kv_heads": H, "num_key_heads": J}
        return cls(**heads, head_dim=V, v_head_dim=V, key_dim=K, scale=K**-0.5, normalizes=normalizes, halo=call.halo)

    def inputs_of(self, call: DeltaCall, num_tokens: int) -> list[Tensor]:
        return [t[len(t) - num_tokens :] for t in call.inputs]

    def run_reference(self, tiles: Sequence[list[Tensor]]) -> Tensor:
        inputs = DeltaInputs(*(torch.cat(tensors) for tensors in zip(*tiles, strict=True)))
        return run_delta_rule(inputs, self.normalizes)

    def why_not(self, feature: Literal["ring", "parents"]) -> str:
        if feature == "ring":
            rule = "the gated delta rule passes its states from part to part in order"
            return f"a ring gives each rank several parts of the sequence, but {rule}"
        rule = "a document would start from the state after its parent, which is kept for the next token only"
        return f"with the gated delta rule: {rule}"

    def make(self, layer: Any) -> "DeltaMixer":
        return DeltaMixer(self, layer)


class DeltaMixer:
    """The rule of one GeneralLayer. It saves the states before each segment of tokens."""

    def __init__(self, spec: DeltaSpec, layer: Any) -> None:
        self.spec, self.layer, self.group, self.rank = spec, layer, layer.group, layer.group.rank()
        self.num_halo = max(1, spec.halo)

    def start(self, x_sD: Tensor, saved: Any) -> Tensor:
        """Return the halo: the last tokens of the ranks before; zeros before the sequence."""
        tail_tD = x_sD.detach()[-self.num_halo :].contiguous()
        before_tD = tail_tD[:0]
        if self.group.size() > 1:
            before_tD = _gather(tail_tD, self.group)[: self.rank].flatten(0, 1)[-self.num_halo :]
        return F.pad(before_tD, (0, 0, self.num_halo - len(before_tD), 0))

    def mix(self, saved: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield out_1sHV and the states before each segment."""
        with phase("projections"):
            inputs, _ = self.layer.project(saved, self._tiles(saved))
        if saved.policy.projections:
            saved.mixer_inputs.append([self.layer.store.keep(t, "device") for t in inputs])
        rule = self._make_rule(inputs, saved.call.docs)
        with phase("attention"):
            state_HKV = rule.zero_state()
            if self.group.size() > 1:
                summary_HKX = rule.summarize() if rule.docs.ends_later else None
                for summary in self._gather_summaries(rule, summary_HKX)[: self.rank]:
                    state_HKV = _apply_map(summary, state_HKV)
            out_sHV, states = rule.forward(state_HKV)
        yield out_sHV[None], states

    def join(self, outs: Sequence[Tensor]) -> Tensor:
        (out_1tHV,) = outs
        return out_1tHV[0]

    def mix_backward(self, saved: Any, outputs: deque[StageOutput], dy_sD: Tensor, grads: GradSum) -> None:
        states = outputs.popleft().state.fetch()
        with phase("projections"):
            kept = saved.mixer_inputs.popleft() if saved.mixer_inputs else None
            inputs = [t.fetch() for t in kept] if kept else self.layer.project(saved, self._tiles(saved))[0]
        dout_sHV, saved.dout_sHK = saved.dout_sHK, None
        rule = self._make_rule(inputs, saved.call.docs)
        with phase("attention"):
            dstate_HKV = rule.zero_state()
            if self.group.size() > 1:
                summary_HKX = rule.summarize_grad(dout_sHV) if rule.docs.begins_earlier else None
                for summary in self._gather_summaries(rule, summary_HKX)[self.rank + 1 :].flip(0):
                    dstate_HKV = _apply_map(summary, dstate_HKV)
            rule.backward(states, dout_sHV, dstate_HKV)  # inputs become their gradients
        with phase("projections"):
            self._project_backward(saved, inputs, dy_sD, grads)

    def _make_rule(self, inputs: list[Tensor], docs: Docs) -> DeltaRule:
        return DeltaRule(DeltaInputs(*inputs), self._local_docs(docs, inputs[0]), self.spec.normalizes)

    def _gather_summaries(self, rule: DeltaRule, summary_HKX: Tensor | None) -> Tensor:
        """Return the maps of all ranks, [c, H, K, X]; zeros for those that no other rank needs."""
        if summary_HKX is None:
            zeros = rule.zero_state()
            summary_HKX = F.pad(zeros, (zeros.shape[-2], 0))
        with phase("exchange"):
            return _gather(summary_HKX, self.group)

    # ---- the halo

    def _local_docs(self, docs: Docs, like: Tensor) -> LocalDocs:
        s, w = docs.starts[-1] // self.group.size(), self.num_halo
        if w not in docs.local:
            docs.local[w] = LocalDocs(docs.starts, self.rank * s, s, w, like.device)
        return docs.local[w]

    def _return_halo_grad(self, dhalo_wD: Tensor, dx_sD: Tensor) -> None:
        """Add the gradients of other ranks' halos to those of this rank's last tokens."""
        if self.group.size() == 1:
            return
        s, w = len(dx_sD), len(dhalo_wD)
        gathered = _gather(dhalo_wD.contiguous(), self.group)
        for later in range(1, self.group.size() - self.rank):
            end = later * s  # where that rank's halo ends, counted from this rank's first token
            first, last = max(end - w, 0), min(end, s)
            if first < last:
                dx_sD[first:last] += gathered[self.rank + later, first - end + w : last - end + w]

    def _tiles(self, saved: Any) -> Iterator[tuple[slice, Tensor, LayerInputs]]:
        """Yield the capture passes' tiles: x starts with the halo."""
        halo_wD, w = saved.mixing, self.num_halo
        docs = self._local_docs(saved.call.docs, halo_wD)
        for rows, x_tD in self.layer.input_tiles(saved):
            x_tD = torch.cat([halo_wD, x_tD])
            inputs = saved.inputs.tile(rows)
            if docs.has_start(slice(rows.start - w + 1, rows.stop)):
                inputs = replace(inputs, ids_t=docs.ids(rows.start - w, rows.stop))
            halo_wD = x_tD[-w:].clone()
            yield rows, x_tD, inputs

    def _project_backward(self, saved: Any, douts: list[Tensor], dy_sD: Tensor, grads: GradSum) -> None:
        w, dhalo_wD = self.num_halo, torch.zeros_like(saved.mixing)
        tiles = self.layer.project_backward(saved, self._tiles(saved), lambda rows: [d[rows] for d in douts], grads)
        for rows, dx_tD in tiles:
            dy_sD[rows] += dx_tD[w:]
            inside = min(w, rows.start)  # tokens of the halo that are on this rank
            dy_sD[rows.start - inside : rows.start] += dx_tD[w - inside : w]
            dhalo_wD[inside:] += dx_tD[: w - inside]
        self._return_halo_grad(dhalo_wD, dy_sD)


def _apply_map(map_HKX: Tensor, state_HKV: Tensor) -> Tensor:
    K = state_HKV.shape[-2]
    return map_HKX[..., :K] @ state_HKV + map_HKX[..., K:]


def _gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, [c, ...]."""
    gathered = own.new_empty(group.size(), *own.shape)
    all_gather(gathered.flatten(0, 1), own, group=group)
    return gathered
