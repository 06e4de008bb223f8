"""Formats of frozen base weights: in the compute dtype, in nf4 and in mxfp4. ops/fourbit.py has
their bits.

`choose_packed` marks the parameters that `pack_weights` packs; `ops.fourbit.unpacked` unpacks them
for one pass of a layer. Files in full precision are packed as they are read; those of bitsandbytes
(nf4, fp4) and of gpt-oss (mxfp4) are read without dequantizing.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Mxfp4Config, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ithaka.config import AdapterConfig, ConfigError
from ithaka.config.base_formats import BASE_FORMATS, quant_method
from ithaka.foreign.hugging_face import set_weight_conversions
from ithaka.ops.fourbit import (
    MXFP4,
    NF4,
    NF4_SINGLE,
    ROW,
    SCALES_AT,
    PackedWeight,
    RowLayout,
    Scales,
    dequantize,
    pack_rows,
    packed_weights,
    quantize_matrix,
)
from ithaka.weights.adapters import base_tensor_name, find_decoder

BASE_QUANTIZATION = "base_quantization"  # key of an adapter file's metadata
PACKED_AS = "packed_as"  # attribute of a module: parameter name -> arguments of PackedWeight
# the name of a tensor's metadata in files
QUANT_STATE = re.compile(r"(.*)\.quant_state\.bitsandbytes__(nf4|fp4)")
STATE_TENSOR = re.compile(
    r".*\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*)"
)


class WeightFormat:
    """How base weights are stored, in files or in training; by default, in the compute dtype."""

    def mark(self, model: PreTrainedModel, adapter: AdapterConfig, files: Mapping) -> None:
        """Mark the parameters that `pack_weights` will pack."""

    def round(self, model: PreTrainedModel, adapter: AdapterConfig) -> None:
        """Replace a full model's weights with those that training uses."""

    def describe(self, adapter: AdapterConfig) -> dict[str, Any]:
        """Describe a quantized base for the adapter file; empty if it is not quantized."""
        return {}

    def load(self, load: Callable[..., PreTrainedModel]) -> PreTrainedModel:
        """Call `load`, which loads such files with plain transformers, and make weights dense."""
        return load()


class Nf4(WeightFormat):
    def mark(self, model: PreTrainedModel, adapter: AdapterConfig, files: Mapping) -> None:
        """Mark frozen linear modules of layers, and experts."""
        skipped = tuple(f".{name}" for name in adapter.unquantized)
        for path, module in find_decoder(model).layers.named_modules():
            if f".{path}".removesuffix(".base_layer").endswith(skipped):
                continue
            num_dims = 2 if isinstance(module, nn.Linear) else 3  # experts
            marks = {}
            for name, param in module.named_parameters(recurse=False):
                fits = param.dim() == num_dims and math.prod(param.shape[-2:]) % NF4.block == 0
                if fits and not param.requires_grad:
                    marks[name] = (NF4,)
            if marks:
                module.__dict__[PACKED_AS] = marks

    def round(self, model: PreTrainedModel, adapter: AdapterConfig) -> None:
        """The weights stay marked to be packed with the same bits."""
        self.mark(model.requires_grad_(False), adapter, {})
        for module in model.modules():
            for name in module.__dict__.get(PACKED_AS, ()):
                rows = []
                param = module._parameters[name]
                for matrix in param.data.view(-1, *param.shape[-2:]):
                    rows.append(quantize_matrix(matrix.flatten().bfloat16(), NF4))
                    dequantize(rows[-1], NF4, matrix)
                module.__dict__[PACKED_AS][name] = (NF4, torch.cat(rows))

    def describe(self, adapter: AdapterConfig) -> dict[str, Any]:
        return {
            "base": "nf4",
            "unquantized": list(adapter.unquantized),
            "block": NF4.block,
            "double_quantization": True,
            "experts": "one matrix at a time",
        }


