"""Start the ranks of a run on this machine, pass signals on, and report one error for all of them.

PyTorch's elastic launcher starts the ranks, each in a session of its own, and ends them all when one fails. It runs in
a thread, where it leaves signals alone: it would kill the ranks 30 seconds after one, and a step may take hours.
Under torchrun the ranks are there already, and one rank needs no other process: both run in this process.
Exit codes: 2 for a ConfigError, 3 for out of memory (device, host or disk), 1 for other failures,
128 + signal when stopped at once.
"""

from __future__ import annotations

import contextlib
import errno
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
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from ithaka.config import ConfigError
from ithaka.plan.hardware import num_cores

EXIT_FAILED, EXIT_CONFIG, EXIT_MEMORY = 1, 2, 3

# A rank that others wait for ends them: gloo's within seconds, NCCL's not at all. Errors that say no more than that
# wait so long for a better one.
GRACE_S = 2.0
SAME_S = 0.5  # signals closer together are one: a terminal and a launcher, or `timeout`, send two
CPU_RANKS = 2
MAX_REPORT_CHARS = 16_000
# Of CUDA and of what calls it (PyTorch, NCCL, Triton), of PyTorch's CPU allocator, of cuBLAS and cuDNN.
MEMORY_WORDS = ("out of memory", "DefaultCPUAllocator", "_STATUS_ALLOC_FAILED")
SIGNALS = (signal.SIGINT, signal.SIGTERM)

RankFunction = Callable[..., None]


class SharedError(ConfigError):
    """Raised on every rank; rank 0 prints it."""

    shared = True


def num_gpus() -> int:
    """CUDA devices this process may use."""
    import torch

    return torch.cuda.device_count()


def gpu() -> tuple[str, int] | None:
    """The name and bytes of the first GPU, asked without starting CUDA in this process; None: there is none."""
    if num_gpus() == 0:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown", sys.maxsize
    name, _, mebibytes = found.stdout.partition("\n")[0].rpartition(",")
    return name.strip(), int(mebibytes) * 2**20 if mebibytes.strip().isdigit() else sys.maxsize


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def decide_ranks(ranks: int | Literal["auto"], gpus: int) -> int:
    """How many ranks the run will have: torchrun's number, the one asked for, or one per GPU."""
    if under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    if ranks == "auto":
        return gpus or CPU_RANKS
    if gpus and ranks > gpus:
        raise ConfigError(f"parallel.ranks={ranks} exceeds the GPUs found; use at most {gpus}")
    return ranks


def run_ranks(function: RankFunction, args: tuple[Any, ...], num_ranks: int) -> int:
    """Call `function(*args)` in every rank and return the exit code; a failure is printed once, to stderr.

    The function must be importable and `args` picklable. The first SIGINT or SIGTERM is passed on to the
    ranks, which finish their step and save; the second ends them.
    """
    alone = under_torchrun() or num_ranks == 1
    outcome = _call(function, args) if alone else _run_children(function, args, num_ranks)
    tell(outcome)
    return outcome.code


