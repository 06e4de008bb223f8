"""A short convolution as a mixer: the capture pass, with a halo of earlier tokens, convolves."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ithaka.blocks.tiles import GradSum
from ithaka.layer.mixer import MixerCall, ProbedLayer, StageOutput
from ithaka.layer.schedule import LayerSchedule
from ithaka.mixers.recurrent import RecurrentMixer, RecurrentSpec, RecurrentState
from ithaka.mixers.scan_call import ConvolutionTap, ScanCall


@dataclass(frozen=True)
class ConvolutionSpec(RecurrentSpec):
    """Its output is one head of all channels."""

    num_token_inputs: ClassVar[int] = 1
    tap = ConvolutionTap
    name = "a short convolution"

    @classmethod
    def read(cls, call: ScanCall, layer: ProbedLayer) -> "ConvolutionSpec":
        num_channels = call.inputs[0].shape[-1]
        return cls(1, 1, num_channels, num_channels, 1.0, halo=call.halo)

    def run_reference(self, tiles: Sequence[list[Tensor]]) -> Tensor:
        return torch.cat([y_t1M for (y_t1M,) in tiles])

    def make(self, layer: LayerSchedule) -> "ConvolutionMixer":
        return ConvolutionMixer(self, layer)


class ConvolutionMixer(RecurrentMixer):
    def mix(self, call: MixerCall[RecurrentState]) -> Iterator[tuple[Tensor, Tensor]]:
        (y_s1M,) = self._project(call)
        yield y_s1M[None], y_s1M.new_empty(1)  # it has no state

    def mix_backward(
        self,
        call: MixerCall[RecurrentState],
        outputs: deque[StageOutput],
        dy_sD: Tensor,
        grads: GradSum,
    ) -> None:
        outputs.popleft()
        dout_s1M = call.take_dout()
        self.project_backward(call, [dout_s1M], [], dy_sD, grads)
