"""This process's rank, from the launcher's environment variables, or its group.
Imports no torch."""

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def is_rank_0() -> bool:
    """Whether this process prints for all ranks. True for a process without a launcher."""
    return os.environ.get("RANK", "0") == "0"


def is_local_rank_0() -> bool:
    """Whether this process acts for its node. True for a process without a launcher."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def local_rank_0() -> int:
    """The rank that acts for this process's node. The ranks of a node are consecutive."""
    return int(os.environ.get("RANK", "0")) - int(os.environ.get("LOCAL_RANK", "0"))


def rank_and_size(group: "ProcessGroup | None" = None) -> tuple[int, int]:
    """This process's rank in `group`, and the number of its ranks; 0 and 1 without a group."""
    dist = sys.modules.get("torch.distributed")  # imported by whoever started the group
    if dist is None or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def leave_launcher() -> None:
    """Act as a process without a launcher from now on."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
