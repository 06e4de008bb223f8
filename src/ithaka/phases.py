"""What the schedule does (phases), and what memory is for (categories). Cheap without listeners."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from torch import Tensor

PhasePath = tuple[str, ...]  # the open phases, outermost first


class MemoryCategory(StrEnum):
    """What memory is for. A memory map stacks its bytes in this order."""

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


# The category of memory allocated in a phase, unless `allocating_for` or `set_category` names
# another.
CATEGORY_OF_PHASE = {
    **dict.fromkeys(("embedding", "forward", "backward"), MemoryCategory.RESIDUAL),
    **dict.fromkeys(("projections", "attention", "exchange"), MemoryCategory.STAGE),
    **dict.fromkeys(("loss forward", "loss backward"), MemoryCategory.LOSS),
    "mlp": MemoryCategory.MLP,
    "embedding backward": MemoryCategory.GRADIENTS,
    "optimizer": MemoryCategory.OPTIMIZER,
}


class Listener:
    """Callbacks, called after the change. `path` is the phase entered or left."""

    def enter(self, path: PhasePath) -> None: ...

    def leave(self, path: PhasePath) -> None: ...

    def category_changed(self) -> None: ...

    def set_category(self, tensor: Tensor, category: str) -> None: ...

    def count(self, what: str, amount: float) -> None: ...


class PhaseState:
    """The open phases and the memory category of new allocations, shared by all threads."""

    listeners: tuple[Listener, ...] = ()
    path: PhasePath = ()
    category: str = MemoryCategory.OTHER


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Open phase `name` for the code inside, nested in the phases that are open already."""
    if not PhaseState.listeners:
        yield
        return
    outer = _enter(name)
    try:
        yield
    finally:
        _leave(outer)


def _enter(name: str) -> tuple[PhasePath, str]:
    outer = (PhaseState.path, PhaseState.category)
    _set_state((*PhaseState.path, name), CATEGORY_OF_PHASE.get(name, PhaseState.category))
    for listener in PhaseState.listeners:
        listener.enter(PhaseState.path)
    return outer


def _leave(outer: tuple[PhasePath, str]) -> None:
    path = PhaseState.path
    _set_state(*outer)
    for listener in PhaseState.listeners:
        listener.leave(path)


def _set_state(path: PhasePath, category: str) -> None:
    PhaseState.path = path
    PhaseState.category = category
    for listener in PhaseState.listeners:
        listener.category_changed()


def mark_backward(y: Tensor, *names: str) -> Tensor:
    """Open the phases `names` when autograd reaches y's gradient, and close them when it has passed
    y's node. Returns y."""
    if not PhaseState.listeners or y.grad_fn is None:
        return y
    outer: list[tuple[PhasePath, str]] = []

    def leave(_: object) -> None:
        while outer:
            _leave(outer.pop())

    y.register_hook(lambda _: outer.extend(_enter(name) for name in names))
    for node, _ in y.grad_fn.next_functions:
        if node is not None:
            node.register_prehook(leave)  # for a tied weight, once both its gradients are summed
    return y


@contextmanager
def allocating_for(category: str) -> Iterator[None]:
    """Attribute allocations inside to `category`."""
    if not PhaseState.listeners:
        yield
        return
    outer = PhaseState.category
    _set_state(PhaseState.path, category)
    try:
        yield
    finally:
        _set_state(PhaseState.path, outer)


def set_category(tensor: Tensor, category: str) -> Tensor:
    """Attribute `tensor`'s memory to `category` from now on. Returns `tensor`."""
    for listener in PhaseState.listeners:
        listener.set_category(tensor, category)
    return tensor


def count(what: str, amount: float) -> None:
    """Report work of a rank: bytes sent or received, or FLOPs that no operator of PyTorch shows."""
    for listener in PhaseState.listeners:
        listener.count(what, amount)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Report every phase and memory category inside to `listener`."""
    PhaseState.listeners = (*PhaseState.listeners, listener)
    try:
        yield
    finally:
        others = (other for other in PhaseState.listeners if other is not listener)
        PhaseState.listeners = tuple(others)
        # After an error in backward, its hooks did not close their phases.
        if not PhaseState.listeners:
            PhaseState.path = ()
            PhaseState.category = MemoryCategory.OTHER
