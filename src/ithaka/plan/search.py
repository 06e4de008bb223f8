"""Search for a layout that fits and is fast, for the longest context, and for changes that make a plan fit.

The search tries every context-parallel size, stage width, tier, tile size and overlap, and the rings that can be
fastest. Layers do not affect each other's time, so either no layer keeps its attention output or as many as fit. Memory
left on the device goes to what saves most seconds per byte: first q, k, v and the sum after attention, then the MLP's
gate and up projections.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from ithaka.config import AdapterConfig, Config, ConfigError
from ithaka.layout import (
    SETTINGS,
    Layout,
    Tier,
    check_fixed,
    check_float8,
    check_optimizer,
    fixed_settings,
    make_layout,
    settings_from_layout,
    smallest_ring,
)
from ithaka.plan.bytes import Ledger, build_ledger
from ithaka.plan.hardware import GPUS_PER_NODE, Hardware
from ithaka.plan.seconds import Seconds, flop_seconds, gather_seconds, reduce_seconds, step_seconds
from ithaka.plan.shape import AttentionKind, ModelShape, StepShape

TILE_BYTES = 2**29  # bytes of x in the largest tile: narrow models need more tokens to outweigh a kernel launch
NUM_TILE_SIZES = 6  # each half of the one before
TIERS: tuple[Tier, ...] = ("device", "host", "disk")
CONTEXT_GRAIN = 1024  # longest contexts are multiples of this many tokens per rank
UNLIMITED_BYTES = 2**60
NEAR_ENOUGH = 0.99  # plans within this fraction of the best speed compete on host memory
BUFFER_SETTINGS = ("heads_per_stage", "tile_tokens", "overlap")  # they change only the sizes of device buffers
NUM_ALTERNATIVES = 4  # plans shown with the chosen one
CAPACITY_GRAIN = 64 * 10**9  # step of the search for enough host memory or disk, bytes
MAX_NODES = 1024  # in the search for a large enough machine
ADAPTER_RANK = 16  # tried when a plan does not fit
MAX_HEADS_ELEMENTS = 1 << 29  # elements of a tensor of all heads in a forward

Fixed = Mapping[str, Any]  # the user's settings, as arguments of `make_layout`


@dataclass(frozen=True)
class Plan:
    """A layout and its cost, whether it fits or not. `fixed`: the part that the user set."""

    shape: ModelShape
    layout: Layout
    hardware: Hardware
    work: StepShape
    fixed: Fixed = field(default_factory=dict, repr=False, hash=False)
    alternatives: tuple[Plan, ...] = field(default=(), repr=False, compare=False)  # the best plans of other kinds

    @cached_property
    def ledger(self) -> Ledger:
        return build_ledger(self.shape, self.layout, self.hardware, self.work)

    @cached_property
    def seconds(self) -> Seconds:
        return step_seconds(self.shape, self.layout, self.hardware, self.work)

    @property
    def flop_seconds(self) -> Seconds:
        return flop_seconds(self.shape, self.layout, self.hardware, self.work)

    def with_changes(self, **changes: Any) -> Plan:
        """A copy with a changed layout (`Layout.with_changes`)."""
        layout = self.layout.with_changes(**changes)
        return Plan(self.shape, layout, self.hardware, self.work, self.fixed, self.alternatives)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Plans of one kind differ only in details: cp, ring and tiers are the same."""
        layout = self.layout
        tiers = layout.input_tier, layout.attention_tier if layout.keep_attention else None, layout.offload_optimizer
        return layout.cp, layout.ring, *tiers

    @property
    def kernels(self) -> dict[AttentionKind, str]:
        """The kernel whose rates are planned for each kind of attention; "": unknown."""
        kinds = self.shape.attention_kinds
        return {kind: self.hardware.for_attention(kind.head_dim, kind.softcap).gpu.kernel for kind in kinds}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a configuration."""
        return settings_from_layout(self.layout, self.shape.heads)

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
        """Over all data-parallel groups."""
        return self.hardware.num_gpus // self.layout.cp * self.work.batch * self.work.accumulate

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_step * self.work.context

    @property
    def limited_by(self) -> str:
        """The part with most of the time, or the tier that is exceeded most if the plan does not fit."""
        if not self.fits:
            return self.ledger.worst[1]
        parts = {name: getattr(self.seconds, name) for name in ("attention", "linear", "exchange", "copies")}
        return max(parts, key=lambda name: parts[name])


def forward_plan(shape: ModelShape, hardware: Hardware, work: StepShape) -> Plan:
    """The plan of an evaluation: forward only."""
    layout = forward_layout(shape, hardware.num_gpus, work.tokens, "bfloat16")
    return Plan(shape, layout, hardware, replace(work, trains=False))


def forward_layout(shape: ModelShape, cp: int, tokens: int, dtype: str, ring: int | None = None) -> Layout:
    """The layout of an evaluation: all ranks share each sequence. All heads at once while their tensors are small,
    which is faster; otherwise one head per rank."""
    ring = ring or smallest_ring(cp, shape.heads)
    is_long = tokens // cp * shape.heads * shape.head_dim > MAX_HEADS_ELEMENTS
    stage = cp // ring if is_long else None
    return make_layout(shape.num_layers, cp=cp, ring=ring, heads_per_stage=stage, tile_tokens=8192, dtype=dtype)


def work_from_config(config: Config) -> StepShape:
    train, loss = config.train, config.loss
    distills = loss.type == "distill" and not loss.is_stored
    work = StepShape(config.data.context, train.batch, accumulate=train.accumulate, distills=distills)
    return replace(work, reference=distills or loss.type == "dpo")


def shape_to_train(shape: ModelShape, config: Config, teacher: ModelShape | None = None) -> ModelShape:
    """The shape with the run's adapter, optimizer, and teacher or reference, a copy if all parameters are trained."""
    has_copy = work_from_config(config).reference and config.adapter is None and teacher is None
    if config.adapter is not None and config.adapter.rank > shape.hidden:
        rule = f"exceeds the model's hidden size {shape.hidden}, the rank of a full update"
        raise ConfigError(f"adapter.rank={config.adapter.rank} {rule}; use 16, for example, or no adapter")
    if teacher is not None and teacher.vocab != shape.vocab:
        rule = f"predicts {teacher.vocab} tokens and the model {shape.vocab}: they cannot be compared"
        raise ConfigError(f"loss.teacher={config.loss.teacher} {rule}; use a teacher with the same vocabulary")
    others: Any = {"reference": has_copy, "teacher": teacher, "optimizer": config.optim.name}
    return replace(shape.with_adapter(config.adapter), **others)


