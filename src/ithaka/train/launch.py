"""Starts the ranks of a run on this machine, passes signals on, and reports one error for all of them.

Under torchrun the ranks are there already, and one rank needs no other process: both run in this process.
Exit codes: 2 for a ConfigError, 3 for out of memory (device, host or disk), 1 for other failures,
128 + signal when stopped at once.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from ithaka.config import ConfigError
from ithaka.plan.host import num_cores

EXIT_FAILED, EXIT_CONFIG, EXIT_MEMORY = 1, 2, 3

# Ranks that wait for a dead one notice it themselves within seconds (gloo) or never (NCCL).
GRACE_S = 5.0
SAME_S = 0.5
CPU_RANKS = 2
MAX_REPORT_CHARS = 16_000
# Of CUDA and of what calls it (PyTorch, NCCL, Triton), of PyTorch's CPU allocator, of cuBLAS and cuDNN.
MEMORY_WORDS = ("out of memory", "DefaultCPUAllocator", "_STATUS_ALLOC_FAILED")
SIGNALS = (signal.SIGINT, signal.SIGTERM)

RankFunction = Callable[..., None]


class SharedError(ConfigError):
    """A refusal that every rank has."""

    shared = True  # by all ranks: the first of them tells the user


def num_gpus() -> int:
    """CUDA devices this process may use."""
    import torch

    return torch.cuda.device_count()


def gpu() -> tuple[str, int] | None:
    """What the driver calls the first GPU, and its bytes; asked without starting CUDA in this process."""
    if num_gpus() == 0:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
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
    """Calls `function(*args)` in every rank and returns the exit code; a failure is printed once, to stderr.

    The function must be importable and `args` picklable. The first SIGINT or SIGTERM is passed on to the
    ranks, which finish their step and save; the second ends them.
    """
    alone = under_torchrun() or num_ranks == 1
    outcome = _call(function, args) if alone else _run_children(function, args, num_ranks)
    tell(outcome)
    return outcome.code


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: its exit code and what to tell the user."""

    code: int
    text: str = ""
    shared: bool = False  # every rank ends with the same
    time_s: float = field(default_factory=time.time)


def tell(outcome: Outcome) -> None:
    """Prints its text to stderr; of ranks that share it the first does, and all return once it has: the end of one
    makes torchrun end the others."""
    shared = outcome.shared and under_torchrun()
    if outcome.text and (not shared or os.environ["RANK"] == "0"):
        print(outcome.text, file=sys.stderr, flush=True)
    if shared:
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()


def _call(function: RankFunction, args: tuple[Any, ...]) -> Outcome:
    """Calls the function and turns whatever it raises into an outcome."""
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
    return Outcome(code, _explanation(error), shared)


def _explanation(error: Exception) -> str:
    """Our own errors say all there is to say; of others the traceback is wanted."""
    if type(error).__module__.partition(".")[0] == "ithaka":
        return f"{type(error).__name__}: {error}"
    return traceback.format_exc()[-MAX_REPORT_CHARS:].rstrip()


def is_out_of_memory(error: BaseException) -> bool:
    # By name and words: torch may not be imported here, and only some of its parts raise its own error.
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    named = type(error).__name__ in ("OutOfMemoryError", "MemoryError")
    return named or (isinstance(error, RuntimeError) and any(words in str(error) for words in MEMORY_WORDS))


# In a child


