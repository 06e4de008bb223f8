"""Four-bit base models: which modules are packed, and bitsandbytes' checkpoints and modules."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ithaka.config import AdapterConfig, ConfigError
from ithaka.ops.fourbit import (
    NF4,
    ROW,
    SCALES_AT,
    Format,
    PackedWeight,
    block_scales,
    dequantize,
    pack_rows,
    quantize_nf4,
)
from ithaka.weights.adapters import base_tensor_name, find_decoder

BASE_QUANTIZATION = "base_quantization"  # key of an adapter file's metadata
PACKED_AS = "packed_as"  # attribute of a module: parameter name -> arguments of PackedWeight
QUANT_STATE = re.compile(r"(.*)\.quant_state\.bitsandbytes__(nf4|fp4)")  # the file's name of a tensor's metadata
STATE_TENSOR = re.compile(r".*\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*)")


def choose_packed(model: Any, adapter: AdapterConfig | None, files: Mapping[str, Any]) -> None:
    """Mark the parameters that `pack_weights` will pack: those stored in 4 bits in `files` or, with a four-bit base,
    the frozen linear modules of layers and experts."""
    states = [match for name in files if (match := QUANT_STATE.fullmatch(name))]
    stored = {match[1]: Format(match[2], f"{match[1]}.nested_absmax" in files) for match in states}
    for path, module in model.named_modules():
        name = base_tensor_name(f"{path}.weight")
        if name in stored and "weight" in module._parameters:  # not a wrapper
            module.__dict__[PACKED_AS] = {"weight": (stored[name],)}
    if stored or adapter is None or adapter.base == "bf16":
        return
    if adapter.base == "mxfp4":
        _choose_mxfp4(model, files)
        return
    for path, module in find_decoder(model).layers.named_modules():
        if f".{path}".removesuffix(".base_layer").endswith(tuple(f".{name}" for name in adapter.unquantized)):
            continue
        num_dims = 2 if isinstance(module, nn.Linear) else 3  # experts
        params = [(name, param) for name, param in module.named_parameters(recurse=False) if not param.requires_grad]
        sizes = {name: math.prod(param.shape[-2:]) for name, param in params if param.dim() == num_dims}
        if marks := {name: (NF4,) for name, size in sizes.items() if size % NF4.block == 0}:
            module.__dict__[PACKED_AS] = marks


def _choose_mxfp4(model: Any, files: Mapping[str, Any]) -> None:
    found = False
    for path, module in model.named_modules():
        names = [name for name in module._parameters if f"{base_tensor_name(f'{path}.{name}')}_blocks" in files]
        if not files and model.config.model_type == "gpt_oss":  # random weights
            names = [name for name, param in module.named_parameters(recurse=False) if param.dim() == 3]
        if names:
            module.__dict__[PACKED_AS], found = {name: (Format("mxfp4"),) for name in names}, True
    if not found:
        raise ConfigError("adapter.base=mxfp4 needs a model whose files are in MXFP4 (gpt-oss); use nf4")


def round_weights(model: Any, adapter: AdapterConfig) -> None:
    """Quantize a full model's weights as a run with this adapter does, and replace them with the dequantized values.
    They stay marked to be packed with the same bits."""
    if adapter.base != "nf4":  # MXFP4 files have the same values in bf16
        return
    choose_packed(model.requires_grad_(False), adapter, {})
    for module in model.modules():
        for name in module.__dict__.get(PACKED_AS, ()):
            rows, param = [], module._parameters[name]
            for matrix in param.data.view(-1, *param.shape[-2:]):
                scales = block_scales(flat := matrix.flatten().bfloat16())
                rows.append(quantize_nf4(flat, scales, scales.double().mean().float()))
                dequantize(rows[-1], NF4, matrix)
            module.__dict__[PACKED_AS][name] = (NF4, torch.cat(rows))


def describe_base(adapter: AdapterConfig, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Describe an adapter's quantized base for the adapter file; empty if it is not quantized. `stored`: the base's
    config.json."""
    settings = stored.get("quantization_config") or {}
    if settings.get("quant_method") == "bitsandbytes":  # used as stored, whatever `adapter.base` is
        codes, is_double = settings.get("bnb_4bit_quant_type", "fp4"), settings.get("bnb_4bit_use_double_quant", False)
        skipped = settings.get("llm_int8_skip_modules") or []
        return {"base": codes, "unquantized": skipped, "block": NF4.block, "double_quantization": is_double}
    if adapter.base == "bf16":
        return {}
    nf4 = {"block": NF4.block, "double_quantization": True, "experts": "one matrix at a time"}
    return {
        "base": adapter.base,
        "unquantized": list(adapter.unquantized),
        **(nf4 if adapter.base == "nf4" else {}),
    }


