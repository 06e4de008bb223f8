"""Console output, metrics.jsonl and signal handling of a run."""

import io
import json
import os
import re
import shlex
import signal
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console as RichConsole

from allocations import fake_gpu_memory
from ithaka.checkpoint import checkpoints
from ithaka.comm.mesh import make_mesh
from ithaka.config import AdapterConfig, LossConfig
from ithaka.config.units import format_count, plural
from ithaka.device_memory import PeakMeter
from ithaka.exits import ExitCode, TransientError
from ithaka.inputs.shard import count_pairs, pack_batch
from ithaka.log import console as console_module
from ithaka.log.console import Console, describe, status
from ithaka.log.metrics import StepRecord, open_metrics, read_metrics
from ithaka.log.trackers import rename_metrics
from ithaka.run import launch
from ithaka.trace.shapes import find_shape
from ithaka.train import agreement, journal, loop, shutdown
from ithaka.train.agreement import (
    Agreement,
    MemoryUse,
    RankState,
    StepFigures,
    agree,
    measure_memory,
)
from ithaka.train.bad_steps import Diverged
from ithaka.train.journal import flops_utilization, step_flops
from programs import Program
from runs import metrics, run, start_program, tiny_run, wait_for
from test_trackers import tensorboard_scalars


def record(step: int, **changes) -> StepRecord:
    values = dict(
        step=step,
        loss=2.5,
        val_loss=None,
        lr=1e-3,
        grad_norm=0.7,
        tokens=100 * step,
        label_tokens=99,
        tokens_per_s=12345.0,
        step_s=0.5,
        mfu=None,
        device_peak_bytes=None,
        host_peak_bytes=3 * 2**30,
    )
    return StepRecord(**{**values, **changes})


def test_run_writes_every_step_to_metrics_and_rank_0_to_its_trackers(ranks, tmp_path):
    track = ["tensorboard"] if find_spec("tensorboard") else []
    config = tiny_run(tmp_path, train={"steps": 4, "validate_every": 2, "track": track})
    ranks.run(2, run, config)
    lines = metrics(config.train.run_dir)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line["val_loss"] is not None for line in lines] == [True, False, True, False, True]
    assert lines[-1]["val_loss"] < lines[0]["val_loss"]
    keys = (
        "step loss val_loss lr grad_norm tokens tokens_per_s step_s mfu device_peak_bytes "
        "host_peak_bytes"
    )
    assert set(keys.split()) <= set(lines[1])
    assert not [key for line in lines for key in line if "/" in key], (
        "one source has no losses by source"
    )
    assert [line["tokens"] for line in lines] == [61 * step for step in range(5)]
    assert all(line["host_peak_bytes"] > 2**20 and line["mfu"] is None for line in lines)
    if track:
        named = {
            (name, line["step"]): value
            for line in lines
            for name, value in rename_metrics(line).items()
        }
        written = {(name, step): value for name, step, value in tensorboard_scalars(tmp_path)}
        assert written == pytest.approx(named, rel=1e-5) and ("train/loss", 4) in named
        assert len(list(tmp_path.glob("run/tensorboard/events*"))) == 1


def test_each_source_has_its_own_loss(ranks, tmp_path):
    settings = {"train": {"steps": 2, "validate_every": 2, "accumulate": 2}}
    sources = [
        {"path": str(tmp_path / "texts" / files), "weight": 2}
        for files in ("*[02468].txt", "*[13579].txt")
    ]
    config = tiny_run(tmp_path, data={"path": None, "sources": sources, "context": 400}, **settings)
    ranks.run(2, run, config)
    apart = metrics(config.train.run_dir)
    for line in apart:
        for key in ("loss", "val_loss"):
            means = [
                line[f"{key}/{name}"]
                for name in ("*[02468]", "*[13579]")
                if f"{key}/{name}" in line
            ]
            assert len(means) == (0 if line[key] is None else 2)
            assert not means or min(means) < line[key] < max(means)
    assert all("sources" not in each for each in apart)
    assert f"val_loss/*[02468] {apart[-1]['val_loss/*[02468]']:.4f}" in describe(
        record(2, sources={key: value for key, value in apart[-1].items() if "/" in key})
    )


