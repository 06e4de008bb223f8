"""LoRA with PEFT's own modules: add them to a model, refuse unsupported options, name tensors as PEFT's files do."""

import dataclasses
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Mxfp4Config
from transformers.utils import logging

from ithaka.config import AdapterConfig, ConfigError, input_error
from ithaka.layer.experts import is_expert_module
from ithaka.layer.linear import is_linear
from ithaka.plan.read_config import VISION_FAMILIES, quant_method, read_json

ADAPTER_NAME = "default"  # PEFT's name for the first adapter
ADAPTER_PREFIX = "base_model.model."  # prefix of tensor names in PEFT's files
# PEFT options -> the only supported value. Variants such as DoRA have options of their own.
REQUIRED_OPTIONS = {
    "peft_type": "LORA",
    "bias": "none",
    "lora_bias": False,
    **dict.fromkeys(("layer_replication", "trainable_token_indices")),
}
REASONS = {"use_dora": " (its gradients need each module's full output again, and the norms of its merged weight)"}
SUPPORTED_INITS = (True, False, "gaussian")  # the others change the base weights


def auto_class(model_type: str) -> Any:
    """Return the auto class of transformers that builds models of this type."""
    return AutoModelForImageTextToText if model_type in VISION_FAMILIES else AutoModelForCausalLM


def lora_options(adapter: AdapterConfig) -> dict[str, Any]:
    """Options of PEFT's LoraConfig that have the same meaning for every model."""
    names = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rslora", "lora_dropout": "dropout"}
    return {option: getattr(adapter, name) for option, name in names.items()}


def make_lora_config(adapter: AdapterConfig, base: Path | None, model: Any) -> Any:
    """Return PEFT's configuration, read from adapter.path or made from the settings."""
    from peft import LoraConfig, PeftConfig

    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if adapter.path is not None:
        config: Any = PeftConfig.from_pretrained(adapter.path)
        config.inference_mode, config.lora_dropout = False, adapter.dropout
        if (init := config.init_lora_weights) not in SUPPORTED_INITS:
            rule = f"has init_lora_weights={init}, which changes the base weights"
            raise ConfigError(f"adapter.path={adapter.path} {rule}; use init_lora_weights=True, False or gaussian")
    else:
        targets = _find_linears(model) if adapter.targets == "all-linear" else list(adapter.targets)
        experts = [target for target in targets if _names_experts(target, model)] if isinstance(targets, list) else []
        config = LoraConfig(
            **lora_options(adapter),
            target_modules=[name for name in targets if name not in experts] if experts else targets,
            target_parameters=experts or None,
            modules_to_save=list(adapter.modules_to_save) or None,
            ensure_weight_tying=tied and bool(adapter.modules_to_save),
            task_type="CAUSAL_LM",
        )
    if config.lora_dropout and config.target_parameters:
        rule = f"cannot be used with adapters on experts ({', '.join(config.target_parameters)})"
        raise ConfigError(f"adapter.dropout={config.lora_dropout} {rule}; leave them out of adapter.targets, or use 0")
    if tied and config.modules_to_save and not config.ensure_weight_tying:
        rule = f"unties modules_to_save={', '.join(config.modules_to_save)} from the weight that the model shares"
        raise ConfigError(f"adapter.path={adapter.path} {rule}; make the adapter with ensure_weight_tying=True")
    config.base_model_name_or_path = str(base) if base else None
    return config


