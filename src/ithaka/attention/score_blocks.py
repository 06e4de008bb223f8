"""The score blocks that attention computes, planned in plain integers, without torch.

A **score block** is a block of the score matrix: a range of query rows and a range of keys, with
one of five masks (i and j count from the block's corner):

    full    every row attends to every key
    causal  square, row i attends to keys j <= i
    edge    square, row i attends to keys j >= i: the far end of a sliding window. With rows and
            keys reversed it is causal, so every kernel with a causal flag can compute it.
    window  the last row attends to the last `window` keys, and each earlier row to keys one
            further back: a complete sliding window, for kernels that support windows
    squares adjacent causal squares of `lengths` along the diagonal, for kernels that take short
            documents

A **query block** is a range of query rows and all its score blocks. `count` > 1 repeats either of
them `count` times, `step` tokens apart, in one batched kernel call: documents of equal length, the
bands of a window, the squares along a diagonal. A query block and its score blocks are never both
repeated. Query rows are numbered within this rank's rows; keys by their token in the packed
sequence, until `split_by_part` maps them to rows of k and v.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise
from operator import attrgetter, itemgetter
from typing import NamedTuple, Required, TypedDict, Unpack

FULL = "full"
CAUSAL = "causal"
EDGE = "edge"
WINDOW = "window"
SQUARES = "squares"
Range = tuple[int, int]  # [start, stop)


@dataclass(frozen=True, slots=True)
class ScoreBlock:
    """Rows [q0, q0 + rows) and keys [k0, k0 + keys), repeated `count` times every `step` tokens."""

    q0: int
    rows: int
    k0: int
    keys: int
    mask: str
    count: int = 1
    step: int = 0
    lengths: tuple[int, ...] = ()  # lengths of the documents in `squares`

    @property
    def last_key(self) -> int:
        """The end of the keys of all repetitions."""
        return self.k0 + self.keys + (self.count - 1) * self.step

    def move(self, rows: int, keys: int) -> "ScoreBlock":
        return replace(self, q0=self.q0 + rows, k0=self.k0 + keys)


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Rows [start, start + length) and their score blocks, repeated `count` times every `step`
    tokens."""

    start: int
    length: int
    score_blocks: tuple[ScoreBlock, ...]
    count: int = 1
    step: int = 0


class BlockOptions(TypedDict, total=False):
    """Options of `plan_query_blocks`."""

    causal: Required[bool]
    window: Required[int | None]
    block_q: Required[int]
    block_kv: Required[int]
    halve: bool
    call_tokens: int
    has_windows: bool


class DocumentSpan(NamedTuple):
    """Rows [first, last) of the document [start, start + length). Token t of the sequence is row
    t + shift."""

    start: int
    length: int
    first: int
    last: int
    shift: int

    @property
    def is_complete(self) -> bool:
        return self.last - self.first == self.length


def document_spans(
    docs: tuple[int, ...], runs: Sequence[tuple[int, int]] | None = None
) -> list[DocumentSpan]:
    """Return this rank's part of each document that is not empty. `docs`: cumulative starts.
    `runs`: this rank's rows as (first token, number of tokens), in order; None: all tokens."""
    spans = []
    row = 0
    for start, length in runs or [(0, docs[-1])]:
        stop = start + length
        i = bisect_right(docs, start) - 1
        while i + 1 < len(docs) and docs[i] < stop:
            a = docs[i]
            b = docs[i + 1]
            i += 1
            if a < b:
                first = max(a, start) - a
                spans.append(DocumentSpan(a, b - a, first, min(b, stop) - a, row - start))
        row += length
    return spans


