"""A plan as plain data: sentences, and the figures of settings, memory and time. `ithaka plan
--json` prints it, and plan/render.py lays it out as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ithaka.config import Origin, format_value
from ithaka.config.units import (
    format_bytes,
    format_count,
    format_duration,
    format_rate,
    format_tokens,
)
from ithaka.facts.attention import span_pairs
from ithaka.facts.families import unscaled_positions
from ithaka.facts.sizes import RESERVE_BYTES
from ithaka.plan.bytes import HOST_PROCESS_BYTES, HOST_RESERVE_SHARE, RESERVE_SHARE
from ithaka.plan.hardware import FA4_PACKAGE, GIB, KERNEL_NAMES, SLOW_KERNELS, join_kernels
from ithaka.plan.layer_bytes import LayerBytes, sizes_by_layer
from ithaka.plan.request import PlanRequest
from ithaka.plan.search import Plan, SearchSpace
from ithaka.plan.shape import StepShape

Facts = dict[str, Any]  # what JSON can hold
# Nodes have a few percent less free memory than their nominal size, and `ithaka train` plans with
# what is free.
TIGHT_SHARE = 0.95
FASTER = 1.02  # plans with float8 in host memory are shown from this speedup on
# Levels of kept activations, each on top of the one before: what layers keep, and what backward
# recomputes otherwise.
LEVELS = {
    "keep_attention": ("their attention output", "attention"),
    "keep_projections": ("all but the MLP activations", "q, k and v"),
    "keep_everything": ("everything", "the MLP activations"),
}
PLACES = {"device": "on the device", "host": "in host memory", "disk": "on disk"}


def answer_request(
    request: PlanRequest, max_context: bool = False, steps: int | None = None
) -> tuple[Facts, Plan]:
    """`collect_facts`, and what the user may change. `max_context`: plan for the longest context
    that fits."""
    plan, longest, limit = request.longest_plan() if max_context else (request.plan(), 0, "")
    batch = plan.work.batch
    layout = plan.layout
    notes = []
    rounded = replace(request.space, shape=plan.shape).with_float8
    if rounded and plan.fits and {layout.input_tier, layout.attention_tier} != {"device"}:
        other = rounded.choose(plan.work)
        if other.tokens_per_s_per_gpu > FASTER * plan.tokens_per_s_per_gpu:
            notes.append(f"With memory.stored_dtype=float8: {_format_speed(other)}")
    if rope := request.missing_rope(plan.work.length):
        unscaled = unscaled_positions(request.positions, request.rope)
        positions = f"{format_tokens(request.positions)} positions"
        if unscaled != request.positions:
            positions += f" ({format_tokens(unscaled)} before scaling)"
        needs = f"training needs model.rope={format_value(rope)}"
        notes.append(f"{request.model} has {positions}; {needs}")
    facts = collect_facts(plan, request.model, steps, notes)
    facts["warnings"] += _warn_of_tight(plan)
    if rope:
        facts["missing_rope"] = rope
    if max_context:
        facts |= {"max_context": longest, "limited_by": limit}
        facts["max_context_float8"] = rounded.longest_context(batch) if rounded and longest else 0
    elif not plan.fits:
        facts["limited_by"] = request.space.longest_context_and_limit(batch)[1]
    return facts, plan


def collect_facts(
    plan: Plan, model: str, steps: int | None = None, notes: Sequence[str] = ()
) -> Facts:
    """gpu_*: per GPU. host_*, disk_*: per node. Peaks do not include the reserve."""
    work = plan.work
    ledger = plan.ledger
    attention, warnings = _explain_attention(plan)
    origins = {name: plan.origins.get(name, Origin.PLAN) for name in plan.settings}
    reasons = _explain_parallelism(plan) | _explain_memory(plan)
    for name in reasons:
        if origins[name] != Origin.PLAN:
            reasons[name] += f" (from {origins[name]})"
    facts = {
        "model": model,
        "fits": plan.fits,
        "verdict": format_verdict(plan, model),
        "context": work.context,
        "batch": work.batch,
        "gpus": plan.hardware.name,
        "kernel": join_kernels(plan.kernels.values()) or None,
        "settings": plan.settings,
        "origins": origins,
        "reasons": reasons,
        "step_s": plan.step_s,
        "tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu,
        "sequences_per_step": plan.sequences_per_step,
        "tokens_per_step": plan.tokens_per_step,
        "limited_by": plan.limited_by,
        "peak_phase": ledger.phase,
        "seconds": vars(plan.seconds),
        "flop_seconds": vars(plan.flop_seconds),
        "assumed": _list_assumptions(plan, attention),
        "warnings": warnings,
    }
    for tier in ("gpu", "host", "disk"):
        holders = getattr(ledger, tier)
        reserve = holders.get("reserve", 0)
        facts[f"{tier}_holders"] = holders
        facts[f"{tier}_reserve_bytes"] = reserve
        facts[f"{tier}_peak_bytes"] = sum(holders.values()) - reserve
        facts[f"{tier}_bytes"] = getattr(ledger, f"{tier}_bytes")
    if plan.fits:
        facts |= _compare(plan)
    else:
        facts["ways_out"] = _find_fixes(plan)
    figures, sentences = _describe_parts(plan, steps)
    return facts | figures | {"notes": [*notes, *sentences]}


def _describe_parts(plan: Plan, steps: int | None) -> tuple[Facts, list[str]]:
    """Figures and sentences that only some plans have."""
    shape = plan.shape
    facts: Facts = {}
    notes = []
    if steps:
        seconds = steps * plan.step_s
        tokens = steps * plan.tokens_per_step
        facts |= {"steps": steps, "hours": seconds / 3600, "tokens": tokens}
        total = f"{format_duration(seconds)}, {tokens / 1e9:.4g} billion tokens"
        notes += [f"{steps} steps: {total}"] * plan.fits
    if shape.adapter:
        facts["adapter"], sentence = _describe_adapter(plan, shape.adapter.rank)
        notes.append(sentence)
    if plan.work.reference:
        notes.append(_describe_reference(plan))
    if shape.num_active < shape.num_parameters:
        facts["experts"], sentences = _describe_experts(plan)
        notes += sentences
    return facts, notes


# ---- the verdict


def format_verdict(plan: Plan, model: str) -> str:
    work = plan.work
    batch = f"{work.batch} x " if work.batch > 1 else ""
    tokens = f"{batch}{format_tokens(work.context)} tokens"
    if work.spans:
        tokens += f" ({_compare_branches(work)})"
    subject = f"{model}, {tokens}, {plan.hardware.name}"
    if not plan.fits:
        return f"{subject}: does not fit"
    step = f"{format_duration(plan.step_s)} per step (mostly {plan.limited_by})"
    return f"{subject}: fits, {_format_speed(plan)}, {step}"


def _compare_branches(work: StepShape) -> str:
    """What a shared prompt saves, compared with a prompt for each branch."""
    (_, prompt), *branches = work.spans
    apart = [prompt + tokens for _, tokens in branches]
    tokens = sum(apart) / work.context
    pairs = sum(span_pairs(0, n) for n in apart) * work.batch / work.pairs(None)
    sizes = f"{len(branches)} branches of {format_tokens(branches[0][1])}"
    fewer = f"{tokens:.1f}x fewer tokens and {pairs:.1f}x fewer pairs than apart"
    return f"{sizes} after {format_tokens(prompt)}: {fewer}"


def _find_fixes(plan: Plan) -> dict[str, str]:
    """Options that make the plan fit, each on its own, found by search."""
    work = plan.work
    space = SearchSpace(plan.shape, plan.hardware, plan.fixed)
    fixes = {}
    if context := space.longest_context(work.batch):
        fixes["--context"] = f"{context} ({format_tokens(context)})"
    adapter = space.adapter_that_fits(work)
    base = ["--set adapter.base=nf4"] if "base" in adapter else []
    if "rank" in adapter:
        fixes["--adapter"] = " ".join([str(adapter["rank"]), *base])
    elif base:
        fixes["--set"] = "adapter.base=nf4"
    if space.with_float8 and space.with_float8.fits(work):
        fixes.setdefault("--set", "memory.stored_dtype=float8")
    if machine := space.smallest_machine(work):
        fixes["--gpus"] = f"{machine.name} ({machine.num_gpus} GPUs)"
    for option, tier in (("--host-memory", "host"), ("--disk", "disk")):
        if num_bytes := space.smallest_capacity(tier, work):
            fixes[option] = f"{num_bytes // 10**9}GB"
    if plan.fixed and SearchSpace(plan.shape, plan.hardware).fits(work):
        fixes["without"] = "--set"
    return fixes


def _warn_of_tight(plan: Plan) -> Iterator[str]:
    """Host memory or disk that is nearly all planned. The search fills GPU memory on purpose."""
    ledger = plan.ledger
    needs = {
        "Host memory": (ledger.host_needed, ledger.host_bytes, "--host-memory"),
        "Disk space": (ledger.disk_peak, ledger.disk_bytes, "--disk"),
    }
    for name, (need, have, option) in needs.items():
        if plan.fits and need > TIGHT_SHARE * have:
            sizes = f"{need / GIB:.1f} of {have / GIB:.1f} GiB per node"
            fix = f"Nodes often have less free; set {option} to what yours have."
            yield f"{name} is tight: {sizes}. {fix}"


# ---- other plans


def _compare(plan: Plan) -> Facts:
    """The plan and the best of other kinds, fastest first, and why it was chosen."""
    plans = sorted((plan, *plan.alternatives), key=lambda each: -each.tokens_per_s_per_gpu)
    fastest = plans[0]
    choice = "the fastest that fits"
    if fastest is not plan:
        slower = 1 - plan.tokens_per_s_per_gpu / fastest.tokens_per_s_per_gpu
        host_bytes = fastest.ledger.host_needed - plan.ledger.host_needed
        saved = f"{format_bytes(host_bytes)} less host memory"
        if disk_bytes := fastest.ledger.disk_peak - plan.ledger.disk_peak:
            saved = f"{format_bytes(disk_bytes)} less disk"
        choice = f"{slower:.1%} slower than {choice}, with {saved} per node"
    rows = []
    for each in plans:
        layout = each.layout
        kept = f"{layout.keep_attention} on {layout.attention_tier}"
        row = {
            "is_chosen": each is plan,
            "cp": layout.cp if layout.ring == 1 else f"{layout.ulysses}x{layout.ring}",
            "heads_per_stage": each.settings["parallel.heads_per_stage"],
            "inputs": layout.input_tier,
            "attention": kept if layout.keep_attention else "none",
            "optimizer": "host" if layout.offload_optimizer else "device",
            "tokens_per_s_per_gpu": each.tokens_per_s_per_gpu,
            "gpu_gib": each.ledger.gpu_peak / GIB,
            "host_gib": each.ledger.host_peak / GIB,
        }
        rows.append(row)
    return {"choice": choice, "alternatives": rows}


# ---- adapters, references and experts


def _describe_adapter(plan: Plan, rank: int) -> tuple[Facts, str]:
    """The trained and frozen parameters, and what freezing saves with the same settings."""
    shape = plan.shape
    has_copy = plan.work.reference and not shape.teacher
    full = replace(plan, shape=replace(shape.with_adapter(None), reference=has_copy))
    trained = shape.num_trained
    frozen = shape.shards(1)[1]
    gpu_bytes = full.ledger.gpu_peak - plan.ledger.gpu_peak
    host_bytes = full.ledger.host_needed - plan.ledger.host_needed
    step_s = full.step_s - plan.step_s
    sizes = f"{format_count(trained)} trained parameters, {format_count(frozen)} frozen"
    saved = f"{format_bytes(gpu_bytes)} per GPU"
    if host_bytes:
        saved += f", {format_bytes(host_bytes)} of host memory"
    saved += f"{', ' if step_s > 0 else ' and costs '}{format_duration(abs(step_s))} per step"
    figures = {
        "rank": rank,
        "trained_parameters": trained,
        "frozen_parameters": frozen,
        "saved_gpu_bytes": gpu_bytes,
        "saved_host_bytes": host_bytes,
        "saved_step_s": step_s,
    }
    return figures, f"adapters of rank {rank}: {sizes}{shape.format.note}; saves {saved}"


def _describe_reference(plan: Plan) -> str:
    """The model that also runs a forward pass."""
    layout = plan.layout
    weights = "a frozen copy" if plan.shape.reference else "the model without its adapter"
    if (teacher := plan.shape.teacher) is not None:
        sharers = plan.hardware.num_gpus // layout.replicas
        size = teacher.frozen_bytes(sharers, layout.element_bytes) / GIB
        weights = f"{format_count(teacher.num_parameters)} frozen parameters{teacher.format.note}"
        weights += f", {size:.1f} GiB per GPU"
    role = "teacher" if plan.work.distills else "reference"
    forward_s = plan.step_s - replace(plan, work=replace(plan.work, reference=False)).step_s
    return f"{role}: {weights}; its forward pass takes {format_duration(forward_s)} per step"


def _describe_experts(plan: Plan) -> tuple[Facts, list[str]]:
    """Parameters in all and per token, and a layer's bytes: as gathered, gathered ahead, unpacked,
    and the fp32 sums of its weight gradients. `shortest_context`: below it, half of the step waits
    for the layers' weights."""
    shape = plan.shape
    layout = plan.layout
    gathered = shape.gathered_bytes(layout.element_bytes)
    is_ahead = plan.hardware.num_gpus > 1 and layout.prefetches(gathered)
    shortest = 0
    for i in range(10, plan.work.context.bit_length()):
        context = 2**i * layout.cp
        seconds = replace(plan, work=replace(plan.work, context=context)).seconds
        if seconds.exchange > seconds.total / 2:
            shortest = 2 * context
    sizes = {
        "gathered": gathered,
        "prefetched": gathered * is_ahead,
        "unpacked": shape.packed_layer[0] * layout.element_bytes,
        "gradient_sum": shape.trained_layer * layout.sum_bytes,
    }
    layer = ", ".join(f"{format_bytes(size)} {name}" for name, size in sizes.items() if size)
    layer = layer.replace("gradient_sum", "fp32 sums of gradients")
    used = f"{format_count(shape.num_active)} of {format_count(shape.num_parameters)} parameters"
    ideal = {name: format_duration(part) for name, part in vars(plan.flop_seconds).items()}
    parts = "attention {attention}, matmuls {linear}, update {update}".format(**ideal)
    step = f"{format_duration(plan.flop_seconds.total)} per step ({parts})"
    notes = [
        f"experts: {used} are used per token; one layer: {layer}",
        f"FLOPs alone, without recomputation: {step}",
    ]
    if shortest:
        wait = f"Below {format_tokens(shortest)} tokens, gathering weights takes most of a step"
        notes.append(f"{wait}: it would need expert parallelism, which ithaka lacks")
    facts = {f"{name}_bytes": size for name, size in sizes.items()}
    facts |= {"parameters": shape.num_parameters, "active_parameters": shape.num_active}
    return facts | {"shortest_context": shortest}, notes


