"""The documents of a recurrence: which states each rank starts from, and which it passes on.

A document starts with S = 0, or in a forest with the state after its parent. A state is named after
its *place*: the number of tokens before it in the sequence. Tokens are cut into *pieces*, at rank
boundaries and where a document continues another that does not end right before it; a piece leads
from the state at its source to the state at its stop. A rank *imports* states at places on earlier
ranks, and *exports* those that later ranks start from.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Piece(NamedTuple):
    """Consecutive tokens of one rank, numbered in the sequence."""

    start: int
    stop: int
    source: int | None  # the place of the state that it starts from; None: 0


class StateGraph:
    """The pieces of all ranks, and the states that they pass on. The same on every rank."""

    def __init__(self, starts: Sequence[int], parents: Sequence[int], num_local: int) -> None:
        """`starts` and `parents`: as in `Docs`. `num_local`: tokens of each rank."""
        self.num_local = num_local
        num_tokens = starts[-1]
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
        self.imports: list[list[int]] = []
        for rank, own in enumerate(self.pieces):
            sources = {piece.source for piece in own if piece.source is not None}
            self.imports.append(sorted(p for p in sources if p <= rank * num_local))
        used = sorted(set(chain.from_iterable(self.imports)))
        self.exports: list[list[int]] = []
        for rank in ranks:
            first = bisect_right(used, rank * num_local)
            self.exports.append(used[first : bisect_right(used, (rank + 1) * num_local)])
        self.num_items = max(map(len, (*self.imports, *self.exports)))  # the maps of each rank
        # per place: the import of its rank that the state depends on
        self.origins: dict[int, int | None] = {}
        for piece in pieces:
            origin = None if self.first_reset(piece) is not None else piece.source
            if origin is not None and origin > piece.start // num_local * num_local:
                origin = self.origins[origin]
            self.origins[piece.stop] = origin

    def first_reset(self, piece: Piece) -> int | None:
        index = bisect_left(self.resets, piece.start)
        if index < len(self.resets) and self.resets[index] < piece.stop:
            return self.resets[index]
        return None

    def tokens_before(self, token: int, count: int) -> list[int]:
        """Return the `count` tokens before a token in its document and its ancestors; -1: none."""
        path: list[int] = []
        while len(path) < count:
            place = self.sources.get(token, token)
            if place is None:
                break
            token = place - 1
            path.append(token)
        return [-1] * (count - len(path)) + path[::-1]


class LocalDocs:
    """The documents of one rank's tokens, and the `halo` tokens before them. Tokens are numbered on
    the rank."""

    def __init__(
        self,
        starts: Sequence[int],
        first: int,
        num_tokens: int,
        halo: int,
        device: torch.device | str,
        parents: Sequence[int] = (),
    ) -> None:
        """`starts`: cumulative starts of the sequence's documents, (0, ..., S). `first`: this
        rank's first token."""
        graph = StateGraph(starts, parents, num_tokens)
        self.graph = graph
        self.first = first
        self.num_tokens = num_tokens
        self.rank = first // num_tokens
        self.halo = halo
        self.pieces = graph.pieces[self.rank]
        self.imports = graph.imports[self.rank]
        self.exports = graph.exports[self.rank]
        stop = first + num_tokens
        self.resets = [start - first for start in graph.resets if first <= start < stop]
        bounds = torch.tensor(self.resets, dtype=torch.long)
        ids = torch.bucketize(torch.arange(-1, num_tokens), bounds, right=True)
        self._ids = ids.to(torch.int32).to(device)
        self._tile_ids: dict[tuple[int, int], Tensor | None] = {}
        self.halos = Halos(graph, self.rank, halo, device)

    def has_reset(self, first: int, stop: int) -> bool:
        index = bisect_left(self.resets, first)
        return index < len(self.resets) and self.resets[index] < stop

    def segment_ids(self, rows: slice) -> Tensor | None:
        """Return a number per document for the token before `rows` and each of its tokens. None:
        all are in one."""
        if not self.has_reset(rows.start, rows.stop):
            return None
        return self._ids[rows.start : rows.stop + 1]

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
    """Where the tokens are that the first token of a rank, and of each document that continues a
    distant one, reads. w tokens of a halo, f halos of this rank."""

    def __init__(self, graph: StateGraph, rank: int, halo: int, device: torch.device | str) -> None:
        s = graph.num_local
        ranks = range(len(graph.pieces))
        starts: list[list[int]] = [[r * s] for r in ranks]
        for start in sorted(graph.forks):
            if start % s:
                starts[start // s].append(start)
        self.starts = [start - rank * s for start in starts[rank]]
        tokens = []  # of the halos of each rank; -1: none
        for of_rank in starts:
            halos = (graph.tokens_before(start, halo) for start in of_rank)
            tokens.append(list(chain.from_iterable(halos)))
        wanted: list[set[int]] = [set() for _ in ranks]  # of each rank, by the others
        for r in ranks:
            for t in tokens[r]:
                if t >= 0 and t // s != r:
                    wanted[t // s].add(t)
        sent = [sorted(of_rank) for of_rank in wanted]
        self.num_slots = len(tokens[rank])
        self.num_sent = max(map(len, sent))
        self.num_returned = max(map(len, tokens))
        rows = {token: q * self.num_sent + i for q in ranks for i, token in enumerate(sent[q])}
        own = []
        received = []
        for slot, t in enumerate(tokens[rank]):
            if t >= 0 and t // s == rank:
                own.append((slot, t - rank * s))
            elif t >= 0:
                received.append((slot, rows[t]))
        # slots of this rank's tokens among those of all ranks, and the tokens
        width = self.num_returned if self.num_sent else 0  # without an exchange, own slots only
        slots = ((r * width + i, t) for r in ranks for i, t in enumerate(tokens[r]))
        read = [(slot, t) for slot, t in slots if t >= 0 and t // s == rank]
        targets = sorted({t for _, t in read})
        places = {t: i for i, t in enumerate(targets)}

        def index(pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
            a, b = torch.tensor(pairs, dtype=torch.long).view(-1, 2).unbind(1)
            return a.to(device), b.to(device)

        def local(tokens: list[int]) -> Tensor:
            return torch.tensor([t - rank * s for t in tokens], dtype=torch.long, device=device)

        self._own = index(own)
        self._sent = local(sent[rank])
        self._received = index(received)
        self._read = index([(slot, places[t]) for slot, t in read])
        self._targets = local(targets)

    def collect(self, x_sD: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the halos, [f * w, D]; zeros before a document's start. `gather` returns the
        tensors of all ranks."""
        halos = x_sD.new_zeros(self.num_slots, x_sD.shape[-1])
        halos[self._own[0]] = x_sD[self._own[1]]
        if self.num_sent:
            sent = x_sD[self._sent]
            received = gather(F.pad(sent, (0, 0, 0, self.num_sent - len(sent)))).flatten(0, 1)
            halos[self._received[0]] = received[self._received[1]]
        return halos

    def collect_backward(
        self, dhalos: Tensor, dx_sD: Tensor, gather: Callable[[Tensor], Tensor]
    ) -> None:
        """Add the gradients of all ranks' halos, summed in fp32 or wider, to those of `dx_sD`."""
        if self.num_sent:
            dhalos = gather(F.pad(dhalos, (0, 0, 0, self.num_returned - len(dhalos)))).flatten(0, 1)
        sums = dx_sD.new_zeros(len(self._targets), dx_sD.shape[-1], dtype=wide(dx_sD))
        sums.index_put_((self._read[1],), dhalos[self._read[0]].to(sums.dtype), accumulate=True)
        dx_sD[self._targets] += sums.to(dx_sD.dtype)


def wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)
