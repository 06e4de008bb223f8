"""Train a model with all its layers for a few steps, with the plan that `ithaka train` chooses.

Planned figures are next to measured ones.

    python benchmarks/depth.py --list                        # the runs and their plans for one H200
    python benchmarks/depth.py llama-8b-128k --out results   # one run
    python benchmarks/depth.py tiny                          # a tiny model; needs no GPU

Weights are random and drawn on the GPU, so nothing is downloaded. Data are random tokens, one
document per sequence. Three steps each, or two if a step is planned to take more than five minutes;
tokens/s are those of later steps, or of the only one. Prints one line and writes NAME.json, which
is updated after every step, NAME.log and NAME.metrics.jsonl.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ithaka.checks.doctor import query_gpu
from ithaka.config import parse_count
from ithaka.log.metrics import read_metrics, read_times
from ithaka.plan.hardware import find_hardware
from ithaka.plan.models import find_config
from ithaka.plan.search import Plan
from ithaka.run.check_request import make_request
from ithaka.run.launch import num_gpus

GIB = 2**30
H200 = ("1xH200", "134GB")  # with 125 GiB of host memory
LONG_STEP_S = 300.0  # planned, above which two steps are enough
# the GPU's clock is read every five seconds
POLL_S = 0.2
SAMPLE_POLLS = 25
BUSY_PERCENT = 50.0
STARTUP_S = 60.0  # expected before the first step: imports, random weights, kernels
TINY = {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class Case:
    model: str
    context: str
    # section.key -> value, besides the plan's
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def model_config(self) -> dict[str, Any]:
        return TINY if self.model == "tiny" else find_config(self.model)

    def plan(self) -> Plan | None:
        """Return the plan for one H200; None for the tiny model."""
        if self.model == "tiny":
            return None
        overrides = [f"{name}={value}" for name, value in self.settings.items()]
        return make_request(
            self.model, find_hardware(H200[0], None, H200[1]), self.context, 1, overrides
        ).plan()


ADAPTERS = {"adapter.rank": 16}
CASES = {
    "tiny": Case("tiny", "256", ADAPTERS | {"adapter.base": "mxfp4"}),
    **{
        f"llama-8b-{length}": Case("llama3.1-8b", length, ADAPTERS)
        for length in ("128k", "256k", "512k")
    },
    "1b-512k": Case("llama3.2-1b", "512k"),
    **{
        f"gpt-oss-20b-{length}": Case("gpt-oss-20b", length, ADAPTERS | {"adapter.base": "mxfp4"})
        for length in ("256k", "512k", "1m")
    },
    "gemma-3-4b-64k": Case("gemma-3-4b", "64k"),
    "gemma-3-4b-256k": Case("gemma-3-4b", "256k"),
    "qwen3-30b-a3b-256k": Case("qwen3-30b-a3b", "256k", ADAPTERS | {"adapter.base": "nf4"}),
    "qwen3.5-9b-256k": Case("qwen3.5-9b", "256k", ADAPTERS),
    "llama-8b-full-128k": Case("llama3.1-8b", "128k", {"optim.name": "adamw8bit"}),
}


def write_inputs(case: Case, steps: int, folder: Path) -> Path:
    """Write the model's config.json, a tokenizer with its vocabulary, random tokens and the run's
    settings, whose path is returned."""
    config = case.model_config
    context = parse_count(case.context)
    assert context is not None
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    vocab = {f"t{i}": i for i in range(config["vocab_size"])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder / "tokenizer")
    tokens = np.random.default_rng(0).integers(config["vocab_size"], size=(steps, context))
    lines = (json.dumps({"input_ids": sequence.tolist()}) for sequence in tokens)
    (folder / "tokens.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    settings: dict[str, Any] = {
        "model": {"path": str(folder / "config.json")},
        "data": {
            "path": str(folder / "tokens.jsonl"),
            "tokenizer": str(folder / "tokenizer"),
            "context": context,
        },
        "parallel": {"ranks": 1},
        "train": {"steps": steps, "validate_every": 0, "validate_sequences": 0, "save_minutes": 0},
    }
    settings["data"]["validation_fraction"] = 0
    for name, value in case.settings.items():
        section, key = name.split(".")
        settings.setdefault(section, {})[key] = value
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def read_results(run_dir: Path) -> dict[str, Any]:
    """Return planned and measured figures, from the files that the run has written so far."""
    records = [record for record in read_metrics(run_dir / "metrics.jsonl") if record["step"]]
    if not records:
        return {}
    plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    later = [record["step_s"] for record in records[1:]]
    tokens_per_s = records[0]["tokens"] / statistics.mean(later or [records[0]["step_s"]])
    row: dict[str, Any] = {
        "tokens/s": {"planned": plan.get("tokens_per_s"), "measured": tokens_per_s},
        "peak GiB": {"planned": sum(plan["peak_bytes"].values()) / GIB, "measured": None},
        "host GiB": {
            "planned": plan["host_bytes"] / GIB,
            "measured": records[-1]["host_peak_bytes"] / GIB,
        },
        "first step s": records[0]["step_s"],
        "later steps s": later,
        "first / later": records[0]["step_s"] / statistics.mean(later) if later else None,
        "loss": [record["loss"] for record in records],
        "grad norm": [record["grad_norm"] for record in records],
        "label tokens": [record["label_tokens"] for record in records],
        "mfu": records[-1]["mfu"],
    }
    if (peak := records[-1]["device_peak_bytes"]) is not None:
        reserved = records[-1]["device_reserved_bytes"]
        row["peak GiB"]["measured"] = peak / GIB
        row |= {"reserved GiB": reserved / GIB, "reserved - allocated GiB": (reserved - peak) / GIB}
        row["allocator retries"] = records[-1]["allocator_retries"]
    times = read_times(run_dir / "metrics.jsonl")
    row |= {name: times[name] for name in ("startup_s", "pinning") if name in times}
    if "save_s" in times:
        row |= {"save s": times["save_s"], "save GiB": times["saved_bytes"] / GIB}
    if seconds := plan.get("seconds"):
        row["planned seconds"] = seconds
    return row | {"layout": plan["layout"], "gpus": plan["gpus"]}


def sample_gpu() -> list[float]:
    """Return the GPU's SM clock in MHz, power draw in W and utilization in percent; 0 without
    nvidia-smi."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    return query_gpu(gpu, "clocks.sm", "power.draw", "utilization.gpu")


