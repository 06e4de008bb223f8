"""Recurrences whose outgoing state is affine in the incoming one, over one rank's tokens.

A rank reduces its tokens to affine maps, S' = M S + U, all that other ranks need; with M^T the same
holds for gradients, in reverse. The gated delta rule (ops/delta_rule.py) has a matrix M per head,
Mamba2 (ops/ssd.py) a number.

Documents, pieces and the places of states: ops/state_graph.py.

Segments of consecutive chunks of a piece bound the memory. Backward recomputes a segment from the
state before it.

Shapes: s tokens of this rank, t of a segment, z chunks, C tokens of a chunk, H value heads, J key
heads, K and V their dims, x columns of M, y exported states; M channels and W tokens of a
convolution. States are [H, K, V], in fp32 or wider; maps are [H, K, x + V]: M, then U.
"""

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ithaka.facts.sizes import CHUNK_TOKENS, SEGMENT_ROWS
from ithaka.ops.state_graph import LocalDocs, Piece, wide

TRIAL_TOKENS = 150
TRIAL_TOLERANCE = 0.02  # relative norm of a difference; bf16 explains about a third

# ---- the recurrence


class ScanInputs(Protocol):
    """A NamedTuple of tensors, [s, ...] each, among them k and v."""

    @property
    def k_sJK(self) -> Tensor: ...

    @property
    def v_sHV(self) -> Tensor: ...

    def __init__(self, *tensors: Tensor) -> None: ...

    def __iter__(self) -> Iterator[Tensor]: ...

    def _asdict(self) -> dict[str, Tensor]: ...


class ScanSegment(Protocol):
    """See delta_rule.DeltaSegment."""

    def extend(self, map_HKX: Tensor) -> Tensor: ...

    def extend_grad(self, map_HKX: Tensor, dout_tHV: Tensor) -> Tensor: ...

    def forward(self, state_HKV: Tensor, out_tHV: Tensor) -> Tensor: ...

    def backward(self, state_HKV: Tensor, dout_tHV: Tensor, dstate_HKV: Tensor) -> Tensor: ...


Inputs = TypeVar("Inputs", bound=ScanInputs)


