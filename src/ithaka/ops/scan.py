"""Recurrences whose outgoing state is affine in the incoming one, over one rank's tokens.

A rank reduces its tokens to affine maps, S' = M S + U, which is all that other ranks need. With M^T, the same holds for
gradients, in reverse. The gated delta rule (ops/delta_rule.py) has a matrix M per head, Mamba2 (ops/ssd.py) a number.

A document starts with S = 0, or in a forest with the state after its parent. A state is named after its *place*: the
number of tokens before it in the sequence. Tokens are cut into *pieces*, at rank boundaries and where a document
continues another that does not end right before it; a piece leads from the state at its source to the state at its
stop. A rank *imports* states at places on earlier ranks, and *exports* those that later ranks start from.

Segments of consecutive chunks of a piece bound the memory. Backward recomputes a segment from the state before it.

Shapes: s tokens of this rank, t of a segment, z chunks, C tokens of a chunk, H value heads, J key heads, K and V their
dims, x columns of M, y exported states; M channels and W tokens of a convolution. States are [H, K, V], in fp32 or
wider; maps are [H, K, x + V]: M and U next to each other.
"""

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ithaka.plan.mixers import CHUNK_TOKENS, SEGMENT_ROWS

TRIAL_TOKENS, TRIAL_TOLERANCE = 150, 0.02  # relative norm of a difference; bf16 explains about a third

# ---- documents


class Piece(NamedTuple):
    """Consecutive tokens of one rank, numbered in the sequence."""

    start: int
    stop: int
    source: int | None  # the place of the state that it starts from; None: 0