def make_search_space(config: Config, explicit: Collection[str], shape: ModelShape, hardware: Hardware) -> SearchSpace:
    """`explicit`: names of settings (parallel.cp) to take from `config`; the search chooses the others."""
    check_optimizer(config)
    chosen = {name: operator.attrgetter(name)(config) for name in SETTINGS if name in explicit}
    fixed = fixed_settings(chosen, shape.num_layers, hardware.num_gpus)
    check_float8(fixed.get("stored_dtype"), hardware.gpu.name, hardware.gpu.has_float8)
    if shape.why_no_ring and (ring := fixed.get("ring") or 1) > 1:
        rule = f"is not supported for model_type={shape.family}, which {shape.why_no_ring}"
        raise ConfigError(f"parallel.ring={ring} {rule}; leave it out, or use 1")
    in_place = {} if shape.optimizer == "adamw" else {"offload_optimizer": False}
    return SearchSpace(shape, hardware, {**fixed, "compile": config.train.compile, **in_place})


def _rank_key(plan: Plan) -> tuple[Any, ...]:
    """Fastest first; then least memory, nearest to the device, and smallest sizes."""
    layout, ledger = plan.layout, plan.ledger
    offload = layout.offload_optimizer, TIERS.index(layout.input_tier) + TIERS.index(layout.attention_tier)
    sizes = layout.cp, layout.ring, layout.heads_per_stage or plan.shape.heads
    return (-plan.tokens_per_s_per_gpu, ledger.gpu_peak, ledger.host_needed, offload, *sizes)


