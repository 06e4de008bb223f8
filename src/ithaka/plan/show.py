"""The output of `ithaka plan`: a plan as text, JSON and YAML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ithaka.config import format_value
from ithaka.config.units import (
    format_bytes,
    format_count,
    format_duration,
    format_rate,
    format_tokens,
    unbroken,
    wrap,
    wrap_columns,
    wrap_list,
)
from ithaka.facts.attention import AttentionKind, span_pairs
from ithaka.facts.families import unscaled_positions
from ithaka.facts.sizes import RESERVE_BYTES
from ithaka.layout import FIELDS
from ithaka.plan.bytes import HOST_PROCESS_BYTES, HOST_RESERVE_SHARE, RESERVE_SHARE
from ithaka.plan.hardware import FA4_PACKAGE, GIB, KERNEL_NAMES, SLOW_KERNELS, join_kernels
from ithaka.plan.layer_bytes import sizes_by_layer
from ithaka.plan.request import PlanRequest
from ithaka.plan.search import Plan, SearchSpace
from ithaka.plan.shape import StepShape

# Nodes have a few percent less free memory than their nominal size, and `ithaka train` plans with
# what is free.
TIGHT_SHARE = 0.95
FASTER = 1.02  # plans with float8 in host memory are shown from this speedup on
COLUMNS = (
    "  cp",
    "heads/stage",
    "inputs",
    "attention kept",
    "optimizer",
    "tok/s/GPU",
    "GPU GiB",
    "host GiB",
)
# Levels of kept activations, each on top of the one before: what layers keep, and what backward
# recomputes otherwise.
LEVELS = {
    "keep_attention": ("their attention output", "attention"),
    "keep_projections": ("all but the MLP activations", "q, k and v"),
    "keep_everything": ("everything", "the MLP activations"),
}
PLACES = {"device": "on the device", "host": "in host memory", "disk": "on disk"}
# Tier -> its name, and what its capacity is counted for.
TIER_NAMES = {
    "GPU": ("GPU memory", "GPU"),
    "host": ("host memory", "node"),
    "disk": ("disk space", "node"),
}


# ---- commands


def answer_request(
    request: PlanRequest, max_context: bool, steps: int | None, as_json: bool
) -> tuple[str, Plan]:
    """(output, plan). `max_context`: plan for the longest context that fits."""
    space = request.space
    batch = request.work.batch
    plan, context, limited_by = request.longest_plan() if max_context else (request.plan(), 0, "")
    rope = request.missing_rope(plan.work.length)
    warnings = [*_warn_of_slow_attention(plan), *_warn_of_tight(plan)]
    if as_json:
        values = as_dict(plan, request.model, steps) | (
            {"max_context": context} if max_context else {}
        )
        values |= {"missing_rope": rope} if rope else {}
        if not limited_by:
            limited_by = plan.limited_by if plan.fits else space.longest_context_and_limit(batch)[1]
        return json.dumps(values | {"limited_by": limited_by, "warnings": warnings}, indent=2), plan
    unscaled = unscaled_positions(request.positions, request.rope)
    scaled = f" ({format_tokens(unscaled)} before scaling)" if unscaled != request.positions else ""
    needs = (
        f"{request.model} has {format_tokens(request.positions)} positions{scaled}; training "
        "needs model.rope="
    )
    notes = [f"{needs}{unbroken(format_value(rope))}"] if rope else []
    text = as_text(
        plan, request.model, steps, [*_warn_of_tight(plan), *_suggest_float8(plan), *notes]
    )
    if max_context and context:
        headline = (
            f"Longest context of {request.model} on {plan.hardware.name}: "
            f"{format_tokens(context)} tokens"
        )
        rounded = replace(space, shape=plan.shape).with_float8
        longer = rounded.longest_context(batch) if rounded else 0
        float8 = (
            f"\nWith memory.stored_dtype=float8: {format_tokens(longer)} ({longer})."
            if longer > context
            else ""
        )
        text = f"{headline} ({context}), limited by {limited_by}.{float8}\n\n{text}"
    return text, plan


# ---- JSON and YAML


def as_dict(plan: Plan, model: str, steps: int | None = None) -> dict[str, Any]:
    """gpu_*: per GPU. host_*, disk_*: per node. Peaks do not include the reserve."""
    ledger = plan.ledger
    reserves = {"GPU": ledger.gpu["reserve"], "host": ledger.host["reserve"]}
    run = (
        {
            "steps": steps,
            "hours": steps * plan.step_s / 3600,
            "tokens": steps * plan.tokens_per_step,
        }
        if steps
        else {}
    )
    return {
        "model": model,
        "fits": plan.fits,
        "context": plan.work.context,
        "batch": plan.work.batch,
        "gpus": plan.hardware.name,
        "kernel": join_kernels(plan.kernels.values()) or None,
        "settings": plan.settings,
        "reasons": _explain_settings(plan),
        **({"choice": _explain_choice(plan)} if plan.fits else {"ways_out": _find_fixes(plan)}),
        "step_s": plan.step_s,
        "tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu,
        "sequences_per_step": plan.sequences_per_step,
        "tokens_per_step": plan.tokens_per_step,
        **run,
        **({"adapter": _adapter_savings(plan)} if plan.shape.adapter else {}),
        **(
            {"experts": _expert_costs(plan)}
            if plan.shape.num_active < plan.shape.num_parameters
            else {}
        ),
        **{
            f"{tier.lower()}_peak_bytes": need - reserves.get(tier, 0)
            for tier, (need, _) in ledger.tiers.items()
        },
        **{f"{tier.lower()}_reserve_bytes": num_bytes for tier, num_bytes in reserves.items()},
        **{f"{tier.lower()}_bytes": have for tier, (_, have) in ledger.tiers.items()},
        "peak_phase": ledger.phase,
        "gpu_holders": ledger.gpu,
        "host_holders": ledger.host,
        "disk_holders": ledger.disk,
        "seconds": vars(plan.seconds),
        "flop_seconds": vars(plan.flop_seconds),
        "assumed": list_assumptions(plan),
    }


def as_yaml(request: PlanRequest, plan: Plan, steps: int | None = None) -> str:
    """A complete configuration for `ithaka train`."""
    headline = wrap(_format_headline(plan, request.model), "# ", "#   ")
    return "\n".join([*headline, *request.config_lines(plan, steps)]) + "\n"


# ---- text


def as_text(plan: Plan, model: str, steps: int | None = None, notes: Sequence[str] = ()) -> str:
    """Whether it fits, notes, settings and reasons, memory, time, other plans, assumptions."""
    texts = [_format_headline(plan, model), *_warn_of_slow_attention(plan)]
    if not plan.fits:
        texts += [*_format_shortage(plan), *_format_fixes(plan)]
    texts += notes
    if plan.fits and steps:
        count = steps * plan.tokens_per_step
        texts.append(
            f"{steps} steps: {format_duration(steps * plan.step_s)}, {count / 1e9:.4g} billion "
            "tokens"
        )
    if plan.shape.adapter:
        texts.append(_format_adapter(plan))
    if plan.work.reference:
        kind = "a frozen copy" if plan.shape.reference else "the model without its adapter"
        if (teacher := plan.shape.teacher) is not None:
            size = teacher.frozen_bytes(
                plan.hardware.num_gpus // plan.layout.replicas, plan.layout.element_bytes
            )
            kind = f"{format_count(teacher.num_parameters)} frozen parameters{teacher.format.note}"
            kind += f", {size / GIB:.1f} GiB per GPU"
        role = "teacher" if plan.work.distills else "reference"
        forward_s = plan.step_s - replace(plan, work=replace(plan.work, reference=False)).step_s
        texts.append(
            f"{role}: {kind}; its forward pass takes {format_duration(forward_s)} per step"
        )
    if plan.shape.num_active < plan.shape.num_parameters:
        texts += _format_experts(plan)
    lines = [line for text in texts for line in wrap(text, rest="  ")]
    settings = {name: format_value(value) for name, value in plan.settings.items()}
    width = max(6, *map(len, settings.values()))
    rows = {
        f"  {name:<24}  {settings[name]:>{width}}   ": reason
        for name, reason in _explain_settings(plan).items()
    }
    alternatives = _format_alternatives(plan) if plan.alternatives else ()
    assumptions = {f"  {name:<11}  ": text for name, text in list_assumptions(plan).items()}
    lines += ["", *wrap_columns(rows), "", *_format_costs(plan), *alternatives, "", "Assumptions"]
    return "\n".join([*lines, *wrap_columns(assumptions)])


def _format_headline(plan: Plan, model: str) -> str:
    batch = f"{plan.work.batch} x " if plan.work.batch > 1 else ""
    subject = (
        f"{model}, {batch}{format_tokens(plan.work.context)} "
        f"tokens{_format_forest(plan.work)}, {plan.hardware.name}"
    )
    if not plan.fits:
        return f"{subject}: does not fit"
    speed = (
        f"{format_rate(plan.tokens_per_s_per_gpu)} tok/s per GPU, "
        f"{format_duration(plan.step_s)} per step"
    )
    return f"{subject}: fits, {speed} (mostly {plan.limited_by})"


def _format_shortage(plan: Plan) -> Iterator[str]:
    yield "The closest plan, shown below, lacks:"
    for tier, (need, have) in plan.ledger.tiers.items():
        if need > have:
            name, owner = TIER_NAMES[tier]
            sizes = f"each {owner} needs {need / GIB:.1f} GiB and has {have / GIB:.1f} GiB"
            yield f"  {(need - have) / GIB:.1f} GiB of {name}: {sizes}"


def _warn_of_tight(plan: Plan) -> Iterator[str]:
    """Host memory or disk that is nearly all planned. The search fills GPU memory on purpose."""
    ledger = plan.ledger
    needs = {"host": (ledger.host_needed, "--host-memory"), "disk": (ledger.disk_peak, "--disk")}
    for tier, (need, option) in needs.items():
        have = ledger.tiers[tier][1]
        if plan.fits and need > TIGHT_SHARE * have:
            name = TIER_NAMES[tier][0].capitalize()
            sizes = f"{need / GIB:.1f} of {have / GIB:.1f} GiB per node"
            yield (
                f"{name} is tight: {sizes}. Nodes often have less free; set {option} to what "
                "yours have."
            )


def _suggest_float8(plan: Plan) -> Iterator[str]:
    """The plan with float8 in host memory and on disk, if it is faster."""
    layout = plan.layout
    space = SearchSpace(plan.shape, plan.hardware, plan.fixed).with_float8
    if space and plan.fits and {layout.input_tier, layout.attention_tier} != {"device"}:
        other = space.choose(plan.work)
        if (speed := other.tokens_per_s_per_gpu) > FASTER * plan.tokens_per_s_per_gpu:
            yield f"With memory.stored_dtype=float8: {format_rate(speed)} tok/s per GPU"


def _warn_of_slow_attention(plan: Plan) -> Iterator[str]:
    """Layers whose attention no fast kernel computes, and their part of the step."""
    shape = plan.shape
    (slow, kinds, kernels) = _find_slow_attention(plan)
    mixers = tuple(mixer for mixer in shape.mixers if not {*slow}.isdisjoint(mixer.attention))
    if mixers:
        only_slow = replace(plan, shape=replace(shape, mixers=mixers))
        share = (
            only_slow.flop_seconds.attention
            / plan.flop_seconds.attention
            * plan.seconds.attention
            / plan.step_s
        )
        layers = f"{len(mixers)} of {shape.num_layers} layers ({kinds})"
        yield f"Slow attention: {layers} run {kernels}, which takes {share:.0%} of the step"


def _format_forest(work: StepShape) -> str:
    """What a shared prompt saves, compared with a prompt for each branch."""
    if not work.spans:
        return ""
    (_, prompt), *branches = work.spans
    apart = [prompt + tokens for _, tokens in branches]
    fewer = (
        sum(apart) / work.context,
        sum(span_pairs(0, n) for n in apart) * work.batch / work.pairs(None),
    )
    words = (
        f"{len(branches)} branches of {format_tokens(branches[0][1])} after {format_tokens(prompt)}"
    )
    return f" ({words}: {fewer[0]:.1f}x fewer tokens and {fewer[1]:.1f}x fewer pairs than apart)"


def _adapter_savings(plan: Plan) -> dict[str, int | float]:
    """The trained and frozen parameters, and what freezing saves with the same settings."""
    shape = plan.shape
    full = replace(
        plan,
        shape=replace(
            shape.with_adapter(None), reference=plan.work.reference and not shape.teacher
        ),
    )
    return {
        "rank": shape.adapter.rank if shape.adapter else 0,
        "trained_parameters": shape.num_trained,
        "frozen_parameters": shape.shards(1)[1],
        "saved_gpu_bytes": full.ledger.gpu_peak - plan.ledger.gpu_peak,
        "saved_host_bytes": full.ledger.host_needed - plan.ledger.host_needed,
        "saved_step_s": full.step_s - plan.step_s,
    }


def _format_adapter(plan: Plan) -> str:
    rank, trained, frozen, gpu_bytes, host_bytes, step_s = _adapter_savings(plan).values()
    sizes = (
        f"adapters of rank {rank}: {format_count(trained)} trained parameters, "
        f"{format_count(frozen)} frozen"
    )
    sizes += plan.shape.format.note
    host = f", {format_bytes(host_bytes)} of host memory" if host_bytes else ""
    time = (
        f", {format_duration(step_s)} per step"
        if step_s > 0
        else f" and costs {format_duration(-step_s)} per step"
    )
    return f"{sizes}; saves {format_bytes(gpu_bytes)} per GPU{host}{time}"


def _expert_costs(plan: Plan) -> dict[str, int]:
    """Parameters in all and per token, and a layer's bytes: as gathered, gathered ahead, unpacked,
    and the fp32 sums of its weight gradients. `shortest_context`: below it, half of the step waits
    for the layers' weights."""
    shape = plan.shape
    layout = plan.layout
    gathered = shape.gathered_bytes(layout.element_bytes)
    sum_bytes = layout.sum_bytes
    is_single = plan.hardware.num_gpus == 1
    contexts = (2**i * layout.cp for i in reversed(range(10, plan.work.context.bit_length())))
    seconds = ((c, replace(plan, work=replace(plan.work, context=c)).seconds) for c in contexts)
    waits = (context for context, parts in seconds if parts.exchange > parts.total / 2)
    return {
        "parameters": shape.num_parameters,
        "active_parameters": shape.num_active,
        "gathered_bytes": gathered,
        "prefetched_bytes": gathered if layout.prefetches(gathered) and not is_single else 0,
        "unpacked_bytes": shape.packed_layer[0] * layout.element_bytes,
        "gradient_sum_bytes": shape.trained_layer * sum_bytes,
        "shortest_context": 2 * next(waits, 0),
    }


