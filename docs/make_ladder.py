"""Writes ladder.svg: the longest context that is planned, with one technique more on every rung.

A rung is what `ithaka plan llama3-8b --gpus 8xH100-80GB --host-memory 2TB --disk 20TB
--max-context` answers with a `--set` for each setting of this rung and those above it.
docs/how-much-context.md has the same figures as a table.
"""

import math
from html import escape
from pathlib import Path

from ithaka.config import units
from ithaka.plan.hardware import find_hardware
from ithaka.run.check_request import make_request

MODEL = "llama3-8b"
GPUS = "8xH100-80GB"
HOST = "2TB"
DISK = "20TB"
RUNGS = {
    "FSDP": "parallel.cp=1 parallel.heads_per_stage=all memory.tile_tokens=all "
    "memory.checkpoint=none "
    "memory.offload_optimizer=false",
    "Ulysses": "parallel.cp=8",
    "checkpointing": (
        "memory.checkpoint=full memory.offload=none memory.keep_attention=none memory.overlap=false"
    ),
    "layer inputs in host memory": "memory.offload=host",
    "tiles": "memory.tile_tokens=8192",
    "layer inputs on disk": "memory.offload=disk",
    "heads in stages": "parallel.heads_per_stage=8",
    "attention kept on disk": "memory.keep_attention=all memory.attention_offload=disk",
    "AdamW in host memory": "memory.offload_optimizer=true",
}

WIDTH = 760
ROW = 30
TOP = 44
LEFT = 232
RIGHT = 66
# tokens at the two ends of the scale
FLOOR = 4 * 1024
CEILING = 32 * 1024**2
# read on white and on black
TEXT = "#767d86"
BAR = "#767d8666"
NEW = "#3f87d9"


def ladder() -> dict[str, int]:
    """Tokens of each rung."""
    hardware = find_hardware(GPUS, None, HOST, DISK)
    settings: dict[str, str] = {}
    longest = {}
    for name, added in RUNGS.items():
        settings |= dict(each.split("=") for each in added.split())
        overrides = [f"{key}={value}" for key, value in settings.items()]
        longest[name] = make_request(MODEL, hardware, "128K", 1, overrides).space.longest_context(1)
    return longest


def svg(longest: dict[str, int]) -> str:
    """Bars on a scale of powers of two; what a rung adds to the one above it is darker."""

    def x(tokens: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(tokens / FLOOR) / math.log(CEILING / FLOOR)

    def text(at: float, y: float, words: str, anchor: str = "start") -> str:
        return f'<text x="{at:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'

    title = f"Longest context planned for {MODEL} on {GPUS}, {HOST} of host memory, {DISK} of disk"
    height = TOP + ROW * len(longest) + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
        f'<g font-family="system-ui, sans-serif" font-size="14" fill="{TEXT}">',
        text(0, 18, title),
    ]
    before = FLOOR
    for i, (name, tokens) in enumerate(longest.items()):
        y = TOP + ROW * i
        parts.append(text(LEFT - 10, y + 15, name if i == 0 else f"+ {name}", "end"))
        for start, end, colour in ((FLOOR, before, BAR), (before, tokens, NEW)):
            width = x(end) - x(start)
            parts.append(
                f'<rect x="{x(start):.1f}" y="{y}" width="{width:.1f}" height="20" '
                f'fill="{colour}"/>'
            )
        parts.append(text(x(tokens) + 7, y + 15, units.format_tokens(tokens)))
        before = tokens
    for power in range(14, 25, 2):
        parts.append(text(x(2**power), height - 6, units.format_tokens(2**power), "middle"))
    parts.append(text(LEFT - 10, height - 6, "tokens, logarithmic", "end"))
    return "\n".join([*parts, "</g>", "</svg>", ""])


if __name__ == "__main__":
    (Path(__file__).parent / "ladder.svg").write_text(svg(ladder()), encoding="utf-8")
