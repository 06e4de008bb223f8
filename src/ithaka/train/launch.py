"""Start the ranks of a run on this machine, pass signals on, and report one error for all of them.

PyTorch's elastic launcher starts the ranks, each in a session of its own, and ends them all when one fails.
Under torchrun the ranks are there already, and one rank needs no other process: both run in this process.
`ithaka.exits` has the exit codes. Torch is imported late: commands that do without it report their errors here too.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import psutil

from ithaka.config import ConfigError
from ithaka.dist.rank import is_rank_0
from ithaka.exits import FINAL_EXIT_CODES, ExitCode, TransientError, is_transient
from ithaka.plan.hardware import num_cores

ORPHAN_S = 0.2  # how often a rank looks for its launcher
GRACE_S = 2.0  # when one rank has failed, for the others to fail in their own words
SAME_S = 0.5  # signals closer together are one: a terminal and a launcher, or `timeout`, send two
RETRY_S = 15.0  # before a restart after a transient fault, which may take a while to pass
CPU_RANKS = 2
RANKS_PER_CORE, FEW_RANKS = 4, 8  # without GPUs; more are a mistake, such as a cluster's settings on a laptop
# Of CUDA and of what calls it (PyTorch, NCCL, Triton), of PyTorch's CPU allocator, of cuBLAS and cuDNN.
MEMORY_WORDS = ("out of memory", "DefaultCPUAllocator", "_STATUS_ALLOC_FAILED")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

RankFunction = Callable[..., int | None]  # an exit code, if it is not 0


def num_gpus() -> int:
    """CUDA devices this process may use."""
    import torch

    return torch.cuda.device_count()


def gpu() -> tuple[str, int] | None:
    """Name and bytes of this rank's GPU, or of rank 0's before the ranks start; None: there is none. Another process
    asks, so that CUDA does not start in this one."""
    if num_gpus() == 0:
        return None
    index = int(os.environ.get("LOCAL_RANK", "0")) % num_gpus()
    ask = f"import json; from ithaka.plan.hardware import ask_driver; print(json.dumps(ask_driver({index})))"
    # With this process's path, which need not be the environment's.
    query = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {ask}"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown", sys.maxsize
    name, num_bytes = json.loads(found.stdout)
    return name, num_bytes


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def decide_ranks(ranks: int | Literal["auto"], gpus: int) -> int:
    """How many ranks the run will have: torchrun's number, the requested one, or one per GPU."""
    if under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    if ranks == "auto":
        return gpus or CPU_RANKS
    if gpus and ranks > gpus:
        raise ConfigError(f"parallel.ranks={ranks} exceeds the GPUs found; use at most {gpus}")
    if not gpus:
        check_cpu_ranks(ranks, "parallel.ranks")
    return ranks


def most_cpu_ranks() -> int:
    return max(FEW_RANKS, RANKS_PER_CORE * num_cores())


def check_cpu_ranks(ranks: int, name: str) -> None:
    """Refuse to start far more processes than this machine has cores."""
    if ranks > (most := most_cpu_ranks()):
        rule = f"is too many for {num_cores()} cores without a GPU ({RANKS_PER_CORE} per core, or {FEW_RANKS})"
        raise ConfigError(f"{name}={ranks} {rule}; use at most {most}, or start the ranks yourself with torchrun")


class Restarts:
    """The budget of --max-restarts: so many without a new checkpoint between them."""

    def __init__(self, most: int) -> None:
        self.most = self.left = most

    def allow(self, code: int, progressed: bool = False) -> bool:
        """Whether to start the ranks again after `code`. `progressed`: they reached a checkpoint, which refills the
        budget. Says so, and waits where a fault needs time to pass."""
        self.left = self.most if progressed else self.left
        if self.left == 0 or code in FINAL_EXIT_CODES or code >= ExitCode.SIGNALED:
            return False
        self.left -= 1
        number = f"{self.most - self.left} of {self.most} since the last checkpoint"
        print(f"Restart {number}, after exit code {code}", file=sys.stderr, flush=True)
        if code == ExitCode.TRANSIENT:
            time.sleep(RETRY_S)
        return True


