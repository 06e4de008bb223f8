"""Evaluate models: Hugging Face directories, runs and adapters, each on all ranks."""

import json
import math
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import AutoConfig

from ithaka.checkpoint.export import export
from ithaka.comm.agree import gather_objects, raise_on_all_ranks
from ithaka.comm.mesh import default_device, end_process_group, make_mesh, start_process_group
from ithaka.comm.rank import is_local_rank_0, is_rank_0, local_rank_0
from ithaka.config import ConfigError, input_error
from ithaka.data.open import check_vocabulary
from ithaka.data.tokenizer import TOKENIZER_FILES, load_tokenizer
from ithaka.evaluate import tasks as evaluation
from ithaka.evaluate.compare import check_comparable, read_results
from ithaka.evaluate.tasks import (
    EvalText,
    Prompt,
    check_prompts,
    measure_all,
    read_prompts,
    read_text,
)
from ithaka.exits import ExitCode
from ithaka.facts.dtypes import default_dtype
from ithaka.facts.model_files import read_json
from ithaka.hub import fetch_model
from ithaka.layout import forward_layout, smallest_ring
from ithaka.log.console import show_share
from ithaka.model.build import build_model, has_weights
from ithaka.run import launch
from ithaka.trace.shapes import read_shape
from ithaka.weights.formats import read_base_metadata
from ithaka.weights.load import check_finite
from ithaka.weights.pretrained import merge_adapter

RESULT_FILE = "result.json"
SMALL_CONTEXT = 8192  # tokens


