"""A run on its machine: planned settings, and whether they fit in GPU memory, host memory and
disk."""

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ithaka.attention.choose import expected_kernel
from ithaka.checkpoint import checkpoints
from ithaka.config import (
    AdapterConfig,
    Config,
    ConfigError,
    DataConfig,
    check_writable,
    embedded_model,
    format_value,
    parse_config,
    to_dict,
)
from ithaka.config.units import format_bytes, plural
from ithaka.facts.machine import available_memory, free_disk
from ithaka.facts.model_files import read_json
from ithaka.layout import Layout, format_choices
from ithaka.plan.bytes import CHECKPOINT_COPY, Ledger, Sizes, build_ledger, saved_bytes
from ithaka.plan.hardware import GPUS, Hardware, find_gpu, gpu_named, with_profile
from ithaka.plan.search import (
    Plan,
    SearchSpace,
    make_search_space,
    shape_to_train,
    work_from_config,
)
from ithaka.plan.shape import ModelShape, StepShape
from ithaka.plan.trace import choose_traced, correct
from ithaka.run.launch import under_torchrun
from ithaka.run.shapes import make_tracer, read_shape, shape_from_config, teacher_shape

FALLBACK_GPU = "H100"  # its rates rank plans for a GPU that is not in the table
STORE_CATEGORIES = ("layer inputs", "kept attention", "on the way to disk")  # names in the ledger


@dataclass(frozen=True)
class Run:
    """The same on every rank, except for the memory that is free on its own node."""

    config: Config  # fully resolved, including train.run_dir
    num_ranks: int
    shape: ModelShape
    layout: Layout
    # this node, standing for all; host memory and disk that were free before the run
    hardware: Hardware
    plan: Plan | None = None  # if the planner decided any setting
    checkpoint: Path | None = None  # to resume from
    # settings that differ from the resumed run's, described
    changed: Mapping[str, str] = field(default_factory=dict)
    # config.yaml, if not `config`: a curriculum, without the settings planned for each entry
    saved_config: str = ""
    data_bytes: int = 0  # all data files, including globs and hub datasets
    # hub name -> the same name with its commit
    commits: Mapping[str, str] = field(default_factory=dict)
    datasets: Sequence[DataConfig] = ()  # those of every curriculum entry

    @property
    def run_dir(self) -> Path:
        assert self.config.train.run_dir is not None, (
            "set by preflight, so that all ranks use one name"
        )
        return self.config.train.run_dir

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
        return build_ledger(
            self.shape, dataclasses.replace(self.layout, kept=()), self.hardware, work
        )


# ---- the machine, and the settings planned for it


def read_stored_settings(adapter: AdapterConfig, explicit: Set[str]) -> AdapterConfig:
    """Replace the settings with those stored in adapter.path, if it is set. Settings in `explicit`
    must agree."""
    if adapter.path is None:
        return adapter
    stored = read_json(
        adapter.path / "adapter_config.json", "adapter.path=", "give a directory that PEFT wrote"
    )
    targets = stored.get("target_modules")
    saved = stored.get("modules_to_save") or ()
    experts = stored.get("target_parameters") or []
    if (peft_type := stored.get("peft_type")) != "LORA" or not isinstance(targets, list):
        fix = "use an adapter with peft_type=LORA whose target_modules are a list of names"
        raise ConfigError(
            f"adapter.path={adapter.path} has peft_type={peft_type}, "
            f"target_modules={targets}; {fix}"
        )
    values: dict[str, Any] = {
        "rank": stored.get("r"),
        "alpha": stored.get("lora_alpha"),
        "rslora": stored.get("use_rslora", False),
        "dropout": stored.get("lora_dropout", 0.0),
        "targets": tuple(sorted([*targets, *experts])),
        "modules_to_save": tuple(sorted({name.rpartition(".")[2] for name in saved})),
    }
    if "adapter.dropout" in explicit:  # not a property of the weights
        del values["dropout"]
    for name, value in values.items():
        setting = getattr(adapter, name)
        is_same = set(setting) == set(value) if isinstance(setting, tuple) else setting == value
        if f"adapter.{name}" in explicit and not is_same:
            rule = f"conflicts with {format_value(value)} in adapter.path={adapter.path}"
            raise ConfigError(f"adapter.{name}={format_value(setting)} {rule}; leave it out")
    return dataclasses.replace(adapter, **values)


def model_config(config: Config) -> dict[str, Any]:
    """The model's config.json."""
    path = config.model.path
    if path is None:
        return embedded_model(config.model.embedded)
    return read_json(path / "config.json" if path.is_dir() else path)


