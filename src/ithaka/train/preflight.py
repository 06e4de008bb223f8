"""Turn a command's settings and the machines it has into a validated run, before any rank starts and anything is
written.

Under torchrun every rank does this. If a check fails on any rank, it is raised on all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import yaml

import ithaka
from ithaka import launch
from ithaka.attention.kernels import KERNELS, expected_kernel
from ithaka.config import (
    CPU_DEFAULT,
    GPU_DEFAULT,
    Config,
    ConfigError,
    check_effects,
    check_output,
    check_writable,
    embedded_model,
    explicit_settings,
    format_value,
    input_error,
    load_config,
    parse_config,
    shell_command,
    to_dict,
    to_yaml,
    with_absolute_paths,
)
from ithaka.dist.agree import SharedError, gather_objects, raise_on_all_ranks
from ithaka.dist.mesh import start_process_group
from ithaka.exits import TransientError
from ithaka.launch import under_torchrun
from ithaka.layout import Layout, check_fixed, fixed_settings, format_choices, layout_from_config
from ithaka.model.adapters import read_stored_settings
from ithaka.plan.bytes import CHECKPOINT_COPY, Holders, Ledger, build_ledger, saved_bytes
from ithaka.plan.hardware import GPUS, Hardware, find_gpu, gpu_named, this_host, with_kernel
from ithaka.plan.search import ADAPTER_RANK, Plan, SearchSpace, make_search_space, work_from_config
from ithaka.plan.shape import ModelShape, Work, read_shape, shape_from_config
from ithaka.plan.show import format_bytes
from ithaka.train import checkpoint

if TYPE_CHECKING:
    from ithaka.data.stream import TrainData

# The ledger's names.
STORE_HOLDERS = ("layer inputs", "kept attention", "on the way to disk")
STATES = "parameters, gradients, optimizer"
STAND_IN = "H100"  # for a GPU that the table lacks
ENDS_BYTES, MOST_FILES = 2**16, 256  # of files whose contents are compared between ranks
# Sections of every run's config.yaml, also of early versions. A file that a user wrote rarely has them all.
SAVED_SECTIONS = {"model", "data", "parallel", "memory", "attention", "optim", "train", "profile"}
TOKEN_FILES = (".tokens", ".part", ".failed")  # in RUN_DIR/tokens, which is removed after the run
LOG_FILES = (".log", ".out", ".err")  # a scheduler may write into the run directory before the run starts
AUTO = Path("auto")  # --resume auto: go on in train.run_dir if it has a checkpoint, else start there


@dataclass(frozen=True)
class Run:
    """A validated run: the same on every rank, except for what its own machine has free."""

    config: Config  # every setting decided, train.run_dir set
    num_ranks: int
    shape: ModelShape
    layout: Layout
    hardware: Hardware  # this machine, standing for all; host memory and disk that were free before the run
    plan: Plan | None = None  # the planner's, if it decided anything
    checkpoint: Path | None = None  # to go on from
    changed: Mapping[str, str] = field(default_factory=dict)  # settings that differ from the run's so far, in words
    saved: str = ""  # config.yaml, if it is not `config`: a curriculum, without what is planned for each entry
    data_bytes: int = 0  # all data files, including globs and hub datasets

    @property
    def run_dir(self) -> Path:
        assert self.config.train.run_dir is not None, "resolved before the ranks start: one name for all of them"
        return self.config.train.run_dir

    @property
    def last_step(self) -> int:
        return checkpoint.read_state(self.checkpoint)["step"] if self.checkpoint is not None else 0

    @property
    def finished(self) -> bool:
        if self.checkpoint is None:
            return False
        state, train = checkpoint.read_state(self.checkpoint), self.config.train
        if train.epochs is not None and state.get("epochs") != train.epochs:
            return False  # the data says how many steps they are
        steps = train.steps if train.epochs is None else state["steps"]
        return state["step"] >= steps or 0 < train.patience <= state.get("stale", 0)

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
        """Tokens of the longest of evaluate.contexts; 0: nothing is evaluated, or nothing longer than data.context."""
        longest = max(self.config.evaluate.contexts, default=0) if self.config.evaluate.every else 0
        return longest if longest > self.config.data.context else 0

    @property
    def evaluation_ledger(self) -> Ledger:
        """The ledger of the longest evaluation. It has no backward, so it keeps no activations."""
        work = Work(self.longest_evaluation, trains=False, between_steps=True)
        return build_ledger(self.shape, dataclasses.replace(self.layout, kept=()), self.hardware, work)


def preflight(
    file: Path | None,
    changes: list[str],
    resume: Path | None = None,
    run_dir: Path | None = None,
    trains: bool = True,
    force: bool = False,
) -> Run:
    """Resolve, plan and check the configuration: a file of settings and changes to them, or a run to resume; with
    `trains` false, to validate. `force`: the run directory may hold other files."""
    if under_torchrun():
        start_process_group()
    name = gather_objects(time.strftime("%Y%m%d-%H%M%S"))[0]  # by the clock of rank 0

    def told() -> tuple[Config, Hardware, Path | None]:
        config = resolve(file, changes, resume, run_dir, name)
        num_ranks = launch.decide_ranks(config.parallel.ranks, launch.num_gpus())
        newest = checkpoint.newest_checkpoint(config.train.run_dir) if resume is not None else None
        return config, detect_machine(config, num_ranks, launch.detect_gpu()), newest

    def decided() -> Run:
        check_ranks_agree(configs, newest)
        whole, least, plan = configs[0], weakest_machine(machines), None
        names = explicit_settings(file, changes, _defaults(file, changes))
        if whole.curriculum and resume not in (None, AUTO):
            names = explicit_settings(resume / "config.yaml", changes)
        found = checkpoint.find_checkpoint(newest[0].parents[1]) if whole.curriculum and newest[0] else None
        config = whole.at(checkpoint.read_state(found)["step"] if found else 0)
        if resume in (None, AUTO) or whole.curriculum:  # else a run that goes on keeps its settings
            config, plan = plan_run(config, names, least)
        run = dataclasses.replace(validated(config, least.num_gpus, resume, mine[1], trains, force), plan=plan)
        for start in (end for end in whole.ends[:-1] if end >= config.train.steps):  # later entries
            later = plan_run(whole.at(start), names, least)[0]
            check_inputs(fitting(later, least.num_gpus, mine[1], resume is not None))
        return dataclasses.replace(run, saved=_saved(whole, names, plan)) if whole.curriculum else run

    mine = raise_on_all_ranks(told)
    configs, machines, newest = zip(*gather_objects(mine), strict=True)
    run = raise_on_all_ranks(decided)
    return with_intact_checkpoint(run) if run.finished else run  # one that goes on checks its files later


def validated(
    config: Config,
    num_ranks: int,
    resume: Path | None = None,
    here: Hardware | None = None,
    trains: bool = True,
    force: bool = False,
) -> Run:
    """A run with these settings. Raises ConfigError unless it can start; cheap checks first."""
    run_dir, auto = config.train.run_dir, resume == AUTO
    if auto:
        resume = run_dir if checkpoint.newest_checkpoint(run_dir) else None
    if resume is None and run_dir is not None:
        check_run_dir(run_dir, auto, force)
    run = fitting(config, num_ranks, here, resume is not None)
    if resume is not None:
        found, changed = checkpoint.resume_point(resume, run.config, run.shape)
        run = dataclasses.replace(run, checkpoint=found, changed=changed)
        if trains and run.finished and not auto:
            name = "steps" if run.last_step >= config.train.steps else "patience"
            value = getattr(config.train, name)
            way = f"to go on give more: --set train.{name}={2 * value}"
            way = "to go on give the file with more entries, and --resume auto" if config.curriculum else way
            raise ConfigError(f"train.{name}={value} is reached already by checkpoint {found}; {way}")
    return dataclasses.replace(run, data_bytes=check_inputs(run))


def check_run_dir(run_dir: Path, auto: bool, force: bool) -> None:
    """Refuse to start a run among other files: it would replace those that have its names, such as report.html.

    With --resume auto, a run that ended before its first checkpoint starts again in its own directory.
    """
    file, logs = run_dir / "config.yaml", {each.name for each in run_dir.glob("*") if each.suffix in LOG_FILES}
    own = {"hang", ".config.yaml.tmp", *logs}
    if file.exists() and not auto:
        way = f"give another with --run-dir, or continue it: {shell_command('train', '--resume', run_dir)}"
        raise ConfigError(f"train.run_dir={run_dir} already holds a run; {way}")
    if all(each.suffix in TOKEN_FILES for each in run_dir.glob("tokens/*")):
        own.add("tokens")
    if file.is_file() and {name.partition(".")[0] for name in explicit_settings(file)} >= SAVED_SECTIONS:
        own = {entry.name for entry in run_dir.iterdir()}
    check_output("train.run_dir", run_dir, force, folder=True, own=own)


def _saved(whole: Config, names: Set[str], plan: Plan | None) -> str:
    tree = to_dict(whole)
    for section, key in (name.split(".") for name in (plan.settings if plan else {}) if name not in names):
        del tree[section][key]
    return yaml.safe_dump(with_absolute_paths(tree), sort_keys=False)


def fitting(config: Config, num_ranks: int, here: Hardware | None, goes_on: bool) -> Run:
    """A run with these settings, which its machine has room for."""
    shape = model_shape(config)
    check_settings(config, num_ranks, shape)
    hardware = here or detect_machine(config, num_ranks, launch.detect_gpu())
    layout = layout_from_config(config, shape.num_layers, num_ranks, hardware.gpu.name != "CPU", shape.heads)
    accumulate = config.train.micro_steps(num_ranks // layout.cp)
    if not goes_on and config.train.accumulate not in (1, accumulate):
        words = f"is not the {accumulate} that train.global_batch={config.train.global_batch} gives; leave one out"
        raise ConfigError(f"train.accumulate={config.train.accumulate} {words}")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, accumulate=accumulate))
    run = Run(config, num_ranks, shape, layout, hardware)
    check_fits(run)
    if not goes_on or config.adapter is not None:  # else the checkpoint has all weights
        check_weights(config.model.path)
    return run


def check_inputs(run: Run) -> int:
    """Refuse positions that the model lacks, and data that cannot be trained on. Returns the bytes of the data."""
    # Late: they import transformers, and cheap checks answer at once.
    from ithaka.data.open import check_data as check_data
    from ithaka.model.build import read_hf_config

    model, data = run.config.model, run.config.data
    read_hf_config(model.path or embedded_model(model.embedded), model.rope, data.context)
    return check_data(data, run.shape.vocab, model.path)


def with_intact_checkpoint(run: Run) -> Run:
    """`run`, which goes on from the newest checkpoint whose files are as they were written. The ranks share the work of
    checking them."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    while run.checkpoint is not None:
        found = gather_objects(raise_on_all_ranks(checkpoint.find_damage, run.checkpoint, rank, num_ranks))
        if not any(found):
            break
        checkpoint.report_damage(run.checkpoint, next(filter(None, found)))
        run = dataclasses.replace(run, checkpoint=checkpoint.find_checkpoint(run.run_dir, before=run.checkpoint))
    return run


