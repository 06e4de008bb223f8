"""Decoders like Llama, whose layers map to LayerParts: the fast path. Shapes as in layer/schedule.py."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ithaka.blocks.linear import as_linear, is_linear
from ithaka.config import ConfigError
from ithaka.inputs.calls import CheckedCall
from ithaka.inputs.positions import check_rope, compute_frequencies
from ithaka.layer.inputs import CallState, LayerInputs
from ithaka.layer.loss import Head, LinearHead
from ithaka.layer.store import Store
from ithaka.layer.streamed import LayerParts, StreamedLayer
from ithaka.layout import ActivationPolicy
from ithaka.mixers.softmax import spec_of_parts
from ithaka.ops.fused import Positions
from ithaka.phases import mark_backward, phase
from ithaka.plan.read_config import FAMILIES
from ithaka.roots.decoder import Decoder

# Modules whose weights are used directly, so nothing may wrap them but LoRA.
FUSED_LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "lm_head")


class FastDecoder(Decoder):
    uses_fast_path = True

    @staticmethod
    def supports(config: Any) -> bool:
        """Whether the layers map to LayerParts."""
        return getattr(config, "model_type", None) in FAMILIES and not getattr(config, "output_router_logits", False)

    def check_model(self) -> None:
        super().check_model()
        check_rope(self.model.config)
        for name, module in self.model.named_modules():
            if name.endswith(FUSED_LINEARS) and not is_linear(module):
                raise ConfigError(
                    f"{name} is a {type(module).__name__}, which is not supported; use nn.Linear, dequantized, with or "
                    "without PEFT's LoRA"
                )
        if as_linear(self.model.lm_head).bias_N is not None:
            raise ConfigError("lm_head has a bias, which is not supported; remove it")

    def find_specs(self, device: torch.device) -> None:
        heads = self.model.config.num_attention_heads, self.model.config.num_key_value_heads
        parts = (map_layer(self.model, index) for index in range(len(self.layers)))
        self.specs = [spec_of_parts(layer, *heads) for layer in parts]

    def make_layer(self, index: int, store: Store, keeps: ActivationPolicy) -> StreamedLayer:
        parts = map_layer(self.model, index)
        return self.start_layer(StreamedLayer, index, store, keeps, self.layout, parts=parts)

    def run_layers(self, call: CheckedCall, state: CallState) -> Tensor:
        share, rotary = call.share, self.base.rotary_emb
        with phase("embedding"):
            x_sD = mark_backward(self.base.embed_tokens(share.ids_s), "embedding backward")
        frequencies = compute_frequencies(rotary, call.num_positions)
        positions = Positions(share.positions_s, frequencies, rotary.attention_scaling)
        inputs = LayerInputs.pack((positions,), {}, (0,), len(positions))
        for layer in self.layers:
            x_sD = layer(x_sD, inputs, state)
        return x_sD

    def make_head(self) -> Head:
        return LinearHead(self.base.norm, as_linear(self.model.lm_head))


def map_layer(model: PreTrainedModel, index: int) -> LayerParts:
    layer, config = model.model.layers[index], model.config
    attn = layer.self_attn
    window_from_config = FAMILIES[config.model_type].window == "all"
    return LayerParts(
        norm1=layer.input_layernorm,
        q_proj=attn.q_proj,
        k_proj=attn.k_proj,
        v_proj=attn.v_proj,
        o_proj=attn.o_proj,
        q_norm=getattr(attn, "q_norm", None),
        k_norm=getattr(attn, "k_norm", None),
        norm2=layer.post_attention_layernorm,
        mlp=layer.mlp,
        head_dim=attn.head_dim,
        scale=attn.scaling,
        window=config.sliding_window if window_from_config else getattr(attn, "sliding_window", None),
    )
