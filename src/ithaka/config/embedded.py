"""`ithaka train` without a file: its settings, and the embedded byte-level models."""

from typing import Any, Literal

# Changes to the defaults for a short run on 2 CPU cores, or on GPUs.
CPU_DEFAULT: dict[str, dict[str, Any]] = {
    "data": {"context": 4096},
    "parallel": {"ranks": 2, "cp": "all"},
    "memory": {"checkpoint": "none"},
    "optim": {"lr": 4e-3, "warmup_steps": 6},
    "train": {"steps": 72, "validate_every": 24, "validate_sequences": 4},
}
GPU_DEFAULT: dict[str, dict[str, Any]] = {
    "model": {"embedded": "base"},
    "data": {"context": 128 * 1024},
    "parallel": {"ranks": "auto", "cp": "all"},
    "optim": {"lr": 1e-3, "warmup_steps": 10},
    "train": {"steps": 100, "validate_every": 25, "validate_sequences": 4},
}

# Byte-level vocabulary: 256 bytes, then these, padded to a multiple of 8.
BOS = 256
EOS = 257
PAD = 258
BYTE_VOCAB = 264


def embedded_model(name: Literal["small", "base"]) -> dict[str, Any]:
    """The Hugging Face `config.json` of an embedded model: small has 2.1M parameters, base 142M.
    Small has two layers and narrow heads, so that attention dominates at 4096 tokens even on a
    CPU."""
    small = name == "small"
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256 if small else 1024,
        "intermediate_size": 1152 if small else 2816,
        "num_hidden_layers": 2 if small else 12,
        "num_attention_heads": 4 if small else 8,
        "num_key_value_heads": 2 if small else 4,
        "head_dim": 32 if small else 128,
        "max_position_embeddings": 2**15 if small else 2**20,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0 if small else 1_000_000.0,
        },
        # at 0.02, small learns nothing in its first minute
        "initializer_range": 0.06 if small else 0.02,
        "tie_word_embeddings": not small,
        "rms_norm_eps": 1e-5,
        "vocab_size": BYTE_VOCAB,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
