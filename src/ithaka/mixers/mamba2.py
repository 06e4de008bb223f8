"""Mamba2 as a mixer. Shapes as in ops/scan.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ithaka.layer.mixer import ProbedLayer
from ithaka.mixers.recurrent import RecurrentSpec
from ithaka.mixers.scan_call import ScanCall, SsdTap
from ithaka.ops.ssd import Ssd, SsdInputs, run_ssd
from ithaka.ops.state_graph import LocalDocs


@dataclass(frozen=True, kw_only=True)
class SsdSpec(RecurrentSpec):
    """K is the size of the state, V the head dim: head_dim and v_head_dim are V."""

    num_key_heads: int  # groups
    key_dim: int

    num_token_inputs: ClassVar[int] = 5  # as in SsdInputs; D has no tokens
    tap = SsdTap
    name = "Mamba2"

    @classmethod
    def read(cls, call: ScanCall, layer: ProbedLayer) -> "SsdSpec":
        inputs = SsdInputs(*call.inputs)
        (_, J, K) = inputs.k_sJK.shape
        (_, H, V) = inputs.v_sHV.shape
        if call.others[0].shape != (H,):
            shape = tuple(call.others[0].shape)
            raise layer.refuse(f"has a D of shape {shape} in {layer.name}, not one per head")
        return cls(
            num_heads=H,
            num_kv_heads=H,
            num_key_heads=J,
            head_dim=V,
            v_head_dim=V,
            key_dim=K,
            scale=1.0,
            halo=call.halo,
        )

    def run_reference(self, tiles: Sequence[list[Tensor]]) -> Tensor:
        with_tokens = [tile[:5] for tile in tiles]
        inputs = SsdInputs(*map(torch.cat, zip(*with_tokens, strict=True)))
        return run_ssd(inputs, tiles[0][5])

    def make_scan(self, inputs: list[Tensor], others: list[Tensor], docs: LocalDocs) -> Ssd:
        return Ssd(SsdInputs(*inputs), docs, others[0], torch.zeros_like(others[0]))
