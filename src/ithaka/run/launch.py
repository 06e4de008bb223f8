"""Start the ranks of a command on this machine, forward signals to them, and print one error for
all of them.

PyTorch's elastic launcher starts the ranks, each in its own session, and ends them all when one
fails. Under torchrun the ranks already exist, and a single rank needs no launcher: both run in this
process. Ranks report how they ended in files, see `exit_rank`. Torch is imported late: commands
that do not need it also report their errors here.
"""

import contextlib
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TextIO

import psutil

from ithaka.comm.rank import is_rank_0
from ithaka.config import ConfigError
from ithaka.exits import (
    FINAL_EXIT_CODES,
    ExitCode,
    TransientError,
    describe_transient,
    exit_code_for,
    is_disk_full,
)
from ithaka.facts.machine import num_cores
from ithaka.foreign.hugging_face import TORCHAO_LOGGERS
from ithaka.run.streams import call_in_time, discard_output, write_stderr

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

PARENT_POLL_S = 0.2  # how often a rank checks that its launcher is alive
FAILURE_GRACE_S = 2.0  # after one rank failed, for the others to report their own errors
RANK_0_GRACE_S = 10.0  # for rank 0 to print an error that all ranks have
REPORT_LIMIT_S = 2.0  # for a rank that exits now to say why; train.grace_s leaves the launcher 5 s
SIGNAL_DEBOUNCE_S = 0.5  # a terminal and a launcher, or `timeout`, may send the same signal twice
RETRY_S = 15.0  # before a restart after a transient fault
DEFAULT_CPU_RANKS = 2
# more is a mistake, such as a cluster's settings on a laptop
CPU_RANKS_PER_CORE = 4
MIN_CPU_RANK_LIMIT = 8
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

RankFunction = Callable[..., int | None]  # returns an exit code; None is 0


# ---- how many ranks, on which GPUs


def num_gpus() -> int:
    """CUDA devices visible to this process."""
    import torch

    return torch.cuda.device_count()


def detect_gpu() -> tuple[str, int] | None:
    """Name and memory of this rank's GPU (rank 0's before the ranks start), or None without one. A
    subprocess queries the driver, so that CUDA is not initialized in this process."""
    if num_gpus() == 0:
        return None
    index = int(os.environ.get("LOCAL_RANK", "0")) % num_gpus()
    query = (
        "import json; from ithaka.facts.machine import ask_driver; "
        f"print(json.dumps(ask_driver({index})))"
    )
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {query}"]
    try:
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown", sys.maxsize
    name, num_bytes = json.loads(output)
    return name, num_bytes


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def decide_ranks(ranks: int | Literal["auto"], gpus: int) -> int:
    """Number of ranks: torchrun's, else the requested number, else one per GPU."""
    if under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    if ranks == "auto":
        return gpus or DEFAULT_CPU_RANKS
    if ranks < 1:
        raise ConfigError(f"parallel.ranks={ranks} is out of range; use at least 1")
    if gpus and ranks > gpus:
        raise ConfigError(f"parallel.ranks={ranks} exceeds the number of GPUs; use at most {gpus}")
    if not gpus:
        check_cpu_ranks(ranks, "parallel.ranks")
    return ranks


def max_cpu_ranks() -> int:
    return max(MIN_CPU_RANK_LIMIT, CPU_RANKS_PER_CORE * num_cores())


def check_cpu_ranks(ranks: int, setting: str) -> None:
    """Refuse to start far more processes than this machine has cores."""
    if ranks > (limit := max_cpu_ranks()):
        rule = f"is too many for {num_cores()} cores without a GPU ({CPU_RANKS_PER_CORE} per core)"
        raise ConfigError(
            f"{setting}={ranks} {rule}; use at most {limit}, or start the ranks with torchrun"
        )


