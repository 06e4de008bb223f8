"""A validated run: what preflight returns and every rank executes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ithaka.checkpoint.files import read_state
from ithaka.config import Config
from ithaka.layout import Layout
from ithaka.plan.bytes import Ledger, build_ledger, saved_bytes
from ithaka.plan.hardware import Hardware
from ithaka.plan.search import Plan, work_from_config
from ithaka.plan.shape import ModelShape, Work


@dataclass(frozen=True)
class Run:
    """The same on every rank, except for the memory that is free on its own node."""

    config: Config  # fully resolved, including train.run_dir
    num_ranks: int
    shape: ModelShape
    layout: Layout
    hardware: Hardware  # this node, standing for all; host memory and disk that were free before the run
    plan: Plan | None = None  # if the planner decided any setting
    checkpoint: Path | None = None  # to resume from
    changed: Mapping[str, str] = field(default_factory=dict)  # settings that differ from the resumed run's, described
    saved_config: str = ""  # config.yaml, if not `config`: a curriculum, without the settings planned for each entry
    data_bytes: int = 0  # all data files, including globs and hub datasets

    @property
    def run_dir(self) -> Path:
        assert self.config.train.run_dir is not None, "set by preflight, so that all ranks use one name"
        return self.config.train.run_dir

    @property
    def last_step(self) -> int:
        return read_state(self.checkpoint)["step"] if self.checkpoint is not None else 0

    @property
    def finished(self) -> bool:
        if self.checkpoint is None:
            return False
        state, train = read_state(self.checkpoint), self.config.train
        if train.epochs is not None and state["epochs"] != train.epochs:
            return False  # the number of steps is not known before the data is read
        steps = train.steps if train.epochs is None else state["steps"]
        return state["step"] >= steps or 0 < train.patience <= state["stale"]

    @property
    def work(self) -> Work:
        return work_from_config(self.config)

    @property
    def saved_bytes(self) -> int:
        return saved_bytes(self.shape, self.layout, self.hardware)

    @property
    def ledger(self) -> Ledger:
        return build_ledger(self.shape, self.layout, self.hardware, self.work)

    @property
    def longest_evaluation(self) -> int:
        """The longest of evaluate.contexts, or 0 if no evaluation is longer than data.context."""
        longest = max(self.config.evaluate.contexts, default=0) if self.config.evaluate.every else 0
        return longest if longest > self.config.data.context else 0

    @property
    def evaluation_ledger(self) -> Ledger:
        """The ledger of the longest evaluation. It has no backward, so no activations are kept."""
        work = Work(self.longest_evaluation, trains=False, between_steps=True)
        return build_ledger(self.shape, dataclasses.replace(self.layout, kept=()), self.hardware, work)
