"""Rotary embeddings of any model, exact at every position, and the same on all ranks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ithaka.blocks.tiles import sum_dtype
from ithaka.foreign.torch_core import pytree
from ithaka.layer.inputs import CurrentCall


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    found = []
    for module in model.modules():
        if any(name.endswith("inv_freq") for name in module._buffers):
            found.append(module)
    return found


class InFloat64(TorchFunctionMode):
    """Turns every conversion to float32 into one to float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.float:
            return args[0].double()
        wide_kwargs = {name: _widen(value) for name, value in (kwargs or {}).items()}
        return function(*map(_widen, args), **wide_kwargs)


def _widen(argument: object) -> object:
    return torch.float64 if argument is torch.float32 else argument


class ExactRotary:
    """Replaces a rotary embedding's forward: angles are computed in fp64, exact at any position.

    Frequencies that depend on the longest position (longrope, dynamic) are those of the longest in
    the global batch: it is passed as one more token, whose result is dropped.
    """

    def __init__(self, module: nn.Module, current: CurrentCall) -> None:
        self.module = module
        self.current = current
        types = getattr(module, "rope_type", "default")
        types = set(types.values()) if isinstance(types, dict) else {types}
        self.depends_on_length = bool(types & {"longrope", "dynamic"})

    def __call__(self, *args: object, **kwargs: object) -> object:
        leaves, tree_spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
        positions = next((t for t in tensors if not t.is_floating_point()), None)
        has_extra = self.depends_on_length and positions is not None
        if has_extra:
            self._update_frequencies(leaves, tree_spec)
        converted = [self._convert(leaf, has_extra) for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(converted, tree_spec)
        with InFloat64():
            result = type(self.module).forward(self.module, *args, **kwargs)

        def narrow(t: Tensor) -> Tensor:
            if has_extra and positions is not None:
                t = t.narrow(min(positions.dim() - 1, 1), 0, positions.shape[-1])
            wide = sum_dtype(dtype)
            return t.to(wide.to_complex() if t.is_complex() else wide)

        return pytree.tree_map_only(Tensor, narrow, result)

    def _update_frequencies(self, leaves: list[Any], tree_spec: pytree.TreeSpec) -> None:
        """Let the module compute and store the frequencies for the longest position, in its own
        precision."""
        longest = []
        for leaf in leaves:
            if isinstance(leaf, Tensor) and not leaf.is_floating_point():
                leaf = self._longest_like(leaf)
            longest.append(leaf)
        args, kwargs = pytree.tree_unflatten(longest, tree_spec)
        type(self.module).forward(self.module, *args, **kwargs)

    def _longest_like(self, positions: Tensor) -> Tensor:
        """Return the call's longest position, [..., 1]."""
        assert self.current.state is not None
        return positions.new_full((*positions.shape[:-1], 1), self.current.state.num_positions - 1)

    def _convert(self, leaf: object, has_extra: bool) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_floating_point():  # only its dtype and device matter
            return torch.empty((), dtype=torch.float64, device=leaf.device).expand(leaf.shape)
        return torch.cat([leaf, self._longest_like(leaf)], dim=-1) if has_extra else leaf
