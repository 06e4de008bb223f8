"""GPUs and machines: capacities and rates, each with its source.

Rates are achieved, not published: the H200's were measured, the others are their published peak
times the share of its peak that the H200 reaches. `--gpu-file` replaces them.

Published figures were checked against public pages that quote the documents named here, unless "not
verified". Capacities are the smallest in PyTorch's out-of-memory messages of public issues.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ithaka.config import ConfigError
from ithaka.config.units import format_bytes
from ithaka.facts.attention import EFFICIENT_HEAD_DIMS, HEAD_DIMS
from ithaka.facts.model_files import read_json

GIB = 2**30
GPUS_PER_NODE = 8

# Assumptions about the rest of the machine, printed with every plan.
HOST_BYTES_PER_GPU = 256 * 10**9  # 2 TB for 8, typical of 8-GPU nodes
DESKTOP_HOST_BYTES = 64 * 10**9  # per desktop, with any number of GPUs
DISK_BYTES_S = 4e9  # per node, either direction: one data-centre NVMe disk, read and write at once
HOST_UPDATE_BYTES_S = 200e9  # per node: host memory traffic of a fused AdamW on the CPUs
NETWORK_BYTES_S = 50e9  # per GPU and direction: one 400 Gb/s adapter each
LINK_SHARE = 0.8  # fraction of NVLink's published rate that large collectives reach

H200_MATMUL = 790e12
# Attention FLOP/s by kernel, forward and backward (LOG.md; flash: at 256K). Other GPUs: the same
# ratios. The reference computes in fp64 (at head dim 512, 64K), slower still with few fp64 units.
# efficient and eager are estimates for head dim 512, not measured.
H200_ATTENTION = {
    "fa4": (664e12, 628e12),
    "cudnn": (594e12, 534e12),
    "flash": (310e12, 325e12),
    "efficient": (100e12, 60e12),
    "eager": (60e12, 50e12),
    "reference": (5e12, 10e12),
}
SLOW_KERNELS = ("efficient", "eager", "reference")  # for attention that the others do not compute
SLOW_HEAD_DIM = 512  # the head dim for which their rates are stated
KERNEL_NAMES = {
    "fa4": "FlashAttention 4",
    "cudnn": "cuDNN",
    "flash": "FlashAttention 2",
    "efficient": "PyTorch's memory-efficient kernel",
    "eager": "matmuls in TF32",
    "reference": "the fp64 reference",
}
FA4_PACKAGE = "pip install -e '.[gpu]'"
B200_FA4_FORWARD = 1613e12  # published: arXiv 2603.05451, "up to"; backward: the H200's ratio
H200_PCIE = 55e9
PCIE_4 = 31.5e9  # payload of 16 lanes, each way
PCIE_5 = 63e9
PCIE_SHARE = H200_PCIE / PCIE_5
SCALED = "published peak x the share of its peak that an H200 reaches"

# Dense bf16 TFLOP/s with fp32 accumulation, by a part of CUDA's device name; the first match wins.
PEAK_TFLOPS = {
    "B300": 2250.0,  # NVIDIA Blackwell Ultra datasheet
    "B200": 2250.0,  # NVIDIA HGX B200 datasheet: 4.5 PFLOP/s with sparsity
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
    """The published peak of a GPU, by CUDA's name or the name in `GPUS`; None if unknown."""
    for model, tflops in PEAK_TFLOPS.items():
        if _is_model(name, model):
            return tflops * 1e12
    return None


def _plain(name: str) -> str:
    return name.upper().replace(" ", "").replace("_", "")


