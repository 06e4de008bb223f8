"""Commands on models: evaluate, sample, verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ithaka.cli.options import AsJson, Force, Ranks, format_table, loading, parse_tokens
from ithaka.config import ConfigError, check_output, embedded_model, load_config
from ithaka.exits import ExitCode


def evaluate(
    models: Annotated[
        list[Path],
        typer.Argument(metavar="MODEL|RUN|ADAPTER|FILE...", help="One or two directories, or --json output."),
    ],
    contexts: Annotated[str, typer.Option(help="Context lengths; the loss is measured at the longest.")] = "8K,32K",
    data: Annotated[Path | None, typer.Option(metavar="PATH", help="Held-out data, as data.path.")] = None,
    documents: Annotated[int, typer.Option(min=1, help="Number of long documents.")] = 8,
    samples: Annotated[int, typer.Option(min=1, help="Samples per retrieval task, length and depth.")] = 2,
    ranks: Ranks = None,
    page: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write an HTML page.")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Measure how well one or two models use their context: loss by position, gain from long context, retrieval."""
    if len(models) > 2:
        raise ConfigError(f"{len(models)} models are too many to compare; give one or two")
    lengths = sorted({parse_tokens(text, "--contexts") for text in contexts.split(",")})
    if page is not None:
        check_output("--html", page, force)
    with loading() as status:
        from ithaka import evaluate as evaluation

    with status("evaluating"):
        results = evaluation.evaluate_all(models, lengths, data, ranks, documents, samples)
    if page is not None:
        page.write_text(evaluation.render_results(results), encoding="utf-8")
    if as_json:
        print(json.dumps(results if len(results) > 1 else results[0], indent=2))
        return
    for title, rows in evaluation.make_tables(results):
        print(f"{title}\n{format_table(rows)}\n")
    print(evaluation.FIGURES_LEGEND)


def sample(
    model: Annotated[
        Path, typer.Argument(metavar="RUN|MODEL|ADAPTER", help="A run (its latest checkpoint), or a model.")
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue; with a chat template, the user's message.")],
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.")] = 0.7,
    raw: Annotated[bool, typer.Option("--raw", help="Ignore the chat template.")] = False,
) -> None:
    """Generate a short text with plain transformers, on one device."""
    with loading() as status:
        from ithaka.evaluate import sample

    with status("generating"):
        text = sample(model, prompt, tokens, temperature, raw)
    print(text)


def verify(
    model: Annotated[str, typer.Argument(metavar="MODEL|CONFIG.yaml", help="A directory, a config.json or a name.")],
    cp: Annotated[int | None, typer.Option(min=1, help="Ranks that share a sequence; by default 4.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two layers of your model on cp ranks with plain transformers: loss, gradients, masks, documents."""
    from ithaka.plan.models import find_config

    settings, path = None, Path(model).expanduser()
    if path.suffix in (".yaml", ".yml"):
        settings = load_config(path)
        source = settings.model.path or embedded_model(settings.model.embedded)
    else:
        source = path if path.exists() else find_config(model)
    with loading() as status:
        from ithaka.verify import verify

    with status("comparing with plain transformers"):
        result = verify(source, settings, cp)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print("{model_type}, two layers, {weights} weights, cp={cp} on {device}".format(**result))
        print(format_table([_format_check(**check) for check in result["checks"]]))
        failed = [check["part"] for check in result["checks"] if not check["ok"]]
        print(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    raise typer.Exit(ExitCode.DONE if result["ok"] else ExitCode.FAILED)


def _format_check(part: str, where: str, error: float, allowed: float | None, ok: bool) -> dict[str, str]:
    """A table row. margin: the tolerance divided by the error."""
    margin = "info only" if allowed is None else f"{min(allowed / max(error, 1e-16), 1e6):,.0f} x" if allowed else ""
    limit = "" if allowed is None else f"{allowed:.0e}"
    return {
        "part": part if ok else f"FAILED: {part}",
        "error": f"{error:.1e}",
        "allowed": limit,
        "margin": margin,
        "largest in": where,
    }