def pack_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Pack the marked parameters. Call it after the model was probed with unpacked ones."""
    for module in model.modules():
        for name, (layout, *rows) in module.__dict__.pop(PACKED_AS, {}).items():
            PackedWeight(module, name, layout, dtype, *rows)


def read_packed(files: Mapping[str, Any], name: str, weight: PackedWeight, local: Tensor, rows: slice) -> None:
    """Copy some rows of a weight that bitsandbytes stored."""
    layout = weight.layout
    encoded = _read(files, f"{name}.quant_state.bitsandbytes__{layout.codes}", 0, None)
    state = json.loads(bytes(encoded.tolist()))
    expected = {"blocksize": 64, "shape": list(weight.shape)} | ({"nested_blocksize": 256} if layout.is_double else {})
    for key, value in expected.items():
        if state[key] != value:
            raise ConfigError(f"{name} has {key}={state[key]}, not {value}; quantize the model again with defaults")
    if rows.start == rows.stop:
        return
    blocks = ROW // layout.block
    scales = _read(files, f"{name}.absmax", rows.start * blocks, rows.stop * blocks)
    nested: tuple[Any, ...] = ()
    if layout.is_double:
        nested = _read(files, f"{name}.nested_absmax", rows.start, rows.stop), state["nested_offset"]
    codes = files[name].get_tensor(name).view(torch.uint8).flatten()[rows.start * SCALES_AT : rows.stop * SCALES_AT]
    local.view(torch.uint8).copy_(pack_rows(codes, scales, layout, *nested))


def _read(files: Mapping[str, Any], name: str, first: int, last: int | None) -> Tensor:
    return files[name].get_slice(name)[first:last]


def convert_bitsandbytes(model: nn.Module) -> None:
    """Replace bitsandbytes' 4-bit linear modules with nn.Linear, marked to be packed with the same bits, and their PEFT
    wrappers with the plain ones."""
    for path, module in list(model.named_modules()):
        kind = f"{type(module).__module__}.{type(module).__name__}"
        if kind == "transformers.integrations.mxfp4.Mxfp4GptOssExperts":
            fix = "load it with Mxfp4Config(dequantize=True), or train its files with adapter.base=mxfp4"
            raise ConfigError(f"{path} has MXFP4 weights in a kernel's layout, which is not supported; {fix}")
        if kind == "bitsandbytes.nn.modules.Linear8bitLt":
            fix = "load it with BitsAndBytesConfig(load_in_4bit=True), or in bfloat16"
            raise ConfigError(f"{path} has 8-bit weights (load_in_8bit), which are not supported; {fix}")
        if kind == "peft.tuners.lora.bnb.Linear4bit":
            from peft.tuners.lora.layer import Linear as LoraLinear

            module.__class__, module.fan_in_fan_out = LoraLinear, False
        elif kind == "bitsandbytes.nn.modules.Linear4bit":
            model.set_submodule(path, _convert_linear(path, module))


def _convert_linear(path: str, module: Any) -> nn.Linear:
    state = module.weight.quant_state
    if state is None or state.blocksize != 64 or getattr(state, "packing_format_for_cpu", False):
        raise ConfigError(f"{path} is not quantized in blocks of 64; load the model again, and parallelize it first")
    layout = Format(state.quant_type, state.nested)
    nested = (state.state2.absmax, state.offset) if state.nested else ()
    codes = module.weight.data.view(torch.uint8).flatten()
    linear = nn.Linear(module.in_features, module.out_features, bias=False, device="meta", dtype=state.dtype)
    linear.weight.requires_grad_(False)
    linear.bias = module.bias
    linear.__dict__[PACKED_AS] = {"weight": (layout, pack_rows(codes, state.absmax, layout, *nested))}
    return linear.train(module.training)
