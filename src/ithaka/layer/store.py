"""Where kept activations live: on the device, in pinned host memory, or on disk.

`keep` returns a handle, and its memory goes back to the pool when the handle dies: a graph dropped without a backward
leaks nothing. Copies run on their own streams; the compute stream waits for one only where its data is used. A CPU
device has the same tiers in plain memory, so tests run the real code. A handle's `__del__` may run on any thread, even
the writer's, so it must not block.
"""

import mmap
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ithaka.dist.mesh import use_device
from ithaka.phases import Holder, phase, tag

Event = torch.cuda.Event | None  # None on a CPU


class StoreError(RuntimeError):
    """A tier is full or failed. The message names the tier, the request, the limit and the way out."""

    def __init__(self, tier: Literal["host", "disk"], message: str) -> None:
        super().__init__(message)
        self.tier = tier


class Slab:
    """A run of host bytes, page-locked if there is a GPU. Pinned once, then reused from step to step."""

    busy: Event = None  # the last owner's copies from these bytes
    _pinned = False

    def __init__(self, num_bytes: int, pin: bool) -> None:
        # Mapped here, because the allocator behind pin_memory() rounds sizes up to powers of two.
        pages = mmap.mmap(-1, max(num_bytes, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(pages)[:num_bytes]
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]
        if pin and num_bytes > 0:
            status = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), num_bytes, 0)
            if int(status) != 0:
                raise StoreError(
                    "host",
                    f"host memory: the system refused to pin {num_bytes} bytes (error {status}); "
                    "raise the limit (ulimit -l), or use memory.offload=none or a shorter data.context",
                )
            self._pinned = True

    def view(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return self.bytes.view(dtype).view(shape)

    def __del__(self) -> None:
        if self._pinned and not sys.is_finalizing():
            if self.busy is not None:
                self.busy.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())


