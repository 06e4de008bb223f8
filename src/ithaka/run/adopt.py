"""Complete the settings from the resumed run, the hub, the adapter and the quantized base."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ithaka.checkpoint import checkpoints
from ithaka.config import (
    CPU_DEFAULT,
    GPU_DEFAULT,
    Config,
    ConfigError,
    Origin,
    format_value,
    parse_config,
    read_yaml,
    to_dict,
    with_absolute_paths,
)
from ithaka.config.base_formats import required_base
from ithaka.config.fields import Section
from ithaka.data.documents.files import HUB_DATASET, pin_dataset
from ithaka.facts.model_files import read_json
from ithaka.hub import fetch_model
from ithaka.run import launch
from ithaka.run.draft import AUTO, Draft, check_path
from ithaka.run.rules import check_settings


def adopt_settings(draft: Draft) -> Draft:
    """Complete the settings. Asks the hub, so only one rank calls it."""
    request = draft.request
    config = _with_demo_defaults(draft)
    run_dir = request.resume
    if run_dir is None or run_dir == AUTO:
        run_dir = _choose_run_dir(draft)
    saved = draft.saved
    origins = draft.saved_origins
    resumes = None
    checkpoint = None
    if request.resume is not None:
        file = run_dir / "config.yaml"
        if saved is None and file.is_file():
            tree = read_yaml(file)
            saved = parse_config(tree, origin=Origin.RUN, source=str(file))
            origins = tree.get("origins", {})
        has_checkpoint = checkpoints.newest_checkpoint(run_dir) is not None
        if request.resume != AUTO or has_checkpoint:
            resumes = run_dir
        if resumes is not None:
            checkpoints.check_not_locked(run_dir)
            checkpoint = checkpoints.find_checkpoint(run_dir)
    if saved is not None:
        config = _keep_decay(config, saved, checkpoint)
    pins = checkpoints.read_pins(run_dir) if resumes is not None else {}
    commits = dict(pins.get("commits", {}))
    config = _pin_commits(config, commits)
    config = _adopt_quantization(adopt_adapter(config))
    if config is not draft.config or draft.saved is not None:
        check_settings(config)
    if config.optim.decay_steps is None and config.train.epochs is None:
        config = config.with_values({"optim.decay_steps": config.train.steps}, Origin.DEFAULT)
    origin = config.origin("train.run_dir") if request.run_dir is None else Origin.COMMAND
    config = config.with_values({"train.run_dir": run_dir}, origin)
    return Draft(request, config, resumes, saved, origins, checkpoint, commits)


def _with_demo_defaults(draft: Draft) -> Config:
    """The embedded models have defaults of their own; a user's model starts from the plain ones."""
    config = draft.config
    if draft.request.file is not None or draft.saved is not None or "model.path" in config.given:
        return config
    defaults = GPU_DEFAULT if launch.num_gpus() else CPU_DEFAULT
    values = {
        f"{section}.{key}": value
        for section, settings in defaults.items()
        for key, value in settings.items()
        if f"{section}.{key}" not in config.given
    }
    return config.with_values(values, Origin.DEMO)


def _choose_run_dir(draft: Draft) -> Path:
    run_dir = draft.request.run_dir or draft.config.train.run_dir
    if run_dir is None and draft.request.resume == AUTO:
        fix = "set it in the file, or use --run-dir DIR"
        raise ConfigError(f"--resume auto needs train.run_dir, where it looks for the run; {fix}")
    run_dir = run_dir or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    check_path("train.run_dir=", run_dir)
    return run_dir


def _keep_decay(config: Config, saved: Config, checkpoint: Path | None) -> Config:
    """Keep the decay of a run that is resumed with more steps, unless it had not begun."""
    if config.optim.decay_steps is not None or config.origin("optim.decay_steps") == Origin.COMMAND:
        return config
    end = saved.optim.decay_steps or saved.train.steps
    begins = saved.optim.warmup_steps
    step = end
    is_wsd = saved.optim.schedule == "wsd" and end == saved.train.steps
    if is_wsd and checkpoint is not None:
        begins = saved.optim.decay_start(end)
        step = checkpoints.read_state(checkpoint)["step"]
    kept = end if step > begins else None
    return config.with_values({"optim.decay_steps": kept}, Origin.RUN)


# ---- the hub


