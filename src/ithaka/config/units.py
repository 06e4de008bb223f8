"""Counts, tokens, rates, bytes, durations and JSON as text; lines that fit a terminal."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

LINE_WIDTH = 100


def format_count(value: float) -> str:
    """12345 -> '12.3K'."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= unit:
            return (
                f"{value / unit:.3g}{name}" if value < 999.5 * unit else f"{value / unit:.0f}{name}"
            )
    return f"{value:.3g}"


def plural(count: int, noun: str) -> str:
    """1 document, 2,000 documents."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def format_tokens(count: int) -> str:
    if count >= 2**20:
        return f"{count / 2**20:.4g}M"
    return f"{count / 2**10:.4g}K" if count >= 2**10 else str(count)


def format_rate(per_second: float) -> str:
    """Four significant digits, or all digits of a larger integer part."""
    return f"{per_second:.4g}" if per_second < 1000 else f"{per_second:.0f}"


def format_bytes(num_bytes: float) -> str:
    """Up to four significant digits in the largest binary unit; 2228224 -> '2.125 MiB'."""
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


def format_json(values: object, **options: Any) -> str:
    """JSON with null for NaN and infinities: Python writes them as NaN and Infinity, which browsers
    reject."""
    try:
        return json.dumps(values, allow_nan=False, **options)
    except ValueError:
        return json.dumps(json.loads(json.dumps(values), parse_constant=lambda _: None), **options)


# ---- lines


def unbroken(text: str) -> str:
    """`text` without line breaks in `wrap`."""
    return text.replace(" ", "\0")


def wrap(text: str, first: str = "", rest: str = "", end: str = "") -> list[str]:
    """Lines of at most LINE_WIDTH, broken after a colon, or else a comma, where there is one.
    `first`, `rest`: indents. `end`: of each line but the last."""
    lines = []
    indent = first
    while (room := LINE_WIDTH - len(indent)) < len(text):
        breaks = [i for i in range(1, room - len(end) + 1) if text[i] == " "]
        if not breaks:
            break
        late = [i for i in breaks if i > room / 3]
        after_clauses = [i for i in late if text[i - 1] in ";:."]
        after_commas = [i for i in late if text[i - 1] == ","]
        at = max(after_clauses or after_commas or breaks)
        lines.append(f"{indent}{text[:at]}{end}")
        text = text[at + 1 :]
        indent = rest
    return [line.replace("\0", " ") for line in (*lines, indent + text)]


def wrap_list(parts: Iterable[str]) -> list[str]:
    """Indented lines of names and figures; no line ends between a name and its figure."""
    return wrap(", ".join(map(unbroken, parts)), "  ", "  ")


def wrap_columns(rows: Mapping[str, str]) -> Iterator[str]:
    """A title and a text that continues below itself, for each row."""
    for title, text in rows.items():
        yield from wrap(text, title, " " * len(title))
