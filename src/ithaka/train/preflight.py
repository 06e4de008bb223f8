"""Turn what a command was told, and the machines it has, into a validated run: before any rank starts, and before
anything is written.

Under torchrun every rank does this. If a check fails on any rank, it is raised on all.
"""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from ithaka.attention.kernels import KERNELS
from ithaka.config import (
    CPU_DEFAULT,
    GPU_DEFAULT,
    Config,
    ConfigError,
    check_effects,
    check_writable,
    embedded_model,
    given,
    load,
    parse,
    shown,
    to_dict,
    to_yaml,
)
from ithaka.dist.mesh import start_process_group
from ithaka.layout import SETTINGS, Layout, check_fixed, either, fixed_settings, layout_of
from ithaka.plan.bytes import Holders, Ledger, memory
from ithaka.plan.hardware import GPUS, Gpu, Hardware, find_gpu, gpu_named, least_gpu, this_host
from ithaka.plan.search import Plan, decide, work_of
from ithaka.plan.shape import ModelShape, Work, read_shape, shape_from_config
from ithaka.plan.show import size
from ithaka.train import checkpoint, launch
from ithaka.train.console import check_tensorboard
from ithaka.train.launch import SharedError, under_torchrun

P = ParamSpec("P")
T = TypeVar("T")

# The ledger's names.
STORED = ("layer inputs", "kept attention", "on the way to disk")
STATES = "parameters, gradients, optimizer"
STAND_IN = "H100"  # for a GPU that the table lacks


@dataclass(frozen=True)
class Request:
    """What a command was told: a file of settings and changes to them, or a run to go on with."""

    file: Path | None
    changes: list[str]
    resume: Path | None = None
    run_dir: Path | None = None


@dataclass(frozen=True)
class Run:
    """A validated run: the same on every rank, but for what its own machine has free."""

    config: Config  # every setting decided, train.run_dir set
    num_ranks: int
    shape: ModelShape
    layout: Layout
    hardware: Hardware  # this machine stands for all; host memory and disk as free before the run takes any
    plan: Plan | None = None  # the planner's, where it decided anything
    checkpoint: Path | None = None  # to go on from
    changed: Mapping[str, str] = field(default_factory=dict)  # settings that differ from the run's so far, in words

    @property
    def run_dir(self) -> Path:
        assert self.config.train.run_dir is not None, "resolved before the ranks start: one name for all of them"
        return self.config.train.run_dir

    @property
    def work(self) -> Work:
        return work_of(self.config)

    @property
    def ledger(self) -> Ledger:
        return memory(self.shape, self.layout, self.hardware, self.work)


def preflight(request: Request) -> Run:
    """Resolve, plan and check the configuration."""
    told = together(_told, request)
    return together(_decide, request, gathered(told), told[1])


def _told(request: Request) -> tuple[Config, Machine]:
    """What this rank was told, and the machine it has for it."""
    config = _resolve(request)
    return config, machine_here(config, launch.decide_ranks(config.parallel.ranks, launch.num_gpus()), launch.gpu())


def _decide(request: Request, everyone: Sequence[tuple[Config, Machine]], here: Machine) -> Run:
    """The same on every rank, from what they all were told and have. A run that goes on keeps its settings."""
    configs, machines = zip(*everyone, strict=True)
    check_ranks_agree(configs)
    config, plan = configs[0], None
    num_ranks = launch.decide_ranks(config.parallel.ranks, launch.num_gpus())
    if request.resume is None:
        told = given(request.file, request.changes, _defaults(request))
        config, plan = planned(config, told, num_ranks, machines)
    run = dataclasses.replace(validated(config, num_ranks, request.resume, here), plan=plan)
    if request.resume is not None:
        check_still_fits(config, given(None, request.changes), num_ranks, machines)
    return run


