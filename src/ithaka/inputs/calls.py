"""Check a model before parallelize, and every call of a parallel model before its first layer.

A parallel model uses its modules' weights but bypasses most of their forwards, so hooks and patches
on them would be silently ignored. And if one rank raises alone, the others hang in a collective. So
each rank checks its call, one small collective gathers the results, and all ranks raise the same
error.
"""

import hashlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ithaka.blocks.experts import ExpertBlock, check_choices
from ithaka.blocks.tiles import PARAMETERS_CHANGED
from ithaka.comm.agree import RankError, describe_error, gather_objects, raise_first
from ithaka.comm.mesh import Mesh
from ithaka.config import ConfigError
from ithaka.facts.dtypes import check_dtype
from ithaka.foreign.torch_core import (
    HOOK_DICTS,
    get_compile_callback,
    has_gradient_hooks,
    set_ddp_ignored,
    version_of,
)
from ithaka.foreign.torch_fsdp import (
    gathered_param,
    has_unfinished_backward,
    param_group,
    read_gradient_dtypes,
    shard_of,
)
from ithaka.inputs.shard import (
    INPUTS,
    Share,
    read_tensors,
    select_own_tokens,
    to_integers,
)
from ithaka.layout import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ARGUMENTS = (*INPUTS, "num_items_in_batch", "per_token", "temperature", "expert_indices")
INTERNAL_ARGUMENTS = ("hidden_only", "distillation", "packed")  # see CheckedCall and Share
# Collators add them for FlashAttention and linear attention; cu_seq_lens_q has the documents.
KERNEL_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_watch_optimizers = cache(register_optimizer_step_pre_hook)
# All ranks must agree on them: collectives depend on them.
MODES = ("labels passed", "gradients enabled", "num_items_in_batch")

_KINDS = ("forward hook", "forward pre-hook", "backward hook", "backward pre-hook")
HOOK_KINDS = dict(zip(HOOK_DICTS, _KINDS, strict=True))
COMPILED = (
    "torch.compile cannot trace a parallel model, which has its own kernels and collectives; call "
    "the model without it, and compile its layers with Layout(compile=True) or train.compile"
)
# Methods that would break a parallel model -> what to do instead.
REFUSED_METHODS = {
    "resize_token_embeddings": "resize first, then parallelize",
    "gradient_checkpointing_enable": (
        "its layers already recompute; leave it out, or set gradient_checkpointing=False"
    ),
    "activation_checkpointing_enable": "its layers already recompute; leave it out",
    "compile": "compile its layers with Layout(compile=True) or train.compile",
}
NOTHING_TRAINED = (
    "backward has no gradient to compute, because no parameter of the model requires one; call "
    "model.requires_grad_(True) before parallelize, or add an adapter"
)
GATHERED_PARAMETER = "a parameter that FSDP2 has gathered, in the compute dtype"
# Functions from these modules are not the user's: ours, FSDP2's, and inert hooks of transformers.
TRUSTED_MODULES = ("ithaka.", "torch.distributed.", "transformers.utils.output_capturing")


class CallCounts(NamedTuple):
    """Counts of one rank, or of the global batch."""

    num_valid: int  # labels, or clips
    num_positions: int  # the most of any rank
    num_frames: int


class ReadCall(NamedTuple):
    """A call whose arguments were checked on this rank."""

    inputs: Any  # for `make_call` of the same root
    counts: CallCounts
    # values that the ranks of a cp group, or for MODES all ranks, must agree on
    fingerprint: dict[str, Any]


@dataclass(frozen=True)
class CheckedCall:
    """A decoder's call that passed all checks on every rank, and this rank's share of it."""

    mesh: Mesh
    share: Share
    shape: torch.Size  # of input_ids
    num_tokens: int  # valid labels of the global batch
    num_positions: int  # 1 + its largest position
    divisor: float  # the summed loss is divided by it
    per_token: bool  # return TokenResults for this rank's labels
    temperature: float = 1.0  # divides the logits, if per_token
    chosen_sLk: Tensor | None = None  # experts of this rank's tokens, if the user chose them
    hidden_only: bool = False  # return the last layer's output
    distillation: Any = None  # a teacher and a criterion (model/distillation.py)
    media: Any = None  # this rank's images, for vision-language models


