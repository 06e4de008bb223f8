"""Which model, on which machine, with which planned settings."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence, Set

from ithaka.attention.kernels import expected_kernel
from ithaka.config import Config, ConfigError, check_writable, embedded_model, parse_config, to_dict
from ithaka.plan.hardware import GPUS, Hardware, find_gpu, gpu_named, this_host, with_kernel
from ithaka.plan.search import Plan, make_search_space, work_from_config
from ithaka.plan.shape import ModelShape, read_shape, shape_from_config

FALLBACK_GPU = "H100"  # its rates rank plans for a GPU that is not in the table


def model_shape(config: Config) -> ModelShape:
    """The model's shape, with the vocabulary that model.resize_embeddings gives it."""
    path, name = config.model.path, config.model.embedded
    shape = read_shape(path) if path else shape_from_config(embedded_model(name), f"model.embedded={name}")
    shape = shape.with_adapter(config.adapter)
    if not config.model.resize_embeddings:
        return shape
    from ithaka.data.tokenizer import load_tokenizer  # late: it imports transformers

    needed = load_tokenizer(config.data.tokenizer, path).vocab_size
    # Rounded up to a size at which matmuls are fast.
    return shape if needed <= shape.vocab else dataclasses.replace(shape, vocab=-(-needed // 64) * 64)


def detect_machine(config: Config, num_ranks: int, gpu: tuple[str, int] | None) -> Hardware:
    """This rank's machine, as if all nodes were like it: the attention kernel expected to run on its GPU (name and
    memory), and the host memory and disk that are free before the run allocates any."""
    settings, disk = config.memory, config.memory.disk_path
    if disk is not None and not disk.is_dir():
        raise ConfigError(f"memory.disk_path={disk} is not a directory; create it, or leave it null")
    if disk is not None:
        check_writable("memory.disk_path", disk, folder=True)
    host, ranks = this_host(disk), int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    name, gpu_bytes = gpu or ("CPU", host.memory_bytes // ranks)
    entry = GPUS["CPU"] if gpu is None else gpu_named(name) or dataclasses.replace(find_gpu(FALLBACK_GPU), name=name)
    memory_bytes = gpu_bytes if gpu_named(name) is None else min(entry.memory_bytes, gpu_bytes)
    disk_bytes = host.disk_bytes if disk or "disk" in (settings.offload, settings.attention_offload) else 0
    entry = with_kernel(entry, expected_kernel(config.attention.kernel, entry.kernels))
    entry = dataclasses.replace(entry, memory_bytes=memory_bytes)
    return Hardware(entry, ranks, num_ranks // ranks, host_bytes=host.memory_bytes, disk_bytes=disk_bytes)


def weakest_machine(machines: Sequence[Hardware]) -> Hardware:
    """The least that every rank has: host memory, disk, and the GPU with the least memory (among equals, with the
    slowest attention kernel)."""
    ranks_per_node = sorted({machine.gpus_per_node for machine in machines})
    if len(ranks_per_node) > 1:
        counts = " and ".join(map(str, ranks_per_node))
        raise ConfigError(f"the nodes have {counts} ranks; start the same number on each")
    host_bytes, disk_bytes = (min(getattr(m, name) for m in machines) for name in ("host_bytes", "disk_bytes"))
    gpus = (machine.gpu for machine in machines)
    gpu = min(gpus, key=lambda gpu: (gpu.memory_bytes, gpu.attention_forward_flops))
    return dataclasses.replace(machines[0], gpu=gpu, host_bytes=host_bytes, disk_bytes=disk_bytes)


def uses_planner(config: Config, hardware: Hardware) -> bool:
    """Whether the planner decides settings: for GPUs in the hardware table, in bfloat16 (which the table's rates are
    for), unless memory.plan=off."""
    return (
        gpu_named(hardware.gpu.name) is not None
        and config.memory.plan == "auto"
        and config.model.dtype in ("auto", "bfloat16")
    )


def plan_run(
    config: Config, explicit: Set[str], hardware: Hardware, shape: ModelShape | None = None
) -> tuple[Config, Plan | None]:
    """Fill in every setting that is not in `explicit` from a plan; return the config and the plan, which may not fit.
    `shape` defaults to the configured model's."""
    if not uses_planner(config, hardware):
        return config, None
    plan = make_search_space(config, explicit, shape or model_shape(config), hardware).choose(work_from_config(config))
    tree = to_dict(config)
    for name, value in plan.settings.items():
        section, key = name.split(".")
        if name not in explicit or tree[section][key] == "auto":
            tree[section][key] = value
    if "disk" not in (tree["memory"]["offload"], tree["memory"]["attention_offload"]):
        tree["memory"]["disk_path"] = None
    return parse_config(tree), plan
