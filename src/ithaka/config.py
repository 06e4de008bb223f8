"""The configuration: frozen dataclasses, YAML, dotted overrides, and errors that say what to do.

Every instance is valid: each section converts and checks its own fields when it is made, also by
`dataclasses.replace`. Checks that look at files or at the number of ranks are in `ithaka.train.preflight`.
This file imports no torch.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import difflib
import glob
import itertools
import math
import operator
import os
import re
import shlex
import tempfile
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import yaml

from ithaka.exits import ExitCode, TransientError, is_transient

# Of a run directory, stored in its config.yaml. 1: without a number; 2: plan.json has what each layer keeps.
CONFIG_FORMAT = 2


class ConfigError(ValueError):
    """Something the user can put right: names the field, its value, the rule it breaks and the way out."""

    exit_code = ExitCode.WRONG_INPUT


def input_error(words: str, error: BaseException) -> ConfigError | TransientError:
    """The exception for an input that `error` kept from being read: transient, or for the user to put right."""
    return TransientError(words) if is_transient(error) else ConfigError(words)


_LIMITS = {"ge": "at least", "le": "at most", "gt": "more than", "lt": "less than"}  # functions of `operator`


def setting(default: Any, **limits: float) -> Any:
    """A field with limits (ge=1, lt=2), which do not apply to None or to words."""
    return field(default=default, metadata=limits)


class Section:
    """Base of the sections: converts and checks every field."""

    def __post_init__(self) -> None:
        section, hints = type(self).__name__.removesuffix("Config").lower(), typing.get_type_hints(type(self))
        section = {"source": "data.sources", "rope": "model.rope", "entry": "curriculum"}.get(section, section)
        for entry in dataclasses.fields(self):  # type: ignore[arg-type]
            name, value, hint = f"{section}.{entry.name}", getattr(self, entry.name), hints[entry.name]
            try:
                value = _as(value, hint)
            except ValueError:
                raise ConfigError(f"{name}={format_value(value)} is not accepted; use {_describe(hint)}") from None
            for number in value if isinstance(value, tuple) else (value,):
                for limit, bound in entry.metadata.items() if isinstance(number, int | float) else ():
                    if not getattr(operator, limit)(number, bound):
                        raise ConfigError(f"{name}={number} is out of range; use {_LIMITS[limit]} {bound}")
            object.__setattr__(self, entry.name, value)


@dataclass(frozen=True)
class RopeConfig(Section):
    """model.rope: what is null is as the model has it, or derived. All but type and theta as Hugging Face names it."""

    # How positions are stretched (Hugging Face: rope_type).
    type: Literal["default", "linear", "llama3", "yarn", "longrope"] | None = None
    # Base of the wavelengths (Hugging Face: rope_theta).
    theta: float | None = setting(None, gt=1)
    # By how much: linear, llama3 and yarn need it. Of longrope, null: new positions / original ones.
    factor: float | None = setting(None, ge=1)
    # Positions before the stretch, for llama3, yarn and longrope.
    original_max_position_embeddings: int | None = setting(None, ge=1)
    # Of llama3: wavelengths above original / low are stretched, those below original / high are not. null: 1 and 4.
    low_freq_factor: float | None = setting(None, gt=0)
    high_freq_factor: float | None = setting(None, gt=0)
    # Of yarn: dimensions that turn less than beta_slow times are stretched, those above beta_fast are not. null: 1 and
    # 32.
    beta_slow: float | None = setting(None, gt=0)
    beta_fast: float | None = setting(None, gt=0)
    # Of longrope: by how much each frequency is stretched, head_dim / 2 numbers: long_factor in a batch with positions
    # beyond the original ones, short_factor in others.
    short_factor: tuple[float, ...] | None = setting(None, gt=0)
    long_factor: tuple[float, ...] | None = setting(None, gt=0)
    # Of yarn and longrope: scales queries and keys. null: 0.1 ln(factor) + 1, sqrt(1 + ln(factor) / ln(original)).
    attention_factor: float | None = setting(None, gt=0)


@dataclass(frozen=True)
class ModelConfig(Section):
    # A Hugging Face directory with weights, or a config.json to train from random ones. null: the embedded model.
    path: Path | None = None
    # Which embedded model to train when path is null.
    embedded: Literal["small", "base"] = "small"
    # Dtype of the computation. auto: bfloat16 (with float32 master weights) on a GPU, float32 on CPU.
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    # Where the tokenizer (data.tokenizer) has more tokens than the model: add rows to its embeddings, each the mean of
    # the others. Only for tokens added to the model's own tokenizer: another one's ids mean other tokens.
    resize_embeddings: bool = False
    # Positions beyond those the model was made for: {theta: 8.0e6}, or {type: yarn, factor: 16}. null: as it has them.
    rope: RopeConfig | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rope, dict):
            _check_names(self.rope, RopeConfig, "model.rope.")
            object.__setattr__(self, "rope", RopeConfig(**self.rope))
        super().__post_init__()


# The linear modules that an adapter may stand beside, as all families name them, and those that may be trained whole.
LAYER_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SAVEABLE_MODULES = ("embed_tokens", "lm_head")


@dataclass(frozen=True)
class AdapterConfig(Section):
    """LoRA, with PEFT's meaning of each setting. Everything else is frozen."""

    # Rank of the adapters (PEFT: r).
    rank: int = setting(16, ge=1)
    # An adapter's output is scaled by alpha / rank (PEFT: lora_alpha).
    alpha: float = setting(32, gt=0)
    # Scale it by alpha / sqrt(rank) instead (PEFT: use_rslora).
    rslora: bool = False
    # Modules with an adapter (PEFT: target_modules), by the ends of their names: q_proj, or 31.self_attn.q_proj.
    # all-linear: the seven of every layer.
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    # Modules trained whole: embed_tokens, lm_head.
    modules_to_save: tuple[str, ...] = ()
    # A directory in PEFT's format to start from. null: adapters that change nothing yet.
    path: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.targets:
            raise ConfigError("adapter.targets=[] names no module; use all-linear, or names such as q_proj")
        targets = () if self.targets == "all-linear" else tuple(name.rpartition(".")[2] for name in self.targets)
        rules = (
            ("targets", targets, (*LAYER_LINEARS, "lm_head")),
            ("modules_to_save", self.modules_to_save, SAVEABLE_MODULES),
        )
        for key, names, known in rules:
            for name in names:
                if name not in known:
                    raise ConfigError(f"adapter.{key}={name} is not supported; {_did_you_mean(name, known)}")


