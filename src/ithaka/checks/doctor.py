"""What this machine and its ranks have, and what is missing for which feature. Imports torch only where it is used."""

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
from typing import Any, NamedTuple

import psutil

import ithaka
from ithaka.config.units import format_bytes
from ithaka.plan.hardware import DISK_BYTES_S, available_memory, free_disk, gpu_named, num_cores

# Optional packages, of which one is enough: what needs them, and how to install them.
FEATURES = {
    ("peft",): ("LoRA (adapter)", "pip install 'ithaka[adapter]'"),
    ("accelerate",): ("Hugging Face's trainers (long_context)", "pip install 'ithaka[hf]'"),
    ("trl",): ("SFTTrainer and TRL's other trainers (long_context)", "pip install 'ithaka[hf]'"),
    ("torchao",): ("optim.name=adamw8bit", "pip install 'ithaka[adamw8bit]'"),
    ("diffusers",): ("video transformers", "pip install 'ithaka[video]'"),
    ("pillow",): ("data.images=read", "pip install pillow"),
    ("torchvision",): (
        "AutoProcessor of vision-language models, and data.images=read with videos for Qwen2-VL and Qwen2.5-VL",
        "pip install torchvision, from the same index as torch",
    ),
    ("torchcodec", "av", "decord"): ("data.images=read with video files", "pip install av"),
}
OPTIONAL = tuple(package for packages in FEATURES for package in packages)
PACKAGES = ("torch", "transformers", "flash-attn-4", "triton", *OPTIONAL)
TOOLKIT = {"cuda": "CUDA", "cudnn": "cuDNN", "nccl": "NCCL"}
WORKS, NEEDS_GPU, HEAD_DIM = "works", "needs a GPU", 128
GPU_TRAINING, DISK_SPEED = "training on a GPU", "memory.offload=disk at the planned speed"  # missing features
DISK_TEST_BYTES, CHUNK_BYTES = 2**28, 2**24


# Checks of ranks, and what to do if one does not pass. The first three fail; the others make runs slower than planned.
RANK_FIXES = {
    "versions": "install the same versions on all nodes",
    "host memory": "`ulimit -l unlimited`; Docker: --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK",
    "NCCL": "remove the old one from LD_LIBRARY_PATH and LD_PRELOAD",
    "peer access": "check `nvidia-smi topo -p2p r`, IOMMU and ACS settings, and the container",
    "NUMA and affinity": "start with torchrun --numa-binding node",
    "power limit": "raise it with `nvidia-smi -pl`",
    "allocator": "plans assume expandable_segments:True; add it, or unset the variable",
    "clock": "`nvidia-smi -q -d PERFORMANCE` shows why; reset it with `nvidia-smi -rgc`, or leave the GPU out",
}
PIN_BYTES, LOW_CLOCK = 2**28, 0.9  # clock: of the median of all ranks


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
    """Return all findings. `disk`: a folder on the disk to measure; by default the one for temporary files."""
    system = f"{platform.system()} {platform.release()}, {platform.machine()}, Python {platform.python_version()}"
    found = {"versions": package_versions(), "system": system, "python": platform.python_version(), **_examine_gpus()}
    found["host"] = {"cores": num_cores(), "memory_bytes": psutil.virtual_memory().total}
    found["host"]["available_bytes"] = available_memory()
    found["disk"] = measure_disk(disk or Path(tempfile.gettempdir()))
    return found | {"missing": find_missing(found), "optional": find_optional(found["versions"])}


def _examine_gpus() -> dict[str, Any]:
    """GPUs, their software, and the result of testing each attention kernel in the training dtype."""
    import torch

    from ithaka.attention.choose import try_kernels
    from ithaka.attention.kernels import KERNELS
    from ithaka.checks.bench import device_and_dtype

    device, dtype = device_and_dtype()
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    problems = try_kernels(device, dtype, HEAD_DIM)
    runs_here = {name: kernel.device in (device.type, "any") for name, kernel in KERNELS.items()}
    has_nccl = torch.distributed.is_nccl_available()
    return {
        "gpus": [
            {"name": gpu.name, "memory_bytes": gpu.total_memory, "compute_capability": f"{gpu.major}.{gpu.minor}"}
            for gpu in gpus
        ],
        "driver": _driver_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.version.cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "kernels": {name: (why or WORKS) if runs_here[name] else NEEDS_GPU for name, why in problems.items()},
    }


def _driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    found = re.search(r"Kernel Module.*?(\d+\.\d[\d.]*)", file.read_text()) if file.exists() else None
    return found and found[1]


def measure_disk(folder: Path) -> dict[str, Any]:
    """Write and read a temporary file, past the system's cache. With an error, `problem` says which."""
    found: dict[str, Any] = {"folder": str(folder)}
    chunk, num_chunks = memoryview(os.urandom(CHUNK_BYTES)), DISK_TEST_BYTES // CHUNK_BYTES
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
        return found | {"problem": f"cannot write {format_bytes(DISK_TEST_BYTES)} there: {error.strerror}"}
    return found | {"write_bytes_s": DISK_TEST_BYTES / (written - start), "read_bytes_s": DISK_TEST_BYTES / read_s}


