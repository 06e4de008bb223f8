"""`save_pretrained` and `iterate_weights` for parallel models. Every rank calls them; rank 0
writes."""

import json
import re
from collections import deque
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ithaka.comm.agree import RankError, gather_objects, raise_first
from ithaka.config import ConfigError
from ithaka.weights.adapters import (
    adapter_tensor_name,
    can_merge,
    find_active_adapter,
    find_base,
    merge_tensors,
)
from ithaka.weights.formats import check_dense
from ithaka.weights.load import named_tensors

if TYPE_CHECKING:
    from peft import PeftModel

# Arguments of save_pretrained in transformers and PEFT -> the only supported value.
DEFAULT_ARGUMENTS = {
    "is_main_process": True,
    "state_dict": None,
    "push_to_hub": False,
    "safe_serialization": True,
}

# Parameters that are gathered together: of a layer, a block of an encoder, the rest of an encoder.
UNIT = re.compile(r"model\.(language_model\.)?layers\.\d+\.|model\.visual\.(blocks\.\d+\.)?|.*")


def save_pretrained(
    model: "PreTrainedModel | PeftModel",
    save_directory: str | Path,
    max_shard_size: int | str = "5GB",
    **others: object,
) -> None:
    """Write a Hugging Face directory, or PEFT's if the model has an adapter; for a model of
    diffusers, its directory or a LoRA file that its pipelines load.

    Every rank calls it. Tensors are gathered one by one, and rank 0 keeps those of one file in host
    memory. Weights are saved in the dtype they are trained in. An error on rank 0 is raised on all
    ranks.
    """
    if not str(save_directory):
        fix = "use '.' for the current directory"
        raise ConfigError(f"save_pretrained('') names no directory; {fix}")
    for name, value in others.items():
        if value is not None and value != DEFAULT_ARGUMENTS.get(name):
            problem = f"save_pretrained({name}=...) is not supported by a parallel model"
            raise ConfigError(f"{problem}; leave it out")
    base = find_base(model)
    base.reshard()  # after a forward without backward, the root's parameters are still gathered
    adapter = find_active_adapter(base)
    if adapter is None:
        check_dense(base)
        empty = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in named_tensors(base).items()
        }
        pattern = f"{base.ithaka_root.file_stem}{{suffix}}.safetensors"
        split = split_torch_state_dict_into_shards(
            empty, filename_pattern=pattern, max_shard_size=max_shard_size
        )
        files = split.filename_to_tensors
    else:
        own = _select_trained(dict(base.named_parameters()), adapter)
        files = {base.ithaka_root.adapter_file: [*own]}
    gathered = _gather_files(base, files)
    failure = None
    if base.ithaka_mesh.rank == 0:
        try:
            _write_files(base, Path(save_directory), adapter, gathered)
        except Exception as error:
            failure = RankError(OSError, f"{type(error).__name__}: {error}")
    # The other ranks gather too, and rank 0 with them even after an error.
    deque(gathered, maxlen=0)
    raise_first(gather_objects(failure), f"save_pretrained({save_directory})")


def _select_trained(tensors: dict[str, Tensor], adapter: str) -> dict[str, Tensor]:
    """Return an adapter's tensors, and others that are trained."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.requires_grad or f".{adapter}." in name
    }


def _gather_files(
    base: PreTrainedModel, files: dict[str, list[str]]
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Each file with its full tensors, which only rank 0 keeps."""
    mesh = base.ithaka_mesh
    params = named_tensors(base)
    for file, names in files.items():
        tensors = {}
        for name in names:
            shard = params[name].detach().to(mesh.device)
            full = shard.full_tensor() if isinstance(shard, DTensor) else shard
            if mesh.rank == 0:
                tensors[name] = full.cpu()
        yield file, tensors


def check_merge(model: "PreTrainedModel | PeftModel") -> None:
    if not can_merge(find_base(model)):
        raise ConfigError(
            "adapters of experts, or on a base in 4 bits, cannot be merged into the weights that "
            "are sent to a vLLM server or another engine; use iterate_weights(merge=False), and "
            "let the engine load the adapter"
        )


@torch.no_grad()
def iterate_weights(
    model: "PreTrainedModel | PeftModel", merge: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield the full tensors of a parallel model under their names on the hub, for an inference
    engine.

    Every rank iterates, and gathers the tensors of one decoder layer at a time on its device. An
    adapter is merged in float32; with `merge=False`, only its tensors are yielded, under PEFT's
    names.
    """
    base = find_base(model)
    if not hasattr(base, "ithaka_mesh"):
        problem = f"iterate_weights got a {type(model).__name__} that is not parallel"
        raise ConfigError(f"{problem}; call ithaka.parallelize first, or use model.state_dict()")
    base.reshard()
    adapter = find_active_adapter(base)
    params = named_tensors(base)
    if not adapter and not merge:
        problem = "iterate_weights(merge=False) yields an adapter, and the model has none"
        raise ConfigError(f"{problem}; leave merge out")
    if adapter and not merge:
        params = _select_trained(params, adapter)
    else:
        check_merge(base)
    for _, names in groupby(params, lambda name: UNIT.match(name)[0]):  # type: ignore[index]
        tensors = {}
        for name in names:
            shard = params[name].detach().to(base.ithaka_mesh.device)
            tensors[name] = shard.full_tensor() if isinstance(shard, DTensor) else shard
        if adapter and not merge:
            yield from (
                (adapter_tensor_name(name, adapter), tensor) for name, tensor in tensors.items()
            )
        else:
            yield from revert_weight_conversion(base, merge_tensors(base, tensors)).items()


def _write_files(
    base: PreTrainedModel,
    directory: Path,
    adapter: str | None,
    gathered: Iterator[tuple[str, dict[str, Tensor]]],
) -> None:
    """Write the configuration, the tensors and, for more than one file, their index."""
    directory.mkdir(parents=True, exist_ok=True)
    root = base.ithaka_root
    metadata = {"format": "pt"}
    index_file = directory / f"{root.file_stem}.safetensors.index.json"
    if adapter is None:
        # Left by an earlier save.
        for stale in [*directory.glob(f"{root.file_stem}-*-of-*.safetensors"), index_file]:
            stale.unlink(missing_ok=True)
        root.write_config(directory)
    else:
        metadata |= root.write_adapter_config(base.peft_config[adapter], directory)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for file, tensors in gathered:
        if adapter is not None:
            names = (adapter_tensor_name(name, adapter, root.adapter_prefix) for name in tensors)
            tensors = dict(zip(names, tensors.values(), strict=True))
        else:
            tensors = root.revert_conversion(tensors)
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, directory / file, metadata=metadata)
        weight_map |= dict.fromkeys(tensors, file)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        del tensors  # before the next file is gathered
    if len(set(weight_map.values())) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        index_file.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
