"""Train a 1B model on 1, 2, 4 and 8 ranks, which may share one GPU, and compare losses and gradient
norms.

    LD_PRELOAD=DIR/libnccl.so.2 python benchmarks/several_ranks.py --out results
    python benchmarks/several_ranks.py --tiny --ranks 1,2,4     # a tiny model; needs no GPU

Several ranks per GPU need NCCL 2.30. Each run is `ithaka train` with all layers of Llama-3.2-1B,
random weights from one seed, and one sequence of 64K tokens per step, which all ranks share (cp =
ranks); layer inputs are in host memory, and FSDP shards parameters and optimizer. The text is
Python's standard library, one token per byte. One more run of a single rank with other tiles shows
how much rounding alone changes. The run on --save ranks is saved after step 3, ended, and resumed
on half of them.

Prints a line per step, and writes ranks.json, which is updated after every step, and a log of each
run.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from depth import end

from ithaka.checkpoint.checkpoints import latest_name
from ithaka.facts.machine import num_cores
from ithaka.log.metrics import open_metrics, read_metrics, read_times
from ithaka.plan.models import find_config

SEVERAL_ON_ONE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "LOCAL_RANK": "0"}
STEPS = 5
SAVED_STEP = 3
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
FIGURES = ("loss", "grad_norm")


def write_inputs(folder: Path, tiny: bool) -> Path:
    """Write config.json, the text and the settings of all runs, whose path is returned."""
    config = find_config("llama3.2-1b") | (TINY if tiny else {})
    context = 1024 if tiny else 65536
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    text = bytearray()
    needed = (STEPS + 1) * context
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += file.read_bytes()
    assert len(text) >= needed, f"the standard library has only {len(text)} bytes"
    (folder / "text.txt").write_text(text[:needed].decode("utf-8", "ignore"), encoding="utf-8")
    settings: dict[str, Any] = {
        "model": {"path": str(folder / "config.json")},
        "data": {
            "path": str(folder / "text.txt"),
            "tokenizer": "bytes",
            "context": context,
            "validation_fraction": 0,
        },
        "parallel": {"cp": "all"},
        # the planner would expect a GPU for each rank
        "memory": {"plan": "off", "offload": "host"},
        "optim": {"lr": 3e-4, "warmup_steps": STEPS - 1},
        "train": {"steps": STEPS, "validate_every": 0, "validate_sequences": 0, "save_minutes": 0},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


@dataclass
class Run:
    """`ithaka train` on several ranks, one process each."""

    name: str
    num_ranks: int
    arguments: list[str]
    run_dir: Path
    log: Path
    first_step: int = 1
    saves: bool = False  # ends only when SAVED_STEP is saved
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    started: float = 0.0

    def start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        sizes = {
            "WORLD_SIZE": self.num_ranks,
            "LOCAL_WORLD_SIZE": self.num_ranks,
            "MASTER_PORT": port,
        }
        sizes["OMP_NUM_THREADS"] = max(1, num_cores() // self.num_ranks)
        shared = (
            os.environ
            | SEVERAL_ON_ONE
            | {"MASTER_ADDR": "127.0.0.1"}
            | {k: str(v) for k, v in sizes.items()}
        )
        command = [sys.executable, "-m", "ithaka", "train", *self.arguments]
        self.started = time.monotonic()
        with self.log.open("ab") as output:
            for rank in range(self.num_ranks):
                env = shared | {"RANK": str(rank)}
                self.processes.append(
                    subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
                )

    def read(self) -> dict[str, Any]:
        """Return the figures of the steps so far."""
        file = self.run_dir / "metrics.jsonl"
        records = (
            [each for each in read_metrics(file) if each["step"] >= self.first_step]
            if file.exists()
            else []
        )
        row: dict[str, Any] = {"ranks": self.num_ranks, "first step": self.first_step}
        row |= {
            name: [record[name] for record in records]
            for name in (*FIGURES, "step_s", "label_tokens")
        }
        if records:
            row |= {name: records[-1][name] for name in ("device_peak_bytes", "host_peak_bytes")}
            row["startup_s"] = read_times(file).get("startup_s")
        return row | {"took s": round(time.monotonic() - self.started, 1)}

    def is_done(self) -> bool:
        """Whether all steps, and the checkpoint, are there; what `ithaka train` does after them is
        not needed."""
        done = self.first_step + len(self.read()["loss"]) > STEPS
        return done and not (self.saves and not latest_name(self.run_dir))

    def has_ended(self) -> bool:
        """Whether all ranks have exited, or one has failed."""
        codes = [process.poll() for process in self.processes]
        return None not in codes or any(codes)

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                end(process)


def make_runs(settings: Path, counts: list[int], save: int, out: Path, folder: Path) -> list[Run]:
    """Return the runs in the order in which they start: first those that others are compared with
    or resume."""

    def make(name: str, num_ranks: int, *changes: str) -> Run:
        run_dir = folder / name.replace(" ", "-").replace(",", "")
        options = [part for change in changes for part in ("--set", change)]
        arguments = [str(settings), "--run-dir", str(run_dir), *options]
        return Run(
            name,
            num_ranks,
            arguments,
            run_dir,
            out / f"{run_dir.name}.log",
            saves=num_ranks == save,
        )

    tiles = yaml.safe_load(settings.read_text())["data"]["context"] // 16
    runs = [
        make(f"{n} ranks", n, *([f"train.save_every={SAVED_STEP}"] if n == save else []))
        for n in counts
        if n > 1
    ]
    runs.sort(key=lambda run: (not run.saves, -run.num_ranks))
    return [make("1 rank", 1), *runs, make("1 rank, other tiles", 1, f"memory.tile_tokens={tiles}")]


def resumed(run: Run) -> Run:
    """Return the run that continues an ended `run` after SAVED_STEP on half of its ranks."""
    num_ranks = run.num_ranks // 2
    saved = run.run_dir / "latest"
    saved.write_text(f"step-{SAVED_STEP:08d}\n")  # if the last step was saved too
    open_metrics(run.run_dir / "metrics.jsonl", SAVED_STEP).close()
    name = f"{run.num_ranks} ranks, resumed on {num_ranks}"
    arguments = ["--resume", str(run.run_dir), "--set", f"parallel.cp={num_ranks}"]
    return Run(
        name, num_ranks, arguments, run.run_dir, run.log.with_stem("resumed"), SAVED_STEP + 1
    )


def compare(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return {run: {figure: largest relative difference of a step from one rank's}}."""
    reference = rows.get("1 rank", {})
    differences = dict[str, dict[str, float]]()
    for name, row in rows.items():
        for figure in FIGURES if name != "1 rank" else ():
            pairs = list(
                zip(
                    row.get(figure, ()),
                    reference.get(figure, ())[row["first step"] - 1 :],
                    strict=False,
                )
            )
            if pairs:
                differences.setdefault(name, {})[figure] = max(abs(a / b - 1) for a, b in pairs)
    return differences


