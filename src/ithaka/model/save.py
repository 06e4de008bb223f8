"""`save_pretrained`, `iterate_weights` and `generate` for parallel models. Every rank calls them; rank 0 writes."""

import copy
import json
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ithaka.config import ConfigError
from ithaka.dist.agree import RankError, gather_objects, raise_first
from ithaka.layer.fourbit import unpacked
from ithaka.model.adapters import ADAPTER_PREFIX, adapter_tensor_name, can_merge, find_active_adapter, merge_tensors
from ithaka.model.calls import CallChecker, compute_dtype
from ithaka.model.families import find_decoder, find_layers
from ithaka.model.weights import named_tensors
from ithaka.plan.hardware import available_memory

MAX_UNCACHED_TOKENS = 512  # that generate makes without a key/value cache
# Arguments of save_pretrained in transformers and PEFT -> the only value supported here.
DEFAULT_ARGUMENTS = {"is_main_process": True, "state_dict": None, "push_to_hub": False, "safe_serialization": True}

# Parameters that are gathered together: of a layer, of a block of an encoder, or of the rest of an encoder.
UNIT = re.compile(r"model\.(language_model\.)?layers\.\d+\.|model\.visual\.(blocks\.\d+\.)?|.*")


def save_pretrained(model: Any, save_directory: str | Path, max_shard_size: int | str = "5GB", **others: Any) -> None:
    """Write a Hugging Face directory, or PEFT's if the model has an adapter; for a model of diffusers, its directory or
    a LoRA file that its pipelines load.

    Every rank calls it. Tensors are gathered one by one, and rank 0 keeps those of one file in host memory. Weights are
    saved in the dtype they are trained in. An error on rank 0 is raised on all ranks.
    """
    if not str(save_directory):
        raise ConfigError("save_pretrained('') names no directory; use '.' for the current directory")
    for name, value in others.items():
        if value is not None and value != DEFAULT_ARGUMENTS.get(name):
            raise ConfigError(f"save_pretrained({name}=...) is not supported by a parallel model; leave it out")
    base = getattr(model, "get_base_model", lambda: model)()
    base.reshard()  # after a forward without backward, the root's parameters are still gathered
    adapter, params = find_active_adapter(base), named_tensors(base)
    if adapter is None and any(".packed_" in name for name in params):
        raise ConfigError("save_pretrained cannot write a base in 4 bits; train an adapter, or load it in bfloat16")
    if adapter is None:
        pattern = f"{_file_stem(base)}{{suffix}}.safetensors"
        empty = {name: torch.empty(param.shape, dtype=param.dtype, device="meta") for name, param in params.items()}
        split = split_torch_state_dict_into_shards(empty, filename_pattern=pattern, max_shard_size=max_shard_size)
        files = split.filename_to_tensors
    else:
        own = [name for name, param in base.named_parameters() if param.requires_grad or f".{adapter}." in name]
        files = {"adapter_model.safetensors" if _is_transformers(base) else "pytorch_lora_weights.safetensors": own}
    gathered, failure = _gather_files(base, files), None
    if base.ithaka_mesh.rank == 0:
        try:
            _write_files(base, Path(save_directory), adapter, gathered)
        except Exception as error:
            failure = RankError(OSError, f"{type(error).__name__}: {error}")
    deque(gathered, maxlen=0)  # the other ranks gather too, and rank 0 with them even after an error
    raise_first(gather_objects(failure), f"save_pretrained({save_directory})")


