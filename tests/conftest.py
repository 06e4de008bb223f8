import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from ithaka.dist.mesh import end_process_group
from ranks import Ranks


def pytest_addoption(parser):
    parser.addoption("--launchers", action="store_true", help="Run what torchrun and Slurm start too; minutes.")


def pytest_collection_modifyitems(items):
    """Tests marked `gpu` need a CUDA device. Others in tests/gpu run on either: on a CPU fewer cases, and small."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch finds none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish():
    """What is imported now stays: a garbage collection would walk through all of torch and transformers each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


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
