"""Load weights from safetensors straight into shards, or draw them from a seed; no rank ever holds
the full model."""

import hashlib
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from ithaka.comm.agree import SharedError, gather_objects
from ithaka.config import LFS_POINTER, ConfigError, input_error
from ithaka.facts.model_files import read_json
from ithaka.foreign.hugging_face import (
    init_module,
    mark_as_initialized,
    set_weight_conversions,
    unexpected_keys_to_ignore,
)
from ithaka.foreign.torch_core import non_persistent_buffers
from ithaka.foreign.torch_fsdp import shape_and_offset
from ithaka.ops.fourbit import PackedWeight
from ithaka.weights.adapters import adapter_tensor_name, base_tensor_name
from ithaka.weights.formats import (
    DenseWeight,
    base_weights,
    find_scaled_tensors,
    read_blocks,
    read_packed,
)


@dataclass
class _Conversion:
    """Stored tensors that transformers converts, such as experts stored one by one."""

    converter: WeightConverter
    first: str  # name of the first converted tensor in the model
    stored: dict[str, list[str]] = field(default_factory=dict)  # source pattern -> names, in order

    @property
    def targets(self) -> list[str]:
        first, *others = self.converter.target_patterns
        return [self.first, *(self.first.replace(first, other) for other in others)]

    @property
    def merges_rows(self) -> bool:
        """Whether each stored tensor is part of one row of the converted tensor."""
        merge, *others = self.converter.operations
        is_merge = isinstance(merge, MergeModulelist) and merge.dim == 0
        return is_merge and all(isinstance(op, Concatenate) and op.dim > 0 for op in others)

    @property
    def names(self) -> list[str]:
        return [name for names in self.stored.values() for name in names]

    def load(
        self,
        files: dict[str, Any],
        model: PreTrainedModel,
        tensors: dict[str, Tensor],
        weights: dict[str, PackedWeight | DenseWeight],
    ) -> None:
        """Write this rank's rows of the converted tensors."""
        _, rows = local_shard(tensors[self.first])
        if self.merges_rows and rows.start == rows.stop:
            return
        for name, full in self._read(files, model, rows).items():
            local, rows = local_shard(tensors[name])
            own = slice(0, len(full)) if self.merges_rows else rows
            weights[name].write(full, local, own)

    def _read(
        self, files: dict[str, Any], model: PreTrainedModel, rows: slice
    ) -> dict[str, Tensor]:
        """Return the converted tensors by name; only their `rows` if `merges_rows`."""
        converter = deepcopy(self.converter)
        for pattern, names in self.stored.items():
            for name in names[rows] if self.merges_rows else names:
                converter.add_tensor(self.first, name, pattern, files[name].get_tensor(name))
        converted = converter.convert(self.first, model=model, config=model.config)
        return {name: t[0] if isinstance(t, list) else t for name, t in converted.items()}


