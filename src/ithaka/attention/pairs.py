"""The schedule of block pairs that attention computes, in plain integers, without torch.

A **pair** is a range of query rows and a range of keys with one of five masks (i and j count from the pair's corner):

    full    every row attends to every key
    causal  square, row i attends to keys j <= i
    edge    square, row i attends to keys j >= i: the far end of a sliding window. With rows and keys reversed it is
            causal, so every kernel with a causal flag can compute it.
    window  the last row attends to the last `window` keys, and each earlier row to keys one further back: a complete
            sliding window, for kernels that support windows
    squares adjacent causal squares of `lengths` along the diagonal, for kernels that take short documents

A **query block** is a range of query rows and all its pairs. `count` > 1 repeats the block (or pair) `count` times,
`step` tokens apart, in one batched kernel call: documents of equal length, the bands of a window, the squares along a
diagonal. A block and its pairs are never both repeated. Query rows are numbered within this rank's rows; keys by their
token in the packed sequence, until `split_by_part` maps them to rows of k and v.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

FULL, CAUSAL, EDGE, WINDOW, SQUARES = "full", "causal", "edge", "window", "squares"


@dataclass(frozen=True, slots=True)
class Pair:
    """Rows [q0, q0 + rows) and keys [k0, k0 + keys), repeated `count` times every `step` tokens."""

    q0: int
    rows: int
    k0: int
    keys: int
    mask: str
    count: int = 1
    step: int = 0
    lengths: tuple[int, ...] = ()  # lengths of the documents in `squares`


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """The rows [start, start + length), repeated `count` times every `step` tokens, and their pairs."""

    start: int
    length: int
    pairs: tuple[Pair, ...]
    count: int = 1
    step: int = 0


class DocumentSpan(NamedTuple):
    """Rows [first, last) of the document [start, start + length); token t of the sequence is row t + shift."""

    start: int
    length: int
    first: int
    last: int
    shift: int

    @property
    def is_complete(self) -> bool:
        return self.last - self.first == self.length


def document_spans(docs: tuple[int, ...], runs: Sequence[tuple[int, int]] | None = None) -> list[DocumentSpan]:
    """Return this rank's part of each document. `docs` are cumulative starts; empty documents are skipped.

    `runs`: this rank's rows as (first token, number of tokens), in order; None: all tokens.
    """
    spans, row = [], 0
    for start, length in runs or [(0, docs[-1])]:
        stop, i = start + length, bisect_right(docs, start) - 1
        while i + 1 < len(docs) and docs[i] < stop:
            a, b = docs[i], docs[i + 1]
            span = DocumentSpan(a, b - a, max(a, start) - a, min(b, stop) - a, row - start)
            spans += [span] if b > a else []
            i += 1
        row += length
    return spans


def visible_keys(spans: Iterable[DocumentSpan], causal: bool, window: int | None) -> list[tuple[int, int]]:
    """Return the keys that rows of incomplete documents attend to, as ascending (first token, number of tokens).
    Includes this rank's own keys."""
    runs: list[tuple[int, int]] = []
    for start, length, first, last, _ in sorted(span for span in spans if not span.is_complete):
        low = start + (max(0, first - window + 1) if causal and window else 0)
        high = start + (last if causal else length)
        if runs and low < sum(runs[-1]):  # same document: merge
            low = runs.pop()[0]
        runs.append((low, high - low))
    return runs


class KeyRange(NamedTuple):
    """Tokens [first, first + tokens) as keys: token t is row t + shift of part `part`."""

    first: int
    tokens: int
    part: int
    shift: int


