"""Results of one model or two: read them, check that they can be compared, and put them into tables."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ithaka.config import ConfigError, input_error
from ithaka.evaluate.tasks import FIGURES

EXPLANATIONS = {
    "long_context_gain": "loss with the full context minus loss with the last 4K tokens; below zero, the context helps",
    "key_tokens": "share of tokens whose loss the long context lowers by more than 2, to below 2",
}
TABLES = (
    ("loss by position", "loss_by_position", ("from", "to")),
    ("loss of trained tokens by turn", "loss_by_turn", ("turn",)),
    ("loss of trained tokens by position", "trained_loss_by_position", ("from", "to")),
    ("prompts", "tasks", ("task",)),
)
COMPARABLE_KEYS = ("tasks_version", "contexts", "documents", "text", "prompts")  # equal in comparable results


def check_comparable(results: Sequence[dict[str, Any]], source: Path, first_source: Path) -> None:
    """Raise ConfigError if the last result cannot be compared with the first."""
    for name in COMPARABLE_KEYS:
        value, first = (result.get(name) for result in (results[-1], results[0]))
        if value != first:
            problem = f"{source} has {name}={value}, {first_source} has {first}: they cannot be compared"
            fix = "measure both with the same --contexts, --documents, --data and --chat-template"
            raise ConfigError(f"{problem}; {fix}")


def read_results(file: Path) -> list[dict[str, Any]]:
    """Read the output of --json: a result, or a list of two."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise input_error(f"MODEL={file} cannot be read ({error}); give a file written by --json", error) from None
    results = values if isinstance(values, list) else [values]
    try:
        if not results or not all(isinstance(result["model"], str) for result in results):
            raise ValueError
        for result in results:
            list(make_tables([result]))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"MODEL={file} has no results; give a file written by --json") from None
    return results


def column_names(results: Sequence[Any]) -> list[str]:
    return ["A", "B"][: len(results)] if len(results) > 1 else [""]


def model_names(results: Sequence[dict[str, Any]]) -> list[str]:
    """The names of two models, for a legend: the column and the directory, or the full path if the directories have
    the same name. One model needs none."""
    if len(results) < 2:
        return [""]
    short = [Path(result["model"]).name for result in results]
    names = short if len(set(short)) == len(short) else [result["model"] for result in results]
    return [f"{column}: {name}" for column, name in zip(column_names(results), names, strict=True)]


def make_tables(results: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield titles and rows. Two models get columns A and B."""
    if len(results) > 1:
        names = zip(column_names(results), results, strict=True)
        yield "models", [{"": name, "model": result["model"]} for name, result in names]
    figures = _merge_columns([list(_figure_rows(result)) for result in results], ("figure",))
    measured = [name for name in figures[0] if any(row[name] is not None for row in figures)] if figures else []
    rows = [{name: row[name] for name in measured} for row in figures]
    yield "figures", [row for row in rows if any(row[name] is not None for name in measured[1:])]
    for title, name, keys in TABLES:
        if rows := _merge_columns([result.get(name) or [] for result in results], keys):
            yield title, rows
    retrieval = [depth_rows(result["retrieval"]) for result in results]
    yield "retrieval by depth", _merge_columns(retrieval, ("task", "context"))


def explain_figures(results: Sequence[dict[str, Any]]) -> str:
    """Explain the figures that were measured and are not self-explanatory."""
    shown = (name for name in EXPLANATIONS if any(result.get(name) is not None for result in results))
    return " ".join(f"{name}: {EXPLANATIONS[name]}." for name in shown)


def explain_missing_retrieval(results: Sequence[dict[str, Any]]) -> str:
    """Say why models have no retrieval scores, and which ones unless it is all; empty if all have them."""
    missing = [result for result in results if not result["retrieval"]]
    if not missing:
        return ""
    names = [result["model"] for result in missing] if len(missing) < len(results) else []
    stopped = any(result.get("partial") for result in missing)
    reason = "the evaluation was stopped early" if stopped else "--samples 0 leaves the tasks out"
    return f"not measured{' for ' * bool(names)}{' and '.join(names)}: {reason}"


def _merge_columns(tables: Sequence[list[dict[str, Any]]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Join tables whose rows have equal `keys`."""
    joined = []
    for rows in zip(*tables, strict=False):  # a partial result has fewer rows
        row = {key: rows[0][key] for key in keys}
        for name, values in zip(column_names(tables), rows, strict=True):
            row |= {f"{key} {name}".strip(): value for key, value in values.items() if key not in keys}
        joined.append(row)
    return joined


def _figure_rows(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in FIGURES:
        yield {"figure": name, "mean": result.get(name), "error": result.get(f"{name}_error")}


def depth_rows(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for cell in cells:
        row = rows.setdefault((cell["task"], cell["context"]), {"task": cell["task"], "context": cell["context"]})
        row[f"{cell['depth']:.0%}"] = cell["score"]
    return list(rows.values())
