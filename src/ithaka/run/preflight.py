"""Turn settings and machines into a validated run, before any rank starts and anything is written.

Under torchrun every rank does this. If a check fails on any rank, it is raised on all.

A resumed run may change any setting except train.run_dir, train.seed, and those that change tokens
or the shapes of weights. With another context or other steps, no document is skipped or repeated.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from ithaka.attention.kernels import KERNELS, compile_ahead
from ithaka.checkpoint import checkpoints
from ithaka.comm.agree import ask_rank_0, gather_objects, raise_on_all_ranks
from ithaka.comm.mesh import start_process_group
from ithaka.comm.rank import is_local_rank_0
from ithaka.config import (
    CPU_DEFAULT,
    GPU_DEFAULT,
    Config,
    ConfigError,
    DataConfig,
    explicit_settings,
    format_value,
    load_config,
    parse_config,
    to_dict,
    with_absolute_paths,
)
from ithaka.config.base_formats import required_base
from ithaka.data.documents.files import HUB_DATASET, pin_dataset
from ithaka.facts.model_files import read_json
from ithaka.hub import complete_snapshot, fetch_model, model_files
from ithaka.layout import check_float8, layout_from_config
from ithaka.plan.hardware import Hardware
from ithaka.plan.search import Plan
from ithaka.plan.shape import ModelShape
from ithaka.run import launch, validate
from ithaka.run.resolve import (
    Run,
    check_fits,
    detect_machine,
    model_shape,
    plan_run,
    read_stored_settings,
    trace_shape,
    weakest_machine,
)
from ithaka.run.shapes import read_shape

# --resume auto: resume in train.run_dir if it has a checkpoint, else start there
AUTO = Path("auto")


def preflight(
    file: Path | None,
    changes: list[str],
    resume: Path | None = None,
    run_dir: Path | None = None,
    trains: bool = True,
    force: bool = False,
) -> Run:
    """Resolve, plan and validate the configuration: a config file with changes, or a run to resume.
    `trains` is false for a run that only validates. `force`: the run directory may contain other
    files."""
    if launch.under_torchrun():
        start_process_group()
    name = gather_objects(time.strftime("%Y%m%d-%H%M%S"))[0]  # rank 0's clock names the run

    def find_settings(commits: dict[str, str]) -> Config:
        return resolve(file, changes, resume, run_dir, name, commits)

    commits = _ask_hub_once(find_settings) if launch.under_torchrun() else {}

    def inspect() -> tuple[Config, Hardware, Path | None]:
        config = find_settings(commits)
        num_ranks = launch.decide_ranks(config.parallel.ranks, launch.num_gpus())
        newest = checkpoints.newest_checkpoint(config.train.run_dir) if resume is not None else None
        return config, detect_machine(config, num_ranks, launch.detect_gpu()), newest

    def plan_and_check() -> Run:
        full = configs[0]
        weakest = weakest_machine(machines)
        plan = None
        explicit = explicit_settings(file, changes, default_settings(file, changes))
        if resume not in (None, AUTO):
            explicit = explicit_settings(resume / "config.yaml", changes)
        step = 0
        if full.curriculum and checkpoint is not None:
            step = checkpoints.read_state(checkpoint)["step"]
        config = full.at(step)  # the next entry of a curriculum
        if full.curriculum or resume in (None, AUTO):  # else a resumed run keeps its settings
            config, plan = plan_run(config, explicit, weakest)
        run = validate_run(
            config,
            weakest.num_gpus,
            resume,
            local[1],
            trains,
            force,
            plan,
            full.datasets,
            checkpoint=checkpoint,
        )
        # later entries must fit too
        for start in (end for end in full.ends[:-1] if end >= config.train.steps):
            later, later_plan = plan_run(full.at(start), explicit, weakest)
            later_run = build_run(later, weakest.num_gpus, local[1], resume is not None, later_plan)
            validate.check_inputs(dataclasses.replace(later_run, datasets=full.datasets))
        saved_config = curriculum_to_save(full, explicit, plan) if full.curriculum else ""
        return dataclasses.replace(run, saved_config=saved_config, commits=commits)

    local = raise_on_all_ranks(inspect)
    configs, machines, newest = zip(*gather_objects(local), strict=True)
    raise_on_all_ranks(validate.check_ranks_agree, configs, newest)
    # Looks at every file of a checkpoint, and reads an index that is large if there are many ranks.
    has_checkpoint = newest[0] is not None
    checkpoint = ask_rank_0(_find_checkpoint, configs[0].train.run_dir) if has_checkpoint else None
    run = raise_on_all_ranks(plan_and_check)
    run = dataclasses.replace(run, data_bytes=max(gather_objects(run.data_bytes)))
    if run.finished and run.checkpoint:  # an unfinished run verifies its files in `prepare`
        run = dataclasses.replace(
            run, checkpoint=checkpoints.find_intact_checkpoint(run.checkpoint)
        )
    return run


def _ask_hub_once(find_settings: Callable[[dict[str, str]], Config]) -> dict[str, str]:
    """Ask the hub on rank 0, and download its models on one rank per node. Returns the commits that
    `resolve` adds, so that other ranks make no requests. Collective."""

    def ask() -> tuple[dict[str, str], list[tuple[str, Path, dict[str, int]]]]:
        commits: dict[str, str] = {}
        config = find_settings(commits)
        paths = {"model.path=": config.model.path, "loss.teacher=": config.loss.teacher_path}
        return commits, [
            (setting, path, model_files(path))
            for setting, path in paths.items()
            if path is not None
        ]

    commits, models = ask_rank_0(ask)

    def download() -> None:
        for setting, path, files_of_model in models if is_local_rank_0() else ():
            complete_snapshot(path, files_of_model, setting)

    raise_on_all_ranks(download)
    return commits


def validate_run(
    config: Config,
    num_ranks: int,
    resume: Path | None = None,
    hardware: Hardware | None = None,
    trains: bool = True,
    force: bool = False,
    plan: Plan | None = None,
    datasets: Sequence[DataConfig] = (),
    checkpoint: Path | None = None,
) -> Run:
    """A run with these settings, which can start. Raises ConfigError otherwise; cheap checks come
    first. `datasets`: those of all entries of the curriculum. `checkpoint`: the newest usable one,
    if the caller knows it."""
    run_dir = config.train.run_dir
    auto = resume == AUTO
    if auto:
        resume = run_dir if checkpoints.newest_checkpoint(run_dir) else None
    if resume is None and run_dir is not None:
        validate.check_run_dir(run_dir, auto, force)
    run = build_run(config, num_ranks, hardware, resume is not None, plan)
    if resume is not None:
        checkpoint, changed = find_resume_point(resume, run.config, run.shape, checkpoint)
        run = dataclasses.replace(run, checkpoint=checkpoint, changed=changed)
        validate.check_base(run)
        if trains and run.finished and not auto:
            name = "steps" if run.last_step >= config.train.steps else "patience"
            value = getattr(config.train, name)
            fix = (
                f"raise it: --set train.{name}={2 * (run.last_step if name == 'steps' else value)}"
            )
            if config.curriculum:
                fix = "add entries to the file and use --resume auto"
            raise ConfigError(
                f"train.{name}={value} is already reached by checkpoint {checkpoint}; to "
                f"continue, {fix}"
            )
    if run.hardware.gpu.kernel == "fa4" and launch.num_gpus() and is_local_rank_0():
        # Compiles while this process imports transformers and checks the inputs.
        for head_dim, group in {(kind.head_dim, kind.group) for kind in run.shape.attention_kinds}:
            if run.hardware.for_attention(head_dim).gpu.kernel == "fa4":
                compile_ahead(run.hardware.gpu.name, head_dim, run.layout.dtype or "float32", group)
    run = dataclasses.replace(run, datasets=datasets)
    return dataclasses.replace(run, data_bytes=validate.check_inputs(run))


def build_run(
    config: Config,
    num_ranks: int,
    hardware: Hardware | None,
    resumes: bool,
    plan: Plan | None = None,
) -> Run:
    """A run with these settings, which fits on its machine. `plan`: where they come from."""
    shape = plan.shape if plan else model_shape(config)
    validate.check_settings(config, num_ranks, shape)
    hardware = hardware or detect_machine(config, num_ranks, launch.detect_gpu())
    kernel = config.attention.kernel
    if hardware.gpu.name == "CPU" and kernel != "auto" and KERNELS[kernel].device == "cuda":
        raise ConfigError(
            f"attention.kernel={kernel} needs an NVIDIA GPU, and this machine has none; use auto, "
            "or cpu"
        )
    check_float8(config.memory.stored_dtype, hardware.gpu.name, hardware.gpu.has_float8)
    layout = layout_from_config(
        config, shape.num_layers, num_ranks, hardware.gpu.name != "CPU", shape.heads
    )
    # a plan may find that all of it fits
    if layout.stored_dtype and not (layout.rounds or plan or resumes):
        rule = "has no effect: nothing that a layer keeps in host memory or on disk is rounded"
        fix = (
            "use memory.offload=host, and memory.attention_offload=host if attention is kept, "
            "or leave it out"
        )
        raise ConfigError(f"memory.stored_dtype={layout.stored_dtype} {rule}; {fix}")
    accumulate = config.train.micro_steps(num_ranks // layout.cp)
    if not resumes and config.train.accumulate not in (1, accumulate):
        rule = (
            f"is not the {accumulate} that train.global_batch={config.train.global_batch} implies"
        )
        raise ConfigError(f"train.accumulate={config.train.accumulate} {rule}; leave one out")
    config = dataclasses.replace(
        config, train=dataclasses.replace(config.train, accumulate=accumulate)
    )
    run = Run(config, num_ranks, shape, layout, hardware, plan)
    if plan is None:
        run = dataclasses.replace(run, shape=trace_shape(run))
    check_fits(run)
    if not resumes or run.needs_base:  # else the checkpoint has all weights
        validate.check_weights(config.model.path)
    validate.check_weights(config.loss.teacher_path, "loss.teacher", "learn from")
    return run


def curriculum_to_save(curriculum: Config, explicit: Set[str], plan: Plan | None) -> str:
    """config.yaml of a curriculum, without the settings that are planned for each entry."""
    tree = to_dict(curriculum)
    for section, key in (
        name.split(".") for name in (plan.settings if plan else {}) if name not in explicit
    ):
        del tree[section][key]
    return yaml.safe_dump(with_absolute_paths(tree), sort_keys=False)


# ---- which settings


def resolve(
    file: Path | None,
    changes: list[str],
    resume: Path | None = None,
    run_dir: Path | None = None,
    name: str = "",
    commits: dict[str, str] | None = None,
) -> Config:
    """The run's settings, with its run directory (by default runs/`name`) and the length of its
    learning-rate schedule. Names on the hub get the commits that a resumed run started with, or the
    current ones, which are added to `commits`."""
    validate.check_path("--resume ", None if resume == AUTO else resume)
    if resume is not None and resume != AUTO:
        _check_resumed(file, changes, resume, run_dir)
        file = resume / "config.yaml"
        run_dir = resume
        config = load_config(file, [f"optim.decay_steps={_resumed_decay_steps(file)}", *changes])
    else:
        config = load_config(file, changes, default_settings(file, changes))
        run_dir = run_dir or config.train.run_dir
        if run_dir is None and resume == AUTO:
            fix = "set it in the file, or use --run-dir DIR"
            raise ConfigError(
                f"--resume auto needs train.run_dir, where it looks for the run; {fix}"
            )
        run_dir = run_dir or Path("runs") / name
        validate.check_path("train.run_dir=", run_dir)
        saved = run_dir / "config.yaml"
        if resume == AUTO and config.optim.decay_steps is None and saved.is_file():
            changes = [*changes, f"optim.decay_steps={_resumed_decay_steps(saved)}"]
            config = load_config(file, changes, default_settings(file, changes))
    config = _pin_commits(
        config, {} if commits is None else commits, run_dir if resume is not None else None
    )
    if config.adapter is not None:
        adapter = read_stored_settings(config.adapter, explicit_settings(file, changes))
        config = dataclasses.replace(config, adapter=adapter)
    config = _adopt_quantization(config)
    explicit = explicit_settings(None if run_dir == resume else file, changes)
    if {"train.steps", "train.epochs"} <= explicit and config.train.epochs is not None:
        raise ConfigError(
            f"train.epochs={config.train.epochs} and train.steps both set the length; leave one out"
        )
    config.optim.check_schedule()
    decay_steps = config.optim.decay_steps or (
        config.train.steps if config.train.epochs is None else None
    )
    optim = dataclasses.replace(config.optim, decay_steps=decay_steps)
    return dataclasses.replace(
        config, optim=optim, train=dataclasses.replace(config.train, run_dir=run_dir)
    )


def _pin_commits(config: Config, commits: dict[str, str], resume: Path | None) -> Config:
    """Replace the names of the model and of datasets on the hub, see `resolve`. `resume`: the run's
    directory."""
    if resume is not None and checkpoints.newest_checkpoint(resume) is not None:
        commits |= checkpoints.read_pins(resume).get("commits", {})

    def pin_data(tree: Any, name: str) -> Any:
        if isinstance(tree, list):
            return [pin_data(item, name) for item in tree]
        if isinstance(tree, dict):
            return {key: pin_data(value, f"{name}.{key}") for key, value in tree.items()}
        if not isinstance(tree, str) or not HUB_DATASET.fullmatch(tree):
            return tree
        if tree not in commits:
            commits[tree] = str(pin_dataset(Path(tree), name))
        return commits[tree]

    tree = to_dict(config)
    model = config.model
    pinned = tree | {
        section: pin_data(tree[section], section) for section in ("data", "evaluate", "curriculum")
    }
    config = parse_config(pinned) if pinned != tree else config
    fetched: list[Any] = []
    for name, path in (("model.path=", model.path), ("loss.teacher=", config.loss.teacher_path)):
        fetched.append(fetch_model(path and Path(commits.get(str(path), path)), name))
        if fetched[-1] != path:
            commits[str(path)] = str(fetched[-1])
    loss = dataclasses.replace(config.loss, teacher=fetched[1] or config.loss.teacher)
    return dataclasses.replace(config, model=dataclasses.replace(model, path=fetched[0]), loss=loss)


def _check_resumed(
    file: Path | None, changes: list[str], resume: Path, run_dir: Path | None
) -> None:
    moved = "--set train.run_dir" if "train.run_dir" in explicit_settings(None, changes) else ""
    conflict = f"--run-dir {run_dir}" if run_dir else moved
    if file:
        conflict = f"config={file}"
    if conflict:
        raise ConfigError(
            f"{conflict} conflicts with --resume {resume}; leave it out, and change settings "
            "with --set"
        )
    if not (resume / "config.yaml").is_file():
        raise ConfigError(
            f"--resume {resume} has no config.yaml; use the directory of an earlier run"
        )


def _resumed_decay_steps(file: Path) -> str:
    """optim.decay_steps of a resumed run. A decay that had not begun ends with the longer run."""
    saved = load_config(file)
    end = saved.optim.decay_steps or saved.train.steps
    if saved.optim.schedule == "wsd" and end == saved.train.steps:
        with suppress(ConfigError):  # no usable checkpoint, which `find_resume_point` reports
            step = checkpoints.read_state(checkpoints.find_checkpoint(file.parent, quiet=True))[
                "step"
            ]
            return str(end) if step > saved.optim.decay_start(end) else "null"
    return str(end) if end > saved.optim.warmup_steps else "null"


def default_settings(file: Path | None, changes: list[str]) -> dict[str, dict[str, Any]]:
    """Defaults for the embedded models; a user's own model starts from the plain defaults."""
    if file is not None or any(
        change.replace(" ", "").startswith("model.path=") for change in changes
    ):
        return {}
    return GPU_DEFAULT if launch.num_gpus() else CPU_DEFAULT


