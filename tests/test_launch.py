"""Ranks start, receive signals and are reported once; none is left behind."""

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from ithaka.checkpoint.checkpoints import lock_run_dir
from ithaka.comm.mesh import _warn_about_shared_store
from ithaka.exits import ExitCode, TransientError
from ithaka.log.console import status
from ithaka.run import launch
from launched import (
    fail,
    fail_everywhere,
    fail_while_saving,
    finish_step_then_stop,
    freeze,
    never_stop,
    not_yet_training,
    write_environment,
    write_inherited,
)
from programs import Program
from refusals import assert_refused
from runs import may_fork


def launch_two(function: Callable[[Path], None], folder: Path) -> int:
    return launch.run_ranks(function, (folder,), 2)


def launch_two_under_nohup(function: Callable[[Path], None], folder: Path) -> int:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return launch_two(function, folder)


def start_two(
    function: Callable[[Path], None], folder: Path, start: Callable[..., int] = launch_two
) -> tuple[Program, list[int]]:
    """Start a parent in its own process group, as a shell does; return it and the pids of its two
    ranks."""
    parent = Program(folder, start, function, folder)
    ready = [folder / "ready0", folder / "ready1"]
    deadline = time.monotonic() + 300
    while not all(file.exists() and file.read_text() for file in ready):
        assert time.monotonic() < deadline and parent.poll() is None, parent.stderr
        time.sleep(0.02)
    return parent, [int(file.read_text()) for file in ready]


