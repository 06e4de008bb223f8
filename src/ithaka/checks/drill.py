"""Train a small model with `ithaka train` on all ranks, kill one, and resume on half of them. Each rank starts its rank
of the run as a process, so no launcher is needed."""

import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml

from ithaka.checkpoint.files import step_name
from ithaka.checks.machine import Finding
from ithaka.comm.agree import gather_objects
from ithaka.exits import ExitCode
from ithaka.log.metrics import read_metrics
from ithaka.train.heartbeat import BEAT_S, MAX_SILENCE_S

LIMIT_S = MAX_SILENCE_S + 4 * BEAT_S  # for all ranks to exit after one died (docs/running-for-weeks.md)
START_S = 120.0  # for a run to start and take its steps
SAVE_EVERY, STEPS = 4, 6  # a resumed run repeats the steps after the first save
TOLERANCE = 1e-4  # relative, of losses in float32: fewer ranks sum in another order


def run_drill(folder: Path) -> Iterator[Finding]:
    """Collective, valid on rank 0. All nodes share `folder`."""
    rank, num_ranks, run_dir = dist.get_rank(), dist.get_world_size(), folder / "run"
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    unit = 1 if num_ranks == per_node else per_node  # half of the nodes or, of one node, half of its ranks
    fewer = max(n for n in range(unit, max(unit, num_ranks // 2) + 1, unit) if num_ranks % n == 0)
    saved, victim = run_dir / "checkpoints" / step_name(SAVE_EVERY), num_ranks - 1
    if rank == 0:
        _write_config(folder, math.gcd(4, fewer), num_ranks)  # the model has 4 heads
    process, log = _start_rank(num_ranks, per_node, folder / "run.yaml")
    deadline_s = time.monotonic() + START_S
    while rank == 0 and process.poll() is None and time.monotonic() < deadline_s:
        if saved.is_dir() and len(_read_losses(run_dir)) >= STEPS:
            break
        time.sleep(0.1)
    runs = all(gather_objects(process.poll() is None and (rank > 0 or saved.is_dir())))
    if rank == victim or not runs:
        process.kill()
    codes, seconds, logs = zip(*gather_objects(_finish(process, log, LIMIT_S)), strict=True)
    if not runs:
        text = f"`ithaka train` takes no {STEPS} steps within {START_S:.0f} s: {' '.join(logs).strip()[-500:]}"
        yield Finding("train", "failed", text, "set --run-dir to a folder that all nodes share")
        return
    ends = zip(codes[:victim], logs, strict=False)
    ok = all(code == ExitCode.HANG and f"rank {victim} on " in log for code, log in ends)
    text = (
        f"rank {victim} killed: the others exit after {max(seconds):.0f} s and name it" if victim else "only one rank"
    )
    if not ok:
        text = (
            f"rank {victim} killed: after {max(seconds):.0f} s the others exit with {codes[:victim]}: {logs[0][-300:]}"
        )
    fix = "" if ok else f"exit code {ExitCode.HANG:d} within {LIMIT_S:.0f} s is expected: report it with --json"
    yield Finding("kill a rank", "passed" if ok else "failed", text, fix)
    before, end = _read_losses(run_dir), (0, 0.0, "")
    for later in run_dir.glob("checkpoints/step-*") if rank == 0 else ():
        if later.name > saved.name:
            shutil.rmtree(later)
    if rank < fewer:
        arguments = "--resume", run_dir, "--set", f"train.steps={STEPS}"
        end = _finish(*_start_rank(fewer, min(per_node, fewer), *arguments), START_S)
    else:
        gather_objects(0)  # the port
    problems, after = [log for code, _, log in gather_objects(end) if code], _read_losses(run_dir)
    errors = [abs(after.get(step, math.inf) / before.get(step, 1.0) - 1) for step in range(SAVE_EVERY + 1, STEPS + 1)]
    text = (
        f"saved on {num_ranks} ranks, resumed on {fewer}: losses differ by {max(errors):.0e}, {TOLERANCE:.0e} allowed"
    )
    ok = not problems and max(errors) <= TOLERANCE
    yield Finding("save and resume", "passed" if ok else "failed", text, (problems or [""])[0].strip()[-500:])


def _write_config(folder: Path, cp: int, num_ranks: int) -> None:
    text, model = folder / "text.txt", {"embedded": "small", "dtype": "float32"}
    text.write_text(" ".join(map(str, range(30_000))))
    train = {"run_dir": str(folder / "run"), "steps": 10**6, "global_batch": num_ranks // cp, "validate_every": 0}
    config = {"model": model, "data": {"path": str(text), "context": 128}, "memory": {"plan": "off"}}
    config |= {"parallel": {"cp": cp}, "optim": {"schedule": "constant"}}
    config["train"] = train | {"save_every": SAVE_EVERY, "keep_last": 10**6}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))


def _read_losses(run_dir: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(run_dir / "metrics.jsonl") if row.get("loss") is not None}


def _start_rank(num_ranks: int, per_node: int, *arguments: Any) -> tuple[subprocess.Popen, Any]:
    """Start this rank of `ithaka train`. Return it and the file with its messages. Collective, for the port."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = gather_objects(free.getsockname()[1])[0]
    values = {"RANK": dist.get_rank(), "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": per_node, "MASTER_PORT": port}
    values |= {"TORCHELASTIC_USE_AGENT_STORE": False, "TORCHELASTIC_RUN_ID": "selftest"}  # it ends with this process
    program = f"import sys; sys.path[:] = {sys.path!r}; from ithaka.cli import main; main()"
    command, log = [sys.executable, "-c", program, "train", *map(str, arguments)], tempfile.TemporaryFile("w+")  # noqa: SIM115
    defaults = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    environment = defaults | os.environ | {name: str(value) for name, value in values.items()}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=environment), log


def _finish(process: subprocess.Popen, log: Any, limit_s: float) -> tuple[int, float, str]:
    """Wait until the process ends, or kill it. Return its exit code, the seconds waited and its messages."""
    start = time.monotonic()
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
    code, waited_s = process.wait(), time.monotonic() - start
    log.seek(0)
    return code, waited_s, log.read()
