"""Search for the fastest layout that fits a machine.

It tries all combinations of these choices (`candidates`): how many ranks share a sequence, with the
rings that can be fastest; the heads per stage; the tier of attention outputs, if they are kept; the
replicas of weights; where optimizer states and layer inputs are; overlap; and the tile size. Layers
do not affect each other's time, so either no layer keeps its attention output or as many as fit.

Each candidate is a `Plan`: plan/bytes.py estimates its memory, plan/seconds.py its time. Those that
fit fill the device (`fill_device`) with what saves most seconds per byte: first q, k, v and the sum
after attention, then the MLP's gate and up projections. `choose` takes the fastest plan or, among
plans of nearly its speed, the one with the least disk and host memory.

The search also finds what would fit: the longest context, an adapter, more memory or more GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

from ithaka.config import AdapterConfig, Config, ConfigError, Origin
from ithaka.facts.attention import AttentionKind
from ithaka.layout import (
    FIELDS,
    TIERS,
    Layout,
    check_parallelism,
    forward_layout,
    layout_values,
    settings_from_layout,
)
from ithaka.plan.bytes import Ledger, build_ledger
from ithaka.plan.hardware import GPUS_PER_NODE, Hardware
from ithaka.plan.seconds import Seconds, flop_seconds, gather_seconds, reduce_seconds, step_seconds
from ithaka.plan.shape import ModelShape, StepShape

TILE_BYTES = 2**29  # of x in the largest tile, whatever its width: enough to outweigh its launches
NUM_TILE_SIZES = 6  # each half of the one before
BUFFER_SETTINGS = ("heads_per_stage", "tile_tokens", "overlap")  # they only size device buffers
NEAR_ENOUGH = 0.99  # plans within this fraction of the best speed compete on host memory
NUM_ALTERNATIVES = 4  # plans shown with the chosen one
CONTEXT_GRAIN = 1024  # longest contexts are multiples of this many tokens per rank
CAPACITY_GRAIN = 64 * 10**9  # step of the search for enough host memory or disk, bytes
UNLIMITED_BYTES = 2**60
MAX_NODES = 1024  # in the search for a large enough machine
ADAPTER_RANK = 16  # tried when a plan does not fit

Candidate = Mapping[str, Any]  # fields of a layout
Fixed = Mapping[str, Any]  # those set explicitly
Split = tuple[int, int]  # (cp, ring)


@dataclass(frozen=True)
class Plan:
    """A layout with its memory and time. `alternatives`: the best plans of other kinds."""

    shape: ModelShape
    layout: Layout
    hardware: Hardware
    work: StepShape
    fixed: Fixed = field(default_factory=dict, repr=False, hash=False)
    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False, compare=False)
    alternatives: tuple[Plan, ...] = field(default=(), repr=False, compare=False)

    @cached_property
    def ledger(self) -> Ledger:
        """Bytes on the device, in host memory and on disk."""
        return build_ledger(self.shape, self.layout, self.hardware, self.work)

    @cached_property
    def seconds(self) -> Seconds:
        """The time of a step, by what it is spent on."""
        return step_seconds(self.shape, self.layout, self.hardware, self.work)

    @property
    def flop_seconds(self) -> Seconds:
        return flop_seconds(self.shape, self.layout, self.hardware, self.work)

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
    def kind(self) -> tuple[Hashable, ...]:
        """Plans of one kind differ only in details: cp, ring and tiers are the same."""
        layout = self.layout
        attention_tier = layout.attention_tier if layout.keep_attention else None
        tiers = (layout.input_tier, attention_tier, layout.offload_optimizer)
        return layout.cp, layout.ring, *tiers

    @property
    def limited_by(self) -> str:
        """What takes most of the time, or the tier exceeded most if the plan does not fit."""
        if not self.fits:
            return self.ledger.worst[1]
        names = ("attention", "linear", "exchange", "copies")
        parts = {name: getattr(self.seconds, name) for name in names}
        return max(parts, key=lambda name: parts[name])

    @property
    def sequences_per_step(self) -> int:
        """Over all data-parallel groups."""
        return self.hardware.num_gpus // self.layout.cp * self.work.batch * self.work.accumulate

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_step * self.work.context

    @property
    def kernels(self) -> dict[AttentionKind, str]:
        """The kernel whose rates are planned for each kind of attention; "": unknown."""
        kinds = self.shape.attention_kinds
        machines = [self.hardware.for_attention(kind.head_dim, kind.softcap) for kind in kinds]
        return {kind: machine.gpu.kernel for kind, machine in zip(kinds, machines, strict=True)}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a configuration."""
        return settings_from_layout(self.layout, self.shape.heads, self.shape.num_layers)

    def with_changes(self, **changes: object) -> Plan:
        """A copy with a changed layout."""
        layout = replace(self.layout, **changes)  # type: ignore[arg-type]
        return replace(self, layout=layout)


