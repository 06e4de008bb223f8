"""Check every call of a parallel model before its first layer, and agree on it with all ranks.

A rank that raises alone leaves the others waiting in a collective. So each rank checks the model and its inputs,
one small collective gathers the results, and if anything is wrong every rank raises the same error.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import PreTrainedModel

from ithaka.config import ConfigError
from ithaka.dist.mesh import Mesh
from ithaka.model.batch import Share, check_integers, check_tokens, take_share
from ithaka.ops.gated import HOOKS

TENSORS = ("input_ids", "labels", "position_ids", "attention_mask", "document_ids")
ARGUMENTS = (*TENSORS, "num_items_in_batch")

# Hugging Face's other arguments: the values that change nothing, and what to do instead of any other value.
NO_CACHE = "there is no cache; export the model and generate with Hugging Face's own"
OTHER_ARGUMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_cache": ((False,), NO_CACHE),
    "past_key_values": ((), NO_CACHE),
    "cache_position": ((), NO_CACHE),
    "inputs_embeds": ((), "pass input_ids; a forward hook on embed_tokens can change the embeddings"),
    "output_attentions": ((False,), "attention weights never exist as a whole"),
    "output_hidden_states": ((False,), "read them with a forward hook on the decoder layers"),
    "output_router_logits": ((False,), "the router's auxiliary loss is not computed"),
    "return_dict": ((True,), "the output is always a ModelOutput; take out.to_tuple()"),
    "logits_to_keep": ((0,), "slice out.logits"),
}

CONFIGURED = ("output_attentions", "output_hidden_states", "return_dict")  # Hugging Face reads them at each call

GLOBAL_HOOKS = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)
Counts = tuple[int, ...]  # hooks of each kind
KINDS = ("forward hook", "forward pre-hook", "backward hook", "backward pre-hook")  # in the order of HOOKS
# transformers leaves inert hooks behind when outputs were once captured.
CAPTURING = "transformers.utils.output_capturing"

# torch 2.13's name, or the one before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Call:
    """A checked call."""

    share: Share
    shape: torch.Size  # of input_ids
    num_tokens: int  # valid labels of the global batch
    divisor: int  # of the summed loss


class CallCheck:
    """A pre-hook of the model that runs before FSDP2's and turns the user's arguments into a `Call`.

    There and not in forward: FSDP2 would move the whole batch to the device, and cannot be called again after an
    error in forward.
    """

    def __init__(self, model: PreTrainedModel, mesh: Mesh, storage: torch.device, users: list[Counts]) -> None:
        """`storage`: of the parameters. `users`: the hooks of each module before FSDP2 added its own."""
        self.mesh, self.group = mesh, mesh.fsdp.get_group()
        model.register_forward_pre_hook(self, prepend=True, with_kwargs=True)
        self.frozen = Frozen(model, storage, users)

    def __call__(self, model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple[Call], dict]:
        error, report, share, items = None, Report(), None, None
        try:
            _refuse_compile()
            self.frozen.check()
            refuse_autocast(self.mesh.device)
            tensors, items = _arguments(args, kwargs)
            report = Report.of(tensors, items)
            share = self._share(model, tensors)
            if items == 0 and share.num_valid:
                raise ValueError(
                    f"num_items_in_batch=0, but this batch has {share.num_valid} valid labels; pass their number over "
                    "all ranks and micro-batches, or leave it out"
                )
        except (TypeError, ValueError) as caught:
            error = caught
            report.error = (type(caught), str(caught))
        num_tokens = self._agree(report, share.num_valid if share is not None else 0, error)
        assert share is not None
        for layer in model.model.layers:
            layer.forward.hooked = self.frozen.hooked
        shape = tensors["input_ids"].shape
        return (Call(share.to(self.mesh.device), shape, num_tokens, max(items or num_tokens, 1)),), {}

    def _share(self, model: PreTrainedModel, tensors: dict[str, Tensor]) -> Share:
        share = take_share(
            *(tensors.get(name) for name in TENSORS),  # type: ignore[arg-type]
            cp_rank=self.mesh.cp_rank,
            cp_size=self.mesh.cp_size,
        )
        check_tokens(tensors["input_ids"], tensors.get("labels"), model.model.embed_tokens.num_embeddings)
        return share

    def _agree(self, report: "Report", num_valid: int, error: Exception | None) -> int:
        """Valid labels of the global batch, known without asking the device. Raises on all ranks or on none."""
        if self.group.size() == 1:
            if error is not None:
                raise error
            return num_valid
        mine = [int(report.error is not None), report.batch_digest(), report.mode_digest(), num_valid]
        rows = self._gather(mine)
        cp = self.mesh.cp_size
        groups = [rows[first : first + cp] for first in range(0, len(rows), cp)]
        failed, batches, modes, counts = zip(*rows, strict=True)
        same_batches = all(len({row[1] for row in group}) == 1 for group in groups)
        if any(failed) or not same_batches or len(set(modes)) > 1:
            reports: list[Report] = [report] * len(rows)
            dist.all_gather_object(reports, report, group=self.group)
            raise explain(reports, cp) from error
        return sum(counts[::cp])

    def _gather(self, mine: list[int]) -> list[list[int]]:
        """Every rank's row; on the CPU where the group has a backend for it, else on the device."""
        devices = self.group._device_types
        device = torch.device("cpu") if not devices or torch.device("cpu") in devices else self.mesh.device
        rows = torch.empty(self.group.size() * len(mine), dtype=torch.long, device=device)
        all_gather(rows, torch.tensor(mine, device=device), group=self.group)
        return rows.view(-1, len(mine)).tolist()


