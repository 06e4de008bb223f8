"""Check a model before parallelize, and every call of a parallel model before its first layer.

A parallel model runs its modules' weights, mostly not their forwards, so much of what users hang on a module would be
ignored without a word. And a rank that raises alone leaves the others waiting in a collective: each rank checks its
call, one small collective gathers the results, and if anything is wrong every rank raises the same error.
"""

import hashlib
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback as compiling
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from transformers import PreTrainedModel

from ithaka.config import ConfigError
from ithaka.dist.agree import RankError, gather_objects, raise_first
from ithaka.dist.mesh import Mesh
from ithaka.layer.mlp import HOOK_DICTS
from ithaka.layer.tiles import PARAMETERS_CHANGED
from ithaka.layout import check_parallelism
from ithaka.model.batch import INPUTS, Share, take_share, to_integers

# One rank's call, as far as others need to know it: error, facts, numbers of valid labels and of positions.
Report = tuple[RankError | None, dict[str, Any], int, int]
ARGUMENTS = (*INPUTS, "num_items_in_batch", "per_token")
# What collators add for FlashAttention and linear attention; the documents are read from cu_seq_lens_q.
OF_KERNELS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_watch_optimizers = cache(register_optimizer_step_pre_hook)
MODES = ("labels given", "gradients enabled", "num_items_in_batch")  # the ranks' collectives depend on them

HOOK_KINDS = dict(
    zip(HOOK_DICTS, ("forward hook", "forward pre-hook", "backward hook", "backward pre-hook"), strict=True)
)
GLOBAL_HOOKS = [getattr(torch_module, f"_global{hooks}") for hooks in HOOK_DICTS]
# Modules that run as in Hugging Face's model: a hook on them sees what it should. The model itself, "", takes hooks
# too, but a forward pre-hook would see a Call.
HOOKABLE = re.compile(r"model\.embed_tokens|model\.layers\.\d+(\.mlp(\..*)?)?|")
# Modules whose own forward is called, so that a replaced one counts.
CALLED = re.compile(r"model\.embed_tokens|.*(norm|rotary|mlp).*")
COMPILED = (
    "torch.compile is on around a parallel model, which runs its own kernels and collectives and cannot be traced; "
    "call the model without it, and compile the MLP with Layout(compile=True), or train.compile"
)
# Methods of a model that would change what parallelize made of it, each with the way out.
REFUSED = {
    "resize_token_embeddings": "resize first, then parallelize",
    "gradient_checkpointing_enable": "its layers recompute already; leave it out, or gradient_checkpointing=False",
    "compile": "compile the MLP with Layout(compile=True), or train.compile",
}
GATHERED = "a parameter that FSDP2 holds gathered, in the dtype of the computation"
# Where functions come from that are not the user's: ours, FSDP2's, and inert ones that transformers leaves behind.
OWN = ("ithaka.", "torch.distributed.", "transformers.utils.output_capturing")


@dataclass(frozen=True)
class Call:
    """A checked call."""

    mesh: Mesh
    share: Share
    shape: torch.Size  # of input_ids
    num_tokens: int  # valid labels of the global batch
    num_positions: int  # 1 + its largest position
    divisor: float  # of the summed loss
    per_token: bool  # whether log-probabilities, entropies and hits of the share's labels are wanted