def validated(config: Config, num_ranks: int, resume: Path | None = None, here: Machine | None = None) -> Run:
    """A run with these settings. Raises ConfigError unless it can start; cheap checks first."""
    if resume is None and config.train.run_dir is not None:
        check_run_dir(config.train.run_dir)
    shape = model_shape(config)
    check_settings(config, num_ranks, shape)
    hardware = hardware_of([here or machine_here(config, num_ranks, launch.gpu())], num_ranks)
    layout = layout_of(config, shape.num_layers, num_ranks, on_gpu=hardware.gpu.name != "CPU")
    run = Run(config, num_ranks, shape, layout, hardware)
    check_budgets(run)
    check_weights(config.model.path)
    if config.train.tensorboard:
        check_tensorboard()
    if resume is not None:
        found, changed = checkpoint.to_go_on_from(resume, config, shape)
        run = dataclasses.replace(run, checkpoint=found, changed=changed)
    from ithaka.data.open import check as check_data  # late: it imports transformers, and cheap checks answer at once

    check_data(config.data, shape.vocab, config.model.path)
    return run


# ---- one answer for all ranks


def together(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `function` returns on this rank; if it raises ConfigError on any rank, SharedError on all.

    Every rank must call it, and the function must not communicate. A rank that any other error ends closes its
    connections, which is how the others notice.
    """
    if not _others():
        return function(*args, **kwargs)
    refusal = None
    try:
        result = function(*args, **kwargs)
    except ConfigError as error:
        refusal = str(error)
    refusals = gathered((socket.gethostname(), refusal))
    if any(text is not None for _, text in refusals):
        raise SharedError(refusal_of_ranks(refusals))
    return result


def gathered(mine: T) -> list[T]:
    """Every rank's, in order. Communicates, unless this process is alone."""
    answers = [mine] * (dist.get_world_size() if _others() else 1)
    if len(answers) > 1:
        dist.all_gather_object(answers, mine)
    return answers


def _others() -> bool:
    """Whether other ranks take part; then they can be reached."""
    if under_torchrun():
        start_process_group()
    return dist.is_initialized() and dist.get_world_size() > 1


def refusal_of_ranks(refusals: Sequence[tuple[str, str | None]]) -> str:
    """The first refusal of each host, whose ranks differ in figures at most; ranks are named unless all have one, and
    the hosts the same."""
    first: dict[str, tuple[int, str]] = {}
    for rank, (host, text) in enumerate(refusals):
        if text is not None:
            first.setdefault(host, (rank, text))
    texts = {text for _, text in first.values()}
    if len(texts) == 1 and all(text is not None for _, text in refusals):
        return texts.pop()
    return "\n".join(f"rank {rank} on {host}: {text}" for host, (rank, text) in first.items())


def check_ranks_agree(configs: Sequence[Config]) -> None:
    """Refuse ranks with different settings, whose collectives would wait for each other for ever: under torchrun every
    node reads its own file."""
    first, *others = (to_yaml(config).splitlines() for config in configs)
    for rank, lines in enumerate(others, 1):
        for here, there in zip(first, lines, strict=False):
            if here != there:
                raise ConfigError(
                    f"rank 0 has `{here.strip()}` and rank {rank} `{there.strip()}`; give every node the same settings"
                )


# ---- the configuration


def _resolve(request: Request) -> Config:
    """The settings of the run, with its run directory and the length of its learning-rate schedule."""
    if request.resume is None:
        config = load(request.file, request.changes, _defaults(request))
        # A new name per run, the same on every rank: under torchrun it comes from the job, not the clock.
        job = os.environ.get("TORCHELASTIC_RUN_ID")
        job = os.environ["MASTER_PORT"] if job == "none" else job
        name = time.strftime("%Y%m%d-%H%M%S") if job is None else f"torchrun-{job}"
        run_dir = request.run_dir or config.train.run_dir or Path("runs") / name
    else:
        config, run_dir = _resumed(request, request.resume), request.resume
    optim = dataclasses.replace(config.optim, decay_steps=config.optim.decay_steps or config.train.steps)
    return dataclasses.replace(config, optim=optim, train=dataclasses.replace(config.train, run_dir=run_dir))


def _defaults(request: Request) -> dict[str, dict[str, Any]]:
    """Made for the embedded models: a model of the user's own starts from the plain defaults instead."""
    own_model = any(change.replace(" ", "").startswith("model.path=") for change in request.changes)
    if request.file is not None or own_model:
        return {}
    return GPU_DEFAULT if launch.num_gpus() else CPU_DEFAULT


def _resumed(request: Request, resume: Path) -> Config:
    if request.file is not None:
        raise ConfigError(f"config={request.file} cannot be given with --resume {resume}; change settings with --set")
    moved = "--set train.run_dir" if "train.run_dir" in given(None, request.changes) else None
    moved = moved if request.run_dir is None else f"--run-dir {request.run_dir}"
    if moved:
        raise ConfigError(f"{moved} cannot be given with --resume {resume}; leave it out")
    file = resume / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"--resume {resume} holds no config.yaml; give the directory of an earlier run")
    before = load(file)
    end = before.optim.decay_steps or before.train.steps
    kept = end if end > before.optim.warmup_steps else "null"  # a cosine that has not begun ends with the longer run
    return load(file, [f"optim.decay_steps={kept}", *request.changes])


