"""The planted errors of mutations.py can still be planted."""

import shlex

from mutations import MUTATIONS, ROOT, plant


def test_every_error_can_be_planted():
    """Each error's text occurs exactly once in its file, and the test file that should catch it
    exists."""
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
    for mutation in MUTATIONS:
        assert plant(mutation, ROOT / "src/ithaka") and mutation.old != mutation.new
        assert (ROOT / "tests" / shlex.split(mutation.tests)[0]).is_file(), mutation.name
