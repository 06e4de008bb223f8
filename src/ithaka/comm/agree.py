"""Agreement between ranks: gather Python objects, and raise one rank's error on every rank."""

import shutil
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, cast

from ithaka.comm.rank import is_local_rank_0, rank_and_size
from ithaka.config import ConfigError
from ithaka.exits import ExitCode, TransientError, describe_transient, exit_code_for

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

P = ParamSpec("P")
T = TypeVar("T")


class SharedError(ConfigError):
    """Raised on every rank; rank 0 prints it."""

    shared = True


class SharedTransientError(TransientError):
    """Raised on every rank; rank 0 prints it."""

    shared = True


class RankFailed(RuntimeError):
    """Any other error, raised on every rank; rank 0 prints it. Its cause is the failed rank's."""

    shared = True
    exit_code = ExitCode.FAILED


class RankError(NamedTuple):
    """An error of one rank, in a form that can be sent to the others."""

    type: type[Exception]
    message: str
    host: str = ""  # empty: the message names only the rank
    exit_code: ExitCode = ExitCode.FAILED  # for a type without its own


def describe_error(
    error: Exception, keep: Sequence[type[Exception]] = (), host: str = ""
) -> RankError:
    """Describe any error so that every rank can raise it: a ConfigError, a transient error or one
    of exactly the types to `keep` by its message, any other as RankFailed, with its traceback if it
    has no exit code of its own. Call it in the except block."""
    code = exit_code_for(error)
    if type(error) in keep:
        return RankError(type(error), str(error), host)
    if isinstance(error, ConfigError):
        return RankError(SharedError, str(error), host)
    if code == ExitCode.TRANSIENT:
        return RankError(SharedTransientError, describe_transient(error), host)
    text = f"{type(error).__name__}: {error}"
    if code == ExitCode.FAILED:
        text = traceback.format_exc().rstrip()
    return RankError(RankFailed, text, host, code)


def gather_objects(own: T, group: "ProcessGroup | None" = None) -> list[T]:
    """Return the object of every rank, in rank order. A single process does not communicate."""
    _, num_ranks = rank_and_size(group)
    objects = [own] * num_ranks
    if num_ranks > 1:
        import torch.distributed as dist  # late: a single process may need no torch

        dist.all_gather_object(objects, own, group=group)
    return objects


def raise_first(
    errors: Sequence[RankError | None], what: str = "", cause: Exception | None = None
) -> None:
    """Raise the first error in `errors`, which has one entry per rank; a transient error only if
    there is no other. The message starts with `what` and names the rank unless every rank failed.
    `cause`: this rank's own error."""
    failed = {rank: error for rank, error in enumerate(errors) if error is not None}
    if not failed:
        return
    rank = min(failed, key=lambda rank: issubclass(failed[rank].type, TransientError))
    error = failed[rank]
    if len(errors) == 1 and error.type is RankFailed and cause is not None:
        raise cause  # no other rank needs it
    where = f"rank {rank} on {error.host}" if error.host else f"rank {rank}"
    if len(failed) == len(errors):
        where = ""
    raised: Any = error.type(": ".join(filter(None, (what, where, error.message))))
    if error.exit_code is not ExitCode.FAILED:
        raised.exit_code = error.exit_code
    raise raised from cause


def raise_on_all_ranks(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` on every rank and return this rank's result. An error on any rank is raised
    on all, as SharedError, SharedTransientError or RankFailed.

    `function` must not communicate, except by calling this."""
    failure = cause = None
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        if getattr(error, "shared", False):  # already raised on every rank
            raise
        failure = describe_error(error, host=socket.gethostname())
        cause = error
    raise_first(gather_objects(failure), cause=cause)
    return result


def ask_rank_0(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` on rank 0 and return its result on every rank; an error is raised on all.
    Collective."""
    answers: list[tuple[T | None, RankError | None]] = [(None, None)]
    cause = None
    rank, num_ranks = rank_and_size()
    if rank == 0:
        try:
            answers = [(function(*args, **kwargs), None)]
        except Exception as error:
            cause = error
            answers = [(None, describe_error(error))]
    if num_ranks > 1:
        import torch.distributed as dist  # late: a single process may need no torch

        dist.broadcast_object_list(answers)
    [(answer, failure)] = answers
    raise_first([failure], cause=cause)
    return cast(T, answer)


@contextmanager
def shared_temporary_path(prefix: str) -> Iterator[Path]:
    """A temporary directory with the same path on all ranks; nodes need not share it."""
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as own:
        path = Path(gather_objects(own)[0])
        try:
            yield path
        finally:
            if is_local_rank_0():
                shutil.rmtree(path, ignore_errors=True)
