"""Names for what the schedule does now and for what holds memory. Nearly free where nobody listens."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

from torch import Tensor

Path = tuple[str, ...]
Around = Callable[[Path], AbstractContextManager]

# What holds memory. A map stacks its bytes by these names, in this order.
PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
UNSHARDED = "unsharded weights"
RESIDUAL = "residual stream"
STAGE = "stage buffers"
KEPT = {"device": "kept on device", "host": "kept on host", "disk": "kept on disk"}
MLP = "MLP tile"
LOSS = "loss tile"
OTHER = "other"
HOLDERS = (
    PARAMETERS,
    GRADIENTS,
    OPTIMIZER,
    UNSHARDED,
    RESIDUAL,
    STAGE,
    KEPT["device"],
    MLP,
    LOSS,
    OTHER,
)

# What memory made in a phase is for, unless `holding` or `tag` says otherwise.
HOLDER_OF_PHASE = {
    "embedding": RESIDUAL,
    "forward": RESIDUAL,
    "backward": RESIDUAL,
    "projections": STAGE,
    "attention": STAGE,
    "mlp": MLP,
    "exchange": STAGE,
    "loss forward": LOSS,
    "loss backward": LOSS,
    "optimizer": OPTIMIZER,
}


class Listener(Protocol):
    def enter(self, path: Path) -> None: ...

    def leave(self, path: Path) -> None: ...


class Watcher(Protocol):
    """Watches memory; is told only what the schedule knows better than the phase says."""

    def tag(self, tensor: Tensor, holder: str) -> None: ...

    def holder_changed(self) -> None: ...


class _State:
    listeners: tuple[Listener, ...] = ()
    watchers: tuple[Watcher, ...] = ()
    around: tuple[Around, ...] = ()
    path: Path = ()
    holder: str = OTHER


def current_phase() -> Path:
    return _State.path


def current_holder() -> str:
    return _State.holder


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Marks the code inside as `name`, below the phases around it."""
    if not _State.listeners:
        yield
        return
    outer = _enter(name)
    try:
        with ExitStack() as stack:
            for make in _State.around:
                stack.enter_context(make(_State.path))
            yield
    finally:
        _leave(outer)


def _enter(name: str) -> tuple[Path, str]:
    outer = _State.path, _State.holder
    _State.path = (*_State.path, name)
    _State.holder = HOLDER_OF_PHASE.get(name, _State.holder)
    for listener in _State.listeners:
        listener.enter(_State.path)
    return outer


def _leave(outer: tuple[Path, str]) -> None:
    for listener in _State.listeners:
        listener.leave(_State.path)
    _State.path, _State.holder = outer


def mark_backward(x: Tensor, y: Tensor, *names: str) -> Tensor:
    """Returns y; what ordinary autograd does between y's gradient and x's is then in the phases `names`."""
    if not (_State.listeners and x.requires_grad and y.requires_grad):
        return y
    outer: list[tuple[Path, str]] = []
    y.register_hook(lambda _: outer.extend(_enter(name) for name in names))

    def leave(_: Tensor) -> None:
        while outer:
            _leave(outer.pop())

    x.register_hook(leave)
    return y


@contextmanager
def holding(holder: str) -> Iterator[None]:
    """Memory made inside is for `holder`."""
    if not _State.watchers:
        yield
        return
    outer = _State.holder
    _set_holder(holder)
    try:
        yield
    finally:
        _set_holder(outer)


def _set_holder(holder: str) -> None:
    _State.holder = holder
    for watcher in _State.watchers:
        watcher.holder_changed()


def tag(tensor: Tensor, holder: str) -> Tensor:
    """From now on `tensor`'s memory is for `holder`."""
    for watcher in _State.watchers:
        watcher.tag(tensor, holder)
    return tensor


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tells `listener` of every phase entered and left inside."""
    _State.listeners = (*_State.listeners, listener)
    try:
        yield
    finally:
        _State.listeners = _without(_State.listeners, listener)
        if not _State.listeners:  # an error in backward leaves phases open that only its end would close
            _State.path, _State.holder = (), OTHER


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tells `watcher` of every tag and every `holding` inside."""
    _State.watchers = (*_State.watchers, watcher)
    try:
        yield
    finally:
        _State.watchers = _without(_State.watchers, watcher)


@contextmanager
def around_phases(make: Around) -> Iterator[None]:
    """Enters `make(path)` around the code of every phase inside that is one block of code, in its thread.

    Phases of ordinary autograd (`mark_backward`) are none: it restores the thread's state after each node.
    """
    _State.around = (*_State.around, make)
    try:
        yield
    finally:
        _State.around = _without(_State.around, make)


def _without(entries: tuple, entry: object) -> tuple:
    return tuple(e for e in entries if e is not entry)
