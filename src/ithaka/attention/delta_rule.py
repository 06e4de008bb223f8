"""The gated delta rule over one rank's tokens, in chunks, with an incoming state and packed documents.

A token decays the state S, corrects what S predicts for its key, and reads its own result:

    S <- exp(g) S;   S <- S + beta k (v - S^T k)^T;   out = S^T q

A chunk of C tokens is an affine map of its incoming state, S' = A S + B and out = R S + O, so all chunks are prepared
at once, with matrix products, and only S is passed from one to the next. Affine maps compose: a rank's tokens are one
map (M, U) too, which is all that other ranks need to know about them. With M^T, the same holds for gradients, in
reverse.

A document starts with S = 0: the entries of A, R and the decays between tokens of different documents are 0.

Segments of consecutive chunks bound the memory. Backward recomputes a segment from the state before it. On a GPU,
16-bit segments run in the kernels of attention/delta_kernels.py.

Shapes: s tokens of this rank, t of a segment, n chunks, C tokens of a chunk, H value heads, J key heads, K and V their
dims, X = K + V. States are [H, K, V], in fp32 or wider; affine maps are [H, K, X]: M and U side by side.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ithaka.attention.delta_kernels import NORM_EPS, FusedSegment, runs_in_kernels
from ithaka.plan.layer_bytes import CHUNK_TOKENS, SEGMENT_ROWS

FLA_TOLERANCE = 0.02  # norm of a difference, relative; bf16 explains about a third
SCAN_STEPS = 16  # chunks that are scanned one after the other; blocks of them are scanned at once


class LocalDocs:
    """The documents of one rank's tokens, and of the `halo` tokens before them."""

    def __init__(self, starts: Sequence[int], first: int, num_tokens: int, halo: int, device: Any) -> None:
        """`starts`: (0, ..., S), those of the sequence. `first`: this rank's first token."""
        inside = [start - first for start in starts[:-1] if first - halo < start < first + num_tokens]
        self.starts, self._starts = [start for start in inside if start >= 0], inside
        self.halo, self.num_tokens = halo, num_tokens
        self.continued = 0 not in inside  # from the rank before
        self.continues = first + num_tokens not in starts  # on the next rank
        tokens = torch.arange(first - halo, first + num_tokens)
        ids = torch.bucketize(tokens, torch.tensor(starts[:-1]), right=True)  # 0 before the sequence
        self._ids = ids.to(torch.int32).to(device)

    def ids(self, first: int, stop: int) -> Tensor:
        """A number per document, for the tokens [first, stop). `first` may be as low as -halo."""
        return self._ids[first + self.halo : stop + self.halo]

    def has_start(self, rows: slice) -> bool:
        return any(rows.start <= start < rows.stop for start in self._starts)


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
        """The affine map [H, K, X] from the state before this rank's tokens to the state after them."""
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
        """The affine map [H, K, X] from the gradient of the last state to that of the first one."""
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
    """Differentiable rule over the few tokens of one document, [s, H, V]."""
    s, device = len(inputs.v_sHV), inputs.v_sHV.device
    state_HKV = DeltaRule(inputs, LocalDocs((0, s), 0, s, 1, device)).zero_state()
    return Segment(inputs, None, normalizes).run(state_HKV)[0]


class Segment(NamedTuple):
    """The rule over a segment of tokens."""

    inputs: DeltaInputs
    ids: Tensor | None  # of the documents of the token before the segment and of its tokens, [t + 1]. None: all equal
    normalizes: bool

    def extend(self, map_HKX: Tensor) -> Tensor:
        """The affine map from the state before the tokens of `map_HKX` to the state after this segment."""
        return compose(torch.stack([map_HKX, compose(self._prepare().step())], 1))

    def extend_grad(self, map_HKX: Tensor, dout_tHV: Tensor) -> Tensor:
        """The same for gradients, from that of the state after the tokens of `map_HKX`."""
        chunks = self._prepare()
        K, dout = chunks.k.shape[-1], _to_chunks(dout_tHV, chunks.k.dtype)
        added = chunks.read()[..., :K].mT @ dout
        own_HKX = compose(torch.cat([chunks.step()[..., :K].mT, added], -1).flip(1))
        return compose(torch.stack([map_HKX, own_HKX], 1))

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
        """Return out_tHV and the state after the segment."""
        chunks = self._prepare()
        sizes = chunks.k.shape[-1], chunks.v.shape[-1]
        transitions, added = chunks.step().split(sizes, -1)
        reads, out = chunks.read().split(sizes, -1)
        states = _Scan.apply(transitions, added, state_HKV)
        out = (out + reads @ states[:, :-1]).to(self.inputs.v_sHV.dtype)
        return out.flatten(1, 2).transpose(0, 1)[: len(self.inputs.v_sHV)], states[:, -1]

    def _prepare(self) -> "Chunks":
        q, k, v, g, beta = self.inputs
        wide = _wide(v)
        q, k, v, g, beta = (_to_chunks(t, wide) for t in (q, k, v, g[..., None], beta[..., None]))
        scale = k.shape[-1] ** -0.5
        if self.normalizes:
            lengths = [torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (q, k)]
            q_factor, k_factor = (torch.rsqrt(length**2 + NORM_EPS) for length in lengths)
            q, k = q * (q_factor * scale), k * k_factor
        else:
            q = q * scale
        masks = None
        if self.ids is not None:
            last = self.ids[-1:].expand(-(len(self.ids) - 1) % CHUNK_TOKENS)
            ids = torch.cat([self.ids, last])
            before, ids = ids[:-1:CHUNK_TOKENS, None], ids[1:].view(-1, CHUNK_TOKENS)
            masks = DocMasks(ids[..., None] == ids[:, None], ids == before, ids == ids[:, -1:], ids[:, -1:] == before)
        return Chunks.prepare(q, k, v, g[..., 0], beta[..., 0], masks)


