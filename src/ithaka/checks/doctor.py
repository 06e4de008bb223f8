"""What this machine and its ranks have, and what is missing for which feature."""

import ctypes
import os
import platform
import re
import resource
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

import ithaka
from ithaka.config.units import format_bytes
from ithaka.facts.machine import available_memory, free_disk, num_cores
from ithaka.plan.hardware import DISK_BYTES_S, gpu_named

if TYPE_CHECKING:
    import torch

# Optional packages, of which one is enough: what needs them, and how to install them.
FEATURES = {
    ("peft",): ("LoRA (adapter)", "pip install 'ithaka[adapter]'"),
    ("accelerate",): ("Hugging Face's trainers (long_context)", "pip install 'ithaka[hf]'"),
    ("trl",): ("SFTTrainer and TRL's other trainers (long_context)", "pip install 'ithaka[hf]'"),
    ("torchao",): ("optim.name=adamw8bit", "pip install 'ithaka[adamw8bit]'"),
    ("diffusers",): ("video transformers", "pip install 'ithaka[video]'"),
    ("pillow",): ("data.images=read", "pip install pillow"),
    ("torchvision",): (
        "AutoProcessor of vision-language models, and data.images=read with videos for Qwen2-VL "
        "and Qwen2.5-VL",
        "pip install torchvision, from the same index as torch",
    ),
    ("torchcodec", "av", "decord"): ("data.images=read with video files", "pip install av"),
}
OPTIONAL = tuple(package for packages in FEATURES for package in packages)
PACKAGES = ("torch", "transformers", "flash-attn-4", "triton", *OPTIONAL)
TOOLKIT = {"cuda": "CUDA", "cudnn": "cuDNN", "nccl": "NCCL"}
WORKS = "works"
NEEDS_GPU = "needs a GPU"
HEAD_DIM = 128
GPU_TRAINING = "training on a GPU"  # missing features
DISK_SPEED = "memory.offload=disk at the planned speed"
DISK_TEST_BYTES = 2**28
CHUNK_BYTES = 2**24
PIN_BYTES = 2**28
LOW_CLOCK = 0.9  # of the median of all ranks

# Checks of ranks, and their fixes. The first three fail; the others make runs slower than planned.
RANK_FIXES = {
    "versions": "install the same versions on all nodes",
    "host memory": (
        "`ulimit -l unlimited`; Docker: --ulimit memlock=-1; Slurm: "
        "PropagateResourceLimitsExcept=MEMLOCK"
    ),
    "NCCL": "remove the old one from LD_LIBRARY_PATH and LD_PRELOAD",
    "peer access": "check `nvidia-smi topo -p2p r`, IOMMU and ACS settings, and the container",
    "NUMA and affinity": "start with torchrun --numa-binding node",
    "power limit": "raise it with `nvidia-smi -pl`",
    "allocator": "plans assume expandable_segments:True; add it, or unset the variable",
    "clock": (
        "`nvidia-smi -q -d PERFORMANCE` shows why; reset it with `nvidia-smi -rgc`, or leave "
        "the GPU out"
    ),
}


