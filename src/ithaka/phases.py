"""What the schedule is doing, and what its memory is for. Nearly free while nobody listens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from torch import Tensor

PhasePath = tuple[str, ...]  # the open phases, outermost first

# Holders: what memory is for. A memory map stacks its bytes in the order of HOLDERS.
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
HOLDERS = (PARAMETERS, GRADIENTS, OPTIMIZER, UNSHARDED, RESIDUAL, STAGE, KEPT["device"], MLP, LOSS, OTHER)

# The holder of memory allocated in a phase, unless `holding` or `tag` names another.
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
    "embedding backward": GRADIENTS,
    "optimizer": OPTIMIZER,
}


def holder_of(path: PhasePath) -> str:
    """The holder of memory allocated in `path`, judged by the phases alone."""
    return next((HOLDER_OF_PHASE[name] for name in reversed(path) if name in HOLDER_OF_PHASE), OTHER)


class Listener(Protocol):
    """Both methods are called after the change; `path` is the phase entered or left."""

    def enter(self, path: PhasePath) -> None: ...

    def leave(self, path: PhasePath) -> None: ...


@runtime_checkable
class MemoryListener(Listener, Protocol):
    """A listener that is also told what memory is for."""

    def tag(self, tensor: Tensor, holder: str) -> None: ...

    def holder_changed(self) -> None: ...


class _State:
    listeners: tuple[Listener, ...] = ()
    memory_listeners: tuple[MemoryListener, ...] = ()
    path: PhasePath = ()
    holder: str = OTHER


def current_phase() -> PhasePath:
    return _State.path


def current_holder() -> str:
    return _State.holder


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Marks the code inside as phase `name`, below the phases already open."""
    if not _State.listeners:
        yield
        return
    outer = _enter(name)
    try:
        yield
    finally:
        _leave(outer)


def _enter(name: str) -> tuple[PhasePath, str]:
    outer = _State.path, _State.holder
    _State.path = (*_State.path, name)
    _State.holder = HOLDER_OF_PHASE.get(name, _State.holder)
    for listener in _State.listeners:
        listener.enter(_State.path)
    return outer


def _leave(outer: tuple[PhasePath, str]) -> None:
    path = _State.path
    _State.path, _State.holder = outer
    for listener in _State.listeners:
        listener.leave(path)


def mark_backward(x: Tensor, y: Tensor, *names: str) -> Tensor:
    """Returns y. Puts autograd's work from y's gradient to x's into the phases `names`."""
    if _State.listeners and x.requires_grad and y.requires_grad:
        x.register_hook(_enter_at_gradient(y, *names))
    return y


def mark_last_backward(y: Tensor, name: str) -> Tensor:
    """Returns y. Puts autograd's work from y's gradient to those of the parameters behind it into phase `name`."""
    if _State.listeners and y.grad_fn is not None:
        leave = _enter_at_gradient(y, name)
        for node, _ in y.grad_fn.next_functions:
            if node is not None:
                node.register_prehook(leave)  # for a tied weight, after both its gradients are added
    return y


def _enter_at_gradient(y: Tensor, *names: str) -> Callable[[object], None]:
    """Enters the phases at y's gradient; returns the function that leaves them."""
    outer: list[tuple[PhasePath, str]] = []
    y.register_hook(lambda _: outer.extend(_enter(name) for name in names))

    def leave(_: object) -> None:
        while outer:
            _leave(outer.pop())

    return leave


@contextmanager
def holding(holder: str) -> Iterator[None]:
    """Attributes memory allocated inside to `holder`."""
    if not _State.memory_listeners:
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
    for listener in _State.memory_listeners:
        listener.holder_changed()


def tag(tensor: Tensor, holder: str) -> Tensor:
    """Attributes `tensor`'s memory to `holder` from now on."""
    for listener in _State.memory_listeners:
        listener.tag(tensor, holder)
    return tensor


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tells `listener` about every phase inside, and a MemoryListener also about holders."""
    _set_listeners((*_State.listeners, listener))
    try:
        yield
    finally:
        _set_listeners(tuple(other for other in _State.listeners if other is not listener))
        if not _State.listeners:  # an error in backward skips the hooks that would have closed its phases
            _State.path, _State.holder = (), OTHER


def _set_listeners(listeners: tuple[Listener, ...]) -> None:
    _State.listeners = listeners
    _State.memory_listeners = tuple(one for one in listeners if isinstance(one, MemoryListener))