def _gather_files(base: Any, files: dict[str, list[str]]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Each file with its full tensors, which only rank 0 keeps."""
    mesh, params = base.ithaka_mesh, named_tensors(base)
    for file, names in files.items():
        tensors = {}
        for name in names:
            shard: Any = params[name].detach().to(mesh.device)
            full = shard.full_tensor() if isinstance(shard, DTensor) else shard
            if mesh.rank == 0:
                tensors[name] = full.cpu()
        yield file, tensors


def check_merge(model: Any) -> None:
    if not can_merge(getattr(model, "get_base_model", lambda: model)()):
        raise ConfigError(
            "adapters of experts, or on a base in 4 bits, cannot be merged into the weights that are sent to a vLLM "
            "server or another engine; use iterate_weights(merge=False), and let the engine load the adapter"
        )


@torch.no_grad()
def iterate_weights(model: Any, merge: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield the full tensors of a parallel model under their names on the hub, for an inference engine.

    Every rank iterates; on each, the tensors of one decoder layer at a time are gathered on its device. An adapter is
    merged in float32; with `merge=False`, only its tensors are yielded, under PEFT's names.
    """
    base = getattr(model, "get_base_model", lambda: model)()
    if not hasattr(base, "ithaka_mesh"):
        fix = "call ithaka.parallelize first, or use model.state_dict()"
        raise ConfigError(f"iterate_weights got a {type(model).__name__} that is not parallel; {fix}")
    base.reshard()
    adapter, params = find_active_adapter(base), named_tensors(base)
    if adapter and not merge:
        params = {name: param for name, param in params.items() if param.requires_grad or f".{adapter}." in name}
    else:
        check_merge(base)
    for _, names in groupby(params, lambda name: UNIT.match(name)[0]):  # type: ignore[index]
        tensors = {}
        for name in names:
            shard: Any = params[name].detach().to(base.ithaka_mesh.device)
            tensors[name] = shard.full_tensor() if isinstance(shard, DTensor) else shard
        if adapter and not merge:
            yield from ((adapter_tensor_name(name, adapter), tensor) for name, tensor in tensors.items())
        else:
            yield from revert_weight_conversion(base, merge_tensors(base, tensors)).items()


def _write_files(
    base: Any, directory: Path, adapter: str | None, gathered: Iterator[tuple[str, dict[str, Tensor]]]
) -> None:
    """Write the configuration, the tensors and, for more than one file, their index."""
    directory.mkdir(parents=True, exist_ok=True)
    index_file, metadata = directory / f"{_file_stem(base)}.safetensors.index.json", {"format": "pt"}
    if adapter is None:
        for stale in [*directory.glob(f"{_file_stem(base)}-*-of-*.safetensors"), index_file]:  # left by an earlier save
            stale.unlink(missing_ok=True)
        _write_config(base, directory)
    elif _is_transformers(base):
        config = copy.copy(base.peft_config[adapter])
        config.inference_mode = True  # as PEFT writes it
        config.save_pretrained(directory)
    else:
        settings = {f"transformer.{name}": value for name, value in base.peft_config[adapter].to_dict().items()}
        settings = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}
        metadata["lora_adapter_metadata"] = json.dumps(settings, indent=2, sort_keys=True)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for file, tensors in gathered:
        if adapter is not None:
            prefix = ADAPTER_PREFIX if _is_transformers(base) else "transformer."
            tensors = {adapter_tensor_name(name, adapter, prefix): tensor for name, tensor in tensors.items()}
        elif _is_transformers(base):
            tensors = revert_weight_conversion(base, tensors)
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, directory / file, metadata=metadata)
        weight_map |= dict.fromkeys(tensors, file)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        del tensors  # before the next file is gathered
    if len(set(weight_map.values())) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        index_file.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _is_transformers(base: Any) -> bool:
    return isinstance(base, PreTrainedModel)


def _file_stem(base: Any) -> str:
    return "model" if _is_transformers(base) else "diffusion_pytorch_model"


