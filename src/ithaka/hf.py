"""Long context in Hugging Face's own trainers, and a plan for a loop of your own.

To a trainer, the ranks of a cp group are one: they get the same batch and count once in what it gathers. The loss is
divided by the labels of the whole step, and gradients arrive summed, so nothing is left to average.
"""

import contextlib
import copy
import dataclasses
import math
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from ithaka import launch
from ithaka.attention.kernels import agree_on_kernel
from ithaka.checkpoint.safe_load import load_into
from ithaka.config import SAVEABLE_MODULES, AdapterConfig, ConfigError, parse_config, parse_count
from ithaka.dist.agree import gather_objects, raise_on_all_ranks
from ithaka.dist.mesh import Mesh, default_device, start_process_group
from ithaka.layer.loss import IGNORE_INDEX
from ithaka.layer.store import Store
from ithaka.layout import Layout, layout_from_config
from ithaka.model import build
from ithaka.model.adapters import find_active_adapter
from ithaka.model.calls import OF_KERNELS
from ithaka.model.logprobs import token_logprobs
from ithaka.plan import show
from ithaka.plan.shape import ModelShape, shape_from_config
from ithaka.preflight.machine import detect_machine, plan_run, uses_planner, weakest_machine
from ithaka.preflight.memory import check_fits, store_host_bytes
from ithaka.preflight.run import Run
from ithaka.train.step import clip_gradients

SETTINGS = ("cp", "ring", "context", "layout")
STATE = "ithaka"  # a checkpoint's folder for what resuming needs besides the trainer's own files
UNLABELLED = "unlabelled_steps"  # a file in it: how many steps without a label were left out
LAYERS_RECOMPUTE = "ithaka's layers recompute already what they need"
# Training arguments that a parallel model cannot honour: the values that are fine, and what to do instead.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "deepspeed": ((None,), "ithaka shards the model itself; leave it out"),
    "fsdp": ((None, False, "", []), "ithaka applies FSDP2 itself; leave it out"),
    "parallelism_config": ((None,), "give ithaka={'cp': ...} instead"),
    "gradient_checkpointing_kwargs": ((None, {}), f"{LAYERS_RECOMPUTE}; leave it out"),
    "activation_offloading": ((None, False), "the plan decides what is kept where: give ithaka={'context': ...}"),
    "fp16": ((False,), "use bf16=True"),
    "fp16_full_eval": ((False,), "evaluation computes as training does"),
    "bf16_full_eval": ((False,), "evaluation computes as training does"),
    "torch_compile": ((False,), "use ithaka={'layout': Layout(compile=True)}, for the MLP"),
    "use_liger_kernel": ((False,), "the loss and the layers are fused already"),
    "neftune_noise_alpha": ((None,), "it changes embeddings of whole sequences, which no rank has"),
    "label_smoothing_factor": ((0, 0.0), "it needs logits of whole sequences, which no rank has"),
    "auto_find_batch_size": ((False,), "give ithaka={'context': ...}, which plans for the memory there is"),
    "average_tokens_across_devices": ((True,), "every label of the global batch counts the same here"),
    "train_sampling_strategy": (("random", "sequential", "group_by_length"), "use random or group_by_length"),
    "eval_use_gather_object": ((False,), "leave it out"),
    "save_on_each_node": ((False,), "rank 0 writes; resuming needs a file system that all nodes share"),
}
REFUSED_OBJECTS = {
    "model_init": "give the model",
    "compute_loss_func": "write your own loop with ithaka.token_logprobs",
    "compute_metrics": "no rank has the logits of whole sequences; `ithaka evaluate` measures more than the loss",
    "preprocess_logits_for_metrics": "no rank has the logits of whole sequences",
}


# ---- one's own loop


