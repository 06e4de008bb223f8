"""Resolve, plan and validate a run in five stages: read, adopt, machine, plan, check. Each hands
one object to the next, and the last returns a `Run` that may start. Until then nothing is written.

Under torchrun every rank takes the road. One of them adopts and plans for all; if a check fails on
any rank, it is raised on all.

A resumed run may change any setting except train.run_dir, train.seed, and those that change tokens
or the shapes of weights. With another context or other steps, no document is skipped or repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ithaka.checkpoint import checkpoints
from ithaka.comm.agree import ask_rank_0, gather_objects, raise_on_all_ranks
from ithaka.comm.rank import is_local_rank_0
from ithaka.config import (
    Config,
    ConfigError,
    Origin,
    RunEntry,
    embedded_model,
    to_yaml,
)
from ithaka.exits import TransientError
from ithaka.facts.model_files import read_json
from ithaka.hub import complete_snapshot, model_files
from ithaka.layout import layout_from_config
from ithaka.plan.hardware import Hardware
from ithaka.plan.search import Plan, make_search_space, shape_to_train, work_from_config
from ithaka.plan.shape import ModelShape
from ithaka.plan.trace import choose_traced, correct
from ithaka.run import launch, run_files
from ithaka.run.adopt import adopt_settings, check_resumed
from ithaka.run.detect import detect_machine, uses_planner, weakest_machine
from ithaka.run.draft import AUTO, Draft, Request, read_settings
from ithaka.run.fits import check_fits
from ithaka.run.rules import RunFacts, check_run, check_sizes
from ithaka.run.validated import Run
from ithaka.trace.shapes import make_tracer, read_shape, shape_from_config, teacher_shape


@dataclass(frozen=True)
class Planned:
    """Complete settings of a run, or of one entry of its curriculum."""

    config: Config
    shape: ModelShape
    entry: RunEntry = dataclasses.field(default_factory=RunEntry)
    plan: Plan | None = None  # if the planner decided any setting


def prepare_run(request: Request, draft: Draft | None = None) -> Run:
    """Resolve, plan and validate the settings of a run. `draft`: from an earlier call of
    `read_settings`. Collective."""
    if launch.under_torchrun():
        from ithaka.comm.mesh import start_process_group  # late: it imports torch

        start_process_group()
    draft = raise_on_all_ranks(lambda: draft or read_settings(request))
    raise_on_all_ranks(check_ranks_agree, gather_objects(draft.config))
    draft = _adopt_for_all(draft)
    config = draft.config
    num_ranks = raise_on_all_ranks(
        lambda: launch.decide_ranks(config.parallel.ranks, launch.num_gpus())
    )
    own = raise_on_all_ranks(lambda: detect_machine(config, num_ranks, launch.detect_gpu()))
    weakest = raise_on_all_ranks(weakest_machine, gather_objects(own))
    entries = ask_rank_0(plan_entries, draft, weakest)
    run = raise_on_all_ranks(check, draft, entries, weakest.num_gpus, own)
    run = dataclasses.replace(run, data_bytes=max(gather_objects(run.data_bytes)))
    if run.finished and run.checkpoint:  # an unfinished run verifies its files in `prepare`
        checkpoint = checkpoints.find_intact_checkpoint(run.checkpoint)
        run = dataclasses.replace(run, checkpoint=checkpoint)
    return run


# ---- adopt, on all ranks


def _adopt_for_all(draft: Draft) -> Draft:
    """Adopt on rank 0, and give each node the models that rank 0 downloaded."""
    adopted = ask_rank_0(adopt_settings, draft)
    config = adopted.config
    newest = None
    if adopted.request.resume is not None:
        newest = raise_on_all_ranks(checkpoints.newest_checkpoint, adopted.run_dir)
    raise_on_all_ranks(_check_same_checkpoint, adopted.run_dir, gather_objects(newest))
    if launch.under_torchrun():
        models = {"model.path=": config.model.path, "loss.teacher=": config.loss.teacher_path}
        paths = {setting: path for setting, path in models.items() if path is not None}
        names = ask_rank_0(lambda: {name: model_files(path) for name, path in paths.items()})

        def download() -> None:
            for setting, path in paths.items() if is_local_rank_0() else ():
                complete_snapshot(path, names[setting], setting)

        raise_on_all_ranks(download)
    return adopted


def check_ranks_agree(configs: Sequence[Config]) -> None:
    """Refuse ranks with different settings. Under torchrun every node reads its own files."""
    same = repr(configs[0])
    lines_0 = to_yaml(configs[0]).splitlines()
    for rank, config in enumerate(configs):
        if repr(config) == same:  # YAML of each of 1,000 ranks would take seconds
            continue
        for line_0, line in zip(lines_0, to_yaml(config).splitlines(), strict=False):
            if line != line_0:
                difference = f"rank 0 has `{line_0.strip()}` and rank {rank} `{line.strip()}`"
                raise ConfigError(f"{difference}; give every node the same settings")


def _check_same_checkpoint(run_dir: Path, newest: Sequence[Path | None]) -> None:
    """A shared file system may show a new checkpoint late, and collectives would deadlock."""
    for rank, path in enumerate(newest):
        if path != newest[0]:
            difference = (
                f"rank 0 finds {newest[0] or 'no checkpoint'} and rank {rank} {path or 'none'}"
            )
            fix = "start again, or put it on a file system that all nodes share"
            raise TransientError(f"train.run_dir={run_dir}: {difference}; {fix}")


# ---- plan


def plan_entries(draft: Draft, hardware: Hardware) -> list[Planned]:
    """Plan the next entry of a curriculum and those after it, or the run."""
    full = draft.config
    step = 0
    if draft.checkpoint is not None:
        step = checkpoints.read_state(draft.checkpoint)["step"]
    first = full.entry_at(step)
    entries = []
    for index in range(first.index, first.count):
        entry = full.entry_at(sum(each.steps or 0 for each in full.curriculum[:index]))
        config = full.of_entry(index)
        # `--resume DIR` keeps the run's settings; `--resume auto` may find other machines.
        if full.curriculum or draft.request.resume in (None, AUTO):
            planned = plan_settings(config, hardware)
        else:
            planned = Planned(config, model_shape(config))
        entries.append(dataclasses.replace(planned, entry=entry))
    return entries


def plan_settings(config: Config, hardware: Hardware, shape: ModelShape | None = None) -> Planned:
    """Fill in the settings left to the planner from a plan, which may not fit. `shape` defaults to
    the configured model's, whose plan is traced, except under torchrun."""
    traces = shape is None and not launch.under_torchrun()  # a trace has a process group of its own
    shape = shape or model_shape(config)
    if not uses_planner(config, hardware):
        return Planned(config, shape)
    check_run(RunFacts(config, shape, hardware, is_decided=False))
    space = make_search_space(config, shape, hardware)
    trace = make_tracer(model_config(config), always=True) if traces else None
    plan = choose_traced(space, work_from_config(config), trace)
    chosen = {
        name: value
        for name, value in plan.settings.items()
        if name not in config.given or config.get(name) == "auto"
    }
    config = config.with_values(chosen, Origin.PLAN)
    if not config.memory.uses_disk:
        config = config.with_values({"memory.disk_path": None}, Origin.PLAN)
    return Planned(config, plan.shape, plan=plan)


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
    if needed <= shape.vocab:
        return shape
    # Rounded up to a size at which matmuls are fast.
    return dataclasses.replace(shape, vocab=-(-needed // 64) * 64)


# ---- check


def check(draft: Draft, entries: Sequence[Planned], num_ranks: int, hardware: Hardware) -> Run:
    """A run with the settings of the first entry, which can start. Raises ConfigError otherwise;
    cheap checks come first. Also checks the later entries. `hardware`: this rank's."""
    request = draft.request
    config = entries[0].config
    run_dir = config.train.run_dir
    if draft.resumes is None and run_dir is not None:
        run_files.check_run_dir(run_dir, request.resume == AUTO, request.force)
    run = build_run(entries[0], num_ranks, hardware, draft)
    if draft.resumes is not None:
        run = _check_resumed_run(run, draft)
    if run.hardware.gpu.kernel == "fa4" and launch.num_gpus() and is_local_rank_0():
        from ithaka.attention.kernels import compile_ahead  # late: it imports torch

        # Compiles while this process imports transformers and checks the inputs.
        for head_dim, group in {(kind.head_dim, kind.group) for kind in run.shape.attention_kinds}:
            if run.hardware.for_attention(head_dim).gpu.kernel == "fa4":
                compile_ahead(run.hardware.gpu.name, head_dim, run.layout.dtype or "float32", group)
    run = dataclasses.replace(run, data_bytes=run_files.check_inputs(run))
    for later in entries[1:]:
        run_files.check_inputs(build_run(later, num_ranks, hardware, draft))
    return run


def build_run(planned: Planned, num_ranks: int, hardware: Hardware, draft: Draft) -> Run:
    """A run with these settings, which fits on its machine."""
    from ithaka.attention.kernels import KERNELS  # late: it imports torch

    config = planned.config
    shape = planned.shape
    resumes = draft.resumes is not None
    on_gpu = hardware.gpu.name != "CPU"
    check_sizes(config, shape, num_ranks)
    layout = layout_from_config(config, shape.num_layers, num_ranks, on_gpu, shape.heads)
    accumulate = config.train.micro_steps(num_ranks // layout.cp)
    check_run(
        RunFacts(
            config,
            shape,
            hardware,
            layout=layout,
            is_planned=planned.plan is not None,
            resumes=resumes,
            accumulate=accumulate,
            kernels={name: kernel.device for name, kernel in KERNELS.items()},
        )
    )
    config.train.import_callbacks()
    config.loss.import_function()
    if accumulate != config.train.accumulate:
        config = config.with_values({"train.accumulate": accumulate}, Origin.DEFAULT)
    run = Run(
        config,
        num_ranks,
        shape,
        layout,
        hardware,
        planned.plan,
        entry=planned.entry,
        full=draft.config,
        commits=draft.commits,
        saved_origins=draft.saved_origins,
    )
    if planned.plan is None:
        run = dataclasses.replace(run, shape=_trace_shape(run))
    check_fits(run)
    if not resumes or run.needs_base:  # else the checkpoint has all weights
        run_files.check_weights(config.model.path)
    run_files.check_weights(config.loss.teacher_path, "loss.teacher", "learn from")
    return run


def _trace_shape(run: Run) -> ModelShape:
    """The run's shape, corrected by a trace of its layout, as a plan's is."""
    if not uses_planner(run.config, run.hardware) or launch.under_torchrun():
        return run.shape
    plan = Plan(run.shape, run.layout, run.hardware, run.work)
    peaks = make_tracer(model_config(run.config), always=True)(plan)
    return run.shape if peaks is None else correct(plan, peaks).shape


def _check_resumed_run(run: Run, draft: Draft) -> Run:
    """The run with the checkpoint from which it resumes, unless that is refused."""
    assert draft.resumes is not None
    assert draft.saved is not None
    assert draft.checkpoint is not None
    saved_model = draft.resumes / "model" / "config.json"
    defaults: Any = {"optimizer": "adamw", "reference": False, "teacher": None, "corrections": {}}
    plain = dataclasses.replace(run.shape.with_adapter(None), **defaults)
    step = checkpoints.read_state(draft.checkpoint)["step"]
    changed = check_resumed(draft, run.config, step)
    model = run.config.model
    if saved_model.is_file() and read_shape(saved_model) != plain:
        name = f"path={model.path}" if model.path else f"embedded={model.embedded}"
        reason = f"differs in shape from the model of {draft.resumes}"
        raise ConfigError(f"model.{name} {reason}; leave it out, or start a new run")
    run = dataclasses.replace(run, checkpoint=draft.checkpoint, changed=changed)
    run_files.check_base(run, draft.saved)
    is_auto = draft.request.resume == AUTO
    if draft.request.trains and run.finished and not is_auto:
        raise _reached(run)
    return run


def _reached(run: Run) -> ConfigError:
    """The error for a run that has nothing left to do."""
    train = run.config.train
    name = "steps" if run.last_step >= train.steps else "patience"
    value = getattr(train, name)
    more = 2 * (run.last_step if name == "steps" else value)
    fix = f"raise it: --set train.{name}={more}"
    if run.config.curriculum:
        fix = "add entries to the file and use --resume auto"
    return ConfigError(
        f"train.{name}={value} is already reached by checkpoint {run.checkpoint}; to continue, "
        f"{fix}"
    )