# ---- how a rank ended


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: its exit code and the message for the user."""

    code: int
    text: str = ""
    shared: bool = False  # every rank ended with this message
    time_s: float = field(default_factory=time.time)


def outcome_from_error(error: Exception) -> Outcome:
    """Call it in the except block: it may format the traceback."""
    code = exit_code_for(error)
    shared = getattr(error, "shared", False)
    if type(error).__module__.partition(".")[0] != "ithaka":
        is_full = code == ExitCode.TRANSIENT and is_disk_full(error)
        text = (
            f"TransientError: {describe_transient(error)}"
            if is_full
            else traceback.format_exc().rstrip()
        )
        return Outcome(code, text, shared)
    error_type = next(
        (base for base in (ConfigError, TransientError) if isinstance(error, base)), type(error)
    )
    return Outcome(code, f"{error_type.__name__}: {error}", shared)


def print_outcome(outcome: Outcome) -> None:
    """Print the message to stderr. If it is shared, rank 0 prints and the others wait for it:
    torchrun ends all ranks as soon as one exits."""
    waits = outcome.shared and under_torchrun()
    if outcome.text and (not waits or is_rank_0()):
        try_print(outcome.text, file=sys.stderr)
    if waits:
        import torch.distributed as dist

        from ithaka.foreign.torch_distributed import default_store

        store = default_store()
        if is_rank_0():
            store.set("printed", "")
        else:
            with contextlib.suppress(RuntimeError):
                store.wait(["printed"], timedelta(seconds=RANK_0_GRACE_S))
        dist.destroy_process_group()


def try_print(*lines: str, file: TextIO | None = None) -> OSError | None:
    """Print lines to stdout or `file`, and flush it. If that fails, as on a full disk, discard the
    text and return the error: the interpreter would try to write it again at exit, and change the
    exit code."""
    stream = file or sys.stdout
    try:
        print(*lines, sep="\n", end="\n" if lines else "", file=stream, flush=True)
    except OSError as error:
        discard_output(stream.fileno())
        return error
    return None


def wait_for_rank_0() -> None:
    """Call it before printing an error that rank 0 may have too, without a process group. Rank 0
    then prints it and exits, and torchrun ends this rank while it waits."""
    if under_torchrun() and not is_rank_0():
        time.sleep(RANK_0_GRACE_S)


class Restarts:
    """The budget of --max-restarts, which every new checkpoint refills."""

    def __init__(self, limit: int) -> None:
        self.limit = self.left = limit

    def allow(self, code: int, progressed: bool = False) -> bool:
        """Whether to restart after exit code `code`. If so, print a notice, and wait if the fault
        is transient. `progressed`: the ranks wrote a checkpoint."""
        self.left = self.limit if progressed else self.left
        if self.left == 0 or code in FINAL_EXIT_CODES or code >= ExitCode.SIGNALED:
            return False
        self.left -= 1
        count = f"{self.limit - self.left} of {self.limit} since the last checkpoint"
        try_print(f"Restart {count}, after exit code {code}", file=sys.stderr)
        if code == ExitCode.TRANSIENT:
            time.sleep(RETRY_S)
        return True


# ---- the launcher's side


def run_ranks(
    function: RankFunction,
    args: tuple[Any, ...],
    num_ranks: int,
    own_process: bool = False,
    fork: bool = False,
) -> int:
    """Call `function(*args)` on every rank and return the exit code. An error is printed once, to
    stderr.

    The function must be importable and `args` picklable. The first stop signal is forwarded to the
    ranks, which finish their step and save; the second kills them (`catch_stop_signals`).
    `own_process`: start a process even for one rank. `fork`: ranks are forks of this process, which
    saves seconds of imports for each. It must not have used a GPU, autograd, or several threads for
    an operation."""
    in_process = under_torchrun() or (num_ranks == 1 and not own_process)
    outcome = (
        _call(function, args) if in_process else _run_children(function, args, num_ranks, fork)
    )
    print_outcome(outcome)
    if outcome.text and under_torchrun() and not outcome.shared:
        try_print()
        os._exit(outcome.code)  # normal cleanup may wait for ranks that never answer
    return outcome.code


def _call(function: RankFunction, args: tuple[Any, ...]) -> Outcome:
    try:
        return Outcome(function(*args) or 0)
    except KeyboardInterrupt:
        return Outcome(ExitCode.SIGNALED + signal.SIGINT, "stopped by SIGINT")
    except Exception as error:
        return outcome_from_error(error)


def _run_children(
    function: RankFunction, args: tuple[Any, ...], num_ranks: int, fork: bool = False
) -> Outcome:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    for name in [
        name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")
    ]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # we report failures ourselves
    # Share the cores among the ranks. OpenMP reads the variable when a rank imports torch.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks)))
    outcomes = list[Outcome]()
    catching = catch_stop_signals(_forward_signal, in_thread=False)
    with tempfile.TemporaryDirectory(prefix="ithaka-") as name, catching as received:
        folder = Path(name)
        (folder / "call").write_bytes(
            pickle.dumps((os.getpid(), sys.path)) + pickle.dumps((function, args))
        )
        config = _launch_config(num_ranks, folder)
        try:
            if fork:
                # it reports ranks it ends
                logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
                elastic_launch(config, _run_forked_rank)(name)
            else:
                # There is nothing to save until the loop installs its handlers: Ctrl-C ends a rank
                # without a traceback.
                program = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL)"
                program += (
                    "; from ithaka.run.launch import run_child_rank; run_child_rank(sys.argv[1])"
                )
                elastic_launch(config, sys.executable)("-c", program, name)
        except ChildFailedError as error:
            _, first = error.get_first_failure()
            for rank, failure in error.failures.items():
                if (
                    not _ended_by_launcher(failure, first)
                    and not (folder / f"failed-{rank}").exists()
                ):
                    outcomes.append(_outcome_from_exit_code(rank, failure.exitcode, received))
        except KeyboardInterrupt:
            outcomes.append(
                Outcome(ExitCode.SIGNALED + received[0], f"stopped by {received[0].name}")
            )
        outcomes += [pickle.loads(file.read_bytes()) for file in folder.glob("*ed-*")]
    # rank 0's progress bar hides the cursor, and the rank may have been killed
    if outcomes and os.isatty(1):
        os.write(1, b"\x1b[?25h")  # not through sys.stdout, which a spinner may have replaced
    if len(received) > 1:
        return Outcome(
            ExitCode.SIGNALED + received[0], f"stopped at once by a second {received[-1].name}"
        )
    return min(
        outcomes, key=partial(_cause_order, asked_to_stop=bool(received)), default=Outcome(0)
    )


def _launch_config(num_ranks: int, folder: Path) -> "LaunchConfig":
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        1,
        1,
        num_ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        run_id=folder.name,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
        start_method="fork",  # applies to functions; a program is always a new process
        # No signal: `catch_stop_signals` has ours. The default would replace nohup's SIG_IGN for
        # SIGHUP, and kill the ranks 30 s after any other signal, though a step may take hours.
        signals_to_handle="none",
    )


def _forward_signal(number: int, again: bool) -> None:
    """Signal the ranks. They have their own sessions, so a terminal's Ctrl-C reaches only this
    process."""
    ranks = psutil.Process().children()
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(signal.SIGKILL if again else number)
    if not ranks:
        raise KeyboardInterrupt
    if not again:
        _print_stopping(number)


def _ended_by_launcher(failure: Any, first: Any) -> bool:
    """Whether PyTorch's launcher killed this rank because the `first` one failed: with SIGTERM or,
    if the rank is frozen, 30 s later with SIGKILL. An earlier SIGKILL comes from the system."""
    was_late = failure.timestamp - first.timestamp > FAILURE_GRACE_S
    return failure is not first and (
        failure.exitcode == -signal.SIGTERM or (failure.exitcode == -signal.SIGKILL and was_late)
    )


def _cause_order(outcome: Outcome, asked_to_stop: bool) -> tuple[int, float]:
    """Sort key: the likely cause first, then ranks that failed because of it, then ranks that only
    stopped. Unless the user `asked_to_stop`, a signal came from the launcher, after another rank
    failed."""
    stopped = not outcome.text or (outcome.code >= ExitCode.SIGNALED and not asked_to_stop)
    explained = (
        outcome.code in FINAL_EXIT_CODES - {ExitCode.DONE} | {ExitCode.TRANSIENT} or outcome.shared
    )
    killed = any(
        words in outcome.text.partition("\n")[0] for words in ("was killed by", "stopped by")
    )
    if stopped:
        return 3, outcome.time_s
    if explained:
        return 0, outcome.time_s
    return (1 if killed else 2), outcome.time_s


def _outcome_from_exit_code(rank: int, code: int, received: Sequence[signal.Signals]) -> Outcome:
    """For a rank that left no outcome file. `received`: signals that the launcher forwarded to the
    ranks."""
    if -code in received:  # before its first step
        return Outcome(ExitCode.SIGNALED - code, f"stopped by {signal.Signals(-code).name}")
    end = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    hint = (
        "; the system kills processes when host memory runs out" if -code == signal.SIGKILL else ""
    )
    if code < 0:
        code = ExitCode.SIGNALED - code if -code in STOP_SIGNALS else ExitCode.HANG
    return Outcome(code or ExitCode.FAILED, f"rank {rank} {end}{hint}")


# ---- a rank's side

_outcome_dir: Path | None = None  # where a rank that our launcher started reports its outcome


def run_child_rank(folder_name: str) -> None:
    """Main program of a rank: unpickle the call from the folder, run it, and report the outcome
    there."""
    global _outcome_dir
    folder = _outcome_dir = Path(folder_name)
    quiet_torchao()
    with (folder / "call").open("rb") as file:
        launcher_pid, sys.path[:] = pickle.load(file)
        threading.Thread(
            target=_exit_with_launcher, args=(launcher_pid, folder), daemon=True
        ).start()
        function, args = pickle.load(file)
    outcome = _call(function, args)
    try_print()
    if outcome.text:
        exit_rank(outcome)
    elif outcome.code:
        (folder / f"stopped-{os.environ['RANK']}").write_bytes(pickle.dumps(outcome))


def quiet_torchao() -> None:
    """Hide torchao's warnings on import: about enums that it registers and GPU kernels that it
    cannot load."""
    for name in TORCHAO_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def _run_forked_rank(folder_name: str) -> None:
    """`run_child_rank` in a fork of the launcher."""
    os.setsid()  # as for new processes: a terminal's Ctrl-C reaches only the launcher
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    assert sys.__stdout__ is not None and sys.__stderr__ is not None
    # a spinner replaces them, and its thread is not forked
    sys.stdout = sys.__stdout__
    sys.stderr = sys.__stderr__
    run_child_rank(folder_name)


def exit_rank(outcome: Outcome) -> None:
    """End this rank now, from any thread, without the normal cleanup, which may wait for ranks that
    never answer, and without waiting for storage that hangs."""
    try:
        call_in_time(lambda: _report(outcome), REPORT_LIMIT_S, None)
    finally:
        os._exit(outcome.code)


def _report(outcome: Outcome) -> None:
    """Leave the outcome to our launcher or, without one, print it."""
    rank = os.environ.get("RANK", "0")
    try:
        if _outcome_dir is not None:
            (_outcome_dir / f"writing-{rank}").write_bytes(pickle.dumps(outcome))
            (_outcome_dir / f"writing-{rank}").rename(_outcome_dir / f"failed-{rank}")
        elif outcome.text and (is_rank_0() or not outcome.shared):
            write_stderr(f"{outcome.text}\n")
    except OSError:  # the folder is gone, or its disk is full
        write_stderr(f"{outcome.text}\n")


def ranks_persist() -> bool:
    """Whether these processes also run a curriculum's next entry: torchrun's ranks can rendezvous
    only once."""
    return under_torchrun() and _outcome_dir is None


def exit_with_parent() -> None:
    """Exit when the parent dies, even by SIGKILL. For ranks of torchrun; other parents may be a
    shell that started this process in the background."""
    threading.Thread(target=_exit_with_launcher, args=(os.getppid(),), daemon=True).start()


def _exit_with_launcher(launcher_pid: int, folder: Path | None = None) -> None:
    """Exit when the launcher dies, or soon after another rank failed: this one may wait for it
    forever."""
    parent = os.getppid()
    # died while this rank was starting
    gone = parent != launcher_pid and not psutil.pid_exists(launcher_pid)
    while not gone and os.getppid() == parent:
        if folder is not None and any(folder.glob("failed-*")):
            time.sleep(FAILURE_GRACE_S)
            break
        time.sleep(PARENT_POLL_S)
    os._exit(ExitCode.FAILED)


# ---- stop signals


def handle_stop_signal(number: int, again: bool) -> None:
    """Exit on the second signal. On the first, rank 0 prints a notice, since the step may take
    hours. Our own launcher prints it instead of the ranks: they cannot tell a user's request from
    the end of a failed run."""
    if again:
        os._exit(ExitCode.SIGNALED + number)
    elif _outcome_dir is None and is_rank_0():
        _print_stopping(number)


def _print_stopping(number: int) -> None:
    text = (
        f"{signal.Signals(number).name}: stopping after this step; a second signal stops at once.\n"
    )
    if number == signal.SIGINT:
        line_break = "\n" if os.isatty(2) else ""  # after the terminal's ^C
        text = f"{line_break}Stopping after this step; Ctrl-C again stops at once.\n"
    write_stderr(text)


@contextlib.contextmanager
def catch_stop_signals(
    handler: Callable[[int, bool], None] = handle_stop_signal, in_thread: bool = True
) -> Iterator[list[signal.Signals]]:
    """Catch STOP_SIGNALS and yield the list of those received, which the training loop checks after
    each step. Calls `handler(signal, again)` for each; `again` is true from the second on. A SIGHUP
    is never the second: a terminal that closes does not ask a run that is stopping to give up its
    save. Under nohup, which ignores SIGHUP, it is not caught.

    The handler runs in a thread: in the main thread, Python would run it only after that returns
    from C++, and a backward or a collective may take minutes. `in_thread=False`: in the main
    thread, where it may raise."""
    received = list[signal.Signals]()
    last_s = 0.0

    def receive(number: int, frame: FrameType | None = None) -> None:
        nonlocal last_s
        is_echo = time.monotonic() - last_s <= SIGNAL_DEBOUNCE_S or number == signal.SIGHUP
        if received and is_echo:
            return
        received.append(signal.Signals(number))
        last_s = time.monotonic()
        handler(number, len(received) > 1)

    # only the main thread may set handlers
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    with (
        _receive_in_thread(receive)
        if in_thread
        else contextlib.nullcontext(receive) as python_handler
    ):
        try:
            for number in STOP_SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    _previous_handlers[number] = signal.signal(number, python_handler)
            yield received
        finally:
            _restore_handlers()


@contextlib.contextmanager
def _receive_in_thread(
    receive: Callable[[int], None],
) -> Iterator[Callable[[int, FrameType | None], None]]:
    """Call `receive(signal)` in a thread for each stop signal that has a handler in Python, and
    yield a handler that does nothing. Blocking the signals for `sigwait` would not do: threads that
    already run could still get them, and child processes would inherit the mask."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def receive_from_pipe() -> None:
        while number := os.read(reader, 1)[0]:
            if number in STOP_SIGNALS:
                receive(number)

    thread = threading.Thread(target=receive_from_pipe, daemon=True, name="signals")
    thread.start()
    previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield lambda number, frame: None
    finally:
        signal.set_wakeup_fd(previous_fd)
        # closing it would not end the thread if a forked process has it open
        os.write(writer, bytes(1))
        thread.join()
        os.close(reader)
        os.close(writer)


_previous_handlers: dict[int, Any] = {}  # while stop signals are caught


def _restore_handlers() -> None:
    while _previous_handlers:
        number, handler = _previous_handlers.popitem()
        signal.signal(number, handler or signal.SIG_DFL)  # None: it was not set in Python


def _restore_in_fork() -> None:
    """A forked process, such as a worker of a DataLoader, must not send its signals through its
    parent's pipe."""
    if _previous_handlers:
        signal.set_wakeup_fd(-1)
        _restore_handlers()


os.register_at_fork(after_in_child=_restore_in_fork)
