"""The layout: every decision about memory and parallelism, in one frozen type.

The planner chooses it, or `layout_from_config` reads it from a configuration. The layers, the
memory ledger, the run directory and the report take it unchanged. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal, get_args

from ithaka.config import Config, ConfigError
from ithaka.facts.dtypes import ELEMENT_BYTES, check_dtype, default_dtype, float8_bytes

Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = get_args(Tier)


@dataclass(frozen=True)
class ActivationPolicy:
    """What one layer keeps for backward, and where."""

    input: Tier = "device"
    attention: Tier | None = None  # attention output; None: recomputed in backward
    # On the device, and only with the attention output:
    projections: bool = False  # q, k and v
    mlp: bool = False  # gate and up projections

    def __post_init__(self) -> None:
        for name, tier in (("input", self.input), ("attention", self.attention)):
            if tier not in TIERS and not (name == "attention" and tier is None):
                raise ConfigError(
                    f"{name}={tier!r} of an ActivationPolicy is not a tier; use device, host "
                    "or disk"
                )
        for name, keeps in (("projections", self.projections), ("mlp", self.mlp)):
            if not isinstance(keeps, bool):
                raise ConfigError(
                    f"{name}={keeps!r} of an ActivationPolicy is not a bool; use True or False"
                )
            # backward would attend again, and keep them a second time
            if keeps and self.attention is None:
                rule = (
                    f"{name}=True of an ActivationPolicy needs a kept attention output, but "
                    "attention=None"
                )
                raise ConfigError(f"{rule}; use attention='device', or {name}=False")

    @property
    def allocates_output_first(self) -> bool:
        """Whether a layer's output is allocated before the tensors of its mixer that it keeps on
        the device.

        Then it takes exactly the memory that the input of the layer below left. Otherwise a smaller
        kept tensor would, and leave a gap that the next output does not fit.
        """
        return self.input != "device" and (self.attention == "device" or self.projections)


MAX_HEADS_ELEMENTS = 1 << 29  # elements of a tensor of all heads in a forward
PREFETCHED_BYTES = 2 * 2**30  # larger layers are not gathered ahead without overlap


@dataclass(frozen=True)
class Layout:
    """Parallelism and memory settings of a model. By default every technique is off."""

    cp: int = 1  # ranks that share a sequence: ulysses * ring
    # Ulysses groups, each with a part of the sequence and all heads
    ring: int = field(default=1, kw_only=True)
    # copies of the model, each sharded over consecutive ranks
    replicas: int = field(default=1, kw_only=True)
    # query heads per stage, over a Ulysses group; None: all (plain Ulysses)
    heads_per_stage: int | None = None
    tile_tokens: int | None = None  # None: all local tokens in one tile
    input_tier: Tier = "device"  # where layers keep their input
    # Layers, counted from the last, which keep more or elsewhere. Backward of the last layers runs
    # first and frees what they keep before the layers below recompute.
    keep_inputs: int = 0  # that keep their input on the device
    keep_attention: int = 0  # that keep the attention output
    attention_tier: Tier = "device"  # where they keep it
    keep_projections: int = 0  # that also keep q, k and v, on the device
    keep_everything: int = 0  # and the MLP's gate and up projections
    # Trade memory for time: exchange and prefetch the next stage while this one attends, and in
    # backward fetch a layer's input once instead of tile by tile in every pass, and hold the graphs
    # of projections (layer/schedule.py).
    overlap: bool = True
    offload_optimizer: bool = False
    # off the device: float8; None: the compute dtype
    stored_dtype: str | None = field(default=None, kw_only=True)
    # compute dtype, by name or torch's; None: the parameters' own, planned as 16-bit
    dtype: Any = None
    kernel: str = "auto"  # attention kernel
    # tokens per query and per key block of attention; None: sized to the cache
    blocks: tuple[int, int] | None = None
    # torch.compile layers instead of using blocks; auto: `Root.compiles` decides
    compile: bool | str = "auto"

    def __post_init__(self) -> None:
        for name in ("cp", "ring", "replicas", "heads_per_stage", "tile_tokens"):
            check_size(f"layout.{name}", getattr(self, name))
        for name in ("overlap", "offload_optimizer"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"layout.{name}={getattr(self, name)!r} is not a bool; use True or False"
                )
        if not isinstance(self.compile, bool) and self.compile != "auto":
            raise ConfigError(
                f"layout.compile={self.compile!r} is unknown; use 'auto', True or False"
            )
        if self.blocks is not None:
            if not isinstance(self.blocks, tuple | list) or len(self.blocks) != 2:
                raise ConfigError(
                    f"layout.blocks={self.blocks!r} is not a pair of sizes; use (1024, 1024), "
                    "or None"
                )
            for size in self.blocks:
                check_size("layout.blocks", size)
        for name in ("input_tier", "attention_tier"):
            if getattr(self, name) not in TIERS:
                rule = f"layout.{name}={getattr(self, name)!r} is not a tier"
                raise ConfigError(f"{rule}; use device, host or disk")
        for name in ("keep_inputs", "keep_attention", "keep_projections", "keep_everything"):
            count = getattr(self, name)
            if type(count) is not int or count < 0:
                raise ConfigError(
                    f"layout.{name}={count!r} is not a number of layers; use 0 or more"
                )
        if self.stored_dtype not in (None, "float8"):
            raise ConfigError(
                f"layout.stored_dtype={self.stored_dtype!r} is unknown; use 'float8', or None"
            )
        if self.dtype is not None:
            object.__setattr__(self, "dtype", check_dtype("layout.dtype", self.dtype))
        # What has no effect has one value, so that equal layouts are equal.
        projections = max(self.keep_projections, self.keep_everything)
        object.__setattr__(self, "keep_projections", projections)
        object.__setattr__(self, "keep_attention", max(self.keep_attention, projections))
        if not self.keep_attention:
            object.__setattr__(self, "attention_tier", "device")
        if self.input_tier == "device":
            object.__setattr__(self, "keep_inputs", 0)

    @property
    def ulysses(self) -> int:
        """Ranks that exchange tokens for heads."""
        return self.cp // self.ring

    def for_teacher(self) -> Layout:
        """The layout of another model, without backward, on the same ranks."""
        stage = None if self.heads_per_stage is None else self.ulysses
        return replace(self.without_backward(), heads_per_stage=stage)

    def without_backward(self) -> Layout:
        """The layout of an evaluation, for which nothing is kept."""
        return replace(
            self, input_tier="device", keep_attention=0, keep_projections=0, keep_everything=0
        )

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype or "bfloat16"]

    @property
    def sum_bytes(self) -> int:
        """Bytes per element of gradient sums and log-sum-exps: fp32 or wider."""
        return max(4, self.element_bytes)

    def x_bytes(self, hidden: int, num_tokens: int) -> int:
        """X: one tensor of the residual stream."""
        return num_tokens * hidden * self.element_bytes

    def input_dtype(self, policy: ActivationPolicy) -> str | None:
        """The stored dtype of a layer's input; None: the compute dtype.

        A layer that keeps its attention output stores its input unrounded: backward recomputes q
        and k from the input, and with those of a rounded one, the kept log-sum-exp would not
        normalize the softmax.
        """
        return self.stored_dtype if policy.attention is None else None

    def stored_input_bytes(self, policy: ActivationPolicy, num_rows: int, width: int) -> int:
        """Bytes of a layer's input in host memory or on disk."""
        if self.input_dtype(policy):
            return float8_bytes(num_rows, width)
        return num_rows * width * self.element_bytes

    def stored_output_bytes(self, num_rows: int, width: int) -> int:
        """Bytes of a layer's attention output in host memory or on disk."""
        return (
            float8_bytes(num_rows, width)
            if self.stored_dtype
            else num_rows * width * self.element_bytes
        )

    def prefetches(self, layer_bytes: int) -> bool:
        """Whether backward gathers a layer's weights, of `layer_bytes`, while the layer above still
        runs."""
        return self.overlap or layer_bytes < PREFETCHED_BYTES

    def layer_policies(self, num_layers: int) -> tuple[ActivationPolicy, ...]:
        """One policy per layer of a model with `num_layers` layers."""
        return _layer_policies(
            num_layers,
            self.input_tier,
            self.keep_inputs,
            self.keep_attention,
            self.attention_tier,
            self.keep_projections,
            self.keep_everything,
        )

    def of_layers(self, layers: Sequence[int], num_layers: int) -> Layout:
        """The layout of a model that has only these layers of a model with `num_layers`."""
        counts: dict[str, Any] = {}
        for name in ("keep_inputs", "keep_attention", "keep_projections", "keep_everything"):
            first = num_layers - getattr(self, name)
            counts[name] = sum(layer >= first for layer in layers)
        return replace(self, **counts)

    def policy_groups(self, num_layers: int, first: int = 0) -> list[tuple[ActivationPolicy, int]]:
        """(policy, number of layers) for each run of consecutive layers with one policy, from layer
        `first` on."""
        return [
            (policy, len(list(run)))
            for policy, run in groupby(self.layer_policies(num_layers)[first:])
        ]

    def rounds(self, num_layers: int) -> bool:
        """Whether a layer's input or attention output is rounded in host memory or on disk."""
        policies = self.layer_policies(num_layers)
        inputs = any(policy.input != "device" and self.input_dtype(policy) for policy in policies)
        return inputs or (self.stored_dtype is not None and self.attention_tier != "device")


