"""Hugging Face's module names: map a decoder layer to LayerParts, and refuse models that the layer does not compute."""

import re
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from ithaka.config import ConfigError
from ithaka.layer.linear import as_linear, is_linear
from ithaka.layer.streamed import LayerParts
from ithaka.model.adapters import check_adapters
from ithaka.model.positions import check_rope
from ithaka.plan.read_config import FAMILIES, VISION_FAMILIES

# Modules whose weights are used directly, so nothing may wrap them but LoRA.
FUSED_LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "lm_head")
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")  # names in config.json
# Modules whose own forward still runs once, so hooks work. "" is the model (no forward pre-hooks).
HOOKABLE = re.compile(r"model\.embed_tokens|model\.layers\.\d+(\.mlp(\..*)?)?|")
# Modules whose own forward still runs, so a replaced one takes effect.
PATCHABLE = re.compile(r"model\.embed_tokens|.*(norm|rotary|mlp).*")
# The same for layers on the general path, which run every module of theirs, once per tile.
GENERAL_HOOKABLE = re.compile(r"model\.(language_model\.)?(embed_tokens|layers\.\d+)|")
GENERAL_PATCHABLE = re.compile(r"model\.(language_model\.)?(embed_tokens|layers\.\d+\..*)|.*rotary.*")


def has_known_layers(model: PreTrainedModel) -> bool:
    """Whether the layers map to LayerParts. Others run as they are, on the general path."""
    if hasattr(model, "ithaka_decoder"):  # already parallelized
        return model.ithaka_decoder is None
    config = model.config
    return getattr(config, "model_type", None) in FAMILIES and not getattr(config, "output_router_logits", False)


def has_encoder(model: Any) -> bool:
    """Whether it is a vision-language model."""
    return getattr(model.config, "model_type", None) in VISION_FAMILIES


def find_decoder(model: Any) -> Any:
    """The base model that has the embeddings, the decoder layers and the last norm."""
    return model.model.language_model if has_encoder(model) else model.model


def find_layers(model: Any) -> Any:
    """The decoder layers, or the blocks of a video transformer, as a ModuleList."""
    base = find_decoder(model) if hasattr(model, "model") else model
    return next(getattr(base, name) for name in ("layers", "blocks", "transformer_blocks") if hasattr(base, name))


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


def check_values(config: Any, source: str) -> None:
    """Refuse an unknown activation, which transformers finds only when it builds the model."""
    for name, value in vars(config).items():
        if name in ACTIVATIONS and isinstance(value, str) and value not in ACT2FN:
            raise ConfigError(f"{name}={value} of {source} is not an activation of transformers; use silu, for example")


def check_supported(model: PreTrainedModel) -> None:
    """Refuse a model with anything that the streamed layer would not compute."""
    if isinstance(model, FSDPModule):
        raise ConfigError("the model is already sharded; call parallelize once, on the model as Hugging Face loads it")
    config = model.config
    if not has_encoder(model) and not isinstance(getattr(getattr(model, "model", None), "layers", None), nn.ModuleList):
        raise ConfigError(
            f"model_type={config.model_type} has no list of decoder layers at model.layers; use a decoder like llama "
            f"or gemma3_text, or with images one of {', '.join(VISION_FAMILIES)} (docs/models.md)"
        )
    if not len(find_layers(model)):
        raise ConfigError("num_hidden_layers=0: the model has no decoder layer to run; use at least 1")
    for name, param in model.named_parameters():
        if not param.is_floating_point() or param.itemsize == 1:
            rule = f"{name} is {param.dtype}, a quantized format that is not supported"
            raise ConfigError(f"{rule}; load the model in bfloat16 or float32, or in bitsandbytes' 4 bits")
    for name in ("attention_dropout", "router_jitter_noise"):
        if value := getattr(config.get_text_config(), name, None):
            raise ConfigError(f"{name}={value} is not supported; set it to 0 or false in config.json")
    known = has_known_layers(model)
    if known:
        check_rope(config)
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and (dtype := buffer.dtype).itemsize < 4:
            raise ConfigError(
                f"{name} is {dtype}, too coarse for long positions; load the model with dtype={dtype} instead of "
                "converting it, or set Layout(dtype=...)"
            )
    check_adapters(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p:
            raise ConfigError(f"{name} is dropout with p={module.p}, which is not supported; set it to 0")
        if re.fullmatch(r"model\.(language_model\.)?layers\.\d+", name) and module._compiled_call_impl is not None:
            raise ConfigError(f"{name} is compiled, which is not supported; use Layout(compile=True) or train.compile")
        if known and name.endswith(FUSED_LINEARS) and not is_linear(module):
            raise ConfigError(
                f"{name} is a {type(module).__name__}, which is not supported; use nn.Linear, dequantized, with or "
                "without PEFT's LoRA"
            )
    if known and as_linear(model.lm_head).bias_N is not None:
        raise ConfigError("lm_head has a bias, which is not supported; remove it")