@dataclass(frozen=True)
class ReadingConfig(Section):
    """How records are read: of data.path, or of one source."""

    # The field of a record (JSONL, JSON, Parquet, Arrow) that holds the text.
    text_field: str = "text"
    # What records hold. auto: messages (or conversations), prompt and completion, input_ids (and labels), or text, by
    # their fields.
    format: Literal["auto", "messages", "prompt_completion", "text", "input_ids"] = "auto"
    # What is trained; the rest is read. auto: the assistant's turns of messages, completions, or all.
    train_on: Literal["auto", "assistant", "completion", "all"] = "auto"
    # Train the token that ends an assistant's turn, a completion or a text.
    train_on_eos: bool = True
    # A record that cannot be trained on ends the run, or is skipped and counted.
    bad_records: Literal["refuse", "skip"] = "refuse"


@dataclass(frozen=True)
class SourceConfig(ReadingConfig):
    """One of data.sources. What it leaves out of how records are read is as in data."""

    # As data.path.
    path: Path | None = None
    # Its share of the tokens, relative to the other sources.
    weight: float = setting(1.0, gt=0)


@dataclass(frozen=True)
class DataConfig(ReadingConfig):
    # A text file, a directory of sources, JSONL, JSON or Parquet; a directory or a glob of these; a folder of
    # datasets.save_to_disk, or hf://org/name for a dataset on the hub. null: Python's standard library.
    path: Path | None = None
    # Instead of path, several, mixed: [{path: a.jsonl, weight: 3}, {path: b, weight: 1}]; also how each is read.
    sources: tuple[SourceConfig, ...] = ()
    # The same kinds, for validation. null: hold out validation_fraction of the documents of data.path.
    validation_path: Path | None = None
    # Share of the documents held out when validation_path is null.
    validation_fraction: float = setting(0.02, ge=0, lt=1)
    # null: the model's own (bytes for an embedded model). bytes: one token per byte. Else a directory.
    tokenizer: str | None = None
    # A Jinja file in place of the tokenizer's chat template.
    chat_template: Path | None = None
    # Tokens per sequence.
    context: int = setting(4096, ge=2)
    # Documents of a sequence: each as if it were alone, or as one text that runs on. together: attention and positions
    # cross their borders, and a document's first token is predicted from what precedes it.
    documents: Literal["apart", "together"] = "apart"
    # What becomes of documents longer than context. split: pieces of context tokens, and the rest.
    long_documents: Literal["split", "drop", "refuse"] = "split"

    def __post_init__(self) -> None:
        if self.sources and self.path is not None:
            raise ConfigError(f"data.path={self.path} and data.sources both say what to read; make the path a source")
        if isinstance(self.sources, list | tuple):
            made = tuple(self._source(**each) if isinstance(each, dict) else each for each in self.sources)
            object.__setattr__(self, "sources", made)
        super().__post_init__()

    def all_sources(self) -> tuple[SourceConfig, ...]:
        """At least one."""
        return self.sources or (self._source(path=self.path),)

    def _source(self, **values: Any) -> SourceConfig:
        _check_names(values, SourceConfig, "data.sources.")
        if self.sources and values.get("path") is None:
            raise ConfigError(f"data.sources has {values}, without a path; add one, as of data.path")
        shared = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(ReadingConfig)}
        return SourceConfig(**(shared | values))