def _child(reports: Connection, function: RankFunction, args: tuple[Any, ...]) -> None:
    # A session of its own: Ctrl-C in a terminal reaches the parent only, and each rank once, from the parent.
    os.setsid()
    for number in SIGNALS:
        # Until the training loop installs its own handlers there is nothing to save.
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    outcome = _call(function, args)
    reports.send(outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    if outcome.code:
        # Without the usual clean-up: it can wait for ranks that will never answer.
        os._exit(outcome.code)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(EXIT_FAILED)


# In the parent


@dataclass
class Rank:
    process: BaseProcess
    reports: Connection

    def outcome(self, rank: int) -> Outcome:
        """Of a process that has ended."""
        with contextlib.suppress(EOFError, OSError):
            if self.reports.poll():
                return self.reports.recv()
        code = self.process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = "; the system kills processes when host memory runs out" if -code == signal.SIGKILL else ""
            stopped = -code in SIGNALS
            return Outcome(128 - code if stopped else EXIT_FAILED, f"rank {rank} was killed by {name}{hint}")
        return Outcome(code or 0, f"rank {rank} exited with code {code}" if code else "")


def _run_children(function: RankFunction, args: tuple[Any, ...], num_ranks: int) -> Outcome:
    ranks: list[Rank] = []
    with _forwarded_signals(ranks) as received:
        try:
            _start(ranks, function, args, num_ranks)
            failed = _wait_for_failure(ranks)
            outcomes = _outcomes_so_far(ranks, give_time=failed is not None and len(received) < 2)
        finally:
            _kill(ranks)
    if len(received) > 1:
        return Outcome(128 + received[0], f"stopped at once by a second {received[-1].name}")
    bad = [outcome for outcome in outcomes if outcome.code]
    return min(bad, key=_likely_cause) if bad else Outcome(0)


def _likely_cause(outcome: Outcome) -> tuple[int, float]:
    """Sorts the rank that failed first before those that failed because it was gone."""
    explained = outcome.code in (EXIT_CONFIG, EXIT_MEMORY)
    killed = "was killed by" in outcome.text.partition("\n")[0]
    return (0 if explained else 1 if killed else 2), outcome.time_s


def _start(ranks: list[Rank], function: RankFunction, args: tuple[Any, ...], num_ranks: int) -> None:
    context = multiprocessing.get_context("spawn")
    port = _free_port()
    # Blocked while children start, so that a signal finds either no child or one that can be told.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        for rank in range(num_ranks):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(writer, function, args), name=f"rank {rank}")
            # Set before the interpreter starts: OpenMP reads its variable when torch is imported.
            with _environment(_rank_environment(rank, num_ranks, port)):
                process.start()
            writer.close()
            ranks.append(Rank(process, reader))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    threads = max(1, num_cores() // num_ranks)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _forwarded_signals(ranks: list[Rank]) -> Iterator[list[signal.Signals]]:
    """Passes the first signal on to the ranks, kills them at the second; yields the signals received.

    Signals within SAME_S are one: `timeout` signals first its child, then the whole group.
    """
    received: list[signal.Signals] = []
    first_s = 0.0

    def forward(number: int, frame: object) -> None:
        nonlocal first_s
        if received and time.monotonic() - first_s < SAME_S:
            return
        first_s = first_s or time.monotonic()
        received.append(signal.Signals(number))
        for rank in ranks:
            if rank.process.is_alive() and rank.process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, number if len(received) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_for_failure(ranks: list[Rank]) -> Rank | None:
    """Returns the first rank that failed, or None when all have ended well."""
    while True:
        # Read once per round: a rank that ends between two looks would be neither failed nor waited for.
        codes = [rank.process.exitcode for rank in ranks]
        if any(codes):
            return next(rank for rank, code in zip(ranks, codes, strict=True) if code)
        running = [rank.process.sentinel for rank, code in zip(ranks, codes, strict=True) if code is None]
        if not running:
            return None
        wait(running)


def _outcomes_so_far(ranks: list[Rank], give_time: bool) -> list[Outcome]:
    """Of the ranks that have ended by themselves, after some time to do so."""
    deadline = time.monotonic() + (GRACE_S if give_time else 0)
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
    return [rank.outcome(i) for i, rank in enumerate(ranks) if rank.process.exitcode is not None]


def _kill(ranks: list[Rank]) -> None:
    for rank in ranks:
        if rank.process.exitcode is None:
            rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.reports.close()
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # the cursor, which rank 0 hides while it shows progress