def _format_experts(plan: Plan) -> list[str]:
    total, active, gathered, prefetched, unpacked, sums, shortest = _expert_costs(plan).values()
    parts = {
        "gathered": gathered,
        "prefetched": prefetched,
        "unpacked": unpacked,
        "fp32 sums of gradients": sums,
    }
    sizes = ", ".join(f"{format_bytes(size)} {name}" for name, size in parts.items() if size)
    ideal = plan.flop_seconds
    rates = (
        f"attention {format_duration(ideal.attention)}, matmuls {format_duration(ideal.linear)}, "
    )
    rates += f"update {format_duration(ideal.update)}"
    lines = [
        (
            f"experts: {format_count(active)} of {format_count(total)} parameters are used per "
            "token; "
            f"one layer: {sizes}"
        ),
        f"FLOPs alone, without recomputation: {format_duration(ideal.total)} per step ({rates})",
    ]
    if shortest:
        reason = "it would need expert parallelism, which ithaka lacks"
        lines.append(
            f"Below {format_tokens(shortest)} tokens, gathering weights takes most of a step: "
            f"{reason}"
        )
    return lines


def _find_fixes(plan: Plan) -> dict[str, str]:
    """Options that make the plan fit, each on its own, found by search."""
    space = SearchSpace(plan.shape, plan.hardware, plan.fixed)
    context = space.longest_context(plan.work.batch)
    machine = space.smallest_machine(plan.work)
    options = {"--context": f"{context} ({format_tokens(context)})"} if context else {}
    adapter = space.adapter_that_fits(plan.work)
    parts = [f"--adapter {adapter['rank']}"] if "rank" in adapter else []
    parts += ["--set adapter.base=nf4"] if "base" in adapter else []
    options |= {parts[0].split()[0]: " ".join(parts).partition(" ")[2]} if parts else {}
    if space.with_float8 and space.with_float8.fits(plan.work):
        options.setdefault("--set", "memory.stored_dtype=float8")
    options |= {"--gpus": f"{machine.name} ({machine.num_gpus} GPUs)"} if machine else {}
    for option, tier in (("--host-memory", "host"), ("--disk", "disk")):
        if num_bytes := space.smallest_capacity(tier, plan.work):
            options[option] = f"{num_bytes // 10**9}GB"
    fits_without = plan.fixed and SearchSpace(plan.shape, plan.hardware).fits(plan.work)
    return options | ({"without": "--set"} if fits_without else {})


