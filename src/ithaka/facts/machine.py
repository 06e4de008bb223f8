"""This machine: its cores, memory within the limits of its cgroups, free disk, and GPUs as the CUDA
driver names them."""

import ctypes
import os
import shutil
import tempfile
from pathlib import Path

import psutil


def available_memory() -> int:
    """Bytes of host memory that this process may still allocate."""
    return min([psutil.virtual_memory().available, *cgroup_rooms()])


def free_disk(folder: Path | None) -> int:
    """Free bytes on the disk of `folder`. None: the system's temporary directory."""
    return shutil.disk_usage(folder or tempfile.gettempdir()).free


def ask_driver(index: int) -> tuple[str, int]:
    """Name and bytes of this process's CUDA device `index`, as CUDA_VISIBLE_DEVICES and
    CUDA_DEVICE_ORDER count. Creates no context, but forks cannot use CUDA afterward."""
    driver = ctypes.CDLL("libcuda.so.1")
    device = ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    num_bytes = ctypes.c_size_t()
    errors = (
        driver.cuInit(0),
        driver.cuDeviceGet(ctypes.byref(device), index),
        driver.cuDeviceGetName(name, len(name), device),
        driver.cuDeviceTotalMem_v2(ctypes.byref(num_bytes), device),
    )
    if any(errors):
        raise RuntimeError(f"the CUDA driver returned error {next(filter(None, errors))}")
    return name.value.decode(), num_bytes.value


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cgroup_rooms(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> list[int]:
    """Bytes that each cgroup (v2) of this process still allows. File cache counts as free."""
    # In a container its own cgroup is the root, whatever the path.
    inside = root / "".join(line[4:] for line in _read_lines(own) if line.startswith("0::/"))
    below = [folder for folder in (inside, *inside.parents) if root in folder.parents]
    rooms = []
    for group in (root, *below):
        allowed = _read_lines(group / "memory.max")
        used = _read_lines(group / "memory.current")
        if used and allowed and allowed[0].isdigit():
            stat = dict(line.split() for line in _read_lines(group / "memory.stat"))
            rooms.append(max(0, int(allowed[0]) - int(used[0]) + int(stat.get("inactive_file", 0))))
    return rooms


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
