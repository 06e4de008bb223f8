"""A decoder layer of known parts (Llama's, and layers like it), with hand-written backwards; shapes as in schedule.py.

After the last stage, one matrix product per tile sums over all heads: the output projection in forward, the gradient at
norm1's output in backward. So rounding does not depend on the number of stages, and backward, which recomputes
x + attention, gets the same bits as forward. Within a tile the residual is summed in fp32, so a layer's output is
rounded once.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ithaka.blocks.experts import LayerExperts
from ithaka.blocks.gated import GatedMlp, MlpActivations, as_gated_mlp
from ithaka.blocks.linear import Linear, as_linear
from ithaka.blocks.tiles import GradSum, apply_norm, graph_backward, norm_backward, run_norm, run_tile, tile_slices
from ithaka.layer.mixer import StageOutput
from ithaka.layer.schedule import LayerSchedule, SavedActivations
from ithaka.layer.stages import HeadSlice, Projection, ProjectionsBackward, join_slots
from ithaka.layer.store import TensorHandle
from ithaka.ops.fused import Positions, add_and_round
from ithaka.phases import MemoryCategory, set_category
from ithaka.sharding.heads import Heads, Stage, flatten_heads


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


@dataclass(eq=False, repr=False)
class StreamedLayer(LayerSchedule):
    """A layer of known parts, with hand-written backwards."""

    parts: LayerParts = field(kw_only=True)

    projects_stages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        softmax: Any = self.mixer
        self.table, self.query_heads, self.kv_heads = softmax.table, softmax.query_heads, softmax.kv_heads
        self.head_dim = softmax.spec.head_dim
        self.mlp = torch.compile(self.parts.mlp) if self.layout.compile else self.parts.mlp
        self.experts = LayerExperts(self.layer, replaces=not self.layout.compile)
        self.q = Projection(self.parts.q_proj, self.parts.q_norm, True, self.head_dim)
        self.k = Projection(self.parts.k_proj, self.parts.k_norm, True, self.head_dim)
        self.v = Projection(self.parts.v_proj, None, False, self.head_dim)
        self._indices: dict[tuple[Heads, int], Tensor | None] = {}

    # ---- forward

    def project(self, saved: SavedActivations, stage: Stage) -> deque[Tensor]:
        kv_heads = None if stage.kv_transfer is None else self.table.kv_transfers[stage.kv_transfer].kv_heads
        slices, c, K = self._head_slices(stage.query_heads, kv_heads), self.group.size(), self.head_dim
        shapes = [(c, len(saved.inputs), part.width // (c * K), K) for part in slices]
        projected = deque(part.linear.weight_ND.new_empty(shape) for part, shape in zip(slices, shapes, strict=True))
        for rows, x_tD in self.input_tiles(saved):
            h_tD, positions = apply_norm(self.parts.norm1, x_tD), self._positions(saved, rows)
            for part, into_csnK in zip(slices, projected, strict=True):
                part.project(h_tD, positions, into_csnK[:, rows])
        return projected

    def _positions(self, saved: SavedActivations, rows: slice) -> Positions:
        return saved.inputs.tile(rows).leaves[0]

    def _head_slices(self, query_heads: Heads, kv_heads: Heads | None) -> list[HeadSlice]:
        """Select heads of q and, unless `kv_heads` is None, of k and v."""
        slices = [HeadSlice.select(self.q, self._head_index(query_heads, self.q))]
        if kv_heads is not None:
            index = self._head_index(kv_heads, self.k)
            slices += [HeadSlice.select(self.k, index), HeadSlice.select(self.v, index)]
        return slices

    def _finish(self, saved: SavedActivations, outputs: Sequence[StageOutput], y_sD: Tensor) -> None:
        gated_mlp, o_proj = self._as_gated_mlp(), self._output_projection(self.query_heads)
        for rows, x_tD, outs_ctnK in self._tiles_with_outputs(saved, outputs):
            sum_tD = o_proj.apply_wide(join_slots(outs_ctnK).flatten(1))
            residual_tD = add_and_round(sum_tD, x_tD)
            if saved.policy.projections:
                residual_tD = set_category(
                    residual_tD.clone() if residual_tD is sum_tD else residual_tD, MemoryCategory.KEPT
                )
                saved.residuals.append(residual_tD)
            if kept := self._add_mlp(sum_tD, residual_tD, gated_mlp, saved, rows):
                saved.mlp.append(kept)
            y_sD[rows] = sum_tD

    def _output_projection(self, heads: Heads) -> Linear:
        return as_linear(self.parts.o_proj).select_heads(self._head_index(heads, self.q), self.head_dim, dim=1)

    def _norm_and_mlp(self, residual_tD: Tensor) -> Tensor:
        return self.mlp(apply_norm(self.parts.norm2, residual_tD)[None]).squeeze(0)

    def _as_gated_mlp(self) -> GatedMlp | None:
        """Call in every pass: hooks and wrappers may be added later."""
        return None if self.layout.compile else as_gated_mlp(self.parts.mlp)

    def _add_mlp(
        self, sum_tD: Tensor, residual_tD: Tensor, gated_mlp: GatedMlp | None, saved: SavedActivations, rows: slice
    ) -> MlpActivations | None:
        """Add the MLP's output to `sum`. If they are kept, return activations for `_mlp_backward_tile`."""
        keep = saved.policy.mlp
        if gated_mlp is not None:
            return gated_mlp.add_to(sum_tD, apply_norm(self.parts.norm2, residual_tD), keep)
        chosen_sLk = saved.call.chosen_sLk
        wanted_tk = None if chosen_sLk is None else chosen_sLk[rows, self.index]
        with self.experts.forward_tile(saved.chosen, wanted_tk):
            kept = run_tile(self._norm_and_mlp, residual_tD) if keep else None
            sum_tD += self._norm_and_mlp(residual_tD) if kept is None else kept[1].detach()
        return kept

    # ---- backward

    def _mlp_backward(
        self, saved: SavedActivations, outputs: Sequence[StageOutput], dy_sD: Tensor, grads: GradSum
    ) -> None:
        """Turn dy into the gradient at x + attention; add weight gradients of the MLP and output projection."""
        gated_mlp, sums, o_proj = self._as_gated_mlp(), GradSum(), self._output_projection(self.query_heads)
        for rows, x_tD, outs_ctnK in self._tiles_with_outputs(saved, outputs):
            dy_tD, out_tN = dy_sD[rows], join_slots(outs_ctnK).flatten(1)
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
            if saved.mlp:
                x_y = saved.mlp.popleft()
            else:
                with self.experts.repeat_tile(saved.chosen, skips_mlp=True):
                    x_y = run_tile(self._norm_and_mlp, residual_tD)
            with self.experts.add_grads_to(grads, is_only_tile=len(dy_tD) == len(saved.inputs)):
                dy_tD += graph_backward(*x_y, params, dy_tD, grads)
            return
        residual_tD, h_tD = run_norm(norm2, residual_tD)
        dh_tD = gated_mlp.backward(h_tD.detach(), dy_tD, grads, saved.mlp)
        norm_backward(dy_tD, norm2, residual_tD, h_tD, dh_tD, grads)

    def output_grad(self, stage: Stage, saved: SavedActivations, dy_sD: Tensor) -> Tensor:
        """Return dout [c, s, n, K] of a stage, from the gradient of the output projection's result."""
        o_proj, c = self._output_projection(stage.query_heads), self.group.size()
        dout_csnK = dy_sD.new_empty(c, len(dy_sD), stage.num_slots, self.head_dim)
        for rows in tile_slices(len(dy_sD), self.layout.tile_tokens):
            self.start_tile(saved, rows)
            dy_dz = dy_sD[rows], o_proj.lora_down_grad(dy_sD[rows])
            if c == 1:
                o_proj.input_grad(*dy_dz, dout_csnK[0, rows].flatten(1), adds=False)
            else:
                dout_tN = o_proj.input_grad(*dy_dz)
                dout_csnK[:, rows] = dout_tN.unflatten(1, (c, -1, self.head_dim)).transpose(0, 1)
        return dout_csnK

    def project_backward(
        self, saved: SavedActivations, head_grads: Sequence[list[TensorHandle]], dy_sD: Tensor, grads: GradSum
    ) -> None:
        """Add the gradient of all heads, through the projections and norm1, to dy."""
        norm1 = self.parts.norm1
        projections = ProjectionsBackward(self._head_slices(self.query_heads, self.kv_heads))
        slices = tile_slices(len(dy_sD), self.layout.tile_tokens)
        tiles = [zip(*(handle.tiles(slices, dim=1) for handle in handles), strict=True) for handles in head_grads]
        for (rows, x_tD), *grads_ctnK in zip(self.input_tiles(saved), *tiles, strict=True):
            x_tD, h_tD = run_norm(norm1, x_tD)
            dh_tD = projections.run_tile(grads_ctnK, h_tD.detach(), self._positions(saved, rows), grads)
            norm_backward(dy_sD[rows], norm1, x_tD, h_tD, dh_tD, grads)
        projections.finish(grads)

    def _head_index(self, heads: Heads, projection: Projection) -> Tensor | None:
        """Return the heads as an index tensor; None if they are all heads of the projection, in order."""
        weight = as_linear(projection.module).weight_ND
        count = len(weight) // projection.head_dim
        if (heads, count) not in self._indices:
            order = flatten_heads(heads)
            in_order = order == list(range(count))
            self._indices[heads, count] = None if in_order else torch.tensor(order, device=weight.device)
        return self._indices[heads, count]
