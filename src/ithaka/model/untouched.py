"""Refuse what a parallel model would ignore: hooks, replaced modules and forwards, other dtypes, autocast.

Its schedule takes weights out of modules and does not run their forwards, so most of what users hang on a module
would have no effect, or see something else.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import PreTrainedModel

from ithaka.config import ConfigError
from ithaka.ops.gated import HOOKS

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


@dataclass
class _Module:
    name: str
    module: nn.Module
    children: list[nn.Module | None]
    parameters: list[str]
    own_hooks: Counts  # FSDP2's and ours


class Untouched:
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


# ---- what is around a call


def check_around(device: torch.device) -> None:
    """Refuses what a call must not be wrapped in."""
    if callable(torch._C._dynamo.eval_frame.get_eval_frame_callback()):
        raise ConfigError(compiled("a parallel model"))
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            "torch.inference_mode() is on around a parallel model, whose gathered weights could not be trained "
            "afterwards; use torch.no_grad()"
        )
    refuse_autocast(device)


def refuse_autocast(device: torch.device) -> None:
    if torch.is_autocast_enabled(device.type):
        dtype = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
        raise ConfigError(
            f"torch.autocast({device.type!r}, {dtype}) is on around a parallel model, whose layers would ignore parts "
            f"of it; leave autocast out and parallelize with Layout(dtype={dtype!r}) (model.dtype in a config): "
            "parameters stay in their own dtype, computation is in that one"
        )