def gone(pids: list[int], within_s: float = 30.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def launch_in_a_terminal(folder: Path) -> int:
    """Launch under a spinner, like `ithaka evaluate`."""
    master, slave = os.openpty()
    for number in (1, 2):
        os.dup2(slave, number)
    with may_fork(), status("measuring"):
        launch_two(write_environment, folder)
    (folder / "screen").write_bytes(os.read(master, 2**16))
    return 0


def test_escape_codes_are_removed_in_a_terminal(tmp_path):
    program = Program(tmp_path, launch_in_a_terminal, tmp_path)
    assert program.wait() == 0
    screen = (tmp_path / "screen").read_bytes()
    assert b"measuring" in screen
    assert b"?25h" not in re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", screen)


def launch_forks(folder: Path) -> int:
    """Launch ranks that succeed, under a spinner, then ranks of which one fails."""
    # otherwise it may not start processes
    multiprocessing.current_process()._config["daemon"] = False
    launch.inherited = "yes"
    launch.FAILURE_GRACE_S = 0.2
    with status("comparing"):
        assert launch.run_ranks(write_inherited, (folder,), 2, fork=True) == 0
    return launch.run_ranks(fail, ("1", "config"), 2, fork=True)


def test_forked_ranks_need_no_imports_and_report_their_errors(tmp_path):
    program = Program(tmp_path, launch_forks, tmp_path)
    assert program.wait(60) == ExitCode.WRONG_INPUT
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["yes True"] * 2
    assert program.stderr.count("parallel.cp=6") == program.stderr.count("\n") == 1


def test_ranks_get_torchruns_variables(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launch, "num_cores", lambda: 6)
    assert launch.run_ranks(write_environment, (tmp_path,), 2) == 0
    first, second = ((tmp_path / name).read_text().split() for name in "01")
    assert first[:5] == ["0", "0", "2", "2", "127.0.0.1"]
    assert second[:5] == ["1", "1", "2", "2", "127.0.0.1"]
    assert first[5] == second[5] and int(first[5]) > 0
    assert first[6] == second[6] == "3"
    assert "RANK" not in os.environ


@pytest.mark.parametrize(
    "kind, code, words",
    [
        ("config", ExitCode.WRONG_INPUT, "parallel.cp=6"),
        pytest.param(
            "memory", ExitCode.OUT_OF_MEMORY, "MemoryError: no room", marks=pytest.mark.slow
        ),
        ("other", ExitCode.FAILED, "RuntimeError: boom"),
    ],
)
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_failing_rank_ends_the_others_and_gives_its_exit_code(
    kind, code, words, rank, capsys, monkeypatch
):
    monkeypatch.setattr(launch, "FAILURE_GRACE_S", 0.2)
    before = children()
    start = time.monotonic()
    assert launch.run_ranks(fail, (str(rank), kind), 2) == code
    assert time.monotonic() - start < 50  # the others sleep for 60
    error = capsys.readouterr().err
    assert error.count(words) == 1
    assert ("Traceback" in error) == (kind != "config")
    assert children() <= before


def children() -> set[int]:
    """Return the pids of child processes, except the resource tracker that multiprocessing
    keeps."""
    processes = psutil.Process().children(recursive=True)
    return {p.pid for p in processes if "resource_tracker" not in " ".join(p.cmdline())}


def test_a_killed_rank_is_named(capsys, monkeypatch):
    monkeypatch.setattr(launch, "FAILURE_GRACE_S", 0.2)
    assert launch.run_ranks(fail, ("1", "killed"), 2) == ExitCode.HANG
    assert "rank 1 was killed by SIGKILL" in capsys.readouterr().err


def test_the_launchers_own_kill_of_a_frozen_rank_is_not_the_cause(capsys, monkeypatch, tmp_path):
    """PyTorch's launcher sends SIGTERM, which a frozen rank ignores, and SIGKILL 30 s later
    (here: 1 s)."""
    monkeypatch.setattr(launch, "FAILURE_GRACE_S", 0.2)
    close = SubprocessContext._close
    monkeypatch.setattr(
        SubprocessContext, "_close", lambda self, death_sig, timeout: close(self, death_sig, 1)
    )
    assert launch.run_ranks(freeze, (tmp_path,), 2) == ExitCode.HANG
    assert capsys.readouterr().err == "rank 1 has sent no heartbeat\n"
    assert gone([int((tmp_path / "pid").read_text())])


@pytest.mark.parametrize("asked_to_stop", [False, True])
def test_the_launchers_own_sigterm_is_not_the_cause(asked_to_stop):
    """After a failure, the launcher sends the other ranks SIGTERM, which they report. A user's
    SIGTERM may break connections, which ranks report too."""
    failed = launch.Outcome(ExitCode.FAILED, "boom")
    stopped = launch.Outcome(143, "SIGTERM: ...", shared=True)
    outcomes = [stopped, failed] if asked_to_stop else [failed, stopped]
    order = partial(launch._cause_order, asked_to_stop=asked_to_stop)
    assert sorted(reversed(outcomes), key=order) == outcomes


def test_an_error_on_all_ranks_is_printed_once(capfd):
    assert launch.run_ranks(fail_everywhere, (), 3) == ExitCode.FAILED
    assert capfd.readouterr().err.count("RuntimeError: boom on all") == 1


def test_one_rank_runs_in_this_process(capsys):
    assert launch.run_ranks(fail, ("0", "config"), 1) == ExitCode.WRONG_INPUT
    assert capsys.readouterr().err.startswith("ConfigError: parallel.cp=6")


def test_under_torchrun_no_ranks_are_started(tmp_path, monkeypatch):
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert launch.decide_ranks(2, gpus=0) == 8
    assert launch.run_ranks(write_environment, (tmp_path,), 8) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["5"]


def test_there_is_one_rank_per_gpu_by_default():
    assert launch.decide_ranks("auto", gpus=4) == 4
    assert launch.decide_ranks("auto", gpus=0) == 2
    assert launch.decide_ranks(3, gpus=0) == 3
    assert_refused(lambda: launch.decide_ranks(8, gpus=4), "parallel.ranks=8", fix="at most 4")


FAKE_DRIVER = """
#include <stdlib.h>
#include <string.h>
int cuInit(unsigned flags) { return getenv("CUDA_VISIBLE_DEVICES") == NULL ? 100 : 0; }
int cuDeviceGet(int *device, int index) { *device = 100 + index; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
  strncpy(name, getenv("CUDA_VISIBLE_DEVICES"), size);
  name[strlen(name)] = '0' + device % 100;
  return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (5ul << 30) + device; return 0; }
"""


def test_each_rank_detects_its_own_visible_gpu(tmp_path, monkeypatch):
    """The fake driver names each GPU after CUDA_VISIBLE_DEVICES and its number."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    (tmp_path / "driver.c").write_text(FAKE_DRIVER)
    command = ["gcc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"]
    subprocess.run(command, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(launch, "num_gpus", lambda: 2)
    for visible in ("3,1", "GPU-8932f937,GPU-b1", "MIG-GPU-89/1/0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert launch.detect_gpu() == (f"{visible}0", (5 << 30) + 100)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert launch.detect_gpu() == (f"{visible}1", (5 << 30) + 101)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert launch.detect_gpu() == ("unknown", sys.maxsize), "the driver fails"
    monkeypatch.setattr(launch, "num_gpus", lambda: 0)
    assert launch.detect_gpu() is None


def test_far_more_ranks_than_cores_are_refused(monkeypatch):
    for cores, most in ((1, 8), (2, 8), (64, 256)):
        monkeypatch.setattr(launch, "num_cores", lambda cores=cores: cores)
        assert launch.decide_ranks(most, gpus=0) == most
        more = partial(launch.decide_ranks, most + 1, gpus=0)
        assert_refused(
            more, f"parallel.ranks={most + 1}", f"{cores} core", fix=f"at most {most}, or"
        )
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "999")
    assert launch.decide_ranks(999, gpus=0) == 999


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGHUP]
)
def test_first_signal_lets_every_rank_finish_and_save(number, tmp_path):
    parent, pids = start_two(finish_step_then_stop, tmp_path)
    if number == signal.SIGINT:
        os.killpg(parent.pid, number)  # like a terminal, which signals every process of the group
    else:
        os.kill(parent.pid, number)
    assert parent.wait() == 0
    # Exactly once: a second one would have ended the rank before it saved.
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == [str(int(number))] * 2
    assert gone(pids)


def test_a_run_under_nohup_outlives_its_terminal(tmp_path):
    parent, pids = start_two(finish_step_then_stop, tmp_path, launch_two_under_nohup)
    for pid in (parent.pid, *pids):
        os.kill(pid, signal.SIGHUP)
    time.sleep(0.5)  # for the launcher to end its ranks, if it does
    assert parent.poll() is None and not (tmp_path / "saved0").exists()
    os.kill(parent.pid, signal.SIGTERM)
    assert parent.wait() == 0, parent.stderr
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == [
        str(int(signal.SIGTERM))
    ] * 2
    assert gone(pids)


def test_signal_before_training_begins_stops_the_run(tmp_path):
    parent, pids = start_two(not_yet_training, tmp_path)
    os.kill(parent.pid, signal.SIGINT)
    assert parent.wait() == ExitCode.SIGNALED + signal.SIGINT
    assert parent.stderr.endswith("\nstopped by SIGINT\n") and "Traceback" not in parent.stderr
    assert gone(pids)


def test_failure_to_save_after_a_signal_is_reported(tmp_path):
    parent, pids = start_two(fail_while_saving, tmp_path)
    os.kill(parent.pid, signal.SIGTERM)
    assert parent.wait() == ExitCode.FAILED
    assert parent.stderr.count("OSError: disk full") == 1
    assert gone(pids)


def test_two_simultaneous_signals_count_as_one(tmp_path):
    """`timeout` signals its child, then the child's process group."""
    parent, pids = start_two(finish_step_then_stop, tmp_path)
    os.kill(parent.pid, signal.SIGTERM)
    time.sleep(0.02)
    os.kill(parent.pid, signal.SIGTERM)
    assert parent.wait() == 0
    assert [(tmp_path / f"saved{rank}").exists() for rank in (0, 1)] == [True, True]
    assert gone(pids)


def test_a_second_signal_ends_all_ranks_immediately(tmp_path):
    parent, pids = start_two(never_stop, tmp_path)
    os.kill(parent.pid, signal.SIGINT)
    time.sleep(launch.SIGNAL_DEBOUNCE_S + 0.1)
    assert parent.poll() is None
    os.kill(parent.pid, signal.SIGINT)
    assert parent.wait() == ExitCode.SIGNALED + signal.SIGINT
    assert "at once" in parent.stderr
    assert gone(pids)


def test_ranks_do_not_outlive_a_killed_parent(tmp_path):
    parent, pids = start_two(never_stop, tmp_path)
    with pytest.raises(TransientError, match="in use by another run"):
        lock_run_dir(tmp_path)
    os.kill(parent.pid, signal.SIGKILL)
    assert parent.wait() == -signal.SIGKILL
    assert gone(pids)
    os.close(lock_run_dir(tmp_path))  # a new run may start at once


TORCHRUN = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
RANK = """
import os, time
from ithaka import cli
cli.app = lambda: print(os.getpid(), flush=True) or time.sleep(60)
cli.main()
"""


@pytest.mark.parametrize("launcher", ["torchrun", "shell"])
def test_a_command_ends_with_torchruns_agent_but_not_with_a_shell(launcher):
    environment = dict(os.environ)
    environment.pop("TORCHELASTIC_RUN_ID", None)
    if launcher == "torchrun":
        environment |= {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    command = [sys.executable, "-c", TORCHRUN, RANK]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        rank = int(parent.stdout.readline())
        parent.kill()
    try:
        assert gone([rank], within_s=30.0 if launcher == "torchrun" else 0.6) == (
            launcher == "torchrun"
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)


def test_a_rank_exits_if_its_launcher_ended_before_it_started(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", lambda code: ended.append(code))
    with subprocess.Popen(["true"]) as process:
        process.wait()
    launch._exit_with_launcher(process.pid)
    assert ended == [ExitCode.FAILED]


def test_a_rank_exits_even_if_the_launchers_folder_is_gone(tmp_path, monkeypatch, capfd):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(launch, "_outcome_dir", tmp_path / "gone")
    launch.exit_rank(launch.Outcome(ExitCode.HANG, "rank 1 hangs"))
    assert ended == [ExitCode.HANG] and "rank 1 hangs" in capfd.readouterr().err


def test_a_new_checkpoint_refills_the_restarts(monkeypatch, capsys):
    waits = []
    monkeypatch.setattr(launch.time, "sleep", waits.append)
    restarts = launch.Restarts(2)
    ends = [
        (ExitCode.FAILED, False),
        (ExitCode.TRANSIENT, False),
        (ExitCode.HANG, True),
        (ExitCode.FAILED, False),
    ]
    assert [restarts.allow(*end) for end in ends] == [True] * 4 and waits == [launch.RETRY_S]
    assert not restarts.allow(ExitCode.FAILED), "two without a checkpoint"
    for code in (ExitCode.OUT_OF_MEMORY, ExitCode.SIGNALED + signal.SIGHUP):
        assert not launch.Restarts(2).allow(code, progressed=True)
    assert capsys.readouterr().err.count(" since the last checkpoint, after exit code ") == 4


def test_a_store_shared_across_torchrun_restarts_gives_a_warning():
    environment = {
        "RANK": "0",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with pytest.warns(UserWarning, match="max-restarts=3 .*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        _warn_about_shared_store(environment)
    for name, value in (
        ("RANK", "1"),
        ("TORCHELASTIC_MAX_RESTARTS", "0"),
        ("TORCHELASTIC_USE_AGENT_STORE", "False"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _warn_about_shared_store(environment | {name: value})