@dataclass(frozen=True)
class SearchSpace:
    """The layouts of a model on a machine. `fixed`: the user's settings."""

    shape: ModelShape
    hardware: Hardware
    fixed: Fixed = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.shape
        has_rings = not shape.why_no_ring
        check_fixed(self.fixed, shape.heads, shape.num_layers, self.hardware.num_gpus, has_rings)

    # ---- the best plan

    def choose(self, work: StepShape) -> Plan:
        """Choose the plan with the least disk and host memory among those within 1 % of the fastest that fits. Speed is
        in tokens per second and GPU. If none fits, the plan that is closest to fitting."""
        candidates = [(self.upper_bound(plan).tokens_per_s_per_gpu, plan) for plan in self.plans_that_fit(work)]
        best: dict[tuple[Any, ...], Plan] = {}  # by kind
        for bound, plan in sorted(candidates, key=lambda pair: -pair[0]):
            speeds = sorted((other.tokens_per_s_per_gpu for other in best.values()), reverse=True)
            if len(speeds) > NUM_ALTERNATIVES and bound < min(NEAR_ENOUGH * speeds[0], speeds[NUM_ALTERNATIVES]):
                break  # neither this plan nor a later one can be chosen or shown
            if plan.kind not in best or bound >= best[plan.kind].tokens_per_s_per_gpu:
                plan = self.fill_device(plan)
                best[plan.kind] = min(best.get(plan.kind, plan), plan, key=_rank_key)
        ranked = sorted(best.values(), key=_rank_key) or [self.closest_to_fitting(work)]
        min_speed = NEAR_ENOUGH * ranked[0].tokens_per_s_per_gpu
        near = [plan for plan in ranked if plan.tokens_per_s_per_gpu >= min_speed]
        chosen = min(near, key=lambda plan: (plan.ledger.disk_peak, plan.ledger.host_needed))
        alternatives = [plan for plan in ranked if plan is not chosen]
        return replace(chosen, fixed=self.fixed, alternatives=tuple(alternatives[:NUM_ALTERNATIVES]))

    def plans_that_fit(self, work: StepShape) -> Iterator[Plan]:
        """Yield plans that fit. Once a tier holds everything, slower tiers are not tried."""
        settled, can_fit = set(), {}
        for candidate in self.candidates([split for split in self.splits if self.fits(work, [split])]):
            settings = tuple(value for name, value in candidate.items() if name not in BUFFER_SETTINGS)
            if settings not in can_fit:
                smallest = self._smallest_buffers(candidate, work)
                can_fit[settings] = any(self.make_plan(variant, work).fits for variant in smallest)
            if not can_fit[settings]:
                continue
            # Skip tiles that are twice as large as needed: all hold the same tokens.
            max_tile = max(2 * work.local_tokens(candidate["cp"]) - 1, self.tile_sizes[-1])
            if "tile_tokens" not in self.fixed and candidate["tile_tokens"] > max_tile:
                continue
            kind = tuple(value for name, value in candidate.items() if name not in ("offload_optimizer", "input_tier"))
            if kind in settled:
                continue
            plan, max_layers = self.make_plan(candidate, work), candidate["keep_attention"]
            if max_layers and "keep_attention" not in self.fixed:
                max_layers = self.shape.num_layers
                plan = _keep_most(plan, "keep_attention", max_layers)
            if plan.fits:
                yield plan
                if plan.layout.keep_attention == max_layers:
                    settled.add(kind)

    def upper_bound(self, plan: Plan) -> Plan:
        """`plan` with everything kept that may be, whether it fits or not: no plan of `fill_device` is faster."""
        most = self.fixed.get("keep_projections", plan.layout.keep_attention)
        return plan.with_changes(keep_projections=most, keep_everything=self.fixed.get("keep_everything", most))

    def fill_device(self, plan: Plan) -> Plan:
        """`plan` with as many layers keeping more on the device as fit."""
        bound = self.upper_bound(plan).layout
        for name, most in (("keep_projections", bound.keep_projections), ("keep_everything", bound.keep_everything)):
            plan = _keep_most(plan, name, most)
            if getattr(plan.layout, name) < most:
                break
        return plan

    def closest_to_fitting(self, work: StepShape) -> Plan:
        """Where nothing fits: the plan whose worst tier is exceeded least, with few attention outputs kept."""
        candidates = list(self.candidates())
        fewest = min(candidate["keep_attention"] for candidate in candidates)
        plans = [self.make_plan(candidate, work) for candidate in candidates if candidate["keep_attention"] == fewest]
        least = min(plan.ledger.worst[0] for plan in plans)
        return max(
            (plan for plan in plans if plan.ledger.worst[0] == least), key=lambda plan: plan.tokens_per_s_per_gpu
        )

    # ---- candidates

    @cached_property
    def splits(self) -> list[tuple[int, int]]:
        """(cp, ring) to try. A sequence takes part of a node or all GPUs of several, and a Ulysses group stays inside a
        node: one that straddles nodes exchanges everything over the network. For each cp, the largest such group and
        the largest without empty slots: larger groups need less memory and send less."""
        per_node, ranks = self.hardware.gpus_per_node, self.hardware.num_gpus
        cps = [self.fixed["cp"]] if "cp" in self.fixed else [n for n in range(1, ranks + 1) if ranks % n == 0]
        aligned = [cp for cp in cps if per_node % cp == 0 or cp % per_node == 0]
        return [split for cp in aligned for split in self._rings(cp)] or [s for cp in cps for s in self._rings(cp)]

    def _rings(self, cp: int) -> list[tuple[int, int]]:
        heads, per_node = self.shape.heads, self.hardware.gpus_per_node
        stage, ring = self.fixed.get("heads_per_stage") or 0, 1 if self.shape.why_no_ring else self.fixed.get("ring")
        groups = [n for n in range(1, min(cp, heads) + 1) if cp % n == 0 and stage % n == 0]
        groups = [n for n in groups if (per_node % n == 0 if ring is None else cp == n * ring)]
        best = {max(groups, default=0), max((n for n in groups if heads % n == 0), default=0)} - {0}
        return [(cp, cp // ulysses) for ulysses in sorted(best, reverse=True)]

    @property
    def max_cp(self) -> int:
        return max(cp for cp, _ in self.splits)

    @property
    def replica_counts(self) -> list[int]:
        """Numbers of replicas to try: also one per node if that is faster."""
        nodes, hardware = self.hardware.num_nodes, self.hardware
        seconds = {n: 2 * gather_seconds(2**20, hardware, n) + reduce_seconds(2**21, hardware, n) for n in (1, nodes)}
        return [nodes, 1] if seconds[nodes] < seconds[1] else [1]

    @cached_property
    def tile_sizes(self) -> list[int]:
        """Tokens per tile, largest first."""
        largest = round(math.log2(TILE_BYTES / (2 * self.shape.hidden)))
        return [2 ** (largest - i) for i in range(NUM_TILE_SIZES)]

    def candidates(self, splits: Sequence[tuple[int, int]] | None = None) -> Iterator[dict[str, Any]]:
        """Arguments of `make_layout` for every layout (of `splits`), with at most one attention output kept."""
        tiers = TIERS if self.hardware.disk_bytes else TIERS[:2]
        options: dict[str, Any] = {
            "attention_tier": tiers,
            "keep_attention": [1] if "attention_tier" in self.fixed else [1, 0],
            "replicas": self.replica_counts,
            "offload_optimizer": [False, True],
            "input_tier": tiers,
            "overlap": [True, False],
            "tile_tokens": self.tile_sizes,
        }
        for cp, ring in self.splits if splits is None else splits:
            ulysses = cp // ring
            slots = -(-self.shape.heads // ulysses)  # all heads at once, half of them, a quarter, ... one per rank
            widths = [(slots >> i) * ulysses for i in range(slots.bit_length())]
            lists = {"cp": [cp], "ring": [ring], "heads_per_stage": widths, **options}
            lists |= {name: [value] for name, value in self.fixed.items()}
            for values in product(*lists.values()):
                candidate = dict(zip(lists, values, strict=True))
                if candidate["keep_attention"] or candidate["attention_tier"] == lists["attention_tier"][0]:
                    yield candidate

    def smallest_candidates(self, splits: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
        """The candidates of each split that fit if any does: narrowest stage, smallest tile. If every layer keeps its
        attention output, the device needs no memory to recompute it. So all layers keep it, or as few as possible."""
        smallest = {"tile_tokens": self.tile_sizes[-1], "overlap": False, "replicas": 1}
        for cp, ring in splits:
            fixed = {"cp": cp, "ring": ring, "heads_per_stage": cp // ring, **smallest, **self.fixed}
            for candidate in replace(self, fixed=fixed).candidates([(cp, ring)]):
                yield candidate
                if candidate["keep_attention"] and "keep_attention" not in self.fixed:
                    yield candidate | {"keep_attention": self.shape.num_layers}

    def _smallest_buffers(self, candidate: Fixed, work: StepShape) -> Iterator[Fixed]:
        """Yield the variants of `candidate` with the smallest buffers: if none of them fits, no other choice of
        BUFFER_SETTINGS does. A single tile may need less than several, because it sums no gradients. A short tile may
        need less with overlap, because its input is fetched once."""
        local_tokens, tiles = work.local_tokens(candidate["cp"]), self.tile_sizes
        one_tile = min((tile for tile in tiles if tile >= local_tokens), default=tiles[-1])
        counts = {candidate["keep_attention"]}
        if candidate["keep_attention"] and "keep_attention" not in self.fixed:
            counts.add(self.shape.num_layers)
        for tile, overlap, count in product({tiles[-1], one_tile}, (False, True), counts):
            sizes = {"heads_per_stage": candidate["cp"] // candidate["ring"], "tile_tokens": tile, "overlap": overlap}
            yield {**candidate, **sizes, **self.fixed, "keep_attention": count}

    def make_plan(self, candidate: Fixed, work: StepShape) -> Plan:
        """The plan with these arguments of `make_layout`. The inputs that the host or disk cannot hold stay on the
        device."""
        plan = Plan(self.shape, make_layout(self.shape.num_layers, **candidate), self.hardware, work)
        tier, layers = plan.layout.input_tier, self.shape.num_layers
        if tier == "device" or "keep_inputs" in self.fixed or plan.fits or not plan.ledger.fits_in("GPU"):
            return plan
        most = layers - max(1, self.shape.first_trained)  # the first layer's tier is that of the plan
        ledgers = plan.ledger, plan.with_changes(keep_inputs=most).ledger
        # Without the checkpoint copy, which is made only if it fits.
        needed, least = (ledger.host_needed if tier == "host" else ledger.disk_peak for ledger in ledgers)
        available = plan.ledger.tiers[tier][1]
        if not least <= available < needed:
            return plan
        return plan.with_changes(keep_inputs=-(-most * (needed - available) // (needed - least)))

    # ---- limits

    def fits(self, work: StepShape, splits: Sequence[tuple[int, int]] | None = None) -> bool:
        """Whether any layout (of `splits`) fits."""
        candidates = self.smallest_candidates(splits or self.splits)
        return any(self.make_plan(candidate, work).fits for candidate in candidates)

    def adapter_that_fits(self, work: StepShape) -> dict[str, Any]:
        """Settings of `adapter` with which some layout fits; empty if there are none. A four-bit base if needed."""
        current = self.shape.adapter
        for settings in self.shape.root.adapter_settings:
            adapter = replace(current or AdapterConfig(rank=ADAPTER_RANK), **{"base": "bf16", **settings})
            shape = replace(self.shape.with_adapter(adapter), reference=False)
            if adapter != current and replace(self, shape=shape).fits(work):
                return {**settings} if current else {"rank": ADAPTER_RANK, **settings}
        return {}

    @property
    def with_float8(self) -> SearchSpace | None:
        """The same space with memory.stored_dtype=float8, if that is possible and not set already."""
        can_change = "stored_dtype" not in self.fixed and self.hardware.gpu.has_float8
        return replace(self, fixed={**self.fixed, "stored_dtype": "float8"}) if can_change else None

    @property
    def longest_splits(self) -> list[tuple[int, int]]:
        """The splits with the longest context: those over most ranks."""
        return [split for split in self.splits if split[0] == self.max_cp]

    def longest_context(self, batch: int) -> int:
        """The longest context that fits, in multiples of CONTEXT_GRAIN per rank; 0 if none does."""
        grain, longest = CONTEXT_GRAIN * self.max_cp, 0
        for candidate in self.smallest_candidates(self.longest_splits):

            def fits(grains: int, candidate: Fixed = candidate) -> bool:
                return self.make_plan(candidate, StepShape(grains * grain, batch)).fits

            longest = _largest(fits, longest)
        return longest * grain

    def longest_context_and_limit(self, batch: int = 1) -> tuple[int, str]:
        """(longest context that fits, what limits it: GPU, host, disk or heads)."""
        context = self.longest_context(batch)
        # A missing disk is no limit. The layout closest to fitting may lack a tier that more host memory would relieve.
        tiers = ["host", "disk"] if self.hardware.disk_bytes else ["host"]
        if limits := [tier for tier in tiers if self.with_capacity(tier).longest_context(batch) > context]:
            return context, limits[-1]
        work = StepShape(context + CONTEXT_GRAIN * self.max_cp, batch)
        plans = [self.make_plan(candidate, work) for candidate in self.smallest_candidates(self.longest_splits)]
        limit = min(plan.ledger.worst for plan in plans)[1]
        is_capped = "cp" not in self.fixed and self.max_cp < self.hardware.num_gpus  # by a fixed ring
        return context, "heads" if limit == "GPU" and is_capped else limit

    def with_capacity(self, tier: str, num_bytes: int = UNLIMITED_BYTES) -> SearchSpace:
        """The same space with `num_bytes` of host memory or disk per node."""
        change: dict[str, Any] = {f"{tier}_bytes": num_bytes}
        return replace(self, hardware=replace(self.hardware, **change))

    def smallest_capacity(self, tier: str, work: StepShape) -> int:
        """Bytes of host memory or disk per node with which `work` fits; 0 if no amount is enough. A multiple of 64 GB,
        or of 1024 GB from 1 TB on."""
        if not self.with_capacity(tier).fits(work):
            return 0
        grains = 1 + _largest(lambda n: not self.with_capacity(tier, n * CAPACITY_GRAIN).fits(work))
        return CAPACITY_GRAIN * (grains if grains < 16 else -(-grains // 16) * 16)

    def smallest_machine(self, work: StepShape) -> Hardware | None:
        """The fewest GPUs of this kind on which `work` fits: double a node up to 8 GPUs, then add nodes."""

        def fits(hardware: Hardware) -> bool:
            try:
                return replace(self, hardware=hardware).fits(work)
            except ConfigError:  # the fixed settings do not suit this number of ranks
                return False

        hardware, nodes = self.hardware, self.hardware.num_nodes
        while nodes == 1 and 2 * hardware.gpus_per_node <= GPUS_PER_NODE:
            hardware = hardware.with_gpus(2 * hardware.gpus_per_node)
            if fits(hardware):
                return hardware
        while not fits(replace(hardware, num_nodes=(nodes := 2 * nodes))):
            if nodes >= MAX_NODES:
                return None
        fewest = 1 + _largest(lambda n: not fits(replace(hardware, num_nodes=n)), beyond=nodes)
        return replace(hardware, num_nodes=fewest)


def _keep_most(plan: Plan, name: str, most: int) -> Plan:
    """`plan` with its setting `name`, a number of layers, as large as fits, at most `most`."""
    full = plan.with_changes(**{name: most})
    # All layers may keep their attention output where fewer may not: none recomputes, which frees memory on the device.
    if full.fits or not plan.fits:
        return full
    tiers = zip(plan.ledger.tiers.values(), full.ledger.tiers.values(), strict=True)
    guess = min(most * (have - need) // (more - need) for (need, have), (more, _) in tiers if more > need)
    tried = {}

    def fits(count: int) -> bool:
        tried[count] = plan.with_changes(**{name: count})
        return tried[count].fits

    count = _largest(fits, beyond=most, guess=guess)
    return tried.get(count) or plan.with_changes(**{name: count})


def _largest(fits: Callable[[int], bool], low: int = 0, beyond: int | None = None, guess: int | None = None) -> int:
    """The largest count that fits, or `low`. Every count below one that fits does; `beyond`, if known, does not fit.
    Steps away from `guess` grow; without one, and beyond the bounds, the range is halved."""
    if beyond is None:
        beyond = low + 1
        while fits(beyond):
            low, beyond = beyond, 2 * beyond
    middle, step = (low, beyond) if guess is None else (guess + 1, 1)
    while beyond - low > 1:
        if not low < middle < beyond:
            middle = (low + beyond) // 2
        if fits(middle):
            low, middle = middle, middle + step
        else:
            beyond, middle = middle, middle - step
        step *= 2
    return low
