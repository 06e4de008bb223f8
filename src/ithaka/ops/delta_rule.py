"""The gated delta rule over one rank's tokens, in chunks, with incoming states and packed documents.

A token decays the state S, corrects the value that S predicts for its key, and reads S with its query:

    S <- exp(g) S;   S <- S + beta k (v - S^T k)^T;   out = S^T q

Tokens come in chunks. With b for beta; e, f and p the decays from the incoming state to a token, from a token to
the outgoing state, and from state to state; L_ij = b_i decay_ij k_i k_j for i > j; P_ij = decay_ij q_i k_j for i >= j:

    y = (1 + L)^-1 b (v - e k S);   out = e q S + P y;   S' = p S + (f k)^T y

This is affine in S (ops/scan.py). A document starts with S = 0: e, f, p and the decays between tokens of different
documents are 0. On a GPU, 16-bit segments run in the kernels of ops/delta_kernels.py.

Shapes as in ops/scan.py; X = x + V, x = K.
"""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ithaka.ops.delta_kernels import NORM_EPS, FusedSegment, runs_in_kernels
from ithaka.ops.scan import TRIAL_TOKENS, Decays, Scan, from_chunks, to_chunks, try_segment, wide, zero_state


class DeltaInputs(NamedTuple):
    """q and k before their normalization; g <= 0 is the log of the decay."""

    q_sJK: Tensor
    k_sJK: Tensor
    v_sHV: Tensor
    g_sH: Tensor
    beta_sH: Tensor


@dataclass(frozen=True)
class DeltaRule(Scan):
    """The rule over one rank's tokens."""

    normalizes: bool = True  # q and k to length 1

    def make_segment(self, inputs: DeltaInputs, ids: Tensor | None) -> Any:
        return _segment_type(inputs, self.normalizes)(inputs, ids, self.normalizes)

    def identity(self) -> Tensor:
        state_HKV = zero_state(self.inputs)
        return torch.eye(state_HKV.shape[1]).to(state_HKV).expand(len(state_HKV), -1, -1)

    def apply(self, matrix_HKx: Tensor, state_HKV: Tensor) -> Tensor:
        return matrix_HKx @ state_HKV


def run_delta_rule(inputs: DeltaInputs, normalizes: bool = True) -> Tensor:
    """Run the rule over one short document, differentiably: [s, H, V]."""
    return Segment(inputs, None, normalizes).run(zero_state(inputs))[0]


