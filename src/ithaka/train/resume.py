"""What may change between a run and its continuation (`ithaka train --resume RUN_DIR --set ...`).

| changed                                   | then                                                            |
|-------------------------------------------|-----------------------------------------------------------------|
| train.run_dir                             | refused: the run stays where it is                              |
| train.seed                                | refused: the order of the data comes from it                    |
| data.path and its files, data.tokenizer,  | refused where other tokens would follow: the place in the data  |
| data.text_field, data.validation_fraction | means nothing there. Files that have only moved are the same    |
| model.path, model.embedded                | refused where the weights have another shape; told otherwise    |
| everything else                           | told; on a known GPU refused where the run would not fit        |

The place in the data is a token's, not a sequence's: with another context the next sequence starts at the token after
the last one trained on, and nothing is skipped or repeated. What is told is on the console and at the head of the run's
config.yaml, with the step it holds from.
"""

from __future__ import annotations

import re
from pathlib import Path

from ithaka.config import Config, ConfigError, load, to_dict
from ithaka.plan.shape import ModelShape, read_shape
from ithaka.train import checkpoint

RUN_DIR = "train.run_dir"
OTHER_VALIDATION = "validation losses before and after are of different text"
NOTES = {
    "data.context": f"the data goes on at the next token; {OTHER_VALIDATION}",
    "data.validation_path": OTHER_VALIDATION,
    "train.validate_sequences": OTHER_VALIDATION,
}


def settings_of_run(run_dir: Path) -> Config:
    return load(run_dir / "config.yaml")


def changes(before: Config, after: Config) -> dict[str, str]:
    """The settings that differ, by name, each in words. The run directory may have moved: it is none of them."""
    old, new = to_dict(before), to_dict(after)
    return {
        f"{section}.{key}": _in_words(f"{section}.{key}", old[section][key], value)
        for section, values in new.items()
        for key, value in values.items()
        if value != old[section][key] and f"{section}.{key}" != RUN_DIR
    }


def _in_words(name: str, old: object, new: object) -> str:
    note = f"; {NOTES[name]}" if name in NOTES else ""
    return f"{shown(new)} (was {shown(old)}){note}"


def shown(value: object) -> str:
    """As it is written in a configuration."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def to_go_on_from(run_dir: Path, config: Config) -> Path:
    """The latest checkpoint; there must be steps left to do."""
    found = checkpoint.find(run_dir)
    step = checkpoint.read_state(found)["step"]
    if step >= config.train.steps:
        raise ConfigError(
            f"train.steps={config.train.steps} is reached already by checkpoint {found}; "
            f"to go on give more: --set train.steps={2 * step}"
        )
    return found


def check_changes(run_dir: Path, config: Config, shape: ModelShape) -> None:
    """Refuses what is known before the data is opened; the data itself refuses the rest."""
    seed = settings_of_run(run_dir).train.seed
    if config.train.seed != seed:
        raise ConfigError(
            f"train.seed={config.train.seed} is not the run's {seed}, which the order of its data comes from; "
            "leave it out"
        )
    saved = run_dir / "model" / "config.json"
    if saved.is_file() and read_shape(saved) != shape:
        model = f"path={config.model.path}" if config.model.path else f"embedded={config.model.embedded}"
        raise ConfigError(
            f"model.{model} has another shape than the model of {run_dir}; leave it out, or start a new run"
        )


def history(run_dir: Path, step: int, changed: dict[str, str]) -> str:
    """The comments at the head of the run's config.yaml, with one more where something has changed."""
    file = run_dir / "config.yaml"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    told = [line for line in lines if line.startswith("# ")]
    told += [f"# after step {step}: {name}={words}" for name, words in changed.items()]
    return "".join(line + "\n" for line in told)


def same_validation_after(run_dir: Path) -> int:
    """The step after which all validation was of the same text, from those comments; -1: always."""
    text = (run_dir / "config.yaml").read_text(encoding="utf-8")
    told = re.findall(rf"^# after step (\d+): .*{OTHER_VALIDATION}", text, re.M)
    return max(map(int, told), default=-1)
