"""Mamba2's state-space duality (SSD) over one rank's tokens, in chunks.

A token decays the state S, adds its input times the step size dt, and reads S; D passes its input
on:

    S <- exp(g) S + dt k v^T;   out = S^T q + D v

In Mamba's terms, q is C, k is B, v is x and g is A dt. As in ops/delta_rule.py, with y = dt v and
no correction:

    out = e q S + P y + D v;   S' = p S + (f k)^T y;   M is the number p

On a GPU, 16-bit segments run in the kernels of ops/ssd_kernels.py.

Shapes as in ops/scan.py; X = x + V, x = 1.
"""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ithaka.facts.sizes import SSD_SEGMENT
from ithaka.ops.scan import (
    TRIAL_TOKENS,
    Decays,
    Scan,
    ScanSegment,
    from_chunks,
    to_chunks,
    try_segment,
    zero_state,
)
from ithaka.ops.ssd_kernels import FusedSsdSegment, runs_ssd_kernels
from ithaka.ops.state_graph import wide


class SsdInputs(NamedTuple):
    """g <= 0 is the log of the decay."""

    q_sJK: Tensor
    k_sJK: Tensor
    v_sHV: Tensor
    g_sH: Tensor
    dt_sH: Tensor


@dataclass(frozen=True)
class Ssd(Scan[SsdInputs]):
    """The recurrence over one rank's tokens. `backward` adds the gradient of D to `dskip_H`."""

    skip_H: Tensor  # D
    dskip_H: Tensor  # in fp32 or wider

    segment_size: ClassVar[int] = SSD_SEGMENT

    @property
    def other_grads(self) -> list[Tensor]:
        return [self.dskip_H]

    def make_segment(self, inputs: SsdInputs, ids: Tensor | None) -> ScanSegment:
        k = inputs.k_sJK
        v = inputs.v_sHV
        if runs_ssd_kernels(k, v) and _try(v.device, v.dtype, k.shape[1:], v.shape[1:]) is None:
            return FusedSsdSegment(inputs, ids, self.skip_H, self.dskip_H)
        return SsdSegment(inputs, ids, self.skip_H, self.dskip_H)

    def identity(self) -> Tensor:
        return torch.ones_like(zero_state(self.inputs)[..., :1])

    def apply(self, matrix_HKx: Tensor, state_HKV: Tensor) -> Tensor:
        return matrix_HKx * state_HKV


def run_ssd(inputs: SsdInputs, skip_H: Tensor) -> Tensor:
    """Run the recurrence over one short document, differentiably: [s, H, V]."""
    return SsdSegment(inputs, None, skip_H, skip_H).run(zero_state(inputs))[0]


class SsdSegment(NamedTuple):
    """The recurrence over a segment of tokens, as in ops/delta_rule.py."""

    inputs: SsdInputs
    ids: Tensor | None
    skip_H: Tensor
    dskip_H: Tensor

    def extend(self, map_HKX: Tensor) -> Tensor:
        (matrix_HKx, state_HKV) = map_HKX.tensor_split((-self.inputs.v_sHV.shape[-1],), -1)
        chunks = self._prepare()
        return torch.cat([chunks.passing.prod(1) * matrix_HKx, chunks.states(state_HKV)[1]], -1)

    def extend_grad(self, map_HKX: Tensor, dout_tHV: Tensor) -> Tensor:
        (matrix_HKx, dstate_HKV) = map_HKX.tensor_split((-self.inputs.v_sHV.shape[-1],), -1)
        chunks = self._prepare()
        read = chunks.reads.mT @ to_chunks(dout_tHV, map_HKX.dtype)
        by_chunk = zip(chunks.passing.unbind(1), read.unbind(1), strict=True)
        for passing, added_HKV in reversed(list(by_chunk)):
            dstate_HKV = passing * dstate_HKV + added_HKV
        return torch.cat([chunks.passing.prod(1) * matrix_HKx, dstate_HKV], -1)

    def forward(self, state_HKV: Tensor, out_tHV: Tensor) -> Tensor:
        out_tHV[:], state_HKV = self.run(state_HKV)
        return state_HKV

    def backward(self, state_HKV: Tensor, dout_tHV: Tensor, dstate_HKV: Tensor) -> Tensor:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (*self.inputs, self.skip_H, state_HKV)]
            *inputs, skip_H, before_HKV = leaves
            results = self._replace(inputs=SsdInputs(*inputs), skip_H=skip_H).run(before_HKV)
            grads = torch.autograd.grad(results, leaves, (dout_tHV, dstate_HKV))
        *dinputs, dskip_H, dstate_HKV = grads
        self.dskip_H.add_(dskip_H)
        for t, grad in zip(self.inputs, dinputs, strict=True):
            t.copy_(grad)
        return dstate_HKV

    def run(self, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
        """Return out_tHV and the state after the segment. Differentiable."""
        chunks = self._prepare()
        states, state_HKV = chunks.states(state_HKV)
        out = chunks.reads @ states + chunks.products @ chunks.values
        skip = self.skip_H.to(out.dtype)[:, None, None, None]
        skipped = skip * to_chunks(self.inputs.v_sHV, out.dtype)
        return from_chunks(out + skipped, self.inputs.v_sHV), state_HKV

    def _prepare(self) -> "SsdChunks":
        q, k, v, g, dt = self.inputs
        q, k, v, g, dt = (to_chunks(t, wide(v)) for t in (q, k, v, g[..., None], dt[..., None]))
        repeats = len(v) // len(k)
        entering, leaving, passing, between = Decays.of(g, self.ids)
        products = (q @ k.mT).repeat_interleave(repeats, 0) * between
        q, k = (t.repeat_interleave(repeats, 0) for t in (q, k))
        return SsdChunks(entering * q, leaving * k, passing, dt * v, products)


class SsdChunks(NamedTuple):
    """The factors of out and S', all [H, z, ...]."""

    reads: Tensor  # e q
    writes: Tensor  # f k
    passing: Tensor  # p
    values: Tensor  # y
    products: Tensor  # P

    def states(self, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states before each chunk, [H, z, K, V], and the one after the last."""
        states = []
        added = self.writes.mT @ self.values
        for passing, added_HKV in zip(self.passing.unbind(1), added.unbind(1), strict=True):
            states.append(state_HKV)
            state_HKV = passing * state_HKV + added_HKV
        return torch.stack(states, 1), state_HKV


@cache
def _try(
    device: torch.device, dtype: torch.dtype, keys: torch.Size, values: torch.Size
) -> str | None:
    """Test the kernels; return what is wrong, or None."""
    draw = torch.Generator().manual_seed(0)
    t = TRIAL_TOKENS
    q, k, v = (torch.randn(t, *sizes, generator=draw).to(dtype) for sizes in (keys, keys, values))
    dt = torch.rand(t, values[0], generator=draw)
    skip_H = torch.randn(values[0], generator=draw).to(device)
    decay_H = torch.logspace(-3, 0, values[0])

    def make(
        inputs: SsdInputs, ids: Tensor, is_plain: bool
    ) -> tuple[ScanSegment, dict[str, Tensor]]:
        skip = skip_H.to(wide(inputs.v_sHV))
        dskip = 10 * skip  # large enough to show whether the gradient is added
        return (SsdSegment if is_plain else FusedSsdSegment)(inputs, ids, skip, dskip), {
            "dD": dskip
        }

    inputs = SsdInputs(*(x.to(device) for x in (q, k / keys[1] ** 0.5, v, -dt * decay_H, dt)))
    return try_segment("Mamba2 runs without ithaka's Triton code", make, inputs)
