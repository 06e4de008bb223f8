"""Private parts of transformers, PEFT, accelerate, TRL and torchao. Imports none of them.

Read in transformers 5.23, PEFT 0.21, accelerate 1.15, TRL 1.16 and torchao 0.18.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

# Methods and attributes of other libraries' classes that ithaka's subclasses replace or read.
# Trainers have callbacks and public methods, but none at these places.
INHERITED = {
    "transformers.Trainer": {
        "_move_model_to_device": "must not move shards",
        "_init_training_state": "the position in the data counts steps without labels",
        "_run_epoch": "where an epoch starts",
        "_get_num_items_in_batch": "labels of all groups, not of all ranks",
        "_clip_grad_norm": "in fp64, also of offloaded gradients",
        "_get_grad_norm": "in fp64; refuses NaN in the first step",
        "_save": "what `save_model` calls on the rank that saves",
        "_save_optimizer_and_scheduler": "shards, by torch.distributed.checkpoint",
        "_load_optimizer_and_scheduler": "as saved",
        "_load_from_checkpoint": "as saved",
        "_load_best_model": "as saved",
    },
    "trl.SFTTrainer": {"_metrics": "the auxiliary loss that was logged last"},
    "trl.DPOTrainer": {
        "_compute_loss": "the reference runs before the model",
        "_metrics": "as in SFTTrainer",
    },
    "trl.KTOTrainer": {
        "_compute_loss": "the reference runs before the model",
        "_metrics": "as in SFTTrainer",
    },
    "trl.GRPOTrainer": {
        "_generate_and_score_completions": "gathers rows by group of ranks",
        "_get_per_token_logps_and_entropies": "without logits",
        "_logs": "their lengths are batches of a group",
        "_metrics": "where a mismatch with the sampler is logged",
    },
    "trl.RLOOTrainer": {
        "_generate_and_score_completions": "gathers rows by group of ranks",
        "_get_per_token_logps_and_entropies": "without logits",
        "_logs": "their lengths are batches of a group",
        "_metrics": "where a mismatch with the sampler is logged",
    },
    "trl.DistillationTrainer": {
        "_compute_loss": "student and teacher without logits",
        "_forward_redirection": "calls a method inside the model's forward, for FSDP1",
        "_generate_and_score_completions": "gathers rows by group of ranks",
        "_logs": "their lengths are batches of a group",
        "_metrics": "where a mismatch with the sampler is logged",
    },
    "torchao.optim.AdamW8bit": {
        "_new_buffer": "blocks of moments within rows",
        "_subclass_zeros": "moments in 8 bits",
    },
}
# Who warns when torchao is imported: about enums that it registers, and GPU kernels.
TORCHAO_LOGGERS = ("torch.utils._pytree", "torchao")


# ---- transformers: configurations and models


def attention_of(config: Any) -> str:
    """The attention that layers choose when they run. transformers has a public setter for models,
    which also checks and loads it, and no public getter."""
    return config._attn_implementation


def set_attention(config: Any, name: str) -> None:
    """Change `attention_of` without checks, and not in the configurations inside this one."""
    config._attn_implementation = name


def init_module(model: Any, module: Any) -> None:
    """Draw a module's parameters and compute its buffers as `model`, a PreTrainedModel, does. The
    public `init_weights` does so for all modules."""
    model._init_weights(module)


def mark_as_initialized(param: Any) -> None:
    """Keep `init_module` from drawing a parameter."""
    param._is_hf_initialized = True


def set_weight_conversions(model: Any, transforms: Sequence[Any]) -> None:
    """The conversions that `save_pretrained` reverts, which `from_pretrained` sets."""
    model._weight_conversions = list(transforms)


def unexpected_keys_to_ignore(model: Any) -> Collection[str]:
    """Patterns of stored names that the model does not read, as `from_pretrained` knows them."""
    return model._keys_to_ignore_on_load_unexpected or ()


def recorded_outputs(model: Any) -> dict[str, Any]:
    """What the model can return of its modules, by name. Not all models have any."""
    return model._can_record_outputs or {}


def replace_deepstack(model: Any, add: Callable[..., Any]) -> None:
    """Replace the function that adds an encoder's features to the tokens, if the model has it."""
    if hasattr(model, "_deepstack_process"):
        model._deepstack_process = add


# ---- transformers: mixtures of experts


def has_gate_function(experts: type) -> bool:
    """Whether a class was made by transformers' decorator for experts, which has no base class."""
    return hasattr(experts, "_apply_gate")


def gate_function(experts: Any) -> Callable[..., Any]:
    """The step between the two matmuls of a gated mixture."""
    return experts._apply_gate


def has_default_gate(experts: Any) -> bool:
    """Whether that step is transformers' usual one: activation times up."""
    return type(experts)._apply_gate.__name__ == "_default_apply_gate"


# ---- PEFT


def enabled_adapters(model: Any) -> list[Any]:
    """PEFT's enabled modules: adapters, and wrappers of modules_to_save."""
    return [
        module for module in model.modules() if getattr(module, "_disable_adapters", None) is False
    ]


def disable_adapter(adapter: Any, is_disabled: bool) -> None:
    """Disable or enable one of them. PEFT's own method would also change requires_grad, which
    FSDP2 does not expect."""
    adapter._disable_adapters = is_disabled


# ---- accelerate and TRL


def mark_as_prepared(model: Any) -> None:
    """Keep accelerate from wrapping the model, for which it has no setting."""
    model._is_accelerate_prepared = True


def set_vllm_weights(generation: Any, weights: Callable[..., Iterator[Any]]) -> None:
    """Set what TRL sends to its vLLM server, as (name, tensor). Its own gathers with FSDP1 or
    DeepSpeed."""
    generation._iter_named_params = weights