_make_policy = lru_cache(ActivationPolicy)  # equal layers share one, which makes plans fast


@lru_cache(maxsize=4096)
def _layer_policies(
    num_layers: int,
    input_tier: Tier,
    keep_inputs: int,
    keep_attention: int,
    attention_tier: Tier,
    keep_projections: int,
    keep_everything: int,
) -> tuple[ActivationPolicy, ...]:
    policies = []
    for layer in range(num_layers):
        later = num_layers - layer  # this layer and those after it
        policies.append(
            _make_policy(
                "device" if later <= keep_inputs else input_tier,
                attention_tier if later <= keep_attention else None,
                later <= keep_projections,
                later <= keep_everything,
            )
        )
    return tuple(policies)


def forward_layout(
    num_heads: int, head_dim: int, cp: int, tokens: int, dtype: str, ring: int | None = None
) -> Layout:
    """The layout of an evaluation: all ranks share each sequence. All heads at once while their
    tensors are small, which is faster; otherwise one head per rank."""
    ring = ring or smallest_ring(cp, num_heads)
    is_long = tokens // cp * num_heads * head_dim > MAX_HEADS_ELEMENTS
    stage = cp // ring if is_long else None
    return Layout(cp, ring=ring, heads_per_stage=stage, tile_tokens=8192, dtype=dtype)