@pytest.mark.parametrize(
    "minutes, every, background, description",
    [
        (15.0, 0, True, None),
        (
            15.0,
            0,
            False,
            (
                "every 15 minutes, in the foreground: 3 GiB of host memory per node are not "
                "free for "
                "a copy"
            ),
        ),
        (0.0, 0, True, "at the end, in the background, from 3 GiB of host memory per node"),
        (
            15.0,
            9,
            True,
            "every 15 minutes and 9 steps, in the background, from 3 GiB of host memory per node",
        ),
    ],
)
def test_the_header_describes_saving_unless_it_is_the_default(
    minutes, every, background, description
):
    settings = SimpleNamespace(train=SimpleNamespace(save_minutes=minutes, save_every=every))
    saver = SimpleNamespace(background=background)
    planned = SimpleNamespace(saved_bytes=3 * 2**30)
    trainer = SimpleNamespace(config=settings, saver=saver, run=planned)
    assert journal._describe_saving(trainer).get("saving") == description


def test_resumed_metrics_drop_lost_steps_and_half_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\0\0\0\nnull\n{"step": 2}\n{"step": 3}\n{"ste')
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]
    with open_metrics(path, 2) as file:
        file.write(b'{"step": 3}\n')
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    open_metrics(path, 0).close()
    assert path.read_text() == ""


def capture_console(monkeypatch, terminal, width=160):
    """Capture what the console writes."""
    output = io.StringIO()
    on = partial(RichConsole, file=output, force_terminal=terminal, width=width)
    monkeypatch.setattr(console_module, "RichConsole", on)
    return output


@pytest.mark.parametrize("terminal", [True, False])
def test_console_has_a_bar_on_a_terminal_and_plain_lines_elsewhere(tmp_path, monkeypatch, terminal):
    output = capture_console(monkeypatch, terminal)
    console = Console(tmp_path, num_steps=3)
    console.step(record(1))
    console.step(record(2, val_loss=2.25, mfu=0.431, device_peak_bytes=3 * 2**29))
    console.print("[bold] is text")
    console.close()
    text = output.getvalue()
    assert ("\x1b[" in text) == terminal
    for part in (
        "loss 2.5000",
        "2.2500",
        "lr 1.00e-03",
        "12.3K tok/s",
        "mfu 43.1%",
        "device 1.5 GiB",
        "[bold] is text",
    ):
        assert part in text
    assert terminal == ("━" in text)  # the bar


def test_the_last_line_of_the_bar_fits_a_terminal_of_110_columns(tmp_path, monkeypatch):
    """The last step validates, and its line stays on the screen."""
    output = capture_console(monkeypatch, terminal=True, width=110)
    console = Console(tmp_path, num_steps=300)
    console.step(record(300, val_loss=2.25, host_peak_bytes=517_367_398))
    console.close()
    assert "step 300/300  validation loss 2.2500\n" in re.sub(
        r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue()
    )
    [bar] = [line for line in output.getvalue().split("\n") if "━" in line][-1:]
    assert "loss 2.5000" in bar and "493.4 MiB" in bar


@pytest.mark.parametrize("terminal", [True, False])
def test_a_distillations_validation_says_that_it_is_a_cross_entropy(
    tmp_path, monkeypatch, terminal
):
    """Its loss is a divergence: without a teacher, validation cannot measure that."""
    loss = LossConfig(type="distill", teacher=Path("data"))
    names = [each.validation_name for each in (loss, LossConfig(), LossConfig(type="my:loss"))]
    assert names == ["cross-entropy", "loss", "cross-entropy"], "a custom loss as well"
    output = capture_console(monkeypatch, terminal)
    console = Console(tmp_path, num_steps=3, validation_name=loss.validation_name)
    console.step(record(1, val_loss=2.25))
    console.close()
    assert (
        "validation cross-entropy 2.2500" if terminal else "  val cross-entropy 2.2500  lr "
    ) in output.getvalue()


def test_a_log_on_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch):
    file = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    monkeypatch.setattr(console_module, "RichConsole", partial(RichConsole, file=file))
    console = Console(tmp_path, num_steps=3)
    console.table("title", {"model": "tiny"})
    console.step(record(1))
    console.close()
    assert [line["step"] for line in metrics(tmp_path)] == [1]
    with pytest.raises(OSError):
        file.close()


def test_flops_are_counted_and_counts_are_short():
    assert (
        step_flops(1000, num_tokens=10, head_size=12, num_pairs=100)
        == 6 * 1000 * 10 + 12 * 12 * 100
    )
    assert [format_count(n) for n in (7, 999, 12345, 2_890_000, 8e9)] == [
        "7",
        "999",
        "12.3K",
        "2.89M",
        "8B",
    ]
    numbers = [plural(n, "sequence") for n in (0, 1, 2000)]
    assert numbers == ["0 sequences", "1 sequence", "2,000 sequences"]


