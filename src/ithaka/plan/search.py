"""Tries plans, returns the fastest that fits; and what else can be asked of them: the longest context, trades.

Every context parallel size, width of stages, tier, tile and overlap is tried. A layer's time does not depend on the
others, so either no layer keeps attention's output or as many as there is room for.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from ithaka.config import Config
from ithaka.layout import SETTINGS, Layout, Tier, check_fixed, fixed_settings, make_layout, settings_of
from ithaka.plan.bytes import Ledger, fits, memory
from ithaka.plan.hardware import Hardware
from ithaka.plan.seconds import Seconds, step_seconds
from ithaka.plan.shape import ModelShape, Work

TILE_BYTES = 2**27  # of x, in the largest tile: the narrower a model, the more tokens outweigh a kernel's launch
TILE_SIZES = 4  # each half of the one before
TIERS: tuple[Tier, ...] = ("device", "host", "disk")
CONTEXT_GRAIN = 1024  # per rank: longest contexts are multiples of this many tokens per rank
UNLIMITED_BYTES = 2**60
RUNNERS_UP = 3
LADDER_TILE = 8192

Fixed = Mapping[str, Any]  # what the user decided, in the words of `make_layout`


@dataclass(frozen=True)
class Plan:
    """A layout with what it costs. `limited_by`: what takes most time or, if it does not fit, the tier."""

    shape: ModelShape
    hardware: Hardware
    work: Work
    layout: Layout
    ledger: Ledger
    seconds: Seconds
    runners_up: tuple[Plan, ...] = field(default=(), repr=False)
    given: Fixed = field(default_factory=dict, repr=False, hash=False)

    @property
    def settings(self) -> dict[str, Any]:
        """In the words of the configuration."""
        return settings_of(self.layout, self.shape.heads)

    @property
    def fits(self) -> bool:
        return self.ledger.fits

    @property
    def step_s(self) -> float:
        return self.seconds.total

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.work.tokens * self.work.accumulate / self.layout.cp / self.step_s

    @property
    def sequences_per_step(self) -> int:
        """Of all data-parallel groups."""
        return self.hardware.num_gpus // self.layout.cp * self.work.batch * self.work.accumulate

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_step * self.work.context

    @property
    def limited_by(self) -> str:
        if not self.fits:
            return self.ledger.worst_tier
        shares = {name: getattr(self.seconds, name) for name in ("attention", "linear", "exchange", "copies")}
        return max(shares, key=lambda name: shares[name])


def evaluate(shape: ModelShape, layout: Layout, hardware: Hardware, work: Work) -> Plan:
    """What one layout costs, whether it fits or not."""
    ledger = memory(shape, layout, hardware, work)
    return Plan(shape, hardware, work, layout, ledger, step_seconds(shape, layout, hardware, work))


def decide(config: Config, given: Collection[str], shape: ModelShape, hardware: Hardware) -> Plan:
    """The plan of a configuration, for `ithaka plan` and `ithaka train` alike.

    `given`: names of settings (parallel.cp) that the user decided; the others are the search's to choose.
    """
    return choose(shape, hardware, work_of(config), fixed_of(config, given, shape, hardware))


def work_of(config: Config) -> Work:
    return Work(config.data.context, config.train.batch, accumulate=config.train.accumulate)


def fixed_of(config: Config, given: Collection[str], shape: ModelShape, hardware: Hardware) -> Fixed:
    chosen = {name: operator.attrgetter(name)(config) for name in SETTINGS if name in given}
    return fixed_settings(chosen, shape.num_layers, hardware.num_gpus)


def choose(shape: ModelShape, hardware: Hardware, context: int | Work, fixed: Fixed | None = None) -> Plan:
    """The fastest plan that fits, in tokens per second and GPU; without one, the plan that misses by least."""
    work = context if isinstance(context, Work) else Work(context)
    space = _Space(shape, hardware, dict(fixed or {}))
    fitting = [evaluate(shape, layout, hardware, work) for layout in space.layouts(work)]
    if not fitting:
        return replace(evaluate(shape, space.nearest(work), hardware, work), given=space.fixed)
    ranked = sorted(fitting, key=_rank)
    return replace(ranked[0], runners_up=_different(ranked), given=space.fixed)


def longest(shape: ModelShape, hardware: Hardware, fixed: Fixed | None = None, batch: int = 1) -> tuple[int, str]:
    """(longest context that fits, what stops a longer one: GPU, host, disk or heads); 0 when none fits."""
    space = _Space(shape, hardware, dict(fixed or {}))
    context = space.longest_context(batch)
    ways = [
        tier
        for tier in ways_further(shape, hardware, space.fixed, batch, context)
        if tier == "host" or hardware.disk_bytes  # a disk that is not there stops nothing
    ]
    if ways:  # the nearest miss may lack another tier, which this one could relieve
        return context, ways[-1]
    work = Work(context + space.grain, batch)
    misses = (memory(shape, layout, hardware, work) for layout in space.leanest())
    missing = min(misses, key=lambda ledger: max(ledger.excess().values())).worst_tier
    capped = "cp" not in space.fixed and max(space.cps) < hardware.num_gpus
    return context, "heads" if missing == "GPU" and capped else missing


def longest_context(shape: ModelShape, hardware: Hardware, fixed: Fixed | None = None, batch: int = 1) -> int:
    """In multiples of CONTEXT_GRAIN per rank; 0 when none fits."""
    return _Space(shape, hardware, dict(fixed or {})).longest_context(batch)


def ways_further(shape: ModelShape, hardware: Hardware, fixed: Fixed, batch: int, context: int) -> list[str]:
    """Which of host and disk, if it were without limit, would let more than `context` tokens fit."""
    more = {
        "host": replace(hardware, host_bytes=UNLIMITED_BYTES),
        "disk": replace(hardware, disk_bytes=UNLIMITED_BYTES),
    }
    return [tier for tier, machine in more.items() if longest_context(shape, machine, fixed, batch) > context]


# ---- what there is to choose from


@dataclass(frozen=True)
class _Space:
    """The layouts of a model on a machine."""

    shape: ModelShape
    hardware: Hardware
    fixed: Fixed

    def __post_init__(self) -> None:
        check_fixed(self.fixed, self.shape.heads, self.shape.num_layers, self.hardware.num_gpus)

    def either(self, name: str, values: Iterable[Any]) -> tuple[Any, ...]:
        return (self.fixed[name],) if name in self.fixed else tuple(values)

    @cached_property
    def cps(self) -> tuple[int, ...]:
        stage = self.fixed.get("heads_per_stage") or 0
        fitting = (n for n in _divisors(self.hardware.num_gpus) if n <= self.shape.heads and stage % n == 0)
        return self.either("cp", fitting)

    @property
    def grain(self) -> int:
        return CONTEXT_GRAIN * max(self.cps)

    def widths(self, cp: int) -> tuple[int | None, ...]:
        """All heads at once, half of them, a quarter, ... one per rank."""
        slots = -(-self.shape.heads // cp)
        return self.either("heads_per_stage", ((slots >> i) * cp for i in range(slots.bit_length())))

    @cached_property
    def tiles(self) -> tuple[int | None, ...]:
        """Tokens per tile, largest first."""
        largest = round(math.log2(TILE_BYTES / (2 * self.shape.hidden)))
        return self.either("tile_tokens", (2 ** (largest - i) for i in range(TILE_SIZES)))

    def tiers(self, name: str) -> tuple[Tier, ...]:
        return self.either(name, TIERS if self.hardware.disk_bytes else TIERS[:2])

    def places(self) -> Iterator[dict[str, Any]]:
        """Where the optimizer's states and the layers' inputs go, nearest first."""
        for offload in self.either("offload_optimizer", (False, True)):
            for tier in self.tiers("input_tier"):
                yield {"input_tier": tier, "offload_optimizer": offload}

    @property
    def must_keep(self) -> bool:
        """Whether attention's outputs were given a place: then some are kept, however many."""
        return "attention_tier" in self.fixed and "keep_attention" not in self.fixed

    def attention(self) -> Iterator[dict[str, Any]]:
        """Where attention's outputs go, and that some do (1 stands for as many as there is room for)."""
        wanted = self.fixed.get("keep_attention")
        if self.fixed.get("checkpoint", True) and wanted != 0:
            for tier in self.tiers("attention_tier"):
                yield {"attention_tier": tier, "keep_attention": wanted or 1}
        if not wanted and not self.must_keep:
            yield {"attention_tier": self.fixed.get("attention_tier") or "device", "keep_attention": 0}

    def layout(self, **words: Any) -> Layout:
        same = {name: self.fixed[name] for name in ("checkpoint", "dtype") if name in self.fixed}
        return make_layout(self.shape.num_layers, **same, **words)

    def fits(self, layout: Layout, work: Work) -> bool:
        return fits(self.shape, layout, self.hardware, work)

    def layouts(self, work: Work) -> Iterator[Layout]:
        """Those that fit. Places farther away than one with room for everything are not faster, and left out."""
        for cp in self.cps:
            for width, attention in product(self.widths(cp), list(self.attention())):
                for place in self.places():
                    frame = {"cp": cp, "heads_per_stage": width, **place, **attention}
                    found, complete = self.tiled(frame, work)
                    yield from found
                    if complete:
                        break

    def tiled(self, frame: dict[str, Any], work: Work) -> tuple[list[Layout], bool]:
        """With and without overlap, from the largest tile down to one with room for all; True: the largest has it."""
        most = self.fixed.get("keep_attention", self.shape.num_layers if frame["keep_attention"] else 0)
        found, complete = [], True
        for overlap in self.either("overlap", (True, False) if self.fixed.get("checkpoint", True) else (True,)):
            for tile in self.tiles:
                layout = self.roomiest({**frame, "overlap": overlap, "tile_tokens": tile}, most, work)
                if layout is not None:
                    found.append(layout)
                    if layout.keep_attention == most:
                        complete &= tile == self.tiles[0]
                        break
            else:
                complete = False
        return found, complete

    def roomiest(self, frame: dict[str, Any], most: int, work: Work) -> Layout | None:
        """With as many of attention's outputs kept as there is room for beside everything else, `most` of them."""

        def keeping(count: int) -> Layout:
            return self.layout(**{**frame, "keep_attention": count})

        def has_room(count: int) -> bool:
            return self.fits(keeping(count), work)

        if has_room(most):  # with all of them nothing is computed again, which frees room on the device
            return keeping(most)
        if most == 0 or "keep_attention" in self.fixed or not has_room(1):
            return None
        return keeping(_largest(has_room, most))

    def nearest(self, work: Work) -> Layout:
        """Where nothing fits: the layout whose worst tier is exceeded least, with few attention outputs kept."""
        few = _Space(self.shape, self.hardware, {"keep_attention": int(self.must_keep), **self.fixed})
        rest = list(product(few.attention(), few.places(), few.either("overlap", (True, False)), few.tiles))
        tried = (
            few.layout(cp=cp, heads_per_stage=width, overlap=overlap, tile_tokens=tile, **attention, **place)
            for cp in few.cps
            for width in few.widths(cp)
            for attention, place, overlap, tile in rest
        )
        excess = [(max(memory(self.shape, each, self.hardware, work).excess().values()), each) for each in tried]
        least = min(share for share, _ in excess)
        alike = [evaluate(self.shape, layout, self.hardware, work) for share, layout in excess if share == least]
        return min(alike, key=lambda plan: -plan.tokens_per_s_per_gpu).layout

    def leanest(self) -> Iterator[Layout]:
        """Layouts that can be the last to fit: most ranks per sequence, narrowest stage, smallest tile.

        Kept by all layers, attention's output needs the store but no room on the device to compute it again: so
        all, or as few as may be.
        """
        cp = max(self.cps)
        width = min(self.widths(cp), key=lambda width: width or self.shape.heads)
        frame = {"cp": cp, "heads_per_stage": width, "tile_tokens": self.tiles[-1]}
        for attention in self.attention():
            counts = {attention["keep_attention"]}
            if counts != {0} and "keep_attention" not in self.fixed:
                counts = {self.shape.num_layers, *(counts if self.must_keep else ())}
            for count, place in product(counts, list(self.places())):
                words = attention | {"keep_attention": count, "overlap": self.fixed.get("overlap", False)}
                yield self.layout(**frame, **place, **words)

    def longest_context(self, batch: int) -> int:
        layouts = list(self.leanest())

        def has_room(grains: int) -> bool:
            work = Work(grains * self.grain, batch)
            return any(self.fits(layout, work) for layout in layouts)

        high = 1
        while has_room(high):
            high *= 2
        return _largest(has_room, high) * self.grain


