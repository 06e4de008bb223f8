"""One refusal for all ranks: what one of them cannot do, none begins. The others would wait for it, on other nodes
until the process group gives up."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from ithaka.config import ConfigError
from ithaka.dist.mesh import start_process_group
from ithaka.train.launch import SharedError, under_torchrun

P = ParamSpec("P")
T = TypeVar("T")


def together(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `function` returns on this rank, once no rank has raised a ConfigError; else a SharedError on all of them.

    Every rank must come here, and the function must not communicate. A rank that any other error ends closes its
    connections, which is how the others notice.
    """
    if not _others():
        return function(*args, **kwargs)
    refusal = None
    try:
        result = function(*args, **kwargs)
    except ConfigError as error:
        refusal = str(error)
    refusals = gathered((socket.gethostname(), refusal))
    if any(text is not None for _, text in refusals):
        raise SharedError(_in_words(refusals))
    return result


def gathered(mine: T) -> list[T]:
    """Every rank's, in their order. Communicates; of one process alone, its own."""
    if not _others():
        return [mine]
    answers = [mine] * dist.get_world_size()
    dist.all_gather_object(answers, mine)
    return answers


def _others() -> bool:
    """Whether other ranks take part; then they can be reached."""
    if under_torchrun():
        start_process_group()
    return dist.is_initialized() and dist.get_world_size() > 1


def _in_words(refusals: Sequence[tuple[str, str | None]]) -> str:
    """The first refusal of each host, whose ranks differ in figures at most; named unless all ranks have one, and
    the hosts the same."""
    first: dict[str, tuple[int, str]] = {}
    for rank, (host, text) in enumerate(refusals):
        if text is not None:
            first.setdefault(host, (rank, text))
    texts = {text for _, text in first.values()}
    if len(texts) == 1 and all(text is not None for _, text in refusals):
        return texts.pop()
    return "\n".join(f"rank {rank} on {host}: {text}" for host, (rank, text) in first.items())
