"""Profile one training step: trace, memory snapshot, memory map, phase times and a summary of the peak."""

import json
import pickle
import platform
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from torch import nn
from torch.optim import Optimizer

import ithaka
from ithaka.plan.hardware import num_cores
from ithaka.plan.show import format_bytes
from ithaka.profile.allocator import AllocatorHistory
from ithaka.profile.live import LiveBytes
from ithaka.profile.memory import format_peak
from ithaka.profile.times import StepTimes


class StepProfile(ExitStack):
    """Enter around one step, then call `write`.

    `times`: recorded in an earlier step. Then this step records memory only, which makes both cheaper.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, device: torch.device, times: StepTimes | None = None
    ) -> None:
        super().__init__()
        self.model, self.optimizer = model, optimizer
        self.times, self._records_times = times or StepTimes(device), times is None
        self.memory = AllocatorHistory(device) if device.type == "cuda" else LiveBytes()

    def __enter__(self) -> "StepProfile":
        self.enter_context(self.memory)
        self.memory.tag_states(self.model, self.optimizer)
        if self._records_times:
            self.enter_context(self.times)  # last, so the step does not include exiting `memory`
        return self

    def write(self, folder: Path, step: int, plain_s: float | None, planned: dict[str, int]) -> str:
        """Write all files to `folder` and return the summary of the peak.

        `plain_s`: time of a step without profiling. `planned`: bytes by holder at the planned peak.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(self.memory, AllocatorHistory):
            (folder / "memory.pickle").write_bytes(pickle.dumps(self.memory.snapshot))
        memory, times = self.memory.describe(planned), self.times.write(folder / "trace.json.gz")
        data = {"step": step, "plain_s": plain_s, "memory": memory, "times": times}
        summary = format_peak(memory["peak"])
        (folder / "profile.json").write_text(json.dumps(data), encoding="utf-8")
        (folder / "peak.txt").write_text(summary, encoding="utf-8")
        return summary


def describe_machine(device: torch.device, num_ranks: int) -> dict[str, Any]:
    """Hardware and software versions for the report, by display name."""
    facts: dict[str, Any] = {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["GPU"] = f"{properties.name}, {format_bytes(properties.total_memory)}"
        facts["CUDA"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    return facts | {
        "ranks": num_ranks,
        "CPU": f"{num_cores()} cores, {format_bytes(psutil.virtual_memory().total)}",
        "system": f"{platform.platform()}, Python {platform.python_version()}",
        **{package.__name__: package.__version__ for package in (torch, transformers, ithaka)},
    }
