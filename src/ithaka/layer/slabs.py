"""Host memory for saved activations and checkpoints: slabs, and a pool of them."""

import mmap
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ithaka.exits import ExitCode

Event = torch.cuda.Event | None  # None on a CPU device
PIN_THREADS = 8
MIN_THREADED_BYTES = 2**26


class StoreError(RuntimeError):
    """A tier is full or has failed. The message gives tier, request, limit and fix."""

    exit_code = ExitCode.OUT_OF_MEMORY

    def __init__(self, tier: Literal["host", "disk"], message: str) -> None:
        super().__init__(message)
        self.tier = tier


class Slab:
    """A host buffer, pinned if there is a GPU. Pinned once and reused from step to step."""

    last_copy: Event = None  # the last copy out of this buffer for a tensor that is no longer kept
    num_tensors = 0  # kept here: one, or several of a short sequence
    _end = 0
    _pinned = False

    def __init__(self, num_bytes: int, pin: bool) -> None:
        # Not pin_memory(), whose allocator rounds sizes up to powers of two.
        pages = mmap.mmap(-1, max(num_bytes, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(pages)[:num_bytes]
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]
        if pin and num_bytes > 0:
            touch_pages(self.bytes)
            status = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), num_bytes, 0)
            if int(status) != 0:
                raise StoreError(
                    "host",
                    f"host memory: cannot pin {num_bytes} bytes (CUDA error {status}); raise "
                    "RLIMIT_MEMLOCK (ulimit -l), or use memory.offload=none or a shorter "
                    "data.context",
                )
            self._pinned = True

    def view(self, shape: torch.Size, dtype: torch.dtype, where: slice = slice(None)) -> Tensor:
        return self.bytes[where].view(dtype).view(shape)

    def take(self, num_bytes: int) -> "SlabRange | None":
        """Return a range of bytes for a tensor, if there is room behind the others."""
        start = -(-self._end // 16) * 16 if self.num_tensors else 0  # aligned for every dtype
        if start + num_bytes > len(self.bytes):
            return None
        self.num_tensors = self.num_tensors + 1
        self._end = start + num_bytes
        return SlabRange(self, slice(start, self._end))

    def __del__(self) -> None:
        if self._pinned and not sys.is_finalizing():
            if self.last_copy is not None:
                self.last_copy.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())


def touch_pages(memory: Tensor) -> None:
    """Make the system provide the pages of new memory. cudaHostRegister would use one thread."""
    page_starts = memory[:: mmap.PAGESIZE]  # a byte of each page
    if len(memory) < MIN_THREADED_BYTES:
        page_starts.zero_()
        return
    with ThreadPoolExecutor(PIN_THREADS, "ithaka-pin") as threads:  # zero_ releases the GIL
        list(threads.map(Tensor.zero_, page_starts.chunk(PIN_THREADS)))


class SlabRange(NamedTuple):
    """The bytes of a slab that hold a tensor."""

    slab: Slab
    where: slice


