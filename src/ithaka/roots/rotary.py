"""Rotary embeddings of any model, exact at every position, and the same on all ranks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ithaka.blocks.tiles import sum_dtype
from ithaka.layer.inputs import CurrentCall


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if any(name.endswith("inv_freq") for name in m._buffers)]


class InFloat64(TorchFunctionMode):
    """Turns every conversion to float32 into one to float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            return args[0].double()
        args = [torch.float64 if arg is torch.float32 else arg for arg in args]
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return function(*args, **kwargs)


class ExactRotary:
    """Replaces the forward of a rotary embedding: its angles are computed in fp64, so they are exact at any position.

    Frequencies that depend on the longest position (longrope, dynamic) are those of the longest in the global batch:
    it is passed as one more token, whose result is dropped.
    """

    def __init__(self, module: nn.Module, current: CurrentCall) -> None:
        self.module, self.current = module, current
        types = getattr(module, "rope_type", "default")
        types = set(types.values()) if isinstance(types, dict) else {types}
        self.depends_on_length = bool(types & {"longrope", "dynamic"})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree_spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
        positions = next((t for t in tensors if not t.is_floating_point()), None)
        extra = int(self.depends_on_length and positions is not None)
        if extra:
            self._update_frequencies(leaves, tree_spec)
        args, kwargs = pytree.tree_unflatten([self._convert(leaf, extra) for leaf in leaves], tree_spec)
        with InFloat64():
            result = type(self.module).forward(self.module, *args, **kwargs)

        def convert(t: Tensor) -> Tensor:
            t = t.narrow(min(positions.dim() - 1, 1), 0, positions.shape[-1]) if extra and positions is not None else t
            wide = sum_dtype(dtype)
            return t.to(wide.to_complex() if t.is_complex() else wide)

        return pytree.tree_map_only(Tensor, convert, result)

    def _update_frequencies(self, leaves: list[Any], tree_spec: Any) -> None:
        """Let the module compute and store the frequencies for the longest position, in its own precision."""
        integers = [isinstance(leaf, Tensor) and not leaf.is_floating_point() for leaf in leaves]
        longest = [
            leaf.new_full((*leaf.shape[:-1], 1), self._longest) if is_integer else leaf
            for leaf, is_integer in zip(leaves, integers, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(longest, tree_spec)
        type(self.module).forward(self.module, *args, **kwargs)

    @property
    def _longest(self) -> int:
        assert self.current.state is not None
        return self.current.state.num_positions - 1

    def _convert(self, leaf: Any, extra: int) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_floating_point():  # only its dtype and device matter
            return torch.empty((), dtype=torch.float64, device=leaf.device).expand(leaf.shape)
        return torch.cat([leaf, leaf.new_full((*leaf.shape[:-1], 1), self._longest)], dim=-1) if extra else leaf
