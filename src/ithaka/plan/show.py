"""What `ithaka plan` answers: a plan as text, JSON and YAML."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ithaka.config import (
    SECTIONS,
    Config,
    ConfigError,
    explicit_settings,
    format_value,
    load_config,
    parse_count,
    to_dict,
)
from ithaka.layout import EVERYTHING, SETTINGS, format_choices
from ithaka.plan import search
from ithaka.plan.bytes import (
    HOST_PROCESS_BYTES,
    HOST_RESERVE_SHARE,
    RESERVE_BYTES,
    RESERVE_SHARE,
)
from ithaka.plan.hardware import (
    DISK_BYTES_S,
    FA4_PACKAGE,
    GIB,
    H200_ATTENTION,
    KERNEL_NAMES,
    Hardware,
)
from ithaka.plan.layer_bytes import LayerBytes, kept_attention_bytes
from ithaka.plan.models import find_config, hub_id
from ithaka.plan.search import ADAPTER_RANK, Plan, SearchSpace
from ithaka.plan.shape import Work, max_positions, shape_from_config, yarn_factor

WIDTH = 118
# Settings that `ithaka plan` has options for.
OPTIONS = {"model.path": "the argument MODEL", "data.context": "--context", "train.batch": "--batch",
           "train.steps": "--steps"}  # fmt: skip
# Lines of a planned configuration that are the user's to fill in: an example, and what it means.
TO_FILL_IN = {
    "data.path": ("books.jsonl", "your documents; without it, Python's standard library"),
    "optim.lr": ("1.0e-5", "peak learning rate; 3.0e-4 by default"),
    "optim.warmup_steps": ("20", "none by default"),
    "train.epochs": ("1", "or steps: 500; 1000 steps by default"),
    "train.validate_every": ("50", "steps; 100 by default"),
    "train.keep_best": ("true", "keep the checkpoint with the lowest validation loss"),
    "train.run_dir": ("runs/long", "runs/<date>-<time> by default"),
}
ADAPTER = {"adapter.rank", "adapter.targets", "adapter.modules_to_save"}
COLUMNS = ("  cp", "heads/stage", "inputs", "attention kept", "optimizer", "tok/s/GPU", "GPU GiB", "host GiB")
# What layers keep, and what backward does where they do not.
LEVELS = {
    "keep_attention": ("attention's output", "computes attention's output again"),
    "keep_projections": ("all but the MLP's middle", "projects q, k and v again"),
    "keep_everything": ("everything", "computes the MLP's middle again"),
}
PLACES = {"device": "on the device", "host": "in host memory", "disk": "on disk"}
TIER_WORDS = {"GPU": ("GPU memory", ""), "host": ("host memory", "--host-memory 2TB"), "disk": ("disk", "--disk 10TB")}


# ---- questions


@dataclass(frozen=True)
class PlanRequest:
    """A model on a machine. `hf_config`: its config.json; `config`: the command's settings; `given`: the names
    (parallel.cp) of those that the user set."""

    model: str
    hf_config: Mapping[str, Any]
    space: SearchSpace
    config: Config
    given: frozenset[str]
    work: Work

    def with_kernel(self, kernel: str) -> PlanRequest:
        """With the attention rates of this kernel."""
        machine = self.space.hardware
        return replace(self, space=replace(self.space, hardware=machine.with_kernel(kernel)))

    def plan(self, context: int = 0) -> Plan:
        return self.space.choose(replace(self.work, context=context or self.work.context))

    def missing_rope(self, context: int) -> dict[str, Any] | None:
        """model.rope for a context beyond the positions of a trained model, unless the user set it."""
        positions, from_scratch = max_positions(self.hf_config), Path(self.model).expanduser().is_file()
        if context <= positions or from_scratch or "model.rope" in self.given:
            return None
        rope = self.hf_config.get("rope_parameters") or self.hf_config.get("rope_scaling") or {}
        return {"type": "yarn", "factor": yarn_factor(positions, rope, context)}

    def forward_plan(self) -> Plan:
        """Of an evaluation, whose layout no setting changes."""
        if self.given:
            raise ConfigError(f"{sorted(self.given)[0]} does not change an evaluation; leave it out with --evaluate")
        return search.forward_plan(self.space.shape, self.space.hardware, self.work)


def make_request(
    model: str,
    hardware: Hardware,
    context: str,
    batch: int,
    overrides: Sequence[str],
    adapter: int | None = None,
    any_setting: bool = False,
) -> PlanRequest:
    """`overrides`: settings as for training, section.key=value; `any_setting`: also those that change no plan."""
    overrides = [*overrides, *([f"adapter.rank={adapter}"] if adapter else [])]
    num_tokens = parse_count(context)
    if num_tokens is None or num_tokens < 2:
        raise ConfigError(f"--context {context} is not a number of tokens from 2 on; write for example 128K or 1M")
    told = explicit_settings(None, overrides)
    for name in told - {*SETTINGS, "train.accumulate", "attention.kernel"} - ADAPTER:
        if name in OPTIONS:
            raise ConfigError(f"--set {name} has its own option here; use {OPTIONS[name]}")
        if not any_setting:
            raise ConfigError(f"{name} is not decided by a plan; use one of {', '.join(SETTINGS)}")
    config = load_config(None, [*overrides, f"data.context={num_tokens}", f"train.batch={batch}"])
    if (kernel := config.attention.kernel) != "auto":
        if kernel not in (known := hardware.gpu.kernels or tuple(H200_ATTENTION)):
            rule = f"has no known rate on {hardware.gpu.name}"
            raise ConfigError(f"attention.kernel={kernel} {rule}; use {format_choices(('auto', *known))}")
        hardware = hardware.with_kernel(kernel)
    hf_config = find_config(model)
    shape = shape_from_config(hf_config, model).with_adapter(config.adapter)
    space = search.make_search_space(config, told, shape, hardware)
    return PlanRequest(model, hf_config, space, config, frozenset(told), search.work_from_config(config))


def answer_request(q: PlanRequest, max_context: bool, steps: int | None, as_json: bool) -> tuple[str, bool]:
    """(the answer, whether it fits). With `max_context` the plan is the one at the longest context."""
    context, limited_by = q.space.longest(q.work.batch) if max_context else (0, "")
    plan = q.plan(context)
    rope = q.missing_rope(plan.work.context)
    if as_json:
        values = as_dict(plan, q.model, steps) | ({"max_context": context} if max_context else {})
        values |= {"missing_rope": rope} if rope else {}
        values["limited_by"] = limited_by or (plan.limited_by if plan.fits else q.space.longest(q.work.batch)[1])
        return json.dumps(values, indent=2), plan.fits
    text = as_text(plan, q.model, steps, _rope_line(q, rope) if rope else "")
    if max_context and context:
        where = f"{q.model} on {plan.hardware.name}"
        headline = f"Longest context of {where}: {format_tokens(context)} tokens ({context}), limited by {limited_by}."
        text = f"{headline}\n\n{text}"
    return text, plan.fits


def _rope_line(q: PlanRequest, rope: Mapping[str, Any]) -> str:
    positions = format_tokens(max_positions(q.hf_config))
    return f"{q.model} has {positions} positions: training needs model.rope={format_value(rope)}"


# ---- JSON and YAML


def as_dict(plan: Plan, model: str, steps: int | None = None) -> dict[str, Any]:
    """gpu_*: per GPU. host_*, disk_*: per node. Peaks leave the reserve out, which stands beside them."""
    ledger = plan.ledger
    reserves = {"GPU": ledger.gpu["reserve"], "host": ledger.host["reserve"]}
    run = {"steps": steps, "hours": steps * plan.step_s / 3600, "tokens": steps * plan.tokens_per_step} if steps else {}
    return {
        "model": model,
        "fits": plan.fits,
        "context": plan.work.context,
        "batch": plan.work.batch,
        "gpus": plan.hardware.name,
        "kernel": plan.hardware.gpu.kernel or None,
        "settings": plan.settings,
        "reasons": _reasons(plan),
        **({"choice": _choice(plan)} if plan.fits else {"ways_out": _ways_out(plan)}),
        "step_s": plan.step_s,
        "tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu,
        "sequences_per_step": plan.sequences_per_step,
        "tokens_per_step": plan.tokens_per_step,
        **run,
        **({"adapter": _adapter(plan)} if plan.shape.adapter else {}),
        **{f"{tier.lower()}_peak_bytes": need - reserves.get(tier, 0) for tier, (need, _) in ledger.tiers.items()},
        **{f"{tier.lower()}_reserve_bytes": held for tier, held in reserves.items()},
        **{f"{tier.lower()}_bytes": have for tier, (_, have) in ledger.tiers.items()},
        "peak_phase": ledger.phase,
        "gpu_holders": ledger.gpu,
        "host_holders": ledger.host,
        "disk_holders": ledger.disk,
        "seconds": vars(plan.seconds),
        "assumed": list_assumptions(plan),
    }


def as_yaml(q: PlanRequest, plan: Plan, steps: int | None = None) -> str:
    """A complete configuration for `ithaka train`: the plan, the user's settings, and lines to uncomment and edit."""
    local = Path(q.model).expanduser()
    weights = None if local.exists() else hub_id(q.model)
    config, tree = to_dict(q.config), dict[str, dict[str, Any]]()
    chosen: dict[str, Any] = {"model.path": weights or q.model, "data.context": plan.work.context}
    chosen |= {name: config[name.split(".")[0]][name.split(".")[1]] for name in sorted(q.given)} | plan.settings
    chosen |= {"train.batch": plan.work.batch, **({"train.steps": steps} if steps else {})}
    for name, value in chosen.items():
        section, key = name.split(".")
        tree.setdefault(section, {})[key] = value
    lines = [f"# {_headline(plan, q.model)}"]
    if weights:
        lines.append(f"# The weights: hf download {weights} --local-dir {weights}")
    elif local.is_dir() and not any(local.glob("*.safetensors")):
        lines.append(f"# {q.model} has no *.safetensors; with {local / 'config.json'}, weights are random.")
    lines.append("# Uncomment what you need, and edit it in place: a section may appear only once.")
    hints = {name: hint for name, hint in TO_FILL_IN.items() if name not in chosen}
    if "train.steps" in chosen:
        hints.pop("train.epochs", None)
    if rope := q.missing_rope(plan.work.context):
        positions = format_tokens(max_positions(q.hf_config))
        hints["model.rope"] = format_value(rope), f"needed: the model has {positions} positions; see docs/extend.md"
    for section in SECTIONS:
        own = [(name.split(".")[1], *hint) for name, hint in hints.items() if name.startswith(f"{section}.")]
        if section in tree or own:
            values = yaml.safe_dump({section: tree[section]}, sort_keys=False) if section in tree else f"{section}:\n"
            lines += [values.rstrip(), *(f"{f'  # {key}: {value}':<36}# {why}" for key, value, why in own)]
    return "\n".join(lines) + "\n"


