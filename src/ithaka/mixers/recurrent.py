"""Recurrent mixers over the tokens of all ranks: ranks pass states, not tokens.

The recurrence runs where the tokens are. A rank reduces its tokens to affine maps of its incoming
states (ops/scan.py); all maps are gathered, and each rank composes those before it. Backward does
the same for the gradients of outgoing states, with the ranks after it.

The short convolution before the recurrence reads a few earlier tokens. A capture pass therefore
starts with them (the *halo*): the last rows of the tile before, or those of the rank before or of a
document's parent, to which their gradient is sent back.

Shapes as in layer/schedule.py and ops/scan.py; w tokens of a halo.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ithaka.attention.docs import Docs
from ithaka.blocks.tiles import GradSum
from ithaka.comm.exchange import all_gather
from ithaka.layer.inputs import CallState
from ithaka.layer.mixer import MixerCall, MixerSpec, StageOutput, Tiles
from ithaka.layer.schedule import LayerSchedule
from ithaka.mixers.scan_call import ScanCall, ScanTap
from ithaka.ops.scan import Scan
from ithaka.ops.state_graph import LocalDocs
from ithaka.phases import phase


@dataclass(frozen=True)
class RecurrentSpec(MixerSpec[ScanCall]):
    exchanges_heads: ClassVar[bool] = False
    tap: ClassVar[type[ScanTap]]
    name: ClassVar[str]  # in errors
    make_scan: ClassVar[Any]  # (inputs, inputs without tokens, docs) -> Scan

    @classmethod
    def find_tap(cls, layer: nn.Module) -> ScanTap | None:
        return cls.tap.find(layer)

    def inputs_of(self, call: ScanCall, num_tokens: int) -> list[Tensor]:
        return [*(t[len(t) - num_tokens :] for t in call.inputs), *call.others]

    def make(self, layer: LayerSchedule) -> "RecurrentMixer":
        return RecurrentMixer(self, layer)

    def why_not(self, feature: Literal["ring", "parents"]) -> str:
        if feature == "parents":
            return ""
        return (
            "a ring gives each rank several parts of the sequence, but "
            f"{self.name} passes its states from part to part in order"
        )


@dataclass
class RecurrentState:
    """One call's state."""

    halos: Tensor  # [., D]: w rows for each halo of this rank
    halo_keys: Tensor | None = None  # [.]: the dropout keys of these rows, if there is dropout
    others: list[Tensor] = field(default_factory=list)  # inputs without tokens