@dataclass(frozen=True)
class ParallelConfig(Section):
    # Local ranks to start: at most one per GPU, or 4 per CPU core. auto: one per GPU, or 2 on CPU. torchrun's number
    # of ranks takes precedence.
    ranks: int | Literal["auto"] = setting("auto", ge=1)
    # Ranks that share one sequence; the rest are data parallel: a step has train.batch sequences for each group of cp
    # ranks. all: every rank. auto: the planner's choice; every rank where it does not plan.
    cp: int | Literal["auto", "all"] = setting("auto", ge=1)
    # Groups into which the cp ranks are divided: ranks of one exchange tokens for heads, so it has no more of them than
    # heads; between groups k and v are sent. auto: the planner's choice; as few as the heads allow where it plans not.
    ring: int | Literal["auto"] = setting("auto", ge=1)
    # Copies of the model's parameters: 1 shards them over all ranks, the number of nodes over the ranks of each node,
    # which takes memory and spares the network. auto: the planner's choice; 1 where it does not plan.
    replicas: int | Literal["auto"] = setting("auto", ge=1)
    # Query heads, over the cp / ring ranks of a group, whose attention is computed at once. all: plain Ulysses.
    heads_per_stage: int | Literal["all"] = setting("all", ge=1)

    def cp_of(self, num_ranks: int) -> int:
        return self.cp if isinstance(self.cp, int) else num_ranks


@dataclass(frozen=True)
class MemoryConfig(Section):
    # Layers that compute their MLP again in backward, and by default all else; the last ones keep everything. full: all
    # of them. none: no layer does.
    checkpoint: int | Literal["none", "full"] = setting("full", ge=0)
    # Where kept activations live: none = on the device.
    offload: Literal["none", "host", "disk"] = "none"
    # Local tokens per tile of token-wise work (norms, projections, MLP); the loss takes a quarter. all: one tile.
    tile_tokens: int | Literal["all"] = setting(8192, ge=1)
    # Layers, counted from the last, that keep attention's output instead of computing it again in backward.
    keep_attention: int | Literal["none", "all"] = setting("none", ge=0)
    # Where those outputs live. null: where memory.offload says.
    attention_offload: Literal["none", "host", "disk"] | None = None
    # Layers, counted from the last, that keep q, k, v and the sum after attention as well: all but the MLP's middle.
    keep_projections: int | Literal["none", "all"] = setting("none", ge=0)
    # Memory for time: send and fetch ahead of their use; false for the longest sequences.
    overlap: bool = True
    # Keep parameters, gradients and optimizer state in host memory and update them there.
    offload_optimizer: bool = False
    # Directory of the disk tier. null: the system's temporary directory.
    disk_path: Path | None = None
    # auto: on a known GPU the planner decides every setting of parallel and memory that is not given. off: defaults.
    plan: Literal["auto", "off"] = "auto"


@dataclass(frozen=True)
class AttentionConfig(Section):
    # auto: the fastest that was measured and runs on the device. Else one of ithaka/attention/kernels.py by name.
    kernel: str = "auto"
    # Tokens per query block and per key/value block. null: derived from the size of the cache.
    block_q: int | None = setting(None, ge=1)
    block_kv: int | None = setting(None, ge=1)


