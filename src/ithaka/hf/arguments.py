"""What `long_context` refuses of a trainer's arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sized
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ithaka.config import ConfigError, parse_count

if TYPE_CHECKING:
    from transformers import TrainingArguments

RECOMPUTES = "ithaka's layers already recompute; leave it out"
SAME_DTYPE = "evaluation uses the dtype of training; leave it out"
# TrainingArguments that long_context does not support -> (accepted values, what to do instead).
REFUSED_ARGUMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "deepspeed": ((None,), "ithaka shards the model; leave it out"),
    "fsdp": ((None, False, "", []), "ithaka applies FSDP2; leave it out"),
    "parallelism_config": ((None,), "use ithaka={'cp': ...}"),
    "gradient_checkpointing_kwargs": ((None, {}), RECOMPUTES),
    "activation_checkpointing_kwargs": ((None, {}), RECOMPUTES),
    "activation_offloading": (
        (None, False),
        "the plan decides what to offload; set ithaka={'context': ...}",
    ),
    "fp16": ((False,), "use bf16=True"),
    "fp16_full_eval": ((False,), SAME_DTYPE),
    "bf16_full_eval": ((False,), SAME_DTYPE),
    "torch_compile": ((False,), "compile the MLP with ithaka={'layout': Layout(compile=True)}"),
    "use_liger_kernel": ((False,), "ithaka's loss and layers are already fused; leave it out"),
    "neftune_noise_alpha": (
        (None,),
        "it needs embeddings of full sequences, which no rank has; leave it out",
    ),
    "label_smoothing_factor": (
        (0, 0.0),
        "it needs logits of full sequences, which no rank has; leave it out",
    ),
    "auto_find_batch_size": ((False,), "ithaka={'context': ...} plans for the available memory"),
    "average_tokens_across_devices": (
        (True,),
        "the loss is always averaged over the global batch; use True",
    ),
    "train_sampling_strategy": (
        ("random", "sequential", "group_by_length"),
        "use random or group_by_length",
    ),
    "eval_use_gather_object": ((False,), "leave it out"),
    "use_weighting": ((False,), "it needs probabilities of the full vocabulary; leave it out"),
    "precompute_ref_log_probs": ((False,), "it would run before sharding; leave it out"),
    "sync_ref_model": ((False,), "the reference is a sharded, frozen copy; leave it out"),
    "cast_lm_head_to_fp32": ((False,), "log-probabilities are in float32 already; leave it out"),
    "use_transformers_continuous_batching": ((False,), "use vllm_mode='server' or a rollout_func"),
    "save_on_each_node": (
        (False,),
        "rank 0 writes, and all nodes need a shared file system; leave it out",
    ),
}
ADAMW_8BIT = "adamw_torch_8bit"
# Those of bitsandbytes, replaced by ADAMW_8BIT.
REPLACED_OPTIMIZERS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
# Other values of `optim` that cannot update sharded parameters.
REFUSED_OPTIMIZERS = re.compile(
    "adafactor|(paged_)?(lion|ademamix)(_8bit|_32bit)?|paged_adamw(_32bit)?|rmsprop_bnb.*"
    "|(galore|apollo)_.*|(ada)?lomo"
)
# TRL's trainers -> sets of columns; train_dataset needs all of one set.
COLUMNS = {
    "SFTTrainer": ("text", "messages", "conversations", "prompt, completion", "input_ids"),
    "DPOTrainer": ("chosen, rejected",),
    "KTOTrainer": ("prompt, completion, label", "chosen, rejected"),
    "GRPOTrainer": ("prompt",),
    "RLOOTrainer": ("prompt",),
    "DistillationTrainer": ("prompt",),
}
REFUSED_OBJECTS = {
    "model_init": "pass model instead",
    "compute_loss_func": "write your own loop with ithaka.token_logprobs",
    "compute_metrics": (
        "no rank has logits of full sequences; for other metrics than the loss, use `ithaka "
        "evaluate`"
    ),
    "preprocess_logits_for_metrics": "no rank has logits of full sequences; leave it out",
}


def check_training_arguments(args: TrainingArguments | None) -> None:
    if args is None:
        return
    for name, (accepted, fix) in REFUSED_ARGUMENTS.items():
        value = getattr(args, name, accepted[0])
        if value not in accepted:
            raise ConfigError(f"{name}={value} is not supported by long_context: {fix}")
    optim = optimizer_name(args)
    if REFUSED_OPTIMIZERS.fullmatch(optim):
        rule = "is not supported by long_context: it cannot update sharded parameters"
        fix = f"use adamw_torch, {ADAMW_8BIT}, sgd, adagrad or rmsprop"
        raise ConfigError(f"optim={optim} {rule}; {fix}")
    if optim in (ADAMW_8BIT, *REPLACED_OPTIMIZERS) and not find_spec("torchao"):
        fix = "`pip install torchao`, or use adamw_torch"
        raise ConfigError(f"optim={optim} needs torchao for long_context; {fix}")
    if args.load_best_model_at_end and args.save_only_model:
        rule = "load_best_model_at_end needs complete checkpoints"
        raise ConfigError(f"{rule}; leave out save_only_model")


def optimizer_name(args: TrainingArguments) -> str:
    optim = getattr(args, "optim", "")
    return str(getattr(optim, "value", optim))  # transformers makes it an Enum


def check_context(settings: Mapping[str, Any], args: TrainingArguments | None) -> None:
    """Refuse a plan for shorter rows than the trainer makes."""
    context = settings.get("context")
    num_tokens = parse_count(context) if isinstance(context, str) else context
    for name in ("max_length", "max_completion_length"):
        length = getattr(args, name, None)
        if isinstance(num_tokens, int) and length is not None and num_tokens < length:
            rule = f"ithaka={{'context': {context!r}}} plans for shorter rows than {name}={length}"
            raise ConfigError(f"{rule}; set {name}={num_tokens} too, or leave context out")


def check_objects(arguments: dict[str, Any]) -> None:
    for name, fix in REFUSED_OBJECTS.items():
        if arguments.get(name) is not None:
            raise ConfigError(f"{name} is not supported by long_context; {fix}")
    data = arguments.get("train_dataset")
    if isinstance(data, str):
        fix = "load it with datasets.load_dataset"
        raise ConfigError(f"train_dataset={data!r} is a str; {fix}")
    if isinstance(data, Sized) and not len(data):
        fix = "add some, or check the filter that made it"
        raise ConfigError(f"train_dataset has no rows; {fix}")


def check_columns(arguments: dict[str, Any], trainer_class: type) -> None:
    """Refuse a dataset without the columns that TRL reads."""
    classes = [cls.__name__ for cls in trainer_class.__mro__]
    trainer = next((name for name in classes if name in COLUMNS), None)
    names = getattr(arguments.get("train_dataset"), "column_names", None)
    if trainer is None or not isinstance(names, list):
        return
    args = arguments.get("args")
    options = getattr(args, "dataset_kwargs", None) or {}
    if arguments.get("formatting_func") is not None or options.get("skip_prepare_dataset"):
        return
    needed = [columns.split(", ") for columns in COLUMNS[trainer]]
    if trainer == "SFTTrainer":
        needed[0] = [getattr(args, "dataset_text_field", "text")]
    if not any({*columns} <= {*names} for columns in needed):
        rule = f"train_dataset has the columns {', '.join(names)}, not those that {trainer} needs"
        fix = " or ".join(" and ".join(columns) for columns in needed)
        raise ConfigError(f"{rule}; rename or add {fix}")
