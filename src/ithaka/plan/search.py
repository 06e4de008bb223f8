"""Try plans and choose one that fits; find the longest context, and what would make a plan fit.

Every context parallel size, width of stages, tier, tile and overlap is tried, and the rings that can be best. A
layer's time does not depend on the others, so either no layer keeps attention's output or as many as there is room for.
What is left of the device is spent on more of what layers keep, first on what saves most seconds per byte: q, k, v and
the sum after attention, then the MLP's middle.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

from ithaka.config import AdapterConfig, Config, ConfigError
from ithaka.layout import (
    SETTINGS,
    Layout,
    Tier,
    check_fixed,
    fixed_settings,
    make_layout,
    settings_from_layout,
    smallest_ring,
)
from ithaka.plan.bytes import Ledger, build_ledger
from ithaka.plan.hardware import GPUS_PER_NODE, Hardware
from ithaka.plan.seconds import Seconds, gather_seconds, reduce_seconds, step_seconds
from ithaka.plan.shape import ModelShape, Work

TILE_BYTES = 2**29  # of x, in the largest tile: the narrower a model, the more tokens outweigh a kernel's launch
TILE_SIZES = 6  # each half of the one before
TIERS: tuple[Tier, ...] = ("device", "host", "disk")
CONTEXT_GRAIN = 1024  # per rank: longest contexts are multiples of this many tokens per rank
UNLIMITED_BYTES = 2**60
NEAR_ENOUGH = 0.99  # plans within this fraction of the best speed compete on host memory
NUM_OTHERS = 4  # plans shown with the chosen one
TIER_GRAIN = 64 * 10**9  # step in which host memory and disk are tried, bytes
MOST_NODES = 1024  # in the search for a machine that is large enough
ADAPTER_RANK = 16  # tried when a plan does not fit
MOST_AT_ONCE = 1 << 29  # elements of a tensor of all heads, in a forward alone

Fixed = Mapping[str, Any]  # what the user decided, in the words of `make_layout`


@dataclass(frozen=True)
class Plan:
    """A layout and what it costs, whether it fits or not. `given`: what of it the user decided."""

    shape: ModelShape
    layout: Layout
    hardware: Hardware
    work: Work
    given: Fixed = field(default_factory=dict, repr=False, hash=False)
    others: tuple[Plan, ...] = field(default=(), repr=False, compare=False)  # the best of other kinds

    @cached_property
    def ledger(self) -> Ledger:
        return build_ledger(self.shape, self.layout, self.hardware, self.work)

    @cached_property
    def seconds(self) -> Seconds:
        return step_seconds(self.shape, self.layout, self.hardware, self.work)

    def with_changes(self, **changes: Any) -> Plan:
        """With another layout, see `Layout.with_changes`."""
        return replace(self, layout=self.layout.with_changes(**changes))

    @property
    def kind(self) -> tuple[Any, ...]:
        """Plans of one kind look alike to a reader: the same cp and ring, and the same tiers for what is kept."""
        layout = self.layout
        tiers = layout.input_tier, layout.attention_tier if layout.keep_attention else None, layout.offload_optimizer
        return layout.cp, layout.ring, *tiers

    @property
    def settings(self) -> dict[str, Any]:
        """In the words of the configuration."""
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
        """Of all data-parallel groups."""
        return self.hardware.num_gpus // self.layout.cp * self.work.batch * self.work.accumulate

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_step * self.work.context

    @property
    def limited_by(self) -> str:
        """What takes most of the time or, if the plan does not fit, the tier that is exceeded most."""
        if not self.fits:
            return self.ledger.worst[1]
        shares = {name: getattr(self.seconds, name) for name in ("attention", "linear", "exchange", "copies")}
        return max(shares, key=lambda name: shares[name])


def forward_plan(shape: ModelShape, hardware: Hardware, work: Work) -> Plan:
    """A forward alone, as an evaluation runs it."""
    layout = forward_layout(shape, hardware.num_gpus, work.tokens, "bfloat16")
    return Plan(shape, layout, hardware, replace(work, trains=False))


def forward_layout(shape: ModelShape, cp: int, tokens: int, dtype: str) -> Layout:
    """Of a model that is evaluated: all ranks share each sequence. All heads at once where their tensors are small,
    which is faster; else as few as there can be."""
    ring = smallest_ring(cp, shape.heads)
    few = tokens // cp * shape.heads * shape.head_dim > MOST_AT_ONCE
    stage = cp // ring if few else None
    return make_layout(shape.num_layers, cp=cp, ring=ring, heads_per_stage=stage, tile_tokens=8192, dtype=dtype)


def work_from_config(config: Config) -> Work:
    return Work(config.data.context, config.train.batch, accumulate=config.train.accumulate)


def make_search_space(config: Config, given: Collection[str], shape: ModelShape, hardware: Hardware) -> SearchSpace:
    """`given`: names of settings (parallel.cp) that the user decided; the others are the search's to choose."""
    chosen = {name: operator.attrgetter(name)(config) for name in SETTINGS if name in given}
    return SearchSpace(shape, hardware, fixed_settings(chosen, shape.num_layers, hardware.num_gpus))