class FlaSegment(Segment):
    """The same in flash-linear-attention, where it passes a trial. It returns no maps; they run in our kernels."""

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
        return _own_type(self.inputs)(*self).extend(map_HKX)

    def extend_grad(self, map_HKX: Tensor, dout_tHV: Tensor) -> Tensor:
        return _own_type(self.inputs)(*self).extend_grad(map_HKX, dout_tHV)


def _own_type(inputs: DeltaInputs) -> Any:
    return FusedSegment if runs_in_kernels(inputs.k_sJK, inputs.v_sHV) else Segment


def _segment_type(inputs: DeltaInputs, normalizes: bool) -> Any:
    v = inputs.v_sHV
    if not (_can_run_fla(v) and find_spec("fla")):
        return _own_type(inputs)
    failure = _try_fla(v.device, v.dtype, inputs.k_sJK.shape[1:], v.shape[1:], normalizes)
    return _own_type(inputs) if failure else FlaSegment


def _can_run_fla(v_sHV: Tensor) -> bool:
    return v_sHV.is_cuda and v_sHV.dtype.itemsize == 2


@cache
def _try_fla(device: torch.device, dtype: torch.dtype, keys: Any, values: Any, normalizes: bool) -> str | None:
    """Compare output, states and gradients, with decay and packed documents, with our own rule; return what is wrong,
    or None. Triton 3.4 to 3.7.0 miscompiles some of these kernels on Hopper."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(150, *sizes, generator=draw) for sizes in (keys, keys, values, values))
    g, beta = -0.1 * torch.rand(150, values[0], generator=draw), torch.rand(150, values[0], generator=draw)
    state, dstate = torch.randn(2, values[0], keys[1], values[1], generator=draw).to(device)
    wide = [t.to(device) for t in (k / keys[1] ** 0.5, g, beta)]
    q, k, v, dout = (t.to(device, dtype) for t in (q, wide[0], v, dout))
    ids = (torch.arange(151, device=device) >= 80).int()
    found: list[list[Tensor]] = []
    failure: str | None
    try:
        for kind, to in ((FlaSegment, None), (Segment, torch.float64)):
            inputs = DeltaInputs(*(t.to(to, copy=True) for t in (q, k, v, *wide[1:])))
            segment, out = kind(inputs, ids, normalizes), torch.empty_like(inputs.v_sHV)
            after = segment.forward(state.to(to), out)
            found.append([out, after, segment.backward(state.to(to), dout.to(to), dstate.to(to)), *inputs])
    except Exception as error:
        failure = f"does not run here ({type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]})"
    else:
        names = ("out", "state", "dstate", "dq", "dk", "dv", "dg", "dbeta")
        errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(*found, strict=True)]
        wrong = [f"{name} by {e:.1e}" for name, e in zip(names, errors, strict=True) if not e < FLA_TOLERANCE]
        failure = f"is wrong here, off in {', '.join(wrong)}" if wrong else None
    if failure:
        warnings.warn(f"the gated delta rule runs in ithaka's own code: flash-linear-attention {failure}", stacklevel=2)
    return failure


class DocMasks(NamedTuple):
    """Which of a chunk's tokens are in the same document, [n, C, C]; in that of the incoming state, and of the chunk's
    last token, [n, C]; whether the last token is in that of the incoming state, [n, 1]."""

    same: Tensor
    incoming: Tensor
    last: Tensor
    all: Tensor


class Chunks(NamedTuple):
    """Chunks as affine maps of their incoming states, by their factors. All are [H, n, ...], q and k [J, n, C, K]: in
    this order, the products of the chunks at equal positions in their blocks are one batch without a copy."""

    q: Tensor
    k: Tensor
    v: Tensor  # [H, n, C, V]
    decay: Tensor  # [H, n, C, C]: from one token to a later one
    entering: Tensor  # [H, n, C]: from the incoming state to a token
    leaving: Tensor  # [H, n, C]: from a token to the outgoing state
    passing: Tensor  # [H, n, 1]: from the incoming to the outgoing state
    written: Tensor  # [H, n, C, X]: -w and u; the tokens write u - w S into the state

    @classmethod
    def prepare(cls, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, masks: DocMasks | None) -> "Chunks":
        C = g.shape[-1]
        visible = torch.ones(C, C, dtype=torch.bool, device=g.device).tril()
        log = g.cumsum(-1)
        entering, leaving, passing = log.exp(), (log[..., -1:] - log).exp(), log[..., -1:].exp()
        if masks is not None:
            visible = visible & masks.same
            entering, leaving, passing = entering * masks.incoming, leaving * masks.last, passing * masks.all
        decay = (log[..., :, None] - log[..., None, :]).masked_fill(~visible, float("-inf")).exp()
        system = _for_value_heads(k @ k.mT, decay * beta[..., None])
        targets = _Join.apply(_of_value_heads(k, v), v, -beta * entering, beta)
        return cls(q, k, v, decay, entering, leaving, passing, _Inverse.apply(system) @ targets)

    def step(self) -> Tensor:
        """A and B, [H, n, K, X]."""
        k = _of_value_heads(self.k, self.v) * self.leaving[..., None]
        return _AddDiagonal.apply(k.mT @ self.written, self.passing)

    def read(self) -> Tensor:
        """R and O, [H, n, C, X]."""
        written = _for_value_heads(self.q @ self.k.mT, self.decay) @ self.written
        return _AddScaled.apply(written, _of_value_heads(self.q, self.v), self.entering)


def compose(maps: Tensor) -> Tensor:
    """The composition of affine maps [H, n, K, X], of which the first is applied first."""
    K = maps.shape[-2]
    while maps.shape[1] > 1:
        even = maps.shape[1] // 2 * 2
        first, second = maps[:, 0:even:2], maps[:, 1:even:2]
        product = second[..., :K] @ first
        product[..., K:] += second[..., K:]
        maps = product if even == maps.shape[1] else torch.cat([product, maps[:, even:]], 1)
    return maps[:, 0]


def scan(transitions: Tensor, added: Tensor, state: Tensor) -> Tensor:
    """The states before each chunk and after the last, [H, n + 1, K, V], of S <- A S + B."""
    n = transitions.shape[1]
    if n <= SCAN_STEPS:
        states = [state]
        for a, b in zip(transitions.unbind(1), added.unbind(1), strict=True):
            states.append(torch.baddbmm(b, a, states[-1]))
        return torch.stack(states, 1)
    blocks = n // SCAN_STEPS * SCAN_STEPS
    a, b = (t[:, :blocks].unflatten(1, (-1, SCAN_STEPS)).unbind(2) for t in (transitions, added))
    maps = [(a[0], b[0])]  # from the start of each block to after each of its chunks
    for i in range(1, SCAN_STEPS):
        maps.append((a[i] @ maps[-1][0], _apply_maps(a[i], b[i], maps[-1][1])))
    starts = scan(*maps[-1], state)
    result = state.new_empty(len(state), n + 1, *state.shape[1:])
    inside = result[:, :blocks].unflatten(1, (-1, SCAN_STEPS))
    inside[:, :, 0] = starts[:, :-1]
    for i in range(1, SCAN_STEPS):
        inside[:, :, i] = _apply_maps(*maps[i - 1], starts[:, :-1])
    result[:, blocks:] = scan(transitions[:, blocks:], added[:, blocks:], starts[:, -1])
    return result


def _apply_maps(a: Tensor, b: Tensor, states: Tensor) -> Tensor:
    """A S + B, for [H, n, ...]."""
    return torch.baddbmm(b.flatten(0, 1), a.flatten(0, 1), states.flatten(0, 1)).unflatten(0, states.shape[:2])


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, transitions, added, state):
        states = scan(transitions, added, state)
        ctx.save_for_backward(transitions, states)
        return states

    @staticmethod
    def backward(ctx, dstates):
        transitions, states = ctx.saved_tensors
        sums = scan(transitions.mT.flip(1), dstates[:, :-1].flip(1), dstates[:, -1]).flip(1)
        return sums[:, 1:] @ states[:, :-1].mT, sums[:, 1:], sums[:, 0]


class _Inverse(torch.autograd.Function):
    """The inverse of 1 + L for the strictly lower triangle L of a matrix [..., C, C], by halves: stable for any L."""

    @staticmethod
    def forward(ctx, matrix):
        C, size = matrix.shape[-1], 1
        inverse = torch.eye(C, dtype=matrix.dtype, device=matrix.device).expand_as(matrix).contiguous()
        while size < C:
            # Blocks of 2 * size on the diagonal: [[a, 0], [c, b]]^-1 = [[a^-1, 0], [-b^-1 c a^-1, b^-1]].
            blocks, systems = (
                t.unflatten(-1, (-1, 2 * size)).unflatten(-3, (-1, 2 * size)).diagonal(0, -4, -2).movedim(-1, -3)
                for t in (inverse, matrix)
            )
            top, bottom = slice(0, size), slice(size, 2 * size)
            product = blocks[..., bottom, bottom] @ systems[..., bottom, top] @ blocks[..., top, top]
            blocks[..., bottom, top] = -product
            size *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, dinverse):
        (inverse,) = ctx.saved_tensors
        return (inverse.mT @ dinverse @ inverse.mT).neg_().tril_(-1)


class _Join(torch.autograd.Function):
    """[k * a, v * b] for factors a and b per token."""

    @staticmethod
    def forward(ctx, k, v, a, b):
        ctx.save_for_backward(k, v, a, b)
        joined = v.new_empty(*v.shape[:-1], k.shape[-1] + v.shape[-1])
        torch.mul(k, a[..., None], out=joined[..., : k.shape[-1]])
        torch.mul(v, b[..., None], out=joined[..., k.shape[-1] :])
        return joined

    @staticmethod
    def backward(ctx, djoined):
        k, v, a, b = ctx.saved_tensors
        dk, dv = djoined.split((k.shape[-1], v.shape[-1]), -1)
        return dk * a[..., None], dv * b[..., None], (dk * k).sum(-1), (dv * v).sum(-1)


class _AddDiagonal(torch.autograd.Function):
    """Add `values` [..., 1] to the diagonal, in place."""

    @staticmethod
    def forward(ctx, matrix, values):
        ctx.mark_dirty(matrix)
        matrix.diagonal(dim1=-2, dim2=-1).add_(values)
        return matrix

    @staticmethod
    def backward(ctx, dmatrix):
        return dmatrix, dmatrix.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)


class _AddScaled(torch.autograd.Function):
    """Add q * a, for a factor a per token, to the first columns, in place."""

    @staticmethod
    def forward(ctx, into, q, a):
        ctx.save_for_backward(q, a)
        ctx.mark_dirty(into)
        into[..., : q.shape[-1]].addcmul_(q, a[..., None])
        return into

    @staticmethod
    def backward(ctx, dinto):
        q, a = ctx.saved_tensors
        d = dinto[..., : q.shape[-1]]
        return dinto, d * a[..., None], (d * q).sum(-1)


def _for_value_heads(products_JnCC: Tensor, factors_HnCC: Tensor) -> Tensor:
    """Products of key heads, times the factors of each of their value heads."""
    J, H = len(products_JnCC), len(factors_HnCC)
    if J == H:
        return products_JnCC * factors_HnCC
    return (products_JnCC[:, None] * factors_HnCC.unflatten(0, (J, -1))).flatten(0, 1)


def _of_value_heads(k_JnCK: Tensor, v_HnCV: Tensor) -> Tensor:
    """The key head of each value head."""
    return k_JnCK if len(k_JnCK) == len(v_HnCV) else k_JnCK.repeat_interleave(len(v_HnCV) // len(k_JnCK), 0)


def _to_chunks(t_tHK: Tensor, dtype: torch.dtype) -> Tensor:
    """[t, H, K] -> [H, n, C, K]. Zeros fill the last chunk: such tokens write nothing and do not decay."""
    if fill := -len(t_tHK) % CHUNK_TOKENS:
        t_tHK = F.pad(t_tHK, (0, 0, 0, 0, 0, fill))
    chunks_HnCK = t_tHK.unflatten(0, (-1, CHUNK_TOKENS)).permute(2, 0, 1, 3)
    return chunks_HnCK.to(dtype, memory_format=torch.contiguous_format)


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


@contextmanager
def _matmul_precision(t: Tensor) -> Iterator[None]:
    """In 16 bits, multiply fp32 matrices with TF32: its products are more precise than those of 16-bit inputs."""
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
    """A causal convolution of each channel over the last W tokens of its document, [t, N] in fp32 or wider.

    `ids_t`: a number per document; None: all tokens are in one. Tokens before the first count as 0.
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
