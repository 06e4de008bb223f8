"""Results of one model, or of two to compare: read them, and show them as tables and as a page."""

import html
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ithaka.config import ConfigError, format_value, input_error
from ithaka.evaluate.tasks import FIGURES, TASKS
from ithaka.report.page import render_charts, render_table

EXPLANATIONS = {
    "long_context_gain": (
        "loss with the full context minus loss with the last 4K tokens; below zero, the "
        "context helps"
    ),
    "key_tokens": "share of tokens whose loss the long context lowers by more than 2, to below 2",
}
TABLES = (
    ("loss by position", "loss_by_position", ("from", "to")),
    ("loss of trained tokens by turn", "loss_by_turn", ("turn",)),
    ("loss of trained tokens by position", "trained_loss_by_position", ("from", "to")),
    ("prompts", "tasks", ("task",)),
)
# The columns that identify a row.
ROW_KEYS: dict[str, tuple[str, ...]] = {name: keys for _, name, keys in TABLES}
ROW_KEYS |= {"divergence_by_position": ("from", "to"), "retrieval": ("task", "context", "depth")}
COMPARABLE_KEYS = ("tasks_version", "contexts", "documents", "text", "prompts")  # must be equal


def check_comparable(results: Sequence[dict[str, Any]], source: Path, first_source: Path) -> None:
    """Raise ConfigError if the last result cannot be compared with the first."""
    for name in COMPARABLE_KEYS:
        value = results[-1].get(name)
        first = results[0].get(name)
        if value != first:
            problem = (
                f"{source} has {name}={value}, {first_source} has {first}: they cannot be compared"
            )
            fix = "measure both with the same --contexts, --documents, --data and --chat-template"
            raise ConfigError(f"{problem}; {fix}")


def read_results(file: Path) -> list[dict[str, Any]]:
    """Read the output of --json: a result, or a list of two."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise input_error(
            f"MODEL={file} cannot be read ({error}); give a file written by --json", error
        ) from None
    results = values if isinstance(values, list) else [values]
    problems = [problem for result in results for problem in _find_problems(result)]
    if not results:
        problems = ["has no results"]
    if problems:
        raise ConfigError(f"MODEL={file} {problems[0]}; give a file written by --json")
    return results


def _find_problems(result: object) -> Iterator[str]:
    """What keeps a result from being shown."""
    if not isinstance(result, dict) or not isinstance(result.get("model"), str):
        yield "has no results"
        return
    if "retrieval" not in result:
        yield "has no results"
        return
    figures = {name: result.get(name) for figure in FIGURES for name in (figure, f"{figure}_error")}
    yield from _find_wrong_values(figures)
    for name, keys in ROW_KEYS.items():
        rows = result.get(name) or []
        if not isinstance(rows, list):
            yield f"has {name}={format_value(rows)}, which is no table"
            continue
        for row in rows:
            if not isinstance(row, dict) or any(row.get(key) is None for key in keys):
                yield f"has a row of {name} without {' or '.join(keys)}"
            else:
                yield from _find_wrong_values(row, f" in {name}")


def _find_wrong_values(values: dict[str, Any], where: str = "") -> Iterator[str]:
    for name, value in values.items():
        kind = "name" if name == "task" else "number"
        if not isinstance(value, str if kind == "name" else int | float | None):
            yield f"has {name}={format_value(value)}{where}, which is not a {kind}"


def column_names(results: Sequence[Any]) -> list[str]:
    return ["A", "B"][: len(results)] if len(results) > 1 else [""]


def model_names(results: Sequence[dict[str, Any]]) -> list[str]:
    """The names of two models, for a legend: the column and the directory, or the full path if the
    directories have the same name. One model needs none."""
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
    yield "figures", _same_columns(list(filter(_has_value, figures)))
    for title, name, keys in TABLES:
        if rows := _merge_columns([result.get(name) or [] for result in results], keys):
            yield title, _same_columns(rows)
    if "divergence_by_position" in results[-1]:
        rows = results[-1]["divergence_by_position"] or []
        yield "divergence by position, KL(A || B)", _same_columns(rows)
    retrieval = [_depth_rows(result["retrieval"] or []) for result in results]
    yield "retrieval by depth", _same_columns(_merge_columns(retrieval, ("task", "context")))


def explain_figures(results: Sequence[dict[str, Any]]) -> str:
    """Explain the figures that were measured and are not self-explanatory."""
    sentences = []
    for name, explanation in EXPLANATIONS.items():
        if any(result.get(name) is not None for result in results):
            sentences.append(f"{name}: {explanation}.")
    return " ".join(sentences)


def explain_missing_retrieval(results: Sequence[dict[str, Any]]) -> str:
    """Say why models have no retrieval scores, and which unless it is all; "" if all have them."""
    missing = [result for result in results if not result["retrieval"]]
    if not missing:
        return ""
    which = ""
    if len(missing) < len(results):
        which = f" for {' and '.join(result['model'] for result in missing)}"
    stopped = any(result.get("partial") for result in missing)
    reason = "the evaluation was stopped early" if stopped else "--samples 0 leaves the tasks out"
    return f"not measured{which}: {reason}"


def _merge_columns(
    tables: Sequence[list[dict[str, Any]]], keys: Sequence[str]
) -> list[dict[str, Any]]:
    """Join tables whose rows have equal `keys`."""
    joined = []
    for rows in zip(*tables, strict=False):  # a partial result has fewer rows
        row = {key: rows[0][key] for key in keys}
        for name, values in zip(column_names(tables), rows, strict=True):
            row |= {
                f"{key} {name}".strip(): value for key, value in values.items() if key not in keys
            }
        joined.append(row)
    return joined


def _same_columns(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give all rows the same columns, without those that have no value: a single document has no
    standard errors, and an evaluation that was stopped lacks depths."""
    names = dict.fromkeys(name for row in rows for name in row)
    for name in list(names):
        if all(row.get(name) is None for row in rows):
            del names[name]
    return [_select_columns(row, names) for row in rows]