def visible_keys(
    spans: Iterable[DocumentSpan], causal: bool, window: int | None
) -> list[tuple[int, int]]:
    """Return the keys that rows of incomplete documents attend to, this rank's own among them, as
    ascending (first token, number of tokens)."""
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
    """Split blocks by the part that holds their keys. `runs` ascend and cover all keys of the
    blocks. Rectangles that are adjacent in a part are joined and cut again into score blocks of
    about `block_kv` keys: a kernel takes as long for a few keys as for thousands."""
    parts: list[list[QueryBlock]] = [[] for _ in range(num_parts)]

    def run_at(token: int) -> int:
        return bisect_right(runs, token, key=attrgetter("first")) - 1

    for block in blocks:
        run = runs[run_at(min(scores.k0 for scores in block.score_blocks))]
        last_key = max(scores.k0 + scores.keys for scores in block.score_blocks)
        last_key += (block.count - 1) * block.step
        if block.count > 1 and last_key <= run.first + run.tokens:
            moved = tuple(scores.move(0, run.shift) for scores in block.score_blocks)
            parts[run.part].append(replace(block, score_blocks=moved))
            continue
        for offset in range(0, block.count * (block.step or 1), block.step or 1):
            by_part = defaultdict(list)
            for scores in block.score_blocks:
                scores = scores.move(offset, offset)
                run = runs[run_at(scores.k0)]
                if scores.last_key <= run.first + run.tokens:
                    by_part[run.part].append(scores.move(0, run.shift))
                    continue
                for repeat in range(0, scores.count * (scores.step or 1), scores.step or 1):
                    one = replace(scores.move(repeat, repeat), count=1, step=0)
                    for run in runs[run_at(one.k0) : run_at(one.last_key - 1) + 1]:
                        by_part[run.part] += _clip_to_range(one, run)
            for part, part_blocks in by_part.items():
                recut = tuple(_recut_rectangles(part_blocks, block_kv))
                parts[part].append(QueryBlock(block.start + offset, block.length, recut))
    return parts


