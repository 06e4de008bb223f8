"""Kill runs at random moments and check that they resume. As a script, prints a table:

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

from ithaka.checkpoint import checkpoints, save
from ithaka.config import Config, paths
from ithaka.log.metrics import read_metrics
from ithaka.phases import Listener, PhasePath, listening
from ithaka.run.draft import AUTO
from programs import fork_from_here
from ranks import Ranks
from runs import run, tiny_run, wait_for

RANKS = 2
STEPS = 6
# Points at which a run is killed, and how often a run passes each before its last save ends.
POINTS = {"forward": 10, "backward": 10, "update": 5, "save": 2, "publish": 8}
SAME = "bit for bit"
CLOSE = "within 1e-5"


class Killer(Listener):
    """Kill this process when it enters a phase for the `nth` time."""

    def __init__(self, name: str, nth: int) -> None:
        self.name = name
        self.left = nth

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
            patch.setattr(
                save.dcp.FileSystemWriter,
                "write_data",
                lambda *args: killer.count() or write(*args),
            )
        if point == "publish":  # before and after rank 0 renames each file
            sync = paths.sync_directory
            for module in (checkpoints, paths):
                patch.setattr(module, "sync_directory", lambda path: killer.count() or sync(path))
        run(config, AUTO)


def configured(folder: Path) -> Config:
    return tiny_run(
        folder,
        model={"num_hidden_layers": 2},
        train={"steps": STEPS, "save_every": 2, "validate_every": 0, "validate_sequences": 0},
    )


def moved(config: Config, run_dir: Path) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, run_dir=run_dir))


def final_weights(config: Config) -> list[str]:
    state = checkpoints.read_state(checkpoints.find_checkpoint(config.train.run_dir))
    return [digest for name, digest in state["checksums"].items() if name.startswith("__")]


def losses(config: Config) -> list[float]:
    return [record["loss"] for record in read_metrics(config.train.run_dir / "metrics.jsonl")]


def kill(config: Config, folder: Path, point: str, nth: int, victim: int) -> int:
    """Start or resume the run on two ranks, kill one at the `nth` pass of `point`, and return the
    lost steps."""
    victims = Ranks(RANKS)
    folder.mkdir(exist_ok=True)
    victims.start(RANKS, folder, run_and_die, config, point, nth, victim)
    wait_for(lambda: victims.dead() == [victim], timeout_s=120)
    victims.close()
    metrics = config.train.run_dir / "metrics.jsonl"
    latest = config.train.run_dir / "latest"
    done = len(read_metrics(metrics)) if metrics.exists() else 0
    saved = int(latest.read_text().strip().rpartition("-")[2]) if latest.exists() else 0
    return max(0, done - saved)


def finish(group: Ranks, undisturbed: Config, config: Config, num_ranks: int = RANKS) -> str:
    """Resume the run on `num_ranks` of `group`, and return how closely it matches the undisturbed
    one.

    Raises AssertionError if it does not.
    """
    group.run(num_ranks, run, config, AUTO)
    if num_ranks == RANKS:
        assert losses(config) == losses(undisturbed) and final_weights(config) == final_weights(
            undisturbed
        )
    assert losses(config) == pytest.approx(losses(undisturbed), rel=1e-5)
    return SAME if num_ranks == RANKS else CLOSE


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill runs at random moments and resume them.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    fork_from_here()
    choice = random.Random(args.seed)
    group = Ranks(4)
    start = time.monotonic()
    outcomes: Counter[tuple[str, int, str]] = Counter()
    lost: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        undisturbed = configured(folder / "undisturbed")
        group.run(RANKS, run, undisturbed, AUTO)
        for number in range(args.kills):
            point = list(POINTS)[number % len(POINTS)]
            num_ranks = choice.choice([RANKS, RANKS, 1, 4])
            try:
                config = moved(undisturbed, folder / str(number) / "run")
                victim = 0 if point == "publish" else choice.randrange(RANKS)
                lost[point] += kill(
                    config, folder / str(number), point, choice.randint(1, POINTS[point]), victim
                )
                result = finish(group, undisturbed, config, num_ranks)
            except (AssertionError, TimeoutError) as error:
                result = "FAILED"
                print(f"kill {number}, {point}, {num_ranks} ranks: {error}", flush=True)
            outcomes[(point, num_ranks, result)] += 1
    group.close()
    print(
        f"\n{args.kills} kills of one of {RANKS} ranks, seed {args.seed}, "
        f"{time.monotonic() - start:.0f} s\n"
    )
    print("| killed in | resumed on ranks | runs | match the undisturbed run |\n|---|---|---|---|")
    for (point, num_ranks, result), count in sorted(outcomes.items()):
        print(f"| {point} | {num_ranks} | {count} | {result} |")
    print(f"\nRepeated steps in total: {sum(lost.values())}")
    raise SystemExit(any(result == "FAILED" for _, _, result in outcomes))


if __name__ == "__main__":
    main()