@dataclass(frozen=True)
class Scan(Generic[Inputs]):
    """A recurrence over one rank's tokens. Neither direction communicates: the caller gathers the
    maps of all ranks."""

    inputs: Inputs
    docs: LocalDocs

    segment_size: ClassVar[int] = 1  # in SEGMENT_ROWS

    @property
    def other_grads(self) -> list[Tensor]:
        """After `backward`: the gradients of inputs without tokens."""
        return []

    def make_segment(self, inputs: Inputs, ids: Tensor | None) -> ScanSegment:
        """`ids`: as in `LocalDocs.segment_ids`."""
        raise NotImplementedError

    def identity(self) -> Tensor:
        """Return M of the map that changes nothing, [H, K, x]."""
        raise NotImplementedError

    def apply(self, matrix_HKx: Tensor, state_HKV: Tensor) -> Tensor:
        """Return M S."""
        raise NotImplementedError

    def segments(self, piece: Piece) -> list[slice]:
        num_heads = self.inputs.v_sHV.shape[1]
        first = piece.start - self.docs.first
        stop = piece.stop - self.docs.first
        step = -(-self.segment_size * SEGMENT_ROWS // (num_heads * CHUNK_TOKENS)) * CHUNK_TOKENS
        return [slice(a, min(a + step, stop)) for a in range(first, stop, step)]

    # ---- forward

    def summarize(self) -> Tensor:
        """Return a map for each exported state, from the import that it depends on:
        [y, H, K, x + V]."""
        graph = self.docs.graph
        exports = self.docs.exports
        known: dict[int, Tensor] = {}
        needed = {*exports}
        identity = self.identity()
        zeros = zero_state(self.inputs)
        for piece in self.docs.pieces[::-1]:
            is_linked = piece.stop in needed and graph.first_reset(piece) is None
            if is_linked and piece.source is not None:
                needed.add(piece.source)
        with torch.no_grad(), matmul_precision(self.inputs.v_sHV):
            for piece in self.docs.pieces:
                if piece.stop not in needed:
                    continue
                total = known.get(piece.source) if piece.source is not None else None
                if total is None:
                    is_import = piece.source in self.docs.imports
                    matrix = identity if is_import else torch.zeros_like(identity)
                    total = torch.cat([matrix, zeros], -1)
                last = bisect_left(graph.resets, piece.stop) - 1  # no state comes from before it
                for rows in self.segments(piece):
                    if rows.stop + self.docs.first > graph.resets[last]:
                        total = self._segment(rows).extend(total)
                known[piece.stop] = total
        return self._pad([known[place] for place in exports])

    def combine(self, maps: Tensor) -> dict[int, Tensor]:
        """Return the states before this rank, by place, given the maps of all ranks,
        [c, y, H, K, x + V]."""
        graph = self.docs.graph
        states: dict[int, Tensor] = {}
        for rank in range(self.docs.rank):
            for place, total in zip(graph.exports[rank], maps[rank], strict=False):
                matrix, states[place] = total.tensor_split((-self.inputs.v_sHV.shape[-1],), -1)
                origin = graph.origins[place]
                if origin is not None:
                    states[place] = self.apply(matrix, states[origin]) + states[place]
        return states

    def forward(self, states: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
        """Return out_sHV and the states before each segment, [., H, K, V]. `states`: the imported
        ones, by place."""
        out_sHV = torch.empty_like(self.inputs.v_sHV)
        states = dict(states)
        zeros = zero_state(self.inputs)
        kept = []
        used = {piece.source for piece in self.docs.pieces}
        with torch.no_grad(), matmul_precision(out_sHV):
            for piece in self.docs.pieces:
                state_HKV = zeros if piece.source is None else states[piece.source]
                for rows in self.segments(piece):
                    kept.append(state_HKV)
                    state_HKV = self._segment(rows).forward(state_HKV, out_sHV[rows])
                if piece.stop in used:
                    states[piece.stop] = state_HKV
        return out_sHV, torch.stack(kept)

    # ---- backward

    def summarize_grad(self, dout_sHV: Tensor) -> Tensor:
        """Return [y, H, K, x + V]: M^T of each exported state, and the gradient of each imported
        state if those of the exported ones are 0. A state that depends on no import has zeros."""
        graph = self.docs.graph
        exports = self.docs.exports
        identity = self.identity()
        columns = identity.shape[-1]
        zeros = zero_state(self.inputs)
        # by place: exports, and M^T of each next to the gradient
        totals: dict[int, tuple[list[int], Tensor]] = {}
        with torch.no_grad(), matmul_precision(dout_sHV):
            for piece in self.docs.pieces[::-1]:
                places, total = totals.pop(piece.stop, ([], zeros))
                if not self._is_open(piece):
                    continue
                reset = graph.first_reset(piece)
                if reset is not None:  # no gradient comes from after it
                    places = []
                    total = zeros
                elif piece.stop in exports:
                    places = [piece.stop, *places]
                    total = torch.cat([identity, total], -1)
                for rows in self.segments(piece)[::-1]:
                    if reset is None or rows.start + self.docs.first <= reset:
                        total = self._segment(rows).extend_grad(total, dout_sHV[rows])
                if piece.source in totals:
                    others, other = totals[piece.source]
                    V = zeros.shape[-1]
                    parts = [total[..., :-V], other[..., :-V], total[..., -V:] + other[..., -V:]]
                    places = [*places, *others]
                    total = torch.cat(parts, -1)
                totals[piece.source] = places, total  # type: ignore[index]
        matrices = {}  # by export
        gradients = {}  # by import
        for source, (stops, maps) in totals.items():
            gradients[source] = maps[..., -zeros.shape[-1] :]
            for stop, matrix in zip(stops, maps.split(columns, -1), strict=False):
                matrices[stop] = matrix
        items = []
        for export, place in zip_longest(exports, self.docs.imports):
            matrix = matrices.get(export)
            if matrix is None:
                matrix = torch.zeros_like(identity)
            items.append(torch.cat([matrix, gradients.get(place, zeros)], -1))
        return self._pad(items)

    def combine_grad(self, maps: Tensor) -> dict[int, Tensor]:
        """Return the gradients of the exported states, by place, given `summarize_grad` of all
        ranks."""
        graph = self.docs.graph
        columns = self.identity().shape[-1]
        grads: dict[int, Tensor] = {}
        for rank in reversed(range(self.docs.rank + 1, len(graph.pieces))):
            matrices = maps[rank][..., :columns]
            for place, item in zip(graph.imports[rank], maps[rank], strict=False):
                total = item[..., columns:]
                for export, matrix in zip(graph.exports[rank], matrices, strict=False):
                    if graph.origins[export] == place and export in grads:
                        total = total + self.apply(matrix, grads[export])
                grads[place] = grads[place] + total if place in grads else total
        return {place: grad for place, grad in grads.items() if place in self.docs.exports}

    def backward(
        self, states: Tensor, dout_sHV: Tensor, grads: dict[int, Tensor]
    ) -> dict[int, Tensor]:
        """Write the gradients of the inputs over the inputs; return those of the imported states.
        `grads`: those of the exported states."""
        grads = dict(grads)
        kept = list(states)
        zeros = zero_state(self.inputs)
        with matmul_precision(dout_sHV):
            for piece in self.docs.pieces[::-1]:
                dstate_HKV = grads.pop(piece.stop, zeros)
                for rows in self.segments(piece)[::-1]:
                    dstate_HKV = self._segment(rows).backward(
                        kept.pop(), dout_sHV[rows], dstate_HKV
                    )
                source = piece.source
                if source is not None:
                    grads[source] = grads[source] + dstate_HKV if source in grads else dstate_HKV
        return grads

    # ---- helpers

    def _is_open(self, piece: Piece) -> bool:
        """Whether its first state depends on an import."""
        source = piece.source
        if source is None:
            return False
        return source in self.docs.imports or self.docs.graph.origins[source] is not None

    def _segment(self, rows: slice) -> ScanSegment:
        inputs = type(self.inputs)(*(t[rows] for t in self.inputs))
        return self.make_segment(inputs, self.docs.segment_ids(rows))

    def _pad(self, items: list[Tensor]) -> Tensor:
        """Return as many maps as on every other rank."""
        (H, K, columns) = self.identity().shape
        V = self.inputs.v_sHV.shape[-1]
        padded = zero_state(self.inputs).new_zeros(self.docs.graph.num_items, H, K, columns + V)
        for into, item in zip(padded, items, strict=False):
            into.copy_(item)
        return padded


# ---- chunks


class Decays(NamedTuple):
    """The decays of chunks, [H, z, C, ...]. Between tokens of different documents, and to and from
    states of other documents, they are 0."""

    entering: Tensor  # from the incoming state to a token
    leaving: Tensor  # from a token to the outgoing state
    passing: Tensor  # from state to state, [H, z, 1, 1]
    between: Tensor  # from token to token, [H, z, C, C]

    @classmethod
    def of(cls, g: Tensor, ids: Tensor | None) -> "Decays":
        """`g`: the log of each token's decay, [H, z, C, 1]. `ids`: as in
        `LocalDocs.segment_ids`."""
        C = g.shape[2]
        is_seen = torch.ones(C, C, dtype=torch.bool, device=g.device).tril()
        log = g.cumsum(-2)
        entering = log.exp()
        leaving = (log[..., -1:, :] - log).exp()
        passing = log[..., -1:, :].exp()
        if ids is not None:
            ids = torch.cat([ids, ids[-1:].expand(-(len(ids) - 1) % C)])
            before = ids[:-1:C, None, None]
            ids = ids[1:].view(-1, C, 1)
            last = ids[:, -1:]
            is_seen = is_seen & (ids == ids.mT)
            entering = entering * (ids == before)
            leaving = leaving * (ids == last)
            passing = passing * (last == before)
        between = (log - log.mT).masked_fill(~is_seen, float("-inf")).exp()
        return cls(entering, leaving, passing, between)


def to_chunks(t_tHK: Tensor, dtype: torch.dtype) -> Tensor:
    """Reshape [t, H, K] to [H, z, C, K]. Zeros pad the last chunk: such tokens write nothing and do
    not decay."""
    if fill := -len(t_tHK) % CHUNK_TOKENS:
        t_tHK = F.pad(t_tHK, (0, 0, 0, 0, 0, fill))
    chunks_HzCK = t_tHK.unflatten(0, (-1, CHUNK_TOKENS)).permute(2, 0, 1, 3)
    return chunks_HzCK.to(dtype, memory_format=torch.contiguous_format)


def from_chunks(t_HzCK: Tensor, like: Tensor) -> Tensor:
    """Undo `to_chunks`, with the tokens and dtype of `like`."""
    return t_HzCK.flatten(1, 2).transpose(0, 1)[: len(like)].to(like.dtype)


def zero_state(inputs: ScanInputs) -> Tensor:
    v = inputs.v_sHV
    (_, H, V) = v.shape
    return torch.zeros(H, inputs.k_sJK.shape[-1], V, dtype=wide(v), device=v.device)


@contextmanager
def matmul_precision(t: Tensor) -> Iterator[None]:
    """For 16-bit inputs, multiply fp32 matrices in TF32, which is more precise than 16-bit
    matmuls."""
    settings: Any = torch.backends.cuda.matmul
    before = settings.fp32_precision
    if t.is_cuda and t.dtype.itemsize == 2:
        settings.fp32_precision = "tf32"
    try:
        yield
    finally:
        settings.fp32_precision = before


# ---- tests of kernels


# (inputs, ids, is the plain one) -> a segment and other gradients of its backward
MakeSegment = Callable[[Inputs, Tensor, bool], tuple[ScanSegment, dict[str, Tensor]]]


def try_segment(title: str, make: MakeSegment[Inputs], inputs: Inputs) -> str | None:
    """Compare output, states and gradients of a segment in two documents with a plain one in fp64.
    Return None, or what is wrong, after a warning: only a test shows what this version of Triton
    compiles correctly for this GPU."""
    failure: str | None
    try:
        with torch.inference_mode(False):
            failure = _compare_segments(make, inputs)
    except torch.OutOfMemoryError:
        raise  # says nothing about the kernels
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:160]
        failure = f"does not run here ({type(error).__name__}: {reason})"
    if failure:
        warnings.warn(f"{title}, which {failure}", stacklevel=2)
    return failure


def _compare_segments(make: MakeSegment[Inputs], inputs: Inputs) -> str | None:
    draw = torch.Generator().manual_seed(1)
    v = inputs.v_sHV
    sizes = (v.shape[1], inputs.k_sJK.shape[-1], v.shape[-1])
    state, dstate = torch.randn(2, *sizes, generator=draw).to(v.device)
    dout = torch.randn(v.shape, generator=draw).to(v)
    ids = (torch.arange(len(v) + 1, device=v.device) > 80).int()
    found: list[dict[str, Tensor]] = []
    for to in (None, torch.float64):
        own = type(inputs)(*(t.to(v.device, to, copy=True) for t in inputs))
        segment, others = make(own, ids, to is not None)
        out = torch.empty_like(own.v_sHV)
        results = {"out": out, "state": segment.forward(state.to(to), out)}
        results["dstate"] = segment.backward(state.to(to), dout.to(to), dstate.to(to))
        grads = {f"d{name.partition('_')[0]}": t for name, t in own._asdict().items()}
        found.append({**results, **grads, **others})
    ours, exact = found
    wrong = []
    for name, t in ours.items():
        error = float((t.double() - exact[name]).norm() / exact[name].norm())
        if not error < TRIAL_TOLERANCE:  # also if NaN
            wrong.append(f"{name} by {error:.1e}")
    return f"is wrong here, off in {', '.join(wrong)}" if wrong else None


# ---- the short convolution before the recurrence


def short_convolution(
    x_tM: Tensor, weight_MW: Tensor, bias_M: Tensor | None, ids_t: Tensor | None
) -> Tensor:
    """Convolve each channel causally over the last W tokens of its document: [t, M] in fp32 or
    wider.

    `ids_t`: a number per document; None: one document. Tokens before the first count as 0.
    """
    dtype = wide(x_tM)
    W = weight_MW.shape[1]
    x_tM = x_tM.to(dtype)
    weight_MW = weight_MW.to(dtype)
    y_tM = x_tM * weight_MW[:, -1]
    for back in range(1, min(W, len(x_tM))):
        earlier_tM = x_tM[:-back] * weight_MW[:, W - 1 - back]
        if ids_t is not None:
            earlier_tM = earlier_tM * (ids_t[back:] == ids_t[:-back])[:, None]
        y_tM = y_tM + F.pad(earlier_tM, (0, 0, back, 0))
    return y_tM if bias_M is None else y_tM + bias_M.to(dtype)
