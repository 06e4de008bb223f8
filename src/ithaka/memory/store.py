"""Where kept activations live: on the device, in pinned host memory, or on disk.

`keep` returns a handle; the memory behind it goes back to the pool when the handle dies, so a graph that is thrown
away without a backward leaks nothing. Copies run on their own streams: the compute stream waits for one only where
its data is used. On a CPU device the tiers are the same with plain memory, so tests run the real code.
"""

import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ithaka.phases import KEPT, phase, tag

TIERS = ("device", "host", "disk")


class StoreError(RuntimeError):
    """A tier is full: says which, what was asked for, what there is, and what to change."""


class Slab:
    """A run of host bytes, page-locked where there is a GPU. Pinned once, reused over steps."""

    def __init__(self, num_bytes: int, pin: bool) -> None:
        # An own mapping: the allocator behind pin_memory() rounds sizes up to powers of two.
        self._map = mmap.mmap(-1, max(num_bytes, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)[:num_bytes]
        self.busy: torch.cuda.Event | None = None  # the last owner's copies out of these bytes
        self._pinned = pin and num_bytes > 0
        if self._pinned:
            status = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), num_bytes, 0)
            if int(status) != 0:
                raise StoreError(f"the system refused to pin {num_bytes} bytes of host memory (error {status})")

    def view(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return self.bytes.view(dtype).view(shape)

    def __del__(self) -> None:
        if getattr(self, "_pinned", False) and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())


class SlabPool:
    """Slabs by size. Freed slabs wait for the next tensor of their size; they are given up when room is short."""

    def __init__(self, budget_bytes: int | None, pin: bool) -> None:
        self.budget_bytes, self.pin = budget_bytes, pin
        self.used_bytes = self.peak_bytes = 0
        self.num_writing = 0  # slabs that will come back by themselves once they are on disk
        self._free: dict[int, list[Slab]] = {}
        self._changed = threading.Condition()  # over an RLock: a handle may die anywhere, also in here

    def take(self, num_bytes: int) -> Slab:
        """A slab of `num_bytes`. Waits while the disk writer holds what is missing; else a full pool is an error."""
        with self._changed:
            while True:
                free = self._free.get(num_bytes)
                if free:
                    return free.pop()
                if not self._has_room(num_bytes):
                    self._shrink()
                if self._has_room(num_bytes):
                    break
                if not self.num_writing:
                    raise StoreError(self._full(num_bytes))
                self._changed.wait()
            self.used_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return Slab(num_bytes, self.pin)

    def give(self, slab: Slab, written: bool = False) -> None:
        with self._changed:
            self.num_writing -= written
            self._free.setdefault(len(slab.bytes), []).append(slab)
            self._changed.notify_all()

    def expect_written(self) -> None:
        with self._changed:
            self.num_writing += 1

    @property
    def busy_bytes(self) -> int:
        """Of tensors that are kept now; the rest waits to be used again."""
        with self._changed:
            return self.used_bytes - sum(size * len(slabs) for size, slabs in self._free.items())

    def has_room(self, num_bytes: int) -> bool:
        with self._changed:
            return bool(self._free.get(num_bytes)) or self._has_room(num_bytes)

    def _has_room(self, num_bytes: int) -> bool:
        return self.budget_bytes is None or self.used_bytes + num_bytes <= self.budget_bytes

    def _shrink(self) -> None:
        self.used_bytes -= sum(size * len(slabs) for size, slabs in self._free.items())
        self._free.clear()

    def _full(self, num_bytes: int) -> str:
        return (
            f"host memory: {num_bytes} more bytes asked for beside {self.used_bytes} kept, with "
            f"{self.budget_bytes} allowed; use memory.offload=disk, memory.keep_attention=none or less context"
        )


