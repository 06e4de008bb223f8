"""`long_context` for the trainers of transformers and TRL.

To a trainer, the ranks of a cp group are one: they get the same batch and count once in gathered
metrics. The loss is divided by the labels of the full step, and gradients are summed over ranks, so
nothing is averaged.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as state_dicts
from torch.optim import Optimizer

from ithaka.checkpoint.safe_load import CompactIndex, load_into, read_index
from ithaka.checkpoint.save import drop_states, plain_moments, trained_weights, unsaved_states
from ithaka.comm.agree import ask_rank_0, raise_on_all_ranks
from ithaka.comm.mesh import Mesh
from ithaka.config import ConfigError, input_error
from ithaka.facts.sizes import IGNORE_INDEX
from ithaka.foreign.hugging_face import mark_as_prepared
from ithaka.hf.arguments import (
    ADAMW_8BIT,
    REPLACED_OPTIMIZERS,
    check_columns,
    check_context,
    check_objects,
    check_training_arguments,
    optimizer_name,
)
from ithaka.hf.rewards import DistillationMixin, DPOMixin, GRPOMixin, KTOMixin, group_processes
from ithaka.inputs.calls import KERNEL_ARGUMENTS
from ithaka.model.logprobs import token_logprobs_and_aux
from ithaka.model.optimizers import adamw8bit_class
from ithaka.model.prefixes import shared_logprobs
from ithaka.parallel import base_model, parallelize
from ithaka.roots.decoder import ParallelOutput
from ithaka.roots.find import check_arguments, find_root
from ithaka.train.step import clip_gradients
from ithaka.weights.load import check_finite

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments
    from transformers.trainer_utils import EvalLoopOutput

SETTINGS = ("cp", "ring", "context", "layout")
STATE_FOLDER = "ithaka"  # in a trainer's checkpoint: sharded weights and optimizer state
UNLABELLED_FILE = "unlabelled_steps"  # in STATE_FOLDER: number of skipped steps without labels
# TRL's trainers -> the mixins that go before LongContext.
TRL_TRAINERS: dict[str, tuple[type, ...]] = {
    "SFTTrainer": (),
    "DPOTrainer": (DPOMixin,),
    "KTOTrainer": (KTOMixin,),
    "GRPOTrainer": (GRPOMixin,),
    "RLOOTrainer": (GRPOMixin,),
    "DistillationTrainer": (DistillationMixin,),
}


def long_context(trainer_class: type) -> type:
    """Return a subclass whose ranks share sequences, of `transformers.Trainer`, one of TRL_TRAINERS
    or a subclass.

    The new class takes one more argument, `ithaka={"cp": 8, "context": "512K"}`: the cp, ring,
    context and layout of `ithaka.parallelize`. `context` defaults to args.max_length; without
    either, nothing is planned.
    """
    import transformers

    if not (isinstance(trainer_class, type) and issubclass(trainer_class, transformers.Trainer)):
        fix = "use transformers.Trainer, trl.SFTTrainer or a subclass"
        raise ConfigError(f"long_context({trainer_class!r}): {fix}")
    if issubclass(trainer_class, LongContext):
        rule = "the class already comes from long_context"
        raise ConfigError(f"long_context({trainer_class.__name__}): {rule}; use it directly")
    classes = trainer_class.__mro__
    trl_classes = [cls.__name__ for cls in classes if cls.__module__.startswith("trl.")]
    known = next((name for name in trl_classes if name in TRL_TRAINERS), None)
    if trl_classes and known is None:
        fix = f"use {', '.join(TRL_TRAINERS)}, or write your own loop with ithaka.token_logprobs"
        reason = ""
        if "RewardTrainer" in trl_classes:
            reason = ", because its head has one output, not a vocabulary"
        raise ConfigError(f"long_context({trl_classes[0]}) is not supported{reason}; {fix}")
    mixins = TRL_TRAINERS[known] if known else ()
    bases = (*mixins, LongContext, trainer_class)
    attributes = {
        "for_trl": bool(trl_classes),
        "rows_per_example": 2 if known == "DPOTrainer" else 1,
    }
    return type(f"LongContext{trainer_class.__name__}", bases, attributes)


Trainer: Any = object  # For mypy; `long_context` sets the real base.


class LongContext(Trainer):
    """Mixin that `long_context` adds in front of a trainer class."""

    for_trl = False
    shares_prefixes = False
    distills = False  # its own loss calls the model
    loss_is_mean = False  # a group's loss is a mean over its rows, to be averaged over groups
    averages_batches = False  # micro-batches have equal weight, whatever their number of labels
    rows_per_example = 1
    args: Any
    optimizer_cls_and_kwargs: Any

    def __init__(
        self, *positional: object, ithaka: Mapping[str, Any] | None = None, **named: object
    ) -> None:
        if not isinstance(ithaka, Mapping | None):
            fix = "use ithaka={'cp': 8}, for example"
            raise ConfigError(f"ithaka={ithaka!r} is not a dictionary of settings; {fix}")
        settings = dict(ithaka or {})
        for name in settings.keys() - {*SETTINGS}:
            fix = f"use {', '.join(SETTINGS)}"
            raise ConfigError(f"ithaka={{{name!r}: ...}} is not a setting; {fix}")
        parameters = inspect.signature(super().__init__).parameters.values()
        names = [param.name for param in parameters if param.kind is param.POSITIONAL_OR_KEYWORD]
        arguments: dict[str, Any] = dict(zip(names, positional, strict=False)) | named
        self._check_arguments(arguments)
        check_context(settings, arguments.get("args"))
        loaded = ["ref_model"]
        if super().__init__.__module__ == "transformers.trainer":
            loaded.insert(0, "model")
        for name in loaded:
            if isinstance(value := arguments.get(name), str):
                fix = "load it with AutoModelForCausalLM.from_pretrained"
                raise ConfigError(f"{name}={value!r} is a str; {fix}")
        model = arguments.get("model")  # or a path or a name, which TRL loads
        if isinstance(model, nn.Module):
            check_arguments(model)  # TRL's trainers read attributes that other models do not have
        own_forward = "forward" in getattr(base_model(model), "__dict__", ())
        super().__init__(*positional, **named)
        check_training_arguments(self.args)
        check_context(settings, self.args)
        self._refuse_launcher()
        if self.loss_is_mean and find_root(self.model).needs_sft_trainer:
            model_type = base_model(self.model).config.model_type
            rule = "is supported by long_context(SFTTrainer) only"
            raise ConfigError(f"model_type={model_type} {rule}; use that")
        self._change_arguments()
        self._parallelize(settings, own_forward)
        self._share_data()

    def _check_arguments(self, arguments: dict[str, Any]) -> None:
        check_training_arguments(arguments.get("args"))
        check_objects(arguments)
        check_columns(arguments, type(self))
        if (arguments.get("optimizers") or (None,))[0] is not None:
            fix = "use optimizer_cls_and_kwargs"
            raise ConfigError(f"optimizers holds parameters from before sharding; {fix}")

    def _change_arguments(self) -> None:
        self.args = copy.copy(self.args)
        # The layers recompute already. transformers 5.23 renamed the argument.
        self.args.gradient_checkpointing = self.args.activation_checkpointing = False
        self.args.average_tokens_across_devices = False  # the loss already covers all ranks
        optim = optimizer_name(self.args)
        if optim in REPLACED_OPTIMIZERS:
            if self.args.process_index == 0:
                rule = f"optim={optim} cannot update shards"
                print(f"{rule}; using {ADAMW_8BIT}, AdamW from torchao", flush=True)
            self.args.optim = ADAMW_8BIT
        if self.for_trl and not self.loss_is_mean and not self.model_accepts_loss_kwargs:
            # As TRL does for vision-language models.
            self.loss_is_mean = True
            self.averages_batches = True

    def _parallelize(self, settings: dict[str, Any], own_forward: bool) -> None:
        """`own_forward`: the model's forward was replaced before the trainer got it."""
        base = base_model(self.model)
        if not any(param.requires_grad for param in self.model.parameters()):
            fix = "call model.requires_grad_(True), or add an adapter"
            raise ConfigError(f"model: no parameter requires a gradient; {fix}")
        if not own_forward:
            vars(base).pop("forward", None)  # TRL's patch for its loss; `_call` replaces it
        with contextlib.suppress(AttributeError):
            base.disable_input_require_grads()  # TRL's hook for gradient checkpointing
        settings.setdefault("context", getattr(self.args, "max_length", None))
        needs_logits = getattr(self, "aux_loss_enabled", None)
        with _router_logits(base.config.get_text_config(), needs_logits):
            parallelize(
                self.model,
                batch=self.args.per_device_train_batch_size * self.rows_per_example,
                dtype="bfloat16" if self.args.bf16 else None,
                reference=getattr(self, "ref_model", None) is not None,
                teacher=getattr(self, "teacher_model", None),
                **settings,
            )

    def _refuse_launcher(self) -> None:
        started = int(os.environ.get("WORLD_SIZE", "1"))
        seen = self.args.world_size
        if seen != started:
            fix = "without GPUs, set use_cpu=True"
            raise ConfigError(f"the trainer sees {seen} of {started} processes; {fix}")
        parallelism = getattr(self.accelerator, "parallelism_config", None)
        features = {
            "DeepSpeed": self.is_deepspeed_enabled,
            "FSDP": self.is_fsdp_enabled,
            "a parallelism_config": parallelism is not None,
            "tensor parallelism": getattr(self.model, "tp_size", None) is not None,
            "nn.DataParallel, which one process with several GPUs would use": self.args.n_gpu > 1,
        }
        for feature, is_on in features.items():
            if is_on:
                rule = f"{feature} is not supported by long_context, which shards the model"
                fix = "start with torchrun or a plain `accelerate launch --multi_gpu`"
                raise ConfigError(f"{rule}; {fix}")

    def _share_data(self) -> None:
        """Give all ranks of a cp group the same batches, and keep accelerate from wrapping the
        model."""
        mesh: Mesh = base_model(self.model).ithaka_mesh
        self.ithaka_mesh = mesh
        mark_as_prepared(self.model)
        self.accelerator.dataloader_config.dispatch_batches = False
        if mesh.cp_size > 1:
            group_processes(self.accelerator, mesh)
            self.gather_function = self.accelerator.gather_for_metrics

    def create_optimizer(self, *args: object) -> Optimizer:
        if optimizer_name(self.args) == ADAMW_8BIT and self.optimizer_cls_and_kwargs is None:
            options = self.get_optimizer_cls_and_kwargs(self.args)[1]
            self.optimizer_cls_and_kwargs = (adamw8bit_class(), options)
        return super().create_optimizer(*args)

    def _move_model_to_device(self, model: PreTrainedModel, device: torch.device) -> None:
        """Nothing to do: FSDP2 moves the shards."""

    # ---- steps without labels are skipped: they neither update nor count

    num_unlabelled = 0  # steps skipped since the start of training

    def set_initial_training_values(self, *args: object, **kwargs: object) -> tuple[Any, ...]:
        """Let only max_steps end the training: skipped steps change the number of epochs."""
        num_epochs, *others = super().set_initial_training_values(*args, **kwargs)
        self._num_epochs = num_epochs
        return sys.maxsize if self.args.max_steps > 0 else num_epochs, *others

    def _init_training_state(
        self, max_steps: int, per_epoch: int, _: int, checkpoint: str | None, trial: object
    ) -> tuple[int, int]:
        """Include skipped steps in the position in the data."""
        super()._init_training_state(max_steps, per_epoch, self._num_epochs, checkpoint, trial)
        self._has_updated = False
        self._checkpoint = checkpoint
        file = Path(checkpoint or "", STATE_FOLDER, UNLABELLED_FILE)
        self.num_unlabelled = int(file.read_text()) if checkpoint and file.is_file() else 0
        epochs, updates = divmod(self.state.global_step + self.num_unlabelled, per_epoch)
        if self.args.ignore_data_skip:
            return epochs, 0
        return epochs, updates * self.args.gradient_accumulation_steps

    def _run_epoch(self, **named: Any) -> None:
        self._blank: list[Any] = []  # a micro-batch of this epoch without labels on any rank
        # Whether any step of this epoch had a label, including steps before a resume.
        is_resumed = named["epoch"] == named["epochs_trained"]
        self._epoch_trains = is_resumed and named["steps_trained_in_current_epoch"] > 0
        super()._run_epoch(**named)

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[Any], int | None]:
        """Return the micro-batches of the next step with a label; none at the end of the epoch."""
        samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        while samples and count == 0:
            if not self.num_unlabelled and self.ithaka_mesh.rank == 0:
                rule = "no rank has a label in these batches; such steps are skipped"
                print(f"step {self.state.global_step + 1}: {rule}", flush=True)
            self.num_unlabelled += 1
            self._blank = samples[:1]
            samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._blank and not samples and not self._epoch_trains:
            labels = "use labels other than -100 (the first of a row does not count)"
            fix = f"{labels}, a longer max_length or another chat template"
            raise ConfigError(f"train_dataset: no row has a label to train on; {fix}")
        self._epoch_trains = True
        if self._blank and samples:
            # The trainer recognizes the short last step of an epoch by its number of micro-batches.
            samples += self._blank * (self.args.gradient_accumulation_steps - len(samples))
        return samples, count

    # ---- a step

    def compute_loss(
        self, model: PreTrainedModel, *args: object, **kwargs: object
    ) -> Tensor | tuple[Tensor, ParallelOutput]:
        call = model if self.distills else partial(self._call, model)
        result = super().compute_loss(call, *args, **kwargs)
        if not model.training:
            return result
        if self.loss_is_mean:
            return result / self.ithaka_mesh.dp_size  # the losses of all groups add up
        if getattr(self, "aux_loss_enabled", False):
            self._metrics["train"]["aux_loss"][-1] *= self.ithaka_mesh.dp_size  # `_call` divided it
        return result

    def _call(
        self, model: PreTrainedModel, *, fused_lm_head: bool = False, **inputs: Any
    ) -> ParallelOutput | SimpleNamespace:
        """Call the model without a trainer's arguments for kernels: position_ids mark documents."""
        model = base_model(model)
        inputs = {name: value for name, value in inputs.items() if name not in KERNEL_ARGUMENTS}
        if not fused_lm_head and torch.is_grad_enabled():
            return model(**inputs)
        labels = inputs["labels"]
        unused = ("use_cache", "num_items_in_batch", "output_router_logits")
        inputs = {name: value for name, value in inputs.items() if name not in unused}
        temperature = getattr(self, "temperature", 1.0)
        if fused_lm_head and temperature != 1:
            inputs["temperature"] = temperature
        compute = shared_logprobs if self.shares_prefixes else token_logprobs_and_aux
        # TRL enables it around some calls.
        with torch.autocast(self.ithaka_mesh.device.type, enabled=False):
            tokens, aux = compute(model, **inputs)
        valid = labels[:, 1:] != IGNORE_INDEX
        if not fused_lm_head:  # evaluation: the mean over this group's rows only
            return ParallelOutput(loss=-tokens.logprobs.sum() / valid.sum().clamp(min=1))
        # The output of TRL's fused head, from which it computes its loss.
        logprobs, entropy, correct, means = (each[:, 1:] for each in tokens)
        if aux is not None and model.training and not self.loss_is_mean:
            aux = aux / self.ithaka_mesh.dp_size  # the losses of all groups add up
        metrics = {"entropy": entropy, "is_top1": correct, "mean_logits": means}
        return SimpleNamespace(log_probs=logprobs, label_mask=valid, aux_loss=aux, **metrics)

    def training_step(self, *args: object, **kwargs: object) -> Tensor:
        """Scale the logged loss: TRL divides a group's by all labels, then averages over ranks."""
        dropout = getattr(base_model(self.model), "ithaka_dropout", None)
        step = self.state.global_step + 1
        if dropout is not None and dropout.step != step:
            dropout.start_step(self.args.seed, step)
        loss = super().training_step(*args, **kwargs)
        return loss * self.ithaka_mesh.dp_size if self.for_trl else loss

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> int | None:
        """Count the valid labels of all groups and micro-steps. None: average by micro-batch."""
        if self.averages_batches:
            return None
        mesh = self.ithaka_mesh
        labelled = [batch for batch in batch_samples if "labels" in batch]
        num_labels = 0
        for batch in labelled:
            is_shifted = "shift_labels" in batch
            labels = batch["shift_labels"] if is_shifted else batch["labels"][..., 1:]
            num_labels += int((labels != IGNORE_INDEX).sum())
        count = torch.tensor(num_labels, device=mesh.device)
        dist.all_reduce(count)
        return int(count) // mesh.cp_size if labelled else None

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return super().get_total_train_batch_size(args) // self.ithaka_mesh.cp_size

    def _clip_grad_norm(self, model: PreTrainedModel) -> Tensor:
        return clip_gradients(model.parameters(), self.args.max_grad_norm, self.ithaka_mesh.device)

    def _get_grad_norm(self, model: PreTrainedModel, grad_norm: Tensor | None = None) -> Tensor:
        if grad_norm is None:
            grad_norm = clip_gradients(model.parameters(), None, self.ithaka_mesh.device)
        is_first = not self._has_updated
        if is_first and not grad_norm.isfinite():  # else the trainer would log a loss of 0
            base = base_model(self.model)
            option = "resume_from_checkpoint" if self._checkpoint else "model"
            class_name = type(base).__name__.removeprefix("FSDP")
            name = str(self._checkpoint or base.name_or_path or class_name)
            check_finite(base, f"{option}={name}", Path(name) if Path(name).is_dir() else None)
        self._has_updated = True
        return grad_norm

    def prediction_step(
        self,
        model: PreTrainedModel,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return super().prediction_step(model, inputs, True, ignore_keys)

    def evaluation_loop(self, *args: object, **kwargs: object) -> EvalLoopOutput:
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            # The root keeps its parameters gathered for a backward.
            base_model(self.model).reshard()

    # ---- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save on every rank: `save_pretrained`, which only rank 0 would call in `_save`, is
        collective."""
        output_dir = output_dir or self.args.output_dir
        if self.args.should_save:
            self._save(output_dir)
        else:
            self.model.save_pretrained(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = {
            "model": trained_weights(base_model(self.model)),
            "moments": plain_moments(self._moments()["state"]),
        }
        dcp.save(state, checkpoint_id=Path(output_dir, STATE_FOLDER))

        def save_scheduler() -> None:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))
            Path(output_dir, STATE_FOLDER, UNLABELLED_FILE).write_text(str(self.num_unlabelled))

        raise_on_all_ranks(save_scheduler if self.args.should_save else lambda: None)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: PreTrainedModel | None = None
    ) -> None:
        if not Path(resume_from_checkpoint, STATE_FOLDER).is_dir():
            rule = f"resume_from_checkpoint={resume_from_checkpoint} has no folder {STATE_FOLDER}"
            fix = "use one that long_context wrote without save_only_model, or from_pretrained"
            raise ConfigError(f"{rule}; {fix}")
        base = base_model(self.model)
        options = state_dicts.StateDictOptions(strict=False)  # without the frozen weights
        weights = trained_weights(base)
        _load_state({"model": weights}, resume_from_checkpoint, _read_index(resume_from_checkpoint))
        state_dicts.set_model_state_dict(base, weights, options=options)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        base = base_model(self.model)
        optimizer = self.optimizer.optimizer
        moments = self._moments()
        states = plain_moments(moments["state"])
        index = _read_index(checkpoint)
        unsaved = unsaved_states(states, index.tensors)
        saved = {name: state for name, state in states.items() if name not in unsaved}
        _load_state({"moments": saved}, checkpoint, index)
        # In torch 2.13 these already alias the optimizer's tensors, but that is not guaranteed.
        state_dicts.set_optimizer_state_dict(base, optimizer, moments)
        drop_states(base, optimizer, unsaved)
        scheduler = torch.load(Path(checkpoint, "scheduler.pt"), weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)
        rates = self.lr_scheduler.get_last_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            # torchao's is a tensor.
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate

    def _moments(self) -> dict[str, Any]:
        optimizer = self.optimizer.optimizer
        return state_dicts.get_optimizer_state_dict(base_model(self.model), optimizer)


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
        reason = str(error).partition(". ")[0]
        rule = f"resume_from_checkpoint={checkpoint} cannot be loaded ({reason})"
        fix = "use the model, adapter and optimizer that wrote it, or an earlier checkpoint"
        raise input_error(f"{rule}; {fix}", error) from error


@contextlib.contextmanager
def _router_logits(config: PreTrainedConfig, needed: bool | None) -> Iterator[None]:
    """Parallelize with the load-balancing loss if TRL, which requests it in each call, adds it.
    None: the configuration, which stays unchanged, decides."""
    configured = getattr(config, "output_router_logits", False)
    if needed is None or needed == configured:
        yield
        return
    config.output_router_logits = needed
    try:
        yield
    finally:
        config.output_router_logits = configured
