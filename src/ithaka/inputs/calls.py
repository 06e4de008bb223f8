"""Check a model before parallelize, and every call of a parallel model before its first layer.

A parallel model uses its modules' weights but bypasses most of their forwards, so hooks and patches on them would be
silently ignored. And if one rank raises alone, the others hang in a collective. So each rank checks its call, one small
collective gathers the results, and all ranks raise the same error.
"""

import hashlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback as get_compile_callback
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ithaka.blocks.block import HOOK_DICTS
from ithaka.blocks.experts import check_choices
from ithaka.blocks.tiles import PARAMETERS_CHANGED
from ithaka.comm.agree import RankError, describe_error, gather_objects, raise_first
from ithaka.comm.mesh import Mesh
from ithaka.config import ConfigError
from ithaka.inputs.batch import INPUTS, Share, documents_from_lengths, select_own_tokens, to_integers
from ithaka.layout import Layout, check_dtype

# What ranks exchange about a call: error, fingerprint, number of valid labels, of positions and of frames.
Report = tuple[RankError | None, dict[str, Any], *tuple[int, ...]]
ARGUMENTS = (*INPUTS, "num_items_in_batch", "per_token", "temperature", "expert_indices")
INTERNAL_ARGUMENTS = ("hidden_only", "distillation")  # see CheckedCall
# Arguments that collators add for FlashAttention and linear attention. Documents are read from cu_seq_lens_q.
KERNEL_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_watch_optimizers = cache(register_optimizer_step_pre_hook)
MODES = ("labels passed", "gradients enabled", "num_items_in_batch")  # must agree, since collectives depend on them

HOOK_KINDS = dict(
    zip(HOOK_DICTS, ("forward hook", "forward pre-hook", "backward hook", "backward pre-hook"), strict=True)
)
COMPILED = (
    "torch.compile cannot trace a parallel model, which has its own kernels and collectives; call the model without "
    "it, and compile its layers with Layout(compile=True) or train.compile"
)
# Methods that would break a parallel model -> what to do instead.
REFUSED_METHODS = {
    "resize_token_embeddings": "resize first, then parallelize",
    "gradient_checkpointing_enable": "its layers already recompute; leave it out, or set gradient_checkpointing=False",
    "activation_checkpointing_enable": "its layers already recompute; leave it out",
    "compile": "compile its layers with Layout(compile=True) or train.compile",
}
NOTHING_TRAINED = (
    "backward has no gradient to compute, because no parameter of the model requires one; call "
    "model.requires_grad_(True) before parallelize, or add an adapter"
)
GATHERED_PARAMETER = "a parameter that FSDP2 has gathered, in the compute dtype"
# Functions from these modules are not the user's: ours, FSDP2's, and inert hooks that transformers leaves behind.
TRUSTED_MODULES = ("ithaka.", "torch.distributed.", "transformers.utils.output_capturing")


@dataclass(frozen=True)
class CheckedCall:
    """A decoder's call that passed all checks on every rank, and this rank's share of its inputs."""

    mesh: Mesh
    share: Share
    shape: torch.Size  # of input_ids
    num_tokens: int  # valid labels of the global batch
    num_positions: int  # 1 + its largest position
    divisor: float  # the summed loss is divided by it
    per_token: bool  # return TokenResults for this rank's labels
    temperature: float = 1.0  # divides the logits, if per_token
    chosen_sLk: Tensor | None = None  # the experts of this rank's tokens in each layer, if the user gave them
    hidden_only: bool = False  # return the last layer's output
    distillation: Any = None  # a teacher and a criterion (model/distillation.py)
    media: Any = None  # this rank's images, for vision-language models