def _largest(fits: Callable[[int], bool], beyond: int) -> int:
    """The largest count below `beyond`, which does not fit, that does; 0 where none does. Fewer than that fit too."""
    low = 0
    while beyond - low > 1:
        middle = (low + beyond) // 2
        low, beyond = (middle, beyond) if fits(middle) else (low, middle)
    return low


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


# ---- ranking


def _rank(plan: Plan) -> tuple[Any, ...]:
    """Fastest first; between equals the one that needs least, nearest to the device."""
    layout, ledger = plan.layout, plan.ledger
    tiers = (TIERS.index(layout.input_tier), TIERS.index(layout.attention_tier))
    width = layout.heads_per_stage or plan.shape.heads
    return (-plan.tokens_per_s_per_gpu, ledger.gpu_peak, ledger.host_peak, *tiers, layout.cp, width)


def _different(ranked: list[Plan]) -> tuple[Plan, ...]:
    """The best plans of other kinds: with another cp, stage or tier."""
    best: dict[tuple[Any, ...], Plan] = {}
    for plan in ranked:
        a = plan.layout
        outputs = a.attention_tier if a.keep_attention else None
        best.setdefault((a.cp, a.heads_per_stage, a.input_tier, outputs, a.offload_optimizer), plan)
    return tuple(best.values())[1 : 1 + RUNNERS_UP]


