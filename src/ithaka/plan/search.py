"""Tries plans, returns the fastest that fits.

The search is exhaustive over what matters and takes the best value at once where one direction is always
better: larger tiles and nearer tiers are never slower, and a layer's time does not depend on others, so
either no layer keeps attention's output or as many as there is room for.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ithaka.config import Config, ConfigError
from ithaka.layout import SETTINGS, Layout, Tier, fixed_settings, make_layout, settings_of
from ithaka.plan.cost import Ledger, attention_room, memory
from ithaka.plan.hardware import Hardware
from ithaka.plan.seconds import Seconds, step_seconds
from ithaka.plan.shape import ModelShape, Work

TILE_BYTES = 2**27  # of x, in the largest tile: the narrower a model, the more tokens outweigh a kernel's launch
TILE_SIZES = 4  # each half of the one before
TIERS: tuple[Tier, ...] = ("device", "host", "disk")
CONTEXT_GRAIN = 1024  # per rank: longest contexts are multiples of this many tokens per rank
UNLIMITED_BYTES = 2**60
RUNNERS_UP = 3
WORTH_SHOWING = 0.9  # plans slower than this share of the best are not looked at further


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
    given: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)  # decided by the user, of the layout

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
            return worst_tier(self.ledger)
        shares = {name: getattr(self.seconds, name) for name in ("attention", "linear", "exchange", "copies")}
        return max(shares, key=lambda name: shares[name])


Candidate = tuple[Layout, Ledger]


def evaluate(shape: ModelShape, layout: Layout, hardware: Hardware, work: Work) -> Plan:
    """What one layout costs, whether it fits or not."""
    return _costed(shape, layout, memory(shape, layout, hardware, work), hardware, work)


def _costed(shape: ModelShape, layout: Layout, ledger: Ledger, hardware: Hardware, work: Work) -> Plan:
    return Plan(shape, hardware, work, layout, ledger, step_seconds(shape, layout, hardware, work))


def decide(config: Config, given: Collection[str], shape: ModelShape, hardware: Hardware) -> Plan:
    """The plan of a configuration, for `ithaka plan` and `ithaka train` alike.

    `given`: names of settings (parallel.cp) that the user decided; the others are the search's to choose.
    """
    chosen = {name: operator.attrgetter(name)(config) for name in SETTINGS if name in given}
    work = Work(config.data.context, config.train.batch, accumulate=config.train.accumulate)
    return choose(shape, hardware, work, fixed_settings(chosen, shape.num_layers, hardware.num_gpus))


def choose(
    shape: ModelShape,
    hardware: Hardware,
    context: int | Work,
    fixed: Mapping[str, Any] | None = None,
) -> Plan:
    """The fastest plan that fits, in tokens per second and GPU; without one, the plan that misses by least.

    `fixed` holds fields of `Layout` that the user decided: they win, and are checked.
    """
    work = context if isinstance(context, Work) else Work(context)
    fixed = dict(fixed or {})
    check_fixed(shape, hardware, fixed)
    fitting = _fitting(shape, hardware, work, fixed)
    if not fitting:
        return replace(_costed(shape, *_nearest(_misses(shape, hardware, work, fixed)), hardware, work), given=fixed)
    ranked = sorted(fitting, key=_rank)
    return replace(ranked[0], runners_up=_different(ranked), given=fixed)


def longest(
    shape: ModelShape, hardware: Hardware, fixed: Mapping[str, Any] | None = None, batch: int = 1
) -> tuple[int, str]:
    """(longest context that fits, what stops a longer one: GPU, host, disk or heads); 0 when none fits."""
    fixed = dict(fixed or {})
    context = longest_context(shape, hardware, fixed, batch)
    grain = CONTEXT_GRAIN * max(_cps(shape, hardware, fixed))
    ways = [
        tier
        for tier in ways_further(shape, hardware, fixed, batch, context)
        if tier == "host" or hardware.disk_bytes  # a disk that is not there stops nothing
    ]
    if ways:  # the nearest miss may lack another tier, which this one could relieve
        return context, ways[-1]
    missing = _missing(shape, hardware, Work(context + grain, batch), fixed)
    capped = "cp" not in fixed and max(_cps(shape, hardware, fixed)) < hardware.num_gpus
    return context, "heads" if missing == "GPU" and capped else missing


def ways_further(
    shape: ModelShape, hardware: Hardware, fixed: Mapping[str, Any], batch: int, context: int
) -> list[str]:
    """Which of host and disk, if it were without limit, would let more than `context` tokens fit."""
    more = {
        "host": replace(hardware, host_bytes=UNLIMITED_BYTES),
        "disk": replace(hardware, disk_bytes=UNLIMITED_BYTES),
    }
    return [tier for tier, machine in more.items() if longest_context(shape, machine, fixed, batch) > context]


def longest_context(
    shape: ModelShape, hardware: Hardware, fixed: Mapping[str, Any] | None = None, batch: int = 1
) -> int:
    """In multiples of CONTEXT_GRAIN per rank; 0 when none fits."""
    fixed = dict(fixed or {})
    check_fixed(shape, hardware, fixed)
    grain = CONTEXT_GRAIN * max(_cps(shape, hardware, fixed))
    low, high = 0, 1
    while _fits(shape, hardware, Work(high * grain, batch), fixed):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(shape, hardware, Work(middle * grain, batch), fixed):
            low = middle
        else:
            high = middle
    return low * grain


def check_fixed(shape: ModelShape, hardware: Hardware, fixed: Mapping[str, Any]) -> None:
    """Refuses settings that no layout can have."""
    ranks, cp, stage = hardware.num_gpus, fixed.get("cp"), fixed.get("heads_per_stage")
    if cp is not None and (ranks % cp or cp > shape.heads):
        fitting = ", ".join(str(n) for n in _divisors(ranks) if n <= shape.heads)
        raise ConfigError(
            f"parallel.cp={cp} does not divide the {ranks} ranks or exceeds the {shape.heads} query heads; "
            f"use {fitting}"
        )
    if stage is not None and stage > shape.heads:
        heads = f"{shape.heads} query heads of the model"
        raise ConfigError(f"parallel.heads_per_stage={stage} exceeds the {heads}; use all")
    if stage is not None and not any(stage % n == 0 for n in _cps(shape, hardware, fixed)):
        raise ConfigError(f"parallel.heads_per_stage={stage} is no multiple of parallel.cp={cp}; use {cp} or all")
    kept = fixed.get("keep_attention")
    if kept is not None and not 0 <= kept <= shape.num_layers:
        raise ConfigError(f"memory.keep_attention={kept} exceeds the {shape.num_layers} layers of the model; use all")


def worst_tier(ledger: Ledger) -> str:
    excess = ledger.excess()
    return max(excess, key=lambda tier: excess[tier])


# ---- candidates


def _fitting(shape: ModelShape, hardware: Hardware, work: Work, fixed: Mapping[str, Any]) -> list[Plan]:
    """The plans that fit, but for some that are too slow to be shown."""
    fitting: list[Plan] = []
    best = 0.0
    for bound, start in _starts(shape, hardware, work, fixed):
        if bound < WORTH_SHOWING * best:
            break
        for layout, ledger in _candidates(start, shape, hardware, work, fixed, skip_hopeless=True):
            if ledger.fits:
                fitting.append(_costed(shape, layout, ledger, hardware, work))
                best = max(best, fitting[-1].tokens_per_s_per_gpu)
    return fitting


def _misses(shape: ModelShape, hardware: Hardware, work: Work, fixed: Mapping[str, Any]) -> Iterator[Candidate]:
    """Where nothing fits: everything, with as few of attention's outputs kept as may be."""
    fewest = 1 if _must_keep(fixed) else 0
    fixed = {"keep_attention": fewest, **fixed}
    for _, start in _starts(shape, hardware, work, fixed):
        yield from _candidates(start, shape, hardware, work, fixed, skip_hopeless=False)


