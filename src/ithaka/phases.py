"""What the schedule is doing, and what its memory is for. Nearly free while nobody listens."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

PhasePath = tuple[str, ...]  # the open phases, outermost first

# Holders: what memory is for. A memory map stacks its bytes in the order of HOLDERS.
PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
UNSHARDED = "unsharded weights"
RESIDUAL = "residual stream"
STAGE = "stage buffers"
KEPT = "kept on device"
MLP = "MLP tile"
LOSS = "loss tile"
OTHER = "other"
HOLDERS = (PARAMETERS, GRADIENTS, OPTIMIZER, UNSHARDED, RESIDUAL, STAGE, KEPT, MLP, LOSS, OTHER)

# The holder of memory allocated in a phase, unless `holding` or `tag` names another.
HOLDER_OF_PHASE = {
    **dict.fromkeys(("embedding", "forward", "backward"), RESIDUAL),
    **dict.fromkeys(("projections", "attention", "exchange"), STAGE),
    **dict.fromkeys(("loss forward", "loss backward"), LOSS),
    "mlp": MLP,
    "embedding backward": GRADIENTS,
    "optimizer": OPTIMIZER,
}


class Listener:
    """Each method is called after the change; `path` is the phase entered or left. Both may change the holder."""

    def enter(self, path: PhasePath) -> None: ...

    def leave(self, path: PhasePath) -> None: ...

    def holder_changed(self) -> None: ...

    def tag(self, tensor: Tensor, holder: str) -> None: ...


class PhaseState:
    """The open phases, and the holder of what is allocated."""

    listeners: tuple[Listener, ...] = ()
    path: PhasePath = ()
    holder: str = OTHER


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Marks the code inside as phase `name`, below the phases already open."""
    if not PhaseState.listeners:
        yield
        return
    outer = _enter(name)
    try:
        yield
    finally:
        _leave(outer)


def _enter(name: str) -> tuple[PhasePath, str]:
    outer = PhaseState.path, PhaseState.holder
    _set((*PhaseState.path, name), HOLDER_OF_PHASE.get(name, PhaseState.holder))
    for listener in PhaseState.listeners:
        listener.enter(PhaseState.path)
    return outer


def _leave(outer: tuple[PhasePath, str]) -> None:
    path = PhaseState.path
    _set(*outer)
    for listener in PhaseState.listeners:
        listener.leave(path)


def _set(path: PhasePath, holder: str) -> None:
    PhaseState.path, PhaseState.holder = path, holder
    for listener in PhaseState.listeners:
        listener.holder_changed()


def mark_backward(y: Tensor, *names: str) -> Tensor:
    """Returns y. Puts autograd's work from y's gradient to its parameters' into the phases `names`."""
    if not PhaseState.listeners or y.grad_fn is None:
        return y
    outer: list[tuple[PhasePath, str]] = []

    def leave(_: object) -> None:
        while outer:
            _leave(outer.pop())

    y.register_hook(lambda _: outer.extend(_enter(name) for name in names))
    for node in filter(None, (node for node, _ in y.grad_fn.next_functions)):
        node.register_prehook(leave)  # for a tied weight, after both its gradients are added
    return y


@contextmanager
def holding(holder: str) -> Iterator[None]:
    """Attributes memory allocated inside to `holder`."""
    if not PhaseState.listeners:
        yield
        return
    outer = PhaseState.holder
    _set(PhaseState.path, holder)
    try:
        yield
    finally:
        _set(PhaseState.path, outer)


def tag(tensor: Tensor, holder: str) -> Tensor:
    """Attributes `tensor`'s memory to `holder` from now on."""
    for listener in PhaseState.listeners:
        listener.tag(tensor, holder)
    return tensor


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tells `listener` about every phase and holder inside."""
    PhaseState.listeners = (*PhaseState.listeners, listener)
    try:
        yield
    finally:
        PhaseState.listeners = tuple(other for other in PhaseState.listeners if other is not listener)
        if not PhaseState.listeners:  # an error in backward skips the hooks that would have closed its phases
            PhaseState.path, PhaseState.holder = (), OTHER
