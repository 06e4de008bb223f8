"""`ithaka evaluate`: one model, or two compared, in tables and on an HTML page. `ithaka sample`: a short text."""

import html
import json
import math
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from ithaka.checkpoint.export import export
from ithaka.comm.agree import gather_objects, raise_on_all_ranks
from ithaka.comm.mesh import default_device, end_process_group, make_mesh, start_process_group
from ithaka.comm.rank import is_local_rank_0, is_rank_0, local_rank_0
from ithaka.config import AdapterConfig, ConfigError, input_error
from ithaka.data.documents.formats import BadRecord, parse_tools, to_messages
from ithaka.data.open import check_vocabulary
from ithaka.data.tokenizer import TOKENIZER_FILES, load_tokenizer
from ithaka.evaluate.tasks import FIGURES, TASKS, EvalText, Prompt, check_prompts, measure_all, read_prompts, read_text
from ithaka.exits import ExitCode
from ithaka.hub import fetch_model
from ithaka.layout import default_dtype
from ithaka.log.console import show_share
from ithaka.model.build import build_model, has_weights
from ithaka.plan.read_config import read_json
from ithaka.plan.search import forward_layout
from ithaka.report.page import render_page, render_table
from ithaka.run import launch
from ithaka.run.shapes import read_shape
from ithaka.weights.adapters import load_pretrained, merge_adapter
from ithaka.weights.load import check_finite
from ithaka.weights.quantized import BASE_QUANTIZATION, round_weights

RESULT_FILE = "result.json"
SMALL_CONTEXT = 8192  # tokens
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


def evaluate_all(sources: Sequence[Path], *options: Any) -> list[dict[str, Any]]:
    """Evaluate each source, or read its --json output, which may hold two results. Raise ConfigError if there are more
    than two, or they are not comparable."""
    stored = {source: _read_results(source) for source in sources if source.is_file()}
    if (count := sum(len(stored[source]) if source in stored else 1 for source in sources)) > 2:
        raise ConfigError(f"{count} results are too many to compare; give a file with two, or two files with one each")
    results: list[dict[str, Any]] = []
    if launch.under_torchrun() and len(sources) - len(stored) > 1:  # the process group starts only once
        fix = "write each result with --json, then give both files"
        raise ConfigError(f"{len(sources)} models cannot be evaluated in one torchrun; {fix}")
    for source in sources:
        results += stored.get(source) or [evaluate(source, *options)]
        for name in COMPARABLE_KEYS:
            value, first = (result.get(name) for result in (results[-1], results[0]))
            if value != first and not (name == "text" and None in (value, first)):  # missing in old files
                problem = f"{source} has {name}={value}, {sources[0]} has {first}: they cannot be compared"
                fix = "measure both with the same --contexts, --documents, --data and --chat-template"
                raise ConfigError(f"{problem}; {fix}")
    return results


def _read_results(file: Path) -> list[dict[str, Any]]:
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


def evaluate(
    source: Path,
    contexts: Sequence[int],
    data: Path | None,
    ranks: int | None,
    num_documents: int,
    samples: int,
    tasks: Path | None = None,
    chat_template: Path | None = None,
) -> dict[str, Any]:
    """Evaluate a Hugging Face directory, a run's latest checkpoint or an adapter, with all ranks in one cp group."""
    with tempfile.TemporaryDirectory(prefix="ithaka-evaluate-") as name:
        folder = Path(name)
        # Once per node, before the process group starts, in which an export would be collective.
        model = prepare_model(source, folder / "model") if is_local_rank_0() else source
        if launch.under_torchrun():
            start_process_group()
        model = gather_objects(model)[local_rank_0()]

        def read_inputs() -> tuple[EvalText, Sequence[Prompt], str | None]:
            shape, tokenizer = read_shape(model), load_tokenizer(None, model, chat_template)
            check_vocabulary(tokenizer, shape.vocab)
            text = read_text(data, tokenizer, max(contexts), num_documents)
            if samples:
                check_prompts(text, tokenizer, contexts)
            return text, *(read_prompts(tasks, tokenizer) if tasks is not None else ([], None))

        text, prompts, digest = raise_on_all_ranks(read_inputs)
        longest = max([*contexts, *(len(prompt.tokens) for prompt in prompts)])
        positions = getattr(AutoConfig.from_pretrained(model).get_text_config(), "max_position_embeddings", None)
        if positions and longest > positions and is_rank_0():
            rule = f"exceed the {positions} positions of {source} (max_position_embeddings)"
            print(f"contexts of up to {longest} tokens {rule}: figures beyond them are extrapolated", file=sys.stderr)
        # On a CPU, exchanges between ranks take longer than short sequences.
        is_small = not launch.num_gpus() and longest <= SMALL_CONTEXT
        num_ranks = launch.decide_ranks((1 if is_small else "auto") if ranks is None else ranks, launch.num_gpus())
        work = model, folder, text, list(contexts), samples, prompts, longest
        code = launch.run_ranks(_evaluate_rank, work, num_ranks)
        has_result = (folder / RESULT_FILE).is_file()  # under torchrun, only rank 0 has it
        if not has_result or code not in (ExitCode.DONE, ExitCode.SIGNALED + signal.SIGINT):
            raise SystemExit(code)
        return {
            "model": str(source),
            "prompts": digest,
            **json.loads((folder / RESULT_FILE).read_text()),
            "partial": code != ExitCode.DONE,
        }