class CallChecker:
    """A forward pre-hook that turns the user's arguments into a call that `root` has checked.

    It runs before FSDP2's, which would move the full batch to the device. And FSDP2 does not
    recover from an error in forward.
    """

    def __init__(self, root: Any) -> None:  # roots/root.py
        self.root = root
        self.snapshot = _snapshot(root.model)
        self.is_enabled = True  # not while it generates
        root.model.register_forward_pre_hook(self, prepend=True, with_kwargs=True)
        root.model.register_load_state_dict_pre_hook(_refuse_plain_state)

    def __call__(
        self, model: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple[object], dict] | None:
        if not self.is_enabled:
            return None
        # Dynamo then falls back to eager, and the checks raise on all ranks.
        if torch.compiler.is_compiling():
            raise ConfigError(COMPILED)
        root = self.root
        error = None
        cause = None
        call = ReadCall(None, CallCounts(0, 0, 0), {})
        num_threads = torch.get_num_threads()
        try:
            check_torch_modes(root.mesh.device)
            # The GPU is idle meanwhile, and waking other threads can take 60 ms.
            torch.set_num_threads(1)
            _check_last_backward(model)
            read_gradient_dtypes(model)
            self._check_unchanged(model)
            check_modules(model, root.hookable, root.patchable)
            named = self._bind_arguments(args, kwargs)
            call = root.read_call(named)
            # Evaluation may show what a model does beyond its positions.
            if torch.is_grad_enabled():
                most = call.counts.num_positions
                root.check_positions(f"a call with {most} positions (0 to {most - 1})", most)
        except Exception as caught:
            error = describe_error(caught, keep=(TypeError, ValueError, ConfigError))
            cause = caught
        finally:
            torch.set_num_threads(num_threads)
        totals = self._agree(error, cause, call)
        return (root.make_call(named, call.inputs, totals),), {}

    def _bind_arguments(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments by name; positional ones have transformers' order."""
        names = self.root.argument_names
        named = dict(zip(names, args, strict=False))
        twice = sorted(named.keys() & kwargs.keys())
        if twice or len(args) > len(named):
            problem = f"{len(args)} positional arguments are too many"
            if twice:
                problem = f"{twice[0]} was passed twice"
            fix = f"pass arguments by name, or in the order {', '.join(names)}"
            raise TypeError(f"{problem}; {fix}")
        return named | kwargs

    def _check_unchanged(self, model: nn.Module) -> None:
        before = self.snapshot
        now = _snapshot(model)
        for name in {**before, **now}:
            if name not in before or now.get(name) not in (before[name], GATHERED_PARAMETER):
                raise ConfigError(
                    f"{name} was added, removed, replaced, tied or converted after parallelize, "
                    "which has no effect; change the model first, then parallelize; to compute in "
                    "another dtype, set Layout(dtype=...)"
                )

    def _agree(
        self, error: RankError | None, cause: Exception | None, call: ReadCall
    ) -> CallCounts:
        """Return the counts of the global batch. Raises on all ranks or on none. Does not
        synchronize with the device."""
        reports = gather_objects((error, call.fingerprint, call.counts))
        cp = self.root.mesh.cp_size
        raise_first([error for error, _, _ in reports], cause=cause)
        _raise_if_ranks_differ([fingerprint for _, fingerprint, _ in reports], cp)
        counts = [counts for _, _, counts in reports[::cp]]
        num_valid, num_positions, num_frames = zip(*counts, strict=True)
        return CallCounts(sum(num_valid), max(num_positions), sum(num_frames))


# ---- arguments of a call


def parse_arguments(named: dict[str, Any]) -> tuple[dict[str, Tensor], float | None]:
    """Return the tensors among the arguments, on the host, and num_items_in_batch."""
    for name in named.keys() - {*ARGUMENTS, *KERNEL_ARGUMENTS, *INTERNAL_ARGUMENTS}:
        # use_cache=False and return_dict=True change nothing
        value = named[name]
        no_effect = name == "return_dict"
        if value is not None and (isinstance(value, Tensor) or value != no_effect):
            raise TypeError(
                f"{name} is not supported by a parallel model; use {', '.join(ARGUMENTS)}. For "
                "hidden states, hook the decoder layers. For a cache, use model.generate"
            )
    input_ids = to_integers("input_ids", named.get("input_ids"))
    tensors = read_tensors(named | {"input_ids": input_ids}, input_ids.shape)
    if named.get("per_token") and not tensors.keys() & {"labels", "shift_labels"}:
        raise TypeError("per_token=True returns log-probabilities of labels; pass labels")
    temperature = named.get("temperature")
    if temperature is not None:
        is_number = isinstance(temperature, int | float)
        if not is_number or not 0 < temperature < math.inf:
            rule = f"temperature={temperature!r} is not a number above 0"
            raise ValueError(f"{rule}; pass one for all tokens, or leave it out")
        if not named.get("per_token"):
            fix = "use ithaka.token_logprobs, or leave it out"
            raise ValueError(f"temperature={temperature} needs per_token=True; {fix}")
    items = named.get("num_items_in_batch")
    if isinstance(items, Tensor) and items.numel() == 1:
        items = items.item()
    return tensors, items


def shard_expert_indices(
    blocks: Sequence[ExpertBlock | None],
    indices: Tensor | None,
    shape: torch.Size,
    share: Share,
    mesh: Mesh,
) -> Tensor | None:
    """Return the experts that this rank's tokens must choose in each layer, [s, L, k], from
    [B, N, L, k]. `blocks`: those of all layers."""
    if indices is None:
        return None
    check_choices(blocks, indices, shape)
    indices_SLk = indices.flatten(0, 1).to("cpu", torch.int16)
    return select_own_tokens(indices_SLk, mesh, share.docs.sharding, 0).to(mesh.device)


def fingerprint_call(
    tensors: dict[str, Tensor], items: float | None, named: dict[str, Any]
) -> dict[str, Any]:
    """Return the shape and hash of each tensor, or its value: equal only for equal arguments."""
    fingerprint: dict[str, Any] = dict.fromkeys((*INPUTS, "expert_indices"), "not passed")
    if isinstance(experts := named.get("expert_indices"), Tensor):
        tensors = tensors | {"expert_indices": experts.cpu()}
    for name, tensor in tensors.items():
        values: Any = tensor.contiguous().numpy()
        digest = hashlib.sha1(values, usedforsecurity=False).hexdigest()[:16]
        fingerprint[name] = f"shape {tuple(tensor.shape)} with hash {digest}"
    fingerprint["temperature"] = named.get("temperature") or 1.0
    fingerprint["per_token"] = bool(named.get("per_token"))
    labelled = bool(tensors.keys() & {"labels", "shift_labels"})
    modes = (labelled, torch.is_grad_enabled(), items)
    return fingerprint | dict(zip(MODES, modes, strict=True))


# ---- differences between ranks


def _raise_if_ranks_differ(calls: list[dict[str, Any]], cp: int) -> None:
    """Refuse different batches in a cp group, and different MODES of any ranks."""
    same_batch = (
        "ranks {} and {} share a sequence but have different batches: {}. Pass the same batch on "
        "all ranks of a cp group: shard data by the data-parallel rank, not the global one, e.g. "
        f"DistributedSampler(dataset, num_replicas={len(calls) // cp}, "
        f"rank=torch.distributed.get_rank() // {cp})"
    )
    same_modes = (
        "ranks {} and {} make different calls: {}. Pass labels on every rank or on none, use "
        "torch.no_grad() on every rank or on none, and set num_items_in_batch to the valid labels "
        "of all data-parallel ranks"
    )
    for b, call in enumerate(calls[1:], 1):
        inputs = [name for name in call if name not in MODES]
        for a, names, message in ((b - b % cp, inputs, same_batch), (0, MODES, same_modes)):
            differences = [
                f"{name}: {calls[a][name]} on rank {a}, {call[name]} on rank {b}"
                for name in names
                if calls[a][name] != call[name]
            ]
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
                    f"{where} has a {kind}, which a parallel model would ignore or call with "
                    "other values; remove the hook, or put it on the decoder layer or embed_tokens"
                )
        is_replaced = "forward" in vars(module) and not patchable.fullmatch(name)
        if is_replaced and not _is_trusted(module.forward):
            raise ConfigError(
                f"{where} has a replaced forward, which a parallel model would ignore; "
                "parallelize the model as Hugging Face loads it, without patches and without a "
                "device_map over several devices"
            )
    for name, param in model.named_parameters():
        if has_gradient_hooks(param):
            raise ConfigError(
                f"{name} has a gradient hook, which FSDP2 does not call; change param.grad after "
                "backward, or use register_post_accumulate_grad_hook after parallelize"
            )