class _Tier:
    """Pieces of one tier by size. Freed ones serve the next tensor of their size."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self._free: dict[int, list[Any]] = {}
        self._changed = threading.Condition()  # re-entrant: a handle's __del__ may run while we hold it

    @property
    def busy_bytes(self) -> int:
        """Bytes of tensors kept now; the rest is free for reuse."""
        with self._changed:
            return self.used_bytes - _sum_bytes(self._free.copy())

    def restart(self, num_bytes: int) -> None:
        """Called while nothing is kept. A new first size means new shapes: forget the old pieces."""
        with self._changed:
            if not self._free.get(num_bytes):
                self._release_free()

    def put(self, num_bytes: int, piece: Any) -> None:
        """Makes a piece free again."""
        with self._changed:
            self._free.setdefault(num_bytes, []).append(piece)
            self._changed.notify_all()

    def _release_free(self) -> None:
        free, self._free = self._free, {}  # swap first: a handle may die and give its slab meanwhile
        self.used_bytes -= _sum_bytes(free)


def _sum_bytes(free: dict[int, list[Any]]) -> int:
    return sum(size * len(pieces) for size, pieces in free.items())


class SlabPool(_Tier):
    """Slabs; free ones are released when room is short."""

    def __init__(self, budget_bytes: int | None, pin: bool) -> None:
        super().__init__()
        self.budget_bytes, self.pin, self.peak_bytes = budget_bytes, pin, 0
        self.num_expected = 0  # slabs that the disk threads will return
        self.waited_s = 0.0  # for the disk

    def take(self, num_bytes: int) -> Slab:
        """A slab of `num_bytes`. Waits for slabs that the disk threads hold; raises StoreError if there are none."""
        with self._changed:
            while (slab := self.take_if_room(num_bytes)) is None:
                if not self.num_expected:
                    raise StoreError(
                        "host",
                        f"host memory: {num_bytes} more bytes needed beside the {self.used_bytes} in use, above the "
                        f"limit of {self.budget_bytes}; use memory.offload=disk, memory.keep_attention=none, more "
                        "ranks (parallel.cp) or a shorter data.context",
                    )
                start = time.monotonic()
                self._changed.wait()
                self.waited_s += time.monotonic() - start
            return slab

    def take_if_room(self, num_bytes: int) -> Slab | None:
        with self._changed:
            if free := self._free.get(num_bytes):
                return free.pop()
            if not self._has_room(num_bytes):
                self._release_free()
            if not self._has_room(num_bytes):
                return None
            slab = Slab(num_bytes, self.pin)
            self.used_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            return slab

    def give(self, slab: Slab, expected: bool = False) -> None:
        with self._changed:
            self.num_expected -= expected
            self.put(len(slab.bytes), slab)

    def expect(self) -> None:
        with self._changed:
            self.num_expected += 1

    def _has_room(self, num_bytes: int) -> bool:
        return self.budget_bytes is None or self.used_bytes + num_bytes <= self.budget_bytes


class DiskFile(_Tier):
    """An unnamed file that vanishes with the process, even after kill -9. Space is reserved before it is written."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self._file: Any = None
        self.failure: str | None = None  # of the background writer
        self.moved_bytes, self.busy_s = 0, 0.0  # busy_s: while at least one thread moved some
        self._moving, self._since = 0, 0.0

    def take(self, num_bytes: int) -> int:
        """An offset with `num_bytes` reserved, so that a full disk fails here, not in a background write."""
        with self._changed:
            if self.failure is not None:
                raise StoreError("disk", self.failure)
            if free := self._free.get(num_bytes):
                return free.pop()
            offset = self.used_bytes
            try:
                if self._file is None:
                    self._file = tempfile.TemporaryFile(dir=self.directory)  # noqa: SIM115 (lives as long as we do)
                os.posix_fallocate(self._file.fileno(), offset, max(num_bytes, 1))
            except OSError as error:
                needed = f"{num_bytes} more bytes needed in {self.directory} beside the {offset} in use"
                raise self._error(needed, error) from error
            self.used_bytes += num_bytes
            return offset

    def write(self, data: memoryview, offset: int) -> None:
        try:
            self._move("write", os.pwrite, data, offset)
        except StoreError as error:
            self.failure = str(error)
            raise

    def read(self, into: memoryview, offset: int) -> None:
        self._move("read", lambda file, part, at: os.preadv(file, [part], at), into, offset)

    @contextmanager
    def _busy(self, num_bytes: int) -> Iterator[None]:
        with self._changed:
            self._since = self._since if self._moving else time.monotonic()
            self._moving += 1
        try:
            yield
        finally:
            with self._changed:
                self._moving -= 1
                self.moved_bytes += num_bytes
                self.busy_s += 0.0 if self._moving else time.monotonic() - self._since

    def _move(self, verb: str, move: Callable[[int, memoryview, int], int], data: memoryview, offset: int) -> None:
        try:
            with self._busy(len(data)):
                while data:
                    moved = move(self._file.fileno(), data[: 2**30], offset)
                    if moved == 0:
                        raise OSError(f"the file ends at {offset}")
                    data, offset = data[moved:], offset + moved
        except OSError as error:
            raise self._error(f"could not {verb} {len(data)} bytes in {self.directory}", error) from error

    @staticmethod
    def _error(what: str, error: OSError) -> StoreError:
        way_out = "set memory.disk_path to a larger disk, or use memory.offload=host or a shorter data.context"
        return StoreError("disk", f"disk: {what} ({error.strerror or error}); {way_out}")


