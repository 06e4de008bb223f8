"""`long_context` for the trainers of transformers and TRL.

To a trainer, the ranks of a cp group are one: they get the same batch and count once in gathered metrics. The loss is
divided by the labels of the full step, and gradients are summed over ranks, so nothing is averaged.
"""

import contextlib
import copy
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sized
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as state_dicts

from ithaka.checkpoint.safe_load import CompactIndex, load_into, read_index
from ithaka.checkpoint.save import drop_states, plain_moments, trained_weights, unsaved_states
from ithaka.comm.agree import ask_rank_0, raise_on_all_ranks
from ithaka.comm.mesh import Mesh
from ithaka.config import ConfigError, input_error, parse_count
from ithaka.hf.rewards import DistillationMixin, DPOMixin, GRPOMixin, KTOMixin, group_processes
from ithaka.inputs.calls import KERNEL_ARGUMENTS
from ithaka.layer.loss import IGNORE_INDEX
from ithaka.model.logprobs import token_logprobs_and_aux
from ithaka.model.optimizers import adamw8bit_class
from ithaka.model.prefixes import shared_logprobs
from ithaka.parallel import base_model, parallelize
from ithaka.roots.decoder import ParallelOutput
from ithaka.roots.find import check_arguments, find_root
from ithaka.train.step import clip_gradients
from ithaka.weights.load import check_finite

SETTINGS = ("cp", "ring", "context", "layout")
STATE_FOLDER = "ithaka"  # in a trainer's checkpoint: sharded weights and optimizer state
UNLABELLED_FILE = "unlabelled_steps"  # in STATE_FOLDER: number of skipped steps, which had no labels
# TrainingArguments that long_context does not support -> (accepted values, what to do instead).
REFUSED_ARGUMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "deepspeed": ((None,), "ithaka shards the model; leave it out"),
    "fsdp": ((None, False, "", []), "ithaka applies FSDP2; leave it out"),
    "parallelism_config": ((None,), "use ithaka={'cp': ...}"),
    "gradient_checkpointing_kwargs": ((None, {}), "ithaka's layers already recompute; leave it out"),
    "activation_checkpointing_kwargs": ((None, {}), "ithaka's layers already recompute; leave it out"),
    "activation_offloading": ((None, False), "the plan decides what to offload; set ithaka={'context': ...}"),
    "fp16": ((False,), "use bf16=True"),
    "fp16_full_eval": ((False,), "evaluation uses the dtype of training; leave it out"),
    "bf16_full_eval": ((False,), "evaluation uses the dtype of training; leave it out"),
    "torch_compile": ((False,), "compile the MLP with ithaka={'layout': Layout(compile=True)}"),
    "use_liger_kernel": ((False,), "ithaka's loss and layers are already fused; leave it out"),
    "neftune_noise_alpha": ((None,), "it needs embeddings of full sequences, which no rank has; leave it out"),
    "label_smoothing_factor": ((0, 0.0), "it needs logits of full sequences, which no rank has; leave it out"),
    "auto_find_batch_size": ((False,), "ithaka={'context': ...} plans for the available memory"),
    "average_tokens_across_devices": ((True,), "the loss is always averaged over the global batch; use True"),
    "train_sampling_strategy": (("random", "sequential", "group_by_length"), "use random or group_by_length"),
    "eval_use_gather_object": ((False,), "leave it out"),
    "use_weighting": ((False,), "it needs probabilities of the full vocabulary; leave it out"),
    "precompute_ref_log_probs": ((False,), "it would run before sharding; leave it out"),
    "sync_ref_model": ((False,), "the reference is a sharded, frozen copy; leave it out"),
    "cast_lm_head_to_fp32": ((False,), "log-probabilities are in float32 already; leave it out"),
    "use_transformers_continuous_batching": ((False,), "use vllm_mode='server' or a rollout_func"),
    "save_on_each_node": ((False,), "rank 0 writes, and all nodes need a shared file system; leave it out"),
}
ADAMW_8BIT = "adamw_torch_8bit"
REPLACED_OPTIMIZERS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")  # bitsandbytes', replaced by ADAMW_8BIT
# Other values of `optim` that cannot update sharded parameters.
REFUSED_OPTIMIZERS = re.compile(
    "adafactor|(paged_)?(lion|ademamix)(_8bit|_32bit)?|paged_adamw(_32bit)?|rmsprop_bnb.*|(galore|apollo)_.*|(ada)?lomo"
)
# TRL's trainers -> the mixins that go before LongContext.
TRL_TRAINERS: dict[str, tuple[type, ...]] = {
    "SFTTrainer": (),
    "DPOTrainer": (DPOMixin,),
    "KTOTrainer": (KTOMixin,),
    "GRPOTrainer": (GRPOMixin,),
    "RLOOTrainer": (GRPOMixin,),
    "DistillationTrainer": (DistillationMixin,),
}
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
    "compute_metrics": "no rank has logits of full sequences; for other metrics than the loss, use `ithaka evaluate`",
    "preprocess_logits_for_metrics": "no rank has logits of full sequences; leave it out",
}


