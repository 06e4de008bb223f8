"""What a command asks for, and the settings that its file and options name. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ithaka.config import (
    Config,
    ConfigError,
    Origin,
    input_error,
    load_config,
    parse_config,
    read_yaml,
)
from ithaka.run.rules import check_settings

# --resume auto: resume in train.run_dir if it has a checkpoint, else start there
AUTO = Path("auto")


@dataclass(frozen=True)
class Request:
    """What a command asks for: a file with changes, or a run to resume. `trains` is false for a run
    that only validates. `force`: the run directory may contain other files."""

    file: Path | None = None
    changes: tuple[str, ...] = ()
    resume: Path | None = None  # a run directory, or AUTO
    run_dir: Path | None = None
    trains: bool = True
    force: bool = False


@dataclass(frozen=True)
class Draft:
    """A run on its way from its settings to its ranks: what is known before it is planned."""

    request: Request
    config: Config  # with all entries of a curriculum
    resumes: Path | None = None  # the directory of the run to resume
    saved: Config | None = None  # that run's settings
    saved_origins: Mapping[str, str] = field(default_factory=dict)  # who had set them
    checkpoint: Path | None = None  # its newest usable one
    # hub name -> the same name with its commit
    commits: Mapping[str, str] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        assert self.config.train.run_dir is not None, "set by adopt_settings"
        return self.config.train.run_dir


def read_settings(request: Request) -> Draft:
    """Read the settings, and refuse those that do not go together."""
    resume = request.resume
    saved = None
    origins: Mapping[str, str] = {}
    if resume is None or resume == AUTO:
        config = load_config(request.file, request.changes)
    else:
        check_path("--resume ", resume)
        if request.file is not None:
            raise _conflict(f"config={request.file}", resume)
        if request.run_dir is not None:
            raise _conflict(f"--run-dir {request.run_dir}", resume)
        file = resume / "config.yaml"
        if not file.is_file():
            raise ConfigError(
                f"--resume {resume} has no config.yaml; use the directory of an earlier run"
            )
        tree = read_yaml(file)
        origins = tree.get("origins", {})
        saved = parse_config(tree, origin=Origin.RUN, source=str(file))
        config = parse_config(tree, request.changes, origin=Origin.RUN, source=str(file))
        if config.origin("optim.decay_steps") == Origin.RUN:  # `adopt_settings` may keep it
            config = config.with_values({"optim.decay_steps": None}, Origin.RUN)
        if config.origin("train.run_dir") == Origin.COMMAND:
            raise _conflict("--set train.run_dir", resume)
    if saved is None:  # a resumed run's decay is settled later
        check_settings(config)
    return Draft(request, config, saved=saved, saved_origins=origins)


def _conflict(what: str, resume: Path) -> ConfigError:
    fix = "leave it out, and change settings with --set"
    return ConfigError(f"{what} conflicts with --resume {resume}; {fix}")


def check_path(option: str, path: Path | None) -> None:
    """Refuse a path that the system cannot look up: a symlink loop, a name that is too long, or a
    directory without permission. It need not exist."""
    try:
        if path is not None:
            path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise input_error(
            f"{option}{path} cannot be used ({error.strerror}); use another directory", error
        ) from None