# ---- what one rank was given


@dataclass
class Report:
    """One rank's inputs, as far as others need to know them."""

    error: tuple[type[Exception], str] | None = None
    tensors: tuple[tuple[str, tuple[int, ...], bytes], ...] = ()  # name, shape, digest of the values
    with_labels: bool = False
    with_grad: bool = False
    num_items: int | None = None

    @classmethod
    def of(cls, tensors: dict[str, Tensor], num_items: int | None) -> "Report":
        described = tuple((name, tuple(t.shape), _digest(t)) for name, t in tensors.items())
        return cls(None, described, "labels" in tensors, torch.is_grad_enabled(), num_items)

    def batch_digest(self) -> int:
        """Must be equal inside a cp group."""
        return _as_int64(repr(self.tensors))

    def mode_digest(self) -> int:
        """Must be equal on all ranks: their collectives depend on it."""
        return _as_int64(repr((self.with_labels, self.with_grad, self.num_items)))


def _digest(tensor: Tensor) -> bytes:
    values: Any = tensor.contiguous().numpy()
    return hashlib.sha1(values, usedforsecurity=False).digest()


def _as_int64(text: str) -> int:
    return int.from_bytes(hashlib.sha1(text.encode(), usedforsecurity=False).digest()[:8], "little", signed=True)


def _arguments(args: tuple, kwargs: dict[str, Any]) -> tuple[dict[str, Tensor], int | None]:
    """The tensors that were given, on the host (documents are read there anyway), and num_items_in_batch."""
    if len(args) > 1:
        raise TypeError(
            "a parallel model takes only input_ids by position; name the others: "
            "model(ids, attention_mask=mask, labels=labels)"
        )
    if args and "input_ids" in kwargs:
        raise TypeError("input_ids is given twice: by position and by name")
    given = {**({"input_ids": args[0]} if args else {}), **kwargs}
    for name in given.keys() - set(ARGUMENTS):
        _refuse_argument(name, given[name])
    if given.get("input_ids") is None:
        raise TypeError("input_ids is missing; pass the token ids, [batch, tokens]")
    tensors = {name: check_integers(name, given[name]) for name in TENSORS if given.get(name) is not None}
    items = given.get("num_items_in_batch")
    items = items.item() if isinstance(items, Tensor) else items
    if items is not None and (int(items) != items or items < 0):
        raise ValueError(f"num_items_in_batch={items} is not a count; pass the number of valid labels, or leave it out")
    return tensors, None if items is None else int(items)


def _refuse_argument(name: str, value: Any) -> None:
    """Accepts Hugging Face's other arguments where they change nothing."""
    if value is None:
        return
    if name not in OTHER_ARGUMENTS:
        raise TypeError(f"a parallel model takes no argument {name}; it takes {', '.join(ARGUMENTS)}")
    neutral, instead = OTHER_ARGUMENTS[name]
    if isinstance(value, Tensor) or value not in neutral:
        shown = type(value).__name__ if isinstance(value, Tensor) else repr(value)[:60]
        raise TypeError(f"{name}={shown} is not supported by a parallel model: {instead}")


def _refuse_compile() -> None:
    if torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None:
        raise ConfigError(compiled("a parallel model"))


def refuse_autocast(device: torch.device) -> None:
    if torch.is_autocast_enabled(device.type):
        dtype = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
        raise ConfigError(
            f"torch.autocast({device.type!r}, {dtype}) is on around a parallel model, whose layers would ignore parts "
            f"of it; leave autocast out and parallelize with Layout(dtype={dtype!r}) (model.dtype in a config): "
            "parameters stay in their own dtype, computation is in that one"
        )


# ---- what may not change after parallelize


@dataclass
class _Module:
    name: str
    module: nn.Module
    children: list[nn.Module | None]
    parameters: list[str]
    own_hooks: Counts  # FSDP2's and ours