def model_shape(config: Config) -> ModelShape:
    if config.model.path is None:
        return shape_from_config(embedded_model(config.model.embedded), f"model.embedded={config.model.embedded}")
    return read_shape(config.model.path)


# ---- the planner's part


@dataclass(frozen=True)
class Machine:
    """The node of one rank: what its GPU has in all, and what of host memory and disk is free before the run takes
    any, which is what the checks before the start and the store go by."""

    gpu_name: str | None
    gpu_bytes: int
    host_bytes: int
    disk_bytes: int
    local_ranks: int


def local_ranks(num_ranks: int) -> int:
    """Ranks of this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))


def machine_here(config: Config, num_ranks: int, gpu: tuple[str, int] | None) -> Machine:
    """This rank's. `gpu`: its name and its bytes."""
    memory, disk = config.memory, config.memory.disk_path
    if disk is not None and not disk.is_dir():
        raise ConfigError(f"memory.disk_path={disk} is not a directory; create it, or leave it null")
    if disk is not None:
        check_writable("memory.disk_path", disk, folder=True)
    host, to_disk = this_host(disk), disk is not None or "disk" in (memory.offload, memory.attention_offload)
    name, gpu_bytes = gpu or (None, sys.maxsize)
    return Machine(name, gpu_bytes, host.memory_bytes, host.disk_bytes if to_disk else 0, local_ranks(num_ranks))


def planned(config: Config, given: Set[str], num_ranks: int, machines: Sequence[Machine]) -> tuple[Config, Plan | None]:
    """`config` with every setting that is not `given` taken from the fastest plan that fits, and that plan.

    The same machines give the same plan on every rank. Without a GPU that the hardware table knows, with
    memory.plan=off, or in another precision than bfloat16, which is what the table's rates are for, the configuration
    stays as it is.
    """
    hardware = _hardware_to_plan_for(config, num_ranks, machines)
    if hardware is None:
        return config, None
    plan = decide(config, given, model_shape(config), hardware)
    if not plan.fits:
        raise ConfigError(_does_not_fit(config, plan))
    return _with(config, plan.settings, given), plan


def check_still_fits(config: Config, given: Set[str], num_ranks: int, machines: Sequence[Machine]) -> None:
    """For a run that goes on, with settings that were made for the machines and the sequences it had."""
    hardware = _hardware_to_plan_for(config, num_ranks, machines)
    if hardware is None:
        return
    shape, cp = model_shape(config), config.parallel.cp_of(num_ranks)
    layout = layout_of(config, shape.num_layers, num_ranks, on_gpu=True)
    if memory(shape, layout, hardware, work_of(config)).fits:
        return
    # Another cp changes how many sequences a step has: only where no settings fit with this one.
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, cp=cp))
    plans = (decide(config, names, shape, hardware) for names in ({*given, "parallel.cp"}, given))
    other = next((_with(config, plan.settings, given) for plan in plans if plan.fits), None)
    if other is None:
        raise ConfigError(_does_not_fit(config, decide(config, given, shape, hardware)))
    values = {name: attrgetter(name) for name in (*SETTINGS, "memory.disk_path")}
    ways = " ".join(f"--set {name}={shown(of(other))}" for name, of in values.items() if of(other) != of(config))
    raise ConfigError(
        f"data.context={config.data.context} with train.batch={config.train.batch} on {num_ranks} ranks does not fit "
        f"with the run's settings; add {ways}, which is planned to fit, or --set memory.plan=off to try anyway"
    )


def _hardware_to_plan_for(config: Config, num_ranks: int, machines: Sequence[Machine]) -> Hardware | None:
    known = all(machine.gpu_name and gpu_named(machine.gpu_name) for machine in machines)
    if not known or config.memory.plan == "off" or config.model.dtype not in ("auto", "bfloat16"):
        return None
    return hardware_of(machines, num_ranks)


