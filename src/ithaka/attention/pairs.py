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
squares along a diagonal; never both a block and its pairs. Query rows are counted as this rank has them: of all tokens,
or of some runs of them; keys by their tokens in the packed sequence, until `by_part` says where they lie.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
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


class KeySpan(NamedTuple):
    """Rows [first, last) of the document [start, start + length); token t of the sequence is row t + shift."""

    start: int
    length: int
    first: int
    last: int
    shift: int

    @property
    def is_whole(self) -> bool:
        return self.last - self.first == self.length


def spans_of(docs: tuple[int, ...], runs: Sequence[tuple[int, int]] | None = None) -> list[KeySpan]:
    """What this rank has of the documents between cumulative starts; nothing of empty ones.

    `runs`: its rows, as (first token, tokens), in order; None: all tokens.
    """
    spans, row = [], 0
    for start, length in runs or [(0, docs[-1])]:
        stop, i = start + length, bisect_right(docs, start) - 1
        while i + 1 < len(docs) and docs[i] < stop:
            a, b = docs[i], docs[i + 1]
            span = KeySpan(a, b - a, max(a, start) - a, min(b, stop) - a, row - start)
            spans += [span] if b > a else []
            i += 1
        row += length
    return spans


def seen(spans: Iterable[KeySpan], causal: bool, window: int | None) -> list[tuple[int, int]]:
    """The keys that rows of parts of documents see, as (first token, tokens), ascending; also this rank's own."""
    runs: list[tuple[int, int]] = []
    for start, length, first, last, _ in sorted(span for span in spans if not span.is_whole):
        low = start + (max(0, first - window + 1) if causal and window else 0)
        high = start + (last if causal else length)
        if runs and low < sum(runs[-1]):  # of the same document, whose later rows see further
            low = runs.pop()[0]
        runs.append((low, high - low))
    return runs


class KeyRange(NamedTuple):
    """Tokens [first, first + tokens) as keys: token t is row t + shift of part `part`."""

    first: int
    tokens: int
    part: int
    shift: int


def by_part(blocks: Iterable[QueryBlock], runs: Sequence[KeyRange], num_parts: int) -> list[list[QueryBlock]]:
    """The blocks of each part of the keys, which hold all that the blocks see. `runs` ascend."""
    firsts = [run.first for run in runs]
    parts: list[list[QueryBlock]] = [[] for _ in range(num_parts)]

    def run_at(token: int) -> int:
        return bisect_right(firsts, token) - 1

    for block in blocks:
        low = min(pair.k0 for pair in block.pairs)
        high = max(pair.k0 + pair.keys for pair in block.pairs) + (block.count - 1) * block.step
        run = runs[run_at(low)]
        if block.count > 1 and high <= run.first + run.tokens:
            moved = tuple(replace(pair, k0=pair.k0 + run.shift) for pair in block.pairs)
            parts[run.part].append(replace(block, pairs=moved))
            continue
        for by in range(0, block.count * (block.step or 1), block.step or 1):
            pairs = defaultdict(list)
            for pair in (replace(pair, q0=pair.q0 + by, k0=pair.k0 + by) for pair in block.pairs):
                run = runs[run_at(pair.k0)]
                if pair.k0 + pair.keys + (pair.count - 1) * pair.step <= run.first + run.tokens:
                    pairs[run.part].append(replace(pair, k0=pair.k0 + run.shift))
                    continue
                for more in range(0, pair.count * (pair.step or 1), pair.step or 1):
                    one = replace(pair, q0=pair.q0 + more, k0=pair.k0 + more, count=1, step=0)
                    for run in runs[run_at(one.k0) : run_at(one.k0 + one.keys - 1) + 1]:
                        pairs[run.part] += _of_run(one, run)
            for part, of_part in pairs.items():
                parts[part].append(QueryBlock(block.start + by, block.length, tuple(of_part)))
    return parts


def _of_run(pair: Pair, run: KeyRange) -> Iterator[Pair]:
    """What a pair has of a run's keys. Of a square: a smaller one on its diagonal, and the rows that see all of it."""
    c, d = max(0, run.first - pair.k0), min(pair.keys, run.first + run.tokens - pair.k0)
    k0, keys = pair.k0 + c + run.shift, d - c
    if pair.mask == FULL:
        yield Pair(pair.q0, pair.rows, k0, keys, FULL)
        return
    assert pair.mask in (CAUSAL, EDGE)
    yield Pair(pair.q0 + c, keys, k0, keys, pair.mask)
    first, last = (d, pair.rows) if pair.mask == CAUSAL else (0, c)
    if first < last:
        yield Pair(pair.q0 + first, last - first, k0, keys, FULL)


def query_major(
    spans: list[KeySpan], *, causal: bool, window: int | None, block_q: int, block_kv: int, halve: bool = False,
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


Range = tuple[int, int, int, int]  # rows [a, b) see keys [c, d)


def in_ranges(ranges: Sequence[Range], num_rows: int, block_q: int, block_kv: int) -> list[QueryBlock]:
    """Blocks of rows that see ranges of keys, all of them in full; a row in no range is in a block without pairs."""
    cuts = sorted({0, num_rows, *(row for a, b, _, _ in ranges for row in (a, b))})
    blocks = []
    for low, high in zip(cuts, cuts[1:], strict=False):
        keys = sorted((c, d) for a, b, c, d in ranges if a <= low and high <= b)
        for a, e in _cut(low, high, block_q):
            pairs = (pair for c, d in keys for pair in _full(a, e, c, d, block_kv))
            blocks.append(QueryBlock(a, e - a, tuple(pairs)))
    return blocks


def split_ragged(spans: list[KeySpan], *, short: int, block: int) -> tuple[list[KeySpan], list[list[KeySpan]]]:
    """(documents for block pairs, chunks of short unequal documents for a varlen kernel).

    A chunk is at least two neighbours of at most `short` tokens each, `block` tokens together, as a whole on this rank.
    Equal documents stay with the block pairs if a run of them has `short` tokens: there they batch, on a faster kernel.
    """
    blocked: list[KeySpan] = []
    chunks: list[list[KeySpan]] = []
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


def _runs(spans: list[KeySpan]) -> Iterator[list[KeySpan]]:
    """Neighbouring documents of one length; a part of a document by itself."""
    numbered = enumerate(spans)
    for _, equal in groupby(numbered, key=lambda item: (item[1].start - item[0] * item[1].length, item[1][1:])):
        yield [span for _, span in equal]


def _document(
    span: KeySpan, causal: bool, window: int | None, block_q: int, block_kv: int, halve: bool, *, alone: bool
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
