"""Functions that the ranks of test_launch.py run. Each rank imports this file, so it imports
little."""

import fcntl
import os
import signal
import time
from pathlib import Path

import psutil

from ithaka.config import ConfigError
from ithaka.exits import ExitCode
from ithaka.run import launch
from ithaka.run.launch import Outcome, exit_rank


def write_environment(folder: Path) -> None:
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
    )
    (folder / os.environ["RANK"]).write_text(" ".join(os.environ[name] for name in names))


def write_inherited(folder: Path) -> None:
    """Write whether this rank inherited an attribute, as a fork does, and whether it leads its
    session."""
    inherited = getattr(launch, "inherited", None)
    is_leader = os.getsid(0) == os.getpid()
    (folder / os.environ["RANK"]).write_text(f"{inherited} {is_leader}")


def fail(rank: str, kind: str) -> None:
    if os.environ.get("RANK", "0") != rank:
        time.sleep(60)
    if kind == "config":
        raise ConfigError("parallel.cp=6 does not divide the 8 ranks; use 1, 2, 4 or 8")
    if kind == "memory":
        raise MemoryError("no room")
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("boom")


def freeze(folder: Path) -> None:
    """Freeze rank 1, and let rank 0 report it, as the heartbeat would."""
    if os.environ["RANK"] == "1":
        (folder / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    while (
        not (folder / "pid").exists()
        or psutil.Process(int((folder / "pid").read_text())).status() != "stopped"
    ):
        time.sleep(0.02)
    exit_rank(Outcome(ExitCode.HANG, "rank 1 has sent no heartbeat"))


def fail_everywhere() -> None:
    raise RuntimeError("boom on all")


def finish_step_then_stop(folder: Path, patience_s: float = 60.0) -> None:
    """Act like the training loop: the first signal sets a flag, and the work continues for a
    moment."""
    signals: list[int] = []
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) != signal.SIG_IGN:
            signal.signal(each, lambda number, frame: signals.append(number))
    rank = os.environ["RANK"]
    (folder / f"ready{rank}").write_text(str(os.getpid()))
    deadline = time.monotonic() + patience_s
    while not signals and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    (folder / f"saved{rank}").write_text(" ".join(map(str, signals)))


def not_yet_training(folder: Path) -> None:
    (folder / f"ready{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(60)


def fail_while_saving(folder: Path) -> None:
    finish_step_then_stop(folder)
    raise OSError("disk full")


def never_stop(folder: Path) -> None:
    if os.environ["RANK"] == "0":
        # as a run locks its directory
        fcntl.lockf(os.open(folder / "lock", os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
    signal.signal(signal.SIGINT, lambda number, frame: None)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    (folder / f"ready{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(60)
