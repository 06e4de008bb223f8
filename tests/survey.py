"""Find out how ithaka handles each causal model type of transformers.

Small random models with every kind of layer are compared in fp64. Only `EXCEPTIONS` knows families,
those with configurations whose fields must fit together.
"""

import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES, ALLOWED_MLP_LAYER_TYPES

from decoders import random_decoder
from general import compare, worst_error
from ithaka.blocks.expert_rows import Gate
from ithaka.checks.verify import InFloat64
from ithaka.config import ConfigError
from ithaka.layer import schedule
from ithaka.layout import Layout
from ithaka.roots.find import find_root
from parity import random_ids

TOKENS = 24  # more than any window or chunk below
EXACT = 1e-10  # the largest error of a gradient, relative to the largest gradient of its layer
MAX_PARAMETERS = 20_000_000

# Sizes by field name, in a configuration or a part of one. Smaller defaults stay.
SIZES: dict[int, list[str]] = {
    0: [
        *(
            "attention_dropout",
            "attn_pdrop",
            "resid_pdrop",
            "embd_pdrop",
            "dropout",
            "hidden_dropout",
            "layerdrop",
        ),
        *(
            "hidden_dropout_prob",
            "attention_probs_dropout_prob",
            "activation_dropout",
            "embedding_dropout",
        ),
        *(
            "residual_dropout",
            "router_jitter_noise",
            "input_jitter_noise",
            "decoder_layerdrop",
            "encoder_layerdrop",
        ),
        *("emb_pdrop", "ffn_dropout"),
    ],
    1: ["topk_group"],
    2: [
        *(
            "num_key_value_heads",
            "num_kv_heads",
            "kv_n_heads",
            "swa_num_key_value_heads",
            "num_query_groups",
        ),
        *(
            "num_experts_per_tok",
            "num_experts_per_token",
            "moe_k",
            "moe_topk",
            "moe_top_k",
            "top_k_experts",
        ),
        *(
            "n_group",
            "num_expert_group",
            "encoder_layers",
            "depth",
            "num_global_layers",
            "num_layers_per_stack",
        ),
        *("linear_num_key_heads", "n_groups", "o_groups", "hc_sinkhorn_iters", "index_topk_blocks"),
        *("index_block_size", "num_kv_shared_layers", "num_encoder_layers", "zero_expert_num"),
    ],
    4: [
        *(
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "moe_num_experts",
            "index_topk",
            "index_n_heads",
        ),
        *(
            "linear_num_value_heads",
            "linear_num_heads",
            "num_encoder_attention_heads",
            "encoder_attention_heads",
        ),
        *("num_codebooks", "rel_extent", "d_rel"),
    ],
    5: [
        "sliding_window",
        "sliding_window_size",
        "local_attention",
        "window_size",
        "attention_window_size",
    ],
    7: ["attention_chunk_size"],
    8: [
        *(
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "decoder_attention_heads",
            "attention_heads",
        ),
        *(
            "swa_num_attention_heads",
            "num_decoder_attention_heads",
            "qk_rope_head_dim",
            "linear_key_head_dim",
        ),
        *(
            "linear_value_head_dim",
            "linear_head_dim",
            "hidden_size_per_layer_input",
            "laurel_rank",
            "state_size",
        ),
        *(
            "mamba_d_state",
            "ssm_state_size",
            "mamba_chunk_size",
            "chunk_size",
            "block_size",
            "rotary_dim",
        ),
        *(
            "router_hidden_size",
            "adapter_rank",
            "floor_scale",
            "time_step_rank",
            "mamba_dt_rank",
            "keep_window_size",
        ),
        *("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"),
    ],
    12: ["v_head_dim", "swa_v_head_dim"],
    16: [
        *(
            "head_dim",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "query_pre_attn_scalar",
            "swa_head_dim",
            "kv_channels",
        ),
        *(
            "dim_head",
            "d_head",
            "d_kv",
            "attention_head_size",
            "o_lora_rank",
            "index_head_dim",
            "mamba_d_head",
        ),
        *("mamba_headdim", "mamba_head_dim", "moe_latent_size"),
    ],
    24: ["moe_intermediate_size", "q_lora_rank", "expert_ffn_hidden_size", "image_size"],
    40: [
        *(
            "intermediate_size",
            "ffn_dim",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "n_inner",
            "d_ff",
            "dff",
            "dim_ff",
        ),
        *(
            "ffn_hidden_size",
            "d_inner",
            "intermediate_size_mlp",
            "dense_intermediate_size",
            "feed_forward_size",
        ),
        *(
            "prefix_dense_intermediate_size",
            "shared_intermediate_size",
            "shared_expert_intermediate_size",
        ),
        *("moe_shared_expert_intermediate_size", "mlp_dim"),
    ],
    264: [
        *(
            "vocab_size",
            "vocab_size_per_layer_input",
            "decoder_vocab_size",
            "audio_vocab_size",
            "shape_vocab_size",
        ),
        *("encoder_hash_byte_group_vocab", "pronunciation_vocab_size"),
    ],
    64: [
        *(
            "hidden_size",
            "n_embd",
            "d_model",
            "embedding_size",
            "emb_dim",
            "embedding_dim",
            "word_embed_proj_dim",
        ),
        *(
            "backbone_hidden_size",
            "mamba_d_ssm",
            "lru_width",
            "hidden_size_global",
            "input_size",
            "out_hidden_size",
        ),
        *(
            "projector_input_dim",
            "projector_output_dim",
            "vision_output_dim",
            "codebook_size",
            "codebook_dim",
        ),
    ],
    512: [
        *("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions"),
        *("max_source_positions", "model_max_length", "context_length"),
    ],
}
SIZE_OF = {name: size for size, names in SIZES.items() for name in names}
# also if the default is None, which does not run
FILLED = ("head_dim", "n_routed_experts", "num_experts_per_tok")
HEADS = SIZE_OF["num_attention_heads"]
HEAD_DIM = SIZE_OF["hidden_size"] // SIZE_OF["num_attention_heads"]
NUM_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "num_decoder_layers",
)
# For models that need more: ungrouped heads, or head dims that divide the hidden size.
FITTINGS: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": HEADS},
    {"num_key_value_heads": HEADS, "head_dim": HEAD_DIM},
]
# Settings that enable further kinds of layers, by the field that a configuration must have; tried
# one by one.
WINDOWS: dict[str, dict[str, Any]] = {
    "sliding_window": {"sliding_window": 5},
    "use_sliding_window": {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "interleave_moe_layer_step": {"interleave_moe_layer_step": 2},
    "enable_moe_block": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
}
# first layers without experts
NUM_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
QWEN4 = {
    f"indexer_{name}": n
    for name, n in dict(n_heads=4, kv_heads=1, head_dim=16, budget=8, compress_ratio=4).items()
}
# Configurations whose fields must fit together, or whose defaults lack a kind of layer.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "reformer": {"is_decoder": True},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "cohere_compass_text": {
        "rope_parameters": dict.fromkeys(
            ("full_attention", "sliding_attention"),
            {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        )
    },
    "qwen4_exp_text": QWEN4 | {"head_dim": 16},
    "qwen4_exp": {"text_config": QWEN4 | {"head_dim": 16}},
    "dots1": {"n_shared_experts": 1},
    "bamba": {"attn_layer_indices": [1]},
    "mllama": {"text_config": {"cross_attention_layers": [1]}},
}


