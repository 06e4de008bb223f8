"""The gated delta rule over one rank's tokens, in chunks, with an incoming state and packed documents.

A token decays the state S, corrects the value that S predicts for its key, and reads S with its query:

    S <- exp(g) S;   S <- S + beta k (v - S^T k)^T;   out = S^T q

Tokens come in chunks. With b for beta; e, f and p the decays from the incoming state to a token, from a token to
the outgoing state, and from state to state; L_ij = b_i decay_ij k_i k_j for i > j; P_ij = decay_ij q_i k_j for i >= j:

    y = (1 + L)^-1 b (v - e k S);   out = e q S + P y;   S' = p S + (f k)^T y

This is affine in S, and affine maps compose: a rank's tokens are one map (M, U), S' = M S + U, which is all that other
ranks need. With M^T, the same holds for gradients, in reverse.

A document starts with S = 0: e, f, p and the decays between tokens of different documents are 0.

Segments of consecutive chunks bound the memory. Backward recomputes a segment from the state before it. On a GPU,
16-bit segments run in the kernels of ops/delta_kernels.py.

Shapes: s tokens of this rank, t of a segment, n chunks, C tokens of a chunk, H value heads, J key heads, K and V their
dims, X = K + V; N channels and W tokens of the convolution. States are [H, K, V], in fp32 or wider; affine maps are
[H, K, X]: M and U side by side.
"""

import warnings
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ithaka.ops.delta_kernels import NORM_EPS, FusedSegment, runs_in_kernels
from ithaka.plan.mixers import CHUNK_TOKENS, SEGMENT_ROWS

TEST_TOLERANCE = 0.02  # relative norm of a difference; bf16 explains about a third


class LocalDocs:
    """The documents of one rank's tokens, and of the `halo` tokens before them."""

    def __init__(self, starts: Sequence[int], first: int, num_tokens: int, halo: int, device: Any) -> None:
        """`starts`: cumulative starts of the sequence's documents, (0, ..., S). `first`: this rank's first token."""
        inside = [start - first for start in starts[:-1] if first - halo < start < first + num_tokens]
        self.starts, self._starts_with_halo = [start for start in inside if start >= 0], inside
        self.halo, self.num_tokens = halo, num_tokens
        self.begins_earlier = 0 not in inside  # the first document, on an earlier rank
        self.ends_later = first + num_tokens not in starts  # the last document, on a later rank
        tokens = torch.arange(first - halo, first + num_tokens)
        ids = torch.bucketize(tokens, torch.tensor(starts[:-1]), right=True)  # 0 before the sequence
        self._ids = ids.to(torch.int32).to(device)

    def ids(self, first: int, stop: int) -> Tensor:
        """Return the document numbers of tokens [first, stop). `first` may be as low as -halo."""
        return self._ids[first + self.halo : stop + self.halo]

    def has_start(self, rows: slice) -> bool:
        index = bisect_left(self._starts_with_halo, rows.start)
        return index < len(self._starts_with_halo) and self._starts_with_halo[index] < rows.stop


class DeltaInputs(NamedTuple):
    """q and k before their normalization; g <= 0 is the log of the decay."""

    q_sJK: Tensor
    k_sJK: Tensor
    v_sHV: Tensor
    g_sH: Tensor
    beta_sH: Tensor


