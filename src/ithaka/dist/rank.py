"""This process's rank, from the launcher's environment variables. Imports no torch."""

import os


def is_rank_0() -> bool:
    """Whether this process prints for all ranks. True for a process without a launcher."""
    return os.environ.get("RANK", "0") == "0"


def is_local_rank_0() -> bool:
    """Whether this process acts for its node. True for a process without a launcher."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
