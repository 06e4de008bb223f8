"""The layout: every decision about memory and parallelism, in one frozen type.

The planner makes it, or `layout_of` from a configuration; the layers, the ledger, the run directory and the report
take it unchanged. This file imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

from ithaka.config import Config, ConfigError, check_effects

Tier = Literal["device", "host", "disk"]
ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ActivationPolicy:
    """What one layer keeps from its forward to its backward, and where."""

    input: Tier = "device"
    attention: Tier | None = None  # attention's output; None: computed again in backward
    # On the device, for layers that keep attention's output: q, k, v and x + attention,
    projections: bool = False
    mlp: bool = False  # and what the MLP's first two products return


EVERYTHING = ActivationPolicy("device", "device", True, True)


@dataclass(frozen=True)
class Layout:
    """The defaults are plain: every technique is off."""

    cp: int = 1  # ranks that share a sequence: ulysses * ring
    ring: int = field(default=1, kw_only=True)  # Ulysses groups, each with its part of the sequence and all heads
    replicas: int = field(default=1, kw_only=True)  # copies of the model, each sharded over neighbouring ranks
    heads_per_stage: int | None = None  # over a Ulysses group; None: all heads at once, which is plain Ulysses
    tile_tokens: int | None = None  # None: all of a rank's tokens at once
    kept: tuple[ActivationPolicy, ...] = ()  # one entry per layer; empty: every layer keeps its input on the device
    # Memory for time: send the next stage, and fetch what it needs, while this one attends; in backward the input
    # comes to the device once and stays, instead of tile by tile in every walk.
    overlap: bool = True
    offload_optimizer: bool = False
    dtype: str | None = None  # of the computation; None: the parameters' own, which plans take for 16-bit
    kernel: str = "auto"  # of attention
    blocks: tuple[int, int] | None = None  # tokens per query and per key/value block; None: by the size of the cache
    compile: bool = False  # torch.compile for the MLP

    @property
    def ulysses(self) -> int:
        """Ranks that exchange tokens for heads."""
        return self.cp // self.ring

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype or "bfloat16"]

    @property
    def sum_bytes(self) -> int:
        """Of gradient sums and log-sum-exps."""
        return max(4, self.element_bytes)

    def x_bytes(self, hidden: int, num_tokens: int) -> int:
        """X: one tensor of the residual stream."""
        return num_tokens * hidden * self.element_bytes

    def of_layers(self, num_layers: int) -> tuple[ActivationPolicy, ...]:
        """`kept` for a model of so many layers."""
        if self.kept and len(self.kept) != num_layers:
            raise ConfigError(
                f"layout.kept has {len(self.kept)} entries for the {num_layers} layers of the model; give one per layer"
            )
        return self.kept or (ActivationPolicy(),) * num_layers

    def groups(self, num_layers: int, first: int = 0) -> list[tuple[ActivationPolicy, int]]:
        """(what they keep, how many) of neighbouring layers that keep the same, from layer `first` on."""
        return [(keeps, len(list(same))) for keeps, same in groupby(self.of_layers(num_layers)[first:])]

    # What is kept, in the words of a configuration, which has one for all layers.

    @property
    def input_tier(self) -> Tier:
        return self.kept[0].input if self.kept else "device"

    @property
    def keep_attention(self) -> int:
        """Layers that keep attention's output."""
        return sum(layer.attention is not None for layer in self.kept)

    @property
    def keep_projections(self) -> int:
        """Layers that keep all but the MLP's middle."""
        return sum(layer.projections for layer in self.kept)

    @property
    def keep_everything(self) -> int:
        return sum(layer.mlp for layer in self.kept)

    @property
    def attention_tier(self) -> Tier:
        return next((layer.attention for layer in self.kept if layer.attention), "device")

    def but(self, **changes: Any) -> Layout:
        """A copy with some fields changed, and with what is kept in the words above."""
        words = ("input_tier", "keep_attention", "attention_tier", "keep_projections", "keep_everything")
        told = {word: changes.pop(word) if word in changes else getattr(self, word) for word in words}
        return replace(self, kept=make_layout(len(self.kept), **told).kept, **changes)


def make_layout(
    num_layers: int,
    *,
    input_tier: Tier = "device",
    keep_attention: int = 0,
    attention_tier: Tier = "device",
    keep_projections: int = 0,
    keep_everything: int = 0,
    **fields: Any,
) -> Layout:
    """A layout from its fields, with what is kept in the words of a configuration.

    The last layers keep most: their backward comes first, so it is gone when those below compute again.
    """
    everything = min(keep_everything, num_layers)
    projected = max(min(keep_projections, num_layers), everything)
    attended = max(min(keep_attention, num_layers), projected)
    kept = (ActivationPolicy(input_tier),) * (num_layers - attended)
    kept += (ActivationPolicy(input_tier, attention_tier),) * (attended - projected)
    kept += (ActivationPolicy(input_tier, attention_tier, True),) * (projected - everything)
    kept += (ActivationPolicy(input_tier, attention_tier, True, True),) * everything
    return Layout(kept=kept, **fields)


# ---- a configuration's settings

# The settings that a layout decides, and its name for each.
SETTINGS = {
    "parallel.cp": "cp",
    "parallel.ring": "ring",
    "parallel.replicas": "replicas",
    "parallel.heads_per_stage": "heads_per_stage",
    "memory.checkpoint": "keep_everything",
    "memory.offload": "input_tier",
    "memory.tile_tokens": "tile_tokens",
    "memory.keep_attention": "keep_attention",
    "memory.attention_offload": "attention_tier",
    "memory.keep_projections": "keep_projections",
    "memory.offload_optimizer": "offload_optimizer",
    "memory.overlap": "overlap",
}


