"""A run that may start: its settings, plan and machine, and what its ranks may allocate."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from ithaka.checkpoint import checkpoints
from ithaka.config import (
    CONFIG_FORMAT,
    Config,
    DataConfig,
    Origin,
    RunEntry,
    to_dict,
    with_absolute_paths,
)
from ithaka.layout import FIELDS, Layout
from ithaka.plan.bytes import CHECKPOINT_COPY, Ledger, Sizes, build_ledger, saved_bytes
from ithaka.plan.hardware import Hardware
from ithaka.plan.search import Plan, work_from_config
from ithaka.plan.shape import ModelShape, StepShape
from ithaka.run.detect import uses_planner

STORE_CATEGORIES = ("layer inputs", "kept attention", "on the way to disk")  # names in the ledger


@dataclass(frozen=True)
class Run:
    """The same on every rank, except for the memory that is free on its own node."""

    config: Config  # fully resolved, including train.run_dir; of one entry of a curriculum
    num_ranks: int
    shape: ModelShape
    layout: Layout
    # this node, standing for all; host memory and disk that were free before the run
    hardware: Hardware
    plan: Plan | None = None  # if the planner decided any setting
    checkpoint: Path | None = None  # to resume from
    # settings that differ from the resumed run's, described
    changed: Mapping[str, str] = field(default_factory=dict)
    # Which part of the run; a curriculum has several.
    entry: RunEntry = field(default_factory=RunEntry)
    full: Config = field(default_factory=Config)  # with all entries of a curriculum
    data_bytes: int = 0  # all data files, including globs and hub datasets
    # hub name -> the same name with its commit
    commits: Mapping[str, str] = field(default_factory=dict)
    saved_origins: Mapping[str, str] = field(default_factory=dict)  # of the resumed run

    @property
    def run_dir(self) -> Path:
        assert self.config.train.run_dir is not None, "set by adopt_settings"
        return self.config.train.run_dir

    @property
    def datasets(self) -> tuple[DataConfig, ...]:
        """Those of every entry of the curriculum."""
        return self.full.datasets

    @property
    def saved_settings(self) -> str:
        """The run's config.yaml. Each entry of a curriculum is planned anew, so its settings are
        left out unless somebody gave them."""
        tree = to_dict(self.config)
        if self.config.curriculum:
            tree = to_dict(self.full)
            planned = FIELDS if self.plan is not None else ()
            for name in planned:
                section, _, key = name.partition(".")
                if name not in self.full.given:
                    del tree[section][key]
        origins = dict(self.saved_origins)
        for name, origin in self.config.origins.items():
            if origin not in (Origin.DEFAULT, Origin.RUN):
                origins[name] = str(origin)
        settings = {"format": CONFIG_FORMAT, **with_absolute_paths(tree), "origins": origins}
        return yaml.safe_dump(settings, sort_keys=False)

    @property
    def needs_base(self) -> bool:
        """Whether a resumed run reads the model's files again, for a frozen base or a reference."""
        return self.config.adapter is not None or self.shape.reference

    @property
    def last_step(self) -> int:
        return checkpoints.read_state(self.checkpoint)["step"] if self.checkpoint is not None else 0

    @property
    def finished(self) -> bool:
        if self.checkpoint is None:
            return False
        state = checkpoints.read_state(self.checkpoint)
        train = self.config.train
        if train.epochs is not None and state["epochs"] != train.epochs:
            return False  # the number of steps is not known before the data is read
        steps = train.steps if train.epochs is None else state["steps"]
        return state["step"] >= steps or 0 < train.patience <= checkpoints.read_best(state)[1]

    @property
    def work(self) -> StepShape:
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
        work = StepShape(self.longest_evaluation, trains=False, between_steps=True)
        return build_ledger(self.shape, self.layout.without_backward(), self.hardware, work)


# ---- memory


def drop_reserve(sizes: Sizes, times: int = 1) -> Sizes:
    """Leave out the reserve, which nothing allocates."""
    return {
        name: times * num_bytes
        for name, num_bytes in sizes.items()
        if num_bytes and name != "reserve"
    }


def certain_needs(run: Run, ledger: Ledger | None = None) -> tuple[Sizes, Sizes]:
    """Bytes by category that all ranks of a node certainly need in (host memory, disk). Without a
    GPU, the host also holds the device's planned peak."""
    ledger = ledger or run.ledger
    on_device = (
        drop_reserve(ledger.gpu, run.hardware.gpus_per_node)
        if run.hardware.gpu.name == "CPU"
        else {}
    )
    return on_device | drop_reserve({**ledger.host, CHECKPOINT_COPY: 0}), drop_reserve(ledger.disk)


def store_host_bytes(run: Run) -> int | None:
    """Host memory that one rank's store may use: its share of what is free. With the disk tier,
    only what is in flight to disk, so that a slow disk slows the run down instead of filling the
    memory."""
    stored = sum(run.ledger.host.get(name, 0) for name in STORE_CATEGORIES)
    ranks = run.hardware.gpus_per_node
    to_disk = bool(drop_reserve(run.ledger.disk))
    if not stored and not to_disk:
        return None
    share = run.hardware.host_bytes // ranks
    return min(share, stored // ranks) if to_disk else share


def input_slabs(run: Run) -> tuple[int, int]:
    """Size of the first layer input that one rank keeps in host memory, and the number of inputs of
    this size."""
    layout = run.layout
    num_tokens = run.work.local_tokens(run.layout.cp)
    counts: Counter[int] = Counter()  # by size, in the order of the layers
    for policy, count in layout.policy_groups(run.shape.num_layers, run.shape.first_trained):
        if policy.input == "host":
            counts[layout.stored_input_bytes(policy, num_tokens, run.shape.hidden)] += count
    return next(iter(counts.items()), (0, 0))


def can_save_in_background(run: Run) -> bool:
    """Whether host memory has room for a copy of the saved state on top of everything planned."""
    planned = uses_planner(run.config, run.hardware)
    needed = run.ledger.host_needed if planned else sum(certain_needs(run)[0].values())
    return needed + run.saved_bytes <= run.hardware.host_bytes