@torch.no_grad()
def load_weights(
    model: PreTrainedModel, directory: Path, vocab_size: int, transforms: Sequence[WeightTransform]
) -> None:
    """Read this rank's rows of base parameters and persistent buffers, one parameter at a time.

    `vocab_size`: the stored vocabulary; the model's may be larger. `transforms`: the conversions of
    transformers from stored names and tensors to the model's.
    """
    fix = "fix config.json"
    source = f"model.path={directory}"
    files = open_tensor_files(directory)
    named = named_tensors(model).items()
    tensors = {base_tensor_name(name): t for name, t in named if ".lora_" not in name}
    weights = base_weights(model, tensors)
    blocks, names = find_scaled_tensors(files, tensors)
    direct, conversions = _match_names(model, names, tensors, transforms)
    set_weight_conversions(model, [transform for transform in transforms if transform.was_used()])
    targets = [name for conversion in conversions for name in conversion.targets if name in tensors]
    converted = {name: torch.empty(weights[name].shape, device="meta") for name in targets}
    expected = revert_weight_conversion(model, converted) if converted else {}
    found = [name for conversion in conversions for name in conversion.names]
    # Some conversions accept names that they do not write, so equal counts suffice. Experts are
    # merged in the order of their names, so these must match.
    merged = {name for each in conversions if each.merges_rows for name in each.names}
    is_exact = len(found) == len(expected) and merged <= expected.keys()
    matched = {*direct, *converted, *blocks}
    missing = [] if is_exact else [name for name in expected if name not in files]
    missing += [name for name in tensors if name not in matched]
    extra = [name for target, name in direct.items() if target not in tensors]
    extra += [] if is_exact else [name for name in found if name not in expected]
    ignored = "|".join(unexpected_keys_to_ignore(model)) or r"(?!)"
    _check_names(source, fix, missing, [name for name in extra if not re.search(ignored, name)])

    def check(name: str, shape: Sequence[int]) -> None:
        _check_shape(f"{source}: {name}", files[name].get_slice(name), shape, fix)

    for name in found:
        if name in expected:
            check(name, expected[name].shape)
    ends = {id(param) for param in end_parameters(model).values()}
    added = model.config.get_text_config().vocab_size - vocab_size
    for name, t in tensors.items():
        if name not in direct:
            continue
        stored = direct[name]
        weight = weights[name]
        if isinstance(weight, DenseWeight):
            # Moshi's embedding has one more row than its head.
            num_rows = len(t) - added if id(t) in ends else None
            _copy_rows(files[stored].get_slice(stored), t, f"{source}: {stored}", fix, num_rows)
        else:
            read_packed(files, stored, weight, *local_shard(t), check)
    for name in blocks:
        read_blocks(files, name, weights[name], *local_shard(tensors[name]), check)
    for conversion in conversions:
        if conversion.first in tensors:  # not ignored
            conversion.load(files, model, tensors, weights)


def _match_names(
    model: PreTrainedModel,
    names: list[str],
    tensors: dict[str, Tensor],
    transforms: Sequence[WeightTransform],
) -> tuple[dict[str, str], list[_Conversion]]:
    """Match names as transformers does. Return model name -> stored name of unconverted tensors,
    and conversions."""
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    direct: dict[str, str] = {}
    conversions: dict[str, _Conversion] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, tensors
        )
        if target not in tensors and name in tensors:
            target = name
            pattern = None
        if pattern is None:
            direct[target] = name
        else:
            conversion = conversions.setdefault(target, _Conversion(by_pattern[pattern], target))
            conversion.stored.setdefault(pattern, []).append(name)
    return direct, list(conversions.values())


@torch.no_grad()
def load_adapter(model: PreTrainedModel, directory: Path) -> None:
    """Read this rank's rows of PEFT's tensors: the adapters and modules_to_save."""
    files = _open(directory / "adapter_model.safetensors", "adapter.path")
    named = {adapter_tensor_name(name): param for name, param in model.named_parameters()}
    params = {name: param for name, param in named.items() if param.requires_grad or name in files}
    source = f"adapter.path={directory}"
    fix = "fix adapter_config.json"
    missing = [name for name in params if name not in files]
    extra = [name for name in files if name not in params]
    _check_names(source, fix, missing, extra)
    for name, param in params.items():
        _copy_rows(files[name].get_slice(name), param, f"{source}: {name}", fix)


def _check_names(source: str, fix: str, missing: list[str], extra: list[str]) -> None:
    if missing:
        problem = f"has no tensor {missing[0]} ({len(missing)} missing in total)"
        raise ConfigError(f"{source} {problem}; copy the files again, {fix}")
    # A tied head may be stored.
    extra = [name for name in extra if not name.endswith(("inv_freq", "lm_head.weight"))]
    if extra:
        raise ConfigError(f"{source} has a tensor {extra[0]}, which is not in the model; {fix}")


def _check_shape(name: str, stored: Any, expected: Sequence[int], fix: str) -> None:
    shape = tuple(stored.get_shape())
    expected = tuple(expected)
    if shape != expected:
        raise ConfigError(f"{name} has shape {shape}, but the configuration has {expected}; {fix}")


