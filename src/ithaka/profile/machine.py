"""The machine a run ran on, for its report."""

import platform
from typing import Any

import psutil
import torch
import transformers

import ithaka
from ithaka.plan.host import num_cores
from ithaka.plan.show import size


def machine(device: torch.device, num_ranks: int) -> dict[str, Any]:
    """Plain facts, by names to show."""
    facts: dict[str, Any] = {
        "ranks": num_ranks,
        "CPU": f"{_cpu_name()}, {num_cores()} cores",
        "host memory": size(psutil.virtual_memory().total),
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "ithaka": ithaka.__version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts = {
            "GPU": f"{properties.name}, {size(properties.total_memory)}",
            "CUDA": f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
            **facts,
        }
    return facts


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