class DiskFile:
    """One file without a name: it goes away with the process, also after kill -9. Space is reserved up front."""

    def __init__(self, directory: Path, budget_bytes: int | None) -> None:
        self.directory, self.budget_bytes = directory, budget_bytes
        self._file: Any = None
        self._free: dict[int, list[int]] = {}
        self.used_bytes = 0

    def take(self, num_bytes: int) -> int:
        """An offset with `num_bytes` reserved, so that a full disk shows here and not in the middle of a write."""
        free = self._free.get(num_bytes)
        if free:
            return free.pop()
        if self.budget_bytes is not None and self.used_bytes + num_bytes > self.budget_bytes:
            raise StoreError(self._full(num_bytes, f"{self.budget_bytes} bytes allowed"))
        offset = self.used_bytes
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self.directory)  # noqa: SIM115 (lives as long as we do)
            os.posix_fallocate(self._file.fileno(), offset, max(num_bytes, 1))
        except OSError as error:
            raise StoreError(self._full(num_bytes, error.strerror or str(error))) from error
        self.used_bytes += num_bytes
        return offset

    def give(self, offset: int, num_bytes: int) -> None:
        self._free.setdefault(num_bytes, []).append(offset)

    @property
    def busy_bytes(self) -> int:
        return self.used_bytes - sum(size * len(offsets) for size, offsets in self._free.items())

    def write(self, data: memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(self._file.fileno(), data[: 2**30], offset)
            data, offset = data[written:], offset + written

    def read(self, into: memoryview, offset: int) -> None:
        while into:
            read = os.preadv(self._file.fileno(), [into[: 2**30]], offset)
            if read == 0:
                raise StoreError(f"disk: {len(into)} bytes are missing at offset {offset} of the store's file")
            into, offset = into[read:], offset + read

    def _full(self, num_bytes: int, why: str) -> str:
        return (
            f"disk: {num_bytes} more bytes asked for in {self.directory} beside {self.used_bytes} kept ({why}); "
            "set memory.disk_path to a larger disk, or use memory.keep_attention=none or less context"
        )


class Store:
    """Keeps tensors in tiers. One per process and device."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        host_bytes: int | None = None,
        disk_path: Path | None = None,
        disk_bytes: int | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        self.pool = SlabPool(host_bytes, pin=self.on_gpu)
        self.disk = DiskFile(disk_path or Path(tempfile.gettempdir()), disk_bytes)
        self.out_stream = torch.cuda.Stream(self.device) if self.on_gpu else None
        self.in_stream = torch.cuda.Stream(self.device) if self.on_gpu else None
        self._threads: ThreadPoolExecutor | None = None

    def keep(self, tensor: Tensor, tier: str) -> "Kept":
        """Starts keeping `tensor`, which must not be written before `settle`."""
        assert tier in TIERS, tier
        if tier == "device":
            return Kept(tag(tensor, KEPT["device"]))
        return (KeptOnHost if tier == "host" else KeptOnDisk)(tensor.contiguous(), self)

    def submit(self, work, *args) -> Future:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(2, thread_name_prefix="ithaka-store")
        return self._threads.submit(work, *args)

    def mark(self, stream: "torch.cuda.Stream | None" = None) -> "torch.cuda.Event | None":
        if not self.on_gpu:
            return None
        event = torch.cuda.Event()
        event.record(stream or torch.cuda.current_stream(self.device))
        return event

    def wait(self, event: "torch.cuda.Event | None") -> None:
        """The compute stream goes on only after `event`."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    @contextmanager
    def on(self, stream: "torch.cuda.Stream | None", *after: "torch.cuda.Event | None") -> Iterator[None]:
        """Work in here is queued on `stream`, behind the events `after`."""
        if stream is None:
            yield
            return
        with torch.cuda.stream(stream):
            for event in after:
                if event is not None:
                    stream.wait_event(event)
            yield


class Kept:
    """A tensor kept on the device; also the interface of the other tiers."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def settle(self) -> None:
        """Lets go of the tensor that was handed over; its memory is reused once the copy is done."""

    def approach(self) -> None:
        """Starts bringing the bytes to host memory (from disk), if there is room."""

    def prefetch(self) -> None:
        """Starts bringing the whole tensor to the device."""

    def fetch(self) -> Tensor:
        """The whole tensor on the device, ready for the current stream. May be called again."""
        return self._tensor

    def tiles(self, slices: list[slice], dim: int = 0, hold: bool = False) -> Iterator[Tensor]:
        """Tile after tile along `dim` (0 or 1), the next one on its way while this one is used.

        `hold`: the tiles (dim 0) stay on the device, so that the next walk finds them there.
        """
        for rows in slices:
            yield self._tensor[rows] if dim == 0 else self._tensor[:, rows]


class KeptOnHost(Kept):
    """A tensor kept in a slab of pinned host memory."""

    def __init__(self, tensor: Tensor, store: Store) -> None:
        self.store, self.shape, self.dtype = store, tensor.shape, tensor.dtype
        self._source: Tensor | None = tensor
        self._coming: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._slab: Slab | None = store.pool.take(tensor.nbytes)
        self._copied_out = self._copy_out(tensor, self._slab)

    def settle(self) -> None:
        if self._source is not None:
            # The compute stream waits (the copy is long done by then), so the allocator may reuse the memory in
            # stream order. record_stream would tie reuse to how far the host runs ahead.
            self.store.wait(self._copied_out)
            self._source = None

    def prefetch(self) -> None:
        if self._coming is None and self._source is None:
            self._coming = self._copy_in(None, 0)

    def fetch(self) -> Tensor:
        if self._source is not None:
            return self._source
        self.prefetch()
        assert self._coming is not None
        (tensor, done), self._coming = self._coming, None
        self.store.wait(done)
        return tensor

    def tiles(self, slices: list[slice], dim: int = 0, hold: bool = False) -> Iterator[Tensor]:
        if self._source is not None:
            yield from Kept(self._source).tiles(slices, dim)
            return
        held = torch.empty(self.shape, dtype=self.dtype, device=self.store.device) if hold else None
        coming = self._copy_in(slices[0], dim, held)
        for i in range(len(slices)):
            tile, done = coming
            if i + 1 < len(slices):
                coming = self._copy_in(slices[i + 1], dim, held)
            self.store.wait(done)
            yield tile
        self._source = held

    @phase("copies")
    def _copy_out(self, tensor: Tensor, slab: Slab) -> "torch.cuda.Event | None":
        store = self.store
        with store.on(store.out_stream, store.mark(), slab.busy):
            slab.view(self.shape, self.dtype).copy_(tensor, non_blocking=True)
        return store.mark(store.out_stream)

    def _host(self) -> Tensor:
        assert self._slab is not None
        return self._slab.view(self.shape, self.dtype)

    @phase("copies")
    def _copy_in(
        self, rows: slice | None, dim: int, held: Tensor | None = None
    ) -> tuple[Tensor, "torch.cuda.Event | None"]:
        """Starts copying `rows` (None: all) to their place in `held`, or to memory of their own."""
        store, host = self.store, self._host()
        rows = rows or slice(0, self.shape[dim])
        shape = (*self.shape[:dim], rows.stop - rows.start, *self.shape[dim + 1 :])
        if held is not None:
            tensor = held[rows]
        else:
            tensor = torch.empty(shape, dtype=self.dtype, device=store.device)
        # Each part is contiguous on both sides: the host would first make a copy of anything else.
        parts = zip(tensor, host, strict=True) if dim == 1 else [(tensor, host)]
        with store.on(store.in_stream, store.mark(), self._copied_out):
            for into, part in parts:
                into.copy_(part[rows], non_blocking=True)
        return tensor, store.mark(store.in_stream)

    def _release(self) -> None:
        slab, self._slab = self._slab, None
        if slab is not None:
            slab.busy = self.store.mark(self.store.in_stream)
            self.store.pool.give(slab)

    def __del__(self) -> None:
        if sys.is_finalizing() or not hasattr(self, "_copied_out"):
            return
        self.settle()
        if self._coming is not None:
            self.store.wait(self._coming[1])
        self._release()


class KeptOnDisk(KeptOnHost):
    """A tensor kept in the store's file; host memory is only a station on its way."""

    def __init__(self, tensor: Tensor, store: Store) -> None:
        self._offset = store.disk.take(tensor.nbytes)
        self._reading: Future | None = None
        super().__init__(tensor, store)
        store.pool.expect_written()
        slab, self._slab = self._slab, None
        assert slab is not None
        self._writing = store.submit(_write, store, slab, self._copied_out, self._offset)

    def approach(self) -> None:
        if self._reading is None and self.store.pool.has_room(self._num_bytes):
            self._start_reading()

    @property
    def _num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def _start_reading(self) -> None:
        self._writing.result()
        self._slab = self.store.pool.take(self._num_bytes)
        self._reading = self.store.submit(_read, self.store, self._slab, self._offset)

    def _host(self) -> Tensor:
        if self._reading is None:
            self._start_reading()
        assert self._reading is not None
        self._reading.result()
        return super()._host()

    def __del__(self) -> None:
        if sys.is_finalizing() or not hasattr(self, "_writing"):
            return
        self._writing.exception()
        if self._reading is not None:
            self._reading.exception()
        super().__del__()
        self.store.disk.give(self._offset, self._num_bytes)


def _write(store: Store, slab: Slab, copied_out: "torch.cuda.Event | None", offset: int) -> None:
    try:
        if copied_out is not None:
            copied_out.synchronize()
        store.disk.write(memoryview(slab.bytes.numpy()), offset)
    finally:
        store.pool.give(slab, written=True)


def _read(store: Store, slab: Slab, offset: int) -> None:
    if slab.busy is not None:
        slab.busy.synchronize()
    store.disk.read(memoryview(slab.bytes.numpy()), offset)
