"""Arguments and options shared by several commands, and helpers to parse and print."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ithaka.config import ConfigError, parse_count

if TYPE_CHECKING:
    from rich.status import Status

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Overwrite existing files, or use a non-empty directory.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def loading(message: str = "loading PyTorch") -> Iterator["Callable[[str], Status]"]:
    """Show `message` during slow imports; yield `status` to show other messages."""
    from ithaka.log.console import status

    with status(message):
        yield status


def parse_tokens(text: str, option: str) -> int:
    if not (count := parse_count(text)):
        raise ConfigError(f"{option}={text} is not a number of tokens; write 65536, 64K or 1M")
    return count


def print_rows(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    print(json.dumps(rows, indent=2) if as_json else format_table(rows))


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Align columns: text to the left, numbers to the right."""
    lines = [list(rows[0]), *(list(map(_format_cell, row.values())) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    alignments = ["<" if isinstance(value, str) else ">" for value in rows[0].values()]
    columns = list(zip(alignments, widths, strict=True))
    texts = []
    for line in lines:
        cells = zip(line, columns, strict=True)
        text = "  ".join(f"{cell:{align}{width}}" for cell, (align, width) in cells)
        texts.append(text.rstrip())
    return "\n".join(texts)


def _format_cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)
