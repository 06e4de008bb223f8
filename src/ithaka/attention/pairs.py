"""Which block pairs attention visits, and in what order: plain integers, no torch.

A **pair** is a run of query rows against a run of keys with one of four masks (i and j count from the pair's corner):

    full    every row sees every key
    causal  square, row i sees keys j <= i
    edge    square, row i sees keys j >= i: the far end of a sliding window. Read backwards (last row and last key
            first) it *is* causal, so every kernel with a causal flag can do it.
    window  the last row sees the last `window` keys, each row before it those one further back: all of a sliding
            window at once, for kernels that know windows

A **query block** is a run of query rows and all the pairs in which it meets its keys. `count` > 1 repeats the block (or
pair) `count` times, `step` tokens apart, in one batched kernel call: equal documents, the bands of a window, the
squares along a diagonal; never both a block and its pairs. Keys are counted by their tokens in the packed sequence,
query rows as this rank has them: of all tokens, or of some runs of them.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

FULL, CAUSAL, EDGE, WINDOW = "full", "causal", "edge", "window"


@dataclass(frozen=True, slots=True)
class Pair:
    """Rows [q0, q0 + rows) against keys [k0, k0 + keys); `count` times, every `step` tokens."""

    q0: int
    rows: int
    k0: int
    keys: int
    mask: str
    count: int = 1
    step: int = 0


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """The rows [start, start + length), repeated `count` times every `step` tokens, and their pairs."""

    start: int
    length: int
    pairs: tuple[Pair, ...]
    count: int = 1
    step: int = 0


class Span(NamedTuple):
    """Rows [first, last) of the document [start, start + length); token t of the sequence is row t + shift."""

    start: int
    length: int
    first: int
    last: int
    shift: int

    @property
    def is_whole(self) -> bool:
        return self.last - self.first == self.length


def spans_of(docs: tuple[int, ...], runs: Sequence[tuple[int, int]] | None = None) -> list[Span]:
    """What this rank has of the documents between cumulative starts; nothing of empty ones.

    `runs`: its rows, as (first token, tokens), in order; None: all tokens.
    """
    spans, row = [], 0
    for start, length in runs or [(0, docs[-1])]:
        stop, i = start + length, bisect_right(docs, start) - 1
        while i + 1 < len(docs) and docs[i] < stop:
            a, b = docs[i], docs[i + 1]
            span = Span(a, b - a, max(a, start) - a, min(b, stop) - a, row - start)
            spans += [span] if b > a else []
            i += 1
        row += length
    return spans


def query_major(
    spans: list[Span], *, causal: bool, window: int | None, block_q: int, block_kv: int, halve: bool = False,
    call_tokens: int = 0, knows_windows: bool = False,
) -> Iterator[QueryBlock]:  # fmt: skip
    """Blocks of query rows. Every row of every span is in exactly one.

    `halve`: cut the squares on the diagonal further (`_halved_squares`). `call_tokens`: how many rows of a window, or
    tokens of equal documents, one call may take, at least block_q. `knows_windows`: the kernel takes the mask `window`.
    """
    for equal in _runs(spans):
        (start, length, top, last, shift), run = equal[0], len(equal)
        if knows_windows and window is not None and window < last:
            blocks = [_windowed(a, e, window) for a, e in _cut(top, last, max(block_q, call_tokens))]
        else:
            blocks = _document(equal[0], causal, window, block_q, block_kv, halve, alone=run == 1)
        # Equal documents side by side, as many as fit into one batched call.
        nested = any(pair.count > 1 for block in blocks for pair in block.pairs)
        batch = 1 if nested else max(1, max(block_q, call_tokens) // length)
        for first in range(0, run, batch):
            count = min(batch, run - first)
            by = start + first * length
            for block in blocks:
                pairs = tuple(replace(p, q0=p.q0 + by + shift, k0=p.k0 + by) for p in block.pairs)
                moved = replace(block, start=block.start + by + shift, pairs=pairs)
                yield replace(moved, count=count, step=length) if count > 1 else moved


def split_ragged(spans: list[Span], *, short: int, block: int) -> tuple[list[Span], list[list[Span]]]:
    """(documents for block pairs, chunks of short unequal documents for a varlen kernel).

    A chunk is at least two neighbours of at most `short` tokens each, `block` tokens together, as a whole on this rank.
    Equal documents stay with the block pairs if a run of them has `short` tokens: there they batch, on a faster kernel.
    """
    blocked: list[Span] = []
    chunks: list[list[Span]] = []
    for equal in _runs(spans):
        length, run = equal[0].length, len(equal)
        if length > short or (run > 1 and run * length >= short) or not equal[0].is_whole:
            blocked += equal
            continue
        for span in equal:
            last = chunks[-1] if chunks else []
            near = last and last[-1].start + last[-1].length == span.start and last[-1].shift == span.shift
            if near and span.start + length - last[0].start <= block:
                last.append(span)
            else:
                chunks.append([span])
    lone = [chunk for chunk in chunks if len(chunk) == 1]
    return sorted(blocked + [chunk[0] for chunk in lone]), [chunk for chunk in chunks if len(chunk) > 1]


def _runs(spans: list[Span]) -> Iterator[list[Span]]:
    """Neighbouring documents of one length; a part of a document by itself."""
    numbered = enumerate(spans)
    for _, equal in groupby(numbered, key=lambda item: (item[1].start - item[0] * item[1].length, item[1][1:])):
        yield [span for _, span in equal]


def _document(
    span: Span, causal: bool, window: int | None, block_q: int, block_kv: int, halve: bool, *, alone: bool
) -> list[QueryBlock]:
    """The query blocks of one document, counted from its start; up to `block_q` rows each, `block_kv` keys per pair."""
    length, first, last = span.length, span.first, span.last
    windowed = causal and window is not None and window < last
    if span.is_whole and length <= min(block_q, block_kv) and not windowed:
        pair = Pair(0, length, 0, length, CAUSAL if causal else FULL)
        return [QueryBlock(0, length, (pair,))]
    if not causal:
        return [QueryBlock(a, e - a, tuple(_full(a, e, 0, length, block_kv))) for a, e in _cut(first, last, block_q)]
    if not windowed:
        return [_causal(a, e, block_kv, halve) for a, e in _cut(first, last, block_q)]
    assert window is not None
    # Rows below `window` see everything before them; only later rows have an edge.
    head = [_causal(a, e, block_kv, False) for a, e in _cut(first, window, block_q)]
    return head + _bands(max(first, window), last, window, block_q, block_kv, batched=alone)


def _windowed(a: int, e: int, window: int) -> QueryBlock:
    oldest = max(0, a - window + 1)
    return QueryBlock(a, e - a, (Pair(a, e - a, oldest, e - oldest, WINDOW),))


def _bands(first: int, last: int, window: int, block_q: int, block_kv: int, *, batched: bool) -> list[QueryBlock]:
    """Rows [first, last), first >= window: a causal square, whole keys between, an edge square `window` - 1 keys back.

    A band has a power of two of rows, at least half the window, so that keys of neighbouring bands in one batched call
    never overlap (their gradients are added without atomics).
    """
    rows = 1 if window <= 2 else min(1 << ((window - 1).bit_length() - 1), 1 << (block_q.bit_length() - 1))
    full_bands, rest = divmod(last - first, rows)
    batch = max(1, block_q // rows) if batched and rows * 2 >= window - 1 else 1
    blocks = []
    for number in range(0, full_bands, batch):
        start = first + number * rows
        band = _band(start, start + rows, window, block_kv)
        count = min(batch, full_bands - number)
        blocks.append(replace(band, count=count, step=rows) if count > 1 else band)
    if rest:
        blocks.append(_band(last - rest, last, window, block_kv))
    return blocks


def _band(a: int, e: int, window: int, block_kv: int) -> QueryBlock:
    """Rows [a, e), e - a < window (or one row): row i sees keys (i - window, i]."""
    rows, oldest = e - a, a - window + 1
    edge = [Pair(a, rows, oldest, rows, EDGE)] if window > 1 else []
    return QueryBlock(a, rows, (*edge, *_full(a, e, oldest + rows, a, block_kv), *_squares(a, e, block_kv)))


def _causal(a: int, e: int, block_kv: int, halve: bool) -> QueryBlock:
    size = min(e - a, block_kv)
    halve = halve and (e - a) % size == 0
    diagonal = _halved_squares(a, e, size, block_kv // 8) if halve else _squares(a, e, block_kv)
    return QueryBlock(a, e - a, (*_full(a, e, 0, a, block_kv), *diagonal))


def _squares(a: int, e: int, size: int) -> list[Pair]:
    """Rows [a, e) against their own keys: causal squares along the diagonal, full rectangles below them."""
    pairs = []
    for c, d in _cut(a, e, size):
        pairs.append(Pair(c, d - c, c, d - c, CAUSAL))
        if d < e:
            pairs.append(Pair(d, e - d, c, d - c, FULL))
    return pairs


def _halved_squares(a: int, e: int, size: int, least: int) -> list[Pair]:
    """As `_squares`, with each causal square halved again and again, so that more of the work is in full rectangles.

    Forward kernels are slower on a large triangle, whose rows differ much in length, than on a rectangle and two small
    triangles; backward kernels are not. All rectangles of one size are one batched call, and so are the triangles.
    """
    pairs = [pair for pair in _squares(a, e, size) if pair.mask == FULL]
    while size % 2 == 0 and size > max(1, least):
        half, count = size // 2, (e - a) // size
        pairs.append(Pair(a + half, half, a, half, FULL, count, size if count > 1 else 0))
        size = half
    count = (e - a) // size
    return [*pairs, Pair(a, size, a, size, CAUSAL, count, size if count > 1 else 0)]


def _full(a: int, e: int, k_start: int, k_stop: int, block_kv: int) -> list[Pair]:
    return [Pair(a, e - a, c, d - c, FULL) for c, d in _cut(k_start, k_stop, block_kv)]


def _cut(start: int, stop: int, block: int) -> Iterator[tuple[int, int]]:
    for a in range(start, stop, block):
        yield a, min(a + block, stop)