@dataclass(frozen=True)
class OptimConfig(Section):
    # Peak learning rate of AdamW.
    lr: float = setting(3e-4, ge=0)
    # Of AdamW: how slowly its two averages change, and what keeps it from dividing by 0.
    betas: tuple[float, float] = setting((0.9, 0.95), ge=0, lt=1)
    eps: float = setting(1e-8, gt=0)
    # Applied to matrices only: not to norms and biases.
    weight_decay: float = setting(0.1, ge=0)
    # After the warm-up: down a half cosine to min_lr_ratio * lr, or constant.
    schedule: Literal["cosine", "constant"] = "cosine"
    # Step at which the cosine ends; from there on the rate stays. null: train.steps of the run's start, which a resume
    # with more steps keeps, unless the run ended in its warm-up.
    decay_steps: int | None = setting(None, ge=1)
    # Steps in which the learning rate rises from 0 to lr.
    warmup_steps: int = setting(0, ge=0)
    # What of lr is left at the cosine's end.
    min_lr_ratio: float = setting(0.1, ge=0, le=1)
    # Largest norm of the whole gradient. null: no clipping.
    clip_norm: float | None = setting(1.0, gt=0)


@dataclass(frozen=True)
class TrainConfig(Section):
    # Optimizer steps in the whole run, over all resumptions.
    steps: int = setting(1000, ge=1)
    # Instead of steps: passes over the data (several sources: over as many tokens as they have together). 0.5 is half.
    epochs: float | None = setting(None, gt=0)
    # Sequences per data-parallel rank and micro-step.
    batch: int = setting(1, ge=1)
    # Micro-steps per optimizer step.
    accumulate: int = setting(1, ge=1)
    # Sequences per optimizer step, over all ranks: accumulate is derived from it, so that another number of GPUs keeps
    # it. null: batch x accumulate x data-parallel ranks.
    global_batch: int | None = setting(None, ge=1)
    # Validate every so many steps. 0: only at the end.
    validate_every: int = setting(100, ge=0)
    # Sequences per validation, over all ranks. 0: never validate.
    validate_sequences: int = setting(8, ge=0)
    # Save after the step in which so many minutes have passed since the last save. 0: not by time.
    save_minutes: float = setting(15.0, ge=0)
    # Save every so many steps too. 0: not by steps. The end of the run is always saved.
    save_every: int = setting(0, ge=0)
    # Complete checkpoints to keep; older ones are removed.
    keep_last: int = setting(2, ge=1)
    # Also save at, and keep, the lowest validation loss; the end of the run says its step, for `ithaka export --step`.
    keep_best: bool = False
    # End the run when so many validations in a row bring no lower loss, and keep_best. 0: never.
    patience: int = setting(0, ge=0)
    # A step whose loss or gradient is not finite, or spikes, is computed again. If it is no better: stop, or skip the
    # batch, whose documents are logged; three in a row stop the run.
    bad_step: Literal["stop", "skip"] = "stop"
    # A gradient norm so many times the median of the last 100 is a spike. null: none is.
    spike: float | None = setting(None, gt=1)
    # Seed of the initial weights and of the order of the data.
    seed: int = setting(0, ge=0)
    # torch.compile for the MLP.
    compile: bool = False
    # Sum gradients in a fixed order, so that a run on a GPU repeats to the bit; attention's backward is 10 % slower.
    deterministic: bool = False
    # Trackers that get every step's figures too, each if its package is installed: [tensorboard, wandb].
    track: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = ()
    # After SIGTERM or SIGUSR1: seconds in which the step must end and be saved; else the run leaves at once, with the
    # last checkpoint. Kubernetes, Slurm and torchrun kill after 30 seconds unless told otherwise.
    grace_s: float = setting(25.0, ge=0)
    # Where the run is written. null: runs/<date>-<time>. `--resume auto` needs it.
    run_dir: Path | None = None

    def micro_steps(self, dp: int) -> int:
        """Per optimizer step, on so many data-parallel ranks."""
        per = self.batch * dp
        if self.global_batch is None:
            return self.accumulate
        if self.global_batch % per:
            what = f"is no multiple of {per}, train.batch={self.batch} on {dp} data-parallel ranks"
            near = " or ".join(str(per * n) for n in (self.global_batch // per, self.global_batch // per + 1) if n)
            raise ConfigError(f"train.global_batch={self.global_batch} {what}; use {near}, or another parallel.cp")
        return self.global_batch // per


@dataclass(frozen=True)
class ProfileConfig(Section):
    # Profile every so many steps, rank 0: trace, memory map, phase times in the run directory. 0: never.
    every: int = setting(0, ge=0)


@dataclass(frozen=True)
class EvaluateConfig(Section):
    """`ithaka evaluate` during training; what it finds is in evaluations/step-N.json too."""

    # Every so many steps, and after the last. 0: never.
    every: int = setting(0, ge=0)
    # Lengths; loss is measured at the largest, also beyond data.context. []: data.context.
    contexts: tuple[int, ...] = setting((), ge=2)
    # As data.path, unseen in training. null: Python's standard library.
    data: Path | None = None
    # Long documents to read; samples of each retrieval task, at each length and depth.
    documents: int = setting(8, ge=1)
    samples: int = setting(2, ge=1)


@dataclass(frozen=True)
class EntryConfig(Section):
    """One of curriculum. Of rope and data, what it leaves out is as in the entry before it."""

    # As data.context and train.steps, of this entry alone; both are needed.
    context: int | None = setting(None, ge=2)
    steps: int | None = setting(None, ge=1)
    # As model.rope.
    rope: RopeConfig | None = None
    # Settings of data, such as {sources: [...]}. Other documents are read from their beginning.
    data: dict | None = None
    # Settings of optim, with a schedule of this entry's own, from its first step to its last. null: the run's.
    optim: dict | None = None

    def __post_init__(self) -> None:
        for name, section in (("rope", RopeConfig), ("data", DataConfig), ("optim", OptimConfig)):
            if isinstance(values := getattr(self, name), dict):
                _check_names(values, section, f"curriculum.{name}.")
                if name == "rope":
                    object.__setattr__(self, name, RopeConfig(**values))
        super().__post_init__()
        for name, value in (("context", self.context), ("steps", self.steps)):
            if value is None:
                raise ConfigError(f"curriculum has an entry without {name}; add it: {{context: 64K, steps: 200}}")
        if "context" in (self.data or {}):
            raise ConfigError("curriculum.data.context is the entry's context; write it beside data, not in it")


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig | None = None  # null: every parameter is trained
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    # One run through several lengths: [{context: 64K, steps: 200}, {context: 512K, steps: 50, rope: {theta: 1.3e8}}].
    # Each entry is planned for itself; weights, optimizer and learning rate go on from one to the next.
    curriculum: tuple[EntryConfig, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.curriculum, list | tuple):
            raise ConfigError(
                f"curriculum={self.curriculum} is not accepted; use a list, [{{context: 64K, steps: 200}}]"
            )
        for each in (each for each in self.curriculum if isinstance(each, dict)):
            _check_names(each, EntryConfig, "curriculum.")
        made = tuple(EntryConfig(**each) if isinstance(each, dict) else each for each in self.curriculum)
        object.__setattr__(self, "curriculum", made)

    @property
    def ends(self) -> list[int]:
        """The last step of each entry; without a curriculum, of the run."""
        return list(itertools.accumulate(entry.steps or 0 for entry in self.curriculum)) or [self.train.steps]

    @property
    def entry(self) -> int:
        """Of a configuration that `at` gave: the number of its entry, from 0."""
        return self.ends.index(self.train.steps)

    @property
    def start(self) -> int:
        """Steps before this entry."""
        return [0, *self.ends][self.entry]

    @property
    def schedule_start(self) -> int:
        """Steps before the learning-rate schedule."""
        return self.start if self.curriculum and self.curriculum[self.entry].optim else 0

    def at(self, step: int) -> Config:
        """With the settings of the entry that comes after `step` steps; without a curriculum, the same."""
        if not self.curriculum:
            return self
        index = min(bisect.bisect_right(self.ends, step), len(self.ends) - 1)
        model, data, optim, entry = self.model, self.data, self.optim, self.curriculum[index]
        for each in self.curriculum[: index + 1]:
            values = each.data or {}
            fresh: dict[str, Any] = {"path": None, "sources": ()} if {"path", "sources"} & {*values} else {}
            data = dataclasses.replace(data, **{**fresh, **values, "context": each.context})
            model = dataclasses.replace(model, rope=each.rope or model.rope)
        if entry.optim:
            optim = dataclasses.replace(optim, **{"decay_steps": entry.steps, **entry.optim})
            check_schedule(optim)
        train = dataclasses.replace(self.train, steps=self.ends[index])
        return dataclasses.replace(self, train=train, data=data, model=model, optim=optim)


def check_schedule(optim: OptimConfig) -> None:
    end, warmup = optim.decay_steps, optim.warmup_steps
    if optim.schedule == "cosine" and end is not None and end <= warmup:
        raise ConfigError(f"optim.decay_steps={end} ends within optim.warmup_steps={warmup}; give more, or null")


SECTIONS: dict[str, Any] = {
    entry.name: AdapterConfig if entry.name == "adapter" else entry.default_factory
    for entry in dataclasses.fields(Config)
    if entry.name != "curriculum"
}


def check_effects(settings: Mapping[str, Any]) -> None:
    """Refuse a setting that would do nothing: the user expects it to do something.

    `settings`: by name (memory.offload); those left out are not decided yet.
    """
    for cause, values, other, idle in (
        ("memory.checkpoint", ("none", 0), "full", ("keep_attention", "keep_projections")),
        ("memory.keep_attention", ("none", 0), "all", ("attention_offload",)),
    ):
        for key in idle if settings.get(cause) in values else ():
            plain = getattr(MemoryConfig, key)
            if (value := settings.get(f"memory.{key}", plain)) not in (plain, "all"):
                raise ConfigError(
                    f"memory.{key}={format_value(value)} has no effect with {cause}={settings[cause]}; "
                    f"use {cause}={other}, or memory.{key}={format_value(plain)}"
                )


# What `ithaka train` does without a file, beyond the defaults above: a run to watch on 2 cores, or on GPUs.
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

# Byte-level vocabulary of the embedded models: 256 bytes, then these, padded to a multiple of 8.
BOS, EOS, PAD, BYTE_VOCAB = 256, 257, 258, 264


def embedded_model(name: Literal["small", "base"]) -> dict[str, Any]:
    """A Hugging Face `config.json` as a dict: small has 2.1 million parameters, base 142 million.

    Small has two layers and narrow attention: at 4096 tokens a CPU spends most of its time there."""
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
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0 if small else 1_000_000.0},
        "initializer_range": 0.06 if small else 0.02,  # with 0.02 the first minute of small is lost
        "tie_word_embeddings": not small,
        "rms_norm_eps": 1e-5,
        "vocab_size": BYTE_VOCAB,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }


