"""Find the root of a model."""

from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedModel

from ithaka.config import ConfigError
from ithaka.facts.families import VISION_FAMILIES
from ithaka.foreign.torch_core import COMPILED_MODULE
from ithaka.layout import check_parallelism
from ithaka.roots.decoder import Decoder
from ithaka.roots.root import Root
from ithaka.roots.video_families import find_family
from ithaka.roots.vision import VisionDecoder
from ithaka.weights.adapters import check_adapter_configs, find_base

if TYPE_CHECKING:
    from peft import PeftModel

DECODERS: dict[str, type[Root]] = dict.fromkeys(VISION_FAMILIES, VisionDecoder)  # by model_type


def find_root(model: "PreTrainedModel | PeftModel") -> Root:
    """Return the root of a model, or of a PeftModel's base. Raises ConfigError for others."""
    base = find_base(model)
    if hasattr(base, "ithaka_root"):  # it is parallel
        return base.ithaka_root
    root: type[Root] | None = find_family(type(base))
    if isinstance(base, PreTrainedModel):
        root = DECODERS.get(getattr(base.config, "model_type", ""), Decoder)
    if root is None:
        raise _wrong_class(model)
    return root(base)


def check_arguments(model: nn.Module, cp: int | None = None, ring: int | None = None) -> Root:
    """Return the model's root. Refuses a model in a wrapper, without an output head or with an
    adapter other than LoRA, and numbers of ranks below 1."""
    for name in ("module", COMPILED_MODULE):  # set by DistributedDataParallel and torch.compile
        if name in getattr(model, "_modules", ()):
            kind = type(model).__name__
            raise ConfigError(
                f"parallelize got a model wrapped in a {kind}; pass model.{name}: ithaka shards "
                "it, and Layout(compile=True) compiles its layers"
            )
    root = find_root(model)
    if root.predicts_tokens and getattr(root.model, "lm_head", None) is None:
        raise _wrong_class(model)
    check_adapter_configs(model, **root.lora_options)
    check_parallelism(cp=cp, ring=ring)
    return root


def _wrong_class(model: object) -> ConfigError:
    return ConfigError(
        f"model is a {type(model).__name__}, not a language model of transformers with a head "
        "over its vocabulary; use AutoModelForCausalLM.from_pretrained or from_config"
    )