class Mxfp4(WeightFormat):
    """Experts as in gpt-oss's files. Their values are exact in bf16: there is nothing to round."""

    def mark(self, model: PreTrainedModel, adapter: AdapterConfig, files: Mapping) -> None:
        is_random = not files and model.config.model_type == "gpt_oss"
        found = False
        for path, module in model.named_modules():
            names = []
            for name, param in module._parameters.items():
                is_stored = f"{base_tensor_name(f'{path}.{name}')}_blocks" in files
                if is_stored or (is_random and param is not None and param.dim() == 3):
                    names.append(name)
            if names:
                module.__dict__[PACKED_AS] = {name: (MXFP4,) for name in names}
                found = True
        if not found:
            BASE_FORMATS["mxfp4"].check_family(None)

    def describe(self, adapter: AdapterConfig) -> dict[str, Any]:
        return {"base": "mxfp4", "unquantized": list(adapter.unquantized)}

    def load(self, load: Callable[..., PreTrainedModel]) -> PreTrainedModel:
        return _without_conversions(load(quantization_config=Mxfp4Config(dequantize=True)))


@dataclass(frozen=True)
class Bitsandbytes(WeightFormat):
    """Files in bitsandbytes' 4 bits, which are used as they are, whatever `adapter.base` is."""

    settings: Mapping[str, Any]  # quantization_config in config.json

    def describe(self, adapter: AdapterConfig) -> dict[str, Any]:
        return {
            "base": self.settings.get("bnb_4bit_quant_type") or "fp4",
            "unquantized": self.settings.get("llm_int8_skip_modules") or [],
            "block": NF4.block,
            "double_quantization": self.settings.get("bnb_4bit_use_double_quant") or False,
        }

    def load(self, load: Callable[..., PreTrainedModel]) -> PreTrainedModel:
        return _without_conversions(load().dequantize())


def _without_conversions(model: PreTrainedModel) -> PreTrainedModel:
    set_weight_conversions(model, [])  # they would save the weights under the packed names
    return model


DENSE = WeightFormat()
FORMATS = {"bf16": DENSE, "nf4": Nf4(), "mxfp4": Mxfp4()}  # values of adapter.base


def file_format(config: Mapping[str, Any]) -> WeightFormat:
    """Return the format of a model's files, from its config.json."""
    if (method := quant_method(config)) == "bitsandbytes":
        return Bitsandbytes(config["quantization_config"])
    return FORMATS.get(method or "bf16", DENSE)


def trained_format(adapter: AdapterConfig, config: Mapping[str, Any]) -> WeightFormat:
    """Return the format of the base in a run with this adapter. `config`: its config.json."""
    stored = file_format(config)
    return stored if isinstance(stored, Bitsandbytes) else FORMATS.get(adapter.base, DENSE)


def round_weights(
    model: PreTrainedModel, adapter: AdapterConfig, config: Mapping[str, Any] | None = None
) -> None:
    """Replace a full model's weights with those that a run uses. `config`: its config.json."""
    trained_format(adapter, config or {}).round(model, adapter)