def _words(num_layers: int, num_ranks: int) -> dict[str, dict[Any, Any]]:
    """The words of the configuration -> those of a layout."""
    return {
        "cp": {"all": num_ranks},
        "heads_per_stage": {"all": None},
        # memory.checkpoint counts the others.
        "keep_everything": {n: num_layers - n for n in range(num_layers + 1)} | {"none": num_layers, "full": 0},
        "input_tier": {"none": "device"},
        "tile_tokens": {"all": None},
        "keep_attention": {"none": 0, "all": num_layers},
        "attention_tier": {"none": "device"},
        "keep_projections": {"none": 0, "all": num_layers},
    }


def fixed_settings(chosen: Mapping[str, Any], num_layers: int, num_ranks: int) -> dict[str, Any]:
    """Settings (`{"parallel.cp": 8, "memory.offload": "host"}`) as `make_layout` takes them; null is left out."""
    check_effects(chosen)
    words = _words(num_layers, num_ranks)
    fixed = {SETTINGS[name]: value for name, value in chosen.items() if value not in (None, "auto")}
    return {name: words.get(name, {}).get(value, value) for name, value in fixed.items()}


def settings_from_layout(layout: Layout, num_heads: int) -> dict[str, Any]:
    """A layout in the words of the configuration."""
    words = {word: {new: old for old, new in pairs.items()} for word, pairs in _words(len(layout.kept), 0).items()}
    values = {name: getattr(layout, word) for name, word in SETTINGS.items()}
    settings = {name: words.get(SETTINGS[name], {}).get(value, value) for name, value in values.items()}
    if (layout.heads_per_stage or 0) >= num_heads:
        settings["parallel.heads_per_stage"] = "all"
    if not layout.keep_attention:
        settings["memory.attention_offload"] = None
    return settings


def default_dtype(on_gpu: bool) -> str:
    """Compute dtype for model.dtype=auto."""
    return "bfloat16" if on_gpu else "float32"


def smallest_ring(cp: int, num_heads: int) -> int:
    """Of groups that have no more ranks than there are heads."""
    return next(ring for ring in range(1, cp + 1) if cp % ring == 0 and cp // ring <= num_heads)


def layout_from_config(
    config: Config, num_layers: int, num_ranks: int, on_gpu: bool, num_heads: int | None = None
) -> Layout:
    """The layout that a whole configuration describes. `num_heads`: of the model, for parallel.ring=auto."""
    values = {name: attrgetter(name)(config) for name in SETTINGS}
    fixed = fixed_settings(values | {"parallel.cp": config.parallel.cp_of(num_ranks)}, num_layers, num_ranks)
    dtype, attention = config.model.dtype, config.attention
    ring = smallest_ring(fixed["cp"], num_heads or fixed["cp"])
    return make_layout(
        num_layers,
        **{"attention_tier": fixed["input_tier"], "ring": ring, **fixed},
        dtype=default_dtype(on_gpu) if dtype == "auto" else dtype,
        kernel=attention.kernel,
        blocks=(attention.block_q, attention.block_kv) if attention.block_q and attention.block_kv else None,
        compile=config.train.compile,
    )


def check_fixed(fixed: Mapping[str, Any], num_heads: int, num_layers: int, num_ranks: int) -> None:
    """Refuse what no layout of such a model on so many ranks can have."""
    stage = fixed.get("heads_per_stage") or 0
    ring = fixed.get("ring") or smallest_ring(fixed.get("cp") or 1, num_heads)
    cp, replicas = fixed.get("cp") or ring, fixed.get("replicas") or 1
    ulysses = cp // ring or 1
    ranks, heads = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks", f"{num_heads} query heads of the model"
    step, most = (ring, num_heads * ring) if fixed.get("ring") else (1, num_ranks)
    fitting = format_choices(n for n in range(step, min(num_ranks, most) + 1, step) if num_ranks % n == 0)
    stages = format_choices([*range(ulysses, num_heads + 1, ulysses)[:4], "all"])
    rings = format_choices(n for n in range(1, cp + 1) if cp % n == 0 and cp // n <= num_heads)
    times = f"parallel.ring={ring} times " if ring > 1 else ""
    over = f"parallel.cp={cp}" + f" // parallel.ring={ring}" * (ring > 1)
    for setting, wrong, rule, way_out in (
        (f"parallel.cp={cp}", num_ranks % cp, f"does not divide the {ranks}", f"{fitting}, or other ranks"),
        (f"parallel.ring={ring}", cp % ring, f"does not divide parallel.cp={cp}", rings),
        (
            f"parallel.cp={cp} of {ranks}",
            ulysses > num_heads,
            f"exceeds {times}the {heads}",
            f"{fitting}, or parallel.ring={rings}",
        ),
        (
            f"parallel.replicas={replicas}",
            num_ranks % replicas,
            f"does not divide the {ranks}",
            format_choices(n for n in range(1, num_ranks + 1) if num_ranks % n == 0),
        ),
        (f"parallel.heads_per_stage={stage}", stage > num_heads, f"exceeds the {heads}", "all"),
        (f"parallel.heads_per_stage={stage}", stage % ulysses, f"is not a multiple of {over}", stages),
        *(
            (f"{name}={fixed.get(word)}", (fixed.get(word) or 0) > num_layers, f"exceeds the {num_layers} layers", way)
            for name, word, way in (
                ("memory.checkpoint", "keep_everything", "full"),
                ("memory.keep_attention", "keep_attention", "all"),
                ("memory.keep_projections", "keep_projections", "all"),
            )
        ),
    ):
        if wrong:
            raise ConfigError(f"{setting} {rule}; use {way_out}")


def format_choices(ways: Iterable[object]) -> str:
    """1, 2 or 4"""
    words = [str(way) for way in ways]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