class CallCheck:
    """A pre-hook of the model that runs before FSDP2's and turns the user's arguments into a `Call`.

    There and not in forward: FSDP2 would move the whole batch to the device, and cannot be called again after an
    error in forward.
    """

    def __init__(self, model: PreTrainedModel, mesh: Mesh) -> None:
        self.mesh, self.parts = mesh, _parts(model)
        params = inspect.signature(type(model).forward).parameters.values()  # transformers' own
        self.names = [param.name for param in params if param.kind is param.POSITIONAL_OR_KEYWORD][1:]
        model.register_forward_pre_hook(self, prepend=True, with_kwargs=True)

    def __call__(self, model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple[Call], dict]:
        if torch.compiler.is_compiling():  # Dynamo would trace the checks; it falls back, and they raise on all ranks
            raise ConfigError(COMPILED)
        mesh, error, facts, numbers = self.mesh, None, {}, (0, 0)
        num_threads = torch.get_num_threads()
        try:
            check_around(mesh.device)
            torch.set_num_threads(1)  # the GPU waits for this call, and other threads may be late, by 60 ms and more
            _check_finished(model)
            self._check_unchanged(model)
            hooked = check_modules(model)
            tensors, items = _arguments(**self._named(args, kwargs))
            facts = _facts(tensors, items) if mesh.world_size > 1 else {}
            share = take_share(tensors, model.model.embed_tokens.num_embeddings, mesh)
            numbers = share.num_valid, share.num_positions
        except (TypeError, ValueError) as caught:
            error = RankError(type(caught), str(caught))
        finally:
            torch.set_num_threads(num_threads)
        num_tokens, num_positions = self._agree((error, facts, *numbers))
        for layer in model.model.layers:
            layer.forward.hooked = hooked
        divisor = max(num_tokens, 1) if items is None else items or 1
        shape, per_token = tensors["input_ids"].shape, bool(kwargs.get("per_token"))
        return (Call(mesh, share, shape, num_tokens, num_positions, divisor, per_token),), {}

    def _named(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name; positional ones are in the order of transformers' forward."""
        named = dict(zip(self.names, args, strict=False))
        twice = sorted(named.keys() & kwargs.keys())
        if twice or len(args) > len(named):
            what = f"{twice[0]} was passed twice" if twice else f"{len(args)} positional arguments are too many"
            raise TypeError(f"{what}; pass arguments by name, or in the order {', '.join(self.names)}")
        return named | kwargs

    def _check_unchanged(self, model: PreTrainedModel) -> None:
        parts = _parts(model)
        for name in {**self.parts, **parts}:
            if name not in self.parts or parts.get(name) not in (self.parts[name], GATHERED):
                raise ConfigError(
                    f"{name} was added, removed, replaced, tied or converted after parallelize, which would be ignored;"
                    " change the model first, then parallelize; Layout(dtype=...) computes in another dtype"
                )

    def _agree(self, report: Report) -> tuple[int, int]:
        """Valid labels and positions of the global batch, known without asking the device. Raises on all ranks or on
        none."""
        reports, cp = gather_objects(report), self.mesh.cp_size
        raise_first([error for error, *_ in reports])
        _raise_differences([facts for _, facts, *_ in reports], cp)
        num_valid, num_positions = zip(*(report[2:] for report in reports[::cp]), strict=True)
        return sum(num_valid), max(num_positions)


# ---- the arguments of one call


def _arguments(input_ids: Any = None, **named: Any) -> tuple[dict[str, Tensor], float | None]:
    """The tensors that were given, on the host (documents are read there anyway), and num_items_in_batch."""
    for name in named.keys() - {*ARGUMENTS, *OF_KERNELS}:
        value, neutral = named[name], name == "return_dict"  # use_cache=False and the like change nothing, as None
        if value is not None and (isinstance(value, Tensor) or value != neutral):
            raise TypeError(
                f"{name} is not supported by a parallel model, which takes {', '.join(ARGUMENTS)}; hooks on decoder "
                "layers see hidden states; there is no cache: save the model and generate with Hugging Face's own"
            )
    given = {name: named[name] for name in INPUTS if named.get(name) is not None} | {"input_ids": input_ids}
    if (ends := named.get("cu_seq_lens_q")) is not None and isinstance(input_ids, Tensor):
        given.setdefault("document_ids", _documents(ends, input_ids))
    if named.get("per_token") and not given.keys() & {"labels", "shift_labels"}:
        raise TypeError("per_token=True gives log-probabilities of labels; pass labels")
    items = named.get("num_items_in_batch")
    items = items.item() if isinstance(items, Tensor) else items
    return {name: to_integers(name, value) for name, value in given.items()}, items


def _documents(ends: Tensor, input_ids: Tensor) -> Tensor:
    """document_ids of FlashAttention's cumulative lengths, which run through all rows."""
    lengths = ends.cpu().diff()
    if int(lengths.sum()) != input_ids.numel():
        raise ValueError(f"cu_seq_lens_q ends at {int(ends[-1])}; it must end at the {input_ids.numel()} input_ids")
    return torch.arange(len(lengths)).repeat_interleave(lengths).view(input_ids.shape)


def _facts(tensors: dict[str, Tensor], items: float | None) -> dict[str, Any]:
    """A call in words that are equal on two ranks only if what they say is."""
    facts: dict[str, Any] = dict.fromkeys(INPUTS, "not given")
    for name, tensor in tensors.items():
        values: Any = tensor.contiguous().numpy()
        digest = hashlib.sha1(values, usedforsecurity=False).hexdigest()[:16]
        facts[name] = f"shape {tuple(tensor.shape)} with hash {digest}"
    labelled = bool(tensors.keys() & {"labels", "shift_labels"})
    return facts | dict(zip(MODES, (labelled, torch.is_grad_enabled(), items), strict=True))


# ---- one error for all ranks


def _raise_differences(calls: list[dict[str, Any]], cp: int) -> None:
    """What the ranks of a cp group, or all ranks, must have in common."""
    same_batch = (
        "ranks {} and {} share a sequence but got different batches: {}. Every rank of a cp group must get the same "
        "batch: choose data by the data-parallel rank, not by the global one, e.g. DistributedSampler(dataset, "
        f"num_replicas={len(calls) // cp}, rank=torch.distributed.get_rank() // {cp})"
    )
    same_modes = (
        "ranks {} and {} call the model in different ways: {}. Pass labels on every rank or on none; likewise use "
        "torch.no_grad(); num_items_in_batch counts the valid labels of all data-parallel ranks"
    )
    for b, call in enumerate(calls[1:], 1):
        for a, names, message in ((b - b % cp, INPUTS, same_batch), (0, MODES, same_modes)):
            facts = [(name, calls[a][name], call[name]) for name in names]
            different = [f"{name}: {x} on rank {a}, {y} on rank {b}" for name, x, y in facts if x != y]
            if different:
                raise ConfigError(message.format(a, b, "; ".join(different)))


# ---- the model


def check_modules(model: nn.Module) -> bool:
    """Refuses what a parallel model would ignore. True: there are hooks, which may keep what they see."""
    hooked = any(GLOBAL_HOOKS)
    for name, module in model.named_modules():
        where = name or "the model"
        for hooks, kind in HOOK_KINDS.items():
            if all(map(_is_own, getattr(module, hooks).values())):
                continue
            if not HOOKABLE.fullmatch(name) or (name, kind) == ("", "forward pre-hook"):
                raise ConfigError(
                    f"{where} has a {kind}, which would be ignored or see something else: a parallel model takes the "
                    "module's place; remove the hook, or put it on the decoder layer, its mlp or embed_tokens"
                )
            hooked = True
        if "forward" in vars(module) and not CALLED.fullmatch(name) and not _is_own(module.forward):
            raise ConfigError(
                f"{where} has a forward of its own, which a parallel model would ignore; parallelize the model as "
                "Hugging Face loads it, without patches or a device_map over several devices"
            )
    for name, param in model.named_parameters():
        if param._backward_hooks:
            raise ConfigError(
                f"{name} has a gradient hook, which FSDP2 does not call; change param.grad after backward, or use "
                "register_post_accumulate_grad_hook after parallelize"
            )
    return hooked


def _is_own(function: Any) -> bool:
    return str(getattr(inspect.unwrap(function), "__module__", "")).startswith(OWN)


def _parts(model: nn.Module) -> dict[str, Any]:
    """The modules, and the dtypes of the parameters; a tied one has one name."""
    dtypes = {name: p.dtype if isinstance(p, DTensor) else GATHERED for name, p in model.named_parameters()}
    return {**dict(model.named_modules()), **dtypes}


def mark_replaced(model: nn.Module) -> None:
    """Marks the parameters that FSDP2 is about to replace: an optimizer that still has them is refused."""
    _watch_optimizers(_check_optimizer)
    for param in model.parameters():
        param.replaced_by_shards = True  # type: ignore[attr-defined]


def _check_optimizer(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    if any(hasattr(param, "replaced_by_shards") for group in optimizer.param_groups for param in group["params"]):
        raise ConfigError(
            f"the {type(optimizer).__name__} was made before parallelize and would update parameters that the model no "
            "longer has; make it from model.parameters() after parallelize"
        )
    # Fused and foreach steps change sharded parameters without counting it.
    params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    torch.autograd.graph.increment_version([param for param in params if isinstance(param, DTensor)])


# ---- what parallelize is given, and what may not wrap what it returns


def check_given(model: Any, cp: int | None, ring: int | None) -> None:
    """Refuse anything but a language model, or a PeftModel of one, and numbers of ranks below 1."""
    kind = type(model).__name__
    for name in ("module", "_orig_mod"):  # set by DistributedDataParallel and torch.compile
        if name in getattr(model, "_modules", ()):
            what = f"parallelize got the model inside a {kind}; pass model.{name}"
            raise ConfigError(f"{what}: ithaka shards it, and Layout(compile=True) compiles the MLP")
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, PreTrainedModel) or getattr(base, "lm_head", None) is None:
        way = "pass what AutoModelForCausalLM.from_pretrained or from_config returns"
        raise ConfigError(f"parallelize got a {kind}, which is not a language model of transformers; {way}")
    check_parallelism(cp=cp, ring=ring)


class _RefuseDDP:
    """DistributedDataParallel first asks a module for the names of parameters that it shall ignore."""

    def __iter__(self) -> NoReturn:
        raise ConfigError(
            "DistributedDataParallel cannot wrap a parallel model: its parameters are sharded, and backward sums their "
            "gradients over all ranks already; use what parallelize returned"
        )


def refuse_wrappers(model: nn.Module) -> None:
    """Make DDP and the methods in REFUSED raise; torch.compile(model) is found in the first call."""
    model._ddp_params_and_buffers_to_ignore = _RefuseDDP()  # type: ignore[assignment]
    for name, way in REFUSED.items():
        setattr(model, name, partial(_refuse, f"{name}() cannot change a parallel model: {way}"))


def _refuse(message: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ConfigError(message)


# ---- parameters that change between forward and backward


def num_changes(*modules: nn.Module) -> int:
    """How often the parameters that FSDP2 shards with `modules` were changed in place: shards, or gathered ones, which
    the root keeps until backward.

    Backward gathers shards again, so autograd does not notice that they changed.
    """
    groups = [module._get_fsdp_state()._fsdp_param_group for module in modules if isinstance(module, FSDPModule)]
    params: list[Any] = [param for group in groups if group is not None for param in group.fsdp_params]
    shards = [param.sharded_param for param in params]
    gathered = [param._unsharded_param for param in params if hasattr(param, "_unsharded_param")]
    return sum(tensor._version for tensor in (*shards, *(shard._local_tensor for shard in shards), *gathered))


def guard_backward(model: PreTrainedModel, outputs: Iterable[Tensor]) -> None:
    """Make backward from `outputs` raise if parameters that it needs changed meanwhile: before FSDP2 begins, so that
    the model can be called again. (Embeddings alone are not needed.)"""
    units = {layer.forward.name: layer.forward.num_changes for layer in model.model.layers}
    units["the head"] = partial(num_changes, model, model.lm_head)
    before = [count() for count in units.values()]

    def check(grad: Tensor) -> None:
        for (name, count), earlier in zip(units.items(), before, strict=True):
            if count() != earlier:
                raise RuntimeError(PARAMETERS_CHANGED.format(name))

    for output in outputs:
        if output.requires_grad:
            output.register_hook(check)


# ---- what is around a call


def _check_finished(model: PreTrainedModel) -> None:
    """Refuses a model whose last backward raised: FSDP2 would leave out gradients from then on, without a word."""
    if model._get_fsdp_state()._state_ctx.post_backward_final_callback_queued:
        raise ConfigError(
            "an earlier backward of this model did not finish, and FSDP2 would leave out gradients from now on; load "
            "and parallelize the model again, or resume from the last checkpoint"
        )


def check_around(device: torch.device) -> None:
    """Refuses what a call must not be wrapped in."""
    cast, dtype = torch.is_autocast_enabled(device.type), str(torch.get_autocast_dtype(device.type))[len("torch.") :]
    if torch.compiler.is_compiling() or callable(compiling()):
        raise ConfigError(COMPILED)
    for is_on, what, instead in (
        (cast, f"torch.autocast({device.type!r}, {dtype})", f"Layout(dtype={dtype!r}) or model.dtype"),
        (torch.is_inference_mode_enabled(), "torch.inference_mode()", "torch.no_grad()"),
    ):
        if is_on:
            raise ConfigError(f"{what} is on around a parallel model, which cannot honour it; use {instead} instead")
