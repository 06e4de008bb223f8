"""What a run needs of host memory and disk, and what this machine has: known before any process starts."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ithaka.config import Config, ConfigError, MemoryConfig
from ithaka.layout import layout_of
from ithaka.plan.cost import Ledger, memory
from ithaka.plan.hardware import GPUS, Hardware
from ithaka.plan.host import Host, this_host
from ithaka.plan.shape import ModelShape, Work
from ithaka.plan.show import size

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
    if not on_gpu:
        _check_cpu(config, shape, cp, num_ranks, have)


def needs(config: Config, shape: ModelShape, cp: int, num_ranks: int, on_gpu: bool) -> tuple[Holders, Holders]:
    """(host, disk): bytes per holder on this machine, of all its ranks together."""
    ledger, ranks = _ledger(config, shape, cp, num_ranks, on_gpu)
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


def _ledger(config: Config, shape: ModelShape, cp: int, num_ranks: int, on_gpu: bool) -> tuple[Ledger, int]:
    """Also the ranks that its host and disk stand for: as many as divide all, since machines may differ in theirs."""
    ranks = math.gcd(num_ranks, local_ranks(num_ranks))
    layout = layout_of(config, shape.num_layers, num_ranks, on_gpu)
    hardware = Hardware(GPUS["CPU"], ranks, num_ranks // ranks)
    return memory(shape, layout, hardware, Work(config.data.context, config.train.batch)), ranks


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


# ---- without a GPU: the device's memory is the host's


def cpu_needs(config: Config, shape: ModelShape, cp: int, num_ranks: int) -> Holders:
    """Bytes per holder in this machine's memory, of all its ranks together, at the planned peak of a step."""
    held = _ledger(config, shape, cp, num_ranks, on_gpu=False)[0].gpu
    on_device = {name: local_ranks(num_ranks) * each for name, each in held.items() if each and name != "reserve"}
    return on_device | needs(config, shape, cp, num_ranks, on_gpu=False)[0]


def _check_cpu(config: Config, shape: ModelShape, cp: int, num_ranks: int, have: Host) -> None:
    holders = cpu_needs(config, shape, cp, num_ranks)
    need = sum(holders.values())
    if need <= have.memory_bytes:
        return
    largest = sorted(holders, key=lambda name: -holders[name])[:3]
    parts = ", ".join(f"{name} {size(holders[name])}" for name in largest)
    ways = _cpu_ways_out(config, shape, cp, num_ranks, have)
    raise ConfigError(
        f"data.context={config.data.context} needs {size(need)} of memory for {local_ranks(num_ranks)} ranks without "
        f"a GPU ({parts}), and {size(have.memory_bytes)} are free; use {ways}"
    )


def _cpu_ways_out(config: Config, shape: ModelShape, cp: int, num_ranks: int, have: Host) -> str:
    longest = longest_on_cpu(config, shape, cp, num_ranks, have)
    ways = [f"data.context={longest} or less"] if longest else []
    for way, leaner in _leaner(config, cp):
        reached = longest_on_cpu(leaner, shape, cp, num_ranks, have)
        if reached == config.data.context:
            ways.append(way)
        elif reached > longest:
            ways.append(f"{way} with data.context={reached} or less")
    return ", or ".join(ways) or "a smaller model or more machines"


def _leaner(config: Config, cp: int) -> Iterator[tuple[str, Config]]:
    """(setting, configuration) with less memory; where everything is kept, the other settings change little."""
    if config.memory.checkpoint == "none":
        changes: dict[str, Any] = {"memory.checkpoint": "full"}
    else:
        changes = {"parallel.heads_per_stage": cp, "memory.tile_tokens": MemoryConfig.tile_tokens}
        changes["memory.offload"] = "disk"
    for name, value in changes.items():
        section, key = name.split(".")
        changed = replace(getattr(config, section), **{key: value})
        yield f"{name}={value}", replace(config, **{section: changed})


def longest_on_cpu(config: Config, shape: ModelShape, cp: int, num_ranks: int, have: Host) -> int:
    """The longest context up to the one asked for that fits, as a multiple of `cp`; 0 where none does."""

    def fits(context: int) -> bool:
        shorter = replace(config, data=replace(config.data, context=context))
        disk = needs(shorter, shape, cp, num_ranks, on_gpu=False)[1]
        in_memory = sum(cpu_needs(shorter, shape, cp, num_ranks).values())
        return in_memory <= have.memory_bytes and sum(disk.values()) <= have.disk_bytes

    if fits(config.data.context):
        return config.data.context
    low, high = 0, -(-config.data.context // cp)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * cp) else (low, middle)
    return low * cp if low * cp >= 2 else 0
