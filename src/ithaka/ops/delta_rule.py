"""The gated delta rule over one rank's tokens, in chunks.

A token decays the state S, corrects the value that S predicts for its key, and reads S with its
query:

    S <- exp(g) S;   S <- S + beta k (v - S^T k)^T;   out = S^T q

Tokens come in chunks. With b for beta; e, f and p the decays from the incoming state to a token,
from a token to the outgoing state, and from state to state; L_ij = b_i decay_ij k_i k_j for i > j;
P_ij = decay_ij q_i k_j for i >= j:

    y = (1 + L)^-1 b (v - e k S);   out = e q S + P y;   S' = p S + (f k)^T y

This is affine in S (ops/scan.py). A document starts with S = 0: e, f, p and the decays between
tokens of different documents are 0. On a GPU, 16-bit segments run in the kernels of
ops/delta_kernels.py.

Shapes as in ops/scan.py; X = x + V, x = K.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from ithaka.ops.delta_kernels import NORM_EPS, FusedDeltaSegment, runs_delta_kernels
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
from ithaka.ops.state_graph import wide


class DeltaInputs(NamedTuple):
    """q and k before their normalization; g <= 0 is the log of the decay."""

    q_sJK: Tensor
    k_sJK: Tensor
    v_sHV: Tensor
    g_sH: Tensor
    beta_sH: Tensor


@dataclass(frozen=True)
class DeltaRule(Scan[DeltaInputs]):
    """The rule over one rank's tokens."""

    normalizes: bool = True  # q and k to length 1

    def make_segment(self, inputs: DeltaInputs, ids: Tensor | None) -> ScanSegment:
        return _segment_type(inputs, self.normalizes)(inputs, ids, self.normalizes)

    def identity(self) -> Tensor:
        state_HKV = zero_state(self.inputs)
        return torch.eye(state_HKV.shape[1]).to(state_HKV).expand(len(state_HKV), -1, -1)

    def apply(self, matrix_HKx: Tensor, state_HKV: Tensor) -> Tensor:
        return matrix_HKx @ state_HKV


def run_delta_rule(inputs: DeltaInputs, normalizes: bool = True) -> Tensor:
    """Run the rule over one short document, differentiably: [s, H, V]."""
    return DeltaSegment(inputs, None, normalizes).run(zero_state(inputs))[0]


