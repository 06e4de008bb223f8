"""FlashAttention 4's compiled kernels: a cache on disk, which helper processes fill early.

A kernel takes 4 to 8 s to compile, a run needs a dozen, and one process cannot compile two at once.
Cached kernels are machine code that this process runs, so the cache is a folder that only this user
can write to.

Without a usable folder, or if helpers fail, a rank compiles the kernels that it needs.
"""

import fcntl
import hashlib
import os
import platform
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from ithaka.foreign.flash_attention import device_arch

PACKAGES = ("flash-attn-4", "nvidia-cutlass-dsl", "apache-tvm-ffi")
WAIT_S = 120  # a helper is killed after this time, so no rank waits longer
LOCK = "compiling.lock"
IS_HELPER = "ITHAKA_COMPILES_KERNELS"  # set in the environment of helpers


def cache_root() -> Path | None:
    """The folder of compiled kernels; None, with a warning, if it cannot be used or others can
    write to it."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    own = os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
    root = Path(own or caches / "ithaka" / "flash-attn-4")
    problem = ""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = root.stat()
        if info.st_uid != os.getuid():
            problem = "belongs to another user"
        elif info.st_mode & 0o022:
            problem = "is writable by others"
        else:
            with (root / LOCK).open("a") as lock:
                # Not all file systems have locks, which FlashAttention 4 needs too.
                _try_lock(lock, fcntl.LOCK_SH)
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
    if problem:
        _warn(f"{root} {problem}")
        return None
    return root


def _warn(problem: str) -> None:
    fix = "set FLASH_ATTENTION_CUTE_DSL_CACHE_DIR to a folder of your own"
    warnings.warn(f"kernels are compiled in every process: {problem}; {fix}", stacklevel=3)


def _try_lock(file: IO[str], kind: int) -> bool:
    """Whether this process has the lock now."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def versions() -> str:
    """Everything but the GPU that compiled kernels depend on."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} none")
    return ", ".join([*found, platform.machine(), platform.python_version()])


@cache
def import_fa4() -> ModuleType:
    """Import FlashAttention 4 with its caches in our folder. Waits for helpers that compile."""
    from flash_attn.cute import cache_utils, interface

    root = cache_root()
    if root is None:
        return interface
    try:
        wait_for_helpers(root)
        folder = root / f"sm{device_arch(interface)}-{_digest(versions())}"
        folder.mkdir(mode=0o700, exist_ok=True)
        # Not by environment variables: another library may have imported it earlier.
        functions = {
            name: function
            for name, function in vars(interface).items()
            if isinstance(getattr(function, "compile_cache", None), cache_utils.JITCache)
        }
        caches = {name: cache_utils.JITPersistentCache(folder / name) for name in functions}
    except OSError as error:
        _warn(f"{root} cannot be written ({error.strerror})")
        return interface
    for name, function in functions.items():
        function.compile_cache = caches[name]
    return interface


def start_helpers(
    gpu: str, program: str, kernels: Sequence[tuple[Any, ...]]
) -> list[subprocess.Popen[bytes]]:
    """Start a process for each of `kernels` that is not cached: it calls `program` with them.

    They hold a shared lock, which `import_fa4` waits for, so that no rank compiles the same kernel.
    """
    root = cache_root()
    if root is None:
        return []
    done = {kernel: root / f"{_digest((gpu, versions(), kernel))}.done" for kernel in kernels}
    missing = [kernel for kernel, file in done.items() if not file.exists()]
    if not missing:
        return []
    started: list[subprocess.Popen[bytes]] = []
    setup = f"import signal, sys; signal.alarm({WAIT_S}); sys.path[:] = {sys.path!r}"
    try:
        with (root / LOCK).open("a") as lock:
            if not _try_lock(lock, fcntl.LOCK_SH):
                return started
            for kernel in missing:
                then = f"import pathlib; pathlib.Path({str(done[kernel])!r}).touch()"
                # A helper inherits the lock with the open file, and releases it when it ends.
                helper = subprocess.Popen(
                    [sys.executable, "-c", f"{setup}; {program}(*{kernel!r}); {then}"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "OMP_NUM_THREADS": "1", IS_HELPER: "1"},
                    pass_fds=[lock.fileno()],
                    start_new_session=True,
                )
                started.append(helper)
    except OSError as error:
        num_failed = len(missing) - len(started)
        _warn_about_helpers(f"{num_failed} of {len(missing)} could not start ({error.strerror})")
    threading.Thread(target=_reap, args=(started,), daemon=True).start()
    return started


def _reap(helpers: Sequence[subprocess.Popen[bytes]]) -> None:
    failed = sum(helper.wait() != 0 for helper in helpers)
    if failed:
        _warn_about_helpers(f"{failed} of {len(helpers)} failed")


def _warn_about_helpers(problem: str) -> None:
    warnings.warn(
        f"helper processes that compile kernels: {problem}; ranks compile these kernels",
        stacklevel=2,
    )


def wait_for_helpers(root: Path) -> None:
    """Return when no process holds the lock, or after WAIT_S."""
    if IS_HELPER in os.environ:  # holds the lock itself
        return
    with (root / LOCK).open("a") as lock:
        until_s = time.monotonic() + WAIT_S
        while time.monotonic() < until_s and not _try_lock(lock, fcntl.LOCK_EX):
            time.sleep(0.05)


def _digest(key: object) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()[:16]