def _format_fixes(plan: Plan) -> list[str]:
    options = _find_fixes(plan)
    hardware = plan.hardware
    if not options:
        return [
            "Neither a shorter context nor more of these GPUs is enough; use GPUs with more memory."
        ]
    sizes = {"--host-memory": hardware.host_bytes, "--disk": hardware.disk_bytes}
    now = {
        option: f" per node (now {f'{size / 1e9:.0f}GB' if size else 'none'})"
        for option, size in sizes.items()
    }
    fixes = [f"  {option} {value}{now.get(option, '')}" for option, value in options.items()]
    return ["Any one of these makes it fit, with other settings than those below:", *fixes]


def _explain_settings(plan: Plan) -> dict[str, str]:
    """Per setting, its effect and why it was chosen, or "(your setting)" where the user chose."""
    layout = plan.layout
    shape = plan.shape
    batch = _format_sequences(plan.work.batch)
    cp = layout.cp
    ulysses = layout.ulysses
    width = layout.heads_per_stage or shape.heads
    shared = (
        f"{cp} of {plan.hardware.num_gpus} GPUs share {batch}"
        if cp > 1
        else f"each GPU has {batch} of its own"
    )
    step = (
        f"{_format_sequences(plan.sequences_per_step)}, {format_tokens(plan.tokens_per_step)} "
        "tokens per step"
    )
    reasons = {"parallel.cp": f"{shared}; {step}"}
    if layout.ring > 1:
        ring = f"k and v circulate in a ring of {layout.ring} groups of {ulysses} GPUs"
        reasons["parallel.ring"] = f"{ring}{_explain_ring(plan)}"
    if layout.replicas > 1:
        sharers = plan.hardware.num_gpus // layout.replicas
        slower = _explain_rejected(plan, "sharding over all GPUs", replicas=1)
        reasons["parallel.replicas"] = (
            f"parameters are sharded over {sharers} GPUs and replicated{slower}"
        )
    reasons["parallel.heads_per_stage"] = "all heads at once" + " (plain Ulysses)" * (ulysses > 1)
    if width < shape.heads:
        wider = _explain_rejected(plan, "more heads", heads_per_stage=min(2 * width, shape.heads))
        reasons["parallel.heads_per_stage"] = f"{width // ulysses} per GPU at a time{wider}"
    reasons |= _explain_memory(plan)
    return {
        name: f"{text} (your setting)" if FIELDS[name] in plan.fixed else text
        for name, text in reasons.items()
    }