# ---- text


def as_text(plan: Plan, model: str, steps: int | None = None, note: str = "") -> str:
    """Whether it fits, a note, settings and reasons, memory, time, other plans, assumptions."""
    lines = [_headline(plan, model), *[note] * bool(note)]
    if not plan.fits:
        lines.append(_way_out(plan))
    elif steps:
        count = steps * plan.tokens_per_step
        lines.append(f"{steps} steps: {format_duration(steps * plan.step_s)}, {count / 1e9:.4g} billion tokens")
    if plan.shape.adapter:
        lines.append(_adapter_line(plan))
    settings = {name: format_value(value) for name, value in plan.settings.items()}
    width = max(6, *map(len, settings.values()))
    rows = [f"  {name:<24}  {settings[name]:>{width}}   {why}" for name, why in _reasons(plan).items()]
    others = _others(plan) if plan.others else ()
    assumptions = [f"  {name:<11}  {text}" for name, text in list_assumptions(plan).items()]
    return "\n".join([*lines, "", *rows, "", *_costs(plan), *others, "", "Assumed", *assumptions])


def _headline(plan: Plan, model: str) -> str:
    batch = f"{plan.work.batch} x " if plan.work.batch > 1 else ""
    what = f"{model}, {batch}{format_tokens(plan.work.context)} tokens, {plan.hardware.name}"
    if plan.fits:
        speed = f"{format_rate(plan.tokens_per_s_per_gpu)} tok/s per GPU, {format_duration(plan.step_s)} per step"
        return f"{what}: fits, {speed} (most of it {plan.limited_by})"
    lacks = [
        f"{need / have:.2f} times the {name} there is"
        if have
        else f"{format_bytes(need)} of {name}, and there is none ({way})"
        for (name, way), (need, have) in zip(TIER_WORDS.values(), plan.ledger.tiers.values(), strict=True)
        if need > have
    ]
    return f"{what}: does not fit. The nearest plan needs {' and '.join(lacks)}."


