"""Deal the tokens of a sequence to the members of a ring: equal tokens, and about equal attention.

A document goes to one member, longest document first, each to the member with the least so far. A long document is
cut: every member takes a piece of its front and a piece of its back, which together have the document's average
attention per token. A single causal document is thus dealt in a zigzag.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

# Documents with more than this fraction of a member's attention are cut. Tried in this order.
CUT_THRESHOLDS = (1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 0.0)
MAX_IMBALANCE = 1.05

TokenRange = tuple[int, int]  # first token, number of tokens


@dataclass(frozen=True)
class Deal:
    members: tuple[tuple[TokenRange, ...], ...]  # tokens of each member, ascending
    balance: float = 1.0  # causal query-key pairs of the busiest member over the mean, ignoring windows

    @cached_property
    def num_tokens(self) -> int:
        return sum(length for ranges in self.members for _, length in ranges)

    @cached_property
    def in_order(self) -> list[TokenRange]:
        """(row, length) of each range in sequence order, for rows concatenated member by member."""
        placed, row = [], 0
        for start, length in (token_range for ranges in self.members for token_range in ranges):
            placed.append((start, row, length))
            row += length
        return [(row, length) for _, row, length in sorted(placed)]


def contiguous_deal(num_tokens: int, ring: int) -> Deal:
    size = num_tokens // ring
    return Deal(tuple(((member * size, size),) for member in range(ring)))


def deal_tokens(starts: Sequence[int], ring: int, ulysses: int) -> Deal:
    """The balanced deal that cuts fewest documents, or the best balanced one.

    `starts`: cumulative starts of documents, (0, ..., S). Tokens from S to a multiple of ring * ulysses are padding.
    """
    size = -(-starts[-1] // (ring * ulysses)) * ulysses
    if ring == 1:
        return contiguous_deal(size, 1)
    best: Deal | None = None
    for threshold in CUT_THRESHOLDS:
        deal = _deal_documents(starts, ring, size, threshold)
        best = deal if best is None or deal.balance < best.balance else best
        if best.balance <= MAX_IMBALANCE:
            break
    assert best is not None
    return best


def causal_pairs(rows: int) -> int:
    """Query-key pairs of a document's first `rows` tokens."""
    return rows * (rows + 1) // 2


def _deal_documents(starts: Sequence[int], ring: int, size: int, threshold: float) -> Deal:
    documents = sorted((a - b, a) for a, b in pairwise(starts))  # longest first
    mean = max(1.0, sum(causal_pairs(-length) for length, _ in documents) / ring)
    members: list[list[TokenRange]] = [[] for _ in range(ring)]
    rooms, pairs, unplaced = [size] * ring, [0] * ring, []

    def take(member: int, start: int, length: int, depth: int) -> None:
        """`depth`: tokens of the document before `start`."""
        if length:
            members[member].append((start, length))
            rooms[member] -= length
            pairs[member] += causal_pairs(depth + length) - causal_pairs(depth)

    def cut(start: int, length: int) -> None:
        front, back = start, start + length
        for member, share in enumerate(_shares(length, rooms)):
            take(member, front, -(-share // 2), front - start)
            front += -(-share // 2)
            back -= share // 2
            take(member, back, share // 2, back - start)

    for negative, start in documents:
        length = -negative
        if causal_pairs(length) > threshold * mean:
            cut(start, length)
            continue
        with_room = [member for member in range(ring) if rooms[member] >= length]
        if with_room:
            # Use up tokens and attention at the same pace.
            take(min(with_room, key=lambda m: pairs[m] / mean - rooms[m] / size), start, length, 0)
        else:
            unplaced.append((start, length))
    for start, length in unplaced:
        cut(start, length)
    padding = starts[-1]
    for member, room in enumerate(tuple(rooms)):
        members[member] += [(padding, room)] if room else []
        padding += room
    merged = tuple(tuple(_merge(sorted(ranges))) for ranges in members)
    return Deal(merged, max(pairs) * ring / max(1, sum(pairs)))


def _shares(length: int, rooms: Sequence[int]) -> Iterator[int]:
    """Divide `length` in proportion to the rooms."""
    before, room = 0, sum(rooms)
    for own in rooms:
        yield (before + own) * length // room - before * length // room
        before += own


def _merge(ranges: Sequence[TokenRange]) -> Iterator[TokenRange]:
    """Merge adjacent ranges."""
    start, length = ranges[0]
    for following, more in ranges[1:]:
        if following == start + length:
            length += more
        else:
            yield start, length
            start, length = following, more
    yield start, length
