"""Load weights from safetensors straight into shards, or draw them from a seed; no rank ever holds the full model."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from ithaka.config import ConfigError, input_error
from ithaka.model.adapters import adapter_tensor_name, base_tensor_name
from ithaka.plan.shape import read_json

EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")


@torch.no_grad()
def load_weights(model: PreTrainedModel, directory: Path, vocab_size: int) -> None:
    """Read this rank's rows of every base parameter. `vocab_size`: the stored one; the model may have more tokens."""
    named = model.named_parameters()  # lists a tied weight once, as the embedding
    params = {base_tensor_name(name): param for name, param in named if ".lora_" not in name}
    way_out = "fix config.json, or, if experts are stored one by one, use ithaka.parallelize(from_pretrained(...))"
    _load(params, open_tensor_files(directory), f"model.path={directory}", way_out, vocab_size)


@torch.no_grad()
def load_adapter(model: PreTrainedModel, directory: Path) -> None:
    """Read this rank's rows of PEFT's tensors: the adapters and modules_to_save."""
    files = _open(directory / "adapter_model.safetensors", "adapter.path")
    named = {adapter_tensor_name(name): param for name, param in model.named_parameters()}
    params = {name: param for name, param in named.items() if param.requires_grad or name in files}
    _load(params, files, f"adapter.path={directory}", "fix adapter_config.json")


def _load(params: dict, files: dict, source: str, way_out: str, vocab_size: int | None = None) -> None:
    missing = [name for name in params if name not in files]
    if missing:
        count = f"{len(missing)} missing in total"
        raise ConfigError(f"{source} has no tensor {missing[0]} ({count}); copy the files again, {way_out}")
    # A tied head may be stored too.
    extra = [name for name in files if name not in params and not name.endswith(("inv_freq", "lm_head.weight"))]
    if extra:
        raise ConfigError(f"{source} has a tensor {extra[0]}, which is not in the model; {way_out}")
    for name, param in params.items():
        stored = files[name].get_slice(name)
        num_rows = vocab_size if vocab_size and name in EMBEDDINGS else len(param)
        shape, expected = tuple(stored.get_shape()), (num_rows, *param.shape[1:])
        if shape != expected:
            raise ConfigError(f"{source}: {name} has shape {shape}, but the configuration has {expected}; {way_out}")
        local, rows = local_shard(param)
        num_stored = max(0, min(rows.stop, num_rows) - rows.start)
        if num_stored:
            local[:num_stored].copy_(stored[rows.start : rows.start + num_stored])
        if num_stored < len(local):
            local[num_stored:] = _mean_row(stored, num_rows)


@torch.no_grad()
def init_weights(model: PreTrainedModel, seed: int, only_adapters: bool = False) -> None:
    """Draw weights from the initial distributions of Hugging Face and PEFT. LoRA's B is zero. Each parameter has its
    own generator, so the values do not depend on the number of ranks."""
    for module_name, module in model.named_modules():
        is_adapter = ".lora_" in module_name
        for name, param in module.named_parameters(recurse=False) if is_adapter or not only_adapters else ():
            if name == "bias" or ".lora_B." in module_name:
                param.zero_()
            elif param.dim() == 1:
                param.fill_(1.0)  # a norm's weight
            else:
                local, rows = local_shard(param)
                full = torch.empty(param.shape, dtype=param.dtype, device=local.device)
                key = f"{seed}/{base_tensor_name(f'{module_name}.{name}')}"
                digest = hashlib.sha256(key.encode()).digest()
                generator = torch.Generator(device=local.device).manual_seed(int.from_bytes(digest[:7], "big"))
                if is_adapter:
                    bound = param.shape[1] ** -0.5
                    full.uniform_(-bound, bound, generator=generator)
                else:
                    full.normal_(0.0, model.config.initializer_range, generator=generator)
                if (padding := getattr(module, "padding_idx", None)) is not None:
                    full[padding] = 0.0
                local.copy_(full[rows])


def _mean_row(stored: Any, num_rows: int) -> Tensor:
    """Summed in blocks of rows, in the same order on every rank."""
    starts = range(0, num_rows, 4096)
    return sum((stored[at : min(at + 4096, num_rows)].double().sum(0) for at in starts), torch.zeros(())) / num_rows


def open_tensor_files(directory: Path) -> dict[str, Any]:
    """Tensor name -> open file, by Hugging Face's rule: the single file, else the index's files, else all."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    paths = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if index.is_file() and not single.is_file():
        paths = [directory / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
    return {name: file for path in paths for name, file in _open(path, "model.path").items()}


def _open(path: Path, source: str) -> dict[str, Any]:
    """Tensor name -> open file, for one file. `source`: the setting, for errors."""
    try:
        path.open("rb").close()  # safetensors reports any failure to open a file as a missing file
        file = safe_open(path, framework="pt")
    except Exception as error:
        message = f"{source}: {path} is not a complete safetensors file ({error}); copy it again"
        raise input_error(message, error) from error
    return dict.fromkeys(file.keys(), file)


def local_shard(param: DTensor) -> tuple[Tensor, slice]:
    """This rank's shard of a parameter, and the rows of dim 0 that it covers."""
    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return param.to_local(), slice(offset[0], offset[0] + shape[0])
