"""Counts, tokens, rates, bytes, durations and JSON as text."""

import json
from typing import Any


def format_count(value: float) -> str:
    """12345 -> '12.3K'."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= unit:
            return f"{value / unit:.3g}{name}" if value < 999.5 * unit else f"{value / unit:.0f}{name}"
    return f"{value:.3g}"


def format_tokens(count: int) -> str:
    return f"{count / 2**20:.4g}M" if count >= 2**20 else f"{count / 2**10:.4g}K" if count >= 2**10 else str(count)


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


def format_json(values: Any, **options: Any) -> str:
    """JSON with null for NaN and infinities: Python writes them as NaN and Infinity, which browsers reject."""
    try:
        return json.dumps(values, allow_nan=False, **options)
    except ValueError:
        return json.dumps(json.loads(json.dumps(values), parse_constant=lambda _: None), **options)