@dataclass
class Finding:
    """One model type. `path`: exact, refused, broken (raises an error) or unknown; `why`: for the
    latter."""

    model_type: str
    path: str
    why: str = ""
    layers: list[dict[str, Any]] = field(default_factory=list)  # the distinct kinds of attention
    layer_types: list[str] = field(default_factory=list)
    experts: int = 0
    error: float | None = None
    worst_error: str = ""  # the loss or parameter with this error
    files: str = ""  # what fails if an exact model is trained from files (survey_files.py)

    @property
    def is_exact(self) -> bool:
        return self.error is not None and self.error <= EXACT


# ---- small models


@dataclass
class Small:
    """Arguments of a small configuration; `decoder` has those of its decoder."""

    model_type: str
    sizes: dict[str, Any]
    decoder: dict[str, Any]

    @property
    def config(self) -> PretrainedConfig:
        config_class = CONFIG_MAPPING[self.model_type]
        fixed = EXCEPTIONS.get(self.model_type, {})
        part = _decoder_part(config_class(**fixed))
        if part is None:
            return config_class(**{**fixed, **self.sizes, **self.decoder})
        return config_class(
            **{**self.sizes, part: self.sizes[part] | self.decoder | fixed.get(part, {})}
        )

    def build(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Build the model and run it once. Raises any error of transformers."""
        config = self.config
        with torch.device("meta"):
            num_parameters = sum(
                param.numel() for param in AutoModelForCausalLM.from_config(config).parameters()
            )
        if num_parameters > MAX_PARAMETERS:
            raise ValueError(f"has {num_parameters / 1e6:.0f}M parameters")
        model = random_decoder(config, dtype)
        with torch.no_grad():
            logits = model(input_ids=random_ids(1, TOKENS), use_cache=False).logits
        if not logits.isfinite().all():
            raise ValueError("logits are not finite")
        return model

    def extend(self, changes: dict[str, Any]) -> "Small":
        """Return it with changes if it still runs, otherwise unchanged."""
        changed = replace(self, decoder=self.decoder | changes)
        if changed == self:
            return self
        try:
            changed.build()
        except Exception:
            return self
        return changed


def _decoder_part(config: PretrainedConfig) -> str | None:
    """Return the name of the part that configures the decoder; None: the configuration itself."""
    with suppress(ValueError):  # several parts could be meant
        own = config.get_text_config()
        return next(
            (name for name in config.sub_configs if getattr(config, name, None) is own), None
        )
    return None


def shrink(config: PretrainedConfig) -> dict[str, Any]:
    """Return arguments that make a configuration and its parts small."""
    small: dict[str, Any] = {}
    values = config.to_dict()
    for name, value in values.items():
        if (
            name in SIZE_OF
            and isinstance(value, int | float | list)
            and not isinstance(value, bool)
        ):
            small[name] = (
                SIZE_OF[name] if isinstance(value, list) else type(value)(min(value, SIZE_OF[name]))
            )
        elif name in FILLED and value is None:
            small[name] = SIZE_OF[name]
        elif name == "pad_token_id" and value is not None:
            small[name] = 0
    if "kv_lora_rank" in values:  # it has several head dims
        small.pop("head_dim", None)
    for name in getattr(config, "sub_configs", {}):
        if isinstance(part := getattr(config, name, None), PretrainedConfig):
            small[name] = {"model_type": part.model_type, **shrink(part)}
    return small


def layer_lists(config: PretrainedConfig) -> tuple[list[str], dict[str, list]]:
    """Return the fields with the number of layers, and those with the kind of each layer."""
    values = config.to_dict()
    counts = [name for name in NUM_LAYERS if isinstance(values.get(name), int)]
    num_layers = values[counts[0]] if counts else 0
    lists = {
        k: v
        for k, v in values.items()
        if isinstance(v, list) and len(v) == num_layers > 1 and _has_kinds(v)
    }
    return counts, {name: kinds for name, kinds in lists.items() if name not in SIZE_OF}


def _has_kinds(values: list) -> bool:
    """Return whether a list has one of a few kinds per layer."""
    return all(isinstance(v, str | int | float | None) for v in values) and len(set(values)) < 5


def set_layers(counts: list[str], lists: dict[str, list], columns: list[tuple]) -> dict[str, Any]:
    """Return arguments for one layer per tuple of kinds; two layers if there is only one tuple."""
    columns = columns * 2 if len(columns) == 1 else columns
    kinds = {name: [column[i] for column in columns] for i, name in enumerate(lists)}
    return kinds | dict.fromkeys(counts, len(columns))


def small_variants(model_type: str) -> list[Small]:
    """Return a small configuration with all kinds of layers that the type allows, and one with
    those of the default.

    Raises the last error if transformers runs neither.
    """
    default = CONFIG_MAPPING[model_type](**EXCEPTIONS.get(model_type, {}))
    part = _decoder_part(default)
    decoder = default if part is None else getattr(default, part)
    counts, lists = layer_lists(decoder)
    kinds = {name: list(dict.fromkeys(values)) for name, values in lists.items()}
    in_use = list(dict.fromkeys(zip(*lists.values(), strict=True))) if lists else [()]
    layers = [
        set_layers(counts, lists, list(product(*kinds.values()))),
        set_layers(counts, lists, in_use),
    ]
    first = _first_that_runs(model_type, default, [*layers, dict.fromkeys(counts, 4)])

    most = first
    for name, changes in WINDOWS.items():
        most = most.extend(changes) if hasattr(decoder, name) else most
    for name in [
        name
        for name in kinds
        if name in ("layer_types", "mlp_layer_types") and name in first.decoder
    ]:
        for kind in [kind for kind in _named_kinds(decoder, name) if kind not in kinds[name]]:
            more = kinds | {name: [*kinds[name], kind]}
            larger = most.extend(set_layers(counts, lists, list(product(*more.values()))))
            most, kinds = (most, kinds) if larger is most else (larger, more)
    for name, changes in EXPERTS.items():
        most = most.extend(changes) if hasattr(decoder, name) else most
    columns = list(product(*kinds.values()))
    dense: dict[str, Any] = {name: len(columns) for name in NUM_DENSE if hasattr(decoder, name)}
    if hasattr(decoder, "mlp_only_layers"):
        dense["mlp_only_layers"] = list(range(len(columns)))
    if dense:
        most = most.extend(set_layers(counts, lists, columns * 2) | dense)
    if "layer_types" not in lists and hasattr(decoder, "sliding_window"):
        first = first.extend({"sliding_window": None})
    return [most] if most == first else [most, first]


def _first_that_runs(
    model_type: str, default: PretrainedConfig, layers: list[dict[str, Any]]
) -> Small:
    error: Exception | None = None
    for changes, fitting in product(layers, FITTINGS):
        small = Small(model_type, shrink(default), changes | fitting)
        try:
            small.build()
            return small
        except Exception as raised:
            error = raised
    assert error is not None
    raise error


def _named_kinds(config: PretrainedConfig, name: str) -> list[str]:
    """Return the kinds of layers that the code of a configuration or its model mentions."""
    allowed = ALLOWED_ATTN_LAYER_TYPES if name == "layer_types" else ALLOWED_MLP_LAYER_TYPES
    with suppress(KeyError):
        classes = type(config), AutoModelForCausalLM._model_mapping[type(config)]
        sources = "".join(inspect.getsource(sys.modules[each.__module__]) for each in classes)
        return [kind for kind in allowed if f'"{kind}"' in sources]
    return []


# ---- findings


def examine(model_type: str) -> Finding:
    """Classify a model type and, if ithaka accepts it, compare it with plain transformers."""
    try:
        variants = small_variants(model_type)
    except Exception as error:
        return examine_structure(model_type, error)
    finding = examine_variant(variants[0])
    # they include those of the second variant
    if len(variants) == 1 or (finding.is_exact and finding.layer_types):
        return finding
    plainer = examine_variant(variants[1])
    if not finding.is_exact:
        only = ", ".join(plainer.layer_types) or "its default configuration"
        return replace(finding, why=finding.why + f"; exact with {only} only" * plainer.is_exact)
    if not plainer.is_exact:
        return plainer
    both = [*finding.layers, *(layer for layer in plainer.layers if layer not in finding.layers)]
    return replace(
        max(finding, plainer, key=lambda each: each.error), layers=both, experts=finding.experts
    )


def examine_variant(variant: Small) -> Finding:
    model_type = variant.model_type
    model = variant.build()
    try:
        layers = read_layers(model)
        error, name = worst_error(compare_wide(variant.build(torch.float64)))
    except ConfigError as refused:
        return Finding(model_type, "refused", shorten(str(refused)))
    except Exception as failed:
        return Finding(model_type, "broken", f"{type(failed).__name__}: {shorten(str(failed))}")
    kinds = list(dict.fromkeys(getattr(model.config, "layer_types", None) or []))
    distinct = [dict(pairs) for pairs in dict.fromkeys(tuple(layer.items()) for layer in layers)]
    return Finding(
        model_type, "exact", "", distinct, kinds, count_experts(model.config), error, name
    )


def examine_structure(model_type: str, error: Exception) -> Finding:
    """Classify a type without a small model: it may still be refused for its modules."""
    try:
        config = CONFIG_MAPPING[model_type](**EXCEPTIONS.get(model_type, {}))
        for name in SIZES[0]:
            if hasattr(config, name):
                setattr(config, name, 0)
        with torch.device("meta"):
            find_root(AutoModelForCausalLM.from_config(config)).check_model()
    except ConfigError as refused:
        return Finding(model_type, "refused", shorten(str(refused)))
    except Exception:
        pass
    return Finding(model_type, "unknown", f"{type(error).__name__}: {shorten(str(error))}")


def shorten(message: str) -> str:
    """Return the problem without the type's name and the fix."""
    problem = re.split(r", so its layers cannot|; use |; set ", message)[0]
    return textwrap.shorten(re.sub(r"^model_type=\S+ ", "", problem), 140, placeholder=" ...")


def count_experts(config: PretrainedConfig) -> int:
    names = ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"]
    return next((n for name in names if isinstance(n := getattr(config, name, None), int)), 0)


def read_layers(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Return the attention of each layer. Raises ConfigError if the model is refused."""
    root = find_root(model)
    root.check_model()
    names = ["head_dim", "v_head_dim", "window", "chunk", "softcap", "has_sinks", "name"]
    root.find_specs(torch.device("cpu"))
    return [{name: getattr(mixer, name, None) for name in names} for mixer in root.mixers]


def compare_wide(model: PreTrainedModel) -> list[dict[str, float]]:
    """Return errors of loss and gradients on 2 ranks, in fp64 throughout.

    Autograd does not enter the caller's modes, so every backward that runs a model's own code
    enters `InFloat64`, except in the probe, which runs in fp32.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            schedule._LayerFunction,
            "backward",
            staticmethod(_widen(schedule._LayerFunction.backward)),
        )
        patch.setattr(Gate, "backward", _widen(Gate.backward))
        return compare(model, Layout(2, tile_tokens=5), tokens=TOKENS)


def _widen(function: Callable) -> Callable:
    def run_wide(*args):
        is_wide = any(
            isinstance(each, torch.Tensor) and each.dtype == torch.float64 for each in args
        )
        with InFloat64() if is_wide else nullcontext():
            return function(*args)

    return run_wide


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(examine(name), flush=True)