# ---- settings


def _explain_parallelism(plan: Plan) -> dict[str, str]:
    """Per setting, its effect and why it was chosen."""
    layout = plan.layout
    heads = plan.shape.heads
    num_gpus = plan.hardware.num_gpus
    width = layout.heads_per_stage or heads
    batch = _format_sequences(plan.work.batch)
    shared = f"each GPU has {batch} of its own"
    if layout.cp > 1:
        shared = f"{layout.cp} of {num_gpus} GPUs share {batch}"
    step = f"{_format_sequences(plan.sequences_per_step)}, {format_tokens(plan.tokens_per_step)}"
    reasons = {"parallel.cp": f"{shared}; {step} tokens per step"}
    if layout.ring > 1:
        groups = f"{layout.ring} groups of {layout.ulysses} GPUs{_explain_ring(plan)}"
        reasons["parallel.ring"] = f"k and v circulate in a ring of {groups}"
    if layout.replicas > 1:
        sharers = f"{num_gpus // layout.replicas} GPUs and replicated"
        slower = _explain_rejected(plan, "sharding over all GPUs", replicas=1)
        reasons["parallel.replicas"] = f"parameters are sharded over {sharers}{slower}"
    stages = "all heads at once" + " (plain Ulysses)" * (layout.ulysses > 1)
    if width < heads:
        wider = _explain_rejected(plan, "more heads", heads_per_stage=min(2 * width, heads))
        stages = f"{width // layout.ulysses} per GPU at a time{wider}"
    return reasons | {"parallel.heads_per_stage": stages}


