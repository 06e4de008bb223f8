"""Check error messages without their wording."""

from collections.abc import Callable
from typing import Any

import pytest

from ithaka.config import ConfigError


def assert_refused(error: object, *named: str, way_out: str) -> None:
    """The message names each setting, value or file in `named`, and offers `way_out` after its first semicolon."""
    message = str(error)
    for words in named:
        assert words in message, f"{words!r} is missing in: {message}"
    assert way_out in message.partition("; ")[2], f"{way_out!r} is not offered in: {message}"


def assert_raises(call: Callable[[], Any], *fragments: str, error: type[Exception] = ConfigError) -> str:
    """`call` raises `error`, and its message has every fragment. Returns the message."""
    with pytest.raises(error) as caught:
        call()
    return assert_mentions(str(caught.value), *fragments)


def assert_mentions(message: str, *fragments: str) -> str:
    missing = [fragment for fragment in fragments if fragment not in message]
    assert not missing, f"{missing} not in: {message}"
    return message