def load_config(
    path: Path | None = None, overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None
) -> Config:
    """The resolved configuration: defaults, then `base`, the YAML file, the `section.key=value` overrides."""
    sources = [("the defaults", base or {}), (str(path), _read_yaml(path) if path is not None else {})]
    changes = [("--set", {section: {key: value}}) for section, key, value in map(_parse_override, overrides)]
    for change in changes:
        _merged([change])  # a wrong value is refused even if a later one replaces it
    return _merged([*sources, *changes])


def explicit_settings(
    path: Path | None, overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None
) -> set[str]:
    """The names, section.key, of what `load` with the same arguments does not take from the defaults."""
    trees = [base or {}, _read_yaml(path) if path is not None else {}]
    sections = (each for tree in trees for each in tree.items() if isinstance(each[1], Mapping))
    names = {f"{section}.{key}" for section, values in sections for key in values}
    return names | {".".join(_parse_override(override)[:2]) for override in overrides}


def parse_config(tree: Mapping[str, Any]) -> Config:
    """A Config from nested mappings; unknown names, wrong types and values out of range raise ConfigError."""
    return _merged([("the configuration", tree)])


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Nested dicts of plain YAML values; `parse` gives the same Config back."""

    def plain(values: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: str(v) if isinstance(v, Path) else list(v) if isinstance(v, tuple) else v for key, v in values}

    return dataclasses.asdict(config, dict_factory=plain)


def to_yaml(config: Config) -> str:
    """The complete configuration as YAML; loading it gives the same Config back."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


