"""The page of `ithaka evaluate`."""

import html
import math
from collections.abc import Sequence
from typing import Any

from ithaka.evaluate.compare import (
    TABLES,
    column_names,
    depth_rows,
    explain_figures,
    explain_missing_retrieval,
    make_tables,
    model_names,
)
from ithaka.evaluate.tasks import TASKS
from ithaka.report.page import render_charts, render_table


def render_results(results: Sequence[dict[str, Any]]) -> str:
    """Render a self-contained HTML page, with a retrieval heat map per task and model."""
    parts = []
    charts = {title: name for title, name, keys in TABLES if keys == ("from", "to")}
    for title, rows in list(make_tables(results))[:-1]:
        if title in charts:
            losses = [row["loss"] for result in results for row in result.get(charts[title]) or []]
            measured = any(loss is not None and math.isfinite(loss) for loss in losses)
            content = f'<div class=chart data-rows="{charts[title]}"></div>' if measured else "not measured"
        else:
            content = render_table([list(row.values()) for row in rows], list(rows[0])) if rows else "not measured"
        parts.append(f"<h2>{title}</h2><div class=scroll>{content}</div>")
        parts += [f"<p class=note>{explain_figures(results)}</p>"] * (title == "figures")
    parts.append("<h2>retrieval</h2>")
    if missing := explain_missing_retrieval(results):
        parts.append(f"<p class=note>{html.escape(missing)}</p>")
    if not any(result["retrieval"] for result in results):
        return _render(results, parts)
    parts.append("<p class=note>Share of correct answers, by context (rows) and depth (columns).</p><div class=maps>")
    for task in TASKS:
        maps = []
        for name, result in zip(column_names(results), results, strict=True):
            rows = depth_rows([cell for cell in result["retrieval"] if cell["task"] == task])
            _, _, *depths = rows[0] if rows else ("", "")
            maps.append(render_table([list(row.values())[1:] for row in rows], [name, *depths], "heat"))
        parts.append(f"<section><h3>{task}</h3><div class=maps>{''.join(maps)}</div></section>")
    return _render(results, [*parts, "</div>"])


def _render(results: Sequence[dict[str, Any]], parts: Sequence[str]) -> str:
    title = "Evaluation of " + " and ".join(result["model"] for result in results)
    drawn = [name for _, name, keys in TABLES if keys == ("from", "to")]
    models = zip(model_names(results), results, strict=True)
    data = [{"name": name, **{key: result.get(key) or [] for key in drawn}} for name, result in models]
    return render_charts(title, "".join(parts), data, "evaluation.js")