@dataclass(frozen=True)
class DeltaRule:
    """The rule over one rank's tokens. Neither direction communicates: the caller passes states between ranks."""

    inputs: DeltaInputs
    docs: LocalDocs  # with a halo of at least 1
    normalizes: bool = True  # q and k to length 1

    @property
    def segments(self) -> list[slice]:
        num_heads, num_tokens = self.inputs.v_sHV.shape[1], self.docs.num_tokens
        step = max(1, SEGMENT_ROWS // num_heads // CHUNK_TOKENS) * CHUNK_TOKENS
        return [slice(a, min(a + step, num_tokens)) for a in range(0, num_tokens, step)]

    def zero_state(self) -> Tensor:
        k, v = self.inputs.k_sJK, self.inputs.v_sHV
        return torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=_wide(v), device=v.device)

    def summarize(self) -> Tensor:
        """Return the affine map [H, K, X] from the state before this rank's tokens to the state after them."""
        last = self.docs.starts[-1] if self.docs.starts else 0  # no state comes from before it
        total_HKX = self._identity()
        with torch.no_grad(), _matmul_precision(self.inputs.v_sHV):
            for rows in self.segments:
                if rows.stop > last:
                    total_HKX = self._segment(rows).extend(total_HKX)
        return total_HKX

    def forward(self, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
        """Return out_sHV and the states before each segment, [., H, K, V]."""
        out_sHV = torch.empty_like(self.inputs.v_sHV)
        states = []
        with torch.no_grad(), _matmul_precision(out_sHV):
            for rows in self.segments:
                states.append(state_HKV)
                state_HKV = self._segment(rows).forward(state_HKV, out_sHV[rows])
        return out_sHV, torch.stack(states)

    def summarize_grad(self, dout_sHV: Tensor) -> Tensor:
        """Return the affine map [H, K, X] from the gradient of the last state to that of the first one."""
        first = self.docs.starts[0] if self.docs.starts else self.docs.num_tokens  # no gradient from after it
        total_HKX = self._identity()
        with torch.no_grad(), _matmul_precision(dout_sHV):
            for rows in self.segments[::-1]:
                if rows.start <= first:
                    total_HKX = self._segment(rows).extend_grad(total_HKX, dout_sHV[rows])
        return total_HKX

    def backward(self, states: Tensor, dout_sHV: Tensor, dstate_HKV: Tensor) -> Tensor:
        """Write the gradients of the inputs over the inputs; return the gradient of the incoming state."""
        with _matmul_precision(dout_sHV):
            for rows, state_HKV in zip(self.segments[::-1], states.flip(0), strict=True):
                dstate_HKV = self._segment(rows).backward(state_HKV, dout_sHV[rows], dstate_HKV)
        return dstate_HKV

    def _segment(self, rows: slice) -> Any:
        inputs = DeltaInputs(*(t[rows] for t in self.inputs))
        ids = self.docs.ids(rows.start - 1, rows.stop) if self.docs.has_start(rows) else None
        return _segment_type(inputs, self.normalizes)(inputs, ids, self.normalizes)

    def _identity(self) -> Tensor:
        zeros = self.zero_state()
        return F.pad(zeros, (zeros.shape[1], 0)).diagonal_scatter(torch.ones_like(zeros[..., 0]), 0, 1, 2)


def run_delta_rule(inputs: DeltaInputs, normalizes: bool = True) -> Tensor:
    """Run the rule over one short document, differentiably: [s, H, V]."""
    s, device = len(inputs.v_sHV), inputs.v_sHV.device
    state_HKV = DeltaRule(inputs, LocalDocs((0, s), 0, s, 1, device)).zero_state()
    return Segment(inputs, None, normalizes).run(state_HKV)[0]


class Segment(NamedTuple):
    """The rule over a segment of tokens."""

    inputs: DeltaInputs
    ids: Tensor | None  # [t + 1]: document of the token before the segment, then of each token. None: one document
    normalizes: bool

    def extend(self, map_HKX: Tensor) -> Tensor:
        """Return the affine map from the state before the tokens of `map_HKX` to the state after this segment."""
        (matrix_HKK, added_HKV), chunks = self._split(map_HKX), self._prepare()
        return torch.cat([chunks.without_values().advance(matrix_HKK)[1], chunks.advance(added_HKV)[1]], -1)

    def extend_grad(self, map_HKX: Tensor, dout_tHV: Tensor) -> Tensor:
        """Do the same for gradients, from that of the state after the tokens of `map_HKX`."""
        (matrix_HKK, added_HKV), chunks = self._split(map_HKX), self._prepare()
        dout = _to_chunks(dout_tHV, map_HKX.dtype)
        return torch.cat([chunks.pull(matrix_HKK, torch.zeros_like(dout[..., :1])), chunks.pull(added_HKV, dout)], -1)

    def _split(self, map_HKX: Tensor) -> tuple[Tensor, ...]:
        return map_HKX.split((self.inputs.k_sJK.shape[-1], self.inputs.v_sHV.shape[-1]), -1)

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
        return out.flatten(1, 2).transpose(0, 1)[: len(self.inputs.v_sHV)].to(self.inputs.v_sHV.dtype), state_HKV

    def _prepare(self) -> "Chunks":
        q, k, v, g, beta = self.inputs
        q, k, v, g, beta = (_to_chunks(t, _wide(v)) for t in (q, k, v, g[..., None], beta[..., None]))
        if self.normalizes:
            q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + NORM_EPS) for t in (q, k))
        q, k = ((t * scale).repeat_interleave(len(v) // len(k), 0) for t, scale in ((q, k.shape[-1] ** -0.5), (k, 1)))
        C = v.shape[2]
        is_seen = torch.ones(C, C, dtype=torch.bool, device=v.device).tril()
        log = g.cumsum(-2)
        entering, leaving, passing = log.exp(), (log[..., -1:, :] - log).exp(), log[..., -1:, :].exp()
        if self.ids is not None:
            ids = torch.cat([self.ids, self.ids[-1:].expand(-(len(self.ids) - 1) % C)])
            before, ids = ids[:-1:C, None, None], ids[1:].view(-1, C, 1)
            last, is_seen = ids[:, -1:], is_seen & (ids == ids.mT)
            entering, leaving, passing = entering * (ids == before), leaving * (ids == last), passing * (last == before)
        decay = (log - log.mT).masked_fill(~is_seen, float("-inf")).exp()
        system, ones = k @ k.mT * decay * beta, torch.eye(C, dtype=v.dtype, device=v.device)
        inverse = torch.linalg.solve_triangular(system.tril(-1) + ones, ones, upper=False, unitriangular=True)
        return Chunks(entering * q, leaving * k, passing, beta * entering * k, beta * v, inverse, q @ k.mT * decay)


class Chunks(NamedTuple):
    """The factors of y, out and S', all [H, n, ...]."""

    reads: Tensor  # e q
    writes: Tensor  # f k
    passing: Tensor  # p
    erases: Tensor  # b e k
    values: Tensor  # b v
    inverse: Tensor  # (1 + L)^-1
    products: Tensor  # P

    def advance(self, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
        """Return out, [H, n, C, V], and the state after the last chunk."""
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
    """Compare output, states and gradients, with decay and packed documents, with the plain rule in fp64; return what
    is wrong, or None. Only a test shows what this version of Triton compiles correctly for this GPU."""
    failure: str | None
    try:
        with torch.inference_mode(False):
            failure = _compare_with_plain(kind, device, dtype, keys, values, normalizes)
    except torch.OutOfMemoryError:
        raise  # says nothing about the kernels
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:160]
        failure = f"does not run here ({type(error).__name__}: {reason})"
    if failure:
        name = "flash-linear-attention" if kind is FlaSegment else "ithaka's Triton code"
        warnings.warn(f"the gated delta rule runs without {name}, which {failure}", stacklevel=2)
    return failure


def _compare_with_plain(
    kind: Any, device: torch.device, dtype: torch.dtype, keys: Any, values: Any, normalizes: bool
) -> str | None:
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(150, *sizes, generator=draw) for sizes in (keys, keys, values, values))
    g, beta = -0.1 * torch.rand(150, values[0], generator=draw), torch.rand(150, values[0], generator=draw)
    state, dstate = torch.randn(2, values[0], keys[1], values[1], generator=draw).to(device)
    q, k, v, dout = (t.to(device, dtype) for t in (q, k / keys[1] ** 0.5, v, dout))
    ids = (torch.arange(151, device=device) >= 80).int()
    found = []
    for segment_type, to in ((kind, None), (Segment, torch.float64)):
        inputs = DeltaInputs(*(t.to(device, to, copy=True) for t in (q, k, v, g, beta)))
        segment, out = segment_type(inputs, ids, normalizes), torch.empty_like(inputs.v_sHV)
        after = segment.forward(state.to(to), out)
        found.append([out, after, segment.backward(state.to(to), dout.to(to), dstate.to(to)), *inputs])
    names = ("out", "state", "dstate", "dq", "dk", "dv", "dg", "dbeta")
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(*found, strict=True)]
    wrong = [f"{name} by {error:.1e}" for name, error in zip(names, errors, strict=True) if not error < TEST_TOLERANCE]
    return f"is wrong here, off in {', '.join(wrong)}" if wrong else None


