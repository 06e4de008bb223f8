"""Whether a command can write where it was told to: asked before the work, not after it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ithaka.config import ConfigError


def check_file(option: str, path: Path) -> None:
    """Refuses a file that cannot be written, and leaves no trace; `option` is what gave the path."""
    try:
        there = path.exists()
        if there:
            path.open("ab").close()
        if not there or path.is_file():  # a device needs no room beside it
            _check_folder(path.absolute().parent)
    except OSError as error:
        raise _refusal(option, path, error) from None


def check_new_folder(option: str, path: Path) -> None:
    """Refuses a folder that cannot be made, with its missing parents."""
    try:
        _check_folder(next(parent for parent in path.absolute().parents if parent.exists()))
    except OSError as error:
        raise _refusal(option, path, error) from None


def _check_folder(folder: Path) -> None:
    # Permissions do not tell all: root has them in /proc, where nothing can be made.
    with tempfile.TemporaryFile(dir=folder):
        pass


def _refusal(option: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{option}={path} cannot be written: {error.strerror}; give another path")
