"""Find what a layer's passes may split by stages (heads of q, k and v, the gradient of the mixer's
output) or leave out (results that no gradient depends on), by comparisons on random inputs.

Shapes as in layer/passes.py; G kv heads.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

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

    def __init__(
        self, layer: nn.Module, spec: LayerSpec, x_tD: Tensor, inputs: LayerInputs
    ) -> None:
        self.layer = layer
        self.spec = spec
        self.x_tD = x_tD
        self.inputs = inputs

    def find(self) -> LayerSpec:
        """Return the spec with `qkv`, `output` and `skips_projections`."""
        if len(self.spec.mixers) == 1 and self.spec.mixers[0].exchanges_heads and self.spec.blocks:
            qkv = self._find_qkv()
            skips = bool(qkv) and self._skips_projections(qkv)
            self.spec = replace(self.spec, qkv=qkv, skips_projections=skips)
            self.spec = replace(self.spec, output=self._find_output())
        return self.spec

    @contextmanager
    def _passes(self, spec: LayerSpec) -> Iterator[LayerPasses]:
        passes = LayerPasses("probe", self.layer, spec)
        try:
            yield passes
        finally:
            passes.restore()

    def _find_qkv(self) -> tuple[str, ...]:
        """Return the maps to q, k and v, if q, k and v of some heads need only some of their
        rows."""
        (mixer,) = self.spec.mixers
        with self._passes(self.spec) as passes, torch.no_grad():
            full = passes.capture(self.x_tD, self.inputs)[:3]
            dims = (mixer.head_dim, mixer.head_dim, mixer.v_head_dim)
            counts = (mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads)
            sizes = [count * dim for count, dim in zip(counts, dims, strict=True)]
            found: list[list[tuple[str, LinearBlock]]] = [[], [], []]  # maps to q, to k, to v
            for path, block in passes.blocks.by_path.items():
                if not isinstance(block, LinearBlock):
                    continue
                width = len(as_linear(block.module).weight_MD)
                if width not in sizes:
                    continue
                changed = self._changes(passes, block, full)
                if len(changed) == 1 and sizes[changed[0]] == width:
                    found[changed[0]].append((path, block))
            maps = [item for items in found for item in items]
            if len(maps) != 3:
                return ()
            heads = [[count - 1, 0] if count > 1 else [0] for count in counts]
            for kv in (True, False):
                for i, ((_, block), own, dim) in enumerate(zip(maps, heads, dims, strict=True)):
                    block.selected = dim
                    if kv or i == 0:
                        index = torch.tensor(own, device=self.x_tD.device)
                        block.selected = as_linear(block.module).select_heads(index, dim)
                try:
                    some = passes.capture(self.x_tD, self.inputs)[:3]
                except Exception:
                    return ()  # it needs all heads at once
                expected = [t[:, own] for t, own in zip(full, heads, strict=True)]
                if not all(map(_is_close, some[: 3 if kv else 1], expected)):
                    return ()
            return tuple(path for path, _ in maps)

    def _changes(
        self, passes: LayerPasses, block: LinearBlock, full: Sequence[Tensor]
    ) -> list[int]:
        """Return which of q, k and v change with the results of a map."""
        linear = as_linear(block.module)
        block.selected = replace(linear, weight_MD=-3 * linear.weight_MD)
        try:
            found = passes.capture(self.x_tD, self.inputs)[:3]
        finally:
            block.selected = None
        return [
            i for i, (t, old) in enumerate(zip(found, full, strict=True)) if not _is_close(t, old)
        ]

    def _skips_projections(self, qkv: tuple[str, ...]) -> bool:
        grads = []
        for skips in (False, True):
            with (
                self._passes(replace(self.spec, qkv=qkv)) as passes,
                passes.tile.set(skips_projections=skips),
                torch.enable_grad(),
            ):
                x_tD = self.x_tD.detach().requires_grad_()
                captured = [t for t in passes.capture(x_tD, self.inputs)[:3] if t.requires_grad]
                generator = torch.Generator().manual_seed(8)
                douts = [_randn(t.shape, t, generator) for t in captured]
                params = [param for param in self.layer.parameters() if param.requires_grad]
                try:
                    grads.append(
                        torch.autograd.grad(captured, [x_tD, *params], douts, allow_unused=True)
                    )
                except Exception:
                    return False  # it does not accept results without storage
        return all(map(_is_close, *grads))

    def _find_output(self) -> str:
        """Return the map of the mixer's output, if the gradient of its result is that of the
        residual stream."""
        (mixer,) = self.spec.mixers
        calls: list[tuple[str, Tensor, Tensor]] = []
        with self._passes(self.spec) as passes, torch.enable_grad():
            for path, block in passes.blocks.by_path.items():
                if isinstance(block, LinearBlock):
                    self.layer.get_submodule(path).forward = _recording(calls, path, block)
            x_tD = self.x_tD.detach().requires_grad_()
            shape = (len(x_tD), mixer.num_heads, mixer.v_head_dim)
            generator = torch.Generator().manual_seed(9)
            out_tHV = _randn(shape, x_tD, generator).requires_grad_()
            y_tD = passes.resume(x_tD, [out_tHV], self.inputs)
            found = [
                (path, z)
                for path, x, z in calls
                if x.shape[1:] == (shape[0], shape[1] * shape[2])
                if torch.equal(x.view(shape), out_tHV)
            ]
            if len(found) != 1 or mixer.v_head_dim != mixer.head_dim:
                return ""
            dy = _randn(y_tD.shape, y_tD, generator)
            [(path, z)] = found
            dx, dz, dout = torch.autograd.grad(y_tD, [x_tD, z, out_tHV], dy)
            linear = as_linear(self.layer.get_submodule(path))
            dz_tD = dz.flatten(0, -2)
            expected = linear.input_grad(dz_tD, linear.lora_down_grad(dz_tD))
            is_sum = _is_close(dz.view(dx.shape), dx) and _is_close(dout.flatten(1), expected)
        return path if is_sum else ""


def _randn(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=like.dtype).to(like.device)


def _recording(
    calls: list[tuple[str, Tensor, Tensor]], path: str, block: LinearBlock
) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        calls.append((path, x, block(x)))
        return calls[-1][2]

    return forward


def _is_close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and bool(largest(a - b) <= TOLERANCE * largest(b))