# ---- plans beside each other


@dataclass(frozen=True)
class Trial:
    """A plan at the context asked for, whether it fits or not, and the longest context with its settings."""

    name: str
    plan: Plan
    max_context: int


def ladder(shape: ModelShape, hardware: Hardware, work: Work) -> list[Trial]:
    """What each technique buys: ithaka's own layer with one after another switched on; the last is the search's."""
    cp = max(_Space(shape, hardware, {}).cps)
    plain = make_layout(shape.num_layers, checkpoint=False, overlap=False)
    shared = replace(plain, cp=cp)
    checked = shared.but(checkpoint=True)
    offloaded = checked.but(input_tier="host")
    tiled = replace(offloaded, tile_tokens=LADDER_TILE)
    alone = replace(hardware, gpus_per_node=1, num_nodes=1)
    rungs = [
        ("one GPU, nothing sharded", plain, alone),
        ("FSDP", plain, hardware),
        ("+ Ulysses", shared, hardware),
        ("+ checkpointing", checked, hardware),
        ("+ offload to the host", offloaded, hardware),
        ("+ tiles", tiled, hardware),
        ("+ Untied Ulysses", replace(tiled, heads_per_stage=cp), hardware),
    ]
    trials = []
    for name, layout, machine in rungs:
        fixed = {word: getattr(layout, word) for word in SETTINGS.values()}
        reach = longest_context(shape, machine, fixed, work.batch)
        trials.append(Trial(name, evaluate(shape, layout, machine, work), reach))
    best = choose(shape, hardware, work)
    return [*trials, Trial("+ ithaka's schedule", best, longest_context(shape, hardware, batch=work.batch))]


def sweep_heads(shape: ModelShape, hardware: Hardware, work: Work, fixed: Fixed | None = None) -> list[Trial]:
    """heads_per_stage from one per rank to all, with all else as the best plan has it."""
    best, most = choose(shape, hardware, work, fixed).layout, shape.heads
    slots = -(-most // best.cp)
    widths = [min(2**i, slots) * best.cp for i in range((slots - 1).bit_length() + 1)]
    trials = []
    for width in widths:
        plan = evaluate(shape, replace(best, heads_per_stage=width), hardware, work)
        limit = {**(fixed or {}), "cp": best.cp, "heads_per_stage": width}
        trials.append(Trial(str(width), plan, longest_context(shape, hardware, limit, work.batch)))
    return trials
