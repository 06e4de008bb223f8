"""Measure the time from `ithaka train` to its first step, with empty and with filled caches of compiled kernels.

    python benchmarks/first_step.py                                  # the demonstration model
    python benchmarks/first_step.py --set data.context=32K           # other settings of ithaka train
    python benchmarks/first_step.py --source OTHER/src               # another version of ithaka first
    python benchmarks/first_step.py --imports                        # a third run: where imports spend their time

Each run is stopped after its first step. Prints a JSON line per run: seconds to the line of step 1, the parts that the
run itself reports and, with --imports, the seconds of the slowest packages in all processes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

SOURCE = Path(__file__).parent.parent / "src"
CACHES = ("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


def measure(source: Path, folder: Path, case: str, settings: list[str], limit_s: float) -> dict[str, Any]:
    """Run the first step with all caches below `folder`."""
    words = [word for setting in ("train.save_minutes=0", *settings) for word in ("--set", setting)]
    paths = os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    environment |= {name: str(folder / "caches" / name) for name in CACHES}
    environment |= {"PYTHONPROFILEIMPORTTIME": "1"} if case.endswith("imports") else {}
    command = [sys.executable, "-m", "ithaka", "train", "--run-dir", str(folder / f"run {case}"), *words]
    start, first_s, lines, import_s = time.monotonic(), None, [], Counter[str]()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    timer = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.match(r"import time: +(\d+) \|[^|]*\| *(\w+)", line):
            import_s[found[2]] += int(found[1]) / 1e6
            continue
        lines.append(line.rstrip())
        if first_s is None and re.match(r"step 1/", line):
            first_s = time.monotonic() - start
        if line.startswith("First step after "):
            os.killpg(process.pid, signal.SIGKILL)
            break
    timer.cancel()
    process.wait()
    reported = lines[-1].partition(": ")[2] if lines and lines[-1].startswith("First step after ") else ""
    parts = {part.rpartition(" ")[0]: float(part.rpartition(" ")[2]) for part in reported.split(", ") if part}
    kernels = sum(1 for _ in (folder / "caches" / CACHES[0]).rglob("*.o"))
    row = {"case": case, "first_step_s": first_s, "parts_s": parts, "cached_kernels": kernels}
    row |= {"imports_s": dict(import_s.most_common(12))} if import_s else {}
    return row if reported else row | {"output": lines[-20:]}


def main(
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE")] = None,
    source: Annotated[Path | None, typer.Option(help="Sources of another version, to measure before this one.")] = None,
    imports: Annotated[bool, typer.Option("--imports", help="Add a run that measures imports.")] = False,
    limit_s: Annotated[float, typer.Option(help="Stop a run after this long.")] = 150,
) -> None:
    """Measure the first step with empty and with filled caches."""
    sides = {"before": source.absolute()} if source is not None else {}
    for side, path in (sides | {"now": SOURCE}).items():
        with tempfile.TemporaryDirectory(prefix="first-step-") as name:
            (Path(name) / "caches" / CACHES[0]).mkdir(parents=True, mode=0o700)
            for case in ("cold", "warm", *(["imports"] if imports else [])):
                print(json.dumps(measure(path, Path(name), f"{side} {case}", settings or [], limit_s)), flush=True)


if __name__ == "__main__":
    typer.run(main)