def _copy_rows(
    stored: Any, tensor: Tensor, name: str, fix: str, num_rows: int | None = None
) -> None:
    """Copy this rank's rows of a stored tensor. If it has only `num_rows`, fewer than the model's,
    set the others to the mean of the stored ones."""
    num_rows = tensor.shape[0] if num_rows is None and tensor.dim() else num_rows
    expected = (num_rows, *tensor.shape[1:]) if num_rows is not None else ()
    _check_shape(name, stored, expected, fix)
    local, rows = local_shard(tensor)
    if num_rows is None:
        local.copy_(stored[...])
        return
    num_stored = max(0, min(rows.stop, num_rows) - rows.start)
    if num_stored:
        local[:num_stored].copy_(stored[rows.start : rows.start + num_stored])
    if num_stored < len(local):
        local[num_stored:] = _mean_row(stored, num_rows)


class _Generator(TorchFunctionMode):
    """Makes random functions draw from `generator`."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "generator" in kwargs or function in (Tensor.normal_, Tensor.uniform_):
            kwargs["generator"] = self.generator
        return function(*args, **kwargs)


@torch.no_grad()
def init_weights(
    model: PreTrainedModel, seed: int, device: torch.device, has_files: bool = False
) -> None:
    """Compute buffers, and draw parameters as Hugging Face and PEFT do; with files, only adapters
    and buffers that are not stored. Each module has its own generator, so values do not depend on
    the number of ranks. They are drawn on `device`, even those that are kept on the host."""
    for param in model.parameters():
        mark_as_initialized(param)  # transformers leaves shards alone
    for module_name, module in model.named_modules():
        is_adapter = ".lora_" in module_name
        packed = {weight.name: weight for weight in module.__dict__.get("packed_weights", ())}
        params = {name: param for name, param in module._parameters.items() if param is not None}
        shards: dict[str, Any] = {}
        if is_adapter or not has_files:
            shards = {name.removeprefix("packed_"): param for name, param in params.items()}
        stored = module._buffers.keys() - non_persistent_buffers(module) if has_files else set()
        buffers = {
            name: t for name, t in module._buffers.items() if t is not None and name not in stored
        }
        if not shards and not buffers:
            continue
        first = next(iter({**shards, **buffers}))
        source = f"{seed}/{base_tensor_name(f'{module_name}.{first}')}".encode()
        number = int.from_bytes(hashlib.sha256(source).digest()[:7], "big")
        generator = torch.Generator(device).manual_seed(number)
        weights = {name: DenseWeight(param.shape) for name, param in shards.items()} | packed
        full = {
            name: torch.empty(weights[name].shape, dtype=t.dtype, device=device)
            for name, t in shards.items()
        }
        drawn = {
            f"{module_name}.{name}": t
            for name, t in {**full, **buffers}.items()
            if t.is_floating_point()
        }
        for t in drawn.values():
            t.fill_(torch.nan)
        for name in packed:
            del module.__dict__[name]
        module._parameters |= {
            name: nn.Parameter(t, requires_grad=False) for name, t in full.items()
        }
        try:
            with _Generator(generator):
                if is_adapter:
                    _init_adapter(module, module_name)
                else:
                    _init_module(model, module_name)
        finally:
            for name, weight in packed.items():
                module._parameters.pop(name, None)
                weight.install()
            module._parameters |= params
        if undefined := next((name for name, t in drawn.items() if t.isnan().any()), None):
            raise ConfigError(
                f"model_type={model.config.model_type} does not define an initial value of "
                f"{undefined}; use ithaka.parallelize(from_pretrained(...))"
            )
        for name, param in shards.items():
            weights[name].write(full[name], *local_shard(param))


def _init_module(model: PreTrainedModel, name: str) -> None:
    """Initialize a module as transformers does: itself, then the modules around it, which may
    overwrite its values; each with the function of its PreTrainedModel."""
    owner = model
    calls = list[tuple[PreTrainedModel, nn.Module]]()
    parts = name.split(".") if name else []
    for depth in range(len(parts) + 1):
        module = model.get_submodule(".".join(parts[:depth]))
        owner = module if isinstance(module, PreTrainedModel) else owner
        calls.append((owner, module))
    for owner, module in reversed(calls):
        init_module(owner, module)


def _init_adapter(module: nn.Module, name: str) -> None:
    """Initialize an adapter as PEFT does: B is zero."""
    for param in module.parameters(recurse=False):
        bound = param.shape[1] ** -0.5
        param.zero_() if ".lora_B." in name else param.uniform_(-bound, bound)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; a tied parameter once, as the embedding."""
    stored = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    return dict(model.named_parameters()) | buffers


