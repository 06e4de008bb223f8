"""Exit codes, by which launchers, Slurm and Kubernetes decide whether to restart a run, and which errors are transient.
docs/exit-codes.md quotes the table."""

from __future__ import annotations

import errno
import socket
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit code of a command. `final`: a restart would end the same way. A command stopped by a signal exits with
    SIGNALED + signal."""

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

# Transient storage and network faults, unlike missing files, permissions and full disks.
STORAGE_ERRNOS = ["EAGAIN", "EBUSY", "EIO", "ENOLINK", "EREMOTEIO", "ESTALE", "ETIMEDOUT"]
NETWORK_ERRNOS = ["ECOMM", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN"]
NETWORK_ERRNOS += ["ENETRESET", "ENETUNREACH", "ENOTCONN", "ESHUTDOWN"]
# Some platforms lack some of these names.
TRANSIENT_ERRNOS = {getattr(errno, name, errno.EIO) for name in STORAGE_ERRNOS + NETWORK_ERRNOS} | {socket.EAI_AGAIN}
# CUDA and its callers (PyTorch, NCCL, Triton); PyTorch's CPU allocator; cuBLAS and cuDNN.
OUT_OF_MEMORY_MESSAGES = ("out of memory", "DefaultCPUAllocator", "_STATUS_ALLOC_FAILED")
TRANSIENT_HTTP_STATUS = {408, 429, 500, 502, 503, 504}  # HTTP status codes of the Hugging Face hub


class TransientError(RuntimeError):
    """A fault that a restart may get past. The message names what failed and what to check."""

    exit_code = ExitCode.TRANSIENT


def is_transient(error: BaseException | None) -> bool:
    """Whether the error, or one in its chain of causes, may not recur."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        has_transient_errno = isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS
        is_network = any(base.__name__ == "TransportError" for base in type(error).__mro__)  # httpx
        is_transient_type = is_network or isinstance(error, TransientError | TimeoutError)
        if has_transient_errno or is_transient_type or status in TRANSIENT_HTTP_STATUS:
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def is_out_of_memory(error: BaseException) -> bool:
    # Match by name and message: torch may not be imported, and not all of it raises torch.OutOfMemoryError.
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    has_name = type(error).__name__ in ("OutOfMemoryError", "MemoryError")
    return has_name or (isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY_MESSAGES))


def exit_code_for(error: BaseException) -> ExitCode:
    """The error's own `exit_code`, or the one for its kind."""
    if isinstance(code := getattr(error, "exit_code", None), ExitCode):
        return code
    if is_out_of_memory(error):
        return ExitCode.OUT_OF_MEMORY
    return ExitCode.TRANSIENT if is_transient(error) else ExitCode.FAILED
