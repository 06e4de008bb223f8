"""Which block pairs attention visits, and in what order: plain integers, no torch.

A **pair** is a run of query rows against a run of keys with one of three masks (i, j count from the pair's own
corner):

    full    every row sees every key
    causal  square, row i sees keys j <= i
    edge    square, row i sees keys j >= i: the far end of a sliding window. Read backwards (last row first, last
            key first) it *is* causal, so every kernel with a causal flag can do it.

A **group** is one block that owns fp32 accumulators, and all the pairs that add to it. `count` > 1 is the same
group again, `count` times, each `step` tokens further on: equal documents, or the blocks of a window, as one
batched kernel call. All positions are tokens of the packed sequence.

Two orders. Query-major: the owner is a run of query rows. Key-major: the owner is a run of keys. Key-major is the
query-major schedule of the reversed document with the parts of q and k exchanged (`_mirror`), masks unchanged.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

FULL, CAUSAL, EDGE = "full", "causal", "edge"


@dataclass(frozen=True, slots=True)
class Pair:
    """rows [q0, q0 + rows) against keys [k0, k0 + keys)."""

    q0: int
    rows: int
    k0: int
    keys: int
    mask: str


@dataclass(frozen=True, slots=True)
class Group:
    """The owner's run [start, start + length), repeated `count` times every `step` tokens, and its pairs."""

    start: int
    length: int
    pairs: tuple[Pair, ...]
    count: int = 1
    step: int = 0

    @property
    def stop(self) -> int:
        """One past the last token of the last repetition."""
        return self.start + (self.count - 1) * self.step + self.length


def query_major(
    docs: tuple[int, ...], *, causal: bool, window: int | None, block_q: int, block_kv: int
) -> Iterator[Group]:
    """Groups that own query rows, ascending. Every row of every document is owned exactly once."""
    for start, length, run in _runs(docs):
        groups = _document(length, causal, window, block_q, block_kv, alone=run == 1)
        yield from _repeat(groups, start, length, run, block_q)


def key_major(
    docs: tuple[int, ...], *, causal: bool, window: int | None, block_q: int, block_kv: int
) -> Iterator[Group]:
    """Groups that own keys, ascending. Every key of every document is owned exactly once."""
    for start, length, run in _runs(docs):
        groups = _document(length, causal, window, block_kv, block_q, alone=run == 1)
        mirrored = [_mirror(group, length) for group in reversed(groups)]
        yield from _repeat(mirrored, start, length, run, block_kv)


def _runs(docs: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """(start, length, how many neighbours of that length in a row); empty documents are left out."""
    spans = [(a, b - a) for a, b in zip(docs, docs[1:], strict=False) if b > a]
    for length, equal in groupby(spans, key=lambda span: span[1]):
        run = list(equal)
        yield run[0][0], length, len(run)


def _repeat(groups: list[Group], start: int, length: int, run: int, block: int) -> Iterator[Group]:
    """Equal documents side by side, as many per batched call as one block has tokens."""
    batch = max(1, block // length)
    for first in range(0, run, batch):
        count = min(batch, run - first)
        for group in groups:
            moved = _shift(group, start + first * length)
            yield replace(moved, count=count, step=length) if count > 1 else moved


def _document(
    length: int, causal: bool, window: int | None, block: int, other: int, *, alone: bool
) -> list[Group]:
    """Query-major groups of one document that starts at 0; `block` rows per owner, `other` keys per pair."""
    if not causal:
        return [_group(a, e, _full(a, e, 0, length, other)) for a, e in _cut(0, length, block)]
    if window is None or window >= length:
        return [_causal(a, e, other) for a, e in _cut(0, length, block)]
    # Rows below `window` see everything before them; only the rows after that have an edge.
    head = [_causal(a, e, other) for a, e in _cut(0, window, block)]
    return head + _bands(length, window, block, other, batched=alone)


def _bands(length: int, window: int, block: int, other: int, *, batched: bool) -> list[Group]:
    """Rows [window, length): a causal square, whole keys between, and an edge square `window` - 1 keys back.

    The band's rows are a power of two of at least half the window, so that the keys of neighbouring bands in one
    batched call never overlap (their gradients are added without atomics).
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
        return _group(a, e, _diagonal(a, e, other))
    edge = [Pair(a, rows, oldest, rows, EDGE)]
    return _group(a, e, edge + _full(a, e, oldest + rows, a, other) + _diagonal(a, e, other))


def _causal(a: int, e: int, other: int) -> Group:
    return _group(a, e, _full(a, e, 0, a, other) + _diagonal(a, e, other))


def _diagonal(a: int, e: int, other: int) -> list[Pair]:
    """Rows [a, e) against their own keys: causal squares of `other`, and the full rectangles below them."""
    pairs = []
    for c, d in _cut(a, e, other):
        pairs.append(Pair(c, d - c, c, d - c, CAUSAL))
        if d < e:
            pairs.append(Pair(d, e - d, c, d - c, FULL))
    return pairs


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


def _mirror(group: Group, length: int) -> Group:
    """The group that owns keys where `group` owned rows, in a document of `length` read from its end."""
    back = (group.count - 1) * group.step  # the last repetition becomes the first

    def flip(at: int, size: int) -> int:
        return length - at - size - back

    pairs = tuple(Pair(flip(p.k0, p.keys), p.keys, flip(p.q0, p.rows), p.rows, p.mask) for p in group.pairs)
    return replace(group, start=flip(group.start, group.length), pairs=pairs)
