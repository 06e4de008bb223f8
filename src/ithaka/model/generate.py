"""`generate` for parallel models, with transformers' key/value cache. Every rank calls it."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ithaka.comm.agree import gather_objects
from ithaka.comm.mesh import Mesh
from ithaka.config import ConfigError
from ithaka.device_memory import device_memory, free_bytes
from ithaka.foreign.hugging_face import attention_of, set_attention
from ithaka.foreign.torch_core import forward_pre_hooks
from ithaka.inputs.calls import CallChecker, compute_dtype, evaluating
from ithaka.ops.fourbit import unpacked

MAX_UNCACHED_TOKENS = 512  # without a cache, each token costs a forward over all tokens so far


def generate(model: PreTrainedModel, *args: object, **kwargs: Any) -> Tensor | ModelOutput:
    """transformers' generate with its key/value cache: each rank runs the model's own forward on
    all tokens of its group's prompts. `use_cache=False` runs the parallel forward instead, on all
    tokens so far for every new one.

    Every rank calls it, with the same prompts in a cp group. A group samples as the plain model in
    one process would, from the random state of its first rank, which all of its ranks have
    afterwards.
    """
    if images := [name for name in kwargs if name.startswith("pixel_values")]:
        fix = "save the model, and use plain transformers"
        raise ConfigError(f"generate({images[0]}=...) is not supported; {fix}")
    config = kwargs.get("generation_config") or model.generation_config
    use_cache = kwargs.get("use_cache", config.use_cache)
    has_cache = check_uncached(use_cache, kwargs.get("max_new_tokens", config.max_new_tokens))
    mesh = model.ithaka_mesh
    if has_cache:
        prompts = (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids"))
        prompt = next((x for x in prompts if x is not None), None)
        with torch.no_grad():
            _find_checker(model)(model, (prompt,), {"attention_mask": kwargs.get("attention_mask")})
    options = {"synced_gpus": True} if mesh.world_size > 1 else {}
    options |= {**kwargs, "use_cache": has_cache}
    try:
        _share_random_state(mesh)
        with evaluating(model), _plain_forwards(model) if has_cache else nullcontext():
            return type(model).generate(model, *args, **options)
    finally:
        model.reshard()


def _share_random_state(mesh: Mesh) -> None:
    """Give all ranks of a cp group the random state of the first: they must draw the same
    tokens."""
    if mesh.cp_size == 1:
        return
    on_gpu = mesh.device.type == "cuda"
    states = [torch.get_rng_state()]
    if on_gpu:
        states.append(torch.cuda.get_rng_state(mesh.device))
    dist.broadcast_object_list(states, group=mesh.cp_group, group_src=0)
    torch.set_rng_state(states[0])
    if on_gpu:
        torch.cuda.set_rng_state(states[1], mesh.device)


def check_uncached(use_cache: bool | None, num_tokens: int | None) -> bool:
    """Return whether generate uses a cache. Refuses more tokens than it makes without one."""
    if use_cache is False and num_tokens is not None and num_tokens > MAX_UNCACHED_TOKENS:
        cost = "without a cache, each token costs a forward over all tokens"
        rule = f"{cost}, so {MAX_UNCACHED_TOKENS} are the limit; leave use_cache=False out"
        raise ConfigError(f"max_new_tokens={num_tokens} with use_cache=False: {rule}")
    return use_cache is not False


@contextmanager
def _plain_forwards(model: PreTrainedModel) -> Iterator[None]:
    """Let modules run their class's forward, on parameters that stay gathered if memory allows."""
    mesh = model.ithaka_mesh
    checker = _find_checker(model)
    text_config = model.ithaka_root.base.config
    units = []
    if _fits_gathered(model):
        inner = (module for module in model.modules() if module is not model)
        units = [module for module in inner if isinstance(module, FSDPModule)]
    attention = attention_of(text_config)
    forwards = {module: module.forward for module in model.modules() if _is_replaced(module)}
    layers = [forwards[layer] for layer in model.ithaka_root.layers]
    for module in forwards:
        del module.forward
    for layer in layers:
        layer.layer.forward = partial(_run_unpacked, layer)
        layer.experts.replace_wrapper(is_packed=bool(layer.packed))
    set_attention(text_config, attention_of(model.config.get_text_config()))
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
    checker.is_enabled = False
    hook = model.register_forward_hook(_share_logits) if mesh.cp_size > 1 else nullcontext()
    try:
        with hook:
            yield
    finally:
        checker.is_enabled = True
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()
        set_attention(text_config, attention)
        for module, forward in forwards.items():
            module.forward = forward


def _find_checker(model: PreTrainedModel) -> CallChecker:
    return next(hook for hook in forward_pre_hooks(model).values() if isinstance(hook, CallChecker))


def _is_replaced(module: nn.Module) -> bool:
    return str(getattr(vars(module).get("forward"), "__module__", "")).startswith("ithaka.")


def _fits_gathered(model: PreTrainedModel) -> bool:
    """Whether all parameters together take at most half of the free memory of every rank."""
    mesh = model.ithaka_mesh
    dtype = compute_dtype(model, model.ithaka_root.layout)
    num_bytes = sum(param.numel() for param in model.parameters()) * dtype.itemsize
    room = free_bytes(mesh.device)
    if mesh.device.type == "cuda":
        memory = device_memory(mesh.device)
        room += memory.reserved - memory.allocated
    else:
        room //= mesh.world_size
    return all(gather_objects(2 * num_bytes <= room))


def _run_unpacked(layer: Any, *args: Any, **kwargs: Any) -> Any:
    with unpacked(layer.packed):
        return type(layer.layer).forward(layer.layer, *args, **kwargs)


def _share_logits(model: PreTrainedModel, args: tuple, output: ModelOutput) -> None:
    """Give all ranks of a cp group the same logits and so tokens: kernels may round differently."""
    output.logits = output.logits.contiguous()
    dist.broadcast(output.logits, group=model.ithaka_mesh.cp_group, group_src=0)