# Settings that name files. data: of `evaluate`.
_PATHS = {"path", "validation_path", "chat_template", "tokenizer", "disk_path", "data"}


def with_absolute_paths(tree: Any) -> Any:
    """A configuration as `to_dict` returns it, readable from any working directory.

    Only paths and globs that match a file here change: anything else is the name of a dataset on the hub, or a word.
    """
    if isinstance(tree, list):
        return [with_absolute_paths(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    names = {key for key, value in tree.items() if key in _PATHS and isinstance(value, str)}
    names -= {"tokenizer"} if tree.get("tokenizer") == "bytes" else set()
    return {key: _absolute(value) if key in names else with_absolute_paths(value) for key, value in tree.items()}


def _absolute(name: str) -> str:
    path = Path(name).expanduser()
    if os.path.exists(path):
        return str(path.absolute())
    is_glob = not path.is_absolute() and next(glob.iglob(name, recursive=True), None) is not None
    return str(Path(glob.escape(str(Path.cwd()))) / name) if is_glob else name


def shell_command(*words: object) -> str:
    """An `ithaka` command line to paste into a shell."""
    return shlex.join(["ithaka", *map(str, words)])


def format_value(value: object) -> str:
    """As it is written in a configuration."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {format_value(each)}" for key, each in value.items() if each is not None) + "}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


class _DuplicateKey(yaml.YAMLError):
    pass


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, where YAML's own loader keeps the last one."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Merge keys (<<) are not expanded yet, so a key may still override a merged one."""
        node, lines = super().compose_mapping_node(anchor), dict[tuple[str, str], int]()
        for key, _ in node.value:
            name, line = (key.tag, str(key.value)), key.start_mark.line + 1
            if name in lines:
                raise _DuplicateKey(f"has {key.value} twice, in line {lines[name]} and line {line}; write it once")
            lines[name] = line
        return node


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader) or {}
    except _DuplicateKey as error:
        raise ConfigError(f"config={path} {error}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        words = f"config={path} cannot be read ({' '.join(str(error).split())}); give a YAML file"
        raise input_error(words, error) from None
    if not isinstance(tree, dict):
        raise ConfigError(f"config={path} holds no mapping; write sections such as `train:` with keys below them")
    written = tree.pop("format", CONFIG_FORMAT)  # absent in files written by hand, and in those of format 1
    if written not in range(1, CONFIG_FORMAT + 1):
        raise ConfigError(
            f"config={path} has format {written}; this ithaka reads 1 to {CONFIG_FORMAT}; use the ithaka that wrote it"
        )
    if isinstance(train := tree.get("train"), dict) and "tensorboard" in train:  # in runs from before `track`
        train.setdefault("track", ["tensorboard"] * bool(train.pop("tensorboard")))
    return tree


def _parse_override(override: str) -> tuple[str, str, Any]:
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"--set {override} is not section.key=value; write for example --set train.steps=100")
    if not text.strip():
        raise ConfigError(f"{section}.{key}= has no value; write one, or null for none")
    try:
        return section, key, yaml.load(text, _Loader)
    except _DuplicateKey as error:
        raise ConfigError(f"{section}.{key}={text} {error}") from None
    except yaml.YAMLError:
        raise ConfigError(f"{section}.{key}={text} is not a YAML value; quote it: {section}.{key}='\"...\"'") from None


def _merged(sources: Iterable[tuple[str, Mapping[str, Any]]]) -> Config:
    """The sections of all sources, each laid over those before it; names that do not exist are refused."""
    merged: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS if name != "adapter"}
    curriculum: Any = ()
    for source, tree in sources:
        for section, values in tree.items():
            if section == "curriculum":
                curriculum = values or ()
                continue
            if section not in SECTIONS:
                known = [*SECTIONS, "curriculum"]
                raise ConfigError(f"{section} in {source} is not a section; {_did_you_mean(section, known)}")
            values = {} if values is None else values
            if not isinstance(values, Mapping):
                raise ConfigError(f"{section}={values!r} in {source} is not a mapping; write keys below `{section}:`")
            _check_names(values, SECTIONS[section], f"{section}.")
            if section != "adapter" or tree[section] is not None:
                merged.setdefault(section, {}).update(values)
    config = Config(**{name: SECTIONS[name](**values) for name, values in merged.items()}, curriculum=curriculum)
    return _with_curriculum(config, merged) if curriculum else config


