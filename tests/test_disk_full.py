"""A disk that fills up in the middle of a step: explained once, no hang, and the last checkpoint goes on."""

import dataclasses
import errno
import os
from pathlib import Path

from ithaka.train.loop import train
from runs import numbers, run, start_program, tiny_run


def train_on_a_small_disk(run):
    """Rank 1's disk has room for three tensors: the step has begun, and rank 0 waits for rank 1 in an exchange."""
    calls, reserve = [], os.posix_fallocate

    def reserve_little(*args):
        calls.append(args)
        if len(calls) > 3 and os.environ["RANK"] == "1":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(*args)

    os.posix_fallocate = reserve_little
    train(run)


def with_memory(config, **memory):
    return dataclasses.replace(config, memory=dataclasses.replace(config.memory, **memory))


def test_disk_full_in_the_middle_of_a_step(ranks, tmp_path):
    plan = {"steps": 4, "save_every": 2, "validate_every": 0, "validate_sequences": 0}
    whole = tiny_run(tmp_path / "whole", parallel={"cp": 2}, train=plan, optim={"schedule": "constant"})
    ranks.run(2, run, whole)
    half = dataclasses.replace(whole, train=dataclasses.replace(whole.train, run_dir=tmp_path / "half", steps=2))
    ranks.run(2, run, half)
    half = dataclasses.replace(half, train=dataclasses.replace(half.train, steps=4))
    disk = tmp_path / "disk"
    disk.mkdir()
    full = with_memory(half, offload="disk", keep_attention="all", disk_path=disk)
    program = start_program(full, 2, resume=True, rank=train_on_a_small_disk)
    assert program.wait(90) == 3, program.stderr
    last = full.train.run_dir / "checkpoints" / "step-00000002"
    assert "OutOfMemoryError: rank 1, after layer " in program.stderr
    assert program.stderr.count("OutOfMemoryError") == 1 and "Traceback" not in program.stderr
    for words in (
        f"disk: 3968 more bytes needed in {disk}",
        "No space left on device",
        "memory.disk_path",
        str(last),
    ):
        assert words in program.stderr
    assert list(disk.iterdir()) == [] and last.is_dir()
    ranks.run(2, run, with_memory(half, offload="host"), Path(half.train.run_dir))
    assert numbers(half.train.run_dir) == numbers(whole.train.run_dir)
