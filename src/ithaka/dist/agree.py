"""Agreement between ranks: gather Python objects, and raise one rank's error on every rank."""

import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import torch.distributed as dist

from ithaka.config import ConfigError
from ithaka.dist.rank import is_local_rank_0
from ithaka.exits import TransientError, is_transient

P = ParamSpec("P")
T = TypeVar("T")


class SharedError(ConfigError):
    """Raised on every rank; rank 0 prints it."""

    shared = True


class SharedTransientError(TransientError):
    """Raised on every rank; rank 0 prints it."""

    shared = True


class RankError(NamedTuple):
    """An error of one rank, in a form that can be sent to the others."""

    type: type[Exception]
    message: str
    host: str = ""  # empty: the message names only the rank


def gather_objects(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the object of every rank, in rank order. A single process does not communicate."""
    objects = [own] * (dist.get_world_size(group) if dist.is_initialized() else 1)
    if len(objects) > 1:
        dist.all_gather_object(objects, own, group=group)
    return objects


def raise_first(errors: Sequence[RankError | None], what: str = "") -> None:
    """Raise the first error in `errors`, which has one entry per rank; a transient error only if there is no other.
    The message starts with `what` and names the rank unless every rank failed."""
    failed = {rank: error for rank, error in enumerate(errors) if error is not None}
    if not failed:
        return
    rank = min(failed, key=lambda rank: issubclass(failed[rank].type, TransientError))
    error = failed[rank]
    where = f"rank {rank} on {error.host}" if error.host else f"rank {rank}"
    parts = what, "" if len(failed) == len(errors) else where, error.message
    raise error.type(": ".join(filter(None, parts)))


def raise_on_all_ranks(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` on every rank and return this rank's result. A ConfigError or a transient error on any rank is
    raised on all, as SharedError or SharedTransientError.

    `function` must not communicate. Any other error propagates on its own rank only: that rank exits and closes its
    connections, which is how the others notice."""
    failure = None
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        if not isinstance(error, ConfigError) and not is_transient(error):
            raise
        message = str(error) if isinstance(error, ConfigError | TransientError) else f"{type(error).__name__}: {error}"
        shared = SharedError if isinstance(error, ConfigError) else SharedTransientError
        failure = RankError(shared, message, socket.gethostname())
    raise_first(gather_objects(failure))
    return result


@contextmanager
def shared_temporary_path(prefix: str) -> Iterator[Path]:
    """A temporary directory with the same path on all ranks. Nodes that do not share it may create their own."""
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as own:
        path = Path(gather_objects(own)[0])
        try:
            yield path
        finally:
            if is_local_rank_0():
                shutil.rmtree(path, ignore_errors=True)