class StateGraph:
    """The pieces of all ranks, and the states that they pass on. The same on every rank."""

    def __init__(self, starts: Sequence[int], parents: Sequence[int], num_local: int) -> None:
        """`starts` and `parents`: as in `Docs`. `num_local`: tokens of each rank."""
        self.num_local, num_tokens = num_local, starts[-1]
        self.sources: dict[int, int | None] = {}  # start of a document -> end of its parent
        ends: list[int | None] = []
        for node, (start, stop) in enumerate(pairwise(starts)):
            above = ends[parents[node]] if parents and parents[node] >= 0 else None
            ends.append(stop if stop > start else above)
            if stop > start:
                self.sources[start] = above
        self.forks = {a: end for a, end in self.sources.items() if end not in (None, a)}
        self.resets = [a for a, end in self.sources.items() if end is None]
        cuts = {*range(0, num_tokens + 1, num_local), *self.forks, *self.forks.values()}
        pieces = [Piece(a, b, self.sources.get(a, a)) for a, b in pairwise(sorted(cuts))]
        ranks = range(num_tokens // num_local)
        self.pieces: list[list[Piece]] = [[] for _ in ranks]
        for piece in pieces:
            self.pieces[piece.start // num_local].append(piece)
        self.imports = [
            sorted({p.source for p in self.pieces[rank] if p.source is not None and p.source <= rank * num_local})
            for rank in ranks
        ]
        used = sorted({place for places in self.imports for place in places})
        self.exports = [[p for p in used if rank * num_local < p <= (rank + 1) * num_local] for rank in ranks]
        self.num_items = max(len(places) for places in (*self.imports, *self.exports))  # the maps of each rank
        # Per place: the import of its rank that the state depends on; None: none.
        self.origins: dict[int, int | None] = {}
        for piece in pieces:
            origin = None if self.first_reset(piece) is not None else piece.source
            if origin is not None and origin > piece.start // num_local * num_local:
                origin = self.origins[origin]
            self.origins[piece.stop] = origin

    def first_reset(self, piece: Piece) -> int | None:
        index = bisect_left(self.resets, piece.start)
        return self.resets[index] if index < len(self.resets) and self.resets[index] < piece.stop else None

    def tokens_before(self, token: int, count: int) -> list[int]:
        """Return the `count` tokens before a token in its document and its ancestors; -1 where there are none."""
        path: list[int] = []
        while len(path) < count:
            place = self.sources.get(token, token)
            if place is None:
                break
            token = place - 1
            path.append(token)
        return [-1] * (count - len(path)) + path[::-1]


class LocalDocs:
    """The documents of one rank's tokens, and the `halo` tokens before them. Tokens are numbered on the rank."""

    def __init__(
        self, starts: Sequence[int], first: int, num_tokens: int, halo: int, device: Any, parents: Sequence[int] = ()
    ) -> None:
        """`starts`: cumulative starts of the sequence's documents, (0, ..., S). `first`: this rank's first token."""
        self.graph = graph = StateGraph(starts, parents, num_tokens)
        self.first, self.num_tokens, self.rank, self.halo = first, num_tokens, first // num_tokens, halo
        self.pieces = graph.pieces[self.rank]
        self.imports, self.exports = graph.imports[self.rank], graph.exports[self.rank]
        self.resets = [start - first for start in graph.resets if first <= start < first + num_tokens]
        ids = torch.bucketize(torch.arange(-1, num_tokens), torch.tensor(self.resets, dtype=torch.long), right=True)
        self._ids = ids.to(torch.int32).to(device)
        self._tile_ids: dict[tuple[int, int], Tensor | None] = {}
        self.halos = Halos(graph, self.rank, halo, device)

    def has_reset(self, first: int, stop: int) -> bool:
        index = bisect_left(self.resets, first)
        return index < len(self.resets) and self.resets[index] < stop

    def segment_ids(self, rows: slice) -> Tensor | None:
        """Return a number per document for the token before `rows` and each of its tokens. None: all are in one."""
        return self._ids[rows.start : rows.stop + 1] if self.has_reset(rows.start, rows.stop) else None

    def tile_ids(self, rows: slice) -> Tensor | None:
        """Return the same for the halo and the tokens of a tile, within which no document forks."""
        key = rows.start, rows.stop
        if key not in self._tile_ids:
            before = self.graph.tokens_before(self.first + rows.start, self.halo)
            inside = self._ids[rows.start + 1 : rows.stop + 1] - self._ids[rows.start + 1] + 1
            is_one = before[0] >= 0 and not self.has_reset(rows.start + 1, rows.stop)
            ids = [int(token >= 0) for token in before]
            self._tile_ids[key] = None if is_one else torch.cat([inside.new_tensor(ids), inside])
        return self._tile_ids[key]


class Halos:
    """The tokens that the first token of a rank, and of each document that continues a distant one, reads: where
    they are. w tokens of a halo, f halos of this rank."""

    def __init__(self, graph: StateGraph, rank: int, halo: int, device: Any) -> None:
        s, ranks = graph.num_local, range(len(graph.pieces))
        starts = [sorted({r * s, *(a for a in graph.forks if a // s == r)}) for r in ranks]
        tokens = [[token for a in of_rank for token in graph.tokens_before(a, halo)] for of_rank in starts]
        self.starts, self.num_slots = [a - rank * s for a in starts[rank]], len(tokens[rank])
        sent = [sorted({t for r in ranks if r != q for t in tokens[r] if t >= 0 and t // s == q}) for q in ranks]
        self.num_sent, self.num_returned = max(map(len, sent)), max(map(len, tokens))
        rows = {token: q * self.num_sent + i for q in ranks for i, token in enumerate(sent[q])}

        def index(pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
            a, b = torch.tensor(list(pairs), dtype=torch.long).view(-1, 2).unbind(1)
            return a.to(device), b.to(device)

        own = [(slot, t - rank * s) for slot, t in enumerate(tokens[rank]) if t >= 0 and t // s == rank]
        self._own, (self._sent, _) = index(own), index([(t - rank * s, 0) for t in sent[rank]])
        self._received = index([(slot, rows[t]) for slot, t in enumerate(tokens[rank]) if t in rows and t // s != rank])
        # The slots of this rank's tokens among those of all ranks, and which tokens they are.
        width = self.num_returned if self.num_sent else 0  # without an exchange, own slots only
        read = [(r * width + i, t) for r in ranks for i, t in enumerate(tokens[r]) if t >= 0 and t // s == rank]
        targets = sorted({t for _, t in read})
        places = {t: i for i, t in enumerate(targets)}
        self._read = index([(slot, places[t]) for slot, t in read])
        self._targets = torch.tensor([t - rank * s for t in targets], dtype=torch.long, device=device)

    def collect(self, x_sD: Tensor, gather: Any) -> Tensor:
        """Return the halos, [f * w, D]; zeros before a document's start. `gather` returns the tensors of all ranks."""
        halos = x_sD.new_zeros(self.num_slots, x_sD.shape[-1])
        halos[self._own[0]] = x_sD[self._own[1]]
        if self.num_sent:
            sent = x_sD[self._sent]
            received = gather(F.pad(sent, (0, 0, 0, self.num_sent - len(sent)))).flatten(0, 1)
            halos[self._received[0]] = received[self._received[1]]
        return halos

    def collect_backward(self, dhalos: Tensor, dx_sD: Tensor, gather: Any) -> None:
        """Add the gradients of all ranks' halos to those of this rank's tokens, summed in fp32 or wider."""
        if self.num_sent:
            dhalos = gather(F.pad(dhalos, (0, 0, 0, self.num_returned - len(dhalos)))).flatten(0, 1)
        sums = dx_sD.new_zeros(len(self._targets), dx_sD.shape[-1], dtype=wide(dx_sD))
        sums.index_put_((self._read[1],), dhalos[self._read[0]].to(sums.dtype), accumulate=True)
        dx_sD[self._targets] += sums.to(dx_sD.dtype)


# ---- the recurrence


@dataclass(frozen=True)
class Scan:
    """A recurrence over one rank's tokens. Neither direction communicates: the caller gathers the maps of all ranks."""

    inputs: Any  # [s, ...] each, among them k_sJK and v_sHV
    docs: LocalDocs

    segment_size: ClassVar[int] = 1  # in SEGMENT_ROWS
    other_grads: ClassVar[Any] = ()  # after `backward`: the gradients of inputs without tokens

    make_segment: ClassVar[Any]  # (inputs, ids) -> the recurrence over a segment, as in ops/delta_rule.py
    identity: ClassVar[Any]  # () -> M of the map that changes nothing, [H, K, x]
    apply: ClassVar[Any]  # (M, S) -> M S

    def segments(self, piece: Piece) -> list[slice]:
        num_heads, first, stop = self.inputs.v_sHV.shape[1], piece.start - self.docs.first, piece.stop - self.docs.first
        step = -(-self.segment_size * SEGMENT_ROWS // (num_heads * CHUNK_TOKENS)) * CHUNK_TOKENS
        return [slice(a, min(a + step, stop)) for a in range(first, stop, step)]

    # ---- forward

    def summarize(self) -> Tensor:
        """Return a map for each exported state, from the import that it depends on: [y, H, K, x + V]."""
        graph, exports, known = self.docs.graph, self.docs.exports, dict[int, Tensor]()
        needed, identity, zeros = {*exports}, self.identity(), zero_state(self.inputs)
        for piece in self.docs.pieces[::-1]:
            if piece.stop in needed and graph.first_reset(piece) is None and piece.source is not None:
                needed.add(piece.source)
        with torch.no_grad(), matmul_precision(self.inputs.v_sHV):
            for piece in self.docs.pieces:
                if piece.stop not in needed:
                    continue
                total = known.get(piece.source) if piece.source is not None else None
                if total is None:
                    matrix = identity if piece.source in self.docs.imports else torch.zeros_like(identity)
                    total = torch.cat([matrix, zeros], -1)
                last = bisect_left(graph.resets, piece.stop) - 1  # no state comes from before it
                for rows in self.segments(piece):
                    if rows.stop + self.docs.first > graph.resets[last]:
                        total = self._segment(rows).extend(total)
                known[piece.stop] = total
        return self._pad([known[place] for place in exports])

    def combine(self, maps: Tensor) -> dict[int, Tensor]:
        """Return the states before this rank, by place, given the maps of all ranks, [c, y, H, K, x + V]."""
        graph, states = self.docs.graph, dict[int, Tensor]()
        for rank in range(self.docs.rank):
            for place, total in zip(graph.exports[rank], maps[rank], strict=False):
                matrix, states[place] = total.tensor_split((-self.inputs.v_sHV.shape[-1],), -1)
                if (origin := graph.origins[place]) is not None:
                    states[place] = self.apply(matrix, states[origin]) + states[place]
        return states

    def forward(self, states: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
        """Return out_sHV and the states before each segment, [., H, K, V]. `states`: the imported ones, by place."""
        out_sHV, states, zeros, kept = torch.empty_like(self.inputs.v_sHV), dict(states), zero_state(self.inputs), []
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
        """Return [y, H, K, x + V]: M^T of each exported state, and the gradient of each imported state if those of the
        exported ones are 0. A state that depends on no import has zeros."""
        graph, exports, identity = self.docs.graph, self.docs.exports, self.identity()
        columns, zeros = identity.shape[-1], zero_state(self.inputs)
        totals: dict[int, tuple[list[int], Tensor]] = {}  # by place: exports, and M^T of each next to the gradient
        with torch.no_grad(), matmul_precision(dout_sHV):
            for piece in self.docs.pieces[::-1]:
                places, total = totals.pop(piece.stop, ([], zeros))
                if not self._is_open(piece):
                    continue
                reset = graph.first_reset(piece)
                if reset is not None:  # no gradient comes from after it
                    places, total = [], zeros
                elif piece.stop in exports:
                    places, total = [piece.stop, *places], torch.cat([identity, total], -1)
                for rows in self.segments(piece)[::-1]:
                    if reset is None or rows.start + self.docs.first <= reset:
                        total = self._segment(rows).extend_grad(total, dout_sHV[rows])
                if piece.source in totals:
                    others, other = totals[piece.source]
                    V = zeros.shape[-1]
                    parts = [total[..., :-V], other[..., :-V], total[..., -V:] + other[..., -V:]]
                    places, total = [*places, *others], torch.cat(parts, -1)
                totals[piece.source] = places, total  # type: ignore[index]
        found = {
            place: total[..., i * columns : (i + 1) * columns]
            for of, total in totals.values()
            for i, place in enumerate(of)
        }
        items = []
        for i in range(max(len(exports), len(self.docs.imports))):
            matrix = found.get(exports[i]) if i < len(exports) else None
            grad = totals.get(self.docs.imports[i]) if i < len(self.docs.imports) else None
            parts = [torch.zeros_like(identity) if matrix is None else matrix]
            items.append(torch.cat([*parts, zeros if grad is None else grad[1][..., -zeros.shape[-1] :]], -1))
        return self._pad(items)

    def combine_grad(self, maps: Tensor) -> dict[int, Tensor]:
        """Return the gradients of the exported states, by place, given `summarize_grad` of all ranks."""
        graph, columns, grads = self.docs.graph, self.identity().shape[-1], dict[int, Tensor]()
        for rank in reversed(range(self.docs.rank + 1, len(graph.pieces))):
            for place, item in zip(graph.imports[rank], maps[rank], strict=False):
                total = item[..., columns:]
                for export, matrix in zip(graph.exports[rank], maps[rank][..., :columns], strict=False):
                    if graph.origins[export] == place and export in grads:
                        total = total + self.apply(matrix, grads[export])
                grads[place] = grads[place] + total if place in grads else total
        return {place: grad for place, grad in grads.items() if place in self.docs.exports}

    def backward(self, states: Tensor, dout_sHV: Tensor, grads: dict[int, Tensor]) -> dict[int, Tensor]:
        """Write the gradients of the inputs over the inputs; return those of the imported states. `grads`: those of the
        exported states."""
        grads, kept, zeros = dict(grads), list(states), zero_state(self.inputs)
        with matmul_precision(dout_sHV):
            for piece in self.docs.pieces[::-1]:
                dstate_HKV = grads.pop(piece.stop, zeros)
                for rows in self.segments(piece)[::-1]:
                    dstate_HKV = self._segment(rows).backward(kept.pop(), dout_sHV[rows], dstate_HKV)
                if (source := piece.source) is not None:
                    grads[source] = grads[source] + dstate_HKV if source in grads else dstate_HKV
        return grads

    # ---- helpers

    def _is_open(self, piece: Piece) -> bool:
        """Whether its first state depends on an import."""
        source = piece.source
        return source in self.docs.imports or (source is not None and self.docs.graph.origins[source] is not None)

    def _segment(self, rows: slice) -> Any:
        return self.make_segment(type(self.inputs)(*(t[rows] for t in self.inputs)), self.docs.segment_ids(rows))

    def _pad(self, items: list[Tensor]) -> Tensor:
        """Return as many maps as on every other rank."""
        (H, K, columns), V = self.identity().shape, self.inputs.v_sHV.shape[-1]
        padded = zero_state(self.inputs).new_zeros(self.docs.graph.num_items, H, K, columns + V)
        for into, item in zip(padded, items, strict=False):
            into.copy_(item)
        return padded


# ---- chunks


class Decays(NamedTuple):
    """The decays of chunks, [H, z, C, ...]. Between tokens of different documents, and to and from states of other
    documents, they are 0."""

    entering: Tensor  # from the incoming state to a token
    leaving: Tensor  # from a token to the outgoing state
    passing: Tensor  # from state to state, [H, z, 1, 1]
    between: Tensor  # from token to token, [H, z, C, C]

    @classmethod
    def of(cls, g: Tensor, ids: Tensor | None) -> "Decays":
        """`g`: the log of each token's decay, [H, z, C, 1]. `ids`: as in `LocalDocs.segment_ids`."""
        C = g.shape[2]
        is_seen = torch.ones(C, C, dtype=torch.bool, device=g.device).tril()
        log = g.cumsum(-2)
        entering, leaving, passing = log.exp(), (log[..., -1:, :] - log).exp(), log[..., -1:, :].exp()
        if ids is not None:
            ids = torch.cat([ids, ids[-1:].expand(-(len(ids) - 1) % C)])
            before, ids = ids[:-1:C, None, None], ids[1:].view(-1, C, 1)
            last, is_seen = ids[:, -1:], is_seen & (ids == ids.mT)
            entering, leaving, passing = entering * (ids == before), leaving * (ids == last), passing * (last == before)
        return cls(entering, leaving, passing, (log - log.mT).masked_fill(~is_seen, float("-inf")).exp())


def to_chunks(t_tHK: Tensor, dtype: torch.dtype) -> Tensor:
    """Reshape [t, H, K] to [H, z, C, K]. Zeros pad the last chunk: such tokens write nothing and do not decay."""
    if fill := -len(t_tHK) % CHUNK_TOKENS:
        t_tHK = F.pad(t_tHK, (0, 0, 0, 0, 0, fill))
    chunks_HzCK = t_tHK.unflatten(0, (-1, CHUNK_TOKENS)).permute(2, 0, 1, 3)
    return chunks_HzCK.to(dtype, memory_format=torch.contiguous_format)


def from_chunks(t_HzCK: Tensor, like: Tensor) -> Tensor:
    """Undo `to_chunks`, with the tokens and dtype of `like`."""
    return t_HzCK.flatten(1, 2).transpose(0, 1)[: len(like)].to(like.dtype)


def zero_state(inputs: Any) -> Tensor:
    (_, H, V), K = inputs.v_sHV.shape, inputs.k_sJK.shape[-1]
    return torch.zeros(H, K, V, dtype=wide(inputs.v_sHV), device=inputs.v_sHV.device)


def wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


@contextmanager
def matmul_precision(t: Tensor) -> Iterator[None]:
    """For 16-bit inputs, multiply fp32 matrices in TF32, which is more precise than 16-bit matmuls."""
    settings: Any = torch.backends.cuda.matmul
    before = settings.fp32_precision
    if t.is_cuda and t.dtype.itemsize == 2:
        settings.fp32_precision = "tf32"
    try:
        yield
    finally:
        settings.fp32_precision = before


# ---- tests of kernels


def try_segment(title: str, make: Callable[..., tuple[Any, dict[str, Tensor]]], inputs: Any) -> str | None:
    """Compare output, states and gradients of a segment in two documents with a plain one in fp64. Return None, or what
    is wrong, after a warning: only a test shows what this version of Triton compiles correctly for this GPU. `make`
    returns a segment and other gradients of its backward, given inputs, ids and whether it is the plain one."""
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


def _compare_segments(make: Any, inputs: Any) -> str | None:
    draw, device, v = torch.Generator().manual_seed(1), inputs.v_sHV.device, inputs.v_sHV
    state, dstate = torch.randn(2, v.shape[1], inputs.k_sJK.shape[-1], v.shape[-1], generator=draw).to(device)
    dout = torch.randn(v.shape, generator=draw).to(v)
    ids = (torch.arange(len(v) + 1, device=device) > 80).int()
    found: list[dict[str, Tensor]] = []
    for to in (None, torch.float64):
        own = type(inputs)(*(t.to(device, to, copy=True) for t in inputs))
        (segment, others), out = make(own, ids, to is not None), torch.empty_like(own.v_sHV)
        results = {"out": out, "state": segment.forward(state.to(to), out)}
        results["dstate"] = segment.backward(state.to(to), dout.to(to), dstate.to(to))
        grads = {f"d{name.partition('_')[0]}": t for name, t in own._asdict().items()}
        found.append({**results, **grads, **others})
    errors = {name: float((t.double() - found[1][name]).norm() / found[1][name].norm()) for name, t in found[0].items()}
    wrong = [f"{name} by {error:.1e}" for name, error in errors.items() if not error < TRIAL_TOLERANCE]
    return f"is wrong here, off in {', '.join(wrong)}" if wrong else None


# ---- the short convolution before the recurrence


def short_convolution(x_tM: Tensor, weight_MW: Tensor, bias_M: Tensor | None, ids_t: Tensor | None) -> Tensor:
    """Convolve each channel causally over the last W tokens of its document: [t, M] in fp32 or wider.

    `ids_t`: a number per document; None: one document. Tokens before the first count as 0.
    """
    dtype, W = wide(x_tM), weight_MW.shape[1]
    x_tM, weight_MW = x_tM.to(dtype), weight_MW.to(dtype)
    y_tM = x_tM * weight_MW[:, -1]
    for back in range(1, min(W, len(x_tM))):
        earlier_tM = x_tM[:-back] * weight_MW[:, W - 1 - back]
        if ids_t is not None:
            earlier_tM = earlier_tM * (ids_t[back:] == ids_t[:-back])[:, None]
        y_tM = y_tM + F.pad(earlier_tM, (0, 0, back, 0))
    return y_tM if bias_M is None else y_tM + bias_M.to(dtype)
