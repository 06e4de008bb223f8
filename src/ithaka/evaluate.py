"""`ithaka evaluate`: a model, or two side by side, in tables and on a page."""

import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file

from ithaka import launch
from ithaka.config import ConfigError
from ithaka.data.tokenizer import TOKENIZER_FILES, load_tokenizer
from ithaka.dist.mesh import default_device, end_process_group, make_mesh, start_process_group
from ithaka.exits import ExitCode
from ithaka.export import export
from ithaka.layout import default_dtype
from ithaka.measure import TASKS, EvalText, check_prompts, measure_all, read_text
from ithaka.model.adapters import merge_adapter
from ithaka.model.build import build_model, has_weights
from ithaka.plan.search import forward_layout
from ithaka.plan.shape import read_json, read_shape
from ithaka.report.html import render_page, render_table

RESULT_FILE = "result.json"
FIGURES_LEGEND = (
    "long_context_gain: loss with all before a token minus loss with the last 4K only; below zero, it helps. "
    "key_tokens: share of tokens that it helps by more than 2, to a loss below 2."
)
FIGURES = ("loss", "long_context_gain", "key_tokens", "short_context_loss")
COMPARABLE_KEYS = ("tasks_version", "contexts", "documents", "text")  # of figures that can be compared


def evaluate_all(sources: Sequence[Path], *how: Any) -> list[dict[str, Any]]:
    """Of each source, as `evaluate` gives it, or read from a file that has it; refuses what cannot be compared."""
    earlier = {each: read_json(each, "MODEL=", "give what --json wrote") for each in sources if each.is_file()}
    all_found: list[dict[str, Any]] = []
    if launch.under_torchrun() and len(sources) - len(earlier) > 1:  # whose ranks meet only once
        way = "write each result with --json, then give both files"
        raise ConfigError(f"{len(sources)} models under torchrun: it measures one at a time; {way}")
    for source in sources:
        all_found.append(earlier.get(source) or evaluate(source, *how))
        for name in COMPARABLE_KEYS:
            mine, first = (found.get(name) for found in (all_found[-1], all_found[0]))
            if mine != first and not (name == "text" and None in (mine, first)):  # which earlier versions left out
                what = f"{source} has {name}={mine} and {sources[0]} {first}, so that figures cannot be compared"
                raise ConfigError(f"{what}; measure both with the same --contexts, --documents and --data")
    return all_found


def evaluate(
    source: Path, contexts: Sequence[int], data: Path | None, ranks: int | None, num_documents: int, samples: int
) -> dict[str, Any]:
    """Of a Hugging Face directory, a run's latest checkpoint or an adapter: starts the ranks, which share each
    sequence."""
    with tempfile.TemporaryDirectory(prefix="ithaka-evaluate-") as name:
        folder = Path(name)
        model = prepare_model(source, folder / "model")
        read_shape(model)
        tokenizer = load_tokenizer(None, model)
        text = read_text(data, tokenizer, max(contexts), num_documents)
        check_prompts(text, tokenizer, contexts)
        num_ranks = launch.decide_ranks(ranks or "auto", launch.num_gpus())
        if code := launch.run_ranks(_evaluate_rank, (model, folder, text, list(contexts), samples), num_ranks):
            raise SystemExit(code)
        if not (folder / RESULT_FILE).is_file():  # under torchrun rank 0 has it
            raise SystemExit(ExitCode.DONE)
        return {"model": str(source), **json.loads((folder / RESULT_FILE).read_text())}


def prepare_model(source: Path, out: Path) -> Path:
    """A directory with the whole model: `source`, or `out`, where a run is exported and an adapter merged."""
    if (source / "config.yaml").is_file():
        return export(source, out, merge=(source / "model" / "adapter_config.json").is_file())
    if not (source / "adapter_config.json").is_file():
        if not has_weights(source):
            problem = "has no safetensors" if source.exists() else "does not exist"
            raise ConfigError(f"MODEL={source} {problem}; give a directory with weights, an adapter, or a run")
        return source
    settings = read_json(source / "adapter_config.json", "MODEL=", "give a directory that PEFT wrote")
    base = Path(settings.get("base_model_name_or_path") or "")
    if not has_weights(base):
        way = "put the base model there, or give a merged one"
        raise ConfigError(
            f"MODEL={source} is an adapter whose base_model_name_or_path={base} has no safetensors; {way}"
        )
    merge_adapter(base, source, load_file(source / "adapter_model.safetensors"), out)
    has_tokenizer = any((source / file).is_file() for file in TOKENIZER_FILES)
    load_tokenizer(None, source if has_tokenizer else base).hf.save_pretrained(out)
    return out


