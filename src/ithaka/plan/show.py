"""What `ithaka plan` answers: plans as text, JSON, YAML and a plot."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import yaml

from ithaka.config import Config, ConfigError, given, load, parse_count, to_dict
from ithaka.layout import SETTINGS
from ithaka.plan import search
from ithaka.plan.bytes import (
    HOST_PROCESS_BYTES,
    HOST_RESERVE_SHARE,
    RESERVE_BYTES,
    RESERVE_SHARE,
    kept_attention_bytes,
)
from ithaka.plan.hardware import GIB, HOST_BYTES_PER_GPU, Hardware
from ithaka.plan.heads import slots_of
from ithaka.plan.models import find_shape, hub_id
from ithaka.plan.search import Fixed, Plan, Trial
from ithaka.plan.shape import ModelShape, Work

WIDTH = 110
BAR = 46
# A letter per holder, so that a bar can be read without colours.
LETTERS = {
    "parameters": "P", "gradients": "G", "optimizer": "O", "layer weights": "W", "residual stream": "X",
    "stage buffers": "S", "tiles": "t", "kept activations": "K", "loss tile": "L", "layer inputs": "X",
    "kept attention": "K", "on the way to disk": "d", "parameters, gradients, optimizer": "O", "reserve": "r",
}  # fmt: skip
# Settings that `ithaka plan` has options for.
OPTIONS = {"model.path": "the argument MODEL", "data.context": "--context", "train.batch": "--batch",
           "train.steps": "--steps"}  # fmt: skip
PLACES = {"device": "on the device", "host": "in host memory", "disk": "on disk"}


# ---- questions


@dataclass(frozen=True)
class Question:
    """A model on a machine. `config`: what the command was told; `given`: the names (parallel.cp) of what it set."""

    model: str
    shape: ModelShape
    hardware: Hardware
    config: Config
    given: frozenset[str]

    @cached_property
    def fixed(self) -> Fixed:
        return search.fixed_of(self.config, self.given, self.shape, self.hardware)

    @cached_property
    def work(self) -> Work:
        return search.work_of(self.config)

    def plan(self) -> Plan:
        return search.choose(self.shape, self.hardware, self.work, self.fixed)


def question(
    model: str, hardware: Hardware, context: str, batch: int, overrides: Sequence[str], any_setting: bool = False
) -> Question:
    """`overrides`: settings as for training, section.key=value; `any_setting`: also those that change no plan."""
    num_tokens = parse_count(context)
    if re.fullmatch(r"-\s*\d+|[01]", context.strip()):
        raise ConfigError(f"--context {context} is too short; use at least 2 tokens")
    if num_tokens is None or num_tokens < 2:
        raise ConfigError(f"--context {context} is not a number of tokens; write for example 131072, 128K or 1M")
    told = given(None, overrides)
    for name in told - {*SETTINGS, "train.accumulate"}:
        if name in OPTIONS:
            raise ConfigError(f"--set {name} is given otherwise here; use {OPTIONS[name]}")
        if not any_setting:
            raise ConfigError(f"{name} is not decided by a plan; use one of {', '.join(SETTINGS)}")
    config = load(None, [*overrides, f"data.context={num_tokens}", f"train.batch={batch}"])
    return Question(model, find_shape(model), hardware, config, frozenset(told))


def plan_answer(q: Question, max_context: bool, steps: int | None, as_json: bool) -> tuple[str, bool]:
    """(the answer, whether it fits). With `max_context` the plan is the one at the longest context."""
    reach, work = {}, q.work
    if max_context:
        context, limited_by = search.longest(q.shape, q.hardware, q.fixed, q.work.batch)
        reach, work = {"limited_by": limited_by, "max_context": context}, replace(work, context=context or work.context)
    plan = search.choose(q.shape, q.hardware, work, q.fixed)
    if as_json:
        if not plan.fits and not max_context:
            reach = {"limited_by": search.longest(q.shape, q.hardware, q.fixed, q.work.batch)[1]}
        return json.dumps(as_dict(plan, q.model, steps) | reach, indent=2), plan.fits
    first = [_longest_line(plan, q.model, context, limited_by), ""] if max_context else []
    return "\n".join([*first, as_text(plan, q.model, steps)]), plan.fits


def ladder_answer(q: Question, as_json: bool) -> str:
    rungs = search.ladder(q.shape, q.hardware, q.work)
    return _trials_json(rungs, q.model, "name") if as_json else ladder_text(rungs, q.model)


def sweep_answer(q: Question, setting: str, plot: Path | None, as_json: bool) -> str:
    if setting != "heads_per_stage":
        raise ConfigError(f"--sweep {setting} is not possible; use heads_per_stage")
    if setting in q.fixed:
        told = f"parallel.{setting}={q.fixed[setting] or 'all'}"
        raise ConfigError(f"--sweep {setting} tries every value, and {told} is given; leave one out")
    points = search.sweep_heads(q.shape, q.hardware, q.work, q.fixed)
    if plot is not None:
        plot.write_text(sweep_svg(points, q.model), encoding="utf-8")
    return _trials_json(points, q.model, setting) if as_json else sweep_text(points, q.model)


def _trials_json(trials: Sequence[Trial], model: str, key: str) -> str:
    names = [int(t.name) if t.name.isdigit() else t.name for t in trials]
    rows = zip(names, trials, strict=True)
    return json.dumps([{key: n, "max_context": t.max_context, **as_dict(t.plan, model)} for n, t in rows], indent=2)


# ---- JSON


def as_dict(plan: Plan, model: str, steps: int | None = None) -> dict[str, Any]:
    """gpu_*: per GPU. host_*, disk_*: per node. Peaks leave the reserve out, which stands beside them."""
    ledger = plan.ledger
    run = {"steps": steps, "hours": steps * plan.step_s / 3600, "tokens": steps * plan.tokens_per_step} if steps else {}
    return {
        "model": model,
        "fits": plan.fits,
        "context": plan.work.context,
        "batch": plan.work.batch,
        "gpus": plan.hardware.name,
        **_short(plan),
        "reasons": _reasons(plan),
        "gpu_reserve_bytes": ledger.gpu["reserve"],
        "gpu_bytes": ledger.gpu_bytes,
        "host_reserve_bytes": ledger.host["reserve"],
        "host_bytes": ledger.host_bytes,
        "disk_peak_bytes": ledger.disk_peak,
        "disk_bytes": ledger.disk_bytes,
        "sequences_per_step": plan.sequences_per_step,
        "tokens_per_step": plan.tokens_per_step,
        **run,
        "limited_by": plan.limited_by,
        "peak_phase": ledger.phase,
        "gpu_holders": ledger.gpu,
        "host_holders": ledger.host,
        "disk_holders": ledger.disk,
        "seconds": vars(plan.seconds),
        "assumed": assumed(plan),
        "runners_up": [_short(other) for other in plan.runners_up],
    }


def _short(plan: Plan) -> dict[str, Any]:
    return {
        "settings": plan.settings,
        "step_s": plan.step_s,
        "tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu,
        "gpu_peak_bytes": plan.ledger.gpu_peak - plan.ledger.gpu["reserve"],
        "host_peak_bytes": plan.ledger.host_peak - plan.ledger.host["reserve"],
    }


# ---- YAML


def as_yaml(q: Question, plan: Plan, steps: int | None = None) -> str:
    """A configuration for `ithaka train` with every setting of the plan, and what else the user gave."""
    weights = None if Path(q.model).exists() else hub_id(q.model)
    config, tree = to_dict(q.config), dict[str, dict[str, Any]]()
    chosen: dict[str, Any] = {"model.path": weights or q.model, "data.path": None, "data.context": plan.work.context}
    chosen |= {name: config[name.split(".")[0]][name.split(".")[1]] for name in sorted(q.given)} | plan.settings
    chosen |= {"train.batch": plan.work.batch, **({"train.steps": steps} if steps else {})}
    for name, value in chosen.items():
        section, key = name.split(".")
        tree.setdefault(section, {})[key] = value
    lines = [f"# {_headline(plan, q.model)}"]
    if weights:
        lines.append(f"# The weights: hf download {weights} --local-dir {weights}")
    if "data.path" not in q.given:
        lines.append("# data.path: your documents; null trains on Python's own sources.")
    return "\n".join([*lines, yaml.safe_dump(tree, sort_keys=False)])


# ---- text


def as_text(plan: Plan, model: str, steps: int | None = None) -> str:
    """The whole answer: does it fit, settings and reasons, memory, time, other plans."""
    lines = [_headline(plan, model)]
    if not plan.fits:
        lines.append(_way_out(plan))
    if steps and plan.fits:
        count = steps * plan.tokens_per_step
        in_words = f"{count / 1e9:.4g} billion" if count >= 1e9 else f"{count / 1e6:.4g} million"
        lines.append(f"{steps} steps: {duration(steps * plan.step_s)}, {in_words} tokens")
    lines += ["", *_settings_lines(plan), "", *_memory_lines(plan), "", *_time_lines(plan)]
    if plan.runners_up:
        lines += ["", "This plan and others", *_runner_lines(plan)]
    return "\n".join([*lines, "", "Assumed", *_columns(assumed(plan).items())])


def _longest_line(plan: Plan, model: str, context: int, limited_by: str) -> str:
    if context == 0:
        return f"No context of {model} fits on {plan.hardware.name}: {limited_by} memory is too small."
    where = f"{model} on {plan.hardware.name}"
    return f"Longest context of {where}: {tokens(context)} tokens ({context}), limited by {limited_by}."


def _headline(plan: Plan, model: str) -> str:
    batch = f"{plan.work.batch} x " if plan.work.batch > 1 else ""
    what = f"{model}, {batch}{tokens(plan.work.context)} tokens, {plan.hardware.name}"
    if plan.fits:
        speed = f"{rate(plan.tokens_per_s_per_gpu)} tok/s per GPU, {duration(plan.step_s)} per step"
        return f"{what}: fits, {speed} (most of it {plan.limited_by})"
    return f"{what}: does not fit. The nearest plan needs {_excess(plan)}."


def _excess(plan: Plan) -> str:
    """Every tier that is too small."""
    ledger = plan.ledger
    if ledger.disk_peak and not ledger.disk_bytes:
        return f"{gib(ledger.disk_peak)} of disk, and there is none (--disk 10TB)"
    if not ledger.host_bytes:
        return f"{gib(ledger.host_peak)} of host memory, and there is none (--host-memory 2TB)"
    words = {"GPU": "GPU memory", "host": "host memory", "disk": "disk"}
    over = {words[tier]: share for tier, share in ledger.excess().items() if share > 1}
    return " and ".join(f"{share:.2f} times the {tier} there is" for tier, share in over.items())


def _way_out(plan: Plan) -> str:
    """The longest context, and what lets more fit, found by trial; more GPUs come as more nodes."""
    shape, hardware, given, batch = plan.shape, plan.hardware, plan.given, plan.work.batch
    context = search.longest_context(shape, hardware, given, batch)
    words = {"host": "more host memory", "disk": "more disk" if hardware.disk_bytes else "a disk (--disk 10TB)"}
    ways = [words[tier] for tier in search.ways_further(shape, hardware, given, batch, context)]
    if search.longest_context(shape, replace(hardware, num_nodes=2 * hardware.num_nodes), given, batch) > context:
        ways.append("more GPUs")
    more = ", or ".join(ways) or "GPUs with more memory"
    if not context:
        return f"No context fits with these settings: it takes {more}."
    return f"The longest context that fits is {tokens(context)} ({context}); for more, {more}."


def _settings_lines(plan: Plan) -> list[str]:
    reasons, settings = _reasons(plan), plan.settings
    width = max(len(name) for name in reasons)
    return [f"  {name.ljust(width)}  {_plain(settings[name]):>6}   {why}" for name, why in reasons.items()]


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _reasons(plan: Plan) -> dict[str, str]:
    """Per setting what it does here, and why it was chosen; "as given" where the user decided."""
    layout, shape = plan.layout, plan.shape
    s = plan.work.local_tokens(layout.cp)
    reasons = {
        "parallel.cp": _cp_reason(plan),
        "parallel.heads_per_stage": _stage_reason(plan),
        "memory.tile_tokens": "tokens per tile of norms, projections and MLP",
    }
    if layout.checkpoint:
        inputs = gib(shape.num_layers * layout.x_bytes(shape.hidden, s))
        reasons["memory.offload"] = f"layer inputs ({inputs} per GPU) are kept {PLACES[layout.input_tier]}"
        reasons["memory.keep_attention"] = _keep_reason(plan)
        if layout.keep_attention:
            outputs = gib(kept_attention_bytes(shape, layout, s) * layout.keep_attention)
            where = PLACES[layout.attention_tier]
            reasons["memory.attention_offload"] = f"attention's outputs ({outputs} per GPU) are kept {where}"
        reasons["memory.overlap"] = _overlap_reason(plan)
    else:
        reasons["memory.checkpoint"] = "everything is kept, nothing computed again"
    where = "host" if layout.offload_optimizer else "device"
    reasons["memory.offload_optimizer"] = f"parameters, gradients and AdamW's state are kept on the {where}"
    return {name: f"{why} (as given)" if SETTINGS[name] in plan.given else why for name, why in reasons.items()}


def _cp_reason(plan: Plan) -> str:
    cp, batch, num_gpus = plan.layout.cp, plan.work.batch, plan.hardware.num_gpus
    step = f"{_sequences(plan.sequences_per_step)}, {tokens(plan.tokens_per_step)} tokens per step"
    if cp == 1:
        return f"every GPU has {_sequences(batch)} of its own: {step}"
    return f"{cp} of {num_gpus} GPUs share {'a sequence' if batch == 1 else _sequences(batch)}: {step}"


def _sequences(count: int) -> str:
    return "one sequence" if count == 1 else f"{count} sequences"


def _changed(plan: Plan, **changes: Any) -> Plan:
    return search.evaluate(plan.shape, plan.layout.but(**changes), plan.hardware, plan.work)


def _decided(plan: Plan, field: str) -> bool:
    """Whether the search decided it, in favour of something: where nothing fits, there is no reason to give."""
    return plan.fits and field not in plan.given


def _stage_reason(plan: Plan) -> str:
    layout, heads = plan.layout, plan.shape.heads
    width = layout.heads_per_stage or heads
    if width >= heads:
        return "all heads at once" + (" (plain Ulysses)" if layout.cp > 1 else "")
    what = f"{width // layout.cp} per GPU at a time"
    if not _decided(plan, "heads_per_stage"):
        return what
    wider = _changed(plan, heads_per_stage=min(2 * width, heads))
    if not wider.fits:
        return f"{what}: more, with the rest as it is, does not fit"
    return f"{what}: more at once would be slower" if wider.step_s > plan.step_s else what


def _keep_reason(plan: Plan) -> str:
    layout = plan.layout
    if not layout.keep_attention:
        again = "backward computes attention's output again"
        return f"{again}: no room to keep it" if _decided(plan, "keep_attention") else again
    saved_s = _changed(plan, keep_attention=0).step_s - plan.step_s
    effect = f"{'saves' if saved_s >= 0 else 'costs'} {duration(abs(saved_s))} per step"
    return f"{layout.keep_attention} of {plan.shape.num_layers} layers keep attention's output: {effect}"


def _overlap_reason(plan: Plan) -> str:
    layout = plan.layout
    if layout.overlap and (layout.cp == 1 or len(slots_of(plan.shape, layout).stages) == 1):
        return "in backward a layer's input comes to the device once and stays"
    if layout.overlap:
        return "the next stage's exchange runs under this stage's attention"
    what = "one stage's tensors at a time"
    if not _decided(plan, "overlap"):
        return what
    if not _changed(plan, overlap=True).fits:
        return f"{what}: overlap, with the rest as it is, does not fit"
    return f"{what}: overlap costs more than it hides"


def _memory_lines(plan: Plan) -> list[str]:
    ledger = plan.ledger
    lines = _tier_lines(f"GPU memory, each (highest in: {ledger.phase})", ledger.gpu, ledger.gpu_bytes)
    lines += _tier_lines("Host memory, per node", ledger.host, ledger.host_bytes)
    if ledger.disk_peak:
        lines += _tier_lines("Disk, per node", ledger.disk, ledger.disk_bytes)
    return lines


def _tier_lines(title: str, holders: dict[str, int], have: int) -> list[str]:
    need, end, bar = sum(holders.values()), 0, ""
    shown = {name: held for name, held in holders.items() if held >= have / 1000 or held >= GIB // 4}
    for name, held in shown.items():
        end += held
        bar += LETTERS[name] * (round(end / max(have, need, 1) * BAR) - len(bar))
    legend = ", ".join(f"{LETTERS[name]} {name} {held / GIB:.1f}" for name, held in shown.items())
    lines = [f"{title}: {need / GIB:.1f} of {have / GIB:.1f} GiB", f"  [{bar[:BAR].ljust(BAR, '.')}]"]
    return [*lines, *_wrapped(legend)]


def _wrapped(text: str) -> list[str]:
    lines = [""]
    for part in text.split(", "):
        if len(lines[-1]) + len(part) > WIDTH - 6:
            lines.append("")
        lines[-1] += (", " if lines[-1] else "") + part
    return ["   " + line for line in lines]


def _time_lines(plan: Plan) -> list[str]:
    parts = vars(plan.seconds).items()
    split = ", ".join(f"{name} {duration(s)} ({s / plan.step_s:.1%})" for name, s in parts)
    return [f"Time per step: {duration(plan.step_s)}", *_wrapped(split)]


def _runner_lines(plan: Plan) -> list[str]:
    rows = [("cp", "heads/stage", "inputs", "attention kept", "optimizer", "tok/s/GPU", "GPU GiB", "host GiB")]
    for other in (plan, *plan.runners_up):
        a, ledger = other.layout, other.ledger
        kept = f"{a.keep_attention} on {a.attention_tier}" if a.keep_attention else "none"
        optimizer = "host" if a.offload_optimizer else "device"
        figures = (f"{ledger.gpu_peak / GIB:.1f}", f"{ledger.host_peak / GIB:.0f}")
        width, speed = _plain(other.settings["parallel.heads_per_stage"]), rate(other.tokens_per_s_per_gpu)
        rows.append((str(a.cp), width, a.input_tier, kept, optimizer, speed, *figures))
    return _columns(rows, right=True)


def assumed(plan: Plan) -> dict[str, str]:
    """What the plan takes for granted and nobody measured or gave."""
    gpu, hardware = plan.hardware.gpu, plan.hardware
    links = f"{gpu.link_bytes_s / 1e9:.0f} GB/s per GPU inside a node"
    reserve = f"{RESERVE_BYTES / GIB:.0f} GiB + {RESERVE_SHARE:.0%} of each GPU (context, workspaces, fragmentation)"
    of_host = f"{HOST_PROCESS_BYTES / 1e9:.0f} GB per GPU + {HOST_RESERVE_SHARE:.0%} of a node's host memory"
    found = {
        "host memory": f"{HOST_BYTES_PER_GPU / 1e9:.0f} GB per GPU; give yours with --host-memory",
        "links": f"{links}, {hardware.network_bytes_s / 1e9:.0f} GB/s between nodes",
        "disk": f"{hardware.disk_bytes_s / 1e9:.0f} GB/s per node",
        "reserve": f"{reserve}, {of_host}",
        "rates": f"of {gpu.name}: {gpu.sources.get('attention_forward_flops', 'not stated')}",
        "data": "one document per sequence; shorter ones, packed, take less attention",
    }
    known = {"host memory": not hardware.assumed_host, "disk": not hardware.disk_bytes}
    return {name: text for name, text in found.items() if not known.get(name)}


# ---- tables of plans


def ladder_text(rungs: Sequence[Trial], model: str) -> str:
    plan = rungs[-1].plan
    title = f"What each technique buys: {model} on {plan.hardware.name}"
    return "\n".join([title, *_trial_lines(rungs, "", f"GPU GiB at {tokens(plan.work.context)}")])


def sweep_text(points: Sequence[Trial], model: str) -> str:
    plan, most = points[0].plan, max(p.plan.ledger.gpu_peak for p in points)
    title = f"{model}, {tokens(plan.work.context)} tokens, {plan.hardware.name}, cp={plan.layout.cp}"
    bars = [
        f"{p.name:>5} {'#' * round(BAR * p.plan.ledger.gpu_peak / most):<{BAR}}"
        f" {p.plan.ledger.gpu_peak / GIB:6.1f} GiB {p.plan.tokens_per_s_per_gpu:8.1f} tok/s"
        for p in points
    ]
    return "\n".join([title, *_trial_lines(points, "heads_per_stage", "GPU GiB"), "", *bars])


def _trial_lines(trials: Sequence[Trial], name: str, memory: str) -> list[str]:
    rows = [(name, memory, "fits", "tok/s/GPU", "longest context")]
    for t in trials:
        fits, speed = ("yes", rate(t.plan.tokens_per_s_per_gpu)) if t.plan.fits else (f"no: {t.plan.limited_by}", "-")
        reach = tokens(t.max_context) if t.max_context else "none"
        rows.append((t.name, f"{t.plan.ledger.gpu_peak / GIB:,.1f}", fits, speed, reach))
    return _columns(rows, right=True)


def _columns(rows: Iterable[Sequence[str]], right: bool = False) -> list[str]:
    """Aligned; `right`: all columns but the first."""
    rows = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:{'>' if right and i else '<'}{widths[i]}}" for i, cell in enumerate(row)]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


# ---- plot


def sweep_svg(points: Sequence[Trial], model: str) -> str:
    """GPU memory across, longest context up: one dot per heads_per_stage."""
    width, height, left, top, bottom = 640, 360, 80, 40, 60
    xs = [p.plan.ledger.gpu_peak / GIB for p in points]
    ys = [p.max_context / 2**20 for p in points]
    x_end, y_end = 1.15 * max(xs), 1.15 * max(*ys, 0.001)
    plan = points[0].plan
    title = f"{model} on {plan.hardware.name}: heads_per_stage at {tokens(plan.work.context)} tokens"

    def px(x: float) -> str:
        return f"{left + x / x_end * (width - left - 30):.1f}"

    def py(y: float, below: float = 0) -> str:
        return f"{height - bottom - y / y_end * (height - top - bottom) + below:.1f}"

    def text(x: str | float, y: str | float, words: str, **attributes: str) -> str:
        more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
        return f'<text x="{x}" y="{y}"{more}>{escape(words, quote=False)}</text>'

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(left, 22, title, font_size="14"),
        f'<path d="M{px(0)} {py(y_end)} V{py(0)} H{px(x_end)}" fill="none" stroke="#444"/>',
        *(text(px(x), py(0, below=18), f"{x:.4g}", text_anchor="middle") for x in round_ticks(x_end)),
        *(text(left - 8, py(y, below=4), f"{y:.4g}M", text_anchor="end") for y in round_ticks(y_end)),
        text(px(x_end / 2), height - 16, "GPU memory, GiB", text_anchor="middle"),
        text(left, top, "longest context", text_anchor="end"),
    ]
    for x, y, p in zip(xs, ys, points, strict=True):
        lines.append(f'<circle cx="{px(x)}" cy="{py(y)}" r="5" fill="#1f6feb"/>')
        label = f"{p.name} heads, {rate(p.plan.tokens_per_s_per_gpu)} tok/s"
        lines.append(text(float(px(x)) + 8, py(y, below=-6), label))
    return "\n".join([*lines, "</svg>", ""])


def round_ticks(end: float) -> list[float]:
    """Two to six multiples of 1, 2 or 5 times a power of ten, above 0 and below `end`."""
    power = 10 ** math.floor(math.log10(end / 3))
    step = max(digit * power for digit in (1, 2, 5) if 3 * digit * power < end or digit == 1)
    return [step * i for i in range(1, math.ceil(end / step))]


# ---- numbers for people


def tokens(count: int) -> str:
    for unit, name in ((2**20, "M"), (2**10, "K")):
        if count >= unit:
            return f"{count / unit:.4g}{name}"
    return str(count)


def rate(per_second: float) -> str:
    """Four digits, or all before the point where there are more."""
    return f"{per_second:.4g}" if per_second < 1000 else f"{per_second:.0f}"


def size(num_bytes: float) -> str:
    """Four digits at most, in the largest unit that there is one of; 2228224 -> '2.125 MiB'."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes:.0f} B"


def gib(num_bytes: float) -> str:
    """For columns, and beside them: one unit, so that figures can be compared."""
    return f"{num_bytes / GIB:.1f} GiB"


def duration(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"