def _pin_commits(config: Config, commits: dict[str, str]) -> Config:
    """Replace names on the hub by those with the commits that a resumed run started with, or else
    the current ones, which are added to `commits`. Downloads models."""

    def pin(value: Any, name: str) -> Any:
        if isinstance(value, Section):
            changes = {}
            for field in dataclasses.fields(value):  # type: ignore[arg-type]
                before = getattr(value, field.name)
                pinned = pin(before, f"{name}.{field.name}")
                if pinned != before:
                    changes[field.name] = pinned
            return dataclasses.replace(value, **changes) if changes else value  # type: ignore[type-var]
        if isinstance(value, tuple):
            return tuple(pin(each, name) for each in value)
        if isinstance(value, dict):
            return {key: pin(each, f"{name}.{key}") for key, each in value.items()}
        if not isinstance(value, str | Path) or not HUB_DATASET.fullmatch(str(value)):
            return value
        if str(value) not in commits:
            commits[str(value)] = str(pin_dataset(Path(value), name))
        return type(value)(commits[str(value)])

    for section in ("data", "evaluate", "curriculum"):
        before = getattr(config, section)
        pinned = pin(before, section)
        if pinned != before:
            config = dataclasses.replace(config, **{section: pinned})
    for name, path in (
        ("model.path", config.model.path),
        ("loss.teacher", config.loss.teacher_path),
    ):
        if path is None:
            continue
        fetched = fetch_model(Path(commits.get(str(path), path)), f"{name}=")
        if fetched != path:
            commits[str(path)] = str(fetched)
            config = config.with_values({name: fetched}, config.origin(name))
    return config


# ---- files of adapters and quantized bases


def adopt_adapter(config: Config) -> Config:
    """Take the settings stored in adapter.path, with which those that are given must agree."""
    adapter = config.adapter
    if adapter is None or adapter.path is None:
        return config
    stored = read_json(
        adapter.path / "adapter_config.json", "adapter.path=", "give a directory that PEFT wrote"
    )
    values = _stored_values(adapter.path, stored)
    if "adapter.dropout" in config.given:  # not a property of the weights
        del values["adapter.dropout"]
    for name, value in values.items():
        own = config.get(name)
        is_same = set(own) == set(value) if isinstance(own, tuple) else own == value
        if name in config.given and not is_same:
            rule = f"conflicts with {format_value(value)} in adapter.path={adapter.path}"
            raise ConfigError(f"{name}={format_value(own)} {rule}; leave it out")
    return config.with_values(values, Origin.MODEL)


def _stored_values(path: Path, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that an adapter_config.json of PEFT describes."""
    targets = stored.get("target_modules")
    saved = stored.get("modules_to_save") or ()
    experts = stored.get("target_parameters") or []
    peft_type = stored.get("peft_type")
    if peft_type != "LORA" or not isinstance(targets, list):
        fix = "use an adapter with peft_type=LORA whose target_modules are a list of names"
        raise ConfigError(
            f"adapter.path={path} has peft_type={peft_type}, target_modules={targets}; {fix}"
        )
    return {
        "adapter.rank": stored.get("r"),
        "adapter.alpha": stored.get("lora_alpha"),
        "adapter.rslora": stored.get("use_rslora", False),
        "adapter.dropout": stored.get("lora_dropout", 0.0),
        "adapter.targets": tuple(sorted([*targets, *experts])),
        "adapter.modules_to_save": tuple(sorted({name.rpartition(".")[2] for name in saved})),
    }


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
    return config.with_values({"adapter.base": base}, Origin.MODEL)


# ---- what a resumed run may change


def check_resumed(draft: Draft, config: Config, step: int) -> dict[str, str]:
    """Describe each setting that differs from those of the run to resume at `step`. Refuses changes
    that can be checked without the data; opening the data checks the others."""
    saved = draft.saved
    assert saved is not None
    if config.train.seed != saved.train.seed:
        reason = f"is not the run's {saved.train.seed}, which determines the order of its data"
        raise ConfigError(f"train.seed={config.train.seed} {reason}; leave it out")
    if config.optim.name != saved.optim.name:
        reason = f"cannot continue from the state of optim.name={saved.optim.name}"
        raise ConfigError(
            f"optim.name={config.optim.name} {reason}; leave it out, or start a new run"
        )
    before = saved.at(max(0, step - 1))
    old = with_absolute_paths(to_dict(before))
    changed = {}
    for section, values in with_absolute_paths(to_dict(config)).items():
        for key, value in (values or {}).items() if section != "curriculum" else ():
            name = f"{section}.{key}"
            was = (old[section] or {}).get(key)
            # Each entry of a curriculum is planned anew, so its file lacks the planned settings.
            is_known = name in saved.given or not saved.curriculum
            if value == was or name == "train.run_dir" or not is_known:
                continue
            if section == "adapter":
                raise ConfigError(
                    f"{name}={format_value(value)} is not the run's {format_value(was)}; leave "
                    "it out"
                )
            changed[name] = f"{format_value(value)} (was {format_value(was)})"
    return changed
