"""Storage for saved activations, in three tiers: the device, pinned host memory and disk.

`Store.keep` returns a handle. Deleting the handle frees its memory, so a graph dropped without a
backward leaks nothing. `__del__` may run on any thread, including the disk writer's, so it must not
block. Copies run on their own streams; the compute stream waits for a copy only where its data is
used. On a CPU device the tiers use plain memory, so tests run the same code.
"""

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
from typing import Any, TypeVar

import torch
from torch import Tensor

from ithaka.comm.mesh import use_device
from ithaka.facts.dtypes import float8_bytes
from ithaka.layer.disk import DiskFile
from ithaka.layer.slabs import Event, SlabPool, SlabRange
from ithaka.ops import float8
from ithaka.phases import MemoryCategory, phase, set_category

Saved = TypeVar("Saved")


class Store:
    """Keeps tensors in the tiers. One per process and device."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        host_bytes: int | None = None,
        disk_path: Path | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        self.pool = SlabPool(host_bytes, pin=self.on_gpu)
        self.disk = DiskFile(disk_path or Path(tempfile.gettempdir()))
        self.out_stream = torch.cuda.Stream(self.device) if self.on_gpu else None
        self.in_stream = torch.cuda.Stream(self.device) if self.on_gpu else None
        self.threads = ThreadPoolExecutor(
            2, "ithaka-store", initializer=use_device, initargs=(self.device,)
        )
        self._latest: Callable[[], Any] = lambda: None

    def keep(self, tensor: Tensor, tier: str | None, dtype: str | None = None) -> "TensorHandle":
        """Keep `tensor`; do not write to it before `release_source`. `tier` None: hold it for this
        pass only. `dtype` float8: the host and the disk get a rounded copy; its rows are the last
        dims of x [s, D] or out [c, s, n, K]."""
        if tier is None:
            return TensorHandle(tensor)
        if tier == "device":
            return TensorHandle(set_category(tensor, MemoryCategory.KEPT))
        handle = {"host": HostHandle, "disk": DiskHandle}[tier]
        return handle(tensor.contiguous(), self, dtype)

    def pin_ahead(self, num_bytes: int, count: int) -> None:
        """Pin memory in the background: `count` tensors of a pass; the first has `num_bytes`."""
        make = self.pool.make_ahead(num_bytes, count)

        def run() -> None:
            try:
                use_device(self.device)
            finally:
                make()

        threading.Thread(target=run, daemon=True, name="pinning").start()

    def disk_use(self) -> tuple[int, float, float]:
        """Since the last call: bytes moved to and from disk, seconds of doing so and of waiting."""
        usage = self.disk.moved_bytes, self.disk.busy_s, self.pool.waited_s
        self.disk.moved_bytes = 0
        self.disk.busy_s = 0.0
        self.pool.waited_s = 0.0
        return usage

    def register_layer(self, saved: Saved) -> Callable[[], Saved | None]:
        """Register what a layer saves; return a weak reference to that of the layer below."""
        below = self._latest
        self._latest = weakref.ref(saved)
        return below

    def record_event(self, stream: "torch.cuda.Stream | None" = None) -> Event:
        if not self.on_gpu:
            return None
        return (stream or torch.cuda.current_stream(self.device)).record_event()

    def wait_event(self, event: Event) -> None:
        """Make the compute stream wait for `event`."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    @contextmanager
    def on_stream(self, stream: "torch.cuda.Stream | None", *after: Event) -> Iterator[None]:
        """Queue the enclosed work on `stream`, after the events `after`."""
        if stream is None:
            yield
            return
        with torch.cuda.stream(stream):
            for event in filter(None, after):
                stream.wait_event(event)
            yield


