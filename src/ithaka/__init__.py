"""ithaka trains standard transformers on sequences of 100 thousand to 10 million tokens."""

__version__ = "0.1.0"


def __getattr__(name: str):
    """`ithaka.parallelize` without importing torch for commands that need none."""
    if name in ("parallelize", "Settings"):
        from ithaka.model import build

        return getattr(build, name)
    raise AttributeError(f"module 'ithaka' has no attribute {name!r}")