def base_metadata(adapter: AdapterConfig, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of an adapter file that describes a quantized base."""
    description = trained_format(adapter, config).describe(adapter)
    return {BASE_QUANTIZATION: json.dumps(description)} if description else {}


def read_base_metadata(metadata: Mapping[str, str] | None) -> AdapterConfig | None:
    """Return settings with the base that an adapter file describes."""
    description = json.loads((metadata or {}).get(BASE_QUANTIZATION, "null"))
    if description is None:
        return None
    return AdapterConfig(base=description["base"], unquantized=tuple(description["unquantized"]))


def describe_packed(model: nn.Module) -> str:
    """Name the formats of a model's packed weights, in parentheses; empty if it has none."""
    formats = {weight.layout.codes for weight in packed_weights(model).values()}
    return f" (base in {' and '.join(sorted(formats))})" if formats else ""


def check_dense(model: nn.Module) -> None:
    if packed_weights(model):
        fix = "train an adapter, or load it in bfloat16"
        raise ConfigError(f"save_pretrained cannot write a base in 4 bits; {fix}")


# ---- packing and reading


def choose_packed(model: PreTrainedModel, adapter: AdapterConfig | None, files: Mapping) -> None:
    """Mark the parameters that `pack_weights` will pack: those in `files` of bitsandbytes or, if
    there are none, those of `adapter.base`."""
    stored = {}
    for match in map(QUANT_STATE.fullmatch, files):
        if match is not None:
            name, codes = match.groups()
            stored[name] = _bitsandbytes_layout(codes, f"{name}.nested_absmax" in files)
    for path, module in model.named_modules():
        name = base_tensor_name(f"{path}.weight")
        if name in stored and "weight" in module._parameters:  # not a wrapper
            module.__dict__[PACKED_AS] = {"weight": (stored[name],)}
    if adapter is not None and not stored:
        FORMATS[adapter.base].mark(model, adapter, files)


def _bitsandbytes_layout(codes: str, is_double: bool) -> RowLayout:
    return (NF4 if is_double else NF4_SINGLE)._replace(codes=codes)


def pack_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Pack the marked parameters. Call it after the model was probed with unpacked ones."""
    for module in model.modules():
        for name, (layout, *rows) in module.__dict__.pop(PACKED_AS, {}).items():
            PackedWeight(module, name, layout, dtype, *rows)


class DenseWeight(NamedTuple):
    """A parameter in the compute dtype, with PackedWeight's way of writing a shard."""

    shape: torch.Size

    def write(self, full: Tensor, local: Tensor, rows: slice) -> None:
        """Write this rank's shard, `rows` of the first dim of the full tensor."""
        local.copy_(full[rows])


def base_weights(
    model: nn.Module, tensors: Mapping[str, Tensor]
) -> dict[str, PackedWeight | DenseWeight]:
    """Return how to write each tensor of a model. Keys are names in the files of the base."""
    packed = {base_tensor_name(name): weight for name, weight in packed_weights(model).items()}
    return {name: DenseWeight(tensor.shape) for name, tensor in tensors.items()} | packed


def find_scaled_tensors(
    files: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[list[str], list[str]]:
    """Return the model's tensors that are stored in MXFP4, and the other stored parameters: names
    in the files, without bitsandbytes' scales."""
    blocks = [name for name in tensors if f"{name}_blocks" in files and f"{name}_scales" in files]
    parts = {f"{name}_{part}" for name in blocks for part in ("blocks", "scales")}
    return blocks, [
        name for name in files if name not in parts and not STATE_TENSOR.fullmatch(name)
    ]


# (name, shape) of a tensor in a file; raises ConfigError
Check = Callable[[str, Sequence[int]], None]


def read_packed(
    files: Mapping[str, Any],
    name: str,
    weight: PackedWeight,
    local: Tensor,
    rows: slice,
    check: Check,
) -> None:
    """Read rows of a packed weight, from bitsandbytes' files or from full precision."""
    if f"{name}.absmax" in files:
        _read_bitsandbytes(files, name, weight, local, rows)
    else:
        check(name, weight.shape)
        weight.write(files[name].get_slice(name), local, rows)


def _read_bitsandbytes(
    files: Mapping[str, Any], name: str, weight: PackedWeight, local: Tensor, rows: slice
) -> None:
    layout = weight.layout
    is_double = layout.scales == Scales.DOUBLE
    encoded = _read(files, f"{name}.quant_state.bitsandbytes__{layout.codes}", 0, None)
    state = json.loads(bytes(encoded.tolist()))
    expected: dict[str, object] = {"blocksize": 64, "shape": list(weight.shape)}
    if is_double:
        expected["nested_blocksize"] = 256
    for key, value in expected.items():
        if state[key] != value:
            problem = f"{name} has {key}={state[key]}, not {value}"
            raise ConfigError(f"{problem}; quantize the model again with defaults")
    if rows.start == rows.stop:
        return
    blocks = ROW // layout.block
    scales = _read(files, f"{name}.absmax", rows.start * blocks, rows.stop * blocks)
    nested: tuple[Any, ...] = ()
    if is_double:
        means = _read(files, f"{name}.nested_absmax", rows.start, rows.stop)
        nested = (means, state["nested_offset"])
    codes = files[name].get_tensor(name).view(torch.uint8).flatten()
    codes = codes[rows.start * SCALES_AT : rows.stop * SCALES_AT]
    local.view(torch.uint8).copy_(pack_rows(codes, scales, layout, *nested))


def _read(files: Mapping[str, Any], name: str, first: int, last: int | None) -> Tensor:
    return files[name].get_slice(name)[first:last]


def read_blocks(
    files: Mapping[str, Any],
    name: str,
    weight: PackedWeight | DenseWeight,
    local: Tensor,
    rows: slice,
    check: Check,
) -> None:
    """Read experts that gpt-oss stored in MXFP4: blocks [e, N, D / 32, 16], with the first code in
    the low bits. They are dequantized unless the weight has the same format."""
    if not len(local):
        return
    is_same = isinstance(weight, PackedWeight) and weight.layout == MXFP4
    num_experts, *sizes = weight.shape
    outputs, inputs = sizes if is_same else reversed(sizes)
    check(f"{name}_blocks", (num_experts, outputs, inputs // 32, 16))
    blocks = _read(files, f"{name}_blocks", rows.start, rows.stop)
    scales = _read(files, f"{name}_scales", rows.start, rows.stop)
    if not is_same:
        experts = convert_moe_packed_tensors(blocks, scales)
        weight.write(experts, local, slice(0, len(experts)))
        return
    for into, codes, exponents in zip(local.view(torch.uint8), blocks, scales, strict=True):
        into.copy_(pack_rows(((codes << 4) | (codes >> 4)).flatten(), exponents.flatten(), MXFP4))


# ---- modules of bitsandbytes


def convert_bitsandbytes(model: nn.Module) -> None:
    """Replace bitsandbytes' 4-bit linear modules, and PEFT's around them, with plain ones, marked
    to be packed with the same bits."""
    for path, module in list(model.named_modules()):
        kind = f"{type(module).__module__}.{type(module).__name__}"
        if kind == "transformers.integrations.mxfp4.Mxfp4GptOssExperts":
            problem = "has MXFP4 weights in a kernel's layout, which is not supported"
            fix = "load it with Mxfp4Config(dequantize=True)"
            raise ConfigError(
                f"{path} {problem}; {fix}, or train its files with adapter.base=mxfp4"
            )
        if kind == "bitsandbytes.nn.modules.Linear8bitLt":
            problem = "has 8-bit weights (load_in_8bit), which are not supported"
            fix = "load it with BitsAndBytesConfig(load_in_4bit=True), or in bfloat16"
            raise ConfigError(f"{path} {problem}; {fix}")
        if kind == "peft.tuners.lora.bnb.Linear4bit":
            from peft.tuners.lora.layer import Linear as LoraLinear

            module.__class__ = LoraLinear
            module.fan_in_fan_out = False
        elif kind == "bitsandbytes.nn.modules.Linear4bit":
            model.set_submodule(path, _convert_linear(path, module))


def _convert_linear(path: str, module: Any) -> nn.Linear:
    state = module.weight.quant_state
    if state is None or state.blocksize != 64 or getattr(state, "packing_format_for_cpu", False):
        fix = "load the model again, and parallelize it first"
        raise ConfigError(f"{path} is not quantized in blocks of 64; {fix}")
    layout = _bitsandbytes_layout(state.quant_type, state.nested)
    nested = (state.state2.absmax, state.offset) if state.nested else ()
    codes = module.weight.data.view(torch.uint8).flatten()
    sizes = (module.in_features, module.out_features)
    linear = nn.Linear(*sizes, bias=False, device="meta", dtype=state.dtype)
    linear.weight.requires_grad_(False)
    linear.bias = module.bias
    rows = pack_rows(codes, state.absmax, layout, *nested)
    linear.__dict__[PACKED_AS] = {"weight": (layout, rows)}
    return linear.train(module.training)