class TensorHandle:
    """A tensor kept on the device. Base class of the other tiers' handles."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def release_source(self) -> None:
        """Release the tensor passed to `keep`. Its memory is reused after the copy."""

    def read_ahead(self, wait: bool = False) -> None:
        """Start reading from disk to the host, if there is room or, with `wait`, once there is."""

    def prefetch(self) -> None:
        """Start copying the tensor to the device."""

    def fetch(self) -> Tensor:
        """Return the tensor on the device, ready for the current stream. Repeatable."""
        return self._tensor

    def tiles(self, slices: list[slice], dim: int = 0, hold: bool = False) -> Iterator[Tensor]:
        """Yield tiles along `dim` (0 or 1), each copied while the caller uses the one before.
        `hold`: keep the tensor on the device for later calls; needs dim 0 and slices that cover
        it."""
        for rows in slices:
            yield self._tensor[rows] if dim == 0 else self._tensor[:, rows]


class HostHandle(TensorHandle):
    """A tensor kept in a slab of pinned host memory."""

    def __init__(self, tensor: Tensor, store: Store, dtype: str | None = None) -> None:
        self.store = store
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.nbytes = tensor.nbytes
        self._rows: tuple[int, int] | None = None  # number and width, if they are rounded
        if dtype == "float8":
            num_dims = min(tensor.dim() - 1, 2)
            self._rows = self.shape[:num_dims].numel(), self.shape[num_dims:].numel()
            self.nbytes = float8_bytes(*self._rows)
        if not (store.pool.busy_bytes or store.disk.busy_bytes):
            store.pool.start_pass(self.nbytes)
            store.disk.start_pass(self.nbytes)
        self._source: Tensor | None = tensor
        self._prefetched: tuple[Tensor, Event] | None = None
        acquired = store.pool.acquire(self.nbytes)
        self._range: SlabRange | None = acquired
        try:
            self._copied_out = self._copy_out(tensor, acquired)
        except BaseException:
            acquired.slab.last_copy = store.record_event(store.out_stream)  # covers what was queued
            store.pool.release(acquired)
            raise

    def release_source(self) -> None:
        if self._source is not None:
            # With this wait (the copy finished long ago) the allocator can reuse the memory in
            # stream order. With record_stream, reuse would depend on how far the host runs ahead.
            self.store.wait_event(self._copied_out)
            self._source = None

    def prefetch(self) -> None:
        if self._prefetched is None and self._source is None:
            self._prefetched = self._copy_in(slice(0, self.shape[0]), 0)

    def fetch(self) -> Tensor:
        if self._source is not None:
            return self._source
        self.prefetch()
        assert self._prefetched is not None
        (tensor, done) = self._prefetched
        self._prefetched = None
        self.store.wait_event(done)
        return tensor

    def tiles(self, slices: list[slice], dim: int = 0, hold: bool = False) -> Iterator[Tensor]:
        assert dim == 0 or not hold
        if self._source is not None:
            yield from TensorHandle(self._source).tiles(slices, dim)
            return
        full = torch.empty(self.shape, dtype=self.dtype, device=self.store.device) if hold else None
        copies = (self._copy_in(rows, dim, full) for rows in slices)
        incoming = next(copies, None)
        try:
            while incoming is not None:
                tile, done = incoming  # frees the previous tile
                incoming = next(copies, None)
                self.store.wait_event(done)
                yield tile
            self._source = full
        finally:
            # stopped early: its memory must not be reused while the copy writes to it
            if incoming is not None:
                self.store.wait_event(incoming[1])

    @phase("copies")
    def _copy_out(self, tensor: Tensor, into: SlabRange) -> Event:
        store = self.store
        with store.on_stream(store.out_stream, store.record_event(), into.slab.last_copy):
            if self._rows is None:
                into.slab.view(self.shape, self.dtype, into.where).copy_(tensor, non_blocking=True)
            else:
                float8.pack(tensor.view(self._rows), into.slab.bytes[into.where])
        return store.record_event(store.out_stream)

    def _host_tensor(self) -> Tensor:
        assert self._range is not None
        slab, where = self._range
        if self._rows is not None:  # a rounded tensor is bytes
            return slab.bytes[where]
        return slab.view(self.shape, self.dtype, where)

    @phase("copies")
    def _copy_in(self, rows: slice, dim: int, full: Tensor | None = None) -> tuple[Tensor, Event]:
        """Start copying `rows` into their place in `full`, or else into a new tensor."""
        store = self.store
        host = self._host_tensor()
        shape = (*self.shape[:dim], rows.stop - rows.start, *self.shape[dim + 1 :])
        if full is None:
            tensor = torch.empty(shape, dtype=self.dtype, device=store.device)
        else:
            tensor = full[rows]
        # One copy per contiguous block: PyTorch would copy anything else on the host first.
        blocks = enumerate(tensor) if dim == 1 else [(0, tensor)]
        with store.on_stream(store.in_stream, store.record_event(), self._copied_out):
            for i, into in blocks:
                if self._rows is None:
                    block = host[i] if dim == 1 else host
                    into.copy_(block[rows], non_blocking=True)
                else:
                    # with dim 0 and more dims than two, they start at 0
                    first = i * self.shape[1] + rows.start
                    float8.unpack(host, self._rows[0], first, into.view(-1, self._rows[1]))
        return tensor, store.record_event(store.in_stream)

    def __del__(self) -> None:
        if sys.is_finalizing() or not hasattr(self, "_copied_out"):
            return
        self.release_source()
        store = self.store
        if self._prefetched is not None:
            store.wait_event(self._prefetched[1])
        if self._range is not None:
            with store.on_stream(store.in_stream, self._copied_out):
                self._range.slab.last_copy = store.record_event(store.in_stream)
        self._free()

    def _free(self) -> None:
        if self._range is not None:
            self.store.pool.release(self._range)


class DiskHandle(HostHandle):
    """A tensor kept in the store's file. It uses host memory only on its way to and from disk."""

    def __init__(self, tensor: Tensor, store: Store, dtype: str | None = None) -> None:
        super().__init__(tensor, store, dtype)
        self._offset = store.disk.reserve(self.nbytes)
        self._reading: Future | None = None
        source = self._range
        self._range = None
        assert source is not None
        store.pool.expect_release()
        self._writing = store.threads.submit(
            _write_slab, store, source, self._copied_out, self._offset
        )

    def read_ahead(self, wait: bool = False) -> None:
        if self._reading is not None:
            return
        pool = self.store.pool
        self._range = pool.acquire(self.nbytes) if wait else pool.try_acquire(self.nbytes)
        if self._range is not None:
            self._reading = self.store.threads.submit(
                _read_slab, self.store, self._range, self._writing, self._offset
            )

    def _host_tensor(self) -> Tensor:
        self.read_ahead(wait=True)
        assert self._reading is not None
        start = time.monotonic()
        self._reading.result()
        self.store.pool.waited_s += time.monotonic() - start
        return super()._host_tensor()

    def _free(self) -> None:
        if not hasattr(self, "_writing"):  # reserving disk space failed
            super()._free()
            return
        # Must not block: this may run on a writer thread, or under a lock that the writer needs.
        if self._range is not None:
            self.store.pool.expect_release()
        release = partial(_release_all, self.store, self._range, self._offset, self.nbytes)
        (self._reading or self._writing).add_done_callback(release)


def _write_slab(store: Store, source: SlabRange, copied_out: Event, offset: int) -> None:
    try:
        if copied_out is not None:
            copied_out.synchronize()
        store.disk.write(source.slab.memory[source.where], offset)
    finally:
        store.pool.release(source, expected=True)


def _read_slab(store: Store, into: SlabRange, writing: Future, offset: int) -> None:
    writing.result()  # submitted earlier, so this cannot deadlock
    if into.slab.last_copy is not None:
        into.slab.last_copy.synchronize()
    store.disk.read(into.slab.memory[into.where], offset)


def _release_all(
    store: Store, acquired: SlabRange | None, offset: int, num_bytes: int, _: Future
) -> None:
    if acquired is not None:
        store.pool.release(acquired, expected=True)
    store.disk.mark_free(num_bytes, offset)
