"""Profiles a training step: trace, memory snapshot, memory map, phase times and the peak in words."""

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
from ithaka.profile.memory import in_words
from ithaka.profile.times import StepTimes


class StepProfile(ExitStack):
    """Enter it around one step, then `write`. Nothing is recorded outside of it.

    `times`: recorded in an earlier step; then this one records only memory, which makes both cheaper.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, device: torch.device, times: StepTimes | None = None
    ) -> None:
        super().__init__()
        self.model, self.optimizer = model, optimizer
        self.times, self._times_too = times or StepTimes(device), times is None
        self.memory = AllocatorHistory(device) if device.type == "cuda" else LiveBytes()

    def __enter__(self) -> "StepProfile":
        self.enter_context(self.memory)
        self.memory.register_states(self.model, self.optimizer)
        if self._times_too:
            self.enter_context(self.times)  # last, so that leaving the memory's recorder is no part of the step
        return self

    def write(self, folder: Path, step: int, plain_s: float | None, planned: dict[str, int]) -> str:
        """Writes everything into `folder` and returns the peak in words.

        `plain_s`: a step's time without profiling. `planned`: bytes by holder at the peak.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(self.memory, AllocatorHistory):
            (folder / "memory.pickle").write_bytes(pickle.dumps(self.memory.snapshot))
        memory, times = self.memory.describe(planned), self.times.write(folder / "trace.json.gz")
        data = {"step": step, "plain_s": plain_s, "memory": memory, "times": times}
        words = in_words(memory["peak"])
        (folder / "profile.json").write_text(json.dumps(data), encoding="utf-8")
        (folder / "peak.txt").write_text(words, encoding="utf-8")
        return words


def describe_machine(device: torch.device, num_ranks: int) -> dict[str, Any]:
    """Facts about the machine of a run, by the names to show."""
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