class Segment(NamedTuple):
    """The rule over a segment of tokens."""

    inputs: DeltaInputs
    ids: Tensor | None  # [t + 1]: document of the token before the segment, then of each token. None: one document
    normalizes: bool

    def extend(self, map_HKX: Tensor) -> Tensor:
        """Return the affine map from the state before the tokens of `map_HKX` to the state after this segment."""
        (matrix_HKx, added_HKV), chunks = map_HKX.tensor_split((-self.inputs.v_sHV.shape[-1],), -1), self._prepare()
        return torch.cat([chunks.without_values().advance(matrix_HKx)[1], chunks.advance(added_HKV)[1]], -1)

    def extend_grad(self, map_HKX: Tensor, dout_tHV: Tensor) -> Tensor:
        """Do the same for gradients, from that of the state after the tokens of `map_HKX`. It may have several M."""
        (matrix_HKx, added_HKV), chunks = map_HKX.tensor_split((-self.inputs.v_sHV.shape[-1],), -1), self._prepare()
        dout = to_chunks(dout_tHV, map_HKX.dtype)
        return torch.cat([chunks.pull(matrix_HKx, torch.zeros_like(dout[..., :1])), chunks.pull(added_HKV, dout)], -1)

    def forward(self, state_HKV: Tensor, out_tHV: Tensor) -> Tensor:
        """Write `out_tHV`; return the state after the segment."""
        out_tHV[:], state_HKV = self.run(state_HKV)
        return state_HKV

    def backward(self, state_HKV: Tensor, dout_tHV: Tensor, dstate_HKV: Tensor) -> Tensor:
        """Write the gradients of the inputs over the inputs; return that of the state before the segment."""
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

    def _prepare(self) -> "Chunks":
        q, k, v, g, beta = self.inputs
        q, k, v, g, beta = (to_chunks(t, wide(v)) for t in (q, k, v, g[..., None], beta[..., None]))
        if self.normalizes:
            q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + NORM_EPS) for t in (q, k))
        q, k = ((t * scale).repeat_interleave(len(v) // len(k), 0) for t, scale in ((q, k.shape[-1] ** -0.5), (k, 1)))
        decays, ones = Decays.of(g, self.ids), torch.eye(v.shape[2], dtype=v.dtype, device=v.device)
        entering, leaving, passing, between = decays
        system = k @ k.mT * between * beta
        inverse = torch.linalg.solve_triangular(system.tril(-1) + ones, ones, upper=False, unitriangular=True)
        return Chunks(entering * q, leaving * k, passing, beta * entering * k, beta * v, inverse, q @ k.mT * between)


class Chunks(NamedTuple):
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
        for reads, writes, passing, erases, values, inverse, products in zip(*(t.unbind(1) for t in self), strict=True):
            y = inverse @ (values - erases @ state_HKV)
            outs.append(reads @ state_HKV + products @ y)
            state_HKV = passing * state_HKV + writes.mT @ y
        return torch.stack(outs, 1), state_HKV

    def without_values(self) -> "Chunks":
        return self._replace(values=torch.zeros_like(self.values[..., :1]))

    def pull(self, dstate_HKV: Tensor, dout: Tensor) -> Tensor:
        """Return the gradient of the incoming state."""
        with torch.enable_grad():
            state_HKV = torch.zeros_like(dstate_HKV).requires_grad_()
            out, after_HKV = self.without_values().advance(state_HKV)
            return torch.autograd.grad((out, after_HKV), state_HKV, (dout.expand_as(out), dstate_HKV))[0]


class FlaSegment(Segment):
    """The same with flash-linear-attention, which returns no maps: those are computed by our own code."""

    def run(self, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

        q, k, v, g, beta = (t[None] for t in self.inputs)
        options: dict[str, Any] = {"initial_state": state_HKV[None], "use_qk_l2norm_in_kernel": self.normalizes}
        if self.ids is not None:
            starts = (self.ids[1:] != self.ids[:-1]).nonzero()[:, 0]
            first, last = starts.new_zeros(1), starts.new_full((1,), v.shape[1])
            bounds = torch.cat([first, starts[starts > 0], last])
            own = state_HKV * (self.ids[0] == self.ids[1])
            zeros = state_HKV.new_zeros(len(bounds) - 2, *state_HKV.shape)
            options |= {"initial_state": torch.cat([own[None], zeros]), "cu_seqlens": bounds}
        out, after = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, **options)
        return out[0].to(v.dtype), after[-1]

    def extend(self, map_HKX: Tensor) -> Tensor:
        return self._own().extend(map_HKX)

    def extend_grad(self, map_HKX: Tensor, dout_tHV: Tensor) -> Tensor:
        return self._own().extend_grad(map_HKX, dout_tHV)

    def _own(self) -> Any:
        return _segment_type(self.inputs, self.normalizes, is_own=True)(*self)


def _segment_type(inputs: DeltaInputs, normalizes: bool, is_own: bool = False) -> Any:
    """Return the fastest segment type that passes its test."""
    k, v = inputs.k_sJK, inputs.v_sHV
    kinds = [FlaSegment] * (_can_run_fla(v) and not is_own) + [FusedSegment] * runs_in_kernels(k, v)
    case = v.device, v.dtype, k.shape[1:], v.shape[1:], normalizes
    return next((kind for kind in kinds if v.is_meta or _try(kind, *case) is None), Segment)


def _can_run_fla(v_sHV: Tensor) -> bool:
    return v_sHV.is_cuda and v_sHV.dtype.itemsize == 2 and find_spec("fla") is not None


@cache
def _try(kind: Any, device: torch.device, dtype: torch.dtype, keys: Any, values: Any, normalizes: bool) -> str | None:
    """Test a segment type; return what is wrong, or None."""
    draw, t = torch.Generator().manual_seed(0), TRIAL_TOKENS
    q, k, v = (torch.randn(t, *sizes, generator=draw) for sizes in (keys, keys, values))
    g, beta = -0.1 * torch.rand(t, values[0], generator=draw), torch.rand(t, values[0], generator=draw)
    q, k, v = (x.to(dtype) for x in (q, k / keys[1] ** 0.5, v))

    def make(inputs: Any, ids: Tensor, is_plain: bool) -> tuple[Any, dict[str, Tensor]]:
        return (Segment if is_plain else kind)(inputs, ids, normalizes), {}

    name = "flash-linear-attention" if kind is FlaSegment else "ithaka's Triton code"
    inputs = DeltaInputs(*(x.to(device) for x in (q, k, v, g, beta)))
    return try_segment(f"the gated delta rule runs without {name}", make, inputs)