def package_versions() -> dict[str, str | None]:
    """Versions of ithaka and the packages it uses; None: not installed. Imports none of them."""
    found: dict[str, str | None] = {"ithaka": ithaka.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def examine(disk: Path | None) -> dict[str, Any]:
    """Return all findings. `disk`: a folder on the disk to measure; by default the one for
    temporary files."""
    python = platform.python_version()
    machine = f"{platform.system()} {platform.release()}, {platform.machine()}"
    found = {
        "versions": package_versions(),
        "system": f"{machine}, Python {python}",
        "python": python,
        **_examine_gpus(),
    }
    found["host"] = {"cores": num_cores(), "memory_bytes": psutil.virtual_memory().total}
    found["host"]["available_bytes"] = available_memory()
    found["disk"] = measure_disk(disk or Path(tempfile.gettempdir()))
    return found | {"missing": find_missing(found), "optional": find_optional(found["versions"])}


def _examine_gpus() -> dict[str, Any]:
    """GPUs, their software, and the test of each attention kernel in the training dtype."""
    import torch

    from ithaka.attention.choose import try_kernels
    from ithaka.attention.kernels import KERNELS
    from ithaka.checks.bench import device_and_dtype

    device, dtype = device_and_dtype()
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    problems = try_kernels(device, dtype, HEAD_DIM)
    kernels = {}
    for name, why in problems.items():
        runs_here = KERNELS[name].device in (device.type, "any")
        kernels[name] = (why or WORKS) if runs_here else NEEDS_GPU
    has_nccl = torch.distributed.is_nccl_available()
    return {
        "gpus": [
            {
                "name": gpu.name,
                "memory_bytes": gpu.total_memory,
                "compute_capability": f"{gpu.major}.{gpu.minor}",
            }
            for gpu in gpus
        ],
        "driver": _driver_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.version.cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "kernels": kernels,
    }


def _driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    if not file.exists():
        return None
    found = re.search(r"Kernel Module.*?(\d+\.\d[\d.]*)", file.read_text())
    return found and found[1]


def measure_disk(folder: Path) -> dict[str, Any]:
    """Write and read a temporary file, past the system's cache. With an error, `problem` says
    which."""
    found: dict[str, Any] = {"folder": str(folder)}
    chunk = memoryview(os.urandom(CHUNK_BYTES))
    num_chunks = DISK_TEST_BYTES // CHUNK_BYTES
    try:
        found["free_bytes"] = free_disk(folder)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            start = time.perf_counter()
            for _ in range(num_chunks):
                file.write(chunk)
            os.fsync(file.fileno())
            written = time.perf_counter()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            begin = time.perf_counter()
            while file.read(CHUNK_BYTES):
                pass
            read_s = time.perf_counter() - begin
    except OSError as error:
        size = format_bytes(DISK_TEST_BYTES)
        return found | {"problem": f"cannot write {size} there: {error.strerror}"}
    return found | {
        "write_bytes_s": DISK_TEST_BYTES / (written - start),
        "read_bytes_s": DISK_TEST_BYTES / read_s,
    }


def find_optional(versions: dict[str, str | None]) -> list[dict[str, str]]:
    """Optional packages that are not installed: the feature that needs them, and the command."""
    absent = []
    for packages, (feature, fix) in FEATURES.items():
        if not any(versions[name] for name in packages):
            absent.append({"package": " or ".join(packages), "feature": feature, "fix": fix})
    return absent


def find_missing(found: dict[str, Any]) -> list[dict[str, str]]:
    """What is missing: the feature, why it does not work, and how to get it."""
    missing: list[tuple[str, str, str]] = []
    names = [gpu["name"] for gpu in found["gpus"]]
    if not names:
        missing.append((GPU_TRAINING, *_why_no_gpu(found)))
    for name, result in found["kernels"].items():
        if result not in (WORKS, NEEDS_GPU):
            why, _, fix = result.partition("; ")
            missing.append((f"attention kernel {name}", why, fix or "use another kernel"))
    if len(names) > 1 and found["nccl"] is None:
        missing.append(("several GPUs", "torch has no NCCL", "install a torch built with NCCL"))
    if unknown := sorted({name for name in names if gpu_named(name) is None}):
        fix = "ithaka bench device, then ithaka plan --gpu-file gpu.json"
        missing.append(("automatic plans", f"no rates are known for {', '.join(unknown)}", fix))
    disk = found["disk"]
    slowest = min(disk.get("write_bytes_s", 0), disk.get("read_bytes_s", 0))
    if "problem" in disk:
        why = f"{disk['folder']}: {disk['problem']}"
        missing.append(("memory.offload=disk", why, "set memory.disk_path"))
    elif slowest < DISK_BYTES_S / 2:
        why = f"{disk['folder']} moves {_rate(slowest)}, plans assume {_rate(DISK_BYTES_S)}"
        missing.append((DISK_SPEED, why, "set memory.disk_path to a faster disk"))
    return [dict(zip(("feature", "why", "fix"), row, strict=True)) for row in missing]


def _why_no_gpu(found: dict[str, Any]) -> tuple[str, str]:
    if found["driver"] is None:
        return "no NVIDIA driver found", "install the driver, or train small models on the CPU"
    if found["cuda"] is None:
        return "this torch was built without CUDA", "install a torch with CUDA from pytorch.org"
    fix = f"check CUDA_VISIBLE_DEVICES, and that the driver supports CUDA {found['cuda']}"
    return "torch finds no GPU", fix


def format_findings(found: dict[str, Any]) -> str:
    """One screen of text."""
    versions = found["versions"]
    host = found["host"]
    disk = found["disk"]
    others = {name: number for name, number in versions.items() if number and name != "ithaka"}
    packages = ", ".join(f"{name} {number}" for name, number in others.items())
    cuda = [f"{name} {found[key]}" for key, name in TOOLKIT.items() if found[key]]
    rows = [("system", found["system"]), ("packages", packages)]
    for gpu in found["gpus"]:
        memory = format_bytes(gpu["memory_bytes"])
        capability = f"compute capability {gpu['compute_capability']}"
        rows.append(("GPU", f"{gpu['name']}, {memory}, {capability}"))
    if not found["gpus"]:
        rows.append(("GPU", "none"))
    rows += [("driver", found["driver"] or "none"), ("CUDA", ", ".join(cuda) or "none")]
    rows += [(f"kernel {name}", result) for name, result in found["kernels"].items()]
    total = format_bytes(host["memory_bytes"])
    available = format_bytes(host["available_bytes"])
    rows.append(("host memory", f"{total}, {available} available, {host['cores']} cores"))
    rows.append(("disk", _describe_disk(disk)))
    lines = [f"ithaka {versions['ithaka']}", *(f"  {name:<16}  {value}" for name, value in rows)]
    if found["missing"]:
        lines.append("missing")
        lines += ["  {feature}: {why}; {fix}".format(**row) for row in found["missing"]]
    if found["optional"]:
        lines.append("not installed (optional)")
        lines += ["  {package}, for {feature}: {fix}".format(**row) for row in found["optional"]]
    return "\n".join(lines)


def _describe_disk(disk: dict[str, Any]) -> str:
    free = f", {format_bytes(disk['free_bytes'])} free" if "free_bytes" in disk else ""
    if "problem" in disk:
        return f"{disk['folder']}{free}, {disk['problem']}"
    writes = _rate(disk["write_bytes_s"])
    reads = _rate(disk["read_bytes_s"])
    return f"{disk['folder']}{free}, writes {writes}, reads {reads}"


def _rate(bytes_s: float) -> str:
    return f"{bytes_s / 1e9:.2g} GB/s"


class Finding(NamedTuple):
    """One check of `ithaka selftest`: passed, measured (nothing to compare with), slower (than
    planned) or failed. Texts stay on this machine; `figures` may be shared (checks/share.py)."""

    check: str
    status: str
    text: str
    fix: str = ""
    figures: Mapping[str, Any] = {}


def judge(
    check: str, ok: bool, text: str, fix: str, otherwise: str = "failed", **figures: object
) -> Finding:
    if ok:
        return Finding(check, "passed", text, figures=figures)
    return Finding(check, otherwise, text, fix, figures)


def examine_rank(device: "torch.device", ranks_per_gpu: int) -> dict[str, Any]:
    """What this rank has, in `figures`, and its checks: {name: (passed, text)}."""
    from ithaka.layer.slabs import Slab, StoreError

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    on_gpu = device.type == "cuda"
    start = time.perf_counter()
    figures: dict[str, Any] = {
        "available bytes": available_memory(),
        "lockable bytes": limit if limit >= 0 else None,
    }
    lockable = format_bytes(limit) if limit >= 0 else "all"
    memory = f"{format_bytes(figures['available bytes'])} free, {lockable} may be locked"
    try:
        Slab(PIN_BYTES, pin=on_gpu)
        rate = PIN_BYTES / (time.perf_counter() - start)
        figures["pinned bytes/s"] = rate if on_gpu else None
        if on_gpu:
            memory += f", pinned at {_rate(rate)}"
        checks = {"host memory": (True, memory)}
    except StoreError as error:
        checks = {"host memory": (False, f"{error}; {memory}")}
    if on_gpu:
        gpu_figures, gpu_checks = _examine_gpu(device, ranks_per_gpu)
        figures |= gpu_figures
        checks |= gpu_checks
    return {"versions": package_versions(), "figures": figures, "checks": checks}


def query_gpu(gpu: str, *fields: str) -> list[float]:
    """Return what nvidia-smi reports about a GPU, an index or UUID; 0 where it reports nothing."""
    query = f"--query-gpu={','.join(fields)}"
    command = ["nvidia-smi", f"--id={gpu}", query, "--format=csv,noheader,nounits"]
    output = ""
    with suppress(OSError, subprocess.SubprocessError):
        output = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    numbers = [
        float(value) if re.fullmatch(r"\d+\.?\d*", value.strip()) else 0.0
        for value in output.split(",")
    ]
    return (numbers + [0.0] * len(fields))[: len(fields)]


def _examine_gpu(
    device: "torch.device", ranks_per_gpu: int
) -> tuple[dict[str, Any], dict[str, tuple[bool, str]]]:
    """Figures, with the clock under load in MHz, and checks."""
    import torch

    from ithaka.comm.mesh import ALLOCATOR_VARIABLES

    gpu: Any = torch.cuda.get_device_properties(device)
    a_nn = torch.ones(8192, 8192, device=device, dtype=torch.bfloat16)
    for _ in range(500):  # in flight while nvidia-smi runs: about a second
        a_nn @ a_nn
    clock, power, default = query_gpu(
        f"GPU-{gpu.uuid}", "clocks.sm", "power.limit", "power.default_limit"
    )
    torch.cuda.synchronize(device)
    built = torch.cuda.nccl.version()
    nccl = _loaded_nccl() or built
    # the first that accepts several ranks on one GPU
    least = max(built, (2, 30)) if ranks_per_gpu > 1 else built
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    peers = [i for i in others if torch.cuda.can_device_access_peer(device.index, i)]
    cores = os.sched_getaffinity(0)
    near = _cores_near(gpu) or cores
    settings = filter(None, map(os.environ.get, ALLOCATOR_VARIABLES))
    setting = next(settings, "expandable_segments:True")
    figures: dict[str, Any] = {
        "clock MHz": clock,
        "power limit W": power,
        "default power limit W": default,
        "peers": len(peers),
        "other GPUs": len(others),
        "cores": len(cores),
        "near cores": len(cores & near),
        "NCCL": list(nccl),
    }
    needed = f"{'.'.join(map(str, nccl))}, at least {'.'.join(map(str, least))} needed"
    reached = f"to {len(peers)} of {len(others)} other GPUs of the node"
    bound = f"{len(cores & near)} of {len(cores)} cores are near the GPU"
    return figures, {
        "NCCL": (nccl >= least, needed),
        "peer access": (peers == others, reached),
        "NUMA and affinity": (cores <= near, bound),
        "power limit": (power >= default, f"{power:.0f} of {default:.0f} W"),
        "allocator": ("expandable_segments:True" in setting, setting),
    }


def _loaded_nccl() -> tuple[int, ...]:
    """The version of the NCCL library that is loaded; empty if torch includes it."""
    number = ctypes.c_int()
    with suppress(OSError):
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    if not number.value:
        return ()
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def _cores_near(gpu: object) -> set[int]:
    """The cores of the GPU's NUMA node; empty if unknown."""
    ids = (getattr(gpu, f"pci_{i}_id", 0) for i in ("domain", "bus", "device"))
    address = "{:04x}:{:02x}:{:02x}.0".format(*ids)
    file = Path("/sys/bus/pci/devices") / address / "local_cpulist"
    spans = re.findall(r"(\d+)-?(\d*)", file.read_text() if file.is_file() else "")
    return {core for first, last in spans for core in range(int(first), int(last or first) + 1)}


def judge_ranks(facts: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """One finding per check, from `examine_rank` of each rank. Names the ranks that do not pass."""
    usual = dict(Counter(tuple(fact["versions"].items()) for fact in facts).most_common(1)[0][0])
    same = ", ".join(f"{name} {usual[name]}" for name in ("ithaka", "torch", "transformers"))
    median = statistics.median(fact["figures"].get("clock MHz", 0.0) for fact in facts)
    for fact in facts:
        odd = [
            f"{name} {own} ({usual[name]} elsewhere)"
            for name, own in fact["versions"].items() - usual.items()
        ]
        fact["checks"]["versions"] = (not odd, ", ".join(odd) or same)
        if clock := fact["figures"].get("clock MHz"):
            text = f"{clock:.0f} MHz under load"
            is_low = clock < LOW_CLOCK * median
            if is_low:
                text += f", the median is {median:.0f}: steps may take x{median / clock:.2f}"
            fact["checks"]["clock"] = (not is_low, text)
    for i, (check, fix) in enumerate(RANK_FIXES.items()):
        results = {
            rank: fact["checks"][check]
            for rank, fact in enumerate(facts)
            if check in fact["checks"]
        }
        bad = [rank for rank, (passed, _) in results.items() if not passed]
        for rank in [*bad, *results][:1]:
            names = f"rank {', '.join(map(str, bad[:8]))}: " if bad else ""
            otherwise = "failed" if i < 3 else "slower"
            yield judge(check, not bad, names + results[rank][1], fix, otherwise, ranks=bad)


def judge_nodes(facts: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """One finding per missing feature, from `examine` on the first rank of each node. Names those
    ranks unless all nodes lack it."""
    nodes = {rank: fact["missing"] for rank, fact in enumerate(facts) if "missing" in fact}
    lacking: dict[str, dict[int, dict[str, str]]] = {}  # by feature and rank
    for rank, missing in nodes.items():
        for row in missing:
            lacking.setdefault(row["feature"], {})[rank] = row
    for feature, rows in lacking.items():
        is_everywhere = len(rows) == len(nodes)
        if feature == DISK_SPEED or (feature == GPU_TRAINING and is_everywhere):
            continue  # rates follow; CPUs are for testing
        first = rows[min(rows)]
        where = "" if is_everywhere else f"the node of rank {', '.join(map(str, rows))}: "
        is_wrong = any("wrong" in row["why"] for row in rows.values())
        status = "failed" if is_wrong else "slower"
        yield Finding(feature, status, where + first["why"], first["fix"], {"ranks": list(rows)})