class RecurrentMixer:
    """The recurrence of one layer. It saves the states before each segment of tokens."""

    num_stages = 1

    def __init__(self, spec: RecurrentSpec, layer: LayerSchedule) -> None:
        self.spec = spec
        self.layer = layer
        self.group = layer.group
        self.rank = layer.group.rank()
        self.num_halo = max(1, spec.halo)

    def start(self, x_sD: Tensor, model_call: CallState) -> RecurrentState:
        halos = self._local_docs(model_call.docs, x_sD).halos
        keys_s = model_call.keys_s
        mixing = RecurrentState(halos.collect(x_sD.detach(), self._gather))
        if keys_s is not None:
            mixing.halo_keys = halos.collect(keys_s[:, None], self._gather)[:, 0]
        return mixing

    def mix(self, call: MixerCall[RecurrentState]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield out_1sHV and the states before each segment."""
        inputs = self._project(call)
        if call.policy.projections:
            call.kept_inputs.append([self.layer.store.keep(t, "device") for t in inputs])
        scan = self._make_scan(inputs, call)
        with phase("attention"):
            states = {}
            if scan.docs.graph.num_items:
                states = scan.combine(self._gather(scan.summarize()))
            out_sHV, kept = scan.forward(states)
        yield out_sHV[None], kept

    def join(self, outs: Sequence[Tensor]) -> Tensor:
        (out_1tHV,) = outs
        return out_1tHV[0]

    def mix_backward(
        self,
        call: MixerCall[RecurrentState],
        outputs: deque[StageOutput],
        dy_sD: Tensor,
        grads: GradSum,
    ) -> None:
        states = outputs.popleft().state.fetch()
        kept = call.kept_inputs.popleft() if call.kept_inputs else None
        inputs = [t.fetch() for t in kept] if kept else self._project(call)
        dout_sHV = call.take_dout()
        scan = self._make_scan(inputs, call)
        with phase("attention"):
            maps = None
            if scan.docs.graph.num_items:
                maps = self._gather(scan.summarize_grad(dout_sHV))
            # Inputs become their gradients.
            scan.backward(states, dout_sHV, {} if maps is None else scan.combine_grad(maps))
        self.project_backward(call, inputs, scan.other_grads, dy_sD, grads)

    def _project(self, call: MixerCall[RecurrentState]) -> list[Tensor]:
        with phase("projections"):
            inputs, call.state.others = self.layer.project(call, self._tiles(call))
            return inputs

    def _make_scan(self, inputs: list[Tensor], call: MixerCall[RecurrentState]) -> Scan:
        docs = self._local_docs(call.model_call.docs, inputs[0])
        return self.spec.make_scan(inputs, call.state.others, docs)

    @phase("exchange")
    def _gather(self, own: Tensor) -> Tensor:
        """Return the tensors of all ranks, [c, ...]."""
        gathered = own.new_empty(self.group.size(), *own.shape)
        all_gather(gathered.flatten(0, 1), own.contiguous(), group=self.group)
        return gathered

    # ---- the halo

    def _local_docs(self, docs: Docs, like: Tensor) -> LocalDocs:
        s = docs.starts[-1] // self.group.size()
        w = self.num_halo
        if w not in docs.local:
            docs.local[w] = LocalDocs(docs.starts, self.rank * s, s, w, like.device, docs.parents)
        return docs.local[w]

    def _tiles(self, call: MixerCall[RecurrentState]) -> Tiles:
        """Yield tiles, cut where a document continues a distant one. x starts with the halo."""
        w = self.num_halo
        keys_s = call.model_call.keys_s
        halo_keys = call.state.halo_keys
        halos_fwD = call.state.halos.unflatten(0, (-1, w))
        halo_wD = halos_fwD[0]
        halo_keys_w = None
        docs = self._local_docs(call.model_call.docs, halos_fwD)
        starts = docs.halos.starts
        for tile, tile_tD in self.layer.input_tiles(call):
            cuts = [tile.start, *(a for a in starts if tile.start < a < tile.stop), tile.stop]
            for first, stop in zip(cuts, cuts[1:], strict=False):
                rows = slice(first, stop)
                if first in starts:
                    index = starts.index(first)
                    halo_wD = halos_fwD[index]
                    if halo_keys is not None:
                        halo_keys_w = halo_keys[index * w : (index + 1) * w]
                self.layer.start_tile(call, rows, halo_keys_w)
                x_tD = torch.cat([halo_wD, tile_tD[first - tile.start : stop - tile.start]])
                halo_wD = x_tD[-w:].clone()
                if halo_keys_w is not None and keys_s is not None:
                    halo_keys_w = torch.cat([halo_keys_w, keys_s[rows]])[-w:]
                yield rows, x_tD, replace(call.inputs.tile(rows), ids_t=docs.tile_ids(rows))

    def project_backward(
        self,
        call: MixerCall[RecurrentState],
        douts: list[Tensor],
        dothers: Sequence[Tensor],
        dy_sD: Tensor,
        grads: GradSum,
    ) -> None:
        """Add the gradient through the capture passes to dy."""
        w = self.num_halo
        dhalos = torch.zeros_like(call.state.halos)
        halos = self._local_docs(call.model_call.docs, dhalos).halos

        def grads_of(rows: slice) -> list[Tensor]:
            return [*(d[rows] for d in douts), *(dothers if rows.start == 0 else ())]

        with phase("projections"):
            tiles = self._tiles(call)
            for rows, dx_tD in self.layer.project_backward(call, tiles, grads_of, grads):
                dy_sD[rows] += dx_tD[w:]
                index = bisect_right(halos.starts, rows.start) - 1
                # tokens of the halo that follow its start
                inside = min(w, rows.start - halos.starts[index])
                dy_sD[rows.start - inside : rows.start] += dx_tD[w - inside : w]
                dhalos[index * w + inside : (index + 1) * w] += dx_tD[: w - inside]
            halos.collect_backward(dhalos, dy_sD, self._gather)