class DeltaSegment(NamedTuple):
    """The rule over a segment of tokens."""

    inputs: DeltaInputs
    # [t + 1]: document of the token before the segment, then of each token; None: one document
    ids: Tensor | None
    normalizes: bool

    def extend(self, map_HKX: Tensor) -> Tensor:
        """Return the affine map from the state before the tokens of `map_HKX` to the state after
        this segment."""
        (matrix_HKx, added_HKV) = map_HKX.tensor_split((-self.inputs.v_sHV.shape[-1],), -1)
        chunks = self._prepare()
        after_HKx = chunks.without_values().advance(matrix_HKx)[1]
        return torch.cat([after_HKx, chunks.advance(added_HKV)[1]], -1)

    def extend_grad(self, map_HKX: Tensor, dout_tHV: Tensor) -> Tensor:
        """The same for gradients, from that of the state after the tokens of `map_HKX`, which may
        have several M."""
        (matrix_HKx, added_HKV) = map_HKX.tensor_split((-self.inputs.v_sHV.shape[-1],), -1)
        chunks = self._prepare()
        dout = to_chunks(dout_tHV, map_HKX.dtype)
        before_HKx = chunks.pull(matrix_HKx, torch.zeros_like(dout[..., :1]))
        return torch.cat([before_HKx, chunks.pull(added_HKV, dout)], -1)

    def forward(self, state_HKV: Tensor, out_tHV: Tensor) -> Tensor:
        """Write `out_tHV`; return the state after the segment."""
        out_tHV[:], state_HKV = self.run(state_HKV)
        return state_HKV

    def backward(self, state_HKV: Tensor, dout_tHV: Tensor, dstate_HKV: Tensor) -> Tensor:
        """Overwrite the inputs with their gradients; return that of the state before them."""
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (*self.inputs, state_HKV)]
            results = self._replace(inputs=DeltaInputs(*leaves[:-1])).run(leaves[-1])
            *grads, dstate_HKV = torch.autograd.grad(results, leaves, (dout_tHV, dstate_HKV))
        for t, grad in zip(self.inputs, grads, strict=True):
            t.copy_(grad)
        return dstate_HKV

    def run(self, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
        """Return out_tHV and the state after the segment. Differentiable."""
        out, state_HKV = self._prepare().advance(state_HKV)
        return from_chunks(out, self.inputs.v_sHV), state_HKV

    def _prepare(self) -> "DeltaChunks":
        q, k, v, g, beta = self.inputs
        q, k, v, g, beta = (to_chunks(t, wide(v)) for t in (q, k, v, g[..., None], beta[..., None]))
        if self.normalizes:
            q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + NORM_EPS) for t in (q, k))
        q, k = (
            (t * scale).repeat_interleave(len(v) // len(k), 0)
            for t, scale in ((q, k.shape[-1] ** -0.5), (k, 1))
        )
        decays = Decays.of(g, self.ids)
        entering, leaving, passing, between = decays
        ones = torch.eye(v.shape[2], dtype=v.dtype, device=v.device)
        system = k @ k.mT * between * beta
        inverse = torch.linalg.solve_triangular(
            system.tril(-1) + ones, ones, upper=False, unitriangular=True
        )
        return DeltaChunks(
            reads=entering * q,
            writes=leaving * k,
            passing=passing,
            erases=beta * entering * k,
            values=beta * v,
            inverse=inverse,
            products=q @ k.mT * between,
        )


class DeltaChunks(NamedTuple):
    """The factors of y, out and S', all [H, z, ...]."""

    reads: Tensor  # e q
    writes: Tensor  # f k
    passing: Tensor  # p
    erases: Tensor  # b e k
    values: Tensor  # b v
    inverse: Tensor  # (1 + L)^-1
    products: Tensor  # P

    def advance(self, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
        """Return out, [H, z, C, V], and the state after the last chunk."""
        outs = []
        for reads, writes, passing, erases, values, inverse, products in zip(
            *(t.unbind(1) for t in self), strict=True
        ):
            y = inverse @ (values - erases @ state_HKV)
            outs.append(reads @ state_HKV + products @ y)
            state_HKV = passing * state_HKV + writes.mT @ y
        return torch.stack(outs, 1), state_HKV

    def without_values(self) -> "DeltaChunks":
        return self._replace(values=torch.zeros_like(self.values[..., :1]))

    def pull(self, dstate_HKV: Tensor, dout: Tensor) -> Tensor:
        """Return the gradient of the incoming state."""
        with torch.enable_grad():
            state_HKV = torch.zeros_like(dstate_HKV).requires_grad_()
            results = self.without_values().advance(state_HKV)
            grads = (dout.expand_as(results[0]), dstate_HKV)
            return torch.autograd.grad(results, state_HKV, grads)[0]


class FlaSegment(DeltaSegment):
    """The same with flash-linear-attention. It returns no maps: our own code computes those."""

    def run(self, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
        from fla.ops.gated_delta_rule import (  # type: ignore[import-not-found]
            chunk_gated_delta_rule,
        )

        q, k, v, g, beta = (t[None] for t in self.inputs)
        bounds = None
        states = state_HKV[None]
        if self.ids is not None:
            starts = (self.ids[1:] != self.ids[:-1]).nonzero()[:, 0]
            first = starts.new_zeros(1)
            last = starts.new_full((1,), v.shape[1])
            bounds = torch.cat([first, starts[starts > 0], last])
            own = state_HKV * (self.ids[0] == self.ids[1])
            zeros = state_HKV.new_zeros(len(bounds) - 2, *state_HKV.shape)
            states = torch.cat([own[None], zeros])
        out, after = chunk_gated_delta_rule(
            *(q, k, v, g, beta),
            initial_state=states,
            cu_seqlens=bounds,
            use_qk_l2norm_in_kernel=self.normalizes,
            output_final_state=True,
        )
        return out[0].to(v.dtype), after[-1]

    def extend(self, map_HKX: Tensor) -> Tensor:
        return self._own().extend(map_HKX)

    def extend_grad(self, map_HKX: Tensor, dout_tHV: Tensor) -> Tensor:
        return self._own().extend_grad(map_HKX, dout_tHV)

    def _own(self) -> ScanSegment:
        return _segment_type(self.inputs, self.normalizes, is_own=True)(*self)


SegmentType = Callable[[DeltaInputs, Tensor | None, bool], ScanSegment]


def _segment_type(inputs: DeltaInputs, normalizes: bool, is_own: bool = False) -> SegmentType:
    """Return the fastest segment type that passes its test."""
    k = inputs.k_sJK
    v = inputs.v_sHV
    kinds: list[SegmentType] = []
    if _can_run_fla(v) and not is_own:
        kinds.append(FlaSegment)
    if runs_delta_kernels(k, v):
        kinds.append(FusedDeltaSegment)
    for kind in kinds:
        if v.is_meta or _try(kind, v.device, v.dtype, k.shape[1:], v.shape[1:], normalizes) is None:
            return kind
    return DeltaSegment


def _can_run_fla(v_sHV: Tensor) -> bool:
    return v_sHV.is_cuda and v_sHV.dtype.itemsize == 2 and find_spec("fla") is not None


@cache
def _try(
    kind: SegmentType,
    device: torch.device,
    dtype: torch.dtype,
    keys: torch.Size,
    values: torch.Size,
    normalizes: bool,
) -> str | None:
    """Test a segment type; return what is wrong, or None."""
    draw = torch.Generator().manual_seed(0)
    t = TRIAL_TOKENS
    q, k, v = (torch.randn(t, *sizes, generator=draw) for sizes in (keys, keys, values))
    g = -0.1 * torch.rand(t, values[0], generator=draw)
    beta = torch.rand(t, values[0], generator=draw)
    q, k, v = (x.to(dtype) for x in (q, k / keys[1] ** 0.5, v))

    def make(
        inputs: DeltaInputs, ids: Tensor, is_plain: bool
    ) -> tuple[ScanSegment, dict[str, Tensor]]:
        return (DeltaSegment if is_plain else kind)(inputs, ids, normalizes), {}

    name = "flash-linear-attention" if kind is FlaSegment else "ithaka's Triton code"
    inputs = DeltaInputs(*(x.to(device) for x in (q, k, v, g, beta)))
    return try_segment(f"the gated delta rule runs without {name}", make, inputs)
