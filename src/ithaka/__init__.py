"""ithaka trains standard transformers on sequences of 100 thousand to 10 million tokens."""

__version__ = "0.1.0"
