"""What is watched while a run goes: progress of long steps, profiles of some, facts for the report, and where memory
ran out."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ithaka.config import shown
from ithaka.dist.mesh import Mesh
from ithaka.layer.store import StoreError
from ithaka.layout import fixed_settings
from ithaka.phases import Listener, PhasePath
from ithaka.plan.bytes import FIRST_LAYER, RESERVE_BYTES, Holders, gpu_phases
from ithaka.plan.hardware import gpu_named
from ithaka.plan.heads import slots_of
from ithaka.plan.search import Plan
from ithaka.plan.show import size
from ithaka.profile.memory import planned_holders
from ithaka.profile.progress import Progress
from ithaka.profile.step import StepProfile, machine
from ithaka.profile.times import StepTimes
from ithaka.train import launch
from ithaka.train.console import Console
from ithaka.train.preflight import Run, held

WARM_UP_STEPS = 1  # slower than the rest: kernels are chosen, memory is taken from the system


def write_facts(run_dir: Path, plan: Plan, mesh: Mesh) -> None:
    """machine.json and plan.json: what the report shows besides the configuration."""
    (run_dir / "machine.json").write_text(json.dumps(machine(mesh.device, mesh.world_size)), encoding="utf-8")
    facts: dict[str, Any] = {
        "layout": dataclasses.asdict(plan.layout),
        "stages": len(slots_of(plan.shape, plan.layout).stages),
        "peak_bytes": planned_holders(plan),
    }
    if gpu_named(plan.hardware.gpu.name):
        facts["seconds"] = dataclasses.asdict(plan.seconds)
    (run_dir / "plan.json").write_text(json.dumps(facts), encoding="utf-8")


def what_to_record(number: int, every: int, in_two: bool) -> Literal["times", "profile", None]:
    """Step `number` is profiled when its turn has come; `in_two`: its times are recorded in the step before."""
    if not every:
        return None
    if number % every == 0:
        return "profile"
    return "times" if in_two and (number + 1) % every == 0 else None


class Watch:
    """Stands around every step. On other ranks than 0 it does nothing."""

    def __init__(
        self, run: Run, model: PreTrainedModel, optimizer: torch.optim.Optimizer, mesh: Mesh, console: Console
    ) -> None:
        self.run, self.model, self.optimizer, self.mesh, self.console = run, model, optimizer, mesh, console
        self.device_peak_bytes = 0  # before the allocator's own count was reset by a profile
        self._plain_s: list[float] = []
        self._times: StepTimes | None = None  # of the step before a profile
        self._progress: Progress | None = None
        if console.active:
            self.plan = Plan(run.shape, run.layout, run.hardware, dataclasses.replace(run.work, accumulate=1))
            write_facts(run.run_dir, self.plan, mesh)
            self._progress = Progress(self.plan, run.config.train.accumulate, mesh.device, console.progress)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step `number`; profiles it when its turn has come."""
        if self._progress is None:
            yield
            return
        recorder = self._recorder(number)
        start = time.perf_counter()
        with self._progress.step(number), recorder or nullcontext():
            yield
        self._times = recorder if isinstance(recorder, StepTimes) else None
        if recorder is None:
            self._plain_s.append(time.perf_counter() - start)
        elif isinstance(recorder, StepProfile):
            plain, folder = self._plain_s[WARM_UP_STEPS:], self.run.run_dir / "profile" / f"step-{number}"
            words = recorder.write(folder, number, statistics.median(plain) if plain else None)
            self.console.say(f"Profile of step {number}, in {folder}:\n{words}")

    def _recorder(self, number: int) -> StepProfile | StepTimes | None:
        device, warm = self.mesh.device, len(self._plain_s) >= WARM_UP_STEPS
        kind = what_to_record(number, self.run.config.profile.every, device.type == "cuda" and warm)
        if kind != "profile":
            return StepTimes(device) if kind == "times" else None
        if device.type == "cuda":
            self.device_peak_bytes = max(self.device_peak_bytes, torch.cuda.max_memory_allocated(device))
        return StepProfile(self.model, self.optimizer, device, self.plan, self._times)


# ---- out of memory


def is_shortage(error: BaseException | None) -> bool:
    """Of memory on the device or the host, or of room in the store."""
    return error is not None and (isinstance(error, StoreError) or launch.is_out_of_memory(error))


