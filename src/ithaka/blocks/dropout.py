"""LoRA's dropout with a mask that does not depend on the order of computation.

A hash of the seed, the step, the module, the token and the column decides whether an element is
kept. So the mask is the same for any tile, stage and number of ranks, and in backward.

Shapes: s tokens on this rank, t tokens of a tile, D input features.
"""

import hashlib
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from ithaka.config import ConfigError
from ithaka.ops.fused import runs_in_triton

# low bits of a token's number: its position; the high bits number its sequence in the step
POSITION_BITS = 36


class DropoutState:
    """The dropout state of a model. The trainer sets seed and step; a call in training mode gets
    keys for its tokens (`CallState.keys_s`); layers set those of the current tile. Without keys,
    nothing is dropped."""

    def __init__(self) -> None:
        self.seed = 0
        self.step = 0
        self.num_calls = 0  # in training mode, in this step
        self.keys_t: Tensor | None = None

    def start_step(self, seed: int, step: int) -> None:
        self.seed = seed
        self.step = step
        self.num_calls = 0

    def start_call(self, tokens_s: Tensor) -> Tensor:
        """Return the keys of a call's tokens in training. `tokens_s`: their numbers in the step."""
        low_s = tokens_s.to(torch.int32)
        high_s = (tokens_s >> 32).to(torch.int32)
        self.num_calls += 1
        return _mix(_mix(low_s + _hash(self.seed, self.step)) + high_s)


class TokenDropout(nn.Module):
    """Replaces nn.Dropout in PEFT's module `name`."""

    def __init__(self, p: float, name: str, state: DropoutState) -> None:
        super().__init__()
        self.p = p
        self.name = name
        self.state = state

    def forward(self, x: Tensor, columns_D: Tensor | None = None) -> Tensor:
        """`columns_D`: the columns of the module's input that x has; None: all, in order."""
        keys_t = self.state.keys_t
        if keys_t is None:
            return x
        if x.numel() != len(keys_t) * x.shape[-1]:
            raise ConfigError(
                f"adapter.dropout={self.p}: {self.name} does not get one row per token, as dropout "
                "requires; leave it out of adapter.targets"
            )
        if columns_D is None:
            columns_D = torch.arange(x.shape[-1], device=x.device)
        module_keys_t = _mix(keys_t + _hash(self.name))
        keys_D = _mix(columns_D.to(torch.int32) + _hash("column"))
        return _Drop.apply(x, module_keys_t, keys_D, self.p)


class _Drop(torch.autograd.Function):
    """Saves no mask: backward computes it again."""

    @staticmethod
    def forward(ctx, x: Tensor, keys_t: Tensor, keys_D: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(keys_t, keys_D)
        ctx.p = p
        return _drop(x, keys_t, keys_D, p)

    @staticmethod
    def backward(ctx, *dy: Tensor) -> tuple[Tensor | None, ...]:
        keys_t, keys_D = ctx.saved_tensors
        return _drop(dy[0], keys_t, keys_D, ctx.p), *[None] * 3


def _drop(x: Tensor, keys_t: Tensor, keys_D: Tensor, p: float) -> Tensor:
    if x.is_meta:
        return torch.empty_like(x)
    drop = _compile_drop() if runs_in_triton(x) else _drop_eagerly
    return drop(x, keys_t, keys_D, p)


@cache
def _compile_drop() -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    """One kernel, with the same bits."""
    return torch.compile(_drop_eagerly, dynamic=True)


def _drop_eagerly(x: Tensor, keys_t: Tensor, keys_D: Tensor, p: float) -> Tensor:
    keep_tD = (_mix(keys_t[:, None] + keys_D) & 0x7FFFFFFF) >= int(p * 2**31)
    return torch.where(keep_tD.view(x.shape), x * (1 / (1 - p)), 0)


def _mix(x: Tensor) -> Tensor:
    """A bijection of int32 (lowbias32 of Wellons' hash prospector); products wrap around."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


def _hash(*values: int | str) -> int:
    digest = hashlib.blake2b(repr(values).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big", signed=True)


def replace_dropout(model: nn.Module) -> DropoutState | None:
    """Replace the dropout of PEFT's modules. Returns its state, or None if there is none."""
    state = DropoutState()
    found = [
        (name, module.lora_dropout, adapter, drop.p)
        for name, module in model.named_modules()
        if hasattr(module, "lora_dropout")
        for adapter, drop in module.lora_dropout.items()
        if isinstance(drop, nn.Dropout) and drop.p
    ]
    for name, drops, adapter, p in found:
        if ".layers." not in name:
            rule = f"is not supported on {name}, outside the decoder layers"
            raise ConfigError(
                f"PEFT's lora_dropout={p} {rule}; leave it out of the targets, or use "
                "lora_dropout=0"
            )
        drops[adapter] = TokenDropout(p, name, state)
    return state if found else None
