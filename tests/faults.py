"""Runs killed at random moments, and what becomes of them. As a script it prints a table:

PYTHONPATH=src:tests python tests/faults.py --kills 100
"""

import argparse
import dataclasses
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist

from ithaka.checkpoint import files, save
from ithaka.config import Config
from ithaka.phases import Listener, PhasePath, listening
from ithaka.preflight.preflight import AUTO
from ithaka.train.console import read_metrics
from programs import fork_from_here
from ranks import Ranks
from runs import run, tiny_run, wait_for

RANKS = 2
STEPS = 6
# Where a run dies, and how often that place is passed before its last save ends.
POINTS = {"forward": 10, "backward": 10, "update": 5, "save": 2, "publish": 8}
SAME, CLOSE = "bit for bit", "within 1e-5"


class Killer(Listener):
    """Kills this process when it enters a phase for the `nth` time."""

    def __init__(self, name: str, nth: int) -> None:
        self.name, self.left = name, nth

    def enter(self, path: PhasePath) -> None:
        if path[-1] == self.name:
            self.count()

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def run_and_die(config: Config, point: str, nth: int, victim: int) -> None:
    killer = Killer({"update": "optimizer"}.get(point, point), nth)
    if dist.get_rank() != victim:
        killer.left = -1
    with pytest.MonkeyPatch.context() as patch, listening(killer):
        if point == "save":
            write = save.dcp.FileSystemWriter.write_data
            patch.setattr(save.dcp.FileSystemWriter, "write_data", lambda *args: killer.count() or write(*args))
        if point == "publish":  # before and after each file of rank 0 has its name
            sync = files.sync_directory
            patch.setattr(files, "sync_directory", lambda path: killer.count() or sync(path))
        run(config, AUTO)


def configured(folder: Path) -> Config:
    return tiny_run(folder, train={"steps": STEPS, "save_every": 2, "validate_every": 0, "validate_sequences": 0})


def moved(config: Config, run_dir: Path) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, run_dir=run_dir))


def final_weights(config: Config) -> list[str]:
    state = files.read_state(files.find_checkpoint(config.train.run_dir))
    return [digest for name, digest in state["checksums"].items() if name.startswith("__")]


def losses(config: Config) -> list[float]:
    return [record["loss"] for record in read_metrics(config.train.run_dir / "metrics.jsonl")]


def kill(config: Config, folder: Path, point: str, nth: int, victim: int) -> int:
    """Start or resume the run on two ranks, kill one at the `nth` pass of `point`, and return the lost steps."""
    victims = Ranks(RANKS)
    folder.mkdir(exist_ok=True)
    victims.start(RANKS, folder, run_and_die, config, point, nth, victim)
    wait_for(lambda: victims.dead() == [victim], timeout_s=120)
    victims.close()
    metrics, latest = config.train.run_dir / "metrics.jsonl", config.train.run_dir / "latest"
    done = len(read_metrics(metrics)) if metrics.exists() else 0
    saved = int(latest.read_text().strip().rpartition("-")[2]) if latest.exists() else 0
    return max(0, done - saved)


def finish(group: Ranks, whole: Config, config: Config, num_ranks: int = RANKS) -> str:
    """Resume the run on `num_ranks` of `group`, and return how it agrees with the undisturbed one.

    Raises AssertionError if it does not."""
    group.run(num_ranks, run, config, AUTO)
    if num_ranks == RANKS:
        assert losses(config) == losses(whole) and final_weights(config) == final_weights(whole)
    assert losses(config) == pytest.approx(losses(whole), rel=1e-5)
    return SAME if num_ranks == RANKS else CLOSE


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill runs at random moments, and let them go on.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    fork_from_here()
    choice, group, start = random.Random(asked.seed), Ranks(4), time.monotonic()
    found: Counter[tuple[str, int, str]] = Counter()
    lost: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = configured(folder / "whole")
        group.run(RANKS, run, whole, AUTO)
        for number in range(asked.kills):
            point, num_ranks = list(POINTS)[number % len(POINTS)], choice.choice([RANKS, RANKS, 1, 4])
            try:
                config = moved(whole, folder / str(number) / "run")
                victim = 0 if point == "publish" else choice.randrange(RANKS)
                lost[point] += kill(config, folder / str(number), point, choice.randint(1, POINTS[point]), victim)
                result = finish(group, whole, config, num_ranks)
            except (AssertionError, TimeoutError) as error:
                result = "FAILED"
                print(f"kill {number}, {point}, {num_ranks} ranks: {error}", flush=True)
            found[(point, num_ranks, result)] += 1
    group.close()
    print(f"\n{asked.kills} kills of one of {RANKS} ranks, seed {asked.seed}, {time.monotonic() - start:.0f} s\n")
    print("| killed in | ranks that go on | runs | agree with the undisturbed run |\n|---|---|---|---|")
    for (point, num_ranks, result), count in sorted(found.items()):
        print(f"| {point} | {num_ranks} | {count} | {result} |")
    print(f"\nSteps computed again, in all: {sum(lost.values())}")
    raise SystemExit(any(result == "FAILED" for _, _, result in found))


if __name__ == "__main__":
    main()
