"""Out of memory, explained: where it happened, what was planned and what was measured there, and what would fit."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ithaka.config import Config
from ithaka.layout import SETTINGS, layout_of
from ithaka.memory.store import StoreError
from ithaka.phases import PhasePath as Path
from ithaka.plan.cost import (
    FIRST_LAYER,
    HOST_PROCESS_BYTES,
    HOST_RESERVE_SHARE,
    RESERVE_BYTES,
    RESERVE_SHARE,
    Ledger,
    gpu_phases,
)
from ithaka.plan.hardware import GPUS, Hardware, find_gpu, gpu_named
from ithaka.plan.host import Host, host_capacity
from ithaka.plan.search import Plan, choose, evaluate
from ithaka.plan.shape import Work
from ithaka.plan.show import rate, size
from ithaka.train import launch
from ithaka.train.check import model_shape
from ithaka.train.planned import hardware_with, this_machine

STAND_IN = "H100"  # whose rates a GPU gets that the table does not have: here they only rank plans
NEXT_SHARE = 0.9  # of what a plan needs, for the next one to try
MOST_HALVINGS = 12  # of the context, where nothing else helps
SAME_SPEED = 1.01  # seconds of a step that make no difference
UNLIMITED = sys.maxsize  # host memory of a CPU's ranks: all of it counts as the device's
Holders = dict[str, int]


def is_shortage(error: BaseException | None) -> bool:
    """Of memory on the device or the host, or of room in the store."""
    return error is not None and (isinstance(error, StoreError) or launch.is_out_of_memory(error))


class Witness:
    """Listens to phases, and remembers where a run was and what it held when memory ran out.

    An error ends the phases that it passes through; the first of them is where it happened.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.path: Path = ()
        self.before: Path = ()  # the innermost phase left last, for what happens between phases
        self.used_bytes: int | None = None  # by this process on the device; on a CPU, in all
        self.process_bytes: int | None = None  # of host memory, in all
        self.others_bytes = 0  # of a GPU, by other processes and the driver
        self.scattered_bytes = 0  # held by the allocator in pieces that nobody uses
        self._owners: tuple[nn.Module, torch.optim.Optimizer] | None = None

    def enter(self, path: Path) -> None:
        self.path, self.used_bytes = path, None

    def leave(self, path: Path) -> None:
        if is_shortage(sys.exc_info()[1]):
            self.measure()
            return
        self.path = path[:-1]
        if path[-1] != "copies" and self.before[: len(path)] != path:
            self.before = path

    def measure(self) -> None:
        """Once: what an error lets go of on its way up must not be missing."""
        if self.used_bytes is not None:
            return
        self.process_bytes = psutil.Process().memory_info().rss
        if self.device.type != "cuda":
            self.used_bytes = self.process_bytes
            return
        reserved, (free, total) = torch.cuda.memory_reserved(self.device), torch.cuda.mem_get_info(self.device)
        self.used_bytes = torch.cuda.memory_allocated(self.device)
        self.scattered_bytes = reserved - self.used_bytes
        self.others_bytes = max(0, total - free - reserved)

    def know(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._owners = (model, optimizer)

    def states(self) -> Holders:
        """What the device holds from step to step, where it is known whose that is."""
        if self._owners is None:
            return {}
        model, optimizer = self._owners
        states = (value for state in optimizer.state.values() for value in state.values())
        return {
            "parameters": self._sum(model.parameters()),
            "gradients": self._sum(p.grad for p in model.parameters() if p.grad is not None),
            "optimizer": self._sum(value for value in states if isinstance(value, Tensor)),
        }

    def _sum(self, tensors: Iterable[Tensor]) -> int:
        local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
        return sum(t.nbytes for t in local if t.device.type == self.device.type)

    @property
    def where(self) -> str:
        if self.path:
            return f"in {' / '.join(self.path)}"
        return f"after {' / '.join(self.before)}" if self.before else "before the first phase"


@dataclass(frozen=True)
class Shortage:
    """What there was too little of, and the plan at work; `as_run`: what was really run of a plan (a rehearsal runs few
    of its layers)."""

    error: BaseException
    witness: Witness
    plan: Plan
    as_run: Callable[[Plan], Plan] = lambda plan: plan

    @property
    def tier(self) -> str:
        return _tier(self.error, self.witness)

    @property
    def asked_bytes(self) -> int:
        return _asked_bytes(self.error)

    @property
    def needed_bytes(self) -> int:
        return (self.witness.used_bytes or 0) + self.asked_bytes

    @property
    def path(self) -> Path:
        return self.witness.path or self.witness.before

    @property
    def planned_here(self) -> Holders:
        """What the plan has on the device in the phase in which this happened."""
        return planned_at(self.as_run(self.plan), self.path)

    def suits(self, plan: Plan) -> bool:
        """Whether a plan fits that is off by as much as this one was in phases like this one."""
        if self.tier != "GPU" or not plan.fits:
            return plan.fits
        return self.most_bytes(plan) < min(sum(self.planned_here.values()), self.needed_bytes)

    def most_bytes(self, plan: Plan) -> int:
        """What a plan has on the device in phases like this one, at most."""
        return max(sum(holders.values()) for holders in _phases_alike(self.as_run(plan), self.path).values())


def _tier(error: BaseException, witness: Witness) -> str:
    if isinstance(error, StoreError):
        return error.tier
    on_host = isinstance(error, MemoryError | OSError) or "DefaultCPUAllocator" in str(error)
    return "host" if on_host and witness.device.type == "cuda" else "GPU"


def _asked_bytes(error: BaseException) -> int:
    """What the allocator says that it was asked for; 0 where it does not say."""
    found = re.search(r"tried to allocate ([\d.]+) ?(bytes|[KMG]iB)", str(error), re.IGNORECASE)
    units = ("bytes", "kib", "mib", "gib")
    return int(float(found[1]) * 1024 ** units.index(found[2].lower())) if found else 0


def explain(shortage: Shortage, command: str, context_option: str = "--set data.context=") -> str:
    """In words. `command`: what takes the settings that would fit, as `--set`, and a shorter context."""
    shortage.witness.measure()
    lines = [headline(shortage.error, shortage.witness)]
    lines += _device_lines(shortage) if shortage.tier == "GPU" else [_outside_line(shortage)]
    return "\n".join([*lines, *_ways_out(shortage, command, context_option)])


def headline(error: BaseException, witness: Witness) -> str:
    """What ran out and where: needs no plan, and nothing that can fail."""
    rank = f"rank {os.environ.get('RANK', '0')}, {witness.where}"
    if isinstance(error, StoreError):
        return f"{rank}: {error}"
    on_gpu = _tier(error, witness) == "GPU" and witness.device.type == "cuda"
    used = witness.used_bytes if on_gpu else witness.process_bytes
    asked = f"{size(_asked_bytes(error))} more were asked for" if _asked_bytes(error) else _first_line(error)
    beside = f", beside {size(used)} in use" if used is not None else ""
    return f"{rank}: no {'GPU' if on_gpu else 'host'} memory left: {asked}{beside}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _device_lines(shortage: Shortage) -> Iterator[str]:
    witness, ledger = shortage.witness, shortage.as_run(shortage.plan).ledger
    here, states = shortage.planned_here, witness.states()
    here = {name: here.pop(name) for name in states} | {"all else": sum(here.values())}
    measured = states | {"all else": (witness.used_bytes or 0) - sum(states.values())}
    yield f"  {'':<12}{'planned here':>14}{'measured':>14}"
    for name, num_bytes in here.items():
        yield f"  {name:<12}{size(num_bytes):>14}{size(measured[name]):>14}"
    yield f"  {'asked for':<12}{'':>14}{size(shortage.asked_bytes):>14}"
    yield f"  {'together':<12}{size(sum(here.values())):>14}{size(shortage.needed_bytes):>14}"
    yield (
        f"  planned peak: {size(_needs(ledger, 'GPU'))} in {ledger.phase}, with {size(ledger.gpu['reserve'])} in "
        f"reserve, of {size(ledger.gpu_bytes)}"
    )
    yield from _hints(shortage)


def _hints(shortage: Shortage) -> Iterator[str]:
    witness = shortage.witness
    if witness.device.type != "cuda":
        yield "  measured is the whole process, with Python and its libraries"
    if witness.others_bytes > RESERVE_BYTES:
        yield f"  {size(witness.others_bytes)} of this GPU are held by other processes: end them, or use another GPU"
    if shortage.asked_bytes and witness.scattered_bytes >= shortage.asked_bytes:
        yield (
            f"  {size(witness.scattered_bytes)} are free in pieces that are too small: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True joins them"
        )


def planned_at(plan: Plan, path: Path) -> Holders:
    """What the plan has on the device in a phase, by holder, reserve left out; where it names no layer, at most."""
    alike = _phases_alike(plan, path)
    layer = next((int(name.split()[1]) for name in path if re.fullmatch(r"layer \d+", name)), None)
    if layer is None:
        return max(alike.values(), key=lambda holders: sum(holders.values()))
    if layer == 0 and FIRST_LAYER in alike:
        return alike[FIRST_LAYER]
    # The figures are the last layer's; below it fewer layers have kept something.
    found = next(iter(alike.values()))
    return {**found, "kept activations": found["kept activations"] * (layer + 1) // plan.shape.num_layers}


def _phases_alike(plan: Plan, path: Path) -> dict[str, Holders]:
    """The planner's phases in which the same is done as in `path`; all of them, where it knows none."""
    phases = dict(gpu_phases(plan.shape, plan.layout, plan.hardware, plan.work))
    layers = [name for name in phases if name.startswith("backward") and name.endswith("layer")]
    alike = {"loss forward": ["loss"], "loss backward": ["loss"], "optimizer": ["update"], "embedding": ["forward"]}
    alike |= {"forward": ["forward"], "backward": layers}
    return {name: phases[name] for part in path for name in alike.get(part, ())} or phases


def _outside_line(shortage: Shortage) -> str:
    """The reserve is left out: nobody holds it."""
    ledger = shortage.plan.ledger
    of_tier = {"host": (ledger.host, _host_bytes(shortage.plan.hardware)), "disk": (ledger.disk, ledger.disk_bytes)}
    holders, there = of_tier[shortage.tier]
    parts = ", ".join(f"{name} {size(held)}" for name, held in holders.items() if held and name != "reserve")
    return f"  planned per node: {size(_needs(ledger, shortage.tier))} of {size(there)} ({parts})"


# ---- what would fit


def _ways_out(shortage: Shortage, command: str, context_option: str) -> Iterator[str]:
    now = shortage.plan
    following = _following(shortage, now.work)
    if following is not None:
        yield f"Planned to fit, {_saving(shortage, following)}:"
        yield f"  {command}{_changes(now, following)}"
        return
    yield f"No settings are planned to fit at {now.work.context} tokens here: use more ranks or less context"
    shorter = [now.work.context >> halvings for halvings in range(1, MOST_HALVINGS)]
    works = (dataclasses.replace(now.work, context=context) for context in shorter if context >= now.layout.cp)
    fitting = next((plan for work in works if (plan := _following(shortage, work))), None)
    if fitting is not None:
        yield f"  {command} {context_option}{fitting.work.context}{_changes(now, fitting)}"


def _changes(now: Plan, following: Plan) -> str:
    before, after = now.settings, following.settings
    return "".join(f" --set {name}={_yaml(after[name])}" for name in after if after[name] != before[name])


def _following(shortage: Shortage, work: Work) -> Plan | None:
    """The fastest plan that needs less of what ran out, with as few changes as it takes; None: there is none."""
    now, room = shortage.plan, shortage.needed_bytes
    while True:
        found = choose(now.shape, _tighter(shortage, room), work, _fixed(now))
        if not found.fits:
            return None
        if shortage.suits(found):
            return _with_fewest_changes(shortage, found)
        room = min(_needs(found.ledger, "GPU") - 1, int(NEXT_SHARE * room))


def _with_fewest_changes(shortage: Shortage, plan: Plan) -> Plan:
    """The settings of now where a plan suits with them and is no slower."""
    for field in SETTINGS.values():
        layout = plan.layout.but(**{field: getattr(shortage.plan.layout, field)})
        trial = evaluate(plan.shape, layout, plan.hardware, plan.work)
        if shortage.suits(trial) and trial.step_s <= SAME_SPEED * plan.step_s:
            plan = trial
    return plan


def _tighter(shortage: Shortage, room: int) -> Hardware:
    """The machine with less of what ran out; `room`: what a plan may need of the device, beside the reserve."""
    hardware, ledger = shortage.plan.hardware, shortage.plan.ledger
    if shortage.tier == "GPU":
        memory_bytes = min(int((room + RESERVE_BYTES) / (1 - RESERVE_SHARE)), hardware.gpu.memory_bytes)
        return dataclasses.replace(hardware, gpu=dataclasses.replace(hardware.gpu, memory_bytes=memory_bytes))
    if shortage.tier == "disk":
        return dataclasses.replace(hardware, disk_bytes=int(NEXT_SHARE * ledger.disk_peak))
    allowed = int(NEXT_SHARE * _needs(ledger, "host")) + hardware.gpus_per_node * HOST_PROCESS_BYTES
    return dataclasses.replace(hardware, host_bytes=int(allowed / (1 - HOST_RESERVE_SHARE)))


def _fixed(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    fixed: dict[str, Any] = {"cp": layout.cp, "dtype": layout.dtype}
    if plan.hardware.gpu.name == "CPU":  # its memory is the host's: there is nowhere else to keep anything
        fixed |= {"input_tier": "device", "attention_tier": "device", "offload_optimizer": False}
    return fixed


def _saving(shortage: Shortage, following: Plan) -> str:
    now, tier = shortage.plan, shortage.tier
    if tier == "GPU":
        saved = f"{size(shortage.most_bytes(now) - shortage.most_bytes(following))} less there"
    else:
        where = {"host": "host memory", "disk": "disk"}[tier]
        saved = f"{size(_needs(now.ledger, tier) - _needs(following.ledger, tier))} less of a node's {where}"
    if now.hardware.gpu.name == "CPU":  # its rates are assumed
        return f"with {saved}"
    rates = [rate(plan.tokens_per_s_per_gpu) for plan in (following, now)]
    return f"with {saved}, at {' instead of '.join(rates)} tokens/s per GPU"


def _needs(ledger: Ledger, tier: str) -> int:
    """At the peak, reserve left out: it differs with what there is."""
    holders = {"GPU": ledger.gpu, "host": ledger.host, "disk": ledger.disk}[tier]
    return sum(holders.values()) - holders.get("reserve", 0)


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower()


# ---- a training run as a plan


def plan_of_run(config: Config, device: torch.device, host: Host) -> Plan:
    """The run's own settings, and what they cost on this machine. `host`: what was free before the run took any."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    shape = model_shape(config)
    layout = layout_of(config, shape.num_layers, num_ranks, on_gpu=device.type == "cuda")
    hardware = _hardware(config, device, num_ranks, host)
    return evaluate(shape, layout, hardware, Work(config.data.context, config.train.batch))


def _hardware(config: Config, device: torch.device, num_ranks: int, host: Host) -> Hardware:
    if device.type != "cuda":
        machine = this_machine(config, num_ranks, None, host)
        cpu = dataclasses.replace(GPUS["CPU"], memory_bytes=host_capacity() // machine.local_ranks)
        return dataclasses.replace(hardware_with(cpu, [machine], num_ranks), host_bytes=UNLIMITED)
    properties = torch.cuda.get_device_properties(device)
    gpu = gpu_named(properties.name) or find_gpu(STAND_IN)
    machine = this_machine(config, num_ranks, (properties.name, properties.total_memory), host)
    return hardware_with(dataclasses.replace(gpu, memory_bytes=properties.total_memory), [machine], num_ranks)


def _host_bytes(hardware: Hardware) -> int:
    of_ranks = hardware.gpus_per_node * hardware.gpu.memory_bytes
    return of_ranks if hardware.host_bytes == UNLIMITED else hardware.host_bytes