def split_by_part(
    blocks: Iterable[QueryBlock], runs: Sequence[KeyRange], num_parts: int, block_kv: int
) -> list[list[QueryBlock]]:
    """Split blocks by the part that holds their keys. `runs` ascend and cover all keys of the blocks. Rectangles that
    are adjacent in a part are joined and cut again into pairs of about `block_kv` keys: for the few keys that a
    boundary between parts cuts off, a kernel takes as long as for thousands."""
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
        for offset in range(0, block.count * (block.step or 1), block.step or 1):
            pairs = defaultdict(list)
            for pair in (replace(pair, q0=pair.q0 + offset, k0=pair.k0 + offset) for pair in block.pairs):
                run = runs[run_at(pair.k0)]
                if pair.k0 + pair.keys + (pair.count - 1) * pair.step <= run.first + run.tokens:
                    pairs[run.part].append(replace(pair, k0=pair.k0 + run.shift))
                    continue
                for repeat in range(0, pair.count * (pair.step or 1), pair.step or 1):
                    one = replace(pair, q0=pair.q0 + repeat, k0=pair.k0 + repeat, count=1, step=0)
                    for run in runs[run_at(one.k0) : run_at(one.k0 + one.keys - 1) + 1]:
                        pairs[run.part] += _clip_to_range(one, run)
            for part, part_pairs in pairs.items():
                recut = tuple(_recut_rectangles(part_pairs, block_kv))
                parts[part].append(QueryBlock(block.start + offset, block.length, recut))
    return parts


