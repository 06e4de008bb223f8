"""Check what error messages name and the fix that they offer, not their wording."""

from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from ithaka.cli import app
from ithaka.config import ConfigError
from ithaka.exits import ExitCode


def assert_refused(
    refusal: Callable[[], Any] | str, *named: str, fix: str, error: type[Exception] = ConfigError
) -> str:
    """Assert that a message, or the error of a call, names each setting, value or file, then offers
    a fix; return it.

    The fix follows the first semicolon; without one, the first full stop or else colon.
    """
    if not isinstance(refusal, str):
        with pytest.raises(error) as caught:
            refusal()
        refusal = str(caught.value)
    separator = next((mark for mark in ("; ", ". ", ": ") if mark in refusal), "\n")
    problem, _, offer = refusal.partition(separator)
    missing = [fragment for fragment in named if fragment not in problem]
    assert not missing, f"{missing} not named in: {refusal}"
    assert fix in offer, f"{fix!r} not offered in: {refusal}"
    return refusal


def assert_command_refused(arguments: list[str], *named: str, fix: str) -> None:
    """Assert that the command prints one such line to stderr and exits with the code for wrong
    input."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == ExitCode.WRONG_INPUT, result.output
    one_line = result.stderr.startswith("ConfigError: ") and result.stderr.count("\n") == 1
    assert one_line and result.stdout == "", result.output
    assert_refused(result.stderr.removeprefix("ConfigError: "), *named, fix=fix)
