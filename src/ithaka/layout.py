"""The layout: every decision about memory and parallelism, in one frozen type.

The planner chooses it, or `layout_from_config` reads it from a configuration. The layers, the
memory ledger, the run directory and the report take it unchanged. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, get_args

from ithaka.config import Config, ConfigError, check_effects
from ithaka.facts.dtypes import ELEMENT_BYTES, check_dtype, default_dtype, float8_bytes

Tier = Literal["device", "host", "disk"]


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
            if tier not in get_args(Tier) and not (name == "attention" and tier is None):
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


EVERYTHING = ActivationPolicy("device", "device", True, True)


KEPT_SETTINGS = (
    "input_tier",
    "keep_inputs",
    "keep_attention",
    "attention_tier",
    "keep_projections",
    "keep_everything",
)
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
    # one per layer; empty: every layer keeps its input on the device
    kept: tuple[ActivationPolicy, ...] = ()
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
        if not isinstance(self.kept, tuple | list):
            fix = "use one ithaka.layout.ActivationPolicy per layer"
            raise ConfigError(
                f"layout.kept={self.kept!r} is a {type(self.kept).__name__}, not a tuple; {fix}"
            )
        for policy in self.kept:
            if not isinstance(policy, ActivationPolicy):
                fix = "use one ithaka.layout.ActivationPolicy per layer"
                raise ConfigError(f"layout.kept has {policy!r}, which is not a policy; {fix}")
        if self.stored_dtype not in (None, "float8"):
            raise ConfigError(
                f"layout.stored_dtype={self.stored_dtype!r} is unknown; use 'float8', or None"
            )
        if self.dtype is not None:
            object.__setattr__(self, "dtype", check_dtype("layout.dtype", self.dtype))

    @property
    def ulysses(self) -> int:
        """Ranks that exchange tokens for heads."""
        return self.cp // self.ring

    def for_teacher(self) -> Layout:
        """The layout of another model, without backward, on the same ranks."""
        return replace(
            self, kept=(), heads_per_stage=None if self.heads_per_stage is None else self.ulysses
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
        if self.kept and len(self.kept) != num_layers:
            rule = f"has {len(self.kept)} entries, but the model has {num_layers} layers"
            raise ConfigError(f"layout.kept {rule}; give one per layer")
        return self.kept or (ActivationPolicy(),) * num_layers

    def policy_groups(self, num_layers: int, first: int = 0) -> list[tuple[ActivationPolicy, int]]:
        """(policy, number of layers) for each run of consecutive layers with one policy, from layer
        `first` on."""
        return [
            (policy, len(list(run)))
            for policy, run in groupby(self.layer_policies(num_layers)[first:])
        ]

    # The settings of a configuration, which has one value for all layers.

    @cached_property
    def input_tier(self) -> Tier:
        return self.kept[0].input if self.kept else "device"

    @cached_property
    def keep_inputs(self) -> int:
        """Layers that keep their input on the device, although others do not."""
        return (
            sum(policy.input == "device" for policy in self.kept)
            if self.input_tier != "device"
            else 0
        )

    @cached_property
    def keep_attention(self) -> int:
        """Layers that keep the attention output."""
        return sum(policy.attention is not None for policy in self.kept)

    @cached_property
    def keep_projections(self) -> int:
        """Layers that keep everything except the MLP's gate and up projections."""
        return sum(policy.projections for policy in self.kept)

    @cached_property
    def keep_everything(self) -> int:
        return sum(policy.mlp for policy in self.kept)

    @cached_property
    def attention_tier(self) -> Tier:
        return next((policy.attention for policy in self.kept if policy.attention), "device")

    @property
    def rounds(self) -> bool:
        """Whether a layer's input or attention output is rounded in host memory or on disk."""
        inputs = any(policy.input != "device" and self.input_dtype(policy) for policy in self.kept)
        outputs = any(policy.attention in ("host", "disk") for policy in self.kept)
        return inputs or (outputs and self.stored_dtype is not None)

    def with_changes(self, **changes: Any) -> Layout:
        """A copy with some fields changed; `kept` is changed by the properties in KEPT_SETTINGS."""
        kept_settings = {
            n: changes.pop(n) if n in changes else getattr(self, n) for n in KEPT_SETTINGS
        }
        return replace(self, kept=_make_policies(len(self.kept), **kept_settings), **changes)


def make_layout(num_layers: int, **settings: Any) -> Layout:
    """A layout from KEPT_SETTINGS, for all layers, instead of a policy per layer, and from its
    other fields."""
    of_layers = {name: settings.pop(name) for name in KEPT_SETTINGS if name in settings}
    return Layout(kept=_make_policies(num_layers, **of_layers), **settings)


@lru_cache(maxsize=4096)
def _make_policies(
    num_layers: int,
    *,
    input_tier: Tier = "device",
    keep_inputs: int = 0,
    keep_attention: int = 0,
    attention_tier: Tier = "device",
    keep_projections: int = 0,
    keep_everything: int = 0,
) -> tuple[ActivationPolicy, ...]:
    """The last layers keep the most: their backward runs first and frees it before the layers below
    recompute."""
    num_everything = min(keep_everything, num_layers)
    num_projections = max(min(keep_projections, num_layers), num_everything)
    num_attention = max(min(keep_attention, num_layers), num_projections)
    kept = (ActivationPolicy(input_tier),) * (num_layers - num_attention)
    kept += (ActivationPolicy(input_tier, attention_tier),) * (num_attention - num_projections)
    kept += (ActivationPolicy(input_tier, attention_tier, True),) * (
        num_projections - num_everything
    )
    kept += (ActivationPolicy(input_tier, attention_tier, True, True),) * num_everything
    first = max(0, num_layers - keep_inputs)
    return kept[:first] + tuple(replace(policy, input="device") for policy in kept[first:])