# ---- layouts and configurations


@dataclass(frozen=True)
class LayoutSetting:
    """A setting that a layout decides."""

    name: str
    argument: str  # a field of Layout
    words: Mapping[str, Any] = field(default_factory=dict)  # -> value in a layout
    counts_others: bool = False  # counts the layers that the argument does not

    def to_layout(self, value: Any, num_layers: int, num_ranks: int) -> Any:
        """The layout's value for one in a configuration."""
        value = self.words.get(value, value)
        if value in (ALL_LAYERS, ALL_RANKS):
            value = {ALL_LAYERS: num_layers, ALL_RANKS: num_ranks}[value]
        return max(0, num_layers - value) if self.counts_others else value

    def to_setting(self, value: Any, num_layers: int) -> Any:
        """The configuration's value for a layout's."""
        if self.counts_others:
            value = num_layers - value
        for word, meaning in self.words.items():
            if value == (num_layers if meaning == ALL_LAYERS else meaning):
                return word
        return value


ALL_LAYERS = "all layers"  # in words: as many as the model has
ALL_RANKS = "all ranks"
NO_TIER = {"none": "device"}
LAYERS: dict[str, Any] = {"none": 0, "all": ALL_LAYERS}
LAYOUT_SETTINGS = (
    LayoutSetting("parallel.cp", "cp", {"all": ALL_RANKS}),
    LayoutSetting("parallel.ring", "ring"),
    LayoutSetting("parallel.replicas", "replicas"),
    LayoutSetting("parallel.heads_per_stage", "heads_per_stage", {"all": None}),
    LayoutSetting(
        "memory.checkpoint", "keep_everything", {"none": 0, "full": ALL_LAYERS}, counts_others=True
    ),
    LayoutSetting("memory.offload", "input_tier", NO_TIER),
    LayoutSetting("memory.keep_inputs", "keep_inputs", {"none": 0}),
    LayoutSetting("memory.tile_tokens", "tile_tokens", {"all": None}),
    LayoutSetting("memory.keep_attention", "keep_attention", LAYERS),
    LayoutSetting("memory.attention_offload", "attention_tier", NO_TIER),
    LayoutSetting("memory.keep_projections", "keep_projections", LAYERS),
    LayoutSetting("memory.offload_optimizer", "offload_optimizer"),
    LayoutSetting("memory.overlap", "overlap"),
    LayoutSetting("memory.stored_dtype", "stored_dtype"),
)
FIELDS = {setting.name: setting.argument for setting in LAYOUT_SETTINGS}


def layout_values(values: Mapping[str, Any], num_layers: int, num_ranks: int) -> dict[str, Any]:
    """Translate settings ({"memory.offload": "host"}) to fields of a layout. Leaves out null and
    auto, which leave the choice to the planner or to another setting."""
    return {
        setting.argument: setting.to_layout(values[setting.name], num_layers, num_ranks)
        for setting in LAYOUT_SETTINGS
        if values.get(setting.name) not in (None, "auto")
    }


def settings_from_layout(layout: Layout, num_heads: int, num_layers: int) -> dict[str, Any]:
    """The settings of a configuration that describe `layout`."""
    settings = {
        setting.name: setting.to_setting(getattr(layout, setting.argument), num_layers)
        for setting in LAYOUT_SETTINGS
    }
    if (layout.heads_per_stage or 0) >= num_heads:
        settings["parallel.heads_per_stage"] = "all"
    if not layout.keep_attention:
        settings["memory.attention_offload"] = None
    if layout.stored_dtype is None:  # never the planner's choice
        del settings["memory.stored_dtype"]
    return settings


