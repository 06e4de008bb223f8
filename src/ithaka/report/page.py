"""HTML pages in ithaka's style, each one file that works offline; the report. Imports no torch."""

import html
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from string import Template
from threading import Event, Thread
from typing import Any

import yaml

from ithaka.config import (
    PAGE_MARK,
    ConfigError,
    check_writable,
    input_error,
    write_atomic,
    writing_to,
)
from ithaka.config.units import format_json
from ithaka.log.metrics import read_events, read_metrics

CHART_LIBRARY = "echarts.common.min.js"  # Apache ECharts 6.1.0, as published; see NOTICE.echarts
PEAKS = ("device_peak_bytes", "host_peak_bytes")  # reset when a run resumes
ALLOCATOR = ("device_unused_bytes", "allocator_retries")
METRICS = (
    "step",
    "loss",
    "val_loss",
    "lr",
    "grad_norm",
    "tokens",
    "tokens_per_s",
    "step_s",
    "mfu",
    *PEAKS,
)


def write_report(run_dirs: Sequence[Path], out: Path | None = None, live: bool = False) -> Path:
    """Write the page, by default report.html in the first run's directory, and return its path."""
    runs = [read_run(run_dir) for run_dir in run_dirs]
    for i, run in enumerate(runs):  # make names unique
        others = runs[:i] + runs[i + 1 :]
        if run["name"] in [other["name"] for other in others]:
            run["name"] = f"{run_dirs[i].resolve().parent.name}/{run['name']} ({i + 1})"
    names = [f"-{run_dir.resolve().name}" for run_dir in run_dirs] if len(runs) > 1 else []
    path = out or run_dirs[0] / f"report{''.join(names)}.html"
    if out is None:  # any link there is replaced, not followed: the run may be someone else's
        check_writable("--out", path.parent, folder=True)
    else:
        check_writable("--out", path)
    text = render_charts(", ".join(run["name"] for run in runs), "", runs, "report.js", live)
    # A pipe or a device must not be replaced.
    is_device = out is not None and out.exists() and not out.is_file()
    with writing_to("--out", path):
        if is_device:
            path.write_text(text, encoding="utf-8")
        else:  # a browser never loads half a page
            write_atomic(path, text)
    return path


@contextmanager
def live_report(run_dir: Path, every_s: float = 30.0) -> Iterator[None]:
    """Rewrite report.html periodically while the code inside runs, using at most 1% of a core."""
    done = Event()

    def rewrite() -> None:
        wait_s = every_s
        while not done.wait(wait_s):
            start = time.monotonic()
            with suppress(Exception):  # before the run has written its files
                write_report([run_dir], live=True)
            wait_s = max(every_s, 100 * (time.monotonic() - start))

    writer = Thread(target=rewrite, daemon=True, name="report")
    writer.start()
    try:
        yield
    finally:
        done.set()
        writer.join()


def read_run(run_dir: Path) -> dict[str, Any]:
    """The data that the page embeds. What the run has not written yet is None or empty."""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"RUN_DIR={run_dir} has no config.yaml; pass the directory of a run")
    profiles = run_dir.glob("profile/step-*/profile.json")
    evaluations = run_dir.glob("evaluations/step-*.json")
    try:
        records = read_metrics(run_dir / "metrics.jsonl")
        events = read_events(run_dir / "metrics.jsonl")
        config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("config.yaml has no sections")
        contents = {
            name: _read_json(run_dir / f"{name}.json") for name in ("machine", "data", "plan")
        }
        contents["profile"] = _read_latest({file: file.parent.name for file in profiles})
        contents["evaluation"] = _read_latest({file: file.stem for file in evaluations})
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        problem = f"RUN_DIR={run_dir} cannot be read ({reason})"
        raise input_error(f"{problem}; restore its files", error) from None
    shown = ("evaluate/", "experts/", "aux_loss", "rewards/", "val_rewards/")
    more = sorted({key for record in records for key in record if key.startswith(shown)})
    metrics: dict[str, list[float | None]] = {}
    for key in (*METRICS, *ALLOCATOR, *more):
        metrics[key] = [_number(record.get(key)) for record in records]
    largest = {}
    for key in (*PEAKS, *ALLOCATOR):
        largest[key] = max([value or 0 for value in metrics[key]], default=0) or None
    return {
        "name": run_dir.resolve().name,
        "metrics": metrics,
        **largest,
        "config": {name: values for name, values in config.items() if name != "origins"},
        "origins": config.get("origins") or {},  # who set each value
        **contents,
        # Records have null for a loss that is not finite, as they do without validation; events
        # tell them apart.
        "failed_validations": [event["step"] for event in events if "val_loss" in event],
    }


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) else None


