"""Files and commands of the user: absolute paths, checks of outputs before the work, files that are
replaced, and commands to print."""

import glob
import os
import shlex
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ithaka.config.fields import ConfigError, input_error
from ithaka.config.sections import BUILTIN_TEMPLATES
from ithaka.exits import TransientError, is_disk_full

# in the <head> of every page that ithaka writes
PAGE_MARK = '<meta name="generator" content="ithaka">'
_PATH_KEYS = {
    "path",
    "validation_path",
    "chat_template",
    "tokenizer",
    "disk_path",
    "data",
    "teacher",
}
# Values of these keys that are names, even if there is a file or folder with that name.
_NOT_PATHS: dict[str, Collection[str]] = {
    "tokenizer": {"bytes"},
    "teacher": {"data"},
    "chat_template": BUILTIN_TEMPLATES,
}


def with_absolute_paths(tree: Any) -> Any:
    """Make the paths and globs in a `to_dict` tree absolute if they match a file; others may be
    datasets on the hub, and names such as a built-in template stay names."""
    if isinstance(tree, list):
        return [with_absolute_paths(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    keys = {key for key, value in tree.items() if key in _PATH_KEYS and isinstance(value, str)}
    keys -= {key for key in keys if tree[key] in _NOT_PATHS.get(key, ())}
    return {
        key: _absolute(value) if key in keys else with_absolute_paths(value)
        for key, value in tree.items()
    }


def _absolute(name: str) -> str:
    path = Path(name).expanduser()
    if os.path.exists(path):
        return str(path.absolute())
    is_glob = not path.is_absolute() and next(glob.iglob(name, recursive=True), None) is not None
    return str(Path(glob.escape(str(Path.cwd()))) / name) if is_glob else name


def check_writable(option: str, path: Path, folder: bool = False) -> None:
    """Refuse a file that cannot be written, or a folder that cannot be created or written to; leave
    no trace. Missing parents of a folder count as creatable. `option` names the path in the
    message."""
    target = nearest = path.absolute()
    try:
        while not nearest.exists() and (folder or nearest == target):
            if folder and nearest.is_symlink():  # dangling, or a loop: stat raises
                nearest.stat()
            nearest = nearest.parent
        if nearest == target and not folder:
            target.open("ab").close()
        # permission bits are not enough: root has them in /proc, where no file can be created
        else:
            tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        reason = f"no file can be created in {nearest} ({error.strerror})"
        raise input_error(
            f"{option}={path} cannot be written: {reason}; give another path", error
        ) from None


@contextmanager
def writing_to(option: str, path: Path) -> Iterator[None]:
    """Raise TransientError if the disk fills up while the output that `option` names is written."""
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        fix = "free space there, or give another path"
        raise TransientError(
            f"{option}={path} cannot be written: the disk is full; {fix}"
        ) from error


def write_atomic(path: Path, text: str) -> None:
    """Replace the file at `path`. After a crash it holds the old text or the new text. Follows no
    symlink: in someone else's directory, it could lead to any of the user's files."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # left by a killed process
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)  # Python does not name it if the disk is full
        raise
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_output(
    option: str,
    path: Path,
    force: bool,
    text: str | None = None,
    *,
    folder: bool = False,
    own: Iterable[str] = (),
) -> None:
    """`check_writable`; and unless `force`, refuse to replace what a user may have written or
    edited. A file may be replaced if it is empty, already contains `text`, or is an ithaka page. A
    folder may contain the names in `own`."""
    check_writable(option, path, folder)
    problem = ""
    if folder and path.is_dir():
        if others := sorted({entry.name for entry in path.iterdir()} - {*own}):
            problem = f"holds other files ({', '.join(others[:3])}{', ...' * (len(others) > 3)})"
    elif path.is_file() and path.stat().st_size:
        content = path.read_bytes()
        is_same = text is not None and content == text.encode()
        problem = "" if is_same or PAGE_MARK.encode() in content[:2000] else "exists"
    if problem and not force:
        effect = "use it anyway" if folder else "replace it"
        raise ConfigError(f"{option}={path} {problem}; give another path, or --force to {effect}")


def shell_command(*words: object) -> str:
    """An `ithaka` command line, quoted for a shell."""
    return shlex.join(["ithaka", *map(str, words)])