class Witness(Listener):
    """Listens to phases, and remembers where a run was and what it held when memory ran out.

    An error ends the phases that it passes through; the first of them is where it happened.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.path: PhasePath = ()
        self.before: PhasePath = ()  # the innermost phase left last, for what happens between phases
        self.used_bytes: int | None = None  # by this process on the device; on a CPU, in all
        self.process_bytes: int | None = None  # of host memory, in all
        self.others_bytes = 0  # of a GPU, by other processes and the driver
        self.scattered_bytes = 0  # held by the allocator in pieces that nobody uses
        self._owners: tuple[nn.Module, torch.optim.Optimizer] | None = None

    def enter(self, path: PhasePath) -> None:
        self.path, self.used_bytes = path, None

    def leave(self, path: PhasePath) -> None:
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
        parameters = list(self._owners[0].parameters())
        states = (value for state in self._owners[1].state.values() for value in state.values())
        groups = {"parameters": parameters, "gradients": (p.grad for p in parameters), "optimizer": states}
        return {name: sum(map(self._bytes_of, tensors)) for name, tensors in groups.items()}

    def _bytes_of(self, value: Any) -> int:
        local = value.to_local() if isinstance(value, DTensor) else value
        return local.nbytes if isinstance(local, Tensor) and local.device.type == self.device.type else 0

    @property
    def where(self) -> str:
        if self.path:
            return f"in {' / '.join(self.path)}"
        return f"after {' / '.join(self.before)}" if self.before else "before the first phase"


def headline(error: BaseException, witness: Witness) -> str:
    """What ran out and where: needs no plan, and nothing that can fail."""
    rank = f"rank {os.environ.get('RANK', '0')}, {witness.where}"
    if isinstance(error, StoreError):
        return f"{rank}: {error}"
    on_gpu = _tier(error, witness) == "GPU" and witness.device.type == "cuda"
    used = witness.used_bytes if on_gpu else witness.process_bytes
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    asked = f"{size(_asked_bytes(error))} more were asked for" if _asked_bytes(error) else first_line
    beside = f", beside {size(used)} in use" if used is not None else ""
    return f"{rank}: no {'GPU' if on_gpu else 'host'} memory left: {asked}{beside}"


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


@dataclass(frozen=True)
class Shortage:
    """What there was too little of, and the run, or the plan of a rehearsal."""

    error: BaseException
    witness: Witness
    plan: Run | Plan

    @property
    def tier(self) -> str:
        return _tier(self.error, self.witness)

    def explain(self, model: str, again: str) -> str:
        """In words. `model`: for `ithaka plan`. `again`: the command that takes other settings as `--set`."""
        self.witness.measure()
        lines = [headline(self.error, self.witness)]
        lines += self._device_lines() if self.tier == "GPU" else [self._outside_line()]
        return "\n".join([*lines, *self._ways_out(model, again)])

    def _device_lines(self) -> Iterator[str]:
        witness, asked = self.witness, _asked_bytes(self.error)
        ledger, here, states = self.plan.ledger, planned_at(self.plan, witness.path or witness.before), witness.states()
        here = {name: here.pop(name) for name in states} | {"all else": sum(here.values())}
        measured = states | {"all else": (witness.used_bytes or 0) - sum(states.values())}
        yield f"  {'':<12}{'planned here':>14}{'measured':>14}"
        for name, num_bytes in here.items():
            yield f"  {name:<12}{size(num_bytes):>14}{size(measured[name]):>14}"
        yield f"  {'asked for':<12}{'':>14}{size(asked):>14}"
        yield f"  {'together':<12}{size(sum(here.values())):>14}{size((witness.used_bytes or 0) + asked):>14}"
        yield (
            f"  planned peak: {size(ledger.gpu_peak - ledger.gpu['reserve'])} in {ledger.phase}, with "
            f"{size(ledger.gpu['reserve'])} in reserve, of {size(ledger.gpu_bytes)}"
        )
        if witness.device.type != "cuda":
            yield "  measured is the whole process, with Python and its libraries"
        if witness.others_bytes > RESERVE_BYTES:
            yield f"  {size(witness.others_bytes)} of this GPU are held by other processes: end them, or use another"
        if asked and witness.scattered_bytes >= asked:
            yield (
                f"  {size(witness.scattered_bytes)} are free in pieces that are too small: "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True joins them"
            )

    def _outside_line(self) -> str:
        ledger = self.plan.ledger
        tiers = {"host": (ledger.host, ledger.host_bytes), "disk": (ledger.disk, ledger.disk_bytes)}
        holders, there = held(tiers[self.tier][0]), tiers[self.tier][1]
        parts = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in holders.items())
        return f"  planned per node: {size(sum(holders.values()))} of {size(there)} ({parts})"

    def _ways_out(self, model: str, again: str) -> Iterator[str]:
        """One setting that needs less of what ran out, and the planner's line, which says what fits with it."""
        way, hardware, work = self._leaner(), self.plan.hardware, self.plan.work
        words = f" --set {way}" if way else ""
        if way:
            yield f"Less is needed{' there' if self.tier == 'GPU' else ''} with:\n  {again}{words}"
        else:
            yield "No other setting needs less: use more ranks or less context"
        if hardware.gpu.name == "CPU":
            return
        known = gpu_named(hardware.gpu.name) is not None
        gpus = hardware.name if known else f"{hardware.name.removesuffix(f'x{hardware.gpu.name}')} --gpu-file GPU.json"
        batch = f" --batch {work.batch}" if work.batch > 1 else ""
        room = f"--host-memory {hardware.host_bytes // 10**9}GB"
        room += f" --disk {hardware.disk_bytes // 10**9}GB" if hardware.disk_bytes else ""
        yield "What fits, and how fast it will be:"
        yield f"  ithaka plan {model} --gpus {gpus} --context {work.context // (1 if way else 2)}{batch} {room}{words}"
        if not known:
            yield "  (GPU.json: ithaka bench device --out GPU.json)"

    def _leaner(self) -> str:
        """The first setting of a few that needs less of what ran out; on the device, in the phase where it did."""
        plan, layout, path = self.plan, self.plan.layout, self.witness.path or self.witness.before
        if self.tier != "GPU":
            kept = "memory.keep_attention=none" if layout.keep_attention else ""
            return kept or ("memory.offload=disk" if self.tier == "host" else "")
        tile = max(1, (layout.tile_tokens or plan.work.local_tokens(layout.cp)) // 2)
        tries: dict[str, Any] = {"memory.checkpoint": "full", "memory.offload": "host"}
        tries |= {"parallel.heads_per_stage": layout.cp, "memory.overlap": False, "memory.tile_tokens": tile}
        if plan.hardware.gpu.name == "CPU":  # its memory is the host's
            del tries["memory.offload"]
        now = sum(planned_at(plan, path).values())
        for name, value in tries.items():
            fixed = fixed_settings({name: value}, plan.shape.num_layers, plan.hardware.num_gpus)
            leaner = dataclasses.replace(plan, layout=layout.but(**fixed))
            if sum(planned_at(leaner, path).values()) < now:
                return f"{name}={shown(value)}"
        return ""


def planned_at(plan: Run | Plan, path: PhasePath) -> Holders:
    """What a plan has on the device in a phase, by holder, reserve left out; where it names no layer, at most."""
    phases = dict(gpu_phases(plan.shape, plan.layout, plan.hardware, plan.work))
    layers = [name for name in phases if name.startswith("backward") and name.endswith("layer")]
    names = {"loss forward": ["loss"], "loss backward": ["loss"], "optimizer": ["update"], "embedding": ["forward"]}
    names |= {"forward": ["forward"], "backward": layers}
    alike = {name: phases[name] for part in path for name in names.get(part, ())} or phases
    layer = next((int(name.split()[1]) for name in path if re.fullmatch(r"layer \d+", name)), None)
    if layer is None:
        return max(alike.values(), key=lambda holders: sum(holders.values()))
    if layer == 0 and FIRST_LAYER in alike:
        return alike[FIRST_LAYER]
    # The figures are the last layer's; below it fewer layers have kept something.
    found = next(iter(alike.values()))
    return {**found, "kept activations": found["kept activations"] * (layer + 1) // plan.shape.num_layers}


def explain_shortage(run: Run, error: Exception, witness: Witness) -> str:
    """Never fails: whatever goes wrong in here, the run has ended for want of memory."""
    try:
        witness.measure()  # first: what is told without a plan has it too
        saved = (run.run_dir / "latest").exists()
        again = f"ithaka train --resume {run.run_dir}" if saved else "the same command with another --run-dir and"
        return Shortage(error, witness, run).explain(str(run.config.model.path or run.run_dir / "model"), again)
    except Exception as failure:
        return f"{headline(error, witness)}\nNo other settings were found ({type(failure).__name__}: {failure})"