def read_clock(samples: list[list[float]]) -> dict[str, Any]:
    """Return the median clock and power of a busy GPU. One at its power limit lowers its clock, and
    so tokens/s."""
    busy = [sample for sample in samples if sample[2] > BUSY_PERCENT]
    names = ("clock MHz", "power W") if busy else ()
    return {name: statistics.median(sample[i] for sample in busy) for i, name in enumerate(names)}


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the run and the processes that it started."""
    for each in [*psutil.Process(process.pid).children(recursive=True), process]:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def run_case(name: str, steps: int | None, out: Path, work: Path, saves: bool) -> dict[str, Any]:
    case = CASES[name]
    plan = case.plan()
    steps = steps or (2 if plan and plan.step_s > LONG_STEP_S else 3)
    settings = write_inputs(case, steps, work)
    command = [
        sys.executable,
        "-m",
        "ithaka",
        "train",
        str(settings),
        "--run-dir",
        str(work / "run"),
    ]
    metrics = work / "run" / "metrics.jsonl"
    log = out / f"{name}.log"
    started = time.monotonic()
    row: dict[str, Any] = {"run": name, "model": case.model, "context": parse_count(case.context)}
    row |= {"settings": case.settings, "steps": steps}
    samples = list[list[float]]()
    with log.open("wb") as output:
        environment = {"NCCL_DEBUG": "WARN", **os.environ}  # its errors name no reason otherwise
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            for poll in itertools.count():
                code = process.poll()
                row |= read_results(work / "run") if metrics.exists() else {}
                if poll % SAMPLE_POLLS == 0:
                    samples.append(sample_gpu())
                    row |= read_clock(samples)
                row["took s"] = time.monotonic() - started
                is_done = len(row.get("loss", ())) == steps
                if code is not None or (is_done and not saves):
                    break
                (out / f"{name}.json").write_text(json.dumps(row, indent=1), encoding="utf-8")
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                end(process)
    if code:
        row["error"] = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    if metrics.exists():
        shutil.copy(metrics, out / f"{name}.metrics.jsonl")
    (out / f"{name}.json").write_text(json.dumps(row, indent=1), encoding="utf-8")
    return row


def describe(row: dict[str, Any]) -> str:
    def both(name: str, digits: int) -> str:
        values = row.get(name, {}).get("planned"), row.get(name, {}).get("measured")
        return " / ".join("-" if value is None else f"{value:,.{digits}f}" for value in values)

    parts = [
        f"{row['run']}, planned / measured: tokens/s {both('tokens/s', 0)}",
        f"peak GiB {both('peak GiB', 1)}",
    ]
    parts += [f"host GiB {both('host GiB', 1)}"]
    for name in (
        "reserved GiB",
        "reserved - allocated GiB",
        "allocator retries",
        "first step s",
        "save s",
        "save GiB",
    ):
        if (value := row.get(name)) is not None:
            parts.append(f"{name} {value:.{0 if name == 'allocator retries' else 1}f}")
    if clock := row.get("clock MHz"):
        parts.append(f"{clock:,.0f} MHz at {row['power W']:.0f} W")
    parts.append(
        "later "
        + (", ".join(f"{step_s:.1f}" for step_s in row.get("later steps s", ())) or "-")
        + " s"
    )
    return ", ".join(parts) + (" FAILED" if "error" in row else "")


def list_cases() -> None:
    for name, case in CASES.items():
        if (plan := case.plan()) is None:
            print(f"{name:20} a tiny gpt-oss, on any machine; 15 s")
            continue
        steps = 2 if plan.step_s > LONG_STEP_S else 3
        peak = (plan.ledger.gpu_peak - plan.ledger.gpu["reserve"]) / GIB
        minutes = (STARTUP_S + steps * plan.step_s) / 60
        figures = (
            f"{plan.tokens_per_s_per_gpu:6.0f} tok/s, {plan.step_s:5.0f} s per step, "
            f"{peak:5.1f} GiB"
        )
        host = plan.ledger.host_needed / GIB
        print(
            f"{name:20} {figures}, host {host:5.1f} GiB; {steps} steps, {minutes:4.1f} minutes",
            end="",
        )
        print("" if plan.fits else "; DOES NOT FIT")


def main(
    name: Annotated[str, typer.Argument(help="One of --list.")] = "",
    out: Annotated[Path, typer.Option(help="Directory of the results.")] = Path("depth"),
    steps: Annotated[int | None, typer.Option(min=1, help="By default 3, or 2 long ones.")] = None,
    work: Annotated[
        Path | None, typer.Option(help="Directory of the run; by default temporary.")
    ] = None,
    no_save: Annotated[
        bool, typer.Option("--no-save", help="End after the last step, without a checkpoint.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--list", help="List the runs, with their plans for one H200.")
    ] = False,
) -> None:
    """Train all layers of a model for a few steps."""
    if show:
        list_cases()
        return
    if name not in CASES:
        raise typer.BadParameter(f"{name or 'no run'} is not one of {', '.join(CASES)}")
    if name != "tiny" and not num_gpus():
        raise typer.BadParameter(
            f"{name} needs a GPU with the memory of an H200; tiny runs on a CPU"
        )
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        row = run_case(name, steps, out, Path(folder), saves=not no_save)
    print(describe(row), flush=True)
    if "error" in row:
        print(row["error"], file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
