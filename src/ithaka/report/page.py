"""Puts the page together: data, script, style and the charting library in one file."""

import html
import json
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from ithaka.config import check_file
from ithaka.report.data import read_run

CHARTS = "echarts.common.min.js"  # Apache ECharts 6.1.0, as published; see NOTICE.echarts


def write_report(run_dirs: Sequence[Path], out: Path | None = None) -> Path:
    """Writes the page for these runs; by default report.html in the first one's directory."""
    runs = [read_run(run_dir) for run_dir in run_dirs]
    name = "report.html" if len(runs) == 1 else "report-" + "-".join(run["name"] for run in runs) + ".html"
    path = out or run_dirs[0] / name
    check_file("--out", path)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(page(runs), encoding="utf-8")
    os.replace(temporary, path)
    return path


def page(runs: list[dict]) -> str:
    title = html.escape(", ".join(run["name"] for run in runs))
    # A "<" of a run's own text could end the script element, or open a comment in it.
    data = json.dumps(runs, separators=(",", ":")).replace("<", "\\u003c")
    parts = {"title": title, "style": _file("report.css"), "data": data, "charts": _file(CHARTS)}
    parts["script"] = _file("report.js")
    text = _file("page.html")
    before, *rest = text.split("{{")
    pieces = [before]
    for piece in rest:
        key, after = piece.split("}}", 1)
        pieces += [parts[key.strip()], after]
    return "".join(pieces)


def _file(name: str) -> str:
    return (files("ithaka.report") / name).read_text(encoding="utf-8")