# ---- where a run resumes


def _find_checkpoint(run_dir: Path) -> Path:
    checkpoints.check_not_locked(run_dir)
    return checkpoints.find_checkpoint(run_dir)


def find_resume_point(
    run_dir: Path, config: Config, shape: ModelShape, checkpoint: Path | None = None
) -> tuple[Path, dict[str, str]]:
    """The latest checkpoint, by default found here, and a description of each setting that differs
    from the run's. Refuses changes that can be checked without the data; opening the data checks
    the others."""
    checkpoints.check_not_locked(run_dir)
    saved = load_config(run_dir / "config.yaml")
    checkpoint = checkpoint or checkpoints.find_checkpoint(run_dir)
    if config.train.seed != saved.train.seed:
        reason = f"is not the run's {saved.train.seed}, which determines the order of its data"
        raise ConfigError(f"train.seed={config.train.seed} {reason}; leave it out")
    if config.optim.name != saved.optim.name:
        reason = f"cannot continue from the state of optim.name={saved.optim.name}"
        raise ConfigError(
            f"optim.name={config.optim.name} {reason}; leave it out, or start a new run"
        )
    saved_model = run_dir / "model" / "config.json"
    defaults: Any = {"optimizer": "adamw", "reference": False, "teacher": None, "corrections": {}}
    plain = dataclasses.replace(shape.with_adapter(None), **defaults)
    if saved_model.is_file() and read_shape(saved_model) != plain:
        model = (
            f"path={config.model.path}"
            if config.model.path
            else f"embedded={config.model.embedded}"
        )
        reason = f"differs in shape from the model of {run_dir}"
        raise ConfigError(f"model.{model} {reason}; leave it out, or start a new run")
    return checkpoint, _changed_settings(saved, config, checkpoint, run_dir)