def parallelize(
    model: Any,
    cp: int | str | None = None,
    *,
    context: int | str | None = None,
    ring: int | None = None,
    batch: int = 1,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    store: Store | None = None,
) -> Any:
    """`ithaka.model.build.parallelize` and, where a context is given, the plan for it that `ithaka train` would make.

    `context`: tokens of a sequence, 524288 or "512K"; `batch`: sequences per call. Rank 0 prints the plan, and
    `model.ithaka_plan` keeps it; it is None where nothing is planned, as on a CPU. A context that does not fit, or that
    exceeds the model's positions, is refused. `cp`, `ring` and `dtype` (of the computation; None: the model's) are
    taken as given, and "auto" is for the plan to decide: the same as None. `layout` takes the plan's place.

    Attention stays inside a document. `document_ids` mark documents: each change starts one, as does each row. Without
    them, and without an attention_mask, `position_ids` do: a position that is not the one before it plus 1 starts a
    document, transformers' own rule for packed rows. So positions that restart, or jump, cut the sequence; to keep it
    in one piece, pass `document_ids` of zeros. With an attention_mask, positions cut nothing, and padding is a document
    of its own. A label at a document's first token counts, unless it is -100.

    The loss of a call is the mean over the labels of all ranks. Without any (`num_tokens == 0`) it is 0, and backward
    leaves gradients alone: None after `zero_grad()`, so that an optimizer's step changes nothing.
    """
    cp = None if cp == "auto" else cp
    if cp is not None and not isinstance(cp, int):
        raise ConfigError(f'cp={cp!r} is not a number of ranks; use one that divides them, or "auto" with a context')
    build.check_given(model, cp, ring)
    if layout is not None and dtype is not None:
        if layout.dtype not in (None, dtype):
            raise ConfigError(f"dtype={dtype} is not layout.dtype={layout.dtype}; give one of them, or the same")
        layout = dataclasses.replace(layout, dtype=dtype)
    plan = None
    if context is not None:
        work = {"context": _count(context), "batch": batch}
        _check_positions(_base(model).config, work["context"])
        start_process_group()
        run = plan_model_run(model, cp, ring, dtype or str(_base(model).dtype).removeprefix("torch."), layout, **work)
        layout, plan = run.layout, run.plan
        store = store or Store(default_device(), host_bytes=store_host_bytes(run))
        if plan is not None and dist.get_rank() == 0:
            print(show.as_text(plan, str(getattr(_base(model), "name_or_path", "") or "the model")), flush=True)
    elif dtype is not None and layout is None:
        layout = Layout(cp=cp or 1, ring=ring or 1, dtype=dtype)
    model = build.parallelize_model(model, cp, ring=ring, mesh=mesh, layout=layout, store=store)
    _base(model).ithaka_plan = plan
    return model


def plan_model_run(
    model: Any, cp: int | None, ring: int | None, dtype: str, layout: Layout | None, context: int, batch: int
) -> Run:
    """The layout for every rank, checked against what its machine has; `layout`: the user's."""
    num_ranks = dist.get_world_size()
    fixed = {"cp": cp, "ring": ring}
    tree: dict[str, dict[str, Any]] = {
        "model": {"dtype": dtype},
        "data": {"context": context},
        "train": {"batch": batch},
        "parallel": {name: value for name, value in fixed.items() if value},
    }
    config, given = parse_config(tree), {f"parallel.{name}" for name in tree["parallel"]}
    here = raise_on_all_ranks(detect_machine, config, num_ranks, launch.detect_gpu())
    least = raise_on_all_ranks(weakest_machine, gather_objects(here))
    shape = raise_on_all_ranks(shape_from_model, model)
    if default_device().type == "cuda" and uses_planner(config, least):  # else there is no trial to know it by
        least = least.with_kernel(agree_on_kernel("auto", default_device(), torch.bfloat16, shape.head_dim))

    def decided() -> Run:
        settled, plan = (config, None) if layout else plan_run(config, given, least, shape)
        chosen = layout or layout_from_config(settled, shape.num_layers, num_ranks, on_gpu=here.gpu.name != "CPU")
        run = Run(settled, num_ranks, shape, chosen, here, plan)
        check_fits(run)
        return run

    return raise_on_all_ranks(decided)


def shape_from_model(model: Any) -> ModelShape:
    """What the planner needs to know of a model, with the adapter that PEFT put into it."""
    base = _base(model)
    shape = shape_from_config(base.config.to_dict(), str(getattr(base, "name_or_path", "") or "the model"))
    adapter = find_active_adapter(base)
    if adapter is None:
        return shape
    modules = {name: module for name, module in base.named_modules() if adapter in getattr(module, "lora_A", ())}
    ends = dict(zip(SAVEABLE_MODULES, (base.model.embed_tokens, base.lm_head), strict=True))
    saved = (name for name, module in ends.items() if hasattr(module, "modules_to_save"))
    rank = max(module.r[adapter] for module in modules.values())
    return shape.with_adapter(AdapterConfig(rank=rank, targets=tuple(modules), modules_to_save=tuple(saved)))


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _check_positions(config: Any, context: int) -> None:
    """Refuse a context beyond the model's positions. They cannot be moved here: the model is built."""
    reach = config.max_position_embeddings
    if context > reach:
        factor, theta = math.ceil(context / reach), config.rope_parameters["rope_theta"]
        yarn = {"rope_type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": reach}
        raise ConfigError(
            f"context={context} exceeds max_position_embeddings={reach} of the model; use a shorter context, or load "
            f"it with more positions: from_pretrained(..., max_position_embeddings={factor * reach}, "
            f"rope_parameters={yarn}), or a larger rope_theta in its own rope_parameters"
        )


