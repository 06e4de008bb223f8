"""Grids of test cases, of which `make test` runs a part."""

from collections.abc import Iterable
from itertools import product
from operator import getitem
from typing import Any

import pytest


def diagonal(*lists: Iterable[Any]) -> list[Any]:
    """Return all combinations for `parametrize`; without --slow, only a diagonal runs, which has
    every value once."""
    columns = [list(values) for values in lists]
    chosen = {tuple(i % len(values) for values in columns) for i in range(max(map(len, columns)))}
    cells = product(*(range(len(values)) for values in columns))
    return [
        pytest.param(*map(getitem, columns, cell), marks=[pytest.mark.slow] * (cell not in chosen))
        for cell in cells
    ]