def prepare_model(source: Path, out: Path) -> Path:
    """Return a directory with full weights: `source`, or `out` after exporting a run or merging an adapter."""
    if (source / "config.yaml").is_file():
        return export(source, out, merge=(source / "model" / "adapter_config.json").is_file(), four_bit=True)
    if not (source / "adapter_config.json").is_file():
        if not has_weights(source):
            problem = "has no safetensors" if source.exists() else "does not exist"
            raise ConfigError(f"MODEL={source} {problem}; give a directory with weights, an adapter, or a run")
        return source
    settings = read_json(source / "adapter_config.json", "MODEL=", "give a directory that PEFT wrote")
    base = fetch_model(Path(settings.get("base_model_name_or_path") or ""), "base_model_name_or_path=")
    if not has_weights(base):
        raise ConfigError(
            f"MODEL={source} is an adapter whose base_model_name_or_path={base} has no safetensors; put the base model "
            "there, or give a merged one"
        )
    file = source / "adapter_model.safetensors"
    try:
        tensors = load_file(file)
        with safe_open(file, framework="pt") as opened:
            quantization = json.loads((opened.metadata() or {}).get(BASE_QUANTIZATION, "{}"))
    except (OSError, SafetensorError) as error:
        raise input_error(f"MODEL={source}: {file.name} cannot be read ({error}); copy it again", error) from None
    change = None
    if quantization:
        adapter = AdapterConfig(base=quantization["base"], unquantized=tuple(quantization["unquantized"]))
        change = partial(round_weights, adapter=adapter)
    merge_adapter(base, source, tensors, out, change)
    has_tokenizer = any((source / file).is_file() for file in TOKENIZER_FILES)
    load_tokenizer(None, source if has_tokenizer else base).hf.save_pretrained(out)
    return out


def _evaluate_rank(
    directory: Path,
    folder: Path,
    text: EvalText,
    contexts: list[int],
    samples: int,
    prompts: Sequence[Prompt],
    longest: int,
) -> None:
    start_process_group()
    shape, cp = read_shape(directory), dist.get_world_size()
    layout = forward_layout(shape, cp, longest, default_dtype(default_device().type == "cuda"))
    mesh = make_mesh(cp, ring=layout.ring)
    model = build_model(directory, mesh, layout, trains=False)
    report = Progress(folder / RESULT_FILE).report if mesh.rank == 0 else lambda result, share: None
    result = measure_all(
        model, load_tokenizer(None, directory), text, contexts, samples, report=report, prompts=prompts
    )
    if not math.isfinite(result["loss"] or 0.0):
        check_finite(model, f"MODEL={directory}", directory)
    report(result, 1.0)
    end_process_group()


class Progress:
    """Writes the figures so far, for Ctrl-C, and shows on stderr how much is done."""

    def __init__(self, file: Path):
        self.file, self.show = file, show_share("evaluating")

    def report(self, result: dict[str, Any], share: float) -> None:
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(result))
        part.replace(self.file)
        self.show(share)


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
    retrieval = [_depth_rows(result["retrieval"]) for result in results]
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


