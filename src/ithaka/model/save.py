"""`save_pretrained` and `generate` for parallel models. Every rank calls them; rank 0 writes."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ithaka.config import ConfigError
from ithaka.dist.agree import RankError, gather_objects, raise_first
from ithaka.model.adapters import adapter_tensor_name, find_active_adapter

INDEX_FILE = "model.safetensors.index.json"
# Arguments of save_pretrained in transformers and PEFT -> the only value supported here.
DEFAULT_ARGUMENTS = {"is_main_process": True, "state_dict": None, "push_to_hub": False, "safe_serialization": True}


def save_pretrained(model: Any, save_directory: str | Path, max_shard_size: int | str = "5GB", **others: Any) -> None:
    """Write a Hugging Face directory, or PEFT's if the model has an adapter.

    Every rank calls it. Tensors are gathered one by one, and rank 0 keeps those of one file in host memory. Weights are
    saved in the dtype they are trained in. An error on rank 0 is raised on all ranks.
    """
    for name, value in others.items():
        if value is not None and value != DEFAULT_ARGUMENTS.get(name):
            raise ConfigError(f"save_pretrained({name}=...) is not supported by a parallel model; leave it out")
    base, directory = getattr(model, "get_base_model", lambda: model)(), Path(save_directory)
    base.reshard()  # after a forward without backward, the root's parameters are still gathered
    adapter, params = find_active_adapter(base), dict(base.named_parameters())  # a tied weight is listed once
    if adapter is None:
        pattern = "model{suffix}.safetensors"
        empty = {name: torch.empty(param.shape, dtype=param.dtype, device="meta") for name, param in params.items()}
        split = split_torch_state_dict_into_shards(empty, filename_pattern=pattern, max_shard_size=max_shard_size)
        files = split.filename_to_tensors
    else:
        own = [name for name, param in params.items() if param.requires_grad or f".{adapter}." in name]
        files = {"adapter_model.safetensors": own}
    writer = _Writer(base, directory, adapter) if base.ithaka_mesh.rank == 0 else None
    for file, names in files.items():
        tensors = {}
        for name in names:
            shard: Any = params[name].detach().to(base.ithaka_mesh.device)
            full = shard.full_tensor() if isinstance(shard, DTensor) else shard
            if writer is not None:
                tensors[name] = full.cpu()
        if writer is not None:
            writer.write(file, tensors)
    error = writer.finish() if writer is not None else None
    failure = RankError(OSError, error) if error is not None else None
    raise_first(gather_objects(failure), f"save_pretrained({save_directory})")


class _Writer:
    """Writes files on rank 0. Stores the first error instead of raising: the other ranks still gather with it."""

    def __init__(self, base: PreTrainedModel, directory: Path, adapter: str | None) -> None:
        self.base, self.directory, self.adapter = base, directory, adapter
        self.error: str | None = None
        self.weight_map: dict[str, str] = {}
        self.num_bytes = 0
        self._try(self._begin)

    def write(self, file: str, tensors: dict[str, Tensor]) -> None:
        self._try(self._write, file, tensors)

    def finish(self) -> str | None:
        self._try(self._finish)
        return self.error

    def _try(self, function: Any, *args: Any) -> None:
        if self.error is None:
            try:
                function(*args)
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"

    def _begin(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.adapter is None:  # an earlier save may have had more files
            for stale in [*self.directory.glob("model-*-of-*.safetensors"), self.directory / INDEX_FILE]:
                stale.unlink(missing_ok=True)
        base: Any = self.base
        if self.adapter is not None:
            config = base.peft_config[self.adapter]
            inference, config.inference_mode = config.inference_mode, True  # as PEFT writes it
            config.save_pretrained(self.directory)
            config.inference_mode = inference
            return
        base.config.dtype = str(base.dtype).removeprefix("torch.")
        base.config.architectures = [type(base).__name__.removeprefix("FSDP")]
        base.config.save_pretrained(self.directory)
        base.generation_config.save_pretrained(self.directory)

    def _write(self, file: str, tensors: dict[str, Tensor]) -> None:
        if self.adapter is not None:
            tensors = {adapter_tensor_name(name, self.adapter): tensor for name, tensor in tensors.items()}
        else:
            tensors = revert_weight_conversion(self.base, tensors)
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, self.directory / file, metadata={"format": "pt"})
        self.weight_map |= dict.fromkeys(tensors, file)
        self.num_bytes += sum(tensor.nbytes for tensor in tensors.values())

    def _finish(self) -> None:
        if len(set(self.weight_map.values())) > 1:
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": self.weight_map}
            (self.directory / INDEX_FILE).write_text(
                json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
            )


def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' generate, for short samples: without a cache, every token costs a full forward.

    Every rank calls it, with the same prompts in a cp group. Each group samples from its first rank's generator.
    """
    mesh, was_training = model.ithaka_mesh, model.training
    seed = [int(torch.randint(2**62, ()))]
    dist.broadcast_object_list(seed, group=mesh.cp_group, group_src=0)
    devices = [mesh.device] if mesh.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed[0])
            defaults = {"synced_gpus": True} if mesh.world_size > 1 else {}
            return type(model).generate(model.eval(), *args, **{**defaults, **kwargs, "use_cache": False})
    finally:
        model.train(was_training)
        model.reshard()
