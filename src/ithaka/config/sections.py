"""Every setting, with its type, default, limits and description: one frozen dataclass per section.

Every instance is valid, also one made with `dataclasses.replace`. Checks that need files or the
number of ranks are in `ithaka.run`. docs/make_reference.py turns the comments above the fields into
docs/settings.md.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, get_args

from ithaka.config.fields import (
    ConfigError,
    Origin,
    Section,
    check_keys,
    format_value,
    setting,
)
from ithaka.config.training import (
    EvaluateConfig,
    LossConfig,
    OptimConfig,
    ProfileConfig,
    TrainConfig,
)


@dataclass(frozen=True)
class RopeConfig(Section, name="model.rope", example="{theta: 8.0e6}"):
    """Changes to the model's RoPE, with Hugging Face's names except for type and theta. null: keep
    or derive it."""

    # Scaling method (Hugging Face: rope_type).
    type: Literal["default", "linear", "llama3", "yarn", "longrope"] | None = None
    # Base frequency (Hugging Face: rope_theta).
    theta: float | None = setting(None, gt=1)
    # Scaling factor; required for linear, llama3 and yarn. For longrope, null is new length /
    # original length.
    factor: float | None = setting(None, ge=1)
    # Context length before scaling, for llama3, yarn and longrope.
    original_max_position_embeddings: int | None = setting(None, ge=1)
    # llama3: scale wavelengths above original / low_freq_factor, not below original /
    # high_freq_factor. null: 1 and 4.
    low_freq_factor: float | None = setting(None, gt=0)
    high_freq_factor: float | None = setting(None, gt=0)
    # yarn: interpolate dimensions with fewer than beta_slow rotations, not those above beta_fast.
    # null: 1 and 32.
    beta_slow: float | None = setting(None, gt=0)
    beta_fast: float | None = setting(None, gt=0)
    # longrope: a divisor for each of the head_dim / 2 frequencies. long_factor applies to batches
    # with positions beyond the original length, short_factor to the others.
    short_factor: tuple[float, ...] | None = setting(None, gt=0)
    long_factor: tuple[float, ...] | None = setting(None, gt=0)
    # Factor on queries and keys. null: 0.1 ln(factor) + 1 for yarn, sqrt(1 + ln(factor) /
    # ln(original)) for longrope.
    attention_factor: float | None = setting(None, gt=0)


@dataclass(frozen=True)
class ModelConfig(Section, name="model"):
    # A Hugging Face directory with weights, a name on the hub (Qwen/Qwen3-8B, with @REVISION if
    # needed), or a config.json to train from scratch. null: the embedded model.
    path: Path | None = None
    # Embedded model to train when path is null.
    embedded: Literal["small", "base"] = "small"
    # Compute dtype. auto: bfloat16 with float32 master weights on a GPU, float32 on a CPU.
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    # If data.tokenizer has more tokens than the model, add embedding rows, each the mean of the
    # existing ones. Only for tokens added to the model's own tokenizer; in another tokenizer, the
    # ids mean other tokens.
    resize_embeddings: bool = False
    # Extend the context length: {theta: 8.0e6}, or {type: yarn, factor: 16}. null: the model's own
    # RoPE.
    rope: RopeConfig | None = None


# Linear modules of a decoder layer that can have an adapter, and modules that can be trained in
# full with adapters.
LAYER_LINEARS: tuple[str, ...] = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
SAVEABLE_MODULES: tuple[Literal["embed_tokens", "lm_head"], ...] = ("embed_tokens", "lm_head")


@dataclass(frozen=True)
class AdapterConfig(Section, name="adapter"):
    """LoRA adapters, configured as in PEFT; all other parameters are frozen. null: train every
    parameter."""

    # Rank (PEFT: r).
    rank: int = setting(16, ge=1)
    # The adapter's output is scaled by alpha / rank (PEFT: lora_alpha).
    alpha: float = setting(32.0, gt=0)
    # Scale by alpha / sqrt(rank) instead (PEFT: use_rslora).
    rslora: bool = False
    # Modules to adapt (PEFT: target_modules), matched by the end of their names: q_proj, or
    # 31.self_attn.q_proj. all-linear: all linear modules of every layer.
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    # Modules to train in full: embed_tokens, lm_head.
    modules_to_save: tuple[Literal["embed_tokens", "lm_head"], ...] = ()
    # How the frozen linear modules of layers are stored: in the compute dtype, or in 4 bits
    # (bitsandbytes' nf4 with double quantization). A bitsandbytes checkpoint keeps its own
    # quantization. mxfp4: experts stay as gpt-oss's files store them; otherwise they are
    # dequantized.
    base: Literal["bf16", "nf4", "mxfp4"] = "bf16"
    # Linear modules that are not quantized, matched like targets. lm_head, embeddings and norms
    # never are.
    unquantized: tuple[str, ...] = ("gate", "router")
    # A PEFT adapter directory to start from. null: new adapters, which leave the model's output
    # unchanged at first.
    path: Path | None = None
    # Probability of dropping an element of the adapter's input (PEFT: lora_dropout). The mask is a
    # function of train.seed, step, module, token and column, so it does not depend on tiles or
    # ranks.
    dropout: float = setting(0.0, ge=0, lt=1)


TrainOn = Literal["auto", "assistant", "completion", "all", "pairs", "teacher"]
RecordFormat = Literal[
    "auto",
    "messages",
    "anthropic",
    "sharegpt",
    "alpaca",
    "prompt_completion",
    "preference",
    "text",
    "input_ids",
]

BUILTIN_TEMPLATES = {  # values of data.chat_template: a token that the tokenizer must have
    "chatml": "<|im_start|>",
    "llama3": "<|start_header_id|>",
    "qwen3": "<|im_start|>",
    "harmony": "<|channel|>",
    "glm4": "<|assistant|>",
}


@dataclass(frozen=True)
class ReasoningConfig(Section, name="data.reasoning", example="{turns: all}"):
    """Reasoning of the assistant's messages: reasoning_content, thinking, or <think> in the
    text."""

    # Train on the reasoning, with its delimiters. false: it is context only.
    loss: bool = True
    # all: keep the reasoning of every turn. Where the chat template drops it from earlier turns, as
    # Qwen3's does, each such turn becomes a sample of its own. last: keep only reasoning after the
    # last user message.
    turns: Literal["all", "last"] = "all"
    # Leave out all reasoning.
    drop: bool = False


@dataclass(frozen=True)
class ReadingConfig(Section):
    """How to read records, of data.path or of one source."""

    # Field of a record (JSONL, JSON, Parquet, Arrow) that contains the text.
    text_field: str = "text"
    # Kind of record. auto: by the fields present: messages (OpenAI's or Anthropic's), conversations
    # (ShareGPT), chosen and rejected (trains on chosen), prompt and completion, instruction and
    # output (Alpaca), input_ids, or text.
    format: RecordFormat = "auto"
    # Tokens with a loss; the others are context only. auto: assistant turns of messages,
    # completions, or all tokens. loss.type=dpo sets it to pairs, loss.teacher=data to teacher.
    train_on: TrainOn = "auto"
    # Include the token that ends an assistant turn, a completion or a text in the loss.
    train_on_eos: bool = True
    # For a record that cannot be trained on: stop with an error, or skip and count it.
    bad_records: Literal["refuse", "skip"] = "refuse"
    # Images, videos, audio and files in messages. refuse: they make a bad record. drop: drop and
    # count them. read: train a vision-language model on images and videos, whose paths are relative
    # to the record's file.
    images: Literal["refuse", "drop", "read"] = "refuse"
    # {loss: false} reads the assistant's reasoning without training on it, {turns: last} keeps only
    # that of the last turn, {drop: true} none. null: train on all of it, and refuse records whose
    # reasoning the chat template drops.
    reasoning: ReasoningConfig | None = None

    @property
    def unrolls(self) -> bool:
        """Whether a conversation may become several samples."""
        return (
            self.reasoning is not None and self.reasoning.turns == "all" and not self.reasoning.drop
        )


@dataclass(frozen=True)
class SourceConfig(ReadingConfig, name="data.sources", example="{path: a.jsonl, weight: 2}"):
    """One entry of data.sources. Reading options default to those of data."""

    # As data.path.
    path: Path | None = None
    # Share of the tokens, relative to the other sources.
    weight: float = setting(1.0, gt=0)


@dataclass(frozen=True)
class DataConfig(ReadingConfig, name="data"):
    # A file of text, JSONL, JSON or Parquet; a directory or glob of these, or of source code; a
    # datasets.save_to_disk folder; or a dataset on the Hugging Face hub: hf://org/name,
    # hf://org/name@revision:configuration/split, which is streamed if it has more than 10 GB of
    # Parquet or JSONL. null: Python's standard library.
    path: Path | None = None
    # Several datasets to mix, instead of path: [{path: a.jsonl, weight: 3}, {path: b, weight: 1}].
    sources: tuple[SourceConfig, ...] = ()
    # Validation data, in the same formats. null: hold out validation_fraction of the documents.
    validation_path: Path | None = None
    # Fraction of the documents to hold out when validation_path is null. They are chosen by their
    # content, so no copy of one is trained on, in any source or entry of a curriculum.
    validation_fraction: float = setting(0.02, ge=0, lt=1)
    # A tokenizer directory, or bytes for one token per byte. null: the model's own (bytes for an
    # embedded model).
    tokenizer: str | None = None
    # Replaces the tokenizer's chat template: a Jinja file, or a built-in template with tools:
    # chatml, llama3, qwen3, harmony, glm4. The model's tokenizer should have the special tokens of
    # that template.
    chat_template: Path | None = None
    # Tokens per sequence.
    context: int = setting(4096, ge=2)
    # Packed documents. apart: attention and positions stay within each document. together: they
    # cross document boundaries, and a document's first token is predicted from the previous
    # document.
    documents: Literal["apart", "together"] = "apart"
    # Documents longer than context. split: into pieces of at most context tokens. drop: leave them
    # out. refuse: stop with an error. For conversations, also end: keep the system prompt, the
    # tools and the last turns that fit; turns: cut between turns, and repeat system prompt and
    # tools in each piece; shorten_tools: see tool_tokens. Pieces that still exceed the context are
    # split, and pieces without a trained token are left out.
    long_documents: Literal["split", "drop", "refuse", "end", "turns", "shorten_tools"] = "split"
    # For long_documents=shorten_tools: replace the middle of tool outputs above this number of
    # tokens with tool_marker.
    tool_tokens: int = setting(1024, ge=2)
    tool_marker: str = "\n[...]\n"

    def __post_init__(self) -> None:
        if isinstance(self.sources, list | tuple):
            sources = tuple(
                self._source(**each) if isinstance(each, dict) else each for each in self.sources
            )
            object.__setattr__(self, "sources", sources)
        super().__post_init__()

    @cached_property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        """`sources`, or `path` as the only source."""
        return self.sources or (self._source(path=self.path),)

    def _source(self, **values: Any) -> SourceConfig:
        if self.sources and values.get("path") is None:
            raise ConfigError(f"data.sources={format_value(values)} has no path; add one")
        shared = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(ReadingConfig)
        }
        return SourceConfig.from_mapping(shared | values)


@dataclass(frozen=True)
class ParallelConfig(Section, name="parallel"):
    # Local ranks to start: at most one per GPU, or 4 per CPU core. auto: one per GPU, or 2 on a
    # CPU. Ignored under torchrun, which has its own number of ranks.
    ranks: int | Literal["auto"] = setting("auto", ge=1)
    # Context parallelism: ranks that share a sequence. The rest is data parallelism: each group of
    # cp ranks has train.batch sequences per micro-step. all: every rank. auto: as planned; without
    # a plan, every rank.
    cp: int | Literal["auto", "all"] = setting("auto", ge=1)
    # Number of Ulysses groups among the cp ranks. Ranks of a group exchange tokens for heads; k and
    # v travel around a ring between groups. auto: as planned; without a plan, the smallest ring
    # that leaves each rank a head.
    ring: int | Literal["auto"] = setting("auto", ge=1)
    # Copies of the parameters. 1 shards them over all ranks; the number of nodes shards them within
    # each node, which takes more memory and less network traffic. auto: as planned; without a plan,
    # 1.
    replicas: int | Literal["auto"] = setting("auto", ge=1)
    # Query heads per attention stage, over the cp / ring ranks of a group; fewer take less memory.
    # all: plain Ulysses.
    heads_per_stage: int | Literal["all"] = setting("all", ge=1)

    def cp_of(self, num_ranks: int) -> int:
        return self.cp if isinstance(self.cp, int) else num_ranks


@dataclass(frozen=True)
class MemoryConfig(Section, name="memory"):
    # Layers to checkpoint, counted from the first; the others keep all activations. full: all
    # layers. none: no layer.
    checkpoint: int | Literal["none", "full"] = setting("full", ge=0)
    # Offload the activations kept for backward. none: keep them on the device.
    offload: Literal["none", "host", "disk"] = "none"
    # Layers, counted from the last, whose inputs stay on the device, for hosts or disks without
    # room for all.
    keep_inputs: int | Literal["none"] = setting("none", ge=0)
    # Local tokens per tile of norms, projections and MLP; the loss uses a quarter. all: one tile.
    tile_tokens: int | Literal["all"] = setting(8192, ge=1)
    # Layers, counted from the last, that keep the attention output instead of recomputing it in
    # backward.
    keep_attention: int | Literal["none", "all"] = setting("none", ge=0)
    # Where to keep these outputs. null: as memory.offload.
    attention_offload: Literal["none", "host", "disk"] | None = None
    # Layers, counted from the last, that also keep q, k and v: all but the activations after
    # attention.
    keep_projections: int | Literal["none", "all"] = setting("none", ge=0)
    # Dtype of layer inputs and kept attention outputs in host memory and on disk. float8 halves
    # their bytes, but rounds gradients (`ithaka verify` prints their error), and needs compute
    # capability 8.9. Layers that keep attention keep their input in full. null: the compute dtype.
    stored_dtype: Literal["float8"] | None = None
    # Overlap communication and copies with computation, which takes more memory. Use false for the
    # longest sequences.
    overlap: bool = True
    # Keep parameters, gradients and optimizer state in host memory, and update them there.
    offload_optimizer: bool = False
    # Directory for disk offload. null: the system's temporary directory.
    disk_path: Path | None = None
    # Memory in GiB, per GPU, that a plan may use, reserve included: leave room for other processes.
    # It does not limit what PyTorch's allocator caches. Refused where nothing is planned: with
    # plan=off, on a CPU or an unknown GPU, and in other dtypes than bfloat16. null: all that the
    # GPU has.
    gpu_gib: float | None = setting(None, gt=0)
    # auto: on a known GPU, the planner chooses every parallel and memory setting that is not set.
    # off: use defaults.
    plan: Literal["auto", "off"] = "auto"

    @property
    def uses_disk(self) -> bool:
        return "disk" in (self.offload, self.attention_offload)


@dataclass(frozen=True)
class AttentionConfig(Section, name="attention"):
    # A kernel of ithaka/attention/kernels.py. auto: the fastest one that runs on the device.
    kernel: str = "auto"
    # Tokens per query block and per key/value block. null: derived from the cache size.
    block_q: int | None = setting(None, ge=1)
    block_kv: int | None = setting(None, ge=1)


@dataclass(frozen=True)
class EntryConfig(Section, name="curriculum", example="{context: 64K, steps: 200}"):
    """One entry of the curriculum. rope and data default to those of the previous entry."""

    # data.context and train.steps of this entry; both are required.
    context: int | None = setting(None, ge=2)
    steps: int | None = setting(None, ge=1)
    # As model.rope.
    rope: RopeConfig | None = None
    # Changes to the data section, such as {sources: [...]}. A new dataset is read from its start.
    data: dict | None = None
    # Changes to the optim section; starts a schedule over this entry's steps. null: the run's
    # schedule continues.
    optim: dict | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_keys(self.data or {}, DataConfig, "curriculum.data")
        check_keys(self.optim or {}, OptimConfig, "curriculum.optim")
        if "name" in (self.optim or {}):
            raise ConfigError(
                "curriculum.optim.name: a run has one optimizer; set optim.name instead"
            )
        for name in ("context", "steps"):
            if getattr(self, name) is None:
                raise ConfigError(
                    f"curriculum has an entry without {name}; add it: {self.section_example}"
                )
        if "context" in (self.data or {}):
            raise ConfigError(
                "curriculum.data.context has no effect; set context of the entry instead"
            )


@dataclass(frozen=True)
class RunEntry:
    """The part of a run with one context: an entry of its curriculum, or all of it."""

    index: int = 0
    count: int = 1
    start: int = 0  # steps before it
    run_steps: int = 0  # of all entries
    schedule_start: int = 0  # step at which its learning-rate schedule starts

    @property
    def is_last(self) -> bool:
        return self.index + 1 == self.count


@dataclass(frozen=True)
class Config(Section):
    """All settings, and who set each of them."""

    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig | None = None
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    # Several lengths in one run: [{context: 64K, steps: 200}, {context: 512K, steps: 50, rope:
    # {theta: 1.3e8}}]. Each entry has its own plan; weights, optimizer state and learning-rate
    # schedule carry over.
    curriculum: tuple[EntryConfig, ...] = ()
    # By name (train.steps). A setting without an entry has its default.
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        # What the loss trains on. DPO leaves other values alone: they are refused.
        if self.loss.type == "dpo":
            self._set_train_on("pairs", ("auto", "completion"))
        elif self.loss.is_stored:
            self._set_train_on("teacher", get_args(TrainOn))

    def _set_train_on(self, value: Literal["pairs", "teacher"], replaced: Sequence[str]) -> None:
        sources = [
            dataclasses.replace(source, train_on=value) if source.train_on in replaced else source
            for source in self.data.sources
        ]
        data = dataclasses.replace(self.data, sources=tuple(sources))
        if data.train_on in replaced:
            data = dataclasses.replace(data, train_on=value)
        object.__setattr__(self, "data", data)

    # ---- who set what

    def get(self, name: str) -> Any:
        """The value of a setting, such as train.steps; None if its section is left out."""
        section, _, key = name.partition(".")
        return getattr(getattr(self, section), key, None)

    def origin(self, name: str) -> Origin:
        return self.origins.get(name, Origin.DEFAULT)

    @cached_property
    def given(self) -> frozenset[str]:
        """The settings that neither the planner nor a default set."""
        others = (Origin.PLAN, Origin.DEFAULT)
        return frozenset(name for name, origin in self.origins.items() if origin not in others)

    def with_values(self, values: Mapping[str, Any], origin: Origin) -> Self:
        """A copy with these values ({"train.steps": 5}), set by `origin`."""
        changes: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            section, _, key = name.partition(".")
            changes.setdefault(section, {})[key] = value
        sections: dict[str, Any] = {
            name: dataclasses.replace(getattr(self, name), **changed)
            for name, changed in changes.items()
        }
        origins = {**self.origins, **dict.fromkeys(values, origin)}
        return dataclasses.replace(self, **sections, origins=origins)

    # ---- the curriculum

    def entry_at(self, step: int) -> RunEntry:
        """The entry that trains after `step` steps."""
        ends = list(itertools.accumulate(entry.steps or 0 for entry in self.curriculum))
        if not ends:
            return RunEntry(run_steps=self.train.steps)
        index = min(bisect.bisect_right(ends, step), len(ends) - 1)
        start = [0, *ends][index]
        schedule_start = start if self.curriculum[index].optim else 0
        return RunEntry(index, len(ends), start, ends[-1], schedule_start)

    def at(self, step: int) -> Self:
        """The settings that train after `step` steps."""
        return self.of_entry(self.entry_at(step).index)

    def of_entry(self, index: int) -> Self:
        """The settings of an entry; without a curriculum, the same."""
        if not self.curriculum:
            return self
        model = self.model
        data = self.data
        optim = self.optim
        entries = self.curriculum[: index + 1]
        for entry in entries:
            changes = entry.data or {}
            replaced: dict[str, Any] = (
                {"path": None, "sources": ()} if {"path", "sources"} & {*changes} else {}
            )
            data = dataclasses.replace(data, **{**replaced, **changes, "context": entry.context})
            model = dataclasses.replace(model, rope=entry.rope or model.rope)
        if entry.optim:
            optim = dataclasses.replace(optim, **{"decay_steps": entry.steps, **entry.optim})
        steps = sum(entry.steps or 0 for entry in entries)
        train = dataclasses.replace(self.train, steps=steps)
        return dataclasses.replace(self, train=train, data=data, model=model, optim=optim)

    @property
    def datasets(self) -> tuple[DataConfig, ...]:
        """The data of each entry."""
        return tuple(self.of_entry(index).data for index in range(max(1, len(self.curriculum))))


SECTIONS: dict[str, type[Section]] = {
    section.section_name: section
    for section in (
        ModelConfig,
        AdapterConfig,
        DataConfig,
        ParallelConfig,
        MemoryConfig,
        AttentionConfig,
        OptimConfig,
        LossConfig,
        TrainConfig,
        ProfileConfig,
        EvaluateConfig,
    )
}