def _select_columns(row: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: row.get(name) for name in names}


def _has_value(row: dict[str, Any]) -> bool:
    """Whether a row has more than its name, which comes first."""
    _, *values = row.values()
    return any(value is not None for value in values)


def _figure_rows(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in FIGURES:
        yield {"figure": name, "mean": result.get(name), "error": result.get(f"{name}_error")}


def _depth_rows(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for cell in cells:
        row = rows.setdefault(
            (cell["task"], cell["context"]), {"task": cell["task"], "context": cell["context"]}
        )
        row[f"{cell['depth']:.0%}"] = cell.get("score")
    return list(rows.values())


def render_results(results: Sequence[dict[str, Any]]) -> str:
    """Render a self-contained HTML page, with a retrieval heat map per task and model."""
    parts = []
    charts = {title: name for title, name, keys in TABLES if keys == ("from", "to")}
    for title, rows in list(make_tables(results))[:-1]:
        content = "not measured"
        if title in charts:
            name = charts[title]
            losses = [row.get("loss") for result in results for row in result.get(name) or []]
            if any(loss is not None and math.isfinite(loss) for loss in losses):
                content = f'<div class=chart data-rows="{name}"></div>'
        elif rows:
            content = render_table([list(row.values()) for row in rows], list(rows[0]))
        parts.append(f"<h2>{title}</h2><div class=scroll>{content}</div>")
        if title == "figures":
            parts.append(f"<p class=note>{explain_figures(results)}</p>")
    parts.append("<h2>retrieval</h2>")
    if missing := explain_missing_retrieval(results):
        parts.append(f"<p class=note>{html.escape(missing)}</p>")
    if not any(result["retrieval"] for result in results):
        return _render(results, parts)
    parts.append(
        "<p class=note>Share of correct answers, by context (rows) and depth (columns).</p><div "
        "class=maps>"
    )
    for task in TASKS:
        maps = []
        for name, result in zip(column_names(results), results, strict=True):
            rows = _depth_rows([cell for cell in result["retrieval"] or [] if cell["task"] == task])
            if rows := _same_columns(rows):
                _, _, *depths = rows[0]
                cells = [list(row.values())[1:] for row in rows]
                maps.append(render_table(cells, [name, *depths], "heat"))
        if maps:
            parts.append(f"<section><h3>{task}</h3><div class=maps>{''.join(maps)}</div></section>")
    return _render(results, [*parts, "</div>"])


def _render(results: Sequence[dict[str, Any]], parts: Sequence[str]) -> str:
    title = "Evaluation of " + " and ".join(result["model"] for result in results)
    drawn = [name for _, name, keys in TABLES if keys == ("from", "to")]
    data = []
    for name, result in zip(model_names(results), results, strict=True):
        curves = {key: result.get(key) or [] for key in drawn}
        data.append({"name": name, **curves})
    return render_charts(title, "".join(parts), data, "evaluation.js")
