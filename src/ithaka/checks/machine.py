"""What each rank's machine has, and what is wrong with it: `examine_rank` on every rank, `judge_machine` on rank 0."""

import os
import re
import resource
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import torch

from ithaka.checks.doctor import TOOLKIT, WORKS, examine, measure_disk, package_versions
from ithaka.comm.mesh import ALLOCATOR_VARIABLES
from ithaka.comm.rank import is_local_rank_0
from ithaka.config.units import format_bytes
from ithaka.layer.store import Slab, StoreError
from ithaka.plan.hardware import available_memory

MULTI_RANK_NCCL = (2, 30)  # the first that accepts several ranks on one GPU
LOW_CLOCK = 0.9  # of the median of all ranks, under load
LOAD_SIDE, LOAD_CALLS = 8192, 500  # matmuls in flight while the clocks are read: about a second
PIN_BYTES = 2**28
QUERY = ("clocks.sm", "power.limit", "power.default_limit")  # of nvidia-smi: MHz and watts
Facts = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """The result of a check: passed, slower (than planned) or failed, with what to do next."""

    check: str
    status: str
    text: str
    fix: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)  # for --json

    def __str__(self) -> str:
        return f"{self.status:<6}  {self.check:<28}  {self.text}{'; ' * bool(self.fix)}{self.fix}"


def judge(check: str, problems: Mapping[int, str], passed: str, fix: str, status: str = "slower") -> Finding:
    """Report the first problem, by rank, and how many ranks have one; or that the check passed."""
    if not problems:
        return Finding(check, "passed", passed)
    (rank, text), others = next(iter(problems.items())), len(problems) - 1
    more = f" and {others} other rank{'s' * (others > 1)}" if others else ""
    return Finding(check, status, f"rank {rank}{more}: {text}", fix)


def examine_rank(device: torch.device, disk: Path, run_dir: Path) -> Facts:
    """Describe this rank and, on one rank of each node, the node. Does not communicate."""
    found: Facts = {"versions": package_versions()}
    if is_local_rank_0():
        found = examine(disk) | {"checkpoints": measure_disk(run_dir)}
    found |= {"free_bytes": available_memory(), "locked_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]}
    found["allocator"] = next((os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ), "")
    start = time.perf_counter()
    try:
        Slab(PIN_BYTES, pin=device.type == "cuda")
        found |= {"pin_problem": "", "pin_bytes_s": PIN_BYTES / (time.perf_counter() - start)}
    except StoreError as error:
        found |= {"pin_problem": str(error)}
    if device.type == "cuda":
        others = (i for i in range(torch.cuda.device_count()) if i != device.index)
        found["no_peers"] = [i for i in others if not torch.cuda.can_device_access_peer(device.index, i)]
        found |= {"clocks": _read_clocks(device), "far_cores": _count_far_cores(device)}
    return found


def _read_clocks(device: torch.device) -> dict[str, float]:
    """The values of QUERY under load, without those that nvidia-smi does not report."""
    a_nn, values = torch.ones(LOAD_SIDE, LOAD_SIDE, device=device, dtype=torch.bfloat16), {}
    for _ in range(LOAD_CALLS):
        a_nn @ a_nn
    uuid: Any = torch.cuda.get_device_properties(device).uuid
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError):
        output = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
        for name, value in zip(QUERY, output.split(","), strict=False):
            with suppress(ValueError):
                values[name] = float(value)
    torch.cuda.synchronize(device)
    return values


def _count_far_cores(device: torch.device) -> int:
    """Cores that this rank may use and that belong to another NUMA node than its GPU; 0 if unknown."""
    gpu: Any = torch.cuda.get_device_properties(device)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    file, near = Path(f"/sys/bus/pci/devices/{address}/local_cpulist"), set[int]()
    for first, last in re.findall(r"(\d+)-?(\d*)", file.read_text()) if file.is_file() else ():
        near |= set(range(int(first), int(last or first) + 1))
    return len(os.sched_getaffinity(0) - near) if near else 0


