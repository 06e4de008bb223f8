"""Names for what the schedule is doing now. Costs one comparison where nobody listens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Listener(Protocol):
    def enter(self, path: tuple[str, ...]) -> None: ...

    def leave(self, path: tuple[str, ...]) -> None: ...


class _State:
    listener: Listener | None = None
    path: tuple[str, ...] = ()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Marks the code inside as `name`, below the phases around it."""
    if _State.listener is None:
        yield
        return
    outer = _State.path
    _State.path = (*outer, name)
    _State.listener.enter(_State.path)
    try:
        yield
    finally:
        if _State.listener is not None:
            _State.listener.leave(_State.path)
        _State.path = outer


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tells `listener` of every phase entered and left inside. One at a time."""
    assert _State.listener is None, "somebody is listening already"
    _State.listener = listener
    try:
        yield
    finally:
        _State.listener = None
