"""ithaka trains standard transformers on sequences of 100 thousand to 10 million tokens."""

__version__ = "0.1.0"


def __getattr__(name: str):
    """`ithaka.parallelize` and `ithaka.Layout`, without importing torch for commands that need none."""
    if name == "parallelize":
        from ithaka.model.build import parallelize

        return parallelize
    if name == "Layout":
        from ithaka.layout import Layout

        return Layout
    raise AttributeError(f"module 'ithaka' has no attribute {name!r}")
