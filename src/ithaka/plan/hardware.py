"""GPU and host facts, each with its source, and the machines made of them.

Rates are what a program gets, not what a data sheet promises: the H200's were measured, the others' are their
published peak times the share of its own peak that the H200 reaches. `--gpu-file` replaces them by your own.

Published figures were compared with public pages that quote the documents named here; what was found nowhere is
called not verified. Capacities are the least that PyTorch names in out-of-memory messages of public issues.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import psutil

from ithaka.config import ConfigError

GIB = 2**30
GPUS_PER_NODE = 8

# Assumptions about the machine around the GPUs, printed with every plan.
HOST_BYTES_PER_GPU = 256 * 10**9  # 2 TB for 8: what 8-GPU nodes are sold with
DISK_BYTES_S = 4e9  # per node, either direction: one data-centre NVMe disk, read and write at once
HOST_UPDATE_BYTES_S = 200e9  # per node: what a fused AdamW on the CPUs streams through host memory
NETWORK_BYTES_S = 50e9  # per GPU and direction: one 400 Gb/s adapter each
LINK_SHARE = 0.8  # of NVLink's or the network's published rate, in large collectives

H200_MATMUL = 790e12
H200_ATTENTION_FORWARD = 594e12
H200_ATTENTION_BACKWARD = 534e12
H200_PCIE = 55e9
PCIE_4, PCIE_5 = 31.5e9, 63e9  # payload of 16 lanes, each way
PCIE_SHARE = H200_PCIE / PCIE_5

MEASURED = "measured here on an H200 (LOG.md)"
SAME_CHIP = "the H200's, measured here: the same chip with other memory"
LAPTOP = "assumed: a laptop's order of magnitude; measure your own"
CAPACITY = "capacity as PyTorch reports it"
CUDA_L2 = "as CUDA reports it"

# Dense bf16 TFLOP/s with fp32 sums, by a part of the name that CUDA gives a device; the first match counts.
PEAK_TFLOPS = {
    "B300": 2250.0,  # NVIDIA Blackwell Ultra datasheet
    "B200": 2250.0,  # NVIDIA HGX B200 datasheet: 4.5 PFLOP/s with sparsity
    "GH200": 989.4,
    "H200 NVL": 835.0,  # NVIDIA H200 datasheet: 1,671 TFLOP/s with sparsity; SXM 1,979
    "H200": 989.4,
    "H100 PCIe": 756.0,  # NVIDIA H100 datasheet, as those below: 1,513 TFLOP/s with sparsity
    "H100 NVL": 835.0,
    "H100": 989.4,  # SXM5
    "H800": 989.4,  # not verified: the H100's
    "A100": 312.0,  # NVIDIA A100 datasheet
    "A800": 312.0,  # not verified: the A100's
    "L40S": 362.05,  # NVIDIA L40S datasheet
    "RTX 4090": 165.2,  # NVIDIA Ada GPU architecture whitepaper
    "RTX 5090": 209.5,  # NVIDIA RTX Blackwell GPU architecture whitepaper
    "RTX 3090": 71.0,  # NVIDIA GA102 GPU architecture whitepaper
}


def peak_flops(name: str) -> float | None:
    """The published peak of what CUDA, or the table below, calls `name`; None where it is not known."""
    text = _plain(name)
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if _plain(part) in text), None)


def _plain(name: str) -> str:
    return name.upper().replace(" ", "").replace("_", "")


@dataclass(frozen=True)
class Gpu:
    """One accelerator. `sources` says where each figure is from."""

    name: str
    memory_bytes: int
    matmul_flops: float  # bf16, large matrices
    attention_forward_flops: float  # causal, long sequences, head dim 128
    attention_backward_flops: float
    memory_bytes_s: float
    pcie_bytes_s: float  # each way
    link_bytes_s: float  # each way, to the other GPUs of the node
    l2_bytes: int
    sources: dict[str, str] = field(default_factory=dict, hash=False, compare=False)


@dataclass(frozen=True)
class Hardware:
    """`num_nodes` nodes of `gpus_per_node` GPUs. Host and disk figures are per node."""

    gpu: Gpu
    gpus_per_node: int = 1
    num_nodes: int = 1
    host_bytes: int = HOST_BYTES_PER_GPU
    disk_bytes: int = 0
    disk_bytes_s: float = DISK_BYTES_S
    network_bytes_s: float = NETWORK_BYTES_S
    host_update_bytes_s: float = HOST_UPDATE_BYTES_S
    assumed_host: bool = False  # nobody gave or measured host_bytes

    @property
    def num_gpus(self) -> int:
        return self.gpus_per_node * self.num_nodes

    @property
    def name(self) -> str:
        nodes = f"{self.num_nodes}x" if self.num_nodes > 1 else ""
        return f"{nodes}{self.gpus_per_node}x{self.gpu.name}"


def _gpu(
    name: str, gibibytes: float, memory_tb_s: float, pcie: float, nvlink_gb_s: float | None, l2_mib: int, document: str,
    **known: str,
) -> Gpu:  # fmt: skip
    """A GPU as `document` has it. NVLink each way; None: over PCIe."""
    peak, best = peak_flops(name), peak_flops("H200")
    assert peak is not None and best is not None
    link = nvlink_gb_s * 1e9 * LINK_SHARE if nvlink_gb_s else pcie * LINK_SHARE
    scaled = f"{document}: peak x the share of its peak that the H200 was measured to reach"
    sources = {
        "memory_bytes": CAPACITY,
        **_rates(scaled),
        "memory_bytes_s": document,
        "pcie_bytes_s": f"{document}: PCIe generation x the share of its rate that the H200 was measured to reach",
        "link_bytes_s": f"{document}: {'NVLink' if nvlink_gb_s else 'PCIe, no NVLink'}, x {LINK_SHARE} (assumed)",
        "l2_bytes": CUDA_L2,
    }
    return Gpu(
        name,
        memory_bytes=int(gibibytes * GIB),
        matmul_flops=H200_MATMUL * peak / best,
        attention_forward_flops=H200_ATTENTION_FORWARD * peak / best,
        attention_backward_flops=H200_ATTENTION_BACKWARD * peak / best,
        memory_bytes_s=memory_tb_s * 1e12,
        pcie_bytes_s=pcie * PCIE_SHARE,
        link_bytes_s=link,
        l2_bytes=l2_mib * 2**20,
        sources=sources | known,
    )


def _rates(source: str) -> dict[str, str]:
    return dict.fromkeys(("matmul_flops", "attention_forward_flops", "attention_backward_flops"), source)


H100, H200 = "NVIDIA H100 datasheet (SXM5)", "NVIDIA H200 datasheet (SXM)"
A100, B200, L40S = "NVIDIA A100 datasheet (SXM4)", "NVIDIA HGX B200 datasheet", "NVIDIA L40S datasheet"
ADA, BLACKWELL = "NVIDIA Ada GPU architecture whitepaper", "NVIDIA RTX Blackwell GPU architecture whitepaper"

# name, GiB, memory TB/s, PCIe, NVLink GB/s, L2 MiB, document.
_PUBLISHED: list[Gpu] = [
    _gpu("H100-80GB", 79.1, 3.35, PCIE_5, 450, 50, H100, **_rates(SAME_CHIP)),
    _gpu("H200-141GB", 139.8, 4.8, PCIE_5, 450, 60, H200, **_rates(MEASURED), pcie_bytes_s=MEASURED),
    _gpu("A100-80GB", 79.1, 2.039, PCIE_4, 300, 40, A100),
    _gpu("A100-40GB", 39.3, 1.555, PCIE_4, 300, 40, A100),
    _gpu("B200-180GB", 178.3, 7.7, PCIE_5, 900, 126, B200),
    _gpu("L40S-48GB", 44.3, 0.864, PCIE_4, None, 96, L40S, l2_bytes="not verified: the L40's, which has the same chip"),
    _gpu("RTX4090-24GB", 23.5, 1.008, PCIE_4, None, 72, ADA),
    _gpu("RTX5090-32GB", 31.3, 1.792, PCIE_5, None, 96, BLACKWELL),
]

_CPU = Gpu(
    name="CPU", memory_bytes=16 * GIB, matmul_flops=1e11, attention_forward_flops=5e10, attention_backward_flops=5e10,
    memory_bytes_s=2e10, pcie_bytes_s=1e10, link_bytes_s=5e9, l2_bytes=32 * 10**6,
    sources=_rates(LAPTOP) | {"memory_bytes_s": LAPTOP}
    | dict.fromkeys(("memory_bytes", "pcie_bytes_s", "link_bytes_s", "l2_bytes"), "assumed"),
)  # fmt: skip

GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in [*_PUBLISHED, _CPU]}


def find_gpu(name: str) -> Gpu:
    """By its name, or by the beginning of it where only one fits: H200, RTX4090."""
    wanted = _plain(name)
    fitting = [gpu for key, gpu in GPUS.items() if key.upper() == wanted] or [
        gpu for key, gpu in GPUS.items() if key.upper().startswith(wanted + "-")
    ]
    if len(fitting) > 1:
        names = " or ".join(gpu.name for gpu in fitting)
        raise ConfigError(f"--gpus {name} is more than one known GPU; use {names}")
    if not fitting:
        raise ConfigError(
            f"--gpus {name} is not a known GPU; use one of {', '.join(GPUS)}, or --gpu-file with your own"
        )
    return fitting[0]


def gpu_named(name: str) -> Gpu | None:
    """The table's entry for what CUDA calls a device ("NVIDIA H100 80GB HBM3"); None where it has none."""
    text = _plain(name).replace("GEFORCE", "")
    fitting = {key: gpu for key, gpu in GPUS.items() if key != "CPU" and key.upper().split("-")[0] in text}
    if len(fitting) > 1:
        fitting = {key: gpu for key, gpu in fitting.items() if key.upper().split("-")[-1] in text}
    if len(fitting) != 1 or "LAPTOP" in text:
        return None
    gpu = next(iter(fitting.values()))
    return _as_card(gpu, name) if "PCIE" in text or "NVL" in text else gpu


