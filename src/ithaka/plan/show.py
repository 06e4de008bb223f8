"""Plans as text, JSON and a plot."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table

from ithaka.layout import SETTINGS
from ithaka.plan.compare import Point, Rung
from ithaka.plan.cost import RESERVE_BYTES, RESERVE_SHARE
from ithaka.plan.hardware import GIB
from ithaka.plan.heads import slots_of
from ithaka.plan.moments import kept_attention_bytes
from ithaka.plan.search import Plan, evaluate, longest_context, ways_further

WIDTH = 110
BAR = 46
# A letter per holder, so that a bar can be read without colours.
LETTERS = {
    "parameters": "P",
    "gradients": "G",
    "optimizer": "O",
    "layer weights": "W",
    "residual stream": "X",
    "stage buffers": "S",
    "tiles": "t",
    "kept activations": "K",
    "loss tile": "L",
    "layer inputs": "X",
    "kept attention": "K",
    "on the way to disk": "d",
    "parameters, gradients, optimizer": "O",
    "reserve": "r",
}
PLACES = {"device": "on the device", "host": "in host memory", "disk": "on disk"}
PARTS = ("attention", "linear", "exchange", "copies", "update")


def as_dict(plan: Plan, model: str, max_context: int | None = None, limited_by: str | None = None) -> dict[str, Any]:
    """gpu_*: per GPU. host_*, disk_*: per node. Peaks leave the reserve out, which stands beside them."""
    ledger = plan.ledger
    result: dict[str, Any] = {
        "model": model,
        "fits": plan.fits,
        "context": plan.work.context,
        "batch": plan.work.batch,
        "gpus": plan.hardware.name,
        "settings": plan.settings,
        "reasons": _reasons(plan),
        "gpu_peak_bytes": ledger.gpu_peak - ledger.gpu["reserve"],
        "gpu_reserve_bytes": ledger.gpu["reserve"],
        "gpu_bytes": ledger.gpu_bytes,
        "host_peak_bytes": ledger.host_peak - ledger.host["reserve"],
        "host_reserve_bytes": ledger.host["reserve"],
        "host_bytes": ledger.host_bytes,
        "disk_peak_bytes": ledger.disk_peak,
        "disk_bytes": ledger.disk_bytes,
        "step_s": plan.step_s,
        "tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu,
        "sequences_per_step": plan.sequences_per_step,
        "tokens_per_step": plan.tokens_per_step,
        "limited_by": limited_by or plan.limited_by,
        "peak_phase": ledger.phase,
        "gpu_holders": ledger.gpu,
        "host_holders": ledger.host,
        "disk_holders": ledger.disk,
        "seconds": {name: getattr(plan.seconds, name) for name in PARTS},
        "runners_up": [_short(other) for other in plan.runners_up],
    }
    if max_context is not None:
        result["max_context"] = max_context
    return result


def _short(plan: Plan) -> dict[str, Any]:
    return {
        "settings": plan.settings,
        "step_s": plan.step_s,
        "tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu,
        "gpu_peak_bytes": plan.ledger.gpu_peak - plan.ledger.gpu["reserve"],
        "host_peak_bytes": plan.ledger.host_peak - plan.ledger.host["reserve"],
    }


# ---- text


def as_text(plan: Plan, model: str, max_context: int | None = None, limited_by: str | None = None) -> str:
    """The whole answer: does it fit, settings and reasons, memory, time, other plans."""
    lines = []
    if max_context is not None:
        lines += [_longest_line(plan, model, max_context, limited_by or ""), ""]
    lines += [
        _headline(plan, model),
        "",
        *_settings_lines(plan),
        "",
        *_memory_lines(plan),
        "",
        *_time_lines(plan),
    ]
    if plan.runners_up:
        lines += ["", "This plan and others", *_runner_lines(plan)]
    return "\n".join([*lines, "", *_assumptions(plan)])


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
    return f"{what}: does not fit. The nearest plan needs {_excess(plan)}.\n{_way_out(plan)}"


def _excess(plan: Plan) -> str:
    """Every tier that is too small."""
    if plan.ledger.disk_peak and not plan.ledger.disk_bytes:
        return f"{gib(plan.ledger.disk_peak)} of disk, and there is none (--disk 10TB)"
    if not plan.ledger.host_bytes:
        return f"{gib(plan.ledger.host_peak)} of host memory, and there is none (--host-memory 2TB)"
    words = {"GPU": "GPU memory", "host": "host memory", "disk": "disk"}
    over = {words[tier]: share for tier, share in plan.ledger.excess().items() if share > 1}
    return " and ".join(f"{share:.2f} times the {tier} there is" for tier, share in over.items())


def _way_out(plan: Plan) -> str:
    context = longest_context(plan.shape, plan.hardware, plan.given, plan.work.batch)
    more = _more(plan, context)
    if not context:
        return f"No context fits with these settings: it takes {more}."
    return f"The longest context that fits is {tokens(context)} ({context}); for more, {more}."


def _more(plan: Plan, context: int) -> str:
    """What lets more than `context` tokens fit, found by trial; more GPUs come as more nodes."""
    shape, hardware, batch = plan.shape, plan.hardware, plan.work.batch
    words = {"host": "more host memory", "disk": "more disk" if hardware.disk_bytes else "a disk (--disk 10TB)"}
    ways = [words[tier] for tier in ways_further(shape, hardware, plan.given, batch, context)]
    doubled = replace(hardware, num_nodes=2 * hardware.num_nodes)
    if longest_context(shape, doubled, plan.given, batch) > context:
        ways.append("more GPUs")
    return ", or ".join(ways) or "GPUs with more memory"


def _settings_lines(plan: Plan) -> list[str]:
    reasons = _reasons(plan)
    width = max(len(name) for name in reasons)
    settings = plan.settings
    return [f"  {name.ljust(width)}  {_plain(settings[name]):>6}   {why}" for name, why in reasons.items()]


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _reasons(plan: Plan) -> dict[str, str]:
    """Per setting what it does here, and why it was chosen; "as given" where the user decided."""
    layout = plan.layout
    where = "host" if layout.offload_optimizer else "device"
    reasons = {
        "parallel.cp": _cp_reason(plan),
        "parallel.heads_per_stage": _stage_reason(plan),
        "memory.tile_tokens": "tokens per tile of norms, projections and MLP",
    }
    if layout.checkpoint:
        reasons |= {"memory.offload": _input_reason(plan), "memory.keep_attention": _keep_reason(plan)}
        if layout.keep_attention:
            reasons["memory.attention_offload"] = _attention_tier_reason(plan)
        reasons["memory.overlap"] = _overlap_reason(plan)
    else:
        reasons["memory.checkpoint"] = "everything is kept, nothing computed again"
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
    return evaluate(plan.shape, plan.layout.but(**changes), plan.hardware, plan.work)


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


def _input_reason(plan: Plan) -> str:
    layout, shape = plan.layout, plan.shape
    num_bytes = shape.num_layers * layout.x_bytes(shape.hidden, plan.work.local_tokens(layout.cp))
    return f"layer inputs ({gib(num_bytes)} per GPU) are kept {PLACES[layout.input_tier]}"


def _keep_reason(plan: Plan) -> str:
    layout, num_layers = plan.layout, plan.shape.num_layers
    if not layout.keep_attention:
        again = "backward computes attention's output again"
        return f"{again}: no room to keep it" if _decided(plan, "keep_attention") else again
    saved_s = _changed(plan, keep_attention=0).step_s - plan.step_s
    effect = f"{'saves' if saved_s >= 0 else 'costs'} {duration(abs(saved_s))} per step"
    return f"{layout.keep_attention} of {num_layers} layers keep attention's output: {effect}"


def _attention_tier_reason(plan: Plan) -> str:
    layout = plan.layout
    num_bytes = kept_attention_bytes(plan.shape, layout, plan.work.local_tokens(layout.cp)) * layout.keep_attention
    return f"attention's outputs ({gib(num_bytes)} per GPU) are kept {PLACES[layout.attention_tier]}"


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
    need = sum(holders.values())
    shown = {name: held for name, held in holders.items() if held >= have / 1000 or held >= GIB // 4}
    legend = ", ".join(f"{LETTERS[name]} {name} {held / GIB:.1f}" for name, held in shown.items())
    lines = [f"{title}: {need / GIB:.1f} of {have / GIB:.1f} GiB", f"  [{_bar(shown, max(have, need))}]"]
    return [*lines, *_wrapped(legend)]


def _bar(holders: dict[str, int], have: int) -> str:
    cells, end = "", 0
    for name, held in holders.items():
        end += held
        cells += LETTERS[name] * (round(end / max(have, 1) * BAR) - len(cells))
    return cells[:BAR].ljust(BAR, ".")


def _wrapped(text: str) -> list[str]:
    lines = [""]
    for part in text.split(", "):
        if len(lines[-1]) + len(part) > WIDTH - 6:
            lines.append("")
        lines[-1] += (", " if lines[-1] else "") + part
    return ["   " + line for line in lines]


def _time_lines(plan: Plan) -> list[str]:
    shares = [(name, getattr(plan.seconds, name)) for name in PARTS]
    split = ", ".join(f"{name} {duration(s)} ({s / plan.step_s:.1%})" for name, s in shares)
    return [f"Time per step: {duration(plan.step_s)}", *_wrapped(split)]


def _runner_lines(plan: Plan) -> list[str]:
    table = _table("cp", "heads/stage", "inputs", "attention kept", "optimizer", "tok/s/GPU", "GPU GiB", "host GiB")
    for other in (plan, *plan.runners_up):
        a = other.layout
        kept = f"{a.keep_attention} on {a.attention_tier}" if a.keep_attention else "none"
        table.add_row(
            str(a.cp),
            _plain(other.settings["parallel.heads_per_stage"]),
            a.input_tier,
            kept,
            "host" if a.offload_optimizer else "device",
            rate(other.tokens_per_s_per_gpu),
            f"{other.ledger.gpu_peak / GIB:.1f}",
            f"{other.ledger.host_peak / GIB:.0f}",
        )
    return _rendered(table)


def _assumptions(plan: Plan) -> list[str]:
    gpu, hardware = plan.hardware.gpu, plan.hardware
    reserve = f"{RESERVE_BYTES / GIB:.0f} GiB + {RESERVE_SHARE:.0%} of each GPU"
    return [
        f"Reserved: {reserve} (context, collectives, workspaces, fragmentation). Of a node's host memory:",
        "5 % and 6 GB per GPU. Exchange and disk rates are assumed, not measured:",
        f"{gpu.link_bytes_s / 1e9:.0f} GB/s per GPU inside a node, {hardware.network_bytes_s / 1e9:.0f} GB/s "
        f"between nodes, disk {hardware.disk_bytes_s / 1e9:.0f} GB/s per node.",
        f"Rates of {gpu.name}: {gpu.sources.get('attention_forward_flops', 'not stated')}.",
        "Times are of sequences of one document each; shorter documents, packed, take less attention.",
    ]


# ---- tables


def ladder_text(rungs: list[Rung], model: str) -> str:
    first = rungs[-1].plan
    table = _table("", f"GPU GiB at {tokens(first.work.context)}", "fits", "tok/s/GPU", "longest context")
    for rung in rungs:
        plan = rung.plan
        table.add_row(
            rung.name,
            f"{plan.ledger.gpu_peak / GIB:,.1f}",
            "yes" if plan.fits else f"no: {plan.limited_by}",
            rate(plan.tokens_per_s_per_gpu) if plan.fits else "-",
            tokens(rung.max_context) if rung.max_context else "none",
        )
    return "\n".join([f"What each technique buys: {model} on {first.hardware.name}", *_rendered(table)])


def ladder_dict(rungs: list[Rung], model: str) -> list[dict[str, Any]]:
    return [{"name": r.name, "max_context": r.max_context, **as_dict(r.plan, model)} for r in rungs]


def sweep_text(points: list[Point], model: str) -> str:
    plan = points[0].plan
    table = _table("heads_per_stage", "GPU GiB", "fits", "tok/s/GPU", "longest context")
    for point in points:
        table.add_row(
            str(point.heads_per_stage),
            f"{point.plan.ledger.gpu_peak / GIB:.1f}",
            "yes" if point.plan.fits else f"no: {point.plan.limited_by}",
            rate(point.plan.tokens_per_s_per_gpu),
            tokens(point.max_context) if point.max_context else "none",
        )
    title = f"{model}, {tokens(plan.work.context)} tokens, {plan.hardware.name}, cp={plan.layout.cp}"
    return "\n".join([title, *_rendered(table), "", *_memory_bars(points)])


def sweep_dict(points: list[Point], model: str) -> list[dict[str, Any]]:
    return [
        {"heads_per_stage": p.heads_per_stage, "max_context": p.max_context, **as_dict(p.plan, model)} for p in points
    ]


def _memory_bars(points: list[Point]) -> list[str]:
    """GPU memory as bars, one line per point."""
    most = max(p.plan.ledger.gpu_peak for p in points)
    return [
        f"{p.heads_per_stage:>5} {'#' * round(BAR * p.plan.ledger.gpu_peak / most):<{BAR}}"
        f" {p.plan.ledger.gpu_peak / GIB:6.1f} GiB {p.plan.tokens_per_s_per_gpu:8.1f} tok/s"
        for p in points
    ]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def _rendered(table: Table) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=WIDTH, color_system=None, highlight=False).print(table)
    return ["  " + line.rstrip() for line in out.getvalue().splitlines()]


# ---- plot


def sweep_svg(points: list[Point], model: str) -> str:
    """GPU memory across, longest context up: one dot per heads_per_stage."""
    width, height, left, top, bottom = 640, 360, 80, 40, 60
    xs = [p.plan.ledger.gpu_peak / GIB for p in points]
    ys = [p.max_context / 2**20 for p in points]
    x_end, y_end = 1.15 * max(xs), 1.15 * max(*ys, 0.001)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + x / x_end * (width - left - 30), height - bottom - y / y_end * (height - top - bottom)

    dots = []
    for x, y, point in zip(xs, ys, points, strict=True):
        cx, cy = place(x, y)
        label = f"{point.heads_per_stage} heads, {rate(point.plan.tokens_per_s_per_gpu)} tok/s"
        dots.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="5" fill="#1f6feb"/>')
        dots.append(f'<text x="{cx + 8:.1f}" y="{cy - 6:.1f}">{escape(label, quote=False)}</text>')
    plan = points[0].plan
    title = f"{model} on {plan.hardware.name}: heads_per_stage at {tokens(plan.work.context)} tokens"
    ticks, (x0, y0), (x1, _), (_, y1) = "", place(0, 0), place(x_end, 0), place(0, y_end)
    for x in round_ticks(x_end):
        px, _ = place(x, 0)
        ticks += f'<text x="{px:.1f}" y="{y0 + 18:.1f}" text-anchor="middle">{x:.4g}</text>'
    for y in round_ticks(y_end):
        _, py = place(0, y)
        ticks += f'<text x="{x0 - 8:.1f}" y="{py + 4:.1f}" text-anchor="end">{y:.4g}M</text>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            f'<text x="{left}" y="22" font-size="14">{escape(title, quote=False)}</text>',
            f'<path d="M{x0:.1f} {y1:.1f} V{y0:.1f} H{x1:.1f}" fill="none" stroke="#444"/>',
            ticks,
            f'<text x="{(x0 + x1) / 2:.1f}" y="{height - 16}" text-anchor="middle">GPU memory, GiB</text>',
            f'<text x="{left}" y="{top}" text-anchor="end">longest context</text>',
            *dots,
            "</svg>",
            "",
        ]
    )


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