class SlabPool:
    """Slabs within a budget. Those of the longest pass serve shorter ones: tensors grow with the
    sequence, so each uses a slab of the size that it would have in the longest pass."""

    def __init__(self, budget_bytes: int | None, pin: bool) -> None:
        self.budget_bytes = budget_bytes
        self.pin = pin
        self.used_bytes = 0  # allocated
        self.peak_bytes = 0  # the maximum of used_bytes
        self.busy_bytes = 0  # in use by tensors
        self.num_expected = 0  # tensors that the disk threads will release
        self.waited_s = 0.0  # spent waiting for the disk
        self.making_s = 0.0  # spent pinning
        self.waited_for_slabs_s = 0.0  # spent waiting for the pinning thread
        self._coming: Counter[int] = Counter()  # slabs that `make_ahead` will add, by size
        self._making_bytes = 0  # size of the slab being pinned in the background
        self._slabs: dict[int, list[Slab]] = {}  # by size
        self._first_bytes = 0  # of this pass's first tensor
        self._longest_bytes = 0  # of the longest pass's first tensor
        # re-entrant: a handle's __del__ may run while this thread holds it
        self._changed = threading.Condition()

    def start_pass(self, num_bytes: int) -> None:
        """Call while nothing is kept, with the first tensor's size. Makes room if it is larger."""
        with self._changed:
            self._first_bytes = num_bytes
            if num_bytes > self._longest_bytes:
                self._longest_bytes = num_bytes
                self._drop_free()

    def make_ahead(self, num_bytes: int, count: int) -> Callable[[], None]:
        """Announce slabs of the size of the longest pass's first tensor; return a function that
        makes them, for another thread. It stops at the budget, or if memory cannot be pinned,
        which `acquire` then reports."""
        self._longest_bytes = num_bytes
        self._coming[num_bytes] = count

        def make() -> None:
            try:
                while self._make_announced(num_bytes):
                    pass
            finally:
                with self._changed:
                    self._coming.clear()
                    self._changed.notify_all()

        return make

    def _make_announced(self, num_bytes: int) -> bool:
        """Make a slab, without the lock. Returns whether more are expected."""
        with self._changed:
            if not self._coming[num_bytes] or not self._has_room(num_bytes):
                return False
            self._making_bytes = num_bytes
        slab = None
        with suppress(StoreError, OSError):
            slab = self._new_slab(num_bytes)
        with self._changed:
            self._making_bytes = 0
            if slab is not None:
                self._add(slab)
                self._coming[num_bytes] = max(0, self._coming[num_bytes] - 1)
            self._changed.notify_all()
        return slab is not None

    def acquire(self, num_bytes: int) -> SlabRange:
        """Return `num_bytes` of a slab. Without room, wait for the disk threads, share any slab
        (several short passes at once), or raise StoreError."""
        with self._changed:
            while (acquired := self.try_acquire(num_bytes)) is None:
                if not self.num_expected:
                    acquired = self._take([*chain(*self._slabs.values())], num_bytes)
                    if acquired is not None:
                        return acquired
                    raise StoreError(
                        "host",
                        f"host memory: {num_bytes} more bytes needed, with {self.used_bytes} of "
                        f"the limit of {self.budget_bytes} in use; use memory.offload=disk, "
                        "memory.keep_attention=none, more ranks (parallel.cp) or a shorter "
                        "data.context",
                    )
                start = time.monotonic()
                self._changed.wait()
                self.waited_s += time.monotonic() - start
            return acquired

    def try_acquire(self, num_bytes: int) -> SlabRange | None:
        with self._changed:
            in_longest = num_bytes * self._longest_bytes // max(1, self._first_bytes)
            is_known = in_longest in self._slabs or self._coming[in_longest] > 0
            size = in_longest if in_longest >= num_bytes and is_known else num_bytes
            # free ones first
            slabs = sorted(self._slabs.get(size, ()), key=lambda slab: slab.num_tensors)
            acquired = self._take(slabs, num_bytes)
            while acquired is None and self._coming[size]:
                start = time.monotonic()
                self._changed.wait()
                self.waited_for_slabs_s += time.monotonic() - start
                acquired = self._take(self._slabs.get(size, ()), num_bytes)
            if acquired is None:
                slab = self._make_slab(size) or self._make_slab(num_bytes)
                acquired = None if slab is None else self._take([slab], num_bytes)
            return acquired

    def _take(self, slabs: Iterable[Slab], num_bytes: int) -> SlabRange | None:
        acquired = next(filter(None, (slab.take(num_bytes) for slab in slabs)), None)
        self.busy_bytes += 0 if acquired is None else num_bytes
        return acquired

    def release(self, acquired: SlabRange, expected: bool = False) -> None:
        with self._changed:
            self.num_expected -= expected
            self.busy_bytes -= acquired.where.stop - acquired.where.start
            acquired.slab.num_tensors -= 1
            self._changed.notify_all()

    def expect_release(self) -> None:
        with self._changed:
            self.num_expected += 1

    def _make_slab(self, num_bytes: int) -> Slab | None:
        if not self._has_room(num_bytes):
            self._drop_free()
        if not self._has_room(num_bytes):
            return None
        slab = self._new_slab(num_bytes)
        self._add(slab)
        return slab

    def _new_slab(self, num_bytes: int) -> Slab:
        start = time.monotonic()
        slab = Slab(num_bytes, self.pin)
        self.making_s += time.monotonic() - start
        return slab

    def _add(self, slab: Slab) -> None:
        num_bytes = len(slab.bytes)
        self._slabs.setdefault(num_bytes, []).append(slab)
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _drop_free(self) -> None:
        self._coming.clear()
        busy = {}
        for size, slabs in self._slabs.items():
            kept = [slab for slab in slabs if slab.num_tensors]
            if kept:
                busy[size] = kept
        self._slabs = busy
        self.used_bytes = sum(size * len(slabs) for size, slabs in busy.items())

    def _has_room(self, num_bytes: int) -> bool:
        return (
            self.budget_bytes is None
            or self.used_bytes + self._making_bytes + num_bytes <= self.budget_bytes
        )
