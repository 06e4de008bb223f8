import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
import torch

from ithaka.dist.mesh import end_process_group
from ranks import Ranks

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_collection_modifyitems(items):
    """Tests marked `gpu`, and all of tests/gpu, need a CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch finds none")
    for item in items:
        if item.get_closest_marker("gpu") or GPU_TESTS in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def no_group_is_left():
    """A mesh, or a run that failed, leaves its process group behind, and any test may come next."""
    yield
    end_process_group()


@pytest.fixture(scope="session")
def ranks():
    group = Ranks(4)
    yield group
    group.close()