def _with_curriculum(config: Config, given: Mapping[str, Mapping[str, Any]]) -> Config:
    """As a whole it has the steps of all entries and the context of the first; `at` gives what its entries have."""
    entries, ends = config.curriculum, config.ends
    contexts = [entry.context or 0 for entry in entries]
    places = [(ends[-1], contexts[0]), *zip(ends, contexts, strict=True)]
    for name in ("epochs", "patience", "keep_best"):  # losses at other lengths cannot be compared
        if value := getattr(config.train, name):
            raise ConfigError(f"train.{name}={format_value(value)} cannot stand beside curriculum; leave it out")
    own = {"train.steps": config.train.steps, "data.context": config.data.context}
    said = [f"{name}={value}" for name, value in own.items() if name.split(".")[1] in given[name.split(".")[0]]]
    if said and tuple(own.values()) not in places:
        raise ConfigError(f"{' and '.join(said)} cannot stand beside curriculum, whose entries say it; leave it out")
    if not said:
        if config.model.rope is not None and entries[0].rope is not None:
            raise ConfigError("model.rope has no effect: the first entry of curriculum has its own; leave one out")
        train = dataclasses.replace(config.train, steps=ends[-1])
        config = dataclasses.replace(config, train=train, data=dataclasses.replace(config.data, context=contexts[0]))
    for index, end in enumerate(ends):
        try:
            config.at(end - 1)
        except ConfigError as error:
            raise ConfigError(f"curriculum[{index}]: {error}") from None
    return config