def _as_card(gpu: Gpu, name: str) -> Gpu:
    """The same chip on a PCIe card: its own peak, and no NVLink to more than one other; memory as the table has it."""
    share = (peak_flops(name) or 0.0) / (peak_flops(gpu.name) or 1.0)
    rates = {rate: getattr(gpu, rate) * share for rate in _rates("")}
    link = gpu.pcie_bytes_s / PCIE_SHARE * LINK_SHARE
    return dataclasses.replace(gpu, name=f"{gpu.name} on PCIe", link_bytes_s=link, **rates)


def least_gpu(gpus: Sequence[Gpu]) -> Gpu:
    """What all of them can do: the least of every figure."""
    names = list(dict.fromkeys(gpu.name for gpu in gpus))
    figures = [entry.name for entry in dataclasses.fields(Gpu) if entry.name not in ("name", "sources")]
    least = {figure: min(getattr(gpu, figure) for gpu in gpus) for figure in figures}
    return dataclasses.replace(gpus[0], name=" and ".join(names), **least)


def parse_gpus(text: str, gpu: Gpu | None = None) -> Hardware:
    """'8xH100-80GB', '2x8xH100-80GB' (nodes x GPUs), 'H200'; with `gpu`, which has the name, '8' or '2x8'.

    More than 8 without a number of nodes are nodes of 8 where that divides.
    """
    match = re.fullmatch(r"(?:(\d+)x)??(?:(\d+)x)?([A-Za-z].*)", text.strip())
    if gpu is not None and (plain := re.fullmatch(r"(?:(\d+)x)?(\d+)", text.strip())):
        nodes, count, name = plain[1], plain[2], ""
    elif gpu is not None:
        raise ConfigError(f"--gpus {text} names a GPU beside --gpu-file, which has its own; write for example --gpus 8")
    elif match:
        nodes, count, name = match[1], match[2] or "1", match[3]
    else:
        raise ConfigError(f"--gpus {text} is not understood; write for example 8xH100-80GB or 2x8xH100-80GB")
    num_nodes, per_node = int(nodes or 1), int(count)
    if num_nodes < 1 or per_node < 1:
        raise ConfigError(f"--gpus {text} counts no GPU; write for example 8xH100-80GB")
    if nodes is None and per_node > GPUS_PER_NODE:
        if per_node % GPUS_PER_NODE:
            raise ConfigError(
                f"--gpus {text} is more than a node of {GPUS_PER_NODE} and no whole number of such nodes; "
                f"say how many nodes, for example 1x{text.strip()}"
            )
        num_nodes, per_node = per_node // GPUS_PER_NODE, GPUS_PER_NODE
    host_bytes = HOST_BYTES_PER_GPU * per_node
    return Hardware(gpu or find_gpu(name), per_node, num_nodes, host_bytes=host_bytes, assumed_host=True)