def _evaluate_rank(directory: Path, folder: Path, text: EvalText, contexts: list[int], samples: int) -> None:
    start_process_group()
    shape, cp = read_shape(directory), dist.get_world_size()
    layout = forward_layout(shape, cp, max(contexts), default_dtype(default_device().type == "cuda"))
    mesh = make_mesh(cp, ring=layout.ring)
    model = build_model(directory, mesh, layout, trains=False)
    found = measure_all(model, load_tokenizer(None, directory), text, contexts, samples)
    if mesh.rank == 0:
        (folder / RESULT_FILE).write_text(json.dumps(found))
    end_process_group()


def column_names(all_found: Sequence[Any]) -> list[str]:
    return ["A", "B"][: len(all_found)] if len(all_found) > 1 else [""]


def make_tables(all_found: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Titles and rows: figures, loss by position, and retrieval, a row for each task and context. Two models have
    columns of their own, A and B."""
    if len(all_found) > 1:
        yield (
            "models",
            [{"": m, "model": each["model"]} for m, each in zip(column_names(all_found), all_found, strict=True)],
        )
    yield "figures", _merge_columns([list(_figure_rows(each)) for each in all_found], ("figure",))
    yield "loss by position", _merge_columns([each["loss_by_position"] for each in all_found], ("from", "to"))
    yield (
        "retrieval by depth",
        _merge_columns([_depth_rows(each["retrieval"]) for each in all_found], ("task", "context")),
    )


def _merge_columns(make_tables: Sequence[list[dict[str, Any]]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Tables with the same `keys` in each row, as one."""
    joined = []
    for rows in zip(*make_tables, strict=True):
        own = (
            {f"{k} {m}".strip(): v for k, v in row.items() if k not in keys}
            for m, row in zip(column_names(make_tables), rows, strict=True)
        )
        joined.append({k: rows[0][k] for k in keys} | dict(itertools.chain.from_iterable(each.items() for each in own)))
    return joined


def _figure_rows(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in FIGURES:
        yield {"figure": name, "mean": found.get(name), "error": found.get(f"{name}_error")}


def _depth_rows(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for cell in cells:
        row = rows.setdefault((cell["task"], cell["context"]), {"task": cell["task"], "context": cell["context"]})
        row[f"{cell['depth']:.0%}"] = cell["score"]
    return list(rows.values())


def render_results(all_found: Sequence[dict[str, Any]]) -> str:
    """An HTML page of one file. Retrieval: of each task a heat map for each model, beside each other."""
    parts = []
    for title, rows in list(make_tables(all_found))[:-1]:
        table = render_table([list(row.values()) for row in rows], list(rows[0]))
        parts.append(f"<h2>{title}</h2><div class=scroll>{table}</div>")
        parts += [f"<p class=note>{FIGURES_LEGEND}</p>"] * (title == "figures")
    parts.append("<h2>retrieval</h2><p class=note>Share of answers found, by context (rows) and depth (columns).</p>")
    parts.append("<div class=maps>")
    for task in TASKS:
        maps = []
        for mark, found in zip(column_names(all_found), all_found, strict=True):
            rows = _depth_rows([cell for cell in found["retrieval"] if cell["task"] == task])
            _, _, *depths = rows[0]
            maps.append(render_table([list(row.values())[1:] for row in rows], [mark, *depths], "heat"))
        parts.append(f"<section><h3>{task}</h3><div class=maps>{''.join(maps)}</div></section>")
    parts.append("</div>")
    return render_page("Evaluation of " + " and ".join(found["model"] for found in all_found), "".join(parts))
