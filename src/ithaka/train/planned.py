"""What a run does not say about parallelism and memory, the planner decides, before any process starts."""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Set
from pathlib import Path

import psutil

from ithaka.config import Config, ConfigError
from ithaka.plan.cost import Work
from ithaka.plan.hardware import Hardware, gpu_named
from ithaka.plan.search import SETTINGS, Plan, choose, fixed_settings, settings_of
from ithaka.train.check import model_shape

CP = "parallel.cp"  # never the planner's: it would change how many sequences a step has


def planned(
    config: Config, given: Set[str], num_ranks: int, local_ranks: int, gpu_name: str | None
) -> tuple[Config, Plan | None]:
    """`config` with every setting that is not `given` taken from the fastest plan that fits, and that plan.

    Without a GPU that the hardware table knows, with memory.plan=off, or in another precision than bfloat16, which
    is what the table's rates are for, the configuration stays as it is.
    """
    gpu = gpu_named(gpu_name) if gpu_name else None
    if gpu is None or config.memory.plan == "off" or config.model.dtype not in ("auto", "bfloat16"):
        return config, None
    shape = model_shape(config)
    names = [name for name in SETTINGS if name in given or name == CP]
    fixed = fixed_settings({n: operator.attrgetter(n)(config) for n in names}, shape, num_ranks)
    work = Work(config.data.context, config.train.batch)
    plan = choose(shape, _hardware(config, gpu, num_ranks, local_ranks), work, fixed)
    if not plan.fits:
        raise ConfigError(_refusal(config, plan))
    return _with(config, settings_of(plan), names), plan


def _hardware(config: Config, gpu, num_ranks: int, local_ranks: int) -> Hardware:
    """This machine. What is free now differs from rank to rank under torchrun, so the whole memory, or the control
    group's limit, counts here; what is free is checked against the plan afterwards."""
    disk = config.memory.disk_path
    return Hardware(
        gpu,
        gpus_per_node=local_ranks,
        num_nodes=max(1, num_ranks // local_ranks),
        host_bytes=min(psutil.virtual_memory().total, _memory_limit()),
        disk_bytes=psutil.disk_usage(str(disk)).total if disk is not None else 0,
    )


def _memory_limit(file: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Of a container, where there is one."""
    text = file.read_text().strip() if file.is_file() else "max"
    return int(text) if text.isdigit() else sys.maxsize


def _with(config: Config, chosen: dict, given: list[str]) -> Config:
    for name, value in chosen.items():
        if name in given:
            continue
        section, key = name.split(".")
        changed = dataclasses.replace(getattr(config, section), **{key: value})
        config = dataclasses.replace(config, **{section: changed})
    if "disk" not in (config.memory.offload, config.memory.attention_offload):
        config = dataclasses.replace(config, memory=dataclasses.replace(config.memory, disk_path=None))
    return config


def _refusal(config: Config, plan: Plan) -> str:
    ledger = plan.ledger
    pairs = {
        "each GPU": (ledger.gpu_peak, ledger.gpu_bytes),
        "host memory": (ledger.host_peak, ledger.host_bytes),
        "disk": (ledger.disk_peak, ledger.disk_bytes),
    }
    short = [
        f"{need / 2**30:.1f} GiB of {where}, which has {have / 2**30:.1f}"
        for where, (need, have) in pairs.items()
        if need > have
    ]
    nearest = ", ".join(f"{name}={value}" for name, value in settings_of(plan).items() if value is not None)
    return (
        f"data.context={config.data.context} does not fit: the nearest plan ({nearest}) needs "
        f"{' and '.join(short)}; use less context, more ranks or memory.disk_path, or memory.plan=off to try anyway"
    )