class Store:
    """Keeps tensors in tiers. One per process and device."""

    def __init__(
        self, device: torch.device | str = "cpu", *, host_bytes: int | None = None, disk_path: Path | None = None
    ) -> None:
        self.device = torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        self.pool = SlabPool(host_bytes, pin=self.on_gpu)
        self.disk = DiskFile(disk_path or Path(tempfile.gettempdir()))
        self.out_stream = torch.cuda.Stream(self.device) if self.on_gpu else None
        self.in_stream = torch.cuda.Stream(self.device) if self.on_gpu else None
        self.threads = ThreadPoolExecutor(2, "ithaka-store", initializer=use_device, initargs=(self.device,))
        self._latest: Callable[[], Any] = lambda: None

    def keep(self, tensor: Tensor, tier: str | None) -> "Kept":
        """Starts keeping `tensor`, which must not be written before `settle`. `tier` None: for this pass only."""
        if tier is None:
            return Kept(tensor)
        if tier == "device":
            return Kept(tag(tensor, Holder.KEPT))
        if not (self.pool.busy_bytes or self.disk.busy_bytes):
            self.pool.restart(tensor.nbytes)
            self.disk.restart(tensor.nbytes)
        return {"host": KeptOnHost, "disk": KeptOnDisk}[tier](tensor.contiguous(), self)

    def disk_use(self) -> tuple[int, float, float]:
        """Since the last call: bytes moved to and from disk, seconds in which some moved, seconds waited for them."""
        disk, pool = self.disk, self.pool
        use, disk.moved_bytes = (disk.moved_bytes, disk.busy_s, pool.waited_s), 0
        disk.busy_s = pool.waited_s = 0.0
        return use

    def follow(self, saved: Any) -> Callable[[], Any]:
        """Remembers `saved` as the latest; returns a weak reference to the one before it."""
        before, self._latest = self._latest, weakref.ref(saved)
        return before

    def mark(self, stream: "torch.cuda.Stream | None" = None) -> Event:
        return (stream or torch.cuda.current_stream(self.device)).record_event() if self.on_gpu else None

    def wait(self, event: Event) -> None:
        """Makes the compute stream wait for `event`."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    @contextmanager
    def on(self, stream: "torch.cuda.Stream | None", *after: Event) -> Iterator[None]:
        """Queues the work inside on `stream`, after the events `after`."""
        if stream is None:
            yield
            return
        with torch.cuda.stream(stream):
            for event in filter(None, after):
                stream.wait_event(event)
            yield


class Kept:
    """A tensor kept on the device; also the interface of the other tiers."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def settle(self) -> None:
        """Releases the tensor passed to `keep`; its memory is reused once the copy is done."""

    def read_ahead(self, wait: bool = False) -> None:
        """Starts reading from disk into host memory if there is room; `wait`: waits for room."""

    def prefetch(self) -> None:
        """Starts copying the whole tensor to the device."""

    def fetch(self) -> Tensor:
        """The whole tensor on the device, ready for the current stream. May be called again."""
        return self._tensor

    def tiles(self, slices: list[slice], dim: int = 0, hold: bool = False) -> Iterator[Tensor]:
        """Yields the tiles along `dim` (0 or 1), copying the next one while this one is used.

        `hold`: leaves the tiles (dim 0, all of the tensor) on the device for the next walk.
        """
        for rows in slices:
            yield self._tensor[rows] if dim == 0 else self._tensor[:, rows]


