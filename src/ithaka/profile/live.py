"""Live bytes on a CPU: each storage from its first tensor to its death, with holder, phase, shape and line."""

import time
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch._C._profiler import _EventType
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ithaka.phases import GRADIENTS, UNSHARDED, current_holder, current_phase, holder_of, listening
from ithaka.profile.memory import NEVER, Piece, Recorder, Shape, form, local_tensor, made_by, stack

# gloo copies what it sends or receives; FSDP2 calls it outside of every phase.
_TAKERS = {"reduce_scatter": GRADIENTS, "allgather": UNSHARDED, "all_gather": UNSHARDED}
CLOCK_SLACK_NS = 5_000  # between the allocator's clock and Python's


class LiveBytes(Recorder):
    """Counts, while it is entered, the bytes of every CPU storage made inside, each once, until it dies.

    Views and autograd's references keep a storage alive; resizing, which FSDP2 does, is followed. Older storages
    count only if `register`ed. What operations take and give back inside C++ is not seen: `add_scratch` adds it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.registered_bytes = 0
        self._live: dict[int, tuple[weakref.ref, Piece]] = {}  # by the address of the C++ storage
        self._born: dict[int, list[Piece]] = {}  # by the address of the data

    def __enter__(self) -> "LiveBytes":
        for context in (listening(self), _shown_resizes(self), _Operations(self)):
            self._entered.enter_context(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.close()
        self._live.clear()  # later deaths are not noted

    @property
    def peak_bytes(self) -> int:
        return self.map.peak()[0]

    @property
    def bytes_now(self) -> int:
        return sum(piece.num_bytes for piece in self.map.pieces if piece.stop_ns == NEVER)

    def register(self, tensors: Tensor | Iterable[Tensor], holder: str) -> None:
        """Counts older storages from now on; those that count already change their holder."""
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            local = local_tensor(tensor)
            storage = local.untyped_storage()
            if storage._cdata not in self._live:
                self._count(storage, *form(local), "", holder)
                self.registered_bytes += storage.nbytes()
            self.tag(local, holder)

    def tag(self, tensor: Tensor, holder: str) -> None:
        storage = local_tensor(tensor).untyped_storage()
        if storage._cdata in self._live and self._live[storage._cdata][1].holder != holder:
            self._change(storage, holder=holder)

    def returned(self, tensor: Tensor, given: set[int]) -> None:
        """An operation returned `tensor`; `given`: the storages of its inputs. One that is neither is new."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._live:
            self.resized(storage)
        elif storage._cdata not in given:
            self._count(storage, *form(tensor), *made_by(stack()))

    def resized(self, storage: UntypedStorage) -> None:
        if storage._cdata not in self._live:  # FSDP2 keeps empty storages from step to step, and fills them in turn
            self._count(storage, (storage.nbytes(),), "uint8", *made_by(stack()))
        elif self._live[storage._cdata][1].num_bytes != storage.nbytes():
            piece = self._change(storage, num_bytes=storage.nbytes())
            self._born.setdefault(storage.data_ptr(), []).append(piece)

    def _count(self, storage: UntypedStorage, shape: Shape, dtype: str, line: str, holder: str | None) -> None:
        key, holder = storage._cdata, holder or current_holder()
        piece = Piece(storage.nbytes(), time.time_ns(), holder, current_phase(), shape, dtype, line)
        self._live[key] = weakref.ref(storage, partial(self._died, key)), piece
        self._born.setdefault(storage.data_ptr(), []).append(piece)
        self.map.pieces.append(piece)

    def _change(self, storage: UntypedStorage, **changes: Any) -> Piece:
        ref, piece = self._live[storage._cdata]
        new = piece.change(time.time_ns(), **changes)
        self._live[storage._cdata] = ref, new
        self.map.pieces.append(new)
        return new

    def _died(self, key: int, _: weakref.ref) -> None:
        live = self._live.pop(key, None)
        if live is not None:
            live[1].stop_ns = time.time_ns()

    def add_scratch(self, allocations: "list[Allocation]") -> None:
        """Moves births to when their memory was allocated, and adds what was allocated but never returned."""
        pieces = sorted(self.map.pieces, key=lambda piece: piece.start_ns)
        starts = [piece.start_ns for piece in pieces]
        for one in allocations:
            born = self._born_in(one)
            if born is not None:
                born.start_ns = one.start_ns
                continue
            # The next birth is the result of the operation that took this.
            after = bisect_left(starts, one.start_ns if one.stop_ns == NEVER else one.stop_ns)
            line = pieces[after].line if after < len(pieces) else ""
            path = self.map.phases.at(one.start_ns)
            holder = one.holder or holder_of(path)
            scratch = Piece(one.num_bytes, one.start_ns, holder, path, (), "scratch", line, one.stop_ns)
            self.map.pieces.append(scratch)

    def _born_in(self, one: "Allocation") -> Piece | None:
        first_ns, last_ns = one.start_ns - CLOCK_SLACK_NS, one.stop_ns + CLOCK_SLACK_NS
        return next((p for p in self._born.get(one.address, ()) if first_ns <= p.start_ns <= last_ns), None)


class _Operations(TorchDispatchMode):
    """Shows `live` the results of every operation, also inside autograd functions and in backward."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self.live = live

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # comes back with the local tensors
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self.live.returned(tensor, given)
        return out


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Those with memory on the CPU; DTensor works out shapes with FakeTensors, which have none."""
    for leaf in tree_iter(tree):
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            continue
        if leaf.device.type == "cpu" and leaf.layout == torch.strided:
            yield leaf


@contextmanager
def _shown_resizes(live: LiveBytes) -> Iterator[None]:
    """UntypedStorage.resize_ is no operation that dispatch could see: it is replaced."""
    plain = UntypedStorage.resize_

    def resize_(storage: UntypedStorage, num_bytes: int) -> Any:
        result = plain(storage, num_bytes)
        if storage.device.type == "cpu":
            live.resized(storage)
        return result

    UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        UntypedStorage.resize_ = plain  # type: ignore[method-assign]


# ---- what PyTorch's CPU allocator gave out, as its profiler saw it


class Allocation(NamedTuple):
    address: int
    num_bytes: int
    start_ns: int
    stop_ns: int
    holder: str | None = None  # if a collective took it


def cpu_allocations(profiler: profile) -> list[Allocation]:
    """Every allocation made while `profiler` (with profile_memory) ran, in the order of time."""
    assert profiler.profiler is not None
    roots = profiler.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    events, todo = [], list[tuple[Any, str | None]]((root, None) for root in roots)
    while todo:
        event, holder = todo.pop()
        if event.name.startswith(("c10d::", "gloo:")):
            holder = next((taker for name, taker in _TAKERS.items() if name in event.name), holder)
        todo.extend((child, holder) for child in event.children)
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            events.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, holder))
    out: dict[int, Allocation] = {}  # by address
    done: list[Allocation] = []
    for at_ns, address, num_bytes, holder in sorted(events, key=lambda event: event[0]):
        if num_bytes > 0:
            out[address] = Allocation(address, num_bytes, at_ns, NEVER, holder)
        elif address in out:
            done.append(out.pop(address)._replace(stop_ns=at_ns))
    return sorted([*done, *out.values()], key=lambda one: one.start_ns)


def most_allocated(allocations: list[Allocation]) -> int:
    """The most bytes that were out at once."""
    edges = [(one.start_ns, one.num_bytes) for one in allocations]
    edges += [(one.stop_ns, -one.num_bytes) for one in allocations]
    return max(accumulate(change for _, change in sorted(edges)), default=0)
