"""Small random decoders of any family."""

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel

from ithaka.weights.adapters import auto_class
from models import CONSTRUCTING

# Families without a formula for their shapes, with the values that their configurations need beyond
# `SIZES`.
DECODERS: dict[str, dict] = {
    "gpt_oss": {},
    "gemma2": {},
    "gemma3_text": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4": {},
    "glm4_moe": {},
    "olmo2": {},
    "olmo3": {},
    "smollm3": {},
    "ministral3": {},
    "phi3": {},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4},
    "cohere2": {},
    "exaone4": {},
    "deepseek_v3": {"num_key_value_heads": 8, "head_dim": 8},
    "ernie4_5_moe": {},
    "qwen2_moe": {},
    "starcoder2": {},
}
# Models with the gated delta rule, which do not support rings.
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
DELTA |= {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
HYBRIDS = dict.fromkeys(("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text", "olmo_hybrid"), DELTA)
# Models with Mamba2 or short convolutions. Step sizes reach the limits.
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_n_groups": 2,
}
MAMBA |= {
    "mamba_d_state": 6,
    "ssm_state_size": 6,
    "mamba_expand": 2,
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 4,
}
MAMBA |= {"time_step_min": 0.3, "time_step_limit": (0.3, 1.5), "num_hidden_layers": 2}
CONVOLUTIONS = {
    "num_hidden_layers": 2,
    "layer_types": ["conv", "full_attention"],
    "conv_L_cache": 3,
}
RECURRENT: dict[str, dict] = {
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 20,
    },
    "nemotron_h": {
        **MAMBA,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "moe_shared_expert_intermediate_size": 20,
    },
    "falcon_h1": MAMBA,
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": {**CONVOLUTIONS, "num_dense_layers": 1},
}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "sliding_window": 5,
    "attention_dropout": 0.0,
    "query_pre_attn_scalar": 16,
    # mixture of experts
    "moe_intermediate_size": 24,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_num_experts": 4,
    "moe_k": 2,
    "first_k_dense_replace": 1,
    # multi-head latent attention
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}


def tiny_decoder(family: str, dtype: torch.dtype = torch.float64, **changes) -> PreTrainedModel:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    sizes = {**SIZES, **(DECODERS | HYBRIDS | RECURRENT).get(family, {}), **changes}
    return random_decoder(AutoConfig.for_model(family, **sizes), dtype)


def random_decoder(config: PretrainedConfig, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Return a model with random parameters, including norms and biases; deterministic per
    configuration."""
    config._experts_implementation = "eager"  # grouped_mm, the default for experts, has no fp64
    with CONSTRUCTING:
        model = auto_class(config.model_type).from_config(
            config, dtype=dtype, attn_implementation="eager"
        )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.data = param.data.to(dtype)  # some routers are always fp32
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.copy_((1.0 + 0.3 * noise) if param.dim() == 1 else 0.15 * noise)
    return model.train()