def _explain_memory(plan: Plan) -> dict[str, str]:
    layout = plan.layout
    tier = layout.input_tier
    layers = sizes_by_layer(plan.shape, layout, plan.work.local_tokens(layout.cp))
    trained = layers[plan.shape.first_trained :]
    reasons = {
        "memory.tile_tokens": "tokens per tile of norms, projections and MLP",
        "memory.offload": _explain_tier("layer inputs", trained, "x", tier),
    }
    if layout.keep_inputs:
        last = "the last layers keep theirs on the device"
        reasons["memory.keep_inputs"] = f"{last}: the {tier} is full"
    reasons["memory.keep_attention"] = _explain_level(plan, "keep_attention")
    if layout.keep_attention:
        keeping = [sizes for sizes in layers if sizes.keeps_attention]
        outputs = _explain_tier("attention outputs", keeping, "outputs", layout.attention_tier)
        added = sum(sizes.qkv for sizes in layers)
        reasons["memory.attention_offload"] = outputs
        reasons["memory.keep_projections"] = _explain_level(plan, "keep_projections", added)
    if layout.keep_projections:
        added = sum(sizes.gate_up for sizes in layers)
        reasons["memory.checkpoint"] = _explain_level(plan, "keep_everything", added)
    if layout.rounds(plan.shape.num_layers):
        rounded = "attention outputs and the inputs of layers that keep none are rounded"
        reasons["memory.stored_dtype"] = f"off the device, {rounded} to one byte"
    elif layout.stored_dtype:
        reasons["memory.stored_dtype"] = "no effect: nothing off the device is rounded"
    overlap = "exchanges overlap with attention; " * (layout.cp > 1)
    overlap += "backward fetches each input once"
    if not layout.overlap:
        rejected = _explain_rejected(plan, "overlap", overlap=True)
        overlap = f"only one stage's tensors are in memory{rejected}"
    place = PLACES["host" if layout.offload_optimizer else "device"]
    states = f"parameters, gradients and AdamW state are kept {place}"
    return reasons | {"memory.overlap": overlap, "memory.offload_optimizer": states}


