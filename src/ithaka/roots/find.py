"""Find the root of a model."""

from typing import Any

from transformers import PreTrainedModel

from ithaka.config import ConfigError
from ithaka.layout import check_parallelism
from ithaka.plan.read_config import VISION_FAMILIES
from ithaka.roots.decoder import Decoder
from ithaka.roots.root import Root
from ithaka.roots.video_families import FAMILIES, JOINT_ATTENTION
from ithaka.roots.vision import VisionDecoder


def find_root(model: Any) -> Root:
    """Return the root of a model, or of the base of a PeftModel. Raises ConfigError for anything else."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if hasattr(base, "ithaka_root"):  # it is parallel
        return base.ithaka_root
    classes = type(base).__mro__
    if any(cls.__module__.startswith("diffusers.") for cls in classes):
        family = next((FAMILIES[cls.__name__] for cls in classes if cls.__name__ in FAMILIES), None)
        if family is None:
            name, reason = type(base).__name__, "is not supported"
            if name.startswith(JOINT_ATTENTION):
                reason = "attends jointly to text and video, so text tokens would have to be sharded with the patches"
            fix = f"of diffusers' models, use {' or '.join(FAMILIES)}"
            raise ConfigError(f"parallelize got a {name}, which {reason}; {fix}")
        return family(base)
    if not isinstance(base, PreTrainedModel):
        raise ConfigError(_refuse_class(model))
    if getattr(base.config, "model_type", None) in VISION_FAMILIES:
        return VisionDecoder(base)
    return Decoder(base)


def check_arguments(model: Any, cp: int | None, ring: int | None) -> Root:
    """Refuse a model in a wrapper or without an output head, and numbers of ranks below 1. Return the model's root."""
    kind = type(model).__name__
    for name in ("module", "_orig_mod"):  # set by DistributedDataParallel and torch.compile
        if name in getattr(model, "_modules", ()):
            raise ConfigError(
                f"parallelize got a model wrapped in a {kind}; pass model.{name}: ithaka shards it, and "
                "Layout(compile=True) compiles its layers"
            )
    root = find_root(model)
    if root.predicts_tokens and getattr(root.model, "lm_head", None) is None:
        raise ConfigError(_refuse_class(model))
    check_parallelism(cp=cp, ring=ring)
    return root


def _refuse_class(model: Any) -> str:
    return (
        f"parallelize got a {type(model).__name__}, which is not a transformers language model; use "
        "AutoModelForCausalLM.from_pretrained or from_config"
    )
