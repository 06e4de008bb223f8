import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    group = Ranks(4)
    yield group
    group.close()
