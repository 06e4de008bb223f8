"""Small random models of every family, with values that differ per head and per parameter."""

import threading
from types import MethodType

import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import dynamic_rope_update

EXPERTS = ("qwen3_moe", "mixtral")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# while it builds a model, transformers sets the default dtype of all threads
CONSTRUCTING = threading.Lock()


def tiny_config(family: str, heads: int = 4, kv_heads: int = 2, **changes):
    """Llama gets biases and tied embeddings, Mistral a window, Qwen2 one windowed layer, Qwen3 wide
    heads."""
    special = {
        "llama": {"attention_bias": True, "tie_word_embeddings": True},
        "mistral": {"sliding_window": 5},
        "qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        "qwen3": {"head_dim": 16},
        "qwen3_moe": {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    }[family]
    values = {
        "vocab_size": 61,
        "hidden_size": 8 * heads,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return AutoConfig.for_model(family, **{**values, **special, **changes})


def tiny_model(config, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Return a model with random parameters, including norms and biases; deterministic per
    config."""
    config._experts_implementation = "eager"  # grouped_mm, the default for experts, has no fp64
    with CONSTRUCTING:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.copy_((1.0 + 0.3 * noise) if param.dim() == 1 else 0.25 * noise)
    if dtype == torch.float64:
        widen(model)
    return model.train()


def widen(model: PreTrainedModel) -> PreTrainedModel:
    """Compute in fp64 what Hugging Face always computes in fp32, and return the model.

    In RMSNorm, rounding sometimes turns differences of 1e-16 into 1e-8, on either side of a
    comparison. In RoPE, fp32 angles have an error that grows with the position; ithaka's do not.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_wide_norm, module)
    model.model.rotary_emb.forward = MethodType(
        dynamic_rope_update(_wide_rotary), model.model.rotary_emb
    )
    return model


def _wide_norm(self, x: torch.Tensor) -> torch.Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def _wide_rotary(
    self, x: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = position_ids.double()[..., None] * self.inv_freq.double()
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def plain_loss(model: PreTrainedModel, ids, labels, **inputs):
    """Return the cross-entropy of Hugging Face's logits in the model's precision; its own loss
    rounds to fp32."""
    logits = model(input_ids=ids, **inputs).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
