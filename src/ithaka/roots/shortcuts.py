"""Find what a layer's passes may split or leave out, by comparing their results on random inputs: heads of q, k and v,
one stage at a time; the gradient of the mixer's output, one stage at a time; results that no gradient depends on.

Shapes as in layer/passes.py; G kv heads.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ithaka.blocks.linear import LinearBlock, as_linear
from ithaka.layer.inputs import LayerInputs
from ithaka.layer.mixer import LayerSpec
from ithaka.layer.passes import LayerPasses
from ithaka.roots.recorder import largest

TOLERANCE = 1e-4  # relative to the largest value


class Shortcuts:
    """Runs the passes of a layer with one mixer whose blocks are known."""

    def __init__(self, layer: nn.Module, spec: LayerSpec, x_tD: Tensor, inputs: LayerInputs) -> None:
        self.layer, self.spec, self.x_tD, self.inputs = layer, spec, x_tD, inputs

    def find(self) -> LayerSpec:
        """Return the spec with `qkv`, `output` and `skips_projections`."""
        if len(self.spec.mixers) == 1 and self.spec.mixers[0].exchanges_heads and self.spec.blocks:
            qkv = self._find_qkv()
            self.spec = replace(self.spec, qkv=qkv, skips_projections=bool(qkv) and self._skips_projections(qkv))
            self.spec = replace(self.spec, output=self._find_output())
        return self.spec

    @contextmanager
    def _passes(self, **changes: Any) -> Iterator[LayerPasses]:
        passes = LayerPasses("probe", self.layer, replace(self.spec, **changes))
        try:
            yield passes
        finally:
            passes.restore()

    def _find_qkv(self) -> tuple[str, ...]:
        """Return the maps to q, k and v, if q, k and v of some heads need only some of their rows."""
        (mixer,) = self.spec.mixers
        with self._passes() as passes, torch.no_grad():
            blocks = {p: block for p, block in passes.blocks.by_path.items() if isinstance(block, LinearBlock)}
            full = passes.capture(self.x_tD, self.inputs)[:3]
            dims = mixer.head_dim, mixer.head_dim, mixer.v_head_dim
            counts = mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads
            sizes = [count * dim for count, dim in zip(counts, dims, strict=True)]
            widths = {path: len(as_linear(block.module).weight_MD) for path, block in blocks.items()}
            changes = {p: self._changes(passes, blocks[p], full) for p, width in widths.items() if width in sizes}
            found = [p for i, size in enumerate(sizes) for p in changes if (widths[p], changes[p]) == (size, [i])]
            if len(found) != 3:
                return ()
            maps = [blocks[path] for path in found]
            heads = [[count - 1, 0] if count > 1 else [0] for count in counts]
            for kv in (True, False):
                for i, (block, own, dim) in enumerate(zip(maps, heads, dims, strict=True)):
                    index = torch.tensor(own, device=self.x_tD.device)
                    block.selected = as_linear(block.module).select_heads(index, dim) if kv or i == 0 else dim
                try:
                    some = passes.capture(self.x_tD, self.inputs)[:3]
                except Exception:
                    return ()  # it needs all heads at once
                expected = [t[:, own] for t, own in zip(full, heads, strict=True)]
                if not all(map(_is_close, some[: 3 if kv else 1], expected)):
                    return ()
            return tuple(found)

    def _changes(self, passes: LayerPasses, block: LinearBlock, full: Sequence[Tensor]) -> list[int]:
        """Return which of q, k and v change with the results of a map."""
        linear = as_linear(block.module)
        block.selected = replace(linear, weight_MD=-3 * linear.weight_MD)
        try:
            found = passes.capture(self.x_tD, self.inputs)[:3]
        finally:
            block.selected = None
        return [i for i, (t, old) in enumerate(zip(found, full, strict=True)) if not _is_close(t, old)]

    def _skips_projections(self, qkv: tuple[str, ...]) -> bool:
        grads = []
        for skips in (False, True):
            with self._passes(qkv=qkv) as passes, passes.tile.set(skips_projections=skips), torch.enable_grad():
                x_tD = self.x_tD.detach().requires_grad_()
                captured = [t for t in passes.capture(x_tD, self.inputs)[:3] if t.requires_grad]
                generator = torch.Generator().manual_seed(8)
                douts = [torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device) for t in captured]
                leaves = [x_tD, *(param for param in self.layer.parameters() if param.requires_grad)]
                try:
                    grads.append(torch.autograd.grad(captured, leaves, douts, allow_unused=True))
                except Exception:
                    return False  # it does not accept results without storage
        return all(map(_is_close, *grads))

    def _find_output(self) -> str:
        """Return the map of the mixer's output, if the gradient of its result is that of the residual stream."""
        (mixer,) = self.spec.mixers
        calls: list[tuple[str, Tensor, Tensor]] = []
        with self._passes() as passes, torch.enable_grad():
            for path, block in passes.blocks.by_path.items():
                if isinstance(block, LinearBlock):
                    self.layer.get_submodule(path).forward = _recording(calls, path, block)
            x_tD = self.x_tD.detach().requires_grad_()
            shape = len(x_tD), mixer.num_heads, mixer.v_head_dim
            generator = torch.Generator().manual_seed(9)
            out_tHV = torch.randn(shape, generator=generator, dtype=x_tD.dtype).to(x_tD.device).requires_grad_()
            y_tD = passes.resume(x_tD, [out_tHV], self.inputs)
            found = [
                (path, z) for path, x, z in calls if x.shape[1:] == (shape[0], shape[1] * shape[2])
                if torch.equal(x.view(shape), out_tHV)
            ]  # fmt: skip
            if len(found) != 1 or mixer.v_head_dim != mixer.head_dim:
                return ""
            dy = torch.randn(y_tD.shape, generator=generator, dtype=y_tD.dtype).to(y_tD.device)
            ((path, z),) = found
            dx, dz, dout = torch.autograd.grad(y_tD, [x_tD, z, out_tHV], dy)
            linear = as_linear(self.layer.get_submodule(path))
            expected = linear.input_grad(dz.flatten(0, -2), linear.lora_down_grad(dz.flatten(0, -2)))
            is_sum = _is_close(dz.view(dx.shape), dx) and _is_close(dout.flatten(1), expected)
        return path if is_sum else ""


def _recording(calls: list[tuple[str, Tensor, Tensor]], path: str, block: LinearBlock) -> Any:
    def forward(x: Tensor) -> Tensor:
        calls.append((path, x, block(x)))
        return calls[-1][2]

    return forward


def _is_close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and bool(largest(a - b) <= TOLERANCE * largest(b))
