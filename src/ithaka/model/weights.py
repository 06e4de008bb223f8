"""Load weights from safetensors straight into shards, or draw them from a seed; no rank ever holds the whole model."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from ithaka.config import ConfigError
from ithaka.plan.shape import read_json

EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")


@torch.no_grad()
def load_weights(model: PreTrainedModel, directory: Path, vocab_size: int) -> None:
    """Reads only this rank's rows of every parameter. The model may have more tokens than the `vocab_size` stored."""
    params = dict(model.named_parameters())  # names a tied weight once, as the embedding
    where = _tensor_files(directory)
    missing = [name for name in params if name not in where]
    if missing:
        raise ConfigError(
            f"model.path={directory} has no tensor {missing[0]} ({len(missing)} missing in all); copy it again, fix "
            "config.json, or (experts one by one) pass AutoModelForCausalLM.from_pretrained(...) to ithaka.parallelize"
        )
    # A tied head may be stored as well.
    extra = [name for name in where if name not in params and not name.endswith(("inv_freq", "lm_head.weight"))]
    if extra:
        raise ConfigError(f"model.path={directory} holds {extra[0]}, which its model does not have; fix config.json")
    for name, param in params.items():
        stored = where[name].get_slice(name)
        num_rows = vocab_size if name in EMBEDDINGS else len(param)
        shape, expected = tuple(stored.get_shape()), (num_rows, *param.shape[1:])
        if shape != expected:
            raise ConfigError(f"model.path: {name} has shape {shape}; its config.json says {expected}")
        local, rows = local_rows(param)
        num_stored = max(0, min(rows.stop, num_rows) - rows.start)
        if num_stored:
            local[:num_stored].copy_(stored[rows.start : rows.start + num_stored])
        if num_stored < len(local):
            local[num_stored:] = _mean_row(stored, num_rows)


@torch.no_grad()
def init_weights(model: PreTrainedModel, seed: int) -> None:
    """Hugging Face's initial distribution. Each parameter has its own generator: the same values on any ranks."""
    std = model.config.initializer_range
    for module_name, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if name == "bias":
                param.zero_()
            elif param.dim() == 1:
                param.fill_(1.0)  # a norm's weight
            else:
                _draw_normal(param, std, f"{seed}/{module_name}.{name}", getattr(module, "padding_idx", None))


def _mean_row(stored: Any, num_rows: int) -> Tensor:
    """In runs of rows, the same on every rank."""
    runs = range(0, num_rows, 4096)
    return sum((stored[at : min(at + 4096, num_rows)].double().sum(0) for at in runs), torch.zeros(())) / num_rows


def _tensor_files(directory: Path) -> dict[str, Any]:
    """The open file of each tensor, by Hugging Face's rule: the single file, else those of the index, else all."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    paths = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if index.is_file() and not single.is_file():
        paths = [directory / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
    found: dict[str, Any] = {}
    for path in paths:
        try:
            file = safe_open(path, framework="pt")
        except Exception as error:
            raise ConfigError(f"model.path: {path} is not a whole safetensors file ({error}); copy it again") from error
        found.update(dict.fromkeys(file.keys(), file))
    return found


def local_rows(param: DTensor) -> tuple[Tensor, slice]:
    """This rank's part of a parameter sharded on dim 0, and the rows it covers."""
    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return param.to_local(), slice(offset[0], offset[0] + shape[0])


def _draw_normal(param: Any, std: float, key: str, zero_row: int | None) -> None:
    local, rows = local_rows(param)
    generator = torch.Generator(device=local.device)
    generator.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big"))
    whole = torch.empty(param.shape, dtype=param.dtype, device=local.device)
    whole.normal_(0.0, std, generator=generator)
    if zero_row is not None:
        whole[zero_row] = 0.0
    local.copy_(whole[rows])