def long_context(trainer_class: type) -> Any:
    """Return a subclass whose ranks share sequences, of `transformers.Trainer`, one of TRL_TRAINERS or a subclass.

    The new class takes one more argument, `ithaka={"cp": 8, "context": "512K"}`: the cp, ring, context and layout of
    `ithaka.parallelize`. `context` defaults to args.max_length; without either, nothing is planned.
    """
    import transformers

    if not (isinstance(trainer_class, type) and issubclass(trainer_class, transformers.Trainer)):
        raise ConfigError(f"long_context({trainer_class!r}): use transformers.Trainer, trl.SFTTrainer or a subclass")
    if issubclass(trainer_class, LongContext):
        rule = "the class already comes from long_context"
        raise ConfigError(f"long_context({trainer_class.__name__}): {rule}; use it directly")
    trl_classes = [cls.__name__ for cls in trainer_class.__mro__ if cls.__module__.startswith("trl.")]
    known = next((name for name in trl_classes if name in TRL_TRAINERS), None)
    if trl_classes and known is None:
        fix = f"use {', '.join(TRL_TRAINERS)}, or write your own loop with ithaka.token_logprobs"
        reason = ", because its head has one output, not a vocabulary" if "RewardTrainer" in trl_classes else ""
        raise ConfigError(f"long_context({trl_classes[0]}) is not supported{reason}; {fix}")
    bases = (*(TRL_TRAINERS[known] if known else ()), LongContext, trainer_class)
    attributes = {"for_trl": bool(trl_classes), "rows_per_example": 2 if known == "DPOTrainer" else 1}
    return type(f"LongContext{trainer_class.__name__}", bases, attributes)


Trainer: Any = object  # For mypy; `long_context` sets the real base.