def _adapter(plan: Plan) -> dict[str, int | float]:
    """What is trained, and what freezing the rest saves with the same settings."""
    shape, whole = plan.shape, replace(plan, shape=plan.shape.with_adapter(None))
    return {
        "rank": shape.adapter.rank if shape.adapter else 0,
        "trained_parameters": shape.num_trained,
        "frozen_parameters": shape.shards(1)[1],
        "saved_gpu_bytes": whole.ledger.gpu_peak - plan.ledger.gpu_peak,
        "saved_host_bytes": whole.ledger.host_needed - plan.ledger.host_needed,
        "saved_step_s": whole.step_s - plan.step_s,
    }


def _adapter_line(plan: Plan) -> str:
    rank, trained, frozen, gpu_bytes, host_bytes, step_s = _adapter(plan).values()
    what = f"adapters of rank {rank}: {trained / 1e6:.4g}M parameters trained, {frozen / 1e9:.4g}B frozen"
    on_host = f", {format_bytes(host_bytes)} of host memory" if host_bytes else ""
    time = f", {format_duration(step_s)} per step" if step_s > 0 else f" and costs {format_duration(-step_s)} per step"
    return f"{what}; that saves {format_bytes(gpu_bytes)} per GPU{on_host}{time}"


def _ways_out(plan: Plan) -> dict[str, str]:
    """What makes the plan fit, by option: each was found by search, and is enough alone."""
    ways = search.SearchSpace(plan.shape, plan.hardware, plan.given).ways_to_fit(plan.work)
    found = {"--context": f"{ways.context} ({format_tokens(ways.context)})"} if ways.context else {}
    found |= {"--adapter": str(ADAPTER_RANK)} if ways.adapter else {}
    found |= {"--gpus": f"{ways.hardware.name} ({ways.hardware.num_gpus} GPUs)"} if ways.hardware else {}
    amounts = {"--host-memory": ways.host_bytes, "--disk": ways.disk_bytes}
    found |= {option: f"{num_bytes // 10**9}GB" for option, num_bytes in amounts.items() if num_bytes}
    free = plan.given and search.SearchSpace(plan.shape, plan.hardware).fits(plan.work)
    return found | ({"--set": "left out"} if free else {})