def _count(context: int | str) -> int:
    tokens = parse_count(context) if isinstance(context, str) else context
    if not isinstance(tokens, int) or tokens < 2:
        raise ConfigError(f"context={context!r} is not a number of tokens from 2 on; write 524288 or '512K'")
    return tokens


# ---- trainers


def long_context(trainer_class: type) -> Any:
    """`transformers.Trainer` or `trl.SFTTrainer`, or a class of yours on one of them, for sequences shared by ranks.

    The class takes one argument more, `ithaka={"cp": 8, "context": "512K"}`: what `ithaka.parallelize` takes of cp,
    ring, context and layout. Without a context, SFTTrainer plans for args.max_length.
    """
    import transformers

    if not (isinstance(trainer_class, type) and issubclass(trainer_class, transformers.Trainer)):
        raise ConfigError(
            f"long_context({trainer_class!r}): give transformers.Trainer, trl.SFTTrainer or a class on one"
        )
    of_trl = [cls.__name__ for cls in trainer_class.__mro__ if cls.__module__.startswith("trl.")]
    if of_trl and "SFTTrainer" not in of_trl:
        raise ConfigError(
            f"long_context({of_trl[0]}): of TRL only SFTTrainer is supported; for other losses write your own loop, "
            "as examples/dpo.py and examples/grpo.py"
        )
    return type(f"LongContext{trainer_class.__name__}", (LongContext, trainer_class), {"for_trl": bool(of_trl)})


Trainer: Any = object  # what the class below is put before


