"""Hugging Face's trainers on sharded sequences."""

from ithaka.hf.trainers import long_context

__all__ = ["long_context"]
