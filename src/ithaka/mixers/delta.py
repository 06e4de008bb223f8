"""The gated delta rule as a mixer. Shapes as in ops/scan.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ithaka.layer.mixer import ProbedLayer
from ithaka.mixers.recurrent import RecurrentSpec
from ithaka.mixers.scan_call import DeltaTap, ScanCall
from ithaka.ops.delta_rule import DeltaInputs, DeltaRule, run_delta_rule
from ithaka.ops.state_graph import LocalDocs


@dataclass(frozen=True, kw_only=True)
class DeltaSpec(RecurrentSpec):
    """K is the head dim of q and k, V that of v and the output: head_dim and v_head_dim are V."""

    num_key_heads: int
    key_dim: int
    normalizes: bool  # q and k to length 1

    num_token_inputs: ClassVar[int] = 5  # as in DeltaInputs
    tap = DeltaTap
    name = "the gated delta rule"

    @classmethod
    def read(cls, call: ScanCall, layer: ProbedLayer) -> "DeltaSpec":
        inputs = DeltaInputs(*call.inputs)
        (_, J, K) = inputs.k_sJK.shape
        (_, H, V) = inputs.v_sHV.shape
        normalizes = bool(call.options.get("use_qk_l2norm_in_kernel"))
        return cls(
            num_heads=H,
            num_kv_heads=H,
            num_key_heads=J,
            head_dim=V,
            v_head_dim=V,
            key_dim=K,
            scale=K**-0.5,
            normalizes=normalizes,
            halo=call.halo,
        )

    def run_reference(self, tiles: Sequence[list[Tensor]]) -> Tensor:
        inputs = DeltaInputs(*(torch.cat(tensors) for tensors in zip(*tiles, strict=True)))
        return run_delta_rule(inputs, self.normalizes)

    def make_scan(self, inputs: list[Tensor], others: list[Tensor], docs: LocalDocs) -> DeltaRule:
        return DeltaRule(DeltaInputs(*inputs), docs, self.normalizes)
