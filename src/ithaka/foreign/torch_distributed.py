"""Private parts of torch.distributed: process groups and their store.

Read in torch 2.13.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Methods that LoopbackGroup (comm/loopback.py) defines because C++ or torch 2.11 calls them under
# these names. ProcessGroup declares no public ones for them.
OVERRIDDEN = ("_set_group_name", "_allgather_base", "_reduce_scatter_base")


def default_store() -> dist.Store:
    """The store of the default group. A second store would need a second port."""
    return dist.distributed_c10d._get_default_store()


def all_groups() -> list[dist.ProcessGroup]:
    """All process groups of this process, in creation order, also those that FSDP2 made. No public
    function lists them."""
    return list(dist.distributed_c10d._world.pg_map)


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Change the timeout of an existing group, which the public API sets only when it makes one."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def find_flight_recorder() -> Callable[[], bytes] | None:
    """The function that dumps NCCL's flight recorder, if torch was built with NCCL. The public way
    is to let NCCL time out."""
    return getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)


def make_work(future: Any) -> dist.Work:
    """A finished collective, for process groups in Python. No public function makes one; the
    stubs do not have this one."""
    create: Any = getattr(torch._C._distributed_c10d, "_create_work_from_future")  # noqa: B009
    return create(future)