def find_optional(versions: dict[str, str | None]) -> list[dict[str, str]]:
    """Optional packages that are not installed: the feature that needs them, and how to install them."""
    absent = {packages: row for packages, row in FEATURES.items() if not any(versions[name] for name in packages)}
    return [{"package": " or ".join(packages), "feature": row[0], "fix": row[1]} for packages, row in absent.items()]


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
        missing.append(("memory.offload=disk", f"{disk['folder']}: {disk['problem']}", "set memory.disk_path"))
    elif slowest < DISK_BYTES_S / 2:
        why = f"{disk['folder']} moves {_rate(slowest)}, plans assume {_rate(DISK_BYTES_S)}"
        missing.append((DISK_SPEED, why, "set memory.disk_path to a faster disk"))
    return [dict(zip(("feature", "why", "fix"), row, strict=True)) for row in missing]


def _why_no_gpu(found: dict[str, Any]) -> tuple[str, str]:
    if found["driver"] is None:
        return "no NVIDIA driver found", "install the driver, or train small models on the CPU"
    if found["cuda"] is None:
        return "this torch was built without CUDA", "install a torch with CUDA from pytorch.org"
    return "torch finds no GPU", f"check CUDA_VISIBLE_DEVICES, and that the driver supports CUDA {found['cuda']}"


def format_findings(found: dict[str, Any]) -> str:
    """One screen of text."""
    versions, host, disk = found["versions"], found["host"], found["disk"]
    shown = ", ".join(f"{name} {number}" for name, number in versions.items() if number and name != "ithaka")
    cuda = [f"{name} {found[key]}" for key, name in TOOLKIT.items() if found[key]]
    rows = [("system", found["system"]), ("packages", shown)]
    rows += [
        ("GPU", f"{gpu['name']}, {format_bytes(gpu['memory_bytes'])}, compute capability {gpu['compute_capability']}")
        for gpu in found["gpus"]
    ] or [("GPU", "none")]
    rows += [("driver", found["driver"] or "none"), ("CUDA", ", ".join(cuda) or "none")]
    rows += [(f"kernel {name}", result) for name, result in found["kernels"].items()]
    available = f"{format_bytes(host['memory_bytes'])}, {format_bytes(host['available_bytes'])} available"
    rows += [("host memory", f"{available}, {host['cores']} cores"), ("disk", _describe_disk(disk))]
    lines = [f"ithaka {versions['ithaka']}", *(f"  {name:<16}  {value}" for name, value in rows)]
    if found["missing"]:
        lines += ["missing", *(f"  {row['feature']}: {row['why']}; {row['fix']}" for row in found["missing"])]
    if found["optional"]:
        lines.append("not installed (optional)")
        lines += ["  {package}, for {feature}: {fix}".format(**row) for row in found["optional"]]
    return "\n".join(lines)


def _describe_disk(disk: dict[str, Any]) -> str:
    free = f", {format_bytes(disk['free_bytes'])} free" if "free_bytes" in disk else ""
    if "problem" in disk:
        return f"{disk['folder']}{free}, {disk['problem']}"
    return f"{disk['folder']}{free}, writes {_rate(disk['write_bytes_s'])}, reads {_rate(disk['read_bytes_s'])}"


def _rate(bytes_s: float) -> str:
    return f"{bytes_s / 1e9:.2g} GB/s"


class Finding(NamedTuple):
    """One check of `ithaka selftest`: passed, measured (there is nothing to compare with), slower (than planned) or
    failed, and what to do next. Texts stay on this machine; `figures` may be shared (checks/share.py)."""

    check: str
    status: str
    text: str
    fix: str = ""
    figures: Mapping[str, Any] = {}


def judge(check: str, ok: bool, text: str, fix: str, otherwise: str = "failed", **figures: Any) -> Finding:
    status = "passed" if ok else otherwise
    return Finding(check, status, text, "" if ok else fix, figures)


def examine_rank(device: Any, ranks_per_gpu: int) -> dict[str, Any]:
    """What this rank has, in `figures`, and its checks: {name: (passed, text)}."""
    from ithaka.layer.slabs import Slab, StoreError

    limit, on_gpu, start = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], device.type == "cuda", time.perf_counter()
    figures: dict[str, Any] = {"available bytes": available_memory(), "lockable bytes": limit if limit >= 0 else None}
    lockable = format_bytes(limit) if limit >= 0 else "all"
    memory = f"{format_bytes(figures['available bytes'])} free, {lockable} may be locked"
    try:
        Slab(PIN_BYTES, pin=on_gpu)
        rate = PIN_BYTES / (time.perf_counter() - start)
        figures["pinned bytes/s"] = rate if on_gpu else None
        checks = {"host memory": (True, memory + f", pinned at {_rate(rate)}" * on_gpu)}
    except StoreError as error:
        checks = {"host memory": (False, f"{error}; {memory}")}
    if on_gpu:
        gpu_figures, gpu_checks = _examine_gpu(device, ranks_per_gpu)
        figures |= gpu_figures
        checks |= gpu_checks
    return {"versions": package_versions(), "figures": figures, "checks": checks}