def test_mfu_is_the_share_of_the_peak_of_all_gpus():
    """Frozen weights take two matrix products instead of three. An embedding takes none, unless it
    is the head too."""
    trainer = SimpleNamespace(device_name="NVIDIA H200", mesh=SimpleNamespace(world_size=4))
    # without norms and the 8B model's embedding
    weights = {"llama3-8b": 7_504_658_432, "llama3.2-1b": 1_235_746_816}
    cases = (("llama3-8b", 10**10, None), ("llama3.2-1b", 10**10, None), ("llama3-8b", 0, None))
    for model, num_trained, adapter in (*cases, ("llama3-8b", 10**8, AdapterConfig())):
        shape = replace(find_shape(model), adapter=adapter)
        trainer.run = SimpleNamespace(shape=shape)
        trainer.num_trained = num_trained
        flops = (6 if num_trained == 10**10 else 4) * weights[
            model
        ] * 1000 + 12 * shape.heads * shape.head_dim * 500_500
        flops += 6 * num_trained * 1000 if adapter else 0
        mfu = flops_utilization(trainer, num_tokens=1000, num_pairs=500_500, step_s=2.0)
        assert mfu == pytest.approx(flops / (2.0 * 4 * 989.4e12), rel=1e-6)
    trainer.device_name = "CPU"
    assert flops_utilization(trainer, 1000, 500_500, 2.0) is None


def test_sigterm_finishes_the_step_saves_and_exits_with_its_code(tmp_path):
    train = {"steps": 100_000, "save_every": 0, "validate_every": 0}
    config = tiny_run(tmp_path, train={**train, "run_dir": str(tmp_path / "it's mine")})
    program = start_program(config, 2)
    wait_for(lambda: len(metrics(config.train.run_dir)) >= 2, program)
    with pytest.raises(TransientError, match="in use by another run"):
        checkpoints.check_not_locked(config.train.run_dir)
    os.kill(program.pid, signal.SIGTERM)
    assert program.wait() == ExitCode.SIGNALED + signal.SIGTERM, program.stderr
    last = metrics(config.train.run_dir)[-1]["step"]
    stopped = next(
        line for line in program.stdout.splitlines() if f"Stopped after step {last}" in line
    )
    assert shlex.split(stopped.partition(": ")[2]) == [
        "ithaka",
        "train",
        "--resume",
        str(config.train.run_dir),
    ]
    assert (config.train.run_dir / "latest").read_text() == f"step-{last:08d}\n"


def test_a_signal_or_a_save_of_any_rank_counts(monkeypatch):
    """If ranks decided differently, they would wait for each other."""
    most = MemoryUse(None, 2**60)
    figures = [StepFigures(0.0, 1.0, 2.0, [3.0]), StepFigures(0.0, 4.0, 5.0, [6.0])]
    own = RankState(0, False, False, measure_memory(torch.device("cpu")), figures[0])
    other = RankState(signal.SIGTERM, True, True, most, figures[1])
    monkeypatch.setattr(agreement, "gather_objects", lambda own: [own, other])
    assert agree(own) == Agreement(signal.SIGTERM, True, True, most, figures)


def test_unused_memory_is_that_of_one_rank_and_survives_a_profile(monkeypatch):
    """Another rank has the largest peak. A profile, at whose start this rank had reserved 9 bytes,
    reset the peaks."""
    gpu = torch.device("cuda", 2)
    fake_gpu_memory(monkeypatch, peak=5, reserved_peak=9)
    PeakMeter(gpu).restart()
    fake_gpu_memory(monkeypatch, peak=3, reserved_peak=4, retries=1)
    own = RankState(0, False, False, measure_memory(gpu))
    other = RankState(0, False, False, MemoryUse(8, 0, 10, 2, 0))
    monkeypatch.setattr(agreement, "gather_objects", lambda own: [own, other])
    host_bytes = own.memory.host_peak_bytes
    assert agree(own).memory == MemoryUse(8, host_bytes, 10, 4, 1)


