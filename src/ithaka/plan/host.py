"""What this machine has: memory, as the control groups around this process allow it, cores and disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Host:
    """What this machine has to spare now."""

    memory_bytes: int
    disk_bytes: int
    disk_path: Path


def this_host(disk_path: Path | None = None) -> Host:
    """`disk_path`: where files would go; None: the system's temporary directory."""
    folder = disk_path or Path(tempfile.gettempdir())
    free = [psutil.virtual_memory().available, *cgroup_rooms()]
    return Host(min(free), shutil.disk_usage(folder).free, folder)


def host_capacity() -> int:
    """This machine's memory, or what the control groups around this process allow of it: the same at any moment,
    and the most that can be free."""
    return min([psutil.virtual_memory().total, *cgroup_limits()])


def num_cores() -> int:
    """Those this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cgroup_rooms(root: Path = CGROUP, of: Path = OWN_CGROUP) -> list[int]:
    """What each control group around this process still allows; file cache makes way: it counts as free."""
    rooms = []
    for group, limit, usage, cache in _cgroups(root, of):
        allowed, used = _read_number(group / limit), _read_number(group / usage)
        if allowed is not None and used is not None:
            stat = dict(line.split() for line in _read_lines(group / "memory.stat"))
            rooms.append(max(0, allowed - used + int(stat.get(cache, 0))))
    return rooms


def cgroup_limits(root: Path = CGROUP, of: Path = OWN_CGROUP) -> list[int]:
    """What each control group around this process allows in all."""
    limits = (_read_number(group / limit) for group, limit, *_ in _cgroups(root, of))
    return [limit for limit in limits if limit is not None]


def _cgroups(root: Path, of: Path) -> Iterator[tuple[Path, str, str, str]]:
    """The memory groups around this process, with the names of limit and usage and of the cache's entry."""
    for line in _read_lines(of):
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        # A container sees its own groups at the top, whatever the path says.
        top = root / controllers
        inside = top / path.lstrip("/")
        v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        names = v1 if controllers else ("memory.max", "memory.current", "inactive_file")
        for group in (top, *(folder for folder in (inside, *inside.parents) if top in folder.parents)):
            yield (group, *names)


def _read_number(path: Path) -> int | None:
    """None where there is no such file, or no limit in it."""
    lines = _read_lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