def _explain_memory(plan: Plan) -> dict[str, str]:
    """The part of `_explain_settings` about the section memory."""
    layout = plan.layout
    shape = plan.shape
    layers = sizes_by_layer(shape, layout, plan.work.local_tokens(layout.cp))
    is_stored = layout.input_tier != "device"
    inputs = format_bytes(
        sum(b.stored_x if is_stored else b.x for b in layers[shape.first_trained :])
    )
    outs = [
        (b.outputs, b.stored_outputs)[layout.attention_tier != "device"]
        for b in layers
        if b.keeps_attention
    ]
    reasons = {"memory.tile_tokens": "tokens per tile of norms, projections and MLP"}
    reasons["memory.offload"] = (
        f"layer inputs ({inputs} per GPU) are kept {PLACES[layout.input_tier]}"
    )
    if layout.keep_inputs:
        reasons["memory.keep_inputs"] = (
            f"the last layers keep theirs on the device: the {layout.input_tier} is full"
        )
    reasons["memory.keep_attention"] = _explain_level(plan, "keep_attention")
    if layout.keep_attention:
        place = PLACES[layout.attention_tier]
        reasons["memory.attention_offload"] = (
            f"attention outputs ({format_bytes(sum(outs))} per GPU) are kept {place}"
        )
        reasons["memory.keep_projections"] = _explain_level(plan, "keep_projections")
    if layout.keep_projections:
        reasons["memory.checkpoint"] = _explain_level(plan, "keep_everything")
    if layout.stored_dtype:
        effect = (
            "off the device, attention outputs and the inputs of layers that keep none are "
            "rounded to one byte"
        )
        reasons["memory.stored_dtype"] = (
            effect
            if layout.rounds(shape.num_layers)
            else "no effect: nothing off the device is rounded"
        )
    reasons["memory.overlap"] = (
        "exchanges overlap with attention; " * (layout.cp > 1) + "backward fetches each input once"
    )
    if not layout.overlap:
        rejected = _explain_rejected(plan, "overlap", overlap=True)
        reasons["memory.overlap"] = f"only one stage's tensors are in memory{rejected}"
    place = PLACES["host" if layout.offload_optimizer else "device"]
    reasons["memory.offload_optimizer"] = f"parameters, gradients and AdamW state are kept {place}"
    return reasons