class CallChecker:
    """A forward pre-hook that runs before FSDP2's and turns the user's arguments into a call that `root` has checked.

    Not part of forward: FSDP2 would move the full batch to the device, and does not recover from an error in forward.
    """

    def __init__(self, root: Any) -> None:  # roots/root.py
        model = root.model
        self.root, self.snapshot, self.is_enabled = root, _snapshot(model), True  # not enabled: while it generates
        model.register_forward_pre_hook(self, prepend=True, with_kwargs=True)
        model.register_load_state_dict_pre_hook(_refuse_plain_state)

    def __call__(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple[Any], dict] | None:
        if not self.is_enabled:
            return None
        if torch.compiler.is_compiling():  # Dynamo then falls back to eager, and the checks raise on all ranks
            raise ConfigError(COMPILED)
        root, error, cause, fingerprint = self.root, None, None, dict[str, Any]()
        counts: tuple[int, ...] = (0, 0, 0)
        num_threads = torch.get_num_threads()
        try:
            check_torch_modes(root.mesh.device)
            torch.set_num_threads(1)  # the GPU is idle meanwhile, and waking other threads can take 60 ms
            _check_last_backward(model)
            _read_gradient_dtypes(model)
            self._check_unchanged(model)
            check_modules(model, root.hookable, root.patchable)
            named = self._bind_arguments(args, kwargs)
            inputs, counts, fingerprint = root.read_call(named)
            if torch.is_grad_enabled():  # evaluation may show what a model does beyond its positions
                root.check_positions(f"a call with {counts[1]} positions (0 to {counts[1] - 1})", counts[1])
        except Exception as caught:
            error, cause = describe_error(caught, keep=(TypeError, ValueError, ConfigError)), caught
        finally:
            torch.set_num_threads(num_threads)
        totals = self._agree((error, fingerprint, *counts), cause)
        return (root.make_call(named, inputs, *totals),), {}

    def _bind_arguments(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments by name. Positional ones have the order of transformers' forward."""
        names = self.root.argument_names
        named = dict(zip(names, args, strict=False))
        twice = sorted(named.keys() & kwargs.keys())
        if twice or len(args) > len(named):
            problem = f"{twice[0]} was passed twice" if twice else f"{len(args)} positional arguments are too many"
            raise TypeError(f"{problem}; pass arguments by name, or in the order {', '.join(names)}")
        return named | kwargs

    def _check_unchanged(self, model: nn.Module) -> None:
        before, now = self.snapshot, _snapshot(model)
        for name in {**before, **now}:
            if name not in before or now.get(name) not in (before[name], GATHERED_PARAMETER):
                raise ConfigError(
                    f"{name} was added, removed, replaced, tied or converted after parallelize, which has no effect; "
                    "change the model first, then parallelize; to compute in another dtype, set Layout(dtype=...)"
                )

    def _agree(self, report: Report, cause: Exception | None) -> tuple[int, int, int]:
        """Return the numbers of valid labels, positions and frames in the global batch. Raises on all ranks or on none.
        Does not synchronize with the device."""
        reports, cp = gather_objects(report), self.root.mesh.cp_size
        raise_first([error for error, *_ in reports], cause=cause)
        _raise_if_ranks_differ([fingerprint for _, fingerprint, *_ in reports], cp)
        num_valid, num_positions, num_frames = zip(*(report[2:] for report in reports[::cp]), strict=True)
        return sum(num_valid), max(num_positions), sum(num_frames)


# ---- arguments of a call


def parse_arguments(input_ids: Any = None, **named: Any) -> tuple[dict[str, Tensor], float | None]:
    """Return the tensors among the arguments, on the host, where documents are read, and num_items_in_batch."""
    for name in named.keys() - {*ARGUMENTS, *KERNEL_ARGUMENTS, *INTERNAL_ARGUMENTS}:
        value, no_effect = named[name], name == "return_dict"  # use_cache=False and return_dict=True change nothing
        if value is not None and (isinstance(value, Tensor) or value != no_effect):
            raise TypeError(
                f"{name} is not supported by a parallel model; use {', '.join(ARGUMENTS)}. For hidden states, hook the "
                "decoder layers. For a cache, use model.generate"
            )
    inputs = {name: named[name] for name in INPUTS if named.get(name) is not None} | {"input_ids": input_ids}
    if (ends := named.get("cu_seq_lens_q")) is not None and isinstance(input_ids, Tensor):
        inputs.setdefault("document_ids", documents_from_lengths(ends, input_ids))
    if named.get("per_token") and not inputs.keys() & {"labels", "shift_labels"}:
        raise TypeError("per_token=True returns log-probabilities of labels; pass labels")
    temperature = named.get("temperature")
    if temperature is not None and not (isinstance(temperature, int | float) and 0 < temperature < math.inf):
        raise ValueError(
            f"temperature={temperature!r} is not a number above 0; pass one for all tokens, or leave it out"
        )
    if temperature is not None and not named.get("per_token"):
        raise ValueError(f"temperature={temperature} needs per_token=True; use ithaka.token_logprobs, or leave it out")
    items = named.get("num_items_in_batch")
    items = items.item() if isinstance(items, Tensor) and items.numel() == 1 else items
    return {name: to_integers(name, value) for name, value in inputs.items()}, items


def shard_expert_indices(
    layers: Any, indices: Tensor | None, shape: torch.Size, share: Share, mesh: Mesh
) -> Tensor | None:
    """Return the experts that this rank's tokens must choose in each layer, [s, L, k], from [B, N, L, k]."""
    if indices is None:
        return None
    check_choices([layer.forward.experts.block for layer in layers], indices, shape)
    return select_own_tokens(indices.flatten(0, 1).to("cpu", torch.int16), mesh, share.docs.sharding, 0).to(mesh.device)


def fingerprint_call(tensors: dict[str, Tensor], items: float | None, named: dict[str, Any]) -> dict[str, Any]:
    """Return the shape and hash of each tensor argument, or its value: equal on two ranks only if the arguments are."""
    fingerprint: dict[str, Any] = dict.fromkeys((*INPUTS, "expert_indices"), "not passed")
    if isinstance(experts := named.get("expert_indices"), Tensor):
        tensors = tensors | {"expert_indices": experts.cpu()}
    for name, tensor in tensors.items():
        values: Any = tensor.contiguous().numpy()
        digest = hashlib.sha1(values, usedforsecurity=False).hexdigest()[:16]
        fingerprint[name] = f"shape {tuple(tensor.shape)} with hash {digest}"
    fingerprint |= {"temperature": named.get("temperature") or 1.0, "per_token": bool(named.get("per_token"))}
    labelled = bool(tensors.keys() & {"labels", "shift_labels"})
    return fingerprint | dict(zip(MODES, (labelled, torch.is_grad_enabled(), items), strict=True))


# ---- differences between ranks


def _raise_if_ranks_differ(calls: list[dict[str, Any]], cp: int) -> None:
    """Raise ConfigError unless the ranks of each cp group have the same batch, and all ranks the same MODES."""
    same_batch = (
        "ranks {} and {} share a sequence but have different batches: {}. Pass the same batch on all ranks of a cp "
        "group: shard data by the data-parallel rank, not the global one, e.g. DistributedSampler(dataset, "
        f"num_replicas={len(calls) // cp}, rank=torch.distributed.get_rank() // {cp})"
    )
    same_modes = (
        "ranks {} and {} make different calls: {}. Pass labels on every rank or on none, use torch.no_grad() on every "
        "rank or on none, and set num_items_in_batch to the valid labels of all data-parallel ranks"
    )
    for b, call in enumerate(calls[1:], 1):
        inputs = [name for name in call if name not in MODES]
        for a, names, message in ((b - b % cp, inputs, same_batch), (0, MODES, same_modes)):
            values = [(name, calls[a][name], call[name]) for name in names]
            differences = [f"{name}: {x} on rank {a}, {y} on rank {b}" for name, x, y in values if x != y]
            if differences:
                raise ConfigError(message.format(a, b, "; ".join(differences)))


# ---- the model


def check_modules(model: nn.Module, hookable: re.Pattern, patchable: re.Pattern) -> None:
    """Refuse hooks and patches that a parallel model would ignore."""
    for name, module in model.named_modules():
        where = name or "the model"
        for hooks, kind in HOOK_KINDS.items():
            if all(map(_is_trusted, getattr(module, hooks).values())):
                continue
            if not hookable.fullmatch(name) or (name, kind) == ("", "forward pre-hook"):
                raise ConfigError(
                    f"{where} has a {kind}, which a parallel model would ignore or call with other values; remove the "
                    "hook, or put it on the decoder layer or embed_tokens"
                )
        if "forward" in vars(module) and not patchable.fullmatch(name) and not _is_trusted(module.forward):
            raise ConfigError(
                f"{where} has a replaced forward, which a parallel model would ignore; parallelize the model as "
                "Hugging Face loads it, without patches and without a device_map over several devices"
            )
    for name, param in model.named_parameters():
        if param._backward_hooks:
            raise ConfigError(
                f"{name} has a gradient hook, which FSDP2 does not call; change param.grad after backward, or use "
                "register_post_accumulate_grad_hook after parallelize"
            )


def _is_trusted(function: Any) -> bool:
    return str(getattr(inspect.unwrap(function), "__module__", "")).startswith(TRUSTED_MODULES)


def _snapshot(model: nn.Module) -> dict[str, Any]:
    """Name -> module, and name -> dtype for parameters; a tied parameter has one name."""
    dtypes = {name: p.dtype if isinstance(p, DTensor) else GATHERED_PARAMETER for name, p in model.named_parameters()}
    return {**dict(model.named_modules()), **dtypes}


def mark_replaced_parameters(model: nn.Module) -> None:
    """Mark the parameters that FSDP2 will replace, so that optimizers made with them are refused."""
    _watch_optimizers(_check_optimizer)
    for param in model.parameters():
        param.replaced_by_shards = True  # type: ignore[attr-defined]


def _check_optimizer(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    if any(hasattr(param, "replaced_by_shards") for group in optimizer.param_groups for param in group["params"]):
        raise ConfigError(
            f"the {type(optimizer).__name__} was made before parallelize, with parameters that the model no longer uses"
            "; make it from model.parameters() after parallelize"
        )
    # Fused and foreach steps do not increment the version of sharded parameters.
    params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    torch.autograd.graph.increment_version([param for param in params if isinstance(param, DTensor)])


# ---- the dtype of parallelize, and wrappers around its result


def compute_dtype(model: Any, layout: Layout) -> torch.dtype:
    """Return the layout's dtype, or else the model's. Raises ConfigError if gradients would underflow in it, or in
    the dtype of a trained parameter, which they have after backward."""
    dtype = getattr(torch, layout.dtype) if layout.dtype else model.dtype
    check_dtype("the model's dtype", str(dtype).removeprefix("torch."))
    for name, param in model.named_parameters():
        if param.requires_grad:
            check_dtype(f"{name}.dtype", str(param.dtype).removeprefix("torch."))
    return dtype


class _RefuseDDP:
    """DistributedDataParallel first iterates over a module's names of parameters to ignore."""

    def __iter__(self) -> NoReturn:
        raise ConfigError(
            "DistributedDataParallel cannot wrap a parallel model: its parameters are sharded, and backward already "
            "sums gradients over all ranks; use the model that parallelize returns"
        )


def refuse_wrappers(model: nn.Module) -> None:
    """Make DDP and REFUSED_METHODS raise. torch.compile(model) raises at the first call."""
    model._ddp_params_and_buffers_to_ignore = _RefuseDDP()  # type: ignore[assignment]
    for name, fix in REFUSED_METHODS.items():
        setattr(model, name, partial(_refuse, f"{name}() does not work on a parallel model; {fix}"))


def _refuse(message: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ConfigError(message)


def _refuse_plain_state(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Refuse plain tensors in `load_state_dict`, where they would have to be sharded."""
    for name, param in model.named_parameters():
        value = state.get(prefix + name)
        if isinstance(param, DTensor) and value is not None and not isinstance(value, DTensor):
            raise ConfigError(
                f"load_state_dict got a plain tensor for {name}, which is sharded; load it before parallelize, or use "
                "set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True)) from "
                "torch.distributed.checkpoint.state_dict"
            )


# ---- parameters that change between forward and backward


def count_changes(*modules: nn.Module) -> int:
    """In-place changes so far to the FSDP2 parameters of `modules`: to their shards, and to gathered ones, which the
    root keeps until backward.

    Autograd does not detect them, because backward gathers the shards again.
    """
    groups = [module._get_fsdp_state()._fsdp_param_group for module in modules if isinstance(module, FSDPModule)]
    params: list[Any] = [param for group in groups if group is not None for param in group.fsdp_params]
    shards = [param.sharded_param for param in params]
    gathered = [param._unsharded_param for param in params if hasattr(param, "_unsharded_param")]
    return sum(tensor._version for tensor in (*shards, *(shard._local_tensor for shard in shards), *gathered))


def guard_backward(units: Mapping[str, Callable[[], int]], outputs: Iterable[Tensor]) -> None:
    """Make backward from `outputs` raise if the changes that `units` count are not those of now. It raises before FSDP2
    starts, so the model stays usable. Untied embeddings may change: backward does not read them."""
    before = [count() for count in units.values()]

    def check(grad: Tensor) -> None:
        for (name, count), earlier in zip(units.items(), before, strict=True):
            if count() != earlier:
                raise RuntimeError(PARAMETERS_CHANGED.format(name))

    for output in outputs:
        if output.requires_grad:
            output.register_hook(check)
        elif torch.is_grad_enabled():
            output.backward = partial(_refuse, NOTHING_TRAINED)  # type: ignore[method-assign]


# ---- state around a call


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and each of its modules back into its own mode at the end."""
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in in_training:  # model.train() would also change modules that the user froze with eval()
            module.training = True


def _check_last_backward(model: Any) -> None:
    """Refuse a model whose last backward raised: FSDP2 would silently skip gradients from then on."""
    if model._get_fsdp_state()._state_ctx.post_backward_final_callback_queued:
        raise ConfigError(
            "an earlier backward of this model did not finish, so FSDP2 would skip gradients; load and parallelize the "
            "model again, or resume from the latest checkpoint"
        )


def _read_gradient_dtypes(model: Any) -> None:
    """FSDP2 reads the dtypes of gradients in its first call, from the parameters that are trainable then. If adapters
    were disabled in that call, there were none, and gradients would be reduced in the compute dtype: read again."""
    for state in model._get_fsdp_state()._state_ctx.all_states:
        group = state._fsdp_param_group
        if group is not None and getattr(group, "_orig_dtype", False) is None:  # torch 2.15 has none: it needs no help
            group._init_mp_dtypes()


def check_torch_modes(device: torch.device) -> None:
    """Refuse autocast, inference mode and torch.compile around a call."""
    cast, dtype = torch.is_autocast_enabled(device.type), str(torch.get_autocast_dtype(device.type))[len("torch.") :]
    if torch.compiler.is_compiling() or callable(get_compile_callback()):
        raise ConfigError(COMPILED)
    for is_on, mode, instead in (
        (cast, f"torch.autocast({device.type!r}, {dtype})", f"Layout(dtype={dtype!r}) or model.dtype"),
        (torch.is_inference_mode_enabled(), "torch.inference_mode()", "torch.no_grad()"),
    ):
        if is_on:
            raise ConfigError(f"{mode} has no effect on a parallel model; use {instead} instead")