def _way_out(plan: Plan) -> str:
    ways = format_choices(f"{option} {value}" for option, value in _ways_out(plan).items())
    return f"It fits with {ways}." if ways else "No shorter context and no number of these GPUs fits: use larger GPUs."


def _reasons(plan: Plan) -> dict[str, str]:
    """Per setting what it does here, and why it was chosen; "as given" where the user decided."""
    layout, shape, batch = plan.layout, plan.shape, _sequences(plan.work.batch)
    cp, ulysses, width = layout.cp, layout.ulysses, layout.heads_per_stage or shape.heads
    s = plan.work.local_tokens(cp)
    shared = f"{cp} of {plan.hardware.num_gpus} GPUs share {batch}" if cp > 1 else f"every GPU has {batch} of its own"
    step = f"{_sequences(plan.sequences_per_step)}, {format_tokens(plan.tokens_per_step)} tokens per step"
    stage = "all heads at once" + " (plain Ulysses)" * (ulysses > 1)
    if width < shape.heads:
        stage = (
            f"{width // ulysses} per GPU at a time{_instead(plan, 'more', heads_per_stage=min(2 * width, shape.heads))}"
        )
    inputs = format_bytes((shape.num_layers - shape.first_trained) * layout.x_bytes(shape.hidden, s))
    outputs = format_bytes(kept_attention_bytes(shape, layout, s) * layout.keep_attention)
    reasons = {"parallel.cp": f"{shared}: {step}"}
    if layout.ring > 1:
        reasons["parallel.ring"] = f"k and v go round {layout.ring} groups of {ulysses} GPUs{_why_ring(plan)}"
    if layout.replicas > 1:
        sharers = plan.hardware.num_gpus // layout.replicas
        why = _instead(plan, "sharding over all", replicas=1)
        reasons["parallel.replicas"] = f"parameters are sharded over {sharers} GPUs and replicated{why}"
    reasons["parallel.heads_per_stage"] = stage
    reasons["memory.tile_tokens"] = "tokens per tile of norms, projections and MLP"
    reasons["memory.offload"] = f"layer inputs ({inputs} per GPU) are kept {PLACES[layout.input_tier]}"
    reasons["memory.keep_attention"] = _keep_reason(plan, "keep_attention")
    if layout.keep_attention:
        where = PLACES[layout.attention_tier]
        reasons["memory.attention_offload"] = f"attention's outputs ({outputs} per GPU) are kept {where}"
        reasons["memory.keep_projections"] = _keep_reason(plan, "keep_projections")
    if layout.keep_projections:
        reasons["memory.checkpoint"] = _keep_reason(plan, "keep_everything")
    exchanges = "exchanges run under attention; " * (cp > 1)
    reasons["memory.overlap"] = f"{exchanges}in backward a layer's input comes once and stays"
    if not layout.overlap:
        reasons["memory.overlap"] = f"one stage's tensors at a time{_instead(plan, 'overlap', overlap=True)}"
    where = PLACES["host" if layout.offload_optimizer else "device"]
    reasons["memory.offload_optimizer"] = f"parameters, gradients and AdamW's state are kept {where}"
    return {name: f"{why} (as given)" if SETTINGS[name] in plan.given else why for name, why in reasons.items()}