def add_adapter(model: Any, adapter: AdapterConfig, base: Path | None) -> None:
    """Freeze the model and add PEFT's modules, in float32 or wider; modules_to_save replace their frozen originals."""
    from peft import get_peft_model

    config = make_lora_config(adapter, base, model)
    _check_lora_config(config)
    requested = set(config.target_parameters or ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(model, config, ADAPTER_NAME)
    if added := sorted(set(config.target_parameters or ()) - requested):
        rule = f"also names the experts' {', '.join(added)}"
        raise ConfigError(f"adapter.targets {rule}; use names such as q_proj, or experts.down_proj for all experts")
    for name, module in list(model.named_modules()):
        if hasattr(module, "original_module"):
            model.set_submodule(name, module.modules_to_save[ADAPTER_NAME])


def trained_names(config: Any, adapter: AdapterConfig | None) -> list[str]:
    """Names of the parameters that a run trains, from its Hugging Face configuration alone."""
    with torch.device("meta"):
        model = auto_class(config.model_type).from_config(config)
        if adapter is not None:
            add_adapter(model, adapter, None)
    return [name for name, param in model.named_parameters() if param.requires_grad]


def is_stacked(param: Tensor) -> bool:
    """Whether a parameter stacks the weights of several experts. The delta rule's convolution is [channels, 1, W]."""
    return param.dim() == 3 and len(param) > 1 and param.shape[1] > 1


def _find_linears(model: Any) -> str | list[str]:
    """Return all-linear or, if there are experts, which PEFT would adapt too, the names of the other linear modules."""
    vision = model.config.model_type in VISION_FAMILIES
    layers = model.model.language_model.layers if vision else model.model.layers
    parts = [(part, child) for layer in layers for part, child in layer.named_children()]
    mixtures = {part for part, child in parts if any(map(is_stacked, child.parameters()))}
    modules = [item for part, child in parts if part not in mixtures for item in child.named_modules(prefix=part)]
    linears = {name.rpartition(".")[2] for name, module in modules if isinstance(module, nn.Linear)}
    if vision:  # the encoder stays frozen
        return rf"model\.language_model\..*\.({'|'.join(sorted(linears))})"
    return sorted(linears) if mixtures else "all-linear"


def _names_experts(target: str, model: Any) -> bool:
    """Whether a target such as experts.down_proj is a stacked weight, one of PEFT's `target_parameters`."""
    stacked = [name for name, param in model.named_parameters() if param.dim() == 3]
    return "experts." in target and any(f".{name}".endswith(f".{target}") for name in stacked)


def _check_lora_config(config: Any, **required: Any) -> None:
    variants = {f.name: f.default for f in dataclasses.fields(config) if f.metadata.get("is_lora_variant")}
    for name, only in {**REQUIRED_OPTIONS, **variants, **required}.items():
        if ((value := getattr(config, name, only)) or None) != (only or None):
            value = getattr(value, "value", value)  # unwrap an enum
            raise ConfigError(f"PEFT's {name}={value} is not supported{REASONS.get(name, '')}; use {name}={only}")


def check_adapters(model: nn.Module, **required: Any) -> None:
    """Raise ConfigError for PEFT modules that the layers do not support. `required`: further options with one value."""
    active = set()
    for config in getattr(model, "peft_config", {}).values():
        _check_lora_config(config, **required)
    for name, module in model.named_modules():
        is_adapter = hasattr(module, "base_layer") and hasattr(module, "active_adapters")
        if is_adapter and not is_linear(module) and not is_expert_module(module):
            kind = f"PEFT's {type(module).__qualname__} around a {type(module.get_base_layer()).__name__}"
            raise ConfigError(f"{name} is {kind}, which is not supported; use LoRA on nn.Linear, not quantized")
        active |= set(module.active_adapters if is_adapter else ())
    if len(active) > 1:
        raise ConfigError(f"the adapters {', '.join(sorted(active))} are active; activate one with set_adapter()")


def find_active_adapter(base: Any) -> str | None:
    """Return the active adapter of a base model. `check_adapters` rejects more than one."""
    names = (name for module in base.modules() if hasattr(module, "base_layer") for name in module.active_adapters)
    return next(names, None)


def base_tensor_name(param_name: str) -> str:
    """Return a parameter's name in the files of the base model."""
    return param_name.replace(".base_layer", "").replace(".packed_", ".")


def adapter_tensor_name(param_name: str, adapter: str = ADAPTER_NAME, prefix: str = ADAPTER_PREFIX) -> str:
    """Return a parameter's name in adapter_model.safetensors."""
    name = param_name.replace(f".modules_to_save.{adapter}.", ".").replace(f".{adapter}.", ".")
    return prefix + name


def can_merge(base: Any) -> bool:
    """Whether `merge_tensors` supports the model's adapters and the format of its base weights."""
    wrappers = [module for module in base.modules() if hasattr(module, "base_layer")]
    return all(map(is_linear, wrappers)) and not any(".packed_" in name for name, _ in base.named_parameters())


def merge_tensors(base: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merge full tensors, by parameter name, with their adapters in float32 or wider. Others are returned unchanged."""
    merged = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".base_layer.")
        if ".lora_" in name or ".original_module." in name:
            continue
        if module and kind == "weight":
            wrapper = base.get_submodule(module)
            (adapter,) = wrapper.active_adapters
            a_rD, b_Nr = (tensors[f"{module}.{part}.{adapter}.weight"] for part in ("lora_A", "lora_B"))
            wide = torch.promote_types(tensor.dtype, torch.float32)
            tensor = (tensor.to(wide) + wrapper.scaling[adapter] * (b_Nr.to(wide) @ a_rD.to(wide))).to(tensor.dtype)
        merged[re.sub(r"\.modules_to_save\.[^.]+\.", ".", base_tensor_name(name))] = tensor
    return merged


def load_pretrained(folder: Path, config: Any = None, **options: Any) -> Any:
    """Load a model with plain transformers. ConfigError if its files are damaged or do not match its config.json, for
    which transformers would draw random weights."""
    fix, verbosity = "copy the files again, or fix config.json", logging.get_verbosity()
    read_json(folder / "config.json", "MODEL=")
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    logging.set_verbosity_error()  # the tensors that it reports raise errors here
    try:
        config = config or AutoConfig.from_pretrained(folder)
        model, loaded = auto_class(config.model_type).from_pretrained(folder, config=config, **options)
    except (OSError, ValueError, SafetensorError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise input_error(f"MODEL={folder}: the model cannot be loaded ({reason}); {fix}", error) from None
    finally:
        logging.set_verbosity(verbosity)
    if missing := sorted(loaded["missing_keys"]):
        raise ConfigError(f"MODEL={folder} has no tensor {missing[0]} ({len(missing)} missing in total); {fix}")
    if mismatched := sorted(loaded["mismatched_keys"]):
        name, stored, expected = mismatched[0]
        raise ConfigError(f"MODEL={folder}: {name} has shape {tuple(stored)}, not {tuple(expected)}; {fix}")
    return model


def load_dequantized(folder: Path, config: Any = None, **options: Any) -> Any:
    """Load a model with plain transformers. Four-bit weights are dequantized."""
    stored = read_json(folder / "config.json")
    config = config or AutoConfig.from_pretrained(folder)
    if method := quant_method(stored):  # a run's config.json does not have it
        config.quantization_config = stored["quantization_config"]
    if method == "mxfp4":
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    model = load_pretrained(folder, config, **options)
    model = model.dequantize() if method == "bitsandbytes" else model
    if method:
        model._weight_conversions = []  # they would save the weights under the packed names
    return model


def merge_adapter(
    base: Path, adapter: Path, tensors: dict[str, Tensor], out: Path, change: Callable[[Any], None] | None = None
) -> None:
    """Write the base model with the adapter merged in float32, rounded once to the base's dtype. `adapter`: a directory
    with PEFT's configuration, and with a config.json if training changed the base's positions. `tensors`: the
    adapter's, named as in PEFT's files. `change` is called with the base model first."""
    from peft import PeftConfig, get_peft_model, set_peft_model_state_dict

    config = AutoConfig.from_pretrained(adapter if (adapter / "config.json").is_file() else base)
    logging.disable_progress_bar()
    model = load_dequantized(base, config, dtype="auto")
    if change is not None and quant_method(read_json(base / "config.json")) != "bitsandbytes":  # rounded already
        change(model)
    stored = {name: t.dtype for name, t in model.state_dict().items()}  # some tensors are always in float32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the base may have another path than in training
        peft_model = get_peft_model(model.float(), PeftConfig.from_pretrained(adapter))
    try:
        set_peft_model_state_dict(peft_model, tensors)
    except RuntimeError as error:
        reason = str(error).partition("\t")[2].partition("\n")[0]
        fix = "use the base and the adapter_config.json that it was trained with"
        raise ConfigError(f"the adapter {adapter} does not match its base model {base} ({reason}); {fix}") from None
    merged = peft_model.merge_and_unload()
    for name, t in merged.state_dict(keep_vars=True).items():
        t.data = t.data.to(stored[name])
    merged.save_pretrained(out)