def _changed_settings(
    saved: Config, config: Config, checkpoint: Path, run_dir: Path
) -> dict[str, str]:
    old = with_absolute_paths(
        to_dict(saved.at(max(0, checkpoints.read_state(checkpoint)["step"] - 1)))
    )
    # Each entry of a curriculum is planned anew, so config.yaml lacks the planned settings.
    known = explicit_settings(run_dir / "config.yaml") if saved.curriculum else None
    changed = {}
    for section, values in with_absolute_paths(to_dict(config)).items():
        for key, value in (values or {}).items() if section != "curriculum" else ():
            name = f"{section}.{key}"
            was = (old[section] or {}).get(key)
            if value == was or name == "train.run_dir" or (known is not None and name not in known):
                continue
            if section == "adapter":
                raise ConfigError(
                    f"{name}={format_value(value)} is not the run's {format_value(was)}; leave "
                    "it out"
                )
            changed[name] = f"{format_value(value)} (was {format_value(was)})"
    return changed


def _adopt_quantization(config: Config) -> Config:
    """Set adapter.base if the model's files have four bits. They can be trained only with
    adapters."""
    path = config.model.path
    file = path / "config.json" if path is not None else None
    base = required_base(read_json(file)) if file is not None and file.is_file() else None
    if base is None:
        return config
    if config.adapter is None:
        raise ConfigError(
            f"model.path={path} is quantized, so its weights cannot be trained; add an adapter "
            "section"
        )
    return dataclasses.replace(config, adapter=dataclasses.replace(config.adapter, base=base))