class LongContext(Trainer):
    """Mixin that `long_context` adds in front of a trainer class."""

    for_trl = shares_prefixes = distills = False  # distills: its own loss calls the model
    loss_is_mean = False  # whether a group's loss is a mean over its rows, to be averaged over groups
    averages_batches = False  # whether micro-batches have equal weight, whatever their number of labels
    rows_per_example = 1
    args: Any
    optimizer_cls_and_kwargs: Any

    def __init__(self, *positional: Any, ithaka: Mapping[str, Any] | None = None, **named: Any) -> None:
        if not isinstance(ithaka, Mapping | None):
            raise ConfigError(f"ithaka={ithaka!r} is not a dictionary of settings; use ithaka={{'cp': 8}}, for example")
        settings = dict(ithaka or {})
        for name in settings.keys() - {*SETTINGS}:
            raise ConfigError(f"ithaka={{{name!r}: ...}} is not a setting; use {', '.join(SETTINGS)}")
        parameters = inspect.signature(super().__init__).parameters.values()
        names = [param.name for param in parameters if param.kind is param.POSITIONAL_OR_KEYWORD]
        arguments = dict(zip(names, positional, strict=False)) | named
        self._check_arguments(arguments)
        _check_context(settings, arguments.get("args"))
        for name in ("model",) * (super().__init__.__module__ == "transformers.trainer") + ("ref_model",):
            if isinstance(value := arguments.get(name), str):
                raise ConfigError(f"{name}={value!r} is a str; load it with AutoModelForCausalLM.from_pretrained")
        model = arguments.get("model")  # or a path or a name, which TRL loads
        if isinstance(model, nn.Module):
            check_arguments(model)  # TRL's trainers read attributes that other models do not have
        own_forward = "forward" in getattr(base_model(model), "__dict__", ())
        super().__init__(*positional, **named)
        _refuse_arguments(self.args)
        _check_context(settings, self.args)
        self._refuse_launcher()
        if self.loss_is_mean and find_root(self.model).needs_sft_trainer:
            model_type = base_model(self.model).config.model_type
            raise ConfigError(f"model_type={model_type} is supported by long_context(SFTTrainer) only; use that")
        self.args = copy.copy(self.args)
        # The layers recompute already. transformers 5.23 renamed the argument.
        self.args.gradient_checkpointing = self.args.activation_checkpointing = False
        self.args.average_tokens_across_devices = False  # the loss already covers all ranks
        if (optim := _optimizer_name(self.args)) in REPLACED_OPTIMIZERS:
            if self.args.process_index == 0:
                print(f"optim={optim} cannot update shards; using {ADAMW_8BIT}, AdamW from torchao", flush=True)
            self.args.optim = ADAMW_8BIT
        if self.for_trl and not self.loss_is_mean and not self.model_accepts_loss_kwargs:
            self.loss_is_mean = self.averages_batches = True  # as TRL does for vision-language models
        base = base_model(self.model)
        if not any(param.requires_grad for param in self.model.parameters()):
            raise ConfigError(
                "model: no parameter requires a gradient; call model.requires_grad_(True), or add an adapter"
            )
        if not own_forward:
            vars(base).pop("forward", None)  # TRL's patch for its loss; `_call` replaces it
        with contextlib.suppress(AttributeError):
            base.disable_input_require_grads()  # TRL's hook for gradient checkpointing
        settings.setdefault("context", getattr(self.args, "max_length", None))
        dtype = "bfloat16" if self.args.bf16 else None
        batch = self.args.per_device_train_batch_size * self.rows_per_example
        has_copy = getattr(self, "ref_model", None) is not None
        with _router_logits(base.config.get_text_config(), getattr(self, "aux_loss_enabled", None)):
            teacher = getattr(self, "teacher_model", None)
            parallelize(self.model, batch=batch, dtype=dtype, reference=has_copy, teacher=teacher, **settings)
        self._share_data()

    def _check_arguments(self, arguments: dict[str, Any]) -> None:
        _refuse_arguments(arguments.get("args"))
        for name, fix in REFUSED_OBJECTS.items():
            if arguments.get(name) is not None:
                raise ConfigError(f"{name} is not supported by long_context; {fix}")
        data = arguments.get("train_dataset")
        if isinstance(data, str):
            raise ConfigError(f"train_dataset={data!r} is a str; load it with datasets.load_dataset")
        if isinstance(data, Sized) and not len(data):
            raise ConfigError("train_dataset has no rows; add some, or check the filter that made it")
        self._check_columns(arguments)
        if (arguments.get("optimizers") or (None,))[0] is not None:
            raise ConfigError("optimizers holds parameters from before sharding; use optimizer_cls_and_kwargs")

    def _check_columns(self, arguments: dict[str, Any]) -> None:
        """Refuse a dataset without the columns that TRL reads."""
        trainer = next((cls.__name__ for cls in type(self).__mro__ if cls.__name__ in COLUMNS), None)
        names, args = getattr(arguments.get("train_dataset"), "column_names", None), arguments.get("args")
        if trainer is None or not isinstance(names, list) or arguments.get("formatting_func") is not None:
            return
        if (getattr(args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset"):
            return
        needed = [columns.split(", ") for columns in COLUMNS[trainer]]
        if trainer == "SFTTrainer":
            needed[0] = [getattr(args, "dataset_text_field", "text")]
        if not any({*columns} <= {*names} for columns in needed):
            rule = f"train_dataset has the columns {', '.join(names)}, not those that {trainer} needs"
            raise ConfigError(f"{rule}; rename or add {' or '.join(' and '.join(columns) for columns in needed)}")

    def _refuse_launcher(self) -> None:
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if (seen := self.args.world_size) != started:
            raise ConfigError(f"the trainer sees {seen} of {started} processes; without GPUs, set use_cpu=True")
        features = {
            "DeepSpeed": self.is_deepspeed_enabled,
            "FSDP": self.is_fsdp_enabled,
            "a parallelism_config": getattr(self.accelerator, "parallelism_config", None) is not None,
            "tensor parallelism": getattr(self.model, "_tp_size", None) is not None,
            "nn.DataParallel, which one process with several GPUs would use": self.args.n_gpu > 1,
        }
        for feature in (name for name, is_on in features.items() if is_on):
            rule = f"{feature} is not supported by long_context, which shards the model"
            raise ConfigError(f"{rule}; start with torchrun or a plain `accelerate launch --multi_gpu`")

    def _share_data(self) -> None:
        """Give all ranks of a cp group the same batches, and keep accelerate from wrapping the model."""
        mesh: Mesh = base_model(self.model).ithaka_mesh
        self.ithaka_mesh = mesh
        self.model._is_accelerate_prepared = True
        self.accelerator.dataloader_config.dispatch_batches = False
        if mesh.cp_size > 1:
            group_processes(self.accelerator, mesh)
            self.gather_function = self.accelerator.gather_for_metrics

    def create_optimizer(self, *args: Any) -> Any:
        if _optimizer_name(self.args) == ADAMW_8BIT and self.optimizer_cls_and_kwargs is None:
            self.optimizer_cls_and_kwargs = adamw8bit_class(), self.get_optimizer_cls_and_kwargs(self.args)[1]
        return super().create_optimizer(*args)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Nothing to do: FSDP2 moves the shards."""

    # ---- steps without labels are skipped: they neither update nor count

    num_unlabelled = 0  # steps skipped since the start of training

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        """Let only max_steps end the training: the number of epochs depends on the skipped steps."""
        num_epochs, *others = super().set_initial_training_values(*args, **kwargs)
        self._num_epochs = num_epochs
        return sys.maxsize if self.args.max_steps > 0 else num_epochs, *others

    def _init_training_state(self, max_steps: int, per_epoch: int, _: int, checkpoint: Any, trial: Any) -> Any:
        """Include skipped steps in the position in the data."""
        super()._init_training_state(max_steps, per_epoch, self._num_epochs, checkpoint, trial)
        self._has_updated, self._checkpoint = False, checkpoint
        file = Path(checkpoint or "", STATE_FOLDER, UNLABELLED_FILE)
        self.num_unlabelled = int(file.read_text()) if checkpoint and file.is_file() else 0
        epochs, updates = divmod(self.state.global_step + self.num_unlabelled, per_epoch)
        return epochs, 0 if self.args.ignore_data_skip else updates * self.args.gradient_accumulation_steps

    def _run_epoch(self, **named: Any) -> None:
        self._blank: list[Any] = []  # a micro-batch of this epoch without labels on any rank
        # Whether any step of this epoch had a label, including steps before a resume.
        self._epoch_trains = named["epoch"] == named["epochs_trained"] and named["steps_trained_in_current_epoch"] > 0
        super()._run_epoch(**named)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], int | None]:
        """Return the micro-batches of the next step with a label on any rank; none at the end of the epoch."""
        samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        while samples and count == 0:
            if not self.num_unlabelled and self.ithaka_mesh.rank == 0:
                step = self.state.global_step + 1
                print(f"step {step}: no rank has a label in these batches; such steps are skipped", flush=True)
            self.num_unlabelled += 1
            self._blank = samples[:1]
            samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._blank and not samples and not self._epoch_trains:
            raise ConfigError(
                "train_dataset: no row has a label to train on; use labels other than -100 (the first of a row does "
                "not count), a longer max_length or another chat template"
            )
        self._epoch_trains = True
        if self._blank and samples:
            # The trainer recognizes the short last step of an epoch by its number of micro-batches.
            samples += self._blank * (self.args.gradient_accumulation_steps - len(samples))
        return samples, count

    # ---- a step

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().compute_loss(model if self.distills else partial(self._call, model), *args, **kwargs)
        if not model.training:
            return result
        if self.loss_is_mean:
            return result / self.ithaka_mesh.dp_size  # the losses of all groups add up
        if getattr(self, "aux_loss_enabled", False):
            self._metrics["train"]["aux_loss"][-1] *= self.ithaka_mesh.dp_size  # `_call` divided it
        return result

    def _call(self, model: Any, *, fused_lm_head: bool = False, **inputs: Any) -> Any:
        """Call the model with a trainer's arguments, without those for kernels: position_ids mark the documents."""
        model = base_model(model)
        inputs = {name: value for name, value in inputs.items() if name not in KERNEL_ARGUMENTS}
        if not fused_lm_head and torch.is_grad_enabled():
            return model(**inputs)
        labels, unused = inputs["labels"], ("use_cache", "num_items_in_batch", "output_router_logits")
        inputs = {name: value for name, value in inputs.items() if name not in unused}
        if fused_lm_head and (temperature := getattr(self, "temperature", 1.0)) != 1:
            inputs["temperature"] = temperature
        with torch.autocast(self.ithaka_mesh.device.type, enabled=False):  # TRL enables it around some calls
            tokens, aux = (shared_logprobs if self.shares_prefixes else token_logprobs_and_aux)(model, **inputs)
        valid = labels[:, 1:] != IGNORE_INDEX
        if not fused_lm_head:  # evaluation: the mean over this group's rows only
            return ParallelOutput(loss=-tokens.logprobs.sum() / valid.sum().clamp(min=1))
        # The output of TRL's fused head, from which it computes its loss.
        logprobs, entropy, correct, means = (each[:, 1:] for each in tokens)
        if aux is not None and model.training and not self.loss_is_mean:
            aux = aux / self.ithaka_mesh.dp_size  # the losses of all groups add up
        metrics = {"entropy": entropy, "is_top1": correct, "mean_logits": means}
        return SimpleNamespace(log_probs=logprobs, label_mask=valid, aux_loss=aux, **metrics)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Scale the logged loss: TRL divides a group's loss by the labels of all groups, then averages over ranks."""
        dropout, step = getattr(base_model(self.model), "ithaka_dropout", None), self.state.global_step + 1
        if dropout is not None and dropout.step != step:
            dropout.start_step(self.args.seed, step)
        loss = super().training_step(*args, **kwargs)
        return loss * self.ithaka_mesh.dp_size if self.for_trl else loss

    def _get_num_items_in_batch(self, batch_samples: list, device: Any) -> int | None:
        """Count the valid labels of all groups and micro-steps. None: average each micro-batch separately."""
        if self.averages_batches:
            return None
        mesh, labelled = self.ithaka_mesh, [batch for batch in batch_samples if "labels" in batch]
        shifted = (batch["shift_labels"] if "shift_labels" in batch else batch["labels"][..., 1:] for batch in labelled)
        count = torch.tensor(sum(int((labels != IGNORE_INDEX).sum()) for labels in shifted), device=mesh.device)
        dist.all_reduce(count)
        return int(count) // mesh.cp_size if labelled else None

    def get_total_train_batch_size(self, args: Any) -> int:
        return super().get_total_train_batch_size(args) // self.ithaka_mesh.cp_size

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return clip_gradients(model.parameters(), self.args.max_grad_norm, self.ithaka_mesh.device)

    def _get_grad_norm(self, model: Any, grad_norm: Tensor | None = None) -> Tensor:
        norm = clip_gradients(model.parameters(), None, self.ithaka_mesh.device) if grad_norm is None else grad_norm
        if not self._has_updated and not norm.isfinite():  # else the trainer would log a loss of 0
            base, option = base_model(self.model), "resume_from_checkpoint" if self._checkpoint else "model"
            name = str(self._checkpoint or base.name_or_path or type(base).__name__.removeprefix("FSDP"))
            check_finite(base, f"{option}={name}", Path(name) if Path(name).is_dir() else None)
        self._has_updated = True
        return norm

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        return super().prediction_step(model, inputs, True, ignore_keys)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            base_model(self.model).reshard()  # the root keeps its parameters gathered for a backward

    # ---- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save on every rank: `save_pretrained`, which only rank 0 would call in `_save`, is collective."""
        output_dir = output_dir or self.args.output_dir
        if self.args.should_save:
            self._save(output_dir)
        else:
            self.model.save_pretrained(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = {"model": trained_weights(base_model(self.model)), "moments": plain_moments(self._moments()["state"])}
        dcp.save(state, checkpoint_id=Path(output_dir, STATE_FOLDER))

        def save_scheduler() -> None:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))
            Path(output_dir, STATE_FOLDER, UNLABELLED_FILE).write_text(str(self.num_unlabelled))

        raise_on_all_ranks(save_scheduler if self.args.should_save else lambda: None)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not Path(resume_from_checkpoint, STATE_FOLDER).is_dir():
            rule = f"resume_from_checkpoint={resume_from_checkpoint} has no folder {STATE_FOLDER}"
            raise ConfigError(f"{rule}; use one that long_context wrote without save_only_model, or from_pretrained")
        base, options = base_model(self.model), state_dicts.StateDictOptions(strict=False)  # without the frozen weights
        weights = trained_weights(base)
        _load_state({"model": weights}, resume_from_checkpoint, _read_index(resume_from_checkpoint))
        state_dicts.set_model_state_dict(base, weights, options=options)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        base, optimizer = base_model(self.model), self.optimizer.optimizer
        moments = self._moments()
        states = plain_moments(moments["state"])
        index = _read_index(checkpoint)
        unsaved = unsaved_states(states, index.tensors)
        saved = {name: state for name, state in states.items() if name not in unsaved}
        _load_state({"moments": saved}, checkpoint, index)
        # In torch 2.13 these already alias the optimizer's tensors, but that is not guaranteed.
        state_dicts.set_optimizer_state_dict(base, optimizer, moments)
        drop_states(base, optimizer, unsaved)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, "scheduler.pt"), weights_only=True))
        for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate  # torchao's is a tensor

    def _moments(self) -> dict[str, Any]:
        return state_dicts.get_optimizer_state_dict(base_model(self.model), self.optimizer.optimizer)