def forward_layout(
    num_layers: int,
    num_heads: int,
    head_dim: int,
    cp: int,
    tokens: int,
    dtype: str,
    ring: int | None = None,
) -> Layout:
    """The layout of an evaluation: all ranks share each sequence. All heads at once while their
    tensors are small, which is faster; otherwise one head per rank."""
    ring = ring or smallest_ring(cp, num_heads)
    is_long = tokens // cp * num_heads * head_dim > MAX_HEADS_ELEMENTS
    stage = cp // ring if is_long else None
    return make_layout(
        num_layers, cp=cp, ring=ring, heads_per_stage=stage, tile_tokens=8192, dtype=dtype
    )


# ---- layouts and configurations

# Settings that a layout decides -> the argument of `make_layout` for each.
SETTINGS = {
    "parallel.cp": "cp",
    "parallel.ring": "ring",
    "parallel.replicas": "replicas",
    "parallel.heads_per_stage": "heads_per_stage",
    "memory.checkpoint": "keep_everything",
    "memory.offload": "input_tier",
    "memory.keep_inputs": "keep_inputs",
    "memory.tile_tokens": "tile_tokens",
    "memory.keep_attention": "keep_attention",
    "memory.attention_offload": "attention_tier",
    "memory.keep_projections": "keep_projections",
    "memory.offload_optimizer": "offload_optimizer",
    "memory.overlap": "overlap",
    "memory.stored_dtype": "stored_dtype",
}


def _keyword_values(num_layers: int, num_ranks: int) -> dict[str, dict[Any, Any]]:
    """Argument of `make_layout` -> {value in a configuration: value in a layout}, where they
    differ."""
    return {
        "cp": {"all": num_ranks},
        "heads_per_stage": {"all": None},
        # memory.checkpoint counts the layers that do not keep everything.
        "keep_everything": {n: num_layers - n for n in range(num_layers + 1)}
        | {"none": num_layers, "full": 0},
        "input_tier": {"none": "device"},
        "keep_inputs": {"none": 0},
        "tile_tokens": {"all": None},
        "keep_attention": {"none": 0, "all": num_layers},
        "attention_tier": {"none": "device"},
        "keep_projections": {"none": 0, "all": num_layers},
    }


def fixed_settings(chosen: Mapping[str, Any], num_layers: int, num_ranks: int) -> dict[str, Any]:
    """Translate settings (`{"parallel.cp": 8, "memory.offload":
    "host"}`) to arguments of `make_layout`. Leaves out null and auto."""
    check_effects(chosen)
    keyword_values = _keyword_values(num_layers, num_ranks)
    fixed = {SETTINGS[name]: value for name, value in chosen.items() if value not in (None, "auto")}
    return {name: keyword_values.get(name, {}).get(value, value) for name, value in fixed.items()}


def settings_from_layout(layout: Layout, num_heads: int) -> dict[str, Any]:
    """The settings of a configuration that describe `layout`."""
    keyword_values = _keyword_values(len(layout.kept), 0)
    settings: dict[str, Any] = {}
    for name, argument in SETTINGS.items():
        keywords = {value: word for word, value in keyword_values.get(argument, {}).items()}
        value = getattr(layout, argument)
        settings[name] = keywords.get(value, value)
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
    values = {name: attrgetter(name)(config) for name in SETTINGS}
    fixed = fixed_settings(
        values | {"parallel.cp": config.parallel.cp_of(num_ranks)}, num_layers, num_ranks
    )
    dtype = config.model.dtype
    attention = config.attention
    ring = smallest_ring(fixed["cp"], num_heads or fixed["cp"])
    return make_layout(
        num_layers,
        **{"attention_tier": fixed["input_tier"], "ring": ring, **fixed},
        dtype=default_dtype(on_gpu) if dtype == "auto" else dtype,
        kernel=attention.kernel,
        blocks=(attention.block_q, attention.block_kv)
        if attention.block_q and attention.block_kv
        else None,
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


def check_fixed(
    fixed: Mapping[str, Any],
    num_heads: int,
    num_layers: int,
    num_ranks: int,
    has_rings: bool = True,
) -> None:
    """Raise ConfigError if no layout of such a model on `num_ranks` ranks has these arguments of
    `make_layout`."""
    sizes = {name: fixed.get(name) for name in ("cp", "ring", "replicas", "heads_per_stage")}
    check_parallelism(num_ranks, num_heads, **sizes, has_rings=has_rings)
    for name, keyword in (
        ("checkpoint", "full"),
        ("keep_attention", "all"),
        ("keep_projections", "all"),
    ):
        count = fixed.get(SETTINGS[f"memory.{name}"]) or 0
        if count > num_layers:
            raise ConfigError(
                f"memory.{name}={count} exceeds the {num_layers} layers; use {keyword}"
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


def check_optimizer(config: Config) -> None:
    """Refuse to offload an optimizer that runs on the device only."""
    if config.memory.offload_optimizer and config.optim.name != "adamw":
        rule = f"cannot be used with optim.name={config.optim.name}, which updates on the device"
        raise ConfigError(f"memory.offload_optimizer=true {rule}; use false, or optim.name=adamw")


def smallest_ring(cp: int, num_heads: int) -> int:
    """The smallest ring whose Ulysses groups have at most one rank per query head."""
    return next(ring for ring in _divisors(cp) if cp // ring <= num_heads)


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


def format_choices(choices: Iterable[object]) -> str:
    """1, 2 or 4"""
    *others, last = [*map(str, choices)] or [""]
    return f"{', '.join(others)} or {last}" if others else last
