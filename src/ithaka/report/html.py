"""HTML pages and tables in ithaka's style. A page is one file and needs no network. Imports no torch."""

import html
from collections.abc import Sequence
from importlib.resources import files
from string import Template
from typing import Any

from ithaka.config import PAGE_MARK


class Markup(str):
    """HTML that `render_table` inserts unescaped."""

    __slots__ = ()


def render_page(title: str, body: str, scripts: str = "", on_load: str = "", live: bool = False) -> str:
    """An HTML page with a light and a dark theme.

    `scripts`: script elements. `on_load`: JavaScript that runs after them. `live`: the page reloads periodically.
    """
    parts = {
        "live": ' data-live="yes"' if live else "",
        "mark": PAGE_MARK,
        "title": html.escape(title),
        "style": read_asset("report.css"),
        "body": body,
        "scripts": f"{scripts}\n<script>{on_load}{read_asset('theme.js')}</script>",
    }
    return Template(read_asset("page.html")).substitute(parts)


def render_table(rows: Sequence[Sequence[Any]], head: Sequence[str] = (), css_class: str = "") -> str:
    """An HTML table. Columns of numbers are right-aligned; in a table of class "heat", floats from 0 to 1 color their
    cell."""
    alignment = ["" if isinstance(value, str) else " class=number" for value in rows[0]]

    def render_cell(value: Any, align: str) -> str:
        heat = f' style="--score: {value}"' if css_class == "heat" and isinstance(value, float) else ""
        return f"<td{align}{heat}>{_render_value(value)}</td>"

    lines = ["".join(map(render_cell, row, alignment)) for row in rows]
    if head:
        names = (f"<th{align}>{html.escape(name)}</th>" for name, align in zip(head, alignment, strict=True))
        lines.insert(0, "".join(names))
    return f'<table class="{css_class}">{"".join(f"<tr>{line}</tr>" for line in lines)}</table>'


def _render_value(value: Any) -> str:
    if isinstance(value, Markup):
        return value
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else html.escape(f"{value:,}" if isinstance(value, int) else value)


def read_asset(name: str) -> str:
    return (files("ithaka.report") / name).read_text(encoding="utf-8")
