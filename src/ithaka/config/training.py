"""Settings of training itself: optimizer, loss, steps, profiles and evaluation. See `sections`."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ithaka.config.fields import ConfigError, Section, format_value, import_named, setting

LOSSES = ("cross_entropy", "distill", "dpo")
# -> values of loss.type that use them
LOSS_SETTINGS = {"beta": ("dpo", "distill"), "label_smoothing": ("dpo",)}
LOSS_SETTINGS |= dict.fromkeys(
    ("teacher", "teacher_base", "temperature", "cross_entropy"), ("distill",)
)


@dataclass(frozen=True)
class OptimConfig(Section, name="optim"):
    # adamw8bit: torchao's AdamW with moments in 8 bits, 2.1 instead of 8 bytes per trained
    # parameter. muon: PyTorch's Muon for the matrices of layers, with updates of AdamW's size, and
    # AdamW for the rest.
    name: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    # Peak learning rate.
    lr: float = setting(3e-4, ge=0)
    # AdamW betas and epsilon.
    betas: tuple[float, float] = setting((0.9, 0.95), ge=0, lt=1)
    eps: float = setting(1e-8, gt=0)
    # Applies to matrices only, not to norms and biases.
    weight_decay: float = setting(0.1, ge=0)
    # Learning rate after the warm-up: cosine or linear decay to min_lr_ratio * lr, constant, or wsd
    # (warm-up, stable, decay): constant, then a linear decay over the last cooldown_steps.
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    # Step at which the decay ends. null: train.steps when the run started. Resuming with more steps
    # keeps that value, unless the run ended before its decay began.
    decay_steps: int | None = setting(None, ge=1)
    # Steps of the decay of schedule=wsd. null: a tenth of decay_steps.
    cooldown_steps: int | None = setting(None, ge=1)
    # Steps of linear warm-up from 0 to lr.
    warmup_steps: int = setting(0, ge=0)
    # Final learning rate, as a fraction of lr.
    min_lr_ratio: float = setting(0.1, ge=0, le=1)
    # Factors on the learning rate of parameters whose names match a regular expression; the first
    # match counts: {embed_tokens: 0.1, "mlp.gate.weight|lm_head": 0.5}. A factor of 0 freezes them.
    lr_factors: dict | None = None
    # Gradient clipping: maximum global norm. null: no clipping.
    clip_norm: float | None = setting(1.0, gt=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for pattern, factor in (self.lr_factors or {}).items():
            name = f"optim.lr_factors={format_value({pattern: factor})}"
            if (
                isinstance(factor, bool)
                or not isinstance(factor, int | float)
                or not 0 <= factor < math.inf
            ):
                raise ConfigError(f"{name} has no factor; use a number of at least 0, such as 0.1")
            try:
                re.compile(str(pattern))
            except re.error as error:
                raise ConfigError(
                    f"{name} is not a valid regular expression ({error}); escape it, or use a name"
                ) from None

    def find_lr_factors(self, names: Iterable[str]) -> dict[str, float]:
        """The factor of each parameter in `names`. Refuse a pattern that is not the first match of
        any."""
        patterns = {
            str(pattern): float(factor) for pattern, factor in (self.lr_factors or {}).items()
        }
        matches = {}
        for name in names:
            matching = (each for each in patterns if re.search(each, name))
            matches[name] = next(matching, None)
        if unused := [pattern for pattern in patterns if pattern not in matches.values()]:
            rule = "is not the first match of any trained parameter"
            example = next(iter(matches), "embed_tokens")
            raise ConfigError(
                f"optim.lr_factors={unused[0]} {rule}; use part of a name, such as {example}"
            )
        return {
            name: patterns[match] if match is not None else 1.0 for name, match in matches.items()
        }

    def decay_start(self, end: int) -> int:
        """Step at which the decay of a schedule that ends at step `end` starts."""
        if self.schedule != "wsd":
            return self.warmup_steps
        return max(self.warmup_steps, end - (self.cooldown_steps or math.ceil(end / 10)))


@dataclass(frozen=True)
class LossConfig(Section, name="loss"):
    """What training minimizes. `loss: dpo` is short for `loss: {type: dpo}`."""

    # cross_entropy: next-token prediction. dpo: direct preference optimization, on records with
    # chosen and rejected; its reference is the model without its adapter or, if all parameters are
    # trained, a frozen copy of the initial weights. package.module:function: a custom loss,
    # (tokens, labels) -> one loss per label of a rank. tokens.logprobs and tokens.entropies are
    # differentiable; logits never exist in full. Validation still measures the cross-entropy.
    # distill: the divergence from a teacher at every label, over the full vocabulary; validation as
    # before.
    type: str = "cross_entropy"
    # dpo: weight of the difference from the reference; null is 0.1. distill: the divergence; null
    # or 0 is the forward KL(teacher || model), 1 the reverse KL(model || teacher), between them the
    # generalized Jensen-Shannon divergence.
    beta: float | None = setting(None, ge=0)
    # dpo: assumed fraction of pairs whose answers are swapped (robust DPO; 0: plain DPO).
    label_smoothing: float = setting(0.0, ge=0, lt=0.5)
    # distill: a model with the same vocabulary, as model.path; it keeps its own RoPE, and labels
    # beyond its max_position_embeddings train with the cross-entropy. data: the columns teacher_ids
    # and teacher_logprobs. null: the model without its adapter or, if all parameters are trained, a
    # frozen copy of the initial weights.
    teacher: Path | None = None
    # distill: how the teacher's weights are stored, as adapter.base.
    teacher_base: Literal["bf16", "nf4", "mxfp4"] = "bf16"
    # distill: divides the logits of teacher and model. The loss is not multiplied by its square.
    temperature: float = setting(1.0, gt=0)
    # distill: fraction of the cross-entropy in the loss; the rest is the divergence.
    cross_entropy: float = setting(0.0, ge=0, lt=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.type not in LOSSES and not re.fullmatch(r"\w+(\.\w+)*:\w+", self.type):
            losses = ", ".join(LOSSES)
            raise ConfigError(
                f"loss.type={self.type} is not a loss; use {losses} or package.module:function"
            )
        if self.beta is None and self.type in LOSS_SETTINGS["beta"]:
            object.__setattr__(self, "beta", 0.1 if self.type == "dpo" else 0.0)

    @property
    def is_stored(self) -> bool:
        return str(self.teacher) == "data"

    @property
    def validation_name(self) -> str:
        """What a validation's figure is called: it does not measure a distillation or a custom
        loss."""
        return "loss" if self.type in ("cross_entropy", "dpo") else "cross-entropy"

    @property
    def teacher_path(self) -> Path | None:
        """The model that teaches, if it is another one."""
        return None if self.is_stored else self.teacher

    def import_function(self) -> Callable[..., Any] | None:
        """The custom loss, or None."""
        return (
            None
            if self.type in LOSSES
            else import_named("loss.type", self.type, "function", ("tokens", "labels"))
        )


@dataclass(frozen=True)
class TrainConfig(Section, name="train"):
    # Optimizer steps of the run, including those before a resume.
    steps: int = setting(1000, ge=1, le=10**9)
    # Passes over the data, instead of steps; with several sources, over their total number of
    # tokens. 0.5: half a pass.
    epochs: float | None = setting(None, gt=0)
    # Sequences per data-parallel rank and micro-step.
    batch: int = setting(1, ge=1)
    # Gradient accumulation: micro-steps per optimizer step.
    accumulate: int = setting(1, ge=1)
    # Sequences per optimizer step, over all ranks. Sets accumulate, so that the batch does not
    # depend on the number of GPUs. null: batch x accumulate x data-parallel ranks.
    global_batch: int | None = setting(None, ge=1)
    # Steps between validations. 0: validate only at the end.
    validate_every: int = setting(100, ge=0)
    # Sequences per validation, over all ranks. 0: never validate.
    validate_sequences: int = setting(8, ge=0)
    # Minutes between checkpoints. 0: no checkpoints by time.
    save_minutes: float = setting(15.0, ge=0)
    # Steps between checkpoints, in addition to save_minutes. 0: no checkpoints by step. The last
    # step is always saved.
    save_every: int = setting(0, ge=0)
    # Checkpoints to keep; older ones are deleted.
    keep_last: int = setting(2, ge=1)
    # Also save and keep the checkpoint with the lowest validation loss; the run prints its step,
    # for `ithaka export`.
    keep_best: bool = False
    # Early stopping: validations in a row without a lower loss before the run ends; implies
    # keep_best. 0: never.
    patience: int = setting(0, ge=0)
    # A step with a non-finite or spiking loss or gradient is recomputed. If it fails again: stop,
    # or skip the batch and log its documents; the third skip in a row stops the run.
    bad_step: Literal["stop", "skip"] = "stop"
    # Spike threshold: gradient norm relative to the median of the last 100 steps. null: no spike
    # detection.
    spike: float | None = setting(None, gt=1)
    # Seed of the initial weights and the data order.
    seed: int = setting(0, ge=0, le=2**63 - 1)
    # Apply torch.compile to the layers, instead of ithaka's blocks (docs/models.md). auto: on a
    # GPU, to layers without a block for their MLP.
    compile: bool | Literal["auto"] = "auto"
    # Accumulate gradients in a fixed order: GPU runs are bitwise reproducible, the attention
    # backward is 10 % slower.
    deterministic: bool = False
    # Experiment trackers to log to; each needs its package: [tensorboard, wandb].
    track: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = ()
    # Custom classes, as package.module:Class, called on rank 0 as Class(run_dir, config), with any
    # of the methods on_step(step, metrics), on_evaluation(step, figures), on_save(step, checkpoint)
    # and on_end(status).
    callbacks: tuple[str, ...] = ()
    # Seconds after SIGTERM or SIGUSR1 to finish the step and save; after that the run exits at
    # once, leaving the last checkpoint. By default, Kubernetes, Slurm and torchrun kill after 30
    # seconds.
    grace_s: float = setting(25.0, ge=0)
    # Run directory. null: runs/<date>-<time>. Required for `--resume auto`.
    run_dir: Path | None = None

    def import_callbacks(self) -> dict[str, Callable[..., Any]]:
        """The classes of `callbacks`, by name."""
        arguments = "run_dir", "config"
        return {
            name: import_named("train.callbacks", name, "Class", arguments)
            for name in self.callbacks
        }

    def micro_steps(self, dp: int) -> int:
        """Micro-steps per optimizer step on `dp` data-parallel ranks."""
        per = self.batch * dp
        if self.global_batch is None:
            return self.accumulate
        if self.global_batch % per:
            rule = (
                f"is not a multiple of {per} (train.batch={self.batch} x {dp} data-parallel ranks)"
            )
            near = " or ".join(
                str(per * n) for n in (self.global_batch // per, self.global_batch // per + 1) if n
            )
            raise ConfigError(
                f"train.global_batch={self.global_batch} {rule}; use {near}, or another parallel.cp"
            )
        return self.global_batch // per


@dataclass(frozen=True)
class ProfileConfig(Section, name="profile"):
    # Steps between profiles of rank 0: a trace, a memory map and phase times in the run directory.
    # 0: never.
    every: int = setting(0, ge=0)


@dataclass(frozen=True)
class EvaluateConfig(Section, name="evaluate"):
    """`ithaka evaluate` during training. Results are also written to evaluations/step-N.json."""

    # Steps between evaluations; the last step is always evaluated. 0: never.
    every: int = setting(0, ge=0)
    # Context lengths, which may exceed data.context; the loss is measured at the longest. []:
    # data.context.
    contexts: tuple[int, ...] = setting((), ge=2)
    # Held-out data, as data.path. null: Python's standard library.
    data: Path | None = None
    # Long documents to read.
    documents: int = setting(8, ge=1)
    # Samples per retrieval task, length and depth. 0: none.
    samples: int = setting(2, ge=0)