def layout_from_config(
    config: Config, num_layers: int, num_ranks: int, on_gpu: bool, num_heads: int | None = None
) -> Layout:
    """The layout that a complete configuration describes. `num_heads`: the model's query heads, for
    ring=auto."""
    fields = layout_values({name: config.get(name) for name in FIELDS}, num_layers, num_ranks)
    cp = fields.setdefault("cp", num_ranks)
    fields.setdefault("ring", smallest_ring(cp, num_heads or cp))
    fields.setdefault("attention_tier", fields["input_tier"])
    dtype = config.model.dtype
    attention = config.attention
    blocks = None
    if attention.block_q and attention.block_kv:
        blocks = attention.block_q, attention.block_kv
    return Layout(
        **fields,
        dtype=default_dtype(on_gpu) if dtype == "auto" else dtype,
        kernel=attention.kernel,
        blocks=blocks,
        compile=config.train.compile,
    )


# ---- checks


def check_size(name: str, size: object) -> None:
    """Raise ConfigError unless `size` is None or a positive integer. True is none, although Python
    counts it as 1."""
    if size is not None and (type(size) is not int or size < 1):
        raise ConfigError(f"{name}={size!r} is not a positive integer; use 1 or more")


def check_parallelism(
    num_ranks: int | None = None,
    num_heads: int | None = None,
    *,
    cp: int | None = None,
    ring: int | None = None,
    replicas: int | None = None,
    heads_per_stage: int | None = None,
    has_rings: bool = True,
) -> None:
    """Raise ConfigError if these sizes do not go together. None: unknown, or left to the planner.
    `num_heads`: the model's query heads. `has_rings`: whether the model supports rings."""
    for name, size in (
        ("cp", cp),
        ("ring", ring),
        ("replicas", replicas),
        ("heads_per_stage", heads_per_stage),
    ):
        check_size(f"parallel.{name}", size)
    if num_ranks is not None:
        for name, size in (
            ("cp", cp),
            ("ring", ring if cp is None else None),
            ("replicas", replicas),
        ):
            if size is not None and num_ranks % size:
                ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
                fix = f"use {format_choices(_divisors(num_ranks))}, or change the number of ranks"
                raise ConfigError(f"parallel.{name}={size} does not divide the {ranks}; {fix}")
    max_heads = num_heads or max(cp or 1, heads_per_stage or 1)
    if ring is None:
        ring = smallest_ring(cp or 1, max_heads) if has_rings else 1
    cp = cp or ring
    rings = format_choices(n for n in _divisors(cp) if cp // n <= max_heads)
    if cp % ring:
        raise ConfigError(f"parallel.ring={ring} does not divide parallel.cp={cp}; use {rings}")
    ulysses = cp // ring
    if ulysses > max_heads:
        product = f" x parallel.ring={ring}" if ring > 1 else ""
        smaller = format_choices(
            n for n in _divisors(num_ranks or cp) if n % ring == 0 and n // ring <= max_heads
        )
        fixes = [f"parallel.ring={rings}"] * has_rings + [f"parallel.cp={smaller}"] * bool(smaller)
        raise ConfigError(
            f"parallel.cp={cp} exceeds the model's {max_heads} query heads{product}; use "
            f"{', or '.join(fixes)}"
        )
    if heads_per_stage is None:
        return
    # every rank has as many slots, some of them empty
    if heads_per_stage > ulysses * -(-max_heads // ulysses):
        rule = f"exceeds the model's {max_heads} query heads"
        raise ConfigError(f"parallel.heads_per_stage={heads_per_stage} {rule}; use all")
    if heads_per_stage % ulysses:
        group = f"parallel.cp={cp}" + f" / parallel.ring={ring}" * (ring > 1)
        choices = format_choices([*range(ulysses, max_heads + 1, ulysses)[:4], "all"])
        raise ConfigError(
            f"parallel.heads_per_stage={heads_per_stage} is not a multiple of {group}; use "
            f"{choices}"
        )


def check_float8(stored_dtype: str | None, gpu: str, has_float8: bool) -> None:
    """Refuse memory.stored_dtype=float8 on a GPU without it."""
    if stored_dtype and not has_float8:
        rule = (
            f"needs compute capability 8.9 (NVIDIA Ada, Hopper or newer), which {gpu} does not have"
        )
        raise ConfigError(
            f"memory.stored_dtype={stored_dtype} {rule}; leave it out, or use memory.offload=disk"
        )


def smallest_ring(cp: int, num_heads: int) -> int:
    """The smallest ring whose Ulysses groups have at most one rank per query head."""
    return next(ring for ring in _divisors(cp) if cp // ring <= num_heads)


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


def format_choices(choices: Iterable[object]) -> str:
    """1, 2 or 4"""
    *others, last = [*map(str, choices)] or [""]
    return f"{', '.join(others)} or {last}" if others else last