def run_ranks(function: RankFunction, args: tuple[Any, ...], num_ranks: int, apart: bool = False) -> int:
    """Call `function(*args)` in every rank and return the exit code; a failure is printed once, to stderr.

    The function must be importable and `args` picklable. The first SIGINT, SIGTERM or SIGUSR1 is passed on to the
    ranks, which finish their step and save; the second ends them. `apart`: one rank too gets a process of its own.
    """
    alone = under_torchrun() or (num_ranks == 1 and not apart)
    outcome = _call(function, args) if alone else _run_children(function, args, num_ranks)
    print_outcome(outcome)
    if outcome.text and under_torchrun() and not outcome.shared:
        sys.stdout.flush()  # and no usual clean-up: it can wait for ranks that will never answer
        os._exit(outcome.code)
    return outcome.code


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: its exit code and what to tell the user."""

    code: int
    text: str = ""
    shared: bool = False  # every rank ends with the same
    time_s: float = field(default_factory=time.time)


def print_outcome(outcome: Outcome) -> None:
    """Print its text to stderr. If all ranks share it, only rank 0 prints, and the others wait for that: when one ends,
    torchrun ends the others."""
    shared = outcome.shared and under_torchrun()
    if outcome.text and (not shared or is_rank_0()):
        print(outcome.text, file=sys.stderr, flush=True)
    if shared:
        import torch.distributed as dist

        store = dist.distributed_c10d._get_default_store()
        if is_rank_0():
            store.set("told", "")
        else:
            with contextlib.suppress(RuntimeError):
                store.wait(["told"], timedelta(seconds=GRACE_S + 8))
        dist.destroy_process_group()


_folder: Path | None = None  # of a rank that our launcher started: where its outcome goes


def stays_for_more() -> bool:
    """Whether this process goes on with a run's next entry, in the group it has: torchrun's ranks meet only once."""
    return under_torchrun() and _folder is None


def exit_rank(outcome: Outcome) -> None:
    """End this rank now, from any thread, without the usual clean-up: it can wait for ranks that will never answer."""
    rank = os.environ.get("RANK", "0")
    try:
        if _folder is not None:
            (_folder / f"telling-{rank}").write_bytes(pickle.dumps(outcome))
            (_folder / f"telling-{rank}").rename(_folder / f"failed-{rank}")
        elif outcome.text and (is_rank_0() or not outcome.shared):
            os.write(2, f"{outcome.text}\n".encode())  # print may be at work in another thread
    except OSError:  # the folder is gone, or its disk is full
        os.write(2, f"{outcome.text}\n".encode())
    finally:
        os._exit(outcome.code)


def _call(function: RankFunction, args: tuple[Any, ...]) -> Outcome:
    try:
        return Outcome(function(*args) or 0)
    except KeyboardInterrupt:
        return Outcome(ExitCode.SIGNALED + signal.SIGINT, "stopped by SIGINT")
    except Exception as error:
        return outcome_of(error)


def outcome_of(error: Exception) -> Outcome:
    """Call it in the except block: it may format the traceback."""
    code, shared = exit_code_of(error), getattr(error, "shared", False)
    if type(error).__module__.partition(".")[0] != "ithaka":
        return Outcome(code, traceback.format_exc().rstrip(), shared)
    kind = next((kind for kind in (ConfigError, TransientError) if isinstance(error, kind)), type(error))
    return Outcome(code, f"{kind.__name__}: {error}", shared)


def exit_code_of(error: BaseException) -> ExitCode:
    """The code of an error's own class (`exit_code`), or of what it says."""
    if isinstance(code := getattr(error, "exit_code", None), ExitCode):
        return code
    if is_out_of_memory(error):
        return ExitCode.OUT_OF_MEMORY
    return ExitCode.TRANSIENT if is_transient(error) else ExitCode.FAILED


def is_out_of_memory(error: BaseException) -> bool:
    # By name and words: torch may not be imported here, and only some of its parts raise its own error.
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    named = type(error).__name__ in ("OutOfMemoryError", "MemoryError")
    return named or (isinstance(error, RuntimeError) and any(words in str(error) for words in MEMORY_WORDS))


def _run_children(function: RankFunction, args: tuple[Any, ...], num_ranks: int) -> Outcome:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # we report failures ourselves
    # The cores are shared among the ranks; OpenMP reads the variable when they import torch.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks)))
    here: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
    told = list[Outcome]()
    with tempfile.TemporaryDirectory(prefix="ithaka-") as name, stop_requests(_send) as received:
        folder = Path(name)
        (folder / "call").write_bytes(pickle.dumps((os.getpid(), sys.path)) + pickle.dumps((function, args)))
        logs = DefaultLogsSpecs(log_dir=str(folder / "logs"))
        # It would kill the ranks 30 seconds after a signal, and a step may take hours: we handle SIGNALS.
        here |= {"run_id": folder.name, "max_restarts": 0, "logs_specs": logs, "signals_to_handle": "SIGHUP"}
        try:
            main = "from ithaka.train.launch import run_child_rank; run_child_rank()"
            elastic_launch(LaunchConfig(1, 1, num_ranks, **here), sys.executable)("-c", main, name)
        except ChildFailedError as error:
            cause, _ = error.get_first_failure()
            for rank, failure in error.failures.items():
                ended_by_us = failure.exitcode == -signal.SIGTERM and rank != cause
                if not ended_by_us and not (folder / f"failed-{rank}").exists():
                    told.append(_end_of(rank, failure.exitcode))
        except KeyboardInterrupt:
            told.append(Outcome(ExitCode.SIGNALED + received[0], f"stopped by {received[0].name}"))
        told += [pickle.loads(file.read_bytes()) for file in folder.glob("*ed-*")]
    if told and os.isatty(1):  # rank 0 may have ended before it showed the cursor again that its progress bar hides
        os.write(1, b"\x1b[?25h")  # past sys.stdout, which a spinner replaces by one that prints escape codes
    if len(received) > 1:
        return Outcome(ExitCode.SIGNALED + received[0], f"stopped at once by a second {received[-1].name}")
    return min(told, key=_likely_cause, default=Outcome(0))