def run_all(waiting: list[Run], at_once: int, out: Path) -> dict[str, Any]:
    """Run all, `at_once` at a time, and the resumed one after the one that it continues."""
    rows = dict[str, dict[str, Any]]()
    running = list[Run]()
    started = time.monotonic()
    results: dict[str, Any] = {"steps": STEPS, "runs": rows}

    def report(text: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {text}", flush=True)

    with ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(waiting.pop(0))
                stack.callback(running[-1].end)
                running[-1].start()
                report(f"{running[-1].name}: started")
            for run in list(running):
                ended = run.has_ended()
                known = len(rows.get(run.name, {}).get("loss", ()))
                rows[run.name] = row = run.read()
                for i in range(known, len(row["loss"])):
                    figures = (
                        f"loss {row['loss'][i]:.5f}, norm {row['grad_norm'][i]:.5f}, "
                        f"{row['step_s'][i]:.1f} s"
                    )
                    report(f"{run.name}: step {run.first_step + i}, {figures}")
                if is_done := run.is_done():
                    run.end()
                    report(f"{run.name}: done in {row['took s']} s")
                    waiting[:0] = [resumed(run)] if run.saves else []
                elif ended:
                    run.end()
                    row["error"] = run.log.read_text(encoding="utf-8", errors="replace")[-3000:]
                    report(f"{run.name}: FAILED\n{row['error']}")
                if is_done or ended:
                    running.remove(run)
            results["differences from 1 rank"] = compare(rows)
            (out / "ranks.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
            time.sleep(0.2)
    return results


def main(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks; 1 is always run.")] = "1,2,4,8",
    save: Annotated[
        int | None, typer.Option(help="Ranks whose run half of them resume; 0: none.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory of the results.")] = Path("ranks"),
    work: Annotated[
        Path | None, typer.Option(help="Directory of the runs; by default temporary.")
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Runs at a time; they share the GPU.")] = 1,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="A small model and context, for a CPU.")
    ] = False,
) -> None:
    """Compare training on several ranks with training on one. By default, half of 4 ranks
    resume."""
    counts = [int(number) if number.isdecimal() else 0 for number in ranks.split(",")]
    if not all(counts):
        raise typer.BadParameter(f"--ranks {ranks}: write numbers of ranks such as 1,2,4")
    if save is None:
        save = 4 if 4 in counts else 0
    if save % 2 or save not in (0, *counts):
        raise typer.BadParameter(f"--save {save}: use 0, or an even number in --ranks {ranks}")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as name:
        folder = Path(name)
        settings = write_inputs(folder, tiny)
        results = run_all(make_runs(settings, counts, save, out, folder), at_once, out)
    print("largest relative difference from 1 rank")
    for name, differences in results["differences from 1 rank"].items():
        print(
            f"  {name:28} "
            + ", ".join(f"{figure} {value:.1e}" for figure, value in differences.items())
        )
    if any("error" in row for row in results["runs"].values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
