"""All kinds of mixers, by the call that they are found by."""

from torch import nn

from ithaka.layer.mixer import MixerSpec, MixerTap
from ithaka.mixers.attention_call import AttentionCall
from ithaka.mixers.convolution import ConvolutionSpec
from ithaka.mixers.delta import DeltaSpec
from ithaka.mixers.mamba2 import SsdSpec
from ithaka.mixers.scan_call import ConvolutionCall, DeltaCall, SsdCall
from ithaka.mixers.softmax import SoftmaxSpec

MIXERS: dict[type, type[MixerSpec]] = {
    AttentionCall: SoftmaxSpec,
    DeltaCall: DeltaSpec,
    SsdCall: SsdSpec,
    ConvolutionCall: ConvolutionSpec,
}


def find_taps(layer: nn.Module) -> list[MixerTap]:
    """A tap for each kind of mixer that the layer may have."""
    taps = [kind.find_tap(layer) for kind in MIXERS.values()]
    return [tap for tap in taps if tap is not None]
