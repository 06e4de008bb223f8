"""Live bytes on CPU: each storage from its first tensor to its death, with holder, phase, shape and line."""

import time
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ithaka.phases import HOLDER_OF_PHASE, OTHER, Path, current_holder, current_phase, listening, watching
from ithaka.profile.allocations import END, Allocation, cpu_allocations
from ithaka.profile.ledger import Change, Holding, Ledger
from ithaka.profile.shapes import made_as
from ithaka.profile.where import read, stack

CLOCK_SLACK_NS = 5_000  # the allocator's events have a clock of their own


@dataclass
class _Live:
    index: int  # of its holding
    ref: weakref.ref
    holder: str
    num_bytes: int


@dataclass
class LiveBytes:
    """Counts, while it is entered, the bytes of all CPU storages made inside, each once.

    A storage counts until it dies, views and autograd's references included; resizing (FSDP2 does it) is
    followed. Storages that are older do not count, unless `register`ed. While it is entered, the figures are
    those of storages that operations returned; at the end the allocator's own events are added, and with them
    the scratch memory that C++ operations take and give back. `scratch=False`: that part is left out.
    """

    scratch: bool = True
    registered_bytes: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    _live: dict[int, _Live] = field(default_factory=dict)  # by the address of the C++ storage
    _older: dict[int, weakref.ref] = field(default_factory=dict)
    _born: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # data address: (time, change)
    _entered: ExitStack = field(default_factory=ExitStack)
    _profiler: profile | None = None
    _active: bool = False

    def __enter__(self) -> "LiveBytes":
        self._active = True
        if self.scratch:
            self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._entered.enter_context(self._profiler)
        self._entered.enter_context(listening(self))
        self._entered.enter_context(watching(self))
        self._entered.enter_context(_resizes(self))
        self._entered.enter_context(_Dispatch(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._active = False
        self._entered.close()
        if self._profiler is not None and error[0] is None:
            self.add_scratch(cpu_allocations(self._profiler))

    # ---- what is asked

    @property
    def peak_bytes(self) -> int:
        return self.ledger.peak_bytes

    @property
    def peaks(self) -> dict[Path, int]:
        """The highest point while each phase was open."""
        return self.ledger.phase_peaks()

    # ---- what others tell

    def register(self, tensors: Tensor | Iterable[Tensor], holder: str) -> None:
        """Counts storages that are older, from now on; those that count already change their holder."""
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            local = local_tensor(tensor)
            self._older.pop(local.untyped_storage()._cdata, None)
            if not self._knows(local):
                self._add_tensor(local, holder, "")
                self.registered_bytes += local.untyped_storage().nbytes()
            self.tag(local, holder)

    def tag(self, tensor: Tensor, holder: str) -> None:
        live = self._live.get(local_tensor(tensor).untyped_storage()._cdata)
        if live is None or live.holder == holder:
            return
        self._note(live, -live.num_bytes)
        live.holder = holder
        self._note(live, live.num_bytes)

    def enter(self, path: Path) -> None:
        self.ledger.marks.append((time.time_ns(), path))

    def leave(self, path: Path) -> None:
        self.ledger.marks.append((time.time_ns(), path[:-1]))

    def holder_changed(self) -> None:
        pass

    # ---- counting

    def saw_input(self, tensor: Tensor) -> None:
        """A storage first met as an input is older than we are."""
        storage = tensor.untyped_storage()
        if not self._knows(tensor) and storage.nbytes():
            key = storage._cdata
            self._older[key] = weakref.ref(storage, lambda _: self._older.pop(key, None))

    def saw_output(self, tensor: Tensor) -> None:
        if not self._knows(tensor):
            line, holder = read(stack())
            self._add_tensor(tensor, holder or current_holder(), line)
        else:
            self.resized(tensor.untyped_storage())

    def resized(self, storage: torch.UntypedStorage) -> None:
        live = self._live.get(storage._cdata)
        if live is None and storage._cdata not in self._older:
            # FSDP2 keeps empty storages from step to step and fills them when their time comes.
            line, holder = read(stack())
            self._add(storage, (storage.nbytes(),), "uint8", holder or current_holder(), line)
        elif live is not None and live.num_bytes != storage.nbytes():
            self._note(live, -live.num_bytes)
            live.num_bytes = storage.nbytes()
            self._note(live, live.num_bytes, born_at=storage.data_ptr())

    def _knows(self, tensor: Tensor) -> bool:
        key = tensor.untyped_storage()._cdata
        return key in self._live or key in self._older

    def _add_tensor(self, tensor: Tensor, holder: str, line: str) -> None:
        self._add(tensor.untyped_storage(), *made_as(tensor), holder, line)

    def _add(self, storage: torch.UntypedStorage, shape: tuple[int, ...], dtype: str, holder: str, line: str) -> None:
        key, index = storage._cdata, len(self.ledger.holdings)
        self.ledger.holdings.append(Holding(holder, current_phase(), shape, dtype, line))
        ref = weakref.ref(storage, partial(self._died, key))
        live = self._live[key] = _Live(index, ref, holder, storage.nbytes())
        self._note(live, live.num_bytes, born_at=storage.data_ptr())

    def _died(self, key: int, _: weakref.ref) -> None:
        live = self._live.pop(key, None)
        if live is not None and self._active:
            self._note(live, -live.num_bytes)

    def _note(self, live: _Live, num_bytes: int, born_at: int | None = None) -> None:
        now = time.time_ns()
        if born_at is not None:
            self._born.setdefault(born_at, []).append((now, len(self.ledger.changes)))
        self.ledger.changes.append(Change(now, live.index, num_bytes, live.holder))

    # ---- what operations took for themselves

    def add_scratch(self, allocations: list[Allocation]) -> None:
        """Adds what the allocator gave out and no operation returned; moves births to where they were."""
        changes, holdings = self.ledger.changes, self.ledger.holdings
        births = sorted((c.time_ns, c.holding) for c in changes if c.num_bytes > 0)
        for one in allocations:
            change = self._birth_in(one)
            if change is not None:
                changes[change] = replace(changes[change], time_ns=one.start_ns)
                continue
            path = self.ledger.phase_at(one.start_ns)
            given_back = one.stop_ns < END
            # The operation's own result comes next.
            after = bisect_left(births, (one.stop_ns if given_back else one.start_ns, 0))
            line = holdings[births[after][1]].line if after < len(births) else ""
            holder = next((HOLDER_OF_PHASE[n] for n in reversed(path) if n in HOLDER_OF_PHASE), OTHER)
            holdings.append(Holding(holder, path, (), "scratch", line))
            index = len(holdings) - 1
            changes.append(Change(one.start_ns, index, one.num_bytes, holder))
            if given_back:
                changes.append(Change(one.stop_ns, index, -one.num_bytes, holder))
        changes.sort(key=lambda change: change.time_ns)

    def _birth_in(self, one: Allocation) -> int | None:
        for at_ns, change in self._born.get(one.address, ()):
            if one.start_ns - CLOCK_SLACK_NS <= at_ns <= one.stop_ns + CLOCK_SLACK_NS:
                return change
        return None


class _Dispatch(TorchDispatchMode):
    """Shows every operation's tensors to `live`, also inside autograd functions and in backward."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self.live = live

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # comes back with the local tensors
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self.live.saw_input(tensor)
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            self.live.saw_output(tensor)
        return out


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Those with memory: with a FakeTensor DTensor only finds out shapes."""
    for leaf in tree_iter(tree):
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            continue
        if leaf.device.type == "cpu" and leaf.layout == torch.strided:
            yield leaf


def local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _resizes:
    """UntypedStorage.resize_ is no operation that dispatch could see; it is replaced while we count."""

    def __init__(self, live: LiveBytes) -> None:
        self.live = live

    def __enter__(self) -> None:
        self._plain = plain = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = plain(storage, size)
            if storage.device.type == "cpu":
                self.live.resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._plain  # type: ignore[method-assign]