def _check_names(values: Mapping[str, Any], section: Any, prefix: str) -> None:
    known = [entry.name for entry in dataclasses.fields(section)]
    for key in values.keys() - set(known):
        raise ConfigError(f"{prefix}{key}={values[key]} is not a setting; {_did_you_mean(key, known, prefix)}")


def _did_you_mean(name: object, known: Iterable[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"did you mean {prefix}{close[0]}?" if close else "use one of " + ", ".join(prefix + each for each in known)


def _as(value: Any, hint: Any) -> Any:
    """`value` as the type `hint`, or ValueError."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for part in parts:
            with contextlib.suppress(ValueError):
                return _as(value, part)
    elif origin is tuple and isinstance(value, list | tuple):
        if Ellipsis in parts:
            parts = (parts[0],) * len(value)
        if len(value) == len(parts):
            return tuple(map(_as, value, parts))
    elif origin is Literal:
        word = ("off", "on")[value] if isinstance(value, bool) else value  # YAML 1.1 reads off and on as booleans
        if word in parts:
            return word
    elif origin is None and isinstance(value, bool) == (hint is bool):
        if hint is int and isinstance(value, str):
            value = parse_count(value)
        elif hint is float and isinstance(value, str | int):
            value = float(value)  # YAML 1.1 reads 3e-4 as text: it wants 3.0e-4
        elif hint is Path and isinstance(value, str | Path) and value != "":
            value = Path(value).expanduser()
        if isinstance(value, hint) and (hint is not float or math.isfinite(value)):
            return value
    raise ValueError


def parse_count(text: str) -> int | None:
    """A count as people write it: 128K = 128 * 2^10, 1M = 2^20, 6.734M (rounded down), 1_000_000. None: not a count."""
    match = re.fullmatch(r"(\d+(?:_\d+)*)(?:(\.\d+)?([KM]))?", text.strip(), re.IGNORECASE)
    if not match:
        return None
    whole, fraction, unit = match.groups(default="")
    return int(Fraction(whole.replace("_", "") + fraction) * {"": 1, "K": 2**10, "M": 2**20}[unit.upper()])


def _describe(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    names[RopeConfig] = "a mapping, such as {theta: 8.0e6}"
    if typing.get_origin(hint) is tuple:
        if Ellipsis in typing.get_args(hint):
            of = typing.get_args(hint)[0]
            if typing.get_origin(of) is Literal:
                return f"a list, such as [{typing.get_args(of)[0]}], of {_describe(of)}"
            names = {str: "a list of names", int: "a list of whole numbers"}
            return names.get(of, "") or "a list of mappings, such as [{path: a.jsonl, weight: 2}]"
        return f"a list of {len(typing.get_args(hint))} numbers"
    parts = (part if isinstance(part, str) else _describe(part) for part in typing.get_args(hint))
    return (names | {type(None): "null"}).get(hint) or " or ".join(parts)


def check_writable(option: str, path: Path, folder: bool = False) -> None:
    """Refuse, before the work, a file that cannot be written, or a folder that cannot be created (with its parents) or
    written to; leave no trace. `option` is what gave the path."""
    place = full = path.absolute()
    try:
        while not place.exists() and (folder or place == full):
            if folder and place.is_symlink():  # a link to nothing, or a loop, where no folder can be created
                place.stat()
            place = place.parent
        if place == full and not folder:
            full.open("ab").close()
        else:  # permissions do not tell all: root has them in /proc, where nothing can be made
            tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        reason = f"{place} takes no file ({error.strerror})"
        raise input_error(f"{option}={path} cannot be written: {reason}; give another path", error) from None


PAGE_MARK = '<meta name="generator" content="ithaka">'  # in the head of every page that ithaka writes


def check_output(
    option: str, path: Path, force: bool, text: str | None = None, *, folder: bool = False, own: Iterable[str] = ()
) -> None:
    """`check_writable`, and unless `force`, refuse to replace what a user may have written or edited.

    A file may be replaced if it is empty, holds `text` already or is a page of ours. A folder may hold what is named in
    `own`.
    """
    check_writable(option, path, folder)
    found = ""
    if folder and path.is_dir():
        if others := sorted({entry.name for entry in path.iterdir()} - {*own}):
            found = f"holds other files ({', '.join(others[:3])}{', ...' * (len(others) > 3)})"
    elif path.is_file() and path.stat().st_size:
        content = path.read_bytes()
        same = text is not None and content == text.encode()
        found = "" if same or PAGE_MARK.encode() in content[:2000] else "exists"
    if found and not force:
        way = "use it anyway" if folder else "replace it"
        raise ConfigError(f"{option}={path} {found}; give another path, or --force to {way}")