def _send(number: int, again: bool) -> None:
    """Signal the ranks, which have sessions of their own: a terminal's Ctrl-C reaches only this process."""
    ranks = psutil.Process().children()
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(signal.SIGKILL if again else number)
    if not ranks:
        raise KeyboardInterrupt
    if not again:
        _say_stopping()


def _likely_cause(outcome: Outcome) -> tuple[int, float]:
    """Sorts the rank that failed first before those that failed because it was gone, and those that only stopped."""
    explained = outcome.code in FINAL_EXIT_CODES - {ExitCode.DONE} | {ExitCode.TRANSIENT} or outcome.shared
    killed = "was killed by" in outcome.text.partition("\n")[0]
    return (0 if explained else 1 if killed else 2 if outcome.text else 3), outcome.time_s


def _end_of(rank: int, code: int) -> Outcome:
    """The outcome of a rank that could not report its own."""
    end = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    hint = "; the system kills processes when host memory runs out" if -code == signal.SIGKILL else ""
    if code < 0:
        code = ExitCode.SIGNALED - code if -code in SIGNALS else ExitCode.HANG
    return Outcome(code or ExitCode.FAILED, f"rank {rank} {end}{hint}")


def run_child_rank() -> None:
    """The main program of a rank: calls the function that the folder named on the command line holds, and leaves its
    outcome there unless it is 0."""
    global _folder
    folder = _folder = Path(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to save until the loop installs its handlers
    with (folder / "call").open("rb") as file:
        launcher, sys.path[:] = pickle.load(file)
        threading.Thread(target=_end_with_others, args=(launcher, folder), daemon=True).start()
        function, args = pickle.load(file)
    outcome = _call(function, args)
    sys.stdout.flush()
    if outcome.text:
        exit_rank(outcome)
    elif outcome.code:
        (folder / f"stopped-{os.environ['RANK']}").write_bytes(pickle.dumps(outcome))


def end_with_parent() -> None:
    """End this process when its parent is gone, even if that was killed with SIGKILL. For ranks of torchrun; the parent
    of other processes may be a shell that started them in the background."""
    threading.Thread(target=_end_with_others, args=(os.getppid(),), daemon=True).start()


def _end_with_others(launcher: int, folder: Path | None = None) -> None:
    """End this rank with its launcher, or soon after another rank failed: it may wait for that one forever."""
    parent = os.getppid()
    gone = parent != launcher and not psutil.pid_exists(launcher)  # killed while this rank was starting
    while not gone and os.getppid() == parent:
        if folder is not None and any(folder.glob("failed-*")):
            time.sleep(GRACE_S)
            break
        time.sleep(ORPHAN_S)
    os._exit(ExitCode.FAILED)


def handle_stop_signal(number: int, again: bool) -> None:
    """End this rank if it was asked before, else let rank 0 say what comes: a step may take hours. Our own launcher
    says it itself: it alone knows whether a user asked, or a rank is ended because another died."""
    if again:
        os._exit(ExitCode.SIGNALED + number)
    elif _folder is None and is_rank_0():
        _say_stopping()


def _say_stopping() -> None:
    line_break = b"\n" if os.isatty(2) else b""  # after the terminal's ^C
    os.write(2, line_break + b"Stopping after this step; Ctrl-C again stops at once.\n")  # print may be at work


@contextlib.contextmanager
def stop_requests(act: Callable[[int, bool], None] = handle_stop_signal) -> Iterator[list[signal.Signals]]:
    """SIGNALS received inside, from a terminal, a scheduler, or a launcher that passes them on; the training
    loop looks at them after each step. `act` is called with each, and whether one came before. Two within SAME_S
    are one.
    """
    received, asked_at = list[signal.Signals](), 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        if received and time.monotonic() - asked_at <= SAME_S:
            return
        received.append(signal.Signals(number))
        asked_at = time.monotonic()
        act(number, len(received) > 1)

    numbers = SIGNALS if threading.current_thread() is threading.main_thread() else ()
    old = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