def _explain_ring(plan: Plan) -> str:
    cp = plan.layout.cp
    heads = plan.shape.heads
    width = plan.layout.heads_per_stage
    if cp > heads:
        return f": the model has only {heads} query heads to exchange"
    if cp > plan.hardware.gpus_per_node:
        return ": groups that exchange tokens for heads stay inside a node"
    stage = None if width is None else min(-(-width // cp) * cp, heads)
    return _explain_rejected(
        plan, f"exchanging tokens for heads over {cp}", ring=1, heads_per_stage=stage
    )


def _format_sequences(count: int) -> str:
    return "one sequence" if count == 1 else f"{count} sequences"


def _explain_level(plan: Plan, level: str) -> str:
    """What keeping a level saves compared with the level below."""
    num_layers = getattr(plan.layout, level)
    (kept, recomputed) = LEVELS[level]
    if not num_layers:
        return (
            "backward recomputes "
            f"{recomputed}{_explain_rejected(plan, 'keeping more', **{level: 1})}"
        )
    above = dict.fromkeys([*LEVELS][[*LEVELS].index(level) + 1 :], 0)
    saved_s = plan.with_changes(**above, **{level: 0}).step_s - plan.with_changes(**above).step_s
    effect = f"{'saves' if saved_s >= 0 else 'costs'} {format_duration(abs(saved_s))} per step"
    layers = sizes_by_layer(plan.shape, plan.layout, plan.work.local_tokens(plan.layout.cp))
    added = {
        "keep_projections": sum(b.qkv for b in layers),
        "keep_everything": sum(b.gate_up for b in layers),
    }
    more = f" ({format_bytes(added[level])} more)" if added.get(level) else ""
    return f"{num_layers} of {plan.shape.num_layers} layers keep {kept}{more}: {effect}"


def _explain_rejected(plan: Plan, name: str, **changes: Any) -> str:
    """Why the search did not choose `changes`, described by `name`; empty if the choice was not its
    own."""
    other = plan.with_changes(**changes)
    if (
        not plan.fits
        or changes.keys() & plan.fixed.keys()
        or (other.fits and other.step_s <= plan.step_s)
    ):
        return ""
    return (
        f": {name} would be slower"
        if other.fits
        else f": {name} would not fit with the other settings"
    )


def _format_costs(plan: Plan) -> Iterator[str]:
    """Memory by tier and category, and time."""
    ledger = plan.ledger
    tiers = {
        f"GPU memory, per GPU (peak in {ledger.phase})": (ledger.gpu, ledger.gpu_bytes),
        "Host memory, per node": (ledger.host, ledger.host_bytes),
        "Disk, per node": (ledger.disk, ledger.disk_bytes),
    }
    for title, (sizes, have) in tiers.items():
        if need := sum(sizes.values()):
            yield f"{title}: {need / GIB:.1f} of {have / GIB:.1f} GiB"
            yield from wrap_list(
                f"{name} {held / GIB:.1f}" for name, held in sizes.items() if held >= GIB / 20
            )
    yield f"Time per step: {format_duration(plan.step_s)}"
    parts = vars(plan.seconds).items()
    yield from wrap_list(
        f"{name} {format_duration(s)} ({s / plan.step_s:.1%})" for name, s in parts
    )


def _format_alternatives(plan: Plan) -> Iterator[str]:
    """A table of the plan and the best of other kinds, fastest first; an arrow marks the plan."""
    yield from (
        "",
        *wrap(f"This plan (>) and others, fastest first. It is {_explain_choice(plan)}."),
    )
    yield f"  {'  '.join(COLUMNS)}"
    for other in sorted((plan, *plan.alternatives), key=lambda other: -other.tokens_per_s_per_gpu):
        layout = other.layout
        ledger = other.ledger
        kept = (
            f"{layout.keep_attention} on {layout.attention_tier}"
            if layout.keep_attention
            else "none"
        )
        cells = (
            layout.cp if layout.ring == 1 else f"{layout.ulysses}x{layout.ring}",
            other.settings["parallel.heads_per_stage"],
            layout.input_tier,
            kept,
            "host" if layout.offload_optimizer else "device",
            format_rate(other.tokens_per_s_per_gpu),
            f"{ledger.gpu_peak / GIB:.1f}",
            f"{ledger.host_peak / GIB:.0f}",
        )
        row = "".join(f"  {cell:>{len(title)}}" for title, cell in zip(COLUMNS, cells, strict=True))
        yield f"> {row[2:]}" if other is plan else row


def _explain_choice(plan: Plan) -> str:
    fastest = max((plan, *plan.alternatives), key=lambda other: other.tokens_per_s_per_gpu)
    if fastest is plan:
        return "the fastest that fits"
    slower = 1 - plan.tokens_per_s_per_gpu / fastest.tokens_per_s_per_gpu
    disk, host = (
        getattr(fastest.ledger, name) - getattr(plan.ledger, name)
        for name in ("disk_peak", "host_needed")
    )
    saved = f"{format_bytes(disk)} less disk" if disk else f"{format_bytes(host)} less host memory"
    return f"{slower:.1%} slower than the fastest that fits, with {saved} per node"


def list_assumptions(plan: Plan) -> dict[str, str]:
    """What the plan assumes because it was neither measured nor set."""
    gpu = plan.hardware.gpu
    hardware = plan.hardware
    assumptions = {
        "host memory": f"{hardware.host_bytes / 1e9:.0f} GB per node; set it with --host-memory",
        "attention": _explain_kernel(plan),
        "links": f"{gpu.link_bytes_s / 1e9:.0f} GB/s per GPU inside a node, "
        f"{gpu.network_bytes_s / 1e9:.3g} GB/s between nodes",
        "disk": f"{gpu.disk_bytes_s / 1e9:.3g} GB/s per node",
        "reserve": f"{RESERVE_BYTES / GIB:.0f} GiB + {RESERVE_SHARE:.0%} of each GPU (context, "
        "workspaces, "
        f"fragmentation), {HOST_PROCESS_BYTES / 1e9:.0f} GB per GPU + {HOST_RESERVE_SHARE:.0%} of "
        "host memory",
        "rates": f"{gpu.name}: {gpu.source}",
        "compile": _explain_compile(plan),
        "data": plan.shape.root.data,
        "images": "all tokens, in frames of 512 x 512 pixels; fewer need less time for the encoder",
    }
    known = {"host memory": not hardware.assumed_host, "disk": not hardware.disk_bytes}
    known["compile"] = not plan.shape.measured.compiles
    known |= {"attention": gpu.kernel not in KERNEL_NAMES, "images": not plan.shape.encoders}
    return {name: text for name, text in assumptions.items() if not known.get(name)}


def _explain_compile(plan: Plan) -> str:
    compiles = plan.shape.compiles(plan.layout)
    changed = replace(plan, layout=replace(plan.layout, compile=not compiles))
    speed = f"{format_rate(changed.tokens_per_s_per_gpu)} tok/s per GPU"
    return f"{'on; without it' if compiles else 'off; with train.compile=auto'}: {speed}"


def _explain_kernel(plan: Plan) -> str:
    """The attention kernel, and the speed with the alternative if FlashAttention 4 runs on this
    GPU."""
    gpu = plan.hardware.gpu
    name = KERNEL_NAMES.get(gpu.kernel, gpu.kernel)
    other = "cudnn" if gpu.kernel == "fa4" else "fa4"
    slow, kinds, kernels = _find_slow_attention(plan)
    if slow:
        name = f"{name}; " * (len(slow) < len(plan.kernels))
        return f"{name}{kernels} for {kinds}, which no faster kernel computes"
    if "fa4" not in gpu.kernels:
        return name
    changed = replace(plan, hardware=plan.hardware.with_kernel(other))
    speed = f"{format_rate(changed.tokens_per_s_per_gpu)} tok/s per GPU"
    if other == "fa4":
        return f"{name}; with FlashAttention 4 ({FA4_PACKAGE}): {speed}"
    return f"{name} ({FA4_PACKAGE}); with {KERNEL_NAMES[other]}: {speed}"


def _find_slow_attention(plan: Plan) -> tuple[list[AttentionKind], str, str]:
    """The kinds of attention that no fast kernel computes, in words too, and the kernels that
    do."""
    slow = {kind: kernel for kind, kernel in plan.kernels.items() if kernel in SLOW_KERNELS}
    softcaps = {kind: f" and softcap {kind.softcap:g}" if kind.softcap else "" for kind in slow}
    kinds = ", ".join(dict.fromkeys(f"head dim {kind.head_dim}{softcaps[kind]}" for kind in slow))
    return [*slow], kinds, join_kernels(KERNEL_NAMES[kernel] for kernel in slow.values())