def _starts(shape: ModelShape, hardware: Hardware, work: Work, fixed: Mapping[str, Any]) -> list[tuple[float, Layout]]:
    """Fastest first: (speed with everything on the device and nothing computed again, cp and heads per stage)."""
    starts = []
    for cp in _cps(shape, hardware, fixed):
        for stage in _stage_widths(shape, cp, fixed):
            start = make_layout(shape.num_layers, cp=cp, heads_per_stage=stage, **_precision(fixed))
            ideal = start.but(tile_tokens=_tiles(shape, fixed)[0], keep_attention=shape.num_layers)
            seconds = min(
                step_seconds(shape, replace(ideal, overlap=overlap), hardware, work).total for overlap in (True, False)
            )
            starts.append((work.tokens / cp / seconds, start))
    return sorted(starts, key=lambda entry: -entry[0])


def _candidates(
    start: Layout,
    shape: ModelShape,
    hardware: Hardware,
    work: Work,
    fixed: Mapping[str, Any],
    skip_hopeless: bool,
) -> Iterator[Candidate]:
    """Plans with one cp and stage width: per tier of attention's outputs, the nearest places first.

    Places farther away are slower with all else equal, so they are not tried once nothing is missing.
    `skip_hopeless`: nor are those with room for nothing.
    """
    for tier in _attention_tiers(shape, hardware, fixed):
        for place in _places(hardware, fixed):
            base = start.but(**place, **tier, checkpoint=fixed.get("checkpoint", True))
            if skip_hopeless and _is_hopeless(base, shape, hardware, work, fixed):
                continue
            complete = yield from _tiled(base, shape, hardware, work, fixed)
            if complete:
                break