def _order(plan: Plan) -> tuple[Any, ...]:
    """Fastest first; between equals the one that needs least, nearest to the device."""
    layout, ledger = plan.layout, plan.ledger
    width = layout.heads_per_stage or plan.shape.heads
    peaks = ledger.gpu_peak, ledger.host_needed
    return (-plan.tokens_per_s_per_gpu, *peaks, _distance(plan), layout.cp, layout.ring, width)


def _distance(plan: Plan) -> tuple[bool, int]:
    """From the device: of the optimizer, then of what is kept."""
    layout = plan.layout
    return layout.offload_optimizer, TIERS.index(layout.input_tier) + TIERS.index(layout.attention_tier)


def _outside(plan: Plan) -> tuple[int, int]:
    """Bytes on disk and in host memory."""
    return plan.ledger.disk_peak, plan.ledger.host_needed


@dataclass(frozen=True)
class WaysToFit:
    """Changes that make a plan fit, each of them alone."""

    context: int  # the longest that fits; 0: none does
    adapter: bool  # adapters in place of all parameters
    hardware: Hardware | None  # the smallest machine of such GPUs
    host_bytes: int  # host memory per node; 0: no amount is enough
    disk_bytes: int


@dataclass(frozen=True)
class SearchSpace:
    """The layouts of a model on a machine. `fixed`: what the user decided."""

    shape: ModelShape
    hardware: Hardware
    fixed: Fixed = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fixed(self.fixed, self.shape.heads, self.shape.num_layers, self.hardware.num_gpus)

    @cached_property
    def splits(self) -> list[tuple[int, int]]:
        """(cp, ring) to try. The GPUs of a sequence are part of a node or fill several, and Ulysses groups stay inside
        a node: a group that straddles nodes exchanges everything over the network. Of each cp, the largest such group
        and the largest that leaves no slot empty: larger ones need less memory and send less."""
        per_node, ranks = self.hardware.gpus_per_node, self.hardware.num_gpus
        cps = [n for n in range(1, ranks + 1) if ranks % n == 0]
        aligned = [cp for cp in cps if per_node % cp == 0 or cp % per_node == 0]
        if "cp" in self.fixed:
            return self._rings(self.fixed["cp"])
        return [split for cp in aligned for split in self._rings(cp)] or [s for cp in cps for s in self._rings(cp)]

    def _rings(self, cp: int) -> list[tuple[int, int]]:
        heads, per_node = self.shape.heads, self.hardware.gpus_per_node
        stage, ring = self.fixed.get("heads_per_stage") or 0, self.fixed.get("ring")
        groups = [n for n in range(1, min(cp, heads) + 1) if cp % n == 0 and stage % n == 0]
        groups = [n for n in groups if (per_node % n == 0 if ring is None else cp == n * ring)]
        best = {max(groups, default=0), max((n for n in groups if heads % n == 0), default=0)} - {0}
        return [(cp, cp // ulysses) for ulysses in sorted(best, reverse=True)]

    @property
    def cps(self) -> list[int]:
        return [cp for cp, _ in self.splits]

    @property
    def replicas(self) -> list[int]:
        """Numbers of replicas to try: one per node where that moves less."""
        nodes, machine = self.hardware.num_nodes, self.hardware
        moved_s = {n: 2 * gather_seconds(2**20, machine, n) + reduce_seconds(2**21, machine, n) for n in (1, nodes)}
        return [nodes, 1] if moved_s[nodes] < moved_s[1] else [1]

    def choose(self, work: Work) -> Plan:
        """Of the plans that fit within 1 % of the fastest, in tokens per second and GPU, the one that needs the least
        disk and host memory. If none fits, the plan that misses by least."""
        at_most = [(self.richest(plan).tokens_per_s_per_gpu, plan) for plan in self.fitting(work)]
        best: dict[tuple[Any, ...], Plan] = {}  # of each kind
        for speed, plan in sorted(at_most, key=lambda pair: -pair[0]):
            found = sorted((each.tokens_per_s_per_gpu for each in best.values()), reverse=True)
            if len(found) > NUM_OTHERS and speed < min(NEAR_ENOUGH * found[0], found[NUM_OTHERS]):
                break  # neither this one nor those after it are chosen or shown
            if plan.kind not in best or speed >= best[plan.kind].tokens_per_s_per_gpu:
                plan = self.spending(plan)
                best[plan.kind] = min(best.get(plan.kind, plan), plan, key=_order)
        ranked = sorted(best.values(), key=_order) or [self.nearest(work)]
        least = NEAR_ENOUGH * ranked[0].tokens_per_s_per_gpu
        chosen = min((plan for plan in ranked if plan.tokens_per_s_per_gpu >= least), key=_outside)
        others = [plan for plan in ranked if plan is not chosen]
        return replace(chosen, given=self.fixed, others=tuple(others[:NUM_OTHERS]))

    def richest(self, plan: Plan) -> Plan:
        """With all kept on the device that may be, whether it fits or not."""
        most = self.fixed.get("keep_projections", plan.layout.keep_attention)
        return plan.with_changes(keep_projections=most, keep_everything=self.fixed.get("keep_everything", most))

    def spending(self, plan: Plan) -> Plan:
        """With as many more of the layers that keep attention's output keeping more as there is room for."""
        rich = self.richest(plan)
        for word in ("keep_projections", "keep_everything"):
            most = getattr(rich.layout, word)
            if not (full := plan.with_changes(**{word: most})).fits:
                room, more = plan.ledger.gpu_bytes - plan.ledger.gpu_peak, full.ledger.gpu_peak - plan.ledger.gpu_peak
                return plan.with_changes(
                    **{word: _largest(partial(_fits_with, plan, word), most, most * room // max(more, 1))}
                )
            plan = full
        return plan

    def longest(self, batch: int = 1) -> tuple[int, str]:
        """(longest context that fits, what stops a longer one: GPU, host, disk or heads); 0 when none fits."""
        context = self.longest_context(batch)
        # A disk that is not there stops nothing. The nearest miss may lack a tier that one of these could relieve.
        stops = ["host", "disk"] if self.hardware.disk_bytes else ["host"]
        if ways := [tier for tier in stops if self.having(tier).longest_context(batch) > context]:
            return context, ways[-1]
        work = Work(context + self.grain, batch)
        missing = min(build_ledger(self.shape, layout, self.hardware, work).worst for layout in self.largest())[1]
        capped = "cp" not in self.fixed and max(self.cps) < self.hardware.num_gpus  # the ring is fixed
        return context, "heads" if missing == "GPU" and capped else missing

    def having(self, tier: str, num_bytes: int = UNLIMITED_BYTES) -> SearchSpace:
        """With so much host memory or disk per node."""
        change: dict[str, Any] = {f"{tier}_bytes": num_bytes}
        return replace(self, hardware=replace(self.hardware, **change))

    def fits(self, work: Work) -> bool:
        """Whether any layout fits."""
        layouts = (layout for split in self.splits for layout in self.leanest(*split))
        return any(build_ledger(self.shape, layout, self.hardware, work).fits for layout in layouts)

    def ways_to_fit(self, work: Work) -> WaysToFit:
        """What would make `work` fit, alone and with these settings."""
        adapted = replace(self, shape=self.shape.with_adapter(AdapterConfig(rank=ADAPTER_RANK)))
        return WaysToFit(
            context=self.longest_context(work.batch),
            adapter=self.shape.adapter is None and adapted.fits(work),
            hardware=self.smallest_machine(work),
            host_bytes=self.enough("host", work),
            disk_bytes=self.enough("disk", work),
        )

    def enough(self, tier: str, work: Work) -> int:
        """Bytes of host memory or disk per node with which `work` fits: a multiple of 64 GB, from 1 TB on of 1024;
        0 if no amount is enough."""
        if not self.having(tier).fits(work):
            return 0

        def too_little(grains: int) -> bool:
            return not self.having(tier, grains * TIER_GRAIN).fits(work)

        grains = 1
        while too_little(grains):
            grains *= 2
        grains = 1 + _largest(too_little, grains)
        return TIER_GRAIN * (grains if grains < 16 else -(-grains // 16) * 16)

    def smallest_machine(self, work: Work) -> Hardware | None:
        """The fewest GPUs of this kind on which `work` fits: twice as many in the node up to 8, then more nodes."""

        def fits(machine: Hardware) -> bool:
            try:
                return replace(self, hardware=machine).fits(work)
            except ConfigError:  # settings that do not suit so many ranks
                return False

        machine, nodes = self.hardware, self.hardware.num_nodes
        while nodes == 1 and 2 * machine.gpus_per_node <= GPUS_PER_NODE:
            machine = machine.with_gpus(2 * machine.gpus_per_node)
            if fits(machine):
                return machine
        while not fits(replace(machine, num_nodes=(nodes := 2 * nodes))):
            if nodes >= MOST_NODES:
                return None
        fewest = 1 + _largest(lambda n: not fits(replace(machine, num_nodes=n)), nodes)
        return replace(machine, num_nodes=fewest)

    @property
    def grain(self) -> int:
        return CONTEXT_GRAIN * max(self.cps)

    @cached_property
    def tiles(self) -> list[int]:
        """Tokens per tile, largest first."""
        largest = round(math.log2(TILE_BYTES / (2 * self.shape.hidden)))
        return [2 ** (largest - i) for i in range(TILE_SIZES)]

    def frames(self, splits: Sequence[tuple[int, int]] | None = None) -> Iterator[dict[str, Any]]:
        """Every layout (of some splits), in the words of `make_layout`; if attention's output is kept, by as few layers
        as possible."""
        tiers = TIERS if self.hardware.disk_bytes else TIERS[:2]
        options: dict[str, Any] = {
            "attention_tier": tiers,
            "keep_attention": [1] if "attention_tier" in self.fixed else [1, 0],
            "replicas": self.replicas,
            "offload_optimizer": [False, True],
            "input_tier": tiers,
            "overlap": [True, False],
            "tile_tokens": self.tiles,
        }
        for cp, ring in self.splits if splits is None else splits:
            ulysses = cp // ring
            slots = -(-self.shape.heads // ulysses)  # all heads at once, half of them, a quarter, ... one per rank
            widths = [(slots >> i) * ulysses for i in range(slots.bit_length())]
            lists = {"cp": [cp], "ring": [ring], "heads_per_stage": widths, **options}
            lists |= {name: [v] for name, v in self.fixed.items()}
            for values in product(*lists.values()):
                frame = dict(zip(lists, values, strict=True))
                if frame["keep_attention"] or frame["attention_tier"] == lists["attention_tier"][0]:
                    yield frame

    def plan(self, frame: Fixed, work: Work) -> Plan:
        return Plan(self.shape, make_layout(self.shape.num_layers, **frame), self.hardware, work)

    def fitting(self, work: Work) -> Iterator[Plan]:
        """Plans that fit. Once a tier has room for everything, farther ones are not tried: they are not faster."""
        settled = set()
        possible = [
            split for split in self.splits
            if any(build_ledger(self.shape, layout, self.hardware, work).fits for layout in self.leanest(*split))
        ]  # fmt: skip
        for frame in self.frames(possible):
            enough = max(2 * work.local_tokens(frame["cp"]) - 1, self.tiles[-1])  # a tile half as large has all as well
            if "tile_tokens" not in self.fixed and frame["tile_tokens"] > enough:
                continue
            kind = tuple(value for name, value in frame.items() if name not in ("offload_optimizer", "input_tier"))
            free = frame["keep_attention"] and "keep_attention" not in self.fixed
            most = self.shape.num_layers if free else frame["keep_attention"]
            if kind not in settled and (plan := self.roomiest(frame, most, work)):
                yield plan
                if plan.layout.keep_attention == most:
                    settled.add(kind)

    def roomiest(self, frame: Fixed, most: int, work: Work) -> Plan | None:
        """With as many of attention's outputs kept as there is room for, `most` of them; None where none fits."""

        def keeping(count: int) -> Plan:
            return self.plan({**frame, "keep_attention": count}, work)

        if (plan := keeping(most)).fits:  # with all of them nothing is computed again, which frees room on the device
            return plan
        if most == frame["keep_attention"] or not keeping(1).fits:
            return None
        return keeping(_largest(lambda count: keeping(count).fits, most))

    def nearest(self, work: Work) -> Plan:
        """Where nothing fits: the plan whose worst tier is exceeded least, with few attention outputs kept."""
        frames = list(self.frames())
        fewest = min(frame["keep_attention"] for frame in frames)
        plans = [self.plan(frame, work) for frame in frames if frame["keep_attention"] == fewest]
        return min(plans, key=lambda plan: (plan.ledger.worst[0], -plan.tokens_per_s_per_gpu))

    def leanest(self, cp: int, ring: int) -> Iterator[Layout]:
        """Layouts of a split that can be the last to fit: narrowest stage, smallest tile.

        If every layer keeps attention's output, the device needs no room to compute it again: so all layers keep
        it, or as few as possible.
        """
        lean = {"cp": cp, "ring": ring, "heads_per_stage": cp // ring, "tile_tokens": self.tiles[-1]}
        lean |= {"overlap": False, "replicas": 1}
        for frame in replace(self, fixed=lean | dict(self.fixed)).frames([(cp, ring)]):
            yield make_layout(self.shape.num_layers, **frame)
            if frame["keep_attention"] and "keep_attention" not in self.fixed:
                yield make_layout(self.shape.num_layers, **frame | {"keep_attention": self.shape.num_layers})

    def largest(self) -> Iterator[Layout]:
        """The leanest of those with most ranks per sequence."""
        for split in (split for split in self.splits if split[0] == max(self.cps)):
            yield from self.leanest(*split)

    def longest_context(self, batch: int) -> int:
        """In multiples of CONTEXT_GRAIN per rank; 0 when none fits."""
        best = 0
        for layout in self.largest():

            def has_room(grains: int, layout: Layout = layout) -> bool:
                return build_ledger(self.shape, layout, self.hardware, Work(grains * self.grain, batch)).fits

            high = best + 1
            while has_room(high):
                high *= 2
            best = max(best, _largest(has_room, high)) if high > best + 1 else best
        return best * self.grain


def _fits_with(plan: Plan, word: str, count: int) -> bool:
    return plan.with_changes(**{word: count}).fits


def _largest(fits: Callable[[int], bool], beyond: int, guess: int = 0) -> int:
    """The largest count that fits, 0 if none does. `beyond` does not fit; below a count that fits, all do."""
    low, guesses = 0, [guess, guess + 1]
    while beyond - low > 1:
        middle = guesses.pop() if guesses else (low + beyond) // 2
        if low < middle < beyond:
            low, beyond = (middle, beyond) if fits(middle) else (low, middle)
    return low
