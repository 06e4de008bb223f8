"""Train with each optimizer from the same weights and data; compare losses, seconds and bytes of state with the plan.

    python benchmarks/optimizers.py --model SmolLM2-135M-Instruct --out runs/optimizers        # 200 steps of 2K tokens
    python benchmarks/optimizers.py --model small.json --tokenizer bytes --out DIR --steps 4 --context 64   # a CPU

adamw8bit needs torchao; on a CPU, leave out Muon, which is slow there (--names adamw,adamw8bit). Without --data, the
runs read Python's standard library.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ithaka.checkpoint.files import find_checkpoint
from ithaka.checkpoint.safe_load import SafeReader
from ithaka.cli.options import AsJson, print_rows
from ithaka.config import load_config
from ithaka.log.metrics import read_metrics
from ithaka.run.resolve import model_shape

MIB = 2**20


def train(name: str, settings: list[str], run_dir: Path) -> dict[str, Any]:
    """Run `ithaka train`, and read its results."""
    options = [f"optim.name={name}", *settings]
    command = [sys.executable, "-m", "ithaka", "train", "--run-dir", str(run_dir)]
    subprocess.run([*command, *(word for option in options for word in ("--set", option))], check=True)
    lines = [line for line in read_metrics(run_dir / "metrics.jsonl") if line.get("loss") is not None]
    losses = [line["loss"] for line in lines]
    validated = [line["val_loss"] for line in lines if line.get("val_loss") is not None]
    planned = model_shape(load_config(run_dir / "config.yaml")).moment_bytes(1)
    return {
        "optimizer": name,
        "steps": len(losses),
        "first loss": losses[0],
        "last 20 losses": statistics.mean(losses[-20:]),
        "val loss": validated[-1] if validated else None,
        "median s": statistics.median(line["step_s"] for line in lines),
        "state MiB": state_bytes(run_dir) / MIB,
        "planned MiB": planned / MIB,
    }


def state_bytes(run_dir: Path) -> int:
    """Bytes of the moments in the last checkpoint, over all ranks."""
    entries = SafeReader(find_checkpoint(run_dir)).read_metadata().state_dict_metadata
    moments = {key: entry for key, entry in entries.items() if key.startswith("moments.") and not key.endswith(".step")}
    return sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in moments.values())


def main(
    model: Annotated[str, typer.Option(help="A model directory or a config.json.")],
    out: Annotated[Path, typer.Option(help="A new directory for the runs.")],
    names: Annotated[str, typer.Option(help="Optimizers, separated by commas.")] = "adamw,adamw8bit,muon",
    steps: int = 200,
    context: str = "2K",
    lr: float = 1e-4,
    data: Annotated[str | None, typer.Option(help="As data.path.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="As data.tokenizer.")] = None,
    as_json: AsJson = False,
) -> None:
    settings = [f"model.path={model}", f"data.context={context}", f"train.steps={steps}", f"optim.lr={lr}"]
    settings += ["optim.warmup_steps=10", "train.validate_every=0", "train.save_minutes=0"]
    settings += [f"data.path={data}"] if data else []
    settings += [f"data.tokenizer={tokenizer}"] if tokenizer else []
    print_rows([train(name, settings, out / name) for name in names.split(",")], as_json)


if __name__ == "__main__":
    typer.run(main)