# ---- how a rank ends


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: its exit code and what to tell the user."""

    code: int
    text: str = ""
    shared: bool = False  # every rank ends with the same
    time_s: float = field(default_factory=time.time)

    @property
    def explained(self) -> bool:
        return self.code in (EXIT_CONFIG, EXIT_MEMORY) or self.shared


def tell(outcome: Outcome) -> None:
    """Print its text to stderr. Of ranks that share it, rank 0 prints, and all return once it has: the end of one
    makes torchrun end the others."""
    shared = outcome.shared and under_torchrun()
    if outcome.text and (not shared or os.environ["RANK"] == "0"):
        print(outcome.text, file=sys.stderr, flush=True)
    if shared:
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()


def _call(function: RankFunction, args: tuple[Any, ...]) -> Outcome:
    try:
        function(*args)
        return Outcome(0)
    except KeyboardInterrupt:
        return Outcome(128 + signal.SIGINT, "stopped by SIGINT")
    except Exception as error:
        return outcome_of(error)


def outcome_of(error: Exception) -> Outcome:
    """To be called where the error is handled: a traceback may be wanted."""
    shared = getattr(error, "shared", False)
    if isinstance(error, ConfigError):
        return Outcome(EXIT_CONFIG, f"ConfigError: {error}", shared)
    code = EXIT_MEMORY if is_out_of_memory(error) else EXIT_FAILED
    if type(error).__module__.partition(".")[0] == "ithaka":  # our own errors say all there is to say
        return Outcome(code, f"{type(error).__name__}: {error}", shared)
    return Outcome(code, traceback.format_exc()[-MAX_REPORT_CHARS:].rstrip(), shared)


def is_out_of_memory(error: BaseException) -> bool:
    # By name and words: torch may not be imported here, and only some of its parts raise its own error.
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    named = type(error).__name__ in ("OutOfMemoryError", "MemoryError")
    return named or (isinstance(error, RuntimeError) and any(words in str(error) for words in MEMORY_WORDS))


# ---- in a rank's process


def child() -> None:
    """The main program of a rank: calls the function that the folder named on the command line holds, and leaves its
    outcome there if it failed."""
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    for number in SIGNALS:
        # Until the training loop installs its own handlers there is nothing to save.
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_die_with_parent, args=(os.getppid(),), daemon=True).start()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    asked = folder / "signal"
    if asked.exists():  # before this process could be told
        os.kill(os.getpid(), int(asked.read_text()))
    with (folder / "call").open("rb") as file:
        sys.path[:] = pickle.load(file)
        function, args = pickle.load(file)
    outcome = _call(function, args)
    sys.stdout.flush()
    sys.stderr.flush()
    if outcome.code:
        (folder / f"telling-{rank}").write_bytes(pickle.dumps(outcome))
        (folder / f"telling-{rank}").rename(folder / f"outcome-{rank}")
        if not outcome.explained:
            time.sleep(GRACE_S)
        # Without the usual clean-up: it can wait for ranks that will never answer.
        os._exit(outcome.code)


def _die_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(EXIT_FAILED)


# ---- in the parent


def _run_children(function: RankFunction, args: tuple[Any, ...], num_ranks: int) -> Outcome:
    # The cores are shared among the ranks; OpenMP reads the variable when they import torch.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks)))
    with tempfile.TemporaryDirectory(prefix="ithaka-") as name:
        folder, untold = Path(name), list[Outcome]()
        (folder / "call").write_bytes(pickle.dumps(sys.path) + pickle.dumps((function, args)))
        thread = threading.Thread(target=_launch, args=(folder, num_ranks, untold), daemon=True)
        first, second = partial(_pass_on, folder), lambda _: _pass_on(folder, signal.SIGKILL)
        with StopRequest(first, second) as stop:  # in slices: Python runs signal handlers between them
            thread.start()
            while thread.is_alive():
                thread.join(0.1)
        if sys.stdout.isatty():
            print("\x1b[?25h", end="", flush=True)  # the cursor, which rank 0 hides while it shows progress
        if len(stop.received) > 1:
            return Outcome(128 + stop.received[0], f"stopped at once by a second {stop.received[-1].name}")
        told = [pickle.loads(file.read_bytes()) for file in folder.glob("outcome-*")]
        return min(told + untold, key=_likely_cause, default=Outcome(0))


def _likely_cause(outcome: Outcome) -> tuple[int, float]:
    """Sorts the rank that failed first before those that failed because it was gone."""
    killed = "was killed by" in outcome.text.partition("\n")[0]
    return (0 if outcome.explained else 1 if killed else 2), outcome.time_s


def _launch(folder: Path, num_ranks: int, untold: list[Outcome]) -> None:
    """Run the ranks; to `untold` go the ends of those that could not tell them."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what it says of a failure, we say
    # Blocked in this thread, and so in the ranks until they can heed them.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    here: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
    logs = DefaultLogsSpecs(log_dir=str(folder / "logs"))
    config = LaunchConfig(1, 1, num_ranks, run_id=folder.name, max_restarts=0, logs_specs=logs, **here)
    try:
        elastic_launch(config, sys.executable)("-c", "from ithaka.train.launch import child; child()", str(folder))
    except ChildFailedError as error:
        first, _ = error.get_first_failure()
        for rank, failure in error.failures.items():
            ended_by_us = failure.exitcode == -signal.SIGTERM and rank != first
            if not ended_by_us and not (folder / f"outcome-{rank}").exists():
                untold.append(_end_of(rank, failure.exitcode))
    except Exception as error:
        untold.append(outcome_of(error))


def _end_of(rank: int, code: int) -> Outcome:
    if code >= 0:
        return Outcome(code, f"rank {rank} exited with code {code}")
    hint = "; the system kills processes when host memory runs out" if -code == signal.SIGKILL else ""
    text = f"rank {rank} was killed by {signal.Signals(-code).name}{hint}"
    return Outcome(128 - code if -code in SIGNALS else EXIT_FAILED, text)


def _pass_on(folder: Path, number: int) -> None:
    """Send a signal to the ranks."""
    (folder / "signal").write_text(str(number))  # for ranks that are not there yet
    for file in folder.glob("pid-*"):
        with contextlib.suppress(ProcessLookupError, ValueError):  # gone, or not yet written
            os.kill(int(file.read_text()), number)


# ---- asked to stop: by Ctrl-C, a scheduler, or a launcher that passes it on


@contextlib.contextmanager
def heeding_interrupts() -> Iterator[None]:
    """Around imports: a Ctrl-C inside is a KeyboardInterrupt at the latest when they are done. While PyTorch's library
    looks for numpy it drops every exception, and the import would go on as if nothing had been asked."""
    asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if asked:
            raise KeyboardInterrupt


class StopRequest:
    """SIGINT or SIGTERM. The first asks to stop; a second leaves at once. Two within SAME_S are one."""

    def __init__(self, first: Callable[[int], None] | None = None, second: Callable[[int], None] | None = None) -> None:
        """`first`, `second`: called with the signal. By default the loop looks at `asked_at` after each step, and the
        second ends this process with 128 + signal."""
        self.asked_at: float | None = None
        self.received: list[signal.Signals] = []
        self._first, self._second = first, second or (lambda number: os._exit(128 + number))
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked_at is not None and now - self.asked_at <= SAME_S:
            return
        self.received.append(signal.Signals(number))
        if self.asked_at is not None:
            self._second(number)
        elif self._first is not None:
            self._first(number)
        self.asked_at = self.asked_at or now