def _to_chunks(t_tHK: Tensor, dtype: torch.dtype) -> Tensor:
    """Reshape [t, H, K] to [H, n, C, K]. Zeros pad the last chunk: such tokens write nothing and do not decay."""
    if fill := -len(t_tHK) % CHUNK_TOKENS:
        t_tHK = F.pad(t_tHK, (0, 0, 0, 0, 0, fill))
    chunks_HnCK = t_tHK.unflatten(0, (-1, CHUNK_TOKENS)).permute(2, 0, 1, 3)
    return chunks_HnCK.to(dtype, memory_format=torch.contiguous_format)


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


@contextmanager
def _matmul_precision(t: Tensor) -> Iterator[None]:
    """For 16-bit inputs, multiply fp32 matrices in TF32, which is more precise than 16-bit matmuls."""
    settings: Any = torch.backends.cuda.matmul
    before = settings.fp32_precision
    if t.is_cuda and t.dtype.itemsize == 2:
        settings.fp32_precision = "tf32"
    try:
        yield
    finally:
        settings.fp32_precision = before


# ---- the short convolution before the rule


def short_convolution(x_tN: Tensor, weight_NW: Tensor, bias_N: Tensor | None, ids_t: Tensor | None) -> Tensor:
    """Convolve each channel causally over the last W tokens of its document: [t, N] in fp32 or wider.

    `ids_t`: a number per document; None: one document. Tokens before the first count as 0.
    """
    wide, W = _wide(x_tN), weight_NW.shape[1]
    x_tN, weight_NW = x_tN.to(wide), weight_NW.to(wide)
    y_tN = x_tN * weight_NW[:, -1]
    for back in range(1, min(W, len(x_tN))):
        earlier_tN = x_tN[:-back] * weight_NW[:, W - 1 - back]
        if ids_t is not None:
            earlier_tN = earlier_tN * (ids_t[back:] == ids_t[:-back])[:, None]
        y_tN = y_tN + F.pad(earlier_tN, (0, 0, back, 0))
    return y_tN if bias_N is None else y_tN + bias_N.to(wide)