def query_gpu(gpu: str, *fields: str) -> list[float]:
    """Return what nvidia-smi reports about a GPU, given by index or UUID; 0 for what it does not report."""
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    output = ""
    with suppress(OSError, subprocess.SubprocessError):
        output = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    numbers = [float(value) if re.fullmatch(r"\d+\.?\d*", value.strip()) else 0.0 for value in output.split(",")]
    return (numbers + [0.0] * len(fields))[: len(fields)]


def _examine_gpu(device: Any, ranks_per_gpu: int) -> tuple[dict[str, Any], dict[str, tuple[bool, str]]]:
    """Figures, with the clock under load in MHz, and checks."""
    import torch

    from ithaka.comm.mesh import ALLOCATOR_VARIABLES

    gpu: Any = torch.cuda.get_device_properties(device)
    a_nn = torch.ones(8192, 8192, device=device, dtype=torch.bfloat16)
    for _ in range(500):  # in flight while nvidia-smi runs: about a second
        a_nn @ a_nn
    clock, power, default = query_gpu(f"GPU-{gpu.uuid}", "clocks.sm", "power.limit", "power.default_limit")
    torch.cuda.synchronize(device)
    number, built = ctypes.c_int(), torch.cuda.nccl.version()
    with suppress(OSError):  # torch includes it
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    nccl = (number.value // 10000, number.value // 100 % 100, number.value % 100) if number.value else built
    least = max(built, (2, 30)) if ranks_per_gpu > 1 else built  # the first that accepts several ranks on one GPU
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    peers = [i for i in others if torch.cuda.can_device_access_peer(device.index, i)]
    address = "{:04x}:{:02x}:{:02x}.0".format(*(getattr(gpu, f"pci_{i}_id", 0) for i in ("domain", "bus", "device")))
    file, cores = Path("/sys/bus/pci/devices") / address / "local_cpulist", os.sched_getaffinity(0)
    spans = re.findall(r"(\d+)-?(\d*)", file.read_text() if file.is_file() else "")
    near = {core for first, last in spans for core in range(int(first), int(last or first) + 1)} or cores
    setting = next(filter(None, map(os.environ.get, ALLOCATOR_VARIABLES)), "expandable_segments:True")
    figures: dict[str, Any] = {"clock MHz": clock, "power limit W": power, "default power limit W": default}
    figures |= {"peers": len(peers), "other GPUs": len(others), "cores": len(cores), "near cores": len(cores & near)}
    figures["NCCL"] = list(nccl)
    return figures, {
        "NCCL": (nccl >= least, f"{'.'.join(map(str, nccl))}, at least {'.'.join(map(str, least))} needed"),
        "peer access": (peers == others, f"to {len(peers)} of {len(others)} other GPUs of the node"),
        "NUMA and affinity": (cores <= near, f"{len(cores & near)} of {len(cores)} cores are near the GPU"),
        "power limit": (power >= default, f"{power:.0f} of {default:.0f} W"),
        "allocator": ("expandable_segments:True" in setting, setting),
    }


def judge_ranks(facts: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """One finding per check, from what `examine_rank` returned on each rank. Names the ranks that do not pass."""
    usual = dict(Counter(tuple(fact["versions"].items()) for fact in facts).most_common(1)[0][0])
    same = ", ".join(f"{name} {usual[name]}" for name in ("ithaka", "torch", "transformers"))
    median = statistics.median(fact["figures"].get("clock MHz", 0.0) for fact in facts)
    for fact in facts:
        odd = [f"{name} {own} ({usual[name]} elsewhere)" for name, own in fact["versions"].items() - usual.items()]
        fact["checks"]["versions"] = (not odd, ", ".join(odd) or same)
        if clock := fact["figures"].get("clock MHz"):
            is_low, slower = clock < LOW_CLOCK * median, f"{median:.0f}: steps may take x{median / clock:.2f}"
            fact["checks"]["clock"] = not is_low, f"{clock:.0f} MHz under load" + f", the median is {slower}" * is_low
    for i, (check, fix) in enumerate(RANK_FIXES.items()):
        results = {rank: fact["checks"][check] for rank, fact in enumerate(facts) if check in fact["checks"]}
        bad = [rank for rank, (passed, _) in results.items() if not passed]
        for rank in [*bad, *results][:1]:
            names = f"rank {', '.join(map(str, bad[:8]))}: " if bad else ""
            otherwise = "failed" if i < 3 else "slower"
            yield judge(check, not bad, names + results[rank][1], fix, otherwise, ranks=bad)


def judge_nodes(facts: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """One finding per missing feature, from what `examine` returned on the first rank of each node. Names those ranks
    unless all nodes lack it."""
    nodes = {rank: fact["missing"] for rank, fact in enumerate(facts) if "missing" in fact}
    lacking = dict[str, dict[int, dict[str, str]]]()  # by feature and rank
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