def _is_model(name: str, model: str) -> bool:
    """Whether `name` contains `model` as words: a GH200 is no H200. A MIG slice never matches."""
    words = "[ _-]?".join(re.findall(r"[A-Z]+|[0-9]+", model.upper()))
    match = re.search(rf"(?<![A-Z0-9]){words}(?![A-Z0-9])", name.upper())
    return match is not None and re.search(r"\bMIG\b", name.upper()) is None


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    matmul_flops: float  # bf16, large matrices
    attention_forward_flops: float  # causal, long sequences, head dim 128
    attention_backward_flops: float
    memory_bytes_s: float
    pcie_bytes_s: float  # each way
    link_bytes_s: float  # each way, to the other GPUs of the node
    network_bytes_s: float = NETWORK_BYTES_S  # each way, to GPUs of other nodes
    disk_bytes_s: float = DISK_BYTES_S  # each way, of its node
    source: str = field(default="not stated", compare=False)  # where the rates come from
    kernel: str = ""  # attention kernel of the rates; "": unknown
    kernels: tuple[str, ...] = ()  # kernels that run on it, fastest first
    desktop: bool = False  # a desktop GPU

    @property
    def has_float8(self) -> bool:
        """False for known GPUs without float8. Each rank also checks its compute capability."""
        return not any(_is_model(self.name, model) for model in ("A100", "A800", "RTX 3090"))


TEXTS = ("name", "source", "kernel", "based_on")  # fields of a GPU file; the others are numbers
_GPU_FIELDS = [entry.name for entry in dataclasses.fields(Gpu)]
FIGURES = tuple(name for name in _GPU_FIELDS if name not in (*TEXTS, "kernels", "desktop"))
RATES = FIGURES[1:]  # all but memory_bytes


@dataclass(frozen=True)
class Hardware:
    """`num_nodes` nodes of `gpus_per_node` GPUs. Host and disk figures are per node."""

    gpu: Gpu
    gpus_per_node: int = 1
    num_nodes: int = 1
    host_bytes: int = HOST_BYTES_PER_GPU
    disk_bytes: int = 0
    assumed_host: bool = False  # host_bytes is an assumption

    @property
    def num_gpus(self) -> int:
        return self.gpus_per_node * self.num_nodes

    def with_kernel(self, kernel: str) -> Hardware:
        """A copy with another kernel's attention rates; unchanged if either kernel's rates are
        unknown."""
        gpu = self.gpu
        if not {kernel, gpu.kernel} <= H200_ATTENTION.keys():
            return self
        forward, backward = H200_ATTENTION[kernel]
        own_forward, own_backward = H200_ATTENTION[gpu.kernel]
        changed = dataclasses.replace(
            gpu,
            kernel=kernel,
            attention_forward_flops=gpu.attention_forward_flops * (forward / own_forward),
            attention_backward_flops=gpu.attention_backward_flops * (backward / own_backward),
        )
        return dataclasses.replace(self, gpu=changed)

    def for_attention(self, head_dim: int, softcap: float | None = None) -> Hardware:
        """A copy with the rates of the kernel that computes such attention (`kernel_for`)."""
        if _takes(HEAD_DIMS, head_dim) and (softcap is None or self.gpu.kernel == "fa4"):
            return self
        is_efficient = softcap is None and _takes(EFFICIENT_HEAD_DIMS, head_dim)
        return self.with_kernel("efficient" if is_efficient else "eager")

    def with_gpus(self, gpus_per_node: int) -> Hardware:
        """A copy with `gpus_per_node`, and host memory to match if it is assumed."""
        host_bytes = self.host_bytes
        if self.assumed_host:
            host_bytes = default_host_bytes(self.gpu, gpus_per_node)
        return dataclasses.replace(self, gpus_per_node=gpus_per_node, host_bytes=host_bytes)

    def with_gpu_gib(self, gpu_gib: float | None) -> Hardware:
        """A copy with the memory per GPU that memory.gpu_gib leaves to a plan; null: unchanged."""
        if gpu_gib is None:
            return self
        gpu = self.gpu
        memory_bytes = int(gpu_gib * GIB)
        if memory_bytes > gpu.memory_bytes:
            rule = f"exceeds the {format_bytes(gpu.memory_bytes)} of {gpu.name}"
            raise ConfigError(f"memory.gpu_gib={gpu_gib:g} {rule}; use less, or null for all of it")
        return dataclasses.replace(self, gpu=dataclasses.replace(gpu, memory_bytes=memory_bytes))

    @property
    def name(self) -> str:
        nodes = f"{self.num_nodes}x" if self.num_nodes > 1 else ""
        return f"{nodes}{self.gpus_per_node}x{self.gpu.name}"


