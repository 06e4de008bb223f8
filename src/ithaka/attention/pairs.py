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
squares along a diagonal; never both a block and its pairs. All positions are tokens of the packed sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

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


Span = tuple[int, int]  # first token, tokens


def spans_of(docs: tuple[int, ...]) -> list[Span]:
    """The documents between cumulative starts; empty ones are left out."""
    return [(a, b - a) for a, b in zip(docs, docs[1:], strict=False) if b > a]


def query_major(
    spans: list[Span], *, causal: bool, window: int | None, block_q: int, block_kv: int, halve: bool = False,
    call_tokens: int = 0, knows_windows: bool = False,
) -> Iterator[QueryBlock]:  # fmt: skip
    """Blocks of query rows, ascending. Every row of every document is in exactly one.

    `halve`: cut the squares on the diagonal further (`_halved_squares`). `call_tokens`: how many tokens of equal
    documents one call may take, at least block_q. `knows_windows`: the kernel takes the mask `window`.
    """
    for start, length, run in _runs(spans):
        if knows_windows and window is not None and window < length:
            blocks = [_windowed(a, e, window) for a, e in _cut(0, length, block_q)]
        else:
            blocks = _document(length, causal, window, block_q, block_kv, halve, alone=run == 1)
        # Equal documents side by side, as many as fit into one batched call.
        nested = any(pair.count > 1 for block in blocks for pair in block.pairs)
        batch = 1 if nested else max(1, max(block_q, call_tokens) // length)
        for first in range(0, run, batch):
            count = min(batch, run - first)
            by = start + first * length
            for block in blocks:
                pairs = tuple(replace(p, q0=p.q0 + by, k0=p.k0 + by) for p in block.pairs)
                moved = replace(block, start=block.start + by, pairs=pairs)
                yield replace(moved, count=count, step=length) if count > 1 else moved


def split_ragged(spans: list[Span], *, short: int, block: int) -> tuple[list[Span], list[list[Span]]]:
    """(documents for block pairs, chunks of short unequal documents for a varlen kernel).

    A chunk is at least two neighbours of at most `short` tokens each, `block` tokens together. Equal
    documents stay with the block pairs if a run of them has `short` tokens: there they batch, on a faster kernel.
    """
    blocked: list[Span] = []
    chunks: list[list[Span]] = []
    for start, length, run in _runs(spans):
        documents = [(start + i * length, length) for i in range(run)]
        if length > short or (run > 1 and run * length >= short):
            blocked += documents
            continue
        for first, size in documents:
            last = chunks[-1] if chunks else []
            if last and sum(last[-1]) == first and first + size - last[0][0] <= block:
                last.append((first, size))
            else:
                chunks.append([(first, size)])
    lone = [chunk for chunk in chunks if len(chunk) == 1]
    return sorted(blocked + [chunk[0] for chunk in lone]), [chunk for chunk in chunks if len(chunk) > 1]


def _runs(spans: list[Span]) -> Iterator[tuple[int, int, int]]:
    """(start, length, how many neighbours of that length in a row)."""
    for _, equal in groupby(enumerate(spans), key=lambda item: (item[1][1], item[1][0] - item[0] * item[1][1])):
        run = [span for _, span in equal]
        yield *run[0], len(run)


def _document(
    length: int, causal: bool, window: int | None, block_q: int, block_kv: int, halve: bool, *, alone: bool
) -> list[QueryBlock]:
    """The query blocks of one document that starts at 0; up to `block_q` rows each, `block_kv` keys per pair."""
    windowed = causal and window is not None and window < length
    if length <= min(block_q, block_kv) and not windowed:
        pair = Pair(0, length, 0, length, CAUSAL if causal else FULL)
        return [QueryBlock(0, length, (pair,))]
    if not causal:
        return [QueryBlock(a, e - a, tuple(_full(a, e, 0, length, block_kv))) for a, e in _cut(0, length, block_q)]
    if not windowed:
        return [_causal(a, e, block_kv, halve) for a, e in _cut(0, length, block_q)]
    assert window is not None
    # Rows below `window` see everything before them; only later rows have an edge.
    head = [_causal(a, e, block_kv, False) for a, e in _cut(0, window, block_q)]
    return head + _bands(length, window, block_q, block_kv, batched=alone)


def _windowed(a: int, e: int, window: int) -> QueryBlock:
    oldest = max(0, a - window + 1)
    return QueryBlock(a, e - a, (Pair(a, e - a, oldest, e - oldest, WINDOW),))


def _bands(length: int, window: int, block_q: int, block_kv: int, *, batched: bool) -> list[QueryBlock]:
    """Rows [window, length): a causal square, whole keys between, and an edge square `window` - 1 keys back.

    A band has a power of two of rows, at least half the window, so that keys of neighbouring bands in one batched call
    never overlap (their gradients are added without atomics).
    """
    rows = 1 if window <= 2 else min(1 << ((window - 1).bit_length() - 1), 1 << (block_q.bit_length() - 1))
    full_bands, rest = divmod(length - window, rows)
    batch = max(1, block_q // rows) if batched and rows * 2 >= window - 1 else 1
    blocks = []
    for first in range(0, full_bands, batch):
        start = window + first * rows
        band = _band(start, start + rows, window, block_kv)
        count = min(batch, full_bands - first)
        blocks.append(replace(band, count=count, step=rows) if count > 1 else band)
    if rest:
        blocks.append(_band(length - rest, length, window, block_kv))
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
