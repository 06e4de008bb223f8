"""The machine of a run: this rank's, and the least that every rank has."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from ithaka.config import Config, ConfigError, check_writable
from ithaka.facts.machine import available_memory, free_disk
from ithaka.plan.hardware import GPUS, Hardware, find_gpu, gpu_named, with_profile

FALLBACK_GPU = "H100"  # its rates rank plans for a GPU that is not in the table


def detect_machine(config: Config, num_ranks: int, gpu: tuple[str, int] | None) -> Hardware:
    """This rank's machine, as if all nodes were like it: the attention kernel expected to run on
    its GPU (name and memory), and the host memory and disk that are free before the run allocates
    any. Of the GPU's memory, only memory.gpu_gib counts."""
    memory = config.memory
    disk = memory.disk_path
    if disk is not None:
        if not disk.is_dir():
            raise ConfigError(
                f"memory.disk_path={disk} is not a directory; create it, or leave it null"
            )
        check_writable("memory.disk_path", disk, folder=True)
    host_bytes = available_memory()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    name, gpu_bytes = gpu or ("CPU", host_bytes // ranks)
    known = gpu_named(name)
    entry = known
    if gpu is None:
        entry = GPUS["CPU"]
    elif entry is None:
        entry = dataclasses.replace(find_gpu(FALLBACK_GPU), name=name)
    memory_bytes = gpu_bytes if known is None else min(known.memory_bytes, gpu_bytes)
    uses_disk = disk is not None or memory.uses_disk
    entry = dataclasses.replace(with_profile(entry), memory_bytes=memory_bytes)
    machine = Hardware(
        entry,
        ranks,
        num_ranks // ranks,
        host_bytes=host_bytes,
        disk_bytes=free_disk(disk) if uses_disk else 0,
    )
    if memory.gpu_gib is not None and not uses_planner(config, machine):
        settings = f"model.dtype={config.model.dtype} and memory.plan={memory.plan}"
        rule = f"has no effect: nothing is planned on {name} with {settings}"
        needs = "a plan needs a known GPU, bfloat16 and memory.plan=auto"
        raise ConfigError(f"memory.gpu_gib={memory.gpu_gib:g} {rule}; use null ({needs})")
    machine = machine.with_gpu_gib(memory.gpu_gib)
    from ithaka.attention.choose import expected_kernel  # late: it imports torch

    return machine.with_kernel(expected_kernel(config.attention.kernel, entry.kernels))


def weakest_machine(machines: Sequence[Hardware]) -> Hardware:
    """The least that every rank has: host memory, disk, and the GPU with the least memory (among
    equals, with the slowest attention kernel)."""
    ranks_per_node = sorted({machine.gpus_per_node for machine in machines})
    if len(ranks_per_node) > 1:
        counts = " and ".join(map(str, ranks_per_node))
        raise ConfigError(f"the nodes have {counts} ranks; start the same number on each")
    host_bytes = min(machine.host_bytes for machine in machines)
    disk_bytes = min(machine.disk_bytes for machine in machines)
    gpus = (machine.gpu for machine in machines)
    gpu = min(gpus, key=lambda gpu: (gpu.memory_bytes, gpu.attention_forward_flops))
    return dataclasses.replace(machines[0], gpu=gpu, host_bytes=host_bytes, disk_bytes=disk_bytes)


def uses_planner(config: Config, hardware: Hardware) -> bool:
    """Whether the planner decides settings: for GPUs in the hardware table, in bfloat16 (which the
    table's rates are for), unless memory.plan=off."""
    in_table = gpu_named(hardware.gpu.name) is not None
    return in_table and config.memory.plan == "auto" and config.model.dtype in ("auto", "bfloat16")
