"""Exit codes, and which errors a restart may get past.

Launchers, Slurm and Kubernetes decide by these codes whether to start a run again; docs/running-for-weeks.md quotes the
table.
"""

from __future__ import annotations

import errno
import socket
from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ended. `final`: the same command would end the same way, so do not restart it. A command that a
    signal stops exits with SIGNALED + signal."""

    meaning: str
    final: bool

    def __new__(cls, code: int, meaning: str, final: bool) -> ExitCode:
        member = int.__new__(cls, code)
        member._value_, member.meaning, member.final = code, meaning, final
        return member

    DONE = 0, "all steps are done", True
    FAILED = 1, "another error; its traceback is printed", False
    WRONG_INPUT = 2, "wrong input: a setting, a file or the machine; the message says what to change", True
    OUT_OF_MEMORY = 3, "out of memory on a device, on the host or in the disk tier", True
    HANG = 4, "a rank hung or died; the message names it", False
    DIVERGED = 5, "diverged: a loss or gradient was not finite, or spiked, and stayed so when computed again", True
    TRANSIENT = 75, "transient fault: storage or network errors, a locked run directory, a file not yet visible", False
    SIGNALED = 128, "stopped on request: 130 by SIGINT, 138 by SIGUSR1, 143 by SIGTERM", False


FINAL_EXIT_CODES = frozenset(code for code in ExitCode if code.final)

# Storage and network faults that pass, unlike missing files, permissions and full disks.
STORAGE = ["EAGAIN", "EBUSY", "EIO", "ENOLINK", "EREMOTEIO", "ESTALE", "ETIMEDOUT"]
NETWORK = ["ECOMM", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETRESET"]
NETWORK += ["ENETUNREACH", "ENOTCONN", "ESHUTDOWN"]
# Not every system has all of them.
TRANSIENT_ERRNOS = {getattr(errno, name, errno.EIO) for name in STORAGE + NETWORK} | {socket.EAI_AGAIN}
# CUDA and its callers (PyTorch, NCCL, Triton); PyTorch's CPU allocator; cuBLAS and cuDNN.
OUT_OF_MEMORY_MESSAGES = ("out of memory", "DefaultCPUAllocator", "_STATUS_ALLOC_FAILED")
TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}  # HTTP status codes of the Hugging Face hub


class TransientError(RuntimeError):
    """A fault that may have passed when the run is started again. The message says what failed and what to check."""

    exit_code = ExitCode.TRANSIENT


def is_transient(error: BaseException | None) -> bool:
    """Whether the error, or the one that caused it, may not occur again."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        passes = isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS
        if passes or isinstance(error, TransientError | TimeoutError) or status in TRANSIENT_STATUS:
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def is_out_of_memory(error: BaseException) -> bool:
    # By name and message: torch may not be imported, and only parts of it raise its own OutOfMemoryError.
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    named = type(error).__name__ in ("OutOfMemoryError", "MemoryError")
    return named or (isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY_MESSAGES))


def exit_code_for(error: BaseException) -> ExitCode:
    """The exit code of the error's class (`exit_code`), or the one that fits the error."""
    if isinstance(code := getattr(error, "exit_code", None), ExitCode):
        return code
    if is_out_of_memory(error):
        return ExitCode.OUT_OF_MEMORY
    return ExitCode.TRANSIENT if is_transient(error) else ExitCode.FAILED
