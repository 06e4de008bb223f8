"""FlashAttention 4's compiled kernels: a cache on disk, filled by helper processes before the first step needs it.

A kernel takes 4 to 8 s to compile, a run needs a dozen, and one process cannot compile two at once. Cached kernels are
machine code that this process runs, so the cache is a folder that only this user can write to.
"""

import fcntl
import hashlib
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("flash-attn-4", "nvidia-cutlass-dsl", "apache-tvm-ffi")
WAIT_S = 120.0  # for helpers, at most
LOCK = "compiling.lock"


def cache_root() -> Path | None:
    """The folder of compiled kernels; None, with a warning, if it is not only ours to write."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR") or Path(home) / "ithaka" / "flash-attn-4")
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = root.stat()
        problem = "belongs to another user" if info.st_uid != os.getuid() else ""
        problem = problem or "is writable by others" * bool(info.st_mode & 0o022)
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
    if problem:
        way = "set FLASH_ATTENTION_CUTE_DSL_CACHE_DIR to a folder of your own"
        warnings.warn(f"kernels are compiled in every process: {root} {problem}; {way}", stacklevel=2)
        return None
    return root


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
def import_fa4() -> Any:
    """Import FlashAttention 4 with its caches in our folder. Waits for helpers that are compiling."""
    from flash_attn.cute import cache_utils, interface

    root = cache_root()
    if root is None:
        return interface
    wait_for_helpers(root)
    folder = root / f"sm{interface._get_device_arch()}-{_digest(versions())}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # Not by environment variables, which it reads when it is imported: another library may have done that earlier.
    for name, function in vars(interface).items():
        if isinstance(getattr(function, "compile_cache", None), cache_utils.JITCache):
            function.compile_cache = cache_utils.JITPersistentCache(folder / name)
    return interface


def start_helpers(gpu: str, program: str, kernels: Sequence[tuple[Any, ...]]) -> list[subprocess.Popen[bytes]]:
    """Start one process for each of `kernels` that is not cached: it calls `program` with the kernel's arguments.

    The helpers hold a shared lock, which `import_fa4` waits for, so that no rank compiles the same kernels.
    """
    root = cache_root()
    if root is None:
        return []
    done = {kernel: root / f"{_digest((gpu, versions(), kernel))}.done" for kernel in kernels}
    missing = [kernel for kernel, file in done.items() if not file.exists()]
    if not missing:
        return []
    with (root / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        started = []
        for kernel in missing:
            then = f"import pathlib; pathlib.Path({str(done[kernel])!r}).touch()"
            # A helper does not wait for the others, or for itself.
            setup = (
                f"import sys; sys.path[:] = {sys.path!r}; from ithaka.attention import compiled; compiled.WAIT_S = 0"
            )
            code = f"{setup}; {program}(*{kernel!r}); {then}"
            # A helper inherits the lock with the open file, and releases it when it ends.
            started.append(
                subprocess.Popen(
                    [sys.executable, "-c", code],
                    pass_fds=[lock.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )
        return started


def wait_for_helpers(root: Path) -> None:
    """Return when no process holds the lock, or after WAIT_S: kernels that are then missing are compiled here."""
    if not (root / LOCK).exists():
        return
    with (root / LOCK).open("r+") as lock:
        until_s = time.monotonic() + WAIT_S
        while time.monotonic() < until_s:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.05)


def _digest(key: Any) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()[:16]