def _explain_tier(name: str, layers: list[LayerBytes], attribute: str, tier: str) -> str:
    if tier != "device":
        attribute = f"stored_{attribute}"
    size = format_bytes(sum(getattr(sizes, attribute) for sizes in layers))
    return f"{name} ({size} per GPU) are kept {PLACES[tier]}"


def _explain_ring(plan: Plan) -> str:
    cp = plan.layout.cp
    heads = plan.shape.heads
    width = plan.layout.heads_per_stage
    if cp > heads:
        return f": the model has only {heads} query heads to exchange"
    if cp > plan.hardware.gpus_per_node:
        return ": groups that exchange tokens for heads stay inside a node"
    stage = None if width is None else min(-(-width // cp) * cp, heads)
    name = f"exchanging tokens for heads over {cp}"
    return _explain_rejected(plan, name, ring=1, heads_per_stage=stage)


def _explain_level(plan: Plan, level: str, added_bytes: int = 0) -> str:
    """What keeping a level saves compared with the level below, which needs `added_bytes` less."""
    num_layers = getattr(plan.layout, level)
    kept, recomputed = LEVELS[level]
    if not num_layers:
        rejected = _explain_rejected(plan, "keeping more", **{level: 1})
        return f"backward recomputes {recomputed}{rejected}"
    levels = [*LEVELS]
    above = dict.fromkeys(levels[levels.index(level) + 1 :], 0)
    saved_s = plan.with_changes(**above, **{level: 0}).step_s - plan.with_changes(**above).step_s
    effect = f"{'saves' if saved_s >= 0 else 'costs'} {format_duration(abs(saved_s))} per step"
    more = f" ({format_bytes(added_bytes)} more)" if added_bytes else ""
    return f"{num_layers} of {plan.shape.num_layers} layers keep {kept}{more}: {effect}"


def _explain_rejected(plan: Plan, name: str, **changes: Any) -> str:
    """Why the search did not choose `changes`, described by `name`; empty if the choice was not its
    own."""
    other = plan.with_changes(**changes)
    is_faster = other.fits and other.step_s <= plan.step_s
    if not plan.fits or is_faster or changes.keys() & plan.fixed.keys():
        return ""
    return f": {name} would " + ("be slower" if other.fits else "not fit with the other settings")


def _format_sequences(count: int) -> str:
    return "one sequence" if count == 1 else f"{count} sequences"


def _format_speed(plan: Plan) -> str:
    return f"{format_rate(plan.tokens_per_s_per_gpu)} tok/s per GPU"


# ---- assumptions


def _list_assumptions(plan: Plan, attention: str) -> dict[str, str]:
    """What the plan assumes because it was neither measured nor set."""
    hardware = plan.hardware
    gpu = hardware.gpu
    host = f"{hardware.host_bytes / 1e9:.0f} GB per node; set it with --host-memory"
    reserve = f"{RESERVE_BYTES / GIB:.0f} GiB + {RESERVE_SHARE:.0%} of each GPU (context, "
    reserve += f"workspaces, fragmentation), {HOST_PROCESS_BYTES / 1e9:.0f} GB per GPU + "
    images = "all tokens, in frames of 512 x 512 pixels; fewer need less time for the encoder"
    compiles = plan.shape.compiles(plan.layout)
    changed = replace(plan, layout=replace(plan.layout, compile=not compiles))
    choice = "on; without it" if compiles else "off; with train.compile=auto"
    assumptions = {
        "host memory": host * hardware.assumed_host,
        "attention": attention * (gpu.kernel in KERNEL_NAMES),
        "links": f"{gpu.link_bytes_s / 1e9:.0f} GB/s per GPU inside a node, "
        f"{gpu.network_bytes_s / 1e9:.3g} GB/s between nodes",
        "disk": f"{gpu.disk_bytes_s / 1e9:.3g} GB/s per node" * bool(hardware.disk_bytes),
        "reserve": f"{reserve}{HOST_RESERVE_SHARE:.0%} of host memory",
        "rates": f"{gpu.name}: {gpu.source}",
        "compile": f"{choice}: {_format_speed(changed)}" * plan.shape.measured.compiles,
        "data": plan.shape.root.data,
        "images": images * bool(plan.shape.encoders),
    }
    return {name: text for name, text in assumptions.items() if text}


def _explain_attention(plan: Plan) -> tuple[str, list[str]]:
    """(the attention kernel, with the speed of the alternative if FlashAttention 4 runs on this
    GPU; a warning about layers that no fast kernel computes, if there are any)"""
    shape = plan.shape
    gpu = plan.hardware.gpu
    name = KERNEL_NAMES.get(gpu.kernel, gpu.kernel)
    if slow := {kind: kernel for kind, kernel in plan.kernels.items() if kernel in SLOW_KERNELS}:
        heads = []
        for kind in slow:
            softcap = f" and softcap {kind.softcap:g}" if kind.softcap else ""
            heads.append(f"head dim {kind.head_dim}{softcap}")
        kinds = ", ".join(dict.fromkeys(heads))
        kernels = join_kernels(KERNEL_NAMES[kernel] for kernel in slow.values())
        mixers = tuple(mixer for mixer in shape.mixers if slow.keys() & {*mixer.attention})
        only_slow = replace(plan, shape=replace(shape, mixers=mixers)).flop_seconds.attention
        share = only_slow / plan.flop_seconds.attention * plan.seconds.attention / plan.step_s
        layers = f"{len(mixers)} of {shape.num_layers} layers ({kinds}) run {kernels}"
        warning = f"Slow attention: {layers}, which takes {share:.0%} of the step"
        fast = f"{name}; " * (len(slow) < len(plan.kernels))
        return f"{fast}{kernels} for {kinds}, which no faster kernel computes", [warning]
    if "fa4" in gpu.kernels:
        other = "cudnn" if gpu.kernel == "fa4" else "fa4"
        changed = replace(plan, hardware=plan.hardware.with_kernel(other))
        both = f"{name}; with {KERNEL_NAMES[other]}"
        package = f"{KERNEL_NAMES['fa4']} ({FA4_PACKAGE})"
        name = f"{both.replace(KERNEL_NAMES['fa4'], package)}: {_format_speed(changed)}"
    return name, []