def _read_index(checkpoint: str) -> CompactIndex:
    """Read a checkpoint's index on rank 0. Collective: an error is raised on all ranks."""

    def read() -> CompactIndex:
        with _loading(checkpoint):
            return read_index(Path(checkpoint, STATE_FOLDER))

    return ask_rank_0(read)


def _load_state(state: dict[str, Any], checkpoint: str, index: CompactIndex) -> None:
    """Fill `state` from a checkpoint. Collective: an error of any rank is raised on all."""

    def fill() -> None:
        with _loading(checkpoint):
            load_into(state, Path(checkpoint, STATE_FOLDER), index)

    raise_on_all_ranks(fill)


@contextlib.contextmanager
def _loading(checkpoint: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        rule = f"resume_from_checkpoint={checkpoint} cannot be loaded ({str(error).partition('. ')[0]})"
        fix = "use the model, adapter and optimizer that wrote it, or an earlier checkpoint"
        raise input_error(f"{rule}; {fix}", error) from error


@contextlib.contextmanager
def _router_logits(config: Any, needed: bool | None) -> Iterator[None]:
    """Parallelize with the load-balancing loss if TRL adds it: TRL requests it in each call, whatever the configuration
    says, which is saved unchanged. None: the configuration decides."""
    configured = getattr(config, "output_router_logits", False)
    if needed is None or needed == configured:
        yield
        return
    config.output_router_logits = needed
    try:
        yield
    finally:
        config.output_router_logits = configured


def _check_context(settings: Mapping[str, Any], args: Any) -> None:
    """Refuse a plan for shorter rows than the trainer makes."""
    context = settings.get("context")
    num_tokens = parse_count(context) if isinstance(context, str) else context
    for name in ("max_length", "max_completion_length"):
        length = getattr(args, name, None)
        if isinstance(num_tokens, int) and length is not None and num_tokens < length:
            rule = f"ithaka={{'context': {context!r}}} plans for shorter rows than {name}={length}"
            raise ConfigError(f"{rule}; set {name}={num_tokens} too, or leave context out")


def _optimizer_name(args: Any) -> str:
    optim = getattr(args, "optim", "")
    return str(getattr(optim, "value", optim))  # transformers makes it an Enum


def _refuse_arguments(args: Any) -> None:
    for name, (accepted, fix) in REFUSED_ARGUMENTS.items() if args is not None else ():
        value = getattr(args, name, accepted[0])
        if value not in accepted:
            raise ConfigError(f"{name}={value} is not supported by long_context: {fix}")
    optim = _optimizer_name(args)
    if REFUSED_OPTIMIZERS.fullmatch(optim):
        rule = f"optim={optim} is not supported by long_context: it cannot update sharded parameters"
        raise ConfigError(f"{rule}; use adamw_torch, {ADAMW_8BIT}, sgd, adagrad or rmsprop")
    if optim in (ADAMW_8BIT, *REPLACED_OPTIMIZERS) and not find_spec("torchao"):
        raise ConfigError(f"optim={optim} needs torchao for long_context; `pip install torchao`, or use adamw_torch")
    if args is not None and args.load_best_model_at_end and args.save_only_model:
        raise ConfigError("load_best_model_at_end needs complete checkpoints; leave out save_only_model")