def end_parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the parameters with one row per token of the vocabulary, by name."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    own = {id(param) for end in ends for param in end.parameters()}
    return {
        name: param
        for name, param in model.named_parameters(remove_duplicate=False)
        if id(param) in own
    }


def _mean_row(stored: Any, num_rows: int) -> Tensor:
    """Average the rows, in blocks and in the same order on every rank."""
    total = torch.zeros(())
    for start in range(0, num_rows, 4096):
        total = total + stored[start : min(start + 4096, num_rows)].double().sum(0)
    return total / num_rows


def is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    tensor = tensor.float() if tensor.itemsize == 1 else tensor  # float8 has no isfinite
    return bool(tensor.isfinite().all())


@torch.no_grad()
def check_finite(model: nn.Module, source: str, directory: Path | None = None) -> None:
    """Raise SharedError if a tensor of the model has NaN or infinity. Collective and slow: call
    it once a loss or logit is not finite. `source` names the model, `directory` has its files."""
    tensors = named_tensors(model).items()
    own = (name for name, tensor in tensors if not is_finite(local_shard(tensor)[0]))
    for name in filter(None, gather_objects(next(own, None))):
        raise SharedError(describe_nonfinite(source, base_tensor_name(name), directory))


def describe_nonfinite(source: str, name: str, directory: Path | None) -> str:
    """`name`: in the files, unless transformers converts the tensor."""
    paths = _tensor_paths(directory) if directory is not None else []
    file = next((f" in {path.name}" for path in paths if name in _open(path, source)), "")
    fix = "copy the files again, or use other weights"
    return f"{source}: {name}{file} has NaN or infinite values; {fix}"


def open_tensor_files(directory: Path) -> dict[str, Any]:
    """Map tensor names to open files."""
    files: dict[str, Any] = {}
    for path in _tensor_paths(directory):
        files |= _open(path, "model.path")
    return files


def _tensor_paths(directory: Path) -> list[Path]:
    """A model's files, by Hugging Face's rule: the single file, else the index's, else all."""
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = set(read_json(index).get("weight_map", {}).values())
        return [directory / name for name in sorted(names)]
    return sorted(directory.glob("*.safetensors"))


def _open(path: Path, source: str) -> dict[str, Any]:
    """Map the tensor names of one file to the open file. `source`: the setting, for errors."""
    try:
        path.open("rb").close()  # safetensors reports any failure to open a file as a missing file
        file = safe_open(path, framework="pt")
    except Exception as error:
        reason = str(error)
        fix = "copy it again"
        is_small = path.is_file() and path.stat().st_size < 1024
        if is_small and path.read_bytes().startswith(LFS_POINTER):
            reason = "a Git LFS pointer"
            fix = "run `git lfs pull`"
        message = f"{source}: {path} is not a complete safetensors file ({reason}); {fix}"
        raise input_error(message, error) from error
    return dict.fromkeys(file.keys(), file)


def local_shard(tensor: Tensor) -> tuple[Tensor, slice]:
    """Return this rank's shard of a parameter, and its rows of dim 0. Buffers are not sharded."""
    if not isinstance(tensor, DTensor):
        return tensor, slice(0, tensor.shape[0] if tensor.dim() else 1)
    shape, offset = shape_and_offset(tensor)
    return tensor.to_local(), slice(offset[0], offset[0] + shape[0])
