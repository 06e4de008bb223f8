"""The file of the disk tier."""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ithaka.layer.slabs import StoreError


class DiskFile:
    """An unnamed file, which dies with the process, even after kill -9. Space is reserved first."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.used_bytes = 0  # reserved in the file
        self.busy_bytes = 0  # in use by tensors
        self._free: dict[int, list[int]] = {}  # offsets by size
        self._lock = threading.RLock()  # re-entrant, as in SlabPool
        self._file: Any = None
        self.failure: str | None = None  # message of the first failed background write
        self.moved_bytes = 0
        self.busy_s = 0.0  # with at least one transfer in flight
        self._num_transfers = 0
        self._busy_since = 0.0

    def start_pass(self, num_bytes: int) -> None:
        """Call while nothing is kept. If the first tensor has a new size, start over."""
        with self._lock:
            if not self._free.get(num_bytes):
                self._free = {}
                self.used_bytes = 0

    def mark_free(self, num_bytes: int, offset: int) -> None:
        with self._lock:
            self.busy_bytes -= num_bytes
            self._free.setdefault(num_bytes, []).append(offset)

    def reserve(self, num_bytes: int) -> int:
        """Reserve bytes and return their offset. A full disk fails here, not in the background."""
        with self._lock:
            if self.failure is not None:
                raise StoreError("disk", self.failure)
            free = self._free.get(num_bytes)
            if free:
                self.busy_bytes += num_bytes
                return free.pop()
            offset = self.used_bytes
            try:
                if self._file is None:  # open until this object is deleted
                    self._file = tempfile.TemporaryFile(dir=self.directory)  # noqa: SIM115
                os.posix_fallocate(self._file.fileno(), offset, max(num_bytes, 1))
            except OSError as error:
                needed = f"{num_bytes} more bytes needed in {self.directory}, with {offset} in use"
                raise self._error(needed, error) from error
            self.used_bytes += num_bytes
            self.busy_bytes += num_bytes
            return offset

    def write(self, data: memoryview, offset: int) -> None:
        try:
            self._transfer("write", os.pwrite, data, offset)
        except StoreError as error:
            self.failure = str(error)
            raise

    def read(self, into: memoryview, offset: int) -> None:
        self._transfer("read", lambda file, data, at: os.preadv(file, [data], at), into, offset)

    def _drop_pages(self, verb: str, offset: int, num_bytes: int) -> None:
        """Drop pages from the page cache, which counts against a container's memory limit, once
        they are on disk."""
        if verb == "write":
            os.fdatasync(self._file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), offset, num_bytes, os.POSIX_FADV_DONTNEED)

    @contextmanager
    def _timed_transfer(self, num_bytes: int) -> Iterator[None]:
        with self._lock:
            self._busy_since = self._busy_since if self._num_transfers else time.monotonic()
            self._num_transfers += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_transfers -= 1
                self.moved_bytes += num_bytes
                self.busy_s += 0.0 if self._num_transfers else time.monotonic() - self._busy_since

    def _transfer(
        self, verb: str, call: Callable[[int, memoryview, int], int], data: memoryview, offset: int
    ) -> None:
        try:
            with self._timed_transfer(len(data)):
                while data:
                    moved = call(self._file.fileno(), data[: 2**30], offset)
                    if moved == 0:
                        raise OSError(f"the file ends at {offset}")
                    self._drop_pages(verb, offset, moved)
                    data = data[moved:]
                    offset = offset + moved
        except OSError as error:
            problem = f"could not {verb} {len(data)} bytes in {self.directory}"
            raise self._error(problem, error) from error

    @staticmethod
    def _error(problem: str, error: OSError) -> StoreError:
        return StoreError(
            "disk",
            f"disk: {problem} ({error.strerror or error}); set memory.disk_path to a larger disk, "
            "or use memory.offload=host or a shorter data.context",
        )