def evaluate_all(
    sources: Sequence[Path],
    contexts: Sequence[int],
    data: Path | None,
    ranks: int | None,
    num_documents: int,
    samples: int,
    tasks: Path | None = None,
    chat_template: Path | None = None,
) -> list[dict[str, Any]]:
    """Evaluate each source, or read its --json output, which may hold two results. Raise
    ConfigError if there are more than two, or they are not comparable."""
    stored = {source: read_results(source) for source in sources if source.is_file()}
    count = sum(len(stored[source]) if source in stored else 1 for source in sources)
    if count > 2:
        raise ConfigError(
            f"{count} results are too many to compare; give a file with two, or two files with "
            "one each"
        )
    if launch.under_torchrun() and len(sources) - len(stored) > 1:
        # The process group starts only once.
        fix = "write each result with --json, then give both files"
        raise ConfigError(f"{len(sources)} models cannot be evaluated in one torchrun; {fix}")
    results: list[dict[str, Any]] = []
    for source in sources:
        if source in stored:
            results += stored[source]
        else:
            base = sources[0] if results and not stored else None
            result = evaluate(
                source, contexts, data, ranks, num_documents, samples, tasks, chat_template, base
            )
            results.append(result)
        check_comparable(results, source, sources[0])
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
    base: Path | None = None,
) -> dict[str, Any]:
    """Evaluate a model's directory, a run or an adapter, and its divergence from `base`."""
    with tempfile.TemporaryDirectory(prefix="ithaka-evaluate-") as name:
        folder = Path(name)
        # Once per node, before the process group starts, in which an export would be collective.
        model = prepare_model(source, folder / "model") if is_local_rank_0() else source
        if launch.under_torchrun():
            start_process_group()
        model = gather_objects(model)[local_rank_0()]

        def read_inputs() -> tuple[EvalText, Sequence[Prompt], str | None]:
            shape = read_shape(model)
            tokenizer = load_tokenizer(None, model, chat_template)
            check_vocabulary(tokenizer, shape.vocab)
            text = read_text(data, tokenizer, max(contexts), num_documents)
            if samples:
                check_prompts(text, tokenizer, contexts)
            if tasks is None:
                return text, [], None
            prompts, digest = read_prompts(tasks, tokenizer)
            return text, prompts, digest

        text, prompts, digest = raise_on_all_ranks(read_inputs)
        other = None if base is None else prepare_model(base, folder / "base")
        if other is not None and read_shape(other).vocab != read_shape(model).vocab:
            print(
                f"no divergence: {source} and {base} have different vocabularies", file=sys.stderr
            )
            other = None
        longest = max([*contexts, *(len(prompt.tokens) for prompt in prompts)])
        hf_config = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
        positions = getattr(hf_config, "max_position_embeddings", None)
        if positions and longest > positions and is_rank_0():
            rule = f"exceed the {positions} positions of {source} (max_position_embeddings)"
            print(
                f"contexts of up to {longest} tokens {rule}: figures beyond them are extrapolated",
                file=sys.stderr,
            )
        # On a CPU, exchanges between ranks take longer than short sequences.
        is_small = not launch.num_gpus() and longest <= SMALL_CONTEXT
        asked = ranks
        if asked is None and is_small:
            asked = 1
        num_ranks = launch.decide_ranks("auto" if asked is None else asked, launch.num_gpus())
        work = (model, folder, text, list(contexts), samples, prompts, longest, other)
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
    """Return a directory with full weights: `source`, or `out`, exported or merged."""
    if (source / "config.yaml").is_file():
        is_adapter = (source / "model" / "adapter_config.json").is_file()
        return export(source, out, merge=is_adapter, as_trained=True)
    if not (source / "adapter_config.json").is_file():
        if not has_weights(source):
            problem = "has no safetensors" if source.exists() else "does not exist"
            raise ConfigError(
                f"MODEL={source} {problem}; give a directory with weights, an adapter, or a run"
            )
        return source
    settings = read_json(
        source / "adapter_config.json", "MODEL=", "give a directory that PEFT wrote"
    )
    base_path = Path(settings.get("base_model_name_or_path") or "")
    base = fetch_model(base_path, "base_model_name_or_path=")
    if not has_weights(base):
        raise ConfigError(
            f"MODEL={source} is an adapter whose base_model_name_or_path={base} has no "
            "safetensors; put the base model there, or give a merged one"
        )
    file = source / "adapter_model.safetensors"
    try:
        tensors = load_file(file)
        with safe_open(file, framework="pt") as opened:
            rounded = read_base_metadata(opened.metadata())
    except (OSError, SafetensorError) as error:
        raise input_error(
            f"MODEL={source}: {file.name} cannot be read ({error}); copy it again", error
        ) from None
    merge_adapter(base, source, tensors, out, rounded)
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
    other: Path | None = None,
) -> None:
    start_process_group()
    shapes = [read_shape(each) for each in (directory, other) if each is not None]
    cp = dist.get_world_size()
    ring = max(smallest_ring(cp, shape.heads) for shape in shapes)  # the same for both models
    dtype = default_dtype(default_device().type == "cuda")
    layouts = [
        forward_layout(shape.heads, shape.head_dim, cp, longest, dtype, ring) for shape in shapes
    ]
    mesh = make_mesh(cp, ring=ring)
    model = build_model(directory, mesh, layouts[0], trains=False)
    report = (
        EvaluationProgress(folder / RESULT_FILE).report
        if mesh.rank == 0
        else lambda result, share: None
    )
    result = measure_all(
        model,
        load_tokenizer(None, directory),
        text,
        contexts,
        samples,
        report=report,
        prompts=prompts,
    )
    if not math.isfinite(result["loss"] or 0.0):
        check_finite(model, f"MODEL={directory}", directory)
    if other is not None:
        base = build_model(other, mesh, layouts[1], trains=False)
        result["divergence_by_position"] = evaluation.measure_divergence(
            model, base, text.long, max(contexts)
        )
    report(result, 1.0)
    end_process_group()


class EvaluationProgress:
    """Writes the figures so far, for Ctrl-C, and shows on stderr how much is done."""

    def __init__(self, file: Path):
        self.file = file
        self.show = show_share("evaluating")

    def report(self, result: dict[str, Any], share: float) -> None:
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(result))
        part.replace(self.file)
        self.show(share)
