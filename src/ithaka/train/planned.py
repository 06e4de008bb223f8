"""What a run does not say about parallelism and memory, the planner decides: one plan for all ranks, before any
allocates anything."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass

from ithaka.config import Config, ConfigError, to_yaml
from ithaka.layout import SETTINGS, layout_of
from ithaka.plan.cost import memory
from ithaka.plan.hardware import Gpu, Hardware, gpu_named, least_gpu
from ithaka.plan.host import Host, this_host
from ithaka.plan.search import Plan, decide
from ithaka.plan.shape import Work
from ithaka.plan.show import size
from ithaka.train.budget import local_ranks
from ithaka.train.check import check_disk, model_shape
from ithaka.train.resume import shown


@dataclass(frozen=True)
class Machine:
    """The node of one rank: what its GPU has in all, and what of host memory and disk is free before the run takes
    any, which is what the checks before the start and the store go by."""

    gpu_name: str | None
    gpu_bytes: int
    host_bytes: int
    disk_bytes: int
    local_ranks: int


def this_machine(config: Config, num_ranks: int, gpu: tuple[str, int] | None, host: Host) -> Machine:
    """`gpu`: its name and its bytes. `host`: what was free before the run took any."""
    memory = config.memory
    to_disk = memory.disk_path is not None or "disk" in (memory.offload, memory.attention_offload)
    name, gpu_bytes = gpu or (None, sys.maxsize)
    return Machine(
        gpu_name=name,
        gpu_bytes=gpu_bytes,
        host_bytes=host.memory_bytes,
        disk_bytes=host.disk_bytes if to_disk else 0,
        local_ranks=local_ranks(num_ranks),
    )


def machine_here(config: Config, num_ranks: int, gpu: tuple[str, int] | None) -> Machine:
    """This rank's, before the run takes anything of it."""
    check_disk(config)
    return this_machine(config, num_ranks, gpu, this_host(config.memory.disk_path))


def check_ranks_agree(configs: Sequence[Config]) -> None:
    """Refuses ranks with different settings, whose collectives would wait for each other for ever: under torchrun every
    node reads its own file."""
    texts = [to_yaml(config) for config in configs]
    for rank, text in enumerate(texts):
        for first, other in itertools.zip_longest(texts[0].splitlines(), text.splitlines(), fillvalue=""):
            if first != other:
                raise ConfigError(
                    f"rank 0 has `{first.strip()}` and rank {rank} `{other.strip()}`; give every node the same settings"
                )


def planned(config: Config, given: Set[str], num_ranks: int, machines: Sequence[Machine]) -> tuple[Config, Plan | None]:
    """`config` with every setting that is not `given` taken from the fastest plan that fits, and that plan.

    The same machines give the same plan, so ranks that know of each other's need not talk any further. Without a GPU
    that the hardware table knows, with memory.plan=off, or in another precision than bfloat16, which is what the
    table's rates are for, the configuration stays as it is.
    """
    hardware = _hardware_to_plan_for(config, num_ranks, machines)
    if hardware is None:
        return config, None
    shape = model_shape(config)
    plan = decide(config, given, shape, hardware)
    if not plan.fits:
        raise ConfigError(_refusal(config, plan))
    return _with(config, plan.settings, given), plan


def check_still_fits(config: Config, given: Set[str], num_ranks: int, machines: Sequence[Machine]) -> None:
    """For a run that goes on, with settings that were made for the machines and the sequences it had."""
    hardware = _hardware_to_plan_for(config, num_ranks, machines)
    if hardware is None:
        return
    shape, cp = model_shape(config), config.parallel.cp_of(num_ranks)
    layout = layout_of(config, shape.num_layers, num_ranks, on_gpu=True)
    if memory(shape, layout, hardware, Work(config.data.context, config.train.batch)).fits:
        return
    # Another cp changes how many sequences a step has: only where no settings fit with this one.
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, cp=cp))
    plans = (decide(config, names, shape, hardware) for names in ({*given, "parallel.cp"}, given))
    other = next((_with(config, plan.settings, given) for plan in plans if plan.fits), None)
    if other is None:
        raise ConfigError(_refusal(config, decide(config, given, shape, hardware)))
    values = {name: operator.attrgetter(name) for name in (*SETTINGS, "memory.disk_path")}
    ways = " ".join(f"--set {name}={shown(of(other))}" for name, of in values.items() if of(other) != of(config))
    raise ConfigError(
        f"data.context={config.data.context} with train.batch={config.train.batch} on {num_ranks} ranks does not fit "
        f"with the run's settings; add {ways}, which is planned to fit, or --set memory.plan=off to try anyway"
    )


def _hardware_to_plan_for(config: Config, num_ranks: int, machines: Sequence[Machine]) -> Hardware | None:
    """None where nothing is planned, see `planned`."""
    if config.memory.plan == "off" or config.model.dtype not in ("auto", "bfloat16"):
        return None
    return hardware_of(machines, num_ranks)


def hardware_of(machines: Sequence[Machine], num_ranks: int) -> Hardware | None:
    """A machine that every rank's can stand for: of each figure the least; None with a GPU that the table lacks."""
    gpus = [_gpu(machine) for machine in machines]
    known = [gpu for gpu in gpus if gpu is not None]
    return hardware_with(least_gpu(known), machines, num_ranks) if len(known) == len(gpus) else None


def hardware_with(gpu: Gpu, machines: Sequence[Machine], num_ranks: int) -> Hardware:
    """Nodes with different numbers of ranks count as more nodes of as many ranks as divide them all, and `num_ranks`:
    one rank alone knows its own node only."""
    ranks = math.gcd(num_ranks, *(machine.local_ranks for machine in machines))
    return Hardware(
        gpu,
        gpus_per_node=ranks,
        num_nodes=num_ranks // ranks,
        host_bytes=min(machine.host_bytes * ranks // machine.local_ranks for machine in machines),
        disk_bytes=min(machine.disk_bytes * ranks // machine.local_ranks for machine in machines),
    )


def _gpu(machine: Machine) -> Gpu | None:
    gpu = gpu_named(machine.gpu_name) if machine.gpu_name else None
    return gpu and dataclasses.replace(gpu, memory_bytes=min(gpu.memory_bytes, machine.gpu_bytes))


def _with(config: Config, chosen: dict, given: Set[str]) -> Config:
    for name, value in chosen.items():
        section, key = name.split(".")
        if name in given and getattr(getattr(config, section), key) != "auto":
            continue
        changed = dataclasses.replace(getattr(config, section), **{key: value})
        config = dataclasses.replace(config, **{section: changed})
    if "disk" not in (config.memory.offload, config.memory.attention_offload):
        config = dataclasses.replace(config, memory=dataclasses.replace(config.memory, disk_path=None))
    return config


def _refusal(config: Config, plan: Plan) -> str:
    ledger = plan.ledger
    pairs = {
        "each GPU": (ledger.gpu_peak, ledger.gpu_bytes, ""),
        "host memory": (ledger.host_peak, ledger.host_bytes, " free"),
        "disk": (ledger.disk_peak, ledger.disk_bytes, " free"),
    }
    short = [
        f"{size(need)} of {where}, which has {size(have)}{free}"
        for where, (need, have, free) in pairs.items()
        if need > have
    ]
    nearest = ", ".join(f"{name}={value}" for name, value in plan.settings.items() if value is not None)
    return (
        f"data.context={config.data.context} does not fit: the nearest plan ({nearest}) needs "
        f"{' and '.join(short)}; use less context, more ranks or memory.disk_path, or memory.plan=off to try anyway"
    )
