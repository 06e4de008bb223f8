"""Decoders like Llama, whose layers map to LayerParts: the fast path."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ithaka.blocks.linear import as_linear, is_linear
from ithaka.config import ConfigError
from ithaka.inputs.calls import CheckedCall, count_changes
from ithaka.inputs.positions import check_rope, compute_frequencies
from ithaka.layer.loss import Head, LinearHead
from ithaka.layer.store import Store
from ithaka.layer.streamed import LayerParts, StreamedLayer
from ithaka.layout import ActivationPolicy
from ithaka.ops.fused import Positions
from ithaka.phases import mark_backward, phase
from ithaka.plan.read_config import FAMILIES
from ithaka.plan.shape import AttentionKind
from ithaka.roots.decoder import Decoder
from ithaka.sharding.heads import head_table

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
        pass  # the layers are known

    @property
    def num_heads(self) -> int:
        return self.model.config.num_attention_heads

    @property
    def attention_kinds(self) -> list[AttentionKind]:
        group = self.num_heads // self.model.config.num_key_value_heads
        parts = (map_layer(self.model, index) for index in range(len(self.layers)))
        return [AttentionKind(layer.head_dim, group, layer.window) for layer in parts]

    def make_layer(self, index: int, store: Store, keeps: ActivationPolicy) -> StreamedLayer:
        layer, mesh, layout = self.layers[index], self.mesh, self.layout
        heads = self.num_heads, self.model.config.num_key_value_heads
        table = head_table(*heads, layout.ulysses, layout.heads_per_stage)
        others = mesh.ulysses_group, mesh.ring_group, table, store, layout, keeps, partial(count_changes, layer)
        return StreamedLayer(f"layer {index}", layer, map_layer(self.model, index), *others)

    def run_layers(self, call: CheckedCall) -> Tensor:
        share, rotary = call.share, self.base.rotary_emb
        with phase("embedding"):
            x_sD = mark_backward(self.base.embed_tokens(share.ids_s), "embedding backward")
        frequencies = compute_frequencies(rotary, call.num_positions)
        positions = Positions(share.positions_s, frequencies, rotary.attention_scaling)
        for layer in self.layers:
            x_sD = layer(x_sD, positions, share.docs)
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