def _why_ring(plan: Plan) -> str:
    cp, heads, width = plan.layout.cp, plan.shape.heads, plan.layout.heads_per_stage
    if cp > heads:
        return f": the model has only {heads} query heads to exchange"
    if cp > plan.hardware.gpus_per_node:
        return ": groups that exchange tokens for heads stay inside a node"
    stage = None if width is None else min(-(-width // cp) * cp, heads)
    return _instead(plan, f"exchanging tokens for heads over {cp}", ring=1, heads_per_stage=stage)


def _sequences(count: int) -> str:
    return "one sequence" if count == 1 else f"{count} sequences"


def _keep_reason(plan: Plan, level: str) -> str:
    """What a level saves beyond those below it."""
    kept, (what, again) = getattr(plan.layout, level), LEVELS[level]
    if not kept:
        return f"backward {again}{_instead(plan, 'keeping it', **{level: 1})}"
    above = dict.fromkeys([*LEVELS][[*LEVELS].index(level) + 1 :], 0)
    saved_s = plan.with_changes(**above, **{level: 0}).step_s - plan.with_changes(**above).step_s
    effect = f"{'saves' if saved_s >= 0 else 'costs'} {format_duration(abs(saved_s))} per step"
    b = LayerBytes(plan.shape, plan.layout, plan.work.local_tokens(plan.layout.cp), EVERYTHING)
    num_bytes = {"keep_projections": b.qkv + b.residual, "keep_everything": b.gate_up}.get(level, 0)
    held = f" ({format_bytes(kept * num_bytes)} more)" if num_bytes else ""
    return f"{kept} of {plan.shape.num_layers} layers keep {what}{held}: {effect}"


def _instead(plan: Plan, words: str, **change: Any) -> str:
    """Why the search did not choose `change`, which `words` names; nothing where it did not decide."""
    other = plan.with_changes(**change)
    if not plan.fits or change.keys() & plan.given.keys() or (other.fits and other.step_s <= plan.step_s):
        return ""
    return f": {words} would be slower" if other.fits else f": {words}, with the rest as it is, does not fit"


def _costs(plan: Plan) -> Iterator[str]:
    """Memory by tier and holder, and time."""
    ledger = plan.ledger
    tiers = {
        f"GPU memory, each (highest in: {ledger.phase})": (ledger.gpu, ledger.gpu_bytes),
        "Host memory, per node": (ledger.host, ledger.host_bytes),
        "Disk, per node": (ledger.disk, ledger.disk_bytes),
    }
    for title, (holders, have) in tiers.items():
        if need := sum(holders.values()):
            yield f"{title}: {need / GIB:.1f} of {have / GIB:.1f} GiB"
            yield from _wrapped(f"{name} {held / GIB:.1f}" for name, held in holders.items() if held >= GIB / 20)
    yield f"Time per step: {format_duration(plan.step_s)}"
    yield from _wrapped(
        f"{name} {format_duration(s)} ({s / plan.step_s:.1%})" for name, s in vars(plan.seconds).items()
    )


def _others(plan: Plan) -> Iterator[str]:
    """A table of the plan and the best of other kinds, fastest first; an arrow marks the plan."""
    yield from ("", f"This plan (>) and others, fastest first: {_choice(plan)}", f"  {'  '.join(COLUMNS)}")
    for other in _ranked(plan):
        layout, ledger = other.layout, other.ledger
        kept = f"{layout.keep_attention} on {layout.attention_tier}" if layout.keep_attention else "none"
        where = (layout.input_tier, kept, "host" if layout.offload_optimizer else "device")
        figures = (
            format_rate(other.tokens_per_s_per_gpu),
            f"{ledger.gpu_peak / GIB:.1f}",
            f"{ledger.host_peak / GIB:.0f}",
        )
        split = layout.cp if layout.ring == 1 else f"{layout.ulysses}x{layout.ring}"
        cells = (split, other.settings["parallel.heads_per_stage"], *where, *figures)
        row = "".join(f"  {cell:>{len(title)}}" for title, cell in zip(COLUMNS, cells, strict=True))
        yield f"> {row[2:]}" if other is plan else row


def _ranked(plan: Plan) -> list[Plan]:
    return sorted((plan, *plan.others), key=lambda each: -each.tokens_per_s_per_gpu)


def _choice(plan: Plan) -> str:
    """Why this plan."""
    fastest = _ranked(plan)[0]
    if fastest is plan:
        return "the fastest that fits"
    slower = 1 - plan.tokens_per_s_per_gpu / fastest.tokens_per_s_per_gpu
    disk, host = (getattr(fastest.ledger, name) - getattr(plan.ledger, name) for name in ("disk_peak", "host_needed"))
    saved = f"{format_bytes(disk)} less disk" if disk else f"{format_bytes(host)} less host memory"
    return f"{slower:.1%} slower than the fastest that fits, with {saved} per node"


def _wrapped(parts: Iterator[str]) -> list[str]:
    whole = ", ".join(part.replace(" ", "\0") for part in parts)  # a name and its figure stay on one line
    lines = textwrap.wrap(whole, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return [line.replace("\0", " ") for line in lines]


def list_assumptions(plan: Plan) -> dict[str, str]:
    """What the plan assumes, because nobody measured or gave it."""
    gpu, hardware = plan.hardware.gpu, plan.hardware
    found = {
        "host memory": f"{hardware.host_bytes / 1e9:.0f} GB per node; give yours with --host-memory",
        "attention": _attention(plan),
        "links": f"{gpu.link_bytes_s / 1e9:.0f} GB/s per GPU inside a node, "
        f"{gpu.network_bytes_s / 1e9:.3g} GB/s between nodes",
        "disk": f"{DISK_BYTES_S / 1e9:.0f} GB/s per node",
        "reserve": f"{RESERVE_BYTES / GIB:.0f} GiB + {RESERVE_SHARE:.0%} of each GPU (context, workspaces, "
        f"fragmentation), {HOST_PROCESS_BYTES / 1e9:.0f} GB per GPU + {HOST_RESERVE_SHARE:.0%} of a node's host memory",
        "rates": f"of {gpu.name}: {gpu.source}",
        "data": "one document per sequence; shorter ones, packed, take less attention",
    }
    known = {"host memory": not hardware.assumed_host, "disk": not hardware.disk_bytes}
    known["attention"] = gpu.kernel not in KERNEL_NAMES
    return {name: text for name, text in found.items() if not known.get(name)}


def _attention(plan: Plan) -> str:
    """The kernel, and how fast the plan would be with and without FlashAttention 4."""
    gpu = plan.hardware.gpu
    name, other = KERNEL_NAMES.get(gpu.kernel, gpu.kernel), "cudnn" if gpu.kernel == "fa4" else "fa4"
    if "fa4" not in gpu.kernels:
        return name
    changed = replace(plan, hardware=plan.hardware.with_kernel(other))
    speed = f"{format_rate(changed.tokens_per_s_per_gpu)} tok/s per GPU"
    if other == "fa4":
        return f"{name}; FlashAttention 4 ({FA4_PACKAGE}) gives {speed}"
    return f"{name} ({FA4_PACKAGE}); without it, {KERNEL_NAMES[other]} gives {speed}"


# ---- numbers for people


def format_tokens(count: int) -> str:
    return f"{count / 2**20:.4g}M" if count >= 2**20 else f"{count / 2**10:.4g}K" if count >= 2**10 else str(count)


def format_rate(per_second: float) -> str:
    """Four digits, or all before the point where there are more."""
    return f"{per_second:.4g}" if per_second < 1000 else f"{per_second:.0f}"


def format_bytes(num_bytes: float) -> str:
    """Four digits at most, in the largest unit that there is one of; 2228224 -> '2.125 MiB'."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes:.0f} B"


def format_duration(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"