def _depth_rows(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for cell in cells:
        row = rows.setdefault((cell["task"], cell["context"]), {"task": cell["task"], "context": cell["context"]})
        row[f"{cell['depth']:.0%}"] = cell["score"]
    return list(rows.values())


def render_results(results: Sequence[dict[str, Any]]) -> str:
    """Render a self-contained HTML page, with a retrieval heat map per task and model."""
    parts = []
    charts = {title: name for title, name, keys in TABLES if keys == ("from", "to")}
    for title, rows in list(make_tables(results))[:-1]:
        if title in charts:
            content = render_chart([result.get(charts[title]) or [] for result in results], model_names(results))
        else:
            content = render_table([list(row.values()) for row in rows], list(rows[0])) if rows else "not measured"
        parts.append(f"<h2>{title}</h2><div class=scroll>{content}</div>")
        parts += [f"<p class=note>{explain_figures(results)}</p>"] * (title == "figures")
    parts.append("<h2>retrieval</h2>")
    if missing := explain_missing_retrieval(results):
        parts.append(f"<p class=note>{html.escape(missing)}</p>")
    if not any(result["retrieval"] for result in results):
        return _render(results, parts)
    parts.append("<p class=note>Share of correct answers, by context (rows) and depth (columns).</p><div class=maps>")
    for task in TASKS:
        maps = []
        for name, result in zip(column_names(results), results, strict=True):
            rows = _depth_rows([cell for cell in result["retrieval"] if cell["task"] == task])
            _, _, *depths = rows[0] if rows else ("", "")
            maps.append(render_table([list(row.values())[1:] for row in rows], [name, *depths], "heat"))
        parts.append(f"<section><h3>{task}</h3><div class=maps>{''.join(maps)}</div></section>")
    return _render(results, [*parts, "</div>"])


def _render(results: Sequence[dict[str, Any]], parts: Sequence[str]) -> str:
    return render_page("Evaluation of " + " and ".join(result["model"] for result in results), "".join(parts))


def render_chart(lines: Sequence[list[dict[str, Any]]], names: Sequence[str]) -> str:
    """An SVG chart of the loss by position, on a logarithmic axis, with one line per model."""
    lines = [[row for row in rows if row["loss"] is not None and math.isfinite(row["loss"])] for rows in lines]
    points = [row for rows in lines for row in rows]
    if not points:
        return "not measured"
    legend = [name for name in names if name]
    left, top, width, height = 48, 10 + 18 * len(legend), 640, 220
    first = min(points, key=lambda row: row["to"])
    low, high = math.log2(max(first["from"], first["to"] / 2)), math.log2(max(row["to"] for row in points))
    ticks = find_ticks([row["loss"] for row in points])

    def x(position: float) -> float:
        return left + width * min(max((math.log2(max(position, 1)) - low) / max(high - low, 1e-9), 0), 1)

    def y(loss: float) -> float:
        return top + height * (ticks[-1] - loss) / (ticks[-1] - ticks[0])

    parts = []
    for loss in ticks:
        parts.append(f'<line class=grid x1="{left}" x2="{left + width}" y1="{y(loss):.1f}" y2="{y(loss):.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:g}</text>')
    for position in sorted({row["to"] for row in points}):
        label = f"{position // 1024}K" if position % 1024 == 0 else f"{position}"
        parts.append(f'<text x="{x(position):.1f}" y="{top + height + 18}" text-anchor="middle">{label}</text>')
    for number, (found, name) in enumerate(zip(lines, map(html.escape, names), strict=True)):
        edges = [f"{x(row[edge]):.1f},{y(row['loss']):.1f}" for row in found for edge in ("from", "to")]
        parts.append(f'<polyline class="line{number}" points="{" ".join(edges)}"/>')
        for row in found:
            middle = (x(row["from"]) + x(row["to"])) / 2
            label = " ".join(filter(None, (name, f"{row['from']:,} to {row['to']:,}:")))
            more = f" ± {row['error']:.3g}" if row.get("error") else ""
            parts.append(
                f'<circle class="line{number}" cx="{middle:.1f}" cy="{y(row["loss"]):.1f}" r="3">'
                f"<title>{label} {row['loss']:.4g}{more}</title></circle>"
            )
        if name:
            parts.append(f'<text class="line{number}" x="{left}" y="{12 + 18 * number}">{name}</text>')
    box = f'viewBox="0 0 {left + width + 20} {top + height + 28}"'
    return f'<svg class=lines role=img aria-label="Loss by position, in tokens" {box}>{"".join(parts)}</svg>'


def find_ticks(values: Sequence[float]) -> list[float]:
    """Five round numbers, equally spaced, that enclose the values closely: they span at least 1% of the largest."""
    low, high = min(values), max(values)
    span = max(high - low, 0.01 * abs(high), 1e-6)
    unit = 10 ** math.floor(math.log10(span / 4))
    for step in (times * unit for times in (1, 2, 2.5, 5, 10, 20)):
        first = math.floor(low / step)
        if (first + 4) * step >= high and 4 * step >= span:
            break
    return [(first + i) * step for i in range(5)]


def sample(
    source: Path, prompt: str, num_tokens: int, temperature: float, raw: bool = False, system: str | None = None,
    messages_file: Path | None = None, tools_file: Path | None = None,
) -> str:  # fmt: skip
    """Answer `prompt`, after the messages of a file if given, with the chat template; or continue it if there is no
    template or `raw`. Runs plain transformers with its key/value cache, up to a stop token."""
    record = _read_messages(messages_file) if messages_file else {"messages": []}
    if not prompt and not record["messages"]:
        file = f" and --messages={messages_file} has nothing to answer" if messages_file else ""
        raise ConfigError(
            f"--prompt='' has no tokens{file}; give at least a word, or --messages that end with the user's"
        )
    if (text := prompt + (system or "")).encode(errors="replace").decode() != text:
        raise ConfigError(f"--prompt={prompt!r} or --system={system!r} is not valid Unicode; write UTF-8")
    if 0 < temperature < 0.01:
        raise ConfigError(f"--temperature={temperature:g} is too close to 0; use 0 (greedy), or at least 0.01")
    try:
        tools = parse_tools(tools_file.read_text(encoding="utf-8") if tools_file else record.get("tools"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tools={tools_file} has no tools ({error}); write a JSON list of tools") from error
    disable_progress_bar()
    device = default_device()
    dtype = getattr(torch, default_dtype(device.type == "cuda"))
    with tempfile.TemporaryDirectory(prefix="ithaka-sample-") as name:
        directory = prepare_model(source, Path(name) / "model")
        model = load_pretrained(directory, dtype=dtype).to(device).eval()
        tokenizer = load_tokenizer(None, directory)
    text, prefix, stop = prompt, tokenizer.document_prefix, None
    if tokenizer.hf.chat_template and not raw:
        messages = [{"role": "system", "content": system}] if system else []
        messages += [*record["messages"], *([{"role": "user", "content": prompt}] if prompt else [])]
        try:
            text = tokenizer.chat.apply(messages, tools, add_generation_prompt=True)
        except BadRecord as error:
            raise ConfigError(f"MODEL={source}: {error}, or use --raw") from None
        prefix, stop = (), tokenizer.chat.stop_token
    elif system or messages_file or tools_file:
        raise ConfigError("--system, --messages and --tools need a chat template; use --prompt, without --raw")
    ids = [*prefix, *tokenizer.encode_batch([text])[0].tolist()]
    if not ids:
        raise ConfigError("--prompt='' has no tokens; give at least a word")
    options: dict[str, Any] = {
        "do_sample": temperature > 0,
        **({"temperature": temperature} if temperature > 0 else {}),
    }
    found = (tokenizer.eos_id, None if stop is None else tokenizer.hf.convert_tokens_to_ids(stop))
    if stops := [token for token in found if token is not None]:
        options["eos_token_id"] = stops
    prompt_ids = torch.tensor([ids], device=device)
    inputs = {"input_ids": prompt_ids, "attention_mask": torch.ones_like(prompt_ids), "use_cache": True}

    def check_logits(ids: Tensor, logits: Tensor) -> Tensor:
        if logits.isnan().any():
            check_finite(model, f"MODEL={source}", directory if directory == source else None)
        return logits

    options["logits_processor"] = [check_logits]
    generated = model.generate(**inputs, max_new_tokens=num_tokens, pad_token_id=tokenizer.pad_id, **options)
    return tokenizer.hf.decode(generated[0, len(ids) :].tolist(), skip_special_tokens=True)


def _read_messages(file: Path) -> dict[str, Any]:
    """Read a list of messages, or the first record of a file, without answers at its end."""
    try:
        text = file.read_text(encoding="utf-8")
        record = json.loads(text.splitlines()[0] if file.suffix == ".jsonl" else text)
        record = record if isinstance(record, dict) else {"messages": record}
        if not (raw := record.get("messages") or record.get("conversations")):
            raise ValueError("no field messages")
        messages = [m for n, each in enumerate(raw, 1) for m, _, _ in to_messages(each, f"message {n}", "drop")]
    except (OSError, ValueError, TypeError, LookupError) as error:
        fix = 'write [{"role": "user", "content": "..."}]'
        raise ConfigError(f"--messages={file} has no messages ({error}); {fix}, or a record with messages") from error
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return {**record, "messages": messages}
