"""Check error messages without their wording."""


def assert_refused(error: object, *named: str, way_out: str) -> None:
    """The message names each setting, value or file in `named`, and offers `way_out` after its first semicolon."""
    message = str(error)
    for words in named:
        assert words in message, f"{words!r} is missing in: {message}"
    assert way_out in message.partition("; ")[2], f"{way_out!r} is not offered in: {message}"
