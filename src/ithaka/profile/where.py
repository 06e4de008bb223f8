"""Which line of code made a tensor, and whether FSDP2 did: read from the stack of Python frames."""

import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import FrameType

import torch
import transformers

import ithaka
from ithaka.phases import GRADIENTS, UNSHARDED

OURS = str(Path(ithaka.__file__).parent)
# Machinery that stands between a tensor and the code that wanted it.
_BETWEEN = (f"{OURS}/profile/", f"{OURS}/phases.py")
_THEIRS = (
    str(Path(torch.__file__).parent),
    str(Path(transformers.__file__).parent),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("stdlib"),
)
_FSDP = f"{_THEIRS[0]}/distributed/fsdp/"
_REDUCING = ("reduce", "post_backward", "to_accumulated_grad", "unsharded_grad")

Frame = tuple[str, int, str]  # file, line, function


@cache
def _is_callers(file: str) -> bool:
    """Whether a file is the user's or ithaka's: neither a library, nor the machinery here, nor made up."""
    if file.startswith("<") or not file.endswith(".py") or file.startswith(_BETWEEN):
        return False
    return file.startswith(OURS) or not file.startswith(_THEIRS)


def stack() -> Iterable[Frame]:
    """The frames of this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        yield code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back


def read(frames: Iterable[Frame]) -> tuple[str, str | None]:
    """(the line that asked for the memory, the holder if FSDP2 asked on its behalf)."""
    holder = None
    for file, line, function in frames:
        if _is_callers(file):
            return f"{shorten(file)}:{line} in {function}", holder
        if file.startswith(_FSDP):
            holder = _fsdp_holder(function, holder)
    return "", holder


def _fsdp_holder(function: str, holder: str | None) -> str:
    if any(part in function for part in _REDUCING):
        return GRADIENTS
    return holder or UNSHARDED


@cache
def shorten(file: str) -> str:
    """ithaka's files from the package down, others with their folder."""
    path = Path(file)
    if file.startswith(OURS):
        return str(path.relative_to(Path(OURS).parent))
    return "/".join(path.parts[-2:])