def _takes(head_dims: tuple[int, int], head_dim: int) -> bool:
    largest, multiple = head_dims
    return head_dim <= largest and head_dim % multiple == 0


def join_kernels(names: Iterable[str]) -> str:
    """The distinct kernels of a model's layers: fa4 and reference"""
    return " and ".join(dict.fromkeys(names))


def _gpu(
    name: str,
    gibibytes: float,
    memory_tb_s: float,
    pcie: float,
    nvlink_gb_s: float | None,
    source: str = SCALED,
    fa4: tuple[float, float] | None = None,
) -> Gpu:
    """`nvlink_gb_s`: each way; None: PCIe. `fa4`: its rates; None: it does not run on this GPU."""
    peak = peak_flops(name) or 0.0
    best = peak_flops("H200") or 1.0
    forward, backward = fa4 or (rate * peak / best for rate in H200_ATTENTION["cudnn"])
    kernels = ("fa4", "cudnn", "flash") if fa4 else ("cudnn", "flash")
    return Gpu(
        name,
        memory_bytes=int(gibibytes * GIB),
        matmul_flops=H200_MATMUL * peak / best,
        attention_forward_flops=forward,
        attention_backward_flops=backward,
        memory_bytes_s=memory_tb_s * 1e12,
        pcie_bytes_s=pcie * PCIE_SHARE,
        link_bytes_s=(nvlink_gb_s * 1e9 if nvlink_gb_s else pcie) * LINK_SHARE,
        source=source,
        kernel=kernels[0],
        kernels=kernels,
        desktop=_is_desktop(name),
    )


def _is_desktop(name: str) -> bool:
    """GeForce RTX 3090, 4090, 5080, ...; not the RTX 6000 of workstations and servers."""
    return re.search(r"RTX\d0[5-9]0", _plain(name)) is not None


H200_FA4 = H200_ATTENTION["fa4"]
B200_FA4 = (B200_FA4_FORWARD, B200_FA4_FORWARD * H200_FA4[1] / H200_FA4[0])
H100_SOURCE = "measured on an H200: the same chip with other memory"
H200_SOURCE = "measured on an H200 (LOG.md)"
B200_SOURCE = f"{SCALED}; attention: published for FlashAttention 4"
# GiB reported by PyTorch, memory TB/s, PCIe, NVLink GB/s; sources as above.
_TABLE = [
    _gpu("H100-80GB", 79.1, 3.35, PCIE_5, 450, H100_SOURCE, H200_FA4),
    _gpu("H200-141GB", 139.8, 4.8, PCIE_5, 450, H200_SOURCE, H200_FA4),
    _gpu("A100-80GB", 79.1, 2.039, PCIE_4, 300),
    _gpu("A100-40GB", 39.3, 1.555, PCIE_4, 300),
    _gpu("B200-180GB", 178.3, 7.7, PCIE_5, 900, B200_SOURCE, B200_FA4),
    _gpu("L40S-48GB", 44.3, 0.864, PCIE_4, None),
    _gpu("RTX4090-24GB", 23.5, 1.008, PCIE_4, None),
    _gpu("RTX5090-32GB", 31.3, 1.792, PCIE_5, None),
    Gpu(
        "CPU",
        memory_bytes=16 * GIB,
        matmul_flops=1e11,
        attention_forward_flops=5e10,
        attention_backward_flops=5e10,
        memory_bytes_s=2e10,
        pcie_bytes_s=1e10,
        link_bytes_s=5e9,
        source="assumed: a laptop's order of magnitude",
    ),
]
GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _TABLE}


