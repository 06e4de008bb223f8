"""Weights straight from safetensors into shards, or drawn from a seed; no rank ever holds the whole model."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from ithaka.config import ConfigError
from ithaka.plan.shape import read_json


@torch.no_grad()
def load_weights(model: PreTrainedModel, directory: Path) -> None:
    """Reads, for every parameter, only the rows of this rank's shard."""
    where = _tensor_files(directory)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    params = dict(model.named_parameters())  # names a tied weight once, as the embedding
    missing = sorted(set(params) - set(where))
    if missing and any(".experts." in name for name in missing):
        raise ConfigError(
            f"model.path={directory} keeps its experts one by one, which cannot go straight into shards yet; load it "
            "with AutoModelForCausalLM.from_pretrained and pass it to ithaka.parallelize"
        )
    if missing:
        raise ConfigError(f"model.path={directory} has no tensor {missing[0]} ({len(missing)} missing in all)")
    extra = sorted(k for k in set(where) - set(params) if not _is_derived(k, tied))
    if extra:
        raise ConfigError(f"model.path={directory} holds {extra[0]}, which the model does not have")
    by_file: dict[Path, list[str]] = {}
    for name in params:
        by_file.setdefault(where[name], []).append(name)
    for path, names in by_file.items():
        with _opened(path) as file:
            for name in names:
                _copy_shard(params[name], file.get_slice(name), f"{path.name}: {name}")


@torch.no_grad()
def init_weights(model: PreTrainedModel, seed: int) -> None:
    """Hugging Face's initial distribution, each parameter from its own generator: the same on any ranks."""
    std = model.config.initializer_range
    for module_name, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if name == "bias":
                param.zero_()
            elif param.dim() == 1:
                param.fill_(1.0)  # a norm's weight
            else:
                _draw_normal(param, std, f"{seed}/{module_name}.{name}")
                if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                    _zero_row(param, module.padding_idx)


def _is_derived(name: str, tied: bool) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Which file holds which tensor. Files that are none of the model's, such as an adapter's, are left alone."""
    found: dict[str, Path] = {}
    for path in _weight_files(directory):
        with _opened(path) as file:
            found.update((name, path) for name in file.keys())  # noqa: SIM118 (not a dict)
    return found


def _weight_files(directory: Path) -> list[Path]:
    """Hugging Face's rule: one file of the usual name, else those an index names; else all there are."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    names = sorted(set(read_json(index).get("weight_map", {}).values()))
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ConfigError(
            f"model.path={directory} has no file {missing[0]} ({len(missing)} missing in all), which "
            f"{index.name} names; copy the model again"
        )
    return [directory / name for name in names]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        file = safe_open(path, framework="pt")
    except Exception as error:
        raise ConfigError(
            f"model.path: {path.name} is not a whole safetensors file ({error}); copy it again"
        ) from error
    with file:
        yield file


def _copy_shard(param: Tensor, stored, what: str) -> None:
    shape = tuple(stored.get_shape())
    if shape != tuple(param.shape):
        raise ConfigError(f"{what} has shape {shape}; the model's config.json says {tuple(param.shape)}")
    local, rows = local_rows(param)
    if local.numel():
        local.copy_(stored[rows] if len(shape) else stored[...])


def local_rows(param: Tensor) -> tuple[Tensor, slice]:
    """This rank's part of a parameter sharded on dim 0, and which rows it is."""
    if not isinstance(param, DTensor):
        return param, slice(None)
    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return param.to_local(), slice(offset[0], offset[0] + shape[0])


def _draw_normal(param: Tensor, std: float, key: str) -> None:
    local, rows = local_rows(param)
    generator = torch.Generator(device=local.device)
    generator.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big"))
    whole = torch.empty(param.shape, dtype=param.dtype, device=local.device)
    whole.normal_(0.0, std, generator=generator)
    local.copy_(whole[rows])


def _zero_row(param: Tensor, row: int) -> None:
    local, rows = local_rows(param)
    if rows.start is None or rows.start <= row < rows.stop:
        local[row - (rows.start or 0)] = 0.0
