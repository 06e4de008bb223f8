"""Turn settings and machines into a validated run, before any rank starts and anything is written.

Under torchrun every rank does this. If a check fails on any rank, it is raised on all.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Set
from pathlib import Path

import yaml

from ithaka import launch
from ithaka.checkpoint.files import find_checkpoint, newest_checkpoint, read_state
from ithaka.config import Config, ConfigError, explicit_settings, to_dict, with_absolute_paths
from ithaka.dist.agree import gather_objects, raise_on_all_ranks
from ithaka.dist.mesh import start_process_group
from ithaka.layout import layout_from_config
from ithaka.plan.hardware import Hardware
from ithaka.plan.search import Plan
from ithaka.preflight.checks import check_inputs, check_run_dir, check_settings, check_weights
from ithaka.preflight.machine import detect_machine, model_shape, plan_run, weakest_machine
from ithaka.preflight.memory import check_fits
from ithaka.preflight.ranks import check_ranks_agree
from ithaka.preflight.resolve import AUTO, default_settings, resolve
from ithaka.preflight.resume import find_resume_point, use_intact_checkpoint
from ithaka.preflight.run import Run


def preflight(
    file: Path | None,
    changes: list[str],
    resume: Path | None = None,
    run_dir: Path | None = None,
    trains: bool = True,
    force: bool = False,
) -> Run:
    """Resolve, plan and validate the configuration: a config file with changes, or a run to resume. `trains` is false
    for a run that only validates. `force`: the run directory may contain other files."""
    if launch.under_torchrun():
        start_process_group()
    name = gather_objects(time.strftime("%Y%m%d-%H%M%S"))[0]  # rank 0's clock names the run

    def inspect() -> tuple[Config, Hardware, Path | None]:
        config = resolve(file, changes, resume, run_dir, name)
        num_ranks = launch.decide_ranks(config.parallel.ranks, launch.num_gpus())
        newest = newest_checkpoint(config.train.run_dir) if resume is not None else None
        return config, detect_machine(config, num_ranks, launch.detect_gpu()), newest

    def plan_and_check() -> Run:
        check_ranks_agree(configs, newest)
        config, weakest, plan = configs[0], weakest_machine(machines), None
        explicit = explicit_settings(file, changes, default_settings(file, changes))
        if config.curriculum:
            if resume not in (None, AUTO):
                explicit = explicit_settings(resume / "config.yaml", changes)
            return plan_curriculum(config, explicit, weakest, newest[0])
        if resume in (None, AUTO):  # else a resumed run keeps its settings
            config, plan = plan_run(config, explicit, weakest)
        return dataclasses.replace(validate(config, weakest), plan=plan)

    def plan_curriculum(curriculum: Config, explicit: Set[str], weakest: Hardware, newest: Path | None) -> Run:
        """Plan and validate the next entry, and check that the later ones fit."""
        checkpoint = find_checkpoint(newest.parents[1]) if newest else None
        config, plan = plan_run(curriculum.at(read_state(checkpoint)["step"] if checkpoint else 0), explicit, weakest)
        run = validate(config, weakest)
        for start in (end for end in curriculum.ends[:-1] if end >= config.train.steps):
            later, _ = plan_run(curriculum.at(start), explicit, weakest)
            check_inputs(build_run(later, weakest.num_gpus, own[1], resume is not None))
        return dataclasses.replace(run, plan=plan, saved_config=curriculum_to_save(curriculum, explicit, plan))

    def validate(config: Config, weakest: Hardware) -> Run:
        return validate_run(config, weakest.num_gpus, resume, own[1], trains, force)

    own = raise_on_all_ranks(inspect)
    configs, machines, newest = zip(*gather_objects(own), strict=True)
    run = raise_on_all_ranks(plan_and_check)
    return use_intact_checkpoint(run) if run.finished else run  # an unfinished run verifies its files in `prepare`


def validate_run(
    config: Config,
    num_ranks: int,
    resume: Path | None = None,
    hardware: Hardware | None = None,
    trains: bool = True,
    force: bool = False,
) -> Run:
    """A run with these settings, which can start. Raises ConfigError otherwise; cheap checks come first."""
    run_dir, auto = config.train.run_dir, resume == AUTO
    if auto:
        resume = run_dir if newest_checkpoint(run_dir) else None
    if resume is None and run_dir is not None:
        check_run_dir(run_dir, auto, force)
    run = build_run(config, num_ranks, hardware, resume is not None)
    if resume is not None:
        checkpoint, changed = find_resume_point(resume, run.config, run.shape)
        run = dataclasses.replace(run, checkpoint=checkpoint, changed=changed)
        if trains and run.finished and not auto:
            _raise_finished(run)
    return dataclasses.replace(run, data_bytes=check_inputs(run))


def _raise_finished(run: Run) -> None:
    train = run.config.train
    name = "steps" if run.last_step >= train.steps else "patience"
    value = getattr(train, name)
    fix = f"to continue, raise it: --set train.{name}={2 * value}"
    if run.config.curriculum:
        fix = "to continue, add entries to the file and use --resume auto"
    raise ConfigError(f"train.{name}={value} is already reached by checkpoint {run.checkpoint}; {fix}")


def build_run(config: Config, num_ranks: int, hardware: Hardware | None, resumes: bool) -> Run:
    """A run with these settings, which fits on its machine."""
    shape = model_shape(config)
    check_settings(config, num_ranks, shape)
    hardware = hardware or detect_machine(config, num_ranks, launch.detect_gpu())
    layout = layout_from_config(config, shape.num_layers, num_ranks, hardware.gpu.name != "CPU", shape.heads)
    accumulate = config.train.micro_steps(num_ranks // layout.cp)
    if not resumes and config.train.accumulate not in (1, accumulate):
        rule = f"is not the {accumulate} that train.global_batch={config.train.global_batch} implies"
        raise ConfigError(f"train.accumulate={config.train.accumulate} {rule}; leave one out")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, accumulate=accumulate))
    run = Run(config, num_ranks, shape, layout, hardware)
    check_fits(run)
    if not resumes or config.adapter is not None:  # else the checkpoint has all weights
        check_weights(config.model.path)
    return run


def curriculum_to_save(curriculum: Config, explicit: Set[str], plan: Plan | None) -> str:
    """config.yaml of a curriculum, without the settings that are planned for each entry."""
    tree = to_dict(curriculum)
    for section, key in (name.split(".") for name in (plan.settings if plan else {}) if name not in explicit):
        del tree[section][key]
    return yaml.safe_dump(with_absolute_paths(tree), sort_keys=False)