def fingerprints(config: Config, data: TrainData, tokenizer: str) -> dict[str, str]:
    """Of what every rank must have alike, by name."""
    found = {"data": data.fingerprint(), "tokenizer": tokenizer, "python": platform.python_version()}
    found["ithaka"] = ithaka.__version__
    for name in ("torch", "transformers", "tokenizers", "peft", "datasets"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    model, streams = config.model.path, [stream for stream in (data.stream, data.validation) if stream is not None]
    of_model = sorted(model.glob("[!.]*")) if model is not None and model.is_dir() else [model] if model else []
    shards = [shard for stream in streams for source in stream.sources for shard in source.shards]
    of_data = dict.fromkeys(path for shard in shards for path in shard.paths)
    return found | {"model.path": _contents(of_model), "data.path": _contents(of_data)}


def _contents(files: Iterable[Path]) -> str:
    """Names, sizes, and what some hold at both ends."""
    found = hashlib.sha256()
    for number, file in enumerate(file for file in files if file.is_file()):
        num_bytes = file.stat().st_size
        found.update(f"{file.name} {num_bytes}\n".encode())
        if number < MOST_FILES:
            with file.open("rb") as opened:
                found.update(opened.read(ENDS_BYTES))
                opened.seek(max(0, num_bytes - ENDS_BYTES))
                found.update(opened.read())
    return found.hexdigest()[:12]


def check_same(fingerprints: Sequence[tuple[str, dict[str, str]]]) -> None:
    """`fingerprints`: of every rank, with its host."""
    _, first = fingerprints[0]
    for rank, (host, own) in enumerate(fingerprints):
        for name in (name for name in first if own.get(name) != first[name]):
            seen = f"{name} is {first[name]} on rank 0 and {own.get(name)} on rank {rank}, {host}"
            raise SharedError(f"the ranks do not have the same: {seen}; give all nodes the same files and packages")


def check_ranks_agree(configs: Sequence[Config], newest: Sequence[Path | None] = ()) -> None:
    """Refuse ranks with different settings or checkpoints, whose collectives would deadlock. Under torchrun every node
    reads its own files, and a shared file system may show a new checkpoint late."""
    for rank, found in enumerate(newest):
        if found != newest[0]:
            seen = f"rank 0 finds {newest[0] or 'no checkpoint'} and rank {rank} {found or 'none'}"
            way = "put it on a file system that all nodes share"
            raise TransientError(f"train.run_dir={configs[0].train.run_dir}: {seen}; start again, or {way}")
    first, *others = (to_yaml(config).splitlines() for config in configs)
    for rank, lines in enumerate(others, 1):
        for here, there in (both for both in zip(first, lines, strict=False) if both[0] != both[1]):
            way = "give every node the same settings"
            raise ConfigError(f"rank 0 has `{here.strip()}` and rank {rank} `{there.strip()}`; {way}")


def resolve(
    file: Path | None, changes: list[str], resume: Path | None = None, run_dir: Path | None = None, name: str = ""
) -> Config:
    """The settings of the run, with its run directory (by default runs/`name`) and the length of its learning-rate
    schedule."""
    check_path("--resume ", None if resume == AUTO else resume)
    if resume is not None and resume != AUTO:
        moved = "--set train.run_dir" if "train.run_dir" in explicit_settings(None, changes) else ""
        wrong = f"config={file}" if file else f"--run-dir {run_dir}" if run_dir else moved
        if wrong:
            raise ConfigError(f"{wrong} cannot be given with --resume {resume}; leave it out; settings go with --set")
        if not (resume / "config.yaml").is_file():
            raise ConfigError(f"--resume {resume} holds no config.yaml; give the directory of an earlier run")
        file, run_dir = resume / "config.yaml", resume
        config = load_config(file, [f"optim.decay_steps={_decay_of(file)}", *changes])
    else:
        config = load_config(file, changes, _defaults(file, changes))
        run_dir = run_dir or config.train.run_dir
        if run_dir is None and resume == AUTO:
            way = "set it in the file, or give --run-dir DIR"
            raise ConfigError(f"--resume auto needs train.run_dir, where it looks for the run; {way}")
        run_dir = run_dir or Path("runs") / name
        check_path("train.run_dir=", run_dir)
        if resume == AUTO and config.optim.decay_steps is None and (run_dir / "config.yaml").is_file():
            config = load_config(
                file, [*changes, f"optim.decay_steps={_decay_of(run_dir / 'config.yaml')}"], _defaults(file, changes)
            )
    if config.adapter is not None:
        adapter = read_stored_settings(config.adapter, explicit_settings(file, changes))
        config = dataclasses.replace(config, adapter=adapter)
    both = {"train.steps", "train.epochs"} <= explicit_settings(None if run_dir == resume else file, changes)
    if both and config.train.epochs is not None:
        raise ConfigError(f"train.epochs={config.train.epochs} and train.steps both say how long; leave one out")
    config.optim.check_schedule()
    end = config.optim.decay_steps
    if config.train.epochs is None:
        end = end or config.train.steps
    optim = dataclasses.replace(config.optim, decay_steps=end)
    return dataclasses.replace(config, optim=optim, train=dataclasses.replace(config.train, run_dir=run_dir))


def check_path(option: str, path: Path | None) -> None:
    """Refuse a path that the system cannot look up: a loop of symbolic links, a name that is too long, or a folder
    without permission. It need not exist."""
    try:
        if path is not None:
            path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise input_error(f"{option}{path} cannot be used ({error.strerror}); give another directory", error) from None


def _decay_of(file: Path) -> str:
    """optim.decay_steps of a run that goes on. A cosine that has not begun ends with the longer run."""
    before = load_config(file)
    last = before.optim.decay_steps or before.train.steps
    return str(last) if last > before.optim.warmup_steps else "null"


def _defaults(file: Path | None, changes: list[str]) -> dict[str, dict[str, Any]]:
    """Made for the embedded models: a model of the user's own starts from the plain defaults instead."""
    if file is not None or any(change.replace(" ", "").startswith("model.path=") for change in changes):
        return {}
    return GPU_DEFAULT if launch.num_gpus() else CPU_DEFAULT


def model_shape(config: Config) -> ModelShape:
    """With the vocabulary that model.resize_embeddings gives it."""
    path, name = config.model.path, config.model.embedded
    shape = read_shape(path) if path else shape_from_config(embedded_model(name), f"model.embedded={name}")
    shape = shape.with_adapter(config.adapter)
    if not config.model.resize_embeddings:
        return shape
    from ithaka.data.tokenizer import load_tokenizer  # late: it imports transformers

    needed = load_tokenizer(config.data.tokenizer, path).vocab_size
    # Rounded up to what matmuls are fast at.
    return shape if needed <= shape.vocab else dataclasses.replace(shape, vocab=-(-needed // 64) * 64)


def detect_machine(config: Config, num_ranks: int, gpu: tuple[str, int] | None) -> Hardware:
    """The machine of this rank, as if all nodes were like it: its GPU (name and bytes in all) with the attention kernel
    that should run on it, and the host memory and disk that are free before the run takes any."""
    settings, disk = config.memory, config.memory.disk_path
    if disk is not None and not disk.is_dir():
        raise ConfigError(f"memory.disk_path={disk} is not a directory; create it, or leave it null")
    if disk is not None:
        check_writable("memory.disk_path", disk, folder=True)
    host, ranks = this_host(disk), int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    name, gpu_bytes = gpu or ("CPU", host.memory_bytes // ranks)
    # For a GPU that the table lacks, the rates only serve to rank plans.
    entry = GPUS["CPU"] if gpu is None else gpu_named(name) or dataclasses.replace(find_gpu(STAND_IN), name=name)
    memory_bytes = gpu_bytes if gpu_named(name) is None else min(entry.memory_bytes, gpu_bytes)
    disk_bytes = host.disk_bytes if disk or "disk" in (settings.offload, settings.attention_offload) else 0
    entry = with_kernel(entry, expected_kernel(config.attention.kernel, entry.kernels))
    entry = dataclasses.replace(entry, memory_bytes=memory_bytes)
    return Hardware(entry, ranks, num_ranks // ranks, host_bytes=host.memory_bytes, disk_bytes=disk_bytes)


def weakest_machine(machines: Sequence[Hardware]) -> Hardware:
    """What every rank's machine has: the least host memory and disk, and the GPU with the least memory, among equals
    the one whose attention kernel is slowest."""
    numbers = sorted({machine.gpus_per_node for machine in machines})
    if len(numbers) > 1:
        raise ConfigError(f"the nodes have {' and '.join(map(str, numbers))} ranks; start the same number on each")
    host_bytes, disk_bytes = (min(getattr(m, name) for m in machines) for name in ("host_bytes", "disk_bytes"))
    gpus = (machine.gpu for machine in machines)
    gpu = min(gpus, key=lambda gpu: (gpu.memory_bytes, gpu.attention_forward_flops))
    return dataclasses.replace(machines[0], gpu=gpu, host_bytes=host_bytes, disk_bytes=disk_bytes)


def uses_planner(config: Config, hardware: Hardware) -> bool:
    """Whether the planner decides: unless memory.plan=off, on a GPU that the hardware table has, in bfloat16, which the
    table's rates are for."""
    return (
        gpu_named(hardware.gpu.name) is not None
        and config.memory.plan == "auto"
        and config.model.dtype in ("auto", "bfloat16")
    )


def plan_run(
    config: Config, given: Set[str], hardware: Hardware, shape: ModelShape | None = None
) -> tuple[Config, Plan | None]:
    """`config` with every setting that is not `given` taken from the plan for it, and that plan, which may not fit.
    `shape`: of the model, unless the configuration says it."""
    if not uses_planner(config, hardware):
        return config, None
    plan = make_search_space(config, given, shape or model_shape(config), hardware).choose(work_from_config(config))
    tree = to_dict(config)
    for name, value in plan.settings.items():
        section, key = name.split(".")
        if name not in given or tree[section][key] == "auto":
            tree[section][key] = value
    if "disk" not in (tree["memory"]["offload"], tree["memory"]["attention_offload"]):
        tree["memory"]["disk_path"] = None
    return parse_config(tree), plan


def drop_reserve(holders: Holders, times: int = 1) -> Holders:
    """Without the reserve, which nobody holds."""
    return {name: times * num_bytes for name, num_bytes in holders.items() if num_bytes and name != "reserve"}


def needs(run: Run, ledger: Ledger | None = None) -> tuple[Holders, Holders]:
    """(host, disk): bytes per holder that all ranks of this machine together must have, by `ledger` or else the run's.
    Without a GPU the device's memory is the host's, at the planned peak."""
    ledger = ledger or run.ledger
    ram = drop_reserve(ledger.gpu, run.hardware.gpus_per_node) if run.hardware.gpu.name == "CPU" else {}
    return ram | drop_reserve({**ledger.host, CHECKPOINT_COPY: 0}), drop_reserve(ledger.disk)


def check_fits(run: Run) -> None:
    """Refuse a step, or an evaluation, that does not fit by the planner's ledger, reserves included. Where the planner
    does not decide, refuse only what certainly exceeds host memory or disk: what else a process needs is not
    counted."""
    counts_all = uses_planner(run.config, run.hardware)
    anyway = {"memory.plan=off to try anyway": counts_all}
    for what, holders, have in _lacking(run, run.ledger):
        memory = run.config.memory
        ways: dict[str, object] = {
            "memory.checkpoint=full": run.layout.keep_everything,
            "memory.keep_projections=none": run.layout.keep_projections > run.layout.keep_everything,
            "memory.offload=host": memory.offload == "none" and what == "each GPU",
            "memory.offload=disk": memory.offload == "host" and what == "host memory",
            "memory.keep_attention=none": run.layout.keep_attention > run.layout.keep_projections,
            "memory.offload_optimizer=false": holders.get(STATES),
            "a memory.disk_path with more room": what == "disk",
            **(_ways_to_fit(run) if counts_all else {"more ranks": what == "each GPU", "a shorter data.context": True}),
        }
        raise _does_not_fit(run, f"data.context={run.work.context}", what, holders, have, ways | anyway)
    for what, holders, have in _lacking(run, run.evaluation_ledger) if run.longest_evaluation else ():
        ways = {
            "shorter evaluate.contexts": True,
            f"parallel.cp={run.num_ranks}": run.layout.cp < run.num_ranks,
            "a smaller parallel.heads_per_stage": run.layout.heads_per_stage != run.layout.ulysses,
            "memory.offload_optimizer=true": what == "each GPU" and not run.layout.offload_optimizer,
            "evaluate.every=0 and `ithaka evaluate` afterwards": True,
        }
        raise _does_not_fit(run, f"evaluate.contexts={run.longest_evaluation}", what, holders, have, ways | anyway)


def _lacking(run: Run, ledger: Ledger) -> Iterator[tuple[str, Holders, int]]:
    """Each tier with too little room: its name, what must be there, and what is."""
    counts_all = uses_planner(run.config, run.hardware)
    host, disk = (ledger.host, ledger.disk) if counts_all else needs(run, ledger)
    tiers = {"each GPU": (ledger.gpu if counts_all else {}, ledger.gpu_bytes), "host memory": (host, ledger.host_bytes)}
    tiers["disk"] = (disk, ledger.disk_bytes)
    for what, (holders, have) in tiers.items():
        if sum(holders.values()) > have:
            yield what, holders, have


def _does_not_fit(
    run: Run, field: str, what: str, holders: Holders, have: int, ways: Mapping[str, object]
) -> ConfigError:
    parts = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in holders.items() if num_bytes)
    needed = f"{format_bytes(sum(holders.values()))} of {what} for {run.hardware.gpus_per_node} ranks ({parts})"
    way = format_choices(way for way, helps in ways.items() if helps)
    return ConfigError(f"{field} needs {needed}, but only {format_bytes(have)} is there; use {way}")


def _ways_to_fit(run: Run) -> dict[str, bool]:
    """Found by search, with all settings of memory and parallelism left to the planner."""
    space = SearchSpace(run.shape, run.hardware)
    if space.fits(run.work):
        return {"settings of memory and parallel left to the planner": True, "a shorter data.context": True}
    ways = space.ways_to_fit(run.work)
    gpus = f"{ways.hardware.num_gpus} GPUs ({ways.hardware.name})" if ways.hardware else ""
    return {
        f"data.context={ways.context}": ways.context > 0,
        f"an adapter (adapter.rank={ADAPTER_RANK})": ways.adapter,
        gpus: bool(gpus),
    }


def store_host_bytes(run: Run) -> int | None:
    """What one rank's store may hold in host memory: its share of what is free; with the disk tier only what
    is on its way, so that a disk that is too slow slows the run down instead of filling the memory."""
    kept, ranks = sum(run.ledger.host.get(name, 0) for name in STORE_HOLDERS), run.hardware.gpus_per_node
    to_disk = bool(drop_reserve(run.ledger.disk))
    if not kept and not to_disk:
        return None
    share = run.hardware.host_bytes // ranks
    return min(share, kept // ranks) if to_disk else share


def has_room_to_save(run: Run) -> bool:
    """Whether host memory has room for a copy of what is saved, beside all else that is planned."""
    planned = uses_planner(run.config, run.hardware)
    needed = run.ledger.host_needed if planned else sum(needs(run)[0].values())
    return needed + run.saved_bytes <= run.hardware.host_bytes


def check_settings(config: Config, num_ranks: int, shape: ModelShape) -> None:
    """Refuse what no layout can have, what would have no effect, and what is missing."""
    parallel, memory, attention = config.parallel, config.memory, config.attention
    values: dict[str, Any] = {"parallel.cp": parallel.cp_of(num_ranks), "parallel.ring": parallel.ring}
    values |= {"parallel.replicas": parallel.replicas}
    values |= {"parallel.heads_per_stage": parallel.heads_per_stage, "memory.checkpoint": memory.checkpoint}
    values |= {f"memory.{name}": getattr(memory, name) for name in ("keep_attention", "keep_projections")}
    fixed = fixed_settings(values, shape.num_layers, num_ranks)
    check_fixed(fixed, shape.heads, shape.num_layers, num_ranks)
    check_effects({f"memory.{name}": value for name, value in vars(memory).items()})
    idle_disk = memory.disk_path is not None and "disk" not in (
        memory.offload,
        memory.attention_offload,
    )
    blocks, kernels = (attention.block_q, attention.block_kv), ("auto", *KERNELS)
    no_peft = config.adapter is not None and find_spec("peft") is None
    resized = config.adapter is not None and config.model.resize_embeddings
    # A folder named wandb, which wandb makes where it is used, is found too: it has no origin.
    train = config.train
    unseen = {"keep_best": train.keep_best, "patience": train.patience} if not train.validate_sequences else {}
    unseen |= {"patience": train.patience} if not train.validate_every else {}
    idle = [f"train.{name}={format_value(value)}" for name, value in unseen.items() if value]
    missing = [name for name in config.train.track if getattr(find_spec(name), "origin", None) is None]
    wrong = [
        (
            idle_disk,
            f"memory.disk_path={memory.disk_path} has no effect without memory.offload=disk; leave it null",
        ),
        # Only its name: the ranks, which own the devices, find out whether it runs.
        (
            attention.kernel not in kernels,
            f"attention.kernel={attention.kernel} is unknown; use {format_choices(kernels)}",
        ),
        (blocks.count(None) == 1, f"attention.block_q, block_kv={blocks} go together; set both or neither"),
        (no_peft, "adapter needs an extra: pip install 'ithaka[adapter]', or leave the section out"),
        (resized, "model.resize_embeddings=true cannot go with an adapter, whose base stays as it is; set it to false"),
        (
            idle,
            f"{format_choices(idle)} has no effect without validation; set train.validate_every and validate_sequences",
        ),
        (missing, f"train.track={' '.join(missing)} needs a package: pip install {' '.join(missing)}, or leave it out"),
    ]
    for words in (words for holds, words in wrong if holds):
        raise ConfigError(words)


def check_weights(path: Path | None) -> None:
    """Refuse a model directory without safetensors: training would silently start from random weights."""
    if path is None or not path.is_dir() or any(path.glob("*.safetensors")):
        return
    pickled = next((file.name for file in sorted(path.iterdir()) if file.suffix in (".bin", ".pt", ".pth")), None)
    what = f"has its weights in {pickled}, not in safetensors; convert them" if pickled else "has no weights; add them"
    raise ConfigError(f"model.path={path} {what}, or give {path / 'config.json'} to train from random weights")