def _recut_rectangles(pairs: list[Pair], block_kv: int) -> Iterator[Pair]:
    """Join full pairs of the same rows and adjacent keys, and cut them into equal pairs."""
    joined: list[Pair] = []
    for pair in pairs:
        last = joined[-1] if joined else replace(pair, rows=0)
        if pair.mask == FULL and pair.count == 1 and last == replace(pair, k0=pair.k0 - last.keys, keys=last.keys):
            joined[-1] = replace(last, keys=last.keys + pair.keys)
        else:
            joined.append(pair)
    for pair in joined:
        # Up to a quarter more keys than block_kv.
        num_pairs = max(1, -(-4 * pair.keys // (5 * block_kv))) if pair.mask == FULL and pair.count == 1 else 1
        for i in range(num_pairs):
            a, b = i * pair.keys // num_pairs, (i + 1) * pair.keys // num_pairs
            yield replace(pair, k0=pair.k0 + a, keys=b - a)


def _clip_to_range(pair: Pair, run: KeyRange) -> Iterator[Pair]:
    """Restrict a pair to the keys of a run. A square becomes a smaller square and a rectangle of the rows that attend
    to all of these keys."""
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


def plan_query_blocks(
    spans: list[DocumentSpan], *, causal: bool, window: int | None, block_q: int, block_kv: int, halve: bool = False,
    call_tokens: int = 0, has_windows: bool = False,
) -> Iterator[QueryBlock]:  # fmt: skip
    """Yield blocks of query rows. Every row of every span is in exactly one block.

    `halve`: split the squares on the diagonal (`_halved_causal_pairs`). `call_tokens`: the most rows of a window, or
    tokens of equal documents, in one call, if above block_q. `has_windows`: the kernel supports the mask `window`.
    """
    for equal in _group_equal_documents(spans):
        (start, length, top, last, shift), run = equal[0], len(equal)
        if has_windows and window is not None and window < last:
            blocks = [_window_block(a, e, window) for a, e in _split_range(top, last, max(block_q, call_tokens))]
        else:
            blocks = _plan_document(equal[0], causal, window, block_q, block_kv, halve, batch_bands=run == 1)
        # As many documents of equal length as fit into one batched call.
        nested = any(pair.count > 1 for block in blocks for pair in block.pairs)
        batch = 1 if nested else max(1, max(block_q, call_tokens) // length)
        for first in range(0, run, batch):
            count = min(batch, run - first)
            offset = start + first * length
            for block in blocks:
                pairs = tuple(replace(p, q0=p.q0 + offset + shift, k0=p.k0 + offset) for p in block.pairs)
                moved = replace(block, start=block.start + offset + shift, pairs=pairs)
                yield replace(moved, count=count, step=length) if count > 1 else moved


# --- forests: documents that continue others ----------------------------------------------------------------


class Branch(NamedTuple):
    """Tokens [start, stop), causal among themselves, that also attend to all keys [first, last) of `path`, the tokens
    before them from the root on. A node and a child that follows it in the sequence are one branch."""

    start: int
    stop: int
    path: tuple[tuple[int, int], ...] = ()

    @property
    def depth(self) -> int:
        """Tokens before this branch."""
        return sum(last - first for first, last in self.path)


def forest_branches(starts: Sequence[int], parents: Sequence[int]) -> list[Branch]:
    """Return the branches of a forest. `parents`: the index of each document's parent, an earlier one, or -1."""
    branches: list[Branch] = []
    branch_of: list[int] = []
    for node, parent in enumerate(parents):
        start, stop = starts[node], starts[node + 1]
        if parent >= 0 and starts[parent + 1] == start and branch_of[parent] == len(branches) - 1:
            branches[-1] = branches[-1]._replace(stop=stop)
        elif parent >= 0:
            trunk = branches[branch_of[parent]]
            last = (trunk.start, starts[parent + 1])
            branches.append(Branch(start, stop, (*trunk.path, last) if last[0] < last[1] else trunk.path))
        else:
            branches.append(Branch(start, stop))
        branch_of.append(len(branches) - 1)
    return [branch for branch in branches if branch.start < branch.stop]


def plan_branch_blocks(
    branches: Sequence[Branch], max_rows: int, short: int = 0, *, window: int | None, **options: Any
) -> list[QueryBlock]:
    """Return the blocks of all branches with a path. `options`: as for `plan_query_blocks`; `short`: the longest square
    in a pair of `squares`.

    Without a window, all rows that attend to a key do so in one pair per block of `max_rows`, even if they belong to
    several branches: a kernel then sums the key's gradient over them.
    """
    inner = [branch for branch in branches if branch.path]
    if window is not None and any(window < branch.depth + branch.stop - branch.start for branch in inner):
        return [block for branch in inner for block in _plan_windowed_branch(branch, window, options)]
    blocks, block_kv, ranges = [], options["block_kv"], _shared_ranges(inner)
    for low, high in _merge_ranges((branch.start, branch.stop) for branch in inner):
        num_blocks = -(-(high - low) // min(max_rows, options["block_q"]))
        for a, e in _split_range(low, high, -(-(high - low) // num_blocks)):
            pairs = [
                pair
                for row, stop, first, last in ranges
                if row < e and a < stop
                for pair in _full_pairs(max(a, row), min(e, stop), first, last, block_kv)
            ]
            for branch in inner:
                if branch.start < e and a < branch.stop:
                    own = max(a, branch.start), min(e, branch.stop)
                    pairs += _full_pairs(*own, branch.start, own[0], block_kv) + _causal_pairs(*own, block_kv)
            squares = [pair for pair in pairs if pair.mask == CAUSAL]
            pairs = [pair for pair in pairs if pair.mask == FULL]
            blocks.append(QueryBlock(a, e - a, (*pairs, *_batch_squares(squares, short))))
    return blocks


def _plan_windowed_branch(branch: Branch, window: int, options: dict[str, Any]) -> list[QueryBlock]:
    """Plan a branch as the end of a document, its path and itself, whose keys lie in several ranges."""
    keys, depth = [], 0
    for first, last in (*branch.path, branch[:2]):
        keys.append(KeyRange(depth, last - first, 0, first - depth))
        depth += last - first
    span = DocumentSpan(0, depth, branch.depth, depth, branch.start - branch.depth)
    blocks = plan_query_blocks([span], window=window, **options | {"has_windows": False})
    return split_by_part(blocks, keys, 1, options["block_kv"])[0]


def _shared_ranges(branches: Sequence[Branch]) -> "list[MaskRange]":
    """Return rows and the keys on their paths: each key once, unless the rows that attend to it are not consecutive."""
    readers = defaultdict(list)
    for branch in branches:
        for first, last in branch.path:
            readers[first].append((last, branch.start, branch.stop))
    ranges = []
    for first, rows in readers.items():
        for last in sorted({last for last, _, _ in rows}):
            for a, b in _merge_ranges((start, stop) for reach, start, stop in rows if reach >= last):
                ranges.append((a, b, first, last))
            first = last
    return ranges


def _merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent ranges, which must ascend."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return merged


def _batch_squares(squares: list[Pair], short: int) -> Iterator[Pair]:
    """Batch causal squares, which are adjacent: those of equal branches, then short ones of any length."""
    equal = []
    for rows, group in groupby(squares, key=lambda pair: pair.rows):
        first, *others = group
        equal.append(replace(first, count=1 + len(others), step=rows) if others else first)
    for is_short, group in groupby(equal, key=lambda pair: pair.rows <= short):
        first, *others = group
        if is_short and others:
            lengths = tuple(pair.rows for pair in (first, *others) for _ in range(pair.count))
            yield Pair(first.q0, sum(lengths), first.k0, sum(lengths), SQUARES, lengths=lengths)
        else:
            yield from (first, *others)


MaskRange = tuple[int, int, int, int]  # rows [a, b) attend to keys [c, d)


def plan_range_blocks(ranges: Sequence[MaskRange], num_rows: int, block_q: int, block_kv: int) -> list[QueryBlock]:
    """Return the blocks of a block mask. A row in no range is in a block without pairs."""
    cuts = sorted({0, num_rows, *(row for a, b, _, _ in ranges for row in (a, b))})
    blocks = []
    for low, high in zip(cuts, cuts[1:], strict=False):
        keys = sorted((c, d) for a, b, c, d in ranges if a <= low and high <= b)
        for a, e in _split_range(low, high, block_q):
            pairs = (pair for c, d in keys for pair in _full_pairs(a, e, c, d, block_kv))
            blocks.append(QueryBlock(a, e - a, tuple(pairs)))
    return blocks


def split_short_documents(
    spans: list[DocumentSpan], *, short: int, block: int
) -> tuple[list[DocumentSpan], list[list[DocumentSpan]]]:
    """Return (documents for block pairs, chunks of short unequal documents for a varlen kernel).

    A chunk has at least two consecutive documents, complete on this rank, of at most `short` tokens each and `block`
    tokens together. Equal documents of `short` tokens in total use block pairs: batched, on a faster kernel.
    """
    blocked: list[DocumentSpan] = []
    chunks: list[list[DocumentSpan]] = []
    for equal in _group_equal_documents(spans):
        length, run = equal[0].length, len(equal)
        if length > short or (run > 1 and run * length >= short) or not equal[0].is_complete:
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


def _group_equal_documents(spans: list[DocumentSpan]) -> Iterator[list[DocumentSpan]]:
    """Group consecutive documents of equal length. An incomplete document forms its own group."""
    numbered = enumerate(spans)
    for _, equal in groupby(numbered, key=lambda item: (item[1].start - item[0] * item[1].length, item[1][1:])):
        yield [span for _, span in equal]


def _plan_document(
    span: DocumentSpan, causal: bool, window: int | None, block_q: int, block_kv: int, halve: bool, *, batch_bands: bool
) -> list[QueryBlock]:
    """Return the query blocks of a document, relative to its start: up to `block_q` rows, `block_kv` keys per pair."""
    length, first, last = span.length, span.first, span.last
    windowed = causal and window is not None and window < last
    if span.is_complete and length <= min(block_q, block_kv) and not windowed:
        pair = Pair(0, length, 0, length, CAUSAL if causal else FULL)
        return [QueryBlock(0, length, (pair,))]
    if not causal:
        return [
            QueryBlock(a, e - a, tuple(_full_pairs(a, e, 0, length, block_kv)))
            for a, e in _split_range(first, last, block_q)
        ]
    if not windowed:
        return [_causal_block(a, e, block_kv, halve) for a, e in _split_range(first, last, block_q)]
    assert window is not None
    # Rows below `window` attend to all earlier keys; only later rows have an edge.
    head = [_causal_block(a, e, block_kv, False) for a, e in _split_range(first, window, block_q)]
    return head + _plan_bands(max(first, window), last, window, block_q, block_kv, batched=batch_bands)


def _window_block(a: int, e: int, window: int) -> QueryBlock:
    oldest = max(0, a - window + 1)
    return QueryBlock(a, e - a, (Pair(a, e - a, oldest, e - oldest, WINDOW),))


def _plan_bands(first: int, last: int, window: int, block_q: int, block_kv: int, *, batched: bool) -> list[QueryBlock]:
    """Rows [first, last), first >= window: a causal square, full pairs, and an edge square `window` - 1 keys back.

    The rows of a band are a power of two, at least half the window, so that the keys of bands in one batched call
    do not overlap: their gradients are added without atomics.
    """
    rows = 1 if window <= 2 else min(1 << ((window - 1).bit_length() - 1), 1 << (block_q.bit_length() - 1))
    full_bands, rest = divmod(last - first, rows)
    batch = max(1, block_q // rows) if batched and rows * 2 >= window - 1 else 1
    blocks = []
    for number in range(0, full_bands, batch):
        start = first + number * rows
        band = _band_block(start, start + rows, window, block_kv)
        count = min(batch, full_bands - number)
        blocks.append(replace(band, count=count, step=rows) if count > 1 else band)
    if rest:
        blocks.append(_band_block(last - rest, last, window, block_kv))
    return blocks


def _band_block(a: int, e: int, window: int, block_kv: int) -> QueryBlock:
    """Rows [a, e), e - a < window (or one row): row i attends to keys (i - window, i]."""
    rows, oldest = e - a, a - window + 1
    edge = [Pair(a, rows, oldest, rows, EDGE)] if window > 1 else []
    return QueryBlock(a, rows, (*edge, *_full_pairs(a, e, oldest + rows, a, block_kv), *_causal_pairs(a, e, block_kv)))


def _causal_block(a: int, e: int, block_kv: int, halve: bool) -> QueryBlock:
    size = min(e - a, block_kv)
    halve = halve and (e - a) % size == 0
    diagonal = _halved_causal_pairs(a, e, size, block_kv // 8) if halve else _causal_pairs(a, e, block_kv)
    return QueryBlock(a, e - a, (*_full_pairs(a, e, 0, a, block_kv), *diagonal))


def _causal_pairs(a: int, e: int, size: int) -> list[Pair]:
    """Rows [a, e) and keys [a, e): causal squares along the diagonal, full rectangles below them."""
    pairs = []
    for c, d in _split_range(a, e, size):
        pairs.append(Pair(c, d - c, c, d - c, CAUSAL))
        if d < e:
            pairs.append(Pair(d, e - d, c, d - c, FULL))
    return pairs


def _halved_causal_pairs(a: int, e: int, size: int, least: int) -> list[Pair]:
    """Like `_causal_pairs`, with causal squares halved repeatedly, so that more of the work is in full rectangles.

    Forward kernels are slower on a large triangle, whose rows differ much in length, than on a rectangle and two small
    triangles; backward kernels are not. Rectangles of one size are one batched call; so are the triangles.
    """
    pairs = [pair for pair in _causal_pairs(a, e, size) if pair.mask == FULL]
    while size % 2 == 0 and size > max(1, least):
        half, count = size // 2, (e - a) // size
        pairs.append(Pair(a + half, half, a, half, FULL, count, size if count > 1 else 0))
        size = half
    count = (e - a) // size
    return [*pairs, Pair(a, size, a, size, CAUSAL, count, size if count > 1 else 0)]


def _full_pairs(a: int, e: int, k_start: int, k_stop: int, block_kv: int) -> list[Pair]:
    return [Pair(a, e - a, c, d - c, FULL) for c, d in _split_range(k_start, k_stop, block_kv)]


def _split_range(start: int, stop: int, block: int) -> Iterator[tuple[int, int]]:
    for a in range(start, stop, block):
        yield a, min(a + block, stop)