class Frozen:
    """The modules of a parallel model, whose schedule runs their weights and not their forwards.

    `check` refuses what it would ignore: hooks, modules and parameters that came later, other dtypes.
    """

    def __init__(self, model: PreTrainedModel, storage: torch.device, users: list[Counts]) -> None:
        self.model, self.storage, self.hooked = model, storage, False
        self.dtype, self.tied = self._sample().dtype, self._is_tied()
        self.modules = []
        for (name, module), now, before in zip(model.named_modules(), count_hooks(model), users, strict=True):
            own = tuple(n - m for n, m in zip(now, before, strict=True))
            self.modules.append(_Module(name, module, list(module._modules.values()), list(module._parameters), own))

    def check(self) -> None:
        self.hooked = any(GLOBAL_HOOKS)
        for name in CONFIGURED:
            _refuse_argument(name, getattr(self.model.config, name, None))
        for each in self.modules:
            module = each.module
            if list(module._modules.values()) != each.children or list(module._parameters) != each.parameters:
                raise ConfigError(
                    f"{each.name or 'the model'} got other modules or parameters after parallelize, which would be "
                    "ignored or not sharded; change the model first (adapters, new embeddings), then parallelize"
                )
            if module._compiled_call_impl is not None:
                raise ConfigError(compiled(each.name or "the model"))
            if tuple([len(getattr(module, hooks)) for hooks in HOOKS]) != each.own_hooks:
                self._check_hooks(each)
            _check_parameters(each.name, module)
        self._check_storage()
        for index, layer in enumerate(self.model.model.layers):
            if getattr(layer, "gradient_checkpointing", False):
                raise ConfigError(
                    f"gradient_checkpointing is on in layer {index}: a parallel model keeps and recomputes what its "
                    "layout says; leave gradient_checkpointing_enable() out (Trainer: gradient_checkpointing=False); "
                    "the default Layout recomputes every layer already"
                )

    def _check_hooks(self, each: _Module) -> None:
        for kind, count, own in zip(KINDS, _hooks_of(each.module), each.own_hooks, strict=True):
            if count > own and not can_be_hooked(each.name, kind):
                raise ConfigError(refused_hook(each.name, kind))
            self.hooked = self.hooked or count > own

    def _check_storage(self) -> None:
        sample = self._sample()
        if isinstance(sample, DTensor):  # else it is gathered, in the dtype of the computation
            if sample.dtype != self.dtype:
                raise ConfigError(
                    f"the parameters were {self.dtype} at parallelize and are {sample.dtype} now; convert the model "
                    "first, or parallelize with Layout(dtype=...), which computes in that dtype"
                )
            if sample.device.type != self.storage.type:
                raise ConfigError(
                    f"the parameters are on {sample.device} and belong on {self.storage}; leave the model where "
                    "parallelize put it"
                )
        if self._is_tied() != self.tied:
            raise ConfigError(
                f"lm_head and embed_tokens were {'' if self.tied else 'not '}tied at parallelize and are "
                f"{'not ' if self.tied else ''}now; tie or untie them first, then parallelize"
            )

    def _sample(self) -> Tensor:
        return self.model.model.layers[0].input_layernorm.weight

    def _is_tied(self) -> bool:
        return self.model.lm_head.weight is self.model.model.embed_tokens.weight


def compiled(what: str) -> str:
    return (
        f"torch.compile is on around {what}, whose schedule it cannot follow; leave it out and parallelize with "
        "Layout(compile=True) (train.compile in a config), which compiles the MLP"
    )


def count_hooks(model: nn.Module) -> list[Counts]:
    """Of each module, in the order of `named_modules`: its hooks of each kind."""
    return [_hooks_of(module) for module in model.modules()]


def _hooks_of(module: nn.Module) -> Counts:
    return tuple(
        sum(getattr(hook, "__module__", None) != CAPTURING for hook in getattr(module, hooks).values())
        for hooks in HOOKS
    )


def can_be_hooked(name: str, kind: str) -> bool:
    """Whether a module runs as Hugging Face's does, so that a hook on it sees what it should."""
    parts = name.split(".")
    if name == "":
        return kind != "forward pre-hook"  # it would see a Call
    is_layer = parts[:2] == ["model", "layers"] and len(parts) == 3
    in_mlp = parts[:2] == ["model", "layers"] and parts[3:4] == ["mlp"]
    return is_layer or in_mlp or name == "model.embed_tokens"


def refused_hook(name: str, kind: str) -> str:
    if name == "":
        return (
            f"the model has a {kind}, which would not see the arguments of the call; remove it and change them "
            "before the call"
        )
    return (
        f"{name} has a {kind}, which would be ignored or see something else: a parallel model does not run that "
        "module's own forward; remove the hook, or put it on the decoder layer, its mlp or embed_tokens"
    )


