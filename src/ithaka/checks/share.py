"""What `ithaka selftest --json` may write. Imports no torch.

Only the fields of SHARED, and of their values only numbers and text in a known form. Everything
else stays on this machine: names of hosts, users, models and buckets, addresses, paths, environment
variables, messages of errors and what other programs print.
"""

import math
import re
from typing import Any

NUMBER = ""  # or a list of numbers
OWN_WORDS = r"[A-Za-z][\w ,./=()-]{0,99}"  # words that may leave: those of a list in the code
VERSION = r"\d[\w.]*(\+(cpu|cu\d+|rocm[\d.]+))?"
GPU_NAME = r"[A-Za-z][\w ./()-]{0,63}"
ERROR_TYPE = r"[A-Za-z]\w*"
UNIT = r"[\w%]{0,8}"
SOURCE_LINE = r"ithaka(/\w+)+\.py:\d+"
OTHER = "*"  # any other field: its name stands in the code

_DISK = {"free_bytes": NUMBER, "write_bytes_s": NUMBER, "read_bytes_s": NUMBER}
_GPU = {"name": GPU_NAME, "memory_bytes": NUMBER, "compute_capability": VERSION}
_RANK = {
    "versions": {OTHER: VERSION},
    "figures": {OTHER: NUMBER},
    "passed": {OTHER: NUMBER},  # by check
    "python": VERSION,
    "gpus": [_GPU],
    "driver": VERSION,
    "cuda": VERSION,
    "cudnn": NUMBER,
    "nccl": VERSION,
    "kernels": {OTHER: "works|needs a GPU"},
    "host": {OTHER: NUMBER},
    "disk": _DISK,
    "checkpoints": _DISK,
}
SHARED: dict[str, Any] = {
    "seconds": NUMBER,
    "model": OWN_WORDS,  # a built-in one
    "findings": [
        {
            "check": OWN_WORDS,
            "status": OWN_WORDS,
            "figures": {"error": ERROR_TYPE, "where": SOURCE_LINE, OTHER: NUMBER},
        }
    ],
    "ranks": [_RANK],
    "rates": [{"check": OWN_WORDS, "rate": OWN_WORDS, "by rank": {OTHER: NUMBER}}],
    "plan": [{"what": OWN_WORDS, "planned": NUMBER, "measured": NUMBER, "unit": UNIT}],
}


def filter_values(value: object, allowed: object = SHARED) -> object:
    """Return what may be shared of a value; None in place of text and numbers that may not."""
    if isinstance(allowed, dict):
        known = value if isinstance(value, dict) else {}
        kept = {name: each for name, each in known.items() if name in allowed or OTHER in allowed}
        other = allowed.get(OTHER)
        return {str(name): filter_values(kept[name], allowed.get(name, other)) for name in kept}
    if isinstance(value, list | tuple):
        each_allowed = allowed[0] if isinstance(allowed, list) else allowed
        return [filter_values(each, each_allowed) for each in value]
    if isinstance(value, str):
        is_allowed = isinstance(allowed, str) and re.fullmatch(allowed, value)
        return value if is_allowed and allowed != NUMBER else None
    if isinstance(value, bool | int | float):
        return value if math.isfinite(value) else None  # JSON has no infinity
    return None
