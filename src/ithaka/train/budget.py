"""What a run needs of host memory and disk, and what this machine has: known before any process starts."""

from __future__ import annotations

import math
import operator
import os

from ithaka.config import Config, ConfigError
from ithaka.plan.cost import Ledger, memory
from ithaka.plan.hardware import GPUS, Hardware
from ithaka.plan.host import this_host
from ithaka.plan.layout import Layout, Work
from ithaka.plan.search import SETTINGS, fixed_settings
from ithaka.plan.shape import ModelShape

# The ledger's names.
STORED = ("layer inputs", "kept attention", "on the way to disk")
ON_THE_WAY, STATES = "on the way to disk", "parameters, gradients, optimizer"
Holders = dict[str, int]


def check_budgets(config: Config, shape: ModelShape, cp: int, num_ranks: int, on_gpu: bool) -> None:
    """Refuses what certainly does not fit; the rest of what a process needs is not counted."""
    have = this_host(config.memory.disk_path)
    host, disk = needs(config, shape, cp, num_ranks, on_gpu)
    ranks = f"for {local_ranks(num_ranks)} ranks"
    _check(config, cp, host, have.memory_bytes, f"host memory {ranks}", "free")
    _check(config, cp, disk, have.disk_bytes, f"disk {ranks}", f"free in {have.disk_path}")


def needs(config: Config, shape: ModelShape, cp: int, num_ranks: int, on_gpu: bool) -> tuple[Holders, Holders]:
    """(host, disk): bytes per holder on this machine, of all its ranks together."""
    # As many ranks as divide all: machines may differ in theirs.
    ranks = math.gcd(num_ranks, local_ranks(num_ranks))
    ledger = _ledger(config, shape, cp, Hardware(GPUS["CPU"], ranks, num_ranks // ranks), on_gpu)
    times = local_ranks(num_ranks) // ranks
    host = {name: times * num_bytes for name, num_bytes in ledger.host.items() if num_bytes and name != "reserve"}
    return host, {name: times * num_bytes for name, num_bytes in ledger.disk.items() if num_bytes}


def store_host_bytes(config: Config, shape: ModelShape, cp: int, num_ranks: int, on_gpu: bool) -> int | None:
    """What one rank's store may hold in host memory: its share of what is free; with the disk tier only what
    is on its way, so that a disk that is too slow slows the run down instead of filling the memory."""
    local = local_ranks(num_ranks)
    host, disk = needs(config, shape, cp, num_ranks, on_gpu)
    kept = sum(host.get(name, 0) for name in STORED)
    if not kept and not disk:
        return None
    share = this_host(config.memory.disk_path).memory_bytes // local
    return min(share, kept // local) if disk else share


def layout_of(config: Config, shape: ModelShape, cp: int, num_ranks: int, on_gpu: bool) -> Layout:
    """A configuration's settings as the planner sees them."""
    chosen = {name: operator.attrgetter(name)(config) for name in SETTINGS} | {"parallel.cp": cp}
    fixed = fixed_settings(chosen, shape, num_ranks)
    fixed.setdefault("attention_tier", fixed["input_tier"])
    sizes = {"float64": 8, "float32": 4, "bfloat16": 2, "auto": 2 if on_gpu else 4}
    element_bytes = sizes[config.model.dtype]
    return Layout(**fixed, element_bytes=element_bytes, sum_bytes=max(4, element_bytes))


def _ledger(config: Config, shape: ModelShape, cp: int, hardware: Hardware, on_gpu: bool) -> Ledger:
    layout = layout_of(config, shape, cp, hardware.num_gpus, on_gpu)
    return memory(shape, layout, hardware, Work(config.data.context, config.train.batch))


def local_ranks(num_ranks: int) -> int:
    """Ranks of this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))


def _check(config: Config, cp: int, holders: Holders, have: int, what: str, there: str) -> None:
    need = sum(holders.values())
    if need <= have:
        return
    parts = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in holders.items())
    raise ConfigError(
        f"{_cause(config, holders)} needs {size(need)} of {what} ({parts}), and {size(have)} are {there}; "
        f"use {_way_out(config, cp, holders, have)}"
    )


def _cause(config: Config, holders: Holders) -> str:
    kept = sum(holders.values()) - holders.get(STATES, 0)
    return f"memory.offload={config.memory.offload}" if kept else "memory.offload_optimizer=true"


def _way_out(config: Config, cp: int, holders: Holders, have: int) -> str:
    states, ways = holders.get(STATES, 0), []
    kept = sum(holders.values()) - states
    if kept and config.memory.offload == "host":
        ways.append("memory.offload=disk")
    if config.memory.keep_attention not in ("none", 0) and kept:
        ways.append("memory.keep_attention=none")
    if states:
        ways.append("memory.offload_optimizer=false")
    if config.memory.offload == "disk" and ON_THE_WAY not in holders:
        ways.append("a memory.disk_path with more room")
    fitting = int(config.data.context * (have - states) / kept) if kept and have > states else 0
    if fitting >= max(cp, 2):
        ways.append(f"data.context={fitting // cp * cp} or less")
    return " or ".join([", ".join(ways[:-1]), ways[-1]] if len(ways) > 1 else ways) or "more machines"


def size(num_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