def judge_machine(facts: Sequence[Facts], ranks_per_gpu: int = 1) -> Iterator[Finding]:
    """`facts`: of every rank."""
    nodes, by_rank = [fact for fact in facts if "host" in fact], dict(enumerate(facts))
    usual = dict(Counter(tuple(fact["versions"].items()) for fact in facts).most_common(1)[0][0])
    differ = {
        rank: {name: v for name, v in fact["versions"].items() if v != usual[name]} for rank, fact in by_rank.items()
    }
    odd = {
        r: ", ".join(f"{n} {v} ({usual[n]} elsewhere)" for n, v in found.items())
        for r, found in differ.items()
        if found
    }
    shown = ", ".join(f"{name} {usual[name]}" for name in ("ithaka", "torch", "transformers") if usual[name])
    yield judge("versions", odd, shown, "install the same versions on all nodes", "failed")
    gpus, first = Counter(gpu["name"] for node in nodes for gpu in node["gpus"]), nodes[0]
    toolkit = [f"driver {first['driver']}", *(f"{name} {first[key]}" for key, name in TOOLKIT.items() if first[key])]
    parts = [f"{len(facts)} ranks, {len(nodes)} nodes", *(f"{num} x {name}" for name, num in gpus.items())]
    yield Finding("devices", "passed" if len(gpus) < 2 else "slower", ", ".join(parts + toolkit * bool(gpus)),
                  "the slowest GPU sets the pace: use nodes of one kind" * (len(gpus) > 1))  # fmt: skip
    for row in first["missing"]:
        if row["feature"].startswith(("attention kernel", "several", "automatic")):
            yield Finding(row["feature"], "failed" if "wrong" in row["why"] else "slower", row["why"], row["fix"])
    kernels = [name for name, result in first["kernels"].items() if result == WORKS]
    yield Finding("attention kernels", "passed" if kernels else "failed", ", ".join(kernels))
    problems = {rank: fact["pin_problem"] for rank, fact in by_rank.items() if fact["pin_problem"]}
    free_bytes = min(fact["free_bytes"] for fact in facts)
    limit = min((fact["locked_bytes"] for fact in facts if fact["locked_bytes"] >= 0), default=None)
    locked = f"{format_bytes(free_bytes)} free, locked memory {'unlimited' if limit is None else format_bytes(limit)}"
    fix = "`ulimit -l unlimited`; in Docker --ulimit memlock=-1; in Slurm PropagateResourceLimitsExcept=MEMLOCK"
    yield judge("host memory", problems, locked, fix, "failed")
    if gpus:
        yield from _judge_gpus(by_rank, [node["nccl"] or "0" for node in nodes], ranks_per_gpu)


def _judge_gpus(facts: Mapping[int, Facts], nccl: Sequence[str], ranks_per_gpu: int) -> Iterator[Finding]:
    shipped = re.search(r"nvidia-nccl\S*==([\d.]+)", " ".join(requires("torch") or ()))
    least = MULTI_RANK_NCCL if ranks_per_gpu > 1 else _version(shipped[1] if shipped else "0")
    old = {rank: f"NCCL {text} is too old, need {'.'.join(map(str, least))}"
           for rank, text in enumerate(nccl) if _version(text) < least or text != nccl[0]}  # fmt: skip
    fix = "remove the old one from LD_LIBRARY_PATH and LD_PRELOAD, on every node"
    yield judge("NCCL", old, nccl[0], fix, "failed")
    apart = {rank: f"no access to GPUs {fact['no_peers']}" for rank, fact in facts.items() if fact["no_peers"]}
    yield judge("peer access", apart, "all GPUs of a node", "check `nvidia-smi topo -p2p r`, IOMMU, ACS, the container")
    far = {
        rank: f"{fact['far_cores']} of its cores are far from its GPU"
        for rank, fact in facts.items()
        if fact["far_cores"]
    }
    yield judge("NUMA and affinity", far, "cores near their GPUs", "start with torchrun --numa-binding node")
    clocks = {rank: fact["clocks"]["clocks.sm"] for rank, fact in facts.items() if "clocks.sm" in fact["clocks"]}
    median = statistics.median(clocks.values()) if clocks else 0.0
    low = {rank: f"{mhz:.0f} MHz under load, the median is {median:.0f}: a step takes up to x{median / mhz:.2f}"
           for rank, mhz in clocks.items() if mhz < LOW_CLOCK * median}  # fmt: skip
    fix = "`nvidia-smi -q -d PERFORMANCE` shows why; reset it with `nvidia-smi -rgc`, or exclude the GPU"
    yield judge("clocks", low, f"{median:.0f} MHz under load" if clocks else "not reported", fix)
    power = {rank: [fact["clocks"].get(name, 0.0) for name in QUERY[1:]] for rank, fact in facts.items()}
    capped = {rank: f"{own:.0f} W of {usual:.0f} W" for rank, (own, usual) in power.items() if own < usual}
    yield judge("power", capped, f"{power[0][0]:.0f} W", "raise the limit with `nvidia-smi -pl`")
    fixed = {rank: fact["allocator"] for rank, fact in facts.items() if "expandable_segments:True" not in
             (fact["allocator"] or "expandable_segments:True")}  # fmt: skip
    yield judge(
        "allocator", fixed, "expandable segments", "plans assume expandable_segments:True: add it, or unset yours"
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))
