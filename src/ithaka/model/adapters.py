"""LoRA by PEFT's own modules: adds them to a model, refuses by name what the layers do not compute, names tensors as
PEFT's files do."""

import dataclasses
import warnings
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ithaka.config import AdapterConfig, ConfigError, format_value
from ithaka.layer.linear import is_linear
from ithaka.plan.shape import read_json

NAME = "default"  # PEFT's, of the only adapter
# What the layers compute of a PEFT configuration; variants (DoRA and others) have fields of their own.
PLAIN = {"peft_type": "LORA", "bias": "none", "lora_dropout": 0, "lora_bias": False, "layer_replication": None}
PLAIN |= {"target_parameters": None, "trainable_token_indices": None}
INITS = (True, False, "gaussian")  # others change the base weights as well


def read_stored_settings(adapter: AdapterConfig, given: Set[str]) -> AdapterConfig:
    """The settings with those of adapter.path, where it is set; a `given` one must be the same."""
    if adapter.path is None:
        return adapter
    stored = read_json(adapter.path / "adapter_config.json", "adapter.path=", "give a directory that PEFT wrote")
    targets, saved = stored.get("target_modules"), stored.get("modules_to_save") or ()
    if (kind := stored.get("peft_type")) != "LORA" or not isinstance(targets, list):
        what = f"peft_type={kind}, target_modules={targets}"
        raise ConfigError(f"adapter.path={adapter.path} has {what}; only LORA is supported, on modules listed by name")
    values: dict[str, Any] = {
        "rank": stored.get("r"),
        "alpha": stored.get("lora_alpha"),
        "rslora": stored.get("use_rslora", False),
        "targets": tuple(sorted(targets)),
        "modules_to_save": tuple(sorted({name.rpartition(".")[2] for name in saved})),
    }
    for name, value in values.items():
        mine = getattr(adapter, name)
        same = set(mine) == set(value) if isinstance(mine, tuple) else mine == value
        if f"adapter.{name}" in given and not same:
            where = f"adapter.path={adapter.path}"
            raise ConfigError(f"adapter.{name}={format_value(mine)} is {format_value(value)} in {where}; leave it out")
    return dataclasses.replace(adapter, **values)


def make_lora_config(adapter: AdapterConfig, base: Path | None, tied: bool) -> Any:
    """PEFT's configuration: that of adapter.path, or one made from the settings."""
    from peft import LoraConfig, PeftConfig

    if adapter.path is not None:
        config: Any = PeftConfig.from_pretrained(adapter.path)
        config.inference_mode = False
        if (how := config.init_lora_weights) not in INITS:
            raise ConfigError(f"adapter.path={adapter.path} has init_lora_weights={how}, which changes base weights")
    else:
        config = LoraConfig(
            r=adapter.rank,
            lora_alpha=adapter.alpha,
            use_rslora=adapter.rslora,
            target_modules=adapter.targets if isinstance(adapter.targets, str) else list(adapter.targets),
            modules_to_save=list(adapter.modules_to_save) or None,
            ensure_weight_tying=tied and bool(adapter.modules_to_save),
            task_type="CAUSAL_LM",
        )
    if tied and config.modules_to_save and not config.ensure_weight_tying:
        apart = f"trains {' and '.join(config.modules_to_save)} apart from the weight that the model ties them to"
        raise ConfigError(f"adapter.path={adapter.path} {apart}; make it with ensure_weight_tying=True")
    config.base_model_name_or_path = str(base) if base else None
    return config


def add_adapter(model: Any, adapter: AdapterConfig, base: Path | None) -> None:
    """Freezes the model and puts PEFT's modules into it, in float32 or wider.

    A module of modules_to_save keeps its name: there is no frozen copy beside it.
    """
    from peft import get_peft_model

    tied = model.lm_head.weight is model.model.embed_tokens.weight
    config = make_lora_config(adapter, base, tied)
    check_config(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(model, config, NAME)
    for name, module in list(model.named_modules()):
        if hasattr(module, "original_module"):
            model.set_submodule(name, module.modules_to_save[NAME])


def check_config(config: Any) -> None:
    variants = {f.name: f.default for f in dataclasses.fields(config) if f.metadata.get("is_lora_variant")}
    for name, plain in {**PLAIN, **variants}.items():
        if ((value := getattr(config, name, plain)) or None) != (plain or None):
            raise ConfigError(f"PEFT's {name}={getattr(value, 'value', value)} is not supported; use {name}={plain}")


def check_adapters(model: nn.Module) -> None:
    """Refuses, by name, what PEFT put into a model and the layers would not compute."""
    active = set()
    for config in getattr(model, "peft_config", {}).values():
        check_config(config)
    for name, module in model.named_modules():
        adapts = hasattr(module, "base_layer") and hasattr(module, "active_adapters")
        if adapts and not is_linear(module):
            kind = f"PEFT's {type(module).__qualname__} around a {type(module.get_base_layer()).__name__}"
            raise ConfigError(f"{name} is {kind}, which is not supported; use LoRA on nn.Linear, not quantised")
        active |= set(module.active_adapters if adapts else ())
    if len(active) > 1:
        raise ConfigError(f"the adapters {', '.join(sorted(active))} are active; activate one with set_adapter()")


def base_tensor_name(name: str) -> str:
    """A parameter's name in the base model's files."""
    return name.replace(".base_layer.", ".")


def adapter_tensor_name(name: str, adapter: str = NAME) -> str:
    """A parameter's name in adapter_model.safetensors."""
    return "base_model.model." + name.replace(f".modules_to_save.{adapter}.", ".").replace(f".{adapter}.", ".")


def find_active_adapter(base: Any) -> str | None:
    """The one that is active, of a base model with PEFT's modules in it; check_adapters refuses several."""
    names = (name for module in base.modules() if hasattr(module, "base_layer") for name in module.active_adapters)
    return next(names, None)


def merge_adapter(base: Path, adapter: Path, tensors: dict[str, Tensor], out: Path) -> None:
    """Writes the base model with the adapter merged: in float32, rounded once to the dtype that the base names.

    `adapter`: a directory with PEFT's configuration, and, if its positions are not the base's, the config.json that it
    was trained with; `tensors`: named as in PEFT's files.
    """
    from peft import PeftConfig, get_peft_model, set_peft_model_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    trained = AutoConfig.from_pretrained(adapter if (adapter / "config.json").is_file() else base)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(base, config=trained, dtype=torch.float32)
    peft_model = get_peft_model(model, PeftConfig.from_pretrained(adapter))
    set_peft_model_state_dict(peft_model, tensors)
    merged = peft_model.merge_and_unload()
    merged.to(AutoConfig.from_pretrained(base).dtype or torch.float32).save_pretrained(out)