def test_a_narrow_terminal_shows_the_full_step(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    console = Console(tmp_path, 300, 34)
    console._bar.update(
        console._task, status="loss 2.9915  lr 3.93e-03  grad 2.409  2.12K tok/s  host 493.4 MiB"
    )
    with console._rich.capture() as captured:
        console._rich.print(console._bar.get_renderable())
    console.close()
    assert " 34/300 " in captured.get() and "493.4 MiB" in captured.get()


def test_a_second_signal_exits_immediately_but_an_echo_does_not(monkeypatch, capfd):
    left = []
    monkeypatch.setattr("os._exit", left.append)
    with launch.catch_stop_signals() as received:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)  # forwarded by torchrun
    assert received == [signal.SIGINT] and left == []
    monkeypatch.setattr(launch, "SIGNAL_DEBOUNCE_S", -1.0)  # as if the second came later
    with launch.catch_stop_signals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert left == [ExitCode.SIGNALED + signal.SIGINT]
    stopping = "Stopping after this step; Ctrl-C again stops at once.\n"
    assert capfd.readouterr().err == 2 * stopping  # only the first is answered
    with launch.catch_stop_signals():
        signal.raise_signal(signal.SIGTERM)
    assert (
        capfd.readouterr().err
        == "SIGTERM: stopping after this step; a second signal stops at once.\n"
    )


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_stops_a_run_once_unless_nohup_ignores_it(monkeypatch, ignored, capfd):
    calls = []
    before = signal.SIG_IGN if ignored else lambda number, frame: None
    monkeypatch.setattr(launch, "SIGNAL_DEBOUNCE_S", -1.0)  # as if each came later
    previous = signal.signal(signal.SIGHUP, before)
    try:
        for in_thread in (True, False):
            with launch.catch_stop_signals(lambda *call: calls.append(call), in_thread) as received:
                signal.raise_signal(signal.SIGHUP)
                signal.raise_signal(signal.SIGHUP)
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGHUP)
            names = ["SIGINT"] if ignored else ["SIGHUP", "SIGINT"]
            assert [each.name for each in received] == names
            assert signal.getsignal(signal.SIGHUP) == before, "restored"
        first = (
            [(signal.SIGINT, False)] if ignored else [(signal.SIGHUP, False), (signal.SIGINT, True)]
        )
        assert calls == 2 * first
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.fixture
def grace(monkeypatch, tmp_path):
    """A shutdown with train.grace_s=0.1 that records in `.done` whether it waits or exits, and with
    what outcome."""
    run = SimpleNamespace(
        config=tiny_run(tmp_path, train={"grace_s": 0.1}), run_dir=tmp_path / "run"
    )
    grace = shutdown.GracefulShutdown(run)
    grace.done = []
    monkeypatch.setattr(shutdown, "exit_rank", grace.done.append)
    monkeypatch.setattr(
        shutdown, "handle_stop_signal", lambda number, again: grace.done.append("waits")
    )
    yield grace
    grace.close()


def test_a_step_that_outlasts_the_grace_period_is_aborted(grace):
    grace.handle_signal(signal.SIGTERM, False)
    assert grace.done == ["waits"]
    wait_for(lambda: len(grace.done) == 2)
    left = grace.done[1]
    assert (
        left.code == ExitCode.SIGNALED + signal.SIGTERM
        and "train.grace_s=0.1" in left.text
        and "no checkpoint yet" in left.text
    )
    grace.step_start = time.monotonic()
    grace.step_s = 0.3
    grace.done.clear()
    grace.handle_signal(signal.SIGINT, False)
    assert grace.done == ["waits"]  # Ctrl-C has no time limit
    grace.handle_signal(signal.SIGUSR1, False)
    assert grace.done[1].code == ExitCode.SIGNALED + signal.SIGUSR1
    grace.close()
    grace.done.clear()
    grace.step_start = 0.0
    grace.handle_signal(signal.SIGHUP, False)
    wait_for(lambda: len(grace.done) == 2)
    assert grace.done[1].code == ExitCode.SIGNALED + signal.SIGHUP, "a closed terminal, as SIGTERM"


def test_the_grace_period_ends_even_if_storage_hangs(grace, monkeypatch):
    """The name of the last checkpoint is read from the run directory, and a log may be written
    there."""
    hangs = threading.Event()
    monkeypatch.setattr(shutdown, "READ_LIMIT_S", 0.1)
    monkeypatch.setattr(checkpoints, "describe_last", lambda run_dir: hangs.wait(60))
    monkeypatch.setattr(shutdown, "handle_stop_signal", lambda *_: hangs.wait(60))
    threading.Thread(target=grace.handle_signal, args=(signal.SIGTERM, False), daemon=True).start()
    wait_for(lambda: grace.done, timeout_s=30)
    assert grace.done[0].text.endswith("run/latest could not be read: check its storage.")
    hangs.set()