def hardware_of(machines: Sequence[Machine], num_ranks: int) -> Hardware:
    """A machine that every rank's can stand for: of each figure the least.

    Nodes with different numbers of ranks count as more nodes of as many ranks as divide them all, and `num_ranks`:
    one rank alone knows its own node only.
    """
    ranks = math.gcd(num_ranks, *(machine.local_ranks for machine in machines))
    return Hardware(
        least_gpu([_gpu(machine) for machine in machines]),
        gpus_per_node=ranks,
        num_nodes=num_ranks // ranks,
        host_bytes=min(machine.host_bytes * ranks // machine.local_ranks for machine in machines),
        disk_bytes=min(machine.disk_bytes * ranks // machine.local_ranks for machine in machines),
    )


def _gpu(machine: Machine) -> Gpu:
    """The table's, with the memory of this one. One that the table lacks has its own name, and rates that only give
    plans an order."""
    if machine.gpu_name is None:  # the ranks share the host's memory
        return dataclasses.replace(GPUS["CPU"], memory_bytes=machine.host_bytes // machine.local_ranks)
    if (gpu := gpu_named(machine.gpu_name)) is None:
        return dataclasses.replace(find_gpu(STAND_IN), name=machine.gpu_name, memory_bytes=machine.gpu_bytes)
    return dataclasses.replace(gpu, memory_bytes=min(gpu.memory_bytes, machine.gpu_bytes))


def _with(config: Config, chosen: Mapping[str, Any], given: Set[str]) -> Config:
    tree = to_dict(config)
    for name, value in chosen.items():
        section, key = name.split(".")
        if name not in given or tree[section][key] == "auto":
            tree[section][key] = value
    if "disk" not in (tree["memory"]["offload"], tree["memory"]["attention_offload"]):
        tree["memory"]["disk_path"] = None
    return parse(tree)


def _does_not_fit(config: Config, plan: Plan) -> str:
    words = {"GPU": ("each GPU", ""), "host": ("host memory", " free"), "disk": ("disk", " free")}
    short = [
        f"{size(need)} of {words[tier][0]}, which has {size(have)}{words[tier][1]}"
        for tier, (need, have) in plan.ledger.tiers.items()
        if need > have
    ]
    nearest = ", ".join(f"{name}={value}" for name, value in plan.settings.items() if value is not None)
    return (
        f"data.context={config.data.context} does not fit: the nearest plan ({nearest}) needs "
        f"{' and '.join(short)}; use less context, more ranks or memory.disk_path, or memory.plan=off to try anyway"
    )


# ---- host memory and disk


def check_budgets(run: Run) -> None:
    """Refuse what certainly does not fit; the rest of what a process needs is not counted."""
    have = this_host(run.config.memory.disk_path)
    host, disk = needs(run)
    ranks = f"for {local_ranks(run.num_ranks)} ranks"
    _check_room(run, host, have.memory_bytes, f"host memory {ranks}", "free")
    _check_room(run, disk, have.disk_bytes, f"disk {ranks}", f"free in {have.disk_path}")
    if run.hardware.gpu.name == "CPU":
        _check_ram(run, have.memory_bytes)


def held(holders: Holders, times: int = 1) -> Holders:
    """Without the reserve, which nobody holds."""
    return {name: times * num_bytes for name, num_bytes in holders.items() if num_bytes and name != "reserve"}


def needs(run: Run) -> tuple[Holders, Holders]:
    """(host, disk): bytes per holder on this machine, of all its ranks together."""
    times = local_ranks(run.num_ranks) // run.hardware.gpus_per_node  # machines may differ in theirs
    return held(run.ledger.host, times), held(run.ledger.disk, times)


def ram_needs(run: Run) -> Holders:
    """Without a GPU the device's memory is the host's: bytes per holder at the planned peak, of all ranks here."""
    return held(run.ledger.gpu, local_ranks(run.num_ranks)) | needs(run)[0]


def store_host_bytes(run: Run) -> int | None:
    """What one rank's store may hold in host memory: its share of what is free; with the disk tier only what
    is on its way, so that a disk that is too slow slows the run down instead of filling the memory."""
    host, disk = needs(run)
    kept = sum(host.get(name, 0) for name in STORED)
    if not kept and not disk:
        return None
    ranks = local_ranks(run.num_ranks)
    share = this_host(run.config.memory.disk_path).memory_bytes // ranks
    return min(share, kept // ranks) if disk else share


def _check_room(run: Run, holders: Holders, have: int, what: str, there: str) -> None:
    need, states, offload = sum(holders.values()), holders.get(STATES, 0), run.config.memory.offload
    if need <= have:
        return
    kept, cp = need - states, run.layout.cp
    longest = int(run.config.data.context * (have - states) / kept) // cp * cp if kept else 0
    ways = {
        "memory.offload=disk": kept and offload == "host",
        "memory.keep_attention=none": kept and run.layout.keep_attention,
        "memory.offload_optimizer=false": states,
        "a memory.disk_path with more room": offload == "disk" and "on the way to disk" not in holders,
        f"data.context={longest} or less": longest >= 2,
    }
    parts = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in holders.items())
    use = either(way for way, helps in ways.items() if helps) or "more machines"
    raise ConfigError(
        f"{f'memory.offload={offload}' if kept else 'memory.offload_optimizer=true'} needs {size(need)} of {what} "
        f"({parts}), and {size(have)} are {there}; use {use}"
    )


def _check_ram(run: Run, have: int) -> None:
    holders = ram_needs(run)
    if (need := sum(holders.values())) <= have:
        return
    largest = sorted(holders, key=lambda name: -holders[name])[:3]
    parts = ", ".join(f"{name} {size(holders[name])}" for name in largest)
    leaner = "" if run.layout.checkpoint else ", memory.checkpoint=full"
    raise ConfigError(
        f"data.context={run.config.data.context} needs {size(need)} of memory for {local_ranks(run.num_ranks)} ranks "
        f"without a GPU ({parts}), and {size(have)} are free; use a shorter data.context{leaner} or a smaller model"
    )


# ---- single settings


def check_settings(config: Config, num_ranks: int, shape: ModelShape) -> None:
    """What no layout can have, what would have no effect, and kernels that there are not."""
    parallel, memory = config.parallel, config.memory
    values = {"parallel.cp": parallel.cp_of(num_ranks), "parallel.heads_per_stage": parallel.heads_per_stage}
    fixed = fixed_settings(values | {"memory.keep_attention": memory.keep_attention}, shape.num_layers, num_ranks)
    check_fixed(fixed, shape.heads, shape.num_layers, num_ranks)
    check_effects({f"memory.{name}": value for name, value in vars(memory).items()})
    if memory.disk_path is not None and "disk" not in (memory.offload, memory.attention_offload):
        raise ConfigError(
            f"memory.disk_path={memory.disk_path} has no effect with memory.offload={memory.offload}; "
            "use memory.offload=disk, or leave it null"
        )
    # Only its name: whether the device can run a kernel is for the ranks to say, who own the devices.
    block_q, block_kv, kernel = config.attention.block_q, config.attention.block_kv, config.attention.kernel
    if kernel not in ("auto", *KERNELS):
        raise ConfigError(f"attention.kernel={kernel} is not a kernel; use auto, {', '.join(KERNELS)}")
    if (block_q is None) != (block_kv is None):
        raise ConfigError(
            f"attention.block_q={block_q} and attention.block_kv={block_kv} go together; set both or neither"
        )


def check_weights(path: Path | None) -> None:
    """Weights that are there but cannot be read must not end in a model trained from scratch."""
    if path is None or not path.is_dir() or any(path.glob("*.safetensors")):
        return
    pickled = sorted(path.glob("*.bin")) + sorted(path.glob("*.pt")) + sorted(path.glob("*.pth"))
    if pickled:
        raise ConfigError(
            f"model.path={path} has its weights in {pickled[0].name}, not in safetensors; convert them, "
            f"or give {path / 'config.json'} to train from scratch"
        )


def check_run_dir(run_dir: Path) -> None:
    """A new run needs a directory that holds no other."""
    if (run_dir / "config.yaml").exists():
        raise ConfigError(
            f"train.run_dir={run_dir} already holds a run; give another with --run-dir, "
            f"or continue it with --resume {run_dir}"
        )
    check_writable("train.run_dir", run_dir, folder=True)
