"""Measure the time from `ithaka train` to its first step, with empty and with filled caches of compiled kernels.

    python benchmarks/first_step.py                                  # the demonstration model
    python benchmarks/first_step.py --set data.context=32K           # other settings of ithaka train
    python benchmarks/first_step.py --source OTHER/src               # another version of ithaka first

Prints a JSON line per run: seconds to the first line of step 1, and the parts that the run itself reports.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

SOURCE = Path(__file__).parent.parent / "src"
CACHES = ("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


def measure(source: Path, folder: Path, case: str, settings: list[str], limit_s: float) -> dict[str, Any]:
    """Run a few steps with all caches below `folder`."""
    run_dir = folder / f"run {case}"
    words = [word for setting in ("train.steps=3", "train.save_minutes=0", *settings) for word in ("--set", setting)]
    caches = {name: str(folder / "caches" / name) for name in CACHES}
    paths = os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **caches, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "ithaka", "train", "--run-dir", str(run_dir), *words]
    start, first_s, lines = time.monotonic(), None, []
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip())
        if first_s is None and re.match(r"step 1/", line):
            first_s = time.monotonic() - start
        if time.monotonic() - start > limit_s:
            process.kill()
    code = process.wait()
    reported = next((line.partition(": ")[2] for line in lines if line.startswith("First step after ")), "")
    parts = {part.rpartition(" ")[0]: float(part.rpartition(" ")[2]) for part in reported.split(", ") if part}
    kernels = sum(1 for _ in (folder / "caches" / CACHES[0]).rglob("*.o"))
    row = {"case": case, "exit_code": code, "first_step_s": first_s, "all_s": time.monotonic() - start}
    row |= {"parts_s": parts, "cached_kernels": kernels}
    return row if code == 0 else row | {"output": lines[-20:]}


def main(
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE")] = None,
    source: Annotated[Path | None, typer.Option(help="Sources of another version, to measure before this one.")] = None,
    limit_s: Annotated[float, typer.Option(help="Stop a run after this long.")] = 150,
) -> None:
    """Measure the first step with empty and with filled caches."""
    sides = {"before": source.absolute()} if source is not None else {}
    for side, path in (sides | {"now": SOURCE}).items():
        with tempfile.TemporaryDirectory(prefix="first-step-") as name:
            (Path(name) / "caches" / CACHES[0]).mkdir(parents=True, mode=0o700)
            for case in ("cold", "warm"):
                print(json.dumps(measure(path, Path(name), f"{side} {case}", settings or [], limit_s)), flush=True)


if __name__ == "__main__":
    typer.run(main)