def model_shape(config: Config) -> ModelShape:
    """The model's shape, with the vocabulary that model.resize_embeddings gives it."""
    path = config.model.path
    name = config.model.embedded
    shape = (
        read_shape(path)
        if path
        else shape_from_config(embedded_model(name), f"model.embedded={name}")
    )
    shape = shape_to_train(shape, config, teacher_shape(config))
    if not config.model.resize_embeddings:
        return shape
    from ithaka.data.tokenizer import load_tokenizer  # late: it imports transformers

    needed = load_tokenizer(config.data.tokenizer, path).vocab_size
    # Rounded up to a size at which matmuls are fast.
    return (
        shape if needed <= shape.vocab else dataclasses.replace(shape, vocab=-(-needed // 64) * 64)
    )


def detect_machine(config: Config, num_ranks: int, gpu: tuple[str, int] | None) -> Hardware:
    """This rank's machine, as if all nodes were like it: the attention kernel expected to run on
    its GPU (name and memory), and the host memory and disk that are free before the run allocates
    any."""
    settings = config.memory
    disk = config.memory.disk_path
    if disk is not None and not disk.is_dir():
        raise ConfigError(
            f"memory.disk_path={disk} is not a directory; create it, or leave it null"
        )
    if disk is not None:
        check_writable("memory.disk_path", disk, folder=True)
    host_bytes = available_memory()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    name, gpu_bytes = gpu or ("CPU", host_bytes // ranks)
    entry = (
        GPUS["CPU"]
        if gpu is None
        else gpu_named(name) or dataclasses.replace(find_gpu(FALLBACK_GPU), name=name)
    )
    memory_bytes = gpu_bytes if gpu_named(name) is None else min(entry.memory_bytes, gpu_bytes)
    disk_bytes = (
        free_disk(disk) if disk or "disk" in (settings.offload, settings.attention_offload) else 0
    )
    entry = dataclasses.replace(with_profile(entry), memory_bytes=memory_bytes)
    machine = Hardware(
        entry, ranks, num_ranks // ranks, host_bytes=host_bytes, disk_bytes=disk_bytes
    )
    return machine.with_kernel(expected_kernel(config.attention.kernel, entry.kernels))


def weakest_machine(machines: Sequence[Hardware]) -> Hardware:
    """The least that every rank has: host memory, disk, and the GPU with the least memory (among
    equals, with the slowest attention kernel)."""
    ranks_per_node = sorted({machine.gpus_per_node for machine in machines})
    if len(ranks_per_node) > 1:
        counts = " and ".join(map(str, ranks_per_node))
        raise ConfigError(f"the nodes have {counts} ranks; start the same number on each")
    host_bytes = min(machine.host_bytes for machine in machines)
    disk_bytes = min(machine.disk_bytes for machine in machines)
    gpus = (machine.gpu for machine in machines)
    gpu = min(gpus, key=lambda gpu: (gpu.memory_bytes, gpu.attention_forward_flops))
    return dataclasses.replace(machines[0], gpu=gpu, host_bytes=host_bytes, disk_bytes=disk_bytes)


def uses_planner(config: Config, hardware: Hardware) -> bool:
    """Whether the planner decides settings: for GPUs in the hardware table, in bfloat16 (which the
    table's rates are for), unless memory.plan=off."""
    in_table = gpu_named(hardware.gpu.name) is not None
    return in_table and config.memory.plan == "auto" and config.model.dtype in ("auto", "bfloat16")


def plan_run(
    config: Config, explicit: Set[str], hardware: Hardware, shape: ModelShape | None = None
) -> tuple[Config, Plan | None]:
    """Fill in every setting that is not in `explicit` from a plan; return the config and the plan,
    which may not fit. `shape` defaults to the configured model's, whose plan is traced, except
    under torchrun."""
    if not uses_planner(config, hardware):
        return config, None
    space = make_search_space(config, explicit, shape or model_shape(config), hardware)
    # Under torchrun, every rank plans, and the caches of nodes may differ.
    trace = (
        make_tracer(model_config(config), always=True)
        if shape is None and not under_torchrun()
        else None
    )
    plan = choose_traced(space, work_from_config(config), trace)
    tree = to_dict(config)
    for name, value in plan.settings.items():
        section, key = name.split(".")
        if name not in explicit or tree[section][key] == "auto":
            tree[section][key] = value
    if "disk" not in (tree["memory"]["offload"], tree["memory"]["attention_offload"]):
        tree["memory"]["disk_path"] = None
    return parse_config(tree), plan


def trace_shape(run: Run) -> ModelShape:
    """The run's shape, corrected by a trace of its layout, as `plan_run` would."""
    if not uses_planner(run.config, run.hardware) or under_torchrun():
        return run.shape
    plan = Plan(run.shape, run.layout, run.hardware, run.work)
    peaks = make_tracer(model_config(run.config), always=True)(plan)
    return run.shape if peaks is None else correct(plan, peaks).shape


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


def check_fits(run: Run) -> None:
    """Refuse a step or an evaluation that does not fit by the planner's ledger, reserves included.
    Without the planner, refuse only what certainly exceeds host memory or disk."""
    batch = f" with train.batch={run.work.batch}" if run.work.batch > 1 else ""
    _check_tiers(run, run.ledger, f"data.context={run.work.context}{batch}", _step_fixes)
    if run.longest_evaluation:
        _check_tiers(
            run,
            run.evaluation_ledger,
            f"evaluate.contexts={run.longest_evaluation}",
            _evaluation_fixes,
        )


def _check_tiers(
    run: Run, ledger: Ledger, setting: str, find_fixes: Callable[[Run, str], dict[str, bool]]
) -> None:
    planned = uses_planner(run.config, run.hardware)
    host, disk = (ledger.host, ledger.disk) if planned else certain_needs(run, ledger)
    num_ranks = run.hardware.gpus_per_node
    per_node = f"per node of {plural(num_ranks, 'rank')}"
    tiers = {
        "GPU memory": (ledger.gpu if planned else {}, ledger.gpu_bytes, "per GPU"),
        "host memory": (host, ledger.host_bytes, per_node),
        "disk": (disk, ledger.disk_bytes, per_node),
    }
    for tier, (sizes, available, unit) in tiers.items():
        if (needed := sum(sizes.values())) > available:
            parts = ", ".join(
                f"{name} {format_bytes(num_bytes)}"
                for name, num_bytes in sizes.items()
                if num_bytes
            )
            fixes = find_fixes(run, tier) | {"memory.plan=off to try anyway": planned}
            choices = format_choices(fix for fix, helps in fixes.items() if helps)
            problem = f"{setting} needs {format_bytes(needed)} of {tier} {unit} ({parts})"
            raise ConfigError(f"{problem}; {format_bytes(available)} available; use {choices}")


def _step_fixes(run: Run, tier: str) -> dict[str, bool]:
    """Settings, and whether each makes room for a step in `tier`."""
    memory = run.config.memory
    layout = run.layout
    planned = uses_planner(run.config, run.hardware)
    fixes = {
        "a smaller train.batch": run.work.batch > 1,
        "memory.checkpoint=full": layout.keep_everything > 0,
        "memory.keep_projections=none": layout.keep_projections > layout.keep_everything,
        "memory.offload=host": memory.offload == "none" and tier == "GPU memory",
        "memory.offload=disk": memory.offload == "host" and tier == "host memory",
        "memory.keep_attention=none": layout.keep_attention > layout.keep_projections,
        "memory.offload_optimizer=false": tier == "host memory" and layout.offload_optimizer,
        "a memory.disk_path with more space": tier == "disk",
        "a shorter data.context": not planned,
    }
    if not planned:
        return fixes
    # Search with every memory and parallelism setting left to the planner.
    space = SearchSpace(run.shape, run.hardware)
    if space.fits(run.work):
        plain = "the planner's memory and parallel settings (leave them out)"
        return fixes | {plain: True, "a shorter data.context": True}
    context = space.longest_context(run.work.batch)
    machine = space.smallest_machine(run.work)
    fixes |= {f"data.context={context}": context > 0}
    if adapter := space.adapter_that_fits(run.work):
        settings = ", ".join(f"adapter.{name}={value}" for name, value in adapter.items())
        fixes[
            f"an adapter ({settings})" if "rank" in adapter else f"a four-bit base ({settings})"
        ] = True
    if not layout.stored_dtype and space.with_float8 and space.with_float8.fits(run.work):
        fixes["memory.stored_dtype=float8"] = True
    if machine:
        fixes[f"{machine.num_gpus} GPUs ({machine.name})"] = True
    return fixes


def _evaluation_fixes(run: Run, tier: str) -> dict[str, bool]:
    layout = run.layout
    return {
        "shorter evaluate.contexts": True,
        f"parallel.cp={run.num_ranks}": layout.cp < run.num_ranks,
        "a smaller parallel.heads_per_stage": layout.heads_per_stage != layout.ulysses,
        "memory.offload_optimizer=true": tier == "GPU memory" and not layout.offload_optimizer,
        "evaluate.every=0 and `ithaka evaluate` after the run": True,
    }


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
