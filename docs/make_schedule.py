"""Writes schedule.svg: what one layer does in forward and backward, and which GPU holds what in
each step."""

from html import escape
from pathlib import Path

WIDTH = 760
HEIGHT = 690
# read on white and on black
TEXT = "#767d86"
LINE = "#767d8699"
BOX = "#767d861a"
GPUS = ("#3f87d9", "#d9873f", "#4fa35c", "#9a6fc4")
LEFT = 10
RIGHT = 430
BOX_WIDTH = 320
BOX_HEIGHT = 84
TOP = 118
STEP = 112
FORWARD = (
    ("tokens", "Input x", "Each GPU holds a quarter of the", "tokens, with all heads."),
    ("tiles", "Norm and q, k, v", "A tile of a few thousand tokens", "at a time."),
    (
        "stage",
        "All-to-all, then attention",
        "Each GPU gets all tokens of one",
        "head. Other heads wait: a stage.",
    ),
    (
        "tokens",
        "All-to-all back",
        "Repeat for the next stage; then",
        "each GPU has its tokens again.",
    ),
    ("tiles", "Projection, norm and MLP", "In tiles. The result is the next", "layer's input."),
)
BACKWARD = (  # from bottom to top
    ("tokens", "Gradient of x", "Goes to the layer below.", ""),
    ("tiles", "Gradients of q, k, v, norm", "In tiles, once for all heads.", ""),
    ("stage", "Attention backward", "Stage by stage: q, k, v again,", "their gradients back."),
    ("tiles", "MLP again, its gradient", "Recomputed tile by tile, then", "dropped."),
    ("tokens", "Fetch x", "As the layer above computes;", "attention's output too, if kept."),
)


def text(x: float, y: float, words: str, anchor: str = "start", style: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{style}>{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{fill}"{more}/>'
    )


def arrow(x: float, y: float, dx: float, dy: float) -> str:
    return (
        f'<path d="M{x:.0f} {y:.0f}l{dx:.0f} {dy:.0f}" stroke="{TEXT}" stroke-width="1.5" '
        'marker-end="url(#head)"/>'
    )


def grid(kind: str, x: float, y: float, size: float = 60) -> list[str]:
    """Tokens from left to right, eight heads from top to bottom, coloured by the GPU that holds
    them."""
    part = size / 4
    row = size / 8
    solid = range(4)
    outline = rect(x, y, size, size, "none", f' stroke="{LINE}"')
    if kind == "stage":  # four of eight heads, one per GPU, over all tokens
        return [outline, *(rect(x, y + row * i, size, row - 1, GPUS[i]) for i in solid)]
    if kind == "tiles":  # one tile of each GPU's tokens
        faint = [rect(x + part * i, y, part - 1, size, f"{GPUS[i]}40") for i in solid]
        return [
            outline,
            *faint,
            *(rect(x + part * i + part / 3, y, part / 3, size, GPUS[i]) for i in solid),
        ]
    return [outline, *(rect(x + part * i, y, part - 1, size, GPUS[i]) for i in solid)]


def column(
    x: float, steps: tuple[tuple[str, str, str, str], ...], title: str, down: bool
) -> list[str]:
    parts = [text(x + BOX_WIDTH / 2, TOP - 14, title, "middle", ' font-weight="600"')]
    for i, (kind, name, first, second) in enumerate(steps):
        y = TOP + STEP * i
        parts += [
            rect(x, y, BOX_WIDTH, BOX_HEIGHT, BOX, f' rx="8" stroke="{LINE}"'),
            *grid(kind, x + 12, y + 12),
        ]
        parts += [
            text(x + 84, y + 26, name, style=' font-weight="600"'),
            text(x + 84, y + 48, first),
        ]
        parts += [text(x + 84, y + 67, second)] if second else []
        if i + 1 < len(steps):
            middle = x + BOX_WIDTH / 2
            gap = STEP - BOX_HEIGHT
            start = y + BOX_HEIGHT + 3 if down else y + STEP - 3
            parts.append(arrow(middle, start, 0, (gap - 10) * (1 if down else -1)))
    return parts


def svg() -> str:
    bottom = TOP + STEP * 4 + BOX_HEIGHT
    legend = [
        text(
            LEFT,
            20,
            "One layer on four GPUs, a long sequence",
            style=' font-size="17" font-weight="600"',
        )
    ]
    legend.append(
        text(
            LEFT,
            48,
            "In each square, tokens run from left to right and heads from top to bottom. Color:",
        )
    )
    for i, colour in enumerate(GPUS):
        legend += [
            rect(LEFT + 600 + 38 * i, 37, 12, 12, colour),
            text(LEFT + 616 + 38 * i, 48, str(i + 1)),
        ]
    legend.append(text(LEFT, 70, "the GPU that holds them. Only what a step needs is in memory."))
    middle = (LEFT + BOX_WIDTH + RIGHT) / 2
    store = TOP + STEP * 4 + 20
    lines = [
        arrow(LEFT + BOX_WIDTH + 4, TOP + 40, RIGHT - LEFT - BOX_WIDTH - 54, STEP * 4 - 30),
        arrow(middle + 36, store + 22, RIGHT - middle - 44, 0),
        rect(middle - 36, store, 72, 44, BOX, f' rx="6" stroke="{LINE}"'),
        text(middle, store + 19, "host or", "middle", ' font-size="12"'),
        text(middle, store + 35, "disk", "middle", ' font-size="12"'),
        text(middle + 4, TOP + 60, "keep x", "middle", ' font-size="12"'),
        text(LEFT + BOX_WIDTH / 2, bottom + 24, "to the next layer", "middle"),
        text(RIGHT + BOX_WIDTH / 2, bottom + 24, "from the layer above", "middle"),
    ]
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto">'
    )
    head += f'<path d="M0 0L8 4L0 8z" fill="{TEXT}"/></marker>'
    columns = [*column(LEFT, FORWARD, "forward", True), *column(RIGHT, BACKWARD, "backward", False)]
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">'
    font = f'<g font-family="system-ui, sans-serif" font-size="14" fill="{TEXT}">'
    return "\n".join(
        [start, f"<defs>{head}</defs>", font, *legend, *columns, *lines, "</g>", "</svg>", ""]
    )


if __name__ == "__main__":
    (Path(__file__).parent / "schedule.svg").write_text(svg(), encoding="utf-8")
