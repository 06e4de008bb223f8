"""ithaka trains Hugging Face models on long sequences."""

import importlib

__version__ = "0.3.0"


def __getattr__(name: str):
    """The public names below, without importing torch for commands that need none."""
    homes = {
        "parallelize": "ithaka.parallel",
        "token_logprobs": "ithaka.model.logprobs",
        "label_share": "ithaka.model.logprobs",
        "distill": "ithaka.model.distillation",
        "pack_prefixes": "ithaka.model.prefixes",
        "iterate_weights": "ithaka.weights.save_pretrained",
        "Layout": "ithaka.layout",
    }
    if name in homes:
        return getattr(importlib.import_module(homes[name]), name)
    raise AttributeError(f"module 'ithaka' has no attribute {name!r}")