def _is_trusted(function: Callable[..., object]) -> bool:
    return str(getattr(inspect.unwrap(function), "__module__", "")).startswith(TRUSTED_MODULES)


def _snapshot(model: nn.Module) -> dict[str, Any]:
    """Name -> module, and name -> dtype for parameters; a tied parameter has one name."""
    dtypes = {
        name: p.dtype if isinstance(p, DTensor) else GATHERED_PARAMETER
        for name, p in model.named_parameters()
    }
    return {**dict(model.named_modules()), **dtypes}


def mark_replaced_parameters(model: nn.Module) -> None:
    """Mark the parameters that FSDP2 will replace: optimizers made with them are refused."""
    _watch_optimizers(_check_optimizer)
    for param in model.parameters():
        param.replaced_by_shards = True  # type: ignore[attr-defined]


def _check_optimizer(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(hasattr(param, "replaced_by_shards") for param in params):
        raise ConfigError(
            f"the {type(optimizer).__name__} was made before parallelize, with parameters that "
            "the model no longer uses; make it from model.parameters() after parallelize"
        )
    # Fused and foreach steps do not increment the version of sharded parameters.
    changing = [param for param in params if param.grad is not None and isinstance(param, DTensor)]
    torch.autograd.graph.increment_version(changing)


# ---- the dtype of parallelize, and wrappers around its result


def compute_dtype(model: "PreTrainedModel", layout: Layout) -> torch.dtype:
    """Return the layout's dtype, or else the model's. Refuses dtypes in which gradients would
    underflow, also of trained parameters, which have gradients of their dtype."""
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
            "DistributedDataParallel cannot wrap a parallel model: its parameters are sharded, "
            "and backward already sums gradients over all ranks; use the model that parallelize "
            "returns"
        )