def _recut_rectangles(score_blocks: list[ScoreBlock], block_kv: int) -> Iterator[ScoreBlock]:
    """Join full score blocks of the same rows and adjacent keys, and cut them into equal ones."""
    joined: list[ScoreBlock] = []
    for scores in score_blocks:
        last = joined[-1] if joined else replace(scores, rows=0)
        is_adjacent = last == replace(scores, k0=scores.k0 - last.keys, keys=last.keys)
        if scores.mask == FULL and scores.count == 1 and is_adjacent:
            joined[-1] = replace(last, keys=last.keys + scores.keys)
        else:
            joined.append(scores)
    for scores in joined:
        num_blocks = 1
        if scores.mask == FULL and scores.count == 1:
            # up to a quarter more keys than block_kv
            num_blocks = max(1, -(-4 * scores.keys // (5 * block_kv)))
        for i in range(num_blocks):
            a = i * scores.keys // num_blocks
            b = (i + 1) * scores.keys // num_blocks
            yield replace(scores, k0=scores.k0 + a, keys=b - a)


def _clip_to_range(scores: ScoreBlock, run: KeyRange) -> Iterator[ScoreBlock]:
    """Restrict a score block to the keys of a run. A square becomes a smaller square and a
    rectangle of the rows that attend to all of these keys."""
    c = max(0, run.first - scores.k0)
    d = min(scores.keys, run.first + run.tokens - scores.k0)
    k0 = scores.k0 + c + run.shift
    keys = d - c
    if scores.mask == FULL:
        yield ScoreBlock(scores.q0, scores.rows, k0, keys, FULL)
        return
    assert scores.mask in (CAUSAL, EDGE)
    yield ScoreBlock(scores.q0 + c, keys, k0, keys, scores.mask)
    first, last = (d, scores.rows) if scores.mask == CAUSAL else (0, c)
    if first < last:
        yield ScoreBlock(scores.q0 + first, last - first, k0, keys, FULL)


def plan_query_blocks(
    spans: list[DocumentSpan],
    *,
    causal: bool,
    window: int | None,
    block_q: int,
    block_kv: int,
    halve: bool = False,
    call_tokens: int = 0,
    has_windows: bool = False,
) -> Iterator[QueryBlock]:
    """Yield blocks of query rows. Every row of every span is in exactly one block.

    `halve`: split the squares on the diagonal (`_halved_causal_scores`). `call_tokens`: the most
    rows of a window, or tokens of equal documents, in one call, if above block_q. `has_windows`:
    the kernel supports the mask `window`.
    """
    most_rows = max(block_q, call_tokens)
    for equal in _group_equal_documents(spans):
        (start, length, top, last, shift) = equal[0]
        run = len(equal)
        if has_windows and window is not None and window < last:
            blocks = [_window_block(a, e, window) for a, e in _split_range(top, last, most_rows)]
        else:
            blocks = _plan_document(
                equal[0], causal, window, block_q, block_kv, halve, batch_bands=run == 1
            )
        # As many documents of equal length as fit into one batched call.
        nested = any(scores.count > 1 for block in blocks for scores in block.score_blocks)
        batch = 1 if nested else max(1, most_rows // length)
        for first in range(0, run, batch):
            count = min(batch, run - first)
            offset = start + first * length
            row = offset + shift
            for block in blocks:
                moved = tuple(scores.move(row, offset) for scores in block.score_blocks)
                block = replace(block, start=block.start + row, score_blocks=moved)
                yield replace(block, count=count, step=length) if count > 1 else block


# ---- forests: documents that continue others


class Branch(NamedTuple):
    """Tokens [start, stop), causal among themselves, that also attend to all keys of `path`: the
    `depth` tokens before them from the root on. A node and a child that follows it in the sequence
    are one branch."""

    start: int
    stop: int
    depth: int = 0
    trunk: "Branch | None" = None  # the branch that this one continues, from its start up to `fork`
    fork: int = 0

    @property
    def path(self) -> Iterator[Range]:
        """Ranges of keys, from the nearest to the root."""
        branch = self
        while branch.trunk is not None:
            yield branch.trunk.start, branch.fork
            branch = branch.trunk


def forest_branches(starts: Sequence[int], parents: Sequence[int]) -> list[Branch]:
    """Return the branches of a forest. `parents`: the index of each document's parent, or -1."""
    branches: list[Branch] = []
    branch_of: list[int] = []
    for node, parent in enumerate(parents):
        start = starts[node]
        stop = starts[node + 1]
        if parent >= 0 and starts[parent + 1] == start and branch_of[parent] == len(branches) - 1:
            branches[-1] = branches[-1]._replace(stop=stop)
        elif parent >= 0:
            trunk = branches[branch_of[parent]]
            fork = starts[parent + 1]
            if trunk.start < fork:
                branches.append(Branch(start, stop, trunk.depth + fork - trunk.start, trunk, fork))
            else:
                branches.append(trunk._replace(start=start, stop=stop))
        else:
            branches.append(Branch(start, stop))
        branch_of.append(len(branches) - 1)
    return [branch for branch in branches if branch.start < branch.stop]


def plan_branch_blocks(
    branches: Sequence[Branch], max_rows: int, short: int = 0, **options: Unpack[BlockOptions]
) -> list[QueryBlock]:
    """Return the blocks of all branches with a path. `short`: the longest square in a score block
    of `squares`.

    Without a window, all rows that attend to a key, also of several branches, do so in one score
    block per query block of `max_rows`: a kernel then sums the key's gradient over them.
    """
    inner = [branch for branch in branches if branch.depth]
    window = options["window"]
    longest = max((branch.depth + branch.stop - branch.start for branch in inner), default=0)
    if window is not None and window < longest:
        return list(chain(*(_plan_windowed_branch(branch, options) for branch in inner)))
    rows: list[Range] = []  # of each query block
    block_kv = options["block_kv"]
    for low, high in _merge_ranges((branch.start, branch.stop) for branch in inner):
        num_blocks = -(-(high - low) // min(max_rows, options["block_q"]))
        rows += _split_range(low, high, -(-(high - low) // num_blocks))
    score_blocks: list[list[ScoreBlock]] = [[] for _ in rows]
    squares: list[list[ScoreBlock]] = [[] for _ in rows]
    for low, high, first, last in _shared_ranges(inner):
        for number, a, e in _overlaps(rows, low, high):
            score_blocks[number] += _full_scores(a, e, first, last, block_kv)
    for branch in inner:
        for number, a, e in _overlaps(rows, branch.start, branch.stop):
            own = _full_scores(a, e, branch.start, a, block_kv) + _causal_scores(a, e, block_kv)
            score_blocks[number] += [scores for scores in own if scores.mask == FULL]
            squares[number] += [scores for scores in own if scores.mask == CAUSAL]
    return [
        QueryBlock(a, e - a, (*full, *_batch_squares(causal, short)))
        for (a, e), full, causal in zip(rows, score_blocks, squares, strict=True)
    ]


def _overlaps(ranges: list[Range], low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """Yield (index, start, stop) of the parts of [low, high) in `ranges`, ascending and apart."""
    for number in range(bisect_right(ranges, low, key=itemgetter(1)), len(ranges)):
        start, stop = ranges[number]
        if start >= high:
            return
        yield number, max(low, start), min(high, stop)


def _plan_windowed_branch(branch: Branch, options: BlockOptions) -> list[QueryBlock]:
    """Plan a branch as the end of a document, its path and itself, with keys in several ranges."""
    total = branch.depth + branch.stop - branch.start
    span = DocumentSpan(0, total, branch.depth, total, branch.start - branch.depth)
    window = options["window"]
    assert window is not None
    keys: list[KeyRange] = []
    depth = total
    for first, last in chain([branch[:2]], branch.path):
        depth -= last - first
        keys.append(KeyRange(depth, last - first, 0, first - depth))
        if depth <= branch.depth - window:
            break
    blocks = plan_query_blocks([span], **options | {"has_windows": False})
    return split_by_part(blocks, keys[::-1], 1, options["block_kv"])[0]


def _shared_ranges(branches: Sequence[Branch]) -> "list[MaskRange]":
    """Return rows and the keys on their paths: each key once, if its rows are consecutive."""
    # by the start of a trunk: its forks, and the rows behind each
    readers: dict[int, list[tuple[int, list[Range]]]] = {
        b.trunk.start: [] for b in branches if b.trunk is not None
    }
    for branch in reversed(branches):
        assert branch.trunk is not None
        rows = [(branch.start, branch.stop)]
        for _, behind in readers.get(branch.start, ()):
            rows += behind
        readers[branch.trunk.start].append((branch.fork, _merge_ranges(sorted(rows))))
    ranges: list[MaskRange] = []
    for first, forks in readers.items():
        merged: list[Range] = []
        levels: list[tuple[int, list[Range]]] = []
        forks.sort(key=itemgetter(0), reverse=True)
        for last, group in groupby(forks, key=itemgetter(0)):
            merged = _merge_ranges(sorted(chain(merged, *(rows for _, rows in group))))
            levels.append((last, merged))
        for last, merged in reversed(levels):
            ranges += [(a, b, first, last) for a, b in merged]
            first = last
    return ranges


def _merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Merge adjacent ranges, which must ascend."""
    merged: list[Range] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return merged


def _batch_squares(squares: list[ScoreBlock], short: int) -> Iterator[ScoreBlock]:
    """Batch adjacent causal squares: those of equal branches, then short ones of any length."""
    equal = []
    for rows, group in groupby(squares, key=lambda scores: scores.rows):
        first, *others = group
        equal.append(replace(first, count=1 + len(others), step=rows) if others else first)
    for is_short, group in groupby(equal, key=lambda scores: scores.rows <= short):
        first, *others = group
        if is_short and others:
            lengths = tuple(scores.rows for scores in (first, *others) for _ in range(scores.count))
            size = sum(lengths)
            yield ScoreBlock(first.q0, size, first.k0, size, SQUARES, lengths=lengths)
        else:
            yield from (first, *others)


MaskRange = tuple[int, int, int, int]  # rows [a, b) attend to keys [c, d)


def plan_range_blocks(
    ranges: Sequence[MaskRange], num_rows: int, block_q: int, block_kv: int
) -> list[QueryBlock]:
    """Return the blocks of a block mask. A row in no range is in a query block without score
    blocks."""
    edges = {0, num_rows}
    for a, b, _, _ in ranges:
        edges |= {a, b}
    rows = list(pairwise(sorted(edges)))
    keys: list[list[Range]] = [[] for _ in rows]
    for a, b, c, d in ranges:
        for number, _, _ in _overlaps(rows, a, b):
            keys[number].append((c, d))
    blocks = []
    for (low, high), visible in zip(rows, keys, strict=True):
        for a, e in _split_range(low, high, block_q):
            scores = (_full_scores(a, e, c, d, block_kv) for c, d in sorted(visible))
            blocks.append(QueryBlock(a, e - a, tuple(chain.from_iterable(scores))))
    return blocks


def split_short_documents(
    spans: list[DocumentSpan], *, short: int, block: int
) -> tuple[list[DocumentSpan], list[list[DocumentSpan]]]:
    """Return (documents for score blocks, chunks of short unequal documents for a varlen kernel).

    A chunk has at least two consecutive documents, complete on this rank, of at most `short` tokens
    each and `block` tokens together. Equal documents of `short` tokens in total use score blocks:
    batched, on a faster kernel.
    """
    blocked: list[DocumentSpan] = []
    chunks: list[list[DocumentSpan]] = []
    for equal in _group_equal_documents(spans):
        length = equal[0].length
        run = len(equal)
        if length > short or (run > 1 and run * length >= short) or not equal[0].is_complete:
            blocked += equal
            continue
        for span in equal:
            chunk = chunks[-1] if chunks else [span]
            end = chunk[-1].start + chunk[-1].length
            is_adjacent = end == span.start and chunk[-1].shift == span.shift
            if is_adjacent and span.start + length - chunk[0].start <= block:
                chunk.append(span)
            else:
                chunks.append([span])
    blocked += [chunk[0] for chunk in chunks if len(chunk) == 1]
    return sorted(blocked), [chunk for chunk in chunks if len(chunk) > 1]


def _group_equal_documents(spans: list[DocumentSpan]) -> Iterator[list[DocumentSpan]]:
    """Group consecutive documents of equal length. An incomplete document forms its own group."""

    def key(numbered: tuple[int, DocumentSpan]) -> tuple[int, ...]:
        i, span = numbered
        return span.start - i * span.length, *span[1:]

    for _, equal in groupby(enumerate(spans), key):
        yield [span for _, span in equal]


def _plan_document(
    span: DocumentSpan,
    causal: bool,
    window: int | None,
    block_q: int,
    block_kv: int,
    halve: bool,
    *,
    batch_bands: bool,
) -> list[QueryBlock]:
    """Return the query blocks of a document, relative to its start: up to `block_q` rows,
    `block_kv` keys per block."""
    _, length, first, last, _ = span
    windowed = causal and window is not None and window < last
    if span.is_complete and length <= min(block_q, block_kv) and not windowed:
        scores = ScoreBlock(0, length, 0, length, CAUSAL if causal else FULL)
        return [QueryBlock(0, length, (scores,))]
    if not causal:
        return [
            QueryBlock(a, e - a, tuple(_full_scores(a, e, 0, length, block_kv)))
            for a, e in _split_range(first, last, block_q)
        ]
    if not windowed:
        return [_causal_block(a, e, block_kv, halve) for a, e in _split_range(first, last, block_q)]
    assert window is not None
    # Rows below `window` attend to all earlier keys; only later rows have an edge.
    head = [_causal_block(a, e, block_kv, False) for a, e in _split_range(first, window, block_q)]
    first = max(first, window)
    return head + _plan_bands(first, last, window, block_q, block_kv, batched=batch_bands)


def _window_block(a: int, e: int, window: int) -> QueryBlock:
    oldest = max(0, a - window + 1)
    return QueryBlock(a, e - a, (ScoreBlock(a, e - a, oldest, e - oldest, WINDOW),))


def _plan_bands(
    first: int, last: int, window: int, block_q: int, block_kv: int, *, batched: bool
) -> list[QueryBlock]:
    """Rows [first, last), first >= window: a causal square, full blocks, and an edge square
    `window` - 1 keys back.

    A band has a power of two of rows, at least half the window, so that keys of bands in one
    batched call do not overlap: their gradients are added without atomics.
    """
    rows = 1
    if window > 2:
        rows = 1 << (min(window - 1, block_q).bit_length() - 1)
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
    rows = e - a
    oldest = a - window + 1
    edge = [ScoreBlock(a, rows, oldest, rows, EDGE)] if window > 1 else []
    full = _full_scores(a, e, oldest + rows, a, block_kv)
    return QueryBlock(a, rows, (*edge, *full, *_causal_scores(a, e, block_kv)))


def _causal_block(a: int, e: int, block_kv: int, halve: bool) -> QueryBlock:
    size = min(e - a, block_kv)
    if halve and (e - a) % size == 0:
        diagonal = _halved_causal_scores(a, e, size, block_kv // 8)
    else:
        diagonal = _causal_scores(a, e, block_kv)
    return QueryBlock(a, e - a, (*_full_scores(a, e, 0, a, block_kv), *diagonal))


def _causal_scores(a: int, e: int, size: int) -> list[ScoreBlock]:
    """Rows and keys [a, e): causal squares along the diagonal, full rectangles below them."""
    score_blocks = []
    for c, d in _split_range(a, e, size):
        score_blocks.append(ScoreBlock(c, d - c, c, d - c, CAUSAL))
        if d < e:
            score_blocks.append(ScoreBlock(d, e - d, c, d - c, FULL))
    return score_blocks


def _halved_causal_scores(a: int, e: int, size: int, least: int) -> list[ScoreBlock]:
    """Like `_causal_scores`, with causal squares halved repeatedly, so that more of the work is in
    full rectangles.

    Forward kernels are slower on a large triangle than on a rectangle and two small triangles;
    backward kernels are not. Rectangles of one size are one batched call; so are the triangles.
    """
    score_blocks = [scores for scores in _causal_scores(a, e, size) if scores.mask == FULL]
    count = (e - a) // size
    while size % 2 == 0 and size > max(1, least):
        half = size // 2
        step = size if count > 1 else 0
        score_blocks.append(ScoreBlock(a + half, half, a, half, FULL, count, step))
        size = half
        count *= 2
    step = size if count > 1 else 0
    return [*score_blocks, ScoreBlock(a, size, a, size, CAUSAL, count, step)]


def _full_scores(a: int, e: int, k_start: int, k_stop: int, block_kv: int) -> list[ScoreBlock]:
    return [
        ScoreBlock(a, e - a, c, d - c, FULL) for c, d in _split_range(k_start, k_stop, block_kv)
    ]


def _split_range(start: int, stop: int, block: int) -> Iterator[tuple[int, int]]:
    for a in range(start, stop, block):
        yield a, min(a + block, stop)
