"""Which block pairs attention visits, and in what order: plain integers, no torch.

A **pair** is a run of query rows against a run of keys with one of three masks (i, j count from the pair's
own corner):

    full    every row sees every key
    causal  square, row i sees keys j <= i
    edge    square, row i sees keys j >= i: the far end of a sliding window. Read backwards (last row first,
            last key first) it *is* causal, so every kernel with a causal flag can do it.

A **group** is one run of query rows, and all the pairs in which it meets its keys. `count` > 1 is the
same group (or pair) again, `count` times, each `step` tokens further on, as one batched kernel call: equal
documents, the blocks of a window, the squares along a diagonal; never both a group and its pairs. All
positions are tokens of the packed sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

FULL, CAUSAL, EDGE = "full", "causal", "edge"


@dataclass(frozen=True, slots=True)
class Pair:
    """rows [q0, q0 + rows) against keys [k0, k0 + keys); `count` times, every `step` tokens."""

    q0: int
    rows: int
    k0: int
    keys: int
    mask: str
    count: int = 1
    step: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """The rows [start, start + length), repeated `count` times every `step` tokens, and its pairs."""

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
    spans: list[Span], *, causal: bool, window: int | None, block_q: int, block_kv: int, halve: bool = False
) -> Iterator[Group]:
    """Groups of query rows, ascending. Every row of every document is in exactly one.

    `halve`: cut the squares on the diagonal further (`_halved_squares`).
    """
    for start, length, run in _runs(spans):
        groups = _document(length, causal, window, block_q, block_kv, halve, alone=run == 1)
        yield from _repeat(groups, start, length, run, block_q)


def split_ragged(spans: list[Span], *, short: int, block: int) -> tuple[list[Span], list[list[Span]]]:
    """(documents for block pairs, chunks of short unequal documents for a varlen kernel).

    A chunk is at least two neighbours of at most `short` tokens each, `block` tokens together. Equal
    documents stay with the block pairs when a run of them has `short` tokens: they batch there, on a faster
    kernel.
    """
    blocked: list[Span] = []
    chunks: list[list[Span]] = []
    for start, length, run in _runs(spans):
        documents = [(start + i * length, length) for i in range(run)]
        if length > short or (run > 1 and run * length >= short):
            blocked += documents
        else:
            _append(chunks, documents, block)
    lone = [chunk for chunk in chunks if len(chunk) == 1]
    return sorted(blocked + [chunk[0] for chunk in lone]), [chunk for chunk in chunks if len(chunk) > 1]


def _append(chunks: list[list[Span]], documents: list[Span], block: int) -> None:
    for start, length in documents:
        last = chunks[-1] if chunks else []
        if last and sum(last[-1]) == start and start + length - last[0][0] <= block:
            last.append((start, length))
        else:
            chunks.append([(start, length)])


def _runs(spans: list[Span]) -> Iterator[tuple[int, int, int]]:
    """(start, length, how many neighbours of that length in a row)."""
    for _, equal in groupby(enumerate(spans), key=lambda item: (item[1][1], item[1][0] - item[0] * item[1][1])):
        run = [span for _, span in equal]
        yield *run[0], len(run)


def _repeat(groups: list[Group], start: int, length: int, run: int, block: int) -> Iterator[Group]:
    """Equal documents side by side, as many per batched call as one block has tokens."""
    nested = any(pair.count > 1 for group in groups for pair in group.pairs)
    batch = 1 if nested else max(1, block // length)
    for first in range(0, run, batch):
        count = min(batch, run - first)
        for group in groups:
            moved = _shift(group, start + first * length)
            yield replace(moved, count=count, step=length) if count > 1 else moved


def _document(
    length: int, causal: bool, window: int | None, block: int, other: int, halve: bool, *, alone: bool
) -> list[Group]:
    """Query-major groups of one document that starts at 0; `block` rows per group, `other` keys per pair."""
    windowed = causal and window is not None and window < length
    if length <= min(block, other) and not windowed:
        pair = Pair(0, length, 0, length, CAUSAL if causal else FULL)
        return [Group(0, length, (pair,))]
    if not causal:
        return [_group(a, e, _full(a, e, 0, length, other)) for a, e in _cut(0, length, block)]
    if not windowed:
        return [_causal(a, e, other, halve) for a, e in _cut(0, length, block)]
    assert window is not None
    # Rows below `window` see everything before them; only the rows after that have an edge.
    head = [_causal(a, e, other, False) for a, e in _cut(0, window, block)]
    return head + _bands(length, window, block, other, batched=alone)


def _bands(length: int, window: int, block: int, other: int, *, batched: bool) -> list[Group]:
    """Rows [window, length): a causal square, whole keys between, and an edge square `window` - 1 keys back.

    The band's rows are a power of two of at least half the window, so that the keys of neighbouring bands in
    one batched call never overlap (their gradients are added without atomics).
    """
    rows = 1 if window <= 2 else min(1 << ((window - 1).bit_length() - 1), 1 << (block.bit_length() - 1))
    full_bands, rest = divmod(length - window, rows)
    batch = max(1, block // rows) if batched and rows * 2 >= window - 1 else 1
    groups = []
    for first in range(0, full_bands, batch):
        start = window + first * rows
        group = _band(start, start + rows, window, other)
        count = min(batch, full_bands - first)
        groups.append(replace(group, count=count, step=rows) if count > 1 else group)
    if rest:
        groups.append(_band(length - rest, length, window, other))
    return groups


def _band(a: int, e: int, window: int, other: int) -> Group:
    """Rows [a, e), e - a < window (or one row): row i sees keys (i - window, i]."""
    rows, oldest = e - a, a - window + 1
    if window == 1:
        return _group(a, e, _squares(a, e, other))
    edge = [Pair(a, rows, oldest, rows, EDGE)]
    return _group(a, e, edge + _full(a, e, oldest + rows, a, other) + _squares(a, e, other))


def _causal(a: int, e: int, other: int, halve: bool) -> Group:
    size = min(e - a, other)
    halve = halve and (e - a) % size == 0
    diagonal = _halved_squares(a, e, size, other // 8) if halve else _squares(a, e, other)
    return _group(a, e, _full(a, e, 0, a, other) + diagonal)


def _squares(a: int, e: int, size: int) -> list[Pair]:
    """Rows [a, e) against their own keys: causal squares along the diagonal, full rectangles below them."""
    pairs = []
    for c, d in _cut(a, e, size):
        pairs.append(Pair(c, d - c, c, d - c, CAUSAL))
        if d < e:
            pairs.append(Pair(d, e - d, c, d - c, FULL))
    return pairs


def _halved_squares(a: int, e: int, size: int, least: int) -> list[Pair]:
    """As `_squares`, with each causal square halved again and again: more of the work in full rectangles.

    Forward kernels are slower on a large triangle, whose rows are of very different length, than on a
    rectangle and two small triangles (backward kernels are not). All rectangles of one size are one batched
    call, and so are the triangles.
    """
    pairs = [pair for pair in _squares(a, e, size) if pair.mask == FULL]
    while size % 2 == 0 and size > max(1, least):
        half, count = size // 2, (e - a) // size
        pairs.append(Pair(a + half, half, a, half, FULL, count, size if count > 1 else 0))
        size = half
    count = (e - a) // size
    return [*pairs, Pair(a, size, a, size, CAUSAL, count, size if count > 1 else 0)]


def _full(a: int, e: int, k_start: int, k_stop: int, other: int) -> list[Pair]:
    return [Pair(a, e - a, c, d - c, FULL) for c, d in _cut(k_start, k_stop, other)]


def _group(a: int, e: int, pairs: list[Pair]) -> Group:
    return Group(a, e - a, tuple(pairs))


def _cut(start: int, stop: int, block: int) -> Iterator[tuple[int, int]]:
    for a in range(start, stop, block):
        yield a, min(a + block, stop)


def _shift(group: Group, by: int) -> Group:
    pairs = tuple(replace(p, q0=p.q0 + by, k0=p.k0 + by) for p in group.pairs)
    return replace(group, start=group.start + by, pairs=pairs)