def find_gpu(name: str, option: str = "--gpus ") -> Gpu:
    """The GPU with this name, or the only one whose name starts with it. `option`: in errors."""
    prefix = _plain(name)
    matches = [key for key in GPUS if key.upper() == prefix or key.upper().startswith(prefix + "-")]
    if len(matches) > 1:
        raise ConfigError(f"{option}{name} is ambiguous; use {' or '.join(matches)}")
    if not matches:
        models = {key: key.partition("-")[0] for key in GPUS}
        similar = [key for key, model in models.items() if model in prefix.replace("-", "")]
        first = prefix.partition("-")[0]
        similar = similar or [key for key, model in models.items() if first in model]
        based_on = "RTX4090" if re.search(r"\d{4}", prefix) else "A100-40GB"
        file = f'a --gpu-file such as {{"based_on": "{based_on}", "memory_bytes": 24e9}}'
        fix = f"use {' or '.join(GPUS)}, or describe it in {file}"
        if similar:
            fix = f"did you mean {' or '.join(similar)}? If not, describe it in {file}"
        raise ConfigError(f"{option}{name} is not a known GPU; {fix}")
    return GPUS[matches[0]]


def gpu_named(name: str) -> Gpu | None:
    """The entry of `GPUS` for CUDA's device name ("NVIDIA H100 80GB HBM3"); None if there is
    none."""
    text = _plain(name)
    gpus = [gpu for gpu in GPUS.values() if gpu.name != "CPU"]
    matches = [gpu for gpu in gpus if _is_model(name, gpu.name.split("-")[0])]
    if len(matches) > 1:
        matches = [gpu for gpu in matches if gpu.name.upper().split("-")[-1] in text]
    if len(matches) != 1 or "LAPTOP" in text:
        return None
    gpu = matches[0]
    return _to_pcie_card(gpu, name) if "PCIE" in text or "NVL" in text else gpu


def _to_pcie_card(gpu: Gpu, name: str) -> Gpu:
    """The same chip on a PCIe card: the card's own peak, no NVLink, and the memory of the table."""
    share = (peak_flops(name) or 0.0) / (peak_flops(gpu.name) or 1.0)
    rates = {rate: value * share for rate, value in vars(gpu).items() if rate.endswith("flops")}
    link = gpu.pcie_bytes_s / PCIE_SHARE * LINK_SHARE
    return dataclasses.replace(gpu, name=f"{gpu.name} on PCIe", link_bytes_s=link, **rates)


def parse_gpus(text: str, gpu: Gpu | None = None) -> Hardware:
    """Parse '8xH100-80GB', '2x8xH100-80GB' (nodes x GPUs) or 'H200'; with `gpu`, '8' or '2x8'. A
    multiple of 8 above 8 without a number of nodes becomes nodes of 8."""
    named = text.strip() if gpu is None else f"{text.strip()}x{gpu.name}"
    if gpu is not None and not re.fullmatch(r"(\d+x)?\d+", text.strip()):
        rule = "names a GPU, but --gpu-file describes one"
        raise ConfigError(f"--gpus {text} {rule}; use for example --gpus 8")
    name = r"[A-Za-z].*|\d0[5-9]0(?!\d).*"  # H100, 4090
    match = re.fullmatch(rf"(?:([1-9]\d*)x)??(?:([1-9]\d*)x)?({name})", named)
    if not match:
        fix = "use for example 8xH100-80GB or 2x8xH100-80GB"
        raise ConfigError(f"--gpus {text} is not [nodes x] GPUs x name; {fix}")
    num_nodes = int(match[1] or 1)
    per_node = int(match[2] or 1)
    if match[1] is None and per_node > GPUS_PER_NODE:
        if per_node % GPUS_PER_NODE:
            fix = f"give the number of nodes, for example 1x{text}"
            raise ConfigError(f"--gpus {text} is not a multiple of {GPUS_PER_NODE}; {fix}")
        num_nodes = per_node // GPUS_PER_NODE
        per_node = GPUS_PER_NODE
    chosen = gpu or find_gpu(match[3])
    host_bytes = default_host_bytes(chosen, per_node)
    return Hardware(chosen, per_node, num_nodes, host_bytes, assumed_host=True)


