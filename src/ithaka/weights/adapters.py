"""LoRA with PEFT's own modules: add them to a model, refuse unsupported options, name tensors as
PEFT's files do."""

import dataclasses
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from ithaka.blocks.experts import is_expert_module, is_stacked
from ithaka.blocks.linear import is_linear
from ithaka.config import AdapterConfig, ConfigError
from ithaka.facts.families import VISION_FAMILIES
from ithaka.ops.fourbit import packed_weights

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

ADAPTER_NAME = "default"  # PEFT's name for the first adapter
ADAPTER_PREFIX = "base_model.model."  # prefix of tensor names in PEFT's files
# PEFT options -> the only supported value. Variants such as DoRA have options of their own.
REQUIRED_OPTIONS = {
    "peft_type": "LORA",
    "bias": "none",
    "lora_bias": False,
    **dict.fromkeys(("layer_replication", "trainable_token_indices")),
}
REASONS = {
    "use_dora": (
        " (its gradients need each module's full output again, and the norms of its merged weight)"
    )
}
# all others: AutoModelForCausalLM
AUTO_CLASSES = dict.fromkeys(VISION_FAMILIES, AutoModelForImageTextToText)
# Decoders that AutoModelForCausalLM knows only as parts of other models.
DECODER_CLASSES = {"emu3_text_model": "Emu3ForCausalLM"}
SUPPORTED_INITS = (True, False, "gaussian")  # the others change the base weights


def auto_class(model_type: str) -> Any:  # a class
    if model_type in DECODER_CLASSES:
        decoder = getattr(transformers, DECODER_CLASSES[model_type])
        AutoModelForCausalLM.register(decoder.config_class, decoder, exist_ok=True)
    return AUTO_CLASSES.get(model_type, AutoModelForCausalLM)


def lora_options(adapter: AdapterConfig) -> dict[str, Any]:
    """Options of PEFT's LoraConfig that have the same meaning for every model."""
    names = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rslora", "lora_dropout": "dropout"}
    return {option: getattr(adapter, name) for option, name in names.items()}


def make_lora_config(
    adapter: AdapterConfig, base: Path | None, model: PreTrainedModel
) -> "LoraConfig":
    """Return PEFT's configuration, read from adapter.path or made from the settings."""
    from peft import LoraConfig, PeftConfig

    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    source = f"adapter.path={adapter.path}"
    if adapter.path is not None:
        config = PeftConfig.from_pretrained(adapter.path)
        config.inference_mode = False
        config.lora_dropout = adapter.dropout
        if (init := config.init_lora_weights) not in SUPPORTED_INITS:
            rule = f"has init_lora_weights={init}, which changes the base weights"
            raise ConfigError(f"{source} {rule}; use init_lora_weights=True, False or gaussian")
    else:
        targets = _find_linears(model) if adapter.targets == "all-linear" else list(adapter.targets)
        experts = []
        if isinstance(targets, list):
            experts = [target for target in targets if _names_experts(target, model)]
            targets = [name for name in targets if name not in experts]
        config = LoraConfig(
            **lora_options(adapter),
            target_modules=targets,
            target_parameters=experts or None,
            modules_to_save=list(adapter.modules_to_save) or None,
            ensure_weight_tying=tied and bool(adapter.modules_to_save),
            task_type="CAUSAL_LM",
        )
    if config.lora_dropout and config.target_parameters:
        names = ", ".join(config.target_parameters)
        raise ConfigError(
            f"adapter.dropout={config.lora_dropout} cannot be used with adapters on experts "
            f"({names}); leave them out of adapter.targets, or use 0"
        )
    if tied and config.modules_to_save and not config.ensure_weight_tying:
        names = ", ".join(config.modules_to_save)
        raise ConfigError(
            f"{source} unties modules_to_save={names} from the weight that the model shares; make "
            "the adapter with ensure_weight_tying=True"
        )
    config.base_model_name_or_path = str(base) if base else None
    return config