def _tiled(
    base: Layout, shape: ModelShape, hardware: Hardware, work: Work, fixed: Mapping[str, Any]
) -> Generator[Candidate, None, bool]:
    """With and without overlap, from the largest tile down to one with room for all; True: all there."""
    most = fixed.get("keep_attention", shape.num_layers if base.keep_attention else 0)
    complete = True
    for overlap in _either(fixed, "overlap", (True, False) if base.checkpoint else (True,)):
        for tile in _tiles(shape, fixed):
            layout = replace(base, overlap=overlap, tile_tokens=tile)
            if most and "keep_attention" not in fixed:
                layout = layout.but(keep_attention=attention_room(shape, layout, hardware, work))
            if layout.keep_attention < min(most, 1):
                complete = False
                continue
            ledger = memory(shape, layout, hardware, work)
            yield layout, ledger
            if ledger.fits and layout.keep_attention == most:
                complete &= tile == _tiles(shape, fixed)[0]
                break
            complete = False
    return complete


def _is_hopeless(base: Layout, shape: ModelShape, hardware: Hardware, work: Work, fixed: Mapping[str, Any]) -> bool:
    """Whether nothing can fit with this cp, stage and tiers: not the leanest layout, even without what others save.

    Larger tiles need fewer gradient sums, and overlap needs no tiles of x: that much is taken off.
    """
    lean = replace(base, overlap=fixed.get("overlap", False), tile_tokens=_tiles(shape, fixed)[-1])
    counts = (shape.num_layers, 1) if base.keep_attention and "keep_attention" not in fixed else (base.keep_attention,)
    tile = min(lean.tile_tokens or work.tokens, work.local_tokens(lean.cp))
    saved = shape.layer_parameters * lean.sum_bytes + 2 * lean.x_bytes(shape.hidden, tile)

    def could_fit(ledger: Ledger) -> bool:
        return replace(ledger, gpu_bytes=ledger.gpu_bytes + saved).fits

    return not any(could_fit(memory(shape, lean.but(keep_attention=count), hardware, work)) for count in counts)