class KeptOnHost(Kept):
    """A tensor kept in a slab of pinned host memory."""

    def __init__(self, tensor: Tensor, store: Store) -> None:
        self.store, self.shape, self.dtype, self.nbytes = store, tensor.shape, tensor.dtype, tensor.nbytes
        self._source: Tensor | None = tensor
        self._coming: tuple[Tensor, Event] | None = None
        self._slab: Slab | None = store.pool.take(tensor.nbytes)
        self._copied_out = self._copy_out(tensor, self._slab)

    def settle(self) -> None:
        if self._source is not None:
            # The compute stream waits (the copy is long done), so the allocator may reuse the memory in stream order.
            # record_stream would tie reuse to how far the host runs ahead.
            self.store.wait(self._copied_out)
            self._source = None

    def prefetch(self) -> None:
        if self._coming is None and self._source is None:
            self._coming = self._copy_in(slice(0, self.shape[0]), 0)

    def fetch(self) -> Tensor:
        if self._source is not None:
            return self._source
        self.prefetch()
        assert self._coming is not None
        (tensor, done), self._coming = self._coming, None
        self.store.wait(done)
        return tensor

    def tiles(self, slices: list[slice], dim: int = 0, hold: bool = False) -> Iterator[Tensor]:
        assert dim == 0 or not hold
        if self._source is not None:
            yield from Kept(self._source).tiles(slices, dim)
            return
        held = torch.empty(self.shape, dtype=self.dtype, device=self.store.device) if hold else None
        copies = (self._copy_in(rows, dim, held) for rows in slices)
        coming = next(copies, None)
        try:
            while coming is not None:
                tile, done = coming  # drops the tile before it
                coming = next(copies, None)
                self.store.wait(done)
                yield tile
            self._source = held
        finally:
            if coming is not None:  # the walk ends early and its memory is freed: not while a copy writes to it
                self.store.wait(coming[1])

    @phase("copies")
    def _copy_out(self, tensor: Tensor, slab: Slab) -> Event:
        store = self.store
        with store.on(store.out_stream, store.mark(), slab.busy):
            slab.view(self.shape, self.dtype).copy_(tensor, non_blocking=True)
        return store.mark(store.out_stream)

    def _host(self) -> Tensor:
        assert self._slab is not None
        return self._slab.view(self.shape, self.dtype)

    @phase("copies")
    def _copy_in(self, rows: slice, dim: int, held: Tensor | None = None) -> tuple[Tensor, Event]:
        """Starts copying `rows` into `held` or, without it, into a new tensor."""
        store, host = self.store, self._host()
        shape = (*self.shape[:dim], rows.stop - rows.start, *self.shape[dim + 1 :])
        tensor = held[rows] if held is not None else torch.empty(shape, dtype=self.dtype, device=store.device)
        # Part by part, contiguous on both sides: anything else is first copied on the host.
        parts = zip(tensor, host, strict=True) if dim == 1 else [(tensor, host)]
        with store.on(store.in_stream, store.mark(), self._copied_out):
            for into, part in parts:
                into.copy_(part[rows], non_blocking=True)
        return tensor, store.mark(store.in_stream)

    def __del__(self) -> None:
        if sys.is_finalizing() or not hasattr(self, "_copied_out"):
            return
        self.settle()
        store = self.store
        if self._coming is not None:
            store.wait(self._coming[1])
        if self._slab is not None:
            with store.on(store.in_stream, self._copied_out):
                self._slab.busy = store.mark(store.in_stream)
        self._give_back()

    def _give_back(self) -> None:
        if self._slab is not None:
            self.store.pool.give(self._slab)


class KeptOnDisk(KeptOnHost):
    """A tensor kept in the store's file; it only passes through host memory."""

    def __init__(self, tensor: Tensor, store: Store) -> None:
        super().__init__(tensor, store)
        self._offset = store.disk.take(tensor.nbytes)
        self._reading: Future | None = None
        slab, self._slab = self._slab, None
        assert slab is not None
        store.pool.expect()
        self._writing = store.threads.submit(_write, store, slab, self._copied_out, self._offset)

    def read_ahead(self, wait: bool = False) -> None:
        if self._reading is not None:
            return
        pool = self.store.pool
        self._slab = pool.take(self.nbytes) if wait else pool.take_if_room(self.nbytes)
        if self._slab is not None:
            self._reading = self.store.threads.submit(_read, self.store, self._slab, self._writing, self._offset)

    def _host(self) -> Tensor:
        self.read_ahead(wait=True)
        assert self._reading is not None
        start = time.monotonic()
        self._reading.result()
        self.store.pool.waited_s += time.monotonic() - start
        return super()._host()

    def _give_back(self) -> None:
        if not hasattr(self, "_writing"):  # the disk was full
            super()._give_back()
            return
        # Must not block: it may run on a writer thread, or under a lock that the writer needs.
        if self._slab is not None:
            self.store.pool.expect()
        give = partial(_give, self.store, self._slab, self._offset, self.nbytes)
        (self._reading or self._writing).add_done_callback(give)


def _write(store: Store, slab: Slab, copied_out: Event, offset: int) -> None:
    try:
        if copied_out is not None:
            copied_out.synchronize()
        store.disk.write(slab.memory, offset)
    finally:
        store.pool.give(slab, expected=True)


def _read(store: Store, slab: Slab, writing: Future, offset: int) -> None:
    writing.result()  # submitted earlier, so this cannot deadlock
    if slab.busy is not None:
        slab.busy.synchronize()
    store.disk.read(slab.memory, offset)


def _give(store: Store, slab: Slab | None, offset: int, num_bytes: int, _: Future) -> None:
    if slab is not None:
        store.pool.give(slab, expected=True)
    store.disk.put(num_bytes, offset)