def add_adapter(model: PreTrainedModel, adapter: AdapterConfig, base: Path | None) -> None:
    """Freeze the model and add PEFT's modules, in float32 or wider."""
    from peft import get_peft_model

    config = make_lora_config(adapter, base, model)
    _check_lora_config(config)
    requested = set(config.target_parameters or ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(model, config, ADAPTER_NAME)
    if added := sorted(set(config.target_parameters or ()) - requested):
        fix = "use names such as q_proj, or experts.down_proj for all experts"
        raise ConfigError(f"adapter.targets also names the experts' {', '.join(added)}; {fix}")
    for name, module in list(model.named_modules()):
        if hasattr(module, "original_module"):
            model.set_submodule(name, module.modules_to_save[ADAPTER_NAME])


def trained_names(config: PreTrainedConfig, adapter: AdapterConfig | None) -> list[str]:
    """Names of the parameters that a run trains, from its configuration alone."""
    with torch.device("meta"):
        model = auto_class(config.model_type).from_config(config, trust_remote_code=False)
        if adapter is not None:
            add_adapter(model, adapter, None)
    return [name for name, param in model.named_parameters() if param.requires_grad]


def _find_linears(model: PreTrainedModel) -> str | list[str]:
    """Return all-linear or, as PEFT would adapt experts too, the names of other linear modules."""
    model_type = model.config.model_type
    parts = [item for layer in find_decoder(model).layers for item in layer.named_children()]
    mixtures = {part for part, child in parts if any(map(is_stacked, child.parameters()))}
    linears = set()
    for part, child in parts:
        if part in mixtures:
            continue
        for name, module in child.named_modules(prefix=part):
            if isinstance(module, nn.Linear):
                linears.add(name.rpartition(".")[2])
    refused = {"out_proj"} if model_type in ("falcon_h1", "nemotron_h") else set()  # by PEFT
    if not linears - refused:
        rule = "leaves out modules that are called as another layer's experts, here all of them"
        fix = "use names such as [q_proj, o_proj, in_proj]"
        raise ConfigError(f"adapter.targets=all-linear {rule}; {fix}")
    if model_type in VISION_FAMILIES:  # the encoder stays frozen
        return rf"model\.language_model\..*\.({'|'.join(sorted(linears))})"
    return sorted(linears - refused) if mixtures or refused else "all-linear"


def _names_experts(target: str, model: PreTrainedModel) -> bool:
    """Whether a target such as experts.down_proj is one of PEFT's `target_parameters`."""
    stacked = [name for name, param in model.named_parameters() if param.dim() == 3]
    return "experts." in target and any(f".{name}".endswith(f".{target}") for name in stacked)


def _check_lora_config(config: "LoraConfig", **required: object) -> None:
    variants = {
        f.name: f.default for f in dataclasses.fields(config) if f.metadata.get("is_lora_variant")
    }
    for name, only in {**REQUIRED_OPTIONS, **variants, **required}.items():
        if ((value := getattr(config, name, only)) or None) != (only or None):
            value = getattr(value, "value", value)  # unwrap an enum
            reason = REASONS.get(name, "")
            raise ConfigError(f"PEFT's {name}={value} is not supported{reason}; use {name}={only}")


def check_adapter_configs(model: nn.Module, **required: object) -> None:
    """Refuse other adapters than LoRA, and other options than supported and `required` ones."""
    for config in getattr(model, "peft_config", {}).values():
        _check_lora_config(config, **required)


def check_adapters(model: nn.Module, **required: object) -> None:
    """Also refuse PEFT modules that the layers do not support."""
    check_adapter_configs(model, **required)
    active = set()
    for name, module in model.named_modules():
        is_adapter = hasattr(module, "base_layer") and hasattr(module, "active_adapters")
        if is_adapter and not is_linear(module) and not is_expert_module(module):
            base = type(module.get_base_layer()).__name__
            kind = f"PEFT's {type(module).__qualname__} around a {base}"
            fix = "use LoRA on nn.Linear, not quantized"
            raise ConfigError(f"{name} is {kind}, which is not supported; {fix}")
        if is_adapter:
            active |= set(module.active_adapters)
    if len(active) > 1:
        raise ConfigError(
            f"the adapters {', '.join(sorted(active))} are active; activate one with set_adapter()"
        )


def find_base(model: "PreTrainedModel | PeftModel") -> PreTrainedModel:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def find_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The model with the embeddings, the layers and the last norm."""
    return getattr(model.model, "language_model", model.model)


def find_active_adapter(base: PreTrainedModel) -> str | None:
    """Return the only active adapter (`check_adapters`)."""
    for module in base.modules():
        if hasattr(module, "base_layer") and module.active_adapters:
            return module.active_adapters[0]
    return None


def base_tensor_name(param_name: str) -> str:
    """Return a parameter's name in the files of the base model."""
    return param_name.replace(".base_layer", "").replace(".packed_", ".")


def adapter_tensor_name(
    param_name: str, adapter: str = ADAPTER_NAME, prefix: str = ADAPTER_PREFIX
) -> str:
    """Return a parameter's name in adapter_model.safetensors."""
    name = param_name.replace(f".modules_to_save.{adapter}.", ".").replace(f".{adapter}.", ".")
    return prefix + name


def can_merge(base: nn.Module) -> bool:
    """Whether `merge_tensors` supports the model's adapters and the format of its base weights."""
    wrappers = [module for module in base.modules() if hasattr(module, "base_layer")]
    return all(map(is_linear, wrappers)) and not packed_weights(base)


def merge_tensors(base: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merge full tensors, by parameter name, with their adapters, in float32 or wider."""
    merged = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".base_layer.")
        if ".lora_" in name or ".original_module." in name:
            continue
        if module and kind == "weight":
            wrapper = base.get_submodule(module)
            (adapter,) = wrapper.active_adapters
            a_rD = tensors[f"{module}.lora_A.{adapter}.weight"]
            b_Mr = tensors[f"{module}.lora_B.{adapter}.weight"]
            wide = torch.promote_types(tensor.dtype, torch.float32)
            scale = wrapper.scaling[adapter]
            tensor = (tensor.to(wide) + scale * (b_Mr.to(wide) @ a_rD.to(wide))).to(tensor.dtype)
        merged[re.sub(r"\.modules_to_save\.[^.]+\.", ".", base_tensor_name(name))] = tensor
    return merged