def _rank(plan: Plan) -> tuple[float, tuple[int, int], tuple[int, ...]]:
    """Sorts plans, the best first: fastest, then least memory, nearest to the device, smallest."""
    layout = plan.layout
    memory = (plan.ledger.gpu_peak, plan.ledger.host_needed)
    distance = TIERS.index(layout.input_tier) + TIERS.index(layout.attention_tier)
    stage = layout.heads_per_stage or plan.shape.heads
    sizes = (layout.offload_optimizer, distance, layout.cp, layout.ring, stage)
    return -plan.tokens_per_s_per_gpu, memory, sizes


@dataclass(frozen=True)
class SearchSpace:
    """The layouts of a model on a machine that have the user's settings, `fixed`."""

    shape: ModelShape
    hardware: Hardware
    fixed: Fixed = field(default_factory=dict)
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False)  # by name

    def __post_init__(self) -> None:
        shape = self.shape
        sizes = {
            name: self.fixed.get(name) for name in ("cp", "ring", "replicas", "heads_per_stage")
        }
        has_rings = not shape.why_no_ring
        check_parallelism(self.hardware.num_gpus, shape.heads, **sizes, has_rings=has_rings)

    # ---- the best plan

    def choose(self, work: StepShape) -> Plan:
        """Choose the plan with the least disk and host memory among those within 1 % of the fastest
        that fits, in tokens per second and GPU. If none fits: the plan closest to fitting."""
        ranked = sorted(self._best_by_kind(work), key=_rank) or [self.closest_to_fitting(work)]
        min_speed = NEAR_ENOUGH * ranked[0].tokens_per_s_per_gpu
        near = [plan for plan in ranked if plan.tokens_per_s_per_gpu >= min_speed]
        chosen = min(near, key=lambda plan: (plan.ledger.disk_peak, plan.ledger.host_needed))
        others = [plan for plan in ranked if plan is not chosen]
        return replace(
            chosen,
            fixed=self.fixed,
            origins=self.origins,
            alternatives=tuple(others[:NUM_ALTERNATIVES]),
        )

    def _best_by_kind(self, work: StepShape) -> Collection[Plan]:
        """The best plan of each kind, with a full device, until no other can be chosen or shown."""
        plans = self.plans_that_fit(work)
        bounds = [(self.upper_bound(plan).tokens_per_s_per_gpu, plan) for plan in plans]
        bounds.sort(key=lambda pair: -pair[0])
        best: dict[tuple[Hashable, ...], Plan] = {}
        for bound, plan in bounds:
            speeds = sorted((other.tokens_per_s_per_gpu for other in best.values()), reverse=True)
            if len(speeds) > NUM_ALTERNATIVES:
                slowest_shown = speeds[NUM_ALTERNATIVES]
                if bound < min(NEAR_ENOUGH * speeds[0], slowest_shown):
                    break
            if plan.kind in best and bound < best[plan.kind].tokens_per_s_per_gpu:
                continue
            filled = self.fill_device(plan)
            best[filled.kind] = min(best.get(filled.kind, filled), filled, key=_rank)
        return best.values()

    def plans_that_fit(self, work: StepShape) -> Iterator[Plan]:
        """Yield plans that fit, with as many attention outputs kept as fit. Once a tier holds
        everything, slower tiers are not tried."""
        can_fit: dict[tuple[Hashable, ...], bool] = {}  # with the smallest buffers
        settled: set[tuple[Hashable, ...]] = set()  # a tier holds everything
        splits = [split for split in self.splits if self.fits(work, [split])]
        for candidate in self.candidates(splits):
            # Skip tiles that are twice as large as needed: all hold the same tokens.
            max_tile = max(2 * work.local_tokens(candidate["cp"]) - 1, self.tile_sizes[-1])
            if candidate["tile_tokens"] > max_tile and "tile_tokens" not in self.fixed:
                continue
            held = _values_without(candidate, BUFFER_SETTINGS)
            if held not in can_fit:
                smallest = self._smallest_buffers(candidate, work)
                can_fit[held] = any(self.make_plan(variant, work).fits for variant in smallest)
            computed = _values_without(candidate, ("offload_optimizer", "input_tier"))
            if not can_fit[held] or computed in settled:
                continue
            plan = self.make_plan(candidate, work)
            max_layers = candidate["keep_attention"]
            if max_layers and "keep_attention" not in self.fixed:
                max_layers = self.shape.num_layers
                plan = _with_most_layers(plan, "keep_attention", max_layers)
            if not plan.fits:
                continue
            yield plan
            if plan.layout.keep_attention == max_layers:
                settled.add(computed)

    def upper_bound(self, plan: Plan) -> Plan:
        """`plan` with all kept that may be, fitting or not. `fill_device` makes no faster one."""
        most = self.fixed.get("keep_projections", plan.layout.keep_attention)
        everything = self.fixed.get("keep_everything", most)
        return plan.with_changes(keep_projections=most, keep_everything=everything)

    def fill_device(self, plan: Plan) -> Plan:
        """`plan` with as many layers keeping more on the device as fit: projections first."""
        bound = self.upper_bound(plan).layout
        plan = _with_most_layers(plan, "keep_projections", bound.keep_projections)
        if plan.layout.keep_projections < bound.keep_projections:
            return plan
        return _with_most_layers(plan, "keep_everything", bound.keep_everything)

    def closest_to_fitting(self, work: StepShape) -> Plan:
        """The plan whose worst tier is exceeded least, with the fewest attention outputs kept."""
        candidates = list(self.candidates())
        fewest = min(candidate["keep_attention"] for candidate in candidates)
        candidates = [each for each in candidates if each["keep_attention"] == fewest]
        plans = [self.make_plan(candidate, work) for candidate in candidates]
        least = min(plan.ledger.worst[0] for plan in plans)
        closest = [plan for plan in plans if plan.ledger.worst[0] == least]
        return max(closest, key=lambda plan: plan.tokens_per_s_per_gpu)

    # ---- candidates

    def candidates(self, splits: Sequence[Split] | None = None) -> Iterator[dict[str, Any]]:
        """Yield every layout (of `splits`), with at most one attention output kept."""
        tiers = TIERS if self.hardware.disk_bytes else TIERS[:2]
        options: dict[str, Sequence[Any]] = {
            "attention_tier": tiers,
            "keep_attention": [1] if "attention_tier" in self.fixed else [1, 0],
            "replicas": self.replica_counts,
            "offload_optimizer": [False, True],
            "input_tier": tiers,
            "overlap": [True, False],
            "tile_tokens": self.tile_sizes,
        }
        user = {name: [value] for name, value in self.fixed.items()}
        for cp, ring in self.splits if splits is None else splits:
            ulysses = cp // ring
            slots = -(-self.shape.heads // ulysses)
            # All heads at once, half of them, a quarter, ... one per rank.
            widths = [(slots >> i) * ulysses for i in range(slots.bit_length())]
            choices = {"cp": [cp], "ring": [ring], "heads_per_stage": widths, **options, **user}
            first_tier = choices["attention_tier"][0]
            for values in product(*choices.values()):
                candidate = dict(zip(choices, values, strict=True))
                # Where no output is kept, its tier does not matter.
                if candidate["keep_attention"] or candidate["attention_tier"] == first_tier:
                    yield candidate

    @cached_property
    def splits(self) -> list[Split]:
        """(cp, ring) to try. A sequence takes part of a node or several nodes. A Ulysses group is
        in one node: across nodes it would exchange everything over the network."""
        per_node = self.hardware.gpus_per_node
        ranks = self.hardware.num_gpus
        cps = [n for n in range(1, ranks + 1) if ranks % n == 0]
        if "cp" in self.fixed:
            cps = [self.fixed["cp"]]
        aligned = [cp for cp in cps if per_node % cp == 0 or cp % per_node == 0]
        splits = [split for cp in aligned for split in self._rings(cp)]
        return splits or [split for cp in cps for split in self._rings(cp)]

    def _rings(self, cp: int) -> list[Split]:
        """The splits of `cp` ranks with the largest Ulysses group, and with the largest that has no
        empty slots: larger groups need less memory and send less."""
        heads = self.shape.heads
        stage = self.fixed.get("heads_per_stage") or 0
        ring = 1 if self.shape.why_no_ring else self.fixed.get("ring")
        groups = [n for n in range(1, min(cp, heads) + 1) if cp % n == 0 and stage % n == 0]
        if ring is None:
            groups = [n for n in groups if self.hardware.gpus_per_node % n == 0]
        else:
            groups = [n for n in groups if cp == n * ring]
        largest = set(groups[-1:])
        largest.update([n for n in groups if heads % n == 0][-1:])
        return [(cp, cp // ulysses) for ulysses in sorted(largest, reverse=True)]

    @cached_property
    def tile_sizes(self) -> list[int]:
        """Tokens per tile, largest first."""
        largest = round(math.log2(TILE_BYTES / (2 * self.shape.hidden)))
        return [2 ** (largest - i) for i in range(NUM_TILE_SIZES)]

    @property
    def replica_counts(self) -> list[int]:
        """Numbers of replicas to try: also one per node if that is faster."""
        nodes = self.hardware.num_nodes
        gather_s = partial(gather_seconds, 2**20, self.hardware)
        reduce_s = partial(reduce_seconds, 2**21, self.hardware)
        seconds = {n: 2 * gather_s(n) + reduce_s(n) for n in (1, nodes)}
        return [nodes, 1] if seconds[nodes] < seconds[1] else [1]

    def make_plan(self, candidate: Candidate, work: StepShape) -> Plan:
        """The plan of a candidate. Inputs that the host or disk cannot hold stay on the device."""
        plan = Plan(self.shape, Layout(**candidate), self.hardware, work)
        tier = plan.layout.input_tier
        if tier == "device" or "keep_inputs" in self.fixed:
            return plan
        if plan.fits or not plan.ledger.fits_in("GPU"):
            return plan
        # The first layer's tier is that of the plan.
        most = self.shape.num_layers - max(1, self.shape.first_trained)
        fewest_stored = plan.with_changes(keep_inputs=most)
        # Without the checkpoint copy, which is made only if it fits.
        needed, least = (
            ledger.host_needed if tier == "host" else ledger.disk_peak
            for ledger in (plan.ledger, fewest_stored.ledger)
        )
        available = plan.ledger.tiers[tier][1]
        if not least <= available < needed:
            return plan
        return plan.with_changes(keep_inputs=-(-most * (needed - available) // (needed - least)))

    # ---- what fits if anything does

    def fits(self, work: StepShape, splits: Sequence[Split] | None = None) -> bool:
        """Whether any layout (of `splits`) fits."""
        candidates = self.smallest_candidates(splits or self.splits)
        return any(self.make_plan(candidate, work).fits for candidate in candidates)

    def smallest_candidates(self, splits: Sequence[Split]) -> Iterator[dict[str, Any]]:
        """The candidates of each split that fit if any does: narrowest stage, smallest tile. If
        every layer keeps its attention output, the device needs no memory to recompute it. So all
        layers keep it, or as few as possible."""
        smallest = {"tile_tokens": self.tile_sizes[-1], "overlap": False, "replicas": 1}
        for cp, ring in splits:
            split = {"cp": cp, "ring": ring, "heads_per_stage": cp // ring}
            space = replace(self, fixed={**split, **smallest, **self.fixed})
            for candidate in space.candidates([(cp, ring)]):
                yield candidate
                if candidate["keep_attention"] and "keep_attention" not in self.fixed:
                    yield candidate | {"keep_attention": self.shape.num_layers}

    def _smallest_buffers(self, candidate: Candidate, work: StepShape) -> Iterator[Candidate]:
        """Yield the variants of `candidate` with the smallest buffers: if none of them fits, no
        other choice of BUFFER_SETTINGS does. A single tile may need less than several, because it
        sums no gradients; a short one with overlap, because its input is fetched once."""
        ulysses = candidate["cp"] // candidate["ring"]
        local_tokens = work.local_tokens(candidate["cp"])
        shortest = self.tile_sizes[-1]
        one_tile = min((n for n in self.tile_sizes if n >= local_tokens), default=shortest)
        counts = {candidate["keep_attention"]}
        if candidate["keep_attention"] and "keep_attention" not in self.fixed:
            counts.add(self.shape.num_layers)
        for tile, overlap, count in product({shortest, one_tile}, (False, True), counts):
            buffers = {"heads_per_stage": ulysses, "tile_tokens": tile, "overlap": overlap}
            yield {**candidate, **buffers, **self.fixed, "keep_attention": count}

    # ---- the longest context

    def longest_context_and_limit(self, batch: int = 1) -> tuple[int, str]:
        """(longest context that fits, what limits it: GPU, host, disk or heads)."""
        context = self.longest_context(batch)
        # A missing disk is no limit. The layout closest to fitting may lack a tier that more host
        # memory would relieve.
        for tier in ("disk", "host") if self.hardware.disk_bytes else ("host",):
            if self.with_capacity(tier).longest_context(batch) > context:
                return context, tier
        work = StepShape(context + CONTEXT_GRAIN * self.max_cp, batch)
        candidates = self.smallest_candidates(self.longest_splits)
        limit = min(self.make_plan(candidate, work).ledger.worst for candidate in candidates)[1]
        is_capped_by_ring = "cp" not in self.fixed and self.max_cp < self.hardware.num_gpus
        return context, "heads" if limit == "GPU" and is_capped_by_ring else limit

    def longest_context(self, batch: int) -> int:
        """The longest context that fits, in multiples of CONTEXT_GRAIN per rank; 0 if none does."""
        grain = CONTEXT_GRAIN * self.max_cp

        def fits(candidate: Candidate, grains: int) -> bool:
            return self.make_plan(candidate, StepShape(grains * grain, batch)).fits

        longest = 0
        for candidate in self.smallest_candidates(self.longest_splits):
            longest = _largest(partial(fits, candidate), longest)
        return longest * grain

    @property
    def longest_splits(self) -> list[Split]:
        """The splits with the longest context: those over most ranks."""
        return [split for split in self.splits if split[0] == self.max_cp]

    @property
    def max_cp(self) -> int:
        return max(cp for cp, _ in self.splits)

    # ---- what makes a plan fit

    def adapter_that_fits(self, work: StepShape) -> dict[str, Any]:
        """Settings of `adapter` with which a layout fits, four-bit if needed; {} if none does."""
        current = self.shape.adapter
        first = current or AdapterConfig(rank=ADAPTER_RANK)
        for settings in self.shape.root.adapter_settings:
            adapter = replace(first, **{"base": "bf16", **settings})
            shape = replace(self.shape.with_adapter(adapter), reference=False)
            if adapter != current and replace(self, shape=shape).fits(work):
                return {**settings} if current else {"rank": ADAPTER_RANK, **settings}
        return {}

    @property
    def with_float8(self) -> SearchSpace | None:
        """The same space with memory.stored_dtype=float8, if that is possible and not yet set."""
        if "stored_dtype" in self.fixed or not self.hardware.gpu.has_float8:
            return None
        return replace(self, fixed={**self.fixed, "stored_dtype": "float8"})

    def with_capacity(self, tier: str, num_bytes: int = UNLIMITED_BYTES) -> SearchSpace:
        """The same space with `num_bytes` of host memory or disk per node."""
        change: dict[str, Any] = {f"{tier}_bytes": num_bytes}
        return replace(self, hardware=replace(self.hardware, **change))

    def smallest_capacity(self, tier: str, work: StepShape) -> int:
        """Bytes of host memory or disk per node with which `work` fits; 0 if no amount is enough. A
        multiple of 64 GB, or of 1024 GB from 1 TB on."""
        if not self.with_capacity(tier).fits(work):
            return 0
        grains = 1 + _largest(lambda n: not self.with_capacity(tier, n * CAPACITY_GRAIN).fits(work))
        return CAPACITY_GRAIN * (grains if grains < 16 else -(-grains // 16) * 16)

    def smallest_machine(self, work: StepShape) -> Hardware | None:
        """The fewest GPUs of this kind on which `work` fits: double a node up to 8 GPUs, then add
        nodes."""

        def fits(hardware: Hardware) -> bool:
            try:
                return replace(self, hardware=hardware).fits(work)
            except ConfigError:  # the fixed settings do not suit this number of ranks
                return False

        hardware = self.hardware
        while hardware.num_nodes == 1 and 2 * hardware.gpus_per_node <= GPUS_PER_NODE:
            hardware = hardware.with_gpus(2 * hardware.gpus_per_node)
            if fits(hardware):
                return hardware
        nodes = 2 * hardware.num_nodes
        while not fits(replace(hardware, num_nodes=nodes)):
            if nodes >= MAX_NODES:
                return None
            nodes *= 2
        fewest = 1 + _largest(lambda n: not fits(replace(hardware, num_nodes=n)), beyond=nodes)
        return replace(hardware, num_nodes=fewest)


def _values_without(candidate: Candidate, names: Collection[str]) -> tuple[Hashable, ...]:
    return tuple(value for name, value in candidate.items() if name not in names)


# ---- the largest count that fits


def _with_most_layers(plan: Plan, name: str, most: int) -> Plan:
    """`plan` with its setting `name`, a number of layers, as large as fits, at most `most`."""
    full = plan.with_changes(**{name: most})
    # All layers may keep their attention output where fewer may not: none recomputes, which frees
    # memory on the device.
    if full.fits or not plan.fits:
        return full
    tiers = zip(plan.ledger.tiers.values(), full.ledger.tiers.values(), strict=True)
    guess = min(
        most * (available - needed) // (needed_by_all - needed)
        for (needed, available), (needed_by_all, _) in tiers
        if needed_by_all > needed
    )
    tried: dict[int, Plan] = {}

    def fits(count: int) -> bool:
        tried[count] = plan.with_changes(**{name: count})
        return tried[count].fits

    count = _largest(fits, beyond=most, guess=guess)
    return tried.get(count) or plan.with_changes(**{name: count})


def _largest(
    fits: Callable[[int], bool], low: int = 0, beyond: int | None = None, guess: int | None = None
) -> int:
    """The largest count that fits, or `low`. Every count below one that fits does; `beyond`, if
    known, does not fit. Halves the range; with `guess`, first steps away from it, doubling the
    step, while that stays in the range."""
    if beyond is None:
        beyond = low + 1
        while fits(beyond):
            low = beyond
            beyond *= 2
    count = low
    step = beyond  # leaves the range
    if guess is not None:
        count = guess + 1
        step = 1
    while beyond - low > 1:
        if not low < count < beyond:
            count = (low + beyond) // 2
        if fits(count):
            low = count
            count += step
        else:
            beyond = count
            count -= step
        step *= 2
    return low


# ---- from a configuration


def make_search_space(config: Config, shape: ModelShape, hardware: Hardware) -> SearchSpace:
    """The space with the settings that are set explicitly."""
    given = {name: config.get(name) for name in FIELDS if name in config.given}
    fixed = layout_values(given, shape.num_layers, hardware.num_gpus)
    fixed["compile"] = config.train.compile
    if shape.optimizer != "adamw":
        fixed["offload_optimizer"] = False
    origins = {name: config.origin(name) for name in given if FIELDS[name] in fixed}
    return SearchSpace(shape, hardware, fixed, origins)


def work_from_config(config: Config) -> StepShape:
    loss = config.loss
    distills = loss.type == "distill" and not loss.is_stored
    return StepShape(
        config.data.context,
        config.train.batch,
        accumulate=config.train.accumulate,
        distills=distills,
        reference=distills or loss.type == "dpo",
    )


def shape_to_train(
    shape: ModelShape, config: Config, teacher: ModelShape | None = None
) -> ModelShape:
    """The shape with the run's adapter, optimizer, and teacher or reference, a copy if all
    parameters are trained."""
    adapter = config.adapter
    if adapter is not None and adapter.rank > shape.hidden:
        rule = f"exceeds the model's hidden size {shape.hidden}, the rank of a full update"
        raise ConfigError(f"adapter.rank={adapter.rank} {rule}; use 16, for example, or no adapter")
    if teacher is not None and teacher.vocab != shape.vocab:
        sizes = f"predicts {teacher.vocab} tokens and the model {shape.vocab}"
        rule = f"{sizes}: they cannot be compared; use a teacher with the same vocabulary"
        raise ConfigError(f"loss.teacher={config.loss.teacher} {rule}")
    has_copy = work_from_config(config).reference and adapter is None and teacher is None
    optimizer = config.optim.name
    shape = shape.with_adapter(adapter)
    return replace(shape, reference=has_copy, teacher=teacher, optimizer=optimizer)


# ---- evaluations: forward only


def forward_plan(shape: ModelShape, hardware: Hardware, work: StepShape) -> Plan:
    layout = forward_layout(shape.heads, shape.head_dim, hardware.num_gpus, work.tokens, "bfloat16")
    return Plan(shape, layout, hardware, replace(work, trains=False))