def _read_json(path: Path) -> dict[str, Any] | None:
    """The file's contents, or None if it does not exist, is incomplete or holds something else."""
    with suppress(FileNotFoundError, ValueError, RecursionError):
        values = json.loads(path.read_text(encoding="utf-8"))
        return values if isinstance(values, dict) else None
    return None


def _read_latest(names: Mapping[Path, str]) -> dict[str, Any] | None:
    """The contents of the file of the latest step, by names such as step-4; others are ignored."""
    steps = {}
    for file, name in names.items():
        match = re.fullmatch(r"step-(\d+)", name)
        if match:
            steps[file] = int(match[1])
    return _read_json(max(steps, key=steps.__getitem__)) if steps else None


class Markup(str):
    """HTML that `render_table` inserts unescaped."""

    __slots__ = ()


Cell = str | float | None  # of a table; int is a float


def render_page(
    title: str, body: str, scripts: str = "", on_load: str = "", live: bool = False
) -> str:
    """An HTML page with a light and a dark theme. `scripts`: script elements. `on_load`: JavaScript
    that runs after them. `live`: the page reloads periodically."""
    return Template(read_asset("page.html")).substitute(
        live=' data-live="yes"' if live else "",
        mark=PAGE_MARK,
        title=html.escape(title),
        style=read_asset("report.css"),
        body=body,
        scripts=f"{scripts}\n<script>{on_load}{read_asset('theme.js')}</script>",
    )


def render_charts(
    title: str, body: str, data: Sequence[Mapping[str, Any]], script: str, live: bool = False
) -> str:
    """A page with charts of `data`, drawn by `script`, an asset that uses charts.js."""
    # An unescaped "<" in a run's text could end the script element or open a comment in it.
    embedded = format_json(data, separators=(",", ":")).replace("<", "\\u003c")
    notice = "This page needs JavaScript to draw its charts; all of it is in this file."
    body += f"<noscript>{notice}</noscript>"
    scripts = f'<script id="data" type="application/json">{embedded}</script>'
    scripts += f"\n<script>{read_asset(CHART_LIBRARY)}</script>"
    return render_page(title, body, scripts, read_asset("charts.js") + read_asset(script), live)


def render_table(
    rows: Sequence[Sequence[Cell]], head: Sequence[str] = (), css_class: str = ""
) -> str:
    """An HTML table with right-aligned numbers. In class "heat", floats from 0 to 1 color cells."""
    first = rows[0] if rows else head
    alignment = ["" if isinstance(value, str) else " class=number" for value in first]

    def render_cell(value: Cell, align: str) -> str:
        has_color = css_class == "heat" and isinstance(value, float)
        heat = f' style="--score: {value}"' if has_color else ""
        return f"<td{align}{heat}>{_render_value(value)}</td>"

    lines = ["".join(map(render_cell, row, alignment)) for row in rows]
    if head:
        names = map(html.escape, head)
        cells = (f"<th{align}>{name}</th>" for name, align in zip(names, alignment, strict=True))
        lines.insert(0, "".join(cells))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table class="{css_class}">{body}</table>'


def _render_value(value: Cell) -> str:
    if value is None or isinstance(value, Markup):
        return value or ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return html.escape(f"{value:,}" if isinstance(value, int) else value)


def read_asset(name: str) -> str:
    return (files("ithaka.report") / name).read_text(encoding="utf-8")