def refuse_wrappers(model: nn.Module) -> None:
    """Make DDP and REFUSED_METHODS raise. torch.compile(model) raises at the first call."""
    set_ddp_ignored(model, _RefuseDDP())
    for name, fix in REFUSED_METHODS.items():
        setattr(model, name, partial(_refuse, f"{name}() does not work on a parallel model; {fix}"))


def _refuse(message: str, *args: object, **kwargs: object) -> NoReturn:
    raise ConfigError(message)


def _refuse_plain_state(model: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Refuse plain tensors, which would have to be sharded."""
    for name, param in model.named_parameters():
        value = state.get(prefix + name)
        if isinstance(param, DTensor) and value is not None and not isinstance(value, DTensor):
            raise ConfigError(
                f"load_state_dict got a plain tensor for {name}, which is sharded; load it before "
                "parallelize, or use set_model_state_dict(model, state, options=StateDictOptions"
                "(full_state_dict=True)) from torch.distributed.checkpoint.state_dict"
            )


# ---- parameters that change between forward and backward


def count_changes(*modules: nn.Module) -> int:
    """In-place changes so far to the FSDP2 parameters of `modules`: to their shards, and to
    gathered ones, which the root keeps until backward.

    Autograd does not detect them, because backward gathers the shards again.
    """
    groups = [param_group(module) for module in modules if isinstance(module, FSDPModule)]
    params: list[Any] = [
        param for group in groups if group is not None for param in group.fsdp_params
    ]
    changes = 0
    for param in params:
        shard = param.sharded_param
        changes += version_of(shard) + version_of(shard_of(shard))
        gathered = gathered_param(param)
        if gathered is not None:
            changes += version_of(gathered)
    return changes


def guard_backward(units: Mapping[str, Callable[[], int]], outputs: Iterable[Tensor]) -> None:
    """Make backward from `outputs` raise if the counts of `units` change until then. It raises
    before FSDP2 starts, so the model stays usable. Untied embeddings may change: backward does not
    read them."""
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
    """Put a model into evaluation mode, and at the end each module back into its own."""
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        # model.train() would also change modules that the user froze with eval().
        for module in in_training:
            module.training = True


def _check_last_backward(model: nn.Module) -> None:
    """Refuse a model whose last backward raised: FSDP2 would skip gradients."""
    assert isinstance(model, FSDPModule)
    if has_unfinished_backward(model):
        raise ConfigError(
            "an earlier backward of this model did not finish, so FSDP2 would skip gradients; "
            "load and parallelize the model again, or resume from the latest checkpoint"
        )


def check_torch_modes(device: torch.device) -> None:
    """Refuse autocast, inference mode and torch.compile around a call."""
    cast = torch.is_autocast_enabled(device.type)
    dtype = str(torch.get_autocast_dtype(device.type))[len("torch.") :]
    if torch.compiler.is_compiling() or callable(get_compile_callback()):
        raise ConfigError(COMPILED)
    autocast = f"torch.autocast({device.type!r}, {dtype})"
    inference = torch.is_inference_mode_enabled()
    for is_on, mode, instead in (
        (cast, autocast, f"Layout(dtype={dtype!r}) or model.dtype"),
        (inference, "torch.inference_mode()", "torch.no_grad()"),
    ):
        if is_on:
            raise ConfigError(f"{mode} has no effect on a parallel model; use {instead} instead")