def _attention_tiers(shape: ModelShape, hardware: Hardware, fixed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Where attention's outputs go, and that some do (1 stands for as many as there is room for)."""
    wanted = fixed.get("keep_attention")
    if fixed.get("checkpoint", True) and wanted != 0:
        for tier in _tiers(fixed.get("attention_tier"), hardware):
            yield {"attention_tier": tier, "keep_attention": wanted or 1}
    if not wanted and not _must_keep(fixed):
        yield {"attention_tier": fixed.get("attention_tier") or "device", "keep_attention": 0}


def _must_keep(fixed: Mapping[str, Any]) -> bool:
    """Whether attention's outputs were given a place: then some are kept, however many."""
    return "attention_tier" in fixed and "keep_attention" not in fixed


def _places(hardware: Hardware, fixed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for offload in _either(fixed, "offload_optimizer", (False, True)):
        for tier in _tiers(fixed.get("input_tier"), hardware):
            yield {"input_tier": tier, "offload_optimizer": offload}


def _fits(shape: ModelShape, hardware: Hardware, work: Work, fixed: Mapping[str, Any]) -> bool:
    return any(memory(shape, layout, hardware, work).fits for layout in _leanest(shape, hardware, fixed))


def _leanest(shape: ModelShape, hardware: Hardware, fixed: Mapping[str, Any]) -> Iterator[Layout]:
    """Layouts that can be the last to fit: most ranks per sequence, narrowest stage, smallest tile.

    Kept by all layers, attention's output needs the store but no room on the device to compute it again: so
    all, or as few as may be.
    """
    cp = max(_cps(shape, hardware, fixed))
    widths = _stage_widths(shape, cp, fixed)
    start = make_layout(
        shape.num_layers,
        cp=cp,
        heads_per_stage=min(widths, key=lambda width: width or shape.heads),
        tile_tokens=_tiles(shape, fixed)[-1],
        overlap=fixed.get("overlap", False),
        checkpoint=fixed.get("checkpoint", True),
        **_precision(fixed),
    )
    for tier in _attention_tiers(shape, hardware, fixed):
        few = tier["keep_attention"]
        counts = {shape.num_layers, few if _must_keep(fixed) else shape.num_layers}
        for count in counts if few and "keep_attention" not in fixed else (few,):
            for place in _places(hardware, fixed):
                yield start.but(**place, **tier | {"keep_attention": count})


def _missing(shape: ModelShape, hardware: Hardware, work: Work, fixed: Mapping[str, Any]) -> str:
    """The tier that the nearest miss lacks."""
    misses = [(layout, memory(shape, layout, hardware, work)) for layout in _leanest(shape, hardware, fixed)]
    return worst_tier(_nearest(misses)[1])


def _cps(shape: ModelShape, hardware: Hardware, fixed: Mapping[str, Any]) -> list[int]:
    if "cp" in fixed:
        return [fixed["cp"]]
    stage = fixed.get("heads_per_stage") or 0
    return [n for n in _divisors(hardware.num_gpus) if n <= shape.heads and stage % n == 0]


def _stage_widths(shape: ModelShape, cp: int, fixed: Mapping[str, Any]) -> list[int | None]:
    """All heads at once, half of them, a quarter, ... one per rank."""
    if "heads_per_stage" in fixed:
        width = fixed["heads_per_stage"]
        return [width] if width is None or width % cp == 0 else []
    widths: list[int | None] = []
    slots = -(-shape.heads // cp)
    while slots:
        widths.append(slots * cp)
        slots //= 2
    return widths


def _tiers(wanted: Tier | None, hardware: Hardware) -> tuple[Tier, ...]:
    if wanted is not None:
        return (wanted,)
    return TIERS if hardware.disk_bytes else TIERS[:2]


def _tiles(shape: ModelShape, fixed: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Tokens per tile to try, largest first."""
    if "tile_tokens" in fixed:
        return (fixed["tile_tokens"],)
    largest = round(math.log2(TILE_BYTES / (2 * shape.hidden)))
    return tuple(2 ** (largest - i) for i in range(TILE_SIZES))


def _precision(fixed: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fixed[name] for name in ("dtype",) if name in fixed}


def _either(fixed: Mapping[str, Any], name: str, values: tuple[bool, ...]) -> tuple[bool, ...]:
    return (fixed[name],) if name in fixed else values


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


# ---- ranking


def _rank(plan: Plan) -> tuple[Any, ...]:
    """Fastest first; between equals the one that needs least, nearest to the device."""
    layout = plan.layout
    return (
        -plan.tokens_per_s_per_gpu,
        plan.ledger.gpu_peak,
        plan.ledger.host_peak,
        TIERS.index(layout.input_tier),
        TIERS.index(layout.attention_tier),
        layout.cp,
        layout.heads_per_stage or plan.shape.heads,
    )


def _nearest(misses: Iterable[Candidate]) -> Candidate:
    """The one whose worst tier is exceeded least."""
    return min(misses, key=lambda miss: max(miss[1].excess().values()))


def _different(ranked: list[Plan]) -> tuple[Plan, ...]:
    """The best plans of other kinds: with another cp, stage, tier, or number of layers kept."""

    def kind(plan: Plan) -> tuple[Any, ...]:
        a = plan.layout
        return (
            a.cp,
            a.heads_per_stage,
            a.input_tier,
            a.attention_tier if a.keep_attention else None,
            a.offload_optimizer,
        )

    seen, others = {kind(ranked[0])}, []
    for plan in ranked[1:]:
        if kind(plan) not in seen:
            seen.add(kind(plan))
            others.append(plan)
    return tuple(others[:RUNNERS_UP])
