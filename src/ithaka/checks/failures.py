"""Share one rank's error in `ithaka selftest` with all ranks, whatever they are doing."""

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import torch.distributed as dist

from ithaka.comm.agree import gather_objects
from ithaka.foreign.torch_distributed import default_store

P = ParamSpec("P")
T = TypeVar("T")
PACKAGE = Path(__file__).parents[1]


class Failure(NamedTuple):
    """An error of one rank, in a form that can be sent to the others."""

    rank: int
    error: str  # its type
    message: str
    where: str  # the innermost line of this package that it passed

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.error}: {self.message}"


class CheckFailed(Exception):
    """An error of one rank, raised on all."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def describe_failure(error: Exception) -> Failure:
    """The error of this rank, or the one that is raised on all."""
    if isinstance(error, CheckFailed):
        return error.failure
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if PACKAGE in Path(frame.filename).parents:
            where = f"{Path(frame.filename).relative_to(PACKAGE.parent)}:{frame.lineno}"
    return Failure(dist.get_rank(), type(error).__name__, str(error), where)


def run_on_all_ranks(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` on every rank and return this rank's result. An error of any rank is raised
    on all, as CheckFailed. `function` must not communicate."""
    failure = cause = None
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        failure = describe_failure(error)
        cause = error
    failures = list(filter(None, gather_objects(failure)))
    if failures:
        raise CheckFailed(failures[0]) from cause
    return result


def meet(name: str, failure: Failure | None, limit_s: float) -> tuple[Failure | None, list[int]]:
    """Wait for all ranks. Return the first failure, and the ranks that are not here within
    `limit_s`: they wait in a collective, in which a failed rank must not take part, so this uses
    the store."""
    store = dist.PrefixStore(f"meet {name}", default_store())
    if failure is not None:
        store.compare_set("failure", "", json.dumps(failure))
    store.set(f"rank {dist.get_rank()}", "is here")
    num_ranks = dist.get_world_size()
    if store.add("arrived", 1) == num_ranks:
        store.set("all", "are here")
    missing: list[int] = []
    deadline_s = time.monotonic() + limit_s
    while not store.check(["all"]) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    if not store.check(["all"]):
        missing = [rank for rank in range(num_ranks) if not store.check([f"rank {rank}"])]
    first = json.loads(store.get("failure")) if store.check(["failure"]) else None
    if not missing:
        gather_objects(None)  # the store may end with rank 0, while others still read it
    return Failure(*first) if first else None, missing