def _write_config(base: Any, directory: Path) -> None:
    name = type(base).__name__.removeprefix("FSDP")
    if _is_transformers(base):
        base.config.dtype = str(base.dtype).removeprefix("torch.")
        base.config.architectures = [name]
        base.config.save_pretrained(directory)
        base.generation_config.save_pretrained(directory)
        return
    values = json.loads(base.to_json_string()) | {"_class_name": name}
    base.register_to_config(_class_name=name)  # to_json_string wrote FSDP2's name
    (directory / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# ---- generate


def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' generate with its key/value cache: each rank runs the model's own forward on all tokens of its
    group's prompts. `use_cache=False` runs the parallel forward instead, on all tokens so far for every new one.

    Every rank calls it, with the same prompts in a cp group. Each group samples from its first rank's generator.
    """
    if images := [name for name in kwargs if name.startswith("pixel_values")]:
        raise ConfigError(f"generate({images[0]}=...) is not supported; save the model, and use plain transformers")
    config = kwargs.get("generation_config") or model.generation_config
    use_cache, num_tokens = (kwargs.get(name, getattr(config, name)) for name in ("use_cache", "max_new_tokens"))
    has_cache = check_uncached(use_cache, num_tokens)
    mesh, was_training = model.ithaka_mesh, model.training
    seed = [int(torch.randint(2**62, ()))]
    dist.broadcast_object_list(seed, group=mesh.cp_group, group_src=0)
    devices = [mesh.device] if mesh.device.type == "cuda" else []
    if has_cache:
        prompt = next((x for x in (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids")) if x is not None), None)
        with torch.no_grad():
            _find_checker(model)(model, (prompt,), {"attention_mask": kwargs.get("attention_mask")})
    try:
        with torch.random.fork_rng(devices), _plain_forwards(model) if has_cache else nullcontext():
            torch.manual_seed(seed[0])
            defaults = {"synced_gpus": True} if mesh.world_size > 1 else {}
            return type(model).generate(model.eval(), *args, **{**defaults, **kwargs, "use_cache": has_cache})
    finally:
        model.train(was_training)
        model.reshard()


def check_uncached(use_cache: bool | None, num_tokens: int | None) -> bool:
    """Return whether generate uses a cache. Raises ConfigError for more tokens than it makes without one."""
    if use_cache is False and num_tokens is not None and num_tokens > MAX_UNCACHED_TOKENS:
        rule = f"without a cache, each token costs a forward over all tokens, so {MAX_UNCACHED_TOKENS} are the limit"
        raise ConfigError(f"max_new_tokens={num_tokens} with use_cache=False: {rule}; leave use_cache=False out")
    return use_cache is not False


@contextmanager
def _plain_forwards(model: Any) -> Iterator[None]:
    """Let every module run its class's forward, on gathered parameters. They stay gathered if memory allows."""
    mesh, checker, text_config = model.ithaka_mesh, _find_checker(model), find_decoder(model).config
    units = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
    stays_gathered, attention = _fits_gathered(model), text_config._attn_implementation
    forwards = {module: module.forward for module in model.modules() if _is_replaced(module)}
    layers = [forwards[layer] for layer in find_layers(model)]
    for module in forwards:
        del module.forward
    for layer in layers:
        if layer.packed:
            layer.layer.forward = partial(_run_unpacked, layer)
        if (block := layer.experts.block) is not None and (block.adapters or layer.packed):
            block.module.forward = partial(_run_experts, block)  # PEFT cannot adapt packed weights
    if model.ithaka_dropout is not None:
        model.ithaka_dropout.keys_t = None
    text_config._attn_implementation = model.config.get_text_config()._attn_implementation
    for unit in units if stays_gathered else ():
        unit.set_reshard_after_forward(False, recurse=False)
    checker.is_enabled = False
    hook = model.register_forward_hook(_share_logits) if mesh.cp_size > 1 else nullcontext()
    try:
        with hook:
            yield
    finally:
        checker.is_enabled = True
        for unit in units if stays_gathered else ():
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()
        text_config._attn_implementation = attention
        for module, forward in forwards.items():
            module.forward = forward


def _find_checker(model: Any) -> CallChecker:
    return next(hook for hook in model._forward_pre_hooks.values() if isinstance(hook, CallChecker))


def _is_replaced(module: Any) -> bool:
    return str(getattr(vars(module).get("forward"), "__module__", "")).startswith("ithaka.")


def _fits_gathered(model: Any) -> bool:
    """Whether all parameters together take at most half of the free memory of every rank."""
    mesh, layout = model.ithaka_mesh, find_layers(model)[0].forward.layout
    num_bytes = sum(param.numel() for param in model.parameters()) * compute_dtype(model, layout).itemsize
    if mesh.device.type == "cuda":
        unused = torch.cuda.memory_reserved(mesh.device) - torch.cuda.memory_allocated(mesh.device)
        free_bytes = torch.cuda.mem_get_info(mesh.device)[0] + unused
    else:
        free_bytes = available_memory() // mesh.world_size
    return all(gather_objects(2 * num_bytes <= free_bytes))


def _run_unpacked(layer: Any, *args: Any, **kwargs: Any) -> Any:
    with unpacked(layer.packed):
        return type(layer.layer).forward(layer.layer, *args, **kwargs)


def _run_experts(block: Any, x_tD: Tensor, *routing: Tensor) -> Tensor:
    return block(x_tD, *routing).to(x_tD.dtype)


def _share_logits(model: Any, args: Any, output: Any) -> None:
    """Give all ranks of a cp group the same logits: kernels may round differently, and tokens must be equal."""
    output.logits = output.logits.contiguous()
    dist.broadcast(output.logits, group=model.ithaka_mesh.cp_group, group_src=0)