def parse_bytes(text: str, name: str) -> int:
    """'2TB' (10^12), '1.5TiB' (2^40), '80GB'; `name` is the option, for errors."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)", text.strip(), re.IGNORECASE)
    if not match:
        raise ConfigError(f"{name} {text} is not a number of bytes with its unit; write for example 2TB or 512GiB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index((match[2] or " ").upper()))


def read_gpu(file: Path) -> Gpu:
    """A GPU from a JSON file with the fields of `Gpu`; `based_on` names a known one for those left out."""

    def refuse(what: str, way_out: str) -> NoReturn:
        raise ConfigError(f"--gpu-file {file}{what}; {way_out}")

    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        refuse(f" cannot be read ({getattr(error, 'strerror', None) or 'no valid JSON'})", "give a JSON file")
    if not isinstance(values, dict):
        refuse(" holds no JSON object", "write fields such as memory_bytes")
    names = [entry.name for entry in dataclasses.fields(Gpu)]
    figures = [name for name in names if name not in ("name", "sources")]
    for key, value in values.items():
        if key not in (*names, "based_on"):
            refuse(f": {key} is not a field", f"use {', '.join(names)} or based_on")
        if key in ("name", "based_on") and not isinstance(value, str):
            refuse(f": {key}={value} is no text", "put it in quotes")
        if key in figures and not _is_positive(value):
            refuse(f": {key}={value} is no positive number", "correct it")
    told = values.pop("sources", {})
    if not isinstance(told, dict) or not all(isinstance(source, str) for source in told.values()):
        refuse(f": sources={told} is no object of texts", "write a text per field, or leave it out")
    start: dict[str, Any] = vars(find_gpu(values.pop("based_on"))) if "based_on" in values else {"sources": {}}
    if missing := [name for name in figures if name not in start | values]:
        refuse(f" lacks {', '.join(missing)}", "add them, or based_on with a known GPU")
    sources = {**start["sources"], **dict.fromkeys(values, str(file)), **told}
    whole = {name: int(values[name]) for name in ("memory_bytes", "l2_bytes") if name in values}
    return Gpu(**{**start, "name": file.stem, **values, **whole, "sources": sources})


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def find_hardware(
    gpus: str, gpu_file: Path | None = None, host_memory: str | None = None, disk: str | None = None
) -> Hardware:
    """The machine that the options of a command describe; host memory and disk are per node."""
    hardware = parse_gpus(gpus, read_gpu(gpu_file) if gpu_file else None)
    if host_memory is not None:
        host_bytes = parse_bytes(host_memory, "--host-memory")
        hardware = dataclasses.replace(hardware, host_bytes=host_bytes, assumed_host=False)
    if disk is not None:
        hardware = dataclasses.replace(hardware, disk_bytes=parse_bytes(disk, "--disk"))
    return hardware


# ---- this machine: memory, as the control groups around this process allow it, cores and disk

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Host:
    """What this machine has to spare now."""

    memory_bytes: int
    disk_bytes: int
    disk_path: Path


def this_host(disk_path: Path | None = None) -> Host:
    """`disk_path`: where files would go; None: the system's temporary directory."""
    folder = disk_path or Path(tempfile.gettempdir())
    free = [psutil.virtual_memory().available, *cgroup_rooms()]
    return Host(min(free), shutil.disk_usage(folder).free, folder)


