"""Arguments and options shared by several commands, and helpers to parse and print."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ithaka.config import ConfigError, parse_count

Model = Annotated[str, typer.Argument(help="A name (llama3.1-8b), a directory, a config.json, or a hub id.")]
ConfigFile = Annotated[
    Path | None, typer.Argument(metavar="CONFIG.yaml", help="By default, a small demonstration model.")
]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting.")]
Ranks = Annotated[int | None, typer.Option(help="Local ranks; by default one per GPU, or 2 on a CPU.")]
# Not a Path, which would turn '' into the current directory.
RunDir = Annotated[str | None, typer.Option(metavar="DIR", help="Run directory; by default runs/<date>-<time>.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files, or use a non-empty directory.")]
Gpus = Annotated[str, typer.Option(help="For example 8xH100-80GB, or 2x8xH100-80GB for two nodes.")]
Context = Annotated[str, typer.Option(help="Tokens per sequence: 131072, 128K, 1M.")]
HostMemory = Annotated[
    str | None,
    typer.Option(help="Host memory per node: 2TB, 512GiB. By default 256 GB per GPU; for GeForce 64 GB in total."),
]
Disk = Annotated[str | None, typer.Option(help="Disk space per node for activations; by default none.")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences per micro-step.")]
Adapter = Annotated[int | None, typer.Option(metavar="RANK", min=1, help="Train LoRA adapters of this rank.")]
GpuFile = Annotated[Path | None, typer.Option(help="JSON file with the rates of another GPU; then use --gpus 8.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Seconds = Annotated[float, typer.Option(min=0, help="Seconds per measurement.")]


@contextmanager
def loading(message: str = "loading PyTorch") -> Iterator[Callable[[str], AbstractContextManager[None]]]:
    """Show `message` during slow imports; yield `status` to show other messages."""
    from ithaka.train.console import status

    with status(message):
        yield status


def with_ranks(overrides: list[str] | None, ranks: int | None) -> list[str]:
    """Append `--ranks` to the overrides."""
    return [*(overrides or []), *([f"parallel.ranks={ranks}"] if ranks is not None else [])]


def parse_path(text: str, option: str) -> Path:
    if not text:
        raise ConfigError(f"{option}='' is not a directory; give one, or . for the current directory")
    return Path(text)


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
    aligned = (zip(line, columns, strict=True) for line in lines)
    return "\n".join("  ".join(f"{cell:{align}{width}}" for cell, (align, width) in line).rstrip() for line in aligned)


def _format_cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
