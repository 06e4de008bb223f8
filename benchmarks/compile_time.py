"""Measure how much longer the first step takes with `train.compile: auto`: `python
benchmarks/compile_time.py`.

Each row is a process of `ithaka profile`, which trains without saving: eagerly and compiled, each
first without caches of compiled code, then with those of the first process. Weights are random, the
data is Python's standard library. Prints one JSON line per process. `--compile true` compiles
models for which auto does not; `--models tiny --tokens 512` runs on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoConfig

from decoders import SHAPES
from ithaka.config.paths import shell_command
from ithaka.log.metrics import read_metrics, read_times

LAYERS = 4
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def write_config(model: str, tokens: int, folder: Path) -> Path:
    """Write the config.json of a model with a few layers."""
    shape = SHAPES[model] | {"num_hidden_layers": min(LAYERS, SHAPES[model]["num_hidden_layers"])}
    AutoConfig.for_model(**shape, max_position_embeddings=tokens).save_pretrained(folder)
    return folder / "config.json"


def measure(
    config: Path, tokens: int, compiles: str, caches: Path, run_dir: Path, limit_s: float
) -> dict[str, Any]:
    """Return the seconds of two steps in a new process, and what it compiled."""
    settings = {
        "model.path": config,
        "data.tokenizer": "bytes",
        "data.context": tokens,
        "parallel.ranks": 1,
    }
    options = [
        f"{name}={value}" for name, value in (settings | {"train.compile": compiles}).items()
    ]
    words = [
        "profile",
        "--steps",
        "2",
        "--run-dir",
        str(run_dir),
        *(w for each in options for w in ("--set", each)),
    ]
    folders = {name: str(caches / folder) for name, folder in CACHES.items()}
    command = [sys.executable, "-m", "ithaka", *words]
    try:
        run = subprocess.run(
            command, env=os.environ | folders, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return {"stopped_after_s": limit_s}
    if run.returncode:
        raise SystemExit(f"{shell_command(*words)} failed:\n{run.stderr[-2000:]}")
    compiled = [
        line.split(None, 1)[1] for line in run.stdout.splitlines() if line.startswith("  compile ")
    ]
    first, second = (
        row["step_s"] for row in read_metrics(run_dir / "metrics.jsonl") if row["step"]
    )
    startup_s = read_times(run_dir / "metrics.jsonl")["startup_s"]
    return {
        "first_step_s": first,
        "second_step_s": second,
        "compiled": compiled,
        "startup_s": startup_s,
    }


def main(
    models: Annotated[str, typer.Option(help="Names in decoders.py.")] = "olmo3-7b,gemma3-4b",
    tokens: Annotated[int, typer.Option(help="Tokens per sequence.")] = 16384,
    limit_s: Annotated[float, typer.Option(help="Longest time of a process.")] = 120.0,
    compile: Annotated[str, typer.Option(help="train.compile of the compiled runs.")] = "auto",
) -> None:
    """Measure how much longer the first step takes if layers are compiled."""
    for model in models.split(","):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            eager = dict[str, float | None]()
            config = write_config(model, tokens, folder / "model")
            for mode in ("false", compile):
                for caches in ("cold", "cached"):
                    figures = measure(
                        config, tokens, mode, folder / mode, folder / f"{mode}-{caches}", limit_s
                    )
                    first_s = figures.get("first_step_s")
                    if (eager_s := eager.setdefault(caches, first_s)) and first_s:
                        figures["longer_s"] = round(first_s - eager_s, 3)
                    print(
                        json.dumps({"model": model, "compile": mode, "caches": caches} | figures),
                        flush=True,
                    )


if __name__ == "__main__":
    typer.run(main)