def host_capacity() -> int:
    """This machine's memory, or what the control groups around this process allow of it: the same at any moment,
    and the most that can be free."""
    return min([psutil.virtual_memory().total, *cgroup_limits()])


def num_cores() -> int:
    """Those this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cgroup_rooms(root: Path = CGROUP, of: Path = OWN_CGROUP) -> list[int]:
    """What each control group around this process still allows; file cache makes way: it counts as free."""
    rooms = []
    for group, limit, usage, cache in _cgroups(root, of):
        allowed, used = _read_number(group / limit), _read_number(group / usage)
        if allowed is not None and used is not None:
            stat = dict(line.split() for line in _read_lines(group / "memory.stat"))
            rooms.append(max(0, allowed - used + int(stat.get(cache, 0))))
    return rooms


def cgroup_limits(root: Path = CGROUP, of: Path = OWN_CGROUP) -> list[int]:
    """What each control group around this process allows in all."""
    limits = (_read_number(group / limit) for group, limit, *_ in _cgroups(root, of))
    return [limit for limit in limits if limit is not None]


def _cgroups(root: Path, of: Path) -> Iterator[tuple[Path, str, str, str]]:
    """The memory groups around this process, with the names of limit and usage and of the cache's entry."""
    for line in _read_lines(of):
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        # A container sees its own groups at the top, whatever the path says.
        top = root / controllers
        inside = top / path.lstrip("/")
        v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        names = v1 if controllers else ("memory.max", "memory.current", "inactive_file")
        for group in (top, *(folder for folder in (inside, *inside.parents) if top in folder.parents)):
            yield (group, *names)


def _read_number(path: Path) -> int | None:
    """None where there is no such file, or no limit in it."""
    lines = _read_lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
