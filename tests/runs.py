"""Tiny training runs: a model of one layer on a page of text, in milliseconds per step."""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.launcher import api

from ithaka.checkpoint import checkpoints
from ithaka.checkpoint.save import Saver
from ithaka.cli.runs import train_rank
from ithaka.config import CONFIG_FORMAT, Config, load_config, parse_config, to_yaml
from ithaka.log.metrics import read_metrics
from ithaka.plan.hardware import Hardware
from ithaka.run.adopt import adopt_settings
from ithaka.run.detect import detect_machine
from ithaka.run.draft import AUTO, Draft, Request, read_settings
from ithaka.run.launch import Outcome, detect_gpu, run_child_rank, run_ranks
from ithaka.run.road import Planned, check, model_shape
from ithaka.run.rules import check_settings
from ithaka.run.validated import Run
from ithaka.train import heartbeat, loop
from programs import PLAIN, Program

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}


def tiny_run(
    folder: Path, *, model: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> Config:
    """Return a resolved configuration with all files below `folder`; sections change the defaults
    here."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({"tie_word_embeddings": True, **MODEL, **(model or {})})
    )
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for number in range(40):
        words = [f"Document {number}:", *map(str, range(number, 3 * number))]
        (texts / f"{number:02d}.txt").write_text(" ".join(words))
    tree = {
        "model": {"path": str(folder / "config.json")},
        "data": {
            "path": str(texts),
            "tokenizer": "bytes",
            "context": 61,
            "validation_fraction": 0.2,
        },
        "optim": {"lr": 1e-2, "warmup_steps": 2},
        "train": {
            "run_dir": str(folder / "run"),
            "steps": 4,
            "save_every": 2,
            "keep_last": 3,
            "validate_every": 3,
            "validate_sequences": 1,  # test_train_loop_step_is_exact.py has several
        },
    }
    if "epochs" in sections.get("train", {}):
        del tree["train"]["steps"]
    return parse_config(
        {name: {**tree.get(name, {}), **sections.get(name, {})} for name in {**tree, **sections}}
    )


def adopted(
    file: Path | None = None,
    changes: Sequence[str] = (),
    resume: Path | None = None,
    run_dir: Path | None = None,
) -> Draft:
    """Return what a command asks for, with complete settings that are not planned yet."""
    return adopt_settings(read_settings(Request(file, tuple(changes), resume, run_dir)))


def saved_settings(config: Config) -> str:
    """Return the config.yaml of a run."""
    return f"format: {CONFIG_FORMAT}\n{to_yaml(config)}"


def validate(
    config: Config,
    resume: Path | None = None,
    num_ranks: int | None = None,
    hardware: Hardware | None = None,
    trains: bool = True,
    force: bool = False,
) -> Run:
    """Return the validated run with these settings, which are complete, by default for the current
    number of ranks and this machine."""
    if num_ranks is None:
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    check_settings(config)
    draft = Draft(Request(resume=resume, trains=trains, force=force), config)
    run_dir = config.train.run_dir if resume == AUTO else resume
    step = 0
    if run_dir is not None and (resume != AUTO or checkpoints.newest_checkpoint(run_dir)):
        checkpoints.check_not_locked(run_dir)
        checkpoint = checkpoints.find_checkpoint(run_dir)
        saved = load_config(run_dir / "config.yaml")
        draft = dataclasses.replace(draft, resumes=run_dir, saved=saved, checkpoint=checkpoint)
        step = checkpoints.read_state(checkpoint)["step"]
    hardware = hardware or detect_machine(config, num_ranks, detect_gpu())
    entry = config.entry_at(step)
    config = config.of_entry(entry.index)
    return check(draft, [Planned(config, model_shape(config), entry)], num_ranks, hardware)


def run(config: Config, resume: Path | None = None, only_profile: bool = False) -> int:
    """Run training on this rank and return its exit code."""
    with saves_in_time():
        return loop.train(validate(config, resume), only_profile)


def saves_in_time() -> contextlib.AbstractContextManager[Any]:
    """Let every save end before the next step does, as if steps took longer, so that no save is
    skipped."""

    def is_done(saver: Saver) -> bool:
        wait([saver._in_progress] if saver._in_progress is not None else [])
        return saver.in_progress

    return mock.patch.object(Saver, "is_done", property(is_done))


def start_program(
    config: Config, num_ranks: int, resume: bool = False, rank: Callable = train_rank
) -> Program:
    """Start the run in its own processes, as the command line does; each rank calls `rank`."""
    run_dir = config.train.run_dir
    assert run_dir is not None
    return Program(run_dir.parent, _launch, config, num_ranks, run_dir if resume else None, rank)


def _launch(config: Config, num_ranks: int, resume: Path | None, rank: Callable) -> int:
    with may_fork():
        return run_ranks(rank, (validate(config, resume, num_ranks),), num_ranks)


@contextlib.contextmanager
def may_fork() -> Iterator[None]:
    """In a process of programs.py, let torchrun's agent fork ranks instead of starting programs,
    unless --plain."""
    if PLAIN in os.environ:
        yield
        return

    def forked(config: api.LaunchConfig, entry: Any) -> Callable:
        ranks = elastic_launch(dataclasses.replace(config, start_method="fork"), _child)
        return lambda *command: ranks(command[-1])

    elastic_launch = api.elastic_launch
    api.elastic_launch = forked
    multiprocessing.current_process()._config["daemon"] = False  # a daemon may not start processes
    try:
        yield
    finally:
        api.elastic_launch = elastic_launch


def _child(folder: str) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in a new program
    run_child_rank(folder)


def wait_for(
    condition: Callable[[], bool], program: Program | None = None, timeout_s: float = 300
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert program is None or program.poll() is None, program.stderr
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics without times, which depend on the machine's load."""
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if "times" not in line]


def copy_run_at_step(run_dir: Path, folder: Path, step: int) -> Path:
    """Copy the run as it was after saving step `step`.

    Losses of later steps in metrics.jsonl are replaced by wrong ones, to catch a run that does not
    recompute them.
    """
    shutil.copytree(run_dir, folder)
    (folder / "latest").write_text(f"step-{step:08d}\n")
    lines = [{**line, "loss": -1.0} if line["step"] > step else line for line in metrics(folder)]
    assert lines[-1]["loss"] == -1.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def bitwise_metrics(run_dir: Path) -> list[tuple]:
    """Return the metrics that must be bitwise equal in two equal runs."""
    keys = ("step", "loss", "val_loss", "lr", "grad_norm", "tokens", "label_tokens")
    # events depend on the machine: a slow rank, a full GPU
    steps = read_metrics(run_dir / "metrics.jsonl")
    return [tuple(record[key] for key in keys) for record in steps]


def run_and_record_exit(
    fault: Callable[[pytest.MonkeyPatch], None], config: Config, folder: Path
) -> None:
    """Run with `fault` installed. A rank that the heartbeat ends writes its exit code and message
    to a file first."""

    def record_and_exit(outcome: Outcome) -> None:
        (folder / f"words-{dist.get_rank()}").write_text(f"{outcome.code} {outcome.text}")
        os._exit(outcome.code)

    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        patch.setattr(heartbeat, "exit_rank", record_and_exit)
        run(config)