def wait_in_cpp(folder):
    """Wait like a rank in a collective that another rank does not join."""
    run = SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(grace_s=0.2)), run_dir=folder
    )
    with launch.catch_stop_signals(shutdown.GracefulShutdown(run).handle_signal):
        reader, writer = os.pipe()
        if not (worker := os.fork()):
            os.write(writer, b"ready")
            time.sleep(60)
            os._exit(0)
        os.read(reader, 5)
        os.kill(worker, signal.SIGTERM)
        worker_code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
        time.sleep(0.4)  # the worker's signal must not end this process
        (folder / "ready").write_text(str(worker_code))
        torch.distributed.HashStore().wait(["never"], timedelta(seconds=60))


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)]
)
def test_the_grace_period_ends_even_while_the_main_thread_is_in_cpp(tmp_path, number):
    program = Program(tmp_path, wait_in_cpp, tmp_path)
    wait_for(lambda: (tmp_path / "ready").exists() and (tmp_path / "ready").read_text(), program)
    assert (tmp_path / "ready").read_text() == str(-signal.SIGTERM), (
        "a forked process has its own signals"
    )
    os.kill(program.pid, number)
    assert program.wait() == ExitCode.SIGNALED + number
    first, last = program.stderr.splitlines()
    assert first.startswith(f"{number.name}: stopping after this step")
    assert f"{number.name}: the step and its checkpoint do not" in last


@pytest.mark.parametrize("is_done", [True, False])
def test_a_save_in_progress_may_use_the_grace_period(grace, is_done):
    grace.step_start = time.monotonic()
    grace.saver = SimpleNamespace(seconds=99.0, in_progress=True, is_done=is_done)
    grace.handle_signal(signal.SIGTERM, False)
    assert (grace.done[0] == "waits") == (not is_done)


def diverging(config):
    with pytest.raises(Diverged, match="step 2: loss nan.*no checkpoint yet"):
        run(config)
    return True


def test_a_run_that_diverges_stops_and_saves_nothing(ranks, tmp_path):
    train = {"steps": 20, "save_every": 0, "validate_every": 0}
    config = tiny_run(
        tmp_path, train=train, optim={"lr": 1e38, "warmup_steps": 0, "clip_norm": None}
    )
    assert all(ranks.run(2, diverging, config))
    assert not (tmp_path / "run/latest").exists()


def test_pairs_are_counted_inside_documents_and_windows():
    documents = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
    num_visible = torch.zeros(10, 10, dtype=torch.int64)
    flat = documents + torch.tensor([[0], [9]])
    ids = flat.reshape(-1)
    for window in (None, 2):
        i, j = torch.meshgrid(torch.arange(10), torch.arange(10), indexing="ij")
        visible = (j <= i) & (ids[:, None] == ids[None]) & (j > i - (window or 99))
        num_visible += visible.long()
    mesh = make_mesh(1)

    def count(windows, **inputs):
        return count_pairs(pack_batch(inputs, inputs["document_ids"].shape, mesh), windows)

    pairs = count([None, 2], document_ids=documents)
    assert pairs.all_layers == int(num_visible.sum())
    assert pairs.full_layer == count([None], document_ids=documents).all_layers
    chain = torch.tensor([[0, 0, 1, 1, 2]])  # each document continues the previous one
    parents = torch.tensor([[-1, -1, 0, 0, 1]])
    assert count([None], document_ids=chain, parents=parents) == count(
        [None], document_ids=0 * chain
    )


@pytest.mark.parametrize("terminal, rank", [(True, "0"), (False, "0"), (True, "1")])
def test_rank_0_reports_slow_work_on_a_terminal(monkeypatch, capsys, terminal, rank):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich treat a pipe as a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with status("building [it]"):
        time.sleep(0.2)
    printed = capsys.readouterr().err
    if terminal and rank == "0":
        assert "building [it] ..." in printed and printed.endswith("\x1b[1A\x1b[2K")
    else:
        assert printed == ""


def test_the_progress_bar_names_work_between_steps(tmp_path, monkeypatch):
    output = capture_console(monkeypatch, terminal=True)
    console = Console(tmp_path, num_steps=3)
    console.step(record(1))
    with console.show_activity("saving"):
        console._bar.refresh()
    assert "saving ..." in output.getvalue()
    output.truncate(0)
    console._bar.refresh()
    assert "loss 2.5000" in output.getvalue() and "saving" not in output.getvalue()
    console.close()


def test_a_long_cooldown_and_allocator_retries_are_reported(tmp_path, monkeypatch, capfd):
    optim = {"schedule": "wsd", "cooldown_steps": 50, "warmup_steps": 0}

    def with_retries(*args):
        return replace(measure_memory(*args), allocator_retries=2)

    monkeypatch.setattr(loop, "measure_memory", with_retries)
    run(tiny_run(tmp_path, train={"steps": 2}, optim=optim))
    printed = " ".join(capfd.readouterr().out.split())
    assert "optim.cooldown_steps=50 exceeds the 2 steps after the warm-up" in printed
    assert printed.count("(retries: 2)") == 1