def check_untouched(model: PreTrainedModel) -> None:
    """Before anything is changed: refuses hooks and replaced forwards that a parallel model would ignore."""
    for name, module in model.named_modules():
        for kind, count in zip(KINDS, _hooks_of(module), strict=True):
            if count and not can_be_hooked(name, kind):
                raise ConfigError(refused_hook(name, kind))
        _check_parameters(name, module)
        runs = "norm" in name or "rotary" in name or "mlp" in name or name == "model.embed_tokens"
        if "forward" in vars(module) and not runs:
            raise ConfigError(
                f"{name or 'the model'} has a forward of its own, which a parallel model would ignore; parallelize the "
                "model as Hugging Face loads it, without patches or a device_map over several devices"
            )


def _check_parameters(name: str, module: nn.Module) -> None:
    for key, param in module._parameters.items():
        if param is not None and param._backward_hooks:
            raise ConfigError(
                f"{name}.{key} has a gradient hook, which FSDP2 does not call; change param.grad after backward, or "
                "use register_post_accumulate_grad_hook after parallelize"
            )


REPLACED = "_replaced_by_shards"
_optimizers_checked: list[Any] = []  # the handle of the one hook on all optimizers


def mark_replaced(model: nn.Module) -> None:
    """The parameters, which FSDP2 is about to replace, so that an optimizer that still has them is refused."""
    for param in model.parameters():
        setattr(param, REPLACED, True)
    if not _optimizers_checked:
        _optimizers_checked.append(register_optimizer_step_pre_hook(_check_optimizer))


def _check_optimizer(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    if any(hasattr(param, REPLACED) for group in optimizer.param_groups for param in group["params"]):
        raise ConfigError(
            f"the {type(optimizer).__name__} was made before parallelize and would update parameters that the model no "
            "longer has; make it from model.parameters() after parallelize"
        )


# ---- one error for all ranks


def explain(reports: list[Report], cp: int) -> Exception:
    """The error that every rank raises, from what all of them were given."""
    texts: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        if report.error is not None:
            texts.setdefault(report.error[1], []).append(rank)
    if texts:
        kind = next(report.error[0] for report in reports if report.error is not None)
        everywhere = len(texts) == 1 and len(*texts.values()) == len(reports)
        lines = [text if everywhere else f"{_ranks(ranks)}: {text}" for text, ranks in texts.items()]
        return kind("\n".join(lines))
    for first in range(0, len(reports), cp):
        group = reports[first : first + cp]
        other = next((i for i, report in enumerate(group) if report.tensors != group[0].tensors), None)
        if other is not None:
            return ConfigError(_different_batches(group[0], group[other], first, first + other, cp, len(reports)))
    return ConfigError(_different_modes(reports))


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _different_batches(a: Report, b: Report, rank_a: int, rank_b: int, cp: int, world_size: int) -> str:
    mine, theirs = ({name: (shape, digest) for name, shape, digest in report.tensors} for report in (a, b))
    differences = []
    for name in TENSORS:
        if (name in mine) != (name in theirs):
            given, missing = (rank_a, rank_b) if name in mine else (rank_b, rank_a)
            differences.append(f"{name} is given on rank {given} and not on rank {missing}")
        elif name in mine and mine[name][0] != theirs[name][0]:
            differences.append(f"{name} has shape {mine[name][0]} on rank {rank_a}, {theirs[name][0]} on rank {rank_b}")
        elif mine.get(name) != theirs.get(name):
            differences.append(f"{name} has the same shape and other values")
    return (
        f"ranks {rank_a} and {rank_b} share a sequence (cp={cp}) but got different batches: {'; '.join(differences)}. "
        "Every rank of a cp group must get the same batch: choose data by the data-parallel rank, not by the global "
        f"one, e.g. DistributedSampler(dataset, num_replicas={world_size // cp}, "
        f"rank=torch.distributed.get_rank() // {cp})"
    )


def _different_modes(reports: list[Report]) -> str:
    first, rules = reports[0], []
    for field, what, rule in (
        ("with_labels", "labels given", "pass labels on every rank or on none"),
        ("with_grad", "gradients enabled", "use torch.no_grad() on every rank or on none"),
        ("num_items", "num_items_in_batch", "pass the number of valid labels summed over all data-parallel ranks"),
    ):
        rank = next((r for r, report in enumerate(reports) if getattr(report, field) != getattr(first, field)), None)
        if rank is not None:
            values = getattr(first, field), getattr(reports[rank], field)
            rules.append(f"{what}: {values[0]} on rank 0, {values[1]} on rank {rank}; {rule}")
    return f"the ranks call the model in different ways: {'. '.join(rules)}"
