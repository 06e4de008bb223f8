"""Exit codes, by which launchers, Slurm and Kubernetes decide whether to restart a run, and which
errors are transient. docs/exit-codes.md quotes the table."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit code of a command. `final`: a restart would end the same way. A command stopped by a
    signal exits with SIGNALED + signal."""

    meaning: str
    final: bool

    def __new__(cls, code: int, meaning: str, final: bool) -> ExitCode:
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        member.final = final
        return member

    DONE = 0, "all steps are done", True
    FAILED = 1, "another error; its traceback is printed", False
    WRONG_INPUT = (
        2,
        "wrong input: a setting, a file or the machine; the message says what to change",
        True,
    )
    OUT_OF_MEMORY = 3, "out of memory on a device, on the host or in the disk tier", True
    HANG = 4, "a rank hung or died; the message names it", False
    DIVERGED = (
        5,
        "diverged: a loss or gradient was not finite, or spiked, and stayed so when computed again",
        True,
    )
    TRANSIENT = (
        75,
        "transient fault: storage or network errors, a full disk, a locked run directory, a file "
        "not yet visible",
        False,
    )
    SIGNALED = (
        128,
        "stopped on request: 129 by SIGHUP, 130 by SIGINT, 138 by SIGUSR1, 143 by SIGTERM",
        False,
    )


FINAL_EXIT_CODES = frozenset(code for code in ExitCode if code.final)

# Transient storage and network faults, unlike missing files and permissions.
STORAGE_ERRNOS = ["EAGAIN", "EBUSY", "EIO", "ENOLINK", "EREMOTEIO", "ESTALE", "ETIMEDOUT"]
FULL_DISK_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
# safetensors and tokenizers have no errno.
FULL_DISK_MESSAGES = ("No space left on device", "Disk quota exceeded")
NETWORK_ERRNOS = ["ECOMM", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN"]
NETWORK_ERRNOS += ["EHOSTUNREACH", "ENETDOWN", "ENETRESET", "ENETUNREACH", "ENOTCONN", "ESHUTDOWN"]
# Some platforms lack some of these names.
TRANSIENT_ERRNOS = {getattr(errno, name, errno.EIO) for name in STORAGE_ERRNOS + NETWORK_ERRNOS}
TRANSIENT_ERRNOS.add(socket.EAI_AGAIN)
# CUDA and its callers (PyTorch, NCCL, Triton); PyTorch's CPU allocator; cuBLAS and cuDNN.
OUT_OF_MEMORY_MESSAGES = ("out of memory", "DefaultCPUAllocator", "_STATUS_ALLOC_FAILED")
TRANSIENT_HTTP_STATUS = {408, 429, 500, 502, 503, 504}  # HTTP status codes of the Hugging Face hub


class TransientError(RuntimeError):
    """A fault that a restart may get past. The message names what failed and what to check."""

    exit_code = ExitCode.TRANSIENT


def is_transient(error: BaseException) -> bool:
    """Whether the error, or one in its chain of causes, may not recur."""
    for cause in causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        has_transient_errno = isinstance(cause, OSError) and cause.errno in TRANSIENT_ERRNOS
        is_network = any(base.__name__ == "TransportError" for base in type(cause).__mro__)  # httpx
        is_transient_type = is_network or isinstance(cause, TransientError | TimeoutError)
        if has_transient_errno or is_transient_type or status in TRANSIENT_HTTP_STATUS:
            return True
    return is_disk_full(error)


def is_disk_full(error: BaseException) -> bool:
    """Whether a file could not be written because its disk or quota is full."""
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in FULL_DISK_ERRNOS:
            return True
        if any(text in str(cause) for text in FULL_DISK_MESSAGES):
            return True
    return False


def describe_transient(error: BaseException) -> str:
    """The message of a TransientError that replaces `error`."""
    if isinstance(error, TransientError):
        return str(error)
    text = f"{type(error).__name__}: {error}"
    if is_disk_full(error):
        return f"the disk is full ({text}); free space, then run the command again"
    return text


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def is_out_of_memory(error: BaseException) -> bool:
    # Match by name and message: torch may not be imported, and not all of it raises
    # torch.OutOfMemoryError.
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if type(error).__name__ in ("OutOfMemoryError", "MemoryError"):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return any(text in str(error) for text in OUT_OF_MEMORY_MESSAGES)


def exit_code_for(error: BaseException) -> ExitCode:
    """The error's own `exit_code`, or the one for its kind."""
    code = getattr(error, "exit_code", None)
    if isinstance(code, ExitCode):
        return code
    if is_out_of_memory(error):
        return ExitCode.OUT_OF_MEMORY
    return ExitCode.TRANSIENT if is_transient(error) else ExitCode.FAILED


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether the device, the host or the store ran out of memory."""
    return error is not None and exit_code_for(error) == ExitCode.OUT_OF_MEMORY