def default_host_bytes(gpu: Gpu, gpus_per_node: int) -> int:
    """Assumed host memory of a node."""
    return DESKTOP_HOST_BYTES if gpu.desktop else HOST_BYTES_PER_GPU * gpus_per_node


def parse_bytes(text: str, name: str) -> int:
    """Parse '2TB' (10^12), '1.5TiB' (2^40) or '80GB'. `name`: the option, for errors."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)", text.strip(), re.IGNORECASE)
    if not match:
        fix = "use for example 2TB or 512GiB"
        raise ConfigError(f"{name} {text} is not a number of bytes with a unit; {fix}")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index((match[2] or " ").upper()))


def read_gpu(file: Path) -> Gpu:
    """A GPU from a JSON file with fields of `Gpu`. `based_on`: a known GPU for the others."""
    values = read_json(file, "--gpu-file ", "use a file that `ithaka bench device` writes")
    for key, value in values.items():
        if key in TEXTS:
            kind = "text"
            is_valid = isinstance(value, str)
        elif key in FIGURES:
            kind = "a positive number"
            is_valid = type(value) in (int, float) and 0 < value < math.inf
        else:
            names = ", ".join((*FIGURES, *TEXTS))
            raise ConfigError(f"--gpu-file {file}: {key} is not a field; use {names}")
        if not is_valid:
            raise ConfigError(f"--gpu-file {file}: {key}={value} is not {kind}; correct it")
    base: dict[str, Any] = {"network_bytes_s": NETWORK_BYTES_S, "disk_bytes_s": DISK_BYTES_S}
    base["desktop"] = _is_desktop(values.get("name", ""))
    if "based_on" in values:
        base = dict(vars(find_gpu(values.pop("based_on"), f"--gpu-file {file}: based_on=")))
        if "attention_forward_flops" in values:
            base["kernel"] = ""  # the file's own rates
    if missing := [name for name in FIGURES if name not in base | values]:
        fix = "add them, or based_on with a known GPU"
        raise ConfigError(f"--gpu-file {file} lacks {', '.join(missing)}; {fix}")
    gpu = Gpu(**{**base, "name": file.stem, "source": str(file), **values})
    return dataclasses.replace(gpu, memory_bytes=int(gpu.memory_bytes))


def find_hardware(
    gpus: str, gpu_file: Path | None = None, host_memory: str | None = None, disk: str | None = None
) -> Hardware:
    """The machine that a command's options describe. Host memory and disk are per node."""
    capacities: dict[str, Any] = {}
    if disk is not None:
        capacities["disk_bytes"] = parse_bytes(disk, "--disk")
    if host_memory is not None:
        capacities["host_bytes"] = parse_bytes(host_memory, "--host-memory")
        capacities["assumed_host"] = False
    hardware = parse_gpus(gpus, read_gpu(gpu_file) if gpu_file else None)
    gpu = hardware.gpu if gpu_file else with_profile(hardware.gpu)
    return dataclasses.replace(hardware, gpu=gpu, **capacities)


# ---- this machine: measured rates


def profile_path(name: str) -> Path:
    """Where `ithaka selftest --save-profile` keeps the rates of this machine's GPUs."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    return folder / "ithaka" / f"{name}.json"


def with_profile(gpu: Gpu) -> Gpu:
    """The GPU with the rates measured on this machine, if they were saved."""
    file = profile_path(gpu.name)
    if not file.is_file():
        return gpu
    saved = read_gpu(file)
    rates = {name: getattr(saved, name) for name in (*RATES, "kernel", "source")}
    return dataclasses.replace(gpu, **rates)