class LongContext(Trainer):
    """What `long_context` puts before a trainer's own methods."""

    for_trl = False
    args: Any

    def __init__(self, *positional: Any, ithaka: Mapping[str, Any] | None = None, **named: Any) -> None:
        settings = dict(ithaka or {})
        for name in settings.keys() - {*SETTINGS}:
            raise ConfigError(f"ithaka={{{name!r}: ...}} is not a setting; use {', '.join(SETTINGS)}")
        given = dict(zip(("model", "args"), positional, strict=False)) | named
        _refuse_arguments(given.get("args"))
        for name, way in REFUSED_OBJECTS.items():
            if given.get(name) is not None:
                raise ConfigError(f"{name} cannot go with long_context; {way}")
        if (given.get("optimizers") or (None,))[0] is not None:
            raise ConfigError("optimizers: it would hold parameters from before sharding; use optimizer_cls_and_kwargs")
        # TRL takes a path or a name too, and loads the model itself.
        own_forward = "forward" in getattr(_base(given.get("model")), "__dict__", ())
        super().__init__(*positional, **named)
        _refuse_arguments(self.args)
        self._refuse_launcher()
        self.args = copy.copy(self.args)
        self.args.gradient_checkpointing = False  # the layers do it
        self.args.average_tokens_across_devices = False  # the loss is that of all ranks already
        base = _base(self.model)
        if not own_forward:
            vars(base).pop("forward", None)  # TRL's, for its loss; `_call` takes its place
        with contextlib.suppress(AttributeError):
            base.disable_input_require_grads()  # TRL's, for checkpointing of its own
        context = settings.pop("context", getattr(self.args, "max_length", None))
        dtype = "bfloat16" if self.args.bf16 else None
        batch = self.args.per_device_train_batch_size
        parallelize(self.model, context=context, batch=batch, dtype=dtype, **settings)
        self._share_data()

    def _refuse_launcher(self) -> None:
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if self.args.world_size != started:
            sees = f"the trainer sees {self.args.world_size} of {started} processes"
            raise ConfigError(f"{sees}; on a machine without GPUs give it use_cpu=True")
        for is_on, what in (
            (self.is_deepspeed_enabled, "DeepSpeed"),
            (self.is_fsdp_enabled, "FSDP"),
            (getattr(self.accelerator, "parallelism_config", None) is not None, "a parallelism_config"),
            (getattr(self.model, "_tp_size", None) is not None, "tensor parallelism"),
            (self.args.n_gpu > 1, "nn.DataParallel, which one process with several GPUs would use"),
        ):
            if is_on:
                way = "start with torchrun or a plain `accelerate launch --multi_gpu`, and let ithaka shard the model"
                raise ConfigError(f"{what} cannot go with long_context; {way}")

    def _share_data(self) -> None:
        """Gives every rank of a cp group the same batches, and makes accelerate leave the model as it is."""
        mesh: Mesh = _base(self.model).ithaka_mesh
        self.ithaka_mesh = mesh
        self.model._is_accelerate_prepared = True
        self.accelerator.dataloader_config.dispatch_batches = False
        if mesh.cp_size > 1:
            names, sizes = ("dp_replicate", "cp"), (mesh.dp_size, mesh.cp_size)
            self.accelerator.state.device_mesh = init_device_mesh(mesh.device.type, sizes, mesh_dim_names=names)
            self.accelerator.gather_for_metrics = self._gather_groups
            self.gather_function = self._gather_groups

    def _gather_groups(self, data: Any, use_gather_object: bool = False) -> Any:
        """accelerate's gather_for_metrics with one rank of each cp group."""
        from accelerate.utils import recursively_apply

        state, mesh = self.accelerator.gradient_state, self.ithaka_mesh
        last = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

        def first_of_groups(gathered: Tensor) -> Tensor:
            return gathered.unflatten(0, (mesh.dp_size, mesh.cp_size, -1))[:, 0].flatten(0, 1)[:last]

        return recursively_apply(first_of_groups, self.accelerator.gather(data))

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """FSDP2 does, shard by shard."""

    # ---- steps without a label: left out, so that they neither update nor count

    num_unlabelled = 0  # steps left out since the start of training

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        """Lets max_steps alone end the training: how many epochs it takes depends on what is left out."""
        num_epochs, *others = super().set_initial_training_values(*args, **kwargs)
        self._num_epochs = num_epochs
        return sys.maxsize if self.args.max_steps > 0 else num_epochs, *others

    def _init_training_state(
        self, max_steps: int, updates_per_epoch: int, num_epochs: int, resume_from_checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        """The position in the data counts the steps that were left out."""
        position = super()._init_training_state(
            max_steps, updates_per_epoch, self._num_epochs, resume_from_checkpoint, trial
        )
        file = Path(resume_from_checkpoint or "", STATE, UNLABELLED)
        self.num_unlabelled = int(file.read_text()) if resume_from_checkpoint and file.is_file() else 0
        if not self.num_unlabelled:
            return position
        epochs, updates = divmod(self.state.global_step + self.num_unlabelled, updates_per_epoch)
        return epochs, 0 if self.args.ignore_data_skip else updates * self.args.gradient_accumulation_steps

    def _run_epoch(self, **named: Any) -> None:
        self._blank: list[Any] = []  # a micro-batch of this epoch that no rank has a label in
        # Whether a step of this epoch had a label, perhaps before the training was resumed in it.
        self._epoch_trains = named["epoch"] == named["epochs_trained"] and named["steps_trained_in_current_epoch"] > 0
        super()._run_epoch(**named)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], int | None]:
        """The micro-batches of the next step that has a label on any rank; none at the epoch's end."""
        samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        while samples and count == 0:
            if not self.num_unlabelled and self.ithaka_mesh.rank == 0:
                words = "no rank has a label in these batches; such steps neither update nor count"
                print(f"step {self.state.global_step + 1}: {words}", flush=True)
            self.num_unlabelled += 1
            self._blank = samples[:1]
            samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._blank and not samples and not self._epoch_trains:
            raise ConfigError(
                "train_dataset: no row has a label to train; give labels other than -100 (the first of a row does not "
                "count), a longer max_length or another chat template"
            )
        self._epoch_trains = True
        if self._blank and samples:
            # The trainer counts micro-steps, and knows a step that an epoch's end cuts short by their number.
            samples += self._blank * (self.args.gradient_accumulation_steps - len(samples))
        return samples, count

    # ---- a step

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(partial(self._call, model), *args, **kwargs)

    def _call(self, model: Any, *, fused_lm_head: bool = False, **inputs: Any) -> Any:
        """A call of the model as trainers make it; position_ids tell what kernels are told of documents."""
        inputs = {name: value for name, value in inputs.items() if name not in OF_KERNELS}
        if not fused_lm_head and torch.is_grad_enabled():
            return model(**inputs)
        labels, aside = inputs["labels"], ("use_cache", "num_items_in_batch")
        tokens = token_logprobs(model, **{name: value for name, value in inputs.items() if name not in aside})
        valid = labels[:, 1:] != IGNORE_INDEX
        if not fused_lm_head:  # evaluation: the mean over this group's rows, as if it were alone
            return build.ParallelOutput(loss=-tokens.logprobs.sum() / valid.sum().clamp(min=1))
        # What TRL's own head gives, and its loss is made of.
        return SimpleNamespace(
            log_probs=tokens.logprobs[:, 1:],
            entropy=tokens.entropies[:, 1:],
            is_top1=tokens.correct[:, 1:],
            label_mask=valid,
            aux_loss=None,
        )

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL's loss is that of one group's labels over those of all groups: logged is the mean over ranks."""
        loss = super().training_step(*args, **kwargs)
        return loss * self.ithaka_mesh.dp_size if self.for_trl else loss

    def _get_num_items_in_batch(self, batch_samples: list, device: Any) -> int | None:
        """Labels that count, of all groups and micro-steps."""
        shifted = [
            b["shift_labels"] if "shift_labels" in b else b["labels"][..., 1:] for b in batch_samples if "labels" in b
        ]
        count = torch.tensor(
            sum(int((labels != IGNORE_INDEX).sum()) for labels in shifted), device=self.ithaka_mesh.device
        )
        dist.all_reduce(count)
        return int(count) // self.ithaka_mesh.cp_size if shifted else None

    def get_total_train_batch_size(self, args: Any) -> int:
        return super().get_total_train_batch_size(args) // self.ithaka_mesh.cp_size

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen -= (
            (self.state.num_input_tokens_seen - before) * (self.ithaka_mesh.cp_size - 1) // self.ithaka_mesh.cp_size
        )

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return clip_gradients(model.parameters(), self.args.max_grad_norm, self.ithaka_mesh.device)

    def _get_grad_norm(self, model: Any, grad_norm: Tensor | None = None) -> Tensor:
        return clip_gradients(model.parameters(), None, self.ithaka_mesh.device) if grad_norm is None else grad_norm

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        return super().prediction_step(model, inputs, True, ignore_keys)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            _base(self.model).reshard()  # a root keeps its gathered parameters, expecting a backward

    # ---- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Every rank calls it. `save_pretrained` gathers, so the others take part in what rank 0 does in `_save`."""
        output_dir = output_dir or self.args.output_dir
        if self.args.should_save:
            self._save(output_dir)
        else:
            self.model.save_pretrained(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = {"model": self._weights(), "moments": self._moments()["state"]}
        dcp.save(state, checkpoint_id=Path(output_dir, STATE))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))
            Path(output_dir, STATE, UNLABELLED).write_text(str(self.num_unlabelled))
        dist.barrier()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint, STATE)
        if not folder.is_dir():
            way = "give one that long_context wrote without save_only_model, or load its weights with from_pretrained"
            raise ConfigError(f"resume_from_checkpoint={resume_from_checkpoint} has no folder {STATE}; {way}")
        weights = self._weights()
        load_into({"model": weights}, folder)
        options = StateDictOptions(strict=False)  # frozen weights are not in it
        set_model_state_dict(_base(self.model), weights, options=options)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        moments = self._moments()
        load_into({"moments": moments["state"]}, Path(checkpoint, STATE))
        # In torch 2.13 these are the optimizer's own tensors already; nothing promises that.
        set_optimizer_state_dict(_base(self.model), self.optimizer.optimizer, moments)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, "scheduler.pt"), weights_only=True))
        for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def _weights(self) -> dict[str, Any]:
        """Without frozen ones, which come with the model."""
        base = _base(self.model)
        params = dict(base.named_parameters(remove_duplicate=False))
        return {name: t for name, t in get_model_state_dict(base).items() if params[name].requires_grad}

    def _moments(self) -> dict[str, Any]:
        return get_optimizer_state_dict(_base(self.model), self.optimizer.optimizer)


def _refuse_arguments(args: Any) -> None:
    for name, (fine, way) in REFUSED.items() if args is not None else ():
        value = getattr(args, name, fine[0])
        if value not in fine:
            raise ConfigError(f"{name}={value} cannot go with long_context: {way}")
    if args is not None and args.load_best_model_at_end and args.save_only_model:
        raise ConfigError("load_best_model_at_end needs whole checkpoints; leave save_only_model out")
