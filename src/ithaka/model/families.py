"""Hugging Face module names and quirks; refuses by name what the layer does not compute."""

from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ithaka.config import ConfigError
from ithaka.plan.shape import FAMILIES as PLANNED


@dataclass(frozen=True)
class LayerParts:
    """The parts of one decoder layer: y = x + attention(norm1(x)); y + mlp(norm2(y))."""

    norm1: nn.Module
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    norm2: nn.Module
    mlp: nn.Module
    head_dim: int
    scale: float
    window: int | None


# Mixtures of experts are not planned; their blocks are token-wise like any MLP.
FAMILIES = (*PLANNED, "qwen3_moe", "mixtral")
# Attention takes the config's window in every layer; that of other families has its own, or none.
WINDOW_OF_CONFIG = ("mistral", "mixtral")

# RoPE kinds whose frequencies are fixed; "dynamic" and "longrope" change them with the sequence length.
FIXED_ROPE = ("default", "linear", "llama3", "yarn")


def layer_parts(model: PreTrainedModel, index: int) -> LayerParts:
    layer = model.model.layers[index]
    attn = layer.self_attn
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
        window=_window(model.config, attn),
    )


def _window(config, attn: nn.Module) -> int | None:
    return config.sliding_window if config.model_type in WINDOW_OF_CONFIG else getattr(attn, "sliding_window", None)


def check_supported(model: PreTrainedModel) -> None:
    """Refuses, by name, a model with something the streamed layer would not compute."""
    if isinstance(model, FSDPModule):
        raise ConfigError(
            f"{type(model).__name__} is sharded already; call parallelize once, on the model as Hugging Face loads it"
        )
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"{type(model).__name__} is not a Hugging Face model; pass the PreTrainedModel itself, without a wrapper"
        )
    config = model.config
    if config.model_type not in FAMILIES:
        raise ConfigError(f"model_type={config.model_type} is not a supported family; use one of {', '.join(FAMILIES)}")
    if not hasattr(model, "lm_head"):
        raise ConfigError(f"{type(model).__name__} has no lm_head; load the model with AutoModelForCausalLM")
    if getattr(config, "attention_dropout", 0.0):
        raise ConfigError(
            f"attention_dropout={config.attention_dropout} is not supported; set it to 0.0 in config.json"
        )
    for name in ("output_router_logits", "router_jitter_noise"):
        if getattr(config, name, None):
            raise ConfigError(
                f"{name}={getattr(config, name)} is not supported (the router's auxiliary loss and noise are not "
                "computed); set it to false or 0 in config.json"
            )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in FIXED_ROPE:
        raise ConfigError(f"rope_type={rope} changes with the length; use one of {', '.join(FIXED_ROPE)}")
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p:
            raise ConfigError(f"{name} is dropout with p={module.p}, which is not supported; set it to 0")
    _check_linear(model, "lm_head")  # its weight is used directly, like those of attention
    if model.lm_head.bias is not None:
        raise ConfigError("lm_head has a bias, which is not supported")
    for index in range(config.num_hidden_layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            _check_linear(model, f"model.layers.{index}.self_attn.{name}")


def _check_linear(model: PreTrainedModel, name: str) -> None:
    """Refuses wrappers, such as LoRA's, and quantised kinds: what they add to a weight would be lost."""
    kind = type(model.get_submodule(name))
    if kind is not nn.Linear:
        raise ConfigError(
            f"{name} is a {kind.__name__}; only nn.Linear is supported there: merge adapters, dequantise weights"
        )
